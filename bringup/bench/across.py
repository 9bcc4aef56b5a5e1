"""Judge an all-reduce across hosts: how each host's part is started, who is at fault when it fails, what NCCL chose.

Each host runs torchrun; they meet at the first one (c10d rendezvous), and the bench's rank 0 writes the document.
A part that fails pulls the others down with it, so their own last words seldom name the cause: the host that was
lost, that never came, or whose process was killed is looked for first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bringup.bench.document import Document, NcclNote, Note, Row
from bringup.finding import Finding, Severity

PORT = 29400
"""torchrun's own default port for a c10d rendezvous."""
JOIN_LIMIT_S = 120
"""How long hosts wait for each other. Importing torch on a cold disk takes one of them a minute longer."""
CPU_RANKS = 2
"""Ranks a host without GPUs: enough to show the way within a host and between hosts."""

State = Literal["measured", "failed"]


@dataclass(frozen=True)
class Meeting:
    """Where hosts meet. ``addresses`` are by host, as the others reach them; the first host is the meeting point."""

    addresses: Mapping[str, str]
    port: int
    run: str
    join_limit_s: int = JOIN_LIMIT_S

    @property
    def endpoint(self) -> str:
        """Return the rendezvous endpoint."""
        address = next(iter(self.addresses.values()))
        return f"[{address}]:{self.port}" if ":" in address else f"{address}:{self.port}"

    def is_first(self, host: str) -> bool:
        """Return whether a host is the one where the others meet."""
        return host == next(iter(self.addresses))


