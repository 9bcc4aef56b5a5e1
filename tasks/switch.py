"""Cut over to what was proved, and go back: the few changes that a serving host can notice.

The cutover set is ``current``, ``/usr/local/cuda``, the service file and the linker entry. It changes as a
whole: every change is journalled on the host before it is made, and whatever fails, restarts included, puts all
of it back. Each completed set is kept on the host, so that a rollback knows where to go.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pyinfra.api.deploy import deploy
from pyinfra.api.host import Host

from bringup import facts, wanted
from bringup.errors import HostError
from bringup.finding import Finding
from bringup.findings import change, environment
from bringup.host_state import HostState, Unknown
from tasks import candidate
from tasks.channel import fetch, push
from tasks.drain import drain, undrain
from tasks.environment import HOME, builder
from tasks.run import (
    Command,
    Commands,
    Context,
    alternative,
    converges,
    do,
    is_executing,
    link,
    quoted,
    refuse,
    remove,
    shell,
    work,
    write,
)
from tasks.verify import RECORD, SWITCH, is_proved, looked_again, target

CURRENT = f"{HOME}/current"
CUTOVERS = "/var/lib/bringup/cutovers.json"
PIN = "/var/lib/bringup/pin.json"
ASSIGNED = "/var/lib/bringup/assigned.json"
KEPT_OLD = 2
KEPT_CUTOVERS = 20
RESTART_LIMIT_S = 1800
"""A serving unit may load a large model before it says that it is ready."""


class CutoverSet(BaseModel):
    """What one completed cutover left serving.

    ``digest`` is the stack's. ``environment`` None: the stack names an existing one, and nothing is switched.
    ``linker`` None: the stack has no linker entry. ``verification`` is the record that proved it, None for a
    cutover without one. ``at`` is a time as in RFC 3339, in UTC.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    stack: str
    digest: str
    environment: str | None
    cuda: str
    service: str | None
    linker: str | None
    restart: tuple[str, ...] = ()
    verification: dict[str, Any] | None = None
    at: str

    @property
    def content(self) -> tuple[str | None, ...]:
        """Return what makes two sets the same."""
        return (self.environment, self.cuda, self.service, self.linker)


# ---------------------------------------------------------------- what was


def completed(host: Host) -> list[CutoverSet]:
    """Return the completed cutovers of a host, the oldest first.

    Raises HostError when the host's list cannot be read.
    """
    text = fetch(host, CUTOVERS, missing="[]")
    try:
        return [CutoverSet.model_validate(entry) for entry in json.loads(text)]
    except (ValueError, ValidationError) as error:
        raise HostError(f"{CUTOVERS} cannot be used", host=host.name, why=str(error)[:300]) from None


def remembered(sets: list[CutoverSet], new: CutoverSet) -> Command:
    """Return the command that adds a completed cutover to the host's list."""
    kept = [entry.model_dump() for entry in (*sets, new)][-KEPT_CUTOVERS:]
    # Undone with the rest if the run is cut off before it is committed.
    return write(CUTOVERS, json.dumps(kept, sort_keys=True) + "\n", mode="0600", undo=True)


