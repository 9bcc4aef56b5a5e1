"""Read the serving environment of one host for the ABI guard: ``python -m bringup.host_environment``.

A process of its own, as every worker is: pyinfra patches the standard library of the process that it runs in.
It reads a request as JSON from stdin, {"inventory", "host", "names"}, and prints one line, {"answer": what
files/abi_probe.py said, "capability": the GPUs' compute capability or null} or {"error": …}. The host is only
looked at.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any

from bringup.abi import InstalledEnvironment, parse_environment
from bringup.errors import BringupError, HostError, InputError

CURRENT = "/opt/bringup/current"
"""Where the serving environment of a host is, unless its stack names an existing one."""

_LIMIT_S = 180


@dataclass(frozen=True)
class HostEnvironment:
    """The environment that a host serves from; ``capability`` None: no GPU told its compute capability."""

    environment: InstalledEnvironment
    capability: str | None


def read_host(inventory: str, host: str, names: Iterable[str]) -> HostEnvironment:
    """Return the serving environment of a host, looked through for ``names`` too.

    Raises InputError when the inventory or the host in it cannot be used, HostError when the host does not
    answer or holds no such environment.
    """
    request = json.dumps({"inventory": inventory, "host": host, "names": sorted(names)})
    command = [sys.executable, "-m", "bringup.host_environment"]
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise HostError(f"did not answer within {_LIMIT_S} s", host=host) from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise BringupError(f"the reader of {host} ended early", why=done.stderr.strip()[-500:] or None)
    said = json.loads(lines[-1])
    if "error" in said:
        kind = InputError if said["is_input"] else HostError
        raise kind(said["error"], host=None if said["is_input"] else host, why=said["why"], hint=said["hint"])
    return HostEnvironment(parse_environment(said["answer"]), said["capability"])


def main(stdin: IO[str] = sys.stdin, stdout: IO[str] = sys.stdout) -> int:
    """Answer one request."""
    request = json.load(stdin)
    try:
        said = _look(request["inventory"], request["host"], request["names"])
    except BringupError as error:
        is_input = isinstance(error, InputError)
        said = {"error": error.what, "why": error.why, "hint": error.hint, "is_input": is_input}
    stdout.write(json.dumps(said) + "\n")
    stdout.flush()
    return 0


def _look(inventory: str, name: str, names: list[str]) -> dict[str, Any]:
    # Only here, because importing the worker patches the process for gevent.
    from bringup import facts, worker
    from bringup.host_state import Unknown

    def quiet(_: str) -> None:
        """Drop what a worker tells an engine; nobody follows this one."""

    class Look(worker.Worker):
        def look(self) -> dict[str, Any]:
            opened = self._open()
            host = next(host for host in opened if self.state.is_host_in_limit(host))
            path = facts.wanted(host).python.existing or CURRENT
            about = self._told[host.name] = worker._Told(0.0)
            found: dict[str, Any] = {}

            def ask(host: Any) -> None:
                asked = "".join(f"{name}\n" for name in names)
                output = host.get_fact(facts.Script, "abi_probe", (path, "--wanted", "-"), _stdin=asked)
                found["answer"] = json.loads(facts.answer(output))
                state = facts.observed(host)
                gpus = None if state is None or isinstance(state.gpus, Unknown) else state.gpus.listed
                found["capability"] = next((g.compute_capability for g in gpus or () if g.compute_capability), None)

            try:
                self._connect([host])
                if host not in self.state.active_hosts:
                    raise HostError("cannot connect", why=self._errors.get(host.name))
                self._each([host], ask)
            finally:
                worker.close([host])
            if about.problem:
                raise HostError("the environment could not be read", why=about.problem)
            return found

    shard = worker.Shard(command="drift", inventory=inventory, limit=(name,), parts=1)
    return Look(shard, quiet).look()


if __name__ == "__main__":
    sys.exit(main())
