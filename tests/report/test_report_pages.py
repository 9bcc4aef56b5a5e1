"""Reports for people and machines: everything is in them, and nothing that a host says can do harm."""

from __future__ import annotations

import html.parser
import io
import re
import stat
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from report_case import DRIFT, EVIL, OK, STACK, UNKNOWN, whole
from rich.console import Console

from bringup.errors import InputError
from bringup.report import file, junit, prometheus, tables, text
from bringup.report import html as page
from bringup.report.records import HostRecord, RolloutRecord, RolloutResults, RunRecord
from bringup.report.results import HostResult, Results
from bringup.rollout import (
    Limit,
    Limits,
    Observed,
    RolloutHost,
    Started,
    StepBegun,
    StepEnded,
    WaveOpened,
    advance,
    plan_waves,
    replay,
)

# ------------------------------------------------------------------------------------------------------ text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("plain é 漢 🦀\n\ttab", "plain é 漢 🦀\n\ttab"),
        ("a\x1b[31mb\x07\r\x00", "a[31mb"),
        ("evil\u202etxt.exe\u200b\u2066", "eviltxt.exe"),
        ("\x85\x9b", ""),
    ],
    ids=["kept", "control", "direction", "c1"],
)
def test_printable(given: str, expected: str) -> None:
    assert text.printable(given) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "nothing"),
        ("a", "a"),
        ("", ""),
        ([1, None], "[1, null]"),
        ({"b": 1, "a": "é"}, '{"a": "é", "b": 1}'),
        (False, "false"),
    ],
)
def test_shown(value: object, expected: str) -> None:
    assert text.shown(value) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("payload_bytes", "expected"),
    [(0, "0 B"), (1000, "1000 B"), (8192, "8 KiB"), (2**20, "1 MiB"), (3 * 2**29, "1536 MiB"), (2**33, "8 GiB")],
)
def test_size(payload_bytes: int, expected: str) -> None:
    assert text.size(payload_bytes) == expected


# ------------------------------------------------------------------------------------------------------ html


class _Reader(html.parser.HTMLParser):
    """Read a page as a browser would: its tags, and the text that is left to see."""

    VOID = ("meta", "br")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has a handler"
            assert name not in ("src", "href", "action"), f"{tag} points elsewhere: {value}"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def rollout() -> RolloutResults:
    hosts = (RolloutHost("gpu-1", "rack-1"), RolloutHost("gpu-2", "rack-1"), RolloutHost("gpu-3"))
    waves = plan_waves(hosts, 1, 2, Limit(2))
    state = replay([Started(0.0, "ro1", "lab", "d1", hosts, waves, Limits(Limit(2)))])
    for name in ("gpu-1", "gpu-2", "gpu-3"):
        state = advance(advance(state, StepBegun(1, name, "prepare")), StepEnded(1, name, "prepare", True))
    state = advance(advance(state, Observed(2.0, ("gpu-3",))), WaveOpened(3.0, ("gpu-1",)))
    for step, is_ok in (("drain", True), ("cutover", True), ("gate", False), ("rollback", True), ("undrain", True)):
        state = advance(state, StepBegun(4, "gpu-1", step))  # type: ignore[arg-type]
        state = advance(state, StepEnded(5, "gpu-1", step, is_ok, None if is_ok else EVIL))  # type: ignore[arg-type]
    return RolloutResults.of(state, resume="bringup rollout inventory/lab.py --resume")


def test_a_page_is_well_formed_and_runs_nothing() -> None:
    written = page.render(whole(), written_s=0.0, rollouts=[rollout()])
    reader = _Reader(written)
    assert reader.open == []
    assert "script" not in reader.tags
    assert "Content-Security-Policy" in written
    assert reader.tags.count("details") == 6


