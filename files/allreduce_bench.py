#!/usr/bin/env python3
"""Measure all-reduce over the GPUs of one host, backend by backend, and report in one JSON document.

Usage:
  allreduce_bench.py [--ranks N|auto] [--device auto|cuda|cpu] [--profile quick|full|smoke]
                     [--backends NAME,...] [--require NAME,...] [--payloads BYTES,...] [--hidden-size N]
                     [--dtype bfloat16|float16|float32] [--seed N] [--allow-multicast]
                     [--timeout S] [--setup-timeout S] [--backend-timeout S] [--output FILE]
                     [--node-output FILE]

It needs torch and nothing else, and starts its own ranks, one process a GPU. Under torchrun (or with RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set) it is one rank of a job that somebody else started,
on one host or across several; then rank 0 writes the document. Backends that work within one host only are
missing across several, with that reason. A rank ends with the torchrun that started it.

  --ranks            processes to start; auto: every visible GPU, or 2 on CPU. At least 2.
  --device           auto takes CUDA when a GPU answers, else gloo on CPU; the document says which.
  --profile          quick: 8 KiB-1 MiB and 64 MiB-1 GiB; full: 8 KiB-8 GiB; smoke: three small payloads.
  --backends         default: all that fit the device (see BACKENDS); unknown names are a usage error.
  --require          backends that must be there; one missing makes the status 4. Default: nccl, or gloo.
  --payloads         replaces the profile's sizes. Sizes above a sixth of the free memory are left out.
  --hidden-size      elements of one token in flashinfer_fused (4096).
  --allow-multicast  also run what creates NVLink multicast objects (symm_multimem).
  --timeout          seconds for everything (180); --setup-timeout until the first backend starts (120);
                     --backend-timeout for each backend (60).
  --output           the document is also written here, atomically, with mode 0644.
  --node-output      under torchrun: each host's first rank keeps here how far it came, whatever becomes of rank 0.

The last line of stdout is the document; everything else goes to stderr. Exit status: 0 measured, 1 crash or
timeout, 2 usage or environment, 4 a required backend is missing, 5 a wrong result. The document is printed and
written in every one of these cases; its fields are described in docs/reference/allreduce-bench.md. Under
torchrun the status seen from outside is only 0 or 1, because torchrun replaces it: read the document.

The script knows no limit and gives no verdict. Units stand in the names; GB is 10**9 bytes.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import datetime
import faulthandler
import fcntl
import glob
import importlib
import json
import math
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

SCHEMA = 1
MEASURED, CRASHED, USAGE, BACKEND_MISSING, WRONG_RESULT = 0, 1, 2, 4, 5
OUTCOMES = {0: "measured", 1: "crash", 2: "usage", 4: "backend_missing", 5: "wrong_result"}

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LATENCY_PAYLOADS = [8 * KIB, 64 * KIB, 256 * KIB, MIB]
BANDWIDTH_PAYLOADS = [64 * MIB, 256 * MIB, GIB]
PROFILES = {
    "quick": LATENCY_PAYLOADS + BANDWIDTH_PAYLOADS,
    "full": [8 * KIB << shift for shift in range(21)],
    "smoke": [8 * KIB, 256 * KIB, 4 * MIB],
}
# gloo moves data through host memory at a few GB/s at best: larger payloads would only make it slow to say so.
GLOO_MAX_PAYLOAD_BYTES = 16 * MIB
SMALL_PAYLOAD_BYTES = MIB

# How long a rank may be seen stopped (state T) before the run is given up: a stopped rank never answers, and
# waiting for the backend's whole time limit would tell nothing more.
STOPPED_AFTER_S = 5.0
WATCH_EVERY_S = 0.25
# After the first rank has died the others get this long to report what they saw.
GRACE_S = 1.5

# Across hosts a network may be a hundred times slower than links within one. Each row gets this long, so that all
# rows of a backend end within its limit, and a payload is left out when one operation would take longer than that.
ROW_LIMIT_S = 8.0
OPERATION_LIMIT_S = 2.0

CANARY_ELEMENTS = 64
# Sums of integers up to 256 are exact in bfloat16 (8 bits of significand), whatever the order of addition.
EXACT_INTEGER_LIMIT = 256
# Rounding of the sum to the payload's type, with a factor of about five for the order of addition.
RELATIVE_L2_LIMIT = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}
# In-place sums grow by the number of ranks with every operation of a sample. From 2**-100 on they have 200 powers
# of two to go in bfloat16 and float32 (up to 2**127, with room for the data itself), and they are never zero.
IN_PLACE_SCALE = 2.0**-100
IN_PLACE_POWERS = 200
# float16 ends at 2**15: four operations over eight ranks, from 2**-14 on.
IN_PLACE_SCALE_FLOAT16 = 2.0**-14
IN_PLACE_POWERS_FLOAT16 = 12

CUDA_MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED


class Missing(Exception):
    """A backend is not installed here or this machine cannot run it; the text is the reason."""


class Refusal(Exception):
    """The command line or the environment does not allow a measurement."""


# ---------------------------------------------------------------------------------------------- arithmetic


def algbw_gb_per_s(payload_bytes, seconds):
    """Return payload over time in GB/s (10**9 bytes)."""
    return payload_bytes / seconds / 1e9


def busbw_gb_per_s(payload_bytes, seconds, ranks):
    """Return all-reduce bus bandwidth in GB/s: algbw times 2(n-1)/n (nccl-tests, doc/PERFORMANCE.md)."""
    return algbw_gb_per_s(payload_bytes, seconds) * 2 * (ranks - 1) / ranks


def percentile(values, fraction):
    """Return the nearest-rank percentile of a non-empty list."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def median(values):
    """Return the middle value, or the mean of the middle two."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def sampling(payload_bytes, is_cpu=False):
    """Return (operations in a sample, warm-up samples, samples) for a payload.

    Forty operations a sample hide the cost of launching a graph to within 2 % (five: 13 %); large payloads need
    few because one operation already takes milliseconds.
    """
    if is_cpu:
        return (5, 2, 10) if payload_bytes <= SMALL_PAYLOAD_BYTES else (1, 1, 5)
    if payload_bytes <= MIB:
        return 40, 10, 100
    if payload_bytes <= 16 * MIB:
        return 10, 5, 40
    if payload_bytes <= 256 * MIB:
        return 4, 3, 20
    return (2, 2, 10) if payload_bytes <= 2 * GIB else (2, 1, 5)


def fewer(plan, operation_s):
    """Return a plan of (operations in a sample, warm-up samples, samples) that ends in time on a slow network."""
    operations, warmup, samples = plan
    if operation_s * operations * (warmup + samples) <= ROW_LIMIT_S:
        return plan
    total = max(4, int(ROW_LIMIT_S / operation_s))
    operations = max(1, min(operations, total // 8))
    return operations, 1, max(3, min(samples, total // operations - 1))


def row_statistics(payload_bytes, ranks, sample_us_by_rank):
    """Return the figures of one row from each rank's samples (microseconds for one operation).

    A sample counts with its slowest rank: the collective is done when everybody has the sum.
    """
    samples = [max(column) for column in zip(*sample_us_by_rank)]  # noqa: B905 (Python 3.8 has no strict)
    middle = median(samples)
    return {
        "median_us": round(middle, 3),
        "min_us": round(min(samples), 3),
        "p90_us": round(percentile(samples, 0.9), 3),
        "p99_us": round(percentile(samples, 0.99), 3),
        "max_us": round(max(samples), 3),
        "algbw_gb_per_s": round(algbw_gb_per_s(payload_bytes, middle / 1e6), 3),
        "busbw_gb_per_s": round(busbw_gb_per_s(payload_bytes, middle / 1e6, ranks), 3),
        "rank_median_us": [round(median(one), 3) for one in sample_us_by_rank],
    }


# ---------------------------------------------------------------------------------------------- documents


def write_atomically(path, text):
    """Replace ``path`` by ``text``: a reader sees the old document or the new one, never a part."""
    directory = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(prefix=".allreduce-bench-", dir=directory)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class Report:
    """Collect what the ranks tell, event by event, so that a document exists whatever happens to them."""

    def __init__(self, options, launcher):
        self.started = time.monotonic()
        self.output = options.output
        self.rank_table = {}
        self.open_phase = None
        self.lock = threading.RLock()
        self.is_finished = False
        self.log_directory = None  # where NCCL writes its log, once that is known
        self.document = {
            "schema": SCHEMA,
            "program": "allreduce_bench",
            "exit_status": None,
            "outcome": None,
            "message": None,
            "argv": list(sys.argv[1:]),
            "started_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "launcher": launcher,
            "seed": options.seed,
            "profile": options.profile,
            "system": {},
            "backends": {},
            "rows": [],
            "checks": [],
            "probes": {},
            "nccl_log": None,
            "load": None,
            "ranks": [],
            "failures": [],
            "phases": [],
            "seconds": None,
        }

    def now(self):
        """Return seconds since the report was opened."""
        return round(time.monotonic() - self.started, 3)

    def feed(self, event):
        """Take in one event of a rank."""
        with self.lock:
            getattr(self, "_on_" + event["event"])(event)

    def rank(self, number):
        """Return the mutable entry of one rank."""
        return self.rank_table.setdefault(
            number,
            {
                "rank": number,
                "pid": None,
                "phase": None,
                "backend": None,
                "payload_bytes": None,
                "since_s": None,
                "is_done": False,
                "exit_code": None,
                "signal": None,
                "process_state": None,
                "error": None,
                "stack": None,
            },
        )

    def backend(self, name):
        """Return the mutable entry of one backend."""
        entry = {"state": "not_run", "reason": None, "seconds": {}, "notes": {}}
        return self.document["backends"].setdefault(name, entry)

    def _on_phase(self, event):
        entry = self.rank(event["rank"])
        if entry["since_s"] is None or event.get("backend") != entry["backend"]:
            entry["since_s"] = self.now()
        entry.update(phase=event["name"], backend=event.get("backend"), payload_bytes=event.get("payload_bytes"))
        if event["rank"] == 0:
            label = event["name"] if not event.get("backend") else event["backend"] + " " + event["name"]
            self._close_phase()
            self.open_phase = (label, self.now())

    def _close_phase(self):
        if self.open_phase is None:
            return
        label, begun = self.open_phase
        seconds = round(self.now() - begun, 3)
        phases = self.document["phases"]
        for phase in phases:
            if phase["name"] == label:
                phase["seconds"] = round(phase["seconds"] + seconds, 3)
                break
        else:
            phases.append({"name": label, "seconds": seconds})
        self.open_phase = None

    def _on_system(self, event):
        self.document["system"].update(event["value"])

    def _on_backend(self, event):
        entry = self.backend(event["name"])
        for key in ("state", "reason"):
            if key in event:
                entry[key] = event[key]
        entry["seconds"].update(event.get("seconds", {}))
        entry["notes"].update(event.get("notes", {}))

    def _on_check(self, event):
        self.document["checks"].append(event["value"])

    def _on_row(self, event):
        self.document["rows"].append(event["value"])

    def _on_probe(self, event):
        self.document["probes"][event["name"]] = event["value"]

    def _on_error(self, event):
        self.rank(event["rank"])["error"] = {"message": event["message"], "traceback": event["traceback"]}

    def _on_done(self, event):
        self.rank(event["rank"])["is_done"] = True

    def failure(self, kind, message, rank=None, backend=None):
        """Note a crash, a timeout, a stopped rank or an interruption, and where every rank was then.

        ``rank`` and ``backend`` None: no single one is at fault.
        """
        with self.lock:
            ranks = [dict(self.rank_table[number]) for number in sorted(self.rank_table)]
            failure = {"kind": kind, "message": message, "rank": rank, "backend": backend, "ranks": ranks}
            self.document["failures"].append(failure)
            if backend is not None:
                self.backend(backend).update(state="failed", reason=message)

    def status(self, required):
        """Return (exit status, message) of what was collected."""
        document = self.document
        wrong = [check for check in document["checks"] if not check["ok"]]
        if wrong:
            first = wrong[0]
            return WRONG_RESULT, "wrong result: {backend} at {payload_bytes} bytes".format(**first)
        if document["failures"]:
            return CRASHED, document["failures"][0]["message"]
        for name in required:
            entry = document["backends"].get(name, {"state": "not_run", "reason": "not asked for"})
            if entry["state"] != "measured":
                return BACKEND_MISSING, "{}: {}".format(name, entry["reason"])
        if not document["rows"]:
            return CRASHED, "nothing was measured"
        return MEASURED, None

    def finish(self, status, message):
        """Write and print the document once; return the exit status."""
        with self.lock:
            if self.is_finished:
                return self.document["exit_status"]
            self.is_finished = True
            self._close_phase()
            if self.log_directory:
                self.document["nccl_log"] = read_nccl_logs(self.log_directory)
                shutil.rmtree(self.log_directory, ignore_errors=True)
            outcome = OUTCOMES[status]
            if status == CRASHED and self.document["failures"]:
                outcome = self.document["failures"][0]["kind"]
            self.document.update(
                exit_status=status,
                outcome=outcome,
                message=message,
                ranks=[self.rank_table[number] for number in sorted(self.rank_table)],
                seconds=self.now(),
            )
            text = json.dumps(self.document, allow_nan=False, default=str)
            if self.output:
                try:
                    write_atomically(self.output, text + "\n")
                except OSError as error:
                    print("cannot write {}: {}".format(self.output, error), file=sys.stderr)
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            return status


# ---------------------------------------------------------------------------------------------- NCCL's log

_LOG_LINE = re.compile(r"NCCL (INFO|WARN) (.*)")
_LOG_VIA = re.compile(r"Channel (\d+)\S* : \d+\[\S*\] -> \d+\[\S*\] (?:\[\w+\] )?via (\S+)")
_LOG_CHANNELS = re.compile(
    r"(\d+) coll channels, (?:(\d+) collnet channels, )?(?:(\d+) nvls channels, )?(\d+) p2p channels"
)
_LOG_CHOICE = re.compile(r"AllReduce: (\d+) Bytes -> Algo (\S+) proto (\S+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
_LOG_ENVIRONMENT = re.compile(r"(NCCL_\w+) set by (?:environment|env|user) to ['\"]?([^'\"\s]*?)['\"]?\.?$")
_LOG_DEVICES = re.compile(r"NET/(\S+) : Using (\[0\].*)")
_LOG_DEVICE = re.compile(r"\[\d+\](\S+)")
_LOG_NETWORK = re.compile(r"Using network (\S+)")
_LOG_VERSION = re.compile(r"NCCL version (\S+)")
_LOG_MULTICAST = re.compile(r"NVLS multicast support is (not )?available")


def parse_nccl_log(lines):
    """Return what NCCL says of itself: transports, channels, the algorithm at each payload, its settings.

    Lines of all ranks together. ``transports`` counts connections ("P2P/CUMEM", "SHM/direct/direct",
    "NET/Socket/0"); ``channels`` is None when the line is not there; the last choice for a payload wins.
    """
    transports = collections.Counter()
    connected = set()
    channels = None
    choices = {}
    settings = {}
    warnings = []
    found = {"version": None, "network": None, "network_devices": [], "multicast_available": None}
    for line in lines:
        match = _LOG_LINE.search(line)
        if not match:
            continue
        level, text = match.groups()
        if level == "WARN":
            if len(warnings) < 20 and text not in warnings:
                warnings.append(text[:300])
            continue
        via = _LOG_VIA.search(text)
        if via:
            transports[via.group(2)] += 1
            connected.add(int(via.group(1)))
        counted = _LOG_CHANNELS.search(text)
        if counted:
            names = ("coll", "collnet", "nvls", "p2p")
            channels = {name: int(value or 0) for name, value in zip(names, counted.groups())}  # noqa: B905
        choice = _LOG_CHOICE.search(text)
        if choice:
            payload, algorithm, protocol, low, high = choice.groups()
            choices[int(payload)] = {
                "payload_bytes": int(payload),
                "algorithm": algorithm,
                "protocol": protocol,
                "channels": int(high) - int(low) + 1,
            }
        setting = _LOG_ENVIRONMENT.search(text)
        if setting:
            settings[setting.group(1)] = setting.group(2)
        devices = _LOG_DEVICES.search(text)
        if devices:
            found["network_devices"] = _LOG_DEVICE.findall(devices.group(2))
        for name, pattern in (("network", _LOG_NETWORK), ("version", _LOG_VERSION)):
            hit = pattern.search(text)
            if hit:
                found[name] = hit.group(1)
        multicast = _LOG_MULTICAST.search(text)
        if multicast:
            found["multicast_available"] = multicast.group(1) is None
    found.update(
        transports=dict(sorted(transports.items())),
        connected_channels=len(connected),
        channels=channels,
        choices=[choices[payload] for payload in sorted(choices)],
        settings=settings,
        warnings=warnings,
    )
    return found


def read_nccl_logs(directory):
    """Parse every NCCL log below ``directory``; None when NCCL wrote none."""
    lines = []
    for path in sorted(glob.glob(os.path.join(directory, "nccl.*"))):
        with open(path, encoding="utf-8", errors="replace") as stream:
            lines.extend(stream.read(4 * MIB).splitlines())
    return parse_nccl_log(lines) if lines else None


# ---------------------------------------------------------------------------------------------- nvidia-smi

LOAD_FIELDS = [
    ("index", int),
    ("uuid", str),
    ("pci.bus_id", str),
    ("pcie.link.gen.current", int),
    ("pcie.link.gen.max", int),
    ("pcie.link.width.current", int),
    ("pcie.link.width.max", int),
    ("clocks.sm", int),
    ("clocks.max.sm", int),
    ("power.draw", float),
    ("temperature.gpu", int),
    ("utilization.gpu", int),
]


def parse_csv(text, fields):
    """Return rows of ``nvidia-smi --format=csv,noheader,nounits``; a field that is no such value is None."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", len(fields) - 1)]
        if len(cells) != len(fields):
            continue
        row = {}
        for (name, kind), cell in zip(fields, cells):  # noqa: B905
            try:
                row[name.replace(".", "_")] = kind(cell)
            except ValueError:
                row[name.replace(".", "_")] = None
        rows.append(row)
    return rows


