"""Make the wheels part of a lock: every platform resolved, sizes complete, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

from bringup.finding import Finding
from bringup.locking import http
from bringup.locking.checks import TORCH_BUILD, Contents, check_contents, check_verdicts, check_versions
from bringup.locking.resolve import ResolvedFile, ResolvedPlatform, resolve
from bringup.package_index import Sources
from bringup.stack import Lock, LockedWheels, Stack

_AT_ONCE = 3


@dataclass(frozen=True)
class Judgement:
    """What the guard says of the wheels of one platform.

    ``contents`` is keyed by distribution, ``verdicts`` and ``broken`` by file name; ``broken`` names the wheels
    that the lock must not hold.
    """

    contents: Mapping[str, Contents] = field(default_factory=dict)
    verdicts: Mapping[str, str] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()


class Judge(Protocol):
    """Read the wheels of a resolution where they lie, and judge them. ``commands/lock.py`` passes one in."""

    def __call__(self, stack: Stack, resolved: ResolvedPlatform) -> Judgement: ...


@dataclass(frozen=True)
class WheelsPart:
    """The resolved platforms and what is wrong with each; ``findings`` is keyed by platform."""

    resolved: tuple[ResolvedPlatform, ...]
    findings: Mapping[str, tuple[Finding, ...]]

    @property
    def is_fit(self) -> bool:
        """Return whether nothing stands against the lock."""
        return not any(finding.is_refusal for found in self.findings.values() for finding in found)

    def locked(self, against: Literal["index", "lab"]) -> LockedWheels:
        """Return the wheels part of the lock."""
        return LockedWheels(
            resolved_against=against, platforms={each.platform: each.locked() for each in self.resolved}
        )


def lock_wheels(
    stack: Stack,
    platforms: Sequence[str],
    sources: Sources,
    *,
    previous: Lock | None = None,
    explain: bool = False,
    judge: Judge | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> WheelsPart:
    """Return the wheels part of a lock for ``platforms``.

    ``previous`` names the lock whose versions are kept where they still fit; None means the newest ones. ``judge``
    None means that no wheel is looked into, and that the lock holds no verdict. Raises InputError when a platform
    has no solution.
    """

    def one(platform: str) -> ResolvedPlatform:
        resolved = resolve(stack, platform, sources, preferred=_versions(previous, platform), explain=explain)
        say(f"{platform}: {len(resolved.files)} distributions")
        return resolved

    # uv mostly waits for the network, so a few at once cost nothing.
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        resolved = _with_sizes(tuple(pool.map(one, platforms)), sources)
    finished, findings = [], {}
    for platform in resolved:
        by_version = check_versions(stack, platform.locked())
        # What loads beside a torch that has to go says nothing about the one that will be there.
        is_torch_wrong = any(finding.code == TORCH_BUILD for finding in by_version)
        judgement = judge(stack, platform) if judge and not is_torch_wrong else Judgement()
        platform = platform.updated({file: {"verdict": said} for file, said in judgement.verdicts.items()})
        finished.append(platform)
        findings[platform.platform] = (
            *by_version,
            *check_contents(stack, judgement.contents),
            *check_verdicts(stack, judgement.verdicts, judgement.broken),
        )
    return WheelsPart(tuple(finished), findings)


def _versions(previous: Lock | None, platform: str) -> dict[str, str]:
    wheels = previous.wheels if previous else None
    known = wheels.platforms.get(platform) if wheels else None
    return {file.distribution: file.version for step in known.steps for file in step.files} if known else {}


def _with_sizes(resolved: tuple[ResolvedPlatform, ...], sources: Sources) -> tuple[ResolvedPlatform, ...]:
    """Return the resolution with every size known; a PEP 503 page tells none, so its server is asked."""
    unknown = {file.locked.file: file for platform in resolved for file in platform.files if not file.locked.size_bytes}
    if not unknown:
        return resolved
    with http.client(sources.default.certificate, direct=sources.direct) as client:

        def asked(file: ResolvedFile) -> int:
            return http.size_bytes(client, file.url, auth=sources.login(file.url))

        with ThreadPoolExecutor(8) as pool:
            sizes = dict(zip(unknown, pool.map(asked, unknown.values()), strict=True))
    changes = {name: {"size_bytes": size} for name, size in sizes.items()}
    return tuple(platform.updated(changes) for platform in resolved)
