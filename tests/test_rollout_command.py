"""``bringup rollout`` from its options to its exit code, over hosts that nobody listens on."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bringup import engine
from bringup.commands.rollout import (
    _interruptible,
    _nothing_to_do,
    _planned,
    _said,
    _show_plan,
    resume_command,
    rollout,
)
from bringup.errors import BringupError, InputError
from bringup.history import History, list_rollouts, open_rollout, rollout_subject, start_rollout, take_lease
from bringup.report.records import RolloutResults
from bringup.report.results import FindingResult, HostResult, Results, VerificationResult
from bringup.rollout import (
    Limit,
    Limits,
    Observed,
    RolloutHost,
    Started,
    StepBegun,
    StepEnded,
    WaveOpened,
    replay,
)

pytestmark = pytest.mark.filterwarnings(
    # The engine leaves the pipes of a worker that has ended to the garbage collector.
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

INVENTORY = """
fleet = [
    (f"gpu-{at}", {"ssh_hostname": "127.0.0.1", "ssh_port": 1, "rack": f"r{at % 2}", "bringup_stack": "sglang-cu130"})
    for at in (1, 2, 3, 10)
]
"""


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("BRINGUP_HISTORY", raising=False)
    monkeypatch.setenv("BRINGUP_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "240")
    file = tmp_path / "fleet.py"
    file.write_text(INVENTORY)
    return str(file)


def run(*words: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(rollout)
    ended = CliRunner().invoke(app, list(words))
    if isinstance(ended.exception, BringupError):
        raise ended.exception
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return ended.exit_code, ended.stdout, ended.stderr


def test_a_dry_run_shows_stages_and_hosts_with_the_canary_first_and_begins_nothing(inventory: str) -> None:
    code, out, _ = run(inventory, "--dry-run", "--max-unavailable", "50%", "--domain", "rack", "--per-domain", "1")
    assert code == 0
    assert [" ".join(line.split()) for line in out.splitlines()] == [
        "stage hosts names",
        "prepare 4 every host; nothing that serves is disturbed",
        "wave 1 (canary): drain, cutover, gate, undrain 1 gpu-1 [r1]",
        "wave 2: drain, cutover, gate, undrain 2 gpu-2 [r0], gpu-3 [r1]",
        "wave 3: drain, cutover, gate, undrain 1 gpu-10 [r0]",
        "do not answer, and count as failed: gpu-1, gpu-2, gpu-3, gpu-10",
    ]
    code, out, _ = run(inventory, "--dry-run", "--json", "--limit", "gpu-1*", "--canary", "gpu-10")
    assert code == 0
    document = json.loads(out)
    assert (document["waves"], document["status"]) == ([["gpu-10"], ["gpu-1"]], "planned")
    history = History.open()
    assert list_rollouts(history) == ()
    history.close()


def test_a_rollout_over_hosts_that_do_not_answer_halts_and_can_be_resumed_or_aborted(inventory: str) -> None:
    code, out, err = run(inventory, "--yes")
    assert code == 1
    # How many others were tried depends on how soon the canary failed.
    assert re.search(r"halted: 0 of 4 hosts done, [1-4] failed, [0-3] untouched", out)
    assert "cause: the canary could not be prepared: gpu-1 (cannot connect over ssh" in out
    assert f"go on with: bringup rollout {inventory} --resume" in out
    assert "prepare   failed: cannot connect over ssh" in err
    with pytest.raises(InputError, match=r"rollout \w+ over this inventory is not finished \(halted\)"):
        run(inventory, "--yes")

    code, out, _ = run(inventory, "--resume", "--json", "--exclude", "gpu-1")
    document = json.loads(out)
    assert (code, document["status"], list(document["hosts"])) == (1, "halted", ["gpu-2", "gpu-3", "gpu-10"])
    assert document["halt"].startswith("the canary could not be prepared: gpu-2")

    history = History.open()
    (listed,) = list_rollouts(history)
    lease = take_lease(history, rollout_subject(listed.id), "alice@ctl-1")
    with pytest.raises(BringupError, match="is driven by alice@ctl-1"):
        run(inventory, "--resume")
    lease.release()

    assert run(inventory, "--abort") == (0, "", f"rollout {listed.id} is aborted\n")
    assert open_rollout(history, listed.id).rollout.status == "aborted"
    with pytest.raises(InputError, match="no rollout over this inventory is unfinished"):
        run(inventory, "--pause")
    history.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume", "--abort"], "only one can be meant"),
        (["--max-unavailable", "many"], "--max-unavailable many cannot be read"),
        (["--domain", "rack", "--per-domain", "0"], "--per-domain 0 cannot be read"),
        (["--per-domain", "1"], "limit nothing without failure domains"),
        (["--domains-at-once", "1"], "limit nothing without failure domains"),
        (["--canary", "gpu-9"], "canary is none of these hosts: gpu-9"),
        (["--canary", "0"], "canary: wanted at least one host"),
        (["--canary", "-1"], "--canary -1 cannot be read"),
        (["--growth", "inf"], "growth: wanted 1 to 1000000, found inf"),
        (["--resume", "--canary", "1"], "--canary was chosen when the rollout began"),
        (["--pause", "--soak", "5"], "--soak was chosen when the rollout began"),
        (["--resume"], "no rollout over this inventory is unfinished"),
        (["--yes", "--limit", "gpu-9"], "'gpu-9' matches no host"),
    ],
    ids=[
        "two-at-once",
        "limit",
        "no-limit",
        "limit-of-no-domain",
        "at-once-of-no-domain",
        "canary",
        "no-canary",
        "negative-canary",
        "endless-growth",
        "kept-at-a-resume",
        "kept-at-a-pause",
        "nothing-to-resume",
        "no-host",
    ],
)
def test_what_cannot_be_meant_is_refused(inventory: str, words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(inventory, *words)


@pytest.mark.parametrize("words", [["--soak", "inf"], ["--soak", "nan"], ["--drain-limit", "inf"]], ids=" ".join)
def test_nothing_waits_for_ever(inventory: str, words: list[str]) -> None:
    assert run(inventory, "--dry-run", *words)[0] == 2


def test_without_a_terminal_a_rollout_wants_a_yes(inventory: str) -> None:
    with pytest.raises(InputError, match="rollout changes hosts and nobody is there to ask") as caught:
        run(inventory)
    assert caught.value.hint == "say --yes, or look first with `bringup rollout INVENTORY --dry-run`"


def test_the_controller_learns_the_secrets_of_the_inventory(inventory: str) -> None:
    with Path(inventory).open("a") as file:
        file.write('fleet[1][1]["site_token"] = "hunter2-long"\n')
    described = engine.describe(inventory, overrides={})
    assert {host["name"]: host["secrets"] for host in described} == {
        "gpu-1": [], "gpu-2": ["hunter2-long"], "gpu-3": [], "gpu-10": [],
    }  # fmt: skip


def test_a_limit_of_racks_wants_every_host_in_one(inventory: str) -> None:
    with Path(inventory).open("a") as file:
        file.write('del fleet[1][1]["rack"]\nfleet[2][1]["rack"] = 7\n')
    with pytest.raises(InputError, match="no rack is known of gpu-2, so no limit would hold there"):
        run(inventory, "--dry-run", "--domain", "rack", "--per-domain", "1")
    code, out, _ = run(
        inventory, "--dry-run", "--domain", "rack", "--per-domain", "1", "--exclude", "gpu-2", "--canary", " gpu-3, "
    )
    assert (code, out.splitlines()[2].split()[-2:]) == (0, ["gpu-3", "[7]"])


LOOKED = {
    "as-wanted": HostResult(status="ok", verification=VerificationResult(state="verified")),
    "no-gpus": HostResult(
        status="drift",
        findings=(
            FindingResult(code="BU-PRE-016", severity="error", cause="", remedy="", evidence={"wanted": 8, "found": 0}),
        ),
    ),
    "one-lost": HostResult(
        status="drift",
        findings=(
            FindingResult(code="BU-PRE-016", severity="error", cause="", remedy="", evidence={"wanted": 8, "found": 7}),
        ),
    ),
    "silent": HostResult(status="unknown"),
}


def test_what_was_seen_of_a_host_says_whether_it_counts_and_whether_it_is_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    described = [{"name": name, "rack": None, "groups": []} for name in LOOKED]
    looked = Results.of("drift", LOOKED, stack=None)
    started = _planned(
        described, {"name": "lab", "digest": "d1"}, looked, canary="1", growth=2, limits=Limits(Limit(1)),
        domain="none", soak_s=0,
    )  # fmt: skip
    assert {host.name: host.has_gpus for host in started.hosts} == {
        "as-wanted": True, "no-gpus": False, "one-lost": True, "silent": True,
    }  # fmt: skip
    with pytest.raises(typer.Exit):
        _show_plan(started, looked, json=False)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "do not answer, and count as failed: silent",
        "as wanted already, and left alone: as-wanted",
    ]


def test_with_nothing_to_do_the_document_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    described = [{"name": "as-wanted", "rack": None, "groups": []}]
    looked = Results.of("drift", {"as-wanted": LOOKED["as-wanted"]}, stack=None)
    started = _planned(
        described, {"name": "lab", "digest": "d1"}, looked, canary="1", growth=2, limits=Limits(Limit(1)),
        domain="none", soak_s=0,
    )  # fmt: skip
    with pytest.raises(typer.Exit) as ended:
        _nothing_to_do(started, json=True)
    document = RolloutResults.model_validate_json(capsys.readouterr().out)
    assert (ended.value.exit_code, document.exit_code, document.status, document.rollout) == (0, 0, "done", "")
    assert (document.summary.done, document.hosts["as-wanted"].phase) == (1, "done")


def halted(inventory: str, *words: str) -> str:
    code, _, _ = run(inventory, "--yes", *words)
    assert code == 1
    history = History.open()
    (listed,) = list_rollouts(history)
    history.close()
    return listed.id


def test_who_asks_for_a_pause_is_told_who_has_yet_to_act_on_it(inventory: str) -> None:
    history = History.open()
    hosts = (RolloutHost("gpu-1"), RolloutHost("gpu-2"))
    log = start_rollout(
        history, Started(0.0, "ro1", "lab", "d1", hosts, (("gpu-1",), ("gpu-2",)), Limits(Limit(1))), inventory
    )
    log.record(StepBegun(1.0, "gpu-1", "prepare"), StepEnded(2.0, "gpu-1", "prepare", True))
    log.record(StepBegun(1.0, "gpu-2", "prepare"), StepEnded(2.0, "gpu-2", "prepare", True))
    log.record(Observed(3.0), WaveOpened(4.0, ("gpu-1",)), StepBegun(5.0, "gpu-1", "drain"))
    lease = take_lease(history, rollout_subject("ro1"), "alice@ctl-1")
    code, out, err = run(inventory, "--pause", "--json")
    assert (code, json.loads(out)["status"]) == (0, "pausing")
    assert "once alice@ctl-1 has finished the open wave" in err
    lease.release()
    assert "no controller drives it: --resume finishes the open wave" in run(inventory, "--abort")[2]
    history.close()


@pytest.mark.parametrize(
    ("transition", "line"),
    [
        (StepEnded(1.0, "gpu-1", "inspect", False), "it was not cut over yet"),
        (StepEnded(1.0, "gpu-1", "inspect", True), "it was cut over"),
        (StepEnded(1.0, "gpu-1", "inspect", False, "ssh: timed out", True), "failed: ssh: timed out"),
        (StepEnded(1.0, "gpu-1", "prepare", True, is_as_wanted=True), "as wanted already"),
        (StepEnded(1.0, "gpu-1", "prepare", True), "done"),
        (StepEnded(1.0, "gpu-1", "drain", False), "failed: no reason given"),
    ],
    ids=["not-cut-over", "cut-over", "silent", "as-wanted", "prepared", "no-reason"],
)
def test_the_end_of_a_step_is_told_in_words(transition: StepEnded, line: str) -> None:
    hosts = (RolloutHost("gpu-1"),)
    state = replay([Started(0.0, "ro1", "lab", "d1", hosts, (("gpu-1",),), Limits(Limit(1)))])
    assert _said(transition, state) == f"gpu-1        {transition.step:<9} {line}"


def test_a_stream_of_events_holds_nothing_else(inventory: str) -> None:
    code, out, err = run(inventory, "--yes", "--events", "-")
    assert code == 1
    assert [json.loads(line)["event"] for line in out.splitlines()][-1] == "rollout"
    assert f"go on with: bringup rollout {inventory} --resume" in err


def test_a_resume_goes_on_with_all_hosts_of_the_rollout_and_with_no_others(inventory: str) -> None:
    file = Path(inventory)
    file.write_text(file.read_text() + 'spare = fleet[:1]\nfleet[3][1]["bringup_stack"] = "sglang-0.5.9-cu130"\n')
    # Only three of the hosts have one stack, and the resume that is printed does not say which.
    rollout_id = halted(inventory, "--exclude", "gpu-10")
    with pytest.raises(InputError, match=f"rollout {rollout_id} goes on with all its hosts.* leaves out gpu-2, gpu-3"):
        run(inventory, "--resume", "--limit", "gpu-1")
    with pytest.raises(InputError, match=f"'gpu-10' matches no host of rollout {rollout_id}"):
        run(inventory, "--resume", "--exclude", "gpu-10")
    # A group is left out whole.
    code, out, _ = run(inventory, "--resume", "--json", "--exclude", "spare")
    assert (code, list(json.loads(out)["hosts"])) == (1, ["gpu-2", "gpu-3"])
    file.write_text(file.read_text() + "del fleet[1]\n")
    with pytest.raises(InputError, match=f"rollout {rollout_id} is over gpu-2 as well, and the inventory is not"):
        run(inventory, "--resume")
    code, out, _ = run(inventory, "--resume", "--json", "--exclude", "gpu-2")
    assert (code, list(json.loads(out)["hosts"])) == (1, ["gpu-3"])


def test_a_resume_with_another_stack_is_refused_or_told(inventory: str) -> None:
    rollout_id = halted(inventory)
    file = Path(inventory)
    file.write_text(file.read_text().replace('"sglang-cu130"', '"sglang-0.5.9-cu130"'))
    with pytest.raises(InputError, match=f"rollout {rollout_id} brings hosts to sglang-cu130, and the inventory says"):
        run(inventory, "--resume")
    code, _, err = run(inventory, "--resume", "--stack", "sglang-0.5.9-cu130")
    assert code == 1
    assert re.search(r"another one now, sglang-0\.5\.9-cu130 \w+ instead of sglang-cu130 \w+: every host begins", err)


def test_hosts_of_two_stacks_are_no_rollout(inventory: str) -> None:
    with Path(inventory).open("a") as file:
        file.write('fleet[0][1]["bringup_stack"] = "sglang-0.5.9-cu130"\n')
    with pytest.raises(InputError, match="a rollout brings hosts to one stack, and these have 2"):
        run(inventory, "--yes")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_rollout_that_is_ended_by_a_signal_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    def conducted() -> None:
        with _interruptible("bringup rollout x.py --resume"):
            os.kill(os.getpid(), number)
            time.sleep(10)

    before = signal.getsignal(number)
    with pytest.raises(typer.Exit) as ended:
        conducted()
    assert (ended.value.exit_code, signal.getsignal(number)) == (130, before)
    assert capsys.readouterr().err.endswith("  go on with: bringup rollout x.py --resume\n")


def test_the_command_that_goes_on_can_be_pasted() -> None:
    assert resume_command("my fleet.py", "lab", Path("/x y/lock.toml"), "tls://dask:8786") == (
        "bringup rollout 'my fleet.py' --resume --stack lab --lock '/x y/lock.toml' --executor tls://dask:8786"
    )
    assert resume_command("fleet.py", None, None, drain_limit_s=86400.5, parallel=5) == (
        "bringup rollout fleet.py --resume --drain-limit 86400.5 --parallel 5"
    )
