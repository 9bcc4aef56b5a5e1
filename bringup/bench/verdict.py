"""Judge runs of the all-reduce bench: against the table, the host's own record and its equals in the fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from bringup.bench import cause as causes
from bringup.bench.cause import Cause, Miss, Scene
from bringup.bench.document import Document, Row
from bringup.bench.limits import SMALL_PAYLOAD_BYTES, Limit, Table, expected_multicast
from bringup.finding import Finding, Severity

Grade = Literal["pass", "warn", "fail"]
State = Literal["ok", "slow", "failed", "not_run"]
Request = Literal["repeat", "p2p_off"]

FLEET_MINIMUM = 5
"""Below this many equal hosts their median says nothing."""
DEVIATION = 0.03
MAD_FACTOR = 4
RECORD_PAYLOAD_BYTES = 1 << 30
"""The payload that is compared with earlier runs and with other hosts; smaller ones spread more."""


def busbw_gb_per_s(payload_bytes: int, seconds: float, ranks: int) -> float:
    """Return all-reduce bus bandwidth in GB/s (10**9 bytes per second).

    An all-reduce moves each byte 2(n-1)/n times over a rank's link, whatever the algorithm;
    see nccl-tests, doc/PERFORMANCE.md.
    """
    return payload_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9


@dataclass(frozen=True)
class Key:
    """What must be equal before two bandwidths may be compared. None: it could not be read."""

    gpu_model: str
    gpus: int
    topology: str | None
    nccl_version: str | None
    algorithm: str | None


@dataclass(frozen=True)
class Figure:
    """One bandwidth worth remembering."""

    key: Key
    backend: str
    payload_bytes: int
    busbw_gb_per_s: float


@dataclass(frozen=True)
class Judgement:
    """How one backend stands.

    ``row`` is the largest payload measured, ``grade`` None where no limit applies, ``reason`` why it is missing,
    failed, or not as it should be.
    """

    backend: str
    state: Literal["measured", "missing", "failed", "not_run"]
    is_required: bool
    row: Row | None = None
    grade: Grade | None = None
    misses: tuple[Miss, ...] = ()
    key: Key | None = None
    reason: str | None = None

    def as_result(self) -> dict[str, object]:
        """Return the entry of ``verification.backends`` in a results document."""
        row = self.row
        return {
            "backend": self.backend,
            "state": "not_run" if self.state == "failed" else self.state,
            "payload_bytes": row.payload_bytes if row else None,
            "ranks": len(row.rank_median_us) if row else None,
            "busbw_gb_per_s": row.busbw_gb_per_s if row else None,
            "algbw_gb_per_s": row.algbw_gb_per_s if row else None,
            "latency_us": row.median_us if row else None,
            "verdict": self.grade,
            "required": self.is_required,
            "reason": self.reason,
            "key": vars(self.key) | {} if self.key else None,
        }


@dataclass(frozen=True)
class Verdict:
    """What all runs together say about a host.

    ``request``: measure again before believing this; None when it stands.
    """

    state: State
    backends: tuple[Judgement, ...]
    causes: tuple[Cause, ...] = ()
    findings: tuple[Finding, ...] = ()
    request: Request | None = None
    figures: tuple[Figure, ...] = field(default=())


@dataclass(frozen=True)
class Runs:
    """The runs made so far: the first, its repetition, and the one with P2P off."""

    first: Document
    repeat: Document | None = None
    without_p2p: Document | None = None

    @property
    def last(self) -> Document:
        """Return the run that counts when both measured."""
        return self.repeat or self.first


def judge(
    runs: Runs,
    table: Table,
    *,
    required: Sequence[str] = (),
    findings: Sequence[Finding] = (),
    record: Sequence[Figure] = (),
    fleet: Sequence[Figure] = (),
    is_multicast_allowed: bool = True,
) -> Verdict:
    """Judge a host's runs.

    ``findings`` are those about the host's health, taken as witnesses. ``record`` holds the host's own earlier
    figures, ``fleet`` one figure a host of others; only equal keys are compared.
    """
    first = _look(runs.first, table, findings, is_multicast_allowed)
    if runs.first.failures or _is_wrong(runs.first):
        return _broken(runs, first, required)
    repeated = _look(runs.repeat, table, findings, is_multicast_allowed) if runs.repeat else None
    if repeated is not None and (runs.last.failures or _is_wrong(runs.last)):
        return _broken(Runs(runs.last, None, runs.without_p2p), repeated, required)
    scene = repeated or first
    # A slow figure counts when it was slow twice; once could have been anybody's doing.
    kept = scene.misses if repeated is None else tuple(m for m in scene.misses if _same(m, first.misses))
    scene = _with(scene, kept)
    named = causes.of_misses(scene)
    judged = tuple(_judgement(scene, name, name in required) for name in scene.document.backends)
    found = [*_of_misses(scene, named, runs), *_of_comparison(scene, record, fleet), *_of_table(scene)]
    if repeated is not None and first.misses and not kept:
        found.append(_once(first))
    is_slow = any(miss.verdict == "fail" for miss in kept)
    measured = any(entry.state == "measured" for entry in judged)
    return Verdict(
        state="slow" if is_slow else "ok" if measured else "not_run",
        backends=judged,
        causes=named,
        findings=tuple(found),
        request="repeat" if first.misses and repeated is None else None,
        figures=figures(scene.document, table),
    )


def figures(document: Document, table: Table) -> tuple[Figure, ...]:
    """Return the bandwidths of a run that a record keeps: each backend at 1 GiB."""
    return tuple(
        Figure(key, row.backend, row.payload_bytes, row.busbw_gb_per_s)
        for row in document.rows
        if row.payload_bytes == RECORD_PAYLOAD_BYTES and (key := key_of(document, row, table)) is not None
    )


def key_of(document: Document, row: Row, table: Table) -> Key | None:
    """Return what a row may be compared by; None on CPU and where the GPUs are of several models."""
    if document.model is None or document.system.device != "cuda":
        return None
    machine = table.machine_of(document)
    algorithm: str | None = row.backend
    if row.backend.startswith("nccl"):
        choice = document.choice(row.payload_bytes)
        algorithm = f"{choice.algorithm}/{choice.protocol}".lower() if choice else None
    return Key(
        gpu_model=document.model,
        gpus=document.system.ranks,
        topology=machine.link if machine else None,
        nccl_version=document.system.nccl,
        algorithm=algorithm,
    )


def deviation(value: float, others: Sequence[float]) -> float | None:
    """Return how far below the median of others a value is, as a fraction; None when that is within their spread.

    The spread is four times the median absolute deviation, at least 3 %.
    """
    if not others:
        return None
    middle = median(others)
    spread = median(abs(other - middle) for other in others)
    allowed = max(MAD_FACTOR * spread, DEVIATION * middle)
    return (middle - value) / middle if middle - value > allowed else None


# ---------------------------------------------------------------- looking


def _look(document: Document, table: Table, findings: Sequence[Finding], is_multicast_allowed: bool) -> Scene:
    limits = tuple(table.limits_of(document, is_multicast_allowed=is_multicast_allowed))
    misses = tuple(miss for limit in limits for miss in _misses(document, limit))
    return Scene(document, table, table.machine_of(document), misses, tuple(findings), is_multicast_allowed)


def _misses(document: Document, limit: Limit) -> Iterator[Miss]:
    for row in document.rows:
        if row.backend not in limit.backends:
            continue
        if limit.payload_bytes == 0:
            applies = row.is_graph and row.payload_bytes <= SMALL_PAYLOAD_BYTES
        else:
            applies = row.payload_bytes == limit.payload_bytes
        verdict = limit.verdict(row.value(limit.metric)) if applies else "pass"
        if verdict != "pass":
            yield Miss(row, limit, verdict)


def _same(miss: Miss, others: Sequence[Miss]) -> bool:
    return any((miss.row.backend, miss.limit.metric) == (other.row.backend, other.limit.metric) for other in others)


def _with(scene: Scene, misses: tuple[Miss, ...]) -> Scene:
    return Scene(scene.document, scene.table, scene.machine, misses, scene.findings, scene.is_multicast_allowed)


def _is_wrong(document: Document) -> bool:
    return any(not check.ok for check in document.checks)


def _judgement(scene: Scene, backend: str, is_required: bool, reason: str | None = None) -> Judgement:
    document = scene.document
    entry = document.backends[backend]
    rows = document.of(backend)
    misses = tuple(miss for miss in scene.misses if miss.row.backend == backend)
    if entry.state != "measured" or not rows:
        return Judgement(backend, entry.state, is_required, reason=reason or entry.reason)
    largest = max(rows, key=lambda row: row.payload_bytes)
    limited = any(
        backend in limit.backends
        for limit in scene.table.limits_of(document, is_multicast_allowed=scene.is_multicast_allowed)
    )
    grade: Grade | None = "pass" if limited else None
    if misses:
        grade = "fail" if any(miss.verdict == "fail" for miss in misses) else "warn"
    if document.system.device == "cpu":
        reason = "on CPU: no GPU took part"
    elif misses:
        reason = "; ".join(f"wanted {miss.limit.wanted()}, found {_found(miss)}" for miss in misses)
    return Judgement(
        backend, "measured", is_required, largest, grade, misses, key_of(document, largest, scene.table), reason
    )


def _found(miss: Miss) -> str:
    value = miss.row.value(miss.limit.metric)
    if miss.limit.metric == "busbw_gb_per_s":
        return f"{value:.4g} GB/s busbw"
    return f"{value:.4g} us" if miss.limit.metric == "median_us" else f"{value:.1f} times the median"


# ---------------------------------------------------------------- findings


def _broken(runs: Runs, scene: Scene, required: Sequence[str]) -> Verdict:
    """Return the verdict on a run that did not end well or gave a wrong result."""
    document = runs.first
    named = (*causes.of_wrong_results(scene), *causes.of_failures(scene, runs.without_p2p))
    hung = any(failure.kind == "timeout" for failure in document.failures)
    codes = {"wrong_result": "BU-VFY-214", "rank_killed": "BU-VFY-212", "rank_stopped": "BU-VFY-213"}
    found = tuple(
        Finding(
            code=codes.get(cause.name, "BU-VFY-211" if cause.name.startswith("hang") else "BU-VFY-215"),
            severity="error",
            cause=cause.sentence(),
            remedy=cause.remedy,
            evidence=_evidence(document, cause, wanted="every rank ends with the right sum", found=document.message),
        )
        for cause in named
    )
    return Verdict(
        state="failed",
        backends=tuple(_judgement(scene, name, name in required) for name in document.backends),
        causes=named,
        findings=found,
        request="p2p_off" if hung and runs.without_p2p is None else None,
        figures=(),
    )


def _evidence(document: Document, cause: Cause | None, **more: object) -> dict[str, object]:
    evidence: dict[str, object] = dict(more)
    if cause is not None:
        evidence["cause"] = cause.name
        evidence["witnesses"] = list(cause.witnesses)
    settings: Mapping[str, str] = document.nccl_log.settings if document.nccl_log else {}
    # What NCCL was told is context for the reader; no cause is ever derived from it.
    if settings:
        evidence["nccl_settings"] = dict(settings)
    return evidence


def _of_misses(scene: Scene, named: Sequence[Cause], runs: Runs) -> Iterator[Finding]:
    by_backend: dict[str, list[Miss]] = {}
    for miss in scene.misses:
        by_backend.setdefault(miss.row.backend, []).append(miss)
    main = named[0] if named else None
    times = "2 of 2 runs" if runs.repeat is not None else "1 run"
    for backend, misses in by_backend.items():
        worst = min(misses, key=lambda miss: miss.verdict != "fail")
        steady = all(miss.limit.metric == "p99_per_median" for miss in misses)
        severity: Severity = "error" if worst.verdict == "fail" else "warning"
        text = f"{backend} is {'unsteady' if steady else 'slow'} at {worst.row.payload_bytes} bytes"
        yield Finding(
            code="BU-VFY-202" if steady else "BU-VFY-201",
            severity=severity,
            cause=f"{text}: {main.sentence()}" if main else text,
            remedy=main.remedy if main else "measure again with bringup verify --force",
            evidence=_evidence(
                scene.document,
                main,
                wanted=worst.limit.wanted(),
                found=f"{_found(worst)}, {times}",
                expected=list(worst.limit.expected),
                limit_source=f"{worst.limit.source} ({worst.limit.date})",
            ),
        )
    # A cause that stands without a slow figure, such as a narrow PCIe link on an NVLink host.
    if not scene.misses:
        for cause in named:
            yield Finding(
                code="BU-VFY-203",
                severity="warning",
                cause=cause.sentence(),
                remedy=cause.remedy,
                evidence=_evidence(scene.document, cause),
            )


def _of_table(scene: Scene) -> Iterator[Finding]:
    document = scene.document
    if document.system.device != "cuda":
        return
    has_bandwidth_limit = any(
        limit.metric == "busbw_gb_per_s"
        for limit in scene.table.limits_of(document, is_multicast_allowed=scene.is_multicast_allowed)
    )
    if not has_bandwidth_limit and not document.system.is_across:
        yield Finding(
            code="BU-VFY-221",
            severity="info",
            cause=f"no limit is known for {document.system.ranks}x {document.model or 'mixed GPUs'}",
            remedy="the figures are recorded, and later runs are compared with them",
        )
    allowed = expected_multicast(document, scene.machine, True)
    if allowed == "on" and not scene.is_multicast_allowed:
        yield Finding(
            code="BU-VFY-204",
            severity="warning",
            cause="these GPUs could reduce inside the NVSwitch (NVLS), and that is not allowed here",
            remedy="allow multicast in the stack, or accept the ring's bandwidth",
        )


def _of_comparison(scene: Scene, record: Sequence[Figure], fleet: Sequence[Figure]) -> Iterator[Finding]:
    for figure in figures(scene.document, scene.table):
        if any(miss.row.backend == figure.backend for miss in scene.misses):
            continue  # already said, and with a cause
        for code, name, others, least in (
            ("BU-VFY-222", "this host's own record", record, 1),
            ("BU-VFY-223", "the median of its equals", fleet, FLEET_MINIMUM),
        ):
            equal = [
                other.busbw_gb_per_s
                for other in others
                if (other.key, other.backend, other.payload_bytes) == (figure.key, figure.backend, figure.payload_bytes)
            ]
            below = deviation(figure.busbw_gb_per_s, equal) if len(equal) >= least else None
            if below is not None:
                yield Finding(
                    code=code,
                    severity="warning",
                    cause=f"{figure.backend} is {below:.1%} below {name} at 1 GiB",
                    remedy="compare link counts, clocks and the processes on this host with the time before",
                    evidence={
                        "wanted": f"{median(equal):.4g} GB/s busbw",
                        "found": f"{figure.busbw_gb_per_s:.4g} GB/s busbw",
                        "compared_with": len(equal),
                    },
                )


def _once(first: Scene) -> Finding:
    named = ", ".join(sorted({miss.row.backend for miss in first.misses}))
    return Finding(
        code="BU-VFY-205",
        severity="warning",
        cause=f"{named} missed a limit in the first run and reached it in the second",
        remedy="something disturbed the first run; verify again if it comes back",
    )
