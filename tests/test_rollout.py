"""Rollouts: waves, limits, gates, and what survives a controller that dies at any moment."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bringup.rollout import (
    AbortAsked,
    Bandwidth,
    BandwidthKey,
    Deviation,
    Do,
    GateEvidence,
    Halted,
    Limit,
    Limits,
    Observed,
    PauseAsked,
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
    judge_gate,
    plan_waves,
    replay,
    to_json,
)
from bringup.rollout.gate import lowest_accepted


def fleet(count: int, *, racks: int = 0) -> tuple[RolloutHost, ...]:
    return tuple(
        RolloutHost(f"gpu-{at}", domain=f"rack-{at % racks}" if racks else None) for at in range(1, count + 1)
    )


# ---------------------------------------------------------------------------------------------------- waves


@pytest.mark.parametrize(
    ("text", "hosts", "expected"),
    [
        ("3", 10, 3),
        ("25%", 10, 2),
        ("100%", 7, 7),
        ("1%", 10, 1),
        (" 50% ", 3, 1),
    ],
    ids=["count", "rounded-down", "all", "never-below-one", "blanks"],
)
def test_a_limit_is_a_count_or_a_percentage(text: str, hosts: int, expected: int) -> None:
    assert Limit.parse(text).of(hosts) == expected


@pytest.mark.parametrize("text", ["0", "0%", "101%", "-1", "1.5", "", "%", "three", "٣"])
def test_a_wrong_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="limit|wanted a number"):
        Limit.parse(text)


@pytest.mark.parametrize(
    ("hosts", "options", "sizes"),
    [
        (fleet(6), {}, [1, 1, 1, 1, 1, 1]),
        (fleet(40), {}, [1, 2, 4, 8, 10, 10, 5]),
        (fleet(10), {"canary": 2, "growth": 1, "max_unavailable": Limit(5)}, [2, 2, 2, 2, 2]),
        (fleet(10), {"growth": 1.5, "max_unavailable": Limit(9)}, [1, 1, 2, 3, 3]),
        (fleet(4), {"canary": 3, "max_unavailable": Limit(2)}, [2, 2]),
        (fleet(1), {}, [1]),
        (fleet(8, racks=4), {"canary": 4, "max_unavailable": Limit(8), "per_domain": Limit(1)}, [4, 4]),
        (fleet(8, racks=4), {"canary": 4, "max_unavailable": Limit(8), "domains_at_once": 1}, [2, 2, 2, 2]),
        (fleet(8, racks=4), {"canary": 8, "max_unavailable": Limit(8), "domains_at_once": 3}, [6, 2]),
    ],
    ids=[
        "small-fleet",
        "doubles-up-to-the-limit",
        "constant",
        "fractions-add-up",
        "canary-within-limit",
        "one-host",
        "one-of-each-rack",
        "one-rack-at-once",
        "three-racks-at-once",
    ],
)
def test_sizes_of_waves(hosts: tuple[RolloutHost, ...], options: dict[str, object], sizes: list[int]) -> None:
    waves = plan_waves(hosts, **options)  # type: ignore[arg-type]
    assert [len(wave) for wave in waves] == sizes


def test_hosts_go_in_natural_order_whatever_order_they_come_in() -> None:
    hosts = [RolloutHost(name) for name in ("gpu-10", "gpu-2", "b", "gpu-1", "gpu-02", "a")]
    expected = (("a", "b"), ("gpu-1", "gpu-02"), ("gpu-2", "gpu-10"))
    assert plan_waves(hosts, 2, 1, Limit(2)) == expected
    assert plan_waves(hosts[::-1], 2, 1, Limit(2)) == expected


def test_named_canaries_go_first_and_alone() -> None:
    waves = plan_waves(fleet(9), ["gpu-7", "gpu-3"], 2, Limit(4))
    assert waves == (
        ("gpu-7", "gpu-3"),
        ("gpu-1", "gpu-2", "gpu-4", "gpu-5"),
        ("gpu-6", "gpu-8", "gpu-9"),
    )


def test_only_gpu_hosts_count_in_the_denominator() -> None:
    hosts = (*fleet(4), *(RolloutHost(f"login-{at}", has_gpus=False) for at in range(96)))
    assert {len(wave) for wave in plan_waves(hosts, 10, 2, Limit.parse("50%"))} == {2}


@pytest.mark.parametrize(
    ("hosts", "options", "message"),
    [
        ((*fleet(2), RolloutHost("gpu-1")), {}, "host named twice: gpu-1"),
        (fleet(2), {"canary": 0}, "canary: wanted at least one host"),
        (fleet(2), {"canary": []}, "canary: wanted at least one host"),
        (fleet(2), {"canary": ["gpu-9"]}, "canary is not in the inventory: gpu-9"),
        (fleet(2), {"canary": ["gpu-1", "gpu-1"]}, "canary named twice: gpu-1"),
        (fleet(2), {"growth": 0.5}, "growth: wanted at least 1, found 0.5"),
        (fleet(2), {"growth": float("nan")}, "growth: wanted at least 1, found nan"),
        (fleet(2), {"domains_at_once": 0}, "domains at once: wanted at least 1, found 0"),
    ],
    ids=["twice", "no-canary", "empty-canary", "unknown", "canary-twice", "shrinking", "nan", "no-domain"],
)
def test_a_wrong_plan_is_refused(
    hosts: tuple[RolloutHost, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_waves(hosts, **options)  # type: ignore[arg-type]


@st.composite
def plans(draw: st.DrawFn, most: int = 40) -> Started:
    count = draw(st.integers(1, most))
    racks = draw(st.integers(0, 5))
    hosts = tuple(
        RolloutHost(
            f"gpu-{at}",
            domain=f"rack-{draw(st.integers(1, racks))}" if racks else None,
            has_gpus=draw(st.integers(0, 9)) > 0,
        )
        for at in range(count)
    )
    limits = Limits(
        draw(st.one_of(st.integers(1, 10).map(Limit), st.integers(1, 100).map(lambda p: Limit(p, True)))),
        draw(st.one_of(st.none(), st.integers(1, 4).map(Limit), st.just(Limit(50, True)))),
        draw(st.one_of(st.none(), st.integers(1, 3))),
    )
    waves = plan_waves(
        hosts,
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 1.5, 2, 10])),
        limits.unavailable,
        per_domain=limits.per_domain,
        domains_at_once=limits.domains_at_once,
    )
    passes = draw(st.sampled_from([("environment",), ("driver", "environment")]))
    return Started(0.0, "r1", "lab", "d1", hosts, waves, limits, passes, soak_s=draw(st.sampled_from([0, 30])))


def assert_within(started: Started, out: set[str]) -> None:
    """Count independently of the code under test what is out of service together."""
    gpu = {host.name: host.domain for host in started.hosts if host.has_gpus}
    missing = [name for name in out if name in gpu]
    limits = started.limits

    def allowed(limit: Limit, of: int) -> int:
        return max(1, of * limit.value // 100) if limit.is_percentage else limit.value

    assert len(missing) <= allowed(limits.unavailable, len(gpu))
    if limits.per_domain:
        for domain, down in Counter(gpu[name] for name in missing if gpu[name]).items():
            assert down <= allowed(limits.per_domain, list(gpu.values()).count(domain))


@given(plans(most=60))
def test_every_host_is_in_exactly_one_wave_and_no_wave_exceeds_a_limit(started: Started) -> None:
    assert sorted(name for wave in started.waves for name in wave) == sorted(h.name for h in started.hosts)
    domain_of = {host.name: host.domain for host in started.hosts}
    for wave in started.waves:
        assert_within(started, set(wave))
        touched = {domain_of[name] for name in wave} - {None}
        assert started.limits.domains_at_once is None or len(touched) <= started.limits.domains_at_once


# ------------------------------------------------------------------------------------- a fleet to try it on


class ControllerDied(Exception):
    """The controller was killed between two instructions."""


@dataclass
class Machine:
    """Be one simulated host: what it serves and whether work reaches it."""

    serving: dict[str, str]
    is_drained: bool = False
    switches: list[str] = field(default_factory=list)
    pins: set[str] = field(default_factory=set)


@dataclass
class World:
    """Be the fleet and the controllers' database; both outlive a controller."""

    started: Started
    fails: dict[str, str]
    unreachable: set[str]
    kills: set[int]
    seed: int
    log: list[dict[str, object]] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)
    moment: int = 0

    def __post_init__(self) -> None:
        self.order = random.Random(self.seed)
        self.machines = {h.name: Machine({"driver": "d0", "environment": "d0"}) for h in self.started.hosts}
        self.log.append(to_json(self.started))

    def live(self) -> None:
        """Let a moment pass, in which the controller may die."""
        self.moment += 1
        if self.moment in self.kills:
            raise ControllerDied

    def rollout(self) -> Rollout:
        return replay(from_json(document) for document in self.log)

    def record(self, rollout: Rollout, transition: Transition) -> Rollout:
        self.live()
        after = advance(rollout, transition)
        self.log.append(to_json(transition))
        self.live()
        return after

    def act(self, rollout: Rollout, do: Do) -> tuple[bool, str | None, bool]:
        """Do a step to a machine, and say whether it went well, why not, and whether it answered."""
        machine, kind = self.machines[do.host], rollout.current_pass
        if do.host in self.unreachable:
            return False, "ssh: connection timed out", True
        is_well = self.fails.get(do.host) != do.step
        match do.step:
            case "drain":
                machine.is_drained = is_well
                out = {name for name, m in self.machines.items() if m.is_drained}
                assert_within(self.started, out)
            case "inspect":
                return machine.serving[kind] == rollout.digest, None, False
            case "cutover":
                assert machine.is_drained, "cut over while it was serving"
                assert machine.serving[kind] != rollout.digest, "cut over twice"
                if is_well:
                    machine.serving[kind] = rollout.digest
                    machine.switches.append(f"{kind} {rollout.digest}")
            case "gate":
                assert machine.serving[kind] == rollout.digest
            case "rollback":
                assert machine.is_drained, "rolled back while it was serving"
                if is_well:
                    machine.serving[kind] = "d0"
                    machine.pins.add(rollout.digest)
            case "undrain":
                machine.is_drained = not is_well
        return is_well, None if is_well else f"{do.step} went wrong", False

    def drive(self, rollout: Rollout) -> Rollout:
        """Be a controller: do what is decided, in any order, until nothing is left or it dies."""
        under_way: list[Do] = []
        now_s = 0.0
        while True:
            now_s += 1
            decision = decide(rollout, now_s)
            if decision.record is not None:
                rollout = self.record(rollout, decision.record)
                continue
            if decision.must_observe and self.order.random() < 0.5:
                rollout = self.record(rollout, Observed(now_s, tuple(sorted(self.unreachable))))
                continue
            choices = [("begin", do) for do in decision.do] + [("end", do) for do in under_way]
            if not choices:
                if decision.must_observe:
                    continue
                return rollout
            what, do = self.order.choice(choices)
            if what == "begin":
                rollout = self.record(rollout, StepBegun(now_s, do.host, do.step))
                under_way.append(do)
                continue
            under_way.remove(do)
            now_s = max(now_s, do.not_before_s)
            self.live()
            is_ok, why, is_lost = self.act(rollout, do)
            rollout = self.record(rollout, StepEnded(now_s, do.host, do.step, is_ok, why, is_lost))

    def run(self, digest: str = "d1") -> Rollout:
        """Start controllers, each after the last one died, until one of them comes to an end."""
        while True:
            try:
                rollout = self.rollout()
                if rollout.is_over:
                    return rollout
                if len(self.log) > 1:
                    rollout = self.record(rollout, Resumed(0.0, "ops@ctl", digest))
                return self.drive(rollout)
            except ControllerDied:
                continue


