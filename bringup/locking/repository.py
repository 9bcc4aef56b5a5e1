"""Read a signed flat apt repository: NVIDIA's, a site's mirror of it, or the lab's."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import httpx

from bringup.errors import BringupError, InputError
from bringup.locking.debian import Package, paragraphs, parse_packages
from bringup.locking.http import read, shown


@dataclass(frozen=True)
class Repository:
    """What a signed index lists for one architecture, and whose it is (``Origin`` of its Release file)."""

    url: str
    origin: str
    packages: tuple[Package, ...]
    release_sha256: str


@dataclass(frozen=True)
class Listing:
    """The text of a signed ``Packages`` index: where it was read, whose it is, and the hash of its Release file."""

    source: str
    text: str
    origin: str
    release_sha256: str


def read_repository(http: httpx.Client, url: str, *, architecture: str, key: bytes, fingerprint: str) -> Repository:
    """Return the packages of the flat repository at ``url``, its signature checked.

    ``key`` is the public key, armoured or not; ``fingerprint`` is what that key must be. Raises BringupError
    when the repository cannot be read, and InputError when the signature or a hash does not hold.
    """
    listing = read_listing(http, url, key=key, fingerprint=fingerprint)
    return Repository(
        url=shown(url.rstrip("/")),
        origin=listing.origin,
        packages=parse_packages(listing.text, architecture, source=listing.source),
        release_sha256=listing.release_sha256,
    )


def read_listing(http: httpx.Client, url: str, *, key: bytes, fingerprint: str) -> Listing:
    """Return the index of the flat repository at ``url`` as text; raises what ``read_repository`` raises."""
    base = url.rstrip("/")
    signed = read(http, f"{base}/InRelease")
    if signed is None:
        raise BringupError(
            f"no apt repository at {shown(base)}", why="it has no InRelease file", hint="is the address complete?"
        )
    release = verified(signed, key=key, fingerprint=fingerprint, source=f"{shown(base)}/InRelease")
    fields = next(paragraphs(release), {})
    digests = {
        name: (digest, int(size))
        for digest, size, name in (
            line.split() for line in fields.get("SHA256", "").splitlines() if len(line.split()) == 3
        )
    }
    for name, opened in (("Packages.xz", lzma.decompress), ("Packages.gz", gzip.decompress), ("Packages", bytes)):
        if name not in digests and f"./{name}" not in digests:
            continue
        content = read(http, f"{base}/{name}")
        if content is None:
            continue
        digest, size = digests.get(name) or digests[f"./{name}"]
        if len(content) != size or hashlib.sha256(content).hexdigest() != digest:
            raise InputError(
                f"{shown(base)}/{name} is not what its Release file signed",
                why=f"wanted sha256 {digest} in {size} bytes",
                hint="a mirror in the middle of an update: try again",
            )
        return Listing(
            source=f"{shown(base)}/{name}",
            text=opened(content).decode("utf-8", errors="replace"),
            origin=fields.get("Origin", ""),
            release_sha256=hashlib.sha256(release.encode()).hexdigest(),
        )
    raise InputError(f"{shown(base)}: its Release file lists no Packages index with a SHA256")


def verified(signed: bytes, *, key: bytes, fingerprint: str, source: str) -> str:
    """Return the text inside a clear-signed file, signed by the key with ``fingerprint`` and no other.

    Raises InputError naming ``source`` when it is not, BringupError when gpg is missing.
    """
    wanted = fingerprint.replace(" ", "").upper()
    with tempfile.TemporaryDirectory(prefix="bringup-gpg-") as directory:
        home = Path(directory)
        home.chmod(0o700)
        (home / "key").write_bytes(key)
        (home / "signed").write_bytes(signed)
        # gpgv needs no agent and no trust database, but reads only a binary keyring.
        _gpg(["gpg", "--homedir", directory, "--batch", "--yes", "--dearmor", "-o", f"{home}/ring", f"{home}/key"])
        ring = home / "ring"
        if not ring.is_file():
            ring.write_bytes(key)
        done = _gpg(
            ["gpgv", "--homedir", directory, "--keyring", str(ring), "--status-fd", "1",
             "--output", f"{home}/text", f"{home}/signed"]
        )  # fmt: skip
        signers = {
            name
            for line in done.stdout.splitlines()
            if line.startswith("[GNUPG:] VALIDSIG ")
            for name in (line.split()[2], line.split()[-1])
        }
        if done.returncode != 0 or wanted not in signers:
            raise InputError(
                f"{source}: the signature does not hold",
                why=f"wanted key {wanted}, found {', '.join(sorted(signers)) or 'no valid signature'}",
                hint="check the repository's key; nothing unsigned is locked",
            )
        return (home / "text").read_text(encoding="utf-8", errors="replace")


def fingerprint_of(key: bytes, *, source: str) -> str:
    """Return the fingerprint of a public key, armoured or not; raises InputError when ``source`` holds none."""
    with tempfile.TemporaryDirectory(prefix="bringup-gpg-") as directory:
        (Path(directory) / "key").write_bytes(key)
        done = _gpg(["gpg", "--homedir", directory, "--batch", "--with-colons", "--show-keys", f"{directory}/key"])
    for line in done.stdout.splitlines():
        if line.startswith("fpr:"):
            return line.split(":")[9]
    raise InputError(f"{source} holds no public key", why=done.stderr.strip() or None)


def _gpg(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        raise BringupError(f"{command[0]} is missing", hint="install the package gnupg on this machine") from None
