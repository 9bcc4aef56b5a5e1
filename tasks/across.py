"""Measure all-reduce across hosts: one run of torchrun over all of them, each host locked and proved beforehand.

The three operations run one after the other over all hosts (``bringup.worker`` waits between them): every host says
how it can take part, then all parts run at the same time, then what came of them is judged once for all. A host that
fell out on the way is known to the others before anything is started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pyinfra.api import FunctionCommand, Host
from pyinfra.api.deploy import deploy
from pyinfra.context import ctx_host, ctx_state

from bringup import facts
from bringup.bench import across, parse
from bringup.bench.document import parse_note
from bringup.errors import HostError
from bringup.finding import Finding
from bringup.findings import change, health
from bringup.host_state import Unknown
from tasks.channel import fetch, open_channel
from tasks.environment import tell
from tasks.run import Commands, Context, converges, is_executing, refuse, work, worker_path
from tasks.verify import (
    SLACK_S,
    environment_variables,
    is_lookalike,
    is_on_cpu,
    is_proved,
    output_path,
    sent,
    target,
)

OUTPUT = output_path("allreduce_across")
NODE_OUTPUT = output_path("allreduce_across_node")
SCRATCH = "/run/bringup/across"
_SAID_CHARACTERS = 16_000


@dataclass(frozen=True)
class Part:
    """How one host can take part. ``rdma`` lists ports of RDMA devices by their state."""

    environment: str
    python: str
    script: str
    device: str
    ranks: int
    address: str
    variables: Mapping[str, str]
    timeout_s: int
    profile: str
    is_lookalike: bool
    rdma: Mapping[str, tuple[str, ...]]

    @property
    def likeness(self) -> tuple[str, str]:
        """Return what must be the same on all hosts."""
        return self.environment, self.device


_parts: dict[str, Part] = {}
_ended: dict[str, across.Ended] = {}


def _asked(context: Context) -> bool:
    return context.settings.across is not None


@converges(when=_asked)
def part_of_host(context: Context) -> Commands:
    """Note how this host can take part: what it is proved with, its address, and how many ranks it runs."""
    host, state = context.host, context.state
    yield work("settle")
    if not is_executing():
        return
    proved = target(context)
    busy = change.in_use(state, "verify")
    if proved is None or not is_proved(context, proved):
        yield refuse(host, _apart(f"{host.name} is not proved in this boot", "see what verify says of this host"))
        return
    if busy is not None:
        yield refuse(host, busy)
        return
    limits = context.stack.verify
    listed = () if isinstance(state.gpus, Unknown) else state.gpus.listed or ()
    on_cpu = is_on_cpu(context)
    _parts[host.name] = Part(
        # Generations of one environment hold the same files.
        environment=proved.name.rpartition("-")[0] if context.stack.python.existing is None else proved.name,
        python=proved.python,
        script=sent(host, "allreduce_bench"),
        device="cpu" if on_cpu else "cuda",
        ranks=across.CPU_RANKS if on_cpu else len(listed),
        address=address(host),
        variables=environment_variables(context, proved),
        timeout_s=limits.timeout_s,
        profile=context.settings.profile or limits.profile,
        is_lookalike=is_lookalike(context),
        rdma={} if on_cpu else rdma(host),
    )


def address(host: Host) -> str:
    """Return the address by which the other hosts reach this one."""
    return facts.settings(host).rendezvous or str(host.data.get("ssh_hostname") or host.name)


def rdma(host: Host) -> dict[str, tuple[str, ...]]:
    """Return the ports of this host's RDMA devices by state, from what the stack check just saw."""
    try:
        section = json.loads(fetch(host, output_path("stack_check"), missing="{}")).get("health")
        ports = health.rdma_ports(health.parse(section)) if section else ()
    except (ValueError, HostError):
        return {}  # the proof has said so already
    found: dict[str, tuple[str, ...]] = {}
    for port in ports:
        state = port.state or "unknown"
        found[state] = (*found.get(state, ()), f"{port.label} ({port.link_layer}, {port.rate})")
    return found


