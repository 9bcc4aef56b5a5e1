"""Build the Python environment beside the serving one, step by step, with the guard after each step.

Nothing in here can disturb what is serving: the new environment lies in a directory of its own, and ``switch``
points at it only after it was proved. The host builds (``files/host_env.py``) and reports; the rules of
``bringup.findings.guard`` decide here.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Container, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uv
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pyinfra.api.deploy import deploy
from pyinfra.api.host import Host

from bringup import abi, facts, package_index, paths, torch_index, wanted
from bringup.errors import HostError, InputError
from bringup.finding import Finding
from bringup.findings import guard
from bringup.host_state import Unknown
from bringup.secret import split_login
from bringup.stack import LockedStep, Stack, Step
from tasks import candidate
from tasks.channel import push
from tasks.run import Command, Commands, Context, converges, do, is_executing, refuse, work, write

HOME = "/opt/bringup"
JIT_CACHE = "/var/cache/bringup"
CREDENTIALS = "/run/bringup/credentials"
PROXY = "@proxy"
"""The name of the proxy's login among those of the indexes; no index can be called so."""

INSTALL_LIMIT_S = 7200
"""Ten gigabytes at two megabytes a second; a stalled connection ends long before, by uv's own limit."""


def ask(host: Host, script: str, *arguments: str) -> Any:
    """Return what one of ``files/*.py`` answers on a host.

    Raises HostError when it does not answer.
    """
    return json.loads(facts.answer(host.get_fact(facts.Script, script, arguments)))


def tell(host: Host, findings: Iterable[Finding]) -> Finding | None:
    """Tell what the rules said, and return the first refusal, untold: ``refuse`` tells it."""
    refusal = None
    for finding in findings:
        if finding.is_refusal and refusal is None:
            refusal = finding
        elif is_executing():
            facts.tell_finding(host, finding)
    return refusal


# ---------------------------------------------------------------- the order


@cache
def uv_binary() -> tuple[Path, str, str]:
    """Return the controller's uv: where it lies, its version, its SHA-256."""
    binary = Path(os.fspath(uv.find_uv_bin()))
    with binary.open("rb") as file:
        return binary, version("uv"), hashlib.file_digest(file, "sha256").hexdigest()


def uv_path() -> str:
    """Return where that uv lies on a host."""
    return f"{HOME}/uv/{uv_binary()[1]}/uv"


@cache
def builder() -> tuple[str, bytes]:
    """Return where ``host_env.py`` lies on a host (its name changes with its content), and its content."""
    source = (paths.files() / "host_env.py").read_bytes()
    return f"/run/bringup/host_env-{hashlib.sha256(source).hexdigest()[:12]}.py", source


def index_source(stack: Stack, chosen: facts.Settings, name: str) -> package_index.Source:
    """Return URL and credentials of an index: the inventory's, else the stack's, else the controller's own.

    An empty URL means uv's built-in index. Raises InputError when the credentials' reference leads nowhere.
    """
    declared = next((index for index in stack.python.indexes if index.name == name), None)
    if name in chosen.indexes:
        source = package_index.Source.parse(chosen.indexes[name])
    elif declared is not None:
        source = package_index.Source(declared.url)
    else:
        own = package_index.default_index()
        source = own.url or package_index.Source("")
    if source.user is None and declared is not None:
        login = package_index.credentials(declared.credentials)
        if login is not None:
            source = package_index.Source(source.url, *login)
    return source


def step_pairs(stack: Stack, key: str) -> list[tuple[Step, LockedStep]]:
    """Return each step with its locked files, in the guarded order.

    Raises InputError when the lock does not belong to the stack's steps.
    """
    locked = stack.locked_steps(key) or ()
    if [step.name for step in locked] != [step.name for step in stack.python.steps]:
        raise InputError(
            f"{stack.source}: the lock has other steps than the stack",
            why=f"wanted {[step.name for step in stack.python.steps]}, found {[step.name for step in locked]}",
            hint=f"run `bringup lock {stack.name}`",
        )
    return list(zip(stack.python.steps, locked, strict=True))


