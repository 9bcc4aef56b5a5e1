"""What the history tells: runs, hosts, rollouts and waves, as ``--json`` prints them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bringup.report.results import HostResult, Model, StackRef
from bringup.rollout import Pass, Phase, Rollout, Status

RolloutCount = Annotated[int, Field(ge=0)]


class RunRecord(Model):
    """Be one run as it is listed. ``exit_code`` None: it goes on, or its controller died."""

    id: str
    command: str
    inventory: str
    who: str
    stack: StackRef | None
    started_s: float
    ended_s: float | None
    exit_code: int | None
    hosts: int
    changes: int


class HostRecord(Model):
    """Be what is known of a host: its result in the last run that came to an end with it.

    ``verified_s`` is when it was last measured and found good, None when never.
    """

    host: str
    run: str
    command: str
    seen_s: float
    result: HostResult
    verified_s: float | None


class WaveRecord(Model):
    """Be one wave that was opened. ``closed_s`` and ``outcome`` None: it is open."""

    digest: str
    pass_name: str
    number: int
    hosts: tuple[str, ...]
    opened_s: float
    closed_s: float | None
    outcome: str | None


class RolloutRecord(Model):
    """Be one rollout as it is listed. ``driven_by`` None: no controller drives it now."""

    id: str
    inventory: str
    stack: str
    digest: str
    status: str
    halt: str | None
    hosts: int
    done: int
    created_s: float
    updated_s: float
    driven_by: str | None


class RolloutHostResult(Model):
    """Say how far a rollout has come with one host. ``wave`` counts planned waves from 1."""

    phase: Phase
    wave: Annotated[int, Field(ge=1)]
    is_reachable: bool = True
    why: str | None = None


class RolloutSummary(Model):
    """Count the hosts of a rollout. ``failed`` includes those that did not answer."""

    hosts: RolloutCount
    done: RolloutCount
    failed: RolloutCount
    untouched: RolloutCount


class RolloutResults(Model):
    """Be the one document of ``bringup rollout``.

    ``status`` is ``planned`` for a dry run. ``halt`` says why it stopped, ``resume`` is the command that goes on,
    None where nothing is left to do.
    ``wave`` is the open wave.
    """

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    command: Literal["rollout"] = "rollout"
    rollout: str
    stack: StackRef
    status: Status | Literal["planned"]
    halt: str | None = None
    resume: str | None = None
    passes: tuple[Pass, ...]
    waves: tuple[tuple[str, ...], ...]
    wave: tuple[str, ...] = ()
    summary: RolloutSummary
    hosts: dict[str, RolloutHostResult]

    @classmethod
    def of(cls, rollout: Rollout, *, resume: str | None = None) -> RolloutResults:
        """Return the document of a rollout; ``resume`` is dropped when it is done or aborted."""
        hosts = {
            name: RolloutHostResult(
                phase=rollout.states[name].phase,
                wave=at,
                is_reachable=name not in rollout.unreachable,
                why=rollout.states[name].why,
            )
            for at, wave in enumerate(rollout.waves, start=1)
            for name in wave
        }
        phases = [host.phase for host in hosts.values()]
        return cls(
            rollout=rollout.id,
            stack=StackRef(name=rollout.stack, digest=rollout.digest),
            status=rollout.status,
            halt=rollout.halt,
            resume=None if rollout.status in ("done", "aborted") else resume,
            passes=rollout.passes,
            waves=rollout.waves,
            wave=rollout.wave,
            summary=RolloutSummary(
                hosts=len(hosts),
                done=phases.count("done"),
                failed=len(rollout.failed),
                untouched=phases.count("waiting") + phases.count("prepared"),
            ),
            hosts=hosts,
        )

    @property
    def exit_code(self) -> int:
        """Return 0 where every host is where the stack wants it and answers, else 1."""
        return 0 if self.status == "done" and self.summary.failed == 0 else 1

    def as_json(self) -> str:
        """Return the document as printed by ``--json``, indented, without a final newline."""
        return self.model_dump_json(indent=2)


class HistoryDocument(Model):
    """Be the one document of ``bringup history``, the newest run first."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    command: Literal["history"] = "history"
    runs: tuple[RunRecord, ...]

    def as_json(self) -> str:
        """Return the document as printed by ``--json``, indented, without a final newline."""
        return self.model_dump_json(indent=2)


class StatusDocument(Model):
    """Be the one document of ``bringup status``: hosts as they were last seen, and rollouts that go on."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    command: Literal["status"] = "status"
    hosts: tuple[HostRecord, ...]
    rollouts: tuple[RolloutRecord, ...] = ()

    @property
    def exit_code(self) -> int:
        """Return 0 where every host was last seen as wanted, else 1."""
        return 0 if all(host.result.status == "ok" for host in self.hosts) else 1

    def as_json(self) -> str:
        """Return the document as printed by ``--json``, indented, without a final newline."""
        return self.model_dump_json(indent=2)
