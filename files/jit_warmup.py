#!/usr/bin/env python3
"""Build FlashInfer's JIT modules before anybody needs them, and hand every service user a finished copy.

Usage:
  jit_warmup.py --python PATH --cache DIR --capability X.Y[a] [--module NAME]... [--user NAME]...
                [--cuda-home DIR] [--jobs N] [--memory-per-job BYTES] [--module-timeout S] [--timeout S]
                [--plan] [--output FILE]

  --python          interpreter of the environment that holds flashinfer.
  --cache           directory of the caches, one below it for each user: DIR/root/flashinfer is built, and
                    DIR/USER/flashinfer is what that user's FLASHINFER_WORKSPACE_BASE must be.
  --capability      the GPU's, with the "a" of its architecture-specific features from 9.0 on ("9.0a"; it is
                    added when left out, as FlashInfer does itself).
  --module          modules to build (default: those of MODULES that this FlashInfer has).
  --user            service users who get a copy, owned by them.
  --cuda-home       the toolkit, as the service will have it in CUDA_HOME (default: $CUDA_HOME).
  --jobs            compilers at a time (default: the processors); --memory-per-job bounds them by free memory
                    (4 GiB: a heavy CUTLASS file needs about that much).
  --module-timeout  seconds for one module (1200); --timeout for everything (3600).
  --plan            say what would be done, build nothing.

A module that a jit-cache wheel covers is left alone. The last line of stdout is one JSON document, also written
to --output atomically. Exit status: 0 everything is built or covered, 1 something failed or ran out of time,
2 usage or environment, 4 flashinfer is not there.

Why the copies are made in such a roundabout way: ninja keeps the absolute paths of its outputs and a hash of every
command, so a cache that is merely copied is compiled again on first use. Here ninja itself is run once in the
copy's place, while the compilers are replaced, in a mount namespace of its own, by a program that copies what the
real ones made. Then ninja's records are true, and a process of that user compiles nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

SCHEMA = 1
BUILT, FAILED, USAGE, MISSING = 0, 1, 2, 4

# What an engine meets first: name -> module and function that describe it. One that a FlashInfer release does not
# have is reported as absent; one that does not exist for the GPU's architecture as unsupported.
MODULES = {
    "trtllm_comm": ("flashinfer.jit.comm", "gen_trtllm_comm_module"),
    "vllm_comm": ("flashinfer.jit.comm", "gen_vllm_comm_module"),
    "norm": ("flashinfer.jit.norm", "gen_norm_module"),
    "rope": ("flashinfer.jit.rope", "gen_rope_module"),
    "page": ("flashinfer.jit.page", "gen_page_module"),
    "sampling": ("flashinfer.jit.sampling", "gen_sampling_module"),
    "quantization": ("flashinfer.jit.quantization", "gen_quantization_module"),
    "cascade": ("flashinfer.jit.cascade", "gen_cascade_module"),
    "topk": ("flashinfer.jit.topk", "gen_topk_module"),
}
GIB = 1 << 30


# ---------------------------------------------------------------------------------------------- the plan


def slots(processors, jobs, available_bytes, bytes_per_job):
    """Return how many compilers may run at a time: no more than processors, wish and memory allow, at least one."""
    by_memory = available_bytes // bytes_per_job if bytes_per_job else processors
    return max(1, min(processors if jobs is None else min(jobs, processors), by_memory))


def plan(modules, total):
    """Return (modules at a time, compilers for each): together never more than ``total``.

    Modules run side by side because most of them hold few files; what is left over goes into each.
    """
    if not modules:
        return 0, 0
    side_by_side = min(len(modules), total)
    return side_by_side, max(1, total // side_by_side)


# ---------------------------------------------------------------------------------------------- in the environment


def child_describe(names):
    """Say of each module whether it is covered, built, or to be built."""
    import importlib

    try:
        import flashinfer
    except ImportError as error:
        return {"error": str(error), "version": None, "modules": {}}
    found = {}
    for name in names:
        place, function = MODULES[name]
        try:
            spec = getattr(importlib.import_module(place), function)()
        except (ImportError, AttributeError):
            found[name] = {"state": "absent"}
            continue
        except RuntimeError as error:
            found[name] = {"state": "unsupported", "error": str(error)[:300]}
            continue
        state = "covered" if spec.is_aot else "present" if spec.jit_library_path.exists() else "wanted"
        found[name] = {"state": state, "library": str(spec.get_library_path())}
    return {"error": None, "version": getattr(flashinfer, "__version__", None), "modules": found}


def child_build(names):
    """Let FlashInfer build modules and say which libraries there are now, and of what age."""
    import importlib

    found = {}
    for name in names:
        place, function = MODULES[name]
        spec = getattr(importlib.import_module(place), function)()
        before = spec.jit_library_path.stat().st_mtime_ns if spec.jit_library_path.exists() else None
        spec.build(False)
        after = spec.jit_library_path.stat().st_mtime_ns
        found[name] = {"library": str(spec.jit_library_path), "was_compiled": before != after}
    return found


CHILDREN = {"describe": child_describe, "build": child_build}


def child_main(task, descriptor, names):
    """Answer on a descriptor of its own: importing flashinfer may print."""
    value = CHILDREN[task](names.split(","))
    with os.fdopen(int(descriptor), "w") as stream:
        json.dump(value, stream)


# ---------------------------------------------------------------------------------------------- the copying compiler


def copy_main(master, target, arguments):
    """Stand in for a compiler: copy its output from the master cache, and write the list of what it depends on."""
    output = arguments[arguments.index("-o") + 1]
    # ninja names its outputs by resolved paths.
    source = os.path.join(os.path.realpath(master), os.path.relpath(output, os.path.realpath(target)))
    shutil.copyfile(source, output)
    for option in ("-MF", "--dependency-output"):
        if option in arguments:
            with open(arguments[arguments.index(option) + 1], "w") as stream:
                stream.write("{}: {}\n".format(output, arguments[arguments.index("-c") + 1]))
    return 0


# ---------------------------------------------------------------------------------------------- the work


class Refusal(Exception):
    """The command line or the environment does not allow to build."""


class Warmup:
    """Describe, build, copy, and prove that a copy compiles nothing."""

    def __init__(self, options):
        self.options = options
        self.started = time.monotonic()
        self.lock = threading.Lock()
        self.children = set()
        self.document = {"schema": SCHEMA, "program": "jit_warmup", "argv": sys.argv[1:], "modules": {}, "users": {}}

    def base(self, user):
        """Return a user's FLASHINFER_WORKSPACE_BASE."""
        return os.path.join(self.options.cache, user, "flashinfer")

    def environment(self, user, compilers=1):
        """Return the environment FlashInfer builds under: the toolkit by its versioned path and nothing by chance."""
        environment_bin = os.path.dirname(self.options.python)
        return {
            "PATH": "{}:{}/bin:/usr/local/bin:/usr/bin:/bin".format(environment_bin, self.options.cuda_home),
            "HOME": self.base(user),
            "LC_ALL": "C.UTF-8",
            "CUDA_HOME": self.options.cuda_home,
            "LIBRARY_PATH": "{}/lib64/stubs".format(self.options.cuda_home),
            "FLASHINFER_WORKSPACE_BASE": self.base(user),
            "FLASHINFER_CUDA_ARCH_LIST": self.options.capability,
            "MAX_JOBS": str(compilers),
            # What a build leaves behind must not lie where everybody may write.
            "TMPDIR": os.path.join(self.options.cache, user),
        }

    def ask(self, task, names, environment, limit_s, wrap=(), user=None):
        """Run one task in the environment's interpreter; return (value, error)."""
        reading, writing = os.pipe()
        # Through stdin, opened here: the script itself may be readable by root only.
        command = [*wrap, self.options.python, "-", "--child", task, str(writing), ",".join(names)]
        source = open(os.path.abspath(__file__), "rb")  # noqa: SIM115 (closed below, after the child has it)
        try:
            child = subprocess.Popen(
                command,
                env=environment,
                cwd="/",
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                start_new_session=True,
                preexec_fn=become(user),
            )
        except (OSError, subprocess.SubprocessError) as error:
            os.close(reading)
            return None, "cannot run {}: {}".format(self.options.python, error)
        finally:
            source.close()
            os.close(writing)
        with self.lock:
            self.children.add(child)
        try:
            printed = child.communicate(timeout=max(1.0, limit_s))[0].decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            os.close(reading)
            return None, "took more than {:.0f} s".format(limit_s)
        finally:
            with self.lock:
                self.children.discard(child)
        with os.fdopen(reading) as stream:
            text = stream.read()
        if text:
            return json.loads(text), None
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        named = [line for line in lines if "error" in line.lower()]
        return None, (named or lines or ["ended with status {}".format(child.returncode)])[-1][:500]

    def end(self):
        """Kill what still builds."""
        with self.lock:
            children = list(self.children)
        for child in children:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def left_s(self):
        return self.options.timeout - (time.monotonic() - self.started)

    def run(self):
        """Do everything; return the exit status."""
        options, document = self.options, self.document
        names = options.module or list(MODULES)
        make_directory(self.base("root"), None)
        described, error = self.ask("describe", names, self.environment("root"), min(300, options.timeout))
        error = error or described["error"]
        if error:
            document["message"] = error
            return MISSING
        document["flashinfer"] = described["version"]
        document["modules"] = described["modules"]
        wanted = [name for name in names if described["modules"][name]["state"] == "wanted"]
        total = slots(os.cpu_count() or 1, options.jobs, available_memory(), options.memory_per_job)
        side_by_side, each = plan(wanted, total)
        document["plan"] = {"compilers": total, "modules_at_a_time": side_by_side, "compilers_each": each}
        if options.plan:
            return BUILT
        if wanted and not os.access(os.path.join(options.cuda_home, "bin", "nvcc"), os.X_OK):
            raise Refusal("there is no nvcc in {}".format(options.cuda_home))
        self.build(wanted, side_by_side, each)
        finished = [name for name in names if document["modules"][name]["state"] in ("built", "present")]
        for user in options.user:
            document["users"][user] = self.seed(user, finished)
        failed = [name for name, entry in document["modules"].items() if entry["state"] in ("failed", "timeout")]
        failed += [user for user, entry in document["users"].items() if entry["state"] != "seeded"]
        if failed:
            document["message"] = "not done: {}".format(", ".join(failed))
        return FAILED if failed else BUILT

    def build(self, wanted, side_by_side, each):
        """Build modules, a bounded number at a time."""
        queue = list(wanted)

        def work():
            while True:
                with self.lock:
                    if not queue:
                        return
                    name = queue.pop(0)
                entry = self.document["modules"][name]
                begun = time.monotonic()
                limit = min(self.options.module_timeout, self.left_s())
                if limit <= 0:
                    entry.update(state="timeout", error="no time was left to start it")
                    continue
                value, error = self.ask("build", [name], self.environment("root", each), limit)
                entry["seconds"] = round(time.monotonic() - begun, 1)
                if error:
                    state = "timeout" if error.startswith("took more than") else "failed"
                    entry.update(state=state, error=error)
                else:
                    entry.update(state="built", library=value[name]["library"])

        threads = [threading.Thread(target=work) for _ in range(side_by_side)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def seed(self, user, names):
        """Give a user a copy that ninja takes for its own, and prove that nothing is compiled from it."""
        begun = time.monotonic()
        try:
            account = pwd.getpwnam(user)
        except KeyError:
            return {"state": "failed", "error": "no such user"}
        make_directory(self.base(user), None)
        with tempfile.TemporaryDirectory(prefix=".compilers-", dir=self.options.cache) as directory:
            wrap = copying_compilers(directory, self.base("root"), self.base(user), self.options.cuda_home)
            environment = self.environment(user)
            environment["PATH"] = "{}:{}".format(directory, environment["PATH"])
            _, error = self.ask("build", names, environment, self.left_s(), wrap=wrap)
        if error:
            return {"state": "failed", "error": error, "path": self.base(user)}
        give_to(os.path.dirname(self.base(user)), account)
        value, error = self.ask("build", names, self.environment(user), self.left_s(), user=account)
        compiled = [name for name, entry in (value or {}).items() if entry["was_compiled"]]
        entry = {"path": self.base(user), "modules": names, "seconds": round(time.monotonic() - begun, 1)}
        if error or compiled:
            entry.update(state="failed", error=error or "compiled again: {}".format(", ".join(compiled)))
        else:
            entry.update(state="seeded", proved="{} compiled nothing".format(user))
        return entry


def copying_compilers(directory, master, target, cuda_home):
    """Write stand-ins for c++ and nvcc, and return the command that puts nvcc's over the real one.

    nvcc is called by its absolute path, which ninja's record of the command holds, so it is covered by a bind
    mount that only this process and its children see.
    """
    os.chmod(directory, 0o755)
    call = [sys.executable, os.path.abspath(__file__), "--copy", master, target]
    text = '#!/bin/sh\nexec {} "$@"\n'.format(" ".join(shlex.quote(word) for word in call))
    for name in ("c++", "nvcc"):
        path = os.path.join(directory, name)
        with open(path, "w") as stream:
            stream.write(text)
        os.chmod(path, 0o755)
    real = os.path.realpath(os.path.join(cuda_home, "bin", "nvcc"))
    mount = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh", os.path.join(directory, "nvcc"), real]


def make_directory(path, account):
    """Make a directory with mode 0755 whatever the umask, owned by an account or by us."""
    os.makedirs(path, exist_ok=True)
    os.chmod(path, 0o755)
    if account is not None:
        os.chown(path, account.pw_uid, account.pw_gid)


def give_to(path, account):
    """Hand a directory tree to a user; times stay, because ninja goes by them."""
    for directory, names, files in os.walk(path):
        os.chown(directory, account.pw_uid, account.pw_gid)
        for name in names + files:
            os.lchown(os.path.join(directory, name), account.pw_uid, account.pw_gid)


def become(account):
    """Return what a child does to run as a user; None to stay who we are."""
    if account is None:
        return None

    def switch():
        os.initgroups(account.pw_name, account.pw_gid)
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)

    return switch


