"""Install the pinned driver family as one set, keep it so, and reboot into it where that is allowed."""

from __future__ import annotations

import time

import gevent
from paramiko import SSHException
from pyinfra.api import FunctionCommand, Host, deploy
from pyinfra.context import ctx_host

from bringup import facts, wanted
from bringup.errors import HostError
from bringup.findings import change
from bringup.host_state import HostState, Unknown
from tasks import apt, connection, lock
from tasks.run import Commands, Context, converges, do, refuse, shell, work, write

REBOOT_LIMIT_S = 1800
_FIRST_LOOK_S = 2.0
_rebooted: set[str] = set()


@converges("driver.packages", "fabric.packages")
def packages(context: Context) -> Commands:
    """Install the locked driver family and what the fabric needs, NVIDIA's version pinning first."""
    refusal = change.driver_change(context.stack, context.state, allow_downgrade=context.settings.allow_downgrade)
    if refusal is not None:
        yield refuse(context.host, refusal)
        return
    locked = wanted.packages(context.stack, context.state)
    assert locked is not None  # preflight refuses a host whose release the lock does not hold
    kind = wanted.fabric_kind(context.stack, context.state)
    fabric = locked.fabric.get(kind, ()) if kind in ("nvswitch", "nvlink5") else ()
    missing = missing_for_the_build(context.state)
    if missing:
        yield apt.install_named("kernel-headers", missing)
    pinning = [package.name for package in locked.driver if package.name.startswith("nvidia-driver-pinning")]
    yield apt.install(
        "driver-packages",
        (*locked.driver, *fabric),
        first=pinning,
        # The rule above keeps a newer driver that runs; a package that somebody moved ahead of it goes back.
        allow_downgrade=True,
    )


def missing_for_the_build(state: HostState) -> tuple[str, ...]:
    """Return the packages that dkms needs and misses: headers of the running kernel and of the next, a compiler.

    Without headers dkms only registers the module: the packages install cleanly and no driver comes up. From
    Debian 13 it recommends a compiler and no longer depends on one, and recommended packages are not installed.
    """
    if isinstance(state.kernel, Unknown):
        return ()
    releases = dict.fromkeys((state.kernel.release, state.kernel.next_release or state.kernel.release))
    found = {release: state.kernel.find(release) for release in releases}
    headers = tuple(
        f"linux-headers-{release}" for release, kernel in found.items() if kernel is None or not kernel.has_headers
    )
    return headers if state.kernel.default_compiler else (*headers, "gcc")


@converges("driver.hold", "kernel.hold")
def holds(context: Context) -> Commands:
    """Hold the whole family, and the kernel where the stack says so."""
    assert not isinstance(context.state.dpkg, Unknown)  # the difference could not have been seen otherwise
    names: set[str] = set()
    if context.difference("driver.hold"):
        locked = wanted.packages(context.stack, context.state)
        names |= set(wanted.driver_family(context.stack, context.state, locked))
    if context.difference("kernel.hold"):
        installed = context.state.dpkg.packages.items()
        names |= {name for name, p in installed if wanted.is_kernel_package(name) and p.is_installed}
    yield apt.hold(names)


@converges("driver.unattended_upgrades")
def unattended_upgrades(context: Context) -> Commands:
    """Keep unattended-upgrades away from the family: a hold that somebody lifts is not enough."""
    family = wanted.driver_family(context.stack, context.state, wanted.packages(context.stack, context.state))
    yield write(wanted.BLACKLIST_FILE, wanted.blacklist_text(family))


@converges("driver.nouveau")
def nouveau(context: Context) -> Commands:
    """Keep nouveau off the GPUs, in the initramfs too."""
    del context
    yield write(wanted.NOUVEAU_FILE, wanted.nouveau_text())
    yield shell(
        "initramfs",
        "if command -v update-initramfs >/dev/null && ls /boot/initrd.img-* >/dev/null 2>&1\n"
        "then update-initramfs -u -k all\nfi",
        limit_s=900,
        detach=True,
    )


