"""The host probe: each section on a directory that looks like a host, and the whole on this machine."""

from __future__ import annotations

import ast
import base64
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bringup import host_state, paths

SCRIPT = paths.files() / "host_probe.py"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "probe"
PROBE = paths.host_script("host_probe")

Lay = Callable[..., None]


def look(root: Path, section: str, **parameters: object) -> Any:
    """Return one section of the answer for a directory taken as a host's root."""
    return PROBE.answer({"root": str(root), "only": [section], **parameters})[section]


@pytest.fixture
def lay(tmp_path: Path) -> Lay:
    """Write files below a root: lay({"/etc/x": "text"}, links={"/etc/y": "x"}, programs={"/usr/bin/z": "#!..."})."""

    def write(
        files: dict[str, str | bytes] | None = None,
        links: dict[str, str] | None = None,
        programs: dict[str, str] | None = None,
    ) -> None:
        for name, content in {**(files or {}), **(programs or {})}.items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        for name in programs or {}:
            (tmp_path / name.lstrip("/")).chmod(0o755)
        for name, target in (links or {}).items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)

    return write


def program(output: str, status: int = 0) -> str:
    """Return a program that prints a text and ends with a status; built-ins only, its PATH lies below the root."""
    return f"#!/bin/sh\nwhile IFS= read -r x; do printf '%s\\n' \"$x\"; done <<'END'\n{output}\nEND\nexit {status}\n"


# ---------------------------------------------------------------- the script as a whole


def test_reads_under_python_3_8_and_needs_the_standard_library_only() -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 8))
    imported = {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    imported |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names


def test_fits_a_remote_command_as_quoted_through_sudo() -> None:
    packed = base64.b64encode(zlib.compress(SCRIPT.read_bytes(), 9)).decode()
    # ssh hands `sudo sh -c '...'` to a shell, and sudo's shell reads it a second time.
    command = shlex.quote(f"sh -c {shlex.quote(f'python3 -c code {packed}')}")
    assert len(command) < 64 * 1024


def test_answers_every_section_on_this_machine() -> None:
    ran = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    state = host_state.parse(ran.stdout)
    # What a build machine may lack: a running systemd.
    assert set(state.unknown_sections()) <= {"services"}
    assert isinstance(state.os, host_state.Os)
    assert state.os.machine == os.uname().machine


def test_answers_in_half_a_second() -> None:
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, SCRIPT], capture_output=True, timeout=60, check=True)
        seconds.append(time.monotonic() - began)
    # 0.5 s is for an idle host; this one runs other tests beside it.
    assert min(seconds) < 1.5


def test_reads_its_parameters_from_the_first_line_of_stdin() -> None:
    ran = subprocess.run(
        [sys.executable, SCRIPT, "-"], input='{"only": ["pin"]}\nmore', capture_output=True, text=True, check=True
    )
    assert set(json.loads(ran.stdout)) == {"schema", "pin", "seconds"}


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        pytest.param("[]", "wanted a JSON object", id="no object"),
        pytest.param("{", "Expecting property name", id="no JSON"),
        pytest.param('{"only": "os"}', "parameter only: wanted a list of strings", id="no list"),
    ],
)
def test_refuses_parameters_it_cannot_read(parameters: str, said: str) -> None:
    ran = subprocess.run([sys.executable, SCRIPT, parameters], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr


def test_a_section_that_breaks_hides_no_other(tmp_path: Path, lay: Lay) -> None:
    lay({"/var/lib/dpkg/status": "Package: x\nStatus: broken\n\n", "/etc/os-release": "ID=debian\n"})
    answer = PROBE.answer({"root": str(tmp_path), "only": ["dpkg", "os"]})
    assert answer["dpkg"] == {"error": "dpkg status of x: wanted three words, found ['broken']"}
    assert answer["os"]["id"] == "debian"


def test_a_command_that_hangs_is_ended_with_its_group(tmp_path: Path, lay: Lay, monkeypatch: Any) -> None:
    monkeypatch.setattr(PROBE, "CHILD_LIMIT_S", 0.5)
    lay(
        {"/etc/ld.so.cache": "", "/etc/ld.so.conf": ""},
        programs={"/sbin/ldconfig": f"#!/bin/sh\n/bin/sleep 60 &\necho $! >{tmp_path}/pid\nwait\n"},
    )
    assert look(tmp_path, "loader") == {"error": "ldconfig: no answer within 0 s"}
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the command's own child still runs")


# ---------------------------------------------------------------- system


@pytest.mark.parametrize(
    ("release", "wanted"),
    [
        pytest.param(
            'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\nID=ubuntu\nID_LIKE=debian\n',
            ("ubuntu", ["debian"], "24.04", "noble", "Ubuntu 24.04.3 LTS"),
            id="ubuntu",
        ),
        pytest.param('ID=debian\nVERSION_ID="12"\n', ("debian", [], "12", "", ""), id="debian"),
    ],
)
def test_os(tmp_path: Path, lay: Lay, release: str, wanted: tuple[object, ...]) -> None:
    lay({"/etc/os-release": release})
    found = look(tmp_path, "os")
    keys = ("id", "id_like", "version_id", "codename", "pretty_name")
    assert tuple(found[key] for key in keys) == wanted


def test_os_without_a_name_is_an_error(tmp_path: Path) -> None:
    assert look(tmp_path, "os") == {"error": "/etc/os-release names no distribution"}


GRUB = (
    'set default="{default}"\n'
    'menuentry "x" {{\n\tlinux /boot/vmlinuz-6.1.0-9 root=/dev/sda1\n}}\nmenuentry "y" {{\n}}\n'
)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        pytest.param({}, "running", id="no image: started from outside"),
        pytest.param({"/boot/vmlinuz-6.1.0-9": "", "/boot/vmlinuz-6.1.0-21": ""}, "6.1.0-21", id="newest by numbers"),
        pytest.param(
            {"/boot/vmlinuz-6.1.0-21": "", "/boot/grub/grub.cfg": GRUB.format(default="0")}, "6.1.0-9", id="grub"
        ),
        pytest.param(
            {"/boot/vmlinuz-6.1.0-21": "", "/boot/grub/grub.cfg": GRUB.format(default="Advanced>old")},
            None,
            id="grub starts a named entry",
        ),
        pytest.param(
            {
                "/boot/vmlinuz-6.1.0-21": "",
                "/boot/grub/grub.cfg": GRUB.format(default="${saved_entry}"),
                "/boot/grub/grubenv": "saved_entry=Advanced>old\n",
            },
            None,
            id="grub starts a saved entry",
        ),
    ],
)
def test_the_kernel_that_boots_next(tmp_path: Path, lay: Lay, files: dict[str, str], wanted: str | None) -> None:
    lay(files)
    assert PROBE.next_kernel(PROBE.Host({"root": str(tmp_path)}), "running")[0] == wanted


