"""``bringup abi``: say whether a wheel will load beside a torch, before anybody downloads it."""

from __future__ import annotations

import json as jsonlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bringup import paths, torch_index
from bringup.abi import judge
from bringup.commands import options
from bringup.commands.abi_index import index
from bringup.commands.abi_matrix import matrix
from bringup.commands.abi_text import Capability, Report, StackName, check_capability, open_reader, output, show_reports
from bringup.errors import InputError
from bringup.locking.compile import split
from bringup.wheels import WheelFacts, WheelReader

if TYPE_CHECKING:
    from bringup.host_environment import HostEnvironment

app = typer.Typer(
    name="abi",
    help="Say whether extension wheels will load beside a torch: no GPU, no import, a few megabytes of network.",
    no_args_is_help=True,
)
app.command()(matrix)
app.command()(index)


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
    platform: Annotated[
        str | None,
        typer.Option("--platform", help="Whose wheels of an index. Default: cp312-x86_64, or the environment's own."),
    ] = None,
    capability: Capability = None,
    stack: StackName = None,
    json: options.Json = False,
) -> None:
    """Judge wheels beside a torch: what is missing, in which file, and which torch would fit.

    Exit status: 0 they load, 1 one does not or was built for another torch, 2 it could not be judged.
    """
    if sum(each is not None for each in (torch, env, host)) > 1:
        raise InputError("--torch, --env and --host exclude one another")
    check_capability(capability)
    console = Console(stderr=True, highlight=False)
    machine = platform.rpartition("-")[2] if platform else os.uname().machine if env else "x86_64"
    split(platform or f"cp312-{machine}")
    known_torch = torch_index.load(machine)
    # A wrong version is said before anything is fetched.
    releases = (known_torch.find(torch),) if torch else known_torch.catalogue
    reports: list[Report] = []
    with open_reader(stack, console) as reader:
        for what in wheel:
            if env is not None or host is not None:
                facts, found = _beside(reader, what, platform, machine, lambda f: _installed(env, host, f))
                chosen = capability or found.capability
                verdict = judge(
                    facts.distribution, found.environment, catalogue=known_torch.catalogue, capability=chosen
                )
                reports.append(Report(facts, verdict))
                continue
            facts = reader.read(what, platform or f"cp312-{machine}")
            for release in releases:
                known = known_torch.catalogue_with(release)
                verdict = judge(facts.distribution, release, catalogue=known, capability=capability)
                reports.append(Report(facts, verdict))
    if json:
        document = {"schema": 1, "command": "abi check", "wheels": [report.as_json() for report in reports]}
        typer.echo(jsonlib.dumps(document, indent=2))
    else:
        show_reports(output(), reports)
    refused = {id(report.facts) for report in reports if report.verdict.is_refused}
    fitting = {id(report.facts) for report in reports if not report.verdict.is_refused}
    # Beside every known torch, a wheel is as it should be when one of them fits.
    if refused - (fitting if torch is None and env is None and host is None else set()):
        raise typer.Exit(1)


def _beside(
    reader: WheelReader,
    what: str,
    platform: str | None,
    machine: str,
    look: Callable[[WheelFacts], HostEnvironment],
) -> tuple[WheelFacts, HostEnvironment]:
    """Read a wheel and the environment that it shall go into; the environment's Python chooses the wheel."""
    facts = reader.read(what, platform or f"cp312-{machine}")
    found = look(facts)
    python = found.environment.python
    if platform is None and python not in (None, "3.12"):
        own = reader.read(what, f"cp{python.replace('.', '')}-{machine}")
        if own.file != facts.file:
            return own, look(own)
    return facts, found


def _installed(env: Path | None, host: str | None, facts: WheelFacts) -> HostEnvironment:
    """Read an environment of this machine or of a host, looking for the names that the wheel needs."""
    # Models of a host's answer; a wheel beside a release of the index needs none.
    from bringup.abi import parse_environment
    from bringup.host_environment import HostEnvironment, read_host

    names = sorted(facts.distribution.undefined_names)
    if env is not None:
        probe = paths.host_script("abi_probe")
        try:
            found = HostEnvironment(parse_environment(probe.answer(str(env.resolve()), names)), None)
        except (probe.ProbeError, OSError) as error:
            raise InputError(f"{env} is no environment that can be read", why=str(error)) from None
    else:
        inventory, _, name = (host or "").rpartition(":")
        if not inventory or not name:
            raise InputError(f"--host {host}: wanted INVENTORY:HOST", hint="such as inventory/fleet.py:gpu-01")
        found = read_host(inventory, name, names)
    if not found.environment.version:
        raise InputError(f"no torch is installed in {env or f'the serving environment of {host}'}")
    return found
