"""Make the base image that every lab host starts from: once, beside its place, renamed when whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Event

from bringup.lab.command import run
from bringup.lab.layout import Layout
from bringup.lab.process import is_alive, start_ticks
from bringup.lab.source import Source

RECIPE = 1
"""Raise this when a change below must reach hosts that already have a base image."""

PACKAGES = (
    "ca-certificates",
    "cloud-init",
    "dbus",
    "dkms",
    "gnupg",
    "iproute2",
    "kmod",
    "needrestart",
    "openssh-server",
    "procps",
    "python3",
    "python3-venv",
    "sudo",
    "systemd",
    "systemd-sysv",
    "unattended-upgrades",
)
"""What a GPU server's bare installation has and bringup meets there; dkms brings the compiler of Debian 12."""

_MORE_PACKAGES = {"trixie": ("gcc",)}
"""What a release needs besides; from Debian 13 dkms only recommends the compiler."""

SUDO_USER = "operator"

# dpkg syncs every file; a rehearsal host is thrown away after a power cut, so the wait buys nothing.
_DPKG = """\
force-unsafe-io
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/locale/*
path-exclude=/usr/share/man/*
"""

# One log line for each session is what tests count remote commands by.
_SSHD = """\
LogLevel VERBOSE
PermitRootLogin prohibit-password
PasswordAuthentication no
UseDNS no
MaxStartups 200:30:400
MaxSessions 100
"""

# Keys, host name and network are laid in by the lab; cloud-init runs for real, from a seed, and leaves them.
_CLOUD = """\
datasource_list: [NoCloud, None]
disable_root: false
manage_etc_hosts: false
network: {config: disabled}
preserve_hostname: true
ssh_deletekeys: false
ssh_genkeytypes: []
users: []
"""

# The lab gives the network; devices are the controller's; a daily apt run would hold locks at any moment.
_MASKED = (
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "console-getty.service",
    "e2scrub_all.timer",
    "fstrim.timer",
    "networking.service",
    "systemd-networkd.service",
    "systemd-networkd.socket",
    "systemd-resolved.service",
    "systemd-udevd.service",
    "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket",
)

_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
}

_FOREIGN_HINT = (
    "; a release newer than this machine needs a newer debootstrap, and newer archive keys, than it may have"
)

# The packages are bound into the image, which is cheaper than copying them, and unbound with the namespace.
_INSTALL_SCRIPT = """\
packages=$1 root=$2
shift 2
mount --bind "$packages" "$root/mnt"
cd "$packages"
for name; do set -- "$@" "/mnt/$name"; shift; done
chroot "$root" apt-get -q -y -o APT::Install-Recommends=false install "$@"
chroot "$root" apt-get clean
"""


def digest(source: Source) -> str:
    """Return twelve hex digits of what decides the content of a base image, the mirror's address left out."""
    parts = [RECIPE, source.codename, source.architecture, _packages(source), _MASKED]
    parts += [_DPKG, _SSHD, _CLOUD]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _packages(source: Source) -> tuple[str, ...]:
    return (*PACKAGES, *_MORE_PACKAGES.get(source.codename, ()))


def rootfs(layout: Layout, source: Source) -> Path:
    """Return where the base image for ``source`` lies, made or not."""
    return layout.bases / f"{source.codename}-{digest(source)}" / "rootfs"


def ensure(layout: Layout, source: Source, *, tell: Callable[[str], None], stop: Event) -> Path:
    """Return the root of the base image, made now if it is not there.

    When another thread sets ``stop``, the work is given up at once and raises LabError.
    Built in a directory of another name and renamed when complete and on disk, so a base that is there is whole.
    Needs about a minute, 650 MB, and the machine's distribution mirror. The index of a release that is not the
    machine's own is fetched from there too (10 MB); what signs it must be in the machine's keyring.
    """
    root = rootfs(layout, source)
    if root.is_dir():
        return root
    remove_unfinished(layout)
    layout.packages.joinpath("partial").mkdir(parents=True, exist_ok=True)
    building = layout.bases / f".building-{os.getpid()}-{start_ticks(os.getpid())}"
    started = time.monotonic()
    tell(f"base image: debootstrap {source.codename}")
    _bootstrap(building / "rootfs", layout, source, stop)
    tell(f"base image: packages ({time.monotonic() - started:.0f} s)")
    _install(building / "rootfs", layout, source, stop)
    _settle(building / "rootfs")
    run(["sync", "--file-system", str(building)], what="cannot write the base image out", timeout_s=600)
    try:
        building.rename(root.parent)
    except OSError:
        # Labs may share their base images, and another one may have made this image meanwhile.
        if not root.is_dir():
            raise
        shutil.rmtree(building)
    tell(f"base image: made in {time.monotonic() - started:.0f} s")
    return root


def remove_unfinished(layout: Layout) -> None:
    """Remove what interrupted builds left, and our own; labs that share their base images may be building."""
    for left in layout.bases.glob(".building-*"):
        _, pid, ticks = left.name.split("-") if left.name.count("-") == 2 else ("", "0", "0")
        if int(pid) == os.getpid() or not is_alive(int(pid), int(ticks)):
            shutil.rmtree(left)


def remove_unused(layout: Layout, keep: Iterable[Path]) -> None:
    """Remove base images of older recipes, of the releases that ``keep`` (roots) is of.

    Those in ``keep`` stay, and so does what is mounted somewhere.
    """
    wanted = {root.parent for root in keep}
    codenames = {image.name.rpartition("-")[0] for image in wanted}
    mounts = Path("/proc/self/mountinfo").read_text()
    for image in (found for codename in codenames for found in layout.bases.glob(f"{codename}-*/rootfs")):
        if image.parent not in wanted and f"lowerdir={image}," not in mounts:
            shutil.rmtree(image.parent)


