"""Judge the health of GPUs, links and host just before anything is timed: what would make a figure worthless.

The answer is the section ``health`` of ``files/stack_check.py``, with ``settings`` beside it. A part that could
not be looked at is named and never taken as good.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from bringup import paths
from bringup.cpu_list import cpus
from bringup.errors import HostError
from bringup.finding import Finding, Severity
from bringup.host_state import Unknown


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


def _unknown(value: object) -> object:
    """Turn ``{"error": ...}`` into an Unknown, and leave everything else to the type beside it."""
    return Unknown(error=str(value["error"])) if isinstance(value, dict) and set(value) == {"error"} else value


Maybe = BeforeValidator(_unknown)


class GpuProcess(_Model):
    """A process that uses a GPU."""

    pid: int | None = None
    name: str = ""


class GpuHealth(_Model):
    """One GPU as nvidia-smi describes it. None: the driver does not tell."""

    index: int
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    mig: str | None = None
    persistence: str | None = None
    recovery_action: str | None = None
    ecc: str | None = None
    ecc_errors: Mapping[str, int] = Field(default_factory=dict)
    remapped_pending: str | None = None
    remapped_failure: str | None = None
    retired_pending: str | None = None
    fabric_state: str | None = None
    fabric_status: str | None = None
    clock_event_reasons: tuple[str, ...] = ()
    pcie_replays: int | None = None
    processes: tuple[GpuProcess, ...] = ()

    @property
    def label(self) -> str:
        """Return how a person finds this GPU."""
        return f"GPU {self.index} ({self.uuid or self.pci_bus_id or 'no UUID'})"


class NvlinkStatus(_Model):
    """The NVLinks of one GPU."""

    index: int
    active_links: int
    inactive_links: tuple[int, ...] = ()
    link_gb_per_s: tuple[float, ...] = ()


class TopologyMatrix(_Model):
    """A matrix of nvidia-smi: names, and one row of cells a GPU."""

    gpus: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class XidEvent(_Model):
    """An Xid in the kernel log; ``xid`` None: the log says that the GPU fell off the bus, without a number."""

    xid: int | None
    pci_bus_id: str
    line: str = ""


class Xids(_Model):
    """All Xids since boot, and where they were read."""

    source: str
    events: tuple[XidEvent, ...] = ()


class Unit(_Model):
    """The state of a systemd unit."""

    active: str | None = None
    sub: str | None = None
    enabled: str | None = None
    result: str | None = None


class Acs(_Model):
    """What a PCI bridge does with what devices below it send each other."""

    request_redirect: bool
    completion_redirect: bool


class Bridge(_Model):
    """A PCI bridge above a GPU; ``acs`` None: it has none."""

    pci_bus_id: str
    acs: Annotated[Acs | Unknown | None, Maybe] = None


class PciPlace(_Model):
    """Where a GPU sits on the bus. ``numa_node`` -1 or None, ``local_cpus`` None: the platform does not tell."""

    pci_bus_id: str
    numa_node: int | None = None
    local_cpus: str | None = None
    bridges: tuple[Bridge, ...] = ()
    aer: Mapping[str, int | None] = Field(default_factory=dict)


class Memlock(_Model):
    """How many bytes a process may lock in memory, by where it starts. None: without limit."""

    login: Annotated[int | Unknown | None, Maybe]
    systemd: Annotated[int | Unknown | None, Maybe]
    units: Mapping[str, Annotated[int | Unknown | None, Maybe]] = Field(default_factory=dict)


class RdmaPort(_Model):
    """A port of an RDMA device; ``state`` and ``link_layer`` as the kernel words them (ACTIVE, InfiniBand)."""

    device: str
    port: int
    state: str | None = None
    link_layer: str | None = None
    rate: str | None = None

    @property
    def label(self) -> str:
        """Return how NCCL and the kernel call this port."""
        return f"{self.device}:{self.port}"


class Host(_Model):
    """What of the host matters to GPUs that talk to each other.

    ``memlock`` and ``rdma`` None: an older script did not look. ``allowed_cpus`` None: the kernel did not say.
    """

    uptime_s: float
    shm_bytes: int
    shm_free_bytes: int
    shm_nccl_files: int = 0
    memlock: Annotated[Memlock | Unknown | None, Maybe] = None
    rdma: Annotated[tuple[RdmaPort, ...] | Unknown | None, Maybe] = None
    numa_nodes: int = 1
    allowed_cpus: str | None = None
    kernel_command_line: str | None = None
    iommu_units: tuple[str, ...] = ()


class Setting(_Model):
    """A variable set in a file."""

    name: str
    value: str
    file: str
    line: int


class Settings(_Model):
    """What a login shell and the usual files set."""

    login: Mapping[str, str] = Field(default_factory=dict)
    files: tuple[Setting, ...] = ()


class Health(_Model):
    """The whole section. Every part is a value or Unknown with the reason."""

    gpus: Annotated[tuple[GpuHealth, ...] | Unknown, Maybe]
    nvlink: Annotated[tuple[NvlinkStatus, ...] | Unknown, Maybe]
    nvlink_errors: Annotated[Mapping[str, Mapping[str, int]] | Unknown, Maybe]
    topology: Annotated[TopologyMatrix | Unknown, Maybe]
    p2p_read: Annotated[TopologyMatrix | Unknown, Maybe]
    p2p_write: Annotated[TopologyMatrix | Unknown, Maybe]
    xids: Annotated[Xids | Unknown, Maybe]
    units: Annotated[Mapping[str, Unit] | Unknown | None, Maybe] = None
    pci: Annotated[tuple[PciPlace, ...] | Unknown, Maybe]
    host: Annotated[Host | Unknown, Maybe]
    pci_nvidia_devices: Annotated[tuple[str, ...] | Unknown, Maybe]
    fabric_waited_s: float = 0.0


def parse(section: object) -> Health:
    """Return the typed section.

    Raises HostError naming the first place that is not as it must be.
    """
    try:
        return Health.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "health"
        raise HostError("the host's GPU health cannot be read", why=f"{place}: {first['msg']}") from error


class XidRow(BaseModel):
    """What one Xid number means."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    fatal: bool
    meaning: str
    remedy: str
    source: str = Field(min_length=10)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((paths.data() / "health.toml").read_text(encoding="utf-8"))


