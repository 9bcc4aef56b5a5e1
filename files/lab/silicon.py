#!/usr/bin/python3
"""Lay a bringup lab host's description over /sys and /proc, once per boot, before anything reads them.

What counts as the loaded driver is decided here and recorded: the nvidia.ko that dkms built for the running kernel,
unless Secure Boot would refuse it. A driver installed afterwards changes nothing before the next boot, as on real
hardware. Everything is laid as plain files below /run/bringup-lab and mounted over the machine's own.
"""

import ctypes
import json
import os
import struct
import sys
import uuid

ROOT = os.environ.get("BRINGUP_LAB_ROOT", "")  # set by tests only: nothing is mounted then
DESCRIPTION = ROOT + "/usr/lib/bringup-lab/host.json"
LAID = ROOT + "/run/bringup-lab"
LOADED = LAID + "/loaded.json"

MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

NVIDIA = "0x10de"
SECURE_BOOT = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
SIGNATURE = b"~Module signature appended~\n"
# The compiler that each release builds its kernels with.
COMPILERS = {
    "bookworm": "gcc-12 (Debian 12.2.0-14) 12.2.0",
    "trixie": "gcc-14 (Debian 14.2.0-19) 14.2.0",
    "noble": "x86_64-linux-gnu-gcc-13 (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0",
}
NVSWITCH = {"Hopper": "22a3", "Ampere": "1af1"}

# PCI Express capability, and the extended one for access control, at fixed places of a bridge's configuration.
CAPABILITY_AT = 0x40
ACS_AT = 0x100
ACS_ALL = 0x1D  # source validation, request and completion redirect, upstream forwarding
ACS_HEALTHY = 0x11  # source validation and upstream forwarding only


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as out:
        out.write(text if isinstance(text, bytes) else text.encode())


def link(path, target):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.symlink(target, path)


def read(path):
    try:
        with open(path) as stream:
            return stream.read()
    except OSError:
        return ""


def mount(source, target, flags=MS_BIND):
    """Bind ``source`` over ``target``; nothing happens in a test's root or where the machine has no such place."""
    if ROOT or not os.path.exists(target):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), None, flags, None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


# --- the driver


def find_module():
    """Return the path of the running kernel's nvidia.ko, None when there is none."""
    base = "%s/lib/modules/%s" % (ROOT, os.uname().release)
    for directory, _, names in sorted(os.walk(base)):
        if "nvidia.ko" in names:
            return os.path.join(directory, "nvidia.ko")
    return None


def module_info(path):
    """Return {key: value} of a module's .modinfo, and whether a signature is appended."""
    with open(path, "rb") as stream:
        data = stream.read()
    info = {}
    for entry in data.split(b"\0"):
        key, equals, value = entry.partition(b"=")
        if equals and key in (b"version", b"license"):
            info[key.decode()] = value.decode(errors="replace")
    return info, data.endswith(SIGNATURE)


def decide_driver(described):
    """Return what is recorded as loaded: version and flavour, or None for both and the reason."""
    path = find_module()
    if path is None:
        return {"version": None, "flavour": None, "reason": "no nvidia.ko for this kernel"}
    info, is_signed = module_info(path)
    if described["is_secure_boot"] and not is_signed:
        return {"version": None, "flavour": None, "reason": "Key was rejected by service"}
    flavour = "closed" if info.get("license") == "NVIDIA" else "open"
    return {"version": info.get("version"), "flavour": flavour}


def wanted_modules(described):
    """Return the loadable modules that some modules-load.d file names."""
    wanted = set()
    for directory in ("/etc/modules-load.d", "/usr/lib/modules-load.d", "/run/modules-load.d"):
        try:
            names = os.listdir(ROOT + directory)
        except OSError:
            continue
        for name in names:
            for line in read("%s%s/%s" % (ROOT, directory, name)).splitlines():
                wanted.add(line.strip().replace("-", "_"))
    return sorted(wanted & set(described["loadable_modules"]))


def lay_modules(described, loaded):
    tree = LAID + "/sys/module"
    for name in os.listdir("/sys/module"):
        os.makedirs("%s/%s" % (tree, name), exist_ok=True)
    for name in wanted_modules(described):
        write("%s/%s/refcnt" % (tree, name), "0\n")
    if loaded["version"]:
        for name in ("nvidia", "nvidia_modeset", "nvidia_drm", "nvidia_uvm"):
            write("%s/%s/version" % (tree, name), loaded["version"] + "\n")
            write("%s/%s/refcnt" % (tree, name), "0\n")
            write("%s/%s/taint" % (tree, name), "OE\n")
    mount(tree, "/sys/module")


