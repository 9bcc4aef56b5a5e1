"""Say how bringup opens ssh connections; inventories import it, so that plain pyinfra opens them alike."""

from __future__ import annotations

import socket
from typing import Any

import paramiko

from bringup import paths

BANNER_TIMEOUT_S = 30
"""A host that accepts and stays silent must not hold its worker for ever; paramiko has no limit of its own."""

AUTH_TIMEOUT_S = 30
KEEPALIVE_S = 15

WAKE_S = 5.0
"""How often a silent connection is looked after. Paramiko's tenth of a second would be most of what a controller does
while many hosts are at work; data and ``close`` wake it at once, so nothing waits for this."""

SILENCE_LIMIT_S = 30
"""How long the other end may leave what we sent unacknowledged; the kernel's own limit is a quarter of an hour."""


def nodelay_transport(sock: socket.socket | paramiko.Channel, **options: Any) -> paramiko.Transport:
    """Return a transport over ``sock`` that sends small packets at once.

    Paramiko leaves Nagle's algorithm on, which costs about 45 ms for every remote command. A jump host hands us
    a channel, which has no such option.
    """
    if isinstance(sock, socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux only
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_LIMIT_S * 1000)
    transport = paramiko.Transport(sock, **options)
    transport.sock.settimeout(WAKE_S)
    offered = transport.get_security_options()
    offered.ciphers = sorted(offered.ciphers, key=_is_slow)
    # A host that waits for a slow sibling sends nothing for minutes; firewalls forget silent connections.
    transport.set_keepalive(KEEPALIVE_S)
    return transport


def _is_slow(cipher: str) -> bool:
    """Return whether a cipher needs a MAC beside it, which paramiko compares byte by byte in Python."""
    return "gcm" not in cipher


def connect_options() -> dict[str, Any]:
    """Return what goes to paramiko's ``connect`` (pyinfra's data key ``ssh_paramiko_connect_kwargs``)."""
    return {
        "auth_timeout": AUTH_TIMEOUT_S,
        "banner_timeout": BANNER_TIMEOUT_S,
        "transport_factory": nodelay_transport,
    }


def known_hosts_file() -> str:
    """Return the file in which ``bringup trust`` records host keys; hosts that are not in it are refused."""
    return str(paths.state_dir() / "known_hosts")


def defaults() -> dict[str, Any]:
    """Return the data keys that every host gets unless its inventory says otherwise."""
    return {
        "ssh_known_hosts_file": known_hosts_file(),
        "ssh_paramiko_connect_kwargs": connect_options(),
        "ssh_strict_host_key_checking": "yes",
    }