@cache
def _xid_rows() -> Mapping[int, XidRow]:
    return {row["number"]: XidRow.model_validate(row) for row in _data()["xid"]}


def _finding(code: str, severity: Severity, cause: str, remedy: str, **evidence: object) -> Finding:
    return Finding(code=code, severity=severity, cause=cause, remedy=remedy, evidence=evidence)


def findings(
    health: Health,
    *,
    settings: Settings | None = None,
    nvlinks: int | None = None,
    is_p2p_wanted: bool = True,
) -> tuple[Finding, ...]:
    """Return everything that speaks against measuring now, or that explains a bad figure afterwards.

    ``nvlinks``: how many links each GPU of this model has; 0 for a PCIe board. None when nobody knows: then a host
    on which no GPU has any link counts as one without, and the others are compared with each other.
    ``is_p2p_wanted``: whether PCIe GPUs are meant to reach each other directly.
    """
    if nvlinks is None and not _has_nvlink(health):
        nvlinks = 0
    found = [
        *unreadable(health),
        *missing_gpus(health),
        *busy(health),
        *modes(health),
        *memory(health),
        *xid_events(health),
        *fabric(health),
        *links(health, nvlinks),
        *peers(health, nvlinks, is_p2p_wanted),
        *redirection(health, nvlinks, is_p2p_wanted),
        *host(health),
        *locked_memory(health),
        *numa(health),
        *(suspicious(settings) if settings else ()),
    ]
    order = {"error": 0, "warning": 1, "info": 2}
    return tuple(sorted(found, key=lambda finding: order[finding.severity]))


def unreadable(health: Health) -> Iterator[Finding]:
    """Name every part that nobody could look at: unknown is not good."""
    for name in type(health).model_fields:
        value = getattr(health, name)
        if isinstance(value, Unknown):
            yield _finding(
                "BU-VFY-300",
                "error" if name == "gpus" else "warning",
                f"{name} could not be looked at: {value.error}",
                "run nvidia-smi -q as root on that host",
                part=name,
            )


def missing_gpus(health: Health) -> Iterator[Finding]:
    """Compare the PCI bus with what the driver lists: a GPU that fell off the bus is on the bus only."""
    if isinstance(health.gpus, Unknown) or isinstance(health.pci_nvidia_devices, Unknown):
        return
    listed = {_short(gpu.pci_bus_id) for gpu in health.gpus if gpu.pci_bus_id}
    absent = sorted(set(map(_short, health.pci_nvidia_devices)) - listed)
    if absent:
        yield _finding(
            "BU-VFY-301",
            "error",
            f"{len(absent)} of {len(health.pci_nvidia_devices)} GPUs on the PCI bus do not answer: {', '.join(absent)}",
            "look for Xid 79 in the kernel log; power the host off and on",
            wanted=len(health.pci_nvidia_devices),
            found=len(listed),
        )


