#!/usr/bin/env python3
"""Look at an installed inference stack the way a service will meet it, and report in one JSON document.

Usage:
  stack_check.py [--python PATH] [--import MODULE]... [--soname SONAME]... [--distribution NAME]...
                 [--nvrtc TOOLKIT=SONAME-OR-PATH]... [--capability X.Y]... [--sections NAME,...]
                 [--login-user NAME] [--no-login] [--library-directory DIR] [--jit-cache NAME=DIR]...
                 [--wait-fabric S] [--unit NAME]... [--jobs N] [--timeout S] [--output FILE]

  --python             interpreter of the environment to look at (default: the one that runs this script).
  --import             import this module in a fresh process, under an empty and under a login environment.
  --soname             say which file this library was loaded from in each of those processes.
  --distribution       say which version of it the environment holds, without importing it.
  --nvrtc              compile a kernel through this NVRTC, in a fresh process: "13.0=libnvrtc.so.13" goes
                       through the dynamic linker (the check that matters), "13.0=/path/libnvrtc.so.13" does not.
  --capability         compute capabilities to compile for (default: those of the GPUs that answer).
  --sections           some of: versions imports nvrtc gpus jit settings health (default: all).
  --login-user         whose login environment (default: the user who runs this); --no-login leaves it out.
  --library-directory  put this directory first in LD_LIBRARY_PATH of the imports, and say so: for a stand-in
                       libcuda on a host without a driver.
  --jit-cache          directories of compiled kernels to look into, e.g. flashinfer=/var/cache/...
  --wait-fabric        wait up to this many seconds for every GPU's fabric to leave "In Progress" (0).
  --unit               say how much memory this systemd unit may lock; may be repeated.
  --timeout            seconds for each child process (60).
  --output             the document is also written here, atomically, with mode 0644.

The last line of stdout is the document; its fields are described in docs/reference/verify-limits.md and
stack-check.schema.json. Every section is a value or {"error": "..."}. Exit status: 0 looked, 1 crash, 2 usage
or environment, 5 a GPU computed a wrong result. What is wanted is the caller's knowledge; this script reports.

Nothing here needs more than the standard library; torch and its like are imported in child processes only.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import ctypes
import datetime
import functools
import glob
import json
import os
import pwd
import re
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree

SCHEMA = 1
LOOKED, CRASHED, USAGE, WRONG_RESULT = 0, 1, 2, 5

SECTIONS = ("versions", "imports", "nvrtc", "gpus", "jit", "settings", "health")

# What changes which library, compiler or transport a process uses, wherever it is set.
INTERESTING = re.compile(
    r"^(NCCL_\w+|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|PYTHONHOME|CUDA_\w+|FLASHINFER_\w+|TORCH_\w+|TRITON_\w+|"
    r"NVIDIA_\w+|GLOO_\w+|VLLM_\w+|SGL\w*_\w+)$"
)
SETTING_FILES = [
    "/etc/environment",
    "/etc/profile",
    "/etc/bash.bashrc",
    "/etc/profile.d/*.sh",
    "/etc/environment.d/*.conf",
    "/etc/systemd/system.conf",
    "/etc/systemd/system.conf.d/*.conf",
    "/etc/security/pam_env.conf",
    "/etc/nccl.conf",
]
HOME_SETTING_FILES = [
    ".profile",
    ".bash_profile",
    ".bashrc",
    ".pam_environment",
    ".config/environment.d/*.conf",
    ".nccl.conf",
]
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

KERNEL_SOURCE = b"""
extern "C" __global__ void scale_add(const float *x, float *y, float factor, int count)
{
    int position = blockIdx.x * blockDim.x + threadIdx.x;
    if (position < count) y[position] = factor * x[position] + y[position];
}
"""
KERNEL_NAME = b"scale_add"
KERNEL_ELEMENTS = 1 << 20


class Refusal(Exception):
    """The command line or the environment does not allow to look."""


# ---------------------------------------------------------------------------------------------- children


class Answer:
    """What a child process said: its JSON value, or why there is none."""

    def __init__(self, value, error, seconds, stderr=""):
        self.value = value
        self.error = error
        self.seconds = round(seconds, 3)
        self.stderr = stderr


def ask(options, python, task, argument, environment):
    """Run one task of this file in a fresh process with exactly this environment; return its Answer."""
    reading, writing = os.pipe()
    begun = time.monotonic()
    command = [python, os.path.abspath(__file__), "--child", task, str(writing), json.dumps(argument)]
    try:
        child = subprocess.Popen(
            command,
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            start_new_session=True,
        )
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return Answer(None, "cannot run {}: {}".format(python, error.strerror), 0.0)
    os.close(writing)
    try:
        printed = child.communicate(timeout=options.timeout)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        os.close(reading)
        seconds = time.monotonic() - begun
        return Answer(None, "did not end within {:g} s".format(options.timeout), seconds)
    with os.fdopen(reading, "rb") as stream:
        text = stream.read().decode("utf-8", "replace")
    seconds = time.monotonic() - begun
    if text:
        return Answer(json.loads(text), None, seconds, printed)
    if child.returncode < 0:
        error = "killed by {}".format(signal.Signals(-child.returncode).name)
    else:
        error = "ended with status {}: {}".format(child.returncode, root_line(printed))
    return Answer(None, error, seconds, printed)


_ROOT_LINES = [
    re.compile(pattern)
    for pattern in (
        r"undefined symbol: \S+",
        r"cannot open shared object file",
        r"failed to open \S+\.so",
        r"version `?\S+ not found",
        r"Error\b",
    )
]


def root_line(text):
    """Return the one line of an error text that names the cause, without control characters.

    A package may wrap the loader's message in a page of advice; the loader's own line says what is wrong.
    """
    lines = [line.strip().lstrip("- ") for line in text.splitlines() if line.strip()]
    for pattern in _ROOT_LINES:
        for line in lines:
            if pattern.search(line):
                return printable(line)
    return printable(lines[-1]) if lines else "no message"


def printable(text, limit=500):
    """Return text without control characters, cut to a length."""
    return "".join(character for character in text if character.isprintable())[:limit]


def run_command(command, timeout_s=20.0):
    """Return a command's stdout; raise OSError or subprocess errors with the reason."""
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout_s
    )
    text = result.stdout.decode("utf-8", "replace")
    if result.returncode:
        complaint = (text + result.stderr.decode("utf-8", "replace")).strip()
        raise OSError("{} ended with status {}: {}".format(command[0], result.returncode, printable(complaint)))
    return text