class LoadSample:
    """Ask nvidia-smi for links, clocks and processes while the GPUs work: at rest links are trained down."""

    APPS = (("pid", int), ("gpu_uuid", str), ("used_memory", int), ("process_name", str))

    def __init__(self):
        self.queries = []

    def start(self):
        """Start the queries without waiting for them."""
        if self.queries or shutil.which("nvidia-smi") is None:
            return
        gpu = "--query-gpu=" + ",".join(name for name, _ in LOAD_FIELDS)
        apps = "--query-compute-apps=" + ",".join(name for name, _ in self.APPS)
        for query in (gpu, apps):
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
            self.queries.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )

    def result(self, own_pids):
        """Return GPUs and the processes that are none of ours; None when nothing was asked."""
        if not self.queries:
            return None
        texts = []
        for query in self.queries:
            try:
                texts.append(query.communicate(timeout=10)[0])
            except subprocess.TimeoutExpired:
                query.kill()
                query.communicate()
                return {"error": "nvidia-smi did not answer within 10 s"}
        apps = parse_csv(texts[1], self.APPS)
        return {
            "gpus": parse_csv(texts[0], LOAD_FIELDS),
            "other_processes": [app for app in apps if app["pid"] not in own_pids],
        }


# ---------------------------------------------------------------------------------------------- launcher


def visible_gpus(timeout_s=60.0):
    """Return the number of CUDA devices, counted in a child so that no context stays here; 0 when CUDA is absent.

    Raises Refusal when the driver is there and does not answer.
    """
    program = (
        "import ctypes,sys\n"
        "try: cuda = ctypes.CDLL('libcuda.so.1')\n"
        "except OSError: print('absent'); sys.exit()\n"
        "n = ctypes.c_int()\n"
        "rc = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(n))\n"
        "print('absent' if rc == 100 else 'error %d' % rc if rc else n.value)\n"
    )
    try:
        answer = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=timeout_s, text=True
        ).stdout.strip()
    except subprocess.TimeoutExpired as error:
        raise Refusal("cuInit did not return within {:.0f} s".format(timeout_s)) from error
    if answer == "absent":
        return 0
    if not answer.isdigit():
        raise Refusal("the CUDA driver cannot be used: cuInit says " + (answer or "nothing"))
    return int(answer)


def process_state(pid):
    """Return the state letter of a process from /proc (R, S, D, T, Z ...); None when it is gone."""
    try:
        with open("/proc/{}/stat".format(pid), encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


class Rank:
    """One worker process and the pipe it reports through."""

    def __init__(self, number, process, descriptor):
        self.number = number
        self.process = process
        self.descriptor = descriptor
        self.is_closed = False
        self.stopped_since = None
        self.ended_at = None
        self._pending = b""

    def read(self):
        """Return the events that have arrived; at the end of the pipe, mark it closed."""
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return []
        self.is_closed = not data
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line.decode("utf-8")) for line in lines if line]


