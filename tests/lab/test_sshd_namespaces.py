"""The sshds that benchmarks put beside lab hosts: bringup finds the host behind each, and nothing of them stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks import sshd_namespaces
from bringup import paths
from bringup.errors import InputError, LabError
from bringup.lab import network, process
from bringup.lab.lab import Lab
from tests.e2e.conftest import lock_stacks
from tests.e2e.rig import Rig
from tests.lab.conftest import open_lab

pytestmark = pytest.mark.lab

RANGE = "10.93.1.0/24"

OWNER = """
import subprocess, sys, time
from pathlib import Path
from benchmarks import sshd_namespaces
from bringup.lab.lab import Lab

state_dir, known_hosts, ending = sys.argv[1:]
lab = Lab.open(Path(state_dir))
with sshd_namespaces.beside(lab) as sshds:
    one, *_ = sshds.first(3)
    Path(known_hosts).write_text(f"{one.address} {one.host_key}\\n")
    options = ["-F", "none", "-i", str(lab.layout.client_key), "-o", f"UserKnownHostsFile={known_hosts}"]
    session = ["ssh", *options, "-o", "BatchMode=yes", f"root@{one.address}", "echo inside; exec sleep 4242"]
    subprocess.Popen(session, stdin=subprocess.DEVNULL, stdout=sys.stdout)
    if ending != "end":
        time.sleep(60)
        raise AssertionError("nobody ended this")
    while "4242" not in lab.inside(one.host, ["pgrep", "-a", "sleep"]).stdout:
        time.sleep(0.05)
"""
"""Starts three, keeps a session open in one, and waits to be ended; or ends by itself."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two bare hosts, and the stacks locked against their mirror."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    lab = open_lab("sshd-namespaces", RANGE)
    lab.down()
    lab.up(2)
    try:
        lock_stacks(lab)
        yield Rig(lab, tmp_path_factory.mktemp("sshd-namespaces"))
    finally:
        lab.down()


def left_behind(lab: Lab) -> list[str]:
    """Return everything that the machine and the lab's hosts have of sshds beside them."""
    own = {str(host.plan.address) for host in lab.hosts.values()}
    addresses = {str(address): address for address in lab.addresses.network.hosts()}
    beside = [address for text, address in addresses.items() if text not in own]
    found = [f"namespace {a}" for a in beside if (network.NAMESPACES / network.namespace(a)).exists()]
    found += [f"cable {a}" for a in beside if (Path("/sys/class/net") / network.cable(a)).exists()]
    listeners = f"/{sshd_namespaces.NAME}/{RANGE.removesuffix('0/24')}"
    found += [f"process {pid}" for pid in process.mentioning(listeners)]
    found += [f"session {pid}" for pid in process.with_arguments("sleep", "4242")]
    for name, host in lab.hosts.items():
        groups = json.loads((host.directory / "supervisor.json").read_text())["groups"]
        found += [f"group {group}" for group in groups if (Path(group) / sshd_namespaces.NAME).exists()]
        keys = lab.inside(name, ["find", "/run", "-path", f"*/{sshd_namespaces.NAME}*"])
        found += [f"key {name} {path}" for path in keys.stdout.splitlines()]
    return found


ALL_KINDS = {"namespace", "cable", "process", "session", "group", "key"}


def kinds(found: list[str]) -> set[str]:
    return {line.split()[0] for line in found}


def test_bringup_finds_the_lab_host_behind_each_and_its_own_key(rig: Rig) -> None:
    with sshd_namespaces.beside(rig.lab) as sshds:
        first, second, third = sshds.first(3)
        assert [first.host, second.host, third.host] == ["gpu-01", "gpu-02", "gpu-01"]
        assert [first.address, second.address, third.address] == ["10.93.1.254", "10.93.1.253", "10.93.1.252"]
        # The lab's own keys name the hosts' addresses only: each is known by the key that it was given.
        known, mistaken = rig.state / "known", rig.state / "mistaken"
        known.write_text("".join(f"{sshd.address} {sshd.host_key}\n" for sshd in (first, second, third)))
        mistaken.write_text(f"{first.address} {second.host_key}\n")
        behind = {"first": first, "second": second, "third": third}
        hosts = [(name, {"ssh_hostname": s.address, "ssh_known_hosts_file": str(known)}) for name, s in behind.items()]
        hosts.append(("stranger", {"ssh_hostname": first.address, "ssh_known_hosts_file": str(mistaken)}))
        inventory = rig.inventory(
            "beside",
            "from bringup.lab.record import inventory\nown, data = inventory()\n"
            f"lab = ([*own, *{hosts!r}], {{**data, 'bringup_stack': 'lab'}})\n",
        )
        looked = rig.command("drift", inventory=inventory)
        assert {name: looked.host(name).status for name in looked.results.hosts} == {
            "gpu-01": "drift", "gpu-02": "drift", "first": "drift", "second": "drift", "third": "drift",
            "stranger": "unknown",
        }  # fmt: skip
        for name, sshd in behind.items():
            assert looked.differences(name) == looked.differences(sshd.host) != []
        journal = "journalctl --sync && journalctl --boot --identifier=sshd --output=cat --no-pager"
        told = rig.lab.inside("gpu-01", ["sh", "-c", journal]).stdout
        assert len(re.findall("Starting session", told)) == 3, "gpu-01 itself, first and third"
    assert left_behind(rig.lab) == []


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        pytest.param("end", 0, id="the context ends"),
        pytest.param(signal.SIGINT, 130, id="SIGINT"),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM"),
        pytest.param(signal.SIGKILL, -9, id="SIGKILL, then the next context"),
    ],
)
def test_nothing_stays(rig: Rig, ending: str | signal.Signals, status: int) -> None:
    argv = [sys.executable, "-c", OWNER, str(rig.lab.layout.state_dir), str(rig.state / "one"), str(ending)]
    with subprocess.Popen(argv, cwd=paths.root(), stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "inside\n"
            if isinstance(ending, signal.Signals):
                assert kinds(left_behind(rig.lab)) == ALL_KINDS
                owner.send_signal(ending)
            assert owner.wait(30) == status
        finally:
            owner.kill()
    if ending == signal.SIGKILL:
        assert kinds(left_behind(rig.lab)) == ALL_KINDS
        with sshd_namespaces.beside(rig.lab):
            assert left_behind(rig.lab) == []
    assert left_behind(rig.lab) == []


def test_an_exception_leaves_nothing(rig: Rig) -> None:
    with suppress(ZeroDivisionError), sshd_namespaces.beside(rig.lab) as sshds:
        sshds.first(1)
        assert kinds(left_behind(rig.lab)) == ALL_KINDS - {"session"}
        raise ZeroDivisionError
    assert left_behind(rig.lab) == []


def test_what_cannot_be_is_refused_before_anything_is_made(rig: Rig) -> None:
    with sshd_namespaces.beside(rig.lab) as sshds:
        with pytest.raises(LabError, match="another process has sshds"), sshd_namespaces.beside(rig.lab):
            pass
        with pytest.raises(InputError, match="no addresses for 243 sshds") as caught:
            sshds.first(243)
        assert caught.value.why == "242 are left above the lab's hosts"
        assert left_behind(rig.lab) == []
