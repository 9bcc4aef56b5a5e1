"""What the NVSwitch fabric and its manager say, against the driver and the boards on the bus."""

from __future__ import annotations

from collections.abc import Iterator

from bringup import wanted
from bringup.finding import Finding
from bringup.host_state import HostState, Unknown
from bringup.stack import Stack

_MANAGERS = ("nvidia-fabricmanager", "nvidia-fabric-manager")


def _manager(state: HostState) -> tuple[str, str] | None:
    """Return name and upstream version of the installed fabric manager, or None."""
    if isinstance(state.dpkg, Unknown):
        return None
    for name, package in state.dpkg.packages.items():
        if name.startswith(_MANAGERS) and "dev" not in name and package.is_installed:
            return name, wanted.upstream(package.version)
    return None


def locked_versions(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Refuse a lock whose fabric manager is not the locked driver's: all three fields must be equal."""
    locked = wanted.packages(stack, state)
    if locked is None:
        return
    for packages in locked.fabric.values():
        for package in packages:
            version = wanted.upstream(package.version)
            if package.name.startswith(_MANAGERS) and version != stack.driver.version:
                yield Finding(
                    code="BU-FAB-001",
                    severity="error",
                    cause=f"the lock holds {package.name} of another version than the driver's",
                    remedy=f"lock again: bringup lock {stack.name}",
                    evidence={"wanted": stack.driver.version, "found": version},
                )
                return


def installed_version(state: HostState) -> Iterator[Finding]:
    """Warn of a fabric manager that will not start: it is not of the loaded driver's version."""
    manager = _manager(state)
    if manager is None or isinstance(state.driver, Unknown) or state.driver.loaded is None:
        return
    loaded = state.driver.loaded.version
    if loaded is not None and manager[1] != loaded:
        yield Finding(
            code="BU-FAB-002",
            severity="warning",
            cause=f"{manager[0]} is not of the loaded driver's version, so it does not start",
            remedy="install both of one version, or reboot into the driver on disk",
            evidence={"wanted": loaded, "found": manager[1]},
        )


def needless_manager(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Warn of a fabric manager where there is no switch: it ends with NV_WARN_NOTHING_TO_DO."""
    manager = _manager(state)
    if manager is None or stack.fabric.policy != "auto" or wanted.fabric_kind(stack, state) != "none":
        return
    yield Finding(
        code="BU-FAB-003",
        severity="warning",
        cause=f"{manager[0]} is installed, and this host has no switch it could manage",
        remedy=f"remove {manager[0]}: its unit only fails",
    )


def unmanaged_switches(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Warn of switches that nobody is meant to manage: CUDA then fails with error 802."""
    if stack.fabric.policy != "none" or isinstance(state.gpus, Unknown) or isinstance(state.fabric, Unknown):
        return
    switches = len(state.gpus.switches) or state.fabric.switches or len(state.fabric.switch_management)
    if switches:
        yield Finding(
            code="BU-FAB-004",
            severity="warning",
            cause=f"the host has {switches} NVSwitches and the stack wants nobody to manage them",
            remedy='set policy = "auto" or "external" in the stack\'s [fabric]; CUDA fails with error 802 otherwise',
            evidence={"wanted": "none", "found": switches},
        )


def incomplete(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Name the GPUs that did not join the fabric, and what holds them up where a second witness tells."""
    if isinstance(state.gpus, Unknown) or state.gpus.listed is None:
        return
    out = [g for g in state.gpus.listed if g.fabric_state is not None and g.fabric_state != "Completed"]
    if not out:
        return
    names = ", ".join(f"GPU {gpu.index} ({gpu.fabric_state})" for gpu in out)
    yield Finding(
        code="BU-FAB-005",
        severity="warning",
        cause=f"not in the fabric: {names}; {_what_holds_up(stack, state)}",
        remedy="wait up to five minutes after a boot; then see journalctl -u nvidia-fabricmanager",
        evidence={"wanted": "Completed", "found": {str(gpu.index): gpu.fabric_state for gpu in out}},
    )


def _what_holds_up(stack: Stack, state: HostState) -> str:
    kind = wanted.fabric_kind(stack, state)
    services = {} if isinstance(state.services, Unknown) else state.services
    unit = services.get(wanted.FABRIC_UNIT)
    is_nvlink5 = kind == "nvlink5"
    if is_nvlink5 and not isinstance(state.dpkg, Unknown) and state.dpkg.installed("nvlsm") is None:
        return "the subnet manager (nvlsm) is not installed, without which the fabric manager finds nothing to do"
    if is_nvlink5 and not isinstance(state.fabric, Unknown) and not state.fabric.is_ib_umad_loaded:
        return "ib_umad is not loaded, without which the subnet manager cannot reach the switches"
    if kind not in (None, "none") and (unit is None or unit.load != "loaded"):
        return "the fabric manager is not installed"
    if unit is not None and unit.load == "loaded" and unit.active != "active":
        return f"the fabric manager is {unit.active}"
    return "what holds them up is not known"


def findings(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Return what the rules on the fabric say about a host."""
    yield from locked_versions(stack, state)
    yield from installed_version(state)
    yield from needless_manager(stack, state)
    yield from unmanaged_switches(stack, state)
    yield from incomplete(stack, state)
