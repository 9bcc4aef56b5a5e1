"""An installed environment as a torch side, made from the answer of files/abi_probe.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bringup.abi.facts import Distribution, SharedFile, declared_torch
from bringup.abi.torch_side import Host, Library, Load, library_of, siblings_of
from bringup.errors import HostError, InputError


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _FileAnswer(_Answer):
    path: str
    soname: str | None
    needed: tuple[str, ...]
    version_definitions: tuple[str, ...]
    exports: tuple[int, ...]
    distribution: str | None = None
    scope: tuple[int, ...] = ()
    missing: tuple[tuple[str, int], ...] = ()
    siblings: tuple[str, ...] = ()
    undefined: tuple[int, ...] = ()
    versioned: dict[str, tuple[int, ...]] = {}
    version_needs: dict[str, tuple[str, ...]] = {}
    search_paths: tuple[str, ...] = ()
    has_executable_stack: bool = False


class _TorchAnswer(_Answer):
    version: str
    cuda: str | None


class _ProcessAnswer(_Answer):
    loads: tuple[int, ...]
    answers: dict[str, int]
    global_: tuple[int, ...] = Field(alias="global")
    missing: tuple[tuple[str, int], ...]


class _DistributionAnswer(_Answer):
    version: str
    requires_torch: str | None


class _UnreadableAnswer(_Answer):
    problem: str
    distribution: str | None


class _EnvironmentAnswer(_Answer):
    schema_: Literal[1] = Field(alias="schema")
    environment: str
    machine: str
    sites: tuple[str, ...]
    python: str | None
    interpreter: int | None
    distributions: dict[str, _DistributionAnswer]
    torch: _TorchAnswer | None
    process: _ProcessAnswer
    runtime: tuple[int, ...]
    loader_cache: dict[str, str]
    files: tuple[_FileAnswer, ...]
    unreadable: dict[str, _UnreadableAnswer]
    names: tuple[str, ...]

    @model_validator(mode="after")
    def _check_numbers(self) -> _EnvironmentAnswer:
        files, names = range(len(self.files)), range(len(self.names))
        for number in (
            *self.process.loads,
            *self.process.answers.values(),
            *self.process.global_,
            *self.runtime,
            *(number for _, number in self.process.missing),
            *(number for file in self.files for number in file.scope),
            *(number for file in self.files for _, number in file.missing),
        ):
            if number not in files:
                raise ValueError(f"file number {number} of {len(files)}")
        for file in self.files:
            for number in (*file.exports, *file.undefined, *(n for v in file.versioned.values() for n in v)):
                if number not in names:
                    raise ValueError(f"name number {number} of {len(names)}")
        return self


class InstalledEnvironment:
    """An environment on a host: its distributions, and the torch side that it makes.

    Made from the answer of files/abi_probe.py by `parse_environment`.
    """

    def __init__(self, answer: _EnvironmentAnswer) -> None:
        self._answer = answer
        names = answer.names
        self._names = frozenset(names)
        # What the process holds already is relocated; what it does not, a load brings in.
        held = set(answer.process.loads)
        self._libraries = [
            Library(
                file.soname or file.path.rsplit("/", 1)[-1],
                frozenset(names[n] for n in file.exports),
                frozenset(file.version_definitions),
                None if number in held else self._shared_file(self._relative(file.path), file),
            )
            for number, file in enumerate(answer.files)
        ]
        self._by_path = {self._relative(file.path): file for file in answer.files if file.distribution}
        self._numbers = {file.path: number for number, file in enumerate(answer.files)}

    @property
    def version(self) -> str:
        """Return torch's version with its local label, "" where torch is not installed."""
        return self._answer.torch.version if self._answer.torch else ""

    @property
    def cuda(self) -> str | None:
        """Return the CUDA version that torch was built for."""
        return self._answer.torch.cuda if self._answer.torch else None

    @property
    def python(self) -> str | None:
        """Return the interpreter's minor version."""
        return self._answer.python

    @property
    def machine(self) -> str:
        """Return the machine that the host is: x86_64 or aarch64."""
        return self._answer.machine

    @property
    def glibc(self) -> str | None:
        """Return the host's glibc."""
        return self.host.glibc

    @property
    def host(self) -> Host:
        """Return what the host supplies."""
        runtime = {self._libraries[n].name: self._libraries[n] for n in self._answer.runtime}
        return Host(frozenset(self._answer.loader_cache) | frozenset(runtime), runtime)

    @property
    def broken_torch(self) -> tuple[tuple[str, str], ...]:
        """Return the libraries that `import torch` itself does not find, with the files that need them."""
        return self._pairs(self._answer.process.missing)

    def _pairs(self, missing: Iterable[tuple[str, int]]) -> tuple[tuple[str, str], ...]:
        return tuple((name, self._answer.files[n].path.rsplit("/", 1)[-1]) for name, n in missing)

    @property
    def distributions(self) -> tuple[Distribution, ...]:
        """Return the installed distributions that own shared objects."""
        files: dict[str, list[SharedFile]] = {name: [] for name in self._answer.distributions}
        for path, file in self._by_path.items():
            files.setdefault(file.distribution or "", []).append(self._shared_file(path, file))
        for path, unreadable in self._answer.unreadable.items():
            broken = SharedFile.unreadable(self._relative(path), unreadable.problem)
            files.setdefault(unreadable.distribution or "", []).append(broken)
        return tuple(
            Distribution(
                name=name,
                version=found.version,
                files=tuple(sorted(files[name], key=lambda f: f.path)),
                requires_torch=declared_torch([found.requires_torch] if found.requires_torch else []),
            )
            for name, found in self._answer.distributions.items()
        )

    def load(self, file: SharedFile, distribution: Distribution) -> Load:
        """Return what loading a file leads to: as probed for an installed file, by the same rules for another.

        Raises InputError for a file whose names the probe was not asked about.
        """
        probed = self._by_path.get(file.path)
        if probed is None or probed.distribution != canonicalize_name(distribution.name):
            return self._foreign(file, distribution)
        before = tuple(probed.siblings)
        return Load(
            scope=self._with_global(self._libraries[n] for n in probed.scope),
            missing=self._pairs(probed.missing),
            loaded_before=before,
        )

    def _foreign(self, file: SharedFile, distribution: Distribution) -> Load:
        asked = {*file.undefined, *(name for names in file.versioned.values() for name in names)}
        if not asked <= self._names:
            raise InputError(
                f"{file.path} cannot be judged on this environment",
                why="the environment was read without looking for the names that the file needs",
                hint="pass the distribution's undefined names to abi_probe.py with --wanted",
            )
        siblings = siblings_of(distribution, file)
        answers, host = self._answer.process.answers, self.host
        scope: list[Library] = [library_of(file)]
        missing: list[tuple[str, str]] = []
        before: list[str] = []
        seen = {file.name, file.soname}
        queue = [(name, file) for name in file.needed]
        for name, needer in queue:
            if name in seen:
                continue
            seen.add(name)
            number = answers.get(name)
            if number is None:
                number = next(
                    (n for p in self._search(needer) if (n := self._numbers.get(f"{p}/{name}")) is not None), None
                )
            if number is not None:
                entry = self._answer.files[number]
                scope += [self._libraries[n] for n in entry.scope or (number,)]
                if self._libraries[number].file is not None:
                    missing += self._pairs(entry.missing)
            elif name in siblings:
                other = siblings[name]
                scope.append(library_of(other))
                queue += [(n, other) for n in other.needed]
                if not needer.search_paths:
                    before.append(other.path)
            elif name in host.sonames:
                scope.append(host.libraries.get(name, Library(name)))
            else:
                missing.append((name, needer.name))
        return Load(self._with_global(scope), tuple(missing), (), tuple(before))

    def _search(self, file: SharedFile) -> list[str]:
        """Return the directories that a file's search paths would mean once it is installed."""
        folder = file.path.rpartition("/")[0]
        found = []
        for site in self._answer.sites:
            for path in file.search_paths:
                origin = f"{site}/{folder}".rstrip("/")
                parts: list[str] = []
                for part in path.replace("${ORIGIN}", origin).replace("$ORIGIN", origin).split("/"):
                    if part == "..":
                        parts = parts[:-1]
                    elif part not in ("", "."):
                        parts.append(part)
                found.append("/" + "/".join(parts))
        return found

    def _with_global(self, scope: Iterable[Library]) -> tuple[Library, ...]:
        """Return a scope with the process's global scope before it, as the loader searches."""
        whole = (*(self._libraries[n] for n in self._answer.process.global_), *scope)
        # Without the interpreter nobody has looked at who has Python's names.
        return whole if self._answer.interpreter is not None else (Library("the Python interpreter"), *whole)

    def _relative(self, path: str) -> str:
        for site in self._answer.sites:
            if path.startswith(site + "/"):
                return path[len(site) + 1 :]
        return path

    def _shared_file(self, path: str, file: _FileAnswer) -> SharedFile:
        names = self._answer.names
        return SharedFile(
            path=path,
            soname=file.soname,
            needed=file.needed,
            search_paths=file.search_paths,
            undefined=frozenset(names[n] for n in file.undefined),
            versioned={lib: frozenset(names[n] for n in found) for lib, found in file.versioned.items()},
            version_needs=file.version_needs,
            version_definitions=file.version_definitions,
            exports=frozenset(names[n] for n in file.exports),
            has_executable_stack=file.has_executable_stack,
        )


def parse_environment(answer: object) -> InstalledEnvironment:
    """Return the environment that an answer of files/abi_probe.py describes.

    ``answer`` is the decoded JSON document. Raises HostError when the probe says that it could not look, or
    when the document is not what a probe writes.
    """
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        raise HostError("the environment's shared objects could not be read", why=answer["error"])
    if isinstance(answer, dict) and isinstance(answer.get("loader_cache"), dict):
        cache: dict[str, Any] = answer["loader_cache"]
        if set(cache) == {"error"}:
            # Without the cache the loader still looks in the default directories, as the probe did.
            answer = {**answer, "loader_cache": {}}
    try:
        return InstalledEnvironment(_EnvironmentAnswer.model_validate(answer))
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise HostError("abi probe gave no usable answer", why=f"{place}: {first['msg']}") from None
