"""Cut over to what was proved, and go back: the few changes that a serving host can notice.

The cutover set is ``current``, ``/usr/local/cuda``, the service file and the linker entry. It changes as a
whole: every change is journalled on the host before it is made, and whatever fails, restarts included, puts all
of it back. Each completed set is kept on the host, so that a rollback knows where to go.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase

from pyinfra.api.deploy import deploy
from pyinfra.api.host import Host

from bringup import facts, wanted
from bringup.errors import HostError
from bringup.finding import Finding
from bringup.findings import change, environment
from bringup.host_state import HostState, Unknown
from tasks import candidate
from tasks.channel import push
from tasks.cutovers import (
    CutoverSet,
    asked_for,
    completed,
    destination,
    left,
    now,
    nowhere,
    remembered,
    unrecorded,
    with_found,
)
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
PIN = "/var/lib/bringup/pin.json"
ASSIGNED = "/var/lib/bringup/assigned.json"
KEPT_OLD = 2
RESTART_LIMIT_S = 1800
"""A serving unit may load a large model before it says that it is ready."""


# ---------------------------------------------------------------- cutover


@converges(*SWITCH)
def cutover(context: Context) -> Commands:
    """Point link, service file and ``current`` at what was proved, restart the units, keep the set."""
    host = context.host
    new = asked_for(context, candidate.candidate(context.stack, context.state))
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
        sets = with_found(context, completed(host))
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
    kept = completed(host)
    if chosen.rollback_from is not None and not (kept and kept[-1].digest == chosen.rollback_from):
        # A rollout leaves a stack that this host never cut over to, or has left already: only the pin is missing.
        yield pinned(chosen.rollback_from, chosen.rollback_reason)
        return
    if isinstance(context.state.environment, Unknown):
        raise HostError("its environments could not be looked at", host=host.name)
    sets, to = with_found(context, kept), chosen.rollback_to
    goal = destination(sets, context.state, to)
    if goal is None and to is not None and (goal := unrecorded(context, to)) is not None:
        facts.tell_finding(host, unproved(goal, context))
    if goal is None:
        yield refuse(host, nowhere(context, kept, to))
        return
    sets = [*sets[:-1], *(left(context, serving) for serving in sets[-1:])]
    leaving = sets[-1].digest if sets else None
    if leaving is None:
        facts.tell_finding(host, not_pinned())
    problem = drain(host)
    if problem is not None:
        yield refuse(host, problem)
        return
    try:
        context = looked_again(context)
        units = tuple(dict.fromkeys((*(sets[-1].restart if sets else ()), *goal.restart)))
        busy = change.in_use(without_units(context.state, units), "a rollback")
        if busy is not None:
            yield refuse(host, busy)
            return
        goal = goal.model_copy(update={"restart": units, "at": now()})
        if leaving is not None:
            yield pinned(leaving, chosen.rollback_reason)
        if goal.verification is not None:
            # It still says for what it holds, so a host that has changed since does not count as verified.
            yield write(RECORD, json.dumps(goal.verification, sort_keys=True) + "\n", undo=True)
        else:
            # What is there proves what is left.
            yield remove(RECORD, undo=True)
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


def unproved(goal: CutoverSet, context: Context) -> Finding:
    """Return the finding for a rollback to an environment that no kept cutover names."""
    around = "stay as they are" if goal.digest is None else f"become those of {context.stack.name}"
    return Finding(
        code="BU-ENV-163",
        severity="warning",
        cause=f"the host keeps no record of a cutover to {goal.name}: /usr/local/cuda, the service file and the loader "
        f"entry {around}",
        remedy="name its stack in the inventory and run bringup apply: nothing here says that it was proved",
    )


def not_pinned() -> Finding:
    """Return the finding for a rollback from what nobody knows the stack of."""
    return Finding(
        code="BU-ENV-164",
        severity="warning",
        cause="the host does not say which stack it leaves, so none is pinned",
        remedy="change the stack in the inventory before the next apply: it would switch to that one",
    )


def linked(goal: CutoverSet) -> Iterator[Command]:
    """Yield what restores the linker entry."""
    if goal.linker is None:
        yield remove(wanted.LINKER_FILE, undo=True)
    else:
        yield write(wanted.LINKER_FILE, goal.linker, undo=True)
    yield do("ldconfig", ["ldconfig"], limit_s=120)


@deploy("Switch")
def cut_over() -> None:
    """Switch to what was proved."""
    cutover(name="Cut over to what was proved")


@deploy("Switch")
def roll_back() -> None:
    """Return to an earlier cutover and pin what is left, or remove the pin."""
    rollback(name="Return to the cutover before")