def busy(health: Health) -> Iterator[Finding]:
    """Name the processes on the GPUs."""
    for gpu in _gpus(health):
        pids = [f"{process.pid} ({process.name or 'unnamed'})" for process in gpu.processes]
        if pids:
            yield _finding(
                "BU-VFY-303",
                "error",
                f"{gpu.label} is used by {', '.join(pids[:4])}",
                "drain the host; bringup ends nothing it did not start",
                pids=[process.pid for process in gpu.processes],
            )


def modes(health: Health) -> Iterator[Finding]:
    """Judge MIG, persistence and what holds the clocks down."""
    for gpu in _gpus(health):
        if gpu.mig == "Enabled":
            yield _finding(
                "BU-VFY-304",
                "error",
                f"{gpu.label} is split by MIG, so a collective over whole GPUs is not what serves",
                "turn MIG off, or leave this host out",
                wanted="Disabled",
                found=gpu.mig,
            )
        if gpu.persistence == "Disabled":
            yield _finding(
                "BU-VFY-305",
                "warning",
                f"{gpu.label} leaves persistence mode off: every first use pays for initialisation",
                "start nvidia-persistenced",
                wanted="Enabled",
                found=gpu.persistence,
            )
        held = [reason for reason in gpu.clock_event_reasons if reason.startswith(("hw_", "sw_thermal"))]
        if held:
            yield _finding(
                "BU-VFY-306",
                "warning",
                f"{gpu.label} holds its clocks down: {', '.join(held)}",
                "look at temperature, power supply and power brake: nvidia-smi -q -d PERFORMANCE",
                found=held,
            )


def memory(health: Health) -> Iterator[Finding]:
    """Judge memory errors: what needs a reboot, what needs a new board, and what is only counted."""
    for gpu in _gpus(health):
        if gpu.remapped_failure == "Yes":
            yield _finding(
                "BU-VFY-311", "error", f"{gpu.label} could not remap a broken row of memory", "replace the board"
            )
        if gpu.remapped_pending == "Yes" or gpu.retired_pending == "Yes":
            yield _finding(
                "BU-VFY-312",
                "error",
                f"{gpu.label} has a broken row of memory that is remapped at the next reset",
                "reboot the host",
            )
        if gpu.recovery_action not in (None, "None"):
            yield _finding(
                "BU-VFY-314",
                "error",
                f"{gpu.label} asks for recovery: {gpu.recovery_action}",
                f"do what it asks: {gpu.recovery_action}",
                found=gpu.recovery_action,
            )
        counted = {name: count for name, count in gpu.ecc_errors.items() if count and "uncorrectable" in name}
        volatile = {name: count for name, count in counted.items() if name.startswith("volatile")}
        if volatile:
            yield _finding(
                "BU-VFY-313",
                "error",
                f"{gpu.label} met memory errors since boot that ECC could not correct",
                "reset the GPU or reboot; replace the board if it comes back",
                found=volatile,
            )
        elif counted:
            yield _finding(
                "BU-VFY-315",
                "warning",
                f"{gpu.label} met uncorrectable memory errors in its life",
                "none now; watch whether the counters grow",
                found=counted,
            )


def xid_events(health: Health) -> Iterator[Finding]:
    """Name the Xids since boot, one finding for each number and GPU."""
    if isinstance(health.xids, Unknown):
        return
    counted = Counter((event.xid, _short(event.pci_bus_id)) for event in health.xids.events)
    for (number, bus_id), count in sorted(counted.items(), key=lambda item: (item[0][0] or 0, item[0][1])):
        row = _xid_rows().get(79 if number is None else number)
        name = f"Xid {number}" if number is not None else "the kernel log"
        yield _finding(
            "BU-VFY-316",
            "error" if row is not None and row.fatal else "warning",
            f"{name} on {bus_id} since boot ({count} times): {row.meaning if row else 'not in the table'}",
            row.remedy if row else "look it up in NVIDIA's list of Xid errors",
            xid=number,
            pci_bus_id=bus_id,
        )


