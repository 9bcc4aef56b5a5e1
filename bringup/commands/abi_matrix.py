"""``bringup abi matrix``: versions of distributions beside torch releases."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

import typer
from packaging.requirements import InvalidRequirement, Requirement
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from bringup import torch_index
from bringup.abi import Level, TorchIndex, TorchRelease, Verdict, demangle, judge, supplier
from bringup.commands import options
from bringup.commands.abi_text import (
    DEFAULT_PLATFORM,
    STYLE,
    Capability,
    Platform,
    StackName,
    check_capability,
    listed,
    open_reader,
    put,
)
from bringup.commands.terminal import stdout_console
from bringup.errors import BringupError, InputError
from bringup.locking.compile import split
from bringup.wheels import Offer, WheelFacts, WheelReader


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
    check_capability(capability)
    console = Console(stderr=True, highlight=False)
    index = TorchIndex(torch_index.known_builds(), platform.rpartition("-")[2])
    releases = [index.find(each) for each in torch] if torch else list(index.catalogue)
    with open_reader(stack, console) as reader:
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
        _show_matrix(stdout_console(), rows, releases)
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
            judge(facts.distribution, release, catalogue=index.catalogue_with(release), capability=capability)
            for release in releases
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
            reason = listed([*names, *sorted(verdict.missing_libraries)])
            reasons.setdefault(reason, []).append(verdict.torch.split("+")[0])
        declared = row.facts.distribution.requires_torch if row.facts else ""
        for reason, torches in reasons.items():
            what = f"{row.offer.name} {row.offer.version} requires torch{declared}"
            put(console, f"{what}, and breaks on {listed(torches)}: {reason}")
    read = [row.facts for row in rows if row.facts is not None]
    put(
        console,
        f"read {sum(f.fetched_bytes for f in read) / 1e6:.1f} of {sum(f.size_bytes for f in read) / 1e6:.0f} MB",
    )
    for row in rows:
        if row.problem:
            put(console, f"{row.offer.file}: {row.problem}")


def _cell(verdict: Verdict) -> Text:
    """Return a cell: how many names are missing, and the marks that `matrix` explains."""
    count = len(verdict.missing_symbols)
    is_missing_cuda = any((row := supplier(name)) is not None and row.is_cuda for name in verdict.missing_libraries)
    text = str(count) if count else "ok"
    if not count and verdict.missing_libraries and not is_missing_cuda:
        text = "lib"
    text += "c" if is_missing_cuda else ""
    text += {Level.LAYOUT_RISK: "r", Level.OPTIONAL: "o"}.get(verdict.level, "")
    return Text(text, style=STYLE.get(verdict.level, "red"))
