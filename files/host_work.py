#!/usr/bin/env python3
"""Carry out the changes of one run on a host: one at a time, waited for, undone as a whole when one fails.

Usage:
  host_work.py --run RUN hold --who WHO [--hold-wait-s N]   hold the run lock while heartbeats arrive on stdin
  host_work.py --run RUN do NAME [--limit-s N] [--detach] [--env K=V]... -- COMMAND...
  host_work.py --run RUN write PATH [--mode 0644] [--undo] (--content-b64 TEXT | --stdin --size N --sha256 H)
  host_work.py --run RUN remove PATH [--undo]
  host_work.py --run RUN link PATH TARGET [--undo]
  host_work.py --run RUN alternative NAME TARGET [--undo]
  host_work.py --run RUN cutover [--restart UNIT]...   from here on, a controller that vanishes is undone too
  host_work.py --run RUN fail REASON                   undo what this run recorded, print REASON, exit 1
  host_work.py --run RUN settle                        wait for work that outlived its controller
  host_work.py --run RUN commit                        forget what could be undone: the run succeeded
  host_work.py --run RUN reserve --for-s N             keep other runs out over a reboot we asked for

Exit status: the command's own; 1 refused or failed; 2 usage; 75 a lock was not to be had in time.
Changes are journalled in /var/lib/bringup/journal.json before they are made, so that they can be undone by a
later process too. The standard library only, Python 3.8.
"""

import argparse
import base64
import errno
import fcntl
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

RUN_DIR = os.environ.get("BRINGUP_RUN_DIR", "/run/bringup")
STATE_DIR = os.environ.get("BRINGUP_STATE_DIR", "/var/lib/bringup")
RUN_LOCK = os.path.join(RUN_DIR, "run.lock")
WORK_LOCK = os.path.join(RUN_DIR, "work.lock")
JOBS = os.path.join(RUN_DIR, "jobs")
JOURNAL = os.path.join(STATE_DIR, "journal.json")
RESERVATION = os.path.join(STATE_DIR, "reservation.json")
HEARTBEAT_LIMIT_S = float(os.environ.get("BRINGUP_HEARTBEAT_LIMIT_S", "30"))
LOCKED_OUT = 75


def main(argv):
    """Run one subcommand and return its exit status."""
    own, command = split_command(argv)
    args = parser().parse_args(own)
    os.umask(0o077)
    make_directory(RUN_DIR)  # readable by all: an unprivileged probe may read who holds the host
    make_directory(STATE_DIR)
    if args.action == "hold":
        return hold(args)
    if args.action == "reserve":
        replace(RESERVATION, as_json({"run": args.run, "until_s": time.time() + args.for_s}), 0o644)
        return 0
    actions = {
        "write": write,
        "remove": remove,
        "link": link,
        "alternative": alternative,
        "cutover": cutover,
        "fail": fail,
        "commit": commit,
        "settle": lambda _: 0,
    }
    try:
        lock = take_work_lock(args)
        if lock is None:
            return LOCKED_OUT
        if args.action == "do":
            status = do(args, command, lock)
        else:
            status = actions[args.action](args)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        say("bringup: {}: {}".format(args.action, error))
        status = 1
    if status not in (0, LOCKED_OUT) and args.action not in ("fail", "commit", "settle"):
        undo(args.run)
    return status


def split_command(argv):
    """Return our own arguments and the command behind the first ``--``."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def parser():
    """Return the argument parser."""
    top = argparse.ArgumentParser(prog="host_work.py")
    top.add_argument("--run", required=True)
    top.add_argument("--wait-s", type=float, default=900.0)
    actions = top.add_subparsers(dest="action", required=True)
    one = actions.add_parser("hold")
    one.add_argument("--who", required=True)
    one.add_argument("--hold-wait-s", type=float, default=0.0)
    one = actions.add_parser("do")
    one.add_argument("name")
    one.add_argument("--limit-s", type=float, default=1800.0)
    one.add_argument("--detach", action="store_true")
    one.add_argument("--env", action="append", default=[])
    one = actions.add_parser("write")
    one.add_argument("path")
    one.add_argument("--mode", type=lambda text: int(text, 8), default=0o644)
    one.add_argument("--undo", action="store_true")
    one.add_argument("--content-b64")
    one.add_argument("--stdin", action="store_true")
    one.add_argument("--size", type=int)
    one.add_argument("--sha256")
    for name, values in (("remove", []), ("link", ["target"]), ("alternative", ["target"])):
        one = actions.add_parser(name)
        one.add_argument("path")
        for value in values:
            one.add_argument(value)
        one.add_argument("--undo", action="store_true")
    one = actions.add_parser("cutover")
    one.add_argument("--restart", action="append", default=[])
    one = actions.add_parser("fail")
    one.add_argument("reason")
    actions.add_parser("commit")
    actions.add_parser("settle")
    one = actions.add_parser("reserve")
    one.add_argument("--for-s", type=float, default=1800.0)
    return top


def say(text):
    """Write one line for people."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def as_json(value):
    """Return JSON bytes with a newline."""
    return (json.dumps(value, sort_keys=True) + "\n").encode()