def fabric(health: Health) -> Iterator[Finding]:
    """Judge the NVSwitch fabric: every GPU must have joined it, and what holds it up is named."""
    states = {gpu.label: (gpu.fabric_state, gpu.fabric_status) for gpu in _gpus(health) if gpu.fabric_state}
    open_ones = [label for label, (state, _) in states.items() if state != "Completed"]
    if open_ones:
        state = states[open_ones[0]][0]
        yield _finding(
            "BU-FAB-101",
            "error",
            f"the fabric is {state} on {', '.join(open_ones)} after {health.fabric_waited_s:.0f} s: {_holdup(health)}",
            "start the fabric manager of the driver's version, and on NVLink 5 the subnet manager (nvlsm)",
            wanted="Completed",
            found=state,
        )
    failed = [label for label, (state, status) in states.items() if state == "Completed" and status != "Success"]
    if failed:
        status = states[failed[0]][1]
        yield _finding(
            "BU-FAB-102",
            "error",
            f"{', '.join(failed)} did not join the fabric: {status}",
            "read the fabric manager's log; reset the GPUs or reboot",
            wanted="Success",
            found=status,
        )


def _holdup(health: Health) -> str:
    if health.units is None or isinstance(health.units, Unknown):
        return "no service could be asked"
    managers = {name: unit for name, unit in health.units.items() if "fabricmanager" in name or "nvlsm" in name}
    idle = [f"{name} is {unit.active} ({unit.result})" for name, unit in managers.items() if unit.active != "active"]
    if idle:
        return "; ".join(idle)
    if not any("fabricmanager" in name for name in managers):
        return "no fabric manager is installed"
    return "its services run; read their logs"


def links(health: Health, nvlinks: int | None) -> Iterator[Finding]:
    """Judge the number, speed and errors of NVLinks, against the model and among the GPUs of the host."""
    if isinstance(health.nvlink, Unknown) or nvlinks == 0:
        return
    counts = [gpu.active_links for gpu in health.nvlink]
    wanted = nvlinks if nvlinks is not None else max(counts, default=0)
    for gpu in health.nvlink:
        if gpu.active_links < wanted:
            off = f", inactive: {', '.join(map(str, gpu.inactive_links))}" if gpu.inactive_links else ""
            yield _finding(
                "BU-FAB-111",
                "error",
                f"GPU {gpu.index} has {gpu.active_links} of {wanted} NVLinks{off}",
                "look at nvidia-smi nvlink -e and the kernel log; reset the GPUs or reboot, then replace the board",
                wanted=wanted,
                found=gpu.active_links,
            )
    speeds = sorted({speed for gpu in health.nvlink for speed in gpu.link_gb_per_s})
    if len(speeds) > 1:
        slow = [str(gpu.index) for gpu in health.nvlink if min(gpu.link_gb_per_s, default=speeds[-1]) < speeds[-1]]
        yield _finding(
            "BU-FAB-112",
            "error",
            f"NVLinks of GPU {', '.join(slow)} run at {speeds[0]:g} GB/s instead of {speeds[-1]:g}",
            "reset the GPUs or reboot",
            wanted=speeds[-1],
            found=speeds[0],
        )
    if isinstance(health.nvlink_errors, Unknown):
        return
    for index, counters in health.nvlink_errors.items():
        grown = {name: count for name, count in counters.items() if count}
        if grown:
            yield _finding(
                "BU-FAB-113",
                "warning",
                f"NVLinks of GPU {index} counted errors: {', '.join(f'{n} {c}' for n, c in grown.items())}",
                "watch whether they grow; a link that counts recovery errors is about to be lost",
                found=grown,
            )


def peers(health: Health, nvlinks: int | None, is_p2p_wanted: bool) -> Iterator[Finding]:
    """Judge which GPUs reach each other, and by what."""
    if not isinstance(health.topology, Unknown) and nvlinks != 0:
        rows, names = health.topology.rows, health.topology.gpus
        by_nvlink = [sum(cell.startswith("NV") for cell in row) for row in rows]
        alone = [names[i] for i, count in enumerate(by_nvlink) if count == 0]
        if any(by_nvlink) and alone:
            yield _finding(
                "BU-FAB-121",
                "error",
                f"{', '.join(alone)} reaches no other GPU by NVLink, the others do",
                "its links did not train, or it did not join the fabric: reset or reboot, read the fabric's log",
                found=dict(zip(names, by_nvlink, strict=False)),
            )
    for name in ("p2p_read", "p2p_write"):
        matrix = getattr(health, name)
        if isinstance(matrix, Unknown):
            continue
        bad = [
            f"{matrix.gpus[i]}-{matrix.gpus[j]} {cell}"
            for i, row in enumerate(matrix.rows)
            for j, cell in enumerate(row)
            if i < j and cell not in ("OK", "X")
        ]
        if bad and (nvlinks != 0 or is_p2p_wanted):
            yield _finding(
                "BU-FAB-122",
                "error" if nvlinks else "warning",
                f"GPUs cannot reach each other directly ({name.removeprefix('p2p_')}): {', '.join(bad[:4])}",
                "CNS and TNS: the platform does not allow it; look at the BIOS, the IOMMU and ACS",
                wanted="OK",
                found=bad,
            )


