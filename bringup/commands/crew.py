"""Do the steps of a rollout: jobs of the engine on the hosts, drain and undrain commands on this controller."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bringup import engine, hook
from bringup.commands import session
from bringup.commands.conductor import Looked, Outcome
from bringup.errors import BringupError
from bringup.fork_server import ForkServer
from bringup.history import History, Recorder
from bringup.report import events
from bringup.report.masking import Masker
from bringup.report.results import HostResult, Results
from bringup.rollout import (
    Bandwidth,
    BandwidthKey,
    GateEvidence,
    Pass,
    Rollout,
    Step,
    judge_gate,
)
from bringup.secret import secrets_in

# The steps of deploy.py that a step of a rollout runs, by pass. The driver's pass changes nothing but the driver.
PREPARE: Mapping[Pass, tuple[str, ...]] = {
    "driver": ("preflight",),
    "environment": ("preflight", "cuda", "linker", "environment"),
}
CUTOVER: Mapping[Pass, tuple[str, ...]] = {
    "driver": ("preflight", "driver"),
    "environment": ("preflight", "verify", "switch"),
}
# The rollout itself drains before the cutover and undrains after the gate, so the tasks in between must not.
_NO_HOOKS = {"drain": "true", "undrain": "true"}
_DRIVER_PATHS = ("driver.", "kernel.", "fabric.")


@dataclass(frozen=True)
class Hook:
    """Be the drain and undrain commands of one host, run by a shell on this controller. None: nothing to do."""

    drain: str | None = None
    undrain: str | None = None


@dataclass
class _Seen:
    """Keep what a host showed, for its gate."""

    findings_before: frozenset[str] | None = None
    measured: tuple[Bandwidth, ...] = ()
    measured_run: str | None = None


@dataclass
class EngineCrew:
    """Do steps through the engine.

    ``overrides`` are the command line's; ``hook_limit_s`` is how long a drain or undrain command may take.
    ``batches`` is how many jobs run at a time; each has worker processes of its own, or, with ``scheduler``, those of
    a Dask cluster. ``server`` forks workers of this machine; None: each is a program of its own.
    ``secrets`` are those of the inventory; what a hook says is masked with them and with those of the environment.
    """

    inventory: str
    history: History
    hooks: Mapping[str, Hook]
    overrides: Mapping[str, Any]
    on_event: Callable[[events.Event], None] = lambda _event: None
    hook_limit_s: float = 900.0
    batches: int = 2
    parallel: int = engine.HOSTS_PER_WORKER
    verbosity: int = 0
    scheduler: str | None = None
    server: ForkServer | None = None
    secrets: Collection[str] = field(default=(), repr=False)
    _ended: queue.Queue[Outcome | Looked | BaseException] = field(default_factory=queue.Queue)
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _running: dict[int, engine.Executor] = field(default_factory=dict)
    _preparing: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        # Hooks wait for schedulers and not for processors, so many may wait together.
        self._pool = ThreadPoolExecutor(max_workers=256, thread_name_prefix="rollout")
        self._hooks_running: set[int] = set()
        self._masker = Masker({*self.secrets, *secrets_in(os.environ)})

    # ------------------------------------------------------------------------------------------ the crew

    def room(self, step: Step) -> bool:
        """Let only preparations wait: they are many, and what they hold up is nothing that is drained."""
        return step != "prepare" or self._preparing < self.batches

    def begin(self, rollout: Rollout, step: Step, hosts: Sequence[str]) -> None:
        """Begin a step; its outcomes come when they are ready."""
        if step in ("drain", "undrain"):
            for host in hosts:
                self._pool.submit(self._guarded, self._hook, step, [host], rollout)
            return
        if step == "prepare":
            self._preparing += 1
        self._pool.submit(self._guarded, self._work, step, list(hosts), rollout)

    def outcomes(self, timeout_s: float) -> Iterable[Outcome | Looked]:
        """Return what has ended. Raises what a step raised that is no outcome of a host."""
        found: list[Outcome | Looked] = []
        try:
            found.append(self._got(self._ended.get(timeout=timeout_s)))
            while True:
                found.append(self._got(self._ended.get_nowait()))
        except queue.Empty:
            return found

    def look(self, rollout: Rollout) -> None:
        """Look at every host with the probe; those that do not answer it are unreachable."""
        names = [name for wave in rollout.waves for name in wave]
        self._pool.submit(self._guarded, self._look, "inspect", names, rollout)

    def stop(self) -> None:
        """End jobs and hooks that still run."""
        with self._lock:
            self._is_stopped = True
            running, hooks = list(self._running.values()), list(self._hooks_running)
        for executor in running:
            executor.stop()
        for pid in hooks:
            _end_group(pid)
        self._pool.shutdown(wait=True, cancel_futures=True)

    # ----------------------------------------------------------------------------------------- the steps

    def _look(self, _step: Step, names: list[str], rollout: Rollout) -> None:
        results = self._job("drift", names, {})
        for name in names:
            if name not in rollout.wave:
                self._seen.setdefault(name, _Seen()).findings_before = _codes(results.hosts.get(name))
        self._ended.put(Looked(tuple(name for name in names if _status(results, name) == "unknown")))

    def _got(self, ended: Outcome | Looked | BaseException) -> Outcome | Looked:
        if isinstance(ended, BaseException):
            raise ended
        return ended

    def _guarded(
        self, act: Callable[[Step, list[str], Rollout], None], step: Step, hosts: list[str], rollout: Rollout
    ) -> None:
        try:
            act(step, hosts, rollout)
        except BaseException as error:
            # A fault of ours is no outcome of a host: the conductor stops on it, and the log stays true.
            self._ended.put(error)
        finally:
            if step == "prepare":
                with self._lock:
                    self._preparing -= 1

    def _hook(self, step: Step, hosts: list[str], rollout: Rollout) -> None:
        for host in hosts:
            own = self.hooks.get(host, Hook())
            command = own.drain if step == "drain" else own.undrain
            why = self._run_hook(step, host, command, rollout.id) if command is not None else None
            self._ended.put(Outcome(host, step, why is None, why))

    def _work(self, step: Step, hosts: list[str], rollout: Rollout) -> None:
        now = rollout.current_pass
        match step:
            case "prepare":
                results = self._job("apply", hosts, {"only": list(PREPARE[now])})
                accepted: tuple[str, ...] = ("ok", "drift", "slow")
            case "cutover":
                results = self._job("apply", hosts, {"only": list(CUTOVER[now]), **_NO_HOOKS})
                accepted = ("ok",) if now == "environment" else ("ok", "drift")
            case "rollback":
                asked = {"rollback_from": rollout.digest, "rollback_reason": _reason(rollout), **_NO_HOOKS}
                results = self._job("rollback", hosts, asked)
                accepted = ("ok",)
            case "gate":
                results = self._job("drift", hosts, {})
                for host in hosts:
                    self._ended.put(self._gated(host, results.hosts.get(host), rollout))
                return
            case _:
                results = self._job("drift", hosts, {})
                for host in hosts:
                    self._ended.put(_inspected(host, results.hosts.get(host), now))
                return
        for host in hosts:
            result = results.hosts.get(host)
            is_unreachable = result is None or result.status == "unknown"
            is_ok = result is not None and result.status in accepted
            why = None if is_ok else _why(result)
            if step == "prepare" and result is not None:
                self._seen.setdefault(host, _Seen()).findings_before = _codes(result)
            if step == "cutover" and result is not None and result.verification is not None:
                seen = self._seen.setdefault(host, _Seen())
                seen.measured, seen.measured_run = _bandwidths(result), results.run
            is_as_wanted = step == "prepare" and result is not None and judge_result(result, now)[0]
            self._ended.put(Outcome(host, step, is_ok, why, is_unreachable, is_as_wanted))

    def _gated(self, host: str, result: HostResult | None, rollout: Rollout) -> Outcome:
        if result is None or result.status == "unknown":
            return Outcome(host, "gate", False, _why(result), is_unreachable=True)
        is_verified, why_not = judge_result(result, rollout.current_pass)
        seen = self._seen.get(host) or self._remembered(host)
        since_s = rollout.states[host].since_s
        verdict = judge_gate(
            GateEvidence(
                is_verified=is_verified,
                why_not=why_not,
                measured=seen.measured,
                own=self.history.own_bandwidths(host, without_run=seen.measured_run) if seen.measured else (),
                fleet=self.history.fleet_bandwidths(without=host) if seen.measured else (),
                findings_before=seen.findings_before if seen.findings_before is not None else _codes(result),
                findings=_codes(result),
                soak_s=rollout.soak_s,
                soaked_s=time.time() - since_s,
            )
        )
        return Outcome(host, "gate", verdict.is_passed, verdict.why)

    def _remembered(self, host: str) -> _Seen:
        """Return what the history knows of a host that another controller cut over before it died."""
        run, measured = self.history.latest_bandwidths(host)
        return _Seen(findings_before=self.history.known_findings(host), measured=measured, measured_run=run)

    # ---------------------------------------------------------------------------------------------- jobs

    def _job(self, command: str, hosts: Sequence[str], more: Mapping[str, Any]) -> Results:
        job = engine.Job(
            command=command,
            inventory=self.inventory,
            limit=tuple(hosts),
            overrides={**self.overrides, **more},
            parallel=self.parallel,
            verbosity=self.verbosity,
        )
        # Looking is no news for the history: what was done is, and what was found before it.
        record = Recorder(self.history) if command != "drift" else None
        executor = session.executor(self.scheduler) or engine.LocalExecutor(
            show_worker_log=self.verbosity > 0, server=self.server
        )

        def on_event(event: events.Event) -> None:
            with self._lock:
                if record is not None:
                    record(event)
                self.on_event(event)

        with self._lock:
            if self._is_stopped:
                raise BringupError("the rollout was stopped")
            self._running[id(executor)] = executor
        try:
            return engine.run(job, on_event, executor=executor)
        finally:
            with self._lock:
                del self._running[id(executor)]

    def _run_hook(self, step: str, host: str, command: str, rollout_id: str) -> str | None:
        """Run a command and return why it failed, None when it did not.

        It gets a process group of its own, and all of it is ended at the limit: a pipeline would survive the
        end of its shell.
        """
        environment = {**os.environ, "BRINGUP_HOST": host, "BRINGUP_ROLLOUT": rollout_id, "BRINGUP_STEP": step}
        with self._lock:
            if self._is_stopped:
                raise BringupError("the rollout was stopped")
            process = hook.start(command, environment, self.hook_limit_s)
            self._hooks_running.add(process.pid)
        try:
            said, _ = process.communicate(timeout=self.hook_limit_s)
        except subprocess.TimeoutExpired as late:
            return self._told(f"the {step} command did not end within {self.hook_limit_s:g} s", late.output)
        finally:
            _end_group(process.pid)
            with self._lock:
                self._hooks_running.discard(process.pid)
            if process.stdout is not None:
                process.stdout.close()
            process.wait()
        if process.returncode == 0:
            return None
        return self._told(f"the {step} command ended with {process.returncode}", said)

    def _told(self, what: str, said: bytes | None) -> str:
        # A hook that fails may print what it was given.
        lines = self._masker.message((said or b"").decode("utf-8", "replace")).strip().splitlines()
        return f"{what}: {lines[-1][:300] if lines else 'it said nothing'}"


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of it has ended


def _status(results: Results, host: str) -> str:
    return results.hosts[host].status if host in results.hosts else "unknown"


def _why(result: HostResult | None) -> str:
    if result is None:
        return "nothing was heard of it"
    worst = result.worst_finding
    named = f"{worst.code} {worst.cause}" if worst is not None and worst.severity == "error" else None
    left = ", ".join(difference.path for difference in result.differences[:3])
    return result.why or named or (f"still differs: {left}" if left else result.status)


def _reason(rollout: Rollout) -> str:
    return f"rollout {rollout.id}: {rollout.halt or 'its wave failed'}"


def _codes(result: HostResult | None) -> frozenset[str]:
    findings = result.findings if result is not None else ()
    return frozenset(finding.code for finding in findings if finding.severity != "info")


def differs_in_driver(result: HostResult) -> bool:
    """Return whether the driver, its kernel or its fabric is not as wanted: what the driver's pass is for."""
    return any(difference.path.startswith(_DRIVER_PATHS) for difference in result.differences)


def _inspected(host: str, result: HostResult | None, now: Pass) -> Outcome:
    if result is None or result.status == "unknown":
        return Outcome(host, "inspect", False, _why(result), is_unreachable=True)
    is_there = not differs_in_driver(result) if now == "driver" else result.status == "ok"
    return Outcome(host, "inspect", is_there)


def judge_result(result: HostResult, now: Pass) -> tuple[bool, str | None]:
    """Return whether a host is where a pass wants it, and why it is not."""
    if now == "driver":
        # The environment is the next pass, so only the driver can be as wanted yet.
        return not differs_in_driver(result), _why(result)
    state = result.verification.state if result.verification is not None else "none"
    if result.status != "ok":
        return False, _why(result)
    return state == "verified", f"its verification is {state}"


def _bandwidths(result: HostResult) -> tuple[Bandwidth, ...]:
    backends = result.verification.backends if result.verification is not None else ()
    return tuple(
        Bandwidth(
            BandwidthKey(**one.key.model_dump(), payload_bytes=one.payload_bytes),
            one.busbw_gb_per_s,
            one.verdict,
        )
        for one in backends
        if one.state == "measured" and one.key and one.payload_bytes is not None and one.busbw_gb_per_s is not None
    )
