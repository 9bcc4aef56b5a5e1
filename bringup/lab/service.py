"""Run what a lab's hosts reach on the controller: the package mirror and, where a host needs it, an HTTP proxy."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from bringup.errors import LabError
from bringup.lab import mirror, process
from bringup.lab.layout import Layout
from bringup.lab.mirror import Mirror
from bringup.lab.network import Range
from bringup.lab.shape import PROXY_PORT

MIRROR_PORT = 8087


def build_mirror(layout: Layout, addresses: Range, codename: str, tell: Callable[[str], None]) -> Mirror:
    """Make the files that the mirror serves, unless they are there."""
    url = f"http://{addresses.controller}:{MIRROR_PORT}"
    return mirror.build(layout.state_dir, codename=codename, url=url, progress=tell)


def start_mirror(layout: Layout, addresses: Range, built: Mirror) -> None:
    """Serve the mirror on the bridge, unless it is served already."""
    if mirror_is_up(layout):
        return
    with warnings.catch_warnings():
        # The server is meant to outlive us, which Python takes for a child that was forgotten.
        warnings.simplefilter("ignore", ResourceWarning)
        server = mirror.serve(built, str(addresses.controller), MIRROR_PORT)
    _save(layout.server, server.pid)


def mirror_is_up(layout: Layout) -> bool:
    """Return whether the mirror's server runs."""
    return _running(layout.server) is not None


def start_proxy(layout: Layout, addresses: Range) -> None:
    """Start the HTTP proxy on the bridge, unless it runs."""
    if _running(layout.proxy):
        return
    layout.proxy.unlink(missing_ok=True)
    process.detach(
        "bringup.lab.proxy",
        [str(layout.proxy), str(addresses.controller), str(PROXY_PORT)],
        log=layout.state_dir / "proxy.log",
    )
    deadline = time.monotonic() + 15
    while not _running(layout.proxy):
        if time.monotonic() > deadline:
            raise LabError("the lab's HTTP proxy does not start", hint=f"see {layout.state_dir / 'proxy.log'}")
        time.sleep(0.02)


def stop_all(layout: Layout) -> None:
    """Stop mirror and proxy, running or not."""
    # By its configuration, not by its record: a server that was started a moment ago has none.
    for pid in process.mentioning(str(layout.mirror / "nginx" / "nginx.conf")):
        mirror.stop(pid)
    if entry := _running(layout.proxy):
        process.end(*entry)
    layout.server.unlink(missing_ok=True)
    layout.proxy.unlink(missing_ok=True)


def _save(record: Path, pid: int) -> None:
    fresh = record.with_suffix(".new")
    fresh.write_text(json.dumps({"pid": pid, "start_ticks": process.start_ticks(pid)}) + "\n")
    fresh.replace(record)


def _running(record: Path) -> tuple[int, int] | None:
    """Return process id and start of the process that ``record`` names; None when it does not run."""
    try:
        entry = json.loads(record.read_text())
    except (OSError, ValueError):
        return None
    return (entry["pid"], entry["start_ticks"]) if process.is_alive(entry["pid"], entry["start_ticks"]) else None
