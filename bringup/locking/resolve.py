"""Resolve the steps of a stack, each on top of everything that the earlier ones fixed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bringup.errors import InputError
from bringup.locking.compile import Answer, Compiler, Origin, Project, best_wheel, split
from bringup.package_index import Sources
from bringup.stack import LockedFile, LockedPlatform, LockedStep, Stack, Step


@dataclass(frozen=True)
class ResolvedFile:
    """One wheel of a resolution: what the lock will hold, and what only today is true.

    ``locked.size_bytes`` is 0 while nobody knows it. ``url`` is the wheel's address today; ``required_by`` names
    the distributions that asked for it, and is empty unless the resolution was asked to explain itself.
    """

    locked: LockedFile
    url: str
    required_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResolvedStep:
    """The files that one step adds to those of the earlier steps."""

    name: str
    files: tuple[ResolvedFile, ...]


@dataclass(frozen=True)
class ResolvedPlatform:
    """All steps of a stack, resolved for one platform."""

    platform: str
    steps: tuple[ResolvedStep, ...]

    @property
    def files(self) -> tuple[ResolvedFile, ...]:
        """Return the files of all steps, in order."""
        return tuple(file for step in self.steps for file in step.files)

    def locked(self) -> LockedPlatform:
        """Return what the lock holds of this resolution: no address."""
        return LockedPlatform(
            steps=tuple(
                LockedStep(name=step.name, files=tuple(file.locked for file in step.files)) for step in self.steps
            )
        )

    def updated(self, changes: Mapping[str, Mapping[str, object]]) -> ResolvedPlatform:
        """Return this resolution with fields of locked files replaced; ``changes`` is keyed by file name."""

        def changed(file: ResolvedFile) -> ResolvedFile:
            update = changes.get(file.locked.file)
            return replace(file, locked=file.locked.model_copy(update=update)) if update else file

        return replace(
            self,
            steps=tuple(replace(step, files=tuple(changed(file) for file in step.files)) for step in self.steps),
        )


def resolve(
    stack: Stack,
    platform: str,
    sources: Sources,
    *,
    preferred: Mapping[str, str] | None = None,
    explain: bool = False,
) -> ResolvedPlatform:
    """Return every step of ``stack`` resolved for ``platform``, in order.

    A step sees everything the earlier steps fixed as exact requirements on the index they came from, its own index
    first, the default one for what that lacks, and the stack's overrides. ``preferred`` names versions to keep
    where they still fit (those of the lock being renewed). Raises InputError with uv's own explanation when a step
    has no solution.
    """
    split(platform)
    if stack.python.existing is not None:
        raise InputError(
            f"{stack.source or stack.name}: the environment is an existing one",
            why=f"python.interpreter = {stack.python.interpreter!r} is checked, never built",
            hint="lock its packages alone, with --only packages",
        )
    steps: list[ResolvedStep] = []
    with tempfile.TemporaryDirectory(prefix="bringup-lock-") as directory:
        compiler = Compiler(platform, sources, Path(directory))
        for step in stack.python.steps:
            fixed = {file.locked.distribution: file for done in steps for file in done.files}
            question = _Question(stack, step, compiler, fixed, preferred or {}, explain)
            steps.append(ResolvedStep(step.name, question.answer()))
    return ResolvedPlatform(platform, tuple(steps))


def locate(files: Sequence[LockedFile], platform: str, sources: Sources) -> dict[str, str]:
    """Return today's address of every locked file, by file name.

    Raises InputError naming a file that its index no longer has, or has with another hash.
    """
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bringup-lock-") as directory:
        compiler = Compiler(platform, sources, Path(directory))
        for index in sorted({file.index for file in files}):
            wanted = [file for file in files if file.index == index]
            project = Project(
                dependencies=[f"{file.distribution}=={file.version}" for file in wanted],
                indexes={} if index == "default" else {file.distribution: index for file in wanted},
                with_dependencies=False,
            )
            offered = {
                (wheel.file, wheel.sha256): wheel.url
                for answer in compiler.answers(project, what=f"what was locked from index {index}")
                for wheel in answer.wheels
            }
            for file in wanted:
                if (file.file, file.sha256) not in offered:
                    raise InputError(
                        f"index {index} no longer has {file.file} as it was locked",
                        why=f"wanted sha256 {file.sha256}",
                        hint="renew the lock with `bringup lock`, or name a mirror that kept the file",
                    )
                found[file.file] = offered[file.file, file.sha256]
    return found


@dataclass(frozen=True)
class _Question:
    """One step, asked of uv."""

    stack: Stack
    step: Step
    compiler: Compiler
    fixed: Mapping[str, ResolvedFile]
    preferred: Mapping[str, str]
    explain: bool

    def answer(self) -> tuple[ResolvedFile, ...]:
        project = self._project()
        what = f"{self._where}: step {self.step.name} on {self.compiler.platform}"
        answers = self.compiler.answers(project, what=what)
        # What is bound to an index comes from it. For the rest it must be asked only where two are searched.
        unbound = [answer for answer in answers if answer.name not in {*project.indexes, *self.fixed}]
        is_asked = self.explain or (project.first is not None and unbound)
        origins = self.compiler.origins(project, answers) if is_asked else {}
        new = []
        for answer in answers:
            if answer.name in self.fixed:
                continue
            origin = origins.get(answer.name, Origin("default", ()))
            file = self._file(answer, project.indexes.get(answer.name, origin.index))
            new.append(replace(file, required_by=origin.required_by))
        return tuple(sorted(new, key=lambda file: file.locked.distribution))

    def _project(self) -> Project:
        indexes = {name: file.locked.index for name, file in self.fixed.items() if file.locked.index != "default"}
        pinned = [f"{name}=={file.locked.version}" for name, file in sorted(self.fixed.items())]
        bound: dict[str, tuple[str, str]] = {}
        for text in self.step.requirements:
            name = canonicalize_name(Requirement(text).name)
            index = self.step.sources.get(name, self.step.index)
            if index != "default" and name not in self.fixed:
                bound[name] = (index, text)
        indexes |= {name: index for name, (index, _) in bound.items()}
        return Project(
            dependencies=[*pinned, *self.step.requirements],
            indexes=indexes,
            overrides=tuple(self._overrides(bound)),
            preferred={name: version for name, version in self.preferred.items() if name not in self.fixed},
            first=None if self.step.index == "default" else self.step.index,
        )

    def _overrides(self, bound: Mapping[str, tuple[str, str]]) -> Iterable[str]:
        """Yield the stack's overrides for uv.

        An override makes uv forget which index a distribution is bound to, so that of a bound one names its file.
        What an earlier step fixed stays fixed, however wide the override is.
        """
        for override in self.stack.python.overrides:
            name = canonicalize_name(Requirement(override.requirement).name)
            done = self.fixed.get(name)
            if done is not None:
                is_bound = done.locked.index != "default"
                yield f"{name} @ {done.url}" if is_bound else f"{name}=={done.locked.version}"
            elif name in bound:
                index, text = bound[name]
                yield f"{name} @ {self._address(name, text, index)}"
            else:
                yield override.requirement

    def _address(self, name: str, requirement: str, index: str) -> str:
        project = Project([requirement], {name: index}, with_dependencies=False)
        answers = self.compiler.answers(project, what=f"{self._where}: {requirement} on index {index}")
        return self._file(answers[0], index).url

    def _file(self, answer: Answer, index: str) -> ResolvedFile:
        wheel = best_wheel(answer.wheels, self.compiler.platform)
        if wheel is None:
            raise InputError(
                f"{self._where}: step {self.step.name} has no wheel of {answer.name} {answer.version} "
                f"for {self.compiler.platform}",
                why="there are wheels for other platforms only",
                hint="leave the platform out, or choose a version that has one",
            )
        locked = LockedFile(
            distribution=answer.name,
            # A package asked for by its address has no version of its own in uv's answer.
            version=answer.version or wheel.file.split("-")[1],
            file=wheel.file,
            size_bytes=wheel.size_bytes,
            sha256=wheel.sha256,
            index=index,
        )
        return ResolvedFile(locked, wheel.url)

    @property
    def _where(self) -> str:
        return self.stack.source or self.stack.name
