"""What cutovers left on a host, and to which of it a rollback can go.

Each completed cutover is kept in a list on the host. The environments lie elsewhere and outlive the list, so a host
whose list is gone can still be taken back: to an environment that is named, its surroundings being what is found.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pyinfra.api.host import Host

from bringup import wanted
from bringup.errors import HostError
from bringup.finding import Finding
from bringup.host_state import EnvironmentEntry, HostState, Unknown
from tasks import candidate
from tasks.channel import fetch
from tasks.run import Command, Context, write

CUTOVERS = "/var/lib/bringup/cutovers.json"
KEPT_CUTOVERS = 20


class CutoverSet(BaseModel):
    """What one completed cutover left serving.

    ``digest`` is the stack's; with ``stack`` it is None for what was found serving on a host that kept no list.
    ``environment`` None: the stack names an existing one, and nothing is switched. ``linker`` None: the stack has no
    linker entry. ``verification`` is the record that proved it, None for a cutover without one. ``at`` is a time as
    in RFC 3339, in UTC.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    stack: str | None
    digest: str | None
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

    @property
    def name(self) -> str | None:
        """Return the name of the environment, DIGEST-GENERATION; None for an existing one."""
        return None if self.environment is None else self.environment.rsplit("/", 1)[-1]

    @property
    def names(self) -> tuple[str | None, ...]:
        """Return what it may be called: the stack's digest, the environment's, the environment's name."""
        return (self.digest, self.name and self.name.rpartition("-")[0], self.name)


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


# ---------------------------------------------------------------- the set that is asked for, and those that are found


def asked_for(context: Context, entry: EnvironmentEntry | None) -> CutoverSet:
    """Return the set that the stack asks for on this host around an environment; None when none is built yet."""
    stack, state = context.stack, context.state
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


def found(context: Context, entry: EnvironmentEntry) -> CutoverSet:
    """Return an environment with the link, service file and linker entry that are on the host now."""
    stack, toolkits = context.stack, context.state.toolkits
    link = None if isinstance(toolkits, Unknown) else toolkits.links.get(wanted.CUDA_LINK)
    return CutoverSet(
        stack=None,
        digest=None,
        environment=candidate.path(entry),
        cuda=(link and link.resolved) or wanted.toolkit_directory(stack.cuda.default),
        service=fetch(context.host, wanted.SERVICE_FILE, missing="") or None,
        linker=fetch(context.host, wanted.LINKER_FILE, missing="") or None,
        restart=tuple(stack.service.restart),
        at=now(),
    )


def with_found(context: Context, kept: list[CutoverSet]) -> list[CutoverSet]:
    """Return the completed cutovers that a host keeps; a list that is gone begins with what serves there now."""
    serving = context.state.current_environment
    return kept or ([] if serving is None else [found(context, serving)])


# ---------------------------------------------------------------- where a rollback goes


def destination(sets: list[CutoverSet], state: HostState, to: str | None) -> CutoverSet | None:
    """Return the completed cutover to go back to; None where there is none.

    Without ``to`` it is the latest that differs from the serving one and whose stack is not pinned; with it, the
    latest of that stack or environment. Its environment must be there, whole and not tainted.
    """
    pin = state.pin_found
    for entry in reversed(sets[:-1]):
        is_pinned = pin is not None and entry.digest == pin.digest
        is_meant = to in entry.names if to is not None else not is_pinned
        if is_meant and entry.content != sets[-1].content and _hindrance(entry.name, state) is None:
            return entry
    return None


def unrecorded(context: Context, to: str) -> CutoverSet | None:
    """Return a set around an environment that no kept cutover names; None when there is no such environment.

    Where the stack builds that environment, the set is the one that it asks for; otherwise link, service file and
    linker entry stay as they are.
    """
    own = candidate.digest(context.stack, context.state)
    named = own if to == context.stack.digest else to
    entries = [entry for entry in others(context.state) if named in (entry.digest, entry.name)]
    if not entries:
        return None
    entry = max(entries, key=lambda entry: entry.generation or 0)
    goal = asked_for(context, entry) if entry.digest == own else found(context, entry)
    # The record on the host, if there is one, proves another environment.
    return goal.model_copy(update={"verification": None})


