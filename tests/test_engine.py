"""How workers begin: as a fork where that is safe, as a program of their own elsewhere, and alike either way."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

INVENTORY = """
hosts = [(name, {"bringup_stack": "lab", "ssh_hostname": "192.0.2.1"}) for name in ("gpu-01", "gpu-02")]
"""

DESCRIBE = """
import json, os, sys
from bringup import engine
job = engine.Job(command="describe", inventory=sys.argv[1], overrides={})
executor = engine.LocalExecutor()
if sys.argv[2] == "fork":
    executor.stand_by(job.environment())
    assert executor._standing_by is not None
executor.start(0, job.shard(0, 1), job.environment())
lines = list(executor.lines())
executor.stop()
print(json.dumps([[line.text, line.status, line.said] for line in lines]))
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def inventory(tmp_path: Path) -> str:
    file = tmp_path / "hosts.py"
    file.write_text(INVENTORY)
    return str(file)


def test_a_fork_says_what_a_program_of_its_own_says(inventory: str) -> None:
    said = [json.loads(run(DESCRIBE, inventory, how)) for how in ("fork", "program")]
    assert said[0] == said[1]
    (text, status, why), end = said[0]
    assert [host["name"] for host in json.loads(text)["inventory"]] == ["gpu-01", "gpu-02"]
    assert (status, why, end) == (None, "", [None, 0, ""])


def test_a_fork_that_cannot_begin_says_why(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.py")
    said = [json.loads(run(DESCRIBE, missing, how)) for how in ("fork", "program")]
    assert said[0] == said[1]
    ((text, status, why),) = said[0]
    assert (text, status) == (None, 2)
    assert why.startswith(f"there is no inventory {missing}")


def test_a_worker_that_is_not_needed_ends(inventory: str) -> None:
    code = """
import os, sys
from bringup import engine
executor = engine.LocalExecutor()
executor.stand_by({})
pid = executor._standing_by[0].pid
os.kill(pid, 0)
executor.stop()
try:
    os.kill(pid, 0)
except ProcessLookupError:
    print("ended")
"""
    assert run(code) == "ended\n"


def test_a_worker_whose_parent_is_killed_before_it_begins_ends() -> None:
    code = """
import os
from bringup import engine
executor = engine.LocalExecutor()
executor.stand_by({})
print(executor._standing_by[0].pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    with suppress(psutil.NoSuchProcess):
        worker = psutil.Process(int(done.stdout))
        deadline = time.monotonic() + 30
        while worker.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_what_the_parent_had_printed_is_printed_once(inventory: str) -> None:
    out = run("import sys; sys.stdout.write('before ')\n" + DESCRIBE, inventory, "fork")
    assert out.count("before") == 1


@pytest.mark.parametrize(
    "spoil",
    [
        "import ssl",
        "import gevent",
        "import threading, time; threading.Thread(target=time.sleep, args=(2,), daemon=True).start()",
    ],
    ids=["ssl", "gevent", "thread"],
)
def test_where_a_fork_is_not_safe_there_is_none(spoil: str) -> None:
    code = f"{spoil}\nfrom bringup import engine\nx = engine.LocalExecutor(); x.stand_by({{}}); print(x._standing_by)"
    assert run(code) == "None\n"


@pytest.mark.parametrize("command", ["plan", "apply", "drift", "verify"])
def test_a_command_loads_nothing_that_only_its_worker_or_its_history_needs(command: str) -> None:
    code = f"""
import sys
from bringup import cli, engine
cli.mount(["{command}"])
assert engine.may_fork()
print(sorted({{"pyinfra", "paramiko", "gevent", "sqlalchemy", "httpx", "asyncio", "ssl"}} & sys.modules.keys()))
"""
    assert run(code) == "[]\n"


def test_a_worker_loads_nothing_that_pyinfra_does_not_use() -> None:
    code = """
import sys
from bringup import lean, worker
print(sorted({"yaml", "invoke.tasks", "sqlalchemy", "rich", "typer"} & sys.modules.keys()))
"""
    assert run(code) == "[]\n"
