#!/usr/bin/env python3
"""Read what shared objects need and offer, and report it as one JSON document.

Part one is the ELF reader: the dynamic tables of an x86-64 or aarch64 shared object, from a file
(`read_file`), from memory (`read_bytes`), or from its first bytes alone (`read_prefix`). Part two looks at a
Python environment: every shared object in it, what `import torch` brings into a process, and what the host
supplies.

The script runs on a host as `abi_probe.py ENVIRONMENT` and is imported as a module elsewhere. It changes
nothing, starts no process, loads no library, and needs only Python 3.8.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import stat
import struct
import sys
import time
from array import array
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

# Limits on what one file may make the reader do. The largest real tables seen are libtorch_cpu's (80,000
# symbols, 11 MB of names) and libtorch_cuda's; a file beyond these limits is hostile or damaged.
MAX_SYMBOLS = 400_000
MAX_STRING_TABLE_BYTES = 64 << 20
MAX_NAME_BYTES = 64 << 10
MAX_NAMES_TOTAL_BYTES = 64 << 20
MAX_DYNAMIC_BYTES = 256 << 10
MAX_DYNAMIC_TEXT_BYTES = 1 << 20
MAX_VERSION_RECORDS = 8192
MAX_VERSION_NAME_BYTES = 1024
MAX_VERSION_TABLE_BYTES = 1 << 20
MAX_HASH_TABLE_BYTES = 16 << 20
MAX_PREFIX_STEPS = 20_000_000

_MACHINES = {62: "x86_64", 183: "aarch64"}

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP, _PT_NOTE, _PT_GNU_STACK = 1, 2, 3, 4, 0x6474E551
_DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT = 1, 4, 5, 6, 10, 11
_DT_SONAME, _DT_RPATH, _DT_BIND_NOW, _DT_RUNPATH, _DT_FLAGS = 14, 15, 24, 29, 30
_DT_GNU_HASH, _DT_VERSYM, _DT_FLAGS_1 = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFB
_DT_VERDEF, _DT_VERDEFNUM, _DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_DF_BIND_NOW, _DF_STATIC_TLS, _DF_1_NOW, _DF_1_NODEFLIB = 8, 16, 1, 0x800

_SYMBOL = struct.Struct("<IBBHQQ")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")


class ElfError(Exception):
    """Say why a file's dynamic tables could not be read; such a file never counts as sound."""


class NotShared(ElfError):
    """The file is no ELF shared object of this kind at all: empty, a script, 32-bit, another machine."""


class PrefixTooShort(ElfError):
    """More of the file is needed; ``wanted_bytes`` is the least length of a prefix that gets further."""

    def __init__(self, wanted_bytes: int) -> None:
        self.wanted_bytes = wanted_bytes
        super().__init__("needs the first %d bytes" % wanted_bytes)


class PrefixUnreadable(ElfError):
    """The tables are not at the front of this file, or not in the order of GNU ld: read the whole file."""


class Undefined(NamedTuple):
    """One name a file leaves to others. ``version`` and ``library`` are None for an unversioned name."""

    name: str
    version: Optional[str]
    library: Optional[str]
    is_weak: bool


class Elf(NamedTuple):
    """The dynamic tables of one shared object.

    ``exports`` maps each exported name to its versions, () where the name is unversioned.
    ``version_needs`` maps a library to the versions that it must define (weak needs left out).
    ``source`` is "dynamic" when read as the loader reads it, or "prefix" when found at the front of the
    file without its dynamic section: then ``soname``, ``rpath``, ``runpath``, and the three flags are None
    or empty when they cannot be known, ``runpath`` holds what is RPATH or RUNPATH, and ``needed`` is derived
    from the strings that no symbol refers to, without an order.
    """

    machine: str
    size_bytes: int
    soname: Optional[str]
    needed: Tuple[str, ...]
    rpath: Tuple[str, ...]
    runpath: Tuple[str, ...]
    exports: Dict[str, Tuple[str, ...]]
    undefined: Tuple[Undefined, ...]
    version_definitions: Tuple[str, ...]
    version_needs: Dict[str, Tuple[str, ...]]
    is_bind_now: Optional[bool]
    has_static_tls: Optional[bool]
    ignores_default_paths: Optional[bool]
    has_executable_stack: bool
    source: str

    @property
    def strong_undefined(self) -> Tuple[Undefined, ...]:
        """Return the undefined names that must be found, or loading fails."""
        return tuple(symbol for symbol in self.undefined if not symbol.is_weak)


class _Memory:
    """Checked reads from a buffer."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes = len(data)

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise ElfError("truncated: %d bytes at offset %d of %d" % (length, offset, self.size_bytes))
        return bytes(self._data[offset : offset + length])


class _Descriptor:
    """Checked reads from an open file.

    A map of the file would be killed by SIGBUS when somebody truncates it meanwhile, and would count the
    pages of a 1 GB library as this process's memory; pread has neither trouble and is as fast.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self.size_bytes = size_bytes

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise ElfError("truncated: %d bytes at offset %d of %d" % (length, offset, self.size_bytes))
        data = os.pread(self._descriptor, length, offset)
        if len(data) != length:
            raise ElfError("the file became shorter while it was read")
        return data


class _Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    address: int
    file_bytes: int


def read_file(path: str, wanted: Optional[Set[bytes]] = None) -> Elf:
    """Read the shared object at ``path``; of its exports only the ``wanted`` names, None meaning all.

    Raises NotShared for what is no shared object of ours, ElfError for one that is damaged, OSError as
    opening does.
    """
    # O_NONBLOCK: a FIFO that somebody named x.so must not make a probe wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotShared("not a regular file")
        return _read(_Descriptor(descriptor, status.st_size), wanted)
    finally:
        os.close(descriptor)


def read_bytes(data: bytes) -> Elf:
    """Read a shared object held in memory whole. Raises as `read_file` does."""
    return _read(_Memory(data))


def _read(source, wanted: Optional[Set[bytes]] = None) -> Elf:
    machine, segments = _headers(source, source.size_bytes)
    for segment in segments:
        # The tables may be whole while code behind them is cut off; such a file dies when it is loaded.
        if segment.kind == _PT_LOAD and segment.offset + segment.file_bytes > source.size_bytes:
            end = segment.offset + segment.file_bytes
            raise ElfError("truncated: a segment ends at %d of %d bytes" % (end, source.size_bytes))
    space = _AddressSpace(source, segments)
    dynamic = _Dynamic(space, segments)
    strings = dynamic.strings()
    versions = _Versions(
        strings,
        space.window(dynamic.first(_DT_VERDEF), MAX_VERSION_TABLE_BYTES),
        dynamic.first(_DT_VERDEFNUM) or 0,
        space.window(dynamic.first(_DT_VERNEED), MAX_VERSION_TABLE_BYTES),
        dynamic.first(_DT_VERNEEDNUM) or 0,
    )
    count, symbols = _symbol_table(source, space, dynamic)
    version_indexes = None
    if dynamic.first(_DT_VERSYM) is not None and count:
        version_indexes = _unsigned("H", space.read(dynamic.first(_DT_VERSYM), 2 * count))
    exports, undefined = _symbols(symbols, strings, version_indexes, versions, wanted)
    flags, flags_1 = dynamic.first(_DT_FLAGS) or 0, dynamic.first(_DT_FLAGS_1) or 0
    return Elf(
        machine=machine,
        size_bytes=source.size_bytes,
        soname=next(iter(dynamic.texts(_DT_SONAME)), None),
        needed=dynamic.texts(_DT_NEEDED),
        rpath=_paths(dynamic.texts(_DT_RPATH)),
        runpath=_paths(dynamic.texts(_DT_RUNPATH)),
        exports=exports,
        undefined=undefined,
        version_definitions=versions.definitions,
        version_needs=versions.needs,
        is_bind_now=bool(flags & _DF_BIND_NOW or flags_1 & _DF_1_NOW or dynamic.first(_DT_BIND_NOW) is not None),
        has_static_tls=bool(flags & _DF_STATIC_TLS),
        ignores_default_paths=bool(flags_1 & _DF_1_NODEFLIB),
        has_executable_stack=_executable_stack(segments),
        source="dynamic",
    )