def torchrun(meeting: Meeting, host: str, python: str, ranks: int, script: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of one host's part, ``ranks`` of them there.

    The address is told, and so is who holds the store: torch would ask the name service, and on Debian a host's own
    name leads to 127.0.1.1.
    """
    limit_s = meeting.join_limit_s
    is_host = str(meeting.is_first(host)).lower()
    return [
        python, "-m", "torch.distributed.run",
        "--nnodes", str(len(meeting.addresses)),
        "--nproc-per-node", str(ranks),
        "--max-restarts", "0",
        "--rdzv-backend", "c10d",
        "--rdzv-endpoint", meeting.endpoint,
        "--rdzv-id", meeting.run,
        "--rdzv-conf", f"is_host={is_host},join_timeout={limit_s},read_timeout={limit_s}",
        "--local-addr", meeting.addresses[host],
        script, *arguments,
    ]  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How one host's part ended.

    ``status`` None: nothing was heard from the host. ``said`` is the end of torchrun's output. ``note`` None: no rank
    was started there. ``document`` is the bench's where rank 0 ran. ``rdma`` describes ports of RDMA devices by their
    state, such as {"ACTIVE": ("mlx5_0:1 (InfiniBand)",)}.
    """

    host: str
    status: int | None
    said: str = ""
    note: Note | None = None
    document: Document | None = None
    rdma: Mapping[str, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Verdict:
    """What a run across hosts says. ``findings`` are by host; ``document`` None: rank 0 left none."""

    state: State
    reason: str | None
    document: Document | None
    findings: Mapping[str, tuple[Finding, ...]]

    def results(self) -> list[dict[str, object]]:
        """Return one entry a backend and payload; no limit is known across hosts, so nothing has a verdict."""
        document = self.document
        if document is None:
            return []
        reason = "no figure to compare with"
        if document.system.device == "cpu":
            reason = "on CPU: no GPU took part"
        rows = [_measured(row, reason) for row in document.rows]
        left: list[dict[str, object]] = [
            {"backend": name, "state": "missing" if entry.state == "missing" else "not_run", "reason": entry.reason}
            for name, entry in document.backends.items()
            if entry.state != "measured"
        ]
        left += [
            {
                "backend": name,
                "state": "not_run",
                "payload_bytes": payload,
                "reason": f"{payload >> 20} MiB: one operation would take longer than 2 s between these hosts",
            }
            for name, entry in document.backends.items()
            for payload in entry.left_out_bytes
        ]
        return [*rows, *left]


def _measured(row: Row, reason: str) -> dict[str, object]:
    return {
        "backend": row.backend,
        "state": "measured",
        "payload_bytes": row.payload_bytes,
        "ranks": len(row.rank_median_us),
        "busbw_gb_per_s": row.busbw_gb_per_s,
        "algbw_gb_per_s": row.algbw_gb_per_s,
        "latency_us": row.median_us,
        "reason": reason,
    }


def judge(parts: Sequence[Ended], endpoint: str) -> Verdict:
    """Judge how the parts of all hosts ended."""
    document = _document(parts)
    # A host that ended badly after rank 0 had everything is still named.
    if document is not None and document.exit_status == 0 and all(part.status == 0 for part in parts):
        return Verdict("measured", None, document, _by_host(parts, _measured_findings(parts, document)))
    faults = dict(_faults(parts, document, endpoint))
    return Verdict("failed", "; ".join(fault.cause for fault in faults.values()), document, _blamed(parts, faults))


def _document(parts: Sequence[Ended]) -> Document | None:
    """Return rank 0's document; one that only says that a command line was wrong where there is no other."""
    found = [part.document for part in parts if part.document is not None]
    return next((one for one in found if one.exit_status != 2), found[0] if found else None)


def _blamed(parts: Sequence[Ended], faults: Mapping[str, Finding]) -> dict[str, tuple[Finding, ...]]:
    innocent = because_of(list(faults))
    return {part.host: (faults.get(part.host, innocent),) for part in parts}


def because_of(hosts: Sequence[str]) -> Finding:
    """Return the finding for a host that could not be measured because of others."""
    named = ", ".join(hosts)
    return Finding(
        code="BU-VFY-237",
        severity="warning",
        cause=f"nothing was measured across the hosts because of {named}",
        remedy=f"see what is said of {named}, or leave it out with --exclude",
        evidence={"hosts": list(hosts)},
    )


# ---------------------------------------------------------------- who is at fault

_TIMED_OUT = re.compile(r"RendezvousTimeoutError")
_NOT_CONNECTED = re.compile(r"RendezvousConnectionError|DistNetworkError|connection to the C10d store has failed")
_IN_USE = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_SIGNALLED = re.compile(r"Signal \d+ \((SIG\w+)\) received by PID|exitcode\s*:\s*-(\d+)")
_OURS = "SIGTERM"  # torchrun ends the ranks that are left with it
_CONNECTION = re.compile(
    r"[Cc]onnection (?:was likely )?(?:closed|reset|refused)|[Bb]roken pipe|timed? ?out|took more than"
    r"|remote process exited|No route to host|Network is unreachable"
    r"|ncclRemoteError|ncclSystemError|DistNetworkError|DistStoreError|told to end|Connect call failed",
)
_NO_INTERFACE = re.compile(r"no socket interface found")
_MEETS_IN = "rendezvous"  # the bench's phase in which ranks find each other through NCCL or gloo


def _faults(parts: Sequence[Ended], document: Document | None, endpoint: str) -> Iterator[tuple[str, Finding]]:
    """Yield hosts at fault with what is said of them; all of them when nobody can tell."""
    if document is not None and document.exit_status == 5:
        yield from _wrong(parts, document)
        return
    nccl = _nccl_by_host(parts)
    if document is None and any(part.note is None for part in parts):
        chosen = list(_absent(parts, endpoint))
    else:
        chosen = list(_broken(parts)) or list(_apart(parts, nccl)) or list(_silent(parts))
    if not chosen:
        chosen = [(part, "BU-VFY-234", f"the run across hosts failed: {_why(parts, document)}") for part in parts]
    for part, code, cause in chosen:
        yield part.host, _error(code, cause, part, nccl.get(part.host))


def _error(code: str, cause: str, part: Ended, nccl: NcclNote | None) -> Finding:
    remedies = {
        "BU-VFY-232": "look at the network between the hosts, its firewalls and bringup_rendezvous; or --exclude it",
        "BU-VFY-233": "look at the host's kernel log and at who ended the process; or --exclude it",
        "BU-VFY-234": "see the cause; the output of torchrun is in the evidence",
        "BU-VFY-239": "look at NCCL_SOCKET_IFNAME (BU-VFY-341), at the host's interfaces, and at firewalls between the "
        "hosts: NCCL takes ports of its own choice",
    }
    said = [line.strip() for line in part.said.splitlines() if line.strip()][-5:]
    evidence: dict[str, object] = {"status": part.status, "said": said}
    if part.note is not None:
        evidence["where"] = part.note.place
    if nccl is not None:
        evidence["nccl"] = nccl.model_dump(mode="json")
    return Finding(code=code, severity="error", cause=cause, remedy=remedies[code], evidence=evidence)


def _absent(parts: Sequence[Ended], endpoint: str) -> Iterator[tuple[Ended, str, str]]:
    """Yield the hosts because of which not all came together."""
    first = parts[0]
    silent = [part for part in parts if part.status is None]
    for part in silent:
        yield part, "BU-VFY-232", f"{part.host} did not join the run across hosts: nothing was heard from it"
    if silent:
        return
    if _IN_USE.search(first.said):
        yield first, "BU-VFY-232", f"{first.host} cannot be the meeting point: {endpoint} is already in use there"
        return
    own = [part for part in parts if not _TIMED_OUT.search(part.said) and not _NOT_CONNECTED.search(part.said)]
    own = [part for part in own if part.note is None]
    for part in own:
        what = _ending(part)
        yield part, "BU-VFY-232", f"{part.host} did not join the run across hosts: {what}"
    if own:
        return
    for part in parts:
        if part is not first and _NOT_CONNECTED.search(part.said) and not _TIMED_OUT.search(part.said):
            yield part, "BU-VFY-232", f"{part.host} did not join the run across hosts: it cannot reach {endpoint}"


def _broken(parts: Sequence[Ended]) -> Iterator[tuple[Ended, str, str]]:
    """Yield the hosts that ended a run that had begun: lost ones, then killed ones, then those with an own error."""
    lost = [part for part in parts if part.status is None]
    for part in lost:
        where = f", last seen in {part.note.place}" if part.note else ""
        yield part, "BU-VFY-233", f"{part.host} was lost during the run across hosts{where}"
    if lost:
        return
    killed = [(part, name) for part in parts if (name := _signal(part)) is not None]
    for part, name in killed:
        where = f" in {part.note.place}" if part.note else ""
        yield part, "BU-VFY-233", f"a process of the run across hosts was ended by {name} on {part.host}{where}"
    if killed:
        return
    for part in parts:
        error = part.note.error if part.note else None
        if error and _NO_INTERFACE.search(error["message"]):
            cause = f"NCCL finds no network interface on {part.host} that it may use: {error['message']}"
            yield part, "BU-VFY-239", cause
        elif error and not _CONNECTION.search(error["message"]):
            yield part, "BU-VFY-234", f"the run across hosts failed on {part.host}: {error['message']}"


def _nccl_by_host(parts: Sequence[Ended]) -> dict[str, NcclNote]:
    """Return what NCCL said of its network on each host where it said anything."""
    found = {}
    for part in parts:
        log = part.document.nccl_log if part.document is not None else None
        if part.note is not None and part.note.nccl is not None:
            found[part.host] = part.note.nccl
        elif log is not None:
            found[part.host] = NcclNote(network=log.network, network_devices=log.network_devices, warnings=log.warnings)
    return found


def _apart(parts: Sequence[Ended], nccl: Mapping[str, NcclNote]) -> Iterator[tuple[Ended, str, str]]:
    """Yield the hosts because of which NCCL's ranks did not find each other, though torchrun's had.

    The loopback interface is never the way to another host; of other interfaces nobody can tell here which is wrong.
    """
    if not nccl or any(part.note is None or part.note.phase != _MEETS_IN for part in parts):
        return
    own = [(part, device) for part in parts if (device := _loopback(nccl.get(part.host)))]
    for part, device in own:
        cause = f"NCCL on {part.host} uses the interface {device}, by which no other host reaches it"
        yield part, "BU-VFY-239", cause
    if own:
        return
    devices = [f"{host} {', '.join(note.network_devices)}" for host, note in nccl.items() if note.network_devices]
    warned = next((warning for note in nccl.values() for warning in note.warnings), None)
    if devices:
        cause = f"NCCL does not get from one host to the other: {'; '.join(devices)}" + (
            f"; {warned}" if warned else ""
        )
        for part in parts:
            yield part, "BU-VFY-239", cause


def _loopback(note: NcclNote | None) -> str | None:
    """Return the interface that NCCL uses, when it is one by which nobody else can come."""
    return next((one for one in note.network_devices if re.search(r":(127\.|\[?::1\b)", one)), None) if note else None


def _silent(parts: Sequence[Ended]) -> Iterator[tuple[Ended, str, str]]:
    """Yield the hosts whose first rank neither ended nor said why not, where others did: it was stopped, or hangs."""
    silent = [p for p in parts if p.note is not None and not p.note.error and not p.note.is_done and not p.document]
    for part in silent if len(silent) < len(parts) else ():
        assert part.note is not None
        cause = f"a process of the run across hosts fell silent on {part.host} in {part.note.place}"
        yield part, "BU-VFY-233", cause


def _signal(part: Ended) -> str | None:
    """Return the signal that ended a rank or torchrun itself, None when none did or torchrun sent it."""
    if part.status is not None and part.status > 128:
        return _signal_name(part.status - 128)
    names = (match.group(1) or _signal_name(int(match.group(2))) for match in _SIGNALLED.finditer(part.said))
    return next((name for name in names if name != _OURS), None)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ending(part: Ended) -> str:
    if part.status == 124:
        return "it did not come to its end within the time limit"
    if part.status == 0:
        return "torchrun ended without starting a rank"
    lines = [line.strip() for line in part.said.splitlines() if line.strip()]
    return f"torchrun ended with status {part.status}" + (f": {lines[-1][:200]}" if lines else "")


def _why(parts: Sequence[Ended], document: Document | None) -> str:
    if document is not None and document.message:
        return document.message
    for part in parts:
        if part.note is not None and part.note.error:
            return f"{part.host}: {part.note.error['message']}"
    if all(_TIMED_OUT.search(part.said) for part in parts):
        return "the hosts did not find each other in time, and each says that it waited for the others"
    return f"{parts[0].host}: {_ending(parts[0])}"


def _wrong(parts: Sequence[Ended], document: Document) -> Iterator[tuple[str, Finding]]:
    nodes = {gpu.rank: gpu.node for gpu in document.system.gpus}
    by_node = {part.note.node: part.host for part in parts if part.note is not None}
    bad: dict[str, list[int]] = {}
    for check in document.checks:
        for rank in check.bad_ranks if not check.ok else ():
            host = by_node.get(nodes.get(rank, -1), parts[0].host)
            if rank not in bad.setdefault(host, []):
                bad[host].append(rank)
    for host, ranks in bad.items():
        yield (
            host,
            Finding(
                code="BU-VFY-214",
                severity="error",
                cause=f"wrong result across hosts on {host}, rank {', '.join(map(str, sorted(ranks)))}: "
                f"{document.message}",
                remedy="take the host out of service",
                evidence={"wanted": "every element right", "ranks": sorted(ranks)},
            ),
        )


# ---------------------------------------------------------------- what was measured


def _by_host(parts: Sequence[Ended], findings: Sequence[Finding]) -> dict[str, tuple[Finding, ...]]:
    """Return what is true of all hosts together, said of the first one."""
    return {part.host: tuple(findings) if part is parts[0] else () for part in parts}


def _measured_findings(parts: Sequence[Ended], document: Document) -> list[Finding]:
    hosts = ", ".join(part.host for part in parts)
    found: list[Finding] = []
    if document.system.device == "cpu":
        found.append(
            _note(
                "BU-VFY-238",
                "info",
                f"gloo on CPU moved data between {hosts}: no GPU took part, so this says nothing of GPUs",
                "none; the figures show that the hosts reach each other",
            )
        )
    else:
        found.append(
            _note(
                "BU-VFY-236",
                "info",
                f"no figure is known to compare {hosts} with",
                "compare with what the network should carry, and with other hosts of the same kind",
            )
        )
        found += _network(parts, document)
    return found


def _network(parts: Sequence[Ended], document: Document) -> Iterator[Finding]:
    """Say when NCCL moves data between hosts through sockets although there are RDMA devices."""
    log = document.nccl_log
    if log is None or not (log.share("NET/Socket") or (not log.transports and log.network == "Socket")):
        return
    ports = {part.host: dict(part.rdma or {}) for part in parts}
    active = [f"{host} {port}" for host, states in ports.items() for port in states.get("ACTIVE", ())]
    every = [f"{host} {port} {state}" for host, by in ports.items() for state, names in by.items() for port in names]
    if not every:
        return
    through = f"sockets ({', '.join(log.network_devices) or 'NET/Socket'})"
    if active:
        cause = f"NCCL moves data between the hosts through {through} although RDMA is active: {', '.join(active)}"
    else:
        cause = f"NCCL moves data between the hosts through {through}: no RDMA port is active: {', '.join(every)}"
    yield _note(
        "BU-VFY-235",
        "warning",
        cause,
        "look for NCCL_IB_DISABLE, NCCL_IB_HCA and NCCL_NET (BU-VFY-341), locked memory (BU-VFY-332), libibverbs and "
        "the ports' state (ibstat)",
        transports=dict(log.transports),
        network=log.network,
        rdma=ports,
        warnings=list(log.warnings),
    )


def _note(code: str, severity: Severity, cause: str, remedy: str, **evidence: object) -> Finding:
    return Finding(code=code, severity=severity, cause=cause, remedy=remedy, evidence=evidence)
