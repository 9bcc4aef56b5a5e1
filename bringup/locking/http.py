"""Fetch over HTTP with the controller's own certificates and proxies, with limits and a few retries."""

from __future__ import annotations

import hashlib
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
        raise BringupError(f"{url} is larger than {limit_bytes} bytes")
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
            f"{url}: no size",
            why=f"the server answered {response.status_code} without a Content-Length",
        )
    return int(length)


def download(http: httpx.Client, url: str, target: Path, *, size: int, sha256: str, auth: Login = None) -> None:
    """Write the file behind ``url`` to ``target``, whole or not at all.

    Raises BringupError when size or hash differ from what was locked, naming both.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        for attempt in range(1, TRIES + 1):
            try:
                _stream(http, url, part, size=size, sha256=sha256, auth=auth)
                break
            except httpx.HTTPError as error:
                if attempt == TRIES:
                    raise BringupError(f"cannot fetch {url}", why=_reason(error)) from None
                time.sleep(attempt)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _stream(http: httpx.Client, url: str, part: Path, *, size: int, sha256: str, auth: Login) -> None:
    digest = hashlib.sha256()
    length = 0
    with part.open("wb") as file:
        for chunk in _chunks(http, url, auth):
            length += len(chunk)
            if length > size:
                break
            digest.update(chunk)
            file.write(chunk)
    if length != size or digest.hexdigest() != sha256:
        found = f"{digest.hexdigest()} in {length} bytes" if length <= size else f"more than {size} bytes"
        raise BringupError(
            f"{url} is not the locked file",
            why=f"wanted sha256 {sha256} in {size} bytes, found {found}",
        )


def _chunks(http: httpx.Client, url: str, auth: Login) -> Iterator[bytes]:
    if url.startswith("file:"):
        with _local(url).open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
        return
    with http.stream("GET", url, headers={"Accept-Encoding": "identity"}, auth=auth) as response:
        response.raise_for_status()
        yield from response.iter_bytes(_CHUNK_BYTES)


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
                raise BringupError(f"cannot reach {url}", why=_reason(error)) from None
        time.sleep(0.5 * attempt)
    if response.status_code >= 400 and response.status_code != httpx.codes.NOT_FOUND:
        raise BringupError(f"cannot read {url}", why=f"the server answered {response.status_code}")
    return response


def _local(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