def test_an_installed_kernel_and_its_module(tmp_path: Path, lay: Lay) -> None:
    lay(
        {
            "/lib/modules/6.1.0-21/modules.dep": "kernel/x.ko:\nupdates/dkms/nvidia.ko: kernel/y.ko\n",
            "/lib/modules/6.1.0-21/updates/dkms/nvidia.ko": (FIXTURES / "nvidia.ko").read_bytes(),
            "/lib/modules/6.1.0-21/build/Makefile": "",
            "/boot/initrd.img-6.1.0-21": "",
            "/lib/modules/6.1.0-9/modules.dep": "kernel/drivers/gpu/drm/nouveau/nouveau.ko.xz: x\n",
            "/proc/cmdline": (FIXTURES / "proc_cmdline_iommu_off.txt").read_text(),
            "/proc/version": "Linux version 6.8.0 (b@l) (x86_64-linux-gnu-gcc-13 (Ubuntu 13.3.0) 13.3.0, GNU ld) #63",
            "/usr/bin/x86_64-linux-gnu-gcc-12": "",
        },
        links={"/usr/bin/gcc": "gcc-12", "/usr/bin/gcc-12": "x86_64-linux-gnu-gcc-12"},
    )
    found = look(tmp_path, "kernel")
    new, old = found["installed"]
    assert new.pop("initramfs_mtime_s") == pytest.approx(time.time(), abs=60)
    assert new == {
        "release": "6.1.0-21",
        "has_headers": True,
        "has_nouveau": False,
        "nvidia": {
            "path": "/lib/modules/6.1.0-21/updates/dkms/nvidia.ko",
            "version": "580.95.05",
            "flavour": "open",
            "signer": None,
            "is_signed": False,
        },
    }
    assert old == {
        "release": "6.1.0-9",
        "has_headers": False,
        "has_nouveau": True,
        "nvidia": None,
        "initramfs_mtime_s": None,
    }
    assert found["command_line"] == ["amd_iommu=off", "iommu=off"]
    assert (found["compiler"], found["default_compiler"]) == ("gcc 13", "gcc 12")


def test_a_compressed_and_signed_module_of_debian_13(tmp_path: Path, lay: Lay) -> None:
    release = "6.12.117+deb13-amd64"
    said = (FIXTURES / "modinfo_debian13.txt").read_text()
    lay(
        {
            f"/lib/modules/{release}/modules.dep": "updates/dkms/nvidia.ko.xz:\nupdates/dkms/nvidia-uvm.ko.xz:\n",
            f"/lib/modules/{release}/updates/dkms/nvidia.ko.xz": b"\xfd7zXZ",
            f"/boot/vmlinuz-{release}": "",
            "/boot/vmlinuz-6.12.9+deb13-amd64": "",
        },
        programs={"/usr/sbin/modinfo": program(said)},
    )
    found = look(tmp_path, "kernel")
    assert found["next_release"] == release
    assert found["installed"][0]["nvidia"] == {
        "path": f"/lib/modules/{release}/updates/dkms/nvidia.ko.xz",
        "version": "580.95.05",
        "flavour": "open",
        "signer": "DKMS module signing key",
        "is_signed": True,
    }


@pytest.mark.parametrize(
    ("files", "programs", "wanted"),
    [
        pytest.param({}, {}, (False, "no EFI firmware"), id="no EFI"),
        pytest.param(
            {"/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c": b"\x06\0\0\0\x01"},
            {},
            (True, "SecureBoot variable"),
            id="on by the variable",
        ),
        pytest.param(
            {"/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c": b"\x06\0\0\0\0"},
            {},
            (False, "SecureBoot variable"),
            id="off by the variable",
        ),
        pytest.param({}, {"/usr/bin/mokutil": program("SecureBoot enabled")}, (True, "mokutil"), id="on by mokutil"),
        pytest.param(
            {"/sys/firmware/efi/x": ""},
            {},
            (None, "EFI firmware, SecureBoot variable not readable"),
            id="cannot be read",
        ),
    ],
)
def test_secure_boot(
    tmp_path: Path,
    lay: Lay,
    files: dict[str, str | bytes],
    programs: dict[str, str],
    wanted: tuple[bool | None, str],
) -> None:
    lay(files, programs=programs)
    found = look(tmp_path, "secure_boot")
    assert (found["is_enabled"], found["witness"]) == wanted


@pytest.mark.parametrize(
    ("said", "wanted"),
    [("/k is already enrolled", True), ("/k is not enrolled", False)],
    ids=["enrolled", "not enrolled"],
)
def test_the_signing_key(tmp_path: Path, lay: Lay, said: str, wanted: bool) -> None:
    answer = f"#!/bin/sh\n[ $1 = --sb-state ] && echo SecureBoot enabled || echo '{said}'\n"
    lay({"/var/lib/dkms/mok.pub": "k"}, programs={"/usr/bin/mokutil": answer})
    found = look(tmp_path, "secure_boot")
    assert (found["signing_key"], found["is_key_enrolled"]) == ("/var/lib/dkms/mok.pub", wanted)


