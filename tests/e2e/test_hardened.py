"""A host with the habits of a hardened site: a sudo user, umask 077, noexec /tmp, /opt apart, a proxy as way out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bringup.lab.shape import PROXY_PORT, Trait
from tests.e2e import watch
from tests.e2e.conftest import lock_stacks
from tests.e2e.rig import Rig, Run, must
from tests.lab.conftest import open_lab

pytestmark = pytest.mark.lab

RANGE = "10.92.4.0/24"
HOST = "gpu-01"

INVENTORY = f"""
from bringup.lab.record import inventory
hosts, data = inventory()
controller = data["bringup_apt_url"].split("/")[2].split(":")[0]
own = {{
    "ssh_user": "operator",
    "_sudo": True,
    "bringup_stack": "lab",
    "bringup_reboot": "allowed",
    "bringup_proxy": f"http://{{controller}}:{PROXY_PORT}",
}}
lab = (hosts, {{**data, **own}})
"""


@pytest.fixture(scope="module")
def hardened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One bare host with every trait that hosts of hardened sites have."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    lab = open_lab("hardened", RANGE)
    lab.down()
    lab.up(1, traits={HOST: tuple(Trait)})
    try:
        lock_stacks(lab)
        yield Rig(lab, tmp_path_factory.mktemp("hardened"))
    finally:
        lab.down()


@pytest.fixture(scope="module")
def inventory(hardened: Rig) -> Path:
    return hardened.inventory("hardened", INVENTORY)


@pytest.fixture(scope="module")
def applied(hardened: Rig, inventory: Path) -> Run:
    """The main job on that host, with every temporary file of it watched."""
    watch.start(hardened, HOST)
    return must(hardened.apply(HOST, inventory=inventory))


def test_the_host_is_as_hard_as_it_is_meant_to_be(hardened: Rig) -> None:
    record = hardened.lab.record()
    direct = f"python3 -c 'import urllib.request as r; r.ProxyHandler({{}}); r.urlopen(\"{record.apt_url}Packages\")'"
    script = (
        "umask; findmnt -no OPTIONS /tmp | grep -o noexec; "
        f"env -u http_proxy {direct} 2>&1 | tail -n 1; "
        "test $(stat -c %d /opt) != $(stat -c %d /) && echo apart"
    )
    said = hardened.lab.run(HOST, ["sudo", "sh", "-c", script], user="operator").stdout.splitlines()
    assert said[0] == "0077"
    assert said[1] == "noexec"
    assert said[2].startswith("urllib.error.URLError"), said
    assert said[3:] == ["apart"]


def test_it_comes_to_the_same_state(hardened: Rig, inventory: Path, applied: Run) -> None:
    result = applied.host(HOST)
    assert result.status == "ok"
    assert result.verification is not None
    assert result.verification.state == "verified"
    assert must(hardened.drift(HOST, inventory=inventory)).differences(HOST) == []
    assert must(hardened.apply(HOST, inventory=inventory)).results.summary.changes == 0


def test_a_service_user_can_use_the_environment(hardened: Rig, applied: Run) -> None:
    script = (
        "/opt/bringup/bin/run python -c "
        '"import os, torch, sgl_kernel, flashinfer; print(torch.__version__, os.environ[\\"TRITON_CACHE_DIR\\"])"'
    )
    version, cache = hardened.shell(HOST, f"setpriv --reuid=nobody --clear-groups {script}").split()
    assert version == "2.9.1+cu130"
    assert cache.startswith("/var/cache/bringup/")
    assert cache.endswith("/nobody/triton")
    unreadable = "cd /; setpriv --reuid=nobody --clear-groups find -L /opt/bringup/current/ ! -readable 2>&1 | head"
    assert hardened.shell(HOST, unreadable) == ""


def test_no_temporary_file_can_be_guessed_or_read(hardened: Rig, applied: Run) -> None:
    seen = watch.appeared(hardened, HOST)
    assert any(one.path.startswith("/run/bringup/jobs/") for one in seen)
    assert sorted(set(watch.complaints(seen))) == []
    assert hardened.shell(HOST, "ls /run/bringup/credentials /run/bringup/order-* 2>/dev/null || :") == ""
