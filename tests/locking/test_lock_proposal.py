"""The newest set that fits."""

from __future__ import annotations

import pytest
from small_index import STACK, X86, Site

from bringup.locking.proposal import Proposal, propose
from bringup.locking.resolve import ResolvedPlatform
from bringup.locking.settings import DefaultIndex, Source, Sources
from bringup.locking.wheels import Judgement
from bringup.stack import Stack, parse_stack

PLATFORM = "cp311-x86_64"
# Without the last step, whose pins would hold everything where it is.
TEXT = STACK[: STACK.index('[[python.step]]\nname = "sglang"')]


def run(site: Site, judge: object = None) -> Proposal | None:
    sources = Sources(
        {name: Source(site.index(name)) for name in ("pytorch", "sglang", "flashinfer")},
        DefaultIndex(Source(site.index("default"))),
    )
    return propose(parse_stack(TEXT, source="demo.toml"), PLATFORM, sources, judge=judge)  # type: ignore[arg-type]


def test_newest_set_is_the_stack_itself(indexes: Site) -> None:
    found = run(indexes)
    assert found is not None
    assert (found.changes, found.left_out) == ({}, {})


def test_what_can_move_moves(indexes: Site) -> None:
    indexes.add("sglang", "sgl-kernel", "0.3.22+cu130", tag=f"cp310-abi3-{X86}")
    indexes.add("default", "flashinfer-python", "0.6.5", "torch")
    indexes.add("flashinfer", "flashinfer-jit-cache", "0.6.5+cu130", tag=f"cp39-abi3-{X86}")
    found = run(indexes)
    assert found is not None
    assert found.changes == {
        "sgl-kernel": ("0.3.21+cu130", "0.3.22+cu130"),
        "flashinfer-python": ("0.6.4", "0.6.5"),
        "flashinfer-jit-cache": ("0.6.4+cu130", "0.6.5+cu130"),
    }
    requirements = [text for step in found.stack.python.steps for text in step.requirements]
    assert requirements == [
        "torch==2.9.1+cu130",
        "sgl-kernel==0.3.22+cu130",
        "flashinfer-python==0.6.5",
        "flashinfer-jit-cache==0.6.5+cu130",
    ]


@pytest.mark.parametrize(
    ("index", "name", "version", "tag", "limit"),
    [
        pytest.param("default", "flashinfer-python", "0.6.5", "py3-none-any", "flashinfer-python<=0.6.4", id="family"),
        pytest.param("pytorch", "torch", "2.10.0+cu132", f"cp311-cp311-{X86}", "torch!=2.10.0+cu132", id="CUDA label"),
    ],
)
def test_what_a_check_speaks_against_is_left_out(
    indexes: Site, index: str, name: str, version: str, tag: str, limit: str
) -> None:
    indexes.add(index, name, version, tag=tag)
    found = run(indexes)
    assert found is not None
    assert found.changes == {}
    assert list(found.left_out) == [limit]


def test_wheel_that_the_guard_calls_broken_is_left_out(indexes: Site) -> None:
    indexes.add("sglang", "sgl-kernel", "0.3.22+cu130", tag=f"cp310-abi3-{X86}")
    indexes.add("sglang", "sgl-kernel", "0.3.23+cu130", tag=f"cp310-abi3-{X86}")

    def judge(stack: Stack, resolved: ResolvedPlatform) -> Judgement:
        del stack
        broken = {file.locked.file for file in resolved.files if "0.3.23" in file.locked.file}
        return Judgement(verdicts=dict.fromkeys(broken, "broken-symbol"), broken=frozenset(broken))

    found = run(indexes, judge)
    assert found is not None
    assert found.changes == {"sgl-kernel": ("0.3.21+cu130", "0.3.22+cu130")}
    assert list(found.left_out) == ["sgl-kernel!=0.3.23+cu130"]


def test_nothing_fits(indexes: Site) -> None:
    def judge(stack: Stack, resolved: ResolvedPlatform) -> Judgement:
        del stack
        broken = {file.locked.file for file in resolved.files if file.locked.distribution == "sgl-kernel"}
        return Judgement(verdicts=dict.fromkeys(broken, "broken-symbol"), broken=frozenset(broken))

    assert run(indexes, judge) is None
