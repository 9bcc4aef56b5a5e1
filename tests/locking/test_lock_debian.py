"""Debian versions, relations and package paragraphs."""

from __future__ import annotations

import itertools
import shutil
import subprocess

import pytest

from bringup.errors import InputError
from bringup.locking.debian import DebianVersion, Package, Relation, paragraphs, parse_packages, parse_relations

ASCENDING = [
    "0", "1.0~rc1", "1.0", "1.0-0.1", "1.0-1", "1.0a", "1.0+b1", "1.0.1", "1.9", "1.10", "580.82.07-0ubuntu1",
    "580.95.05-0lab1", "580.95.05-0ubuntu1", "580.95.05-1", "580.159.04-1", "590.48.01-1", "1:0.9", "1:1.0-1",
]  # fmt: skip


@pytest.mark.parametrize(("lower", "higher"), list(itertools.pairwise(ASCENDING)))
def test_versions_ascend(lower: str, higher: str) -> None:
    assert DebianVersion(lower) < DebianVersion(higher)
    assert not DebianVersion(higher) < DebianVersion(lower)
    assert DebianVersion(lower) != DebianVersion(higher)


@pytest.mark.parametrize(("one", "other"), [("1.0", "1.0-0"), ("0:1.0", "1.0"), ("1.00", "1.0"), ("1.0-1", "1.0-01")])
def test_versions_that_are_equal(one: str, other: str) -> None:
    assert DebianVersion(one) == DebianVersion(other)
    assert hash(DebianVersion(one)) == hash(DebianVersion(other))


@pytest.mark.skipif(not shutil.which("dpkg"), reason="dpkg is the oracle")
def test_versions_agree_with_dpkg() -> None:
    odd = ["1.0~~", "2.0a~", "1.2-3-4", "1a", "2.0-1~bpo12+1", "13.0.96-1", "13.0.96-1lab1"]
    for one, other in itertools.combinations([*ASCENDING, *odd], 2):
        said = subprocess.run(["dpkg", "--compare-versions", one, "lt", other], check=False).returncode == 0
        assert (DebianVersion(one) < DebianVersion(other)) is said, (one, other)


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("580.95.05-0ubuntu1", (0, "580.95.05", "0ubuntu1")),
        ("1:2.3", (1, "2.3", "0")),
        ("1.2-3-4", (0, "1.2-3", "4")),
    ],
)
def test_parts_of_a_version(version: str, wanted: tuple[int, str, str]) -> None:
    parsed = DebianVersion(version)
    assert (parsed.epoch, parsed.upstream, parsed.revision) == wanted


@pytest.mark.parametrize(
    ("operator", "accepted"),
    [
        ("<<", ["1.9"]),
        ("<=", ["1.9", "2.0"]),
        ("=", ["2.0"]),
        (">=", ["2.0", "2.1"]),
        (">>", ["2.1"]),
        (None, ["1.9", "2.0", "2.1"]),
    ],
)
def test_relation_accepts(operator: str | None, accepted: list[str]) -> None:
    relation = Relation("a", operator, "2.0" if operator else None)
    assert [version for version in ("1.9", "2.0", "2.1") if relation.accepts(version)] == accepted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        pytest.param("", [], id="nothing"),
        pytest.param("libc6 (>= 2.27)", [["libc6 (>= 2.27)"]], id="condition"),
        pytest.param("a | b (= 1-1), c", [["a", "b (= 1-1)"], ["c"]], id="alternatives"),
        pytest.param("libcuda1:any", [["libcuda1"]], id="multi-arch qualifier"),
        pytest.param("a [amd64], b [arm64 i386], c [!amd64], d [!arm64]", [["a"], ["d"]], id="architectures"),
        pytest.param("a <!nocheck>", [["a"]], id="build profile"),
        pytest.param("a (>=1.0),b", [["a (>= 1.0)"], ["b"]], id="no spaces"),
    ],
)
def test_relations(text: str, wanted: list[list[str]]) -> None:
    assert [[str(each) for each in group] for group in parse_relations(text, "amd64")] == wanted


def test_text_that_is_no_relation() -> None:
    with pytest.raises(InputError) as raised:
        parse_relations("a (~ 1)", "amd64")
    assert raised.value.what == "not a package relation: 'a (~ 1)'"


@pytest.mark.parametrize(
    ("relation", "wanted"),
    [
        pytest.param(Relation("real", "=", "1-1"), True, id="its own version"),
        pytest.param(Relation("real", ">>", "1-1"), False, id="another version"),
        pytest.param(Relation("bare"), True, id="provided without a version"),
        pytest.param(Relation("bare", ">=", "1"), False, id="a bare provision meets no condition"),
        pytest.param(Relation("exact", ">=", "2"), True, id="provided with a version"),
        pytest.param(Relation("exact", ">>", "2"), False, id="provided with too low a version"),
        pytest.param(Relation("other"), False, id="not provided"),
    ],
)
def test_package_satisfies(relation: Relation, wanted: bool) -> None:
    package = Package("real", "1-1", "amd64", "real.deb", 1, "0" * 64, provides={"bare": None, "exact": "2"})
    assert package.satisfies(relation) is wanted


PARAGRAPH = """\
Package: cuda-nvrtc-13-0
Version: 13.0.88-1
Architecture: amd64
Depends: cuda-toolkit-config-common | cuda-cudart-11-2
Pre-Depends: dpkg (>= 1.15)
Provides: libnvrtc.so.13 (= 13.0.88)
Conflicts: old
Breaks: older (<< 1)
Filename: ./cuda-nvrtc-13-0_13.0.88-1_amd64.deb
Size: 12
SHA256: ABCDEF
Description: NVRTC
 native runtime libraries
"""


def test_paragraph_becomes_a_package() -> None:
    other = PARAGRAPH.replace("Architecture: amd64", "Architecture: arm64")
    everywhere = PARAGRAPH.replace("Architecture: amd64", "Architecture: all").replace("cuda-nvrtc", "cuda-doc")
    found = parse_packages(f"{PARAGRAPH}\n{other}\n\n{everywhere}", "amd64", source="Packages")
    assert [(each.name, each.architecture) for each in found] == [
        ("cuda-nvrtc-13-0", "amd64"),
        ("cuda-doc-13-0", "all"),
    ]
    assert found[0] == Package(
        name="cuda-nvrtc-13-0",
        version="13.0.88-1",
        architecture="amd64",
        file="cuda-nvrtc-13-0_13.0.88-1_amd64.deb",
        size_bytes=12,
        sha256="abcdef",
        depends=(
            (Relation("dpkg", ">=", "1.15"),),
            (Relation("cuda-toolkit-config-common"), Relation("cuda-cudart-11-2")),
        ),
        conflicts=((Relation("old"),), (Relation("older", "<<", "1"),)),
        provides={"libnvrtc.so.13": "13.0.88"},
    )


def test_continuation_lines_belong_to_their_field() -> None:
    assert next(paragraphs(PARAGRAPH))["Description"] == "NVRTC\nnative runtime libraries"


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("SHA256: ABCDEF\n", "Packages: the paragraph of cuda-nvrtc-13-0 has no SHA256"),
        ("Package: cuda-nvrtc-13-0\n", "Packages: the paragraph of a package has no Package"),
        ("Size: 12\n", "Packages: the paragraph of cuda-nvrtc-13-0 has no Size"),
    ],
)
def test_paragraph_that_lacks_something_is_named(gone: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_packages(PARAGRAPH.replace(gone, ""), "amd64", source="Packages")
    assert raised.value.what == message
