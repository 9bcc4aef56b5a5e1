"""Take the host's run lock before anything is changed, and give it back: the only mutual exclusion on a host."""

from __future__ import annotations

import json
import os
import socket
from datetime import UTC, datetime
from getpass import getuser
from typing import Any
from weakref import WeakKeyDictionary

import gevent
from pyinfra.api import FunctionCommand, Host, deploy, operation
from pyinfra.context import ctx_host

from bringup import drift, facts
from bringup.errors import HostError
from bringup.finding import Finding
from tasks import connection
from tasks.channel import Channel, open_channel
from tasks.run import Commands, Context, converges, install_worker, is_executing, work, worker_path

HEARTBEAT_S = 5.0
"""Well below the 30 s after which ``host_work.py`` gives the lock up."""

COME_BACK_LIMIT_S = 900.0
"""How long a run tries to reach a host that it lost; what it started there goes on meanwhile."""

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


def acquire(*, again: bool = False) -> Commands:
    """Yield the commands that take the run lock; ``again`` after a reboot."""
    yield install_worker()
    yield FunctionCommand(_hold, (), {"again": again})
    yield work("settle")


def _hold(*, again: bool = False) -> None:
    """Take the run lock; raise HostError when it is not to be had, the reason told as a finding.

    ``again``: after a reboot or a lost connection, where it counts whether another run came in between.
    """
    host: Host = ctx_host.get()
    chosen = facts.settings(host)
    let_go(host)
    channel = open_channel(
        host,
        [
            "python3", worker_path(), "--run", facts.run_id(),
            "hold", "--who", chosen.who or who(), "--hold-wait-s", str(chosen.lock_wait_s),
            *(["--again"] if again else []),
        ],
    )  # fmt: skip
    said = channel.readline()
    try:
        answer = json.loads(said)
    except ValueError:
        channel.close()
        raise HostError("the run lock cannot be taken", host=host.name, why=said or "the host said nothing") from None
    if not answer["held"]:
        channel.close()
        refusal = taken(answer["holder"]) if answer["holder"].get("run") != facts.run_id() else put_back()
        facts.tell_finding(host, refusal)
        raise HostError(refusal.cause, host=host.name)
    _held[host] = (channel, gevent.spawn(_beat, channel))
    facts.invalidate(host)


def come_back(host: Host) -> bool:
    """Connect to a host whose connection was lost and take its run lock again; return whether that worked.

    Why it did not is told as a finding.
    """
    let_go(host)
    if not connection.reconnect(host, COME_BACK_LIMIT_S):
        facts.tell_finding(host, vanished(COME_BACK_LIMIT_S))
        return False
    try:
        _hold(again=True)
    except (HostError, OSError, EOFError) as error:
        host.log(f"cannot go on: {error}")
        return False
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
    who = holder.get("who") or holder.get("run") or "it does not say who"
    since_s = holder.get("since_s")
    since = (
        f", since {datetime.fromtimestamp(since_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
        if isinstance(since_s, int | float)
        else ""
    )
    return Finding(
        code="BU-SSH-003",
        severity="error",
        cause=f"another run holds this host: {who}{since}",
        remedy="wait for it and run again; the lock ends with its run, nothing has to be removed",
        evidence={key: value for key, value in holder.items() if key in ("run", "who", "since_s", "until_s")},
    )


def put_back() -> Finding:
    """Return the finding for a run whose cutover the host undid because it heard nothing any more."""
    return Finding(
        code="BU-SSH-004",
        severity="error",
        cause="the connection was lost during the cutover, and the host put the old state back",
        remedy="run bringup apply again",
    )


def vanished(limit_s: float) -> Finding:
    """Return the finding for a host that did not come back after its connection was lost."""
    return Finding(
        code="BU-SSH-005",
        severity="error",
        cause=f"the connection was lost, and the host could not be reached for {limit_s:.0f} s",
        remedy="what was started there goes on; run bringup apply again when the host answers",
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