class Launcher:
    """Start the ranks, listen to them, end them; leave no process behind."""

    def __init__(self, options, report, directory):
        self.options = options
        self.report = report
        self.directory = directory
        self.ranks = []
        self.load = LoadSample()
        self.own_pids = {os.getpid()}
        self.deadline = time.monotonic() + options.timeout

    def run(self, backends):
        """Measure these backends; what hangs or crashes is ended, and the rest is measured with new ranks."""
        remaining = list(backends)
        while remaining:
            failure = None
            try:
                self.start(remaining)
                failure = self.watch()
            finally:
                self.end()
            if failure is None:
                return
            self.report.failure(*failure)
            backend = failure[3]
            if backend not in remaining or time.monotonic() > self.deadline - 20:
                return
            remaining = remaining[remaining.index(backend) + 1 :]

    def start(self, backends):
        """Start one process a rank for these backends."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        program = self.options.worker_program or os.path.abspath(__file__)
        self.report.rank_table.clear()
        for number in range(self.options.ranks):
            reading, writing = os.pipe()
            os.set_blocking(reading, False)
            environment = worker_environment(self.options, number, self.directory)
            environment.update(
                BENCH_REPORT_FD=str(writing),
                BENCH_STORE="{}:{}".format(port, listener.fileno() if number == 0 else -1),
                BENCH_BACKENDS=",".join(backends),
                BENCH_PARENT=str(os.getpid()),
            )
            process = subprocess.Popen(
                [sys.executable, program, *sys.argv[1:]],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=[writing] + ([listener.fileno()] if number == 0 else []),
                start_new_session=True,
            )
            os.close(writing)
            self.ranks.append(Rank(number, process, reading))
            self.own_pids.add(process.pid)
            self.report.rank(number)["pid"] = process.pid
        listener.close()

    def watch(self):
        """Follow the ranks to the end; return (kind, message, rank, backend) of a failure, or None."""
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(rank.descriptor, selectors.EVENT_READ, rank)
            begun = time.monotonic()
            while True:
                self.pump(selector)
                failure = self.dead() or self.stopped() or self.overdue(begun)
                if failure:
                    until = time.monotonic() + GRACE_S
                    while time.monotonic() < until and selector.get_map():
                        self.pump(selector)
                    return self.dead() or failure
                if not selector.get_map() and all(rank.process.poll() is not None for rank in self.ranks):
                    return None

    def pump(self, selector):
        """Feed what the ranks say to the report."""
        if not selector.get_map():
            time.sleep(0.02)
            return
        for key, _ in selector.select(timeout=0.1):
            rank = key.data
            for event in rank.read():
                self.report.feed(event)
                if event["event"] == "phase" and event["name"] == "warm_up":
                    self.load.start()
            if rank.is_closed:
                selector.unregister(rank.descriptor)

    def dead(self):
        """Return the failure of the first rank that ended without having finished.

        One that was killed comes before those that then lost their connection to it.
        """
        for rank in self.ranks:
            if rank.ended_at is None and rank.process.poll() is not None:
                rank.ended_at = time.monotonic()
        ended = [rank for rank in self.ranks if rank.ended_at is not None]
        for rank in sorted(ended, key=lambda rank: (rank.process.returncode >= 0, rank.ended_at)):
            code = rank.process.returncode
            entry = self.report.rank(rank.number)
            if code == 0 and (entry["is_done"] or not rank.is_closed):
                continue
            if code < 0:
                how = "was killed by {}".format(signal.Signals(-code).name)
            elif entry["error"]:
                how = "failed: {}".format(entry["error"]["message"])
            else:
                how = "exited with status {} without saying why".format(code)
            return "crash", "rank {} {}{}".format(rank.number, how, where(entry)), rank.number, entry["backend"]
        return None

    def stopped(self):
        """Return the failure of a rank that has been in state T for a while."""
        now = time.monotonic()
        for rank in self.ranks:
            state = process_state(rank.process.pid)
            if state not in ("T", "t"):
                rank.stopped_since = None
                continue
            rank.stopped_since = rank.stopped_since or now
            if now - rank.stopped_since >= STOPPED_AFTER_S:
                entry = self.report.rank(rank.number)
                text = "rank {} is stopped (process state {}){}".format(rank.number, state, where(entry))
                return "stopped", text, rank.number, entry["backend"]
        return None

    def overdue(self, begun):
        """Return the failure of a time limit: the whole, the set-up, or one backend."""
        now = time.monotonic()
        entries = [self.report.rank(rank.number) for rank in self.ranks if rank.process.poll() is None]
        limit = None
        if now >= self.deadline:
            limit = ("everything together", self.options.timeout)
        for entry in entries:
            if entry["backend"] is None and now - begun > self.options.setup_timeout:
                limit = limit or ("set-up", self.options.setup_timeout)
            if entry["backend"] and self.report.now() - entry["since_s"] > self.options.backend_timeout:
                limit = limit or (entry["backend"], self.options.backend_timeout)
        if limit is None:
            return None
        backends = [entry["backend"] for entry in entries if entry["backend"]]
        spots = "; ".join("rank {}{}".format(entry["rank"], where(entry)) for entry in entries)
        text = "{} took more than {:g} s: {}".format(limit[0], limit[1], spots)
        return "timeout", text, None, backends[0] if backends else None

    def end(self):
        """Note each rank's state, ask it for its stack, and kill it with everything it started."""
        living = [rank for rank in self.ranks if rank.process.poll() is None]
        for rank in living:
            self.report.rank(rank.number)["process_state"] = process_state(rank.process.pid)
            if os.path.exists(stack_file(self.directory, rank.number)):  # its handler is in place
                os.kill(rank.process.pid, signal.SIGUSR1)
        if living:
            time.sleep(0.3)
        for rank in self.ranks:
            try:
                os.killpg(rank.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            code = rank.process.wait()
            entry = self.report.rank(rank.number)
            if rank in living:
                entry["stack"] = read_stack(self.directory, rank.number)
            else:
                entry["exit_code"] = code if code >= 0 else None
                entry["signal"] = signal.Signals(-code).name if code < 0 else None
            os.close(rank.descriptor)
        self.ranks = []


def where(entry):
    """Return ' in PHASE of BACKEND at N bytes' for a rank's entry."""
    text = " in {}".format(entry["phase"] or "start-up")
    if entry["backend"]:
        text += " of {}".format(entry["backend"])
    if entry["payload_bytes"]:
        text += " at {} bytes".format(entry["payload_bytes"])
    return text


def stack_file(directory, number):
    """Return where a rank's fault handler writes its stack."""
    return os.path.join(directory, "stack.{}".format(number))


def read_stack(directory, number):
    """Return the Python stack a rank wrote when asked, innermost first; None: it wrote none."""
    try:
        with open(stack_file(directory, number), encoding="utf-8", errors="replace") as stream:
            lines = [line.strip() for line in stream if line.startswith("  File")]
    except OSError:
        return None
    return lines[:12] or None


def worker_environment(options, number, directory):
    """Return the environment of one rank started here.

    NCCL says at start which transports, channels and algorithms it uses; that log is the witness of most causes
    of slowness and costs nothing once the connections stand. All ranks are on this host, so the loopback
    interface is the one that is always right for the bootstrap; whoever set another one keeps it.
    """
    environment = dict(os.environ)
    environment.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE=str(options.ranks),
        BENCH_DEVICE=options.device,
        BENCH_DIRECTORY=directory,
    )
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    let_nccl_talk(environment, directory)
    return environment


def let_nccl_talk(environment, directory):
    """Have NCCL write its log below a directory, unless somebody wants it elsewhere."""
    if "NCCL_DEBUG" not in environment:
        environment.update(
            NCCL_DEBUG="INFO",
            NCCL_DEBUG_SUBSYS="INIT,ENV,NET,P2P,SHM,NVLS,TUNING",
            NCCL_DEBUG_FILE=os.path.join(directory, "nccl.%h.%p"),
        )


# ---------------------------------------------------------------------------------------------- one rank


SIOCGIFADDR = 0x8915  # linux/sockios.h


def interface_towards(address):
    """Return the network interface whose IPv4 address this host uses to reach another; None: it cannot be told."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it only chooses a route
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = name.encode()[:15].ljust(40, b"\0")
                try:
                    answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                except OSError:
                    continue  # it has no IPv4 address
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    except OSError:
        pass
    return None


class Exchange:
    """Hand small JSON values between ranks through the rendezvous store, never through what is measured."""

    def __init__(self, store, rank, ranks):
        self.store = store
        self.rank = rank
        self.ranks = ranks
        self.sequence = 0

    def gather(self, value):
        """Return every rank's value, in rank order, on every rank."""
        self.sequence += 1
        self.store.set("x{}.{}".format(self.sequence, self.rank), json.dumps(value))
        keys = ["x{}.{}".format(self.sequence, rank) for rank in range(self.ranks)]
        return [json.loads(self.store.get(key).decode("utf-8")) for key in keys]

    def barrier(self):
        """Return when every rank has come here."""
        self.gather(None)

    def leave(self):
        """Let rank 0, which holds the store, go last."""
        if self.rank:
            self.store.set("bye.{}".format(self.rank), "")
        else:
            self.store.wait(["bye.{}".format(rank) for rank in range(1, self.ranks)])


class Context:
    """What one rank knows: its device, its peers, and whom it tells."""

    def __init__(self, options, tell):
        self.options = options
        self.rank = int(os.environ["RANK"])
        self.ranks = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.node = int(os.environ.get("GROUP_RANK", 0))  # torchrun's number of this host
        self.nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        self._tell = tell
        self.spot = (None, time.monotonic())
        self.torch = self.dist = self.exchange = self.device = self.stream = self.dtype = None
        self.nccl_error = None  # returns what NCCL met in the background, or None; None: nobody can ask

    @property
    def is_cpu(self):
        return self.device.type == "cpu"

    def tell(self, event, **fields):
        """Report an event; phases from every rank, everything else from rank 0 only."""
        if self.rank == 0 or event in ("phase", "error", "done"):
            self._tell(dict(fields, event=event, rank=self.rank))

    def phase(self, name, backend=None, payload_bytes=None):
        """Say what this rank does next."""
        if backend != self.spot[0]:
            self.spot = (backend, time.monotonic())
        self.tell("phase", name=name, backend=backend, payload_bytes=payload_bytes)

    def agree(self, reason):
        """Return the first rank's reason against going on ("rank 1: ..."), or None when no rank has one."""
        for rank, one in enumerate(self.exchange.gather(reason)):
            if one is not None:
                return one if self.ranks == 1 else "rank {}: {}".format(rank, one)
        return None

    def synchronize(self):
        """Wait until this rank's device is idle."""
        if not self.is_cpu:
            self.torch.cuda.synchronize()


