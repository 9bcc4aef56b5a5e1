"""What keeps a host from getting there at all: its system, space, clock, interpreter, and the lock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from bringup import catalog, wanted
from bringup.finding import Finding
from bringup.host_state import Dpkg, HostState, Space, Unknown
from bringup.stack import LockedPackage, Stack
from bringup.wanted import Site


def unknown(reasons: Iterable[str]) -> Finding:
    """Return the refusal for a host of which something needed could not be looked at."""
    shown = list(reasons)
    return Finding(
        code="BU-PRE-017",
        severity="error",
        cause=f"what the host is like could not be seen: {'; '.join(shown[:3])}",
        remedy="mend what is named and run again; nothing is changed on the strength of an unknown",
        evidence={"unknown": shown},
    )


def unsupported_system(state: HostState, site: Site) -> Iterator[Finding]:
    """Refuse a distribution release that no repository is known for."""
    if isinstance(state.os, Unknown) or wanted.repository(state, site) is not None:
        return
    known = sorted({row.release for row in catalog.repositories()})
    yield Finding(
        code="BU-PRE-018",
        severity="error",
        cause=f"{state.os.pretty_name or state.os.id} on {state.os.machine} is not supported",
        remedy=f"use one of {', '.join(known)}",
        evidence={"wanted": known, "found": state.os.release},
    )


def not_root(state: HostState) -> Iterator[Finding]:
    """Refuse an account that is not root: half of the answer would be missing, and nothing could be changed."""
    if not isinstance(state.os, Unknown) and state.os.user_id != 0:
        yield Finding(
            code="BU-PRE-004",
            severity="error",
            cause="bringup needs root on the host, and has not got it",
            remedy="log in as root, or let the account use sudo (_sudo = True in the inventory)",
            evidence={"wanted": 0, "found": state.os.user_id},
        )


def _missing(dpkg: Dpkg, packages: Iterable[LockedPackage]) -> list[LockedPackage]:
    found = []
    for package in packages:
        installed = dpkg.installed(package.name)
        if installed is None or installed.version != package.version:
            found.append(package)
    return found


def _needs(stack: Stack, state: HostState) -> Iterator[tuple[str, float, float, str]]:
    """Yield (directory, bytes, inodes, what for) for everything that is still to be written."""
    limit = catalog.limit
    locked = wanted.packages(stack, state)
    if locked is not None and not isinstance(state.dpkg, Unknown):
        kept = wanted.is_driver_kept(stack, state)
        kind = wanted.fabric_kind(stack, state)
        fabric = locked.fabric.get(kind, ()) if kind is not None and kind != "none" else ()
        groups: list[tuple[LockedPackage, ...]] = [] if kept else [locked.driver, fabric]
        groups += [locked.toolkits.get(v, ()) for v in stack.cuda.toolkits if v not in stack.cuda.runfiles]
        missing = {p.name: p for group in groups for p in _missing(state.dpkg, group)}
        if missing:
            packed = sum(package.size_bytes for package in missing.values())
            inodes = len(missing) * limit("deb_inodes_per_package")
            yield "/var/cache/apt/archives", packed + limit("spare_bytes"), len(missing), "downloaded packages"
            unpacked = packed * limit("deb_unpacked_per_packed")
            yield "/usr/local", unpacked + limit("spare_bytes"), inodes, "the driver and the toolkits"
        if not kept and _missing(state.dpkg, locked.driver):
            yield "/boot", limit("boot_bytes"), 10, "an initramfs"
    for runfile in stack.cuda.runfiles.values():
        if not isinstance(state.toolkits, Unknown) and not set(stack.cuda.runfiles) <= set(state.toolkits.installed):
            yield "/usr/local", runfile.size_bytes * limit("deb_unpacked_per_packed"), 10_000, "a toolkit's runfile"
    yield from _environment_needs(stack, state)


def _environment_needs(stack: Stack, state: HostState) -> Iterator[tuple[str, float, float, str]]:
    platform = wanted.platform(stack, state)
    steps = stack.locked_steps(platform) if platform else None
    if platform is None or steps is None or isinstance(state.environment, Unknown):
        return
    digest = stack.env_digest(platform)
    if any(entry.digest == digest and entry.is_complete for entry in state.environment.environments):
        return
    packed = sum(file.size_bytes for step in steps for file in step.files)
    unpacked = packed * catalog.limit("wheel_unpacked_per_packed")
    inodes = unpacked / catalog.limit("wheel_bytes_per_inode")
    yield "/opt/bringup", unpacked + catalog.limit("spare_bytes"), inodes, "the Python environment"


def space(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Refuse a host whose file systems do not hold what is still to be written.

    Directories of one file system are counted together.
    """
    if isinstance(state.space, Unknown):
        return
    systems: dict[int, list[tuple[str, float, float, str]]] = defaultdict(list)
    seen: dict[int, Space] = {}
    for need in _needs(stack, state):
        where = state.space.get(need[0])
        if where is not None:
            systems[where.device].append(need)
            seen[where.device] = where
    for device, needs in systems.items():
        yield from _short(seen[device], needs)