@converges("driver.persistence")
def persistence(context: Context) -> Commands:
    """Run the persistence daemon, now where a driver is loaded, and at every boot."""
    yield from _unit(context, wanted.PERSISTENCE_UNIT)


@converges("fabric.ib_umad")
def fabric_module(context: Context) -> Commands:
    """Load the module that the subnet manager of NVLink 5 needs, now and at every boot."""
    yield write(wanted.FABRIC_MODULES_FILE, wanted.fabric_modules_text())
    # On a host that is about to boot into its driver the file is enough, and the running kernel may lack it.
    driver, fabric = context.state.driver, context.state.fabric
    is_driven = not isinstance(driver, Unknown) and driver.loaded is not None
    if is_driven and not isinstance(fabric, Unknown) and not fabric.is_ib_umad_loaded:
        yield do("ib_umad", ["modprobe", "ib_umad"], limit_s=60)


@converges("fabric.service")
def fabric_service(context: Context) -> Commands:
    """Run the fabric manager, now where a driver is loaded, and at every boot."""
    yield from _unit(context, wanted.FABRIC_UNIT)


def _unit(context: Context, unit: str) -> Commands:
    # Without its driver a daemon only fails: enabled, it starts with the boot that brings the driver.
    state = context.state.driver
    is_loaded = not isinstance(state, Unknown) and state.loaded is not None
    yield do("daemon-reload", ["systemctl", "daemon-reload"], limit_s=60)
    yield do("enable", ["systemctl", "enable", *(["--now"] if is_loaded else []), unit], limit_s=120)


@converges("driver.loaded")
def reboot(context: Context) -> Commands:
    """Reboot into the installed driver when the host's policy allows it, at most once a run."""
    host = context.host
    refusal = change.reboot(
        context.stack,
        context.state,
        policy=context.settings.reboot,
        is_local=host.name.startswith("@"),
        has_rebooted=host.name in _rebooted,
    )
    if refusal is not None:
        yield refuse(host, refusal)
        return
    yield FunctionCommand(_reboot, (), {})
    yield from lock.acquire(again=True)


def _reboot() -> None:
    """Reboot the host and come back to it; raise HostError when it does not come back with another boot id."""
    host: Host = ctx_host.get()
    asked, output = host.run_shell_command(work("reboot", "--for-s", REBOOT_LIMIT_S), **_root(host))
    if not asked:
        raise HostError("the host did not take the reboot", host=host.name, why=" / ".join(output.stderr_lines[-3:]))
    before = output.stdout_lines[-1].strip()
    lock.let_go(host)
    _rebooted.add(host.name)
    end = time.monotonic() + REBOOT_LIMIT_S
    gevent.sleep(_FIRST_LOOK_S)
    while (left_s := end - time.monotonic()) > 0 and connection.reconnect(host, left_s):
        if _boot_id(host) not in (None, before):
            facts.invalidate(host)
            return
        gevent.sleep(1)
    refusal = change.no_return(REBOOT_LIMIT_S)
    facts.tell_finding(host, refusal)
    raise HostError(refusal.cause, host=host.name)


def _boot_id(host: Host) -> str | None:
    try:
        ok, output = host.run_shell_command("cat /proc/sys/kernel/random/boot_id", _timeout=20)
    except (OSError, EOFError, SSHException):
        return None
    lines = output.stdout_lines
    return lines[0].strip() if ok and lines else None


def _root(host: Host) -> dict[str, object]:
    return {"_sudo": True} if host.data.get("_sudo") else {}


@deploy("Driver")
def install() -> None:
    """Bring the host to the wanted driver, held and loaded, with its fabric where the hardware has one."""
    apt.source(name="Write NVIDIA's package source, key and pins")
    unattended_upgrades(name="Keep unattended-upgrades off the driver family")
    nouveau(name="Keep nouveau off the GPUs")
    packages(name="Install the pinned driver family")
    holds(name="Hold the driver family")
    fabric_module(name="Load the subnet manager's module")
    reboot(name="Reboot into the installed driver")
    persistence(name="Run the persistence daemon")
    fabric_service(name="Run the fabric manager")
