"""Build a second environment that differs by one wheel, with bringup and with `pip install` into a new venv.

Both have built the first environment before, so both have every other wheel in their caches. bringup's figure is
its whole build on a host (`files/host_env.py`): new venv, hard links out of its cache, byte code, every file
compared with its RECORD, synced to disk, marker. pip's is `python -m venv` and one `pip install --no-deps
--require-hashes` of the same files from the same server, byte code included, nothing compared, nothing synced.
uv's is `uv pip install` with hard links and the same cache, which compares and syncs nothing either.

Written bytes are those that the kernel charged to the processes (ru_oublock); bytes on disk are the blocks of
files that no other environment or cache shares.

Usage: environment_build.py [--wheels 40] [--library-mib 60] [--rounds 5] [--directory DIR]
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import uv

from bringup import paths
from bringup.lab.wheels_pack import pack

ALL = ("bringup", "uv", "pip")
PYTHON = Path("/usr/bin/python3")


@dataclass(frozen=True)
class Cost:
    """What one build cost. ``disk_bytes`` None where it was not counted."""

    seconds: float
    cpu_s: float
    written_bytes: int
    disk_bytes: int


class Quiet(SimpleHTTPRequestHandler):
    """Serve files and say nothing; pages change, and uv would believe an old one for ten minutes."""

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        del format, arguments


def modules() -> list[bytes]:
    """Return real Python sources: byte code costs what it costs."""
    found = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [path.read_bytes() for path in found if 2_000 < path.stat().st_size < 60_000]


def write_wheels(index: Path, count: int, library_mib: int) -> list[Path]:
    """Write one wheel with a large library, a tenth with a small one, and Python sources in all of them."""
    sources = modules()
    made = []
    for number in range(count):
        name = f"demo-{number:03d}"
        files = {f"demo_{number:03d}/m{i}.py": sources[(number * 7 + i) % len(sources)] for i in range(30)}
        if number == 0:
            files["demo_000/libbig.so"] = library(library_mib << 20)
        elif number % 10 == 1:
            files[f"demo_{number:03d}/libsmall.so"] = library(4 << 20)
        made.append(publish(index, name, "1.0", files))
    return made


def library(size_bytes: int) -> bytes:
    """Return bytes that compress about as well as machine code does, to a half."""
    return os.urandom(size_bytes // 2) + bytes(size_bytes - size_bytes // 2)


def publish(index: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """Write a wheel and the page that lists it."""
    directory = index / "simple" / name
    wheel = pack(directory, name=name, version=version, tag="py3-none-any", files=files)
    lines = [
        f'<a href="{path.name}#sha256={sha256(path)}">{path.name}</a><br>' for path in sorted(directory.glob("*.whl"))
    ]
    (directory / "index.html").write_text("<!DOCTYPE html>\n" + "\n".join(lines))
    return wheel


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def requirement(wheel: Path) -> dict[str, str]:
    name, version = wheel.name.split("-")[:2]
    return {"name": name.replace("_", "-"), "version": version, "sha256": sha256(wheel)}


class Bench:
    """Three ways to the same environment, each with caches of its own."""

    def __init__(self, work: Path, url: str) -> None:
        self.work = work
        self.url = url
        self.python = ".".join(
            subprocess.run([PYTHON, "-V"], capture_output=True, text=True, check=True).stdout.split()[1].split(".")[:2]
        )
        self._number = 0

    def build(self, how: str, wheels: list[Path]) -> tuple[Cost, Path]:
        """Build an environment from wheels and return its cost and its path."""
        self._number += 1
        env = self.work / how / "envs" / f"{self._number:012d}-1"
        before, known = usage(), inodes(self.work / how)
        started = time.perf_counter()
        getattr(self, f"_{how}")(env, [requirement(wheel) for wheel in wheels])
        seconds, after = time.perf_counter() - started, usage()
        # What only the cache holds was fetched for this environment too.
        found = {**inodes(env), **inodes(self.work / how)}
        disk_bytes = sum(size for inode, size in found.items() if inode not in known)
        return Cost(seconds, after[0] - before[0], (after[1] - before[1]) * 512, disk_bytes), env

    def _bringup(self, env: Path, files: list[dict[str, str]]) -> None:
        home, run_dir = self.work / "bringup", self.work / "run"
        run_dir.mkdir(exist_ok=True)
        order = run_dir / "order.json"
        calls = [{"index": "demo", "url": f"{self.url}/simple", "files": files}]
        order.write_text(
            json.dumps(
                {
                    "schema": 1, "home": str(home), "jit_cache": str(self.work / "jit"), "env": str(env),
                    "digest": env.name[:12], "generation": 1, "platform": "demo", "python": self.python,
                    "uv": os.fspath(uv.find_uv_bin()), "proxy": None, "patches": [],
                    "steps": [{"name": "all", "imports": [], "calls": calls}],
                }
            )
        )  # fmt: skip
        builder = [str(PYTHON), str(paths.files() / "host_env.py")]
        for words in (["create"], ["install"], ["finish"]):
            step = ["all"] if words == ["install"] else []
            run([*builder, *words, str(order), *step], {"BRINGUP_RUN_DIR": str(run_dir)})
        log = json.loads((run_dir / "build.json").read_text())
        installed = next(entry for entry in log["actions"] if entry["action"] == "install")
        assert len(installed["added"]) == len(files), installed
        assert not installed["unlike"], installed

    def _pip(self, env: Path, files: list[dict[str, str]]) -> None:
        run([str(PYTHON), "-m", "venv", str(env)])
        variables = {"PIP_CACHE_DIR": str(self.work / "pip" / "cache"), "PIP_CONFIG_FILE": os.devnull}
        options = ["--no-deps", "--require-hashes", "--disable-pip-version-check", "--index-url", f"{self.url}/simple"]
        pip = [str(env / "bin" / "python"), "-m", "pip", "install", "--quiet", *options]
        run([*pip, "--requirement", self._requirements(files)], variables)

    def _uv(self, env: Path, files: list[dict[str, str]]) -> None:
        tool = [os.fspath(uv.find_uv_bin()), "--no-config", "--cache-dir", str(self.work / "uv" / "cache"), "--quiet"]
        run([*tool, "venv", "--no-project", "--python", str(PYTHON), str(env)])
        options = ["--no-deps", "--require-hashes", "--compile-bytecode", "--link-mode", "hardlink"]
        target = ["--python", str(env / "bin" / "python"), "--default-index", f"{self.url}/simple"]
        run([*tool, "pip", "install", *options, *target, "--requirements", self._requirements(files)])

    def _requirements(self, files: list[dict[str, str]]) -> str:
        path = self.work / "requirements.txt"
        path.write_text("".join(f"{f['name']}=={f['version']} --hash=sha256:{f['sha256']}\n" for f in files))
        return str(path)


def run(argv: list[str], more: dict[str, str] | None = None) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    done = subprocess.run(argv, env={**environment, **(more or {})}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)}\n{done.stdout}{done.stderr}")


def usage() -> tuple[float, int]:
    """Return processor seconds and written blocks of all children that have ended."""
    seen = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seen.ru_utime + seen.ru_stime, seen.ru_oublock


def inodes(root: Path) -> dict[int, int]:
    """Return the bytes on disk of every file below a directory, by inode."""
    found = {}
    for path in root.rglob("*"):
        if not path.is_dir() or path.is_symlink():
            seen = path.lstat()
            found[seen.st_ino] = seen.st_blocks * 512
    return found


def served(directory: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(directory)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def measure(work: Path, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, list[Cost]]:
    """Return the costs of every second environment, by who built it; rounds go over all in turn."""
    index = work / "index"
    wheels = write_wheels(index, options.wheels, options.library_mib)
    content = sum(info.file_size for wheel in wheels for info in zipfile.ZipFile(wheel).infolist())
    say(f"{len(wheels)} wheels, {sum(w.stat().st_size for w in wheels) / 1e6:.0f} MB, {content / 1e6:.0f} MB unpacked")
    costs: dict[str, list[Cost]] = {how: [] for how in ALL}
    for url in served(index):
        bench = Bench(work, url)
        for how in ALL:
            first, _ = bench.build(how, wheels)
            say(f"first environment, {how}: {first.seconds:.1f} s, {first.written_bytes / 1e6:.0f} MB written")
        for number in range(options.rounds):
            name = f"demo-{options.wheels - 1:03d}"
            module = name.replace("-", "_")
            fresh = {f"{module}/m{i}.py": text + b"# %d\n" % number for i, text in enumerate(modules()[:30])}
            changed = publish(index, name, f"1.{number + 1}", fresh)
            for how in ALL:
                cost, env = bench.build(how, [*wheels[:-1], changed])
                costs[how].append(cost)
                shutil.rmtree(env)
    return costs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--wheels", type=int, default=40)
    parser.add_argument("--library-mib", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="a directory on the disk that counts; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bringup-benchmark-", dir=options.directory) as directory:
        costs = measure(Path(directory), options, print)
    print(f"second environment, one wheel of {options.wheels} differs; medians of {options.rounds}:")
    keys = ("seconds", "cpu_s", "written_bytes", "disk_bytes")
    medians = {how: [statistics.median(getattr(c, key) for c in found) for key in keys] for how, found in costs.items()}
    for how, (seconds, cpu_s, written, disk) in medians.items():
        time_said = f"{seconds:7.2f} s {cpu_s:7.2f} s of CPU"
        print(f"  {how:8} {time_said} {written / 1e6:8.1f} MB written {disk / 1e6:8.1f} MB on disk")
    for how in ALL[1:]:
        ratios = [theirs / ours for theirs, ours in zip(medians[how], medians["bringup"], strict=True)]
        print(
            f"  {how} against bringup: {ratios[0]:.1f} x the time, {ratios[1]:.1f} x the CPU, "
            f"{ratios[2]:.1f} x the bytes written, {ratios[3]:.1f} x the bytes on disk"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
