"""Run one shard of hosts in this process through pyinfra, and write what happens as events to stdout.

``python -m bringup.worker`` reads a Shard as JSON from stdin. It runs the same ``deploy.py`` that plain pyinfra
runs, but looks first and leaves hosts alone that are as wanted; prepares hosts in parallel; keeps one host's
failure away from the others; and closes its connections.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal, cast

import gevent
import pyinfra
import pyinfra_cli  # noqa: F401 (patches the standard library for gevent; must come before anything that blocks)
from pydantic import BaseModel, ConfigDict, Field
from pyinfra.api import BaseStateCallback, Config, Host, Inventory, State
from pyinfra.api.connect import connect_all
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.operations import run_ops
from pyinfra.api.state import StateStage
from pyinfra.context import ctx_config, ctx_host, ctx_inventory, ctx_state
from pyinfra_cli.inventory import make_inventory
from pyinfra_cli.util import exec_file

from bringup import drift, facts, paths, ssh
from bringup.errors import BringupError, InputError
from bringup.finding import Finding
from bringup.findings import all_findings, change
from bringup.host_state import HostState, Unknown
from bringup.report import events
from bringup.report.masking import Masker
from bringup.report.results import (
    AcrossResult,
    BackendResult,
    DifferenceResult,
    EnvironmentResult,
    FindingResult,
    HostStatus,
    PinResult,
    StackRef,
    StepStatus,
    VerificationResult,
)
from bringup.secret import secrets_in
from bringup.stack import Stack
from bringup.wanted import Site, simulated

Command = Literal["plan", "apply", "verify", "drift", "rollback", "describe"]

HOSTS_PER_WORKER = 50
"""One process's controller CPU is single-threaded; 50 hosts keep it busy without starving it."""

BOOKKEEPING = "lock"
"""The deploy whose operations are no changes: taking the run lock and giving it back."""

MEASURING = "verify"
"""The deploy that proves a host; it counts no changes."""

_PACKED = re.compile(r"[A-Za-z0-9+/=]{200,}")
_SHOWN_CHARACTERS = 1000


