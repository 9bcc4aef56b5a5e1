"""Time the ELF reader beside pyelftools, lief and readelf on the same file, each in a process of its own.

Every contender lists the exported names of the file; the program stops with an error when two lists differ.
lief comes in a throw-away environment through uv, for it is no dependency of bringup.

Usage: abi_reader.py FILE… [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from bringup.paths import files

_MEASURE = r"""
import hashlib, json, os, resource, sys, time
path = sys.argv[1]
{setup}
def cpu():
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage), max(u.ru_maxrss for u in usage) // 1024
before, started = cpu()[0], time.perf_counter()
names = set({read})
seconds, (after, mib) = time.perf_counter() - started, cpu()
digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
print(json.dumps({{"names": len(names), "digest": digest, "seconds": seconds, "cpu_s": after - before, "mib": mib}}))
"""

_OWN = """
import importlib.util
spec = importlib.util.spec_from_file_location("abi_probe", {probe!r})
probe = importlib.util.module_from_spec(spec); sys.modules["abi_probe"] = probe; spec.loader.exec_module(probe)
"""
_PYELFTOOLS = """
from elftools.elf.elffile import ELFFile
def names_of(path):
    with open(path, "rb") as file:
        for symbol in ELFFile(file).get_section_by_name(".dynsym").iter_symbols():
            if (symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
                    and symbol["st_other"]["visibility"] in ("STV_DEFAULT", "STV_PROTECTED")):
                yield symbol.name
"""
_LIEF = """
import lief
def names_of(path):
    config = lief.ELF.ParserConfig()
    for option in ("parse_relocations", "parse_notes", "parse_overlay", "parse_symtab_symbols"):
        if hasattr(config, option):
            setattr(config, option, False)
    binary = lief.ELF.parse(path, config)
    for symbol in binary.dynamic_symbols:
        if symbol.shndx and symbol.binding != lief.ELF.Symbol.BINDING.LOCAL and symbol.visibility in (
                lief.ELF.Symbol.VISIBILITY.DEFAULT, lief.ELF.Symbol.VISIBILITY.PROTECTED):
            yield symbol.name
"""
_READELF = """
import subprocess
def names_of(path):
    text = subprocess.run(["readelf", "--dyn-syms", "-W", path], capture_output=True, text=True, check=True).stdout
    for line in text.splitlines():
        part = line.split()
        if len(part) >= 8 and part[0][:-1].isdigit() and part[6] != "UND" and part[4] != "LOCAL":
            if part[5] in ("DEFAULT", "PROTECTED"):
                yield part[7].split("@")[0]
"""


def contenders() -> dict[str, tuple[list[str], str]]:
    """Return the command prefix and the program of each contender that can run here."""
    own = _MEASURE.format(setup=_OWN.format(probe=str(files() / "abi_probe.py")), read="probe.read_file(path).exports")
    found = {
        "bringup": ([sys.executable], own),
        "pyelftools": ([sys.executable], _MEASURE.format(setup=_PYELFTOOLS, read="names_of(path)")),
    }
    if shutil.which("readelf"):
        found["readelf"] = ([sys.executable], _MEASURE.format(setup=_READELF, read="names_of(path)"))
    if shutil.which("uv"):
        uv = ["uv", "run", "--quiet", "--no-project", "--with", "lief", "--python", sys.executable, "python"]
        found["lief"] = (uv, _MEASURE.format(setup=_LIEF, read="names_of(path)"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for file in options.file:
        print(f"{file.name}, {file.stat().st_size:,} bytes, best of {options.rounds}")
        results: dict[str, dict] = {}
        # Rounds go over all contenders in turn, so that a busy moment hits each of them alike.
        for _ in range(options.rounds):
            for name, (command, program) in contenders().items():
                said = subprocess.run([*command, "-c", program, str(file)], check=True, capture_output=True, text=True)
                result = json.loads(said.stdout)
                best = results.setdefault(name, result)
                for measure in ("seconds", "cpu_s"):
                    best[measure] = min(best[measure], result[measure])
        own = results["bringup"]
        for name, result in results.items():
            wall, cpu = (result[measure] / own[measure] for measure in ("seconds", "cpu_s"))
            measured = f"{result['seconds']:7.3f} s {wall:5.1f} x  {result['cpu_s']:7.3f} s of CPU {cpu:5.1f} x"
            print(f"  {name:11} {result['names']:8,} names  {measured}  {result['mib']:5} MiB")
        if len({result["digest"] for result in results.values()}) != 1:
            print("error: the lists of names differ", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
