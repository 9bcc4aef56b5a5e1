"""Runs that only looked wait in the spool, and nobody who reads the history can tell."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bringup import spool
from bringup.errors import BringupError
from bringup.history import History, recorder
from bringup.history.database import MIGRATIONS
from bringup.report import events
from bringup.report.masking import Masker
from bringup.report.results import DifferenceResult, FindingResult, StackRef
from bringup.spool import Recording, Spool, SpoolingRecorder

STACK = StackRef(name="lab", digest="abc123")
DIFFERENCE = DifferenceResult(path="linker.libnvrtc.so.13", wanted="/usr/local/cuda-13.0/x", found=None)
FINDING = FindingResult(code="BU-ENV-004", severity="warning", cause="old", remedy="restart it", evidence={"pid": 7})


def quiet_run(run: str = "r1", time_s: float = 100.0) -> list[events.Event]:
    """Return a run over three hosts that changed nothing: as wanted, not as wanted, out of reach."""
    return [
        events.RunStarted(
            time_s=time_s,
            run=run,
            command="apply",
            inventory="inventory/lab.py",
            who="ops@ctl",
            bringup="0.1.0",
            stack=STACK,
            hosts=("gpu-01", "gpu-02", "gpu-03"),
        ),
        events.HostConnected(time_s=time_s + 1, run=run, host="gpu-01", seconds=0.2),
        events.CommandStarted(time_s=time_s + 1, run=run, host="gpu-01", number=1, command="python3 -c …"),
        events.FindingSeen(time_s=time_s + 2, run=run, host="gpu-01", finding=FINDING),
        events.DifferenceSeen(time_s=time_s + 2, run=run, host="gpu-02", difference=DIFFERENCE),
        events.HostDone(time_s=time_s + 3, run=run, host="gpu-01", status="ok", simulated=("gpu",), assigned=STACK),
        events.HostDone(time_s=time_s + 3, run=run, host="gpu-02", status="refused", why="pinned"),
        events.HostDone(time_s=time_s + 3, run=run, host="gpu-03", status="unknown", why="ssh: timed out"),
        events.RunDone(time_s=time_s + 4, run=run, exit_code=1, seconds=4.0),
    ]


STEP = events.StepStarted(time_s=110.0, run="r1", host="gpu-01", step="linker")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Give the file of an empty history."""
    file = tmp_path / "history.db"
    History.open(f"sqlite:///{file}").close()
    return file


def recording(file: Path) -> SpoolingRecorder:
    room = Spool.of(f"sqlite:///{file}")
    assert room is not None
    return SpoolingRecorder(room, Masker(), lambda: recorder(f"sqlite:///{file}"))


def tell(record: Recording, told: list[events.Event]) -> None:
    for event in told:
        record(event)


def stored(file: Path) -> dict[str, object]:
    """Return all that the history holds, opened as any command opens it."""
    history = History.open(f"sqlite:///{file}")
    found = {run.id: (run, history.results(run.id)) for run in history.runs(limit=1000)}
    hosts = history.hosts()
    history.close()
    return {"runs": found, "hosts": hosts}


def rows(file: Path, table: str = "runs") -> int:
    """Return how many rows a table has, without opening the history."""
    connection = sqlite3.connect(file)
    count = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    connection.close()
    return int(count)


def test_a_run_that_waited_reads_back_as_one_that_was_stored_at_once(file: Path, tmp_path: Path) -> None:
    record = recording(file)
    tell(record, quiet_run())
    record.close()
    assert record.problem is None
    assert rows(file) == 0
    at_once = tmp_path / "at-once.db"
    direct = recorder(f"sqlite:///{at_once}")
    tell(direct, quiet_run())
    direct.close()
    assert stored(file) == stored(at_once)
    assert rows(file) == 1
    assert Spool.beside(file).files() == ()


