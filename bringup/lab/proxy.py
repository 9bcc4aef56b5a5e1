"""Forward HTTP for lab hosts that have no other way out: absolute-form requests and CONNECT.

    python -m bringup.lab.proxy RECORD ADDRESS PORT

A rehearsal of a site's proxy, bound to the lab's bridge; it keeps nothing and asks nobody for a password. The
standard library only.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from bringup.lab.process import start_ticks

_LONGEST_HEAD = 64 * 1024
_HOP_BY_HOP = (b"connection:", b"proxy-connection:", b"keep-alive:", b"proxy-authorization:")


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one request and close; a proxy for rehearsals needs no connections kept open."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, version = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        url = urlsplit(f"//{target}" if method == "CONNECT" else target)
        if not url.hostname:
            writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(url.hostname, url.port or 80)
        except OSError as error:
            writer.write(f"HTTP/1.1 502 Bad Gateway\r\nConnection: close\r\n\r\n{error}\n".encode())
            return
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            lines = [line for line in head.split(b"\r\n")[1:-2] if not line.lower().startswith(_HOP_BY_HOP)]
            first = f"{method} {path} {version}".encode("latin-1")
            far_writer.write(b"\r\n".join([first, *lines, b"Connection: close", b"", b""]))
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
    except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return
    finally:
        writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while block := await source.read(64 * 1024):
            target.write(block)
            await target.drain()
    finally:
        target.close()


async def serve(record: Path, address: str, port: int) -> None:
    """Listen, then say in ``record`` which process does."""
    server = await asyncio.start_server(handle, address, port, limit=_LONGEST_HEAD)
    fresh = record.with_suffix(".new")
    fresh.write_text(json.dumps({"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}) + "\n")
    fresh.replace(record)
    async with server:
        await server.serve_forever()


def main(argv: list[str]) -> int:
    """Serve until killed."""
    record, address, port = argv
    asyncio.run(serve(Path(record), address, int(port)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
