"""The guard's story with real wheels: a kernel wheel beside the torch it was built for, and beside the next one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bringup.locking import write_lock
from bringup.stack import LockedFile, LockedPlatform, LockedStep, parse_lock
from tests.e2e.rig import Rig, Run, argv, must, told
from tests.lab.conftest import CACHE, open_lab

# 5.6 GB may have to be fetched, and 11 GB are written.
pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]

RANGE = "10.92.14.0/24"
HOST = "gpu-01"
PLATFORM = "cp311-x86_64"
KERNELS = "sgl_kernel-0.3.21-cp310-abi3-manylinux2014_x86_64.whl"
# Both names, as the lock must say them, with the torch that has them.
REASONS = (
    "broken-symbol: undefined symbol: c10::MessageLogger::MessageLogger(char const*, int, int) "
    "(_ZN3c1013MessageLoggerC1EPKcii); undefined symbol: c10::cuda::c10_cuda_check_implementation(int, char const*, "
    "char const*, int, bool) (_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib); it fits torch 2.9.1"
)
TORCH_STEP = """
[[python.step]]
name = "torch"
requirements = ["torch=={torch}"]
imports = ["torch"]
"""
KERNEL_STEP = """
[[python.step]]
name = "sgl-kernel"
requirements = ["sgl-kernel==0.3.21"]
imports = ["sgl_kernel"]
"""
# Both torch releases of the public index are builds for CUDA 12.8.
HEAD = """
schema = 1
name = "{name}"

[driver]
branch = "580"
version = "580.95.05"
minimum = "580.65.06"
flavour = "open"

[cuda]
toolkits = ["12.8"]
default = "12.8"

[linker]
"libnvrtc.so.12" = "12.8"

[python]
interpreter = "3.11"
cuda = "12.8"
"""
# What serves: the environment, what it holds, and that its import still works.
SERVING = """
readlink /opt/bringup/current; readlink -f /usr/local/cuda; cat /etc/bringup/service.env
/opt/bringup/bin/run python -c 'import torch, sgl_kernel; print(torch.__version__)'
"""
VERIFY = """
[verify]
gpus = 8
"""


@dataclass(frozen=True)
class Locking:
    """What one ``bringup lock`` came to: the exit status, the lock it wrote (None: none) and what it says."""

    status: int
    lock: Path | None
    causes: tuple[str, ...]


def stack(directory: Path, name: str, torch: str, *steps: str) -> Path:
    path = directory / f"{name}.toml"
    path.write_text(HEAD.format(name=name) + TORCH_STEP.format(torch=torch) + "".join(steps) + VERIFY)
    return path


def lock(path: Path) -> Locking:
    """Lock a stack against the public index."""
    started = time.monotonic()
    done = subprocess.run(
        argv(["lock", str(path), "--platform", PLATFORM, "--json"]), capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    print(f"lock {path.stem}: {time.monotonic() - started:.1f} s")
    said = json.loads(done.stdout)
    written = path.with_name(path.name.replace(".toml", ".lock.toml"))
    causes = tuple(found["cause"] for found in said["findings"].get(PLATFORM, ()))
    return Locking(done.returncode, written if written.exists() else None, causes)


def steps(lock_file: Path) -> tuple[LockedStep, ...]:
    wheels = parse_lock(lock_file.read_text(), source=str(lock_file)).wheels
    assert wheels is not None
    return wheels.platforms[PLATFORM].steps


def locked(lock_file: Path, distribution: str) -> LockedFile:
    (found,) = (file for step in steps(lock_file) for file in step.files if file.distribution == distribution)
    return found


@dataclass(frozen=True)
class Story:
    """The three locks of the story, and the forced set: the newer torch with the kernel wheel put beside it."""

    fitting: Locking
    newer: Locking
    forced: Path


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Lock both sets, and put together by hand the lock that ``bringup lock`` does not write."""
    directory = tmp_path_factory.mktemp("stacks")
    fitting = lock(stack(directory, "story", "2.9.1", KERNEL_STEP))
    newer = lock(stack(directory, "newer", "2.10.0", KERNEL_STEP))
    alone = lock(stack(directory, "alone", "2.10.0")).lock
    assert fitting.lock is not None
    assert alone is not None
    path = stack(directory, "forced", "2.10.0", KERNEL_STEP)
    kernels = locked(fitting.lock, "sgl-kernel").model_copy(update={"verdict": None})
    platform = LockedPlatform(steps=(*steps(alone), LockedStep(name="sgl-kernel", files=(kernels,))))
    of_torch = parse_lock(alone.read_text(), source=str(alone))
    assert of_torch.wheels is not None
    wheels = of_torch.wheels.model_copy(update={"platforms": {PLATFORM: platform}})
    forced = of_torch.model_copy(update={"stack": "forced", "wheels": wheels})
    write_lock(path.with_name("forced.lock.toml"), forced)
    return Story(fitting, newer, path)


