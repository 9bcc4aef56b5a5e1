"""The run across hosts: who takes part, what each part runs, what becomes of hosts that fell out."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import host_case
import pytest
from host_case import both, put
from scripted import Answer, Rig, answer, changed

from bringup import facts
from bringup.bench.across import Ended, Meeting
from tasks import across

FIRST, SECOND = "@fake/gpu-01", "@fake/gpu-02"
ASKED = {"hosts": [FIRST, SECOND], "port": 29400}
DIGEST = host_case.stack().env_digest("cp311-x86_64")
PORT = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}


@pytest.fixture(autouse=True)
def _no_run_before() -> Iterator[None]:
    """Forget what another test's run left in this process; a worker process has one run only."""
    yield
    across._parts.clear()
    across._ended.clear()
    across._verdict.cache_clear()


def part(**more: Any) -> across.Part:
    return across.Part(
        **{
            "environment": DIGEST,
            "python": "/env/bin/python",
            "script": "/run/bringup/bench.py",
            "device": "cuda",
            "ranks": 8,
            "address": "10.0.0.1",
            "variables": {"PATH": "/usr/bin"},
            "timeout_s": 180,
            "profile": "quick",
            "is_lookalike": False,
            "rdma": {},
            **more,
        }
    )


class Other(NamedTuple):
    """Another host of the run, as far as an operation on this one sees it."""

    name: str


class Told:
    """A rig whose run knows of two hosts; ``second`` None: the other one fell out."""

    def __init__(self, directory: Path, told: Answer, second: across.Part | None, **settings: Any) -> None:
        self.rig = Rig(directory, told, across=ASKED, force=True, only=("verify",), **settings)
        self.rig.state.active_hosts = {self.rig.host}
        if second is not None:
            across._parts[SECOND] = second
            self.rig.state.active_hosts.add(Other(SECOND))  # type: ignore[arg-type]
        self.across: list[Mapping[str, Any]] = []

    def run(self, operation: Any, **how: Any) -> list[str]:
        def listen(host: str, kind: str, content: Mapping[str, Any]) -> None:
            if kind == "across":
                self.across.append({"host": host, **content})

        facts.listen(listen)
        try:
            return self.rig.run(operation, **how)
        finally:
            facts._listeners.remove(listen)


# ---------------------------------------------------------------- taking part


def test_without_across_nothing_is_done(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(), force=True, only=("verify",))
    for operation in (across.part_of_host, across.parts_of_run, across.verdict_of_run):
        assert rig.run(operation) == []


def test_a_plan_runs_nothing(tmp_path: Path) -> None:
    told = Told(tmp_path, answer(), part())
    for operation in (across.part_of_host, across.parts_of_run, across.verdict_of_run):
        assert told.run(operation, is_executing=False) == ["settle"]
    assert (told.rig.sent, across._ended) == ({}, {})


def test_an_unknown_host_is_refused_and_nothing_else(tmp_path: Path) -> None:
    assert Told(tmp_path, {"error": "what"}, part()).run(across.part_of_host) == ["refuse BU-PRE-001"]


@pytest.mark.parametrize(
    ("change", "settings", "expected"),
    [
        pytest.param(lambda _: None, {}, ("cuda", 2, FIRST), id="GPUs"),
        pytest.param(lambda _: None, {"rendezvous": "10.9.0.1"}, ("cuda", 2, "10.9.0.1"), id="another address"),
        pytest.param(put("simulated", ["gpu"]), {}, ("cpu", 2, FIRST), id="simulated GPUs"),
    ],
)
def test_how_a_proved_host_takes_part(tmp_path: Path, change: Any, settings: Any, expected: object) -> None:
    told = Told(tmp_path, answer(change), None, **settings)
    assert told.run(across.part_of_host) == ["settle"]
    made = across._parts[FIRST]
    assert (made.device, made.ranks, made.address) == expected
    assert (made.environment, made.python) == (DIGEST, f"/opt/bringup/envs/{DIGEST}-1/bin/python")
    assert list(told.rig.sent) == [made.script]


def test_what_the_proof_saw_of_rdma_is_kept(tmp_path: Path) -> None:
    fixtures = Path(__file__).parents[1] / "fixtures" / "bench"
    check = json.loads((fixtures / "h200x2_stack_check.json").read_text(encoding="utf-8"))
    check["health"]["host"]["rdma"] = [PORT, {**PORT, "port": 2, "state": "DOWN"}]
    told = Told(tmp_path, answer(), None)
    told.rig.files[across.output_path("stack_check")] = json.dumps(check)
    told.run(across.part_of_host)
    assert across._parts[FIRST].rdma == {
        "ACTIVE": ("mlx5_0:1 (InfiniBand, 400 Gb/sec (4X NDR))",),
        "DOWN": ("mlx5_0:2 (InfiniBand, 400 Gb/sec (4X NDR))",),
    }


