"""Rehearsal hosts: bring them up, look at them, log in, reset one, take all down."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from bringup import locking
from bringup.commands.terminal import stdout_console
from bringup.errors import InputError, LabError
from bringup.guard import WheelGuard
from bringup.lab.lab import DEFAULT_GPUS, DEFAULT_HOSTS, Lab, remote_line
from bringup.lab.layout import DEFAULT_STATE_DIR
from bringup.lab.network import DEFAULT_RANGE
from bringup.lab.record import LabRecord
from bringup.lab.shape import Trait
from bringup.locking.rehearsal import LabLock
from bringup.package_index import Sources
from bringup.stack import load_stack, stack_path

app = typer.Typer(help="Rehearsal hosts on this machine: real systemd, sshd and apt; only the silicon is simulated.")

LOOK_ALIKE_STACKS = ("lab", "sglang-0.5.9-cu130")
"""Stacks whose wheels this machine makes, so that their locks are this lab's and not committed."""

StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar="BRINGUP_LAB_STATE",
        help=f"Directory that holds everything of this lab.  [default: {DEFAULT_STATE_DIR}]",
    ),
]
AddressRange = Annotated[
    str | None,
    typer.Option("--range", help=f"Private IPv4 range of the lab ($BRINGUP_LAB_RANGE).  [default: {DEFAULT_RANGE}]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
HostName = Annotated[str, typer.Argument(help="Name of a lab host, such as gpu-01.")]


@app.command()
def up(
    hosts: Annotated[
        int, typer.Option(help="Hosts that shall run; more that run already stay.", min=1)
    ] = DEFAULT_HOSTS,
    gpus: Annotated[
        str | None, typer.Option(help=f"GPUs of each new host.  [default: {DEFAULT_GPUS}]", show_default=False)
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape of one new host, HOST=TRAIT[,TRAIT]; traits: " + ", ".join(Trait), metavar="HOST=TRAIT"
        ),
    ] = None,
    release: Annotated[
        list[str] | None,
        typer.Option(
            help="Distribution release of new hosts, or with HOST= of one, such as debian13.  "
            "[default: this machine's]",
            metavar="[HOST=]RELEASE",
            show_default=False,
        ),
    ] = None,
    stack: Annotated[
        list[str] | None,
        typer.Option(
            help="Stack, by name or path, to make ready besides the look-alike ones: locked against the lab's mirror, "
            "its wheels fetched into it. May be repeated.",
            metavar="STACK",
        ),
    ] = None,
    state_dir: StateDir = None,
    addresses: AddressRange = None,
    as_json: AsJson = False,
) -> None:
    """Bring the lab up: base image, package mirror, network, hosts, locks. What runs already is left alone."""
    lab = Lab.open(state_dir, addresses, tell=_tell)
    came = lab.up(
        hosts, gpus, dict(_parse_variant(text) for text in variant or []), _parse_releases(release or [], hosts)
    )
    record = lab.record()
    locks = {name: _make_ready(name, lab, record) for name in dict.fromkeys((*LOOK_ALIKE_STACKS, *(stack or ())))}
    if as_json:
        _print_json(
            "lab up",
            lab,
            made=came.made,
            started=came.started,
            seconds=round(came.seconds, 2),
            mirror_url=record.mirror_url,
            locks={name: str(made.path) for name, made in locks.items()},
            hosts=_hosts(lab),
        )
        return
    changed = [f"made {', '.join(came.made)}"] if came.made else []
    changed += [f"started {', '.join(came.started)}"] if came.started else []
    changed += [f"locked {name}" for name, made in locks.items() if made.changed]
    print(f"lab is up in {came.seconds:.1f} s: {'; '.join(changed) or 'nothing to do'}")
    _print_table(lab)


@app.command()
def status(state_dir: StateDir = None, addresses: AddressRange = None, as_json: AsJson = False) -> None:
    """Show what runs. Exit 0 when the lab is up and every host runs, 1 when not. No host is asked anything."""
    lab = Lab.open(state_dir, addresses)
    states = lab.states()
    is_up = lab.is_up()
    if as_json:
        _print_json("lab status", lab, up=is_up, hosts=_hosts(lab))
    elif states:
        _print_table(lab)
        if not is_up:
            print("the package mirror does not run; `bringup lab up` starts it")
    else:
        print(f"no lab is up in {lab.layout.state_dir}")
    if not is_up or any(state != "running" for state in states.values()):
        raise typer.Exit(1)


@app.command(context_settings={"ignore_unknown_options": True})
def ssh(
    host: HostName,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to run there: one word is a line for its shell, several are kept apart. None: a shell."
        ),
    ] = None,
    user: Annotated[str, typer.Option(help="Who to be there: root, or operator (sudo without a password).")] = "root",
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Log in to a lab host, or run a command there and exit with its status (255: ssh itself failed)."""
    lab = Lab.open(state_dir)
    if as_json:
        if not command:
            raise InputError("--json needs a command", hint="bringup lab ssh HOST --json -- COMMAND")
        done = lab.run(host, command, user=user, timeout_s=None)
        _print_json("lab ssh", lab, host=host, exit_status=done.returncode, stdout=done.stdout, stderr=done.stderr)
        raise typer.Exit(done.returncode)
    words = ["--", remote_line(command)] if command else []
    raise typer.Exit(subprocess.run([*lab.ssh_argv(host, user=user), *words], check=False).returncode)


@app.command()
def reset(host: HostName, state_dir: StateDir = None, as_json: AsJson = False) -> None:
    """Make a host bare again: everything it ever wrote is gone; name, address, keys and shape stay."""
    lab = Lab.open(state_dir, tell=_tell)
    lab.reset(host)
    if as_json:
        _print_json("lab reset", lab, hosts=_hosts(lab))
    else:
        print(f"{host} is bare again")


@app.command()
def down(
    purge: Annotated[bool, typer.Option(help="Remove the base image, the mirror's files and the keys too.")] = False,
    state_dir: StateDir = None,
    addresses: AddressRange = None,
    as_json: AsJson = False,
) -> None:
    """Take the lab down: no process, mount, namespace or bridge of it is left."""
    lab = Lab.open(state_dir, addresses, tell=_tell)
    removed = lab.down(purge=purge)
    if as_json:
        _print_json("lab down", lab, removed=removed)
    else:
        print(f"lab is down: {', '.join(removed) or 'there was no host'}")


def _make_ready(name: str, lab: Lab, record: LabRecord) -> LabLock:
    """Lock one stack against this lab's mirror, and let the mirror serve every wheel that the lock names."""
    path = stack_path(name)
    made = locking.lock_for_lab(
        path,
        lab.layout.state_dir,
        record.mirror_url,
        key_file=Path(record.apt_key_file),
        key_fingerprint=record.apt_key_fingerprint,
        judge=lambda sources: WheelGuard(sources, lambda line: _tell(f"lock {name}: {line}"), keeps_torch=False),
        say=lambda line: _tell(f"lock {name}: {line}"),
    )
    if made.findings:
        found = made.findings[0]
        raise LabError(
            f"stack {name} cannot be locked against the lab's mirror",
            why=f"{found.code}: {found.cause}",
            hint=f"{found.remedy} (`bringup lock {name} --lab {lab.layout.state_dir}` shows all findings)",
        )
    committed = load_stack(path)
    if committed.lock and committed.lock.wheels:
        minors = {committed.python.interpreter_of(host.release or "") for host in record.hosts.values()}
        for minor in sorted(minors):
            locking.fetch_into_mirror(
                committed.lock,
                lab.layout.mirror,
                platform=f"cp{minor.replace('.', '')}-{platform.machine()}",
                sources=Sources.of(committed.python.indexes),
                say=lambda line: _tell(f"mirror: {line}"),
            )
    return made


