"""The main job on lab hosts: bare to verified, and nothing to do afterwards."""

from __future__ import annotations

import subprocess
import time

import pytest

from tests.e2e.conftest import lock_stacks
from tests.e2e.rig import Rig, argv, must

pytestmark = pytest.mark.lab

STEPS = ["preflight", "driver", "cuda", "linker", "environment", "verify", "switch"]
HOSTS = ("gpu-01", "gpu-02")
ONLY = [word for host in HOSTS for word in ("--limit", host)]


def test_bare_hosts_become_verified_in_one_command_and_one_reboot_each(rig: Rig) -> None:
    for host in HOSTS:
        rig.lab.reset(host)
    lock_stacks(rig.lab)
    boots = {host: rig.lab.host(host).boots() for host in HOSTS}
    run = must(rig.command("apply", *ONLY))
    for host in HOSTS:
        result = run.host(host)
        assert result.status == "ok"
        assert [step.name for step in result.steps] == STEPS
        assert result.verification is not None
        assert result.verification.state == "verified"
        assert set(result.simulated) == {"driver", "gpu", "wheels"}
        assert [backend.state for backend in result.verification.backends] == ["not_run"]
        assert rig.lab.host(host).boots() == boots[host] + 1
    smi = rig.shell("gpu-01", "nvidia-smi --query-gpu=driver_version --format=csv,noheader | uniq").strip()
    assert smi == "580.95.05"
    kinds = [event["event"] for event in run.events]
    assert kinds[0] == "run_started"
    assert kinds[-1] == "run_done"
    assert kinds.count("host_done") == 2


def test_a_second_apply_changes_nothing_and_costs_one_command_a_host(verified: Rig) -> None:
    before = {host: verified.sessions(host) for host in HOSTS}
    started = time.monotonic()
    run = must(verified.command("apply", *ONLY))
    seconds = time.monotonic() - started
    assert run.results.summary.changes == 0
    assert run.results.summary.ok == 2
    assert {host: verified.sessions(host) - before[host] for host in HOSTS} == {"gpu-01": 1, "gpu-02": 1}
    print(f"second apply: {seconds:.1f} s")