def redirection(health: Health, nvlinks: int | None, is_p2p_wanted: bool) -> Iterator[Finding]:
    """Name bridges and an IOMMU that send through the processor what PCIe GPUs write to each other.

    Source validation and upstream forwarding are on in healthy machines too, so only redirection counts.
    """
    if nvlinks != 0 or not is_p2p_wanted:
        return
    if not isinstance(health.pci, Unknown):
        bridges = sorted(
            {
                bridge.pci_bus_id
                for place in health.pci
                for bridge in place.bridges
                if isinstance(bridge.acs, Acs) and (bridge.acs.request_redirect or bridge.acs.completion_redirect)
            }
        )
        if bridges:
            yield _finding(
                "BU-FAB-131",
                "warning",
                f"ACS redirects what GPUs write to each other at {', '.join(bridges[:4])}",
                "turn ACS off for these bridges (BIOS or setpci)",
                wanted="ReqRedir- CmpltRedir-",
                found=bridges,
            )
    if not isinstance(health.host, Unknown) and health.host.iommu_units:
        line = health.host.kernel_command_line or ""
        if not any(word in line.split() for word in ("iommu=pt", "iommu=off", "intel_iommu=off", "amd_iommu=off")):
            yield _finding(
                "BU-FAB-132",
                "warning",
                "an IOMMU translates what GPUs write to each other",
                "boot with iommu=pt, or turn it off in the BIOS",
                wanted="iommu=pt",
                found=list(health.host.iommu_units),
            )


def host(health: Health) -> Iterator[Finding]:
    """Judge shared memory and limits of the host."""
    if isinstance(health.host, Unknown):
        return
    needed = _data()["shm"]["bytes_per_gpu"] * max(2, len(_gpus(health)))
    if health.host.shm_free_bytes < needed:
        stale = health.host.shm_nccl_files
        yield _finding(
            "BU-VFY-331",
            "error",
            f"/dev/shm has {health.host.shm_free_bytes >> 20} MiB free, NCCL needs {needed >> 20} MiB"
            + (f"; {stale} files of NCCL lie there" if stale else ""),
            "mount /dev/shm larger, or remove files of ended processes",
            wanted=needed,
            found=health.host.shm_free_bytes,
        )
    fatal = {
        place.pci_bus_id: place.aer["fatal"]
        for place in (() if isinstance(health.pci, Unknown) else health.pci)
        if place.aer.get("fatal")
    }
    if fatal:
        yield _finding(
            "BU-VFY-322",
            "warning",
            f"PCIe counted fatal errors: {', '.join(f'{bus} {count}' for bus, count in fatal.items())}",
            "look at power management of the links (ASPM) and the seating of the boards",
            found=fatal,
        )


def rdma_ports(health: Health) -> tuple[RdmaPort, ...]:
    """Return the ports of RDMA devices; none where nobody could look."""
    found = None if isinstance(health.host, Unknown) else health.host.rdma
    return () if found is None or isinstance(found, Unknown) else found


