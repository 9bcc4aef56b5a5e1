"""A small HTTP server on the loopback that serves one wheel, well or badly."""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOGIN = ("robot", "s3cret")


@dataclass
class Served:
    """What the server holds and how it behaves; ``asked`` records the Range of each request, None without one."""

    data: bytes
    manner: str = "good"
    url: str = ""
    listed: str = ""
    asked: list[str | None] = field(default_factory=list)
    logins: list[str | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Served

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        served = self.served
        served.asked.append(self.headers.get("Range"))
        served.logins.append(self.headers.get("Authorization"))
        served.paths.append(self.path)
        number = len(served.asked)
        getattr(self, "_" + served.manner.replace("-", "_"))(number)

    def _range(self) -> tuple[int, int]:
        size = len(self.served.data)
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        assert match is not None
        if not match[1]:
            return max(0, size - int(match[2])), size
        return int(match[1]), min(size, int(match[2]) + 1)

    def _send(
        self,
        status: int,
        body: bytes = b"",
        *,
        said: str | None = None,
        length: int | None = None,
        **headers: str,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        if said is not None:
            self.send_header("Content-Range", said)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        if length is not None and length != len(body):
            self.close_connection = True

    def _part(self, *, total: int | None = None, shift: int = 0, **headers: str) -> None:
        start, end = self._range()
        start, end = start + shift, end + shift
        body = self.served.data[start:end]
        self._send(206, body, said=f"bytes {start}-{end - 1}/{total or len(self.served.data)}", **headers)

    def _good(self, number: int) -> None:
        self._part(ETag='"one"')

    def _no_ranges(self, number: int) -> None:
        self._send(200, self.served.data)

    def _no_ranges_no_length(self, number: int) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(self.served.data)
        self.close_connection = True

    def _no_ranges_cut(self, number: int) -> None:
        self._send(200, self.served.data[:-100], length=len(self.served.data))

    def _no_ranges_other_file(self, number: int) -> None:
        self._send(200, self.served.data[:-1] + b"?")

    def _ranges_at_first(self, number: int) -> None:
        if number == 1:
            self._part()
        else:
            self._send(200, self.served.data)

    def _cut(self, number: int) -> None:
        start, end = self._range()
        body = self.served.data[start:end]
        said = f"bytes {start}-{end - 1}/{len(self.served.data)}"
        self._send(206, body[: len(body) // 2], said=said, length=len(body))

    def _cut_once(self, number: int) -> None:
        if number == 2:
            self._cut(number)
        else:
            self._part()

    def _short(self, number: int) -> None:
        start, end = self._range()
        body = self.served.data[start:end]
        self._send(206, body[:-1], said=f"bytes {start}-{end - 1}/{len(self.served.data)}")

    def _long(self, number: int) -> None:
        start, end = self._range()
        body = self.served.data[start:end] + b"more"
        self._send(206, body, said=f"bytes {start}-{end - 1}/{len(self.served.data)}")

    def _shifted(self, number: int) -> None:
        self._part(shift=-1 if number == 1 else 1)

    def _silently_shifted(self, number: int) -> None:
        """Say the right range and send other bytes: only the file's own structure can tell."""
        start, end = self._range()
        said = f"bytes {start}-{end - 1}/{len(self.served.data)}"
        shift = 0 if number == 1 else 3
        self._send(206, self.served.data[start + shift : end + shift], said=said)

    def _grown(self, number: int) -> None:
        self._part(total=len(self.served.data) + (number > 1))

    def _replaced(self, number: int) -> None:
        self._part(ETag=f'"{number > 1}"')

    def _no_content_range(self, number: int) -> None:
        start, end = self._range()
        self._send(206, self.served.data[start:end])

    def _huge(self, number: int) -> None:
        self._send(206, b"x" * 10, said="bytes 0-9/99999999999999")

    def _compressed(self, number: int) -> None:
        self._part(Content_Encoding="gzip")

    def _failing(self, number: int) -> None:
        self._send(503, b"busy")

    def _failing_once(self, number: int) -> None:
        if number == 2:
            self._send(503, b"busy", Retry_After="0")
        else:
            self._part()

    def _absent(self, number: int) -> None:
        self._send(404, b"no")

    def _out_of_range(self, number: int) -> None:
        self._send(416, b"", said=f"bytes */{len(self.served.data)}")

    def _locked(self, number: int) -> None:
        wanted = "Basic " + base64.b64encode(":".join(LOGIN).encode()).decode()
        if self.headers.get("Authorization") == wanted:
            self._part()
        else:
            self._send(401, b"who?", WWW_Authenticate='Basic realm="x"')

    def _json_page(self, number: int) -> None:
        self._send(200, self.served.data, Content_Type="application/vnd.pypi.simple.v1+json")

    def _locked_index(self, number: int) -> None:
        """Ask for a login for everything: pages list one wheel, which lies beside them or ``elsewhere``."""
        wanted = "Basic " + base64.b64encode(":".join(LOGIN).encode()).decode()
        if self.headers.get("Authorization") != wanted:
            self._send(401, b"who?")
        elif self.path.endswith(".whl"):
            self._part()
        else:
            self._send(200, f'<a href="{self.served.listed}">x</a>'.encode())

    def _redirected(self, number: int) -> None:
        if self.path.startswith("/store/"):
            self._part()
        else:
            self._send(302, b"", Location="/store/" + self.path.rsplit("/", 1)[-1])

    def _expiring(self, number: int) -> None:
        """Redirect to an address that is good for one range."""
        if not self.path.startswith("/signed-"):
            self._send(302, b"", Location=f"/signed-{number}/" + self.path.rsplit("/", 1)[-1])
        elif self.path.startswith(f"/signed-{number - 1}/"):
            self._part()
        else:
            self._send(403, b"expired")

    def _circle(self, number: int) -> None:
        self._send(302, b"", Location=self.path)

    def _hanging_up(self, number: int) -> None:
        self.close_connection = True

    def _stalling(self, number: int) -> None:
        start, end = self._range()
        said = f"bytes {start}-{end - 1}/{len(self.served.data)}"
        self._send(206, self.served.data[start : start + 10], said=said, length=end - start)
        time.sleep(2)


@contextmanager
def serving(data: bytes, manner: str = "good", name: str = "wheel.whl") -> Iterator[Served]:
    """Serve ``data`` in a manner: the name of a method of Handler."""
    served = Served(data, manner)
    handler = type("Bound", (Handler,), {"served": served})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}/files/{name}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
