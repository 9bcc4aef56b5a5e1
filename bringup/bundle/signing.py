"""Sign with a key of the user's own keyring; gpg asks for its passphrase itself, and nothing here sees it."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bringup.errors import BringupError, InputError


@dataclass(frozen=True)
class Signer:
    """A secret key of the user's keyring: its fingerprint, and its public part in binary form."""

    fingerprint: str
    public: bytes

    def clearsigned(self, text: str) -> bytes:
        """Return the text with a signature around it; raises BringupError with gpg's own words."""
        return self._sign("--clearsign", text)

    def detached(self, text: str) -> bytes:
        """Return an armoured signature that stands beside the text."""
        return self._sign("--detach-sign", text)

    def _sign(self, how: str, text: str) -> bytes:
        # No --batch: the agent may have to ask for a passphrase.
        options = ["--armor", "--digest-algo", "SHA512", "--local-user", self.fingerprint, "--output", "-"]
        done = _gpg([*options, how], text.encode())
        if done.returncode != 0:
            raise BringupError(
                f"gpg cannot sign with {self.fingerprint}",
                why=done.stderr.decode("utf-8", "replace").strip(),
                hint="over ssh, `export GPG_TTY=$(tty)` lets gpg ask for the passphrase",
            )
        return done.stdout


def open_signer(name: str) -> Signer:
    """Return the one secret key that ``name`` (a fingerprint, a key id, an address) stands for.

    Raises InputError when there is none, more than one, or when it is expired or cannot sign.
    """
    listed = _gpg(["--batch", "--with-colons", "--list-secret-keys", name])
    keys: list[tuple[list[str], str]] = []
    lines = [line.split(":") for line in listed.stdout.decode("utf-8", "replace").splitlines()]
    for fields, following in itertools.pairwise(lines):
        if fields[0] == "sec" and following[0] == "fpr":
            keys.append((fields, following[9]))
    if len(keys) != 1:
        raise InputError(
            f"wanted one secret key for {name!r}, found {len(keys) or 'none'}",
            why=", ".join(fingerprint for _, fingerprint in keys) or None,
            hint="`gpg --list-secret-keys` shows those of your keyring; name one by its fingerprint",
        )
    (fields, fingerprint) = keys[0]
    if fields[1] in ("e", "r", "d", "i") or "S" not in fields[11]:
        said = {"e": "it is expired", "r": "it is revoked"}.get(fields[1], "it is not for signing")
        raise InputError(f"the key {fingerprint} cannot sign the bundle", why=said, hint="name another one with --key")
    exported = _gpg(["--batch", "--export", fingerprint])
    if exported.returncode != 0 or not exported.stdout:
        raise BringupError(f"gpg cannot export {fingerprint}", why=exported.stderr.decode("utf-8", "replace").strip())
    return Signer(fingerprint, exported.stdout)


def is_signed(text: str, signature: bytes, *, key: bytes, fingerprint: str) -> bool:
    """Return whether a detached signature of ``text`` is by this primary key; ``key`` is its public part, binary."""
    with tempfile.TemporaryDirectory(prefix="bringup-gpg-") as directory:
        home = Path(directory)
        for name, content in (("ring", key), ("text", text.encode()), ("signature", signature)):
            (home / name).write_bytes(content)
        files = [str(home / "signature"), str(home / "text")]
        done = _gpg(["--homedir", directory, "--keyring", str(home / "ring"), "--status-fd", "1", *files], tool="gpgv")
    said = done.stdout.decode("utf-8", "replace").splitlines()
    signers = {line.split()[-1] for line in said if line.startswith("[GNUPG:] VALIDSIG ")}
    return done.returncode == 0 and fingerprint in signers


def _gpg(arguments: list[str], text: bytes = b"", *, tool: str = "gpg") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run([tool, *arguments], input=text, capture_output=True, check=False)
    except FileNotFoundError:
        raise BringupError(f"{tool} is missing", hint="install the package gnupg on this machine") from None