def available_memory():
    """Return the bytes of memory that can be used without swapping."""
    with open("/proc/meminfo") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return GIB


# ---------------------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors reach the document instead of ending the program."""

    def error(self, message):
        raise Refusal(message)


def architecture(text):
    """Parse a compute capability; from 9.0 on FlashInfer compiles for the architecture's own features ("a")."""
    number = text.rstrip("af")
    try:
        major, _ = (int(part) for part in number.split("."))
    except ValueError:
        raise argparse.ArgumentTypeError("a compute capability looks like 9.0, got {!r}".format(text)) from None
    return text if text != number or major < 9 else text + "a"


def module_name(text):
    """Parse the name of a module."""
    if text not in MODULES:
        raise argparse.ArgumentTypeError("unknown module {!r}; known: {}".format(text, ", ".join(MODULES)))
    return text


def parser():
    """Return the command line."""
    line = Parser(prog="jit_warmup.py", description=__doc__.splitlines()[0])
    line.add_argument("--python", required=True)
    line.add_argument("--cache", required=True)
    line.add_argument("--capability", required=True, type=architecture)
    line.add_argument("--module", action="append", type=module_name, default=[])
    line.add_argument("--user", action="append", default=[])
    line.add_argument("--cuda-home", default=os.environ.get("CUDA_HOME"))
    line.add_argument("--jobs", type=int, default=None)
    line.add_argument("--memory-per-job", type=int, default=4 * GIB)
    line.add_argument("--module-timeout", type=float, default=1200.0)
    line.add_argument("--timeout", type=float, default=3600.0)
    line.add_argument("--plan", action="store_true")
    line.add_argument("--output", default=None)
    return line


