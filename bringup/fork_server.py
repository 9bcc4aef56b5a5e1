"""Keep a process at hand that has imported what a worker needs, and that forks into one whenever it is asked to.

pyinfra allows one run per process, and takes a third of a second to import. A run over many hosts has several workers,
and every step of a rollout begins new ones; here all of them are paid for once. ``python -m bringup.fork_server`` is
the server where the process that asks cannot be forked; its standard input is the socket on which it is asked.
"""

from __future__ import annotations

import fcntl
import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, NoReturn

# gevent puts others into these modules, which would start its loop; and a process with a loop must not be forked.
_fork, _waitpid, _select, _signal = os.fork, os.waitpid, select.select, signal.signal

_UNFORKABLE = frozenset({"gevent", "pyinfra", "ssl"})
"""Modules after whose import a fork cannot become a worker: gevent must patch the standard library before them."""

_LARGEST_REQUEST_BYTES = 65536
_ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KILLED = -signal.SIGKILL


def may_fork() -> bool:
    """Return whether a fork of this process can become a worker: it has one thread, and gevent can still patch it."""
    return threading.active_count() == 1 and not _UNFORKABLE & sys.modules.keys()


@dataclass
class ForkedWorker:
    """A worker, seen from the process that asked for it."""

    pid: int
    stdin: IO[str]
    stdout: IO[str] | None
    stderr: IO[str] | None
    _status: int

    def wait(self) -> int:
        """Return its status once it has ended; negative for a signal. When the server died, nobody can know it."""
        told = b""
        while part := os.read(self._status, 64):
            told += part
        os.close(self._status)
        return int(told) if told else _KILLED


class ForkServer:
    """Be the end of the server that asks.

    Where the server is killed its workers go on. Where this process ends, however it does, they end as well.
    """

    def __init__(self, pid: int, control: socket.socket, bury: Callable[[], object]) -> None:
        self.pid = pid
        self._control = control
        self._bury = bury
        self._lock = threading.Lock()

    @classmethod
    def start(cls) -> ForkServer:
        """Start a server: a fork of this process where that is safe, which is early, before there are threads."""
        ours, theirs = socket.socketpair()
        with theirs:
            if not may_fork():
                return cls._program(ours, theirs)
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # it was closed before the program began
                    stream.flush()
            # A handler of the parent's that ran in the fork would go on with the parent's work there.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDED_BY)
            try:
                if (pid := _fork()) == 0:
                    _serve(theirs, before)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return cls(pid, ours, lambda: _waitpid(pid, 0))

    @classmethod
    def _program(cls, ours: socket.socket, theirs: socket.socket) -> ForkServer:
        process = subprocess.Popen(
            [sys.executable, "-m", "bringup.fork_server"],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process.pid, ours, process.wait)

    def fork(self, environment: Mapping[str, str]) -> ForkedWorker:
        """Return a worker that waits for its Shard, with ``environment`` in addition to that of the server.

        Raises OSError when the server has ended; then it cannot have begun anything.
        """
        with ExitStack() as theirs, ExitStack() as ours:
            asked, ask = _pipe(theirs, ours)
            out, told = _pipe(ours, theirs)
            err, said = _pipe(ours, theirs)
            ended, end = _pipe(ours, theirs)
            with self._lock:
                socket.send_fds(self._control, [json.dumps(dict(environment)).encode()], [asked, told, said, end])
                answer = self._control.recv(64)
            if not answer:
                raise ConnectionResetError("the process that forks workers has ended")
            ours.pop_all()
        return ForkedWorker(
            pid=int(answer),
            stdin=os.fdopen(ask, "w", encoding="utf-8"),
            stdout=os.fdopen(out, encoding="utf-8", errors="backslashreplace"),
            stderr=os.fdopen(err, encoding="utf-8", errors="backslashreplace"),
            _status=ended,
        )

    def close(self) -> None:
        """End the server, and with it what still runs of its workers."""
        self._control.close()
        with suppress(ChildProcessError):
            self._bury()


def _pipe(reads: ExitStack, writes: ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    reads.callback(os.close, reading)
    writes.callback(os.close, writing)
    return reading, writing


def _serve(control: socket.socket, blocked: Collection[int] = ()) -> NoReturn:
    """Fork workers until nobody is there to ask for one; nothing of the parent's ever runs again in here.

    ``blocked`` are the signals that the parent had blocked.
    """
    try:
        for handled in _ENDED_BY:
            _signal(handled, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if os.getsid(0) != os.getpid():
            os.setsid()
        # Where the parent began without a standard stream, the connection has the number of one.
        control = socket.socket(fileno=fcntl.fcntl(control.detach(), fcntl.F_DUPFD_CLOEXEC, 3))
        _close_all_but(control.fileno())
        for number in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        begun: dict[int, int] = {}
        with suppress(ConnectionError):  # the parent was killed while it asked
            _serve_requests(control, begun)
        # Nobody is there to listen. A worker would notice when it has something to say, which may take long.
        for pid in begun:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)
    finally:
        # Whoever asks sees the connection end, and starts its workers as programs, which say what is wrong.
        os._exit(1)


def _close_all_but(kept: int) -> None:
    # Files and connections of the parent, such as its history's, must not outlive it because of us.
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _serve_requests(control: socket.socket, status_of: dict[int, int]) -> None:
    """Return when the parent has gone; ``status_of`` is kept: where to tell the end of each worker that still runs."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    _signal(signal.SIGCHLD, lambda *_: None)
    from bringup import lean, worker  # noqa: F401 (lean must come first)

    gc.freeze()  # what is there stays, and a collection must not copy its pages
    while True:
        ready, _, _ = _select([control.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _tell_ended(status_of)
        if control.fileno() in ready:
            request, numbers, _, _ = socket.recv_fds(control, _LARGEST_REQUEST_BYTES, 4)
            if not request:
                return
            asked, told, said, status = numbers  # fewer where there is no room for them
            if (pid := _fork()) == 0:
                _become_worker(json.loads(request), (asked, told, said))
            # Before anybody knows of it: whoever ends the group at once must find it.
            with suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pid)
            for number in (asked, told, said):
                os.close(number)
            status_of[pid] = status
            control.sendall(str(pid).encode())


def _tell_ended(status_of: dict[int, int]) -> None:
    while status_of:
        pid, status = _waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        number = status_of.pop(pid)
        with suppress(BrokenPipeError):
            os.write(number, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(number)


def _become_worker(environment: Mapping[str, str], streams: tuple[int, int, int]) -> NoReturn:
    """Go on as what ``python -m bringup.worker`` would be, in a process group that can be ended as a whole."""
    status = 70
    try:
        signal.set_wakeup_fd(-1)
        _signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        # ``sys.__stdout__`` and its like keep the parent's buffers, so that they are not written a second time.
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        os.environ.update(environment)
        from bringup import worker

        text = sys.stdin.read()
        # Nothing to read: the parent has given up before it began, or has been killed.
        status = worker.main(io.StringIO(text), sys.stdout) if text else 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(socket.socket(fileno=0))
