"""Refuse a host that cannot get there, before anything is changed; wait for what will end by itself."""

from __future__ import annotations

import time

from pyinfra.api import deploy

from bringup import facts
from bringup.findings import all_findings
from bringup.host_state import Unknown
from tasks import apt
from tasks.run import Commands, Context, converges, do, is_executing, refuse

CLOUD_INIT_LIMIT_S = 900

_repaired: set[str] = set()
"""Hosts whose dpkg was told once in this run to finish what it left half-way."""


@converges("*")
def boot_finished(context: Context) -> Commands:
    """Wait for cloud-init: until it is done it installs packages and holds apt's locks."""
    state = context.state.cloud_init
    if not isinstance(state, Unknown) and state.state == "running":
        yield do("cloud-init", ["cloud-init", "status", "--wait"], limit_s=CLOUD_INIT_LIMIT_S)


@converges("*")
def packages_whole(context: Context) -> Commands:
    """Let dpkg finish what it left half-way, once, where the policy is ``safe``; nothing else is tried."""
    state = context.state.dpkg
    is_broken = not isinstance(state, Unknown) and bool(state.broken or state.is_interrupted)
    if is_broken and context.settings.repair == "safe":
        if is_executing():
            _repaired.add(context.host.name)
        yield apt.repair()


@converges("*")
def refusals(context: Context) -> Commands:
    """Refuse the host for everything that would stop it later."""
    found = all_findings(context.stack, context.state, now_s=time.time(), site=facts.site(context.host))
    errors = [finding for finding in found if finding.is_refusal]
    for finding in errors[1:]:
        facts.tell_finding(context.host, finding)
    if errors:
        yield refuse(context.host, errors[0])


@deploy("Preflight")
def check() -> None:
    """Look before anything is changed."""
    boot_finished(name="Wait for cloud-init")
    packages_whole(name="Let dpkg finish what it left half-way")
    refusals(name="Refuse a host that cannot get there")
