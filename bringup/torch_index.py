"""The index of torch exports: which names each torch release has, and which CUDA libraries it brings.

One file travels with bringup and answers without a network. A person adds a nightly, another CUDA build or an
installed torch; those lie in the state directory, one file each. Names are kept, not hashes: a finding has to
say them, and a hash packs worse than the names that it replaces.
"""

from __future__ import annotations

import json
import lzma
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from bringup import paths
from bringup.errors import InputError

SHIPPED = "torch_exports.json.xz"
"""The index that travels with bringup, in its data directory."""

MAX_INDEX_BYTES = 512 << 20


@dataclass(frozen=True)
class CudaWheel:
    """A wheel that a torch requires for CUDA, and the names of the shared objects in it."""

    file: str
    sha256: str
    libraries: tuple[str, ...]


@dataclass(frozen=True)
class IndexedTorch:
    """One torch build as the index holds it.

    ``file`` is the wheel it was read from with its ``sha256``; for an installed torch ``file`` is its place
    and ``sha256`` empty. ``python`` is the minor version of the build; only libtorch_python depends on it.
    """

    version: str
    cuda: str | None
    machine: str
    python: str
    file: str
    sha256: str
    size_bytes: int
    cuda_wheels: tuple[CudaWheel, ...]
    needed: Mapping[str, tuple[str, ...]]
    exports: Mapping[str, frozenset[str]] = field(repr=False)

    @property
    def public(self) -> str:
        """Return the version without its local label."""
        return self.version.split("+")[0]


def known_builds() -> tuple[IndexedTorch, ...]:
    """Return the builds of the shipped index and those added on this machine; raises InputError for a damaged file."""
    return (*_shipped(), *(build for file in added_files() for build in read_index(file)))


@cache
def _shipped() -> tuple[IndexedTorch, ...]:
    file = paths.data() / SHIPPED
    return read_index(file) if file.is_file() else ()


def added_files() -> list[Path]:
    """Return the files that were added on this machine."""
    return sorted(_added_directory().glob("*.json.xz"))


def _added_directory() -> Path:
    return paths.state_dir() / "torch-index"


def add(build: IndexedTorch) -> Path:
    """Keep a build in the state directory and return its file; a build of the same version is replaced."""
    directory = _added_directory()
    # Nobody else is to look into the state directory, whoever of us makes it.
    paths.state_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(exist_ok=True)
    target = directory / f"torch-{build.version}-{build.machine}.json.xz"
    write_index(target, [build])
    return target


def write_index(target: Path, builds: Sequence[IndexedTorch]) -> None:
    """Write builds into one file, whole or not at all; equal builds give equal bytes."""
    data = pack(builds)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        part = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            part.chmod(0o644)
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def read_index(file: Path) -> tuple[IndexedTorch, ...]:
    """Return the builds in a file; raises InputError when it is no index of exports."""
    try:
        return unpack(file.read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, lzma.LZMAError) as error:
        raise InputError(
            f"{file} is no index of torch exports", why=str(error), hint="remove it and make it again"
        ) from None


def pack(builds: Sequence[IndexedTorch]) -> bytes:
    """Return builds as the bytes of an index file.

    Most names stay from release to release. So each name stands once, in a group for the set of builds that
    have it: the group's key has bit n set for the n-th build.
    """
    ordered = sorted(builds, key=lambda build: (order_of(build.version), build.machine))
    masks: dict[str, dict[str, int]] = {}
    for number, build in enumerate(ordered):
        for library, names in build.exports.items():
            known = masks.setdefault(library, {})
            for name in names:
                known[name] = known.get(name, 0) | 1 << number
    groups: dict[str, dict[str, list[str]]] = {}
    for library in sorted(masks):
        for name in sorted(masks[library]):
            groups.setdefault(library, {}).setdefault(format(masks[library][name], "x"), []).append(name)
    document = {
        "schema": 1,
        "builds": [
            {
                "version": build.version,
                "cuda": build.cuda,
                "machine": build.machine,
                "python": build.python,
                "file": build.file,
                "sha256": build.sha256,
                "size_bytes": build.size_bytes,
                "cuda_wheels": [[w.file, w.sha256, list(w.libraries)] for w in build.cuda_wheels],
                "needed": {library: list(names) for library, names in sorted(build.needed.items())},
            }
            for build in ordered
        ],
        "exports": {
            library: {mask: "\n".join(names) for mask, names in sorted(found.items())}
            for library, found in groups.items()
        },
    }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True)
    return lzma.compress(text.encode(), preset=9)


def unpack(data: bytes) -> tuple[IndexedTorch, ...]:
    """Return the builds in the bytes of an index file; raises ValueError and its like for anything else."""
    text = lzma.LZMADecompressor(memlimit=256 << 20).decompress(data, MAX_INDEX_BYTES)
    document = json.loads(text)
    if document["schema"] != 1:
        raise ValueError(f"schema {document['schema']}, wanted 1")
    parts: list[dict[str, list[list[str]]]] = [{} for _ in document["builds"]]
    for library, groups in document["exports"].items():
        for mask, joined in groups.items():
            names, bits = joined.split("\n"), int(mask, 16)
            for number, found in enumerate(parts):
                if bits >> number & 1:
                    found.setdefault(library, []).append(names)
    return tuple(_build(entry, found) for entry, found in zip(document["builds"], parts, strict=True))


def _build(entry: Mapping[str, Any], found: Mapping[str, list[list[str]]]) -> IndexedTorch:
    needed = {library: tuple(names) for library, names in entry["needed"].items()}
    return IndexedTorch(
        version=entry["version"],
        cuda=entry["cuda"],
        machine=entry["machine"],
        python=entry["python"],
        file=entry["file"],
        sha256=entry["sha256"],
        size_bytes=entry["size_bytes"],
        cuda_wheels=tuple(CudaWheel(file, sha256, tuple(names)) for file, sha256, names in entry["cuda_wheels"]),
        needed=needed,
        exports={library: frozenset().union(*found.get(library, [])) for library in needed},
    )


def order_of(version: str) -> tuple[Version, str]:
    """Return what a version of torch sorts by; what is no version comes first."""
    try:
        return Version(version), version
    except InvalidVersion:
        return Version("0"), version
