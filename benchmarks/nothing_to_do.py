"""Measure what a run costs that finds nothing to do: bringup beside plain pyinfra and Ansible, in one run.

Every lab host that is up must be as wanted (`make up`). More hosts than the lab has are sshds of their own beside them
(sshd_namespaces.py): each has a network namespace, an address and a host key, which is checked; behind it are the files
and processes of a lab host, and as looking changes nothing, all are found as wanted. What the looking costs *there* is
the same machine's processor time as the controller's, so wall times rise with it for everybody; processor time counts
the controller's processes only. Commands are counted in the journals of the lab hosts, where all sshds log.

    python benchmarks/nothing_to_do.py --hosts 1 10 50 200 --runs 5 5 1 --ansible-playbook ansible/bin/ansible-playbook

The peers' programs are in benchmarks/peers/: for each section of the probe one task, or one operation or fact. Ansible
has pipelining and ControlPersist on, as many forks as there are hosts up to 50, and its connections stay warm from the
second run on. One run of each peer that is not counted comes first: it leaves compiled modules, as an installation has
them. A peer whose run fails, or takes longer than --limit, is not tried again.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import sshd_namespaces
from sshd_namespaces import Sshds

from bringup import paths
from bringup.engine import HOSTS_PER_WORKER
from bringup.lab.lab import Lab
from bringup.lab.layout import default_state_dir
from bringup.stack import Stack, load_stack

PEERS = Path(__file__).parent / "peers"
FORKS = 50
GOALS = (
    ("controller CPU, Ansible / bringup", "ansible", 40.0),
    ("controller CPU, pyinfra's operations / bringup", "pyinfra operations", 5.0),
)
LINEAR = 1.25
"""How much more a host may cost among many than among ten before "linear" would be untrue."""

MEMORY_GOAL_MIB = 1.0
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: ssh's background masters stay ours, so their time is counted too


@dataclass(frozen=True)
class Cost:
    """What one run cost: seconds on the clock, of the controller's processors, its largest process, ssh sessions."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    sessions: int


@dataclass(frozen=True)
class Peer:
    """A way to find that nothing is to do. ``run`` gets the number of hosts and the directory with inventories."""

    name: str
    argv: Callable[[int, Path], list[str]]
    environment: Mapping[str, str]


def controller_cpu_s() -> float:
    """Return the processor seconds of every descendant so far, those included that run on in the background."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            living += times.user + times.system
    return ended.ru_utime + ended.ru_stime + living


def measured(peer: Peer, hosts: int, work: Path, sessions: Callable[[], int], limit_s: float) -> Cost | str:
    """Run a peer once; return why there is no figure when it fails or does not end within the limit."""
    before_sessions, before_cpu = sessions(), controller_cpu_s()
    report = work / "peak"
    # The largest process of a run is what the kernel tells of children that have ended; a process of its own asks.
    wrapper = (
        "import resource, subprocess, sys; status = subprocess.call(sys.argv[2:]); "
        "open(sys.argv[1], 'w').write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)); sys.exit(status)"
    )
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", wrapper, str(report), *peer.argv(hosts, work)],
        env={**_as_installed(work), **peer.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=paths.root(),
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # Ansible's forks have sessions of their own; one that lived on would count as the next peer's.
        for descendant in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                descendant.kill()
        process.communicate()
        return f"took longer than {limit_s:.0f} s"
    wall_s = time.monotonic() - started
    if process.returncode != 0:
        print(f"{peer.name} with {hosts} hosts:\n{said[-1500:]}", file=sys.stderr)
        return f"ended with status {process.returncode}"
    return Cost(
        wall_s=wall_s,
        cpu_s=controller_cpu_s() - before_cpu,
        peak_mib=int(report.read_text()) / 1024,
        sessions=sessions() - before_sessions,
    )


def _as_installed(work: Path) -> dict[str, str]:
    """Return our environment, with compiled modules kept, away from the tree, whatever it says about them."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(work / "compiled")}


