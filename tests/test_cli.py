"""How the command line ends: interrupted, or with nobody to write to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

BRINGUP = [sys.executable, "-m", "bringup.cli"]
SAID = "interrupted: hosts keep what was finished; run the same command again to go on\n"


@pytest.mark.parametrize("command", [["drift"], ["apply", "--yes"], ["verify"]], ids=lambda words: words[0])
def test_ctrl_c_says_what_became_of_the_hosts(command: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        port = silent.getsockname()[1]
        inventory = tmp_path / "hosts.py"
        host = {"bringup_stack": "lab", "ssh_hostname": "127.0.0.1", "ssh_port": port}
        inventory.write_text(f"hosts = [('gpu-01', {host!r})]\n")
        process = subprocess.Popen(
            [*BRINGUP, *command, str(inventory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "BRINGUP_STATE": str(tmp_path)},
        )
        connection, _ = silent.accept()  # the run waits for an answer that never comes
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)
        connection.close()
    assert (process.returncode, said) == (130, ("", SAID))


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2), (0, 1, 2)], ids=["stdout", "stderr", "both", "all three"])
def test_streams_that_were_closed_before_are_no_fault(closed: tuple[int, ...]) -> None:
    redirections = " ".join(f"{number}>&-" for number in closed)
    script = f'exec "$0" -m bringup.cli --version {redirections}'
    ended = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
