"""Resolve the .deb sets of a stack: driver family, fabric packages and toolkits, inside one repository.

What a package of NVIDIA's needs from the distribution (dkms, build-essential, libc6) is not locked: it comes
from the distribution's own repository, which keeps no old versions to go back to.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import httpx

from bringup import catalog, paths
from bringup.errors import InputError
from bringup.locking import http
from bringup.locking.debian import DebianVersion, Package, Relation
from bringup.locking.repository import Repository, read_repository
from bringup.stack import LockedPackage, LockedPackages, Stack

Prefer = Callable[[Package], bool]


_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Release:
    """One release and machine that .deb sets can be locked for.

    ``path`` is where its repository lies below a mirror's address, ``architecture`` dpkg's word for the machine.
    """

    name: str
    path: str
    architecture: str
    repository: catalog.Repository


@cache
def _data() -> Mapping[str, Any]:
    return tomllib.loads((paths.data() / "packages.toml").read_text(encoding="utf-8"))


@cache
def releases() -> Mapping[str, Release]:
    """Return every release that a lock may hold packages for, by name (``debian12-x86_64``)."""
    found = {}
    for row in catalog.repositories():
        machine = row.release.rsplit("-", 1)[1]
        # NVIDIA's address ends in release and machine (``debian12/x86_64``), and mirrors keep that.
        path = "/".join(row.url.rstrip("/").split("/")[-2:])
        found[row.release] = Release(row.release, path, _ARCHITECTURES[machine], row)
    return found


def resolve_packages(
    stack: Stack, release: Release, repository: Repository, *, against: Literal["index", "lab"]
) -> LockedPackages:
    """Return the .deb sets of ``stack`` as ``repository`` has them.

    Raises InputError naming the package when a root is missing, when a dependency on one of the repository's
    own packages cannot be met, or when two chosen packages exclude each other.
    """
    resolver = _Resolver(stack, release, repository)
    driver = resolver.driver()
    fabric = {kind: found for kind in ("nvswitch", "nvlink5") if (found := resolver.fabric(kind, driver))}
    toolkits = {
        toolkit: resolver.toolkit(toolkit) for toolkit in stack.cuda.toolkits if toolkit not in stack.cuda.runfiles
    }
    return LockedPackages.model_validate(
        {
            "resolved_against": against,
            "driver": resolver.locked(driver),
            "fabric": {kind: resolver.locked(packages) for kind, packages in fabric.items()},
            "toolkit": {toolkit: resolver.locked(packages) for toolkit, packages in toolkits.items()},
        }
    )


def lock_packages(
    stack: Stack,
    names: Iterable[str],
    *,
    against: Literal["index", "lab"],
    url: str | None = None,
    key: bytes | None = None,
    fingerprint: str | None = None,
    certificate: str | None = None,
    direct: str | None = None,
) -> dict[str, LockedPackages]:
    """Return the packages parts for the releases ``names``.

    ``url`` is the address above the releases' repositories on a mirror; None means NVIDIA's own. ``key`` None means
    the key file beside the repository; ``fingerprint`` None means that of NVIDIA's key for the release. ``direct``
    is a host that no proxy knows. Raises InputError for a release that no lock knows, and what ``read_repository``
    and ``resolve_packages`` raise.
    """
    found = {}
    with http.client(certificate, direct=direct) as client:
        for name in names:
            release = releases().get(name)
            if release is None:
                raise InputError(f"not a release: {name!r}", hint=f"name one of {', '.join(releases())}")
            known = release.repository
            base = f"{url.rstrip('/')}/{release.path}" if url else known.url.rstrip("/")
            repository = read_repository(
                client,
                base,
                architecture=release.architecture,
                key=key or _published_key(client, f"{base}/{known.key_file}"),
                fingerprint=fingerprint or known.key_fingerprint,
            )
            found[name] = resolve_packages(stack, release, repository, against=against)
    return found


def _published_key(client: httpx.Client, address: str) -> bytes:
    key = http.read(client, address)
    if key is None:
        raise InputError(f"no key at {http.shown(address)}", hint="name the repository's public key with --apt-key")
    return key


class _Resolver:
    def __init__(self, stack: Stack, release: Release, repository: Repository) -> None:
        self.stack = stack
        self.release = release
        self.repository = repository
        self.by_name: dict[str, list[Package]] = {}
        self.providers: dict[str, list[Package]] = {}
        newest_first = sorted(repository.packages, key=lambda each: DebianVersion(each.version), reverse=True)
        for package in newest_first:
            self.by_name.setdefault(package.name, []).append(package)
            for name in package.provides:
                self.providers.setdefault(name, []).append(package)

    def driver(self) -> tuple[Package, ...]:
        """Return the driver family; the pinning package comes first."""
        entry = _data()["driver"][self.stack.driver.flavour]
        pinning = [self._pinning()]
        roots = self._roots(entry, self._is_drivers, f"driver {self.stack.driver.version}")
        closure = self._closure([*pinning, *roots], self._is_drivers)
        rest = sorted((each for each in closure if each not in pinning), key=lambda each: each.name)
        return (*pinning, *rest)

    def fabric(self, kind: str, driver: Sequence[Package]) -> tuple[Package, ...]:
        """Return what ``kind`` needs beside the driver family; nothing where the release lacks it."""
        entry = _data()["fabric"][kind]
        roots = self._roots(entry, self._is_drivers, f"fabric {kind}", required=False)
        if not roots:
            return ()
        # Subnet manager and the like have versions of their own, so the newest is as good as any.
        roots += [found for name in entry.get("own_version", ()) if (found := self._pick(name, _any))]
        have = {package.name for package in driver}
        closure = self._closure([*driver, *roots], self._is_drivers)
        return tuple(sorted((each for each in closure if each.name not in have), key=lambda each: each.name))

    def toolkit(self, toolkit: str) -> tuple[Package, ...]:
        """Return one toolkit's packages, sorted by name."""
        roots = self._roots(_data()["toolkit"], _any, f"toolkit {toolkit}", toolkit=toolkit)
        return tuple(sorted(self._closure(roots, self._is_not_newer), key=lambda each: each.name))

    def locked(self, packages: Iterable[Package]) -> tuple[LockedPackage, ...]:
        """Return what the lock holds of ``packages``."""
        return tuple(
            LockedPackage(
                name=package.name,
                version=package.version,
                architecture=package.architecture,
                sha256=package.sha256,
                size_bytes=package.size_bytes,
                origin=self.repository.origin,
            )
            for package in packages
        )

    def _pinning(self) -> Package:
        names = [self._filled(name) for name in _data()["pinning"]["names"]]
        for name in names:
            if found := self._pick(name, _any):
                return found
        raise self._missing(names, "the pinning package")

    def _roots(
        self,
        entry: Mapping[str, Any],
        prefer: Prefer,
        what: str,
        *,
        toolkit: str = "",
        required: bool = True,
    ) -> list[Package]:
        sets = [[self._filled(name, toolkit) for name in names] for names in entry["sets"]]
        for names in sets:
            found = [self._exact(name, prefer) for name in names]
            if all(found):
                also = [self._exact(self._filled(name, toolkit), prefer) for name in entry.get("also", ())]
                return [package for package in (*found, *also) if package]
        if not required:
            return []
        raise self._missing([name for names in sets for name in names], what)

    def _exact(self, name: str, prefer: Prefer) -> Package | None:
        """Return the newest package of that name which is preferred; no other will do."""
        return next((package for package in self.by_name.get(name, ()) if prefer(package)), None)

    def _pick(self, name: str, prefer: Prefer) -> Package | None:
        """Return the newest preferred package of that name, else the newest."""
        candidates = self.by_name.get(name, [])
        return self._exact(name, prefer) or (candidates[0] if candidates else None)

    def _closure(self, roots: Sequence[Package], prefer: Prefer) -> tuple[Package, ...]:
        """Return ``roots`` and all they need of this repository, in the order they were found."""
        chosen: dict[str, Package] = {root.name: root for root in roots}
        todo = list(roots)
        while todo:
            package = todo.pop(0)
            for group in package.depends:
                if any(have.satisfies(relation) for relation in group for have in chosen.values()):
                    continue
                if (found := self._answer(package, group, chosen, prefer)) is not None:
                    chosen[found.name] = found
                    todo.append(found)
        self._agree(chosen.values())
        return tuple(chosen.values())

    def _answer(
        self,
        package: Package,
        group: tuple[Relation, ...],
        chosen: Mapping[str, Package],
        prefer: Prefer,
    ) -> Package | None:
        """Return the package that meets ``group``; None when that is the distribution's business."""
        barred: list[str] = []
        for relation in group:
            named = self.by_name.get(relation.name, [])
            provided = self.providers.get(relation.name, [])
            free = [each for each in (*named, *provided) if each.name not in chosen and each.satisfies(relation)]
            best: Package | None = next((each for each in free if prefer(each)), free[0] if free else None)
            if best is None:
                barred += [str(each) for each in named]
                continue
            rival = next((have for have in chosen.values() if _exclude(best, have)), None)
            if rival is None:
                return best
            barred.append(f"{best}, which does not go with {rival}")
        if barred and all(relation.name in self.by_name for relation in group):
            raise InputError(
                f"{self.repository.url}: {package} cannot be installed",
                why=f"wanted {' | '.join(map(str, group))}, found {', '.join(barred)}",
                hint="choose another driver version or toolkit; this repository's own packages disagree",
            )
        return None

    def _agree(self, chosen: Iterable[Package]) -> None:
        for package, other in itertools.combinations(chosen, 2):
            if _exclude(package, other):
                raise InputError(
                    f"{self.repository.url}: {package} does not go with {other}",
                    why="one of them excludes the other, and both are needed by what the stack asks for",
                )

    def _is_drivers(self, package: Package) -> bool:
        return DebianVersion(package.version).upstream == self.stack.driver.version

    def _is_not_newer(self, package: Package) -> bool:
        """Return whether a package that floats over all toolkits is no newer than the stack's newest one."""
        newest = max(self.stack.cuda.toolkits, key=_numbers)
        names = [
            self._filled(name, toolkit)
            for toolkit in self.stack.cuda.toolkits
            for name in _data()["toolkit"]["floating"]
        ]
        if package.name not in names:
            return True
        own = [toolkit for toolkit in self.stack.cuda.toolkits if f"-{toolkit.split('.')[0]}-" in package.name]
        limit = max(own, key=_numbers) if own else newest
        return _numbers(DebianVersion(package.version).upstream)[:2] <= _numbers(limit)

    def _filled(self, name: str, toolkit: str = "") -> str:
        return name.format(
            version=self.stack.driver.version,
            branch=self.stack.driver.branch,
            toolkit=toolkit.replace(".", "-"),
            major=toolkit.split(".")[0],
        )

    def _missing(self, names: Iterable[str], what: str) -> InputError:
        near = sorted({DebianVersion(each.version).upstream for name in names for each in self.by_name.get(name, ())})
        return InputError(
            f"{self.repository.url} has no packages for {what}",
            why=f"wanted one of {', '.join(dict.fromkeys(names))}, found "
            + (f"versions {', '.join(near)}" if near else "none of them"),
            hint=f"choose a version that the repository has for {self.release.name}",
        )


def _any(_: Package) -> bool:
    return True


def _exclude(one: Package, other: Package) -> bool:
    """Return whether one of two packages conflicts with the other, or breaks it."""
    return one.name != other.name and any(
        against.satisfies(relation)
        for package, against in ((one, other), (other, one))
        for group in package.conflicts
        for relation in group
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
