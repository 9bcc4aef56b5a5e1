"""Read what ``files/allreduce_bench.py`` measured: its JSON document as typed, frozen models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bringup.errors import HostError

State = Literal["measured", "missing", "failed", "not_run"]
FailureKind = Literal["crash", "timeout", "stopped", "interrupted"]


class _Model(BaseModel):
    # What a newer script adds is not this controller's business; what it needs is checked.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Gpu(_Model):
    """One rank's GPU; ``node`` is torchrun's number of its host. On CPU a GPU's own fields are None."""

    rank: int
    host: str
    index: int
    node: int = 0
    cpu_affinity: str | None = None
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None
    is_multicast_capable: bool | None = None
    peer_access: tuple[int, ...] | None = None
    numa_node: int | None = None
    local_cpus: str | None = None

    @property
    def label(self) -> str:
        """Return how a person finds this GPU: rank, index and UUID."""
        return f"rank {self.rank} (GPU {self.index}{', ' + self.uuid if self.uuid else ''})"


class System(_Model):
    """What was measured on. Empty when no rank came so far."""

    device: Literal["cuda", "cpu"] | None = None
    ranks: int = 0
    nodes: int = 1
    hosts: tuple[str, ...] = ()
    dtype: str | None = None
    torch: str | None = None
    nccl: str | None = None
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()

    @property
    def is_across(self) -> bool:
        """Return whether several hosts took part."""
        return max(self.nodes, len(self.hosts)) > 1


class BackendState(_Model):
    """Whether a backend was measured, and if not, why."""

    state: State
    reason: str | None = None
    seconds: Mapping[str, float] = Field(default_factory=dict)
    notes: Mapping[str, Any] = Field(default_factory=dict)

    @property
    def left_out_bytes(self) -> tuple[int, ...]:
        """Return the payloads of which one operation would have taken too long between these hosts."""
        found = self.notes.get("left_out_bytes", ())
        return tuple(size for size in found if isinstance(size, int)) if isinstance(found, list | tuple) else ()


class Row(_Model):
    """One backend at one payload. Times are for one operation, by the slowest rank of each sample."""

    backend: str
    payload_bytes: int = Field(gt=0)
    is_graph: bool
    median_us: float = Field(gt=0)
    min_us: float = Field(gt=0)
    p99_us: float = Field(gt=0)
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    rank_median_us: tuple[float, ...]

    @property
    def p99_per_median(self) -> float:
        """Return how far the slowest samples are from the usual one; 1.0 is perfectly steady."""
        return self.p99_us / self.median_us

    def value(self, metric: str) -> float:
        """Return a figure by the name a limit gives it."""
        return float(getattr(self, metric))


class WrongElement(_Model):
    """The first wrong element: where, what it was and what it should have been."""

    rank: int
    index: int
    got: str
    want: float


class Check(_Model):
    """One comparison of a result with what it must be."""

    backend: str
    payload_bytes: int
    data: Literal["integers", "random"]
    ok: bool
    bad_ranks: tuple[int, ...] = ()
    wrong_elements: int = 0
    unwritten_elements: int = 0
    canary_intact: bool = True
    relative_l2: float | None = None
    first_wrong: WrongElement | None = None


class Compute(_Model):
    """One rank's matrix products before anything was timed. The mean counts what other processes took."""

    rank: int
    median_us: float
    max_us: float
    tflop_per_s: float
    mean_us: float


Matrix = tuple[tuple[float | None, ...], ...]


class Probes(_Model):
    """What each GPU does alone, and each pair without a collective (GB/s; row reads from column)."""

    compute: tuple[Compute, ...] = ()
    peer_read_gb_per_s: Matrix = ()
    peer_read_mean_gb_per_s: Matrix = ()


class Channels(_Model):
    """How many channels NCCL opened for collectives, and for reduction inside the switch."""

    coll: int
    nvls: int


class Choice(_Model):
    """What NCCL chose for one payload."""

    payload_bytes: int
    algorithm: str
    protocol: str
    channels: int


class NcclLog(_Model):
    """What NCCL said of itself. ``transports`` counts connections by transport, such as ``P2P/CUMEM``."""

    version: str | None = None
    network: str | None = None
    network_devices: tuple[str, ...] = ()
    multicast_available: bool | None = None
    transports: Mapping[str, int] = Field(default_factory=dict)
    connected_channels: int = 0
    channels: Channels | None = None
    choices: tuple[Choice, ...] = ()
    settings: Mapping[str, str] = Field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def share(self, prefix: str) -> float:
        """Return the share of connections whose transport starts with a prefix; 0.0 when none are known."""
        total = sum(self.transports.values())
        found = sum(count for name, count in self.transports.items() if name.startswith(prefix))
        return found / total if total else 0.0


