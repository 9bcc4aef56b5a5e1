"""The wanted side: a stack as a person writes it, and the lock that fixes every file of it."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function

from bringup import paths
from bringup.errors import InputError

DIGEST_LENGTH = 12
"""Hexadecimal digits of SHA-256 that name a stack or an environment."""

_LOCK_SUFFIX = ".lock.toml"

M = TypeVar("M", bound=BaseModel)

_TOOLKIT = re.compile(r"\d+\.\d+")
_DRIVER_VERSION = re.compile(r"\d{3}\.\d{1,3}(\.\d{1,3})?")
_RELEASE = re.compile(r"[a-z]+\d+")
_MINOR = re.compile(r"3\.1[1-3]")
_SONAME = re.compile(r"lib[A-Za-z0-9_+.-]+\.so(\.\d+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What someone put there by mistake is shown back to them, but never a password.
_SECRET_URL = re.compile(r"\w+://[^/]*@")


@dataclass(frozen=True)
class _Matching:
    """Accept what a pattern matches as a whole, say what was wanted otherwise, and show it in the JSON Schema."""

    pattern: re.Pattern[str]
    what: str

    def __call__(self, value: str) -> str:
        if not self.pattern.fullmatch(value):
            raise ValueError(f"wanted {self.what}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        shown = handler(schema)
        return {**shown, "pattern": f"^({self.pattern.pattern})$", "description": self.what}


def _requirement(value: str) -> str:
    try:
        Requirement(value)
    except InvalidRequirement as error:
        raise ValueError(f"wanted a requirement such as torch==2.9.1+cu130: {error}") from None
    return value


ToolkitVersion = Annotated[str, _Matching(_TOOLKIT, "a CUDA toolkit such as 13.0")]
DriverVersion = Annotated[str, _Matching(_DRIVER_VERSION, "a driver version such as 580.95.05")]
Soname = Annotated[str, _Matching(_SONAME, "a SONAME such as libnvrtc.so.13")]
Sha256 = Annotated[str, _Matching(_SHA256, "64 hexadecimal digits")]
Name = Annotated[str, _Matching(_NAME, "lower-case letters, digits, dots, dashes")]
RequirementText = Annotated[str, AfterValidator(_requirement)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=True)


class Driver(_Model):
    """The NVIDIA driver. ``minimum`` None means the branch's own."""

    branch: Annotated[str, _Matching(re.compile(r"\d{3}"), "a driver branch such as 580")]
    version: DriverVersion
    minimum: DriverVersion | None = None
    flavour: Literal["open", "closed"] = "open"
    policy: Literal["exact", "at_least"] = "exact"

    @model_validator(mode="after")
    def _branch_holds_version(self) -> Self:
        if self.version.split(".")[0] != self.branch:
            raise ValueError(f"wanted a version of branch {self.branch}, found {self.version}")
        return self


class Kernel(_Model):
    """Whether the running kernel's packages are held."""

    policy: Literal["hold", "free"] = "free"


class Fabric(_Model):
    """Who runs the fabric manager: bringup where the hardware needs one (``auto``), nobody, or another."""

    policy: Literal["auto", "none", "external"] = "auto"


class Runfile(_Model):
    """A toolkit taken from NVIDIA's runfile instead of packages: silent, toolkit only.

    ``file`` is a name below the site mirror's or the inventory's runfile directory, never a URL.
    """

    file: str
    size_bytes: int = Field(gt=0)
    sha256: Sha256


class Cuda(_Model):
    """CUDA toolkits side by side; ``default`` is the one ``/usr/local/cuda`` points at."""

    toolkits: tuple[ToolkitVersion, ...] = Field(min_length=1)
    default: ToolkitVersion
    runfiles: Mapping[ToolkitVersion, Runfile] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _default_is_one(self) -> Self:
        if self.default not in self.toolkits:
            raise ValueError(f"default: wanted one of {', '.join(self.toolkits)}, found {self.default}")
        if extra := set(self.runfiles) - set(self.toolkits):
            raise ValueError(f"runfiles: {', '.join(sorted(extra))} is not among toolkits")
        return self


class Index(_Model):
    """A package index by name. Credentials are a reference (``env:NAME`` or ``file:PATH``), never a value."""

    name: Name
    url: str
    credentials: Annotated[str, _Matching(re.compile(r"(env|file):.+"), "env:NAME or file:PATH")] | None = None

    @field_validator("url")
    @classmethod
    def _has_no_secret(cls, value: str) -> str:
        if not re.match(r"https?://", value):
            raise ValueError("wanted an http or https URL")
        if "@" in value.split("/")[2]:
            raise ValueError("credentials in the URL: name them with credentials = 'env:NAME'")
        return value.rstrip("/")


