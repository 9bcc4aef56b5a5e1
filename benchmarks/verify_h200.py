#!/usr/bin/env python3
"""Run everything that verify measures on a host with two or more GPUs, and write one JSON document.

Usage:
  python3 benchmarks/verify_h200.py measure --output RESULT.json [--python PATH] [--only PART,...] [--healthy N]
  python3 benchmarks/verify_h200.py judge RESULT.json

``measure`` needs the standard library here and torch in ``--python``. Parts: stack (stack_check), full (three
times --profile full), limits (little locked memory, far processors), healthy (N quick runs), faults (each induced
fault), smi (nvidia-smi as text), warmup (FlashInfer's modules compiled beside the faults), flashinfer (its
all-reduce), torchrun (started by it). Environment variables that keep NVLink multicast off stay as they are.
``judge`` needs bringup and no GPU: it reads the documents with the judge of ``bringup verify``, which is not told
which fault was set, and prints the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "files" / "allreduce_bench.py"
STACK_CHECK = ROOT / "files" / "stack_check.py"
WARMUP = ROOT / "files" / "jit_warmup.py"
PROBE = ROOT / "files" / "host_probe.py"

COPYING_NEIGHBOUR = """
import torch, sys
a = torch.ones(1 << 30, dtype=torch.uint8, device='cuda:0'); b = torch.empty_like(a, device='cuda:1')
b.copy_(a); torch.cuda.synchronize(0); torch.cuda.synchronize(1)
print('ready', flush=True)
while True:
    for _ in range(16): b.copy_(a, non_blocking=True)
    torch.cuda.synchronize(0); torch.cuda.synchronize(1)
"""
COMPUTING_NEIGHBOUR = """
import torch
a = torch.randn(8192, 8192, dtype=torch.bfloat16, device='cuda:1'); b = a.clone()
c = a @ b; torch.cuda.synchronize(1)
print('ready', flush=True)
while True:
    for _ in range(16): torch.mm(a, b, out=c)
    torch.cuda.synchronize(1)
