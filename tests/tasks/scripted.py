"""Run an operation against a scripted host: what its scripts answer is data, what it is told is kept."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import host_case
import tomlkit
from pyinfra.api import Config, FunctionCommand, Inventory, State
from pyinfra.context import ctx_config, ctx_host, ctx_inventory, ctx_state

from bringup import facts, paths
from tasks import run as running

Answer = dict[str, Any]


class Replies(dict[str, object]):
    """Answers to one question, one after the other; the last one stays."""

    def __init__(self, *answers: object) -> None:
        super().__init__()
        self.answers = list(answers)

    def get(self, key: object, default: object = None) -> Any:
        if key != "stdout":
            return True if key == "success" else default
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer if isinstance(answer, str) else json.dumps(answer)


class Channel:
    """A command that reads its input to the end, or prints one file."""

    def __init__(self, rig: Rig, command: str) -> None:
        self.argv = shlex.split(shlex.split(command)[-1])
        self.rig = rig
        self.pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def end_input(self) -> None:
        pass

    def read(self, timeout_s: float | None = None) -> str:
        return self.rig.files.get(self.argv[-1], "")

    def wait(self, timeout_s: float | None = None) -> int:
        if "write" in self.argv:
            self.rig.sent[self.argv[self.argv.index("write") + 1]] = b"".join(self.pieces)
            return 0
        return 0 if self.argv[-1] in self.rig.files else 44

    def errors(self) -> str:
        return ""

    def close(self) -> None:
        pass


_WRITE = re.compile(r" write (\S+) .*--content-b64 (\S+)")


class Rig:
    """One scripted host with its stack and data.

    ``answers`` are the probe's, one after the other; ``scripts`` those of (script, first argument); ``files``
    what can be fetched. Afterwards ``sent`` holds what was pushed and ``written`` what commands write, ``findings``
    and ``measured`` what was told and ``said`` the cause and the remedy of each finding.
    """

    def __init__(
        self,
        directory: Path,
        *answers: Answer,
        scripts: Mapping[tuple[str, str], Replies] | None = None,
        files: Mapping[str, str] | None = None,
        stack: Answer | None = None,
        lock: Answer | None = None,
        **settings: object,
    ) -> None:
        self.files = dict(files or {})
        self.sent: dict[str, bytes] = {}
        self.written: dict[str, str] = {}
        self.findings: list[tuple[str, str]] = []
        self.said: list[tuple[str, str]] = []
        self.measured: list[Answer] = []
        path = directory / "case.toml"
        path.write_text(tomlkit.dumps(json.loads(json.dumps(stack or host_case.STACK))))
        lock_path = directory / "case.lock.toml"
        lock_path.write_text(tomlkit.dumps(json.loads(json.dumps(lock or host_case.LOCK))))
        responses: dict[re.Pattern[str], Replies] = {}
        for (name, argument), replies in {("host_probe", ""): Replies(*answers), **(scripts or {})}.items():
            packed = re.escape(facts._packed(name)[:80])
            responses[re.compile(f"{packed}.* {re.escape(argument)}", re.S)] = replies
        data = {
            "fake_delay": 0,
            "fake_delay_jitter": 0,
            "fake_responses": responses,
            "bringup_stack": str(path),
            "bringup_lock": str(lock_path),
            "bringup_apt_url": host_case.SITE.repository_url,
            "bringup_apt_key_fingerprint": host_case.SITE.key_fingerprint,
            **{f"bringup_{key}": value for key, value in settings.items()},
        }
        self.inventory = Inventory((["@fake/gpu-01"], {}), case=(["@fake/gpu-01"], data))
        self.state = State(self.inventory, Config())
        self.host = next(iter(self.inventory))
        self.host.connect()
        self.host.connector.open_channel = lambda command: Channel(self, command)  # type: ignore[attr-defined]
        facts.stack_named.cache_clear()

    @contextmanager
    def _bound(self) -> Iterator[None]:
        with (
            ctx_state.use(self.state),
            ctx_inventory.use(self.inventory),
            ctx_config.use(self.state.config),
            ctx_host.use(self.host),
        ):
            yield

    def told(self, host: str, kind: str, content: Mapping[str, Any]) -> None:
        if kind == "finding":
            self.findings.append((content["code"], content["severity"]))
            self.said.append((content["cause"], content["remedy"]))
        if kind == "measurement":
            self.measured.append(dict(content))

    def run(self, operation: Any, *, is_executing: bool = True) -> list[str]:
        """Return the commands of an operation, each as the words behind host_work.py's own options.

        A refusal ends the list, as it ends the operation on a real host.
        """
        self.state.is_executing = is_executing
        commands = []
        facts.listen(self.told)
        try:
            with self._bound():
                for command in operation._inner():
                    if isinstance(command, FunctionCommand):
                        commands.append(command.function.__name__)
                    else:
                        commands.append(shown(str(command)))
                        if found := _WRITE.search(str(command)):
                            self.written[found[1]] = base64.b64decode(found[2]).decode()
                    if commands[-1].startswith("refuse"):
                        break
                    if not is_executing:
                        break
        finally:
            facts._listeners.remove(self.told)
        return commands


def shown(command: str) -> str:
    """Return a command without what changes from run to run."""
    if command.startswith("if test -e"):
        found = re.search(r"BU-[A-Z]+-\d{3}", command)
        return f"refuse {found.group() if found else command}"
    words = shlex.split(command)
    words = words[words.index("--wait-s") + 2 :] if "--wait-s" in words else words
    text = " ".join(words)
    text = text.replace(running.worker_path(), "WORKER").replace(facts.run_id(), "RUN")
    text = re.sub(r"/run/bringup/(\w+)-[0-9a-f]{12}\.py", r"\1.py", text)
    text = re.sub(r"--(limit-s|job) \S+ ", "", text)
    return re.sub(r"--content-b64 \S+", "...", text)


def answer(*changes: Callable[[Answer], object]) -> Answer:
    """Return the answer of a converged host, its launcher the one that is shipped, after some changes."""
    told = host_case.converged()
    told["files"]["/opt/bringup/bin/run"]["sha256"] = shipped_launcher()
    for change in changes:
        change(told)
    return told


def shipped_launcher() -> str:
    """Return the hash of the launcher."""
    return hashlib.sha256((paths.files() / "run").read_bytes()).hexdigest()


def changed(document: Answer, *changes: Callable[[Answer], object]) -> Answer:
    """Return a copy of a document after some changes."""
    told = copy.deepcopy(document)
    for change in changes:
        change(told)
    return told