# ---------------------------------------------------------------- hosts


def reached(lab: Lab, sshds: Sshds, count: int) -> dict[str, str]:
    """Return ``count`` addresses with the host key that each must show: of the lab's hosts, then of sshds beside."""
    record = lab.record()
    keys = {
        line.split()[0].split(",")[0]: line.split(maxsplit=1)[1]
        for line in Path(record.ssh.known_hosts).read_text().splitlines()
    }
    hosts = {record.hosts[name].address: keys[name] for name in sorted(record.hosts)[:count]}
    return hosts | {sshd.address: sshd.host_key for sshd in sshds.first(count - len(hosts))}


def inside(lab: Lab, host: str, script: str) -> str:
    done = lab.inside(host, ["sh", "-c", script])
    if done.returncode != 0:
        sys.exit(f"{host}: {script}: {done.stderr}")
    return done.stdout


def sessions_of(lab: Lab) -> Callable[[], int]:
    """Return a function that counts the commands that all sshds have started."""
    # By the name they log under, for those in namespaces belong to no unit; what still waits is written first.
    journal = "journalctl --boot --identifier=sshd --output=cat --no-pager | grep -c 'Starting session' || true"
    journal = f"journalctl --sync && {{ {journal}; }}"

    def count() -> int:
        return sum(int(inside(lab, name, journal)) for name in lab.record().hosts)

    return count


def write_inventories(lab: Lab, hosts: Mapping[str, str], work: Path) -> None:
    """Write the same hosts for pyinfra and for Ansible, with the keys that each address must show."""
    known = work / "known_hosts"
    known.write_text("".join(f"{address} {key}\n" for address, key in hosts.items()))
    count = len(hosts)
    (work / f"bringup-{count}.py").write_text(
        "from pathlib import Path\n"
        "from bringup.lab.record import inventory\n"
        f"_, data = inventory(Path({str(lab.layout.state_dir)!r}))\n"
        f"data = {{**data, 'ssh_known_hosts_file': {str(known)!r}, 'bringup_stack': 'lab'}}\n"
        f"hosts = ([(f'h{{at:03d}}', {{'ssh_hostname': a}}) for at, a in enumerate({list(hosts)!r})], data)\n"
    )
    lines = [f"h{at:03d} ansible_host={address}" for at, address in enumerate(hosts)]
    (work / f"ansible-{count}.ini").write_text(
        "[all]\n" + "\n".join(lines) + "\n[all:vars]\nansible_user=root\n"
        f"ansible_ssh_private_key_file={lab.record().ssh.key}\nansible_python_interpreter=/usr/bin/python3\n"
    )


def wanted(lab: Lab, stack: Stack) -> dict[str, object]:
    """Return what the peers compare with."""
    host = min(lab.record().hosts)
    listed = inside(lab, host, "dpkg-query -W -f '${Package}=${Version}\\n' | grep -E 'nvidia|cuda'").split()
    return {
        "os_release": "12",
        "driver": stack.driver.version,
        "packages": listed,
        "gpus": stack.verify.gpus,
        "cuda": inside(lab, host, "readlink -f /usr/local/cuda").strip(),
        "environment": inside(lab, host, "readlink /opt/bringup/current").strip(),
        "digest": stack.digest,
    }


# ---------------------------------------------------------------- peers