USER = {"pid": 7, "command": "python", "user_id": 0, "unit": None, "devices": [], "is_computing": True}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(put("verification", None), "BU-VFY-231", id="not proved"),
        pytest.param(put("verification boot_id", "boot-0"), "BU-VFY-231", id="proved before this boot"),
        pytest.param(put("processes gpu", [USER]), "BU-DRV-101", id="in use again"),
    ],
)
def test_a_host_that_cannot_take_part_is_refused(tmp_path: Path, change: Any, code: str) -> None:
    told = Told(tmp_path, answer(change), None)
    assert told.run(across.part_of_host) == ["settle", f"refuse {code}"]
    assert across._parts == {}


# ---------------------------------------------------------------- running


@pytest.mark.parametrize(
    ("second", "commands", "findings"),
    [
        pytest.param(part(address="10.0.0.2"), ["settle", "_run"], [], id="alike"),
        pytest.param(None, ["settle"], [("BU-VFY-237", "warning")], id="the other fell out"),
        pytest.param(
            part(address="10.0.0.2", environment="0" * 12),
            ["settle", "refuse BU-VFY-231"],
            [("BU-VFY-231", "error")],
            id="another environment",
        ),
        pytest.param(
            part(address="10.0.0.2", device="cpu"),
            ["settle", "refuse BU-VFY-231"],
            [("BU-VFY-231", "error")],
            id="no GPU there",
        ),
        pytest.param(part(), ["settle", "refuse BU-VFY-231"], [("BU-VFY-231", "error")], id="the same address"),
        pytest.param(part(address="10.0.0.2", is_lookalike=True), ["settle"], [], id="a look-alike torch"),
    ],
)
def test_nothing_starts_unless_all_are_there_and_alike(
    tmp_path: Path, second: across.Part | None, commands: list[str], findings: list[object]
) -> None:
    told = Told(tmp_path, answer(), second)
    across._parts[FIRST] = part()
    assert (told.run(across.parts_of_run), told.rig.findings) == (commands, findings)


def test_the_command_of_a_part_on_gpus() -> None:
    meeting = Meeting({FIRST: "10.0.0.1", SECOND: "10.0.0.2"}, 29400, "r1")
    argv = across.command(meeting, SECOND, part())
    assert argv[:8] == [
        *("env", "-i", "BRINGUP_RUN_ID=r1", "BRINGUP_RUN_LOCK=/run/bringup/run.lock", "OMP_NUM_THREADS=1"),
        *("PATH=/usr/bin", "PATIENCE_S=45", "TMPDIR=/run/bringup/across"),
    ]
    assert argv[argv.index("/env/bin/python") - 2 : argv.index("/env/bin/python")] == [
        "/run/bringup/documents/allreduce_across.json",
        "/run/bringup/documents/allreduce_across_node.json",
    ]
    assert argv[argv.index("/run/bringup/bench.py") :] == [
        "/run/bringup/bench.py",
        *("--timeout", "180"),
        *("--output", "/run/bringup/documents/allreduce_across.json"),
        *("--node-output", "/run/bringup/documents/allreduce_across_node.json"),
        *("--profile", "quick", "--device", "cuda", "--backends", "nccl,nccl_graph"),
    ]
    assert across.limit_s(meeting, part()) == 120 + 180 + 60


def test_a_part_without_gpus_runs_gloo() -> None:
    argv = across.command(Meeting({FIRST: "a", SECOND: "b"}, 1, "r1"), FIRST, part(device="cpu", ranks=2))
    assert argv[-4:] == ["--profile", "smoke", "--device", "cpu"]
    assert argv[argv.index("--nproc-per-node") + 1] == "2"


@pytest.mark.parametrize(
    ("holder", "part", "status"),
    [
        ({"run": "r1", "who": "x"}, "exit 3", 3),
        ({"run": "r1", "who": "x"}, "echo said; exit 0", 0),
        ({"run": "r2", "who": "y"}, "exec sleep 60", 137),
        ({}, "trap '' TERM; exec sleep 60", 137),
    ],
    ids=["its status", "what it says", "another run holds the host", "nobody holds it, and it does not listen"],
)
def test_a_part_ends_when_its_run_is_over(tmp_path: Path, holder: Answer, part: str, status: int) -> None:
    lock, scratch = tmp_path / "run.lock", tmp_path / "scratch"
    lock.write_text(json.dumps(holder, sort_keys=True) + "\n")
    left = tmp_path / "documents" / "left.json"
    left.parent.mkdir()
    left.write_text("of an earlier run")
    variables = {"PATH": "/usr/bin:/bin", "TMPDIR": str(scratch), "BRINGUP_RUN_ID": "r1", "BRINGUP_RUN_LOCK": str(lock)}
    variables["PATIENCE_S"] = "45"
    argv = ["sh", "-c", across._SCRIPTED, str(left), str(tmp_path / "note"), "sh", "-c", f'test -d "$TMPDIR"; {part}']
    begun = time.monotonic()
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (status, "said\n" if "said" in part else "")
    assert time.monotonic() - begun < 10
    assert not scratch.exists()
    assert not left.exists()