def connect(context):
    """Import torch, take the device and join the process group."""
    context.phase("import_torch")
    import torch
    import torch.distributed as dist

    context.torch, context.dist = torch, dist
    options = context.options
    context.dtype = getattr(torch, options.dtype)
    context.phase("context")
    if os.environ.get("BENCH_DEVICE", options.device) == "cpu":
        context.device = torch.device("cpu")
        torch.set_num_threads(1)
    else:
        context.device = torch.device("cuda", context.local_rank)
        torch.cuda.set_device(context.device)
        torch.zeros(1, device=context.device)
        # The legacy default stream makes NCCL's graphs slower with their length, so nothing is timed on it.
        context.stream = torch.cuda.Stream()
    if context.nodes > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo takes the address of this host's name, which Debian's /etc/hosts has as 127.0.1.1.
        name = interface_towards(os.environ["MASTER_ADDR"])
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
    context.phase("rendezvous")
    patience = datetime.timedelta(seconds=options.timeout + 60)
    if "BENCH_STORE" in os.environ:
        port, descriptor = os.environ["BENCH_STORE"].split(":")
        store = dist.TCPStore(
            "127.0.0.1",
            int(port),
            context.ranks,
            is_master=context.rank == 0,
            timeout=patience,
            wait_for_workers=False,
            master_listen_fd=int(descriptor) if context.rank == 0 else None,
        )
    else:
        store, _, _ = next(iter(dist.rendezvous("env://", context.rank, context.ranks, timeout=patience)))
    context.exchange = Exchange(dist.PrefixStore("bench", store), context.rank, context.ranks)
    group_store = dist.PrefixStore("group", store)
    arguments = {"store": group_store, "rank": context.rank, "world_size": context.ranks, "timeout": patience}
    if context.is_cpu:
        dist.init_process_group("gloo", **arguments)
    else:
        dist.init_process_group("nccl", device_id=context.device, **arguments)
        context.nccl_error = nccl_error(context)


def cpu_list(numbers):
    """Return a set of CPU numbers as the kernel writes it: 0-3,8."""
    parts = []
    ordered = sorted(numbers)
    while ordered:
        end = 0
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        parts.append(str(ordered[0]) if end == 0 else "{}-{}".format(ordered[0], ordered[end]))
        ordered = ordered[end + 1 :]
    return ",".join(parts)


def read_text(path):
    """Return a small file's text without its end of line, or None."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return None


def describe_gpu(context):
    """Return what identifies this rank's GPU and where it sits."""
    torch = context.torch
    properties = torch.cuda.get_device_properties(context.device)
    free, total = torch.cuda.mem_get_info(context.device)
    cuda = ctypes.CDLL("libcuda.so.1")
    handle, supported = ctypes.c_int(), ctypes.c_int()
    bus = ctypes.create_string_buffer(32)
    cuda.cuDeviceGet(ctypes.byref(handle), context.local_rank)
    cuda.cuDeviceGetPCIBusId(bus, len(bus), handle)
    code = cuda.cuDeviceGetAttribute(ctypes.byref(supported), CUDA_MULTICAST_SUPPORTED, handle)
    bus_id = bus.value.decode("ascii").lower()
    peers = [
        peer
        for peer in range(torch.cuda.device_count())
        if peer != context.local_rank and torch.cuda.can_device_access_peer(context.local_rank, peer)
    ]
    node = read_text("/sys/bus/pci/devices/{}/numa_node".format(bus_id))
    return {
        "name": properties.name,
        "uuid": "GPU-{}".format(properties.uuid) if hasattr(properties, "uuid") else None,
        "pci_bus_id": bus_id,
        "compute_capability": "{}.{}".format(properties.major, properties.minor),
        "memory_total_bytes": total,
        "memory_free_bytes": free,
        "is_multicast_capable": bool(supported.value) if code == 0 else None,
        "peer_access": peers,
        "numa_node": int(node) if node not in (None, "") else None,
        "local_cpus": read_text("/sys/bus/pci/devices/{}/local_cpulist".format(bus_id)),
    }


def describe(context):
    """Tell the report what it was measured on, and return the largest payload that fits (bytes)."""
    torch = context.torch
    own = {
        "rank": context.rank,
        "host": socket.gethostname(),
        "node": context.node,
        "index": context.local_rank,
        "cpu_affinity": cpu_list(os.sched_getaffinity(0)),
    }
    if not context.is_cpu:
        own.update(describe_gpu(context))
    everyone = context.exchange.gather(own)
    nccl = None
    if not context.is_cpu:
        version = torch.cuda.nccl.version()
        nccl = ".".join(str(part) for part in version) if isinstance(version, tuple) else str(version)
    hosts = sorted({one["host"] for one in everyone})
    context.nodes = max(context.nodes, len(hosts))
    system = {
        "device": context.device.type,
        "ranks": context.ranks,
        "nodes": context.nodes,
        "hosts": hosts,
        "dtype": context.options.dtype,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda_runtime": torch.version.cuda,
        "nccl": nccl,
        "driver": read_text("/sys/module/nvidia/version"),
        "gpus": everyone,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "CUDA_", "TORCH_NCCL_", "TORCH_SYMM_MEM", "GLOO_", "LD_LIBRARY_PATH"))
            and not value.startswith(os.environ.get("BENCH_DIRECTORY") or "\0")
        },
    }
    context.tell("system", value=system)
    if context.is_cpu:
        return GLOO_MAX_PAYLOAD_BYTES
    return min(one["memory_free_bytes"] for one in everyone) // 6


# ---------------------------------------------------------------------------------------------- data


def hashed(torch, device, seed, rank, start, count):
    """Return ``count`` 32-bit hashes of (seed, rank, position) as int64, the same on every device and model.

    torch's own generators give other numbers on GPUs with another number of multiprocessors; integer arithmetic
    does not, so every rank can make every other rank's data without communication.
    """
    mask = 0xFFFFFFFF
    value = torch.arange(start, start + count, device=device, dtype=torch.int64)
    value = (value + ((seed * 1000003 + rank * 7919 + 1) * 2654435761 & mask)) & mask
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        value ^= value >> 16
        value = (value * factor) & mask
    return value ^ (value >> 15)


def integers(torch, device, seed, rank, start, count, limit):
    """Return integers in -limit..limit as float32."""
    return (hashed(torch, device, seed, rank, start, count) % (2 * limit + 1) - limit).to(torch.float32)


def bell(torch, device, seed, rank, start, count):
    """Return nearly normal values of mean 0 and deviation 1 as float32: the sum of four bytes, scaled."""
    value = hashed(torch, device, seed, rank, start, count)
    total = (value & 255) + (value >> 8 & 255) + (value >> 16 & 255) + (value >> 24 & 255)
    return (total.to(torch.float32) - 510.0) / 147.8


