"""Judge what the builder on a host saw while it made an environment: the guard after each step.

``files/host_env.py`` reports, and these rules decide; a finding with severity error refuses the environment
before anything serves from it. Every finding of a step says which wheel, which rule, wanted and found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from bringup.finding import Finding
from bringup.stack import LockedStep, Step

Report = Mapping[str, Any]
"""One entry of the builder's log."""

_CUDA_LABEL = re.compile(r"cu\d{2,3}")
_SHOWN = 4

_MISMATCH = re.compile(
    r"Hash mismatch for `(?P<wheel>[^`]+)`\s+Expected:\s+(?P<wanted>\S+)\s+Computed:\s+(?P<found>\S+)"
)
_LOGIN = re.compile(r"\((?P<status>401|403) [^)]*\)|lack of valid authentication", re.I)
_ABSENT = re.compile(
    r"there is no version of (?P<version>\S+)|Because (?P<name>\S+) was not found in the package registry"
    r"|no wheels? with a matching|Failed to download `(?P<gone>[^`]+)`(?s:.*)\(404 Not Found\)"
)
_SILENT = re.compile(r"error sending request|server error|timed? ?out|connection|status code|dns error|reset", re.I)
_CAUSE = re.compile(r"^(?:error|  cause): (.+)$", re.M)


def _refusal(code: str, cause: str, remedy: str, **evidence: object) -> Finding:
    return Finding(code=code, severity="error", cause=cause, remedy=remedy, evidence=evidence)


def created(entry: Report, python: str) -> Iterator[Finding]:
    """Judge the empty environment: an interpreter of the wanted minor, and uv did not fail."""
    if entry["interpreter"] is None:
        yield _refusal(
            "BU-ENV-101",
            f"the host has no Python {python} of its own",
            f"install python{python}, or change python.interpreter in the stack",
            wanted=python,
            found=None,
        )
    elif entry["status"] != 0:
        yield _refusal(
            "BU-ENV-102",
            f"uv could not make an environment with {entry['interpreter']['path']}",
            "read what uv says; nothing was changed",
            found=_tail(entry["output"]),
        )


def locked_twice(steps: Iterable[LockedStep]) -> Iterator[Finding]:
    """Judge the lock before anything is built: no step names a distribution that an earlier step installs."""
    first: dict[str, tuple[str, str]] = {}
    for step in steps:
        for file in step.files:
            name = canonicalize_name(file.distribution)
            earlier = first.setdefault(name, (step.name, file.version))
            if earlier[0] != step.name:
                yield _refusal(
                    "BU-ENV-117",
                    f"step {step.name} drags in {name} {file.version}, which step {earlier[0]} installs",
                    "lock the stack anew: each distribution belongs to one step",
                    step=step.name,
                    wheel=name,
                    rule="earlier steps unchanged",
                    wanted=earlier[1],
                    found=file.version,
                )


def installed(entry: Report, step: LockedStep) -> Iterator[Finding]:
    """Judge one step: uv succeeded, earlier distributions are what they were, the locked set was added."""
    failed = next((call for call in entry["calls"] if call["status"] != 0), None)
    if failed is not None:
        yield uv_failed(failed, step.name)
    if entry["foreign"]:
        yield _refusal(
            "BU-ENV-111",
            f"somebody else changed {_listed(entry['foreign'])} while the environment was being built",
            "find out who writes below /opt/bringup/envs, then run again",
            step=step.name,
        )
    yield from _unchanged(entry, step.name)
    if failed is None:
        yield from _exactly_locked(entry, step)
    for name, files in sorted(entry["unlike"].items()):
        yield _refusal(
            "BU-ENV-114",
            f"{name} was fetched anew, and still its files are not those of its RECORD",
            "look at the disk and the file system of /opt/bringup",
            step=step.name,
            wheel=name,
            rule="every byte as recorded",
            wanted={file["path"]: file["wanted"] for file in files[:_SHOWN]},
            found={file["path"]: file["found"] for file in files[:_SHOWN]},
        )
    if entry["tainted"]:
        yield Finding(
            code="BU-ENV-115",
            severity="warning",
            cause=f"files of {_listed(entry['healed'])} had been edited in place and were fetched anew",
            remedy="nobody should write into an environment; the tainted ones are no rollback targets any more",
            evidence={"step": step.name, "tainted": entry["tainted"]},
        )
    if entry.get("misrecorded"):
        yield Finding(
            code="BU-ENV-116",
            severity="info",
            cause=f"wheels whose own RECORD is wrong: {_listed(sorted(entry['misrecorded']))}",
            remedy="none is needed: the wheels' hashes are the locked ones, and RECORD was put right",
            evidence={"step": step.name, "files": dict(entry["misrecorded"])},
        )