# ---------------------------------------------------------------- packages


def stanza(name: str, version: str, status: str = "install ok installed", arch: str = "amd64") -> str:
    return f"Package: {name}\nStatus: {status}\nArchitecture: {arch}\nVersion: {version}\nDescription: x\n more\n\n"


def test_dpkg(tmp_path: Path, lay: Lay) -> None:
    lay(
        {
            "/var/lib/dpkg/status": stanza("dpkg", "1.21")
            + stanza("bash", "5.2")
            + stanza("libnvidia-compute-580", "580.95.05-1", "hold ok installed")
            + stanza("libnvidia-compute-580", "580.95.05-1", arch="i386")
            + stanza("cuda-toolkit-config-common", "13.0.96-1", arch="all")
            + stanza("nvidia-dkms-580", "580.95.05-1", "install ok half-configured")
            + stanza("nvidia-driver-570", "570.1-1", "deinstall ok config-files")
            + stanza("vim", "9", "install reinstreq half-installed")
            + stanza("inference-tool", "1"),
            "/var/lib/dpkg/updates/0001": "",
        }
    )
    assert look(tmp_path, "dpkg", packages=["inference-tool"]) == {
        "architecture": "amd64",
        "packages": {
            "libnvidia-compute-580": {"version": "580.95.05-1", "status": "hi"},
            "libnvidia-compute-580:i386": {"version": "580.95.05-1", "status": "ii"},
            "cuda-toolkit-config-common": {"version": "13.0.96-1", "status": "ii"},
            "nvidia-dkms-580": {"version": "580.95.05-1", "status": "iF"},
            "nvidia-driver-570": {"version": "570.1-1", "status": "rc"},
            "inference-tool": {"version": "1", "status": "ii"},
        },
        "broken": [
            {"name": "nvidia-dkms-580", "version": "580.95.05-1", "status": "iF"},
            {"name": "vim", "version": "9", "status": "iHR"},
        ],
        "is_interrupted": True,
    }


APT_CONFIG = (
    'APT::Architecture "amd64";\nAPT::Periodic::Unattended-Upgrade "1";\n'
    'Unattended-Upgrade::Package-Blacklist "";\nUnattended-Upgrade::Package-Blacklist:: "^nvidia-";\n'
    'Acquire::Check-Date "false";\nAcquire::http::Proxy "http://proxy:3128";'
)


def test_apt(tmp_path: Path, lay: Lay) -> None:
    lay(
        {
            "/etc/apt/sources.list": "# deb http://no/ x y\n\ndeb http://me:secret@mirror/debian bookworm main # yes\n",
            "/etc/apt/sources.list.d/cuda.list": "deb [arch=amd64 signed-by=/k.gpg trusted=yes] http://cuda/x/ /\n",
            "/etc/apt/sources.list.d/a.sources": (
                "Types: deb\nURIs: http://a/\n http://b/\nSuites: stable\nComponents: main\nSigned-By:\n"
                " -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n x\n"
                "\nEnabled: no\nTypes: deb\nURIs: http://off/\nSuites: x\n"
            ),
            "/etc/apt/sources.list.d/ignored.save": "deb http://save/ x y\n",
            "/k.gpg": (FIXTURES / "key.gpg").read_bytes(),
            "/etc/apt/preferences.d/pin-600": (
                "Package: nvidia-*\n libnvidia-*\nPin: release o=NVIDIA\nPin-Priority: 600\n"
            ),
            "/etc/apt/preferences.d/ignored.txt": "Package: *\nPin: x\nPin-Priority: 1\n",
        },
        programs={"/usr/bin/apt-config": program(APT_CONFIG)},
    )
    found = look(tmp_path, "apt")
    entry = {"types": ["deb"], "components": [], "signed_by": None, "is_trusted": False}
    assert found["sources"] == [
        entry
        | {
            "file": "/etc/apt/sources.list",
            "line": 3,
            "uris": ["http://mirror/debian"],
            "suites": ["bookworm"],
            "components": ["main"],
        },
        entry
        | {
            "file": "/etc/apt/sources.list.d/cuda.list",
            "line": 1,
            "uris": ["http://cuda/x/"],
            "suites": ["/"],
            "signed_by": "/k.gpg",
            "is_trusted": True,
        },
        entry
        | {
            "file": "/etc/apt/sources.list.d/a.sources",
            "line": 1,
            "uris": ["http://a/", "http://b/"],
            "suites": ["stable"],
            "components": ["main"],
            "signed_by": "(key in the file)",
        },
    ]
    fingerprint = (FIXTURES / "key.fingerprint").read_text().strip()
    assert found["keys"] == {
        "/k.gpg": {"fingerprints": [fingerprint]},
        "/etc/apt/keyrings/bringup-nvidia.gpg": {"error": "absent"},
    }
    assert found["preferences"] == [
        {
            "file": "/etc/apt/preferences.d/pin-600",
            "line": 1,
            "package": "nvidia-* libnvidia-*",
            "pin": "release o=NVIDIA",
            "priority": 600,
        }
    ]
    assert {key: found[key] for key in ("blacklist", "is_unattended", "checks_dates", "has_proxy")} == {
        "blacklist": ["^nvidia-"],
        "is_unattended": True,
        "checks_dates": False,
        "has_proxy": True,
    }


@pytest.mark.parametrize("name", ["key.gpg", "key.asc"])
def test_a_fingerprint_is_the_one_gnupg_prints(name: str) -> None:
    assert PROBE.fingerprints((FIXTURES / name).read_bytes()) == [(FIXTURES / "key.fingerprint").read_text().strip()]


