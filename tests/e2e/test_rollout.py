"""A rollout over lab hosts: a stack that cannot be proved stops at its canary, and goes on once it is mended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bringup.report.records import RolloutResults
from tests import dask_cluster, postgresql_server
from tests.e2e import crash, variant
from tests.e2e.conftest import lock_stacks
from tests.e2e.rig import BRINGUP, Rig, must
from tests.lab.conftest import open_lab

pytestmark = [pytest.mark.lab, pytest.mark.fleet, pytest.mark.timeout(900)]

RANGE = "10.92.7.0/24"
HOSTS = tuple(f"gpu-{at:02d}" for at in range(1, int(os.environ.get("BRINGUP_TEST_FLEET") or 6) + 1))
"""BRINGUP_TEST_FLEET asks for another number; four show everything that six do."""

CANARY, OTHERS = HOSTS[0], HOSTS[1:]

# A distribution that nothing imports: a set without it is another environment, so that one is really built.
SPARE = "tabulate"
UNPROVABLE = 'require = ["nccl"]\n'
"""What no lab host can prove: a look-alike torch runs no collective."""

INVENTORY = """
from bringup.lab.record import inventory
hosts, data = inventory()
told = 'echo "$BRINGUP_STEP $BRINGUP_HOST" >> {log}'
lab = (hosts, {{**data, "bringup_stack": "lab", "bringup_reboot": "allowed", "bringup_lock_wait_s": 0,
                "bringup_drain": told.replace("$BRINGUP_STEP", "drain"),
                "bringup_undrain": told.replace("$BRINGUP_STEP", "undrain")}})
"""


@dataclass(frozen=True)
class Ended:
    """A rollout that came to its end."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> RolloutResults:
        return RolloutResults.model_validate_json(self.out)

    @property
    def phases(self) -> dict[str, str]:
        return {name: host.phase for name, host in self.document.hosts.items()}

    def must(self, status: int) -> Ended:
        assert self.status == status, f"wanted status {status}, found {self.status}\n{self.out}\n{self.err}"
        return self


