"""``bringup rollout``: bring a fleet to its stack, wave by wave, and stop at the first wave that fails."""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from bringup import engine
from bringup.commands import apply as applying
from bringup.commands import options, session
from bringup.commands.conductor import Conductor, Crew
from bringup.commands.crew import EngineCrew, Hook, differs_in_driver
from bringup.errors import InputError
from bringup.history import (
    History,
    Lease,
    RolloutLog,
    list_rollouts,
    open_rollout,
    rollout_subject,
    start_rollout,
    take_lease,
)
from bringup.report import events, tables, text
from bringup.report.masking import Masker
from bringup.report.records import RolloutResults
from bringup.report.results import Results
from bringup.rollout import (
    AbortAsked,
    Limit,
    Limits,
    Pass,
    PauseAsked,
    Resumed,
    Rollout,
    RolloutHost,
    Started,
    StepBegun,
    StepEnded,
    Transition,
    WaveOpened,
    plan_waves,
    replay,
)

Domain = Literal["none", "rack", "group"]


def rollout(
    inventory: options.Inventory,
    canary: Annotated[
        str, typer.Option("--canary", help="How many hosts go first, or their names, separated by commas.")
    ] = "1",
    growth: Annotated[
        float, typer.Option("--growth", min=1, help="How many times the last wave the next one is.")
    ] = 2.0,
    max_unavailable: Annotated[
        str, typer.Option("--max-unavailable", metavar="N|N%", help="GPU hosts that may be out of service at once.")
    ] = "25%",
    domain: Annotated[
        Domain, typer.Option("--domain", help="What a failure domain is: the host's rack, or its first group.")
    ] = "none",
    per_domain: Annotated[
        str | None,
        typer.Option("--per-domain", metavar="N|N%", help="The same limit for each failure domain."),
    ] = None,
    domains_at_once: Annotated[
        int | None, typer.Option("--domains-at-once", min=1, help="Failure domains that one wave may touch.")
    ] = None,
    soak_s: Annotated[
        float, typer.Option("--soak", metavar="SECONDS", min=0, help="How long a host must stay good in its gate.")
    ] = 0.0,
    drain_limit_s: Annotated[
        float,
        typer.Option("--drain-limit", metavar="SECONDS", min=1, help="Longest that a drain or undrain may take."),
    ] = 900.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show stages and hosts, and begin nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the rollout that is not finished.")] = False,
    pause: Annotated[bool, typer.Option("--pause", help="Ask the rollout to begin no further wave.")] = False,
    abort: Annotated[bool, typer.Option("--abort", help="Ask the rollout to put back what it can and end.")] = False,
    limit: options.Limit = None,
    exclude: options.Exclude = None,
    stack: options.StackName = None,
    lock: options.LockFile = None,
    yes: options.Yes = False,
    json: options.Json = False,
    events_to: options.Events = None,
    executor: options.Scheduler = None,
    parallel: options.Parallel = 50,
    verbose: options.Verbose = 0,
) -> None:
    """Prepare every host, then cut over wave by wave, the canary first: drain, cutover, gate, undrain.

    A wave that fails is rolled back and pinned, the rest is left alone, and the command that goes on is printed.
    Exit status: 0 every host is as wanted, 1 not, 2 the job could not be done.
    """
    if sum((dry_run, resume, pause, abort)) > 1:
        raise InputError("of --dry-run, --resume, --pause and --abort only one can be meant")
    name = str(Path(inventory).resolve())
    overrides = session.overrides(stack=stack, lock=lock)
    if (cluster := session.executor(executor)) is not None:
        cluster.stop()  # one that cannot be used is refused before anything is begun
    look = partial(_look, inventory, overrides=overrides, parallel=parallel, scheduler=executor)
    with ExitStack() as exits:
        history = History.open()
        exits.callback(history.close)
        if pause or abort:
            _ask(history, name, pause=pause, json=json)
        hosts = engine.describe(inventory, limit=tuple(limit or ()), exclude=tuple(exclude or ()), overrides=overrides)
        target = _one_stack(hosts)
        lease = None
        if resume:
            stream = session.open_events(events_to, exits)
            log = _unfinished(history, name)
        else:
            looked = look([host["name"] for host in hosts])
            started = _planned(
                hosts,
                target,
                looked,
                canary=canary,
                growth=growth,
                limits=_limits(max_unavailable, per_domain, domains_at_once),
                domain=domain,
                soak_s=soak_s,
            )
            if dry_run:
                _show_plan(started, looked, json=json)
            if looked.exit_code == 0:
                typer.echo("every host is as wanted: nothing to roll out", err=True)
                raise typer.Exit(0)
            _refuse_second(history, name)
            if not yes:
                applying.confirm(inventory)
            stream = session.open_events(events_to, exits)
            log, lease = _started(history, started, name)
        teller = Teller(log.id, stream, quiet=json)
        hooks = {host["name"]: Hook(host["drain"], host["undrain"]) for host in hosts}
        new_crew = partial(
            EngineCrew,
            inventory=inventory,
            history=history,
            hooks=hooks,
            overrides=overrides,
            on_event=teller.event,
            hook_limit_s=drain_limit_s,
            parallel=parallel,
            verbosity=verbose,
            scheduler=executor,
        )
        end = conduct(
            history,
            log,
            new_crew,
            teller,
            lease=lease,
            resumed=_resumed(log, target["digest"], look, exclude or []) if resume else None,
        )
    _finish(end, resume_command(inventory, stack, lock, executor), json=json or events_to == "-")


