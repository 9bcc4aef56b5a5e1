"""One environment with torch for every file here that needs one: it takes minutes and gigabytes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TORCH = "torch==2.13.0"


@pytest.fixture(scope="session")
def torch_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an interpreter with torch: BRINGUP_TORCH_PYTHON, or a new environment with torch for CPU or GPU."""
    named = os.environ.get("BRINGUP_TORCH_PYTHON")
    if named:
        return named
    directory = tmp_path_factory.mktemp("torch")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    python = str(directory / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", TORCH, "numpy"], check=True, timeout=900)
    return python
