"""``bringup abi``: say whether a wheel will load beside a torch, before anybody downloads it."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bringup import paths, torch_index
from bringup.abi import TorchIndex, judge
from bringup.commands import options
from bringup.commands.abi_index import index
from bringup.commands.abi_matrix import matrix
from bringup.commands.abi_text import (
    DEFAULT_PLATFORM,
    Capability,
    Report,
    StackName,
    check_capability,
    open_reader,
    show_reports,
)
from bringup.commands.terminal import stdout_console
from bringup.errors import InputError
from bringup.locking.compile import split
from bringup.wheels import WheelFacts

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
        typer.Option("--platform", help="Whose wheels of an index. Default: cp312-x86_64, or what the environment is."),
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
    if platform is not None:
        split(platform)
    beside = None if env is None and host is None else _Beside(env, host, platform)
    # A wrong version, or a host that does not answer, is said before anything is fetched.
    wanted = platform or (beside.platform(wheel) if beside else DEFAULT_PLATFORM)
    known_torch = TorchIndex(torch_index.known_builds(), wanted.rpartition("-")[2])
    releases = (known_torch.find(torch),) if torch else known_torch.catalogue
    reports: list[Report] = []
    with open_reader(stack, console) as reader:
        for what in wheel:
            facts = reader.read(what, wanted)
            if beside is not None:
                found = beside.look(facts)
                chosen = capability or found.capability
                verdict = judge(
                    facts.distribution, found.environment, catalogue=known_torch.catalogue, capability=chosen
                )
                reports.append(Report(facts, verdict))
                continue
            for release in releases:
                known = known_torch.catalogue_with(release)
                verdict = judge(facts.distribution, release, catalogue=known, capability=capability)
                reports.append(Report(facts, verdict))
    if json:
        document = {"schema": 1, "command": "abi check", "wheels": [report.as_json() for report in reports]}
        typer.echo(jsonlib.dumps(document, indent=2))
    else:
        show_reports(stdout_console(), reports)
    refused = {id(report.facts) for report in reports if report.verdict.is_refused}
    fitting = {id(report.facts) for report in reports if not report.verdict.is_refused}
    # Beside every known torch, a wheel is as it should be when one of them fits.
    if refused - (fitting if torch is None and env is None and host is None else set()):
        raise typer.Exit(1)


class _Beside:
    """An environment of this machine or of a host, looked at for the names that a wheel needs."""

    def __init__(self, env: Path | None, host: str | None, platform: str | None) -> None:
        self._env = env
        self._platform = platform
        self._inventory, _, self._host = (host or "").rpartition(":")
        if env is None and not (self._inventory and self._host):
            raise InputError(f"--host {host}: wanted INVENTORY:HOST", hint="such as inventory/fleet.py:gpu-01")
        self._where = str(env) if env is not None else f"the serving environment of {self._host}"

    def platform(self, wheels: Iterable[str]) -> str:
        """Return whose wheels fit the environment: its Python and its machine, as it says itself.

        It is asked even when every wheel is a file, whose own platform counts: the machine decides which builds of
        torch are to compare with.
        """
        found = self._looked(()).environment
        name = f"cp{(found.python or '').replace('.', '')}-{found.machine}"
        try:
            split(name)
        except InputError:
            if all(what.endswith(".whl") for what in wheels):
                return f"{DEFAULT_PLATFORM.partition('-')[0]}-{found.machine}"
            raise InputError(
                f"no wheel can be chosen for {self._where}",
                why=f"it has Python {found.python or 'of an unknown version'} on {found.machine}",
                hint="name a platform with --platform, or the wheel by its file",
            ) from None
        return name

    def look(self, facts: WheelFacts) -> HostEnvironment:
        """Return the environment as far as a wheel needs it; raises InputError for a wheel of another machine."""
        found = self._looked(sorted(facts.distribution.undefined_names))
        machine = found.environment.machine
        if facts.machine not in (None, machine):
            raise InputError(
                f"{facts.file} is for {facts.machine}, {self._where} is on {machine}",
                hint=f"name a wheel for {machine}" + (", or leave --platform out" if self._platform else ""),
            )
        return found

    def _looked(self, names: Sequence[str]) -> HostEnvironment:
        # Models of a host's answer; a wheel beside a release of the index needs none.
        from bringup.abi import parse_environment
        from bringup.host_environment import HostEnvironment, read_host

        if self._env is not None:
            probe = paths.host_script("abi_probe")
            try:
                found = HostEnvironment(parse_environment(probe.answer(str(self._env.resolve()), names)), None)
            except (probe.ProbeError, OSError) as error:
                raise InputError(f"{self._env} is no environment that can be read", why=str(error)) from None
        else:
            found = read_host(self._inventory, self._host, names)
        if not found.environment.version:
            raise InputError(f"no torch is installed in {self._where}")
        return found