def now() -> str:
    """Return the time as in RFC 3339, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def asked_for(context: Context) -> CutoverSet:
    """Return the set that the stack asks for on this host."""
    stack, state = context.stack, context.state
    entry = candidate.candidate(stack, state)
    is_built = stack.python.existing is None
    machine = None if isinstance(state.os, Unknown) else state.os.machine
    record = state.verification
    proof = None if record is None or isinstance(record, Unknown) else record.model_dump(mode="json", by_alias=True)
    return CutoverSet(
        stack=stack.name,
        digest=stack.digest,
        environment=candidate.path(entry) if entry is not None and is_built else None,
        cuda=wanted.toolkit_directory(stack.cuda.default),
        service=wanted.service_text(stack) if is_built else None,
        linker=wanted.linker_text(stack, machine) if stack.linker and machine else None,
        restart=tuple(stack.service.restart),
        verification=proof,
        at=now(),
    )


# ---------------------------------------------------------------- cutover


@converges(*SWITCH)
def cutover(context: Context) -> Commands:
    """Point link, service file and ``current`` at what was proved, restart the units, keep the set."""
    host = context.host
    new = asked_for(context)
    moves = any(fnmatchcase(found.path, p) for found in context.differences for p in SWITCH[2:])
    yield work("settle")
    if not is_executing():
        return
    problem = not_ready(context, new) if moves else None
    problem = problem or drain(host)
    if problem is not None:
        yield refuse(host, problem)
        return
    try:
        context = looked_again(context)
        busy = change.in_use(without_units(context.state, new.restart), "a cutover")
        if busy is not None:
            yield refuse(host, busy)
            return
        sets = completed(host)
        yield from applied(context, new)
        yield remembered(sets, new)
        assigned = {"name": context.stack.name, "digest": context.stack.digest}
        yield write(ASSIGNED, json.dumps(assigned, sort_keys=True) + "\n")
        yield work("commit")
        yield from tidied(context, sets, new)
    finally:
        back_in_service(host)


def back_in_service(host: Host) -> None:
    """Run the undrain command, unless the host no longer answers: nobody knows then what would serve."""
    try:
        is_there, _ = host.run_shell_command("true")
    except Exception:
        # Whatever a connection can throw means the same: the host is gone.
        is_there = False
    problem = undrain(host) if is_there else left_drained()
    if problem is not None:
        facts.tell_finding(host, problem)


def left_drained() -> Finding:
    """Return the finding for a host that vanished during the cutover."""
    return Finding(
        code="BU-VFY-006",
        severity="warning",
        cause="the host vanished during the cutover and stays drained; it puts the old state back by itself",
        remedy="run bringup apply again when it answers",
    )


def not_ready(context: Context, new: CutoverSet) -> Finding | None:
    """Return why ``current`` may not move: there is no candidate, or nobody proved it."""
    proved = target(context)
    if new.environment is None or proved is None:
        return Finding(
            code="BU-ENV-161",
            severity="error",
            cause="there is no whole environment of this stack to switch to",
            remedy="run bringup apply without --only",
            evidence={"wanted": candidate.digest(context.stack, context.state), "found": None},
        )
    if not is_proved(context, proved):
        return Finding(
            code="BU-VFY-005",
            severity="error",
            cause=f"{proved.name} was not proved in this boot, so nothing is switched to it",
            remedy="run bringup apply without --only, or bringup apply --only verify --only switch",
            evidence={"wanted": proved.name, "found": getattr(context.state.verification, "environment", None)},
        )
    return None


def without_units(state: HostState, units: tuple[str, ...]) -> HostState:
    """Return the state without the GPU processes of units that are restarted anyway."""
    if isinstance(state.processes, Unknown):
        return state
    others = tuple(process for process in state.processes.gpu if process.unit not in units)
    return state.model_copy(update={"processes": state.processes.model_copy(update={"gpu": others})})


def applied(context: Context, new: CutoverSet) -> Iterator[Command]:
    """Yield what makes the host's set the given one, each change undone if a later one fails."""
    yield work("cutover", *(part for unit in new.restart for part in ("--restart", unit)))
    yield from pointed(context.state, new.cuda)
    if new.service is not None:
        yield write(wanted.SERVICE_FILE, new.service, undo=True)
    if new.environment is not None:
        yield link(CURRENT, new.environment, undo=True)
    if new.restart:
        yield shell("restart", _RESTART + quoted(*new.restart), limit_s=RESTART_LIMIT_S, detach=True)


# A unit of type simple counts as started at once; one that dies right away must not pass.
_RESTART = """
restart() {
    systemctl restart "$@" || :
    sleep 2
    bad=0
    for unit in "$@"
    do systemctl is-active --quiet "$unit" && continue
       bad=1
       why=$(systemctl show --property=Result,ExecMainStatus "$unit" | tr '\\n' ' ')
       echo "bringup: $unit does not run after its restart: $why"
    done
    return "$bad"
}
restart """


def pointed(state: HostState, directory: str) -> Iterator[Command]:
    """Yield what points /usr/local/cuda at a toolkit: by alternative where there is one, else as a link."""
    if isinstance(state.toolkits, Unknown):
        raise HostError("the toolkits could not be looked at", why=state.toolkits.error)
    found = state.toolkits.links.get(wanted.CUDA_LINK)
    if found is not None and found.resolved == directory:
        return
    group = state.toolkits.alternatives.get("cuda")
    if group is None:
        yield link(wanted.CUDA_LINK, directory, undo=True)
    else:
        if directory not in group.choices:
            # A toolkit from a runfile registers nothing; the lowest priority never wins by itself.
            install = quoted("update-alternatives", "--install", wanted.CUDA_LINK, "cuda", directory, "0")
            yield shell("register-alternative", install, limit_s=60)
        yield alternative("cuda", directory, undo=True)
    yield do("ldconfig", ["ldconfig"], limit_s=120)