def lay_proc_driver(described, loaded):
    tree = LAID + "/proc/driver"
    os.makedirs(tree, exist_ok=True)
    version = loaded["version"]
    if version:
        if loaded["flavour"] == "open":
            line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  %s  Release Build  (bringup-lab)  \n"
        else:
            line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  %s  Release Build  (bringup-lab)\n"
        parts = compiler(described).split(" ", 1)
        write(tree + "/nvidia/version", line % version + "GCC version:  gcc version %s \n" % parts[-1])
        write(tree + "/nvidia/params", "ResmanDebugLevel: 4294967295\n")
        for gpu in described["gpus"]:
            text = "Model: \t\t %s\nGPU UUID: \t %s\nBus Location: \t %s\nDevice Minor: \t %d\nGPU Firmware: \t %s\n"
            write(
                "%s/nvidia/gpus/%s/information" % (tree, gpu["bus_id"]),
                text % (described["model"]["name"], gpu["uuid"], gpu["bus_id"], gpu["index"], version),
            )
        for bus_id in nvswitches(described):
            write("%s/nvidia-nvswitch/devices/%s" % (tree, bus_id), "Firmware Version: bringup-lab\n")
        lay_devices(described)
    mount(tree, "/proc/driver")


def lay_devices(described):
    """Make the device files: plain files, which a process can hold open and nothing else."""
    names = ["nvidiactl", "nvidia-uvm", "nvidia-modeset"]
    names += ["nvidia%d" % gpu["index"] for gpu in described["gpus"]]
    for name in names:
        path = "%s/dev/%s" % (ROOT, name)
        if not os.path.exists(path):
            write(path, "")
            os.chmod(path, 0o666)


def compiler(described):
    """Return the compiler of the described kernel; without one in the description, the release's own."""
    if described["kernel_compiler"]:
        return described["kernel_compiler"]
    for line in read(ROOT + "/etc/os-release").splitlines():
        name, _, value = line.partition("=")
        if name == "VERSION_CODENAME" and value in COMPILERS:
            return COMPILERS[value]
    return COMPILERS["bookworm"]


# --- PCI


def nvswitches(described):
    """Return the bus addresses of the NVSwitches that have a driver of their own."""
    if described["model"]["fabric"] != "nvswitch":
        return []
    return ["0000:%02x:00.0" % (0xA0 + number) for number in range(described["model"]["nvswitches"])]


def header(vendor, device, class_code, subsystem, is_bridge):
    """Return the first 64 bytes of a configuration space, as lspci reads them."""
    data = bytearray(64)
    struct.pack_into("<HHHH", data, 0, vendor, device, 0x0007, 0x0010)
    struct.pack_into("<I", data, 8, class_code << 8 | 0xA1)
    data[0x0E] = 1 if is_bridge else 0
    if not is_bridge:
        struct.pack_into("<HH", data, 0x2C, vendor, subsystem)
    data[0x34] = CAPABILITY_AT
    return bytes(data)


def configuration(vendor, device, class_code, subsystem=0, is_bridge=False, control=0):
    """Return a configuration space: the header, a PCI Express capability and, for a bridge, access control."""
    data = bytearray(4096 if is_bridge else 256)
    data[:64] = header(vendor, device, class_code, subsystem, is_bridge)
    kind = 4 if is_bridge else 0  # root port or endpoint
    struct.pack_into("<BBH", data, CAPABILITY_AT, 0x10, 0, kind << 4 | 2)
    struct.pack_into("<I", data, CAPABILITY_AT + 12, 16 << 4 | 5)  # link capability: x16, 32 GT/s
    struct.pack_into("<H", data, CAPABILITY_AT + 18, 16 << 4 | 5)  # link status
    if is_bridge:
        struct.pack_into("<IHH", data, ACS_AT, 0x0001000D, ACS_ALL | 0x02, control)
    return bytes(data)


def lay_function(base, vendor, device, class_code, numa_node, subsystem=0, cpus="", is_bridge=False, control=0):
    values = {
        "vendor": "0x%04x\n" % vendor,
        "device": "0x%04x\n" % device,
        "class": "0x%06x\n" % class_code,
        "revision": "0xa1\n",
        "subsystem_vendor": "0x%04x\n" % vendor,
        "subsystem_device": "0x%04x\n" % subsystem,
        "numa_node": "%d\n" % numa_node,
        "local_cpulist": cpus + "\n",
        "irq": "0\n",
        "enable": "1\n",
        "resource": "0x0000000000000000 0x0000000000000000 0x0000000000000000\n" * 7,
        "current_link_speed": "32.0 GT/s PCIe\n",
        "max_link_speed": "32.0 GT/s PCIe\n",
        "current_link_width": "16\n",
        "max_link_width": "16\n",
        "aer_dev_correctable": "TOTAL_ERR_COR 0\n",
        "aer_dev_fatal": "TOTAL_ERR_FATAL 0\n",
        "aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 0\n",
        "config": configuration(vendor, device, class_code, subsystem, is_bridge, control),
    }
    for name, value in values.items():
        write("%s/%s" % (base, name), value)


