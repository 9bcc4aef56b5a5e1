"""Every path that ``drift.diff`` can emit, made to differ on a lab host: one line each, and apply brings it back."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pytest

from bringup import drift, paths
from bringup.stack import load_stack
from tests.e2e.rig import Rig, must

pytestmark = pytest.mark.lab

DRIVER_LIBRARY = "libnvidia-compute-580"
INTERPRETERS = re.compile(r"^interpreter = .*\ninterpreters = .*$", re.MULTILINE)
SITE = "/opt/bringup/current/lib/python3.11/site-packages"


@dataclass(frozen=True)
class Mutation:
    """A change made by hand on a host, and the one path that must be reported for it.

    ``more`` are further arguments for every command, such as another stack. ``restore`` is run by hand before
    apply, for what bringup refuses to mend.
    """

    path: str
    script: str
    host: str = "gpu-02"
    stack: str | None = None
    restore: str = ""


MUTATIONS = [
    Mutation("apt.key", "rm /etc/apt/keyrings/bringup-nvidia.gpg"),
    Mutation("apt.source", "echo >> /etc/apt/sources.list.d/bringup-nvidia.sources"),
    Mutation("apt.preferences", "rm /etc/apt/preferences.d/bringup-nvidia"),
    Mutation("driver.unattended_upgrades", "rm /etc/apt/apt.conf.d/52bringup-unattended-upgrades"),
    Mutation("driver.nouveau", "rm /etc/modprobe.d/bringup-nouveau.conf"),
    Mutation("driver.hold", f"apt-mark unhold {DRIVER_LIBRARY}"),
    Mutation(
        "driver.packages",
        "mv /etc/apt/preferences.d/bringup-nvidia /root/pin; "
        "apt-get install -y --allow-change-held-packages libnvidia-common-580=580.159.04-0lab1; "
        "apt-mark hold libnvidia-common-580; mv /root/pin /etc/apt/preferences.d/bringup-nvidia",
    ),
    # What the kernel shows as loaded lies below /run/bringup-lab on a lab host.
    Mutation("driver.loaded", "grep -rl 580.95.05 /run/bringup-lab | xargs sed -i s/580.95.05/580.82.07/g"),
    Mutation("driver.persistence", "systemctl disable --now nvidia-persistenced"),
    Mutation("kernel.hold", "apt-mark unhold linux-headers-$(uname -r)", stack="hold"),
    Mutation("fabric.packages", "dpkg --force-all -r nvlsm", host="gpu-03"),
    Mutation("fabric.ib_umad", "rm /etc/modules-load.d/bringup-fabric.conf", host="gpu-03"),
    Mutation("fabric.service", "systemctl disable --now nvidia-fabricmanager", host="gpu-03"),
    Mutation("cuda.alternatives", "update-alternatives --auto cuda-13"),
    Mutation("cuda.toolkit.12.8", "dpkg --force-all -r cuda-nvcc-12-8"),
    Mutation("linker.conf", "rm /etc/ld.so.conf.d/00-bringup-cuda.conf; ldconfig"),
    Mutation(
        "linker.libnvrtc.so.12",
        "mkdir -p /opt/shadow; cp -L /usr/local/cuda-12.8/targets/x86_64-linux/lib/libnvrtc.so.12 /opt/shadow/; "
        "echo /opt/shadow > /etc/ld.so.conf.d/00-a-shadow.conf; ldconfig",
        restore="rm -r /etc/ld.so.conf.d/00-a-shadow.conf /opt/shadow; ldconfig",
    ),
    Mutation("environment.launcher", "echo '# edited' >> /opt/bringup/bin/run"),
    Mutation(
        "environment.distribution.torch",
        "mv /opt/bringup/current/lib/python3.11/site-packages/torch-2.9.1+cu130.dist-info "
        "/opt/bringup/current/lib/python3.11/site-packages/torch-2.10.0.dist-info; "
        f"sed -i 's/^Version: .*/Version: 2.10.0/' {SITE}/torch-2.10.0.dist-info/METADATA",
    ),
    Mutation("environment.files.torch", f"echo '# edited' >> {SITE}/torch/__init__.py"),
    Mutation("environment.strays", f"mkdir {SITE}/stray; touch {SITE}/stray/__init__.py"),
    Mutation("environment.existing", "rm -rf /srv/env", stack="existing", restore="python3 -m venv /srv/env"),
    Mutation("verification", "rm /var/lib/bringup/verification.json"),
    Mutation("cuda.default", "update-alternatives --set cuda /usr/local/cuda-12.8"),
    Mutation("service.file", "echo 'X=1' >> /etc/bringup/service.env"),
    Mutation("environment.current", "rm /opt/bringup/current"),
    Mutation("pin", "mkdir -p /var/lib/bringup; echo '@PIN@' > /var/lib/bringup/pin.json"),
]


def test_every_path_has_a_mutation() -> None:
    missing = [
        path.pattern for path in drift.PATHS if not any(fnmatchcase(case.path, path.pattern) for case in MUTATIONS)
    ]
    assert missing == []


@pytest.fixture(scope="module")
def hosts(verified: Rig) -> Rig:
    """The verified hosts, and beside them one whose GPUs need a fabric, brought to verified as well."""
    verified.lab.up(3, gpus={"gpu-03": "8x NVIDIA B200"})
    must(verified.apply("gpu-03"))
    return verified


def options(rig: Rig, case: Mutation) -> list[str]:
    """Return the options that choose a case's stack: a variant of ``lab`` with the same lock."""
    if case.stack is None:
        return []
    text = (paths.stacks() / "lab.toml").read_text()
    variants = {
        "hold": text + '\n[kernel]\npolicy = "hold"\n',
        "existing": INTERPRETERS.sub('interpreter = "existing:/srv/env"', text.split("[[python.step]]")[0]),
    }
    path = rig.state / f"{case.stack}.toml"
    path.write_text(variants[case.stack])
    return ["--stack", str(path), "--lock", str(rig.lab.layout.state_dir / "locks" / "lab.lock.toml")]


def pin(rig: Rig) -> str:
    """Return the record of a pin on the very stack that the hosts are to have."""
    locks = rig.lab.layout.state_dir / "locks"
    stack = load_stack(paths.stacks() / "lab.toml", lock_path=locks / "lab.lock.toml")
    return json.dumps({"digest": stack.digest, "reason": "tried by a test", "since": "2026-11-30T00:00:00+00:00"})


@pytest.mark.parametrize("case", MUTATIONS, ids=lambda case: case.path)
def test_a_change_by_hand_gives_one_line_and_is_brought_back(hosts: Rig, case: Mutation) -> None:
    more = options(hosts, case)
    if case.stack is not None:
        if case.stack == "existing":
            hosts.shell(case.host, case.restore)
        must(hosts.apply(case.host, *more))
        assert must(hosts.drift(case.host, *more)).differences(case.host) == []

    hosts.shell(case.host, case.script.replace("@PIN@", pin(hosts)))
    found = must(hosts.drift(case.host, *more), 1)
    assert found.differences(case.host) == [case.path]

    if case.restore:
        hosts.shell(case.host, case.restore)
    if case.path == "pin":
        refused = must(hosts.apply(case.host), 1)
        assert refused.host(case.host).status == "refused"
        must(hosts.command("rollback", "--limit", case.host, "--unpin"))
    must(hosts.apply(case.host, *more))
    again = must(hosts.apply(case.host, *more))
    assert again.results.summary.changes == 0
    assert again.differences(case.host) == []
