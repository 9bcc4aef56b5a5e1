"""Host descriptions, and the two scripts that answer from them, run against a directory that stands for a host."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from bringup import paths
from bringup.errors import InputError
from bringup.lab import silicon
from bringup.lab.silicon import HostDescription

SCRIPTS = paths.files() / "lab"
EIGHT = "8x NVIDIA RTX PRO 6000 Blackwell Server Edition"
LIBRARIES = "usr/lib/x86_64-linux-gnu"


def described(gpus: str = EIGHT, **changes: object) -> HostDescription:
    return silicon.describe(gpus, host="gpu-01").model_copy(update=changes)


def lost(gpus: str, index: int) -> HostDescription:
    found = silicon.describe(gpus, host="gpu-01")
    changed = tuple(gpu.model_copy(update={"is_lost": True}) if gpu.index == index else gpu for gpu in found.gpus)
    return found.model_copy(update={"gpus": changed})


def lay_module(root: Path, license_text: str, *, version: str = "580.95.05", signed: bool = False) -> None:
    module = root / "lib/modules" / os.uname().release / "updates/dkms/nvidia.ko"
    module.parent.mkdir(parents=True)
    info = f"\0license={license_text}\0version={version}\0".encode()
    module.write_bytes(b"\x7fELF" + info + (b"~Module signature appended~\n" if signed else b""))


def script(name: str, root: Path) -> ModuleType:
    """Load a host script as it runs on a host whose root is ``root``."""
    spec = importlib.util.spec_from_file_location(f"lab_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = os.environ.get("BRINGUP_LAB_ROOT")
    os.environ["BRINGUP_LAB_ROOT"] = str(root)
    try:
        spec.loader.exec_module(module)
    finally:
        if before is None:
            del os.environ["BRINGUP_LAB_ROOT"]
        else:
            os.environ["BRINGUP_LAB_ROOT"] = before
    return module


def boot(root: Path, description: HostDescription) -> None:
    silicon.install(root, description)
    script("silicon", root).main()
    # What the unit mounts over the host's own tree, the test lays where the scripts look for it.
    for name in ("sys", "proc"):
        laid = root / "run/bringup-lab" / name
        if not (root / name).exists() and laid.exists():
            (root / name).symlink_to(laid)


def install_library(root: Path, version: str) -> None:
    directory = root / LIBRARIES
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"libnvidia-ml.so.{version}").touch()
    link = directory / "libnvidia-ml.so.1"
    link.unlink(missing_ok=True)
    link.symlink_to(f"libnvidia-ml.so.{version}")
    release = root / "usr/share/bringup-lab/nvidia-smi.json"
    release.parent.mkdir(parents=True, exist_ok=True)
    release.write_text('{"version": "580.95.05", "cuda": "13.0"}')


def nvidia_smi(root: Path, *arguments: str) -> tuple[int, str]:
    """Return exit code and output of nvidia-smi on the host."""
    out = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out):
        try:
            script("nvidia_smi", root).main(list(arguments))
        except SystemExit as stopped:
            code = int(str(stopped.code))
    return code, out.getvalue()


def running_host(root: Path, description: HostDescription) -> Path:
    lay_module(root, "Dual MIT/GPL")
    boot(root, description)
    install_library(root, "580.95.05")
    return root


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the root of a booted host with the driver loaded; one per kind, for tests that only ask."""

    @cache
    def make(gpus: str) -> Path:
        return running_host(tmp_path_factory.mktemp("host"), described(gpus))

    return make


