"""The parts of the lab that need no root: traits, records, the guard's message, commands and their refusals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from ipaddress import ip_address
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bringup.commands import lab as commands
from bringup.errors import BringupError, InputError, LabError
from bringup.lab import base, mirror, process, proxy, record, shape, supervisor
from bringup.lab.command import run
from bringup.lab.guard import Undo
from bringup.lab.lab import Lab, remote_line
from bringup.lab.layout import Layout
from bringup.lab.shape import Trait
from bringup.lab.source import Source


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        pytest.param(["id"], "id", id="one word"),
        pytest.param(["umask; id"], "umask; id", id="one word is a line for the shell"),
        pytest.param(["echo", "a b", "$HOME"], "echo 'a b' '$HOME'", id="several words are kept apart"),
    ],
)
def test_what_the_remote_shell_gets(argv: list[str], line: str) -> None:
    assert remote_line(argv) == line


@pytest.mark.parametrize(
    ("trait", "files"),
    [
        pytest.param(
            Trait.UMASK_077,
            {
                "etc/pam.d/common-session": "session optional pam_umask.so umask=0077\n",
                "etc/pam.d/common-session-noninteractive": "session optional pam_umask.so umask=0077\n",
                "etc/sudoers.d/91-umask": "Defaults umask=0077\nDefaults umask_override\n",
            },
            id="umask",
        ),
        pytest.param(
            Trait.NOEXEC_TMP,
            {"etc/fstab": "tmpfs /tmp tmpfs noexec,nosuid,nodev,mode=1777,size=256m 0 0\n"},
            id="noexec",
        ),
        pytest.param(
            Trait.PROXY_ONLY,
            {
                "etc/environment": "http_proxy=http://10.87.0.1:3128\nhttps_proxy=http://10.87.0.1:3128\n",
                "etc/apt/apt.conf.d/80proxy": 'Acquire::http::Proxy "http://10.87.0.1:3128";\n',
            },
            id="proxy",
        ),
        pytest.param(Trait.OPT_OWN_FS, {}, id="a mount needs no file"),
    ],
)
def test_a_trait_is_a_few_lines_of_configuration(tmp_path: Path, trait: Trait, files: dict[str, str]) -> None:
    shape.lay_in(tmp_path, [trait], controller=ip_address("10.87.0.1"))
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == files


def test_the_guard_understands_what_the_command_told_it() -> None:
    undo = Undo(Path("/srv/a b"), stop=("gpu-01", "gpu-02"), discard=("gpu-02",), network=True)
    assert Undo.parse(undo.as_json()) == undo


def test_a_host_is_booted_in_its_own_network_and_ends_with_its_supervisor(tmp_path: Path) -> None:
    plan = {"name": "gpu-01", "namespace": "bu-0a57000b", "group": "g", "binds": {"/srv/opt": "/opt"}}
    command = supervisor.command(tmp_path, plan)
    assert command[:4] == ["setpriv", "--pdeathsig", "KILL", "systemd-nspawn"]
    assert {
        "--boot",
        f"--directory={tmp_path}/root",
        "--machine=gpu-01",
        "--network-namespace-path=/run/netns/bu-0a57000b",
        "--bind=/srv/opt:/opt",
    } <= set(command)


def test_a_command_that_fails_is_quoted_with_its_last_words() -> None:
    with pytest.raises(LabError, match="cannot try") as caught:
        run(["sh", "-c", "echo one; echo two >&2; exit 3"], what="cannot try", hint="look")
    assert caught.value.why == "sh -c 'echo one; echo two >&2; exit 3' ended with status 3 | two"
    assert caught.value.hint == "look"


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        pytest.param(["bringup-has-no-such-command"], "no command bringup-has-no-such-command", id="missing"),
        pytest.param(["sleep", "60"], "sleep 60: no end after 0.1 s", id="endless"),
    ],
)
def test_a_command_that_cannot_end_well_says_why(argv: list[str], why: str) -> None:
    with pytest.raises(LabError) as caught:
        run(argv, what="cannot try", timeout_s=0.1)
    assert caught.value.why == why


def test_a_command_is_stopped_from_another_thread() -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    started = time.monotonic()
    with pytest.raises(LabError) as caught:
        run(["sleep", "60"], what="cannot try", stop=stop)
    assert time.monotonic() - started < 10
    assert caught.value.why == "sleep 60 ended with status -9"


def test_only_base_images_that_nobody_needs_are_removed(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    roots = [layout.bases / name / "rootfs" for name in ("bookworm-aaaa", "bookworm-bbbb", "trixie-cccc")]
    for root in (*roots, layout.bases / "packages" / "partial"):
        root.mkdir(parents=True)
    base.remove_unused(layout, keep=[roots[1]])
    assert sorted(path.name for path in layout.bases.iterdir()) == ["bookworm-bbbb", "packages", "trixie-cccc"]


def test_an_unfinished_base_image_is_removed_unless_another_process_makes_it(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            own, ticks = process.start_ticks(os.getpid()), process.start_ticks(child.pid)
            assert ticks is not None
            kept = f".building-{child.pid}-{ticks}"
            gone = [f".building-{child.pid}-{ticks + 1}", f".building-{os.getpid()}-{own}", ".building-77"]
            for name in (kept, *gone):
                (layout.bases / name / "rootfs").mkdir(parents=True)
            base.remove_unfinished(layout)
            assert [path.name for path in layout.bases.iterdir()] == [kept]
        finally:
            child.kill()


OWN = Source("http://mirror/debian/", "bookworm", ("main",), "amd64", Path("/k.gpg"), None)


@pytest.mark.parametrize(
    ("codename", "is_own", "line"),
    [
        ("bookworm", True, "deb [signed-by=/k.gpg arch=amd64] http://mirror/debian/ bookworm main\n"),
        ("trixie", False, "deb [signed-by=/k.gpg arch=amd64] http://mirror/debian/ trixie main\n"),
    ],
)
def test_another_release_comes_from_the_same_mirror_under_the_same_key(codename: str, is_own: bool, line: str) -> None:
    found = OWN.of(codename)
    assert (found.is_own, found.apt_source()) == (is_own, line)


def test_each_release_has_a_base_image_of_its_own(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    names = [base.rootfs(layout, OWN.of(codename)).parent.name for codename in ("bookworm", "trixie")]
    assert [name.rpartition("-")[0] for name in names] == ["bookworm", "trixie"]
    assert names[0].rpartition("-")[2] != names[1].rpartition("-")[2]


@pytest.mark.parametrize(
    ("release", "codename"), [("debian12", "bookworm"), ("debian13", "trixie"), ("ubuntu2404", "noble")]
)
def test_a_release_is_named_as_nvidia_names_it(release: str, codename: str) -> None:
    assert mirror.codename_of(release) == codename


def test_a_release_that_the_lab_does_not_know_is_refused() -> None:
    with pytest.raises(InputError, match="no hosts of 'trixie'") as caught:
        mirror.codename_of("trixie")
    assert caught.value.hint == "releases are debian12, debian13, ubuntu2404"


@pytest.mark.parametrize(
    ("texts", "chosen"),
    [
        ([], {}),
        (["debian13"], {"gpu-01": "debian13", "gpu-02": "debian13"}),
        (["gpu-02=debian13"], {"gpu-02": "debian13"}),
        (["debian13", "gpu-01=debian12"], {"gpu-01": "debian12", "gpu-02": "debian13"}),
    ],
    ids=["none", "all", "one", "one unlike the others"],
)
def test_a_release_is_for_all_hosts_or_for_one(texts: list[str], chosen: dict[str, str]) -> None:
    assert commands._parse_releases(texts, 2) == chosen


def test_hosts_cannot_all_be_of_two_releases() -> None:
    with pytest.raises(InputError) as caught:
        commands._parse_releases(["debian12", "debian13"], 2)
    assert caught.value.why == "all hosts are of debian12 already"


def test_a_process_is_known_by_id_and_start() -> None:
    child = subprocess.Popen(["sleep", "60"])
    ticks = process.start_ticks(child.pid)
    assert ticks is not None
    assert process.is_alive(child.pid, ticks)
    assert not process.is_alive(child.pid, ticks + 1), "the same id, started at another time, is another process"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not process.is_alive(child.pid, ticks)


def test_a_process_is_found_by_its_arguments() -> None:
    mark = "bringup test: found by whole arguments"
    waits = "import sys; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", waits, mark], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()  # the kernel shows the arguments only a moment after the program was started
        assert process.with_arguments(mark, "-c") == {child.pid}
        assert process.with_arguments(mark[:-1]) == set()
        assert child.pid in process.mentioning(mark[:-1])
    finally:
        child.communicate()


LAB_JSON = {
    "schema": 1,
    "range": "10.87.0.0/24",
    "bridge": "bub0a570000",
    "state_dir": "STATE",
    "mirror_url": "http://10.87.0.1:8087",
    "apt_url": "http://10.87.0.1:8087/apt/debian12/x86_64/",
    "apt_key_fingerprint": "ABCD",
    "apt_key_file": "STATE/mirror/keys/bringup-lab.gpg",
    "hosts": {
        "gpu-02": {"address": "10.87.0.12", "gpus": "8x NVIDIA H200"},
        "gpu-01": {"address": "10.87.0.11", "gpus": "8x NVIDIA H200"},
    },
    "ssh": {"key": "STATE/ssh/id_ed25519", "known_hosts": "STATE/ssh/known_hosts"},
    "locks_dir": "STATE/locks",
}


def test_the_inventory_names_hosts_and_everything_that_is_the_labs_own(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(json.dumps(LAB_JSON))
    for name in ("default", "flashinfer"):
        (tmp_path / "mirror/wheels" / name).mkdir(parents=True)
    assert record.inventory(tmp_path) == (
        [("gpu-01", {"ssh_hostname": "10.87.0.11"}), ("gpu-02", {"ssh_hostname": "10.87.0.12"})],
        {
            "ssh_user": "root",
            "ssh_key": "STATE/ssh/id_ed25519",
            "ssh_known_hosts_file": "STATE/ssh/known_hosts",
            "bringup_apt_key": "STATE/mirror/keys/bringup-lab.gpg",
            "bringup_apt_key_fingerprint": "ABCD",
            "bringup_apt_url": "http://10.87.0.1:8087/apt/debian12/x86_64/",
            "bringup_indexes": {
                "default": "http://10.87.0.1:8087/wheels/default/simple/",
                "flashinfer": "http://10.87.0.1:8087/wheels/flashinfer/simple/",
            },
            "bringup_lock": "STATE/locks",
        },
    )


def test_a_host_of_another_release_has_its_own_repository_in_the_inventory(tmp_path: Path) -> None:
    other = "http://10.87.0.1:8087/apt/debian13/x86_64/"
    hosts = {
        "gpu-01": {"address": "10.87.0.11", "gpus": "8x NVIDIA H200", "release": "debian12"},
        "gpu-02": {"address": "10.87.0.12", "gpus": "8x NVIDIA H200", "release": "debian13", "apt_url": other},
    }
    (tmp_path / "lab.json").write_text(json.dumps({**LAB_JSON, "hosts": hosts}))
    found, common = record.inventory(tmp_path)
    assert found == [
        ("gpu-01", {"ssh_hostname": "10.87.0.11"}),
        ("gpu-02", {"ssh_hostname": "10.87.0.12", "bringup_apt_url": other}),
    ]
    assert common["bringup_apt_url"] == "http://10.87.0.1:8087/apt/debian12/x86_64/"


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    written = record.LabRecord.model_validate(LAB_JSON)
    written.write(layout.record)
    assert record.LabRecord.read(layout) == written
    assert json.loads(layout.record.read_text()) == LAB_JSON


def test_without_a_lab_there_is_no_inventory(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no lab is up in") as caught:
        record.inventory(tmp_path)
    assert caught.value.hint == "`bringup lab up` makes one"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["ssh", "gpu-01", "--", "id"], "the lab has no host 'gpu-01'", id="ssh without a lab"),
        pytest.param(["reset", "gpu-01"], "the lab has no host 'gpu-01'", id="reset without a lab"),
        pytest.param(["ssh", "gpu-01", "--json"], "--json needs a command", id="json without a command"),
        pytest.param(["up", "--range", "8.8.8.0/24"], "not a private IPv4 range: '8.8.8.0/24'", id="range"),
        pytest.param(["up", "--variant", "gpu-01"], "--variant gpu-01", id="variant without traits"),
        pytest.param(["up", "--variant", "gpu-01=fast"], "--variant gpu-01=fast", id="unknown trait"),
        pytest.param(["up", "--hosts", "500"], "no address for host 500 in 10.87.0.0/24", id="too many hosts"),
        pytest.param(["up", "--gpus", "8x Voodoo"], "no such GPU model: '8x Voodoo'", id="unknown GPU"),
        pytest.param(
            ["up", "--variant", "gpu-07=noexec-tmp"], "a variant is given for gpu-07", id="variant for nobody"
        ),
    ],
)
def test_a_refusal_comes_before_anything_is_touched(tmp_path: Path, arguments: list[str], said: str) -> None:
    environment = {"BRINGUP_LAB_STATE": str(tmp_path / "state"), "BRINGUP_LAB_RANGE": "10.87.0.0/24"}
    done = CliRunner().invoke(commands.app, arguments, env=environment)
    assert isinstance(done.exception, BringupError)
    assert done.exception.what == said
    assert done.exception.exit_code == 2
    assert not (tmp_path / "state").exists()


def test_the_range_of_a_lab_that_exists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "range").write_text("10.99.0.0/24\n")
    assert str(Lab.open(tmp_path).addresses) == "10.99.0.0/24"
    assert str(Lab.open(tmp_path, "10.99.0.0/24").addresses) == "10.99.0.0/24"
    with pytest.raises(LabError, match=r"uses 10\.99\.0\.0/24, not 10\.98\.0\.0/24"):
        Lab.open(tmp_path, "10.98.0.0/24")


def test_status_of_nothing_is_not_up(tmp_path: Path) -> None:
    done = CliRunner().invoke(commands.app, ["status", "--json", "--state-dir", str(tmp_path)], env={})
    document = json.loads(done.stdout)
    assert (document["up"], document["hosts"], done.exit_code) == (False, {}, 1)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + head.split(b"\r\n")[0])
    await writer.drain()
    writer.close()


async def _ask(request: str) -> bytes:
    """Put ``request`` to the proxy, its {port} being that of a server that echoes the first line it gets."""
    far = await asyncio.start_server(_answer, "127.0.0.1", 0)
    near = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    async with far, near:
        port = far.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", near.sockets[0].getsockname()[1])
        writer.write(request.replace("{port}", str(port)).encode())
        answer = await asyncio.wait_for(reader.read(), timeout=10)
        writer.close()
        await writer.wait_closed()
    return answer


@pytest.mark.parametrize(
    ("request_text", "first", "last"),
    [
        pytest.param(
            "GET http://127.0.0.1:{port}/a?b=c HTTP/1.1\r\nHost: x\r\nProxy-Connection: keep-alive\r\n\r\n",
            b"HTTP/1.1 200 OK",
            b"GET /a?b=c HTTP/1.1",
            id="a request by its whole address",
        ),
        pytest.param(
            "CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\nGET /inner HTTP/1.1\r\n\r\n",
            b"HTTP/1.1 200 Connection established",
            b"GET /inner HTTP/1.1",
            id="a tunnel",
        ),
        pytest.param("GET /a HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request", b"", id="an address without a host"),
    ],
)
def test_the_proxy_forwards(request_text: str, first: bytes, last: bytes) -> None:
    lines = asyncio.run(_ask(request_text)).split(b"\r\n")
    assert (lines[0], lines[-1]) == (first, last)


def test_the_proxy_says_when_it_reaches_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    answer = asyncio.run(_ask(f"GET http://127.0.0.1:{port}/ HTTP/1.1\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")


def test_two_traits_at_once_are_both_understood() -> None:
    parsed = commands._parse_variant("gpu-02=umask-077,noexec-tmp")
    assert parsed == ("gpu-02", (Trait.UMASK_077, Trait.NOEXEC_TMP))
    with pytest.raises(InputError):
        commands._parse_variant("=umask-077")
