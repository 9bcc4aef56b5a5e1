"""How an operation of bringup looks, decides and acts.

An operation names the differences it removes. It looks at the host when its turn comes, yields commands only
for differences that ``bringup.drift`` finds, and refuses a host that could not be read. Every command goes
through ``files/host_work.py`` on the host, which does one thing at a time and undoes the run when something
fails.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, wraps
from itertools import count
from pathlib import Path
from typing import Any

import paramiko
from pyinfra.api import FunctionCommand, Host, QuoteString, State, StringCommand, operation
from pyinfra.connectors.util import CommandOutput
from pyinfra.context import ctx_host, ctx_state
from typing_extensions import override

from bringup import drift, facts, paths
from bringup.drift import Difference
from bringup.errors import BringupError
from bringup.finding import Finding
from bringup.host_state import HostState
from bringup.stack import Stack
from tasks import connection

Command = StringCommand | FunctionCommand
Commands = Generator[Command, None, None]

WORK_WAIT_S = 1800
"""How long a command waits for work that outlived its controller before it gives up, naming that work."""


@dataclass(frozen=True)
class Context:
    """What an operation decides on: the host, what is wanted and seen, the differences it removes."""

    host: Host
    stack: Stack
    state: HostState
    settings: facts.Settings
    differences: tuple[Difference, ...]

    def difference(self, pattern: str) -> Difference | None:
        """Return the first difference whose path matches a pattern, or None."""
        return next((found for found in self.differences if fnmatchcase(found.path, pattern)), None)


def is_executing() -> bool:
    """Return whether pyinfra is past its prepare stage."""
    return bool(ctx_state.get().is_executing)


def converges(
    *patterns: str, when: Callable[[Context], bool] | None = None
) -> Callable[[Callable[[Context], Commands]], Callable[..., Any]]:
    """Make an operation that runs its body only when a difference matches one of the path patterns.

    ``when`` can ask for the body without a difference (a forced measurement). The body gets a Context and
    yields commands; what it executed makes the last probe stale. A host that cannot be read, or an exception
    in the body, fails that host alone with a finding.
    """

    def decorate(body: Callable[[Context], Commands]) -> Callable[..., Any]:
        @wraps(body)
        def run() -> Commands:
            host: Host = ctx_host.get()
            try:
                context = look(host, patterns)
            except BringupError as error:
                yield refuse(host, unreadable(str(error)))
                return
            if context is None:
                yield refuse(host, unreadable(facts.why_unknown(host)))
                return
            if not is_chosen(body.__module__, context.settings.only):
                host.noop("left out by --only")
                return
            if not context.differences and not (when and when(context)):
                host.noop("as wanted")
                return
            acted = False
            try:
                for command in body(context):
                    acted = True
                    yield command
            except BringupError as error:
                yield refuse(host, stopped(str(error)))
            except Exception as error:
                # Anything else is a fault of bringup; unhandled it would end the run for every host.
                yield refuse(host, fault(error))
            finally:
                if acted and is_executing():
                    facts.invalidate(host)

        # pyinfra binds the arguments of the wrapped signature; ours takes none.
        del run.__wrapped__
        return operation()(run)

    return decorate


def is_chosen(module: str, only: tuple[str, ...] | None) -> bool:
    """Return whether an operation of a task module belongs to the steps that were asked for.

    The package source serves the driver step, the run across hosts the proof; the lock and preflight are always taken.
    """
    step = {"tasks.apt": "driver", "tasks.across": "verify"}.get(module, module.removeprefix("tasks."))
    return only is None or step in only or step in ("lock", "preflight")


def look(host: Host, patterns: Iterable[str]) -> Context | None:
    """Return the context for some path patterns; None when the host did not answer."""
    state = facts.observed(host)
    if state is None:
        return None
    stack = facts.wanted(host)
    found = tuple(
        difference
        for difference in drift.diff(stack, state, facts.site(host))
        if any(fnmatchcase(difference.path, pattern) for pattern in patterns)
    )
    return Context(host, stack, state, facts.settings(host), found)


def unreadable(why: str) -> Finding:
    """Return the finding for a host that could not be looked at."""
    return Finding(
        code="BU-PRE-001",
        severity="error",
        cause=f"the host could not be read: {why}",
        remedy="see that it answers ssh and has python3, then run again",
    )


def stopped(why: str) -> Finding:
    """Return the finding for an operation that could not go on."""
    return Finding(
        code="BU-PRE-002",
        severity="error",
        cause=why.split("\n", 1)[0],
        remedy=why.split("hint: ", 1)[1] if "hint: " in why else "see the cause, then run again",
        evidence={"detail": why},
    )


def fault(error: Exception) -> Finding:
    """Return the finding for a fault of bringup itself."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return Finding(
        code="BU-PRE-003",
        severity="error",
        cause=f"bringup has a fault: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})",
        remedy="report it with the output of the same command and -vv; the host was put back",
    )