def read_text(path, limit=1 << 20):
    """Return a file's text without surrounding space, or None when it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(limit).strip()
    except OSError:
        return None


def guarded(look, *arguments):
    """Return what a section found, or {"error": ...}: one unreadable thing must not hide the others."""
    try:
        return look(*arguments)
    except (OSError, ValueError, KeyError, IndexError, subprocess.SubprocessError) as error:
        return {"error": printable("{}: {}".format(type(error).__name__, error))}
    except xml.etree.ElementTree.ParseError as error:
        return {"error": "unreadable XML: {}".format(error)}


# ---------------------------------------------------------------------------------------------- child tasks


def mapped_libraries():
    """Return the paths of the shared objects mapped into this process."""
    paths = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as stream:
        for line in stream:
            path = "/" + line.rstrip("\n").partition("/")[2]
            if ".so" in path.rpartition("/")[2]:
                paths.add(path)
    return sorted(paths)


def pick_library(soname, paths):
    """Return the mapped file that stands for a SONAME, or None.

    The map shows real files: libnvrtc.so.13 appears as libnvrtc.so.13.0.88, and libcuda.so.1 as
    libcuda.so.580.95.05, so without a better match any file of the same stem is the one.
    """
    stem = soname.partition(".so")[0] + ".so"
    same = [path for path in paths if path.rpartition("/")[2].partition(".so")[0] + ".so" == stem]
    for path in same:
        name = path.rpartition("/")[2]
        if name == soname or name.startswith(soname + "."):
            return path
    return same[0] if same else None


def child_import(argument):
    """Import one module; say its version, its file, and where the wanted libraries came from."""
    import importlib

    begun = time.monotonic()
    name = argument["module"]
    found = {"ok": False, "version": None, "file": None, "error": None, "libraries": {}}
    try:
        module = importlib.import_module(name)
        found["ok"] = True
        found["version"] = printable(str(getattr(module, "__version__", "")), 100) or None
        found["file"] = getattr(module, "__file__", None)
        if name == "torch":
            found["torch"] = describe_torch(module)
    except BaseException as error:
        text = "{}: {}".format(type(error).__name__, error)
        found["error"] = root_line(text)
        found["detail"] = printable(text.replace("\n", " | "), 2000)
    found["import_s"] = round(time.monotonic() - begun, 3)
    paths = mapped_libraries()
    for soname in argument["sonames"]:
        found["libraries"][soname] = pick_library(soname, paths)
    return found


def describe_torch(torch):
    """Return what torch was built for and which NCCL it uses."""
    nccl, architectures = None, []
    if torch.version.cuda:
        try:
            version = torch.cuda.nccl.version()
            nccl = ".".join(str(part) for part in version) if isinstance(version, tuple) else str(version)
        except (AttributeError, RuntimeError) as error:
            nccl = {"error": printable(str(error))}
        try:
            architectures = torch.cuda.get_arch_list()
        except (AttributeError, RuntimeError):
            pass  # it names none
    return {
        "cuda": torch.version.cuda,
        "nccl": nccl,
        # Private to torch: a build without it must not hide for which CUDA it is.
        "cxx11_abi": getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", None),
        "architectures": architectures,
    }


def child_versions(argument):
    """Return the interpreter's version and those of some distributions, without importing any."""
    import importlib.metadata
    import platform

    found = {}
    for name in argument["distributions"]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "libc": "-".join(platform.libc_ver()),
        "distributions": found,
    }


class Nvrtc:
    """NVRTC through ctypes."""

    def __init__(self, library):
        self.library = ctypes.CDLL(library)
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        """Call a function; raise OSError with NVRTC's own words."""
        code = getattr(self.library, name)(*arguments)
        if code:
            text = self.library.nvrtcGetErrorString(code).decode("ascii", "replace")
            raise OSError("{}: {}".format(name, text))

    def version(self):
        """Return MAJOR.MINOR."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return "{}.{}".format(major.value, minor.value)

    def architectures(self):
        """Return the architectures it can target, as compute capabilities ("9.0")."""
        count = ctypes.c_int()
        self.call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self.call("nvrtcGetSupportedArchs", numbers)
        return ["{}.{}".format(number // 10, number % 10) for number in numbers]

    def compile(self, capability):
        """Return the cubin of the test kernel for a compute capability; raise OSError with the log."""
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), KERNEL_SOURCE, b"scale_add.cu", 0, None, None)
        option = "--gpu-architecture=sm_{}".format(capability.replace(".", "")).encode("ascii")
        options = (ctypes.c_char_p * 1)(option)
        code = self.library.nvrtcCompileProgram(program, 1, options)
        if code:
            raise OSError(root_line(self.log(program)) + " ({})".format(self.error_name(code)))
        size = ctypes.c_size_t()
        self.call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        self.call("nvrtcGetCUBIN", program, cubin)
        return cubin.raw

    def error_name(self, code):
        return self.library.nvrtcGetErrorString(code).decode("ascii", "replace")

    def log(self, program):
        """Return the compiler's log."""
        size = ctypes.c_size_t()
        self.call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(max(1, size.value))
        self.call("nvrtcGetProgramLog", program, text)
        return text.value.decode("utf-8", "replace")


def child_nvrtc(argument):
    """Load one NVRTC and compile for each capability; say which files the linker took."""
    found = {"library": argument["library"], "loaded_from": None, "builtins_from": None, "error": None}
    found.update(version=None, supported_capabilities=None, compiles=[], cubins={})
    try:
        nvrtc = Nvrtc(argument["library"])
        found["version"] = nvrtc.version()
        found["supported_capabilities"] = nvrtc.architectures()
    except (OSError, AttributeError) as error:
        found["error"] = root_line(str(error))
        return found
    for capability in argument["capabilities"]:
        entry = {"capability": capability, "is_supported": capability in found["supported_capabilities"]}
        entry.update(ok=False, error=None, cubin_bytes=None)
        if entry["is_supported"]:
            try:
                cubin = nvrtc.compile(capability)
                entry.update(ok=True, cubin_bytes=len(cubin))
                found["cubins"][capability] = base64.b64encode(cubin).decode("ascii")
            except OSError as error:
                entry["error"] = root_line(str(error))
        else:
            entry["error"] = "toolkit {} cannot target {}".format(argument["toolkit"], capability)
        found["compiles"].append(entry)
    paths = mapped_libraries()
    found["loaded_from"] = pick_library(argument["library"].rpartition("/")[2], paths)
    found["builtins_from"] = pick_library("libnvrtc-builtins.so", paths)
    return found


