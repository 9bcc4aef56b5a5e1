"""Every code block of the documentation is parsed, and every bringup command line in it must exist as written."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer.main

from bringup import cli, paths
from bringup.stack import parse_stack

ROOT = paths.root()
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = sorted([*(ROOT / name for name in TOP), *(ROOT / "docs").rglob("*.md")])
cli.mount()
FENCE = re.compile(r"^```([a-z0-9-]*)[^\n]*\n(.*?)^```\s*$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)]*)?\)")


def blocks() -> list[tuple[str, str, str]]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text[: match.start()].count("\n") + 1
            found.append((f"{page.relative_to(ROOT)}:{line}", match[1], match[2]))
    return found


@pytest.mark.parametrize(("place", "language", "text"), [pytest.param(*block, id=block[0]) for block in blocks()])
def test_code_block_is_what_it_says(place: str, language: str, text: str) -> None:
    match language:
        case "toml":
            document = tomllib.loads(text)
            if document.get("schema") == 1 and "driver" in document:
                parse_stack(text, source=place)
        case "json":
            json.loads(text)
        case "python":
            ast.parse(text)
        case "console":
            for command in commands(text):
                subprocess.run(["bash", "-n", "-c", command], check=True)
                check_bringup(command, place)
        case "sh" | "bash":
            subprocess.run(["bash", "-n", "-c", text], check=True)
            for line in text.splitlines():
                check_bringup(line, place)
        case "text" | "diff" | "ini" | "":
            assert text.strip(), f"{place}: an empty block"
        case _:
            pytest.fail(f"{place}: nothing checks blocks of kind {language!r}")


def commands(text: str) -> list[str]:
    """Return the commands of a console block: lines after ``$``, continued by a backslash."""
    found: list[str] = []
    going_on = False
    for line in text.splitlines():
        if going_on:
            found[-1] += "\n" + line
        elif line.startswith("$ "):
            found.append(line[2:])
        else:
            continue
        going_on = line.endswith("\\")
    return found


def check_bringup(command: str, place: str) -> None:
    """Fail unless the options and subcommands of a bringup command line exist."""
    for part in re.split(r"&&|\|\||;|\|", command.replace("\\\n", " ")):
        words = shlex.split(part, comments=True)
        if not words or Path(words[0]).name != "bringup":
            continue
        group = typer.main.get_command(cli.app)
        rest = words[1:]
        while hasattr(group, "commands") and rest and not rest[0].startswith("-"):
            name = rest.pop(0)
            assert name in group.commands, f"{place}: bringup has no command {name!r}"
            group = group.commands[name]
        known = {option for parameter in group.params for option in (*parameter.opts, *parameter.secondary_opts)}
        known |= {"--help", "-h"}
        before = rest[: rest.index("--")] if "--" in rest else rest
        for word in before:
            if word.startswith("-") and word != "-":
                assert word.split("=")[0] in known, f"{place}: {part.strip()}: no option {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_readme_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_page_is_reachable_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or not page.exists():
            continue
        seen.add(page)
        for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            if target.endswith(".md") and not re.match(r"[a-z]+:", target):
                todo.append((page.parent / target).resolve())
    lost = [str(page.relative_to(ROOT)) for page in PAGES if page not in seen]
    assert lost == []
