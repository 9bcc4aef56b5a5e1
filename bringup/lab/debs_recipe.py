"""Read the declarative package families of the lab and turn them into Debian packages."""

from __future__ import annotations

import hashlib
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jinja2
from pydantic import BaseModel, ConfigDict

from bringup import paths
from bringup.lab.debs import Content, Deb
from bringup.lab.mirror_elf import SharedObject, compile_all, exported_by

Repository = Literal["nvidia", "distro"]

# Which families go where, and the table of variants.toml that renders each of them.
_FAMILIES: tuple[tuple[str, str | None, Repository], ...] = (
    ("driver", "driver", "nvidia"),
    ("toolkit", "toolkit", "nvidia"),
    ("fabric", None, "nvidia"),
    ("keyring", None, "nvidia"),
    ("distro", "distro", "distro"),
)

# What a driver library is asked for besides the names that look-alike extensions use.
_MORE_EXPORTS = {
    "libcuda.so": ("cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute", "cuCtxCreate_v2"),
    "libnvidia-ml.so": ("nvmlInit_v2", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount_v2"),
    "libcudart.so": ("cudaGetDeviceCount", "cudaRuntimeGetVersion", "cudaDriverGetVersion"),
}


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Library(_Model):
    """A look-alike library in a package; ``links`` are further names beside it."""

    path: str
    soname: str
    exports: str = ""
    links: tuple[str, ...] = ()

    @property
    def shared_object(self) -> SharedObject:
        """Return what is compiled for it."""
        names = (*exported_by(self.exports), *_MORE_EXPORTS.get(self.exports, ()))
        stem = self.soname.split(".so")[0].replace("-", "_").replace(".", "_")
        version = self.soname if self.exports in {"libcudart.so", "libcublas.so", "libcublasLt.so"} else None
        return SharedObject(soname=self.soname, exports=tuple(sorted({*names, f"{stem}_bringup_lab"})), version=version)


class Recipe(_Model):
    """One package as its family's file describes it; ``payload`` names members of the real NVRTC wheel."""

    name: str
    version: str
    architecture: Literal["amd64", "all"] = "amd64"
    section: str
    description: str
    depends: tuple[str, ...] = ()
    recommends: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    text: Mapping[str, str] = {}
    templates: Mapping[str, str] = {}
    host_files: Mapping[str, str] = {}
    key_files: tuple[str, ...] = ()
    payload: Mapping[str, str] = {}
    libraries: tuple[Library, ...] = ()
    links: Mapping[str, str] = {}
    executables: tuple[str, ...] = ()
    scripts: Mapping[str, str] = {}
    variables: Mapping[str, str] = {}


@dataclass(frozen=True)
class Context:
    """What rendering depends on besides the families: release, kernel, where the mirror answers, its key."""

    release: str
    kernel: str
    url: str
    key: bytes = b""


@dataclass(frozen=True)
class Rendered:
    """A recipe with the variables it was rendered with."""

    recipe: Recipe
    repository: Repository
    variables: Mapping[str, Any] = field(default_factory=dict)


def directory() -> Path:
    """Return the directory of the families and templates."""
    return paths.data() / "lab" / "debs"


@cache
def variants() -> dict[str, list[dict[str, Any]]]:
    """Return the tables of ``variants.toml``."""
    return tomllib.loads((directory() / "variants.toml").read_text())


def render(context: Context) -> Iterator[Rendered]:
    """Yield every package of every family; the pinning package of a branch comes with its last release."""
    for family, table, repository in _FAMILIES:
        rows = variants()[table] if table else [{}]
        for index, row in enumerate(rows):
            later = [other.get("branch") for other in rows[index + 1 :]]
            variables = {
                **row,
                "is_last_of_branch": row.get("branch") not in later,
                "release_name": context.release,
                "kernel": context.kernel,
                "url": context.url,
                **variants()["release"][0].get(context.release, {}),
            }
            text = _template(f"{family}.toml").render(variables)
            for package in tomllib.loads(text)["package"]:
                yield Rendered(Recipe.model_validate(package), repository, variables)


class Workshop:
    """Turns recipes into packages: compiles their libraries once, opens the real NVRTC wheels once."""

    def __init__(self, context: Context, wheel: Callable[[Mapping[str, Any]], Path], work: Path) -> None:
        """``wheel`` returns the NVRTC wheel of a toolkit's variables; ``work`` is scratch space."""
        self._context = context
        self._wheel = wheel
        self._work = work

    def compile(self, recipes: list[Rendered]) -> None:
        """Compile every look-alike library that the recipes name, each distinct one once."""
        wanted = {each.shared_object for rendered in recipes for each in rendered.recipe.libraries}
        compile_all({self._library(each): each for each in wanted})

    def deb(self, rendered: Rendered) -> Deb:
        """Return the package; large members are left as paths."""
        recipe = rendered.recipe
        variables = {**rendered.variables, **recipe.variables, "package": recipe.name}
        files: dict[str, Content] = {path: text.encode() for path, text in recipe.text.items()}
        links = dict(recipe.links)
        for path, name in recipe.templates.items():
            files[path] = _template(name).render(variables).encode()
        for path, name in recipe.host_files.items():
            files[path] = (paths.files() / "lab" / name).read_bytes()
        for path in recipe.key_files:
            files[path] = self._context.key
        for path, member in recipe.payload.items():
            files[path] = self._member(self._wheel(rendered.variables), member)
        for library in recipe.libraries:
            files[library.path] = self._library(library.shared_object).read_bytes()
            folder, _, name = library.path.rpartition("/")
            links |= {f"{folder}/{link}": name for link in library.links}
        relations = {
            "Depends": recipe.depends,
            "Recommends": recipe.recommends,
            "Provides": recipe.provides,
            "Conflicts": recipe.conflicts,
            "Replaces": recipe.replaces,
        }
        return Deb(
            name=recipe.name,
            version=recipe.version,
            architecture=recipe.architecture,
            section=recipe.section,
            description=recipe.description,
            relations=relations,
            files=files,
            links=links,
            executables=frozenset(recipe.executables),
            scripts={name: _template(text).render(variables) for name, text in recipe.scripts.items()},
        )

    def _library(self, wanted: SharedObject) -> Path:
        name = hashlib.sha256(repr(wanted).encode()).hexdigest()[:20]
        return self._work / "libraries" / f"{name}.so"

    def _member(self, wheel: Path, member: str) -> Path:
        target = self._work / "payload" / wheel.stem / member
        if not target.exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(member, self._work / "payload" / wheel.stem)
        return target


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(directory()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is TOML, shell and C, never HTML
    )


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(f"{name}.j2")