class Driver:
    """The CUDA driver API through ctypes."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name, *arguments):
        """Call a function; raise OSError with the driver's name for the error."""
        code = getattr(self.library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            label = text.value.decode("ascii") if text.value else "unknown"
            raise OSError("{}: {} ({})".format(name, label, code))

    def device(self, index):
        """Return a device's handle."""
        handle = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), index)
        return handle

    def describe(self, index):
        """Return what identifies one GPU."""
        handle = self.device(index)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), handle)
        uuid = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid", uuid, handle)
        digits = bytes(uuid).hex()
        bus = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", bus, len(bus), handle)
        values = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
            values.append(value.value)
        memory = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        return {
            "index": index,
            "name": name.value.decode("utf-8", "replace"),
            "uuid": "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])),
            "pci_bus_id": bus.value.decode("ascii").lower(),
            "compute_capability": "{}.{}".format(*values),
            "memory_bytes": memory.value,
        }


def child_gpus(_argument):
    """Initialise the driver and describe every GPU."""
    driver = Driver()
    driver.call("cuInit", 0)
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.call("cuDriverGetVersion", ctypes.byref(version))
    driver.call("cuDeviceGetCount", ctypes.byref(count))
    return {
        "cuda_driver_api": "{}.{}".format(version.value // 1000, version.value % 1000 // 10),
        "devices": [driver.describe(index) for index in range(count.value)],
    }


def child_kernel(argument):
    """Make a context on one GPU, launch the compiled kernel and compare every element."""
    found = {"context": False, "launched": None, "wrong_elements": None, "error": None}
    try:
        driver = Driver()
        driver.call("cuInit", 0)
        handle = driver.device(argument["index"])
        context = ctypes.c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        driver.call("cuCtxSetCurrent", context)
        found["context"] = True
        if argument["cubin"] is None:
            return found
        found["launched"] = False
        cubin = base64.b64decode(argument["cubin"])
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        driver.call("cuModuleLoadData", ctypes.byref(module), cubin)
        driver.call("cuModuleGetFunction", ctypes.byref(function), module, KERNEL_NAME)
        found["wrong_elements"] = launch(driver, function)
        found["launched"] = True
    except (OSError, AttributeError) as error:
        found["error"] = printable(str(error))
    return found


def launch(driver, function):
    """Run y = 3 x + y on integers small enough to be exact; return how many elements are wrong."""
    count = KERNEL_ELEMENTS
    buffer_type = ctypes.c_float * count
    given = buffer_type(*(position % 1021 for position in range(count)))
    added = buffer_type(*(position % 509 for position in range(count)))
    size = ctypes.sizeof(buffer_type)
    pointers = [ctypes.c_uint64(), ctypes.c_uint64()]
    for pointer, data in ((pointers[0], given), (pointers[1], added)):
        driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        driver.call("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(size))
    values = [*pointers, ctypes.c_float(3.0), ctypes.c_int(count)]
    arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    driver.call("cuLaunchKernel", function, (count + 255) // 256, 1, 1, 256, 1, 1, 0, None, arguments, None)
    driver.call("cuCtxSynchronize")
    result = buffer_type()
    driver.call("cuMemcpyDtoH_v2", result, pointers[1], ctypes.c_size_t(size))
    for pointer in pointers:
        driver.call("cuMemFree_v2", pointer)
    return sum(1 for at in range(count) if result[at] != 3.0 * (at % 1021) + at % 509)


CHILDREN = {
    "import": child_import,
    "versions": child_versions,
    "nvrtc": child_nvrtc,
    "gpus": child_gpus,
    "kernel": child_kernel,
}


def child_main(task, descriptor, argument):
    """Answer one task on a descriptor of its own: what a module prints while it is imported stays apart."""
    try:
        value = CHILDREN[task](json.loads(argument))
    except (OSError, AttributeError) as error:
        value = {"error": printable(str(error))}
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as stream:
        json.dump(value, stream)
    sys.stdout.flush()
    # Destructors of half-loaded CUDA libraries may crash; nothing is left to do that needs them.
    os._exit(0)


# ---------------------------------------------------------------------------------------------- environments


def login_environment(user):
    """Return the environment a login of this user starts with.

    As root it goes through su, so that PAM adds what /etc/environment says; otherwise a login shell is the
    nearest thing, with /etc/environment read beforehand. Raises OSError when neither answers.
    """
    entry = pwd.getpwnam(user)
    mark = "\0login-environment\0"
    script = "printf '{}'; exec env -0".format(mark.replace("\0", "\\000"))
    environment = {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "PATH": DEFAULT_PATH}
    if os.geteuid() == 0 and shutil.which("su"):
        command = ["su", "-l", "-s", "/bin/bash", user, "-c", script]
    else:
        for name, value, _line in assignments(read_text("/etc/environment") or ""):
            environment[name] = value
        command = ["/bin/bash", "-lc", script]
    result = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=20,
    )
    text = result.stdout.decode("utf-8", "replace")
    if mark not in text:
        complaint = result.stderr.decode("utf-8", "replace").strip()
        raise OSError("no login environment for {}: {}".format(user, printable(complaint) or result.returncode))
    pairs = [item.partition("=") for item in text.rpartition(mark)[2].split("\0") if "=" in item]
    return {name: value for name, _, value in pairs}


_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|declare\s+-x\s+|set\s+)?([A-Za-z_]\w*)\s*(?:=|DEFAULT=|\s+DEFAULT=)(.*)$")
_SYSTEMD_ENVIRONMENT = re.compile(r"^\s*(?:DefaultEnvironment|Environment)=(.*)$")


def assignments(text):
    """Yield (name, value, line number) for the variables a shell, PAM or systemd file sets."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        systemd = _SYSTEMD_ENVIRONMENT.match(line)
        if systemd:
            for word in re.findall(r'"([^"]*)"|(\S+)', systemd.group(1)):
                name, _, value = (word[0] or word[1]).partition("=")
                yield name, value, number
            continue
        match = _ASSIGNMENT.match(line)
        if match:
            yield match.group(1), match.group(2).strip().strip("'\""), number


def setting_files(home):
    """Return the files in which such variables are usually set."""
    patterns = SETTING_FILES + [os.path.join(home, name) for name in HOME_SETTING_FILES]
    return [path for pattern in patterns for path in sorted(glob.glob(pattern))]


def look_settings(login, home):
    """Return the interesting variables of the login environment and the files and lines that set any of them."""
    found = []
    for path in setting_files(home):
        is_nccl = path.endswith("nccl.conf")
        for name, value, number in assignments(read_text(path) or ""):
            if INTERESTING.match(name) or is_nccl:
                found.append({"name": name, "value": printable(value), "file": path, "line": number})
    variables = {}
    if login is not None:
        variables = {name: printable(value) for name, value in sorted(login.items()) if INTERESTING.match(name)}
    return {"login": variables, "files": found}


# ---------------------------------------------------------------------------------------------- loader trace

_FIND = re.compile(r"find library=(\S+) \[")
_TRY = re.compile(r"trying file=(\S+)")


def loader_choices(text):
    """Return {SONAME: the file the loader took}, from what ld.so prints under LD_DEBUG=libs."""
    chosen, wanted = {}, None
    for line in text.splitlines():
        found = _FIND.search(line)
        tried = _TRY.search(line)
        if found:
            wanted = found.group(1)
        elif tried and wanted and tried.group(1).rpartition("/")[2] == wanted:
            chosen[wanted] = tried.group(1)  # the last one tried before the next search is the one taken
    return chosen


def explain_failure(options, module, environment, error):
    """Import once more with the loader talking; return the files taken for the libraries the error names."""
    with tempfile.TemporaryDirectory(prefix="stack-check-") as directory:
        traced = dict(environment, LD_DEBUG="libs", LD_DEBUG_OUTPUT=os.path.join(directory, "trace"))
        ask(options, options.python, "import", {"module": module, "sonames": []}, traced)
        text = "".join(read_text(path, 32 << 20) or "" for path in sorted(glob.glob(os.path.join(directory, "trace*"))))
    chosen = loader_choices(text)
    named = re.findall(r"[\w+.-]+\.so[\w.]*", error)
    return {name: chosen[name] for name in named if name in chosen}


# ---------------------------------------------------------------------------------------------- JIT caches


def look_jit(caches, login):
    """Return what the caches of compiled kernels hold; None for one that does not exist yet."""
    home = (login or {}).get("HOME", os.path.expanduser("~"))
    places = {
        "flashinfer": os.path.join((login or {}).get("FLASHINFER_WORKSPACE_BASE", home), ".cache", "flashinfer"),
        "triton": (login or {}).get("TRITON_CACHE_DIR", os.path.join(home, ".triton", "cache")),
        "torch_extensions": (login or {}).get("TORCH_EXTENSIONS_DIR", os.path.join(home, ".cache", "torch_extensions")),
        "cuda": (login or {}).get("CUDA_CACHE_PATH", os.path.join(home, ".nv", "ComputeCache")),
    }
    places.update(caches)
    return {name: guarded(look_cache, path) for name, path in sorted(places.items())}


def look_cache(path):
    """Return owner, mode, number and size of one cache directory's files."""
    if not os.path.isdir(path):
        return {"path": path, "exists": False}
    status = os.stat(path)
    count = size = libraries = 0
    for directory, _names, files in os.walk(path):
        for name in files:
            try:
                size += os.lstat(os.path.join(directory, name)).st_size
            except OSError:
                continue
            count += 1
            libraries += name.endswith((".so", ".cubin"))
    return {
        "path": path,
        "exists": True,
        "owner": status.st_uid,
        "mode": "{:04o}".format(stat.S_IMODE(status.st_mode)),
        "files": count,
        "libraries": libraries,
        "bytes": size,
    }


# ---------------------------------------------------------------------------------------------- health


def number(text):
    """Return the leading number of an nvidia-smi value ("16x", "700.00 W"), or None for N/A and the like."""
    match = re.match(r"-?\d+(?:\.\d+)?", (text or "").strip())
    if not match:
        return None
    return float(match.group()) if "." in match.group() else int(match.group())


def parse_smi_xml(text):
    """Return one entry a GPU from ``nvidia-smi -q -x``; a value the driver does not give is None."""
    root = xml.etree.ElementTree.fromstring(text)

    def value(node, path):
        found = node.findtext(path)
        found = found.strip() if found else None
        return None if found in (None, "", "N/A", "[N/A]", "Requested functionality has been deprecated") else found

    gpus = []
    for index, node in enumerate(root.iter("gpu")):
        ecc = node.find("ecc_errors")
        counters = {}
        for period in ("volatile", "aggregate"):
            part = ecc.find(period) if ecc is not None else None
            for child in part if part is not None else []:
                if number(child.text) is not None:
                    counters["{}_{}".format(period, child.tag)] = number(child.text)
        reasons = node.find("clocks_event_reasons")
        active = (
            [child.tag for child in reasons if (child.text or "").strip() == "Active"] if reasons is not None else []
        )
        processes = [
            {"pid": number(item.findtext("pid")), "name": printable(item.findtext("process_name") or "", 200)}
            for item in node.iter("process_info")
        ]
        gpus.append(
            {
                "index": index,
                "name": value(node, "product_name"),
                "architecture": value(node, "product_architecture"),
                "uuid": value(node, "uuid"),
                "pci_bus_id": value(node, "pci/pci_bus_id"),
                "mig": value(node, "mig_mode/current_mig"),
                "persistence": value(node, "persistence_mode"),
                "recovery_action": value(node, "gpu_recovery_action"),
                "ecc": value(node, "ecc_mode/current_ecc"),
                "ecc_errors": counters,
                "remapped_pending": value(node, "remapped_rows/remapped_row_pending"),
                "remapped_failure": value(node, "remapped_rows/remapped_row_failure"),
                "remapped_uncorrectable": number(value(node, "remapped_rows/remapped_row_unc")),
                "retired_pending": value(node, "retired_pages/pending_retirement"),
                "pcie_generation": number(value(node, "pci/pci_gpu_link_info/pcie_gen/current_link_gen")),
                "pcie_generation_max": number(value(node, "pci/pci_gpu_link_info/pcie_gen/max_link_gen")),
                "pcie_width": number(value(node, "pci/pci_gpu_link_info/link_widths/current_link_width")),
                "pcie_width_max": number(value(node, "pci/pci_gpu_link_info/link_widths/max_link_width")),
                "pcie_replays": number(value(node, "pci/replay_counter")),
                "fabric_state": value(node, "fabric/state"),
                "fabric_status": value(node, "fabric/status"),
                "clock_event_reasons": [reason.replace("clocks_event_reason_", "") for reason in active],
                "memory_used_mib": number(value(node, "fb_memory_usage/used")),
                "temperature_c": number(value(node, "temperature/gpu_temp")),
                "processes": processes,
            }
        )
    return gpus


def parse_nvlink_status(text):
    """Return one entry a GPU from ``nvidia-smi nvlink -s``: speeds of active links (GB/s), inactive ones."""
    gpus = []
    for line in text.splitlines():
        head = re.match(r"\s*GPU (\d+):.*?\(UUID: (\S+?)\)", line)
        link = re.match(r"\s*Link (\d+): (?:([\d.]+) GB/s|(.*))$", line)
        if head:
            gpus.append({"index": int(head.group(1)), "uuid": head.group(2), "active": {}, "inactive": []})
        elif link and gpus:
            if link.group(2):
                gpus[-1]["active"][link.group(1)] = float(link.group(2))
            else:
                gpus[-1]["inactive"].append(int(link.group(1)))
    return [
        {
            "index": gpu["index"],
            "uuid": gpu["uuid"],
            "active_links": len(gpu["active"]),
            "inactive_links": gpu["inactive"],
            "link_gb_per_s": sorted(set(gpu["active"].values())),
        }
        for gpu in gpus
    ]


def parse_nvlink_errors(text):
    """Return {GPU index: {counter: sum over its links}} from ``nvidia-smi nvlink -e``."""
    gpus, current = {}, None
    for line in text.splitlines():
        head = re.match(r"\s*GPU (\d+):", line)
        counted = re.match(r"\s*Link \d+: (.+?): (\d+)\s*$", line)
        if head:
            current = gpus.setdefault(head.group(1), {})
        elif counted and current is not None:
            name = counted.group(1).lower().replace(" ", "_")
            current[name] = current.get(name, 0) + int(counted.group(2))
    return gpus


_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def parse_matrix(text):
    """Return (GPU names, rows of cells between GPUs) from ``nvidia-smi topo -m`` or ``topo -p2p``.

    The header is underlined with escape sequences, cells may carry trailing tabs, and network cards and CPU
    affinities follow the GPUs in the same row.
    """
    lines = [_ANSI.sub("", line).rstrip() for line in text.splitlines()]
    header = next((line.split() for line in lines if re.match(r"\s*GPU0\s+GPU1\b", line)), [])
    names = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    rows = []
    for line in lines:
        cells = line.split()
        if len(cells) > len(names) and cells[0] == "GPU{}".format(len(rows)) and cells[1] != "GPU1":
            rows.append(cells[1 : 1 + len(names)])
    return names, rows


def parse_xids(text):
    """Return the Xid events of a kernel log, and GPUs that fell off the bus without one (``xid`` None).

    One message may be broken over lines; what follows a line without a time of its own belongs to it.
    """
    messages = []
    for line in text.splitlines():
        if messages and re.match(r"\s+NVRM: ", line):
            messages[-1] += " " + line.strip()[len("NVRM: ") :]
        else:
            messages.append(line)
    found, fallen = [], set()
    for line in messages:
        match = re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", line)
        if match:
            found.append({"xid": int(match.group(2)), "pci_bus_id": match.group(1).lower(), "line": printable(line)})
            continue
        match = re.search(r"NVRM: .*GPU ([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\S?\d?)\b.*fallen off", line)
        if match and match.group(1).lower() not in fallen:
            fallen.add(match.group(1).lower())
            found.append({"xid": None, "pci_bus_id": match.group(1).lower(), "line": printable(line)})
    numbered = {event["pci_bus_id"] for event in found if event["xid"] == 79}
    return [
        event
        for event in found
        if event["xid"] is not None or not any(event["pci_bus_id"].startswith(bus) for bus in numbered)
    ]


def look_xids():
    """Read the kernel's messages since boot; the ring may have lost the oldest, journald's copy has not."""
    if shutil.which("journalctl") and os.path.isdir("/run/systemd/system"):
        source, text = (
            "journal",
            run_command(["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-monotonic"]),
        )
    else:
        source, text = "dmesg", run_command(["dmesg"])
    return {"source": source, "events": parse_xids(text)[-100:]}


def acs_control(path):
    """Return the ACS control bits of one PCI bridge from its configuration space; None: it has no ACS.

    Extended capabilities start at 0x100; number 0x000D is ACS, its control register lies 6 bytes in
    (PCI Express Base Specification 5.0, 7.7.8). Needs root: others see the first 64 bytes only.
    """
    with open(os.path.join(path, "config"), "rb") as stream:
        data = stream.read()
    if len(data) < 0x104:
        raise OSError("configuration space is readable by root only")
    offset, seen = 0x100, set()
    while offset and offset not in seen and offset + 8 <= len(data):
        seen.add(offset)
        (header,) = struct.unpack_from("<I", data, offset)
        if header & 0xFFFF == 0x000D:
            (control,) = struct.unpack_from("<H", data, offset + 6)
            return {
                "source_validation": bool(control & 1),
                "request_redirect": bool(control & 4),
                "completion_redirect": bool(control & 8),
                "upstream_forwarding": bool(control & 16),
            }
        offset = header >> 20
    return None


def look_pci(bus_ids):
    """Return NUMA place, CPUs, error counters and the ACS bits of the bridges above each GPU."""
    found = []
    for bus_id in bus_ids:
        path = os.path.join("/sys/bus/pci/devices", bus_id)
        real = os.path.realpath(path)
        bridges = [
            part for part in real.split("/")[:-1] if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.\d", part)
        ]
        node = read_text(os.path.join(path, "numa_node"))
        found.append(
            {
                "pci_bus_id": bus_id,
                "numa_node": int(node) if node else None,
                "local_cpus": read_text(os.path.join(path, "local_cpulist")),
                "aer": {
                    kind: number(
                        (read_text(os.path.join(path, "aer_dev_" + kind)) or "")
                        .rpartition("TOTAL_")[2]
                        .partition(" ")[2]
                    )
                    for kind in ("correctable", "nonfatal", "fatal")
                },
                "bridges": [
                    {
                        "pci_bus_id": bridge,
                        "acs": guarded(acs_control, os.path.join("/sys/bus/pci/devices", bridge)),
                    }
                    for bridge in bridges
                ],
            }
        )
    return found


def short_bus_id(text):
    """Return a PCI bus id as sysfs writes it: four digits of domain, lower case."""
    domain, _, rest = text.lower().partition(":")
    return "{}:{}".format(domain[-4:].rjust(4, "0"), rest)


RDMA_DEVICES = "/sys/class/infiniband"


def look_rdma(root=None):
    """Return the ports of RDMA devices (InfiniBand, RoCE) with their state as the kernel words it."""
    found = []
    for path in sorted(glob.glob(os.path.join(root or RDMA_DEVICES, "*", "ports", "*"))):
        found.append(
            {
                "device": path.split("/")[-3],
                "port": int(os.path.basename(path)),
                "state": (read_text(os.path.join(path, "state")) or "").partition(":")[2].strip() or None,
                "link_layer": read_text(os.path.join(path, "link_layer")),
                "rate": read_text(os.path.join(path, "rate")),
            }
        )
    return found


def limit_bytes(text):
    """Return a limit as systemctl or prlimit prints it, in bytes; None: unlimited."""
    if text.strip() in ("infinity", "unlimited", str((1 << 64) - 1)):
        return None
    return int(text)


def login_memlock(user):
    """Return how much memory a login of this user may lock in bytes, PAM's limits included; None: unlimited."""
    if os.geteuid() or not shutil.which("su"):
        raise OSError("only root can ask for another login")
    text = run_command(["su", "-l", "-s", "/bin/sh", user, "-c", "grep '^Max locked memory' /proc/self/limits"])
    return limit_bytes(text.split()[-3])


def look_memlock(user, units):
    """Return how much memory a process may lock, by where it starts: a login, systemd's default, each unit.

    A unit that does not exist is left out. ``login`` None or a unit's None: unlimited.
    """

    def shown(prefix, unit=None):
        text = run_command(["systemctl", "show", "--property={},LoadState".format(prefix), *([unit] if unit else [])])
        return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)

    def of_unit(unit):
        return limit_bytes(shown("LimitMEMLOCK", unit)["LimitMEMLOCK"])

    has_systemd = os.path.isdir("/run/systemd/system")
    present = [unit for unit in units if has_systemd and shown("LimitMEMLOCK", unit).get("LoadState") == "loaded"]
    return {
        "login": guarded(login_memlock, user),
        "systemd": guarded(lambda: limit_bytes(shown("DefaultLimitMEMLOCK")["DefaultLimitMEMLOCK"]))
        if has_systemd
        else {"error": "there is no systemd"},
        "units": {unit: guarded(of_unit, unit) for unit in present},
    }


