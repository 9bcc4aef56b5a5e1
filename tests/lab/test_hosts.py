"""Rehearsal hosts behave like servers, and the lab comes, breaks and goes without a trace."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from bringup.errors import LabError
from bringup.lab import mount, network, process
from bringup.lab.lab import Lab
from bringup.lab.shape import Trait

pytestmark = pytest.mark.lab

BRINGUP = str(Path(sys.executable).with_name("bringup"))


def left_behind(lab: Lab) -> list[str]:
    """Return everything of a lab that the machine still has, whoever recorded it."""
    root = str(lab.layout.state_dir)
    found = [f"mount {point}" for point in mount.below(lab.layout.state_dir)]
    found += [f"process {pid}" for pid in process.mentioning(root) if process.start_ticks(pid) is not None]
    found += [f"namespace {path.name}" for path in network.NAMESPACES.glob(f"bu-{lab.addresses.tag[:6]}*")]
    found += [f"interface {path.name}" for path in Path("/sys/class/net").glob(f"bu?{lab.addresses.tag[:6]}*")]
    loops = subprocess.run(["losetup", "--all"], capture_output=True, text=True, check=True).stdout
    found += [f"loop device {line}" for line in loops.splitlines() if root in line]
    groups = f"bringup-lab-{lab.addresses.tag}-*"
    # Groups go away while they are looked at, which os.walk takes as it comes.
    below = (Path(path) for path, _, _ in os.walk("/sys/fs/cgroup"))
    found += [f"control group {path}" for path in below if fnmatchcase(path.name, groups)]
    return found


def environment(lab: Lab) -> dict[str, str]:
    """Return the environment in which the command line means this lab."""
    return os.environ | {"BRINGUP_LAB_STATE": str(lab.layout.state_dir), "BRINGUP_LAB_RANGE": str(lab.addresses)}


def sessions(lab: Lab, host: str) -> int:
    """Return how many sessions sshd opened since the host's boot, read without opening one."""
    journal = lab.inside(host, ["journalctl", "--boot", "--unit=ssh", "--output=cat", "--no-pager"])
    assert journal.returncode == 0, journal.stderr
    return sum("Starting session" in line for line in journal.stdout.splitlines())


def boot_id(lab: Lab, host: str) -> str:
    return lab.run(host, ["cat", "/proc/sys/kernel/random/boot_id"]).stdout.strip()


