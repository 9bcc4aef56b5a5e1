"""``bringup lock`` at its door: what it writes, prints and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from small_index import STACK, Site
from typer.testing import CliRunner

from bringup.commands.lock import lock
from bringup.errors import BringupError, InputError
from bringup.stack import parse_lock

app = typer.Typer()
app.command()(lock)


@pytest.fixture
def here(indexes: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a stack whose indexes are the site's; the controller's default one is too."""
    text = STACK
    for name in ("pytorch", "sglang", "flashinfer"):
        text = text.replace(f"https://{name}.invalid/simple", indexes.index(name))
    (tmp_path / "demo.toml").write_text(text)
    for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", indexes.index("default"))
    return tmp_path


def run(*arguments: str) -> tuple[int, str, str]:
    """Return (exit status, stdout, stderr); an error of ours stays the exception that the command line prints."""
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, BringupError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def test_lock_is_written_beside_the_stack_and_stays(here: Path) -> None:
    stack = str(here / "demo.toml")
    status, out, _ = run(stack, "--platform", "cp311-x86_64", "--json")
    answer = json.loads(out)
    assert (status, answer["changed"], answer["lock"]) == (0, True, str(here / "demo.lock.toml"))
    assert answer["platforms"]["cp311-x86_64"]["distributions"] == 8
    assert answer["platforms"]["cp311-x86_64"]["size_bytes"] > 0
    assert answer["findings"] == {}
    lock = parse_lock((here / "demo.lock.toml").read_text(), source="l")
    assert lock.wheels is not None
    assert lock.wheels.resolved_against == "index"
    status, out, _ = run(stack, "--json")
    assert (status, json.loads(out)["changed"], json.loads(out)["changes"]) == (0, False, [])


def test_versions_stay_until_upgrade(here: Path, indexes: Site) -> None:
    stack = str(here / "demo.toml")
    run(stack, "--platform", "cp311-x86_64")
    indexes.add("default", "demo-jinja", "2.2")
    (here / "uv-cache").rename(here / "uv-cache-old")
    assert json.loads(run(stack, "--json")[1])["changes"] == []
    assert json.loads(run(stack, "--upgrade", "--json")[1])["changes"] == [
        {"where": "cp311-x86_64", "name": "demo-jinja", "from": "2.1", "to": "2.2"}
    ]


def test_another_platform_is_added_to_those_the_lock_has(here: Path) -> None:
    stack = str(here / "demo.toml")
    run(stack, "--platform", "cp311-x86_64")
    run(stack, "--platform", "cp312-x86_64")
    lock = parse_lock((here / "demo.lock.toml").read_text(), source="l")
    assert lock.wheels is not None
    assert sorted(lock.wheels.platforms) == ["cp311-x86_64", "cp312-x86_64"]


def test_set_that_does_not_fit_leaves_the_lock_alone(here: Path, indexes: Site) -> None:
    stack = here / "demo.toml"
    run(str(stack), "--platform", "cp311-x86_64")
    before = (here / "demo.lock.toml").read_bytes()
    indexes.add("flashinfer", "flashinfer-jit-cache", "0.6.40+cu129", tag="cp39-abi3-manylinux_2_28_x86_64")
    stack.write_text(stack.read_text().replace("jit-cache==0.6.4+cu130", "jit-cache==0.6.40+cu129"))
    (here / "uv-cache").rename(here / "uv-cache-old")
    status, out, err = run(str(stack), "--json")
    assert status == 1
    assert [finding["code"] for finding in json.loads(out)["findings"]["cp311-x86_64"]] == ["BU-ENV-301", "BU-ENV-302"]
    assert (here / "demo.lock.toml").read_bytes() == before
    status, out, err = run(str(stack))
    assert (status, out) == (1, "")
    assert "BU-ENV-301  the family of step flashinfer has several versions" in err
    assert "not written: the set does not fit" in err


def test_explain_says_where_everything_comes_from(here: Path) -> None:
    status, out, _ = run(str(here / "demo.toml"), "--platform", "cp311-x86_64", "--explain")
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert ["torch", "demo-jinja", "2.1", "default", "torch"] in rows
    assert ["flashinfer", "flashinfer-jit-cache", "0.6.4+cu130", "flashinfer", "the", "stack"] in rows
    answer = json.loads(run(str(here / "demo.toml"), "--explain", "--json")[1])
    assert answer["explained"]["cp311-x86_64"][0] == {
        "step": "torch",
        "distribution": "demo-jinja",
        "version": "2.1",
        "index": "default",
        "required_by": ["torch"],
    }


def test_export_needs_a_lock_and_one_platform(here: Path) -> None:
    stack = str(here / "demo.toml")
    with pytest.raises(InputError) as raised:
        run(stack, "--export", "pylock")
    assert raised.value.hint == "run `bringup lock demo` first"
    run(stack, "--platform", "cp311-x86_64", "--platform", "cp312-x86_64")
    status, out, _ = run(stack, "--export", "pylock")
    assert (status, out.splitlines()[:3]) == (
        0,
        ['lock-version = "1.0"', 'created-by = "bringup"', 'requires-python = "==3.11.*"'],
    )
    with pytest.raises(InputError) as raised:
        run(stack, "--export", "requirements")
    assert raised.value.what == "--export requirements: wanted pylock"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        pytest.param(["nope"], "no stack is called 'nope'", id="unknown name"),
        pytest.param(["/nowhere/demo.toml"], "cannot read /nowhere/demo.toml", id="unknown path"),
        pytest.param(["lab", "--only", "debs"], "--only debs: wanted wheels or packages", id="unknown part"),
        pytest.param(["lab", "--lab", "/nowhere"], "no lab in /nowhere", id="no lab"),
    ],
)
def test_usage_errors(arguments: list[str], what: str) -> None:
    with pytest.raises(InputError) as raised:
        run(*arguments)
    assert raised.value.what == what
    assert raised.value.exit_code == 2