def look_host(user="root", units=()):
    """Return what of the host decides whether GPUs can reach each other and NCCL can start."""
    shm = os.statvfs("/dev/shm")
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    stale = 0
    for path in glob.glob("/dev/shm/nccl-*"):
        stale += 1 if os.path.exists(path) else 0
    return {
        "boot_id": read_text("/proc/sys/kernel/random/boot_id"),
        "uptime_s": float((read_text("/proc/uptime") or "0").split()[0]),
        "shm_bytes": shm.f_frsize * shm.f_blocks,
        "shm_free_bytes": shm.f_frsize * shm.f_bavail,
        "shm_nccl_files": stale,
        "memlock_bytes": None if memlock[0] == resource.RLIM_INFINITY else memlock[0],
        "memlock": guarded(look_memlock, user, units),
        "rdma": guarded(look_rdma),
        "kernel_command_line": read_text("/proc/cmdline"),
        "iommu_units": sorted(os.listdir("/sys/class/iommu")) if os.path.isdir("/sys/class/iommu") else [],
        "numa_nodes": len(glob.glob("/sys/devices/system/node/node[0-9]*")),
        "allowed_cpus": allowed_cpus(read_text("/proc/self/status") or ""),
    }


def allowed_cpus(status):
    """Return the processors a process may run on, as the kernel writes the list; None: it does not say."""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status, re.M)
    return match.group(1) if match else None


