"""Write to whoever reads what a command prints: a person at a terminal, or another program."""

from __future__ import annotations

import sys

from rich.console import Console


def stdout_console() -> Console:
    """Return the console for standard output. Into a pipe a row of a table is one line, however long it is."""
    # A pipe has no width; lines broken at 80 characters would be lost to whatever reads them.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 500)
