"""Judge a distribution on a torch side: which of its files load, and what is missing where one does not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from bringup.abi.facts import Distribution, Level, SharedFile, worst
from bringup.abi.names import (
    belongs_to_torch,
    demangle,
    is_bundled_copy,
    is_stable_interface,
    is_torch_library,
)
from bringup.abi.policies import BUILT_FOR, Policy, Variants, generic_variants, policy_of
from bringup.abi.suppliers import supplier
from bringup.abi.torch_side import Library, Load, TorchRelease, TorchSide

if TYPE_CHECKING:
    from bringup.abi.installed import InstalledEnvironment

FindingKind = Literal["broken-symbol", "broken-library", "broken-glibc", "layout-risk", "assumed", "other-python"]

# From this release on glibc refuses to load what asks for an executable stack (its NEWS, 2025-01).
_GLIBC_WITHOUT_EXECUTABLE_STACKS = (2, 41)
_MOST_SAID = 8


@dataclass(frozen=True)
class AbiFinding:
    """One thing about one file: what is wrong or assumed, who needs it, who has it, and what to do.

    ``symbol`` and ``library`` are None where the finding is not about one. ``provided_by`` names torch
    versions ("torch 2.9.1") and packages ("pip nvidia-cublas", "apt libnuma1"); empty when nobody known has it.
    """

    kind: FindingKind
    file: str
    reason: str
    remedy: str = ""
    symbol: str | None = None
    demangled: str | None = None
    library: str | None = None
    needed_by: str | None = None
    provided_by: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return the JSON object that reports carry."""
        return {
            "kind": self.kind,
            "file": self.file,
            "symbol": self.symbol,
            "demangled": self.demangled,
            "library": self.library,
            "needed_by": self.needed_by,
            "provided_by": list(self.provided_by),
            "reason": self.reason,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class FileVerdict:
    """What becomes of one file.

    ``level`` is what happens when it is loaded, ``effect`` what that means for the package: "optional" for a
    broken file that the package survives, None for one that is not used here (another variant of it is, or
    it is a bundled library that counts with the file that needs it).
    """

    path: str
    level: Level
    effect: Level | None
    findings: tuple[AbiFinding, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What becomes of a distribution on a torch side.

    ``fits_torch`` are the releases of the catalogue on which nothing is broken and which it may have been
    built for. ``built_for`` are the torch minors that it was built for: one when the requirement or the
    names tell it, several when they leave a choice, none when nothing is known. ``allowed_but_broken`` are
    releases that its declared requirement admits, or that it admits by declaring none, on which it breaks.
    """

    name: str
    version: str
    torch: str
    level: Level
    files: tuple[FileVerdict, ...]
    fits_torch: tuple[str, ...] = ()
    built_for: tuple[str, ...] = ()
    allowed_but_broken: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[AbiFinding, ...]:
        """Return the findings of all files, those of unused files last; what several assume is said once."""
        found: list[AbiFinding] = []
        assumed: set[tuple[str | None, str]] = set()
        for file in sorted(self.files, key=lambda file: file.effect is None):
            for finding in file.findings:
                if finding.kind == "assumed":
                    if (finding.library, finding.reason) in assumed:
                        continue
                    assumed.add((finding.library, finding.reason))
                found.append(finding)
        return tuple(found)

    @property
    def missing_symbols(self) -> frozenset[str]:
        """Return the distinct names that any file misses, used or not."""
        return frozenset(f.symbol for f in self.findings if f.kind == "broken-symbol" and f.symbol)

    @property
    def missing_libraries(self) -> frozenset[str]:
        """Return the distinct libraries that any file misses, used or not."""
        return frozenset(f.library for f in self.findings if f.kind == "broken-library" and f.library)

    @property
    def is_refused(self) -> bool:
        """Return whether it does not belong beside this torch: it breaks, or was built for another minor version."""
        is_foreign = bool(self.built_for) and _minor(self.torch) not in self.built_for
        return self.level.is_broken or (self.level is Level.LAYOUT_RISK and is_foreign)

    @property
    def summary(self) -> str:
        """Return each reason for the level once, and which torch would fit: a lock and a host say it alike."""
        used = {file.path for file in self.files if file.effect is not None and file.effect.rank <= self.level.rank}
        found = [f for f in self.findings if f.kind == self.level.value and f.file in used]
        reasons = sorted({f.reason + (f" ({f.symbol})" if f.symbol and f.demangled else "") for f in found})
        if len(reasons) > _MOST_SAID:
            reasons[_MOST_SAID - 1 :] = [f"{reasons[_MOST_SAID - 1]} and {len(reasons) - _MOST_SAID} more"]
        fits = f"it fits torch {', '.join(self.fits_torch)}" if self.fits_torch else "it fits no known torch"
        # Where something else than torch is missing, the torch that is there may be the right one.
        said = () if reasons and _public(self.torch) in self.fits_torch else (fits,)
        return "; ".join([*reasons, *said])

    def as_json(self) -> dict[str, object]:
        """Return the JSON object that reports carry."""
        return {
            "name": self.name,
            "version": self.version,
            "torch": self.torch,
            "verdict": self.level.value,
            "refused": self.is_refused,
            "fits_torch": list(self.fits_torch),
            "built_for": list(self.built_for),
            "allowed_but_broken": list(self.allowed_but_broken),
            "summary": self.summary,
            "files": [
                {"path": f.path, "level": f.level.value, "effect": f.effect.value if f.effect else None}
                for f in self.files
            ],
            "findings": [finding.as_json() for finding in self.findings],
        }


def judge(
    distribution: Distribution,
    torch: TorchSide,
    *,
    catalogue: Sequence[TorchRelease] = (),
    capability: str | None = None,
    built_for: str | None = None,
) -> Verdict:
    """Judge a distribution on a torch side.

    ``catalogue`` holds the known torch releases: it tells which ones have a missing name, which ones fit, and
    which one a distribution without a requirement was built for. ``capability`` is the GPU's compute
    capability ("9.0"), by which some packages pick a file; None when it is not known. ``built_for`` is the
    torch minor ("2.9") that a distribution is known to be built for; None leaves it to be found out.
    """
    known = _catalogue(tuple(catalogue))
    policy = policy_of(distribution.name)
    raw = _examine(distribution, torch, known)
    on_release = {
        release: _effects(distribution, policy, release, capability, _examine(distribution, release, known))
        for release in known.releases
    }
    # Without torch's C++ interface it does not matter which torch a file was built for.
    uses_layout = any(known.uses_layout(file) for file in distribution.files)
    minors: tuple[str, ...] = ()
    if uses_layout:
        minors = (built_for,) if built_for else _built_for(distribution, on_release)
    raw = [_with_layout(file, found, torch, minors, known) for file, found in _pairs(distribution, raw)]
    files = _effects(distribution, policy, torch, capability, raw)
    level = worst(file.effect for file in files if file.effect is not None)
    fits = tuple(
        _public(release.version)
        for release, verdicts in on_release.items()
        if not any(v.level.is_broken for v in verdicts if v.effect is not None)
        and (not uses_layout or _minor(release.version) in minors)
    )
    remedied = tuple(
        replace(f, findings=tuple(_remedied(x, distribution, torch, fits) for x in f.findings)) for f in files
    )
    return Verdict(
        name=distribution.name,
        version=distribution.version,
        torch=torch.version,
        level=level,
        files=remedied,
        fits_torch=fits,
        built_for=minors,
        allowed_but_broken=tuple(
            _public(release.version)
            for release, verdicts in on_release.items()
            if _is_broken(verdicts) and _admits(distribution.requires_torch, release.version)
        ),
    )


def judge_environment(
    environment: InstalledEnvironment,
    *,
    catalogue: Sequence[TorchRelease] = (),
    capability: str | None = None,
    built_for: Mapping[str, str] | None = None,
    optional: Iterable[str] = (),
) -> tuple[Verdict, ...]:
    """Judge every installed distribution whose shared objects use torch.

    ``built_for`` maps distributions to torch minors, ``optional`` names those that the stack accepts without
    their shared objects. torch itself is judged by whether its libraries are found.
    """
    accepted = {canonicalize_name(name) for name in optional}
    verdicts = []
    for distribution in environment.distributions:
        name = canonicalize_name(distribution.name)
        if name == "torch":
            verdicts.append(_judge_torch(distribution, environment))
        elif distribution.uses_torch:
            verdicts.append(
                judge(
                    replace(distribution, is_optional=name in accepted),
                    environment,
                    catalogue=catalogue,
                    capability=capability,
                    built_for=(built_for or {}).get(name),
                )
            )
    return tuple(verdicts)


def _judge_torch(distribution: Distribution, environment: InstalledEnvironment) -> Verdict:
    findings = tuple(
        _missing_library(f"torch/lib/{needed_by}", library, needed_by, _Catalogue(()))
        for library, needed_by in environment.broken_torch
    )
    findings += tuple(_unreadable(file) for file in distribution.files if file.problem is not None)
    level = Level.BROKEN_LIBRARY if findings else Level.OK
    files = (FileVerdict("torch/lib/libtorch_python.so", level, level, findings),)
    return Verdict(distribution.name, distribution.version, environment.version, level, files)


# ---------------------------------------------------------------------------------------------------------


class _Catalogue:
    """The known torch releases, asked by name."""

    def __init__(self, releases: Sequence[TorchRelease]) -> None:
        self.releases = tuple(releases)
        self._tables = [(r, tuple(r.exports.values())) for r in self.releases]
        self._exported: dict[object, bool] = {}
        self._owned: dict[str, bool] = {}

    def __contains__(self, name: object) -> bool:
        if name not in self._exported:
            self._exported[name] = any(name in names for _, tables in self._tables for names in tables)
        return self._exported[name]

    def owns(self, name: str) -> bool:
        """Return whether a name is torch's, by its namespace or because some release exports it."""
        if name not in self._owned:
            self._owned[name] = belongs_to_torch(name, self)
        return self._owned[name]

    def uses_layout(self, file: SharedFile) -> bool:
        """Return whether a file uses torch's C++ interface, whose objects may change their layout."""
        return any(self.owns(name) and not is_stable_interface(name) for name in file.undefined)

    def exporters(self, name: str) -> tuple[str, ...]:
        """Return the releases that export a name, as "torch 2.9.1"."""
        return tuple(f"torch {_public(r.version)}" for r, tables in self._tables if any(name in t for t in tables))

    def bringers(self, library: str) -> tuple[str, ...]:
        """Return the releases whose wheels bring a library."""
        return tuple(
            f"torch {_public(r.version)}" for r in self.releases if library in r.brings or library in r.exports
        )


@lru_cache(maxsize=4)
def _catalogue(releases: tuple[TorchRelease, ...]) -> _Catalogue:
    """Return a catalogue, kept because its answers serve many wheels."""
    return _Catalogue(releases)


def _pairs(distribution: Distribution, verdicts: Sequence[FileVerdict]) -> Iterator[tuple[SharedFile, FileVerdict]]:
    return zip(distribution.files, verdicts, strict=True)


def _examine(distribution: Distribution, torch: TorchSide, known: _Catalogue) -> list[FileVerdict]:
    """Return what happens to each file, layout left aside."""
    verdicts = []
    for file in distribution.files:
        findings = tuple(_findings(file, distribution, torch, known))
        broken = [Level(f.kind) for f in findings if f.kind in _BROKEN_KINDS]
        verdicts.append(FileVerdict(file.path, worst(broken), None, findings))
    return verdicts


_BROKEN_KINDS = frozenset(level.value for level in Level if level.is_broken)


def _findings(
    file: SharedFile, distribution: Distribution, torch: TorchSide, known: _Catalogue
) -> Iterator[AbiFinding]:
    if file.problem is not None:
        yield _unreadable(file)
        return
    load = torch.load(file, distribution)
    for library, needed_by in load.missing:
        if file.is_exact or supplier(library) or is_bundled_copy(library):
            yield _missing_library(file.path, library, needed_by, known)
        else:
            yield _assumed(file, library, "was read from the front of the file only and is not settled")
    for library in load.assumed:
        yield _assumed(file, library, "has to be on the host, which was not looked at")
    for path in load.loaded_before:
        yield _assumed(file, path, "is on no search path, so the package has to load it first")
    yield from _version_findings(file, load, distribution, torch)
    yield from _symbol_findings(file, load, known)
    if (tag := _PYTHON_TAG.search(file.name)) and torch.python and f"{tag[1]}.{tag[2]}" != torch.python:
        yield AbiFinding(
            "other-python",
            file.path,
            f"the name is tagged for Python {tag[1]}.{tag[2]}: it cannot be imported by Python {torch.python}, "
            "only loaded as a library",
        )


_PYTHON_TAG = re.compile(r"\.cpython-(\d)(\d+)[-.]")


def _unreadable(file: SharedFile) -> AbiFinding:
    return AbiFinding(
        "broken-library",
        file.path,
        f"the file cannot be read as a shared object: {file.problem}",
        "reinstall the distribution, or install a build for this machine",
    )


def _missing_library(path: str, library: str, needed_by: str, known: _Catalogue) -> AbiFinding:
    row = supplier(library)
    provided_by = known.bringers(library)
    if row and row.pip:
        provided_by += (f"pip {row.pip}",)
    if row and row.apt:
        provided_by += (f"apt {row.apt}",)
    if row and row.apt:
        remedy = f"install {row.apt} on the host"
    elif is_bundled_copy(library):
        remedy = "reinstall the distribution: this library belongs to it"
    elif row and row.is_cuda and known.bringers(library):
        remedy = f"use a torch of that CUDA version ({', '.join(known.bringers(library))}) or a build for this one's"
    elif row and row.pip:
        remedy = f"install {row.pip} and put its directory on the loader's path"
    else:
        remedy = f"install what holds {library}"
    return AbiFinding(
        "broken-library",
        path,
        f"{library} is not found; {needed_by} needs it",
        remedy,
        library=library,
        needed_by=needed_by,
        provided_by=provided_by,
    )


def _assumed(file: SharedFile, library: str, why: str) -> AbiFinding:
    row = supplier(library)
    provided_by = (f"apt {row.apt}",) if row and row.apt else ()
    return AbiFinding(
        "assumed", file.path, f"{library} {why}", library=library, needed_by=file.name, provided_by=provided_by
    )


def _version_findings(
    file: SharedFile, load: Load, distribution: Distribution, torch: TorchSide
) -> Iterator[AbiFinding]:
    """Yield the symbol versions that a library in scope does not define; the loader checks them first."""
    libraries = {library.name: library for library in load.scope}
    for name, versions in sorted(file.version_needs.items()):
        library = libraries.get(name)
        # A library that defines no versions at all is accepted by the loader with a warning.
        if library is None or not library.versions:
            continue
        for version in sorted(set(versions) - library.versions):
            is_runtime = version.startswith(("GLIBC", "CXXABI_", "GCC_"))
            yield AbiFinding(
                "broken-glibc" if is_runtime else "broken-library",
                file.path,
                f"{name} on the host does not define {version}",
                f"use a release of the distribution with a newer {name}, or a wheel built for an older one",
                library=name,
                symbol=version,
                needed_by=file.name,
            )
    needed, promised = distribution.needed_glibc, distribution.promised_glibc
    if torch.glibc is None and needed and promised and _numbers(needed) > _numbers(promised):
        own = file.version_needs.get("libc.so.6", ())
        if f"GLIBC_{needed}" in own:
            yield AbiFinding(
                "assumed",
                file.path,
                f"needs glibc {needed}, although the wheel's tag promises to run on {promised}",
                library="libc.so.6",
                needed_by=file.name,
            )
    if file.has_executable_stack and torch.glibc and _numbers(torch.glibc) >= _GLIBC_WITHOUT_EXECUTABLE_STACKS:
        yield AbiFinding(
            "broken-glibc",
            file.path,
            f"asks for an executable stack, which glibc {torch.glibc} refuses",
            "use a build without one (patchelf --clear-execstack)",
            library="libc.so.6",
            needed_by=file.name,
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _symbol_findings(file: SharedFile, load: Load, known: _Catalogue) -> Iterator[AbiFinding]:
    """Yield the names that nothing in scope has, for the file and for each library that it brings along."""
    if any(is_torch_library(library) for library, _ in load.missing):
        # Every name of that library would be listed; the library says it all.
        return
    tables = [library.exports for library in load.scope if library.exports is not None]
    # A library that nobody read, or that is missing, may hold any name but torch's.
    is_open = bool(load.missing) or any(library.exports is None for library in load.scope)
    for part in [file, *(x.file for x in load.scope if x.file is not None and x.file.path != file.path)]:
        versioned = (
            name
            for library, names in part.versioned.items()
            if not _lacks_versions(part, library, load.scope)
            for name in names
        )
        unresolved = {*part.undefined, *versioned}.difference(*tables)
        for name in sorted(unresolved):
            if is_open and not known.owns(name):
                continue
            yield AbiFinding(
                "broken-symbol",
                file.path,
                f"undefined symbol: {demangle(name) or name}",
                symbol=name,
                demangled=demangle(name),
                needed_by=part.name,
                provided_by=known.exporters(name),
            )


def _lacks_versions(file: SharedFile, name: str, scope: Iterable[Library]) -> bool:
    found = next((library for library in scope if library.name == name), None)
    return bool(found and found.versions and set(file.version_needs.get(name, ())) - found.versions)


# ---------------------------------------------------------------------------------------------------------
# Layout.


def _with_layout(
    file: SharedFile,
    verdict: FileVerdict,
    torch: TorchSide,
    minors: tuple[str, ...],
    known: _Catalogue,
) -> FileVerdict:
    if verdict.level.is_broken or file.problem is not None:
        return verdict
    if not known.uses_layout(file):
        is_stable = any(is_stable_interface(name) for name in file.undefined)
        return replace(verdict, level=Level.OK_STABLE if is_stable else Level.OK)
    minor = _minor(torch.version)
    if minors == (minor,):
        return verdict
    if not minors:
        reason = "uses torch's C++ interface, and nothing tells which torch it was built for"
    elif minor in minors:
        reason = f"uses torch's C++ interface, and was built for one of torch {', '.join(minors)}; nothing tells which"
    else:
        reason = f"uses torch's C++ interface and was built for torch {' or '.join(minors)}, not {minor}"
    finding = AbiFinding(
        "layout-risk",
        file.path,
        f"{reason}: every name resolves, but objects may be laid out otherwise",
        provided_by=tuple(f"torch {m}" for m in minors),
    )
    return replace(verdict, level=Level.LAYOUT_RISK, findings=(*verdict.findings, finding))


def _built_for(distribution: Distribution, on_release: Mapping[TorchRelease, Sequence[FileVerdict]]) -> tuple[str, ...]:
    """Return the torch minors that a distribution may have been built for, oldest first.

    Its own requirement tells when it is exact; else the releases on which all names resolve do. The
    functions that a file exports itself tell nothing: their votes fall on one release for everything.
    """
    name = canonicalize_name(distribution.name)
    if entry := BUILT_FOR.get((name, _minor(distribution.version))):
        return (entry,)
    if pin := _pinned_minor(distribution.requires_torch):
        return (pin,)
    fits = [
        _minor(release.version)
        for release, verdicts in on_release.items()
        if not any(v.level.is_broken for v in verdicts if v.effect is not None)
        and _admits(distribution.requires_torch, release.version)
    ]
    return tuple(sorted(set(fits), key=_numbers))


def _pinned_minor(specifier: str | None) -> str | None:
    try:
        parts = list(SpecifierSet(specifier or ""))
    except InvalidSpecifier:
        return None
    for part in parts:
        numbers = part.version.removesuffix(".*").split("+")[0].split(".")
        if part.operator in ("==", "===") and len(numbers) >= 2:
            return ".".join(numbers[:2])
        if part.operator == "~=" and len(numbers) >= 3:
            return ".".join(numbers[:2])
    return None


def _admits(specifier: str | None, version: str) -> bool:
    try:
        return SpecifierSet(specifier or "").contains(_public(version), prereleases=True)
    except InvalidSpecifier:
        return True


def _public(version: str) -> str:
    return version.split("+")[0]


def _minor(version: str) -> str:
    try:
        return ".".join(map(str, Version(_public(version)).release[:2]))
    except InvalidVersion:
        return version


# ---------------------------------------------------------------------------------------------------------
# What that means for the package.


def _effects(
    distribution: Distribution,
    policy: Policy,
    torch: TorchSide,
    capability: str | None,
    verdicts: Sequence[FileVerdict],
) -> list[FileVerdict]:
    """Return the verdicts with their effect on the package, None for a file that is not used here."""
    unused = {v.path for v in verdicts if ".libs/" in v.path}
    for variants in (*policy.variants, *generic_variants(policy)):
        unused |= _unused(variants, torch, capability, [v for v in verdicts if v.path not in unused])
    effects = []
    for verdict in verdicts:
        effect: Level | None = verdict.level
        if verdict.path in unused:
            effect = None
        elif verdict.level.is_broken and (distribution.is_optional or policy.survives_without(verdict.path)):
            effect = Level.OPTIONAL
        effects.append(replace(verdict, effect=effect))
    return effects


def _unused(variants: Variants, torch: TorchSide, capability: str | None, verdicts: Sequence[FileVerdict]) -> set[str]:
    """Return the files of the variants that the package leaves alone."""
    sets: dict[str, list[FileVerdict]] = {}
    for verdict in verdicts:
        if match := re.search(variants.pattern, verdict.path):
            sets.setdefault(match["variant"] or "", []).append(verdict)
    if len(sets) < 2:
        return set()
    chosen = variants.choose(sets, torch.cuda, capability)
    if chosen is None:
        # Nothing tells the choice: the package is usable when one set is.
        chosen = max(sets, key=lambda key: worst(v.level for v in sets[key]).rank)
    return {v.path for key, members in sets.items() if key != chosen for v in members}


def _is_broken(verdicts: Iterable[FileVerdict]) -> bool:
    return any(v.effect is not None and v.effect.is_broken for v in verdicts)


def _remedied(finding: AbiFinding, distribution: Distribution, torch: TorchSide, fits: tuple[str, ...]) -> AbiFinding:
    if finding.remedy or finding.kind in ("assumed", "other-python"):
        return finding
    what = f"{distribution.name} {distribution.version}"
    if fits:
        remedy = (
            f"use torch {' or '.join(fits)} with {what}, or a build of {distribution.name} for torch {torch.version}"
        )
    else:
        remedy = f"use a build of {distribution.name} for torch {torch.version}"
    return replace(finding, remedy=remedy)
