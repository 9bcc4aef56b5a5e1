"""Compare Debian versions, and read the package paragraphs and relations of an apt index.

Rules as in Debian Policy, sections 5.6.12 (versions) and 7.1 (relations). Written here because the controller
need not be a Debian machine, and because a lock must not depend on what apt is installed on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import total_ordering

from bringup.errors import InputError

_FIELD = re.compile(r"([!-9;-~]+):[ \t]*(.*)")
_RELATION = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9+.-]*)(?::[a-z0-9-]+)?"
    r"(?:\s*\(\s*(?P<operator><<|<=|=|>=|>>)\s*(?P<version>[^)\s]+)\s*\))?"
    r"(?:\s*\[(?P<architectures>[^\]]*)\])?(?:\s*<[^>]*>)*\s*"
)


@total_ordering
@dataclass(frozen=True, eq=False)
class DebianVersion:
    """One package version, ordered as dpkg orders them."""

    text: str

    @property
    def epoch(self) -> int:
        """Return the epoch, 0 when none is written."""
        head, colon, _ = self.text.partition(":")
        return int(head) if colon and head.isdigit() else 0

    @property
    def upstream(self) -> str:
        """Return the upstream version: no epoch, no revision."""
        return self._rest.rpartition("-")[0] or self._rest

    @property
    def revision(self) -> str:
        """Return the Debian revision, ``0`` when none is written (they compare equal)."""
        _, dash, revision = self._rest.rpartition("-")
        return revision if dash else "0"

    @property
    def _rest(self) -> str:
        return self.text.split(":", 1)[-1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DebianVersion) and self._key() == other._key()

    def __lt__(self, other: DebianVersion) -> bool:
        return self._key() < other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return self.text

    def _key(self) -> tuple[object, ...]:
        return (self.epoch, _sortable(self.upstream), _sortable(self.revision))


def _sortable(part: str) -> tuple[object, ...]:
    """Return ``part`` as alternating non-digit and digit pieces that compare as dpkg compares them.

    Within non-digits a tilde sorts before the end, the end before letters, letters before anything else.
    """
    pieces: list[object] = []
    for text, number in re.findall(r"([^0-9]*)([0-9]*)", part):
        if not text and not number:
            break
        pieces.append((*(_weight(letter) for letter in text), 0))
        pieces.append(int(number or 0))
    # What follows the end of a version is an empty text: heavier than a tilde, lighter than anything else.
    return (*pieces, (0,))


def _weight(letter: str) -> int:
    if letter == "~":
        return -1
    return ord(letter) if letter.isalpha() else ord(letter) + 256


@dataclass(frozen=True)
class Relation:
    """One alternative of a dependency: a name and, where both are given, a version condition."""

    name: str
    operator: str | None = None
    version: str | None = None

    def accepts(self, version: str) -> bool:
        """Return whether ``version`` meets the condition."""
        if self.operator is None or self.version is None:
            return True
        have, want = DebianVersion(version), DebianVersion(self.version)
        match self.operator:
            case "<<":
                return have < want
            case "<=":
                return have <= want
            case "=":
                return have == want
            case ">=":
                return have >= want
            case _:
                return have > want

    def __str__(self) -> str:
        return f"{self.name} ({self.operator} {self.version})" if self.operator else self.name


def parse_relations(text: str, architecture: str) -> tuple[tuple[Relation, ...], ...]:
    """Return the groups of a relation field; within a group any alternative will do.

    Alternatives for other architectures are left out. Raises InputError for text that is no relation.
    """
    groups = []
    for group in text.split(","):
        if not group.strip():
            continue
        alternatives = []
        for alternative in group.split("|"):
            found = _RELATION.fullmatch(alternative.strip())
            if not found:
                raise InputError(f"not a package relation: {alternative.strip()!r}")
            if _applies(found["architectures"], architecture):
                alternatives.append(Relation(found["name"], found["operator"], found["version"]))
        if alternatives:
            groups.append(tuple(alternatives))
    return tuple(groups)


def _applies(architectures: str | None, architecture: str) -> bool:
    if not architectures:
        return True
    names = architectures.split()
    if names[0].startswith("!"):
        return f"!{architecture}" not in names
    return architecture in names or "any" in names


@dataclass(frozen=True)
class Package:
    """One package as an index lists it. ``depends`` holds Pre-Depends too, ``conflicts`` Breaks too."""

    name: str
    version: str
    architecture: str
    file: str
    size_bytes: int
    sha256: str
    depends: tuple[tuple[Relation, ...], ...] = ()
    conflicts: tuple[tuple[Relation, ...], ...] = ()
    provides: Mapping[str, str | None] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def satisfies(self, relation: Relation) -> bool:
        """Return whether this package meets ``relation`` by its own name or by what it provides.

        A provided name without a version meets only an unversioned relation.
        """
        if self.name == relation.name:
            return relation.accepts(self.version)
        if relation.name not in self.provides:
            return False
        version = self.provides[relation.name]
        return relation.operator is None or (version is not None and relation.accepts(version))


def paragraphs(text: str) -> Iterator[dict[str, str]]:
    """Yield the paragraphs of a control file; continuation lines are joined by newlines."""
    fields: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        if not line.strip():
            if fields:
                yield fields
            fields, last = {}, ""
        elif line[0] in " \t" and last:
            fields[last] += "\n" + line.strip()
        elif found := _FIELD.fullmatch(line):
            last = found[1]
            fields[last] = found[2].strip()
    if fields:
        yield fields


def parse_packages(text: str, architecture: str, *, source: str) -> tuple[Package, ...]:
    """Return the packages of a ``Packages`` index that suit ``architecture`` (``amd64``) or all of them.

    Raises InputError naming ``source`` and the package whose paragraph lacks what a lock needs.
    """
    found = []
    for entry in paragraphs(text):
        if entry.get("Architecture") not in (architecture, "all"):
            continue
        name = entry.get("Package", "")
        missing = [key for key in ("Package", "Version", "Filename", "SHA256", "Size") if not entry.get(key)]
        if missing or not entry["Size"].isdigit():
            lacks = " or ".join(missing) or "number as Size"
            raise InputError(f"{source}: the paragraph of {name or 'a package'} has no {lacks}")
        found.append(
            Package(
                name=name,
                version=entry["Version"],
                architecture=entry["Architecture"],
                file=entry["Filename"].removeprefix("./"),
                size_bytes=int(entry["Size"]),
                sha256=entry["SHA256"].lower(),
                depends=_groups(entry, ("Pre-Depends", "Depends"), architecture),
                conflicts=_groups(entry, ("Conflicts", "Breaks"), architecture),
                provides={
                    relation.name: relation.version
                    for group in _groups(entry, ("Provides",), architecture)
                    for relation in group
                },
            )
        )
    return tuple(found)


def _groups(entry: Mapping[str, str], keys: tuple[str, ...], architecture: str) -> tuple[tuple[Relation, ...], ...]:
    return tuple(group for key in keys for group in parse_relations(entry.get(key, ""), architecture))
