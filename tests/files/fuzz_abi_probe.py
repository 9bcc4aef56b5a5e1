"""Fuzz the ELF reader with atheris, coverage-guided; not collected by pytest.

Usage: uv run --no-project --with atheris python tests/files/fuzz_abi_probe.py [CORPUS…] -max_total_time=600

The first byte of an input picks the reader, the rest is the file. Only ElfError may come out, within the
limits that libFuzzer is told here. Inputs worth keeping go to tests/fixtures/abi/corpus, where the tests run them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "files"))
with atheris.instrument_imports():
    import abi_probe


def read(data: bytes) -> None:
    """Read one input as the tests do."""
    if not data:
        return
    kind, body = data[0] % 3, data[1:]
    try:
        if kind == 0:
            abi_probe.read_bytes(body)
        elif kind == 1:
            abi_probe.read_prefix(body, len(body), "x.so")
        else:
            abi_probe.read_prefix(body, len(body) + (1 << 28), "libone.so.1.0")
    except abi_probe.ElfError:
        pass


if __name__ == "__main__":
    limits = ["-max_len=8192", "-timeout=5", "-rss_limit_mb=512"]
    atheris.Setup([*sys.argv[:1], *limits, *sys.argv[1:]], read)
    atheris.Fuzz()
