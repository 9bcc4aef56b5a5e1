"""Carry the probes to a host through pyinfra, and keep the last answer of each host.

pyinfra caches no fact and runs an operation's generator in prepare and again in execute. ``observed``
therefore keeps the last answer of a host until something was changed there: a converged host is probed once,
and nobody decides on an answer older than the last change.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pyinfra.api import FactBase, Host, QuoteString, StringCommand
from typing_extensions import override

from bringup import host_state, paths
from bringup.errors import BringupError, HostError, InputError
from bringup.finding import Finding
from bringup.host_state import HostState
from bringup.secret import split_login
from bringup.stack import Stack, load_stack, stack_path
from bringup.wanted import Site

_CARRIER = (
    "import base64,sys,zlib;"
    "code=zlib.decompress(base64.b64decode(sys.argv.pop(1)));"
    "exec(compile(code,'{name}.py','exec'),{{'__name__':'__main__'}})"
)
_FAILED = "bringup-script-failed:"


@cache
def run_id() -> str:
    """Return what identifies this process's run on every host; the command line sets it for its workers."""
    return os.environ.get("BRINGUP_RUN_ID") or uuid.uuid4().hex[:12]


class Across(BaseModel):
    """Which hosts ``verify --across`` measures together, the meeting point first, and the port there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hosts: tuple[str, ...]
    port: int


class Settings(BaseModel):
    """What an inventory may say about a host besides how to reach it: its data keys ``bringup_*``.

    ``lock`` None means the lock beside the stack; a directory holds one per stack. ``indexes``
    replaces index URLs by name (a site mirror); ``apt_url`` and ``apt_key`` likewise for NVIDIA's
    repository, ``apt_key`` being the path of a key file on the controller. URLs may hold user and password, which
    travel apart from them. ``drain`` and ``undrain`` are commands
    run on the controller. ``rendezvous`` is the address by which other hosts reach this one; None: its ssh address.
    ``only`` None means all steps.
    The keys from ``only`` on are options of one run; the command line sets them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stack: str
    lock: str | None = None
    reboot: Literal["never", "when_idle", "allowed"] = "never"
    repair: Literal["safe", "never"] = "safe"
    indexes: Mapping[str, str] = Field(default_factory=dict)
    apt_url: str | None = None
    apt_key: str | None = None
    apt_key_fingerprint: str | None = None
    runfiles: str | None = None
    proxy: str | None = None
    drain: str | None = None
    undrain: str | None = None
    rendezvous: str | None = None
    only: tuple[str, ...] | None = None
    force: bool = False
    deep: bool = False
    allow_downgrade: bool = False
    lock_wait_s: float = 0.0
    work_wait_s: float = 1800.0
    who: str = ""
    profile: Literal["quick", "full"] | None = None
    across: Across | None = None
    rollback_to: str | None = None
    rollback_from: str | None = None
    rollback_reason: str = ""
    unpin: bool = False


class Script(FactBase[str]):
    """Run one of ``files/*.py`` on the host from memory, without a file there, and return what it prints.

    The last line of a run that went wrong is ``bringup-script-failed: STATUS``; the fact itself never fails,
    because a failing fact drops the host before anyone could say why.
    """

    @staticmethod
    @override
    def default() -> str:
        return ""

    @override
    def command(self, script: str, arguments: tuple[str, ...] = (), python: str = "python3") -> StringCommand:
        return script_command(script, *arguments, python=python)

    @override
    def process(self, output: list[str]) -> str:
        return "\n".join(output)


def script_command(name: str, *arguments: str, python: str = "python3") -> StringCommand:
    """Return the command that runs ``files/NAME.py`` with arguments; it always ends with status 0."""
    return StringCommand(
        QuoteString(python),
        "-I",
        "-c",
        QuoteString(_CARRIER.format(name=name)),
        _packed(name),
        *(QuoteString(argument) for argument in arguments),
        "||",
        "echo",
        QuoteString(_FAILED),
        "$?",
    )


@cache
def _packed(name: str) -> str:
    source = (paths.files() / f"{name}.py").read_bytes()
    return base64.b64encode(zlib.compress(source, 9)).decode()


