"""Make text from hosts fit to be shown: it is not trusted."""

from __future__ import annotations

import json
import unicodedata
from datetime import UTC, datetime

from pydantic import JsonValue

_KEPT = "\n\t"


def printable(text: str) -> str:
    """Return the text without control characters, which could drive a terminal or hide what is written.

    Newlines and tabs stay; characters that change the direction of writing go as well.
    """
    return "".join(
        char for char in text if char in _KEPT or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn")
    )


def shown(value: JsonValue) -> str:
    """Return a wanted or found value as people read it: plain text, ``nothing`` for None, else JSON."""
    if value is None:
        return "nothing"
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True))


def when(time_s: float | None) -> str:
    """Return a time as date and time in UTC, to the second; empty for None."""
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC" if time_s is not None else ""


def size(payload_bytes: int) -> str:
    """Return a payload in the largest binary unit that gives a whole number."""
    for unit, of in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if payload_bytes >= of and payload_bytes % of == 0:
            return f"{payload_bytes // of} {unit}"
    return f"{payload_bytes} B"


def measured(busbw_gb_per_s: float | None, latency_us: float | None) -> str:
    """Return what was measured: bandwidth where there is one, else latency, else nothing."""
    if busbw_gb_per_s is not None:
        return f"{busbw_gb_per_s:.1f} GB/s"
    return f"{latency_us:.1f} µs" if latency_us is not None else ""
