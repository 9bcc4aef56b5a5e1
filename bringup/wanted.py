"""What a stack asks of one particular host: package sets, files and directories, as text and names.

Pure functions of the stack, the site and what the probe saw. ``drift`` compares with them and the tasks write
them, so that both mean the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from bringup import catalog
from bringup.catalog import FabricKind
from bringup.host_state import HostState, Unknown
from bringup.stack import LockedPackage, LockedPackages, Stack

SOURCE_FILE = "/etc/apt/sources.list.d/bringup-nvidia.sources"
KEY_FILE = "/etc/apt/keyrings/bringup-nvidia.gpg"
PREFERENCES_FILE = "/etc/apt/preferences.d/bringup-nvidia"
BLACKLIST_FILE = "/etc/apt/apt.conf.d/52bringup-unattended-upgrades"
NOUVEAU_FILE = "/etc/modprobe.d/bringup-nouveau.conf"
FABRIC_MODULES_FILE = "/etc/modules-load.d/bringup-fabric.conf"
LINKER_FILE = "/etc/ld.so.conf.d/00-bringup-cuda.conf"
SERVICE_FILE = "/etc/bringup/service.env"
LAUNCHER_FILE = "/opt/bringup/bin/run"
ENVS = "/opt/bringup/envs"
CUDA_LINK = "/usr/local/cuda"

PERSISTENCE_UNIT = "nvidia-persistenced.service"
FABRIC_UNIT = "nvidia-fabricmanager.service"

DAEMONS = frozenset(
    {
        "nvidia-persistenced.service",
        "nvidia-fabricmanager.service",
        "nvidia-imex.service",
        "nvidia-dcgm.service",
        "nvidia-dcgm-exporter.service",
    }
)
"""Services that hold GPU devices open without computing anything; they are no reason to leave a host alone."""

PIN_PRIORITY = 995
"""Above every archive and NVIDIA's own 600, below 1000: apt never downgrades on the strength of a pin."""

_HEADER = "# Written by bringup; a change here is undone by the next apply.\n"
_DRIVER_FAMILY = re.compile(r"(lib)?nvidia-(?!container|docker)|cuda-drivers|xserver-xorg-video-nvidia|libnvsdm")
_OF_ANY_VERSION = ("nvidia-driver-pinning", "nvidia-settings", "nvidia-modprobe", "nvidia-persistenced")
_KERNEL_FAMILY = re.compile(r"linux-(image|headers|modules)(-|$)")
_LIBRARY_TARGETS = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}


@dataclass(frozen=True)
class Site:
    """What a host must match that no stack can know.

    ``repository_url`` and ``key_fingerprint`` None mean NVIDIA's own for the host's release. The launcher is
    compared by its content; None leaves it out.
    """

    repository_url: str | None = None
    key_fingerprint: str | None = None
    launcher_sha256: str | None = None


NVIDIA = Site()
"""The public repository, and no launcher to compare with."""


# ---------------------------------------------------------------- which part of the lock counts here


def release(state: HostState) -> str | None:
    """Return the key of the host's package sets, such as ``debian12-x86_64``; None when it is not known."""
    return None if isinstance(state.os, Unknown) else state.os.release


def platform(stack: Stack, state: HostState) -> str | None:
    """Return the key of the wheels for this host, such as ``cp311-x86_64``; None when it is not known."""
    if isinstance(state.os, Unknown) or stack.python.existing is not None:
        return None
    return f"cp{interpreter(stack, state).replace('.', '')}-{state.os.machine}"


def interpreter(stack: Stack, state: HostState) -> str:
    """Return the minor of the interpreter for this host, such as ``3.11``; the stack's first when it is not known."""
    name = release(state)
    return stack.python.interpreter_of(name) if name else stack.python.interpreter


def packages(stack: Stack, state: HostState) -> LockedPackages | None:
    """Return the locked .deb set for the host's release; None when the lock has none."""
    name = release(state)
    return stack.locked_packages(name) if name else None


def simulated(stack: Stack, state: HostState) -> tuple[str, ...]:
    """Return what is simulated of a host as this stack uses it: real wheels are real on a lab host too."""
    wheels = stack.lock.wheels if stack.lock else None
    are_real = wheels is not None and wheels.resolved_against == "index"
    return tuple(name for name in state.simulated if name != "wheels" or not are_real)


def toolkit_packages(stack: Stack, locked: LockedPackages, version: str) -> tuple[LockedPackage, ...]:
    """Return the packages that count as one toolkit's; a shared one belongs to the first that locks it."""
    taken: set[str] = set()
    for earlier in stack.cuda.toolkits:
        own = tuple(p for p in locked.toolkits.get(earlier, ()) if p.name not in taken)
        if earlier == version:
            return own
        taken.update(package.name for package in own)
    return ()


