"""``bringup history``: what was done to hosts, when, by whom, and how it ended."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bringup.commands import options, show
from bringup.errors import InputError
from bringup.history import History
from bringup.report import file, html, junit, prometheus, tables
from bringup.report.records import HistoryDocument
from bringup.report.results import Results

Run = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="The beginning of a run's id: show its results instead of the list."),
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML page as well.", dir_okay=False)
]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML as well.", dir_okay=False)]
Prometheus = Annotated[
    Path | None,
    typer.Option(
        "--prometheus",
        metavar="FILE",
        help="Write metrics for node_exporter's textfile collector as well (a name ending in .prom).",
        dir_okay=False,
    ),
]


def history(
    run: Run = None,
    host: Annotated[str | None, typer.Option("--host", help="Only runs that looked at this host.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many runs to list.")] = 20,
    to_html: Html = None,
    to_junit: Junit = None,
    to_prometheus: Prometheus = None,
    prune_days: Annotated[
        int | None,
        typer.Option("--prune", metavar="DAYS", min=0, help="Forget runs that started longer ago, then list."),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """List the latest runs, or show what one of them did and found.

    The history is $BRINGUP_HISTORY, or a file in your state directory. Exit status: 0 shown, 2 it could not be.
    """
    reports_to = (to_html, to_junit, to_prometheus)
    if run is None and any(reports_to):
        raise InputError("a report is written of one run", hint="name the run: `bringup history RUN --html FILE`")
    if run is not None and (host is not None or prune_days is not None):
        raise InputError("--host and --prune are for the list of runs, and a run is named")
    kept = History.open()
    try:
        if run is not None:
            _show(kept.results(run), reports_to=reports_to, json=json, verbose=verbose)
            return
        if prune_days is not None:
            gone = kept.prune(time.time() - prune_days * 86_400)
            typer.echo(f"forgot {gone} runs", err=True)
        document = HistoryDocument(runs=kept.runs(host=host, limit=limit))
    finally:
        kept.close()
    if json:
        typer.echo(document.as_json())
    elif document.runs:
        Console(highlight=False).print(tables.runs(document.runs))
    else:
        typer.echo("no runs in the history", err=True)


def _show(
    results: Results, *, reports_to: tuple[Path | None, Path | None, Path | None], json: bool, verbose: int
) -> None:
    to_html, to_junit, to_prometheus = reports_to
    if to_html is not None:
        file.write(to_html, html.render(results, written_s=time.time()))
    if to_junit is not None:
        file.write(to_junit, junit.render(results))
    if to_prometheus is not None:
        file.write(to_prometheus, prometheus.render(results))
    if json:
        typer.echo(results.as_json())
    else:
        show.results(Console(highlight=False), results, verbose=verbose > 0)
