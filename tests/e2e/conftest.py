"""One lab for all end-to-end tests, and a host in it that the main job has brought to verified."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bringup import paths
from bringup.guard import WheelGuard
from bringup.lab.lab import Lab
from bringup.locking import lock_for_lab
from tests.e2e.rig import Rig, must
from tests.lab.conftest import open_lab

RANGE = "10.92.2.0/24"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the main job find its hosts bare; every other test of that lab starts from what it leaves."""
    items.sort(key=lambda item: item.path.name != "test_main_job.py")


def lock_stacks(lab: Lab) -> None:
    """Lock the stacks against the lab's mirror, as ``bringup lab up`` does."""
    record = lab.record()
    for name in ("lab", "sglang-0.5.9-cu130"):
        made = lock_for_lab(
            paths.stacks() / f"{name}.toml",
            lab.layout.state_dir,
            record.mirror_url,
            key_file=Path(record.apt_key_file),
            key_fingerprint=record.apt_key_fingerprint,
            judge=lambda sources: WheelGuard(sources, keeps_torch=False),
        )
        assert not made.findings, made.findings


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two bare hosts, the stacks locked against their mirror, and an own state directory for the controller."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    lab = open_lab("e2e", RANGE)
    lab.down()
    lab.up(2)
    try:
        lock_stacks(lab)
        yield Rig(lab, tmp_path_factory.mktemp("controller"))
    finally:
        lab.down()


@pytest.fixture(scope="session")
def verified(rig: Rig) -> Rig:
    """The same lab after the main job: both hosts verified with the ``lab`` stack."""
    must(rig.command("apply"))
    return rig
