# ruff: noqa: E501 (a row of a table stays one line)
"""Resolving a stack step by step, with uv itself against small indexes."""

from __future__ import annotations

import hashlib
import re

import pytest
from small_index import STACK, X86, Site

from bringup.errors import InputError
from bringup.locking.compile import Wheel, best_wheel
from bringup.locking.resolve import ResolvedPlatform, locate, resolve
from bringup.locking.wheels import lock_wheels
from bringup.package_index import DefaultIndex, Source, Sources
from bringup.stack import Stack, parse_stack


def stack(text: str = STACK) -> Stack:
    return parse_stack(text, source="demo.toml")


def sources(site: Site) -> Sources:
    """Return the site's indexes; its default one is the only default."""
    names = ("pytorch", "sglang", "flashinfer")
    return Sources({name: Source(site.index(name)) for name in names}, DefaultIndex(Source(site.index("default"))))


def shown(resolved: ResolvedPlatform) -> list[str]:
    return [
        f"{step.name}: {file.locked.distribution} {file.locked.version} from {file.locked.index}"
        for step in resolved.steps
        for file in step.files
    ]


def test_steps_come_from_their_own_index_and_the_rest_from_the_default_one(shared: Site) -> None:
    assert shown(resolve(stack(), "cp311-x86_64", sources(shared))) == [
        "torch: demo-jinja 2.1 from default",
        "torch: demo-runtime 13.0.96 from pytorch",
        "torch: torch 2.9.1+cu130 from pytorch",
        "sgl-kernel: demo-helper 0.9 from sglang",
        "sgl-kernel: sgl-kernel 0.3.21+cu130 from sglang",
        "flashinfer: flashinfer-jit-cache 0.6.4+cu130 from flashinfer",
        "flashinfer: flashinfer-python 0.6.4 from default",
        "sglang: sglang 0.5.9 from default",
    ]


def test_every_platform_gets_its_own_file_and_the_highest_build(shared: Site) -> None:
    files = {
        platform: {file.locked.distribution: file.locked.file for file in found.files}
        for platform in ("cp311-x86_64", "cp312-x86_64")
        for found in [resolve(stack(), platform, sources(shared))]
    }
    assert files["cp311-x86_64"]["torch"] == f"torch-2.9.1+cu130-cp311-cp311-{X86}.whl"
    assert files["cp312-x86_64"]["torch"] == f"torch-2.9.1+cu130-cp312-cp312-{X86}.whl"
    assert files["cp311-x86_64"]["demo-runtime"] == "demo_runtime-13.0.96-2-py3-none-any.whl"


def test_missing_platform_is_refused_with_its_name(shared: Site) -> None:
    with pytest.raises(InputError) as raised:
        resolve(stack(), "cp311-aarch64", sources(shared))
    assert raised.value.what.startswith("demo.toml: step torch on cp311-aarch64 ")


def test_versions_of_the_lock_are_kept_while_they_fit(shared: Site) -> None:
    kept = resolve(stack(), "cp311-x86_64", sources(shared), preferred={"demo-jinja": "2.0", "torch": "1.0"})
    assert "torch: demo-jinja 2.0 from default" in shown(kept)
    assert "torch: torch 2.9.1+cu130 from pytorch" in shown(kept)