def locked_memory(health: Health) -> Iterator[Finding]:
    """Judge how much memory processes may lock: NCCL locks every buffer that an RDMA device reads or writes.

    A unit's own limit counts for it; systemd's default stands for services when no unit is known.
    """
    if isinstance(health.host, Unknown):
        return
    for name in ("memlock", "rdma"):
        value = getattr(health.host, name)
        if isinstance(value, Unknown):
            yield _finding(
                "BU-VFY-300",
                "warning",
                f"host.{name} could not be looked at: {value.error}",
                "look at /proc/self/limits, systemctl show and /sys/class/infiniband on that host",
                part=f"host.{name}",
            )
    memlock = health.host.memlock
    if memlock is None or isinstance(memlock, Unknown):
        return
    services = dict(memlock.units) or {"services (systemd's default)": memlock.systemd}
    places = {"a login": memlock.login, **services}
    limited = {name: size for name, size in places.items() if isinstance(size, int)}
    if not limited:
        return
    devices = sorted({port.device for port in rdma_ports(health)})
    listed = ", ".join(f"{name} {size >> 10} KiB" for name, size in limited.items())
    effect = f"NCCL cannot register larger buffers with {', '.join(devices)}" if devices else "no RDMA device is here"
    yield _finding(
        "BU-VFY-332",
        "warning" if devices else "info",
        f"memory that may be locked is limited: {listed}; {effect}",
        "set LimitMEMLOCK=infinity in the unit and '* - memlock unlimited' below /etc/security/limits.d, then restart "
        "the service and log in anew"
        if devices
        else "none is needed without an RDMA device",
        wanted="unlimited",
        found=limited,
        devices=devices,
    )


def numa(health: Health) -> Iterator[Finding]:
    """Judge whether processes may run on the processors next to each GPU."""
    if isinstance(health.host, Unknown) or isinstance(health.pci, Unknown) or health.host.numa_nodes < 2:
        return
    allowed = cpus(health.host.allowed_cpus or "")
    far = [place for place in health.pci if place.local_cpus and allowed and not cpus(place.local_cpus) & allowed]
    if far:
        where = ", ".join(f"{place.pci_bus_id} (node {place.numa_node}: {place.local_cpus})" for place in far)
        yield _finding(
            "BU-VFY-333",
            "warning",
            f"processes may run on processors {health.host.allowed_cpus} only, none of them next to {where}",
            "look for CPUAffinity= and AllowedCPUs= in systemd, isolcpus, cgroups, taskset and numactl",
            wanted=[place.local_cpus for place in far],
            found=health.host.allowed_cpus,
        )
    silent = [place.pci_bus_id for place in health.pci if place.numa_node in (None, -1)]
    if silent:
        yield _finding(
            "BU-VFY-334",
            "info",
            f"the platform does not say which of {health.host.numa_nodes} NUMA nodes {', '.join(silent)} is next to",
            "update the BIOS, or let the virtual machine show its topology; until then nothing can be placed well",
            found=silent,
        )


def suspicious(settings: Settings) -> Iterator[Finding]:
    """Name variables that change what a process takes, with the file and line that set them.

    Those in the table are known to change transports and libraries; any other NCCL variable that is not harmless
    is noted.
    """
    names, harmless = set(_data()["setting"]["names"]), set(_data()["setting"]["harmless"])
    by_name: dict[str, list[str]] = {}
    for setting in settings.files:
        place = f"{setting.file}:{setting.line} ({setting.name}={setting.value})"
        by_name.setdefault(setting.name, []).append(place)
    for name, value in settings.login.items():
        by_name.setdefault(name, [f"the login environment ({name}={value}), no file found that sets it"])
    for name, places in sorted(by_name.items()):
        if name in names:
            yield _finding(
                "BU-VFY-341",
                "warning",
                f"{name} is set: {', '.join(places)}",
                "remove it unless it is meant: it changes what every process on this host does",
                found=places,
            )
        elif name.startswith("NCCL_") and name not in harmless:
            yield _finding(
                "BU-VFY-342",
                "info",
                f"{name} is set: {', '.join(places)}",
                "see whether it is still meant; it is not known to slow collectives",
                found=places,
            )


def _has_nvlink(health: Health) -> bool:
    """Return whether any GPU has a link, or nobody could look."""
    if isinstance(health.nvlink, Unknown) or isinstance(health.topology, Unknown):
        return True
    by_matrix = any(cell.startswith("NV") for row in health.topology.rows for cell in row)
    return by_matrix or any(gpu.active_links or gpu.inactive_links for gpu in health.nvlink)


def _gpus(health: Health) -> tuple[GpuHealth, ...]:
    return () if isinstance(health.gpus, Unknown) else health.gpus


def _short(bus_id: str) -> str:
    """Return a PCI bus id in one form: the driver, the kernel log and sysfs each write their own."""
    domain, _, rest = bus_id.lower().partition(":")
    if ":" not in rest:
        domain, rest = "0", bus_id.lower()
    return f"{int(domain or '0', 16):04x}:{rest.partition('.')[0]}"
