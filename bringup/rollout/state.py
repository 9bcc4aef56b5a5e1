"""Keep the state of a rollout as the fold of its transitions.

Each step is recorded before it touches a host and again when it has ended, so that after a crash a host is in
doubt about one step at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from bringup.rollout.overlay import Overlay
from bringup.rollout.transition import (
    AbortAsked,
    Halted,
    Observed,
    Pass,
    PauseAsked,
    Resumed,
    Started,
    Step,
    StepBegun,
    StepEnded,
    Transition,
    WaveOpened,
)
from bringup.rollout.wave import Limits, RolloutHost, Room, Wave, natural

Phase = Literal[
    "waiting",
    "prepared",
    "drained",
    "cut_over",
    "passed",
    "done",
    "unprepared",
    "drain_failed",
    "skipped",
    "cutover_failed",
    "gate_failed",
    "rolled_back",
    "reverted",
    "stuck",
]
Status = Literal["running", "pausing", "paused", "halted", "aborting", "aborted", "done"]

# Where a step leads. ``undrain`` is missing: it depends on where the host comes from.
_LEADS_TO: Mapping[tuple[Step, bool], Phase] = {
    ("prepare", True): "prepared",
    ("prepare", False): "unprepared",
    ("drain", True): "drained",
    ("drain", False): "drain_failed",
    ("inspect", True): "cut_over",
    ("inspect", False): "drained",
    ("cutover", True): "cut_over",
    ("cutover", False): "cutover_failed",
    ("gate", True): "passed",
    ("gate", False): "gate_failed",
    ("rollback", True): "rolled_back",
    ("rollback", False): "stuck",
}
_UNDRAINED: Mapping[Phase, Phase] = {
    "prepared": "prepared",
    "drained": "prepared",
    "drain_failed": "skipped",
    "rolled_back": "reverted",
    "passed": "done",
}
SETTLED: frozenset[Phase] = frozenset({"done", "unprepared", "skipped", "reverted", "stuck"})
FAILED: frozenset[Phase] = SETTLED - {"done"}


@dataclass(frozen=True)
class HostState:
    """Say how far a host has come in this pass.

    ``doing`` is the step that was begun and has not ended. ``in_doubt``: its controller died during the
    drain, the cutover or the return to service, so that step may or may not have had its effect.
    ``since_s``: when ``phase`` was reached.
    """

    phase: Phase = "waiting"
    doing: Step | None = None
    in_doubt: bool = False
    since_s: float = 0.0
    why: str | None = None


_WAITING = HostState()


@dataclass(frozen=True)
class Rollout:
    """Be the state of a rollout. Made by ``replay`` and ``advance`` only.

    ``wave`` is the open wave, empty between waves; ``wave_number`` counts the waves opened in this pass, and
    ``planned_at`` is the planned wave whose hosts are next. ``stuck`` are the hosts that a failure left out
    of service, ``pinned`` those that were rolled back from ``digest``. ``halt`` says why it stopped.
    ``unbegun`` counts the hosts whose preparation has not begun, ``undecided`` those of the open wave that
    may still pass or fail.
    """

    id: str
    stack: str
    digest: str
    hosts: tuple[RolloutHost, ...]
    waves: tuple[Wave, ...]
    limits: Limits
    passes: tuple[Pass, ...]
    soak_s: float
    states: Overlay[HostState]
    unbegun: int
    status: Status = "running"
    pass_at: int = 0
    planned_at: int = 0
    wave: Wave = ()
    wave_number: int = 0
    undecided: int = 0
    is_wave_failed: bool = False
    unreachable: frozenset[str] = frozenset()
    stuck: frozenset[str] = frozenset()
    is_observed: bool = False
    pinned: frozenset[str] = frozenset()
    halt: str | None = None

    @property
    def current_pass(self) -> Pass:
        """Return the pass that is under way."""
        return self.passes[self.pass_at]

    @property
    def unavailable(self) -> frozenset[str]:
        """Return the hosts out of service, or treated so: unreachable, stuck, or in the open wave."""
        return self.unreachable | self.stuck | frozenset(self.wave)

    @property
    def last_wave_at(self) -> int:
        """Return the last planned wave whose hosts may be taken now.

        Hosts of a domain that has no room are passed over for those of later waves, but nothing passes the
        canary over.
        """
        canary = (self.states[name].phase for name in self.waves[0])
        return len(self.waves) - 1 if "done" in canary else self.planned_at

    @property
    def failed(self) -> tuple[str, ...]:
        """Return the hosts that ended badly or do not answer, in order of waves."""
        return tuple(
            name
            for wave in self.waves
            for name in wave
            if self.states[name].phase in FAILED or name in self.unreachable
        )

    @property
    def is_over(self) -> bool:
        """Return whether nothing new begins until someone resumes it."""
        return self.status in ("paused", "halted", "aborted", "done")

    @property
    def is_complete(self) -> bool:
        """Return whether every host is where the stack wants it, and answers."""
        return self.status == "done" and not self.failed

    def resume_refusal(self, digest: str, *, is_unpinned: bool = False) -> str | None:
        """Return why ``Resumed`` with this digest cannot be recorded, or None when it can."""
        if self.status in ("done", "aborted"):
            return f"rollout {self.id} is {self.status}"
        if self.status == "halted" and digest == self.digest and self.pinned and not is_unpinned:
            names = ", ".join(sorted(self.pinned, key=natural))
            return f"digest {digest} was rolled back and is pinned on {names}: change the stack, or unpin it"
        return None


def replay(transitions: Iterable[Transition]) -> Rollout:
    """Return the rollout that these transitions tell, the first being ``Started``.

    Raises ValueError where they cannot have happened in this order.
    """
    story = iter(transitions)
    first = next(story, None)
    if not isinstance(first, Started):
        raise ValueError("a rollout begins with the transition 'started'")  # noqa: TRY004 - a wrong story
    return reduce(advance, story, _start(first))


def advance(rollout: Rollout, transition: Transition) -> Rollout:
    """Return the rollout after one more transition.

    Raises ValueError for one that cannot follow. A wave beyond the limits is such a one, so that no mistake
    of a caller can open it.
    """
    match transition:
        case StepBegun():
            return _begin(rollout, transition)
        case StepEnded():
            return _settle(_end(rollout, transition))
        case Observed():
            return _observe(rollout, transition)
        case WaveOpened():
            return _open(rollout, transition)
        case Halted():
            if rollout.status != "running" or rollout.wave:
                raise ValueError(f"rollout {rollout.id} cannot halt here: it is {rollout.status}")
            return replace(rollout, status="halted", halt=transition.why)
        case PauseAsked():
            if rollout.status != "running":
                raise ValueError(f"rollout {rollout.id} cannot be paused: it is {rollout.status}")
            return _settle(replace(rollout, status="pausing"))
        case AbortAsked():
            if rollout.status in ("done", "aborted"):
                raise ValueError(f"rollout {rollout.id} cannot be aborted: it is {rollout.status}")
            return _settle(replace(rollout, status="aborting"))
        case Resumed():
            return _settle(_resume(rollout, transition))
        case Started():
            raise ValueError(f"rollout {rollout.id} has already started")


def _start(started: Started) -> Rollout:
    names = {host.name for host in started.hosts}
    planned = [name for wave in started.waves for name in wave]
    if len(planned) != len(set(planned)) or set(planned) != names or len(names) != len(started.hosts):
        raise ValueError("every host must be in exactly one wave")
    if not names or not all(started.waves) or not started.passes:
        raise ValueError("a rollout needs at least one host, one pass, and no empty wave")
    return Rollout(
        id=started.id,
        stack=started.stack,
        digest=started.digest,
        hosts=started.hosts,
        waves=started.waves,
        limits=started.limits,
        passes=started.passes,
        soak_s=started.soak_s,
        states=Overlay(dict.fromkeys(planned, _WAITING)),
        unbegun=len(planned),
    )


def _begin(rollout: Rollout, begun: StepBegun) -> Rollout:
    state = _state(rollout, begun.host)
    wanted = step_for(rollout, begun.host, state)
    if state.doing is not None or begun.step != wanted:
        turn = state.doing or wanted or "nothing"
        raise ValueError(f"{begun.host}: {begun.step} cannot begin, {turn} is next")
    return replace(
        rollout,
        states=rollout.states.changed({begun.host: replace(state, doing=begun.step)}),
        unbegun=rollout.unbegun - (begun.step == "prepare"),
    )


def _end(rollout: Rollout, ended: StepEnded) -> Rollout:
    host, step, before = ended.host, ended.step, _state(rollout, ended.host)
    if before.doing != step:
        raise ValueError(f"{host}: {step} cannot end, {before.doing or 'nothing'} is under way")
    phase = _phase_after(before.phase, ended)
    if phase == "prepared" and ended.is_as_wanted and host not in rollout.stuck:
        # Nothing is left to cut over, so it is not drained; one that is out of service has yet to be put back.
        phase = "done"
    failed_cutover = phase in ("cutover_failed", "gate_failed")
    if failed_cutover and rollout.current_pass == "driver":
        # A driver is not rolled back, so the host stays drained for a person to look at.
        phase = "stuck"
    # What made a host fail is worth more than how its rollback went.
    why = before.why if phase in ("rolled_back", "reverted") else ended.why
    state = HostState(phase=phase, since_s=ended.time_s, why=why if phase != "done" else None)
    is_now_decided = not _is_decided(before.phase) and _is_decided(phase)
    told = f"{host}: {step} failed" + (f": {ended.why}" if ended.why else "")
    return replace(
        rollout,
        states=rollout.states.changed({host: state}),
        undecided=rollout.undecided - (is_now_decided and host in rollout.wave),
        unreachable=rollout.unreachable | {host} if ended.is_unreachable else rollout.unreachable - {host},
        stuck=_stuck_after(rollout.stuck, host, step, phase),
        pinned=rollout.pinned | {host} if phase == "rolled_back" else rollout.pinned,
        is_wave_failed=rollout.is_wave_failed or failed_cutover,
        halt=rollout.halt or (told if failed_cutover or phase in ("drain_failed", "stuck") else None),
    )


def _stuck_after(stuck: frozenset[str], host: str, step: Step, phase: Phase) -> frozenset[str]:
    # A host that is tried again after a resume is still out of service until an undrain went well.
    if phase == "stuck":
        return stuck | {host}
    return stuck - {host} if step == "undrain" else stuck


def _phase_after(phase: Phase, ended: StepEnded) -> Phase:
    is_ok = ended.is_ok and not ended.is_unreachable
    if ended.step == "undrain":
        return _UNDRAINED[phase] if is_ok else "stuck"
    if ended.step == "inspect" and ended.is_unreachable:
        return "cutover_failed"
    return _LEADS_TO[ended.step, is_ok]


def _observe(rollout: Rollout, observed: Observed) -> Rollout:
    missing = frozenset(observed.unreachable) & rollout.states.keys()
    rollout = replace(rollout, unreachable=missing, is_observed=True)
    lost = HostState("unprepared", since_s=observed.time_s, why="did not answer")
    # A host that does not answer when its turn comes has failed; one whose turn is later may come back.
    while rollout.status == "running" and not rollout.wave:
        turn = missing.intersection(rollout.waves[rollout.planned_at])
        gone = [name for name in turn if rollout.states[name].phase == "prepared"]
        if not gone:
            break
        rollout = _settle(replace(rollout, states=rollout.states.changed(dict.fromkeys(gone, lost))))
    return rollout


def _open(rollout: Rollout, opened: WaveOpened) -> Rollout:
    if rollout.status != "running" or rollout.wave or not rollout.is_observed or not opened.hosts:
        raise ValueError(f"rollout {rollout.id}: no wave may open now")
    planned = {name for wave in rollout.waves[rollout.planned_at : rollout.last_wave_at + 1] for name in wave}
    room = Room(rollout.hosts, rollout.limits, rollout.unavailable)
    for name in opened.hosts:
        is_ready = name in planned and rollout.states[name].phase == "prepared"
        if not is_ready or name in rollout.unreachable:
            raise ValueError(f"{name} is not ready for wave {rollout.wave_number + 1}")
        if not room.take(name):
            raise ValueError(f"{name} would exceed the limits of rollout {rollout.id}")
    return replace(
        rollout,
        wave=opened.hosts,
        wave_number=rollout.wave_number + 1,
        undecided=len(opened.hosts),
        is_wave_failed=False,
        is_observed=False,
    )


def _resume(rollout: Rollout, resumed: Resumed) -> Rollout:
    if refusal := rollout.resume_refusal(resumed.digest, is_unpinned=resumed.is_unpinned):
        raise ValueError(refusal)
    rollout = _leave_out(rollout, resumed.without)
    is_new = resumed.digest != rollout.digest and not rollout.wave
    is_again = is_new or rollout.is_over
    states = {
        name: _WAITING if is_new or (is_again and state.phase in FAILED) else _interrupted(state)
        for name, state in rollout.states.items()
    }
    rollout = replace(
        rollout,
        states=Overlay(states),
        unbegun=_count_unbegun(states),
        is_observed=False,
        pinned=frozenset() if is_new or resumed.is_unpinned else rollout.pinned,
    )
    if resumed.digest != rollout.digest and rollout.wave:
        # What a wave was begun with no longer exists, so the wave is undone before the new digest may begin.
        why = "the stack was changed while a wave was open"
        return replace(rollout, is_wave_failed=True, halt=rollout.halt or why)
    if is_new:
        rollout = replace(rollout, digest=resumed.digest, pass_at=0, wave_number=0)
    if is_again:
        rollout = replace(rollout, status="running", halt=None, planned_at=0, unreachable=frozenset())
        rollout = _stuck_first(rollout)
    return rollout


def _interrupted(state: HostState) -> HostState:
    if state.doing is None:
        return state
    is_returning = state.doing == "undrain" and state.phase == "passed"
    in_doubt = state.in_doubt or state.doing in ("drain", "cutover") or is_returning
    return replace(state, doing=None, in_doubt=in_doubt)


def _count_unbegun(states: Mapping[str, HostState]) -> int:
    return sum(state.phase == "waiting" and state.doing is None for state in states.values())


def _leave_out(rollout: Rollout, names: Iterable[str]) -> Rollout:
    out = frozenset(names)
    if not out:
        return rollout
    if rollout.wave or not out < rollout.states.keys():
        raise ValueError(f"rollout {rollout.id} cannot go on without {', '.join(sorted(out, key=natural))}")
    rest = (tuple(name for name in wave if name not in out) for wave in rollout.waves)
    return replace(
        rollout,
        states=Overlay({name: state for name, state in rollout.states.items() if name not in out}),
        hosts=tuple(host for host in rollout.hosts if host.name not in out),
        waves=tuple(wave for wave in rest if wave),
        planned_at=0,
        unreachable=rollout.unreachable - out,
        stuck=rollout.stuck - out,
        pinned=rollout.pinned - out,
    )


def _stuck_first(rollout: Rollout) -> Rollout:
    """Put the hosts that are out of service into the first wave: nothing is lost by trying them first."""
    if not rollout.stuck:
        return rollout
    stuck = tuple(sorted(rollout.stuck, key=natural))
    rest = (tuple(name for name in wave if name not in rollout.stuck) for wave in rollout.waves)
    return replace(rollout, waves=(stuck, *(wave for wave in rest if wave)))


def _settle(rollout: Rollout) -> Rollout:
    """Close the wave when its last host is settled, and go on to the next planned wave or pass."""
    states = rollout.states
    if rollout.wave:
        is_stopping = rollout.is_wave_failed or rollout.status == "aborting"
        if not all(_is_settled(states[name], is_stopping=is_stopping) for name in rollout.wave):
            return rollout
        rollout = replace(rollout, wave=(), is_observed=False, is_wave_failed=False)
        if rollout.halt is not None and rollout.status != "aborting":
            return replace(rollout, status="halted")
    if rollout.status == "pausing":
        return replace(rollout, status="paused")
    if rollout.status == "aborting":
        return replace(rollout, status="aborted")
    if rollout.status != "running":
        return rollout
    at = rollout.planned_at
    while at < len(rollout.waves) and _is_behind(rollout, at):
        at += 1
    if at < len(rollout.waves):
        return rollout if at == rollout.planned_at else replace(rollout, planned_at=at)
    if rollout.pass_at + 1 == len(rollout.passes):
        left = [name for wave in rollout.waves for name in wave if states[name].phase in FAILED]
        if left:
            why = f"{len(left)} of {len(states)} hosts could not be brought to the stack: {told(rollout, left)}"
            return replace(rollout, status="halted", halt=why, planned_at=0)
        return replace(rollout, status="done", planned_at=at)
    # The next pass is for the hosts that came well through this one.
    fresh = {name: _WAITING if state.phase == "done" else state for name, state in states.items()}
    return _settle(
        replace(
            rollout,
            states=Overlay(fresh),
            unbegun=_count_unbegun(fresh),
            pass_at=rollout.pass_at + 1,
            planned_at=0,
            wave_number=0,
            is_observed=False,
        )
    )


def _is_behind(rollout: Rollout, at: int) -> bool:
    phases = [rollout.states[name].phase for name in rollout.waves[at]]
    # Without one canary that came through, no other wave may follow.
    return all(phase in SETTLED for phase in phases) and (at > 0 or "done" in phases)


def _is_settled(state: HostState, *, is_stopping: bool) -> bool:
    if state.doing is not None:
        return False
    return state.phase in SETTLED or (state.phase == "prepared" and is_stopping and not state.in_doubt)


def _is_decided(phase: Phase) -> bool:
    return phase in ("passed", "drain_failed") or phase in SETTLED


def step_for(rollout: Rollout, host: str, state: HostState) -> Step | None:
    """Return the step that a host needs next, None when it has to wait or is settled."""
    is_stopping = rollout.is_wave_failed or rollout.status == "aborting"
    if state.phase == "waiting":
        return "prepare" if rollout.status == "running" and not is_stopping else None
    if host not in rollout.wave:
        return None
    can_roll_back = rollout.current_pass == "environment"
    match state.phase:
        case "prepared":
            if is_stopping:
                return "undrain" if state.in_doubt else None
            return "drain"
        case "drained" if state.in_doubt:
            return "inspect"
        case "drained":
            return "undrain" if is_stopping else "cutover"
        case "cut_over":
            return "rollback" if rollout.is_wave_failed and can_roll_back else "gate"
        case "cutover_failed" | "gate_failed":
            return "rollback"
        case "passed" if rollout.is_wave_failed and not state.in_doubt:
            return "rollback" if can_roll_back else "undrain"
        case "passed":
            # A wave is judged as a whole: while one of its hosts may still fail, none returns to service,
            # so that undoing the wave never needs a second drain.
            return "undrain" if state.in_doubt or _is_wave_decided(rollout) else None
        case "drain_failed" | "rolled_back":
            return "undrain"
        case _:
            return None


def _is_wave_decided(rollout: Rollout) -> bool:
    if rollout.status != "aborting":
        return rollout.undecided == 0
    phases = (rollout.states[name].phase for name in rollout.wave)
    return all(phase == "prepared" or _is_decided(phase) for phase in phases)


def _state(rollout: Rollout, host: str) -> HostState:
    if host not in rollout.states:
        raise ValueError(f"{host} is not in this rollout")
    return rollout.states[host]


def told(rollout: Rollout, names: Sequence[str], most: int = 5) -> str:
    """Return hosts with why each of them failed, in a line; the first few of many."""

    def one(name: str) -> str:
        why = rollout.states[name].why
        return f"{name} ({why})" if why else name

    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(one(name) for name in names[:most]) + more