def conduct(
    history: History,
    log: RolloutLog,
    new_crew: Callable[[], Crew],
    tell: Callable[[Transition, Rollout], None],
    *,
    resumed: Resumed | None,
    lease: Lease | None = None,
) -> Rollout:
    """Drive a rollout until it is over, as the only controller that does. ``lease`` None: it has yet to be taken.

    Raises BringupError when another controller drives it, and InputError when it cannot be resumed.
    """
    lease = lease or take_lease(history, rollout_subject(log.id), engine.who())
    try:
        while True:
            if resumed is not None:
                log.refresh()
                try:
                    log.record(resumed, lease=lease)
                except ValueError as error:
                    raise InputError(f"rollout {log.id} cannot go on", why=str(error)) from None
                tell(resumed, log.rollout)
            end = Conductor(log, lease, new_crew(), tell).run()
            if resumed is None or end.status != "halted" or end.digest == resumed.digest:
                return end
            # The stack was changed while a wave was open; that wave is undone now, and the new one may begin.
            resumed = replace(resumed, time_s=time.time())
    finally:
        lease.release()


class Teller:
    """Tell people and the event stream what happens."""

    def __init__(self, run: str, stream: Any, *, quiet: bool) -> None:
        self._run = run
        self._stream = stream
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)
        self._masker = Masker()

    def __call__(self, transition: Transition, state: Rollout) -> None:
        """Tell a transition, ``state`` being what it led to."""
        self.event(events.RolloutTold.of(transition, state, run=self._run))
        line = _said(transition, state)
        if line and not self._quiet:
            self._console.print(Text(text.printable(self._masker.text(line))), soft_wrap=True)

    def event(self, event: events.Event) -> None:
        """Pass an event on to the stream."""
        if self._stream is not None:
            self._stream.write(event.as_line() + "\n")
            self._stream.flush()


def _said(transition: Transition, state: Rollout) -> str | None:
    match transition:
        case WaveOpened():
            of = f" of the {state.current_pass}" if len(state.passes) > 1 else ""
            return f"wave {state.wave_number}{of}: {', '.join(transition.hosts)}"
        case StepEnded():
            outcome = "done" if transition.is_ok else f"failed: {transition.why or 'no reason given'}"
            return f"{transition.host:<12} {transition.step:<9} {outcome}"
        case StepBegun(step="cutover" | "rollback"):
            return f"{transition.host:<12} {transition.step:<9} …"
        case Resumed():
            return f"resumed by {transition.who}"
        case _:
            return None


def resume_command(inventory: str, stack: str | None, lock: Path | None, scheduler: str | None = None) -> str:
    """Return the command that goes on with a rollout, ready to be pasted."""
    words = ["bringup", "rollout", inventory, "--resume"]
    words += ["--stack", stack] if stack is not None else []
    words += ["--lock", str(lock)] if lock is not None else []
    words += ["--executor", scheduler] if scheduler is not None else []
    return shlex.join(words)


# ------------------------------------------------------------------------------------------------------- plan


