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
from bringup.locking.wheels import Judge, WheelsPart, lock_wheels
from bringup.package_index import Sources
from bringup.stack import Stack

ROUNDS = 12
"""How many sets are tried beside one torch before it is given up; each costs one resolution and a look into wheels."""

TORCHES = 8
"""How many minor versions of torch are tried, the newest first."""


@dataclass(frozen=True)
class Proposal:
    """The newest set that fits, and why it is not newer still.

    ``stack`` None means that no set was found. ``changes`` maps a distribution to (version now, version proposed);
    empty when nothing can move. ``left_out`` maps a limit that was set on the way, such as ``torch!=2.15.0``, to the
    reason for it, ``tried`` each torch that was given up to what stands against it.
    """

    stack: Stack | None
    changes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    tried: Mapping[str, str] = field(default_factory=dict)


def propose(
    stack: Stack,
    platform: str,
    sources: Sources,
    *,
    judge: Judge | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Proposal:
    """Return the newest versions of the stack's own requirements that resolve, agree and load together.

    torch comes first: the newest for which every guarded wheel has a version that fits, however old that torch is;
    one that does not do is given up with its whole minor version, whose releases have the same interface. All other
    versions only go up from those of the stack. What a check speaks against is left out and the rest tried again,
    within ``ROUNDS`` and ``TORCHES``.
    """
    search = _Search(stack, platform, sources, judge, say)
    for _ in range(TORCHES):
        found = search.beside_one_torch()
        if found is not None:
            now, then = _pins(stack), _pins(found)
            changes = {name: (now[name], then[name]) for name in now if now[name] != then[name]}
            return Proposal(found, changes, search.left_out, search.tried)
        if not search.is_going_on:
            break
    return Proposal(None, {}, search.left_out, search.tried)


class _Search:
    """What was left out so far: for good, and for the torch that is being tried."""

    def __init__(
        self,
        stack: Stack,
        platform: str,
        sources: Sources,
        judge: Judge | None,
        say: Callable[[str], None],
    ) -> None:
        self._stack = stack
        self._platform = platform
        self._sources = sources
        self._judge = judge
        self._say = say
        self._for_good: dict[str, str] = {}
        self._beside: dict[str, str] = {}
        self._below: str | None = None
        self.tried: dict[str, str] = {}
        self.is_going_on = True

    @property
    def left_out(self) -> dict[str, str]:
        """Return every limit that holds now, with its reason."""
        below = {self._below: next(reversed(self.tried.values()))} if self._below else {}
        return {**below, **self._for_good, **self._beside}

    def beside_one_torch(self) -> Stack | None:
        """Return the newest set beside the newest torch that is left, None when there is none.

        Then that torch is given up, or, when no other can do better, ``is_going_on`` is False.
        """
        torch: str | None = None
        self._beside, why = {}, ""
        for _ in range(ROUNDS):
            try:
                candidate, part = self._set(torch)
            except InputError as error:
                self._give_up(torch, why or error.why or error.what)
                return None
            found = [finding for finding in part.findings[self._platform] if finding.is_refusal]
            if not found:
                return candidate
            locked = [file.locked for file in part.resolved[0].files]
            versions = {file.distribution: file.version for file in locked}
            files = {file.file: file.distribution for file in locked}
            why = "; ".join(finding.cause for finding in found)
            torch = versions.get("torch")
            # Only what the guard says depends on the torch beside it, and means nothing where that is left out itself.
            for_good = self._new_limits((f for f in found if f.code != checks.GUARD), versions, files)
            self._for_good |= for_good
            if any(limit.startswith("torch!=") for limit in for_good):
                torch, self._beside = None, {}
                continue
            beside = self._new_limits((f for f in found if f.code == checks.GUARD), versions, files)
            self._beside |= beside
            if not for_good and not beside:
                break
        self._give_up(torch, why)
        return None

    def _new_limits(
        self, findings: Iterable[Finding], versions: Mapping[str, str], files: Mapping[str, str]
    ) -> dict[str, str]:
        limits: dict[str, str] = {}
        for finding in findings:
            for limit in _limits(finding, versions, files):
                if limit not in self.left_out and limit not in limits:
                    self._say(f"{limit}: {finding.cause}")
                    limits[limit] = finding.cause
        return limits

    def _set(self, torch: str | None) -> tuple[Stack, WheelsPart]:
        limits = [*self.left_out, *([f"torch=={torch}"] if torch else [])]
        candidate = _newest(self._stack, self._platform, self._sources, limits, is_torch_free=self._below is not None)
        return candidate, lock_wheels(candidate, [self._platform], self._sources, judge=self._judge)

    def _give_up(self, torch: str | None, why: str) -> None:
        """Go on below a torch; without one, or with one that was given up before, nothing is left to try."""
        if torch is None or torch in self.tried:
            self._say(f"no other set: {why}")
            self.is_going_on = False
            return
        self._say(f"torch {torch} is given up: {why}")
        self.tried[torch] = why
        self._below = "torch<" + ".".join(map(str, Version(torch).release[:2]))
        self._beside = {}


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


def _newest(stack: Stack, platform: str, sources: Sources, left_out: Iterable[str], *, is_torch_free: bool) -> Stack:
    """Return the stack with every pin moved up, all of them resolved at once and the last steps first.

    The last steps are what the stack is for; torch, which comes first, follows what they can live with, and may
    go below its pin when it ``is_torch_free``.
    """
    pins = _pins(stack)
    asked: list[str] = []
    bound: dict[str, str] = {}
    for step in reversed(stack.python.steps):
        for text in step.requirements:
            name = canonicalize_name(Requirement(text).name)
            is_free = is_torch_free and name == "torch"
            asked.append(_relaxed(text, is_free=is_free) if name in pins else text)
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


def _relaxed(text: str, *, is_free: bool = False) -> str:
    """Return a pin as a lower limit, as none when it ``is_free``; only ``==`` may name a local label (PEP 440)."""
    return re.sub(r"==\s*([^\s+;,]+)(\+[A-Za-z0-9.]+)?", "" if is_free else r">=\1", text, count=1)


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
            # Builds without a label are for the same toolkit throughout a minor version.
            torch = Version(versions["torch"])
            yield f"torch!={torch}" if torch.local else f"torch!={torch.major}.{torch.minor}.*"
        case checks.GUARD:
            name = files[str(finding.evidence["file"])]
            yield f"{name}!={versions[name]}"
        case checks.FAMILY:
            members = finding.evidence["found"]
            if isinstance(members, dict):
                lowest = min(Version(Version(version).public) for version in members.values())
                yield from (f"{name}<={lowest}" for name in members if Version(versions[name]).public != str(lowest))
