"""Name why an all-reduce is slow, unsteady, wrong or hangs, from what was seen and never from what was set.

A cause needs two witnesses that do not follow from each other: what NCCL says of itself and what was measured,
or two measurements that differ in what they use. With one it is only likely, and says what would settle it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from bringup.bench.document import Document, Row
from bringup.bench.limits import (
    SMALL_PAYLOAD_BYTES,
    Limit,
    Machine,
    Table,
    expected_multicast,
    should_have_p2p,
)
from bringup.cpu_list import cpus
from bringup.finding import Finding

Name = Literal[
    "sockets",
    "p2p_off",
    "few_channels",
    "nvls_off",
    "neighbour_on_gpu",
    "neighbour_on_link",
    "lost_link",
    "slow_pair",
    "pcie_below_width",
    "slow_gpu",
    "wrong_numa",
    "rank_stopped",
    "rank_killed",
    "rank_crashed",
    "hang_in_p2p",
    "hang",
    "interrupted",
    "wrong_result",
    "unknown",
]

NCCL = ("nccl_graph", "nccl", "nccl_graph_torch")
LOST_LINK_CODE = "BU-FAB-111"
IOMMU_CODES = ("BU-FAB-131", "BU-FAB-132")
HARDWARE_CODES = ("BU-VFY-311", "BU-VFY-312", "BU-VFY-313", "BU-VFY-314", "BU-VFY-316")

# How far a figure must be off before it speaks. Healthy pairs of H200 stay within 4 % between the GPUs of one
# host in matrix products and 1 % between directions of one link; a GPU shared with another process loses half.
SHARED_GPU = 1.25
SHARED_GPU_AND_LINK = 1.5
SLOW_GPU = 1.15
SLOW_PAIR = 0.75
SHARED_LINK = 0.85
UNSTEADY = 2.0
FAST_CHANNEL = 1.15


@dataclass(frozen=True)
class Cause:
    """One explanation, what speaks for it, and what to do.

    ``settle`` says what would make a likely cause certain; None for a certain one.
    """

    name: Name
    text: str
    witnesses: tuple[str, ...]
    remedy: str
    settle: str | None = None

    @property
    def is_certain(self) -> bool:
        """Return whether two witnesses agree."""
        return len(self.witnesses) >= 2

    def sentence(self) -> str:
        """Return the cause as a person reads it."""
        if self.name == "unknown":
            return f"{self.text}; next: {self.settle}"
        return self.text if self.is_certain else f"likely: {self.text}; settled by {self.settle}"


@dataclass(frozen=True)
class Miss:
    """A figure that is not as its limit wants it."""

    row: Row
    limit: Limit
    verdict: Literal["warn", "fail"]

    @property
    def ratio(self) -> float:
        """Return found over expected: below 1 for a low bandwidth, above 1 for a long time."""
        return self.row.value(self.limit.metric) / self.limit.expected[0]


@dataclass(frozen=True)
class Scene:
    """Everything the witnesses are taken from."""

    document: Document
    table: Table
    machine: Machine | None
    misses: tuple[Miss, ...]
    findings: tuple[Finding, ...]
    is_multicast_allowed: bool

    def slow(self, *backends: str) -> Miss | None:
        """Return the worst bandwidth or time that missed its limit, of these backends or of any."""
        found = [
            miss
            for miss in self.misses
            if miss.limit.metric != "p99_per_median" and (not backends or miss.row.backend in backends)
        ]
        by_loss = sorted(found, key=lambda m: m.ratio if m.limit.metric == "busbw_gb_per_s" else 1 / m.ratio)
        return by_loss[0] if by_loss else None

    def unsteady(self) -> tuple[Row, ...]:
        """Return small rows whose slowest samples are far from the usual one, worst first."""
        rows = [
            row
            for row in self.document.rows
            if row.is_graph and row.payload_bytes <= SMALL_PAYLOAD_BYTES and row.p99_per_median > UNSTEADY
        ]
        return tuple(sorted(rows, key=lambda row: -row.p99_per_median))

    def found(self, *codes: str) -> Finding | None:
        """Return the first finding of some codes."""
        return next((finding for finding in self.findings if finding.code in codes), None)

    def bandwidth(self, *backends: str) -> Row | None:
        """Return the row with the largest payload of the first of these backends that has one above 32 MiB."""
        for backend in backends:
            rows = [row for row in self.document.of(backend) if row.payload_bytes >= 32 << 20]
            if rows:
                return max(rows, key=lambda row: row.payload_bytes)
        return None

    def direct(self) -> str | None:
        """Return how fast GPUs read each other without NCCL, when that is as fast as their link should be."""
        values = [value for row in self.document.probes.peer_read_gb_per_s for value in row if value is not None]
        slowest = min(values, default=0.0)
        nccl = self.bandwidth(*NCCL)
        if nccl is None or slowest < 1.5 * nccl.busbw_gb_per_s:
            return None
        return f"the GPUs read each other's memory at {slowest:.0f} GB/s or more without NCCL"

    def gpu(self, rank: int) -> str:
        """Return how a person finds a rank's GPU."""
        return next((gpu.label for gpu in self.document.system.gpus if gpu.rank == rank), f"rank {rank}")


