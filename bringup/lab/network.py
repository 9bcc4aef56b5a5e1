"""Give a lab its own bridge and every host its own network namespace, named after the address range.

Names follow from addresses, so several labs coexist and what a crash left behind can be found without a record.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import subprocess
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from bringup.errors import InputError, LabError
from bringup.lab import mount
from bringup.lab.command import run

DEFAULT_RANGE = "10.87.0.0/24"
FIRST_HOST = 11
"""Hosts start at .11: the addresses below are the controller's (.1) and free for what a test needs."""

NAMESPACES = Path("/run/netns")


def default_range() -> str:
    """Return the address range of the lab: ``$BRINGUP_LAB_RANGE``, else ``10.87.0.0/24``."""
    return os.environ.get("BRINGUP_LAB_RANGE") or DEFAULT_RANGE


@dataclass(frozen=True)
class Range:
    """One lab's addresses and the names of what carries them."""

    network: IPv4Network

    @classmethod
    def parse(cls, text: str) -> Range:
        """Read ``10.87.0.0/24``.

        Raises InputError for anything but a private IPv4 network of /16 to /28 written by its first address.
        """
        try:
            network = ipaddress.ip_network(text.strip())
        except ValueError as error:
            raise InputError(
                f"not an address range: {text!r}", why=str(error), hint=f"wanted a form like {DEFAULT_RANGE}"
            ) from None
        if not isinstance(network, IPv4Network) or not network.is_private or network.is_loopback:
            raise InputError(
                f"not a private IPv4 range: {text!r}",
                hint="lab hosts must never take an address that is somebody's; take a part of 10.0.0.0/8",
            )
        if not 16 <= network.prefixlen <= 28:
            raise InputError(
                f"a range of {network.num_addresses} addresses is not usable: {text!r}",
                hint="wanted /16 to /28: addresses .1 to .10 stay with the controller",
            )
        return cls(network)

    def __str__(self) -> str:
        return str(self.network)

    @property
    def controller(self) -> IPv4Address:
        """Return the controller's address on the bridge, where the mirror answers."""
        return self.network.network_address + 1

    @property
    def capacity(self) -> int:
        """Return how many hosts fit."""
        return self.network.num_addresses - 1 - FIRST_HOST

    def address(self, number: int) -> IPv4Address:
        """Return the address of host ``number``, counted from 1. Raises InputError when the range is full."""
        if not 1 <= number <= self.capacity:
            raise InputError(
                f"no address for host {number} in {self}",
                why=f"the range holds {self.capacity} hosts",
                hint="choose a wider --range",
            )
        return self.network.network_address + (FIRST_HOST - 1 + number)

    @property
    def tag(self) -> str:
        """Return eight hex digits that no other range starting elsewhere has."""
        return f"{int(self.network.network_address):08x}"

    @property
    def bridge(self) -> str:
        """Return the name of the bridge; interface names hold at most 15 characters."""
        return f"bub{self.tag}"


def cable(address: IPv4Address) -> str:
    """Return the controller's end of the cable to the host at ``address``."""
    return f"buv{int(address):08x}"


def namespace(address: IPv4Address) -> str:
    """Return the network namespace of the host at ``address``."""
    return f"bu-{int(address):08x}"


def hardware_address(address: IPv4Address) -> str:
    """Return the locally administered MAC address of the host at ``address``."""
    return "02:62:" + int(address).to_bytes(4, "big").hex(":")


def owner_mark(state_dir: Path) -> str:
    """Return what the bridge carries as its alias, so that a lab recognises its own after a crash."""
    digest = hashlib.sha256(str(state_dir).encode()).hexdigest()[:12]
    return f"bringup-lab {digest} {str(state_dir)[:200]}"


def check_free(addresses: Range, state_dir: Path) -> bool:
    """Return True when this state directory's own bridge already carries the range, False when it is free.

    Raises LabError when anything else routes a part of it: hosts of the lab must not shadow real ones.
    """
    found = json.loads(run(["ip", "-json", "-details", "link", "show"], what="cannot list interfaces"))
    aliases = {link["ifname"]: link.get("ifalias", "") for link in found}
    is_ours = aliases.get(addresses.bridge) == owner_mark(state_dir)
    routes = json.loads(run(["ip", "-4", "-json", "route", "show", "table", "all"], what="cannot list routes"))
    clash = routed_by(routes, addresses, own=addresses.bridge if is_ours else None)
    if clash is not None:
        raise LabError(
            f"address range {addresses} is already routed",
            why=f"{clash['dst']} goes through {clash.get('dev', 'a route without interface')}"
            + (f" ({aliases[clash['dev']]})" if aliases.get(clash.get("dev", "")) else ""),
            hint="choose another with --range or BRINGUP_LAB_RANGE",
        )
    if addresses.bridge in aliases and not is_ours:
        raise LabError(
            f"interface {addresses.bridge} belongs to another lab",
            why=aliases[addresses.bridge] or "it carries no owner",
            hint="choose another with --range or BRINGUP_LAB_RANGE",
        )
    return is_ours


