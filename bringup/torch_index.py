"""The index of torch exports: which names each torch release has, and which CUDA libraries it brings.

One file travels with bringup and answers without a network. A person adds a nightly, another CUDA build or an
installed torch; those lie in the state directory, one file each. Names are kept, not hashes: a finding has to
say them, and a hash packs worse than the names that it replaces.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from bringup import paths
from bringup.abi import TorchRelease, brought_libraries
from bringup.errors import BringupError, InputError
from bringup.locking.compile import Compiler, Project, best_wheel
from bringup.locking.settings import Sources
from bringup.wheels import Archive, Offer, Source, WheelReader, machine_of, metadata_of, open_source, text_of

SHIPPED = "torch_exports.json.xz"
"""The index that travels with bringup, in its data directory."""

MAX_INDEX_BYTES = 512 << 20
_IN_MEMORY_BYTES = 64 << 20

_LIBRARY = re.compile(r"torch/lib/([^/]+\.so(?:\.\d+)*)")
_SHARED = re.compile(r"\.so(\.\d+)*\Z")
# These two load the rest; see torch/__init__.py and torch/lib of 2.8 to 2.15.
_LOADED_FIRST = ("libtorch_global_deps.so", "libtorch_python.so")


@dataclass(frozen=True)
class CudaWheel:
    """A wheel that a torch requires for CUDA, and the names of the shared objects in it."""

    file: str
    sha256: str
    libraries: tuple[str, ...]


@dataclass(frozen=True)
class IndexedTorch:
    """One torch build as the index holds it.

    ``file`` is the wheel it was read from with its ``sha256``; for an installed torch ``file`` is its place
    and ``sha256`` empty. ``python`` is the minor version of the build; only libtorch_python depends on it.
    """

    version: str
    cuda: str | None
    machine: str
    python: str
    file: str
    sha256: str
    size_bytes: int
    cuda_wheels: tuple[CudaWheel, ...]
    needed: Mapping[str, tuple[str, ...]]
    exports: Mapping[str, frozenset[str]] = field(repr=False)

    @property
    def public(self) -> str:
        """Return the version without its local label."""
        return self.version.split("+")[0]

    @property
    def brings(self) -> frozenset[str]:
        """Return the CUDA sonames in a process after `import torch`, as far as its CUDA wheels hold them."""
        loaded: set[str] = set()
        pending = list(_LOADED_FIRST)
        while pending:
            name = pending.pop()
            if name not in loaded:
                loaded.add(name)
                pending += self.needed.get(name, ())
        held = {name for wheel in self.cuda_wheels for name in wheel.libraries}
        return brought_libraries(loaded, self.cuda) & held

    def release(self) -> TorchRelease:
        """Return this build as a torch side for the guard."""
        return TorchRelease(self.version, self.cuda, self.exports, self.needed, self.brings)


class TorchIndex:
    """The known torch builds of one machine, oldest first."""

    def __init__(self, builds: Iterable[IndexedTorch], machine: str = "x86_64") -> None:
        self.machine = machine
        self.builds = tuple(sorted((b for b in builds if b.machine == machine), key=lambda b: _order(b.version)))
        self._releases = {build.version: build.release() for build in self.builds}

    @property
    def catalogue(self) -> tuple[TorchRelease, ...]:
        """Return every known build, by which the guard tells what fits; of each version one, for CUDA if there is."""
        chosen: dict[str, IndexedTorch] = {}
        for build in sorted(self.builds, key=lambda build: build.cuda is None):
            chosen.setdefault(build.public, build)
        return tuple(self._releases[build.version] for build in self.builds if chosen[build.public] is build)

    def catalogue_with(self, release: TorchRelease) -> tuple[TorchRelease, ...]:
        """Return every known build, ``release`` standing for its version."""
        public = release.version.split("+")[0]
        others = [known for known in self.catalogue if known.version.split("+")[0] != public]
        return tuple(sorted([*others, release], key=lambda known: _order(known.version)))

    def find(self, wanted: str) -> TorchRelease:
        """Return a build by its version: ``2.9.1+cu130`` that very one, ``2.9.1`` any, ``2.9`` the newest of it.

        Raises InputError when the index has none.
        """
        build = self.get(wanted)
        if build is None:
            have = ", ".join(b.version for b in self.builds)
            raise InputError(
                f"the index of exports does not have torch {wanted} for {self.machine}",
                why=f"it has {have or 'none'}",
                hint=f"add it with `bringup abi index torch=={wanted}`",
            )
        return self._releases[build.version]

    def get(self, wanted: str) -> IndexedTorch | None:
        """Return a build as `find` does, None when the index has none."""
        wanted = wanted.removeprefix("torch==").strip()
        for build in self.builds:
            if wanted == build.version:
                return build
        if "+" in wanted:
            return None
        for build in self.builds:
            if wanted == build.public:
                return build
        if re.fullmatch(r"\d+\.\d+", wanted):
            fitting = [b for b in self.builds if b.public.startswith(wanted + ".")]
            return fitting[-1] if fitting else None
        return None


def load(machine: str = "x86_64") -> TorchIndex:
    """Return the shipped index with what was added on this machine; raises InputError for a damaged file."""
    return TorchIndex([*_shipped(), *(build for file in added_files() for build in read_index(file))], machine)


@cache
def _shipped() -> tuple[IndexedTorch, ...]:
    file = paths.data() / SHIPPED
    return read_index(file) if file.is_file() else ()


def added_files() -> list[Path]:
    """Return the files that were added on this machine."""
    return sorted(_added_directory().glob("*.json.xz"))


def _added_directory() -> Path:
    return paths.state_dir() / "torch-index"


def add(build: IndexedTorch) -> Path:
    """Keep a build in the state directory and return its file; a build of the same version is replaced."""
    directory = _added_directory()
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"torch-{build.version}-{build.machine}.json.xz"
    write_index(target, [build])
    return target


def write_index(target: Path, builds: Sequence[IndexedTorch]) -> None:
    """Write builds into one file, whole or not at all; equal builds give equal bytes."""
    data = pack(builds)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        part = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            part.chmod(0o644)
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def read_index(file: Path) -> tuple[IndexedTorch, ...]:
    """Return the builds in a file; raises InputError when it is no index of exports."""
    try:
        return unpack(file.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, lzma.LZMAError) as error:
        raise InputError(
            f"{file} is no index of torch exports", why=str(error), hint="remove it and make it again"
        ) from None


def pack(builds: Sequence[IndexedTorch]) -> bytes:
    """Return builds as the bytes of an index file.

    Most names stay from release to release. So each name stands once, in a group for the set of builds that
    have it: the group's key has bit n set for the n-th build.
    """
    ordered = sorted(builds, key=lambda build: (_order(build.version), build.machine))
    masks: dict[str, dict[str, int]] = {}
    for number, build in enumerate(ordered):
        for library, names in build.exports.items():
            known = masks.setdefault(library, {})
            for name in names:
                known[name] = known.get(name, 0) | 1 << number
    groups: dict[str, dict[str, list[str]]] = {}
    for library in sorted(masks):
        for name in sorted(masks[library]):
            groups.setdefault(library, {}).setdefault(format(masks[library][name], "x"), []).append(name)
    document = {
        "schema": 1,
        "builds": [
            {
                "version": build.version,
                "cuda": build.cuda,
                "machine": build.machine,
                "python": build.python,
                "file": build.file,
                "sha256": build.sha256,
                "size_bytes": build.size_bytes,
                "cuda_wheels": [[w.file, w.sha256, list(w.libraries)] for w in build.cuda_wheels],
                "needed": {library: list(names) for library, names in sorted(build.needed.items())},
            }
            for build in ordered
        ],
        "exports": {
            library: {mask: "\n".join(names) for mask, names in sorted(found.items())}
            for library, found in groups.items()
        },
    }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True)
    return lzma.compress(text.encode(), preset=9)


def unpack(data: bytes) -> tuple[IndexedTorch, ...]:
    """Return the builds in the bytes of an index file; raises ValueError and its like for anything else."""
    text = lzma.LZMADecompressor(memlimit=256 << 20).decompress(data, MAX_INDEX_BYTES)
    document = json.loads(text)
    if document["schema"] != 1:
        raise ValueError(f"schema {document['schema']}, wanted 1")
    parts: list[dict[str, list[list[str]]]] = [{} for _ in document["builds"]]
    for library, groups in document["exports"].items():
        for mask, joined in groups.items():
            names, bits = joined.split("\n"), int(mask, 16)
            for number, found in enumerate(parts):
                if bits >> number & 1:
                    found.setdefault(library, []).append(names)
    return tuple(_build(entry, found) for entry, found in zip(document["builds"], parts, strict=True))


def _build(entry: Mapping[str, Any], found: Mapping[str, list[list[str]]]) -> IndexedTorch:
    needed = {library: tuple(names) for library, names in entry["needed"].items()}
    return IndexedTorch(
        version=entry["version"],
        cuda=entry["cuda"],
        machine=entry["machine"],
        python=entry["python"],
        file=entry["file"],
        sha256=entry["sha256"],
        size_bytes=entry["size_bytes"],
        cuda_wheels=tuple(CudaWheel(file, sha256, tuple(names)) for file, sha256, names in entry["cuda_wheels"]),
        needed=needed,
        exports={library: frozenset().union(*found.get(library, [])) for library in needed},
    )


def _order(version: str) -> tuple[Version, str]:
    try:
        return Version(version), version
    except InvalidVersion:
        return Version("0"), version


# ---------------------------------------------------------------------------------------------------------
# Making it.


def index_torch(
    reader: WheelReader, what: str, platform: str, *, say: Callable[[str], None] = lambda _: None
) -> IndexedTorch:
    """Read a torch wheel: a requirement such as ``torch==2.10.0``, or a path or address that ends in .whl.

    A wheel of an index is fetched once, whole, its hash tested, and nothing of it is kept: almost all of it are
    the two libraries whose names count, so ranges would save little. Raises InputError when there is no such
    wheel or its CUDA wheels cannot be resolved, BringupError when it cannot be had or is no torch.
    """
    if what.endswith(".whl"):
        with reader.opened(what, platform) as (source, file):
            return index_wheel(reader.http, source, file, sha256_of(source), reader.sources, say=say)
    offer = reader.indexes.find(what, platform)
    return index_offer(reader, offer, say=say)


def index_offer(
    reader: WheelReader,
    offer: Offer,
    *,
    cuda_wheels: Sequence[CudaWheel] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> IndexedTorch:
    """Read a torch wheel of an index, as `index_torch` does.

    ``cuda_wheels`` are the ones that will be beside it; None: those that its requirements lead to.
    """
    say(f"fetching {offer.file}" + (f", {offer.size_bytes / 1e6:.0f} MB" if offer.size_bytes else ""))
    with reader.open_offer(offer, whole=True) as source:
        sha256 = offer.sha256 or sha256_of(source)
        return index_wheel(reader.http, source, offer.file, sha256, reader.sources, cuda_wheels=cuda_wheels, say=say)


def sha256_of(source: Source) -> str:
    """Return the hash of all bytes of a source."""
    digest = hashlib.sha256()
    for start in range(0, source.size_bytes, 8 << 20):
        digest.update(source.read(start, min(8 << 20, source.size_bytes - start)))
    return digest.hexdigest()


def index_wheel(
    http: httpx.Client,
    source: Source,
    file: str,
    sha256: str,
    sources: Sources,
    *,
    cuda_wheels: Sequence[CudaWheel] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> IndexedTorch:
    """Read a torch wheel out of any source of bytes. Raises as `index_torch` does."""
    try:
        name, version, _, tags = parse_wheel_filename(file)
    except InvalidWheelFilename as error:
        raise InputError(f"not a wheel: {file}", why=str(error)) from None
    machine = machine_of(file)
    if name != "torch" or machine is None:
        raise InputError(f"{file} is no torch for Linux")
    archive = Archive(source)
    metadata = metadata_of(archive, name, version)
    text = text_of(archive, "torch/version.py") or ""
    full = assigned(text, "__version__")
    if full is None or Version(full).public != version.public:
        raise BringupError(f"{file} is not what it is called", why=f"torch/version.py says {full}")
    python = min((tag.interpreter.removeprefix("cp") for tag in tags), key=len)
    needed, exports = _libraries(archive, say)
    if cuda_wheels is None:
        requirements = [line for line in metadata.get("requires_dist", ()) if _is_cuda(line)]
        cuda_wheels = _cuda_wheels(http, requirements, f"cp{python}-{machine}", sources, full)
    say(f"torch {full}: {sum(map(len, exports.values()))} names in {len(exports)} libraries")
    return IndexedTorch(
        version=full,
        cuda=assigned(text, "cuda"),
        machine=machine,
        python=f"{python[0]}.{python[1:]}",
        file=file,
        sha256=sha256,
        size_bytes=source.size_bytes,
        cuda_wheels=tuple(cuda_wheels),
        needed=needed,
        exports=exports,
    )


def index_installed(site: Path) -> IndexedTorch:
    """Read the torch that is installed in a site-packages directory; raises InputError when there is none."""
    probe = paths.host_script("abi_probe")
    version_file = site / "torch" / "version.py"
    text = version_file.read_text(encoding="utf-8") if version_file.is_file() else ""
    version = assigned(text, "__version__")
    if version is None:
        raise InputError(f"no torch is installed in {site}")
    needed, exports, machine = {}, {}, ""
    for path in sorted((site / "torch" / "lib").iterdir()):
        if _SHARED.search(path.name) and path.is_file():
            try:
                elf = probe.read_file(str(path))
            except (probe.ElfError, OSError) as error:
                raise BringupError(f"cannot read {path}", why=str(error)) from None
            needed[path.name], exports[path.name], machine = elf.needed, frozenset(elf.exports), elf.machine
    wheels = [
        CudaWheel(str(folder.relative_to(site)), "", tuple(sorted(p.name for p in folder.iterdir() if p.is_file())))
        for folder in sorted(site.glob("nvidia/*/lib"))
    ]
    match = re.search(r"/python(3\.\d+)/", str(site))
    return IndexedTorch(
        version, assigned(text, "cuda"), machine, match[1] if match else "", str(site), "", 0,
        tuple(wheels), needed, exports,
    )  # fmt: skip


def _libraries(
    archive: Archive, say: Callable[[str], None]
) -> tuple[dict[str, tuple[str, ...]], dict[str, frozenset[str]]]:
    probe = paths.host_script("abi_probe")
    needed, exports = {}, {}
    for member in archive.members:
        match = _LIBRARY.fullmatch(member.path)
        if match is None:
            continue
        try:
            if member.size_bytes <= _IN_MEMORY_BYTES:
                elf = probe.read_bytes(archive.read(member, _IN_MEMORY_BYTES))
            else:
                say(f"reading {member.name}, {member.size_bytes / 1e6:.0f} MB")
                with archive.unpacked(member) as path:
                    elf = probe.read_file(str(path))
        except probe.ElfError as error:
            raise BringupError(f"{archive.source.name}: cannot read {member.path}", why=str(error)) from None
        needed[match[1]], exports[match[1]] = elf.needed, frozenset(elf.exports)
    if "libtorch_cpu.so" not in exports:
        raise BringupError(f"{archive.source.name} holds no torch/lib/libtorch_cpu.so")
    return needed, exports


def _cuda_wheels(
    http: httpx.Client, requirements: Sequence[str], platform: str, sources: Sources, version: str
) -> tuple[CudaWheel, ...]:
    """Return the CUDA wheels that a torch's requirements lead to, each with the libraries in it."""
    if not requirements:
        return ()
    with tempfile.TemporaryDirectory(prefix="bringup-index-") as directory:
        compiler = Compiler(platform, sources, Path(directory))
        answers = compiler.answers(Project(list(requirements)), what=f"the CUDA wheels of torch {version}")
    found = []
    for answer in sorted(answers, key=lambda a: a.name):
        wheel = best_wheel(answer.wheels, platform)
        if wheel is None:
            raise BringupError(f"no wheel of {answer.name} {answer.version} for {platform}")
        login = sources.login(wheel.url)
        with open_source(
            http, wheel.url, login=login, size_bytes=wheel.size_bytes or None, sha256=wheel.sha256
        ) as source:
            names = {m.name for m in Archive(source).members if _SHARED.search(m.name)}
        found.append(CudaWheel(wheel.file, wheel.sha256, tuple(sorted(names))))
    return tuple(found)


def is_shared(name: str) -> bool:
    """Return whether a file name is that of a shared object, with or without numbers behind."""
    return _SHARED.search(name) is not None


def _is_cuda(requirement: str) -> bool:
    """Return whether a line of Requires-Dist asks for NVIDIA's CUDA libraries, without an extra of torch."""
    try:
        parsed = Requirement(requirement)
    except InvalidRequirement:
        return False
    name = canonicalize_name(parsed.name)
    return (name.startswith("nvidia-") or name == "cuda-toolkit") and "extra" not in str(parsed.marker or "")


def assigned(text: str, name: str) -> str | None:
    """Return what torch/version.py assigns to a name, None when it is no string."""
    match = re.search(rf"(?m)^{name}\s*(?::[^=\n]*)?=\s*['\"]([^'\"]+)['\"]", text)
    return match[1] if match else None