Detector = Callable[[Scene], Iterator[Cause]]


# ---------------------------------------------------------------- transports and channels


def sockets(scene: Scene) -> Iterator[Cause]:
    """NCCL moves data between GPUs of one host through the network stack."""
    log = scene.document.nccl_log
    if log is None or scene.document.system.is_across or not log.share("NET/"):
        return
    names = sorted(name for name in log.transports if name.startswith("NET/"))
    witnesses = [f"NCCL connected {sum(log.transports.values())} times through {', '.join(names)}"]
    miss = scene.slow(*NCCL)
    if miss is not None and miss.ratio < 0.3:
        witnesses.append(f"{miss.row.backend} reaches {miss.row.busbw_gb_per_s:g} GB/s")
    if direct := scene.direct():
        witnesses.append(direct)
    yield Cause(
        "sockets",
        "NCCL moves data between the GPUs through sockets: P2P and shared memory are both off",
        tuple(witnesses),
        "unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE where they are set; look at /dev/shm and the P2P matrix",
        "NCCL_DEBUG=INFO: the lines 'via NET/...'",
    )


def p2p_off(scene: Scene) -> Iterator[Cause]:
    """NCCL moves data through shared memory of the host although the GPUs could reach each other."""
    log = scene.document.nccl_log
    if log is None or not log.share("SHM/") or log.share("NET/"):
        return
    if not should_have_p2p(scene.document, scene.machine) or not scene.slow(*NCCL):
        return
    names = sorted(name for name in log.transports if name.startswith("SHM/"))
    witnesses = [f"NCCL connected {sum(log.transports[name] for name in names)} times through {', '.join(names)}"]
    miss = scene.slow(*NCCL)
    if miss is not None and (miss.ratio < 0.5 if miss.limit.metric == "busbw_gb_per_s" else miss.ratio > 2):
        witnesses.append(f"{miss.row.backend} reaches {miss.row.busbw_gb_per_s:g} GB/s")
    if direct := scene.direct():
        witnesses.append(direct)
    elif all(len(gpu.peer_access or ()) >= len(scene.document.system.gpus) - 1 for gpu in scene.document.system.gpus):
        witnesses.append("CUDA says that every GPU can reach every other one directly")
    yield Cause(
        "p2p_off",
        "P2P is off in NCCL: data goes through shared memory of the host",
        tuple(witnesses),
        "unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL where they are set; else look at the P2P matrix and the IOMMU",
        "NCCL_DEBUG=INFO: the lines 'via SHM/...', and nvidia-smi topo -p2p r",
    )


def few_channels(scene: Scene) -> Iterator[Cause]:
    """NCCL uses fewer channels than a healthy machine of this kind, so each carries more and all carry less."""
    document, log = scene.document, scene.document.nccl_log
    wanted, miss = scene.table.channels_of(document), scene.slow(*NCCL)
    if log is None or log.channels is None or miss is None or miss.limit.metric != "busbw_gb_per_s":
        return
    if log.share("P2P/") < 1.0 or log.channels.nvls:
        return
    choice = document.choice(miss.row.payload_bytes)
    count = choice.channels if choice is not None else log.channels.coll
    witnesses = []
    if wanted is not None and count < wanted.count:
        witnesses.append(f"NCCL uses {count} channels, a healthy machine of this kind {wanted.count}")
        each = miss.row.busbw_gb_per_s / count
        if each > FAST_CHANNEL * wanted.gb_per_s_per_channel:
            usual = wanted.gb_per_s_per_channel
            witnesses.append(f"each channel carries {each:.1f} GB/s, where it is {usual:.1f} with all of them")
    elif wanted is None and count <= 16 and scene.machine is not None and scene.machine.is_nvlink:
        witnesses.append(f"NCCL uses only {count} channels")
    if witnesses:
        other = scene.bandwidth("symm_two_shot")
        if other is not None and other.busbw_gb_per_s > 1.1 * miss.row.busbw_gb_per_s:
            witnesses.append(f"symm_two_shot, which has no channels, reaches {other.busbw_gb_per_s:g} GB/s")
        yield Cause(
            "few_channels",
            f"NCCL uses too few channels ({count})",
            tuple(witnesses),
            "unset NCCL_MAX_NCHANNELS, NCCL_MAX_CTAS or NCCL_NCHANNELS_PER_NET_PEER where they are set",
            "NCCL_DEBUG=INFO: the line 'N coll channels'",
        )


