"""What variables, processes and leftovers say against the Python environment."""

from __future__ import annotations

from collections.abc import Iterator

from bringup.finding import Finding
from bringup.host_state import HostState, Unknown, Variable

_BYPASS = "FLASHINFER_DISABLE_VERSION_CHECK"
_MISLEADING = ("CUDA_HOME", "CUDA_PATH", "PYTHONPATH", "PYTHONHOME", "CUDA_VISIBLE_DEVICES")


def version_check_bypass(state: HostState) -> Iterator[Finding]:
    """Refuse a bypass of flashinfer's version check: kernels of another version then give wrong results."""
    for variable in _variables(state):
        if variable.name == _BYPASS and variable.value not in ("", "0"):
            yield Finding(
                code="BU-ENV-001",
                severity="error",
                cause=f"{variable.file}:{variable.line} sets {_BYPASS}: stale kernels would be used silently",
                remedy="remove that line; the three flashinfer distributions of a stack always agree",
            )


def collective_settings(state: HostState) -> Iterator[Finding]:
    """Warn of NCCL settings for everybody: they change the path that collectives take."""
    for variable in _variables(state):
        if variable.name.startswith("NCCL_"):
            yield Finding(
                code="BU-ENV-002",
                severity="warning",
                cause=f"{variable.file}:{variable.line} sets {variable.name}={variable.value}",
                remedy="keep it only where it is meant",
                evidence={"name": variable.name, "value": variable.value},
            )


def misleading_variables(state: HostState) -> Iterator[Finding]:
    """Warn of variables for everybody that make builds and imports take another toolkit or package."""
    for variable in _variables(state):
        if variable.name in _MISLEADING:
            yield Finding(
                code="BU-ENV-003",
                severity="warning",
                cause=f"{variable.file}:{variable.line} sets {variable.name}={variable.value}",
                remedy="remove it; services started by /opt/bringup/bin/run get the right one",
                evidence={"name": variable.name, "value": variable.value},
            )


def _variables(state: HostState) -> tuple[Variable, ...]:
    return () if isinstance(state.env_files, Unknown) else state.env_files


def old_processes(state: HostState) -> Iterator[Finding]:
    """Name the processes that still run from an environment that no longer serves."""
    if isinstance(state.processes, Unknown) or isinstance(state.environment, Unknown):
        return
    serving = state.environment.serving
    if serving is None:
        return
    old = [process for process in state.processes.environment if process.environment != serving.name]
    if old:
        shown = ", ".join(f"pid {p.pid} ({p.unit or p.command}) on {p.environment}" for p in old[:4])
        yield Finding(
            code="BU-ENV-004",
            severity="warning",
            cause=f"processes run from an older environment: {shown}",
            remedy="restart them when it suits, or name their units in the stack's service.restart",
            evidence={"pids": [process.pid for process in old]},
        )


def tainted(state: HostState) -> Iterator[Finding]:
    """Name environments that share a file somebody changed: they are no rollback target."""
    if isinstance(state.environment, Unknown):
        return
    names = [entry.name for entry in state.environment.environments if entry.is_tainted]
    if names:
        yield Finding(
            code="BU-ENV-005",
            severity="warning",
            cause=f"environments share files that were changed after installation: {', '.join(names)}",
            remedy="nothing: they are never switched to, and go when nothing uses them",
            evidence={"environments": names},
        )


def unfinished(state: HostState) -> Iterator[Finding]:
    """Tell of environments whose build was broken off; the next build removes them."""
    if isinstance(state.environment, Unknown):
        return
    names = [entry.name for entry in state.environment.environments if not entry.is_complete]
    if names:
        yield Finding(
            code="BU-ENV-006",
            severity="info",
            cause=f"environments were left unfinished: {', '.join(names)}",
            remedy="nothing: the next apply that builds removes them",
            evidence={"environments": names},
        )


def system_nccl(state: HostState) -> Iterator[Finding]:
    """Tell of a system-wide NCCL beside the one torch brings; which of them is loaded, verify shows."""
    if isinstance(state.loader, Unknown) or (first := state.loader.first("libnccl.so.2")) is None:
        return
    packages = {} if isinstance(state.dpkg, Unknown) else state.dpkg.packages
    package = packages.get("libnccl2")
    yield Finding(
        code="BU-ENV-007",
        severity="info",
        cause=f"the system has an NCCL of its own ({first.resolved}), beside the one that torch brings",
        remedy="nothing, as long as no LD_LIBRARY_PATH puts it first",
        evidence={"found": package.version if package else first.path},
    )


def findings(state: HostState) -> Iterator[Finding]:
    """Return what the rules on the environment say about a host."""
    yield from version_check_bypass(state)
    yield from collective_settings(state)
    yield from misleading_variables(state)
    yield from old_processes(state)
    yield from tainted(state)
    yield from unfinished(state)
    yield from system_nccl(state)
