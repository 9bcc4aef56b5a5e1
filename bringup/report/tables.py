"""Draw tables for a terminal with rich; readable without colour. Nothing is printed here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from bringup.report import text
from bringup.report.records import HostRecord, RolloutRecord, RolloutResults, RunRecord
from bringup.rollout import Pass, RolloutHost, Wave

STYLES = {
    "ok": "green",
    "done": "green",
    "drift": "yellow",
    "slow": "yellow",
    "paused": "yellow",
    "refused": "red",
    "failed": "red",
    "halted": "red",
    "stuck": "red",
    "unknown": "magenta",
}
# What happens to each host of a wave, in this order; prepare has happened everywhere before.
STAGES = ("drain", "cutover", "gate", "undrain")


def runs(records: Iterable[RunRecord]) -> Table:
    """Return a table of runs."""
    table = _table("run", "started", "command", "inventory", "stack", "who", "hosts", "changes", "exit")
    for run in records:
        stack = f"{run.stack.name} ({run.stack.digest})" if run.stack else ""
        exit_ = "" if run.exit_code is None else str(run.exit_code)
        table.add_row(
            *_cells(run.id, text.when(run.started_s), run.command, run.inventory, stack, run.who),
            *_cells(str(run.hosts), str(run.changes), exit_ or "not ended"),
        )
    return table


def hosts(records: Iterable[HostRecord]) -> Table:
    """Return a table of hosts as they were last seen."""
    table = _table("host", "status", "seen", "by", "stack", "environment", "about it")
    for record in records:
        result = record.result
        stack = f"{result.assigned.name} ({result.assigned.digest})" if result.assigned else ""
        environment = f"{result.environment.digest}-{result.environment.generation}" if result.environment else ""
        worst = result.worst_finding
        about = [f"verified {text.when(record.verified_s)}"] if record.verified_s is not None else []
        about += [f"pinned: {result.pin.digest}"] if result.pin else []
        about += [f"{len(result.differences)} differences"] if result.differences and not result.changes else []
        about += [f"{worst.code} {worst.cause}"] if worst and worst.severity != "info" else []
        about += [result.why] if result.why else []
        about += [f"simulated: {', '.join(result.simulated)}"] if result.simulated else []
        table.add_row(
            *_cells(record.host),
            _status(result.status),
            *_cells(text.when(record.seen_s), record.command, stack, environment, "; ".join(about)),
        )
    return table


def rollouts(records: Iterable[RolloutRecord]) -> Table:
    """Return a table of rollouts."""
    table = _table("rollout", "status", "inventory", "stack", "done", "started", "driven by", "why it stopped")
    for record in records:
        table.add_row(
            *_cells(record.id),
            _status(record.status),
            *_cells(record.inventory, f"{record.stack} ({record.digest})", f"{record.done} of {record.hosts}"),
            *_cells(text.when(record.created_s), record.driven_by or "", record.halt or ""),
        )
    return table


def wave_plan(hosts: Sequence[RolloutHost], waves: Sequence[Wave], passes: Sequence[Pass]) -> Table:
    """Return the table of ``--dry-run``: stages and hosts, the canary first."""
    domains = {host.name: host.domain for host in hosts}
    table = _table("stage", "hosts", "names")
    everyone = [name for wave in waves for name in wave]
    for name in passes:
        of = f" {name}" if len(passes) > 1 else ""
        table.add_row(*_cells(f"prepare{of}", str(len(everyone)), "every host; nothing that serves is disturbed"))
        for at, wave in enumerate(waves, start=1):
            label = f"wave {at}{of}" + (" (canary)" if at == 1 else "")
            named = [f"{host} [{domains[host]}]" if domains.get(host) else host for host in wave]
            table.add_row(*_cells(f"{label}: {', '.join(STAGES)}", str(len(wave)), ", ".join(named)))
    return table


def rollout(document: RolloutResults) -> Table:
    """Return the table of a rollout under way or at its end: one line per planned wave."""
    table = _table("wave", "hosts", "how far")
    for at, wave in enumerate(document.waves, start=1):
        label = f"{at} (canary)" if at == 1 else str(at)
        told = Text()
        for name in wave:
            host = document.hosts[name]
            told.append(f"{', ' if told else ''}{text.printable(name)} ")
            told.append(host.phase, style=_style(host.phase))
            if not host.is_reachable:
                told.append(" (does not answer)", style=STYLES["unknown"])
            if host.why:
                told.append(f" ({text.printable(host.why)})")
        table.add_row(*_cells(label, str(len(wave))), told)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        is_number = column in ("hosts", "changes", "exit")
        # What is cut in two cannot be read or copied; a narrow terminal wraps the other columns.
        is_whole = column in ("host", "status", "environment", "run", "rollout")
        table.add_column(column, justify="right" if is_number else "left", overflow="fold", no_wrap=is_whole)
    return table


def _cells(*values: str) -> list[Text]:
    # Text, not str: rich would read brackets in a host's own words as markup.
    return [Text(text.printable(value)) for value in values]


def _status(status: str) -> Text:
    return Text(status, style=_style(status))


def _style(word: str) -> str:
    if word in ("unprepared", "skipped", "reverted", "cutover_failed", "gate_failed", "drain_failed"):
        return STYLES["failed"]
    return STYLES.get(word, "")
