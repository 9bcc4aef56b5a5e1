"""Shards on a real scheduler with real workers and certificates: what comes back, and what a lost worker leaves."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import dask
import psutil
import pytest

from bringup import engine, paths
from bringup.dask_executor import DaskExecutor, check_address, parcel, unpacked
from bringup.errors import BringupError, InputError
from bringup.report import events
from tests.dask_cluster import Cluster, certificates, started

pytestmark = [
    # distributed leaves sockets and pipes to the garbage collector when a cluster is taken away from it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.timeout(240),
]


@pytest.mark.parametrize(
    "address", ["tls://dask.example:8786", "tcp://127.0.0.1:8786", "tcp://[::1]:8786", "tcp://localhost:8786"]
)
def test_a_scheduler_that_is_safe_is_taken(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://dask.example:8786", "whoever reaches an open scheduler runs commands on every host"),
        ("tcp://10.0.0.1:8786", "whoever reaches an open scheduler runs commands on every host"),
        ("tcp://0.0.0.0:8786", "whoever reaches an open scheduler runs commands on every host"),
        ("dask.example:8786", "is no scheduler"),
        ("tls://dask.example", "is no scheduler"),
        ("ucx://127.0.0.1:8786", "is no scheduler"),
    ],
)
def test_a_scheduler_that_others_could_use_is_refused(address: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_address(address)


PATCH = """
[[python.patch]]
distribution = "one"
version = "1"
diff = "%s"
[python.patch.files."one.py"]
before = "%s"
after = "%s"
"""


def site(here: Path, diff: str) -> dict[str, object]:
    """Write an inventory, a stack with a patch beside it and a directory of locks, and return a shard over them."""
    for directory in ("group_data", "stacks", "locks"):
        (here / directory).mkdir(parents=True)
    (here / "fleet.py").write_text("fleet = ['gpu-1']")
    (here / "group_data" / "all.py").write_text("bringup_stack = 'lab'")
    (here / "locks" / "next.lock.toml").write_text("schema = 1")
    (here / "stacks" / "one.diff").write_text("--- a")
    patch = PATCH % (diff, "0" * 64, "1" * 64)
    (here / "next.toml").write_text((paths.stacks() / "lab.toml").read_text() + patch)
    overrides = {"stack": str(here / "next.toml"), "lock": str(here / "locks"), "who": "me"}
    return {"inventory": str(here / "fleet.py"), "overrides": overrides}


def test_an_inventory_travels_with_what_stands_beside_it_and_what_is_named(tmp_path: Path) -> None:
    shard, there = site(tmp_path / "here", "stacks/one.diff"), tmp_path / "there"
    there.mkdir()
    found = unpacked(json.loads(json.dumps({**shard, "inventory": parcel(shard)})), there)
    assert Path(found["inventory"]).read_text() == "fleet = ['gpu-1']"
    assert (there / "group_data" / "all.py").read_text() == "bringup_stack = 'lab'"
    overrides = found["overrides"]
    assert overrides == {"stack": str(there / "named/next.toml"), "lock": str(there / "named/locks"), "who": "me"}
    assert (there / "named/stacks/one.diff").read_text() == "--- a"
    assert (there / "named/locks/next.lock.toml").read_text() == "schema = 1"


@pytest.mark.parametrize("diff", ["../one.diff", "/srv/one.diff"])
def test_a_patch_that_is_not_beside_its_stack_is_refused(tmp_path: Path, diff: str) -> None:
    with pytest.raises(InputError, match=r"next\.toml: the patch .*one\.diff cannot travel"):
        parcel(site(tmp_path / "here", diff))


# ---------------------------------------------------------------- a cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with started(tmp_path, {"BRINGUP_STATE": str(tmp_path / "worker")}) as made:
        yield made


class SilentHost:
    """A host that takes connections and says nothing, until it is told to hang up on everybody."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.connections = 0
        self.hangs_up = False
        self._held: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            if self.hangs_up:
                connection.close()
            else:
                self._held.append(connection)

    def close(self) -> None:
        for connection in (*self._held, self._socket):
            connection.close()