@pytest.mark.parametrize("data", [b"<html>404</html>", b"\x99\xff\xff\xff"], ids=["a web page", "cut short"])
def test_what_is_no_keyring_has_no_fingerprint(tmp_path: Path, lay: Lay, data: bytes) -> None:
    lay({"/etc/apt/keyrings/bringup-nvidia.gpg": data}, programs={"/usr/bin/apt-config": program(APT_CONFIG)})
    key = look(tmp_path, "apt")["keys"]["/etc/apt/keyrings/bringup-nvidia.gpg"]
    assert key.get("fingerprints", []) == []


# ---------------------------------------------------------------- driver and GPUs


def variants(name: str) -> dict[str, str]:
    """Return the blocks of a captured file by their heading."""
    blocks = (FIXTURES / name).read_text().split("### ")[1:]
    return {block.split("\n", 1)[0]: block.split("\n", 1)[1] for block in blocks}


@pytest.mark.parametrize(
    ("heading", "version", "flavour"),
    [
        ("closed module, older", "520.56.06", "closed"),
        ("closed module 580 (trailing build text)", "580.173.02", "closed"),
        ("open module (word order differs)", "515.57", "open"),
    ],
)
def test_the_loaded_driver(tmp_path: Path, lay: Lay, heading: str, version: str, flavour: str) -> None:
    lay({"/proc/driver/nvidia/version": variants("proc_driver_nvidia_version_variants.txt")[heading]})
    found = look(tmp_path, "driver")["loaded"]
    assert found == {"version": version, "flavour": flavour, "witness": "/proc/driver/nvidia/version"}


def test_a_driver_that_shows_only_its_version(tmp_path: Path, lay: Lay) -> None:
    lay({"/sys/module/nvidia/version": "580.95.05\n"})
    found = look(tmp_path, "driver")
    assert found["loaded"] == {"version": "580.95.05", "flavour": None, "witness": "/sys/module/nvidia/version"}
    assert found["modules"] == ["nvidia"]


def test_what_a_runfile_left_is_not_packaged(tmp_path: Path, lay: Lay) -> None:
    library = "/usr/lib/x86_64-linux-gnu"
    lay(
        {
            f"{library}/libcuda.so.570.124.04": "",
            f"{library}/libcuda.so.580.95.05": "",
            "/var/lib/dpkg/info/libnvidia-compute-580:amd64.list": f"/.\n{library}/libcuda.so.580.95.05\n",
            "/usr/bin/nvidia-uninstall": "",
            "/usr/lib/modprobe.d/nvidia.conf": "blacklist nouveau\n",
            "/var/lib/dkms/nvidia/580.95.05/6.1.0-21/x86_64/module/nvidia.ko": "",
            "/var/lib/dkms/nvidia/570.124.04/source": "",
        },
        links={f"{library}/libcuda.so.1": "libcuda.so.570.124.04", "/lib": "usr/lib"},
        programs={"/usr/bin/nvidia-smi": program("Failed to initialize NVML: Driver/library version mismatch", 18)},
    )
    found = look(tmp_path, "driver")
    assert found["libcuda"] == [
        {"path": f"{library}/libcuda.so.570.124.04", "version": "570.124.04", "is_packaged": False},
        {"path": f"{library}/libcuda.so.580.95.05", "version": "580.95.05", "is_packaged": True},
    ]
    assert found["nvidia_smi"] == {"path": "/usr/bin/nvidia-smi", "is_packaged": False}
    assert (found["smi_status"], found["smi_message"]) == (
        18,
        "Failed to initialize NVML: Driver/library version mismatch",
    )
    assert found["runfile"] == ["/usr/bin/nvidia-uninstall"]
    assert found["nouveau_blacklist"] == ["/usr/lib/modprobe.d/nvidia.conf"]
    assert found["dkms"] == [
        {"version": "570.124.04", "kernel": None, "is_built": False},
        {"version": "580.95.05", "kernel": "6.1.0-21", "is_built": True},
    ]


H200 = (
    "0, NVIDIA H200, GPU-0, 00000000:00:06.0, 580.159.04, 9.0, 143771, Disabled, Enabled, Enabled, 5, 16, "
    "Completed, Success"
)


def pci(address: str, device: str, kind: str = "0x030200", vendor: str = "0x10de") -> dict[str, str | bytes]:
    base = f"/sys/bus/pci/devices/{address}"
    return {
        f"{base}/vendor": vendor,
        f"{base}/device": device,
        f"{base}/class": kind,
        f"{base}/numa_node": "-1\n",
    }


def test_gpus_on_the_bus_and_as_listed(tmp_path: Path, lay: Lay) -> None:
    lay(
        {
            **pci("0000:00:06.0", "0x2335"),
            **pci("0000:00:07.0", "0x22a3", "0x068000"),
            **pci("0000:00:08.0", "0x1b36", vendor="0x1b36"),
        },
        links={"/sys/bus/pci/devices/0000:00:06.0/driver": "../../../bus/pci/drivers/nvidia"},
        programs={"/usr/bin/nvidia-smi": program(H200)},
    )
    assert look(tmp_path, "gpus") == {
        "pci": [
            {
                "address": "0000:00:06.0",
                "device_id": "2335",
                "class_id": "0302",
                "bound_to": "nvidia",
                "numa_node": -1,
            }
        ],
        "switches": [
            {
                "address": "0000:00:07.0",
                "device_id": "22a3",
                "class_id": "0680",
                "bound_to": None,
                "numa_node": -1,
            }
        ],
        "listed": [
            {
                "index": 0,
                "name": "NVIDIA H200",
                "uuid": "GPU-0",
                "address": "0000:00:06.0",
                "driver_version": "580.159.04",
                "compute_capability": "9.0",
                "memory_bytes": 143771 * 1024 * 1024,
                "mig_mode": "Disabled",
                "is_persistent": True,
                "ecc_mode": "Enabled",
                "pcie_generation_max": 5,
                "pcie_width_max": 16,
                "fabric_state": "Completed",
                "fabric_status": "Success",
            }
        ],
    }