class Data:
    """One kind of input: what each rank contributes, and what their sum must be."""

    def __init__(self, context, kind):
        self.context = context
        self.kind = kind
        self.limit = min(15, EXACT_INTEGER_LIMIT // context.ranks)

    def part(self, rank, start, count):
        """Return one rank's contribution for a range of positions, rounded to the payload's type, as float32."""
        context = self.context
        arguments = (context.torch, context.device, context.options.seed, rank, start, count)
        if self.kind == "integers":
            return integers(*arguments, self.limit)
        return bell(*arguments).to(context.dtype).to(context.torch.float32)

    def chunks(self, elements):
        """Return (start, count) pieces that bound the memory the reference takes."""
        size = 1 << (20 if self.context.is_cpu else 24)
        return [(start, min(size, elements - start)) for start in range(0, elements, size)]

    def fill(self, tensor, elements):
        """Write this rank's contribution."""
        for start, count in self.chunks(elements):
            tensor[start : start + count] = self.part(self.context.rank, start, count).to(self.context.dtype)

    def reference(self, start, count):
        """Return the sum over all ranks in float32."""
        total = self.part(0, start, count)
        for rank in range(1, self.context.ranks):
            total += self.part(rank, start, count)
        return total


def compare(context, data, output, elements):
    """Return this rank's view of one result: wrong and unwritten elements, relative error, bits."""
    torch = context.torch
    zero = torch.zeros((), dtype=torch.float64, device=context.device)
    wrong, unwritten, bits = zero.to(torch.int64), zero.to(torch.int64), zero.to(torch.int64)
    error, norm = zero.clone(), zero.clone()
    first = None
    raw_type = torch.int16 if context.dtype.itemsize == 2 else torch.int32
    for start, count in data.chunks(elements):
        got = output[start : start + count]
        want = data.reference(start, count)
        raw = got.view(raw_type).to(torch.int64)
        weight = torch.arange(start + 1, start + count + 1, device=context.device, dtype=torch.int64)
        bits = bits + (raw * weight).sum()
        got = got.to(torch.float32)
        unwritten = unwritten + torch.isnan(got).sum()
        difference = (got - want).to(torch.float64)
        error = error + (difference * difference).sum()
        norm = norm + (want.to(torch.float64) ** 2).sum()
        if data.kind == "integers":
            bad = got != want
            wrong = wrong + bad.sum()
            if first is None and bool(bad.any()):
                index = int(bad.nonzero()[0])
                first = {"index": start + index, "got": repr(float(got[index])), "want": float(want[index])}
    relative = math.sqrt(float(error) / float(norm)) if float(norm) > 0 else None
    return {
        "wrong_elements": int(wrong) if data.kind == "integers" else None,
        "unwritten_elements": int(unwritten),
        "relative_l2": relative if relative is None or math.isfinite(relative) else None,
        "bits": int(bits),
        "first_wrong": first,
    }


# ---------------------------------------------------------------------------------------------- backends


class Backend:
    """One way to add up over ranks. Made on every rank alike; raises Missing or ImportError when it cannot be."""

    name = ""
    is_graph = True  # captured in a CUDA graph and replayed, as inference engines do
    is_in_place = False
    is_within_host = True  # it cannot reach GPUs of another host
    max_payload_bytes = None
    min_payload_bytes = 0

    def __init__(self, context, largest_bytes):
        self.context = context
        self.notes = {}
        self.elements = largest_bytes // context.dtype.itemsize
        self.input = self.allocate(self.elements + CANARY_ELEMENTS)
        self.output = self.input if self.is_in_place else self.allocate(self.elements + CANARY_ELEMENTS)

    def allocate(self, elements):
        """Return an uninitialised tensor on this rank's device."""
        return self.context.torch.empty(elements, dtype=self.context.dtype, device=self.context.device)

    def all_reduce(self, elements):
        """Enqueue one all-reduce of the first ``elements`` of input into output on the current stream."""
        raise NotImplementedError

    def prepare(self, payload_bytes):
        """Get ready for one payload, before its check."""

    def before_measure(self, elements):
        """Get ready for the timing, after the check."""

    def captured(self):
        """Do what must follow a capture."""

    def extra_check(self, elements):  # noqa: ARG002
        """Return the relative error of what the backend computes besides the sum; 0.0 when there is nothing."""
        return 0.0

    def close(self):
        """Give back what the destructor would not."""


class Gloo(Backend):
    name = "gloo"
    is_graph = False
    is_within_host = False
    is_in_place = True

    def all_reduce(self, elements):
        self.context.dist.all_reduce(self.output[:elements])


class Nccl(Gloo):
    """torch.distributed, eager. Its small payloads measure Python and the host, so only large ones are timed."""

    name = "nccl"
    min_payload_bytes = 32 * MIB


def loaded_library(prefix):
    """Return the path of a loaded shared object by the start of its file name, from this process's own map."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as stream:
        for line in stream:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith(prefix):
                return "/" + path
    return None


NCCL_SUCCESS, NCCL_IN_PROGRESS = 0, 7  # ncclResult_t in nccl.h


def nccl_communicator(context):
    """Return NCCL's library and torch's communicator; raises Missing where torch does not show them."""
    path = loaded_library("libnccl.so")
    if path is None:
        raise Missing("torch has NCCL linked in")
    group = context.dist.distributed_c10d._get_default_group()
    try:
        # Private to torch, seen in 2.11.
        return ctypes.CDLL(path), ctypes.c_void_p(group._get_backend(context.device)._comm_ptr())
    except AttributeError as error:
        raise Missing("this torch does not show its NCCL communicator: {}".format(error)) from error


def nccl_error(context):
    """Return a function that says what NCCL met in the background (None: nothing), or None where nobody can ask.

    NCCL knows at once that the other side is gone. What waits for the GPU is not told: nothing ends a graph's
    replay, and torch's own watchdog takes about as long as our limits.
    """
    try:
        library, communicator = nccl_communicator(context)
    except Missing:
        return None
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetLastError.restype = ctypes.c_char_p

    def ask():
        code = ctypes.c_int()
        if library.ncclCommGetAsyncError(communicator, ctypes.byref(code)) != NCCL_SUCCESS:
            return None
        if code.value in (NCCL_SUCCESS, NCCL_IN_PROGRESS):
            return None
        said = library.ncclGetErrorString(code.value).decode("utf-8", "replace")
        last = (library.ncclGetLastError(communicator) or b"").decode("utf-8", "replace").strip()
        return "NCCL: {}{}".format(said, ": " + last.splitlines()[0] if last else "")

    return ask


NCCL_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}  # ncclDataType_t in nccl.h


class NcclGraph(Backend):
    """NCCL captured in a CUDA graph: what serving engines replay.

    Called directly and out of place, as their own bindings do; where torch does not show its communicator, through
    torch.distributed and in place, which the notes say.
    """

    name = "nccl_graph"
    is_within_host = False

    def __init__(self, context, largest_bytes):
        reason = self.bind(context)
        self.is_in_place = reason is not None
        super().__init__(context, largest_bytes)
        self.notes["call"] = "ncclAllReduce" if reason is None else "torch.distributed, because " + reason

    def bind(self, context):
        """Find NCCL's own function and torch's communicator; return why that is not possible, or None."""
        try:
            library, self.communicator = nccl_communicator(context)
        except Missing as missing:
            return str(missing)
        self.function = library.ncclAllReduce
        self.function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
        self.function.argtypes += [ctypes.c_void_p] * 2
        self.describe_error = library.ncclGetErrorString
        self.describe_error.restype = ctypes.c_char_p
        self.type = NCCL_TYPES[context.options.dtype]
        return None

    def all_reduce(self, elements):
        if self.is_in_place:
            self.context.dist.all_reduce(self.output[:elements])
            return
        stream = self.context.torch.cuda.current_stream().cuda_stream
        code = self.function(
            self.input.data_ptr(), self.output.data_ptr(), elements, self.type, 0, self.communicator, stream
        )
        if code:
            raise RuntimeError("ncclAllReduce: {}".format(self.describe_error(code).decode()))


class NcclGraphTorch(Nccl):
    """torch.distributed captured in a CUDA graph, in place."""

    name = "nccl_graph_torch"
    is_graph = True
    min_payload_bytes = 0


class Symmetric(Backend):
    """torch symmetric memory: peers read and write each other's memory over the link, without NCCL."""

    operation = ""

    def __init__(self, context, largest_bytes):
        torch = context.torch
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        self.module = symmetric
        if context.options.dtype == "float16":
            raise Missing("torch's symmetric memory adds bfloat16 and float32 only (seen in 2.11)")
        if not hasattr(torch.ops.symm_mem, self.operation):
            raise Missing("this torch has no symm_mem.{}".format(self.operation))
        self.function = getattr(torch.ops.symm_mem, self.operation)
        self.group = context.dist.group.WORLD.group_name
        super().__init__(context, largest_bytes)
        self.handle = symmetric.rendezvous(self.input, self.group)
        if self.handle is None:
            raise Missing("symmetric memory rendezvous gave no handle")
        self.notes["has_multicast"] = bool(getattr(self.handle, "multicast_ptr", 0))

    def allocate(self, elements):
        """Return symmetric memory for the input and plain memory for what comes after it."""
        if hasattr(self, "input"):
            return super().allocate(elements)
        torch, context = self.context.torch, self.context
        if hasattr(self.module, "get_mem_pool"):
            # symm_mem.empty() imports half of torch on first use (3 s); the pool gives the same memory.
            with torch.cuda.use_mem_pool(self.module.get_mem_pool(context.device)):
                return torch.empty(elements, dtype=context.dtype, device=context.device)
        return self.module.empty(elements, dtype=context.dtype, device=context.device)

    def peer(self, rank, elements):
        """Return another rank's symmetric buffer as a tensor of this rank."""
        return self.handle.get_buffer(rank, [elements], self.context.dtype)


class SymmetricOneShot(Symmetric):
    name = "symm_one_shot"
    operation = "one_shot_all_reduce_out"
    max_payload_bytes = 16 * MIB

    def all_reduce(self, elements):
        self.function(self.input[:elements], "sum", self.group, self.output[:elements])


class SymmetricTwoShot(Symmetric):
    name = "symm_two_shot"
    operation = "two_shot_all_reduce_"
    is_in_place = True

    def all_reduce(self, elements):
        self.function(self.output[:elements], "sum", self.group)


class SymmetricMultimem(SymmetricTwoShot):
    """Reduced inside the switch through NVLink multicast; only on request, since it creates multicast objects."""

    name = "symm_multimem"
    operation = "multimem_all_reduce_"

    def __init__(self, context, largest_bytes):
        if not context.options.allow_multicast:
            raise Missing("multicast is not allowed (--allow-multicast)")
        super().__init__(context, largest_bytes)
        if not self.notes["has_multicast"]:
            raise Missing("these GPUs or this driver offer no multicast")


class Runtime:
    """The CUDA runtime this process already has, through ctypes: memory that other processes can open."""

    def __init__(self):
        path = loaded_library("libcudart.so")
        if path is None:
            raise Missing("torch has the CUDA runtime linked in, so memory cannot be shared by handle")
        self.library = ctypes.CDLL(path)
        self.library.cudaGetErrorString.restype = ctypes.c_char_p

    class Handle(ctypes.Structure):
        _fields_ = (("reserved", ctypes.c_ubyte * 64),)  # cudaIpcMemHandle_t

    def call(self, name, *arguments):
        """Call a function; raise RuntimeError with CUDA's own words."""
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError("{}: {}".format(name, self.library.cudaGetErrorString(code).decode()))

    def shared(self, exchange, size):
        """Allocate memory on every rank and return all ranks' addresses of it, as seen from here."""
        own = ctypes.c_void_p()
        self.call("cudaMalloc", ctypes.byref(own), ctypes.c_size_t(size))
        self.call("cudaMemset", own, 0, ctypes.c_size_t(size))
        handle = self.Handle()
        self.call("cudaIpcGetMemHandle", ctypes.byref(handle), own)
        addresses = []
        for rank, text in enumerate(exchange.gather(bytes(handle.reserved).hex())):
            address = ctypes.c_void_p(own.value)
            if rank != exchange.rank:
                opened = self.Handle.from_buffer_copy(bytes.fromhex(text))
                self.call("cudaIpcOpenMemHandle", ctypes.byref(address), opened, 1)
            addresses.append(address.value)
        return addresses

    def release(self, exchange, addresses):
        """Give shared memory back, once nobody uses it."""
        for rank, address in enumerate(addresses):
            if rank != exchange.rank:
                self.call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))
        exchange.barrier()
        self.call("cudaFree", ctypes.c_void_p(addresses[exchange.rank]))


def has_nvlink_everywhere(ranks):
    """Return whether every pair of GPUs is connected by NVLink, as NVML tells it."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml.nvmlInit_v2():
        return False
    handles = []
    for index in range(ranks):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            return False
        handles.append(handle)
    status = ctypes.c_int(-1)
    by_nvlink = 2  # NVML_P2P_CAPS_INDEX_NVLINK
    for one in handles:
        for other in handles:
            if one.value != other.value and (
                nvml.nvmlDeviceGetP2PStatus(one, other, by_nvlink, ctypes.byref(status)) or status.value
            ):
                return False
    return True


class Custom(Backend):
    """The custom all-reduce that vLLM, SGLang and FlashInfer share: peers read each other's buffers."""

    max_payload_bytes = 8 * MIB

    def functions(self):
        """Return the functions by name: init_custom_ar, meta_size, register_buffer, ..."""
        raise NotImplementedError

    def reduce(self, source, target, address, size):
        """Call the all-reduce itself; its arguments differ between packages."""
        raise NotImplementedError

    def __init__(self, context, largest_bytes):
        if context.ranks not in (2, 4, 6, 8):
            raise Missing("it runs on 2, 4, 6 or 8 ranks only")
        if context.ranks > 2 and not has_nvlink_everywhere(context.ranks):
            raise Missing("with more than two ranks it needs NVLink between all GPUs")
        self.call = self.functions()
        super().__init__(context, largest_bytes)
        self.runtime = Runtime()
        size = self.max_payload_bytes
        self.meta = self.runtime.shared(context.exchange, self.call.meta_size() + size)
        self.buffers = self.runtime.shared(context.exchange, size)
        self.rank_data = context.torch.empty(8 * MIB, dtype=context.torch.uint8, device=context.device)
        self.state = self.call.init_custom_ar(self.meta, self.rank_data, context.rank, True)
        self.call.register_buffer(self.state, self.buffers)

    def all_reduce(self, elements):
        source, target = self.input[:elements], self.output[:elements]
        if self.context.torch.cuda.is_current_stream_capturing():
            self.reduce(source, target, 0, 0)  # reads the input in place; captured() tells the peers where it is
        else:
            self.reduce(source, target, self.buffers[self.context.rank], self.max_payload_bytes)

    def captured(self):
        handle, offsets = self.call.get_graph_buffer_ipc_meta(self.state)
        everyone = self.context.exchange.gather([list(handle), list(offsets)])
        self.call.register_graph_buffers(self.state, [one[0] for one in everyone], [one[1] for one in everyone])

    def close(self):
        self.call.dispose(self.state)
        for addresses in (self.meta, self.buffers):
            self.runtime.release(self.context.exchange, addresses)