def nvls_off(scene: Scene) -> Iterator[Cause]:
    """NCCL uses the ring where it should reduce inside the switch."""
    document, log, miss = scene.document, scene.document.nccl_log, scene.slow(*NCCL)
    wanted = expected_multicast(document, scene.machine, scene.is_multicast_allowed)
    if miss is None or wanted == "off" or miss.limit.metric != "busbw_gb_per_s":
        return
    choice = document.choice(miss.row.payload_bytes)
    witnesses = []
    if choice is not None and not choice.algorithm.startswith("NVLS"):
        witnesses.append(f"NCCL chose {choice.algorithm} at {miss.row.payload_bytes} bytes")
    elif choice is None and log is not None and log.channels is not None and not log.channels.nvls:
        witnesses.append("NCCL opened no NVLS channel")
    if not witnesses:
        return
    low, high = 0.70, 0.85  # of the link's rate: what a ring reaches at 1 GiB and beyond
    rate = scene.machine.links * scene.machine.gb_per_s_per_link if scene.machine else 0.0
    if low * rate <= miss.row.busbw_gb_per_s <= high * rate:
        witnesses.append(f"{miss.row.busbw_gb_per_s:.0f} GB/s is what a ring reaches on {rate:.0f} GB/s links")
    yield Cause(
        "nvls_off",
        "NVLS is off: NCCL does not reduce inside the NVSwitch",
        tuple(witnesses),
        "unset NCCL_NVLS_ENABLE=0 and NCCL_ALGO where they are set; look at the fabric manager",
        "NCCL_DEBUG=INFO: 'NVLS multicast support' and the chosen algorithm",
    )


# ---------------------------------------------------------------- neighbours


def _processes(scene: Scene, uuid: str | None = None) -> str | None:
    load = scene.document.load
    found = {
        process.pid: process.process_name
        for process in (load.other_processes if load else ())
        if process.pid is not None and (uuid is None or process.gpu_uuid == uuid)
    }
    if not found:
        return None
    named = ", ".join(f"{pid} ({name})" for pid, name in sorted(found.items()))
    return f"nvidia-smi lists a process that is not ours: {named}"


def neighbour_on_gpu(scene: Scene) -> Iterator[Cause]:
    """Another process computes on one of the GPUs and takes turns with us."""
    unsteady, compute = scene.unsteady(), scene.document.probes.compute
    fastest = min((one.median_us for one in compute), default=0.0)
    has_shared_link = _shared_link(scene) is not None
    for one in compute:
        # The median is a product alone on the GPU, the mean counts the turns of others. Evenly slow products
        # speak of low clocks instead, unless the small collectives are unsteady too.
        # Copies of somebody else take a little of a GPU's time too, but mostly of its links.
        has_turns = one.mean_us > (SHARED_GPU_AND_LINK if has_shared_link else SHARED_GPU) * one.median_us
        if not has_turns and not (unsteady and one.mean_us > 2 * fastest):
            continue
        label = scene.gpu(one.rank)
        witnesses = [f"{label} needs {one.mean_us:.0f} us for a matrix product that takes {fastest:.0f} us undisturbed"]
        if unsteady:
            worst = unsteady[0]
            witnesses.append(
                f"{worst.backend} at {worst.payload_bytes} bytes: p99 is {worst.p99_per_median:.1f} times the median"
            )
        uuid = next((gpu.uuid for gpu in scene.document.system.gpus if gpu.rank == one.rank), None)
        if uuid and (listed := _processes(scene, uuid)):
            witnesses.append(listed)
        yield Cause(
            "neighbour_on_gpu",
            f"another process computes on {label}",
            tuple(witnesses),
            "end it or move it, then verify again",
            "nvidia-smi on the host, outside any container",
        )


