"""Sets that cannot work, applied to a host that serves: each is refused by name, and what serves is untouched."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from bringup.lab.lab import Lab
from tests.e2e import variant
from tests.e2e.rig import Rig, Run, must, told

pytestmark = pytest.mark.lab

HOST = "gpu-01"

# A distribution that nothing imports: a set without it is another environment, so that one is really built. Cases
# that shall build theirs leave out different ones.
SPARE = "tabulate"

BUILTINS = "/usr/local/cuda-13.0/targets/x86_64-linux/lib/libnvrtc-builtins.so.13.0"

INVENTORY = """
from bringup.lab.record import inventory
hosts, data = inventory()
indexes = {{**data["bringup_indexes"], **{indexes!r}}}
lab = (hosts, {{**data, "bringup_stack": "lab", "bringup_reboot": "never", "bringup_indexes": indexes}})
"""


@dataclass(frozen=True)
class Attempt:
    """What one case applies: options that choose its stack, and an inventory where the lab's own will not do."""

    options: list[str]
    inventory: Path | None = None


Making = Callable[[Rig], AbstractContextManager[Attempt]]


def of_another_torch(rig: Rig) -> Iterator[Attempt]:
    """Lock the sgl-kernel that was built for torch 2.10 beside torch 2.9.1."""
    yield Attempt(
        variant.write(
            rig.lab,
            rig.state,
            "other-abi",
            text={"sgl-kernel==0.3.21+cu130": "sgl-kernel==0.3.22+cu130"},
            files={"sgl-kernel": [variant.served(rig.lab, "sglang-cu130", "sgl-kernel", "0.3.22+cu130")]},
        )
    )


def torch_dragged_in(rig: Rig) -> Iterator[Attempt]:
    """Lock what a bare ``torch`` of flashinfer gets from the default index: the CUDA 12.8 build."""
    torch = variant.served(rig.lab, "default", "torch", "2.9.1")
    yield Attempt(variant.write(rig.lab, rig.state, "dragged-in", files={"flashinfer": [torch]}))


def torch_of_cu128(rig: Rig) -> Iterator[Attempt]:
    """Lock the CUDA 12.8 build as torch itself; its version carries no label that would tell."""
    torch = variant.served(rig.lab, "default", "torch", "2.9.1")
    yield Attempt(
        variant.write(
            rig.lab,
            rig.state,
            "torch-cu128",
            text={"torch==2.9.1+cu130": "torch==2.9.1"},
            files={"torch": [torch]},
        )
    )


def jit_cache(version: str) -> Callable[[Rig], Iterator[Attempt]]:
    """Return a case that locks another build of flashinfer-jit-cache."""

    def make(rig: Rig) -> Iterator[Attempt]:
        yield Attempt(
            variant.write(
                rig.lab,
                rig.state,
                f"jit-cache-{version}",
                text={"flashinfer-jit-cache==0.6.4+cu130": f"flashinfer-jit-cache=={version}"},
                files={"flashinfer": [variant.served(rig.lab, "flashinfer", "flashinfer-jit-cache", version)]},
            )
        )

    return make


def without_builtins(rig: Rig) -> Iterator[Attempt]:
    """Take the builtins away from libnvrtc: it loads as before, and compiles nothing."""
    options = variant.write(rig.lab, rig.state, "no-builtins", without=[SPARE])
    rig.shell(HOST, f"mv {BUILTINS} /root/")
    try:
        yield Attempt(options)
    finally:
        rig.shell(HOST, f"mv /root/{Path(BUILTINS).name} {BUILTINS}")


def wrong_hash(rig: Rig) -> Iterator[Attempt]:
    """Lock a wheel by the hash of another file, as if somebody had replaced it on the index."""
    wheel = variant.served(rig.lab, "sglang-cu130", "sgl-kernel", "0.3.21+cu130")
    other = wheel.model_copy(update={"sha256": "0" * 64})
    yield Attempt(variant.write(rig.lab, rig.state, "wrong-hash", files={"sgl-kernel": [other]}))


def index_down(rig: Rig) -> Iterator[Attempt]:
    """Let the flashinfer index die in the middle of a wheel, after two steps have been installed from others."""
    with dying_index(rig.lab, "flashinfer") as url:
        yield Attempt(
            variant.write(rig.lab, rig.state, "index-down", without=["idna"]),
            rig.inventory("index-down", INVENTORY.format(indexes={"flashinfer": url})),
        )


def verify_fails(rig: Rig) -> Iterator[Attempt]:
    """Require what this host cannot prove; the environment itself is fine and is built to its end."""
    options = variant.write(rig.lab, rig.state, "unprovable", more='require = ["nccl"]\n', without=["click"])
    yield Attempt(options)