def test_eight_gpus_of_a_public_host_are_eight_on_the_bus(tmp_path: Path, lay: Lay) -> None:
    lines = (FIXTURES / "lspci_nvidia_headers.txt").read_text().splitlines()
    for line in lines:
        address, rest = line.split(" ", 1)
        device = rest.split("Device ", 1)[1].split()[0]
        lay(pci(f"0000:{address}", f"0x{device}"))
    found = look(tmp_path, "gpus")
    assert [item["device_id"] for item in found["pci"]] == ["2bb5"] * 8
    assert found["listed"] is None


@pytest.mark.parametrize(
    "message",
    [line for block in variants("nvml_mismatch_variants.txt").values() for line in block.splitlines() if line],
)
def test_gpus_of_a_driver_that_does_not_answer_are_unlisted(tmp_path: Path, lay: Lay, message: str) -> None:
    lay(pci("0000:00:06.0", "0x2335"), programs={"/usr/bin/nvidia-smi": program(message, 9)})
    assert look(tmp_path, "gpus")["listed"] is None
    assert look(tmp_path, "driver")["smi_message"] == message


def test_an_older_nvidia_smi_is_asked_for_less(tmp_path: Path, lay: Lay) -> None:
    older = (
        "#!/bin/sh\ncase $1 in *fabric*) echo 'Field \"fabric.state\" is not a valid field to query.'; exit 2;; esac\n"
        "echo '0, NVIDIA A100-SXM4-80GB, GPU-1, 00000000:07:00.0, 470.82.01, 81251, [N/A], Disabled'\n"
    )
    lay(pci("0000:07:00.0", "0x20b2"), programs={"/usr/bin/nvidia-smi": older})
    (gpu,) = look(tmp_path, "gpus")["listed"]
    assert (gpu["name"], gpu["mig_mode"], gpu["fabric_state"], gpu["is_persistent"]) == (
        "NVIDIA A100-SXM4-80GB",
        None,
        None,
        False,
    )


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("00000000:00:06.0", "0000:00:06.0"),
        ("0000:0B:00.0", "0000:0b:00.0"),
        ("A1:00.0", "0000:a1:00.0"),
    ],
)
def test_bus_addresses_of_three_spellings(said: str, wanted: str) -> None:
    assert PROBE.bus_address(said) == wanted


def test_fabric(tmp_path: Path, lay: Lay) -> None:
    lay(
        {
            "/proc/driver/nvidia-nvswitch/devices/0000:c1:00.0/information": "",
            "/sys/class/infiniband/mlx5_0/device/vpd": b"\x82\x10\0x\x90SMDL=SW_MNG\x78",
            "/sys/class/infiniband/mlx5_1/device/vpd": b"\x82\x10\0ConnectX-7\x78",
            "/sys/module/ib_umad/refcnt": "0",
            "/etc/modules-load.d/bringup-fabric.conf": "# x\nib_umad\n",
        }
    )
    assert look(tmp_path, "fabric") == {
        "switches": 1,
        "infiniband": ["mlx5_0", "mlx5_1"],
        "switch_management": ["mlx5_0"],
        "is_ib_umad_loaded": True,
        "ib_umad_files": ["/etc/modules-load.d/bringup-fabric.conf"],
    }


# ---------------------------------------------------------------- toolkits and loader


@pytest.mark.parametrize("mode", ["auto", "manual"])
def test_toolkits_and_alternatives(tmp_path: Path, lay: Lay, mode: str) -> None:
    lib = "/usr/local/cuda-13.0/targets/x86_64-linux/lib"
    lay(
        {
            "/usr/local/cuda-13.0/bin/nvcc": "",
            f"{lib}/libnvrtc.so.13.0.88": "",
            f"{lib}/libnvrtc-builtins.so.13.0.88": "",
            "/usr/local/cuda-12.8/version.json": '{"cuda": {"name": "CUDA SDK", "version": "12.8.1"}}',
            "/var/lib/dpkg/alternatives/cuda": (FIXTURES / f"alternatives_cuda_{mode}").read_text(),
        },
        links={
            f"{lib}/libnvrtc.so.13": "libnvrtc.so.13.0.88",
            "/usr/local/cuda": "/etc/alternatives/cuda",
            "/etc/alternatives/cuda": "/usr/local/cuda-12.8",
        },
    )
    assert look(tmp_path, "toolkits") == {
        "installed": {
            "12.8": {
                "path": "/usr/local/cuda-12.8",
                "release": "12.8.1",
                "has_nvcc": False,
                "nvrtc": [],
                "targets": [],
            },
            "13.0": {
                "path": "/usr/local/cuda-13.0",
                "release": None,
                "has_nvcc": True,
                "nvrtc": ["libnvrtc-builtins.so.13.0.88", "libnvrtc.so.13.0.88"],
                "targets": ["x86_64-linux"],
            },
        },
        "links": {
            "/usr/local/cuda": {
                "target": "/etc/alternatives/cuda",
                "resolved": "/usr/local/cuda-12.8",
                "exists": True,
            }
        },
        "alternatives": {
            "cuda": {
                "mode": mode,
                "link": "/usr/local/cuda",
                "link_target": "/etc/alternatives/cuda",
                "target": "/usr/local/cuda-12.8",
                "choices": {"/usr/local/cuda-12.8": 128, "/usr/local/cuda-13.0": 130},
            }
        },
        "system": [],
    }


