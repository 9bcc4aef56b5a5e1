"""A site's static web server: Python's own, with a count of what it sent and, where wanted, passwords.

Asked with whole addresses, it is its own HTTP proxy.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit


@dataclass
class Site:
    """A served directory. ``sent`` holds (path, bytes) of every file that was sent.

    ``logins`` maps the beginning of a path to user:password; ``proxy_login`` is what a request with a whole
    address must bring, and no other request is answered then. ``refused`` holds what came without.
    """

    url: str
    logins: Mapping[str, str] = field(default_factory=dict)
    proxy_login: str | None = None
    sent: list[tuple[str, int]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    proxied: list[str] = field(default_factory=list)

    def sent_bytes(self, suffix: str) -> dict[str, int]:
        """Return the bytes that were sent of each file with this suffix, by file name."""
        found: dict[str, int] = {}
        for path, size_bytes in self.sent:
            if path.endswith(suffix):
                name = path.rpartition("/")[2]
                found[name] = found.get(name, 0) + size_bytes
        return found


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments: Any, site: Site, **named: Any) -> None:
        self._site = site
        super().__init__(*arguments, **named)

    def send_head(self) -> Any:
        if self.path.startswith("http://"):
            if self._site.proxy_login and not self._knows("Proxy-Authorization", self._site.proxy_login):
                return self._refuse(HTTPStatus.PROXY_AUTHENTICATION_REQUIRED, "Proxy-Authenticate")
            self.path = urlsplit(self.path).path
            self._site.proxied.append(unquote(self.path))
        wanted = next((login for path, login in self._site.logins.items() if self.path.startswith(path)), None)
        if wanted is not None and not self._knows("Authorization", wanted):
            return self._refuse(HTTPStatus.UNAUTHORIZED, "WWW-Authenticate")
        return super().send_head()

    def _knows(self, header: str, login: str) -> bool:
        return self.headers.get(header, "") == f"Basic {base64.b64encode(login.encode()).decode()}"

    def _refuse(self, status: HTTPStatus, header: str) -> None:
        self._site.refused.append(self.path)
        self.send_response(status)
        self.send_header(header, 'Basic realm="site"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def copyfile(self, source: Any, outputfile: IO[bytes]) -> None:  # type: ignore[override]
        size_bytes = 0
        try:
            while data := source.read(1 << 16):
                outputfile.write(data)
                size_bytes += len(data)
        finally:
            self._site.sent.append((unquote(self.path), size_bytes))

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serving(
    directory: Path, address: str, *, logins: Mapping[str, str] | None = None, proxy_login: str | None = None
) -> Iterator[Site]:
    """Serve ``directory`` on one of the controller's addresses."""
    site = Site("", logins or {}, proxy_login)
    server = ThreadingHTTPServer((address, 0), partial(_Handler, site=site, directory=str(directory)))
    site.url = f"http://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def keyring() -> Iterator[Path]:
    """Make a gpg home of its own, and end its agent afterwards; the agent's socket needs a short path."""
    home = Path(tempfile.mkdtemp(prefix="bringup-gpg-", dir="/tmp"))
    try:
        yield home
    finally:
        subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], capture_output=True, check=False)
        shutil.rmtree(home)


def signing_key(home: Path, name: str) -> str:
    """Make a signing key and return its fingerprint."""
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback"]
    subprocess.run([*gpg, "--quick-gen-key", f"{name}@example.invalid", "ed25519", "sign", "never"], check=True)
    listed = subprocess.run([*gpg, "--with-colons", "--list-keys", name], capture_output=True, text=True, check=True)
    return next(line.split(":")[9] for line in listed.stdout.splitlines() if line.startswith("fpr:"))
