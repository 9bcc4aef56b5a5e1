"""Decide what a controller does next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bringup.rollout.state import Rollout, step_for
from bringup.rollout.transition import Halted, Step, WaveOpened
from bringup.rollout.wave import Room, natural, next_wave


@dataclass(frozen=True)
class Do:
    """Ask for one step on one host, not before a time. Steps of different hosts are independent."""

    host: str
    step: Step
    not_before_s: float = 0.0


@dataclass(frozen=True)
class Decision:
    """Say what comes next.

    ``record``: this transition, then decide again. ``must_observe``: see which hosts answer and record
    ``Observed``. ``do``: every step that may begin now; those already begun are not in it.
    """

    record: WaveOpened | Halted | None = None
    must_observe: bool = False
    do: tuple[Do, ...] = ()


def decide(rollout: Rollout, now_s: float) -> Decision:
    """Return what a controller should do next; the time only stamps what is to be recorded."""
    if rollout.is_over:
        return Decision()
    if rollout.wave:
        return Decision(do=_steps(rollout, rollout.wave) + _preparations(rollout))
    if rollout.status != "running":
        return Decision()
    preparations = _preparations(rollout)
    planned = rollout.waves[rollout.planned_at]
    if any(rollout.states[name].phase == "waiting" for name in planned):
        return Decision(do=preparations)
    if why := _prepare_refusal(rollout):
        return Decision(record=Halted(now_s, why))
    if not rollout.is_observed:
        return Decision(must_observe=True, do=preparations)
    ready = deque(
        name for name in planned if rollout.states[name].phase == "prepared" and name not in rollout.unreachable
    )
    room = Room(rollout.hosts, rollout.limits, rollout.unavailable)
    wave = next_wave(ready, len(planned), room)
    if not wave:
        return Decision(record=Halted(now_s, _no_room(rollout)))
    return Decision(record=WaveOpened(now_s, wave), do=preparations)


def _steps(rollout: Rollout, names: Iterable[str]) -> tuple[Do, ...]:
    due: list[Do] = []
    for name in names:
        state = rollout.states[name]
        step = step_for(rollout, name, state) if state.doing is None else None
        if step is not None:
            due.append(Do(name, step, state.since_s + rollout.soak_s if step == "gate" else 0.0))
    return tuple(due)


def _preparations(rollout: Rollout) -> tuple[Do, ...]:
    if not rollout.waiting:
        return ()
    planned = (name for wave in rollout.waves for name in wave)
    return _steps(rollout, (name for name in planned if rollout.states[name].phase == "waiting"))


def _prepare_refusal(rollout: Rollout) -> str | None:
    """Return why no wave may open although its hosts were prepared as far as they could be."""
    states = rollout.states
    canary = [name for name in rollout.waves[0] if states[name].phase == "unprepared"]
    if canary and not any(state.phase == "done" for state in states.values()):
        return f"the canary could not be prepared: {_told(rollout, canary)}"
    unprepared = [host.name for host in rollout.hosts if states[host.name].phase == "unprepared"]
    allowed = rollout.limits.unavailable.of(sum(host.has_gpus for host in rollout.hosts))
    if len(unprepared) > allowed:
        return (
            f"{len(unprepared)} hosts could not be prepared, more than the {allowed} that may be "
            f"unavailable: {_told(rollout, unprepared)}"
        )
    return None


def _no_room(rollout: Rollout) -> str:
    gpu_hosts = sum(host.has_gpus for host in rollout.hosts)
    allowed = rollout.limits.unavailable.of(gpu_hosts)
    missing = sorted(rollout.unavailable, key=natural)
    return (
        f"no host may be taken out of service: {len(missing)} of {gpu_hosts} GPU hosts are unavailable, "
        f"{allowed} may be: {_told(rollout, missing)}"
    )


def _told(rollout: Rollout, names: Sequence[str], most: int = 5) -> str:
    def one(name: str) -> str:
        why = rollout.states[name].why
        return f"{name} ({why})" if why else name

    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(one(name) for name in names[:most]) + more
