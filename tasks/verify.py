"""Prove an environment on its host, by its final path, before anything is switched to it.

Two scripts look and measure on the host, the rules judge here, and a record of what was proved stays on the
host: it says for which environment, driver, GPUs and limits it holds, and in which boot it was made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pyinfra.api.deploy import deploy
from pyinfra.api.host import Host

from bringup import bench, drift, facts, paths, wanted
from bringup.errors import HostError
from bringup.finding import Finding
from bringup.findings import change, health, proof
from bringup.host_state import HostState, Unknown
from bringup.stack import Stack
from tasks import candidate
from tasks.channel import fetch, push
from tasks.drain import drain, undrain
from tasks.environment import JIT_CACHE, tell
from tasks.run import Command, Commands, Context, converges, do, is_executing, refuse, work, write

RECORD = "/var/lib/bringup/verification.json"
DOCUMENTS = "/run/bringup/documents"
"""Holds what the scripts say, readable by root only."""
STACK_CHECK_LIMIT_S = 900
"""Imports of a cold environment take a minute on a slow disk; each child has its own, shorter limit."""
FABRIC_WAIT_S = 300
"""The fabric manager may still be at work after a boot; longer than this, somebody must look."""
SLACK_S = 60
"""How much longer than its own limit the bench may take before it is ended from outside."""

SWITCH = ("cuda.default", "service.file", "environment.current", *candidate.CONTENT)


@dataclass(frozen=True)
class Target:
    """The environment to prove: its name in the record, its path and its interpreter."""

    name: str
    path: str

    @property
    def python(self) -> str:
        """Return the path of its interpreter."""
        return f"{self.path}/bin/python"


def target(context: Context) -> Target | None:
    """Return what is to be proved: what serves if only that was asked for, else what should serve.

    None: there is no such environment.
    """
    stack, state = context.stack, context.state
    if stack.python.existing is not None:
        return Target(stack.python.existing, stack.python.existing)
    if isinstance(state.environment, Unknown):
        return None
    entry = state.environment.serving if is_explicit(context) else candidate.candidate(stack, state)
    return None if entry is None else Target(entry.name, candidate.path(entry))


def is_explicit(context: Context) -> bool:
    """Return whether a person asked for nothing but the proof."""
    return context.settings.only == ("verify",)


def is_cutover_pending(context: Context) -> bool:
    """Return whether something would be switched after the proof."""
    areas = {found.path for found in drift.diff(context.stack, context.state)}
    return not is_explicit(context) and any(
        path in SWITCH or path.startswith(("environment.distribution.", "environment.files.")) for path in areas
    )


def is_proved(context: Context, proved: Target) -> bool:
    """Return whether the record on the host holds for this very environment, driver, GPUs, limits and boot."""
    record, state = context.state.verification, context.state
    if record is None or isinstance(record, Unknown):
        return False
    found = identity(context.stack, state, proved)
    return all(json_value(getattr(record, key)) == value for key, value in found.items())


def json_value(value: object) -> object:
    """Return a tuple as the list that JSON has for it."""
    return list(value) if isinstance(value, tuple) else value


def identity(stack: Stack, state: HostState, proved: Target) -> dict[str, Any]:
    """Return what a record is valid for. MIG modes and GPUs stand in the order of the driver's index."""
    listed = () if isinstance(state.gpus, Unknown) else state.gpus.listed or ()
    loaded = None if isinstance(state.driver, Unknown) else state.driver.loaded
    return {
        "environment": proved.name,
        "limits_digest": wanted.limits_digest(stack),
        "driver_version": loaded.version if loaded else None,
        "gpu_uuids": [gpu.uuid for gpu in listed],
        "mig_modes": [gpu.mig_mode for gpu in listed],
        "boot_id": None if isinstance(state.kernel, Unknown) else state.kernel.boot_id,
    }


def _asked(context: Context) -> bool:
    if context.settings.force:
        return True
    return drift.verification_state(context.stack, context.state) == "stale"


