"""The event stream: what is written reads back, and its results are those of the run."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from report_case import STACK

from bringup import paths
from bringup.finding import Finding
from bringup.report import events
from bringup.report.results import (
    AcrossResult,
    BackendResult,
    DifferenceResult,
    HostResult,
    StepResult,
    VerificationResult,
)
from bringup.rollout import Limit, Limits, Observed, RolloutHost, Started, advance, replay

AT = {"time_s": 1.5, "run": "r1"}
ON = {**AT, "host": "gpu-01"}
NCCL = BackendResult(backend="nccl", state="not_run", reason="the GPUs are simulated")
STARTED = events.RunStarted(
    **AT, command="apply", inventory="i.py", who="ops@ctl", bringup="0.1", stack=STACK, hosts=("gpu-01", "gpu-02")
)
ROLLOUT = replay([Started(0.0, "ro", "lab", "d", (RolloutHost("a"),), (("a",),), Limits(Limit(1)))])
ALL: list[events.Event] = [
    STARTED,
    events.HostConnected(**ON, seconds=0.25),
    events.StepStarted(**ON, step="linker"),
    events.CommandStarted(**ON, number=1, command="ldconfig"),
    events.StepDone(**ON, step="linker", status="changed", seconds=2.0, changes=1),
    events.FindingSeen.of(Finding("BU-LNK-001", "warning", "c", "r", {"found": None}), time_s=1.5, run="r1", host="h"),
    events.DifferenceSeen(**ON, difference=DifferenceResult(path="p", wanted="w", found=None)),
    events.MeasurementTaken(**ON, measurement=NCCL),
    events.HostDone(**ON, status="ok", changes=1, verification=VerificationResult(state="verified")),
    events.WorkerLost(**AT, worker="w1", hosts=("gpu-01",), why="SIGKILL"),
    events.RolloutTold.of(Observed(2.0, ("a",)), advance(ROLLOUT, Observed(2.0, ("a",))), run="r1"),
    events.RunDone(**AT, exit_code=0, seconds=3.0),
    events.AcrossMeasured(**ON, across=AcrossResult(hosts=("gpu-01", "gpu-02"), state="measured", backends=(NCCL,))),
]


def test_every_kind_of_event_is_tried_here() -> None:
    assert {type(event) for event in ALL} == set(events._Event.__subclasses__()) - {events._HostEvent} | set(
        events._HostEvent.__subclasses__()
    )


@pytest.mark.parametrize("event", ALL, ids=[event.event for event in ALL])
def test_an_event_is_one_line_that_reads_back_and_fits_the_schema(event: events.Event) -> None:
    line = event.as_line()
    assert "\n" not in line
    assert events.parse(line) == event
    schema = json.loads((paths.root() / "docs/reference/events.schema.json").read_text())
    jsonschema.validate(json.loads(line), schema)


@pytest.mark.parametrize(
    "line",
    ["", "{}", '{"event": "host_exploded"}', '{"event": "run_done", "time_s": 1, "run": "r"}', "[]"],
    ids=["empty", "no-event", "unknown", "incomplete", "list"],
)
def test_what_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(ValidationError):
        events.parse(line)


def read(parse: Any, line: str | bytes) -> Any:
    """Return the event; None when it is refused."""
    try:
        return parse(line)
    except ValidationError:
        return None


DONE = '{"event":"run_done","time_s":1,"run":"r","exit_code":0}'
DEEP = "[" * 50_000 + "]" * 50_000
FINDING = '{"event":"finding","time_s":1,"run":"r","host":"h","finding":{"code":"c","severity":"info","cause":"c",' + (
    '"remedy":"r","evidence":{"x":%s}}}'
)


@pytest.mark.parametrize(
    ("line", "is_event"),
    [
        (DONE, True),
        (DONE.encode(), True),
        (DONE.encode("utf-16"), False),
        (b"\xef\xbb\xbf" + DONE.encode(), False),
        (DONE.replace("r", "\ud800", 1), False),
        (DONE.replace('"r"', '"\\ud800"'), False),
        (DONE.replace('"r"', '"\\u0000"'), True),
        (DONE.replace('"r"', '"\x00"'), False),
        (DONE.replace('"r"', '"\xff"').encode("latin-1"), False),
        (FINDING % '"\\udfff"', False),
        (FINDING % DEEP, False),
        (DEEP, False),
        (DONE.replace('"run_done"', '"finding","event":"run_done"'), True),
        (DONE.replace('"run_done"', '"run_done","event":"finding"'), False),
        (DONE.replace('"run_done"', '["run_done"]'), False),
        (DONE.replace('"run_done"', "1"), False),
        (DONE.replace('"r"', '3,"run":"r"'), True),
        (DONE.replace("1", "NaN", 1), False),
        (DONE.replace("1", "1e999", 1), False),
        (DONE.replace("1", "9" * 400, 1), False),
        (DONE.replace("0}", "9" * 30 + "}"), True),
        (DONE.replace("0}", "9" * 5000 + "}"), False),
        (DONE.replace("1", '"1"', 1), True),
        (f" {DONE}\n", True),
        (f"{DONE}{DONE}", False),
        ("", False),
        ("null", False),
        ("[]", False),
    ],
    ids=lambda value: None if isinstance(value, bool) else repr(value)[:70],
)
def test_a_line_is_read_as_any_of_the_events_would_be(line: str | bytes, is_event: bool) -> None:
    told = read(events.parse, line)
    assert told == read(events.ADAPTER.validate_json, line)
    assert (told is not None) == is_event


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["ok", "1", "run_done", "lab"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.sampled_from(ALL), st.data())
def test_whatever_is_wrong_with_a_line_is_judged_as_the_schema_judges_it(event: events.Event, data: Any) -> None:
    members = list(json.loads(event.as_line()).items())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(members) - 1))
        match data.draw(st.sampled_from(["other value", "twice", "gone", "unknown"])):
            case "other value":
                members[at] = (members[at][0], data.draw(VALUES))
            case "twice":
                members.insert(data.draw(st.integers(0, len(members))), (members[at][0], data.draw(VALUES)))
            case "gone" if len(members) > 1:
                del members[at]
            case _:
                members.append((data.draw(st.text(max_size=5)), data.draw(VALUES)))
    line = "{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in members) + "}"
    assert read(events.parse, line) == read(events.ADAPTER.validate_json, line)


def test_a_whole_run_gives_its_results() -> None:
    results = events.collect(ALL[:5] + ALL[6:9] + ALL[11:])
    assert (results.command, results.run, results.stack) == ("apply", "r1", STACK)
    assert results.hosts["gpu-01"] == HostResult(
        status="ok",
        changes=1,
        differences=(DifferenceResult(path="p", wanted="w"),),
        steps=(StepResult(name="linker", status="changed", seconds=2.0, changes=1),),
        verification=VerificationResult(state="verified", backends=(NCCL,)),
    )
    assert results.hosts["gpu-02"] == HostResult(status="unknown", why="the run ended before this host was done")
    assert results.across == AcrossResult(hosts=("gpu-01", "gpu-02"), state="measured", backends=(NCCL,))


def test_events_of_hosts_may_come_in_any_mixture() -> None:
    told: list[events.Event] = [STARTED]
    for step in ("a", "b"):
        told += [events.StepDone(**AT, host=host, step=step, status="unchanged") for host in ("gpu-02", "gpu-01")]
    told += [events.HostDone(**AT, host=host, status="ok") for host in ("gpu-02", "gpu-01")]
    hosts = events.collect(told).hosts
    assert [[step.name for step in host.steps] for host in hosts.values()] == [["a", "b"], ["a", "b"]]


def test_a_reboot_in_the_middle_of_a_host_is_one_story() -> None:
    told: list[events.Event] = [
        STARTED,
        events.HostConnected(**ON),
        events.StepDone(**ON, step="driver", status="changed", changes=1),
        events.HostConnected(**ON),
        events.StepDone(**ON, step="verify", status="unchanged"),
        events.HostDone(**ON, status="ok", changes=1),
    ]
    assert [step.name for step in events.collect(told).hosts["gpu-01"].steps] == ["driver", "verify"]


def test_a_lost_worker_makes_its_unfinished_hosts_tell_their_story_again() -> None:
    told: list[events.Event] = [
        STARTED,
        events.HostDone(**AT, host="gpu-02", status="ok", changes=7),
        events.StepDone(**ON, step="driver", status="changed", changes=2),
        events.WorkerLost(**AT, worker="w1", hosts=("gpu-01", "gpu-02"), why="SIGKILL"),
        events.StepDone(**ON, step="driver", status="unchanged"),
        events.HostDone(**ON, status="ok", changes=0),
    ]
    hosts = events.collect(told).hosts
    assert (hosts["gpu-01"].changes, hosts["gpu-02"].changes) == (2, 7)
    assert [step.status for step in hosts["gpu-01"].steps] == ["unchanged"]
