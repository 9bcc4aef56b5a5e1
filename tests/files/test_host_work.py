"""The host-side worker, run for real as processes in a directory of its own."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bringup import paths

SCRIPT = paths.files() / "host_work.py"


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
        self.holders: list[subprocess.Popen[str]] = []

    def work(self, *arguments: str, run: str = "r1", stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, str(SCRIPT), "--run", run, *arguments],
            env=self.environment,
            input=stdin,
            capture_output=True,
            timeout=60,
            check=False,
        )

    def hold(self, run: str = "r1", wait_s: float = 0) -> tuple[subprocess.Popen[str], dict[str, object]]:
        holder = subprocess.Popen(
            [
                sys.executable,
                str(SCRIPT),
                "--run",
                run,
                "hold",
                "--who",
                f"me-{run}",
                "--hold-wait-s",
                str(wait_s),
            ],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.holders.append(holder)
        assert holder.stdout is not None
        return holder, json.loads(holder.stdout.readline())

    def end(self) -> None:
        for holder in self.holders:
            holder.kill()
            holder.wait()
            for stream in (holder.stdin, holder.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.end()


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


@pytest.mark.parametrize("detach", [False, True], ids=["attached", "detached"])
def test_do_ends_a_command_with_its_children_at_the_limit(host: Host, tmp_path: Path, detach: bool) -> None:
    flags = ["--detach"] if detach else []
    mark = tmp_path / "pid"
    script = f"sleep 300 & echo $! > {mark}; wait"
    done = host.work("do", "job", "--limit-s", "1", *flags, "--", "sh", "-c", script)
    assert done.returncode == 124
    child = int(mark.read_text())
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()


def test_detached_work_outlives_its_controller_and_is_waited_for(host: Host, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    first = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--run", "r1", "do", "slow", "--detach", "--", "sh", "-c",
         f"sleep 1.5; echo done > {mark}"],
        env=host.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 10
    while not (host.root / "run" / "work.lock").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not mark.exists()
    second = host.work("settle", run="r2")
    assert second.returncode == 0
    assert mark.read_text() == "done\n"
    assert b"waiting for slow of run r1" in second.stderr


def test_a_wait_that_ends_names_the_work_and_changes_nothing(host: Host, tmp_path: Path) -> None:
    host.environment["PATH"] = os.environ["PATH"]
    slow = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--run", "r1", "do", "slow", "--", "sleep", "5"], env=host.environment
    )
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not (host.root / "run" / "work.lock").exists():
        time.sleep(0.02)
    time.sleep(0.3)
    target = tmp_path / "file"
    late = host.work("--wait-s", "0.3", "write", str(target), "--content-b64", b64("x"), run="r2")
    slow.kill()
    slow.wait()
    assert late.returncode == 75
    assert b"slow of run r1" in late.stderr
    assert not target.exists()


def test_run_lock_names_its_holder_to_the_loser(host: Host) -> None:
    _, first = host.hold("r1")
    assert first == {"held": True}
    _, second = host.hold("r2")
    assert second["held"] is False
    assert second["holder"]["who"] == "me-r1"  # type: ignore[index]
    refused = host.work("do", "x", "--", "true", run="r2")
    assert refused.returncode == 75
    assert b"run r1 holds this host now, not r2" in refused.stderr


@pytest.mark.parametrize("end", ["bye", "eof", "silence"])
def test_run_lock_ends_with_its_controller(host: Host, end: str) -> None:
    holder, _ = host.hold("r1")
    assert holder.stdin is not None
    if end == "bye":
        holder.stdin.write("bye\n")
        holder.stdin.flush()
    elif end == "eof":
        holder.stdin.close()
    assert holder.wait(timeout=10) == 0
    _, second = host.hold("r2")
    assert second == {"held": True}


def test_heartbeats_keep_the_run_lock(host: Host) -> None:
    holder, _ = host.hold("r1")
    assert holder.stdin is not None
    for _ in range(8):
        time.sleep(0.25)
        holder.stdin.write("\n")
        holder.stdin.flush()
    assert holder.poll() is None


def test_a_reservation_keeps_other_runs_out_until_its_own_comes(host: Host) -> None:
    assert host.work("reserve", "--for-s", "60", run="r1").returncode == 0
    _, other = host.hold("r2")
    assert other["held"] is False
    _, own = host.hold("r1")
    assert own == {"held": True}
    assert not (host.root / "state" / "reservation.json").exists()


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
    holder, _ = host.hold("r1")
    if is_open:
        host.work("cutover")
    host.work("write", str(path), "--undo", "--content-b64", b64("new"))
    holder.stdin.close()  # type: ignore[union-attr]
    assert holder.wait(timeout=10) == 0
    assert path.read_text() == left


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
