"""Results that hold one of everything, told by hosts that are up to no good."""

from __future__ import annotations

from bringup.report.results import (
    BackendResult,
    DifferenceResult,
    EnvironmentResult,
    FindingResult,
    HostResult,
    MeasurementKey,
    PinResult,
    Results,
    StackRef,
    StepResult,
    VerificationResult,
)

STACK = StackRef(name="lab", digest="abc123")
EVIL = '<script>alert("1")</script>\x1b[31m & {{ 7*7 }} \u202e]]>'

OK = HostResult(
    status="ok",
    simulated=("gpu", "driver", "wheels"),
    changes=2,
    seconds=12.5,
    steps=(
        StepResult(name="linker", status="changed", seconds=0.5, changes=2),
        StepResult(name="verify", status="unchanged", seconds=3.0),
    ),
    verification=VerificationResult(
        state="verified",
        measured_at_s=1_760_000_000.0,
        backends=(
            BackendResult(
                backend="nccl",
                state="measured",
                payload_bytes=2**30,
                ranks=8,
                busbw_gb_per_s=463.6,
                algbw_gb_per_s=264.9,
                verdict="pass",
                required=True,
                key=MeasurementKey(gpu_model="NVIDIA H200", gpus=8, topology="NVLink4"),
            ),
            BackendResult(
                backend="nccl", state="measured", payload_bytes=8192, ranks=8, latency_us=12.5, verdict="pass"
            ),
            BackendResult(backend="flashinfer", state="missing", reason="not installed"),
        ),
    ),
    environment=EnvironmentResult(digest="0123456789ab", generation=3),
    assigned=STACK,
)
DRIFT = HostResult(
    status="drift",
    differences=(
        DifferenceResult(path="driver.version", wanted="580.95.05", found="570.172.08"),
        DifferenceResult(path="linker.x", wanted=None, found=["a", 1]),
    ),
    findings=(
        FindingResult(
            code="BU-LNK-002",
            severity="warning",
            cause="a shadow",
            remedy="remove it",
            evidence={"wanted": "/usr/local/cuda-13.0", "found": None},
        ),
    ),
    verification=VerificationResult(state="stale"),
)
REFUSED = HostResult(
    status="refused",
    why=EVIL,
    findings=(
        FindingResult(code="BU-PRE-004", severity="info", cause="for the record", remedy="nothing"),
        FindingResult(code="BU-PRE-003", severity="error", cause=EVIL, remedy=EVIL, evidence={EVIL: EVIL}),
    ),
    pin=PinResult(digest="bad", reason=EVIL, since="2026-11-30T00:00:00Z"),
)
SLOW = HostResult(
    status="slow",
    verification=VerificationResult(
        state="none",
        backends=(
            BackendResult(
                backend="nccl",
                state="measured",
                payload_bytes=2**30,
                ranks=8,
                busbw_gb_per_s=334.0,
                verdict="fail",
                reason="NVLS likely off",
            ),
        ),
    ),
)
UNKNOWN = HostResult(status="unknown", why="ssh: connection timed out")
FAILED = HostResult(
    status="failed", why="apt ended with 100", steps=(StepResult(name="driver", status="failed", seconds=1.0),)
)


def whole() -> Results:
    hosts = {"ok": OK, "drift": DRIFT, "refused": REFUSED, "slow": SLOW, "unknown": UNKNOWN, "failed": FAILED}
    return Results.of("apply", {f"gpu-{name}": host for name, host in hosts.items()}, stack=STACK, run="r1")