class Shard(BaseModel):
    """Some hosts of an inventory and what to do with them.

    ``overrides`` are ``bringup_*`` data keys, without their prefix, that the command line sets for all of them.
    The hosts are those that ``limit`` names (all when empty) and ``exclude`` does not; this process takes every
    ``parts``-th of them from number ``part`` on. ``parts`` None: one part per 50 hosts, at most one per core.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: Command
    inventory: str
    limit: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    part: int = 0
    parts: int | None = None
    overrides: Mapping[str, Any] = Field(default_factory=dict)
    parallel: int = 50
    connect_timeout_s: int = 10
    verbosity: int = 0


@dataclass
class _Told:
    """What has been said about one host so far."""

    started_s: float
    step: str | None = None
    step_started_s: float = 0.0
    step_ops: list[str] = field(default_factory=list)
    changes: int = 0
    findings: list[Finding] = field(default_factory=list)
    failed_op: str | None = None
    problem: str | None = None
    is_slow: bool = False


class Worker:
    """Carry out one shard. ``say`` receives every line for the engine."""

    def __init__(self, shard: Shard, say: Callable[[str], None]) -> None:
        self.shard = shard
        self._say = say
        self._errors: dict[str, str] = {}
        self._told: dict[str, _Told] = {}
        self._judged: dict[str, tuple[HostState, drift.Judgement]] = {}
        self._secrets = set(secrets_in(os.environ))
        self.masker = Masker(self._secrets)
        self.state = State(check_for_changes=True)

    # ------------------------------------------------------------ events

    def _write(self, event: events.Event) -> None:
        self._say(json.dumps(self.masker.value(json.loads(event.as_line())), separators=(",", ":")))

    def _learn(self, hosts: list[Host]) -> None:
        """Learn the secrets in the data of these hosts and behind the references of their stacks."""
        for host in hosts:
            self._secrets.update(secrets_in(host.data.dict()))
        self.masker = Masker(self._secrets)
        references: set[str | None] = set()
        for host in hosts:
            try:
                references.update(index.credentials for index in facts.wanted(host).python.indexes)
            except BringupError:
                continue  # the host says so itself when its turn comes
        self._secrets.update(map(password, filter(None, references)))
        self.masker = Masker(self._secrets)

    def _common(self, host: str) -> dict[str, Any]:
        return {"time_s": round(time.time(), 3), "run": facts.run_id(), "host": host}

    def told(self, host: str, kind: str, content: Mapping[str, Any]) -> None:
        """Turn what a task tells about a host into an event."""
        about = self._told[host]
        match kind:
            case "finding":
                finding = FindingResult.model_validate(content)
                known = Finding(**finding.model_dump())
                if known not in about.findings:
                    about.findings.append(known)
                    self._write(events.FindingSeen(**self._common(host), finding=finding))
            case "measurement":
                taken = BackendResult.model_validate(content)
                about.is_slow |= taken.verdict == "fail"
                self._write(events.MeasurementTaken(**self._common(host), measurement=taken))
            case "across":
                self._write(events.AcrossMeasured(**self._common(host), across=AcrossResult.model_validate(content)))
            case "command":
                sent = shown(str(content["command"]))
                self._write(events.CommandStarted(**self._common(host), number=content["number"], command=sent))
            case _:
                pass

    def step_begins(self, host: Host, op_hash: str) -> None:
        """Notice that an operation starts; a new deploy name is a new step."""
        about = self._told[host.name]
        name = step_of(self.state, op_hash)
        if about.step != name:
            self.step_ends(host)
            about.step, about.step_started_s, about.step_ops = name, time.time(), []
            if name != BOOKKEEPING:
                self._write(events.StepStarted(**self._common(host.name), step=name))
        about.step_ops.append(op_hash)

    def step_ends(self, host: Host, status: StepStatus | None = None) -> None:
        """Close the running step of a host, counting the operations that executed commands."""
        about = self._told[host.name]
        if about.step is None:
            return
        changes = 0
        for op_hash in about.step_ops:
            meta = self.state.ops[host][op_hash].operation_meta
            if meta.is_complete() and meta.did_change():
                changes += 1
            if meta.is_complete() and meta.did_error():
                status, about.failed_op = "failed", op_hash
        if about.step == MEASURING and changes:
            # A proof writes its record and changes nothing that serves.
            changes, status = 0, status or "measured"
        if about.step != BOOKKEEPING:
            about.changes += changes
            self._write(
                events.StepDone(
                    **self._common(host.name),
                    step=about.step,
                    status=status or ("changed" if changes else "unchanged"),
                    seconds=round(time.time() - about.step_started_s, 3),
                    changes=changes,
                )
            )
        about.step = None

    # ------------------------------------------------------------ the run

    def run(self) -> None:
        """Do what the shard asks; every host ends with one ``host_done`` event.

        Raises InputError when the inventory cannot be used.
        """
        inventory = self._open()
        facts.listen(self.told)
        hosts = [host for host in inventory if self.state.is_host_in_limit(host)]
        for host in hosts:
            self._told[host.name] = _Told(time.time())
            facts.tell_commands_of(host)
        if not hosts:
            return
        try:
            self._connect(hosts)
            alive = [host for host in hosts if host in self.state.active_hosts]
            self._each(alive, self._assess)
            acting = [host for host in alive if self._must_act(host)]
            if acting:
                self._deploy(acting)
            for host in hosts:
                self._finish(host, has_acted=host in acting)
        finally:
            close(hosts)

    def _open(self) -> Inventory:
        pyinfra.is_cli = True
        root = str(paths.root())
        self.state.cwd = root
        ctx_state.set(self.state)
        config = Config(
            PARALLEL=self.shard.parallel,
            CONNECT_TIMEOUT=self.shard.connect_timeout_s,
            FAIL_PERCENT=100,
        )
        ctx_config.set(config)
        overrides = {f"bringup_{key}": value for key, value in self.shard.overrides.items()}
        inventory = open_inventory(self.shard.inventory, overrides)
        ctx_inventory.set(inventory)
        chosen = choose(inventory, self.shard.limit, self.shard.exclude)
        parts = self.shard.parts or max(1, min(os.cpu_count() or 1, -(-len(chosen) // HOSTS_PER_WORKER)))
        limit = chosen[self.shard.part :: parts]
        self._learn(limit)
        if self.shard.command == "describe":
            self._say(json.dumps({"inventory": [described(host) for host in chosen]}))
            limit = []
        else:
            self._announce(chosen, limit, parts)
        self.state.init(inventory, config, initial_limit=limit)
        self.state.add_callback_handler(_Callbacks(self))
        return inventory

    def _announce(self, chosen: list[Host], mine: list[Host], parts: int) -> None:
        # Not an event: it tells the engine what to start and what is lost when this process dies.
        stack = facts.wanted(chosen[0])
        shard = {
            "hosts": [host.name for host in mine],
            "all_hosts": [host.name for host in chosen],
            "parts": parts,
            "stack": {"name": stack.name, "digest": stack.digest},
        }
        self._say(json.dumps({"shard": shard}))

    def _connect(self, hosts: list[Host]) -> None:
        started = time.time()
        self.state.set_stage(StateStage.Connect)
        try:
            connect_all(self.state)
        except PyinfraError:
            pass  # every host failed to connect: each says so itself
        for host in hosts:
            if host in self.state.active_hosts:
                seconds = round(time.time() - started, 3)
                self._write(events.HostConnected(**self._common(host.name), seconds=seconds))

    def _each(self, hosts: list[Host], work: Callable[[Host], None]) -> None:
        def one(host: Host) -> None:
            with bound(ctx_config, self.state.config.copy()), bound(ctx_host, host):
                try:
                    work(host)
                except BringupError as error:
                    self._told[host.name].problem = str(error)
                except Exception as error:  # one host's trouble, whatever it is, stays with that host
                    self._told[host.name].problem = described_error(error)

        gevent.joinall([self.state.pool.spawn(one, host) for host in hosts], raise_error=True)

    def _assess(self, host: Host) -> None:
        state = facts.observed(host)
        if state is None:
            return
        stack = facts.wanted(host)
        for found in self._judge(host, state).differences:
            difference = DifferenceResult(path=found.path, wanted=found.wanted, found=found.found)
            self._write(events.DifferenceSeen(**self._common(host.name), difference=difference))
        for finding in all_findings(
            stack, state, now_s=time.time(), site=facts.site(host), settings=facts.settings(host)
        ):
            self.told(host.name, "finding", finding.as_json())
        disturbance = change.disturbance(stack, state) if self.shard.command == "plan" else None
        if disturbance is not None:
            self.told(host.name, "finding", disturbance.as_json())

    def _judge(self, host: Host, state: HostState) -> drift.Judgement:
        """Return the judgement on what the last probe saw; the same answer is judged once."""
        known = self._judged.get(host.name)
        if known is None or known[0] is not state:
            known = self._judged[host.name] = state, drift.judge(facts.wanted(host), state, facts.site(host))
        return known[1]

    def _must_act(self, host: Host) -> bool:
        state = None if self._told[host.name].problem else facts.observed(host)
        if state is None:
            return False
        match self.shard.command:
            case "plan" | "drift":
                return False
            case "verify" | "rollback":
                return True
        chosen = facts.settings(host)
        judged = self._judge(host, state)
        if chosen.force or chosen.deep or judged.differences:
            return True
        is_stale = drift.verification_state(facts.wanted(host), state, facts.site(host), judged=judged) == "stale"
        return is_stale and not drift.gpus_in_use(state)

    def _deploy(self, hosts: list[Host]) -> None:
        for host in list(self.state.active_hosts):
            if host not in hosts:
                self.state.active_hosts.discard(host)
        is_across = bool(self.shard.overrides.get("across"))
        file = entry_file(self.shard.command, is_across=is_across)
        self.state.set_stage(StateStage.Prepare)
        self.state.current_deploy_filename = str(file)
        self._each(hosts, lambda _: exec_file(str(file)))
        broken = {host for host in hosts if self._told[host.name].problem}
        if broken:
            try:
                self.state.fail_hosts(broken)
            except PyinfraError:
                return  # no host is left to act on; each has its problem told
        self.state.set_stage(StateStage.Execute)
        try:
            # Across hosts each operation waits for all of them: nobody starts before everybody holds its lock.
            run_ops(self.state, no_wait=not is_across)
        except PyinfraError:
            return  # no host is left to act on; each says so itself

    # ------------------------------------------------------------ the end

    def _finish(self, host: Host, *, has_acted: bool) -> None:
        about = self._told[host.name]
        self.step_ends(host)
        reached = host in self.state.activated_hosts
        state = None
        if reached:
            with bound(ctx_host, host):
                state = facts.observed(host)
        status, why = self._verdict(host, about, state_known=state is not None, has_acted=has_acted)
        extra: dict[str, Any] = {}
        if state is not None:
            extra = recorded(facts.wanted(host), state, facts.site(host), self._judge(host, state))
        self._write(
            events.HostDone(
                **self._common(host.name),
                status=status,
                why=why,
                changes=about.changes,
                seconds=round(time.time() - about.started_s, 3),
                **extra,
            )
        )

    def _verdict(
        self, host: Host, about: _Told, *, state_known: bool, has_acted: bool
    ) -> tuple[HostStatus, str | None]:
        refusals = [finding for finding in about.findings if finding.is_refusal]
        if about.failed_op is not None and about.is_slow:
            return "slow", refusals[0].cause if refusals else None
        if about.failed_op is not None and refusals:
            return "refused", refusals[0].cause
        if about.failed_op is not None:
            return "failed", self._said(host, about.failed_op)
        if about.problem:
            return "failed", about.problem
        if has_acted and (left := self._left_undone(host)):
            return "failed", f"the run ended before: {left}"
        if not state_known:
            return "unknown", facts.why_unknown(host) if host in self.state.activated_hosts else (
                "cannot connect over ssh" + (f": {self._errors[host.name]}" if host.name in self._errors else "")
            )
        with bound(ctx_host, host):
            state = facts.observed(host)
        if state is None:
            return "unknown", facts.why_unknown(host)
        judged = self._judge(host, state)
        if about.is_slow:
            return "slow", refusals[0].cause if refusals else None
        if self.shard.command in ("plan", "apply") and refusals and not has_acted:
            return "refused", refusals[0].cause
        if judged.unknowns:
            return "unknown", judged.unknowns[0]
        if judged.differences and self.shard.command != "rollback":
            return "drift", None
        return "ok", None

    def _left_undone(self, host: Host) -> str | None:
        for op_hash in self.state.get_op_order():
            data = self.state.ops[host].get(op_hash)
            if data is not None and not data.operation_meta.is_complete():
                return ", ".join(self.state.get_op_meta(op_hash).names)
        return None

    def _said(self, host: Host, op_hash: str) -> str:
        meta = self.state.ops[host][op_hash].operation_meta
        name = ", ".join(self.state.get_op_meta(op_hash).names)
        return f"{name}: {change.last_words((*meta.stdout_lines, *meta.stderr_lines))}"


class _Callbacks(BaseStateCallback):
    """Follow pyinfra's run; an exception in here would abort it, so only the worker's bookkeeping happens."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def operation_host_start(self, state: State, host: Host, op_hash: str) -> None:  # type: ignore[override]
        del state
        self.worker.step_begins(host, op_hash)

    def host_connect_error(self, state: State, host: Host, error: Exception) -> None:  # type: ignore[override]
        del state
        self.worker._errors[host.name] = str(error)


