"""Give every lab host a control group of its own: it contains, counts and ends all processes of the host.

Works on a unified hierarchy and on version 1 hierarchies with a unified one beside them. The standard library
only: the supervisor imports nothing else.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")

# A version 1 cpuset takes no process until it is told its processors, and systemd does not use it.
_LEFT_ALONE = {"cpuset"}


def hierarchies() -> list[Path]:
    """Return where the groups of a new host belong: one directory for each mounted hierarchy.

    On version 1 that is below our own group, so that limits set on us hold for the hosts too.
    """
    own = _own_groups()
    found = []
    for line in _MOUNTS.read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.append(Path(where))
        elif kind == "cgroup":
            controllers = set(options.split(","))
            if controllers & _LEFT_ALONE:
                continue
            group = next((path for names, path in own if names & controllers), "/")
            found.append(Path(where + group.rstrip("/")))
    return [path for path in found if path.is_dir()]


def create(name: str) -> list[Path]:
    """Make the group ``name`` (a relative path) in every hierarchy and return the directories."""
    made = []
    for top in hierarchies():
        group = top / name
        group.mkdir(parents=True, exist_ok=True)
        made.append(group)
    return made


def enter(groups: Sequence[Path]) -> None:
    """Move this process into ``groups``; its children follow."""
    for group in groups:
        (group / "cgroup.procs").write_text(str(os.getpid()))


def processes(groups: Sequence[Path]) -> set[int]:
    """Return the process ids in ``groups`` and below."""
    found: set[int] = set()
    for group in groups:
        for listing in _below(group):
            try:
                found.update(int(line) for line in (listing / "cgroup.procs").read_text().split())
            except OSError:
                continue  # The group went away, and so did what was in it.
    return found - {0}


def end(groups: Sequence[Path], *, last: int | None = None, timeout_s: float = 20) -> bool:
    """Kill every process in ``groups`` and remove them; return False when some outlived the limit.

    ``last`` is a parent that ends by itself when its children are gone; it is given a second to collect them, so
    that none is left for process 1 to bury.
    """
    started = time.monotonic()
    while left := processes(groups):
        has_patience = time.monotonic() - started < 1
        send(left - {last} if has_patience else left, signal.SIGKILL)
        if time.monotonic() - started > timeout_s:
            return False
        time.sleep(0.01)
    for group in groups:
        for directory in reversed(list(_below(group))):
            _remove(directory, started + timeout_s)
    return True


def send(pids: set[int], number: signal.Signals) -> None:
    """Send a signal to ``pids``; those that are gone do not matter."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _remove(directory: Path, deadline: float) -> None:
    """Remove one empty group; the kernel says busy for a moment after the last process is gone."""
    while True:
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)


def _below(group: Path) -> Iterator[Path]:
    """Yield ``group`` and the groups below it, parents first."""
    for directory, _, _ in os.walk(group):
        yield Path(directory)


def _own_groups() -> list[tuple[set[str], str]]:
    own = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own.append((set(names.split(",")), path))
    return own