def look_units(names):
    """Return the state of systemd units; None where there is no systemd."""
    if not os.path.isdir("/run/systemd/system"):
        return None
    fields = "Id,LoadState,ActiveState,SubState,UnitFileState,Result"
    text = run_command(["systemctl", "show", "--property=" + fields, "--no-pager", *names])
    units = {}
    for block in text.split("\n\n"):
        pairs = dict(line.partition("=")[::2] for line in block.splitlines() if "=" in line)
        if pairs.get("LoadState") not in (None, "not-found"):
            units[pairs["Id"]] = {
                "active": pairs.get("ActiveState"),
                "sub": pairs.get("SubState"),
                "enabled": pairs.get("UnitFileState"),
                "result": pairs.get("Result"),
            }
    return units


FABRIC_UNITS = [
    "nvidia-fabricmanager.service",
    "nvidia-nvlsm.service",
    "nvlsm.service",
    "nvidia-persistenced.service",
]


def gather_health(wait_fabric_s=0.0, user="root", units=()):
    """Return the health of GPUs, links and host as nvidia-smi, sysfs and the kernel log tell it.

    This is what must be looked at just before anything is timed. With ``wait_fabric_s`` it waits for fabrics
    that are still "In Progress", as they are for minutes after boot.
    """

    def smi():
        return parse_smi_xml(run_command(["nvidia-smi", "-q", "-x"]))

    begun = time.monotonic()
    gpus = guarded(smi)
    while isinstance(gpus, list) and any(gpu["fabric_state"] == "In Progress" for gpu in gpus):
        if time.monotonic() - begun >= wait_fabric_s:
            break
        time.sleep(5)
        gpus = guarded(smi)
    waited = round(time.monotonic() - begun, 1)
    texts = {
        "nvlink": (parse_nvlink_status, ["nvidia-smi", "nvlink", "-s"]),
        "nvlink_errors": (parse_nvlink_errors, ["nvidia-smi", "nvlink", "-e"]),
        "topology": (matrix_value, ["nvidia-smi", "topo", "-m"]),
        "p2p_read": (matrix_value, ["nvidia-smi", "topo", "-p2p", "r"]),
        "p2p_write": (matrix_value, ["nvidia-smi", "topo", "-p2p", "w"]),
        "p2p_nvlink": (matrix_value, ["nvidia-smi", "topo", "-p2p", "n"]),
    }
    with concurrent.futures.ThreadPoolExecutor(len(texts) + 2) as pool:
        futures = {
            name: pool.submit(guarded, lambda parse, command: parse(run_command(command)), parse, command)
            for name, (parse, command) in texts.items()
        }
        futures["xids"] = pool.submit(guarded, look_xids)
        futures["units"] = pool.submit(guarded, look_units, FABRIC_UNITS)
        found = {name: future.result() for name, future in futures.items()}
    bus_ids = [short_bus_id(gpu["pci_bus_id"]) for gpu in gpus if gpu["pci_bus_id"]] if isinstance(gpus, list) else []
    found.update(
        gpus=gpus,
        fabric_waited_s=waited,
        pci=guarded(look_pci, bus_ids),
        host=guarded(look_host, user, units),
        pci_nvidia_devices=guarded(count_pci_gpus),
    )
    return found


