"""Run the inventory's drain and undrain commands on the controller, around what can disturb a serving host."""

from __future__ import annotations

import os
import signal
import subprocess
from weakref import WeakSet

from pyinfra.api.host import Host

from bringup import facts, hook
from bringup.finding import Finding
from bringup.secret import hide

HOOK_LIMIT_S = 1800

_drained: WeakSet[Host] = WeakSet()


def drain(host: Host) -> Finding | None:
    """Take the host out of service; return why that did not work, or None. A drained host is left as it is."""
    if host in _drained:
        return None
    problem = _hook(host, facts.settings(host).drain, "drain")
    if problem is None:
        _drained.add(host)
    return problem


def undrain(host: Host) -> Finding | None:
    """Put a host that ``drain`` took out back into service; return why that did not work, or None."""
    if host not in _drained:
        return None
    _drained.discard(host)
    return _hook(host, facts.settings(host).undrain, "undrain")


def _hook(host: Host, command: str | None, name: str) -> Finding | None:
    if command is None:
        return None
    environment = {**os.environ, "BRINGUP_HOST": host.name, "BRINGUP_RUN_ID": facts.run_id()}
    process = hook.start(command, environment, HOOK_LIMIT_S)
    late = ""
    try:
        output, _ = process.communicate(timeout=HOOK_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        late = f"it did not end within {HOOK_LIMIT_S} s; "
    if process.returncode == 0 and not late:
        return None
    # A hook that fails may print what it was given, and what it says goes to the host on a command line.
    said = hide(output.decode("utf-8", "replace"), environment, host.data.dict()).strip().splitlines()
    return _failed(name, late + (said[-1][:300] if said else "it said nothing"), None if late else process.returncode)


def _failed(name: str, said: str, status: int | None) -> Finding:
    return Finding(
        code="BU-VFY-001" if name == "drain" else "BU-VFY-002",
        severity="error" if name == "drain" else "warning",
        cause=f"the {name} command failed: {said}",
        remedy=f"see bringup_{name} in the inventory; it gets the host's name in $BRINGUP_HOST",
        evidence={"status": status},
    )
