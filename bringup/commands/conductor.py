"""Conduct a rollout: record, have it done, record how it ended, decide again.

Nothing here knows how a step is done; a crew does that. Whatever kills this process, the log holds what was begun,
and the next conductor goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bringup.history import LEASE_S, Lease, RolloutLog
from bringup.rollout import (
    Do,
    Halted,
    Observed,
    Rollout,
    Step,
    StepBegun,
    StepEnded,
    Transition,
    WaveOpened,
    decide,
)

# How long a request to pause may go unnoticed while nothing else happens.
_LOOK_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """Say how one step ended on one host, as ``StepEnded`` does."""

    host: str
    step: Step
    is_ok: bool
    why: str | None = None
    is_unreachable: bool = False
    is_as_wanted: bool = False


@dataclass(frozen=True)
class Looked:
    """Say which hosts did not answer when all were looked at."""

    unreachable: tuple[str, ...] = ()


class Crew(Protocol):
    """Do steps on hosts. All methods are called from one thread."""

    def begin(self, rollout: Rollout, step: Step, hosts: Sequence[str]) -> None:
        """Begin a step on some hosts and return at once; every one of them gets an outcome later."""

    def room(self, step: Step) -> bool:
        """Return whether another batch of this step may begin now."""

    def look(self, rollout: Rollout) -> None:
        """Begin to look at every host of the rollout and return at once; ``Looked`` comes later."""

    def outcomes(self, timeout_s: float) -> Iterable[Outcome | Looked]:
        """Return what has ended, waiting up to ``timeout_s`` for the first."""

    def stop(self) -> None:
        """End what still runs; the hosts put things right by themselves."""


class Conductor:
    """Drive one rollout until it is over. ``tell`` receives every transition with the state after it."""

    def __init__(
        self,
        log: RolloutLog,
        lease: Lease,
        crew: Crew,
        tell: Callable[[Transition, Rollout], None] = lambda _transition, _rollout: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._log = log
        self._lease = lease
        self._crew = crew
        self._tell = tell
        self._clock = clock
        self._under_way: set[str] = set()
        self._is_looking = False
        self._heard_s = time.monotonic()

    def run(self) -> Rollout:
        """Go on until the rollout is over and nothing is under way, and return its last state.

        Raises BringupError when the history fails or another controller took the rollout over; what is under way
        is ended then, as it is by an interrupt.
        """
        try:
            while self._under_way or self._is_looking or not self._log.rollout.is_over:
                self._turn()
        finally:
            self._crew.stop()
        return self._log.rollout

    def _turn(self) -> None:
        now_s = self._clock()
        decision = decide(self._log.rollout, now_s)
        if isinstance(decision.record, WaveOpened | Halted):
            self._record(decision.record)
            return
        self._begin(decision.do, now_s)
        if decision.must_observe and not self._is_looking:
            self._is_looking = True
            self._crew.look(self._log.rollout)
        for ended in self._crew.outcomes(_LOOK_S):
            if isinstance(ended, Looked):
                self._is_looking = False
                self._record(Observed(self._clock(), ended.unreachable))
            else:
                self._end(ended)
        self._listen()

    def _begin(self, due: Iterable[Do], now_s: float) -> None:
        due = [do for do in due if do.not_before_s <= now_s]
        # While thousands wait to be prepared, every turn asks for all of them.
        with_room = {step for step in {do.step for do in due} if self._crew.room(step)}
        # Hosts are prepared wave by wave, so that one that hangs holds up no wave but its own.
        waves = self._log.rollout.waves if "prepare" in with_room else ()
        wave_of = {host: at for at, wave in enumerate(waves) for host in wave}
        batches: dict[tuple[Step, int], list[str]] = {}
        for do in due:
            if do.step in with_room:
                of_wave = wave_of[do.host] if do.step == "prepare" else 0
                batches.setdefault((do.step, of_wave), []).append(do.host)
        for (step, _), hosts in sorted(batches.items(), key=lambda item: item[0][1]):
            if not self._crew.room(step):
                continue
            if self._record(*(StepBegun(self._clock(), host, step) for host in hosts)):
                self._under_way.update(hosts)
                self._crew.begin(self._log.rollout, step, hosts)

    def _end(self, outcome: Outcome) -> None:
        self._under_way.discard(outcome.host)
        self._record(
            StepEnded(
                self._clock(),
                outcome.host,
                outcome.step,
                outcome.is_ok,
                why=outcome.why,
                is_unreachable=outcome.is_unreachable,
                is_as_wanted=outcome.is_as_wanted,
            )
        )

    def _record(self, *transitions: Transition) -> bool:
        is_recorded = self._log.record(*transitions, lease=self._lease)
        self._heard_s = time.monotonic()
        if is_recorded:
            for transition in transitions:
                self._tell(transition, self._log.rollout)
        return is_recorded

    def _listen(self) -> None:
        """Hear what others ask for, and let them know that this controller lives."""
        self._log.refresh()
        if time.monotonic() - self._heard_s > LEASE_S / 4:
            self._lease.renew()
            self._heard_s = time.monotonic()
