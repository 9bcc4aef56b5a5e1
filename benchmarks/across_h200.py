#!/usr/bin/env python3
"""Run all-reduce across two "hosts" made of one machine with two GPUs, beside NCCL within that machine.

Usage:
  python3 benchmarks/across_h200.py plan PLAN.json [--python PATH] [--device cuda|cpu]
  python3 benchmarks/across_h200.py measure PLAN.json --output RESULT.json [--only PART,...] [--ip PATH]
  python3 benchmarks/across_h200.py judge RESULT.json

``plan`` needs bringup: it writes the command lines that ``bringup verify --across`` gives to each host, taken from
the same function, and nothing is started. ``measure`` needs root, the standard library here, and torch in the plan's
interpreter. Parts: healthy (three runs across, each followed by its peer within one host), log (NCCL's log as it is),
faults (each fault on a pair of hosts of its own, all at the same time). ``judge`` needs bringup and no GPU: it hands
what came back to the code that judges ``verify --across`` and prints the tables.

A "host" is a network namespace with one end of a veth pair, a host name and a view of the file system of its own, and
one GPU. NCCL takes hosts apart by name and boot, so it uses the network between these two. But no cable, switch or
RDMA device is there: the figures are those of one machine's TCP, not of a network. Without namespaces, two addresses
of the loopback interface stand in, which the result says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "files" / "allreduce_bench.py"
WORK = ROOT / "files" / "host_work.py"

RUN = "across-benchmark"
HOSTS = ("gpu-01", "gpu-02")
SCRIPT = "/run/bringup/allreduce_bench.py"
WORKER = "/run/bringup/host_work.py"
DOCUMENTS = "documents/allreduce_across.json", "documents/allreduce_across_node.json"
ADDRESSES = {
    "veth": {"gpu-01": "10.99.0.1", "gpu-02": "10.99.0.2"},
    "loopback": {"gpu-01": "127.0.0.2", "gpu-02": "127.0.0.3"},
}
SAID_CHARACTERS = 16_000  # as much as verify keeps
# A program with multicast can put GPUs that others share out of service; env -i would drop what forbids it.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
MIB = 1 << 20


@dataclass(frozen=True)
class Fault:
    """What is done to a run.

    ``variables`` are by host; ``act`` strikes ``host`` in the middle of ``backend``; ``prefix`` goes before the command
    line of each part; ``rate`` is that of both ends of the link (then all payloads are asked for).
    """

    variables: Mapping[str, Mapping[str, str]] | None = None
    act: str | None = None
    host: str = "gpu-02"
    backend: str = "nccl"
    arguments: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    rate: str | None = None


def everywhere(**variables: str) -> dict[str, dict[str, str]]:
    """Return the same variables for each host."""
    return {host: dict(variables) for host in HOSTS}


FAULTS = {
    "slow_link_1gbit": Fault(rate="1gbit"),
    "slow_link_10gbit": Fault(rate="10gbit"),
    "locked_memory_64k": Fault(prefix=("sh", "-c", 'ulimit -l 64; exec "$@"', "sh")),
    "rank_killed": Fault(act="kill_rank"),
    "rank_killed_in_graph": Fault(act="kill_rank", backend="nccl_graph"),
    "first_rank_killed": Fault(act="kill_rank", host="gpu-01"),
    "rank_stopped": Fault(act="stop_rank"),
    "link_lost": Fault(act="link_down"),
    "host_lost": Fault(act="host_down"),
    "wrong_element": Fault(arguments=("--inject", "wrong-element:1@BACKEND")),
    "no_such_interface": Fault(everywhere(NCCL_SOCKET_IFNAME="eth9")),
    "no_such_interface_on_one": Fault({"gpu-02": {"NCCL_SOCKET_IFNAME": "eth9"}}),
    "interface_leads_nowhere": Fault(everywhere(NCCL_SOCKET_IFNAME="lo")),
    "interface_leads_nowhere_on_one": Fault({"gpu-02": {"NCCL_SOCKET_IFNAME": "lo"}}),
}
HARMLESS = {"healthy", "log", "slow_link_1gbit", "slow_link_10gbit", "locked_memory_64k"}
# The host that must be named, and words of what is said of it.
EXPECTED = {
    "rank_killed": ("gpu-02", "SIGKILL"),
    "rank_killed_in_graph": ("gpu-02", "SIGKILL"),
    "first_rank_killed": ("gpu-01", "SIGKILL"),
    "host_lost": ("gpu-02", "was lost"),
    "wrong_element": ("gpu-02", "wrong result"),
    "rank_stopped": ("gpu-02", "fell silent"),
    "no_such_interface": ("gpu-01", "no network interface"),
    "no_such_interface_on_one": ("gpu-02", "no network interface"),
    "interface_leads_nowhere_on_one": ("gpu-02", "lo:127.0.0.1"),
}
# How long both hosts' parts may live after the fault. A killed rank closes its connections, and NCCL says so at once;
# a cut cable says nothing, so the backend's limit (60 s) counts, and then what torchrun gets to end (45 s).
ENDS_WITHIN_S = {
    "rank_killed": 10.0,
    "rank_killed_in_graph": 10.0,
    "first_rank_killed": 10.0,
    "rank_stopped": 110.0,
    "link_lost": 110.0,
    "host_lost": 110.0,
}


# ---------------------------------------------------------------- on the controller: what verify would start


def plan(options: argparse.Namespace) -> int:
    """Write each host's command line for every case."""
    sys.path.insert(0, str(ROOT))
    from bringup.bench.across import Meeting
    from tasks import across

    is_cpu = options.device == "cpu"
    backend = "gloo" if is_cpu else "nccl"

    def commands(variables: Mapping[str, Mapping[str, str]], more: tuple[str, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for network, addresses in ADDRESSES.items():
            meeting = Meeting(addresses, 29400, RUN)
            found[network] = {"endpoint": meeting.endpoint, "hosts": {}}
            for number, host in enumerate(HOSTS):
                own = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
                own |= {"LC_ALL": "C.UTF-8", "CUDA_HOME": "/usr/local/cuda", "CUDA_VISIBLE_DEVICES": str(number)}
                own |= NO_MULTICAST | variables.get(host, {})
                part = across.Part(
                    environment="existing",
                    python=options.python,
                    script=SCRIPT,
                    device=options.device,
                    ranks=1,
                    address=addresses[host],
                    variables=own,
                    timeout_s=180,
                    profile="quick",
                    is_lookalike=False,
                    rdma={},
                )
                limit_s = across.limit_s(meeting, part)
                argv = [*across.command(meeting, host, part), *more]
                work = ["--run", RUN, "do", "verify-across", "--limit-s", str(limit_s), "--", *argv]
                found[network]["hosts"][host] = work
        return found

    large = 16 * MIB if is_cpu else 64 * MIB  # gloo on CPU is only for trying this program out
    few = ("--payloads", f"8192,{large}")
    talk = everywhere(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,ENV,NET,P2P,SHM,NVLS,TUNING")
    for variables in talk.values():
        variables["NCCL_DEBUG_FILE"] = "/run/bringup/nccl.%h.%p"
    cases = {"healthy": commands({}, ()), "log": commands(talk, few)}
    for name, fault in FAULTS.items():
        struck = f"{backend}_graph" if fault.backend == "nccl_graph" and not is_cpu else backend
        given = tuple(word.replace("BACKEND", struck) for word in fault.arguments)
        cases[name] = commands(fault.variables or {}, (*(() if fault.rate else few), *given))
        cases[name]["prefix"], cases[name]["rate"] = fault.prefix, fault.rate
        cases[name]["act"] = {"do": fault.act, "host": fault.host, "backend": struck, "payload_bytes": large}
        cases[name]["act"]["after_s"] = 0.0 if is_cpu else 0.3
    document = {"schema": 1, "program": "across_h200 plan", "device": options.device, "python": options.python}
    Path(options.plan).write_text(json.dumps({**document, "cases": cases}) + "\n")
    return 0


# ---------------------------------------------------------------- on the machine: two hosts made of one

_ENTER = r"""
mount --bind "$0/run" /run/bringup && mount --bind "$0/state" /var/lib/bringup && mount --bind "$0/hosts" /etc/hosts &&
echo "$1" > /proc/sys/kernel/hostname || exit 70
[ -z "$2" ] || mount -t sysfs none /sys || exit 70
shift 2; exec "$@"
"""

STREAM = """
import socket, sys, time
if sys.argv[1] == "take":
    server = socket.create_server((sys.argv[2], 29600)); one = server.accept()[0]; count = 0
    place = bytearray(4 << 20)
    while (got := one.recv_into(place)): count += got
else:
    until = time.monotonic() + 20
    while True:
        try: one = socket.create_connection((sys.argv[2], 29600)); break
        except OSError:
            if time.monotonic() > until: raise
            time.sleep(0.05)
    data = bytes(4 << 20); begun = time.monotonic(); count = 0
    while time.monotonic() - begun < 3: one.sendall(data); count += len(data)
    print(count / (time.monotonic() - begun) / 1e9)
"""


class Pair:
    """Two hosts of one machine, connected with each other and nothing else."""

    def __init__(self, number: int, ip: str | None, tc: str | None, directory: Path) -> None:
        self.number = number
        self.ip = ip
        self.tc = tc
        self.network = "veth" if ip else "loopback"
        self.directory = {host: directory / f"{number}-{host}" for host in HOSTS}

    def namespace(self, host: str) -> str:
        """Return the name of a host's network namespace."""
        return f"across-{self.number}-{host}"

    def open(self) -> None:
        """Make the hosts."""
        for host, directory in self.directory.items():
            for name in ("run", "state"):
                (directory / name).mkdir(parents=True)
            (directory / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n")
            (directory / "run" / "run.lock").write_text(json.dumps({"run": RUN}))
            shutil.copy(BENCH, directory / "run" / "allreduce_bench.py")
            shutil.copy(WORK, directory / "run" / "host_work.py")
        if self.ip is None:
            return
        names = [self.namespace(host) for host in HOSTS]
        for name in names:
            self._ip("netns", "add", name)
        self._ip(*("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1]))
        for host, name in zip(HOSTS, names, strict=True):
            self._ip("-n", name, "addr", "add", f"{ADDRESSES['veth'][host]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._ip("-n", name, "link", "set", device, "up")

    def close(self) -> None:
        """Take the namespaces away."""
        for host in HOSTS if self.ip else ():
            with suppress(subprocess.CalledProcessError):
                self._ip("netns", "del", self.namespace(host))

    def _ip(self, *words: str) -> None:
        assert self.ip is not None
        subprocess.run([self.ip, *words], check=True, capture_output=True, text=True, timeout=30)

    def link(self, host: str, state: str) -> None:
        """Pull the cable or plug it in: nobody is told anything."""
        if self.ip is not None:
            self._ip("-n", self.namespace(host), "link", "set", "eth0", state)

    def shape(self, rate: str | None) -> None:
        """Hold both directions to a rate, or let them run free."""
        for host in HOSTS if self.ip is not None and self.tc is not None else ():
            words = ["nsenter", f"--net=/run/netns/{self.namespace(host)}", str(self.tc), "qdisc"]
            if rate is None:
                subprocess.run([*words, "del", "dev", "eth0", "root"], capture_output=True, timeout=30)
            else:
                words += ["add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
                subprocess.run(words, check=True, capture_output=True, timeout=30)

    def start(self, host: str, argv: list[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a program on a host."""
        words = ["unshare", "--mount", "--uts", "sh", "-c", _ENTER, str(self.directory[host]), host]
        words += ["x" if self.ip else "", *argv]
        if self.ip is not None:
            words = ["nsenter", f"--net=/run/netns/{self.namespace(host)}", *words]
        with output.open("wb") as stream:
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT)

    def stream_gb_per_s(self) -> float | None:
        """Return what one TCP connection carries between the hosts, sent and taken by a plain program."""
        address = ADDRESSES[self.network][HOSTS[0]]
        said = {host: self.directory[host] / "stream.log" for host in HOSTS}
        both = []
        for host, role in zip(HOSTS, ("take", "send"), strict=True):
            both.append(self.start(host, ["python3", "-c", STREAM, role, address], said[host]))
        try:
            for process in reversed(both):
                process.wait(timeout=60)
            return round(float(said[HOSTS[1]].read_text()), 3)
        except (ValueError, subprocess.TimeoutExpired):
            return None
        finally:
            for process in both:
                process.kill()
                process.wait()


def descendants(pid: int) -> list[int]:
    """Return a process and everything below it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        found.append(one := todo.pop())
        todo += children.get(one, [])
    return found


def command_line(pid: int) -> list[str]:
    """Return a process's words; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def strike(pair: Pair, act: Mapping[str, Any], processes: Mapping[str, subprocess.Popen[bytes]]) -> float:
    """Wait until a host measures the payload, strike, and return when (seconds of the monotonic clock)."""
    host = act["host"]
    note = pair.directory[host] / "run" / DOCUMENTS[1]
    while processes[host].poll() is None:
        with suppress(OSError, ValueError):
            told = json.loads(note.read_text())
            if [told["phase"], told["backend"], told["payload_bytes"]] == [
                "measure",
                act["backend"],
                act["payload_bytes"],
            ]:
                break
        time.sleep(0.01)
    time.sleep(act["after_s"])
    tree = descendants(processes[host].pid)
    ranks = [pid for pid in tree if command_line(pid)[1:3] == ["-u", SCRIPT]]
    if act["do"] in ("link_down", "host_down"):
        pair.link(host, "down")
    numbers = {"kill_rank": signal.SIGKILL, "stop_rank": signal.SIGSTOP, "host_down": signal.SIGKILL}
    for pid in tree if act["do"] == "host_down" else ranks[:1]:
        if act["do"] in numbers:
            os.kill(pid, numbers[act["do"]])
    return time.monotonic()


def run_case(pair: Pair, name: str, case: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Run both parts of a case and return how each of them ended."""
    begun = time.monotonic()
    given = case[pair.network]
    for host in HOSTS:
        pair.link(host, "up")
    pair.shape(None)
    if case.get("rate"):
        pair.shape(case["rate"])
    prefix = case.get("prefix") or []
    logs = {host: pair.directory[host] / f"{name}.log" for host in HOSTS}
    for directory in pair.directory.values():
        for document in DOCUMENTS:
            (directory / "run" / document).unlink(missing_ok=True)
    processes = {
        host: pair.start(host, [*prefix, "python3", WORKER, *argv], logs[host]) for host, argv in given["hosts"].items()
    }
    act = case.get("act") or {}
    struck = strike(pair, act, processes) if act.get("do") else None
    seen: set[int] = set()
    ended: dict[str, float] = {}
    while len(ended) < len(processes) and time.monotonic() - begun < limit_s:
        for host, process in processes.items():
            seen.update(descendants(process.pid))
            if host not in ended and process.poll() is not None:
                ended[host] = time.monotonic()
        time.sleep(0.1)
    until = time.monotonic() + 5
    while (left := [pid for pid in seen if is_alive(pid) and SCRIPT in command_line(pid)]) and time.monotonic() < until:
        time.sleep(0.1)
    record: dict[str, Any] = {"name": name, "network": pair.network, "endpoint": given["endpoint"], "hosts": {}}
    record["left"] = [" ".join(command_line(pid))[:200] for pid in left]
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for host, process in processes.items():
        if host not in ended:
            for pid in descendants(process.pid):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        is_lost = act.get("do") == "host_down" and act["host"] == host  # nobody could ask it
        said = logs[host].read_text(errors="replace")[-SAID_CHARACTERS:]
        documents = [_json(pair.directory[host] / "run" / path) for path in DOCUMENTS]
        record["hosts"][host] = {
            "status": None if is_lost or host not in ended else process.returncode,
            "said": "" if is_lost else said,
            "document": None if is_lost else documents[0],
            "note": None if is_lost else documents[1],
            "ended_s": round(ended[host] - begun, 2) if host in ended else None,
            "ended_after_fault_s": round(ended[host] - struck, 2) if host in ended and struck else None,
        }
    record["seconds"] = round(time.monotonic() - begun, 2)
    print(f"{name}: {[one['status'] for one in record['hosts'].values()]}, {record['seconds']} s", file=sys.stderr)
    return record


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def within(python: str, device: str) -> dict[str, Any]:
    """Run the bench within one host, with ranks of its own: the peer of a run across."""
    begun = time.monotonic()
    words = [python, str(BENCH)]
    words += ["--ranks", "2", "--device", device]
    words += ["--profile", "smoke"] if device == "cpu" else ["--backends", "nccl,nccl_graph"]
    done = subprocess.run(words, env={**os.environ, **NO_MULTICAST}, capture_output=True, text=True, timeout=170)
    lines = done.stdout.strip().splitlines()
    print(f"within one host: {done.returncode}, {time.monotonic() - begun:.1f} s", file=sys.stderr)
    return {"status": done.returncode, "document": json.loads(lines[-1]) if lines else None}


@contextmanager
def pairs(count: int, options: argparse.Namespace, directory: Path) -> Iterator[list[Pair]]:
    """Make pairs of hosts, over veth where the machine can do that, and take them away."""
    made: list[Pair] = []
    try:
        for number in range(count):
            pair = Pair(number, options.ip, options.tc, directory)
            made.append(pair)
            try:
                pair.open()
            except (OSError, subprocess.SubprocessError) as error:
                if number:
                    raise
                print(f"no network namespaces: {getattr(error, 'stderr', '') or error}", file=sys.stderr)
                pair.close()
                shutil.rmtree(directory, ignore_errors=True)
                options.ip = None
                made = [Pair(0, None, None, directory)]
                made[0].open()
        yield made
    finally:
        for pair in made:
            pair.close()


def measure(options: argparse.Namespace) -> int:
    """Run the parts asked for, and write what there is after each."""
    planned = json.loads(Path(options.plan).read_text())
    parts, cases = options.only.split(","), planned["cases"]
    wanted = [name for name in FAULTS if not options.faults or name in options.faults.split(",")]
    directory = Path(options.scratch)
    for path in ("/run/bringup", "/var/lib/bringup", "/run/netns"):
        Path(path).mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "schema": 1,
        "program": "across_h200",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kernel": platform.release(),
        "device": planned["device"],
        "driver": (_text("/sys/module/nvidia/version")),
        "within": [],
        "runs": [],
        "nccl_log": {},
    }

    def save() -> None:
        temporary = Path(options.output).with_suffix(".part")
        temporary.write_text(json.dumps(result) + "\n")
        temporary.replace(options.output)

    faults = wanted if "faults" in parts else []
    with pairs(max(1, min(len(faults), options.at_once)), options, directory) as made:
        result["network"] = made[0].network
        result["stream_gb_per_s"] = made[0].stream_gb_per_s()
        for _ in range(options.repeats if "healthy" in parts else 0):
            result["runs"].append(run_case(made[0], "healthy", cases["healthy"], 400))
            result["within"].append(within(planned["python"], planned["device"]))
            save()
        if "log" in parts:
            result["runs"].append(run_case(made[0], "log", cases["log"], 200))
            for host, place in made[0].directory.items():
                result["nccl_log"][host] = "".join(path.read_text() for path in sorted(place.glob("run/nccl.*")))
            save()
        with ThreadPoolExecutor(len(made)) as pool:
            free = list(made)

            def one(name: str) -> None:
                pair = free.pop()
                try:
                    if cases[name]["act"]["do"] in ("link_down", "host_down") and pair.ip is None:
                        return  # the loopback interface has no cable
                    if cases[name]["rate"] and (pair.ip is None or pair.tc is None):
                        return
                    result["runs"].append(run_case(pair, name, cases[name], options.limit_s))
                finally:
                    free.append(pair)

            list(pool.map(one, faults))
        save()
    shutil.rmtree(directory, ignore_errors=True)
    return 0


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


# ---------------------------------------------------------------- on the controller: what verify would say


def rows_of(documents: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return rows by backend and payload."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for document in documents:
        for row in document["rows"]:
            found.setdefault((row["backend"], row["payload_bytes"]), []).append(row)
    return found


def compare(result: Mapping[str, Any]) -> None:
    """Print both side by side: across two hosts of one machine, and within one host."""
    across = [run["hosts"][HOSTS[0]]["document"] for run in result["runs"] if run["name"] == "healthy"]
    across = [document for document in across if document]
    inside = [run["document"] for run in result["within"] if run["document"]]
    if not across or not inside:
        return
    system = across[0]["system"]
    print(f"\ndriver {system['driver']}, torch {system['torch']}, NCCL {system['nccl']}, kernel {result['kernel']}")
    print(f'two "hosts" of one machine over {result["network"]}; one TCP stream: {result["stream_gb_per_s"]} GB/s')
    for label, documents in (("across", across), ("within", inside)):
        log = documents[0]["nccl_log"] or {}
        print(f"{label}: network {log.get('network')} {log.get('network_devices')}, transports {log.get('transports')}")
    print("\n| backend | payload | across, us | GB/s busbw | within, us | GB/s busbw | across/within | spread across |")
    print("|---|---|---|---|---|---|---|---|")
    theirs = rows_of(inside)
    for key, rows in sorted(rows_of(across).items()):
        ours_us, ours = [median(row[name] for row in rows) for name in ("median_us", "busbw_gb_per_s")]
        us, gb = [median(row[name] for row in theirs[key]) for name in ("median_us", "busbw_gb_per_s")]
        wide = (max(row["median_us"] for row in rows) - min(row["median_us"] for row in rows)) / ours_us
        print(
            f"| {key[0]} | {key[1]} | {ours_us:.1f} | {ours:.3f} | {us:.1f} | {gb:.3f} | {ours_us / us:.1f} times "
            f"| {wide:.1%} |"
        )
    checks = [check["ok"] for document in (*across, *inside) for check in document["checks"]]
    print(f"\n{sum(checks)} of {len(checks)} results right")


def judge(options: argparse.Namespace) -> int:
    """Judge every run as verify does and print the tables."""
    sys.path.insert(0, str(ROOT))
    from bringup.bench import across, parse
    from bringup.bench.document import parse_note

    text = Path(options.result).read_text(encoding="utf-8")
    result = json.loads(text)
    compare(result)
    is_good = True
    print("\n| run | seconds | ended after the fault, s | left | state | what verify says |\n|---|---|---|---|---|---|")
    for run in result["runs"]:
        parts = [
            across.Ended(
                host,
                one["status"],
                one["said"],
                parse_note(one["note"]),
                parse(one["document"]) if one["document"] else None,
                {},
            )
            for host, one in run["hosts"].items()
        ]
        verdict = across.judge(parts, run["endpoint"])
        said = {host: [f"{f.code} {f.cause}" for f in found] for host, found in verdict.findings.items()}
        after = [one["ended_after_fault_s"] for one in run["hosts"].values()]
        if run["name"].startswith("slow_link") and verdict.document:
            said["measured"] = [f"{row.backend} {row.payload_bytes}" for row in verdict.document.rows]
            said["left out"] = [
                f"{one['backend']} {one['payload_bytes']}"
                for one in verdict.results()
                if "payload_bytes" in one and one["state"] == "not_run"
            ]
        print(f"| {run['name']} | {run['seconds']} | {after} | {len(run['left'])} | {verdict.state} | {said} |")
        is_good &= not run["left"]
        if run["name"] in ENDS_WITHIN_S:
            is_good &= max(one or 0.0 for one in after) <= ENDS_WITHIN_S[run["name"]]
        if run["name"] in HARMLESS:
            is_good &= verdict.state == "measured"
        else:
            is_good &= verdict.state == "failed"
            host, words = EXPECTED.get(run["name"], (None, ""))
            is_good &= host is None or (
                words in str(said[host]) and all("BU-VFY-237" in str(one) for h, one in said.items() if h != host)
            )
    print("\nas it should be" if is_good else "\nNOT as it should be")
    return 0 if is_good else 1


def main() -> int:
    """Read the command line."""
    line = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = line.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan")
    planning.add_argument("plan")
    planning.add_argument("--python", default="/opt/torch/.venv/bin/python3")
    planning.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    measuring = commands.add_parser("measure")
    measuring.add_argument("plan")
    measuring.add_argument("--output", required=True)
    measuring.add_argument("--only", default="healthy,log,faults")
    measuring.add_argument("--faults", default="")
    measuring.add_argument("--repeats", type=int, default=3)
    measuring.add_argument("--at-once", type=int, default=len(FAULTS))
    measuring.add_argument("--limit-s", type=float, default=400.0)
    measuring.add_argument("--ip", default=shutil.which("ip"))
    measuring.add_argument("--tc", default=shutil.which("tc"))
    measuring.add_argument("--scratch", default="/run/bringup-across")
    judging = commands.add_parser("judge")
    judging.add_argument("result")
    options = line.parse_args()
    return {"plan": plan, "measure": measure, "judge": judge}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
