"""Make, boot and remove one lab host: a root file system over the base image, an address, a supervised systemd."""

from __future__ import annotations

import shutil
import signal
import socket
import time
import uuid
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bringup.errors import HostError, LabError
from bringup.lab import cgroup, mount, network, process, shape
from bringup.lab.base import SUDO_USER
from bringup.lab.mirror import RELEASES, Mirror
from bringup.lab.shape import Trait

_SUPERVISOR = "bringup.lab.supervisor"

State = Literal["running", "frozen", "starting", "stopped"]


class HostPlan(BaseModel):
    """Everything that decides what one host is; ``host.json`` in its directory, written when the host is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_: Literal[1] = Field(default=1, alias="schema", serialization_alias="schema")
    name: str
    address: IPv4Address
    controller: IPv4Address
    gpus: str
    traits: tuple[Trait, ...] = ()
    base: Path
    namespace: str
    group: str
    binds: dict[str, str] = {}

    @property
    def codename(self) -> str:
        """Return the codename of the host's release; the directory of its base image begins with it."""
        return self.base.parent.name.rpartition("-")[0]

    @property
    def release(self) -> str:
        """Return the host's release as NVIDIA's repository names it, such as ``debian13``."""
        return RELEASES[self.codename]


class _Supervisor(BaseModel):
    """What the supervisor wrote about itself."""

    model_config = ConfigDict(frozen=True)

    pid: int
    start_ticks: int
    groups: tuple[Path, ...]
    boots: int = 0


