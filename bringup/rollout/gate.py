"""Judge whether a host may return to service after its cutover."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Verdict = Literal["pass", "warn", "fail"]

EXPECTED_FINDINGS = frozenset({"BU-ENV-004"})
"""What every cutover brings by itself: services that the stack does not restart run on from the environment before."""


@dataclass(frozen=True)
class BandwidthKey:
    """Name what must be equal before two bandwidths may be compared. None compares with nothing."""

    gpu_model: str
    gpus: int
    topology: str | None
    nccl_version: str | None
    algorithm: str | None
    payload_bytes: int

    @property
    def is_complete(self) -> bool:
        """Return whether everything is known that a comparison needs."""
        return None not in (self.topology, self.nccl_version, self.algorithm)


@dataclass(frozen=True)
class Bandwidth:
    """Hold one all-reduce bus bandwidth in 10**9 bytes a second.

    ``verdict`` is the limit table's, None where the table has no row for it.
    """

    key: BandwidthKey
    busbw_gb_per_s: float
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Deviation:
    """Say how far below a median a bandwidth may lie: ``mads`` median absolute deviations or ``fraction`` of
    the median, whichever is more. Fewer than ``fleet_hosts`` other hosts make no fleet.

    Source: the comparison rule of the all-reduce limits (4 MAD or 3 %), August 2026.
    """

    mads: float = 4.0
    fraction: float = 0.03
    fleet_hosts: int = 5


@dataclass(frozen=True)
class GateEvidence:
    """Hold what was seen of one host after its cutover.

    ``own`` are earlier bandwidths of this host; ``fleet`` the latest one of each other host. ``findings``
    are codes of error or warning. ``soaked_s`` is how long the host has been watched since its cutover.
    """

    is_verified: bool
    why_not: str | None = None
    measured: tuple[Bandwidth, ...] = ()
    own: tuple[Bandwidth, ...] = ()
    fleet: tuple[Bandwidth, ...] = ()
    findings_before: frozenset[str] = frozenset()
    findings: frozenset[str] = frozenset()
    soak_s: float = 0.0
    soaked_s: float = 0.0


@dataclass(frozen=True)
class Check:
    """Be one part of a gate. ``not_run``: there was nothing to compare with; it does not fail the gate."""

    name: str
    outcome: Literal["pass", "fail", "not_run"]
    why: str


@dataclass(frozen=True)
class GateVerdict:
    """Say whether a host may return to service, and what was checked."""

    checks: tuple[Check, ...]

    @property
    def is_passed(self) -> bool:
        """Return whether no check failed."""
        return all(check.outcome != "fail" for check in self.checks)

    @property
    def why(self) -> str | None:
        """Return the failed checks in one line, None when there are none."""
        return "; ".join(f"{c.name}: {c.why}" for c in self.checks if c.outcome == "fail") or None


def judge_gate(evidence: GateEvidence, deviation: Deviation = Deviation()) -> GateVerdict:
    """Judge one host after its cutover."""
    verified = evidence.is_verified
    new = sorted(evidence.findings - evidence.findings_before - EXPECTED_FINDINGS)
    soaked = evidence.soaked_s >= evidence.soak_s
    return GateVerdict(
        (
            Check(
                "verified",
                "pass" if verified else "fail",
                "the host is verified" if verified else evidence.why_not or "the host is not verified",
            ),
            judge_table(evidence.measured),
            judge_median("own record", evidence.measured, evidence.own, deviation, least=1),
            judge_median("fleet", evidence.measured, evidence.fleet, deviation, least=deviation.fleet_hosts),
            Check(
                "findings",
                "fail" if new else "pass",
                f"new since the cutover: {', '.join(new)}" if new else "no new finding",
            ),
            Check(
                "soak",
                "pass" if soaked else "fail",
                f"watched for {evidence.soaked_s:.0f} s of {evidence.soak_s:.0f} s",
            ),
        )
    )


def judge_table(measured: Iterable[Bandwidth]) -> Check:
    """Judge bandwidths by the verdicts that the limit table gave them."""
    judged = [one for one in measured if one.verdict is not None]
    if not judged:
        return Check("limit table", "not_run", "no bandwidth was measured that the table has a row for")
    failed = [one for one in judged if one.verdict == "fail"]
    if failed:
        return Check("limit table", "fail", "; ".join(f"{_shown(one)} is below the limit" for one in failed))
    return Check("limit table", "pass", f"{len(judged)} bandwidths within limits")


def judge_median(
    name: str, measured: Iterable[Bandwidth], others: Iterable[Bandwidth], deviation: Deviation, *, least: int
) -> Check:
    """Judge bandwidths by the median of equal ones; only a slower one fails.

    A bandwidth is compared with ``others`` of the very same key, and only with ``least`` or more of them.
    """
    by_key: dict[BandwidthKey, list[float]] = {}
    for other in others:
        by_key.setdefault(other.key, []).append(other.busbw_gb_per_s)
    compared = 0
    slow: list[str] = []
    for one in measured:
        known = by_key.get(one.key, [])
        if not one.key.is_complete or len(known) < least:
            continue
        compared += 1
        floor = lowest_accepted(known, deviation)
        if one.busbw_gb_per_s < floor:
            slow.append(f"{_shown(one)}, wanted at least {floor:.1f} (median {median(known):.1f})")
    if slow:
        return Check(name, "fail", "; ".join(slow))
    if not compared:
        return Check(name, "not_run", f"fewer than {least} equal measurements to compare with")
    return Check(name, "pass", f"{compared} bandwidths compared")


def lowest_accepted(known: Sequence[float], deviation: Deviation = Deviation()) -> float:
    """Return the median of known bandwidths less max(mads x MAD, fraction x median)."""
    middle = median(known)
    mad = median(abs(value - middle) for value in known)
    return middle - max(deviation.mads * mad, deviation.fraction * middle)


def _shown(one: Bandwidth) -> str:
    return f"{one.busbw_gb_per_s:.1f} GB/s at {one.key.payload_bytes} bytes over {one.key.gpus} GPUs"
