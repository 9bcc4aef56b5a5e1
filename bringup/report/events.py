"""The event stream: one JSON line per event, from which progress, history and results are made.

The models are the contract; ``docs/reference/events.schema.json`` is generated from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic_core import from_json

from bringup.finding import Finding
from bringup.report.results import (
    AcrossResult,
    BackendResult,
    DifferenceResult,
    EnvironmentResult,
    FindingResult,
    HostResult,
    HostStatus,
    Model,
    PinResult,
    Results,
    StackRef,
    StepResult,
    StepStatus,
    VerificationResult,
)
from bringup.rollout import Rollout, Status, Transition


class _Event(Model):
    model_config = ConfigDict(allow_inf_nan=False)  # JSON has no such numbers, so they could not be written again

    time_s: float  # seconds since the Unix epoch, by the controller's clock
    run: str

    def as_line(self) -> str:
        """Return the event as one JSON line, without the newline; keys that are None are left out."""
        return self.model_dump_json(exclude_none=True)


class _HostEvent(_Event):
    host: str


class RunStarted(_Event):
    """A run began. ``who`` is user@controller; ``hosts`` is every host that it will look at."""

    event: Literal["run_started"] = "run_started"
    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    command: str
    inventory: str
    who: str
    bringup: str
    stack: StackRef | None = None
    hosts: tuple[str, ...] = ()


class HostConnected(_HostEvent):
    """The host answered ssh; ``seconds`` is how long that took."""

    event: Literal["host_connected"] = "host_connected"
    seconds: Annotated[float, Field(ge=0)] = 0.0


class StepStarted(_HostEvent):
    """A step began on a host."""

    event: Literal["step_started"] = "step_started"
    step: str


class CommandStarted(_HostEvent):
    """A command is about to run on a host; ``number`` counts from 1 within a host's run. Secrets are masked."""

    event: Literal["command"] = "command"
    number: Annotated[int, Field(ge=1)]
    command: str


class StepDone(_HostEvent):
    """A step ended on a host; ``changes`` counts the operations that it executed."""

    event: Literal["step_done"] = "step_done"
    step: str
    status: StepStatus
    seconds: Annotated[float, Field(ge=0)] = 0.0
    changes: Annotated[int, Field(ge=0)] = 0


class FindingSeen(_HostEvent):
    """A rule said something about a host."""

    event: Literal["finding"] = "finding"
    finding: FindingResult

    @classmethod
    def of(cls, finding: Finding, *, time_s: float, run: str, host: str) -> Self:
        """Return the event for a finding."""
        return cls(time_s=time_s, run=run, host=host, finding=FindingResult.of(finding))


class DifferenceSeen(_HostEvent):
    """Wanted and found differ on a host."""

    event: Literal["difference"] = "difference"
    difference: DifferenceResult


class MeasurementTaken(_HostEvent):
    """A backend was measured on a host, or could not be."""

    event: Literal["measurement"] = "measurement"
    measurement: BackendResult


class AcrossMeasured(_HostEvent):
    """All-reduce across hosts ended, well or not; ``host`` is the one where they met."""

    event: Literal["across"] = "across"
    across: AcrossResult


class HostDone(_HostEvent):
    """The run is finished with a host, well or not. What earlier events told is not repeated here."""

    event: Literal["host_done"] = "host_done"
    status: HostStatus
    simulated: tuple[str, ...] = ()
    changes: Annotated[int, Field(ge=0)] = 0
    seconds: Annotated[float, Field(ge=0)] = 0.0
    why: str | None = None
    verification: VerificationResult | None = None
    pin: PinResult | None = None
    environment: EnvironmentResult | None = None
    assigned: StackRef | None = None


class WorkerLost(_Event):
    """A worker process ended without finishing its hosts."""

    event: Literal["worker_lost"] = "worker_lost"
    worker: str
    hosts: tuple[str, ...]
    why: str


class RolloutTold(_Event):
    """Something happened to a rollout; ``transition`` is what the history keeps of it."""

    event: Literal["rollout"] = "rollout"
    rollout: str
    status: Status
    transition: Transition

    @classmethod
    def of(cls, transition: Transition, rollout: Rollout, *, run: str) -> Self:
        """Return the event for a transition; ``rollout`` is the state after it."""
        return cls(time_s=transition.time_s, run=run, rollout=rollout.id, status=rollout.status, transition=transition)


class RunDone(_Event):
    """A run ended; ``exit_code`` is what the command exits with."""

    event: Literal["run_done"] = "run_done"
    exit_code: int
    seconds: Annotated[float, Field(ge=0)] = 0.0


Event = Annotated[
    RunStarted
    | HostConnected
    | StepStarted
    | CommandStarted
    | StepDone
    | FindingSeen
    | DifferenceSeen
    | MeasurementTaken
    | AcrossMeasured
    | HostDone
    | WorkerLost
    | RolloutTold
    | RunDone,
    Field(discriminator="event"),
]

