"""``bringup rollout``: bring a fleet to its stack, wave by wave, and stop at the first wave that fails."""

from __future__ import annotations

import re
import shlex
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from bringup import engine
from bringup.commands import apply as applying
from bringup.commands import options, session
from bringup.commands.conductor import Conductor, Crew
from bringup.commands.crew import EngineCrew, Hook, differs_in_driver, judge_result
from bringup.commands.terminal import stdout_console
from bringup.errors import InputError
from bringup.fork_server import ForkServer
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
from bringup.report.results import HostResult, Results
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

# An endless wait is no limit; no scheduler lets a job run for longer than this.
_LONGEST_S = 30 * 86_400
_DRAIN_LIMIT_S = 900.0
_PARALLEL = 50
# The finding that counts the GPUs on a host's bus.
_GPU_COUNT = "BU-PRE-016"
# What a rollout keeps from its beginning to its end.
_KEPT = ("canary", "growth", "max_unavailable", "domain", "per_domain", "domains_at_once", "soak_s")


def rollout(
    context: typer.Context,
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
        float,
        typer.Option(
            "--soak", metavar="SECONDS", min=0, max=_LONGEST_S, help="How long a host must stay good in its gate."
        ),
    ] = 0.0,
    drain_limit_s: Annotated[
        float,
        typer.Option(
            "--drain-limit",
            metavar="SECONDS",
            min=1,
            max=_LONGEST_S,
            help="Longest that a drain or undrain may take.",
        ),
    ] = _DRAIN_LIMIT_S,
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
    parallel: options.Parallel = _PARALLEL,
    verbose: options.Verbose = 0,
) -> None:
    """Prepare every host, then cut over wave by wave, the canary first: drain, cutover, gate, undrain.

    A wave that fails is rolled back and pinned, the rest is left alone, and the command that goes on is printed.
    A host that is as wanted already is left alone. Exit status: 0 every host is as wanted (with --dry-run, --pause
    and --abort: it is done), 1 not, 2 the job could not be done.
    """
    if sum((dry_run, resume, pause, abort)) > 1:
        raise InputError("of --dry-run, --resume, --pause and --abort only one can be meant")
    if resume or pause or abort:
        _refuse_kept(context)
    name = str(Path(inventory).resolve())
    overrides = session.overrides(stack=stack, lock=lock)
    if (cluster := session.executor(executor)) is not None:
        cluster.stop()  # one that cannot be used is refused before anything is begun
    with ExitStack() as exits:
        history = History.open()
        exits.callback(history.close)
        if pause or abort:
            _ask(history, name, pause=pause, json=json)
        server = session.fork_server(exits)
        look = partial(_look, inventory, overrides=overrides, parallel=parallel, scheduler=executor, server=server)
        describe = partial(engine.describe, inventory, overrides=overrides, server=server)
        lease = None
        if resume:
            log = _unfinished(history, name)
            hosts, without = _members(log, describe(), limit or (), exclude or ())
            target = _one_stack(hosts)
            _tell_change(log, target, is_named=stack is not None)
            stream = session.open_events(events_to, exits)
        else:
            hosts = describe(limit=tuple(limit or ()), exclude=tuple(exclude or ()))
            target = _one_stack(hosts)
            _refuse_domains(hosts, domain, has_limit=per_domain is not None or domains_at_once is not None)
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
            if looked.exit_code == 0:
                _nothing_to_do(started, json=json)
            if dry_run:
                _show_plan(started, looked, json=json)
            _refuse_second(history, name)
            if not yes:
                applying.confirm(inventory, "rollout", look="bringup rollout INVENTORY --dry-run")
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
            server=server,
            secrets={secret for host in hosts for secret in host["secrets"]},
        )
        again = resume_command(inventory, stack, lock, executor, drain_limit_s=drain_limit_s, parallel=parallel)
        exits.enter_context(_interruptible(again))
        end = conduct(
            history,
            log,
            new_crew,
            teller,
            lease=lease,
            resumed=_resumed(log, target["digest"], look, without) if resume else None,
        )
    _finish(end, again, json=json, is_stream=events_to == "-")


