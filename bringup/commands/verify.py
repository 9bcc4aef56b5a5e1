"""``bringup verify``: prove what is serving, by measuring it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from bringup import engine
from bringup.bench import across as hosts_together
from bringup.commands import options, session
from bringup.engine import Job
from bringup.errors import InputError


def verify(
    inventory: options.Inventory,
    limit: options.Limit = None,
    exclude: options.Exclude = None,
    stack: options.StackName = None,
    lock: options.LockFile = None,
    profile: Annotated[
        str | None, typer.Option("--profile", help="quick or full, instead of what the stack says.")
    ] = None,
    across: Annotated[
        bool,
        typer.Option("--across", help="Measure all chosen hosts together as well, once each is proved: at least two."),
    ] = False,
    port: Annotated[
        int,
        typer.Option("--port", min=1, max=65535, help="With --across: the port of the first host where they meet."),
    ] = hosts_together.PORT,
    json: options.Json = False,
    events: options.Events = None,
    workers: options.Workers = None,
    parallel: options.Parallel = 50,
    verbose: options.Verbose = 0,
) -> None:
    """Measure the environment that is serving: imports, NVRTC, GPUs, all-reduce. Refused while GPUs are in use.

    With --across the hosts that passed are then measured together through torchrun. They meet at the first of them,
    by its ssh address or bringup_rendezvous.

    Exit status: 0 proved, 1 slow, refused or broken, 2 the job could not be done.
    """
    if profile not in (None, "quick", "full"):
        raise InputError(f"there is no profile {profile!r}", hint="profiles are quick and full")
    chosen, left_out = tuple(limit or ()), tuple(exclude or ())
    overrides = session.overrides(stack=stack, lock=lock, only=["verify"], force=True, profile=profile)
    if across:
        known = engine.describe(inventory, limit=chosen, exclude=left_out, overrides=overrides)
        names = together(known)
        overrides = {**overrides, "across": {"hosts": names, "port": port}}
        # One process sees all hosts: they wait for each other there, and none may wait for a free place.
        workers, parallel = 1, max(parallel, len(names))
    job = Job(
        command="verify",
        inventory=inventory,
        limit=chosen,
        exclude=left_out,
        overrides=overrides,
        workers=workers,
        parallel=parallel,
        verbosity=verbose,
    )
    results = session.carry_out(job, json_output=json, events_to=events)
    session.finish(results, json_output=json, events_to=events, verbose=verbose > 0)


def together(known: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of hosts that can be measured together, as far as the inventory tells.

    Raises InputError when they are fewer than two, have several stacks, or cannot reach each other by address.
    """
    names = [str(host["name"]) for host in known]
    if len(names) < 2:
        raise InputError(
            f"--across measures between hosts, and only {names[0]} is chosen",
            hint="choose at least two with --limit and --exclude",
        )
    by_stack: dict[str, list[str]] = {}
    for host in known:
        by_stack.setdefault(f"{host['stack']['name']} ({host['stack']['digest']})", []).append(host["name"])
    if len(by_stack) > 1:
        raise InputError(
            "--across wants hosts of one stack",
            why="; ".join(f"{', '.join(hosts)}: {stack}" for stack, hosts in by_stack.items()),
            hint="choose hosts of one stack with --limit and --exclude, or give --stack",
        )
    local = [host["name"] for host in known if host["ssh"]["is_local"]]
    if local:
        raise InputError(
            f"--across cannot take {', '.join(local)}: other hosts have no address for it",
            hint="name this machine by its ssh address in the inventory",
        )
    return names
