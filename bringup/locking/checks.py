"""Judge a resolution before any host sees it: families, CUDA builds, doubled packages, colliding files.

Each finding keeps the set off the lock. The rules read versions and the wheels' own lists of files; what they
need of a wheel's content comes in as data, so that nothing here touches the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from bringup.finding import Finding
from bringup.stack import LockedFile, LockedPlatform, Stack

FAMILY = "BU-ENV-301"
CUDA_LABEL = "BU-ENV-302"
TORCH_BUILD = "BU-ENV-303"
DOUBLED = "BU-ENV-304"
COLLISION = "BU-ENV-305"
GUARD = "BU-ENV-306"

# cu130, or with what else it was built for: cu12torch2 (of 2.8.3+cu12torch2.8cxx11abiTRUE).
_CUDA_LABEL = re.compile(r"(cu\d{2,3})(?:torch\d+)?")
_MOST_NAMED = 5
# Empty files are the one thing that many wheels may share without harm (`nvidia/__init__.py`).
_EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@dataclass(frozen=True)
class Contents:
    """What one wheel would lay down: SHA-256 (hexadecimal, or None) by path; of torch, its CUDA build too.

    Paths are those of the wheel's RECORD. ``torch_cuda`` is a toolkit such as ``13.0``; None when the wheel is not
    torch, or is a build without CUDA.
    """

    files: Mapping[str, str | None]
    torch_cuda: str | None = None


def cuda_labels(version: str) -> tuple[str, ...]:
    """Return the CUDA labels in the local part of ``version``: ``2.9.1+cu130`` has ``cu130``, ``2.9.1`` none.

    A label of two digits names a CUDA major only: ``cu13`` is any CUDA 13.
    """
    try:
        local = Version(version).local
    except InvalidVersion:
        return ()
    found = (_CUDA_LABEL.fullmatch(part) for part in (local or "").split("."))
    return tuple(label[1] for label in found if label)


def check_versions(stack: Stack, platform: LockedPlatform) -> tuple[Finding, ...]:
    """Return what is wrong with the versions of a resolution: families, CUDA labels, torch's CUDA build."""
    files = [file for step in platform.steps for file in step.files]
    return (*_families(stack, files), *_labels(stack, files), *_torch_by_runtime(stack, files))


def check_contents(stack: Stack, contents: Mapping[str, Contents]) -> tuple[Finding, ...]:
    """Return what is wrong with what the wheels lay down; ``contents`` is keyed by distribution."""
    return (*_torch_by_itself(stack, contents), *_overlaps(contents))


def check_verdicts(stack: Stack, verdicts: Mapping[str, str], broken: Iterable[str]) -> tuple[Finding, ...]:
    """Return one finding for each wheel (by file name) that the guard calls broken."""
    return tuple(
        Finding(
            code=GUARD,
            severity="error",
            cause=f"{file} would not load beside the locked torch: {verdicts[file]}",
            remedy=f"choose a version built for it; `bringup abi check` on {file} names every symbol",
            evidence={"stack": stack.name, "file": file, "found": verdicts[file]},
        )
        for file in sorted(broken)
    )


def _families(stack: Stack, files: Iterable[LockedFile]) -> Iterable[Finding]:
    versions = {file.distribution: file.version for file in files}
    for step in stack.python.steps:
        members = {
            name: versions[name] for name in (canonicalize_name(each) for each in step.family) if name in versions
        }
        public = {Version(version).public for version in members.values()}
        if len(public) > 1:
            first = next(iter(members))
            yield Finding(
                code=FAMILY,
                severity="error",
                cause=f"the family of step {step.name} has several versions: "
                + ", ".join(f"{name} {version}" for name, version in sorted(members.items())),
                remedy="give every distribution of the family one version in the step's requirements",
                evidence={"step": step.name, "wanted": Version(members[first]).public, "found": members},
            )