def answer(output: str) -> str:
    """Return the JSON line that a probe printed last.

    Raises HostError with what the host said instead, when it did not answer.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if not last.startswith("{"):
        said = "; ".join(lines[-3:]) if lines else "no output"
        if last == f"{_FAILED} 127":
            said = "python3: command not found (exit 127)"
        raise HostError("the script did not answer", why=said, hint="python3 must be installed on the host")
    return last


class _Kept:
    """What is remembered about one host within this process."""

    def __init__(self) -> None:
        self.state: HostState | None = None
        self.why: str = ""
        self.is_fresh = False
        self.settings: Settings | None = None
        self.probes = 0
        self.commands = 0


_kept: WeakKeyDictionary[Host, _Kept] = WeakKeyDictionary()
_listeners: list[Callable[[str, str, Mapping[str, Any]], None]] = []


def _of(host: Host) -> _Kept:
    return _kept.setdefault(host, _Kept())


def observed(host: Host) -> HostState | None:
    """Return what the last probe saw, asking the host only when nothing was asked since the last change.

    None means that the probe did not answer; ``why_unknown`` says what it said instead.
    """
    kept = _of(host)
    if not kept.is_fresh:
        kept.state, kept.why = _probe(host)
        kept.is_fresh = True
        kept.probes += 1
    return kept.state


def _probe(host: Host) -> tuple[HostState | None, str]:
    started = time.monotonic()
    try:
        stack = wanted(host)
        parameters = host_state.probe_parameters(stack, deep=settings(host).deep)
        output = host.get_fact(Script, "host_probe", (json.dumps(parameters, separators=(",", ":")),))
        state = host_state.parse(answer(output), host=host.name, received_at_s=time.time())
    except InputError:
        raise
    except BringupError as error:
        return None, "; ".join(part for part in (error.what, error.why) if part)
    except Exception as error:
        # Whatever a connection can throw means the same thing here: we could not look.
        return None, f"{type(error).__name__}: {error}"
    tell(host, "probed", {"seconds": round(time.monotonic() - started, 3)})
    return state, ""


def why_unknown(host: Host) -> str:
    """Return why ``observed`` is None, in a line."""
    return _of(host).why or "the host was not asked yet"


def invalidate(host: Host) -> None:
    """Forget the last answer: something was changed on the host."""
    _of(host).is_fresh = False


def probes(host: Host) -> int:
    """Return how often this process has probed the host."""
    return _of(host).probes


def settings(host: Host) -> Settings:
    """Return the host's ``bringup_*`` data, checked once: no data of a host changes while we are connected to it.

    Raises InputError naming the key, what was wanted and what was found.
    """
    kept = _of(host)
    if kept.settings is None:
        kept.settings = _settings(host)
    return kept.settings


def _settings(host: Host) -> Settings:
    found = {
        key.removeprefix("bringup_"): value
        for key, value in host.data.dict().items()
        if key.startswith("bringup_") and value is not None
    }
    try:
        return Settings.model_validate(found)
    except ValidationError as error:
        problems = [
            f"bringup_{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors(include_url=False)
        ]
        raise InputError(
            "the inventory says something that bringup cannot use",
            host=host.name,
            why="; ".join(problems),
            hint="see docs/reference/inventory.md",
        ) from None


def wanted(host: Host) -> Stack:
    """Return the stack of a host: ``host.data.bringup_stack``, a name that bringup ships or a path."""
    chosen = settings(host)
    return stack_named(chosen.stack, chosen.lock)


def site(host: Host) -> Site:
    """Return what a host must match that no stack can know: its repository, and the launcher we ship."""
    chosen = settings(host)
    return Site(
        repository_url=split_login(chosen.apt_url)[0] if chosen.apt_url else None,
        key_fingerprint=chosen.apt_key_fingerprint,
        launcher_sha256=_launcher_sha256(),
    )


@cache
def _launcher_sha256() -> str | None:
    launcher = paths.files() / "run"
    return hashlib.sha256(launcher.read_bytes()).hexdigest() if launcher.is_file() else None


def apt_login(host: Host) -> tuple[str, tuple[str, str]] | None:
    """Return the repository's URL with the (user, password) that the inventory has in it; None without any."""
    url, login = split_login(settings(host).apt_url or "")
    return (url, login) if login else None


@cache
def stack_named(name_or_path: str, lock: str | None = None) -> Stack:
    """Return a stack by the name of a shipped one or by path, with its lock.

    ``lock`` is a file or a directory of locks; None means the lock beside the stack.
    Raises InputError when there is no such stack.
    """
    return load_stack(stack_path(name_or_path), lock_path=Path(lock) if lock else None)


def listen(listener: Callable[[str, str, Mapping[str, Any]], None]) -> None:
    """Call ``listener(host, kind, content)`` for everything that tasks tell from now on."""
    _listeners.append(listener)


def tell(host: Host, kind: str, content: Mapping[str, Any]) -> None:
    """Tell the listeners something that happened on a host."""
    for listener in _listeners:
        listener(host.name, kind, content)


def tell_command(host: Host, command: object) -> None:
    """Tell the listeners a command that is about to be sent to a host, numbered from 1 in this process.

    Values that pyinfra was told to hide are masked, as ``str`` of a StringCommand has them.
    """
    kept = _of(host)
    kept.commands += 1
    tell(host, "command", {"number": kept.commands, "command": str(command)})


def tell_commands_of(host: Host) -> None:
    """From now on, tell every command that pyinfra sends to a host: those of operations, facts and callbacks.

    What ``tasks.channel`` streams goes past pyinfra and is told there.
    """
    inner = host.connector.run_shell_command

    def run_shell_command(command: StringCommand, *args: Any, **arguments: Any) -> Any:
        tell_command(host, command)
        return inner(command, *args, **arguments)

    host.connector.run_shell_command = run_shell_command  # type: ignore[method-assign]


def tell_finding(host: Host, finding: Finding) -> None:
    """Tell the listeners a finding; under plain pyinfra, where nobody listens, log it."""
    if not _listeners:
        host.log(f"{finding.code} {finding.severity}: {finding.cause} | {finding.remedy}")
    tell(host, "finding", finding.as_json())
