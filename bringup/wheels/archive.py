"""The directory of a wheel, and its members whole or from the front, out of any source of bytes.

A wheel is a zip file from anywhere: sizes and places in it are claims. Members that overlap, leave the
archive, stand twice in it or inflate to something else than they claim end in an error, before much of them
has been inflated.
"""

from __future__ import annotations

import re
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bringup.errors import BringupError
from bringup.wheels.remote import Source

# Limits on what one wheel may claim. The largest real ones: flashinfer's caches with some 20,000 members, and
# libraries of GPU code of 1.2 GB, which deflate to a fifth; nothing of a real wheel goes below a fiftieth.
MAX_DIRECTORY_BYTES = 64 << 20
MAX_MEMBERS = 300_000
MAX_MEMBER_BYTES = 4 << 30
MAX_RATIO = 250
FREE_OF_RATIO_BYTES = 32 << 20

_END = struct.Struct("<4s4H2LH")
_END64_PLACE = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_DEFLATED, _STORED = 8, 0
# Local extra fields are short in real wheels (zip64 sizes, timestamps); a longer one costs one request more.
_LOCAL_EXTRA_BYTES = 64
_INFLATE_BYTES = 1 << 20
# Control characters, separators of other systems, drive letters.
_NEVER_IN_A_NAME = re.compile(r"[\x00-\x1f\x7f\\]|^[A-Za-z]:")


@dataclass(frozen=True)
class Member:
    """One file of a wheel as its directory has it; ``offset`` is where its own header begins."""

    path: str
    method: int
    crc32: int
    packed_bytes: int
    size_bytes: int
    offset: int

    @property
    def name(self) -> str:
        """Return the base name."""
        return self.path.rsplit("/", 1)[-1]


