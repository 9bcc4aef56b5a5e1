"""The main job on a host of Debian 13 beside one of Debian 12: one lab, one stack, one command."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e import variant
from tests.e2e.conftest import lock_stacks
from tests.e2e.rig import Rig, Run, must
from tests.lab.conftest import open_lab

# The second base image is a download of its own, and made in a minute or two.
pytestmark = [pytest.mark.lab, pytest.mark.real]

RANGE = "10.92.15.0/24"
OLD, NEW = "gpu-01", "gpu-02"
STEPS = ["preflight", "driver", "cuda", "linker", "environment", "verify", "switch"]
LINKER = "/etc/ld.so.conf.d/00-bringup-cuda.conf"
SERVES = (
    "/opt/bringup/bin/run python -c 'import sys, torch, sgl_kernel, flashinfer\n"
    "print(sys.version.split()[0], torch.__version__)'"
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One bare host of each release; both are locked for by one stack."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    lab = open_lab("debian13", RANGE)
    lab.down()
    lab.up(2, releases={OLD: "debian12", NEW: "debian13"})
    try:
        lock_stacks(lab)
        yield Rig(lab, tmp_path_factory.mktemp("debian13"))
    finally:
        lab.down()


@pytest.fixture(scope="module")
def applied(mixed: Rig) -> Run:
    """The main job on both."""
    return must(mixed.command("apply"))


def test_each_host_is_what_it_claims_to_be(mixed: Rig) -> None:
    asks = ". /etc/os-release; echo $VERSION_CODENAME; dpkg-query --show --showformat='${Version}\n' apt | cut -d. -f1"
    assert {name: mixed.shell(name, asks).split() for name in (OLD, NEW)} == {
        OLD: ["bookworm", "2"],
        NEW: ["trixie", "3"],
    }


def test_bare_hosts_of_both_releases_become_verified_in_one_command(mixed: Rig, applied: Run) -> None:
    for name in (OLD, NEW):
        result = applied.host(name)
        assert result.status == "ok"
        assert [step.name for step in result.steps] == STEPS
        assert result.verification is not None
        assert result.verification.state == "verified"
        assert set(result.simulated) == {"driver", "gpu", "wheels"}
        assert mixed.lab.host(name).boots() == 2
        assert mixed.shell(name, "nvidia-smi --query-gpu=driver_version --format=csv,noheader | uniq") == "580.95.05\n"
        assert mixed.shell(name, "readlink -f /usr/local/cuda") == "/usr/local/cuda-13.0\n"


@pytest.mark.parametrize(("name", "python"), [(OLD, "3.11"), (NEW, "3.13")])
def test_the_environment_is_of_the_interpreter_that_the_release_has(
    mixed: Rig, applied: Run, name: str, python: str
) -> None:
    version, torch = mixed.shell(name, SERVES).split()
    assert (version.rpartition(".")[0], torch) == (python, "2.9.1+cu130")


def test_a_second_apply_changes_nothing_and_costs_one_command_a_host(mixed: Rig, applied: Run) -> None:
    before = {name: mixed.sessions(name) for name in (OLD, NEW)}
    run = must(mixed.command("apply"))
    assert (run.results.summary.ok, run.results.summary.changes) == (2, 0)
    assert {name: mixed.sessions(name) - before[name] for name in (OLD, NEW)} == {OLD: 1, NEW: 1}


@pytest.mark.parametrize(
    ("spoil", "differs"),
    [
        pytest.param(f"rm {LINKER}; ldconfig", "linker", id="linker"),
        pytest.param("apt-mark unhold libnvidia-compute-580", "driver", id="hold"),
        pytest.param("update-alternatives --set cuda /usr/local/cuda-12.8", "cuda", id="toolkit"),
        pytest.param("rm /opt/bringup/current", "environment", id="environment"),
    ],
)
def test_drift_of_one_thing_is_seen_and_repaired(mixed: Rig, applied: Run, spoil: str, differs: str) -> None:
    serving = mixed.serving(NEW)
    mixed.shell(NEW, spoil)
    found = must(mixed.drift(NEW), 1).differences(NEW)
    assert found
    assert {path.partition(".")[0] for path in found} == {differs}
    assert must(mixed.apply(NEW)).results.summary.changes > 0
    assert must(mixed.drift(NEW)).differences(NEW) == []
    assert mixed.serving(NEW) == serving


def test_another_environment_is_switched_to_and_taken_back(mixed: Rig, applied: Run) -> None:
    serving = mixed.serving(NEW)
    other = variant.write(mixed.lab, mixed.state, "other", without=["tabulate"], platform="cp313-x86_64")
    must(mixed.apply(NEW, *other))
    assert mixed.serving(NEW) != serving
    must(mixed.command("rollback", "--limit", NEW, *other))
    assert mixed.serving(NEW) == serving
    must(mixed.command("rollback", "--limit", NEW, *other, "--unpin"))
    assert must(mixed.apply(NEW)).results.summary.changes == 0
