"""Resolve the steps of a stack with uv, each on top of everything the earlier ones fixed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import tomlkit
import uv
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from bringup.errors import BringupError, InputError
from bringup.locking.settings import DefaultIndex, Source, credentials, default_index
from bringup.stack import Index, LockedFile, LockedPlatform, LockedStep, Stack, Step

PLATFORMS = tuple(f"cp3{minor}-{machine}" for minor in (11, 12, 13) for machine in ("x86_64", "aarch64"))
"""Every platform a lock may hold."""

GLIBC = (2, 36)
"""The oldest glibc a locked wheel may ask for: that of Debian 12, the oldest release bringup supports."""

_PLATFORM = re.compile(r"cp3(\d{2})-(x86_64|aarch64)")
# What uv may see of our environment. Stray UV_* and PIP_* variables would change what a stack means.
_PASSED = (
    "PATH", "HOME", "LANG", "TMPDIR", "XDG_CACHE_HOME", "UV_CACHE_DIR", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
)  # fmt: skip


@dataclass(frozen=True)
class ResolvedFile:
    """One wheel of a resolution: what the lock will hold, and the address it has today.

    ``size_bytes`` in ``locked`` is 0 when the index did not tell; ``sizes.fill`` asks its server then.
    """

    locked: LockedFile
    url: str


@dataclass(frozen=True)
class ResolvedStep:
    """The files that one step adds to those of the earlier steps."""

    name: str
    files: tuple[ResolvedFile, ...]


@dataclass(frozen=True)
class ResolvedPlatform:
    """All steps of a stack, resolved for one platform."""

    platform: str
    steps: tuple[ResolvedStep, ...]

    @property
    def files(self) -> tuple[ResolvedFile, ...]:
        """Return the files of all steps, in order."""
        return tuple(file for step in self.steps for file in step.files)

    def locked(self) -> LockedPlatform:
        """Return what the lock holds of this resolution: no address."""
        return LockedPlatform(
            step=tuple(
                LockedStep(name=step.name, files=tuple(file.locked for file in step.files))
                for step in self.steps
            )
        )


@dataclass(frozen=True)
class Sources:
    """Where the indexes of a stack are: by name, and the controller's own default one.

    ``named`` maps an index name to its address. ``before_default`` are searched before the default index
    (a lab mirror's own "default", for instance) and count as it.
    """

    named: Mapping[str, Source]
    default: DefaultIndex = field(default_factory=DefaultIndex)
    before_default: tuple[Source, ...] = ()

    @classmethod
    def of(cls, indexes: Iterable[Index], default: DefaultIndex | None = None) -> Sources:
        """Return the sources a stack names by URL, beside the controller's own default index."""
        named = {}
        for index in indexes:
            login = credentials(index.credentials)
            named[index.name] = Source(index.url, *(login or (None, None)))
        return cls(named, default_index() if default is None else default)

    @classmethod
    def of_mirror(
        cls, indexes: Iterable[Index], mirror_url: str, default: DefaultIndex | None = None
    ) -> Sources:
        """Return the same names on a mirror, whose own "default" comes before the controller's."""
        base = mirror_url.rstrip("/")
        return cls(
            {index.name: Source(f"{base}/wheels/{index.name}/simple") for index in indexes},
            default_index() if default is None else default,
            (Source(f"{base}/wheels/default/simple"),),
        )


def supported_tags(platform: str) -> tuple[Tag, ...]:
    """Return the wheel tags a host of ``platform`` accepts, the best first.

    Raises InputError for anything but ``cp311-x86_64`` and the like.
    """
    minor, machine = _split(platform)
    tags = [
        f"manylinux_2_{glibc}_{machine}" for glibc in range(GLIBC[1], 4 if machine == "x86_64" else 16, -1)
    ]
    older = {
        "manylinux_2_17": "manylinux2014",
        "manylinux_2_12": "manylinux2010",
        "manylinux_2_5": "manylinux1",
    }
    named: list[str] = []
    for tag in tags:
        named.append(tag)
        if alias := older.get(tag.removesuffix(f"_{machine}")):
            named.append(f"{alias}_{machine}")
    named.append(f"linux_{machine}")
    version = (3, minor)
    return (
        *cpython_tags(version, platforms=named),
        *compatible_tags(version, f"cp3{minor}", platforms=named),
    )


def resolve(
    stack: Stack,
    platform: str,
    sources: Sources,
    *,
    preferred: Mapping[str, str] | None = None,
) -> ResolvedPlatform:
    """Return every step of ``stack`` resolved for ``platform``, in order.

    A step sees everything the earlier steps fixed as exact requirements from the index they came from, its own
    index first, the default one for what that lacks, and the stack's overrides. ``preferred`` names versions
    to keep where they still fit (those of the lock being renewed). Raises InputError with uv's own
    explanation when a step has no solution, or would change what an earlier step fixed.
    """
    _split(platform)
    if stack.python.existing is not None:
        raise InputError(
            f"{stack.source or stack.name}: the environment is an existing one",
            why=f"python.interpreter = {stack.python.interpreter!r} is checked, never built",
            hint="lock its packages only, with --only packages",
        )
    steps: list[ResolvedStep] = []
    with tempfile.TemporaryDirectory(prefix="bringup-lock-") as directory:
        for step in stack.python.steps:
            earlier = [file for done in steps for file in done.files]
            question = _Question(stack, step, platform, sources, earlier, preferred or {}, Path(directory))
            steps.append(ResolvedStep(step.name, question.answer()))
    return ResolvedPlatform(platform, tuple(steps))


def locate(files: Sequence[LockedFile], platform: str, sources: Sources) -> dict[str, str]:
    """Return today's address of every locked file, by file name.

    Raises InputError naming a file that its index no longer has, or has with another hash.
    """
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bringup-lock-") as directory:
        for index in sorted({file.index for file in files}):
            wanted = [file for file in files if file.index == index]
            project = _Project(
                dependencies=[f"{file.distribution}=={file.version}" for file in wanted],
                indexes={} if index == "default" else {file.distribution: index for file in wanted},
            )
            answer = _compile(
                project, platform, sources, Path(directory), arguments=["--no-deps"], what=f"index {index}"
            )
            offered = {(name, sha256): url for package in answer for name, url, sha256, _ in _wheels(package)}
            for file in wanted:
                url = offered.get((file.file, file.sha256))
                if url is None:
                    raise InputError(
                        f"index {index} no longer has {file.file} as it was locked",
                        why=f"wanted sha256 {file.sha256}",
                        hint="renew the lock with `bringup lock`, or point the index at a mirror that kept it",
                    )
                found[file.file] = url
    return found


@dataclass(frozen=True)
class _Project:
    """What uv is asked: exact sources per distribution need a project file; a requirements file has none."""

    dependencies: Sequence[str]
    indexes: Mapping[str, str] = field(default_factory=dict)

    def text(self, sources: Sources) -> str:
        document = tomlkit.document()
        document.add(
            "project", {"name": "bringup-lock", "version": "0", "dependencies": list(self.dependencies)}
        )
        names = sorted(set(self.indexes.values()))
        document.add(
            "tool",
            {
                "uv": {
                    "sources": {name: {"index": index} for name, index in sorted(self.indexes.items())},
                    "index": [
                        {"name": name, "url": sources.named[name].url, "explicit": True} for name in names
                    ],
                }
            },
        )
        return tomlkit.dumps(document)


@dataclass(frozen=True)
class _Question:
    """One step, asked of uv."""

    stack: Stack
    step: Step
    platform: str
    sources: Sources
    earlier: Sequence[ResolvedFile]
    preferred: Mapping[str, str]
    directory: Path

    def answer(self) -> tuple[ResolvedFile, ...]:
        fixed = {file.locked.distribution: file for file in self.earlier}
        project = self._project(fixed)
        arguments = [*self._preferences(fixed), *self._overrides(fixed)]
        first = None if self.step.index == "default" else self.step.index
        what = f"step {self.step.name} on {self.platform}"
        packages = _compile(
            project, self.platform, self.sources, self.directory, arguments=arguments, first=first, what=what
        )
        origins = (
            _origins(project, self.platform, self.sources, self.directory, arguments, first)
            if self.sources.named and (first or project.indexes)
            else {}
        )
        new = []
        for package in packages:
            name = canonicalize_name(package["name"])
            if name in fixed:
                self._unchanged(fixed[name].locked, package)
                continue
            new.append(self._file(name, package, origins.get(name, "default")))
        return tuple(sorted(new, key=lambda file: file.locked.distribution))

    def _project(self, fixed: Mapping[str, ResolvedFile]) -> _Project:
        indexes = {name: file.locked.index for name, file in fixed.items() if file.locked.index != "default"}
        pinned = {name: f"{name}=={file.locked.version}" for name, file in fixed.items()}
        asked = []
        for text in self.step.requirements:
            name = canonicalize_name(Requirement(text).name)
            index = self.step.sources.get(name, self.step.index)
            if index != "default" and name not in fixed:
                indexes[name] = index
            asked.append(text)
        return _Project([*sorted(pinned.values()), *asked], indexes)

    def _preferences(self, fixed: Mapping[str, ResolvedFile]) -> list[str]:
        lines = [
            f"{name}=={version}" for name, version in sorted(self.preferred.items()) if name not in fixed
        ]
        if not lines:
            return []
        # uv keeps the versions it finds in its output file, unless it is told to upgrade.
        path = self.directory / "preferred.txt"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return ["--preferences", str(path)]

    def _overrides(self, fixed: Mapping[str, ResolvedFile]) -> list[str]:
        if not self.stack.python.overrides:
            return []
        lines = []
        for override in self.stack.python.overrides:
            wanted = Requirement(override.requirement)
            name = canonicalize_name(wanted.name)
            done = fixed.get(name)
            if done is not None and done.locked.index != "default":
                # An override forgets which index a distribution is bound to; its very file says it.
                lines.append(f"{name} @ {done.url}")
            else:
                lines.append(override.requirement)
        path = self.directory / "overrides.txt"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return ["--overrides", str(path)]

    def _unchanged(self, fixed: LockedFile, package: Mapping[str, Any]) -> None:
        version = package.get("version", fixed.version)
        if version != fixed.version:
            raise InputError(
                f"{self.stack.source or self.stack.name}: step {self.step.name} would change "
                f"{fixed.distribution}",
                why=f"wanted {fixed.version} as an earlier step has it, found {version}",
                hint="give the override and the earlier step one version",
            )

    def _file(self, name: str, package: Mapping[str, Any], index: str) -> ResolvedFile:
        chosen = _best(package, self.platform)
        if chosen is None:
            raise InputError(
                f"{self.stack.source or self.stack.name}: step {self.step.name} has no wheel of "
                f"{name} {package.get('version', '')} for {self.platform}",
                why="only a source distribution, or wheels for other platforms",
            )
        file, url, sha256, size_bytes = chosen
        locked = LockedFile(
            distribution=name,
            version=package["version"],
            file=file,
            size_bytes=size_bytes,
            sha256=sha256,
            index=index,
        )
        return ResolvedFile(locked, url)


def with_sizes(resolved: ResolvedPlatform, size_bytes: Mapping[str, int]) -> ResolvedPlatform:
    """Return ``resolved`` with the sizes in ``size_bytes`` (by file name) filled in where they were unknown."""

    def filled(file: ResolvedFile) -> ResolvedFile:
        if file.locked.size_bytes or file.locked.file not in size_bytes:
            return file
        update = {"size_bytes": size_bytes[file.locked.file]}
        return replace(file, locked=file.locked.model_copy(update=update))

    return replace(
        resolved,
        steps=tuple(
            replace(step, files=tuple(filled(file) for file in step.files)) for step in resolved.steps
        ),
    )


def _split(platform: str) -> tuple[int, str]:
    found = _PLATFORM.fullmatch(platform)
    if not found:
        raise InputError(f"not a platform: {platform!r}", hint=f"name one of {', '.join(PLATFORMS)}")
    return int(found[1]), found[2]


def _wheels(package: Mapping[str, Any]) -> Iterable[tuple[str, str, str, int]]:
    """Yield (file name, address, sha256, size in bytes or 0) of the wheels uv lists for a package."""
    for wheel in package.get("wheels", ()):
        url = wheel.get("url") or Path(wheel["path"]).resolve().as_uri()
        sha256 = wheel.get("hashes", {}).get("sha256")
        if sha256:
            name = wheel.get("name") or unquote(urlsplit(url).path.rsplit("/", 1)[-1])
            yield name, url, sha256, int(wheel.get("size", 0))


def _best(package: Mapping[str, Any], platform: str) -> tuple[str, str, str, int] | None:
    """Return the wheel an installer would take: the best tag, then the highest build tag."""
    ranks = {tag: rank for rank, tag in enumerate(supported_tags(platform))}
    best: tuple[tuple[int, tuple[int, str]], tuple[str, str, str, int]] | None = None
    for wheel in _wheels(package):
        try:
            _, _, build, tags = parse_wheel_filename(wheel[0])
        except InvalidWheelFilename:
            continue
        rank = min((ranks[tag] for tag in tags if tag in ranks), default=None)
        if rank is None:
            continue
        key = (-rank, build or (-1, ""))
        if best is None or key > best[0]:
            best = (key, wheel)
    return best[1] if best else None


def _compile(
    project: _Project,
    platform: str,
    sources: Sources,
    directory: Path,
    *,
    arguments: Sequence[str] = (),
    first: str | None = None,
    what: str,
) -> list[dict[str, Any]]:
    output = directory / "pylock.toml"
    output.unlink(missing_ok=True)
    _uv(
        [*arguments, "--generate-hashes", "--format", "pylock.toml", "--output-file", str(output)],
        project, platform, sources, directory, first, what,
    )  # fmt: skip
    packages: list[dict[str, Any]] = tomllib.loads(output.read_text(encoding="utf-8")).get("packages", [])
    return packages


_ORIGIN = re.compile(r"^ *# from (\S+)", re.MULTILINE)


def _origins(
    project: _Project,
    platform: str,
    sources: Sources,
    directory: Path,
    arguments: Sequence[str],
    first: str | None,
) -> dict[str, str]:
    """Return the index name of every distribution that does not come from the default one.

    uv's pylock.toml does not tell the index, its requirements format does; the answer comes from its cache.
    """
    names = {source.url.rstrip("/"): name for name, source in sources.named.items()}
    text = _uv(
        [*arguments, "--emit-index-annotation", "--no-annotate"],
        project, platform, sources, directory, first, "its indexes",
    )  # fmt: skip
    found = {}
    for block in re.split(r"\n(?=\S)", text):
        origin = _ORIGIN.search(block)
        index = names.get(origin[1].rstrip("/")) if origin else None
        if index:
            found[canonicalize_name(re.split(r"[ =@\[;]", block, maxsplit=1)[0])] = index
    return found


def _uv(
    arguments: Sequence[str],
    project: _Project,
    platform: str,
    sources: Sources,
    directory: Path,
    first: str | None,
    what: str,
) -> str:
    minor, machine = _split(platform)
    source = directory / "pyproject.toml"
    source.write_text(project.text(sources), encoding="utf-8")
    environ = {name: value for name in _PASSED if (value := os.environ.get(name)) is not None}
    environ["UV_NO_PROGRESS"] = "1"
    command = [
        uv.find_uv_bin(), "pip", "compile", str(source), "--quiet", "--color", "never",
        "--no-config", "--no-python-downloads", "--system-certs", "--only-binary", ":all:", "--no-header",
        "--python", sys.executable, "--python-version", f"3.{minor}",
        "--python-platform", f"{machine}-manylinux_{GLIBC[0]}_{GLIBC[1]}",
        *_index_arguments(sources, first, environ),
        *arguments,
    ]  # fmt: skip
    for name in project.indexes.values():
        _pass_credentials(environ, name, sources.named[name])
    done = subprocess.run(command, env=environ, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise _failure(what, done.stderr)
    return done.stdout


def _index_arguments(sources: Sources, first: str | None, environ: dict[str, str]) -> list[str]:
    """Return uv's index options; credentials go into ``environ``, which no other user can read."""
    arguments: list[str] = []
    ordered: list[tuple[str, Source]] = []
    if first is not None:
        ordered.append((first, sources.named[first]))
    ordered += [(f"default-{number}", source) for number, source in enumerate(sources.before_default)]
    ordered += [(f"extra-{number}", source) for number, source in enumerate(sources.default.extra)]
    for name, source in ordered:
        arguments += ["--index", f"{name}={source.url}"]
        _pass_credentials(environ, name, source)
    if sources.default.url is not None:
        arguments += ["--default-index", f"default={sources.default.url.url}"]
        _pass_credentials(environ, "default", sources.default.url)
    for link in sources.default.links:
        arguments += ["--find-links", link]
    # pip mixes its extra indexes with the first one, so the best version wins wherever it lies. Where an index
    # of the stack goes first, it must win over a higher version elsewhere: that is what the order is for.
    ranked = first is not None or sources.before_default
    arguments += ["--index-strategy", "unsafe-first-match" if ranked else "unsafe-best-match"]
    if sources.default.certificate:
        environ["SSL_CERT_FILE"] = sources.default.certificate
    return arguments


def _pass_credentials(environ: dict[str, str], name: str, source: Source) -> None:
    if source.user is not None:
        key = re.sub(r"[^A-Z0-9]", "_", name.upper())
        environ[f"UV_INDEX_{key}_USERNAME"] = source.user
        environ[f"UV_INDEX_{key}_PASSWORD"] = source.password or ""


def _failure(what: str, stderr: str) -> BringupError:
    text = " ".join(stderr.replace("error: ", "", 1).split())
    if "No solution found" in stderr:
        why = re.sub(r"^.*?cause: ", "", text)
        return InputError(
            f"{what} has no solution",
            why=why.replace("bringup-lock", "this stack"),
            hint="change the step's requirements, or replace the requirement in the way with [[python.override]]",
        )
    return InputError(f"{what} could not be resolved", why=text or "uv said nothing")
