"""Run ``bringup apply`` under observation, take its controller or its network away, and watch the host meanwhile.

A point is one remote command of a run, named by where it stands in the event stream: the step, the last command
that changed something, how many came after it, and what it is. The same point comes again in another run.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import signal
import subprocess
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from bringup.lab.lab import Lab
from tests.e2e import variant
from tests.e2e.rig import BRINGUP, LAB_INVENTORY, Rig

# ---------------------------------------------------------------- points


@dataclass(frozen=True)
class Point:
    """One remote command of a run."""

    step: str
    after: str
    offset: int
    label: str

    def __str__(self) -> str:
        return f"{self.step}: {self.label} ({self.offset} after {self.after})"


_LOOKS = ("settle", "host_probe", "host_env", "abi_probe", "fetch", "cat", "true")


@dataclass
class Place:
    """Where a run is, event by event."""

    step: str = "lock"
    after: str = "connecting"
    offset: int = 0
    last: str = ""

    def add(self, event: Mapping[str, Any]) -> Point | None:
        """Take one event and return the point that it is, if it is a command."""
        match event["event"]:
            case "step_started":
                self.step, self.after, self.offset = event["step"], "its start", 0
            case "step_done":
                self.step, self.after, self.offset = "lock", f"{event['step']} ended", 0
            case "command":
                name = label(event["command"])
                if name == self.last and name.startswith("cat "):
                    return None  # asked again until the host is back, now more often and now less
                self.last = name
                self.offset += 1
                point = Point(self.step, self.after, self.offset, name)
                if not name.startswith(_LOOKS):
                    self.after, self.offset = name, 0
                return point
        return None


def label(command: str) -> str:
    """Return what a command is, without what differs between runs and hosts."""
    if found := re.search(r"/host_work-\w+\.py --run \w+ (?:--wait-s \S+ )?(\S+(?: [^-\s]\S*)?)", command):
        return _stable(found[1])
    if found := re.search(r"(\w+)\.py.*? \(\d+ characters\)(?: ([a-z]+))?", command):
        return " ".join(part for part in found.groups() if part)
    if command.startswith("umask"):
        return "install host_work"
    if found := re.match(r"sh -c .* sh (\S+)$", command):
        return f"fetch {_stable(found[1])}"
    return _stable(command)


def _stable(text: str) -> str:
    return re.sub(r"\b[0-9a-f]{12}\b", "…", text)


# ---------------------------------------------------------------- runs


@dataclass(frozen=True)
class Ended:
    """A run that came to its own end."""

    status: int
    events: tuple[Mapping[str, Any], ...]
    said: str

    def host(self, name: str) -> Mapping[str, Any]:
        """Return the last word about a host."""
        return next(e for e in reversed(self.events) if e["event"] == "host_done" and e["host"] == name)

    def must_be_verified(self, *hosts: str) -> None:
        """Fail with everything that was told unless these hosts are as wanted, and proved."""
        assert self.status == 0, self.told()
        for name in hosts:
            assert self.host(name)["status"] == "ok", self.told()
            assert self.host(name)["verification"]["state"] == "verified", self.told()

    def told(self) -> str:
        lines = [f"status {self.status}"]
        for event in self.events:
            match event["event"]:
                case "host_done":
                    lines.append(f"{event['host']}: {event['status']}: {event.get('why')}")
                case "finding" if event["finding"]["severity"] == "error":
                    found = event["finding"]
                    lines.append(f"{event['host']}: {found['code']} {found['cause']} {found['evidence']}")
                case "command":
                    last = f"last command of {event['host']}: {label(event['command'])}"
                    lines = [line for line in lines if not line.startswith(last.split(":")[0])] + [last]
        return "\n".join([*lines, self.said[-2000:]])


class Controller:
    """One ``bringup apply``, its engine and its workers, as a person starts it."""

    def __init__(self, rig: Rig, hosts: Sequence[str], options: Sequence[str]) -> None:
        limits = [part for host in hosts for part in ("--limit", host)]
        self._said = rig.state / f"said-{'-'.join(hosts)}"
        self._workers: list[int] = []
        self.events: list[Mapping[str, Any]] = []
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [*BRINGUP, "apply", str(LAB_INVENTORY), *limits, *options, "--yes", "--events", "-"],
                env=rig.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                start_new_session=True,
            )

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Yield events as they are told, until the run is over."""
        assert self._process.stdout is not None
        while not self._process.stdout.closed and (line := self._process.stdout.readline()):
            self.events.append(json.loads(line))
            yield self.events[-1]

    def strike(self, *, engine_only: bool = False) -> None:
        """Kill the engine and its workers at once; or the engine alone."""
        self._workers = self._workers or children(self._process.pid)
        if not engine_only:
            for pid in self._workers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self._process.kill()

    def kill(self, *, engine_only: bool = False) -> None:
        """Kill the engine and its workers, or the engine alone, whose workers must notice; return when all are gone."""
        self.strike(engine_only=engine_only)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        deadline = time.monotonic() + 60
        while any(is_alive(pid) for pid in self._workers):
            assert time.monotonic() < deadline, f"a worker outlives its engine: {self._workers}"
            time.sleep(0.02)

    def ended(self) -> Ended:
        """Return what the run came to, once it is over."""
        for _ in self:
            pass
        assert self._process.stdout is not None
        self._process.stdout.close()
        status = self._process.wait()
        return Ended(status, tuple(self.events), self._said.read_text())


