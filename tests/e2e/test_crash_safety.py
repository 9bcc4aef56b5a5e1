"""Kill the controller at every command and inside the build, pull the network at every step: apply ends verified.

The points are taken from the event stream of a real run. ``make test`` runs a third of them, another third with
every commit; ``make test-real`` runs them all. After a kill the next run is killed again at a later point, and the
one that is let be must end with a verified host and nothing left over.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bringup import paths
from bringup.lab.lab import Lab
from tests.e2e import crash
from tests.e2e.conftest import lock_stacks
from tests.e2e.crash import Controller, Ended, Place, Point, Seen, Watcher
from tests.e2e.rig import Rig
from tests.lab.conftest import open_lab

pytestmark = [pytest.mark.lab, pytest.mark.crash, pytest.mark.timeout(3600)]

RANGE = "10.92.5.0/24"
SERVES, BARE, PULLED = "gpu-01", "gpu-02", "gpu-03"

CHAIN = 5
"""How many controllers in a row are killed on a serving host before one is let be."""

INSTANTS = 20
"""At how many moments inside the build the controller is killed."""

PULLED_S = 36.0
"""Beyond the 30 s of silence after which a host gives up its run, and the controller its connection."""

BLIP_S = 8.0
"""A cable that comes back before anybody gives up."""

TOUCH = """
rm -f /etc/apt/apt.conf.d/52bringup-unattended-upgrades
update-alternatives --quiet --auto cuda-13
"""
"""Small damage that gives the driver and the toolkit step something to do beside a new stack."""

T = TypeVar("T")


def seed() -> str:
    """Return the commit, so that another third of the points is taken after every one."""
    given = os.environ.get("BRINGUP_TEST_SEED")
    asked = ["git", "-C", str(paths.root()), "rev-parse", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return given or done.stdout.strip() or "no commit"


# ---------------------------------------------------------------- what is done to the hosts


@dataclass
class Killed:
    """What a series of kills came to. ``missed`` are points that no run came to, each time it was tried."""

    points: list[object] = field(default_factory=list)
    missed: list[object] = field(default_factory=list)
    runs: int = 0
    converged: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{len(self.points)} kills in {self.runs} runs, {self.converged} times verified, {self.seconds:.0f} s"


@dataclass
class Pulled:
    """A cable that was pulled, and what that run came to."""

    step: str
    label: str
    held_s: float
    ended: Ended
    seconds: float

    def __str__(self) -> str:
        return f"{self.step}, {self.label}, {self.held_s:.0f} s: {self.ended.status} after {self.seconds:.0f} s"


@dataclass
class Campaign:
    """A lab, the share of the points that it takes (one in ``parts``), and what is done to each host, in order."""

    lab: Lab
    directory: Path
    parts: int
    seed: str
    bare: Ended
    watchers: dict[str, Watcher] = field(default_factory=dict)
    pools: dict[str, ThreadPoolExecutor] = field(
        default_factory=lambda: {host: ThreadPoolExecutor(1) for host in (SERVES, BARE, PULLED)}
    )
    futures: dict[Callable[[Campaign], Any], Future[Any]] = field(default_factory=dict)

    def rig(self, name: str) -> Rig:
        """Return a command line with a state directory of its own."""
        state = self.directory / name
        state.mkdir(exist_ok=True)
        return Rig(self.lab, state)

    def shares(self, items: Sequence[T], name: str) -> list[list[T]]:
        """Cut things into thirds, no two neighbours in one, and return those that are this campaign's to take."""
        thirds = [list(items[number::3]) for number in range(3)]
        return thirds if self.parts == 1 else [thirds[random.Random(f"{self.seed} {name}").randrange(3)]]

    def begin(self, host: str, work: Callable[[Campaign], Any]) -> None:
        """Do something with a host when all that was begun there before is done."""
        self.futures[work] = self.pools[host].submit(work, self)

    def result(self, work: Callable[[Campaign], T]) -> T:
        """Return what came of something, waiting for it; what it failed with is raised here."""
        found: T = self.futures[work].result()
        return found

    def wait_for(self, *works: Callable[[Campaign], Any]) -> None:
        """Wait until things are done, well or not."""
        for work in works:
            self.futures[work].exception()

    def end(self) -> None:
        """Begin nothing more, and wait for what is under way."""
        for pool in self.pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in self.pools.values():
            pool.shutdown(wait=True)


