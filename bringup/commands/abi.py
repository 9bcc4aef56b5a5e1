"""``bringup abi``: say whether a wheel will load beside a torch, before anybody downloads it."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import InvalidRequirement, Requirement
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from bringup import paths, torch_index, wheels
from bringup.abi import (
    AbiFinding,
    InstalledEnvironment,
    Level,
    TorchRelease,
    Verdict,
    demangle,
    judge,
    parse_environment,
    supplier,
)
from bringup.commands import options
from bringup.commands.lock import stack_path
from bringup.errors import BringupError, InputError
from bringup.guard import is_refused
from bringup.locking import Sources, default_index
from bringup.locking.compile import PLATFORMS, split
from bringup.stack import load_stack
from bringup.torch_index import IndexedTorch, TorchIndex
from bringup.wheels import Offer, WheelFacts, WheelReader

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
                known = index.catalogue_with(side) if isinstance(side, TorchRelease) else index.catalogue
                verdict = judge(facts.distribution, side, catalogue=known, capability=capability)
                reports.append(Report(facts, verdict))
    if json:
        document = {"schema": 1, "command": "abi check", "wheels": [report.as_json() for report in reports]}
        typer.echo(jsonlib.dumps(document, indent=2))
    else:
        _show_reports(_stdout(), reports)
    refused = {id(report.facts) for report in reports if is_refused(report.verdict)}
    fitting = {id(report.facts) for report in reports if not is_refused(report.verdict)}
    # Beside every known torch, a wheel is as it should be when one of them fits.
    if refused - (fitting if torch is None and env is None and host is None else set()):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Report:
    """One wheel on one torch."""

    facts: WheelFacts
    verdict: Verdict

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
    with wheels.reader(sources, _say(console)) as reader:
        yield reader


@app.command()
def matrix(
    name: Annotated[
        list[str],
        typer.Argument(help="Distributions, each with or without versions: sgl-kernel or 'vllm>=0.20,<0.26'."),
    ],
    versions: Annotated[
        int, typer.Option("--versions", min=1, help="How many of the newest versions that fit NAME.")
    ] = 6,
    torch: Annotated[
        list[str] | None, typer.Option("--torch", help="Only this torch; may be repeated. Default: every known one.")
    ] = None,
    platform: Platform = DEFAULT_PLATFORM,
    capability: Capability = None,
    stack: StackName = None,
    json: options.Json = False,
) -> None:
    """Judge versions of distributions beside torch releases, as a table.

    A cell holds the number of names that are missing, or ok; c: a CUDA library is not there; r: every name is there,
    but the wheel was built for another torch; o: the package survives without what is broken. Exit status: 0 all
    could be judged, 2 some wheel could not be read.
    """
    split(platform)
    console = Console(stderr=True, highlight=False)
    index = torch_index.load(platform.rpartition("-")[2])
    releases = [index.find(each) for each in torch] if torch else list(index.catalogue)
    with _reader(stack, console) as reader:
        offers = [offer for each in name for offer in _newest(reader, each, platform, versions)]
        rows = _read_all(reader, offers, releases, index, capability, console, quiet=json)
    if json:
        document = {
            "schema": 1,
            "command": "abi matrix",
            "torch": [release.version for release in releases],
            "rows": [row.as_json() for row in rows],
        }
        typer.echo(jsonlib.dumps(document, indent=2))
    else:
        _show_matrix(_stdout(), rows, releases)
    if any(row.problem for row in rows):
        raise typer.Exit(2)


@dataclass(frozen=True)
class Row:
    """One wheel on every torch that was asked for. ``facts`` None: it could not be read, for ``problem``."""

    offer: Offer
    facts: WheelFacts | None = None
    verdicts: tuple[Verdict, ...] = ()
    problem: str | None = None

    @property
    def wrong_requirement(self) -> tuple[Verdict, ...]:
        """Return the verdicts on torch releases that the wheel's own requirement admits and where it breaks."""
        if self.facts is None or not self.facts.distribution.requires_torch:
            return ()
        return tuple(v for v in self.verdicts if v.torch.split("+")[0] in v.allowed_but_broken)

    def as_json(self) -> dict[str, object]:
        """Return the entry of the JSON document; docs/reference/abi.md tells its fields."""
        about: dict[str, object] = {
            "name": self.offer.name,
            "version": str(self.offer.version),
            "file": self.offer.file,
            "problem": self.problem,
        }
        if self.facts is None:
            return about
        declared = self.facts.distribution.requires_torch
        return {
            **about,
            "size_bytes": self.facts.size_bytes,
            "bytes_fetched": self.facts.fetched_bytes,
            "requests": self.facts.requests,
            "seconds": round(self.facts.seconds, 3),
            "requires_torch": declared,
            "built_for": list(self.verdicts[0].built_for) if self.verdicts else [],
            "fits_torch": list(self.verdicts[0].fits_torch) if self.verdicts else [],
            "wrong_requirement": [verdict.torch for verdict in self.wrong_requirement],
            "torch": {
                verdict.torch: {
                    "verdict": verdict.level.value,
                    "missing_symbols": sorted(verdict.missing_symbols),
                    "missing_libraries": sorted(verdict.missing_libraries),
                }
                for verdict in self.verdicts
            },
        }