class LoadedGpu(_Model):
    """One GPU as nvidia-smi showed it while it worked."""

    index: int
    pcie_link_gen_current: int | None = None
    pcie_link_gen_max: int | None = None
    pcie_link_width_current: int | None = None
    pcie_link_width_max: int | None = None
    clocks_sm: int | None = None
    clocks_max_sm: int | None = None
    temperature_gpu: int | None = None


class Process(_Model):
    """A process on a GPU that is none of the bench's."""

    pid: int | None = None
    gpu_uuid: str | None = None
    process_name: str | None = None


class Load(_Model):
    """The GPUs under load; ``error`` when nvidia-smi did not answer."""

    error: str | None = None
    gpus: tuple[LoadedGpu, ...] = ()
    other_processes: tuple[Process, ...] = ()


class Rank(_Model):
    """Where one rank was when a failure was seen."""

    rank: int
    phase: str | None = None
    backend: str | None = None
    payload_bytes: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    process_state: str | None = None
    stack: tuple[str, ...] | None = None


class Failure(_Model):
    """A crash, a time limit, a stopped rank or an interruption."""

    kind: FailureKind
    message: str
    rank: int | None = None
    backend: str | None = None
    ranks: tuple[Rank, ...] = ()


class Phase(_Model):
    """How long one part took on rank 0."""

    name: str
    seconds: float


class Document(_Model):
    """Everything one run of the bench told."""

    schema_: Literal[1] = Field(alias="schema")
    program: Literal["allreduce_bench"]
    exit_status: Literal[0, 1, 2, 4, 5]
    outcome: str
    message: str | None = None
    launcher: str | None = None
    system: System = System()
    backends: Mapping[str, BackendState] = Field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    checks: tuple[Check, ...] = ()
    probes: Probes = Probes()
    nccl_log: NcclLog | None = None
    load: Load | None = None
    failures: tuple[Failure, ...] = ()
    phases: tuple[Phase, ...] = ()
    seconds: float | None = None

    @cached_property
    def model(self) -> str | None:
        """Return the GPUs' model; None on CPU and where the ranks' GPUs differ."""
        names = {gpu.name for gpu in self.system.gpus}
        return names.pop() if len(names) == 1 else None

    def row(self, backend: str, payload_bytes: int) -> Row | None:
        """Return one backend's row at one payload, or None."""
        for row in self.rows:
            if (row.backend, row.payload_bytes) == (backend, payload_bytes):
                return row
        return None

    def of(self, backend: str) -> tuple[Row, ...]:
        """Return one backend's rows."""
        return tuple(row for row in self.rows if row.backend == backend)

    def choice(self, payload_bytes: int) -> Choice | None:
        """Return what NCCL chose for a payload, or None when its log does not say."""
        for choice in self.nccl_log.choices if self.nccl_log else ():
            if choice.payload_bytes == payload_bytes:
                return choice
        return None


class NcclNote(_Model):
    """What NCCL said of its network on one host, in words of its own."""

    network: str | None = None
    network_devices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Note(_Model):
    """How far the first rank of one host came, as it noted itself. ``nccl`` is told with an error only."""

    program: Literal["allreduce_bench_node"]
    node: int
    rank: int
    phase: str | None = None
    backend: str | None = None
    payload_bytes: int | None = None
    is_done: bool = False
    error: Mapping[str, str] | None = None
    nccl: NcclNote | None = None

    @property
    def place(self) -> str:
        """Return where it was, as a person reads it."""
        of = f" of {self.backend}" if self.backend else ""
        at = f" at {self.payload_bytes} bytes" if self.payload_bytes else ""
        return f"{self.phase or 'start-up'}{of}{at}"


def parse_note(answer: object) -> Note | None:
    """Return the typed note; None where there is none or it cannot be read, which says no more than none."""
    try:
        return Note.model_validate(answer)
    except ValidationError:
        return None


def parse(answer: object) -> Document:
    """Return the typed document.

    Raises HostError naming the first place that is not as it must be: what a host says is never trusted.
    """
    try:
        return Document.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        raise HostError(
            "the all-reduce bench's answer cannot be read", why=f"{place}: {first['msg']}", hint="run verify again"
        ) from error
