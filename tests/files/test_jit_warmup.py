"""The warm-up of FlashInfer's modules: its plan, its bounds, and copies from which nothing is compiled again.

The compiler is a stand-in that notes when it runs and takes a while; FlashInfer is one too, with ninja's rule that
an output whose recorded command differs is built again. The real ones were run on two H200s: the answer is a
fixture.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bringup import paths

SCRIPT = paths.files() / "jit_warmup.py"
WARMUP = paths.host_script("jit_warmup")
FIXTURES = Path(__file__).parents[1] / "fixtures" / "bench"
GIB = 1 << 30


def test_it_is_python_3_8_and_imports_the_standard_library_only() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 8))
    top = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    assert top <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    ("processors", "jobs", "available", "per_job", "expected"),
    [
        (32, None, 200 * GIB, 4 * GIB, 32),
        (32, 8, 200 * GIB, 4 * GIB, 8),
        (32, 64, 200 * GIB, 4 * GIB, 32),
        (32, None, 20 * GIB, 4 * GIB, 5),
        (2, None, 1 * GIB, 4 * GIB, 1),
        (16, None, 8 * GIB, 0, 16),
    ],
    ids=["processors", "wish", "wish above processors", "memory", "too little memory", "memory unbounded"],
)
def test_compilers_at_a_time(processors: int, jobs: int | None, available: int, per_job: int, expected: int) -> None:
    assert WARMUP.slots(processors, jobs, available, per_job) == expected


@pytest.mark.parametrize(
    ("modules", "total", "expected"),
    [([], 8, (0, 0)), (["a"], 8, (1, 8)), (["a", "b", "c"], 8, (3, 2)), (list("abcdefghi"), 4, (4, 1))],
)
def test_the_plan_never_exceeds_the_compilers(modules: list[str], total: int, expected: tuple[int, int]) -> None:
    side_by_side, each = WARMUP.plan(modules, total)
    assert (side_by_side, each) == expected
    assert side_by_side * each <= total


@pytest.mark.parametrize(("text", "expected"), [("9.0", "9.0a"), ("9.0a", "9.0a"), ("12.0f", "12.0f"), ("8.9", "8.9")])
def test_architectures(text: str, expected: str) -> None:
    assert WARMUP.architecture(text) == expected


@pytest.fixture
def host() -> Iterator[dict[str, str]]:
    """Make an environment with the stand-in FlashInfer, and a toolkit and c++ that note when they run.

    Other users must get there, which pytest's own directories do not allow.
    """
    with tempfile.TemporaryDirectory(prefix="bringup-test-", dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        yield lay(Path(directory))


def lay(tmp_path: Path) -> dict[str, str]:
    """Lay out what the fixture promises."""
    root = tmp_path / "env"
    # The system's interpreter: another user may not get at the one that runs the tests.
    system = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    subprocess.run([system, "-m", "venv", "--without-pip", str(root)], check=True)
    packages = next(root.glob("lib/python3*/site-packages"))
    shutil.copytree(FIXTURES / "flashinfer_standin" / "flashinfer", packages / "flashinfer")
    log = tmp_path / "log"
    log.touch()
    log.chmod(0o666)
    compiler = (
        "#!/bin/sh\n"
        f'echo "+ $(date +%s%N)" >> {log}\n'
        'sleep "${STANDIN_SECONDS:-0.3}"\n'
        'while [ "$1" ]; do case "$1" in -o) echo object > "$2";; -MF) echo > "$2";; esac; shift; done\n'
        f'echo "- $(date +%s%N)" >> {log}\n'
    )
    toolkit = tmp_path / "cuda"
    (toolkit / "bin").mkdir(parents=True)
    for path in (toolkit / "bin" / "nvcc", root / "bin" / "c++"):
        path.write_text(compiler)
        path.chmod(0o755)
    return {
        "python": str(root / "bin" / "python"),
        "cuda": str(toolkit),
        "cache": str(tmp_path / "cache"),
        "log": str(log),
    }


def run(host: dict[str, str], *arguments: str, capability: str = "9.0") -> tuple[int, dict[str, Any]]:
    """Return status and document of a warm-up."""
    command = [sys.executable, str(SCRIPT), "--python", host["python"], "--cache", host["cache"]]
    command += ["--capability", capability, "--cuda-home", host["cuda"], *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["exit_status"] == done.returncode
    return done.returncode, document


def at_a_time(host: dict[str, str]) -> tuple[int, int]:
    """Return how many compilers ran, and how many at the same time."""
    running = most = count = 0
    lines = [line.split() for line in Path(host["log"]).read_text(encoding="utf-8").splitlines()]
    for mark, _time in sorted(lines, key=lambda line: (int(line[1]), line[0] == "+")):
        running += 1 if mark == "+" else -1
        count += mark == "+"
        most = max(most, running)
    return count, most


def test_modules_are_built_once(host: dict[str, str]) -> None:
    arguments = ["--module", "trtllm_comm", "--module", "norm", "--memory-per-job", "0"]
    status, document = run(host, *arguments)
    assert (status, document["flashinfer"]) == (0, "0.0.1")
    assert {name: entry["state"] for name, entry in document["modules"].items()} == {
        "trtllm_comm": "built",
        "norm": "built",
    }
    assert at_a_time(host)[0] == 8
    status, document = run(host, *arguments)
    assert {entry["state"] for entry in document["modules"].values()} == {"present"}
    assert (status, at_a_time(host)[0]) == (0, 8)


@pytest.mark.parametrize(("jobs", "most"), [("1", 1), ("2", 2)])
def test_never_more_compilers_than_asked_for(host: dict[str, str], jobs: str, most: int) -> None:
    names = ["--module", "trtllm_comm", "--module", "vllm_comm", "--module", "norm"]
    status, document = run(host, *names, "--jobs", jobs, "--memory-per-job", "0")
    assert (status, document["plan"]["compilers"]) == (0, min(most, os.cpu_count() or 1))
    count, seen = at_a_time(host)
    assert count == 12
    assert seen <= most


def test_a_plan_builds_nothing(host: dict[str, str]) -> None:
    status, document = run(host, "--plan", "--module", "trtllm_comm", "--module", "page")
    assert (status, at_a_time(host)[0]) == (0, 0)
    assert {name: entry["state"] for name, entry in document["modules"].items()} == {
        "trtllm_comm": "wanted",
        "page": "absent",
    }


def test_a_module_that_the_architecture_does_not_have(host: dict[str, str]) -> None:
    status, document = run(host, "--module", "trtllm_comm", "--module", "vllm_comm", capability="12.0")
    assert status == 0
    assert document["modules"]["trtllm_comm"]["state"] == "unsupported"
    assert document["modules"]["vllm_comm"]["state"] == "built"


def test_a_module_that_takes_too_long_is_ended(host: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = Path(host["cuda"]) / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\nsleep 347\n")
    status, document = run(host, "--module", "norm", "--module-timeout", "3")
    assert (status, document["modules"]["norm"]["state"]) == (1, "timeout")
    assert document["modules"]["norm"]["error"] == "took more than 3 s"
    sleeping = [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists() and b"sleep\x00347" in path.read_bytes()
    ]
    assert sleeping == []


def test_a_compiler_that_fails_is_named(host: dict[str, str]) -> None:
    (Path(host["cuda"]) / "bin" / "nvcc").write_text("#!/bin/sh\necho 'fatal error: out of luck' >&2\nexit 1\n")
    status, document = run(host, "--module", "norm")
    assert (status, document["modules"]["norm"]["state"]) == (1, "failed")
    assert "out of luck" in document["modules"]["norm"]["error"]
    assert document["message"] == "not done: norm"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files to another user needs root")
def test_another_user_compiles_nothing(host: dict[str, str]) -> None:
    status, document = run(host, "--module", "trtllm_comm", "--module", "norm", "--user", "nobody")
    assert (status, document["users"]["nobody"]["state"]) == (0, "seeded")
    assert document["users"]["nobody"]["proved"] == "nobody compiled nothing"
    assert at_a_time(host)[0] == 8
    copied = Path(host["cache"]) / "nobody" / "flashinfer"
    owners = {path.lstat().st_uid for path in copied.rglob("*")}
    assert owners == {65534}
    master = Path(host["cache"]) / "root" / "flashinfer"
    assert {path.lstat().st_uid for path in master.rglob("*")} == {0}
    assert [path.name for path in Path(host["cache"]).iterdir() if path.name.startswith(".")] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files to another user needs root")
def test_a_user_that_does_not_exist_is_said(host: dict[str, str]) -> None:
    status, document = run(host, "--module", "norm", "--user", "nosuchuser")
    assert (status, document["users"]["nosuchuser"]) == (1, {"state": "failed", "error": "no such user"})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--module", "magic"], "unknown module 'magic'"),
        (["--capability", "sm_90"], "a compute capability looks like 9.0"),
    ],
)
def test_usage_errors_leave_a_document(host: dict[str, str], arguments: list[str], says: str) -> None:
    status, document = run(host, *arguments)
    assert status == 2
    assert says in document["message"]


def test_without_flashinfer_or_compiler(host: dict[str, str]) -> None:
    (Path(host["cuda"]) / "bin" / "nvcc").unlink()
    status, document = run(host, "--module", "norm")
    assert (status, document["message"]) == (2, f"there is no nvcc in {host['cuda']}")
    shutil.rmtree(next(Path(host["python"]).parents[1].glob("lib/python3*/site-packages/flashinfer")))
    status, document = run(host, "--module", "norm")
    assert (status, document["message"]) == (4, "No module named 'flashinfer'")


def test_the_run_on_two_h200s() -> None:
    document = json.loads((FIXTURES / "h200x2_jit_warmup.json").read_text(encoding="utf-8"))
    assert {entry["state"] for entry in document["modules"].values()} == {"built"}
    assert document["users"]["nobody"]["proved"] == "nobody compiled nothing"
