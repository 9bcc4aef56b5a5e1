"""Run the command line against lab hosts, and read what it says and what it left on them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bringup import paths
from bringup.lab.lab import Lab
from bringup.report.results import HostResult, Results

BRINGUP = [sys.executable, "-m", "bringup.cli"]
LAB_INVENTORY = paths.root() / "inventory" / "lab.py"

SERVING = """
readlink /opt/bringup/current; readlink -f /usr/local/cuda; cat /etc/bringup/service.env
ldconfig -p | awk '/libnvrtc|libcuda.so|libcudart/ && !seen[$1]++'; cat /etc/ld.so.conf.d/00-bringup-cuda.conf
/opt/bringup/current/bin/python -c 'import torch, sgl_kernel, flashinfer; print(torch.__version__)'
"""
"""What a serving process depends on: environment, links, service file, first hits of the loader, imports."""


@dataclass(frozen=True)
class Run:
    """One finished command line: status, what it printed, and its document where it was asked for one."""

    status: int
    out: str
    err: str
    events: tuple[Mapping[str, Any], ...] = ()

    @property
    def results(self) -> Results:
        return Results.model_validate_json(self.out)

    def host(self, name: str) -> HostResult:
        return self.results.hosts[name]

    def differences(self, name: str) -> list[str]:
        return [difference.path for difference in self.host(name).differences]

    def codes(self, name: str, severity: str = "error") -> list[str]:
        return [found.code for found in self.host(name).findings if found.severity == severity]


@dataclass
class Rig:
    """A lab and the command line pointed at it. ``data`` adds ``bringup_*`` keys for every host."""

    lab: Lab
    state: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = {
            **os.environ,
            "BRINGUP_LAB_STATE": str(self.lab.layout.state_dir),
            "BRINGUP_STATE": str(self.state),
            **self.environment,
        }

    def command(
        self, *words: str, inventory: Path = LAB_INVENTORY, as_json: bool = True, timeout_s: float = 2400
    ) -> Run:
        """Run ``bringup WORD INVENTORY …``, with its events."""
        events = self.state / "events.jsonl"
        arguments = [words[0], str(inventory), *words[1:], "--events", str(events), *(["--json"] if as_json else [])]
        if words[0] in ("apply", "rollback") and "--yes" not in words:
            arguments.append("--yes")
        done = subprocess.run(
            [*BRINGUP, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        told = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        return Run(done.returncode, done.stdout, done.stderr, tuple(told))

    def apply(self, host: str, *more: str, inventory: Path = LAB_INVENTORY) -> Run:
        return self.command("apply", "--limit", host, *more, inventory=inventory)

    def drift(self, host: str, *more: str, inventory: Path = LAB_INVENTORY) -> Run:
        return self.command("drift", "--limit", host, *more, inventory=inventory)

    def shell(self, host: str, script: str, *, timeout_s: float = 300) -> str:
        """Run a script as root on a host and return what it printed; it must succeed."""
        done = self.lab.run(host, ["sh", "-c", script], timeout_s=timeout_s)
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def serving(self, host: str) -> str:
        """Return everything that a serving process depends on, as one text to compare."""
        return self.shell(host, SERVING)

    def sessions(self, host: str) -> int:
        """Return how many commands this host's sshd has started since it booted."""
        journal = self.lab.inside(host, ["journalctl", "--boot", "--unit=ssh", "--output=cat", "--no-pager"])
        return len(re.findall(r"Starting session", journal.stdout))

    def inventory(self, name: str, text: str) -> Path:
        """Write an inventory of the test's own beside the state and return its path."""
        path = self.state / f"{name}.py"
        path.write_text(text)
        return path


def must(run: Run, status: int = 0) -> Run:
    """Return the run when it ended as expected; otherwise fail with everything it said."""
    assert run.status == status, f"wanted status {status}, found {run.status}\n{told(run)}\n{run.err[-3000:]}"
    return run


def told(run: Run) -> str:
    """Return the causes and errors that a run told, for a failing test's message."""
    try:
        hosts = run.results.hosts
    except ValueError:
        return run.out[-3000:]
    lines = []
    for name, host in hosts.items():
        lines.append(f"{name}: {host.status}: {host.why}; {[difference.path for difference in host.differences]}")
        lines += [f"  {f.code} {f.cause} {f.evidence}" for f in host.findings if f.severity == "error"]
    return "\n".join(lines)


def argv(words: Sequence[str]) -> list[str]:
    """Return a bringup command line for subprocess."""
    return [*BRINGUP, *words]
