"""The host-side worker, run for real as processes in a directory of its own."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bringup import paths

SCRIPT = paths.files() / "host_work.py"


class Holder:
    """A process that holds the run lock, with a controller's heartbeats until it falls silent."""

    def __init__(self, argv: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._silent = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        assert self.process.stdout is not None
        self.answer: dict[str, object] = json.loads(self.process.stdout.readline())

    def _beat(self) -> None:
        while not self._silent.wait(0.2):
            with contextlib.suppress(OSError, ValueError):
                self.say("\n")

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def fall_silent(self) -> None:
        self._silent.set()
        self._thread.join()

    def end(self, how: str = "eof") -> int:
        """End the holder as its controller would, by saying goodbye, by vanishing or by falling silent."""
        self.fall_silent()
        assert self.process.stdin is not None
        if how == "bye":
            self.say("bye\n")
        elif how == "eof":
            self.process.stdin.close()
        return self.process.wait(timeout=10)

    def kill(self) -> None:
        self.fall_silent()
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Host:
    """A directory that stands for a host, and the worker running against it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {
            **os.environ,
            "BRINGUP_RUN_DIR": str(root / "run"),
            "BRINGUP_STATE_DIR": str(root / "state"),
            "BRINGUP_HEARTBEAT_LIMIT_S": "1",
        }
        self.holders: list[Holder] = []

    def argv(self, *arguments: str, run: str = "r1") -> list[str]:
        return [sys.executable, str(SCRIPT), "--run", run, *arguments]

    def work(self, *arguments: str, run: str = "r1", stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.argv(*arguments, run=run),
            env=self.environment,
            input=stdin,
            capture_output=True,
            timeout=60,
            check=False,
        )

    def start(self, *arguments: str, run: str = "r1") -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv(*arguments, run=run), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def hold(self, run: str = "r1", *more: str) -> Holder:
        holder = Holder(self.argv("hold", "--who", f"me-{run}", *more, run=run), self.environment)
        self.holders.append(holder)
        return holder

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def at_work(self, name: str) -> bool:
        """Return whether the work lock says that a command of that name has it."""
        try:
            return bool(json.loads((self.root / "run" / "work.lock").read_text())["name"] == name)
        except (OSError, ValueError):
            return False

    def end(self) -> None:
        for holder in self.holders:
            holder.kill()


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Host]:
    """A host that no run holds."""
    made = Host(tmp_path)
    yield made
    made.end()


@pytest.fixture
def host(bare: Host) -> Host:
    """A host that run r1 holds."""
    assert bare.hold("r1").answer == {"held": True}
    return bare


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("command", "status", "out"),
    [
        pytest.param(["true"], 0, b"", id="succeeds"),
        pytest.param(["sh", "-c", "echo hello; exit 7"], 7, b"hello\n", id="status and output"),
        pytest.param(["/no/such/program"], 127, b"", id="not there"),
        pytest.param(["sh", "-c", "kill -9 $$"], 137, b"", id="killed"),
    ],
)
@pytest.mark.parametrize("detach", [False, True], ids=["attached", "detached"])
def test_do_gives_the_commands_own_status(
    host: Host, command: list[str], status: int, out: bytes, detach: bool
) -> None:
    done = host.work("do", "job", *(["--detach"] if detach else []), "--", *command)
    assert done.returncode == status
    assert out in done.stdout


@pytest.mark.parametrize(
    ("trap", "after"),
    [("", ""), ("trap '' TERM; ", "trap - TERM; ")],
    ids=["listening", "a child that does not listen"],
)
@pytest.mark.parametrize("detach", [False, True], ids=["attached", "detached"])
def test_do_ends_a_command_with_its_children_at_the_limit(
    host: Host, tmp_path: Path, detach: bool, trap: str, after: str
) -> None:
    flags = ["--detach"] if detach else []
    mark = tmp_path / "pid"
    script = f"{trap}sleep 300 & echo $! > {mark}; {after}wait"
    done = host.work("do", "job", "--limit-s", "1", *flags, "--", "sh", "-c", script)
    assert done.returncode == 124
    child = int(mark.read_text())
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()


def test_detached_work_outlives_its_controller_and_is_waited_for(host: Host, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    first = host.start("do", "slow", "--detach", "--", "sh", "-c", f"sleep 2; echo done > {mark}")
    host.wait_for(lambda: (host.root / "run" / "jobs" / "r1-slow" / "log").exists())
    first.send_signal(signal.SIGKILL)
    first.communicate()
    host.holders[0].end()
    assert host.hold("r2").answer == {"held": True}
    assert not mark.exists()
    second = host.work("settle", run="r2")
    assert second.returncode == 0
    assert mark.read_text() == "done\n"
    assert b"waiting for slow of run r1" in second.stderr


def test_a_job_that_is_asked_for_again_is_followed_and_not_done_twice(host: Host, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    job = ["do", "slow", "--detach", "--job", "7", "--", "sh", "-c", f"echo begun; sleep 2; echo x >> {mark}; exit 3"]
    first = host.start(*job)
    host.wait_for(lambda: host.at_work("slow"))
    first.send_signal(signal.SIGKILL)
    first.communicate()
    host.holders[0].end()
    assert host.hold("r1", "--again").answer == {"held": True}
    # Its own job is waited for beyond the time that others get.
    second = host.work("--wait-s", "0.3", *job)
    third = host.work(*job)
    assert mark.read_text() == "x\n"
    for done in (second, third):
        assert (done.returncode, done.stdout) == (3, b"begun\n")


def test_a_job_whose_command_came_late_does_nothing(host: Host, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    assert host.work("do", "one", "--detach", "--job", "2", "--", "true").returncode == 0
    late = host.work("do", "one", "--detach", "--job", "1", "--", "touch", str(mark))
    assert late.returncode == 75
    assert b"number 1 is over" in late.stderr
    assert not mark.exists()


def test_a_job_of_the_same_name_and_another_number_is_another_job(host: Host, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for number in ("1", "2"):
        script = f"echo {number} >> {mark}"
        assert host.work("do", "one", "--detach", "--job", number, "--", "sh", "-c", script).returncode == 0
    assert mark.read_text() == "1\n2\n"


def test_a_follower_that_nobody_reads_leaves_the_job_and_the_journal_alone(host: Host, tmp_path: Path) -> None:
    path, mark = tmp_path / "thing", tmp_path / "mark"
    path.write_text("old")
    host.work("write", str(path), "--undo", "--content-b64", b64("new"))
    script = f"for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.2; done; touch {mark}"
    first = host.start("do", "chatty", "--detach", "--", "sh", "-c", script)
    assert first.stdout is not None
    assert first.stdout.readline() == b"1\n"
    first.stdout.close()
    assert first.wait(timeout=10) != 0
    assert not mark.exists()
    assert host.work("settle").returncode == 0
    assert mark.exists()
    assert path.read_text() == "new"
    first.stderr.close()  # type: ignore[union-attr]


def test_a_wait_that_ends_names_the_work_and_changes_nothing(host: Host, tmp_path: Path) -> None:
    slow = host.start("do", "slow", "--", "sleep", "5")
    host.wait_for(lambda: host.at_work("slow"))
    time.sleep(0.3)
    target = tmp_path / "file"
    late = host.work("--wait-s", "0.3", "write", str(target), "--content-b64", b64("x"))
    slow.kill()
    slow.communicate()
    assert late.returncode == 75
    assert b"slow of run r1" in late.stderr
    assert not target.exists()


def test_run_lock_names_its_holder_to_the_loser(host: Host) -> None:
    second = host.hold("r2").answer
    assert second["held"] is False
    assert second["holder"]["who"] == "me-r1"  # type: ignore[index]
    refused = host.work("do", "x", "--", "true", run="r2")
    assert refused.returncode == 75
    assert b"run r1 holds this host now, not r2" in refused.stderr


def test_a_run_whose_lock_ended_changes_nothing_more(host: Host, tmp_path: Path) -> None:
    host.holders[0].end("silence")
    late = host.work("write", str(tmp_path / "file"), "--content-b64", b64("x"))
    assert late.returncode == 75
    assert b"no run holds this host now, not r1" in late.stderr
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("end", ["bye", "eof", "silence"])
def test_run_lock_ends_with_its_controller(host: Host, end: str) -> None:
    assert host.holders[0].end(end) == 0
    assert host.hold("r2").answer == {"held": True}


def test_a_silent_holder_is_waited_for_by_who_comes_next(host: Host) -> None:
    host.holders[0].fall_silent()
    assert host.hold("r2").answer == {"held": True}


def test_heartbeats_keep_the_run_lock(host: Host) -> None:
    time.sleep(2)
    assert host.holders[0].process.poll() is None


@pytest.mark.parametrize(
    ("between", "answer"),
    [
        pytest.param([], {"held": True}, id="nobody"),
        pytest.param(["r2"], {"held": False, "holder": {"run": "r2", "who": "me-r2", "undone": False}}, id="another"),
    ],
)
def test_a_run_takes_its_lock_again_unless_another_came_in_between(
    host: Host, between: list[str], answer: dict[str, object]
) -> None:
    host.holders[0].end()
    for run in between:
        host.hold(run).end("bye")
    assert host.hold("r1", "--again").answer == answer


def reserve(host: Host, **changes: object) -> None:
    """Write the reservation of a run that asked for a reboot."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    note = {"run": "r1", "who": "me-r1", "boot_id": boot_id, "since_s": time.time(), "until_s": time.time() + 60}
    (host.root / "state").mkdir(exist_ok=True)
    (host.root / "state" / "reservation.json").write_text(json.dumps({**note, **changes}))


def test_a_reservation_keeps_other_runs_out_until_its_own_comes(bare: Host) -> None:
    reserve(bare)
    other = bare.hold("r2").answer
    assert other["held"] is False
    assert other["holder"]["who"] == "me-r1"  # type: ignore[index]
    assert bare.hold("r1", "--again").answer == {"held": True}
    assert not (bare.root / "state" / "reservation.json").exists()


@pytest.mark.parametrize(
    ("changes", "at_least_s"),
    [
        pytest.param({"boot_id": "another"}, 1.0, id="up again and its run stays away"),
        pytest.param({"until_s": 0}, 0.0, id="run out"),
    ],
)
def test_a_reservation_ends(bare: Host, changes: dict[str, object], at_least_s: float) -> None:
    reserve(bare, **changes)
    started = time.monotonic()
    assert bare.hold("r2").answer == {"held": True}
    assert time.monotonic() - started >= at_least_s


@pytest.mark.parametrize("before", ["absent", "file", "link"])
@pytest.mark.parametrize("change", ["write", "remove", "link"])
@pytest.mark.parametrize("failure", ["refusal", "command", "detached command"])
def test_a_failure_puts_back_what_the_run_changed(
    host: Host, tmp_path: Path, before: str, change: str, failure: str
) -> None:
    path = tmp_path / "etc" / "thing"
    path.parent.mkdir()
    if before == "file":
        path.write_text("old")
        path.chmod(0o640)
    elif before == "link":
        path.symlink_to("/old/target")
    arguments = {
        "write": ["write", str(path), "--undo", "--content-b64", b64("new")],
        "remove": ["remove", str(path), "--undo"],
        "link": ["link", str(path), "/new/target", "--undo"],
    }[change]
    assert host.work(*arguments).returncode == 0
    assert host.work("write", str(path), "--undo", "--content-b64", b64("newer")).returncode == 0
    failed = {
        "refusal": ["fail", "because"],
        "command": ["do", "x", "--", "false"],
        "detached command": ["do", "x", "--detach", "--", "false"],
    }[failure]
    done = host.work(*failed)
    assert done.returncode == 1
    if failure == "refusal":
        assert b"because" in done.stderr
    match before:
        case "absent":
            assert not path.exists()
            assert not path.is_symlink()
        case "file":
            assert path.read_text() == "old"
            assert path.stat().st_mode & 0o777 == 0o640
        case "link":
            assert str(path.readlink()) == "/old/target"
    assert not (host.root / "state" / "journal.json").exists()


def test_commit_makes_changes_stay(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    host.work("write", str(path), "--undo", "--content-b64", b64("new"))
    host.work("commit")
    host.work("fail", "late")
    assert path.read_text() == "new"


@pytest.mark.parametrize(("is_open", "left"), [(True, "old"), (False, "new")], ids=["in cutover", "in prepare"])
def test_a_controller_that_vanishes_in_a_cutover_is_undone(
    host: Host, tmp_path: Path, is_open: bool, left: str
) -> None:
    path = tmp_path / "thing"
    path.write_text("old")
    if is_open:
        host.work("cutover")
    host.work("write", str(path), "--undo", "--content-b64", b64("new"))
    assert host.holders[0].end() == 0
    assert path.read_text() == left
    # Its own run may go on after a lost connection, but not behind a cutover that was put back.
    assert host.hold("r1", "--again").answer["held"] is not is_open


@pytest.mark.parametrize("is_open", [True, False], ids=["in cutover", "in prepare"])
def test_what_a_run_left_half_done_is_put_back_before_the_next_begins(
    host: Host, tmp_path: Path, is_open: bool
) -> None:
    path = tmp_path / "thing"
    path.write_text("old")
    if is_open:
        host.work("cutover")
    host.work("write", str(path), "--undo", "--content-b64", b64("new"))
    host.holders[0].kill()  # as a power cut would
    assert path.read_text() == "new"
    assert host.hold("r2").answer == {"held": True}
    assert path.read_text() == "old"
    assert not (host.root / "state" / "journal.json").exists()


def test_a_failure_leaves_the_journal_of_another_run_alone(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    path.write_text("old")
    host.work("write", str(path), "--undo", "--content-b64", b64("new"))
    failed = host.work("fail", "because", run="r0")
    assert (failed.returncode, failed.stderr) == (1, b"because\n")
    assert path.read_text() == "new"


@pytest.mark.parametrize("name", ["credentials", "credentials-apt"])
def test_credentials_go_with_their_controller(host: Host, name: str) -> None:
    path = host.root / "run" / name
    path.write_text("secret")
    host.holders[0].end()
    assert not path.exists()


def test_an_apt_that_outlives_its_controller_keeps_its_login(host: Host) -> None:
    path = host.root / "run" / "credentials-apt"
    path.write_text("secret")
    with (host.root / "run" / "work.lock").open("w") as work:
        fcntl.flock(work, fcntl.LOCK_EX)
        host.holders[0].end()
    assert path.exists()


def test_written_files_have_the_asked_mode_under_umask_077_and_leave_no_rest(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "new" / "directory" / "file"
    host.work("write", str(path), "--mode", "0644", "--content-b64", b64("x"))
    assert path.stat().st_mode & 0o777 == 0o644
    assert path.parent.stat().st_mode & 0o777 == 0o755
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("size", "digest", "status", "left"),
    [
        pytest.param(5, hashlib.sha256(b"hello").hexdigest(), 0, b"hello", id="whole"),
        pytest.param(9, hashlib.sha256(b"hello").hexdigest(), 1, b"old", id="cut off"),
        pytest.param(5, hashlib.sha256(b"other").hexdigest(), 1, b"old", id="wrong hash"),
    ],
)
def test_received_files_are_whole_or_not_there(
    host: Host, tmp_path: Path, size: int, digest: str, status: int, left: bytes
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    done = host.work("write", str(path), "--stdin", "--size", str(size), "--sha256", digest, stdin=b"hello")
    assert done.returncode == status
    assert path.read_bytes() == left
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".bringup")] == []
