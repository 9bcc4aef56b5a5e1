"""What keeps apt from doing its work: half-way packages, sources that contradict each other, foreign pins."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase

from bringup import wanted
from bringup.finding import Finding, Severity
from bringup.host_state import Apt, AptPreference, AptSource, HostState, Unknown
from bringup.stack import Stack
from bringup.wanted import Site

_CUDA_REPOSITORY = re.compile(r"/compute/cuda/repos/([a-z]+\d+)(/|$)")
_PINNING_FILE = "/etc/apt/preferences.d/nvidia-driver-pinning"


def half_configured(state: HostState, *, will_be_repaired: bool) -> Iterator[Finding]:
    """Name the packages that dpkg left half-way; every apt call fails until they are whole.

    A warning while ``dpkg --configure -a`` is still to be tried, an error afterwards.
    """
    if isinstance(state.dpkg, Unknown) or not (state.dpkg.broken or state.dpkg.is_interrupted):
        return
    severity: Severity = "warning" if will_be_repaired else "error"
    named = ", ".join(f"{package.name} ({package.status})" for package in state.dpkg.broken[:5])
    remedy = "apply lets dpkg finish them once" if will_be_repaired else "run dpkg --configure -a and read what it says"
    yield Finding(
        code="BU-APT-001",
        severity=severity,
        cause=f"packages are half-configured: {named or 'dpkg was interrupted'}",
        remedy=f"{remedy}; for a driver module see /var/lib/dkms/nvidia/*/build/make.log",
        evidence={"packages": [f"{p.name} {p.version} {p.status}" for p in state.dpkg.broken]},
    )


def _normal(uri: str) -> str:
    """Return a URI so that two spellings of one place are equal."""
    found = re.match(r"([a-z0-9+.-]+)://([^/]*)(.*)$", uri, re.I)
    if not found:
        return uri.rstrip("/")
    scheme, host, path = found[1].lower(), found[2].lower(), found[3]
    scheme = "http" if scheme == "https" else scheme
    return f"{scheme}://{host}{re.sub(r'/+', '/', path).rstrip('/')}"


def signed_by_conflicts(stack: Stack, state: HostState, site: Site) -> Iterator[Finding]:
    """Refuse one place named twice with different Signed-By, our own entry to come counted in.

    apt then reads no source at all, so bringup could not even repair it with apt.
    """
    if isinstance(state.apt, Unknown):
        return
    entries: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for source in state.apt.sources:
        if source.file == wanted.SOURCE_FILE:
            continue
        for uri in source.uris:
            for suite in source.suites or ("/",):
                where = f"{source.file}:{source.line}"
                entries[_normal(uri), suite.strip("./") or "/"][source.signed_by or ""].append(where)
    if wanted.packages(stack, state) is not None and (ours := wanted.repository(state, site)) is not None:
        entries[_normal(ours[0]), "/"][wanted.KEY_FILE].append(f"{wanted.SOURCE_FILE} (bringup's own)")
    for (uri, suite), by_key in entries.items():
        if len(by_key) > 1:
            shown = {key or "no Signed-By": places for key, places in by_key.items()}
            lines = "; ".join(f"{', '.join(places)}: {key}" for key, places in shown.items())
            yield Finding(
                code="BU-APT-002",
                severity="error",
                cause=f"{uri} {suite} is named with conflicting Signed-By: {lines}",
                remedy="remove every entry but one; bringup writes its own and needs no other for this repository",
                evidence={"source": uri, "entries": shown},
            )


def foreign_repositories(state: HostState) -> Iterator[Finding]:
    """Refuse a CUDA repository of another distribution release: versions of both mix in one transaction."""
    if isinstance(state.apt, Unknown) or isinstance(state.os, Unknown):
        return
    own = state.os.release.rsplit("-", 1)[0]
    for source in state.apt.sources:
        for uri in source.uris:
            found = _CUDA_REPOSITORY.search(uri)
            if found and found[1] != own:
                yield Finding(
                    code="BU-APT-003",
                    severity="error",
                    cause=f"{source.file}:{source.line} is the CUDA repository of {found[1]}, the host is {own}",
                    remedy="remove that entry",
                    evidence={"wanted": own, "found": found[1], "uri": uri},
                )


def _matches(preference: AptPreference, name: str) -> bool:
    """Return whether a pin's package list covers a name: names, shell patterns and /regular expressions/."""
    for pattern in preference.package.split():
        if len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/"):
            try:
                if re.search(pattern[1:-1], name):
                    return True
            except re.error:
                continue
        elif fnmatchcase(name, pattern):
            return True
    return False


