"""Every rule on an observed host: one thing wrong gives one finding with its code, severity and words."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from host_case import (
    NOW_S,
    SITE,
    Answer,
    Change,
    both,
    converged,
    drop,
    library,
    observed,
    package,
    pci,
    put,
    stack,
    unit,
)

from bringup import catalog, host_state, wanted
from bringup.finding import Finding
from bringup.findings import all_findings, preflight
from bringup.stack import Stack

CAPTURED = Path(__file__).parents[1] / "fixtures/probe/h200x2_answer.json"
ROOT = Path(__file__).parents[2]

Described = Callable[[Answer], object]


def judged(
    *changes: Change, described: Described | None = None, lock: Described | None = None, now_s: float = NOW_S
) -> list[Finding]:
    """Return what the rules say about the changed host."""
    return list(all_findings(stack(described, lock=lock), observed(*changes), now_s=now_s, site=SITE))


def test_a_host_as_wanted_has_no_finding() -> None:
    assert judged() == []


def source(file: str, uri: str, signed_by: str | None = None, suite: str = "/") -> Answer:
    return {
        "file": file,
        "line": 1,
        "types": ["deb"],
        "uris": [uri],
        "suites": [suite],
        "components": [],
        "signed_by": signed_by,
        "is_trusted": False,
    }


def pin(file: str, package_names: str, text: str, priority: int) -> Answer:
    return {"file": file, "line": 3, "package": package_names, "pin": text, "priority": priority}


def variable(file: str, name: str, value: str | None) -> Answer:
    return {"file": file, "line": 4, "name": name, "value": value}


def directory(file: str, path: str, exists: bool = True) -> Answer:
    return {"file": file, "line": 1, "directory": path, "resolved": path, "exists": exists}


def environment(name: str, *, is_complete: bool = True, is_tainted: bool = False) -> Answer:
    return {
        "name": name,
        "is_complete": is_complete,
        "digest": "old" if is_complete else None,
        "generation": 1 if is_complete else None,
        "python": "3.11" if is_complete else None,
        "is_tainted": is_tainted,
    }


def run_process(environment: str) -> Answer:
    return {
        "pid": 71,
        "command": "python3",
        "user_id": 1000,
        "unit": "inference.service",
        "environment": environment,
        "witnesses": ["maps"],
    }


def closed(described: Answer) -> None:
    described["driver"]["flavour"] = "closed"


def to_build(answer: Answer) -> None:
    """Make the host one whose kernel module is still to be built."""
    del answer["dpkg"]["packages"]["nvidia-dkms-580-open"]


def secure(answer: Answer) -> None:
    answer["secure_boot"] |= {"is_enabled": True, "witness": "SecureBoot variable"}


def to_install(answer: Answer) -> None:
    """Make the host one without an environment."""
    answer["environment"] |= {"current": None, "environments": [], "inspected": []}


def h200(answer: Answer) -> None:
    answer["gpus"]["pci"] = [pci("0000:01:00.0", "2335"), pci("0000:11:00.0", "2335")]
    answer["gpus"]["switches"] = [pci("0000:c1:00.0", "22a3", "0680")]
    answer["dpkg"]["packages"]["nvidia-fabricmanager"] = {"version": "580.95.05-1", "status": "hi"}
    answer["services"][wanted.FABRIC_UNIT] = unit()


def b200(answer: Answer) -> None:
    h200(answer)
    answer["gpus"]["pci"] = [pci("0000:01:00.0", "2901"), pci("0000:11:00.0", "2901")]
    answer["gpus"]["switches"] = []
    answer["fabric"] |= {"switch_management": ["mlx5_0"], "is_ib_umad_loaded": True}
    answer["dpkg"]["packages"]["nvlsm"] = {"version": "2025.06.11-1", "status": "hi"}


def in_progress(answer: Answer) -> None:
    answer["gpus"]["listed"][1]["fabric_state"] = "In Progress"


OUR_REPOSITORY = "http://10.87.0.1:8087/apt/debian12/x86_64"
LIB13 = "/usr/local/cuda-13.0/targets/x86_64-linux/lib"


@dataclass(frozen=True)
class Case:
    """A change of the host (and of the stack), and the one finding it must give."""

    name: str
    change: Change
    code: str
    severity: str
    cause: str
    described: Described | None = None
    lock: Described | None = None


NOTHING: Change = put("pin", None)
BOARD = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
UNPACKAGED = {"path": "/l/libcuda.so.570.1", "version": "570.1", "is_packaged": False}
OTHER_PYTHON = {"3.13": {"path": "/usr/bin/python3.13", "has_headers": True, "has_ensurepip": True}}
SERVING = converged()["environment"]["environments"]
CASES = [
    # ---------------------------------------------------------------- preflight
    Case(
        "unsupported machine",
        put("os machine", "riscv64"),
        "BU-PRE-010",
        "error",
        "the lock does not hold the packages of debian12-riscv64",
    ),
    Case(
        "not root",
        put("os user_id", 1000),
        "BU-PRE-004",
        "error",
        "bringup needs root on the host, and has not got it",
    ),
    Case(
        "too little space for the environment",
        both(to_install, put("space /opt/bringup free_bytes", 5 * 10**9)),
        "BU-PRE-005",
        "error",
        "too little space below /opt/bringup for the Python environment",
    ),
    Case(
        "too few inodes for the environment",
        both(to_install, put("space /opt/bringup free_inodes", 1000)),
        "BU-PRE-006",
        "error",
        "too few free inodes below /opt/bringup for the Python environment",
    ),
    Case(
        "too little space for packages, on one file system with the environment",
        both(
            to_build,
            put("space /var/cache/apt/archives free_bytes", 10**6),
            put("space /usr/local free_bytes", 10**6),
            put("space /boot free_bytes", 10**6),
        ),
        "BU-PRE-005",
        "error",
        "too little space below /var/cache/apt/archives, /usr/local, /boot for downloaded packages, the driver "
        "and the toolkits, an initramfs",
    ),
    Case(
        "a read-only file system",
        both(to_install, put("space /opt/bringup is_readonly", True)),
        "BU-PRE-012",
        "error",
        "/opt/bringup is mounted read-only, and the Python environment must be written there",
    ),
    Case(
        "noexec",
        put("space /opt/bringup is_noexec", True),
        "BU-PRE-013",
        "error",
        "/opt/bringup lies on a file system mounted noexec: no interpreter and no library loads from it",
    ),
    Case(
        "little shared memory",
        put("space /dev/shm free_bytes", 64 * 1024 * 1024 - 1),
        "BU-PRE-014",
        "warning",
        "/dev/shm is too small for NCCL's shared memory",
    ),
    Case(
        "a clock ahead",
        put("time answered_s", NOW_S + 30331),
        "BU-PRE-007",
        "error",
        "the host's clock is 30331 s ahead",
    ),
    Case(
        "a clock behind that nothing keeps",
        both(put("time answered_s", NOW_S - 61), put("time keeper", None)),
        "BU-PRE-007",
        "error",
        "the host's clock is 61 s behind",
    ),
    Case(
        "no interpreter",
        put("python interpreters", OTHER_PYTHON),
        "BU-PRE-008",
        "error",
        "the host has no Python 3.11",
    ),
    Case(
        "no headers of the interpreter",
        put("python interpreters 3.11 has_headers", False),
        "BU-PRE-011",
        "info",
        "the headers of Python 3.11 are not installed; Triton compiles against them at first use",
    ),
    Case(
        "packages locked against the lab",
        NOTHING,
        "BU-PRE-009",
        "error",
        "the lock of case holds the packages of debian12-x86_64 from the rehearsal mirror, not real ones",
        lock=put("packages debian12-x86_64 resolved_against", "lab"),
    ),
    Case(
        "wheels locked against the lab",
        NOTHING,
        "BU-PRE-009",
        "error",
        "the lock of case holds the wheels from the rehearsal mirror, not real ones",
        lock=put("wheels resolved_against", "lab"),
    ),
    Case(
        "no wheels for this platform",
        NOTHING,
        "BU-PRE-010",
        "error",
        "the lock does not hold the wheels of cp311-x86_64",
        lock=put("wheels platform", {}),
    ),
    Case(
        "rolled back",
        put("pin", {"digest": stack().digest, "reason": "half the bandwidth", "since": "2026-11-30T10:00:00Z"}),
        "BU-PRE-015",
        "error",
        "this stack was rolled back here and pinned: half the bandwidth",
    ),
    Case(
        "a GPU too few on the bus",
        both(put("gpus pci", [pci("0000:01:00.0", "2bb5")]), put("gpus listed", [converged()["gpus"]["listed"][0]])),
        "BU-PRE-016",
        "error",
        "the PCI bus shows 1 NVIDIA GPUs, the stack wants 2",
    ),
    # ---------------------------------------------------------------- apt
    Case(
        "half-configured",
        put("dpkg broken", [{"name": "nvidia-dkms-580-open", "version": "1", "status": "iF"}]),
        "BU-APT-001",
        "warning",
        "packages are half-configured: nvidia-dkms-580-open (iF)",
    ),
    Case(
        "interrupted",
        put("dpkg is_interrupted", True),
        "BU-APT-001",
        "warning",
        "packages are half-configured: dpkg was interrupted",
    ),
    Case(
        "our repository without Signed-By, with https and without its slash",
        put("apt sources", [source("/etc/apt/sources.list", OUR_REPOSITORY.replace("http", "https", 1))]),
        "BU-APT-002",
        "error",
        f"{OUR_REPOSITORY} / is named with conflicting Signed-By: /etc/apt/sources.list:1: no Signed-By; "
        f"{wanted.SOURCE_FILE} (bringup's own): {wanted.KEY_FILE}",
    ),
    Case(
        "two others that contradict each other",
        put(
            "apt sources",
            [
                source("/etc/apt/sources.list.d/a.list", "http://Mirror/debian/", "/a.gpg", "bookworm"),
                source("/etc/apt/sources.list.d/b.list", "http://mirror/debian", "/b.gpg", "bookworm"),
            ],
        ),
        "BU-APT-002",
        "error",
        "http://mirror/debian bookworm is named with conflicting Signed-By: /etc/apt/sources.list.d/a.list:1: "
        "/a.gpg; /etc/apt/sources.list.d/b.list:1: /b.gpg",
    ),
    Case(
        "the CUDA repository of another release",
        put("apt sources", [source("/etc/x.list", "https://h/compute/cuda/repos/debian11/x86_64/")]),
        "BU-APT-003",
        "error",
        "/etc/x.list:1 is the CUDA repository of debian11, the host is debian12",
    ),
    Case(
        "a pin that forbids",
        put("apt preferences", [pin("/etc/apt/preferences.d/no", "*nvidia*", "release o=NVIDIA", -1)]),
        "BU-APT-004",
        "error",
        "the pin in /etc/apt/preferences.d/no:3 forbids nvidia-driver-pinning-580.95.05 580.95.05-1",
    ),
    Case(
        "a pin that forces another version",
        put("apt preferences", [pin("/etc/x", "/^libnvidia-/", "version 570.*", 1001)]),
        "BU-APT-004",
        "error",
        "the pin in /etc/x:3 forces another version than libnvidia-compute-580 580.95.05-0ubuntu1",
    ),
    Case(
        "dates not checked",
        put("apt checks_dates", False),
        "BU-APT-005",
        "warning",
        "apt does not check the dates of Release files (Acquire::Check-Date is false)",
    ),
    Case(
        "trusted without signature",
        put("apt sources", [source("/etc/x.list", "http://mirror/nvidia/") | {"is_trusted": True}]),
        "BU-APT-006",
        "warning",
        "/etc/x.list:1 is trusted without a signature",
    ),
    Case(
        "a lock held",
        put("locks apt", {"/var/lib/dpkg/lock-frontend": {"pid": 24459, "command": "unattended-upgr"}}),
        "BU-APT-007",
        "info",
        "/var/lib/dpkg/lock-frontend is held by unattended-upgr (pid 24459)",
    ),
    # ---------------------------------------------------------------- driver
    Case(
        "closed modules on Blackwell",
        NOTHING,
        "BU-DRV-001",
        "error",
        f"{BOARD} (10de:2bb5) is Blackwell, which only the open kernel modules drive",
        described=closed,
    ),
    Case(
        "closed modules on a Blackwell that is in no table of boards",
        put("gpus pci 1 device_id", "2c58"),
        "BU-DRV-001",
        "error",
        f"{BOARD} (10de:2bb5) is Blackwell, which only the open kernel modules drive",
        described=closed,
    ),
    Case(
        "open modules on Volta",
        both(put("gpus pci 0 device_id", "1db6"), put("gpus pci 1 device_id", "1db6")),
        "BU-DRV-002",
        "error",
        "NVIDIA GPU (10de:1db6) is Volta, which the open kernel modules do not drive",
    ),
    Case(
        "closed modules on a GPU newer than the table",
        both(put("gpus pci 0 device_id", "3fff"), put("gpus pci 1 device_id", "3fff")),
        "BU-DRV-003",
        "warning",
        "NVIDIA GPU (10de:3fff) is not in bringup's table; GPUs since Blackwell need the open kernel modules",
        described=closed,
    ),
    Case(
        "Secure Boot without a key",
        both(secure, to_build),
        "BU-DRV-004",
        "error",
        "Secure Boot is on, and the key that dkms signs modules with does not exist yet",
    ),
    Case(
        "Secure Boot with a key that is not enrolled",
        both(secure, to_build, put("secure_boot signing_key", "/k"), put("secure_boot is_key_enrolled", False)),
        "BU-DRV-004",
        "error",
        "Secure Boot is on, and the key that dkms signs modules with (/k) is not enrolled",
    ),
    Case(
        "Secure Boot not readable",
        both(put("secure_boot is_enabled", None), to_build),
        "BU-DRV-005",
        "warning",
        "whether Secure Boot is on could not be read (no EFI firmware)",
    ),
    Case(
        "a runfile's uninstaller, packages in place",
        put("driver runfile", ["/usr/bin/nvidia-uninstall"]),
        "BU-DRV-006",
        "warning",
        "a driver was installed here without packages: /usr/bin/nvidia-uninstall",
    ),
    Case(
        "a runfile's library, packages to come",
        both(to_build, put("driver libcuda", [UNPACKAGED])),
        "BU-DRV-006",
        "error",
        "a driver was installed here without packages: /l/libcuda.so.570.1",
    ),
    Case(
        "another version on disk than loaded",
        put("driver libcuda 0 version", "580.126.09"),
        "BU-DRV-007",
        "warning",
        "the driver on disk is not the one the kernel runs; nvidia-smi fails until the next boot",
    ),
    Case(
        "nouveau",
        put("driver modules", ["nouveau"]),
        "BU-DRV-008",
        "warning",
        "nouveau is loaded and holds the GPUs",
    ),
    Case(
        "a library of the branch before",
        put("dpkg packages libnvidia-cfg1", {"version": "570.1-1", "status": "ii"}),
        "BU-DRV-009",
        "warning",
        "driver packages of another version are installed: libnvidia-cfg1 570.1-1",
    ),
    Case(
        "a driver the toolkit does not run on",
        NOTHING,
        "BU-DRV-010",
        "error",
        "toolkit 13.0 needs a newer driver",
        described=lambda s: s["driver"].update(policy="at_least", minimum="570.124.06"),
    ),
    Case(
        "a compiler older than the kernel's",
        both(to_build, put("kernel compiler", "gcc 13")),
        "BU-DRV-011",
        "warning",
        "the default compiler is older than the one that built the kernel; the module may not build",
    ),
    Case(
        "no headers for the kernel that boots next",
        both(to_build, put("kernel next_release", "6.1.0-22-amd64")),
        "BU-DRV-012",
        "info",
        "the headers of kernel 6.1.0-22-amd64 are not installed; dkms builds no module for it without them",
    ),
    Case(
        "no devices were found",
        both(
            put("gpus listed", None),
            put("driver smi_status", 6),
            put("driver smi_message", "No devices were found"),
        ),
        "BU-DRV-013",
        "error",
        "the driver drives none of the 2 GPUs on the bus: No devices were found",
    ),
    Case(
        "one GPU not listed",
        put("gpus listed", [converged()["gpus"]["listed"][0]]),
        "BU-DRV-014",
        "error",
        "the driver does not list the GPU at 0000:11:00.0",
    ),
    # ---------------------------------------------------------------- toolkits
    Case(
        "the distribution's toolkit",
        put("dpkg packages nvidia-cuda-toolkit", {"version": "12.0.1-2", "status": "ii"}),
        "BU-CUD-001",
        "warning",
        "the distribution's own CUDA toolkit is installed (nvidia-cuda-toolkit 12.0.1-2); plain nvcc and "
        "libnvrtc.so are its",
    ),
    Case(
        "a toolkit of no package",
        drop("dpkg packages cuda-nvrtc-12-8"),
        "BU-CUD-002",
        "error",
        "/usr/local/cuda-12.8 holds a toolkit that no package owns; packages would be laid over it",
    ),
    Case(
        "a GPU that one toolkit cannot compile for",
        both(b200, put("gpus pci 0 device_id", "3182"), put("gpus pci 1 device_id", "3182")),
        "BU-CUD-003",
        "info",
        "toolkit 12.8 cannot target compute capability 10.3",
    ),
    Case(
        "a GPU that no toolkit can compile for",
        both(b200, put("gpus pci 0 device_id", "3182"), put("gpus pci 1 device_id", "3182")),
        "BU-CUD-003",
        "error",
        "toolkit 12.8 cannot target compute capability 10.3",
        described=lambda s: s.update(cuda={"toolkits": ["12.8"], "default": "12.8"}, linker={"libnvrtc.so.12": "12.8"}),
    ),
    Case(
        "a link that leads nowhere",
        put("toolkits links /usr/local/cuda exists", False),
        "BU-CUD-004",
        "warning",
        "/usr/local/cuda leads to /usr/local/cuda-13.0, which does not exist",
    ),
    Case(
        "a link made by hand",
        put("toolkits links /usr/local/cuda target", "/usr/local/cuda-13.0"),
        "BU-CUD-005",
        "warning",
        "/usr/local/cuda was made by hand (/usr/local/cuda-13.0); update-alternatives no longer moves it",
    ),
    # ---------------------------------------------------------------- loader
    Case(
        "stubs",
        put("loader directories", [directory("/etc/ld.so.conf.d/x.conf", "/usr/local/cuda/lib64/stubs")]),
        "BU-LNK-001",
        "error",
        "/etc/ld.so.conf.d/x.conf:1 puts stub libraries on the loader's path (/usr/local/cuda/lib64/stubs)",
    ),
    Case(
        "a dead entry",
        put("loader directories", [directory("/etc/ld.so.conf.d/cuda.conf", "/opt/gone", exists=False)]),
        "BU-LNK-002",
        "warning",
        "/etc/ld.so.conf.d/cuda.conf:1 names /opt/gone, which does not exist",
    ),
    Case(
        "a copy that wins",
        put("loader hits libnvrtc.so.13", [library("/lib/x/libnvrtc.so.13"), library(f"{LIB13}/libnvrtc.so.13")]),
        "BU-LNK-003",
        "warning",
        "libnvrtc.so.13 lies in /lib/x/libnvrtc.so.13 too, which the loader takes",
    ),
    Case(
        "a copy that does not win",
        put("loader hits libnvrtc.so.13", [library(f"{LIB13}/libnvrtc.so.13"), library("/lib/x/libnvrtc.so.13")]),
        "BU-LNK-003",
        "info",
        "libnvrtc.so.13 lies in /lib/x/libnvrtc.so.13 too",
    ),
    Case(
        "a preloaded library",
        put("loader preload", ["/lib/a.so"]),
        "BU-LNK-004",
        "warning",
        "/etc/ld.so.preload loads /lib/a.so into every process",
    ),
    Case(
        "LD_LIBRARY_PATH for everybody",
        put("env_files", [variable("/etc/profile.d/cuda.sh", "LD_LIBRARY_PATH", "/usr/local/cuda/lib64")]),
        "BU-LNK-005",
        "warning",
        "/etc/profile.d/cuda.sh:4 sets LD_LIBRARY_PATH=/usr/local/cuda/lib64",
    ),
    Case(
        "a cache older than its configuration",
        put("loader is_cache_older", True),
        "BU-LNK-006",
        "warning",
        "the loader's cache is older than its configuration",
    ),
    Case(
        "libcuda of the compat package first",
        put("loader hits libcuda.so.1", [library("/usr/local/cuda/compat/libcuda.so.1")]),
        "BU-LNK-007",
        "warning",
        "libcuda.so.1 is found as /usr/local/cuda/compat/libcuda.so.1, not as the driver's",
    ),
    # ---------------------------------------------------------------- fabric
    Case(
        "a fabric manager locked at another point release",
        NOTHING,
        "BU-FAB-001",
        "error",
        "the lock holds nvidia-fabricmanager of another version than the driver's",
        lock=put("packages debian12-x86_64 fabric nvswitch", [package("nvidia-fabricmanager", "580.82.07-1")]),
    ),
    Case(
        "a fabric manager installed at another point release",
        both(h200, put("dpkg packages nvidia-fabricmanager version", "580.82.07-1")),
        "BU-FAB-002",
        "warning",
        "nvidia-fabricmanager is not of the loaded driver's version, so it does not start",
    ),
    Case(
        "a fabric manager on a PCIe server",
        put("dpkg packages nvidia-fabricmanager", {"version": "580.95.05-1", "status": "ii"}),
        "BU-FAB-003",
        "warning",
        "nvidia-fabricmanager is installed, and this host has no switch it could manage",
    ),
    Case(
        "switches that nobody is to manage",
        h200,
        "BU-FAB-004",
        "warning",
        "the host has 1 NVSwitches and the stack wants nobody to manage them",
        described=lambda s: s.update(fabric={"policy": "none"}),
    ),
    Case(
        "not in the fabric: manager stopped",
        both(h200, in_progress, put(f"services {wanted.FABRIC_UNIT} active", "failed")),
        "BU-FAB-005",
        "warning",
        "not in the fabric: GPU 1 (In Progress); the fabric manager is failed",
    ),
    Case(
        "not in the fabric: manager not installed",
        both(h200, in_progress, put(f"services {wanted.FABRIC_UNIT} load", "not-found")),
        "BU-FAB-005",
        "warning",
        "not in the fabric: GPU 1 (In Progress); the fabric manager is not installed",
    ),
    Case(
        "not in the fabric: no subnet manager",
        both(b200, in_progress, drop("dpkg packages nvlsm")),
        "BU-FAB-005",
        "warning",
        "not in the fabric: GPU 1 (In Progress); the subnet manager (nvlsm) is not installed, without which the "
        "fabric manager finds nothing to do",
    ),
    Case(
        "not in the fabric: no ib_umad",
        both(b200, in_progress, put("fabric is_ib_umad_loaded", False)),
        "BU-FAB-005",
        "warning",
        "not in the fabric: GPU 1 (In Progress); ib_umad is not loaded, without which the subnet manager cannot "
        "reach the switches",
    ),
    Case(
        "not in the fabric: nobody knows why",
        both(h200, in_progress),
        "BU-FAB-005",
        "warning",
        "not in the fabric: GPU 1 (In Progress); what holds them up is not known",
    ),
    # ---------------------------------------------------------------- environment
    Case(
        "the bypass of flashinfer's check",
        put("env_files", [variable("/etc/environment", "FLASHINFER_DISABLE_VERSION_CHECK", "1")]),
        "BU-ENV-001",
        "error",
        "/etc/environment:4 sets FLASHINFER_DISABLE_VERSION_CHECK: stale kernels would be used silently",
    ),
    Case(
        "a setting of NCCL",
        put("env_files", [variable("/etc/nccl.conf", "NCCL_SOCKET_IFNAME", "eth9")]),
        "BU-ENV-002",
        "warning",
        "/etc/nccl.conf:4 sets NCCL_SOCKET_IFNAME=eth9",
    ),
    Case(
        "CUDA_HOME for everybody",
        put("env_files", [variable("/etc/environment", "CUDA_HOME", "/usr/local/cuda")]),
        "BU-ENV-003",
        "warning",
        "/etc/environment:4 sets CUDA_HOME=/usr/local/cuda",
    ),
    Case(
        "a process on an older environment",
        put("processes environment", [run_process("old-1")]),
        "BU-ENV-004",
        "warning",
        "processes run from an older environment: pid 71 (inference.service) on old-1",
    ),
    Case(
        "a tainted environment",
        put("environment environments", [*SERVING, environment("old-1", is_tainted=True)]),
        "BU-ENV-005",
        "warning",
        "environments share files that were changed after installation: old-1",
    ),
    Case(
        "an unfinished environment",
        put("environment environments", [*SERVING, environment("new-1", is_complete=False)]),
        "BU-ENV-006",
        "info",
        "environments were left unfinished: new-1",
    ),
    Case(
        "an NCCL of the system",
        put("loader hits libnccl.so.2", [library("/lib/x/libnccl.so.2", "/lib/x/libnccl.so.2.28.3")]),
        "BU-ENV-007",
        "info",
        "the system has an NCCL of its own (/lib/x/libnccl.so.2.28.3), beside the one that torch brings",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_one_thing_wrong_is_one_finding(case: Case) -> None:
    found = judged(case.change, described=case.described, lock=case.lock)
    same = [finding for finding in found if finding.code == case.code]
    assert [(f.severity, f.cause) for f in same][:1] == [(case.severity, case.cause)]
    assert all(finding.remedy for finding in found)
    json.dumps([finding.as_json() for finding in found])
    # Some changes truly have two consequences; none may be refused for something else.
    assert {f.code for f in found if f.is_refusal} <= {case.code}


@pytest.mark.parametrize(
    ("interpreters", "platform", "causes"),
    [
        pytest.param({}, "cp311-x86_64", [], id="one for all"),
        pytest.param({"debian13": "3.13"}, "cp311-x86_64", [], id="another release's"),
        pytest.param({"debian12": "3.13"}, "cp313-x86_64", ["the host has no Python 3.13"], id="its own"),
    ],
)
def test_hosts_of_a_release_may_take_another_interpreter(
    interpreters: dict[str, str], platform: str, causes: list[str]
) -> None:
    wish, state = stack(put("python interpreters", interpreters)), observed()
    assert wanted.platform(wish, state) == platform
    assert [finding.cause for finding in preflight.interpreter(wish, state)] == causes


# ---------------------------------------------------------------- as wanted: no finding


LAB_LOCK = both(put("packages debian12-x86_64 resolved_against", "lab"), put("wheels resolved_against", "lab"))
LIBC_CONF = directory("/etc/ld.so.conf.d/libc.conf", "/usr/local/lib/x", exists=False)
REPLACED_PIN = pin("/etc/apt/preferences.d/nvidia-driver-pinning", "libnvidia-*", "version 570.*", 1001)
FINE: list[tuple[str, Change, Described | None, Described | None]] = [
    ("a lab lock on a lab host", put("simulated", ["gpu", "driver", "wheels"]), None, LAB_LOCK),
    ("Secure Boot, nothing to build", secure, None, None),
    ("an enrolled key", both(secure, to_build, put("secure_boot is_key_enrolled", True)), None, None),
    ("a clock within a minute", put("time answered_s", NOW_S + 59), None, None),
    ("a full disk, nothing to write", put("space /opt/bringup free_bytes", 0), None, None),
    ("no fixed inodes", both(to_install, put("space /opt/bringup free_inodes", None)), None, None),
    ("the pinning package that is being replaced", put("apt preferences", [REPLACED_PIN]), None, None),
    (
        "a pin that agrees",
        put("apt preferences", [pin("/etc/x", "libnvidia-*", "version 580.95.05*", 1001)]),
        None,
        None,
    ),
    ("a pin of others", put("apt preferences", [pin("/etc/x", "firefox*", "release *", -1)]), None, None),
    ("a dead entry of the system's own", put("loader directories", [LIBC_CONF]), None, None),
    (
        "a bypass that is off",
        put("env_files", [variable("/etc/environment", "FLASHINFER_DISABLE_VERSION_CHECK", "0")]),
        None,
        None,
    ),
    ("an H200 board as wanted", h200, None, None),
    ("a B200 board as wanted", b200, None, None),
    ("a driver that does not answer is no lost GPU", put("gpus listed", None), None, None),
    (
        "no GPU wanted",
        both(put("gpus pci", []), put("gpus listed", [])),
        lambda s: s["verify"].update(gpus=None),
        None,
    ),
]


@pytest.mark.parametrize(("change", "described", "lock"), [case[1:] for case in FINE], ids=[case[0] for case in FINE])
def test_nothing_wrong_is_no_finding(change: Change, described: Described | None, lock: Described | None) -> None:
    assert judged(change, described=described, lock=lock) == []


@pytest.mark.parametrize("section", sorted(set(host_state.SECTIONS) - {"simulated"}))
def test_an_unknown_section_is_judged_by_no_rule(section: str) -> None:
    found = judged(put(section, {"error": "no"}))
    assert [finding for finding in found if finding.is_refusal] == []


def test_what_is_unknown_is_refused_by_name() -> None:
    finding = preflight.unknown(["dpkg: not readable", "loader: no ldconfig"])
    assert (finding.code, finding.severity, finding.cause) == (
        "BU-PRE-017",
        "error",
        "what the host is like could not be seen: dpkg: not readable; loader: no ldconfig",
    )


def test_an_unsupported_release_is_refused_unless_the_site_names_a_repository() -> None:
    def fedora(answer: Answer) -> None:
        answer["os"] |= {"id": "fedora", "version_id": "42", "pretty_name": "Fedora 42"}

    state = observed(fedora)
    found = {f.code: f.cause for f in all_findings(stack(), state, now_s=NOW_S)}
    assert found["BU-PRE-018"] == "Fedora 42 on x86_64 is not supported"
    assert "BU-PRE-018" not in {f.code for f in all_findings(stack(), state, now_s=NOW_S, site=SITE)}


@dataclass(frozen=True)
class Policy:
    repair: str


@pytest.mark.parametrize(
    ("repair", "has_repaired", "severity"),
    [("safe", False, "warning"), ("safe", True, "error"), ("never", False, "error")],
    ids=["to be tried", "was tried", "must not be tried"],
)
def test_half_configured_packages_are_refused_once_repair_was_tried(
    repair: str, has_repaired: bool, severity: str
) -> None:
    state = observed(put("dpkg is_interrupted", True))
    (finding,) = all_findings(
        stack(), state, now_s=NOW_S, site=SITE, settings=Policy(repair), has_repaired=has_repaired
    )
    assert (finding.code, finding.severity) == ("BU-APT-001", severity)


def test_the_clock_is_compared_with_the_moment_the_answer_came() -> None:
    state = observed()
    assert all_findings(stack(), state, now_s=NOW_S + 10_000, site=SITE) == ()
    unstamped = state.model_copy(update={"received_at_s": None})
    (finding,) = all_findings(stack(), unstamped, now_s=NOW_S + 10_000, site=SITE)
    assert (finding.code, finding.evidence["found"]) == ("BU-PRE-007", "-10000 s")


def test_errors_come_first() -> None:
    found = judged(
        put("apt checks_dates", False), put("os user_id", 1000), put("python interpreters 3.11 has_headers", False)
    )
    assert [f.severity for f in found] == ["error", "warning", "info"]


def test_a_real_host() -> None:
    """The two-GPU guest: a driver of no package, NVLink without a visible switch, an NCCL setting for everybody."""
    answer = json.loads(CAPTURED.read_text())
    described = stack(lambda s: s["driver"].update(policy="at_least", minimum="580.65.06"), is_locked=False)
    wish = Stack.model_validate(
        described.model_dump(by_alias=True)
        | {"python": {"interpreter": "existing:/opt/torch/.venv", "cuda": "13.0"}}
        | {"cuda": {"toolkits": ["13.0"], "default": "13.0"}, "linker": {"libnvrtc.so.13": "13.0"}}
    )
    state = host_state.parse(json.dumps(answer), received_at_s=answer["time"]["answered_s"])
    assert wanted.fabric_kind(wish, state) == "none"
    found = all_findings(wish, state, now_s=0)
    assert sorted({(f.code, f.severity) for f in found}) == [
        ("BU-ENV-002", "warning"),
        ("BU-ENV-007", "info"),
    ]


# ---------------------------------------------------------------- data


def test_every_row_of_the_tables_has_its_source_and_date() -> None:
    rows: list[Any] = [*catalog.repositories(), *catalog.toolkits(), *catalog.branches(), *catalog.chips()]
    rows += [*catalog.gpus(), *catalog.limits()]
    assert len(rows) > 40
    assert all(len(row.source) >= 10 and row.date for row in rows)


def test_every_board_lies_in_a_range_of_chips() -> None:
    assert [row.name for row in catalog.gpus() if catalog.chip(row.device_id) is None] == []


def test_ranges_of_chips_do_not_overlap() -> None:
    edges = sorted((int(row.first, 16), int(row.last, 16)) for row in catalog.chips())
    assert all(before[1] < after[0] for before, after in pairwise(edges))


@pytest.mark.parametrize(
    ("device_id", "architecture", "fabric"),
    [
        ("2bb5", "Blackwell", "none"),
        ("2901", "Blackwell", "nvlink5"),
        ("3182", "Blackwell", "nvlink5"),
        ("2335", "Hopper", "nvswitch"),
        ("2330", "Hopper", "nvswitch"),
        ("20b2", "Ampere", "nvswitch"),
        ("26b9", "Ada", "none"),
    ],
)
def test_boards(device_id: str, architecture: str, fabric: str) -> None:
    chip, board = catalog.chip(device_id), catalog.gpu(device_id)
    assert chip is not None
    assert board is not None
    assert (chip.architecture, board.fabric) == (architecture, fabric)


def test_the_lab_describes_the_boards_that_the_table_knows() -> None:
    described = tomllib.loads((ROOT / "bringup/data/lab/gpus.toml").read_text())["model"]
    for model in described:
        board = catalog.gpu(model["pci_device"])
        assert board is not None, model["name"]
        assert (board.name, board.compute_capability, board.fabric) == (
            model["name"],
            model["compute_capability"],
            model["fabric"],
        )


# ---------------------------------------------------------------- documentation

CODE = re.compile(r"BU-(?:PRE|APT|DRV|CUD|LNK|FAB|ENV|VFY|SSH)-\d{3}")


def test_every_code_in_the_source_is_documented_and_every_documented_one_is_used() -> None:
    sources = [path for top in ("bringup", "tasks", "files") for path in (ROOT / top).rglob("*.py")]
    used = {code for path in sources for code in CODE.findall(path.read_text())}
    documented = set(CODE.findall((ROOT / "docs/reference/findings.md").read_text()))
    assert (sorted(used - documented), sorted(documented - used)) == ([], [])


def test_every_code_of_these_rules_has_a_case() -> None:
    modules = ("apt", "cuda", "driver", "environment", "fabric", "linker", "preflight")
    used = {code for name in modules for code in CODE.findall((ROOT / f"bringup/findings/{name}.py").read_text())}
    assert used - {case.code for case in CASES} == {"BU-PRE-017", "BU-PRE-018"}
