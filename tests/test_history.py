"""The history: what a run told can be read back, by several controllers, from SQLite and from PostgreSQL."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from postgresql_server import programs, server
from sqlalchemy import select, update

from bringup import paths
from bringup.errors import BringupError, InputError
from bringup.history import (
    LEASE_S,
    Database,
    History,
    Lease,
    Recorder,
    list_rollouts,
    list_waves,
    open_rollout,
    recorder,
    rollout_subject,
    start_rollout,
    take_lease,
)
from bringup.history.tables import AssignmentRow, EnvironmentRow, OwnerRow
from bringup.report import events
from bringup.report.results import (
    BackendResult,
    DifferenceResult,
    EnvironmentResult,
    FindingResult,
    MeasurementKey,
    PinResult,
    StackRef,
    VerificationResult,
)
from bringup.rollout import (
    Bandwidth,
    BandwidthKey,
    Halted,
    Limit,
    Limits,
    Observed,
    PauseAsked,
    Resumed,
    RolloutHost,
    Started,
    StepBegun,
    StepEnded,
    Transition,
    WaveOpened,
    plan_waves,
)

STACK = StackRef(name="lab", digest="abc123")
KEY = MeasurementKey(gpu_model="NVIDIA H200", gpus=8, topology="NVLink4", nccl_version="2.27.7", algorithm="NVLS")


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    if programs() is None:
        pytest.skip("PostgreSQL is not installed (Debian package postgresql)")
    with server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Give the URL of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'history.db'}"
    base: str = request.getfixturevalue("postgresql")
    # A schema of its own is as good as a database of its own, and costs a thousandth of the disk.
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(base, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    return f"{base}&options=-csearch_path%3D{name}"


@pytest.fixture
def history(url: str) -> Iterator[History]:
    history = History.open(url)
    yield history
    history.close()


def started(run: str = "r1", time_s: float = 100.0, hosts: tuple[str, ...] = ("gpu-01", "gpu-02")) -> events.RunStarted:
    return events.RunStarted(
        time_s=time_s,
        run=run,
        command="apply",
        inventory="inventory/lab.py",
        who="ops@ctl",
        bringup="0.1.0",
        stack=STACK,
        hosts=hosts,
    )


def step(
    host: str = "gpu-01", name: str = "linker", run: str = "r1", time_s: float = 110.0, changes: int = 1
) -> events.StepDone:
    return events.StepDone(time_s=time_s, run=run, host=host, step=name, status="changed", seconds=2.0, changes=changes)


def done(host: str = "gpu-01", run: str = "r1", time_s: float = 120.0, **more: object) -> events.HostDone:
    return events.HostDone(time_s=time_s, run=run, host=host, status="ok", **more)  # type: ignore[arg-type]


def measured(
    busbw: float | None, host: str = "gpu-01", run: str = "r1", time_s: float = 115.0, **more: object
) -> events.MeasurementTaken:
    what: dict[str, object] = {
        "backend": "nccl",
        "state": "measured",
        "payload_bytes": 2**30,
        "ranks": 8,
        "busbw_gb_per_s": busbw,
        "verdict": "pass",
        "key": KEY,
    }
    return events.MeasurementTaken(
        time_s=time_s,
        run=run,
        host=host,
        measurement=BackendResult(**{**what, **more}),  # type: ignore[arg-type]
    )


DIFFERENCE = DifferenceResult(path="linker.libnvrtc.so.13", wanted="/usr/local/cuda-13.0/x", found=None)
FINDING = FindingResult(
    code="BU-LNK-002",
    severity="error",
    cause="shadowed",
    remedy="remove /opt/x",
    evidence={"wanted": 1, "found": ["a", None, 2.5]},
)


def whole_run() -> list[events.Event]:
    return [
        started(),
        events.HostConnected(time_s=101, run="r1", host="gpu-01", seconds=0.2),
        events.DifferenceSeen(time_s=102, run="r1", host="gpu-01", difference=DIFFERENCE),
        events.FindingSeen(time_s=102, run="r1", host="gpu-01", finding=FINDING),
        events.StepStarted(time_s=108, run="r1", host="gpu-01", step="linker"),
        step(),
        measured(464.0),
        events.MeasurementTaken(
            time_s=116,
            run="r1",
            host="gpu-01",
            measurement=BackendResult(backend="flashinfer", state="missing", reason="not installed"),
        ),
        done(
            changes=1,
            seconds=20.0,
            simulated=("gpu",),
            verification=VerificationResult(state="verified", measured_at_s=115.0),
            pin=PinResult(digest="bad", reason="gate failed", since="2026-11-30T00:00:00Z"),
            environment=EnvironmentResult(digest="env1", generation=2),
            assigned=STACK,
        ),
        events.HostDone(time_s=121, run="r1", host="gpu-02", status="unknown", why="ssh: timed out"),
        events.RunDone(time_s=122, run="r1", exit_code=1, seconds=22.0),
    ]


# ----------------------------------------------------------------------------------------------------- runs


def test_a_run_reads_back_as_its_events_tell_it(history: History) -> None:
    history.record(whole_run())
    assert history.results("r1") == events.collect(whole_run())
    (run,) = history.runs()
    assert (run.id, run.command, run.who, run.stack, run.hosts, run.changes) == (
        "r1",
        "apply",
        "ops@ctl",
        STACK,
        2,
        1,
    )
    assert (run.started_s, run.ended_s, run.exit_code) == (100.0, 122.0, 1)


def test_storing_the_same_events_again_changes_nothing(history: History) -> None:
    history.record(whole_run())
    before = history.results("r1"), history.runs(), history.hosts()
    history.record(whole_run())
    for event in whole_run():
        history.record([event])
    assert (history.results("r1"), history.runs(), history.hosts()) == before


def test_a_controller_that_died_leaves_its_hosts_unknown(history: History) -> None:
    history.record([started(), step()])
    result = history.results("r1")
    assert {name: host.status for name, host in result.hosts.items()} == {
        "gpu-01": "unknown",
        "gpu-02": "unknown",
    }
    assert result.hosts["gpu-01"].changes == 1
    assert result.hosts["gpu-01"].why == "the run ended before this host was done"
    assert history.runs()[0].exit_code is None
    assert history.hosts() == ()


def test_what_a_lost_worker_changed_is_counted_and_what_it_saw_is_not(history: History) -> None:
    told = [
        started(),
        events.DifferenceSeen(time_s=102, run="r1", host="gpu-01", difference=DIFFERENCE),
        step(changes=3),
        done("gpu-02", time_s=111),
        events.WorkerLost(time_s=112, run="r1", worker="w1", hosts=("gpu-01", "gpu-02"), why="SIGKILL"),
        step(time_s=118, changes=0),
        done(changes=2),
    ]
    history.record(told)
    result = history.results("r1").hosts
    assert result == events.collect(told).hosts
    assert result["gpu-01"].changes == 5
    assert result["gpu-01"].differences == ()
    assert [one.changes for one in result["gpu-01"].steps] == [0]
    assert result["gpu-02"].status == "ok"


def test_events_of_a_run_that_never_started_are_refused_whole(history: History) -> None:
    with pytest.raises(InputError, match="run r9 has not started"):
        history.record([started(), step(run="r9")])
    assert history.runs() == ()


def test_runs_are_listed_newest_first_and_by_host(history: History) -> None:
    history.record([started("old", 1.0), started("new", 3.0, ("gpu-02",)), started("mid", 2.0)])
    assert [run.id for run in history.runs()] == ["new", "mid", "old"]
    assert [run.id for run in history.runs(host="gpu-01")] == ["mid", "old"]
    assert [run.id for run in history.runs(limit=1)] == ["new"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [("zz", "no run in the history has an id that begins with 'zz'"), ("ab", "more than one run"), ("%", "no run")],
    ids=["none", "several", "no-wildcards"],
)
def test_a_run_is_named_by_the_beginning_of_its_id(history: History, asked: str, message: str) -> None:
    history.record([started("abc"), started("abd"), started("x")])
    assert history.results("abc").run == "abc"
    assert history.results("x").run == "x"
    with pytest.raises(InputError, match=message):
        history.results(asked)


def test_a_run_whose_id_begins_another_can_still_be_named(history: History) -> None:
    history.record([started("a"), started("ab"), started("abc")])
    assert history.results("a").run == "a"


def test_the_latest_result_of_each_host_is_kept_at_hand(history: History) -> None:
    history.record(whole_run())
    history.record([started("r2", 200.0), done(run="r2", time_s=210.0, assigned=STACK)])
    first, second = history.hosts()
    assert (first.host, first.run, first.seen_s, first.verified_s) == ("gpu-01", "r2", 210.0, 115.0)
    assert (second.host, second.run, second.result.status, second.verified_s) == ("gpu-02", "r1", "unknown", None)


def test_environments_and_assignments_are_remembered_once(history: History) -> None:
    other = StackRef(name="lab", digest="def")
    for number, (assigned, generation) in enumerate([(STACK, 1), (STACK, 1), (other, 1), (STACK, 2)]):
        run, time_s = f"r{number}", 100.0 + number
        environment = EnvironmentResult(digest="env1", generation=generation)
        history.record([started(run, time_s), done(run=run, time_s=time_s, assigned=assigned, environment=environment)])
    with history.database.reading() as session:
        seen = [
            (row.digest, row.generation, row.first_seen_s, row.last_seen_s)
            for row in session.scalars(select(EnvironmentRow).order_by(EnvironmentRow.generation))
        ]
        since = [
            (row.stack_digest, row.since_s) for row in session.scalars(select(AssignmentRow).order_by(AssignmentRow.id))
        ]
    assert seen == [("env1", 1, 100.0, 102.0), ("env1", 2, 103.0, 103.0)]
    assert since == [("abc123", 100.0), ("def", 102.0), ("abc123", 103.0)]


def test_a_run_that_is_stored_late_or_again_takes_back_nothing_of_later_ones(history: History) -> None:
    old = EnvironmentResult(digest="env1", generation=1, tainted=False)
    late = [started("r1"), done(run="r1", time_s=100.0, assigned=STACK, environment=old)]
    later = StackRef(name="lab", digest="def")
    tainted = old.model_copy(update={"tainted": True})
    history.record([started("r2", 150.0), done(run="r2", time_s=150.0, assigned=later, environment=tainted)])
    for _ in range(3):
        history.record(late)
    with history.database.reading() as session:
        (seen,) = session.scalars(select(EnvironmentRow)).all()
        assert (seen.first_seen_s, seen.last_seen_s, seen.tainted) == (100.0, 150.0, True)
        since = session.scalars(select(AssignmentRow).order_by(AssignmentRow.since_s)).all()
        assert [(row.stack_digest, row.since_s) for row in since] == [("abc123", 100.0), ("def", 150.0)]


def test_bandwidths_for_a_gate(history: History) -> None:
    hosts = tuple(f"gpu-{at:02}" for at in range(1, 5))
    history.record([started("r1", hosts=hosts), started("r2", 200.0, hosts)])
    history.record(
        [
            measured(464.0),
            measured(460.0, run="r2", time_s=201.0),
            measured(200.0, run="r2", time_s=202.0, verdict="fail"),
            measured(None, time_s=117.0, latency_us=5.0),
            measured(463.0, "gpu-02"),
            measured(465.0, "gpu-02", "r2", 203.0),
            measured(466.0, "gpu-03", verdict=None),
            measured(467.0, "gpu-04", key=None),
        ]
    )
    key = BandwidthKey("NVIDIA H200", 8, "NVLink4", "2.27.7", "NVLS", 2**30)
    assert history.own_bandwidths("gpu-01") == (Bandwidth(key, 460.0, "pass"), Bandwidth(key, 464.0, "pass"))
    assert history.own_bandwidths("gpu-01", without_run="r2") == (Bandwidth(key, 464.0, "pass"),)
    assert history.latest_bandwidths("gpu-01") == (
        "r2",
        (Bandwidth(key, 460.0, "pass"), Bandwidth(key, 200.0, "fail")),
    )
    assert history.latest_bandwidths("gpu-04") == (None, ())
    assert set(history.fleet_bandwidths(without="gpu-01")) == {
        Bandwidth(key, 465.0, "pass"),
        Bandwidth(key, 466.0, None),
    }


def test_findings_that_were_known_before(history: History) -> None:
    assert history.known_findings("gpu-01") is None
    history.record(whole_run())
    note = FINDING.model_copy(update={"code": "BU-LNK-009", "severity": "info"})
    history.record([events.FindingSeen(time_s=103, run="r1", host="gpu-01", finding=note)])
    assert history.known_findings("gpu-01") == {"BU-LNK-002"}
    assert history.known_findings("gpu-02") == frozenset()


def test_pruning_forgets_old_runs_and_keeps_what_is_known_of_hosts(history: History) -> None:
    history.record(whole_run())
    history.record([started("r2", 200.0)])
    assert history.prune(150.0) == 1
    assert [run.id for run in history.runs()] == ["r2"]
    with history.database.reading() as session:
        assert session.scalars(select(EnvironmentRow.digest)).all() == ["env1"]


def test_text_that_a_database_refuses_is_stored_all_the_same(history: History) -> None:
    odd = FindingResult(
        code="BU-PRE-001",
        severity="info",
        cause="a\x00b é \U0001f980",
        remedy="'; DROP TABLE runs",
        evidence={"k\x00": "\x00"},
    )
    history.record([started(), events.FindingSeen(time_s=1, run="r1", host="gpu-01", finding=odd)])
    (found,) = history.results("r1").hosts["gpu-01"].findings
    assert (found.cause, found.remedy) == ("a\ufffdb é \U0001f980", "'; DROP TABLE runs")
    assert found.evidence == {"k\ufffd": "\ufffd"}


# -------------------------------------------------------------------------------------------------- secrets

CANARY = "hunter2/canary+secret"


def test_no_secret_is_stored_whatever_it_hides_in(url: str, tmp_path: Path) -> None:
    history = History.open(url, secrets=[CANARY])
    other = "https://user:n0tknown@mirror.example/simple"
    finding = FindingResult(
        code="BU-ENV-001",
        severity="error",
        cause=f"401 from https://user:{CANARY}@mirror.example",
        remedy=f"set it again: {CANARY}",
        evidence={CANARY: [CANARY, {"url": other, "password": "als0unknown"}]},
    )
    history.record(
        [
            started().model_copy(update={"inventory": f"inv?token={CANARY}", "who": CANARY}),
            events.FindingSeen(time_s=1, run="r1", host="gpu-01", finding=finding),
            events.DifferenceSeen(
                time_s=1, run="r1", host="gpu-01", difference=DifferenceResult(path="a", wanted=other, found=CANARY)
            ),
            measured(None, state="not_run", reason=f"Authorization: Bearer {CANARY}"),
            done(why=f"curl -u user:{CANARY}", pin=PinResult(digest="d", reason=CANARY, since="now")),
            events.RunDone(time_s=2, run="r1", exit_code=1),
        ]
    )
    log = start_rollout(history, rollout_started(), "inventory/lab.py")
    log.record(StepBegun(1.0, "gpu-1", "prepare"))
    log.record(StepEnded(2.0, "gpu-1", "prepare", False, why=f"index said {CANARY}"))
    log.record(Halted(2.5, why=f"index said {CANARY}"))
    log.record(Resumed(3.0, CANARY, "d2"))
    log.record(PauseAsked(3.0, who=CANARY))
    take_lease(history, "rollout r", f"ops {CANARY}")
    history.close()
    stored = dumped(url, tmp_path)
    assert b"mirror.example" in stored
    for secret in (b"hunter2", b"canary", b"n0tknown", b"als0unknown", b"aHVudGVyMi"):
        assert secret not in stored


def dumped(url: str, tmp_path: Path) -> bytes:
    if url.startswith("sqlite"):
        return b"".join(file.read_bytes() for file in tmp_path.glob("history.db*"))
    bin_ = programs()
    assert bin_ is not None
    base, _, schema = url.partition("&options=-csearch_path%3D")
    dump = [bin_ / "pg_dump", "--inserts", "--schema", schema, base]
    return subprocess.run(dump, check=True, capture_output=True).stdout


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("postgresql://ops:hunter2@127.0.0.1:1/x", r"at postgresql://ops:\*\*\*@127.0.0.1:1/x cannot be used"),
        ("mysql://ops:hunter2@h/x", "the history can be SQLite or PostgreSQL, found mysql"),
        ("postgresql://ops:hunter2@h:port/x", "the URL of the history cannot be read"),
        ("hunter2", "the URL of the history cannot be read"),
        ("sqlite://", "the history needs a file"),
        ("sqlite:////proc/hunter/history.db", "the history at /proc/hunter/history.db cannot be used"),
    ],
    ids=["refused", "other-database", "bad-port", "no-url", "memory", "no-directory"],
)
def test_a_database_that_cannot_be_used_is_named_without_its_password(wrong: str, message: str) -> None:
    with pytest.raises(BringupError, match=message) as caught:
        History.open(wrong)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert caught.value.hint


def test_the_default_lies_in_the_state_directory_for_its_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BRINGUP_HISTORY", raising=False)
    monkeypatch.setenv("BRINGUP_STATE", str(tmp_path / "state"))
    assert paths.history_url() == f"sqlite:///{tmp_path}/state/history.db"
    old = os.umask(0)
    try:
        history = History.open()
        history.record([started()])
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "state").iterdir()}
    finally:
        os.umask(old)
    assert modes["history.db"] == 0o600
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    history.close()
    monkeypatch.setenv("BRINGUP_HISTORY", "postgresql://db.example/bringup")
    assert paths.history_url() == "postgresql://db.example/bringup"


# -------------------------------------------------------------------------------------------------- schema


def test_an_older_schema_is_brought_up_to_date_once(url: str) -> None:
    Database(url).close()
    migrations = [["ALTER TABLE runs ADD COLUMN note TEXT", "UPDATE runs SET note = 'moved'"]]
    Database(url, migrations=migrations).close()
    Database(url, migrations=migrations).close()  # a second ALTER would fail
    with pytest.raises(InputError, match="has tables of version 2, this bringup knows 1"):
        Database(url)


def test_a_migration_that_fails_leaves_the_old_schema_whole(url: str) -> None:
    Database(url).close()
    wrong = [["ALTER TABLE runs ADD COLUMN note TEXT", "UPDATE nothing SET note = 'moved'"]]
    with pytest.raises(BringupError, match="cannot be used"):
        Database(url, migrations=wrong)
    history = History.open(url)
    history.record(whole_run())
    assert history.results("r1").summary.hosts == 2
    history.close()


def _open_and_record(url: str, name: str, gate: Callable[[], object]) -> None:
    gate()
    history = History.open(url)
    for at in range(5):
        history.record([started(f"{name}-{at}"), step(run=f"{name}-{at}"), done(run=f"{name}-{at}")])
    history.close()


def test_controllers_that_start_at_once_share_a_new_database(url: str) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [context.Process(target=_open_and_record, args=(url, f"c{at}", barrier.wait)) for at in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    history = History.open(url)
    assert len(history.runs(limit=100)) == 20
    assert {run.changes for run in history.runs(limit=100)} == {0}
    history.close()


# ------------------------------------------------------------------------------------------------- recorder


def test_a_recorder_stores_what_matters_at_once(history: History) -> None:
    record = Recorder(history)
    record(started())
    assert len(history.runs()) == 1
    record(events.DifferenceSeen(time_s=1, run="r1", host="gpu-01", difference=DIFFERENCE))
    assert history.results("r1").hosts["gpu-01"].differences == ()
    record(events.StepStarted(time_s=1, run="r1", host="gpu-01", step="linker"))
    assert history.results("r1").hosts["gpu-01"].differences == (DIFFERENCE,)
    record(done())
    record(events.RunDone(time_s=2, run="r1", exit_code=0))
    assert history.results("r1").hosts["gpu-01"].status == "ok"
    assert record.problem is None


def test_a_database_that_fails_in_the_middle_of_a_run_is_caught_up_with_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bringup.history.database.BUSY_TIMEOUT_S", 0.1)
    file = tmp_path / "history.db"
    record = recorder(f"sqlite:///{file}")
    record(started())
    blocker = sqlite3.connect(file, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    record(step())
    record(events.StepStarted(time_s=1, run="r1", host="gpu-01", step="verify"))
    assert record.problem is not None
    assert record.problem.why == "database is locked"
    assert [message.split("\n")[0] for message in caplog.messages] == [
        f"the history at sqlite:///{file} cannot be used"
    ]
    blocker.execute("ROLLBACK")
    record(done(changes=1))
    record(events.RunDone(time_s=2, run="r1", exit_code=0))
    assert record.problem is None
    blocker.close()
    other = History.open(f"sqlite:///{file}")
    assert [one.name for one in other.results("r1").hosts["gpu-01"].steps] == ["linker"]
    other.close()
    record.close()


# ------------------------------------------------------------------------------------------------- rollouts


def rollout_started(id_: str = "ro1", hosts: int = 3) -> Started:
    names = tuple(RolloutHost(f"gpu-{at}") for at in range(1, hosts + 1))
    limits = Limits(Limit(2))
    return Started(0.0, id_, "lab", "d1", names, plan_waves(names, 1, 2, limits.unavailable), limits)


def first_wave() -> list[Transition]:
    story: list[Transition] = []
    for at in (1, 2, 3):
        story += [StepBegun(1.0, f"gpu-{at}", "prepare"), StepEnded(2.0, f"gpu-{at}", "prepare", True)]
    story += [Observed(3.0), WaveOpened(4.0, ("gpu-1",))]
    for name in ("drain", "cutover", "gate", "undrain"):
        story += [StepBegun(5.0, "gpu-1", name), StepEnded(6.0, "gpu-1", name, True)]  # type: ignore[arg-type]
    return story


def test_a_rollout_reads_back_as_it_was(history: History) -> None:
    log = start_rollout(history, rollout_started(), "inventory/lab.py")
    for transition in first_wave():
        assert log.record(transition)
    again = open_rollout(history, "ro1")
    assert again.rollout == log.rollout
    (listed,) = list_rollouts(history)
    assert (listed.id, listed.inventory, listed.status, listed.hosts, listed.done) == (
        "ro1",
        "inventory/lab.py",
        "running",
        3,
        1,
    )
    (wave,) = list_waves(history, "ro1")
    assert (wave.pass_name, wave.number, wave.hosts) == ("environment", 1, ("gpu-1",))
    assert (wave.opened_s, wave.closed_s, wave.outcome) == (4.0, 6.0, "done")


def test_transitions_stored_together_are_stored_whole_or_not_at_all(history: History) -> None:
    log = start_rollout(history, rollout_started(), "i")
    assert log.record(*first_wave())
    assert open_rollout(history, "ro1").rollout == log.rollout
    before = log.rollout
    with pytest.raises(ValueError, match="no wave may open now"):
        log.record(Observed(7.0), WaveOpened(8.0, ("gpu-2",)), WaveOpened(8.0, ("gpu-3",)))
    assert open_rollout(history, "ro1").rollout == before == log.rollout


def test_a_wave_that_was_undone_says_so(history: History) -> None:
    log = start_rollout(history, rollout_started(), "i")
    log.record(*first_wave()[:-4])
    log.record(StepBegun(7.0, "gpu-1", "gate"), StepEnded(8.0, "gpu-1", "gate", False, why="slow"))
    for name in ("rollback", "undrain"):
        log.record(StepBegun(9.0, "gpu-1", name), StepEnded(9.0, "gpu-1", name, True))  # type: ignore[arg-type]
    (listed,) = list_rollouts(history)
    assert (listed.status, listed.halt, listed.done) == ("halted", "gpu-1: gate failed: slow", 0)
    assert [wave.outcome for wave in list_waves(history, "ro1")] == ["rolled back"]


def test_whoever_asks_for_a_pause_is_heard_by_whoever_drives(history: History, url: str) -> None:
    log = start_rollout(history, rollout_started(), "i")
    log.record(*first_wave()[:6], Observed(3.0))
    other = History.open(url)
    assert open_rollout(other, "ro1").record(PauseAsked(3.5, "ops@laptop"))
    # The wave was decided on before the pause was known, so it is not opened.
    assert not log.record(WaveOpened(4.0, ("gpu-1",)))
    assert log.rollout.status == "paused"
    assert not log.refresh()
    assert [record.status for record in list_rollouts(history, only_unfinished=True)] == ["paused"]
    other.close()


def test_both_transitions_of_two_controllers_are_kept_in_one_order(history: History, url: str) -> None:
    start_rollout(history, rollout_started(hosts=3), "i")
    barrier = threading.Barrier(3)

    def prepare(name: str) -> None:
        mine = History.open(url)
        log = open_rollout(mine, "ro1")
        barrier.wait()
        assert log.record(StepBegun(1.0, name, "prepare"))
        assert log.record(StepEnded(2.0, name, "prepare", True))
        mine.close()

    threads = [threading.Thread(target=prepare, args=(f"gpu-{at}",)) for at in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    states = open_rollout(history, "ro1").rollout.states
    assert {name: state.phase for name, state in states.items()} == dict.fromkeys(
        ("gpu-1", "gpu-2", "gpu-3"), "prepared"
    )


@pytest.mark.parametrize("call", [open_rollout, lambda h, _: start_rollout(h, rollout_started(), "i")])
def test_an_id_that_is_not_there_or_taken_is_refused(history: History, call: Callable[..., object]) -> None:
    start_rollout(history, rollout_started(), "i")
    with pytest.raises(InputError, match="in the history"):
        call(history, "ro2")


# --------------------------------------------------------------------------------------------------- leases


def test_the_loser_learns_who_drives_a_rollout_and_since_when(history: History, url: str) -> None:
    lease = take_lease(history, rollout_subject("ro1"), "alice@ctl-1")
    other = History.open(url)
    with pytest.raises(BringupError, match="rollout ro1 is driven by alice@ctl-1") as caught:
        take_lease(other, rollout_subject("ro1"), "bob@ctl-2")
    assert caught.value.why is not None
    assert caught.value.why.startswith("since 20")
    start_rollout(history, rollout_started(), "i")
    assert [record.driven_by for record in list_rollouts(other)] == ["alice@ctl-1"]
    lease.release()
    take_lease(other, rollout_subject("ro1"), "bob@ctl-2")
    assert [record.driven_by for record in list_rollouts(history)] == ["bob@ctl-2"]
    other.close()


def expire(history: History, subject: str) -> None:
    with history.database.writing() as session:
        past = history.database.now_s(session) - 1
        session.execute(update(OwnerRow).where(OwnerRow.subject == subject).values(expires_s=past))


def test_the_lease_of_a_controller_that_died_runs_out_and_its_writes_are_refused(history: History) -> None:
    log = start_rollout(history, rollout_started(), "i")
    subject = rollout_subject("ro1")
    dead = take_lease(history, subject, "alice@ctl-1")
    assert log.record(StepBegun(1.0, "gpu-1", "prepare"), lease=dead)
    expire(history, subject)
    assert [record.driven_by for record in list_rollouts(history)] == [None]
    successor = take_lease(history, subject, "bob@ctl-2")
    # It was not dead but asleep, and must not go on.
    with pytest.raises(BringupError, match="rollout ro1 is driven by another controller now"):
        log.record(StepEnded(2.0, "gpu-1", "prepare", True), lease=dead)
    with pytest.raises(BringupError, match="is driven by another controller now"):
        dead.renew()
    dead.release()
    assert open_rollout(history, "ro1").record(StepEnded(2.0, "gpu-1", "prepare", True), lease=successor)


def test_a_lease_is_renewed_by_whatever_is_recorded(history: History) -> None:
    log = start_rollout(history, rollout_started(), "i")
    lease = take_lease(history, rollout_subject("ro1"), "alice")
    expire(history, lease.subject)
    # Nobody took it over, so it is still theirs.
    log.record(StepBegun(1.0, "gpu-1", "prepare"), lease=lease)
    with history.database.reading() as session:
        row = session.get(OwnerRow, lease.subject)
        assert row is not None
        assert row.expires_s - history.database.now_s(session) > LEASE_S - 10


def test_of_controllers_that_want_a_rollout_at_once_one_wins(history: History, url: str) -> None:
    barrier = threading.Barrier(6)
    won: list[Lease] = []
    lost: list[str] = []

    def want(at: int) -> None:
        mine = History.open(url)
        barrier.wait()
        try:
            won.append(take_lease(mine, "rollout x", f"c{at}"))
        except BringupError as error:
            lost.append(error.what)
        mine.close()

    threads = [threading.Thread(target=want, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(won), len(lost)) == (1, 5)
    assert len(set(lost)) == 1


KILLED = """
import os, signal, sys
from bringup.history import History, open_rollout, take_lease
from bringup.rollout import StepBegun, StepEnded
history = History.open(sys.argv[1])
log = open_rollout(history, "ro1")
for host in ("gpu-1", "gpu-2", "gpu-3"):
    log.record(StepBegun(1.0, host, "prepare"))
    if host == "gpu-2":
        os.kill(os.getpid(), signal.SIGKILL)
    log.record(StepEnded(2.0, host, "prepare", True))
"""


def test_what_was_recorded_before_a_kill_is_there_after_it(history: History, url: str) -> None:
    start_rollout(history, rollout_started(), "i")
    ended = subprocess.run([sys.executable, "-c", KILLED, url], timeout=60)
    assert ended.returncode == -9
    states = open_rollout(history, "ro1").rollout.states
    assert [(states[f"gpu-{at}"].phase, states[f"gpu-{at}"].doing) for at in (1, 2, 3)] == [
        ("prepared", None),
        ("waiting", "prepare"),
        ("waiting", None),
    ]
