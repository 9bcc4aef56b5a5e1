"""Keep many values of which one changes at a time, without copying them all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

_V = TypeVar("_V")

# A transition of a rollout over 10,000 hosts changes one of them. Copying a few hundred entries for it costs
# microseconds, copying all of them a good part of a millisecond, a hundred thousand times over.
_MOST_CHANGES = 256


class Overlay(Mapping[str, _V]):
    """Be an immutable mapping that makes changed copies of itself cheaply."""

    def __init__(self, base: dict[str, _V], changes: dict[str, _V] | None = None) -> None:
        self._base = base
        self._changes = changes or {}

    def __getitem__(self, key: str) -> _V:
        return self._changes[key] if key in self._changes else self._base[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)

    def __contains__(self, key: object) -> bool:
        return key in self._base

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]

    def changed(self, changes: Mapping[str, _V]) -> Overlay[_V]:
        """Return a copy with other values for some of its keys."""
        both = {**self._changes, **changes}
        return Overlay(self._base, both) if len(both) < _MOST_CHANGES else Overlay({**self._base, **both})
