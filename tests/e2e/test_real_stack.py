"""The real wheels on a lab host: fetched into the mirror, guarded, imported, and measured as far as a CPU can."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bringup import paths
from bringup.stack import load_stack
from tests.e2e.rig import Rig, Run, argv, must
from tests.lab.conftest import CACHE, open_lab

# 3.9 GB may have to be fetched and 9 GB to be written.
pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]

RANGE = "10.92.6.0/24"
HOST = "gpu-01"
STACK = "sglang-cu130"
DRIVER_API = re.compile(r"cu(?!File)[A-Z]\w+")
MODULES = ("torch", "sgl_kernel", "flashinfer")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One host of a lab that ``bringup lab up`` itself made ready for the real stack, as ``make up`` does."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    lab = open_lab("real", RANGE)
    lab.down()
    cache = os.environ.get("BRINGUP_WHEEL_CACHE") or str(CACHE / "wheels")
    rig = Rig(
        lab,
        tmp_path_factory.mktemp("real"),
        {"BRINGUP_LAB_RANGE": RANGE, "BRINGUP_WHEEL_CACHE": cache},
    )
    try:
        started = time.monotonic()
        lab_up(rig)
        print(f"lab up with the real stack: {time.monotonic() - started:.0f} s")
        yield rig
    finally:
        lab.down()


def lab_up(rig: Rig) -> dict[str, Any]:
    done = subprocess.run(
        argv(["lab", "up", "--hosts", "1", "--stack", STACK, "--json"]),
        env=rig.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.fixture(scope="module")
def applied(real: Rig) -> Run:
    """The main job with the real stack, from bare."""
    started = time.monotonic()
    run = must(real.apply(HOST, "--stack", STACK, inventory=paths.root() / "inventory" / "lab.py"))
    print(f"apply: {time.monotonic() - started:.0f} s")
    for step in run.host(HOST).steps:
        print(f"  {step.name}: {step.seconds:.1f} s")
    return run


def checked(rig: Rig) -> Mapping[str, Any]:
    """Return what the stack check saw on the host when it was proved."""
    document: Mapping[str, Any] = json.loads(rig.shell(HOST, "cat /run/bringup/documents/stack_check.json"))
    return document


def test_lab_up_puts_every_locked_wheel_into_the_mirror(real: Rig) -> None:
    stack = load_stack(paths.stacks() / f"{STACK}.toml")
    files = [file for step in stack.locked_steps("cp311-x86_64") or () for file in step.files]
    assert len(files) > 50
    simple = real.lab.layout.mirror / "wheels"
    for file in files:
        directory = simple / file.index / "simple" / file.distribution
        assert (directory / file.file).stat().st_size == file.size_bytes
        assert file.sha256 in (directory / "index.html").read_text()
    assert lab_up(real)["made"] == []


def test_a_bare_host_becomes_verified_with_real_wheels(real: Rig, applied: Run) -> None:
    result = applied.host(HOST)
    assert (result.status, result.simulated) == ("ok", ("gpu", "driver"))
    assert result.verification is not None
    assert result.verification.state == "verified"
    seen = checked(real)["imports"]
    assert {name: seen[name]["empty"]["ok"] for name in MODULES} == dict.fromkeys(MODULES, True)
    assert seen["torch"]["empty"]["torch"]["cuda"] == "13.0"


def test_eight_ranks_really_reduce_over_gloo(applied: Run) -> None:
    verification = applied.host(HOST).verification
    assert verification is not None
    gloo, nccl = verification.backends
    assert (gloo.backend, gloo.state, gloo.ranks) == ("gloo", "measured", 8)
    assert gloo.busbw_gb_per_s is not None
    assert gloo.busbw_gb_per_s > 0
    assert gloo.reason == "on CPU: no GPU took part"
    assert (nccl.backend, nccl.state, nccl.reason) == ("nccl", "not_run", "the GPUs are simulated")


@pytest.mark.parametrize("toolkit", ["12.8", "13.0"])
def test_nvrtc_of_each_toolkit_compiles_for_blackwell(real: Rig, applied: Run, toolkit: str) -> None:
    seen = checked(real)["nvrtc"][toolkit]["empty"]
    assert seen["loaded_from"].startswith(f"/usr/local/cuda-{toolkit}/")
    assert seen["builtins_from"].startswith(f"/usr/local/cuda-{toolkit}/")
    (compiled,) = seen["compiles"]
    assert (compiled["capability"], compiled["ok"]) == ("12.0", True)
    assert compiled["cubin_bytes"] > 1000


def test_everything_imports_over_a_libcuda_made_of_the_names_it_asks_for(
    real: Rig, applied: Run, tmp_path: Path
) -> None:
    probe = (paths.files() / "abi_probe.py").read_text()
    done = real.lab.run(HOST, ["python3", "-", "/opt/bringup/current"], input_text=probe)
    answer = json.loads(done.stdout.splitlines()[-1])
    asked = {answer["names"][number] for file in answer["files"] for number in file.get("undefined", ())}
    names = sorted(name for name in asked if DRIVER_API.fullmatch(name))
    assert "cuPointerGetAttribute" in names
    real.lab.run(
        HOST, ["sh", "-c", "mkdir -p /run/stub && base64 -d > /run/stub/libcuda.so.1"], input_text=stub(tmp_path, names)
    )
    code = (
        f"import {', '.join(MODULES)}\n"
        "print(torch.__version__, torch.cuda.is_available())\n"
        "print(*sorted({line.split()[-1] for line in open('/proc/self/maps') if '/libcuda.so' in line}))"
    )
    said = real.shell(HOST, f'LD_LIBRARY_PATH=/run/stub /opt/bringup/bin/run python -c "{code}"').splitlines()
    print(f"libcuda.so.1 is a stub of {len(names)} names, made for this test: {' '.join(names)}")
    assert said[-2:] == ["2.14.1+cu130 False", "/run/stub/libcuda.so.1"]


def stub(directory: Path, names: list[str]) -> str:
    """Return, in base64, a libcuda that has these functions; each says that there is no device."""
    source = directory / "libcuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))
    built = directory / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(built), str(source)], check=True)
    return subprocess.run(["base64", str(built)], check=True, capture_output=True, text=True).stdout


def test_a_second_apply_changes_nothing(real: Rig, applied: Run) -> None:
    assert must(real.drift(HOST, "--stack", STACK)).differences(HOST) == []
    started = time.monotonic()
    run = must(real.apply(HOST, "--stack", STACK))
    print(f"second apply: {time.monotonic() - started:.1f} s")
    assert run.results.summary.changes == 0
