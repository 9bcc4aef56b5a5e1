"""Run shards on the workers of a dask.distributed cluster, where one controller is not enough.

The scheduler may start a task again on its own when a worker is lost; a shard must not be, for the lost worker may
still hold hosts. So every attempt needs a ticket that the scheduler hands out once, and only this process decides
what is tried again: the hosts that had not ended, which then wait for their run lock until the lost worker's hold is
gone. What a worker needs is this package and ssh access to the hosts: keys, and known_hosts where the inventory
names it. The inventory itself travels with the shard.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distributed import Client, Queue, get_client, get_worker
from distributed.security import Security

from bringup.engine import Line
from bringup.errors import BringupError, InputError
from bringup.stack import is_lock, load_stack, lock_path_of

ATTEMPTS = 3
"""A shard that costs its worker this often is no accident of the workers."""

LOCK_WAIT_S = 120.0
"""Longer than a host keeps the run lock for a holder that fell silent, which is 30 s."""

CONNECT_LIMIT_S = 20
NO_WORKER_LIMIT_S = 60.0
_LOOK_S = 2.0
_PR_SET_PDEATHSIG = 1


def check_address(address: str) -> str:
    """Return the address of a scheduler, ``tls://HOST:PORT``; ``tcp://`` is for this machine alone.

    Raises InputError for one whose traffic others could read or write.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("tls", "tcp") or not parts.hostname or parts.port is None:
        raise InputError(f"{address!r} is no scheduler", why="wanted tls://HOST:PORT")
    if parts.scheme == "tcp" and not _is_loopback(parts.hostname):
        raise InputError(
            f"{address} is refused: whoever reaches an open scheduler runs commands on every host",
            hint="use tls://, with the certificates named in distributed.comm.tls of Dask's configuration",
        )
    return address


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


@dataclass
class _Shard:
    """One shard, and how far it was heard of. ``worker`` None: no worker has said that it begins."""

    document: dict[str, Any]
    environment: Mapping[str, str]
    attempt: int = 0
    topic: str = ""
    future: Any = None
    worker: str | None = None
    announced: tuple[str, ...] | None = None
    done: set[str] = field(default_factory=set)
    has_ended: bool = False
    worker_seen_s: float = field(default_factory=time.monotonic)


