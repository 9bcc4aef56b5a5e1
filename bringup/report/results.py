"""The results document: what ``--json`` prints, and what every report is drawn from.

The models are the contract; ``docs/reference/results.schema.json`` is generated from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from bringup.finding import Finding

HostStatus = Literal["ok", "drift", "slow", "refused", "failed", "unknown"]
StepStatus = Literal["unchanged", "changed", "measured", "planned", "failed", "skipped"]
BackendState = Literal["measured", "missing", "not_run"]
BackendVerdict = Literal["pass", "warn", "fail"]

_SEVERITY_ORDER = {"error": 0, "warning": 1, "info": 2}


class Model(BaseModel):
    """Be immutable, refuse unknown keys, and read dataclasses as well as JSON objects."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        from_attributes=True,
        populate_by_name=True,
        serialize_by_alias=True,
        defer_build=True,
    )


class StackRef(Model):
    """Name the stack that was wanted; ``digest`` identifies its content."""

    name: str
    digest: str


class DifferenceResult(Model):
    """Say at which path wanted and found differ, as ``drift.diff`` found it.

    ``wanted`` None: nothing should be there. ``found`` None: nothing is there.
    """

    path: str
    wanted: JsonValue = None
    found: JsonValue = None


class FindingResult(Model):
    """Carry a ``bringup.finding.Finding`` in a document."""

    code: Annotated[str, Field(pattern=r"^BU-(PRE|APT|DRV|CUD|LNK|FAB|ENV|VFY|SSH)-[0-9]{3}$")]
    severity: Literal["error", "warning", "info"]
    cause: str
    evidence: dict[str, JsonValue] = {}
    remedy: str

    @classmethod
    def of(cls, finding: Finding) -> Self:
        """Return the document form of a finding.

        Raises pydantic.ValidationError where the evidence holds something that is not a JSON value.
        """
        return cls.model_validate(finding.as_json())


class StepResult(Model):
    """Say what one step did to one host.

    ``measured``: the host was proved, and nothing on it was changed. ``planned``: a plan found something to
    do. ``skipped``: an earlier step failed, or the step was left out.
    ``changes`` counts operations that were executed.
    """

    name: str
    status: StepStatus
    seconds: Annotated[float, Field(ge=0)] = 0.0
    changes: Annotated[int, Field(ge=0)] = 0


class MeasurementKey(Model):
    """Name what must be equal before two bandwidths may be compared. None: it could not be read."""

    gpu_model: str
    gpus: Annotated[int, Field(ge=0)]
    topology: str | None = None
    nccl_version: str | None = None
    algorithm: str | None = None


class BackendResult(Model):
    """Say what one all-reduce backend gave at one payload, or why it gave nothing.

    ``busbw_gb_per_s`` and ``algbw_gb_per_s`` are in 10**9 bytes a second as nccl-tests counts them;
    ``latency_us`` is the median. ``verdict`` None: nothing judged it. ``reason`` tells why it is missing or
    was not run, or the cause of a verdict other than pass.
    """

    backend: str
    state: BackendState
    payload_bytes: Annotated[int, Field(ge=0)] | None = None
    ranks: Annotated[int, Field(ge=1)] | None = None
    busbw_gb_per_s: float | None = None
    algbw_gb_per_s: float | None = None
    latency_us: float | None = None
    verdict: BackendVerdict | None = None
    required: bool = False
    reason: str | None = None
    key: MeasurementKey | None = None


class VerificationResult(Model):
    """Say whether the host is proved, and by what.

    ``stale``: proved, but before this boot. ``none``: there is no record that counts.
    ``measured_at_s`` is seconds since the Unix epoch.
    """

    state: Literal["verified", "stale", "none"]
    measured_at_s: float | None = None
    backends: tuple[BackendResult, ...] = ()


