"""Propose the newest set that fits: every requirement of the stack moved up as far as the whole still holds."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bringup.errors import InputError
from bringup.finding import Finding
from bringup.locking import checks
from bringup.locking.compile import Compiler, Project
from bringup.locking.settings import Sources
from bringup.locking.wheels import Judge, lock_wheels
from bringup.stack import Stack

ROUNDS = 12
"""How many sets are tried before giving up; each costs one resolution and a look into its wheels."""


@dataclass(frozen=True)
class Proposal:
    """A newer set and why it is not newer still.

    ``changes`` maps a distribution to (version now, version proposed); empty when nothing can move.
    ``left_out`` maps a limit that was set on the way, such as ``torch!=2.15.0``, to the reason for it.
    """

    stack: Stack
    changes: Mapping[str, tuple[str, str]]
    left_out: Mapping[str, str] = field(default_factory=dict)


def propose(
    stack: Stack,
    platform: str,
    sources: Sources,
    *,
    judge: Judge | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Proposal | None:
    """Return the newest versions of the stack's own requirements that resolve, agree and load together.

    Versions only go up from those of the stack; what a check speaks against is left out and the rest tried again.
    None when no set was found within ``ROUNDS``, or when a finding names no version that could be left out.
    """
    left_out: dict[str, str] = {}
    for _ in range(ROUNDS):
        try:
            candidate = _newest(stack, platform, sources, left_out)
            part = lock_wheels(candidate, [platform], sources, judge=judge)
        except InputError as error:
            say(f"no newer set: {error.why or error.what}")
            return None
        found = [finding for finding in part.findings[platform] if finding.is_refusal]
        if not found:
            now, then = _pins(stack), _pins(candidate)
            changes = {name: (now[name], then[name]) for name in now if now[name] != then[name]}
            return Proposal(candidate, changes, left_out)
        versions = {file.locked.distribution: file.locked.version for file in part.resolved[0].files}
        files = {file.locked.file: file.locked.distribution for file in part.resolved[0].files}
        against = {limit: finding.cause for finding in found for limit in _limits(finding, versions, files)}
        if not against or against.keys() <= left_out.keys():
            return None
        for what, why in against.items():
            say(f"{what}: {why}")
        left_out |= against
    return None


def _pins(stack: Stack) -> dict[str, str]:
    """Return version by distribution of every requirement that names exactly one."""
    found: dict[str, str] = {}
    for step in stack.python.steps:
        for text in step.requirements:
            requirement = Requirement(text)
            pins = [each.version for each in requirement.specifier if each.operator == "=="]
            if len(pins) == 1 and "*" not in pins[0]:
                found[canonicalize_name(requirement.name)] = pins[0]
    return found


def _newest(stack: Stack, platform: str, sources: Sources, left_out: Iterable[str]) -> Stack:
    """Return the stack with every pin moved up, all of them resolved at once and the last steps first.

    The last steps are what the stack is for; torch, which comes first, follows what they can live with.
    """
    pins = _pins(stack)
    asked: list[str] = []
    bound: dict[str, str] = {}
    for step in reversed(stack.python.steps):
        for text in step.requirements:
            name = canonicalize_name(Requirement(text).name)
            asked.append(_relaxed(text) if name in pins else text)
            index = step.sources.get(name, step.index)
            if index != "default":
                bound[name] = index
    first = next((step.index for step in stack.python.steps if step.index != "default"), None)
    project = Project(
        dependencies=[*asked, *left_out],
        indexes=bound,
        overrides=[
            _relaxed(override.requirement)
            for override in stack.python.overrides
            if canonicalize_name(Requirement(override.requirement).name) not in bound
        ],
        first=first,
    )
    with tempfile.TemporaryDirectory(prefix="bringup-lock-") as directory:
        answers = Compiler(platform, sources, Path(directory)).answers(project, what="a newer set")
    newest = {answer.name: answer.version for answer in answers}
    return _pinned(stack, {name: newest[name] for name in pins if name in newest})


def _relaxed(text: str) -> str:
    """Return a pin as a lower limit; only ``==`` may name a local label (PEP 440)."""
    return re.sub(r"==\s*([^\s+;,]+)(\+[A-Za-z0-9.]+)?", r">=\1", text, count=1)


def _pinned(stack: Stack, versions: Mapping[str, str]) -> Stack:
    def moved(text: str) -> str:
        requirement = Requirement(text)
        version = versions.get(canonicalize_name(requirement.name))
        pin = next((each.version for each in requirement.specifier if each.operator == "=="), None)
        return text.replace(f"=={pin}", f"=={version}") if version and pin else text

    steps = tuple(
        step.model_copy(update={"requirements": tuple(moved(text) for text in step.requirements)})
        for step in stack.python.steps
    )
    overrides = tuple(
        override.model_copy(update={"requirement": moved(override.requirement)}) for override in stack.python.overrides
    )
    python = stack.python.model_copy(update={"steps": steps, "overrides": overrides})
    return stack.model_copy(update={"python": python, "lock": None})


def _limits(finding: Finding, versions: Mapping[str, str], files: Mapping[str, str]) -> Iterable[str]:
    """Yield requirements that keep out what a finding speaks against."""
    match finding.code:
        case checks.CUDA_LABEL:
            name = str(finding.evidence["distribution"])
            yield f"{name}!={versions[name]}"
        case checks.TORCH_BUILD:
            yield f"torch!={versions['torch']}"
        case checks.GUARD:
            name = files[str(finding.evidence["file"])]
            yield f"{name}!={versions[name]}"
        case checks.FAMILY:
            members = finding.evidence["found"]
            if isinstance(members, dict):
                lowest = min(Version(Version(version).public) for version in members.values())
                yield from (f"{name}<={lowest}" for name in members if Version(versions[name]).public != str(lowest))
