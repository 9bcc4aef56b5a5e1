"""The command line: mount one module per command, and turn what cannot go on into a clear message."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated

import typer

import bringup
from bringup.errors import BringupError

app = typer.Typer(
    name="bringup",
    help="Take GPU servers from a bare install to a verified CUDA 13 inference stack, and keep them there.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

COMMANDS = (
    "plan",
    "apply",
    "verify",
    "drift",
    "rollback",
    "trust",
    "lock",
    "rollout",
    "bundle",
    "history",
    "status",
)
GROUPS = ("lab", "abi")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bringup {bringup.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def _mount() -> None:
    for name in COMMANDS:
        module = _module(name)
        if module is not None:
            app.command(name)(getattr(module, name))
    for name in GROUPS:
        module = _module(name)
        if module is not None:
            app.add_typer(module.app, name=name)


def _module(name: str):  # type: ignore[no-untyped-def]
    try:
        return importlib.import_module(f"bringup.commands.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"bringup.commands.{name}":
            return None
        raise


_mount()


def main() -> None:
    """Run the command line; exit 0 as wanted, 1 looked and something is not, 2 could not do the job."""
    try:
        app(standalone_mode=True)
    except BringupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted: hosts keep what was finished; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output went away (for example `| head`): nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
