"""``bringup history``: what was done to hosts, when, by whom, and how it ended."""

from __future__ import annotations

import json as jsonlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bringup.commands import options, show
from bringup.commands.terminal import stdout_console
from bringup.errors import InputError
from bringup.history import History, list_rollouts, list_waves, open_rollout
from bringup.history.rollouts import find_rollout
from bringup.report import file, html, junit, prometheus, tables, text
from bringup.report.records import HistoryDocument, RolloutRecord, RolloutResults, WaveRecord
from bringup.report.results import Results
from bringup.rollout import Rollout

Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="The beginning of the id of a run, or of a rollout: show that instead of the list."
    ),
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
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1_000_000, help="How many to list.")] = 20,
    rollouts: Annotated[
        bool, typer.Option("--rollouts", help="List rollouts instead of runs, those that ended as well.")
    ] = False,
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
    """List the latest runs or rollouts, or show what one of them did and found.

    The history is $BRINGUP_HISTORY, or a file in your state directory. Exit status: 0 shown, 2 it could not be.
    """
    reports_to = (to_html, to_junit, to_prometheus)
    if run is None and any(reports_to):
        raise InputError("a report is written of one run", hint="name the run: `bringup history RUN --html FILE`")
    if (run is not None or rollouts) and (host is not None or prune_days is not None):
        raise InputError("--host and --prune are for the list of runs", hint="`bringup history` lists them")
    if run is not None and rollouts:
        raise InputError("--rollouts lists them, and one is named: only one can be meant")
    kept = History.open()
    try:
        if rollouts:
            _list_rollouts(list_rollouts(kept, limit=limit), json=json)
            return
        if run is not None:
            if (id_ := find_rollout(kept, run)) is not None and not any(reports_to):
                _show_rollout(open_rollout(kept, id_).rollout, list_waves(kept, id_), json=json)
            else:
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
        stdout_console().print(tables.runs(document.runs))
    else:
        typer.echo("no runs in the history", err=True)


def _list_rollouts(records: Sequence[RolloutRecord], *, json: bool) -> None:
    if json:
        told = [record.model_dump(mode="json") for record in records]
        typer.echo(jsonlib.dumps({"schema": 1, "command": "history", "rollouts": told}, indent=2))
    elif records:
        stdout_console().print(tables.rollouts(records))
    else:
        typer.echo("no rollouts in the history", err=True)


def _show_rollout(rollout: Rollout, waves: Sequence[WaveRecord], *, json: bool) -> None:
    document = RolloutResults.of(rollout)
    if json:
        opened = {"waves_opened": [wave.model_dump(mode="json") for wave in waves]}
        typer.echo(jsonlib.dumps(document.model_dump(mode="json", by_alias=True) | opened, indent=2))
        return
    console = stdout_console()
    console.print(tables.rollout(document))
    for wave in waves:
        ended = f"{text.when(wave.closed_s)} {wave.outcome}" if wave.closed_s is not None else "open"
        told = f"wave {wave.number} of the {wave.pass_name}, to {wave.digest}: {', '.join(wave.hosts)}"
        console.print(Text(text.printable(f"{told}: {text.when(wave.opened_s)} to {ended}")), soft_wrap=True)
    said = f": {document.halt}" if document.halt else ""
    console.print(Text(text.printable(f"rollout {document.rollout} {document.status}{said}")), soft_wrap=True)


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
        show.results(stdout_console(), results, verbose=verbose > 0)
