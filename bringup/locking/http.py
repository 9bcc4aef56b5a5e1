"""Fetch over HTTP with the controller's own certificates and proxies, with limits and a few retries."""

from __future__ import annotations

import fcntl
import hashlib
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx

from bringup.errors import BringupError, InputError

TRIES = 3
"""How often one request is made before its failure counts."""

_CHUNK_BYTES = 1 << 20

Login = tuple[str, str] | None
"""User and password, or None when none are needed."""


@contextmanager
def client(certificate: str | None = None, *, direct: str | None = None) -> Iterator[httpx.Client]:
    """Open an HTTP client that goes through the proxy of the environment, except to the host ``direct``.

    ``certificate`` None means the system's certificates. Raises InputError when the named file holds none.
    """
    named = certificate or os.environ.get("SSL_CERT_FILE") or None
    try:
        context = ssl.create_default_context(cafile=named)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"no certificates in {named}", why=str(error)) from None
    timeout = httpx.Timeout(30.0, connect=10.0)
    mounts = {f"all://{direct}": None} if direct else None
    with httpx.Client(verify=context, timeout=timeout, follow_redirects=True, mounts=mounts) as opened:
        yield opened


def read(http: httpx.Client, url: str, *, limit_bytes: int = 256 << 20) -> bytes | None:
    """Return the body behind ``url`` (``file:`` too); None when the server says that there is nothing.

    Raises BringupError naming the address when it cannot be read or is larger than ``limit_bytes``.
    """
    if url.startswith("file:"):
        path = _local(url)
        return path.read_bytes() if path.is_file() else None
    response = _asked(http, "GET", url)
    if response.status_code == httpx.codes.NOT_FOUND:
        return None
    if len(response.content) > limit_bytes:
        raise BringupError(f"{shown(url)} is larger than {limit_bytes} bytes")
    return response.content


def size_bytes(http: httpx.Client, url: str, *, auth: Login = None) -> int:
    """Return the size of the file behind ``url`` without fetching it.

    ``auth`` None means that no credentials are sent. Raises BringupError when the server does not tell.
    """
    if url.startswith("file:"):
        return _local(url).stat().st_size
    # Compression would make the length that of something else.
    response = _asked(http, "HEAD", url, {"Accept-Encoding": "identity"}, auth)
    length = response.headers.get("content-length", "")
    if response.status_code != httpx.codes.OK or not length.isdigit():
        raise BringupError(
            f"{shown(url)}: no size",
            why=f"the server answered {response.status_code} without a Content-Length",
        )
    return int(length)


