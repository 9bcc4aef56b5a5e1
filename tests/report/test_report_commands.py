"""``bringup history`` and ``bringup status``: what they print, write and exit with."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import typer
from report_case import STACK
from typer.testing import CliRunner

from bringup.commands.history import history
from bringup.commands.status import status
from bringup.errors import BringupError, InputError
from bringup.history import History, open_rollout, start_rollout
from bringup.report import events
from bringup.rollout import Limit, Limits, Observed, RolloutHost, Started, StepBegun, StepEnded, WaveOpened


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep two runs: gpu-01 drifted and was then made as wanted, gpu-02 was never reached."""
    monkeypatch.delenv("BRINGUP_HISTORY", raising=False)
    monkeypatch.setenv("BRINGUP_STATE", str(tmp_path))
    # Into a pipe a row is one line, however narrow the terminal is that the pipe was started from.
    monkeypatch.setenv("COLUMNS", "80")
    log = History.open()
    for run, time_s, state in (("aaa1", 100.0, "drift"), ("bbb2", 200.0, "ok")):
        at = {"run": run, "time_s": time_s}
        log.record(
            [
                events.RunStarted(
                    **at, command="apply", inventory="lab.py", who="ops@ctl", bringup="0", stack=STACK,
                    hosts=("gpu-01", "gpu-02"),
                ),
                events.HostDone(**at, host="gpu-01", status=state, assigned=STACK),
                events.HostDone(**at, host="gpu-02", status="unknown", why="ssh: timed out"),
                events.RunDone(**at, exit_code=1),
            ]
        )  # fmt: skip
    start_rollout(
        log, Started(0.0, "ro1", "lab", "d1", (RolloutHost("gpu-01"),), (("gpu-01",),), Limits(Limit(1))), "lab.py"
    )
    log.close()


def run(command: object, *words: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(command)  # type: ignore[type-var]
    ended = CliRunner().invoke(app, list(words))
    if isinstance(ended.exception, BringupError):
        raise ended.exception
    return ended.exit_code, ended.stdout, ended.stderr


def words(line: str) -> list[str]:
    return line.split()


def test_history_lists_runs_newest_first(kept: None) -> None:
    code, out, _ = run(history)
    assert code == 0
    lines = out.splitlines()
    assert [words(line)[0] for line in lines] == ["run", "bbb2", "aaa1"]
    assert words(lines[1])[-3:] == ["2", "0", "1"]


def test_history_as_json(kept: None) -> None:
    document = json.loads(run(history, "--json", "--limit", "1")[1])
    assert (document["schema"], document["command"], len(document["runs"])) == (1, "history", 1)
    assert document["runs"][0]["stack"] == {"name": "lab", "digest": "abc123"}


def test_history_of_one_run(kept: None, tmp_path: Path) -> None:
    files = {name: tmp_path / f"run.{name}" for name in ("html", "junit", "prometheus")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    code, out, _ = run(history, "aaa", "--json", *options)
    assert code == 0
    assert json.loads(out)["hosts"]["gpu-01"]["status"] == "drift"
    assert "<!doctype html>" in files["html"].read_text()
    assert ET.parse(files["junit"]).getroot().get("errors") == "1"
    assert 'bringup_host_status{host="gpu-01",status="drift"} 1' in files["prometheus"].read_text()
    assert "gpu-01" in run(history, "aaa")[1]


def test_history_by_host_and_pruned(kept: None) -> None:
    assert len(run(history, "--host", "gpu-02")[1].splitlines()) == 3
    assert run(history, "--host", "gpu-99") == (0, "", "no runs in the history\n")
    code, out, err = run(history, "--prune", "1")
    assert (code, out, err) == (0, "", "forgot 2 runs\nno runs in the history\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["zzz"], "no run in the history"),
        (["--html", "x.html"], "a report is written of one run"),
        (["aaa", "--host", "gpu-01"], "--host and --prune are for the list"),
        (["--rollouts", "--prune", "1"], "--host and --prune are for the list"),
        (["--rollouts", "ro1"], "only one can be meant"),
        (["ro1", "--html", "x.html"], "no run in the history"),
        (["bbb2x"], "no run in the history"),
        (["aaa", "--html", "/proc/nothing/x.html"], "cannot write /proc/nothing/x.html"),
    ],
    ids=[
        "no-such-run",
        "report-of-a-list",
        "host-of-a-run",
        "rollouts-pruned",
        "list-of-one",
        "report-of-a-rollout",
        "too-long",
        "unwritable",
    ],
)
def test_history_refuses(kept: None, given: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(history, *given)


def test_rollouts_that_ended_are_listed_and_shown_with_their_waves(kept: None) -> None:
    log = History.open()
    opened = open_rollout(log, "ro1")
    opened.record(*(StepBegun(1.0, "gpu-01", "prepare"), StepEnded(1.0, "gpu-01", "prepare", True)))
    opened.record(Observed(2.0), WaveOpened(60.0, ("gpu-01",)))
    for step in ("drain", "cutover", "gate", "undrain"):
        opened.record(StepBegun(100.0, "gpu-01", step), StepEnded(120.0, "gpu-01", step, True))
    log.close()
    assert words(run(history, "--rollouts")[1].splitlines()[1])[:2] == ["ro1", "done"]
    (listed,) = json.loads(run(history, "--rollouts", "--json")[1])["rollouts"]
    assert (listed["id"], listed["done"]) == ("ro1", 1)
    assert run(history, "ro")[1].splitlines()[-2:] == [
        "wave 1 of the environment, to d1: gpu-01: 1970-01-01 00:01:00 UTC to 1970-01-01 00:02:00 UTC done",
        "rollout ro1 done",
    ]
    document = json.loads(run(history, "ro1", "--json")[1])
    assert (document["status"], document["waves_opened"][0]["outcome"]) == ("done", "done")
    assert json.loads(run(status, "--json")[1])["rollouts"] == []


def test_status_of_a_host_that_nobody_knows_is_refused(kept: None) -> None:
    with pytest.raises(InputError, match="'gpu-1' matches no host in the history"):
        run(status, "--limit", "gpu-01", "--limit", "gpu-1")


def test_status_shows_hosts_as_last_seen_and_unfinished_rollouts(kept: None) -> None:
    code, out, _ = run(status)
    lines = [words(line) for line in out.splitlines()]
    assert code == 1
    assert lines[1][:2] == ["gpu-01", "ok"]
    assert lines[2][:2] == ["gpu-02", "unknown"]
    assert lines[5][:3] == ["ro1", "running", "lab.py"]


@pytest.mark.parametrize(
    ("given", "code", "hosts"),
    [
        ([], 1, ["gpu-01", "gpu-02"]),
        (["--limit", "*-01"], 0, ["gpu-01"]),
        (["--limit", "gpu-02"], 1, ["gpu-02"]),
        (["--since", "1"], 0, []),
    ],
    ids=["all", "pattern", "name", "too-old"],
)
def test_status_as_json(kept: None, given: list[str], code: int, hosts: list[str]) -> None:
    exit_code, out, _ = run(status, "--json", *given)
    document = json.loads(out)
    assert (exit_code, [host["host"] for host in document["hosts"]]) == (code, hosts)
    assert [one["id"] for one in document["rollouts"]] == ["ro1"]


def test_status_as_files(kept: None, tmp_path: Path) -> None:
    page, metrics = tmp_path / "fleet.html", tmp_path / "fleet.prom"
    run(status, "--html", str(page), "--prometheus", str(metrics))
    assert "Rollout ro1: running" in page.read_text()
    assert 'bringup_host_seen_timestamp_seconds{host="gpu-01"} 200' in metrics.read_text()
