"""Put sshds of their own beside a lab's hosts, so that a benchmark has more of them to reach than the lab has hosts.

    with sshd_namespaces.beside(lab) as sshds:
        for sshd in sshds.first(198): ...

Each sshd has a host key, an address and a network namespace of its own, joined to the lab's bridge by a cable of its
own. All else is that of a running lab host, the hosts taking turns: files, processes, systemd and journal, so whoever
comes in finds that host. Addresses are taken from the top of the lab's range, where hosts come last.

Nothing is left when the context ends, be it by an exception or a signal. What a kill -9 leaves is found by its name
and removed by the next context, and by `bringup lab down`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from types import FrameType

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bringup.errors import InputError, LabError
from bringup.lab import cgroup, network
from bringup.lab.command import run
from bringup.lab.host import Host
from bringup.lab.lab import Lab

NAME = "sshd-namespaces"
"""The control group of the sshds within that of their lab host, and their directory in the host's /run."""

LIMIT_S = 60.0
"""How long all may take to listen, and what they used to go away; 198 take a few seconds on two processors."""

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Enters the control groups that the arguments name, and starts an sshd for each line; each goes into the background
# and becomes a child of the host's systemd. The host's own settings hold, its limits for unfinished logins too.
START = f"""
set -e
leader=$1; shift
for group; do echo $$ > "$group/cgroup.procs"; done
while read -r namespace address; do
  nsenter --target "$leader" --mount --uts --ipc --pid --cgroup --net="{network.NAMESPACES}/$namespace" --root --wd \\
    /usr/sbin/sshd -o "ListenAddress=$address" -o "HostKey=/run/{NAME}/$address.key" \\
    -o "PidFile=/run/{NAME}/$address.pid" < /dev/null
done
"""


@dataclass(frozen=True)
class Sshd:
    """One that listens: the lab host it is in, its address, and its public host key as known_hosts has it."""

    host: str
    address: str
    host_key: str


class Sshds:
    """The sshds beside one lab's hosts; ``beside`` makes this and takes it down."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._started: list[Sshd] = []

    def first(self, count: int) -> tuple[Sshd, ...]:
        """Return ``count`` sshds, those that were returned before first; missing ones are started.

        Raises InputError when the lab's range has no room, LabError when a lab host is down or an sshd fails.
        """
        if (missing := count - len(self._started)) > 0:
            self._started += self._start(missing)
        return tuple(self._started[: max(count, 0)])

    def _start(self, count: int) -> list[Sshd]:
        hosts = sorted(self._lab.hosts.values(), key=lambda host: host.plan.address)
        leaders = {host.name: leader for host in hosts if (leader := host.leader()) is not None}
        if down := [host.name for host in hosts if host.name not in leaders]:
            raise LabError(f"{', '.join(down)} does not run", hint="`bringup lab up` starts it")
        addresses = self._free(hosts, count)
        _attach(addresses, self._lab.addresses)
        started: dict[str, list[Sshd]] = {name: [] for name in leaders}
        found = []
        for at, address in enumerate(addresses, len(self._started)):
            name = hosts[at % len(hosts)].name
            sshd = Sshd(name, str(address), _lay_in_key(leaders[name], address))
            started[name].append(sshd)
            found.append(sshd)
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(lambda host: _launch(host, leaders[host.name], started[host.name]), hosts))
        for name, sshds in started.items():
            _wait_until_listening(leaders[name], sshds)
        return found

    def _free(self, hosts: Sequence[Host], count: int) -> list[IPv4Address]:
        """Return the next addresses from the top of the range."""
        addresses, used = self._lab.addresses, len(self._started)
        if (room := int(addresses.address(addresses.capacity)) - int(hosts[-1].plan.address)) < used + count:
            raise InputError(
                f"no addresses for {used + count} sshds in {addresses}",
                why=f"{room} are left above the lab's hosts",
                hint="`bringup lab down`, then `bringup lab up` with a wider --range",
            )
        return [addresses.address(addresses.capacity - at) for at in range(used, used + count)]


@contextmanager
def beside(lab: Lab) -> Iterator[Sshds]:
    """Give sshds beside the hosts of a lab that is up, until the context ends; whatever was left before goes first.

    SIGTERM and SIGHUP end the program through this context, as Ctrl-C does. To be entered in the main thread only.
    Raises LabError when the lab is not up, while another process has such a context for it, or when something
    cannot be removed.
    """
    lab.record()
    with _alone(lab), _ended_by_signals():
        try:
            remove(lab)
            yield Sshds(lab)
        finally:
            for number in ENDINGS:
                signal.signal(number, signal.SIG_IGN)
            remove(lab)


def remove(lab: Lab) -> None:
    """Remove all sshds beside the hosts of a lab with what they used, found by name."""
    hosts = lab.hosts.values()
    for host in hosts:
        if not cgroup.end(_groups(host), timeout_s=LIMIT_S):
            raise LabError(f"sshds in {host.name} do not end", why=f"control groups {_groups(host)}")
        if (leader := host.leader()) is not None:
            shutil.rmtree(_directory(leader), ignore_errors=True)
    # Without its bridge the lab is down, nothing of it is left, and the range may be another's by now.
    if network.is_owned(lab.addresses, lab.layout.state_dir):
        _detach({host.plan.address for host in hosts}, lab.addresses)


# ---------------------------------------------------------------- network


def _attach(addresses: Sequence[IPv4Address], within: network.Range) -> None:
    """Make namespaces and cables, named as the lab names those of its hosts: `lab down` finds them too."""
    what = f"cannot give {addresses[0]} to {addresses[-1]} a network"
    lines = []
    for address in addresses:
        space, end, hardware = network.namespace(address), network.cable(address), network.hardware_address(address)
        lines += [
            f"netns add {space}",
            f"link add name {end} type veth peer name eth0 address {hardware} netns {space}",
            # Without IPv6: else each of hundreds would wake all others with its search for neighbours and routers.
            f"link set dev {end} addrgenmode none master {within.bridge} up",
        ]
    _ip(lines, what=what)
    for address in addresses:
        inside = [
            "link set dev lo up",
            "link set dev eth0 addrgenmode none",
            f"addr add {address}/{within.network.prefixlen} dev eth0",
            "link set dev eth0 up",
        ]
        _ip(inside, "-n", network.namespace(address), what=what)


def _detach(kept: set[IPv4Address], within: network.Range) -> None:
    """Remove every namespace and cable of the range but those of the lab's hosts."""
    if spaces := [network.namespace(address) for address in _named(network.NAMESPACES, "bu-", kept, within)]:
        _ip([f"netns del {space}" for space in spaces], "-force", what=f"cannot remove namespaces {spaces}")
    # The kernel takes a cable away with its namespace, all together in a moment; asked one by one it takes seconds.
    deadline = time.monotonic() + LIMIT_S
    while cables := _named(Path("/sys/class/net"), "buv", kept, within):
        if time.monotonic() > deadline:
            raise LabError(
                f"{len(cables)} network cables are left",
                why=f"a process that is not the benchmark's is in the namespace of {cables[0]}",
            )
        time.sleep(0.02)


