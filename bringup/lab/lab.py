"""A lab: rehearsal hosts on one bridge beside a package mirror, all of it below one state directory."""

from __future__ import annotations

import fcntl
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import IO

from bringup.errors import InputError, LabError
from bringup.lab import base, keychain, mount, network, service, silicon, source
from bringup.lab.guard import Guard, Undo
from bringup.lab.host import Host, HostPlan, State
from bringup.lab.layout import Layout, default_state_dir
from bringup.lab.mirror import Mirror, codename_of
from bringup.lab.network import Range
from bringup.lab.record import HostEntry, LabRecord, SshEntry
from bringup.lab.shape import Trait

DEFAULT_GPUS = "8x NVIDIA RTX PRO 6000 Blackwell Server Edition"
DEFAULT_HOSTS = 2

START_LIMIT_S = 90.0
"""How long hosts may take from power-on to ssh; four take 6 to 10 s on two processors."""

LOCK_LIMIT_S = 900.0
"""How long a command waits for another one that is changing the same lab."""

_TOOLS = {
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "mkfs.ext4": "e2fsprogs",
    "nginx": "nginx-light",
    "setpriv": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "systemd-nspawn": "systemd-container",
}

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Came:
    """What ``Lab.up`` did: the hosts it made and those it only started again, and how long it took."""

    made: tuple[str, ...]
    started: tuple[str, ...]
    seconds: float