"""

# name of the fault -> (environment, bench arguments, neighbour program)
FAULTS: dict[str, tuple[dict[str, str], list[str], str | None]] = {
    "p2p_off": ({"NCCL_P2P_DISABLE": "1"}, [], None),
    "sockets_only": ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, [], None),
    "channels_2": ({"NCCL_MAX_NCHANNELS": "2"}, [], None),
    "channels_8": ({"NCCL_MAX_NCHANNELS": "8"}, [], None),
    "channels_16": ({"NCCL_MAX_NCHANNELS": "16"}, [], None),
    "neighbour_copying": ({}, [], COPYING_NEIGHBOUR),
    "neighbour_computing": ({}, [], COMPUTING_NEIGHBOUR),
    "rank_stopped": ({}, ["--inject", "stop:1@nccl_graph"], None),
    "rank_killed": ({}, ["--inject", "kill:1@nccl_graph"], None),
    "wrong_element": ({}, ["--inject", "wrong-element:1@nccl_graph"], None),
}


class Recorder:
    """Run programs one after the other and keep what they said."""

    def __init__(self, python: str, output: Path, logs: Path | None) -> None:
        self.python = python
        self.output = output
        self.logs = logs
        self.started = time.monotonic()
        self.result: dict[str, object] = {
            "schema": 1,
            "program": "verify_h200",
            "python": platform.python_version(),
            "runs": [],
            "texts": {},
        }

    def save(self) -> None:
        """Write what there is so far, so that a cut-off run loses nothing."""
        self.result["seconds"] = round(time.monotonic() - self.started, 1)
        temporary = self.output.with_suffix(".part")
        temporary.write_text(json.dumps(self.result) + "\n")
        temporary.replace(self.output)

    def run(self, label: str, command: list[str], environment: dict[str, str], limit_s: float = 150) -> None:
        """Run one program that prints a JSON document last, and record it under a label."""
        begun = time.monotonic()
        merged = {**os.environ, **environment}
        if self.logs is not None:
            merged["BENCH_KEEP_LOGS"] = str(self.logs / label.replace(" ", "_"))
        record: dict[str, object] = {"label": label, "environment": environment, "document": None}
        try:
            done = subprocess.run(command, env=merged, capture_output=True, text=True, timeout=limit_s)
            record["exit_status"] = done.returncode
            lines = done.stdout.strip().splitlines()
            record["document"] = json.loads(lines[-1]) if lines else None
            record["stderr"] = done.stderr[-3000:]
        except subprocess.TimeoutExpired:
            record["exit_status"] = "no end within the limit"
        except json.JSONDecodeError as error:
            record["error"] = f"no JSON document: {error}"
        record["seconds"] = round(time.monotonic() - begun, 2)
        runs = self.result["runs"]
        assert isinstance(runs, list)
        runs.append(record)
        print(f"{label}: status {record.get('exit_status')}, {record['seconds']} s", file=sys.stderr, flush=True)
        self.save()

    def collect(self, label: str, process: subprocess.Popen[str], limit_s: float) -> None:
        """Wait for a program that was started earlier, and record its document."""
        record: dict[str, object] = {"label": label, "environment": {}, "document": None}
        try:
            printed = process.communicate(timeout=limit_s)[0].strip().splitlines()
            record["document"] = json.loads(printed[-1]) if printed else None
            record["exit_status"] = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()
            record["exit_status"] = "no end within the limit"
        runs = self.result["runs"]
        assert isinstance(runs, list)
        runs.append(record)
        print(f"{label}: status {record['exit_status']}", file=sys.stderr, flush=True)
        self.save()

    def bench(self, label: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        """Run the bench."""
        self.run(label, [self.python, str(BENCH), *arguments], environment or {})

    def text(self, name: str, command: list[str]) -> None:
        """Keep what a program prints, as it is."""
        texts = self.result["texts"]
        assert isinstance(texts, dict)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            texts[name] = done.stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            texts[name] = f"not run: {error}"


@contextmanager
def neighbour(python: str, program: str | None) -> Iterator[None]:
    """Run somebody else's work on the GPUs for the time of the block."""
    if program is None:
        yield
        return
    process = subprocess.Popen([python, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


def induce_faults(recorder: Recorder, options: argparse.Namespace, common: list[str]) -> None:
    """Run the bench once under each fault."""
    for name, (environment, arguments, program) in FAULTS.items():
        if options.faults and name not in options.faults.split(","):
            continue
        with neighbour(options.python, program):
            recorder.bench(f"fault {name}", *arguments, *common, environment=environment)


def start_warmup(options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start to compile FlashInfer's modules for this machine, and copies for a user that is not root."""
    command = [sys.executable, str(WARMUP), "--python", options.python, "--cache", options.cache]
    command += ["--capability", options.capability, "--cuda-home", "/usr/local/cuda", "--user", "nobody"]
    for module in options.modules.split(","):
        command += ["--module", module]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def stack_check(options: argparse.Namespace) -> list[str]:
    """Return the command of the stack check."""
    command = [sys.executable, str(STACK_CHECK), "--python", options.python]
    for module in options.imports.split(","):
        command += ["--import", module]
    return command


def limited(recorder: Recorder, options: argparse.Namespace, common: list[str]) -> None:
    """Look and measure with little memory that may be locked, and on the processors farthest from the GPUs.

    On a machine with one NUMA node none is far: then the first four stand in, which shows that pinning alone is
    nobody's fault.
    """
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    far = nodes[-1].joinpath("cpulist").read_text().strip() if len(nodes) > 1 else "0-3"
    recorder.text("far_processors", ["echo", f"{len(nodes)} NUMA nodes, {far}"])
    ways = {
        "memlock_64k": ["sh", "-c", 'ulimit -l 64; exec "$@"', "sh"],
        "far_processors": ["taskset", "--cpu-list", far],
    }
    for name, prefix in ways.items():
        recorder.run(f"stack_check {name}", [*prefix, *stack_check(options)], {})
        recorder.run(f"{name}", [*prefix, recorder.python, str(BENCH), *common], {})


def measure(options: argparse.Namespace) -> int:
    """Run the parts asked for."""
    recorder = Recorder(options.python, Path(options.output), Path(options.logs) if options.logs else None)
    parts = options.only.split(",")
    common = ["--ranks", str(options.ranks)] if options.ranks else []
    recorder.text("date", ["date", "-u", "+%Y-%m-%dT%H:%M:%SZ"])
    if "smi" in parts:
        for name, command in {
            "smi_q_x": ["nvidia-smi", "-q", "-x"],
            "nvlink_s": ["nvidia-smi", "nvlink", "-s"],
            "nvlink_e": ["nvidia-smi", "nvlink", "-e"],
            "topo_m": ["nvidia-smi", "topo", "-m"],
            "topo_p2p_r": ["nvidia-smi", "topo", "-p2p", "r"],
            "cores": ["nproc"],
        }.items():
            recorder.text(name, command)
    if "probe" in parts and PROBE.exists():
        recorder.run("host_probe", [sys.executable, str(PROBE)], {})
    if "stack" in parts:
        command = stack_check(options)
        for soname in ("libnvrtc.so.13", "libcudart.so.13", "libnccl.so.2", "libcuda.so.1", "libcublas.so.13"):
            command += ["--soname", soname]
        command += ["--nvrtc", "13.0=libnvrtc.so.13", "--nvrtc", "12.8=libnvrtc.so.12"]
        recorder.run("stack_check first", command, {})
        recorder.run("stack_check again", command, {})
    if "limits" in parts:
        limited(recorder, options, common)
    if "first" in parts:
        recorder.bench("first", *common)
    warming = start_warmup(options) if "warmup" in parts else None
    if "faults" in parts:
        induce_faults(recorder, options, common)
    if "healthy" in parts:
        for number in range(1, options.healthy + 1):
            recorder.bench(f"healthy {number}", *common)
    if "full" in parts:
        for number in range(1, 4):
            recorder.bench(f"full {number}", "--profile", "full", *common)
    if warming is not None:
        recorder.collect("jit_warmup", warming, 180)
        os.environ["FLASHINFER_WORKSPACE_BASE"] = f"{options.cache}/root/flashinfer"
    if "torchrun" in parts:
        command = [options.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        recorder.run("torchrun", [*command, str(BENCH), "--profile", "smoke"], {})
    if "flashinfer" in parts:
        recorder.bench("flashinfer", "--backends", "nccl,flashinfer_custom,flashinfer_fused", *common)
    recorder.save()
    return 0


# nccl-tests 2.19.6 built against the NCCL that torch loads, run beside the bench on a machine of the same kind:
# all_reduce_perf -t 2 -g 1 -d bfloat16 -w 5 -n 20 -c 0, out of place; the small payloads with -G 10.
NCCL_TESTS = {"driver": "580.159.04", "torch": "2.11.0+cu130", "nccl": "2.28.9", "ranks": 2}
NCCL_TESTS_GRAPH_US = {8: 6.66, 16: 6.85, 32: 6.96, 64: 7.14, 128: 7.33, 256: 8.39, 512: 10.00}
NCCL_TESTS_BUSBW = {
    32: 244.8,
    64: 272.0,
    128: 288.0,
    256: 302.3,
    512: 319.7,
    1024: 333.9,
    2048: 343.0,
    4096: 350.8,
    8192: 353.2,
}


def figures(documents: list[dict[str, Any]], backend: str, payload_bytes: int, name: str) -> list[float]:
    """Return one figure of each document that has it."""
    return [
        row[name]
        for document in documents
        for row in document["rows"]
        if row["backend"] == backend and row["payload_bytes"] == payload_bytes
    ]


def compare(documents: list[dict[str, Any]]) -> bool:
    """Print the medians of the full runs beside nccl-tests; return whether every ratio is as it should be."""
    system = documents[0]["system"]
    found = {key: system[key] for key in NCCL_TESTS}
    is_same = found == NCCL_TESTS
    print(f"driver {found['driver']}, torch {found['torch']}, NCCL {found['nccl']}, {found['ranks']} GPUs")
    if not is_same:
        print(f"nccl-tests was run with {NCCL_TESTS}, so the ratios are shown and not judged")
    is_good = True
    print("\n| payload | NCCL in a graph, us | nccl-tests | ratio |\n|---|---|---|---|")
    for kib, theirs in NCCL_TESTS_GRAPH_US.items():
        ours = median(figures(documents, "nccl_graph", kib << 10, "median_us"))
        is_good &= ours / theirs <= 1.03
        print(f"| {kib} KiB | {ours:.2f} | {theirs:.2f} | {ours / theirs:.3f} |")
    print("\n| payload | NCCL, GB/s busbw | nccl-tests | ratio |\n|---|---|---|---|")
    for mib, theirs in NCCL_TESTS_BUSBW.items():
        ours = median(figures(documents, "nccl", mib << 20, "busbw_gb_per_s"))
        is_good &= ours / theirs >= 0.98
        print(f"| {mib} MiB | {ours:.1f} | {theirs:.1f} | {ours / theirs:.3f} |")
    return is_good or not is_same


def backends(documents: list[dict[str, Any]]) -> None:
    """Print every backend's medians: microseconds, and GB/s where the payload is large."""
    names = sorted({row["backend"] for document in documents for row in document["rows"]})
    payloads = sorted({row["payload_bytes"] for document in documents for row in document["rows"]})
    print("\n| payload | " + " | ".join(names) + " |\n|---" + "|---" * len(names) + "|")
    for payload in payloads:
        cells = []
        for name in names:
            times = figures(documents, name, payload, "median_us")
            speeds = figures(documents, name, payload, "busbw_gb_per_s")
            large = f" ({median(speeds):.0f} GB/s)" if times and payload >= 32 << 20 else ""
            cells.append(f"{median(times):.4g}{large}" if times else "")
        print(f"| {size(payload)} | " + " | ".join(cells) + " |")


def size(payload_bytes: int) -> str:
    """Return a payload as a person writes it."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if payload_bytes >= 1 << shift:
            return f"{payload_bytes >> shift} {unit}"
    return f"{payload_bytes} B"


def spread(documents: list[dict[str, Any]]) -> None:
    """Print how far the medians of equal runs are apart."""
    print("\n| backend | payload | lowest | highest | spread | worst p99/median |\n|---|---|---|---|---|---|")
    rows = {(row["backend"], row["payload_bytes"]) for document in documents for row in document["rows"]}
    for backend, payload in sorted(rows):
        times = figures(documents, backend, payload, "median_us")
        worst = max(
            row["p99_us"] / row["median_us"]
            for document in documents
            for row in document["rows"]
            if (row["backend"], row["payload_bytes"]) == (backend, payload)
        )
        wide = (max(times) - min(times)) / median(times)
        print(f"| {backend} | {size(payload)} | {min(times):.2f} | {max(times):.2f} | {wide:.1%} | {worst:.2f} |")


def judge(options: argparse.Namespace) -> int:
    """Judge every document as verify does, blind to what was set, and print the tables."""
    sys.path.insert(0, str(ROOT))
    from bringup.bench import Runs, Table, parse
    from bringup.bench import judge as verdict_of

    table = Table.from_toml((ROOT / "bringup" / "data" / "allreduce.toml").read_text(encoding="utf-8"))
    runs = read(Path(options.result))
    full = [run["document"] for run in runs if run["label"].startswith("full ")]
    is_good = True
    if full:
        is_good &= compare(full)
        backends(full + [run["document"] for run in runs if run["label"] == "flashinfer"])
    healthy = [run["document"] for run in runs if run["label"].startswith("healthy ")]
    if healthy:
        spread(healthy)
    print("\n| run | seconds | verdict | cause | what verify says |\n|---|---|---|---|---|")
    for run in runs:
        document = blind(run["document"])
        verdict = verdict_of(Runs(parse(document)), table)
        causes = ", ".join(cause.name if cause.is_certain else f"likely {cause.name}" for cause in verdict.causes)
        says = verdict.findings[0].cause if verdict.findings else ""
        print(f"| {run['label']} | {run['seconds']} | {verdict.state} | {causes or 'none'} | {says} |")
        if run["label"] in EXPECTED:
            is_good &= [cause.name for cause in verdict.causes if cause.is_certain] == [EXPECTED[run["label"]]]
        else:
            is_good &= verdict.state == "ok" and not verdict.findings
    health_of(Path(options.result))
    print("\nas it should be" if is_good else "\nNOT as it should be")
    return 0 if is_good else 1


def health_of(path: Path) -> None:
    """Print what each stack check says of the host, as verify does."""
    from bringup.findings import health

    if path.suffix == ".jsonl":
        return
    for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
        section = (run["document"] or {}).get("health")
        if section:
            print(f"\n{run['label']}")
            for finding in health.findings(health.parse(section), nvlinks=18):
                print(f"  {finding.code} {finding.severity}: {finding.cause}")


EXPECTED = {
    "fault p2p_off": "p2p_off",
    "fault sockets_only": "sockets",
    "fault channels_2": "few_channels",
    "fault channels_8": "few_channels",
    "fault channels_16": "few_channels",
    "fault neighbour_copying": "neighbour_on_link",
    "fault neighbour_computing": "neighbour_on_gpu",
    "fault rank_stopped": "rank_stopped",
    "fault rank_killed": "rank_killed",
    "fault wrong_element": "wrong_result",
}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the bench's runs of a result, or of a fixture with one run a line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    runs: list[dict[str, Any]] = json.loads(text)["runs"]
    return [run for run in runs if (run["document"] or {}).get("program") == "allreduce_bench"]


def blind(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document without everything that tells what was set."""
    seen = {key: value for key, value in document.items() if key != "argv"}
    seen["system"] = {key: value for key, value in document["system"].items() if key != "environment"}
    if document["nccl_log"] is not None:
        seen["nccl_log"] = {**document["nccl_log"], "settings": {}}
    return seen


def main() -> int:
    """Read the command line."""
    line = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = line.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--output", required=True)
    measuring.add_argument("--python", default=shutil.which("python3") or sys.executable)
    measuring.add_argument(
        "--only", default="smi,probe,stack,limits,first,warmup,faults,healthy,full,torchrun,flashinfer"
    )
    measuring.add_argument("--healthy", type=int, default=10)
    measuring.add_argument("--faults", default="")
    measuring.add_argument("--imports", default="torch,triton")
    measuring.add_argument("--ranks", type=int, default=0)
    measuring.add_argument("--logs", default="")
    measuring.add_argument("--cache", default="/var/cache/bringup/benchmark")
    measuring.add_argument("--capability", default="9.0")
    measuring.add_argument("--modules", default="trtllm_comm,vllm_comm,norm")
    judging = commands.add_parser("judge")
    judging.add_argument("result")
    options = line.parse_args()
    return measure(options) if options.command == "measure" else judge(options)


if __name__ == "__main__":
    sys.exit(main())