def routed_by(routes: list[dict[str, Any]], addresses: Range, *, own: str | None = None) -> dict[str, Any] | None:
    """Return the first of ``routes`` (as ``ip -json route`` prints them) that overlaps the range.

    A default route reaches everything and claims nothing, so it does not count; neither does interface ``own``.
    """
    for route in routes:
        if route["dst"] == "default" or (own is not None and route.get("dev") == own):
            continue
        try:
            network = ipaddress.ip_network(route["dst"])
        except ValueError:
            continue
        if network.prefixlen > 0 and network.overlaps(addresses.network):
            return route
    return None


def make_bridge(addresses: Range, state_dir: Path) -> None:
    """Create the bridge with the controller's address. Raises LabError when it exists already."""
    bridge, width = addresses.bridge, addresses.network.prefixlen
    _batch(
        f"link add name {bridge} type bridge",
        f"link set dev {bridge} alias {json.dumps(owner_mark(state_dir))}",
        f"addr add {addresses.controller}/{width} dev {bridge}",
        f"link set dev {bridge} up",
        what=f"cannot make the bridge for {addresses}",
    )


def is_owned(addresses: Range, state_dir: Path) -> bool:
    """Return whether the bridge of this range is there and belongs to the lab in ``state_dir``."""
    mark = Path("/sys/class/net") / addresses.bridge / "ifalias"
    return mark.exists() and mark.read_text().strip() == owner_mark(state_dir)


def remove_bridge(addresses: Range) -> None:
    """Remove the bridge; the caller knows that it owns it."""
    _quietly("link", "del", "dev", addresses.bridge)


def sweep(addresses: Range) -> None:
    """Remove every namespace and cable of the range, of hosts that are on record and of others."""
    names = [path.name for path in NAMESPACES.glob("bu-*")] + [
        path.name for path in Path("/sys/class/net").glob("buv*")
    ]
    for digits in {name.removeprefix("bu-").removeprefix("buv") for name in names}:
        if len(digits) == 8 and (address := IPv4Address(int(digits, 16))) in addresses.network:
            detach(address)
    # `ip netns add` mounts this directory over itself and never takes it back.
    if mount.below(NAMESPACES) == [NAMESPACES] and not any(NAMESPACES.iterdir()):
        subprocess.run(["umount", str(NAMESPACES)], check=False, capture_output=True)


def attach(address: IPv4Address, addresses: Range) -> None:
    """Make the namespace of one host, with a cable into the bridge and its address set.

    The host needs no network service of its own, and a reboot keeps the cable.
    """
    space, end = namespace(address), cable(address)
    detach(address)
    _batch(
        f"netns add {space}",
        # The same hardware address every time: a neighbour's cache would hide a host that was made anew.
        f"link add name {end} type veth peer name eth0 address {hardware_address(address)} netns {space}",
        f"link set dev {end} master {addresses.bridge} up",
        what=f"cannot give {address} a network",
    )
    _batch(
        "link set dev lo up",
        f"addr add {address}/{addresses.network.prefixlen} dev eth0",
        "link set dev eth0 up",
        inside=space,
        what=f"cannot give {address} a network",
    )


def detach(address: IPv4Address) -> None:
    """Remove the namespace and the cable of one host, whatever of it is there."""
    if (Path("/sys/class/net") / cable(address)).exists():
        _quietly("link", "del", "dev", cable(address))
    if (NAMESPACES / namespace(address)).exists():
        _quietly("netns", "del", namespace(address))


def close_port(address: IPv4Address, target: IPv4Address, *, port: int) -> None:
    """Take the way to one port of ``target`` from a host; every other port stays reachable.

    There is no packet filter on many machines, but a routing rule that prohibits does the same for one host.
    """
    _batch(
        f"rule add to {target} ipproto tcp dport {port} prohibit",
        inside=namespace(address),
        what=f"cannot close port {port} to {address}",
    )


def plug(address: IPv4Address, *, is_in: bool) -> None:
    """Pull the network cable of one host, or put it back."""
    state = "up" if is_in else "down"
    _batch(f"link set dev {cable(address)} {state}", what=f"cannot set the cable of {address} {state}")


def is_plugged(address: IPv4Address) -> bool:
    """Return whether the controller's end of the cable is there and up."""
    flags = Path("/sys/class/net") / cable(address) / "flags"
    return flags.exists() and bool(int(flags.read_text(), 16) & 1)


def _batch(*lines: str, what: str, inside: str | None = None) -> None:
    space = ["-n", inside] if inside else []
    run(["ip", *space, "-batch", "-"], input_text="\n".join(lines) + "\n", what=what)


def _quietly(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=False, capture_output=True, timeout=60)
