"""See every temporary file that appears on a host: its name, and who may read it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.e2e.rig import Rig

# The kernel names what is created; a file that is gone before it could be looked at has no mode.
_SCRIPT = r"""
import ctypes, json, os, stat, struct
libc = ctypes.CDLL(None, use_errno=True)
CREATE, MOVED_TO, ATTRIB = 0x100, 0x80, 0x4
descriptor, watched = libc.inotify_init1(0), {}
seen = open("/var/lib/watch.jsonl", "a", buffering=1)

def ours(path):
    return (path + "/").startswith("/run/bringup/")

def say(path):
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        mode = None
    kind = None if mode is None else stat.filemode(mode)[0]
    seen.write(json.dumps({"path": path, "kind": kind, "mode": mode and stat.S_IMODE(mode)}) + "\n")
    if kind == "d" and ours(path):
        watch(path)

def watch(directory):
    watched[libc.inotify_add_watch(descriptor, directory.encode(), CREATE | MOVED_TO | ATTRIB)] = directory
    for name in os.listdir(directory):
        if ours(directory):
            say(os.path.join(directory, name))

for directory in ("/tmp", "/var/tmp", "/dev/shm", "/run"):
    watch(directory)
if os.path.isdir("/run/bringup"):
    watch("/run/bringup")
while True:
    data, at = os.read(descriptor, 65536), 0
    while at < len(data):
        number, _, _, length = struct.unpack_from("iIII", data, at)
        name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode()
        at += 16 + length
        if name and number in watched:
            say(os.path.join(watched[number], name))
"""

_UNIT = """[Unit]
DefaultDependencies=no
RequiresMountsFor=/tmp
[Service]
ExecStart=/usr/bin/python3 /usr/local/sbin/watch.py
[Install]
WantedBy=sysinit.target
"""

RANDOM = re.compile(r"(.*[._-]|cc)?([A-Za-z0-9]{6}|\w{10})(\.[a-z])?|tmp[a-z0-9_]{8}")
"""What mkstemp, mktemp, gcc, and the tempfile modules of Perl and Python make names of."""

BOOT = {".X11-unix", ".ICE-unix", ".XIM-unix", ".font-unix"}
"""What systemd makes in /tmp at every boot, for everybody."""

READABLE = {"/run/bringup", "/run/bringup/run.lock", "/run/bringup/work.lock"}
"""Who holds a host is no secret: a run that finds it taken says by whom."""


@dataclass(frozen=True)
class Appeared:
    """One file that appeared, or whose mode changed; ``kind`` and ``mode`` None: it was gone at once."""

    path: str
    kind: str | None
    mode: int | None


def start(rig: Rig, host: str) -> None:
    """Watch from now on, over reboots too."""
    rig.lab.run(host, ["sh", "-c", "cat > /usr/local/sbin/watch.py"], input_text=_SCRIPT)
    rig.lab.run(host, ["sh", "-c", "cat > /etc/systemd/system/watch.service"], input_text=_UNIT)
    rig.shell(host, "systemctl daemon-reload; systemctl enable -q --now watch")


def appeared(rig: Rig, host: str) -> list[Appeared]:
    """Return everything that was seen so far."""
    lines = rig.shell(host, "systemctl is-active -q watch && cat /var/lib/watch.jsonl").splitlines()
    return [Appeared(**json.loads(line)) for line in lines]


def complaints(seen: list[Appeared]) -> Iterator[str]:
    """Yield what speaks against each file: a name that can be guessed, or a mode that lets others read."""
    closed = {one.path for one in seen if one.kind == "d" and one.mode is not None and not one.mode & 0o077}
    for one in seen:
        directory, _, name = one.path.rpartition("/")
        if directory in closed:
            continue
        if directory in ("/tmp", "/var/tmp", "/dev/shm"):
            if name in BOOT:
                continue
            if not RANDOM.fullmatch(name):
                yield f"{one.path} can be guessed"
        elif not f"{one.path}/".startswith("/run/bringup/"):
            continue
        if one.path not in READABLE and one.mode is not None and one.kind in ("-", "d") and one.mode & 0o044:
            yield f"{one.path} can be read by others: {one.mode:o}"
