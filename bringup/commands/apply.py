"""``bringup apply``: make hosts as wanted."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from bringup.commands import options, session
from bringup.engine import Job
from bringup.errors import InputError


def apply(
    inventory: options.Inventory,
    limit: options.Limit = None,
    exclude: options.Exclude = None,
    stack: options.StackName = None,
    lock: options.LockFile = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help=f"Only this step ({', '.join(options.STEPS)}). May be repeated."),
    ] = None,
    no_reboot: Annotated[
        bool, typer.Option("--no-reboot", help="Never reboot, whatever the inventory allows.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Measure again, even if the record is good.")] = False,
    allow_downgrade: Annotated[
        bool, typer.Option("--allow-downgrade", help="Let the driver go to an older version.")
    ] = False,
    yes: options.Yes = False,
    json: options.Json = False,
    events: options.Events = None,
    deep: options.Deep = False,
    workers: options.Workers = None,
    executor: options.Scheduler = None,
    parallel: options.Parallel = 50,
    verbose: options.Verbose = 0,
) -> None:
    """Bring every host to its stack: packages, toolkits, linker, environment, verification, switch.

    A host that is as wanted is left alone. What is serving goes on until the new environment is proved, and a
    failure puts everything back. Exit status: 0 all as wanted, 1 some host is not, 2 the job could not be done.
    """
    for step in only or ():
        if step not in options.STEPS:
            raise InputError(f"there is no step {step!r}", hint=f"steps are {', '.join(options.STEPS)}")
    if not yes:
        confirm(inventory)
    job = Job(
        command="apply",
        inventory=inventory,
        limit=tuple(limit or ()),
        exclude=tuple(exclude or ()),
        overrides=session.overrides(
            stack=stack,
            lock=lock,
            only=only,
            deep=deep,
            force=force,
            allow_downgrade=allow_downgrade,
            reboot="never" if no_reboot else None,
        ),
        workers=workers,
        parallel=parallel,
        verbosity=verbose,
    )
    results = session.carry_out(job, json_output=json, events_to=events, scheduler=executor)
    session.finish(results, json_output=json, events_to=events, verbose=verbose > 0)


def confirm(inventory: str, command: str = "apply", *, look: str = "bringup plan") -> None:
    """Ask before a command changes hosts; ``look`` is what only looks. Raises InputError where nobody can answer."""
    if not sys.stdin.isatty():
        raise InputError(
            f"{command} changes hosts and nobody is there to ask", hint=f"say --yes, or look first with `{look}`"
        )
    typer.confirm(f"{command}: change the hosts of {inventory}? (`{look}` only looks)", abort=True, err=True)
