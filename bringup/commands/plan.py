"""``bringup plan``: what apply would do, and what would stop it."""

from __future__ import annotations

from bringup.commands import options, session
from bringup.engine import Job


def plan(
    inventory: options.Inventory,
    limit: options.Limit = None,
    exclude: options.Exclude = None,
    stack: options.StackName = None,
    lock: options.LockFile = None,
    json: options.Json = False,
    events: options.Events = None,
    deep: options.Deep = False,
    workers: options.Workers = None,
    parallel: options.Parallel = 50,
    verbose: options.Verbose = 0,
) -> None:
    """Show what `apply` would change on each host, and what it would refuse. Changes nothing, measures nothing.

    Exit status: 0 nothing to do, 1 something differs or cannot be read, 2 the job could not be done.
    """
    job = Job(
        command="plan",
        inventory=inventory,
        limit=tuple(limit or ()),
        exclude=tuple(exclude or ()),
        overrides=session.overrides(stack=stack, lock=lock, deep=deep),
        workers=workers,
        parallel=parallel,
        verbosity=verbose,
    )
    results = session.carry_out(job, json_output=json, events_to=events)
    session.finish(results, json_output=json, events_to=events, verbose=verbose > 0)