def _parse_variant(text: str) -> tuple[str, tuple[Trait, ...]]:
    name, found, traits = text.partition("=")
    try:
        chosen = tuple(Trait(trait) for trait in traits.split(",") if trait)
    except ValueError as error:
        raise InputError(f"--variant {text}", why=str(error), hint=f"traits are {', '.join(Trait)}") from None
    if not found or not name or not chosen:
        raise InputError(f"--variant {text}", hint=f"wanted HOST=TRAIT[,TRAIT]; traits are {', '.join(Trait)}")
    return name, chosen


def _parse_releases(texts: Sequence[str], hosts: int) -> dict[str, str]:
    """Return the release of each host that was named, alone or among all."""
    everywhere = [text for text in texts if "=" not in text]
    if len(everywhere) > 1:
        raise InputError(f"--release {everywhere[-1]}", why=f"all hosts are of {everywhere[0]} already")
    chosen = dict.fromkeys((f"gpu-{number:02d}" for number in range(1, hosts + 1)), *everywhere) if everywhere else {}
    for text in texts:
        name, found, release = text.partition("=")
        if found:
            chosen[name] = release
    return chosen


def _hosts(lab: Lab) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "address": str(host.plan.address),
            "boots": host.boots(),
            "gpus": host.plan.gpus,
            "release": host.plan.release,
            "state": host.state(),
            "traits": list(host.plan.traits),
        }
        for name, host in lab.hosts.items()
    }


def _print_json(command: str, lab: Lab, **fields: Any) -> None:
    head = {"schema": 1, "command": command, "state_dir": str(lab.layout.state_dir), "range": str(lab.addresses)}
    print(json.dumps(head | fields, indent=1))


def _print_table(lab: Lab) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("host", "address", "state", "release", "gpus", "shape"):
        table.add_column(heading, no_wrap=True)
    for name, host in lab.hosts.items():
        plan = host.plan
        table.add_row(name, str(plan.address), host.state(), plan.release, plan.gpus, ", ".join(plan.traits))
    stdout_console().print(table)


def _tell(line: str) -> None:
    print(line, file=sys.stderr)
