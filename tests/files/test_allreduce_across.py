"""All-reduce across hosts: real torchrun, real torch on CPU, two "hosts" on two addresses of the loopback interface."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest

from bringup import paths
from bringup.bench import across, parse
from bringup.bench.document import parse_note

SCRIPT = paths.files() / "allreduce_bench.py"
BENCH = paths.host_script("allreduce_bench")
WORK = paths.files() / "host_work.py"
SCHEMA = json.loads((paths.root() / "docs/reference/allreduce-bench.schema.json").read_text(encoding="utf-8"))
ADDRESSES = {"gpu-01": "127.0.0.2", "gpu-02": "127.0.0.3"}
LIMIT_S = 90.0


def free_port() -> int:
    """Return a port of the meeting point that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((ADDRESSES["gpu-01"], 0))
        return int(probe.getsockname()[1])


@dataclass
class Hosts:
    """Both parts of one run, each under ``host_work.py`` of its host with the limit that ends what does not end."""

    python: str
    directory: Path
    meeting: across.Meeting
    limit_s: float = 70.0

    def start(self, host: str, *more: str) -> subprocess.Popen[bytes]:
        arguments = ["--device", "cpu", "--payloads", "8192,262144", "--timeout", "60", "--backend-timeout", "12"]
        arguments += ["--output", str(self.output(host)), "--node-output", str(self.node(host)), *more]
        argv = across.torchrun(self.meeting, host, self.python, across.CPU_RANKS, str(SCRIPT), arguments)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.directory)}
        for name in ("RUN", "STATE"):
            place = self.directory / host / name
            place.mkdir(parents=True, exist_ok=True)
            environment[f"BRINGUP_{name}_DIR"] = str(place)
        (self.directory / host / "RUN" / "run.lock").write_text(json.dumps({"run": "test"}))
        work = [sys.executable, str(WORK), "--run", "test", "do", "verify-across", "--limit-s", str(self.limit_s), "--"]
        with self.log(host).open("wb") as log:
            return subprocess.Popen([*work, *argv], stdout=log, stderr=log, env=environment)

    def output(self, host: str) -> Path:
        return self.directory / f"{host}.json"

    def node(self, host: str) -> Path:
        return self.directory / f"{host}.node.json"

    def log(self, host: str) -> Path:
        return self.directory / f"{host}.log"

    def ended(self, host: str, process: subprocess.Popen[bytes] | None) -> across.Ended:
        """Return how a part ended; None: nothing was heard of it."""
        status = None
        if process is not None:
            status = process.wait(timeout=LIMIT_S)
        note = json.loads(self.node(host).read_text()) if self.node(host).exists() else None
        document = json.loads(self.output(host).read_text()) if self.output(host).exists() else None
        if document is not None:
            jsonschema.validate(document, SCHEMA)
        return across.Ended(
            host,
            status,
            self.log(host).read_text(errors="replace") if self.log(host).exists() else "",
            parse_note(note),
            parse(document) if document else None,
        )

    def left(self) -> list[str]:
        """Return the processes of this run that live, by their command lines; they get a second to end."""
        until = time.monotonic() + 1
        while (found := self._living()) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def _living(self) -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(self.directory) in line and BENCH.process_state(int(path.parent.name)) not in (None, "Z"):
                found.append(line)
        return found

    def living_ranks(self) -> list[int]:
        """Return the processes of the bench that run, oldest first."""
        return sorted(
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if _reads(path).startswith(f"{self.python} -u {SCRIPT}") and str(self.directory) in _reads(path)
        )