def _headers(source, size_bytes: int) -> Tuple[str, List[_Segment]]:
    """Check the file header and return the machine and the program headers."""
    if size_bytes == 0:
        raise NotShared("empty file")
    if size_bytes < 64:
        head = source.read(0, min(4, size_bytes))
        raise (ElfError("truncated: shorter than a file header") if head == b"\x7fELF" else NotShared("not ELF"))
    head = source.read(0, 64)
    if head[:4] != b"\x7fELF":
        raise NotShared("not ELF")
    if head[4] != 2:
        raise NotShared("32-bit ELF")
    if head[5] != 1:
        raise NotShared("big-endian ELF")
    kind, machine = struct.unpack_from("<HH", head, 16)
    if machine not in _MACHINES:
        raise NotShared("ELF for machine %d, neither x86-64 nor aarch64" % machine)
    if kind not in (2, 3):
        raise NotShared("ELF of type %d, neither shared object nor executable" % kind)
    (offset,) = struct.unpack_from("<Q", head, 32)
    entry_bytes, count = struct.unpack_from("<HH", head, 54)
    if count == 0 or entry_bytes != _PROGRAM_HEADER.size or count == 0xFFFF:
        raise ElfError("%d program headers of %d bytes" % (count, entry_bytes))
    table = source.read(offset, count * entry_bytes)
    segments = [
        _Segment(kind, flags, offset, address, file_bytes)
        for kind, flags, offset, address, _, file_bytes, _, _ in _PROGRAM_HEADER.iter_unpack(table)
    ]
    return _MACHINES[machine], segments


def _executable_stack(segments: List[_Segment]) -> bool:
    return any(s.kind == _PT_GNU_STACK and s.flags & 1 for s in segments)


def _paths(texts: Tuple[str, ...]) -> Tuple[str, ...]:
    return tuple(part for text in texts for part in text.split(":") if part)


def _unsigned(code: str, data: bytes) -> array:
    """Return little-endian integers: code "H" is 16 bits wide, "I" 32 bits."""
    values = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


class _AddressSpace:
    """The file as its loaded segments show it: reads by address instead of offset."""

    def __init__(self, source, segments: List[_Segment]) -> None:
        self._source = source
        self._loads = [s for s in segments if s.kind == _PT_LOAD]

    def _place(self, address: int) -> Tuple[int, int]:
        """Return the offset of an address and how many bytes of the file follow in its segment."""
        for load in self._loads:
            inside = address - load.address
            if 0 <= inside < load.file_bytes:
                offset = load.offset + inside
                return offset, min(load.file_bytes - inside, self._source.size_bytes - offset)
        raise ElfError("address %#x lies in no segment of the file" % address)

    def read(self, address: int, length: int) -> bytes:
        offset, available = self._place(address)
        if length > available:
            raise ElfError("truncated: %d bytes at address %#x, %d there" % (length, address, available))
        return self._source.read(offset, length)

    def window(self, address: Optional[int], limit: int) -> bytes:
        """Return up to ``limit`` bytes from an address on; b"" for None."""
        if address is None:
            return b""
        offset, available = self._place(address)
        return self._source.read(offset, max(0, min(available, limit)))


class _Dynamic:
    """The dynamic section: tags with their values, and the string table that they speak of."""

    def __init__(self, space: _AddressSpace, segments: List[_Segment]) -> None:
        self._space = space
        self._tags: Dict[int, List[int]] = {}
        place = next((s for s in segments if s.kind == _PT_DYNAMIC), None)
        if place is None or place.file_bytes == 0:
            raise NotShared("no dynamic section: static, or only debug information")
        # The loader finds the section by its address, so the file offset of the header counts for nothing.
        table = space.window(place.address, min(place.file_bytes, MAX_DYNAMIC_BYTES))
        for position in range(0, len(table) - 15, 16):
            tag, value = struct.unpack_from("<QQ", table, position)
            if tag == 0:
                break
            self._tags.setdefault(tag, []).append(value)
        self._strings: Optional[bytes] = None
        self._budget = _Budget(MAX_DYNAMIC_TEXT_BYTES)

    def first(self, tag: int) -> Optional[int]:
        values = self._tags.get(tag)
        return values[0] if values else None

    def texts(self, tag: int) -> Tuple[str, ...]:
        strings = self.strings()
        return tuple(self._budget.text(strings, offset) for offset in self._tags.get(tag, ()))

    def strings(self) -> bytes:
        if self._strings is None:
            address, length = self.first(_DT_STRTAB), self.first(_DT_STRSZ)
            if address is None or length is None:
                raise ElfError("no string table")
            if length > MAX_STRING_TABLE_BYTES:
                raise ElfError("string table of %d bytes, more than any real one" % length)
            self._strings = self._space.read(address, length)
        return self._strings


def _text(strings: bytes, offset: int, limit: int = MAX_NAME_BYTES) -> str:
    end = strings.find(b"\0", offset, offset + limit + 1)
    if offset >= len(strings) or end < 0:
        raise ElfError("a name at %d lies outside its string table" % offset)
    return strings[offset:end].decode("utf-8", "backslashreplace")


class _Versions:
    """Symbol versions: ``names`` maps an index to (version, library that must define it or None)."""

    def __init__(
        self, strings: bytes, definitions: bytes, definition_count: int, needs: bytes, need_count: int
    ) -> None:
        self.names: Dict[int, Tuple[str, Optional[str]]] = {}
        self.base: Optional[str] = None
        self._records = 0
        self.definitions = tuple(self._read_definitions(strings, definitions, definition_count))
        self.needs = self._read_needs(strings, needs, need_count)

    def _count(self) -> None:
        self._records += 1
        if self._records > MAX_VERSION_RECORDS:
            raise ElfError("more than %d symbol version records" % MAX_VERSION_RECORDS)

    def _read_definitions(self, strings: bytes, table: bytes, count: int) -> Iterator[str]:
        position = 0
        for _ in range(count):
            self._count()
            _, flags, index, _, _, names_at, following = _record("<HHHHIII", table, position)
            (name_at,) = _record("<I", table, position + names_at)
            name = _text(strings, name_at, MAX_VERSION_NAME_BYTES)
            if flags & 1:
                # The base definition names the file itself, not a version of it.
                self.base = name
            else:
                self.names[index & 0x7FFF] = (name, None)
                yield name
            if following == 0:
                break
            position += following

    def _read_needs(self, strings: bytes, table: bytes, count: int) -> Dict[str, Tuple[str, ...]]:
        needs: Dict[str, List[str]] = {}
        position = 0
        for _ in range(count):
            self._count()
            _, names, library_at, names_at, following = _record("<HHIII", table, position)
            library = _text(strings, library_at, MAX_VERSION_NAME_BYTES)
            wanted = needs.setdefault(library, [])
            at = position + names_at
            for _ in range(names):
                self._count()
                _, flags, index, name_at, next_name = _record("<IHHII", table, at)
                name = _text(strings, name_at, MAX_VERSION_NAME_BYTES)
                self.names[index & 0x7FFF] = (name, library)
                if not flags & 2:
                    wanted.append(name)
                if next_name == 0:
                    break
                at += next_name
            if following == 0:
                break
            position += following
        return {library: tuple(sorted(set(wanted))) for library, wanted in needs.items()}