def test_loader(tmp_path: Path, lay: Lay) -> None:
    mixed = (FIXTURES / "ldconfig_p_nvrtc_mixed.txt").read_text()
    lay(
        {
            "/etc/ld.so.cache": "",
            "/etc/ld.so.conf": "include /etc/ld.so.conf.d/*.conf\n",
            "/etc/ld.so.conf.d/000_cuda.conf": "/usr/local/cuda/targets/x86_64-linux/lib\n",
            "/etc/ld.so.conf.d/00-bringup-cuda.conf": "# x\n/usr/local/cuda-13.0/targets/x86_64-linux/lib\n",
            "/etc/ld.so.conf.d/local.conf": "/opt/a:/opt/b  # two\n",
            "/etc/ld.so.preload": "/lib/a.so:/lib/b.so # x\n",
            "/usr/local/cuda-13.0/targets/x86_64-linux/lib/libnvrtc.so.13": "",
        },
        links={"/usr/local/cuda": "cuda-13.0"},
        programs={"/sbin/ldconfig": program("\n".join(f"\t{line}" for line in mixed.splitlines()))},
    )
    found = look(tmp_path, "loader", sonames=["libnvrtc.so"])
    assert [(e["file"], e["line"], e["directory"], e["exists"]) for e in found["directories"]] == [
        ("/etc/ld.so.conf.d/00-bringup-cuda.conf", 2, "/usr/local/cuda-13.0/targets/x86_64-linux/lib", True),
        ("/etc/ld.so.conf.d/000_cuda.conf", 1, "/usr/local/cuda/targets/x86_64-linux/lib", True),
        ("/etc/ld.so.conf.d/local.conf", 1, "/opt/a", False),
        ("/etc/ld.so.conf.d/local.conf", 1, "/opt/b", False),
    ]
    versioned = "/usr/local/cuda-13.0/targets/x86_64-linux/lib/libnvrtc.so.13"
    assert found["hits"]["libnvrtc.so.13"] == [
        {
            "path": "/usr/local/cuda/targets/x86_64-linux/lib/libnvrtc.so.13",
            "resolved": versioned,
            "exists": True,
        },
        {"path": versioned, "resolved": versioned, "exists": True},
    ]
    assert [hit["path"] for hit in found["hits"]["libnvrtc.so.12"]] == ["/lib/x86_64-linux-gnu/libnvrtc.so.12"]
    assert found["preload"] == ["/lib/a.so", "/lib/b.so"]


# ---------------------------------------------------------------- environments


