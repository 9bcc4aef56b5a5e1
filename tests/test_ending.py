"""What a run of these tests leaves when it is ended from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bringup import paths

WAITS = """
import pathlib, time, pytest
@pytest.fixture(scope="session")
def lab():
    pathlib.Path("up").touch()
    yield
    pathlib.Path("up").unlink()
def test_waits(lab):
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_run_that_is_ended_takes_its_labs_down(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "test_waits.py").write_text(WAITS)
    plugin = ["-p", "tests.conftest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "test_waits.py"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", *plugin],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(paths.root())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # As a shell starts what it puts into the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=30) == pytest.ExitCode.INTERRUPTED
    assert not (tmp_path / "up").exists()
