"""The guard's rules on what the builder reports; uv's words are captured from uv 0.13.9."""

from __future__ import annotations

from typing import Any

import pytest

from bringup.finding import Finding
from bringup.findings import guard
from bringup.stack import LockedFile, LockedStep, Step

LOCKED = LockedStep(
    name="torch",
    files=(
        LockedFile(distribution="torch", version="2.9.1+cu130", file="torch.whl", size_bytes=1, sha256="a" * 64),
        LockedFile(distribution="filelock", version="3.20.0", file="f.whl", size_bytes=1, sha256="b" * 64),
    ),
)
GOOD: dict[str, Any] = {
    "action": "install",
    "step": "torch",
    "calls": [{"index": "pytorch-cu130", "status": 0, "output": " + torch==2.9.1+cu130\n"}],
    "added": {"torch": "2.9.1+cu130", "filelock": "3.20.0"},
    "removed": [],
    "changed": {},
    "foreign": [],
    "unlike": {},
    "healed": [],
    "tainted": [],
    "misrecorded": {},
}


def seen(findings: Any) -> list[tuple[str, str, object, object, object]]:
    return [
        (f.code, f.severity, f.evidence.get("wheel"), f.evidence.get("wanted"), f.evidence.get("found"))
        for f in findings
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({}, [], id="as locked"),
        pytest.param(
            {"added": {"torch": "2.9.1+cu128", "filelock": "3.20.0"}},
            [("BU-ENV-113", "error", "torch", "2.9.1+cu130", "2.9.1+cu128")],
            id="another local version",
        ),
        pytest.param(
            {"added": {"torch": "2.9.1+cu130", "filelock": "3.20"}}, [], id="the same version spelled otherwise"
        ),
        pytest.param(
            {"added": {"torch": "2.9.1+cu130"}},
            [("BU-ENV-113", "error", "filelock", "3.20.0", None)],
            id="one missing",
        ),
        pytest.param(
            {"added": {**GOOD["added"], "numpy": "2.3.4"}},
            [("BU-ENV-113", "error", "numpy", None, "2.3.4")],
            id="one too many",
        ),
        pytest.param(
            {"changed": {"triton": {"was": "3.5.1", "is": "3.5.0", "files": []}}},
            [("BU-ENV-112", "error", "triton", "3.5.1", "3.5.0")],
            id="earlier version replaced",
        ),
        pytest.param(
            {"changed": {"a": {"was": "1", "is": "1", "files": [{"path": "x.py", "wanted": "p", "found": "q"}]}}},
            [("BU-ENV-112", "error", "a", {"x.py": "p"}, {"x.py": "q"})],
            id="earlier files overwritten",
        ),
        pytest.param(
            {"removed": ["triton"]}, [("BU-ENV-112", "error", "triton", "installed", None)], id="earlier one removed"
        ),
        pytest.param({"foreign": ["torch"]}, [("BU-ENV-111", "error", None, None, None)], id="somebody else"),
        pytest.param(
            {"unlike": {"torch": [{"path": "x.py", "wanted": "p", "found": None}]}},
            [("BU-ENV-114", "error", "torch", {"x.py": "p"}, {"x.py": None})],
            id="bytes not as recorded",
        ),
        pytest.param(
            {"healed": ["torch"], "tainted": ["abc-1"]},
            [("BU-ENV-115", "warning", None, None, None)],
            id="cache had been edited",
        ),
        pytest.param(
            {"healed": ["torch"], "misrecorded": {"torch": ["x.py"]}},
            [("BU-ENV-116", "info", None, None, None)],
            id="the wheel's own RECORD is wrong",
        ),
    ],
)
def test_installed(change: dict[str, Any], expected: list[object]) -> None:
    assert seen(guard.installed({**GOOD, **change}, LOCKED)) == expected


MISMATCH = """error: Failed to download `torch==2.9.1+cu130`
  cause: Hash mismatch for `torch==2.9.1+cu130`

         Expected:
           sha256:0000

         Computed:
           sha256:b872
"""
ABSENT = """error: No solution found when resolving dependencies
  cause: Because there is no version of torch==2.9.1+cu130 and you require torch==2.9.1+cu130, we can conclude that
"""
UNKNOWN_NAME = """error: No solution found when resolving dependencies
  cause: Because torch was not found in the package registry and you require torch==2.9.1, we can conclude
"""
CLOSED = (
    UNKNOWN_NAME
    + """
hint: An index URL could not be queried due to a lack of valid authentication credentials (401 Unauthorized)
"""
)
DOWN = """error: Request failed after 3 retries in 13.2s
  cause: Failed to fetch: http://mirror/simple/torch/
  cause: HTTP status server error (503 Service Unavailable) for url (http://mirror/simple/torch/)
"""
REFUSED = """error: Request failed after 3 retries in 5.9s
  cause: Failed to fetch: http://mirror/simple/torch/
  cause: error sending request for url (http://mirror/simple/torch/)
  cause: client error (Connect)
  cause: tcp connect error
  cause: Connection refused (os error 111)
"""
GONE = """error: Failed to download `torch==2.9.1+cu130`
  cause: Failed to fetch: http://mirror/simple/torch/torch-2.9.1%2Bcu130-cp311-cp311-manylinux_2_28_x86_64.whl
  cause: HTTP status client error (404 Not Found) for url (http://mirror/simple/torch/torch-2.9.1%2Bcu130.whl)
"""
SPOILED = """error: Failed to download `six==1`
  cause: Failed to extract archive: six-1-py3-none-any.whl
  cause: Bad uncompressed size (got 00000002, expected 0000004b) for file: six-1.dist-info/WHEEL
"""


