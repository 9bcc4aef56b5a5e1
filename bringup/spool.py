"""Keep what a run only looked at in a file beside the history, until somebody opens the history.

A run that finds nothing to do costs little, and opening a database is a third of it. So its events wait in the spool,
one file a run, and whoever opens the history next stores them. As soon as something is done to a host the history is
opened at once. This is for SQLite alone: a team's database must tell the others now.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from bringup.errors import BringupError
from bringup.report import events
from bringup.report.masking import Masker
from bringup.report.storable import storable_event

SCHEMA_VERSION = 1
"""The version of the history's tables for which a run may wait in the spool."""

MOST_WAITING = 200
"""Files after which a run stores them itself, so that nobody who looks at the history has to wait for long."""

_PREFIX = "sqlite:///"
_LOG = logging.getLogger("bringup.history")


class Recording(Protocol):
    """Be given the events of a run."""

    @property
    def problem(self) -> BringupError | None:
        """Return why some events are not stored; None when all are."""

    def __call__(self, event: events.Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Store what is waiting."""


@dataclass(frozen=True)
class Waiting:
    """One run that waits; ``is_live`` while its process may go on writing."""

    file: Path
    events: tuple[events.Event, ...]
    is_live: bool

    def put_aside(self) -> None:
        """Rename the file to ``RUN.unreadable``, so that it is kept and never read again."""
        with suppress(OSError):
            self.file.rename(self.file.with_suffix(".unreadable"))


@dataclass(frozen=True)
class Spool:
    """The directory of the runs that wait to be stored in one SQLite history."""

    database: Path

    @classmethod
    def beside(cls, database: Path) -> Spool:
        """Return the spool of a database file, the same one under each of its names: SQLite follows links too."""
        return cls(Path(os.path.realpath(database)))

    @property
    def directory(self) -> Path:
        """Return where the files of the runs are."""
        return self.database.with_name(f"{self.database.name}.waiting")

    @classmethod
    def of(cls, url: str) -> Spool | None:
        """Return the spool of a history; None when that must be opened before a run, whatever the run finds.

        That is so for a database that others share, one that is not there yet or of another version, one that cannot
        be written, and when many runs are waiting.
        """
        name = url.removeprefix(_PREFIX)
        if name == url or not name or any(character in name for character in "?%:#"):
            return None
        file = Path(name)
        if not os.access(file, os.R_OK | os.W_OK):
            return None
        try:
            with closing(sqlite3.connect(f"file:{file}?mode=rw", uri=True, timeout=5)) as connection:
                version = connection.execute("SELECT schema_version FROM meta").fetchone()
            spool = cls.beside(file)
            has_room = len(spool.files()) < MOST_WAITING
        except (sqlite3.Error, OSError):
            return None
        return spool if version == (SCHEMA_VERSION,) and has_room else None

    def files(self) -> tuple[Path, ...]:
        """Return the files of the runs that wait, the oldest run first. Raises OSError."""
        found: list[tuple[float, Path]] = []
        with suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name.endswith(".jsonl") and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # another one has stored it meanwhile
                        found.append((entry.stat().st_mtime, Path(entry.path)))
        return tuple(path for _, path in sorted(found))

    def waiting(self) -> Iterator[Waiting]:
        """Yield the runs that wait, each locked while the caller has it.

        A line that has no end, because its process died while it wrote, is left out. A file with any other line that is
        no event is put aside. Raises OSError when the directory cannot be read.
        """
        for path in self.files():
            try:
                stream = path.open("rb")
            except FileNotFoundError:
                continue  # another one was faster
            except OSError as error:
                _LOG.warning("%s cannot be read: %s", path, error.strerror)
                continue
            with stream:
                is_live = not _lock_if_free(stream.fileno())
                *lines, _torn = stream.read().split(b"\n")
                try:
                    told = tuple(events.parse(line) for line in lines)
                except ValidationError:
                    Waiting(path, (), is_live).put_aside()
                    continue
                yield Waiting(path, told, is_live)

    def begin(self, run: str) -> SpoolFile:
        """Open the file of a run. Raises OSError."""
        try:
            self.directory.mkdir(mode=0o700)
        except FileExistsError:
            pass
        else:
            descriptor = os.open(self.directory, os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                _share_as(self.database, descriptor)
            finally:
                os.close(descriptor)
        return SpoolFile(self.directory / f"{run}.jsonl", self.database)


class SpoolFile:
    """The file of one run, locked for as long as it is open."""

    def __init__(self, path: Path, database: Path) -> None:
        while True:
            self._descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                _share_as(database, self._descriptor)
                # Whoever opened the history in between may have found an empty file and taken it away.
                with suppress(FileNotFoundError):
                    if os.path.samestat(path.stat(), os.fstat(self._descriptor)):
                        return
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)

    def write(self, event: events.Event) -> None:
        """Add an event, whole or not at all. Raises OSError."""
        line = event.as_line().encode() + b"\n"
        before = os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._descriptor, before)
            raise

    def close(self) -> None:
        """Close the file, its content on the disk."""
        with suppress(OSError):
            os.fsync(self._descriptor)
        os.close(self._descriptor)


class SpoolingRecorder:
    """Let a run that only looks wait in the spool, and store everything at once as soon as it does something.

    ``open_history`` opens the history, which takes in what waits, and returns what stores further events. Where it
    fails, events go on into the spool, and ``problem`` says why. Where the spool fails, the history is opened.
    """

    def __init__(self, spool: Spool, masker: Masker, open_history: Callable[[], Recording]) -> None:
        self._spool = spool
        self._masker = masker
        self._open_history = open_history
        self._file: SpoolFile | None = None
        self._unwritten: list[events.Event] = []
        self._inner: Recording | None = None
        self._problem: BringupError | None = None

    @property
    def problem(self) -> BringupError | None:
        """Return why some events are not stored; None when they are, or wait without harm."""
        return self._problem or (self._inner.problem if self._inner is not None else None)

    def __call__(self, event: events.Event) -> None:
        """Take one event."""
        match event:
            case events.CommandStarted() | events.HostConnected():
                return  # the history keeps neither
            case events.RunStarted() | events.DifferenceSeen() | events.FindingSeen() | events.RunDone():
                pass
            case events.HostDone() if not event.changes:
                pass
            case _:
                self._act()
        if self._inner is not None:
            self._inner(event)
        else:
            self._unwritten.append(storable_event(event, self._masker))
            self._write()

    def close(self) -> None:
        """Store what is waiting, or leave it whole in the spool."""
        self._write()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._inner is not None:
            self._inner.close()

    def _act(self) -> None:
        if self._inner is not None or self._problem is not None:
            return
        if self._file is not None:
            self._file.close()  # the history takes it in while it opens
            self._file = None
        try:
            self._inner = self._open_history()
        except BringupError as error:
            self._problem = error

    def _write(self) -> None:
        try:
            while self._unwritten:
                if self._file is None:
                    self._file = self._spool.begin(self._unwritten[0].run)
                self._file.write(self._unwritten[0])
                del self._unwritten[0]
        except OSError:
            self._act()
            if self._inner is not None:
                for event in self._unwritten:
                    self._inner(event)
                self._unwritten.clear()


def _lock_if_free(descriptor: int) -> bool:
    # A file system without locks has no runs that wait, because none could begin; so what is there is not ours to end.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _share_as(database: Path, descriptor: int) -> None:
    """Let those read and write who may use the database, as SQLite does with its journal; root keeps nothing."""
    like, own = database.stat(), os.fstat(descriptor)
    mode = like.st_mode & 0o666
    if stat.S_ISDIR(own.st_mode):
        mode |= (mode & 0o444) >> 2 | own.st_mode & stat.S_ISGID
    os.fchmod(descriptor, mode)
    if os.geteuid() == 0:
        os.fchown(descriptor, like.st_uid, like.st_gid)