class SglCustom(Custom):
    name = "sgl_custom"

    def functions(self):
        return importlib.import_module("sgl_kernel.allreduce")

    def reduce(self, source, target, address, size):
        self.call.all_reduce(self.state, source, target, address, size)


def flashinfer_comm(generator):
    """Return flashinfer.comm once the module it needs is compiled; building one here would take minutes."""
    comm = importlib.import_module("flashinfer.comm")
    spec = getattr(comm, generator)()
    if not getattr(spec, "is_compiled", True):
        raise Missing("FlashInfer's module {} is not compiled for this GPU".format(spec.name))
    return comm


class FlashInferCustom(Custom):
    """The same code as sgl_custom in FlashInfer's build of it."""

    name = "flashinfer_custom"

    def functions(self):
        comm = flashinfer_comm("gen_vllm_comm_module")
        wanted = ("init_custom_ar", "meta_size", "register_buffer", "all_reduce", "dispose")
        wanted += ("get_graph_buffer_ipc_meta", "register_graph_buffers")
        return argparse.Namespace(**{name: getattr(comm, "vllm_" + name) for name in wanted})

    def reduce(self, source, target, address, size):
        self.call.all_reduce(self.state, source, target, address, size, 36)


class FlashInferFused(Backend):
    """FlashInfer's all-reduce fused with residual addition and RMSNorm, one shot.

    The payload is tokens x hidden size. Launches overlap as they do in an engine (programmatic dependent launch),
    so the time is that of one operation among many, not of one alone.
    """

    name = "flashinfer_fused"
    max_payload_bytes = 4 * MIB

    def __init__(self, context, largest_bytes):
        torch, self.hidden = context.torch, context.options.hidden_size
        self.comm = flashinfer_comm("gen_trtllm_comm_module")
        super().__init__(context, largest_bytes)
        tokens = self.elements // self.hidden
        if not tokens or self.elements % self.hidden:
            raise Missing("payloads are no multiple of the hidden size {}".format(self.hidden))
        # CUDA IPC, not the unified workspace: that one refuses GPUs without multicast.
        _handles, self.workspace = self.comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            context.rank, context.ranks, tokens, self.hidden, group=context.dist.group.WORLD
        )
        self.residual = torch.zeros(self.elements, dtype=context.dtype, device=context.device)
        self.norm = torch.empty_like(self.residual)
        self.weight = (1 + torch.arange(self.hidden, device=context.device) % 7 / 8).to(context.dtype)
        self.pattern = self.comm.AllReduceFusionPattern.kARResidualRMSNorm
        self.notes.update(hidden_size=self.hidden, launches_overlap=True)

    def prepare(self, payload_bytes):
        if payload_bytes // self.context.dtype.itemsize % self.hidden:
            raise Missing("payloads are no multiple of the hidden size {}".format(self.hidden))
        self.residual.zero_()  # then the residual output is the plain sum, which the check knows exactly
        self.norm.fill_(math.nan)

    def before_measure(self, elements):  # noqa: ARG002
        self.residual.copy_(self.input[: self.elements])

    def all_reduce(self, elements):
        shape = (elements // self.hidden, self.hidden)
        self.comm.trtllm_allreduce_fusion(
            allreduce_in=self.input[:elements].view(shape),
            world_size=self.context.ranks,
            world_rank=self.context.rank,
            token_num=shape[0],
            hidden_dim=self.hidden,
            workspace_ptrs=self.workspace,
            launch_with_pdl=True,
            trigger_completion_at_end=True,
            fp32_acc=True,
            pattern_code=self.pattern,
            use_oneshot=True,
            allreduce_out=None,
            residual_in=self.residual[:elements].view(shape),
            residual_out=self.output[:elements].view(shape),
            norm_out=self.norm[:elements].view(shape),
            quant_out=None,
            scale_out=None,
            rms_gamma=self.weight,
            rms_eps=1e-6,
            scale_factor=None,
            layout_code=None,
        )

    def extra_check(self, elements):
        torch = self.context.torch
        shape = (elements // self.hidden, self.hidden)
        total = self.output[:elements].view(shape).to(torch.float32)
        want = total * torch.rsqrt(total.pow(2).mean(1, keepdim=True) + 1e-6) * self.weight.to(torch.float32)
        got = self.norm[:elements].view(shape).to(torch.float32)
        error = float((got - want).norm() / want.norm())
        return error if math.isfinite(error) else None


BACKENDS = [
    Nccl,
    NcclGraph,
    NcclGraphTorch,
    SymmetricOneShot,
    SymmetricTwoShot,
    SymmetricMultimem,
    SglCustom,
    FlashInferCustom,
    FlashInferFused,
    Gloo,
]
BACKEND_NAMES = [backend.name for backend in BACKENDS]
DEFAULT_BACKENDS = {
    "cuda": [name for name in BACKEND_NAMES if name not in ("gloo", "nccl_graph_torch", "flashinfer_custom")],
    "cpu": ["gloo"],
}
REQUIRED_BACKENDS = {"cuda": ["nccl"], "cpu": ["gloo"]}


# ---------------------------------------------------------------------------------------------- faults

# Faults that tests and rehearsals set on purpose: KIND:RANK@BACKEND. The document says nothing of them but argv.
FAULTS = ("wrong-element", "overrun", "unwritten", "hang", "stop", "kill", "crash")


class Fault:
    """One fault to be shown by one rank in one backend."""

    def __init__(self, text):
        match = re.fullmatch(r"([a-z-]+):(\d+)@(\w+)", text)
        if not match or match.group(1) not in FAULTS:
            raise argparse.ArgumentTypeError("KIND:RANK@BACKEND with KIND one of " + ", ".join(FAULTS))
        self.kind, self.rank, self.backend = match.group(1), int(match.group(2)), match.group(3)

    def strikes(self, context, backend, *kinds):
        """Return whether this is the rank, the backend and one of the kinds."""
        return self.kind in kinds and (self.rank, self.backend) == (context.rank, backend.name)

    def on_result(self, context, backend, elements):
        """Spoil a result before it is compared."""
        if self.strikes(context, backend, "wrong-element"):
            backend.output[elements // 3] += 1
        if self.strikes(context, backend, "overrun"):
            backend.output[elements] = 0
        if self.strikes(context, backend, "unwritten"):
            backend.output[elements - 1] = math.nan

    def on_measure(self, context, backend):
        """Stop, die or wait for ever at the start of a measurement."""
        if self.strikes(context, backend, "hang"):
            threading.Event().wait()
        if self.strikes(context, backend, "stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.strikes(context, backend, "kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.strikes(context, backend, "crash"):
            raise RuntimeError("this fault was set on purpose")


# ---------------------------------------------------------------------------------------------- one backend


def on_stream(context):
    """Return the context manager under which GPU work runs; on CPU one that does nothing."""
    if context.is_cpu:
        return context.torch.no_grad()
    return context.torch.cuda.stream(context.stream)


def check(context, backend, payload_bytes, kind, fault):
    """Run one all-reduce on known data and compare; return whether it is right on every rank."""
    torch = context.torch
    elements = payload_bytes // context.dtype.itemsize
    data = Data(context, kind)
    canary = torch.arange(1, CANARY_ELEMENTS + 1, device=context.device).to(context.dtype)
    with on_stream(context):
        backend.output.fill_(math.nan)
        data.fill(backend.input, elements)
        for tensor in (backend.input, backend.output):
            tensor[elements : elements + CANARY_ELEMENTS] = canary
        context.synchronize()
        context.exchange.barrier()
        backend.all_reduce(elements)
        context.synchronize()
        if fault:
            fault.on_result(context, backend, elements)
        own = compare(context, data, backend.output, elements)
        tails = [tensor[elements : elements + CANARY_ELEMENTS] for tensor in (backend.input, backend.output)]
        own["canary_intact"] = all(bool((tail == canary).all()) for tail in tails)
        own["extra_relative_l2"] = backend.extra_check(elements)
    views = context.exchange.gather(own)
    limit = RELATIVE_L2_LIMIT[context.options.dtype]

    def is_right(view):
        errors = (view["relative_l2"], view["extra_relative_l2"])
        return (
            not view["wrong_elements"]
            and not view["unwritten_elements"]
            and view["canary_intact"]
            and all(error is not None and error <= limit for error in errors)
        )

    bad = [rank for rank, view in enumerate(views) if not is_right(view)]
    errors = [view["relative_l2"] for view in views]
    extras = [view["extra_relative_l2"] for view in views]
    firsts = [dict(view["first_wrong"], rank=rank) for rank, view in enumerate(views) if view["first_wrong"]]
    context.tell(
        "check",
        value={
            "backend": backend.name,
            "payload_bytes": payload_bytes,
            "data": kind,
            "ok": not bad,
            "bad_ranks": bad,
            "wrong_elements": sum(view["wrong_elements"] or 0 for view in views),
            "unwritten_elements": sum(view["unwritten_elements"] for view in views),
            "canary_intact": all(view["canary_intact"] for view in views),
            "relative_l2": None if None in errors else max(errors),
            "extra_relative_l2": None if None in extras else max(extras),
            "same_bits": len({view["bits"] for view in views}) == 1,
            "first_wrong": firsts[0] if firsts else None,
        },
    )
    return not bad


class Timer:
    """Time samples of one backend at one payload."""

    def __init__(self, context, backend, payload_bytes):
        self.context = context
        self.backend = backend
        self.elements = payload_bytes // context.dtype.itemsize
        self.operations, self.warmup, self.samples = sampling(payload_bytes, context.is_cpu)
        self.pristine = None
        data = Data(context, "random")
        data.fill(backend.input, self.elements)
        if backend.is_in_place:
            is_half = context.options.dtype == "float16"
            scale = IN_PLACE_SCALE_FLOAT16 if is_half else IN_PLACE_SCALE
            powers = IN_PLACE_POWERS_FLOAT16 if is_half else IN_PLACE_POWERS
            self.operations = max(1, min(self.operations, int(powers / math.log2(context.ranks))))
            backend.input[: self.elements] *= scale
            self.pristine = backend.input[: self.elements].clone()
        backend.before_measure(self.elements)
        self.operation_s = self.one_operation_s() if context.nodes > 1 else None
        if self.operation_s is not None:
            plan = fewer((self.operations, self.warmup, self.samples), self.operation_s)
            self.operations, self.warmup, self.samples = plan

    def one_operation_s(self):
        """Return how long one operation takes on the slowest rank; the one before it makes connections."""
        for _ in range(2):
            self.refill()
            self.context.synchronize()
            self.context.exchange.barrier()
            begun = time.monotonic()
            self.backend.all_reduce(self.elements)
            self.context.synchronize()
            seconds = time.monotonic() - begun
        return max(self.context.exchange.gather(round(seconds, 6)))

    def refill(self):
        """Undo the growth of an in-place sum."""
        if self.pristine is not None:
            self.backend.input[: self.elements] = self.pristine

    def operate(self):
        """Enqueue the operations of one sample."""
        for _ in range(self.operations):
            self.backend.all_reduce(self.elements)

    def on_cpu(self):
        """Return (microseconds for one operation in each sample, wall-clock microseconds)."""
        times = []
        for number in range(self.warmup + self.samples):
            self.refill()
            if number in (0, self.warmup):
                self.context.exchange.barrier()
            begun = time.perf_counter()
            self.operate()
            times.append((time.perf_counter() - begun) * 1e6 / self.operations)
        times = times[self.warmup :]
        return times, sum(times) / len(times)

    def on_gpu(self):
        """Return (microseconds for one operation in each sample, wall-clock microseconds).

        All samples are queued before the host waits: waiting after each one would add the host's own time.
        """
        torch, context = self.context.torch, self.context
        replay = self.operate
        if self.backend.is_graph:
            for _ in range(3):  # connections and buffers are made by the first eager calls
                self.refill()
                self.backend.all_reduce(self.elements)
            context.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=context.stream, capture_error_mode="thread_local"):
                self.operate()
            self.backend.captured()
            replay = graph.replay
        context.exchange.barrier()
        for _ in range(self.warmup):
            self.refill()
            replay()
        pairs = []
        begun = time.perf_counter()
        for _ in range(self.samples):
            self.refill()
            before = torch.cuda.Event(enable_timing=True)
            after = torch.cuda.Event(enable_timing=True)
            before.record()
            replay()
            after.record()
            pairs.append((before, after))
        context.stream.synchronize()
        wall = (time.perf_counter() - begun) * 1e6 / (self.samples * self.operations)
        return [before.elapsed_time(after) * 1e3 / self.operations for before, after in pairs], wall


def measure(context, backend, payload_bytes):
    """Time one row and tell it; return how long one operation takes in seconds, None where nobody asked."""
    with on_stream(context):
        timer = Timer(context, backend, payload_bytes)
        own, wall_us = timer.on_cpu() if context.is_cpu else timer.on_gpu()
    everyone = context.exchange.gather([round(value, 3) for value in own])
    row = {
        "backend": backend.name,
        "payload_bytes": payload_bytes,
        "is_graph": backend.is_graph,
        "is_in_place": backend.is_in_place,
        "operations_per_sample": timer.operations,
        "warmup_samples": timer.warmup,
        "samples": timer.samples,
        "wall_us": round(wall_us, 3),
    }
    row.update(row_statistics(payload_bytes, context.ranks, everyone))
    context.tell("row", value=row)
    return timer.operation_s


def intervals_us(context, operate, batches, length):
    """Return the microseconds between ends of operations, batch by batch; the host waits between batches.

    Intervals, not durations: when another process has the GPU for a while, the time passes between operations.
    """
    torch = context.torch
    times = []
    for _ in range(batches):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(length + 1)]
        events[0].record()
        for event in events[1:]:
            operate()
            event.record()
        context.stream.synchronize()
        times.extend(one.elapsed_time(other) * 1e3 for one, other in zip(events, events[1:]))  # noqa: B905, RUF007
    return times


def probe_compute(context):
    """Multiply matrices for about 0.4 s: the clocks rise, and a GPU shared with somebody else shows itself."""
    torch = context.torch
    size = 4096
    left, right = (torch.randn(size, size, device=context.device, dtype=context.dtype) for _ in range(2))
    with torch.cuda.stream(context.stream):
        torch.mm(left, right)
        context.synchronize()
        context.exchange.barrier()
        intervals_us(context, lambda: torch.mm(left, right), 50, 20)  # raises the clocks
        times = intervals_us(context, lambda: torch.mm(left, right), 50, 20)
    mean = sum(times) / len(times)
    own = {
        "rank": context.rank,
        "mean_us": round(mean, 3),
        "median_us": round(median(times), 3),
        "p99_us": round(percentile(times, 0.99), 3),
        "max_us": round(max(times), 3),
        "tflop_per_s": round(2 * size**3 / mean / 1e6, 1),
    }
    context.tell("probe", name="compute", value=context.exchange.gather(own))


def probe_peers(context, backend):
    """Let every rank read every other rank's memory, one distance at a time, and tell two matrices in GB/s.

    Row: who reads; column: from whom. The median shows the link, the mean what somebody else left of it.
    """
    torch = context.torch
    payload_bytes = min(64 * MIB, backend.elements * context.dtype.itemsize)
    elements = payload_bytes // context.dtype.itemsize
    target = torch.empty(elements, dtype=context.dtype, device=context.device)
    medians, means = [None] * context.ranks, [None] * context.ranks
    for distance in range(1, context.ranks):
        peer = (context.rank + distance) % context.ranks
        source = backend.peer(peer, elements)
        context.exchange.barrier()
        with torch.cuda.stream(context.stream):
            target.copy_(source)
            times = intervals_us(context, lambda: target.copy_(source), 2, 40)  # noqa: B023
        medians[peer] = round(algbw_gb_per_s(payload_bytes, median(times) / 1e6), 2)
        means[peer] = round(algbw_gb_per_s(payload_bytes, sum(times) / len(times) / 1e6), 2)
    context.exchange.barrier()
    context.tell("probe", name="peer_read_gb_per_s", value=context.exchange.gather(medians))
    context.tell("probe", name="peer_read_mean_gb_per_s", value=context.exchange.gather(means))


_NCCL_ERROR = re.compile(r"NCCL error in: \S+, (.*?)(?: \(run with [^)]*\))?, NCCL version")


def root_line(error):
    """Return an exception as one line, without control characters.

    torch's first line about NCCL only says where in torch's source it was noticed; NCCL's own words come last.
    """
    lines = "{}: {}".format(type(error).__name__, error).strip().splitlines()
    text = lines[0] if lines else "?"
    kind = _NCCL_ERROR.search(text)
    if kind and "Last error:" in lines[:-1]:
        last = lines[lines.index("Last error:") + 1].strip()
        text = "{}: NCCL: {}: {}".format(type(error).__name__, kind.group(1), last)
    return "".join(character for character in text if character.isprintable())[:400]


def run_backend(context, kind, payloads, fault):
    """Set up, check and time one backend; tell its state."""
    name = kind.name
    if kind.is_within_host and context.nodes > 1:
        context.tell("backend", name=name, state="missing", reason="it works within one host only")
        return
    fitting = [
        payload
        for payload in payloads
        if payload >= kind.min_payload_bytes and payload <= (kind.max_payload_bytes or payload)
    ]
    checked = fitting or payloads[:1]
    if kind.min_payload_bytes:
        checked = sorted(set(payloads[:1] + checked))
    context.phase("set_up", name)
    begun = time.monotonic()
    backend, state, reason = None, "missing", None
    try:
        backend = kind(context, max(checked))
        for payload in checked[:1]:
            backend.prepare(payload)
    except (Missing, ImportError) as error:
        reason = str(error) if isinstance(error, Missing) else root_line(error)
    except (RuntimeError, AttributeError, TypeError, ValueError, OSError, AssertionError) as error:
        traceback.print_exc()
        reason = "cannot be set up: " + root_line(error)
    reason = context.agree(reason)
    seconds = {"set_up": round(time.monotonic() - begun, 3), "check": 0.0, "measure": 0.0}
    if reason is not None:
        context.tell("backend", name=name, state=state, reason=reason, seconds=seconds)
        return
    state = "measured"
    second_per_byte, left_out = 0.0, []
    for payload in checked:
        if payload * second_per_byte > OPERATION_LIMIT_S:
            left_out.append(payload)
            continue
        context.phase("check", name, payload)
        begun = time.monotonic()
        backend.prepare(payload)
        right = [check(context, backend, payload, data, fault) for data in ("integers", "random")]
        seconds["check"] += time.monotonic() - begun
        if not all(right):
            state, reason = "failed", "wrong result at {} bytes".format(payload)
            break
        if payload not in fitting:
            continue
        context.phase("measure", name, payload)
        begun = time.monotonic()
        if fault:
            fault.on_measure(context, backend)
        operation_s = measure(context, backend, payload)
        if operation_s and payload > SMALL_PAYLOAD_BYTES:
            second_per_byte = operation_s / payload
        seconds["measure"] += time.monotonic() - begun
    if isinstance(backend, SymmetricTwoShot) and state == "measured":
        context.phase("peer_reads", name)
        probe_peers(context, backend)
    context.synchronize()
    context.exchange.barrier()
    backend.close()
    notes = backend.notes
    if left_out:
        notes["left_out_bytes"] = left_out
    del backend
    if not context.is_cpu:
        context.torch.cuda.empty_cache()
    seconds = {key: round(value, 3) for key, value in seconds.items()}
    context.tell("backend", name=name, state=state, reason=reason, seconds=seconds, notes=notes)


def work(context, backends):
    """Do everything one rank does."""
    connect(context)
    context.phase("describe")
    largest = describe(context)
    options = context.options
    payloads = options.payloads or PROFILES[options.profile]
    payloads = sorted(payload for payload in set(payloads) if payload <= largest)
    if not payloads:
        raise Refusal("no payload fits the free memory of {} bytes".format(largest * 6))
    if not context.is_cpu:
        context.phase("warm_up")
        probe_compute(context)
    kinds = {kind.name: kind for kind in BACKENDS}
    for name in backends:
        run_backend(context, kinds[name], payloads, options.inject)
    context.nccl_error = None  # from here on it is no fault when another rank goes
    context.phase("leave")
    context.exchange.barrier()
    context.tell("done")
    context.exchange.leave()


def start_watchdog(context, report):
    """Start the thread that ends this rank when a limit strikes, its launcher is gone, or it is told to end.

    The main thread may wait for the GPU inside C code, where no Python signal handler ever runs, so the limits
    are kept by a thread, and SIGTERM is taken here when this rank belongs to somebody else's launcher.
    """
    options = context.options
    deadline = time.monotonic() + options.timeout
    parent = int(os.environ.get("BENCH_PARENT", "0"))
    if report is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def watch():
        while True:
            told = None
            if report is not None:
                told = signal.sigtimedwait({signal.SIGTERM}, WATCH_EVERY_S)
            else:
                time.sleep(WATCH_EVERY_S)
            ask = context.nccl_error  # the main thread may take it away
            lost = ask() if report is not None and ask is not None else None
            backend, since = context.spot
            limit = options.backend_timeout if backend else options.setup_timeout
            reason = None
            if told:
                reason = ("interrupted", "told to end by SIGTERM: another rank ended or the run was stopped")
            elif time.monotonic() > deadline + (0 if report is not None else 10):
                reason = ("timeout", "everything together took more than {:g} s".format(options.timeout))
            elif report is not None and time.monotonic() - since > limit:
                reason = ("timeout", "{} took more than {:g} s".format(backend or "set-up", limit))
            elif lost:
                reason = ("crash", lost)
            elif parent and os.getppid() != parent:
                os._exit(CRASHED)
            if reason:
                if report is not None and context.rank:
                    context.tell(
                        "error", message="{}{}".format(reason[1], where(report.rank(context.rank))), traceback=""
                    )
                if report is not None and context.rank == 0:
                    report.failure(reason[0], reason[1] + where(report.rank(0)), 0, backend)
                    report.finish(*report.status([]))
                os._exit(CRASHED)

    threading.Thread(target=watch, daemon=True).start()


def noting(report, path):
    """Return what takes in events of this rank and keeps at ``path`` how far it came, for whoever looks afterwards."""

    def tell(event):
        report.feed(event)
        if event["event"] in ("phase", "error", "done"):
            note = dict(report.rank(event["rank"]), schema=SCHEMA, program="allreduce_bench_node")
            note.update(node=int(os.environ.get("GROUP_RANK", 0)), nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)))
            log = read_nccl_logs(report.log_directory) if event["event"] == "error" and report.log_directory else None
            note["nccl"] = log and {key: log[key] for key in ("network", "network_devices", "warnings")}
            try:
                write_atomically(path, json.dumps(note) + "\n")
            except OSError as error:
                print("cannot write {}: {}".format(path, error), file=sys.stderr)

    return tell


