"""Lock stacks for lab hosts: against the lab's own mirror, into the lab's own state directory.

Such a lock never leaves that directory: preflight accepts its parts on lab hosts only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

import bringup
from bringup import paths
from bringup.errors import InputError
from bringup.finding import Finding
from bringup.locking.document import digest_of, input_digest_of, write_lock
from bringup.locking.fetch import fetch_files
from bringup.locking.packages import lock_packages, releases
from bringup.locking.wheels import Judge, lock_wheels
from bringup.package_index import DefaultIndex, Sources
from bringup.stack import Lock, LockedWheels, Stack, load_stack, lock_path_of


@dataclass(frozen=True)
class LabLock:
    """One lab lock: its file, whether it was made anew, and what stands against it (then none was written)."""

    path: Path
    changed: bool
    findings: tuple[Finding, ...] = ()


def lock_for_lab(
    stack_path: Path,
    lab_state_dir: Path,
    mirror_url: str,
    *,
    key_file: Path,
    key_fingerprint: str,
    platforms: Sequence[str] = (),
    default: DefaultIndex | None = None,
    judge: Callable[[Sources], Judge] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> LabLock:
    """Write ``STATE/locks/NAME.lock.toml``: a complete lock of the stack for lab hosts.

    Its wheels part is the one committed beside the stack where there is one; otherwise the steps are resolved
    against the mirror, and what comes from the controller's default index is fetched into it. Its packages parts
    come from the repositories below ``STATE/mirror/apt``. Nothing is done while stack, committed lock, mirror and
    bringup are what they were. ``platforms`` () means the stack's own interpreter on the machine of each release.
    ``judge`` makes the guard for the mirror's indexes; what was committed was judged when it was locked.
    Raises InputError when the stack cannot be locked against this mirror.
    """
    stack = load_stack(stack_path)
    mirror = lab_state_dir / "mirror"
    if not (mirror / "apt").is_dir():
        raise InputError(f"no package mirror in {mirror}", hint="run `bringup lab up`")
    target = lock_path_of(stack_path, lab_state_dir / "locks")
    served = [name for name in releases() if (mirror / "apt" / releases()[name].path / "InRelease").is_file()]
    wanted = tuple(platforms) or tuple(sorted(set(_own_platforms(stack, served))))
    before = _inputs(stack_path, stack, mirror, served, wanted)
    if input_digest_of(target) == before:
        return LabLock(target, changed=False)
    sources = Sources.of_mirror(stack.python.indexes, mirror_url, default)
    committed = stack.lock.wheels if stack.lock else None
    wheels: LockedWheels | None
    if committed is not None:
        wheels = committed
    elif stack.python.existing is not None:
        wheels = None
    else:
        part = lock_wheels(stack, wanted, sources, judge=judge(sources) if judge else None, say=say)
        if not part.is_fit:
            return LabLock(target, False, tuple(each for found in part.findings.values() for each in found))
        for platform in part.resolved:
            addresses = {file.locked.file: file.url for file in platform.files}
            own = f"{mirror_url.rstrip('/')}/wheels/"
            files = [file.locked for file in platform.files if not file.url.startswith(own)]
            fetch_files(files, mirror, platform=platform.platform, sources=sources, addresses=addresses, say=say)
        wheels = part.locked("lab")
    lock = Lock(
        schema_=1,
        stack=stack.name,
        wheels=wheels,
        packages=lock_packages(
            stack,
            served,
            against="lab",
            url=f"{mirror_url.rstrip('/')}/apt",
            key=key_file.read_bytes(),
            fingerprint=key_fingerprint,
            direct=sources.direct,
        ),
    )
    # What was fetched just now is part of the mirror from here on.
    after = _inputs(stack_path, stack, mirror, served, wanted)
    return LabLock(target, changed=write_lock(target, lock, input_digest=after))


def _own_platforms(stack: Stack, served: Iterable[str]) -> Iterator[str]:
    if stack.python.existing is None:
        for name in served or ("-x86_64",):
            yield f"cp{stack.python.interpreter_of(name).replace('.', '')}-{name.split('-', 1)[1]}"


def _inputs(stack_path: Path, stack: Stack, mirror: Path, served: Iterable[str], platforms: Iterable[str]) -> str:
    """Return one digest over everything that the lock is made from."""
    committed = lock_path_of(stack_path)
    parts: list[str | bytes] = [
        bringup.__version__,
        *platforms,
        stack_path.read_bytes(),
        committed.read_bytes() if committed.is_file() else b"",
        (paths.data() / "packages.toml").read_bytes(),
    ]
    for name in served:
        parts += [name, (mirror / "apt" / releases()[name].path / "InRelease").read_bytes()]
    if not (stack.lock and stack.lock.wheels):
        for index in ("default", *(each.name for each in stack.python.indexes)):
            for page in sorted((mirror / "wheels" / index / "simple").glob("*/index.html")):
                parts += [index, canonicalize_name(page.parent.name), page.read_bytes()]
    return digest_of(parts)
