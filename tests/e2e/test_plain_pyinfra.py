"""pyinfra itself, without our command line: the same plan, the same end, the same refusal of a host it cannot read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bringup import paths
from tests.e2e import watch
from tests.e2e.conftest import lock_stacks
from tests.e2e.rig import LAB_INVENTORY, Rig, must
from tests.lab.conftest import open_lab

pytestmark = pytest.mark.lab

RANGE = "10.92.13.0/24"
HOST = "gpu-01"

OPERATIONS = [
    "Lock | Take the run lock",
    "Driver | Write NVIDIA's package source, key and pins",
    "Driver | Keep unattended-upgrades off the driver family",
    "Driver | Keep nouveau off the GPUs",
    "Driver | Install the pinned driver family",
    "Driver | Hold the driver family",
    "Driver | Reboot into the installed driver",
    "Driver | Run the persistence daemon",
    "CUDA | Install the CUDA toolkits side by side",
    "Linker | Register the toolkits with the loader",
    "Environment | Put the launcher in place",
    "Environment | Build the Python environment",
    "Verify | Prove the environment",
    "Switch | Cut over to what was proved",
]
"""What a bare host needs, in this order; the others have nothing to do there, or find out when their turn comes."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One bare host, and an inventory beside nothing but pyinfra."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    lab = open_lab("plain", RANGE)
    lab.down()
    lab.up(1)
    try:
        lock_stacks(lab)
        yield Rig(lab, tmp_path_factory.mktemp("plain"))
    finally:
        lab.down()


def pyinfra(rig: Rig, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``pyinfra inventory/lab.py deploy.py …`` at the root of the checkout."""
    return subprocess.run(
        [sys.executable, "-m", "pyinfra", str(LAB_INVENTORY), "deploy.py", *words],
        cwd=paths.root(),
        env=rig.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def left(rig: Rig) -> str:
    """Return what a run that only looks must not leave behind."""
    return rig.shell(HOST, "ls -d /opt/bringup /etc/bringup /var/lib/bringup /run/bringup 2>/dev/null || :")


def test_dry_shows_the_plan_and_changes_nothing(bare: Rig) -> None:
    done = pyinfra(bare, "--dry")
    assert done.returncode == 0, done.stderr
    assert planned(done.stderr + done.stdout) == OPERATIONS
    assert left(bare) == ""


def planned(text: str) -> list[str]:
    """Return the operations for which pyinfra's table counts a change."""
    rows = re.findall(r"^\s*(\w+ \| .+?)\s{2,}(\S+)\s+(\S+)\s+(\S+)\s*$", text, re.M)
    return [name for name, changes, _, _ in rows if changes != "-"]


def test_an_unknown_host_fails(bare: Rig) -> None:
    bare.shell(HOST, "mv /usr/bin/python3 /usr/bin/python3.away")
    try:
        done = pyinfra(bare, "-y")
    finally:
        bare.shell(HOST, "mv /usr/bin/python3.away /usr/bin/python3")
    assert done.returncode == 1, done.stderr
    assert "BU-PRE-001: the host could not be read" in done.stderr + done.stdout
    assert "python3: command not found (exit 127)" in done.stderr + done.stdout
    assert left(bare) == ""


def test_it_brings_a_bare_host_to_the_same_state(bare: Rig) -> None:
    boots = bare.lab.host(HOST).boots()
    watch.start(bare, HOST)
    done = pyinfra(bare, "-y")
    assert done.returncode == 0, done.stdout + done.stderr
    assert bare.lab.host(HOST).boots() == boots + 1
    assert must(bare.drift(HOST)).differences(HOST) == []
    assert sorted(set(watch.complaints(watch.appeared(bare, HOST)))) == []
    again = must(bare.apply(HOST))
    assert again.results.summary.changes == 0
    assert again.host(HOST).verification is not None
    assert again.host(HOST).verification.state == "verified"


def test_a_second_run_changes_nothing(bare: Rig) -> None:
    before = bare.sessions(HOST)
    done = pyinfra(bare, "-y")
    assert done.returncode == 0, done.stderr
    assert planned(done.stderr + done.stdout) == []
    assert bare.sessions(HOST) - before == 1