def worker_main(options):
    """Run one rank and never return: destructors of CUDA and NCCL would only cost time, or hang."""
    report = None
    directory = os.environ.get("BENCH_DIRECTORY")
    if "BENCH_REPORT_FD" in os.environ:
        # Dies with its launcher, even when that is killed: PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        pipe = os.fdopen(int(os.environ["BENCH_REPORT_FD"]), "w", encoding="utf-8")
        stream = open(stack_file(directory, os.environ["RANK"]), "w")  # noqa: SIM115 (open until the end)
        faulthandler.register(signal.SIGUSR1, file=stream, all_threads=False)

        def tell(event):
            pipe.write(json.dumps(event) + "\n")
            pipe.flush()
    else:
        is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if is_torchrun:
            # torchrun's main thread started it; a torchrun that is killed must leave no rank (PR_SET_PDEATHSIG).
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        report = Report(options, "torchrun" if is_torchrun else "environment")
        is_noting = options.node_output and os.environ.get("LOCAL_RANK") == "0"
        if os.environ["RANK"] == "0" or is_noting:
            report.log_directory = tempfile.mkdtemp(prefix="allreduce-bench-")
            let_nccl_talk(os.environ, report.log_directory)
        tell = noting(report, options.node_output) if is_noting else report.feed
    if not options.allow_multicast:
        # torch makes multicast objects with every symmetric allocation where the GPUs can, asked for or not.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    context = Context(options, tell)
    backends = options.backends
    if "BENCH_BACKENDS" in os.environ:
        backends = os.environ["BENCH_BACKENDS"].split(",")
    start_watchdog(context, report)
    status = MEASURED
    try:
        work(context, backends)
    except BaseException as error:
        traceback.print_exc()
        context.tell("error", message=root_line(error), traceback=traceback.format_exc()[-4000:])
        status = CRASHED
        if report is not None:
            report.failure("crash", "rank {} failed: {}".format(context.rank, root_line(error)), context.rank)
    if report is not None and context.rank == 0:
        status = report.finish(*report.status(options.require))
    elif report is not None and report.log_directory:
        shutil.rmtree(report.log_directory, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# ---------------------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors reach the document instead of ending the program."""

    def error(self, message):
        raise Refusal(message)


def positive(text):
    """Parse a number of seconds."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def names(text):
    """Parse a comma-separated list of backends."""
    parts = [part for part in text.split(",") if part]
    unknown = [part for part in parts if part not in BACKEND_NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(
            "unknown backend {}; known: {}".format(", ".join(unknown), ", ".join(BACKEND_NAMES))
        )
    return parts


def payload_list(text):
    """Parse comma-separated payloads in bytes, multiples of 4 KiB."""
    values = [int(part) for part in text.split(",")]
    if any(value <= 0 or value % 4096 for value in values):
        raise argparse.ArgumentTypeError("payloads are positive multiples of 4096 bytes")
    return values


def rank_count(text):
    """Parse a number of ranks or "auto" (None)."""
    return None if text == "auto" else int(text)


def parser():
    """Return the command line."""
    line = Parser(prog="allreduce_bench.py", description=__doc__.splitlines()[0])
    line.add_argument("--ranks", type=rank_count, default=None)
    line.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    line.add_argument("--profile", choices=sorted(PROFILES), default="quick")
    line.add_argument("--backends", type=names, default=None)
    line.add_argument("--require", type=names, default=None)
    line.add_argument("--payloads", type=payload_list, default=None)
    line.add_argument("--hidden-size", type=int, default=4096)
    line.add_argument("--dtype", choices=sorted(RELATIVE_L2_LIMIT), default=None)
    line.add_argument("--seed", type=int, default=1)
    line.add_argument("--allow-multicast", action="store_true")
    line.add_argument("--timeout", type=positive, default=180.0)
    line.add_argument("--setup-timeout", type=positive, default=120.0)
    line.add_argument("--backend-timeout", type=positive, default=60.0)
    line.add_argument("--output", default=None)
    line.add_argument("--node-output", default=None)
    line.add_argument("--inject", type=Fault, default=None, help=argparse.SUPPRESS)
    line.add_argument("--worker-program", default=None, help=argparse.SUPPRESS)
    return line


def settle(options, is_worker):
    """Fill in what the command line left open; raise Refusal when there is nothing to measure on."""
    if is_worker:
        options.device = os.environ.get("BENCH_DEVICE", options.device)
        if options.device == "auto":
            options.device = "cuda" if visible_gpus() else "cpu"
    else:
        gpus = None
        if options.device == "auto" or (options.device == "cuda" and options.ranks is None):
            gpus = visible_gpus()
        if options.device == "auto":
            options.device = "cuda" if gpus else "cpu"
        if options.ranks is None:
            options.ranks = gpus if options.device == "cuda" else 2
        if options.device == "cuda" and gpus is not None and options.ranks > gpus:
            raise Refusal("{} ranks are wanted and {} GPUs are visible".format(options.ranks, gpus))
        if options.ranks < 2:
            raise Refusal("an all-reduce needs two ranks, and {} was found or asked for".format(options.ranks))
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    if options.require is None:
        options.require = REQUIRED_BACKENDS[options.device]
    if options.backends is None:
        options.backends = list(DEFAULT_BACKENDS[options.device])
    options.backends += [name for name in options.require if name not in options.backends]
    wrong = [name for name in options.backends if (name == "gloo") != (options.device == "cpu")]
    if wrong:
        raise Refusal("{} does not run on {}".format(", ".join(wrong), options.device))


class Interrupted(Exception):
    """The launcher was told to end."""


def launcher_main(options, report):
    """Start the ranks, wait for them, and return the exit status."""

    def interrupt(number, _frame):
        raise Interrupted(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, interrupt)
    for name in options.backends:
        report.backend(name)
    directory = tempfile.mkdtemp(prefix="allreduce-bench-")
    report.log_directory = directory
    launcher = Launcher(options, report, directory)
    try:
        launcher.run(options.backends)
    except Interrupted as error:
        report.failure("interrupted", "ended by {}".format(error))
    except OSError as error:
        report.failure("crash", "the launcher failed: {}".format(root_line(error)))
    finally:
        report.document["load"] = launcher.load.result(launcher.own_pids)
        keep = os.environ.get("BENCH_KEEP_LOGS")
        if keep:
            shutil.copytree(directory, keep, dirs_exist_ok=True)
    return report.finish(*report.status(options.require))


def main():
    """Run as launcher or as one rank."""
    is_worker = "BENCH_REPORT_FD" in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)
    line = parser()
    try:
        options = line.parse_args()
        if is_worker and int(os.environ["WORLD_SIZE"]) < 2:
            raise Refusal("an all-reduce needs two ranks")
        settle(options, is_worker)
    except Refusal as error:
        fallback = argparse.Namespace(output=output_option(sys.argv[1:]), seed=None, profile=None)
        print("allreduce_bench.py: {}".format(error), file=sys.stderr)
        return Report(fallback, "none").finish(USAGE, str(error))
    if is_worker:
        worker_main(options)
    return launcher_main(options, Report(options, "own"))


def output_option(arguments):
    """Return the value of --output on a command line that may be wrong otherwise, or None."""
    for position, argument in enumerate(arguments):
        if argument == "--output" and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith("--output="):
            return argument.partition("=")[2]
    return None


if __name__ == "__main__":
    sys.exit(main())