def _planned(
    described: Sequence[Mapping[str, Any]],
    target: Mapping[str, str],
    looked: Results,
    *,
    canary: str,
    growth: float,
    limits: Limits,
    domain: Domain,
    soak_s: float,
) -> Started:
    hosts = tuple(RolloutHost(host["name"], domain=_domain(host, domain)) for host in described)
    try:
        waves = plan_waves(
            hosts,
            int(canary) if canary.isascii() and canary.isdigit() else [name for name in canary.split(",") if name],
            growth,
            limits.unavailable,
            per_domain=limits.per_domain,
            domains_at_once=limits.domains_at_once,
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    with_driver = any(differs_in_driver(result) for result in looked.hosts.values())
    passes: tuple[Pass, ...] = ("driver", "environment") if with_driver else ("environment",)
    return Started(
        time.time(), uuid.uuid4().hex[:12], target["name"], target["digest"], hosts, waves, limits, passes, soak_s
    )


def _domain(host: Mapping[str, Any], domain: Domain) -> str | None:
    groups: Sequence[str] = host["groups"]
    rack: str | None = host["rack"]
    return {"none": None, "rack": rack, "group": groups[0] if groups else None}[domain]


def _limits(max_unavailable: str, per_domain: str | None, domains_at_once: int | None) -> Limits:
    try:
        return Limits(
            Limit.parse(max_unavailable), Limit.parse(per_domain) if per_domain is not None else None, domains_at_once
        )
    except ValueError as error:
        raise InputError("a limit cannot be read", why=str(error)) from None


def _one_stack(hosts: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    stacks = {host["stack"]["digest"]: host["stack"] for host in hosts}
    if len(stacks) > 1:
        names = sorted({stack["name"] for stack in stacks.values()})
        raise InputError(
            f"a rollout brings hosts to one stack, and these have {len(stacks)}: {', '.join(names)}",
            hint="name the hosts with --limit, or one stack for all with --stack",
        )
    return next(iter(stacks.values()))


def _look(
    inventory: str, names: Sequence[str], *, overrides: Mapping[str, Any], parallel: int, scheduler: str | None
) -> Results:
    job = engine.Job("drift", inventory, limit=tuple(names), overrides=overrides, parallel=parallel)
    return engine.run(job, lambda _event: None, executor=session.executor(scheduler))


def _show_plan(started: Started, looked: Results, *, json: bool) -> None:
    planned = replay([started])
    if json:
        typer.echo(RolloutResults.of(planned).as_json())
    else:
        console = Console(highlight=False)
        console.print(tables.wave_plan(started.hosts, started.waves, started.passes))
        found = looked.hosts
        silent = [name for wave in started.waves for name in wave if found[name].status == "unknown"]
        if silent:
            console.print(Text(f"do not answer, and count as failed: {', '.join(silent)}"), soft_wrap=True)
    raise typer.Exit(0)


# ----------------------------------------------------------------------------------------------------- resume


def _unfinished(history: History, inventory: str) -> RolloutLog:
    found = list_rollouts(history, inventory=inventory, only_unfinished=True, limit=1)
    if not found:
        raise InputError("no rollout over this inventory is unfinished", hint="`bringup status` lists them all")
    return open_rollout(history, found[0].id)


def _started(history: History, started: Started, inventory: str) -> tuple[RolloutLog, Lease]:
    """Begin a rollout and hold its lease, unless another controller began one over this inventory meanwhile."""
    # The end of a path tells more than its beginning, and the history keeps 255 characters.
    beginning = take_lease(history, f"a new rollout over {inventory[-200:]}", engine.who())
    try:
        _refuse_second(history, inventory)
        log = start_rollout(history, started, inventory)
        return log, take_lease(history, rollout_subject(log.id), engine.who())
    finally:
        beginning.release()


def _refuse_second(history: History, inventory: str) -> None:
    for found in list_rollouts(history, inventory=inventory, only_unfinished=True, limit=1):
        # Where it is driven this says by whom and since when.
        take_lease(history, rollout_subject(found.id), engine.who()).release()
        raise InputError(
            f"rollout {found.id} over this inventory is not finished ({found.status})",
            hint="go on with --resume, or end it with --abort",
        )


def _ask(history: History, inventory: str, *, pause: bool, json: bool) -> None:
    log = _unfinished(history, inventory)
    who = engine.who()
    try:
        log.record(PauseAsked(time.time(), who) if pause else AbortAsked(time.time(), who))
    except ValueError as error:
        raise InputError(str(error)) from None
    if json:
        typer.echo(RolloutResults.of(log.rollout).as_json())
    else:
        typer.echo(f"rollout {log.id} is {log.rollout.status}", err=True)
    raise typer.Exit(0)


def _resumed(log: RolloutLog, digest: str, look: Callable[[Sequence[str]], Results], exclude: Sequence[str]) -> Resumed:
    state = log.rollout
    without = tuple(name for name in state.states if any(fnmatchcase(name, pattern) for pattern in exclude))
    is_unpinned = False
    if state.pinned and digest == state.digest:
        looked = look(sorted(state.pinned - set(without)))
        pins = [host.pin for host in looked.hosts.values()]
        is_silent = any(host.status == "unknown" for host in looked.hosts.values())
        is_unpinned = not is_silent and all(pin is None or pin.digest != digest for pin in pins)
    return Resumed(time.time(), engine.who(), digest, is_unpinned=is_unpinned, without=without)


def _finish(state: Rollout, resume: str, *, json: bool) -> None:
    document = RolloutResults.of(state, resume=resume)
    if json:
        typer.echo(document.as_json())
    else:
        console = Console(highlight=False)
        console.print(tables.rollout(document))
        summary = document.summary
        console.print(
            Text(
                f"rollout {document.rollout} {document.status}: {summary.done} of {summary.hosts} hosts done, "
                f"{summary.failed} failed, {summary.untouched} untouched"
            ),
            soft_wrap=True,
        )
        if document.halt:
            console.print(Text(text.printable(f"  cause: {document.halt}")), soft_wrap=True)
        if document.resume:
            console.print(Text(f"  go on with: {document.resume}"), soft_wrap=True)
    raise typer.Exit(document.exit_code)
