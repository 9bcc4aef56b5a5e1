"""``bringup rollout`` from its options to its exit code, over hosts that nobody listens on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bringup.commands.rollout import resume_command, rollout
from bringup.errors import BringupError, InputError
from bringup.history import History, list_rollouts, open_rollout, rollout_subject, take_lease

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
    assert json.loads(out)["waves"] == [["gpu-10"], ["gpu-1"]]
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
        (["--max-unavailable", "many"], "a limit cannot be read"),
        (["--per-domain", "0"], "a limit cannot be read"),
        (["--canary", "gpu-9"], "canary is not in the inventory: gpu-9"),
        (["--canary", "0"], "canary: wanted at least one host"),
        (["--resume"], "no rollout over this inventory is unfinished"),
        (["--yes", "--limit", "gpu-9"], "'gpu-9' matches no host"),
    ],
    ids=["two-at-once", "limit", "no-limit", "canary", "no-canary", "nothing-to-resume", "no-host"],
)
def test_what_cannot_be_meant_is_refused(inventory: str, words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(inventory, *words)


def test_hosts_of_two_stacks_are_no_rollout(inventory: str) -> None:
    with Path(inventory).open("a") as file:
        file.write('fleet[0][1]["bringup_stack"] = "sglang-0.5.9-cu130"\n')
    with pytest.raises(InputError, match="a rollout brings hosts to one stack, and these have 2"):
        run(inventory, "--yes")


def test_the_command_that_goes_on_can_be_pasted() -> None:
    assert resume_command("my fleet.py", "lab", Path("/x y/lock.toml"), "tls://dask:8786") == (
        "bringup rollout 'my fleet.py' --resume --stack lab --lock '/x y/lock.toml' --executor tls://dask:8786"
    )