class Step(_Model):
    """One entry of the guarded order.

    ``index`` "default" is the controller's own configured index; ``sources`` names another one for single
    distributions (a dependency that an index lacks is looked for on "default"). ``family`` names distributions
    whose public versions must agree. ``imports`` are imported in a fresh process after the step. ``optional`` means the
    package survives without its shared objects.
    """

    name: Name
    requirements: tuple[RequirementText, ...] = Field(min_length=1)
    index: Name = "default"
    sources: Mapping[Name, Name] = Field(default_factory=dict)
    family: tuple[Name, ...] = ()
    imports: tuple[str, ...] = ()
    optional: bool = False


class Override(_Model):
    """A requirement of some distribution that this stack replaces, and why."""

    requirement: RequirementText
    reason: str = Field(min_length=10)


class PatchedFile(_Model):
    """SHA-256 of a file before and after a patch."""

    before: Sha256
    after: Sha256


class Patch(_Model):
    """A unified diff for one version of one distribution; ``diff`` is a path beside the stack file."""

    distribution: Name
    version: str
    diff: str
    files: Mapping[str, PatchedFile] = Field(min_length=1)


class Python(_Model):
    """The Python environment. ``interpreter`` is a minor, or ``existing:PATH``: checked, never built.

    ``interpreters`` names another minor for hosts of a distribution release such as ``debian13``.
    """

    interpreter: Annotated[
        str, _Matching(re.compile(r"3\.1[1-3]|existing:/.+"), "3.11, 3.12, 3.13 or existing:/path")
    ] = "3.12"
    interpreters: Mapping[
        Annotated[str, _Matching(_RELEASE, "a release such as debian13")],
        Annotated[str, _Matching(_MINOR, "3.11, 3.12 or 3.13")],
    ] = Field(default_factory=dict)
    cuda: ToolkitVersion
    indexes: tuple[Index, ...] = Field(default=(), alias="index")
    steps: tuple[Step, ...] = Field(default=(), alias="step")
    overrides: tuple[Override, ...] = Field(default=(), alias="override")
    patches: tuple[Patch, ...] = Field(default=(), alias="patch")

    @property
    def existing(self) -> str | None:
        """Return the path of an existing environment, or None when bringup builds one."""
        return self.interpreter.removeprefix("existing:") if self.interpreter.startswith("existing:") else None

    def interpreter_of(self, release: str) -> str:
        """Return the minor that hosts of a release, such as ``debian13-x86_64``, take."""
        return self.interpreters.get(release.partition("-")[0], self.interpreter)

    @property
    def cuda_label(self) -> str:
        """Return the local version label of this CUDA build, such as ``cu130``."""
        return "cu" + self.cuda.replace(".", "")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.existing is None and not self.steps:
            raise ValueError("step: wanted at least one step, or interpreter = 'existing:PATH'")
        if self.existing is not None and self.interpreters:
            raise ValueError("interpreters: wanted none, the environment is an existing one")
        for kind, names in (
            ("step", [step.name for step in self.steps]),
            ("index", [index.name for index in self.indexes]),
        ):
            if twice := {name for name in names if names.count(name) > 1}:
                raise ValueError(f"{kind}: {', '.join(sorted(twice))} stands twice")
        known = {"default", *(index.name for index in self.indexes)}
        for step in self.steps:
            for index in (step.index, *step.sources.values()):
                if index not in known:
                    raise ValueError(
                        f"step {step.name}: wanted one of the indexes {', '.join(sorted(known))}, found {index}"
                    )
        return self


class Service(_Model):
    """What a serving process gets: variables, and the units restarted under the drain hook after a switch."""

    environment: Mapping[Annotated[str, _Matching(_VARIABLE, "a variable name")], str] = Field(default_factory=dict)
    restart: tuple[str, ...] = ()


class Verify(_Model):
    """What the host must prove. ``gpus`` None means however many there are; ``gpu_model`` None means any."""

    gpus: int | None = Field(default=8, ge=1)
    gpu_model: str | None = None
    require: tuple[str, ...] = ()
    profile: Literal["quick", "full"] = "quick"
    cpu_ranks: int = Field(default=8, ge=2, le=64)
    timeout_s: int = Field(default=180, ge=10)


class LockedFile(_Model):
    """One wheel: exact file, size and hash, the name of the index it came from, and the guard's verdict.

    ``verdict`` None means that nobody judged it (nothing in it is guarded, or the lock is older).
    """

    distribution: Name
    version: str
    file: str
    size_bytes: int = Field(ge=0)
    sha256: Sha256
    index: Name = "default"
    verdict: str | None = None

    @field_validator("version")
    @classmethod
    def _is_pep440(cls, value: str) -> str:
        try:
            Version(value)
        except InvalidVersion:
            raise ValueError("wanted a version such as 2.9.1+cu130") from None
        return value


