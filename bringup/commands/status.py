"""``bringup status``: how every host was last seen, and which rollouts are not finished."""

from __future__ import annotations

import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated

import typer

from bringup.commands import options
from bringup.commands.history import Html, Junit, Prometheus
from bringup.commands.terminal import stdout_console
from bringup.errors import InputError
from bringup.history import History, list_rollouts, open_rollout
from bringup.report import file, html, junit, prometheus, tables
from bringup.report.records import HostRecord, RolloutResults, StatusDocument
from bringup.report.results import Results


def status(
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", "-l", help="Only these hosts: names or glob patterns. May be repeated."),
    ] = None,
    since_days: Annotated[
        float | None,
        typer.Option("--since", metavar="DAYS", min=0, help="Leave out hosts that were last seen earlier."),
    ] = None,
    to_html: Html = None,
    to_junit: Junit = None,
    to_prometheus: Prometheus = None,
    json: options.Json = False,
) -> None:
    """Show each host as the last run left it, and the rollouts that are not finished. Looks at no host.

    Exit status: 0 every host was last seen as wanted, 1 some was not, 2 the history cannot be read.
    """
    now_s = time.time()
    kept = History.open()
    try:
        known = kept.hosts()
        _refuse_unknown(limit or (), [host.host for host in known])
        hosts = tuple(host for host in known if _is_meant(host, limit, since_days, now_s))
        unfinished = list_rollouts(kept, only_unfinished=True)
        rollouts = [RolloutResults.of(open_rollout(kept, one.id).rollout) for one in unfinished if to_html]
    finally:
        kept.close()
    document = StatusDocument(hosts=hosts, rollouts=unfinished)
    results = Results.of("status", {host.host: host.result for host in hosts}, stack=None)
    seen_s = {host.host: host.seen_s for host in hosts}
    if to_html is not None:
        file.write(to_html, html.render(results, written_s=now_s, seen_s=seen_s, rollouts=rollouts))
    if to_junit is not None:
        file.write(to_junit, junit.render(results))
    if to_prometheus is not None:
        file.write(to_prometheus, prometheus.render(results, seen_s=seen_s))
    if json:
        typer.echo(document.as_json())
    else:
        _print(document)
    raise typer.Exit(document.exit_code)


def _refuse_unknown(patterns: Sequence[str], names: Sequence[str]) -> None:
    # Nothing that is wrong is ever found of a host whose name is spelled wrong.
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"{pattern!r} matches no host in the history",
                hint=f"its hosts are {', '.join(names[:20])}" if names else "no run has looked at any host yet",
            )


def _is_meant(host: HostRecord, names: list[str] | None, since_days: float | None, now_s: float) -> bool:
    is_named = not names or any(fnmatchcase(host.host, name) for name in names)
    return is_named and (since_days is None or host.seen_s >= now_s - since_days * 86_400)


def _print(document: StatusDocument) -> None:
    console = stdout_console()
    if document.hosts:
        console.print(tables.hosts(document.hosts))
    else:
        typer.echo("no host in the history", err=True)
    if document.rollouts:
        console.print()
        console.print(tables.rollouts(document.rollouts))
