"""The options that several commands share, so that they read and behave alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

STEPS = ("preflight", "driver", "cuda", "linker", "environment", "verify", "switch")

Inventory = Annotated[str, typer.Argument(help="Inventory file, such as inventory/fleet.py.", metavar="INVENTORY")]
Limit = Annotated[
    list[str] | None,
    typer.Option("--limit", "-l", help="Only these hosts: names, groups or glob patterns. May be repeated."),
]
Exclude = Annotated[list[str] | None, typer.Option("--exclude", help="Leave these hosts out. May be repeated.")]
StackName = Annotated[
    str | None,
    typer.Option("--stack", help="Stack by name or path, instead of the one the inventory assigns."),
]
LockFile = Annotated[
    Path | None,
    typer.Option("--lock", help="Lock file, instead of the one beside the stack.", exists=True, dir_okay=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Events = Annotated[
    str | None,
    typer.Option("--events", help="Write events as JSON lines to a file, or '-' for stdout.", metavar="FILE"),
]
Deep = Annotated[bool, typer.Option("--deep", help="Hash every file of the environment instead of its size and time.")]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, help="Show what runs on the hosts; twice for more.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before changing hosts.")]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Worker processes. Default: one per 50 hosts, at most one per core."),
]
Parallel = Annotated[int, typer.Option("--parallel", min=1, help="Hosts that one worker works on at a time.")]
Scheduler = Annotated[
    str | None,
    typer.Option("--executor", metavar="tls://HOST:PORT", help="Run the shards on the workers of this Dask scheduler."),
]