def _short(where: Space, needs: list[tuple[str, float, float, str]]) -> Iterator[Finding]:
    directories = ", ".join(dict.fromkeys(need[0] for need in needs))
    what = ", ".join(dict.fromkeys(need[3] for need in needs))
    wish_bytes, wish_inodes = int(sum(n[1] for n in needs)), int(sum(n[2] for n in needs))
    if where.is_readonly:
        yield Finding(
            code="BU-PRE-012",
            severity="error",
            cause=f"{directories} is mounted read-only, and {what} must be written there",
            remedy="mount it read-write",
        )
        return
    if where.free_bytes < wish_bytes:
        yield Finding(
            code="BU-PRE-005",
            severity="error",
            cause=f"too little space below {directories} for {what}",
            remedy="free space there, or mount a larger file system",
            evidence={"wanted": f"{wish_bytes / 1e9:.1f} GB free", "found": f"{where.free_bytes / 1e9:.1f} GB free"},
        )
    if where.free_inodes is not None and where.free_inodes < wish_inodes:
        yield Finding(
            code="BU-PRE-006",
            severity="error",
            cause=f"too few free inodes below {directories} for {what}",
            remedy="remove small files there, or make the file system with more inodes",
            evidence={"wanted": wish_inodes, "found": where.free_inodes},
        )


def shared_memory(state: HostState) -> Iterator[Finding]:
    """Warn of a /dev/shm in which NCCL could not lay its files."""
    if isinstance(state.space, Unknown) or isinstance(state.gpus, Unknown) or not state.gpus.pci:
        return
    where = state.space.get("/dev/shm")
    wish = int(len(state.gpus.pci) * catalog.limit("shm_bytes_per_gpu"))
    if where is not None and where.free_bytes < wish:
        yield Finding(
            code="BU-PRE-014",
            severity="warning",
            cause="/dev/shm is too small for NCCL's shared memory",
            remedy="mount /dev/shm larger, or remove nccl-* files that no process holds open",
            evidence={"wanted": f"{wish} bytes free", "found": f"{where.free_bytes} bytes free"},
        )


def not_executable(state: HostState, stack: Stack) -> Iterator[Finding]:
    """Refuse an /opt/bringup from which nothing can be run."""
    if isinstance(state.space, Unknown) or stack.python.existing is not None:
        return
    where = state.space.get("/opt/bringup")
    if where is not None and where.is_noexec:
        yield Finding(
            code="BU-PRE-013",
            severity="error",
            cause="/opt/bringup lies on a file system mounted noexec: no interpreter and no library loads from it",
            remedy="mount it with exec, or mount another file system at /opt/bringup",
        )


def clock(state: HostState, *, now_s: float) -> Iterator[Finding]:
    """Refuse a clock that apt and TLS would trip over. ``now_s`` is the controller's when the answer came."""
    if isinstance(state.time, Unknown):
        return
    received_s = state.received_at_s if state.received_at_s is not None else now_s
    skew_s = state.time.answered_s - received_s
    tolerance_s = catalog.limit("clock_skew_s")
    if abs(skew_s) <= tolerance_s:
        return
    keeper = state.time.keeper
    yield Finding(
        code="BU-PRE-007",
        severity="error",
        cause=f"the host's clock is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}",
        remedy=f"set it and see why {keeper} does not keep it" if keeper else "start systemd-timesyncd or chrony",
        evidence={"wanted": f"within {tolerance_s:.0f} s of the controller", "found": f"{skew_s:+.0f} s"},
    )