@dataclass
class Fleet:
    """Hosts that serve, their inventory with hooks, and what the hooks were asked."""

    rig: Rig
    inventory: Path
    hooks: Path

    def rollout(self, *words: str) -> Ended:
        return self.run([*BRINGUP, "rollout", str(self.inventory), *words, "--json"])

    def paste(self, line: str, *more: str) -> Ended:
        """Run a printed command line as a person pastes it into a shell."""
        return self.run(["sh", "-c", " ".join([line, *more])])

    def run(self, argv: list[str]) -> Ended:
        # An interpreter's directory is where its package's commands are.
        environment = {**self.rig.environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    def asked(self) -> list[str]:
        """Return what the hooks were asked since the last time."""
        lines = self.hooks.read_text().splitlines() if self.hooks.exists() else []
        self.hooks.unlink(missing_ok=True)
        return lines

    def serving(self, hosts: tuple[str, ...] = HOSTS) -> dict[str, str]:
        return {host: self.rig.serving(host) for host in hosts}

    def pin(self, host: str) -> dict[str, str] | None:
        text = self.rig.shell(host, "cat /var/lib/bringup/pin.json 2>/dev/null || echo null")
        pin: dict[str, str] | None = json.loads(text)
        return pin

    def stack(self, *, is_provable: bool) -> list[str]:
        """Write the next stack, always at the same place, and return the options that choose it."""
        return variant.write(
            self.rig.lab, self.rig.state, "next", more="" if is_provable else UNPROVABLE, without=[SPARE]
        )

    def variable(self, value: str) -> list[str]:
        """Write a stack that differs from the one that serves by a service variable alone."""
        value = f"{value} {uuid.uuid4().hex}"
        text = {"environment = {": f'environment = {{ OF = "{value}",'}
        return variant.write(self.rig.lab, self.rig.state, "variable", text=text, without=[SPARE])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A lab whose hosts all serve the ``lab`` stack."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    lab = open_lab("fleet", RANGE)
    lab.down()
    lab.up(len(HOSTS))
    try:
        lock_stacks(lab)
        rig = Rig(lab, tmp_path_factory.mktemp("controller"))
        hooks = rig.state / "hooks.log"
        inventory = rig.inventory("fleet", INVENTORY.format(log=hooks))
        must(rig.command("apply", inventory=inventory))
        # Something serves, and no stack here restarts it: that it runs on must not fail a gate.
        crash.serve(rig, CANARY)
        hooks.unlink(missing_ok=True)
        yield Fleet(rig, inventory, hooks)
    finally:
        lab.down()


def test_nothing_to_roll_out_is_no_rollout(fleet: Fleet) -> None:
    ended = fleet.rollout("--yes").must(0)
    assert ended.err.strip() == "every host is as wanted: nothing to roll out"
    assert fleet.asked() == []


def test_a_stack_that_cannot_be_proved_stops_at_its_canary_and_goes_on_when_it_is_mended(fleet: Fleet) -> None:
    before = fleet.serving()
    options = fleet.stack(is_provable=False)

    failed = fleet.rollout(*options, "--yes", "--max-unavailable", "50%").must(1)
    document = failed.document
    assert (document.status, document.summary.failed, document.summary.untouched) == ("halted", 1, len(OTHERS))
    assert document.waves[0] == (CANARY,)
    assert failed.phases[CANARY] == "reverted"
    assert {failed.phases[host] for host in OTHERS} <= {"prepared", "waiting"}
    assert document.halt is not None
    assert document.halt.startswith(f"{CANARY}: cutover failed: ")
    assert "nccl" in document.halt
    assert fleet.asked() == [f"drain {CANARY}", f"undrain {CANARY}"]
    assert fleet.serving() == before
    pin = fleet.pin(CANARY)
    assert pin is not None
    assert pin["digest"] == document.stack.digest
    assert pin["reason"].startswith(f"rollout {document.rollout}: {CANARY}: cutover failed")
    assert [fleet.pin(host) for host in OTHERS] == [None] * len(OTHERS)
    # Nobody gets round the pin, neither by a resume without a change nor by hand.
    assert document.resume is not None
    refused = fleet.paste(document.resume).must(2)
    assert f"digest {document.stack.digest} was rolled back and is pinned on {CANARY}" in refused.err
    applied = must(fleet.rig.apply(CANARY, *options, inventory=fleet.inventory), 1)
    assert "pin" in applied.differences(CANARY)
    assert fleet.asked() == []
    assert fleet.serving() == before

    assert fleet.stack(is_provable=True) == options
    mended = fleet.paste(document.resume, "--json").must(0)
    assert (mended.document.rollout, mended.document.status) == (document.rollout, "done")
    assert set(mended.phases.values()) == {"done"}
    assert_waves_kept_their_limit(fleet.asked(), len(HOSTS) // 2)
    after = fleet.serving()
    assert [host for host in HOSTS if after[host].splitlines()[0] == before[host].splitlines()[0]] == []
    drift = must(fleet.rig.command("drift", *options, inventory=fleet.inventory))
    assert {host: drift.differences(host) for host in HOSTS} == {host: [] for host in HOSTS}
    told = subprocess.run(
        [*BRINGUP, "status", "--json"], env=fleet.rig.environment, capture_output=True, text=True, check=True
    )
    assert json.loads(told.stdout)["rollouts"] == []


def assert_waves_kept_their_limit(asked: list[str], most: int) -> None:
    """Fail unless the canary went alone and first, and every host was drained once, never more than some at a time."""
    assert asked[:2] == [f"drain {CANARY}", f"undrain {CANARY}"]
    assert sorted(asked) == sorted(f"{hook} {host}" for hook in ("drain", "undrain") for host in HOSTS)
    out: set[str] = set()
    for line in asked:
        hook, host = line.split()
        out = out | {host} if hook == "drain" else out - {host}
        assert len(out) <= most, asked


def test_of_two_controllers_on_one_host_one_wins_and_the_other_says_who_has_it(fleet: Fleet) -> None:
    host = HOSTS[-1]
    options = fleet.variable("contended")
    begun, go = fleet.rig.state / "begun", fleet.rig.state / "go"
    waits = f"touch {begun}; while [ ! -e {go} ]; do sleep 0.1; done"
    slow = fleet.rig.inventory("slow", fleet.inventory.read_text() + f"lab[1]['bringup_drain'] = {waits!r}\n")
    words = [*BRINGUP, "apply", str(slow), "--limit", host, *options, "--yes", "--events", "-"]
    with subprocess.Popen(words, env=fleet.rig.environment, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        deadline = time.monotonic() + 120
        while not begun.exists():
            assert time.monotonic() < deadline, "the first run never came to its cutover"
            time.sleep(0.1)
        second = fleet.rig.apply(host, *options, inventory=fleet.inventory)
        go.touch()
        events = [json.loads(line) for line in first.stdout]
    must(second, 1)
    assert second.host(host).status == "refused"
    (finding,) = [found for found in second.host(host).findings if found.code == "BU-SSH-003"]
    assert finding.cause.startswith(f"another run holds this host: {events[0]['who']}, since 20")
    (end,) = [event for event in events if event["event"] == "host_done"]
    assert (first.returncode, end["status"], end["verification"]["state"]) == (0, "ok", "verified")


def test_of_two_controllers_with_one_history_one_drives_and_the_other_says_who_does(fleet: Fleet) -> None:
    if postgresql_server.programs() is None:
        pytest.skip("PostgreSQL is not installed")
    options = fleet.variable("shared")
    words = [*BRINGUP, "rollout", str(fleet.inventory), "--limit", f"{HOSTS[-1]}", *options, "--yes", "--json"]
    with postgresql_server.server() as url:
        processes = [
            subprocess.Popen(
                words,
                env={**fleet.rig.environment, "BRINGUP_HISTORY": url},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        said = {process.pid: process.communicate(timeout=300) for process in processes}
    statuses = {process.pid: process.returncode for process in processes}
    assert sorted(statuses.values()) == [0, 2], said
    winner, loser = sorted(statuses, key=lambda pid: statuses[pid])
    assert re.search(
        rf"driven by \S+ \(pid {winner}\).*since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC", said[loser][1], re.S
    )
    assert RolloutResults.model_validate_json(said[winner][0]).status == "done"


def test_a_killed_dask_worker_that_held_a_host_is_replaced_and_nothing_is_done_twice(
    fleet: Fleet, tmp_path: Path
) -> None:
    hosts = HOSTS[-2:]
    for host in hosts:
        crash.serve(fleet.rig, host)
    before = fleet.serving(hosts)
    with dask_cluster.started(tmp_path, fleet.rig.environment) as cluster:
        rig = Rig(fleet.rig.lab, tmp_path, environment=cluster.environment)
        options = [*next(crash.stacks(rig, first=1)), "--executor", cluster.address]
        controller, place, lost = crash.Controller(rig, hosts, options), crash.Place(), None
        for event in controller:
            point = place.add(event) if event.get("host") == hosts[0] else None
            # It holds its hosts' locks now, and a builder is at work there.
            if lost is None and point is not None and point.step == "environment":
                (lost,) = cluster.at_work()
                lost.kill()
        ended = controller.ended()
    assert lost is not None, "no environment was built"
    ended.must_be_verified(*hosts)
    told = [event["host"] for event in ended.events if event["event"] == "host_done"]
    assert sorted(told) == sorted(hosts)
    assert [event for event in ended.events if event["event"] == "worker_lost"] == []
    for host in hosts:
        assert crash.leftovers(rig.lab, host) == ""
        assert fleet.rig.serving(host) != before[host]
    again = crash.apply(rig, hosts, options[: options.index("--executor")])
    assert [again.host(host)["changes"] for host in hosts] == [0, 0]


def test_a_rollout_whose_controller_is_killed_in_a_cutover_goes_on_without_skipping_or_repeating_a_host(
    fleet: Fleet,
) -> None:
    hosts = HOSTS[-3:]
    only = [word for host in hosts for word in ("--limit", host)]
    options = [*only, *fleet.variable("killed")]
    fleet.asked()
    completed = "python3 -c 'import json; print(len(json.load(open(\"/var/lib/bringup/cutovers.json\"))))'"
    before = {host: int(fleet.rig.shell(host, completed)) for host in hosts}
    words = [*BRINGUP, "rollout", str(fleet.inventory), *options, "--yes", "--events", "-"]
    with subprocess.Popen(
        words, env=fleet.rig.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        at, done = None, 0
        for line in first.stdout:
            transition = json.loads(line).get("transition", {})
            # In the middle of the second wave: one host is done, and one may not have begun.
            if (transition.get("kind"), transition.get("step")) == ("step_begun", "cutover") and done:
                at = transition["host"]
                workers = crash.children(first.pid)
                first.kill()
                for pid in workers:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                break
            done += (transition.get("kind"), transition.get("step")) == ("step_ended", "undrain")
    assert at is not None, "no cutover began in the second wave"
    resume = ["rollout", str(fleet.inventory), "--resume", *options, "--json"]
    ended = fleet.run([*BRINGUP, *resume])
    deadline = time.monotonic() + 120
    while ended.status == 2 and "driven by" in ended.err and time.monotonic() < deadline:
        time.sleep(2)  # the dead controller's lease runs out by itself
        ended = fleet.run([*BRINGUP, *resume])
    ended.must(0)
    assert ended.document.status == "done"
    assert ended.phases == dict.fromkeys(hosts, "done")
    drift = must(fleet.rig.command("drift", *options, inventory=fleet.inventory))
    assert {host: drift.differences(host) for host in hosts} == {host: [] for host in hosts}
    assert {host: int(fleet.rig.shell(host, completed)) for host in hosts} == {host: before[host] + 1 for host in hosts}
    asked = fleet.asked()
    assert asked.count(f"undrain {hosts[0]}") == 1
    last = {host: max(at for at, word in enumerate(asked) if word.endswith(host)) for host in hosts}
    assert {host: asked[at].split()[0] for host, at in last.items()} == dict.fromkeys(hosts, "undrain")
    assert [crash.leftovers(fleet.rig.lab, host) for host in hosts] == [""] * len(hosts)