@pytest.mark.parametrize(
    ("output", "code", "wheel", "said"),
    [
        pytest.param(MISMATCH, "BU-ENV-103", "torch==2.9.1+cu130", "not the file that was locked", id="hash"),
        pytest.param(ABSENT, "BU-ENV-104", "torch==2.9.1+cu130", "does not hold torch==2.9.1+cu130", id="no version"),
        pytest.param(UNKNOWN_NAME, "BU-ENV-104", "torch", "does not hold torch", id="no such name"),
        pytest.param(GONE, "BU-ENV-104", "torch==2.9.1+cu130", "does not hold torch==2.9.1+cu130", id="404"),
        pytest.param(CLOSED, "BU-ENV-106", None, "other credentials", id="credentials"),
        pytest.param(DOWN, "BU-ENV-105", None, "503 Service Unavailable", id="503"),
        pytest.param(REFUSED, "BU-ENV-105", None, "Connection refused", id="refused"),
        pytest.param(SPOILED, "BU-ENV-107", None, "Bad uncompressed size", id="spoiled archive"),
        pytest.param("", "BU-ENV-107", None, "it said nothing", id="silent"),
    ],
)
def test_what_uv_says_becomes_a_cause(output: str, code: str, wheel: str | None, said: str) -> None:
    call = {"index": "pytorch-cu130", "status": 1, "output": output}
    entry = {**GOOD, "calls": [call], "added": {}}
    (finding,) = guard.installed(entry, LOCKED)
    assert (finding.code, finding.evidence.get("wheel")) == (code, wheel)
    assert said in finding.cause
    assert "step torch, index pytorch-cu130" in finding.cause


def test_a_hash_mismatch_names_both_hashes() -> None:
    finding = guard.uv_failed({"index": "one", "status": 1, "output": MISMATCH}, "torch")
    assert (finding.evidence["wanted"], finding.evidence["found"]) == ("sha256:0000", "sha256:b872")


FAMILY = Step(
    name="flashinfer",
    requirements=("flashinfer-python==0.6.4",),
    family=("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"),
)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        pytest.param(("0.6.4", "0.6.4", "0.6.4+cu130"), [], id="agree"),
        pytest.param(("0.6.4", "0.6.4", None), [], id="one absent"),
        pytest.param(("0.6.4+cu130", "0.6.4", "0.6.4"), [], id="no label is allowed"),
        pytest.param(
            ("0.6.4", "0.6.4", "0.6.40+cu130"),
            [("BU-ENV-121", "error", "flashinfer-jit-cache", "0.6.4", "0.6.40")],
            id="a prefix is not the version",
        ),
        pytest.param(
            ("0.6.4", "0.6.3", "0.6.4+cu130"),
            [("BU-ENV-121", "error", "flashinfer-cubin", "0.6.4", "0.6.3")],
            id="another version",
        ),
        pytest.param(
            ("0.6.4", "0.6.4", "0.6.4+cu129"),
            [("BU-ENV-122", "error", "flashinfer-jit-cache", "cu130", "cu129")],
            id="another CUDA label",
        ),
        pytest.param(
            ("0.6.4", "0.6.4.post1", "0.6.4"),
            [("BU-ENV-121", "error", "flashinfer-cubin", "0.6.4", "0.6.4.post1")],
            id="post release",
        ),
    ],
)
def test_families(versions: tuple[str | None, ...], expected: list[object]) -> None:
    present = {name: version for name, version in zip(FAMILY.family, versions, strict=True) if version}
    assert seen(guard.families(FAMILY, present, "cu130")) == expected


@pytest.mark.parametrize(
    ("version", "labels"),
    [
        ("2.9.1", []),
        ("2.9.1+cu130", ["cu130"]),
        ("2.9.1+cpu", []),
        ("1.0+cu130.pt29", ["cu130"]),
        ("1.0+pt29cu128", ["cu128"]),
        ("1.0+git.cu1234", []),
        ("1.0+lab.cu130", ["cu130"]),
    ],
)
def test_cuda_labels(version: str, labels: list[str]) -> None:
    assert guard.cuda_labels(guard.Version(version)) == labels


