"""How workers begin: as a fork where that is safe, as a program of their own elsewhere, and alike either way."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from bringup import engine
from bringup.report import events

INVENTORY = """
hosts = [(name, {"bringup_stack": "lab", "ssh_hostname": "192.0.2.1"}) for name in ("gpu-01", "gpu-02")]
"""

DESCRIBE = """
import json, os, sys
from bringup import engine
from bringup.fork_server import ForkServer
server = ForkServer.start() if sys.argv[2] == "fork" else None
job = engine.Job(command="describe", inventory=sys.argv[1], overrides={})
executor = engine.LocalExecutor(server=server)
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


FROM_ONE_SERVER = """
import json, os, signal, sys, threading
from bringup import engine
from bringup.fork_server import ForkServer
server = ForkServer.start()

def describe(told):
    job = engine.Job(command="describe", inventory=sys.argv[1], overrides={})
    executor = engine.LocalExecutor(server=server)
    executor.start(0, job.shard(0, 1), job.environment())
    process = executor._running[0]
    told.append((type(process).__name__, [(line.text is not None, line.status) for line in executor.lines()]))
"""


def test_many_workers_come_from_one_server_each_with_its_own_story(inventory: str) -> None:
    code = f"""{FROM_ONE_SERVER}
told = []
threads = [threading.Thread(target=describe, args=(told,)) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(told))
"""
    assert json.loads(run(code, inventory)) == [["ForkedWorker", [[True, None], [False, 0]]]] * 8


def test_when_the_server_is_killed_workers_are_programs_again(inventory: str) -> None:
    code = f"""{FROM_ONE_SERVER}
told = []
describe(told)
os.kill(server.pid, signal.SIGKILL)
describe(told)
describe(told)
print(json.dumps(told))
"""
    said = json.loads(run(code, inventory))
    assert [kind for kind, _ in said] == ["ForkedWorker", "Popen", "Popen"]
    assert {json.dumps(lines) for _, lines in said} == {"[[true, null], [false, 0]]"}


@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_worker_that_is_killed_or_whose_end_nobody_can_tell_has_failed(who: str) -> None:
    code = f"""
import os, signal
from bringup.fork_server import ForkServer
server = ForkServer.start()
worker = server.fork({{}})
os.kill({who}.pid, signal.SIGKILL)
print(worker.wait())
"""
    assert run(code) == "-9\n"


