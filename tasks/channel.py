"""Talk to a command on a host while it runs, and stream files to it.

pyinfra runs commands to their end, and uploads through predictable, world-readable temporary files. The run
lock needs a command that lives as long as its controller; packages' installers, build orders and credentials
need a way that leaves nothing readable behind. Both use the connection that pyinfra has opened.
"""

from __future__ import annotations

import hashlib
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Protocol

import paramiko
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.host import Host
from pyinfra.connectors.util import extract_control_arguments, make_unix_command_for_host

from bringup import facts
from bringup.errors import HostError
from tasks.run import worker_path

_CHUNK_BYTES = 1 << 16
_KEPT_ERROR_BYTES = 1 << 14
_MISSING = 44


class Channel(Protocol):
    """A command that runs on a host. Every method raises OSError when the connection is gone."""

    def write(self, data: bytes) -> None:
        """Send bytes to the command's standard input, waiting while it does not read."""

    def end_input(self) -> None:
        """Close the command's standard input."""

    def readline(self, timeout_s: float | None = None) -> str:
        """Return the next line of standard output without its newline, "" at the end.

        ``timeout_s`` None waits for as long as it takes; TimeoutError is raised otherwise.
        """

    def read(self, timeout_s: float | None = None) -> str:
        """Return what is left of standard output; raises TimeoutError when it does not end."""

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit status; raises TimeoutError when the command has not ended by then."""

    def errors(self) -> str:
        """Return the last that the command wrote to standard error, once ``wait`` returned."""

    def close(self) -> None:
        """Let go of the command: its standard input ends, and its output is not read any more."""


def open_channel(host: Host, argv: Iterable[str]) -> Channel:
    """Start a command on a host, as root where the host's ``_sudo`` (or the operation's) says so.

    A connector of another kind may bring an ``open_channel(command)`` of its own. Raises HostError for one
    that cannot stream, OSError when the connection is gone.
    """
    words = [*argv]
    facts.tell_command(host, StringCommand(*(QuoteString(word) for word in words)))
    command = _raw_command(host, words)
    connector: Any = host.connector
    own = getattr(connector, "open_channel", None)
    if own is not None:
        channel: Channel = own(command)
        return channel
    client = getattr(connector, "client", None)
    if isinstance(client, paramiko.SSHClient):
        return _SshChannel(client, command)
    if host.connector_cls.__name__ == "LocalConnector":
        return _LocalChannel(command)
    raise HostError(
        "nothing can be streamed to this host",
        host=host.name,
        why=f"its connector is {host.connector_cls.__name__}",
        hint="name the host by its ssh address, or use @local",
    )


def push(host: Host, path: str, content: bytes | Path, *, mode: str = "0600") -> None:
    """Put a file in place on a host over a channel; ``host_work.py`` checks its hash and renames it there.

    Raises HostError with what the host said when it could not be written.
    """
    size_bytes, digest = _measured(content)
    argv = ["python3", worker_path(), "--run", facts.run_id(), "write", path, "--mode", mode,
            "--stdin", "--size", str(size_bytes), "--sha256", digest]  # fmt: skip
    try:
        channel = open_channel(host, argv)
        try:
            try:
                _send(channel, content)
                channel.end_input()
            except OSError:
                pass  # the command ended early; its status and its words say why
            status = channel.wait(timeout_s=600)
        finally:
            channel.close()
    except OSError as error:
        raise HostError(f"cannot send {path}", host=host.name, why=str(error)) from None
    if status != 0:
        raise HostError(f"cannot write {path}", host=host.name, why=channel.errors().strip() or f"status {status}")


def fetch(host: Host, path: str, *, missing: str | None = None) -> str:
    """Return a file's text from a host; ``missing`` instead of a file that is not there, unless it is None.

    Raises HostError with what the host said when it could not be read.
    """
    script = f'test -e "$1" || exit {_MISSING}; exec cat "$1"'
    try:
        channel = open_channel(host, ["sh", "-c", script, "sh", path])
        try:
            text = channel.read(timeout_s=60)
            status = channel.wait(timeout_s=60)
        finally:
            channel.close()
    except OSError as error:
        raise HostError(f"cannot read {path}", host=host.name, why=str(error)) from None
    if status == _MISSING and missing is not None:
        return missing
    if status != 0:
        why = "it is not there" if status == _MISSING else channel.errors().strip()
        raise HostError(f"cannot read {path}", host=host.name, why=why)
    return text


def _measured(content: bytes | Path) -> tuple[int, str]:
    if isinstance(content, bytes):
        return len(content), hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return content.stat().st_size, digest


def _send(channel: Channel, content: bytes | Path) -> None:
    if isinstance(content, bytes):
        channel.write(content)
        return
    with content.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            channel.write(data)


def _raw_command(host: Host, argv: Iterable[str]) -> str:
    given: Any = host.current_op_global_arguments or {}
    arguments = {
        key: given[key] if key in given else host.data.get(key)
        for key in CONNECTOR_ARGUMENT_KEYS
        if key in given or host.data.get(key) is not None
    }
    extract_control_arguments(arguments)  # type: ignore[arg-type]
    command = StringCommand(*(QuoteString(part) for part in argv))
    return str(make_unix_command_for_host(host.state, host, command, **arguments).get_raw_value())


class _Lines:
    """Cut what arrives in pieces into lines."""

    def __init__(self) -> None:
        self._buffer = b""
        self._ended = False

    def next(self) -> str | None:
        """Return the next whole line, "" at the end, None when more must arrive first."""
        if b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            return line.decode("utf-8", "replace")
        if self._ended:
            line, self._buffer = self._buffer, b""
            return line.decode("utf-8", "replace")
        return None

    def feed(self, data: bytes) -> None:
        """Take in what arrived; nothing means the end."""
        self._buffer += data
        self._ended |= not data

    def rest(self) -> str | None:
        """Return all that is left once the end is there, None before."""
        if not self._ended:
            return None
        rest, self._buffer = self._buffer, b""
        return rest.decode("utf-8", "replace")


class _SshChannel:
    """A command in a session of its own on pyinfra's ssh connection."""

    def __init__(self, client: paramiko.SSHClient, command: str) -> None:
        transport = client.get_transport()
        if transport is None:
            raise ConnectionError("the ssh connection is closed")
        try:
            self._session = transport.open_session()
            self._session.exec_command(command)
        except (paramiko.SSHException, EOFError) as error:
            raise ConnectionError(f"ssh: {error or 'connection lost'}") from None
        self._lines = _Lines()
        self._errors = b""

    def write(self, data: bytes) -> None:
        self._session.settimeout(None)
        self._session.sendall(data)

    def end_input(self) -> None:
        self._session.shutdown_write()

    def readline(self, timeout_s: float | None = None) -> str:
        while (line := self._lines.next()) is None:
            self._receive(timeout_s)
        return line

    def read(self, timeout_s: float | None = None) -> str:
        while (rest := self._lines.rest()) is None:
            self._receive(timeout_s)
        return rest

    def _receive(self, timeout_s: float | None) -> None:
        self._session.settimeout(timeout_s)
        self._drain_errors()
        try:
            self._lines.feed(self._session.recv(_CHUNK_BYTES))
        except TimeoutError:
            raise TimeoutError(f"no output within {timeout_s} s") from None

    def wait(self, timeout_s: float | None = None) -> int:
        # A command whose output nobody reads stops at a full window, so it is read to its end here.
        self._session.settimeout(timeout_s)
        try:
            while data := self._session.recv(_CHUNK_BYTES):
                self._lines.feed(data)
                self._drain_errors()
            self._lines.feed(b"")
            while data := self._session.recv_stderr(_CHUNK_BYTES):
                self._errors = (self._errors + data)[-_KEPT_ERROR_BYTES:]
        except TimeoutError:
            raise TimeoutError(f"not ended within {timeout_s} s") from None
        if not self._session.status_event.wait(timeout_s):
            raise TimeoutError(f"not ended within {timeout_s} s")
        status = self._session.exit_status
        if status < 0:
            raise ConnectionError("ssh: the connection was lost before the command ended")
        return int(status)

    def errors(self) -> str:
        return self._errors.decode("utf-8", "replace")

    def close(self) -> None:
        self._session.close()

    def _drain_errors(self) -> None:
        while self._session.recv_stderr_ready():
            self._errors = (self._errors + self._session.recv_stderr(_CHUNK_BYTES))[-_KEPT_ERROR_BYTES:]


