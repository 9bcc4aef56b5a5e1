"""``bringup rollback``: go back to the cutover set before, and pin what was left."""

from __future__ import annotations

from typing import Annotated

import typer

from bringup.commands import apply as applying
from bringup.commands import options, session
from bringup.engine import Job
from bringup.errors import InputError


def rollback(
    inventory: options.Inventory,
    limit: options.Limit = None,
    exclude: options.Exclude = None,
    to: Annotated[
        str | None,
        typer.Option("--to", help="Digest of the environment or stack to return to. Default: the one before."),
    ] = None,
    unpin: Annotated[bool, typer.Option("--unpin", help="Only remove the pin, so that apply may go on.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept in the pin.")] = "rolled back by hand",
    stack: options.StackName = None,
    lock: options.LockFile = None,
    yes: options.Yes = False,
    json: options.Json = False,
    events: options.Events = None,
    workers: options.Workers = None,
    parallel: options.Parallel = 50,
    verbose: options.Verbose = 0,
) -> None:
    """Return to the environment, /usr/local/cuda, service file and linker entry before the last cutover.

    The driver stays. The stack that was left is pinned: apply refuses it until --unpin or another digest.
    Exit status: 0 all as asked, 1 some host is not, 2 the job could not be done.
    """
    if unpin and to is not None:
        raise InputError("--unpin only removes the pin, and --to rolls back: only one can be meant")
    if not yes:
        applying.confirm(inventory, "rollback", look="bringup drift")
    job = Job(
        command="rollback",
        inventory=inventory,
        limit=tuple(limit or ()),
        exclude=tuple(exclude or ()),
        overrides=session.overrides(
            stack=stack, lock=lock, rollback_to=to, unpin=unpin, rollback_reason=None if unpin else reason
        ),
        workers=workers,
        parallel=parallel,
        verbosity=verbose,
    )
    results = session.carry_out(job, json_output=json, events_to=events)
    session.finish(results, json_output=json, events_to=events, verbose=verbose > 0)