def _record(layout: str, table: bytes, position: int) -> Tuple[int, ...]:
    try:
        return struct.unpack_from(layout, table, position)
    except struct.error:
        raise ElfError("truncated: a symbol version record at %d" % position) from None


def _symbol_table(source, space: _AddressSpace, dynamic: _Dynamic) -> Tuple[int, bytes]:
    address = dynamic.first(_DT_SYMTAB)
    if address is None:
        return 0, b""
    if dynamic.first(_DT_SYMENT) not in (None, _SYMBOL.size):
        raise ElfError("symbols of %d bytes" % (dynamic.first(_DT_SYMENT) or 0))
    count = _symbol_count(source, space, dynamic, address)
    if count > MAX_SYMBOLS:
        raise ElfError("%d symbols, more than any real file has" % count)
    return count, space.read(address, count * _SYMBOL.size)


def _symbol_count(source, space: _AddressSpace, dynamic: _Dynamic, symbols_at: int) -> int:
    """Return the number of dynamic symbols, which the dynamic section itself does not say.

    The SysV hash table holds it. The GNU hash table gives it as the end of its last chain, except in a file
    that exports nothing, where only the section table or the string table's place tell it.
    """
    if (address := dynamic.first(_DT_HASH)) is not None:
        return struct.unpack("<II", space.read(address, 8))[1]
    if (address := dynamic.first(_DT_GNU_HASH)) is not None:
        count = _gnu_hash_count(space, address)
        if count is not None:
            return count
    count = _section_count(source, symbols_at)
    if count is not None:
        return count
    strings_at = dynamic.first(_DT_STRTAB) or 0
    if strings_at > symbols_at and (strings_at - symbols_at) // _SYMBOL.size <= MAX_SYMBOLS:
        return (strings_at - symbols_at) // _SYMBOL.size
    raise ElfError("nothing in the file tells how many symbols it has")


def _gnu_hash_count(space: _AddressSpace, address: int) -> Optional[int]:
    bucket_count, first_hashed, bloom_words, _ = struct.unpack("<IIII", space.read(address, 16))
    if bucket_count == 0 or 4 * bucket_count + 8 * bloom_words > MAX_HASH_TABLE_BYTES:
        raise ElfError("hash table of %d buckets" % bucket_count)
    buckets_at = address + 16 + 8 * bloom_words
    last = max(_unsigned("I", space.read(buckets_at, 4 * bucket_count)))
    if last < first_hashed or last == 0:
        return None
    chains_at = buckets_at + 4 * bucket_count
    position = last - first_hashed
    while last <= MAX_SYMBOLS:
        part = space.window(chains_at + 4 * position, 4096)
        if len(part) < 4:
            raise ElfError("truncated: a hash chain without end")
        for value in _unsigned("I", part[: len(part) & ~3]):
            last += 1
            position += 1
            if value & 1:
                return last
    raise ElfError("more than %d symbols" % MAX_SYMBOLS)


def _section_count(source, symbols_at: int) -> Optional[int]:
    """Return the symbol count that the section table gives, None where it is stripped or does not fit."""
    head = source.read(0, 64)
    (offset,) = struct.unpack_from("<Q", head, 40)
    entry_bytes, count = struct.unpack_from("<HH", head, 58)
    if entry_bytes != 64 or offset == 0 or offset + 64 * count > source.size_bytes:
        return None
    for _, kind, _, address, _, length, _, _, _, _ in struct.iter_unpack(
        "<IIQQQQIIQQ", source.read(offset, 64 * count)
    ):
        if kind == 11 and address == symbols_at:
            return length // _SYMBOL.size
    return None


def _symbols(
    table: bytes,
    strings: bytes,
    version_indexes: Optional[array],
    versions: _Versions,
    wanted: Optional[Set[bytes]] = None,
) -> Tuple[Dict[str, Tuple[str, ...]], Tuple[Undefined, ...]]:
    """Return the exported names with their versions, and the undefined ones."""
    names = versions.names
    undefined: List[Undefined] = []
    exports: Dict[str, Tuple[str, ...]] = {}
    wants_exports = wanted is None or len(wanted) > 0
    find, left = strings.find, MAX_NAMES_TOTAL_BYTES
    indexes = itertools.repeat(1) if version_indexes is None else version_indexes
    # This loop is most of the time that a large file takes, hence its plainness.
    for (name_at, info, other, section, value, _), version in zip(_SYMBOL.iter_unpack(table), indexes):  # noqa: B905
        if name_at == 0 or info < 16:
            continue
        if section:
            # Only what the loader would bind counts: neither hidden nor internal, not the name of a section
            # or a file, nor a plain symbol at address zero.
            if not wants_exports or other & 3 in (1, 2) or info & 15 in (3, 4):
                continue
            if value == 0 and section != 0xFFF1 and info & 15 != 6:
                continue
        end = find(b"\0", name_at, name_at + MAX_NAME_BYTES + 1)
        if end < 0:
            raise ElfError("a symbol has a name outside the string table")
        raw = strings[name_at:end]
        if section and wanted is not None and raw not in wanted:
            continue
        # Symbols could share the tails of one huge string.
        left -= end - name_at
        if left < 0:
            raise ElfError(_TOO_MANY_NAMES)
        name = raw.decode("utf-8", "backslashreplace")
        version &= 0x7FFF
        if section == 0:
            text, library = _version(names, version) if version > 1 else (None, None)
            undefined.append(Undefined(name, text, library, info >> 4 == 2))
        elif version == 1:
            exports.setdefault(name, ())
        elif version:
            exports[name] = (*exports.get(name, ()), _version(names, version)[0])
    return exports, tuple(undefined)


_TOO_MANY_NAMES = "more bytes of names than any real file has"


class _Budget:
    """Names read so far, against a limit."""

    def __init__(self, size_bytes: int) -> None:
        self._left = size_bytes

    def text(self, strings: bytes, offset: int) -> str:
        name = _text(strings, offset)
        self._left -= len(name)
        if self._left < 0:
            raise ElfError(_TOO_MANY_NAMES)
        return name


def _version(names: Dict[int, Tuple[str, Optional[str]]], index: int) -> Tuple[str, Optional[str]]:
    try:
        return names[index]
    except KeyError:
        raise ElfError("symbol version %d is not defined in the file" % index) from None


# ---------------------------------------------------------------------------------------------------------
# The front of a file: enough of a wheel's deflate stream to know names, without the hundreds of megabytes
# of GPU code behind them.

_AUDITWHEEL_TAG = re.compile(r"[.-][0-9a-f]{8}\Z")
_SONAME_LIKE = re.compile(r"[^/\s$:]+\.so(\.[0-9A-Za-z_]+)*\Z")


