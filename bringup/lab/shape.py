"""Give a lab host the habits of hardened sites."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from ipaddress import IPv4Address
from pathlib import Path

OPT_BYTES = 8 * 1024**3
"""Size of a separate /opt; sparse, so it costs what is written."""

PROXY_PORT = 3128


class Trait(StrEnum):
    """One way in which a site's hosts differ from a fresh installation."""

    UMASK_077 = "umask-077"
    """Every session, root's too, creates files that only their owner reads."""

    NOEXEC_TMP = "noexec-tmp"
    """/tmp is a file system of its own from which nothing can be executed."""

    OPT_OWN_FS = "opt-own-fs"
    """/opt is a file system of its own: hard links from elsewhere do not reach into it."""

    PROXY_ONLY = "proxy-only"
    """The mirror is reached through an HTTP proxy and in no other way."""


def lay_in(root: Path, traits: Iterable[Trait], *, controller: IPv4Address) -> None:
    """Write the configuration of ``traits`` into the root file system of a host that does not run."""
    wanted = set(traits)
    if Trait.UMASK_077 in wanted:
        for name in ("common-session", "common-session-noninteractive"):
            _append(root / "etc/pam.d" / name, "session optional pam_umask.so umask=0077\n")
        _append(root / "etc/sudoers.d/91-umask", "Defaults umask=0077\nDefaults umask_override\n", mode=0o440)
    if Trait.NOEXEC_TMP in wanted:
        _append(root / "etc/fstab", "tmpfs /tmp tmpfs noexec,nosuid,nodev,mode=1777,size=256m 0 0\n")
    if Trait.PROXY_ONLY in wanted:
        proxy = f"http://{controller}:{PROXY_PORT}"
        _append(root / "etc/environment", f"http_proxy={proxy}\nhttps_proxy={proxy}\n")
        _append(root / "etc/apt/apt.conf.d/80proxy", f'Acquire::http::Proxy "{proxy}";\n')


def _append(path: Path, text: str, mode: int | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else ""
    path.write_text(before + text)
    if mode is not None:
        path.chmod(mode)