@contextmanager
def _interruptible(resume: str) -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a rollout as Ctrl-C does, and say how to go on.

    Hooks and workers are ended then and the lease is given back, so that the next controller need not wait for it.
    """

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted: a host may be drained still\n  go on with: {resume}", err=True)
        raise typer.Exit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
            return f"{transition.host:<12} {transition.step:<9} {_outcome(transition)}"
        case StepBegun(step="cutover" | "rollback"):
            return f"{transition.host:<12} {transition.step:<9} …"
        case Resumed():
            return f"resumed by {transition.who}"
        case _:
            return None


def _outcome(ended: StepEnded) -> str:
    if ended.step == "inspect" and not ended.is_unreachable:
        return "it was cut over" if ended.is_ok else "it was not cut over yet"
    if not ended.is_ok:
        return f"failed: {ended.why or 'no reason given'}"
    return "as wanted already" if ended.is_as_wanted else "done"


def resume_command(
    inventory: str,
    stack: str | None,
    lock: Path | None,
    scheduler: str | None = None,
    *,
    drain_limit_s: float = _DRAIN_LIMIT_S,
    parallel: int = _PARALLEL,
) -> str:
    """Return the command that goes on with a rollout, ready to be pasted: with all that the rollout does not keep."""
    words = ["bringup", "rollout", inventory, "--resume"]
    words += ["--stack", stack] if stack is not None else []
    words += ["--lock", str(lock)] if lock is not None else []
    words += ["--executor", scheduler] if scheduler is not None else []
    words += ["--drain-limit", f"{drain_limit_s:g}"] if drain_limit_s != _DRAIN_LIMIT_S else []
    words += ["--parallel", str(parallel)] if parallel != _PARALLEL else []
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
    hosts = tuple(
        RolloutHost(host["name"], domain=_domain(host, domain), has_gpus=_has_gpus(looked.hosts.get(host["name"])))
        for host in described
    )
    try:
        waves = plan_waves(
            hosts,
            _canary(canary),
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


def _canary(text: str) -> int | list[str]:
    if text.isascii() and text.isdigit():
        return int(text)
    if re.fullmatch(r"[-+]?[0-9.]+%?", text):
        raise InputError(f"--canary {text} cannot be read", why="wanted a number of hosts, at least 1, or their names")
    return [name.strip() for name in text.split(",") if name.strip()]


def _domain(host: Mapping[str, Any], domain: Domain) -> str | None:
    groups: Sequence[str] = host["groups"]
    rack = None if host["rack"] is None else str(host["rack"])
    return {"none": None, "rack": rack, "group": groups[0] if groups else None}[domain]


def _has_gpus(result: HostResult | None) -> bool:
    """Return False for a host that is known to have none; one that could not be read may have some."""
    findings = result.findings if result is not None else ()
    return not any(one.code == _GPU_COUNT and one.evidence.get("found") == 0 for one in findings)


def _limits(max_unavailable: str, per_domain: str | None, domains_at_once: int | None) -> Limits:
    return Limits(
        _limit("--max-unavailable", max_unavailable),
        _limit("--per-domain", per_domain) if per_domain is not None else None,
        domains_at_once,
    )


def _limit(option: str, text: str) -> Limit:
    try:
        return Limit.parse(text)
    except ValueError as error:
        raise InputError(f"{option} {text} cannot be read", why=str(error)) from None


def _refuse_domains(hosts: Sequence[Mapping[str, Any]], domain: Domain, *, has_limit: bool) -> None:
    """Refuse limits that would not hold for every host: nobody would notice."""
    if not has_limit:
        return
    if domain == "none":
        raise InputError(
            "--per-domain and --domains-at-once limit nothing without failure domains",
            hint="say what one is: --domain rack, or --domain group",
        )
    if nowhere := [host["name"] for host in hosts if _domain(host, domain) is None]:
        raise InputError(
            f"no {domain} is known of {_named(nowhere)}, so no limit would hold there",
            hint="put it into the inventory, or leave these hosts out with --exclude",
        )


def _named(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _one_stack(hosts: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    stacks = {host["stack"]["digest"]: host["stack"] for host in hosts}
    if not stacks:
        raise InputError("no host is left to work on", hint="look at the inventory, --limit and --exclude")
    if len(stacks) > 1:
        names = sorted({stack["name"] for stack in stacks.values()})
        raise InputError(
            f"a rollout brings hosts to one stack, and these have {len(stacks)}: {', '.join(names)}",
            hint="name the hosts with --limit, or one stack for all with --stack",
        )
    return next(iter(stacks.values()))


def _look(
    inventory: str,
    names: Sequence[str],
    *,
    overrides: Mapping[str, Any],
    parallel: int,
    scheduler: str | None,
    server: ForkServer,
) -> Results:
    job = engine.Job("drift", inventory, limit=tuple(names), overrides=overrides, parallel=parallel)
    executor = session.executor(scheduler) or engine.LocalExecutor(server=server)
    return engine.run(job, lambda _event: None, executor=executor)


def _nothing_to_do(started: Started, *, json: bool) -> NoReturn:
    if json:
        document = _begun_by_nobody(started)
        hosts = {name: host.model_copy(update={"phase": "done"}) for name, host in document.hosts.items()}
        summary = document.summary.model_copy(update={"done": len(hosts), "untouched": 0})
        typer.echo(document.model_copy(update={"status": "done", "hosts": hosts, "summary": summary}).as_json())
    typer.echo("every host is as wanted: nothing to roll out", err=True)
    raise typer.Exit(0)


def _begun_by_nobody(started: Started) -> RolloutResults:
    # An id would be looked for in the history, and nothing has begun.
    return RolloutResults.of(replay([started])).model_copy(update={"rollout": "", "status": "planned"})


def _show_plan(started: Started, looked: Results, *, json: bool) -> NoReturn:
    if json:
        typer.echo(_begun_by_nobody(started).as_json())
    else:
        console = stdout_console()
        console.print(tables.wave_plan(started.hosts, started.waves, started.passes))
        found = looked.hosts
        silent = [name for wave in started.waves for name in wave if found[name].status == "unknown"]
        if silent:
            console.print(Text(f"do not answer, and count as failed: {', '.join(silent)}"), soft_wrap=True)
        as_wanted = [name for wave in started.waves for name in wave if judge_result(found[name], "environment")[0]]
        if as_wanted:
            console.print(Text(f"as wanted already, and left alone: {', '.join(as_wanted)}"), soft_wrap=True)
    raise typer.Exit(0)


# ----------------------------------------------------------------------------------------------------- resume


def _unfinished(history: History, inventory: str) -> RolloutLog:
    found = list_rollouts(history, inventory=inventory, only_unfinished=True, limit=1)
    if not found:
        raise InputError("no rollout over this inventory is unfinished", hint="`bringup status` lists them all")
    return open_rollout(history, found[0].id)


def _refuse_kept(context: typer.Context) -> None:
    """Refuse options that only the beginning of a rollout can choose: they would be passed over in silence."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in _KEPT and source is not None and source.name == "COMMANDLINE":
            raise InputError(
                f"{parameter.opts[0]} was chosen when the rollout began, and is kept",
                hint="to choose again, end it with --abort and begin another",
            )


