"""Know where a lab keeps its things below its state directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_STATE_DIR = "/var/lib/bringup-lab"


def default_state_dir() -> Path:
    """Return the state directory of the lab: ``$BRINGUP_LAB_STATE``, else ``/var/lib/bringup-lab``."""
    return Path(os.environ.get("BRINGUP_LAB_STATE") or DEFAULT_STATE_DIR)


@dataclass(frozen=True)
class Layout:
    """The paths below one state directory. Nothing is created here."""

    state_dir: Path

    @property
    def record(self) -> Path:
        """Return ``lab.json``: what inventories and tests read of a running lab."""
        return self.state_dir / "lab.json"

    @property
    def lock(self) -> Path:
        """Return the file whose lock a command holds while it changes the lab."""
        return self.state_dir / "lab.lock"

    @property
    def range(self) -> Path:
        """Return the file that names the address range from before the first interface until after the last."""
        return self.state_dir / "range"

    @property
    def bases(self) -> Path:
        """Return the directory of base images."""
        return self.state_dir / "base"

    @property
    def packages(self) -> Path:
        """Return the directory that keeps downloaded .deb files between builds of a base image."""
        return self.state_dir / "base" / "packages"

    @property
    def guard_log(self) -> Path:
        """Return what the guards of interrupted commands said."""
        return self.state_dir / "guard.log"

    @property
    def mirror(self) -> Path:
        """Return the directory that the package mirror serves."""
        return self.state_dir / "mirror"

    @property
    def locks(self) -> Path:
        """Return the directory of stack locks written against the lab's own mirror."""
        return self.state_dir / "locks"

    @property
    def ssh(self) -> Path:
        """Return the directory of the client key and of the known hosts."""
        return self.state_dir / "ssh"

    @property
    def client_key(self) -> Path:
        """Return the private key that opens every lab host."""
        return self.ssh / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        """Return the known_hosts file that names every lab host."""
        return self.ssh / "known_hosts"

    def host_key(self, name: str) -> Path:
        """Return the private host key of ``name``; it outlives the host, so a reset host is no stranger."""
        return self.ssh / "host_keys" / name

    @property
    def hosts(self) -> Path:
        """Return the directory that holds one directory for each host."""
        return self.state_dir / "hosts"

    def host(self, name: str) -> Path:
        """Return the directory of one host."""
        return self.hosts / name

    @property
    def server(self) -> Path:
        """Return the file that names the mirror's server process."""
        return self.state_dir / "mirror.json"

    @property
    def proxy(self) -> Path:
        """Return the file that names the HTTP proxy's process."""
        return self.state_dir / "proxy.json"
