"""Keep rollouts, so that a controller that died is replaced by one that knows all that it knew."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from bringup.errors import BringupError, InputError
from bringup.history.store import History
from bringup.history.tables import OwnerRow, RolloutRow, Run, TransitionRow, WaveRow
from bringup.report.records import RolloutRecord, WaveRecord
from bringup.rollout import Rollout, Started, Transition, WaveOpened, advance, from_json, replay, to_json

# A controller renews its lease with everything it records, and by itself while it waits for hosts.
LEASE_S = 90.0


class Lease:
    """Be the right to drive something, until it was not renewed for ``LEASE_S`` seconds.

    It only keeps controllers from driving the same rollout; on a host the host's own lock decides.
    """

    def __init__(self, history: History, subject: str, owner: str) -> None:
        self._history = history
        self.subject = subject
        self.owner = owner

    def renew(self) -> None:
        """Hold it for another while. Raises BringupError when another controller has taken it over."""
        with self._history.database.writing() as session:
            self.renew_in(session)

    def renew_in(self, session: Session) -> None:
        """Renew within a transaction, which must not be committed when this raises."""
        now_s = self._history.database.now_s(session)
        renewed = session.execute(
            update(OwnerRow)
            .where(OwnerRow.subject == self.subject, OwnerRow.owner == self.owner)
            .values(expires_s=now_s + LEASE_S)
            .returning(OwnerRow.subject)
        )
        if renewed.first() is None:
            raise BringupError(
                f"{self.subject} is driven by another controller now",
                why=f"this one was silent for more than {LEASE_S:.0f} s",
            )

    def release(self) -> None:
        """Give it up; harmless when it is lost already."""
        with self._history.database.writing() as session:
            session.execute(delete(OwnerRow).where(OwnerRow.subject == self.subject, OwnerRow.owner == self.owner))


def take_lease(history: History, subject: str, who: str) -> Lease:
    """Take the right to drive something.

    Raises BringupError when another controller holds it; the error says who and since when.
    """
    lease = Lease(history, subject, uuid.uuid4().hex)
    with history.database.writing() as session:
        now_s = history.database.now_s(session)
        session.execute(delete(OwnerRow).where(OwnerRow.subject == subject, OwnerRow.expires_s <= now_s))
        values = {"subject": subject, "owner": lease.owner, "who": history.masked_text(who), "since_s": now_s}
        history.insert(session, OwnerRow, values | {"expires_s": now_s + LEASE_S})
        holder = session.get(OwnerRow, subject, populate_existing=True)
        if holder is None or holder.owner != lease.owner:
            since = datetime.fromtimestamp(holder.since_s if holder else now_s, UTC)
            raise BringupError(
                f"{subject} is driven by {holder.who if holder else 'another controller'}",
                why=f"since {since:%Y-%m-%d %H:%M:%S} UTC",
                hint=f"it is free {LEASE_S:.0f} s after that controller was last heard of",
            )
    return lease


class RolloutLog:
    """Be the story of one rollout, shared by whoever drives it and whoever asks it to pause.

    ``rollout`` is the state that the story leads to, as far as it was read.
    """

    def __init__(self, history: History, rollout_id: str, rollout: Rollout, count: int) -> None:
        self._history = history
        self.id = rollout_id
        self.rollout = rollout
        self._count = count

    def record(self, *transitions: Transition, lease: Lease | None = None) -> bool:
        """Store transitions, all or none, and return True; ``rollout`` is then the state after them.

        Returns False, with ``rollout`` brought up to date, when something that another controller stored
        meanwhile forbids one of them: decide again. With a lease they are stored only while it is held, and
        it is renewed; BringupError is raised when it is lost. Raises ValueError for a transition that could
        not have followed anyway.
        """
        with self._history.database.writing() as session:
            if lease is not None:
                lease.renew_in(session)
            has_news = self._read(session, is_writing=True)
            after, count = self.rollout, self._count
            for transition in transitions:
                clean, document = _masked(self._history, transition)
                try:
                    next_ = advance(after, clean)
                except ValueError:
                    if not has_news:
                        raise
                    session.rollback()
                    return False
                self._store(session, count, clean, document, after, next_)
                after, count = next_, count + 1
            self._summarise(session, after, count)
        self.rollout, self._count = after, count
        return True

    def refresh(self) -> bool:
        """Read what others have stored, and return whether there was anything."""
        with self._history.database.reading() as session:
            return self._read(session, is_writing=False)

    def _read(self, session: Session, *, is_writing: bool) -> bool:
        if is_writing and self._history.database.is_postgresql:
            # Whoever writes to a rollout waits here for the one who writes to it now.
            session.execute(select(RolloutRow.id).where(RolloutRow.id == self.id).with_for_update())
        news = _transitions(session, self.id, self._count)
        for transition in news:
            self.rollout = advance(self.rollout, transition)
        self._count += len(news)
        return bool(news)

    def _store(
        self,
        session: Session,
        number: int,
        transition: Transition,
        document: dict[str, Any],
        before: Rollout,
        after: Rollout,
    ) -> None:
        session.add(
            TransitionRow(
                rollout_id=self.id,
                number=number,
                time_s=transition.time_s,
                kind=transition.kind,
                document=document,
            )
        )
        if isinstance(transition, WaveOpened):
            session.add(
                WaveRow(
                    rollout_id=self.id,
                    digest=after.digest,
                    pass_name=after.current_pass,
                    number=after.wave_number,
                    hosts=list(transition.hosts),
                    opened_s=transition.time_s,
                )
            )
            session.flush()
        elif before.wave and not after.wave:
            closed = {"closed_s": transition.time_s, "outcome": _outcome(before, after)}
            session.execute(
                update(WaveRow).where(WaveRow.rollout_id == self.id, WaveRow.closed_s.is_(None)).values(**closed)
            )

    def _summarise(self, session: Session, after: Rollout, count: int) -> None:
        changed: dict[str, Any] = {
            "digest": after.digest,
            "status": after.status,
            "halt": after.halt,
            "updated_s": self._history.database.now_s(session),
            "transitions": count,
        }
        # Counting costs time in proportion to the fleet, and only the end of a wave changes the number.
        if after.wave != self.rollout.wave or after.is_over:
            changed["done"] = sum(state.phase == "done" for state in after.states.values())
        session.execute(update(RolloutRow).where(RolloutRow.id == self.id).values(**changed))


def start_rollout(history: History, started: Started, inventory: str) -> RolloutLog:
    """Store a new rollout. Raises ValueError for one that cannot be, InputError for an id that is taken."""
    rollout = replay([started])
    with history.database.writing() as session:
        if session.get(RolloutRow, started.id) is not None:
            raise InputError(f"rollout {started.id} is in the history already")
        now_s = history.database.now_s(session)
        session.add(
            RolloutRow(
                id=started.id,
                inventory=history.masked_text(inventory),
                stack=started.stack,
                digest=started.digest,
                status=rollout.status,
                hosts=len(started.hosts),
                done=0,
                created_s=now_s,
                updated_s=now_s,
                transitions=1,
            )
        )
        session.flush()
        _, document = _masked(history, started)
        session.add(
            TransitionRow(rollout_id=started.id, number=0, time_s=started.time_s, kind=started.kind, document=document)
        )
    return RolloutLog(history, started.id, rollout, 1)


def open_rollout(history: History, rollout_id: str) -> RolloutLog:
    """Read a rollout back. Raises InputError when there is none of this id."""
    with history.database.reading() as session:
        told = _transitions(session, rollout_id, 0)
    if not told:
        raise InputError(f"no rollout {rollout_id} in the history")
    return RolloutLog(history, rollout_id, replay(told), len(told))


def find_rollout(history: History, beginning: str) -> str | None:
    """Return the id of the one rollout whose id is, or begins with, a text.

    None where none or several are, or where the beginning is that of a run as well.
    """
    with history.database.reading() as session:
        chosen = select(RolloutRow.id).where(RolloutRow.id.startswith(beginning, autoescape=True))
        found = session.scalars(chosen.order_by(RolloutRow.id).limit(2)).all()
        is_a_run = session.scalar(select(Run.id).where(Run.id.startswith(beginning, autoescape=True)).limit(1))
    return found[0] if beginning in found or (len(found) == 1 and is_a_run is None) else None


def list_rollouts(
    history: History, *, inventory: str | None = None, only_unfinished: bool = False, limit: int = 20
) -> tuple[RolloutRecord, ...]:
    """Return the latest rollouts, the newest first. A rollout is finished when it is done or aborted."""
    chosen = select(RolloutRow).order_by(RolloutRow.created_s.desc(), RolloutRow.id.desc()).limit(limit)
    if inventory is not None:
        chosen = chosen.where(RolloutRow.inventory == inventory)
    if only_unfinished:
        chosen = chosen.where(RolloutRow.status.not_in(("done", "aborted")))
    with history.database.reading() as session:
        now_s = history.database.now_s(session)
        owners = {row.subject: row for row in session.scalars(select(OwnerRow)) if row.expires_s > now_s}
        return tuple(
            RolloutRecord(
                id=row.id,
                inventory=row.inventory,
                stack=row.stack,
                digest=row.digest,
                status=row.status,
                halt=row.halt,
                hosts=row.hosts,
                done=row.done,
                created_s=row.created_s,
                updated_s=row.updated_s,
                driven_by=owners[subject].who if (subject := rollout_subject(row.id)) in owners else None,
            )
            for row in session.scalars(chosen)
        )


def list_waves(history: History, rollout_id: str) -> tuple[WaveRecord, ...]:
    """Return the waves of a rollout in the order in which they were opened."""
    with history.database.reading() as session:
        rows = session.scalars(select(WaveRow).where(WaveRow.rollout_id == rollout_id).order_by(WaveRow.id))
        return tuple(
            WaveRecord(
                digest=row.digest,
                pass_name=row.pass_name,
                number=row.number,
                hosts=tuple(row.hosts),
                opened_s=row.opened_s,
                closed_s=row.closed_s,
                outcome=row.outcome,
            )
            for row in rows
        )


def rollout_subject(rollout_id: str) -> str:
    """Return the name under which a controller takes the lease of a rollout."""
    return f"rollout {rollout_id}"


def _transitions(session: Session, rollout_id: str, first: int) -> list[Transition]:
    rows: Iterable[dict[str, object]] = session.scalars(
        select(TransitionRow.document)
        .where(TransitionRow.rollout_id == rollout_id, TransitionRow.number >= first)
        .order_by(TransitionRow.number)
    )
    return [from_json(document) for document in rows]


def _masked(history: History, transition: Transition) -> tuple[Transition, dict[str, Any]]:
    """Return a transition without secrets, and its document. Only these two keys hold text from outside."""
    document: dict[str, Any] = to_json(transition)
    for key in ("why", "who"):
        if document.get(key) is not None:
            document[key] = history.masked(document[key])
    return from_json(document), document


def _outcome(before: Rollout, after: Rollout) -> str:
    phases = [after.states[name].phase for name in before.wave]
    if before.is_wave_failed:
        return "rolled back" if "stuck" not in phases else "stuck"
    return "done" if set(phases) <= {"done", "waiting"} else "incomplete"
