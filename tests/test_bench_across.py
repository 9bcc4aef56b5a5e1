"""Judging a run across hosts: who is at fault, what NCCL chose, and how each part is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bringup.bench import across, parse
from bringup.bench.across import Ended, Meeting
from bringup.bench.document import Document, Note, parse_note

MEETING = Meeting({"gpu-01": "10.0.0.1", "gpu-02": "10.0.0.2"}, 29400, "r1")
ENDPOINT = "10.0.0.1:29400"
JOIN_TIMEOUT = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"
NO_CONNECTION = (
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: "
    "The connection to the C10d store has failed. See inner exception for details."
)
KILLED = "Root Cause (first observed failure):\n  exitcode  : -9 (pid: 7)\n  Signal 9 (SIGKILL) received by PID 7"
CLOSED = "RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.2]:41234"


def note(node: int, error: str | None = None, phase: str = "measure") -> Note:
    found = parse_note(
        {
            "program": "allreduce_bench_node",
            "node": node,
            "rank": node * 8,
            "phase": phase,
            "backend": "nccl",
            "payload_bytes": 8192,
            "error": {"message": error, "traceback": ""} if error else None,
        }
    )
    assert found is not None
    return found


def document(**more: Any) -> Document:
    ranks = [{"rank": n, "host": f"h{n // 2}", "node": n // 2, "index": n % 2, "name": "NVIDIA H200"} for n in range(4)]
    row = {
        "backend": "nccl",
        "payload_bytes": 1 << 30,
        "is_graph": False,
        "median_us": 40000.0,
        "min_us": 39000.0,
        "p99_us": 41000.0,
        "algbw_gb_per_s": 26.8,
        "busbw_gb_per_s": 40.3,
        "rank_median_us": [40000.0] * 4,
    }
    return parse(
        {
            "schema": 1,
            "program": "allreduce_bench",
            "exit_status": 0,
            "outcome": "measured",
            "system": {"device": "cuda", "ranks": 4, "nodes": 2, "hosts": ["h0", "h1"], "gpus": ranks},
            "backends": {
                "nccl": {"state": "measured"},
                "symm_one_shot": {"state": "missing", "reason": "it works within one host only"},
            },
            "rows": [row],
            **more,
        }
    )


def judged(*parts: Ended) -> dict[str, list[tuple[str, str, str]]]:
    verdict = across.judge(parts, ENDPOINT)
    return {host: [(f.code, f.severity, f.cause) for f in found] for host, found in verdict.findings.items()}


def blamed(host: str, code: str, cause: str) -> dict[str, list[tuple[str, str, str]]]:
    """Return the findings where one host is at fault and the other is not."""
    innocent = [("BU-VFY-237", "warning", f"nothing was measured across the hosts because of {host}")]
    return {name: [(code, "error", cause)] if name == host else innocent for name in MEETING.addresses}


DID_NOT_JOIN = "gpu-02 did not join the run across hosts: "


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        pytest.param(
            [Ended("gpu-01", 1, JOIN_TIMEOUT), Ended("gpu-02", None)],
            blamed("gpu-02", "BU-VFY-232", DID_NOT_JOIN + "nothing was heard from it"),
            id="never heard of",
        ),
        pytest.param(
            [Ended("gpu-01", 1, JOIN_TIMEOUT), Ended("gpu-02", 1, NO_CONNECTION)],
            blamed("gpu-02", "BU-VFY-232", DID_NOT_JOIN + f"it cannot reach {ENDPOINT}"),
            id="a firewall",
        ),
        pytest.param(
            [Ended("gpu-01", 1, JOIN_TIMEOUT), Ended("gpu-02", 1, "python: No module named torch.distributed.run")],
            blamed(
                "gpu-02",
                "BU-VFY-232",
                DID_NOT_JOIN + "torchrun ended with status 1: python: No module named torch.distributed.run",
            ),
            id="no torchrun there",
        ),
        pytest.param(
            [Ended("gpu-01", 1, JOIN_TIMEOUT), Ended("gpu-02", 124, "")],
            blamed("gpu-02", "BU-VFY-232", DID_NOT_JOIN + "it did not come to its end within the time limit"),
            id="held up until its limit",
        ),
        pytest.param(
            [
                Ended("gpu-01", 1, "EADDRINUSE, message: address already in use\n" + NO_CONNECTION),
                Ended("gpu-02", 1, NO_CONNECTION),
            ],
            blamed("gpu-01", "BU-VFY-232", f"gpu-01 cannot be the meeting point: {ENDPOINT} is already in use there"),
            id="the port is taken",
        ),
        pytest.param(
            [Ended("gpu-01", 1, CLOSED, note(0, CLOSED)), Ended("gpu-02", None, "", note(1))],
            blamed(
                "gpu-02",
                "BU-VFY-233",
                "gpu-02 was lost during the run across hosts, last seen in measure of nccl at 8192 bytes",
            ),
            id="lost in the middle",
        ),
        pytest.param(
            [
                Ended("gpu-01", 1, "", note(0, CLOSED), document(exit_status=1, outcome="crash", message=CLOSED)),
                Ended("gpu-02", None),
            ],
            blamed("gpu-02", "BU-VFY-233", "gpu-02 was lost during the run across hosts"),
            id="lost, and its note with it",
        ),
        pytest.param(
            [Ended("gpu-01", 1, CLOSED, note(0, CLOSED)), Ended("gpu-02", 1, KILLED, note(1))],
            blamed(
                "gpu-02",
                "BU-VFY-233",
                "a process of the run across hosts was ended by SIGKILL on gpu-02 in measure of nccl at 8192 bytes",
            ),
            id="a rank was killed",
        ),
        pytest.param(
            [Ended("gpu-01", 137, "", note(0)), Ended("gpu-02", 1, CLOSED, note(1, CLOSED))],
            blamed(
                "gpu-01",
                "BU-VFY-233",
                "a process of the run across hosts was ended by SIGKILL on gpu-01 in measure of nccl at 8192 bytes",
            ),
            id="torchrun was killed",
        ),
        pytest.param(
            [
                Ended("gpu-01", 1, "exitcode  : -15 (pid: 7)\nSignal 15 (SIGTERM) received by PID 7", note(0, CLOSED)),
                Ended("gpu-02", 1, "", note(1, "OutOfMemoryError: CUDA out of memory")),
            ],
            blamed(
                "gpu-02",
                "BU-VFY-234",
                "the run across hosts failed on gpu-02: OutOfMemoryError: CUDA out of memory",
            ),
            id="an error of its own; SIGTERM is torchrun's",
        ),
        pytest.param(
            [
                Ended(
                    "gpu-01",
                    5,
                    "",
                    note(0),
                    document(
                        exit_status=5,
                        outcome="wrong_result",
                        message="wrong result: nccl at 8192 bytes",
                        checks=[
                            {"backend": "nccl", "payload_bytes": 8192, "data": d, "ok": False, "bad_ranks": [3, 2]}
                            for d in ("integers", "random")
                        ],
                    ),
                ),
                Ended("gpu-02", 1, "", note(1)),
            ],
            blamed(
                "gpu-02",
                "BU-VFY-214",
                "wrong result across hosts on gpu-02, rank 2, 3: wrong result: nccl at 8192 bytes",
            ),
            id="wrong results",
        ),
    ],
)
def test_the_host_at_fault(parts: list[Ended], expected: object) -> None:
    assert judged(*parts) == expected


@pytest.mark.parametrize(
    "lost",
    [
        "DistBackendError: [1] is setting up NCCL: Failed to recv, got 0 bytes. Connection was likely closed.",
        "DistBackendError: NCCL: unhandled system error: connect to 10.0.0.1<54053> failed : Network is unreachable",
        "DistBackendError: NCCL: unhandled system error: connect to 10.0.0.1<54053> failed : No route to host",
        "DistBackendError: NCCL: remote process exited or there was a network error: socketProgress: gone",
        "told to end by SIGTERM: another rank ended or the run was stopped in measure of nccl",
    ],
)
def test_who_only_lost_the_other_host_is_not_blamed(lost: str) -> None:
    own = "OutOfMemoryError: CUDA out of memory"
    parts = [Ended("gpu-01", 1, "", note(0, lost)), Ended("gpu-02", 1, "", note(1, own))]
    assert judged(*parts) == blamed("gpu-02", "BU-VFY-234", f"the run across hosts failed on gpu-02: {own}")


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        pytest.param(
            [Ended("gpu-01", 1, JOIN_TIMEOUT), Ended("gpu-02", 1, JOIN_TIMEOUT)],
            "the run across hosts failed: the hosts did not find each other in time, and each says that it waited for "
            "the others",
            id="each waited for the other",
        ),
        pytest.param(
            [
                Ended(
                    "gpu-01",
                    1,
                    "",
                    note(0),
                    document(exit_status=1, outcome="timeout", message="nccl took more than 60 s in measure of nccl"),
                ),
                Ended("gpu-02", 1, "", note(1, "nccl took more than 60 s in measure of nccl")),
            ],
            "the run across hosts failed: nccl took more than 60 s in measure of nccl",
            id="it hangs",
        ),
    ],
)
def test_where_nobody_can_tell_every_host_is_named(parts: list[Ended], cause: str) -> None:
    assert judged(*parts) == {host: [("BU-VFY-234", "error", cause)] for host in MEETING.addresses}


# ---------------------------------------------------------------- what NCCL said between two "hosts" of one machine


def captured() -> dict[str, dict[str, Any]]:
    """Return the runs of ``benchmarks/across_h200.py`` by what was done to them."""
    path = Path(__file__).parent / "fixtures" / "bench" / "across_h200x2.jsonl"
    return {run["label"]: run for run in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


CAPTURED = captured()
MEASURED = {"gpu-01": [("BU-VFY-236", "info", "no figure is known to compare gpu-01, gpu-02 with")], "gpu-02": []}
LARGE = "in measure of nccl at 67108864 bytes"
BY_SIGKILL = "a process of the run across hosts was ended by SIGKILL on "
NO_INTERFACE = "DistBackendError: NCCL: invalid usage: Bootstrap : no socket interface found"
HANGS = ("BU-VFY-234", "error", f"the run across hosts failed: nccl took more than 60 s {LARGE}")


def on_loopback(host: str) -> tuple[str, str, str]:
    cause = f"NCCL on {host} uses the interface lo:127.0.0.1<0>, by which no other host reaches it"
    return "BU-VFY-239", "error", cause


def no_interface(host: str) -> dict[str, list[tuple[str, str, str]]]:
    cause = f"NCCL finds no network interface on {host} that it may use: {NO_INTERFACE}"
    return blamed(host, "BU-VFY-239", cause)


def ended_of(run: dict[str, Any]) -> list[Ended]:
    return [
        Ended(
            host,
            one["status"],
            one["said"],
            parse_note(one["note"]),
            parse(one["document"]) if one["document"] else None,
        )
        for host, one in run["hosts"].items()
    ]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("healthy", MEASURED),
        ("slow_link_1gbit", MEASURED),
        ("slow_link_10gbit", MEASURED),
        ("locked_memory_64k", MEASURED),
        ("rank_killed", blamed("gpu-02", "BU-VFY-233", f"{BY_SIGKILL}gpu-02 {LARGE}")),
        (
            "rank_killed_in_graph",
            blamed("gpu-02", "BU-VFY-233", f"{BY_SIGKILL}gpu-02 in measure of nccl_graph at 67108864 bytes"),
        ),
        ("first_rank_killed", blamed("gpu-01", "BU-VFY-233", f"{BY_SIGKILL}gpu-01 {LARGE}")),
        (
            "rank_stopped",
            blamed("gpu-02", "BU-VFY-233", f"a process of the run across hosts fell silent on gpu-02 {LARGE}"),
        ),
        ("link_lost", {"gpu-01": [HANGS], "gpu-02": [HANGS]}),
        ("host_lost", blamed("gpu-02", "BU-VFY-233", "gpu-02 was lost during the run across hosts")),
        (
            "wrong_element",
            blamed(
                "gpu-02", "BU-VFY-214", "wrong result across hosts on gpu-02, rank 1: wrong result: nccl at 8192 bytes"
            ),
        ),
        ("no_such_interface", no_interface("gpu-01")),
        ("no_such_interface_on_one", no_interface("gpu-02")),
        ("interface_leads_nowhere", {host: [on_loopback(host)] for host in MEETING.addresses}),
        ("interface_leads_nowhere_on_one", blamed("gpu-02", *(on_loopback("gpu-02")[::2]))),
    ],
)
def test_what_real_nccl_between_hosts_is_judged(label: str, expected: dict[str, list[tuple[str, str, str]]]) -> None:
    assert judged(*ended_of(CAPTURED[label])) == expected


def test_between_hosts_nccl_uses_the_network_and_all_sums_are_right() -> None:
    document = ended_of(CAPTURED["healthy"])[0].document
    assert document is not None
    log = document.nccl_log
    assert log is not None
    assert (log.network, log.network_devices, dict(log.transports)) == (
        "Socket",
        ("eth0:10.99.0.1<0>",),
        {"NET/Socket/0": 4},
    )
    assert (document.system.nodes, document.system.hosts) == (2, ("gpu-01", "gpu-02"))
    assert all(check.ok for check in document.checks)
    assert len(document.checks) == 22


def test_payloads_that_take_too_long_are_left_out_and_said() -> None:
    verdict = across.judge(ended_of(CAPTURED["slow_link_1gbit"]), ENDPOINT)
    left = [
        (one["backend"], one["payload_bytes"], one["reason"]) for one in verdict.results() if one["state"] == "not_run"
    ]
    reason = "one operation would take longer than 2 s between these hosts"
    shown = {256 << 20: "256 MiB: " + reason, 1 << 30: "1024 MiB: " + reason}
    assert left == [
        (backend, payload, shown[payload]) for backend in ("nccl", "nccl_graph") for payload in (256 << 20, 1 << 30)
    ]


def test_nccl_s_words_are_evidence() -> None:
    verdict = across.judge(ended_of(CAPTURED["interface_leads_nowhere_on_one"]), ENDPOINT)
    finding = verdict.findings["gpu-02"][0]
    assert finding.evidence["nccl"] == {"network": "Socket", "network_devices": ["lo:127.0.0.1<0>"], "warnings": []}
    assert finding.remedy.startswith("look at NCCL_SOCKET_IFNAME (BU-VFY-341)")


def test_another_network_than_the_hosts_share_is_shown_and_nobody_blamed() -> None:
    def apart(host: str, node: int, device: str) -> Ended:
        told = {"network": "Socket", "network_devices": [device], "warnings": ["connect to 172.17.0.1<4> failed"]}
        answer = {"program": "allreduce_bench_node", "node": node, "rank": node, "phase": "rendezvous", "nccl": told}
        answer["error"] = {"message": "set-up took more than 120 s in rendezvous", "traceback": ""}
        return Ended(host, 1, "", parse_note(answer))

    cause = (
        "NCCL does not get from one host to the other: gpu-01 docker0:172.17.0.1<0>; gpu-02 eth0:10.0.0.2<0>; "
        "connect to 172.17.0.1<4> failed"
    )
    assert judged(apart("gpu-01", 0, "docker0:172.17.0.1<0>"), apart("gpu-02", 1, "eth0:10.0.0.2<0>")) == {
        host: [("BU-VFY-239", "error", cause)] for host in MEETING.addresses
    }


def test_the_evidence_holds_what_torchrun_said_last() -> None:
    said = "\n".join(f"line {n}" for n in range(9))
    verdict = across.judge([Ended("gpu-01", 1, JOIN_TIMEOUT), Ended("gpu-02", 3, said)], ENDPOINT)
    assert verdict.findings["gpu-02"][0].evidence == {
        "status": 3,
        "said": ["line 4", "line 5", "line 6", "line 7", "line 8"],
    }


# ---------------------------------------------------------------- what was measured


def log(network: str, devices: list[str], transports: dict[str, int]) -> dict[str, Any]:
    return {"nccl_log": {"network": network, "network_devices": devices, "transports": transports}}


NOTHING_TO_COMPARE = ("BU-VFY-236", "info", "no figure is known to compare gpu-01, gpu-02 with")
SOCKETS = log("Socket", ["eth0:10.0.0.1<0>"], {"P2P/CUMEM": 4, "NET/Socket/0": 4})
ACTIVE = {"ACTIVE": ("mlx5_0:1 (InfiniBand, 400 Gb/sec)",)}


@pytest.mark.parametrize(
    ("told", "rdma", "expected"),
    [
        (log("IB", ["mlx5_0:1/IB"], {"NET/IB/0/GDRDMA": 8}), ACTIVE, []),
        (SOCKETS, {}, []),
        (
            SOCKETS,
            ACTIVE,
            [
                "NCCL moves data between the hosts through sockets (eth0:10.0.0.1<0>) although RDMA is active: "
                "gpu-02 mlx5_0:1 (InfiniBand, 400 Gb/sec)"
            ],
        ),
        (
            SOCKETS,
            {"DOWN": ("mlx5_0:1 (InfiniBand, 10 Gb/sec)",)},
            [
                "NCCL moves data between the hosts through sockets (eth0:10.0.0.1<0>): no RDMA port is active: "
                "gpu-02 mlx5_0:1 (InfiniBand, 10 Gb/sec) DOWN"
            ],
        ),
        (
            log("Socket", [], {}),
            ACTIVE,
            [
                "NCCL moves data between the hosts through sockets (NET/Socket) although RDMA is active: "
                "gpu-02 mlx5_0:1 (InfiniBand, 400 Gb/sec)"
            ],
        ),
        ({}, ACTIVE, []),
    ],
    ids=["RDMA is used", "there is none", "active and not used", "down", "no connections in the log", "no log"],
)
def test_sockets_between_hosts(told: dict[str, Any], rdma: Any, expected: list[str]) -> None:
    parts = [Ended("gpu-01", 0, "", note(0), document(**told)), Ended("gpu-02", 0, "", note(1), rdma=rdma)]
    wanted = [NOTHING_TO_COMPARE, *(("BU-VFY-235", "warning", cause) for cause in expected)]
    assert judged(*parts) == {"gpu-01": wanted, "gpu-02": []}


def test_figures_have_no_verdict_and_say_why() -> None:
    verdict = across.judge([Ended("gpu-01", 0, "", note(0), document()), Ended("gpu-02", 0, "", note(1))], ENDPOINT)
    assert (verdict.state, verdict.reason) == ("measured", None)
    assert verdict.results() == [
        {
            "backend": "nccl",
            "state": "measured",
            "payload_bytes": 1 << 30,
            "ranks": 4,
            "busbw_gb_per_s": 40.3,
            "algbw_gb_per_s": 26.8,
            "latency_us": 40000.0,
            "reason": "no figure to compare with",
        },
        {"backend": "symm_one_shot", "state": "missing", "reason": "it works within one host only"},
    ]


def test_on_cpu_it_is_said_that_no_gpu_took_part() -> None:
    system = {"device": "cpu", "ranks": 4, "nodes": 2, "hosts": ["vm"]}
    parts = [Ended("gpu-01", 0, "", note(0), document(system=system)), Ended("gpu-02", 0, "", note(1))]
    assert [finding[0] for finding in judged(*parts)["gpu-01"]] == ["BU-VFY-238"]
    assert across.judge(parts, ENDPOINT).results()[0]["reason"] == "on CPU: no GPU took part"


# ---------------------------------------------------------------- how a part is started


@pytest.mark.parametrize(
    ("meeting", "host", "differs"),
    [
        (MEETING, "gpu-01", ("10.0.0.1:29400", "true", "10.0.0.1")),
        (MEETING, "gpu-02", ("10.0.0.1:29400", "false", "10.0.0.2")),
        (Meeting({"a": "fd00::1", "b": "fd00::2"}, 29401, "r1"), "b", ("[fd00::1]:29401", "false", "fd00::2")),
    ],
    ids=["the meeting point", "another host", "IPv6"],
)
def test_torchrun_s_command_line(meeting: Meeting, host: str, differs: tuple[str, str, str]) -> None:
    endpoint, is_host, local = differs
    assert across.torchrun(meeting, host, "/env/bin/python", 8, "/run/bench.py", ["--device", "cuda"]) == [
        *("/env/bin/python", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "8"),
        *("--max-restarts", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "r1"),
        *("--rdzv-conf", f"is_host={is_host},join_timeout=120,read_timeout=120", "--local-addr", local),
        *("/run/bench.py", "--device", "cuda"),
    ]
