"""``bringup trust``: show the host keys of an inventory and record those that are not known yet."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json as jsonlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from bringup import engine
from bringup.commands import options, session
from bringup.errors import InputError

State = Literal["known", "new", "changed", "unreachable"]


@dataclass(frozen=True)
class HostKeys:
    """The keys that a host offers, by type, against those on record. ``offered`` empty: it did not answer."""

    host: str
    address: str
    file: Path
    offered: Mapping[str, str]
    recorded: Mapping[str, str]

    @property
    def state(self) -> State:
        """Return how what is offered stands to what is on record."""
        if not self.offered:
            return "unreachable"
        if any(self.recorded.get(kind, key) != key for kind, key in self.offered.items()):
            return "changed"
        return "known" if any(kind in self.recorded for kind in self.offered) else "new"


def trust(
    inventory: options.Inventory,
    limit: options.Limit = None,
    exclude: options.Exclude = None,
    yes: options.Yes = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also replace keys that changed. Only when you know why they did.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Show each host's key fingerprints and record the new ones, so that strict checking lets bringup in.

    Compare the fingerprints with what the hosts' consoles show. A key that changed is never replaced without
    --replace. Exit status: 0 all known, 1 some host is unreachable or changed, 2 nothing could be recorded.
    """
    described = engine.describe(
        inventory, limit=tuple(limit or ()), exclude=tuple(exclude or ()), overrides=session.overrides(stack=None)
    )
    found = [look(entry) for entry in described if not entry["ssh"]["is_local"]]
    console = Console(stderr=json, highlight=False)
    for keys in found:
        _show(console, keys)
    to_record = [keys for keys in found if keys.state == "new" or (replace and keys.state == "changed")]
    if to_record:
        if not yes:
            if not sys.stdin.isatty():
                raise InputError("nobody is there to ask", hint="compare the fingerprints, then say --yes")
            typer.confirm(f"Record the keys of {len(to_record)} hosts?", abort=True, err=True)
        for keys in to_record:
            record(keys)
    if json:
        typer.echo(jsonlib.dumps({"schema": 1, "hosts": {keys.host: _as_json(keys) for keys in found}}, indent=2))
    bad = [keys for keys in found if keys.state == "unreachable" or (keys.state == "changed" and not replace)]
    raise typer.Exit(1 if bad else 0)


def look(entry: Mapping[str, Any]) -> HostKeys:
    """Ask one host for its keys and compare them with the record."""
    ssh = entry["ssh"]
    address, port = str(ssh["hostname"]), int(ssh["port"])
    done = subprocess.run(
        ["ssh-keyscan", "-T", "5", "-p", str(port), address], capture_output=True, text=True, check=False
    )
    offered = {}
    for line in done.stdout.splitlines():
        parts = line.split()
        if len(parts) >= 3 and not line.startswith("#"):
            offered[parts[1]] = parts[2]
    label = address if port == 22 else f"[{address}]:{port}"
    file = Path(ssh["known_hosts"]).expanduser()
    return HostKeys(entry["name"], label, file, offered, recorded(file, label))


def recorded(file: Path, label: str) -> Mapping[str, str]:
    """Return the keys on record for a host, by type; hashed host names are found too."""
    if not file.is_file():
        return {}
    done = subprocess.run(["ssh-keygen", "-F", label, "-f", str(file)], capture_output=True, text=True, check=False)
    keys = {}
    for line in done.stdout.splitlines():
        parts = line.split()
        if len(parts) >= 3 and not line.startswith("#"):
            keys[parts[1]] = parts[2]
    return keys


def record(keys: HostKeys) -> None:
    """Write a host's keys to its known_hosts file, replacing the ones on record, by rename."""
    file = keys.file
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if file.is_file() and keys.recorded:
        subprocess.run(["ssh-keygen", "-R", keys.address, "-f", str(file)], capture_output=True, check=False)
    old = file.read_text() if file.is_file() else ""
    new = "".join(f"{keys.address} {kind} {key}\n" for kind, key in sorted(keys.offered.items()))
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
        temporary.write(old + new)
        temporary.flush()
        os.fsync(temporary.fileno())
    Path(temporary.name).replace(file)


def fingerprint(key: str) -> str:
    """Return a key's SHA-256 fingerprint as ``ssh-keygen -l`` prints it."""
    try:
        digest = hashlib.sha256(base64.b64decode(key, validate=True)).digest()
    except binascii.Error:
        return "unreadable"
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def _show(console: Console, keys: HostKeys) -> None:
    style = {"known": "green", "new": "yellow", "changed": "red", "unreachable": "magenta"}[keys.state]
    line = Text(f"{keys.host:<16}")
    line.append(f"{keys.state:<13}", style=style)
    line.append(keys.address)
    console.print(line, soft_wrap=True)
    for kind, key in sorted(keys.offered.items()):
        console.print(Text(f"{'':<16}offered  {kind:<22}{fingerprint(key)}"), soft_wrap=True)
        if keys.recorded.get(kind, key) != key:
            old = fingerprint(keys.recorded[kind])
            console.print(Text(f"{'':<16}recorded {kind:<22}{old}", style="red"), soft_wrap=True)


def _as_json(keys: HostKeys) -> dict[str, object]:
    return {
        "state": keys.state,
        "address": keys.address,
        "known_hosts": str(keys.file),
        "offered": {kind: fingerprint(key) for kind, key in keys.offered.items()},
        "recorded": {kind: fingerprint(key) for kind, key in keys.recorded.items()},
    }
