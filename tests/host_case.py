"""A stack with its lock, a site, and the answer of a host that is as they want it; tests change one thing of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from bringup import host_state, wanted
from bringup.host_state import HostState
from bringup.stack import Stack
from bringup.wanted import Site

Answer = dict[str, Any]
Change = Callable[[Answer], object]

NOW_S = 1_796_000_000.0
FINGERPRINT = "0BBF562401DE9918945CAA890A5259F4478DC1DE"
SITE = Site(
    repository_url="http://10.87.0.1:8087/apt/debian12/x86_64/",
    key_fingerprint=FINGERPRINT,
    launcher_sha256="1" * 64,
)


def package(name: str, version: str, size_bytes: int = 1_000_000) -> Answer:
    return {
        "name": name,
        "version": version,
        "architecture": "amd64",
        "sha256": "a" * 64,
        "size_bytes": size_bytes,
        "origin": "NVIDIA",
    }


def wheel(distribution: str, version: str, size_bytes: int = 1_000_000_000) -> Answer:
    return {
        "distribution": distribution,
        "version": version,
        "file": f"{distribution}-{version}-py3-none-any.whl",
        "size_bytes": size_bytes,
        "sha256": "b" * 64,
    }


DRIVER = (
    package("nvidia-driver-pinning-580.95.05", "580.95.05-1"),
    package("libnvidia-compute-580", "580.95.05-0ubuntu1"),
    package("nvidia-dkms-580-open", "580.95.05-0ubuntu1"),
)
LOCK: Answer = {
    "schema": 1,
    "stack": "case",
    "wheels": {
        "resolved_against": "index",
        "platform": {
            "cp311-x86_64": {
                "step": [
                    {"name": "torch", "files": [wheel("torch", "2.9.1+cu130")]},
                    {"name": "kernel", "files": [wheel("sgl-kernel", "0.3.21+cu130")]},
                ]
            }
        },
    },
    "packages": {
        "debian12-x86_64": {
            "resolved_against": "index",
            "driver": DRIVER,
            "fabric": {
                "nvswitch": [package("nvidia-fabricmanager", "580.95.05-1")],
                "nvlink5": [package("nvidia-fabricmanager", "580.95.05-1"), package("nvlsm", "2025.06.11-1")],
            },
            "toolkit": {
                "12.8": [
                    package("cuda-nvrtc-12-8", "12.8.93-1"),
                    package("cuda-toolkit-config-common", "13.0.96-1"),
                ],
                "13.0": [
                    package("cuda-nvrtc-13-0", "13.0.88-1"),
                    package("cuda-toolkit-config-common", "13.0.96-1"),
                ],
            },
        }
    },
}
STACK: Answer = {
    "schema": 1,
    "name": "case",
    "driver": {"branch": "580", "version": "580.95.05", "minimum": "580.65.06"},
    "cuda": {"toolkits": ["12.8", "13.0"], "default": "13.0"},
    "linker": {"libnvrtc.so.12": "12.8", "libnvrtc.so.13": "13.0"},
    "python": {
        "interpreter": "3.11",
        "cuda": "13.0",
        "step": [
            {"name": "torch", "requirements": ["torch==2.9.1+cu130"]},
            {"name": "kernel", "requirements": ["sgl-kernel==0.3.21+cu130"]},
        ],
    },
    "service": {"environment": {"SGLANG_X": 'a "b" $c'}},
    "verify": {"gpus": 2},
}


def stack(change: Change | None = None, *, lock: Change | None = None, is_locked: bool = True) -> Stack:
    """Return the stack, its description and its lock each changed by a function."""
    described, locked = copy.deepcopy(STACK), copy.deepcopy(LOCK)
    if change is not None:
        change(described)
    if lock is not None:
        lock(locked)
    return Stack.model_validate({**described, "lock": locked if is_locked else None})


def text_file(text: str) -> Answer:
    return {"sha256": wanted.sha256(text), "size_bytes": len(text), "mode": 0o644, "user_id": 0}


def gpu(index: int, address: str) -> Answer:
    return {
        "index": index,
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "uuid": f"GPU-{index}",
        "address": address,
        "driver_version": "580.95.05",
        "compute_capability": "12.0",
        "memory_bytes": 102_641_958_912,
        "mig_mode": "Disabled",
        "is_persistent": True,
        "ecc_mode": "Enabled",
        "pcie_generation_max": 5,
        "pcie_width_max": 16,
        "fabric_state": None,
        "fabric_status": None,
    }


def pci(address: str, device_id: str, class_id: str = "0302") -> Answer:
    return {
        "address": address,
        "device_id": device_id,
        "class_id": class_id,
        "bound_to": "nvidia",
        "numa_node": 0,
    }


def unit(active: str = "active", enabled: str = "enabled", load: str = "loaded") -> Answer:
    return {
        "load": load,
        "active": active,
        "sub": "running",
        "enabled": enabled,
        "needs_reload": False,
        "main_pid": None,
    }


def library(path: str, resolved: str | None = None) -> Answer:
    return {"path": path, "resolved": resolved or path, "exists": True}


def alternative(link: str, target: str) -> Answer:
    return {
        "mode": "manual",
        "link": link,
        "link_target": link.replace("/usr/local", "/etc/alternatives"),
        "target": target,
        "choices": {"/usr/local/cuda-12.8": 128, "/usr/local/cuda-13.0": 130},
    }


def toolkit(version: str) -> Answer:
    return {
        "path": f"/usr/local/cuda-{version}",
        "release": None,
        "has_nvcc": True,
        "nvrtc": [],
        "targets": ["x86_64-linux"],
    }


def file_system() -> Answer:
    return {
        "exists": True,
        "device": 1,
        "total_bytes": 10**12,
        "free_bytes": 10**11,
        "free_inodes": 10**7,
        "is_noexec": False,
        "is_readonly": False,
    }


def converged() -> Answer:
    """Return the answer of a host that is as STACK and SITE want it: two PCIe Blackwell GPUs, verified this boot."""
    wish = stack()
    locked = wish.locked_packages("debian12-x86_64")
    assert locked is not None
    digest = wish.env_digest("cp311-x86_64")
    env = f"{wanted.ENVS}/{digest}-1"
    installed = {p.name: {"version": p.version, "status": "hi"} for p in locked.driver}
    installed |= {p.name: {"version": p.version, "status": "ii"} for group in locked.toolkits.values() for p in group}
    lib12, lib13 = (wanted.library_directory(version, "x86_64") for version in ("12.8", "13.0"))
    directory = {"file": wanted.LINKER_FILE, "line": 2, "directory": lib13, "resolved": lib13, "exists": True}
    distributions = {"torch": "2.9.1+cu130", "sgl-kernel": "0.3.21+cu130"}
    lock = {"holder_pid": None, "note": None}
    return {
        "schema": 1,
        "os": {
            "id": "debian",
            "id_like": [],
            "version_id": "12",
            "codename": "bookworm",
            "pretty_name": "Debian GNU/Linux 12 (bookworm)",
            "machine": "x86_64",
            "libc": "glibc 2.36",
            "cpus": 64,
            "memory_bytes": 10**12,
            "user_id": 0,
        },
        "kernel": {
            "release": "6.1.0-21-amd64",
            "boot_id": "boot-1",
            "command_line": [],
            "compiler": "gcc 12",
            "default_compiler": "gcc 12",
            "tainted": 0,
            "next_release": "6.1.0-21-amd64",
            "next_witness": "newest image below /boot",
            "installed": [
                {
                    "release": "6.1.0-21-amd64",
                    "has_headers": True,
                    "has_nouveau": True,
                    "nvidia": {
                        "path": "/lib/modules/x/nvidia.ko",
                        "version": "580.95.05",
                        "flavour": "open",
                        "signer": None,
                        "is_signed": False,
                    },
                    "initramfs_mtime_s": 200.0,
                }
            ],
            "nouveau_conf_mtime_s": 100.0,
            "iommu_groups": 0,
            "reboot_required": False,
        },
        "secure_boot": {
            "is_enabled": False,
            "witness": "no EFI firmware",
            "signing_key": None,
            "is_key_enrolled": None,
        },
        "dpkg": {"architecture": "amd64", "packages": installed, "broken": [], "is_interrupted": False},
        "apt": {
            "sources": [
                {
                    "file": wanted.SOURCE_FILE,
                    "line": 2,
                    "types": ["deb"],
                    "uris": [SITE.repository_url],
                    "suites": ["/"],
                    "components": [],
                    "signed_by": wanted.KEY_FILE,
                    "is_trusted": False,
                }
            ],
            "keys": {wanted.KEY_FILE: {"fingerprints": [FINGERPRINT]}},
            "preferences": [],
            "blacklist": [f"^{name.replace('.', '[.]')}$" for name in (p.name for p in locked.driver)],
            "is_unattended": True,
            "checks_dates": True,
            "has_proxy": False,
        },
        "driver": {
            "loaded": {"version": "580.95.05", "flavour": "open", "witness": "/proc/driver/nvidia/version"},
            "modules": ["nvidia", "nvidia_uvm"],
            "libcuda": [
                {
                    "path": "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05",
                    "version": "580.95.05",
                    "is_packaged": True,
                }
            ],
            "nvidia_smi": {"path": "/usr/bin/nvidia-smi", "is_packaged": True},
            "smi_status": 0,
            "smi_message": None,
            "nouveau_blacklist": [wanted.NOUVEAU_FILE],
            "is_nouveau_off_at_boot": False,
            "runfile": [],
            "dkms": [],
            "has_firmware": True,
        },
        "gpus": {
            "pci": [pci("0000:01:00.0", "2bb5"), pci("0000:11:00.0", "2bb5")],
            "switches": [],
            "listed": [gpu(0, "0000:01:00.0"), gpu(1, "0000:11:00.0")],
        },
        "fabric": {
            "switches": 0,
            "infiniband": [],
            "switch_management": [],
            "is_ib_umad_loaded": False,
            "ib_umad_files": [],
        },
        "toolkits": {
            "installed": {"12.8": toolkit("12.8"), "13.0": toolkit("13.0")},
            "links": {
                "/usr/local/cuda": {
                    "target": "/etc/alternatives/cuda",
                    "resolved": "/usr/local/cuda-13.0",
                    "exists": True,
                }
            },
            "alternatives": {
                "cuda": alternative("/usr/local/cuda", "/usr/local/cuda-13.0"),
                "cuda-13": alternative("/usr/local/cuda-13", "/usr/local/cuda-13.0"),
            },
            "system": [],
        },
        "loader": {
            "directories": [directory],
            "hits": {
                "libnvrtc.so.12": [library(f"{lib12}/libnvrtc.so.12")],
                "libnvrtc.so.13": [library(f"{lib13}/libnvrtc.so.13")],
                "libcuda.so.1": [library("/usr/lib/x86_64-linux-gnu/libcuda.so.1")],
            },
            "preload": [],
            "is_cache_older": False,
        },
        "python": {
            "interpreters": {"3.11": {"path": "/usr/bin/python3.11", "has_headers": True, "has_ensurepip": True}},
            "probe": "3.11.2",
        },
        "environment": {
            "current": env,
            "is_current_whole": True,
            "environments": [
                {
                    "name": f"{digest}-1",
                    "is_complete": True,
                    "digest": digest,
                    "generation": 1,
                    "python": "3.11",
                    "is_tainted": False,
                }
            ],
            "inspected": [
                {
                    "path": env,
                    "resolved": env,
                    "python": "3.11",
                    "has_interpreter": True,
                    "distributions": distributions,
                    "fingerprints": dict.fromkeys(distributions, "0" * 32),
                    "changed": [],
                    "unlike_record": {},
                    "strays": [],
                }
            ],
            "is_deep": False,
        },
        "processes": {"gpu": [], "environment": []},
        "space": {
            path: file_system()
            for path in ("/opt/bringup", "/usr/local", "/var/cache/apt/archives", "/boot", "/dev/shm")
        },
        "time": {"started_s": NOW_S - 0.3, "answered_s": NOW_S, "keeper": "chrony"},
        "verification": {
            "schema": 1,
            "environment": f"{digest}-1",
            "limits_digest": wanted.limits_digest(wish),
            "driver_version": "580.95.05",
            "gpu_uuids": ["GPU-0", "GPU-1"],
            "mig_modes": ["Disabled", "Disabled"],
            "boot_id": "boot-1",
            "measured_at_s": NOW_S - 1000,
            "backends": [{"backend": "nccl", "state": "measured", "busbw_gb_per_s": 46.2}],
        },
        "pin": None,
        "assigned": None,
        "locks": {"apt": {}, "run": lock, "work": lock, "reservation": None},
        "services": {wanted.PERSISTENCE_UNIT: unit(), wanted.FABRIC_UNIT: unit("inactive", "", "not-found")},
        "env_files": [],
        "files": {
            wanted.SOURCE_FILE: text_file(wanted.source_text(SITE.repository_url or "")),
            wanted.PREFERENCES_FILE: text_file(wanted.preferences_text(locked)),
            wanted.NOUVEAU_FILE: text_file(wanted.nouveau_text()),
            wanted.FABRIC_MODULES_FILE: None,
            wanted.LINKER_FILE: text_file(wanted.linker_text(wish, "x86_64")),
            wanted.SERVICE_FILE: text_file(wanted.service_text(wish)),
            wanted.LAUNCHER_FILE: {
                "sha256": SITE.launcher_sha256,
                "size_bytes": 900,
                "mode": 0o755,
                "user_id": 0,
            },
        },
        "cloud_init": {"state": "done"},
        "simulated": [],
        "seconds": {"total": 0.3},
    }


def observed(*changes: Change, answer: Answer | None = None) -> HostState:
    """Return the state of the converged host (or of ``answer``) after some changes."""
    told = converged() if answer is None else copy.deepcopy(answer)
    for change in changes:
        change(told)
    return host_state.parse(json.dumps(told), host="gpu-01", received_at_s=NOW_S)


def put(path: str, value: object) -> Change:
    """Return a change that sets one value; the keys are divided by spaces, since names hold dots and slashes."""

    def change(answer: Answer) -> None:
        *parents, last = path.split(" ")
        at: Any = answer
        for key in parents:
            at = at[int(key)] if isinstance(at, list) else at[key]
        if isinstance(at, list):
            at[int(last)] = value
        else:
            at[last] = value

    return change


def drop(path: str) -> Change:
    """Return a change that removes one key."""

    def change(answer: Answer) -> None:
        *parents, last = path.split(" ")
        at: Any = answer
        for key in parents:
            at = at[int(key)] if isinstance(at, list) else at[key]
        del at[last]

    return change


def both(*changes: Change) -> Change:
    """Return the changes as one."""

    def change(answer: Answer) -> None:
        for one in changes:
            one(answer)

    return change
