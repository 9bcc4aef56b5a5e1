"""Compare what the ABI guard says of real wheels with what a real `dlopen(RTLD_NOW)` does.

For each torch an environment is built with uv, and each wheel in turn is installed into it without its
dependencies, probed, judged and removed again. Every shared object of the wheel is then opened in a process
of its own, forked from one that has run `import torch`. A stub of libcuda.so.1 holds the driver's names that
the files ask for, so no GPU is needed. A verdict is right when

- a file called broken fails, and the loader's message has a name that the guard had listed,
- a file called ok or ok-stable loads,
- a file called layout-risk loads or dies, but misses no name.

Usage: abi_truth.py CACHE [--torch 2.9.1 …] [--wheel sgl-kernel==0.3.21 …] [--quick] [--markdown FILE]

CACHE holds uv's cache, one environment at a time (7 GB; removed when its torch is done, unless --keep), and
the exports of each torch. Needs gcc and the configured package index.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bringup.abi import (
    Distribution,
    Level,
    SharedFile,
    TorchRelease,
    Verdict,
    brought_libraries,
    judge,
    parse_environment,
)
from bringup.paths import files, host_script

probe = host_script("abi_probe")

TORCHES = ("2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.14.1")
# The first group was at hand while the guard's rules were written, the second was not.
WHEELS_SEEN = (
    "sgl-kernel==0.3.21",
    "sglang-kernel==0.4.10",
    "sgl-deep-gemm==0.2.3.post2",
    "torchvision==0.23.0",
    "torchvision==0.24.1",
    "torchaudio==2.11.0",
    "torchaudio==2.11.1",
    "torchao==0.9.0",
    "torchao==0.13.0",
    "xformers==0.0.35",
    "torch-memory-saver==0.0.9.post1",
)
WHEELS_UNSEEN = (
    "tensordict==0.10.0",
    "torchrl==0.10.1",
    "lmcache==0.3.9",
    "torchaudio==2.9.1",
    "torchvision==0.25.0",
    "torchvision==0.29.1",
    "sgl-flash-mla==1.0.0",
    "sgl-deep-ep==0.1.2.post1",
    "bitsandbytes==0.50.2",
    "fbgemm-gpu==1.4.0",
    "torchtext==0.18.0",
)
QUICK_TORCHES = ("2.9.1",)
QUICK_WHEELS = (
    "sgl-kernel==0.3.21",
    "torchvision==0.23.0",
    "torchvision==0.24.1",
    "torchao==0.13.0",
    "xformers==0.0.35",
)

_LOAD_LIMIT_S = 120
_DRIVER_NAME = re.compile(r"cu(?!File)[A-Z]")

_OPENER = r"""
import ctypes, json, os, select, signal, sys
import torch
jobs = json.load(sys.stdin)
for job in jobs:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(job["limit_s"])
        text = ""
        try:
            for path in job["first"]:
                ctypes.CDLL(path, mode=os.RTLD_NOW)
            ctypes.CDLL(job["path"], mode=os.RTLD_NOW)
        except OSError as problem:
            text = str(problem)
        os.write(writer, json.dumps(text).encode()[:60000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    died = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    print(json.dumps({"path": job["path"], "signal": died, "error": json.loads(said) if said else ""}), flush=True)
"""


@dataclass(frozen=True)
class Row:
    """One file on one torch: the verdict, what happened, and whether they agree."""

    torch: str
    wheel: str
    file: str
    level: Level
    outcome: str
    agrees: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--torch", nargs="+", default=TORCHES)
    parser.add_argument("--wheel", nargs="+", default=WHEELS_SEEN + WHEELS_UNSEEN)
    parser.add_argument("--python", default=getattr(sys, "_base_executable", sys.executable))
    parser.add_argument("--quick", action="store_true", help="one torch and five wheels")
    parser.add_argument("--keep", action="store_true", help="leave the environments in the cache")
    parser.add_argument("--markdown", type=Path, help="write the whole table to this file")
    options = parser.parse_args()
    torches = QUICK_TORCHES if options.quick else options.torch
    wheels = QUICK_WHEELS if options.quick else options.wheel
    if shutil.which("gcc") is None:
        print("error: gcc is needed to build the stub of libcuda.so.1", file=sys.stderr)
        return 2
    bench = Bench(options.cache.resolve(), options.python)
    for torch in torches:
        if not bench.exports_file(torch).exists():
            bench.environment(torch)
            bench.discard(torch, options.keep)
    catalogue = [bench.release(torch) for torch in torches]
    rows: list[Row] = []
    for torch in torches:
        bench.environment(torch)
        for wheel in wheels:
            started = time.monotonic()
            try:
                found = bench.compare(torch, wheel, catalogue)
            except subprocess.CalledProcessError as problem:
                print(f"torch {torch:7} {wheel:34} left out: {problem}", flush=True)
                continue
            rows += found
            right = sum(row.agrees for row in found)
            print(
                f"torch {torch:7} {wheel:34} {right}/{len(found)} agree, {time.monotonic() - started:.0f} s", flush=True
            )
            for row in found:
                if not row.agrees:
                    print(f"    {row.file}: {row.level} but {row.outcome}")
        bench.discard(torch, options.keep)
    print(summary(rows))
    if options.markdown:
        options.markdown.write_text(markdown(rows))
    return 0 if all(row.agrees for row in rows) else 1


def summary(rows: list[Row]) -> str:
    """Return the counts of verdicts against outcomes."""
    counts = Counter((row.level, row.outcome.split(":")[0]) for row in rows)
    lines = [f"{level.value:15} {outcome:8} {count}" for (level, outcome), count in sorted(counts.items())]
    agree = sum(row.agrees for row in rows)
    return "\n".join([*lines, f"{agree} of {len(rows)} agree"])


def markdown(rows: list[Row]) -> str:
    """Return the table of all rows."""
    lines = ["| torch | wheel | file | verdict | dlopen | agrees |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r.torch} | {r.wheel} | {r.file} | {r.level.value} | {r.outcome} | {'yes' if r.agrees else '**no**'} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


class Bench:
    """The environments under a cache directory, and what is done with them."""

    def __init__(self, cache: Path, python: str) -> None:
        self.cache = cache
        self.python = python

    def uv(self, *arguments: str) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("UV_")}
        environment["UV_CACHE_DIR"] = str(self.cache / "uv")
        subprocess.run(["uv", "--no-config", "--quiet", *arguments], check=True, env=environment)

    def prefix(self, torch: str) -> Path:
        return self.cache / f"torch-{torch}"

    def interpreter(self, torch: str) -> str:
        return str(self.prefix(torch) / "bin" / "python")

    def exports_file(self, torch: str) -> Path:
        return self.cache / f"exports-{torch}.json"

    def environment(self, torch: str) -> None:
        """Build the environment of a torch, unless it is there."""
        done = self.prefix(torch) / ".complete"
        if not done.exists():
            shutil.rmtree(self.prefix(torch), ignore_errors=True)
            self.uv("venv", "--python", self.python, str(self.prefix(torch)))
            self.uv("pip", "install", "--system-certs", "--python", self.interpreter(torch), f"torch=={torch}", "numpy")
            done.touch()
        if not self.exports_file(torch).exists():
            libraries = {}
            for path in sorted((self.site(torch) / "torch" / "lib").glob("*.so*")):
                elf = probe.read_file(str(path))
                libraries[path.name] = {"needed": elf.needed, "exports": sorted(elf.exports)}
            text = (self.site(torch) / "torch" / "version.py").read_text()
            version, cuda = (re.search(rf"(?m)^{name}\b.*= '(.*)'", text)[1] for name in ("__version__", "cuda"))
            document = {"version": version, "cuda": cuda, "libraries": libraries}
            self.exports_file(torch).write_text(json.dumps(document))

    def discard(self, torch: str, keep: bool) -> None:
        """Remove the environment of a torch and uv's cache, which would hold every torch's CUDA in the end."""
        if not keep:
            shutil.rmtree(self.prefix(torch), ignore_errors=True)
            self.uv("cache", "clean")

    def site(self, torch: str) -> Path:
        return next((self.prefix(torch) / "lib").glob("python3*/site-packages"))

    def release(self, torch: str) -> TorchRelease:
        """Return a torch as a release of the catalogue."""
        document = json.loads(self.exports_file(torch).read_text())
        libraries = document["libraries"]
        needed = {name: tuple(found["needed"]) for name, found in libraries.items()}
        loaded, pending = set(), ["libtorch_python.so", "libtorch_global_deps.so"]
        while pending:
            name = pending.pop()
            if name not in loaded:
                loaded.add(name)
                pending += needed.get(name, ())
        return TorchRelease(
            version=document["version"],
            cuda=document["cuda"],
            exports={name: frozenset(found["exports"]) for name, found in libraries.items()},
            needed=needed,
            brings=brought_libraries(loaded, document["cuda"]),
        )

    def compare(self, torch: str, wheel: str, catalogue: list[TorchRelease]) -> list[Row]:
        """Install a wheel, judge it, open its files, remove it, and return a row for each file."""
        name = wheel.split("==")[0]
        python = self.interpreter(torch)
        self.uv("pip", "install", "--system-certs", "--no-deps", "--python", python, wheel)
        try:
            with tempfile.TemporaryDirectory() as stub:
                self.build_stub(torch, name, Path(stub))
                said = subprocess.run(
                    [sys.executable, str(files() / "abi_probe.py"), str(self.prefix(torch)), "--library-path", stub],
                    check=True,
                    capture_output=True,
                )
                environment = parse_environment(json.loads(said.stdout))
                distribution = next(d for d in environment.distributions if d.name == name)
                verdict = judge(distribution, environment, catalogue=catalogue)
                jobs = [
                    {
                        "path": str(self.site(torch) / file.path),
                        "first": self.before(torch, environment.load(file, distribution).loaded_before, distribution),
                        "limit_s": _LOAD_LIMIT_S,
                    }
                    for file in distribution.files
                ]
                outcomes = self.open(python, stub, jobs)
        finally:
            self.uv("pip", "uninstall", "--python", python, name)
        return [
            row(torch, wheel, verdict, file, outcome)
            for file, outcome in zip(distribution.files, outcomes, strict=True)
        ]

    def before(self, torch: str, names: tuple[str, ...], distribution: Distribution) -> list[str]:
        """Return the files of a distribution that answer to names which no search path leads to."""
        found = []
        for name in names:
            file = next(f for f in distribution.files if name in (f.name, f.soname))
            found.append(str(self.site(torch) / file.path))
        return found

    def build_stub(self, torch: str, distribution: str, folder: Path) -> None:
        """Build a libcuda.so.1 with every driver name that the distribution's files leave undefined."""
        _, owners = probe.distributions(str(self.site(torch)))
        names = {"cuInit"}
        for path, owner in owners.items():
            if owner == distribution:
                try:
                    undefined = probe.read_file(path).undefined
                except probe.ElfError:
                    continue
                names |= {symbol.name for symbol in undefined if _DRIVER_NAME.match(symbol.name)}
        # 100 is CUDA_ERROR_NO_DEVICE.
        source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names))
        (folder / "stub.c").write_text(source)
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "stub.c"],
            check=True,
            cwd=folder,
        )

    def open(self, python: str, stub: str, jobs: list[dict[str, object]]) -> list[dict[str, object]]:
        """Return what became of each file when it was opened after `import torch`."""
        environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "LD_LIBRARY_PATH": stub}
        said = subprocess.run(
            [python, "-c", _OPENER], input=json.dumps(jobs), capture_output=True, text=True, env=environment
        )
        outcomes = [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")]
        if len(outcomes) != len(jobs):
            raise SystemExit(
                f"error: the opener answered for {len(outcomes)} of {len(jobs)} files\n{said.stderr[-2000:]}"
            )
        return outcomes


def row(torch: str, wheel: str, verdict: Verdict, file: SharedFile, outcome: dict[str, object]) -> Row:
    """Return whether a verdict on a file and what happened to it agree."""
    said = next(f for f in verdict.files if f.path == file.path)
    error, died = str(outcome["error"]), int(str(outcome["signal"]))
    if died:
        text, agrees = f"dies: signal {died}", said.level is Level.LAYOUT_RISK
    elif not error:
        text, agrees = "loads", not said.level.is_broken
    else:
        names = {n for f in said.findings if f.kind.startswith("broken") for n in (f.symbol, f.library) if n}
        named = next((n for n in sorted(names, key=len, reverse=True) if n in error), None)
        text, agrees = f"fails: {named or error[-120:]}", said.level.is_broken and named is not None
    return Row(torch, wheel, file.path, said.level, text, agrees)


if __name__ == "__main__":
    sys.exit(main())