def recorded(stack: Stack, state: HostState, site: Site, judged: drift.Judgement | None = None) -> dict[str, Any]:
    """Return what a host records about itself, for its ``host_done`` event; what is unknown is left out."""
    verification = VerificationResult.model_validate(drift.verification(stack, state, site, judged=judged))
    record: dict[str, Any] = {"verification": verification}
    record["simulated"] = simulated(stack, state)
    if state.pin is not None and not isinstance(state.pin, Unknown):
        record["pin"] = PinResult.model_validate(state.pin)
    if state.assigned is not None and not isinstance(state.assigned, Unknown):
        record["assigned"] = StackRef(name=state.assigned.name, digest=state.assigned.digest)
    serving = None if isinstance(state.environment, Unknown) else state.environment.serving
    if serving is not None and serving.digest is not None:
        record["environment"] = EnvironmentResult(
            digest=serving.digest, generation=serving.generation or 0, tainted=serving.is_tainted
        )
    return record


def password(reference: str) -> str:
    """Return the password behind a stack's reference; nothing when it leads nowhere, as whoever needs it will say."""
    # Imported here: a converged host's run does not need it.
    from bringup.package_index import credentials

    try:
        return (credentials(reference) or ("", ""))[1]
    except InputError:
        return ""


@lru_cache(maxsize=8)
def shown(command: str) -> str:
    """Return a command as an event tells it: without secrets, packed scripts and the end of long arguments."""
    text = _PACKED.sub(lambda found: f"({len(found[0])} characters)", Masker().text(command))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def step_of(state: State, op_hash: str) -> str:
    """Return the step that an operation belongs to: the name of its deploy, in lower case."""
    name = next(iter(state.get_op_meta(op_hash).names), "")
    return name.split(" | ")[0].lower() if " | " in name else "other"


