"""Channels to this machine; those over ssh are used by every test on lab hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyinfra.api import Config, Host, Inventory, State
from pyinfra.context import ctx_config, ctx_host, ctx_inventory, ctx_state

from bringup.errors import HostError
from tasks.channel import fetch, open_channel


def connected(name: str) -> Iterator[Host]:
    inventory = Inventory(([name], {}))
    state = State(inventory, Config())
    host = next(iter(inventory))
    with ExitStack() as bound:
        for context, value in ((ctx_state, state), (ctx_inventory, inventory), (ctx_config, state.config)):
            bound.enter_context(context.use(value))
        bound.enter_context(ctx_host.use(host))
        host.connect()
        yield host


@pytest.fixture
def local() -> Iterator[Host]:
    yield from connected("@local")


@pytest.fixture
def scripted() -> Iterator[Host]:
    yield from connected("@fake/gpu-01")


def test_a_conversation(local: Host) -> None:
    channel = open_channel(local, ["sh", "-c", 'while read line; do echo "got $line"; done; echo end >&2; exit 7'])
    channel.write(b"one\n")
    assert channel.readline(timeout_s=10) == "got one"
    channel.write(b"two\n")
    assert channel.readline(timeout_s=10) == "got two"
    channel.end_input()
    assert channel.wait(timeout_s=10) == 7
    assert channel.errors() == "end\n"
    assert channel.readline(timeout_s=10) == ""
    channel.close()


def test_every_argument_is_quoted(local: Host) -> None:
    words = ["a b", "$HOME", "'", '"', "*", ""]
    channel = open_channel(local, ["printf", "%s|", *words])
    assert channel.read(timeout_s=10) == "|".join(words) + "|"
    assert channel.wait(timeout_s=10) == 0
    channel.close()


def test_a_silent_command_times_out(local: Host) -> None:
    channel = open_channel(local, ["cat"])
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.readline(timeout_s=0.1)
    with pytest.raises(TimeoutError):
        channel.wait(timeout_s=0.1)
    assert time.monotonic() - started < 5
    channel.close()
    assert channel.wait(timeout_s=10) == 0


def test_closing_ends_the_input(local: Host) -> None:
    channel = open_channel(local, ["cat"])
    channel.close()
    assert channel.wait(timeout_s=10) == 0


def test_writing_to_a_command_that_has_ended_fails(local: Host) -> None:
    channel = open_channel(local, ["true"])
    channel.wait(timeout_s=10)
    with pytest.raises(BrokenPipeError):
        channel.write(b"x" * (1 << 22))
    channel.close()


def test_large_output_and_input_do_not_block_each_other(local: Host) -> None:
    channel = open_channel(local, ["cat"])
    data = bytes(range(97, 123)) * 50_000 + b"\n"
    channel.write(data)
    channel.end_input()
    assert channel.read(timeout_s=30).encode() + b"\n" == data
    assert channel.wait(timeout_s=10) == 0
    channel.close()


def test_fetch(local: Host, tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("one\ntwo")
    assert fetch(local, str(file)) == "one\ntwo"
    assert fetch(local, str(tmp_path / "none"), missing="nothing") == "nothing"
    with pytest.raises(HostError, match="cannot read"):
        fetch(local, str(tmp_path / "none"))


def test_a_connector_that_cannot_stream_says_so(scripted: Host) -> None:
    with pytest.raises(HostError, match="nothing can be streamed"):
        open_channel(scripted, ["true"])