def uv_failed(call: Report, step: str) -> Finding:
    """Return the finding for a uv call that failed, with the cause that its output names."""
    output, index = call["output"], call["index"]
    where = f"step {step}, index {index}"
    if found := _MISMATCH.search(output):
        return _refusal(
            "BU-ENV-103",
            f"{where}: {found['wheel']} is not the file that was locked",
            f"somebody replaced the file on that index: look at it, then lock again (step {step})",
            step=step,
            wheel=found["wheel"],
            rule="sha256 as locked",
            wanted=found["wanted"],
            found=found["found"],
        )
    if _LOGIN.search(output):
        return _refusal(
            "BU-ENV-106",
            f"{where}: the index wants other credentials",
            "give python.index.credentials in the stack as env:NAME or file:PATH of the controller",
            step=step,
            found=_tail(output),
        )
    if found := _ABSENT.search(output):
        wheel = found["version"] or found["name"] or found["gone"] or _causes(output)
        return _refusal(
            "BU-ENV-104",
            f"{where}: the index does not hold {wheel} as it was locked",
            "see that the index, or the site mirror in bringup_indexes, has that very file",
            step=step,
            wheel=wheel,
            rule="the locked file",
            found=_tail(output),
        )
    if _SILENT.search(output):
        return _refusal(
            "BU-ENV-105",
            f"{where}: the index did not answer as it should: {_causes(output)}",
            "look at the index and the way to it, then run again: what is downloaded is kept",
            step=step,
            found=_tail(output),
        )
    return _refusal(
        "BU-ENV-107",
        f"{where}: uv failed with status {call['status']}: {_causes(output)}",
        "read what uv says; nothing that serves was changed",
        step=step,
        found=_tail(output),
    )


def _unchanged(entry: Report, step: str) -> Iterator[Finding]:
    for name, change in sorted(entry["changed"].items()):
        is_other = change["was"] != change["is"]
        found = change["is"] if is_other else {file["path"]: file["found"] for file in change["files"][:_SHOWN]}
        wish = change["was"] if is_other else {file["path"]: file["wanted"] for file in change["files"][:_SHOWN]}
        what = f"{change['was']} became {change['is']}" if is_other else f"files of {change['was']} were overwritten"
        yield _refusal(
            "BU-ENV-112",
            f"step {step} changed {name}, which an earlier step had installed: {what}",
            f"lock the step anew so that it leaves {name} alone",
            step=step,
            wheel=name,
            rule="earlier steps unchanged",
            wanted=wish,
            found=found,
        )
    for name in entry["removed"]:
        yield _refusal(
            "BU-ENV-112",
            f"step {step} removed {name}, which an earlier step had installed",
            f"lock the step anew so that it leaves {name} alone",
            step=step,
            wheel=name,
            rule="earlier steps unchanged",
            wanted="installed",
            found=None,
        )


