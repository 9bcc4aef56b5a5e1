"""Conducting a rollout: what is begun is recorded first, and a conductor that dies is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from sqlalchemy import update

from bringup.commands.conductor import Conductor, Looked, Outcome
from bringup.commands.crew import EngineCrew, Hook
from bringup.commands.rollout import conduct
from bringup.errors import BringupError, InputError
from bringup.history import (
    History,
    RolloutLog,
    list_rollouts,
    list_waves,
    open_rollout,
    rollout_subject,
    start_rollout,
    take_lease,
)
from bringup.history.tables import OwnerRow
from bringup.rollout import (
    Limit,
    Limits,
    PauseAsked,
    Resumed,
    Rollout,
    RolloutHost,
    Started,
    Step,
    StepBegun,
    StepEnded,
    Transition,
    plan_waves,
)


class Died(Exception):
    """The controller is gone."""


@dataclass
class Machines:
    """Be hosts that outlive every controller: what each serves, and how often it was switched to what."""

    fails: dict[str, Step] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    serving: dict[str, str] = field(default_factory=dict)
    as_wanted: tuple[str, ...] = ()
    switched: list[tuple[str, str]] = field(default_factory=list)
    drained: set[str] = field(default_factory=set)
    most_drained: int = 0


@dataclass
class ScriptedCrew:
    """Do steps on machines at once; die at the ``dies_at``-th of them, before or after it took effect."""

    machines: Machines
    dies_at: int | None = None
    dies_after: bool = False
    count: int = 0
    on_step: Callable[[Step, str], None] = lambda _step, _host: None
    is_stopped: bool = False
    _ended: list[Outcome | Looked] = field(default_factory=list)

    def room(self, step: Step) -> bool:
        return True

    def begin(self, rollout: Rollout, step: Step, hosts: Sequence[str]) -> None:
        for host in hosts:
            self.count += 1
            is_last = self.count == self.dies_at
            if is_last and not self.dies_after:
                raise Died
            self._ended.append(self._do(rollout, step, host))
            if is_last:
                raise Died
            self.on_step(step, host)

    def _do(self, rollout: Rollout, step: Step, host: str) -> Outcome:
        on = self.machines
        if host in on.missing:
            return Outcome(host, step, False, "ssh: timed out", is_unreachable=True)
        if on.fails.get(host) == step:
            return Outcome(host, step, False, f"{step} failed")
        match step:
            case "drain":
                on.drained.add(host)
                on.most_drained = max(on.most_drained, len(on.drained))
            case "undrain":
                on.drained.discard(host)
            case "inspect":
                return Outcome(host, step, on.serving.get(host) == rollout.digest)
            case "cutover":
                on.serving[host] = rollout.digest
                on.switched.append((host, rollout.digest))
            case "rollback":
                on.serving.pop(host, None)
        return Outcome(host, step, True, is_as_wanted=step == "prepare" and host in on.as_wanted)

    def look(self, rollout: Rollout) -> None:
        self._ended.append(Looked(self.machines.missing))

    def outcomes(self, timeout_s: float) -> Iterable[Outcome | Looked]:
        found, self._ended = self._ended, []
        return found

    def stop(self) -> None:
        self.is_stopped = True


HOSTS = tuple(RolloutHost(f"gpu-{at}") for at in range(1, 5))
LIMIT = Limit(2)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History.open(f"sqlite:///{tmp_path / 'history.db'}")
    yield history
    history.close()


def begun(history: History, soak_s: float = 0.0) -> RolloutLog:
    waves = plan_waves(HOSTS, 1, 2, LIMIT)
    return start_rollout(history, Started(0.0, "ro1", "lab", "d1", HOSTS, waves, Limits(LIMIT), soak_s=soak_s), "i")


def drive(history: History, crew: ScriptedCrew, resumed: Resumed | None = None) -> Rollout:
    return conduct(history, open_rollout(history, "ro1"), lambda: crew, lambda _t, _s: None, resumed=resumed)


def again(digest: str = "d1") -> Resumed:
    return Resumed(1.0, "ops", digest)


def test_a_rollout_from_start_to_end(history: History) -> None:
    begun(history)
    told: list[Transition] = []
    crew = ScriptedCrew(Machines())
    end = conduct(history, open_rollout(history, "ro1"), lambda: crew, lambda t, _s: told.append(t), resumed=None)
    assert end.is_complete
    assert crew.is_stopped
    assert sorted(crew.machines.switched) == [(host.name, "d1") for host in HOSTS]
    assert crew.machines.most_drained == 2
    assert [wave.outcome for wave in list_waves(history, "ro1")] == ["done", "done", "done"]
    assert [record.driven_by for record in list_rollouts(history)] == [None]
    steps = [t for t in told if isinstance(t, StepBegun | StepEnded)]
    assert len(steps) == 2 * 5 * len(HOSTS)


def test_a_turn_over_thousands_that_wait_to_be_prepared_is_cheap(history: History) -> None:
    hosts = tuple(RolloutHost(f"gpu-{at}") for at in range(5_000))
    waves = plan_waves(hosts, 1, 2, Limit(25, is_percentage=True))
    log = start_rollout(history, Started(0.0, "ro1", "lab", "d1", hosts, waves, Limits(LIMIT)), "i")

    @dataclass
    class Full(ScriptedCrew):
        def room(self, step: Step) -> bool:
            return False

        def outcomes(self, timeout_s: float) -> Iterable[Outcome | Looked]:
            if self.count == 20:
                raise Died
            self.count += 1
            return []

    lease = take_lease(history, rollout_subject("ro1"), "ops")
    before_s = time.process_time()
    with pytest.raises(Died):
        Conductor(log, lease, Full(Machines())).run()
    assert time.process_time() - before_s < 2.0  # 0.03 s a turn; looking every host up in every wave takes 0.13 s


def test_hosts_that_are_as_wanted_are_neither_drained_nor_switched(history: History) -> None:
    begun(history)
    machines = Machines(as_wanted=("gpu-1", "gpu-3"))
    drained: list[str] = []
    crew = ScriptedCrew(machines, on_step=lambda step, host: drained.append(host) if step == "drain" else None)
    assert drive(history, crew).is_complete
    assert machines.switched == [("gpu-2", "d1"), ("gpu-4", "d1")]
    assert drained == ["gpu-2", "gpu-4"]


def test_every_step_is_on_disk_before_its_host_is_touched(history: History) -> None:
    begun(history)
    seen: list[Step | None] = []

    def look_from_outside(step: Step, host: str) -> None:
        seen.append(open_rollout(history, "ro1").rollout.states[host].doing)
        assert seen[-1] == step

    drive(history, ScriptedCrew(Machines(), on_step=look_from_outside))
    assert len(seen) == 5 * len(HOSTS)


def test_a_canary_that_fails_its_gate_leaves_the_others_untouched(history: History) -> None:
    begun(history)
    crew = ScriptedCrew(Machines(fails={"gpu-1": "gate"}))
    end = drive(history, crew)
    assert (end.status, end.halt) == ("halted", "gpu-1: gate failed: gate failed")
    assert crew.machines.switched == [("gpu-1", "d1")]
    assert crew.machines.serving == {}
    assert crew.machines.drained == set()
    with pytest.raises(InputError, match="cannot go on") as caught:
        drive(history, crew, again())
    assert caught.value.why == "digest d1 was rolled back and is pinned on gpu-1: change the stack, or unpin it"
    crew.machines.fails.clear()
    assert drive(history, ScriptedCrew(crew.machines), again("d2")).is_complete
    assert crew.machines.serving == {host.name: "d2" for host in HOSTS}


# A whole rollout over four hosts takes 20 steps.
@pytest.mark.parametrize("dies_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dies_at", range(1, 21))
def test_wherever_a_conductor_dies_its_successor_finishes(history: History, dies_at: int, dies_after: bool) -> None:
    begun(history)
    machines = Machines()
    with pytest.raises(Died):
        drive(history, ScriptedCrew(machines, dies_at, dies_after))
    end = drive(history, ScriptedCrew(machines), again())
    assert end.is_complete
    assert sorted(machines.switched) == [(host.name, "d1") for host in HOSTS]
    assert machines.drained == set()
    assert machines.most_drained <= 2
    assert [record.driven_by for record in list_rollouts(history)] == [None]


def test_a_stack_changed_after_a_crash_in_a_wave_goes_on_by_itself(history: History) -> None:
    begun(history)
    machines = Machines()
    with pytest.raises(Died):
        drive(history, ScriptedCrew(machines, dies_at=6, dies_after=True))  # the canary's cutover
    crews: list[ScriptedCrew] = []

    def new_crew() -> ScriptedCrew:
        crews.append(ScriptedCrew(machines))
        return crews[-1]

    end = conduct(history, open_rollout(history, "ro1"), new_crew, lambda _t, _s: None, resumed=again("d2"))
    assert end.is_complete
    assert machines.serving == {host.name: "d2" for host in HOSTS}
    assert len(crews) == 2


def test_hosts_that_do_not_answer_stop_the_rollout_before_a_wave(history: History) -> None:
    begun(history)
    machines = Machines(missing=("gpu-2", "gpu-3"))
    end = drive(history, ScriptedCrew(machines))
    assert end.status == "halted"
    assert end.halt is not None
    assert end.halt.startswith("no host may be taken out of service: 2 of 4 GPU hosts are unavailable")
    assert machines.switched == []


def test_a_pause_is_heard_in_the_middle_of_a_wave(history: History) -> None:
    begun(history)
    machines = Machines()

    def pause(step: Step, host: str) -> None:
        if (step, host) == ("cutover", "gpu-1"):
            open_rollout(history, "ro1").record(PauseAsked(1.0, "ops"))

    end = drive(history, ScriptedCrew(machines, on_step=pause))
    assert end.status == "paused"
    assert machines.switched == [("gpu-1", "d1")]
    assert machines.drained == set()
    assert drive(history, ScriptedCrew(machines), again()).is_complete
    assert len(machines.switched) == 4


def test_a_gate_waits_for_its_soak_and_no_longer(history: History) -> None:
    log = begun(history, soak_s=1000.0)
    now = [0.0]
    ends: list[float] = []
    crew = ScriptedCrew(Machines())

    def clock() -> float:
        now[0] += 50
        return now[0]

    def note(transition: Transition, _state: Rollout) -> None:
        if isinstance(transition, StepEnded) and transition.step in ("cutover", "gate"):
            ends.append(transition.time_s)

    lease = take_lease(history, rollout_subject("ro1"), "ops")
    assert Conductor(log, lease, crew, note, clock).run().is_complete
    assert 1000.0 <= ends[1] - ends[0] < 1300.0


def test_a_second_controller_loses_and_is_told_who_drives(history: History) -> None:
    begun(history)
    take_lease(history, rollout_subject("ro1"), "alice@ctl-1")
    with pytest.raises(BringupError, match="rollout ro1 is driven by alice@ctl-1"):
        drive(history, ScriptedCrew(Machines()))


def test_a_controller_that_was_asleep_touches_no_further_host(history: History) -> None:
    begun(history)
    touched: list[str] = []

    def taken_over(step: Step, host: str) -> None:
        touched.append(host)
        if len(touched) == 5:
            with history.database.writing() as session:
                session.execute(update(OwnerRow).values(owner="another"))

    crew = ScriptedCrew(Machines(), on_step=taken_over)
    with pytest.raises(BringupError, match="is driven by another controller now"):
        drive(history, crew)
    assert len(touched) == 5
    assert crew.is_stopped


# ------------------------------------------------------------------------------------------------------ hooks


def hooked(history: History, hook: Hook, limit_s: float = 20.0) -> EngineCrew:
    return EngineCrew("inventory/x.py", history, {"gpu-1": hook}, {}, hook_limit_s=limit_s)


def one(crew: EngineCrew, step: Step, rollout: Rollout, host: str = "gpu-1") -> Outcome:
    crew.begin(rollout, step, [host])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for outcome in crew.outcomes(0.2):
            assert isinstance(outcome, Outcome)
            return outcome
    raise AssertionError("no outcome within 30 s")


@pytest.mark.parametrize(
    ("hook", "step", "expected"),
    [
        (Hook(), "drain", None),
        (Hook(drain="true"), "drain", None),
        (Hook(drain="false", undrain="true"), "undrain", None),
        (
            Hook(drain="echo queue is held; echo 'no such node' >&2; exit 3"),
            "drain",
            "the drain command ended with 3: no such node",
        ),
        (Hook(undrain="exit 1"), "undrain", "the undrain command ended with 1: it said nothing"),
        (Hook(drain="no-such-program-here"), "drain", "the drain command ended with 127: "),
    ],
    ids=["none", "well", "the-right-one", "says-why", "silent", "missing"],
)
def test_a_hook_ends_well_or_says_why(history: History, hook: Hook, step: Step, expected: str | None) -> None:
    crew = hooked(history, hook)
    outcome = one(crew, step, begun(history).rollout)
    crew.stop()
    assert outcome.is_ok == (expected is None)
    assert outcome.why is None or outcome.why.startswith(expected or "never")


@pytest.mark.parametrize(
    ("command", "limit_s"),
    [("exit 1", 20.0), ("sleep 86404", 0.5)],
    ids=["fails", "never-ends"],
)
def test_what_a_hook_says_holds_no_secret_of_the_inventory_or_the_environment(
    history: History, monkeypatch: pytest.MonkeyPatch, command: str, limit_s: float
) -> None:
    monkeypatch.setenv("SCHEDULER_TOKEN", "swordfish-1")
    said = "printf '%s %s %s' hunter2/long \"$SCHEDULER_TOKEN\" aHVudGVyMi9sb25n; "
    crew = EngineCrew(
        "inventory/x.py", history, {"gpu-1": Hook(drain=said + command)}, {}, hook_limit_s=limit_s,
        secrets={"hunter2/long"},
    )  # fmt: skip
    outcome = one(crew, "drain", begun(history).rollout)
    crew.stop()
    assert outcome.why is not None
    assert outcome.why.endswith(": *** *** ***")


def test_a_hook_gets_its_host_in_the_environment_and_nothing_on_stdin(history: History, tmp_path: Path) -> None:
    crew = hooked(
        history,
        Hook(drain=f'cat > {tmp_path}/in; echo "$BRINGUP_HOST $BRINGUP_ROLLOUT $BRINGUP_STEP" > {tmp_path}/out'),
    )
    assert one(crew, "drain", begun(history).rollout).is_ok
    crew.stop()
    assert (tmp_path / "out").read_text() == "gpu-1 ro1 drain\n"
    assert (tmp_path / "in").read_text() == ""


def alive(marker: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if marker in " ".join(p.info["cmdline"] or [])]


def test_a_drain_that_never_ends_is_bounded_and_leaves_nothing(history: History) -> None:
    # The pipeline outlives its shell and holds the pipe open, so killing the shell alone would not do.
    crew = hooked(history, Hook(drain="echo 3 pods are left; sleep 86401 | sleep 86402; true"), limit_s=0.5)
    begin = time.monotonic()
    outcome = one(crew, "drain", begun(history).rollout)
    assert outcome.why == "the drain command did not end within 0.5 s: 3 pods are left"
    assert time.monotonic() - begin < 10
    crew.stop()
    assert alive("sleep 8640") == []


ORPHANS = """
import os, signal, sys, time
from bringup.commands.crew import EngineCrew, Hook
from bringup.history import History, open_rollout
history = History.open(sys.argv[1])
hook = Hook(drain=f"touch {sys.argv[2]}; sleep 86405 | sleep 86406")
crew = EngineCrew("x.py", history, {"gpu-1": hook}, {}, hook_limit_s=1.0)
crew.begin(open_rollout(history, "ro1").rollout, "drain", ["gpu-1"])
while not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_drain_is_bounded_even_when_its_controller_was_killed(history: History, tmp_path: Path) -> None:
    begun(history)
    url = f"sqlite:///{tmp_path / 'history.db'}"
    ended = subprocess.run([sys.executable, "-c", ORPHANS, url, str(tmp_path / "begun")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert alive("sleep 8640") != []
    deadline = time.monotonic() + 30
    while alive("sleep 8640") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert alive("sleep 8640") == []


def test_a_crew_that_is_stopped_ends_its_hooks(history: History) -> None:
    crew = hooked(history, Hook(drain="sleep 86403 | cat"))
    crew.begin(begun(history).rollout, "drain", ["gpu-1"])
    deadline = time.monotonic() + 10
    while not alive("sleep 86403"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    crew.stop()
    assert alive("sleep 86403") == []


# The engine leaves the pipes of a worker that has ended to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fault_of_the_engine_stops_the_conductor_and_blames_no_host(history: History) -> None:
    begun(history)
    with pytest.raises(InputError, match="there is no inventory"):
        conduct(
            history,
            open_rollout(history, "ro1"),
            lambda: EngineCrew("inventory/does-not-exist.py", history, {}, {}),
            lambda _t, _s: None,
            resumed=None,
        )
    states = open_rollout(history, "ro1").rollout.states
    assert {state.phase for state in states.values()} == {"waiting"}


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_conductor import Machines, ScriptedCrew, drive
from bringup.history import History
history = History.open(sys.argv[1])
def die(step, host):
    if (step, host) == ("cutover", "gpu-2"):
        os.kill(os.getpid(), signal.SIGKILL)
drive(history, ScriptedCrew(Machines(), on_step=die))
"""


def test_kill_9_leaves_a_lease_that_runs_out_and_a_story_that_goes_on(history: History) -> None:
    begun(history)
    url = str(history.database.url)
    ended = subprocess.run([sys.executable, "-c", KILLED, url, os.path.dirname(__file__)], timeout=120)  # noqa: PTH120
    assert ended.returncode == -signal.SIGKILL
    machines = Machines(serving={"gpu-1": "d1", "gpu-2": "d1"}, drained={"gpu-2", "gpu-3"})
    with pytest.raises(BringupError, match="is driven by"):
        drive(history, ScriptedCrew(machines), again())
    with history.database.writing() as session:
        session.execute(update(OwnerRow).values(expires_s=history.database.now_s(session) - 1))
    assert drive(history, ScriptedCrew(machines), again()).is_complete
    # The one that was in doubt served the new digest already, so only the others were switched.
    assert {host for host, _ in machines.switched} == {"gpu-3", "gpu-4"}
