"""Ask uv for a resolution: what it is told, which indexes it may see, and what its answer says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import tomlkit
import uv
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from bringup.errors import BringupError, InputError
from bringup.package_index import Source, Sources

PLATFORMS = tuple(f"cp3{minor}-{machine}" for machine in ("aarch64", "x86_64") for minor in (11, 12, 13))
"""Every platform that a lock may hold."""

GLIBC = (2, 36)
"""The newest glibc that a locked wheel may ask for: that of Debian 12, the oldest release bringup supports."""

_PLATFORM = re.compile(r"cp3(11|12|13)-(x86_64|aarch64)")
_PROJECT = "bringup-lock"
_NO_WHEEL = re.compile(r"\b([A-Za-z0-9][A-Za-z0-9._-]*)==\S+ has no wheels with a matching")
# What uv may see of our environment. Stray UV_* and PIP_* variables would change what a stack means.
_PASSED = (
    *("PATH", "HOME", "LANG", "TMPDIR", "XDG_CACHE_HOME", "UV_CACHE_DIR", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)


@dataclass(frozen=True)
class Project:
    """What uv is asked. A project file, because only there can a distribution be bound to one index.

    ``indexes`` binds distributions to index names, ``overrides`` are lines of uv's overrides file,
    ``preferred`` are versions to keep where they fit, ``first`` is the index searched before the default one.
    """

    dependencies: Sequence[str]
    indexes: Mapping[str, str] = field(default_factory=dict)
    overrides: Sequence[str] = ()
    preferred: Mapping[str, str] = field(default_factory=dict)
    first: str | None = None
    with_dependencies: bool = True


@dataclass(frozen=True)
class Wheel:
    """One wheel that uv lists for a package; ``size_bytes`` 0 means that the index does not tell."""

    file: str
    url: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Answer:
    """One package of a resolution. ``version`` is empty when it was asked for by its file's address."""

    name: str
    version: str
    wheels: tuple[Wheel, ...]


@dataclass(frozen=True)
class Origin:
    """Which index a package came from, and which packages asked for it."""

    index: str
    required_by: tuple[str, ...]


