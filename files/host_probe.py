#!/usr/bin/env python3
"""Look at a GPU host and answer in one JSON document, the last line of standard output.

Read-only, standard library only, Python 3.8. Every section of the answer is a value or {"error": "..."};
exit status 0 means "I could look", whatever was seen. The script knows no wanted version and no threshold:
it reports, the controller decides.

usage: host_probe.py [PARAMETERS]    PARAMETERS is a JSON object, or - to read it from the first line of stdin

    {"only": ["environment"],        sections to answer; absent: all of them
     "sonames": ["libnvrtc.so.13"],  more loader entries to report than the families below
     "packages": ["dkms"],           more packages to report than the families below
     "units": ["inference.service"], more systemd units to report
     "files": ["/etc/motd"],         more files to report by hash and mode
     "space": ["/data"],             more directories to report free space for
     "environments": ["/opt/x"],     more Python environments to look into than the serving one
     "deep": false,                  compare every file of the environments with its RECORD hash
     "root": "/"}                    where the host's file system lies (for rehearsals on a directory)
"""

import base64
import csv
import fcntl
import glob
import hashlib
import io
import json
import os
import re
import stat
import struct
import subprocess
import sys
import threading
import time

SCHEMA = 1
STARTED = time.time()
CHILD_LIMIT_S = 20.0
TEXT_LIMIT = 240

HOME = "/opt/bringup"
ENVS = HOME + "/envs"
MARKER = ".bringup-env.json"
TAINT = ".bringup-tainted"
STATE = "/var/lib/bringup"
RUN = "/run/bringup"
LAB_MARKER = "/etc/bringup-lab.json"

PACKAGE_FAMILIES = re.compile(
    r"(lib)?(nvidia|cuda|cublas|cufft|curand|cusolver|cusparse|cufile|cudnn|cudadebugger|nvfatbin|nvjitlink"
    r"|nvjpeg|npp|nvptxcompiler|nvvm|nccl|nvsdm|xnvctrl|nvrtc|nvlsm)([-_0-9].*)?$"
    r"|nsight-|nvlsm|nvidia|infiniband-diags$|datacenter-gpu-manager|gpu-driver"
    r"|linux-(image|headers|modules)(-|$)|dkms$|xserver-xorg-video-(nvidia|nouveau)|firmware-nvidia"
    r"|unattended-upgrades$|needrestart$|cloud-init$|(rdma-core|mlnx-ofed|doca)"
)
LIBRARY_FAMILIES = re.compile(
    r"lib(cuda|cudart|cublas|cublasLt|cufft|curand|cusolver|cusparse|cudnn|cupti|cufile|nvrtc|nvrtc-builtins"
    r"|nvJitLink|nvjitlink|nvfatbin|nvjpeg|nppc|nccl|nvidia-ml|nvidia-ptxjitcompiler|nvidia-nvvm|nvvm"
    r"|nvToolsExt|nvtx3interop|cudadebugger)\.so(\.\d+)*$"
)
UNITS = (
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "nvidia-imex.service",
    "unattended-upgrades.service",
)
FILES = (
    "/etc/apt/sources.list.d/bringup-nvidia.sources",
    "/etc/apt/keyrings/bringup-nvidia.gpg",
    "/etc/apt/preferences.d/bringup-nvidia",
    "/etc/apt/apt.conf.d/52bringup-unattended-upgrades",
    "/etc/modprobe.d/bringup-nouveau.conf",
    "/etc/modules-load.d/bringup-fabric.conf",
    "/etc/ld.so.conf.d/00-bringup-cuda.conf",
    "/etc/bringup/service.env",
    HOME + "/bin/run",
)
SPACE = (
    HOME,
    "/usr/local",
    "/usr",
    "/var/cache/apt/archives",
    "/var/lib",
    "/lib/modules",
    "/boot",
    "/tmp",
    "/dev/shm",
    "/run",
)
MODULES = (
    "nvidia",
    "nvidia_uvm",
    "nvidia_modeset",
    "nvidia_drm",
    "nvidia_peermem",
    "nouveau",
    "ib_umad",
    "mlx5_core",
    "mlx5_ib",
)
VARIABLES = re.compile(
    r"(LD_LIBRARY_PATH|LD_PRELOAD|LD_AUDIT|CUDA_HOME|CUDA_PATH|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER"
    r"|CUDA_DISABLE_[A-Z_]+|FLASHINFER_\w+|TORCH_\w+|TRITON_\w+|NCCL_\w+|PYTHONPATH|PYTHONHOME"
    r"|(UV|PIP)_\w+)$"
)
SECRET_VARIABLES = re.compile(r"(UV|PIP)_|.*(TOKEN|PASSWORD|SECRET|KEY)")

BOOT_WORDS = re.compile(r"(amd_|intel_)?iommu|pci|nouveau|nvidia|rd\.driver|module_blacklist|modprobe|nomodule")

SECTIONS = {}
CHILDREN = {}


def section(function):
    """Register a function as the section of its name."""
    SECTIONS[function.__name__.lstrip("_")] = function
    return function


def child(function):
    """Register a function that names a command to start at once, beside everything else."""
    CHILDREN[function.__name__.lstrip("_")] = function
    return function


class Failure(Exception):
    """A section could not be looked at; the text goes into its ``error``."""