@pytest.mark.parametrize(
    ("error", "status"),
    [('{"message": "nccl took more than 60 s"}', 1), ("null", 0)],
    ids=["a rank failed", "none did"],
)
def test_torchrun_does_not_wait_for_ever_once_a_rank_has_failed(tmp_path: Path, error: str, status: int) -> None:
    lock, note = tmp_path / "run.lock", tmp_path / "note"
    lock.write_text('{"run": "r1"}\n')
    variables = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path / "s"), "BRINGUP_RUN_ID": "r1", "PATIENCE_S": "2"}
    part = f"""printf '%s' '{{"error": {error}}}' > {note}; trap '' TERM; exec sleep 8"""
    argv = ["sh", "-c", across._SCRIPTED, str(tmp_path / "a"), str(note), "sh", "-c", part]
    begun = time.monotonic()
    done = subprocess.run(argv, env={**variables, "BRINGUP_RUN_LOCK": str(lock)}, capture_output=True, timeout=30)
    assert done.returncode == status
    assert (time.monotonic() - begun < 7) is bool(status)
    assert not (tmp_path / "s").exists()


def test_a_part_ends_when_the_lock_falls(tmp_path: Path) -> None:
    lock = tmp_path / "run.lock"
    lock.write_text('{"run": "r1"}\n')
    variables = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path / "s"), "BRINGUP_RUN_ID": "r1", "PATIENCE_S": "45"}
    argv = ["sh", "-c", across._SCRIPTED, str(tmp_path / "a"), str(tmp_path / "b"), "sleep", "60"]
    process = subprocess.Popen(argv, env={**variables, "BRINGUP_RUN_LOCK": str(lock)})
    time.sleep(1.5)
    assert process.poll() is None
    lock.write_text("")
    assert process.wait(timeout=10) == 137


def ended(tmp_path: Path, files: dict[str, str]) -> Ended:
    told = Told(tmp_path, answer(), None)
    across._parts[FIRST] = part()
    told.rig.files.update(files)
    with told.rig._bound():
        across._run(["torchrun", "last-word"], 1.0)
    return across._ended[FIRST]


NOTE = {"program": "allreduce_bench_node", "node": 1, "rank": 8, "phase": "leave", "is_done": True}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"last-word": "done", across.NODE_OUTPUT: json.dumps(NOTE)}, (0, "done", 1)),
        ({"last-word": "done", across.NODE_OUTPUT: "half of it"}, (0, "done", None)),
        ({}, (44, "", None)),
    ],
    ids=["ended", "a note that cannot be read", "failed"],
)
def test_how_a_part_ended_is_kept(tmp_path: Path, files: dict[str, str], expected: object) -> None:
    part = ended(tmp_path, files)
    assert (part.status, part.said, part.note.node if part.note else None) == expected


def test_a_document_that_cannot_be_read_is_said_and_not_taken(tmp_path: Path) -> None:
    part = ended(tmp_path, {"last-word": "done", across.OUTPUT: '{"schema": 2}'})
    assert (part.status, part.document) == (0, None)
    assert "the all-reduce bench's answer cannot be read" in part.said


# ---------------------------------------------------------------- the verdict


def test_the_first_host_tells_for_all_and_the_one_at_fault_is_refused(tmp_path: Path) -> None:
    told = Told(tmp_path, answer(), part(address="10.0.0.2"))
    across._parts[FIRST] = part()
    across._ended[FIRST] = Ended(FIRST, 1, "EADDRINUSE")
    across._ended[SECOND] = Ended(SECOND, 1, "RendezvousConnectionError")
    assert told.run(across.verdict_of_run) == ["settle", "refuse BU-VFY-232"]
    assert told.across == [
        {
            "host": FIRST,
            "hosts": (FIRST, SECOND),
            "state": "failed",
            "reason": f"{FIRST} cannot be the meeting point: 10.0.0.1:29400 is already in use there",
        }
    ]


def test_a_host_without_fault_is_not_refused(tmp_path: Path) -> None:
    told = Told(tmp_path, answer(), part(address="10.0.0.2"))
    across._parts[FIRST] = part()
    across._ended[FIRST] = Ended(FIRST, 1, "RendezvousTimeoutError")
    assert told.run(across.verdict_of_run) == ["settle"]
    assert told.rig.findings == [("BU-VFY-237", "warning")]


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (None, f"not all hosts were ready: {SECOND}"),
        (
            part(address="10.0.0.2", is_lookalike=True),
            "the torch of these hosts is a look-alike; it never runs a collective",
        ),
    ],
    ids=["one fell out", "look-alikes"],
)
def test_what_was_not_run_is_said(tmp_path: Path, second: across.Part | None, reason: str) -> None:
    told = Told(tmp_path, answer(), second)
    across._parts[FIRST] = part()
    assert told.run(across.verdict_of_run) == ["settle"]
    assert [(one["state"], one["reason"]) for one in told.across] == [("not_run", reason)]


def test_look_alike_wheels_make_a_look_alike_part(tmp_path: Path) -> None:
    lock = changed(host_case.LOCK, put("wheels resolved_against", "lab"))
    told = Told(tmp_path, answer(both(put("simulated", ["gpu", "driver", "wheels"]))), None, lock=lock)
    commands = told.run(across.part_of_host)
    assert (commands, across._parts[FIRST].is_lookalike) == (["settle"], True)