def read_json(path):
    """Return the JSON document at ``path``, or None when there is none that can be read."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read().decode())
    except (OSError, ValueError):
        return None


# ---------------------------------------------------------------- locks


def hold(args):
    """Hold the run lock until stdin ends, says ``bye``, or falls silent for 30 s."""
    end = time.monotonic() + args.hold_wait_s
    descriptor = os.open(RUN_LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    os.fchmod(descriptor, 0o644)
    while True:
        reserved = read_json(RESERVATION)
        mine = not reserved or reserved.get("run") == args.run or reserved.get("until_s", 0) < time.time()
        if mine:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
        if time.monotonic() >= end:
            holder = read_json(RUN_LOCK) if mine else reserved
            print(json.dumps({"held": False, "holder": holder}), flush=True)
            return LOCKED_OUT
        time.sleep(0.2)
    if reserved:
        remove_quietly(RESERVATION)
    content = as_json({"run": args.run, "who": args.who, "since_s": time.time(), "pid": os.getpid()})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # a hang-up shows as the end of stdin; finish what follows
    print(json.dumps({"held": True}), flush=True)
    said_bye = heartbeats()
    journal = read_json(JOURNAL)
    if not said_bye and journal and journal.get("cutover"):
        # The controller vanished in the middle of a cutover: wait for what it started, then put all back.
        waiting = argparse.Namespace(run=args.run, wait_s=7200.0, action="undo")
        if take_work_lock(waiting) is not None:
            undo(args.run)
    os.ftruncate(descriptor, 0)
    return 0


def heartbeats():
    """Read stdin until it ends; return whether the controller said goodbye."""
    buffer = b""
    while True:
        ready, _, _ = select.select([0], [], [], HEARTBEAT_LIMIT_S)
        if not ready:
            return False
        try:
            data = os.read(0, 4096)
        except OSError:
            return False
        if not data:
            return False
        buffer = (buffer + data)[-64:]
        if b"bye\n" in buffer:
            return True


def take_work_lock(args):
    """Return a descriptor that holds the work lock, inherited by children; None when it was not free."""
    descriptor = os.open(WORK_LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    os.fchmod(descriptor, 0o644)
    end = time.monotonic() + args.wait_s
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        holder = read_json(WORK_LOCK) or {}
        text = "{} of run {} (pid {})".format(holder.get("name"), holder.get("run"), holder.get("pid"))
        if time.monotonic() >= end:
            say("bringup: still at work on this host after {:.0f} s: {}".format(args.wait_s, text))
            return None
        if not told:
            say("bringup: waiting for {}".format(text))
            told = True
        time.sleep(0.1)
    os.set_inheritable(descriptor, True)
    name = getattr(args, "name", args.action)
    os.ftruncate(descriptor, 0)
    os.pwrite(
        descriptor,
        as_json({"run": args.run, "name": name, "since_s": time.time(), "pid": os.getpid()}),
        0,
    )
    holder = read_json(RUN_LOCK)
    if holder and holder.get("run") not in (None, args.run) and args.action not in ("undo", "fail"):
        say("bringup: run {} holds this host now, not {}".format(holder.get("run"), args.run))
        return None
    return descriptor


# ---------------------------------------------------------------- commands


def do(args, command, lock):
    """Run COMMAND under the work lock and return its status; detached, it outlives this process."""
    if not command:
        raise ValueError("no command behind --")
    environment = dict(os.environ)
    environment.update(pair.split("=", 1) for pair in args.env)
    if not args.detach:
        return run_limited(command, environment, args.limit_s, None, lock)
    job = os.path.join(JOBS, "{}-{}".format(args.run, args.name))
    os.makedirs(job, mode=0o700, exist_ok=True)
    result = os.path.join(job, "result.json")
    remove_quietly(result)
    log = os.path.join(job, "log")
    open(log, "wb").close()
    child = os.fork()
    if child == 0:
        detached(command, environment, args.limit_s, log, result, lock, args.run)
    os.close(lock)  # the child holds it now
    return follow(log, result, child)


def detached(command, environment, limit_s, log, result, lock, run):
    """Run COMMAND in a session of its own; write its status; undo the run when it failed. Never returns."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        started = time.time()
        status = run_limited(command, environment, limit_s, log, lock)
        if status != 0:
            undo(run)
        seconds = round(time.time() - started, 3)
        replace(result, as_json({"status": status, "seconds": seconds}), 0o600)
    finally:
        os._exit(0)