def entry_file(command: Command, *, is_across: bool = False) -> Path:
    """Return the file that pyinfra runs for a command."""
    if command != "rollback" and not is_across:
        return paths.deploy_file()
    spec = importlib.util.find_spec("tasks.rollback" if command == "rollback" else "tasks.verify_across")
    if spec is None or spec.origin is None:
        raise InputError("the package tasks is not installed", hint="install bringup again")
    return Path(spec.origin)


def described(host: Host) -> dict[str, Any]:
    """Return what other parts of bringup need to know of a host without connecting to it."""
    stack = facts.wanted(host)
    return {
        "name": host.name,
        "groups": list(dict.fromkeys(host.groups)),
        "stack": {"name": stack.name, "digest": stack.digest},
        "ssh": {
            "hostname": host.data.get("ssh_hostname") or host.name,
            "port": int(host.data.get("ssh_port") or 22),
            "known_hosts": str(host.data.get("ssh_known_hosts_file") or Path("~/.ssh/known_hosts").expanduser()),
            "is_local": host.name.startswith("@"),
        },
        "rack": host.data.get("rack"),
        "drain": host.data.get("bringup_drain"),
        "undrain": host.data.get("bringup_undrain"),
        # So that the controller can mask them too: it runs the hooks of a rollout.
        "secrets": sorted(set(secrets_in(host.data.dict()))),
    }


