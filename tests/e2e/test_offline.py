"""A host without a way out installs a stack from a bundle that a static web server shows."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bringup import paths
from bringup.lab import wheels, wheels_pack
from bringup.lab.lab import Lab
from bringup.locking import lock_for_lab
from bringup.stack import LockedFile
from tests.e2e import variant
from tests.e2e.rig import Rig, argv, must
from tests.e2e.site import Site, keyring, serving, signing_key
from tests.lab.conftest import open_lab

pytestmark = pytest.mark.lab

RANGE = "10.92.9.0/24"
HOST = "gpu-01"

INVENTORY = """
from bringup.lab.record import inventory
hosts, lab = inventory()
ssh = {{name: value for name, value in lab.items() if name.startswith("ssh_")}}
offline = (hosts, {{**ssh, "bringup_reboot": "allowed", **{data!r}}})
"""


@dataclass
class Offline:
    """The lab, a signing key of the site, the bundle and where it is served."""

    rig: Rig
    directory: Path
    gnupg: Path
    key: str
    site: Site
    bundled: dict[str, Any] = field(default_factory=dict)

    @property
    def lab(self) -> Lab:
        return self.rig.lab

    def bundle(self, *words: str) -> dict[str, Any]:
        """Run ``bringup bundle`` into the served directory and return its document."""
        done = subprocess.run(
            argv(["bundle", *words, "-o", str(self.directory), "--json"]),
            env={**self.rig.environment, "GNUPGHOME": str(self.gnupg)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def inventory(self, document: dict[str, Any]) -> Path:
        """Write the inventory that a bundle's document asks for, with the address of the web server in it."""
        data = json.loads(json.dumps(document["inventory"]).replace("http://SERVER", self.site.url))
        (data["bringup_apt_url"],) = data["bringup_apt_url"].values()
        return self.rig.inventory("offline", INVENTORY.format(data=data))

    def asked_of_the_mirror(self) -> list[str]:
        """Return what hosts asked of the lab's own mirror, which stands for the world outside."""
        log = self.lab.layout.mirror / "nginx" / "access.log"
        lines = [line.split('"')[1] for line in log.read_text().splitlines() if not line.startswith(self._controller)]
        # The distribution's own packages are the distribution's mirror's business, and every site has one.
        return [line for line in lines if "/distro/" not in line]

    @property
    def _controller(self) -> str:
        return f"{self.lab.addresses.controller} "


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offline]:
    """One bare host, its lab's mirror, and a bundle made from that mirror, served beside it."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    work = tmp_path_factory.mktemp("offline")
    lab = open_lab("offline", RANGE)
    with ExitStack() as ending:
        lab.down()
        ending.callback(lab.down)
        lab.up(1)
        record = lab.record()
        lock_for_lab(
            paths.stacks() / "lab.toml",
            lab.layout.state_dir,
            record.mirror_url,
            key_file=Path(record.apt_key_file),
            key_fingerprint=record.apt_key_fingerprint,
        )
        gnupg = ending.enter_context(keyring())
        directory = work / "bundle"
        directory.mkdir()
        site = ending.enter_context(serving(directory, str(lab.addresses.controller)))
        made = Offline(Rig(lab, work), directory, gnupg, signing_key(gnupg, "site"), site)
        made.bundled = made.bundle("lab", "--lab", str(lab.layout.state_dir), "--key", made.key)
        yield made


def test_bundle_holds_everything_once_and_is_not_made_twice(offline: Offline) -> None:
    first = offline.bundled
    files = [path for path in offline.directory.rglob("*") if path.suffix in (".whl", ".deb")]
    assert len(first["fetched"]) == len(set(first["fetched"])) == len(files) > 100
    assert first["sent_bytes"] == sum(path.stat().st_size for path in files) == first["size_bytes"]
    again = offline.bundle("lab", "--lab", str(offline.lab.layout.state_dir))
    assert (again["fetched"], again["sent_bytes"], again["changed"]) == ([], 0, [])
    assert offline.bundle("--verify")["problems"] == []
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=offline.directory, check=True)


def test_host_becomes_verified_from_the_bundle_alone(offline: Offline) -> None:
    before = len(offline.asked_of_the_mirror())
    started = time.monotonic()
    run = must(offline.rig.apply(HOST, inventory=offline.inventory(offline.bundled)))
    steps = {step.name: step.seconds for step in run.host(HOST).steps}
    print(f"apply from the bundle: {time.monotonic() - started:.1f} s; {steps}")
    verification = run.host(HOST).verification
    assert verification is not None
    assert verification.state == "verified"
    assert offline.asked_of_the_mirror()[before:] == []
    source = offline.rig.shell(HOST, "cat /etc/apt/sources.list.d/bringup-nvidia.sources")
    assert f"URIs: {offline.site.url}/apt/debian12/x86_64/\n" in source
    assert "Signed-By: /etc/apt/keyrings/bringup-nvidia.gpg\n" in source
    assert "trusted" not in offline.rig.shell(HOST, "cat /etc/apt/sources.list.d/* /etc/apt/apt.conf.d/*").lower()
    wheels_sent = offline.site.sent_bytes(".whl")
    assert wheels_sent == {path.name: path.stat().st_size for path in offline.directory.rglob("*.whl")}
    indexes = [path for path, _ in offline.site.sent if "/by-hash/" in path]
    assert indexes, "apt fetched no index by its hash"


def test_repository_signed_by_another_key_is_refused(offline: Offline) -> None:
    stranger = signing_key(offline.gnupg, "stranger")
    release = offline.directory / "apt/debian12/x86_64/InRelease"
    ours = release.read_bytes()
    sign = ["gpg", "--homedir", str(offline.gnupg), "--batch", "--yes", "--local-user", stranger, "--clearsign"]
    body = ours.partition(b"\n\n")[2].partition(b"-----BEGIN PGP SIGNATURE")[0]
    try:
        release.write_bytes(subprocess.run(sign, input=body, capture_output=True, check=True).stdout)
        done = offline.lab.run(HOST, ["apt-get -o APT::Update::Error-Mode=any update"])
        assert done.returncode == 100
        assert f"NO_PUBKEY {stranger[-16:]}" in done.stdout + done.stderr
        checked = subprocess.run(
            argv(["bundle", "--verify", "-o", str(offline.directory), "--json"]), capture_output=True, check=False
        )
        assert checked.returncode == 1
        assert [each["path"] for each in json.loads(checked.stdout)["problems"]] == [
            "apt/debian12/x86_64/InRelease"
        ] * 2
    finally:
        release.write_bytes(ours)


def test_stack_that_differs_by_one_wheel_costs_that_wheel(offline: Offline, tmp_path: Path) -> None:
    index = offline.lab.layout.mirror / "wheels" / "default"
    made = wheels_pack.pack(
        tmp_path, name="tabulate", version="0.9.1", tag="py3-none-any", files={"tabulate.py": os.urandom(300_000)}
    )
    wheels.add(index, [made])
    try:
        options = stack_with(offline, variant.served(offline.lab, "default", "tabulate", "0.9.1"))
        document = offline.bundle(*options, "--lab", str(offline.lab.layout.state_dir))
    finally:
        # The mirror stays for the next run, which is to find it as it was.
        (index / made.name).unlink()
        (index / "simple/tabulate" / made.name).unlink()
        wheels.publish(index)
    size_bytes = made.stat().st_size
    assert document["fetched"] == [f"wheels/default/simple/tabulate/{made.name}"]
    assert document["sent_bytes"] == size_bytes
    offline.site.sent.clear()
    before = len(offline.asked_of_the_mirror())
    must(offline.rig.apply(HOST, inventory=offline.inventory(document)))
    assert offline.site.sent_bytes(".whl") == {made.name: size_bytes}
    assert offline.site.sent_bytes(".deb") == {}
    assert offline.asked_of_the_mirror()[before:] == []
    version = "import importlib.metadata as m; print(m.version('tabulate'))"
    assert offline.rig.shell(HOST, f'/opt/bringup/current/bin/python -c "{version}"').strip() == "0.9.1"
    # Both stacks are in the bundle now, and whole.
    assert offline.bundle("--verify")["problems"] == []


def stack_with(offline: Offline, file: LockedFile) -> list[str]:
    """Write the lab stack with another file of one distribution, and return how ``bundle`` is told of it."""
    lock = variant.lab_lock(offline.lab)
    assert lock.wheels is not None
    step = next(
        step.name
        for step in lock.wheels.platforms[variant.PLATFORM].steps
        if file.distribution in [each.distribution for each in step.files]
    )
    written = variant.write(offline.lab, offline.rig.state, "one-wheel", files={step: [file]})
    return [written[1], "--lock", written[3]]