def _shared_link(scene: Scene) -> str | None:
    """Return which direct reads take turns with somebody else's: fast alone, slow on average."""
    probes = scene.document.probes
    worst: tuple[float, int, int] | None = None
    for reader, (alone, average) in enumerate(
        zip(probes.peer_read_gb_per_s, probes.peer_read_mean_gb_per_s, strict=False)
    ):
        for source, (one, mean) in enumerate(zip(alone, average, strict=False)):
            if one and mean and mean < SHARED_LINK * one and (worst is None or mean / one < worst[0]):
                worst = (mean / one, reader, source)
    if worst is None:
        return None
    _, reader, source = worst
    one, mean = probes.peer_read_gb_per_s[reader][source], probes.peer_read_mean_gb_per_s[reader][source]
    return f"rank {reader} reads rank {source} at {one:.0f} GB/s when alone and at {mean:.0f} on average"


def neighbour_on_link(scene: Scene) -> Iterator[Cause]:
    """Another process moves data over the links: everything that crosses them is slow and unsteady."""
    if any(True for _ in neighbour_on_gpu(scene)):
        return
    unsteady = scene.unsteady()
    witnesses = []
    if unsteady:
        worst = unsteady[0]
        witnesses.append(
            f"{worst.backend} at {worst.payload_bytes} bytes: p99 is {worst.p99_per_median:.1f} times the median"
        )
    if shared := _shared_link(scene):
        witnesses.append(shared)
    if not witnesses:
        return
    slow = {miss.row.backend for miss in scene.misses if miss.limit.metric == "busbw_gb_per_s"}
    if slow & set(NCCL) and slow - set(NCCL):
        witnesses.append(f"{', '.join(sorted(slow))} are slow together, though they share nothing but the links")
    if listed := _processes(scene):
        witnesses.append(listed)
    yield Cause(
        "neighbour_on_link",
        "another process moves data over the links between the GPUs",
        tuple(witnesses),
        "end it or move it, then verify again",
        "nvidia-smi on the host, outside any container, and nvidia-smi nvlink -gt d twice",
    )


# ---------------------------------------------------------------- hardware


def lost_link(scene: Scene) -> Iterator[Cause]:
    """A GPU has fewer NVLinks than its model."""
    finding = scene.found(LOST_LINK_CODE)
    if finding is None or not scene.misses:
        return
    witnesses = [finding.cause]
    if miss := scene.slow(*NCCL):
        witnesses.append(f"{miss.row.backend} reaches {miss.row.busbw_gb_per_s:g} GB/s")
    yield Cause("lost_link", finding.cause, tuple(witnesses), finding.remedy, "nvidia-smi nvlink -s")


def slow_pair(scene: Scene) -> Iterator[Cause]:
    """One pair of GPUs is connected worse than the others."""
    matrix = scene.document.probes.peer_read_gb_per_s
    values = [value for row in matrix for value in row if value is not None]
    if len(values) < 2 or not scene.slow():
        return
    usual = median(values)
    for reader, row in enumerate(matrix):
        for source, value in enumerate(row):
            if value is not None and value < SLOW_PAIR * usual:
                yield Cause(
                    "slow_pair",
                    f"{scene.gpu(reader)} reads {scene.gpu(source)} at {value:g} GB/s, the others at {usual:g}",
                    (
                        f"direct reads: {value:g} GB/s against {usual:g}",
                        *([f"found together: {f.cause}"] if (f := scene.found(LOST_LINK_CODE)) else []),
                    ),
                    "look at the links of both GPUs: nvidia-smi nvlink -s and -e, lspci -vv",
                    "nvidia-smi nvlink -e on both GPUs",
                )


def pcie_below_width(scene: Scene) -> Iterator[Cause]:
    """A GPU's PCIe link is narrower or slower under load than it can be."""
    load = scene.document.load
    for gpu in load.gpus if load else ():
        pairs = (
            ("generation", gpu.pcie_link_gen_current, gpu.pcie_link_gen_max),
            ("width", gpu.pcie_link_width_current, gpu.pcie_link_width_max),
        )
        below = [f"{what} {now} of {most}" for what, now, most in pairs if now and most and now < most]
        if not below:
            continue
        witnesses = [f"GPU {gpu.index} under load: PCIe {', '.join(below)}"]
        is_pcie = scene.machine is not None and not scene.machine.is_nvlink
        if is_pcie and (miss := scene.slow(*NCCL)):
            witnesses.append(f"{miss.row.backend} reaches {miss.row.busbw_gb_per_s:g} GB/s")
        yield Cause(
            "pcie_below_width",
            f"the PCIe link of GPU {gpu.index} runs below what it can: {', '.join(below)}",
            tuple(witnesses),
            "reseat the board or riser, look at the BIOS's link settings and at AER counters",
            "lspci -vv (LnkSta) while the GPU works",
        )


