"""Name a process so that a later command finds that very one, and start one that outlives us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Return when ``pid`` started, in clock ticks since the machine's boot; None when it is gone or a zombie.

    Together with the id this names one process for ever: ids are used again, pairs are not.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, ticks: int) -> bool:
    """Return whether the process that started at ``ticks`` under this id still runs."""
    return start_ticks(pid) == ticks


def end(pid: int, ticks: int, *, timeout_s: float = 10) -> None:
    """Kill that very process and wait until it is gone."""
    deadline = time.monotonic() + timeout_s
    while is_alive(pid, ticks) and time.monotonic() < deadline:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.01)


def detach(module: str, arguments: Sequence[str], *, log: Path) -> None:
    """Start ``python -m module`` as nobody's child: no terminal, no pipe, output appended to ``log``."""
    with open(log, "ab") as output:
        subprocess.run(
            ["setsid", "--fork", sys.executable, "-P", "-m", module, *arguments],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=True,
        )


def with_arguments(*wanted: str) -> set[int]:
    """Return the processes whose command line holds all of ``wanted`` as whole arguments."""
    return {pid for pid, line in _command_lines() if set(line.split("\0")).issuperset(wanted)}


def mentioning(text: str) -> set[int]:
    """Return the processes whose command line mentions ``text``; servers write theirs anew, without arguments."""
    return {pid for pid, line in _command_lines() if text in line}


def _command_lines() -> Iterator[tuple[int, str]]:
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                yield int(directory.name), (directory / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue


def in_namespace_as_first(pid: int) -> bool:
    """Return whether ``pid`` is process 1 of a process namespace below ours."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    for line in status.splitlines():
        if line.startswith("NSpid:"):
            ids = line.split()[1:]
            return len(ids) > 1 and ids[-1] == "1"
    return False