@converges("verification", *SWITCH, when=_asked)
def proof_of_host(context: Context) -> Commands:
    """Prove the environment that should serve, unless a record of this boot says so already."""
    host, proved = context.host, target(context)
    is_pending, is_forced = is_cutover_pending(context), context.settings.force
    if proved is None:
        # In a plan, and before the first build, there is nothing yet that could be proved.
        if is_executing():
            yield refuse(host, nothing_to_prove(context))
        else:
            yield work("settle")
        return
    if not is_forced and is_proved(context, proved):
        host.noop(f"{proved.name} is proved")
        return
    if not is_pending and not is_forced and drift.gpus_in_use(context.state):
        if is_executing():
            facts.tell_finding(host, left_alone(context))
        host.noop("GPUs are in use: the record is left as it is")
        return
    yield work("settle")
    if not is_executing():
        return
    is_done = False
    try:
        if is_pending:
            problem = drain(host)
            if problem is not None:
                yield refuse(host, problem)
                return
            context = looked_again(context)
        busy = change.in_use(context.state, "verify")
        if busy is not None:
            yield refuse(host, busy)
            return
        yield from _measure(context, proved)
        is_done = True
    finally:
        # After a proof the cutover goes on under the drain; without one nothing else will put the host back.
        if not is_done or not is_pending:
            problem = undrain(host)
            if problem is not None:
                facts.tell_finding(host, problem)


def looked_again(context: Context) -> Context:
    """Return the context with a fresh look at the host: the drain command changed something there.

    Raises HostError when the host does not answer.
    """
    facts.invalidate(context.host)
    state = facts.observed(context.host)
    if state is None:
        raise HostError("the host does not answer after the drain", why=facts.why_unknown(context.host))
    return Context(context.host, context.stack, state, context.settings, context.differences)


def nothing_to_prove(context: Context) -> Finding:
    """Return the finding for a verify without an environment."""
    return Finding(
        code="BU-VFY-003",
        severity="error",
        cause="there is no whole environment of this stack to prove",
        remedy="run bringup apply first",
        evidence={"wanted": candidate.digest(context.stack, context.state), "found": None},
    )


def left_alone(context: Context) -> Finding:
    """Return the finding that says why a record was not renewed."""
    state = drift.verification_state(context.stack, context.state)
    return Finding(
        code="BU-VFY-004",
        severity="info",
        cause=f"the verification is {'stale' if state == 'stale' else 'missing'}; GPUs are in use, so nothing was run",
        remedy="run bringup verify when the host is idle",
    )


# ---------------------------------------------------------------- measuring


def is_lookalike(context: Context) -> bool:
    """Return whether the wheels are simulated: such a torch must never run a collective."""
    lock = context.stack.lock
    is_lab_lock = lock is not None and lock.wheels is not None and lock.wheels.resolved_against == "lab"
    return is_lab_lock and "wheels" in context.state.simulated


def guarded(stack: Stack) -> tuple[list[str], list[str]]:
    """Return the modules that must import, and the distributions whose versions are looked at."""
    modules = [module for step in stack.python.steps for module in step.imports]
    names = [canonicalize_name(Requirement(text).name) for step in stack.python.steps for text in step.requirements]
    return modules, list(dict.fromkeys(names))


def environment_variables(context: Context, proved: Target) -> dict[str, str]:
    """Return what the scripts get: the service's variables, and a cache of this environment and nothing else."""
    name = proved.name.rpartition("-")[0] if context.stack.python.existing is None else "existing"
    cache = f"{JIT_CACHE}/{name}/root"
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TORCH_EXTENSIONS_DIR": f"{cache}/torch_extensions",
        "FLASHINFER_WORKSPACE_BASE": f"{cache}/flashinfer",
        "CUDA_CACHE_PATH": f"{cache}/cuda",
        **wanted.service_variables(context.stack),
    }


def _measure(context: Context, proved: Target) -> Commands:
    """Run the checks and the bench, judge them, and record the proof where nothing is refused."""
    host, stack = context.host, context.stack
    refusal = tell(host, proof.gpus(stack, context.state))
    if refusal is not None:
        yield refuse(host, refusal)
        return
    yield scripted(context, proved, "stack_check", stack_check_arguments(context, proved), STACK_CHECK_LIMIT_S)
    document = answered(host, "stack_check")
    _, names = guarded(stack)
    locked = stack.locked_distributions(wanted.platform(stack, context.state) or "")
    expected = {name: locked[name] for name in names if name in locked}
    witnesses = health_of(document, context.state)
    refusal = tell(host, (*proof.stack_check(stack, expected, document), *witnesses))
    if refusal is not None:
        yield refuse(host, refusal)
        return
    if is_lookalike(context):
        results = not_run(context, "the torch of this host is a look-alike; it never runs a collective")
        findings: list[Finding] = []
    else:
        verdict = yield from _all_reduce(context, proved, witnesses)
        results = measured(context, verdict)
        findings = list(verdict.findings)
    for result in results:
        facts.tell(host, "measurement", result)
    refusal = tell(host, [*findings, *proof.required(results)])
    if refusal is not None:
        yield refuse(host, refusal)
        return
    # Whatever fails after this leaves the old environment serving, and with it what was proved of that one.
    yield write(RECORD, json.dumps(record(context, proved, results), sort_keys=True) + "\n", undo=True)