class AcrossResult(Model):
    """Say what an all-reduce across hosts gave, or why it gave nothing.

    ``hosts`` took part, the meeting point first. ``network`` is what NCCL calls its network, such as IB or Socket, and
    None where NCCL did not run. ``not_run``: nothing was started. No backend has a verdict: no limits are known
    across hosts.
    """

    hosts: tuple[str, ...]
    state: Literal["measured", "failed", "not_run"]
    reason: str | None = None
    device: Literal["cuda", "cpu"] | None = None
    ranks: Annotated[int, Field(ge=0)] = 0
    network: str | None = None
    network_devices: tuple[str, ...] = ()
    transports: dict[str, int] = {}
    backends: tuple[BackendResult, ...] = ()


class PinResult(Model):
    """Say that a digest was rolled back here and must not return by itself.

    ``since`` is a time as in RFC 3339, in UTC.
    """

    digest: str
    reason: str
    since: str


class EnvironmentResult(Model):
    """Name the environment that ``current`` points at."""

    digest: str
    generation: Annotated[int, Field(ge=0)]
    tainted: bool = False


class HostResult(Model):
    """Say how one host stands.

    ``verification`` None: nothing was asked or known about it. ``assigned`` is the stack that the host
    records as its own. ``why`` explains failed and unknown in a line.
    """

    status: HostStatus
    simulated: tuple[str, ...] = ()
    changes: Annotated[int, Field(ge=0)] = 0
    seconds: Annotated[float, Field(ge=0)] = 0.0
    why: str | None = None
    differences: tuple[DifferenceResult, ...] = ()
    findings: tuple[FindingResult, ...] = ()
    steps: tuple[StepResult, ...] = ()
    verification: VerificationResult | None = None
    pin: PinResult | None = None
    environment: EnvironmentResult | None = None
    assigned: StackRef | None = None

    @property
    def worst_finding(self) -> FindingResult | None:
        """Return the most severe finding, the first of equals, or None."""
        return min(self.findings, key=lambda f: _SEVERITY_ORDER[f.severity], default=None)


class Summary(Model):
    """Count hosts by status. ``changed`` counts hosts that were changed, ``changes`` operations executed
    (under plan: differences)."""

    hosts: int
    ok: int = 0
    changed: int = 0
    drift: int = 0
    slow: int = 0
    refused: int = 0
    unknown: int = 0
    failed: int = 0
    changes: int = 0

    @classmethod
    def of(cls, hosts: Iterable[HostResult]) -> Self:
        """Count the given hosts."""
        seen = list(hosts)
        statuses = [host.status for host in seen]
        return cls(
            hosts=len(seen),
            ok=statuses.count("ok"),
            changed=sum(host.changes > 0 for host in seen),
            drift=statuses.count("drift"),
            slow=statuses.count("slow"),
            refused=statuses.count("refused"),
            unknown=statuses.count("unknown"),
            failed=statuses.count("failed"),
            changes=sum(host.changes for host in seen),
        )


class Results(Model):
    """Be the one document of a command. ``stack`` None: the hosts had no stack in common.

    ``across`` None: nothing was asked across hosts.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    command: str
    run: str | None = None
    stack: StackRef | None = None
    summary: Summary
    hosts: dict[str, HostResult]
    across: AcrossResult | None = None

    @classmethod
    def of(
        cls,
        command: str,
        hosts: Mapping[str, HostResult],
        *,
        stack: StackRef | None,
        run: str | None = None,
        across: AcrossResult | None = None,
    ) -> Self:
        """Put the hosts into one document, in order of their names, with the summary counted."""
        ordered = {name: hosts[name] for name in sorted(hosts)}
        # Under plan nothing is executed, so the document counts what would have to change instead.
        summary = Summary.of(ordered.values())
        if command == "plan":
            planned = sum(len(host.differences) for host in ordered.values())
            summary = summary.model_copy(update={"changes": planned, "changed": 0})
        return cls(command=command, run=run, stack=stack, summary=summary, hosts=ordered, across=across)

    @property
    def exit_code(self) -> int:
        """Return 0 where every host is as wanted, else 1."""
        return 0 if self.summary.ok == self.summary.hosts else 1

    def as_json(self) -> str:
        """Return the document as printed by ``--json``, indented, without a final newline."""
        return self.model_dump_json(indent=2)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the document; ``docs/reference/results.schema.json`` holds it."""
    # As it is written, every key is there; a reader need not expect one to be missing.
    schema = Results.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Results of a command"}