def test_a_page_says_everything_and_what_hosts_say_stays_text() -> None:
    said = " ".join(_Reader(page.render(whole(), written_s=0.0, rollouts=[rollout()])).text.split())
    for expected in (
        "bringup apply",
        "Stack lab (abc123).",
        "1970-01-01 00:00:00 UTC",
        "6 hosts",
        "driver.version580.95.05570.172.08",
        '["a", 1]',
        "BU-PRE-003",
        '<script>alert("1")</script>[31m & {{ 7*7 }} ]]>',
        "463.6 GB/s",
        "12.5 µs",
        "1 GiB",
        "not installed",
        "simulated gpu",
        "0123456789ab-3",
        "ssh: connection timed out",
        "Rollout ro1: halted",
        "Go on with bringup rollout inventory/lab.py --resume",
        "gpu-1 reverted",
    ):
        assert expected in said
    assert "\x1b" not in said
    assert "\u202e" not in said


def test_hosts_with_trouble_come_first_and_stand_open() -> None:
    written = page.render(whole(), written_s=0.0)
    order = re.findall(r'<details( open)?>\s*<summary><span class="status \w+">(\w+)</span>', written)
    assert order == [
        (" open", "failed"),
        (" open", "refused"),
        (" open", "unknown"),
        (" open", "slow"),
        (" open", "drift"),
        ("", "ok"),
    ]


def test_a_fleet_says_when_each_host_was_seen() -> None:
    written = page.render(Results.of("status", {"a": OK}, stack=None), written_s=0.0, seen_s={"a": 86400.0})
    assert "Seen 1970-01-02 00:00:00 UTC." in written


def test_an_empty_fleet_has_a_page() -> None:
    assert "<b>0</b> hosts" in page.render(Results.of("drift", {}, stack=None), written_s=0.0)


# ------------------------------------------------------------------------------------------------ prometheus

# Exposition format 0.0.4: metric name, labels with escaped values, a value as Go's ParseFloat reads it.
SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (-?[0-9.e+-]+)'
)


def samples(exposed: str) -> dict[str, float]:
    found: dict[str, float] = {}
    family = ""
    for line in exposed.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
            continue
        if line.startswith("# TYPE "):
            assert line == f"# TYPE {family} gauge"
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] == family, "samples of one family stand together"
        key = f"{match[1]}{{{match[2]}}}"
        assert key not in found, "the same sample twice makes the file unreadable"
        found[key] = float(match[3])
    return found


def test_metrics() -> None:
    exposed = prometheus.render(whole(), seen_s={"gpu-ok": 1_760_000_000.5})
    assert exposed.endswith("\n")
    found = samples(exposed)
    assert (
        found
        | {
            'bringup_host_status{host="gpu-ok",status="ok"}': 1,
            'bringup_host_status{host="gpu-ok",status="drift"}': 0,
            'bringup_host_status{host="gpu-slow",status="slow"}': 1,
            'bringup_host_differences{host="gpu-drift"}': 2,
            'bringup_host_changes{host="gpu-ok"}': 2,
            'bringup_host_findings{host="gpu-refused",severity="error"}': 1,
            'bringup_host_findings{host="gpu-refused",severity="warning"}': 0,
            'bringup_host_verified{host="gpu-ok"}': 1,
            'bringup_host_verified{host="gpu-drift"}': 0,
            'bringup_host_pinned{host="gpu-refused"}': 1,
            'bringup_host_seen_timestamp_seconds{host="gpu-ok"}': 1_760_000_000.5,
            'bringup_host_info{host="gpu-ok",stack="lab",stack_digest="abc123",environment="0123456789ab-3",'
            'simulated="gpu,driver,wheels"}': 1,
            'bringup_allreduce_busbw_bytes_per_second{host="gpu-ok",backend="nccl",payload_bytes="1073741824",'
            'ranks="8"}': 463.6e9,
            'bringup_allreduce_latency_seconds{host="gpu-ok",backend="nccl",payload_bytes="8192",ranks="8"}': 1.25e-05,
        }
        == found
    )
    assert 'bringup_host_verified{host="gpu-unknown"}' not in found