def choose(inventory: Inventory, limit: tuple[str, ...], exclude: tuple[str, ...]) -> list[Host]:
    """Return the hosts that ``limit`` names and ``exclude`` does not, in the inventory's order.

    Both take names, groups and glob patterns. Raises InputError for one that matches no host, and when no host
    is left.
    """
    hosts = list(inventory)
    names_of: dict[str, set[str]] = {}
    for host in hosts:
        for word in (host.name, *host.groups):
            names_of.setdefault(word, set()).add(host.name)

    def named(pattern: str) -> set[str]:
        # A rollout names its hosts one by one, and there may be thousands of them.
        is_plain = not any(character in pattern for character in "*?[")
        matching = () if is_plain else (host.name for host in hosts if fnmatchcase(host.name, pattern))
        found = names_of.get(pattern, set()).union(matching)
        if not found:
            raise InputError(
                f"{pattern!r} matches no host of the inventory",
                hint=f"its hosts are {', '.join(host.name for host in hosts[:20])}",
            )
        return found

    kept = set().union(*(named(pattern) for pattern in limit)) if limit else {host.name for host in hosts}
    kept -= set().union(*(named(pattern) for pattern in exclude))
    chosen = [host for host in hosts if host.name in kept]
    if not chosen:
        raise InputError("no host is left to work on", hint="look at the inventory, --limit and --exclude")
    return chosen