def interpreter(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Refuse a host without the wanted Python; one without its headers is told what they are for."""
    if stack.python.existing is not None or isinstance(state.python, Unknown):
        return
    minor = wanted.interpreter(stack, state)
    found = state.python.interpreters.get(minor)
    if found is None:
        have = sorted(state.python.interpreters)
        yield Finding(
            code="BU-PRE-008",
            severity="error",
            cause=f"the host has no Python {minor}",
            remedy=f"install python{minor}, or lock the stack for one that is there (python.interpreters)",
            evidence={"wanted": minor, "found": ", ".join(have) or None},
        )
    elif not found.has_headers:
        yield Finding(
            code="BU-PRE-011",
            severity="info",
            cause=f"the headers of Python {minor} are not installed; Triton compiles against them at first use",
            remedy=f"install python{minor}-dev where models are compiled on this host",
        )


def lock(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Refuse a part of the lock that is missing for this host, or that was made against the rehearsal mirror."""
    release, platform = wanted.release(state), wanted.platform(stack, state)
    packages = wanted.packages(stack, state)
    wheels = stack.lock.wheels if stack.lock else None
    command = f"bringup lock {stack.name}"
    if release is not None and packages is None and _needs_packages(stack, state):
        yield _no_lock(f"the packages of {release}", command)
    if platform is not None and stack.locked_steps(platform) is None:
        yield _no_lock(f"the wheels of {platform}", command)
    if state.simulated:
        return
    parts = []
    if packages is not None and packages.resolved_against == "lab":
        parts.append(f"the packages of {release}")
    if wheels is not None and wheels.resolved_against == "lab" and stack.python.existing is None:
        parts.append("the wheels")
    if parts:
        yield Finding(
            code="BU-PRE-009",
            severity="error",
            cause=f"the lock of {stack.name} holds {' and '.join(parts)} from the rehearsal mirror, not real ones",
            remedy=f"lock against the real indexes: {command}",
            evidence={"wanted": 'resolved_against = "index"', "found": 'resolved_against = "lab"'},
        )


def _no_lock(part: str, command: str) -> Finding:
    return Finding(
        code="BU-PRE-010",
        severity="error",
        cause=f"the lock does not hold {part}",
        remedy=f"lock them: {command}",
    )


def _needs_packages(stack: Stack, state: HostState) -> bool:
    """Return whether something must come from packages: a driver that is kept and toolkits in place need none."""
    installed = {} if isinstance(state.toolkits, Unknown) else state.toolkits.installed
    absent = [v for v in stack.cuda.toolkits if v not in stack.cuda.runfiles and v not in installed]
    return bool(absent) or not wanted.is_driver_kept(stack, state)


def pinned(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Refuse a stack that was rolled back on this host."""
    pin = state.pin_found
    if pin is not None and pin.digest == stack.digest:
        yield Finding(
            code="BU-PRE-015",
            severity="error",
            cause=f"this stack was rolled back here and pinned: {pin.reason}",
            remedy="apply a stack that mends it, or lift the pin with `bringup rollback INVENTORY --unpin`",
            evidence={"digest": pin.digest, "since": pin.since},
        )


def gpu_count(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Refuse a host with another number of GPUs on its bus than the stack must prove."""
    if stack.verify.gpus is None or isinstance(state.gpus, Unknown):
        return
    found = len(state.gpus.pci)
    if found != stack.verify.gpus:
        yield Finding(
            code="BU-PRE-016",
            severity="error",
            cause=f"the PCI bus shows {found} NVIDIA GPUs, the stack wants {stack.verify.gpus}",
            remedy="look for a GPU that fell off the bus (kernel log, BMC), or say verify.gpus as it is",
            evidence={
                "wanted": stack.verify.gpus,
                "found": found,
                "addresses": [function.address for function in state.gpus.pci],
            },
        )


def findings(stack: Stack, state: HostState, *, site: Site, now_s: float) -> Iterator[Finding]:
    """Return what preflight says about a host that could be read."""
    yield from unsupported_system(state, site)
    yield from not_root(state)
    yield from lock(stack, state)
    yield from pinned(stack, state)
    yield from clock(state, now_s=now_s)
    yield from interpreter(stack, state)
    yield from space(stack, state)
    yield from not_executable(state, stack)
    yield from shared_memory(state)
    yield from gpu_count(stack, state)
