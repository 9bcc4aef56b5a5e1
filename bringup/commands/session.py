"""Run a job for a command: progress while it goes, the result afterwards, the history beside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bringup import engine, paths
from bringup.commands import show
from bringup.commands.terminal import stdout_console
from bringup.errors import InputError
from bringup.fork_server import ForkServer
from bringup.report import events
from bringup.report.masking import Masker
from bringup.report.results import Results

if TYPE_CHECKING:
    from bringup.spool import Recording


class Progress:
    """Draw one line per host on a terminal, and plain lines elsewhere, from the event stream."""

    _MOST_LINES = 30

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._lines: dict[str, tuple[str, str]] = {}
        self._live: Live | None = None
        self._command = ""

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._quiet:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, event: events.Event) -> None:
        """Show what an event changes."""
        match event:
            case events.RunStarted():
                self._command = event.command
                self._lines = dict.fromkeys(event.hosts, ("", "connecting"))
            case events.HostConnected():
                self._set(event.host, "", "reading")
            case events.StepStarted():
                self._set(event.host, event.step, "…")
            case events.StepDone():
                what = f"{event.status}" + (f" ({event.changes} changes)" if event.changes else "")
                self._say(f"{event.host:<12} {event.step:<12} {what}, {event.seconds:.1f} s")
                self._set(event.host, event.step, what)
            case events.FindingSeen() if event.finding.severity == "error":
                self._say(f"{event.host:<12} {event.finding.code}  {event.finding.cause}")
            case events.HostDone():
                self._set(event.host, "", event.status)
            case events.WorkerLost():
                self._say(f"{event.worker} was lost: {event.why}")
            case _:
                pass

    def _set(self, host: str, step: str, what: str) -> None:
        self._lines[host] = (step, what)
        if self._live is not None:
            self._live.update(self._table())

    def _say(self, line: str) -> None:
        if self._live is None and not self._quiet:
            self._console.print(Text(line), soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        busy = [(host, *rest) for host, rest in self._lines.items() if rest[1] not in ("ok", "drift")]
        for host, step, what in busy[: self._MOST_LINES]:
            table.add_row(host, step, what)
        done = len(self._lines) - len(busy)
        more = len(busy) - self._MOST_LINES
        table.add_row(f"{done} of {len(self._lines)} hosts done" + (f", {more} more at work" if more > 0 else ""))
        return table


def open_events(target: str | None, stack: ExitStack) -> IO[str] | None:
    """Return where events go: a file, stdout for ``-``, or None. Raises InputError when it cannot be written."""
    if target is None:
        return None
    if target == "-":
        return sys.stdout
    try:
        return stack.enter_context(Path(target).open("w", encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot write events to {target}", why=error.strerror) from None


def overrides(
    *, stack: str | None, lock: Path | None = None, only: list[str] | None = None, **flags: Any
) -> Mapping[str, Any]:
    """Return the ``bringup_*`` data keys that a command's options set; what is None or False stays unset."""
    chosen: dict[str, Any] = {key: value for key, value in flags.items() if value not in (None, False)}
    if stack is not None:
        chosen["stack"] = str(Path(stack).resolve()) if stack.endswith(".toml") else stack
    if lock is not None:
        chosen["lock"] = str(lock.resolve())
    if only:
        chosen["only"] = list(only)
    return chosen


def carry_out(job: engine.Job, *, json_output: bool, events_to: str | None, scheduler: str | None = None) -> Results:
    """Run a job with progress on stderr; events go to ``events_to``; runs are recorded in the history.

    ``scheduler`` is the address of a Dask scheduler whose workers run the shards; None runs them here.
    """
    console = Console(stderr=True, highlight=False)
    with ExitStack() as stack:
        chosen = executor(scheduler) or _local(job, stack)
        stream = open_events(events_to, stack)
        recorder = _recorder(job)
        if recorder is not None:
            stack.callback(_close, recorder, console)
        progress = stack.enter_context(Progress(console, quiet=json_output and not console.is_terminal))

        def on_event(event: events.Event) -> None:
            progress.add(event)
            if stream is not None:
                stream.write(event.as_line() + "\n")
                stream.flush()
            if recorder is not None:
                recorder(event)

        return engine.run(job, on_event, executor=chosen)


def _local(job: engine.Job, stack: ExitStack) -> engine.Executor:
    # It imports what workers need while this process opens the history.
    return engine.LocalExecutor(show_worker_log=job.verbosity > 0, server=fork_server(stack))


def fork_server(stack: ExitStack) -> ForkServer:
    """Return what forks workers until the stack is left."""
    server = ForkServer.start()
    stack.callback(server.close)
    return server


def executor(scheduler: str | None) -> engine.Executor | None:
    """Return what runs shards on a Dask cluster; None where no scheduler is named.

    Raises InputError without Dask, and for a scheduler that others could use.
    """
    if scheduler is None:
        return None
    try:
        from bringup.dask_executor import DaskExecutor
    except ImportError:
        raise InputError("--executor needs dask.distributed", hint="install bringup[dask]") from None
    return DaskExecutor(scheduler)


def _recorder(job: engine.Job) -> Recording | None:
    # plan and drift only look; the history holds what was done, and what only looks should cost nothing.
    if job.command in ("plan", "drift"):
        return None
    from bringup import spool

    waiting_room = spool.Spool.of(paths.history_url())
    return spool.SpoolingRecorder(waiting_room, Masker(), _stored) if waiting_room is not None else _stored()


def _stored() -> Recording:
    from bringup.history import recorder

    return recorder()


def _close(recorder: Recording, console: Console) -> None:
    recorder.close()
    if recorder.problem is not None:
        console.print(Text(f"the history could not be written: {recorder.problem}"), soft_wrap=True)


def finish(results: Results, *, json_output: bool, events_to: str | None, verbose: bool = False) -> None:
    """Print the results and end with the command's exit code."""
    if json_output:
        typer.echo(results.as_json())
    elif events_to != "-":
        show.results(stdout_console(), results, verbose=verbose)
    raise typer.Exit(results.exit_code)