@converges(when=_asked)
def parts_of_run(context: Context) -> Commands:
    """Run this host's part, at the same time as all others, unless somebody is missing or unlike the others."""
    host = context.host
    yield work("settle")
    if not is_executing():
        return
    asked = context.settings.across
    assert asked is not None
    absent = gone(asked.hosts)
    if absent:
        facts.tell_finding(host, across.because_of(absent))
        return
    parts = {name: _parts[name] for name in asked.hosts}
    unlike = _unlike(parts)
    if unlike is not None:
        yield refuse(host, unlike)
        return
    if any(part.is_lookalike for part in parts.values()):
        return
    meeting = _meeting(asked.hosts, asked.port)
    yield FunctionCommand(_run, (command(meeting, host.name, parts[host.name]), limit_s(meeting, parts[host.name])), {})


def _meeting(hosts: tuple[str, ...], port: int) -> across.Meeting:
    return across.Meeting({name: _parts[name].address for name in hosts}, port, facts.run_id())


def gone(hosts: tuple[str, ...]) -> list[str]:
    """Return the hosts that fell out of this run before anything was started across them."""
    active = {host.name for host in ctx_state.get().active_hosts}
    return [name for name in hosts if name not in active or name not in _parts]


def limit_s(meeting: across.Meeting, part: Part) -> float:
    """Return how long one host's part may take before it is ended on that host."""
    return meeting.join_limit_s + part.timeout_s + SLACK_S


def command(meeting: across.Meeting, name: str, part: Part) -> list[str]:
    """Return the command of one host's part, its variables and nothing else around it."""
    arguments = ["--timeout", str(part.timeout_s), "--output", OUTPUT, "--node-output", NODE_OUTPUT]
    if part.device == "cpu":
        arguments += ["--profile", "smoke", "--device", "cpu"]
    else:
        # What serves across hosts is NCCL; everything else in the bench works within one host.
        arguments += ["--profile", part.profile, "--device", "cuda", "--backends", "nccl,nccl_graph"]
    argv = across.torchrun(meeting, name, part.python, part.ranks, part.script, arguments)
    own = {"TMPDIR": SCRATCH, "BRINGUP_RUN_ID": meeting.run, "BRINGUP_RUN_LOCK": RUN_LOCK}
    own["PATIENCE_S"] = str(PATIENCE_S)
    variables = {"OMP_NUM_THREADS": "1", **part.variables, **own}
    pairs = [f"{key}={value}" for key, value in sorted(variables.items())]
    return ["env", "-i", *pairs, "sh", "-c", _SCRIPTED, OUTPUT, NODE_OUTPUT, *argv]


# What an earlier run left must not be taken for this one's, and torchrun leaves its own directory when it is killed.
# The run lock falls when the controller or the way to it is gone, and with it nobody waits for this part any more.
# Killed, because torchrun does not listen while it waits for another host; its ranks go with it. Once a rank has said
# what it failed of, torchrun has PATIENCE_S to end the others: with the way to the first host gone it would wait for
# that host's store until the limit of the whole part. The status is then that of a rank that failed.
_SCRIPTED = r"""
umask 077; rm -rf "$TMPDIR"; mkdir -p "$TMPDIR" "${0%/*}"; note=$1; rm -f "$0" "$1"; shift
"$@" 2>&1 & part=$!
is_ours() { grep -q "\"run\": \"$BRINGUP_RUN_ID\"" "$BRINGUP_RUN_LOCK"; }
has_failed() { grep -qs '"error": {' "$note"; }
{
  left=$PATIENCE_S
  while is_ours && [ "$left" -gt 0 ]; do sleep 1; if has_failed; then left=$((left - 1)); fi; done
  if is_ours; then : > "$TMPDIR/overdue"; fi
  kill -KILL $part
} >/dev/null 2>&1 & watchdog=$!
wait $part; status=$?
kill $watchdog 2>/dev/null; if [ -e "$TMPDIR/overdue" ]; then status=1; fi; rm -rf "$TMPDIR"
exit $status
"""
PATIENCE_S = 45
"""torchrun gives its ranks half a minute between SIGTERM and SIGKILL."""
RUN_LOCK = "/run/bringup/run.lock"


