"""Make an event fit to be kept: without secrets, and without what a database refuses."""

from __future__ import annotations

import json

from pydantic import JsonValue

from bringup.report import events
from bringup.report.masking import Masker

# These hold words of ours or names, and masking must not tear them apart; everything else may be masked.
_STRUCTURE = (
    ("event",),
    ("run",),
    ("host",),
    ("hosts",),
    ("status",),
    ("finding", "code"),
    ("finding", "severity"),
    ("measurement", "state"),
    ("measurement", "verdict"),
    ("verification", "state"),
)


def storable(value: JsonValue, masker: Masker) -> JsonValue:
    """Return a JSON value as it may be stored."""
    return _without_nul(masker.value(value))


def storable_event(event: events.Event, masker: Masker) -> events.Event:
    """Return an event as it may be stored."""
    document = json.loads(event.model_dump_json())
    masked = storable(document, masker)
    for path in _STRUCTURE:
        _restore(masked, document, path)
    return events.of_document(masked)


def _without_nul(value: JsonValue) -> JsonValue:
    """Replace what PostgreSQL cannot store in a text: the NUL character."""
    match value:
        case str():
            return value.replace("\x00", "\ufffd")
        case list():
            return [_without_nul(item) for item in value]
        case dict():
            return {key.replace("\x00", "\ufffd"): _without_nul(item) for key, item in value.items()}
        case _:
            return value


def _restore(masked: JsonValue, original: JsonValue, path: tuple[str, ...]) -> None:
    for key in path[:-1]:
        if not isinstance(masked, dict) or not isinstance(original, dict):
            return
        masked, original = masked.get(key), original.get(key)
    if isinstance(masked, dict) and isinstance(original, dict) and path[-1] in original:
        masked[path[-1]] = original[path[-1]]