ADAPTER: TypeAdapter[Event] = TypeAdapter(Event, config=ConfigDict(defer_build=True))

_BY_NAME: dict[object, type[_Event]] = {
    model.model_fields["event"].default: model for model in get_args(get_args(Event)[0])
}


def parse(line: str | bytes) -> Event:
    """Read one line of an event stream.

    Raises pydantic.ValidationError for a line that is not an event of schema 1.
    """
    # Pydantic's own parser: Python's accepts other encodings and half characters, and gives up on a deep document.
    try:
        model = _model_of(from_json(line))
    except (ValueError, TypeError):
        model = None
    return cast(Event, model.model_validate_json(line)) if model is not None else ADAPTER.validate_json(line)


def of_document(document: object) -> Event:
    """Return the event that a JSON object is. Raises pydantic.ValidationError for anything else."""
    model = _model_of(document)
    return cast(Event, model.model_validate(document)) if model is not None else ADAPTER.validate_python(document)


def _model_of(document: object) -> type[_Event] | None:
    # Most runs see five kinds of events; to ask for "any of them" would build the models of all.
    name = document.get("event") if isinstance(document, dict) else None
    return _BY_NAME.get(name) if isinstance(name, str) else None


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of one event; ``docs/reference/events.schema.json`` holds it."""
    schema = ADAPTER.json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "One event"}


class Collector:
    """Gather a run's events into its results; events of one host may arrive between those of others."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.done: RunDone | None = None
        self.across: AcrossResult | None = None
        self._hosts: dict[str, list[Event]] = {}
        self._lost: set[str] = set()
        self._changes_lost: dict[str, int] = {}

    def add(self, event: Event) -> None:
        """Take one event."""
        match event:
            case RunStarted():
                self.started = event
                for host in event.hosts:
                    self._hosts.setdefault(host, [])
            case RunDone():
                self.done = event
            case WorkerLost():
                self._lost.update(host for host in event.hosts if not self._is_done(host))
            case AcrossMeasured():
                self.across = event.across
            case RolloutTold():
                pass  # the rollout has a document of its own
            case _:
                if event.host in self._lost:
                    self._begin_again(event.host)
                self._hosts.setdefault(event.host, []).append(event)

    def results(self, command: str | None = None, stack: StackRef | None = None) -> Results:
        """Return the results so far; a host without ``host_done`` is unknown.

        ``command`` and ``stack`` are those of ``run_started`` unless given.
        """
        if self.started is not None:
            command = command or self.started.command
            stack = stack or self.started.stack
        return Results.of(
            command or "",
            {host: _host_result(events, self._changes_lost.get(host, 0)) for host, events in self._hosts.items()},
            stack=stack,
            run=self.started.run if self.started else None,
            across=self.across,
        )

    def _is_done(self, host: str) -> bool:
        return any(isinstance(event, HostDone) for event in self._hosts.get(host, ()))

    def _begin_again(self, host: str) -> None:
        # A shard that another worker took over tells each host's story from the start; only the operations
        # that the lost worker had executed are not told a second time.
        story = self._hosts.get(host, [])
        changes = sum(event.changes for event in story if isinstance(event, StepDone))
        self._changes_lost[host] = self._changes_lost.get(host, 0) + changes
        self._hosts[host] = []
        self._lost.discard(host)


def collect(events: Iterable[Event]) -> Results:
    """Return the results that a whole stream tells."""
    collector = Collector()
    for event in events:
        collector.add(event)
    return collector.results()


def _host_result(told: list[Event], changes_before: int) -> HostResult:
    done = next((event for event in reversed(told) if isinstance(event, HostDone)), None)
    steps = tuple(
        StepResult(name=event.step, status=event.status, seconds=event.seconds, changes=event.changes)
        for event in told
        if isinstance(event, StepDone)
    )
    differences = tuple(event.difference for event in told if isinstance(event, DifferenceSeen))
    findings = tuple(event.finding for event in told if isinstance(event, FindingSeen))
    measured = tuple(event.measurement for event in told if isinstance(event, MeasurementTaken))
    if done is None:
        return HostResult(
            status="unknown",
            why="the run ended before this host was done",
            changes=changes_before + sum(step.changes for step in steps),
            differences=differences,
            findings=findings,
            steps=steps,
        )
    verification = done.verification
    if verification is not None and measured and not verification.backends:
        verification = verification.model_copy(update={"backends": measured})
    return HostResult(
        status=done.status,
        simulated=done.simulated,
        changes=changes_before + done.changes,
        seconds=done.seconds,
        why=done.why,
        differences=differences,
        findings=findings,
        steps=steps,
        verification=verification,
        pin=done.pin,
        environment=done.environment,
        assigned=done.assigned,
    )
