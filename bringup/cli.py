"""The command line: mount one module per command, and turn what cannot go on into a clear message."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, NoReturn

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
    "rollout",
    "history",
    "status",
    "trust",
    "lock",
    "bundle",
)
GROUPS = ("abi", "lab")

_OBJECTS_BETWEEN_COLLECTIONS = 50_000


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


def mount(words: Sequence[str] = ()) -> None:
    """Mount the command that a command line names; all of them when it names none (help, completion).

    Importing every command would cost a converged host's `apply` a second of nothing.
    """
    named = next((word for word in words if not word.startswith("-")), None)
    for name in COMMANDS:
        if named in (None, name) or named not in (*COMMANDS, *GROUPS):
            app.command(name)(getattr(_module(name), name))
    for name in GROUPS:
        if named in (None, name) or named not in (*COMMANDS, *GROUPS):
            app.add_typer(_module(name).app, name=name)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"bringup.commands.{name}")


def main() -> NoReturn:
    """Run the command line; exit 0 as wanted, 1 looked and something is not, 2 could not do the job."""
    # Importing makes many objects and no garbage: looking for some among them is a tenth of what a short run costs.
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, 20, 20)
    try:
        _run()
        status: str | int | None = 0
    except SystemExit as leaving:
        status = leaving.code
    _leave(status)


def _leave(status: str | int | None) -> NoReturn:
    """Exit without taking every module apart first, which costs a short run a quarter of its time."""
    is_alone = all(thread is threading.main_thread() or thread.daemon for thread in threading.enumerate())
    if not is_alone or isinstance(status, str):
        sys.exit(status)
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # whoever started us may have closed it
                stream.flush()
    except OSError:
        os._exit(status or 1)  # nobody reads it any more
    os._exit(status or 0)


def _run() -> None:
    mount(() if "_BRINGUP_COMPLETE" in os.environ else sys.argv[1:])
    try:
        app(standalone_mode=True)
    except BringupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except SystemExit as leaving:
        # Typer makes an exit of a Ctrl-C, and says nothing. A command that caught it has said what there is to say.
        if isinstance(getattr(leaving.__context__, "__cause__", None), KeyboardInterrupt):
            print("interrupted: hosts keep what was finished; run the same command again to go on", file=sys.stderr)
        raise
    except BrokenPipeError:
        # The reader of our output went away (for example `| head`): nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if any(word.startswith("-v") for word in sys.argv):
            raise
        print(
            f"error: bringup has a fault: {type(error).__name__}: {error}\n  hint: run it again with -v and report it",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
