"""Open the database of the history: SQLite beside the user's other state, PostgreSQL for a team."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, func, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from bringup import paths
from bringup.errors import BringupError, InputError
from bringup.history.tables import Base, Meta

BUSY_TIMEOUT_S = 30
# What turns version N of the tables into N + 1, at place N - 1. A statement list says it better than code.
MIGRATIONS: Sequence[Sequence[str]] = ()
_WANTED = "wanted sqlite:///PATH or postgresql://USER@HOST/DATABASE in BRINGUP_HISTORY"
_ADVISORY_LOCK = 0x6272696E67757000  # "bringup\0", so that no other program takes it by chance


class Database:
    """Hold one open database, its tables brought up to date.

    Raises InputError for a URL that cannot be used and BringupError for a database that cannot be reached.
    """

    def __init__(self, url: str | None = None, *, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> None:
        self.url = _parsed(url or paths.history_url())
        self.is_postgresql = self.url.get_backend_name() == "postgresql"
        self.file = None if self.is_postgresql else Path(self.url.database or "")
        self._engine = self._open()
        self._writing = self._engine.execution_options(bringup_writes=True)
        try:
            with self.translated():
                self._bring_up_to_date(migrations)
        except BaseException:
            self.close()
            raise

    @property
    def shown_url(self) -> str:
        """Return the URL without its password."""
        # As it was written: which driver reads it is nobody's concern.
        return self.url.set(drivername=self.url.get_backend_name()).render_as_string(hide_password=True)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Open a session that changes nothing."""
        with self.translated(), Session(self._engine) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Open a session that is committed at its end, whole or not at all.

        With SQLite it waits for its turn to write, so what it reads cannot change before it writes.
        """
        with self.translated(), Session(self._writing) as session, session.begin():
            yield session

    def now_s(self, session: Session) -> float:
        """Return the time by the one clock that all controllers of this database share."""
        if self.is_postgresql:
            return float(session.scalar(select(func.extract("epoch", func.clock_timestamp()))) or 0.0)
        return time.time()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turn errors of the database into ours; its own may quote the URL, or the values of a row."""
        try:
            yield
        except SQLAlchemyError as error:
            driver = error.orig if isinstance(error, DBAPIError) else None
            why = str(driver or type(error).__name__).strip().split("\n")[0]
            if self.url.password:
                why = why.replace(self.url.password, "***")
            raise BringupError(
                f"the history at {self.shown_url} cannot be used",
                why=why,
                hint="BRINGUP_HISTORY names another database",
            ) from None

    def _open(self) -> Engine:
        options: dict[str, Any] = {"hide_parameters": True}
        if self.is_postgresql:
            options |= {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}}
        else:
            self._make_file()
            options |= {"connect_args": {"timeout": BUSY_TIMEOUT_S}}
        try:
            engine = create_engine(self.url, **options)
        except ModuleNotFoundError as error:
            raise InputError(
                f"the history at {self.shown_url} needs the Python package {error.name}",
                hint="install bringup with its extra: bringup[postgresql]",
            ) from None
        if not self.is_postgresql:
            event.listen(engine, "connect", _connected)
            event.listen(engine, "begin", _begun)
        return engine

    def _make_file(self) -> None:
        name = self.url.database
        if not name or name == ":memory:":
            raise InputError(f"the history needs a file, found {self.shown_url}", hint=_WANTED)
        file = Path(name)
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # SQLite gives its journal the mode of the database, so nobody else can read either.
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        except OSError as error:
            raise BringupError(
                f"the history at {file} cannot be used",
                why=error.strerror,
                hint="BRINGUP_HISTORY names another database",
            ) from None

    def _bring_up_to_date(self, migrations: Sequence[Sequence[str]]) -> None:
        newest = 1 + len(migrations)
        with self._engine.connect() as connection:
            if _version(connection) == newest:
                return
        with self._writing.begin() as connection:
            if self.is_postgresql:
                connection.execute(select(func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
            version = _version(connection)
            if version is None:
                Base.metadata.create_all(connection)
                connection.execute(Meta.__table__.insert().values(id=1, schema_version=newest))  # type: ignore[attr-defined]
                return
            if version > newest:
                raise InputError(
                    f"the history at {self.shown_url} has tables of version {version}, this bringup knows {newest}",
                    hint="use the newer bringup that made it, or another database through BRINGUP_HISTORY",
                )
            for statements in migrations[version - 1 :]:
                for statement in statements:
                    connection.execute(text(statement))
            connection.execute(Meta.__table__.update().values(schema_version=newest))  # type: ignore[attr-defined]


def _parsed(text: str) -> URL:
    try:
        url = make_url(text)
        backend = url.get_backend_name()
    except (ArgumentError, ValueError):
        # The text may hold a password, so it is not quoted.
        raise InputError(
            "the URL of the history cannot be read",
            hint=_WANTED,
        ) from None
    if backend == "sqlite":
        return url
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    raise InputError(f"the history can be SQLite or PostgreSQL, found {backend}", hint=_WANTED)


def _version(connection: Connection) -> int | None:
    if not inspect(connection).has_table("meta"):
        return None
    return connection.scalar(select(Meta.schema_version))


def _connected(connection: sqlite3.Connection, _record: object) -> None:
    # The driver would begin transactions by itself, and too late; ``_begun`` does it instead.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")
    # A transition of a rollout must be on disk before a host is touched, even if the power fails.
    connection.execute("PRAGMA synchronous = FULL")
    if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
        _until_free(lambda: connection.execute("PRAGMA journal_mode = WAL"))


def _begun(connection: Connection) -> None:
    is_writing = connection.get_execution_options().get("bringup_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writing else "BEGIN")


def _until_free(act: Callable[[], object]) -> None:
    # SQLite does not wait for its busy timeout when it changes the journal mode.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            act()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
