"""What one shared object and one distribution need and offer."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Protocol

from packaging.requirements import InvalidRequirement, Requirement

from bringup.abi.names import belongs_to_torch, is_torch_library


class Level(StrEnum):
    """What becomes of a file, the worst first."""

    BROKEN_SYMBOL = "broken-symbol"
    BROKEN_LIBRARY = "broken-library"
    BROKEN_GLIBC = "broken-glibc"
    LAYOUT_RISK = "layout-risk"
    OPTIONAL = "optional"
    OK_STABLE = "ok-stable"
    OK = "ok"

    @property
    def rank(self) -> int:
        """Return 0 for the worst level, more for better ones."""
        return _RANKS[self]

    @property
    def is_broken(self) -> bool:
        """Return whether a file of this level does not load."""
        return self.rank <= _RANKS[Level.BROKEN_GLIBC]


_RANKS = {level: rank for rank, level in enumerate(Level)}


def worst(levels: Iterable[Level]) -> Level:
    """Return the worst of some levels, OK for none."""
    return min(levels, key=lambda level: level.rank, default=Level.OK)


class ElfFacts(Protocol):
    """What `files/abi_probe.py` reads from one shared object (its ``Elf``), as far as it is used here."""

    @property
    def soname(self) -> str | None: ...
    @property
    def needed(self) -> tuple[str, ...]: ...
    @property
    def rpath(self) -> tuple[str, ...]: ...
    @property
    def runpath(self) -> tuple[str, ...]: ...
    @property
    def exports(self) -> Mapping[str, object]: ...
    @property
    def undefined(self) -> Sequence[tuple[str, str | None, str | None, bool]]: ...
    @property
    def version_definitions(self) -> tuple[str, ...]: ...
    @property
    def version_needs(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def has_executable_stack(self) -> bool: ...
    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class SharedFile:
    """One shared object: ``path`` is relative to site-packages, with slashes.

    ``undefined`` are the names that must be found and carry no version, ``versioned`` those that a certain
    library must define. Weak names are in neither, for they may stay unresolved. ``is_exact`` is False when
    ``needed`` was guessed from the front of the file. ``problem`` says why the file could not be read;
    then nothing else is known, and the file never counts as sound.
    """

    path: str
    soname: str | None = None
    needed: tuple[str, ...] = ()
    search_paths: tuple[str, ...] = ()
    undefined: frozenset[str] = frozenset()
    versioned: Mapping[str, frozenset[str]] = field(default_factory=dict)
    version_needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    version_definitions: tuple[str, ...] = ()
    exports: frozenset[str] = frozenset()
    has_executable_stack: bool = False
    is_exact: bool = True
    problem: str | None = None

    @property
    def name(self) -> str:
        """Return the base name."""
        return self.path.rsplit("/", 1)[-1]

    @classmethod
    def from_elf(cls, path: str, elf: ElfFacts) -> SharedFile:
        """Return the facts that the ELF reader found, whole or from a prefix."""
        plain: set[str] = set()
        versioned: dict[str, set[str]] = {}
        for name, _, library, is_weak in elf.undefined:
            if is_weak:
                continue
            if library is None:
                plain.add(name)
            else:
                versioned.setdefault(library, set()).add(name)
        return cls(
            path=path,
            soname=elf.soname,
            needed=elf.needed,
            search_paths=(*elf.rpath, *elf.runpath),
            undefined=frozenset(plain),
            versioned={library: frozenset(names) for library, names in versioned.items()},
            version_needs=dict(elf.version_needs),
            version_definitions=elf.version_definitions,
            exports=frozenset(elf.exports),
            has_executable_stack=elf.has_executable_stack,
            is_exact=elf.source == "dynamic",
        )

    @classmethod
    def unreadable(cls, path: str, problem: str) -> SharedFile:
        """Return a file that could not be read, with the reason."""
        return cls(path=path, problem=problem)

    def torch_names(self, known: Container[str] = frozenset()) -> frozenset[str]:
        """Return the undefined names that belong to torch: by their namespace, or because ``known`` has them."""
        return frozenset(name for name in self.undefined if belongs_to_torch(name, known))


@dataclass(frozen=True)
class Distribution:
    """A wheel or an installed distribution with its shared objects.

    ``requires_torch`` is its declared specifier for torch ("==2.9.1"), "" for a bare requirement, None when
    it declares nothing. ``promised_glibc`` is what the wheel's platform tag says it runs on. ``is_optional``
    says that whoever wrote the stack accepts this distribution without its shared objects.
    """

    name: str
    version: str
    files: tuple[SharedFile, ...]
    requires_torch: str | None = None
    promised_glibc: str | None = None
    is_optional: bool = False

    @property
    def uses_torch(self) -> bool:
        """Return whether any file needs a library or a name of torch."""
        return any(is_torch_library(name) for file in self.files for name in file.needed) or any(
            file.torch_names() for file in self.files
        )

    @property
    def undefined_names(self) -> frozenset[str]:
        """Return every name that a probe has to look for before this distribution can be judged on its host."""
        return frozenset().union(
            *(file.undefined for file in self.files),
            *(names for file in self.files for names in file.versioned.values()),
        )

    @cached_property
    def needed_glibc(self) -> str | None:
        """Return the newest glibc that any file asks for ("2.27"), None when none does."""
        wanted = (v for file in self.files for versions in file.version_needs.values() for v in versions)
        return newest_glibc(wanted)


def declared_torch(requirements: Iterable[str]) -> str | None:
    """Return the specifier for torch among the lines of Requires-Dist: "" for a bare one, None for none.

    Requirements that hold only with an extra do not count.
    """
    for line in requirements:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.name.lower() == "torch" and "extra" not in str(requirement.marker or ""):
            return str(requirement.specifier)
    return None


def promised_glibc(platform_tags: Iterable[str]) -> str | None:
    """Return the oldest glibc that a wheel's platform tags promise to run on, None when they name none."""
    old = {"manylinux1": "2.5", "manylinux2010": "2.12", "manylinux2014": "2.17"}
    found = []
    for tag in platform_tags:
        if match := re.match(r"manylinux_(\d+)_(\d+)_", tag):
            found.append((int(match[1]), int(match[2])))
        elif (name := tag.split("_")[0]) in old:
            major, minor = old[name].split(".")
            found.append((int(major), int(minor)))
    return ".".join(map(str, min(found))) if found else None


def newest_glibc(versions: Iterable[str]) -> str | None:
    """Return the newest of some symbol versions GLIBC_x.y as "x.y", None when there is none."""
    numbers = [tuple(map(int, m[1].split("."))) for v in versions if (m := _GLIBC.fullmatch(v))]
    return ".".join(map(str, max(numbers))) if numbers else None


_GLIBC = re.compile(r"GLIBC_(\d+(?:\.\d+)+)")