def test_lab_up_on_a_running_lab_opens_no_session(verified: Rig) -> None:
    before = {host: verified.sessions(host) for host in HOSTS}
    done = subprocess.run(
        argv(["lab", "up", "--hosts", "2"]), env=verified.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {host: verified.sessions(host) for host in HOSTS} == before


def test_plan_and_drift_of_a_converged_host_are_empty(verified: Rig) -> None:
    for command in ("plan", "drift"):
        run = must(verified.command(command, *ONLY))
        assert {host: run.differences(host) for host in HOSTS} == {"gpu-01": [], "gpu-02": []}


def test_without_its_records_a_host_is_converged_and_only_not_verified(verified: Rig) -> None:
    verified.shell("gpu-02", "rm -rf /var/lib/bringup")
    run = must(verified.drift("gpu-02"), 1)
    assert run.differences("gpu-02") == ["verification"]
    again = must(verified.apply("gpu-02"))
    assert again.results.summary.changes == 0
    assert must(verified.drift("gpu-02")).differences("gpu-02") == []


def test_the_environment_imports_and_the_launcher_sets_its_variables(verified: Rig) -> None:
    script = (
        "/opt/bringup/bin/run python -c "
        "'import os, sys, torch, sgl_kernel, flashinfer\n"
        'print(torch.__version__, os.environ["CUDA_HOME"], sys.prefix)\''
    )
    version, cuda_home, prefix = verified.shell("gpu-01", script).split()
    assert version == "2.9.1+cu130"
    assert cuda_home == "/usr/local/cuda-13.0"
    assert prefix.startswith("/opt/bringup/envs/")


def test_flipping_the_cuda_link_leaves_the_wanted_nvrtc_found(verified: Rig) -> None:
    find = "ldconfig -p | awk '$1 == \"libnvrtc.so.13\" {print $NF; exit}'"
    before = verified.shell("gpu-01", find)
    assert before.startswith("/usr/local/cuda-13.0/")
    try:
        verified.shell("gpu-01", "update-alternatives --set cuda /usr/local/cuda-12.8; ldconfig")
        assert verified.shell("gpu-01", find) == before
    finally:
        must(verified.apply("gpu-01"))


@pytest.mark.parametrize("command", ["apply", "verify"])
def test_gpus_in_use_block_what_needs_them_and_nothing_else(verified: Rig, command: str) -> None:
    holder = "systemd-run --unit=job --collect sh -c 'exec 3</dev/nvidia0; sleep 600'"
    verified.shell("gpu-01", f"test -e /dev/nvidia0 || touch /dev/nvidia0; {holder}; sleep 0.5")
    try:
        run = verified.command(command, "--limit", "gpu-01")
        if command == "apply":
            assert must(run).results.summary.changes == 0
        else:
            assert must(run, 1).host("gpu-01").status == "refused"
            assert run.codes("gpu-01") == ["BU-DRV-101"]
    finally:
        verified.shell("gpu-01", "systemctl stop job")


def test_across_hosts_every_host_is_proved_first_and_what_cannot_be_measured_says_why(verified: Rig) -> None:
    run = must(verified.command("verify", "--across", *ONLY))
    assert {host: run.host(host).verification.state for host in HOSTS} == dict.fromkeys(HOSTS, "verified")  # type: ignore[union-attr]
    across = run.results.across
    assert across is not None
    assert (across.hosts, across.state, across.ranks, across.backends) == (HOSTS, "not_run", 0, ())
    assert across.reason is not None
    assert "torch" in across.reason
    alone = verified.command("verify", "--across", "--limit", "gpu-01")
    assert (alone.status, "only gpu-01 is chosen" in alone.err) == (2, True)
    left = verified.shell("gpu-02", "pgrep -af '[t]orch.distributed|[a]llreduce' || echo nothing").strip()
    assert left == "nothing"


LIVES = """
import pathlib, time, torch
print(torch.__file__, flush=True)
for name in ("flashinfer", "sgl_kernel"):
    while not pathlib.Path("/run/import-" + name).exists():
        time.sleep(0.05)
    print(__import__(name).__file__, flush=True)
time.sleep(600)
"""


def test_a_process_outlives_switch_and_rollback_and_imports_from_its_own_environment(verified: Rig) -> None:
    host, serving = "gpu-01", "readlink /opt/bringup/current"
    sglang = ["--stack", "sglang-0.5.9-cu130"]
    said = "cd /run; for i in $(seq 99); do [ $(wc -l <lives.out) -ge %d ] && break; sleep .1; done; tail -n1 lives.out"
    old = verified.shell(host, serving).strip()
    verified.shell(
        host,
        f"rm -f /run/import-*; cat > /run/lives.py <<'END'\n{LIVES}END\n"
        "systemd-run --quiet --unit=lives --collect --property=StandardOutput=truncate:/run/lives.out "
        "/opt/bringup/bin/run python /run/lives.py",
    )
    try:
        assert verified.shell(host, said % 1).startswith(f"{old}/lib/")
        result = must(verified.apply(host, *sglang)).host(host)
        assert result.verification is not None
        assert result.verification.state == "verified"
        new = verified.shell(host, serving).strip()
        assert new != old
        patched = f"sha256sum {new}/lib/python3*/site-packages/flashinfer/jit/env.py"
        assert verified.shell(host, patched).startswith("fc053453fdb040f2")
        assert verified.shell(host, f"touch /run/import-flashinfer; {said % 2}").startswith(f"{old}/lib/")
        must(verified.command("rollback", "--limit", host))
        assert verified.shell(host, serving).strip() == old
        assert verified.shell(host, f"touch /run/import-sgl_kernel; {said % 3}").startswith(f"{old}/lib/")
        refused = must(verified.apply(host, *sglang), 1)
        assert refused.codes(host) == ["BU-PRE-015"]
    finally:
        verified.shell(host, "systemctl stop lives")
        must(verified.command("rollback", "--limit", host, "--unpin"))


def test_a_host_whose_records_are_lost_is_taken_back_to_an_environment_that_is_there(verified: Rig) -> None:
    host, serving = "gpu-01", "readlink /opt/bringup/current"
    sglang, forget = ["--stack", "sglang-0.5.9-cu130"], "rm -r /var/lib/bringup"
    old = verified.shell(host, serving).strip()
    try:
        must(verified.apply(host, *sglang))
        left = verified.shell(host, serving).strip()
        verified.shell(host, forget)
        lost = must(verified.command("rollback", "--limit", host, *sglang), 1)
        (refusal,) = (found for found in lost.host(host).findings if found.severity == "error")
        assert (refusal.code, verified.shell(host, serving).strip()) == ("BU-ENV-162", left)
        digest = old.rsplit("/", 1)[-1].rpartition("-")[0]
        assert f"bringup rollback INVENTORY --to {digest}" in refusal.remedy
        back = must(verified.command("rollback", "--limit", host, *sglang, "--to", digest))
        assert back.codes(host, "warning") == ["BU-ENV-163"]
        assert verified.shell(host, serving).strip() == old
        assert must(verified.apply(host, *sglang), 1).codes(host) == ["BU-PRE-015"]

        # The next cutover keeps what it finds serving, so that a rollback after it needs no name.
        verified.shell(host, forget)
        must(verified.apply(host, *sglang))
        must(verified.command("rollback", "--limit", host, *sglang))
        assert verified.shell(host, serving).strip() == old
    finally:
        must(verified.command("rollback", "--limit", host, "--unpin"))
        must(verified.apply(host))
