"""What the driver on a host, its GPUs and its kernel say against the wanted driver."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bringup import catalog, wanted
from bringup.finding import Finding
from bringup.host_state import HostState, Kernel, Unknown
from bringup.stack import Stack

_NO_DEVICES = 6
"""nvidia-smi's status when the driver is there and drives no GPU."""


def flavour(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Refuse kernel modules of a flavour that does not drive the GPUs on the bus."""
    if isinstance(state.gpus, Unknown):
        return
    for device_id in sorted({function.device_id for function in state.gpus.pci}):
        chip, board = catalog.chip(device_id), catalog.gpu(device_id)
        name = f"{board.name if board else 'NVIDIA GPU'} (10de:{device_id})"
        if chip is None:
            if stack.driver.flavour == "closed":
                yield Finding(
                    code="BU-DRV-003",
                    severity="warning",
                    cause=f"{name} is not in bringup's table; GPUs since Blackwell need the open kernel modules",
                    remedy='want flavour = "open" unless the GPU is older than Turing',
                )
        elif stack.driver.flavour == "closed" and not chip.closed_modules:
            yield Finding(
                code="BU-DRV-001",
                severity="error",
                cause=f"{name} is {chip.architecture}, which only the open kernel modules drive",
                remedy='set flavour = "open" in the stack\'s [driver]',
                evidence={"wanted": "closed", "found": chip.architecture, "device_id": device_id},
            )
        elif stack.driver.flavour == "open" and not chip.open_modules:
            yield Finding(
                code="BU-DRV-002",
                severity="error",
                cause=f"{name} is {chip.architecture}, which the open kernel modules do not drive",
                remedy='set flavour = "closed" in the stack\'s [driver], with a branch that still knows this GPU',
                evidence={"wanted": "open", "found": chip.architecture, "device_id": device_id},
            )


def _will_build(stack: Stack, state: HostState) -> bool:
    """Return whether a kernel module is still to be built: some locked driver package is not there as locked."""
    locked = wanted.packages(stack, state)
    if locked is None or isinstance(state.dpkg, Unknown) or wanted.is_driver_kept(stack, state):
        return False
    for package in locked.driver:
        installed = state.dpkg.installed(package.name)
        if installed is None or installed.version != package.version:
            return True
    return False


def secure_boot(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Refuse to build a module that Secure Boot would not load: neither nouveau nor NVIDIA would be left."""
    if not _will_build(stack, state) or isinstance(state.secure_boot, Unknown):
        return
    if state.secure_boot.is_enabled is None:
        yield Finding(
            code="BU-DRV-005",
            severity="warning",
            cause=f"whether Secure Boot is on could not be read ({state.secure_boot.witness})",
            remedy="look with mokutil --sb-state before the reboot",
        )
    elif state.secure_boot.is_enabled and not state.secure_boot.is_key_enrolled:
        key = state.secure_boot.signing_key
        yield Finding(
            code="BU-DRV-004",
            severity="error",
            cause="Secure Boot is on, and the key that dkms signs modules with "
            + (f"({key}) is not enrolled" if key else "does not exist yet"),
            remedy="enrol it at the console (mokutil --import, then reboot), or turn Secure Boot off",
            evidence={"wanted": "an enrolled signing key", "found": key},
        )


def runfile_leftovers(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Name what a runfile left: libraries no package owns, which the loader may pick beside the packages'.

    An error where driver packages would come beside it, else a warning.
    """
    if isinstance(state.driver, Unknown):
        return
    unowned = [library.path for library in state.driver.libcuda if not library.is_packaged]
    tool = state.driver.nvidia_smi
    if tool is not None and not tool.is_packaged:
        unowned.append(tool.path)
    marks = [path for path in state.driver.runfile if path.startswith("/usr/bin/")]
    if not marks and not (unowned and _will_build(stack, state)):
        return
    yield Finding(
        code="BU-DRV-006",
        severity="error" if _will_build(stack, state) else "warning",
        cause=f"a driver was installed here without packages: {', '.join([*marks, *unowned][:4])}",
        remedy="run nvidia-uninstall (or remove these files) before the packages are installed",
        evidence={"unowned": unowned, "runfile": list(state.driver.runfile)},
    )


def pending_reboot(state: HostState) -> Iterator[Finding]:
    """Tell that the libraries on disk are not the loaded module's: a reboot mends it, a reinstallation does not."""
    if isinstance(state.driver, Unknown) or state.driver.loaded is None:
        return
    on_disk = sorted({library.version for library in state.driver.libcuda if library.is_packaged})
    loaded = state.driver.loaded.version
    if on_disk and loaded not in on_disk:
        yield Finding(
            code="BU-DRV-007",
            severity="warning",
            cause="the driver on disk is not the one the kernel runs; nvidia-smi fails until the next boot",
            remedy="let apply reboot the host (bringup_reboot), or reboot it when it suits",
            evidence={"loaded": loaded, "on_disk": on_disk, "nvidia_smi": state.driver.smi_message},
        )


def nouveau(state: HostState) -> Iterator[Finding]:
    """Tell that nouveau holds the GPUs now."""
    if not isinstance(state.driver, Unknown) and "nouveau" in state.driver.modules:
        yield Finding(
            code="BU-DRV-008",
            severity="warning",
            cause="nouveau is loaded and holds the GPUs",
            remedy="apply keeps it off from the next boot on",
        )


def leftovers(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Warn of driver packages of another version that the locked set does not name and may conflict with."""
    locked = wanted.packages(stack, state)
    if locked is None or isinstance(state.dpkg, Unknown) or wanted.is_driver_kept(stack, state):
        return
    groups = (locked.driver, *locked.fabric.values(), *locked.toolkits.values())
    known = {package.name for group in groups for package in group}
    other = sorted(
        f"{name} {package.version}"
        for name, package in state.dpkg.packages.items()
        if name not in known
        and package.is_installed
        and wanted.is_of_driver_version(name)
        and re.match(r"\d{3}\.\d+", wanted.upstream(package.version))
        and wanted.upstream(package.version) != stack.driver.version
    )
    if other:
        yield Finding(
            code="BU-DRV-009",
            severity="warning",
            cause=f"driver packages of another version are installed: {', '.join(other[:4])}",
            remedy="remove them if the installation of the locked set names a conflict with them",
            evidence={"packages": other},
        )


def too_old_for_toolkit(stack: Stack) -> Iterator[Finding]:
    """Refuse a driver that a wanted toolkit does not run on; one that only runs it compatibly is told so."""
    least = stack.driver.version
    if stack.driver.policy == "at_least":
        least = stack.driver.minimum or stack.driver.version
    for version in stack.cuda.toolkits:
        row = catalog.toolkit(version)
        if row is None or wanted.version_key(least) >= wanted.version_key(row.driver_minimum):
            continue
        runs = wanted.version_key(least) >= wanted.version_key(row.compatible_minimum)
        yield Finding(
            code="BU-DRV-010",
            severity="warning" if runs else "error",
            cause=f"toolkit {version} needs a newer driver" + (" for all its features" if runs else ""),
            remedy=f"want driver {row.driver_minimum} or newer",
            evidence={"wanted": f">= {row.driver_minimum}", "found": least, "source": row.source},
        )


def build_tools(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Warn of what makes dkms fail: another compiler than the kernel's, or headers that are not there."""
    if isinstance(state.kernel, Unknown) or not _will_build(stack, state):
        return
    kernel = state.kernel
    if kernel.compiler and kernel.default_compiler and _is_older(kernel):
        yield Finding(
            code="BU-DRV-011",
            severity="warning",
            cause="the default compiler is older than the one that built the kernel; the module may not build",
            remedy=f"install {kernel.compiler.replace(' ', '-')}, which dkms then takes",
            evidence={"wanted": kernel.compiler, "found": kernel.default_compiler},
        )
    releases = [kernel.release] + ([kernel.next_release] if kernel.next_release else [])
    for release in dict.fromkeys(releases):
        installed = kernel.find(release)
        if installed is None or not installed.has_headers:
            yield Finding(
                code="BU-DRV-012",
                severity="info",
                cause=f"the headers of kernel {release} are not installed; dkms builds no module for it without them",
                remedy=f"apply installs linux-headers-{release} before the driver",
                evidence={"wanted": f"linux-headers-{release}", "found": None},
            )


def _is_older(kernel: Kernel) -> bool:
    built, default = (kernel.compiler or "").split(), (kernel.default_compiler or "").split()
    return built[:1] == default[:1] and int(default[1]) < int(built[1])


def missing_gpus(state: HostState) -> Iterator[Finding]:
    """Refuse a host whose driver lists fewer GPUs than the bus shows, and name the missing ones."""
    if isinstance(state.gpus, Unknown) or isinstance(state.driver, Unknown) or state.driver.loaded is None:
        return
    on_bus = [function.address for function in state.gpus.pci]
    if state.gpus.listed is None:
        if on_bus and state.driver.smi_status == _NO_DEVICES:
            yield Finding(
                code="BU-DRV-013",
                severity="error",
                cause=f"the driver drives none of the {len(on_bus)} GPUs on the bus: {state.driver.smi_message}",
                remedy="read the kernel log (NVRM); on Blackwell the closed modules do this",
                evidence={"wanted": len(on_bus), "found": 0, "flavour": state.driver.loaded.flavour},
            )
        return
    listed = {gpu.address for gpu in state.gpus.listed}
    lost = [address for address in on_bus if address not in listed]
    if lost:
        yield Finding(
            code="BU-DRV-014",
            severity="error",
            cause=f"the driver does not list the GPU at {', '.join(lost)}",
            remedy="look for its Xid in the kernel log; a GPU that fell off the bus needs a cold boot or a new board",
            evidence={"wanted": len(on_bus), "found": len(listed), "lost": lost},
        )


def findings(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Return what the rules on the driver say about a host."""
    yield from flavour(stack, state)
    yield from too_old_for_toolkit(stack)
    yield from secure_boot(stack, state)
    yield from runfile_leftovers(stack, state)
    yield from pending_reboot(state)
    yield from nouveau(state)
    yield from leftovers(stack, state)
    yield from build_tools(stack, state)
    yield from missing_gpus(state)
