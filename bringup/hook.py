"""Say how the inventory's commands are started, which take hosts out of service and put them back."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

_GRACE_S = 2.0
"""So that whoever waits for a hook is the first to end it, and can say that it was late."""


def bounded(command: str, limit_s: float) -> list[str]:
    """Return the command line of a hook that ends by itself soon after its limit, whatever becomes of us.

    ``start`` gives it a process group of its own, all of which ``timeout`` of coreutils ends.
    """
    return ["timeout", "--signal=KILL", f"{limit_s + _GRACE_S:.3f}", "/bin/sh", "-c", command]


def start(command: str, environment: Mapping[str, str], limit_s: float) -> subprocess.Popen[bytes]:
    """Start a hook, its output and its errors in one pipe; it has a process group of its own, led by its pid."""
    # A pipeline outlives the shell that is killed, and would hold up whoever reads its output.
    return subprocess.Popen(
        bounded(command, limit_s),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
