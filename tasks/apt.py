"""The one way to apt: our source and key, a locked set and nothing else, holds, and repair by policy."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
from pyinfra.context import ctx_host

from bringup import catalog, facts, paths, wanted
from bringup.errors import HostError, InputError
from bringup.stack import LockedPackage
from tasks.channel import push
from tasks.run import Command, Commands, Context, converges, do, is_executing, quoted, shell, write

LOCK_WAIT_S = 600
LOGIN_FILE = "/run/bringup/credentials-apt"
"""The login of our repository in the form of apt's auth.conf, there while one command of apt runs."""

_INSTALL_LIMIT_S = 3600
_NONINTERACTIVE = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "l"}
_CARRIER = (
    "import base64,sys,zlib;"
    "exec(compile(zlib.decompress(base64.b64decode(sys.argv.pop(1))),'apt_set.py','exec'),{'__name__':'__main__'})"
)


@converges("apt.*")
def source(context: Context) -> Commands:
    """Put our source, its key and the version pins in place, and refresh apt's lists."""
    site = facts.site(context.host)
    repository = wanted.repository(context.state, site)
    locked = wanted.packages(context.stack, context.state)
    if repository is None or locked is None:
        raise HostError("no repository is known for this release", hint="see `bringup plan` for this host")
    url, fingerprint = repository
    if context.difference("apt.key") or context.difference("apt.source"):
        yield write(wanted.KEY_FILE, key(context, url, fingerprint))
        yield write(wanted.SOURCE_FILE, wanted.source_text(url))
    if context.difference("apt.preferences"):
        yield write(wanted.PREFERENCES_FILE, wanted.preferences_text(locked))
    yield update()


def key(context: Context, url: str, fingerprint: str) -> bytes:
    """Return the repository's key as a binary keyring, once its fingerprint is the wanted one.

    It comes from the file the inventory names, else from the repository itself, fetched by the controller.
    Raises HostError when it cannot be had or is another key.
    """
    data = _key_file(context, url)
    if data.lstrip().startswith(b"-----BEGIN"):
        data = dearmored(data)
    found = paths.host_script("host_probe").fingerprints(data)
    if fingerprint not in found:
        raise HostError(
            "the repository key is not the expected one",
            why=f"wanted {fingerprint}, found {', '.join(found) or 'no key'}",
            hint="compare with the vendor's published fingerprint before trusting another key",
        )
    return data


def _key_file(context: Context, url: str) -> bytes:
    if context.settings.apt_key is not None:
        try:
            return Path(context.settings.apt_key).read_bytes()
        except OSError as error:
            raise InputError(f"cannot read the key {context.settings.apt_key}", why=error.strerror) from None
    row = catalog.repository(wanted.release(context.state) or "")
    address = url + (row.key_file if row else "Release.key")
    _, login = facts.apt_login(context.host) or (url, None)
    try:
        return httpx.get(address, auth=login, timeout=30, follow_redirects=True).raise_for_status().content
    except httpx.HTTPError as error:
        raise HostError(
            f"cannot fetch the repository key {address}",
            why=str(error),
            hint="name a key file on the controller with bringup_apt_key in the inventory",
        ) from None


def dearmored(data: bytes) -> bytes:
    """Return the binary form of an armoured OpenPGP block; its checksum line is left aside."""
    body = re.search(rb"-----BEGIN [^\n]+-----\r?\n(?:[^\n]+: [^\n]*\r?\n)*\r?\n(.*?)\r?\n(?:=|-----END)", data, re.S)
    return base64.b64decode(body[1]) if body else data


def update() -> Command:
    """Return the command that refreshes apt's lists; a source that fails is an error."""
    if login := _send_login():
        return _run_set("apt-update", {"packages": [], "login": login, "lock_wait_s": LOCK_WAIT_S}, limit_s=900)
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
        environment=_NONINTERACTIVE,
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
    asked: dict[str, Any] = {
        "packages": [package.model_dump(include={"name", "version", "architecture", "sha256"}) for package in packages],
        "first": list(first),
        "protect": list(protect),
        "allow_downgrade": allow_downgrade,
        "lock_wait_s": LOCK_WAIT_S,
    }
    if login := _send_login():
        asked["login"] = login
    return _run_set(name, asked, limit_s=_INSTALL_LIMIT_S)


def _run_set(name: str, asked: Mapping[str, Any], *, limit_s: float) -> Command:
    script = base64.b64encode(zlib.compress((paths.files() / "apt_set.py").read_bytes(), 9)).decode()
    argv = ["python3", "-I", "-c", _CARRIER, script, json.dumps(asked, separators=(",", ":"))]
    return do(name, argv, limit_s=limit_s, detach=True)


def _send_login() -> str | None:
    """Send our repository's login to the host whose turn it is, and return where it lies; None without any.

    It goes over a channel into a file that only root can read, and the command that gets its path removes it.
    """
    host = ctx_host.get()
    found = facts.apt_login(host)
    if found is None:
        return None
    url, (user, password) = found
    if re.search(r"\s", user + password) or not user or not password:
        raise InputError("bringup_apt_url: apt takes no login with spaces, and none that is half empty", host=host.name)
    if is_executing():
        push(host, LOGIN_FILE, f"machine {url.rstrip('/')}/ login {user} password {password}\n".encode(), mode="0600")
    return LOGIN_FILE


def install_named(name: str, packages: Iterable[str]) -> Command:
    """Return the command that installs packages of the distribution's own by name, whatever version it offers."""
    wait = ["-o", f"DPkg::Lock::Timeout={LOCK_WAIT_S}"]
    keep = ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
    names = [*packages]
    # A run that died between writing our source and refreshing the lists, and many an image, leave none behind.
    known = quoted("apt-cache", "show", "--no-all-versions", *names)
    refresh = quoted("apt-get", "-q", *wait, "update")
    install = quoted("apt-get", "-q", "-y", *wait, "--no-install-recommends", *keep, "install", *names)
    return do(
        name,
        ["sh", "-euc", f"{known} >/dev/null 2>&1 || {refresh}\n{install}"],
        limit_s=1800,
        detach=True,
        environment=_NONINTERACTIVE,
    )


def hold(names: Iterable[str]) -> Command:
    """Return the command that keeps apt from touching packages, as one set."""
    return do("apt-hold", ["apt-mark", "hold", *sorted(names)], limit_s=120)


def repair() -> Command:
    """Return the command that lets dpkg finish what it left half-way, once."""
    script = "dpkg --configure -a --force-confdef --force-confold </dev/null"
    exports = " ".join(f"{key}={value}" for key, value in _NONINTERACTIVE.items())
    return shell("dpkg-configure", f"export {exports}\n{script}\n", limit_s=1800, detach=True)