def workers(hosts: int) -> int:
    """Return how many worker processes bringup starts; together they look at as many hosts at a time as Ansible."""
    return max(1, min(os.cpu_count() or 1, -(-hosts // HOSTS_PER_WORKER)))


def peers(lab: Lab, stack: Stack, playbook: str | None, work: Path) -> list[Peer]:
    told = wanted(lab, stack)
    state = {"BRINGUP_STATE": str(work / "state"), "BRINGUP_LAB_STATE": str(lab.layout.state_dir)}
    pyinfra = str(Path(sys.executable).with_name("pyinfra"))
    found = [
        Peer(
            "bringup",
            lambda n, at: [
                sys.executable,
                "-m",
                "bringup.cli",
                "apply",
                str(at / f"bringup-{n}.py"),
                "--yes",
                "--parallel",
                str(max(1, FORKS // workers(n))),
            ],
            state,
        ),
        Peer(
            "plain pyinfra, deploy.py", lambda n, at: [pyinfra, str(at / f"bringup-{n}.py"), "deploy.py", "-y"], state
        ),
        Peer(
            "pyinfra operations",
            lambda n, at: [pyinfra, str(at / f"bringup-{n}.py"), str(PEERS / "nothing_to_do.py"), "-y"],
            {**state, "WANTED": json.dumps(told)},
        ),
    ]
    if playbook is not None:
        extra = work / "wanted.json"
        extra.write_text(json.dumps({"wanted": told}))
        options = f"-o ControlMaster=auto -o ControlPersist=600s -o UserKnownHostsFile={work / 'known_hosts'}"
        found.append(
            Peer(
                "ansible",
                lambda n, at: [
                    playbook, "-i", str(at / f"ansible-{n}.ini"), "-e", f"@{extra}", "--forks", str(min(n, FORKS)),
                    str(PEERS / "nothing_to_do.yml"),
                ],
                {
                    "ANSIBLE_PIPELINING": "true",
                    "ANSIBLE_SSH_ARGS": options,
                    "ANSIBLE_SSH_CONTROL_PATH_DIR": str(work / "cp"),
                    "ANSIBLE_HOST_KEY_CHECKING": "true",
                    "ANSIBLE_LOCAL_TEMP": str(work / "tmp"),
                    "ANSIBLE_HOME": str(work / "home"),
                },
            )
        )  # fmt: skip
    return found


# ---------------------------------------------------------------- figures


def checks() -> list[tuple[str, int, int]]:
    """Return for each section of the probe how often Ansible's and pyinfra's programs look at it."""
    probe = re.findall(r"^@section\ndef (\w+)\(", (paths.files() / "host_probe.py").read_text(), re.M)
    tasks = re.findall(r"^    - name: (\w+)$", (PEERS / "nothing_to_do.yml").read_text(), re.M)
    return [(name.lstrip("_"), tasks.count(name.lstrip("_")), 1) for name in probe]


def median(costs: Sequence[Cost], of: str) -> float:
    return statistics.median(getattr(cost, of) for cost in costs)


def goals(found: Mapping[tuple[str, int], Sequence[Cost]], counts: Sequence[int]) -> list[tuple[str, str, bool]]:
    """Return (goal, what was measured, whether it was met) from ratios of medians."""
    lines: list[tuple[str, str, bool]] = []
    for count in counts:
        ours = found["bringup", count]
        per_host = median(ours, "sessions") / count
        lines.append((f"N={count}: one remote command a host", f"{per_host:.2f}", per_host == 1.0))
        for title, peer, least in GOALS:
            if (peer, count) in found:
                ratio = median(found[peer, count], "cpu_s") / median(ours, "cpu_s")
                lines.append((f"N={count}: {title} >= {least:.0f}", f"{ratio:.1f}", ratio >= least))
    if len(counts) > 1:
        few, many = counts[0], counts[-1]
        grown = median(found["bringup", many], "peak_mib") - median(found["bringup", few], "peak_mib")
        a_host = grown / (many - few)
        lines.append((f"memory a host <= {MEMORY_GOAL_MIB:.0f} MiB", f"{a_host:.2f} MiB", a_host <= MEMORY_GOAL_MIB))
    if len(counts) > 2:
        base, some, many = counts[0], counts[-2], counts[-1]
        start = median(found["bringup", base], "cpu_s")
        slope = [(median(found["bringup", n], "cpu_s") - start) / (n - base) for n in (some, many)]
        ratio = slope[1] / slope[0] if slope[0] > 0 else 0.0
        told = f"{slope[0] * 1000:.0f} and {slope[1] * 1000:.0f} ms"
        lines.append((f"linear: a further host's CPU at {many} <= {LINEAR} x at {some}", told, ratio <= LINEAR))
    return lines


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--hosts", type=int, nargs="+", default=[1, 10, 50, 200])
    arguments.add_argument("--runs", type=int, nargs="+", default=[5], help="for each number of hosts; the last stays")
    arguments.add_argument("--state-dir", type=Path, default=default_state_dir(), help="of the lab that is up")
    arguments.add_argument("--ansible-playbook", default=shutil.which("ansible-playbook"))
    arguments.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="longest single run")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write every single figure there")
    chosen = arguments.parse_args()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    lab = Lab.open(chosen.state_dir)
    stack = load_stack(paths.stacks() / "lab.toml", lock_path=lab.layout.locks)
    sessions = sessions_of(lab)
    counts = sorted(chosen.hosts)
    found: dict[tuple[str, int], list[Cost]] = {}
    missed: list[str] = []
    print("Looked at once for each host, by section of the probe: " + ", ".join(name for name, _, _ in checks()))
    with sshd_namespaces.beside(lab) as sshds, tempfile.TemporaryDirectory(prefix="nothing-to-do-") as directory:
        work = Path(directory)
        all_peers = peers(lab, stack, chosen.ansible_playbook, work)
        given_up: set[str] = set()
        try:
            write_inventories(lab, reached(lab, sshds, 1), work)
            for peer in all_peers:
                measured(peer, 1, work, sessions, chosen.limit)
            for count in counts:
                write_inventories(lab, reached(lab, sshds, count), work)
                for _ in range((chosen.runs + chosen.runs[-1:] * len(counts))[counts.index(count)]):
                    for peer in all_peers:
                        if peer.name in given_up:
                            continue
                        cost = measured(peer, count, work, sessions, chosen.limit)
                        if isinstance(cost, str):
                            given_up.add(peer.name)
                            missed.append(f"{peer.name} with {count} hosts {cost}")
                            continue
                        found.setdefault((peer.name, count), []).append(cost)
        finally:
            for process in psutil.Process().children(recursive=True):
                process.kill()
    print(f"\n{'':26} {'N':>4} {'runs':>4} {'wall s':>7} {'CPU s':>7} {'ms/host':>8} {'MiB':>6} {'commands':>9}")
    for (name, count), costs in found.items():
        wall_s, cpu_s = median(costs, "wall_s"), median(costs, "cpu_s")
        print(
            f"{name:26} {count:4} {len(costs):4} {wall_s:7.2f} {cpu_s:7.2f} {cpu_s / count * 1000:8.0f} "
            f"{median(costs, 'peak_mib'):6.0f} {median(costs, 'sessions') / count:9.1f}"
        )
    print("\nratios of medians, each to bringup:")
    for (name, count), costs in found.items():
        if name != "bringup" and ("bringup", count) in found:
            ours = found["bringup", count]
            wall, cpu = (median(costs, of) / median(ours, of) for of in ("wall_s", "cpu_s"))
            print(f"  N={count:<4} {name:26} wall {wall:6.1f} x   controller CPU {cpu:6.1f} x")
    print("\ngoals:")
    judged = goals(found, [count for count in counts if ("bringup", count) in found])
    for goal, figure, is_met in judged:
        print(f"  {'met   ' if is_met else 'MISSED'} {goal}: {figure}")
    for line in missed:
        print(f"  not measured: {line}")
    if chosen.ansible_playbook is None:
        print("  not measured: there is no ansible-playbook here")
    if chosen.json is not None:
        told = [{"peer": name, "hosts": count, **asdict(cost)} for (name, count), cs in found.items() for cost in cs]
        chosen.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if all(is_met for _, _, is_met in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