def unit_dies(rig: Rig) -> Iterator[Attempt]:
    """Switch everything, and have a serving unit that does not come up with it."""
    rig.shell(
        HOST,
        "printf '[Service]\\nExecStart=/bin/sh -c \"grep -q SETTING=.new /etc/bringup/service.env && exit 3; "
        "exec sleep 600\"\\n' > /run/systemd/system/server.service; systemctl daemon-reload; systemctl start server",
    )
    try:
        yield Attempt(
            variant.write(
                rig.lab,
                rig.state,
                "unit-dies",
                text={
                    'default = "13.0"': 'default = "12.8"',
                    "[service]": '[service]\nrestart = ["server.service"]',
                    "environment = {": 'environment = { SETTING = "new",',
                },
                without=[SPARE],
            )
        )
        assert rig.shell(HOST, "systemctl is-active server").strip() == "active"
    finally:
        rig.shell(HOST, "systemctl stop server; rm /run/systemd/system/server.service; systemctl daemon-reload")


@dataclass(frozen=True)
class Case:
    """One broken set: the step and the finding that must refuse it, and what its cause and evidence must name."""

    make: Callable[[Rig], Iterator[Attempt]]
    step: str
    code: str
    names: tuple[str, ...]


CASES = {
    "sgl-kernel of another torch ABI": Case(
        of_another_torch,
        "environment",
        "BU-ENV-123",
        ("sgl-kernel 0.3.22+cu130", "torch 2.9.1+cu130", "_ZN3c104cuda29c10_cuda_check_implementation"),
    ),
    "an index that drags in torch cu128": Case(
        torch_dragged_in, "environment", "BU-ENV-117", ("step flashinfer", "torch 2.9.1", "2.9.1+cu130")
    ),
    "torch cu128 without a label": Case(
        torch_of_cu128, "environment", "BU-ENV-127", ("step torch", "torch 2.9.1", "CUDA 12.8", "13.0")
    ),
    "jit-cache of another version": Case(
        jit_cache("0.6.3+cu130"),
        "environment",
        "BU-ENV-121",
        ("flashinfer-jit-cache 0.6.3+cu130", "flashinfer-python 0.6.4"),
    ),
    "jit-cache of another CUDA suffix": Case(
        jit_cache("0.6.4+cu129"), "environment", "BU-ENV-122", ("flashinfer-jit-cache 0.6.4+cu129", "cu130")
    ),
    "wheel with a wrong hash": Case(
        wrong_hash, "environment", "BU-ENV-103", ("sgl-kernel", "0" * 64, "step sgl-kernel")
    ),
    "index down midway": Case(index_down, "environment", "BU-ENV-105", ("step flashinfer", "index flashinfer")),
    "libnvrtc without builtins": Case(
        without_builtins, "verify", "BU-VFY-131", ("toolkit 13.0", "libnvrtc-builtins.so.13.0", "/usr/local/cuda-13.0")
    ),
    "a verify that fails after everything was built": Case(
        verify_fails, "verify", "BU-VFY-153", ("required backend nccl", "look-alike")
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_set_is_refused_by_name_and_leaves_what_serves(verified: Rig, name: str) -> None:
    case = CASES[name]
    before = verified.serving(HOST)
    with contextmanager(case.make)(verified) as attempt:
        run = must(attempted(verified, attempt), 1)
        assert verified.serving(HOST) == before
    assert (run.host(HOST).status, run.codes(HOST)) == ("refused", [case.code]), told(run)
    assert last_step(run) == (case.step, "failed")
    if case.step == "verify":
        assert {step.name: step.status for step in run.host(HOST).steps}["environment"] == "changed"
    (finding,) = [found for found in run.host(HOST).findings if found.severity == "error"]
    said = f"{finding.cause} {json.dumps(finding.evidence)}"
    assert [word for word in case.names if word not in said] == [], said


def test_a_unit_that_does_not_come_up_takes_the_whole_cutover_back(verified: Rig) -> None:
    before = verified.serving(HOST)
    with contextmanager(unit_dies)(verified) as attempt:
        run = must(attempted(verified, attempt), 1)
        assert verified.serving(HOST) == before
    assert run.host(HOST).status == "failed", told(run)
    assert last_step(run) == ("switch", "failed")
    assert "server.service does not run after its restart" in str(run.host(HOST).why)


def test_after_all_that_the_host_is_as_wanted(verified: Rig) -> None:
    assert must(verified.drift(HOST)).differences(HOST) == []
    assert must(verified.apply(HOST)).results.summary.changes == 0


def last_step(run: Run) -> tuple[str, str]:
    done = [event for event in run.events if event["event"] == "step_done"]
    return done[-1]["step"], done[-1]["status"]


def attempted(rig: Rig, attempt: Attempt) -> Run:
    if attempt.inventory is not None:
        return rig.apply(HOST, *attempt.options, inventory=attempt.inventory)
    return rig.apply(HOST, *attempt.options)


@contextmanager
def dying_index(lab: Lab, index: str) -> Iterator[str]:
    """Serve one index of the mirror until half of a wheel is sent; from then on nobody listens."""
    root = lab.layout.mirror / "wheels" / index / "simple"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = root / unquote(self.path).strip("/").removeprefix("simple/")
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file():
                self.send_error(404)
                return
            content = path.read_bytes()
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if path.suffix == ".html" else "application/octet-stream")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if path.suffix == ".whl":
                self.wfile.write(content[: len(content) // 2])
                server.shutdown()
                server.socket.close()
            else:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((str(lab.addresses.controller), 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://{lab.addresses.controller}:{server.server_port}/simple/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
