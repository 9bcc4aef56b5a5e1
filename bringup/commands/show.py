"""Print results for people: what differs, what was found, what to do. Readable without colour."""

from __future__ import annotations

import json

from rich.console import Console
from rich.text import Text

from bringup.report.results import AcrossResult, FindingResult, HostResult, Results

_STYLE = {
    "ok": "green",
    "drift": "yellow",
    "slow": "yellow",
    "refused": "red",
    "failed": "red",
    "unknown": "magenta",
}
_MARK = {"error": "refused", "warning": "warning", "info": "note"}


def results(console: Console, document: Results, *, verbose: bool = False) -> None:
    """Print every host that has something to tell, then one line that counts."""
    names = [*document.hosts, *(["across"] if document.across is not None else [])]
    width = max(map(len, names), default=0) + 2
    source = document.stack.name if document.stack else ""
    for name, host in document.hosts.items():
        _host(console, name, host, width, source, verbose=verbose)
    if document.across is not None:
        _across(console, document.across, width)
    _summary(console, document)


def _across(console: Console, across: AcrossResult, width: int) -> None:
    """Print what was measured across hosts; what was not is said by their findings, or here where nothing was run."""
    through = f" over {across.network} ({', '.join(across.network_devices)})" if across.network else ""
    where = f"{len(across.hosts)} hosts, {across.ranks} ranks{through}" if across.ranks else ", ".join(across.hosts)
    _line(console, "across", across.state, where, width, "green" if across.state == "measured" else "yellow")
    if across.reason:
        _detail(console, "cause:", across.reason, width)
    for backend in across.backends:
        if backend.state == "measured":
            payload_bytes = backend.payload_bytes or 0
            size = f"{payload_bytes / 2**20:g} MiB" if payload_bytes >= 2**20 else f"{payload_bytes / 2**10:g} KiB"
            figure = f"{backend.latency_us or 0:.1f} us, {backend.busbw_gb_per_s or 0:.3g} GB/s busbw"
            text = f"{backend.backend}  {size}, {backend.ranks} ranks: {figure} ({backend.reason})"
            _line(console, "across", "measured", text, width, "")


def _line(console: Console, host: str, mark: str, text: str, width: int, style: str) -> None:
    line = Text(f"{host:<{width}}")
    line.append(f"{mark:<9}", style=style)
    line.append(text)
    console.print(line, soft_wrap=True)


def _detail(console: Console, label: str, value: str, width: int) -> None:
    console.print(Text(f"{'':<{width + 11}}{label:<8}{value}"), soft_wrap=True)


def _host(console: Console, name: str, host: HostResult, width: int, stack: str, *, verbose: bool) -> None:
    labels = f"  [simulated: {', '.join(host.simulated)}]" if host.simulated else ""
    changes = f", {host.changes} changes in {host.seconds:.0f} s" if host.changes else ""
    proof = f", {host.verification.state}" if host.verification else ""
    _line(console, name, host.status, f"{(proof + changes).strip(', ')}{labels}", width, _STYLE[host.status])
    if host.why:
        _detail(console, "cause:", host.why, width)
    for step in host.steps:
        if verbose or step.changes:
            _detail(console, f"{step.name}", f"    {step.changes} changes, {step.seconds:.1f} s", width)
    for difference in host.differences:
        if host.changes:
            continue  # what was found before the run; the steps and the cause say what became of it
        _line(console, name, "drift", f"{difference.path}  (stack {stack})", width, "yellow")
        _detail(console, "wanted:", _shown(difference.wanted), width)
        _detail(console, "found:", _shown(difference.found), width)
    for finding in host.findings:
        if finding.severity == "info" and not verbose:
            continue
        _finding(console, name, finding, width)
    if host.verification:
        for backend in host.verification.backends:
            if backend.state == "not_run" and not verbose and host.status == "ok":
                continue
            _backend(console, name, backend, width)
    if host.pin:
        _line(
            console,
            name,
            "pinned",
            f"{host.pin.digest} since {host.pin.since}: {host.pin.reason}",
            width,
            "yellow",
        )


def _backend(console: Console, name: str, backend, width: int) -> None:  # type: ignore[no-untyped-def]
    if backend.state == "measured":
        size = f"{(backend.payload_bytes or 0) / 2**20:g} MiB, {backend.ranks} ranks"
        figure = (
            f"{backend.busbw_gb_per_s:.1f} GB/s busbw"
            if backend.busbw_gb_per_s is not None
            else f"{backend.latency_us or 0:.1f} us"
        )
        text = f"{backend.backend}  {size}: {figure}"
    else:
        text = f"{backend.backend}  {backend.state}: {backend.reason or ''}"
    _line(console, name, backend.verdict or backend.state, text, width, "")


def _finding(console: Console, name: str, finding: FindingResult, width: int) -> None:
    style = {"error": "red", "warning": "yellow", "info": "dim"}[finding.severity]
    _line(console, name, _MARK[finding.severity], f"{finding.code}  {finding.cause}", width, style)
    for key in ("wanted", "found"):
        if key in finding.evidence:
            _detail(console, f"{key}:", _shown(finding.evidence[key]), width)
    _detail(console, "do:", finding.remedy, width)


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True)


def _summary(console: Console, document: Results) -> None:
    summary = document.summary
    counts = [
        f"{getattr(summary, status)} {status}"
        for status in ("ok", "drift", "slow", "refused", "unknown", "failed")
        if getattr(summary, status)
    ]
    what = "differences" if document.command in ("plan", "drift") else "changes"
    number = (
        sum(len(host.differences) for host in document.hosts.values()) if what == "differences" else summary.changes
    )
    console.print(
        Text(f"{summary.hosts} hosts: {', '.join(counts) or 'nothing to tell'}; {number} {what}"), soft_wrap=True
    )
