"""Bringing locked wheels into a mirror."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_index import STACK, Site

from bringup.errors import BringupError, InputError
from bringup.locking.fetch import Fetched, fetch_into_mirror
from bringup.locking.resolve import resolve
from bringup.locking.wheels import lock_wheels
from bringup.package_index import DefaultIndex, Source, Sources
from bringup.stack import Lock, parse_stack

PLATFORM = "cp311-x86_64"


def sources(site: Site) -> Sources:
    names = ("pytorch", "sglang", "flashinfer")
    return Sources({name: Source(site.index(name)) for name in names}, DefaultIndex(Source(site.index("default"))))


@pytest.fixture
def lock(indexes: Site) -> Lock:
    """Return the lock of the demo stack; sizes come from the server, as a PEP 503 page has none."""
    part = lock_wheels(parse_stack(STACK, source="demo.toml"), [PLATFORM], sources(indexes))
    assert part.is_fit
    return Lock(schema_=1, stack="demo", wheels=part.locked("index"))


def test_sizes_are_those_of_the_files(indexes: Site, lock: Lock) -> None:
    assert lock.wheels is not None
    for step in lock.wheels.platforms[PLATFORM].steps:
        for file in step.files:
            path = indexes.root / "wheels" / file.index / "simple" / file.distribution / file.file
            assert file.size_bytes == path.stat().st_size


def test_mirror_serves_everything_and_resolves_alike(indexes: Site, lock: Lock, tmp_path: Path) -> None:
    mirror, cache = indexes.root / "copy", tmp_path / "cache"
    first = fetch_into_mirror(lock, mirror, platform=PLATFORM, sources=sources(indexes), cache=cache)
    assert (first.downloaded, first.cached, first.present) == (8, 0, 0)
    assert first.downloaded_bytes == sum(path.stat().st_size for path in cache.iterdir())
    again = fetch_into_mirror(lock, mirror, platform=PLATFORM, sources=sources(indexes), cache=cache)
    assert again == Fetched(downloaded=0, cached=0, present=8, downloaded_bytes=0)
    stack = parse_stack(STACK, source="demo.toml")
    mirrored = Sources.of_mirror(
        stack.python.indexes, f"{indexes.url}/copy", DefaultIndex(Source(f"{indexes.url}/nothing"))
    )
    assert lock.wheels is not None
    wanted = [(file.file, file.sha256) for step in lock.wheels.platforms[PLATFORM].steps for file in step.files]
    assert [(each.locked.file, each.locked.sha256) for each in resolve(stack, PLATFORM, mirrored).files] == wanted


def test_cache_is_used_by_another_mirror_and_a_torn_file_is_not(indexes: Site, lock: Lock, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    fetch_into_mirror(lock, tmp_path / "one", platform=PLATFORM, sources=sources(indexes), cache=cache)
    torn = cache / "sglang-0.5.9-py3-none-any.whl"
    content = torn.read_bytes()
    torn.unlink()
    torn.write_bytes(content[:-1] + b"x")
    found = fetch_into_mirror(lock, tmp_path / "two", platform=PLATFORM, sources=sources(indexes), cache=cache)
    assert (found.downloaded, found.cached, found.present) == (1, 7, 0)
    assert torn.read_bytes() == content


def test_what_the_mirror_already_lists_stays_listed(indexes: Site, lock: Lock, tmp_path: Path) -> None:
    mirror = Site(tmp_path / "mirror", "")
    mirror.add("default", "sglang", "0.4.0")
    fetch_into_mirror(lock, tmp_path / "mirror", platform=PLATFORM, sources=sources(indexes), cache=tmp_path / "cache")
    page = (tmp_path / "mirror/wheels/default/simple/sglang/index.html").read_text()
    assert page.count("<a href=") == 2
    assert "sglang-0.4.0-py3-none-any.whl#sha256=" in page
    root = (tmp_path / "mirror/wheels/default/simple/index.html").read_text()
    assert '<a href="sglang/">sglang</a>' in root


def test_file_that_is_not_the_locked_one_never_reaches_the_mirror(indexes: Site, lock: Lock, tmp_path: Path) -> None:
    path = indexes.root / "wheels/default/simple/sglang/sglang-0.5.9-py3-none-any.whl"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(BringupError) as raised:
        fetch_into_mirror(
            lock, tmp_path / "mirror", platform=PLATFORM, sources=sources(indexes), cache=tmp_path / "cache"
        )
    assert raised.value.what.endswith("sglang-0.5.9-py3-none-any.whl is not the locked file")
    assert not (tmp_path / "cache" / path.name).exists()
    assert list((tmp_path / "cache").glob(".*.part")) == []
    assert not (tmp_path / "mirror").exists()


def test_platform_that_is_not_locked(indexes: Site, lock: Lock, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        fetch_into_mirror(lock, tmp_path, platform="cp312-x86_64", sources=sources(indexes))
    assert raised.value.what == "the lock of demo holds nothing for cp312-x86_64"
    assert raised.value.hint == "run `bringup lock demo --platform cp312-x86_64`"