def read_prefix(data: bytes, size_bytes: int, name: str) -> Elf:
    """Read the tables of a shared object from its first bytes.

    ``data`` is a prefix of the file, ``size_bytes`` the length of the whole file, ``name`` its name.
    The dynamic section lies at the end of a file, behind the GPU code, so the tables are found by their
    order as GNU ld and mold write them: hash table, symbols, strings, version indexes, versions. A file is
    believed only if every exported name hashes to the value that the hash table holds for it.

    Raises PrefixTooShort when a longer prefix is needed, PrefixUnreadable when the tables are elsewhere (a
    file changed by patchelf, another linker, no exports), NotShared and ElfError as `read_file` does.
    """
    if len(data) > size_bytes:
        raise ElfError("%d bytes given of a file of %d" % (len(data), size_bytes))
    front = _Front(data, size_bytes)
    front.require(min(64, size_bytes))
    if data[:4] == b"\x7fELF" and size_bytes >= 64:
        # The program headers follow the file header unless a tool has moved them to the end.
        offset, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
        if offset > 4096:
            raise PrefixUnreadable("program headers moved to offset %d" % offset)
        front.require(min(offset + _PROGRAM_HEADER.size * count, size_bytes))
    machine, segments = _headers(_Memory(data), size_bytes)
    first = next((s for s in segments if s.kind == _PT_LOAD), None)
    if first is None or first.offset != 0 or first.file_bytes > size_bytes:
        raise PrefixUnreadable("the first segment does not begin the file")
    notes = (s for s in segments if s.kind in (_PT_NOTE, _PT_INTERP))
    note_ends = (s.offset + s.file_bytes for s in notes)
    headers_end = offset + _PROGRAM_HEADER.size * len(segments)
    start = max([headers_end, *(end for end in note_ends if end < 8192)])
    front.limit = first.file_bytes
    tables = _front_tables(front, start)
    strings, indexes, versions = _front_versions(front, tables)
    exports, undefined = _symbols(data[tables.symbols_at : tables.strings_at], strings, indexes, versions)
    needed, soname, paths = _front_dynamic_strings(data, tables, strings, versions, name)
    return Elf(
        machine=machine,
        size_bytes=size_bytes,
        soname=soname,
        needed=needed,
        rpath=(),
        runpath=paths,
        exports=exports,
        undefined=undefined,
        version_definitions=versions.definitions,
        version_needs=versions.needs,
        is_bind_now=None,
        has_static_tls=None,
        ignores_default_paths=None,
        has_executable_stack=_executable_stack(segments),
        source="prefix",
    )


class _Front:
    """A prefix with the length of the segment that the tables lie in."""

    def __init__(self, data: bytes, size_bytes: int) -> None:
        self.data = data
        self.limit = size_bytes

    def require(self, length: int) -> None:
        if length > self.limit:
            raise PrefixUnreadable("a table would end behind the first segment")
        if length > len(self.data):
            raise PrefixTooShort(length)


class _Tables(NamedTuple):
    symbols_at: int
    strings_at: int
    last_name_at: int
    count: int


def _front_tables(front: _Front, start: int) -> _Tables:
    """Find the GNU hash table behind ``start`` and, by it, the symbols and strings that follow."""
    # A SysV hash table may stand before the GNU one; notes and padding are short.
    budget = MAX_PREFIX_STEPS
    for position in range((start + 7) & ~7, min(start + (1 << 20), front.limit - 16), 8):
        front.require(position + 16)
        header = struct.unpack_from("<IIII", front.data, position)
        bucket_count, first_hashed, bloom_words, shift = header
        if not (
            0 < bucket_count <= MAX_SYMBOLS
            and 0 < first_hashed <= MAX_SYMBOLS
            and 0 < bloom_words <= MAX_SYMBOLS
            and bloom_words & (bloom_words - 1) == 0
            and shift < 64
        ):
            continue
        buckets_at = position + 16 + 8 * bloom_words
        chains_at = buckets_at + 4 * bucket_count
        if chains_at > front.limit:
            continue
        # A crafted file could look like a table at every position.
        budget -= bucket_count
        if budget < 0:
            break
        # Only a candidate whose filled buckets ascend may ask for a longer prefix.
        known = front.data[buckets_at : min(chains_at, len(front.data) & ~3)]
        filled = [b for b in _unsigned("I", known[: len(known) & ~3]) if b]
        if filled and (filled[0] != first_hashed or filled != sorted(set(filled))):
            continue
        front.require(chains_at)
        if not filled:
            if position == (start + 7) & ~7:
                raise PrefixUnreadable("the file exports nothing, so its hash table counts nothing")
            continue
        end = _front_chain_end(front, chains_at, filled[-1], first_hashed)
        if end is None:
            continue
        budget -= end
        tables = _front_symbols(front, (chains_at, end), first_hashed)
        if tables is not None:
            return tables
    raise PrefixUnreadable("no GNU hash table at the front of the file")


def _front_chain_end(front: _Front, chains_at: int, last: int, first_hashed: int) -> Optional[int]:
    """Return the symbol count: the end of the last bucket's chain; None when there is no such end."""
    if last > MAX_SYMBOLS:
        return None
    position = chains_at + 4 * (last - first_hashed)
    while position + 4 <= front.limit:
        front.require(position + 4)
        last += 1
        if front.data[position] & 1:
            return last
        position += 4
    return None


def _front_symbols(front: _Front, chains: Tuple[int, int], first_hashed: int) -> Optional[_Tables]:
    """Return the tables behind a hash table if every hash fits its name, else None."""
    chains_at, count = chains
    data = front.data
    symbols_at = (chains_at + 4 * (count - first_hashed) + 7) & ~7
    strings_at = symbols_at + _SYMBOL.size * count
    if strings_at >= front.limit:
        return None
    front.require(symbols_at + _SYMBOL.size)
    if any(data[symbols_at : symbols_at + _SYMBOL.size]):
        return None
    front.require(strings_at + 1)
    offsets = [entry[0] for entry in _SYMBOL.iter_unpack(data[symbols_at:strings_at])]
    last_name = strings_at + max(offsets)
    if data[strings_at] != 0 or last_name >= front.limit:
        return None
    if b"\0" not in data[last_name : last_name + MAX_NAME_BYTES]:
        front.require(min(last_name + MAX_NAME_BYTES, len(data) + 4096, front.limit))
        return None
    budget = MAX_PREFIX_STEPS
    wanted = _unsigned("I", data[chains_at : chains_at + 4 * (count - first_hashed)])
    # A wrong candidate fails at once, so the first names go alone.
    for first, end in ((first_hashed, first_hashed + 8), (first_hashed + 8, count)):
        names = []
        for offset in offsets[first:end]:
            names.append(data[strings_at + offset : data.index(b"\0", strings_at + offset)])
            budget -= len(names[-1])
            if budget < 0:
                raise PrefixUnreadable("too many bytes of names to check")
        if any((found ^ wanted[number]) >> 1 for number, found in enumerate(_gnu_hashes(names), first - first_hashed)):
            return None
    return _Tables(symbols_at, strings_at, last_name, count)


