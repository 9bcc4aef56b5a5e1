"""Write what a run tells into the history, and read it back."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pydantic import JsonValue
from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.orm import Session

from bringup.errors import BringupError, InputError
from bringup.history.database import Database
from bringup.history.tables import (
    AssignmentRow,
    Base,
    DifferenceRow,
    EnvironmentRow,
    FindingRow,
    HostResultRow,
    MeasurementRow,
    Run,
    StepRow,
)
from bringup.report import events
from bringup.report.masking import Masker
from bringup.report.records import HostRecord, RunRecord
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
from bringup.report.storable import storable, storable_event
from bringup.rollout import Bandwidth, BandwidthKey
from bringup.spool import Spool

_T = TypeVar("_T", DifferenceRow, FindingRow, StepRow, MeasurementRow)
_LOG = logging.getLogger("bringup.history")

_IS_BANDWIDTH = (
    MeasurementRow.state == "measured",
    MeasurementRow.busbw_gb_per_s.is_not(None),
    MeasurementRow.payload_bytes.is_not(None),
    MeasurementRow.gpu_model.is_not(None),
    MeasurementRow.gpus.is_not(None),
)
_IS_GOOD = (MeasurementRow.verdict.is_distinct_from("fail"),)


class History:
    """Keep runs and what they told, in a database that several controllers may share.

    Every text goes through the masker before it is stored.
    """

    def __init__(self, database: Database, masker: Masker | None = None) -> None:
        self.database = database
        self._masker = masker or Masker()

    @classmethod
    def open(cls, url: str | None = None, secrets: Iterable[str] = ()) -> History:
        """Open the history at a URL, or the default one, and store the runs that wait beside it.

        Where those cannot be stored, a warning says so, and what is there can be read.
        Raises InputError for a URL that cannot be used and BringupError for a database that cannot be reached.
        """
        history = cls(Database(url), Masker(secrets))
        try:
            history.take_in()
        except BringupError as error:
            _LOG.warning("the runs that wait beside the history are not in it yet: %s", error)
        except BaseException:
            history.close()
            raise
        return history

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def masked(self, value: JsonValue) -> JsonValue:
        """Return a JSON value as it may be stored: no secrets, and nothing that a database refuses."""
        return storable(value, self._masker)

    def masked_text(self, text: str) -> str:
        """Return a text as it may be stored."""
        return str(self.masked(text))

    # -------------------------------------------------------------------------------------------- writing

    def record(self, told: Iterable[events.Event]) -> None:
        """Store events, all of them or none; to store the same ones again changes nothing.

        Raises InputError for an event of a run that has not started, and BringupError when the database
        cannot be used.
        """
        clean = [storable_event(event, self._masker) for event in told]
        if not clean:
            return
        with self.database.writing() as session:
            for event in clean:
                self._store(session, event)

    def take_in(self) -> None:
        """Store the runs that wait in the spool. Those that go on stay there, and are stored again: it is no harm.

        What cannot be read there costs a warning. Raises BringupError when the database cannot be used.
        """
        if self.database.file is None:
            return
        spool = Spool.beside(self.database.file)
        try:
            for run in spool.waiting():
                try:
                    self.record(run.events)
                except (InputError, ValueError, OverflowError) as error:
                    # Nobody but an editor writes what passes for an event and cannot be stored.
                    _LOG.warning("%s: %s", run.file, error)
                    run.put_aside()
                    continue
                if not run.is_live:
                    run.file.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("%s cannot be read, or not be emptied: %s", spool.directory, error.strerror)

    def _store(self, session: Session, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self._start(session, event)
                return
            case events.CommandStarted():
                return  # for the live stream only: commands would fill the history and tell nothing later
            case events.AcrossMeasured():
                return  # no host's figure: nothing of one host may ever be compared with it
            case events.RolloutTold():
                return  # its log keeps it
            case events.StepStarted() | events.HostConnected():
                return  # the end of a step tells both
        if session.get(Run, event.run) is None:
            raise InputError(f"run {event.run} has not started, and cannot go on")
        match event:
            case events.StepDone():
                step = {"name": event.step, "status": event.status, "changes": event.changes}
                self._tell(session, StepRow, event, step | {"seconds": event.seconds}, is_timed=True)
            case events.DifferenceSeen(difference=difference):
                self._tell(session, DifferenceRow, event, difference.model_dump())
            case events.FindingSeen(finding=finding):
                self._tell(session, FindingRow, event, finding.model_dump())
            case events.MeasurementTaken(measurement=measurement):
                self._tell(session, MeasurementRow, event, _measurement(measurement), is_timed=True)
            case events.HostDone():
                self._end_host(session, event)
            case events.WorkerLost():
                self._lose(session, event)
            case events.RunDone():
                ended = {"ended_s": event.time_s, "exit_code": event.exit_code}
                session.execute(update(Run).where(Run.id == event.run).values(**ended))

    def _start(self, session: Session, event: events.RunStarted) -> None:
        stack = event.stack
        self.insert(
            session,
            Run,
            {
                "id": event.run,
                "command": event.command,
                "inventory": event.inventory,
                "who": event.who,
                "bringup": event.bringup,
                "stack_name": stack.name if stack else None,
                "stack_digest": stack.digest if stack else None,
                "started_s": event.time_s,
            },
        )
        # Hosts are unknown until they are done, so a controller that dies leaves no host out.
        for host in event.hosts:
            self.insert(session, HostResultRow, {"run_id": event.run, "host": host, "status": "unknown"})

    def _tell(
        self, session: Session, table: type[Base], event: Any, values: dict[str, Any], *, is_timed: bool = False
    ) -> None:
        # Measured twice is two measurements, but a difference that is seen twice is one difference.
        content = [values, event.time_s] if is_timed else values
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        told = {"run_id": event.run, "host": event.host, "time_s": event.time_s, "key": key}
        self.insert(session, table, told | values)

    def _end_host(self, session: Session, event: events.HostDone) -> None:
        lost = select(func.coalesce(func.sum(StepRow.changes), 0)).where(
            StepRow.run_id == event.run, StepRow.host == event.host, StepRow.is_lost
        )
        document = json.loads(event.model_dump_json())
        values = {
            "status": event.status,
            "changes": event.changes + int(session.scalar(lost) or 0),
            "seconds": event.seconds,
            "why": event.why,
            "ended_s": event.time_s,
            "simulated": document["simulated"],
            "verification": document["verification"],
            "pin": document["pin"],
            "environment": document["environment"],
            "assigned": document["assigned"],
        }
        keys = {"run_id": event.run, "host": event.host}
        self.insert(session, HostResultRow, keys | values, else_update=values)
        if event.environment is not None:
            self._see_environment(session, event, event.environment)
        if event.assigned is not None:
            self._see_assignment(session, event, event.assigned)

    def _see_environment(self, session: Session, event: events.HostDone, environment: EnvironmentResult) -> None:
        keys = {"host": event.host, "digest": environment.digest, "generation": environment.generation}
        known = session.get(EnvironmentRow, keys)
        if known is not None and known.last_seen_s > event.time_s:
            # A run that waited is stored after later ones, and must not take back what they saw.
            known.first_seen_s = min(known.first_seen_s, event.time_s)
            return
        seen = {"tainted": environment.tainted, "last_seen_s": event.time_s}
        self.insert(session, EnvironmentRow, keys | seen | {"first_seen_s": event.time_s}, else_update=seen)

    def _see_assignment(self, session: Session, event: events.HostDone, assigned: StackRef) -> None:
        latest = session.scalar(
            select(AssignmentRow)
            .where(AssignmentRow.host == event.host, AssignmentRow.since_s <= event.time_s)
            .order_by(AssignmentRow.since_s.desc(), AssignmentRow.id.desc())
            .limit(1)
        )
        if latest is not None and (latest.stack_name, latest.stack_digest) == (assigned.name, assigned.digest):
            return
        session.add(
            AssignmentRow(
                host=event.host,
                stack_name=assigned.name,
                stack_digest=assigned.digest,
                since_s=event.time_s,
                run_id=event.run,
            )
        )
        session.flush()

    def _lose(self, session: Session, event: events.WorkerLost) -> None:
        """Forget what a lost worker told of hosts that it had not finished, but not what it had changed."""
        unfinished = session.scalars(
            select(HostResultRow.host).where(
                HostResultRow.run_id == event.run,
                HostResultRow.host.in_(event.hosts),
                HostResultRow.ended_s.is_(None),
            )
        ).all()
        session.execute(
            update(StepRow).where(StepRow.run_id == event.run, StepRow.host.in_(unfinished)).values(is_lost=True)
        )
        for table in (DifferenceRow, FindingRow):
            session.execute(delete(table).where(table.run_id == event.run, table.host.in_(unfinished)))

    def insert(
        self,
        session: Session,
        table: type[Base],
        values: dict[str, Any],
        else_update: dict[str, Any] | None = None,
    ) -> None:
        """Insert a row unless it is there already; then update it, or leave it."""
        keys = table.__mapper__.primary_key
        if self.database.is_postgresql:
            from sqlalchemy.dialects import postgresql  # it brings every driver's dialect along

            into = postgresql.insert(table).values(**values)
            session.execute(
                into.on_conflict_do_update(index_elements=keys, set_=else_update)
                if else_update
                else into.on_conflict_do_nothing()
            )
        else:
            other = sqlite.insert(table).values(**values)
            session.execute(
                other.on_conflict_do_update(index_elements=keys, set_=else_update)
                if else_update
                else other.on_conflict_do_nothing()
            )

    def prune(self, before_s: float) -> int:
        """Delete runs that started before a time, with all that they told; return how many.

        Environments, assignments and rollouts stay.
        """
        with self.database.writing() as session:
            gone = session.scalars(delete(Run).where(Run.started_s < before_s).returning(Run.id)).all()
            return len(gone)

    # -------------------------------------------------------------------------------------------- reading

    def runs(self, *, host: str | None = None, limit: int = 20) -> tuple[RunRecord, ...]:
        """Return the latest runs, the newest first; only those that looked at ``host`` when it is given."""
        counted = (
            select(
                Run,
                func.count(HostResultRow.host),
                func.coalesce(func.sum(HostResultRow.changes), 0),
            )
            .outerjoin(HostResultRow, HostResultRow.run_id == Run.id)
            .group_by(Run.id)
            .order_by(Run.started_s.desc(), Run.id)
            .limit(limit)
        )
        if host is not None:
            looked_at = select(HostResultRow.run_id).where(HostResultRow.host == host)
            counted = counted.where(Run.id.in_(looked_at))
        with self.database.reading() as session:
            return tuple(
                RunRecord(
                    id=run.id,
                    command=run.command,
                    inventory=run.inventory,
                    who=run.who,
                    stack=_stack(run),
                    started_s=run.started_s,
                    ended_s=run.ended_s,
                    exit_code=run.exit_code,
                    hosts=hosts,
                    changes=changes,
                )
                for run, hosts, changes in session.execute(counted)
            )

    def results(self, run_id: str) -> Results:
        """Return the results document of a run; of one that goes on, as far as it has come.

        ``run_id`` may be the beginning of one id. Raises InputError when no run, or more than one, has it.
        """
        with self.database.reading() as session:
            found = session.scalars(
                select(Run).where(Run.id.startswith(run_id, autoescape=True)).order_by(Run.id).limit(2)
            ).all()
            exact = [run for run in found if run.id == run_id]
            if len(exact or found) != 1:
                many = "more than one run" if found else "no run"
                raise InputError(f"{many} in the history has an id that begins with {run_id!r}")
            run = (exact or found)[0]
            rows = session.scalars(select(HostResultRow).where(HostResultRow.run_id == run.id)).all()
            hosts = {row.host: self._host_result(session, row) for row in rows}
            return Results.of(run.command, hosts, stack=_stack(run), run=run.id)

    def hosts(self) -> tuple[HostRecord, ...]:
        """Return the latest result of every host that any run came to an end with, in order of names."""
        ranked = (
            select(
                HostResultRow.run_id,
                HostResultRow.host,
                func.row_number()
                .over(
                    partition_by=HostResultRow.host,
                    order_by=(HostResultRow.ended_s.desc(), HostResultRow.run_id),
                )
                .label("place"),
            )
            .where(HostResultRow.ended_s.is_not(None))
            .subquery()
        )
        latest = (
            select(HostResultRow, Run.command)
            .join(Run, Run.id == HostResultRow.run_id)
            .join(
                ranked,
                (ranked.c.run_id == HostResultRow.run_id) & (ranked.c.host == HostResultRow.host),
            )
            .where(ranked.c.place == 1)
            .order_by(HostResultRow.host)
        )
        with self.database.reading() as session:
            proved = dict(
                session.execute(
                    select(MeasurementRow.host, func.max(MeasurementRow.time_s))
                    .where(MeasurementRow.state == "measured", MeasurementRow.verdict.in_(("pass", "warn")))
                    .group_by(MeasurementRow.host)
                ).all()
            )
            return tuple(
                HostRecord(
                    host=row.host,
                    run=row.run_id,
                    command=command,
                    seen_s=row.ended_s or 0.0,
                    result=self._host_result(session, row),
                    verified_s=proved.get(row.host),
                )
                for row, command in session.execute(latest)
            )

    def own_bandwidths(self, host: str, *, without_run: str | None = None, most: int = 200) -> tuple[Bandwidth, ...]:
        """Return the last good bandwidths of a host, the newest first, without those of one run.

        Those that failed their limit are left out: a host must not become its own excuse.
        """
        rows = (
            select(MeasurementRow)
            .where(*_IS_BANDWIDTH, *_IS_GOOD, MeasurementRow.host == host)
            .where(MeasurementRow.run_id.is_distinct_from(without_run))
            .order_by(MeasurementRow.time_s.desc(), MeasurementRow.id.desc())
            .limit(most)
        )
        with self.database.reading() as session:
            return tuple(_bandwidth(row) for row in session.scalars(rows))

    def latest_bandwidths(self, host: str) -> tuple[str | None, tuple[Bandwidth, ...]]:
        """Return the last run that measured a host, and its bandwidths, good or not. None: there is no such run."""
        newest = (
            select(MeasurementRow.run_id)
            .where(*_IS_BANDWIDTH, MeasurementRow.host == host)
            .order_by(MeasurementRow.time_s.desc(), MeasurementRow.id.desc())
            .limit(1)
        )
        with self.database.reading() as session:
            run = session.scalar(newest)
            rows = session.scalars(
                select(MeasurementRow)
                .where(*_IS_BANDWIDTH, MeasurementRow.host == host, MeasurementRow.run_id == run)
                .order_by(MeasurementRow.id)
            )
            return run, tuple(_bandwidth(row) for row in rows)

    def fleet_bandwidths(self, *, without: str) -> tuple[Bandwidth, ...]:
        """Return the latest good bandwidth of every other host for each thing that it measured."""
        table = MeasurementRow
        of = (table.host, table.gpu_model, table.gpus, table.topology, table.nccl_version, table.algorithm)
        place = func.row_number().over(
            partition_by=(*of, table.payload_bytes), order_by=(table.time_s.desc(), table.id.desc())
        )
        ranked = (
            select(table.id, place.label("place")).where(*_IS_BANDWIDTH, *_IS_GOOD, table.host != without).subquery()
        )
        rows = select(table).join(ranked, ranked.c.id == table.id).where(ranked.c.place == 1).order_by(table.host)
        with self.database.reading() as session:
            return tuple(_bandwidth(row) for row in session.scalars(rows))

    def known_findings(self, host: str) -> frozenset[str] | None:
        """Return the codes of errors and warnings of the last run that ended with a host; None: there is none."""
        newest = (
            select(HostResultRow.run_id)
            .where(HostResultRow.host == host, HostResultRow.ended_s.is_not(None))
            .order_by(HostResultRow.ended_s.desc())
            .limit(1)
        )
        with self.database.reading() as session:
            run = session.scalar(newest)
            if run is None:
                return None
            codes = select(FindingRow.code).where(
                FindingRow.run_id == run, FindingRow.host == host, FindingRow.severity != "info"
            )
            return frozenset(session.scalars(codes))

    def _host_result(self, session: Session, row: HostResultRow) -> HostResult:
        def told(table: type[_T]) -> Sequence[_T]:
            mine = select(table).where(table.run_id == row.run_id, table.host == row.host)
            return session.scalars(mine.order_by(table.time_s, table.id)).all()

        steps = [step for step in told(StepRow) if not step.is_lost]
        verification = VerificationResult.model_validate(row.verification) if row.verification else None
        measured = tuple(_backend(one) for one in told(MeasurementRow))
        if verification is not None and measured and not verification.backends:
            verification = verification.model_copy(update={"backends": measured})
        is_done = row.ended_s is not None
        return HostResult(
            status=row.status,
            simulated=tuple(row.simulated),
            changes=row.changes if is_done else sum(step.changes for step in steps),
            seconds=row.seconds,
            why=row.why if is_done else "the run ended before this host was done",
            differences=tuple(
                DifferenceResult(path=one.path, wanted=one.wanted, found=one.found) for one in told(DifferenceRow)
            ),
            findings=tuple(FindingResult.model_validate(_columns(one)) for one in told(FindingRow)),
            steps=tuple(
                StepResult(name=one.name, status=one.status, seconds=one.seconds, changes=one.changes) for one in steps
            ),
            verification=verification,
            pin=PinResult.model_validate(row.pin) if row.pin else None,
            environment=EnvironmentResult.model_validate(row.environment) if row.environment else None,
            assigned=StackRef.model_validate(row.assigned) if row.assigned else None,
        )


class Recorder:
    """Take a run's events as they come, and store them in few transactions.

    What changes something is stored at once; what only tells may wait half a second. A database that fails in
    the middle of a run does not stop the run: the events are kept and tried again, and ``problem`` says what
    is wrong for as long as some are not stored.
    """

    _MOST_WAITING = 200
    _LONGEST_WAIT_S = 0.5

    def __init__(self, history: History) -> None:
        self._history = history
        self._waiting: list[events.Event] = []
        self._since_s = 0.0
        self.problem: BringupError | None = None

    def __call__(self, event: events.Event) -> None:
        """Take one event."""
        if not self._waiting:
            self._since_s = time.monotonic()
        self._waiting.append(event)
        is_urgent = isinstance(
            event, events.RunStarted | events.StepStarted | events.StepDone | events.WorkerLost | events.RunDone
        )
        is_late = time.monotonic() - self._since_s > self._LONGEST_WAIT_S
        if is_urgent or is_late or len(self._waiting) >= self._MOST_WAITING:
            self.flush()

    def close(self) -> None:
        """Store what is waiting and close the history."""
        self.flush()
        self._history.close()

    def flush(self) -> None:
        """Store what is waiting."""
        try:
            self._history.record(self._waiting)
        except BringupError as error:
            if self.problem is None:
                _LOG.warning("%s", error)
            self.problem = error
        else:
            self.problem = None
            self._waiting.clear()


def recorder(url: str | None = None, secrets: Iterable[str] = ()) -> Recorder:
    """Open the history for a run; give the run's events to what is returned.

    Raises InputError and BringupError as ``History.open`` does, and where runs that wait cannot be stored: the
    beginning of this one may be among them.
    """
    history = History(Database(url), Masker(secrets))
    try:
        history.take_in()
    except BaseException:
        history.close()
        raise
    return Recorder(history)


def _measurement(measurement: BackendResult) -> dict[str, Any]:
    key = measurement.key.model_dump() if measurement.key else dict.fromkeys(MeasurementKey.model_fields)
    return measurement.model_dump(exclude={"key"}) | key


def _backend(row: MeasurementRow) -> BackendResult:
    columns = _columns(row)
    key = {name: columns[name] for name in MeasurementKey.model_fields}
    rest = {name: columns[name] for name in BackendResult.model_fields if name != "key"}
    return BackendResult(**rest, key=MeasurementKey(**key) if row.gpu_model is not None else None)


def _columns(row: Base) -> dict[str, Any]:
    names = {column.key for column in row.__mapper__.column_attrs}
    unwanted = {"id", "run_id", "host", "key", "time_s"}
    return {name: getattr(row, name) for name in names - unwanted}


def _bandwidth(row: MeasurementRow) -> Bandwidth:
    return Bandwidth(
        BandwidthKey(
            gpu_model=row.gpu_model or "",
            gpus=row.gpus or 0,
            topology=row.topology,
            nccl_version=row.nccl_version,
            algorithm=row.algorithm,
            payload_bytes=row.payload_bytes or 0,
        ),
        busbw_gb_per_s=row.busbw_gb_per_s or 0.0,
        verdict=row.verdict,  # type: ignore[arg-type]
    )


def _stack(run: Run) -> StackRef | None:
    if run.stack_name is None or run.stack_digest is None:
        return None
    return StackRef(name=run.stack_name, digest=run.stack_digest)