def matrix_value(text):
    """Return a topology matrix as a JSON value; raise ValueError when there is none."""
    names, rows = parse_matrix(text)
    if not names or len(rows) != len(names):
        raise ValueError("no matrix in what nvidia-smi printed")
    return {"gpus": names, "rows": rows}


def count_pci_gpus():
    """Return the bus ids of NVIDIA GPUs on the PCI bus, whether a driver sees them or not."""
    found = []
    for path in sorted(glob.glob("/sys/bus/pci/devices/*")):
        device_class = read_text(os.path.join(path, "class")) or ""
        if read_text(os.path.join(path, "vendor")) == "0x10de" and device_class.startswith("0x03"):
            found.append(os.path.basename(path))
    return found


# ---------------------------------------------------------------------------------------------- sections


class Check:
    """Everything that is looked at, spread over a few processes at a time."""

    def __init__(self, options):
        self.options = options
        self.started = time.monotonic()
        self.phases = []
        self.login = None
        self.document = {
            "schema": SCHEMA,
            "program": "stack_check",
            "exit_status": None,
            "message": None,
            "argv": list(sys.argv[1:]),
            "started_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "library_directory": options.library_directory,
            "login_user": None,
            "login_error": None,
        }

    def environments(self):
        """Return {name: environment} for imports and NVRTC."""
        chosen = {"empty": {}}
        if self.login is not None:
            chosen["login"] = dict(self.login)
        return chosen

    def import_environments(self):
        """Return the same, with the stand-in library directory in front where one is named."""
        chosen = self.environments()
        extra = self.options.library_directory
        if extra:
            for environment in chosen.values():
                old = environment.get("LD_LIBRARY_PATH")
                environment["LD_LIBRARY_PATH"] = extra + (":" + old if old else "")
        return chosen

    def run(self):
        """Look at every section asked for."""
        options, wanted = self.options, self.options.sections
        user = options.login_user or pwd.getpwuid(os.geteuid()).pw_name
        if not options.no_login:
            self.document["login_user"] = user
            try:
                self.login = login_environment(user)
            except (OSError, KeyError, subprocess.SubprocessError) as error:
                self.document["login_error"] = printable(str(error))
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            submit = functools.partial(self.timed, pool)
            # Imports take longest, so they are queued first; the GPUs wait for NVRTC's kernel.
            futures = {}
            if "imports" in wanted:
                futures["imports"] = self.start_imports(submit)
            if "versions" in wanted:
                argument = {"distributions": options.distribution}
                futures["versions"] = submit("versions", self.plain, options.python, "versions", argument)
            if "health" in wanted:
                futures["health"] = submit("health", gather_health, options.wait_fabric, user, options.unit)
            if "gpus" in wanted or ("nvrtc" in wanted and not options.capability):
                self.document["gpus"] = self.plain(sys.executable, "gpus", {})
            if "nvrtc" in wanted or "gpus" in wanted:
                self.document["nvrtc"], cubins = self.nvrtc(submit)
                if "gpus" in wanted:
                    self.kernels(submit, cubins)
            if "jit" in wanted:
                self.document["jit"] = look_jit(options.jit_cache, self.login)
            if "settings" in wanted:
                home = (self.login or {}).get("HOME", os.path.expanduser("~"))
                self.document["settings"] = guarded(look_settings, self.login, home)
            for name in ("versions", "health"):
                if name in futures:
                    self.document[name] = futures[name].result()
            if "imports" in futures:
                self.document["imports"] = {
                    module: {name: future.result() for name, future in by_environment.items()}
                    for module, by_environment in futures["imports"].items()
                }

    def timed(self, pool, label, function, *arguments):
        """Submit work and note how long it took."""

        def work():
            begun = time.monotonic()
            try:
                return function(*arguments)
            finally:
                self.phases.append({"name": label, "seconds": round(time.monotonic() - begun, 3)})

        return pool.submit(work)

    def plain(self, python, task, argument):
        """Ask a child under an empty environment; return its value or {"error": ...}."""
        answer = ask(self.options, python, task, argument, {})
        return answer.value if answer.error is None else {"error": answer.error}

    def start_imports(self, submit):
        """Queue every import under every environment."""
        return {
            module: {
                name: submit("import {} ({})".format(module, name), self.one_import, module, environment)
                for name, environment in self.import_environments().items()
            }
            for module in self.options.imports
        }

    def one_import(self, module, environment):
        """Import one module in a fresh process; on failure say which files the loader had taken."""
        argument = {"module": module, "sonames": self.options.soname}
        answer = ask(self.options, self.options.python, "import", argument, environment)
        if answer.error is not None:
            return {"ok": False, "error": answer.error, "seconds": answer.seconds, "libraries": {}}
        found = dict(answer.value, seconds=answer.seconds)
        if not found["ok"] and ".so" in (found["error"] or ""):
            found["loader"] = explain_failure(self.options, module, environment, found["error"])
        return found

    def nvrtc(self, submit):
        """Compile with every toolkit under every environment; return the section and one cubin a capability."""
        capabilities = list(self.options.capability)
        devices = self.document.get("gpus", {}).get("devices") or []
        for device in devices:
            if device["compute_capability"] not in capabilities and not self.options.capability:
                capabilities.append(device["compute_capability"])
        futures = {}
        for toolkit, library in self.options.nvrtc:
            argument = {"toolkit": toolkit, "library": library, "capabilities": capabilities}
            futures[toolkit] = {
                name: submit(
                    "nvrtc {} ({})".format(toolkit, name),
                    ask,
                    self.options,
                    sys.executable,
                    "nvrtc",
                    argument,
                    environment,
                )
                for name, environment in self.environments().items()
            }
        section, cubins = {}, {}
        for toolkit, by_environment in futures.items():
            section[toolkit] = {}
            for name, future in by_environment.items():
                answer = future.result()
                value = answer.value or {"library": dict(self.options.nvrtc)[toolkit], "error": answer.error}
                for capability, cubin in value.pop("cubins", {}).items():
                    cubins.setdefault(capability, cubin)
                section[toolkit][name] = dict(value, seconds=answer.seconds)
        return section, cubins

    def kernels(self, submit, cubins):
        """Make a context on every GPU and run the kernel there, each in a process of its own."""
        section = self.document["gpus"]
        futures = []
        for device in section.get("devices", []):
            argument = {"index": device["index"], "cubin": cubins.get(device["compute_capability"])}
            label = "kernel on GPU {}".format(device["index"])
            futures.append((device, submit(label, self.plain, sys.executable, "kernel", argument)))
        for device, future in futures:
            device["kernel"] = future.result()

    def status(self):
        """Return (exit status, message)."""
        for device in (self.document.get("gpus") or {}).get("devices", []):
            wrong = device.get("kernel", {}).get("wrong_elements")
            if wrong:
                text = "GPU {index} ({uuid}) computed {} wrong elements of a trivial kernel"
                return WRONG_RESULT, text.format(wrong, **device)
        return LOOKED, None