def lay_pci(described, loaded):
    """Lay /sys/bus with the described PCI devices; other buses stay the machine's."""
    tree = LAID + "/sys/bus"
    devices = LAID + "/sys/devices/pci0000:00"
    model = described["model"]
    control = ACS_ALL if described["has_acs"] else ACS_HEALTHY
    places = {}
    for gpu in described["gpus"]:
        bridge = "%s/%s" % (devices, gpu["bridge_id"])
        place = "%s/%s" % (bridge, gpu["bus_id"])
        lay_function(bridge, 0x1022, 0x153E, 0x060400, gpu["numa_node"], is_bridge=True, control=control)
        places[gpu["bridge_id"]] = bridge
        if gpu["is_lost"]:
            continue
        device, subsystem = int(model["pci_device"], 16), int(model["pci_subsystem"], 16)
        lay_function(place, 0x10DE, device, 0x030200, gpu["numa_node"], subsystem, gpu["cpus"])
        places[gpu["bus_id"]] = place
        if loaded["version"]:
            link(place + "/driver", "/sys/bus/pci/drivers/nvidia")
            link("%s/pci/drivers/nvidia/%s" % (tree, gpu["bus_id"]), place)
    for bus_id in nvswitches(described):
        place = "%s/%s" % (devices, bus_id)
        lay_function(place, 0x10DE, int(NVSWITCH[model["architecture"]], 16), 0x068000, 0)
        places[bus_id] = place
    for number, _ in enumerate(described["subnet_managers"]):
        bus_id = "0000:%02x:00.0" % (0xB0 + number)
        place = "%s/%s" % (devices, bus_id)
        lay_function(place, 0x15B3, 0x1021, 0x020700, 0)
        write(place + "/vpd", b"\x82\x12\x00NVLink-SW_MNG-LPF\x00")
        places[bus_id] = place
    for bus_id, place in places.items():
        link("%s/pci/devices/%s" % (tree, bus_id), place)
    os.makedirs(tree + "/pci/drivers", exist_ok=True)
    lay_over(tree, "/sys/bus", replaced=("pci",))


def lay_class(described):
    """Lay /sys/class where the description adds to it: fabric management adapters, an IOMMU."""
    tree = LAID + "/sys/class"
    replaced = []
    for number, name in enumerate(described["subnet_managers"]):
        place = "%s/sys/devices/pci0000:00/0000:%02x:00.0" % (LAID, 0xB0 + number)
        link("%s/infiniband/%s/device" % (tree, name), place)
        replaced.append("infiniband")
    if described["has_iommu"]:
        os.makedirs(tree + "/iommu/dmar0", exist_ok=True)
        replaced.append("iommu")
        groups = LAID + "/sys/kernel/iommu_groups"
        for number, _ in enumerate(described["gpus"]):
            os.makedirs("%s/%d" % (groups, number), exist_ok=True)
        mount(groups, "/sys/kernel/iommu_groups")
    if replaced:
        lay_over(tree, "/sys/class", replaced)


def lay_over(tree, target, replaced):
    """Mount ``tree`` over ``target``; what is not replaced leads to the machine's own, kept at another place."""
    machine = LAID + "/machine-sys"
    if not os.path.isdir(machine):
        os.makedirs(machine)
        mount("/sys", machine, MS_BIND | MS_REC)
        # Otherwise what is mounted over /sys/bus would appear here too, and its links would lead to themselves.
        mount("", machine, MS_PRIVATE | MS_REC)
    for name in os.listdir(target):
        if name not in replaced:
            link("%s/%s" % (tree, name), "%s%s/%s" % (machine, target[len("/sys") :], name))
    mount(tree, target)


def lay_firmware(described):
    """Lay the EFI variable that says whether Secure Boot is on; without one the machine has no EFI."""
    if described["is_secure_boot"] is None:
        return
    tree = LAID + "/sys/firmware"
    state = b"\x06\x00\x00\x00" + (b"\x01" if described["is_secure_boot"] else b"\x00")
    write("%s/efi/efivars/%s" % (tree, SECURE_BOOT), state)
    mount(tree, "/sys/firmware")


def lay_boot(described):
    """Lay command line and version of the kernel, and an identity of this boot where none was laid before."""
    write(LAID + "/proc/cmdline", described["kernel_command_line"] + "\n")
    mount(LAID + "/proc/cmdline", "/proc/cmdline")
    release = os.uname().release
    version = "Linux version %s (lab@bringup) (%s, GNU ld (GNU Binutils) 2.40) #1 SMP PREEMPT_DYNAMIC\n"
    write(LAID + "/proc/version", version % (release, compiler(described)))
    mount(LAID + "/proc/version", "/proc/version")
    boot_id = "/proc/sys/kernel/random/boot_id"
    if " %s " % boot_id not in read("/proc/self/mountinfo"):
        write(LAID + "/proc/boot_id", "%s\n" % uuid.uuid4())
        mount(LAID + "/proc/boot_id", boot_id)


def main():
    if os.path.exists(LOADED):
        return  # laid already in this boot
    os.makedirs(LAID, exist_ok=True)
    described = json.loads(read(DESCRIPTION))
    loaded = decide_driver(described)
    lay_boot(described)
    lay_pci(described, loaded)
    lay_class(described)
    lay_firmware(described)
    lay_modules(described, loaded)
    lay_proc_driver(described, loaded)
    # Last and whole: who finds this file finds everything laid.
    write(LOADED + ".new", json.dumps(loaded) + "\n")
    os.rename(LOADED + ".new", LOADED)


if __name__ == "__main__":
    sys.exit(main())