class LockedStep(_Model):
    """The files of one step, in the order of the stack."""

    name: Name
    files: tuple[LockedFile, ...]


class LockedPlatform(_Model):
    """All steps for one platform; the key is ``cp311-x86_64`` or the like."""

    steps: tuple[LockedStep, ...] = Field(alias="step")


class LockedWheels(_Model):
    """Everything the Python environment needs, per platform."""

    resolved_against: Literal["index", "lab"]
    platforms: Mapping[str, LockedPlatform] = Field(alias="platform")


class LockedPackage(_Model):
    """One .deb: name, exact version, architecture and hash, and the repository's Origin."""

    name: str
    version: str
    architecture: str
    sha256: Sha256
    size_bytes: int = Field(ge=0)
    origin: str


class LockedPackages(_Model):
    """The resolved .deb set of one distribution release; the key is ``debian12-x86_64`` or the like.

    ``fabric`` is keyed by what the hardware needs: ``nvswitch`` (fabric manager) or ``nvlink5`` (with the
    subnet manager).
    """

    resolved_against: Literal["index", "lab"]
    driver: tuple[LockedPackage, ...] = ()
    fabric: Mapping[Literal["nvswitch", "nvlink5"], tuple[LockedPackage, ...]] = Field(default_factory=dict)
    toolkits: Mapping[ToolkitVersion, tuple[LockedPackage, ...]] = Field(default_factory=dict, alias="toolkit")


class Lock(_Model):
    """The index-free lock of a stack: no URL and no host name."""

    schema_: Literal[1] = Field(alias="schema")
    stack: Name
    wheels: LockedWheels | None = None
    packages: Mapping[str, LockedPackages] = Field(default_factory=dict)


class Stack(_Model):
    """One combination of driver, toolkits, linker, Python environment and verification limits.

    ``lock`` None means that nobody resolved it yet; ``source`` names the file for messages.
    """

    schema_: Literal[1] = Field(alias="schema")
    name: Name
    description: str = ""
    driver: Driver
    kernel: Kernel = Kernel()
    fabric: Fabric = Fabric()
    cuda: Cuda
    linker: Mapping[Soname, ToolkitVersion] = Field(default_factory=dict)
    python: Python
    service: Service = Service()
    verify: Verify = Verify()
    lock: Lock | None = Field(default=None, exclude=True)
    source: str = Field(default="", exclude=True)

    @model_validator(mode="after")
    def _linker_names_toolkits(self) -> Self:
        for soname, toolkit in self.linker.items():
            if toolkit not in self.cuda.toolkits:
                raise ValueError(
                    f"linker.{soname}: wanted one of cuda.toolkits ({', '.join(self.cuda.toolkits)}), found {toolkit}"
                )
        return self

    @cached_property
    def digest(self) -> str:
        """Return the digest of everything this stack asks for, its lock included; a pin names it."""
        wanted = self.model_dump(mode="json", by_alias=True, exclude={"description"})
        if not self.python.interpreters:
            # Stacks that do not use it keep the digest that hosts know them by.
            del wanted["python"]["interpreters"]
        locked = self.lock.model_dump(mode="json", by_alias=True) if self.lock else None
        return _digest({"stack": wanted, "lock": locked})

    def locked_steps(self, platform: str) -> tuple[LockedStep, ...] | None:
        """Return the locked steps for a platform such as ``cp311-x86_64``; None when the lock has none."""
        wheels = self.lock.wheels if self.lock else None
        found = wheels.platforms.get(platform) if wheels else None
        return found.steps if found else None

    def locked_packages(self, release: str) -> LockedPackages | None:
        """Return the .deb set for a release such as ``debian12-x86_64``; None when the lock has none."""
        return self.lock.packages.get(release) if self.lock else None

    def locked_distributions(self, platform: str) -> Mapping[str, str]:
        """Return the version of every distribution that the environment must hold, by canonical name."""
        return {
            canonicalize_name(file.distribution): file.version
            for step in self.locked_steps(platform) or ()
            for file in step.files
        }

    def env_digest(self, platform: str) -> str | None:
        """Return the digest of interpreter minor, platform, locked files and patches, and of nothing else.

        None when the lock holds nothing for the platform, or when the environment is an existing one.
        """
        if platform not in self._env_digests:
            self._env_digests[platform] = self._env_digest(platform)
        return self._env_digests[platform]

    @cached_property
    def _env_digests(self) -> dict[str, str | None]:
        # Every host of a fleet asks for the same one.
        return {}

    def _env_digest(self, platform: str) -> str | None:
        steps = self.locked_steps(platform)
        if steps is None or self.python.existing is not None:
            return None
        files = sorted((file.file, file.sha256) for step in steps for file in step.files)
        patches = [patch.model_dump(mode="json", exclude={"diff"}) for patch in self.python.patches]
        return _digest({"platform": platform, "files": files, "patches": patches})


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def parse_stack(text: str, *, source: str, lock: Lock | None = None) -> Stack:
    """Return the stack written in TOML ``text``.

    Raises InputError naming the source, the key path, and what was wanted and found there.
    """
    document = _toml(text, source)
    document.update(lock=lock, source=source)
    stack = _validated(Stack, document, source)
    if lock is not None and lock.stack != stack.name:
        raise InputError(
            f"{source}: the lock beside it was made for another stack",
            why=f"wanted stack = {stack.name!r}, found {lock.stack!r}",
            hint=f"run `bringup lock {stack.name}`",
        )
    return stack


