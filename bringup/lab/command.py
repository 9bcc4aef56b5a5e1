"""Run a system command for the lab and say what went wrong in its own last words."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence

from bringup.errors import LabError


def run(
    argv: Sequence[str],
    *,
    what: str,
    hint: str | None = None,
    input_text: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = 60,
) -> str:
    """Run ``argv`` and return its standard output.

    ``what`` completes the error that a failure raises as LabError; the command's last lines become its cause.
    ``environment`` None means the controller's own.
    """
    try:
        done = subprocess.run(
            argv,
            input=input_text,
            stdin=subprocess.DEVNULL if input_text is None else None,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise LabError(what, why=f"no command {argv[0]}", hint=hint) from None
    except subprocess.TimeoutExpired:
        raise LabError(what, why=f"{shlex.join(argv)}: no end after {timeout_s:g} s", hint=hint) from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-6:]
        why = " | ".join([f"{shlex.join(argv)[:200]} ended with status {done.returncode}", *said])
        raise LabError(what, why=why, hint=hint)
    return done.stdout
