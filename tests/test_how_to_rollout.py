"""The drain and undrain commands of the how-to, run as they stand against stand-ins that keep a node's state."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bringup import paths
from bringup.commands.crew import EngineCrew, Hook
from bringup.history import History
from bringup.rollout import Limit, Limits, Rollout, RolloutHost, Started, Step, replay

HOST = "gpu-1"

# What Slurm does with a node: a job keeps a drained one from being idle, and only a drained node can be resumed.
SCONTROL = """#!/bin/sh
cd "$(dirname "$0")" || exit 1
echo "$*" >> log
case "$*" in
    "--oneliner show node gpu-1")
        echo "NodeName=gpu-1 Arch=x86_64 CPUAlloc=$(cat jobs) State=$(cat state) ThreadsPerCore=2 $(cat reason)"
        # The job ends after it was looked at once.
        if [ "$(cat state)" = MIXED+DRAIN ] && [ -e ends ]; then echo 0 > jobs; echo IDLE+DRAIN > state; fi ;;
    "update NodeName=gpu-1 State=DRAIN Reason=bringup")
        echo " Reason=bringup [root@2026-01-01T00:00:00]" > reason
        if [ "$(cat jobs)" = 0 ]; then echo IDLE+DRAIN > state; else echo MIXED+DRAIN > state; fi ;;
    "update NodeName=gpu-1 State=RESUME")
        case $(cat state) in *DRAIN) ;; *) echo "slurm_update error: Invalid node state specified"; exit 1 ;; esac
        sed -i s/+DRAIN// state; : > reason ;;
    *) echo "scontrol: invalid entity: $*"; exit 1 ;;
esac
"""

# What Kubernetes does: drain cordons first and evicts then; a disruption budget holds it up until its own limit.
KUBECTL = """#!/bin/sh
cd "$(dirname "$0")" || exit 1
echo "$*" >> log
case "$*" in
    "annotate node gpu-1 bringup=drained --overwrite") echo drained > annotation ;;
    "annotate node gpu-1 bringup-") rm -f annotation ;;
    "drain gpu-1 --ignore-daemonsets --delete-emptydir-data --timeout=840s")
        echo SchedulingDisabled > state
        if [ "$(cat jobs)" != 0 ] && [ ! -e ends ]; then
            echo 'error when evicting pods/"serving": global timeout reached: 14m0s' >&2; exit 1
        fi
        echo 0 > jobs ;;
    "get node gpu-1 --output=jsonpath={.metadata.annotations.bringup}") cat annotation 2>/dev/null; : ;;
    "uncordon gpu-1") echo Ready > state ;;
    *) echo "error: unknown command: $*" >&2; exit 1 ;;
esac
"""

IDLE = {"scontrol": "IDLE", "kubectl": "Ready"}
OUT = {"scontrol": "IDLE+DRAIN", "kubectl": "SchedulingDisabled"}
PROGRAMS = {"scontrol": SCONTROL, "kubectl": KUBECTL}


def hook(program: str) -> Hook:
    """Return the commands of the how-to that call a program."""
    text = (paths.root() / "docs" / "how-to-rollout.md").read_text()
    (block,) = [block for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if program in block]
    data: dict[str, str] = {}
    exec(block, data)
    return Hook(data["bringup_drain"], data["bringup_undrain"])


class Node:
    """A node of a cluster, as its stand-in keeps it."""

    def __init__(self, directory: Path, program: str) -> None:
        self.directory = directory
        (directory / program).write_text(PROGRAMS[program])
        (directory / program).chmod(0o755)
        self.set(state=IDLE[program], jobs="0", reason="")

    def set(self, **files: str) -> None:
        for name, content in files.items():
            (self.directory / name).write_text(content + "\n")

    def get(self, name: str) -> str:
        path = self.directory / name
        return path.read_text().strip() if path.exists() else ""

    def asked(self) -> list[str]:
        return self.get("log").splitlines()


@pytest.fixture(params=["scontrol", "kubectl"])
def program(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def node(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setenv("POLL_S", "0.1")
    return Node(directory, program)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    opened = History.open(f"sqlite:///{tmp_path / 'history.db'}")
    yield opened
    opened.close()


def done(history: History, hook: Hook, step: Step, limit_s: float = 20.0) -> str | None:
    """Run a hook as a rollout does and return why it failed, None when it did not."""
    crew = EngineCrew("inventory/x.py", history, {HOST: hook}, {}, hook_limit_s=limit_s)
    try:
        crew.begin(rollout(), step, [HOST])
        (outcome,) = crew.outcomes(30.0)
    finally:
        crew.stop()
    return outcome.why  # type: ignore[union-attr]


def rollout() -> Rollout:
    started = Started(0.0, "ro1", "lab", "d1", (RolloutHost(HOST),), ((HOST,),), Limits(Limit.parse("1")))
    return replay([started])


def test_an_idle_host_goes_out_and_comes_back(program: str, node: Node, history: History) -> None:
    assert done(history, hook(program), "drain") is None
    assert node.get("state") == OUT[program]
    # After a crash either is done again, and comes to the same end.
    assert done(history, hook(program), "drain") is None
    assert done(history, hook(program), "undrain") is None
    assert node.get("state") == IDLE[program]
    assert done(history, hook(program), "undrain") is None
    assert node.get("state") == IDLE[program]


def test_what_runs_is_waited_for(program: str, node: Node, history: History) -> None:
    node.set(jobs="8", ends="")
    assert done(history, hook(program), "drain") is None
    assert (node.get("state"), node.get("jobs")) == (OUT[program], "0")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("scontrol", "the drain command did not end within 1 s: it said nothing"),
        (
            "kubectl",
            'the drain command ended with 1: error when evicting pods/"serving": global timeout reached: 14m0s',
        ),
    ],
    indirect=["program"],
)
def test_what_never_ends_is_bounded_and_put_back(program: str, why: str, node: Node, history: History) -> None:
    node.set(jobs="8")
    assert done(history, hook(program), "drain", limit_s=1.0) == why
    assert done(history, hook(program), "undrain") is None
    assert not node.get("state").endswith(("DRAIN", "Disabled"))
    assert node.get("jobs") == "8"


@pytest.mark.parametrize("program", ["scontrol"], indirect=True)
def test_a_host_that_somebody_else_drained_is_left_alone(program: str, node: Node, history: History) -> None:
    node.set(state="IDLE+DRAIN", reason=" Reason=fan [alice@2026-01-01T00:00:00]")
    assert done(history, hook(program), "drain") == "the drain command ended with 1: gpu-1 is drained by somebody else"
    assert done(history, hook(program), "undrain") is None
    assert [line for line in node.asked() if line.startswith("update")] == []


@pytest.mark.parametrize("program", ["kubectl"], indirect=True)
def test_a_host_that_somebody_else_cordoned_stays_cordoned(program: str, node: Node, history: History) -> None:
    node.set(state="SchedulingDisabled")
    assert done(history, hook(program), "undrain") is None
    assert node.get("state") == "SchedulingDisabled"
