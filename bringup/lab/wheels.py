"""Build the wheel indexes of the lab from declarative descriptions."""

from __future__ import annotations

import hashlib
import html
import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from packaging.utils import parse_wheel_filename
from pydantic import BaseModel, ConfigDict

from bringup import paths
from bringup.lab import wheels_pack
from bringup.lab.mirror_elf import SharedObject, asked_by, compile_all, compiler, exported_by

INDEXES = ("pytorch-cu130", "sglang-cu130", "flashinfer", "default")
"""Every index of the lab; ``default`` stands for the public one."""

# Libraries that every Linux has; everything else a look-alike needs is made before it is linked.
_SYSTEM = frozenset(
    (
        "ld-linux-x86-64.so.2",
        "libc.so.6",
        "libdl.so.2",
        "libgcc_s.so.1",
        "libm.so.6",
        "libpthread.so.0",
        "librt.so.1",
        "libstdc++.so.6",
    )
)

# What makes the version needs of a real extension: memcpy asks for GLIBC_2.14, operator new for GLIBCXX_3.4.
_ORDINARY = ("memcpy", "_Znwm", "_ZdlPv")


# Checks CUDA calls, has another signature in every other torch, and is what the real extensions die of first.
_CHECK = "c10_cuda_check_implementation"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ElfFile(_Model):
    """One shared object of a wheel.

    ``exports`` names libraries of the symbol table, as ``libc10.so@2.9`` where the torch ABI matters;
    ``asks`` names users in it. ``module`` is the Python extension module it is, if it is one. ``is_cuda``
    says that others link against it with symbol versions.
    """

    path: str
    soname: str | None = None
    exports: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    undefined: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    rpath: str | None = None
    is_rpath: bool = False
    module: str | None = None
    is_cuda: bool = False

    @property
    def shared_object(self) -> SharedObject:
        """Return what is compiled for it."""
        names: set[str] = set()
        for each in self.exports:
            library, _, abi = each.partition("@")
            names |= set(exported_by(library, abi or None))
        asked = {name for user in self.asks for name in asked_by(user)}
        checks = sorted(name for name in asked if _CHECK in name)
        if self.asks:
            asked |= set(_ORDINARY)
        stem = Path(self.path).name.split(".so")[0].replace("-", "_").replace(".", "_")
        return SharedObject(
            soname=self.soname,
            exports=tuple(sorted({*names, f"{stem}_bringup_lab"})),
            undefined=tuple(sorted({*asked, *self.undefined})),
            needed=self.needed,
            rpath=self.rpath,
            is_rpath=self.is_rpath,
            version=self.soname if self.is_cuda and self.exports == ("libcudart.so",) else None,
            source=_template("module.c").render(module=self.module) if self.module else "",
            bound_first=checks[0] if checks else None,
        )


class Wheel(_Model):
    """One wheel as its family's file describes it. ``tag`` is python-abi-platform."""

    name: str
    version: str
    tag: str = "py3-none-any"
    indexes: tuple[str, ...]
    requires: tuple[str, ...] = ()
    requires_python: str = ">=3.9"
    text: Mapping[str, str] = {}
    templates: Mapping[str, str] = {}
    variables: Mapping[str, str] = {}
    objects: tuple[ElfFile, ...] = ()


def directory() -> Path:
    """Return the directory of the families and templates."""
    return paths.data() / "lab" / "wheels"


def render() -> Iterator[Wheel]:
    """Yield every wheel of the lab."""
    tables = tomllib.loads((directory() / "variants.toml").read_text())
    cuda = {row["label"]: row for row in tables["cuda"]}
    for family, table in (
        ("nvidia", "cuda"),
        ("torch", "torch"),
        ("media", "media"),
        ("kernel", "kernel"),
        ("flashinfer", "flashinfer"),
        ("more", None),
    ):
        for row in tables[table] if table else [{}]:
            variables = {**cuda[row.get("local") or "cu128"], **row}
            text = _template(f"{family}.toml").render(variables)
            for wheel in tomllib.loads(text)["wheel"]:
                yield Wheel.model_validate(wheel)
    yield from _plain()


def _plain() -> Iterator[Wheel]:
    table = tomllib.loads((directory() / "plain.toml").read_text())
    for name, row in table["distributions"].items():
        versions = row["version"] if isinstance(row["version"], list) else [row["version"]]
        module = row.get("module", name.replace("-", "_"))
        for version in versions:
            yield Wheel(
                name=name,
                version=version,
                tag=row.get("tag", "py3-none-any"),
                indexes=("default", "pytorch-cu130") if name in table["hosted"] else ("default",),
                requires=tuple(row.get("requires", ())),
                templates={f"{module}/__init__.py": "plain_init.py"},
                variables={"version": version},
            )


def build(cache_dir: Path, say: Callable[[str], None]) -> Path:
    """Build every index below ``cache_dir`` and return the directory that holds them, one folder per index.

    Made once per description and compiler: a folder that is there is whole, for it is renamed when complete.
    Raises LabError when an object does not compile.
    """
    target = cache_dir / f"wheels-{digest()}"
    if target.is_dir():
        return target
    described = list(render())
    say(f"packing {len(described)} wheels")
    with tempfile.TemporaryDirectory(prefix="wheels-", dir=cache_dir) as name:
        work = Path(name)
        _compile(described, work)
        fresh = work / "indexes"
        for index in INDEXES:
            (fresh / index).mkdir(parents=True)
        for wheel in described:
            path = _pack(wheel, work)
            for index in wheel.indexes:
                os.link(path, fresh / index / path.name)
        for index in INDEXES:
            publish(fresh / index)
        fresh.rename(target)
    return target


