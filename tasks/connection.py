"""Notice that a host's connection is gone, and come back to the host."""

from __future__ import annotations

import time

import gevent
import paramiko
from pyinfra.api import Host
from pyinfra.api.exceptions import ConnectError

RETRY_S = 2.0


def is_lost(host: Host) -> bool:
    """Return whether the ssh connection of a host is gone; other connectors have none to lose."""
    client = getattr(host.connector, "client", None)
    if not isinstance(client, paramiko.SSHClient):
        return False
    transport = client.get_transport()
    return transport is None or not transport.is_active()


def forget(host: Host) -> None:
    """Close a host's connection, so that the next one is a new one; pyinfra's ``disconnect`` leaves it open."""
    client = getattr(host.connector, "client", None)
    if client is not None:
        client.close()
    host.connected = False


def reconnect(host: Host, limit_s: float) -> bool:
    """Connect again, trying until the limit; return whether that worked."""
    end = time.monotonic() + limit_s
    while True:
        forget(host)
        try:
            host.connect(show_errors=False, raise_exceptions=True)
            return True
        except (ConnectError, OSError, EOFError):
            pass  # a host that boots refuses, resets and falls silent by turns
        if time.monotonic() >= end:
            return False
        gevent.sleep(RETRY_S)
