"""Write results as Prometheus text for node_exporter's textfile collector.

Format: Prometheus text exposition format 0.0.4. Units are base units (seconds, bytes), as its naming rules ask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from bringup.report.results import HostResult, HostStatus, Results

_Sample = tuple[Mapping[str, str], float]


def render(results: Results, *, seen_s: Mapping[str, float] | None = None) -> str:
    """Return the metrics of every host; ``seen_s`` is when each was seen, seconds since the Unix epoch."""
    hosts = results.hosts.items()
    seen = seen_s or {}
    families: list[tuple[str, str, Iterable[_Sample]]] = [
        (
            "bringup_host_status",
            "1 for the status that the host has, 0 for the others.",
            (
                ({"host": name, "status": status}, float(host.status == status))
                for name, host in hosts
                for status in get_args(HostStatus)
            ),
        ),
        (
            "bringup_host_differences",
            "Differences between what is wanted on the host and what was found.",
            (({"host": name}, float(len(host.differences))) for name, host in hosts),
        ),
        (
            "bringup_host_changes",
            "Operations that the last run executed on the host.",
            (({"host": name}, float(host.changes)) for name, host in hosts),
        ),
        (
            "bringup_host_findings",
            "Findings about the host by severity.",
            (
                ({"host": name, "severity": severity}, float(_count(host, severity)))
                for name, host in hosts
                for severity in ("error", "warning", "info")
            ),
        ),
        (
            "bringup_host_verified",
            "1 when the host is verified since its last boot, 0 when not.",
            (
                ({"host": name}, float(host.verification.state == "verified"))
                for name, host in hosts
                if host.verification is not None
            ),
        ),
        (
            "bringup_host_pinned",
            "1 when a stack was rolled back on the host and is kept from returning.",
            (({"host": name}, float(host.pin is not None)) for name, host in hosts),
        ),
        (
            "bringup_host_seen_timestamp_seconds",
            "When the host was last looked at.",
            (({"host": name}, seen[name]) for name, _ in hosts if name in seen),
        ),
        (
            "bringup_host_info",
            "Stack, environment and what is simulated on the host; always 1.",
            ((_info(name, host), 1.0) for name, host in hosts),
        ),
        (
            "bringup_allreduce_busbw_bytes_per_second",
            "All-reduce bus bandwidth as nccl-tests counts it.",
            ((labels, busbw * 1e9) for labels, busbw in _measured(results, "busbw_gb_per_s")),
        ),
        (
            "bringup_allreduce_latency_seconds",
            "All-reduce latency, median.",
            ((labels, latency / 1e6) for labels, latency in _measured(results, "latency_us")),
        ),
    ]
    return "".join(_family(name, help_, samples) for name, help_, samples in families)


def _family(name: str, help_: str, samples: Iterable[_Sample]) -> str:
    lines = [f"{name}{{{_labels(labels)}}} {_number(value)}\n" for labels, value in samples]
    # A family without samples would only be noise.
    return "".join([f"# HELP {name} {help_}\n# TYPE {name} gauge\n", *lines]) if lines else ""


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _count(host: HostResult, severity: str) -> int:
    return sum(finding.severity == severity for finding in host.findings)


def _info(name: str, host: HostResult) -> dict[str, str]:
    labels = {"host": name}
    if host.assigned is not None:
        labels |= {"stack": host.assigned.name, "stack_digest": host.assigned.digest}
    if host.environment is not None:
        labels |= {"environment": f"{host.environment.digest}-{host.environment.generation}"}
    return labels | ({"simulated": ",".join(host.simulated)} if host.simulated else {})


def _measured(results: Results, field: str) -> Iterable[tuple[Mapping[str, str], float]]:
    # The same labels twice would make the whole file unreadable, so of equal ones the last counts.
    samples: dict[tuple[str, ...], tuple[Mapping[str, str], float]] = {}
    for name, host in results.hosts.items():
        for backend in host.verification.backends if host.verification else ():
            value: float | None = getattr(backend, field)
            if backend.state != "measured" or value is None or backend.payload_bytes is None:
                continue
            labels = {
                "host": name,
                "backend": backend.backend,
                "payload_bytes": str(backend.payload_bytes),
                "ranks": str(backend.ranks or ""),
            }
            samples[tuple(labels.values())] = (labels, value)
    return samples.values()