class DaskExecutor:
    """Be an ``engine.Executor`` over a scheduler.

    The certificates of both sides are those of Dask's own configuration (``distributed.comm.tls``: ca-file and the
    client's cert and key). Raises InputError for an address that is not safe, BringupError when nobody answers.
    """

    def __init__(self, address: str) -> None:
        check_address(address)
        security = Security(require_encryption=True) if address.startswith("tls:") else None
        try:
            self._client = Client(address, security=security, timeout=CONNECT_LIMIT_S, set_as_default=False)
        except (OSError, TimeoutError, TypeError, ValueError, AssertionError) as error:
            # Dask asserts, without a word, that its loop began within ten seconds.
            named = "its certificates are those that distributed.comm.tls in Dask's configuration names"
            raise BringupError(
                f"the scheduler at {address} cannot be used",
                why=str(error) or "Dask could not begin here: this machine is overloaded",
                hint=named if security is not None else None,
            ) from error
        self._lines: queue.Queue[Line] = queue.Queue()
        self._shards: dict[int, _Shard] = {}
        self._lock = threading.Lock()

    def start(self, part: int, shard: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Start one shard on whichever worker is free."""
        own = _Shard({**shard, "inventory": parcel(shard)}, environment)
        with self._lock:
            self._shards[part] = own
            self._submit(part, own)

    def lines(self) -> Iterator[Line]:
        """Yield lines until every shard has ended; shards of lost workers are given to others."""
        while any(not shard.has_ended for shard in self._shards.values()):
            try:
                line = self._lines.get(timeout=_LOOK_S)
            except queue.Empty:
                self._look_for_lost()
                continue
            yield line

    def stop(self) -> None:
        """End what still runs: a shard whose client is gone is cancelled, and its worker process with it."""
        with self._lock:
            for shard in self._shards.values():
                if not shard.has_ended and shard.future is not None:
                    shard.future.cancel(force=True)
        self._client.close()

    # ------------------------------------------------------------ one attempt

    def _submit(self, part: int, shard: _Shard) -> None:
        shard.attempt += 1
        shard.topic = f"bringup-{uuid.uuid4().hex}"
        shard.worker, shard.worker_seen_s = None, time.monotonic()
        topic = shard.topic
        Queue(topic, client=self._client).put("ticket")
        self._client.subscribe_topic(topic, lambda event: self._heard(part, topic, event[1]))
        shard.future = self._client.submit(
            run_shard, shard.document, dict(shard.environment), topic, key=topic, pure=False, retries=0
        )

    def _heard(self, part: int, topic: str, said: Mapping[str, Any]) -> None:
        shard = self._shards[part]
        if topic != shard.topic or shard.has_ended:
            return  # an attempt that was given up already
        if "begun" in said:
            shard.worker = said["begun"]
        elif "end" in said:
            shard.has_ended = True
            self._lines.put(Line(part, None, said["end"], said["said"]))
        else:
            self._pass_on(part, shard, said["line"])

    def _pass_on(self, part: int, shard: _Shard, line: str) -> None:
        if line.startswith('{"shard"'):
            # The engine heard of this shard already when it is tried again.
            is_first, hosts = shard.announced is None, json.loads(line)["shard"]["hosts"]
            if is_first:
                shard.announced = tuple(hosts)
                self._lines.put(Line(part, line))
            return
        event = json.loads(line)
        if event.get("event") == "host_done":
            shard.done.add(event["host"])
        self._lines.put(Line(part, line))

    # ------------------------------------------------------------ lost workers

    def _look_for_lost(self) -> None:
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        now_s = time.monotonic()
        with self._lock:
            for part, shard in self._shards.items():
                if shard.has_ended:
                    continue
                if workers:
                    shard.worker_seen_s = now_s
                is_lost = shard.worker is not None and shard.worker not in workers
                if is_lost or shard.future.status in ("error", "lost"):
                    self._again(part, shard)
                elif not workers and now_s - shard.worker_seen_s > NO_WORKER_LIMIT_S:
                    self._give_up(part, shard, "no worker is connected to the scheduler")

    def _again(self, part: int, shard: _Shard) -> None:
        error = shard.future.exception(timeout=1) if shard.future.status == "error" else None
        if error is not None and not isinstance(error, TicketTaken) and type(error).__name__ != "KilledWorker":
            self._give_up(part, shard, f"the worker could not begin: {type(error).__name__}: {error}")
            return
        shard.future.cancel(force=True)
        if shard.attempt >= ATTEMPTS:
            self._give_up(part, shard, f"its worker was lost {shard.attempt} times")
            return
        if shard.announced is not None:
            left = [host for host in shard.announced if host not in shard.done]
            if not left:
                shard.has_ended = True
                self._lines.put(Line(part, None, 0))
                return
            shard.document |= {"limit": left, "exclude": [], "part": 0, "parts": 1}
        overrides = {**shard.document["overrides"], "lock_wait_s": LOCK_WAIT_S}
        shard.document = {**shard.document, "overrides": overrides}
        self._submit(part, shard)

    def _give_up(self, part: int, shard: _Shard, why: str) -> None:
        shard.has_ended = True
        shard.future.cancel(force=True)
        self._lines.put(Line(part, None, 1, why))


# ---------------------------------------------------------------- what travels, and the other end


def parcel(shard: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inventory with what stands beside it, and the stack and lock that the command line names.

    Raises InputError when one of them cannot be read.
    """
    inventory = Path(shard["inventory"])
    beside = [*inventory.parent.glob("group_data/*.py"), *inventory.parent.glob("stacks/**/*.*")]
    files = {path.relative_to(inventory.parent).as_posix(): path for path in (inventory, *beside) if path.is_file()}
    named = _named(shard["overrides"], files)
    try:
        content = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except OSError as error:
        raise InputError(f"{error.filename} cannot be read", why=error.strerror) from None
    return {"name": inventory.name, "files": content, "named": named}


def _named(overrides: Mapping[str, Any], files: dict[str, Path]) -> dict[str, str]:
    """Add what the command line names, and what that names, and return under which name each key finds it."""
    named = {}
    stack, lock = (Path(overrides.get(key) or "") for key in ("stack", "lock"))
    if stack.suffix == ".toml":
        named["stack"] = f"named/{stack.name}"
        files[named["stack"]] = stack
        beside = lock_path_of(stack)
        if not overrides.get("lock") and beside.is_file():
            files[f"named/{beside.name}"] = beside
        for patch in load_stack(stack).python.patches:
            if ".." in Path(patch.diff).parts or Path(patch.diff).is_absolute():
                raise InputError(
                    f"{stack}: the patch {patch.diff} cannot travel to another machine", hint="put it beside the stack"
                )
            files[f"named/{patch.diff}"] = stack.parent / patch.diff
    if overrides.get("lock"):
        named["lock"] = "named/locks" if lock.is_dir() else f"named/locks/{lock.name}"
        for path in filter(is_lock, lock.iterdir()) if lock.is_dir() else (lock,):
            files[f"named/locks/{path.name}"] = path
    return named


class TicketTaken(Exception):
    """The scheduler began an attempt again by itself."""


def run_shard(document: Mapping[str, Any], environment: Mapping[str, str], topic: str) -> None:
    """Run one shard on a Dask worker and tell its lines under a topic. Raises TicketTaken when it was begun before."""
    worker = get_worker()
    try:
        Queue(topic, client=get_client()).get(timeout=5)
    except TimeoutError:
        raise TicketTaken(topic) from None
    worker.log_event(topic, {"begun": worker.address})
    with tempfile.TemporaryDirectory(prefix="bringup-shard-") as directory:
        shard = unpacked(document, Path(directory))
        process = subprocess.Popen(
            [sys.executable, "-m", "bringup.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=_end_with_parent,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps(shard))
        process.stdin.close()
        said: list[str] = []
        reader = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
        reader.start()
        threading.Thread(target=_end_when_unwanted, args=(worker, topic, process), daemon=True).start()
        with process:
            for line in process.stdout:
                worker.log_event(topic, {"line": line})
        reader.join(timeout=5)
        worker.log_event(topic, {"end": process.returncode, "said": "".join(said[-40:]).strip()})


def unpacked(document: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Write a parcel into a private directory and return the shard that reads it there."""
    inventory = document["inventory"]
    for name, content in inventory["files"].items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    named = {key: str(directory / name) for key, name in inventory["named"].items()}
    return {
        **document,
        "inventory": str(directory / inventory["name"]),
        "overrides": {**document["overrides"], **named},
    }


def _end_when_unwanted(worker: Any, topic: str, process: subprocess.Popen[str]) -> None:
    # Dask cannot interrupt a task, neither one that is cancelled nor one whose client died; both end it here.
    while process.poll() is None:
        task = worker.state.tasks.get(topic)
        if task is None or task.state not in ("executing", "long-running"):
            process.kill()
        time.sleep(0.5)


def _end_with_parent() -> None:
    # A worker that is killed takes its shard along: the hosts see their connections close and let go.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
