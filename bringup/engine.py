"""Run worker processes over the hosts of an inventory and gather what they tell.

A worker is ``python -m bringup.worker`` with a Shard on stdin and events on stdout, or a fork that does the same.
pyinfra allows one run per process, so shards are processes; this module imports pyinfra only there.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from getpass import getuser
from typing import IO, Any, Protocol

from pydantic import ValidationError

from bringup import __version__
from bringup.errors import BringupError, InputError
from bringup.fork_server import ForkServer
from bringup.report import events
from bringup.report.results import Results, StackRef

HOSTS_PER_WORKER = 50
"""One worker's controller CPU is single-threaded; 50 hosts keep it busy without starving it."""


@dataclass(frozen=True)
class Job:
    """What to do with which hosts.

    ``limit`` empty means all hosts; names, groups and glob patterns are accepted there and in ``exclude``.
    ``overrides`` are ``bringup_*`` data keys without their prefix. ``workers`` None means one per 50 hosts, at
    most one per processor core.
    """

    command: str
    inventory: str
    limit: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    parallel: int = HOSTS_PER_WORKER
    connect_timeout_s: int = 10
    verbosity: int = 0
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def environment(self) -> dict[str, str]:
        """Return what a worker of this job finds in its environment besides ours."""
        return {"BRINGUP_RUN_ID": self.run}

    def shard(self, part: int, parts: int | None) -> dict[str, Any]:
        """Return the Shard document for one part; ``parts`` None lets the worker count the hosts first."""
        return {
            "command": self.command,
            "inventory": self.inventory,
            "limit": self.limit,
            "exclude": self.exclude,
            "part": part,
            "parts": parts,
            "overrides": {**self.overrides, "who": who()},
            "parallel": self.parallel,
            "connect_timeout_s": self.connect_timeout_s,
            "verbosity": self.verbosity,
        }


@dataclass(frozen=True)
class Line:
    """One line from a worker; ``text`` None means that it ended, with its status and what it said to people."""

    part: int
    text: str | None
    status: int | None = None
    said: str = ""


class Executor(Protocol):
    """Start shards somewhere and hand back their lines."""

    def start(self, part: int, shard: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Start one shard."""

    def lines(self) -> Iterator[Line]:
        """Yield lines of all shards as they come, ending when every started shard has ended."""

    def stop(self) -> None:
        """End what still runs."""


class _Process(Protocol):
    """What the executor needs of a worker: its process group, its two streams, and its end."""

    pid: int
    stdout: IO[str] | None
    stderr: IO[str] | None

    def wait(self) -> int:
        """Return the status once it has ended; negative for a signal."""


class LocalExecutor:
    """Run each shard in a child process of this machine.

    With ``server`` they are forks of it as long as it lives, otherwise programs of their own.
    """

    def __init__(self, *, show_worker_log: bool = False, server: ForkServer | None = None) -> None:
        self._queue: queue.Queue[Line] = queue.Queue()
        self._running: dict[int, _Process] = {}
        self._buried: set[int] = set()
        self._is_stopped = False
        self._lock = threading.Lock()
        self._show = show_worker_log
        self._server = server

    def start(self, part: int, shard: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Start one shard in a process group of its own, so that it can be ended as a whole.

        Raises BringupError where no more processes can be had, and after ``stop``.
        """
        with self._lock:
            if self._is_stopped:
                raise BringupError("the run was stopped")
            process, stdin = self._worker(environment)
            self._running[part] = process
        with suppress(BrokenPipeError):  # it has ended, and its status is told like any other's
            stdin.write(json.dumps(shard))
            stdin.close()
        threading.Thread(target=self._read, args=(part, process), daemon=True).start()

    def _worker(self, environment: Mapping[str, str]) -> tuple[_Process, IO[str]]:
        if self._server is not None:
            try:
                forked = self._server.fork(environment)
            except OSError:
                self._server = None
            else:
                return forked, forked.stdin
        try:
            return _executed(environment)
        except OSError as error:
            raise BringupError(
                "no worker process can be started",
                why=error.strerror,
                hint="name fewer of them with --workers, or see `ulimit -n` and `ulimit -u`",
            ) from None

    def _read(self, part: int, process: _Process) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        said: list[str] = []
        reader = threading.Thread(target=self._listen, args=(process.stderr, said), daemon=True)
        reader.start()
        for text in process.stdout:
            self._queue.put(Line(part, text))
        status = process.wait()
        with self._lock:
            self._buried.add(part)
        process.stdout.close()
        # What a worker has started may keep this open for longer than anybody wants to wait.
        reader.join(timeout=5)
        self._queue.put(Line(part, None, status, "".join(said[-40:]).strip()))

    def _listen(self, stream: IO[str], said: list[str]) -> None:
        with stream:
            for text in stream:
                said.append(text)
                # A worker that nobody listens to any more would wait for us.
                if self._show and sys.stderr is not None:
                    with suppress(OSError):
                        sys.stderr.write(text)

    def lines(self) -> Iterator[Line]:
        """Yield lines until every shard has ended."""
        while self._running:
            line = self._queue.get()
            if line.text is None:
                with self._lock:
                    self._running.pop(line.part, None)
            yield line

    def stop(self) -> None:
        """End every worker with its children; hosts see their connections close and let the run go."""
        with self._lock:
            self._is_stopped = True
            for part, process in self._running.items():
                if part in self._buried:
                    continue  # its number may be another's by now
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)


