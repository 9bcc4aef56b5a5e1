"""Address ranges: what is accepted, what follows from them, and what counts as routed already."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest

from bringup.errors import InputError
from bringup.lab import network
from bringup.lab.network import Range

ROUTES = [
    {"dst": "default", "gateway": "192.0.2.1", "dev": "eth0"},
    {"dst": "10.20.0.0/16", "dev": "wg0"},
    {"dst": "10.87.0.0/24", "dev": "bub0a570000"},
    {"dst": "10.87.0.1", "dev": "bub0a570000", "table": "local", "type": "local"},
    {"type": "blackhole", "dst": "172.20.0.0/14"},
]


@pytest.mark.parametrize(
    ("text", "controller", "first", "capacity", "bridge"),
    [
        pytest.param("10.87.0.0/24", "10.87.0.1", "10.87.0.11", 244, "bub0a570000", id="default"),
        pytest.param("192.168.7.16/28", "192.168.7.17", "192.168.7.27", 4, "bubc0a80710", id="smallest"),
        pytest.param("172.16.0.0/16", "172.16.0.1", "172.16.0.11", 65524, "bubac100000", id="largest"),
        pytest.param(" 10.92.1.0/24\n", "10.92.1.1", "10.92.1.11", 244, "bub0a5c0100", id="blanks around it"),
    ],
)
def test_a_range_names_everything_after_its_addresses(
    text: str, controller: str, first: str, capacity: int, bridge: str
) -> None:
    found = Range.parse(text)
    assert (str(found.controller), str(found.address(1)), found.capacity) == (controller, first, capacity)
    assert found.bridge == bridge


@pytest.mark.parametrize(
    ("text", "what"),
    [
        pytest.param("lab", "not an address range: 'lab'", id="a word"),
        pytest.param("10.87.0.5/24", "not an address range: '10.87.0.5/24'", id="a host's address"),
        pytest.param("8.8.8.0/24", "not a private IPv4 range: '8.8.8.0/24'", id="public"),
        pytest.param("127.0.0.0/24", "not a private IPv4 range: '127.0.0.0/24'", id="loopback"),
        pytest.param("fd00::/64", "not a private IPv4 range: 'fd00::/64'", id="IPv6"),
        pytest.param("10.0.0.0/8", "a range of 16777216 addresses is not usable: '10.0.0.0/8'", id="too wide"),
        pytest.param("10.87.0.0/29", "a range of 8 addresses is not usable: '10.87.0.0/29'", id="too narrow"),
    ],
)
def test_an_unusable_range_is_refused_by_name(text: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        Range.parse(text)
    assert caught.value.what == what
    assert caught.value.hint


def test_a_full_range_says_how_many_hosts_it_holds() -> None:
    addresses = Range.parse("192.168.7.16/28")
    assert str(addresses.address(4)) == "192.168.7.30"
    with pytest.raises(InputError, match="no address for host 5") as caught:
        addresses.address(5)
    assert caught.value.why == "the range holds 4 hosts"


@pytest.mark.parametrize(
    ("text", "own", "destination"),
    [
        pytest.param("10.99.0.0/24", None, None, id="free: a default route claims nothing"),
        pytest.param("10.20.30.0/24", None, "10.20.0.0/16", id="inside a wider route"),
        pytest.param("10.87.0.0/24", None, "10.87.0.0/24", id="the very range"),
        pytest.param("10.87.0.0/24", "bub0a570000", None, id="the very range, by our own bridge"),
        pytest.param("10.87.0.0/16", "bub0a570000", None, id="our own bridge inside"),
        pytest.param("172.21.5.0/24", None, "172.20.0.0/14", id="a route without an interface"),
    ],
)
def test_a_range_clashes_with_what_is_routed(text: str, own: str | None, destination: str | None) -> None:
    clash = network.routed_by(ROUTES, Range.parse(text), own=own)
    assert (clash["dst"] if clash else None) == destination


def test_names_fit_what_the_kernel_allows() -> None:
    address = ip_address("10.87.0.11")
    assert network.cable(address) == "buv0a57000b"
    assert network.namespace(address) == "bu-0a57000b"
    assert network.hardware_address(address) == "02:62:0a:57:00:0b"
    assert len(network.Range.parse("10.87.0.0/24").bridge) <= 15


def test_the_owner_of_a_bridge_is_told_apart_even_when_paths_are_long() -> None:
    one, other = (network.owner_mark(Path("/srv") / ("x" * 300) / name) for name in ("one", "other"))
    assert one != other
    # The kernel keeps 255 characters of an alias.
    assert max(len(one), len(other)) < 256