@dataclass(frozen=True)
class Host:
    """One host of the lab, by its plan and its directory."""

    plan: HostPlan
    directory: Path

    @classmethod
    def load(cls, directory: Path) -> Host:
        """Read a host from its directory. Raises LabError when ``host.json`` is missing or not readable."""
        try:
            return cls(HostPlan.model_validate_json((directory / "host.json").read_text()), directory)
        except (OSError, ValidationError) as error:
            raise LabError(
                f"{directory / 'host.json'} cannot be read", why=str(error), hint="`bringup lab down` removes it"
            ) from None

    @property
    def name(self) -> str:
        """Return the host's name."""
        return self.plan.name

    @property
    def root(self) -> Path:
        """Return the host's root directory, mounted while the host exists."""
        return self.directory / "root"

    def mount(self) -> None:
        """Mount the root file system, and what the host's shape puts beside it; mounted already is left so."""
        if not mount.below(self.root):
            mount.overlay(self.plan.base, self.directory / "upper", self.directory / "work", self.root)
        if Trait.OPT_OWN_FS in self.plan.traits and not mount.below(self.directory / "opt"):
            mount.image(self.directory / "opt.img", self.directory / "opt", size_bytes=shape.OPT_BYTES)

    def personalise(self, *, host_key: Path, client_key: str) -> None:
        """Lay in the name, the keys and the shape: all that makes this host another one than its siblings."""
        key = host_key.read_text()
        texts = {
            "etc/hostname": (f"{self.name}\n", 0o644),
            "etc/hosts": (f"127.0.0.1 localhost\n{self.plan.address} {self.name}\n", 0o644),
            "etc/machine-id": (f"{uuid.uuid4().hex}\n", 0o444),
            "etc/ssh/ssh_host_ed25519_key": (key, 0o600),
            "etc/ssh/ssh_host_ed25519_key.pub": (host_key.with_name(f"{host_key.name}.pub").read_text(), 0o644),
            "root/.ssh/authorized_keys": (client_key + "\n", 0o600),
            f"home/{SUDO_USER}/.ssh/authorized_keys": (client_key + "\n", 0o600),
        }
        for name, (text, mode) in texts.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_text(text)
            path.chmod(mode)
        home = self.root / "home" / SUDO_USER
        owner = home.stat()
        for path in (home / ".ssh", home / ".ssh/authorized_keys"):
            shutil.chown(path, owner.st_uid, owner.st_gid)
        for name in ("root/.ssh", f"home/{SUDO_USER}/.ssh"):
            (self.root / name).chmod(0o700)
        shape.lay_in(self.root, self.plan.traits, controller=self.plan.controller)

    def add_distribution(self, mirror: Mirror) -> None:
        """Name the lab's stand-in for the distribution as the host's own apt source, with its key."""
        key = Path("/usr/share/keyrings/bringup-lab.gpg")
        shutil.copyfile(mirror.key_file, self.root / key.relative_to("/"))
        (self.root / "etc/apt/sources.list.d/distribution.sources").write_text(mirror.distro_sources(str(key)))

    def save(self) -> None:
        """Write ``host.json``: from now on the host counts as made."""
        fresh = self.directory / "host.json.new"
        fresh.write_text(self.plan.model_dump_json(by_alias=True, indent=1) + "\n")
        fresh.replace(self.directory / "host.json")

    def start(self, addresses: network.Range, *, mirror_port: int) -> None:
        """Boot the host under its supervisor; returns at once."""
        network.attach(self.plan.address, addresses)
        if Trait.PROXY_ONLY in self.plan.traits:
            network.close_port(self.plan.address, self.plan.controller, port=mirror_port)
        process.detach(_SUPERVISOR, [str(self.directory)], log=self.directory / "console.log")

    def stop(self) -> None:
        """End every process of the host at once, as a power cut would, and remove its network."""
        record = self._record()
        # One that was started a moment ago has not written its record yet.
        started = process.with_arguments(_SUPERVISOR, str(self.directory))
        cgroup.send(started - {record.pid if record else 0}, signal.SIGKILL)
        # Without a readable record the host's group still names every process, the supervisor among them.
        groups = record.groups if record else [top / self.plan.group for top in cgroup.hierarchies()]
        if not cgroup.end(groups, last=record.pid if record else None):
            left = ", ".join(str(pid) for pid in sorted(cgroup.processes(groups)))
            raise HostError("its processes do not end", host=self.name, why=f"process ids {left}")
        (self.directory / "supervisor.json").unlink(missing_ok=True)
        network.detach(self.plan.address)

    def discard(self) -> None:
        """Unmount and remove what the host ever wrote; its directory with it."""
        mount.release(self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)

    def state(self) -> State:
        """Return what the host's processes say, without a word to the host itself."""
        record = self._record()
        if record is None or not process.is_alive(record.pid, record.start_ticks):
            return "stopped"
        leader = self.leader()
        if leader is None or not _is_past_boot(leader):
            return "starting"
        stat = Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()
        return "frozen" if stat[0] == "T" else "running"

    def boots(self) -> int:
        """Return how often the host booted since the lab last started it; 0 when it does not run."""
        record = self._record()
        return record.boots if record else 0

    def leader(self) -> int | None:
        """Return the host's process 1 as the controller numbers it; None while there is none."""
        return next((pid for pid in sorted(self._processes()) if process.in_namespace_as_first(pid)), None)

    def wait_until_up(self, deadline: float) -> None:
        """Wait until sshd greets and logins are open; ``deadline`` in seconds of the monotonic clock.

        Reads the greeting and hangs up, which opens no session. Raises HostError at the deadline.
        """
        while True:
            if self._record() and self._greets() and self.state() == "running":
                return
            if time.monotonic() > deadline:
                log = (self.directory / "console.log").read_text(errors="replace").splitlines()[-3:]
                raise HostError(
                    "does not answer ssh",
                    host=self.name,
                    why=" | ".join(log) or "it says nothing on its console",
                    hint=f"see {self.directory / 'console.log'}",
                )
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process inside the host; its supervisor does not get it."""
        inside = {pid for pid in self._processes() if _is_inside(pid)}
        cgroup.send(inside, number)

    def _greets(self) -> bool:
        try:
            with socket.create_connection((str(self.plan.address), 22), timeout=2) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def _record(self) -> _Supervisor | None:
        try:
            return _Supervisor.model_validate_json((self.directory / "supervisor.json").read_text())
        except (OSError, ValidationError):
            return None

    def _processes(self) -> set[int]:
        record = self._record()
        return cgroup.processes(list(record.groups)) if record else set()


def _is_past_boot(leader: int) -> bool:
    """Return whether systemd runs there and lets users in; it keeps them out with a file until then."""
    inside = Path(f"/proc/{leader}/root/run")
    return (inside / "systemd/system").is_dir() and not (inside / "nologin").exists()


def _is_inside(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return any(line.startswith("NSpid:") and len(line.split()) > 2 for line in status.splitlines())