def health_of(document: Mapping[str, Any], state: HostState) -> tuple[Finding, ...]:
    """Return what speaks against measuring; nothing where health was not looked at."""
    if "health" not in document:
        return ()
    settings = document.get("settings")
    is_known = isinstance(settings, dict) and "error" not in settings
    listed = () if isinstance(state.gpus, Unknown) else state.gpus.listed or ()
    return health.findings(
        health.parse(document["health"]),
        settings=health.Settings.model_validate(settings) if is_known else None,
        nvlinks=limits().nvlinks(listed[0].name, len(listed)) if listed else None,
    )


def _all_reduce(
    context: Context, proved: Target, witnesses: tuple[Finding, ...]
) -> Generator[Command, None, bench.Verdict]:
    """Measure until the verdict stands: once more after a slow run, with P2P off after one that hung."""
    runs: bench.Runs | None = None
    request: str | None = "first"
    while True:
        extra = {"NCCL_P2P_DISABLE": "1"} if request == "p2p_off" else {}
        limit_s = context.stack.verify.timeout_s + SLACK_S
        yield scripted(context, proved, "allreduce_bench", bench_arguments(context), limit_s, extra)
        document = bench.parse(answered(context.host, "allreduce_bench"))
        if runs is None:
            runs = bench.Runs(document)
        elif request == "repeat":
            runs = dataclasses.replace(runs, repeat=document)
        else:
            runs = dataclasses.replace(runs, without_p2p=document)
        verdict = bench.judge(
            runs,
            limits(),
            required=context.stack.verify.require,
            findings=witnesses,
            record=earlier(context.state),
        )
        if not document.rows and not verdict.findings:
            verdict = dataclasses.replace(verdict, findings=tuple(proof.not_measured(runs.last)))
        request = verdict.request
        if request is None:
            return verdict


@cache
def limits() -> bench.Table:
    """Return the limits that bringup ships."""
    return bench.Table.from_toml((paths.data() / "allreduce.toml").read_text(encoding="utf-8"))


def earlier(state: HostState) -> tuple[bench.Figure, ...]:
    """Return the figures of the host's own record."""
    record = state.verification
    if record is None or isinstance(record, Unknown):
        return ()
    return tuple(
        bench.Figure(bench.Key(**dict(entry.key)), entry.backend, entry.payload_bytes, entry.busbw_gb_per_s)
        for entry in record.backends
        if entry.key is not None and entry.payload_bytes is not None and entry.busbw_gb_per_s is not None
    )


def scripted(
    context: Context,
    proved: Target,
    name: str,
    arguments: list[str],
    limit_s: float,
    extra: Mapping[str, str] | None = None,
) -> Command:
    """Send one of ``files/*.py`` and return the command that runs it; its document tells how it ended.

    The status of the command is 0 whatever the script's was: a document that says why is worth more.
    """
    script = sent(context.host, name)
    python = proved.python if name == "allreduce_bench" else "python3"
    environment = {**environment_variables(context, proved), **(extra or {})}
    variables = [f"{key}={value}" for key, value in sorted(environment.items())]
    command = [python, script, *arguments, "--output", output_path(name)]
    argv = ["env", "-i", *variables, "sh", "-c", _SCRIPTED, output_path(name), *command]
    return do(f"verify-{name}", argv, limit_s=limit_s, detach=True)


def sent(host: Host, name: str) -> str:
    """Send one of ``files/*.py`` and return where it lies on the host; its name changes with its content."""
    source = (paths.files() / f"{name}.py").read_bytes()
    script = f"/run/bringup/{name}-{hashlib.sha256(source).hexdigest()[:12]}.py"
    push(host, script, source, mode="0600")
    return script