def fleet(directory: Path, *ports: int) -> str:
    file = directory / "fleet.py"
    data = {"ssh_hostname": "127.0.0.1", "bringup_stack": "sglang-cu130", "ssh_strict_host_key_checking": "no"}
    file.write_text(f"fleet = [(f'gpu-{{at}}', {{**{data!r}, 'ssh_port': p}}) for at, p in enumerate({ports!r}, 1)]\n")
    return str(file)


def test_shards_run_on_the_workers_and_their_events_come_back(cluster: Cluster, tmp_path: Path) -> None:
    heard: list[events.Event] = []
    job = engine.Job("drift", fleet(tmp_path, 1, 1, 1), workers=2)
    results = engine.run(job, heard.append, executor=cluster.executor())
    assert {name: host.status for name, host in results.hosts.items()} == dict.fromkeys(
        ("gpu-1", "gpu-2", "gpu-3"), "unknown"
    )
    assert sorted(event.host for event in heard if isinstance(event, events.HostDone)) == ["gpu-1", "gpu-2", "gpu-3"]


def test_what_cannot_be_begun_is_told(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('not today')")
    with pytest.raises(InputError, match="not today"):
        engine.run(engine.Job("drift", str(tmp_path / "broken.py")), lambda _: None, executor=cluster.executor())


def test_without_certificates_it_is_said_where_they_are_named() -> None:
    with pytest.raises(BringupError) as caught:
        DaskExecutor("tls://127.0.0.1:1")
    assert caught.value.hint is not None
    assert "distributed.comm.tls" in caught.value.hint


def test_certificates_of_another_authority_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    with (
        dask.config.set(certificates(tmp_path, "stranger")),
        pytest.raises(BringupError, match=r"the scheduler at tls://127\.0\.0\.1:"),
    ):
        DaskExecutor(cluster.address)


def test_the_shard_of_a_lost_worker_is_finished_by_another_and_no_host_is_told_of_twice(
    cluster: Cluster, tmp_path: Path
) -> None:
    silent = SilentHost()
    heard: list[events.Event] = []

    def kill_the_worker_that_connects() -> None:
        while not silent.connections:
            time.sleep(0.05)
        # What is killed is the worker with the shard's process below it.
        (at_work,) = cluster.at_work()
        silent.hangs_up = True
        shards.extend(psutil.Process(at_work.pid).children())
        at_work.send_signal(signal.SIGKILL)

    shards: list[psutil.Process] = []
    killer = threading.Thread(target=kill_the_worker_that_connects, daemon=True)
    killer.start()
    try:
        job = engine.Job("drift", fleet(tmp_path, silent.port, 1))
        results = engine.run(job, heard.append, executor=cluster.executor())
    finally:
        silent.close()
    killer.join(timeout=5)
    assert silent.connections >= 2
    assert {name: host.status for name, host in results.hosts.items()} == {"gpu-1": "unknown", "gpu-2": "unknown"}
    assert sorted(event.host for event in heard if isinstance(event, events.HostDone)) == ["gpu-1", "gpu-2"]
    assert [event for event in heard if isinstance(event, events.WorkerLost)] == []
    # A killed worker takes its shard along, so that nobody works on after it.
    assert [each for each in shards if each.is_running()] == []


def test_a_run_that_is_stopped_ends_its_shard_on_the_worker(cluster: Cluster, tmp_path: Path) -> None:
    silent = SilentHost()
    executor = cluster.executor()
    try:
        executor.start(0, engine.Job("drift", fleet(tmp_path, silent.port)).shard(0, 1), {})
        deadline = time.monotonic() + 60
        while not silent.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        shards = [child for each in cluster.workers for child in psutil.Process(each.pid).children()]
        assert len(shards) == 1
        executor.stop()
        while shards[0].is_running() and shards[0].status() != "zombie" and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not shards[0].is_running() or shards[0].status() == "zombie"
    finally:
        silent.close()