class Archive:
    """The members of a wheel. Raises BringupError for what is no sound zip file, naming the wheel."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._directory_at, entries, count = self._find_directory()
        self.members = tuple(self._entries(entries, count))
        self._ends = self._check_places()

    @cached_property
    def by_path(self) -> dict[str, Member]:
        """Return the members by path."""
        return {member.path: member for member in self.members}

    def read(self, member: Member, limit_bytes: int) -> bytes:
        """Return a member whole, its length and checksum tested; raises BringupError beyond the limit."""
        if member.size_bytes > limit_bytes:
            raise self.unsound(f"{member.path} has {member.size_bytes} bytes, more than {limit_bytes}")
        front = Front(self, member, min(member.packed_bytes, limit_bytes + 1024))
        return front.whole()

    @contextmanager
    def unpacked(self, member: Member) -> Iterator[Path]:
        """Lay a member down as a temporary file, for what is too large for memory; yields its path."""
        self.check_size(member)
        with tempfile.NamedTemporaryFile(prefix="bringup-member-") as file:
            for part in self._inflated(member):
                file.write(part)
            file.flush()
            yield Path(file.name)

    def check_size(self, member: Member) -> None:
        """Raise BringupError for a member that would inflate to more than any real one."""
        if member.size_bytes > MAX_MEMBER_BYTES:
            raise self.unsound(f"{member.path} claims {member.size_bytes} bytes")
        if member.size_bytes > FREE_OF_RATIO_BYTES and member.size_bytes > MAX_RATIO * member.packed_bytes:
            raise self.unsound(f"{member.path} would inflate {member.packed_bytes} bytes to {member.size_bytes}")

    def fronts(self, members: Sequence[Member], packed_bytes: int) -> list[Front]:
        """Return the first ``packed_bytes`` of several members, fetched together; none is inflated yet."""
        spans = [self.span(member, packed_bytes) for member in members]
        return [
            Front(self, member, packed_bytes, data)
            for member, data in zip(members, self.source.read_many(spans), strict=True)
        ]

    def span(self, member: Member, packed_bytes: int) -> tuple[int, int]:
        """Return start and length of a member's own header and the first of its packed bytes."""
        length = _LOCAL.size + len(member.path.encode()) + _LOCAL_EXTRA_BYTES + min(packed_bytes, member.packed_bytes)
        return member.offset, min(length, self._ends[member.path] - member.offset)

    def _inflated(self, member: Member) -> Iterator[bytes]:
        """Yield a member part by part; its end is where length and checksum are tested."""
        start = self.data_at(member)
        inflate = Inflation(self, member)
        for position in range(0, member.packed_bytes, 8 << 20):
            packed = self.source.read(start + position, min(8 << 20, member.packed_bytes - position))
            inflate.feed(packed)
            yield from inflate.parts()
        inflate.finish()

    def data_at(self, member: Member, head: bytes | None = None) -> int:
        """Return where a member's data begins; its own header must say what the directory says."""
        if head is None:
            head = self.source.read(*self.span(member, 0))
        name = member.path.encode()
        if len(head) < _LOCAL.size:
            raise self.unsound(f"{member.path} begins outside the archive")
        magic, _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = _LOCAL.unpack_from(head)
        found = head[_LOCAL.size : _LOCAL.size + name_bytes]
        if magic != b"PK\3\4" or method != member.method or flags & 0x2041:
            raise self.unsound(f"{member.path} has a header of its own that the directory does not agree with")
        if found != name and found.decode("cp437") != member.path:
            raise self.unsound(f"the directory calls {member.path} what calls itself {_shown(found)}")
        at: int = member.offset + _LOCAL.size + name_bytes + extra_bytes
        if at + member.packed_bytes > self._ends[member.path]:
            raise self.unsound(f"{member.path} overlaps what comes behind it")
        return at

    def _find_directory(self) -> tuple[int, bytes, int]:
        """Return where the directory begins, its bytes, and how many entries it claims."""
        size = self.source.size_bytes
        tail_bytes = min(size, _END.size + 0xFFFF)
        tail = self.source.read(size - tail_bytes, tail_bytes)
        place = self._find_end(tail)
        _, disk, first_disk, here, count, length, start, _ = _END.unpack_from(tail, place)
        end = size - tail_bytes + place
        if (disk in (0, 0xFFFF) and 0xFFFFFFFF in (length, start)) or 0xFFFF in (here, count):
            end, count, length, start = self._zip64(end)
        elif disk or first_disk or here != count:
            raise self.unsound("it is one part of a zip file in several")
        if length > MAX_DIRECTORY_BYTES or count > MAX_MEMBERS or count * _ENTRY.size > length:
            raise self.unsound(f"its directory claims {count} members in {length} bytes")
        # Zip files may stand behind other data; wheels never do, and then two readers see different members.
        if start + length != end:
            raise self.unsound("its directory does not lie where the end record says")
        return start, self.source.read(start, length), count

    def _find_end(self, tail: bytes) -> int:
        place = len(tail)
        while (place := tail.rfind(b"PK\5\6", 0, place)) >= 0:
            if place + _END.size <= len(tail):
                (comment_bytes,) = struct.unpack_from("<H", tail, place + 20)
                if place + _END.size + comment_bytes == len(tail):
                    return place
        raise self.unsound("it is no zip file, or its end is missing")

    def _zip64(self, end: int) -> tuple[int, int, int, int]:
        """Return (end of the directory, entries, bytes, start) from the records of a large zip file."""
        at = end - _END64_PLACE.size
        if at < 0:
            raise self.unsound("its large-file record is missing")
        magic, _, place, disks = _END64_PLACE.unpack(self.source.read(at, _END64_PLACE.size))
        if magic != b"PK\6\7" or disks > 1 or place + _END64.size > at:
            raise self.unsound("its large-file record is missing")
        found = _END64.unpack(self.source.read(place, _END64.size))
        magic, _, _, _, disk, first_disk, here, count, length, start = found
        if magic != b"PK\6\6" or disk or first_disk or here != count:
            raise self.unsound("its large-file record is damaged")
        return place, count, length, start

    def _entries(self, table: bytes, count: int) -> Iterator[Member]:
        position = 0
        for _ in range(count):
            if position + _ENTRY.size > len(table):
                raise self.unsound("its directory is cut off")
            entry = _ENTRY.unpack_from(table, position)
            magic, _, _, flags, method, _, _, crc32, packed, size = entry[:10]
            name_bytes, extra_bytes, comment_bytes, disk, _, _, offset = entry[10:]
            behind = position + _ENTRY.size
            name = table[behind : behind + name_bytes]
            extra = table[behind + name_bytes : behind + name_bytes + extra_bytes]
            position = behind + name_bytes + extra_bytes + comment_bytes
            if magic != b"PK\1\2" or position > len(table):
                raise self.unsound("its directory is cut off")
            if flags & 0x2041:
                raise self.unsound(f"{_shown(name)} is encrypted")
            large = iter(self._large(extra, name))
            size = next(large, None) if size == 0xFFFFFFFF else size
            packed = next(large, None) if packed == 0xFFFFFFFF else packed
            offset = next(large, None) if offset == 0xFFFFFFFF else offset
            if size is None or packed is None or offset is None or disk not in (0, 0xFFFF):
                raise self.unsound(f"{_shown(name)} has no usable sizes")
            yield Member(self._path(name, flags), method, crc32, packed, size, offset)
        if position != len(table):
            raise self.unsound("its directory holds more than it claims")

    def _large(self, extra: bytes, name: bytes) -> tuple[int, ...]:
        """Return the 64-bit values of a large member: those of size, packed size and offset that do not fit."""
        position = 0
        while position + 4 <= len(extra):
            kind, length = struct.unpack_from("<HH", extra, position)
            value = extra[position + 4 : position + 4 + length]
            if len(value) != length:
                raise self.unsound(f"{_shown(name)} has a damaged extra field")
            if kind == 1:
                return struct.unpack_from(f"<{length // 8}Q", value)
            position += 4 + length
        return ()

    def _path(self, name: bytes, flags: int) -> str:
        """Return a member's path, which must stay inside whatever directory the wheel is laid down in."""
        try:
            path = name.decode("utf-8" if flags & 0x800 or name.isascii() else "cp437")
        except UnicodeDecodeError:
            raise self.unsound(f"{_shown(name)} is no name") from None
        is_rising = any(part in ("", ".", "..") for part in path.removesuffix("/").split("/"))
        if is_rising or _NEVER_IN_A_NAME.search(path):
            raise self.unsound(f"{_shown(name)} would not stay where the wheel is installed")
        return path

    def _check_places(self) -> dict[str, int]:
        """Return where each member ends at the latest; raises when two share bytes or a name."""
        ends: dict[str, int] = {}
        following = self._directory_at
        for member in sorted(self.members, key=lambda m: m.offset, reverse=True):
            if member.path in ends:
                raise self.unsound(f"{member.path} is in it twice")
            if member.offset + _LOCAL.size + len(member.path) + member.packed_bytes > following:
                raise self.unsound(f"{member.path} overlaps what comes behind it")
            ends[member.path] = following
            following = member.offset
        return ends

    def unsound(self, why: str) -> BringupError:
        """Return the error that says why this is no wheel to go by."""
        return BringupError(f"{self.source.name} is not a sound wheel", why=why)