def open_inventory(name: str, overrides: Mapping[str, Any]) -> Inventory:
    """Return an inventory with safe defaults for what it leaves open: strict host keys, no delays on the wire.

    Raises InputError when there is no such inventory, or when its code fails.
    """
    if not Path(name).is_file():
        raise InputError(f"there is no inventory {name}", hint="name a file such as inventory/lab.py")
    try:
        inventory = make_inventory(name, override_data=dict(overrides), cwd=None)
    except Exception as error:  # an inventory is a person's Python: anything can come out of it
        inner = unwrapped(error)
        if isinstance(inner, BringupError):
            raise inner from None
        raise InputError(f"{name}: cannot be used", why=described_error(error)) from None
    for host in inventory:
        for key, value in ssh.defaults().items():
            if host.data.get(key) is None:
                host.host_data[key] = value
    return cast(Inventory, inventory)


def unwrapped(error: BaseException) -> BaseException:
    """Return what a file raised: pyinfra wraps it in an exception whose own text cannot be printed."""
    inner = getattr(error, "exception", None)
    return inner if isinstance(inner, BaseException) else error


def described_error(error: BaseException) -> str:
    """Return an exception in a line, whatever pyinfra wrapped it in."""
    inner = unwrapped(error)
    return str(inner) if isinstance(inner, BringupError) else f"{type(inner).__name__}: {inner}"


@contextmanager
def bound(manager: Any, value: Any) -> Iterator[None]:
    """Bind a pyinfra context for a block; pyinfra's own ``use`` leaks it when the block raises."""
    old = manager.get() if manager.isset() else None
    manager.set(value)
    try:
        yield
    finally:
        manager.set(old)


def close(hosts: list[Host]) -> None:
    """Close the connections; pyinfra's ``disconnect`` leaves them open."""
    for host in hosts:
        client = getattr(host.connector, "client", None)
        if client is not None:
            client.close()


def main(stdin: IO[str] = sys.stdin, stdout: IO[str] = sys.stdout) -> int:
    """Read a shard, run it, and return 0, or 2 when it could not be begun."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what a Ctrl-C means
    shard = Shard.model_validate(json.load(stdin))

    def say(line: str) -> None:
        try:
            stdout.write(line + "\n")
            stdout.flush()
        except BrokenPipeError:
            # The engine is gone, and with it whoever wanted this run. Hosts see their connections close, as they
            # do when this process is killed, and put back what must be put back.
            os._exit(1)

    worker = Worker(shard, say)
    with redirect_stderr(_Masked(sys.stderr, worker)):
        level = {0: logging.CRITICAL, 1: logging.INFO}.get(shard.verbosity, logging.DEBUG)
        logging.basicConfig(stream=sys.stderr, level=level, format="%(message)s")
        try:
            worker.run()
        except BringupError as error:
            print(str(error), file=sys.stderr)
            return error.exit_code
    return 0


class _Masked(io.TextIOBase):
    """Standard error without secrets: what libraries log there is not ours to choose."""

    def __init__(self, inner: IO[str], worker: Worker) -> None:
        self._inner = inner
        self._worker = worker

    def write(self, text: str) -> int:
        self._inner.write(self._worker.masker.message(text))
        return len(text)

    def flush(self) -> None:
        self._inner.flush()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Threads of closed connections may still be winding down; nothing is left to wait for.
    os._exit(status)