# What an earlier run left must not be taken for this one's answer; and what a host's settings are is for root.
_SCRIPTED = '(umask 077; mkdir -p "${0%/*}"); rm -f "$0"; "$@"; true'


def output_path(name: str) -> str:
    """Return where a script leaves its document."""
    return f"{DOCUMENTS}/{name}.json"


def answered(host: Host, name: str) -> Mapping[str, Any]:
    """Return the document that a script left.

    Raises HostError when there is none.
    """
    text = fetch(host, output_path(name), missing="").strip()
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise HostError(
            f"{name} left no document",
            host=host.name,
            why="it was ended before it could write one" if not text else "it cannot be read",
            hint=f"its log lies on the host in /run/bringup/jobs/{facts.run_id()}-verify-{name}/log",
        )
    return document


def stack_check_arguments(context: Context, proved: Target) -> list[str]:
    """Return the command line of the stack check for this stack and these GPUs."""
    stack, state = context.stack, context.state
    modules, names = guarded(stack)
    arguments = ["--python", proved.python]
    for module in modules:
        arguments += ["--import", module]
    for name in names:
        arguments += ["--distribution", name]
    for soname, toolkit in stack.linker.items():
        arguments += ["--soname", soname]
        if soname.startswith("libnvrtc.so"):
            arguments += ["--nvrtc", f"{toolkit}={soname}"]
    listed = () if isinstance(state.gpus, Unknown) else state.gpus.listed or ()
    for capability in sorted({gpu.compute_capability for gpu in listed if gpu.compute_capability}):
        arguments += ["--capability", capability]
    sections = ["versions", "imports", "nvrtc", "jit", "settings"]
    # A simulated GPU has no context to make and no health to report.
    if "gpu" not in state.simulated:
        sections += ["gpus", "health"]
        arguments += ["--wait-fabric", str(FABRIC_WAIT_S)]
        arguments += [part for unit in stack.service.restart for part in ("--unit", unit)]
    return [*arguments, "--sections", ",".join(sections)]


def is_on_cpu(context: Context) -> bool:
    """Return whether the collective runs over gloo: there is no GPU, or only a simulated one."""
    listed = () if isinstance(context.state.gpus, Unknown) else context.state.gpus.listed or ()
    return "gpu" in context.state.simulated or not listed


def bench_arguments(context: Context) -> list[str]:
    """Return the command line of the all-reduce for this stack and these GPUs."""
    limits = context.stack.verify
    arguments = ["--timeout", str(limits.timeout_s)]
    if is_on_cpu(context):
        return [*arguments, "--profile", "smoke", "--device", "cpu", "--ranks", str(limits.cpu_ranks)]
    profile = context.settings.profile or limits.profile
    return [*arguments, "--profile", profile, "--device", "cuda", "--ranks", "auto"]


def backends(context: Context) -> tuple[str, ...]:
    """Return the names of backends that a report mentions even where none was run."""
    return tuple(dict.fromkeys((*context.stack.verify.require, "nccl")))


def not_run(context: Context, reason: str) -> list[dict[str, Any]]:
    """Return the results of backends that were not run, with the reason."""
    required = context.stack.verify.require
    return [
        {"backend": name, "state": "not_run", "required": name in required, "reason": reason}
        for name in backends(context)
    ]


def measured(context: Context, verdict: bench.Verdict) -> list[dict[str, Any]]:
    """Return one result for each backend, those that a simulated GPU keeps from running among them."""
    results = [dict(judgement.as_result()) for judgement in verdict.backends]
    if is_on_cpu(context):
        for result in results:
            result["reason"] = result["reason"] or "on CPU: no GPU took part"
    if "gpu" in context.state.simulated:
        known = {result["backend"] for result in results}
        results += [r for r in not_run(context, "the GPUs are simulated") if r["backend"] not in known]
    return results


def record(context: Context, proved: Target, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record that stays on the host."""
    return {
        "schema": 1,
        **identity(context.stack, context.state, proved),
        "measured_at_s": round(time.time(), 3),
        "simulated": list(wanted.simulated(context.stack, context.state)),
        "backends": results,
    }


@deploy("Verify")
def prove() -> None:
    """Prove the environment that should serve."""
    proof_of_host(name="Prove the environment")
