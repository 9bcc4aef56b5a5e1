"""What the loader's configuration, cache and variables say against the wanted libraries."""

from __future__ import annotations

from collections.abc import Iterator

from bringup import wanted
from bringup.finding import Finding
from bringup.host_state import HostState, Unknown
from bringup.stack import Stack

_DRIVER_LIBRARY = "libcuda.so.1"
_LOADER_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT")


def stubs(state: HostState) -> Iterator[Finding]:
    """Refuse a stubs directory on the loader's path: its libcuda only serves to link against."""
    if isinstance(state.loader, Unknown):
        return
    for entry in state.loader.directories:
        if "stubs" in entry.directory.split("/"):
            yield Finding(
                code="BU-LNK-001",
                severity="error",
                cause=f"{entry.file}:{entry.line} puts stub libraries on the loader's path ({entry.directory})",
                remedy="remove that line and run ldconfig; CUDA then fails with CUDA_ERROR_STUB_LIBRARY otherwise",
                evidence={"directory": entry.directory},
            )


def dead_entries(state: HostState) -> Iterator[Finding]:
    """Warn of CUDA or NVIDIA directories on the loader's path that are not there."""
    if isinstance(state.loader, Unknown):
        return
    for entry in state.loader.directories:
        named = (entry.directory + entry.file).lower()
        if not entry.exists and ("cuda" in named or "nvidia" in named) and entry.file != wanted.LINKER_FILE:
            yield Finding(
                code="BU-LNK-002",
                severity="warning",
                cause=f"{entry.file}:{entry.line} names {entry.directory}, which does not exist",
                remedy="remove the line, or reinstall what it belonged to",
            )


def shadowing_copies(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Name other copies of a wanted SONAME; one before the wanted toolkit's wins over it."""
    if isinstance(state.loader, Unknown):
        return
    for soname, version in stack.linker.items():
        hits = state.loader.hits.get(soname, ())
        inside = wanted.toolkit_directory(version) + "/"
        own = [hit for hit in hits if hit.path.startswith(inside)]
        other = [hit for hit in hits if not hit.resolved.startswith(inside)]
        if not own or not other:
            continue
        wins = hits.index(other[0]) < hits.index(own[0])
        yield Finding(
            code="BU-LNK-003",
            severity="warning" if wins else "info",
            cause=f"{soname} lies in {other[0].path} too" + (", which the loader takes" if wins else ""),
            remedy="remove that copy, or the loader entry that names its directory",
            evidence={"wanted": own[0].path, "found": [hit.path for hit in hits]},
        )


def preload(state: HostState) -> Iterator[Finding]:
    """Warn of libraries that are loaded into every process before all others."""
    if not isinstance(state.loader, Unknown) and state.loader.preload:
        yield Finding(
            code="BU-LNK-004",
            severity="warning",
            cause=f"/etc/ld.so.preload loads {', '.join(state.loader.preload)} into every process",
            remedy="make sure that this is meant",
        )


def variables(state: HostState) -> Iterator[Finding]:
    """Warn of loader variables set for everybody: they beat the search path inside libraries (RUNPATH)."""
    if isinstance(state.env_files, Unknown):
        return
    for variable in state.env_files:
        if variable.name in _LOADER_VARIABLES:
            yield Finding(
                code="BU-LNK-005",
                severity="warning",
                cause=f"{variable.file}:{variable.line} sets {variable.name}={variable.value or ''}",
                remedy="remove it: it beats the paths inside torch's own libraries; services started by "
                "/opt/bringup/bin/run do not get it",
                evidence={"name": variable.name, "value": variable.value},
            )


def stale_cache(state: HostState) -> Iterator[Finding]:
    """Warn of a cache older than the configuration: the next package installation changes what is found."""
    if not isinstance(state.loader, Unknown) and state.loader.is_cache_older:
        yield Finding(
            code="BU-LNK-006",
            severity="warning",
            cause="the loader's cache is older than its configuration",
            remedy="run ldconfig when a change of first hits disturbs nobody",
        )


def driver_library(state: HostState) -> Iterator[Finding]:
    """Warn when libcuda.so.1 is found in a compat or stubs directory before the driver's own."""
    if isinstance(state.loader, Unknown):
        return
    first = state.loader.first(_DRIVER_LIBRARY)
    if first is None:
        return
    parts = first.resolved.split("/")
    if "compat" in parts or "stubs" in parts:
        yield Finding(
            code="BU-LNK-007",
            severity="warning",
            cause=f"{_DRIVER_LIBRARY} is found as {first.path}, not as the driver's",
            remedy="remove the loader entry that names this directory",
            evidence={"found": [hit.path for hit in state.loader.hits[_DRIVER_LIBRARY]]},
        )


def findings(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Return what the rules on the loader say about a host."""
    yield from stubs(state)
    yield from dead_entries(state)
    yield from shadowing_copies(stack, state)
    yield from preload(state)
    yield from variables(state)
    yield from stale_cache(state)
    yield from driver_library(state)
