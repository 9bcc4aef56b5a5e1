"""What the commands of ``bringup abi`` share: their options, their reader, and how a verdict is printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from bringup import wheels
from bringup.abi import AbiFinding, Level, Verdict
from bringup.errors import InputError
from bringup.locking.compile import PLATFORMS
from bringup.package_index import Sources, default_index
from bringup.wheels import WheelFacts, WheelReader

if TYPE_CHECKING:
    from bringup.stack import Index

Platform = Annotated[
    str, typer.Option("--platform", help=f"Whose wheels of an index: {', '.join(PLATFORMS)}.", metavar="PLATFORM")
]
StackName = Annotated[str | None, typer.Option("--stack", help="Search the indexes of this stack too.")]
Capability = Annotated[
    str | None,
    typer.Option("--capability", help="The GPU's compute capability, such as 9.0: some packages choose by it."),
]
DEFAULT_PLATFORM = "cp312-x86_64"
STYLE = {
    Level.OK: "green",
    Level.OK_STABLE: "green",
    Level.OPTIONAL: "yellow",
    Level.LAYOUT_RISK: "yellow",
}
_MOST_SHOWN = 12


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


def check_capability(capability: str | None) -> None:
    """Raise InputError for what is no compute capability."""
    if capability is not None and not re.fullmatch(r"\d+\.\d", capability):
        raise InputError(f"--capability {capability}: wanted a compute capability such as 9.0")


@contextmanager
def open_reader(stack: str | None, console: Console) -> Iterator[WheelReader]:
    sources = Sources.of(_indexes(stack) if stack else (), default_index())
    with wheels.reader(sources, speaker(console)) as reader:
        yield reader


def _indexes(stack: str) -> tuple[Index, ...]:
    # Reading a stack takes longer to load than most wheels to judge.
    from bringup.stack import load_stack, stack_path

    return load_stack(stack_path(stack)).python.indexes


def speaker(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, soft_wrap=True, markup=False)


def show_reports(console: Console, reports: Sequence[Report]) -> None:
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
            put(console, f"  fits: {listed(group[0].verdict.fits_torch) or 'no known torch'}")
        _show_cost(console, report.facts)


def _show_verdict(console: Console, verdict: Verdict, *, is_detailed: bool) -> None:
    line = Text(f"{verdict.name} {verdict.version} with torch {verdict.torch}: ")
    line.append(verdict.level.value, style=STYLE.get(verdict.level, "red"))
    if not is_detailed and (count := len(verdict.missing_symbols)):
        line.append(f", {count} names missing")
    if not is_detailed and verdict.missing_libraries:
        line.append(f", {listed(sorted(verdict.missing_libraries))} not found")
    console.print(line, soft_wrap=True)
    if not is_detailed:
        return
    used = {file.path for file in verdict.files if file.effect is not None}
    for finding, files in _grouped(verdict.findings):
        if finding.kind == "assumed":
            continue
        mark = "" if used & set(files) else " (not used here)"
        # Who needs a library is in the list of files.
        reason = finding.reason.partition(";")[0] if finding.kind == "broken-library" else finding.reason
        put(console, f"  {reason}{mark}")
        if finding.symbol and finding.demangled:
            put(console, f"    symbol: {finding.symbol}")
        put(console, f"    in:     {listed(files)}")
        if finding.provided_by:
            put(console, f"    has it: {listed(finding.provided_by)}")
        if finding.remedy:
            put(console, f"    do:     {finding.remedy}")
    assumed = sorted({f.library for f in verdict.findings if f.kind == "assumed" and f.library})
    if assumed:
        put(console, f"  taken for granted: {listed(assumed)}")
    if verdict.allowed_but_broken:
        put(console, f"  its requirement on torch admits {listed(verdict.allowed_but_broken)}, where it breaks")
    put(console, f"  fits: {_torches(verdict.fits_torch)}")


def _grouped(findings: Iterable[AbiFinding]) -> Iterator[tuple[AbiFinding, list[str]]]:
    """Yield each finding once, the worst first, with every file that it holds for."""
    groups: dict[tuple[object, ...], tuple[AbiFinding, list[str]]] = {}
    for finding in findings:
        key = (
            (finding.kind, finding.symbol, finding.library) if finding.symbol or finding.library else (finding.reason,)
        )
        groups.setdefault(key, (finding, []))[1].append(finding.file)
    worst = {level.value: level.rank for level in Level}
    yield from sorted(groups.values(), key=lambda group: worst.get(group[0].kind, len(worst)))


def _show_cost(console: Console, facts: WheelFacts) -> None:
    if facts.requests:
        how = sorted(set(facts.read.values()))
        put(
            console,
            f"  read {facts.fetched_bytes / 1e6:.1f} of {facts.size_bytes / 1e6:.1f} MB in {facts.requests} requests, "
            f"{facts.seconds:.1f} s ({', '.join(f'{list(facts.read.values()).count(h)} by {h}' for h in how)})",
        )


def _torches(versions: Sequence[str]) -> str:
    return f"torch {listed(versions)}" if versions else "no torch of the index"


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_SHOWN])
    return shown + (f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else "")


def put(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