@app.command()
def index(
    torch: Annotated[
        list[str] | None,
        typer.Argument(help="Requirement such as torch==2.10.0, path or address of a torch wheel.", metavar="[TORCH]…"),
    ] = None,
    env: Annotated[
        Path | None, typer.Option("--env", help="Read the torch that is installed in this environment.", exists=True)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write one file instead of adding to this machine's index.")
    ] = None,
    platform: Platform = DEFAULT_PLATFORM,
    stack: StackName = None,
    json: options.Json = False,
) -> None:
    """Add torch builds to the index of exports, or list what it holds.

    The index that comes with bringup has the releases of the public index. A nightly, a build for another CUDA
    toolkit or an installed torch is added to the state directory; each wheel is fetched once and not kept.
    """
    console = Console(stderr=True, highlight=False)
    split(platform)
    made: list[IndexedTorch] = []
    if env is not None:
        made.append(torch_index.index_installed(_site(env)))
    if torch:
        with _reader(stack, console) as reader:
            for what in torch:
                made.append(torch_index.index_torch(reader, what, platform, say=_say(console)))
    if output is not None and not made:
        raise InputError("nothing to write", hint="name a torch, such as torch==2.10.0")
    if output is not None:
        torch_index.write_index(output, made)
        console.print(f"{output}: {output.stat().st_size} bytes", soft_wrap=True)
    else:
        for build in made:
            console.print(str(torch_index.add(build)), soft_wrap=True)
    builds = made or [build for machine in ("x86_64", "aarch64") for build in torch_index.load(machine).builds]
    if json:
        document = {"schema": 1, "command": "abi index", "builds": [_build_json(build) for build in builds]}
        typer.echo(jsonlib.dumps(document, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("torch", "CUDA", "machine", "Python", "libraries", "names", "read from"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("libraries", "names") else "left")
    for build in builds:
        count = sum(map(len, build.exports.values()))
        table.add_row(
            build.version,
            build.cuda or "-",
            build.machine,
            build.python,
            str(len(build.exports)),
            str(count),
            build.file,
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


def _build_json(build: IndexedTorch) -> dict[str, object]:
    return {
        "version": build.version,
        "cuda": build.cuda,
        "machine": build.machine,
        "python": build.python,
        "file": build.file,
        "sha256": build.sha256,
        "size_bytes": build.size_bytes,
        "names": sum(map(len, build.exports.values())),
        "brings": sorted(build.brings),
        "cuda_wheels": [{"file": wheel.file, "sha256": wheel.sha256} for wheel in build.cuda_wheels],
    }


def _site(env: Path) -> Path:
    probe = paths.host_script("abi_probe")
    for site in probe.site_directories(str(env.resolve())):
        if (Path(site) / "torch" / "version.py").is_file():
            return Path(site)
    raise InputError(f"no torch is installed in {env}")


def _newest(reader: WheelReader, what: str, platform: str, count: int) -> list[Offer]:
    try:
        wanted = Requirement(what)
    except InvalidRequirement as error:
        raise InputError(f"not a distribution: {what!r}", why=str(error)) from None
    found = reader.indexes.versions(wanted.name, platform, str(wanted.specifier))
    if not found:
        raise InputError(f"no wheel of {what} for {platform}")
    return [found[version] for version in list(found)[-count:]]


def _read_all(
    reader: WheelReader,
    offers: Sequence[Offer],
    releases: Sequence[TorchRelease],
    index: TorchIndex,
    capability: str | None,
    console: Console,
    *,
    quiet: bool,
) -> list[Row]:
    """Read and judge wheels, a few at a time; one that cannot be read does not end the others."""

    def one(offer: Offer) -> Row:
        try:
            facts = reader.read_offer(offer)
        except BringupError as error:
            return Row(offer, problem=str(error))
        verdicts = (
            judge(facts.distribution, release, catalogue=index.catalogue, capability=capability) for release in releases
        )
        return Row(offer, facts, tuple(verdicts))

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} wheels"))
    with (
        Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress,
        ThreadPoolExecutor(4) as pool,
    ):
        task = progress.add_task("reading", total=len(offers))
        rows = []
        for row in pool.map(one, offers):
            rows.append(row)
            progress.advance(task)
        return rows


def _show_matrix(console: Console, rows: Sequence[Row], releases: Sequence[TorchRelease]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("wheel", no_wrap=True)
    table.add_column("requires torch", no_wrap=True)
    for release in releases:
        table.add_column(release.version.split("+")[0], justify="right", no_wrap=True)
    for row in rows:
        if row.facts is None:
            table.add_row(f"{row.offer.name} {row.offer.version}", "?", *("?" for _ in releases))
            continue
        declared = row.facts.distribution.requires_torch
        table.add_row(
            f"{row.offer.name} {row.offer.version}",
            "-" if declared is None else declared or "any",
            *(_cell(verdict) for verdict in row.verdicts),
        )
    console.print(table)
    for row in rows:
        reasons: dict[str, list[str]] = {}
        for verdict in row.wrong_requirement:
            names = [demangle(name) or name for name in sorted(verdict.missing_symbols)]
            reason = _listed([*names, *sorted(verdict.missing_libraries)])
            reasons.setdefault(reason, []).append(verdict.torch.split("+")[0])
        declared = row.facts.distribution.requires_torch if row.facts else ""
        for reason, torches in reasons.items():
            what = f"{row.offer.name} {row.offer.version} requires torch{declared}"
            _line(console, f"{what}, and breaks on {_listed(torches)}: {reason}")
    read = [row.facts for row in rows if row.facts is not None]
    _line(
        console,
        f"read {sum(f.fetched_bytes for f in read) / 1e6:.1f} of {sum(f.size_bytes for f in read) / 1e6:.0f} MB",
    )
    for row in rows:
        if row.problem:
            _line(console, f"{row.offer.file}: {row.problem}")


def _cell(verdict: Verdict) -> Text:
    """Return a cell: how many names are missing, and the marks that `matrix` explains."""
    count = len(verdict.missing_symbols)
    is_missing_cuda = any((row := supplier(name)) is not None and row.is_cuda for name in verdict.missing_libraries)
    text = str(count) if count else "ok"
    if not count and verdict.missing_libraries and not is_missing_cuda:
        text = "lib"
    text += "c" if is_missing_cuda else ""
    text += {Level.LAYOUT_RISK: "r", Level.OPTIONAL: "o"}.get(verdict.level, "")
    return Text(text, style=_STYLE.get(verdict.level, "red"))


def _stdout() -> Console:
    # A pipe has no width; lines cut at 80 characters would be lost to whatever reads them.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 240)


def _say(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, soft_wrap=True, markup=False)


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
    """Yield each finding once, the worst first, with every file that it holds for."""
    groups: dict[tuple[object, ...], tuple[AbiFinding, list[str]]] = {}
    for finding in findings:
        key = (finding.kind, finding.symbol, finding.library, finding.reason)
        groups.setdefault(key, (finding, []))[1].append(finding.file)
    worst = {level.value: level.rank for level in Level}
    yield from sorted(groups.values(), key=lambda group: worst.get(group[0].kind, len(worst)))


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