def test_what_does_something_is_stored_before_it_is_done(file: Path) -> None:
    record = recording(file)
    tell(record, quiet_run()[:4])
    assert rows(file) == 0
    record(STEP)
    assert rows(file) == 1
    assert rows(file, "findings") == 1
    assert Spool.beside(file).files() == ()
    record.close()


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda file: None, None),
        (lambda file: file.unlink(), "it is made before the run begins"),
        (lambda file: file.write_bytes(b"no database" * 100), "it cannot be read"),
        (lambda file: sqlite3.connect(file).execute("DROP TABLE meta"), "it has no tables"),
        (lambda file: execute(file, "UPDATE meta SET schema_version = 9"), "it is of another version"),
        (lambda file: crowd(file), "many runs are waiting"),
    ],
    ids=["usable", "absent", "corrupt", "foreign", "other version", "crowded"],
)
def test_a_history_that_is_not_just_there_is_opened_before_the_run(
    file: Path, break_it: Callable[[Path], object], why: str | None
) -> None:
    break_it(file)
    assert (Spool.of(f"sqlite:///{file}") is None) == (why is not None)


@pytest.mark.parametrize(
    "url", ["postgresql://db.example/bringup", "sqlite://", "sqlite:///:memory:", "sqlite:///a?mode=ro", "nonsense"]
)
def test_only_a_file_has_a_spool(url: str) -> None:
    assert Spool.of(url) is None


def execute(file: Path, statement: str) -> None:
    connection = sqlite3.connect(file)
    connection.execute(statement)
    connection.commit()
    connection.close()


def crowd(file: Path) -> None:
    room = Spool.beside(file)
    for at in range(spool.MOST_WAITING):
        room.begin(f"r{at}").close()


def test_the_version_of_the_tables_is_the_histories() -> None:
    assert 1 + len(MIGRATIONS) == spool.SCHEMA_VERSION


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
from test_spool import quiet_run, recording
record = recording(Path(sys.argv[1]))
for event in quiet_run()[:6]:
    record(event)
os.write(record._file._descriptor, b'{"event": "host_do')  # the kill comes in the middle of a line
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_controller_saw_is_there_and_its_other_hosts_are_unknown(file: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(file)], check=False)
    assert ended.returncode == -signal.SIGKILL
    history = History.open(f"sqlite:///{file}")
    (run,) = history.runs()
    assert (run.ended_s, run.hosts) == (None, 3)
    results = history.results("r1")
    assert {host: result.status for host, result in results.hosts.items()} == {
        "gpu-01": "ok",
        "gpu-02": "unknown",
        "gpu-03": "unknown",
    }
    assert results.hosts["gpu-02"].differences == (DIFFERENCE,)
    history.close()
    assert Spool.beside(file).files() == ()


def test_a_run_that_goes_on_is_seen_and_loses_nothing(file: Path) -> None:
    record = recording(file)
    told = quiet_run()
    tell(record, told[:6])
    history = History.open(f"sqlite:///{file}")
    assert history.results("r1").hosts["gpu-01"].status == "ok"
    history.close()
    tell(record, told[6:])
    record.close()
    history = History.open(f"sqlite:///{file}")
    assert [(run.id, run.exit_code) for run in history.runs()] == [("r1", 1)]
    assert history.results("r1").hosts["gpu-03"].why == "ssh: timed out"
    history.close()