def order(context: Context, generation: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the build order and the credentials by index, which travel apart from it."""
    stack, chosen = context.stack, context.settings
    key = wanted.platform(stack, context.state) or ""
    digest = stack.env_digest(key)
    secrets: dict[str, Any] = {}
    proxy, login = split_login(chosen.proxy or "")
    if login is not None:
        secrets[PROXY] = {"user": login[0], "password": login[1]}
    steps = []
    for step, locked in step_pairs(stack, key):
        calls: dict[str, dict[str, Any]] = {}
        for file in locked.files:
            source = index_source(stack, chosen, file.index)
            if source.user is not None:
                secrets[file.index] = {"user": source.user, "password": source.password}
            call = calls.setdefault(file.index, {"index": file.index, "url": source.url or None, "files": []})
            call["files"].append({"name": file.distribution, "version": file.version, "sha256": file.sha256})
        steps.append({"name": step.name, "imports": list(step.imports), "calls": list(calls.values())})
    document = {
        "schema": 1,
        "home": HOME,
        "jit_cache": JIT_CACHE,
        "env": f"{wanted.ENVS}/{digest}-{generation}",
        "digest": digest,
        "generation": generation,
        "platform": key,
        "python": wanted.interpreter(stack, context.state),
        "uv": uv_path(),
        "proxy": proxy or None,
        "steps": steps,
        "patches": [_patch(stack, number) for number in range(len(stack.python.patches))],
    }
    return document, secrets


def _patch(stack: Stack, number: int) -> dict[str, Any]:
    patch = stack.python.patches[number]
    path = Path(stack.source).parent / patch.diff
    try:
        diff = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}", why=str(error), hint=f"{stack.source} names it") from None
    return {
        "distribution": patch.distribution,
        "version": patch.version,
        "diff": diff,
        "files": {name: {"before": file.before, "after": file.after} for name, file in patch.files.items()},
    }


# ---------------------------------------------------------------- operations


@converges("environment.launcher")
def launcher(context: Context) -> Commands:
    """Put the launcher that services use in place."""
    del context
    yield write(wanted.LAUNCHER_FILE, (paths.files() / "run").read_bytes(), mode="0755")


@converges("environment.existing", *candidate.CONTENT, "environment.current")
def environment(context: Context) -> Commands:
    """Build the wanted environment unless a sound one of that digest is there already."""
    host, stack, state = context.host, context.stack, context.state
    if stack.python.existing is not None:
        yield refuse(host, not_ours(context))
        return
    if isinstance(state.environment, Unknown) or isinstance(state.os, Unknown):
        raise HostError("its environments could not be looked at", host=host.name)
    ready = candidate.candidate(stack, state)
    damaged = None
    if ready is not None:
        seen = ask(host, "host_env", "check", candidate.path(ready), *_deep(context))
        if seen["has_interpreter"] and not seen["differing"]:
            host.noop(f"{ready.name} is there and whole")
            return
        damaged = candidate.path(ready)
    elif any(fnmatchcase(found.path, "environment.files.*") for found in context.differences):
        damaged = state.environment.current
    built, secrets = order(context, candidate.next_generation(stack, state))
    refusal = tell(host, guard.locked_twice(locked for _, locked in step_pairs(stack, built["platform"])))
    if refusal is not None:
        yield refuse(host, refusal)
        return
    yield work("settle")
    if not is_executing():
        return
    refusal = send(host, built, state.os.machine)
    if refusal is not None:
        yield refuse(host, refusal)
        return
    run = _Builder(host, built)
    if damaged is not None:
        yield run.command("heal", damaged, *_deep(context))
    yield run.command("create")
    yield from run.judge(guard.created(run.last("create"), built["python"]))
    for step, locked in step_pairs(stack, built["platform"]):
        if run.is_refused:
            return
        yield from _install(context, run, step, locked, secrets)
    if built["patches"] and not run.is_refused:
        yield run.command("patch")
        yield from run.judge(guard.patched(run.last("patch")))
        for step, _ in step_pairs(stack, built["platform"]):
            yield from _import(run, step)
    if not run.is_refused:
        yield run.command("finish")


def _deep(context: Context) -> list[str]:
    return ["--deep"] if context.settings.deep else []


def _install(context: Context, run: _Builder, step: Step, locked: LockedStep, secrets: dict[str, Any]) -> Commands:
    """Install one step and guard it: what it changed, families, symbols, imports."""
    if secrets:
        push(context.host, CREDENTIALS, json.dumps(secrets).encode(), mode="0600")
    yield run.command("install", step.name)
    entry = run.last("install")
    yield from run.judge(guard.installed(entry, locked))
    if run.is_refused:
        return
    versions = run.versions()
    label = context.stack.python.cuda_label
    others = {name: version for name, version in entry["added"].items() if name not in step.family}
    yield from run.judge([*guard.families(step, versions, label), *guard.labels(others, label)])
    if not run.is_refused:
        yield from run.judge(loads(context, run.built["env"], locked, entry["added"]))
    yield from _import(run, step)


@cache
def torch_releases(machine: str) -> tuple[abi.TorchRelease, ...]:
    """Return the torch releases whose exports are known, by which the guard tells what a wheel would fit."""
    # Read only by a run that builds: the index takes a second and 100 MB.
    return abi.TorchIndex(torch_index.known_builds(), machine).catalogue


def loads(context: Context, path: str, locked: LockedStep, added: Container[str]) -> Iterator[Finding]:
    """Judge by the ELF tables whether what a step added would load; nothing before torch is there.

    Raises HostError when the environment's shared objects could not be read.
    """
    answer = ask(context.host, "abi_probe", path)
    if isinstance(answer, dict) and answer.get("torch") is None and "error" not in answer:
        return
    environment = abi.parse_environment(answer)
    if "torch" in added:
        yield from guard.built_for(environment.version, environment.cuda, context.stack.python.cuda, locked.name)
    gpus = context.state.gpus
    listed = () if isinstance(gpus, Unknown) else gpus.listed or ()
    optional = [
        Requirement(text).name for one in context.stack.python.steps if one.optional for text in one.requirements
    ]
    # The lock judged these files with every torch release at hand: what it found sound was built for this torch.
    minor = ".".join(environment.version.split(".")[:2])
    sound = [file.distribution for file in locked.files if file.verdict in ("ok", "ok-stable")]
    verdicts = abi.judge_environment(
        environment,
        catalogue=torch_releases(str(answer.get("machine"))),
        capability=next((gpu.compute_capability for gpu in listed if gpu.compute_capability), None),
        built_for=dict.fromkeys((canonicalize_name(name) for name in sound), minor),
        optional=optional,
    )
    new = [verdict.as_json() for verdict in verdicts if canonicalize_name(verdict.name) in added]
    yield from guard.loadable(new, locked.name)


def _import(run: _Builder, step: Step) -> Commands:
    if step.imports and not run.is_refused:
        yield run.command("imports", step.name)
        yield from run.judge(guard.imported(run.last("imports")))


class _Builder:
    """The builder on one host: its commands, its log, and whether the guard has refused."""

    def __init__(self, host: Host, built: dict[str, Any]) -> None:
        self.host = host
        self.built = built
        self.is_refused = False
        self._commands = 0

    def command(self, action: str, *arguments: str) -> Command:
        """Return the command for one action; it goes on when the connection is lost."""
        self._commands += 1
        name = f"environment-{self._commands}-{action}"
        argv = ["python3", builder()[0], action, order_path(), *arguments]
        return do(name, argv, limit_s=INSTALL_LIMIT_S, detach=True)

    def _log(self) -> dict[str, Any]:
        log: dict[str, Any] = ask(self.host, "host_env", "report")
        if log["env"] != self.built["env"]:
            raise HostError(
                "the builder's log is about another environment",
                host=self.host.name,
                why=f"wanted {self.built['env']}, found {log['env']}",
            )
        return log

    def last(self, action: str) -> dict[str, Any]:
        """Return what the last such action saw."""
        return next(dict(entry) for entry in reversed(self._log()["actions"]) if entry["action"] == action)

    def versions(self) -> dict[str, str]:
        """Return the version of everything installed so far."""
        return {name: seen["version"] for name, seen in self._log()["snapshot"].items()}

    def judge(self, findings: Iterable[Finding]) -> Commands:
        """Tell the findings; refuse the host at the first refusal among them."""
        refusal = None if self.is_refused else tell(self.host, findings)
        if refusal is not None:
            self.is_refused = True
            yield refuse(self.host, refusal)


def order_path() -> str:
    """Return where the build order of this run lies on a host."""
    return f"/run/bringup/order-{facts.run_id()}.json"


def send(host: Host, built: dict[str, Any], machine: str) -> Finding | None:
    """Send the builder, the order and, where it is not there, uv; return why uv cannot be sent, or None."""
    binary, number, digest = uv_binary()
    seen = ask(host, "host_env", "look", uv_path(), built["python"])
    if machine != platform.machine():
        # A host of another machine type can still bring its own uv of the very version.
        if not str(seen["uv_version"]).startswith(f"uv {number} ") and seen["uv_version"] != f"uv {number}":
            return Finding(
                code="BU-ENV-108",
                severity="error",
                cause=f"the controller's uv is for {platform.machine()}, the host is {machine}",
                remedy=f"put uv {number} for {machine} at {uv_path()} on the host",
                evidence={"wanted": f"uv {number}", "found": seen["uv_version"]},
            )
    elif seen["uv_sha256"] != digest:
        push(host, uv_path(), binary, mode="0755")
    path, content = builder()
    push(host, path, content, mode="0600")
    push(host, order_path(), json.dumps(built).encode(), mode="0600")
    return None


def not_ours(context: Context) -> Finding:
    """Return the finding for an existing environment that is not as the stack wants it."""
    first = context.differences[0]
    return Finding(
        code="BU-ENV-151",
        severity="error",
        cause=f"the existing environment {context.stack.python.existing} is not as the stack wants it: {first.path}",
        remedy="bringup checks an existing environment and never changes it: change it yourself, or the stack",
        evidence={"wanted": first.wanted, "found": first.found},
    )


@deploy("Environment")
def build() -> None:
    """Have the launcher in place and the wanted environment complete beside the serving one."""
    launcher(name="Put the launcher in place")
    environment(name="Build the Python environment")