def run_limited(command, environment, limit_s, log, lock):
    """Run COMMAND in a process group that is ended at the limit; return its status, 124 at the limit."""
    output = open(log, "ab") if log else None  # noqa: SIM115 (closed below; None has no context)
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(lock,),
            preexec_fn=os.setpgrp,
        )
    except OSError as error:
        text = "bringup: cannot run {}: {}\n".format(command[0], error.strerror)
        if output:
            output.write(text.encode())
        else:
            sys.stderr.write(text)
        return 127
    try:
        status = process.wait(timeout=limit_s)
        return status if status >= 0 else 128 - status
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(timeout=10)
                break
            except subprocess.TimeoutExpired:
                continue
        text = "bringup: ended after its limit of {:.0f} s\n".format(limit_s)
        if output:
            output.write(text.encode())
        else:
            sys.stderr.write(text)
        return 124
    finally:
        if output:
            output.close()


def follow(log, result, child):
    """Copy the log to stdout as it grows until the result is there; return the job's status."""
    with open(log, "rb") as stream:
        while True:
            done = read_json(result)
            chunk = stream.read(65536)
            if chunk:
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
                continue
            if done is not None:
                return int(done["status"])
            ended, _ = os.waitpid(child, os.WNOHANG)
            if ended and read_json(result) is None:
                say("bringup: the job ended without a result")
                return 1
            time.sleep(0.05)


# ---------------------------------------------------------------- changes that can be undone


def write(args):
    """Replace a file by rename, its directory synced, so that a reader sees the old or the new one."""
    if args.stdin:
        receive(args)
        return 0
    content = base64.b64decode(args.content_b64 or "", validate=True)
    if args.undo:
        remember(args, file_entry(args.path))
    replace(args.path, content, args.mode)
    return 0


def receive(args):
    """Read exactly SIZE bytes from stdin into PATH; a wrong size or hash leaves the old file alone."""
    directory = os.path.dirname(args.path)
    make_directory(directory)
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".bringup-")
    digest = hashlib.sha256()
    left = args.size
    try:
        with os.fdopen(descriptor, "wb") as file:
            while left:
                data = sys.stdin.buffer.read(min(left, 1 << 20))
                if not data:
                    raise ValueError("stdin ended {} bytes early".format(left))
                digest.update(data)
                file.write(data)
                left -= len(data)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != args.sha256:
            raise ValueError("sha256 wanted {}, found {}".format(args.sha256, digest.hexdigest()))
        os.chmod(temporary, args.mode)
        os.rename(temporary, args.path)
        sync_directory(directory)
    except BaseException:
        remove_quietly(temporary)
        raise


def remove(args):
    """Remove a file if it is there."""
    if args.undo:
        remember(args, file_entry(args.path))
    remove_quietly(args.path)
    sync_directory(os.path.dirname(args.path))
    return 0


def link(args):
    """Point a symbolic link elsewhere in one step."""
    if args.undo:
        remember(args, file_entry(args.path))
    replace_link(args.path, args.target)
    return 0


def alternative(args):
    """Set an alternative to TARGET by hand; what it was is remembered."""
    if args.undo:
        found = query_alternative(args.path)
        remember(args, {"kind": "alternative", "name": args.path, "was": found})
    subprocess.run(["update-alternatives", "--quiet", "--set", args.path, args.target], check=True)
    return 0