class Lab:
    """The lab of one state directory, up or not. Every method needs root."""

    def __init__(self, layout: Layout, addresses: Range, tell: Tell) -> None:
        self.layout = layout
        self.addresses = addresses
        self._tell = tell

    @classmethod
    def open(cls, state_dir: Path | None = None, addresses: str | None = None, *, tell: Tell = lambda _: None) -> Lab:
        """Return the lab of ``state_dir`` (None: ``$BRINGUP_LAB_STATE`` or the default).

        ``addresses`` None means the range the lab has, else ``$BRINGUP_LAB_RANGE`` or the default. Raises
        LabError when the lab exists with another range, InputError for an unusable one.
        """
        layout = Layout((state_dir or default_state_dir()).absolute())
        recorded = layout.range.read_text().strip() if layout.range.exists() else None
        asked = str(Range.parse(addresses)) if addresses else None
        if recorded and asked and recorded != asked:
            raise LabError(
                f"the lab in {layout.state_dir} uses {recorded}, not {asked}",
                hint="leave --range out, name another --state-dir, or `bringup lab down` first",
            )
        return cls(layout, Range.parse(recorded or asked or network.default_range()), tell)

    @property
    def hosts(self) -> dict[str, Host]:
        """Return every host that exists, by name, running or not."""
        found = sorted(self.layout.hosts.glob("*/host.json"))
        return {path.parent.name: Host.load(path.parent) for path in found}

    def host(self, name: str) -> Host:
        """Return one host. Raises InputError for a name the lab does not have."""
        hosts = self.hosts
        if name not in hosts:
            raise InputError(
                f"the lab has no host {name!r}",
                why=f"it has {', '.join(hosts) or 'none'}",
                hint="`bringup lab status` lists them",
            )
        return hosts[name]

    def states(self) -> dict[str, State]:
        """Return the state of every host; the hosts themselves are not asked."""
        return {name: host.state() for name, host in self.hosts.items()}

    def is_up(self) -> bool:
        """Return whether ``up`` finished and its mirror still answers; hosts may be in any state."""
        return self.layout.record.exists() and service.mirror_is_up(self.layout)

    def record(self) -> LabRecord:
        """Read ``lab.json``. Raises LabError when the lab is not up."""
        return LabRecord.read(self.layout)

    def up(
        self,
        hosts: int = DEFAULT_HOSTS,
        gpus: str | Mapping[str, str] | None = None,
        traits: Mapping[str, Sequence[Trait]] | None = None,
        releases: str | Mapping[str, str] | None = None,
    ) -> Came:
        """Bring the lab to at least ``hosts`` running hosts, gpu-01 onwards, and return what that took.

        Hosts that run are left alone: no session is opened on them. ``gpus`` and ``releases`` (``debian13``) are for
        all hosts, or by host name; for hosts they do not name, existing ones keep what they have and new ones get
        eight RTX PRO 6000 and this machine's release. When anything fails, or this process is killed, what this
        call started is taken down again. Raises LabError, HostError and InputError.
        """
        started = time.monotonic()
        wanted = {f"gpu-{number:02d}": number for number in range(1, hosts + 1)}
        boards = dict.fromkeys(wanted, gpus) if isinstance(gpus, str) else dict(gpus or {})
        traits = traits or {}
        chosen = dict.fromkeys(wanted, releases) if isinstance(releases, str) else dict(releases or {})
        self._check(wanted, boards, traits, chosen)
        with self._changing() as lock:
            has_network = network.check_free(self.addresses, self.layout.state_dir)
            existing = self.hosts
            _check_kept(existing, boards, traits, chosen)
            down = [name for name, host in existing.items() if host.state() == "stopped"]
            new = [name for name in wanted if name not in existing]
            if has_network and self.is_up() and not down and not new:
                # The mirror's recipe may be newer than the lab; what is built already is only checked.
                self._write_record(self._build_mirrors({host.plan.codename for host in existing.values()}))
                return Came((), (), time.monotonic() - started)
            codenames = {name: codename_of(chosen[name]) if name in chosen else source.codename() for name in new}
            undo = Undo(
                state_dir=self.layout.state_dir, stop=(*down, *new), discard=tuple(new), network=not has_network
            )
            self.layout.range.write_text(f"{self.addresses}\n")
            with Guard(undo, lock):
                roots, mirrors = self._prepare(
                    bases=set(codenames.values()), kept={host.plan.codename for host in existing.values()}
                )
                if not has_network:
                    network.make_bridge(self.addresses, self.layout.state_dir)
                service.start_mirror(self.layout, self.addresses, next(iter(mirrors.values())))
                if any(Trait.PROXY_ONLY in shape for shape in traits.values()):
                    service.start_proxy(self.layout, self.addresses)
                plans = [
                    self._plan(
                        name,
                        wanted[name],
                        boards.get(name, DEFAULT_GPUS),
                        traits.get(name, ()),
                        roots[codenames[name]],
                    )
                    for name in new
                ]
                self._write_known_hosts([*existing.values(), *plans])
                self._boot([*(existing[name] for name in down), *plans], make=set(new), mirrors=mirrors)
                self._write_record(mirrors)
        return Came(tuple(new), tuple(down), time.monotonic() - started)

    def reset(self, name: str) -> None:
        """Throw away everything the host ever wrote and boot it bare, with its name, address, keys and shape."""
        host = self.host(name)
        with self._changing() as lock:
            undo = Undo(state_dir=self.layout.state_dir, stop=(name,), discard=(name,), network=False)
            with Guard(undo, lock):
                host.stop()
                host.discard()
                self._boot([host], make={name}, mirrors=self._build_mirrors({host.plan.codename}))

    def restart(self, name: str) -> None:
        """Cut the host's power and boot it again; what it wrote stays."""
        host = self.host(name)
        with self._changing():
            host.stop()
            self._boot([host])

    def down(self, *, purge: bool = False) -> tuple[str, ...]:
        """Take everything down and return the names of the hosts that were removed.

        No process, mount, namespace or bridge of the lab is left, whatever state it was in. The base image, the
        mirror's files and the keys stay for the next ``up``, unless ``purge``: then the state directory goes.
        """
        with self._changing():
            names = tuple(sorted(path.name for path in self.layout.hosts.glob("*") if path.is_dir()))
            self.undo(Undo(self.layout.state_dir, stop=names, discard=names, network=True))
            self.layout.record.unlink(missing_ok=True)
            self.layout.range.unlink(missing_ok=True)
            if purge:
                shutil.rmtree(self.layout.state_dir)
        return names

    def undo(self, undo: Undo) -> None:
        """Stop and remove what ``undo`` names; the caller holds the lab's lock."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: self._take_down(name, discard=name in undo.discard), undo.stop))
        base.remove_unfinished(self.layout)
        if undo.network:
            service.stop_all(self.layout)
            if network.is_owned(self.addresses, self.layout.state_dir):
                network.sweep(self.addresses)
                network.remove_bridge(self.addresses)

    def ssh_argv(self, name: str, *, user: str = "root") -> list[str]:
        """Return the ssh command for one host, with strict host keys and nothing of the user's own settings."""
        host = self.host(name)
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": "10",
            "IdentitiesOnly": "yes",
            "LogLevel": "ERROR",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": str(self.layout.known_hosts),
            "GlobalKnownHostsFile": "/dev/null",
        }
        return [
            *("ssh", "-F", "none", "-i", str(self.layout.client_key)),
            *(part for item in options.items() for part in ("-o", "=".join(item))),
            f"{user}@{host.plan.address}",
        ]

    def run(
        self,
        name: str,
        argv: Sequence[str],
        *,
        user: str = "root",
        input_text: str = "",
        timeout_s: float | None = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host over ssh and return status, stdout and stderr as they are (255: ssh failed)."""
        return subprocess.run(
            [*self.ssh_argv(name, user=user), "--", remote_line(argv)],
            input=input_text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )

    def inside(
        self, name: str, argv: Sequence[str], *, timeout_s: float | None = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a host's namespaces from the controller: no session, and the cable may be pulled."""
        leader = self.host(name).leader()
        if leader is None:
            raise LabError(f"{name} does not run", hint=f"`bringup lab up` starts it; see {self.layout.host(name)}")
        into = [
            "nsenter",
            "--target",
            str(leader),
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--root",
            "--wd",
        ]
        return subprocess.run(
            [*into, *argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )

    def pull_network(self, name: str) -> None:
        """Pull the host's network cable: packets are lost and nobody is told."""
        network.plug(self.host(name).plan.address, is_in=False)

    def restore_network(self, name: str) -> None:
        """Put the host's network cable back."""
        network.plug(self.host(name).plan.address, is_in=True)

    def freeze(self, name: str) -> None:
        """Stop every process of the host where it is: it still takes connections and never answers."""
        self.host(name).signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let a frozen host go on."""
        self.host(name).signal(signal.SIGCONT)

    def _check(
        self,
        wanted: Mapping[str, int],
        boards: Mapping[str, str],
        traits: Mapping[str, Sequence[Trait]],
        releases: Mapping[str, str],
    ) -> None:
        """Refuse what cannot come up before anything is touched."""
        require_tools()
        if not wanted:
            raise InputError("a lab needs at least one host", hint="wanted --hosts 1 or more")
        self.addresses.address(len(wanted))
        for name in wanted:
            silicon.describe(boards.get(name, DEFAULT_GPUS), host=name)
        if strangers := sorted({*traits, *boards, *releases} - set(wanted)):
            raise InputError(
                f"a variant is given for {', '.join(strangers)}", why=f"the lab will have {', '.join(wanted)}"
            )
        own = source.distribution()
        for name, release in releases.items():
            codename_of(release)
            if release.rstrip("0123456789") != own:
                raise InputError(
                    f"{name} cannot be of {release}",
                    why=f"base images come from this machine's mirror, which is one of {own}",
                )

    def _prepare(self, *, bases: Set[str], kept: Set[str]) -> tuple[dict[str, Path], dict[str, Mirror]]:
        """Make base images and the mirror's files side by side, each kind on one processor; both by codename.

        ``bases`` are the codenames of new hosts, ``kept`` those of hosts that have their base image.
        """
        keychain.ensure_client_key(self.layout)
        stop = Event()
        with ThreadPoolExecutor(max_workers=1) as pool:
            images = {codename: pool.submit(self._ensure_base, codename, stop) for codename in sorted(bases)}
            try:
                mirrors = self._build_mirrors(bases | kept)
                return {codename: image.result() for codename, image in images.items()}, mirrors
            except BaseException:
                # Nobody waits a minute for an image that is not wanted any more.
                stop.set()
                raise

    def _build_mirrors(self, codenames: Set[str]) -> dict[str, Mirror]:
        """Make the files that the mirror serves to hosts of these releases, unless they are there; by codename."""
        return {
            codename: service.build_mirror(self.layout, self.addresses, codename, self._tell)
            for codename in sorted(codenames)
        }

    def _ensure_base(self, codename: str, stop: Event) -> Path:
        wanted = source.find(codename)
        is_new = not base.rootfs(self.layout, wanted).is_dir()
        root = base.ensure(self.layout, wanted, tell=self._tell, stop=stop)
        if is_new:
            base.remove_unused(self.layout, keep=[root, *(host.plan.base for host in self.hosts.values())])
        return root

    def _plan(self, name: str, number: int, gpus: str, traits: Sequence[Trait], root: Path) -> Host:
        directory = self.layout.host(name)
        address = self.addresses.address(number)
        return Host(
            HostPlan(
                name=name,
                address=address,
                controller=self.addresses.controller,
                gpus=gpus,
                traits=tuple(traits),
                base=root,
                namespace=network.namespace(address),
                group=f"bringup-lab-{self.addresses.tag}-{name}",
                binds={str(directory / "opt"): "/opt"} if Trait.OPT_OWN_FS in traits else {},
            ),
            directory,
        )

    def _boot(
        self, hosts: Sequence[Host], *, make: Set[str] = frozenset(), mirrors: Mapping[str, Mirror] | None = None
    ) -> None:
        """Start ``hosts`` together and wait until all answer; those in ``make`` are made first."""
        key = keychain.ensure_client_key(self.layout)

        def start(host: Host) -> None:
            if host.name in make:
                self._take_down(host.name, discard=True)
                host.mount()
                host.personalise(host_key=self.layout.host_key(host.name), client_key=key)
                if mirrors is not None:
                    host.add_distribution(mirrors[host.plan.codename])
                silicon.install(host.root, silicon.describe(host.plan.gpus, host=host.name))
                host.save()
            else:
                # A host whose supervisor died may have processes left.
                host.stop()
                host.mount()
            host.start(self.addresses, mirror_port=service.MIRROR_PORT)

        started = time.monotonic()
        with ThreadPoolExecutor(max_workers=max(1, len(hosts))) as pool:
            list(pool.map(start, hosts))
            deadline = time.monotonic() + START_LIMIT_S
            list(pool.map(lambda host: host.wait_until_up(deadline), hosts))
        if hosts:
            self._tell(f"hosts: {', '.join(host.name for host in hosts)} up in {time.monotonic() - started:.1f} s")

    def _take_down(self, name: str, *, discard: bool) -> None:
        directory = self.layout.host(name)
        if (directory / "host.json").exists():
            Host.load(directory).stop()
        if directory.exists():
            mount.release(directory)
            if discard:
                shutil.rmtree(directory)

    def _write_known_hosts(self, hosts: Sequence[Host]) -> None:
        keychain.write_known_hosts(self.layout, {host.name: str(host.plan.address) for host in hosts})

    def _write_record(self, mirrors: Mapping[str, Mirror]) -> None:
        hosts = self.hosts
        mirror = mirrors[next(iter(hosts.values())).plan.codename]
        urls = {name: mirrors[host.plan.codename].apt_url for name, host in hosts.items()}
        LabRecord(
            range=str(self.addresses),
            bridge=self.addresses.bridge,
            state_dir=str(self.layout.state_dir),
            mirror_url=mirror.url,
            apt_url=mirror.apt_url,
            apt_key_fingerprint=mirror.key_fingerprint,
            apt_key_file=str(mirror.key_file),
            hosts={
                name: HostEntry(
                    address=str(host.plan.address),
                    gpus=host.plan.gpus,
                    release=host.plan.release,
                    apt_url=None if urls[name] == mirror.apt_url else urls[name],
                )
                for name, host in hosts.items()
            },
            ssh=SshEntry(key=str(self.layout.client_key), known_hosts=str(self.layout.known_hosts)),
            locks_dir=str(self.layout.locks),
        ).write(self.layout.record)

    @contextmanager
    def _changing(self) -> Iterator[IO[str]]:
        """Hold the lab's lock; wait for another command that changes this lab, and say so."""
        self.layout.state_dir.mkdir(parents=True, exist_ok=True)
        self.layout.hosts.mkdir(exist_ok=True)
        with open(self.layout.lock, "a+") as lock:
            deadline = time.monotonic() + LOCK_LIMIT_S
            has_told = False
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    pass
                if time.monotonic() > deadline:
                    raise LabError(
                        f"the lab in {self.layout.state_dir} is being changed",
                        why=f"{self.layout.lock} stayed locked for {LOCK_LIMIT_S:.0f} s",
                        hint=f"`fuser -v {self.layout.lock}` names the process",
                    )
                if not has_told:
                    self._tell(f"waiting for another command that changes the lab in {self.layout.state_dir}")
                    has_told = True
                time.sleep(0.1)
            yield lock


def remote_line(argv: Sequence[str]) -> str:
    """Return what ssh hands to the remote shell: one word is a line for that shell, several are kept apart."""
    return argv[0] if len(argv) == 1 else shlex.join(argv)


def require_tools() -> None:
    """Raise LabError when a system command the lab needs is missing, naming the packages that bring it."""
    missing = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    if missing:
        raise LabError(
            "the lab needs system packages that are not installed",
            why=", ".join(missing),
            hint=f"apt-get install {' '.join(missing)}",
        )


def _check_kept(
    existing: Mapping[str, Host],
    boards: Mapping[str, str],
    traits: Mapping[str, Sequence[Trait]],
    releases: Mapping[str, str],
) -> None:
    """Refuse to pretend that a host which exists has another machine's GPUs, another shape or another release."""
    for name, host in existing.items():
        release = releases.get(name, host.plan.release)
        if host.plan.release != release:
            raise LabError(
                f"{name} exists as a host of {host.plan.release}, not {release}",
                hint="`bringup lab down` first, or leave --release out",
            )
        gpus = boards.get(name, host.plan.gpus)
        if host.plan.gpus != gpus:
            raise LabError(
                f"{name} exists with {host.plan.gpus}, not {gpus}",
                hint="`bringup lab down` first, or leave --gpus out",
            )
        if name in traits and set(host.plan.traits) != set(traits[name]):
            raise LabError(
                f"{name} exists with another shape",
                why=f"it has {', '.join(host.plan.traits) or 'none'}",
                hint="`bringup lab down` first",
            )
