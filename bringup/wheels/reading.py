"""What a wheel needs and offers, read from as few of its bytes as possible."""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import io
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from packaging.metadata import parse_email
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from bringup.abi import Distribution, SharedFile, declared_torch, promised_glibc
from bringup.errors import BringupError, InputError
from bringup.paths import host_script
from bringup.wheels.archive import Archive, Front, Member
from bringup.wheels.remote import Source

How = Literal["prefix", "member", "wheel"]

MAX_METADATA_BYTES = 8 << 20
MAX_RECORD_BYTES = 64 << 20
MAX_SHARED_FILES = 4000

# This holds the tables of nearly every extension with a hundred megabytes of GPU code behind them.
_FIRST_BYTES = 176 << 10
_FIRST_LOOK_BYTES = 1 << 20
_AT_ONCE = 64
# The longest real tables at the front of an extension end at 8.4 MB; beyond this the whole member is fetched.
_MAX_FRONT_BYTES = 64 << 20
_IN_MEMORY_BYTES = 256 << 20
_SHARED_NAME = re.compile(r"\.so(\.\d[0-9A-Za-z_.]*)?\Z")
_SITE_DATA = re.compile(r"[^/]+\.data/(?:purelib|platlib)/")


@dataclass(frozen=True)
class WheelFacts:
    """One wheel, read.

    ``record`` has the SHA-256 (hexadecimal, or None) of each path that it lays down. ``read`` says for each
    shared object how much of it was needed: its front, the whole member, or the whole wheel because its server
    has no ranges. ``fetched_bytes`` and ``requests`` count what went over the network for it, repeated attempts
    included; pages of indexes are not counted.
    """

    file: str
    size_bytes: int
    distribution: Distribution
    requires: tuple[str, ...]
    record: Mapping[str, str | None]
    read: Mapping[str, How]
    fetched_bytes: int
    requests: int
    seconds: float

    @property
    def machine(self) -> str | None:
        """Return the machine of the wheel's tag ("x86_64"), None for a wheel that runs on any."""
        return machine_of(self.file)


def read_wheel(source: Source, file: str, *, is_guarded: bool = True) -> WheelFacts:
    """Read what a wheel's shared objects need and offer, and what its metadata declares.

    ``file`` is the wheel's file name. Unless it ``is_guarded``, its shared objects are left alone. One that
    cannot be read is in the result with the reason. Raises BringupError for a wheel that is no sound zip file or
    whose metadata is not its own, and as ``source`` does.
    """
    started = time.monotonic()
    name, version, platforms = _parsed(file)
    archive = Archive(source)
    shared = [member for member in archive.members if is_guarded and _SHARED_NAME.search(member.name)]
    if len(shared) > MAX_SHARED_FILES:
        raise BringupError(f"{source.name} holds {len(shared)} shared objects, more than any real wheel")
    metadata = metadata_of(archive, name, version)
    record = record_of(archive)
    # A damaged name in the directory would hide a file from the guard; the wheel's own list shows it.
    hidden = {path for path in record if _SHARED_NAME.search(path)} - {installed_path(m.path) for m in shared}
    if hidden and is_guarded:
        raise archive.unsound(f"its RECORD lists {min(hidden)}, its directory does not")
    found = dict(_shared_files(archive, shared, machine_of(file), record))
    distribution = Distribution(
        name=name,
        version=str(version),
        files=tuple(facts for _, (facts, _) in sorted(found.items())),
        requires_torch=declared_torch(metadata.get("requires_dist", ())),
        promised_glibc=promised_glibc(platforms),
    )
    return WheelFacts(
        file=file,
        size_bytes=source.size_bytes,
        distribution=distribution,
        requires=tuple(metadata.get("requires_dist", ())),
        record=record,
        read={path: how for path, (_, how) in found.items()},
        fetched_bytes=source.fetched_bytes,
        requests=source.requests,
        seconds=time.monotonic() - started,
    )


def machine_of(file: str) -> str | None:
    """Return the machine that a wheel's file name is tagged for, None for any. Raises InputError."""
    for platform in _parsed(file)[2]:
        for machine in ("x86_64", "aarch64"):
            if platform.endswith(machine):
                return machine
    return None


def _parsed(file: str) -> tuple[str, Version, tuple[str, ...]]:
    try:
        name, version, _, tags = parse_wheel_filename(file)
    except InvalidWheelFilename as error:
        raise InputError(f"not a wheel: {file}", why=str(error)) from None
    return str(name), version, tuple(sorted({tag.platform for tag in tags}))


def metadata_of(archive: Archive, name: str, version: Version) -> dict[str, Any]:
    """Return the fields of a wheel's METADATA, which must be of the same name and version as its file.

    Raises BringupError.
    """
    member = _information(archive, "METADATA")
    fields, _ = parse_email(archive.read(member, MAX_METADATA_BYTES))
    try:
        is_own = canonicalize_name(fields.get("name", "")) == name and Version(fields.get("version", "")) == version
    except InvalidVersion:
        is_own = False
    if not is_own:
        raise BringupError(
            f"{archive.source.name} is not what it is called",
            why=f"its metadata says {fields.get('name')} {fields.get('version')}, not {name} {version}",
        )
    return dict(fields)