def _exactly_locked(entry: Report, step: LockedStep) -> Iterator[Finding]:
    locked = {canonicalize_name(file.distribution): file.version for file in step.files}
    for name in sorted({*locked, *entry["added"]}):
        want, found = locked.get(name), entry["added"].get(name)
        if not _is_same(want, found):
            yield _refusal(
                "BU-ENV-113",
                f"step {step.name} did not add exactly its locked files: {name} {found or 'is missing'}",
                "lock the step anew",
                step=step.name,
                wheel=name,
                rule="exactly the locked files",
                wanted=want,
                found=found,
            )


def _is_same(want: str | None, found: str | None) -> bool:
    """Return whether two versions are equal, local label included, however they are spelled."""
    if want is None or found is None:
        return want == found
    try:
        return Version(want) == Version(found)
    except InvalidVersion:
        return want == found


def families(step: Step, versions: Mapping[str, str], cuda_label: str) -> Iterator[Finding]:
    """Judge a family: public versions equal, and every CUDA label present is the stack's. None is allowed.

    Versions are parsed: ``0.6.4+cu130`` and ``0.6.40`` share a prefix and nothing else.
    """
    present = {name: Version(versions[name]) for name in step.family if name in versions}
    public = {name: version.public for name, version in present.items()}
    if len(set(public.values())) > 1:
        # The first named is the one that the others go with.
        leader = next(iter(public.values()))
        name = next(name for name, version in public.items() if version != leader)
        yield _refusal(
            "BU-ENV-121",
            f"step {step.name}: {name} {present[name]} does not go with {next(iter(public))} {leader}",
            "lock one version for the whole family",
            step=step.name,
            wheel=name,
            rule="one public version in the family",
            wanted=leader,
            found=public[name],
        )
    for name, version in present.items():
        for label in cuda_labels(version):
            if label != cuda_label:
                yield _refusal(
                    "BU-ENV-122",
                    f"step {step.name}: {name} {version} is built for another CUDA toolkit",
                    f"lock the {cuda_label} build",
                    step=step.name,
                    wheel=name,
                    rule="the stack's CUDA label",
                    wanted=cuda_label,
                    found=label,
                )


def cuda_labels(version: Version) -> Sequence[str]:
    """Return the CUDA labels in a version's local part: ``cu130`` of ``2.9.1+cu130``, also of ``1+cu130.pt29``."""
    parts = re.split(r"[._-]|(?<=\d)(?=[a-z])", version.local or "")
    return [part for part in parts if _CUDA_LABEL.fullmatch(part)]


def labels(versions: Mapping[str, str], cuda_label: str) -> Iterator[Finding]:
    """Judge every distribution of a step: a CUDA label in its version must be the stack's."""
    for name, text in sorted(versions.items()):
        try:
            found = [label for label in cuda_labels(Version(text)) if label != cuda_label]
        except InvalidVersion:
            found = []
        if found:
            yield _refusal(
                "BU-ENV-122",
                f"{name} {text} is built for another CUDA toolkit",
                f"lock the {cuda_label} build",
                wheel=name,
                rule="the stack's CUDA label",
                wanted=cuda_label,
                found=found[0],
            )


def built_for(version: str, cuda: str | None, wanted_cuda: str, step: str) -> Iterator[Finding]:
    """Judge torch itself: a version without a label says nothing, so what its build says of itself counts."""
    if cuda != wanted_cuda:
        yield _refusal(
            "BU-ENV-127",
            f"step {step}: torch {version} is built for {'CUDA ' + cuda if cuda else 'the CPU alone'}",
            f"lock the build for CUDA {wanted_cuda}; on an index of its own it cannot be taken for another",
            step=step,
            wheel=f"torch {version}",
            rule="the stack's CUDA",
            wanted=wanted_cuda,
            found=cuda,
        )


