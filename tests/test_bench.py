"""The judge of the all-reduce: documents captured on two H200s, under every induced fault and healthy.

What NCCL was told, the environment and the command line are taken out of every document before it is judged, so
that a cause can only come from what was seen.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bringup import paths
from bringup.bench import Figure, Key, Runs, Table, busbw_gb_per_s, deviation, figures, judge, parse
from bringup.bench.verdict import key_of
from bringup.cpu_list import cpus
from bringup.errors import HostError, InputError
from bringup.finding import Finding

FIXTURES = Path(__file__).parent / "fixtures" / "bench"
TABLE = Table.from_toml((paths.data() / "allreduce.toml").read_text(encoding="utf-8"))
GIB = 1 << 30
Document = dict[str, Any]


def captured() -> dict[str, Document]:
    """Return every captured document by its label, blind to what was set."""
    found = {}
    for line in (FIXTURES / "h200x2.jsonl").read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        document = run["document"]
        del document["argv"]
        document["system"].pop("environment", None)
        if document["nccl_log"] is not None:
            document["nccl_log"]["settings"] = {}
        found[run["label"]] = document
    return found


def limited() -> dict[str, Document]:
    """Return what the bench measured with little locked memory, and pinned to four processors."""
    lines = (FIXTURES / "h200x2_limits.jsonl").read_text(encoding="utf-8").splitlines()
    return {run["label"]: run["document"] for run in map(json.loads, lines) if "rows" in run["document"]}


CAPTURED = captured()
HEALTHY = "healthy 1"


def changed(label: str, change: Callable[[Document], None]) -> Document:
    """Return a captured document with one thing changed."""
    document = copy.deepcopy(CAPTURED[label])
    change(document)
    return document


def scaled(document: Document, factor: float, *backends: str) -> None:
    """Make some backends slower by a factor below 1, at every payload from 32 MiB on."""
    for row in document["rows"]:
        if row["backend"] in backends and row["payload_bytes"] >= 32 << 20:
            row["busbw_gb_per_s"] *= factor
            row["algbw_gb_per_s"] *= factor
            row["median_us"] /= factor


NCCL = ("nccl", "nccl_graph")


# ---------------------------------------------------------------- what was measured on two GPUs


@pytest.mark.parametrize(
    ("label", "state", "cause", "says"),
    [
        ("fault p2p_off", "slow", "p2p_off", "P2P is off in NCCL: data goes through shared memory of the host"),
        (
            "fault sockets_only",
            "slow",
            "sockets",
            "NCCL moves data between the GPUs through sockets: P2P and shared memory are both off",
        ),
        ("fault channels_2", "slow", "few_channels", "NCCL uses too few channels (2)"),
        ("fault channels_8", "slow", "few_channels", "NCCL uses too few channels (8)"),
        ("fault channels_16", "slow", "few_channels", "NCCL uses too few channels (16)"),
        (
            "fault neighbour_copying",
            "slow",
            "neighbour_on_link",
            "another process moves data over the links between the GPUs",
        ),
        (
            "fault neighbour_computing",
            "slow",
            "neighbour_on_gpu",
            "another process computes on rank 1 (GPU 1, GPU-00000000-0000-0000-0000-000000000001)",
        ),
        (
            "fault rank_stopped",
            "failed",
            "rank_stopped",
            "rank 1 (GPU 1, GPU-00000000-0000-0000-0000-000000000001) was stopped by a signal from outside"
            " (process state T)",
        ),
        (
            "fault rank_killed",
            "failed",
            "rank_killed",
            "rank 1 (GPU 1, GPU-00000000-0000-0000-0000-000000000001) was killed by SIGKILL"
            " (the kernel's out-of-memory killer does that: see the kernel log)",
        ),
        (
            "fault wrong_element",
            "failed",
            "wrong_result",
            "nccl_graph: wrong result on rank 1 (GPU 1, GPU-00000000-0000-0000-0000-000000000001): 1 wrong element",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("fault ") else "",
)
def test_names_each_induced_fault(label: str, state: str, cause: str, says: str) -> None:
    verdict = judge(Runs(parse(CAPTURED[label])), TABLE)
    assert verdict.state == state
    assert [found.name for found in verdict.causes] == [cause]
    assert verdict.causes[0].text == says
    assert verdict.causes[0].is_certain
    assert says in verdict.findings[0].cause
    assert verdict.findings[0].severity == "error"


@pytest.mark.parametrize(
    "label", sorted(label for label in CAPTURED if not label.startswith("fault ")), ids=lambda label: label
)
def test_no_false_alarm(label: str) -> None:
    verdict = judge(Runs(parse(CAPTURED[label])), TABLE)
    assert (verdict.state, verdict.causes, verdict.findings, verdict.request) == ("ok", (), (), None)


@pytest.mark.parametrize(("label", "affinity"), [("memlock_64k", "0-31"), ("far_processors", "0-3")])
def test_neither_little_locked_memory_nor_four_processors_slow_nvlink(label: str, affinity: str) -> None:
    document = parse(limited()[label])
    assert {gpu.cpu_affinity for gpu in document.system.gpus} == {affinity}
    verdict = judge(Runs(document), TABLE)
    assert (verdict.state, verdict.findings, verdict.causes) == ("ok", (), ())


def test_ten_healthy_runs_are_among_them() -> None:
    assert sum(label.startswith("healthy ") for label in CAPTURED) == 10


def test_apply_on_that_machine_checks_what_is_there_and_changes_nothing_again() -> None:
    root = Path(__file__).parents[1]
    schema = json.loads((root / "docs" / "reference" / "results.schema.json").read_text(encoding="utf-8"))
    first, second = json.loads((FIXTURES / "h200x2_apply.json").read_text(encoding="utf-8"))
    for document in (first, second):
        jsonschema.validate(document, schema)
    assert [first["summary"]["changes"], second["summary"]["changes"]] == [2, 0]
    steps = {step["name"]: step["status"] for step in first["hosts"]["@local"]["steps"]}
    assert (steps["environment"], steps["verify"]) == ("unchanged", "measured")
    measured = {entry["backend"]: entry for entry in first["hosts"]["@local"]["verification"]["backends"]}
    assert (measured["nccl"]["verdict"], measured["nccl"]["ranks"]) == ("pass", 2)


@pytest.mark.parametrize("label", ["fault neighbour_copying", "fault neighbour_computing"])
def test_a_neighbour_is_named_where_nvidia_smi_does_not_list_it(label: str) -> None:
    hidden = changed(label, lambda document: document["load"].update(other_processes=[]))
    seen, blind = (judge(Runs(parse(d)), TABLE).causes[0] for d in (CAPTURED[label], hidden))
    assert (blind.name, blind.is_certain) == (seen.name, True)


@pytest.mark.parametrize(
    ("label", "cause"),
    [("fault p2p_off", "unknown"), ("fault sockets_only", "unknown"), ("fault channels_8", "unknown")],
)
def test_without_nccl_s_own_words_nothing_is_guessed(label: str, cause: str) -> None:
    silent = changed(label, lambda document: document.update(nccl_log=None))
    verdict = judge(Runs(parse(silent)), TABLE)
    assert verdict.state == "slow"
    assert [found.name for found in verdict.causes] == [cause]
    assert "NCCL_DEBUG=INFO" in verdict.findings[0].cause


# ---------------------------------------------------------------- machines that were not at hand


def eight(document: Document, model: str = "NVIDIA H200", busbw: float = 464.0) -> None:
    """Make a document of two GPUs one of eight, with this bandwidth of NCCL at 1 GiB."""
    gpu = document["system"]["gpus"][0]
    document["system"]["ranks"] = 8
    document["system"]["gpus"] = [
        {
            **gpu,
            "rank": n,
            "index": n,
            "name": model,
            "uuid": f"GPU-{n}",
            "peer_access": [p for p in range(8) if p != n],
        }
        for n in range(8)
    ]
    document["rows"] = [row for row in document["rows"] if row["backend"] in NCCL and row["payload_bytes"] == GIB]
    for row in document["rows"]:
        row.update(busbw_gb_per_s=busbw, rank_median_us=[row["median_us"]] * 8)
    document["probes"] = {}
    document["load"] = None


def with_choice(document: Document, algorithm: str, channels: int = 24) -> None:
    """Let NCCL say which algorithm it chose."""
    for choice in document["nccl_log"]["choices"]:
        choice.update(algorithm=algorithm, channels=channels)


def nvls(document: Document) -> None:
    eight(document)
    with_choice(document, "NVLS")


def nvls_off(document: Document) -> None:
    eight(document, busbw=351.0)


def b200_nvls_off(document: Document) -> None:
    eight(document, "NVIDIA B200", busbw=530.0)


def pcie(document: Document, busbw: float) -> None:
    eight(document, "NVIDIA RTX PRO 6000 Blackwell Server Edition", busbw=busbw)
    for gpu in document["system"]["gpus"]:
        gpu["is_multicast_capable"] = False
    document["nccl_log"]["transports"] = {"P2P/direct pointer": 16}


def pcie_narrow(document: Document) -> None:
    pcie(document, 12.0)
    base = {"pcie_link_gen_current": 5, "pcie_link_gen_max": 5, "pcie_link_width_max": 16}
    document["load"] = {
        "gpus": [{"index": n, "pcie_link_width_current": 4 if n == 3 else 16, **base} for n in range(8)],
        "other_processes": [],
    }


def pcie_through_memory(document: Document) -> None:
    pcie(document, 21.0)
    document["nccl_log"]["transports"] = {"SHM/direct/direct": 16}


def pcie_without_p2p(document: Document) -> None:
    pcie_through_memory(document)
    for gpu in document["system"]["gpus"]:
        gpu["peer_access"] = []


def far_processors(document: Document) -> None:
    pcie(document, 20.0)
    document["system"]["gpus"][5].update(numa_node=1, local_cpus="64-127", cpu_affinity="0-63")


def one_bad_pair(document: Document) -> None:
    eight(document, busbw=200.0)
    with_choice(document, "NVLS")
    matrix: list[list[float | None]] = [[None if a == b else 360.0 for b in range(8)] for a in range(8)]
    matrix[2][6] = 120.0
    document["probes"] = {"peer_read_gb_per_s": matrix}


def held_clocks(document: Document) -> None:
    scaled(document, 0.8, *NCCL, "symm_two_shot")
    document["probes"]["compute"][1].update(median_us=420.0, mean_us=425.0, max_us=440.0)
    document["load"]["gpus"][1].update(clocks_sm=900)


@pytest.mark.parametrize(
    ("change", "state", "expected"),
    [
        (nvls, "ok", []),
        (nvls_off, "slow", [("nvls_off", True)]),
        (b200_nvls_off, "slow", [("nvls_off", False)]),
        (lambda d: pcie(d, 46.4), "ok", []),
        (lambda d: pcie(d, 20.0), "slow", [("unknown", False)]),
        (pcie_narrow, "slow", [("pcie_below_width", True)]),
        (pcie_through_memory, "slow", [("p2p_off", True)]),
        (pcie_without_p2p, "ok", []),
        (far_processors, "slow", [("wrong_numa", False)]),
        (one_bad_pair, "slow", [("slow_pair", False)]),
        (held_clocks, "slow", [("slow_gpu", True)]),
    ],
    ids=[
        "8x H200 with NVLS",
        "8x H200, NVLS off",
        "8x B200, ring, bandwidth fits no ring",
        "8x PCIe, healthy",
        "8x PCIe, slow, no witness",
        "8x PCIe, one link at x4",
        "8x PCIe, through shared memory although P2P works",
        "8x PCIe, no P2P at all: nothing to fail on",
        "8x PCIe, one rank on the other socket",
        "8x H200, one pair slow",
        "2x H200, clocks of one held down",
    ],
)
def test_other_machines(change: Callable[[Document], None], state: str, expected: list[tuple[str, bool]]) -> None:
    verdict = judge(Runs(parse(changed(HEALTHY, change))), TABLE)
    assert verdict.state == state
    assert [(cause.name, cause.is_certain) for cause in verdict.causes] == expected


def test_a_likely_cause_says_what_would_settle_it() -> None:
    verdict = judge(Runs(parse(changed(HEALTHY, far_processors))), TABLE)
    assert verdict.findings[0].cause == (
        "nccl is slow at 1073741824 bytes: likely: rank 5 (GPU 5, GPU-5) is driven from processors 0-63, its own are"
        " 64-127; settled by a run pinned to the GPU's own processors"
    )


def test_a_lost_link_needs_the_link_count_as_a_witness() -> None:
    slow = parse(changed(HEALTHY, lambda document: scaled(document, 0.93, *NCCL)))
    lost = Finding("BU-FAB-111", "error", "GPU 1 has 17 of 18 NVLinks", "reset the GPUs")
    with_health = judge(Runs(slow), TABLE, findings=(lost,))
    assert [(cause.name, cause.is_certain) for cause in with_health.causes] == [("lost_link", True)]
    assert [cause.name for cause in judge(Runs(slow), TABLE).causes] == ["unknown"]


def test_multicast_that_is_not_allowed_is_said_and_not_failed() -> None:
    verdict = judge(Runs(parse(changed(HEALTHY, nvls_off))), TABLE, is_multicast_allowed=False)
    assert verdict.state == "ok"
    assert [(f.code, f.severity) for f in verdict.findings] == [("BU-VFY-204", "warning")]


def test_an_unknown_model_is_recorded_and_not_judged() -> None:
    verdict = judge(Runs(parse(changed(HEALTHY, lambda d: eight(d, "NVIDIA X900")))), TABLE)
    assert (verdict.state, [finding.code for finding in verdict.findings]) == ("ok", ["BU-VFY-221"])
    assert [figure.busbw_gb_per_s for figure in verdict.figures] == [464.0, 464.0]


def test_mixed_models_are_not_judged() -> None:
    mixed = changed(HEALTHY, lambda document: document["system"]["gpus"][1].update(name="NVIDIA H20"))
    verdict = judge(Runs(parse(mixed)), TABLE)
    assert [finding.code for finding in verdict.findings] == ["BU-VFY-221"]
    assert verdict.figures == ()


# ---------------------------------------------------------------- runs that follow


def test_a_slow_run_asks_for_one_more() -> None:
    assert judge(Runs(parse(CAPTURED["fault p2p_off"])), TABLE).request == "repeat"


def test_slow_twice_counts_and_says_so() -> None:
    slow = parse(CAPTURED["fault channels_16"])
    verdict = judge(Runs(slow, slow), TABLE)
    assert (verdict.state, verdict.request) == ("slow", None)
    assert verdict.findings[0].evidence["found"] == "282.1 GB/s busbw, 2 of 2 runs"
    assert verdict.findings[0].evidence["wanted"] == ">= 292 GB/s busbw"


def test_slow_once_is_a_warning() -> None:
    verdict = judge(Runs(parse(CAPTURED["fault neighbour_copying"]), parse(CAPTURED[HEALTHY])), TABLE)
    assert (verdict.state, verdict.request, verdict.causes) == ("ok", None, ())
    assert [(f.code, f.severity) for f in verdict.findings] == [("BU-VFY-205", "warning")]


def hung(document: Document) -> None:
    """Make a run one that hangs in its first collective."""
    ranks = [
        {"rank": n, "phase": "measure", "backend": "nccl_graph", "process_state": "R", "stack": None} for n in (0, 1)
    ]
    failure = {"kind": "timeout", "message": "nccl_graph took more than 60 s", "backend": "nccl_graph", "ranks": ranks}
    document.update(exit_status=1, outcome="timeout", rows=[], failures=[failure])


@pytest.mark.parametrize(
    ("without_p2p", "health", "cause", "is_certain"),
    [
        (None, (), "hang", False),
        ("fault p2p_off", (), "hang_in_p2p", True),
        (
            "fault p2p_off",
            (Finding("BU-FAB-131", "warning", "ACS redirects at 0000:00:01.1", "turn it off"),),
            "hang_in_p2p",
            True,
        ),
        ("hung", (), "hang", False),
    ],
    ids=["not classified yet", "ends without P2P", "ends without P2P, ACS on", "hangs without P2P too"],
)
def test_a_hang_is_classified_by_a_run_without_p2p(
    without_p2p: str | None, health: tuple[Finding, ...], cause: str, is_certain: bool
) -> None:
    first = parse(changed(HEALTHY, hung))
    second = first if without_p2p == "hung" else parse(CAPTURED[without_p2p]) if without_p2p else None
    verdict = judge(Runs(first, None, second), TABLE, findings=health)
    assert [(found.name, found.is_certain) for found in verdict.causes] == [(cause, is_certain)]
    assert (verdict.state, verdict.request) == ("failed", "p2p_off" if second is None else None)
    assert verdict.findings[0].code == "BU-VFY-211"
    assert all(f.cause in verdict.causes[0].witnesses for f in health)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ({"wrong_elements": 7}, "7 wrong elements"),
        ({"unwritten_elements": 1}, "1 element never written"),
        ({"canary_intact": False}, "it wrote past the end of the payload"),
    ],
)
def test_what_is_wrong_with_a_result(spoil: dict[str, object], says: str) -> None:
    def change(document: Document) -> None:
        document["checks"][0].update({"ok": False, "bad_ranks": [0], **spoil})

    verdict = judge(Runs(parse(changed(HEALTHY, change))), TABLE)
    assert verdict.state == "failed"
    assert verdict.causes[0].text.endswith(says)


# ---------------------------------------------------------------- own record and fleet


def key(**more: Any) -> Key:
    fields = {
        "gpu_model": "NVIDIA H200",
        "gpus": 2,
        "topology": "NVLink4",
        "nccl_version": "2.28.9",
        "algorithm": "ring/simple",
    }
    return Key(**{**fields, **more})


def recorded(*values: float, **more: Any) -> list[Figure]:
    return [Figure(key(**more), "nccl", GIB, value) for value in values]


@pytest.mark.parametrize(
    ("record", "fleet", "codes"),
    [
        (recorded(331.0), [], []),
        (recorded(350.0), [], ["BU-VFY-222"]),
        (recorded(350.0, nccl_version="2.27.7"), [], []),
        (recorded(350.0, gpus=8), [], []),
        ([], recorded(350, 350, 351, 349), []),
        ([], recorded(350, 350, 351, 349, 350), ["BU-VFY-223"]),
        ([], recorded(350, 340, 360, 330, 370), []),
        (recorded(350.0), recorded(350, 350, 351, 349, 350), ["BU-VFY-222", "BU-VFY-223"]),
    ],
    ids=[
        "as before",
        "below its record",
        "another NCCL is not compared",
        "another count is not compared",
        "four hosts are no fleet",
        "below the fleet",
        "within the fleet's spread",
        "below both",
    ],
)
def test_comparison(record: list[Figure], fleet: list[Figure], codes: list[str]) -> None:
    verdict = judge(Runs(parse(CAPTURED[HEALTHY])), TABLE, record=record, fleet=fleet)
    assert [finding.code for finding in verdict.findings] == codes
    assert verdict.state == "ok"


@pytest.mark.parametrize(
    ("value", "others", "expected"),
    [
        (100.0, [], None),
        (97.0, [100.0], None),
        (96.0, [100.0], 0.04),
        (110.0, [100.0], None),
        (93.0, [98.0, 100.0, 102.0], None),
        (90.0, [98.0, 100.0, 102.0], 0.1),
    ],
)
def test_deviation(value: float, others: list[float], expected: float | None) -> None:
    assert deviation(value, others) == (None if expected is None else pytest.approx(expected))


def test_the_key_holds_what_must_be_equal() -> None:
    document = parse(CAPTURED[HEALTHY])
    row = document.row("nccl", GIB)
    assert row is not None
    assert key_of(document, row, TABLE) == key()
    assert {figure.backend for figure in figures(document, TABLE)} == {"nccl", "nccl_graph", "symm_two_shot"}


# ---------------------------------------------------------------- the parts


@pytest.mark.parametrize(
    ("payload_bytes", "seconds", "ranks", "expected"),
    [(GIB, 3.25e-3, 2, 330.4), (GIB, 4.0e-3, 8, 469.8), (1_000_000_000, 1.0, 4, 1.5)],
)
def test_busbw(payload_bytes: int, seconds: float, ranks: int, expected: float) -> None:
    assert busbw_gb_per_s(payload_bytes, seconds, ranks) == pytest.approx(expected, rel=1e-3)


def test_our_bus_bandwidth_is_the_script_s() -> None:
    script = paths.host_script("allreduce_bench")
    assert script.busbw_gb_per_s(GIB, 3.25e-3, 8) == pytest.approx(busbw_gb_per_s(GIB, 3.25e-3, 8))


def test_results_carry_what_was_found_and_why() -> None:
    verdict = judge(Runs(parse(CAPTURED["fault channels_8"])), TABLE, required=("nccl",))
    by_name = {judgement.backend: judgement.as_result() for judgement in verdict.backends}
    assert (by_name["nccl"]["verdict"], by_name["nccl"]["required"]) == ("fail", True)
    assert by_name["nccl"]["reason"] == "wanted >= 292 GB/s busbw, found 161.9 GB/s busbw"
    assert by_name["symm_two_shot"]["verdict"] == "pass"
    assert by_name["symm_multimem"]["state"] == "missing"
    assert by_name["symm_multimem"]["reason"] == "rank 0: multicast is not allowed (--allow-multicast)"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda d: d.pop("schema"), "schema"),
        (lambda d: d.update(exit_status=3), "exit_status"),
        (lambda d: d["rows"][3].update(median_us=-1), "rows.3.median_us"),
        (lambda d: d["backends"]["nccl"].update(state="fine"), "backends.nccl.state"),
        (lambda d: d["checks"][0].update(ok="perhaps"), "checks.0.ok"),
    ],
)
def test_an_answer_that_cannot_be_read_names_the_place(change: Callable[[Document], object], place: str) -> None:
    document = copy.deepcopy(CAPTURED[HEALTHY])
    change(document)
    with pytest.raises(HostError) as caught:
        parse(document)
    assert caught.value.why is not None
    assert caught.value.why.startswith(place + ":")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("schema = 1\n[[limit", "Expected"),
        ("schema = 2\nmachine=[]\nlimit=[]\nchannels=[]\nreference=[]", "schema:"),
        ("schema = 1\nmachine=[]\nlimit=[]\nchannels=[]\nreference=[{models=['x']}]", "reference.0."),
    ],
)
def test_a_table_that_cannot_be_used_names_the_place(text: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        Table.from_toml(text)
    assert caught.value.why is not None
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("64-65, 70", {64, 65, 70})],
)
def test_processor_lists(text: str, expected: set[int]) -> None:
    assert cpus(text) == expected


@pytest.mark.parametrize(
    ("model", "gpus", "expected"),
    [
        ("NVIDIA H200", 8, 18),
        ("NVIDIA A100-SXM4-80GB", 8, 12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 8, 0),
        ("NVIDIA X900", 8, None),
        (None, 8, None),
    ],
)
def test_links_of_a_model(model: str | None, gpus: int, expected: int | None) -> None:
    assert TABLE.nvlinks(model, gpus) == expected


def test_every_row_of_the_table_says_where_it_comes_from() -> None:
    rows = [*TABLE.machine, *TABLE.limit, *TABLE.channels, *TABLE.reference]
    assert all(row.source and row.date for row in rows)
    assert all(limit.expected[0] <= limit.expected[1] for limit in TABLE.limit)
    for limit in TABLE.limit:
        if limit.metric == "busbw_gb_per_s" and limit.fail is not None and limit.warn is not None:
            assert limit.fail < limit.warn <= limit.expected[0]


def test_the_page_of_limits_shows_the_table() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "verify-limits.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.partition("| models |")[2].splitlines()[2:]
        if line.startswith("|")
    ]
    shown = rows[: len(TABLE.limit)]
    assert len(shown) == len(TABLE.limit)
    for limit, row in zip(TABLE.limit, shown, strict=True):
        low, high = limit.gpus
        span = f"{limit.expected[0]:g}-{limit.expected[1]:g}"
        bounds = [f"{value:g}" if value is not None else "-" for value in (limit.warn, limit.fail)]
        assert row[1] == (str(low) if low == high else f"{low}-{high}")
        assert row[3:5] == [limit.multicast, ", ".join(limit.backends)]
        assert row[6:] == [span, *bounds]