@dataclass
class Switched:
    """A run from one serving environment to another, undisturbed, and how many sessions sshd began for it."""

    ended: Ended
    sessions: int

    @property
    def points(self) -> list[Point]:
        return crash.points_of(self.ended.events, SERVES)

    @property
    def steps(self) -> list[str]:
        return ["lock", *(event["step"] for event in self.ended.events if event["event"] == "step_started")]

    @property
    def build_s(self) -> float:
        return crash.build_s(self.ended)


def switch(campaign: Campaign) -> Switched:
    """Serve, be watched, and change to another environment: the run whose points and steps are taken."""
    rig = campaign.rig("switch")
    crash.serve(rig, SERVES)
    campaign.watchers[SERVES] = Watcher(campaign.lab, SERVES, every_s=0.1)
    before = rig.sessions(SERVES)
    ended = crash.apply(rig, [SERVES], next(crash.stacks(rig, first=1)))
    ended.must_be_verified(SERVES)
    return Switched(ended, rig.sessions(SERVES) - before)


def verified(rig: Rig, host: str, ended: Ended, killed: Killed) -> None:
    """Take the end of a run that was let be."""
    ended.must_be_verified(host)
    assert crash.leftovers(rig.lab, host) == ""
    killed.converged += 1


def kill_in_a_row(rig: Rig, host: str, options: Sequence[str], left: set[Point], killed: Killed, *, most: int) -> None:
    """Kill one controller after the other, each at the first point that is left; the last must end verified."""
    for number in range(most + 1):
        controller, place = Controller(rig, [host], options), Place()
        boots = rig.lab.host(host).boots()
        killed.runs += 1
        for event in controller:
            point = place.add(event)
            if point in left and number < most:
                controller.kill()
                left.discard(point)
                killed.points.append(point)
                crash.wait_for_boot(rig.lab, host, boots, asked=point.label.startswith("reboot"))
                break
        else:
            verified(rig, host, controller.ended(), killed)
            return


def kill_from_bare(campaign: Campaign) -> Killed:
    """Kill controllers on their way from a bare host to the environment, one chain over each bare host.

    A command that was under way when its controller died has mostly been carried out, and what would have followed
    it is not asked for again. Points that were missed so get another bare host.
    """
    rig, started, killed = campaign.rig("bare"), time.monotonic(), Killed()
    points = crash.points_of(campaign.bare.events, SERVES)
    steps = [point.step for point in points]
    early = points[: steps.index("environment")]
    for share in campaign.shares(early, "bare"):
        left = set(share)
        for _ in range(3):
            if left:
                campaign.lab.reset(BARE)
                kill_in_a_row(rig, BARE, [], left, killed, most=len(left))
        killed.missed += left
    killed.seconds = time.monotonic() - started
    return killed


def kill_while_serving(campaign: Campaign) -> Killed:
    """Kill controllers on their way from one serving environment to another one."""
    rig, started, killed = campaign.rig("serving"), time.monotonic(), Killed()
    stacks = crash.stacks(rig, first=100)
    for share in campaign.shares(campaign.result(switch).points, "serving"):
        left, idle = set(share), 0
        while left and idle < 3:
            before = len(left)
            kill_in_a_row(rig, SERVES, next(stacks), left, killed, most=CHAIN)
            idle = idle + 1 if len(left) == before else 0
        killed.missed += left
    killed.seconds = time.monotonic() - started
    return killed


def kill_inside_the_build(campaign: Campaign) -> Killed:
    """Kill controllers at moments between the first and the last command of a build."""
    rig, started, killed = campaign.rig("instants"), time.monotonic(), Killed()
    crash.serve(rig, BARE)
    campaign.watchers[BARE] = Watcher(campaign.lab, BARE, every_s=0.1)
    rng, build_s = random.Random(f"{campaign.seed} instants"), campaign.result(switch).build_s
    instants = sorted(rng.random() for _ in range(INSTANTS))
    stacks = crash.stacks(rig, first=200)
    for share in campaign.shares(instants, "instants"):
        options, in_a_row = next(stacks), 0
        for instant in share:
            at_s, is_inside = 0.0, False
            while not is_inside:
                at_s, is_inside = kill_at(rig, options, instant * build_s)
                killed.runs += 1
                in_a_row += 1
                if not is_inside:
                    build_s = at_s  # it was faster than we thought: once more, in another build
                if not is_inside or in_a_row == CHAIN:
                    verified(rig, BARE, crash.apply(rig, [BARE], options), killed)
                    killed.runs += 1
                    options, in_a_row = next(stacks), 0
            killed.points.append(at_s)
        verified(rig, BARE, crash.apply(rig, [BARE], options), killed)
        killed.runs += 1
    killed.seconds = time.monotonic() - started
    return killed


