"""Make the keys of a lab: one that opens every host, and one that each host proves itself with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bringup.lab.command import run
from bringup.lab.layout import Layout


def ensure_client_key(layout: Layout) -> str:
    """Return the public key that opens every host, made once."""
    layout.ssh.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _ensure(layout.client_key, "bringup-lab")


def ensure_host_key(layout: Layout, name: str) -> str:
    """Return the public host key of ``name``, made once."""
    layout.host_key(name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _ensure(layout.host_key(name), name)


def write_known_hosts(layout: Layout, addresses: Mapping[str, str]) -> None:
    """Write the host keys of ``addresses`` (name to address), so that checking can be strict at once."""
    lines = [
        f"{name},{address} {' '.join(ensure_host_key(layout, name).split()[:2])}\n"
        for name, address in sorted(addresses.items())
    ]
    fresh = layout.known_hosts.with_name("known_hosts.new")
    fresh.write_text("".join(lines))
    fresh.replace(layout.known_hosts)


def _ensure(key: Path, comment: str) -> str:
    public = key.with_name(key.name + ".pub")
    if not public.exists():
        # Made aside and renamed, public part last: an interrupted lab never keeps half a pair.
        fresh = key.with_name(f".{key.name}.{os.getpid()}")
        run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(fresh)],
            input_text="y\n",
            what=f"cannot make the key {key}",
        )
        fresh.replace(key)
        fresh.with_name(fresh.name + ".pub").replace(public)
    return public.read_text().strip()
