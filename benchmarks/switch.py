"""Measure how long a switch and a rollback take on one lab host, while a process of the old environment runs on.

    bringup lab up --hosts 1 && python benchmarks/switch.py --rounds 5

Two stacks take turns: ``apply`` of the second, ``rollback`` to the first, the pin lifted. Both environments are built
and proved before the first round, so what is timed is the cutover alone. For each cutover two figures come from its
event stream: the change is the time from the first command that alters what the host serves to the one that makes
it final; the step is all of it, with looking again, draining, and clearing away what nobody needs. The peer, in the
same rounds, is what people do by hand over the same ssh: the link, the service file and the toolkit changed by one
shell command, nothing looked at, nothing to undo. A process that was started through /opt/bringup/bin/run before the
first round must import a module for the first time after the last one, out of its own environment; otherwise
this ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bringup import paths
from bringup.lab.lab import Lab

INVENTORY = str(paths.root() / "inventory" / "lab.py")
GOAL_S = 1.0
LIVES = """
import pathlib, time, torch
print(torch.__file__, flush=True)
while not pathlib.Path("/run/import-now").exists():
    time.sleep(0.05)
import flashinfer
print(flashinfer.__file__, flush=True)
"""
START = f"""
systemctl stop lives 2>/dev/null || :
rm -f /run/import-now /run/lives.out; cat > /run/lives.py <<'END'
{LIVES}END
systemd-run --quiet --unit=lives --collect --property=StandardOutput=truncate:/run/lives.out \\
  /opt/bringup/bin/run python /run/lives.py
for i in $(seq 100); do [ -s /run/lives.out ] && break; sleep 0.1; done
readlink /opt/bringup/current
"""
BY_HAND = """
ln -sfn {environment} /opt/bringup/current.new && mv -T /opt/bringup/current.new /opt/bringup/current
cp /etc/bringup/service.env /etc/bringup/service.env.new && mv /etc/bringup/service.env.new /etc/bringup/service.env
update-alternatives --quiet --set cuda {cuda} && ldconfig
"""


@dataclass(frozen=True)
class Cutover:
    """What one cutover took, in seconds: the change of what is served, and the whole step."""

    change_s: float
    step_s: float


def run(*words: str) -> list[Mapping[str, Any]]:
    """Run the command line and return its events. Raises SystemExit when it does not end with status 0."""
    argv = [sys.executable, "-m", "bringup.cli", *words, "--events", "-"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with status {done.returncode}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def cutover(events: Sequence[Mapping[str, Any]]) -> Cutover:
    """Return what the cutover in a run took, by the times at which its commands began."""
    start = next(
        at for at, event in enumerate(events) if event["event"] == "step_started" and event["step"] == "switch"
    )
    done = next(event for event in events[start:] if event["event"] == "step_done")
    begins = [event for event in events[start:] if event["event"] == "command"]
    first = next(event["time_s"] for event in begins if " --undo" in event["command"] or " cutover" in event["command"])
    commit = next(at for at, event in enumerate(begins) if event["command"].endswith(" commit"))
    following = begins[commit + 1]["time_s"] if commit + 1 < len(begins) else done["time_s"]
    return Cutover(min(following, done["time_s"]) - first, done["seconds"])


def by_hand(lab: Lab, host: str, environment: str) -> float:
    """Change the same things without any of the care, over the same ssh; return the seconds."""
    script = BY_HAND.format(environment=environment, cuda="/usr/local/cuda-13.0")
    started = time.monotonic()
    done = lab.run(host, ["sh", "-ec", script])
    if done.returncode != 0:
        raise SystemExit(f"by hand: {done.stderr}")
    return time.monotonic() - started


def main() -> int:
    """Take turns and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="gpu-01")
    parser.add_argument("--stacks", nargs=2, default=["lab", "sglang-0.5.9-cu130"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lab = Lab.open()
    only = [INVENTORY, "--limit", options.host]
    apply = [["apply", *only, "--stack", stack, "--yes"] for stack in options.stacks]
    for words in (*apply, apply[0]):
        run(*words)
    began = lab.run(options.host, ["sh", "-ec", START])
    if began.returncode != 0:
        raise SystemExit(f"no process could be started: {began.stderr}")
    old = began.stdout.strip()
    switches, rollbacks, hands = [], [], []
    for _ in range(options.rounds):
        switches.append(cutover(run(*apply[1])))
        rollbacks.append(cutover(run("rollback", *only, "--yes")))
        run("rollback", *only, "--unpin", "--yes")
        hands.append(by_hand(lab, options.host, old))
    has_two = "[ $(wc -l < /run/lives.out) -ge 2 ]"
    wait = f"for i in $(seq 100); do {has_two} && break; sleep 0.1; done; tail -n1 /run/lives.out"
    imported = lab.run(
        options.host, ["sh", "-c", f"touch /run/import-now; {wait}; systemctl stop lives"]
    ).stdout.strip()
    hand = statistics.median(hands)
    print(f"{options.rounds} rounds on {options.host}, {' and '.join(options.stacks)}, {os.cpu_count()} cores")
    print(f"{'by hand over the same ssh':<28} {hand:6.2f} s")
    for name, found in (("switch", switches), ("rollback", rollbacks)):
        for part in ("change", "step"):
            seconds = [getattr(each, f"{part}_s") for each in found]
            middle = statistics.median(seconds)
            met = f"goal <= {GOAL_S:.0f} s: {'met' if middle <= GOAL_S else 'MISSED'}"
            print(
                f"{name + ', ' + part:<28} {middle:6.2f} s  {middle / hand:5.1f} x by hand  "
                f"({min(seconds):.2f} to {max(seconds):.2f})  {met}"
            )
    is_own = imported.startswith(f"{old}/")
    print(f"a process from before imported {imported or 'nothing'}: {'its own' if is_own else 'NOT ITS OWN'}")
    return 0 if is_own else 1


if __name__ == "__main__":
    sys.exit(main())