def download(
    http: httpx.Client,
    url: str,
    target: Path,
    *,
    size: int,
    sha256: str,
    auth: Login = None,
    seen: Callable[[int], None] = lambda _: None,
) -> int:
    """Write the file behind ``url`` to ``target``, whole or not at all; return how many bytes were sent for it.

    What an interrupted download left beside ``target`` is gone on with, where the server can. ``seen`` is told how
    many bytes more (or fewer: a new start) are there. Raises BringupError when size or hash differ from what was
    locked, naming both.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{sha256[:12]}.part")
    sent = 0
    with _own(part) as file:
        if _holds(target, size, sha256):  # another process fetched it while this one waited
            part.unlink()
            seen(size)
            return 0
        transfer = _Transfer(http, url, file, size, auth, seen)
        for attempt in range(1, TRIES + 1):
            is_whole = transfer.take_up() == 0
            try:
                sent += transfer.receive()
                if transfer.is_right(sha256) or is_whole:
                    break
                transfer.start_over()  # what was left there belongs to another file, or was torn
            except httpx.HTTPError as error:
                sent += transfer.sent
                is_final = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                if is_final or attempt == TRIES:
                    raise BringupError(f"cannot fetch {shown(url)}", why=_reason(error)) from None
                time.sleep(attempt)
        if not transfer.is_right(sha256):
            part.unlink()
            raise BringupError(
                f"{shown(url)} is not the locked file",
                why=f"wanted sha256 {sha256} in {size} bytes, found {transfer.found()}",
            )
        part.replace(target)
    return sent


class _Transfer:
    """The bytes of one file as they arrive, after those that an earlier attempt left."""

    def __init__(
        self, http: httpx.Client, url: str, file: IO[bytes], size: int, auth: Login, seen: Callable[[int], None]
    ) -> None:
        self._http = http
        self._url = url
        self._file = file
        self._size = size
        self._auth = auth
        self._seen = seen
        self._told = 0
        self._digest, self._length, self.sent = hashlib.sha256(), 0, 0

    def take_up(self) -> int:
        """Read what is there already and return its size in bytes; more than the whole file is nothing."""
        self._digest, self._length, self.sent = hashlib.sha256(), 0, 0
        self._file.seek(0)
        while chunk := self._file.read(_CHUNK_BYTES):
            self._digest.update(chunk)
            self._length += len(chunk)
        if self._length > self._size:
            self.start_over()
        self._tell()
        return self._length

    def start_over(self) -> None:
        """Forget what is there."""
        self._digest, self._length, self.sent = hashlib.sha256(), 0, 0
        self._file.seek(0)
        self._file.truncate()

    def receive(self) -> int:
        """Append the rest of the file and return how many bytes were sent for it."""
        if self._length < self._size:
            for chunk in self._chunks():
                self._file.write(chunk)
                self._digest.update(chunk)
                self._length += len(chunk)
                self.sent += len(chunk)
                self._tell()
                if self._length > self._size:
                    break
            self._file.flush()
        return self.sent

    def is_right(self, sha256: str) -> bool:
        """Return whether the file is there whole, with this hash."""
        return self._length == self._size and self._digest.hexdigest() == sha256

    def found(self) -> str:
        """Say what is there instead."""
        if self._length > self._size:
            return f"more than {self._size} bytes"
        return f"{self._digest.hexdigest()} in {self._length} bytes"

    def _tell(self) -> None:
        if self._length != self._told:
            self._seen(self._length - self._told)
            self._told = self._length

    def _chunks(self) -> Iterator[bytes]:
        if self._url.startswith("file:"):
            with _local(self._url).open("rb") as source:
                source.seek(self._length)
                while chunk := source.read(_CHUNK_BYTES):
                    yield chunk
            return
        headers = {"Accept-Encoding": "identity"}
        if self._length:
            headers["Range"] = f"bytes={self._length}-"
        with self._http.stream("GET", self._url, headers=headers, auth=self._auth) as response:
            response.raise_for_status()
            wanted = f"bytes {self._length}-"
            is_rest = response.status_code == httpx.codes.PARTIAL_CONTENT
            if self._length and not (is_rest and response.headers.get("content-range", "").startswith(wanted)):
                self.start_over()  # the server knows no ranges and sends the whole file
            yield from response.iter_bytes()  # as they come: what is gathered into chunks is lost at a break


@contextmanager
def _own(part: Path) -> Iterator[IO[bytes]]:
    """Open an unfinished file for this process alone; wait for another one that is at it."""
    while True:
        with part.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # The one that held it has renamed it when it was done: this is another file then.
            if part.exists() and os.path.samestat(os.fstat(file.fileno()), part.stat()):
                yield file
                return


def _holds(path: Path, size: int, sha256: str) -> bool:
    if not path.is_file() or path.stat().st_size != size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def _asked(
    http: httpx.Client, method: str, url: str, headers: dict[str, str] | None = None, auth: Login = None
) -> httpx.Response:
    for attempt in range(1, TRIES + 1):
        try:
            response = http.request(method, url, headers=headers, auth=auth)
            if response.status_code < 500 or attempt == TRIES:
                break
        except httpx.HTTPError as error:
            if attempt == TRIES:
                raise BringupError(f"cannot reach {shown(url)}", why=_reason(error)) from None
        time.sleep(0.5 * attempt)
    if response.status_code >= 400 and response.status_code != httpx.codes.NOT_FOUND:
        raise BringupError(f"cannot read {shown(url)}", why=f"the server answered {response.status_code}")
    return response


def _local(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def shown(url: str) -> str:
    """Return an address as it may be printed: without credentials."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _reason(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.HTTPStatusError):  # its own text quotes the address, credentials and all
        return f"the server answered {error.response.status_code}"
    return str(error) or type(error).__name__
