#!/usr/bin/env python3
"""Carry out the changes of one run on a host: one at a time, waited for, undone as a whole when one fails.

Usage:
  host_work.py --run RUN hold --who WHO [--hold-wait-s N] [--again]   hold the run lock while heartbeats arrive on
                                                       stdin; again: after a lost connection or a reboot
  host_work.py --run RUN do NAME [--limit-s N] [--detach [--job ID]] [--env K=V]... -- COMMAND...
  host_work.py --run RUN write PATH [--mode 0644] [--undo] (--content-b64 TEXT | --stdin --size N --sha256 H)
  host_work.py --run RUN remove PATH [--undo]
  host_work.py --run RUN link PATH TARGET [--undo]
  host_work.py --run RUN alternative NAME TARGET [--undo]
  host_work.py --run RUN cutover [--restart UNIT]...   from here on, a controller that vanishes is undone too
  host_work.py --run RUN fail REASON                   undo what this run recorded, print REASON, exit 1
  host_work.py --run RUN settle                        wait for work that outlived its controller
  host_work.py --run RUN commit                        forget what could be undone: the run succeeded
  host_work.py --run RUN reboot [--for-s N]            reboot soon, and keep other runs out until this one is back

Exit status: the command's own; 1 refused or failed; 2 usage; 75 the run lock is not, or no more, this run's, or
a lock was not to be had in time. Changes are journalled in /var/lib/bringup/journal.json before they are made, so
that they can be undone by a later process too. A run that begins puts back first what another one left half done.
The standard library only, Python 3.8.
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
LAST_RUN = os.path.join(RUN_DIR, "last-run.json")
CREDENTIALS = os.path.join(RUN_DIR, "credentials")
JOBS = os.path.join(RUN_DIR, "jobs")
JOURNAL = os.path.join(STATE_DIR, "journal.json")
RESERVATION = os.path.join(STATE_DIR, "reservation.json")
HEARTBEAT_LIMIT_S = float(os.environ.get("BRINGUP_HEARTBEAT_LIMIT_S", "30"))
BOOT_ID = "/proc/sys/kernel/random/boot_id"
# Long enough for the last words of a run's command to reach its controller.
REBOOT_DELAY_S = 1
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
    if args.action == "fail":
        return fail(args)
    actions = {
        "write": write,
        "remove": remove,
        "link": link,
        "alternative": alternative,
        "cutover": cutover,
        "commit": commit,
        "reboot": reboot,
        "settle": lambda _: 0,
    }
    try:
        if args.action == "do" and not command:
            raise ValueError("no command behind --")
        lock = take_work_lock(args)
        if lock is None:
            return LOCKED_OUT
        if args.action == "do" and args.detach:
            return do_detached(args, command, lock)  # what it undoes when it fails, it undoes under the lock
        if args.action == "do":
            status = run_limited(command, environment_of(args), args.limit_s, None, lock)
        else:
            status = actions[args.action](args)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        say("bringup: {}: {}".format(args.action, error))
        status = 1
    if status != 0 and args.action not in ("commit", "settle"):
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
    one.add_argument("--again", action="store_true")
    one = actions.add_parser("do")
    one.add_argument("name")
    one.add_argument("--limit-s", type=float, default=1800.0)
    one.add_argument("--detach", action="store_true")
    one.add_argument("--job", type=int, default=0)
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
    one = actions.add_parser("reboot")
    one.add_argument("--for-s", type=float, default=1800.0)
    return top


def say(text):
    """Write one line for people; nobody may be there to read it."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        pass


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
    descriptor = os.open(RUN_LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    os.fchmod(descriptor, 0o644)
    in_the_way = wait_for_run_lock(args, descriptor)
    last = read_json(LAST_RUN) or {}
    if in_the_way is None and args.again and (last.get("run") not in (None, args.run) or last.get("undone")):
        in_the_way = last
    if in_the_way is not None:
        print(json.dumps({"held": False, "holder": in_the_way}), flush=True)
        return LOCKED_OUT
    remove_quietly(RESERVATION)
    content = {"run": args.run, "who": args.who, "since_s": time.time(), "pid": os.getpid()}
    note_holder(descriptor, content)
    replace(LAST_RUN, as_json({"run": args.run, "who": args.who, "undone": False}), 0o600)
    if not put_back_leftovers(args):
        note_holder(descriptor, None)
        return LOCKED_OUT
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # a hang-up shows as the end of stdin; finish what follows
    print(json.dumps({"held": True}), flush=True)
    said_bye = heartbeats(descriptor)
    journal = read_json(JOURNAL)
    if not said_bye and journal and journal.get("cutover") and journal.get("run") == args.run:
        # The controller vanished in the middle of a cutover: wait for what it started, then put all back.
        note_holder(descriptor, dict(content, has_vanished=True))
        waiting = argparse.Namespace(run=args.run, wait_s=7200.0, action="undo")
        if take_work_lock(waiting) is not None:
            replace(LAST_RUN, as_json({"run": args.run, "who": args.who, "undone": True}), 0o600)
            undo(args.run)
    remove_quietly(CREDENTIALS)
    if not is_at_work():
        remove_quietly(CREDENTIALS + "-apt")  # an apt that outlives its controller still reads it, and removes it
    note_holder(descriptor, None)
    return 0


def is_at_work():
    """Return whether a command of some run holds the work lock."""
    descriptor = os.open(WORK_LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return True
    finally:
        os.close(descriptor)


def wait_for_run_lock(args, descriptor):
    """Take the run lock on DESCRIPTOR; return None, or who is in the way.

    A holder that lives is heard of within one heartbeat, and nobody waits for it longer than asked. One that fell
    silent is waited for until it lets go, and so is a run whose reboot brought the host down.
    """
    started = time.monotonic()
    first_beat = os.fstat(descriptor).st_mtime_ns
    while True:
        waited_s = time.monotonic() - started
        holder, limit_s = reserved_by_another(args.run), args.hold_wait_s
        if holder is not None:
            is_up_again = holder.get("boot_id") not in (None, boot_id())
            # Up again, its run comes back as soon as we could; still up, the reboot is about to happen.
            limit_s = HEARTBEAT_LIMIT_S if is_up_again else 2 * HEARTBEAT_LIMIT_S
            if is_up_again and waited_s >= limit_s:
                holder = None
        if holder is None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            holder = read_json(RUN_LOCK) or {}
            if holder.get("has_vanished"):
                limit_s = args.wait_s
            elif not holder:
                limit_s = max(limit_s, 5)  # it is about to end, or to say who it is
            elif os.fstat(descriptor).st_mtime_ns == first_beat:
                limit_s = max(limit_s, HEARTBEAT_LIMIT_S + 5)
        if waited_s >= limit_s:
            return holder
        time.sleep(0.1)


def reserved_by_another(run):
    """Return the reservation of a run that is not RUN and has not run out, or None."""
    reserved = read_json(RESERVATION)
    if not isinstance(reserved, dict) or reserved.get("run") == run or reserved.get("until_s", 0) < time.time():
        return None
    return reserved


def boot_id():
    """Return what names this boot of the host."""
    with open(BOOT_ID) as file:
        return file.read().strip()


def note_holder(descriptor, content):
    """Write into the run lock who holds it; None: nobody."""
    os.ftruncate(descriptor, 0)
    if content is not None:
        os.pwrite(descriptor, as_json(content), 0)


def put_back_leftovers(args):
    """Undo what another run changed and neither finished nor undid; return False when its work does not end."""
    journal = read_json(JOURNAL)
    if not journal or journal.get("run") == args.run:
        return True
    lock = take_work_lock(argparse.Namespace(run=args.run, wait_s=args.wait_s, action="undo"))
    if lock is None:
        print(json.dumps({"held": False, "holder": read_json(WORK_LOCK) or {}}), flush=True)
        return False
    undo(journal.get("run"))
    os.close(lock)
    return True


def heartbeats(descriptor):
    """Read stdin until it ends; return whether the controller said goodbye. The lock's time shows the last beat."""
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
        os.utime(descriptor)
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
        job = getattr(args, "job", 0)
        if job and holder.get("run") == args.run and holder.get("job") == job:
            end = time.monotonic() + args.wait_s  # we come back to it: it has a limit of its own
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
    note = {"run": args.run, "name": name, "since_s": time.time(), "pid": os.getpid()}
    os.pwrite(descriptor, as_json(dict(note, job=getattr(args, "job", 0))), 0)
    holder = (read_json(RUN_LOCK) or {}).get("run")
    if holder != args.run and args.action not in ("undo", "fail"):
        # A connection that comes back after its silence finds its run over, and maybe another one at work.
        say("bringup: {} holds this host now, not {}".format("run " + holder if holder else "no run", args.run))
        os.close(descriptor)
        return None
    return descriptor


# ---------------------------------------------------------------- commands


def environment_of(args):
    """Return the variables of a command: ours, and those that were given."""
    environment = dict(os.environ)
    environment.update(pair.split("=", 1) for pair in args.env)
    return environment


def do_detached(args, command, lock):
    """Run COMMAND so that it outlives this process, and return its status; a job that is done is not done again.

    Jobs are numbered within their run. The same one is asked for again when its controller lost the connection:
    whoever comes second finds the work lock taken until the job is over, and its result. One that waited for the
    lock while its run went on without it comes too late and does nothing.
    """
    job = os.path.join(JOBS, "{}-{}".format(args.run, args.name))
    result, log = os.path.join(job, "result.json"), os.path.join(job, "log")
    last = os.path.join(JOBS, args.run + ".last")
    begun = read_json(last) or 0
    done = read_json(result)
    if args.job and args.job < begun:
        say("bringup: job {} of run {} has begun: number {} is over".format(begun, args.run, args.job))
        return LOCKED_OUT
    if args.job and done is not None and done.get("job") == args.job:
        os.close(lock)
        return follow(log, result, None)
    os.makedirs(job, mode=0o700, exist_ok=True)
    replace(last, as_json(args.job), 0o600)
    remove_quietly(result)
    open(log, "wb").close()
    child = os.fork()
    if child == 0:
        detached(args, command, log, result, lock)
    os.close(lock)  # the child holds it now
    return follow(log, result, child)


def detached(args, command, log, result, lock):
    """Run COMMAND in a session of its own; write its status; undo the run when it failed. Never returns."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        started = time.time()
        status = run_limited(command, environment_of(args), args.limit_s, log, lock)
        if status != 0:
            undo(args.run)
        seconds = round(time.time() - started, 3)
        replace(result, as_json({"status": status, "seconds": seconds, "job": args.job}), 0o600)
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
        # A shell ends at once and its children may not listen: the group counts, not the process that leads it.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                end = time.monotonic() + 10
                while time.monotonic() < end:
                    process.poll()
                    os.killpg(process.pid, 0)
                    time.sleep(0.1)
            except ProcessLookupError:
                break
        process.poll()
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
    """Copy the log to stdout as it grows until the result is there; return the job's status.

    ``child`` None: the job is over. When nobody reads any more this process ends, and the job goes on.
    """
    with open(log, "rb") as stream:
        while True:
            done = read_json(result)
            chunk = stream.read(65536)
            if chunk:
                try:
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.buffer.flush()
                except OSError:
                    os._exit(1)
                continue
            if done is not None:
                return int(done["status"])
            if child is not None:
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
    """Bring back what RUN journalled, last change first, and restart the units of an open cutover."""
    journal = read_json(JOURNAL)
    if not journal or journal.get("run") != run:
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
            subprocess.run(["update-alternatives", "--quiet", "--set", entry["name"], was["value"]], check=True)
    elif not entry["existed"]:
        remove_quietly(entry["path"])
    elif "target" in entry:
        replace_link(entry["path"], entry["target"])
    else:
        replace(entry["path"], base64.b64decode(entry["content_b64"]), entry["mode"])


def fail(args):
    """Undo this run's changes, where there are any, and end with the reason."""
    journal = read_json(JOURNAL)
    if journal and journal.get("run") == args.run and take_work_lock(args) is not None:
        undo(args.run)
    say(args.reason)
    return 1


def reboot(args):
    """Reboot in a moment, keep other runs out until this one had time to come back, and print this boot's name.

    Reserved and asked for in one step: a controller that dies cannot leave the one without the other.
    """
    before = boot_id()
    now, who = time.time(), (read_json(RUN_LOCK) or {}).get("who")
    note = {"run": args.run, "who": who, "boot_id": before, "since_s": now, "until_s": now + args.for_s}
    replace(RESERVATION, as_json(note), 0o644)
    # systemd starts it: whatever ends with our session must not end the reboot.
    started = subprocess.run(
        ["systemd-run", "--quiet", "--collect", "--timer-property=AccuracySec=100ms",
         "--on-active={}s".format(REBOOT_DELAY_S), "systemctl", "reboot"],
        stdin=subprocess.DEVNULL,
        check=False,
    )  # fmt: skip
    if started.returncode != 0:
        remove_quietly(RESERVATION)
        return 1
    print(before, flush=True)
    return 0


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
