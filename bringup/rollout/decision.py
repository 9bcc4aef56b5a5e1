"""Decide what a controller does next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bringup.rollout.state import Rollout, step_for, told
from bringup.rollout.transition import Halted, Step, WaveOpened
from bringup.rollout.wave import Room, Wave, natural, next_wave


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
    """Return what a controller should do next; the time only stamps what is to be recorded.

    Costs time proportional to the open wave, and to the fleet between waves and while hosts have yet to be
    prepared.
    """
    if rollout.is_over:
        return Decision()
    if rollout.wave:
        return Decision(do=_steps(rollout, rollout.wave) + _preparations(rollout))
    if rollout.status != "running":
        return Decision()
    preparations = _preparations(rollout)
    if _is_preparing(rollout, rollout.planned_at):
        return Decision(do=preparations)
    if why := _prepare_refusal(rollout):
        return Decision(record=Halted(now_s, why))
    if not rollout.is_observed:
        return Decision(must_observe=True, do=preparations)
    for at in range(rollout.planned_at, rollout.last_wave_at + 1):
        if _is_preparing(rollout, at):
            return Decision(do=preparations)
        if wave := _wave_from(rollout, rollout.waves[at]):
            return Decision(record=WaveOpened(now_s, wave), do=preparations)
    return Decision(record=Halted(now_s, _no_room(rollout)))


def _is_preparing(rollout: Rollout, at: int) -> bool:
    return any(rollout.states[name].phase == "waiting" for name in rollout.waves[at])


def _wave_from(rollout: Rollout, planned: Wave) -> Wave:
    ready = deque(
        name for name in planned if rollout.states[name].phase == "prepared" and name not in rollout.unreachable
    )
    if not ready:
        return ()
    # Where the canary was as wanted already, nothing was cut over yet, and whoever is first is the canary.
    size = len(planned) if rollout.wave_number else min(len(planned), len(rollout.waves[0]))
    return next_wave(ready, size, Room(rollout.hosts, rollout.limits, rollout.unavailable))


def _steps(rollout: Rollout, names: Iterable[str]) -> tuple[Do, ...]:
    due: list[Do] = []
    for name in names:
        state = rollout.states[name]
        step = step_for(rollout, name, state) if state.doing is None else None
        if step is not None:
            due.append(Do(name, step, state.since_s + rollout.soak_s if step == "gate" else 0.0))
    return tuple(due)


def _preparations(rollout: Rollout) -> tuple[Do, ...]:
    if not rollout.unbegun:
        return ()
    planned = (name for wave in rollout.waves for name in wave)
    return _steps(rollout, (name for name in planned if rollout.states[name].phase == "waiting"))


def _prepare_refusal(rollout: Rollout) -> str | None:
    """Return why no wave may open although its hosts were prepared as far as they could be."""
    states = rollout.states
    phases = {name: states[name].phase for name in rollout.waves[0]}
    canary = [name for name, phase in phases.items() if phase == "unprepared"]
    if canary and "done" not in phases.values():
        return f"the canary could not be prepared: {told(rollout, canary)}"
    unprepared = [host.name for host in rollout.hosts if host.has_gpus and states[host.name].phase == "unprepared"]
    allowed = rollout.limits.unavailable.of(sum(host.has_gpus for host in rollout.hosts))
    if len(unprepared) > allowed:
        return (
            f"{len(unprepared)} hosts could not be prepared, more than the {allowed} that may be "
            f"unavailable: {told(rollout, unprepared)}"
        )
    return None


def _no_room(rollout: Rollout) -> str:
    gpu_hosts = {host.name for host in rollout.hosts if host.has_gpus}
    missing = sorted(rollout.unavailable & gpu_hosts, key=natural)
    left = [
        host
        for host in rollout.hosts
        if rollout.states[host.name].phase == "prepared" and host.name not in rollout.unreachable
    ]
    room = Room(rollout.hosts, rollout.limits, rollout.unavailable)
    names = [host.name for host in left]
    if room.total > 0:
        domains = sorted({host.domain for host in left if host.domain}, key=natural)
        return (
            f"{_counted(names)} may not be taken out of service: too many of {', '.join(domains[:5])} are "
            f"unavailable: {told(rollout, [n for n in missing if room.domain_of(n) in domains])}"
        )
    allowed = rollout.limits.unavailable.of(len(gpu_hosts))
    return (
        f"no host may be taken out of service: {len(missing)} of {len(gpu_hosts)} GPU hosts are unavailable, "
        f"{allowed} may be: {told(rollout, missing)}"
    )


def _counted(names: Sequence[str]) -> str:
    return f"{len(names)} hosts ({names[0]} and more)" if len(names) > 1 else names[0]
