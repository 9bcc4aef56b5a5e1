"""Prepare a bare machine for bringup: system packages (which and why) and ``.venv``. Run again, it does nothing.

Runs under the system's python3 with the standard library only. Exit status: 0 ready, 2 cannot be done here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".bringup-bootstrap"
LOCK = ROOT / "requirements.lock"
SUPPORTED = {("debian", "12"), ("debian", "13"), ("ubuntu", "24.04")}

# What each package is for; a package is asked for only when its witness is missing.
PACKAGES = {
    "base": [
        ("python3-venv", "ensurepip", "to make .venv"),
        ("ca-certificates", "/etc/ssl/certs/ca-certificates.crt", "to trust the package index"),
        ("openssh-client", "ssh", "to reach hosts"),
    ],
    "lab": [
        ("debootstrap", "debootstrap", "to make the rehearsal hosts' base image"),
        ("systemd-container", "systemd-nspawn", "to boot rehearsal hosts"),
        ("iproute2", "ip", "to give each rehearsal host its own network"),
        ("mount", "mount", "to give each rehearsal host its own root file system"),
        ("e2fsprogs", "mkfs.ext4", "to give a rehearsal host a file system for /opt of its own"),
        ("util-linux", "setpriv", "to end rehearsal hosts with their supervisor"),
        ("kmod", "modinfo", "to read what kind of module dkms built"),
        ("gnupg", "gpg", "to sign the rehearsal mirror"),
        ("nginx-light", "nginx", "to serve the rehearsal mirror"),
        ("gcc", "cc", "to compile look-alike libraries"),
        ("libc6-dev", "/usr/include/stdio.h", "to compile look-alike libraries"),
        ("zstd", "zstd", "to pack look-alike packages quickly"),
    ],
    "test": [
        ("postgresql", "/usr/lib/postgresql", "to test the shared history on a real server"),
        ("binutils", "readelf", "to compare our ELF reader with"),
    ],
}


class CannotGoOnError(Exception):
    """Say what is missing and what to do."""


def main(arguments: list[str]) -> int:
    """Make the machine ready; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", action="append", default=[], choices=["lab", "test"])
    parser.add_argument("--os-release", type=Path, default=Path("/etc/os-release"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        check_python()
        groups = ["base", *options.system]
        missing = missing_packages(groups)
        if missing or options.system:
            check_system(options.os_release)
            check_root()
        if missing:
            install_packages(missing)
        make_environment()
    except CannotGoOnError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def check_python() -> None:
    """Raise unless this python3 is new enough."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this file is also run by the machine's own python3)
        found = ".".join(map(str, sys.version_info[:3]))
        raise CannotGoOnError(
            f"python3 is too old\n  wanted: 3.11 or newer\n  found:  {found}\n"
            "  hint: Debian 12, Debian 13 and Ubuntu 24.04 bring one that is new enough"
        )


def check_system(path: Path) -> None:
    """Raise on a distribution that bringup was not written for."""
    fields = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            key, _, value = line.partition("=")
            fields[key] = value.strip().strip("\"'")
    found = (fields.get("ID", "unknown"), fields.get("VERSION_ID", "unknown"))
    if found not in SUPPORTED or not shutil.which("apt-get"):
        raise CannotGoOnError(
            "this machine's operating system is not supported\n"
            "  wanted: Debian 12, Debian 13 or Ubuntu 24.04\n"
            f"  found:  {fields.get('PRETTY_NAME', ' '.join(found))}\n"
            "  hint: `make test-quick` needs no system packages and runs elsewhere too"
        )


def check_root() -> None:
    """Raise unless we are root."""
    if os.geteuid() != 0:
        raise CannotGoOnError(
            "this needs root\n  cause: it installs system packages and makes network namespaces and mounts\n"
            "  hint: run it with sudo, or run `make test-quick`, which needs no root"
        )


def missing_packages(groups: list[str]) -> list[tuple[str, str]]:
    """Return the packages of some groups whose witness is not there, with the reason for each."""
    return [(name, reason) for group in groups for name, witness, reason in PACKAGES[group] if not is_there(witness)]


def is_there(witness: str) -> bool:
    """Return whether a command, a file or the ensurepip module exists."""
    if witness == "ensurepip":
        return (Path(sysconfig.get_path("stdlib")) / "ensurepip" / "__init__.py").is_file()
    if witness.startswith("/"):
        return Path(witness).exists()
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return shutil.which(witness, path=path) is not None


def install_packages(missing: list[tuple[str, str]]) -> None:
    """Install packages with apt, saying which and why. A service that one brings is not started."""
    check_root()
    print("installing system packages:", flush=True)
    for name, reason in missing:
        print(f"  {name:<18} {reason}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "l"}
    policy = Path("/usr/sbin/policy-rc.d")
    made_policy = not policy.exists()
    if made_policy:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        for command in (
            ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "-o", "APT::Update::Error-Mode=any", "update"],
            [
                "apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300", "--no-install-recommends", "install",
                *(name for name, _ in missing),
            ],
        ):  # fmt: skip
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                said = [line for line in done.stdout.splitlines() if line.startswith(("E:", "W:", "Err:"))]
                raise CannotGoOnError(
                    f"{' '.join(command[:2])} … failed with status {done.returncode}\n"
                    f"  cause: {'; '.join(said[-3:]) or done.stdout.strip()[-300:]}\n"
                    "  hint: check the network and the machine's apt sources, then run this again"
                )
    finally:
        if made_policy:
            policy.unlink(missing_ok=True)


def make_environment() -> None:
    """Make ``.venv`` from the hash-pinned lock and install bringup there as an editable package."""
    wanted = hashlib.sha256(LOCK.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    python = VENV / "bin" / "python"
    if STAMP.is_file() and STAMP.read_text() == f"{wanted} {ROOT}" and (VENV / "bin" / "bringup").is_file():
        return
    print("making .venv from requirements.lock", flush=True)
    base = base_interpreter()
    run([str(base), "-m", "venv", "--clear", str(VENV)])
    pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "install"]
    run([*pip, "--require-hashes", "--no-deps", "-r", str(LOCK)])
    run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    STAMP.write_text(f"{wanted} {ROOT}")


def base_interpreter() -> Path:
    """Return the interpreter to make ``.venv`` with: not one of a virtual environment."""
    return Path(getattr(sys, "_base_executable", sys.executable) or sys.executable)


def run(command: list[str]) -> None:
    """Run a command quietly; raise with its last words when it fails."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise CannotGoOnError(
            f"{' '.join(command[:5])} … failed with status {done.returncode}\n"
            f"  cause: {done.stdout.strip()[-600:]}\n"
            "  hint: check that the machine's package index can be reached, then run this again"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