@dataclass(frozen=True)
class Compiler:
    """uv for one platform and one set of indexes; ``directory`` holds its files while it runs."""

    platform: str
    sources: Sources
    directory: Path

    def answers(self, project: Project, *, what: str) -> tuple[Answer, ...]:
        """Return the resolution of ``project``.

        ``what`` begins the message of the InputError that is raised when there is none.

        A preferred version that the first of several indexes has for another machine only makes uv give up, or move
        to another version, although a later index has a wheel that fits. So all of them are first asked for exactly;
        what cannot be kept is found out by preference, without those that uv stumbles over.
        """
        if project.preferred:
            try:
                return self._answers(replace(project, preferred={}), project.preferred, what)
            except InputError:
                pass
        preferred, kept = dict(project.preferred), dict[str, str]()
        while True:
            try:
                return self._answers(replace(project, preferred=preferred), kept, what)
            except InputError as error:
                found = _NO_WHEEL.search(error.why or "")
                name = canonicalize_name(found[1]) if found else ""
                if name in preferred:
                    kept[name] = preferred.pop(name)
                elif name in kept:
                    del kept[name]
                else:
                    raise

    def _answers(self, project: Project, exactly: Mapping[str, str], what: str) -> tuple[Answer, ...]:
        output = self.directory / "pylock.toml"
        # uv keeps the versions that it finds in its output file.
        output.write_text(
            tomlkit.dumps(
                {
                    "lock-version": "1.0",
                    "created-by": "bringup",
                    "packages": [
                        {"name": name, "version": version} for name, version in sorted(project.preferred.items())
                    ],
                }
            ),
            encoding="utf-8",
        )
        arguments = ["--generate-hashes", "--format", "pylock.toml", "-o", str(output)]
        self._run(project, arguments, what, exactly)
        document = tomllib.loads(output.read_text(encoding="utf-8"))
        return tuple(
            Answer(
                name=canonicalize_name(package["name"]),
                version=package.get("version", ""),
                wheels=tuple(_wheels(package)),
            )
            for package in document.get("packages", [])
        )

    def origins(self, project: Project, answers: Iterable[Answer]) -> dict[str, Origin]:
        """Return where every package of ``answers`` came from.

        uv's pylock.toml does not tell, its requirements format does; with everything asked for as answered, the
        second resolution is the first one again, out of uv's cache.
        """
        output = self.directory / "requirements.txt"
        output.unlink(missing_ok=True)
        arguments = ["--emit-index-annotation", "--annotation-style", "split", "-o", str(output)]
        self._run(project, arguments, "the indexes", {each.name: each.version for each in answers if each.version})
        names = {source.url.rstrip("/"): name for name, source in self.sources.named.items()}
        return dict(_origins(output.read_text(encoding="utf-8"), names))

    def _run(self, project: Project, arguments: Sequence[str], what: str, exactly: Mapping[str, str]) -> None:
        minor, machine = split(self.platform)
        source = self.directory / "pyproject.toml"
        source.write_text(self._project_text(project), encoding="utf-8")
        environ = {name: value for name in _PASSED if (value := os.environ.get(name)) is not None}
        environ["UV_NO_PROGRESS"] = "1"
        if self.sources.direct:
            known = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
            environ["NO_PROXY"] = environ["no_proxy"] = ",".join(filter(None, (known, self.sources.direct)))
        command = [
            *(uv.find_uv_bin(), "pip", "compile", str(source), "--quiet", "--color", "never"),
            *("--no-config", "--no-python-downloads", "--system-certs", "--only-binary", ":all:", "--no-header"),
            *("--python", sys.executable, "--python-version", f"3.{minor}"),
            *("--python-platform", f"{machine}-manylinux_{GLIBC[0]}_{GLIBC[1]}"),
            *self._index_arguments(project, environ),
            *arguments,
        ]
        if project.overrides:
            overrides = self.directory / "overrides.txt"
            overrides.write_text("".join(f"{line}\n" for line in project.overrides), encoding="utf-8")
            command += ["--overrides", str(overrides)]
        if exactly:
            constraints = self.directory / "constraints.txt"
            lines = (f"{name}=={version}\n" for name, version in sorted(exactly.items()))
            constraints.write_text("".join(lines), encoding="utf-8")
            command += ["--constraints", str(constraints)]
        if not project.with_dependencies:
            command.append("--no-deps")
        done = subprocess.run(
            command, env=environ, cwd=self.directory, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode != 0:
            raise _failure(what, done.stderr)

    def _project_text(self, project: Project) -> str:
        used = sorted(set(project.indexes.values()))
        return tomlkit.dumps(
            {
                "project": {
                    "name": _PROJECT,
                    "version": "0",
                    "requires-python": ">=3.11",
                    "dependencies": list(project.dependencies),
                },
                "tool": {
                    "uv": {
                        "sources": {name: {"index": index} for name, index in sorted(project.indexes.items())},
                        "index": [
                            {"name": name, "url": self.sources.named[name].url, "explicit": True} for name in used
                        ],
                    }
                },
            }
        )

    def _index_arguments(self, project: Project, environ: dict[str, str]) -> list[str]:
        """Return uv's index options; credentials go into ``environ``, which no other user can read."""
        arguments: list[str] = []
        ordered: list[tuple[str, Source]] = []
        default = self.sources.default
        if project.first is not None:
            ordered.append((project.first, self.sources.named[project.first]))
        ordered += [(f"default-{number}", source) for number, source in enumerate(self.sources.before_default)]
        ordered += [(f"extra-{number}", source) for number, source in enumerate(default.extra)]
        for name, source in ordered:
            arguments += ["--index", f"{name}={source.url}"]
        if default.url is not None:
            arguments += ["--default-index", f"default={default.url.url}"]
            ordered.append(("default", default.url))
        ordered += [(name, self.sources.named[name]) for name in project.indexes.values()]
        for name, source in ordered:
            _pass_credentials(environ, name, source)
        for link in default.links:
            arguments += ["--find-links", link]
        # pip mixes its extra indexes with the first one: the best version wins, wherever it lies. Where an index
        # of the stack goes first, it must win over a higher version elsewhere: that is what the order is for.
        is_ranked = project.first is not None or self.sources.before_default
        arguments += ["--index-strategy", "unsafe-first-match" if is_ranked else "unsafe-best-match"]
        if default.certificate:
            environ["SSL_CERT_FILE"] = default.certificate
        return arguments


def split(platform: str) -> tuple[int, str]:
    """Return Python's minor and the machine of a platform such as ``cp311-x86_64``; raises InputError."""
    found = _PLATFORM.fullmatch(platform)
    if not found:
        raise InputError(f"not a platform: {platform!r}", hint=f"name one of {', '.join(PLATFORMS)}")
    return int(found[1]), found[2]


def supported_tags(platform: str) -> tuple[Tag, ...]:
    """Return the wheel tags that a host of ``platform`` accepts, the best first."""
    minor, machine = split(platform)
    # glibc 2.17 is the first with aarch64, 2.5 the oldest that any tag names.
    oldest = 5 if machine == "x86_64" else 17
    older = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    named = []
    for glibc in range(GLIBC[1], oldest - 1, -1):
        named.append(f"manylinux_2_{glibc}_{machine}")
        if glibc in older:
            named.append(f"{older[glibc]}_{machine}")
    named.append(f"linux_{machine}")
    return (
        *cpython_tags((3, minor), platforms=named),
        *compatible_tags((3, minor), f"cp3{minor}", platforms=named),
    )


def best_wheel(wheels: Iterable[Wheel], platform: str) -> Wheel | None:
    """Return the wheel an installer would take: the best tag, then the highest build tag; None when none fits."""
    ranks = {tag: rank for rank, tag in enumerate(supported_tags(platform))}
    fitting = []
    for wheel in wheels:
        try:
            _, _, build, tags = parse_wheel_filename(wheel.file)
        except InvalidWheelFilename:
            continue
        if found := [ranks[tag] for tag in tags if tag in ranks]:
            fitting.append((-min(found), build or (-1, ""), wheel))
    return max(fitting, key=lambda each: each[:2])[2] if fitting else None


def _wheels(package: Mapping[str, Any]) -> Iterable[Wheel]:
    # A package asked for by its address is an archive instead of a list of wheels.
    entries = [*package.get("wheels", ()), *([package["archive"]] if "archive" in package else [])]
    for entry in entries:
        url = entry.get("url") or Path(entry["path"]).resolve().as_uri()
        sha256 = entry.get("hashes", {}).get("sha256")
        name = entry.get("name") or unquote(urlsplit(url).path.rsplit("/", 1)[-1])
        if sha256 and name.endswith(".whl"):
            yield Wheel(name, url, sha256, int(entry.get("size", 0)))


def _origins(text: str, names: Mapping[str, str]) -> Iterable[tuple[str, Origin]]:
    for block in re.split(r"\n(?=\S)", text):
        if not block.strip():
            continue
        name = canonicalize_name(re.split(r"[ =@\[;]", block, maxsplit=1)[0])
        comments = [line.strip()[1:].strip() for line in block.splitlines() if line.strip().startswith("#")]
        index, required_by = "default", []
        for line in comments:
            if line.startswith("from "):
                index = names.get(line.removeprefix("from ").rstrip("/"), "default")
                continue
            asker = line.removeprefix("via").split(" ")
            word = next((each for each in asker if each), "")
            if word and not word.startswith("-"):
                required_by.append("the stack" if word == _PROJECT else word)
        yield name, Origin(index, tuple(required_by))


def _pass_credentials(environ: dict[str, str], name: str, source: Source) -> None:
    if source.user is not None:
        key = re.sub(r"[^A-Z0-9]", "_", name.upper())
        environ[f"UV_INDEX_{key}_USERNAME"] = source.user
        environ[f"UV_INDEX_{key}_PASSWORD"] = source.password or ""


def _failure(what: str, stderr: str) -> BringupError:
    text = " ".join(stderr.split()).removeprefix("error: ")
    if "No solution found" in text:
        return InputError(
            f"{what} has no solution",
            why=text.partition("cause: ")[2].replace(_PROJECT, "this stack") or text,
            hint="change the requirements, or replace the one in the way with [[python.override]] and a reason",
        )
    return InputError(f"{what} could not be resolved", why=text or "uv said nothing")
