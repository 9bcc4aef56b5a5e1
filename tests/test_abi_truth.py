"""The guard's verdicts against a real `dlopen`, in a smaller cut of benchmarks/abi_truth.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bringup.paths import root

CACHE = Path(os.environ.get("BRINGUP_TEST_CACHE") or "/var/cache/bringup-tests") / "abi-truth"


@pytest.mark.real
@pytest.mark.timeout(3000)
def test_verdicts_agree_with_the_loader() -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said = subprocess.run(
        [sys.executable, str(root() / "benchmarks" / "abi_truth.py"), str(CACHE), "--quick"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert said.returncode == 0, said.stdout[-4000:] + said.stderr[-2000:]
    assert "left out" not in said.stdout
    counts = [
        line.split() for line in said.stdout.splitlines() if line.startswith(("broken-symbol", "layout-risk", "ok"))
    ]
    assert {(level, outcome) for level, outcome, _ in counts} >= {
        ("broken-symbol", "fails"),
        ("layout-risk", "dies"),
        ("ok", "loads"),
    }
