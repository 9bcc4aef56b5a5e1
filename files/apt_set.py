#!/usr/bin/env python3
"""Install exactly one locked set of packages with apt, or say why not.

Usage: apt_set.py '{"packages": [{"name", "version", "architecture", "sha256"}...], "first": [NAME...],
                    "protect": [PATTERN...], "allow_downgrade": false, "lock_wait_s": 600, "login": PATH}'

Without packages it only refreshes apt's lists. ``login`` is a file in the form of auth.conf: it is used beside
the host's own, and removed at the end.

apt must offer every package at that version with that SHA-256; a simulation comes first, and nothing is done
when apt would remove a package, or touch one that matches ``protect`` and is not in the set. ``first`` names
packages of the set that are installed before the others (NVIDIA's version pinning). Exit status: 0 done, 1 apt
failed, 3 not offered, 4 the simulation showed something else than the set. The standard library only.
"""

import fnmatch
import json
import os
import re
import subprocess
import sys

ENVIRONMENT = dict(
    os.environ,
    DEBIAN_FRONTEND="noninteractive",
    DEBIAN_PRIORITY="critical",
    # List mode names services that should be restarted and restarts none: fabric manager and jobs stay up.
    NEEDRESTART_MODE="l",
    LC_ALL="C.UTF-8",
)
OPTIONS = [
    "-q",
    "-y",
    "-o", "Dpkg::Options::=--force-confdef",
    "-o", "Dpkg::Options::=--force-confold",
    "-o", "APT::Install-Recommends=false",
    "-o", "APT::Get::Upgrade-Allow-New=false",
    "--allow-change-held-packages",
]  # fmt: skip


def main(argv):
    """Install the set that argv[0] describes."""
    asked = json.loads(argv[0])
    login = asked.get("login")
    try:
        return install_set(asked, login_options(login) if login else [])
    finally:
        if login and os.path.exists(login):
            os.unlink(login)


def login_options(path):
    """Return how apt is told of a login; apt reads one such file, so the host's own is put behind ours."""
    if os.path.exists("/etc/apt/auth.conf"):
        with open("/etc/apt/auth.conf") as own, open(path, "a") as file:
            file.write(own.read())
    return ["-o", "Dir::Etc::netrc={}".format(path)]


def install_set(asked, login):
    """Install the packages, or refresh apt's lists when there are none; return the exit status."""
    packages = asked["packages"]
    wait = ["-o", "DPkg::Lock::Timeout={}".format(asked.get("lock_wait_s", 600)), *login]
    if not packages:
        return 1 if update(wait) else 0
    options = OPTIONS + wait + (["--allow-downgrades"] if asked.get("allow_downgrade") else [])
    wrong = not_offered(packages)
    if wrong:
        # The lists may be older than the repository: look once more before giving up.
        if update(wait) != 0:
            return 1
        wrong = not_offered(packages)
    if wrong:
        for line in wrong:
            sys.stderr.write(line + "\n")
        return 3
    first = [package for package in packages if package["name"] in asked.get("first", [])]
    for batch in filter(None, (first, packages)):
        status = install(batch, packages, options, asked.get("protect", []))
        if status != 0:
            return status
    return 0


def update(wait):
    """Refresh apt's lists; any source that fails is an error, not a warning."""
    command = ["apt-get", "-q", "-o", "APT::Update::Error-Mode=any", *wait, "update"]
    return subprocess.run(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, check=False).returncode


def not_offered(packages):
    """Return a line for every package that apt does not offer at this version with this hash."""
    offered = {}
    names = sorted({"{}={}".format(package["name"], package["version"]) for package in packages})
    shown = subprocess.run(
        ["apt-cache", "show", "--no-all-versions", *names],
        env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        universal_newlines=True, check=False,
    ).stdout  # fmt: skip
    for paragraph in re.split(r"\n\s*\n", shown):
        fields = dict(re.findall(r"(?m)^([A-Za-z0-9-]+): (.*)$", paragraph))
        if "Package" in fields:
            key = (fields["Package"], fields.get("Version"))
            offered.setdefault(key, set()).add(fields.get("SHA256"))
    wrong = []
    for package in packages:
        hashes = offered.get((package["name"], package["version"]))
        label = "{} {}".format(package["name"], package["version"])
        if hashes is None:
            wrong.append("{}: no repository of this host offers it".format(label))
        elif package["sha256"] not in hashes:
            found = ", ".join(sorted(filter(None, hashes))) or "nothing"
            wrong.append("{}: sha256 wanted {}, found {}".format(label, package["sha256"], found))
    return wrong


def install(batch, whole, options, protect):
    """Simulate, compare with the set, then install one batch."""
    names = ["{}={}".format(package["name"], package["version"]) for package in batch]
    command = ["apt-get", *options, "install", *names]
    tried = subprocess.run(
        [*command, "--simulate"], env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, universal_newlines=True, check=False,
    )  # fmt: skip
    if tried.returncode != 0:
        sys.stderr.write(tried.stdout[-4000:])
        return 1
    ours = {package["name"] for package in whole}
    wrong = []
    for action, name in re.findall(r"(?m)^(Inst|Remv|Purg) (\S+)", tried.stdout):
        plain = name.split(":")[0]
        if action in ("Remv", "Purg") and not replaced_by(plain, ours):
            wrong.append("apt would remove {}".format(name))
        elif plain not in ours and any(fnmatch.fnmatchcase(plain, pattern) for pattern in protect):
            wrong.append("apt would change {}, which is not in the locked set".format(name))
    if wrong:
        sys.stderr.write("\n".join(wrong) + "\n")
        return 4
    return 1 if subprocess.run(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, check=False).returncode else 0


def replaced_by(name, ours):
    """Return whether a package of the set takes the place of NAME.

    A change of flavour or branch replaces members of the driver family by others, in one transaction.
    """
    family = re.match(r"(lib)?nvidia-|cuda-drivers|xserver-xorg-video-nvidia", name)
    return bool(family) and any(other.startswith(("nvidia-", "libnvidia-")) for other in ours)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
