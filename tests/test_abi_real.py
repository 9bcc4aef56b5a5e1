"""The guard's story with the real wheels of the public index, read where they lie (about 5 MB of network)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

SYMBOLS = {
    "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib",
    "_ZN3c1013MessageLoggerC1EPKcii",
}
STACK = """
schema = 1
name = "story"

[driver]
branch = "580"
version = "580.95.05"

[cuda]
toolkits = ["12.8"]
default = "12.8"

[python]
interpreter = "3.12"
cuda = "12.8"

[[python.step]]
name = "torch"
requirements = ["torch==TORCH"]

[[python.step]]
name = "sgl-kernel"
requirements = ["sgl-kernel==0.3.21"]
"""


def bringup(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bringup.cli", *arguments], capture_output=True, text=True, check=False, timeout=300
    )


def test_check_says_it_before_the_download():
    done = bringup("abi", "check", "sgl-kernel==0.3.21", "--torch", "2.10.0", "--json")
    (wheel,) = json.loads(done.stdout)["wheels"]
    broken = [f for f in wheel["findings"] if f["kind"] == "broken-symbol"]
    assert (done.returncode, wheel["verdict"], wheel["fits_torch"]) == (1, "broken-symbol", ["2.9.1"])
    assert {f["symbol"] for f in broken} == SYMBOLS
    assert {f["file"] for f in broken} == {
        "sgl_kernel/flash_ops.abi3.so",
        "sgl_kernel/flashmla_ops.abi3.so",
        "sgl_kernel/sm100/common_ops.abi3.so",
        "sgl_kernel/sm90/common_ops.abi3.so",
    }
    assert wheel["size_bytes"] == 535_601_072
    assert wheel["bytes_fetched"] < 2_200_000


@pytest.mark.parametrize(("torch", "status"), [("2.9.1", 0), ("2.8.0", 1), ("2.10.0", 1), ("2.11.0", 1)])
def test_check_lets_pass_what_fits(torch, status):
    assert bringup("abi", "check", "sgl-kernel==0.3.21", "--torch", torch).returncode == status


def test_lock_refuses_the_set_and_takes_the_one_that_fits(tmp_path: Path):
    path = tmp_path / "story.toml"
    path.write_text(STACK.replace("TORCH", "2.10.0"))
    done = bringup("lock", str(path), "--platform", "cp312-x86_64")
    assert done.returncode == 1
    assert not (tmp_path / "story.lock.toml").exists()
    for text in (*SYMBOLS, "BU-ENV-306", "it fits torch 2.9.1"):
        assert text in done.stderr
    path.write_text(STACK.replace("TORCH", "2.9.1"))
    done = bringup("lock", str(path), "--platform", "cp312-x86_64")
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in (tmp_path / "story.lock.toml").read_text().splitlines() if '"sgl-kernel", version' in x]
    assert 'verdict = "ok"' in line


def test_a_part_of_the_matrix_is_as_measured():
    program = Path(__file__).parents[1] / "benchmarks" / "abi_matrix.py"
    wheels = ("sgl-deep-ep", "torchaudio", "torchcodec", "xformers")
    done = subprocess.run(
        [sys.executable, str(program), "--only", *wheels], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 wheels, 128 cells, 128 equal, 0 different" in done.stdout
