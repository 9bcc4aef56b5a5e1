"""``bringup verify --across``: which hosts can be measured together, and which file the worker runs for them."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from bringup.commands import show, verify
from bringup.errors import InputError
from bringup.report.results import AcrossResult, BackendResult, Results


def host(name: str, stack: str = "lab", digest: str = "d1", *, is_local: bool = False) -> dict[str, Any]:
    return {"name": name, "stack": {"name": stack, "digest": digest}, "ssh": {"is_local": is_local}}


def test_hosts_keep_their_order_since_they_meet_at_the_first() -> None:
    assert verify.together([host("b"), host("a")]) == ["b", "a"]


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ([host("a")], "--across measures between hosts, and only a is chosen"),
        ([host("a"), host("b", "other", "d2")], "a: lab (d1); b: other (d2)"),
        ([host("a"), host("b", digest="d2")], "a: lab (d1); b: lab (d2)"),
        ([host("a"), host("@local", is_local=True)], "--across cannot take @local"),
    ],
    ids=["one host", "two stacks", "one name, two contents", "this machine"],
)
def test_hosts_that_cannot_be_measured_together(hosts: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(InputError) as caught:
        verify.together(hosts)
    assert says in str(caught.value)


def test_the_file_that_each_command_runs() -> None:
    # In a process of its own: the worker patches the standard library.
    asked = '("verify", False), ("verify", True), ("rollback", False)'
    code = f"from bringup import worker as w; print(*(w.entry_file(c, is_across=a).name for c, a in ({asked})))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["deploy.py", "verify_across.py", "rollback.py"]


def measured(payload_bytes: int) -> BackendResult:
    return BackendResult(
        backend="nccl",
        state="measured",
        payload_bytes=payload_bytes,
        ranks=16,
        latency_us=52.25,
        busbw_gb_per_s=45.678,
        reason="no figure to compare with",
    )


@pytest.mark.parametrize(
    ("across", "expected"),
    [
        (
            AcrossResult(
                hosts=("a", "b"),
                state="measured",
                device="cuda",
                ranks=16,
                network="IB",
                network_devices=("mlx5_0:1/IB",),
                backends=(
                    measured(8192),
                    measured(1 << 30),
                    BackendResult(backend="symm_one_shot", state="missing", reason="it works within one host only"),
                ),
            ),
            [
                "across  measured 2 hosts, 16 ranks over IB (mlx5_0:1/IB)",
                "across  measured nccl  8 KiB, 16 ranks: 52.2 us, 45.7 GB/s busbw (no figure to compare with)",
                "across  measured nccl  1024 MiB, 16 ranks: 52.2 us, 45.7 GB/s busbw (no figure to compare with)",
            ],
        ),
        (
            AcrossResult(hosts=("a", "b"), state="failed", reason="b did not join"),
            ["across  failed   a, b", "                   cause:  b did not join"],
        ),
    ],
    ids=["measured", "failed"],
)
def test_what_is_printed_of_a_run_across_hosts(across: AcrossResult, expected: list[str]) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    show.results(console, Results.of("verify", {}, stack=None, across=across))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[: len(expected)] == expected
