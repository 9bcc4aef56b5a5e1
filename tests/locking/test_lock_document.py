# ruff: noqa: E501 (the text of a lock has long lines)
"""The text of a lock, and its export."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomlkit
from packaging import pylock

from bringup import paths
from bringup.errors import InputError
from bringup.locking.document import digest_of, input_digest_of, lock_text, write_lock
from bringup.locking.pylock import pylock_text
from bringup.stack import (
    Lock,
    LockedFile,
    LockedPackage,
    LockedPackages,
    LockedPlatform,
    LockedStep,
    LockedWheels,
    parse_lock,
)

SHA256 = "0" * 64


def wheel(name: str, version: str, **more: object) -> LockedFile:
    fields = {"file": f"{name}-{version}-py3-none-any.whl", "size_bytes": 1, "sha256": SHA256, **more}
    return LockedFile.model_validate({"distribution": name, "version": version, **fields})


def deb(name: str) -> LockedPackage:
    return LockedPackage(name=name, version="1-1", architecture="amd64", sha256=SHA256, size_bytes=1, origin="NVIDIA")


def lock() -> Lock:
    """Return a lock whose parts stand in no order."""
    steps = (
        LockedStep(name="torch", files=(wheel("torch", "2.9.1+cu130", index="site"), wheel("jinja2", "3.1.6"))),
        LockedStep(name="after", files=(wheel("sglang", "0.5.9", verdict="ok-stable"),)),
    )
    platforms = {name: LockedPlatform(steps=steps) for name in ("cp312-x86_64", "cp311-x86_64")}
    packages = LockedPackages(
        resolved_against="lab",
        driver=(deb("nvidia-driver-pinning-580"), deb("libnvidia-compute-580")),
        fabric={"nvswitch": (deb("nvidia-fabricmanager"),)},
        toolkits={"13.0": (deb("cuda-toolkit-13-0"),), "12.8": (deb("cuda-toolkit-12-8"),)},
    )
    return Lock(
        schema_=1,
        stack="demo",
        wheels=LockedWheels(resolved_against="index", platforms=platforms),
        packages={"ubuntu2404-x86_64": packages, "debian12-x86_64": packages},
    )


TEXT = """\
# Written by `bringup lock demo`; edit the stack, not this file.
# input: {digest}
schema = 1
stack = "demo"

[wheels]
resolved_against = "index"

[[wheels.platform.cp311-x86_64.step]]
name = "torch"
files = [
    {{distribution = "jinja2", version = "3.1.6", file = "jinja2-3.1.6-py3-none-any.whl", size_bytes = 1, sha256 = "{sha256}", index = "default"}},
    {{distribution = "torch", version = "2.9.1+cu130", file = "torch-2.9.1+cu130-py3-none-any.whl", size_bytes = 1, sha256 = "{sha256}", index = "site"}},
]

[[wheels.platform.cp311-x86_64.step]]
name = "after"
files = [
    {{distribution = "sglang", version = "0.5.9", file = "sglang-0.5.9-py3-none-any.whl", size_bytes = 1, sha256 = "{sha256}", index = "default", verdict = "ok-stable"}},
]
"""


def test_text_is_sorted_with_the_steps_in_their_order() -> None:
    text = lock_text(lock(), input_digest="f" * 64)
    assert text.startswith(TEXT.format(digest="f" * 64, sha256=SHA256))
    assert text.index("cp311-x86_64") < text.index("cp312-x86_64")
    assert text.index("debian12-x86_64") < text.index("ubuntu2404-x86_64")
    assert text.index("nvidia-driver-pinning-580") < text.index("libnvidia-compute-580")
    assert text.index('"12.8" = ') < text.index('"13.0" = ')


def test_text_reads_back_as_the_same_lock_and_again_as_the_same_text() -> None:
    text = lock_text(lock())
    assert lock_text(parse_lock(text, source="l.toml")) == text


def test_shipped_lock_is_written_as_we_write_it() -> None:
    path = paths.stacks() / "sglang-cu130.lock.toml"
    assert lock_text(parse_lock(path.read_text(), source=str(path))) == path.read_text()


def test_writing_tells_whether_something_changed(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "demo.lock.toml"
    assert write_lock(path, lock(), input_digest="a" * 64) is True
    assert write_lock(path, lock(), input_digest="a" * 64) is False
    assert write_lock(path, lock(), input_digest="b" * 64) is True
    assert input_digest_of(path) == "b" * 64
    assert [each.name for each in path.parent.iterdir()] == ["demo.lock.toml"]


@pytest.mark.parametrize("text", ["", "# input: short\n", "# something\n"])
def test_file_without_an_input_digest(tmp_path: Path, text: str) -> None:
    (tmp_path / "l.toml").write_text(text)
    assert input_digest_of(tmp_path / "l.toml") is None
    assert input_digest_of(tmp_path / "absent.toml") is None


def test_digest_keeps_its_parts_apart() -> None:
    assert digest_of(["ab", "c"]) != digest_of(["a", "bc"])
    assert digest_of(["a", b"b"]) == digest_of([b"a", "b"])


def test_exported_lock_is_a_valid_pylock() -> None:
    wheels = lock().wheels
    assert wheels is not None
    platform = wheels.platforms["cp311-x86_64"]
    addresses = {file.file: f"https://x/{file.file}" for step in platform.steps for file in step.files}
    text = pylock_text("cp311-x86_64", platform, addresses)
    parsed = pylock.Pylock.from_dict(tomlkit.parse(text).unwrap())
    assert [(package.name, str(package.version)) for package in parsed.packages] == [
        ("jinja2", "3.1.6"),
        ("sglang", "0.5.9"),
        ("torch", "2.9.1+cu130"),
    ]
    assert str(parsed.requires_python) == "==3.11.*"
    assert [str(marker) for marker in parsed.environments or ()] == [
        'sys_platform == "linux" and platform_machine == "x86_64"'
    ]


def test_lock_that_would_not_read_back_is_not_written(tmp_path: Path) -> None:
    broken = lock().model_copy(update={"stack": "Not A Name"})
    with pytest.raises(InputError):
        write_lock(tmp_path / "l.toml", broken)
    assert list(tmp_path.iterdir()) == []
