"""Divide hosts into waves, and never take more of them out of service than the limits allow."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MOST_GROWTH = 1_000_000


@dataclass(frozen=True)
class Limit:
    """Be a number of hosts, or a percentage of them.

    A percentage is rounded down, but never to less than one host: a fleet of two would otherwise never move.
    """

    value: int
    is_percentage: bool = False

    def __post_init__(self) -> None:
        if self.value < 1 or (self.is_percentage and self.value > 100):
            raise ValueError(f"wanted at least one host, or 1% to 100% of them, found {self}")

    def __str__(self) -> str:
        return f"{self.value}%" if self.is_percentage else str(self.value)

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Read ``N`` or ``N%``. Raises ValueError for anything else, and for less than one."""
        if not (match := re.fullmatch(r"([0-9]{1,9})(%?)", text.strip())):
            raise ValueError(f"wanted a number of hosts or a percentage such as 25%, found {text!r}")
        return cls(int(match[1]), bool(match[2]))

    def of(self, hosts: int) -> int:
        """Return the limit as a number of hosts, for a group of the given size."""
        return max(1, hosts * self.value // 100) if self.is_percentage else self.value


@dataclass(frozen=True)
class Limits:
    """Say how much may be out of service at once.

    ``unavailable`` counts over all GPU hosts, ``per_domain`` over those of one failure domain;
    ``domains_at_once`` is how many domains one wave may touch. None: no such limit.
    """

    unavailable: Limit
    per_domain: Limit | None = None
    domains_at_once: int | None = None

    def __post_init__(self) -> None:
        if self.domains_at_once is not None and self.domains_at_once < 1:
            raise ValueError(f"domains at once: wanted at least 1, found {self.domains_at_once}")


@dataclass(frozen=True)
class RolloutHost:
    """Name a host and its failure domain, a rack for example.

    ``domain`` None: no per-domain limit concerns it. A host known to have no GPU counts in no denominator and
    is never missed; it still takes a place in its wave.
    """

    name: str
    domain: str | None = None
    has_gpus: bool = True


Wave = tuple[str, ...]


class Room:
    """Count what may still be taken out of service."""

    def __init__(self, hosts: Iterable[RolloutHost], limits: Limits, unavailable: Iterable[str]) -> None:
        by_name = {host.name: host for host in hosts}
        gpu_hosts = [host for host in by_name.values() if host.has_gpus]
        sizes = Counter(host.domain for host in gpu_hosts)
        self._domain_of = {name: host.domain for name, host in by_name.items()}
        self._limits = limits
        self._sizes = sizes
        missing = [by_name[name] for name in set(unavailable) if by_name[name].has_gpus]
        self._missing = {host.name for host in missing}
        self._total = limits.unavailable.of(len(gpu_hosts)) - len(missing)
        self._used = Counter(host.domain for host in missing)
        self._touched: set[str] = set()

    def take(self, name: str) -> bool:
        """Take one host out if every limit allows it, and say whether it was taken.

        A host that is out of service already takes no room.
        """
        domain = self._domain_of[name]
        if self.opens_domain_too_many(name):
            return False
        if name not in self._missing:
            if self._total < 1 or self._is_domain_full(domain):
                return False
            self._used[domain] += 1
            self._total -= 1
        if domain is not None:
            self._touched.add(domain)
        return True

    def domain_of(self, name: str) -> str | None:
        """Return the failure domain of a host."""
        return self._domain_of[name]

    @property
    def total(self) -> int:
        """Return how many more hosts of the fleet may be taken; negative where too many are missing."""
        return self._total

    @property
    def is_full(self) -> bool:
        """Return whether no further host can be taken, whichever it is."""
        return self._total < 1 and not self._missing

    def _is_domain_full(self, domain: str | None) -> bool:
        limit = self._limits.per_domain
        return limit is not None and domain is not None and self._used[domain] >= limit.of(self._sizes[domain])

    def opens_domain_too_many(self, name: str) -> bool:
        """Return whether taking this host would touch more domains than one wave may."""
        domain = self._domain_of[name]
        most = self._limits.domains_at_once
        return most is not None and domain is not None and domain not in self._touched and len(self._touched) >= most


def plan_waves(
    hosts: Sequence[RolloutHost],
    canary: int | Sequence[str] = 1,
    growth: float = 2.0,
    max_unavailable: Limit = Limit(25, is_percentage=True),
    *,
    per_domain: Limit | None = None,
    domains_at_once: int | None = None,
) -> tuple[Wave, ...]:
    """Divide hosts into waves: the canary first, each next wave ``growth`` times the last, within the limits.

    ``canary`` is a number of hosts, or their names. Hosts go in natural order of their names (``gpu-2``
    before ``gpu-10``), by domain where ``domains_at_once`` is set, whatever order they are given in. Every
    host is in exactly one wave. Raises ValueError for a host named twice, an unknown canary, and a canary or
    a growth below one.
    """
    names = [host.name for host in hosts]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(f"host named twice: {', '.join(sorted(twice))}")
    if not 1 <= growth <= _MOST_GROWTH:
        raise ValueError(f"growth: wanted 1 to {_MOST_GROWTH}, found {growth}")
    chosen = () if isinstance(canary, int) else tuple(canary)
    if twice := [name for name, times in Counter(chosen).items() if times > 1]:
        raise ValueError(f"canary named twice: {', '.join(sorted(twice))}")
    if unknown := set(chosen) - set(names):
        raise ValueError(f"canary is none of these hosts: {', '.join(sorted(unknown))}")
    size = float(canary) if isinstance(canary, int) else float(len(chosen))
    if size < 1:
        raise ValueError("canary: wanted at least one host")

    limits = Limits(max_unavailable, per_domain, domains_at_once)
    rest = deque(_in_order(hosts, chosen, by_domain=domains_at_once is not None))
    waves: list[Wave] = []
    if chosen:
        # Named canaries go alone, in as many waves as the limits ask for, before anything grows.
        named = deque(rest.popleft() for _ in chosen)
        while named:
            waves.append(next_wave(named, len(chosen), Room(hosts, limits, ())))
        size *= growth
    while rest:
        waves.append(next_wave(rest, int(size), Room(hosts, limits, ())))
        size = min(size * growth, float(len(hosts)))
    return tuple(waves)


def next_wave(rest: deque[str], size: int, room: Room) -> Wave:
    wave: list[str] = []
    passed_over: list[str] = []
    while rest and len(wave) < size:
        name = rest.popleft()
        if room.take(name):
            wave.append(name)
            continue
        passed_over.append(name)
        if room.is_full:
            break
        # Under domains_at_once hosts are sorted by domain, so nothing further on can fit either.
        if room.opens_domain_too_many(name):
            break
    rest.extendleft(reversed(passed_over))
    return tuple(wave)


def _in_order(hosts: Sequence[RolloutHost], first: Sequence[str], *, by_domain: bool) -> list[str]:
    leading = {name: at for at, name in enumerate(first)}

    def key(host: RolloutHost) -> tuple[object, ...]:
        domain = natural(host.domain or "") if by_domain else ()
        return (leading.get(host.name, len(leading)), domain, natural(host.name))

    return [host.name for host in sorted(hosts, key=key)]


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts ``gpu-2`` before ``gpu-10``; different names never compare equal."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    numbered = tuple((0, int(p), p) if p.isascii() and p.isdigit() else (1, 0, p) for p in parts)
    return (*numbered, (-1, 0, name))
