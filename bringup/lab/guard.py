"""Take a lab command's work back when the command fails or is killed, whatever kills it.

The command starts a guard before it changes anything and keeps a pipe to it. If the pipe closes before the word
``keep`` came, the guard undoes. It inherits the lab's lock, so no other command comes between.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

KEEP = b"keep\n"


@dataclass(frozen=True)
class Undo:
    """What one command starts: hosts to stop, those of them to remove, and whether network and mirror go too."""

    state_dir: Path
    stop: tuple[str, ...]
    discard: tuple[str, ...]
    network: bool

    def as_json(self) -> str:
        """Return the form that ``parse`` reads."""
        return json.dumps(
            {"state_dir": str(self.state_dir), "stop": self.stop, "discard": self.discard, "network": self.network}
        )

    @classmethod
    def parse(cls, text: str) -> Undo:
        """Read what ``as_json`` wrote."""
        read = json.loads(text)
        return cls(Path(read["state_dir"]), tuple(read["stop"]), tuple(read["discard"]), read["network"])


class Guard:
    """A context that leaves nothing behind unless its body ends well."""

    def __init__(self, undo: Undo, lock: IO[str]) -> None:
        self._undo = undo
        self._lock = lock
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Guard:
        log = self._undo.state_dir / "guard.log"
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bringup.lab.guard", self._undo.as_json()],
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=[self._lock.fileno()],
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        # Waits for the undoing too: when a failed command returns, nothing of it is left.
        self._process.communicate(KEEP if kind is None else b"")


def main(argv: list[str]) -> int:
    """Wait for the end of the command; undo what the only argument says unless it is to be kept."""
    if sys.stdin.buffer.read() == KEEP:
        return 0
    from bringup.lab.lab import Lab  # Only now: most guards have nothing to do.

    undo = Undo.parse(argv[0])
    Lab.open(undo.state_dir, tell=lambda line: print(line, flush=True)).undo(undo)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