def write_atomically(path, text):
    """Replace ``path`` by ``text``: a reader sees the old document or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(prefix=".stack-check-", dir=os.path.dirname(os.path.abspath(path)))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def finish(document, status, message, output):
    """Write and print the document; return the exit status."""
    document.update(exit_status=status, message=message)
    text = json.dumps(document, allow_nan=False)
    if output:
        try:
            write_atomically(output, text + "\n")
        except OSError as error:
            print("cannot write {}: {}".format(output, error), file=sys.stderr)
    print(text, flush=True)
    return status


# ---------------------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors reach the document instead of ending the program."""

    def error(self, message):
        raise Refusal(message)


def pair(text):
    """Parse NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError("NAME=VALUE is wanted, got {!r}".format(text))
    return name, value


def capability(text):
    """Parse a compute capability, MAJOR.MINOR."""
    if not re.fullmatch(r"\d+\.\d", text):
        raise argparse.ArgumentTypeError("a compute capability looks like 9.0, got {!r}".format(text))
    return text


def section_list(text):
    """Parse a comma-separated list of sections."""
    parts = [part for part in text.split(",") if part]
    unknown = sorted(set(parts) - set(SECTIONS))
    if unknown:
        raise argparse.ArgumentTypeError("unknown section {}".format(", ".join(unknown)))
    return parts


def parser():
    """Return the command line."""
    line = Parser(prog="stack_check.py", description=__doc__.splitlines()[0])
    line.add_argument("--python", default=sys.executable)
    line.add_argument("--import", dest="imports", action="append", default=[])
    line.add_argument("--soname", action="append", default=[])
    line.add_argument("--distribution", action="append", default=[])
    line.add_argument("--nvrtc", action="append", type=pair, default=[])
    line.add_argument("--capability", action="append", type=capability, default=[])
    line.add_argument("--sections", type=section_list, default=list(SECTIONS))
    line.add_argument("--login-user", default=None)
    line.add_argument("--no-login", action="store_true")
    line.add_argument("--library-directory", default=None)
    line.add_argument("--jit-cache", action="append", type=pair, default=[])
    line.add_argument("--wait-fabric", type=float, default=0.0)
    line.add_argument("--unit", action="append", default=[])
    line.add_argument("--jobs", type=int, default=max(2, min(8, (os.cpu_count() or 2) // 2)))
    line.add_argument("--timeout", type=float, default=60.0)
    line.add_argument("--output", default=None)
    return line


def output_option(arguments):
    """Return the value of --output on a command line that may be wrong otherwise, or None."""
    for position, argument in enumerate(arguments):
        if argument == "--output" and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith("--output="):
            return argument.partition("=")[2]
    return None


def main():
    """Look, print, and return the exit status."""
    if sys.argv[1:2] == ["--child"]:
        child_main(*sys.argv[2:5])
    try:
        options = parser().parse_args()
        options.jit_cache = dict(options.jit_cache)
        if options.jobs < 1 or options.timeout <= 0:
            raise Refusal("--jobs and --timeout must be above 0")
    except Refusal as error:
        print("stack_check.py: {}".format(error), file=sys.stderr)
        document = {"schema": SCHEMA, "program": "stack_check", "argv": sys.argv[1:]}
        return finish(document, USAGE, str(error), output_option(sys.argv[1:]))
    check = Check(options)
    try:
        check.run()
        status, message = check.status()
    except Exception as error:  # the document must exist whatever happens
        status, message = CRASHED, printable("{}: {}".format(type(error).__name__, error))
    check.document["phases"] = check.phases
    check.document["seconds"] = round(time.monotonic() - check.started, 3)
    return finish(check.document, status, message, options.output)


if __name__ == "__main__":
    sys.exit(main())
