"""Recompute a table of wheels and torch releases with `bringup abi matrix`, and compare it cell for cell.

Usage: abi_matrix.py [TABLE.tsv] [--only NAME …] [--markdown FILE]

A table has a line of column names (wheel, version, then torch releases) and one line for each wheel; a cell is
the number of distinct torch names that are missing, or ok, with c behind it when a CUDA library is missing too.
Lines that begin with # say where the numbers come from. Exit status: 0 every cell is the same, 1 some differ.
Needs the configured package index; fetches about 2 MB for each wheel.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bringup.abi import supplier

TABLE = Path(__file__).with_suffix(".tsv")


@dataclass(frozen=True)
class Expected:
    """One wheel of the table: its cells by torch release."""

    name: str
    version: str
    cells: Mapping[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("table", nargs="?", type=Path, default=TABLE)
    parser.add_argument("--only", nargs="+", help="only these distributions")
    parser.add_argument("--markdown", type=Path, help="write the computed table to this file")
    options = parser.parse_args()
    source, expected = read_table(options.table)
    if options.only:
        expected = [row for row in expected if row.name in options.only]
    started = time.monotonic()
    found = recomputed(expected)
    seconds = time.monotonic() - started
    differences = []
    for row in expected:
        got = found[row.name, row.version]
        for torch, wanted in row.cells.items():
            cell = as_cell(got, torch)
            if cell != wanted:
                differences.append(f"{row.name} {row.version} on torch {torch}: table {wanted}, computed {cell}")
    cells = sum(len(row.cells) for row in expected)
    fetched = sum(found[row.name, row.version]["bytes_fetched"] for row in expected)
    total = sum(found[row.name, row.version]["size_bytes"] for row in expected)
    summary = (
        f"{len(expected)} wheels, {cells} cells, {cells - len(differences)} equal, {len(differences)} different; "
        f"{fetched / 1e6:.1f} MB fetched of wheels of {total / 1e9:.2f} GB ({fetched / total:.2%}), {seconds:.0f} s"
    )
    print(summary)
    for difference in differences:
        print(difference)
    if options.markdown:
        options.markdown.write_text(markdown(source, expected, found, differences, summary), encoding="utf-8")
    return 1 if differences else 0


def read_table(path: Path) -> tuple[str, list[Expected]]:
    """Return where a table's numbers come from, and its rows."""
    lines = path.read_text(encoding="utf-8").splitlines()
    source = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    head, *rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return source, [Expected(row[0], row[1], dict(zip(head[2:], row[2:], strict=True))) for row in rows]


def recomputed(expected: Iterable[Expected]) -> dict[tuple[str, str], dict]:
    """Return what `bringup abi matrix` says of each wheel, by name and version."""
    wheels = [f"{row.name}=={row.version}" for row in expected]
    command = [sys.executable, "-m", "bringup.cli", "abi", "matrix", *wheels, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2) or not done.stdout:
        raise SystemExit(f"bringup abi matrix failed:\n{done.stderr}")
    rows = json.loads(done.stdout)["rows"]
    for row in rows:
        if row["problem"]:
            raise SystemExit(f"{row['file']}: {row['problem']}")
    return {(row["name"], row["version"]): row for row in rows}


def as_cell(row: Mapping, torch: str) -> str:
    """Return one wheel's cell for a torch release."""
    verdict = next(v for version, v in row["torch"].items() if version.split("+")[0] == torch)
    names = len(verdict["missing_symbols"])
    is_missing_cuda = any((s := supplier(name)) and s.is_cuda for name in verdict["missing_libraries"])
    return (str(names) if names else "ok") + ("c" if is_missing_cuda else "")


def markdown(source: str, expected: list[Expected], found: Mapping, differences: list[str], summary: str) -> str:
    """Return the page that keeps the result."""
    torches = list(expected[0].cells)
    lines = [
        "# Wheels beside torch releases",
        "",
        "Written by `benchmarks/abi_matrix.py --markdown`. A cell is the number of distinct torch names that the",
        "files of a wheel miss beside that torch, or ok; c: a CUDA library that some file needs is not among those",
        "that this torch brings. MB is what was fetched, of what the wheel has; requests and seconds are for one",
        "wheel, four being read at a time. The command is described [here](reference/abi.md), its use",
        "[here](how-to-check-a-wheel.md).",
        "",
        summary + ".",
        "",
        f"Compared with `{TABLE.name}`: {source}",
        "",
        f"| wheel | requires torch | {' | '.join(torches)} | MB | of MB | requests | s |",
        "|---|---" + "|---:" * (len(torches) + 4) + "|",
    ]
    for row in expected:
        got = found[row.name, row.version]
        declared = got["requires_torch"]
        lines.append(
            f"| {row.name} {row.version} | {'-' if declared is None else declared or 'any'} | "
            + " | ".join(as_cell(got, torch) for torch in torches)
            + f" | {got['bytes_fetched'] / 1e6:.2f} | {got['size_bytes'] / 1e6:.1f} | {got['requests']} "
            + f"| {got['seconds']:.1f} |"
        )
    lines += ["", "## Differences", ""]
    lines += [f"- {difference}" for difference in differences] or ["None."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