def record_of(archive: Archive) -> dict[str, str | None]:
    """Return what a wheel lays down: the SHA-256 (hexadecimal) of each path in its RECORD, None without one.

    Raises BringupError.
    """
    text = archive.read(_information(archive, "RECORD"), MAX_RECORD_BYTES).decode("utf-8", "backslashreplace")
    found: dict[str, str | None] = {}
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row and row[0]]
    except csv.Error as error:
        raise archive.unsound(f"its RECORD is no table: {error}") from None
    for row in rows:
        digest = row[1].removeprefix("sha256=") if len(row) > 1 and row[1].startswith("sha256=") else ""
        found[installed_path(row[0])] = _hexadecimal(digest)
    return found


def text_of(archive: Archive, path: str, limit_bytes: int = 1 << 20) -> str | None:
    """Return a member's text, None when the wheel has no such member. Raises BringupError."""
    member = archive.by_path.get(path)
    return None if member is None else archive.read(member, limit_bytes).decode("utf-8", "backslashreplace")


def _hexadecimal(digest: str) -> str | None:
    """Return the digest of a RECORD line, which is written in URL-safe base64 without padding."""
    try:
        raw = base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4))
    except (binascii.Error, ValueError):
        return None
    return raw.hex() if len(raw) == 32 else None


def installed_path(path: str) -> str:
    """Return where a member goes, relative to site-packages."""
    return _SITE_DATA.sub("", path, count=1)


def _information(archive: Archive, name: str) -> Member:
    found = [m for m in archive.members if re.fullmatch(rf"[^/]+\.dist-info/{name}", m.path)]
    if len(found) != 1:
        raise BringupError(
            f"{archive.source.name} is not a sound wheel", why=f"{len(found)} of its members are *.dist-info/{name}"
        )
    return found[0]


def _shared_files(
    archive: Archive, members: list[Member], machine: str | None, record: Mapping[str, str | None]
) -> Iterator[tuple[str, tuple[SharedFile, How]]]:
    """Yield each shared object by its installed path, with how it was read."""
    for member in members:
        archive.check_size(member)
    # Wheels hold copies where symbolic links would do (libx.so, libx.so.0): one of them is read for all.
    copies: dict[object, list[Member]] = {}
    for member in members:
        sha256 = record.get(installed_path(member.path))
        copies.setdefault((sha256, member.crc32, member.size_bytes) if sha256 else member.path, []).append(member)
    firsts = [same[0] for same in copies.values()]
    batches = (firsts[n : n + _AT_ONCE] for n in range(0, len(firsts), _AT_ONCE))
    fronts = chain.from_iterable(archive.fronts(batch, _FIRST_BYTES) for batch in batches)
    for front, same in zip(fronts, copies.values(), strict=True):
        facts, how = _shared_file(archive, front, machine, record.get(installed_path(front.member.path)))
        for member in same:
            path = installed_path(member.path)
            yield path, (replace(facts, path=path), how)


def _shared_file(archive: Archive, front: Front, machine: str | None, sha256: str | None) -> tuple[SharedFile, How]:
    probe = host_script("abi_probe")
    path = installed_path(front.member.path)
    how: How = "wheel" if archive.source.whole else "prefix"
    try:
        elf, is_front = _elf(probe, archive, front, sha256)
    except probe.ElfError as problem:
        return SharedFile.unreadable(path, str(problem)), how
    if not is_front and how == "prefix":
        how = "member"
    if machine is not None and elf.machine != machine:
        return SharedFile.unreadable(path, f"it is for {elf.machine}, its wheel for {machine}"), how
    return SharedFile.from_elf(path, elf), how


def _elf(probe: Any, archive: Archive, front: Front, sha256: str | None) -> tuple[Any, bool]:
    """Return a member's tables, and whether its front was enough. Raises the probe's ElfError.

    What travelled whole is read as the loader reads it, which is exact.
    """
    member = front.member
    front.inflate(_FIRST_LOOK_BYTES)
    while not front.is_fetched:
        try:
            return probe.read_prefix(bytes(front.data), member.size_bytes, member.name), True
        except probe.PrefixTooShort as problem:
            if problem.wanted_bytes > min(_MAX_FRONT_BYTES, member.size_bytes):
                break
            # What is asked for is one table; the next ones are hardly longer.
            front.grow(problem.wanted_bytes + (problem.wanted_bytes >> 2))
        except probe.PrefixUnreadable:
            break
    if member.size_bytes <= _IN_MEMORY_BYTES:
        data = front.whole()
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise archive.unsound(f"{member.path} does not have the hash that its RECORD says")
        return probe.read_bytes(data), False
    with archive.unpacked(member) as path:
        return probe.read_file(str(path)), False
