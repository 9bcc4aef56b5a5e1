"""Look at everything that bringup's probe reports with pyinfra's own operations and facts, one for each section."""

from __future__ import annotations

import json
import os

from pyinfra import host
from pyinfra.api.exceptions import DeployError
from pyinfra.facts.files import File, FileContents, Link, Sha256File
from pyinfra.facts.server import Command, LinuxDistribution
from pyinfra.operations import apt, files, systemd

WANTED = json.loads(os.environ["WANTED"])


def look(command: str) -> str:
    return str(host.get_fact(Command, command=command) or "")


def check(section: str, is_as_wanted: bool) -> None:
    if not is_as_wanted:
        raise DeployError(f"{section} is not as wanted")


check("os", str(host.get_fact(LinuxDistribution)["major"]) == WANTED["os_release"])
kernel = look("uname -r; cat /proc/cmdline /proc/sys/kernel/tainted; modinfo -F version nvidia; ls /boot")
check("kernel", WANTED["driver"] in kernel)
look("mokutil --sb-state 2>&1 || true")
apt.packages(name="dpkg", packages=WANTED["packages"])
sources = look("apt-config dump; apt-mark showhold; cat /etc/apt/sources.list.d/* /etc/apt/preferences.d/*")
check("apt", "bringup" in sources)
check("driver", WANTED["driver"] in look("cat /sys/module/nvidia/version; dkms status"))
gpus = look("nvidia-smi --query-gpu=name,uuid,pci.bus_id,driver_version,compute_cap --format=csv,noheader")
check("gpus", len(gpus.splitlines()) == WANTED["gpus"])
look("ls /sys/class/infiniband /dev/nvidia-nvswitch* 2>/dev/null || true")
toolkits = look("readlink -f /usr/local/cuda; update-alternatives --query cuda; cat /usr/local/cuda-*/version.json")
check("toolkits", toolkits.startswith(WANTED["cuda"]))
check("loader", f"{WANTED['cuda']}/targets" in look("cat /etc/ld.so.conf.d/*.conf; ldconfig -p"))
look("python3.11 --version")
check("environment", host.get_fact(Link, path="/opt/bringup/current")["link_target"] == WANTED["environment"])
look("cat /opt/bringup/current/.bringup-env.json; find /opt/bringup/current/lib/ -printf '%P %s %T@ ' | sha256sum")
look("nvidia-smi --query-compute-apps=pid,name --format=csv,noheader")
look("df -B1 / /opt /boot")
look("timedatectl show")
check("verification", bool(host.get_fact(FileContents, path="/var/lib/bringup/verification.json")))
check("pin", not host.get_fact(File, path="/var/lib/bringup/pin.json"))
assigned = json.loads("".join(host.get_fact(FileContents, path="/var/lib/bringup/assigned.json")))
check("assigned", assigned["digest"] == WANTED["digest"])
look("for name in run work; do flock --shared --nonblock /run/bringup/$name.lock true; done")
systemd.service(name="services", service="nvidia-persistenced.service", running=True, enabled=True)
look("cat /etc/environment /etc/profile.d/*.sh")
for path in ("/etc/bringup/service.env", "/opt/bringup/bin/run", "/etc/modprobe.d/bringup-nouveau.conf"):
    check("files", bool(host.get_fact(Sha256File, path=path)))
files.file(name="files", path="/opt/bringup/bin/run", mode="755")
look("cat /etc/cloud/cloud.cfg 2>/dev/null || true")
check("simulated", bool(host.get_fact(FileContents, path="/etc/bringup-lab.json")))
