"""Look whether a bundle is whole: every file, its signatures, and everything that its stacks need."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bringup.bundle import layout, repository
from bringup.bundle.layout import Manifest
from bringup.bundle.signing import is_signed
from bringup.errors import InputError
from bringup.locking.debian import paragraphs
from bringup.locking.fetch import listed
from bringup.locking.packages import releases
from bringup.locking.repository import fingerprint_of, verified


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it must be, and where."""

    path: str
    what: str


@dataclass(frozen=True)
class Checked:
    """What was looked at and what was wrong. ``key_fingerprint`` None: the bundle is not signed."""

    manifest: Manifest
    files: int
    size_bytes: int
    key_fingerprint: str | None
    problems: tuple[Problem, ...]


def check_bundle(directory: Path, *, stack: str | None = None, fingerprint: str | None = None) -> Checked:
    """Return what is wrong with a bundle; nothing means that hosts can install its stacks from it.

    ``stack`` must be one of its stacks, by name; None means all that it has. ``fingerprint`` is the key that must
    have signed it; None means the one that it names itself. Raises InputError when there is no bundle.
    """
    manifest = layout.read_manifest(directory)
    if manifest is None:
        raise InputError(f"{directory} holds no bundle", why=f"it has no {layout.MANIFEST}")
    if stack is not None and stack not in manifest.stacks:
        raise InputError(
            f"the bundle in {directory} does not hold {stack}",
            why=f"it holds {', '.join(manifest.stacks) or 'no stack'}",
        )
    sums = layout.read_sums(directory)
    named = [stack] if stack else list(manifest.stacks)
    problems = [
        *_files(directory, sums),
        *_signatures(directory, manifest, fingerprint),
        *(problem for name in named for problem in _stack(directory, manifest, name, sums)),
    ]
    present = [directory / path for path in sums if (directory / path).is_file()]
    return Checked(
        manifest=manifest,
        files=len(present),
        size_bytes=sum(path.stat().st_size for path in present),
        key_fingerprint=manifest.key.fingerprint if manifest.key else None,
        problems=tuple(dict.fromkeys(problems)),
    )


def _files(directory: Path, sums: dict[str, str]) -> Iterator[Problem]:
    if layout.MANIFEST not in sums:
        yield Problem(layout.SUMS, f"does not list {layout.MANIFEST}: the bundle was never finished, make it again")
    for path, wanted in sums.items():
        try:
            with (directory / path).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            yield Problem(path, f"cannot be read: {error.strerror}")
            continue
        if found != wanted:
            yield Problem(path, f"wanted sha256 {wanted}, found {found}")


def _signatures(directory: Path, manifest: Manifest, fingerprint: str | None) -> Iterator[Problem]:
    if manifest.key is None:
        if fingerprint is not None:
            yield Problem(layout.MANIFEST, f"wanted a bundle signed by {fingerprint}, found one without a signature")
        return
    wanted = fingerprint or manifest.key.fingerprint
    try:
        key = (directory / layout.safe(manifest.key.file, what=layout.MANIFEST)).read_bytes()
        sums = (directory / layout.SUMS).read_text(encoding="utf-8")
        signature = (directory / layout.SUMS_SIGNATURE).read_bytes()
    except OSError as error:
        yield Problem(str(error.filename).removeprefix(f"{directory}/"), f"cannot be read: {error.strerror}")
        return
    try:
        found = fingerprint_of(key, source=manifest.key.file)
    except InputError as error:
        yield Problem(manifest.key.file, error.what)
        return
    if found != wanted:
        yield Problem(manifest.key.file, f"wanted key {wanted}, found {found}")
    elif not is_signed(sums, signature, key=key, fingerprint=wanted):
        yield Problem(layout.SUMS_SIGNATURE, f"is no valid signature by {wanted}")
    for in_release in sorted(directory.glob("apt/*/*/InRelease")):
        path = in_release.relative_to(directory).as_posix()
        try:
            text = verified(in_release.read_bytes(), key=key, fingerprint=wanted, source=path)
        except InputError as error:
            yield Problem(path, error.why or error.what)
            continue
        packages = in_release.with_name("Packages").read_bytes()
        digest = hashlib.sha256(packages).hexdigest()
        if digest not in next(paragraphs(text), {}).get("SHA256", ""):
            yield Problem(f"{path.rpartition('/')[0]}/Packages", "is not the index that its InRelease file signed")


def _stack(directory: Path, manifest: Manifest, name: str, sums: dict[str, str]) -> Iterator[Problem]:
    bundled = manifest.stacks[name]
    try:
        lock = layout.bundled_lock(directory, bundled)
    except InputError as error:
        yield Problem(bundled.lock, str(error.why or error.what))
        return
    for path, sha256 in layout.wanted_sums(lock, bundled.platforms, bundled.releases).items():
        if sums.get(path) != sha256:
            yield Problem(path, f"stack {name} needs it with sha256 {sha256}, {layout.SUMS} has {sums.get(path)}")
    for platform in bundled.platforms:
        for path, file in layout.wheels_of(lock, platform).items():
            page = directory / layout.wheel_directory(file)
            if listed(page).get(file.file) != file.sha256:
                yield Problem(path, f"is not on the page of {file.distribution} with its hash")
    for release in bundled.releases:
        packages = layout.packages_of(lock, release)
        index = directory / layout.apt_directory(release) / "Packages"
        shown = repository.blocks(index.read_text(encoding="utf-8", errors="replace")) if index.is_file() else {}
        for path, package in packages.items():
            block = shown.get(package.sha256)
            if block is None or repository.file_name(block) != layout.package_file(package):
                yield Problem(path, f"is not in the index of {releases()[release].name} with its hash")