def _members(
    log: RolloutLog, described: Sequence[dict[str, Any]], limit: Sequence[str], exclude: Sequence[str]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the hosts of a rollout as the inventory has them now, and the names of those to leave out from now on.

    Raises InputError for hosts of the rollout that the inventory has no longer, and that are not left out.
    """
    names = list(log.rollout.states)
    there = {host["name"]: host for host in described}

    def named(pattern: str) -> set[str]:
        groups = {name: there[name]["groups"] if name in there else () for name in names}
        return {name for name in names if fnmatchcase(name, pattern) or pattern in groups[name]}

    out: set[str] = set()
    for pattern in exclude:
        if not (found := named(pattern)):
            raise InputError(f"{pattern!r} matches no host of rollout {log.id}", hint=f"its hosts are {_named(names)}")
        out |= found
    if limit and (rest := [name for name in names if name not in out.union(*map(named, limit))]):
        raise InputError(
            f"rollout {log.id} goes on with all its hosts, and --limit leaves out {_named(rest)}",
            hint="leave a host out for good with --exclude",
        )
    if gone := [name for name in names if name not in there and name not in out]:
        raise InputError(
            f"rollout {log.id} is over {_named(gone)} as well, and the inventory is not any more",
            hint="put them back, or leave them out for good with --exclude",
        )
    return [there[name] for name in names if name not in out], tuple(name for name in names if name in out)


def _tell_change(log: RolloutLog, target: Mapping[str, str], *, is_named: bool) -> None:
    """Say that a rollout goes on with another stack; one that nobody named is refused."""
    state = log.rollout
    if target["name"] != state.stack and not is_named:
        raise InputError(
            f"rollout {log.id} brings hosts to {state.stack}, and the inventory says {target['name']}",
            hint=f"name the stack that is meant: --stack {state.stack}, or --stack {target['name']}",
        )
    if target["digest"] != state.digest:
        typer.echo(
            f"the stack is another one now, {target['name']} {target['digest']} instead of {state.stack} "
            f"{state.digest}: every host begins again, the canary first",
            err=True,
        )


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
    typer.echo(f"rollout {log.id} is {log.rollout.status}", err=True)
    if not log.rollout.is_over:
        _tell_driver(history, log)
    raise typer.Exit(0)


def _tell_driver(history: History, log: RolloutLog) -> None:
    """Say who does what was asked for: a wave is open, and only a controller can close it."""
    driven = {record.id: record.driven_by for record in list_rollouts(history, only_unfinished=True, limit=1000)}
    if (who := driven.get(log.id)) is not None:
        typer.echo(f"  once {who} has finished the open wave; if that controller is dead, --resume does", err=True)
    else:
        typer.echo("  and no controller drives it: --resume finishes the open wave", err=True)


def _resumed(
    log: RolloutLog, digest: str, look: Callable[[Sequence[str]], Results], without: tuple[str, ...]
) -> Resumed:
    state = log.rollout
    is_unpinned = False
    if state.pinned and digest == state.digest:
        looked = look(sorted(state.pinned - set(without)))
        pins = [host.pin for host in looked.hosts.values()]
        is_silent = any(host.status == "unknown" for host in looked.hosts.values())
        is_unpinned = not is_silent and all(pin is None or pin.digest != digest for pin in pins)
    return Resumed(time.time(), engine.who(), digest, is_unpinned=is_unpinned, without=without)


def _finish(state: Rollout, resume: str, *, json: bool, is_stream: bool) -> NoReturn:
    """Print how it ended; with ``is_stream`` stdout belongs to the events, and people read it on stderr."""
    document = RolloutResults.of(state, resume=resume)
    if json:
        typer.echo(document.as_json())
    else:
        console = Console(highlight=False, stderr=True) if is_stream else stdout_console()
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