def _labels(stack: Stack, files: Iterable[LockedFile]) -> Iterable[Finding]:
    wanted = stack.python.cuda_label
    major = "cu" + stack.python.cuda.split(".")[0]
    for file in files:
        for label in cuda_labels(file.version):
            if label not in (wanted, major):
                yield Finding(
                    code=CUDA_LABEL,
                    severity="error",
                    cause=f"{file.distribution} {file.version} is built for {label}, the stack is {wanted}",
                    remedy=f"require the +{wanted} build and name the index that has it",
                    evidence={"distribution": file.distribution, "wanted": wanted, "found": label},
                )


def _torch_by_runtime(stack: Stack, files: Iterable[LockedFile]) -> Iterable[Finding]:
    """Judge a torch without a label by the CUDA runtime that it brings.

    The runtime's distribution has the toolkit's own first two numbers: 12.8.90 comes with 12.8. Up to CUDA 12 its
    name carries the major version (``nvidia-cuda-runtime-cu12``), from 13 it does not.
    """
    versions = {file.distribution: file.version for file in files}
    torch = versions.get("torch")
    if torch is None or cuda_labels(torch):
        return
    if (Version(torch).local or "").split(".")[0] == "cpu":
        yield _torch_build(stack, f"torch {torch}", None, "its label says so")
    for name, version in sorted(versions.items()):
        if re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", name):
            toolkit = ".".join(str(part) for part in Version(version).release[:2])
            if toolkit != stack.python.cuda:
                yield _torch_build(stack, f"torch {torch}", toolkit, f"it brings {name} {version}")


def _torch_by_itself(stack: Stack, contents: Mapping[str, Contents]) -> Iterable[Finding]:
    torch = contents.get("torch")
    if torch is not None and torch.torch_cuda is not None and torch.torch_cuda != stack.python.cuda:
        yield _torch_build(stack, "torch", torch.torch_cuda, "its version file says so")


def _torch_build(stack: Stack, version: str, found: str | None, why: str) -> Finding:
    """Return the finding for a torch that is built for another toolkit; ``found`` None: for the CPU alone."""
    built_for = f"CUDA {found}" if found else "the CPU alone"
    return Finding(
        code=TORCH_BUILD,
        severity="error",
        cause=f"{version} is built for {built_for}, the stack says {stack.python.cuda}; {why}",
        remedy=f"require the {stack.python.cuda_label} build and name its index"
        + (f", or set python.cuda to {found}" if found else ""),
        evidence={"wanted": stack.python.cuda, "found": found},
    )


def _overlaps(contents: Mapping[str, Contents]) -> Iterable[Finding]:
    owners: dict[str, list[str]] = {}
    for distribution in sorted(contents):
        for path in contents[distribution].files:
            owners.setdefault(path, []).append(distribution)
    shared: dict[tuple[str, ...], list[str]] = {}
    for path, names in owners.items():
        digests = {contents[name].files[path] for name in names}
        if len(names) > 1 and digests != {_EMPTY_SHA256}:
            shared.setdefault(tuple(names), []).append(path)
    for owned, paths in sorted(shared.items()):
        evidence: dict[str, object] = {
            "distributions": list(owned),
            "files": sorted(paths)[:_MOST_NAMED],
            "count": len(paths),
        }
        packages = sorted({path.split("/")[0] for path in paths if re.fullmatch(r"[^/]+/__init__\.py", path)})
        if packages:
            yield Finding(
                code=DOUBLED,
                severity="error",
                cause=f"{' and '.join(owned)} are both the import package {', '.join(packages)}",
                remedy="keep one of them; what is installed last would overwrite the other",
                evidence=evidence,
            )
        else:
            yield Finding(
                code=COLLISION,
                severity="error",
                cause=f"{' and '.join(owned)} write the same {len(paths)} files, among them {min(paths)}",
                remedy="keep one of them: twins for two CUDA majors cannot share an environment",
                evidence=evidence,
            )