def digest() -> str:
    """Return what the indexes depend on: descriptions, templates, the code here and the compiler."""
    found = hashlib.sha256(compiler().encode())
    own = [Path(__file__), Path(wheels_pack.__file__), Path(__file__).with_name("mirror_elf.py")]
    for path in [*own, *sorted(each for each in directory().rglob("*") if each.is_file())]:
        found.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:20]


def add(index: Path, files: Iterable[Path]) -> None:
    """Add wheels that were fetched elsewhere to ``index`` (``STATE/mirror/wheels/NAME``) and show them.

    A file of the same name is replaced; the pages are written anew. Look-alikes stay what they are: a real
    wheel of the same version has another file name.
    """
    for path in files:
        fresh = index / f"{path.name}.new"
        try:
            os.link(path, fresh)
        except OSError:  # another file system
            shutil.copyfile(path, fresh)
        fresh.replace(index / path.name)
        for shown in (index / "simple").glob(f"*/{path.name}"):
            shown.unlink()
    publish(index)


def is_look_alike(path: Path) -> bool:
    """Return whether a wheel's file name says that the lab made it."""
    return f"-{wheels_pack.BUILD_TAG}-" in path.name


def publish(index: Path) -> None:
    """Write the simple pages of ``index`` for the wheels that lie in it, hashes and metadata included."""
    known_file = index / "hashes.json"
    known: dict[str, list[Any]] = json.loads(known_file.read_text()) if known_file.exists() else {}
    projects: dict[str, list[str]] = {}
    entries: dict[str, list[Any]] = {}
    for path in sorted(index.glob("*.whl")):
        size = path.stat().st_size
        entry = known.get(path.name)
        if entry is None or entry[0] != size:
            entry = [size, _sha256(path), wheels_pack.metadata(path)]
        entries[path.name] = entry
        projects.setdefault(str(parse_wheel_filename(path.name)[0]), []).append(path.name)
    _replace(known_file, json.dumps(entries))
    pages = index / "simple"
    for distribution, names in projects.items():
        page = pages / distribution
        page.mkdir(parents=True, exist_ok=True)
        lines = []
        for name in names:
            _, sha256, metadata = entries[name]
            link = page / name
            if not link.exists():
                os.link(index / name, link)
            _replace(page / f"{name}.metadata", metadata)
            python = html.escape(wheels_pack.requires_python(metadata))
            core = hashlib.sha256(metadata.encode()).hexdigest()
            lines.append(
                f'<a href="{quote(name)}#sha256={sha256}" data-requires-python="{python}"'
                f' data-core-metadata="sha256={core}" data-dist-info-metadata="sha256={core}">{name}</a><br/>'
            )
        _replace(page / "index.html", _page(distribution, lines))
    _replace(
        pages / "index.html",
        _page("simple index", [f'<a href="{name}/">{name}</a><br/>' for name in sorted(projects)]),
    )


def _compile(described: Iterable[Wheel], work: Path) -> None:
    """Compile every object, after empty stand-ins for each name that one of them needs."""
    objects = [(_object_path(wheel, each, work), each) for wheel in described for each in wheel.objects]
    names = {needed for _, each in objects for needed in each.needed} - _SYSTEM
    link = work / "link"
    cuda = {name: name.partition(".so.")[0] + ".so" for name in names}
    stands_in = {
        link / name: SharedObject(
            soname=name,
            exports=exported_by(cuda[name]) or ("bringup_lab",),
            version=name if cuda[name] == "libcudart.so" else None,
        )
        for name in names
    }
    compile_all(stands_in)
    compile_all({path: each.shared_object for path, each in objects}, [link])


def _object_path(wheel: Wheel, each: ElfFile, work: Path) -> Path:
    return work / "objects" / f"{wheel.name}-{wheel.version}" / each.path


def _pack(wheel: Wheel, work: Path) -> Path:
    files: dict[str, bytes] = {path: text.encode() for path, text in wheel.text.items()}
    for path, name in wheel.templates.items():
        files[path] = _template(name).render(wheel.variables).encode()
    for each in wheel.objects:
        files[each.path] = _object_path(wheel, each, work).read_bytes()
    return wheels_pack.pack(
        work / "packed",
        name=wheel.name,
        version=wheel.version,
        tag=wheel.tag,
        requires=wheel.requires,
        requires_python=wheel.requires_python,
        files=files,
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _page(title: str, lines: Iterable[str]) -> str:
    body = "\n".join(lines)
    return f"<!DOCTYPE html>\n<html><head><title>{title}</title></head><body>\n{body}\n</body></html>\n"


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    fresh.replace(path)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([directory(), directory() / "templates"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is TOML, Python and C, never HTML
    )


def _template(name: str) -> jinja2.Template:
    return _environment().get_template(f"{name}.j2")
