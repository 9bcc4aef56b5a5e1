# ruff: noqa: E501 (a row of a table stays one line)
"""What keeps a set off the lock."""

from __future__ import annotations

import pytest
from small_index import STACK

from bringup.locking.checks import Contents, check_contents, check_verdicts, check_versions, cuda_labels
from bringup.stack import LockedFile, LockedPlatform, LockedStep, parse_stack

WANTED = parse_stack(STACK, source="demo.toml")


def platform(*pins: str) -> LockedPlatform:
    """Return a platform of one step that holds ``name==version`` pins."""
    files = []
    for pin in pins:
        name, version = pin.split("==")
        files.append(LockedFile(distribution=name, version=version, file=f"{name}.whl", size_bytes=1, sha256="0" * 64))
    return LockedPlatform(steps=(LockedStep(name="all", files=tuple(files)),))


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("2.9.1", ()),
        ("2.9.1+cu130", ("cu130",)),
        ("0.6.4+cu130.post1", ("cu130",)),
        ("2.8.3+cu12torch2.8cxx11abiTRUE", ("cu12",)),
        ("1.0+cuda", ()),
        ("1.0+git.cu130", ("cu130",)),
        ("no version", ()),
    ],
)
def test_cuda_labels(version: str, wanted: tuple[str, ...]) -> None:
    assert cuda_labels(version) == wanted


@pytest.mark.parametrize(
    ("pins", "wanted"),
    [
        pytest.param(["flashinfer-python==0.6.4", "flashinfer-jit-cache==0.6.4+cu130"], [], id="one version, one label"),
        pytest.param(["flashinfer-python==0.6.4", "flashinfer-jit-cache==0.6.4"], [], id="no label is allowed"),
        pytest.param(["flashinfer-python==0.6.4"], [], id="a member that is not there"),
        pytest.param(
            ["flashinfer-python==0.6.1", "flashinfer-jit-cache==0.6.10+cu130"],
            [("BU-ENV-301", "the family of step flashinfer has several versions: flashinfer-jit-cache 0.6.10+cu130, flashinfer-python 0.6.1")],
            id="a prefix is no equality",
        ),
        pytest.param(
            ["flashinfer-python==0.6.4", "flashinfer-jit-cache==0.6.4+cu129"],
            [("BU-ENV-302", "flashinfer-jit-cache 0.6.4+cu129 is built for cu129, the stack is cu130")],
            id="another CUDA label",
        ),
        pytest.param(["flash-attn==2.8.3+cu13torch2.9"], [], id="a label of the major alone"),
        pytest.param(
            ["flash-attn==2.8.3+cu12torch2.8"],
            [("BU-ENV-302", "flash-attn 2.8.3+cu12torch2.8 is built for cu12, the stack is cu130")],
            id="another major",
        ),
        pytest.param(
            ["torch==2.9.1+cu128", "nvidia-cuda-runtime-cu12==12.8.90"],
            [("BU-ENV-302", "torch 2.9.1+cu128 is built for cu128, the stack is cu130")],
            id="torch with another label is told once",
        ),
        pytest.param(
            ["torch==2.9.1", "nvidia-cuda-runtime-cu12==12.8.90"],
            [("BU-ENV-303", "torch 2.9.1 is built for CUDA 12.8, the stack says 13.0; it brings nvidia-cuda-runtime-cu12 12.8.90")],
            id="torch without a label, by its runtime",
        ),
        pytest.param(
            ["torch==2.13.0+cpu"],
            [("BU-ENV-303", "torch 2.13.0+cpu is built for the CPU alone, the stack says 13.0; its label says so")],
            id="torch for the CPU",
        ),
        pytest.param(["torch==2.14.1", "nvidia-cuda-runtime==13.0.96"], [], id="torch of the stack's CUDA"),
        pytest.param(
            ["torch==2.15.0", "nvidia-cuda-runtime==13.2.75"],
            [("BU-ENV-303", "torch 2.15.0 is built for CUDA 13.2, the stack says 13.0; it brings nvidia-cuda-runtime 13.2.75")],
            id="another minor of the same major",
        ),
    ],
)  # fmt: skip
def test_versions(pins: list[str], wanted: list[tuple[str, str]]) -> None:
    found = check_versions(WANTED, platform(*pins))
    assert [(finding.code, finding.cause) for finding in found] == wanted
    assert all(finding.is_refusal and finding.remedy for finding in found)


EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

# Paths as the wheels' own RECORD files have them.
SGL_KERNEL = Contents({"sgl_kernel/__init__.py": "1" * 64, "sgl_kernel/sm90/common_ops.abi3.so": "1" * 64})
SGLANG_KERNEL = Contents({"sgl_kernel/__init__.py": "2" * 64, "sgl_kernel/sm90/common_ops.abi3.so": "2" * 64})
NCCL12 = Contents({"nvidia/__init__.py": EMPTY, "nvidia/nccl/lib/libnccl.so.2": "1" * 64})
NCCL13 = Contents({"nvidia/__init__.py": EMPTY, "nvidia/nccl/lib/libnccl.so.2": "2" * 64})
CUDNN13 = Contents({"nvidia/__init__.py": EMPTY, "nvidia/cudnn/lib/libcudnn.so.9": "2" * 64})


@pytest.mark.parametrize(
    ("contents", "wanted"),
    [
        pytest.param({"nvidia-nccl-cu13": NCCL13, "nvidia-cudnn-cu13": CUDNN13}, [], id="an empty file is shared"),
        pytest.param(
            {"sgl-kernel": SGL_KERNEL, "sglang-kernel": SGLANG_KERNEL},
            [("BU-ENV-304", "sgl-kernel and sglang-kernel are both the import package sgl_kernel")],
            id="two distributions of one import package",
        ),
        pytest.param(
            {"nvidia-nccl-cu13": NCCL13, "nvidia-nccl-cu12": NCCL12},
            [("BU-ENV-305", "nvidia-nccl-cu12 and nvidia-nccl-cu13 write the same 1 files, among them nvidia/nccl/lib/libnccl.so.2")],
            id="twins for two CUDA majors",
        ),
        pytest.param(
            {"torch": Contents({}, "12.8")},
            [("BU-ENV-303", "torch is built for CUDA 12.8, the stack says 13.0; its version file says so")],
            id="torch says another CUDA itself",
        ),
        pytest.param({"torch": Contents({}, "13.0")}, [], id="torch says the stack's CUDA"),
        pytest.param({"torch": Contents({}, None)}, [], id="nothing is known of torch"),
    ],
)  # fmt: skip
def test_contents(contents: dict[str, Contents], wanted: list[tuple[str, str]]) -> None:
    found = check_contents(WANTED, contents)
    assert [(finding.code, finding.cause) for finding in found] == wanted


def test_wheel_that_the_guard_calls_broken() -> None:
    verdicts = {"sgl_kernel-0.3.21.whl": "broken-symbol", "torch.whl": "ok"}
    (finding,) = check_verdicts(WANTED, verdicts, ["sgl_kernel-0.3.21.whl"])
    assert (finding.code, finding.cause) == (
        "BU-ENV-306",
        "sgl_kernel-0.3.21.whl would not load beside the locked torch: broken-symbol",
    )
    assert check_verdicts(WANTED, verdicts, []) == ()