class Inflation:
    """One member's data on its way from packed to plain, its claims tested."""

    def __init__(self, archive: Archive, member: Member) -> None:
        if member.method not in (_STORED, _DEFLATED):
            raise archive.unsound(f"{member.path} is packed by method {member.method}; wheels use deflate")
        self._archive = archive
        self._member = member
        self._stream = zlib.decompressobj(-15) if member.method == _DEFLATED else None
        self._waiting = b""
        self._is_more = False
        self._checksum = 0
        self.count = 0

    def feed(self, packed: bytes) -> None:
        """Take some more packed bytes; nothing is inflated yet."""
        self._waiting += packed
        self._is_more = bool(self._waiting)

    def parts(self, until_bytes: int | None = None) -> Iterator[bytes]:
        """Yield what the packed bytes make, at most 1 MiB at a time, until that many have come; None: all."""
        member = self._member
        while self._is_more and (until_bytes is None or self.count < until_bytes):
            part = self._part()
            self.count += len(part)
            if self.count > member.size_bytes:
                raise self._archive.unsound(
                    f"{member.path} inflates to more than the {member.size_bytes} bytes it claims"
                )
            self._checksum = zlib.crc32(part, self._checksum)
            yield part

    def _part(self) -> bytes:
        if self._stream is None:
            part, self._waiting, self._is_more = self._waiting, b"", False
            return part
        try:
            part = self._stream.decompress(self._waiting, _INFLATE_BYTES)
        except zlib.error as error:
            raise self._archive.unsound(f"{self._member.path} cannot be inflated: {error}") from None
        if self._stream.unused_data:
            raise self._archive.unsound(f"{self._member.path} ends before its data does")
        self._waiting = self._stream.unconsumed_tail
        # A full part may leave more behind, although everything that was fed has been taken.
        self._is_more = bool(self._waiting) or len(part) == _INFLATE_BYTES
        return part

    def finish(self) -> None:
        """Test length and checksum, once everything has come."""
        member = self._member
        if self._stream is not None and not self._stream.eof:
            raise self._archive.unsound(f"{member.path} is cut off")
        if self.count != member.size_bytes:
            raise self._archive.unsound(f"{member.path} inflates to {self.count} bytes and claims {member.size_bytes}")
        if self._checksum != member.crc32:
            raise self._archive.unsound(f"{member.path} does not have the checksum that the directory says")


