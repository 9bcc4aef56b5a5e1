"""A lab of the tests' own, apart from the one that `make up` leaves running."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bringup.lab.lab import Lab

CACHE = Path(os.environ.get("BRINGUP_TEST_CACHE") or "/var/cache/bringup-tests")
"""Holds the base image and the mirror's files between runs."""

LAB_RANGE = "10.92.0.0/24"
SPARE_RANGE = "10.92.1.0/24"


_opened: set[Path] = set()


def labs_of_this_run() -> set[Path]:
    """Return the state directories of every lab that this run opened."""
    return _opened


def open_lab(name: str, addresses: str) -> Lab:
    """Return a lab below the cache; all of them start from one base image."""
    state_dir = CACHE / name
    _opened.add(state_dir)
    state_dir.mkdir(parents=True, exist_ok=True)
    bases = CACHE / "base"
    bases.mkdir(exist_ok=True)
    link = state_dir / "base"
    if not link.exists():
        link.symlink_to(bases)
    return Lab.open(state_dir, addresses, tell=lambda line: print(f"lab: {line}"))


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Two running hosts for the whole session. A test that spoils one resets it before or after."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    made = open_lab("lab", LAB_RANGE)
    made.up(2)
    yield made
    made.down()


@pytest.fixture
def spare() -> Iterator[Lab]:
    """A second lab that is down, for tests that bring labs up, break them and look for what is left."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    made = open_lab("spare", SPARE_RANGE)
    made.down()
    yield made
    made.down()
