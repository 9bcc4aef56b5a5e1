"""Bytes of a wheel wherever it lies: ranges over HTTP, or a file on this machine.

What a server says is not believed: every answer must be exactly the bytes that were asked for, of a file whose
length and identity stay the same. Whatever differs ends in an error that names the address; a verdict is never
made from bytes that nobody asked for.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import urlsplit

import httpx

from bringup.errors import BringupError

TRIES = 3
"""How often one range is asked for before its failure counts."""

MAX_WHEEL_BYTES = 8 << 30
"""The largest wheel that is read; the largest real ones (torch, jit caches) have less than 3 GB."""

# As much as the end record of a zip file with the longest comment may take.
_TAIL_BYTES = 22 + 0xFFFF
_CHUNK_BYTES = 64 << 10
_AT_ONCE = 8
# Two ranges with less than this between them cost less as one request.
_GAP_BYTES = 32 << 10
# A range may take this long and the time that its bytes need at the rate below; then the server counts as stuck.
_PATIENCE_S = 60.0
_SLOWEST_BYTES_PER_S = 50_000

Login = tuple[str, str] | None
Range = tuple[int, int]
"""Start and length, in bytes."""


class Source(Protocol):
    """A file that can be read in parts. ``whole`` says that all of it had to be fetched."""

    @property
    def name(self) -> str:
        """Return what an error calls the file: an address or a path."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def fetched_bytes(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def whole(self) -> bool: ...

    def read(self, start: int, length: int) -> bytes:
        """Return exactly these bytes; raises BringupError."""

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of each range, in order; neighbours travel together. Raises BringupError."""


class LocalFile:
    """A wheel on this machine. Nothing of it counts as fetched."""

    fetched_bytes = 0
    requests = 0
    whole = False

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self.name = name
        self.size_bytes = os.fstat(file.fileno()).st_size

    def read(self, start: int, length: int) -> bytes:
        """Return exactly these bytes; raises BringupError when the file has fewer."""
        _check(self, start, length)
        parts = []
        while length > 0:
            part = os.pread(self._file.fileno(), min(length, 1 << 30), start)
            if not part:
                raise BringupError(f"{self.name} became shorter while it was read")
            parts.append(part)
            start, length = start + len(part), length - len(part)
        return b"".join(parts)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of each range, in order."""
        return [self.read(start, length) for start, length in ranges]