def wait_for(condition: Callable[[], bool], *, limit_s: float) -> float:
    """Wait until ``condition`` holds and return the seconds that took; fails at the limit."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, "the limit passed"
        time.sleep(0.05)
    return time.monotonic() - started


def test_a_host_is_a_server_with_systemd_and_a_wall_around_it(lab: Lab) -> None:
    script = """
    systemctl is-system-running --wait
    systemctl --failed --no-legend
    cat /proc/1/comm
    hostname
    stat --format=%T --file-system /
    ip route show default
    cloud-init status --wait | tail -1
    for tool in gcc dkms needrestart unattended-upgrade gpg; do command -v $tool >/dev/null || echo no $tool; done
    """
    done = lab.run("gpu-01", [script])
    assert done.stdout.split("\n") == ["running", "systemd", "gpu-01", "overlayfs", "status: done", ""]
    outside = lab.run("gpu-01", ["python3 -c 'import socket; socket.create_connection((\"192.0.2.1\", 80), 5)'"])
    assert "Network is unreachable" in outside.stderr


@pytest.mark.parametrize(
    ("user", "argv", "stdout"),
    [
        pytest.param("root", ["id", "-un"], "root\n", id="root"),
        pytest.param("operator", ["id", "-un"], "operator\n", id="operator"),
        pytest.param("operator", ["sudo", "-n", "id", "-un"], "root\n", id="operator through sudo"),
    ],
)
def test_both_users_get_in(lab: Lab, user: str, argv: list[str], stdout: str) -> None:
    done = lab.run("gpu-01", argv, user=user)
    assert (done.returncode, done.stdout) == (0, stdout)


def test_ssh_ends_with_the_commands_status(lab: Lab) -> None:
    plain = subprocess.run(
        [BRINGUP, "lab", "ssh", "gpu-02", "--", "sh", "-c", "echo 'a  b'; exit 7"],
        env=environment(lab),
        capture_output=True,
        text=True,
    )
    assert (plain.returncode, plain.stdout) == (7, "a  b\n")
    as_json = subprocess.run(
        [BRINGUP, "lab", "ssh", "gpu-02", "--user", "operator", "--json", "--", "id -un; exit 3"],
        env=environment(lab),
        capture_output=True,
        text=True,
    )
    document = json.loads(as_json.stdout)
    assert (as_json.returncode, document["exit_status"], document["stdout"]) == (3, 3, "operator\n")


def test_up_on_a_running_lab_opens_no_session(lab: Lab) -> None:
    before = {host: sessions(lab, host) for host in ("gpu-01", "gpu-02")}
    came = lab.up(2)
    assert (came.made, came.started) == ((), ())
    assert came.seconds < 2
    assert {host: sessions(lab, host) for host in before} == before
    lab.run("gpu-01", ["true"])
    assert sessions(lab, "gpu-01") == before["gpu-01"] + 1, "a session would have been seen"


def test_a_stranger_at_the_address_is_refused(lab: Lab) -> None:
    known = lab.layout.known_hosts.read_text()
    other = lab.layout.host_key("gpu-02").with_name("gpu-02.pub").read_text().split()[1]
    mine = lab.layout.host_key("gpu-01").with_name("gpu-01.pub").read_text().split()[1]
    try:
        lab.layout.known_hosts.write_text(known.replace(mine, other))
        done = lab.run("gpu-01", ["true"])
    finally:
        lab.layout.known_hosts.write_text(known)
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


def test_hard_links_work_below_opt(lab: Lab) -> None:
    script = "cd /opt && mkdir -p t/cache t/envs && echo 1 >t/cache/a && ln t/cache/a t/envs/a && stat -c %h t/envs/a"
    assert lab.run("gpu-01", [script]).stdout == "2\n"


def test_a_host_updates_from_the_labs_own_mirror(lab: Lab) -> None:
    done = lab.run("gpu-01", ["apt-get", "-o", "APT::Update::Error-Mode=any", "update"])
    assert done.returncode == 0, done.stderr
    assert f"http://{lab.addresses.controller}:8087/" in done.stdout


def test_a_reboot_is_one(lab: Lab) -> None:
    host = lab.host("gpu-02")
    before, boots = boot_id(lab, "gpu-02"), host.boots()
    lab.run("gpu-02", ["echo kept >/root/kept; touch /run/gone; systemctl reboot"])
    seconds = wait_for(lambda: host.boots() == boots + 1 and host.state() == "running", limit_s=30)
    host.wait_until_up(time.monotonic() + 30)
    print(f"reboot: running again after {seconds:.1f} s")
    assert boot_id(lab, "gpu-02") != before
    assert lab.run("gpu-02", ["cat /root/kept; ls /run/gone 2>/dev/null"]).stdout == "kept\n"


def test_a_host_that_powers_off_stays_off_until_the_next_up(lab: Lab) -> None:
    lab.run("gpu-02", ["systemctl poweroff"])
    wait_for(lambda: lab.states()["gpu-02"] == "stopped", limit_s=30)
    assert lab.up(2).started == ("gpu-02",)
    assert lab.states() == {"gpu-01": "running", "gpu-02": "running"}


def test_a_pulled_cable_is_silence_and_nothing_else(lab: Lab) -> None:
    lab.pull_network("gpu-02")
    try:
        assert lab.run("gpu-02", ["true"], timeout_s=30).returncode == 255
        assert lab.inside("gpu-02", ["systemctl", "is-active", "ssh"]).stdout == "active\n"
    finally:
        lab.restore_network("gpu-02")
    assert lab.run("gpu-02", ["true"]).returncode == 0


def test_a_frozen_host_takes_connections_and_never_answers(lab: Lab) -> None:
    lab.freeze("gpu-02")
    try:
        assert lab.states()["gpu-02"] == "frozen"
        with pytest.raises(subprocess.TimeoutExpired):
            lab.run("gpu-02", ["true"], timeout_s=2)
    finally:
        lab.thaw("gpu-02")
    assert lab.run("gpu-02", ["true"]).returncode == 0


def test_reset_makes_a_host_bare_and_no_stranger(lab: Lab) -> None:
    lab.run("gpu-02", ["touch /opt/mine /root/mine && systemctl mask ssh.service"])
    lab.reset("gpu-02")
    done = lab.run("gpu-02", ["ls /opt /root; systemctl is-enabled ssh"])
    assert (done.returncode, done.stdout) == (0, "/opt:\n\n/root:\nenabled\n")


def test_a_range_that_another_lab_has_is_refused(lab: Lab) -> None:
    stranger = Lab.open(lab.layout.state_dir.with_name("stranger"), str(lab.addresses))
    with pytest.raises(LabError, match="is already routed") as caught:
        stranger.up(1)
    assert str(lab.layout.state_dir) in (caught.value.why or "")
    assert lab.states()["gpu-01"] == "running"


def test_four_hosts_answer_within_15_seconds_and_leave_nothing(lab: Lab, spare: Lab) -> None:
    del lab  # Only so that the base image is there already.
    came = spare.up(4)
    print(f"four hosts in {came.seconds:.1f} s")
    assert came.made == ("gpu-01", "gpu-02", "gpu-03", "gpu-04")
    assert came.seconds < 15
    assert spare.down() == came.made
    assert left_behind(spare) == []


def test_two_commands_at_once_make_one_lab(lab: Lab, spare: Lab) -> None:
    del lab
    labs = [Lab.open(spare.layout.state_dir, str(spare.addresses)) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        one, two = pool.map(lambda each: each.up(2), labs)
    assert sorted([one.made, two.made]) == [(), ("gpu-01", "gpu-02")]
    assert spare.states() == {"gpu-01": "running", "gpu-02": "running"}


@pytest.mark.parametrize("part", range(4))
def test_an_up_that_is_killed_leaves_nothing(lab: Lab, spare: Lab, part: int) -> None:
    del lab
    # Each part of the start is hit at another instant in every run; the instant is printed.
    instant_s = 0.8 + part + random.random()
    print(f"killed after {instant_s:.2f} s")
    with subprocess.Popen(
        [BRINGUP, "lab", "up", "--hosts", "2", "--variant", "gpu-01=opt-own-fs,proxy-only"],
        env=environment(spare),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as command:
        time.sleep(instant_s)
        was_running = command.poll() is None
        command.send_signal(signal.SIGKILL)
    if was_running and not spare.layout.record.exists():
        wait_for(lambda: left_behind(spare) == [], limit_s=30)
    spare.down()
    assert left_behind(spare) == []
    assert spare.up(1).made == ("gpu-01",), "the next one is not disturbed"


def test_down_cleans_up_after_a_guard_that_was_killed_too(lab: Lab, spare: Lab) -> None:
    del lab
    with subprocess.Popen(
        [BRINGUP, "lab", "up"], env=environment(spare), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as command:
        wait_for(lambda: (spare.layout.host("gpu-01") / "supervisor.json").exists(), limit_s=30)
        for pid in process.with_arguments("bringup.lab.guard"):
            if pid in process.mentioning(str(spare.layout.state_dir)):
                os.kill(pid, signal.SIGKILL)
        command.send_signal(signal.SIGKILL)
    assert left_behind(spare) != []
    spare.down()
    assert left_behind(spare) == []


def test_a_base_image_that_was_interrupted_is_none(spare: Lab) -> None:
    state_dir = spare.layout.state_dir.with_name("interrupted")
    shutil.rmtree(state_dir, ignore_errors=True)
    half = Lab.open(state_dir, str(spare.addresses))
    with subprocess.Popen(
        [BRINGUP, "lab", "up", "--hosts", "1"],
        env=environment(half),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as command:
        wait_for(lambda: any(half.layout.bases.glob(".building-*/rootfs/usr/bin")), limit_s=60)
        command.send_signal(signal.SIGKILL)
    wait_for(lambda: left_behind(half) == [], limit_s=30)
    assert [path.name for path in half.layout.bases.iterdir() if path.name != "packages"] == []
    half.down(purge=True)
    assert not state_dir.exists()


def test_hardened_shapes_hold(lab: Lab, spare: Lab) -> None:
    del lab
    spare.up(1, traits={"gpu-01": tuple(Trait)})
    script = """
    umask
    cp /bin/true /tmp/ && /tmp/true 2>/dev/null || echo noexec
    stat --format=%T --file-system /opt /tmp
    cd /opt && echo 1 >a && ln a b && stat --format='%h %a' b
    """
    assert spare.run("gpu-01", [script]).stdout.split("\n") == ["0077", "noexec", "ext2/ext3", "tmpfs", "2 600", ""]
    assert spare.run("gpu-01", ["umask"], user="operator").stdout == "0077\n"
    assert spare.run("gpu-01", ["sudo -n sh -c umask"], user="operator").stdout == "0077\n"
    # The same address: refused directly, answered through the proxy that the environment names.
    ask = "import sys, urllib.request as u; print(u.build_opener(*{}).open(sys.argv[1], timeout=10).status)"
    release = f"{spare.record().apt_url}InRelease"
    direct = spare.run("gpu-01", ["python3", "-c", ask.format("[u.ProxyHandler({})]"), release])
    assert "PermissionError" in direct.stderr
    through = spare.run("gpu-01", ["python3", "-c", ask.format("[]"), release])
    assert (through.returncode, through.stdout) == (0, "200\n")
    assert spare.run("gpu-01", ["apt-get", "-o", "APT::Update::Error-Mode=any", "update"]).returncode == 0
    spare.reset("gpu-01")
    assert spare.run("gpu-01", ["ls -A /opt; umask"]).stdout == "lost+found\n0077\n"
    spare.down()
    assert left_behind(spare) == []