def board_kinds(state: HostState) -> frozenset[FabricKind]:
    """Return what the boards on the PCI bus need for their links, by the table of GPUs."""
    if isinstance(state.gpus, Unknown):
        return frozenset()
    rows = (catalog.gpu(function.device_id) for function in state.gpus.pci)
    return frozenset(row.fabric for row in rows if row is not None)


def fabric_kind(stack: Stack, state: HostState) -> FabricKind | None:
    """Return what must run for the GPUs' links: none, nvswitch or nvlink5; None when nobody could look.

    A guest that got GPUs of such a board without its switches has nobody to run: its fabric is managed
    outside, and a fabric manager there ends with NV_WARN_NOTHING_TO_DO, as it does on a PCIe server.
    """
    if stack.fabric.policy != "auto":
        return "none"
    if isinstance(state.gpus, Unknown) or isinstance(state.fabric, Unknown):
        return None
    kinds = board_kinds(state)
    if "nvlink5" in kinds:
        return "none" if _is_managed_outside(state) else "nvlink5"
    if state.gpus.switches or state.fabric.switches:
        return "nvswitch"
    return "none"


def _is_managed_outside(state: HostState) -> bool:
    if isinstance(state.gpus, Unknown) or isinstance(state.fabric, Unknown):
        return False
    listed = state.gpus.listed or ()
    completed = bool(listed) and all(gpu.fabric_state == "Completed" for gpu in listed)
    services = {} if isinstance(state.services, Unknown) else state.services
    unit = services.get(FABRIC_UNIT)
    has_manager = unit is not None and unit.load == "loaded"
    return completed and not has_manager and not state.fabric.switch_management


# ---------------------------------------------------------------- driver


def upstream(version: str) -> str:
    """Return the upstream part of a Debian version: no epoch, no revision."""
    return version.rpartition(":")[2].rpartition("-")[0] or version.rpartition(":")[2]


def version_key(version: str) -> tuple[int, ...]:
    """Return a driver version as numbers, for comparison: 580.95.05 is older than 580.159.04."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def is_driver_accepted(stack: Stack, state: HostState) -> bool | None:
    """Return whether the loaded driver will do as it is; None when nobody could look.

    Exact: it is the wanted version. At least: it is not older than ``minimum`` (the wanted version where that
    is not given), and what lies on disk is of the same version. Either way the flavour must be the wanted
    one, where the kernel shows it.
    """
    if isinstance(state.driver, Unknown):
        return None
    loaded = state.driver.loaded
    if loaded is None or loaded.version is None or loaded.flavour not in (None, stack.driver.flavour):
        return False
    if stack.driver.policy == "exact":
        return loaded.version == stack.driver.version
    least = stack.driver.minimum or stack.driver.version
    on_disk = {library.version for library in state.driver.libcuda}
    return version_key(loaded.version) >= version_key(least) and on_disk <= {loaded.version}


def is_driver_kept(stack: Stack, state: HostState) -> bool:
    """Return whether a driver other than the locked one stays: allowed by ``at_least``, and good enough."""
    return stack.driver.policy == "at_least" and is_driver_accepted(stack, state) is True


def driver_family(stack: Stack, state: HostState, locked: LockedPackages | None) -> tuple[str, ...]:
    """Return the names that must move together: the locked driver and fabric, or the installed ones if kept."""
    if is_driver_kept(stack, state) or locked is None:
        if isinstance(state.dpkg, Unknown):
            return ()
        installed = state.dpkg.packages.items()
        return tuple(sorted(n for n, p in installed if p.is_installed and _DRIVER_FAMILY.match(n)))
    kind = fabric_kind(stack, state)
    fabric = locked.fabric.get(kind, ()) if kind is not None and kind != "none" else ()
    return tuple(sorted({package.name for package in (*locked.driver, *fabric)}))


def locked_versions(locked: LockedPackages | None) -> Mapping[str, str]:
    """Return the locked version of every package of the driver and of all fabrics, by name."""
    groups = (locked.driver, *locked.fabric.values()) if locked is not None else ()
    return {package.name: package.version for group in groups for package in group}


def is_driver_package(name: str) -> bool:
    """Return whether a package name belongs to NVIDIA's driver, and not to its container toolkit."""
    return bool(_DRIVER_FAMILY.match(name))


def is_of_driver_version(name: str) -> bool:
    """Return whether a driver package must have the driver's very version: not pins, settings and small tools."""
    return is_driver_package(name) and not name.startswith(_OF_ANY_VERSION)