def test_a_label_may_hold_anything() -> None:
    name = 'a\\b"c\nd'
    exposed = prometheus.render(Results.of("drift", {name: UNKNOWN}, stack=None))
    assert r'host="a\\b\"c\nd"' in exposed
    samples(exposed)


def test_without_hosts_there_are_no_metrics() -> None:
    assert prometheus.render(Results.of("drift", {}, stack=None)) == ""


def test_equal_measurements_give_one_sample() -> None:
    assert OK.verification is not None
    twice = OK.verification.model_copy(update={"backends": OK.verification.backends * 2})
    host = OK.model_copy(update={"verification": twice})
    samples(prometheus.render(Results.of("verify", {"a": host}, stack=None)))


# ----------------------------------------------------------------------------------------------------- junit


def suite(host: HostResult, command: str = "apply") -> ET.Element:
    root = ET.fromstring(junit.render(Results.of(command, {"h": host}, stack=STACK)))
    found = root.find("testsuite")
    assert found is not None
    return found


def outcomes(of: ET.Element) -> dict[str, str]:
    return {case.get("name", ""): case[0].tag if len(case) else "pass" for case in of}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "ok",
            {
                "host": "pass",
                "step linker": "pass",
                "step verify": "pass",
                "all-reduce nccl 1 GiB": "pass",
                "all-reduce nccl 8 KiB": "pass",
                "all-reduce flashinfer": "skipped",
            },
        ),
        ("drift", {"host": "failure", "difference driver.version": "failure", "difference linker.x": "failure"}),
        ("refused", {"host": "failure", "finding BU-PRE-003": "failure"}),
        ("slow", {"host": "failure", "all-reduce nccl 1 GiB": "failure"}),
        ("unknown", {"host": "error"}),
        ("failed", {"host": "failure", "step driver": "failure"}),
    ],
)
def test_cases_of_a_host(name: str, expected: dict[str, str]) -> None:
    of = suite(whole().hosts[f"gpu-{name}"])
    assert outcomes(of) == expected
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert of.get(attribute) == str(list(expected.values()).count(tag))
    assert of.get("tests") == str(len(expected))


def test_totals_and_what_xml_cannot_hold() -> None:
    root = ET.fromstring(junit.render(whole()))
    assert {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "16",
        "failures": "9",
        "errors": "1",
        "skipped": "1",
    }
    refused = root.find("testsuite[@name='gpu-refused']/testcase[@name='finding BU-PRE-003']/failure")
    assert refused is not None
    assert refused.get("message") == '<script>alert("1")</script>[31m & {{ 7*7 }} ]]>'


def test_a_difference_that_apply_did_away_with_is_no_failure() -> None:
    changed = DRIFT.model_copy(update={"status": "ok", "changes": 2})
    assert set(outcomes(suite(changed)).values()) == {"pass"}


def test_a_backend_that_the_stack_requires_may_not_be_missing() -> None:
    assert OK.verification is not None
    backends = tuple(one.model_copy(update={"required": True}) for one in OK.verification.backends)
    verification = OK.verification.model_copy(update={"backends": backends})
    assert outcomes(suite(OK.model_copy(update={"verification": verification})))["all-reduce flashinfer"] == "failure"


# ---------------------------------------------------------------------------------------------------- tables


def drawn(table: object, width: int = 240) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def test_runs_table() -> None:
    run = RunRecord(
        id="0123", command="apply", inventory="lab.py", who="ops[bold]@ctl\x1b", stack=STACK, started_s=0.0,
        ended_s=None, exit_code=None, hosts=2, changes=7,
    )  # fmt: skip
    assert drawn(tables.runs([run])) == (
        "run   started                  command  inventory  stack         who            hosts  changes       exit\n"
        "0123  1970-01-01 00:00:00 UTC  apply    lab.py     lab (abc123)  ops[bold]@ctl      2        7  not ended"
    )


