"""Rules that judge an observed host: pure functions from the wanted and the found side to findings.

One module an area; :func:`all_findings` asks every one of them. What is asked only when an operation's turn
comes, such as whether the GPUs are idle, stands in :mod:`bringup.findings.change`.
"""

from __future__ import annotations

from typing import Protocol

from bringup.finding import Finding
from bringup.findings import apt, cuda, driver, environment, fabric, linker, preflight
from bringup.host_state import HostState
from bringup.stack import Stack
from bringup.wanted import NVIDIA, Site

_ORDER = {"error": 0, "warning": 1, "info": 2}


class Settings(Protocol):
    """What the rules ask of a host's settings: whether dpkg may be told to finish what it left half-way."""

    @property
    def repair(self) -> str: ...


def all_findings(
    stack: Stack,
    state: HostState,
    *,
    now_s: float,
    site: Site = NVIDIA,
    settings: Settings | None = None,
    has_repaired: bool = False,
) -> tuple[Finding, ...]:
    """Return every finding about a host, errors first.

    ``now_s`` is the controller's clock. ``settings`` None means the default policy. ``has_repaired``: dpkg was
    told to finish what it left half-way, so what is half-way now is an error.
    """
    repairs = settings is None or settings.repair == "safe"
    found = [
        *preflight.findings(stack, state, site=site, now_s=now_s),
        *apt.findings(stack, state, site=site, will_be_repaired=repairs and not has_repaired),
        *driver.findings(stack, state),
        *cuda.findings(stack, state),
        *linker.findings(stack, state),
        *fabric.findings(stack, state),
        *environment.findings(state),
    ]
    return tuple(sorted(found, key=lambda finding: _ORDER[finding.severity]))