def refuse(host: Host, finding: Finding) -> StringCommand:
    """Return a command that undoes this run on the host, prints the finding and fails the host.

    The finding is told at once when pyinfra is executing, so that it stands in the events before the failure.
    """
    if is_executing():
        facts.tell_finding(host, finding)
    reason = f"{finding.code}: {finding.cause} | {finding.remedy}"
    script = worker_path()
    return StringCommand(
        "if", "test", "-e", script, ";", "then",
        "exec", "python3", script, "--run", facts.run_id(), "fail", QuoteString(reason), ";",
        "else", "echo", QuoteString(reason), ">&2", ";", "exit", "1", ";", "fi",
    )  # fmt: skip


# ---------------------------------------------------------------- commands for files/host_work.py


@cache
def _worker() -> tuple[str, str]:
    source = (paths.files() / "host_work.py").read_bytes()
    return f"/run/bringup/host_work-{hashlib.sha256(source).hexdigest()[:12]}.py", base64.b64encode(source).decode()


def worker_path() -> str:
    """Return where ``host_work.py`` lies on a host; its name changes with its content."""
    return _worker()[0]


def install_worker() -> StringCommand:
    """Return the command that puts ``host_work.py`` in place, readable by root only."""
    path, content = _worker()
    return StringCommand(
        "umask", "077", "&&", "mkdir", "-p", "/run/bringup", "&&", "chmod", "755", "/run/bringup", "&&",
        "echo", content, "|", "base64", "-d", ">", f"{path}.new", "&&", "mv", f"{path}.new", path,
    )  # fmt: skip


def work(
    *arguments: str | int | float, wait_s: float = WORK_WAIT_S, kind: type[StringCommand] = StringCommand
) -> StringCommand:
    """Return a command for ``host_work.py``; every argument is quoted."""
    return kind(
        "python3",
        worker_path(),
        "--run",
        facts.run_id(),
        "--wait-s",
        str(wait_s),
        *(QuoteString(str(argument)) for argument in arguments),
    )


class Detached(StringCommand):
    """A command that goes on when its connection is lost; this run comes back to it and never starts it twice."""

    @override
    def execute(self, state: State, host: Host, connector_arguments: Any) -> tuple[bool, CommandOutput]:
        """Run the command to its end, over as many connections as that takes; return (success, output)."""
        from tasks import lock  # it is built on this module

        while True:
            try:
                is_done, output = super().execute(state, host, connector_arguments)
            except (OSError, EOFError, paramiko.SSHException):
                is_done, output = False, CommandOutput([])
            if is_done or not connection.is_lost(host):
                return is_done, output
            if not lock.come_back(host):
                return False, output


_jobs = count(1)


def do(
    name: str,
    argv: Iterable[str],
    *,
    limit_s: float = 1800,
    detach: bool = False,
    environment: dict[str, str] | None = None,
) -> StringCommand:
    """Return a command that runs ``argv`` on the host under the work lock, ended after ``limit_s`` seconds.

    Detached, it goes on when the connection is lost; its log is followed and its status returned. The run comes
    back to it over a new connection.
    """
    variables = [part for key, value in (environment or {}).items() for part in ("--env", f"{key}={value}")]
    flags = ["--detach", "--job", str(next(_jobs))] if detach else []
    kind = Detached if detach else StringCommand
    return work("do", name, "--limit-s", limit_s, *flags, *variables, "--", *argv, kind=kind)


def shell(name: str, script: str, *, limit_s: float = 600, detach: bool = False) -> StringCommand:
    """Return a command that runs a fixed shell script; put values in with ``quoted`` only."""
    return do(name, ["sh", "-euc", script], limit_s=limit_s, detach=detach)


def quoted(*values: str) -> str:
    """Return values quoted for a shell script, with spaces between."""
    return shlex.join(values)


def write(path: str, content: str | bytes, *, mode: str = "0644", undo: bool = False) -> StringCommand:
    """Return a command that replaces a file by rename; ``undo`` puts the old one back if the run fails."""
    data = content.encode() if isinstance(content, str) else content
    flags = ["--undo"] if undo else []
    return work("write", path, "--mode", mode, *flags, "--content-b64", base64.b64encode(data).decode())


def remove(path: str, *, undo: bool = False) -> StringCommand:
    """Return a command that removes a file if it is there."""
    return work("remove", path, *(["--undo"] if undo else []))


def link(path: str, target: str, *, undo: bool = False) -> StringCommand:
    """Return a command that points a symbolic link at ``target`` in one step."""
    return work("link", path, target, *(["--undo"] if undo else []))


def alternative(name: str, target: str, *, undo: bool = False) -> StringCommand:
    """Return a command that sets a Debian alternative by hand."""
    return work("alternative", name, target, *(["--undo"] if undo else []))