def kill_at(rig: Rig, options: Sequence[str], instant_s: float) -> tuple[float, bool]:
    """Kill a controller so long after its build began; return (when that was, whether the build still went on)."""
    controller, began, is_inside = Controller(rig, [BARE], options), 0.0, True
    timer = threading.Timer(instant_s, controller.strike)
    for event in controller:
        if event["event"] == "step_started" and event["step"] == "environment":
            began = time.monotonic()
            timer.start()
        if event["event"] == "step_done" and event["step"] == "environment":
            is_inside = False
            break
    at_s = round(time.monotonic() - began, 2)
    timer.cancel()
    assert began, controller.ended().told()
    controller.kill()
    return at_s, is_inside


def kill_engine_alone(campaign: Campaign) -> Killed:
    """Kill the engine and not its worker, which must end by itself."""
    rig, started, killed = campaign.rig("engine"), time.monotonic(), Killed()
    options = next(crash.stacks(rig, first=300))
    controller, place = Controller(rig, [BARE], options), Place()
    for event in controller:
        point = place.add(event)
        if point is not None and point.label.startswith("do environment-4"):
            controller.kill(engine_only=True)
            killed.points.append(point)
            break
    verified(rig, BARE, crash.apply(rig, [BARE], options), killed)
    killed.runs, killed.seconds = 2, time.monotonic() - started
    return killed


def pull_at_every_step(campaign: Campaign) -> list[Pulled]:
    """Pull the cable of one host within each step, longer than anybody waits for it; run apply again afterwards."""
    rig, found = campaign.rig("pulled"), []
    crash.serve(rig, PULLED)
    stacks = crash.stacks(rig, first=400)
    steps = campaign.result(switch).steps
    for share in campaign.shares(steps, "pulled"):
        for step in share:
            nth = random.Random(f"{campaign.seed} {step}").randint(1, 4)
            options = next(stacks)
            rig.shell(PULLED, TOUCH)
            found.append(pull(rig, options, step, nth, PULLED_S))
            again = crash.apply(rig, [PULLED], options)
            again.must_be_verified(PULLED)
            assert crash.leftovers(rig.lab, PULLED) == ""
    found.append(pull(rig, next(stacks), "environment", 6, BLIP_S))
    return found


def pull(rig: Rig, options: Sequence[str], step: str, nth: int, held_s: float) -> Pulled:
    """Run apply and pull the cable at the nth command of a step, or at its last one."""
    controller, place, count, label = Controller(rig, [PULLED], options), Place(), 0, ""
    timer = threading.Timer(held_s, rig.lab.restore_network, [PULLED])
    started = 0.0
    for event in controller:
        is_over = event["event"] == "step_done" and event["step"] == step
        point = place.add(event)
        count += point is not None and point.step == step
        if not label and (is_over or count == nth):
            label = point.label if point is not None else "its end"
            rig.lab.pull_network(PULLED)
            timer.start()
            started = time.monotonic()
    ended = controller.ended()
    seconds = time.monotonic() - started
    assert label, ended.told()
    timer.join()
    return Pulled(step, label, held_s, ended, seconds)


@dataclass
class Resumed:
    """What a run came to whose long command outlived its connection, and what was seen on that host."""

    ended: Ended
    seen: Seen


def resume(campaign: Campaign) -> Resumed:
    """Pull one host's cable while its build is at work, and let it go on when the cable is back."""
    lab, rig = campaign.lab, campaign.rig("resumed")
    campaign.wait_for(pull_at_every_step)
    watcher = Watcher(lab, PULLED, every_s=0.5)
    controller = Controller(rig, [BARE, PULLED], next(crash.stacks(rig, first=500)))
    stopped = 0
    for event in controller:
        is_install = event["event"] == "command" and crash.label(event["command"]) == "do environment-2-install"
        if is_install and event["host"] == PULLED and not stopped:
            stopped = crash.stop_builder(lab, PULLED, "install")
            lab.pull_network(PULLED)
            threading.Timer(PULLED_S, go_on, [lab, stopped]).start()
    return Resumed(controller.ended(), watcher.stop())


def go_on(lab: Lab, builder: int) -> None:
    """Put the cable back, and let the builder go on."""
    lab.restore_network(PULLED)
    time.sleep(1)
    os.kill(builder, signal.SIGCONT)


# ---------------------------------------------------------------- what must come of it


