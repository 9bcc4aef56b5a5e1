"""A site's static web server: Python's own, with a count of what it sent and, where wanted, a password."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote


@dataclass
class Site:
    """A served directory. ``sent`` holds (path, bytes) of every file that was sent, ``refused`` what was not."""

    url: str
    login: str | None = None
    sent: list[tuple[str, int]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

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
        wanted = self._site.login
        if wanted is not None:
            given = self.headers.get("Authorization", "")
            if given != f"Basic {base64.b64encode(wanted.encode()).decode()}":
                self._site.refused.append(self.path)
                self.send_response(HTTPStatus.UNAUTHORIZED)
                self.send_header("WWW-Authenticate", 'Basic realm="site"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return None
        return super().send_head()

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
def serving(directory: Path, address: str, *, login: str | None = None, port: int = 0) -> Iterator[Site]:
    """Serve ``directory`` on one of the controller's addresses; ``login`` (user:password) None asks for none."""
    site = Site("", login)
    server = ThreadingHTTPServer((address, port), partial(_Handler, site=site, directory=str(directory)))
    site.url = f"http://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
