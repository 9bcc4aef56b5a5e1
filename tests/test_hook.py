"""A hook ends, whatever becomes of the controller that started it."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from bringup.hook import bounded

STARTED = """
import os, subprocess, sys
from bringup.hook import bounded
hook = subprocess.Popen(bounded(sys.argv[1], 0.2), start_new_session=True)
print(hook.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("command", ["sleep 61", "sleep 61 | sleep 61", "trap '' TERM INT; sleep 61; sleep 61"])
def test_it_ends_after_its_limit_with_all_that_it_started(command: str) -> None:
    said = subprocess.run([sys.executable, "-c", STARTED, command], capture_output=True, text=True, check=False).stdout
    deadline = time.monotonic() + 30
    while session(int(said)):
        assert time.monotonic() < deadline, f"{command!r} outlives its limit"
        time.sleep(0.05)


def session(leader: int) -> list[int]:
    """Return the processes that run in the session of one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[3]) == leader:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(("command", "status"), [("exit 3", 3), ("true", 0)])
def test_it_ends_with_the_status_of_its_command(command: str, status: int) -> None:
    assert subprocess.run(bounded(command, 60), check=False).returncode == status
