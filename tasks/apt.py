"""The one way to apt: our source and key, the locked set and nothing else, holds, and repair by policy."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from bringup import paths
from bringup.errors import InputError
from bringup.stack import LockedPackage
from tasks.run import Command, do, quoted, shell, write

SOURCE = "/etc/apt/sources.list.d/bringup-nvidia.sources"
KEY = "/etc/apt/keyrings/bringup-nvidia.gpg"
DRIVER_FAMILY = (
    "nvidia-*",
    "libnvidia-*",
    "libcuda1*",
    "cuda-drivers*",
    "xserver-xorg-video-nvidia*",
    "libnvsdm*",
)
"""Package names that no other step may touch (patterns)."""

LOCK_WAIT_S = 600
_INSTALL_LIMIT_S = 3600

_CARRIER = (
    "import base64,sys,zlib;"
    "exec(compile(zlib.decompress(base64.b64decode(sys.argv.pop(1))),'apt_set.py','exec'),{'__name__':'__main__'})"
)


def source_text(url: str) -> str:
    """Return our deb822 source for a flat repository."""
    return f"Types: deb\nURIs: {url.rstrip('/')}/\nSuites: /\nSigned-By: {KEY}\n"


def write_source(*, url: str, key: bytes) -> Iterator[Command]:
    """Yield the commands that put our source and key in place and refresh apt's lists."""
    yield write(KEY, key)
    yield write(SOURCE, source_text(url))
    yield update()


def update() -> Command:
    """Return the command that refreshes apt's lists; a source that fails is an error."""
    return do(
        "apt-update",
        [
            "apt-get",
            "-q",
            "-o",
            f"DPkg::Lock::Timeout={LOCK_WAIT_S}",
            "-o",
            "APT::Update::Error-Mode=any",
            "update",
        ],
        limit_s=900,
        detach=True,
        environment={"DEBIAN_FRONTEND": "noninteractive"},
    )


def install(
    name: str,
    packages: Iterable[LockedPackage],
    *,
    first: Iterable[str] = (),
    protect: Iterable[str] = (),
    allow_downgrade: bool = False,
) -> Command:
    """Return the command that installs exactly a locked set; see ``files/apt_set.py`` for what it refuses."""
    asked = {
        "packages": [
            package.model_dump(include={"name", "version", "architecture", "sha256"}) for package in packages
        ],
        "first": list(first),
        "protect": list(protect),
        "allow_downgrade": allow_downgrade,
        "lock_wait_s": LOCK_WAIT_S,
    }
    script = base64.b64encode(zlib.compress((paths.files() / "apt_set.py").read_bytes(), 9)).decode()
    return do(
        name,
        ["python3", "-I", "-c", _CARRIER, script, json.dumps(asked, separators=(",", ":"))],
        limit_s=_INSTALL_LIMIT_S,
        detach=True,
    )


def hold(names: Iterable[str]) -> Command:
    """Return the command that keeps apt from touching packages, as one set."""
    return do("apt-hold", ["apt-mark", "hold", *sorted(names)], limit_s=120)


def repair() -> Command:
    """Return the command that lets dpkg finish what it left half-way, once."""
    return shell(
        "dpkg-configure",
        "export DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=l\n"
        "dpkg --configure -a --force-confdef --force-confold\n",
        limit_s=1800,
        detach=True,
    )


def key_bytes(path: str) -> bytes:
    """Return a key file of the controller. Raises InputError when it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the repository key {path}", why=error.strerror) from None


def names_quoted(names: Iterable[str]) -> str:
    """Return package names for a shell script."""
    return quoted(*names)