class _LocalChannel:
    """A command on this machine."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self._errors = b""
        self._lines: list[bytes] = []
        self._changed = threading.Condition()
        self._open = 2
        for stream, take in ((self._process.stdout, self._line), (self._process.stderr, self._error)):
            threading.Thread(target=self._read, args=(stream, take), daemon=True).start()

    def _read(self, stream: IO[bytes], take: Any) -> None:
        buffered = b""
        while True:
            try:
                data = stream.read(_CHUNK_BYTES)
            except (OSError, ValueError):
                data = b""
            buffered += data or b""
            *lines, buffered = buffered.split(b"\n")
            if not data and buffered:
                lines.append(buffered)
            with self._changed:
                for line in lines:
                    take(line)
                self._open -= not data
                self._changed.notify_all()
            if not data:
                stream.close()
                return

    def _line(self, line: bytes) -> None:
        self._lines.append(line)

    def _error(self, line: bytes) -> None:
        self._errors = (self._errors + line + b"\n")[-_KEPT_ERROR_BYTES:]

    def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]

    def end_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def readline(self, timeout_s: float | None = None) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: self._lines or self._open == 0, timeout_s):
                raise TimeoutError(f"no line within {timeout_s} s")
            return self._lines.pop(0).decode("utf-8", "replace") if self._lines else ""

    def read(self, timeout_s: float | None = None) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: self._open == 0, timeout_s):
                raise TimeoutError(f"output did not end within {timeout_s} s")
            lines, self._lines = self._lines, []
        return "\n".join(line.decode("utf-8", "replace") for line in lines)

    def wait(self, timeout_s: float | None = None) -> int:
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not ended within {timeout_s} s") from None
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, 5)
        return status if status >= 0 else 128 - status

    def errors(self) -> str:
        return self._errors.decode("utf-8", "replace")

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass
        self._process.poll()
