#!/usr/bin/env python3
"""Build one Python environment on a host, step by step, and report what each step did.

Usage:
  host_env.py look UV MINOR              what is here: uv, interpreters of that minor (reads only)
  host_env.py check ENV [--deep]         how a complete environment differs from its marker (reads only)
  host_env.py heal ORDER ENV [--deep]    evict from the cache what differs from RECORD in ENV, taint its sharers
  host_env.py create ORDER               remove unfinished environments, make the new one
  host_env.py install ORDER STEP         one uv call per index of the step
  host_env.py imports ORDER STEP         import the step's modules, each in a fresh process, empty environment
  host_env.py patch ORDER                apply the order's unified diffs
  host_env.py finish ORDER               make it durable and write the marker: from here on it is complete
  host_env.py report                     print the build log as one JSON line (reads only)
  host_env.py collect HOME --keep N [--protect NAME]...   remove old environments that nothing uses

ORDER is a JSON file that the controller wrote. What a command saw goes into /run/bringup/build.json, and the
controller judges it: a step that failed is a report, so the exit status is 0 whenever there is something to
judge, 1 when there is not, 2 for wrong usage. The script knows no wanted version and no limit of its own; it is
run under the work lock of host_work.py, which its children inherit. Standard library only, Python 3.8.
"""

import argparse
import base64
import concurrent.futures
import csv
import ctypes
import glob
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import urllib.parse

RUN_DIR = os.environ.get("BRINGUP_RUN_DIR", "/run/bringup")
BUILD_LOG = os.path.join(RUN_DIR, "build.json")
CREDENTIALS = os.path.join(RUN_DIR, "credentials")
MARKER = ".bringup-env.json"
TAINT = ".bringup-tainted"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IMPORT_LIMIT_S = 600
KEPT_OUTPUT = 6000
HASHING_THREADS = 4


class Failure(Exception):
    """Say why there is nothing to judge."""