def loadable(verdicts: Iterable[Report], step: str) -> Iterator[Finding]:
    """Judge what the ELF check says of each distribution, as ``bringup.abi.Verdict.as_json`` writes it."""
    for verdict in verdicts:
        level, wheel = verdict["verdict"], f"{verdict['name']} {verdict['version']}"
        if level in ("ok", "ok-stable"):
            continue
        # The first finding that is about this level names the cause; files that are not used come last.
        about = [found for found in verdict["findings"] if found["kind"] != "assumed"]
        first = next((found for found in about if found["kind"] == level), about[0] if about else None)
        what = _abi_cause(first) if first else level
        fits = ", ".join(verdict["fits_torch"]) or None
        evidence = {
            "step": step,
            "wheel": wheel,
            "rule": level,
            "wanted": f"a build for torch {verdict['torch']}",
            "found": first["symbol"] or first["library"] or first["reason"] if first else level,
            "fits_torch": fits,
            "findings": about[:_SHOWN],
        }
        is_unsure = level == "layout-risk" and not verdict["refused"]
        if level == "optional" or is_unsure:
            yield Finding(
                code="BU-ENV-126" if is_unsure else "BU-ENV-125",
                severity="info" if is_unsure else "warning",
                cause=f"step {step}: {what}, of {wheel} beside torch {verdict['torch']}"
                if is_unsure
                else f"step {step}: a part of {wheel} does not load beside torch {verdict['torch']}: {what}",
                remedy="ask its authors which torch it is built for; every symbol was found, and it is imported here"
                if is_unsure
                else "none is needed for what works without it; the stack or the package says that it survives",
                evidence=evidence,
            )
            continue
        yield _refusal(
            "BU-ENV-124" if level == "layout-risk" else "BU-ENV-123",
            f"step {step}: {wheel} does not go with torch {verdict['torch']}: {level}: {verdict['summary']}",
            (first["remedy"] if first else "") or "lock the build for this torch",
            **evidence,
        )


def _abi_cause(found: Report) -> str:
    name = found["demangled"] or found["symbol"] or found["library"]
    return f"{found['file']}: {found['reason']}" + (f" ({name})" if name and name not in found["reason"] else "")


def imported(entry: Report) -> Iterator[Finding]:
    """Judge the imports of a step, and that they changed nothing."""
    for module, seen in sorted(entry["modules"].items()):
        if seen["status"] == 0:
            continue
        how = "is killed" if seen["status"] > 128 else "takes too long" if seen["status"] == 124 else "fails"
        yield _refusal(
            "BU-ENV-131",
            f"step {entry['step']}: import {module} {how} in a fresh process: {_last_line(seen['output'])}",
            "the text names what is missing; nothing that serves was changed",
            step=entry["step"],
            wheel=module,
            rule="imports under an empty environment",
            wanted="status 0",
            found=f"status {seen['status']}",
            output=_tail(seen["output"]),
        )
    for name in sorted(entry["changed"]):
        yield _refusal(
            "BU-ENV-132",
            f"importing the modules of step {entry['step']} changed files of {name}",
            "a package that writes into itself cannot be kept as it was proved; tell its authors",
            step=entry["step"],
            wheel=name,
            rule="imports change nothing",
        )


def patched(entry: Report) -> Iterator[Finding]:
    """Judge the patches: each fits its version and file, before and after."""
    for one in entry["patches"]:
        if one["problem"] is not None:
            last = one["files"][-1] if one["files"] else {"wanted": one["version"], "found": None}
            yield _refusal(
                "BU-ENV-141",
                f"the patch of {one['distribution']} {one['version']} does not fit: {one['problem']}",
                "make the patch anew for that version, with its hashes",
                wheel=one["distribution"],
                rule="patched file as recorded",
                wanted=last["wanted"],
                found=last["found"],
            )


def _causes(output: str) -> str:
    """Return what uv gives as error and causes, in a line."""
    causes = [found.strip() for found in _CAUSE.findall(output)]
    return ": ".join(causes[-2:]) if causes else _last_line(output)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it said nothing"


def _tail(text: str) -> str:
    return text[-1200:].strip()


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