@pytest.fixture(scope="module", params=[pytest.param(3, id="third"), pytest.param(1, id="all", marks=pytest.mark.real)])
def campaign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    """Three hosts, each with a thread that does to it what this file is about."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    lab = open_lab("crash", RANGE)
    lab.down()
    lab.up(3)
    made: Campaign | None = None
    try:
        lock_stacks(lab)
        directory = tmp_path_factory.mktemp("controllers")
        (directory / "start").mkdir()
        bare = crash.apply(Rig(lab, directory / "start"), [SERVES, PULLED])
        bare.must_be_verified(SERVES, PULLED)
        made = Campaign(lab, directory, request.param, seed(), bare)
        show(request, f"crash points: one in {made.parts}, chosen by {made.seed}")
        for work in (switch, kill_while_serving):
            made.begin(SERVES, work)
        for work in (kill_from_bare, kill_inside_the_build, kill_engine_alone, resume):
            made.begin(BARE, work)
        made.begin(PULLED, pull_at_every_step)
        yield made
    finally:
        if made is not None:
            made.end()
        lab.down()


def show(request: pytest.FixtureRequest, text: str) -> None:
    """Print a line that stands in the output of a test run that passes."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.ensure_newline()
        reporter.write_line(text)


def test_every_command_that_a_host_gets_is_told(campaign: Campaign) -> None:
    told = campaign.result(switch)
    commands = [event for event in told.ended.events if event["event"] == "command"]
    assert [event["number"] for event in commands] == list(range(1, len(commands) + 1))
    assert told.sessions == len(commands)


@pytest.mark.parametrize("work", [kill_from_bare, kill_while_serving, kill_inside_the_build, kill_engine_alone])
def test_apply_ends_verified_after_its_controller_was_killed(
    request: pytest.FixtureRequest, campaign: Campaign, work: Callable[[Campaign], Killed]
) -> None:
    killed = campaign.result(work)
    show(request, f"{work.__name__}: {killed}")
    assert killed.points
    assert killed.missed == []


def test_apply_ends_verified_after_the_network_was_pulled(request: pytest.FixtureRequest, campaign: Campaign) -> None:
    *gone, blip = campaign.result(pull_at_every_step)
    for pulled in (*gone, blip):
        show(request, f"cable pulled: {pulled}")
    assert {pulled.ended.status for pulled in gone} <= {0, 1}
    # Nobody may wait for the kernel's quarter of an hour.
    assert all(pulled.seconds < PULLED_S + 120 for pulled in gone)
    blip.ended.must_be_verified(PULLED)


def test_a_run_comes_back_to_what_outlived_its_connection(request: pytest.FixtureRequest, campaign: Campaign) -> None:
    resumed = campaign.result(resume)
    resumed.ended.must_be_verified(BARE, PULLED)
    sent = [
        (event["host"], event["command"])
        for event in resumed.ended.events
        if event["event"] == "command" and crash.label(event["command"]) == "do environment-2-install"
    ]
    assert [host for host, _ in sent].count(BARE) == 1
    asked = [command for host, command in sent if host == PULLED]
    assert len(asked) > 1
    assert len(set(asked)) == 1
    assert resumed.seen.builds["install"] == 3
    assert resumed.seen.clashes == []
    assert resumed.seen.failures == []


@pytest.mark.parametrize("host", [SERVES, BARE])
def test_imports_through_current_never_failed_and_no_two_builders_met(
    request: pytest.FixtureRequest, campaign: Campaign, host: str
) -> None:
    campaign.wait_for(kill_while_serving, resume)
    seen = campaign.watchers[host].stop()
    show(
        request,
        f"{host}: {seen.imports} imports ({seen.fresh} fresh), longest gap {seen.longest_gap_s} s, {seen.builds}",
    )
    assert seen.failures == []
    assert seen.clashes == []
    assert seen.imports > 100
    assert seen.fresh > 10
    assert seen.builds["install"] >= 3


def test_the_watcher_sees_two_builders_and_a_failed_import(campaign: Campaign) -> None:
    campaign.wait_for(resume)
    watcher = Watcher(campaign.lab, PULLED, every_s=0.1)
    script = """
    cd /run/bringup; printf 'import time; time.sleep(1)' > host_env-0.py; printf '{"env": "/x"}' > order-0.json
    for action in install create; do python3 $PWD/host_env-0.py $action $PWD/order-0.json & done
    wait; rm host_env-0.py order-0.json
    mv -T /opt/bringup/current /opt/bringup/aside; sleep 0.5; mv -T /opt/bringup/aside /opt/bringup/current
    """
    assert campaign.lab.inside(PULLED, ["sh", "-c", script]).returncode == 0
    seen = watcher.stop()
    assert sorted(seen.clashes[0]["builders"].values()) == ["/x", "/x"]
    assert seen.failures