@pytest.mark.parametrize(
    ("text", "title"),
    [
        pytest.param("8x NVIDIA H200", "8x NVIDIA H200", id="count and name"),
        pytest.param("2 x h200", "2x NVIDIA H200", id="spaces, short, lower case"),
        pytest.param("NVIDIA B200", "1x NVIDIA B200", id="no count"),
        pytest.param(
            "8x RTX PRO 6000 Blackwell Server Edition",
            "8x NVIDIA RTX PRO 6000 Blackwell Server Edition",
            id="without the vendor",
        ),
    ],
)
def test_describe(text: str, title: str) -> None:
    assert silicon.describe(text, host="gpu-01").title == title


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("8x Voodoo 2", "no such GPU model: '8x Voodoo 2'", id="unknown model"),
        pytest.param("9x NVIDIA H200", "9 GPUs in one host", id="too many"),
        pytest.param("0x NVIDIA H200", "0 GPUs in one host", id="none"),
        pytest.param("", "no such GPU model: ''", id="empty"),
    ],
)
def test_describe_refuses(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        silicon.describe(text, host="gpu-01")
    assert caught.value.what == message


def test_identities_differ_between_hosts_and_last() -> None:
    one, again, other = (silicon.describe("8x NVIDIA H200", host=name) for name in ("gpu-01", "gpu-01", "gpu-02"))
    assert one == again
    assert len({gpu.uuid for each in (one, other) for gpu in each.gpus}) == 16
    assert silicon.parse(one.as_json()) == one


def test_install_is_readable_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        silicon.install(tmp_path, described())
    finally:
        os.umask(before)
    modes = {
        name: oct((tmp_path / name).stat().st_mode & 0o777)
        for name in ("etc/bringup-lab.json", "usr/lib/bringup-lab/host.json", "usr/lib/bringup-lab/silicon.py")
    }
    assert modes == {
        "etc/bringup-lab.json": "0o644",
        "usr/lib/bringup-lab/host.json": "0o644",
        "usr/lib/bringup-lab/silicon.py": "0o755",
    }
    assert (tmp_path / "usr/lib/bringup-lab").stat().st_mode & 0o777 == 0o755
    assert json.loads((tmp_path / "etc/bringup-lab.json").read_text()) == {
        "schema": 1,
        "simulated": ["gpu", "driver", "wheels"],
    }
    link = tmp_path / "etc/systemd/system/sysinit.target.wants/bringup-lab-silicon.service"
    assert link.resolve() == tmp_path / "etc/systemd/system/bringup-lab-silicon.service"


def test_unit_is_done_before_anything_reads() -> None:
    text = (SCRIPTS / silicon.UNIT).read_text()
    assert "Before=systemd-journald.service systemd-modules-load.service sysinit.target\n" in text
    assert "WantedBy=sysinit.target\n" in text


@pytest.mark.parametrize(
    ("license_text", "is_signed", "secure_boot", "loaded"),
    [
        pytest.param(None, False, None, {"version": None, "flavour": None}, id="nothing built"),
        pytest.param("Dual MIT/GPL", False, None, {"version": "580.95.05", "flavour": "open"}, id="open"),
        pytest.param("NVIDIA", False, None, {"version": "580.95.05", "flavour": "closed"}, id="closed"),
        pytest.param("Dual MIT/GPL", False, False, {"version": "580.95.05", "flavour": "open"}, id="EFI, no lock"),
        pytest.param("Dual MIT/GPL", False, True, {"version": None, "flavour": None}, id="Secure Boot refuses"),
        pytest.param("Dual MIT/GPL", True, True, {"version": "580.95.05", "flavour": "open"}, id="Secure Boot accepts"),
    ],
)
def test_loaded_driver(
    tmp_path: Path, license_text: str | None, is_signed: bool, secure_boot: bool | None, loaded: dict[str, str]
) -> None:
    if license_text:
        lay_module(tmp_path, license_text, signed=is_signed)
    boot(tmp_path, described("1x NVIDIA L40S", is_secure_boot=secure_boot))
    found = json.loads((tmp_path / "run/bringup-lab/loaded.json").read_text())
    assert {key: found[key] for key in ("version", "flavour")} == loaded
    version = tmp_path / "sys/module/nvidia/version"
    assert (version.read_text().strip() if version.exists() else None) == loaded["version"]


@pytest.mark.parametrize(
    ("license_text", "line"),
    [
        pytest.param(
            "Dual MIT/GPL",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (bringup-lab)  ",
            id="open",
        ),
        pytest.param(
            "NVIDIA",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Release Build  (bringup-lab)",
            id="closed",
        ),
    ],
)
def test_proc_driver_version(tmp_path: Path, license_text: str, line: str) -> None:
    lay_module(tmp_path, license_text)
    boot(tmp_path, described("1x NVIDIA L40S"))
    assert (tmp_path / "proc/driver/nvidia/version").read_text().splitlines()[0] == line


def test_a_driver_built_later_counts_at_the_next_boot(tmp_path: Path) -> None:
    boot(tmp_path, described("1x NVIDIA L40S"))
    lay_module(tmp_path, "Dual MIT/GPL")
    boot(tmp_path, described("1x NVIDIA L40S"))
    assert json.loads((tmp_path / "run/bringup-lab/loaded.json").read_text())["version"] is None


def test_pci_devices(tmp_path: Path) -> None:
    lay_module(tmp_path, "Dual MIT/GPL")
    boot(tmp_path, described("8x NVIDIA H200"))
    devices = tmp_path / "sys/bus/pci/devices"
    found = {
        (entry.name, (entry / "vendor").read_text().strip(), (entry / "device").read_text().strip())
        for entry in devices.iterdir()
        if (entry / "vendor").read_text() == "0x10de\n"
    }
    gpus = {(f"0000:{bus}:00.0", "0x10de", "0x2335") for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df")}
    switches = {(f"0000:a{number}:00.0", "0x10de", "0x22a3") for number in range(4)}
    assert found == gpus | switches
    gpu = devices / "0000:1b:00.0"
    assert gpu.resolve().parent.name == "0000:00:01.1"
    assert (gpu / "driver").readlink() == Path("/sys/bus/pci/drivers/nvidia")
    assert struct.unpack_from("<HH", (gpu / "config").read_bytes()) == (0x10DE, 0x2335)


@pytest.mark.parametrize(
    ("has_acs", "control"),
    [pytest.param(True, 0x1D, id="redirects peers"), pytest.param(False, 0x11, id="healthy")],
)
def test_bridges_show_access_control(tmp_path: Path, has_acs: bool, control: int) -> None:
    boot(tmp_path, described("1x NVIDIA L40S", has_acs=has_acs))
    config = (tmp_path / "sys/bus/pci/devices/0000:00:01.1/config").read_bytes()
    capability, _, found = struct.unpack_from("<IHH", config, 0x100)
    assert (capability & 0xFFFF, found) == (0x000D, control)


def test_fabric_adapters_and_modules(tmp_path: Path) -> None:
    (tmp_path / "etc/modules-load.d").mkdir(parents=True)
    (tmp_path / "etc/modules-load.d/fabric.conf").write_text("ib_umad\nsnd-dummy\n")
    boot(tmp_path, described("8x NVIDIA B200"))
    assert b"SW_MNG" in (tmp_path / "sys/class/infiniband/mlx5_0/device/vpd").read_bytes()
    assert (tmp_path / "sys/module/ib_umad").is_dir()
    assert not (tmp_path / "sys/module/snd_dummy").exists()


@pytest.mark.parametrize(
    ("secure_boot", "byte"),
    [pytest.param(True, 1, id="on"), pytest.param(False, 0, id="off")],
)
def test_secure_boot_variable(tmp_path: Path, secure_boot: bool, byte: int) -> None:
    boot(tmp_path, described("1x NVIDIA L40S", is_secure_boot=secure_boot))
    (variable,) = (tmp_path / "sys/firmware/efi/efivars").iterdir()
    assert variable.read_bytes()[4] == byte


def test_lost_gpu_is_gone_from_the_bus(tmp_path: Path) -> None:
    boot(tmp_path, lost("8x NVIDIA H200", 4))
    names = {entry.name for entry in (tmp_path / "sys/bus/pci/devices").iterdir()}
    assert "0000:9d:00.0" not in names
    assert "0000:1b:00.0" in names


@pytest.mark.parametrize(
    ("library", "license_text", "description", "code", "message"),
    [
        pytest.param(
            None,
            "Dual MIT/GPL",
            described(),
            12,
            "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA"
            " Display Driver is properly installed and present in your system.\n",
            id="no library",
        ),
        pytest.param(
            "580.95.05",
            None,
            described(),
            9,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the"
            " latest NVIDIA driver is installed and running.\n",
            id="no driver",
        ),
        pytest.param(
            "580.159.04",
            "Dual MIT/GPL",
            described(),
            18,
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.159\n",
            id="upgraded, not booted",
        ),
        pytest.param("580.95.05", "NVIDIA", described(), 6, "No devices were found\n", id="closed on Blackwell"),
        pytest.param(
            "580.95.05",
            "Dual MIT/GPL",
            lost("8x NVIDIA H200", 4),
            255,
            "Unable to determine the device handle for GPU0000:9D:00.0: Unknown Error\n",
            id="fallen off the bus",
        ),
    ],
)
def test_nvidia_smi_refuses(
    tmp_path: Path,
    library: str | None,
    license_text: str | None,
    description: HostDescription,
    code: int,
    message: str,
) -> None:
    if license_text:
        lay_module(tmp_path, license_text)
    boot(tmp_path, description)
    if library:
        install_library(tmp_path, library)
    assert nvidia_smi(tmp_path, "-L") == (code, message)


def test_closed_modules_drive_hopper(tmp_path: Path) -> None:
    lay_module(tmp_path, "NVIDIA")
    boot(tmp_path, described("2x NVIDIA H200"))
    install_library(tmp_path, "580.95.05")
    assert nvidia_smi(tmp_path, "-L")[0] == 0


@pytest.mark.parametrize(
    ("options", "first"),
    [
        pytest.param(
            ["--format=csv,noheader,nounits"],
            "0, NVIDIA RTX PRO 6000 Blackwell Server Edition, 580.95.05, 00000000:01:00.0, 5, 16, 600.00",
            id="bare",
        ),
        pytest.param(
            ["--format=csv,noheader"],
            "0, NVIDIA RTX PRO 6000 Blackwell Server Edition, 580.95.05, 00000000:01:00.0, 5, 16, 600.00 W",
            id="units",
        ),
        pytest.param(
            ["--format=csv"],
            "index, name, driver_version, pci.bus_id, pcie.link.gen.current, pcie.link.width.current, power.limit [W]",
            id="header",
        ),
        pytest.param(
            ["--format=csv,noheader,nounits", "-i", "7"],
            "7, NVIDIA RTX PRO 6000 Blackwell Server Edition, 580.95.05, 00000000:F1:00.0, 5, 16, 600.00",
            id="one GPU",
        ),
    ],
)
def test_query_gpu(host: Callable[[str], Path], options: list[str], first: str) -> None:
    root = host(EIGHT)
    names = "index,name,driver_version,pci.bus_id,pcie.link.gen.current,pcie.link.width.current,power.limit"
    code, out = nvidia_smi(root, f"--query-gpu={names}", *options)
    assert (code, out.splitlines()[0]) == (0, first)


def test_query_gpu_refuses_a_field_it_does_not_know(host: Callable[[str], Path]) -> None:
    root = host(EIGHT)
    found = nvidia_smi(root, "--query-gpu=index,colour", "--format=csv")
    assert found == (2, 'Field "colour" is not a valid field to query.\n\n')


def test_compute_apps_are_those_that_hold_a_device(host: Callable[[str], Path]) -> None:
    root = host(EIGHT)
    query = ("--query-compute-apps=pid,name,used_memory", "--format=csv")
    assert nvidia_smi(root, *query) == (0, "pid, process_name, used_gpu_memory [MiB]\n")
    with (root / "dev/nvidia3").open() as device:
        holder = subprocess.Popen(["sleep", "60"], stdin=device)
    try:
        assert nvidia_smi(root, *query)[1].splitlines()[1] == f"{holder.pid}, sleep, 512 MiB"
        assert nvidia_smi(root, "--query-gpu=memory.used", "--format=csv,noheader,nounits")[1].split() == (
            ["0"] * 3 + ["512"] + ["0"] * 4
        )
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize(
    ("gpus", "row"),
    [
        pytest.param(
            "8x NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "GPU0\t X \tNODE\tNODE\tNODE\tSYS\tSYS\tSYS\tSYS\t0-63,128-191\t0\t\tN/A",
            id="PCIe",
        ),
        pytest.param("2x NVIDIA H200", "GPU0\t X \tNV18\t0-63,128-191\t0\t\tN/A", id="NVLink"),
    ],
)
def test_topology(host: Callable[[str], Path], gpus: str, row: str) -> None:
    root = host(gpus)
    lines = nvidia_smi(root, "topo", "-m")[1].splitlines()
    assert lines[0].startswith("\t\x1b[4mGPU0\t")
    assert lines[0].endswith("\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m")
    assert lines[1] == row


@pytest.mark.parametrize(
    ("gpus", "kind", "row"),
    [
        pytest.param("2x NVIDIA H200", "r", " GPU0\tX\tOK\t", id="NVLink reads"),
        pytest.param("2x NVIDIA H200", "p", " GPU0\tX\tNS\t", id="NVLink, not over PCIe"),
        pytest.param("2x NVIDIA L40S", "n", " GPU0\tX\tNS\t", id="no NVLink"),
        pytest.param("2x NVIDIA L40S", "p", " GPU0\tX\tOK\t", id="over PCIe"),
    ],
)
def test_p2p(host: Callable[[str], Path], gpus: str, kind: str, row: str) -> None:
    root = host(gpus)
    assert nvidia_smi(root, "topo", "-p2p", kind)[1].splitlines()[1] == row


@pytest.mark.parametrize(
    ("gpus", "lines"),
    [
        pytest.param("1x NVIDIA H200", 19, id="18 links"),
        pytest.param("1x NVIDIA L40S", 0, id="none"),
    ],
)
def test_nvlink_status(host: Callable[[str], Path], gpus: str, lines: int) -> None:
    found = nvidia_smi(host(gpus), "nvlink", "-s")[1].splitlines()
    assert len(found) == lines
    assert found[1:2] == (["\t Link 0: 26.562 GB/s"] if lines else [])


@pytest.mark.parametrize(
    ("is_running", "state", "status"),
    [pytest.param(True, "Completed", "Success", id="runs"), pytest.param(False, "In Progress", "N/A", id="does not")],
)
def test_fabric_follows_the_manager(tmp_path: Path, is_running: bool, state: str, status: str) -> None:
    root = running_host(tmp_path, described("2x NVIDIA H200"))
    if is_running:
        pid_file = root / "run/nvidia-fabricmanager/nv-fabricmanager.pid"
        pid_file.parent.mkdir()
        pid_file.write_text(f"{os.getpid()}\n")
    out = nvidia_smi(root, "--query-gpu=fabric.state,fabric.status", "--format=csv,noheader")[1]
    assert out.splitlines() == [f"{state}, {status}"] * 2


@pytest.mark.parametrize(
    "line",
    [
        "Driver Version                                         : 580.95.05",
        "Attached GPUs                                          : 2",
        "GPU 00000000:1B:00.0",
        "    Product Name                                       : NVIDIA H200",
        "        Current                                        : Disabled",
        "                Max                                    : 5",
        "            HW Thermal Slowdown                        : Not Active",
        "        Remapping Failure Occurred                     : No",
    ],
)
def test_query_text_is_laid_out_as_the_real_one(host: Callable[[str], Path], line: str) -> None:
    assert line in nvidia_smi(host("2x NVIDIA H200"), "-q")[1].splitlines()


def test_display_filter(host: Callable[[str], Path]) -> None:
    out = nvidia_smi(host("1x NVIDIA H200"), "-q", "-d", "ROW_REMAPPER,ECC")[1]
    sections = [line.strip() for line in out.splitlines() if line.startswith("    ") and line[4] != " "]
    assert sections == ["ECC Mode", "ECC Errors", "Remapped Rows"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("driver_version", "580.95.05"),
        ("attached_gpus", "2"),
        ("gpu/product_name", "NVIDIA H200"),
        ("gpu/pci/pci_bus", "1B"),
        ("gpu/pci/pci_device_id", "233510DE"),
        ("gpu/fb_memory_usage/total", "143771 MiB"),
        ("gpu/fabric/state", "In Progress"),
        ("gpu/remapped_rows/remapped_row_pending", "No"),
    ],
)
def test_query_xml(host: Callable[[str], Path], path: str, text: str) -> None:
    out = nvidia_smi(host("2x NVIDIA H200"), "-q", "-x")[1]
    assert ElementTree.fromstring(out).findtext(path) == text


def test_table_rows_are_as_wide_as_their_frame(host: Callable[[str], Path]) -> None:
    lines = nvidia_smi(host(EIGHT))[1].splitlines()
    assert {len(line) for line in lines if line.startswith(("|", "+"))} == {91}


def test_programs_run_as_hosts_run_them(host: Callable[[str], Path]) -> None:
    environment = {**os.environ, "BRINGUP_LAB_ROOT": str(host("1x NVIDIA L40S"))}
    command = [sys.executable, "-I", str(SCRIPTS / "nvidia_smi.py"), "-L"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("GPU 0: NVIDIA L40S (UUID: GPU-")
    for name in ("nvidia_smi.py", "silicon.py"):
        assert (SCRIPTS / name).read_text().startswith("#!/usr/bin/python3\n")