def others(state: HostState) -> list[EnvironmentEntry]:
    """Return the environments that could serve instead of the one that does: whole ones that are not tainted."""
    serving = state.current_environment
    return [entry for entry in _entries(state) if entry != serving and _hindrance(entry.name, state) is None]


def left(context: Context, serving: CutoverSet) -> CutoverSet:
    """Return the set that a rollback leaves; one that was found is the inventory's stack's if that builds it."""
    own = candidate.digest(context.stack, context.state)
    is_own = serving.digest is None and own in serving.names
    update = {"stack": context.stack.name, "digest": context.stack.digest}
    return serving.model_copy(update=update) if is_own else serving


def nowhere(context: Context, kept: list[CutoverSet], to: str | None) -> Finding:
    """Return the finding for a rollback without a target: why there is none, and what could be named instead."""
    state = context.state
    here = sorted(_called(entry, state) for entry in others(state))
    reasons = _reasons(kept, state) if to is None else _reasons_of(to, kept, state)
    return Finding(
        code="BU-ENV-162",
        severity="error",
        cause=f"there is nothing to return to: {'; '.join(reasons)}",
        remedy=f"name an environment that is here: bringup rollback INVENTORY {' or '.join(f'--to {n}' for n in here)}"
        if here
        else "apply the stack that you want instead: no other whole and untainted environment is here",
        evidence={
            "wanted": to,
            "found": sorted({f"{e.stack or 'unknown'} {e.digest or ''} ({e.environment})" for e in kept[:-1]}),
            "environments": here,
        },
    )


def _called(entry: EnvironmentEntry, state: HostState) -> str:
    """Return what names an environment: its digest, or its whole name when the serving one has that digest too."""
    serving = state.current_environment
    is_twin = serving is not None and serving.digest == entry.digest
    return entry.name if is_twin or entry.digest is None else entry.digest


def _reasons(kept: list[CutoverSet], state: HostState) -> Iterator[str]:
    """Yield why there is no cutover before the serving one to go back to."""
    if not kept:
        yield f"this host keeps no list of its cutovers ({CUTOVERS})"
        return
    earlier = {entry.environment: entry for entry in kept[:-1] if entry.content != kept[-1].content}
    if not earlier:
        yield "no cutover on this host left anything else than what serves"
    for entry in reversed(earlier.values()):
        yield f"{entry.name or 'the existing one'} {_hindrance(entry.name, state) or 'is of the stack that is pinned'}"


def _reasons_of(to: str, kept: list[CutoverSet], state: HostState) -> Iterator[str]:
    """Yield why it is not possible to go to what is named."""
    serving = state.current_environment
    if serving is not None and to in (serving.digest, serving.name, *(kept[-1].names if kept else ())):
        yield f"{to} is what serves"
        return
    meant = {entry.name for entry in kept[:-1] if to in entry.names}
    meant |= {entry.name for entry in _entries(state) if to in (entry.digest, entry.name)}
    for name in sorted(filter(None, meant)):
        yield f"{name} {_hindrance(name, state)}"
    if not meant:
        yield f"{to} names no cutover and no environment of this host"


def _entries(state: HostState) -> tuple[EnvironmentEntry, ...]:
    return () if isinstance(state.environment, Unknown) else state.environment.environments


def _hindrance(name: str | None, state: HostState) -> str | None:
    """Return why an environment cannot serve; None when it can, or is an existing one that bringup did not build."""
    if name is None:
        return None
    there = next((entry for entry in _entries(state) if entry.name == name), None)
    if there is None:
        return "is gone"
    return "is unfinished" if not there.is_complete else "is tainted" if there.is_tainted else None
