"""What bringup changes about paramiko's connections."""

from __future__ import annotations

import socket

from bringup import ssh


def test_a_connection_sends_at_once_and_seldom_wakes_for_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        transport = ssh.nodelay_transport(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert transport.sock.gettimeout() == ssh.WAKE_S
        assert 1 <= ssh.WAKE_S <= ssh.KEEPALIVE_S / 3
