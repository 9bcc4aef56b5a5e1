"""Say how the inventory's commands are started, which take hosts out of service and put them back."""

from __future__ import annotations

_GRACE_S = 2.0
"""So that whoever waits for a hook is the first to end it, and can say that it was late."""


def bounded(command: str, limit_s: float) -> list[str]:
    """Return the command line of a hook that ends by itself soon after its limit, whatever becomes of us.

    It is to be started in a session of its own: ``timeout`` of coreutils ends the whole process group.
    """
    return ["timeout", "--signal=KILL", f"{limit_s + _GRACE_S:.3f}", "/bin/sh", "-c", command]