@pytest.mark.parametrize(
    ("requirements", "preferred", "wanted"),
    [
        pytest.param(["demo-ops==1.0"], {}, ["demo-ops 1.0", "demo-part 2.0"], id="nothing to keep"),
        pytest.param(["demo-ops==1.0"], {"demo-ops": "1.0"}, ["demo-ops 1.0", "demo-part 2.0"], id="a pin that is kept"),
        pytest.param(["demo-ops"], {"demo-ops": "1.0"}, ["demo-ops 1.0", "demo-part 2.0"], id="a version that is kept"),
        pytest.param(
            ["demo-ops==2.0"], {"demo-ops": "1.0", "demo-part": "1.0"}, ["demo-ops 2.0", "demo-part 1.0"],
            id="one has to move, the other is kept",
        ),
        pytest.param(
            ["demo-ops==1.0", "demo-part>=2"], {"demo-ops": "1.0", "demo-part": "1.0"}, ["demo-ops 1.0", "demo-part 2.0"],
            id="the pin is kept, the other has to move",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("explain", [False, True])
def test_what_an_earlier_index_has_for_another_machine_only(
    site: Site, requirements: list[str], preferred: dict[str, str], wanted: list[str], explain: bool
) -> None:
    site.add("extra", "demo-ops", "1.0", tag=f"cp311-cp311-{X86}")
    for version in ("1.0", "2.0"):
        site.add("default", "demo-ops", version, "demo-part", tag="cp311-cp311-manylinux_2_28_aarch64")
        site.add("default", "demo-part", version)
    at = Sources({}, DefaultIndex(Source(site.index("default")), extra=(Source(site.index("extra")),)))
    text = (
        STACK[: STACK.index("[[python.index]]")]
        + f"""
[[python.step]]
name = "ops"
requirements = {requirements!r}
"""
    )
    resolved = resolve(stack(text), "cp311-aarch64", at, preferred=preferred, explain=explain)
    assert [f"{file.locked.distribution} {file.locked.version}" for file in resolved.files] == wanted
    assert [file.locked.file for file in resolved.files if "ops" in file.locked.file] == [
        f"demo_ops-{wanted[0].split()[1]}-cp311-cp311-manylinux_2_28_aarch64.whl"
    ]


def test_explaining_names_who_asked(shared: Site) -> None:
    resolved = resolve(stack(), "cp311-x86_64", sources(shared), explain=True)
    asked = {file.locked.distribution: file.required_by for file in resolved.files}
    assert asked == {
        "demo-jinja": ("torch",),
        "demo-runtime": ("torch",),
        "torch": ("the stack",),
        "demo-helper": ("sgl-kernel",),
        "sgl-kernel": ("the stack",),
        "flashinfer-jit-cache": ("the stack",),
        "flashinfer-python": ("the stack",),
        "sglang": ("the stack",),
    }


def test_pin_in_the_way_is_told_in_the_resolvers_words(shared: Site) -> None:
    text = STACK[: STACK.index("[[python.override]]")]
    with pytest.raises(InputError) as raised:
        resolve(stack(text), "cp311-x86_64", sources(shared))
    assert raised.value.what == "demo.toml: step sglang on cp311-x86_64 has no solution"
    assert "sglang" in str(raised.value.why)
    assert "flashinfer" in str(raised.value.why)
    assert "[[python.override]]" in str(raised.value.hint)


def test_wide_override_moves_nothing_that_an_earlier_step_fixed(shared: Site) -> None:
    wide = """
[[python.override]]
requirement = "demo-jinja"
reason = "any version will do here"
"""
    resolved = resolve(stack(STACK + wide), "cp311-x86_64", sources(shared), preferred={"demo-jinja": "1.0"})
    assert [line for line in shown(resolved) if "demo-jinja" in line] == ["torch: demo-jinja 1.0 from pytorch"]


def test_existing_environment_has_nothing_to_resolve(shared: Site) -> None:
    text = STACK.replace('interpreter = "3.11"', 'interpreter = "existing:/opt/venv"')
    with pytest.raises(InputError) as raised:
        resolve(stack(text), "cp311-x86_64", sources(shared))
    assert raised.value.what == "demo.toml: the environment is an existing one"


def test_unknown_platform_lists_the_known_ones(shared: Site) -> None:
    with pytest.raises(InputError) as raised:
        resolve(stack(), "cp310-x86_64", sources(shared))
    assert raised.value.what == "not a platform: 'cp310-x86_64'"
    assert "cp313-aarch64" in str(raised.value.hint)


def test_mirror_serves_the_same_names(shared: Site) -> None:
    wanted = stack()
    mirrored = Sources.of_mirror(wanted.python.indexes, shared.url, DefaultIndex())
    assert shown(resolve(wanted, "cp311-x86_64", mirrored)) == shown(resolve(wanted, "cp311-x86_64", sources(shared)))


def test_proxy_of_the_environment_is_not_asked_for_the_mirror(shared: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    wanted = stack()
    part = lock_wheels(wanted, ["cp311-x86_64"], Sources.of_mirror(wanted.python.indexes, shared.url, DefaultIndex()))
    assert all(file.locked.size_bytes for file in part.resolved[0].files)


def test_index_without_hashes_is_hashed(indexes: Site) -> None:
    page = indexes.root / "wheels/flashinfer/simple/flashinfer-jit-cache/index.html"
    page.write_text(re.sub("#sha256=[0-9a-f]+", "", page.read_text()))
    files = {file.locked.distribution: file.locked for file in resolve(stack(), "cp311-x86_64", sources(indexes)).files}
    found = files["flashinfer-jit-cache"]
    assert found.sha256 == hashlib.sha256((page.parent / found.file).read_bytes()).hexdigest()


def test_locked_files_are_found_again(shared: Site) -> None:
    files = [file.locked for file in resolve(stack(), "cp311-x86_64", sources(shared)).files]
    found = locate(files, "cp311-x86_64", sources(shared))
    assert set(found) == {file.file for file in files}
    assert found["sglang-0.5.9-py3-none-any.whl"] == f"{shared.index('default')}/sglang/sglang-0.5.9-py3-none-any.whl"


def test_file_that_changed_on_its_index_is_named(shared: Site) -> None:
    files = [file.locked for file in resolve(stack(), "cp311-x86_64", sources(shared)).files]
    changed = [
        file.model_copy(update={"sha256": "0" * 64}) if file.distribution == "sglang" else file for file in files
    ]
    with pytest.raises(InputError) as raised:
        locate(changed, "cp311-x86_64", sources(shared))
    assert raised.value.what == "index default no longer has sglang-0.5.9-py3-none-any.whl as it was locked"


@pytest.mark.parametrize(
    ("platform", "files", "wanted"),
    [
        pytest.param("cp311-x86_64", ["a-1-cp311-cp311-manylinux_2_28_x86_64", "a-1-py3-none-any"], 0, id="own tag first"),
        pytest.param("cp311-x86_64", ["a-1-1-py3-none-any", "a-1-10-py3-none-any", "a-1-9-py3-none-any"], 1, id="build tags are numbers"),
        pytest.param("cp311-x86_64", ["a-1-cp311-cp311-manylinux_2_39_x86_64"], None, id="glibc newer than Debian 12"),
        pytest.param("cp311-x86_64", ["a-1-cp311-cp311-manylinux_2_36_x86_64"], 0, id="glibc of Debian 12"),
        pytest.param("cp311-x86_64", ["a-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64"], 0, id="old alias"),
        pytest.param("cp311-x86_64", ["a-1-cp310-abi3-manylinux_2_34_x86_64"], 0, id="stable ABI of an older Python"),
        pytest.param("cp311-x86_64", ["a-1-cp312-abi3-manylinux_2_34_x86_64"], None, id="stable ABI of a newer Python"),
        pytest.param("cp311-x86_64", ["a-1-cp311-cp311-musllinux_1_2_x86_64"], None, id="another libc"),
        pytest.param("cp313-aarch64", ["a-1-cp313-cp313-manylinux_2_28_x86_64", "a-1-cp313-cp313-manylinux_2_28_aarch64"], 1, id="aarch64"),
        pytest.param("cp313-aarch64", ["a-1-cp313-cp313t-manylinux_2_28_aarch64"], None, id="free-threaded"),
        pytest.param("cp311-x86_64", ["not a wheel"], None, id="no wheel name"),
    ],
)  # fmt: skip
def test_wheel_an_installer_would_take(platform: str, files: list[str], wanted: int | None) -> None:
    wheels = [Wheel(f"{file}.whl", "", "0" * 64, 1) for file in files]
    assert best_wheel(wheels, platform) == (None if wanted is None else wheels[wanted])
