"""Judge the wheels of a resolution where they lie, so that a lock never holds one that would not load.

Every wheel's list of files is read, and the tables of every shared object that could need torch; a few
megabytes instead of the gigabytes that the wheels have. Only a torch build that the index of exports does not
know is fetched whole, once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bringup import torch_index, torch_reader, wheels
from bringup.abi import Distribution, TorchIndex, Verdict, judge, release_of
from bringup.locking.checks import Contents
from bringup.locking.resolve import ResolvedFile, ResolvedPlatform
from bringup.locking.wheels import Judgement
from bringup.package_index import Sources
from bringup.stack import Stack
from bringup.torch_index import CudaWheel, IndexedTorch
from bringup.wheels import Archive, Offer, WheelReader, read_wheel, text_of

_AT_ONCE = 4
# What torch stands on needs nothing of torch, and its libraries are the largest there are.
_NOT_GUARDED = re.compile(r"torch|triton|nvidia-.+|cuda-.+|pytorch-triton.*")


@dataclass(frozen=True)
class _Look:
    """What one wheel lays down, and its shared objects where they count."""

    contents: Contents
    distribution: Distribution | None = None


class WheelGuard:
    """Judge resolutions: pass it to `bringup.locking.lock_wheels`. What was read serves every platform.

    A torch that the index of exports does not know is added to it, unless it shall not be kept: a look-alike of a
    lab must never tell what a real torch has.
    """

    def __init__(
        self, sources: Sources, say: Callable[[str], None] = lambda _: None, *, keeps_torch: bool = True
    ) -> None:
        self._sources = sources
        self._say = say
        self._keeps_torch = keeps_torch
        self._unkept: dict[str, IndexedTorch] = {}
        self._known: dict[str, _Look] = {}
        self._counting = Lock()
        self.fetched_bytes = 0

    def __call__(self, stack: Stack, resolved: ResolvedPlatform) -> Judgement:
        """Judge every wheel of one platform beside its torch.

        Raises BringupError when a wheel cannot be read: a lock holds no file that nobody could judge.
        """
        with wheels.reader(self._sources, self._say) as reader:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                looks = list(pool.map(lambda file: self._look(reader, file), resolved.files))
            by_file = {file.locked.file: look for file, look in zip(resolved.files, looks, strict=True)}
            contents = {file.locked.distribution: by_file[file.locked.file].contents for file in resolved.files}
            guarded = {
                file: look.distribution
                for file, look in by_file.items()
                if look.distribution is not None and look.distribution.uses_torch
            }
            torch = next((file for file in resolved.files if file.locked.distribution == "torch"), None)
            if torch is None or not guarded:
                return Judgement(contents)
            machine = resolved.platform.rpartition("-")[2]
            index = TorchIndex(torch_index.known_builds(), machine)
            build = self._known_build(torch, by_file[torch.locked.file].contents, index)
            if build is None:
                build = self._read_build(reader, torch, _cuda_wheels(resolved, contents))
        release = release_of(build)
        verdicts = {}
        for file, distribution in guarded.items():
            accepted = replace(distribution, is_optional=_is_optional(stack, distribution.name))
            verdicts[file] = judge(accepted, release, catalogue=index.catalogue_with(release))
        return Judgement(
            contents,
            {file: said(verdict) for file, verdict in verdicts.items()},
            frozenset(file for file, verdict in verdicts.items() if verdict.is_refused),
        )

    def _look(self, reader: WheelReader, file: ResolvedFile) -> _Look:
        known = self._known.get(file.locked.sha256)
        if known is None:
            known = self._known[file.locked.sha256] = self._read(reader, file)
        return known

    def _read(self, reader: WheelReader, file: ResolvedFile) -> _Look:
        name = file.locked.distribution
        with reader.open_offer(_offer(file)) as source:
            facts = read_wheel(source, file.locked.file, is_guarded=_NOT_GUARDED.fullmatch(name) is None)
            cuda = _torch_cuda(Archive(source)) if name == "torch" else None
            with self._counting:
                self.fetched_bytes += source.fetched_bytes
        return _Look(Contents(facts.record, cuda), facts.distribution if facts.distribution.files else None)

    def _known_build(self, torch: ResolvedFile, contents: Contents, index: TorchIndex) -> IndexedTorch | None:
        """Return the exports of the locked torch: of that very wheel, or of the same build for another Python.

        Between Pythons only libtorch_python differs, and there only in what no extension uses. None: not known.
        """
        for build in index.builds:
            if build.sha256 == torch.locked.sha256:
                return build
        for build in index.builds:
            is_same = Version(build.version).public == Version(torch.locked.version).public
            if is_same and build.sha256 and build.cuda == contents.torch_cuda:
                return build
        return self._unkept.get(torch.locked.sha256)

    def _read_build(self, reader: WheelReader, torch: ResolvedFile, cuda_wheels: tuple[CudaWheel, ...]) -> IndexedTorch:
        """Return the exports of a torch that has to be fetched.

        What is kept for all locks brings the CUDA wheels that it requires, anything else those of this resolution.
        """
        self._say(f"the index of exports does not know {torch.locked.file}: reading it once")
        beside = None if self._keeps_torch else cuda_wheels
        build = torch_reader.index_offer(reader, _offer(torch), cuda_wheels=beside, say=self._say)
        if self._keeps_torch:
            torch_index.add(build)
        else:
            self._unkept[torch.locked.sha256] = build
        return build


def _cuda_wheels(resolved: ResolvedPlatform, contents: Mapping[str, Contents]) -> tuple[CudaWheel, ...]:
    """Return NVIDIA's wheels of a resolution with the shared objects in them."""
    found = []
    for file in resolved.files:
        if file.locked.distribution.startswith("nvidia-"):
            names = {path.rsplit("/", 1)[-1] for path in contents[file.locked.distribution].files}
            libraries = tuple(sorted(name for name in names if torch_reader.is_shared(name)))
            found.append(CudaWheel(file.locked.file, file.locked.sha256, libraries))
    return tuple(found)


def said(verdict: Verdict) -> str:
    """Return what a lock says of a wheel: its level; of a refused one also why, and which torch would fit."""
    if not verdict.is_refused:
        return verdict.level.value
    return f"{verdict.level.value}: {verdict.summary}"


def _torch_cuda(archive: Archive) -> str | None:
    return torch_reader.assigned(text_of(archive, "torch/version.py") or "", "cuda")


def _offer(file: ResolvedFile) -> Offer:
    locked = file.locked
    return Offer(
        locked.distribution,
        Version(locked.version),
        locked.file,
        file.url,
        sha256=locked.sha256,
        size_bytes=locked.size_bytes or None,
    )


def _is_optional(stack: Stack, name: str) -> bool:
    return any(
        step.optional and canonicalize_name(Requirement(text).name) == canonicalize_name(name)
        for step in stack.python.steps
        for text in step.requirements
    )