def tidied(context: Context, sets: list[CutoverSet], new: CutoverSet) -> Iterator[Command]:
    """Name processes that still run from older environments, and remove environments nobody needs."""
    if new.environment is None:
        return
    context = looked_again(context)
    for finding in environment.old_processes(context.state):
        facts.tell_finding(context.host, finding)
    path, content = builder()
    push(context.host, path, content, mode="0600")
    # The one that a rollback would return to is one of the old ones that stay.
    before = next((entry for entry in reversed(sets) if entry.environment not in (None, new.environment)), None)
    protected = ["--protect", str(before.environment).rsplit("/", 1)[-1]] if before else []
    keep = str(KEPT_OLD - (before is not None))
    argv = ["python3", path, "collect", HOME, "--keep", keep, *protected]
    yield do("collect", argv, limit_s=1800, detach=True)


# ---------------------------------------------------------------- rollback


def destination(
    sets: list[CutoverSet], state: HostState, to: str | None
) -> tuple[CutoverSet | None, CutoverSet | None]:
    """Return (the set that serves, the set to go back to); None where there is none.

    Without ``to`` it is the latest set that differs from the serving one and whose stack is not pinned; with
    it, the latest of that stack or environment digest. Its environment must be there, whole and not tainted.
    """
    serving = sets[-1] if sets else None
    entries = () if isinstance(state.environment, Unknown) else state.environment.environments
    sound = {candidate.path(entry) for entry in entries if entry.is_complete and not entry.is_tainted}
    pinned = None if state.pin is None or isinstance(state.pin, Unknown) else state.pin.digest
    for entry in reversed(sets[:-1]):
        names = (entry.digest, (entry.environment or "").rsplit("/", 1)[-1].rpartition("-")[0])
        is_meant = to in names if to is not None else entry.digest != pinned
        is_other = serving is not None and entry.content != serving.content
        if is_meant and is_other and (entry.environment is None or entry.environment in sound):
            return serving, entry
    return serving, None


@converges("pin", when=lambda _: True)
def rollback(context: Context) -> Commands:
    """Restore the set of an earlier cutover and pin the stack that is left; or only remove the pin."""
    host, chosen = context.host, context.settings
    if chosen.unpin:
        if context.state.pin is None:
            host.noop("nothing is pinned")
            return
        yield remove(PIN)
        return
    yield work("settle")
    if not is_executing():
        return
    sets = completed(host)
    if chosen.rollback_from is not None and not (sets and sets[-1].digest == chosen.rollback_from):
        # A rollout leaves a stack that this host never cut over to, or has left already: only the pin is missing.
        yield pinned(chosen.rollback_from, chosen.rollback_reason)
        return
    serving, goal = destination(sets, context.state, chosen.rollback_to)
    if serving is None or goal is None:
        yield refuse(host, nowhere(sets, chosen.rollback_to))
        return
    problem = drain(host)
    if problem is not None:
        yield refuse(host, problem)
        return
    try:
        context = looked_again(context)
        units = tuple(dict.fromkeys((*serving.restart, *goal.restart)))
        busy = change.in_use(without_units(context.state, units), "a rollback")
        if busy is not None:
            yield refuse(host, busy)
            return
        goal = goal.model_copy(update={"restart": units, "at": now()})
        yield pinned(serving.digest, chosen.rollback_reason)
        if goal.verification is not None:
            # It still says for what it holds, so a host that has changed since does not count as verified.
            yield write(RECORD, json.dumps(goal.verification, sort_keys=True) + "\n", undo=True)
        yield from linked(goal)
        yield from applied(context, goal)
        yield remembered(sets, goal)
        yield work("commit")
    finally:
        back_in_service(host)


def pinned(digest: str, reason: str) -> Command:
    """Return the command that pins the stack that is left."""
    pin = {"digest": digest, "reason": reason or "rolled back", "since": now()}
    return write(PIN, json.dumps(pin, sort_keys=True) + "\n", undo=True)


def linked(goal: CutoverSet) -> Iterator[Command]:
    """Yield what restores the linker entry."""
    if goal.linker is None:
        yield remove(wanted.LINKER_FILE, undo=True)
    else:
        yield write(wanted.LINKER_FILE, goal.linker, undo=True)
    yield do("ldconfig", ["ldconfig"], limit_s=120)


def nowhere(sets: list[CutoverSet], to: str | None) -> Finding:
    """Return the finding for a rollback without a target."""
    known = sorted({f"{entry.stack} {entry.digest} ({entry.environment})" for entry in sets[:-1]})
    return Finding(
        code="BU-ENV-162",
        severity="error",
        cause=f"there is no cutover {'to ' + to if to else 'before this one'} whose environment is whole and untainted",
        remedy="apply the stack that you want instead",
        evidence={"wanted": to, "found": known},
    )


@deploy("Switch")
def cut_over() -> None:
    """Switch to what was proved."""
    cutover(name="Cut over to what was proved")


@deploy("Switch")
def roll_back() -> None:
    """Return to an earlier cutover and pin what is left, or remove the pin."""
    rollback(name="Return to the cutover before")