@pytest.mark.parametrize("how", ["server.close()", "os.kill(os.getpid(), 9)"], ids=["closed", "killed"])
def test_nothing_outlives_the_process_that_asked(how: str) -> None:
    code = f"""
import os
from bringup.fork_server import ForkServer
server = ForkServer.start()
worker = server.fork({{}})
print(server.pid, worker.pid, flush=True)
{how}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    for pid in map(int, done.stdout.split()):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            deadline = time.monotonic() + 30
            while process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline
                time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_workers_that_wait_for_a_host_end_with_the_process_that_asked(number: signal.Signals, tmp_path: Path) -> None:
    code = f"""
{FROM_ONE_SERVER}
job = engine.Job(command="drift", inventory=sys.argv[1], workers=1, connect_timeout_s=300)
executor = engine.LocalExecutor(server=server)
executor.start(0, job.shard(0, 1), job.environment())
next(executor.lines())
print(executor._running[0].pid, flush=True)
os.kill(os.getpid(), {int(number)})
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        file = tmp_path / "hosts.py"
        data = {"bringup_stack": "lab", "ssh_hostname": "127.0.0.1", "ssh_port": silent.getsockname()[1]}
        file.write_text(f"hosts = [('gpu-01', {data})]")
        done = subprocess.run([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True, check=False)
        assert done.returncode == -number
        # Left alone, it waits a quarter of a minute for the host to say something.
        with suppress(psutil.NoSuchProcess):
            _, alive = psutil.wait_procs([psutil.Process(int(done.stdout))], timeout=6)
            assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_a_server_keeps_no_file_of_its_parent_and_leaves_no_worker_unburied() -> None:
    code = """
import json, os
from bringup.fork_server import ForkServer
kept = open("/etc/hostname")
server = ForkServer.start()
worker = server.fork({})
worker.stdin.close()
status = worker.wait()
files = [os.readlink(f"/proc/{server.pid}/fd/{n}") for n in os.listdir(f"/proc/{server.pid}/fd")]
children = open(f"/proc/{server.pid}/task/{server.pid}/children").read()
print(json.dumps([status, [name for name in files if name.startswith("/") and name != "/dev/null"], children]))
"""
    assert json.loads(run(code)) == [0, [], ""]


def test_what_the_parent_had_printed_is_printed_once(inventory: str) -> None:
    out = run("import sys; sys.stdout.write('before ')\n" + DESCRIBE, inventory, "fork")
    assert out.count("before") == 1


@pytest.mark.parametrize(
    ("spoil", "can_fork"),
    [
        ("pass", True),
        ("import ssl", False),
        ("import gevent", False),
        ("import threading, time; threading.Thread(target=time.sleep, args=(2,), daemon=True).start()", False),
    ],
    ids=["nothing", "ssl", "gevent", "thread"],
)
def test_where_a_fork_is_not_safe_the_server_is_a_program(spoil: str, can_fork: bool, inventory: str) -> None:
    code = f"""
{spoil}
from bringup import fork_server
can_fork = fork_server.may_fork()
{FROM_ONE_SERVER}
told = []
describe(told)
describe(told)
words = open(f"/proc/{{server.pid}}/cmdline").read().split("\\0")
print(json.dumps([can_fork, "bringup.fork_server" in words, told]))
"""
    assert json.loads(run(code, inventory)) == [
        can_fork,
        not can_fork,
        [["ForkedWorker", [[True, None], [False, 0]]]] * 2,
    ]


def test_a_worker_can_be_ended_as_soon_as_it_is_known() -> None:
    code = """
import os, signal
from bringup.fork_server import ForkServer
server = ForkServer.start()
for _ in range(20):
    worker = server.fork({})
    os.killpg(worker.pid, signal.SIGKILL)
    assert worker.wait() == -signal.SIGKILL
server.close()
"""
    run(code)


def test_no_handler_of_the_parent_ever_runs_in_its_fork() -> None:
    code = """
import os, signal
from bringup.fork_server import ForkServer
me = os.getpid()
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"the parent's work"))
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
server = ForkServer.start()
server.close()
os.kill(me, signal.SIGTERM)
"""
    assert run(code) == "the parent's work"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_a_command_without_standard_streams_has_its_workers(closed: str, inventory: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"{FROM_ONE_SERVER}\ntold = []\ndescribe(told)\nopen({str(out)!r}, 'w').write(json.dumps(told[0][1]))"
    command = f'exec "$0" -c "$1" "$2" {closed}'
    done = subprocess.run(["sh", "-c", command, sys.executable, code, inventory], check=False, timeout=60)
    assert (done.returncode, out.read_text()) == (0, "[[true, null], [false, 0]]")


NO_ROOM = """
import json, os, resource, sys
from bringup import engine
from bringup.errors import BringupError
from bringup.fork_server import ForkServer
server = ForkServer.start()
job = engine.Job(command="describe", inventory="none", overrides={})
executor = engine.LocalExecutor(server=server)
before = os.listdir("/proc/self/fd")
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 4, hard))
try:
    executor.start(0, job.shard(0, 1), job.environment())
except BringupError as error:
    print(error.what, "|", error.why)
print(len(os.listdir("/proc/self/fd")) - len(before))
"""


def test_where_a_process_may_open_no_more_files_it_says_so_and_keeps_none() -> None:
    assert run(NO_ROOM) == "no worker process can be started | Too many open files\n0\n"


@pytest.mark.parametrize("how", ["fork", "program"])
@pytest.mark.parametrize(
    ("does", "said"),
    [
        (r'os.write(1, b"\xff\n")', ["\\xff\n"]),
        (r'os.write(2, b"\xff\n")', []),
        (r'os.write(2, b"loud\n" * 100_000)', []),
        ('subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, start_new_session=True)', []),
    ],
    ids=["speaks no UTF-8", "complains in no UTF-8", "complains to nobody", "leaves somebody with its streams"],
)
def test_whatever_a_worker_does_its_end_is_told(does: str, said: list[str], how: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts.py"
    file.write_text(f"import os, subprocess\n{does}\n{INVENTORY}")
    nobody = "import os\nend, begin = os.pipe()\nos.close(end)\nos.dup2(begin, 2)\n"
    # The interpreter would find out at its end that nobody reads its standard error.
    leave = "\nsys.stdout.flush()\nos._exit(0)"
    code = nobody + DESCRIBE.replace("server=server)", "server=server, show_worker_log=True)") + leave
    done = subprocess.run(
        [sys.executable, "-c", code, str(file), how], stdout=subprocess.PIPE, text=True, timeout=40, check=True
    )
    lines = json.loads(done.stdout)
    assert [text for text, _, _ in lines[:-2]] == said
    assert (lines[-1][0], lines[-1][1]) == (None, 0)


def test_what_has_ended_is_not_ended_again_and_nothing_begins_after_the_end(inventory: str) -> None:
    code = f"""{FROM_ONE_SERVER}
import time
from bringup.errors import BringupError
job = engine.Job(command="describe", inventory=sys.argv[1], overrides={{}})
executor = engine.LocalExecutor(server=server)
executor.start(0, job.shard(0, 1), job.environment())
while executor._queue.qsize() < 2:
    time.sleep(0.01)
ended = []
os.killpg = lambda pid, number: ended.append(pid)
executor.stop()
try:
    executor.start(1, job.shard(1, 2), job.environment())
except BringupError as error:
    print(ended, error)
"""
    assert run(code, inventory) == "[] the run was stopped\n"


class Told:
    """An executor whose workers have told already what they tell."""

    def __init__(self, *lines: engine.Line) -> None:
        self._lines = lines

    def start(self, part: int, shard: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Start nothing."""

    def lines(self) -> Iterator[engine.Line]:
        """Yield the lines."""
        yield from self._lines

    def stop(self) -> None:
        """Stop nothing."""


def test_a_worker_that_dies_before_it_names_its_hosts_is_said_to_have_lost_them() -> None:
    shard = {"hosts": ["a", "c"], "all_hosts": ["a", "b", "c", "d"], "parts": 2, "stack": None}
    seen: list[events.Event] = []
    workers = Told(
        engine.Line(0, json.dumps({"shard": shard})),
        engine.Line(1, None, -9, "out of memory"),
        engine.Line(0, None, 0),
    )
    engine.run(engine.Job(command="drift", inventory="i.py"), seen.append, executor=workers)
    lost = [(event.worker, event.hosts, event.why) for event in seen if isinstance(event, events.WorkerLost)]
    assert lost == [("worker-1", ("b", "d"), "out of memory"), ("worker-0", ("a", "c"), "it ended with status 0")]


@pytest.mark.parametrize("command", ["plan", "apply", "drift", "verify", "rollback"])
def test_a_command_loads_nothing_that_only_its_worker_or_its_history_needs(command: str) -> None:
    code = f"""
import sys
from bringup import cli, fork_server
cli.mount(["{command}"])
assert fork_server.may_fork()
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