def slow_gpu(scene: Scene) -> Iterator[Cause]:
    """One GPU computes steadily but slower than the others: its clocks are held down."""
    compute = scene.document.probes.compute
    if len(compute) < 2 or not scene.slow():
        return
    usual = median(one.median_us for one in compute) if len(compute) > 2 else min(one.median_us for one in compute)
    load = {gpu.index: gpu for gpu in (scene.document.load.gpus if scene.document.load else ())}
    for one in compute:
        if one.median_us <= SLOW_GPU * usual or one.mean_us > SHARED_GPU * one.median_us:
            continue
        witnesses = [f"{scene.gpu(one.rank)} needs {one.median_us:.0f} us for a matrix product, others {usual:.0f}"]
        sample = load.get(next((g.index for g in scene.document.system.gpus if g.rank == one.rank), -1))
        if sample and sample.clocks_sm and sample.clocks_max_sm and sample.clocks_sm < 0.9 * sample.clocks_max_sm:
            witnesses.append(f"its clock under load is {sample.clocks_sm} of {sample.clocks_max_sm} MHz")
        yield Cause(
            "slow_gpu",
            f"{scene.gpu(one.rank)} runs slower than the others",
            tuple(witnesses),
            "look at power, temperature and clock limits: nvidia-smi -q -d PERFORMANCE,CLOCK,POWER",
            "nvidia-smi -q -d PERFORMANCE under load",
        )


def wrong_numa(scene: Scene) -> Iterator[Cause]:
    """A rank runs on processors far from its GPU."""
    if not scene.slow():
        return
    for gpu in scene.document.system.gpus:
        if not gpu.local_cpus or not gpu.cpu_affinity or gpu.numa_node in (None, -1):
            continue
        if not cpus(gpu.local_cpus) & cpus(gpu.cpu_affinity):
            yield Cause(
                "wrong_numa",
                f"{gpu.label} is driven from processors {gpu.cpu_affinity}, its own are {gpu.local_cpus}",
                (f"affinity {gpu.cpu_affinity} has no processor of NUMA node {gpu.numa_node}",),
                "look for numactl, taskset or a cgroup that pins the service",
                "a run pinned to the GPU's own processors",
            )


SLOW: Sequence[Detector] = (
    sockets,
    p2p_off,
    few_channels,
    nvls_off,
    neighbour_on_gpu,
    neighbour_on_link,
    lost_link,
    slow_pair,
    pcie_below_width,
    slow_gpu,
    wrong_numa,
)


def of_misses(scene: Scene) -> tuple[Cause, ...]:
    """Return what explains the figures that missed their limits, certain causes first."""
    found = [cause for detector in SLOW for cause in detector(scene)]
    if not found and (miss := scene.slow()):
        found = [
            Cause(
                "unknown",
                "the cause is not known",
                (),
                "run nccl-tests all_reduce_perf, and compare with another host of the same kind",
                f"NCCL_DEBUG=INFO beside a run of {miss.row.backend}",
            )
        ]
    return tuple(sorted(found, key=lambda cause: not cause.is_certain))


# ---------------------------------------------------------------- wrong results and ranks that do not come back


def of_wrong_results(scene: Scene) -> tuple[Cause, ...]:
    """Return which ranks hold wrong data, and in which backends."""
    wrong = [check for check in scene.document.checks if not check.ok]
    if not wrong:
        return ()
    backends = sorted({check.backend for check in wrong})
    ranks = sorted({rank for check in wrong for rank in check.bad_ranks})
    first = next((check.first_wrong for check in wrong if check.first_wrong), None)
    what = _what_is_wrong(wrong[0].wrong_elements, wrong[0].unwritten_elements, wrong[0].canary_intact)
    where = ", ".join(scene.gpu(rank) for rank in ranks)
    text = f"{', '.join(backends)}: wrong result on {where}: {what}"
    witnesses = [f"integers that add up exactly in any order: {what} on {where}"]
    if first is not None:
        witnesses.append(f"element {first.index} on rank {first.rank} is {first.got}, must be {first.want:g}")
    right = sorted({c.backend for c in scene.document.checks if c.ok} - set(backends))
    if right:
        witnesses.append(f"right on the same GPUs: {', '.join(right)}")
    if hardware := scene.found(*HARDWARE_CODES):
        witnesses.append(hardware.cause)
    remedy = (
        "take the GPU out of service and test its memory and links"
        if hardware or not right
        else f"do not serve with {', '.join(backends)} here; try another version of it"
    )
    return (Cause("wrong_result", text, tuple(witnesses), remedy),)


