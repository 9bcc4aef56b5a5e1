"""Rollouts: waves, limits, gates, and what survives a controller that dies at any moment."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
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
    return tuple(RolloutHost(f"gpu-{at}", domain=f"rack-{at % racks}" if racks else None) for at in range(1, count + 1))


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
    with pytest.raises(ValueError, match=r"wanted at least one host|wanted a number"):
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
        (fleet(2), {"canary": ["gpu-9"]}, "canary is none of these hosts: gpu-9"),
        (fleet(2), {"canary": ["gpu-1", "gpu-1"]}, "canary named twice: gpu-1"),
        (fleet(2), {"growth": 0.5}, "growth: wanted 1 to 1000000, found 0.5"),
        (fleet(2), {"growth": float("nan")}, "growth: wanted 1 to 1000000, found nan"),
        (fleet(2), {"domains_at_once": 0}, "domains at once: wanted at least 1, found 0"),
    ],
    ids=["twice", "no-canary", "empty-canary", "unknown", "canary-twice", "shrinking", "nan", "no-domain"],
)
def test_a_wrong_plan_is_refused(hosts: tuple[RolloutHost, ...], options: dict[str, object], message: str) -> None:
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


def assert_within(started: Started, out: set[str], taken: set[str]) -> None:
    """Count independently of the code under test what is out of service together, now that some were taken.

    A domain that lost hosts by itself and had none taken breaks no limit.
    """
    touched = {host.domain for host in started.hosts if host.name in taken}
    gpu = {host.name: host.domain for host in started.hosts if host.has_gpus}
    missing = [name for name in out if name in gpu]
    limits = started.limits

    def allowed(limit: Limit, of: int) -> int:
        return max(1, of * limit.value // 100) if limit.is_percentage else limit.value

    assert len(missing) <= allowed(limits.unavailable, len(gpu))
    if limits.per_domain:
        for domain, down in Counter(gpu[name] for name in missing if gpu[name]).items():
            assert domain not in touched or down <= allowed(limits.per_domain, list(gpu.values()).count(domain))


@given(plans(most=60))
def test_every_host_is_in_exactly_one_wave_and_no_wave_exceeds_a_limit(started: Started) -> None:
    assert sorted(name for wave in started.waves for name in wave) == sorted(h.name for h in started.hosts)
    domain_of = {host.name: host.domain for host in started.hosts}
    for wave in started.waves:
        assert_within(started, set(wave), set(wave))
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
    """Be the fleet and the controllers' database; both outlive a controller.

    ``kills`` are the moments at which a controller dies, ``asks`` those at which someone asks for something.
    ``as_wanted`` are the hosts that serve the wanted digest before the rollout begins.
    """

    started: Started
    fails: dict[str, str]
    unreachable: set[str]
    kills: set[int]
    seed: int
    asks: dict[int, str] = field(default_factory=dict)
    as_wanted: frozenset[str] = frozenset()
    log: list[dict[str, object]] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)
    moment: int = 0
    known: int = 1
    wave: tuple[str, ...] = ()
    is_wave_bad: bool = False

    def __post_init__(self) -> None:
        self.order = random.Random(self.seed)
        self.machines = {
            h.name: Machine(dict.fromkeys(("driver", "environment"), "d1" if h.name in self.as_wanted else "d0"))
            for h in self.started.hosts
        }
        self.log.append(to_json(self.started))

    def live(self) -> None:
        """Let a moment pass, in which the controller may die or someone may ask for something."""
        self.moment += 1
        asked = self.asks.get(self.moment)
        if asked and not self.rollout().is_over:
            ask = AbortAsked(0.0, "ops") if asked == "abort" else PauseAsked(0.0, "ops")
            try:
                advance(self.rollout(), ask)
            except ValueError:
                assert asked == "pause"  # already pausing or aborting
            else:
                self.log.append(to_json(ask))
        if self.moment in self.kills:
            raise ControllerDied

    def rollout(self) -> Rollout:
        return replay(from_json(document) for document in self.log)

    def record(self, rollout: Rollout, transition: Transition) -> tuple[Rollout, bool]:
        """Record a transition unless something recorded meanwhile forbids it, as the history does."""
        self.live()
        if self.known != len(self.log):
            rollout, self.known = self.rollout(), len(self.log)
            try:
                advance(rollout, transition)
            except ValueError:
                return rollout, False
        after = advance(rollout, transition)
        self.log.append(to_json(transition))
        self.known = len(self.log)
        self.watch(transition)
        self.live()
        return after, True

    def watch(self, transition: Transition) -> None:
        """Check the rules of a rollout without asking the code under test."""
        match transition:
            case WaveOpened():
                out = {name for name, machine in self.machines.items() if machine.is_drained}
                taken = set(transition.hosts)
                assert not self.unreachable & taken
                assert_within(self.started, out | self.unreachable | taken, taken)
                self.wave, self.is_wave_bad = transition.hosts, False
            case StepBegun(step="cutover" | "drain" | "gate" as step):
                assert transition.host in self.wave
                is_as_wanted = transition.host in self.as_wanted and self.rollout().digest == self.started.digest
                assert not is_as_wanted, "disturbed for nothing"
                assert not self.is_wave_bad or (step == "gate" and "driver" in self.started.passes)
            case StepEnded(step="cutover" | "gate", is_ok=False):
                self.is_wave_bad = True

    def act(self, rollout: Rollout, do: Do) -> tuple[bool, str | None, bool]:
        """Do a step to a machine, and say whether it went well, why not, and whether it was lost."""
        machine, kind = self.machines[do.host], rollout.current_pass
        if do.host in self.unreachable:
            return False, "ssh: connection timed out", True
        is_well = self.fails.get(do.host) != do.step
        match do.step:
            case "drain":
                machine.is_drained = is_well
                out = {name for name, m in self.machines.items() if m.is_drained}
                assert_within(self.started, out, {do.host})
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
                rollout, _ = self.record(rollout, decision.record)
                continue
            if decision.must_observe and self.order.random() < 0.5:
                rollout, _ = self.record(rollout, Observed(now_s, tuple(sorted(self.unreachable))))
                continue
            choices = [("begin", do) for do in decision.do] + [("end", do) for do in under_way]
            if not choices and decision.must_observe:
                continue
            if not choices:
                return rollout
            what, do = self.order.choice(choices)
            if what == "begin":
                rollout, has_begun = self.record(rollout, StepBegun(now_s, do.host, do.step))
                under_way += [do] if has_begun else []
                continue
            under_way.remove(do)
            now_s = max(now_s, do.not_before_s)
            self.live()
            is_ok, why, is_lost = self.act(rollout, do)
            serving = self.machines[do.host].serving[rollout.current_pass]
            is_as_wanted = do.step == "prepare" and serving == rollout.digest
            ended = StepEnded(now_s, do.host, do.step, is_ok, why, is_lost, is_as_wanted)
            rollout, has_ended = self.record(rollout, ended)
            assert has_ended

    def run(self, digest: str = "d1") -> Rollout:
        """Start controllers, each after the last one died, until one of them comes to an end."""
        while True:
            try:
                rollout, self.known = self.rollout(), len(self.log)
                if rollout.is_over:
                    return rollout
                if len(self.log) > 1:
                    rollout, _ = self.record(rollout, Resumed(0.0, "ops@ctl", digest))
                return self.drive(rollout)
            except ControllerDied:
                continue

    def check(self, rollout: Rollout, wanted: str = "d1") -> None:
        """Check that the end of a rollout is what it says it is."""
        assert rollout == self.rollout()
        for name, machine in self.machines.items():
            assert len(machine.switches) == len(set(machine.switches)), "switched twice"
            phase = rollout.states[name].phase
            assert phase in ("waiting", "prepared", "done", "unprepared", "skipped", "reverted", "stuck")
            if phase != "stuck":
                assert not machine.is_drained
                is_there = machine.serving[rollout.current_pass] == wanted
                # One that served it before may have failed to be prepared.
                assert is_there == (phase == "done") or (is_there and name in self.as_wanted)
                assert (wanted in machine.pins) == (phase == "reverted")
        if self.is_wave_bad and rollout.current_pass == "environment":
            assert {rollout.states[name].phase for name in self.wave} <= {
                "reverted", "stuck", "prepared", "skipped",
            }  # fmt: skip
        if rollout.status == "done":
            assert {state.phase for state in rollout.states.values()} == {"done"}


STEPS = ["prepare", "drain", "cutover", "gate", "rollback", "undrain"]


@st.composite
def worlds(draw: st.DrawFn, asks: tuple[str, ...] = ()) -> World:
    started = draw(plans(most=12))
    names = [host.name for host in started.hosts]
    return World(
        started,
        fails=draw(st.dictionaries(st.sampled_from(names), st.sampled_from(STEPS), max_size=3)),
        unreachable=draw(st.sets(st.sampled_from(names), max_size=2)),
        kills=draw(st.sets(st.integers(1, 200), max_size=12)),
        seed=draw(st.integers(0, 2**16)),
        asks=draw(st.dictionaries(st.integers(1, 150), st.sampled_from(asks), max_size=4)) if asks else {},
        as_wanted=draw(st.frozensets(st.sampled_from(names), max_size=4)),
    )


simulated = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@simulated
@given(worlds())
def test_no_crash_loses_a_host_and_no_wave_exceeds_a_limit(world: World) -> None:
    rollout = world.run()
    world.check(rollout)
    assert rollout.status in ("done", "halted")
    if not world.fails and not world.unreachable:
        assert rollout.is_complete


@simulated
@given(worlds(asks=("pause", "abort")))
def test_whoever_pauses_or_aborts_finds_every_host_in_service(world: World) -> None:
    rollout = world.run()
    world.check(rollout)
    assert rollout.is_over
    assert rollout.status != "aborted" or "abort" in world.asks.values()
    while rollout.status == "paused":
        world.log.append(to_json(Resumed(0.0, "ops", "d1")))
        rollout = world.run()
        world.check(rollout)
    if not world.fails and not world.unreachable and "abort" not in world.asks.values():
        assert rollout.is_complete


@simulated
@given(worlds())
def test_a_changed_stack_goes_to_every_host_with_the_canary_first(world: World) -> None:
    rollout = world.run()
    if rollout.status != "halted":
        return
    world.fails.clear()
    world.unreachable.clear()
    first = rollout.stuck or set(world.started.waves[0])
    world.log.append(to_json(Resumed(0.0, "ops", "d2")))
    before = len(world.log)
    rollout = world.run("d2")
    world.check(rollout, "d2")
    assert rollout.is_complete
    opened = [from_json(document) for document in world.log[before:]]
    assert next(t for t in opened if isinstance(t, WaveOpened)).hosts[0] in first


@simulated
@given(worlds(), st.integers(1, 150))
def test_a_stack_changed_in_the_middle_of_a_wave_undoes_that_wave_first(world: World, at: int) -> None:
    world.fails.clear()
    world.unreachable.clear()
    world.kills = {at}
    try:
        rollout, world.known = world.drive(world.rollout()), len(world.log)
    except ControllerDied:
        rollout = world.rollout()
    while not rollout.is_complete:
        world.log.append(to_json(Resumed(0.0, "ops", "d2")))
        rollout = world.run("d2") if not world.rollout().is_over else world.rollout()
        assert rollout.status == "done" or rollout.halt == "the stack was changed while a wave was open"
        if rollout.digest == "d1":
            assert rollout.status == "done" or all(not m.is_drained for m in world.machines.values())
    assert {machine.serving["environment"] for machine in world.machines.values()} <= {"d1", "d2"}


# -------------------------------------------------------------------------------------------- one story each


def begin(hosts: int = 4, *, canary: int = 1, limit: int = 2, passes: tuple[str, ...] = ("environment",)) -> Rollout:
    names = fleet(hosts)
    waves = plan_waves(names, canary, 2, Limit(limit))
    return replay([Started(0.0, "r1", "lab", "d1", names, waves, Limits(Limit(limit)), passes)])  # type: ignore[arg-type]


def did(rollout: Rollout, host: str, step: str, is_ok: bool = True, why: str | None = None) -> Rollout:
    begun = advance(rollout, StepBegun(1.0, host, step))  # type: ignore[arg-type]
    return advance(begun, StepEnded(2.0, host, step, is_ok, why))  # type: ignore[arg-type]


def prepared(rollout: Rollout) -> Rollout:
    for do in decide(rollout, 0.0).do:
        rollout = did(rollout, do.host, "prepare")
    return rollout


def opened(rollout: Rollout) -> Rollout:
    rollout = advance(rollout, Observed(3.0))
    record = decide(rollout, 4.0).record
    assert isinstance(record, WaveOpened)
    return advance(rollout, record)


def wave_done(rollout: Rollout) -> Rollout:
    rollout = opened(rollout)
    for step in ("drain", "cutover", "gate", "undrain"):
        for name in rollout.wave:
            rollout = did(rollout, name, step)
    return rollout


def test_one_rollout_from_start_to_end() -> None:
    rollout = begin(4, limit=2)
    assert rollout.waves == (("gpu-1",), ("gpu-2", "gpu-3"), ("gpu-4",))
    assert decide(rollout, 0.0).do == tuple(Do(f"gpu-{at}", "prepare") for at in (1, 2, 3, 4))
    rollout = prepared(rollout)
    assert decide(rollout, 5.0).must_observe
    rollout = advance(rollout, Observed(6.0))
    assert decide(rollout, 7.0).record == WaveOpened(7.0, ("gpu-1",))
    rollout = wave_done(wave_done(wave_done(rollout)))
    assert rollout.status == "done"
    assert rollout.is_complete
    assert decide(rollout, 9.0).do == ()


def test_a_wave_opens_while_hosts_of_later_waves_are_still_being_prepared() -> None:
    rollout = did(begin(4), "gpu-1", "prepare")
    rollout = advance(rollout, StepBegun(1.0, "gpu-2", "prepare"))
    rollout = opened(rollout)
    assert rollout.wave == ("gpu-1",)
    assert decide(rollout, 5.0).do == (Do("gpu-1", "drain"), Do("gpu-3", "prepare"), Do("gpu-4", "prepare"))


def test_the_gate_waits_for_the_soak() -> None:
    hosts = fleet(1)
    rollout = replay([Started(0.0, "r", "lab", "d", hosts, (("gpu-1",),), Limits(Limit(1)), soak_s=600.0)])
    rollout = opened(did(rollout, "gpu-1", "prepare"))
    rollout = did(did(rollout, "gpu-1", "drain"), "gpu-1", "cutover")
    assert decide(rollout, 3.0).do == (Do("gpu-1", "gate", not_before_s=602.0),)


def test_a_wave_is_put_back_into_service_only_as_a_whole() -> None:
    rollout = opened(wave_done(prepared(begin(4))))
    assert rollout.wave == ("gpu-2", "gpu-3")
    for step in ("drain", "cutover", "gate"):
        rollout = did(rollout, "gpu-2", step)
    assert decide(rollout, 5.0).do == (Do("gpu-3", "drain"),)
    rollout = did(did(rollout, "gpu-3", "drain"), "gpu-3", "cutover", False, "restart of app.service failed")
    assert decide(rollout, 6.0).do == (Do("gpu-2", "rollback"), Do("gpu-3", "rollback"))


def test_a_failed_gate_undoes_the_wave_and_leaves_the_rest_alone() -> None:
    rollout = opened(prepared(begin(6)))
    rollout = did(did(rollout, "gpu-1", "drain"), "gpu-1", "cutover")
    rollout = did(rollout, "gpu-1", "gate", False, "not verified")
    assert rollout.unavailable == {"gpu-1"}
    rollout = did(did(rollout, "gpu-1", "rollback"), "gpu-1", "undrain")
    assert rollout.status == "halted"
    assert rollout.halt == "gpu-1: gate failed: not verified"
    assert rollout.states["gpu-1"].phase == "reverted"
    assert rollout.states["gpu-1"].why == "not verified"
    assert {rollout.states[f"gpu-{at}"].phase for at in range(2, 7)} == {"prepared"}
    assert rollout.failed == ("gpu-1",)
    assert rollout.unavailable == frozenset()
    assert rollout.resume_refusal("d1") == (
        "digest d1 was rolled back and is pinned on gpu-1: change the stack, or unpin it"
    )
    assert rollout.resume_refusal("d1", is_unpinned=True) is None
    assert rollout.resume_refusal("d2") is None


def test_a_driver_is_not_rolled_back() -> None:
    rollout = opened(prepared(begin(4, canary=2, passes=("driver", "environment"))))
    rollout = did(did(rollout, "gpu-1", "drain"), "gpu-1", "cutover", False, "no module for the kernel")
    assert rollout.states["gpu-1"].phase == "stuck"
    assert rollout.status == "halted"
    assert rollout.unavailable == {"gpu-1"}
    assert rollout.pinned == frozenset()


def test_the_driver_reaches_every_host_before_the_environment_does() -> None:
    rollout = begin(2, passes=("driver", "environment"))
    rollout = wave_done(wave_done(prepared(rollout)))
    assert (rollout.current_pass, rollout.wave_number) == ("environment", 0)
    rollout = wave_done(wave_done(prepared(rollout)))
    assert rollout.is_complete


def test_a_drain_that_fails_stops_the_rollout_and_changes_nothing_on_its_host() -> None:
    rollout = opened(prepared(begin(4, canary=2)))
    rollout = did(rollout, "gpu-1", "drain", False, "not drained within 900 s")
    for step in ("drain", "cutover", "gate"):
        rollout = did(rollout, "gpu-2", step)
    rollout = did(did(rollout, "gpu-1", "undrain"), "gpu-2", "undrain")
    assert rollout.status == "halted"
    assert rollout.halt == "gpu-1: drain failed: not drained within 900 s"
    assert [rollout.states[name].phase for name in ("gpu-1", "gpu-2")] == ["skipped", "done"]
    assert rollout.resume_refusal("d1") is None


@pytest.mark.parametrize(
    ("unprepared", "expected"),
    [
        (["gpu-1"], "the canary could not be prepared: gpu-1 (no space)"),
        (
            ["gpu-2", "gpu-4", "gpu-5"],
            "3 hosts could not be prepared, more than the 2 that may be unavailable: gpu-2 (no space), "
            "gpu-4 (no space), gpu-5 (no space)",
        ),
        (["gpu-2", "gpu-4"], None),
    ],
    ids=["canary", "too-many", "few"],
)
def test_a_stack_that_cannot_be_prepared_reaches_no_host(unprepared: list[str], expected: str | None) -> None:
    rollout = begin(6)
    for at in range(1, 7):
        name = f"gpu-{at}"
        rollout = did(rollout, name, "prepare", name not in unprepared, "no space" if name in unprepared else None)
    rollout = advance(rollout, Observed(5.0))
    record = decide(rollout, 6.0).record
    assert record == (Halted(6.0, expected) if expected else WaveOpened(6.0, ("gpu-1",)))


@pytest.mark.parametrize(
    ("unreachable", "expected"),
    [
        (["gpu-5"], WaveOpened(6.0, ("gpu-1",))),
        (
            ["gpu-5", "gpu-6"],
            Halted(
                6.0,
                "no host may be taken out of service: 2 of 6 GPU hosts are unavailable, 2 may be: gpu-5, gpu-6",
            ),
        ),
        (["gpu-1"], Halted(6.0, "the canary could not be prepared: gpu-1 (did not answer)")),
    ],
    ids=["room-left", "no-room", "canary-gone"],
)
def test_hosts_that_do_not_answer_count_as_failed(unreachable: list[str], expected: object) -> None:
    rollout = advance(prepared(begin(6)), Observed(5.0, tuple(unreachable)))
    assert decide(rollout, 6.0).record == expected


def test_hosts_that_were_left_behind_halt_the_rollout_at_its_end_and_are_tried_again() -> None:
    rollout = begin(4)
    for name in ("gpu-1", "gpu-2", "gpu-3", "gpu-4"):
        rollout = did(rollout, name, "prepare", name != "gpu-3", "no space" if name == "gpu-3" else None)
    rollout = wave_done(wave_done(wave_done(rollout)))
    assert rollout.status == "halted"
    assert rollout.halt == "1 of 4 hosts could not be brought to the stack: gpu-3 (no space)"
    rollout = advance(rollout, Resumed(9.0, "ops", "d1"))
    assert decide(rollout, 10.0).do == (Do("gpu-3", "prepare"),)
    assert wave_done(prepared(rollout)).is_complete


def test_a_canary_of_which_no_host_could_be_prepared_stops_everything() -> None:
    rollout = begin(3)
    for name in ("gpu-1", "gpu-2", "gpu-3"):
        rollout = did(rollout, name, "prepare", False, "no space")
    assert decide(rollout, 6.0).record == Halted(6.0, "the canary could not be prepared: gpu-1 (no space)")


def test_a_rack_without_room_is_passed_over_and_named_at_the_end() -> None:
    hosts = fleet(6, racks=2)
    limits = Limits(Limit(4), per_domain=Limit(1))
    waves = plan_waves(hosts, 1, 1, limits.unavailable, per_domain=limits.per_domain)
    assert waves == (("gpu-1",), ("gpu-2",), ("gpu-3",), ("gpu-4",), ("gpu-5",), ("gpu-6",))
    rollout = prepared(replay([Started(0.0, "r1", "lab", "d1", hosts, waves, limits)]))
    taken = []
    while not rollout.is_over:
        rollout = advance(rollout, Observed(5.0, ("gpu-4",)))
        record = decide(rollout, 6.0).record
        assert record is not None
        rollout = advance(rollout, record)
        taken += rollout.wave
        for step in ("drain", "cutover", "gate", "undrain"):
            for name in rollout.wave:
                rollout = did(rollout, name, step)
    assert taken == ["gpu-1", "gpu-3", "gpu-5"]
    assert rollout.halt == (
        "2 hosts (gpu-2 and more) may not be taken out of service: too many of rack-0 are unavailable: gpu-4"
    )


def test_nothing_passes_the_canary_over() -> None:
    hosts = fleet(4, racks=2)
    limits = Limits(Limit(4), per_domain=Limit(1))
    rollout = prepared(
        replay([Started(0.0, "r1", "lab", "d1", hosts, (("gpu-1",), ("gpu-2", "gpu-3"), ("gpu-4",)), limits)])
    )
    rollout = advance(rollout, Observed(5.0, ("gpu-3",)))
    assert decide(rollout, 6.0).record == Halted(
        6.0,
        "3 hosts (gpu-1 and more) may not be taken out of service: too many of rack-0, rack-1 are unavailable: gpu-3",
    )


def test_a_host_that_vanished_after_its_wave_keeps_the_rollout_from_being_complete() -> None:
    rollout = wave_done(prepared(begin(2)))
    rollout = advance(rollout, Observed(5.0, ("gpu-1",)))
    record = decide(rollout, 6.0).record
    assert isinstance(record, WaveOpened)
    rollout = advance(rollout, record)
    for step in ("drain", "cutover", "gate", "undrain"):
        rollout = did(rollout, "gpu-2", step)
    assert (rollout.status, rollout.failed, rollout.is_complete) == ("done", ("gpu-1",), False)


def test_a_wave_shrinks_to_the_room_that_is_left() -> None:
    rollout = wave_done(prepared(begin(6)))
    rollout = advance(rollout, Observed(5.0, ("gpu-6",)))
    record = decide(rollout, 6.0).record
    assert record == WaveOpened(6.0, ("gpu-2",))
    rollout = advance(rollout, record)
    for step in ("drain", "cutover", "gate", "undrain"):
        rollout = did(rollout, "gpu-2", step)
    assert decide(advance(rollout, Observed(7.0)), 8.0).record == WaveOpened(8.0, ("gpu-3",))


@pytest.mark.parametrize(
    ("wave", "message"),
    [
        (("gpu-1", "gpu-2", "gpu-3"), "gpu-3 would exceed the limits of rollout r1"),
        (("gpu-4",), "gpu-4 is not ready for wave 1"),
        ((), "no wave may open now"),
    ],
    ids=["too-many", "not-planned-yet", "empty"],
)
def test_a_wave_beyond_the_limits_cannot_even_be_recorded(wave: tuple[str, ...], message: str) -> None:
    hosts = fleet(4)
    waves = (("gpu-1", "gpu-2", "gpu-3"), ("gpu-4",))
    rollout = prepared(replay([Started(0.0, "r1", "lab", "d1", hosts, waves, Limits(Limit(2)))]))
    with pytest.raises(ValueError, match=message):
        advance(advance(rollout, Observed(5.0)), WaveOpened(6.0, wave))


@pytest.mark.parametrize(
    ("transition", "message"),
    [
        (StepBegun(1.0, "gpu-1", "cutover"), "gpu-1: cutover cannot begin, prepare is next"),
        (StepEnded(1.0, "gpu-1", "drain", True), "gpu-1: drain cannot end, nothing is under way"),
        (StepBegun(1.0, "gpu-9", "prepare"), "gpu-9 is not in this rollout"),
        (WaveOpened(1.0, ("gpu-1",)), "no wave may open now"),
        (Resumed(1.0, "ops", "d1", without=("gpu-9",)), "cannot go on without gpu-9"),
        (Resumed(1.0, "ops", "d1", without=("gpu-1", "gpu-2")), "cannot go on without gpu-1, gpu-2"),
        (Started(1.0, "r1", "lab", "d1", fleet(1), (("gpu-1",),), Limits(Limit(1))), "has already started"),
    ],
    ids=["too-early", "not-begun", "stranger", "not-observed", "stranger-out", "all-out", "twice"],
)
def test_what_cannot_have_happened_is_refused(transition: Transition, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advance(begin(2), transition)


@pytest.mark.parametrize(("asked", "status"), [(PauseAsked(1.0, "ops"), "paused"), (AbortAsked(1.0, "ops"), "aborted")])
def test_between_waves_a_request_takes_effect_at_once(asked: Transition, status: str) -> None:
    rollout = advance(wave_done(prepared(begin(4))), asked)
    assert rollout.status == status
    assert decide(rollout, 2.0).do == ()


def test_an_abort_puts_back_what_was_not_cut_over_and_finishes_the_rest() -> None:
    rollout = opened(prepared(begin(3, canary=3, limit=3)))
    rollout = did(did(rollout, "gpu-1", "drain"), "gpu-1", "cutover")
    rollout = did(rollout, "gpu-2", "drain")
    rollout = advance(rollout, AbortAsked(5.0, "ops"))
    assert decide(rollout, 6.0).do == (Do("gpu-1", "gate", 2.0), Do("gpu-2", "undrain"))
    rollout = did(did(did(rollout, "gpu-1", "gate"), "gpu-2", "undrain"), "gpu-1", "undrain")
    assert rollout.status == "aborted"
    assert [rollout.states[f"gpu-{at}"].phase for at in (1, 2, 3)] == ["done", "prepared", "prepared"]
    assert rollout.resume_refusal("d1") == "rollout r1 is aborted"


def test_a_host_left_out_of_service_counts_until_it_is_back() -> None:
    rollout = opened(prepared(begin(4, limit=1)))
    for step, is_ok in (("drain", True), ("cutover", False), ("rollback", False)):
        rollout = did(rollout, "gpu-1", step, is_ok, None if is_ok else "disk is read-only")
    assert (rollout.status, rollout.unavailable) == ("halted", {"gpu-1"})
    rollout = prepared(advance(rollout, Resumed(9.0, "ops", "d2")))
    assert rollout.unavailable == {"gpu-1"}
    # It takes no room, being out already, and is therefore tried first.
    rollout = opened(rollout)
    assert rollout.wave == ("gpu-1",)


@pytest.mark.parametrize(
    ("is_out", "phase", "waves"),
    [(False, "done", [("gpu-1", "gpu-3")]), (True, "prepared", [("gpu-2",)])],
    ids=["in-service", "left-out-of-service"],
)
def test_a_host_that_is_as_wanted_is_not_drained_but_put_back(
    is_out: bool, phase: str, waves: list[tuple[str, ...]]
) -> None:
    rollout = replace(begin(4, canary=3, limit=4), stuck=frozenset({"gpu-2"} if is_out else ()))
    rollout = advance(advance(rollout, Halted(0.4, "stopped")), Resumed(0.5, "ops", "d1"))
    for name in ("gpu-1", "gpu-2", "gpu-3", "gpu-4"):
        rollout = advance(rollout, StepBegun(1.0, name, "prepare"))
        rollout = advance(rollout, StepEnded(2.0, name, "prepare", True, is_as_wanted=name == "gpu-2"))
    assert rollout.states["gpu-2"].phase == phase
    assert [opened(rollout).wave] == waves


def test_where_the_canary_was_as_wanted_the_first_wave_is_no_larger_than_a_canary() -> None:
    rollout = begin(8, canary=1, limit=8)
    assert [len(wave) for wave in rollout.waves] == [1, 2, 4, 1]
    for at in range(1, 9):
        rollout = advance(rollout, StepBegun(1.0, f"gpu-{at}", "prepare"))
        rollout = advance(rollout, StepEnded(2.0, f"gpu-{at}", "prepare", True, is_as_wanted=at <= 3))
    waves = []
    while not rollout.is_over:
        rollout = opened(rollout)
        waves.append(rollout.wave)
        for step in ("drain", "cutover", "gate", "undrain"):
            for name in waves[-1]:
                rollout = did(rollout, name, step)
    assert waves == [("gpu-4",), ("gpu-5", "gpu-6", "gpu-7"), ("gpu-8",)]


def test_hosts_without_gpus_that_cannot_be_prepared_do_not_stop_the_others() -> None:
    hosts = (*fleet(4), *(RolloutHost(f"login-{at}", has_gpus=False) for at in range(3)))
    waves, limits = plan_waves(hosts, 1, 2, Limit(1)), Limits(Limit(1))
    rollout = replay([Started(0.0, "r1", "lab", "d1", hosts, waves, limits)])
    for host in hosts:
        rollout = did(rollout, host.name, "prepare", is_ok=host.has_gpus)
    rollout = wave_done(rollout)
    assert rollout.states["gpu-1"].phase == "done"
    rollout = advance(rollout, Observed(5.0, ("gpu-2", "login-0", "login-1")))
    told = decide(rollout, 6.0).record
    assert isinstance(told, Halted)
    assert told.why == (
        "no host may be taken out of service: 1 of 4 GPU hosts are unavailable, 1 may be: gpu-2 (did not answer)"
    )


def test_a_host_that_stays_broken_can_be_left_out() -> None:
    rollout = opened(prepared(begin(4, limit=1)))
    for step, is_ok in (("drain", True), ("cutover", False), ("rollback", False)):
        rollout = did(rollout, "gpu-1", step, is_ok)
    rollout = prepared(advance(rollout, Resumed(9.0, "ops", "d1", without=("gpu-1",))))
    assert rollout.waves == (("gpu-2",), ("gpu-3",), ("gpu-4",))
    rollout = wave_done(wave_done(wave_done(rollout)))
    assert rollout.is_complete


def test_a_cutover_in_doubt_is_inspected_and_not_repeated() -> None:
    rollout = did(opened(prepared(begin(2))), "gpu-1", "drain")
    rollout = advance(rollout, StepBegun(5.0, "gpu-1", "cutover"))
    rollout = advance(rollout, Resumed(6.0, "ops", "d1"))
    assert decide(rollout, 7.0).do == (Do("gpu-1", "inspect"),)
    assert decide(did(rollout, "gpu-1", "inspect", True), 8.0).do == (Do("gpu-1", "gate", 2.0),)
    assert decide(did(rollout, "gpu-1", "inspect", False), 8.0).do == (Do("gpu-1", "cutover"),)


def test_a_drain_in_doubt_is_undone_when_the_wave_stops() -> None:
    rollout = opened(prepared(begin(3, canary=2)))
    rollout = advance(rollout, StepBegun(5.0, "gpu-1", "drain"))
    rollout = advance(rollout, Resumed(6.0, "ops", "d1"))
    assert decide(rollout, 7.0).do == (Do("gpu-1", "drain"), Do("gpu-2", "drain"))
    rollout = advance(rollout, AbortAsked(8.0, "ops"))
    assert decide(rollout, 9.0).do == (Do("gpu-1", "undrain"),)
    assert did(rollout, "gpu-1", "undrain").status == "aborted"


@given(worlds())
@settings(max_examples=30, deadline=None)
def test_transitions_survive_json(world: World) -> None:
    world.run()
    assert [to_json(from_json(document)) for document in world.log] == world.log


# ---------------------------------------------------------------------------------------------------- gates

KEY_REST = ("NVLink4", "2.27.7", "NVLS", 2**30)
KEY = BandwidthKey("NVIDIA H200", 8, *KEY_REST)


def at(*values: float, key: BandwidthKey = KEY) -> tuple[Bandwidth, ...]:
    return tuple(Bandwidth(key, value, "pass") for value in values)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([464.0], 464.0 * 0.97),
        ([460.0, 464.0, 468.0], 464.0 - 16.0),
        ([100.0, 100.0, 100.0, 100.0, 20.0], 97.0),
    ],
    ids=["one-value", "spread-wins", "an-outlier-counts-for-little"],
)
def test_the_lowest_accepted_bandwidth(known: list[float], expected: float) -> None:
    assert lowest_accepted(known) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("evidence", "failed"),
    [
        (GateEvidence(True), {}),
        (GateEvidence(True, measured=at(464), own=at(463), fleet=at(460, 462, 464, 466, 468)), {}),
        (GateEvidence(False, why_not="verified before this boot"), {"verified": "verified before this boot"}),
        (
            GateEvidence(True, measured=(Bandwidth(KEY, 334.0, "fail"),)),
            {"limit table": "334.0 GB/s at 1073741824 bytes over 8 GPUs is below the limit"},
        ),
        (
            GateEvidence(True, measured=at(440), own=at(464)),
            {"own record": "440.0 GB/s at 1073741824 bytes over 8 GPUs, wanted at least 450.1 (median 464.0)"},
        ),
        (
            GateEvidence(True, measured=at(440), fleet=at(463, 464, 464, 464, 465)),
            {"fleet": "440.0 GB/s at 1073741824 bytes over 8 GPUs, wanted at least 450.1 (median 464.0)"},
        ),
        (GateEvidence(True, measured=at(440), fleet=at(464, 464, 464, 464)), {}),
        (GateEvidence(True, measured=at(500), own=at(464), fleet=at(464, 464, 464, 464, 464)), {}),
        (GateEvidence(True, measured=at(440), own=at(464, key=BandwidthKey("NVIDIA H200", 4, *KEY_REST))), {}),
        (
            GateEvidence(True, findings_before=frozenset({"BU-FAB-001"}), findings=frozenset({"BU-FAB-001"})),
            {},
        ),
        (
            GateEvidence(True, findings=frozenset({"BU-VFY-003", "BU-FAB-001"})),
            {"findings": "new since the cutover: BU-FAB-001, BU-VFY-003"},
        ),
        (GateEvidence(True, findings=frozenset({"BU-ENV-004"})), {}),
        (GateEvidence(True, soak_s=600, soaked_s=599), {"soak": "watched for 599 s of 600 s"}),
    ],
    ids=[
        "nothing-measured",
        "all-well",
        "not-verified",
        "below-the-table",
        "below-own-record",
        "below-the-fleet",
        "four-hosts-are-no-fleet",
        "faster-is-fine",
        "another-gpu-count-is-not-compared",
        "known-finding",
        "new-finding",
        "services-that-run-on",
        "soak-not-over",
    ],
)
def test_a_gate(evidence: GateEvidence, failed: dict[str, str]) -> None:
    verdict = judge_gate(evidence)
    assert {check.name: check.why for check in verdict.checks if check.outcome == "fail"} == failed
    assert verdict.is_passed == (not failed)
    assert verdict.why == ("; ".join(f"{name}: {why}" for name, why in failed.items()) or None)


def test_what_is_not_known_compares_with_nothing() -> None:
    key = BandwidthKey("NVIDIA H200", 8, "NVLink4", None, "NVLS", 2**30)
    verdict = judge_gate(GateEvidence(True, measured=at(10, key=key), own=at(464, key=key)), Deviation())
    assert [check.outcome for check in verdict.checks if check.name == "own record"] == ["not_run"]