def is_kernel_package(name: str) -> bool:
    """Return whether a package name is a kernel image, its headers or its modules."""
    return bool(_KERNEL_FAMILY.match(name))


# ---------------------------------------------------------------- toolkits and loader


def toolkit_directory(version: str) -> str:
    """Return the versioned directory of a toolkit, which no alternative moves."""
    return f"{CUDA_LINK}-{version}"


def library_directory(version: str, machine: str) -> str:
    """Return the directory of a toolkit's libraries, as its packages lay it out."""
    return f"{toolkit_directory(version)}/targets/{_LIBRARY_TARGETS.get(machine, machine + '-linux')}/lib"


def linked_toolkits(stack: Stack) -> tuple[str, ...]:
    """Return the toolkits that some SONAME is wanted from, the default one first.

    ldconfig keeps the first match, so the default toolkit's directory must come before the others.
    """
    used = set(stack.linker.values())
    return tuple(sorted((v for v in stack.cuda.toolkits if v in used), key=lambda v: v != stack.cuda.default))


# ---------------------------------------------------------------- the text of every file bringup owns


def repository(state: HostState, site: Site) -> tuple[str, str] | None:
    """Return URL and key fingerprint of NVIDIA's repository for this host; None when none is known."""
    name = release(state)
    known = catalog.repository(name) if name else None
    url = site.repository_url or (known.url if known else None)
    fingerprint = site.key_fingerprint or (known.key_fingerprint if known else None)
    return (url.rstrip("/") + "/", fingerprint) if url and fingerprint else None


def source_text(url: str) -> str:
    """Return the deb822 source: a flat repository, trusted by our key file only."""
    return f"{_HEADER}Types: deb\nURIs: {url.rstrip('/')}/\nSuites: /\nSigned-By: {KEY_FILE}\n"


def preferences_text(locked: LockedPackages) -> str:
    """Return the pins that keep every locked package at its locked version."""
    groups = (locked.driver, *locked.fabric.values(), *locked.toolkits.values())
    versions: dict[str, set[str]] = {}
    for package in (package for group in groups for package in group):
        versions.setdefault(package.version, set()).add(package.name)
    stanzas = [
        f"Package: {' '.join(sorted(names))}\nPin: version {version}\nPin-Priority: {PIN_PRIORITY}\n"
        for version, names in sorted(versions.items())
    ]
    return _HEADER + "\n" + "\n".join(stanzas)


@cache
def blacklist_entry(name: str) -> str:
    """Return the regular expression by which unattended-upgrades leaves a package alone."""
    # Brackets instead of backslashes, which apt's settings files treat on their own account; so is their
    # comment sign.
    return "^" + re.sub(r"([.+])", r"[\1]", name) + "$"


def blacklist_text(family: Iterable[str]) -> str:
    """Return apt settings that keep unattended-upgrades off a family; its entries are regular expressions."""
    lines = "".join(f'  "{blacklist_entry(name)}";\n' for name in family)
    return "//" + _HEADER[1:] + "Unattended-Upgrade::Package-Blacklist {\n" + lines + "};\n"


def nouveau_text() -> str:
    """Return the modprobe settings that leave the GPUs to NVIDIA's driver."""
    return _HEADER + "blacklist nouveau\noptions nouveau modeset=0\n"


def fabric_modules_text() -> str:
    """Return the modules that the subnet manager of NVLink 5 needs at every boot."""
    return _HEADER + "ib_umad\n"


def linker_text(stack: Stack, machine: str) -> str:
    """Return the loader configuration: versioned directories only, never the link that moves."""
    return _HEADER + "".join(f"{library_directory(v, machine)}\n" for v in linked_toolkits(stack))


def service_variables(stack: Stack) -> Mapping[str, str]:
    """Return the variables that every serving process gets; the stack's own win."""
    return {"CUDA_HOME": toolkit_directory(stack.python.cuda), **stack.service.environment}


def service_text(stack: Stack) -> str:
    """Return the service variables file: one NAME="value" a line, as systemd and a shell both read it."""
    lines = (f'{name}="{_quoted(value)}"\n' for name, value in sorted(service_variables(stack).items()))
    return _HEADER + "".join(lines)


def _quoted(value: str) -> str:
    return re.sub(r'([\\"$`])', r"\\\1", value)


def sha256(text: str) -> str:
    """Return the hash under which the probe reports a file of this text."""
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------- verification


def limits_digest(stack: Stack) -> str:
    """Return the digest of what verify must prove; a record made under other limits does not count."""
    wanted = stack.verify.model_dump(mode="json")
    return sha256(json.dumps(wanted, sort_keys=True, separators=(",", ":")))[:12]
