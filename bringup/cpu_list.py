"""Read lists of processors as the kernel writes them."""

from __future__ import annotations


def cpus(text: str) -> frozenset[int]:
    """Return the numbers in a list such as ``0-3,8``; nothing of what is no number."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