def _contained(*argv: str) -> list[str]:
    """Return ``argv`` in mount and process namespaces of its own, ended when this process ends.

    debootstrap mounts and starts things; whatever happens to us, nothing of that outlives the namespaces.
    """
    inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["setpriv", "--pdeathsig", "KILL", *inside, *argv]


def _bootstrap(root: Path, layout: Layout, source: Source, stop: Event) -> None:
    configuration = root / "etc/dpkg/dpkg.cfg.d/50-bringup-lab"
    configuration.parent.mkdir(parents=True)
    configuration.write_text(_DPKG)
    options = ["--variant=minbase", f"--arch={source.architecture}", f"--cache-dir={layout.packages}"]
    options += [f"--components={','.join(source.components)}"] if source.components else []
    options += [f"--keyring={source.keyring}"] if source.keyring else []
    environment = dict(os.environ)
    if source.proxy:
        environment |= {"http_proxy": source.proxy}
    run(
        _contained("debootstrap", *options, source.codename, str(root), source.uri),
        environment=environment,
        what="debootstrap could not make the base image",
        hint=f"its log: {root / 'debootstrap/debootstrap.log'}" + ("" if source.is_own else _FOREIGN_HINT),
        timeout_s=1800,
        stop=stop,
    )


def _install(root: Path, layout: Layout, source: Source, stop: Event) -> None:
    """Install PACKAGES: fetched by this machine's apt (its mirrors, proxy and keys), installed by the image's."""
    hint = "run `apt-get update`: this machine's package lists may name files that its mirror no longer has"
    index = {} if source.is_own else _foreign_index(root, source, stop)
    with tempfile.TemporaryDirectory(dir=layout.bases) as empty:
        Path(empty, "partial").mkdir()
        listing = run(
            [*_apt(root, archives=empty, more=index), "--print-uris", "install", *_packages(source)],
            what="apt cannot resolve the base image",
            hint=hint,
        )
    wanted = [line.split()[1] for line in listing.splitlines() if line.startswith("'")]
    run(
        [*_apt(root, archives=str(layout.packages), more=index), "--download-only", "install", *_packages(source)],
        what="apt cannot fetch the packages of the base image",
        hint=hint,
        timeout_s=1200,
        stop=stop,
    )
    # Packages must not start their services in the image.
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    run(
        _contained("sh", "-ec", _INSTALL_SCRIPT, "sh", str(layout.packages), str(root), *wanted),
        environment=_ENVIRONMENT | {"DEBIAN_FRONTEND": "noninteractive"},
        what="apt could not install the packages of the base image",
        timeout_s=1800,
        stop=stop,
    )
    policy.unlink()


def _foreign_index(root: Path, source: Source, stop: Event) -> dict[str, str]:
    """Fetch the index of a release that this machine's apt does not know; return the options that make apt read it.

    apt checks its signature. debootstrap left the same index in the image, so that it is seldom fetched again.
    """
    named = root / "etc/apt/sources.list"
    named.write_text(source.apt_source())
    options = {
        "Acquire::GzipIndexes": "false",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Dir::Etc::sourcelist": str(named),
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": f"{root}/var/lib/apt/lists",
    }
    run(
        [
            *_apt(root, archives=f"{root}/var/cache/apt/archives", more=options),
            "-o",
            "APT::Update::Error-Mode=any",
            "update",
        ],
        what=f"apt cannot read the index of {source.codename}",
        timeout_s=600,
        stop=stop,
    )
    return options


def _apt(root: Path, *, archives: str, more: Mapping[str, str]) -> list[str]:
    """Return the machine's own apt-get, looking at what is installed in ``root``."""
    options = {
        **more,
        "APT::Install-Recommends": "false",
        "Debug::NoLocking": "true",
        "Dir::Cache::archives": archives,
        "Dir::State::extended_states": f"{root}/var/lib/apt/extended_states",
        "Dir::State::status": f"{root}/var/lib/dpkg/status",
    }
    return ["apt-get", "-q", "-y", *(part for item in options.items() for part in ("-o", "=".join(item)))]


def _settle(root: Path) -> None:
    """Make the installed image a bare server's, without what makes a machine unlike its siblings."""
    texts = {
        "etc/ssh/sshd_config.d/10-lab.conf": _SSHD,
        "etc/cloud/cloud.cfg.d/99-lab.cfg": _CLOUD,
        "etc/sudoers.d/90-operator": f"{SUDO_USER} ALL=(ALL) NOPASSWD: ALL\n",
        "etc/default/locale": "LANG=C.UTF-8\n",
        "var/lib/cloud/seed/nocloud/meta-data": "instance-id: lab\n",
        "var/lib/cloud/seed/nocloud/user-data": "#cloud-config\n{}\n",
        # Nothing outside is within reach of a host, so nothing outside is named.
        "etc/apt/sources.list": "",
        "etc/resolv.conf": "",
        "etc/machine-id": "",
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text)
    (root / "etc/sudoers.d/90-operator").chmod(0o440)
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (root / "etc/hostname").unlink(missing_ok=True)
    units = root / "etc/systemd/system"
    for name in _MASKED:
        mask = units / name
        mask.unlink(missing_ok=True)
        mask.symlink_to("/dev/null")
    run(
        ["chroot", str(root), "useradd", "--create-home", "--gid", SUDO_USER, "--shell", "/bin/bash", SUDO_USER],
        environment=_ENVIRONMENT,
        what=f"cannot make the user {SUDO_USER}",
    )
