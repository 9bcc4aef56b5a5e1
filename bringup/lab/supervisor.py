"""Keep one lab host running: start it, start it again when it reboots, end when it powers off.

    python -m bringup.lab.supervisor HOST_DIRECTORY

Runs detached from the command that started it and records itself in ``supervisor.json`` beside ``host.json``. The
standard library only, so that a host costs little memory and starts fast.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bringup.lab import cgroup
from bringup.lab.process import start_ticks

REBOOT = 133
"""What systemd-nspawn exits with when the host asked for a reboot."""

SECONDS_OF_A_FAILED_BOOT = 1.0
"""A host that asks for a reboot sooner than this after its start would only go round and round."""


def main(argv: list[str]) -> int:
    """Supervise the host whose directory is the only argument; return the exit status of its last run."""
    directory = Path(argv[0])
    plan = json.loads((directory / "host.json").read_text())
    with open(directory / "supervisor.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"{plan['name']} has a supervisor already", file=sys.stderr)
            return 2
        return keep_running(directory, plan)


def keep_running(directory: Path, plan: dict[str, Any]) -> int:
    """Boot the host in a control group of its own until it ends in another way than a reboot."""
    groups = cgroup.create(plan["group"])
    pid = os.getpid()
    entry: dict[str, object] = {
        "pid": pid,
        "start_ticks": start_ticks(pid),
        "groups": [str(group) for group in groups],
    }
    for boots in itertools.count(1):
        record(directory, entry | {"boots": boots})
        cgroup.enter(groups)
        started = time.monotonic()
        status = subprocess.call(command(directory, plan), env=environment(), stdin=subprocess.DEVNULL)
        print(f"-- {plan['name']} ended with status {status}", flush=True)
        if status != REBOOT or time.monotonic() - started < SECONDS_OF_A_FAILED_BOOT:
            break
    return status


def command(directory: Path, plan: dict[str, Any]) -> list[str]:
    """Return the command that boots the host and stays until it is down."""
    binds = [f"--bind={source}:{target}" for source, target in plan["binds"].items()]
    return [
        # A host without its supervisor would neither reboot nor be found: they end together.
        *("setpriv", "--pdeathsig", "KILL"),
        *("systemd-nspawn", "--quiet", "--boot", "--keep-unit", "--register=no", "--console=pipe"),
        *("--resolv-conf=off", "--timezone=off", "--link-journal=no"),
        f"--directory={directory / 'root'}",
        f"--machine={plan['name']}",
        f"--network-namespace-path=/run/netns/{plan['namespace']}",
        *binds,
    ]


def environment() -> dict[str, str]:
    """Return the environment of systemd-nspawn."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        # A bare server keeps /tmp on its root file system; so does a lab host, unless its shape says otherwise.
        "SYSTEMD_NSPAWN_TMPFS_TMP": "0",
    }


def record(directory: Path, entry: dict[str, object]) -> None:
    """Write ``supervisor.json`` whole."""
    fresh = directory / "supervisor.json.new"
    fresh.write_text(json.dumps(entry) + "\n")
    fresh.replace(directory / "supervisor.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
