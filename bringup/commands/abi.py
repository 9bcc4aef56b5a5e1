"""``bringup abi``: say whether a wheel will load beside a torch, before anybody downloads it."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from bringup import paths, torch_index, wheels
from bringup.abi import AbiFinding, InstalledEnvironment, Level, TorchRelease, Verdict, judge, parse_environment
from bringup.commands import options
from bringup.commands.lock import stack_path
from bringup.errors import BringupError, InputError
from bringup.locking import Sources, default_index
from bringup.locking.compile import PLATFORMS, split
from bringup.stack import load_stack
from bringup.wheels import WheelFacts, WheelReader

app = typer.Typer(
    name="abi",
    help="Say whether extension wheels will load beside a torch: no GPU, no import, a few megabytes of network.",
    no_args_is_help=True,
)

Platform = Annotated[
    str, typer.Option("--platform", help=f"Whose wheels of an index: {', '.join(PLATFORMS)}.", metavar="PLATFORM")
]
StackName = Annotated[str | None, typer.Option("--stack", help="Search the indexes of this stack too.")]
Capability = Annotated[
    str | None,
    typer.Option("--capability", help="The GPU's compute capability, such as 9.0: some packages choose by it."),
]
DEFAULT_PLATFORM = "cp312-x86_64"
_STYLE = {
    Level.OK: "green",
    Level.OK_STABLE: "green",
    Level.OPTIONAL: "yellow",
    Level.LAYOUT_RISK: "yellow",
}
_MOST_SHOWN = 12


@app.command()
def check(
    wheel: Annotated[
        list[str], typer.Argument(help="Requirement such as sgl-kernel==0.3.21, path or address of a .whl file.")
    ],
    torch: Annotated[
        str | None, typer.Option("--torch", help="Torch of the index, such as 2.10.0. Default: every known one.")
    ] = None,
    env: Annotated[
        Path | None, typer.Option("--env", help="Environment of this machine with torch in it.", exists=True)
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", help="The serving environment of a host.", metavar="INVENTORY:HOST"),
    ] = None,
    platform: Platform = DEFAULT_PLATFORM,
    capability: Capability = None,
    stack: StackName = None,
    json: options.Json = False,
) -> None:
    """Judge wheels beside a torch: what is missing, in which file, and which torch would fit.

    Exit status: 0 they load, 1 one does not or was built for another torch, 2 it could not be judged.
    """
    if sum(each is not None for each in (torch, env, host)) > 1:
        raise InputError("--torch, --env and --host exclude one another")
    split(platform)
    console = Console(stderr=True, highlight=False)
    index = torch_index.load(platform.rpartition("-")[2])
    # A wrong version or name is said before anything is fetched.
    releases = (index.find(torch),) if torch else index.catalogue
    reports: list[Report] = []
    with _reader(stack, console) as reader:
        for what in wheel:
            facts = reader.read(what, platform)
            if env is not None:
                sides: Sequence[TorchRelease | InstalledEnvironment] = (_environment(env, facts),)
            elif host is not None:
                sides = (_host(host, facts),)
            else:
                sides = releases
            for side in sides:
                verdict = judge(facts.distribution, side, catalogue=index.catalogue, capability=capability)
                reports.append(Report(facts, verdict))
    if json:
        document = {"schema": 1, "command": "abi check", "wheels": [report.as_json() for report in reports]}
        typer.echo(jsonlib.dumps(document, indent=2))
    else:
        _show_reports(Console(highlight=False), reports)
    refused = {id(report.facts) for report in reports if report.is_refused}
    fitting = {id(report.facts) for report in reports if not report.is_refused}
    # Beside every known torch, a wheel is as it should be when one of them fits.
    if refused - (fitting if torch is None and env is None and host is None else set()):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Report:
    """One wheel on one torch."""

    facts: WheelFacts
    verdict: Verdict

    @property
    def is_refused(self) -> bool:
        """Return whether the wheel does not belong beside this torch: broken, or built for another one."""
        minor = ".".join(self.verdict.torch.split("+")[0].split(".")[:2])
        is_foreign = bool(self.verdict.built_for) and minor not in self.verdict.built_for
        return self.verdict.level.is_broken or (self.verdict.level is Level.LAYOUT_RISK and is_foreign)

    def as_json(self) -> dict[str, object]:
        """Return the entry of the JSON document; docs/reference/abi.md tells its fields."""
        return {
            **self.verdict.as_json(),
            "file": self.facts.file,
            "size_bytes": self.facts.size_bytes,
            "bytes_fetched": self.facts.fetched_bytes,
            "requests": self.facts.requests,
            "seconds": round(self.facts.seconds, 3),
            "read": dict(self.facts.read),
        }


@contextmanager
def _reader(stack: str | None, console: Console) -> Iterator[WheelReader]:
    indexes = load_stack(stack_path(stack)).python.indexes if stack else ()
    sources = Sources.of(indexes, default_index())
    with wheels.reader(sources, lambda text: console.print(text, soft_wrap=True, markup=False)) as reader:
        yield reader


def _environment(path: Path, facts: WheelFacts) -> InstalledEnvironment:
    """Read an environment of this machine, looking for the names that the wheel needs."""
    probe = paths.host_script("abi_probe")
    try:
        answer = probe.answer(str(path.resolve()), sorted(facts.distribution.undefined_names))
    except (probe.ProbeError, OSError) as error:
        raise InputError(f"{path} is no environment that can be read", why=str(error)) from None
    environment = parse_environment(answer)
    if not environment.version:
        raise InputError(f"no torch is installed in {path}", hint="name one of the index with --torch")
    return environment


def _host(where: str, facts: WheelFacts) -> InstalledEnvironment:
    raise BringupError(f"{facts.file} cannot be judged on {where} yet", why="reading a host is not there")


def _show_reports(console: Console, reports: Sequence[Report]) -> None:
    previous: WheelFacts | None = None
    by_wheel = {id(report.facts): [r for r in reports if r.facts is report.facts] for report in reports}
    for report in reports:
        if report.facts is previous:
            continue
        previous = report.facts
        group = by_wheel[id(report.facts)]
        for each in group:
            _show_verdict(console, each.verdict, is_detailed=len(group) == 1)
        if len(group) > 1:
            _line(console, f"  fits: {_listed(group[0].verdict.fits_torch) or 'no known torch'}")
        _show_cost(console, report.facts)


def _show_verdict(console: Console, verdict: Verdict, *, is_detailed: bool) -> None:
    line = Text(f"{verdict.name} {verdict.version} with torch {verdict.torch}: ")
    line.append(verdict.level.value, style=_STYLE.get(verdict.level, "red"))
    if not is_detailed and (count := len(verdict.missing_symbols)):
        line.append(f", {count} names missing")
    if not is_detailed and verdict.missing_libraries:
        line.append(f", {_listed(sorted(verdict.missing_libraries))} not found")
    console.print(line, soft_wrap=True)
    if not is_detailed:
        return
    used = {file.path for file in verdict.files if file.effect is not None}
    for finding, files in _grouped(verdict.findings):
        if finding.kind == "assumed":
            continue
        mark = "" if used & set(files) else " (not used here)"
        _line(console, f"  {finding.reason}{mark}")
        if finding.symbol and finding.demangled:
            _line(console, f"    symbol: {finding.symbol}")
        _line(console, f"    in:     {_listed(files)}")
        if finding.provided_by:
            _line(console, f"    has it: {_listed(finding.provided_by)}")
        if finding.remedy:
            _line(console, f"    do:     {finding.remedy}")
    assumed = sorted({f.library for f in verdict.findings if f.kind == "assumed" and f.library})
    if assumed:
        _line(console, f"  taken for granted: {_listed(assumed)}")
    if verdict.allowed_but_broken:
        _line(console, f"  its requirement on torch admits {_listed(verdict.allowed_but_broken)}, where it breaks")
    _line(console, f"  fits: {_torches(verdict.fits_torch)}")


def _grouped(findings: Iterable[AbiFinding]) -> Iterator[tuple[AbiFinding, list[str]]]:
    """Yield each finding once, with every file that it holds for."""
    groups: dict[tuple[object, ...], tuple[AbiFinding, list[str]]] = {}
    for finding in findings:
        key = (finding.kind, finding.symbol, finding.library, finding.reason)
        groups.setdefault(key, (finding, []))[1].append(finding.file)
    yield from groups.values()


def _show_cost(console: Console, facts: WheelFacts) -> None:
    if facts.requests:
        how = sorted(set(facts.read.values()))
        _line(
            console,
            f"  read {facts.fetched_bytes / 1e6:.1f} of {facts.size_bytes / 1e6:.1f} MB in {facts.requests} requests, "
            f"{facts.seconds:.1f} s ({', '.join(f'{list(facts.read.values()).count(h)} by {h}' for h in how)})",
        )


def _torches(versions: Sequence[str]) -> str:
    return f"torch {_listed(versions)}" if versions else "no torch of the index"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_SHOWN])
    return shown + (f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else "")


def _line(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