def _named(directory: Path, prefix: str, kept: set[IPv4Address], within: network.Range) -> list[IPv4Address]:
    """Return the addresses within the range, but ``kept``, that entries of ``directory`` are named after."""
    found = [IPv4Address(int(path.name.removeprefix(prefix), 16)) for path in directory.glob(f"{prefix}????????")]
    return sorted(address for address in found if address in within.network and address not in kept)


def _ip(lines: Sequence[str], *options: str, what: str) -> None:
    run(["ip", *options, "-batch", "-"], input_text="\n".join(lines) + "\n", what=what)


# ---------------------------------------------------------------- inside the lab host


def _directory(leader: int) -> Path:
    """Return the sshds' directory in a host's /run, which is memory, as the controller reaches it."""
    return Path(f"/proc/{leader}/root/run/{NAME}")


def _lay_in_key(leader: int, address: IPv4Address) -> str:
    """Make a host key, put its private half into the lab host and return the public half."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    _directory(leader).mkdir(mode=0o700, exist_ok=True)
    path = _directory(leader) / f"{address}.key"
    path.touch(mode=0o600)
    path.write_bytes(private)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return public.decode()


def _groups(host: Host) -> list[Path]:
    """Return the control groups of the sshds in a host, below those that its supervisor wrote down."""
    try:
        recorded = json.loads((host.directory / "supervisor.json").read_text())["groups"]
    except FileNotFoundError:
        return []  # It does not run, and nothing in it does.
    return [Path(group) / NAME for group in recorded]


def _launch(host: Host, leader: int, sshds: Sequence[Sshd]) -> None:
    """Start ``sshds`` in one lab host."""
    groups = _groups(host)
    for group in groups:
        group.mkdir(exist_ok=True)
    run(
        ["sh", "-c", START, NAME, str(leader), *(str(group) for group in groups)],
        input_text="".join(f"{network.namespace(IPv4Address(sshd.address))} {sshd.address}\n" for sshd in sshds),
        environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        timeout_s=LIMIT_S,
        what=f"cannot start sshds in {host.name}",
    )


def _wait_until_listening(leader: int, sshds: Sequence[Sshd]) -> None:
    """Wait for the files that sshds write as soon as they listen."""
    deadline = time.monotonic() + LIMIT_S
    for sshd in sshds:
        while not (_directory(leader) / f"{sshd.address}.pid").exists():
            if time.monotonic() > deadline:
                raise LabError(f"the sshd at {sshd.address} does not listen", hint=f"see the journal of {sshd.host}")
            time.sleep(0.01)


# ---------------------------------------------------------------- this process


@contextmanager
def _alone(lab: Lab) -> Iterator[None]:
    """Hold the lab's state directory, so that nobody takes a running benchmark's sshds for what one left behind."""
    descriptor = os.open(lab.layout.state_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError(f"another process has sshds beside the hosts of {lab.layout.state_dir}") from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let signals that would end the program at once raise SystemExit; those that it ignores stay ignored."""

    def end(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in ENDINGS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