def test_the_set_that_fits_is_locked(story: Story) -> None:
    assert story.fitting.status == 0
    assert story.fitting.lock is not None
    assert locked(story.fitting.lock, "torch").version == "2.9.1"
    assert locked(story.fitting.lock, "sgl-kernel").verdict == "ok"


def test_the_lock_refuses_the_next_torch_and_names_the_one_that_fits(story: Story) -> None:
    assert (story.newer.status, story.newer.lock) == (1, None)
    assert story.newer.causes == (f"{KERNELS} would not load beside the locked torch: {REASONS}",)


@pytest.fixture(scope="module")
def served(story: Story, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One host of a lab whose mirror serves every wheel of both sets."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    lab = open_lab("story", RANGE)
    lab.down()
    cache = os.environ.get("BRINGUP_WHEEL_CACHE") or str(CACHE / "wheels")
    rig = Rig(lab, tmp_path_factory.mktemp("story"), {"BRINGUP_LAB_RANGE": RANGE, "BRINGUP_WHEEL_CACHE": cache})
    assert story.fitting.lock is not None
    fitting = story.fitting.lock.with_name("story.toml")
    try:
        started = time.monotonic()
        words = ["lab", "up", "--hosts", "1", "--stack", str(fitting), "--stack", str(story.forced), "--json"]
        done = subprocess.run(argv(words), env=rig.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        print(f"lab up with both sets: {time.monotonic() - started:.0f} s")
        install_libnuma(rig, tmp_path_factory.mktemp("deb"))
        yield rig
    finally:
        lab.down()


def install_libnuma(rig: Rig, directory: Path) -> None:
    """Put what sgl-kernel takes from the host's release on the host; lab hosts reach no mirror of Debian's."""
    subprocess.run(["apt-get", "-q", "download", "libnuma1"], cwd=directory, check=True, capture_output=True)
    (package,) = directory.glob("libnuma1_*.deb")
    script = "base64 -d > /root/libnuma1.deb && dpkg -i /root/libnuma1.deb"
    done = rig.lab.run(HOST, ["sh", "-c", script], input_text=b64encode(package.read_bytes()).decode())
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def applied(served: Rig, story: Story) -> Run:
    """The set that fits, from bare."""
    assert story.fitting.lock is not None
    return timed(served, str(story.fitting.lock.with_name("story.toml")), 0)


def timed(rig: Rig, path: str, status: int) -> Run:
    started = time.monotonic()
    run = must(rig.apply(HOST, "--stack", path), status)
    print(f"apply {Path(path).stem}: {time.monotonic() - started:.0f} s")
    for step in run.host(HOST).steps:
        print(f"  {step.name}: {step.seconds:.1f} s")
    return run


def test_the_set_that_fits_is_built_and_its_import_works(served: Rig, applied: Run) -> None:
    assert applied.host(HOST).status == "ok", told(applied)
    code = "import torch, sgl_kernel; print(torch.__version__, sgl_kernel.common_ops.__file__)"
    said = served.shell(HOST, f'/opt/bringup/bin/run python -c "{code}"').splitlines()[-1]
    assert re.fullmatch(r"2\.9\.1\+cu128 /opt/bringup/envs/.*/sgl_kernel/sm\d+/common_ops\.abi3\.so", said), said


def test_forced_onto_a_host_it_is_refused_in_the_same_words(served: Rig, applied: Run, story: Story) -> None:
    before = served.shell(HOST, SERVING)
    run = timed(served, str(story.forced), 1)
    (finding,) = [found for found in run.host(HOST).findings if found.severity == "error"]
    assert (run.host(HOST).status, finding.code) == ("refused", "BU-ENV-123"), told(run)
    assert finding.cause == f"step sgl-kernel: sgl-kernel 0.3.21 does not go with torch 2.10.0+cu128: {REASONS}"
    assert finding.cause.partition("+cu128: ")[2] == story.newer.causes[0].partition("torch: ")[2]
    last = [event for event in run.events if event["event"] == "step_done"][-1]
    assert (last["step"], last["status"]) == ("environment", "failed")
    assert served.shell(HOST, SERVING) == before
