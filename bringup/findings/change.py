"""What stops a change of driver, toolkits or loader on a host that could be read: rules asked when its turn comes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bringup import wanted
from bringup.finding import Finding
from bringup.host_state import GpuProcess, HostState, Unknown
from bringup.stack import Stack

# Debian 13 puts this between the packages that dpkg failed at and apt's own last line.
_SAYS_NOTHING = re.compile(r"needrestart is being skipped")


def in_use(state: HostState, what: str) -> Finding | None:
    """Return the refusal for something that needs idle GPUs; None when nobody uses them.

    A host whose processes could not be looked at counts as in use.
    """
    if isinstance(state.processes, Unknown):
        return Finding(
            code="BU-DRV-101",
            severity="error",
            cause=f"{what} needs idle GPUs, and nobody could look whether they are: {state.processes.error}",
            remedy="run bringup as root on that host",
        )
    users = [p for p in state.processes.gpu if p.is_computing or p.unit not in wanted.DAEMONS]
    if not users:
        return None
    return Finding(
        code="BU-DRV-101",
        severity="error",
        cause=f"{what} needs idle GPUs: {_named(users)}",
        remedy="drain the host (bringup kills nothing it did not start), then run again",
        evidence={"pids": [process.pid for process in users]},
    )


def _named(users: Iterable[GpuProcess]) -> str:
    shown = [f"pid {process.pid} ({process.unit or process.command.split(' ')[0]})" for process in users]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "") + " uses them"


def driver_change(stack: Stack, state: HostState, *, allow_downgrade: bool) -> Finding | None:
    """Return what stops the driver family from being changed, or None."""
    busy = in_use(state, "a driver change")
    has_driver = not isinstance(state.driver, Unknown) and state.driver.loaded is not None
    if busy is not None and has_driver:
        return busy
    loaded = None if isinstance(state.driver, Unknown) else state.driver.loaded
    if loaded is not None and loaded.version is not None and not allow_downgrade:
        is_older = wanted.version_key(stack.driver.version) < wanted.version_key(loaded.version)
        if is_older:
            return Finding(
                code="BU-DRV-102",
                severity="error",
                cause="the host runs a newer driver than the stack wants",
                remedy='say --allow-downgrade, or let the stack keep newer ones with policy = "at_least"',
                evidence={"wanted": stack.driver.version, "found": loaded.version},
            )
    return None


def reboot(stack: Stack, state: HostState, *, policy: str, is_local: bool, has_rebooted: bool) -> Finding | None:
    """Return what stops a reboot into the installed driver, or None.

    Before one, the kernel that will boot must have a module of the wanted version and flavour that Secure Boot
    accepts, and its initramfs must have nouveau off: a host that comes back without any driver helps nobody.
    """
    if has_rebooted:
        return _needed("it was rebooted once in this run and the driver is still not the wanted one", stack, state)
    if (unfit := _unfit_kernel(stack, state)) is not None:
        return unfit
    if is_local:
        return _needed("this machine runs bringup itself: reboot it, then run the same command again", stack, state)
    if policy == "never":
        return _needed("the inventory does not allow it (bringup_reboot is never)", stack, state)
    busy = in_use(state, "a reboot")
    loaded = None if isinstance(state.driver, Unknown) else state.driver.loaded
    if busy is not None and (policy == "when_idle" or loaded is not None):
        return busy
    return None


def _needed(why: str, stack: Stack, state: HostState) -> Finding:
    loaded = None if isinstance(state.driver, Unknown) else state.driver.loaded
    return Finding(
        code="BU-DRV-103",
        severity="error",
        cause=f"reboot needed to load driver {stack.driver.version}: {why}",
        remedy="reboot the host when it suits, then run apply again; or set bringup_reboot to when_idle or allowed",
        evidence={
            "wanted": f"{stack.driver.version} {stack.driver.flavour}",
            "found": f"{loaded.version} {loaded.flavour or ''}".strip() if loaded else None,
        },
    )


def _unfit_kernel(stack: Stack, state: HostState) -> Finding | None:
    if isinstance(state.kernel, Unknown):
        return _unfit(f"the kernels could not be looked at: {state.kernel.error}")
    release = state.kernel.next_release
    kernel = state.kernel.find(release)
    if release is None or kernel is None:
        return _unfit(f"it is not certain which kernel boots next: {state.kernel.next_witness}")
    module = kernel.nvidia
    wish = f"{stack.driver.version} {stack.driver.flavour}"
    if module is None or module.version != stack.driver.version or module.flavour != stack.driver.flavour:
        found = f"{module.version} {module.flavour}" if module else None
        return _unfit(f"kernel {release}, which boots next, has no module of the wanted driver", wish, found)
    if kernel.has_nouveau and not state.kernel.is_nouveau_off(kernel):
        return _unfit(f"nouveau would take the GPUs in kernel {release}: its initramfs is older than its blacklist")
    if isinstance(state.secure_boot, Unknown) or state.secure_boot.is_enabled is None:
        return None
    if state.secure_boot.is_enabled and not module.is_signed:
        return _unfit("Secure Boot is on and would not load this module: it is not signed")
    if state.secure_boot.is_enabled and state.secure_boot.is_key_enrolled is False:
        return _unfit(f"Secure Boot is on and the signing key {state.secure_boot.signing_key} is not enrolled")
    return None


def _unfit(cause: str, wish: str | None = None, found: str | None = None) -> Finding:
    return Finding(
        code="BU-DRV-104",
        severity="error",
        cause=f"not rebooted: {cause}",
        remedy="see dkms status and /var/lib/dkms/nvidia/*/build/make.log on the host",
        evidence={"wanted": wish, "found": found} if wish else {},
    )


def disturbance(stack: Stack, state: HostState) -> Finding | None:
    """Return what a plan must say about the two changes that cannot be undone: another driver, and the reboot."""
    if wanted.is_driver_accepted(stack, state) is not False:
        return None
    loaded = None if isinstance(state.driver, Unknown) else state.driver.loaded
    return Finding(
        code="BU-DRV-106",
        severity="warning",
        cause="apply changes the driver and needs one reboot; a rollback does not bring the old driver back",
        remedy="drain the host first; bringup_reboot in the inventory says whether bringup may reboot it",
        evidence={
            "wanted": f"{stack.driver.version} {stack.driver.flavour}",
            "found": f"{loaded.version} {loaded.flavour or ''}".strip() if loaded else None,
        },
    )


def no_return(limit_s: float) -> Finding:
    """Return the finding for a host that did not come back from a reboot."""
    return Finding(
        code="BU-DRV-105",
        severity="error",
        cause=f"the host did not come back from its reboot within {limit_s / 60:.0f} min",
        remedy="look at its console; its run lock is reserved for this run until the limit passes",
    )


def loader_change(stack: Stack, state: HostState) -> Finding | None:
    """Return what stops the loader entry: it would change the first hit of a SONAME that is being served.

    Additive is fine; a SONAME whose first hit moves from one toolkit to another under a serving environment
    is not, and has to wait until nothing uses it.
    """
    if isinstance(state.loader, Unknown) or isinstance(state.environment, Unknown):
        return None  # the difference itself is unknown then, and nothing is done
    if state.environment.serving is None or isinstance(state.processes, Unknown) or not state.processes.environment:
        return None
    for soname, version in stack.linker.items():
        first = state.loader.first(soname)
        directory = wanted.toolkit_directory(version) + "/"
        if first is not None and not first.resolved.startswith(directory):
            users = ", ".join(f"pid {process.pid}" for process in state.processes.environment[:4])
            return Finding(
                code="BU-LNK-101",
                severity="error",
                cause=f"the loader entry would change {soname} under what is serving ({users})",
                remedy="drain the host, then run again",
                evidence={"wanted": directory, "found": first.path},
            )
    return None


def last_words(lines: Iterable[str]) -> str:
    """Return what a command that failed said last, in one line."""
    telling = [line for line in lines if line.strip() and not _SAYS_NOTHING.match(line)]
    return " / ".join(telling[-3:]) if telling else "the connection was lost or it said nothing"
