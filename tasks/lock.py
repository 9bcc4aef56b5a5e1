"""Take the host's run lock before anything is changed, and give it back: the only mutual exclusion on a host."""

from __future__ import annotations

import json
import os
import socket
from getpass import getuser
from typing import Any
from weakref import WeakKeyDictionary

import gevent
from pyinfra.api import FunctionCommand, Host, deploy, operation
from pyinfra.context import ctx_host

from bringup import drift, facts
from bringup.finding import Finding
from tasks.channel import Channel, open_channel
from tasks.run import Commands, Context, converges, install_worker, is_executing, work, worker_path

HEARTBEAT_S = 5.0
"""Well below the 30 s after which ``host_work.py`` gives the lock up."""

_held: WeakKeyDictionary[Host, tuple[Channel, Any]] = WeakKeyDictionary()


def who() -> str:
    """Return the person and controller that a loser of the lock is told."""
    return f"{getuser()}@{socket.gethostname()} (pid {os.getpid()})"


def _asked(context: Context) -> bool:
    chosen = context.settings
    if chosen.force or chosen.deep or chosen.unpin or chosen.rollback_reason:
        return True
    stale = drift.verification_state(context.stack, context.state) == "stale"
    return stale and not drift.gpus_in_use(context.state)


@converges("*", when=_asked)
def run_lock(context: Context) -> Commands:
    """Hold the run lock, wait for work that outlived its controller, and look at the host again."""
    del context
    yield from acquire()


def acquire() -> Commands:
    """Yield the commands that take the run lock; after a reboot they take it again."""
    yield install_worker()
    yield FunctionCommand(_hold, (), {})
    yield work("settle")


def _hold() -> bool:
    host: Host = ctx_host.get()
    chosen = facts.settings(host)
    let_go(host)
    channel = open_channel(
        host,
        [
            "python3", worker_path(), "--run", facts.RUN_ID,
            "hold", "--who", chosen.who or who(), "--hold-wait-s", str(chosen.lock_wait_s),
        ],
    )  # fmt: skip
    answer = json.loads(channel.readline() or "{}")
    if not answer.get("held"):
        facts.tell_finding(host, taken(answer.get("holder") or {}))
        channel.close()
        return False
    _held[host] = (channel, gevent.spawn(_beat, channel))
    facts.invalidate(host)
    return True


def _beat(channel: Channel) -> None:
    while True:
        gevent.sleep(HEARTBEAT_S)
        try:
            channel.write(b"\n")
        except OSError:
            return  # the connection is gone: the next command says so


def taken(holder: dict[str, Any]) -> Finding:
    """Return the finding for a host that another run holds, naming who and since when."""
    return Finding(
        code="BU-SSH-003",
        severity="error",
        cause=f"another run holds this host: {holder.get('who') or holder.get('run') or 'it does not say who'}",
        remedy="wait for it and run again; the lock ends with its run, nothing has to be removed",
        evidence={key: value for key, value in holder.items() if key in ("run", "who", "since_s", "until_s")},
    )


def let_go(host: Host) -> None:
    """End the heartbeat of a host and close its channel, saying goodbye."""
    if host not in _held:
        return
    channel, beat = _held.pop(host)
    beat.kill()
    try:
        channel.write(b"bye\n")
        channel.wait(timeout_s=10)
    except OSError:
        pass  # the holder sees the end of its stdin instead
    channel.close()


def _release() -> None:
    let_go(ctx_host.get())


@operation()
def run_unlock() -> Commands:
    """Forget how to undo what succeeded, and give the run lock back."""
    host: Host = ctx_host.get()
    if not is_executing() or host not in _held:
        host.noop("nothing was locked")
        return
    yield work("commit")
    yield FunctionCommand(_release, (), {})


@deploy("Lock")
def take() -> None:
    """Take the run lock when there is something to do."""
    run_lock(name="Take the run lock")


@deploy("Lock")
def release() -> None:
    """Give the run lock back."""
    run_unlock(name="Give the run lock back")
