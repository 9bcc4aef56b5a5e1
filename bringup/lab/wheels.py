"""Build the wheel indexes of the lab from declarative descriptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def build(cache: Path, say: Callable[[str], None]) -> Path:
    """Build every index below ``cache`` and return the directory that holds them, one folder per index."""
    raise NotImplementedError