@pytest.mark.parametrize(
    "content",
    [
        b"no event\n",
        b'{"event":"run_done","time_s":1,"run":"r0","exit_code":0}\n',
        b'{"event":"new_kind","run":"r0"}\n',
        b"[" * 100_000 + b"\n",
        quiet_run("r0")[0].as_line().encode()
        + b"\n"
        + b'{"event":"run_done","time_s":1,"run":"r0","exit_code":1%s}\n' % (b"0" * 30),
    ],
    ids=["no JSON", "a run that never began", "an event of a later version", "a deep one", "a number without end"],
)
def test_a_file_that_cannot_be_read_is_put_aside_and_the_others_are_stored(file: Path, content: bytes) -> None:
    record = recording(file)
    tell(record, quiet_run())
    record.close()
    room = Spool.beside(file)
    bad = room.directory / "r0.jsonl"
    bad.write_bytes(content)
    os.utime(bad, (1, 1))
    assert list(stored(file)["runs"]) == ["r1"]  # type: ignore[call-overload]
    assert room.files() == ()
    assert (room.directory / "r0.unreadable").read_bytes() == content


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/hostname")],
    ids=["directory", "pipe", "link"],
)
def test_what_is_no_file_is_no_run(file: Path, make: Callable[[Path], object]) -> None:
    record = recording(file)
    tell(record, quiet_run())
    record.close()
    make(Spool.beside(file).directory / "r0.jsonl")
    assert list(stored(file)["runs"]) == ["r1"]  # type: ignore[call-overload]


