"""Describe a machine's GPUs and lay the description into a lab host, where simulated silicon answers from it."""

from __future__ import annotations

import json
import platform
import re
import tomllib
import uuid
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bringup import paths
from bringup.errors import InputError, LabError

MARKER = Path("etc/bringup-lab.json")
"""The file that says what is simulated; three behaviours of bringup depend on it and nothing else reads it."""

DESCRIPTION = Path("usr/lib/bringup-lab/host.json")
EARLY_SCRIPT = Path("usr/lib/bringup-lab/silicon.py")
UNIT = "bringup-lab-silicon.service"

SIMULATED = ("gpu", "driver", "wheels")

_REQUEST = re.compile(r"(?:(\d+)\s*x\s+)?(\S.*)")
_NAMESPACE = uuid.UUID("5f7dbb3e-2a0b-5c0a-9a0e-6f1d0c7f2b11")

CpuList = Annotated[str, Field(pattern=r"\d+(-\d+)?(,\d+(-\d+)?)*")]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GpuModel(_Model):
    """One GPU model as the driver reports it: a row of ``data/lab/gpus.toml``."""

    name: str
    architecture: str
    compute_capability: str
    pci_device: str
    pci_subsystem: str
    part_number: str
    board_part_number: str
    inforom: str
    vbios: str
    memory_mib: int
    reserved_mib: int
    bar1_mib: int
    power_limit_w: int
    power_minimum_w: int
    idle_power_w: float
    max_sm_mhz: int
    max_memory_mhz: int
    remap_banks: int
    links: int
    link_gb_per_s: float
    fabric: Literal["none", "nvswitch", "nvlink5"]
    nvswitches: int = 0
    closed_modules: bool
    buses: tuple[str, ...]
    source: str


class Gpu(_Model):
    """One GPU of a described machine. ``bus_id`` is in sysfs form (``0000:01:00.0``).

    ``is_lost`` means the GPU has fallen off the bus; ``has_nvlink`` False that its links did not train;
    ``uncorrectable_errors`` counts aggregate DRAM errors.
    """

    index: int
    bus_id: str
    bridge_id: str
    uuid: str
    serial: str
    numa_node: int
    cpus: CpuList
    is_lost: bool = False
    has_nvlink: bool = True
    is_mig: bool = False
    is_remap_pending: bool = False
    has_remap_failed: bool = False
    uncorrectable_errors: int = 0