def test_hosts_table_says_what_matters() -> None:
    records = [
        HostRecord(host=name, run="r1", command="apply", seen_s=0.0, result=result, verified_s=None)
        for name, result in whole().hosts.items()
    ]
    lines = drawn(tables.hosts(records), 400).splitlines()
    assert len(lines) == 7
    by_host = {line.split()[0]: " ".join(line.split()) for line in lines[1:]}
    assert by_host["gpu-drift"].endswith("2 differences; BU-LNK-002 a shadow")
    assert by_host["gpu-ok"].endswith("lab (abc123) 0123456789ab-3 simulated: gpu, driver, wheels")
    assert by_host["gpu-unknown"].endswith("ssh: connection timed out")
    assert "pinned: bad; BU-PRE-003 <script>" in by_host["gpu-refused"]
    proved = HostRecord(host="a", run="r1", command="apply", seen_s=0.0, result=OK, verified_s=60.0)
    assert "verified 1970-01-01 00:01:00 UTC; simulated" in drawn(tables.hosts([proved]), 400)
    assert "0123456789ab-3" in drawn(tables.hosts([proved]), 70), "a name that is cut in two cannot be copied"


def test_rollouts_table() -> None:
    record = RolloutRecord(
        id="ro1", inventory="lab.py", stack="lab", digest="d1", status="halted", halt="gpu-1: gate failed",
        hosts=6, done=1, created_s=0.0, updated_s=1.0, driven_by=None,
    )  # fmt: skip
    assert "ro1      halted  lab.py     lab (d1)  1 of 6" in drawn(tables.rollouts([record]))


def test_the_plan_of_a_rollout_shows_stages_and_hosts_with_the_canary_first() -> None:
    hosts = (RolloutHost("gpu-1", "rack-1"), RolloutHost("gpu-2"), RolloutHost("gpu-3"))
    waves = (("gpu-1",), ("gpu-2", "gpu-3"))
    one_pass = drawn(tables.wave_plan(hosts, waves, ("environment",))).splitlines()
    assert [" ".join(line.split()) for line in one_pass[1:]] == [
        "prepare 3 every host; nothing that serves is disturbed",
        "wave 1 (canary): drain, cutover, gate, undrain 1 gpu-1 [rack-1]",
        "wave 2: drain, cutover, gate, undrain 2 gpu-2, gpu-3",
    ]
    two_passes = drawn(tables.wave_plan(hosts, waves, ("driver", "environment"))).splitlines()
    assert [" ".join(line.split()) for line in two_passes] == [
        "stage hosts names",
        "prepare driver 3 every host; nothing that serves is disturbed",
        "wave 1 driver (canary): drain, cutover, gate, undrain 1 gpu-1 [rack-1]",
        "wave 2 driver: drain, cutover, gate, undrain 2 gpu-2, gpu-3",
        "prepare environment 3 every host; nothing that serves is disturbed",
        "wave 1 environment (canary): drain, cutover, gate, undrain 1 gpu-1 [rack-1]",
        "wave 2 environment: drain, cutover, gate, undrain 2 gpu-2, gpu-3",
    ]


def test_a_rollout_says_how_far_it_came() -> None:
    document = rollout()
    assert document.summary.model_dump() == {"hosts": 3, "done": 0, "failed": 2, "untouched": 2}
    assert document.exit_code == 1
    lines = [" ".join(line.split()) for line in drawn(tables.rollout(document)).splitlines()]
    assert lines[1].startswith("1 (canary) 1 gpu-1 reverted (<script>")
    assert lines[2] == "2 2 gpu-2 prepared, gpu-3 prepared (does not answer)"


# ------------------------------------------------------------------------------------------------------ file


def test_a_file_is_replaced_whole_and_can_be_read_by_others(tmp_path: Path) -> None:
    target = tmp_path / "bringup.prom"
    target.write_text("old")
    file.write(target, "neu é\n")
    assert target.read_text(encoding="utf-8") == "neu é\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["bringup.prom"]


def test_a_file_that_cannot_be_written_is_said_so_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        file.write(tmp_path / "missing" / "x", "text")
    (tmp_path / "directory").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        file.write(tmp_path / "directory", "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["directory"]
