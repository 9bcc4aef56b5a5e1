"""The exceptions of bringup: we cannot go on. What we looked at and found bad is a result instead."""

from __future__ import annotations


class BringupError(Exception):
    """Say what failed, where, why, and what to do next; only the command line prints it.

    ``host`` is None when no single host is concerned. ``exit_code`` is the status the command line ends with.
    """

    exit_code = 2

    def __init__(self, what: str, *, host: str | None = None, why: str | None = None, hint: str | None = None) -> None:
        self.what = what
        self.host = host
        self.why = why
        self.hint = hint
        super().__init__(what)

    def __str__(self) -> str:
        head = f"{self.host}: {self.what}" if self.host else self.what
        tail = [f"cause: {self.why}"] if self.why else []
        tail += [f"hint: {self.hint}"] if self.hint else []
        return "\n  ".join([head, *tail])


class InputError(BringupError):
    """Something a person wrote is wrong: a stack, a lock, an inventory, an option."""


class HostError(BringupError):
    """One host could not be worked on; the others go on."""

    exit_code = 1


class LabError(BringupError):
    """A rehearsal host, its network or the package mirror could not be made or reached."""