class HostDescription(_Model):
    """What the simulated silicon of one lab host answers from.

    ``kernel_compiler`` None means the one that the host's distribution builds its kernels with;
    ``is_secure_boot`` None means a machine without EFI. ``loadable_modules`` are those the machine's kernel
    would have besides NVIDIA's; the early unit loads the ones that ``modules-load.d`` names. ``has_acs``
    says whether the bridges above the GPUs redirect peer traffic (bad for P2P).
    """

    schema_: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    model: GpuModel
    gpus: tuple[Gpu, ...]
    kernel_command_line: str = "BOOT_IMAGE=/boot/vmlinuz root=/dev/nvme0n1p2 ro quiet"
    kernel_compiler: str | None = None
    is_secure_boot: bool | None = None
    has_iommu: bool = False
    has_acs: bool = False
    loadable_modules: tuple[str, ...] = ()
    subnet_managers: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Return the short form a person writes: ``8x NVIDIA H200``."""
        return f"{len(self.gpus)}x {self.model.name}"

    def as_json(self) -> str:
        """Return the JSON text of ``host.json``."""
        return json.dumps(self.model_dump(by_alias=True), indent=1) + "\n"


@cache
def models() -> tuple[GpuModel, ...]:
    """Return every GPU model that a lab host can describe."""
    text = (paths.data() / "lab" / "gpus.toml").read_text()
    return tuple(GpuModel.model_validate(row) for row in tomllib.loads(text)["model"])


def describe(gpus: str, *, host: str) -> HostDescription:
    """Return the description of a machine with ``gpus`` such as ``8x NVIDIA H200``.

    UUIDs and serial numbers follow from the host's name, so a host keeps them over a reset and two hosts
    differ. Raises InputError for a model that is not in the table or a count it cannot hold.
    """
    found = _REQUEST.fullmatch(gpus.strip())
    name = found[2].strip() if found else ""
    matching = [model for model in models() if name.casefold() in (model.name, *_short(model.name))]
    if not matching:
        raise InputError(
            f"no such GPU model: {gpus!r}",
            hint="wanted COUNTx MODEL, where MODEL is one of " + ", ".join(model.name for model in models()),
        )
    model = matching[0]
    count = int(found[1]) if found and found[1] else 1
    if not 1 <= count <= len(model.buses):
        raise InputError(f"{count} GPUs in one host", hint=f"wanted 1 to {len(model.buses)}")
    return HostDescription(
        model=model,
        gpus=tuple(_gpu(model, index, host) for index in range(count)),
        loadable_modules=("ib_umad", "mlx5_core", "mlx5_ib") if model.fabric == "nvlink5" else (),
        subnet_managers=("mlx5_0", "mlx5_1") if model.fabric == "nvlink5" else (),
    )


def parse(text: str) -> HostDescription:
    """Return the description that ``host.json`` holds; raises LabError when it is not one."""
    try:
        return HostDescription.model_validate_json(text)
    except ValidationError as error:
        raise LabError("host description cannot be read", why=str(error)) from None


def install(rootfs: Path, description: HostDescription) -> None:
    """Lay the description, the marker and the early unit into ``rootfs``; nothing of it needs the driver.

    The unit is enabled. At every boot it decides which driver counts as loaded, and mounts the described
    ``/sys/module``, ``/sys/bus``, ``/sys/class``, ``/proc/driver``, ``/proc/version`` and ``/proc/cmdline``
    over the machine's. Also lays the lists that a kernel package would leave for the running kernel, which
    depmod and dkms read.
    """
    describe_again(rootfs, description)
    _write(rootfs / MARKER, json.dumps({"schema": 1, "simulated": list(SIMULATED)}) + "\n")
    source = paths.files() / "lab"
    _write(rootfs / EARLY_SCRIPT, (source / "silicon.py").read_text(), mode=0o755)
    units = Path("etc/systemd/system")
    _write(rootfs / units / UNIT, (source / UNIT).read_text())
    link = rootfs / units / "sysinit.target.wants" / UNIT
    _directory(link.parent)
    link.unlink(missing_ok=True)
    link.symlink_to(f"../{UNIT}")
    modules = rootfs / "usr/lib/modules" / platform.release()
    # dkms of Debian 13 takes a kernel without modules.dep for one that was removed, and runs no depmod for it.
    for name in ("modules.dep", "modules.order", "modules.builtin", "modules.builtin.modinfo"):
        _write(modules / name, "")


def describe_again(rootfs: Path, description: HostDescription) -> None:
    """Replace the description in ``rootfs``; a running host notices at its next boot, nvidia-smi at once."""
    _write(rootfs / DESCRIPTION, description.as_json())


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file of the host: whole or not at all, and readable there whatever the umask here."""
    _directory(path.parent)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    fresh.chmod(mode)
    fresh.replace(path)


def _directory(path: Path) -> None:
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        each.mkdir()
        each.chmod(0o755)


def _short(name: str) -> tuple[str, ...]:
    """Return the ways a person may write a model: in any case, and without the vendor."""
    folded = name.casefold()
    return (folded, folded.removeprefix("nvidia "))


def _gpu(model: GpuModel, index: int, host: str) -> Gpu:
    node = 0 if index < len(model.buses) // 2 else 1
    identity = uuid.uuid5(_NAMESPACE, f"{host}/{model.name}/{index}")
    return Gpu(
        index=index,
        bus_id=f"0000:{model.buses[index]}:00.0",
        bridge_id=f"0000:00:{index + 1:02x}.1",
        uuid=f"GPU-{identity}",
        serial=f"{identity.int % 10**13:013d}",
        numa_node=node,
        cpus=("0-63,128-191", "64-127,192-255")[node],
    )
