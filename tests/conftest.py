"""Whatever happens in a run, no rehearsal host of the tests outlives it."""

from __future__ import annotations

import os
import signal
import sys

import pytest

SLOW = (
    *("test_dask_executor", "test_rollout_command", "test_abi_command", "test_engine", "test_ending"),
    *("test_allreduce_bench", "test_host_work", "test_host_env", "test_jit_warmup", "test_probe_count"),
    *("test_lock_command", "test_lock_proposal", "test_lock_rehearsal", "test_lock_resolve", "test_lock_fetch"),
    *("test_bootstrap", "test_bundle", "test_stack_check", "test_mirror"),
)
"""Files whose tests wait for processes of their own, for seconds: not part of `make test-quick`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test-quick` leaves out."""
    for item in items:
        if item.path.stem in SLOW:
            item.add_marker("slow")


def pytest_configure() -> None:
    """Let whoever ends a run have it clean up as Ctrl-C does; a shell's background jobs ignore even that."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Take down every lab that a test left up, and say so: the test that left it has a fault."""
    if os.geteuid() != 0 or "tests.lab.conftest" not in sys.modules:
        return
    from bringup.lab.lab import Lab
    from tests.lab.conftest import labs_of_this_run

    for state_dir in labs_of_this_run():
        lab = Lab.open(state_dir)
        if (state_dir / "range").exists():
            print(f"\ntests: {state_dir} was left up; taking it down", file=sys.stderr)
            lab.down()
            session.exitstatus = session.exitstatus or 1