def distribution(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Lay a distribution down as an installer does: its files, its metadata, and RECORD of both."""
    info = site / f"{name}-{version}.dist-info"
    for path, text in {**files, f"{info.name}/METADATA": f"Name: {name}\n"}.items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    # As an installer spells it: a comma in a name puts the name in quotes.
    rows = [
        f"{chr(34) + path + chr(34) if ',' in path else path},{PROBE.file_hash(str(site / path))},{len(text)}"
        for path, text in files.items()
    ]
    rows += [f"{info.name}/METADATA,,", f"{info.name}/RECORD,,", "a/__pycache__/x.pyc,,"]
    (info / "RECORD").write_text("\n".join(rows) + "\n")


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Return (root, site-packages) of a host with one environment that serves, its marker as the builder writes it."""
    env = tmp_path / "opt/bringup/envs/abc-1"
    site = env / "lib/python3.11/site-packages"
    (env / "bin").mkdir(parents=True)
    (env / "bin/python").symlink_to(sys.executable)
    site.mkdir(parents=True)
    distribution(site, "torch", "2.9.1+cu130", {"torch/__init__.py": "1", "torch/lib/libtorch.so": "ELF"})
    distribution(site, "sgl_kernel", "0.3.21", {"sgl_kernel/ops.so": "ELF", "odd, name.py": "2"})
    versions, prints, _, _ = PROBE.inspect_site(str(site), False)
    (env / ".bringup-env.json").write_text(
        json.dumps(
            {
                "schema": 1,
                "digest": "abc",
                "generation": 1,
                "python": "3.11",
                "distributions": versions,
                "files_fingerprint": prints,
            }
        )
    )
    (tmp_path / "opt/bringup/current").symlink_to("/opt/bringup/envs/abc-1")
    return tmp_path, site


def test_an_environment_as_it_was_built(environment: tuple[Path, Path]) -> None:
    root, _ = environment
    found = look(root, "environment")
    (inspected,) = found.pop("inspected")
    assert found == {
        "current": "/opt/bringup/envs/abc-1",
        "is_current_whole": True,
        "environments": [
            {
                "name": "abc-1",
                "is_complete": True,
                "digest": "abc",
                "generation": 1,
                "python": "3.11",
                "is_tainted": False,
            }
        ],
        "is_deep": False,
    }
    assert inspected["distributions"] == {"torch": "2.9.1+cu130", "sgl-kernel": "0.3.21"}
    assert {key: inspected[key] for key in ("changed", "unlike_record", "strays", "python")} == {
        "changed": [],
        "unlike_record": {},
        "strays": [],
        "python": "3.11",
    }
    assert inspected["has_interpreter"] is True


def append(site: Path) -> None:
    with (site / "torch/lib/libtorch.so").open("a") as file:
        file.write("more")


def same_size(site: Path) -> None:
    path = site / "torch/lib/libtorch.so"
    before = path.stat()
    path.write_text("FLE")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def hidden(site: Path) -> None:
    path = site / "torch/lib/libtorch.so"
    before = path.stat()
    path.write_text("FLE")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def other_torch(site: Path) -> None:
    shutil.rmtree(site / "torch-2.9.1+cu130.dist-info")
    distribution(site, "torch", "2.9.1", {"torch/__init__.py": "cu128"})


@pytest.mark.parametrize(
    ("change", "deep", "wanted"),
    [
        pytest.param(append, False, {"changed": ["torch"]}, id="appended to"),
        pytest.param(same_size, False, {"changed": ["torch"]}, id="same size, other time"),
        pytest.param(hidden, False, {}, id="same size and time: not seen"),
        pytest.param(
            hidden, True, {"unlike_record": {"torch": ["torch/lib/libtorch.so"]}}, id="same size and time, deep"
        ),
        pytest.param(
            lambda site: (site / "sgl_kernel/ops.so").unlink(),
            False,
            {"changed": ["sgl-kernel"], "unlike_record": {"sgl-kernel": ["sgl_kernel/ops.so"]}},
            id="removed",
        ),
        pytest.param(
            other_torch,
            False,
            {"distributions": {"torch": "2.9.1", "sgl-kernel": "0.3.21"}},
            id="another torch over it: a version, not files",
        ),
        pytest.param(
            lambda site: distribution(site, "extra", "1", {"extra.py": ""}),
            False,
            {"distributions": {"torch": "2.9.1+cu130", "sgl-kernel": "0.3.21", "extra": "1"}},
            id="one more distribution",
        ),
        pytest.param(
            lambda site: distribution(site, "torch", "2.10.0", {"torch/__init__.py": "1"}),
            False,
            {"distributions": {"torch": "2.10.0 and 2.9.1+cu130", "sgl-kernel": "0.3.21"}},
            id="two of one distribution",
        ),
        pytest.param(
            lambda site: (site / "sitecustomize.py").write_text(""),
            False,
            {"strays": ["sitecustomize.py"]},
            id="a file of no distribution",
        ),
        pytest.param(lambda site: (site / "torch/__pycache__").mkdir(), False, {}, id="byte code"),
    ],
)
def test_a_changed_environment(
    environment: tuple[Path, Path], change: Callable[[Path], object], deep: bool, wanted: dict[str, object]
) -> None:
    root, site = environment
    change(site)
    (found,) = look(root, "environment", deep=deep)["inspected"]
    as_built = {
        "distributions": {"torch": "2.9.1+cu130", "sgl-kernel": "0.3.21"},
        "changed": [],
        "unlike_record": {},
        "strays": [],
    }
    assert {key: found[key] for key in as_built} == {**as_built, **wanted}


def test_environments_that_are_unfinished_or_tainted(environment: tuple[Path, Path]) -> None:
    root, _ = environment
    envs = root / "opt/bringup/envs"
    (envs / "def-1").mkdir()
    (envs / "abc-1/.bringup-tainted").write_text("")
    (envs / "ghi-1").mkdir()
    (envs / "ghi-1/.bringup-env.json").write_text("not json")
    entries = {e["name"]: (e["is_complete"], e["is_tainted"]) for e in look(root, "environment")["environments"]}
    assert entries == {"abc-1": (True, True), "def-1": (False, False), "ghi-1": (False, False)}


def test_an_existing_environment(environment: tuple[Path, Path]) -> None:
    root, site = environment
    shutil.copytree(site.parents[2], root / "srv/env", symlinks=True)
    (root / "opt/bringup/current").unlink()
    found = look(root, "environment", environments=["/srv/env", "/srv/none"])
    assert found["current"] is None
    (inspected,) = found["inspected"]
    assert (inspected["path"], inspected["distributions"]["torch"]) == ("/srv/env", "2.9.1+cu130")


def test_processes_of_an_environment_by_each_witness() -> None:
    path = "/opt/bringup/envs/abcdef-1/bin/python"
    by_variable = subprocess.Popen(["sleep", "30"], env={"VIRTUAL_ENV": "/opt/bringup/envs/abcdef-2"})
    by_argument = subprocess.Popen(["sh", "-c", "read x", path], stdin=subprocess.PIPE)
    unrelated = subprocess.Popen(["sh", "-c", "read x", json.dumps({"environments": [path]})], stdin=subprocess.PIPE)
    try:
        found = PROBE.answer({"only": ["processes"]})["processes"]["environment"]
    finally:
        for process in (by_variable, by_argument, unrelated):
            process.kill()
            process.communicate()
    mine = {item["pid"]: (item["environment"], item["witnesses"]) for item in found}
    assert mine.get(by_variable.pid) == ("abcdef-2", ["environ"])
    assert mine.get(by_argument.pid) == ("abcdef-1", ["cmdline"])
    # A probe's own parameters name environments too, on its command line.
    assert unrelated.pid not in mine


# ---------------------------------------------------------------- records, locks, services, settings


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        pytest.param(None, None, id="absent"),
        pytest.param(
            '{"digest": "d", "reason": "r", "since": "s"}', {"digest": "d", "reason": "r", "since": "s"}, id="pin"
        ),
        pytest.param("[]", {"error": "/var/lib/bringup/pin.json: wanted a JSON object"}, id="no object"),
    ],
)
def test_a_record(tmp_path: Path, lay: Lay, text: str | None, wanted: object) -> None:
    if text is not None:
        lay({"/var/lib/bringup/pin.json": text})
    assert look(tmp_path, "pin") == wanted