def _reads(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.fixture
def hosts(torch_python: str, tmp_path: Path) -> Iterator[Hosts]:
    meeting = across.Meeting(ADDRESSES, free_port(), f"test-{os.getpid()}", join_limit_s=20)
    both = Hosts(torch_python, tmp_path, meeting)
    yield both
    for pid in both.living_ranks():
        os.kill(pid, signal.SIGKILL)


def judged(hosts: Hosts, *parts: across.Ended) -> tuple[str, dict[str, list[tuple[str, str, str]]]]:
    verdict = across.judge(parts, hosts.meeting.endpoint)
    found = {host: [(f.code, f.severity, f.cause) for f in findings] for host, findings in verdict.findings.items()}
    return verdict.state, found


INNOCENT = [("BU-VFY-237", "warning", "nothing was measured across the hosts because of gpu-02")]


@pytest.mark.real
def test_two_hosts_measure_together_and_one_document_says_so(hosts: Hosts) -> None:
    processes = {host: hosts.start(host) for host in ADDRESSES}
    parts = [hosts.ended(host, process) for host, process in processes.items()]
    state, found = judged(hosts, *parts)
    assert (state, [part.status for part in parts]) == ("measured", [0, 0])
    assert [part.document is not None for part in parts] == [True, False]
    document = parts[0].document
    assert document is not None
    assert (document.launcher, document.system.nodes, document.system.ranks) == ("torchrun", 2, 4)
    assert [gpu.node for gpu in document.system.gpus] == [0, 0, 1, 1]
    assert [(row.payload_bytes, len(row.rank_median_us)) for row in document.rows] == [(8192, 4), (262144, 4)]
    assert all(check.ok for check in document.checks)
    assert [(part.note.node, part.note.is_done) for part in parts if part.note] == [(0, True), (1, True)]
    assert found == {
        "gpu-01": [
            (
                "BU-VFY-238",
                "info",
                "gloo on CPU moved data between gpu-01, gpu-02: no GPU took part, so this says nothing of GPUs",
            )
        ],
        "gpu-02": [],
    }
    assert hosts.left() == []


@pytest.mark.real
def test_a_host_that_never_comes_is_named_and_the_other_does_not_wait_for_ever(hosts: Hosts) -> None:
    begun = time.monotonic()
    first = hosts.ended("gpu-01", hosts.start("gpu-01"))
    assert time.monotonic() - begun < hosts.meeting.join_limit_s + 25
    assert (first.status, first.note, first.document) == (1, None, None)
    assert judged(hosts, first, across.Ended("gpu-02", None)) == (
        "failed",
        {
            "gpu-01": INNOCENT,
            "gpu-02": [
                (
                    "BU-VFY-232",
                    "error",
                    "gpu-02 did not join the run across hosts: nothing was heard from it",
                )
            ],
        },
    )
    assert hosts.left() == []


@pytest.mark.real
def test_a_host_that_cannot_reach_the_meeting_point_is_named(hosts: Hosts) -> None:
    first = hosts.start("gpu-01")
    lost = across.Meeting({"gpu-01": "127.0.0.9", "gpu-02": "127.0.0.3"}, free_port(), hosts.meeting.run, 5)
    second = Hosts(hosts.python, hosts.directory, lost).start("gpu-02")
    state, found = judged(hosts, hosts.ended("gpu-01", first), hosts.ended("gpu-02", second))
    assert (state, found["gpu-01"]) == ("failed", INNOCENT)
    assert found["gpu-02"] == [
        (
            "BU-VFY-232",
            "error",
            f"gpu-02 did not join the run across hosts: it cannot reach {hosts.meeting.endpoint}",
        )
    ]
    assert hosts.left() == []


@pytest.mark.real
def test_a_port_that_is_taken_is_named(hosts: Hosts) -> None:
    with socket.create_server(("0.0.0.0", hosts.meeting.port)):
        short = across.Meeting(ADDRESSES, hosts.meeting.port, hosts.meeting.run, 5)
        both = Hosts(hosts.python, hosts.directory, short, limit_s=15)
        processes = {host: both.start(host) for host in ADDRESSES}
        parts = [both.ended(host, process) for host, process in processes.items()]
    state, found = judged(hosts, *parts)
    # Whoever listens there takes the second host's call and never answers: only the limit ends that.
    assert (state, [part.status for part in parts]) == ("failed", [1, 124])
    assert found["gpu-01"] == [
        (
            "BU-VFY-232",
            "error",
            f"gpu-01 cannot be the meeting point: {hosts.meeting.endpoint} is already in use there",
        )
    ]
    assert found["gpu-02"][0][:2] == ("BU-VFY-237", "warning")
    assert hosts.left() == []


@pytest.mark.real
def test_a_host_that_dies_in_the_middle_ends_both_sides(hosts: Hosts) -> None:
    # A rank that hangs keeps the run going until the other host is gone.
    more = ["--inject", "hang:0@gloo"]
    first, second = hosts.start("gpu-01", *more), hosts.start("gpu-02", *more)
    until = time.monotonic() + 40
    while time.monotonic() < until and '"measure"' not in (
        hosts.node("gpu-02").read_text() if hosts.node("gpu-02").exists() else ""
    ):
        time.sleep(0.1)
    begun = time.monotonic()
    # torchrun alone: its ranks are in sessions of their own and must not outlive it.
    os.kill(int(Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text()), signal.SIGKILL)
    parts = [hosts.ended("gpu-01", first), hosts.ended("gpu-02", second)]
    assert time.monotonic() - begun < 40
    state, found = judged(hosts, *parts)
    assert (state, found["gpu-01"]) == ("failed", INNOCENT)
    assert found["gpu-02"] == [
        (
            "BU-VFY-233",
            "error",
            "a process of the run across hosts was ended by SIGKILL on gpu-02 in measure of gloo at 8192 bytes",
        )
    ]
    assert hosts.left() == []


@pytest.mark.real
@pytest.mark.parametrize(
    ("inject", "code", "says"),
    [
        (
            "kill:3@gloo",
            "BU-VFY-233",
            "a process of the run across hosts was ended by SIGKILL on gpu-02 in measure of gloo at 8192 bytes",
        ),
        (
            "crash:2@gloo",
            "BU-VFY-234",
            "the run across hosts failed on gpu-02: RuntimeError: this fault was set on purpose",
        ),
        (
            "wrong-element:2@gloo",
            "BU-VFY-214",
            "wrong result across hosts on gpu-02, rank 2: wrong result: gloo at 8192 bytes",
        ),
    ],
)
def test_the_host_at_fault_is_named(inject: str, code: str, says: str, hosts: Hosts) -> None:
    processes = {host: hosts.start(host, "--inject", inject) for host in ADDRESSES}
    parts = [hosts.ended(host, process) for host, process in processes.items()]
    state, found = judged(hosts, *parts)
    assert (state, found) == ("failed", {"gpu-01": INNOCENT, "gpu-02": [(code, "error", says)]})
    assert hosts.left() == []
