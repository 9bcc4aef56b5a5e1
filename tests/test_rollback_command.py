"""``bringup rollback``: what its options may mean together."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from bringup.commands.rollback import rollback
from bringup.errors import InputError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--yes", "--to", "0123456789ab", "--unpin"], "--unpin only removes the pin, and --to rolls back"),
        ([], "rollback changes hosts and nobody is there to ask"),
    ],
    ids=["back-and-only-unpin", "no-terminal"],
)
def test_what_cannot_be_meant_is_refused_before_the_inventory_is_read(words: list[str], message: str) -> None:
    app = typer.Typer()
    app.command()(rollback)
    ended = CliRunner().invoke(app, ["inventory/fleet.py", *words])
    assert isinstance(ended.exception, InputError), ended.output
    assert ended.exception.what.startswith(message)