def test_a_run_that_another_stores_meanwhile_hides_no_other(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Spool.beside(file)
    for run in ("r1", "r2"):
        record = recording(file)
        tell(record, quiet_run(run))
        record.close()
    scan = os.scandir

    @contextmanager
    def and_lose_one(directory: Path) -> Iterator[list[os.DirEntry[str]]]:
        with scan(directory) as found:
            entries = list(found)
        Path(entries[0].path).unlink(missing_ok=True)
        yield entries

    monkeypatch.setattr(os, "scandir", and_lose_one)
    assert len(room.files()) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda room: room.write_text("not a directory"),
        lambda room: room.symlink_to("nowhere"),
        lambda room: (room.mkdir(), (room / "r1.jsonl").symlink_to(room.parent / "elsewhere")),
        None,
    ],
    ids=["a file", "a link to nowhere", "a link in place of the run", "no locks"],
)
def test_where_nothing_can_wait_everything_is_stored_at_once(
    file: Path, spoil: Callable[[Path], object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = recording(file)
    if spoil is None:
        monkeypatch.setattr(fcntl, "flock", without_locks)
    else:
        spoil(Spool.beside(file).directory)
    tell(record, quiet_run())
    record.close()
    assert record.problem is None
    assert rows(file, "host_results") == 3
    assert rows(file, "findings") == 1
    assert not (file.parent / "elsewhere").exists()


def without_locks(_descriptor: int, _how: int) -> None:
    """Be flock of a file system that has no locks."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_directory_that_cannot_be_read_hides_no_history(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    Spool.beside(file).directory.write_text("not a directory")
    assert Spool.of(f"sqlite:///{file}") is None
    assert stored(file)["runs"] == {}
    recorder(f"sqlite:///{file}").close()
    assert f"{file}.waiting cannot be read, or not be emptied: Not a directory" in caplog.text


def test_where_what_waits_cannot_be_stored_the_history_is_read_and_no_run_begins(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = recording(file)
    tell(record, quiet_run())
    record.close()
    execute(file, "CREATE TRIGGER full BEFORE INSERT ON runs BEGIN SELECT RAISE(ABORT, 'the disk is full'); END")
    assert stored(file)["runs"] == {}
    assert "the disk is full" in caplog.text
    with pytest.raises(BringupError, match="cannot be used"):
        recorder(f"sqlite:///{file}")
    execute(file, "DROP TRIGGER full")
    assert list(stored(file)["runs"]) == ["r1"]  # type: ignore[call-overload]


def test_a_history_has_one_spool_whatever_it_is_called(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    other.symlink_to(file)
    record = recording(other)
    tell(record, quiet_run())
    record.close()
    assert list(stored(file)["runs"]) == ["r1"]  # type: ignore[call-overload]


def test_an_empty_file_of_a_run_that_told_nothing_goes_away(file: Path) -> None:
    room = Spool.beside(file)
    room.begin("r0").close()
    assert stored(file)["runs"] == {}
    assert room.files() == ()


def test_a_history_that_cannot_be_opened_in_the_middle_of_a_run_loses_nothing(file: Path) -> None:
    room = Spool.of(f"sqlite:///{file}")
    assert room is not None

    def fail() -> Recording:
        raise BringupError("the history cannot be used", why="disk I/O error")

    record = SpoolingRecorder(room, Masker(), fail)
    told = quiet_run()
    tell(record, [*told[:4], STEP, events.StepDone(time_s=111, run="r1", host="gpu-01", step="linker", status="changed",
                                                   changes=2), *told[4:]])  # fmt: skip
    record.close()
    assert record.problem is not None
    assert record.problem.why == "disk I/O error"
    history = History.open(f"sqlite:///{file}")
    assert [step.changes for step in history.results("r1").hosts["gpu-01"].steps] == [2]
    history.close()


FULL = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, "tests")
from test_spool import quiet_run, recording
record = recording(Path(sys.argv[1]))
told = quiet_run()
record(told[0])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = record._file and Path(sys.argv[1] + ".waiting/r1.jsonl").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, resource.RLIM_INFINITY))
record(told[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for event in told[4:]:
    record(event)
record.close()
print(record.problem.what)
"""


def test_a_line_that_does_not_fit_on_the_disk_is_written_later_and_spoils_no_other(file: Path) -> None:
    said = subprocess.run([sys.executable, "-c", FULL, str(file)], check=True, capture_output=True, text=True).stdout
    assert said == f"the history at sqlite:///{file} cannot be used\n"
    assert rows(file) == 0
    history = History.open(f"sqlite:///{file}")
    hosts = history.results("r1").hosts
    assert hosts["gpu-01"].findings == (FINDING,)
    assert hosts["gpu-02"].differences == (DIFFERENCE,)
    history.close()


def test_what_waits_is_for_its_owner_only_and_without_secrets(file: Path) -> None:
    room = Spool.of(f"sqlite:///{file}")
    assert room is not None
    record = SpoolingRecorder(room, Masker(["hunter2"]), lambda: recorder(f"sqlite:///{file}"))
    record(quiet_run()[0])
    leak = FINDING.model_copy(update={"cause": "no login with hunter2 at https://user:word@mirror.example/"})
    record(events.FindingSeen(time_s=1, run="r1", host="gpu-01", finding=leak))
    record.close()
    (path,) = room.files()
    assert [stat.S_IMODE(at.stat().st_mode) for at in (path, path.parent)] == [0o600, 0o700]
    assert "no login with *** at https://***@mirror.example/" in path.read_text()


def test_what_waits_is_for_those_whom_the_database_is_for(file: Path) -> None:
    file.chmod(0o660)
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(file, 1234, 5678)
    before = os.umask(0o077)
    try:
        record = recording(file)
        tell(record, quiet_run())
        record.close()
    finally:
        os.umask(before)
    (path,) = Spool.beside(file).files()
    assert [stat.S_IMODE(at.stat().st_mode) for at in (path, path.parent)] == [0o660, 0o770]
    if is_root:
        assert [(at.stat().st_uid, at.stat().st_gid) for at in (path, path.parent)] == [(1234, 5678)] * 2


def look_at_once(file: Path, first: int) -> None:
    for at in range(first, first + 10):
        record = recording(file)
        tell(record, quiet_run(f"r{at}", time_s=100.0 * at))
        record.close()
        if at % 3 == 0:
            History.open(f"sqlite:///{file}").close()


def test_runs_and_readers_at_once_lose_no_run_and_store_none_twice(file: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=look_at_once, args=(file, first)) for first in (0, 10, 20, 30)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert set(stored(file)["runs"]) == {f"r{at}" for at in range(40)}  # type: ignore[call-overload]
    assert rows(file, "host_results") == 120
    assert rows(file, "findings") == 40
    assert Spool.beside(file).files() == ()


def test_a_run_that_only_looks_loads_no_database_library() -> None:
    code = "import sys, bringup.commands.apply, bringup.spool; print('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
