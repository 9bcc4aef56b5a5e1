"""The all-reduce bench: arithmetic, parsers, the launcher with stand-in ranks, and eight real ranks over gloo."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bringup import paths
from bringup.bench import parse

SCRIPT = paths.files() / "allreduce_bench.py"
BENCH = paths.host_script("allreduce_bench")
FIXTURES = Path(__file__).parents[1] / "fixtures" / "bench"
STANDIN = FIXTURES / "standin_worker.py"
SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "reference" / "allreduce-bench.schema.json").read_text(encoding="utf-8")
)
MIB, GIB = 1 << 20, 1 << 30


def start(*arguments: str, python: str = sys.executable, **environment: str) -> subprocess.Popen[str]:
    """Start the script with a command line."""
    variables = {**os.environ, **environment}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        variables.pop(name, None)
    return subprocess.Popen(
        [python, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
    )


def run(*arguments: str, python: str = sys.executable, **environment: str) -> tuple[int, dict[str, Any], str]:
    """Return status, document and stderr of a run; the document must follow its schema and be readable."""
    process = start(*arguments, python=python, **environment)
    out, err = process.communicate(timeout=300)
    document = json.loads(out.splitlines()[-1])
    jsonschema.validate(document, SCHEMA)
    parse(document)
    assert document["exit_status"] == process.returncode
    return process.returncode, document, err


def stand_in(*arguments: str, ranks: int = 3, standin: str = "", **environment: str) -> tuple[int, dict[str, Any], str]:
    """Run with ranks that need no torch."""
    common = ["--device", "cpu", "--ranks", str(ranks), "--worker-program", str(STANDIN)]
    return run(*common, *arguments, STANDIN=standin, **environment)


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    return BENCH.process_state(pid) not in (None, "Z")


# ---------------------------------------------------------------- what runs on any host


def test_it_is_python_3_8_and_imports_the_standard_library_only() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 8))
    top = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    assert top <= set(sys.stdlib_module_names)


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [([5.0], 0.99, 5.0), ([1, 2, 3, 4], 0.5, 2), (list(range(1, 101)), 0.99, 99), (list(range(1, 101)), 1.0, 100)],
)
def test_percentile(values: list[float], fraction: float, expected: float) -> None:
    assert BENCH.percentile(values, fraction) == expected


@pytest.mark.parametrize(("values", "expected"), [([3, 1, 2], 2), ([4, 1, 2, 3], 2.5), ([7], 7)])
def test_median(values: list[float], expected: float) -> None:
    assert BENCH.median(values) == expected


def test_a_sample_counts_with_its_slowest_rank_and_each_rank_has_its_median() -> None:
    row = BENCH.row_statistics(GIB, 4, [[3000.0, 3100.0, 3000.0], [2000.0, 2000.0, 2000.0], [1.0] * 3, [1.0] * 3])
    assert (row["median_us"], row["min_us"], row["max_us"]) == (3000.0, 3000.0, 3100.0)
    assert row["algbw_gb_per_s"] == pytest.approx(357.914)
    assert row["busbw_gb_per_s"] == pytest.approx(536.871)
    assert row["rank_median_us"] == [3000.0, 2000.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("payload_bytes", "is_cpu", "expected"),
    [
        (8192, False, (40, 10, 100)),
        (MIB, False, (40, 10, 100)),
        (2 * MIB, False, (10, 5, 40)),
        (256 * MIB, False, (4, 3, 20)),
        (GIB, False, (2, 2, 10)),
        (8 * GIB, False, (2, 1, 5)),
        (8192, True, (5, 2, 10)),
        (16 * MIB, True, (1, 1, 5)),
    ],
)
def test_sampling(payload_bytes: int, is_cpu: bool, expected: tuple[int, int, int]) -> None:
    assert BENCH.sampling(payload_bytes, is_cpu) == expected


@pytest.mark.parametrize(
    ("payload_bytes", "operation_s", "expected"),
    [
        (8192, 50e-6, (40, 10, 100)),
        (64 * MIB, 0.06, (4, 3, 20)),
        (256 * MIB, 0.1, (4, 1, 19)),
        (GIB, 0.4, (2, 1, 9)),
        (GIB, 1.0, (1, 1, 7)),
        (GIB, 9.0, (1, 1, 3)),
    ],
    ids=["small", "10 Gb/s still fits", "fewer samples", "sockets of one machine", "10 Gb/s", "at least three"],
)
def test_a_slow_network_gets_fewer_samples(payload_bytes: int, operation_s: float, expected: tuple[int, ...]) -> None:
    assert BENCH.fewer(BENCH.sampling(payload_bytes), operation_s) == expected


@pytest.mark.parametrize(
    ("numbers", "expected"), [({0, 1, 2, 3}, "0-3"), ({0, 2, 3, 9}, "0,2-3,9"), ({7}, "7"), (set(), "")]
)
def test_cpu_list(numbers: set[int], expected: str) -> None:
    assert BENCH.cpu_list(numbers) == expected


# ---------------------------------------------------------------- what NCCL and nvidia-smi print


@pytest.mark.parametrize(
    ("name", "transports", "channels", "last", "setting"),
    [
        ("healthy", {"P2P/CUMEM": 48}, 24, ("RING", "SIMPLE", 24), None),
        ("p2p_off", {"SHM/direct/direct": 8}, 4, ("RING", "SIMPLE", 4), ("NCCL_P2P_DISABLE", "1")),
        ("sockets_only", {"NET/Socket/0": 8}, 2, ("RING", "SIMPLE", 2), ("NCCL_SHM_DISABLE", "1")),
        ("channels_2", {"P2P/CUMEM": 4}, 2, ("RING", "SIMPLE", 2), ("NCCL_MAX_NCHANNELS", "2")),
        ("across_veth", {"NET/Socket/0": 8}, 2, ("RING", "SIMPLE", 2), None),
    ],
)
def test_nccl_s_log(
    name: str,
    transports: dict[str, int],
    channels: int,
    last: tuple[str, str, int],
    setting: tuple[str, str] | None,
) -> None:
    found = BENCH.parse_nccl_log((FIXTURES / "nccl" / f"{name}.log").read_text(encoding="utf-8").splitlines())
    assert found["version"] == "2.28.9+cuda13.0"
    assert found["transports"] == transports
    assert found["channels"] == {
        "coll": channels,
        "collnet": channels,
        "nvls": 0,
        "p2p": {24: 32}.get(channels, channels),
    }
    choice = found["choices"][-1]
    largest = 64 * MIB if name == "across_veth" else GIB
    assert (choice["payload_bytes"], choice["algorithm"], choice["protocol"], choice["channels"]) == (largest, *last)
    assert found["settings"]["NCCL_NVLS_ENABLE"] == "0"
    assert setting is None or found["settings"][setting[0]] == setting[1]
    assert found["warnings"] == []


NCCL_UTILS = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, "


# What torch 2.11.0 said with NCCL 2.28.9 between two hosts (benchmarks/across_h200.py, 2026-11-30).
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            NCCL_UTILS + "invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
            "Bootstrap : no socket interface found\n",
            "NCCL: invalid usage: Bootstrap : no socket interface found",
        ),
        (
            NCCL_UTILS + "remote process exited or there was a network error, NCCL version 2.28.9\n"
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
            "Last error:\nsocketPollConnect: connect to 127.0.0.1<55069> returned Connection refused, exceeded error "
            "retry count after 35 attempts\n",
            "NCCL: remote process exited or there was a network error: socketPollConnect: connect to 127.0.0.1<55069> "
            "returned Connection refused, exceeded error retry count after 35 attempts",
        ),
        (
            NCCL_UTILS + "internal error, NCCL version 2.28.9\nLast error:",
            NCCL_UTILS + "internal error, NCCL version 2.28.9",
        ),
        ("one\ttwo\nthree", "onetwo"),
    ],
    ids=["no interface", "refused", "nothing follows", "not of NCCL"],
)
def test_an_error_as_one_line_holds_nccl_s_own_words(text: str, expected: str) -> None:
    assert BENCH.root_line(RuntimeError(text)) == "RuntimeError: " + expected


def test_nccl_s_warnings_are_kept_once() -> None:
    lines = (FIXTURES / "nccl" / "nccl_shm_errors.txt").read_text(encoding="utf-8").splitlines()
    found = BENCH.parse_nccl_log(lines + lines)
    assert len(found["warnings"]) == 5
    assert found["warnings"][0].startswith("Error: failed to extend /dev/shm/nccl-WU88OE to 9637892 bytes")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("h:1:2 [0] NCCL INFO NVLS multicast support is available on dev 0", True),
        ("h:1:2 [0] NCCL INFO NVLS multicast support is not available on dev 0", False),
        ("h:1:2 [0] NCCL INFO Connected all rings", None),
    ],
)
def test_multicast_in_nccl_s_log(line: str, expected: bool | None) -> None:
    assert BENCH.parse_nccl_log([line])["multicast_available"] is expected


@pytest.mark.parametrize(
    ("line", "network", "devices"),
    [
        (
            "h:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB ens3:10.0.0.5<0>",
            None,
            ["mlx5_0:1/IB", "mlx5_1:1/RoCE"],
        ),
        ("h:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>", None, ["eth0:10.0.0.5<0>"]),
        ("h:1:2 [0] NCCL INFO Using network IB", "IB", []),
        ("h:1:2 [0] NCCL INFO NET/IB : No device found.", None, []),
        ("h:1:2 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.99.0.1<0>", None, []),
    ],
)
def test_the_network_in_nccl_s_log(line: str, network: str | None, devices: list[str]) -> None:
    found = BENCH.parse_nccl_log([line])
    assert (found["network"], found["network_devices"]) == (network, devices)


def test_the_interface_towards_an_address() -> None:
    assert BENCH.interface_towards("127.0.0.9") == "lo"
    assert BENCH.interface_towards("no address") is None


def test_what_works_within_one_host_only_is_missing_across_hosts() -> None:
    told: list[dict[str, Any]] = []
    context = BENCH.Context.__new__(BENCH.Context)
    context.rank, context.nodes, context._tell = 0, 2, told.append
    within = [kind for kind in BENCH.BACKENDS if kind.is_within_host]
    for kind in within:
        BENCH.run_backend(context, kind, [8192], None)
    assert {kind.name for kind in BENCH.BACKENDS if kind not in within} == {
        "nccl",
        "nccl_graph",
        "nccl_graph_torch",
        "gloo",
    }
    assert {(one["state"], one["reason"]) for one in told} == {("missing", "it works within one host only")}


def test_fields_that_nvidia_smi_does_not_know_are_none() -> None:
    fields = [("index", int), ("pcie.link.gen.current", int), ("process_name", str)]
    text = "0, 5, /usr/bin/python3, with a comma\n1, [N/A], x\nbroken line\n"
    assert BENCH.parse_csv(text, fields) == [
        {"index": 0, "pcie_link_gen_current": 5, "process_name": "/usr/bin/python3, with a comma"},
        {"index": 1, "pcie_link_gen_current": None, "process_name": "x"},
    ]


# ---------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--backends", "nccl,magic"], "unknown backend magic"),
        (["--payloads", "100"], "positive multiples of 4096"),
        (["--timeout", "-3"], "must be above 0"),
        (["--device", "cpu", "--ranks", "1"], "an all-reduce needs two ranks"),
        (["--device", "cpu", "--backends", "nccl"], "nccl does not run on cpu"),
        (["--device", "cuda", "--ranks", "2", "--backends", "gloo"], "gloo does not run on cuda"),
        (["--inject", "nonsense"], "KIND:RANK@BACKEND"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_leave_a_document(arguments: list[str], says: str, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    status, document, err = run(*arguments, "--output", str(output))
    assert status == 2
    assert (document["outcome"], says in document["message"], says in err) == ("usage", True, True)
    assert json.loads(output.read_text(encoding="utf-8")) == document


# ---------------------------------------------------------------- the launcher, with stand-in ranks


def test_measured(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    status, document, err = stand_in("--output", str(output))
    assert (status, document["outcome"], document["failures"]) == (0, "measured", [])
    assert [row["backend"] for row in document["rows"]] == ["gloo"]
    assert document["backends"]["gloo"]["state"] == "measured"
    assert [(rank["rank"], rank["is_done"], rank["exit_code"]) for rank in document["ranks"]] == [
        (n, True, 0) for n in range(3)
    ]
    assert "what a module prints" in err
    assert json.loads(output.read_text(encoding="utf-8")) == document
    assert output.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize(
    ("standin", "kind", "rank", "says"),
    [
        ("1:kill", "crash", 1, "rank 1 was killed by SIGKILL in measure of gloo at 8192 bytes"),
        ("0:kill", "crash", 0, "rank 0 was killed by SIGKILL in measure of gloo at 8192 bytes"),
        ("2:error", "crash", 2, "rank 2 failed: RuntimeError: no luck in measure of gloo at 8192 bytes"),
        ("1:status", "crash", 1, "rank 1 exited with status 7 without saying why in measure of gloo at 8192 bytes"),
        ("1:silent", "crash", 1, "rank 1 exited with status 0 without saying why in measure of gloo at 8192 bytes"),
        ("1:hang", "timeout", None, "gloo took more than 2 s: rank 1 in measure of gloo at 8192 bytes"),
        ("1:slow_start", "timeout", None, "set-up took more than 3 s: rank 1 in import_torch"),
    ],
    ids=lambda value: value if isinstance(value, str) and ":" in value and " " not in value else "",
)
def test_what_goes_wrong_is_told_and_nothing_is_left(
    standin: str, kind: str, rank: int | None, says: str, tmp_path: Path
) -> None:
    arguments = ["--backend-timeout", "2", "--setup-timeout", "3", "--output", str(tmp_path / "bench.json")]
    status, document, _ = stand_in(*arguments, standin=standin)
    assert (status, document["outcome"], document["message"]) == (1, kind, says)
    failure = document["failures"][0]
    assert (failure["kind"], failure["rank"], len(failure["ranks"])) == (kind, rank, 3)
    assert json.loads((tmp_path / "bench.json").read_text(encoding="utf-8")) == document
    assert not [entry["pid"] for entry in failure["ranks"] if is_alive(entry["pid"])]


def test_a_stopped_rank_is_named_before_any_limit_and_where_the_others_were() -> None:
    status, document, _ = stand_in("--backend-timeout", "60", standin="1:stop,0:hang,2:hang")
    assert (status, document["outcome"]) == (1, "stopped")
    assert document["message"] == "rank 1 is stopped (process state T) in measure of gloo at 8192 bytes"
    ranks = document["failures"][0]["ranks"]
    assert [(entry["rank"], entry["process_state"]) for entry in ranks] == [(0, "S"), (1, "T"), (2, "S")]
    assert not [entry["pid"] for entry in ranks if is_alive(entry["pid"])]


def test_a_rank_that_dies_is_the_cause_and_not_those_that_lost_it(tmp_path: Path) -> None:
    _, document, _ = stand_in(standin="0:lost,2:kill", STANDIN_MARK=str(tmp_path / "dead"))
    assert document["failures"][0]["rank"] == 2


def test_processes_of_a_rank_end_with_it() -> None:
    status, document, err = stand_in("--backend-timeout", "2", standin="1:grandchild")
    assert (status, document["outcome"]) == (1, "timeout")
    pid = next(int(line.split()[1]) for line in err.splitlines() if line.startswith("grandchild"))
    assert not is_alive(pid)


def test_the_whole_has_a_limit_too() -> None:
    begun = time.monotonic()
    status, document, _ = stand_in("--timeout", "2", standin="0:hang,1:hang,2:hang")
    assert (status, document["outcome"]) == (1, "timeout")
    assert document["message"].startswith("everything together took more than 2 s")
    assert time.monotonic() - begun < 12


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_told_to_end_it_ends_everything_and_writes(number: signal.Signals, tmp_path: Path) -> None:
    common = ["--device", "cpu", "--ranks", "2", "--worker-program", str(STANDIN)]
    process = start(*common, "--output", str(tmp_path / "b.json"), STANDIN="0:hang,1:hang")
    time.sleep(1.5)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    document = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    assert json.loads(out.splitlines()[-1]) == document
    assert (process.returncode, document["outcome"], document["message"]) == (
        1,
        "interrupted",
        f"ended by {number.name}",
    )
    assert not [entry["pid"] for entry in document["ranks"] if is_alive(entry["pid"])]


def test_an_output_that_cannot_be_written_is_said_and_the_document_still_printed() -> None:
    status, document, err = stand_in("--output", "/nonexistent/bench.json")
    assert (status, document["outcome"]) == (0, "measured")
    assert "cannot write /nonexistent/bench.json" in err


def test_a_required_backend_that_is_not_measured_is_status_4() -> None:
    options = BENCH.parser().parse_args([])
    report = BENCH.Report(options, "own")
    report.feed({"event": "backend", "rank": 0, "name": "sgl_custom", "state": "missing", "reason": "not installed"})
    report.feed({"event": "row", "rank": 0, "value": {}})
    assert report.status(["sgl_custom"]) == (4, "sgl_custom: not installed")
    assert report.status(["nccl"]) == (4, "nccl: not asked for")
    assert report.status([]) == (0, None)


def test_a_wrong_result_comes_before_everything_else() -> None:
    report = BENCH.Report(BENCH.parser().parse_args([]), "own")
    report.failure("crash", "rank 1 failed", 1, "nccl")
    report.feed({"event": "check", "rank": 0, "value": {"ok": False, "backend": "nccl", "payload_bytes": 8192}})
    assert report.status(["nccl"]) == (5, "wrong result: nccl at 8192 bytes")


# ---------------------------------------------------------------- real ranks over gloo


@pytest.mark.real
def test_eight_ranks_give_the_right_sum(torch_python: str) -> None:
    arguments = ["--device", "cpu", "--ranks", "8", "--profile", "smoke"]
    status, document, _ = run(*arguments, python=torch_python)
    assert (status, document["outcome"]) == (0, "measured")
    assert [(row["payload_bytes"], len(row["rank_median_us"])) for row in document["rows"]] == [
        (8192, 8),
        (262144, 8),
        (4194304, 8),
    ]
    assert len(document["checks"]) == 6
    assert all(check["ok"] and check["same_bits"] for check in document["checks"])
    assert all(check["wrong_elements"] == 0 for check in document["checks"])


@pytest.mark.real
@pytest.mark.parametrize(
    ("inject", "status", "outcome", "says"),
    [
        ("wrong-element:5@gloo", 5, "wrong_result", "wrong result: gloo at 8192 bytes"),
        ("overrun:0@gloo", 5, "wrong_result", "wrong result: gloo at 8192 bytes"),
        ("unwritten:7@gloo", 5, "wrong_result", "wrong result: gloo at 8192 bytes"),
        ("kill:0@gloo", 1, "crash", "rank 0 was killed by SIGKILL in measure of gloo at 8192 bytes"),
        ("stop:3@gloo", 1, "stopped", "rank 3 is stopped (process state T) in measure of gloo at 8192 bytes"),
        (
            "crash:2@gloo",
            1,
            "crash",
            "rank 2 failed: RuntimeError: this fault was set on purpose in measure of gloo at 8192 bytes",
        ),
        ("hang:6@gloo", 1, "timeout", None),
    ],
    ids=lambda value: value if isinstance(value, str) and "@" in value else "",
)
def test_injected_faults(inject: str, status: int, outcome: str, says: str | None, torch_python: str) -> None:
    arguments = ["--device", "cpu", "--ranks", "8", "--payloads", "8192", "--backend-timeout", "20"]
    found, document, _ = run(*arguments, "--inject", inject, python=torch_python)
    assert (found, document["outcome"]) == (status, outcome)
    assert says is None or document["message"] == says
    rank = int(inject.partition(":")[2].partition("@")[0])
    if status == 5:
        assert {tuple(check["bad_ranks"]) for check in document["checks"] if not check["ok"]} == {(rank,)}
        assert document["rows"] == []
    assert not [entry["pid"] for entry in document["ranks"] if entry["pid"] and is_alive(entry["pid"])]


@pytest.mark.real
def test_ranks_die_with_a_launcher_that_is_killed(torch_python: str, tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--ranks", "2", "--payloads", "8192", "--inject", "hang:1@gloo"]
    process = start(*arguments, python=torch_python)
    children: list[int] = []
    until = time.monotonic() + 60
    while time.monotonic() < until and len(children) < 2:
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
        children = [int(pid) for pid in listed]
        time.sleep(0.2)
    time.sleep(5)
    process.kill()
    process.communicate()
    time.sleep(1.5)
    assert len(children) == 2
    assert not [pid for pid in children if is_alive(pid)]


@pytest.mark.real
def test_under_torchrun(torch_python: str, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    command = [torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += [str(SCRIPT), "--device", "cpu", "--payloads", "8192,65536", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    document = json.loads(output.read_text(encoding="utf-8"))
    jsonschema.validate(document, SCHEMA)
    assert (done.returncode, document["launcher"], document["outcome"]) == (0, "torchrun", "measured")
    assert [len(row["rank_median_us"]) for row in document["rows"]] == [3, 3]


@pytest.mark.real
def test_a_hang_under_torchrun_leaves_a_document(torch_python: str, tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    command = [torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SCRIPT), "--device", "cpu", "--payloads", "8192", "--inject", "hang:1@gloo"]
    command += ["--backend-timeout", "5", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    document = json.loads(output.read_text(encoding="utf-8"))
    assert done.returncode == 1
    assert document["outcome"] in ("timeout", "interrupted")
    assert document["backends"]["gloo"]["state"] == "failed"