def _executed(environment: Mapping[str, str]) -> tuple[_Process, IO[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bringup.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        env={**os.environ, **environment},
        start_new_session=True,
    )
    assert process.stdin is not None
    return process, process.stdin


def who() -> str:
    """Return the person and controller that a host records as the holder of its lock."""
    return f"{getuser()}@{socket.gethostname()} (pid {os.getpid()})"


def run(
    job: Job,
    on_event: Callable[[events.Event], None],
    *,
    executor: Executor | None = None,
    stack: StackRef | None = None,
) -> Results:
    """Carry out a job and return its results; every event is handed on as it comes.

    Raises InputError when the inventory, the stack or the job cannot be used.
    """
    executor = executor or LocalExecutor(show_worker_log=job.verbosity > 0)
    collector = events.Collector()
    started = time.time()

    def tell(event: events.Event) -> None:
        collector.add(event)
        on_event(event)

    environment = job.environment()
    parts: dict[int, tuple[str, ...]] = {}
    done: set[str] = set()
    problems: list[str] = []
    executor.start(0, job.shard(0, job.workers), environment)
    try:
        for line in executor.lines():
            if line.text is None:
                lost = tuple(host for host in parts.get(line.part, ()) if host not in done)
                if line.status != 0 and line.part not in parts:
                    problems.append(line.said or f"the worker ended with status {line.status}")
                elif lost:
                    why = line.said or f"it ended with status {line.status}"
                    tell(_lost(job, line.part, lost, why))
                continue
            if line.text.startswith('{"shard"'):
                shard = json.loads(line.text)["shard"]
                parts[line.part] = tuple(shard["hosts"])
                if line.part == 0:
                    reference = stack or (StackRef(**shard["stack"]) if shard.get("stack") else None)
                    tell(_started(job, tuple(shard["all_hosts"]), started, reference))
                    for part in range(1, shard["parts"]):
                        # It may die before it says which hosts are its own, and they are lost all the same.
                        parts[part] = tuple(shard["all_hosts"][part :: shard["parts"]])
                        executor.start(part, job.shard(part, shard["parts"]), environment)
                continue
            try:
                event = events.parse(line.text)
            except ValidationError as error:
                raise BringupError("a worker said something that is no event", why=str(error)) from error
            if isinstance(event, events.HostDone):
                done.add(event.host)
            tell(event)
    finally:
        executor.stop()
    if problems and not parts:
        raise InputError(problems[0].removeprefix("error: "))
    results = collector.results(job.command)
    tell(
        events.RunDone(
            time_s=time.time(),
            run=job.run,
            exit_code=results.exit_code,
            seconds=round(time.time() - started, 3),
        )
    )
    return results


def describe(
    inventory: str,
    *,
    limit: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    overrides: Mapping[str, Any],
    server: ForkServer | None = None,
) -> list[dict[str, Any]]:
    """Return the hosts of an inventory with their groups, stack and ssh address, connecting to none.

    Raises InputError when the inventory or a stack cannot be used.
    """
    job = Job(command="describe", inventory=inventory, limit=limit, exclude=exclude, overrides=overrides)
    executor = LocalExecutor(server=server)
    executor.start(0, job.shard(0, 1), job.environment())
    found: list[dict[str, Any]] | None = None
    said = ""
    for line in executor.lines():
        if line.text is None:
            said = line.said
        elif line.text.startswith('{"inventory"'):
            found = json.loads(line.text)["inventory"]
    if found is None:
        raise InputError(said or f"{inventory}: cannot be read")
    return found


def _started(job: Job, hosts: tuple[str, ...], time_s: float, stack: StackRef | None) -> events.RunStarted:
    return events.RunStarted(
        time_s=round(time_s, 3),
        run=job.run,
        command=job.command,
        inventory=job.inventory,
        who=who(),
        bringup=__version__,
        stack=stack,
        hosts=hosts,
    )


def _lost(job: Job, part: int, hosts: tuple[str, ...], why: str) -> events.WorkerLost:
    return events.WorkerLost(time_s=round(time.time(), 3), run=job.run, worker=f"worker-{part}", hosts=hosts, why=why)