class HttpFile:
    """A wheel behind an address, read in ranges.

    ``size_bytes`` and ``sha256`` are what the index says, None when it says nothing. A server without ranges
    makes the whole wheel travel into a temporary file, whose hash is then checked. Use `open_source`.
    """

    def __init__(
        self,
        http: httpx.Client,
        url: str,
        *,
        login: Login = None,
        size_bytes: int | None = None,
        sha256: str | None = None,
        whole: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.name = url
        self.size_bytes = size_bytes or 0
        self.fetched_bytes = 0
        self.requests = 0
        self._counting = threading.Lock()
        self._http = http
        self._url = url
        self._login = login
        self._sha256 = sha256
        self._say = say
        self._tag: str | None = None
        self._tail: tuple[int, bytes] = (0, b"")
        self._spool: IO[bytes] | None = None
        self._local: LocalFile | None = None
        if whole:
            self._ask(None, 0)
        else:
            self._begin(is_size_known=size_bytes is not None)

    @property
    def whole(self) -> bool:
        """Return whether the server has no ranges, so that the whole wheel was fetched."""
        return self._local is not None

    def close(self) -> None:
        """Remove the temporary file, if there is one."""
        if self._spool is not None:
            self._spool.close()

    def read(self, start: int, length: int) -> bytes:
        """Return exactly these bytes; raises BringupError naming the address."""
        _check(self, start, length)
        if self._local is not None:
            return self._local.read(start, length)
        tail_at, tail = self._tail
        if start >= tail_at and length:
            return tail[start - tail_at : start - tail_at + length]
        return self._ask(start, length) if length else b""

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of each range, in order; neighbours travel in one request, several at a time."""
        groups: list[list[int]] = []
        end = -1
        for number in sorted(range(len(ranges)), key=lambda n: ranges[n]):
            start, length = ranges[number]
            if groups and start <= end + _GAP_BYTES:
                groups[-1].append(number)
            else:
                groups.append([number])
                end = start
            end = max(end, start + length)
        spans = []
        for group in groups:
            first = min(ranges[n][0] for n in group)
            spans.append((first, max(sum(ranges[n]) for n in group) - first))
        if len(spans) > 1 and self._local is None:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                answers = list(pool.map(lambda span: self.read(*span), spans))
        else:
            answers = [self.read(*span) for span in spans]
        found: dict[int, bytes] = {}
        for group, (first, _), answer in zip(groups, spans, answers, strict=True):
            for number in group:
                start, length = ranges[number]
                found[number] = answer[start - first : start - first + length]
        return [found[number] for number in range(len(ranges))]

    def _begin(self, *, is_size_known: bool) -> None:
        """Ask for the end of the file, which tells its length, whether ranges work, and its directory."""
        if is_size_known:
            if self.size_bytes > MAX_WHEEL_BYTES:
                raise BringupError(f"{self.name} has {self.size_bytes} bytes, more than any real wheel")
            start = max(0, self.size_bytes - _TAIL_BYTES)
            data = self._ask(start, self.size_bytes - start)
        else:
            data = self._ask(None, _TAIL_BYTES)
        if self._local is None:
            self._tail = (self.size_bytes - len(data), data)

    def _ask(self, start: int | None, length: int) -> bytes:
        """Return the bytes of one range, ``start`` None meaning the last ``length`` of an unknown file.

        No length means that the whole file is wanted. Returns b"" when the server has no ranges: then the
        whole wheel has been fetched instead.
        """
        for attempt in range(1, TRIES + 1):
            try:
                return self._ask_once(start, length)
            except _Again as problem:
                if attempt == TRIES:
                    raise BringupError(f"cannot read {self.name}", why=str(problem)) from None
                time.sleep(problem.wait_s or 0.3 * attempt)
        raise AssertionError("unreachable")

    def _ask_once(self, start: int | None, length: int) -> bytes:
        wanted = f"bytes=-{length}" if start is None else f"bytes={start}-{start + length - 1}"
        with self._opened({"Range": wanted} if length else {}) as response:
            if response.status_code == httpx.codes.OK:
                if start is not None and self._tag is not None:
                    raise _Again("the server answered one range and sent the whole file for the next")
                self._fetch_whole(response)
                return b""
            if response.status_code != httpx.codes.PARTIAL_CONTENT:
                raise self._refused(response)
            at = self._answered(response, start, length)
            if start is None:
                length = self.size_bytes - at
            return self._body(response, length)

    def _answered(self, response: httpx.Response, start: int | None, length: int) -> int:
        """Check that an answer is the range asked for, of the same file as before; return where it begins."""
        said = response.headers.get("content-range", "")
        match = re.fullmatch(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", said)
        if match is None:
            raise BringupError(f"{self.name}: no usable Content-Range", why=f"the server said {said[:80]!r}")
        first, last, total = map(int, match.groups())
        if start is None:
            if total > MAX_WHEEL_BYTES:
                raise BringupError(f"{self.name} has {total} bytes, more than any real wheel")
            start, length = max(0, total - length), min(length, total)
            self.size_bytes = self.size_bytes or total
        if total != self.size_bytes:
            raise BringupError(
                f"{self.name} has another length than before",
                why=f"the server says {total} bytes, it or the index said {self.size_bytes}",
                hint="read it again; if it stays so, the index or a proxy in between is at fault",
            )
        if (first, last) != (start, start + length - 1):
            raise BringupError(
                f"{self.name}: the server sent another range than it was asked for",
                why=f"asked for bytes {start}-{start + length - 1}, got {first}-{last}",
            )
        tag = response.headers.get("etag", "") or response.headers.get("last-modified", "")
        if self._tag not in (None, tag):
            raise BringupError(f"{self.name} was replaced by another file while it was read")
        self._tag = tag
        return first

    def _body(self, response: httpx.Response, length: int) -> bytes:
        parts, count = [], 0
        for part in self._chunks(response, length):
            count += len(part)
            if count > length:
                raise BringupError(f"{self.name}: the server sent more bytes than it was asked for", why=f"{length}")
            parts.append(part)
        if count != length:
            raise _Again(f"the connection was cut after {count} of {length} bytes")
        return b"".join(parts)

    def _fetch_whole(self, response: httpx.Response) -> None:
        """Take the whole wheel from a server without ranges into a temporary file."""
        declared = response.headers.get("content-length", "")
        if not declared.isdigit():
            raise BringupError(f"{self.name}: no ranges and no Content-Length", why="so a cut answer would not show")
        total = int(declared)
        if total > MAX_WHEEL_BYTES:
            raise BringupError(f"{self.name} has {total} bytes, more than any real wheel")
        if self.size_bytes and total != self.size_bytes:
            raise BringupError(
                f"{self.name} has another length than the index says", why=f"{total} bytes, not {self.size_bytes}"
            )
        if "range" in response.request.headers:
            self._say(f"{self.name.rsplit('/', 1)[-1]}: the server has no ranges, fetching all {total} bytes")
        spool = tempfile.TemporaryFile(prefix="bringup-wheel-")  # noqa: SIM115
        digest, count = hashlib.sha256(), 0
        try:
            for part in self._chunks(response, total):
                count += len(part)
                if count > total:
                    raise BringupError(f"{self.name}: the server sent more bytes than it announced")
                digest.update(part)
                spool.write(part)
            if count != total:
                raise _Again(f"the connection was cut after {count} of {total} bytes")
            if self._sha256 is not None and digest.hexdigest() != self._sha256:
                raise BringupError(
                    f"{self.name} is not the file of the index",
                    why=f"wanted sha256 {self._sha256}, found {digest.hexdigest()}",
                )
            spool.flush()
        except BaseException:
            spool.close()
            raise
        self._spool, self.size_bytes = spool, total
        self._local = LocalFile(spool, self.name)

    @contextmanager
    def _opened(self, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """Open the answer to one request; what may be better next time raises _Again."""
        is_home = urlsplit(self._url)[:2] == urlsplit(self.name)[:2]
        request = self._http.build_request("GET", self._url, headers={**headers, "Accept-Encoding": "identity"})
        with self._counting:
            self.requests += 1
        try:
            response = self._http.send(
                request, auth=self._login if is_home else None, follow_redirects=True, stream=True
            )
            try:
                self._followed(response)
                yield response
            finally:
                response.close()
        except httpx.TooManyRedirects:
            raise BringupError(f"cannot read {self.name}", why="it redirects in circles") from None
        except (httpx.TransportError, httpx.StreamError) as error:
            raise _Again(str(error) or type(error).__name__) from None
        except httpx.HTTPError as error:
            raise BringupError(f"cannot read {self.name}", why=str(error) or type(error).__name__) from None

    def _followed(self, response: httpx.Response) -> None:
        """Keep where a redirect led to, so that the next range goes there at once."""
        if response.history:
            if urlsplit(self._url).scheme == "https" and response.url.scheme != "https":
                raise BringupError(f"{self.name}: redirected from https to {response.url.scheme}", why="not followed")
            if response.is_success:
                self._url = str(response.url)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise BringupError(
                f"{self.name}: the server compresses what it was asked for as it is",
                why=f"Content-Encoding {response.headers['content-encoding'][:40]}",
            )

    def _refused(self, response: httpx.Response) -> Exception:
        status = response.status_code
        if self._url != self.name and 400 <= status < 500:
            # An address signed for a while may have run out; the index's own address makes a new one.
            self._url = self.name
            return _Again(f"the server answered {status} behind a redirect")
        if status >= 500 or status in (408, 425, 429):
            wait = response.headers.get("retry-after", "")
            return _Again(f"the server answered {status}", min(float(wait), 10.0) if wait.isdigit() else None)
        hints = {
            401: "credentials are needed: name them in the index's settings",
            403: "the credentials are not accepted, or the file is not for everyone",
            404: "the index lists a file that its server does not have",
        }
        return BringupError(f"cannot read {self.name}", why=f"the server answered {status}", hint=hints.get(status))

    def _chunks(self, response: httpx.Response, length: int) -> Iterator[bytes]:
        """Yield the body as it comes, for as long as a slow line may need."""
        deadline = time.monotonic() + _PATIENCE_S + length / _SLOWEST_BYTES_PER_S
        for part in response.iter_raw(_CHUNK_BYTES):
            with self._counting:
                self.fetched_bytes += len(part)
            yield part
            if time.monotonic() > deadline:
                raise BringupError(
                    f"{self.name}: the server is too slow",
                    why=f"{length} bytes took more than {_PATIENCE_S + length / _SLOWEST_BYTES_PER_S:.0f} s",
                )


class _Again(Exception):
    """One attempt failed in a way that the next may not; ``wait_s`` None means the usual pause."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


def _check(source: Source, start: int, length: int) -> None:
    if start < 0 or length < 0 or start + length > source.size_bytes:
        raise BringupError(
            f"{source.name}: {length} bytes at {start} lie outside the file", why=f"it has {source.size_bytes}"
        )


@contextmanager
def open_source(
    http: httpx.Client,
    url: str,
    *,
    login: Login = None,
    size_bytes: int | None = None,
    sha256: str | None = None,
    whole: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Source]:
    """Open the file behind an address (``file:`` too) for reading in parts.

    ``size_bytes`` and ``sha256`` None mean that the index does not tell. ``whole`` fetches the file at once, so
    that its hash is tested. ``say`` hears of a fallback to that. Raises BringupError.
    """
    if url.startswith("file:"):
        with open_local(Path(httpx.URL(url).path)) as local:
            yield local
        return
    remote = HttpFile(http, url, login=login, size_bytes=size_bytes, sha256=sha256, whole=whole, say=say)
    try:
        yield remote
    finally:
        remote.close()


@contextmanager
def open_local(path: Path) -> Iterator[Source]:
    """Open a file of this machine for reading in parts; raises BringupError when it cannot be opened."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise BringupError(f"cannot open {path}", why=error.strerror) from None
    with file:
        yield LocalFile(file, str(path))
