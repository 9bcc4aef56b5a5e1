"""Name the tables of the history. ``docs/reference/history.md`` tells what is in them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """Hold what all tables share. Times are seconds since the Unix epoch."""

    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map = {dict[str, Any]: JSON, list[Any]: JSON, str: Text}  # noqa: RUF012 - as declared there


class Meta(Base):
    """Say which version of the tables this is: one row."""

    __tablename__ = "meta"

    id: Mapped[int] = mapped_column(primary_key=True)
    schema_version: Mapped[int]


class Run(Base):
    """Be one run of a command. ``ended_s`` None: it goes on, or its controller died."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    command: Mapped[str]
    inventory: Mapped[str]
    who: Mapped[str]
    bringup: Mapped[str]
    stack_name: Mapped[str | None]
    stack_digest: Mapped[str | None]
    started_s: Mapped[float] = mapped_column(index=True)
    ended_s: Mapped[float | None]
    exit_code: Mapped[int | None]


def _run() -> Mapped[str]:
    return mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)


class HostResultRow(Base):
    """Be how one host stood at the end of a run; status unknown until then."""

    __tablename__ = "host_results"

    run_id: Mapped[str] = _run()
    host: Mapped[str] = mapped_column(String(255), primary_key=True, index=True)
    status: Mapped[str]
    changes: Mapped[int] = mapped_column(default=0)
    seconds: Mapped[float] = mapped_column(default=0.0)
    why: Mapped[str | None]
    ended_s: Mapped[float | None]
    simulated: Mapped[list[Any]] = mapped_column(default=list)
    verification: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    pin: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    environment: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    assigned: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class _Told:
    """Be something that was told about a host in a run.

    ``key`` identifies it, so that a stream of events can be read in twice without doubling anything.
    """

    id: Mapped[int] = mapped_column(primary_key=True)
    host: Mapped[str] = mapped_column(String(255))
    key: Mapped[str] = mapped_column(String(64))
    time_s: Mapped[float]


def _told(*more: Any) -> tuple[Any, ...]:
    return (UniqueConstraint("run_id", "host", "key"), *more)


class StepRow(_Told, Base):
    """Be one step on one host. ``is_lost``: its worker died and another began the host again."""

    __tablename__ = "steps"
    __table_args__ = _told()

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    name: Mapped[str]
    status: Mapped[str]
    seconds: Mapped[float]
    changes: Mapped[int]
    is_lost: Mapped[bool] = mapped_column(default=False)


class DifferenceRow(_Told, Base):
    """Be one difference between wanted and found."""

    __tablename__ = "differences"
    __table_args__ = _told()

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    path: Mapped[str]
    wanted: Mapped[Any] = mapped_column(JSON)
    found: Mapped[Any] = mapped_column(JSON)


class FindingRow(_Told, Base):
    """Be one finding."""

    __tablename__ = "findings"
    __table_args__ = _told(Index("ix_findings_code", "code"))

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    code: Mapped[str] = mapped_column(String(16))
    severity: Mapped[str] = mapped_column(String(16))
    cause: Mapped[str]
    remedy: Mapped[str]
    evidence: Mapped[dict[str, Any]]


class MeasurementRow(_Told, Base):
    """Be one backend at one payload, measured or not; the columns after ``reason`` are its comparison key."""

    __tablename__ = "measurements"
    __table_args__ = _told(Index("ix_measurements_host_time_s", "host", "time_s"))

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    backend: Mapped[str]
    state: Mapped[str] = mapped_column(String(16))
    payload_bytes: Mapped[int | None]
    ranks: Mapped[int | None]
    busbw_gb_per_s: Mapped[float | None]
    algbw_gb_per_s: Mapped[float | None]
    latency_us: Mapped[float | None]
    verdict: Mapped[str | None] = mapped_column(String(16))
    required: Mapped[bool]
    reason: Mapped[str | None]
    gpu_model: Mapped[str | None]
    gpus: Mapped[int | None]
    topology: Mapped[str | None]
    nccl_version: Mapped[str | None]
    algorithm: Mapped[str | None]


class EnvironmentRow(Base):
    """Be one environment that served on a host."""

    __tablename__ = "environments"

    host: Mapped[str] = mapped_column(String(255), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True)
    tainted: Mapped[bool]
    first_seen_s: Mapped[float]
    last_seen_s: Mapped[float]


class AssignmentRow(Base):
    """Be one change of the stack that a host records as its own; the latest one is in force."""

    __tablename__ = "assignments"
    __table_args__ = (Index("ix_assignments_host_since_s", "host", "since_s"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    host: Mapped[str] = mapped_column(String(255))
    stack_name: Mapped[str]
    stack_digest: Mapped[str]
    since_s: Mapped[float]
    run_id: Mapped[str]


class RolloutRow(Base):
    """Be one rollout. ``transitions`` counts the rows of its story; ``status`` is what they lead to."""

    __tablename__ = "rollouts"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    inventory: Mapped[str]
    stack: Mapped[str]
    digest: Mapped[str]
    status: Mapped[str] = mapped_column(String(16))
    halt: Mapped[str | None]
    hosts: Mapped[int]
    done: Mapped[int]
    created_s: Mapped[float] = mapped_column(index=True)
    updated_s: Mapped[float]
    transitions: Mapped[int]


class TransitionRow(Base):
    """Be one transition of a rollout, numbered from 0; the rollout is the fold of them."""

    __tablename__ = "rollout_transitions"

    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    time_s: Mapped[float]
    kind: Mapped[str] = mapped_column(String(16))
    document: Mapped[dict[str, Any]]


class WaveRow(Base):
    """Be one wave that was opened. ``closed_s`` None: it is open."""

    __tablename__ = "waves"
    __table_args__ = (Index("ix_waves_rollout_id", "rollout_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.id", ondelete="CASCADE"))
    digest: Mapped[str]
    pass_name: Mapped[str] = mapped_column(String(16))
    number: Mapped[int]
    hosts: Mapped[list[Any]]
    opened_s: Mapped[float]
    closed_s: Mapped[float | None]
    outcome: Mapped[str | None]


class OwnerRow(Base):
    """Say which controller drives something, and until when it may be silent."""

    __tablename__ = "owners"

    subject: Mapped[str] = mapped_column(String(255), primary_key=True)
    owner: Mapped[str] = mapped_column(String(64))
    who: Mapped[str]
    since_s: Mapped[float]
    expires_s: Mapped[float]
