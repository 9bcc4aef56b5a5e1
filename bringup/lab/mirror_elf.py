"""Compile look-alike shared objects: real ELF with the wanted names, and nothing behind them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bringup import paths
from bringup.errors import LabError

NO_DEVICE = 100
"""What every exported function returns: ``cudaErrorNoDevice`` and ``CUDA_ERROR_NO_DEVICE`` alike."""

LABEL = "bringup lab look-alike"

_DATA_PREFIXES = ("_ZTV", "_ZTI", "_ZTS", "_ZGV")


@dataclass(frozen=True)
class SharedObject:
    """One look-alike library or extension.

    ``exports`` are defined here, ``undefined`` must come from elsewhere at load time (functions through the
    PLT, vtables and type information by address, as a compiler would). ``needed`` are file names below the
    link directories or of this machine's own libraries. ``version`` is the symbol version that every export
    carries, None for none. ``source`` is C text compiled in.
    """

    soname: str | None = None
    exports: tuple[str, ...] = ()
    undefined: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    rpath: str | None = None
    is_rpath: bool = False
    version: str | None = None
    source: str = ""


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
    """Return the symbols that the extension ``user`` (such as ``kernel29.common``) leaves undefined.

    Those of libc10_cuda come first: the loader names the first that it misses, and in the real builds that is
    the check function of CUDA calls.
    """
    asked = [symbol for symbol in symbols() if user in symbol.users]
    return tuple(each.name for each in sorted(asked, key=lambda each: each.library != "libc10_cuda.so"))


def compiler() -> str:
    """Return the C compiler's version line; it is part of what a built mirror depends on."""
    gcc = shutil.which("gcc")
    if gcc is None:
        raise LabError("no C compiler", why="gcc is not on the path", hint="apt-get install gcc libc6-dev")
    done = subprocess.run([gcc, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0]


def compile_all(objects: Mapping[Path, SharedObject], link: Iterable[Path] = ()) -> None:
    """Compile every object to its path; ``link`` are directories that ``needed`` names are found in.

    Two at a time: more only queues on the machines this runs on. The result depends on the description and
    the compiler alone. Raises LabError with the compiler's words.
    """
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        directories = tuple(link)
        list(pool.map(lambda item: _compile(item[0], item[1], directories), objects.items()))


def _compile(target: Path, wanted: SharedObject, link: tuple[Path, ...]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bringup-elf-") as name:
        work = Path(name)
        assembly = work / "names.s"
        assembly.write_text(_assembly(wanted))
        command = ["gcc", "-shared", "-nostdlib", "-s", "-o", str(target), str(assembly)]
        if wanted.source:
            source = work / "source.c"
            source.write_text(wanted.source)
            command += ["-fPIC", "-O1", "-fno-ident", "-fno-asynchronous-unwind-tables", str(source)]
        command += ["-Wl,--build-id=none", "-Wl,--hash-style=gnu", "-Wl,-z,noexecstack", "-Wl,--no-as-needed"]
        if wanted.soname:
            command.append(f"-Wl,-soname,{wanted.soname}")
        if wanted.rpath:
            command += [
                "-Wl,--disable-new-dtags" if wanted.is_rpath else "-Wl,--enable-new-dtags",
                f"-Wl,-rpath,{wanted.rpath}",
            ]
        if wanted.version:
            script = work / "versions.map"
            script.write_text(f"{wanted.version} {{ global: *; }};\n")
            command.append(f"-Wl,--version-script={script}")
        command += [part for directory in link for part in ("-L", str(directory))]
        command += [f"-l:{needed}" for needed in wanted.needed]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=work)
    if done.returncode:
        raise LabError(f"look-alike {target.name} does not compile", why=done.stderr.strip()[-2000:])
    target.chmod(0o755)


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