def _what_is_wrong(wrong: int, unwritten: int, is_canary_intact: bool) -> str:
    if not is_canary_intact:
        return "it wrote past the end of the payload"
    if unwritten:
        return f"{unwritten} element{'s' if unwritten > 1 else ''} never written"
    return f"{wrong} wrong element{'s' if wrong != 1 else ''}"


def of_failures(scene: Scene, without_p2p: Document | None) -> tuple[Cause, ...]:
    """Return why ranks did not come back. ``without_p2p``: the same run with P2P off, None when none was made."""
    return tuple(_of_failure(scene, number, without_p2p) for number in range(len(scene.document.failures)))


def _of_failure(scene: Scene, number: int, without_p2p: Document | None) -> Cause:
    failure = scene.document.failures[number]
    rank = next((one for one in failure.ranks if one.rank == failure.rank), None)
    others = [one for one in failure.ranks if one.rank != failure.rank]
    waiting = [one.rank for one in others if one.exit_code is None and one.signal is None]
    if failure.kind == "stopped" and failure.rank is not None:
        return Cause(
            "rank_stopped",
            f"{scene.gpu(failure.rank)} was stopped by a signal from outside (process state T)",
            (
                failure.message,
                f"ranks {', '.join(map(str, waiting))} were running and waited for it"
                if waiting
                else "no rank was left",
            ),
            "somebody sent SIGSTOP, or a debugger or a freezer holds the process; verify again",
        )
    if failure.kind == "crash" and rank is not None and rank.signal is not None:
        reason = (
            " (the kernel's out-of-memory killer does that: see the kernel log)" if rank.signal == "SIGKILL" else ""
        )
        return Cause(
            "rank_killed",
            f"{scene.gpu(rank.rank)} was killed by {rank.signal}{reason}",
            (f"the kernel reports {rank.signal} for rank {rank.rank}", f"the others were alive: {waiting}"),
            "find who sent it: the kernel log, a memory limit of the cgroup, an administrator",
        )
    if failure.kind == "crash":
        return Cause(
            "rank_crashed",
            failure.message,
            (failure.message, f"where: {_places(failure.ranks)}"),
            "the message is the program's own; a missing or broken library is the usual reason",
        )
    if failure.kind == "interrupted":
        return Cause("interrupted", failure.message, (failure.message, "a signal"), "verify again")
    return _of_timeout(scene, failure.message, without_p2p)


def _of_timeout(scene: Scene, message: str, without_p2p: Document | None) -> Cause:
    iommu = scene.found(*IOMMU_CODES)
    if without_p2p is None:
        return Cause(
            "hang",
            "the collective hangs",
            (message,),
            "measure again with NCCL_P2P_DISABLE=1",
            "the same run with NCCL_P2P_DISABLE=1",
        )
    ended = any(row.backend in NCCL for row in without_p2p.rows)
    if ended:
        witnesses = [message, "with P2P off in NCCL the same collective ends"]
        if iommu is not None:
            witnesses.append(iommu.cause)
        return Cause(
            "hang_in_p2p",
            "the collective hangs when GPUs write to each other directly (P2P)",
            tuple(witnesses),
            "turn ACS and IOMMU redirection off for the bridges above the GPUs (BIOS, iommu=pt or off); "
            "NCCL_P2P_DISABLE=1 works but is slow",
        )
    return Cause(
        "hang",
        "the collective hangs, with P2P off too",
        (message,),
        "look at Xid messages in the kernel log, at the fabric and at /dev/shm",
        "a stack of the hanging ranks (in the document) and the kernel log",
    )


def _places(ranks: Sequence[object]) -> str:
    return "; ".join(
        f"rank {getattr(one, 'rank', '?')} in {getattr(one, 'phase', None) or 'start-up'}" for one in ranks
    )