def _run(argv: list[str], limit_s: float) -> None:
    """Run a part to its end, under the work lock and its limit, and keep how it ended. Raises nothing of the host's."""
    host: Host = ctx_host.get()
    words = ["python3", worker_path(), "--run", facts.run_id(), "do", "verify-across", "--limit-s", str(limit_s), "--"]
    status: int | None = None
    said, note, document = "", None, None
    try:
        channel = open_channel(host, [*words, *argv])
        try:
            # A host that dies says nothing more, and its connection may stand for a quarter of an hour.
            said = channel.read(timeout_s=limit_s + SLACK_S)
            status = channel.wait(timeout_s=SLACK_S)
        finally:
            channel.close()
        note = parse_note(_json(fetch(host, NODE_OUTPUT, missing="")))
        text = fetch(host, OUTPUT, missing="")
        document = parse(json.loads(text)) if text.strip() else None
    except (OSError, EOFError, ValueError, HostError) as error:
        said += f"\n{type(error).__name__}: {error}"
    rdma = _parts[host.name].rdma
    _ended[host.name] = across.Ended(host.name, status, said[-_SAID_CHARACTERS:], note, document, rdma)


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


@converges(when=_asked)
def verdict_of_run(context: Context) -> Commands:
    """Say what came of the run across hosts, once for all of them and of each what concerns it."""
    host = context.host
    yield work("settle")
    if not is_executing():
        return
    asked = context.settings.across
    assert asked is not None
    is_teller = host.name == next((name for name in asked.hosts if name not in gone(asked.hosts)), None)
    if gone(asked.hosts) and not _ended:
        if is_teller:
            _tell(host, asked.hosts, "not_run", f"not all hosts were ready: {', '.join(gone(asked.hosts))}")
        return
    if any(part.is_lookalike for part in _parts.values()):
        if is_teller:
            _tell(host, asked.hosts, "not_run", "the torch of these hosts is a look-alike; it never runs a collective")
        return
    verdict = _verdict(asked.hosts, asked.port)
    if is_teller:
        _tell(host, asked.hosts, verdict.state, verdict.reason, verdict)
    refusal = tell(host, verdict.findings[host.name])
    if refusal is not None:
        yield refuse(host, refusal)


@cache
def _verdict(hosts: tuple[str, ...], port: int) -> across.Verdict:
    parts = [_ended.get(name) or across.Ended(name, None) for name in hosts]
    return across.judge(parts, _meeting(hosts, port).endpoint)


def _tell(
    host: Host, hosts: tuple[str, ...], state: str, reason: str | None, verdict: across.Verdict | None = None
) -> None:
    content: dict[str, Any] = {"hosts": hosts, "state": state, "reason": reason}
    document = verdict.document if verdict is not None else None
    if verdict is not None and document is not None:
        log = document.nccl_log
        content |= {
            "device": document.system.device,
            "ranks": document.system.ranks,
            "network": log.network if log else None,
            "network_devices": log.network_devices if log else (),
            "transports": dict(log.transports) if log else {},
            "backends": verdict.results(),
        }
    facts.tell(host, "across", content)


# ---------------------------------------------------------------- findings


def _apart(cause: str, remedy: str, **evidence: object) -> Finding:
    """Return the finding for hosts that cannot be measured together."""
    return Finding(
        code="BU-VFY-231",
        severity="error",
        cause=f"the hosts cannot be measured together: {cause}",
        remedy=remedy,
        evidence=evidence,
    )


def _unlike(parts: Mapping[str, Part]) -> Finding | None:
    """Return why these parts do not make one run, or None."""
    by_likeness: dict[tuple[str, str], list[str]] = {}
    for name, part in parts.items():
        by_likeness.setdefault(part.likeness, []).append(name)
    if len(by_likeness) > 1:
        listed = "; ".join(f"{', '.join(names)}: {env} on {device}" for (env, device), names in by_likeness.items())
        return _apart(
            f"they are not alike ({listed})",
            "apply one stack to all of them, or choose those that are alike with --limit and --exclude",
            found={name: list(part.likeness) for name, part in parts.items()},
        )
    by_address: dict[str, list[str]] = {}
    for name, part in parts.items():
        by_address.setdefault(part.address, []).append(name)
    shared = next((names for names in by_address.values() if len(names) > 1), None)
    if shared is not None:
        return _apart(
            f"{' and '.join(shared)} have the same address {parts[shared[0]].address}",
            "set bringup_rendezvous to the address by which the other hosts reach each of them",
        )
    return None


@deploy("Verify")
def measure() -> None:
    """Measure all-reduce across the hosts that were chosen together."""
    part_of_host(name="See how this host can take part across hosts")
    parts_of_run(name="Run all-reduce across hosts")
    verdict_of_run(name="Judge all-reduce across hosts")
