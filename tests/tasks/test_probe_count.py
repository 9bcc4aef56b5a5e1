"""How often a host is asked, counted on a scripted one under both entry points: pyinfra itself and the command line."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import host_case
import pytest
import tomlkit
from host_case import Answer, Change, put

from bringup import paths, wanted

INVENTORY = '''
import json, re, time
from pathlib import Path
from pyinfra.connectors.fake import FakeConnector
from bringup import facts

HERE = Path(__file__).parent
ANSWERS = json.loads((HERE / "answers.json").read_text())
ASKED = {
    "probe": re.escape(facts._packed("host_probe")[:80]),
    "worker": "base64 -d",
    "settle": " settle",
    "enable": " do enable ",
    "daemon-reload": " do daemon-reload ",
    "commit": " commit",
    "refuse": " fail ",
    "other": "",
}

def told(name):
    with (HERE / "told").open("a") as file:
        file.write(name + "\\n")

class Said(dict):
    """Notes that it was asked for; the probe's answers come one after the other, and the last one stays."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def get(self, key, default=None):
        if key == "success":
            told(self.name)
            return self.name != "refuse"
        if key == "stdout" and self.name == "probe":
            answer = ANSWERS.pop(0) if len(ANSWERS) > 1 else ANSWERS[0]
            return json.dumps(answer and {**answer, "time": {**answer["time"], "answered_s": time.time()}})
        return default

class Holder:
    """Holds the run lock until it is let go."""

    def __init__(self, command):
        told("hold")

    def readline(self, timeout_s=None):
        return '{"held": true}'

    def write(self, data):
        pass

    def wait(self, timeout_s=None):
        return 0

    def close(self):
        pass

FakeConnector.open_channel = lambda self, command: Holder(command)
data = json.loads((HERE / "data.json").read_text())
responses = {re.compile(pattern, re.S): Said(name) for name, pattern in ASKED.items()}
case = ([("@fake/gpu-01", {**data, "fake_responses": responses, "fake_delay": 0, "fake_delay_jitter": 0})], {})
'''

IN_SYNC = ["probe"]
LOCKED = ["probe", "worker", "hold", "settle", "probe"]
STOPPED = put("services " + wanted.PERSISTENCE_UNIT, host_case.unit("inactive", "disabled"))


def answer(*changes: Change) -> Answer:
    """Return the answer of a converged host with changes."""
    told = host_case.converged()
    launcher = hashlib.sha256((paths.files() / "run").read_bytes()).hexdigest()
    put(f"files {wanted.LAUNCHER_FILE} sha256", launcher)(told)
    for change in changes:
        change(told)
    return told


def asked(directory: Path, door: str, *answers: Answer) -> tuple[int, list[str]]:
    """Run ``deploy.py`` for a host that gives these answers; return the exit status and what the host was asked."""
    (directory / "case.toml").write_text(tomlkit.dumps(json.loads(json.dumps(host_case.STACK))))
    (directory / "case.lock.toml").write_text(tomlkit.dumps(json.loads(json.dumps(host_case.LOCK))))
    (directory / "answers.json").write_text(json.dumps(answers))
    data = {
        "bringup_stack": str(directory / "case.toml"),
        "bringup_apt_url": host_case.SITE.repository_url,
        "bringup_apt_key_fingerprint": host_case.SITE.key_fingerprint,
    }
    (directory / "data.json").write_text(json.dumps(data))
    inventory = directory / "case.py"
    inventory.write_text(INVENTORY)
    doors = {
        "pyinfra": ["pyinfra", str(inventory), str(paths.deploy_file()), "-y"],
        "bringup": ["bringup.cli", "apply", str(inventory), "--yes"],
    }
    done = subprocess.run(
        [sys.executable, "-m", *doors[door]],
        cwd=paths.root(),
        env={**os.environ, "BRINGUP_STATE": str(directory / "state")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    log = directory / "told"
    assert log.exists(), done.stderr
    return done.returncode, log.read_text().split()


CHANGED = [*LOCKED, "daemon-reload", "enable", "probe", "commit"]


@pytest.mark.parametrize(
    ("door", "answers", "expected"),
    [
        pytest.param("pyinfra", [answer()], IN_SYNC, id="pyinfra: nothing to do"),
        pytest.param("bringup", [answer()], IN_SYNC, id="bringup: nothing to do"),
        pytest.param("pyinfra", [answer(STOPPED), answer(STOPPED), answer()], CHANGED, id="pyinfra: one difference"),
        pytest.param("bringup", [answer(STOPPED), answer(STOPPED), answer()], CHANGED, id="bringup: one difference"),
        pytest.param(
            "bringup", [answer(STOPPED), answer()], [*LOCKED, "commit"], id="mended before the lock was taken"
        ),
    ],
)
def test_a_host_is_probed_once_and_again_only_after_something_changed(
    tmp_path: Path, door: str, answers: list[Answer], expected: list[str]
) -> None:
    assert asked(tmp_path, door, *answers) == (0, expected)


@pytest.mark.parametrize(("door", "expected"), [("pyinfra", ["probe", "refuse"]), ("bringup", ["probe"])])
def test_a_host_that_does_not_answer_is_asked_once_and_fails(tmp_path: Path, door: str, expected: list[str]) -> None:
    assert asked(tmp_path, door, {}) == (1, expected)
