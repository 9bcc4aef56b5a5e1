"""Run a system command for the lab and say what went wrong in its own last words."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from threading import Event

from bringup.errors import LabError

_POLL_S = 0.1


def run(
    argv: Sequence[str],
    *,
    what: str,
    hint: str | None = None,
    input_text: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 60,
    stop: Event | None = None,
) -> str:
    """Run ``argv`` and return its standard output.

    ``what`` completes the error that a failure raises as LabError; the command's last lines become its cause.
    ``environment`` None means the controller's own. When another thread sets ``stop``, the command is killed.
    """
    try:
        child = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL if input_text is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise LabError(what, why=f"no command {argv[0]}", hint=hint) from None
    with child:
        try:
            stdout, stderr = _communicate(child, input_text, timeout_s, stop)
        except subprocess.TimeoutExpired:
            raise LabError(what, why=f"{shlex.join(argv)}: no end after {timeout_s:g} s", hint=hint) from None
        finally:
            child.kill()
    if child.returncode != 0:
        said = (stderr.strip() or stdout.strip()).splitlines()[-6:]
        why = " | ".join([f"{shlex.join(argv)[:200]} ended with status {child.returncode}", *said])
        raise LabError(what, why=why, hint=hint)
    return stdout


def _communicate(
    child: subprocess.Popen[str], input_text: str | None, timeout_s: float, stop: Event | None
) -> tuple[str, str]:
    """Return both outputs of ``child``; raises TimeoutExpired at the limit."""
    if stop is None:
        return child.communicate(input_text, timeout=timeout_s)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return child.communicate(input_text, timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise
            if stop.is_set():
                child.kill()