def children(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they started."""
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that waits to be buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def apply(rig: Rig, hosts: Sequence[str], options: Sequence[str] = ()) -> Ended:
    """Run apply to its end."""
    return Controller(rig, hosts, options).ended()


def build_s(ended: Ended) -> float:
    """Return how long the environment step of a run took."""
    done = (e["seconds"] for e in ended.events if e["event"] == "step_done" and e["step"] == "environment")
    return float(next(done))


def wait_for_boot(lab: Lab, host: str, boots: int, *, asked: bool) -> None:
    """Wait for a host that is about to reboot: what a person sees as a host that does not answer yet.

    ``asked``: the command for it was just sent and may still be on its way.
    """
    if asked:
        time.sleep(3)
    if pending_reboot(lab, host):
        deadline = time.monotonic() + 30
        while lab.host(host).boots() == boots and time.monotonic() < deadline:
            time.sleep(0.1)
    if lab.host(host).boots() != boots:
        lab.host(host).wait_until_up(time.monotonic() + 60)


def pending_reboot(lab: Lab, host: str) -> bool:
    """Return whether a run asked this host to reboot, and it has not yet."""
    done = lab.inside(
        host, ["sh", "-c", "cat /proc/sys/kernel/random/boot_id /var/lib/bringup/reservation.json 2>/dev/null"]
    )
    boot_id, _, reservation = done.stdout.partition("\n")
    return bool(reservation) and json.loads(reservation)["boot_id"] == boot_id


def points_of(events: Sequence[Mapping[str, Any]], host: str) -> list[Point]:
    """Return the points of a run in their order, each once."""
    place = Place()
    found = (place.add(event) for event in events if event.get("host") == host)
    return list(dict.fromkeys(point for point in found if point is not None))


LEFTOVERS = r"""
cd /var/lib/bringup
for path in journal.json reservation.json /run/bringup/credentials; do test ! -e $path || echo $path; done
for path in /opt/bringup/envs/*; do test -e $path/.bringup-env.json || echo "$path was never finished"; done
for name in run work; do flock --nonblock /run/bringup/$name.lock true || echo "$name.lock is held"; done
"""


def leftovers(lab: Lab, host: str) -> str:
    """Return what a finished run should not have left on a host."""
    return lab.inside(host, ["sh", "-c", LEFTOVERS]).stdout


# ---------------------------------------------------------------- stacks that differ

SERVICE = """
[Unit]
Description=what this host is for
ConditionPathExists=/opt/bringup/current

[Service]
ExecStart=/opt/bringup/bin/run python -c 'import time, torch; time.sleep(100000)'

[Install]
WantedBy=multi-user.target
"""

_PATCHED = "flashinfer/__init__.py"


def stacks(rig: Rig, *, first: int) -> Iterator[list[str]]:
    """Yield the options of one stack after the other, numbered from ``first``, each with an environment of its own.

    Besides the environment every one of them changes /usr/local/cuda and the service file, and restarts a unit.
    """
    directory = rig.lab.layout.mirror / "wheels"
    (wheel,) = directory.glob("default/simple/flashinfer-python/flashinfer_python-0.6.4-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        before = archive.read(_PATCHED).decode()
    for number in count(first):
        after = f"{before}# patched for stack {number} of these tests\n"
        diff = "".join(
            difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{_PATCHED}", f"b/{_PATCHED}", n=3)
        )
        (rig.state / f"crash-{number}.diff").write_text(diff)
        cuda = ("13.0", "12.8")[number % 2]
        yield variant.write(
            rig.lab,
            rig.state,
            f"crash-{number}",
            text={
                'default = "13.0"': f'default = "{cuda}"',
                '[service]\nenvironment = { SGLANG_ENABLE_TORCH_COMPILE = "0" }': (
                    f'[service]\nenvironment = {{ CRASH_STACK = "{number}" }}\nrestart = ["serving.service"]'
                ),
            },
            more=(
                "\n[[python.patch]]\n"
                f'distribution = "flashinfer-python"\nversion = "0.6.4"\ndiff = "crash-{number}.diff"\n\n'
                f'[python.patch.files."{_PATCHED}"]\nbefore = "{digest(before)}"\nafter = "{digest(after)}"\n'
            ),
        )


def digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def serve(rig: Rig, host: str) -> None:
    """Start the unit that serves from ``current``."""
    path = "/etc/systemd/system/serving.service"
    script = f"cat > {path} <<'END'\n{SERVICE}END\nsystemctl daemon-reload; systemctl enable --now --quiet serving"
    rig.shell(host, script)


# ---------------------------------------------------------------- watching a host


def stop_builder(lab: Lab, host: str, action: str) -> int:
    """Stop the process that does a part of a build on a host as soon as it is there; return its process id."""
    leader = lab.host(host).leader()
    assert leader is not None
    space = Path(f"/proc/{leader}/ns/pid").readlink()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().split(b"\0")
                is_builder = len(words) > 3 and b"/host_env-" in words[1] and words[2] == action.encode()
                if is_builder and (path / "ns/pid").readlink() == space:
                    os.kill(int(path.name), signal.SIGSTOP)
                    return int(path.name)
        time.sleep(0.01)
    raise AssertionError(f"nothing does {action} on {host}")


WATCH = r"""
import ctypes, csv, email.parser, importlib.metadata, json, os, pathlib, subprocess, sys, time, traceback

BUILDING = {"heal", "create", "install", "imports", "patch", "finish", "collect"}
CURRENT = "/opt/bringup/current"
SITE = CURRENT + "/lib/python%d.%d/site-packages" % sys.version_info[:2]
CODE = "import torch, sgl_kernel, flashinfer"
EVERY_S, FRESH_EVERY_S = float(sys.argv[1]), 1.0
AT_ONCE = 3  # a loaded machine must not be loaded more and more
seen = {"imports": 0, "fresh": 0, "failures": [], "longest_gap_s": 0.0, "builds": {}, "clashes": []}
directories, actions, known, running = {}, {}, set(), {}
last_import, last_fresh, last_note, serves = 0.0, 0.0, 0.0, False


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def builders():
    # {pid: directory} of the processes that build, and of uv at work for them.
    scripts, tools = {}, {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        words = read("/proc/%s/cmdline" % pid).decode("utf-8", "replace").split("\0")
        if len(words) > 3 and "/host_env-" in words[1] and words[2] in BUILDING:
            order = words[3]
            if order not in directories and order.endswith(".json"):
                try:
                    directories[order] = json.loads(read(order))["env"]
                except ValueError:
                    pass
            scripts[pid] = directories.get(order, order)
            actions[pid] = words[2]
        elif words[0].endswith("/uv") and "--python" in words:
            tools[pid] = words[words.index("--python") + 1].split("/bin/")[0]
    return first(scripts), first(tools)


def first(found):
    # Between fork and exec a child has its parent's command line.
    parents = {pid: read("/proc/%s/stat" % pid).decode().rpartition(")")[2].split()[1:2] for pid in found}
    return {pid: where for pid, where in found.items() if parents[pid] and parents[pid][0] not in found}


def look():
    scripts, tools = builders()
    for pid in set(scripts) - known:
        known.add(pid)
        seen["builds"][actions[pid]] = seen["builds"].get(actions[pid], 0) + 1
    if len(scripts) > 1 or len(set(tools.values())) < len(tools):
        seen["clashes"].append({"builders": scripts, "uv": tools})


def begin(*, fresh):
    # An interpreter of its own shows most and costs most; a fork imports the same files in a fifth of the time.
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 2)
        try:
            if fresh:
                os.execve(CURRENT + "/bin/python", [CURRENT + "/bin/python", "-I", "-c", CODE], {})
            sys.path.insert(0, SITE)
            exec(CODE)
            os._exit(0)
        except BaseException:
            os.write(2, traceback.format_exc().encode()[-2000:])
            os._exit(1)
    os.close(writer)
    running[pid] = reader
    seen["imports"] += 1
    seen["fresh"] += fresh


def bury():
    for pid, reader in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        said = os.read(reader, 4000).decode("utf-8", "replace")
        os.close(running.pop(pid))
        if status != 0:
            seen["failures"].append({"status": status, "said": said[-2000:], "at_s": time.time()})


while True:
    now = time.monotonic()
    look()
    bury()
    serves = serves or os.path.exists(SITE)
    if last_import:
        seen["longest_gap_s"] = max(seen["longest_gap_s"], round(now - last_import, 3))
    if serves and now - last_import >= EVERY_S and len(running) < AT_ONCE:
        last_import = now
        fresh = now - last_fresh >= FRESH_EVERY_S
        if fresh:
            last_fresh = now
        begin(fresh=fresh)
    if now - last_note >= 0.5:
        last_note = now
        with open("/run/crash-watch.new", "w") as file:
            json.dump(seen, file)
        os.rename("/run/crash-watch.new", "/run/crash-watch.json")
    time.sleep(max(0.0, 0.05 - (time.monotonic() - now)))
"""


@dataclass
class Seen:
    """What a watcher saw: imports through ``current`` and those that failed, builders and those that met.

    ``fresh`` are the imports by an interpreter started through ``current``.
    """

    imports: int = 0
    fresh: int = 0
    failures: list[Any] = field(default_factory=list)
    longest_gap_s: float = 0.0
    builds: dict[str, int] = field(default_factory=dict)
    clashes: list[Any] = field(default_factory=list)


class Watcher:
    """A process on a host that imports through ``current`` again and again, and looks who builds every 50 ms."""

    def __init__(self, lab: Lab, host: str, *, every_s: float) -> None:
        self._lab, self._host = lab, host
        unit = ["systemd-run", "--quiet", "--collect", "--unit=crash-watch"]
        done = lab.inside(host, [*unit, "python3", "-c", WATCH, str(every_s)])
        assert done.returncode == 0, done.stderr

    def seen(self) -> Seen:
        """Return what it saw so far; it must still be there."""
        time.sleep(1.2)
        done = self._lab.inside(
            self._host, ["sh", "-c", "systemctl is-active --quiet crash-watch && cat /run/crash-watch.json"]
        )
        assert done.returncode == 0, "the watcher died"
        return Seen(**json.loads(done.stdout))

    def stop(self) -> Seen:
        """End the watcher and return what it saw."""
        seen = self.seen()
        self._lab.inside(self._host, ["systemctl", "stop", "crash-watch"])
        return seen