def foreign_pins(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Refuse a pin that would forbid a locked version, or force another one."""
    locked = wanted.packages(stack, state)
    if isinstance(state.apt, Unknown) or locked is None or wanted.is_driver_kept(stack, state):
        return
    replaced = any(package.name.startswith("nvidia-driver-pinning") for package in locked.driver)
    groups = (locked.driver, *locked.toolkits.values())
    packages = [package for group in groups for package in group]
    for preference in state.apt.preferences:
        if preference.file == wanted.PREFERENCES_FILE or (preference.file == _PINNING_FILE and replaced):
            continue
        version = re.match(r"version\s+(\S+)$", preference.pin)
        for package in packages:
            if not _matches(preference, package.name):
                continue
            is_same = version is not None and fnmatchcase(package.version, version[1])
            forbids = preference.priority < 0 and (version is None or is_same)
            forces = preference.priority >= wanted.PIN_PRIORITY and version is not None and not is_same
            if forbids or forces:
                what = "forbids" if forbids else "forces another version than"
                yield Finding(
                    code="BU-APT-004",
                    severity="error",
                    cause=f"the pin in {preference.file}:{preference.line} {what} {package.name} {package.version}",
                    remedy="remove that pin; bringup writes its own for the locked set",
                    evidence={"pin": preference.pin, "priority": preference.priority},
                )
                break


def careless_settings(state: HostState) -> Iterator[Finding]:
    """Warn of settings that make apt believe what it should check."""
    if isinstance(state.apt, Unknown):
        return
    if not state.apt.checks_dates:
        yield Finding(
            code="BU-APT-005",
            severity="warning",
            cause="apt does not check the dates of Release files (Acquire::Check-Date is false)",
            remedy="remove that setting and keep the clock right instead",
        )
    for source in _nvidia_sources(state.apt):
        if source.is_trusted:
            yield Finding(
                code="BU-APT-006",
                severity="warning",
                cause=f"{source.file}:{source.line} is trusted without a signature",
                remedy="remove trusted=yes and name the key with Signed-By",
            )


def _nvidia_sources(apt: Apt) -> Iterator[AptSource]:
    return (source for source in apt.sources if any("nvidia" in uri.lower() for uri in source.uris))


def held_locks(state: HostState) -> Iterator[Finding]:
    """Tell who holds apt's locks; bringup waits for them, and removes none."""
    if isinstance(state.locks, Unknown):
        return
    for path, holder in state.locks.apt.items():
        yield Finding(
            code="BU-APT-007",
            severity="info",
            cause=f"{path} is held by {holder.command or 'a process'} (pid {holder.pid})",
            remedy="nothing: bringup waits for it, with a limit",
            evidence={"pid": holder.pid},
        )


def findings(stack: Stack, state: HostState, *, site: Site, will_be_repaired: bool) -> Iterator[Finding]:
    """Return what the rules on apt say about a host."""
    yield from half_configured(state, will_be_repaired=will_be_repaired)
    yield from signed_by_conflicts(stack, state, site)
    yield from foreign_repositories(state)
    yield from foreign_pins(stack, state)
    yield from careless_settings(state)
    yield from held_locks(state)
