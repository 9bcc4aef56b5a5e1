"""The script behind make: what it asks for, when it stops, and a real run in bare Debian roots."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bringup import bootstrap, paths
from bringup.lab import source
from tests.lab.conftest import CACHE

SCRIPT = paths.root() / "bringup" / "bootstrap.py"
UBUNTU_22 = 'PRETTY_NAME="Ubuntu 22.04.5 LTS"\nID=ubuntu\nVERSION_ID="22.04"\n'
FEDORA = "PRETTY_NAME='Fedora Linux 42'\nID=fedora\nVERSION_ID=42\n"
UBUNTU_24 = 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n'


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("release", "found"),
    [
        pytest.param(UBUNTU_22, "Ubuntu 22.04.5 LTS", id="older Ubuntu"),
        pytest.param(FEDORA, "Fedora Linux 42", id="another distribution"),
        pytest.param("", "unknown unknown", id="no os-release"),
    ],
)
def test_another_system_stops_with_what_was_wanted_and_found(tmp_path: Path, release: str, found: str) -> None:
    path = tmp_path / "os-release"
    path.write_text(release)
    done = run("--system", "lab", "--os-release", str(path))
    assert done.returncode == 2
    assert "wanted: Debian 12, Debian 13 or Ubuntu 24.04" in done.stderr
    assert f"found:  {found}" in done.stderr


def test_ubuntu_24_04_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "os-release"
    path.write_text(UBUNTU_24)
    bootstrap.check_system(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_without_root_it_stops_before_anything_is_installed(tmp_path: Path) -> None:
    copy = tmp_path / "bringup"
    copy.mkdir()
    shutil.copy(SCRIPT, copy / "bootstrap.py")
    for directory in (tmp_path, *tmp_path.parents):
        if directory.owner() == "root" and directory != Path("/") and directory != Path("/tmp"):
            directory.chmod(directory.stat().st_mode | 0o055)
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3"
         if Path("/usr/bin/python3").exists() else sys.executable, str(copy / "bootstrap.py"), "--system", "lab"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "this needs root" in done.stderr


def test_without_network_the_cause_is_shown(tmp_path: Path) -> None:
    copy = tmp_path / "checkout" / "bringup"
    copy.mkdir(parents=True)
    shutil.copy(SCRIPT, copy / "bootstrap.py")
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(paths.root() / name, copy.parent / name)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": "/dev/null",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(copy / "bootstrap.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "hint: check that the machine's package index can be reached" in done.stderr
    assert not (copy.parent / ".venv" / ".bringup-bootstrap").exists()


def test_every_system_package_says_why_it_is_needed() -> None:
    for packages in bootstrap.PACKAGES.values():
        for name, witness, reason in packages:
            assert name
            assert witness
            assert reason.startswith("to ")


def test_python_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    with pytest.raises(bootstrap.CannotGoOnError, match=r"wanted: 3\.11 or newer\n  found:  3\.10\.4"):
        bootstrap.check_python()


# ---------------------------------------------------------------- in a bare root


def bare_root(codename: str) -> Path:
    """Return a debootstrapped root with only git, make and python3, made once and kept in the cache."""
    root = CACHE / "bare" / codename
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        unfinished = root.with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        subprocess.run(
            ["debootstrap", "--variant=minbase", "--include=git,make,python3,ca-certificates", codename,
             str(unfinished), source.find().uri],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        unfinished.rename(root)
    return root


# The machine's own package settings go into the root; files that they name are shared by binding them.
ENTER = """
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$WORK"
mkdir "$WORK/upper" "$WORK/work" "$WORK/root"
mount -t overlay overlay -o "lowerdir=$BASE,upperdir=$WORK/upper,workdir=$WORK/work" "$WORK/root"
cd "$WORK/root"
mount -t proc proc proc
mount --rbind /dev dev
cp /etc/resolv.conf etc/resolv.conf
mkdir -p root/.config usr/local/share/ca-certificates
for file in /etc/pip.conf /etc/xdg/pip /root/.config/pip /etc/ssl/certs/ca-certificates.crt
do if [ -e "$file" ]; then mkdir -p ".$(dirname "$file")"; cp -r "$file" ".$file"; fi
done
for shared in $SHARED
do mkdir -p ".$shared"; mount --bind "$shared" ".$shared"
done
git clone -q --no-hardlinks "$CHECKOUT" srv/bringup
exec chroot . sh -euc '
cd /srv/bringup
make venv SYSTEM=1
.venv/bin/bringup --version
make venv SYSTEM=1'
"""


OURS = ("VIRTUAL_ENV", "PYTEST", "MAKE", "MFLAGS")
"""What the run of these tests leaves in the environment, and a user's shell does not have."""


@pytest.mark.bootstrap
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("codename", ["bookworm", "trixie"])
def test_a_bare_root_is_made_ready_and_a_second_run_does_nothing(codename: str, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("entering a root needs root")
    shared = [path for path in ("/opt/wheels", "/opt/pypi", "/opt/pypi-more") if Path(path).is_dir()]
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER],
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith(OURS)},
            "BASE": str(bare_root(codename)), "WORK": str(work), "CHECKOUT": str(paths.root()),
            "SHARED": " ".join(shared), "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
        },
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    before, version, after = done.stdout.partition("bringup 0.1.0\n")
    assert version
    assert "debootstrap        to make the rehearsal hosts' base image" in before
    assert "making .venv from requirements.lock" in before
    assert after == ""