def query_alternative(name):
    """Return {"status": auto|manual, "value": path} as update-alternatives reports it."""
    answer = subprocess.run(
        ["update-alternatives", "--query", name], stdout=subprocess.PIPE, universal_newlines=True, check=True
    )
    first = answer.stdout.split("\n\n")[0]
    fields = dict(line.split(": ", 1) for line in first.splitlines() if ": " in line)
    return {"status": fields.get("Status", "manual"), "value": fields.get("Value", "none")}


def file_entry(path):
    """Return what is needed to bring PATH back as it is now."""
    entry = {"kind": "file", "path": path, "existed": os.path.lexists(path)}
    if os.path.islink(path):
        entry["target"] = os.readlink(path)
    elif entry["existed"]:
        with open(path, "rb") as file:
            entry["content_b64"] = base64.b64encode(file.read()).decode()
        entry["mode"] = os.stat(path).st_mode & 0o7777
    return entry


def remember(args, entry):
    """Journal how to undo a change, before it is made. The first state of a path is the one that counts."""
    journal = read_json(JOURNAL) or {"entries": [], "cutover": False, "restart": []}
    journal["run"] = args.run
    key = (entry["kind"], entry.get("path") or entry.get("name"))
    known = [(old["kind"], old.get("path") or old.get("name")) for old in journal["entries"]]
    if key not in known:
        journal["entries"].append(entry)
    replace(JOURNAL, as_json(journal), 0o600)


def cutover(args):
    """Mark the journal: what follows can disturb what is serving."""
    journal = read_json(JOURNAL) or {"entries": []}
    journal.update(run=args.run, cutover=True, restart=args.restart)
    replace(JOURNAL, as_json(journal), 0o600)
    return 0


def undo(run):
    """Bring back what the journal names, last change first, and restart the units of an open cutover."""
    journal = read_json(JOURNAL)
    if not journal:
        return
    for entry in reversed(journal["entries"]):
        try:
            restore(entry)
        except (OSError, subprocess.CalledProcessError) as error:
            say("bringup: cannot undo {}: {}".format(entry.get("path") or entry.get("name"), error))
    touched = [entry.get("path") or "/usr/local/" + entry.get("name", "") for entry in journal["entries"]]
    if any(path.startswith(("/etc/ld.so.conf.d/", "/usr/local/cuda")) for path in touched):
        subprocess.run(["ldconfig"], check=False)
    if journal.get("cutover"):
        for unit in journal.get("restart", []):
            subprocess.run(["systemctl", "restart", unit], check=False)
    remove_quietly(JOURNAL)
    say("bringup: run {}: put back {}".format(run, ", ".join(touched) or "nothing"))


def restore(entry):
    """Undo one journalled change."""
    if entry["kind"] == "alternative":
        was = entry["was"]
        if was["status"] == "auto":
            subprocess.run(["update-alternatives", "--quiet", "--auto", entry["name"]], check=True)
        else:
            subprocess.run(
                ["update-alternatives", "--quiet", "--set", entry["name"], was["value"]], check=True
            )
    elif not entry["existed"]:
        remove_quietly(entry["path"])
    elif "target" in entry:
        replace_link(entry["path"], entry["target"])
    else:
        replace(entry["path"], base64.b64decode(entry["content_b64"]), entry["mode"])


def fail(args):
    """Undo this run's changes and end with the reason."""
    undo(args.run)
    say(args.reason)
    return 1


def commit(args):
    """Forget how to undo: the run succeeded."""
    del args
    remove_quietly(JOURNAL)
    return 0


# ---------------------------------------------------------------- files


def replace(path, content, mode):
    """Write CONTENT beside PATH, sync it, rename it over PATH, sync the directory."""
    directory = os.path.dirname(path)
    make_directory(directory)
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".bringup-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.rename(temporary, path)
    except BaseException:
        remove_quietly(temporary)
        raise
    sync_directory(directory)


def make_directory(path):
    """Create PATH and its parents, readable by all whatever the umask is."""
    if not os.path.isdir(path):
        make_directory(os.path.dirname(path))
        os.mkdir(path)
        os.chmod(path, 0o755)


def replace_link(path, target):
    """Make PATH a symbolic link to TARGET in one step."""
    directory = os.path.dirname(path)
    make_directory(directory)
    temporary = os.path.join(directory, ".bringup-link-{}".format(os.getpid()))
    remove_quietly(temporary)
    os.symlink(target, temporary)
    os.rename(temporary, path)
    sync_directory(directory)


def remove_quietly(path):
    """Remove PATH; a missing one is fine."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def sync_directory(path):
    """Make a rename in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