def _gnu_hashes(names: List[bytes]) -> List[int]:
    """Return the GNU hash of each name: 5381, then for each byte the value times 33 plus the byte, of 32 bits.

    A loop over the bytes would take most of the time that a wheel takes. So all names stand in one long
    number, each from the left padded with zeros to whole words of eight bytes, and three steps make of all
    pairs of bytes, then of pairs of those, what the loop would make of them. No step overflows its neighbour:
    the largest values are 255 * 34, that * (1 + 33 ** 2), that * (1 + 33 ** 4).
    """
    padded = b"".join([name.rjust((len(name) + 7) & ~7, b"\0") for name in names])
    size = len(padded)
    lanes = int.from_bytes(padded, "big")
    for width, factor in ((1, 33), (2, 33**2), (4, 33**4)):
        mask = int.from_bytes((b"\0" * width + b"\xff" * width) * (size // (2 * width)), "big")
        lanes = (lanes >> (8 * width) & mask) * factor + (lanes & mask)
    words = array("Q", lanes.to_bytes(size, "big"))
    if sys.byteorder == "little":
        words.byteswap()
    hashes, at, of_eight = [], 0, 33**8 & 0xFFFFFFFF
    for name in names:
        value, end = 0, at + (len(name) + 7) // 8
        for word in words[at:end]:
            value = (value * of_eight + word) & 0xFFFFFFFF
        at = end
        hashes.append((5381 * pow(33, len(name), 1 << 32) + value) & 0xFFFFFFFF)
    return hashes


def _sysv_hash(name: bytes) -> int:
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


def _front_versions(front: _Front, tables: _Tables) -> Tuple[bytes, array, _Versions]:
    """Return (strings, version indexes, versions), found behind the last name that a symbol refers to.

    Nothing gives the length of the string table, and an RPATH that was blanked out leaves empty strings in
    it. So every empty string is tried as its end, and believed when the version indexes that would begin
    there suit every symbol and the hashes in the version tables behind them suit their names.
    """
    data = front.data
    budget = MAX_PREFIX_STEPS
    # Index 0 is a local symbol's, never an exported one's; an unversioned undefined name has 0 or 1.
    must_be_zero, must_not_be_zero = [], []
    for number, entry in enumerate(_SYMBOL.iter_unpack(data[tables.symbols_at : tables.strings_at])):
        if entry[1] >> 4 == 0:
            must_be_zero.append(number)
        elif entry[3]:
            must_not_be_zero.append(number)
    if not must_not_be_zero:
        raise PrefixUnreadable("no exported symbol to tell the version indexes by")
    position, end_of_search, unsuited_at = tables.last_name_at, tables.last_name_at + (1 << 20), -1
    while position < end_of_search:
        front.require(position + 1)
        if data[position]:
            end = data.find(b"\0", position, position + MAX_NAME_BYTES + 1)
            if end < 0:
                front.require(min(position + MAX_NAME_BYTES + 1, len(data) + 4096, front.limit))
                break
            position = end + 1
            continue
        indexes_at = (position + 1) & ~1
        if indexes_at == unsuited_at:
            # One empty string more makes no difference before an even place.
            position += 1
            continue
        unsuited_at, indexes_end = indexes_at, indexes_at + 2 * tables.count
        front.require(indexes_end)
        first, behind = indexes_at + 2 * must_not_be_zero[0], (indexes_end + 7) & ~7
        # Every record of a version table begins with its own version, 1.
        if data[first : first + 2] == b"\0\0" or data[behind : behind + 2] not in (b"\1\0", b"\1", b""):
            position += 1
            continue
        budget -= tables.count
        if budget < 0:
            break
        indexes = _unsigned("H", data[indexes_at:indexes_end])
        at = indexes.__getitem__
        if all(map(at, must_not_be_zero)) and not any(map(at, must_be_zero)):
            strings = data[tables.strings_at : position]
            versions = _front_version_tables(front, strings, indexes_end)
            if versions is not None and all(index & 0x7FFF in versions.names for index in set(indexes) - {0, 1}):
                return strings, indexes, versions
        position += 1
    raise PrefixUnreadable("no symbol versions behind the strings")


def _front_version_tables(front: _Front, strings: bytes, indexes_end: int) -> Optional[_Versions]:
    position = (indexes_end + 7) & ~7
    front.require(position)
    if any(front.data[indexes_end:position]):
        return None
    definitions_at, definition_count, position = _front_version_table(front, strings, position, "<HHHHIII")
    needs_at, need_count, position = _front_version_table(front, strings, position, "<HHIII")
    if not definition_count and not need_count:
        return None
    data = front.data
    return _Versions(strings, data[definitions_at:], definition_count, data[needs_at:], need_count)


def _front_version_table(front: _Front, strings: bytes, start: int, layout: str) -> Tuple[int, int, int]:
    """Return (start, record count, end) of one version table; no records when ``start`` holds another."""
    is_need = layout == "<HHIII"
    head_bytes, name_bytes = struct.calcsize(layout), 16 if is_need else 8
    position, count, end, records = start, 0, start, 0
    while True:
        front.require(min(position + head_bytes, front.limit))
        if position + head_bytes > front.limit:
            return start, 0, start
        head = struct.unpack_from(layout, front.data, position)
        names, names_at, following = (head[1], head[3], head[4]) if is_need else (head[3], head[5], head[6])
        if head[0] != 1 or not 0 < names <= MAX_VERSION_RECORDS or names_at < head_bytes:
            break
        if is_need and not _printable(strings, head[2]):
            break
        at = position + names_at
        for number in range(names):
            records += 1
            if at + name_bytes > front.limit or records > MAX_VERSION_RECORDS:
                return start, 0, start
            front.require(at + name_bytes)
            if is_need:
                wanted, _, _, name_at, step = struct.unpack_from("<IHHII", front.data, at)
            else:
                (name_at, step), wanted = struct.unpack_from("<II", front.data, at), head[4]
            name = _printable(strings, name_at)
            if name is None or ((is_need or number == 0) and _sysv_hash(name) != wanted):
                return start, 0, start
            end = max(end, at + name_bytes)
            if step == 0 or number == names - 1:
                break
            at += step
        count += 1
        if following == 0:
            return start, count, (end + 7) & ~7
        if count > MAX_VERSION_RECORDS:
            break
        position += following
    return start, 0, start


def _printable(strings: bytes, offset: int) -> Optional[bytes]:
    """Return the name at an offset, None unless it is a non-empty one of printable characters."""
    end = strings.find(b"\0", offset, offset + MAX_VERSION_NAME_BYTES + 1) if offset < len(strings) else -1
    name = strings[offset:end] if end > offset else b""
    return name if name and all(32 < byte < 127 for byte in name) else None


def _front_dynamic_strings(
    data: bytes, tables: _Tables, strings: bytes, versions: _Versions, name: str
) -> Tuple[Tuple[str, ...], Optional[str], Tuple[str, ...]]:
    """Return (NEEDED, SONAME, search paths) from the strings that no symbol and no version refers to.

    Those strings are there for the dynamic section alone. Libraries whose symbols are versioned are needed
    for certain; the file's own name is told apart by its base version or by the name of the file.
    """
    used = {entry[0] for entry in _SYMBOL.iter_unpack(data[tables.symbols_at : tables.strings_at])}
    version_texts = set(versions.definitions) | {text for text, _ in versions.names.values()}
    needed = list(versions.needs)
    paths: List[str] = []
    name = name.rsplit("/", 1)[-1]
    own, stem = versions.base, _AUDITWHEEL_TAG.sub("", name.split(".so")[0])
    position = 1
    while position < len(strings):
        end = strings.find(b"\0", position)
        end = len(strings) if end < 0 else end
        if position not in used:
            text = strings[position:end].decode("utf-8", "backslashreplace")
            if text.startswith("$") or "/" in text:
                paths.extend(part for part in text.split(":") if part)
            elif _SONAME_LIKE.match(text) and text not in version_texts:
                if own is None and text.split(".so")[0] in (stem, name.split(".so")[0]):
                    own = text
                elif text not in needed:
                    needed.append(text)
        position = end + 1
    return tuple(n for n in needed if n != own), own, tuple(paths)


# ---------------------------------------------------------------------------------------------------------
# The loader: which file a NEEDED name becomes, as ld.so(8) describes it for glibc.

_LOADER_CACHE = "/etc/ld.so.cache"
_DEFAULT_DIRECTORIES = {
    "x86_64": ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"),
    "aarch64": (
        "/lib/aarch64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/lib64",
        "/usr/lib64",
        "/lib",
        "/usr/lib",
    ),
}
# Bits 8-15 of a cache entry's flags name the kind of library: 3 is x86-64, 10 is aarch64 (glibc's ldconfig.h).
_CACHE_KINDS = {"x86_64": 0x0303, "aarch64": 0x0A03}
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_RUNTIME_LIBRARIES = (
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libutil.so.1",
    "libgcc_s.so.1",
    "libstdc++.so.6",
)


def read_loader_cache(path: str = _LOADER_CACHE, machine: str = "x86_64") -> Dict[str, str]:
    """Return what the loader cache answers: soname to path, the first entry of this machine's kind.

    Raises ElfError when the file is no cache of glibc's present format, OSError when it cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read(16 << 20)
    start = data.find(_CACHE_MAGIC)
    if start < 0:
        raise ElfError("not a loader cache of glibc's present format")
    data = data[start:]
    try:
        count, strings_bytes = struct.unpack_from("<II", data, 20)
        entries = list(struct.iter_unpack("<iIIIQ", data[48 : 48 + 24 * count]))
    except struct.error:
        raise ElfError("truncated loader cache") from None
    if len(entries) != count or 48 + 24 * count + strings_bytes > len(data):
        raise ElfError("truncated loader cache")
    found: Dict[str, str] = {}
    for kind, name_at, path_at, _, capabilities in entries:
        # An entry for special processors stands before the plain one and need not apply here.
        if kind == _CACHE_KINDS.get(machine) and capabilities == 0:
            found.setdefault(_text(data, name_at), _text(data, path_at))
    return found


class Object:
    """One file as a process would hold it: its facts, where it is, and the names it answers to."""

    def __init__(self, path: str, elf: Elf) -> None:
        self.path = path
        self.elf = elf
        self.names = {elf.soname} if elf.soname else set()

    def directories(self, paths: Iterable[str]) -> List[str]:
        """Return search paths with the place of this file filled in."""
        origin = os.path.dirname(self.path)
        return [p.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for p in paths]


class Missing(NamedTuple):
    """A library that was not found, and the path of the file that needs it."""

    name: str
    needed_by: str


class Load(NamedTuple):
    """What loading one file brings: its scope in lookup order, and what was not found.

    ``names`` is what the process answers to afterwards.
    ``siblings`` are libraries found only in the distribution that the file belongs to: its package must have
    loaded them before.
    """

    scope: Tuple[Object, ...]
    missing: Tuple[Missing, ...]
    siblings: Tuple[str, ...]
    names: Dict[str, Object]


class Loader:
    """Find and read files as the dynamic loader would, without loading any."""

    def __init__(self, machine: str, cache: Dict[str, str], library_path: Sequence[str] = ()) -> None:
        self.machine = machine
        self._cache = cache
        self._library_path = tuple(library_path)
        # The executable's RPATH serves every load of its process, as conda's Python relies on.
        self.executable: Optional[Object] = None
        self._objects: Dict[str, Optional[Object]] = {}
        self._by_identity: Dict[Tuple[int, int], Object] = {}
        self.unreadable: Dict[str, str] = {}

    def object(self, path: str) -> Optional[Object]:
        """Return the file at a path, None when there is none or it is no library of this machine."""
        if path not in self._objects:
            self._objects[path] = self._open(path)
        return self._objects[path]

    def _open(self, path: str) -> Optional[Object]:
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            return None
        # A link and its target are one object to the loader.
        identity = (status.st_dev, status.st_ino)
        if identity not in self._by_identity:
            try:
                elf = read_file(path, wanted=set())
            except (ElfError, OSError) as problem:
                self.unreadable[path] = str(problem)
                return None
            if elf.machine != self.machine:
                self.unreadable[path] = "for %s" % elf.machine
                return None
            self._by_identity[identity] = Object(path, elf)
        return self._by_identity[identity]

    def _find(self, name: str, chain: Sequence[Object]) -> Optional[Object]:
        """Return the object that a NEEDED name leads to; ``chain`` is its loader, that one's loader, …"""
        if "/" in name:
            return self.object(name)
        needer = chain[0]
        directories: List[str] = []
        if not needer.elf.runpath:
            for link in (*chain, self.executable):
                if link is not None and not link.elf.runpath:
                    directories += link.directories(link.elf.rpath)
        directories += self._library_path
        directories += needer.directories(needer.elf.runpath)
        paths = [os.path.join(directory, name) for directory in directories]
        if not needer.elf.ignores_default_paths:
            if name in self._cache:
                paths.append(self._cache[name])
            paths += [os.path.join(directory, name) for directory in _DEFAULT_DIRECTORIES[self.machine]]
        return next((found for found in map(self.object, paths) if found is not None), None)

    def load(
        self,
        top: Object,
        process: Dict[str, Object],
        siblings: Optional[Dict[str, str]] = None,
    ) -> Load:
        """Return what loading ``top`` brings into a process that answers to the names in ``process``.

        ``process`` is not changed. ``siblings`` maps names to paths inside the file's own distribution.
        """
        names = dict(process)
        order, chains = [top], {id(top): (top,)}
        missing: List[Missing] = []
        from_siblings: List[str] = []
        self._answer(names, top)
        for current in order:
            for name in current.elf.needed:
                found = names.get(name) or self._find(name, chains[id(current)])
                if found is None and siblings and name in siblings:
                    found = self.object(siblings[name])
                    from_siblings.append(name)
                if found is None:
                    missing.append(Missing(name, current.path))
                    continue
                names[name] = found
                self._answer(names, found)
                if id(found) not in chains:
                    chains[id(found)] = (found, *chains[id(current)])
                    order.append(found)
        return Load(tuple(order), tuple(missing), tuple(from_siblings), names)

    @staticmethod
    def _answer(names: Dict[str, Object], found: Object) -> None:
        for name in found.names:
            names.setdefault(name, found)
        names.setdefault(found.path, found)


# ---------------------------------------------------------------------------------------------------------
# An environment.

MAX_FILES = 20_000
MAX_TEXT_BYTES = 8 << 20
_SHARED_NAME = re.compile(r"\.so(\.\d[0-9A-Za-z_.]*)?\Z")
_INFO_NAME = re.compile(r"(?P<name>[^-]+)-(?P<version>.+)\.dist-info\Z")
_EGG_NAME = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-py\d.*)?\.egg-info\Z")
# torch/__init__.py loads these by file name after its own libraries, when the CUDA wheels hold them.
_TORCH_PRELOADS = (
    ("cuda_nvrtc", "libnvrtc.so."),
    ("cuda_nvrtc", "libnvrtc-builtins.so."),
    ("nvjitlink", "libnvJitLink.so."),
)


class ProbeError(Exception):
    """Say why an environment could not be looked at."""


def site_directories(prefix: str) -> List[str]:
    """Return the directories of an environment that hold its packages.

    ``prefix`` is a virtual environment, a Python installation, or such a directory itself.
    """
    found = []
    for library in ("lib", "lib64"):
        try:
            versions = sorted(os.listdir(os.path.join(prefix, library)))
        except OSError:
            continue
        for version in versions:
            for kind in ("site-packages", "dist-packages"):
                path = os.path.join(prefix, library, version, kind)
                if version.startswith("python3") and os.path.isdir(path):
                    found.append(path)
    if not found and os.path.isdir(prefix):
        names = os.listdir(prefix)
        if any(name.endswith(".dist-info") or name == "torch" for name in names):
            found = [prefix]
    return list({os.path.realpath(path): path for path in reversed(found)}.values())[::-1]


def shared_files(directory: str) -> Iterator[str]:
    """Yield the path of every regular file under a directory that is named like a shared object."""
    pending = [directory]
    count = 0
    while pending:
        try:
            entries = list(os.scandir(pending.pop()))
        except OSError:
            continue
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    pending.append(entry.path)
            elif _SHARED_NAME.search(entry.name) and entry.is_file(follow_symlinks=False):
                count += 1
                if count > MAX_FILES:
                    raise ProbeError("more than %d shared objects under %s" % (MAX_FILES, directory))
                yield entry.path


def _small_text(path: str) -> str:
    """Return the start of a text file, "" when there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(MAX_TEXT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def distributions(site: str) -> Tuple[Dict[str, Dict], Dict[str, str]]:
    """Return the distributions in a directory that own shared objects, and which one owns each file.

    A distribution is {"version", "requires_torch": the requirement on torch as declared, or None}.
    """
    found: Dict[str, Dict] = {}
    owners: Dict[str, str] = {}
    for entry in sorted(os.listdir(site)):
        match = _INFO_NAME.match(entry)
        if match is None:
            continue
        name = _canonical(match.group("name"))
        record = _small_text(os.path.join(site, entry, "RECORD"))
        files = [line.split(",", 1)[0] for line in record.splitlines() if ".so" in line]
        files = [file.strip('"') for file in files if _SHARED_NAME.search(file.strip('"'))]
        if not files:
            continue
        found[name] = {"version": match.group("version"), "requires_torch": _required_torch(site, entry)}
        for file in files:
            owners[os.path.normpath(os.path.join(site, file))] = name
    return found, owners


def _required_torch(site: str, entry: str) -> Optional[str]:
    metadata = _small_text(os.path.join(site, entry, "METADATA")).split("\n\n", 1)[0]
    requires = re.findall(r"(?mi)^Requires-Dist:[ \t]*(torch(?![A-Za-z0-9._-]).*?)\r?$", metadata)
    return next((line for line in requires if "extra ==" not in line), None)


def unrecorded(site: str, paths: Iterable[str], known: Iterable[str]) -> Tuple[Dict[str, Dict], Dict[str, str]]:
    """Return distributions for files of a directory that no RECORD lists, and which one owns each file.

    Packages of a Linux distribution or of conda may have no RECORD, and some packages build files when they are
    used. Such a file belongs to what its top-level directory is called or is said to belong to; the version is
    "unknown" where nothing tells it. A name that is in ``known`` gets "-unrecorded" behind it: that distribution
    has a list, and the file is not on it.
    """
    told: Dict[str, Dict] = {}
    called: Dict[str, str] = {}
    for entry in sorted(os.listdir(site)):
        match = _INFO_NAME.match(entry) or _EGG_NAME.match(entry)
        if match is not None:
            name = _canonical(match.group("name"))
            told[name] = {"version": match.group("version"), "requires_torch": _required_torch(site, entry)}
            tops = _small_text(os.path.join(site, entry, "top_level.txt")).split()
            called.update((top, name) for top in tops)
    found: Dict[str, Dict] = {}
    owners: Dict[str, str] = {}
    for path in paths:
        top = os.path.relpath(path, site).split(os.sep)[0].split(".", 1)[0]
        name = called.get(top) or _canonical(top) or "unknown"
        name = name + "-unrecorded" if name in known else name
        found[name] = told.get(name, {"version": "unknown", "requires_torch": None})
        owners[path] = name
    return found, owners


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower().strip("-")


class Environment:
    """The shared objects of one environment, read once without their exports."""

    def __init__(self, prefix: str, library_path: Sequence[str] = ()) -> None:
        if os.path.isfile(prefix):
            prefix = os.path.dirname(os.path.dirname(prefix))
        self.prefix = prefix
        self.sites = site_directories(prefix)
        if not self.sites:
            raise ProbeError("%s holds no Python packages" % prefix)
        self.machine = _own_machine()
        self.cache_problem: Optional[str] = None
        try:
            self.cache = read_loader_cache(machine=self.machine)
        except (OSError, ElfError) as problem:
            self.cache, self.cache_problem = {}, str(problem)
        self.loader = Loader(self.machine, self.cache, library_path)
        self.paths = [path for site in self.sites for path in shared_files(site)]
        self.distributions: Dict[str, Dict] = {}
        self.owners: Dict[str, str] = {}
        for site in self.sites:
            found, owners = distributions(site)
            self.distributions.update(found)
            self.owners.update(owners)
        for site in self.sites:
            rest = [path for path in self.paths if path.startswith(site + os.sep) and path not in self.owners]
            found, owners = unrecorded(site, rest, list(self.distributions))
            self.distributions.update(found)
            self.owners.update(owners)
        # Opened first, so that they are known by these paths and not by ones full of "..".
        opened = ((path, self.loader.object(path)) for path in self.paths)
        self.files = {path: found for path, found in opened if found is not None}
        self._siblings: Dict[str, Dict[str, str]] = {}
        self.interpreter = self._interpreter()

    def _interpreter(self) -> Optional[Object]:
        for name in ("python3", "python"):
            path = os.path.realpath(os.path.join(self.prefix, "bin", name))
            found = self.loader.object(path)
            if found is not None:
                self.loader.executable = found
                return found
        return None

    @property
    def python(self) -> Optional[str]:
        """Return the interpreter's minor version ("3.12"), None when nothing tells it."""
        for site in self.sites:
            match = re.search(r"/python(3\.\d+)/", site)
            if match:
                return match.group(1)
        match = re.search(r"(?m)^version(?:_info)?\s*=\s*(3\.\d+)", _small_text(self.prefix + "/pyvenv.cfg"))
        return match.group(1) if match else None

    def siblings(self, path: str) -> Dict[str, str]:
        """Return the libraries of the distribution that owns a file: each name they answer to, and the path."""
        owner = self.owners.get(path)
        if owner is None:
            return {}
        if not self._siblings:
            for other, known in self.files.items():
                if other in self.owners:
                    names = self._siblings.setdefault(self.owners[other], {})
                    names.setdefault(os.path.basename(other), other)
                    names.setdefault(known.elf.soname or "", other)
        return self._siblings.get(owner, {})


class Process:
    """A Python process after `import torch`: what it holds, and what stands in its global scope."""

    def __init__(self, environment: Environment) -> None:
        self._loader = environment.loader
        self.names: Dict[str, Object] = {}
        self.order: List[Object] = []
        self.global_scope: List[Object] = []
        self.missing: List[Missing] = []
        self.torch_version: Optional[str] = None
        self.torch_cuda: Optional[str] = None
        self.torch_site: Optional[str] = None
        if environment.interpreter is not None:
            self._add(environment.interpreter, is_global=True)
        self.torch_site = next((site for site in environment.sites if os.path.isfile(site + "/torch/version.py")), None)
        if self.torch_site is None:
            return
        text = _small_text(self.torch_site + "/torch/version.py")
        self.torch_version = _assigned(text, "__version__")
        self.torch_cuda = _assigned(text, "cuda")
        library = os.path.join(self.torch_site, "torch", "lib")
        # The order of torch/__init__.py: the CUDA libraries into the global scope, three more by file
        # name, then the extension module, whose libraries stay out of the global scope.
        self._add_path(os.path.join(library, "libtorch_global_deps.so"), is_global=True)
        if any(name.startswith("libcudart.so") for name in self.names):
            for folder, prefix in _TORCH_PRELOADS:
                path = self._cuda_file(environment.sites, folder, prefix)
                if not path:
                    break
                self._add_path(path)
        self._add_path(os.path.join(library, "libtorch_python.so"))

    def _cuda_file(self, sites: Sequence[str], folder: str, prefix: str) -> str:
        """Return the file that torch would pick from the CUDA wheels, "" when there is none."""
        version = (self.torch_cuda or "").split(".")[0]
        for site in sites:
            for place in (folder, "cu" + version):
                directory = os.path.join(site, "nvidia", place, "lib")
                try:
                    names = sorted(n for n in os.listdir(directory) if n.startswith(prefix) and n[-1:].isdigit())
                except OSError:
                    continue
                if names:
                    return os.path.join(directory, names[0])
        return ""

    def _add_path(self, path: str, is_global: bool = False) -> None:
        found = self._loader.object(path) if path else None
        if found is not None:
            self._add(found, is_global)

    def _add(self, top: Object, is_global: bool = False) -> None:
        loaded = self._loader.load(top, self.names)
        self.names = loaded.names
        for found in loaded.scope:
            if found not in self.order:
                self.order.append(found)
            if is_global and found not in self.global_scope:
                self.global_scope.append(found)
        self.missing.extend(loaded.missing)


def _assigned(text: str, name: str) -> Optional[str]:
    match = re.search(r"(?m)^%s\s*(?::[^=]*)?=\s*['\"]([^'\"]{1,64})['\"]" % re.escape(name), text)
    return match.group(1) if match else None


def _own_machine() -> str:
    machine = os.uname().machine
    if machine not in _DEFAULT_DIRECTORIES:
        raise ProbeError("this machine is %s, neither x86_64 nor aarch64" % machine)
    return machine


# ---------------------------------------------------------------------------------------------------------
# The answer.


class _Names:
    """Give each name a number, so that a name that many files share is written once."""

    def __init__(self) -> None:
        self._numbers: Dict[str, int] = {}

    def numbers(self, names: Iterable[str]) -> List[int]:
        numbers = self._numbers
        return [numbers.setdefault(name, len(numbers)) for name in names]

    def all(self) -> List[str]:
        return list(self._numbers)


def answer(prefix: str, wanted: Iterable[str] = (), library_path: Sequence[str] = ()) -> Dict:
    """Return what the shared objects of an environment need and offer, as docs/reference/abi-probe.md tells.

    Of what a file exports only those names are listed that some file of the environment leaves undefined,
    and those in ``wanted``: the undefined names of files that are not installed but shall be judged.
    Raises ProbeError.
    """
    started = time.monotonic()
    environment = Environment(prefix, library_path)
    loader = environment.loader
    process = Process(environment)
    runtime = _runtime_libraries(loader)
    loads = {
        id(found): loader.load(found, process.names, environment.siblings(path))
        for path, found in environment.files.items()
    }
    table: Dict[int, Object] = {}
    for found in [*environment.files.values(), *process.order, *runtime]:
        table.setdefault(id(found), found)
    for loaded in loads.values():
        for found in loaded.scope:
            table.setdefault(id(found), found)
    numbers = {key: number for number, key in enumerate(table)}
    needed = {
        symbol.name.encode("utf-8", "surrogateescape")
        for found in environment.files.values()
        for symbol in found.elf.undefined
        if not symbol.is_weak
    }
    # Every name asked for gets a number, so that a reader can tell "nobody has it" from "nobody was asked".
    names = _Names()
    wanted = list(wanted)
    names.numbers(wanted)
    needed.update(name.encode("utf-8", "surrogateescape") for name in wanted)
    entries = []
    for key, found in table.items():
        entry = _entry(found, needed, names)
        if key in loads:
            loaded = loads[key]
            entry["distribution"] = environment.owners.get(found.path)
            entry["scope"] = [numbers[id(other)] for other in loaded.scope]
            entry["missing"] = [[m.name, numbers[id(loader.object(m.needed_by))]] for m in loaded.missing]
            entry["siblings"] = list(loaded.siblings)
            entry.update(_needs(found.elf, names))
        entries.append(entry)
    return {
        "schema": 1,
        "environment": prefix,
        "sites": environment.sites,
        "machine": environment.machine,
        "python": environment.python,
        "interpreter": numbers[id(environment.interpreter)] if environment.interpreter else None,
        "distributions": environment.distributions,
        "torch": {"version": process.torch_version, "cuda": process.torch_cuda} if process.torch_version else None,
        "process": {
            "loads": [numbers[id(found)] for found in process.order],
            "answers": {name: numbers[id(found)] for name, found in sorted(process.names.items()) if "/" not in name},
            "global": [numbers[id(found)] for found in process.global_scope],
            "missing": [[m.name, numbers[id(loader.object(m.needed_by))]] for m in process.missing],
        },
        "runtime": [numbers[id(found)] for found in runtime],
        "loader_cache": {"error": environment.cache_problem} if environment.cache_problem else environment.cache,
        "files": entries,
        "unreadable": {
            path: {"problem": loader.unreadable[path], "distribution": environment.owners.get(path)}
            for path in environment.paths
            if path in loader.unreadable
        },
        "names": names.all(),
        "seconds": round(time.monotonic() - started, 3),
    }


def _runtime_libraries(loader: Loader) -> List[Object]:
    """Return the host's C and C++ libraries as the loader finds them."""
    nobody = Object("/", Elf("", 0, None, (), (), (), {}, (), (), {}, None, None, None, False, ""))
    found = [loader._find(name, (nobody,)) for name in _RUNTIME_LIBRARIES]
    return [library for library in found if library is not None]


def _entry(found: Object, wanted: Set[bytes], names: _Names) -> Dict:
    elf = read_file(found.path, wanted)
    return {
        "path": found.path,
        "size_bytes": elf.size_bytes,
        "soname": elf.soname,
        "needed": list(elf.needed),
        "search_paths": [*elf.rpath, *elf.runpath],
        "version_definitions": list(elf.version_definitions),
        "exports": names.numbers(elf.exports),
    }


def _needs(elf: Elf, names: _Names) -> Dict:
    """Return what a file leaves undefined; weak names, which may stay so, are left out."""
    plain, versioned = [], {}
    for symbol in elf.strong_undefined:
        if symbol.library is None:
            plain.append(symbol.name)
        else:
            versioned.setdefault(symbol.library, []).append(symbol.name)
    return {
        "undefined": names.numbers(plain),
        "versioned": {library: names.numbers(found) for library, found in versioned.items()},
        "version_needs": {library: list(versions) for library, versions in elf.version_needs.items()},
        "has_static_tls": elf.has_static_tls,
        "has_executable_stack": elf.has_executable_stack,
    }


def host_libraries() -> Dict[str, Elf]:
    """Return this machine's C and C++ libraries, by soname. Raises ProbeError on a foreign machine."""
    machine = _own_machine()
    try:
        cache = read_loader_cache(machine=machine)
    except (OSError, ElfError):
        cache = {}
    found = _runtime_libraries(Loader(machine, cache))
    return {os.path.basename(library.path): read_file(library.path) for library in found}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description="Report what the shared objects of an environment need and offer.")
    parser.add_argument("environment", help="virtual environment, Python installation or site-packages")
    parser.add_argument("--json", choices=("compact", "indented"), default="compact", help="layout of the answer")
    parser.add_argument(
        "--wanted", metavar="FILE", help="list exports of these names too, one on a line; - reads them from stdin"
    )
    parser.add_argument(
        "--library-path", default="", help="directories that LD_LIBRARY_PATH will hold, separated by colons"
    )
    options = parser.parse_args(arguments)
    paths = [path for path in options.library_path.split(":") if path]
    try:
        document = answer(options.environment, _wanted(options.wanted), paths)
    except (ProbeError, OSError) as problem:
        document = {"schema": 1, "environment": options.environment, "error": str(problem)}
    if options.json == "compact":
        text = json.dumps(document, separators=(",", ":"))
    else:
        text = json.dumps(document, indent=1)
    sys.stdout.write(text + "\n")
    return 0


def _wanted(path: Optional[str]) -> List[str]:
    if path is None:
        return []
    return (sys.stdin.read() if path == "-" else _small_text(path)).splitlines()


if __name__ == "__main__":
    sys.exit(main())
