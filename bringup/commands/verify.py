"""``bringup verify``: prove what is serving, by measuring it."""

from __future__ import annotations

from typing import Annotated

import typer

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
    json: options.Json = False,
    events: options.Events = None,
    workers: options.Workers = None,
    parallel: options.Parallel = 50,
    verbose: options.Verbose = 0,
) -> None:
    """Measure the environment that is serving: imports, NVRTC, GPUs, all-reduce. Refused while GPUs are in use.

    Exit status: 0 proved, 1 slow, refused or broken, 2 the job could not be done.
    """
    if profile not in (None, "quick", "full"):
        raise InputError(f"there is no profile {profile!r}", hint="profiles are quick and full")
    job = Job(
        command="verify",
        inventory=inventory,
        limit=tuple(limit or ()),
        exclude=tuple(exclude or ()),
        overrides=session.overrides(stack=stack, lock=lock, only=["verify"], force=True, profile=profile),
        workers=workers,
        parallel=parallel,
        verbosity=verbose,
    )
    results = session.carry_out(job, json_output=json, events_to=events)
    session.finish(results, json_output=json, events_to=events, verbose=verbose > 0)
