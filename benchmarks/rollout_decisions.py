"""Measure how long a controller thinks about a fleet of simulated hosts.

The hosts are scripted: some fail, some are slow, some do not answer, and the controller dies now and then and
is replayed from its transitions. Time on hosts is simulated, so what is measured is the deciding alone: the
seconds between two waves, for each wave, and the memory of the process. Nothing is written to a database.

    python benchmarks/rollout_decisions.py --hosts 10000 --json
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator

from bringup.rollout import (
    Do,
    Limit,
    Limits,
    Observed,
    Resumed,
    Rollout,
    RolloutHost,
    Started,
    StepBegun,
    StepEnded,
    Transition,
    WaveOpened,
    advance,
    decide,
    from_json,
    plan_waves,
    replay,
    to_json,
)

# Simulated seconds that a step takes on an ordinary host; a slow host takes twenty times as long.
USUAL_S = {"prepare": 240, "drain": 60, "inspect": 1, "cutover": 30, "gate": 45, "rollback": 2, "undrain": 5}


class Fleet:
    """Script what every host does."""

    def __init__(self, hosts: int, seed: int, unreachable: float, unprepared: float, slow: float) -> None:
        self.random = random.Random(seed)
        self.hosts = tuple(RolloutHost(f"gpu-{at:05}", domain=f"rack-{at // 8:04}") for at in range(hosts))
        names = [host.name for host in self.hosts]
        # The canary is left well, or there would be nothing to measure.
        self.unreachable = set(self.random.sample(names[1:], int(hosts * unreachable)))
        self.unprepared = set(self.random.sample(names[1:], int(hosts * unprepared))) - self.unreachable
        self.slow = set(self.random.sample(names, int(hosts * slow)))
        self.served: set[str] = set()
        self.drained: set[str] = set()
        self.switches: dict[str, int] = {}

    def seconds(self, do: Do) -> float:
        """Return the simulated seconds of a step."""
        return USUAL_S[do.step] * self.random.uniform(0.5, 1.5) * (20 if do.host in self.slow else 1)

    def end(self, do: Do, now_s: float) -> StepEnded:
        """Do a step and tell how it ended."""
        if do.host in self.unreachable:
            return StepEnded(now_s, do.host, do.step, False, "ssh: connection timed out", True)
        if do.step == "inspect":
            return StepEnded(now_s, do.host, do.step, do.host in self.served)
        if do.step == "prepare" and do.host in self.unprepared:
            return StepEnded(now_s, do.host, do.step, False, "not enough space")
        if do.step == "drain":
            self.drained.add(do.host)
        if do.step == "undrain":
            self.drained.discard(do.host)
        if do.step == "cutover":
            self.served.add(do.host)
            self.switches[do.host] = self.switches.get(do.host, 0) + 1
        return StepEnded(now_s, do.host, do.step, True)


class Controller:
    """Drive a rollout, and measure the seconds spent on deciding and on recording."""

    def __init__(self, fleet: Fleet, started: Started) -> None:
        self.fleet = fleet
        self.log: list[str] = []
        self.rollout: Rollout | None = None
        self.deciding_s = 0.0
        self.per_wave_s: list[float] = []
        self.sizes: list[int] = []
        self.replay_s: list[float] = []
        self.most_out = 0
        self.now_s = 0.0
        self.under_way: list[tuple[float, int, Do]] = []
        self._count = 0
        self._write(started)
        self.rollout = replay([started])

    def _write(self, transition: Transition) -> None:
        self.log.append(json.dumps(to_json(transition)))

    def _record(self, transition: Transition) -> None:
        assert self.rollout is not None
        begin = time.perf_counter()
        self.rollout = advance(self.rollout, transition)
        self._write(transition)
        self.deciding_s += time.perf_counter() - begin
        if isinstance(transition, WaveOpened):
            self.per_wave_s.append(self.deciding_s)
            self.sizes.append(len(transition.hosts))
            self.deciding_s = 0.0

    def die(self) -> None:
        """Lose everything but the log, then go on from it. Steps under way are lost before their end."""
        self.under_way.clear()
        begin = time.perf_counter()
        self.rollout = replay(from_json(json.loads(line)) for line in self.log)
        self.replay_s.append(time.perf_counter() - begin)
        self._record(Resumed(self.now_s, "benchmark", self.rollout.digest))

    def steps(self) -> Iterator[int]:
        """Go on until the rollout is over; yield the number of hosts done after each simulated step."""
        while True:
            assert self.rollout is not None
            begin = time.perf_counter()
            decision = decide(self.rollout, self.now_s)
            self.deciding_s += time.perf_counter() - begin
            if decision.record is not None:
                self._record(decision.record)
                continue
            if decision.must_observe:
                self._record(Observed(self.now_s, tuple(sorted(self.fleet.unreachable))))
                continue
            for do in decision.do:
                self._record(StepBegun(self.now_s, do.host, do.step))
                self._count += 1
                ends_s = max(self.now_s + self.fleet.seconds(do), do.not_before_s)
                heapq.heappush(self.under_way, (ends_s, self._count, do))
            if not self.under_way:
                return
            self.now_s, _, do = heapq.heappop(self.under_way)
            self._record(self.fleet.end(do, self.now_s))
            self.most_out = max(self.most_out, len(self.fleet.drained))
            yield len(self.fleet.switches)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Run one rollout over the simulated fleet and return what was seen."""
    fleet = Fleet(options.hosts, options.seed, 0.01, 0.005, 0.02)
    limits = Limits(Limit.parse(options.max_unavailable), per_domain=Limit(2))
    begin = time.perf_counter()
    waves = plan_waves(fleet.hosts, 1, 2.0, limits.unavailable, per_domain=limits.per_domain)
    planning_s = time.perf_counter() - begin
    controller = Controller(fleet, Started(0.0, "benchmark", "lab", "d1", fleet.hosts, waves, limits, soak_s=300.0))
    deaths = sorted(fleet.random.sample(range(1, options.hosts * 4), options.crashes), reverse=True)
    begin = time.perf_counter()
    again = True
    taken = 0
    while again:
        again = False
        for _ in controller.steps():
            taken += 1
            if deaths and taken >= deaths[-1]:
                deaths.pop()
                controller.die()
                again = True
                break
    total_s = time.perf_counter() - begin
    rollout = controller.rollout
    assert rollout is not None
    allowed = limits.unavailable.of(options.hosts)
    # A rack that has lost as many hosts as it may keeps its others, and the rollout says so at its end.
    lost = Counter(host.domain for host in fleet.hosts if host.name in fleet.unreachable)
    kept = {host.name for host in fleet.hosts if lost[host.domain] >= 2}
    expected = options.hosts - len(fleet.unreachable | fleet.unprepared | kept)
    return {
        "hosts": options.hosts,
        "unreachable": len(fleet.unreachable),
        "unprepared": len(fleet.unprepared),
        "slow": len(fleet.slow),
        "crashes": len(controller.replay_s),
        "in_racks_without_room": len(kept - fleet.unreachable),
        "status": rollout.status,
        "halt": rollout.halt,
        "waves": len(controller.sizes),
        "largest_wave": max(controller.sizes, default=0),
        "most_out_of_service": controller.most_out,
        "allowed_out_of_service": allowed - len(fleet.unreachable),
        "cut_over": len(fleet.switches),
        "cut_over_expected": expected,
        "cut_over_twice": sum(times > 1 for times in fleet.switches.values()),
        "planning_s": planning_s,
        "deciding_per_wave_s": {
            "median": statistics.median(controller.per_wave_s),
            "max": max(controller.per_wave_s),
        },
        "deciding_total_s": total_s,
        "replay_s": {"max": max(controller.replay_s, default=0.0)},
        "transitions": len(controller.log),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> int:
    """Print what was measured; exit 1 where a host was lost, done twice, or a limit exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=10_000)
    parser.add_argument("--max-unavailable", default="5%")
    parser.add_argument("--crashes", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    seen = measure(parser.parse_args())
    if "--json" in sys.argv:
        print(json.dumps(seen, indent=2))
    else:
        for key, value in seen.items():
            print(f"{key:24} {value}")
    expected = seen["cut_over_expected"]
    is_right = (
        seen["status"] == ("done" if expected == seen["hosts"] else "halted")
        and seen["cut_over"] == seen["cut_over_expected"]
        and seen["cut_over_twice"] == 0
        and int(str(seen["most_out_of_service"])) <= int(str(seen["allowed_out_of_service"]))
    )
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
