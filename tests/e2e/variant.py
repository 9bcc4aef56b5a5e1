"""Write variants of the ``lab`` stack: other requirements, other files in its lock, nothing else different."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from bringup import paths
from bringup.lab.lab import Lab
from bringup.locking import write_lock
from bringup.stack import Lock, LockedFile, LockedPlatform, LockedStep, parse_lock

PLATFORM = "cp311-x86_64"


def served(lab: Lab, index: str, distribution: str, version: str) -> LockedFile:
    """Return one wheel of the lab's mirror as a lock names it."""
    directory = lab.layout.mirror / "wheels" / index / "simple" / distribution
    stem = distribution.replace("-", "_")
    (wheel,) = directory.glob(f"{stem}-{version}-*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return LockedFile(
        distribution=distribution,
        version=version,
        file=wheel.name,
        size_bytes=wheel.stat().st_size,
        sha256=digest,
        index=index,
    )


def lab_lock(lab: Lab) -> Lock:
    """Return the lab's own lock of the ``lab`` stack."""
    path = lab.layout.locks / "lab.lock.toml"
    return parse_lock(path.read_text(), source=str(path))


def write(
    lab: Lab,
    directory: Path,
    name: str,
    *,
    text: Mapping[str, str] | None = None,
    more: str = "",
    files: Mapping[str, Iterable[LockedFile]] | None = None,
    without: Iterable[str] = (),
    platform: str = PLATFORM,
) -> list[str]:
    """Write a variant and return the options that choose it.

    ``text`` is replaced in the stack, each key must be there once; ``more`` is put at its end. ``files`` are put
    into the lock by step, each in the place of the file of the same distribution; ``without`` are taken out. The
    lock is for one platform.
    """
    stack = (paths.stacks() / "lab.toml").read_text()
    for old, new in (text or {}).items():
        assert stack.count(old) == 1, old
        stack = stack.replace(old, new)
    path = directory / f"{name}.toml"
    path.write_text(stack + more)
    lock = lab_lock(lab)
    assert lock.wheels is not None
    steps = tuple(
        _edited(step, tuple((files or {}).get(step.name, ())), set(without))
        for step in lock.wheels.platforms[platform].steps
    )
    wheels = lock.wheels.model_copy(update={"platforms": {platform: LockedPlatform(steps=steps)}})
    lock_path = directory / f"{name}.lock.toml"
    write_lock(lock_path, lock.model_copy(update={"wheels": wheels}))
    return ["--stack", str(path), "--lock", str(lock_path)]


def _edited(step: LockedStep, files: tuple[LockedFile, ...], without: set[str]) -> LockedStep:
    gone = without | {canonicalize_name(file.distribution) for file in files}
    kept = tuple(file for file in step.files if file.distribution not in gone)
    return step.model_copy(update={"files": (*kept, *files)})