def write_atomically(path, text):
    """Replace ``path`` by ``text``: a reader sees the old document or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(prefix=".jit-warmup-", dir=os.path.dirname(os.path.abspath(path)))
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)


def main():
    """Build, print the document, and return the exit status."""
    if sys.argv[1:2] == ["--child"]:
        return child_main(*sys.argv[2:5]) or 0
    if sys.argv[1:2] == ["--copy"]:
        return copy_main(sys.argv[2], sys.argv[3], sys.argv[4:])
    document, output, warmup = {"schema": SCHEMA, "program": "jit_warmup"}, None, None
    try:
        options = parser().parse_args()
        output = options.output
        if not options.cuda_home:
            raise Refusal("--cuda-home is wanted when CUDA_HOME is not set")
        os.umask(0o022)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))
        warmup = Warmup(options)
        document = warmup.document
        status = warmup.run()
    except Refusal as error:
        status, document["message"] = USAGE, str(error)
    except OSError as error:
        status, document["message"] = FAILED, "{}: {}".format(type(error).__name__, error)
    finally:
        if warmup is not None:
            warmup.end()
    document["exit_status"] = status
    if warmup is not None:
        document["seconds"] = round(time.monotonic() - warmup.started, 1)
    text = json.dumps(document)
    if output:
        write_atomically(output, text + "\n")
    print(text, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