def main(argv):
    """Run one command and return its exit status."""
    args = parser().parse_args(argv)
    # Root's umask may be 077; what is built here is for every user of the host to read.
    os.umask(0o022)
    try:
        return COMMANDS[args.command](args) or 0
    except (Failure, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        text = str(error) if isinstance(error, Failure) else "%s: %s" % (type(error).__name__, error)
        sys.stderr.write("bringup: %s: %s\n" % (args.command, text))
        return 1


def parser():
    """Return the argument parser."""
    top = argparse.ArgumentParser(prog="host_env.py")
    commands = top.add_subparsers(dest="command", required=True)
    for name, arguments in (
        ("look", ["uv", "minor"]),
        ("check", ["env"]),
        ("heal", ["order", "env"]),
        ("create", ["order"]),
        ("install", ["order", "step"]),
        ("imports", ["order", "step"]),
        ("patch", ["order"]),
        ("finish", ["order"]),
        ("report", []),
        ("collect", ["home"]),
    ):
        one = commands.add_parser(name)
        for argument in arguments:
            one.add_argument(argument)
        if name in ("check", "heal"):
            one.add_argument("--deep", action="store_true")
        if name == "collect":
            one.add_argument("--keep", type=int, required=True)
            one.add_argument("--protect", action="append", default=[])
    return top


# ---------------------------------------------------------------------------------------------------------
# The order, the log, and files that survive a power cut.


def read_json(path):
    """Return a JSON document, or None when there is none that can be read."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError):
        return None


def read_order(path):
    """Return the order; raise Failure when it cannot be read."""
    order = read_json(path)
    if not isinstance(order, dict) or order.get("schema") != 1:
        raise Failure("%s: wanted a build order of schema 1" % path)
    return order


def step_of(order, name):
    """Return a step of the order by name."""
    for step in order["steps"]:
        if step["name"] == name:
            return step
    raise Failure("the order has no step %s" % name)


def replace(path, data, mode):
    """Replace a file by rename, synced, its directory synced too."""
    directory = os.path.dirname(path)
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".bringup-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_directory(directory)


def sync_directory(path):
    """Make a rename in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file_system(path):
    """Write out everything of the file system that holds PATH."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "syncfs", path)
    finally:
        os.close(descriptor)


def read_log():
    """Return the log of the build, empty where there is none."""
    log = read_json(BUILD_LOG)
    return log if isinstance(log, dict) else {"schema": 1, "env": None, "actions": [], "snapshot": {}}


def write_log(log):
    """Keep the log for the controller."""
    replace(BUILD_LOG, json.dumps(log, sort_keys=True).encode(), 0o600)


def note(env, action, snapshot=None, **seen):
    """Append what an action saw to the log of this environment's build."""
    log = read_log()
    if log["env"] != env:
        log = {"schema": 1, "env": env, "actions": [], "snapshot": {}}
    log["actions"].append(dict(seen, action=action))
    if snapshot is not None:
        log["snapshot"] = snapshot
    write_log(log)


def report(args):
    """Print the log as one line."""
    del args
    sys.stdout.write(json.dumps(read_log(), sort_keys=True) + "\n")


# ---------------------------------------------------------------------------------------------------------
# What an environment holds. host_probe.py computes the same fingerprint: a test holds them together.


def site_of(env):
    """Return an environment's site-packages directory, or None."""
    found = sorted(glob.glob(os.path.join(glob.escape(env), "lib", "python3.*", "site-packages")))
    return found[-1] if found else None


def canonical(name):
    """Return the name of a distribution in its one spelling."""
    return re.sub(r"[-_.]+", "-", name).lower()


def record_rows(site, info):
    """Return [path, hash, size] of each line of a distribution's RECORD, byte code left out."""
    with open(os.path.join(site, info, "RECORD"), encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = [[*row, "", ""] for row in csv.reader(file) if row]
    return [row[:3] for row in rows if not row[0].endswith(".pyc") and "__pycache__" not in row[0]]


def fingerprint(site, info):
    """Return a digest of path, size and modification time of every file that RECORD names; None without one."""
    try:
        rows = record_rows(site, info)
    except OSError:
        return None
    lines = []
    for path, _, _ in rows:
        try:
            seen = os.stat(os.path.join(site, path))
            lines.append("%s\0%d\0%d" % (path, seen.st_size, seen.st_mtime_ns))
        except OSError:
            lines.append(path + "\0-")
    lines.sort()
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def distributions(site):
    """Return {name: (version, directory of its metadata)} of everything installed."""
    found = {}
    for name in sorted(os.listdir(site)):
        project, dash, version = name[: -len(".dist-info")].rpartition("-")
        if name.endswith(".dist-info") and dash:
            found[canonical(project)] = (version, name)
    return found


def snapshot_of(site):
    """Return {name: {"version", "fingerprint"}} of everything installed."""
    return {
        name: {"version": version, "fingerprint": fingerprint(site, info)}
        for name, (version, info) in distributions(site).items()
    }


def file_hash(path):
    """Return the hash of a file as RECORD spells it, or None when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    except OSError:
        return None
    return "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def unlike_record(site, names):
    """Return {name: [{"path", "wanted", "found"}]} of files whose bytes are not those of their RECORD.

    A path that several of the distributions claim is right when one of their records fits: the last one
    installed wrote it.
    """
    known = distributions(site)
    claims = {}
    for name in names:
        for path, wanted, _ in record_rows(site, known[name][1]):
            if wanted.startswith("sha256="):
                claims.setdefault(path, []).append((name, wanted))
    with concurrent.futures.ThreadPoolExecutor(HASHING_THREADS) as pool:
        hashes = pool.map(file_hash, (os.path.join(site, path) for path in claims))
        found = dict(zip(claims, hashes))  # noqa: B905 (Python 3.8 has no strict)
    unlike = {}
    for path, claimed in claims.items():
        if found[path] not in [wanted for _, wanted in claimed]:
            for name, wanted in claimed:
                unlike.setdefault(name, []).append({"path": path, "wanted": wanted, "found": found[path]})
    return unlike


# ---------------------------------------------------------------------------------------------------------
# Looking before the build.


def look(args):
    """Print what the controller must know before it sends anything."""
    answer = {
        "machine": platform.machine(),
        "uv_sha256": None,
        "uv_version": None,
        "interpreters": interpreters(args.minor),
    }
    if os.path.isfile(args.uv):
        with open(args.uv, "rb") as file:
            answer["uv_sha256"] = hashlib.sha256(file.read()).hexdigest()
        answer["uv_version"] = said([args.uv, "--version"])
    sys.stdout.write(json.dumps(answer, sort_keys=True) + "\n")


def said(argv):
    """Return what a command prints, or None when it does not run well."""
    try:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={"PATH": PATH}, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()


def interpreters(minor):
    """Return the host's own interpreters of a minor such as 3.11, each as {"path", "version"}."""
    found = []
    for directory in PATH.split(":"):
        for name in ("python" + minor, "python3"):
            path = os.path.join(directory, name)
            real = os.path.realpath(path)
            if not os.access(path, os.X_OK) or real in [seen["real"] for seen in found]:
                continue
            # An environment's interpreter may vanish with its environment.
            code = "import sys;print('%d.%d.%d' % sys.version_info[:3], sys.prefix == sys.base_prefix)"
            version, _, is_own = (said([path, "-I", "-S", "-c", code]) or "").partition(" ")
            if is_own == "True" and version.rpartition(".")[0] == minor:
                found.append({"path": path, "version": version, "real": real})
    return [{"path": seen["path"], "version": seen["version"]} for seen in found]


def check(args):
    """Print which distributions of a complete environment are not what its marker says."""
    marker, site = read_json(os.path.join(args.env, MARKER)), site_of(args.env)
    if not isinstance(marker, dict) or site is None:
        raise Failure("%s is not a complete environment" % args.env)
    recorded, found = marker.get("files_fingerprint") or {}, snapshot_of(site)
    differing = {name for name, seen in found.items() if recorded.get(name) != seen["fingerprint"]}
    differing |= set(recorded) - set(found)
    if args.deep:
        whole = [name for name, seen in found.items() if seen["fingerprint"] is not None]
        differing |= set(unlike_record(site, whole))
    python = os.path.join(args.env, "bin", "python")
    answer = {"differing": sorted(differing), "has_interpreter": os.access(os.path.realpath(python), os.X_OK)}
    sys.stdout.write(json.dumps(answer, sort_keys=True) + "\n")


# ---------------------------------------------------------------------------------------------------------
# Damage: what must not come back out of the cache.


def heal(args):
    """Evict the distributions of ENV whose files differ from RECORD; taint every environment sharing them."""
    order = read_order(args.order)
    site = site_of(args.env)
    if site is None:
        return
    marker = read_json(os.path.join(args.env, MARKER)) or {}
    recorded = marker.get("files_fingerprint") or {}
    suspects = [
        name
        for name, (_, info) in distributions(site).items()
        if os.path.exists(os.path.join(site, info, "RECORD"))
        and (args.deep or recorded.get(name) != fingerprint(site, info))
    ]
    unlike = unlike_record(site, suspects)
    tainted = evict(order, site, unlike)
    note(order["env"], "heal", unlike=unlike, tainted=tainted)
    for name in sorted(unlike):
        say("%s differs from its RECORD: evicted from the cache" % name)


def evict(order, site, unlike):
    """Forget distributions in uv's cache; return the environments that share a differing file, now tainted."""
    tainted = []
    for name, files in sorted(unlike.items()):
        run_uv(order, ["cache", "clean", name], {})
        for file in files:
            tainted += taint(order["home"], site, name, file["path"])
    return sorted(set(tainted))


def taint(home, site, name, path):
    """Mark every complete environment whose PATH is the very file of SITE; return their names."""
    try:
        seen = os.stat(os.path.join(site, path))
    except OSError:
        return []
    marked = []
    for env in complete_environments(home):
        other = site_of(env)
        try:
            twin = os.stat(os.path.join(other or env, path))
        except OSError:
            continue
        if (twin.st_dev, twin.st_ino) != (seen.st_dev, seen.st_ino):
            continue
        marked.append(os.path.basename(env))
        if not os.path.exists(os.path.join(env, TAINT)):
            why = {"schema": 1, "distribution": name, "path": path, "since_s": time.time()}
            replace(os.path.join(env, TAINT), json.dumps(why).encode(), 0o644)
    return marked


def complete_environments(home):
    """Return the paths of environments that have their marker."""
    found = glob.glob(os.path.join(glob.escape(home), "envs", "*"))
    return sorted(path for path in found if os.path.isfile(os.path.join(path, MARKER)))


# ---------------------------------------------------------------------------------------------------------
# Building.


def say(text):
    """Write one line for the log that the controller follows."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def make_directory(path, mode):
    """Create a directory and its parents; the last one gets MODE whatever the umask is."""
    os.makedirs(path, mode=0o755, exist_ok=True)
    os.chmod(path, mode)


def create(args):
    """Remove unfinished environments and make an empty one of the wanted minor."""
    order = read_order(args.order)
    env, home = order["env"], order["home"]
    for path in (home, os.path.join(home, "envs")):
        make_directory(path, 0o755)
    make_directory(os.path.join(home, "cache"), 0o700)
    remove_quietly(CREDENTIALS)
    swept = sweep(home)
    if os.path.lexists(env):
        raise Failure("%s is there already, and complete" % env)
    chosen = interpreters(order["python"])
    if not chosen:
        note(env, "create", status=1, interpreter=None, output="", swept=swept)
        return
    argv = ["venv", "--no-project", "--python", chosen[0]["path"], env]
    status, output = run_uv(order, argv, {})
    site = site_of(env)
    if status == 0 and site is None:
        status, output = 1, output + "no site-packages directory was made"
    snapshot = snapshot_of(site) if site else {}
    note(env, "create", snapshot, status=status, interpreter=chosen[0], output=output, swept=swept)


def sweep(home):
    """Remove environments without a marker: the work lock says that nobody is building them any more."""
    swept = []
    for path in sorted(glob.glob(os.path.join(glob.escape(home), "envs", "*"))):
        if not os.path.isfile(os.path.join(path, MARKER)) and os.path.isdir(path):
            say("removing %s, which was never finished" % path)
            shutil.rmtree(path)
            swept.append(os.path.basename(path))
    return swept


def run_uv(order, argv, secrets):
    """Run uv without anybody's settings; return (status, the end of what it said).

    Its children inherit the work lock, so a uv that outlives this script keeps other builders out.
    """
    environment = {
        "PATH": PATH,
        # There is no such directory: no .netrc and no settings of root are read.
        "HOME": os.path.join(RUN_DIR, "no-home"),
        "LC_ALL": "C.UTF-8",
        "UV_HTTP_TIMEOUT": "120",
    }
    environment.update(proxy_variables(order.get("proxy")))
    environment.update(secrets)
    command = [
        order["uv"], *argv, "--no-config", "--no-python-downloads", "--system-certs", "--no-progress",
        "--color", "never", "--cache-dir", os.path.join(order["home"], "cache"),
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        close_fds=False,
        cwd="/",
    )
    kept = ""
    for line in io.TextIOWrapper(process.stdout, encoding="utf-8", errors="replace"):
        say("  " + line.rstrip())
        kept = (kept + line)[-KEPT_OUTPUT:]
    status = process.wait()
    return (status if status >= 0 else 128 - status), kept


def proxy_variables(url):
    """Return the variables that name a proxy; none without one."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") if url else ()
    return {spelt: url for name in names for spelt in (name, name.lower())}


def with_login(url, login):
    """Return a URL with user and password in it."""
    scheme, _, rest = url.partition("://")
    user, password = (urllib.parse.quote(login[key] or "", safe="") for key in ("user", "password"))
    return "%s://%s:%s@%s" % (scheme, user, password, rest)


def take_credentials():
    """Return {index: {"user", "password"}}, the proxy's under "@proxy", and remove the file that held them."""
    secrets = read_json(CREDENTIALS)
    remove_quietly(CREDENTIALS)
    return secrets if isinstance(secrets, dict) else {}


def remove_quietly(path):
    """Remove a file; a missing one is fine."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def install_call(order, call, credentials, extra=()):
    """Install the files of one index with one uv call; return (status, output)."""
    lines = ["%s==%s --hash=sha256:%s" % (file["name"], file["version"], file["sha256"]) for file in call["files"]]
    secrets = {}
    if order.get("proxy") and credentials.get("@proxy"):
        secrets.update(proxy_variables(with_login(order["proxy"], credentials["@proxy"])))
    login = credentials.get(call["index"])
    if login:
        prefix = "UV_INDEX_" + re.sub(r"[^A-Z0-9]", "_", call["index"].upper())
        secrets.update({prefix + "_USERNAME": login["user"], prefix + "_PASSWORD": login["password"] or ""})
    source = ["--default-index", "%s=%s" % (call["index"], call["url"])] if call["url"] else []
    descriptor, requirements = tempfile.mkstemp(dir=RUN_DIR, prefix="requirements-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write("\n".join(lines) + "\n")
        argv = [
            "pip", "install", "--python", os.path.join(order["env"], "bin", "python"),
            "--no-deps", "--require-hashes", "--no-build", "--compile-bytecode", "--link-mode", "hardlink",
            *source, *extra, "--requirements", requirements,
        ]  # fmt: skip
        status, output = run_uv(order, argv, secrets)
        # uv believes a page of an index for ten minutes; a site may have put the file there since.
        unseen = sorted(set(re.findall(r"no version of ([A-Za-z0-9._-]+)==", output))) if status else []
        if unseen:
            say("reading the pages of %s again" % ", ".join(unseen))
            refresh = [part for name in unseen for part in ("--refresh-package", name)]
            status, output = run_uv(order, argv + refresh, secrets)
        return status, output
    finally:
        os.unlink(requirements)


def install(args):
    """Install one step; record what was added and changed, and whether every byte is its RECORD's."""
    order, started = read_order(args.order), time.time()
    step, env = step_of(order, args.step), order["env"]
    credentials = take_credentials()
    site = site_of(env)
    if site is None or os.path.exists(os.path.join(env, MARKER)):
        raise Failure("%s is not being built" % env)
    before = snapshot_of(site)
    foreign = sorted(name for name, seen in read_log()["snapshot"].items() if before.get(name) != seen)
    calls = []
    for call in step["calls"]:
        say("step %s: %d files from %s" % (step["name"], len(call["files"]), call["index"]))
        status, output = install_call(order, call, credentials)
        calls.append({"index": call["index"], "status": status, "output": output})
        if status != 0:
            break
    added = [name for name in distributions(site) if name not in before]
    unlike, healed, tainted, misrecorded = unlike_record(site, added), [], [], {}
    if unlike and all(call["status"] == 0 for call in calls):
        # Somebody wrote into a file of another environment, and with it into the cache: fetch it anew, once.
        healed = sorted(unlike)
        tainted = evict(order, site, unlike)
        for call in step["calls"]:
            names = [file["name"] for file in call["files"] if canonical(file["name"]) in unlike]
            if names:
                extra = [part for name in names for part in ("--reinstall-package", name)]
                status, output = install_call(order, call, credentials, extra)
                calls.append({"index": call["index"], "status": status, "output": output})
        misrecorded = {name: [file["path"] for file in files] for name, files in unlike_record(site, added).items()}
        if misrecorded and calls[-1]["status"] == 0:
            # Fresh from a wheel with the locked hash: the bytes are right, and the wheel's own RECORD is wrong.
            for name, paths in misrecorded.items():
                rewrite_record(site, distributions(site)[name][1], paths)
        unlike = unlike_record(site, added)
    after = snapshot_of(site)
    note(
        env,
        "install",
        after,
        step=step["name"],
        calls=calls,
        added={name: after[name]["version"] for name in added if name in after},
        removed=sorted(name for name in before if name not in after),
        changed=changed(site, before, after),
        foreign=foreign,
        unlike=unlike,
        healed=healed,
        tainted=tainted,
        misrecorded=misrecorded,
        seconds=round(time.time() - started, 3),
    )


def changed(site, before, after):
    """Return {name: {"was", "is", "files"}} of earlier distributions whose version or bytes changed.

    A file written anew with the same bytes, as distributions that share one do, is no change.
    """
    differing = [name for name in before if name in after and before[name] != after[name]]
    found = {}
    for name in differing:
        # Each alone, so that another distribution's claim to the same path excuses nothing.
        files = unlike_record(site, [name]).get(name, [])
        if files or before[name]["version"] != after[name]["version"]:
            was, now = before[name]["version"], after[name]["version"]
            found[name] = {"was": was, "is": now, "files": files}
    return found


def imports(args):
    """Import each module of a step in a process of its own with an empty environment."""
    order = read_order(args.order)
    step, env = step_of(order, args.step), order["env"]
    python, modules = os.path.join(env, "bin", "python"), {}
    for module in step["imports"]:
        say("import %s" % module)
        started = time.time()
        with tempfile.TemporaryDirectory(dir=RUN_DIR, prefix="import-") as nowhere:
            status, output = imported(python, module, nowhere)
        modules[module] = {"status": status, "output": output, "seconds": round(time.time() - started, 3)}
    site = site_of(env)
    before, after = read_log()["snapshot"], snapshot_of(site)
    note(env, "imports", after, step=step["name"], modules=modules, changed=changed(site, before, after))


def imported(python, module, directory):
    """Return (status, the end of the output) of importing a module; 124 when it takes too long."""
    process = subprocess.Popen(
        [python, "-I", "-B", "-c", "import importlib, sys; importlib.import_module(sys.argv[1])", module],
        env={},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        close_fds=False,
    )
    try:
        output = process.communicate(timeout=IMPORT_LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0]
        return 124, "no answer within %d s" % IMPORT_LIMIT_S
    status = process.returncode
    return (status if status >= 0 else 128 - status), output.decode("utf-8", "replace")[-KEPT_OUTPUT:]


def finish(args):
    """Make the environment readable and durable, and write its marker last."""
    order = read_order(args.order)
    env, site = order["env"], site_of(order["env"])
    if site is None:
        raise Failure("%s is not being built" % env)
    open_to_readers(env)
    snapshot = snapshot_of(site)
    marker = {
        "schema": 1,
        "digest": order["digest"],
        "generation": order["generation"],
        "python": order["python"],
        "platform": order["platform"],
        "distributions": {name: seen["version"] for name, seen in snapshot.items()},
        "files_fingerprint": {name: seen["fingerprint"] for name, seen in snapshot.items()},
        "patches": ["%s %s" % (patch["distribution"], patch["version"]) for patch in order["patches"]],
        "built_at_s": time.time(),
    }
    jit = os.path.join(order["jit_cache"], order["digest"])
    os.makedirs(order["jit_cache"], exist_ok=True)
    make_directory(jit, 0o1777)  # each user makes a directory of its own in it; the launcher checks its owner
    sync_file_system(env)
    replace(os.path.join(env, MARKER), (json.dumps(marker, sort_keys=True) + "\n").encode(), 0o644)
    sync_directory(os.path.dirname(env))
    remove_quietly(args.order)
    note(env, "finish", snapshot)
    say("%s is complete: %d distributions" % (env, len(snapshot)))


def open_to_readers(env):
    """Let every user read what is in the environment, and run what root can run."""
    for directory, names, files in os.walk(env):
        for name in ["", *names, *files]:
            path = os.path.join(directory, name) if name else directory
            seen = os.lstat(path)
            if stat.S_ISLNK(seen.st_mode):
                continue
            wanted = seen.st_mode | 0o444
            if stat.S_ISDIR(seen.st_mode) or seen.st_mode & 0o100:
                wanted |= 0o111
            if wanted != seen.st_mode:
                os.chmod(path, stat.S_IMODE(wanted))


# ---------------------------------------------------------------------------------------------------------
# Patches.


def patch(args):
    """Apply the order's unified diffs; a file whose bytes are neither before nor after is left alone."""
    order = read_order(args.order)
    env, site = order["env"], site_of(order["env"])
    done = []
    for one in order["patches"]:
        done.append(apply_patch(env, site, one))
        say("patch %s %s: %s" % (one["distribution"], one["version"], done[-1]["problem"] or "applied"))
    note(env, "patch", snapshot_of(site), patches=done)


def apply_patch(env, site, one):
    """Apply one patch; return {"distribution", "version", "problem", "files"}."""
    result = {"distribution": one["distribution"], "version": one["version"], "problem": None, "files": []}
    version, info = distributions(site).get(canonical(one["distribution"]), (None, None))
    if version != one["version"]:
        result["problem"] = "version wanted %s, found %s" % (one["version"], version)
        return result
    try:
        hunks = parse_diff(one["diff"])
        written = {}
        for path, hashes in sorted(one["files"].items()):
            full = inside(site, path)
            with open(full, "rb") as file:
                old = file.read()
            found = hashlib.sha256(old).hexdigest()
            result["files"].append({"path": path, "wanted": hashes["before"], "found": found})
            if found != hashes["before"]:
                raise Failure("%s: sha256 before the patch is not the recorded one" % path)
            new = patched(old, hunks.pop(path, None), path)
            found = hashlib.sha256(new).hexdigest()
            if found != hashes["after"]:
                result["files"].append({"path": path, "wanted": hashes["after"], "found": found})
                raise Failure("%s: sha256 after the patch is not the recorded one" % path)
            written[path] = (full, new)
        if hunks:
            raise Failure("the diff changes files without recorded hashes: %s" % ", ".join(sorted(hunks)))
    except (Failure, OSError) as error:
        result["problem"] = str(error)
        return result
    # Every hash is right, so nothing is left half patched. Write and rename: the old inode may be the cache's.
    for full, new in written.values():
        replace(full, new, stat.S_IMODE(os.stat(full).st_mode))
    rewrite_record(site, info, list(written))
    sources = [full for full, _ in written.values() if full.endswith(".py")]
    if sources:
        argv = [os.path.join(env, "bin", "python"), "-I", "-m", "compileall", "-q", "-f", *sources]
        subprocess.run(argv, env={}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
    return result


def inside(site, path):
    """Return the full path of a file below SITE; raise Failure for one that leaves it."""
    full = os.path.normpath(os.path.join(site, path))
    if not full.startswith(site + "/"):
        raise Failure("%s leaves the environment" % path)
    return full


def rewrite_record(site, info, paths):
    """Put the hashes and sizes of these files into RECORD as they are now; a file that is not there loses its row."""
    record = os.path.join(site, info, "RECORD")
    with open(record, encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = list(csv.reader(file))
    kept = []
    for row in rows:
        full = os.path.join(site, row[0]) if row else ""
        if row and row[0] in paths:
            if not os.path.exists(full):
                continue
            row = [row[0], file_hash(full), str(os.path.getsize(full))]
        kept.append(row)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(kept)
    replace(record, text.getvalue().encode("utf-8", "surrogateescape"), 0o644)


_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def parse_diff(text):
    """Return {path: [(first line, [(mark, line), ...]), ...]} of a unified diff; one leading a/ or b/ is cut."""
    files, hunks, body, left = {}, None, None, [0, 0]
    for line in text.splitlines(True):
        if left[0] > 0 or left[1] > 0:
            mark = line[:1]
            if mark == "\\":
                body[-1] = (body[-1][0], body[-1][1].rstrip("\n"))
                continue
            if mark not in " +-":
                # Editors strip the space of an empty context line.
                mark, line = " ", " " + line
            left[0] -= mark != "+"
            left[1] -= mark != "-"
            body.append((mark, line[1:]))
        elif line.startswith("\\") and body:
            body[-1] = (body[-1][0], body[-1][1].rstrip("\n"))
        elif line.startswith("+++ "):
            name = line[4:].split("\t")[0].strip()
            hunks = files.setdefault(name[2:] if name[:2] in ("a/", "b/") else name, [])
        elif line.startswith("@@"):
            found = _HUNK.match(line)
            if not found or hunks is None:
                raise Failure("the diff has a hunk that cannot be read: %s" % line.strip())
            start, old, _, new = (int(part) if part else 1 for part in found.groups())
            left, body = [old, new], []
            hunks.append((start if old else start + 1, body))
    if left[0] or left[1]:
        raise Failure("the diff ends within a hunk")
    return files


def patched(data, hunks, path):
    """Return DATA with the hunks applied where they say, without searching for a better place."""
    if hunks is None:
        raise Failure("the diff does not touch %s" % path)
    lines = data.decode("utf-8").splitlines(True)
    result, position = [], 0
    for start, body in hunks:
        if start - 1 < position or start - 1 > len(lines):
            raise Failure("%s: a hunk lies outside the file" % path)
        result += lines[position : start - 1]
        position = start - 1
        for mark, line in body:
            if mark != "+":
                if position >= len(lines) or lines[position] != line:
                    raise Failure("%s: line %d is not what the diff expects" % (path, position + 1))
                position += 1
            if mark != "-":
                result.append(line)
    return "".join(result + lines[position:]).encode("utf-8")


# ---------------------------------------------------------------------------------------------------------
# Collection.


def collect(args):
    """Remove all but the newest KEEP unprotected environments, leaving alone what any process uses."""
    envs = os.path.join(args.home, "envs")
    current = os.path.basename(os.path.realpath(os.path.join(args.home, "current")))
    old = [path for path in complete_environments(args.home) if os.path.basename(path) not in [current, *args.protect]]
    old.sort(key=lambda path: (read_json(os.path.join(path, MARKER)) or {}).get("built_at_s") or 0)
    removable = old[: len(old) - args.keep] if args.keep < len(old) else []
    busy = in_use(envs) if removable else set()
    removed = []
    for path in removable:
        name = os.path.basename(path)
        if name in busy:
            say("%s is in use: kept" % path)
            continue
        # Without its marker it is unfinished to everybody, whenever this stops.
        os.unlink(os.path.join(path, MARKER))
        sync_directory(path)
        shutil.rmtree(path)
        removed.append(name)
        say("%s is removed" % path)
    left = {os.path.basename(path).rpartition("-")[0] for path in complete_environments(args.home)}
    for digest in {name.rpartition("-")[0] for name in removed} - left:
        shutil.rmtree(os.path.join("/var/cache/bringup", digest), ignore_errors=True)


def in_use(envs):
    """Return the names of environments that a process maps, runs from, stands in or has in its variables."""
    pattern = re.compile(re.escape((envs + "/").encode()) + rb"([A-Za-z0-9_.-]+)")
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        seen = b""
        for name in ("maps", "cmdline", "environ"):
            try:
                with open("/proc/%s/%s" % (pid, name), "rb") as file:
                    seen += file.read() + b"\n"
            except OSError:
                continue
        for name in ("cwd", "exe", "root"):
            try:
                seen += os.readlink("/proc/%s/%s" % (pid, name)).encode("utf-8", "surrogateescape") + b"\n"
            except OSError:
                continue
        found.update(name.decode() for name in pattern.findall(seen))
    return found


COMMANDS = {
    "look": look,
    "check": check,
    "heal": heal,
    "create": create,
    "install": install,
    "imports": imports,
    "patch": patch,
    "finish": finish,
    "report": report,
    "collect": collect,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
