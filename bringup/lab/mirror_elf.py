"""Compile look-alike shared objects: real ELF with the wanted names, and nothing behind them."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bringup import paths
from bringup.errors import LabError

NO_DEVICE = 100
"""What every exported function returns: ``cudaErrorNoDevice`` and ``CUDA_ERROR_NO_DEVICE`` alike."""

LABEL = "bringup lab look-alike"

# Where the C library and the compiler's own libraries lie; ld knows its own default, not every distribution's.
_SYSTEM_DIRECTORIES = ("-L/lib/x86_64-linux-gnu", "-L/usr/lib/x86_64-linux-gnu", "-L/lib64")

_SHT_RELA = 4
_SHT_DYNSYM = 11
_R_X86_64_JUMP_SLOT = 7

_DATA_PREFIXES = ("_ZTV", "_ZTI", "_ZTS", "_ZGV")


@dataclass(frozen=True)
class SharedObject:
    """One look-alike library or extension.

    ``exports`` are defined here, ``undefined`` must come from elsewhere at load time (functions through the
    PLT, vtables and type information by address, as a compiler would). ``needed`` are file names below the
    link directories or of this machine's own libraries. ``version`` is the symbol version that every export
    carries, None for none. ``source`` is C text compiled in. ``bound_first`` is the undefined function that the
    loader looks for before the others, and so the one it names when several are missing.
    """

    soname: str | None = None
    exports: tuple[str, ...] = ()
    undefined: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    rpath: str | None = None
    is_rpath: bool = False
    version: str | None = None
    source: str = ""
    bound_first: str | None = None


class _Section(NamedTuple):
    """A section header, in the order of its fields."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


@dataclass(frozen=True)
class Symbol:
    """One row of ``data/lab/wheels/symbols.tsv``. ``abis`` is empty when no torch of the lab exports it."""

    name: str
    library: str
    abis: frozenset[str]
    users: frozenset[str]


@cache
def symbols() -> tuple[Symbol, ...]:
    """Return every symbol that some look-alike extension asks for."""
    rows = []
    for line in (paths.data() / "lab" / "wheels" / "symbols.tsv").read_text().splitlines():
        if not line.startswith("#"):
            library, abis, users, name = line.split("\t")
            known = frozenset() if abis == "-" else frozenset(abis.split(","))
            rows.append(Symbol(name, library, known, frozenset(users.split(","))))
    return tuple(rows)


def exported_by(library: str, abi: str | None = None) -> tuple[str, ...]:
    """Return what ``library`` (such as ``libc10.so``) exports; ``abi`` is a torch minor, None for CUDA's."""
    return tuple(
        symbol.name for symbol in symbols() if symbol.library == library and (abi is None or abi in symbol.abis)
    )


def asked_by(user: str) -> tuple[str, ...]:
    """Return the symbols that the extension ``user`` (such as ``kernel29.common``) leaves undefined."""
    return tuple(symbol.name for symbol in symbols() if user in symbol.users)