STEPS = ["prepare", "drain", "cutover", "gate", "rollback", "undrain"]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    started = draw(plans(most=12))
    names = [host.name for host in started.hosts]
    return World(
        started,
        fails=draw(st.dictionaries(st.sampled_from(names), st.sampled_from(STEPS), max_size=3)),
        unreachable=draw(st.sets(st.sampled_from(names), max_size=2)),
        kills=draw(st.sets(st.integers(1, 200), max_size=12)),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds())
def test_no_crash_loses_a_host_and_no_wave_exceeds_a_limit(world: World) -> None:
    rollout = world.run()

    assert rollout == world.rollout()
    assert rollout.status in ("done", "halted")
    for name, machine in world.machines.items():
        assert len(machine.switches) == len(set(machine.switches)), "switched twice"
        phase = rollout.states[name].phase
        assert phase in ("waiting", "prepared", "done", "unprepared", "skipped", "reverted", "stuck")
        if phase != "stuck":
            assert not machine.is_drained
            assert (machine.serving[rollout.current_pass] == "d1") == (phase == "done")
            assert ("d1" in machine.pins) == (phase == "reverted")
    if rollout.status == "done":
        for name in world.machines:
            assert rollout.states[name].phase in ("done", "unprepared")
    if not world.fails and not world.unreachable:
        assert rollout.is_complete
