"""The newest set that fits."""

from __future__ import annotations

import pytest
from small_index import STACK, X86, Site

from bringup.locking.proposal import Proposal, propose
from bringup.locking.resolve import ResolvedPlatform
from bringup.locking.wheels import Judgement
from bringup.package_index import DefaultIndex, Source, Sources
from bringup.stack import Stack, parse_stack

PLATFORM = "cp311-x86_64"
# Without the last step, whose pins would hold everything where it is.
TEXT = STACK[: STACK.index('[[python.step]]\nname = "sglang"')]


def run(site: Site, judge: object = None, text: str = TEXT) -> Proposal:
    sources = Sources(
        {name: Source(site.index(name)) for name in ("pytorch", "sglang", "flashinfer")},
        DefaultIndex(Source(site.index("default"))),
    )
    return propose(parse_stack(text, source="demo.toml"), PLATFORM, sources, judge=judge)  # type: ignore[arg-type]


def test_newest_set_is_the_stack_itself(indexes: Site) -> None:
    found = run(indexes)
    assert found.stack is not None
    assert (found.changes, found.left_out) == ({}, {})


def test_what_can_move_moves(indexes: Site) -> None:
    indexes.add("sglang", "sgl-kernel", "0.3.22+cu130", tag=f"cp310-abi3-{X86}")
    indexes.add("default", "flashinfer-python", "0.6.5", "torch")
    indexes.add("flashinfer", "flashinfer-jit-cache", "0.6.5+cu130", tag=f"cp39-abi3-{X86}")
    found = run(indexes)
    assert found.stack is not None
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
    assert found.stack is not None
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
    assert found.stack is not None
    assert found.changes == {"sgl-kernel": ("0.3.21+cu130", "0.3.22+cu130")}
    assert list(found.left_out) == ["sgl-kernel!=0.3.23+cu130"]


def add_torches(site: Site, *versions: str) -> None:
    for version in versions:
        site.add("pytorch", "torch", version, "demo-runtime==13.0.96", "demo-jinja>=2", tag=f"cp311-cp311-{X86}")


def only(fits: dict[str, str]) -> object:
    """Return a guard for which each sgl-kernel (public version) loads beside one minor version of torch alone."""

    def judge(stack: Stack, resolved: ResolvedPlatform) -> Judgement:
        del stack
        files = {file.locked.distribution: file.locked for file in resolved.files}
        kernel, torch = files["sgl-kernel"], files["torch"].version
        if torch.startswith(fits.get(kernel.version.split("+")[0], "none")):
            return Judgement(verdicts={kernel.file: "ok"})
        return Judgement(verdicts={kernel.file: "broken-symbol: no a"}, broken=frozenset({kernel.file}))

    return judge


KERNEL_22 = "sgl_kernel-0.3.22+cu130-cp310-abi3-manylinux_2_28_x86_64.whl"
KERNEL_21 = "sgl_kernel-0.3.21+cu130-cp310-abi3-manylinux_2_28_x86_64.whl"
REFUSED = "{} would not load beside the locked torch: broken-symbol: no a"


@pytest.mark.parametrize(
    ("fits", "changes", "tried"),
    [
        pytest.param(
            {"0.3.21": "2.9", "0.3.22": "2.11"},
            {"torch": ("2.9.1+cu130", "2.11.0+cu130"), "sgl-kernel": ("0.3.21+cu130", "0.3.22+cu130")},
            [],
            id="the newest of both",
        ),
        pytest.param(
            {"0.3.21": "2.11", "0.3.22": "2.9"},
            {"torch": ("2.9.1+cu130", "2.11.0+cu130")},
            [],
            id="the newest torch counts more than the newest wheel",
        ),
        pytest.param(
            {"0.3.21": "2.9", "0.3.22": "2.10"},
            {"torch": ("2.9.1+cu130", "2.10.1+cu130"), "sgl-kernel": ("0.3.21+cu130", "0.3.22+cu130")},
            ["2.11.0+cu130"],
            id="the newest torch that a wheel fits",
        ),
        pytest.param(
            {"0.3.21": "2.9", "0.3.22": "2.12"},
            {},
            ["2.11.0+cu130", "2.10.1+cu130"],
            id="no newer torch; each minor version is tried once",
        ),
    ],
)
def test_torch_is_searched_too(
    indexes: Site, fits: dict[str, str], changes: dict[str, tuple[str, str]], tried: list[str]
) -> None:
    add_torches(indexes, "2.10.0+cu130", "2.10.1+cu130", "2.11.0+cu130")
    indexes.add("sglang", "sgl-kernel", "0.3.22+cu130", tag=f"cp310-abi3-{X86}")
    found = run(indexes, only(fits))
    assert found.stack is not None
    assert found.changes == changes
    assert dict(found.tried) == dict.fromkeys(tried, REFUSED.format(KERNEL_21))


def test_a_stack_that_does_not_fit_gets_an_older_torch(indexes: Site) -> None:
    add_torches(indexes, "2.10.0+cu130")
    text = TEXT.replace("torch==2.9.1+cu130", "torch==2.10.0+cu130")
    found = run(indexes, only({"0.3.21": "2.9"}), text)
    assert found.changes == {"torch": ("2.10.0+cu130", "2.9.1+cu130")}
    assert found.left_out == {"torch<2.10": REFUSED.format(KERNEL_21)}


def test_what_is_tried_is_told(indexes: Site) -> None:
    add_torches(indexes, "2.10.0+cu130")
    indexes.add("sglang", "sgl-kernel", "0.3.22+cu130", tag=f"cp310-abi3-{X86}")
    said: list[str] = []
    sources = Sources(
        {name: Source(indexes.index(name)) for name in ("pytorch", "sglang", "flashinfer")},
        DefaultIndex(Source(indexes.index("default"))),
    )
    stack = parse_stack(TEXT, source="demo.toml")
    propose(stack, PLATFORM, sources, judge=only({"0.3.21": "2.9"}), say=said.append)  # type: ignore[arg-type]
    assert said == [
        f"sgl-kernel!=0.3.22+cu130: {REFUSED.format(KERNEL_22)}",
        f"sgl-kernel!=0.3.21+cu130: {REFUSED.format(KERNEL_21)}",
        f"torch 2.10.0+cu130 is given up: {REFUSED.format(KERNEL_21)}",
        f"sgl-kernel!=0.3.22+cu130: {REFUSED.format(KERNEL_22)}",
    ]


def test_nothing_fits(indexes: Site) -> None:
    add_torches(indexes, "2.10.0+cu130")
    found = run(indexes, only({}))
    assert (found.stack, found.changes) == (None, {})
    assert list(found.tried) == ["2.10.0+cu130", "2.9.1+cu130"]


def test_builds_of_another_toolkit_are_left_out_a_minor_version_at_a_time(indexes: Site) -> None:
    text = TEXT.replace("torch==2.9.1+cu130", "torch==2.9.1").replace('index = "pytorch"', 'index = "default"')
    for version in ("2.11.0", "2.11.1"):
        tag = f"cp311-cp311-{X86}"
        indexes.add("default", "torch", version, "nvidia-cuda-runtime==13.2.75", tag=tag)
    indexes.add("default", "nvidia-cuda-runtime", "13.2.75")
    indexes.add("default", "torch", "2.12.0+cpu", tag=f"cp311-cp311-{X86}")
    found = run(indexes, text=text)
    assert (found.changes, list(found.left_out)) == ({}, ["torch!=2.12.0+cpu", "torch!=2.11.*"])
