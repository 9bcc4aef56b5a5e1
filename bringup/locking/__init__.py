"""Resolve a stack into its index-free lock: wheels with uv, .deb sets out of a signed repository."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bringup.locking.document import lock_text, write_lock
    from bringup.locking.fetch import Fetched, fetch_into_mirror
    from bringup.locking.packages import lock_packages, releases
    from bringup.locking.pylock import pylock_text
    from bringup.locking.rehearsal import LabLock, lock_for_lab
    from bringup.locking.resolve import ResolvedFile, ResolvedPlatform, locate
    from bringup.locking.wheels import Judge, Judgement, WheelsPart, lock_wheels

__all__ = [
    "Fetched",
    "Judge",
    "Judgement",
    "LabLock",
    "ResolvedFile",
    "ResolvedPlatform",
    "WheelsPart",
    "fetch_into_mirror",
    "locate",
    "lock_for_lab",
    "lock_packages",
    "lock_text",
    "lock_wheels",
    "pylock_text",
    "releases",
    "write_lock",
]

_HOMES = {
    "document": ("lock_text", "write_lock"),
    "fetch": ("Fetched", "fetch_into_mirror"),
    "packages": ("lock_packages", "releases"),
    "pylock": ("pylock_text",),
    "rehearsal": ("LabLock", "lock_for_lab"),
    "resolve": ("ResolvedFile", "ResolvedPlatform", "locate"),
    "wheels": ("Judge", "Judgement", "WheelsPart", "lock_wheels"),
}


def __getattr__(name: str) -> Any:
    """Load what is asked for: who judges a wheel does not pay for models and TOML writers."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"bringup.locking.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