class Front:
    """The front of one member, growing on demand. ``data`` is what has been inflated so far."""

    def __init__(self, archive: Archive, member: Member, packed_bytes: int, fetched: bytes | None = None) -> None:
        self.member = member
        self.data = bytearray()
        self._archive = archive
        self._inflation = Inflation(archive, member)
        if fetched is None:
            fetched = archive.source.read(*archive.span(member, packed_bytes))
        self._at = archive.data_at(member, fetched)
        packed = fetched[self._at - member.offset :][: member.packed_bytes]
        self.packed_bytes = len(packed)
        self._inflation.feed(packed)

    @property
    def is_fetched(self) -> bool:
        """Return whether all of the member has been fetched."""
        return self.packed_bytes == self.member.packed_bytes

    def grow(self, wanted_bytes: int) -> None:
        """Inflate until ``data`` has the wanted length or the member ends, fetching what that takes."""
        self.inflate(wanted_bytes)
        while len(self.data) < wanted_bytes and not self.is_fetched:
            # What is left is guessed by how it packed so far, and a little more, so that one request does.
            ratio = self.packed_bytes / max(1, len(self.data))
            packed = int((wanted_bytes - len(self.data)) * ratio * 1.1) + (16 << 10)
            packed = min(packed, self.member.packed_bytes - self.packed_bytes)
            self._inflation.feed(self._archive.source.read(self._at + self.packed_bytes, packed))
            self.packed_bytes += packed
            self.inflate(wanted_bytes)

    def whole(self) -> bytes:
        """Return the member, fetched to its end and tested."""
        self.grow(self.member.size_bytes + 1)
        self._inflation.finish()
        return bytes(self.data)

    def inflate(self, wanted_bytes: int) -> None:
        """Inflate what has been fetched until ``data`` has the wanted length."""
        for part in self._inflation.parts(wanted_bytes):
            self.data += part


def _shown(name: bytes) -> str:
    return repr(name[:120].decode("utf-8", "backslashreplace"))