def compiler() -> str:
    """Return the C compiler's version line; it is part of what a built mirror depends on."""
    gcc = shutil.which("gcc")
    if gcc is None:
        raise LabError("no C compiler", why="gcc is not on the path", hint="apt-get install gcc libc6-dev")
    done = subprocess.run([gcc, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def compile_all(objects: Mapping[Path, SharedObject], link: Iterable[Path] = ()) -> None:
    """Compile every object to its path; ``link`` are directories that ``needed`` names are found in.

    The result depends on the descriptions and the tool chain alone. as and ld are called themselves: the
    compiler driver in front of them costs more than both, and hundreds of objects are made. Raises LabError
    with the tool's words.
    """
    with (
        tempfile.TemporaryDirectory(prefix="bringup-elf-") as name,
        ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool,
    ):
        work = Path(name)
        sources = sorted({each.source for each in objects.values() if each.source})
        compiled = dict(zip(sources, pool.map(lambda item: _compile(work, *item), enumerate(sources)), strict=True))
        directories = [part for directory in link for part in ("-L", str(directory))]

        def make(item: tuple[int, tuple[Path, SharedObject]]) -> None:
            number, (target, wanted) = item
            parts = [compiled[wanted.source]] if wanted.source else []
            _link(target, wanted, work / str(number), parts, directories)

        list(pool.map(make, enumerate(objects.items())))


def _compile(work: Path, number: int, source: str) -> Path:
    text = work / f"source-{number}.c"
    text.write_text(source)
    target = text.with_suffix(".o")
    options = ["-fPIC", "-O1", "-fno-ident", "-fno-asynchronous-unwind-tables"]
    _run("gcc", *options, "-c", "-o", str(target), str(text))
    return target


def _link(target: Path, wanted: SharedObject, work: Path, parts: Iterable[Path], directories: Iterable[str]) -> None:
    work.mkdir()
    (work / "names.s").write_text(_assembly(wanted))
    _run("as", "-o", str(work / "names.o"), str(work / "names.s"))
    options = ["-shared", "-s", "--build-id=none", "--hash-style=gnu", "-z", "noexecstack", "--no-as-needed"]
    if wanted.soname:
        options += ["-soname", wanted.soname]
    if wanted.rpath:
        options += ["--disable-new-dtags" if wanted.is_rpath else "--enable-new-dtags", "-rpath", wanted.rpath]
    if wanted.version:
        script = work / "versions.map"
        script.write_text(f"{wanted.version} {{ global: *; }};\n")
        options.append(f"--version-script={script}")
    target.parent.mkdir(parents=True, exist_ok=True)
    files = [str(work / "names.o"), *(str(part) for part in parts)]
    needed = [f"-l:{each}" for each in wanted.needed]
    _run("ld", *options, "-o", str(target), *files, *directories, *_SYSTEM_DIRECTORIES, *needed)
    if wanted.bound_first:
        _bind_first(target, wanted.bound_first)
    target.chmod(0o755)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LabError(f"no {command[0]}", hint="apt-get install gcc binutils") from None
    if done.returncode:
        raise LabError("a look-alike library does not compile", why=done.stderr.strip()[-2000:])


def _bind_first(path: Path, symbol: str) -> None:
    """Move the relocation of ``symbol`` to the front of .rela.plt.

    ld orders them by its hash table. The stubs of the swapped entries would call each other's function, were
    they ever run: nothing in a look-alike runs.
    """
    data = bytearray(path.read_bytes())
    table, size, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", data, table + size * each)) for each in range(count)]
    symbols_at = next(each for each in sections if each.kind == _SHT_DYNSYM)
    names = sections[symbols_at.link].offset
    # Only .rela.plt holds jump slots.
    for section in (each for each in sections if each.kind == _SHT_RELA):
        for at in range(section.offset, section.offset + section.size, 24):
            info = struct.unpack_from("<Q", data, at + 8)[0]
            if info & 0xFFFFFFFF != _R_X86_64_JUMP_SLOT:
                break
            start = names + struct.unpack_from("<I", data, symbols_at.offset + (info >> 32) * 24)[0]
            if data[start : data.index(0, start)] == symbol.encode():
                first = slice(section.offset, section.offset + 24)
                here = slice(at, at + 24)
                data[first], data[here] = data[here], data[first]
                path.write_bytes(data)
                return
    raise LabError(f"{path.name} does not ask for {symbol}")


def _assembly(wanted: SharedObject) -> str:
    functions = [name for name in wanted.exports if not name.startswith(_DATA_PREFIXES)]
    objects = [name for name in wanted.exports if name.startswith(_DATA_PREFIXES)]
    calls = [name for name in wanted.undefined if not name.startswith(_DATA_PREFIXES)]
    addresses = [name for name in wanted.undefined if name.startswith(_DATA_PREFIXES)]
    lines = [".text"]
    lines += [f'.globl "{name}"\n.type "{name}",@function\n"{name}":' for name in functions]
    lines += [f"movl ${NO_DEVICE}, %eax", "ret"]
    if calls:
        # Never run; a call through the PLT leaves the same relocation as compiled C++ does, which only
        # RTLD_NOW resolves at load time.
        lines += [".type bringup_lab_calls,@function", "bringup_lab_calls:"]
        lines += [f'call "{name}"@PLT' for name in calls]
        lines.append("ret")
    if objects:
        lines.append('.section .data.rel.ro,"aw"')
        lines += [f'.globl "{name}"\n.type "{name}",@object\n.size "{name}",8\n"{name}":' for name in objects]
        lines.append(".quad 0")
    if addresses:
        lines.append('.section .data.rel,"aw"')
        lines += [f'.quad "{name}"' for name in addresses]
    lines += ['.section .rodata,"a"', f'.asciz "{LABEL}"', '.section .note.GNU-stack,"",@progbits']
    return "\n".join(lines) + "\n"
