"""Write a lock as TOML: sorted, one file a line, the same bytes for the same lock."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import tomlkit
from pydantic import BaseModel
from tomlkit.items import Array, InlineTable, Table

from bringup.stack import Lock, LockedPackage, LockedPackages, LockedPlatform, parse_lock

_INPUT = re.compile(r"^# input: ([0-9a-f]{64})$", re.MULTILINE)


def lock_text(lock: Lock, *, input_digest: str | None = None) -> str:
    """Return the TOML text of ``lock``; ``input_digest`` goes into its header for ``input_digest_of``."""
    document = tomlkit.document()
    document.add(tomlkit.comment(f"Written by `bringup lock {lock.stack}`; edit the stack, not this file."))
    if input_digest:
        document.add(tomlkit.comment(f"input: {input_digest}"))
    document.add("schema", tomlkit.item(lock.schema_))
    document.add("stack", tomlkit.item(lock.stack))
    if lock.wheels is not None:
        wheels = tomlkit.table()
        wheels.add("resolved_against", lock.wheels.resolved_against)
        platforms = tomlkit.table(is_super_table=True)
        for name, platform in sorted(lock.wheels.platforms.items()):
            platforms.add(name, _platform(platform))
        wheels.add("platform", platforms)
        document.add("wheels", wheels)
    if lock.packages:
        releases = tomlkit.table(is_super_table=True)
        for name, packages in sorted(lock.packages.items()):
            releases.add(name, _packages(packages))
        document.add("packages", releases)
    return tomlkit.dumps(document)


def write_lock(path: Path, lock: Lock, *, input_digest: str | None = None) -> bool:
    """Write ``lock`` to ``path`` as a whole file; return whether its bytes changed.

    Raises InputError when what was written would not read back as the same lock, which would be our defect.
    """
    text = lock_text(lock, input_digest=input_digest)
    parse_lock(text, source=str(path))
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    return True


def input_digest_of(path: Path) -> str | None:
    """Return the input digest in the header of a lock file; None when there is no file or no digest."""
    try:
        head = path.read_text(encoding="utf-8")[:1000]
    except (OSError, UnicodeDecodeError):
        return None
    found = _INPUT.search(head)
    return found[1] if found else None


def digest_of(parts: Iterable[str | bytes]) -> str:
    """Return one SHA-256 over ``parts``, each with its length, so that no two lists run together."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(f"{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


def _platform(platform: LockedPlatform) -> Table:
    table = tomlkit.table(is_super_table=True)
    steps = tomlkit.aot()
    for step in platform.steps:
        entry = tomlkit.table()
        entry.add("name", step.name)
        ordered = sorted(step.files, key=lambda file: (file.distribution, file.file))
        entry.add("files", _lines(_inline(file) for file in ordered))
        steps.append(entry)
    table.add("step", steps)
    return table


def _packages(packages: LockedPackages) -> Table:
    table = tomlkit.table()
    table.add("resolved_against", packages.resolved_against)
    table.add("driver", _debs(packages.driver))
    if packages.fabric:
        table.add("fabric", _sets({str(kind): debs for kind, debs in packages.fabric.items()}))
    if packages.toolkits:
        table.add("toolkit", _sets(packages.toolkits))
    return table


def _sets(sets: Mapping[str, tuple[LockedPackage, ...]]) -> Table:
    table = tomlkit.table()
    for name in sorted(sets):
        table.add(name, _debs(sets[name]))
    return table


def _debs(packages: tuple[LockedPackage, ...]) -> Array:
    # The order is the order of installation (the pinning package comes first), so it is kept.
    return _lines(_inline(package) for package in packages)


def _inline(model: BaseModel) -> InlineTable:
    table = tomlkit.inline_table()
    for key, value in model.model_dump(mode="json", by_alias=True, exclude_none=True).items():
        table.add(key, value)
    return table


def _lines(tables: Iterable[InlineTable]) -> Array:
    array = tomlkit.array()
    for table in tables:
        array.append(table)
    return array.multiline(True)