def parse_lock(text: str, *, source: str) -> Lock:
    """Return the lock written in TOML ``text``; raises InputError as ``parse_stack`` does."""
    return _validated(Lock, _toml(text, source), source)


def stack_path(name_or_path: str) -> Path:
    """Return the file of a stack given by the name of a shipped one or by path.

    Raises InputError when no stack of that name is shipped; a path is not looked at.
    """
    if name_or_path.endswith(".toml"):
        return Path(name_or_path)
    path = paths.stacks() / f"{name_or_path}.toml"
    if is_lock(path) or not path.is_file():
        shipped = sorted(file.stem for file in paths.stacks().glob("*.toml") if not is_lock(file))
        raise InputError(
            f"no stack is called {name_or_path!r}",
            hint=f"bringup ships {', '.join(shipped)}; or name the path of a .toml file",
        )
    return path


def lock_path_of(stack_path: Path, directory: Path | None = None) -> Path:
    """Return where the lock of a stack belongs: in a directory of locks; None means beside the stack."""
    return (directory or stack_path.parent) / (stack_path.name.removesuffix(".toml") + _LOCK_SUFFIX)


def is_lock(path: Path) -> bool:
    """Return whether a file is a lock by its name; locks and stacks lie side by side."""
    return path.name.endswith(_LOCK_SUFFIX)


def load_stack(path: Path, *, lock_path: Path | None = None) -> Stack:
    """Return the stack in ``path`` with its lock: a file, or a directory of locks; None means beside the stack.

    A missing lock leaves ``Stack.lock`` None. Raises InputError when a file cannot be read or parsed.
    """
    lock_file = lock_path if lock_path and not lock_path.is_dir() else lock_path_of(path, lock_path)
    lock = parse_lock(_read(lock_file), source=str(lock_file)) if lock_file.is_file() else None
    return parse_stack(_read(path), source=str(path), lock=lock)


def json_schema(model: type[Stack] | type[Lock]) -> dict[str, Any]:
    """Return the JSON Schema of a stack's or a lock's TOML; ``docs/reference`` holds both."""
    schema = model.model_json_schema(by_alias=True)
    if model is Stack:
        # Both are put there by whoever reads the file, never written in it.
        for key in ("lock", "source"):
            del schema["properties"][key]
        for name in ("Lock", *Lock.model_json_schema(by_alias=True)["$defs"]):
            schema["$defs"].pop(name, None)
    title = "Stack, schema 1" if model is Stack else "Lock, schema 1"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": title}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}", why=str(error), hint="name a stack or the path of its file") from None


def _toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source}: not TOML", why=str(error)) from None


def _validated(model: type[M], document: Mapping[str, Any], source: str) -> M:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{source}: {'; '.join(_explained(error))}") from None


def _explained(error: ValidationError) -> Iterator[str]:
    problems = error.errors(include_url=False)
    for problem in problems:
        if problem["type"] == "too_short" and any(_is_below(other["loc"], problem["loc"]) for other in problems):
            continue  # it is short because what stands there was refused
        key = ""
        for part in problem["loc"]:
            if part != "[key]":  # pydantic's word for: the key itself is wrong, not its value
                key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
        message = problem["msg"].removeprefix("Value error, ")
        found = problem["input"]
        is_secret = problem["loc"][-1:] == ("credentials",) or _SECRET_URL.match(str(found)) is not None
        shown = f", found {found!r}" if isinstance(found, str | int | float | bool) and not is_secret else ""
        match problem["type"]:
            case "missing":
                yield f"missing required value in '{key}'"
            case "extra_forbidden":
                yield f"unknown key '{key}'"
            case "too_short":
                lengths = problem["ctx"]
                yield f"'{key}': wanted at least {lengths['min_length']}, found {lengths['actual_length']}"
            case _:
                yield f"'{key}': {message}{shown}" if key else message


def _is_below(inner: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer
