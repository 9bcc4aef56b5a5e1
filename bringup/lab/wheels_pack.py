"""Pack wheels reproducibly: equal content gives equal bytes."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path

from packaging.utils import canonicalize_name

BUILD_TAG = "0lab"
"""Stands in every file name, so that a lock shows at a glance what came from the lab."""

_DATE = (2025, 11, 30, 0, 0, 0)


def pack(
    directory: Path,
    *,
    name: str,
    version: str,
    tag: str,
    requires: Iterable[str] = (),
    requires_python: str | None = None,
    files: Mapping[str, bytes],
) -> Path:
    """Write a wheel into ``directory`` and return its path. ``tag`` is python-abi-platform.

    Shared objects are marked executable, as wheels of compiled extensions carry them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{canonicalize_name(name).replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        "Summary: bringup lab look-alike, no working software",
        *([f"Requires-Python: {requires_python}"] if requires_python else []),
        *(f"Requires-Dist: {requirement}" for requirement in requires),
    ]
    wheel = ["Wheel-Version: 1.0", "Generator: bringup-lab", "Root-Is-Purelib: " + _is_pure(tag)]
    wheel += [f"Build: {BUILD_TAG}", *(f"Tag: {each}" for each in _tags(tag))]
    content = dict(files)
    content[f"{info}/METADATA"] = ("\n".join(metadata) + "\n").encode()
    content[f"{info}/WHEEL"] = ("\n".join(wheel) + "\n").encode()
    record = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in sorted(content.items())]
    content[f"{info}/RECORD"] = ("\n".join([*record, f"{info}/RECORD,,"]) + "\n").encode()
    target = directory / f"{stem}-{BUILD_TAG}-{tag}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        # RECORD last, as the format recommends; the rest in the order of their names.
        for path in sorted(content, key=lambda each: (each.endswith("/RECORD"), each)):
            entry = zipfile.ZipInfo(path, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = (0o100755 if ".so" in Path(path).name else 0o100644) << 16
            archive.writestr(entry, content[path])
    return target


def metadata(wheel: Path) -> str:
    """Return the text of a wheel's METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def requires_python(metadata_text: str) -> str:
    """Return what METADATA says of Python versions; empty when it says nothing."""
    return HeaderParser().parsestr(metadata_text).get("Requires-Python", "")


def _tags(tag: str) -> list[str]:
    python, abi, platform = tag.split("-")
    return [f"{python}-{abi}-{each}" for each in platform.split(".")]


def _is_pure(tag: str) -> str:
    return "true" if tag.endswith("-any") else "false"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
