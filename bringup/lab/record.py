"""Read and write ``lab.json``: what inventories and tests know of a lab that is up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bringup.errors import LabError
from bringup.lab.layout import Layout, default_state_dir


class HostEntry(BaseModel):
    """One host in ``lab.json``.

    ``release`` is such as ``debian13``. ``apt_url`` None means the lab's: the host is of the same release.
    """

    model_config = ConfigDict(frozen=True)

    address: str
    gpus: str
    release: str | None = None
    apt_url: str | None = None


class SshEntry(BaseModel):
    """The files that ssh needs."""

    model_config = ConfigDict(frozen=True)

    key: str
    known_hosts: str


class LabRecord(BaseModel):
    """The content of ``lab.json``. ``locks_dir`` holds the stack locks that count on lab hosts only.

    ``apt_url`` is the repository in NVIDIA's shape for the release of the first host; one of another release has
    its own.
    """

    model_config = ConfigDict(frozen=True)

    schema_: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    range: str
    bridge: str
    state_dir: str
    mirror_url: str
    apt_url: str
    apt_key_fingerprint: str
    apt_key_file: str
    hosts: dict[str, HostEntry]
    ssh: SshEntry
    locks_dir: str

    def write(self, path: Path) -> None:
        """Write the record whole, by rename."""
        fresh = path.with_suffix(".new")
        fresh.write_text(self.model_dump_json(by_alias=True, indent=1, exclude_none=True) + "\n")
        fresh.replace(path)

    @classmethod
    def read(cls, layout: Layout) -> LabRecord:
        """Read ``lab.json``. Raises LabError when the lab is not up."""
        try:
            return cls.model_validate_json(layout.record.read_text())
        except FileNotFoundError:
            why = f"there is no {layout.record}"
        except (OSError, ValidationError) as error:
            why = str(error)
        raise LabError(f"no lab is up in {layout.state_dir}", why=why, hint="`bringup lab up` makes one")


def inventory(state_dir: Path | None = None) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]:
    """Return the lab's hosts and their common data as a pyinfra group; None means the default state directory.

    Indexes, packages and locks are the lab's own, so hosts need no other server. Raises LabError when no lab is up.
    """
    layout = Layout((state_dir or default_state_dir()).absolute())
    record = LabRecord.read(layout)
    hosts = [
        (name, {"ssh_hostname": host.address, **({"bringup_apt_url": host.apt_url} if host.apt_url else {})})
        for name, host in sorted(record.hosts.items())
    ]
    indexes = sorted(path.name for path in (layout.mirror / "wheels").glob("*") if path.is_dir())
    return hosts, {
        "ssh_user": "root",
        "ssh_key": record.ssh.key,
        "ssh_known_hosts_file": record.ssh.known_hosts,
        "bringup_apt_key": record.apt_key_file,
        "bringup_apt_key_fingerprint": record.apt_key_fingerprint,
        "bringup_apt_url": record.apt_url,
        "bringup_indexes": {name: f"{record.mirror_url}/wheels/{name}/simple/" for name in indexes},
        "bringup_lock": record.locks_dir,
    }