def clip(text, limit=TEXT_LIMIT):
    """Return text on one line and of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


class Child:
    """A command that runs beside the sections: no input, no locale, a time limit, and its group is ended."""

    def __init__(self, argv, path):
        self.argv = argv
        self.path = path
        self.status = None
        self.out = ""
        self.error = ""
        self.problem = None
        self.pid = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"PATH": self.path, "LC_ALL": "C", "HOME": "/", "SYSTEMD_PAGER": ""},
                start_new_session=True,
            )
        except OSError as error:
            self.problem = "%s: %s" % (self.argv[0], error.strerror)
            return
        self.pid = process.pid
        try:
            out, error = process.communicate(timeout=CHILD_LIMIT_S)
        except subprocess.TimeoutExpired:
            # Stopping what this probe itself started, and nothing else.
            try:
                os.killpg(process.pid, 9)
            except OSError:
                pass
            process.wait()
            process.stdout.close()
            process.stderr.close()
            self.problem = "%s: no answer within %d s" % (os.path.basename(self.argv[0]), CHILD_LIMIT_S)
            return
        self.status = process.returncode
        self.out = out.decode("utf-8", "replace")
        self.error = error.decode("utf-8", "replace")

    def wait(self):
        """Return self once the command ended; raise Failure when it could not run."""
        self._thread.join(CHILD_LIMIT_S + 2)
        if self.problem or self._thread.is_alive():
            raise Failure(self.problem or "%s: does not end" % self.argv[0])
        return self


class Host:
    """The host's files below ``root``, the parameters, and the children that were started."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.root = os.path.abspath(parameters.get("root") or "/")
        directories = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
        self.path = ":".join(self.at(name) for name in directories)
        self.children = {}
        self._dpkg = None

    def names(self, key):
        """Return a parameter that is a list of names."""
        value = self.parameters.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise Failure("parameter %s: wanted a list of strings" % key)
        return value

    def at(self, path):
        """Return where a path of the host lies for this process."""
        return path if self.root == "/" else self.root + path

    def start(self):
        """Start every registered command that this host has."""
        for name, command in CHILDREN.items():
            argv = command(self)
            if argv:
                self.children[name] = Child(argv, self.path)

    def result(self, name):
        """Return the finished child of that name, or None when the host does not have the command."""
        started = self.children.get(name)
        return started.wait() if started else None

    def which(self, name):
        """Return the full path of a command on the host, or None."""
        for directory in self.path.split(":"):
            path = os.path.join(directory, name)
            if os.access(path, os.X_OK) and not os.path.isdir(path):
                return path
        return None

    def bytes(self, path, limit=8 << 20):
        """Return a file's bytes, at most ``limit``.

        Read in pieces: the kernel answers "cannot allocate memory" to a large read below /proc/sys.
        """
        pieces, left = [], limit
        with open(self.at(path), "rb", buffering=0) as file:
            while left > 0:
                piece = file.read(min(left, 1 << 16))
                if not piece:
                    break
                pieces.append(piece)
                left -= len(piece)
        return b"".join(pieces)

    def text(self, path):
        """Return a file's text; raise OSError when it cannot be read."""
        return self.bytes(path).decode("utf-8", "replace")

    def read(self, path, default=None):
        """Return a file's text without the spaces around it, or ``default`` when it is not there."""
        try:
            return self.text(path).strip()
        except FileNotFoundError:
            return default
        except NotADirectoryError:
            return default

    def lines(self, path):
        """Yield (number, line) of a text file; nothing when it is not there."""
        text = self.read(path, "")
        for number, line in enumerate(text.splitlines(), 1):
            yield number, line

    def list(self, path):
        """Return the sorted names in a directory; an empty list when it is not there."""
        try:
            return sorted(os.listdir(self.at(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def glob(self, pattern):
        """Return the host's paths that match, in C order."""
        cut = 0 if self.root == "/" else len(self.root)
        return sorted(path[cut:] for path in glob.glob(self.at(pattern)))

    def exists(self, path):
        """Return whether the path is there (links followed)."""
        return os.path.exists(self.at(self.resolve(path)))

    def is_directory(self, path):
        """Return whether the path is a directory (links followed)."""
        return os.path.isdir(self.at(self.resolve(path)))

    def link(self, path):
        """Return a symbolic link's text, or None when the path is none."""
        try:
            return os.readlink(self.at(path))
        except OSError:
            return None

    def resolve(self, path):
        """Return the path with every symbolic link followed inside the host's root."""
        if self.root == "/":
            return os.path.realpath(path)
        done, todo, hops = "", [part for part in path.split("/") if part], 0
        while todo:
            part = todo.pop(0)
            if part == ".":
                continue
            if part == "..":
                done = os.path.dirname(done)
                continue
            target = self.link(done + "/" + part)
            if target is None or hops > 40:
                done += "/" + part
                continue
            hops += 1
            if target.startswith("/"):
                done = ""
            todo = [piece for piece in target.split("/") if piece] + todo
        return done or "/"

    def dpkg(self):
        """Return every stanza of dpkg's status file as (name, architecture, version, want, flag, state)."""
        if self._dpkg is None:
            self._dpkg = read_dpkg(self.text("/var/lib/dpkg/status"))
        return self._dpkg


_STANZA = re.compile(
    r"^Package: (?P<name>\S+)$|^Status: (?P<status>.+)$|^Version: (?P<version>\S+)$"
    r"|^Architecture: (?P<arch>\S+)$",
    re.M,
)


def read_dpkg(text):
    """Return (name, architecture, version, want, flag, state) for each package that dpkg knows."""
    packages = []
    for stanza in text.split("\n\n"):
        fields = {}
        for found in _STANZA.finditer(stanza):
            fields[found.lastgroup] = found.group(found.lastgroup)
        if "name" not in fields:
            continue
        status = (fields.get("status") or "").split()
        if len(status) != 3:
            raise Failure("dpkg status of %s: wanted three words, found %r" % (fields["name"], status))
        head = (fields["name"], fields.get("arch", ""), fields.get("version", ""))
        packages.append(head + tuple(status))
    return packages


# ---------------------------------------------------------------------------------------------------------
# Commands, started before the first section is looked at.


@child
def ldconfig(host):
    """Name the command that prints the loader's cache."""
    path = host.which("ldconfig")
    cache = host.at("/etc/ld.so.cache")
    return [path, "-p", "-C", cache] if path and os.path.exists(cache) else None


@child
def apt_config(host):
    """Name the command that prints apt's settings as apt reads them."""
    path = host.which("apt-config")
    return [path, "dump"] if path else None


@child
def units(host):
    """Name the command that shows the units of interest."""
    path = host.which("systemctl")
    if not path or not os.path.isdir(host.at("/run/systemd/system")):
        return None
    wanted = "Id,LoadState,ActiveState,SubState,UnitFileState,NeedDaemonReload,MainPID,FragmentPath"
    names = list(UNITS) + [name for name in host.names("units") if name not in UNITS]
    return [path, "show", "--property=" + wanted, "--", *names]


SMI_FIELDS = (
    "index,name,uuid,pci.bus_id,driver_version,compute_cap,memory.total,mig.mode.current,persistence_mode,"
    "ecc.mode.current,pcie.link.gen.max,pcie.link.width.max,fabric.state,fabric.status"
)
SMI_OLD_FIELDS = "index,name,uuid,pci.bus_id,driver_version,memory.total,mig.mode.current,persistence_mode"


@child
def smi(host):
    """Name the command that lists the GPUs as the driver sees them."""
    path = host.which("nvidia-smi")
    return [path, "--query-gpu=" + SMI_FIELDS, "--format=csv,noheader,nounits"] if path else None


@child
def smi_apps(host):
    """Name the command that lists the processes computing on the GPUs."""
    path = host.which("nvidia-smi")
    return [path, "--query-compute-apps=pid", "--format=csv,noheader,nounits"] if path else None


@child
def mokutil(host):
    """Name the command that tells the Secure Boot state where the firmware's variable is not readable."""
    path = host.which("mokutil")
    return [path, "--sb-state"] if path and secure_boot_variable(host) is None else None


# ---------------------------------------------------------------------------------------------------------
# The machine and its system.


@section
def _os(host):
    """Look at the distribution, the architecture and the C library."""
    fields = {}
    for _, line in host.lines("/etc/os-release"):
        name, equals, value = line.partition("=")
        if equals and not name.startswith("#"):
            fields[name.strip()] = value.strip().strip("\"'")
    if not fields.get("ID"):
        raise Failure("/etc/os-release names no distribution")
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        libc = None
    memory = re.search(r"MemTotal:\s+(\d+) kB", host.read("/proc/meminfo", ""))
    return {
        "id": fields["ID"],
        "id_like": fields.get("ID_LIKE", "").split(),
        "version_id": fields.get("VERSION_ID", ""),
        "codename": fields.get("VERSION_CODENAME", ""),
        "pretty_name": fields.get("PRETTY_NAME", ""),
        "machine": os.uname().machine,
        "libc": libc,
        "cpus": os.cpu_count() or 1,
        "memory_bytes": int(memory.group(1)) * 1024 if memory else None,
        "user_id": os.geteuid(),
    }


def version_key(text):
    """Return a key that sorts kernel releases the way their numbers count."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|[^\d.\-_+]+", text)]


def next_kernel(host, running):
    """Return (release, witness) of the kernel the next boot takes; release None where that is not certain."""
    images = [path.split("/boot/vmlinuz-", 1)[1] for path in host.glob("/boot/vmlinuz-*")]
    if not images:
        return running, "no kernel image below /boot: the running kernel is started from outside"
    menu = host.read("/boot/grub/grub.cfg", "")
    if menu:
        default = re.search(r'^\s*set default="([^"]*)"', menu, re.M)
        first = re.search(r"^\s*linux(?:efi)?\s+\S*/vmlinuz-(\S+)", menu, re.M)
        defaults = re.findall(r'^\s*set default="([^"]*)"', menu, re.M)
        if default and set(defaults) <= {"0", "${next_entry}", "${saved_entry}"} and first:
            saved = re.search(r"^(?:saved_entry|next_entry)=(.+)$", host.read("/boot/grub/grubenv", ""), re.M)
            if saved is None or saved.group(1).strip() in ("", "0"):
                return first.group(1), "/boot/grub/grub.cfg"
        return None, "/boot/grub/grub.cfg starts a saved or named entry"
    return max(images, key=version_key), "newest image below /boot"


def module_file(host, release, name):
    """Return the file modprobe takes for a module of a kernel release, by modules.dep; None when none."""
    directory = "/lib/modules/" + release
    pattern = re.compile(r"^(\S*/)?%s\.ko(\.(gz|xz|zst))?:" % name.replace("_", "[-_]"), re.M)
    found = pattern.search(host.read(directory + "/modules.dep", ""))
    if found:
        return directory + "/" + found.group(0)[:-1]
    return None


def module_info(host, path):
    """Return the tags of a module's .modinfo section; through modinfo where the file is compressed."""
    if path.endswith(".ko"):
        return elf_modinfo(host.at(path))
    command = host.which("modinfo")
    if not command:
        raise Failure("%s is compressed and there is no modinfo" % path)
    shown = Child([command, host.at(path)], host.path).wait()
    tags = {}
    for line in shown.out.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            tags.setdefault(name.strip(), value.strip())
    return tags


def elf_modinfo(path):
    """Return the tags in the .modinfo section of an ELF file; {} when it has none."""
    with open(path, "rb") as file:
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02":
            return {}
        order = "<" if head[5] == 1 else ">"
        offset = struct.unpack_from(order + "Q", head, 40)[0]
        size, count, names = struct.unpack_from(order + "HHH", head, 58)
        file.seek(offset)
        table = file.read(size * count)
        rows = [struct.unpack_from(order + "IIQQQQ", table, i * size) for i in range(count)]
        file.seek(rows[names][4])
        strings = file.read(rows[names][5])
        for row in rows:
            if strings[row[0] : strings.index(b"\0", row[0])] == b".modinfo":
                file.seek(row[4])
                body = file.read(min(row[5], 1 << 20))
                tags = {}
                for item in body.split(b"\0"):
                    name, equals, value = item.partition(b"=")
                    if equals:
                        tags.setdefault(name.decode("utf-8", "replace"), value.decode("utf-8", "replace"))
                return tags
    return {}


def flavour_of(license_text):
    """Return open or closed by the license tag of the kernel module; None when there is none."""
    if not license_text:
        return None
    return "closed" if license_text.strip() == "NVIDIA" else "open"


def is_signed(host, path):
    """Return whether a module file ends in a signature; None for a compressed file."""
    if not path.endswith(".ko"):
        return None
    with open(host.at(path), "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 28))
        return file.read().endswith(b"~Module signature appended~\n")


def mtime_s(host, path):
    """Return a file's modification time in seconds, or None when it is not there."""
    try:
        return os.stat(host.at(path)).st_mtime
    except OSError:
        return None


def kernel_entry(host, release):
    """Return what one installed kernel has: headers, the NVIDIA module, an initramfs."""
    module = None
    path = module_file(host, release, "nvidia")
    if path:
        tags = module_info(host, path)
        module = {
            "path": path,
            "version": tags.get("version"),
            "flavour": flavour_of(tags.get("license")),
            "signer": tags.get("signer"),
            "is_signed": bool(tags.get("signer")) or is_signed(host, path),
        }
    images = ["/boot/initrd.img-" + release, "/boot/initramfs-%s.img" % release]
    return {
        "release": release,
        "has_headers": host.exists("/lib/modules/%s/build/Makefile" % release),
        "has_nouveau": module_file(host, release, "nouveau") is not None,
        "nvidia": module,
        "initramfs_mtime_s": next((t for t in (mtime_s(host, image) for image in images) if t), None),
    }


def default_compiler(host):
    """Return the compiler a module would be built with, such as gcc 12, by the name that /usr/bin/gcc ends at."""
    found = re.search(r"gcc-(\d+)$", host.resolve("/usr/bin/gcc"))
    return "gcc %s" % found.group(1) if found and host.exists("/usr/bin/gcc") else None


@section
def kernel(host):
    """Look at the running kernel, the installed ones, and the one that boots next."""
    running = os.uname().release
    version = host.read("/proc/version", "")
    compiler = re.search(r"\b(gcc|clang)[^()]*?(?:\([^()]*\)\s*)?(\d+)\.\d+", version)
    releases = [name for name in host.list("/lib/modules") if host.exists("/lib/modules/%s" % name)]
    release, witness = next_kernel(host, running)
    tainted = host.read("/proc/sys/kernel/tainted")
    return {
        "release": running,
        "boot_id": host.read("/proc/sys/kernel/random/boot_id"),
        "command_line": [word for word in host.read("/proc/cmdline", "").split() if BOOT_WORDS.match(word)],
        "compiler": "%s %s" % (compiler.group(1), compiler.group(2)) if compiler else None,
        "default_compiler": default_compiler(host),
        "tainted": int(tainted) if tainted and tainted.isdigit() else None,
        "next_release": release,
        "next_witness": witness,
        "installed": [kernel_entry(host, name) for name in releases],
        "nouveau_conf_mtime_s": mtime_s(host, "/etc/modprobe.d/bringup-nouveau.conf"),
        "iommu_groups": len(host.list("/sys/kernel/iommu_groups")),
        "reboot_required": host.exists("/run/reboot-required") or host.exists("/var/run/reboot-required"),
    }


def secure_boot_variable(host):
    """Return the firmware's SecureBoot byte, or None when there is no such variable to read."""
    for path in host.glob("/sys/firmware/efi/efivars/SecureBoot-*"):
        try:
            return host.bytes(path)[4]
        except (OSError, IndexError):
            return None
    return None


@section
def secure_boot(host):
    """Look whether Secure Boot is on, and whether the key that dkms signs with is enrolled."""
    byte = secure_boot_variable(host)
    if byte is not None:
        enabled, witness = byte == 1, "SecureBoot variable"
    else:
        shown = host.result("mokutil")
        if shown and re.search(r"SecureBoot (enabled|disabled)", shown.out):
            enabled, witness = "SecureBoot enabled" in shown.out, "mokutil"
        elif not host.exists("/sys/firmware/efi"):
            enabled, witness = False, "no EFI firmware"
        else:
            enabled, witness = None, "EFI firmware, SecureBoot variable not readable"
    key, enrolled = None, None
    for path in ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub"):
        if host.exists(path):
            key = path
            break
    if enabled and key:
        command = host.which("mokutil")
        if command:
            shown = Child([command, "--test-key", host.at(key)], host.path).wait()
            enrolled = "is already enrolled" in shown.out + shown.error
    return {"is_enabled": enabled, "witness": witness, "signing_key": key, "is_key_enrolled": enrolled}


_WANT = {"unknown": "u", "install": "i", "hold": "h", "deinstall": "r", "purge": "p"}
_STATE = {
    "not-installed": "n",
    "config-files": "c",
    "half-installed": "H",
    "unpacked": "U",
    "half-configured": "F",
    "triggers-awaited": "W",
    "triggers-pending": "t",
    "installed": "i",
}


@section
def dpkg(host):
    """Look at the installed packages of the families of interest, and at every package that is not whole."""
    named = set(host.names("packages"))
    packages, broken = {}, []
    native = next((row[1] for row in host.dpkg() if row[0] == "dpkg"), None)
    for name, arch, version, want, flag, state in host.dpkg():
        status = _WANT.get(want, "?") + _STATE.get(state, "?") + ("R" if flag == "reinstreq" else "")
        key = name if arch in (native, "all", "") else "%s:%s" % (name, arch)
        if flag == "reinstreq" or state not in ("installed", "not-installed", "config-files"):
            broken.append({"name": key, "version": version, "status": status})
        if state == "not-installed" or not (name in named or PACKAGE_FAMILIES.match(name)):
            continue
        packages[key] = {"version": version, "status": status}
    return {
        "architecture": native,
        "packages": packages,
        "broken": broken,
        "is_interrupted": any(name.isdigit() for name in host.list("/var/lib/dpkg/updates")),
    }


def read_list_line(line):
    """Return a one-line apt source as a dict, or None for a comment or what apt itself would not take."""
    found = re.match(r"\s*(deb|deb-src)\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)((?:\s+[^#\s]+)*)", line)
    if not found:
        return None
    options = {}
    for item in (found.group(2) or "").split():
        name, equals, value = item.partition("=")
        if equals:
            options[name.rstrip("+-").lower()] = value
    return {
        "types": [found.group(1)],
        "uris": [without_credentials(found.group(3))],
        "suites": [found.group(4)],
        "components": found.group(5).split(),
        "signed_by": options.get("signed-by"),
        "is_trusted": options.get("trusted") == "yes",
    }


def without_credentials(url):
    """Return the URL without user name and password."""
    return re.sub(r"^([a-z0-9+.-]+://)[^/@]*@", r"\1", url, flags=re.I)


def read_deb822(text):
    """Yield (line number, fields) of each stanza; field names in lower case, continuation lines joined."""
    fields, start, last = {}, 0, None
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if not line.strip():
            if fields:
                yield start, fields
            fields, last = {}, None
        elif line.startswith("#"):
            continue
        elif line[0] in " \t":
            if last:
                fields[last] += "\n" + line.strip()
        else:
            name, colon, value = line.partition(":")
            if colon:
                if not fields:
                    start = number
                last = name.strip().lower()
                fields[last] = value.strip()


def apt_sources(host):
    """Return every active entry of sources.list and sources.list.d."""
    found = []
    for path in ["/etc/apt/sources.list", *host.glob("/etc/apt/sources.list.d/*.list")]:
        for number, line in host.lines(path):
            entry = read_list_line(line)
            if entry:
                found.append(dict(entry, file=path, line=number))
    for path in host.glob("/etc/apt/sources.list.d/*.sources"):
        for number, fields in read_deb822(host.read(path, "")):
            if fields.get("enabled", "yes").lower() in ("no", "false", "0"):
                continue
            signed_by = fields.get("signed-by")
            if signed_by and "BEGIN PGP" in signed_by:
                signed_by = "(key in the file)"
            found.append(
                {
                    "file": path,
                    "line": number,
                    "types": fields.get("types", "").split(),
                    "uris": [without_credentials(uri) for uri in fields.get("uris", "").split()],
                    "suites": fields.get("suites", "").split(),
                    "components": fields.get("components", "").split(),
                    "signed_by": signed_by,
                    "is_trusted": fields.get("trusted", "").lower() == "yes",
                }
            )
    return found


def apt_preferences(host):
    """Return every pin of /etc/apt/preferences and preferences.d."""
    found = []
    paths = ["/etc/apt/preferences"]
    for path in host.glob("/etc/apt/preferences.d/*"):
        # apt reads names without a dot, or that end in .pref.
        name = path.rsplit("/", 1)[1]
        if re.match(r"[\w-]+(\.pref)?$", name):
            paths.append(path)
    for path in paths:
        for number, fields in read_deb822(host.read(path, "")):
            priority = fields.get("pin-priority", "")
            if "package" in fields and re.match(r"-?\d+$", priority):
                found.append(
                    {
                        "file": path,
                        "line": number,
                        "package": clip(fields["package"]),
                        "pin": clip(fields.get("pin", "")),
                        "priority": int(priority),
                    }
                )
    return found


def fingerprints(data):
    """Return the fingerprints of the version 4 public keys in an OpenPGP keyring, binary or armoured."""
    if data.lstrip().startswith(b"-----BEGIN PGP"):
        blocks = []
        for block in re.findall(rb"-----BEGIN PGP[^\n]*\n(.*?)-----END PGP", data, re.S):
            body = re.split(rb"\r?\n\r?\n", block, maxsplit=1)[-1]
            lines = [line.strip() for line in body.splitlines() if line.strip() and not line.startswith(b"=")]
            blocks.append(base64.b64decode(b"".join(lines)))
        data = b"".join(blocks)
    found, at = [], 0
    while at < len(data):
        tag = data[at]
        if not tag & 0x80:
            raise Failure("not an OpenPGP keyring")
        at += 1
        if tag & 0x40:
            kind, first = tag & 0x3F, data[at]
            if first < 192:
                length, at = first, at + 1
            elif first < 224:
                length, at = ((first - 192) << 8) + data[at + 1] + 192, at + 2
            elif first == 255:
                length, at = struct.unpack(">I", data[at + 1 : at + 5])[0], at + 5
            else:
                raise Failure("OpenPGP packet of partial length")
        else:
            kind, width = (tag >> 2) & 0x0F, (1, 2, 4, 0)[tag & 3]
            if not width:
                raise Failure("OpenPGP packet of no length")
            length, at = int.from_bytes(data[at : at + width], "big"), at + width
        body = data[at : at + length]
        at += length
        if kind == 6 and body[:1] == b"\x04":
            digest = hashlib.sha1(b"\x99" + struct.pack(">H", len(body)) + body).hexdigest()
            found.append(digest.upper())
    return found


def apt_keys(host, sources):
    """Return {path: {"fingerprints": [...]} or {"error": ...}} of every key file that a source names."""
    paths = {"/etc/apt/keyrings/bringup-nvidia.gpg"}
    for source in sources:
        for path in (source["signed_by"] or "").replace(",", " ").split():
            if path.startswith("/"):
                paths.add(path)
    keys = {}
    for path in sorted(paths):
        try:
            keys[path] = {"fingerprints": fingerprints(host.bytes(path))}
        except FileNotFoundError:
            keys[path] = {"error": "absent"}
        except OSError as error:
            keys[path] = {"error": "not readable: %s" % error.strerror}
        except (Failure, ValueError, IndexError, struct.error) as error:
            keys[path] = {"error": "not a keyring: %s" % clip(str(error))}
    return keys


@section
def apt(host):
    """Look at apt's sources, keys, pins and the settings of unattended-upgrades; no index is read."""
    sources = apt_sources(host)
    shown = host.result("apt_config")
    if shown is None or shown.status != 0:
        raise Failure("apt-config dump: %s" % (clip(shown.error) if shown else "no such command"))
    settings = re.findall(r'^(\S+) "(.*)";$', shown.out, re.M)
    single = {name.lower(): value for name, value in settings}
    return {
        "sources": sources,
        "keys": apt_keys(host, sources),
        "preferences": apt_preferences(host),
        "blacklist": [
            value for name, value in settings if name.lower() == "unattended-upgrade::package-blacklist::" and value
        ],
        "is_unattended": single.get("apt::periodic::unattended-upgrade", "0") not in ("", "0"),
        "checks_dates": single.get("acquire::check-date", "true").lower() not in ("false", "no", "0"),
        "has_proxy": any(re.match(r"acquire::https?::proxy", name) and value for name, value in single.items()),
    }


# ---------------------------------------------------------------------------------------------------------
# The driver and the GPUs.


def loaded_driver(host):
    """Return version and flavour of the loaded kernel module, or None when none is loaded."""
    text = host.read("/proc/driver/nvidia/version", "")
    line = next((line for line in text.splitlines() if line.startswith("NVRM version")), None)
    bare = host.read("/sys/module/nvidia/version")
    if line:
        found = re.search(r"\s(\d{3}\.\d+(?:\.\d+)?)\s", line + " ")
        flavour = "open" if "Open Kernel Module" in line else "closed"
        version = found.group(1) if found else bare
        return {"version": version, "flavour": flavour, "witness": "/proc/driver/nvidia/version"}
    if bare:
        return {"version": bare, "flavour": None, "witness": "/sys/module/nvidia/version"}
    return None


def owned_files(host, pattern):
    """Return the driver packages' own paths that contain ``pattern``, also with the link /lib followed."""
    owned = set()
    for path in host.glob("/var/lib/dpkg/info/*.list"):
        if not re.match(r"(lib)?(nvidia|cuda)", path.rsplit("/", 1)[1]):
            continue
        for _, line in host.lines(path):
            if pattern in line:
                owned.add(line if line.startswith("/usr/") else "/usr" + line)
                owned.add(host.resolve(line))
    return owned


def user_space(host):
    """Return the copies of libcuda.so and nvidia-smi, and whether a package owns them."""
    found = {}
    directories = []
    for directory in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"):
        if host.is_directory(directory):
            directories.append(directory)
    owned = owned_files(host, "libcuda.so") | owned_files(host, "nvidia-smi")
    copies = []
    for directory in directories:
        for path in host.glob(directory + "/libcuda.so.*"):
            real = host.resolve(path)
            if real not in copies and re.search(r"\.so\.\d+\.\d+", real):
                copies.append(real)
    found["libcuda"] = [
        {"path": path, "version": path.rsplit(".so.", 1)[1], "is_packaged": path in owned} for path in copies
    ]
    command = host.which("nvidia-smi")
    if command:
        path = host.resolve(command if host.root == "/" else command[len(host.root) :])
        found["nvidia_smi"] = {"path": path, "is_packaged": path in owned}
    else:
        found["nvidia_smi"] = None
    return found


def nouveau_files(host):
    """Return the modprobe files that blacklist nouveau."""
    files = []
    for directory in ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d"):
        for path in host.glob(directory + "/*.conf"):
            if host.resolve(path) in [host.resolve(other) for other in files]:
                continue
            if any(re.match(r"\s*blacklist\s+nouveau\b", line) for _, line in host.lines(path)):
                files.append(path)
    return files


def dkms_entries(host):
    """Return what dkms knows of the NVIDIA module: version, kernel, and whether it is built and installed."""
    entries = []
    for version in host.list("/var/lib/dkms/nvidia"):
        if version.startswith("kernel-") or not host.is_directory("/var/lib/dkms/nvidia/" + version):
            continue
        built = host.glob("/var/lib/dkms/nvidia/%s/*/*/module" % version)
        for path in built:
            entries.append({"version": version, "kernel": path.split("/")[6], "is_built": True})
        if not built:
            entries.append({"version": version, "kernel": None, "is_built": False})
    return entries


@section
def driver(host):
    """Look at the loaded driver, what lies on disk, nouveau, and what a runfile left behind."""
    command_line = host.read("/proc/cmdline", "")
    shown = None
    failure = None
    try:
        shown = host.result("smi")
    except Failure as error:
        failure = str(error)
    message = None
    if shown and shown.status != 0:
        message = clip((shown.out.strip() or shown.error.strip()) or "no message")
    found = user_space(host)
    return {
        "loaded": loaded_driver(host),
        "modules": [name for name in MODULES if os.path.isdir(host.at("/sys/module/" + name))],
        "libcuda": found["libcuda"],
        "nvidia_smi": found["nvidia_smi"],
        "smi_status": shown.status if shown else None,
        "smi_message": failure or message,
        "nouveau_blacklist": nouveau_files(host),
        "is_nouveau_off_at_boot": bool(
            re.search(r"\b(nouveau\.blacklist=1|(rd\.driver|module_)\.?blacklist=\S*nouveau)", command_line)
        ),
        "runfile": [
            path
            for path in (
                "/usr/bin/nvidia-uninstall",
                "/usr/bin/nvidia-installer",
                "/var/log/nvidia-installer.log",
            )
            if host.exists(path)
        ],
        "dkms": dkms_entries(host),
        "has_firmware": bool(host.glob("/lib/firmware/nvidia/[0-9]*")),
    }


def pci_devices(host):
    """Return the NVIDIA functions on the PCI bus with their class."""
    directory = "/sys/bus/pci/devices"
    names = host.list(directory)
    if not names and not os.path.isdir(host.at(directory)):
        raise Failure("%s is not there" % directory)
    found = []
    for name in names:
        base = directory + "/" + name
        if host.read(base + "/vendor") != "0x10de":
            continue
        bound = host.link(base + "/driver")
        numa = host.read(base + "/numa_node")
        found.append(
            {
                "address": name,
                "device_id": (host.read(base + "/device") or "").replace("0x", ""),
                "class_id": (host.read(base + "/class") or "").replace("0x", "")[:4],
                "bound_to": os.path.basename(bound) if bound else None,
                "numa_node": int(numa) if numa and re.match(r"-?\d+$", numa) else None,
            }
        )
    return found


def bus_address(text):
    """Return a bus id of nvidia-smi (00000000:06:00.0) in the kernel's form (0000:06:00.0)."""
    found = re.match(r"(?:[0-9a-f]*([0-9a-f]{4}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])$", text.strip().lower())
    return "%s:%s" % (found.group(1) or "0000", found.group(2)) if found else text.strip().lower()


def number(text):
    """Return an integer, or None for N/A."""
    return int(text) if re.match(r"\d+$", text.strip()) else None


def word(text):
    """Return the text, or None for N/A."""
    text = text.strip()
    return None if text in ("", "N/A", "[N/A]", "[Not Supported]") else text


def smi_rows(host):
    """Return the GPUs as nvidia-smi lists them; None when the host has no nvidia-smi or no working driver."""
    shown = host.result("smi")
    fields = SMI_FIELDS.split(",")
    if shown is not None and shown.status != 0 and "not a valid field" in shown.out + shown.error:
        # An older nvidia-smi refuses the whole question for one field it does not know.
        fields = SMI_OLD_FIELDS.split(",")
        argv = [shown.argv[0], "--query-gpu=" + SMI_OLD_FIELDS, "--format=csv,noheader,nounits"]
        shown = Child(argv, host.path).wait()
    if shown is None or shown.status != 0:
        return None
    rows = []
    for line in shown.out.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(fields) or not cells[0].isdigit():
            continue
        row = {name: cells[at] for at, name in enumerate(fields)}
        memory = number(row["memory.total"])
        rows.append(
            {
                "index": int(row["index"]),
                "name": row["name"],
                "uuid": row["uuid"],
                "address": bus_address(row["pci.bus_id"]),
                "driver_version": row["driver_version"],
                "compute_capability": word(row.get("compute_cap", "")),
                "memory_bytes": memory * 1024 * 1024 if memory is not None else None,
                "mig_mode": word(row["mig.mode.current"]),
                "is_persistent": row["persistence_mode"] == "Enabled",
                "ecc_mode": word(row.get("ecc.mode.current", "")),
                "pcie_generation_max": number(row.get("pcie.link.gen.max", "")),
                "pcie_width_max": number(row.get("pcie.link.width.max", "")),
                "fabric_state": word(row.get("fabric.state", "")),
                "fabric_status": word(row.get("fabric.status", "")),
            }
        )
    return rows


@section
def gpus(host):
    """Look at the GPUs twice: on the PCI bus, and as the driver lists them (null: it did not answer)."""
    functions = pci_devices(host)
    return {
        "pci": [item for item in functions if item["class_id"] in ("0300", "0302")],
        "switches": [item for item in functions if item["class_id"] == "0680"],
        "listed": smi_rows(host),
    }


@section
def fabric(host):
    """Look at the NVSwitch fabric: switches, the management functions of NVLink 5, and ib_umad."""
    managed, devices = [], host.list("/sys/class/infiniband")
    for name in devices:
        try:
            if b"SW_MNG" in host.bytes("/sys/class/infiniband/%s/device/vpd" % name, 4096):
                managed.append(name)
        except OSError:
            continue
    loads = []
    for directory in ("/etc/modules-load.d", "/usr/lib/modules-load.d", "/run/modules-load.d"):
        for path in host.glob(directory + "/*.conf"):
            if any(line.strip() == "ib_umad" for _, line in host.lines(path)):
                loads.append(path)
    return {
        "switches": len(host.list("/proc/driver/nvidia-nvswitch/devices")),
        "infiniband": devices,
        "switch_management": managed,
        "is_ib_umad_loaded": os.path.isdir(host.at("/sys/module/ib_umad")),
        "ib_umad_files": loads,
    }


# ---------------------------------------------------------------------------------------------------------
# Toolkits and the loader.


def alternatives(host):
    """Return update-alternatives' record of the cuda links: mode, link, present target, choices."""
    found = {}
    for path in host.glob("/var/lib/dpkg/alternatives/cuda*"):
        name = path.rsplit("/", 1)[1]
        lines = host.text(path).split("\n")
        if len(lines) < 3:
            raise Failure("%s: wanted at least three lines" % path)
        mode, link, at = lines[0], lines[1], 2
        slaves = 0
        # Name and link of each follower up to an empty line; then path, priority, one line a follower.
        while at + 1 < len(lines) and lines[at]:
            slaves += 1
            at += 2
        at += 1
        choices = {}
        while at + 1 < len(lines) and lines[at]:
            choices[lines[at]] = int(lines[at + 1])
            at += 2 + slaves
        found[name] = {
            "mode": mode,
            "link": link,
            "link_target": host.link(link),
            "target": host.link("/etc/alternatives/" + name),
            "choices": choices,
        }
    return found


@section
def toolkits(host):
    """Look at the CUDA toolkits below /usr/local, the links that move, and the distribution's own."""
    found = {}
    for path in host.glob("/usr/local/cuda-*.*"):
        version = path.rsplit("cuda-", 1)[1]
        if not re.match(r"\d+\.\d+$", version) or not host.is_directory(path):
            continue
        libraries = [name for name in host.glob(path + "/targets/*/lib/libnvrtc*.so.*") if not host.link(name)]
        try:
            release = json.loads(host.read(path + "/version.json", "null"))
            release = release["cuda"]["version"] if release else None
        except (ValueError, KeyError, TypeError):
            release = None
        found[version] = {
            "path": path,
            "release": release if isinstance(release, str) else None,
            "has_nvcc": host.exists(path + "/bin/nvcc"),
            "nvrtc": [os.path.basename(name) for name in libraries],
            "targets": host.list(path + "/targets"),
        }
    links = {}
    for path in host.glob("/usr/local/cuda*"):
        if host.link(path) is not None:
            target = host.resolve(path)
            links[path] = {"target": host.link(path), "resolved": target, "exists": host.exists(path)}
    system = [path for path in ("/usr/bin/nvcc", "/usr/lib/cuda") if host.exists(path)]
    return {"installed": found, "links": links, "alternatives": alternatives(host), "system": system}


def loader_directories(host, path, depth=0):
    """Return the directories that a loader configuration names, in the order ldconfig reads them."""
    found = []
    for number, line in host.lines(path):
        line = line.split("#", 1)[0].strip()
        if not line or line.startswith("hwcap"):
            continue
        include = re.match(r"include\s+(.+)$", line)
        if include:
            for pattern in include.group(1).split():
                if not pattern.startswith("/"):
                    pattern = os.path.dirname(path) + "/" + pattern
                for name in host.glob(pattern) if depth < 8 else []:
                    found.extend(loader_directories(host, name, depth + 1))
            continue
        for directory in re.split(r"[\s:,]+", line):
            directory = directory.split("=", 1)[0]
            if directory:
                found.append(
                    {
                        "file": path,
                        "line": number,
                        "directory": directory,
                        "resolved": host.resolve(directory),
                        "exists": host.is_directory(directory),
                    }
                )
    return found


@section
def loader(host):
    """Look at the loader's configuration and cache: every hit of a SONAME, the winning one first."""
    named = set(host.names("sonames"))
    shown = host.result("ldconfig")
    if shown is None:
        raise Failure("no ldconfig, or no /etc/ld.so.cache")
    if shown.status != 0:
        raise Failure("ldconfig -p: %s" % clip(shown.error))
    wanted = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(os.uname().machine, "")
    hits, total = {}, 0
    for line in shown.out.splitlines():
        found = re.match(r"\s+(\S+) \(([^)]*)\) => (\S+)$", line)
        if not found:
            continue
        total += 1
        soname, kind, path = found.groups()
        if wanted and wanted not in kind:
            continue
        if soname in named or LIBRARY_FAMILIES.match(soname):
            entry = {"path": path, "resolved": host.resolve(path), "exists": host.exists(path)}
            hits.setdefault(soname, []).append(entry)
    if not total:
        raise Failure("ldconfig -p: wanted lines such as 'libc.so.6 (libc6,x86-64) => /lib/libc.so.6'")
    preload = host.read("/etc/ld.so.preload", "")
    configured = ["/etc/ld.so.conf", *host.glob("/etc/ld.so.conf.d/*.conf")]
    times = [t for t in (mtime_s(host, path) for path in configured) if t]
    cache = mtime_s(host, "/etc/ld.so.cache")
    return {
        "directories": loader_directories(host, "/etc/ld.so.conf"),
        "hits": hits,
        "preload": re.sub(r"#.*", "", preload).replace(":", " ").split(),
        "is_cache_older": bool(cache and times and max(times) > cache),
    }


# ---------------------------------------------------------------------------------------------------------
# Python, environments and processes.


@section
def python(host):
    """Look at the Python interpreters the system offers, by minor version."""
    found = {}
    for directory in ("/usr/local/bin", "/usr/bin"):
        for name in host.list(directory):
            match = re.match(r"python(3\.\d+)$", name)
            if match and match.group(1) not in found:
                path = directory + "/" + name
                if os.access(host.at(host.resolve(path)), os.X_OK):
                    found[match.group(1)] = {
                        "path": path,
                        "has_headers": bool(
                            host.glob("/usr/include/python%s*/Python.h" % match.group(1))
                            or host.glob("/usr/local/include/python%s*/Python.h" % match.group(1))
                        ),
                        "has_ensurepip": bool(
                            host.glob("/usr/lib/python%s/ensurepip" % match.group(1))
                            or host.glob("/usr/local/lib/python%s/ensurepip" % match.group(1))
                        ),
                    }
    return {"interpreters": found, "probe": "%d.%d.%d" % sys.version_info[:3]}


def canonical(name):
    """Return the name of a distribution in its one spelling."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_record(text):
    """Yield (path, hash) of each line of a RECORD file."""
    if '"' in text:
        for row in csv.reader(io.StringIO(text, newline="")):
            if row:
                yield row[0], row[1] if len(row) > 1 else ""
        return
    for line in text.split("\n"):
        cells = line.rstrip("\r").rsplit(",", 2)
        if cells[0]:
            yield cells[0], cells[1] if len(cells) == 3 else ""


def file_hash(path):
    """Return the hash of a file as RECORD spells it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def fingerprint(site, dist_info, deep):
    """Return (fingerprint, first path components, paths unlike their RECORD hash) of one distribution.

    The fingerprint covers path, size and modification time of every file that RECORD names, byte code left
    out: it is written anew whenever the interpreter feels like it. None where there is no RECORD.
    """
    try:
        path = os.path.join(site, dist_info, "RECORD")
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            text = file.read()
    except OSError:
        return None, set(), []
    lines, tops, unlike = [], set(), []
    for path, recorded in read_record(text):
        if path.endswith(".pyc") or "__pycache__" in path:
            continue
        tops.add(path.split("/", 1)[0])
        full = site + "/" + path
        try:
            seen = os.stat(full)
        except OSError:
            lines.append(path + "\0-")
            unlike.append(path)
            continue
        lines.append("%s\0%d\0%d" % (path, seen.st_size, seen.st_mtime_ns))
        if deep and recorded.startswith("sha256=") and file_hash(full) != recorded:
            unlike.append(path)
    lines.sort()
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    return digest[:32], tops, unlike


def inspect_site(site, deep):
    """Return a site-packages directory's distributions, their fingerprints, and what belongs to none."""
    names = os.listdir(site)
    versions, prints, unlike, owned = {}, {}, {}, set()
    for name in sorted(names):
        if not name.endswith(".dist-info"):
            continue
        owned.add(name)
        project, dash, version = name[: -len(".dist-info")].rpartition("-")
        if not dash:
            continue
        key = canonical(project)
        digest, tops, paths = fingerprint(site, name, deep)
        owned |= tops
        if key in versions:
            # Two versions of one distribution: half of an installation that was broken off.
            versions[key] += " and " + version
            prints[key] = None
        else:
            versions[key], prints[key] = version, digest
        if paths:
            unlike[key] = [clip(path, 120) for path in paths[:3]]
    ignored = {"__pycache__", "_virtualenv.py", "_virtualenv.pth"}
    strays = sorted(set(names) - owned - ignored)
    return versions, prints, unlike, strays


def site_of(prefix):
    """Return the site-packages directory of an environment or interpreter prefix, or None."""
    for pattern in ("lib/python3.*/site-packages", "lib64/python3.*/site-packages"):
        found = sorted(glob.glob(os.path.join(prefix, pattern)))
        if found:
            return found[-1]
    return None


def read_json(host, path, limit=1 << 20):
    """Return a JSON document, or None when the file is not there."""
    try:
        data = host.bytes(path, limit + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(data) > limit:
        raise Failure("%s is larger than %d bytes" % (path, limit))
    try:
        return json.loads(data.decode("utf-8"))
    except ValueError as error:
        raise Failure("%s: %s" % (path, error)) from None


def inspect_environment(host, path, deep):
    """Return what one environment holds and how it differs from what its marker says."""
    prefix = host.at(host.resolve(path))
    site = site_of(prefix)
    interpreter = os.path.join(prefix, "bin", "python")
    shown = {
        "path": path,
        "resolved": host.resolve(path),
        "python": None,
        "has_interpreter": os.access(os.path.realpath(interpreter), os.X_OK),
        "distributions": {},
        "fingerprints": {},
        "changed": [],
        "unlike_record": {},
        "strays": [],
    }
    if site is None:
        return shown
    shown["python"] = os.path.basename(os.path.dirname(site)).replace("python", "")
    versions, prints, unlike, strays = inspect_site(site, deep)
    marker = read_json(host, host.resolve(path) + "/" + MARKER)
    recorded = marker.get("files_fingerprint") if isinstance(marker, dict) else None
    if isinstance(recorded, dict):
        known = marker.get("distributions") or {}
        shown["changed"] = sorted(
            name
            for name, digest in recorded.items()
            if name in prints and prints[name] != digest and known.get(name) == versions[name]
        )
    shown["distributions"] = versions
    shown["fingerprints"] = prints
    shown["unlike_record"] = unlike
    shown["strays"] = strays
    return shown


def environment_entry(host, name):
    """Return what the marker of one environment directory says."""
    path = ENVS + "/" + name
    try:
        marker = read_json(host, path + "/" + MARKER)
    except (Failure, OSError):
        marker = None
    marker = marker if isinstance(marker, dict) else {}
    digest, generation, version = marker.get("digest"), marker.get("generation"), marker.get("python")
    return {
        "name": name,
        "is_complete": isinstance(digest, str) and isinstance(generation, int),
        "digest": digest if isinstance(digest, str) else None,
        "generation": generation if isinstance(generation, int) else None,
        "python": version if isinstance(version, str) else None,
        "is_tainted": host.exists(path + "/" + TAINT),
    }


@section
def environment(host):
    """Look at the environments bringup built, which of them serves, and how it differs from its marker."""
    deep = bool(host.parameters.get("deep"))
    current = host.link(HOME + "/current")
    resolved = host.resolve(HOME + "/current") if current else None
    inspected = []
    if resolved and host.is_directory(resolved):
        inspected.append(inspect_environment(host, resolved, deep))
    for path in host.names("environments"):
        if host.resolve(path) != resolved and host.is_directory(path):
            inspected.append(inspect_environment(host, path, deep))
    return {
        "current": resolved,
        "is_current_whole": bool(resolved and host.exists(resolved + "/" + MARKER)),
        "environments": [
            environment_entry(host, name) for name in host.list(ENVS) if host.is_directory(ENVS + "/" + name)
        ],
        "inspected": inspected,
        "is_deep": deep,
    }


def ancestors():
    """Return the process ids from this process up to the first one."""
    found, pid = set(), os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            with open("/proc/%d/stat" % pid) as file:
                pid = int(file.read().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def process_bytes(pid, name):
    """Return a file of a process, or nothing when the process is gone or not ours to read."""
    try:
        with open("/proc/%s/%s" % (pid, name), "rb") as file:
            return file.read()
    except OSError:
        return b""


def process_link(pid, name):
    """Return a link of a process, or an empty text."""
    try:
        return os.readlink("/proc/%s/%s" % (pid, name))
    except OSError:
        return ""


def gpu_devices(pid):
    """Return the GPU device files that a process holds open."""
    found = set()
    try:
        descriptors = os.listdir("/proc/%s/fd" % pid)
    except OSError:
        return found
    for descriptor in descriptors:
        target = process_link(pid, "fd/" + descriptor)
        if re.match(r"/dev/nvidia(\d+|-uvm|ctl)", target):
            found.add(target.split(" ", 1)[0])
    return found


def used_environments(pid):
    """Return {environment name: [witness, ...]} for a process."""
    seen = {}
    prefix = (ENVS + "/").encode()
    pattern = re.compile(re.escape(prefix) + rb"([A-Za-z0-9_.-]+)")
    for witness, data in (
        ("cmdline", process_bytes(pid, "cmdline")),
        ("environ", process_bytes(pid, "environ")),
        ("cwd", process_link(pid, "cwd").encode("utf-8", "surrogateescape")),
        ("maps", process_bytes(pid, "maps")),
    ):
        if prefix not in data:
            continue
        if witness == "cmdline":
            # The parameters of a probe name environments too; only an argument that is such a path counts.
            data = b"\0".join(part for part in data.split(b"\0") if part.startswith(prefix))
        for name in pattern.findall(data):
            witnesses = seen.setdefault(name.decode(), [])
            if witness not in witnesses:
                witnesses.append(witness)
    return seen


def process_unit(pid):
    """Return the systemd unit a process belongs to, or None."""
    for line in process_bytes(pid, "cgroup").decode("utf-8", "replace").splitlines():
        found = re.search(r"/([^/]+\.service)(?:/|$)", line)
        if found:
            return found.group(1)
    return None


def entry_of(pid):
    """Return what names a process without showing its arguments, which may hold secrets."""
    try:
        owner = os.stat("/proc/%s" % pid).st_uid
    except OSError:
        owner = None
    command = process_bytes(pid, "comm").decode("utf-8", "replace").strip()
    return {"pid": int(pid), "command": clip(command, 40), "user_id": owner, "unit": process_unit(pid)}


@section
def processes(host):
    """Look at which processes use a GPU and which run from an environment."""
    mine = ancestors() | {job.pid for job in host.children.values() if job.pid}
    # nvidia-smi itself opens the devices: its two questions must be over before anybody is counted.
    gone = {}
    for name in ("smi", "smi_apps"):
        try:
            gone[name] = host.result(name)
        except Failure:
            gone[name] = None
    apps = gone["smi_apps"]
    listed = set(re.findall(r"^\s*(\d+)\s*$", apps.out, re.M)) if apps and apps.status == 0 else set()
    gpu_users, environment_users = [], []
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) in mine or not process_link(pid, "exe"):
            continue
        devices = gpu_devices(pid)
        if devices or pid in listed:
            gpu_users.append(dict(entry_of(pid), devices=sorted(devices), is_computing=pid in listed))
        for name, witnesses in sorted(used_environments(pid).items()):
            environment_users.append(dict(entry_of(pid), environment=name, witnesses=witnesses))
    seen = {str(item["pid"]) for item in gpu_users}
    for pid in sorted(listed - seen):
        gpu_users.append(
            {
                "pid": int(pid),
                "command": "",
                "user_id": None,
                "unit": None,
                "devices": [],
                "is_computing": True,
            }
        )
    key = "pid"
    return {
        "gpu": sorted(gpu_users, key=lambda item: item[key]),
        "environment": sorted(environment_users, key=lambda item: (item[key], item["environment"])),
    }


# ---------------------------------------------------------------------------------------------------------
# Space, time, records, locks, services.


@section
def space(host):
    """Look at the free space, inodes and mount options where something will be written."""
    found = {}
    for path in list(SPACE) + host.names("space"):
        where = host.resolve(path)
        while not os.path.isdir(host.at(where)) and where != "/":
            where = os.path.dirname(where)
        free = os.statvfs(host.at(where))
        found[path] = {
            "exists": host.is_directory(path),
            "device": os.stat(host.at(where)).st_dev,
            "total_bytes": free.f_blocks * free.f_frsize,
            "free_bytes": free.f_bavail * free.f_frsize,
            # A file system that makes inodes as it needs them says 0 of 0.
            "free_inodes": free.f_favail if free.f_files else None,
            "is_noexec": bool(free.f_flag & os.ST_NOEXEC),
            "is_readonly": bool(free.f_flag & os.ST_RDONLY),
        }
    return found


@section
def _time(host):
    """Look at the clock, and whether something keeps it."""
    keeper = None
    if host.exists("/run/systemd/timesync/synchronized"):
        keeper = "systemd-timesyncd"
    for path, name in (("/run/chrony/chronyd.pid", "chrony"), ("/run/ntpd.pid", "ntpd")):
        if host.exists(path):
            keeper = name
    return {"started_s": STARTED, "answered_s": time.time(), "keeper": keeper}


@section
def verification(host):
    """Read the record of the last verify; null when there is none."""
    return record(host, STATE + "/verification.json")


@section
def pin(host):
    """Read the pin that a rollback left; null when there is none."""
    return record(host, STATE + "/pin.json")


@section
def assigned(host):
    """Read which stack was assigned to this host; null when none was."""
    return record(host, STATE + "/assigned.json")


def record(host, path):
    """Return a record of bringup's own, or None."""
    value = read_json(host, path)
    if value is not None and not isinstance(value, dict):
        raise Failure("%s: wanted a JSON object" % path)
    return value


def posix_lock_holder(path):
    """Return the id of the process that holds a POSIX lock on a file; None when nobody does.

    F_GETLK only asks: nothing is locked by looking.
    """
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        # struct flock of 64-bit Linux: type, whence, start, length, pid.
        question = struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi", fcntl.fcntl(file.fileno(), fcntl.F_GETLK, question))
    return None if kind == fcntl.F_UNLCK else pid


def flock_holder(path):
    """Return the id of the process that holds a flock on a file, from the kernel's list; None when nobody."""
    try:
        seen = os.stat(path)
        with open("/proc/locks") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    wanted = "%02x:%02x:%d" % (os.major(seen.st_dev), os.minor(seen.st_dev), seen.st_ino)
    for line in lines:
        cells = line.split()
        if "FLOCK" in cells and "->" not in cells and wanted in cells:
            return int(cells[4])
    return None


def our_lock(host, name):
    """Return the holder of one of bringup's own locks and what it wrote about itself."""
    path = RUN + "/" + name
    holder = flock_holder(host.at(path))
    try:
        note = read_json(host, path, 4096)
    except (Failure, OSError):
        note = None
    return {"holder_pid": holder, "note": note if isinstance(note, dict) else None}


@section
def locks(host):
    """Look at who holds apt's and dpkg's locks and bringup's own."""
    names = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock")
    held = {}
    for path in (*names, "/var/cache/apt/archives/lock"):
        pid = posix_lock_holder(host.at(path))
        if pid is not None:
            command = process_bytes(pid, "comm").decode("utf-8", "replace").strip()
            held[path] = {"pid": pid, "command": clip(command, 40)}
    try:
        reservation = read_json(host, RUN + "/reservation.json", 4096)
    except Failure:
        reservation = None
    return {
        "apt": held,
        "run": our_lock(host, "run.lock"),
        "work": our_lock(host, "work.lock"),
        "reservation": reservation if isinstance(reservation, dict) else None,
    }


@section
def services(host):
    """Look at the systemd units of interest; a unit that does not exist says load = not-found."""
    shown = host.result("units")
    if shown is None:
        raise Failure("systemd is not running")
    if shown.status != 0:
        raise Failure("systemctl show: %s" % clip(shown.error))
    found = {}
    for block in shown.out.strip().split("\n\n"):
        fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if fields.get("Id"):
            pid = fields.get("MainPID", "0")
            found[fields["Id"]] = {
                "load": fields.get("LoadState", ""),
                "active": fields.get("ActiveState", ""),
                "sub": fields.get("SubState", ""),
                "enabled": fields.get("UnitFileState", ""),
                "needs_reload": fields.get("NeedDaemonReload") == "yes",
                "main_pid": int(pid) if pid.isdigit() and pid != "0" else None,
            }
    return found


def variable_lines(host, path):
    """Yield (line number, name, value) of every variable that a file sets, in any of the usual spellings."""
    for number, line in host.lines(path):
        line = line.strip()
        if line.startswith("#"):
            continue
        for name, value in re.findall(r"(?:^|[\s;\"'=])([A-Z][A-Z0-9_]+)\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s\"';]*)", line):
            yield number, name, value.strip("\"'")
        match = re.match(r"([A-Z][A-Z0-9_]+)\s+(?:DEFAULT|OVERRIDE)=(\S+)", line)
        if match:
            yield number, match.group(1), match.group(2)


@section
def env_files(host):
    """Look where variables are set that change which libraries, kernels or settings a process takes."""
    paths = [
        "/etc/environment",
        "/etc/profile",
        "/etc/bash.bashrc",
        "/etc/security/pam_env.conf",
        "/etc/nccl.conf",
    ]
    for pattern in (
        "/etc/profile.d/*.sh",
        "/etc/environment.d/*.conf",
        "/etc/systemd/system.conf",
        "/etc/systemd/system.conf.d/*.conf",
        "/etc/systemd/system/*.service",
        "/etc/systemd/system/*.service.d/*.conf",
        "/etc/default/nvidia*",
        "/root/.bashrc",
        "/root/.profile",
        "/root/.bash_profile",
        "/root/.nccl.conf",
        "/home/*/.bashrc",
        "/home/*/.profile",
        "/home/*/.bash_profile",
        "/home/*/.nccl.conf",
    ):
        paths.extend(host.glob(pattern))
    found = []
    for path in paths:
        try:
            for number, name, value in variable_lines(host, path):
                if VARIABLES.match(name):
                    shown = None if SECRET_VARIABLES.match(name) else clip(value)
                    found.append({"file": path, "line": number, "name": name, "value": shown})
        except (OSError, UnicodeError):
            continue
    return found[:200]


@section
def files(host):
    """Look at bringup's own files by hash and mode; null for one that is not there."""
    found = {}
    for path in list(FILES) + host.names("files"):
        try:
            seen = os.stat(host.at(path))
            if not stat.S_ISREG(seen.st_mode):
                found[path] = {
                    "sha256": None,
                    "size_bytes": 0,
                    "mode": stat.S_IMODE(seen.st_mode),
                    "user_id": seen.st_uid,
                }
                continue
            digest = hashlib.sha256(host.bytes(path)).hexdigest()
        except (FileNotFoundError, NotADirectoryError):
            found[path] = None
            continue
        found[path] = {
            "sha256": digest,
            "size_bytes": seen.st_size,
            "mode": stat.S_IMODE(seen.st_mode),
            "user_id": seen.st_uid,
        }
    return found


@section
def cloud_init(host):
    """Look whether cloud-init is still at work: absent, disabled, running or done."""
    if host.exists("/run/cloud-init/result.json"):
        return {"state": "done"}
    if host.exists("/run/cloud-init/disabled") or host.exists("/etc/cloud/cloud-init.disabled"):
        return {"state": "disabled"}
    if host.exists("/run/cloud-init/enabled") or host.exists("/run/cloud-init/status.json"):
        return {"state": "running"}
    return {"state": "absent"}


@section
def simulated(host):
    """Say what of this host is simulated; an empty list everywhere but on a rehearsal host."""
    marker = read_json(host, LAB_MARKER, 4096)
    if marker is None:
        return []
    names = marker.get("simulated") if isinstance(marker, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Failure("%s: wanted a list under simulated" % LAB_MARKER)
    return names


# ---------------------------------------------------------------------------------------------------------


# What waits for a slow command comes last, so that reading files fills the time.
LAST = ("apt", "loader", "secure_boot", "services", "driver", "gpus", "processes", "time")


def read_parameters(text):
    """Return the parameters; raise Failure when they are no JSON object."""
    parameters = json.loads(text or "{}")
    if isinstance(parameters, dict):
        return parameters
    raise Failure("wanted a JSON object")


def answer(parameters):
    """Return the whole answer for these parameters."""
    host = Host(parameters)
    only = host.names("only") or list(SECTIONS)
    names = [name for name in SECTIONS if name in only and name not in LAST]
    names += [name for name in LAST if name in only]
    needed = {"apt", "loader", "secure_boot", "services", "driver", "gpus", "processes"}
    if needed & set(names):
        host.start()
    document = {"schema": SCHEMA}
    seconds = {}
    for name in names:
        began = time.time()
        try:
            document[name] = SECTIONS[name](host)
        except Failure as error:
            document[name] = {"error": clip(str(error))}
        except OSError as error:
            document[name] = {"error": clip("%s: %s" % (error.filename or "host", error.strerror))}
        except Exception as error:  # a section that breaks must not hide the others
            document[name] = {"error": clip("%s: %s" % (type(error).__name__, error))}
        seconds[name] = round(time.time() - began, 4)
    document["seconds"] = dict(seconds, total=round(time.time() - STARTED, 4))
    return document


def main(argv):
    """Print the answer; return 2 when the parameters cannot be read."""
    text = argv[1] if len(argv) > 1 else "{}"
    if text == "-":
        text = sys.stdin.readline()
    try:
        document = answer(read_parameters(text))
    except (ValueError, Failure) as error:
        sys.stderr.write("host_probe: parameters: %s\n" % error)
        return 2
    sys.stdout.write(json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
