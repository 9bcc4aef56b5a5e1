"""Which environment a run is about: the sound, complete one of the wanted digest, if there is one already."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from bringup import drift, wanted
from bringup.host_state import EnvironmentEntry, HostState, Unknown
from bringup.stack import Stack

CONTENT = ("environment.distribution.*", "environment.files.*", "environment.strays")
"""Differences that say that the serving environment is not what it was when it was proved."""


def is_damaged(stack: Stack, state: HostState) -> bool:
    """Return whether the serving environment has the wanted digest and cannot stay."""
    if isinstance(state.environment, Unknown) or state.environment.serving is None:
        return False
    if state.environment.serving.digest != digest(stack, state):
        return False
    patterns = (*CONTENT, "environment.current")
    return any(fnmatchcase(found.path, p) for found in drift.diff(stack, state) for p in patterns)


def digest(stack: Stack, state: HostState) -> str | None:
    """Return the digest of the wanted environment; None when it is not known or none is built."""
    platform = wanted.platform(stack, state)
    return stack.env_digest(platform) if platform else None


def candidate(stack: Stack, state: HostState) -> EnvironmentEntry | None:
    """Return the complete environment that serves, or should, for this stack; None when one must be built.

    A damaged one that serves is replaced by a later generation, and an earlier one is not gone back to:
    whatever it was replaced for may be true of it too.
    """
    if isinstance(state.environment, Unknown):
        return None
    serving = state.environment.serving
    name = digest(stack, state)
    entries = [e for e in state.environment.environments if e.is_complete and e.digest == name]
    entries = [entry for entry in entries if not entry.is_tainted]
    if serving is not None and serving.digest == name:
        if not is_damaged(stack, state):
            return serving
        entries = [entry for entry in entries if (entry.generation or 0) > (serving.generation or 0)]
    return max(entries, key=lambda entry: entry.generation or 0, default=None)


def next_generation(stack: Stack, state: HostState) -> int:
    """Return a generation that no directory of the wanted digest has, finished or not."""
    if isinstance(state.environment, Unknown):
        return 1
    pattern = re.compile(rf"{re.escape(digest(stack, state) or '')}-(\d+)")
    found = (pattern.fullmatch(entry.name) for entry in state.environment.environments)
    return 1 + max((int(match[1]) for match in found if match), default=0)


def path(entry: EnvironmentEntry) -> str:
    """Return the final path of an environment."""
    return f"{wanted.ENVS}/{entry.name}"
