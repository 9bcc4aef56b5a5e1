"""Secrets that must never be seen, and the search for them in every form they could be written in."""

from __future__ import annotations

import base64
import secrets
import stat
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote


class Canaries:
    """One secret for each input, by the name of the input."""

    def __init__(self) -> None:
        self.by_name: dict[str, str] = {}

    def plant(self, name: str, *, awkward: str = "") -> str:
        """Return the secret for an input; ``awkward`` stands in its middle, and must be quoted in a URL."""
        assert name not in self.by_name
        self.by_name[name] = f"canary{secrets.token_hex(8)}{awkward}{secrets.token_hex(8)}"
        return self.by_name[name]

    def forms(self) -> dict[bytes, str]:
        """Return every text that gives a secret away, and whose secret it is."""
        found: dict[bytes, str] = {}
        for name, secret in self.by_name.items():
            for text in {secret, quote(secret, safe="")}:
                found[text.encode()] = name
                for before in range(3):
                    # In base64 a text has three looks, by where it begins; its ends depend on what is around.
                    coded = base64.b64encode(b"x" * before + text.encode())
                    found[coded[4 if before else 0 : -4]] = name
        return found

    def in_text(self, text: str | bytes) -> set[str]:
        """Return the names of the secrets that a text gives away."""
        data = text.encode() if isinstance(text, str) else text
        return {name for form, name in self.forms().items() if form in data}

    def in_files(self, places: Iterable[Path], patterns: Path, *, newer_than: Path | None = None) -> set[str]:
        """Return "PATH: NAMES" of every file below ``places`` that gives a secret away.

        ``patterns`` is written for grep and left out; ``newer_than`` None means files of any age.
        """
        patterns.write_bytes(b"\n".join(self.forms()) + b"\n")
        fresh = ["-newer", str(newer_than)] if newer_than else []
        there = [str(place) for place in places if place.exists()]
        assert there
        found = subprocess.run(
            ["find", *there, "-xdev", "-path", str(patterns), "-prune", "-o", "-type", "f", *fresh, "-print0"],
            stdout=subprocess.PIPE,
            check=False,
        ).stdout
        # Files of other people's programs come and go meanwhile: -s.
        grep = ["xargs", "--null", "--no-run-if-empty", "grep", "-lasF", "-f", str(patterns)]
        hits = subprocess.run(grep, input=found, stdout=subprocess.PIPE, check=False).stdout
        patterns.unlink()
        lines = set()
        for hit in hits.decode("utf-8", "surrogateescape").splitlines():
            lines.add(f"{hit}: {', '.join(sorted(self.in_text(Path(hit).read_bytes())))}")
        return lines


@dataclass
class Watch:
    """What was seen while commands ran. ``kept`` holds what files under /run/bringup that gave a secret away were."""

    processes: set[str] = field(default_factory=set)
    kept: set[tuple[str, str]] = field(default_factory=set)
    rounds: int = 0


@contextmanager
def watching(canaries: Canaries, host_pid: Callable[[], int | None]) -> Iterator[Watch]:
    """Look at the command line of every process of this machine, its lab hosts' included, until the block ends.

    ``host_pid`` returns the process 1 of the host whose ``/run/bringup`` is looked at as well.
    """
    seen = Watch()
    is_over = threading.Event()
    root: list[int] = []

    def look() -> None:
        forms = canaries.forms()
        pids: set[str] = set()
        while not is_over.wait(0.04):
            seen.rounds += 1
            present = {path.name for path in Path("/proc").iterdir() if path.name.isdigit()}
            # A process gets another command line when it executes another program: all are read again now and then.
            for pid in present if seen.rounds % 10 == 0 else present - pids:
                try:
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()
                except OSError:
                    continue
                if names := {name for form, name in forms.items() if form in line}:
                    seen.processes.add(f"{line[:300]!r}: {', '.join(sorted(names))}")
            pids = present
            host = host_pid() if seen.rounds % 5 == 0 or not root else root[-1]
            if host is not None:
                root.append(host)
                _look_at_run(Path(f"/proc/{host}/root/run/bringup"), canaries, seen)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def _look_at_run(directory: Path, canaries: Canaries, seen: Watch) -> None:
    try:
        for path in directory.iterdir():
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) and canaries.in_text(path.read_bytes()):
                # Of a file that is written beside its place and renamed, only the place has a name.
                name = ".bringup-*" if path.name.startswith(".bringup-") else path.name
                seen.kept.add((name, oct(stat.S_IMODE(mode))))
    except OSError:
        return
