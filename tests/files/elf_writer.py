"""Write small x86-64 shared objects for tests: what they need, export and leave undefined, and no code."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def shared_object(
    *,
    needed: Sequence[str] = (),
    exports: Sequence[str] = (),
    undefined: Sequence[str] = (),
    weak: Sequence[str] = (),
    soname: str | None = None,
    rpath: str | None = None,
    runpath: str | None = None,
    machine: int = 62,
) -> bytes:
    """Return the bytes of a shared object with a SysV hash table, one segment and no section table."""
    strings = bytearray(b"\0")

    def text(value: str) -> int:
        strings.extend(value.encode() + b"\0")
        return len(strings) - len(value) - 1

    symbols = bytearray(24)
    for name in undefined:
        symbols += struct.pack("<IBBHQQ", text(name), 0x12, 0, 0, 0, 0)
    for name in weak:
        symbols += struct.pack("<IBBHQQ", text(name), 0x22, 0, 0, 0, 0)
    for name in exports:
        symbols += struct.pack("<IBBHQQ", text(name), 0x12, 0, 1, 64, 0)
    count = len(symbols) // 24
    # One bucket whose chain holds every symbol.
    chain = [index + 1 if index + 1 < count else 0 for index in range(count)]
    table = struct.pack(f"<III{count}I", 1, count, 1 if count > 1 else 0, *chain)
    dynamic = [(1, text(name)) for name in needed]
    for tag, value in ((14, soname), (15, rpath), (29, runpath)):
        if value is not None:
            dynamic.append((tag, text(value)))
    symbols_at = 64 + 2 * 56
    hash_at = symbols_at + len(symbols)
    strings_at = hash_at + len(table)
    dynamic_at = (strings_at + len(strings) + 7) & ~7
    dynamic += [(4, hash_at), (5, strings_at), (6, symbols_at), (10, len(strings)), (11, 24), (0, 0)]
    section = b"".join(struct.pack("<QQ", *entry) for entry in dynamic)
    size = dynamic_at + len(section)
    header = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    )
    load = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 4096)
    place = struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, dynamic_at, dynamic_at, len(section), len(section), 8)
    body = header + load + place + bytes(symbols) + table + bytes(strings)
    return body.ljust(dynamic_at, b"\0") + section