def test_labels_of_a_step() -> None:
    found = guard.labels({"torch": "2.9.1+cu128", "numpy": "2.3.4", "odd": "not a version"}, "cu130")
    assert seen(found) == [("BU-ENV-122", "error", "torch", "cu130", "cu128")]


@pytest.mark.parametrize(
    ("version", "cuda", "expected"),
    [
        ("2.9.1+cu130", "13.0", []),
        ("2.14.1", "13.0", []),
        ("2.9.1", "12.8", [("BU-ENV-127", "error", "torch 2.9.1", "13.0", "12.8")]),
        ("2.9.1", None, [("BU-ENV-127", "error", "torch 2.9.1", "13.0", None)]),
    ],
    ids=["labelled", "no label, right build", "no label, another toolkit", "a CPU build"],
)
def test_what_torch_is_built_for(version: str, cuda: str | None, expected: list[Any]) -> None:
    assert seen(guard.built_for(version, cuda, "13.0", "torch")) == expected


@pytest.mark.parametrize(
    ("level", "refused", "expected"),
    [
        pytest.param("ok", False, [], id="sound"),
        pytest.param("ok-stable", False, [], id="stable"),
        pytest.param(
            "broken-symbol",
            True,
            [("BU-ENV-123", "step s: k 1.0 does not go with torch 2.10.0: broken-symbol: no a; it fits torch 2.9.1")],
            id="broken",
        ),
        pytest.param(
            "layout-risk",
            True,
            [("BU-ENV-124", "step s: k 1.0 does not go with torch 2.10.0: layout-risk: no a; it fits torch 2.9.1")],
            id="built for another minor version",
        ),
        pytest.param(
            "layout-risk",
            False,
            [("BU-ENV-126", "step s: k.so: no a, of k 1.0 beside torch 2.10.0")],
            id="may have been built for this minor version",
        ),
        pytest.param(
            "optional",
            False,
            [("BU-ENV-125", "step s: a part of k 1.0 does not load beside torch 2.10.0: k.so: no a")],
            id="a part that may be missing",
        ),
    ],
)
def test_a_wheel_is_refused_in_the_words_of_the_judgement(
    level: str, refused: bool, expected: list[tuple[str, str]]
) -> None:
    found = {"kind": level, "file": "k.so", "symbol": "a", "demangled": None, "library": None, "reason": "no a"}
    verdict = {
        "name": "k",
        "version": "1.0",
        "torch": "2.10.0",
        "verdict": level,
        "refused": refused,
        "fits_torch": ["2.9.1"],
        "built_for": ["2.9"],
        "summary": "no a; it fits torch 2.9.1",
        "findings": [found | {"remedy": ""}],
    }
    assert [(f.code, f.cause) for f in guard.loadable([verdict], "s")] == expected


@pytest.mark.parametrize(
    ("status", "output", "said"),
    [
        (1, "Traceback\nImportError: /x/common_ops.abi3.so: undefined symbol: _ZN3c10\n", "undefined symbol: _ZN3c10"),
        (134, "", "is killed"),
        (124, "no answer within 600 s", "takes too long"),
    ],
)
def test_imports(status: int, output: str, said: str) -> None:
    entry = {"step": "sgl-kernel", "modules": {"sgl_kernel": {"status": status, "output": output}}, "changed": {}}
    (finding,) = guard.imported(entry)
    assert (finding.code, finding.evidence["wheel"]) == ("BU-ENV-131", "sgl_kernel")
    assert said in finding.cause


def test_good_imports_say_nothing() -> None:
    assert list(guard.imported({"step": "a", "modules": {"a": {"status": 0, "output": ""}}, "changed": {}})) == []


def test_an_import_that_changes_files_is_refused() -> None:
    entry = {"step": "a", "modules": {"a": {"status": 0, "output": ""}}, "changed": {"a": {}}}
    assert [finding.code for finding in guard.imported(entry)] == ["BU-ENV-132"]


@pytest.mark.parametrize(
    ("entry", "codes"),
    [
        ({"interpreter": {"path": "/usr/bin/python3.11"}, "status": 0, "output": ""}, []),
        ({"interpreter": None, "status": 1, "output": ""}, ["BU-ENV-101"]),
        ({"interpreter": {"path": "/usr/bin/python3.11"}, "status": 2, "output": "no space"}, ["BU-ENV-102"]),
    ],
)
def test_created(entry: dict[str, Any], codes: list[str]) -> None:
    found: list[Finding] = list(guard.created(entry, "3.11"))
    assert [finding.code for finding in found] == codes


def test_patches() -> None:
    good = {"distribution": "a", "version": "1", "problem": None, "files": []}
    bad = {**good, "problem": "x.py: sha256", "files": [{"path": "x.py", "wanted": "p", "found": "q"}]}
    assert seen(guard.patched({"patches": [good, bad]})) == [("BU-ENV-141", "error", "a", "p", "q")]
