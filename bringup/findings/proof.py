"""Judge what ``files/stack_check.py`` saw in an environment: imports, versions, NVRTC, GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from bringup.finding import Finding
from bringup.host_state import HostState, Unknown
from bringup.stack import Stack

Document = Mapping[str, Any]


def _refusal(code: str, cause: str, remedy: str, **evidence: object) -> Finding:
    return Finding(code=code, severity="error", cause=cause, remedy=remedy, evidence=evidence)


def stack_check(stack: Stack, locked: Mapping[str, str], document: Document) -> Iterator[Finding]:
    """Judge a whole document. ``locked`` holds the version that each guarded distribution must have."""
    if document.get("exit_status") not in (0, 5):
        yield _refusal(
            "BU-VFY-111",
            f"the stack check could not look: {document.get('message')}",
            "read its log on the host below /run/bringup/jobs",
            found=document.get("exit_status"),
        )
        return
    yield from versions(stack, locked, document)
    yield from imports(document.get("imports") or {})
    yield from nvrtc(stack, document.get("nvrtc") or {})
    if document["exit_status"] == 5:
        yield _refusal(
            "BU-VFY-141",
            str(document.get("message")),
            "the GPU computes wrongly: take it out of service",
            wanted="every element right",
        )


def versions(stack: Stack, locked: Mapping[str, str], document: Document) -> Iterator[Finding]:
    """Judge versions: those of the lock, and a torch built for the stack's CUDA toolkit."""
    section = document.get("versions") or {}
    if error := section.get("error"):
        yield _refusal("BU-VFY-112", f"the environment's interpreter does not answer: {error}", "look at the host")
        return
    found = section.get("distributions") or {}
    for name, version in sorted(locked.items()):
        if name in found and not _is_same(version, found[name]):
            yield _refusal(
                "BU-VFY-113",
                f"{name} is {found[name] or 'not installed'}, not {version}",
                "run bringup apply: a changed environment is replaced",
                wanted=version,
                found=found[name],
            )
    torch = ((document.get("imports") or {}).get("torch") or {}).get("empty") or {}
    if not torch.get("ok"):
        return  # it was not asked for, or its import is judged by itself
    about = torch.get("torch")
    cuda = about.get("cuda") if about else None
    if about is None or cuda != stack.python.cuda:
        unknown = f"nobody knows what torch is built for: {torch.get('error')}"
        yield _refusal(
            "BU-VFY-114",
            unknown if about is None else f"torch is built for {'toolkit ' + cuda if cuda else 'the CPU alone'}",
            f"lock a torch built for {stack.python.cuda}",
            wanted=stack.python.cuda,
            found=cuda,
        )


def _is_same(want: str, found: str | None) -> bool:
    try:
        return found is not None and Version(want) == Version(found)
    except InvalidVersion:
        return want == found


def imports(section: Mapping[str, Any]) -> Iterator[Finding]:
    """Judge imports: each must work under an empty environment; a login environment that breaks one is named."""
    for module, by_environment in section.items():
        empty, login = by_environment.get("empty"), by_environment.get("login")
        if empty is not None and not empty["ok"]:
            yield _refusal(
                "BU-VFY-121",
                f"import {module} fails: {empty['error']}",
                "the error names what is missing",
                wanted=f"import {module}",
                found=empty["error"],
                loader=empty.get("loader"),
            )
        elif login is not None and not login["ok"]:
            yield Finding(
                code="BU-VFY-122",
                severity="warning",
                cause=f"import {module} works, but not with the variables of a login shell: {login['error']}",
                remedy="the settings listed in the check's document change which libraries a process takes",
                evidence={"found": login["error"], "loader": login.get("loader")},
            )


def nvrtc(stack: Stack, section: Mapping[str, Any]) -> Iterator[Finding]:
    """Judge NVRTC: through the linker it compiles for every capability that its toolkit supports."""
    for toolkit, by_environment in section.items():
        empty, login = by_environment.get("empty") or {}, by_environment.get("login")
        bad = list(_nvrtc_errors(empty))
        for what, error in bad:
            yield _refusal(
                "BU-VFY-131",
                f"NVRTC of toolkit {toolkit} {what}: {error}",
                "libnvrtc and its builtins must be found together: look at the loader entry and the toolkit",
                wanted="a compiled kernel",
                found=error,
                library=empty.get("loaded_from"),
                builtins=empty.get("builtins_from"),
            )
        for entry in empty.get("compiles") or ():
            if not entry["is_supported"]:
                # A capability that the environment's own toolkit cannot target is no use to anybody.
                is_own = toolkit == stack.python.cuda
                yield Finding(
                    code="BU-VFY-132",
                    severity="error" if is_own else "info",
                    cause=f"toolkit {toolkit} cannot target {entry['capability']}",
                    remedy="use a newer toolkit for this GPU" if is_own else "none is needed: another toolkit can",
                    evidence={"wanted": entry["capability"], "found": empty.get("supported_capabilities")},
                )
        if not bad and login is not None:
            for what, error in _nvrtc_errors(login):
                yield Finding(
                    code="BU-VFY-133",
                    severity="warning",
                    cause=f"NVRTC of toolkit {toolkit} {what} with the variables of a login shell: {error}",
                    remedy="look for LD_LIBRARY_PATH in the settings listed in the check's document",
                    evidence={"found": error, "library": login.get("loaded_from")},
                )


def _nvrtc_errors(seen: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if seen.get("error"):
        yield "cannot be loaded", seen["error"]
    for entry in seen.get("compiles") or ():
        if entry["is_supported"] and not entry["ok"]:
            yield f"does not compile for {entry['capability']}", entry["error"]


def gpus(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Judge count and model of the GPUs that the driver lists."""
    wish = stack.verify
    listed = None if isinstance(state.gpus, Unknown) else state.gpus.listed
    if listed is None:
        if wish.gpus is not None or wish.gpu_model is not None:
            yield _refusal(
                "BU-VFY-101",
                "the driver does not list the GPUs",
                "run nvidia-smi on the host",
                wanted=wish.gpus,
                found=None,
            )
        return
    if wish.gpus is not None and len(listed) != wish.gpus:
        yield _refusal(
            "BU-VFY-102",
            f"{len(listed)} GPUs answer, not {wish.gpus}",
            "look for Xid messages in the kernel log and for the missing one on the PCI bus",
            wanted=wish.gpus,
            found=len(listed),
        )
    others = sorted({gpu.name for gpu in listed if wish.gpu_model is not None and gpu.name != wish.gpu_model})
    if others:
        yield _refusal(
            "BU-VFY-103",
            f"the GPUs are not all {wish.gpu_model}: {', '.join(others)}",
            "give this host a stack of its own",
            wanted=wish.gpu_model,
            found=others,
        )


def required(results: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Judge backends that the stack requires: ``not_run`` fails only such a one."""
    for result in results:
        if result["required"] and result["state"] != "measured":
            yield _refusal(
                "BU-VFY-153",
                f"the required backend {result['backend']} was not measured: {result.get('reason')}",
                "make it work on this host, or require less in verify.require",
                wanted="measured",
                found=result["state"],
            )


def not_measured(document: Any) -> Iterator[Finding]:
    """Judge a bench that measured nothing and whose document names no failure."""
    yield _refusal(
        "BU-VFY-151",
        f"all-reduce measured nothing: {document.message or document.outcome}",
        "nothing was switched; look at the bench's document on the host",
        wanted="a measurement",
        found=f"status {document.exit_status}",
    )