def test_locks(tmp_path: Path, lay: Lay) -> None:
    lay(
        {
            "/var/lib/dpkg/lock-frontend": "",
            "/var/lib/apt/lists/lock": "",
            "/run/bringup/run.lock": '{"run": "r1", "who": "x@y"}',
            "/run/bringup/work.lock": "not json",
        }
    )
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl,sys; f=open(sys.argv[1],'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('held',flush=True);"
            "sys.stdin.read()",
            tmp_path / "var/lib/dpkg/lock-frontend",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        with (tmp_path / "run/bringup/run.lock").open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            found = look(tmp_path, "locks")
    finally:
        holder.communicate()
    assert list(found["apt"]) == ["/var/lib/dpkg/lock-frontend"]
    assert found["apt"]["/var/lib/dpkg/lock-frontend"]["pid"] == holder.pid
    assert found["run"] == {"holder_pid": os.getpid(), "note": {"run": "r1", "who": "x@y"}}
    assert found["work"] == {"holder_pid": None, "note": None}
    assert found["reservation"] is None


UNITS = """\
Id=nvidia-persistenced.service
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled
NeedDaemonReload=no
MainPID=77

Id=nvidia-fabricmanager.service
LoadState=not-found
ActiveState=inactive
SubState=dead
UnitFileState=
NeedDaemonReload=no
MainPID=0"""


def test_services(tmp_path: Path, lay: Lay) -> None:
    lay({"/run/systemd/system/x": ""}, programs={"/usr/bin/systemctl": program(UNITS)})
    found = look(tmp_path, "services")
    assert found["nvidia-persistenced.service"] == {
        "load": "loaded",
        "active": "active",
        "sub": "running",
        "enabled": "enabled",
        "needs_reload": False,
        "main_pid": 77,
    }
    assert found["nvidia-fabricmanager.service"]["load"] == "not-found"
    assert found["nvidia-fabricmanager.service"]["main_pid"] is None


def test_services_without_systemd_are_an_error(tmp_path: Path) -> None:
    assert look(tmp_path, "services") == {"error": "systemd is not running"}


@pytest.mark.parametrize(
    ("path", "text", "wanted"),
    [
        ("/etc/environment", 'LD_LIBRARY_PATH="/usr/local/cuda/lib64"', ("LD_LIBRARY_PATH", "/usr/local/cuda/lib64")),
        ("/etc/profile.d/cuda.sh", "export CUDA_HOME=/usr/local/cuda  # x", ("CUDA_HOME", "/usr/local/cuda")),
        (
            "/etc/systemd/system/x.service.d/a.conf",
            '[Service]\nEnvironment="NCCL_DEBUG=INFO"',
            ("NCCL_DEBUG", "INFO"),
        ),
        ("/etc/nccl.conf", "NCCL_SOCKET_IFNAME=eth9", ("NCCL_SOCKET_IFNAME", "eth9")),
        ("/etc/security/pam_env.conf", "CUDA_PATH DEFAULT=/opt/cuda", ("CUDA_PATH", "/opt/cuda")),
        (
            "/home/svc/.bashrc",
            "if x; then export FLASHINFER_DISABLE_VERSION_CHECK=1; fi",
            ("FLASHINFER_DISABLE_VERSION_CHECK", "1"),
        ),
        ("/root/.bashrc", "export UV_INDEX_URL=https://u:p@h/", ("UV_INDEX_URL", None)),
    ],
    ids=["environment", "profile.d", "unit", "nccl.conf", "pam_env", "bashrc", "a value that may be secret"],
)
def test_env_files(tmp_path: Path, lay: Lay, path: str, text: str, wanted: tuple[str, str | None]) -> None:
    lay({path: f"# LD_PRELOAD=/no\nPATH=/bin\n{text}\n"})
    (found,) = look(tmp_path, "env_files")
    assert (found["file"], found["name"], found["value"]) == (path, *wanted)


def test_files(tmp_path: Path, lay: Lay) -> None:
    lay({"/opt/bringup/bin/run": "#!/bin/sh\n", "/etc/motd": ""})
    found = look(tmp_path, "files", files=["/etc/motd"])
    # sha256sum of the ten bytes above, and of nothing.
    assert found["/opt/bringup/bin/run"]["sha256"][:12] == "a8076d3d28d2"
    assert found["/etc/motd"]["sha256"][:12] == "e3b0c44298fc"
    assert found["/opt/bringup/bin/run"]["size_bytes"] == 10
    assert found["/etc/bringup/service.env"] is None


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, "absent"),
        ({"/run/cloud-init/status.json": "{}"}, "running"),
        ({"/run/cloud-init/status.json": "{}", "/run/cloud-init/result.json": "{}"}, "done"),
        ({"/etc/cloud/cloud-init.disabled": ""}, "disabled"),
    ],
    ids=["absent", "running", "done", "disabled"],
)
def test_cloud_init(tmp_path: Path, lay: Lay, files: dict[str, str], wanted: str) -> None:
    lay(files)
    assert look(tmp_path, "cloud_init") == {"state": wanted}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, []),
        ('{"schema": 1, "simulated": ["gpu", "driver", "wheels"]}', ["gpu", "driver", "wheels"]),
        ('{"simulated": "gpu"}', {"error": "/etc/bringup-lab.json: wanted a list under simulated"}),
    ],
    ids=["a real host", "a rehearsal host", "spoiled"],
)
def test_simulated(tmp_path: Path, lay: Lay, text: str | None, wanted: object) -> None:
    if text is not None:
        lay({"/etc/bringup-lab.json": text})
    assert look(tmp_path, "simulated") == wanted


def test_space_of_a_directory_that_is_not_there_is_its_parents(tmp_path: Path, lay: Lay) -> None:
    lay({"/opt/x": ""})
    found = look(tmp_path, "space", space=["/srv/models/big"])
    assert found["/srv/models/big"]["exists"] is False
    assert found["/srv/models/big"]["device"] == tmp_path.stat().st_dev
    assert found["/opt/bringup"]["free_bytes"] > 0


def test_python(tmp_path: Path, lay: Lay) -> None:
    lay(
        {"/usr/include/python3.11/Python.h": "", "/usr/lib/python3.12/ensurepip/__init__.py": ""},
        programs={"/usr/bin/python3.11": "", "/usr/local/bin/python3.12": "", "/usr/bin/python3.12-config": ""},
    )
    assert look(tmp_path, "python")["interpreters"] == {
        "3.11": {"path": "/usr/bin/python3.11", "has_headers": True, "has_ensurepip": False},
        "3.12": {"path": "/usr/local/bin/python3.12", "has_headers": False, "has_ensurepip": True},
    }
