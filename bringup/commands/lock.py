"""``bringup lock``: fix every file of a stack, before any host is touched."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from bringup import locking
from bringup.commands import options
from bringup.commands.terminal import stdout_console
from bringup.errors import InputError
from bringup.finding import Finding
from bringup.guard import WheelGuard
from bringup.lab.layout import Layout
from bringup.locking.compile import PLATFORMS
from bringup.locking.proposal import propose as propose_newest
from bringup.locking.repository import fingerprint_of
from bringup.package_index import Sources, default_index
from bringup.stack import Lock, Stack, load_stack, lock_path_of, parse_lock, stack_path

Part = Literal["wheels", "packages"]


def lock(
    stack: Annotated[str, typer.Argument(help="Stack by name or path.", metavar="STACK")],
    platform: Annotated[
        list[str] | None,
        typer.Option(
            "--platform", help="Platform such as cp311-x86_64, beside those the lock has. Default: all of them."
        ),
    ] = None,
    release: Annotated[
        list[str] | None,
        typer.Option(
            "--release", help="Release such as debian12-x86_64 to lock .deb sets for, beside those the lock has."
        ),
    ] = None,
    only: Annotated[str | None, typer.Option("--only", help="Renew one part: wheels or packages.")] = None,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Take the newest versions instead of keeping what still fits.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where each distribution comes from and who asked for it.")
    ] = False,
    propose: Annotated[
        bool, typer.Option("--propose", help="Show the newest set that fits instead of writing a lock.")
    ] = False,
    export: Annotated[
        str | None, typer.Option("--export", help="Print the lock in another format: pylock.", metavar="FORMAT")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Lock file. Default: NAME.lock.toml beside the stack.")
    ] = None,
    apt_url: Annotated[
        str | None,
        typer.Option(
            "--apt-url",
            envvar="BRINGUP_APT_URL",
            help="Address above the releases' apt repositories; one with a password belongs into the variable. "
            "Default: NVIDIA's.",
        ),
    ] = None,
    apt_key: Annotated[
        Path | None,
        typer.Option("--apt-key", help="Public key that signs them. Default: NVIDIA's.", exists=True, dir_okay=False),
    ] = None,
    lab: Annotated[
        Path | None,
        typer.Option("--lab", help="Lock against the mirror of the lab in this state directory.", metavar="STATE_DIR"),
    ] = None,
    json: options.Json = False,
) -> None:
    """Resolve a stack into its lock: every wheel and every .deb by name, version, size and hash.

    Exit status: 0 the lock is written, 1 the set does not fit and nothing was written, 2 it could not be resolved.
    """
    console = Console(stderr=True)
    say = _say(console)
    path = stack_path(stack)
    if lab is not None:
        _lab(path, lab, console, json=json)
        return
    target = output or lock_path_of(path)
    previous = parse_lock(target.read_text(encoding="utf-8"), source=str(target)) if target.is_file() else None
    wanted = load_stack(path, lock_path=target)
    if export is not None:
        _export(wanted, export, platform or [])
        return
    if propose:
        _propose(wanted, platform or [], console, json=json)
        return
    if only not in (None, "wheels", "packages"):
        raise InputError(f"--only {only}: wanted wheels or packages")
    findings: dict[str, tuple[Finding, ...]] = {}
    explained: dict[str, list[dict[str, Any]]] = {}
    wheels = previous.wheels if previous else None
    if only != "packages" and wanted.python.existing is None:
        sources = Sources.of(wanted.python.indexes)
        part = locking.lock_wheels(
            wanted,
            _platforms(previous, platform),
            sources,
            previous=None if upgrade else previous,
            explain=explain,
            judge=WheelGuard(sources, say),
            say=say,
        )
        findings |= part.findings
        wheels = part.locked("index")
        explained = _explained(part.resolved) if explain else {}
    packages = dict(previous.packages) if previous else {}
    names = sorted({*packages, *(release or ())})
    if only != "wheels" and names:
        key = apt_key.read_bytes() if apt_key else None
        packages = locking.lock_packages(
            wanted,
            names,
            against="index",
            url=apt_url,
            key=key,
            fingerprint=fingerprint_of(key, source=str(apt_key)) if key else None,
            certificate=default_index().certificate,
        )
    made = Lock(schema_=1, stack=wanted.name, wheels=wheels, packages=packages)
    fits = not any(finding.is_refusal for found in findings.values() for finding in found)
    changed = locking.write_lock(target, made) if fits else False
    if json:
        document = _document(wanted, target, previous, made, changed, findings)
        print(jsonlib.dumps({**document, **({"explained": explained} if explain else {})}, indent=2))
    else:
        _show_explained(stdout_console(), explained)
        _show(console, target, previous, made, changed, findings)
    if not fits:
        raise typer.Exit(1)


def _say(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, soft_wrap=True, markup=False)


def _platforms(previous: Lock | None, asked: Sequence[str] | None) -> list[str]:
    have = list(previous.wheels.platforms) if previous and previous.wheels else []
    return sorted({*have, *(asked or ())}) or list(PLATFORMS)


def _lab(path: Path, state_dir: Path, console: Console, *, json: bool) -> None:
    record_file = Layout(state_dir).record
    try:
        record = jsonlib.loads(record_file.read_text(encoding="utf-8"))
        made = locking.lock_for_lab(
            path,
            state_dir,
            record["mirror_url"],
            key_file=Path(record["apt_key_file"]),
            key_fingerprint=record["apt_key_fingerprint"],
            judge=lambda sources: WheelGuard(sources, _say(console), keeps_torch=False),
            say=_say(console),
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"no lab in {state_dir}", why=str(error), hint="run `bringup lab up`") from None
    if json:
        print(
            jsonlib.dumps(
                {
                    "schema": 1,
                    "command": "lock",
                    "lock": str(made.path),
                    "changed": made.changed,
                    "findings": {"lab": [finding.as_json() for finding in made.findings]},
                },
                indent=2,
            )
        )
    else:
        for finding in made.findings:
            _finding(console, "lab", finding)
        if not made.findings:
            console.print(f"{made.path}: {'written' if made.changed else 'unchanged'}", soft_wrap=True)
    if any(finding.is_refusal for finding in made.findings):
        raise typer.Exit(1)


def _propose(stack: Stack, platforms: Sequence[str], console: Console, *, json: bool) -> None:
    name = platforms[0] if platforms else f"cp{stack.python.interpreter.replace('.', '')}-x86_64"
    sources, say = Sources.of(stack.python.indexes), _say(console)
    found = propose_newest(stack, name, sources, judge=WheelGuard(sources, say), say=say)
    if json:
        proposal = None
        if found.stack is not None:
            proposal = {
                "changes": {each: {"from": old, "to": new} for each, (old, new) in found.changes.items()},
                "limits": dict(found.left_out),
            }
        document = {"schema": 1, "command": "lock", "platform": name, "proposal": proposal, "tried": dict(found.tried)}
        print(jsonlib.dumps(document, indent=2))
    elif found.stack is None:
        tried = f"; tried torch {', '.join(found.tried)}" if found.tried else ""
        console.print(f"no set was found that fits{tried}", soft_wrap=True, highlight=False)
    elif not found.changes:
        console.print("the stack is the newest set that fits", soft_wrap=True)
    else:
        for each, (old, new) in found.changes.items():
            print(f"{each:<32}{old} -> {new}")
    if found.stack is None:
        raise typer.Exit(1)


def _export(stack: Stack, form: str, platforms: Sequence[str]) -> None:
    if form != "pylock":
        raise InputError(f"--export {form}: wanted pylock")
    if stack.lock is None or stack.lock.wheels is None:
        raise InputError(f"{stack.source} has no lock to export", hint=f"run `bringup lock {stack.name}` first")
    name = platforms[0] if platforms else f"cp{stack.python.interpreter.replace('.', '')}-x86_64"
    platform = stack.lock.wheels.platforms.get(name)
    if platform is None or len(platforms) > 1:
        raise InputError(
            "an exported lock is for one platform",
            hint=f"name one with --platform: {', '.join(stack.lock.wheels.platforms)}",
        )
    files = [file for step in platform.steps for file in step.files]
    addresses = locking.locate(files, name, Sources.of(stack.python.indexes))
    sys.stdout.write(locking.pylock_text(name, platform, addresses))


def _explained(resolved: Iterable[locking.ResolvedPlatform]) -> dict[str, list[dict[str, Any]]]:
    return {
        platform.platform: [
            {
                "step": step.name,
                "distribution": file.locked.distribution,
                "version": file.locked.version,
                "index": file.locked.index,
                "required_by": list(file.required_by),
            }
            for step in platform.steps
            for file in step.files
        ]
        for platform in resolved
    }


def _show_explained(console: Console, explained: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for platform, rows in explained.items():
        table = Table(title=platform, title_justify="left", box=None, pad_edge=False)
        for title in ("step", "distribution", "version", "index", "required by"):
            table.add_column(title, no_wrap=True)
        for row in rows:
            table.add_row(row["step"], row["distribution"], row["version"], row["index"], ", ".join(row["required_by"]))
        console.print(table)


def _changes(previous: Lock | None, made: Lock) -> list[dict[str, str | None]]:
    """Return what differs from the lock before: one entry for each platform or release and each name."""
    if previous is None:
        return []
    before, after = _versions(previous), _versions(made)
    return [
        {"where": where, "name": name, "from": before.get((where, name)), "to": after.get((where, name))}
        for where, name in sorted({*before, *after})
        if before.get((where, name)) != after.get((where, name))
    ]


def _versions(lock: Lock | None) -> Mapping[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    if lock is None:
        return found
    for platform, content in (lock.wheels.platforms if lock.wheels else {}).items():
        for step in content.steps:
            found |= {(platform, file.distribution): file.version for file in step.files}
    for name, packages in lock.packages.items():
        sets = (packages.driver, *packages.fabric.values(), *packages.toolkits.values())
        found |= {(name, package.name): package.version for each in sets for package in each}
    return found


def _totals(lock: Lock) -> dict[str, dict[str, int]]:
    return {
        name: {
            "distributions": sum(len(step.files) for step in platform.steps),
            "size_bytes": sum(file.size_bytes for step in platform.steps for file in step.files),
        }
        for name, platform in (lock.wheels.platforms if lock.wheels else {}).items()
    }


def _document(
    stack: Stack,
    target: Path,
    previous: Lock | None,
    made: Lock,
    changed: bool,
    findings: Mapping[str, Sequence[Finding]],
) -> dict[str, Any]:
    return {
        "schema": 1,
        "command": "lock",
        "stack": {"name": stack.name, "digest": stack.model_copy(update={"lock": made}).digest},
        "lock": str(target),
        "changed": changed,
        "platforms": _totals(made),
        "releases": {
            name: {
                "driver": len(packages.driver),
                "fabric": {kind: len(each) for kind, each in packages.fabric.items()},
                "toolkits": {toolkit: len(each) for toolkit, each in packages.toolkits.items()},
            }
            for name, packages in made.packages.items()
        },
        "changes": _changes(previous, made),
        "findings": {name: [finding.as_json() for finding in found] for name, found in findings.items() if found},
    }


def _show(
    console: Console,
    target: Path,
    previous: Lock | None,
    made: Lock,
    changed: bool,
    findings: Mapping[str, Sequence[Finding]],
) -> None:
    refused = False
    for name, found in findings.items():
        for finding in found:
            refused = refused or finding.is_refusal
            _finding(console, name, finding)
    for change in _changes(previous, made):
        console.print(
            f"{change['where']:<18}{change['name']:<32}{change['from'] or 'new'} -> {change['to'] or 'gone'}",
            soft_wrap=True,
        )
    for name, total in _totals(made).items():
        console.print(f"{name:<18}{total['distributions']} wheels, {total['size_bytes'] / 1e9:.2f} GB")
    for name, packages in made.packages.items():
        console.print(
            f"{name:<18}driver {len(packages.driver)}, toolkits "
            f"{sum(len(each) for each in packages.toolkits.values())} packages"
        )
    if not made.packages:
        console.print("no .deb sets: name a release with --release to lock them", soft_wrap=True)
    said = "not written: the set does not fit" if refused else "written" if changed else "unchanged"
    console.print(f"{target}: {said}", soft_wrap=True)


def _finding(console: Console, where: str, finding: Finding) -> None:
    console.print(f"{where:<18}{finding.code}  {finding.cause}", soft_wrap=True, markup=False)
    console.print(f"{'':<18}  do: {finding.remedy}", soft_wrap=True, markup=False)
