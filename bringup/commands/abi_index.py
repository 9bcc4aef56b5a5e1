"""``bringup abi index``: which torch builds the index of exports holds, and more of them."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bringup import paths, torch_index, torch_reader
from bringup.abi import TorchIndex, release_of
from bringup.commands import options
from bringup.commands.abi_text import DEFAULT_PLATFORM, Platform, StackName, open_reader, speaker
from bringup.commands.terminal import stdout_console
from bringup.errors import InputError
from bringup.locking.compile import split
from bringup.torch_index import IndexedTorch


def index(
    torch: Annotated[
        list[str] | None,
        typer.Argument(help="Requirement such as torch==2.10.0, path or address of a torch wheel.", metavar="[TORCH]…"),
    ] = None,
    env: Annotated[
        Path | None, typer.Option("--env", help="Read the torch that is installed in this environment.", exists=True)
    ] = None,
    output_file: Annotated[
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
        made.append(torch_reader.index_installed(_site(env)))
    if torch:
        with open_reader(stack, console) as reader:
            for what in torch:
                made.append(torch_reader.index_torch(reader, what, platform, say=speaker(console)))
    if output_file is not None and not made:
        raise InputError("nothing to write", hint="name a torch, such as torch==2.10.0")
    if output_file is not None:
        torch_index.write_index(output_file, made)
        console.print(f"{output_file}: {output_file.stat().st_size} bytes", soft_wrap=True)
    else:
        for build in made:
            console.print(str(torch_index.add(build)), soft_wrap=True)
    known = torch_index.known_builds() if not made else ()
    builds = made or [build for machine in ("x86_64", "aarch64") for build in TorchIndex(known, machine).builds]
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
    stdout_console().print(table)


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
        "brings": sorted(release_of(build).brings),
        "cuda_wheels": [{"file": wheel.file, "sha256": wheel.sha256} for wheel in build.cuda_wheels],
    }


def _site(env: Path) -> Path:
    probe = paths.host_script("abi_probe")
    for site in probe.site_directories(str(env.resolve())):
        if (Path(site) / "torch" / "version.py").is_file():
            return Path(site)
    raise InputError(f"no torch is installed in {env}")
