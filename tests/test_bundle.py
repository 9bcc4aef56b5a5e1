"""Bundles: made once, gone on with, checked, shared by stacks, and refused where they could not be trusted."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from bringup.bundle import Order, Repositories, Signer, Written, check_bundle, open_signer, write_bundle
from bringup.bundle.layout import read_manifest
from bringup.commands.bundle import bundle as command
from bringup.errors import BringupError, InputError
from bringup.lab import debs
from bringup.locking import http, write_lock
from bringup.locking.resolve import locate
from bringup.package_index import DefaultIndex, Source, Sources
from bringup.stack import Lock, LockedFile, LockedPackage, load_stack
from tests.locking.conftest import served
from tests.locking.small_index import STACK, Site

PLATFORM = "cp311-x86_64"
RELEASE = "debian12-x86_64"
APT = "apt/debian12/x86_64"


@dataclass
class World:
    """What is outside: indexes and NVIDIA's repository, and the key that signs the latter."""

    site: Site
    work: Path
    theirs: Signer
    packages: dict[str, LockedPackage] = field(default_factory=dict)
    wheels: dict[str, LockedFile] = field(default_factory=dict)

    @property
    def sources(self) -> Sources:
        names = ("pytorch", "sglang", "flashinfer")
        default = DefaultIndex(Source(self.site.index("default")))
        return Sources({name: Source(self.site.index(name)) for name in names}, default)

    @property
    def repositories(self) -> Repositories:
        return Repositories(f"{self.site.url}/apt", self.theirs.public, self.theirs.fingerprint)

    def wheel(self, index: str, name: str, version: str) -> LockedFile:
        """Put a wheel on an index and return it as a lock names it."""
        path = self.site.add(index, name, version)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.wheels[f"{name} {version}"] = LockedFile(
            distribution=name,
            version=version,
            file=path.name,
            size_bytes=path.stat().st_size,
            sha256=digest,
            index=index,
        )
        return self.wheels[f"{name} {version}"]

    def publish(self, *packages: tuple[str, str]) -> None:
        """Put packages into the repository, sign it, and remember them as a lock names them."""
        directory = self.site.root / APT
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        packed = []
        for name, version in packages:
            deb = debs.Deb(name, version, "amd64", "libs", "a test's package", files={f"/opt/{name}": os.urandom(3000)})
            if f"{name} {version}" in self.packages:
                deb = debs.Deb(name, version, "amd64", "libs", "a test's package", files={f"/opt/{name}": b"again"})
            packed.append(debs.pack(deb, directory))
            data = (directory / deb.file_name).read_bytes()
            self.packages[f"{name} {version}"] = LockedPackage(
                name=name,
                version=version,
                architecture="amd64",
                sha256=hashlib.sha256(data).hexdigest(),
                size_bytes=len(data),
                origin="NVIDIA",
            )
        debs.write_index(directory, packed, origin="NVIDIA", label="test")
        signed = self.theirs.clearsigned((directory / "Release").read_text())
        (directory / "InRelease").write_bytes(signed)

    def order(self, name: str, wheels: list[str], packages: list[str]) -> Order:
        """Write a stack and its lock, and return the order that bundles it."""
        steps = [
            {"name": "torch", "files": [self.wheels[each].model_dump(mode="json") for each in wheels]},
            *({"name": step, "files": []} for step in ("sgl-kernel", "flashinfer", "sglang")),
        ]
        lock = Lock.model_validate(
            {
                "schema": 1,
                "stack": name,
                "wheels": {"resolved_against": "index", "platform": {PLATFORM: {"step": steps}}},
                "packages": {
                    RELEASE: {
                        "resolved_against": "index",
                        "driver": [self.packages[each].model_dump(mode="json") for each in packages],
                    }
                },
            }
        )
        stack_file, lock_file = self.work / f"{name}.toml", self.work / f"{name}.lock.toml"
        stack_file.write_text(STACK.replace('name = "demo"', f'name = "{name}"'))
        write_lock(lock_file, lock)
        return Order(load_stack(stack_file), stack_file, lock_file, (PLATFORM,), (RELEASE,))


FIRST = (["torch 2.9.1+cu130", "demo-jinja 2.1"], ["libnvidia-one 580.1-1", "cuda-two 13.0-1"])
SECOND = (["torch 2.9.1+cu130", "demo-jinja 2.2"], ["libnvidia-one 580.1-1", "cuda-two 13.0-1", "cuda-three 13.0-1"])


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Signer]]:
    """A keyring with the keys of NVIDIA, of the site and of a stranger, and one that is expired."""
    home = Path(f"/tmp/bringup-test-gpg-{os.getpid()}")
    home.mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNUPGHOME", str(home))
        gpg = ["gpg", "--batch", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback"]
        try:
            for name in ("nvidia", "site", "stranger"):
                subprocess.run(
                    [*gpg, "--quick-gen-key", f"{name}@example.invalid", "ed25519", "sign", "never"], check=True
                )
            old = ["--faked-system-time", "20200101T000000!", "--quick-gen-key", "old@example.invalid"]
            subprocess.run([*gpg, *old, "ed25519", "sign", "1d"], check=True)
            yield {name: open_signer(f"{name}@example.invalid") for name in ("nvidia", "site", "stranger")}
        finally:
            subprocess.run(["gpgconf", "--kill", "all"], check=False)
            shutil.rmtree(home)


@pytest.fixture(scope="module")
def outside(keyring: dict[str, Signer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Indexes and a repository, which every test leaves as they are."""
    work = tmp_path_factory.mktemp("outside")
    with served(work) as site:
        made = World(site, work, keyring["nvidia"])
        made.wheel("pytorch", "torch", "2.9.1+cu130")
        for version in ("2.1", "2.2"):
            made.wheel("default", "demo-jinja", version)
        made.publish(("libnvidia-one", "580.1-1"), ("cuda-two", "13.0-1"), ("cuda-three", "13.0-1"))
        yield made


@pytest.fixture
def world(outside: World, tmp_path: Path) -> World:
    """The same, with a directory of the test's own for stacks and bundles."""
    work = tmp_path / "work"
    work.mkdir()
    return World(outside.site, work, outside.theirs, dict(outside.packages), dict(outside.wheels))


def make(world: World, directory: Path, order: Order, signer: Signer | None, **options: Any) -> Written:
    return write_bundle(directory, order, world.sources, world.repositories, signer, **options)


def problems(directory: Path, **options: Any) -> list[tuple[str, str]]:
    return [(problem.path, problem.what) for problem in check_bundle(directory, **options).problems]


def test_bundle_is_whole_and_a_second_call_changes_nothing(
    world: World, keyring: dict[str, Signer], tmp_path: Path
) -> None:
    directory, order = tmp_path / "bundle", world.order("demo", *FIRST)
    first = make(world, directory, order, keyring["site"])
    assert set(first.fetched) == {
        "wheels/pytorch/simple/torch/torch-2.9.1+cu130-py3-none-any.whl",
        "wheels/default/simple/demo-jinja/demo_jinja-2.1-py3-none-any.whl",
        f"{APT}/libnvidia-one_580.1-1_amd64.deb",
        f"{APT}/cuda-two_13.0-1_amd64.deb",
    }
    assert first.sent_bytes == first.size_bytes == sum((directory / path).stat().st_size for path in first.fetched)
    assert problems(directory) == []
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}
    again = make(world, directory, order, keyring["site"])
    assert (again.fetched, again.sent_bytes, again.reused, again.changed, again.removed) == ((), 0, 4, (), ())
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()} == before
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=directory, check=True)


def test_everybody_can_read_it_whatever_the_umask(world: World, keyring: dict[str, Signer], tmp_path: Path) -> None:
    directory, old = tmp_path / "bundle", os.umask(0o077)
    try:
        make(world, directory, world.order("demo", *FIRST), keyring["site"])
    finally:
        os.umask(old)
    modes = {path.is_dir(): set[int]() for path in directory.rglob("*")}
    for path in directory.rglob("*"):
        modes[path.is_dir()].add(path.stat().st_mode & 0o777)
    assert modes == {True: {0o755}, False: {0o644}}


def test_an_index_made_of_it_resolves_to_the_locked_files(
    world: World, keyring: dict[str, Signer], tmp_path: Path
) -> None:
    directory = world.site.root / tmp_path.name
    make(world, directory, world.order("demo", *FIRST), keyring["site"])
    base = f"{world.site.url}/{tmp_path.name}/wheels"
    shown = Sources({"pytorch": Source(f"{base}/pytorch/simple")}, DefaultIndex(Source(f"{base}/default/simple")))
    wanted = [world.wheels[name] for name in FIRST[0]]
    assert set(locate(wanted, PLATFORM, shown)) == {file.file for file in wanted}


def test_release_file_names_the_indexes_by_hash_and_no_trusted_key(
    world: World, keyring: dict[str, Signer], tmp_path: Path
) -> None:
    directory = tmp_path / "bundle"
    make(world, directory, world.order("demo", *FIRST), keyring["site"])
    text = (directory / APT / "InRelease").read_text()
    packages = (directory / APT / "Packages").read_bytes()
    digest = hashlib.sha256(packages).hexdigest()
    assert f" {digest} {len(packages)} Packages\n" in text
    assert "Acquire-By-Hash: yes\n" in text
    assert "Origin: NVIDIA\n" in text
    assert (directory / APT / "by-hash" / "SHA256" / digest).read_bytes() == packages
    assert re.findall(rb"(?m)^Filename: (.*)$", packages) == [
        b"./cuda-two_13.0-1_amd64.deb",
        b"./libnvidia-one_580.1-1_amd64.deb",
    ]


def test_a_stack_that_differs_costs_what_differs(world: World, keyring: dict[str, Signer], tmp_path: Path) -> None:
    directory = tmp_path / "bundle"
    make(world, directory, world.order("demo", *FIRST), keyring["site"])
    second = make(world, directory, world.order("other", *SECOND), keyring["site"])
    assert set(second.fetched) == {
        "wheels/default/simple/demo-jinja/demo_jinja-2.2-py3-none-any.whl",
        f"{APT}/cuda-three_13.0-1_amd64.deb",
    }
    wanted = world.wheels["demo-jinja 2.2"].size_bytes + world.packages["cuda-three 13.0-1"].size_bytes
    assert second.sent_bytes == wanted
    assert list(second.manifest.stacks) == ["demo", "other"]
    assert problems(directory) == []
    page = (directory / "wheels/default/simple/demo-jinja/index.html").read_text()
    assert page.count("<a href=") == 2
    # What readers of the index before hold by its hash is still there.
    assert len(list((directory / APT / "by-hash/SHA256").iterdir())) == 4


def test_prune_removes_what_no_stack_names_and_nothing_else(
    world: World, keyring: dict[str, Signer], tmp_path: Path
) -> None:
    directory = tmp_path / "bundle"
    make(world, directory, world.order("demo", *FIRST), keyring["site"])
    make(world, directory, world.order("other", *SECOND), keyring["site"])
    # ``other`` moves back to the first wheel; ``demo`` still wants it, nobody wants the second one and cuda-three.
    pruned = make(world, directory, world.order("other", *FIRST), keyring["site"], prune=True)
    assert [path for path in pruned.removed if path.endswith((".whl", ".deb"))] == [
        f"{APT}/cuda-three_13.0-1_amd64.deb",
        "wheels/default/simple/demo-jinja/demo_jinja-2.2-py3-none-any.whl",
    ]
    assert pruned.fetched == ()
    assert problems(directory) == []
    assert not (directory / APT / "cuda-three_13.0-1_amd64.deb").exists()


def test_another_key_signs_everything_anew(world: World, keyring: dict[str, Signer], tmp_path: Path) -> None:
    directory, order = tmp_path / "bundle", world.order("demo", *FIRST)
    make(world, directory, order, keyring["site"])
    made = make(world, directory, order, keyring["stranger"])
    assert made.fetched == ()
    assert {"SHA256SUMS.asc", f"{APT}/InRelease", "keys/site.gpg", "bundle.json"} <= set(made.changed)
    assert check_bundle(directory).key_fingerprint == keyring["stranger"].fingerprint
    assert problems(directory) == []


def test_wheels_alone_need_no_key(world: World, tmp_path: Path) -> None:
    directory, order = tmp_path / "bundle", world.order("demo", *FIRST)
    wheels_only = Order(order.stack, order.stack_file, order.lock_file, (PLATFORM,), ())
    make(world, directory, wheels_only, None)
    assert problems(directory) == []
    assert not (directory / "apt").exists()
    wanted = "ABCD"
    assert problems(directory, fingerprint=wanted) == [
        ("bundle.json", "wanted a bundle signed by ABCD, found one without a signature")
    ]


def test_what_was_fetched_before_an_interruption_is_not_fetched_again(
    world: World, keyring: dict[str, Signer], tmp_path: Path
) -> None:
    directory, order = tmp_path / "bundle", world.order("demo", *FIRST)
    missing = world.site.root / APT / "cuda-two_13.0-1_amd64.deb"
    content = missing.read_bytes()
    missing.unlink()
    try:
        with pytest.raises(BringupError, match="cannot fetch"):
            make(world, directory, order, keyring["site"])
    finally:
        missing.write_bytes(content)
    assert not (directory / "bundle.json").exists()
    made = make(world, directory, order, keyring["site"])
    assert made.fetched == (f"{APT}/cuda-two_13.0-1_amd64.deb",)
    assert problems(directory) == []
    assert not (directory / ".unfinished").exists()


def test_a_file_that_went_bad_in_the_bundle_is_fetched_again(
    world: World, keyring: dict[str, Signer], tmp_path: Path
) -> None:
    directory, order = tmp_path / "bundle", world.order("demo", *FIRST)
    make(world, directory, order, keyring["site"])
    bad = directory / "wheels/default/simple/demo-jinja/demo_jinja-2.1-py3-none-any.whl"
    bad.write_bytes(bad.read_bytes()[:-1] + b"x")
    assert make(world, directory, order, keyring["site"]).fetched == (bad.relative_to(directory).as_posix(),)
    assert problems(directory) == []


def append(path: str, data: bytes = b"x") -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        with (directory / path).open("ab") as file:
            file.write(data)

    return spoil


def remove(path: str) -> Callable[[Path], None]:
    return lambda directory: (directory / path).unlink()


def unlisted(directory: Path) -> None:
    """Take a wheel out of the sums, and off its page with the right sum of the page."""
    page = directory / "wheels/default/simple/demo-jinja/index.html"
    page.write_text("<html></html>")
    digest = hashlib.sha256(page.read_bytes()).hexdigest()
    lines = (directory / "SHA256SUMS").read_text().splitlines(keepends=True)
    kept = [re.sub("^[0-9a-f]+", digest, line) if "demo-jinja/index" in line else line for line in lines]
    (directory / "SHA256SUMS").write_text("".join(kept))


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        pytest.param(
            append("wheels/pytorch/simple/torch/torch-2.9.1+cu130-py3-none-any.whl"),
            {"wheels/pytorch/simple/torch/torch-2.9.1+cu130-py3-none-any.whl"},
            id="wheel changed",
        ),
        pytest.param(
            remove(f"{APT}/cuda-two_13.0-1_amd64.deb"), {f"{APT}/cuda-two_13.0-1_amd64.deb"}, id="package missing"
        ),
        pytest.param(append("stacks/demo.lock.toml", b"# edited\n"), {"stacks/demo.lock.toml"}, id="lock edited"),
        pytest.param(append(f"{APT}/Packages", b"\n\nPackage: evil\n"), {f"{APT}/Packages"}, id="index edited"),
        pytest.param(remove("SHA256SUMS.asc"), {"SHA256SUMS.asc"}, id="signature missing"),
        pytest.param(append("keys/site.gpg"), {"keys/site.gpg"}, id="key edited"),
        pytest.param(
            unlisted,
            {"SHA256SUMS.asc", "wheels/default/simple/demo-jinja/demo_jinja-2.1-py3-none-any.whl"},
            id="sums edited to fit",
        ),
    ],
)
def test_what_is_wrong_is_named(
    world: World,
    keyring: dict[str, Signer],
    tmp_path: Path,
    spoil: Callable[[Path], None],
    found: set[str],
) -> None:
    directory = tmp_path / "bundle"
    make(world, directory, world.order("demo", *FIRST), keyring["site"])
    spoil(directory)
    assert {path for path, _ in problems(directory)} == found


def test_bundle_signed_by_another_than_the_wanted_key(world: World, keyring: dict[str, Signer], tmp_path: Path) -> None:
    directory = tmp_path / "bundle"
    make(world, directory, world.order("demo", *FIRST), keyring["stranger"])
    wanted, found = keyring["site"].fingerprint, keyring["stranger"].fingerprint
    assert ("keys/site.gpg", f"wanted key {wanted}, found {found}") in problems(directory, fingerprint=wanted)


def escaping(order: Order) -> Order:
    """Return an order whose lock names a file outside of its directory."""
    assert order.stack.lock is not None
    text = order.lock_file.read_text().replace("demo_jinja-2.1-py3-none-any.whl", "../../../../evil.whl")
    order.lock_file.write_text(text)
    return Order(load_stack(order.stack_file), order.stack_file, order.lock_file, order.platforms, order.releases)


@pytest.mark.parametrize(
    ("change", "what", "hint"),
    [
        pytest.param(
            lambda order: Order(order.stack, order.stack_file, order.lock_file, ("cp313-aarch64",), ()),
            "the lock of demo holds nothing for cp313-aarch64",
            "run `bringup lock demo --platform cp313-aarch64`",
            id="platform that is not locked",
        ),
        pytest.param(
            lambda order: Order(order.stack, order.stack_file, order.lock_file, (), ("ubuntu2404-x86_64",)),
            "the lock of demo holds nothing for ubuntu2404-x86_64",
            "run `bringup lock demo --release ubuntu2404-x86_64`",
            id="release that is not locked",
        ),
        pytest.param(
            escaping,
            "the lock's file '../../../../evil.whl': wanted a path below its directory, found "
            "'wheels/default/simple/demo-jinja/../../../../evil.whl'",
            None,
            id="lock that leads out of the directory",
        ),
    ],
)
def test_orders_that_cannot_be_carried_out(
    world: World,
    keyring: dict[str, Signer],
    tmp_path: Path,
    change: Callable[[Order], Order],
    what: str,
    hint: str | None,
) -> None:
    directory = tmp_path / "bundle"
    with pytest.raises(InputError) as raised:
        make(world, directory, change(world.order("demo", *FIRST)), keyring["site"])
    assert (raised.value.what, raised.value.hint) == (what, hint)
    assert not (directory / "bundle.json").exists()


def test_packages_without_a_key_are_refused(world: World, keyring: dict[str, Signer], tmp_path: Path) -> None:
    directory, order = tmp_path / "bundle", world.order("demo", *FIRST)
    with pytest.raises(InputError, match="must be signed, and no key is named"):
        make(world, directory, order, None)
    make(world, directory, order, keyring["site"])
    with pytest.raises(InputError) as raised:
        make(world, directory, Order(order.stack, order.stack_file, order.lock_file, (PLATFORM,), ()), None)
    assert raised.value.why == f"the bundle is signed by {keyring['site'].fingerprint}"


def test_repository_signed_by_a_stranger_is_refused(world: World, keyring: dict[str, Signer], tmp_path: Path) -> None:
    stranger = Repositories(f"{world.site.url}/apt", keyring["stranger"].public, keyring["stranger"].fingerprint)
    with pytest.raises(InputError, match="the signature does not hold"):
        write_bundle(tmp_path / "bundle", world.order("demo", *FIRST), world.sources, stranger, keyring["site"])


def test_a_package_that_the_repository_lost_is_named(world: World, keyring: dict[str, Signer], tmp_path: Path) -> None:
    world.packages["cuda-two 13.0-1"] = world.packages["cuda-two 13.0-1"].model_copy(update={"sha256": "0" * 64})
    with pytest.raises(InputError) as raised:
        make(world, tmp_path / "bundle", world.order("demo", *FIRST), keyring["site"])
    assert raised.value.what == f"{world.site.url}/apt/debian12/x86_64/ does not have cuda-two 13.0-1 as it was locked"


def test_two_stacks_that_want_different_bytes_under_one_name(
    world: World, keyring: dict[str, Signer], tmp_path: Path
) -> None:
    directory = tmp_path / "bundle"
    make(world, directory, world.order("demo", *FIRST), keyring["site"])
    other = world.wheels["demo-jinja 2.1"].model_copy(update={"sha256": "1" * 64})
    world.wheels["demo-jinja 2.1"] = other
    with pytest.raises(InputError, match="another stack of this bundle names another file of that name"):
        make(world, directory, world.order("other", *FIRST), keyring["site"])


def test_directory_of_something_else_is_left_alone(world: World, keyring: dict[str, Signer], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(InputError, match="holds something else than a bundle"):
        make(world, tmp_path / "mine", world.order("demo", *FIRST), keyring["site"])
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "nobody@example.invalid", "wanted one secret key for 'nobody@example.invalid', found none", id="none"
        ),
        pytest.param("example.invalid", "for 'example.invalid', found 4", id="several"),
        pytest.param("old@example.invalid", "cannot sign the bundle", id="expired"),
    ],
)
def test_keys_that_do_not_sign(keyring: dict[str, Signer], name: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        open_signer(name)
    assert message in raised.value.what


# ---------------------------------------------------------------- downloads


DATA = os.urandom(300_000)


@dataclass
class Cutting:
    """A server that breaks off after ``limits`` bytes, request by request; None sends what was asked for."""

    limits: list[int | None]
    knows_ranges: bool
    url: str = ""
    asked: list[str | None] = field(default_factory=list)


@contextmanager
def cutting(*limits: int | None, knows_ranges: bool = True) -> Iterator[Cutting]:
    state = Cutting(list(limits), knows_ranges)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append(wanted)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.knows_ranges else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(DATA) - 1}/{len(DATA)}")
            self.send_header("Content-Length", str(len(DATA) - start))
            self.end_headers()
            limit = state.limits.pop(0) if state.limits else None
            self.wfile.write(DATA[start : None if limit is None else start + limit])

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/file"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()


def download(url: str, target: Path, seen: list[int]) -> int:
    digest = hashlib.sha256(DATA).hexdigest()
    with http.client(direct="127.0.0.1") as client:
        return http.download(client, url, target, size=len(DATA), sha256=digest, seen=seen.append)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http.time, "sleep", lambda _: None)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("limits", "knows_ranges", "asked", "sent_bytes"),
    [
        pytest.param([None], True, [None], 300_000, id="at once"),
        pytest.param([100_000], True, [None, "bytes=100000-"], 300_000, id="gone on with"),
        pytest.param([100_000, 50_000], True, [None, "bytes=100000-", "bytes=150000-"], 300_000, id="twice"),
        pytest.param([100_000], False, [None, "bytes=100000-"], 400_000, id="no ranges: anew"),
    ],
)
@pytest.mark.usefixtures("no_pause")
def test_interrupted_downloads(
    tmp_path: Path, limits: list[int | None], knows_ranges: bool, asked: list[str | None], sent_bytes: int
) -> None:
    seen: list[int] = []
    with cutting(*limits, knows_ranges=knows_ranges) as server:
        assert download(server.url, tmp_path / "file", seen) == sent_bytes
    assert server.asked == asked
    assert (tmp_path / "file").read_bytes() == DATA
    assert sum(seen) == len(DATA)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("no_pause")
def test_a_later_call_goes_on_where_a_failed_one_stopped(tmp_path: Path) -> None:
    with cutting(100_000, 50_000, 50_000, None) as server:
        with pytest.raises(BringupError, match="cannot fetch"):
            download(server.url, tmp_path / "file", [])
        assert not (tmp_path / "file").exists()
        assert download(server.url, tmp_path / "file", []) == 100_000
    assert server.asked[-1] == "bytes=200000-"
    assert (tmp_path / "file").read_bytes() == DATA


def test_a_rest_of_another_file_is_not_kept(tmp_path: Path) -> None:
    digest = hashlib.sha256(DATA).hexdigest()
    (tmp_path / f".file.{digest[:12]}.part").write_bytes(b"\0" * 200_000)
    with cutting() as server:
        assert download(server.url, tmp_path / "file", []) == 400_000
    assert server.asked == ["bytes=200000-", None]
    assert (tmp_path / "file").read_bytes() == DATA


def test_login_in_an_address_is_not_shown(tmp_path: Path) -> None:
    with http.client() as client, pytest.raises(BringupError) as raised:
        http.read(client, "http://me:s3cret-word@127.0.0.1:1/InRelease")
    assert raised.value.what == "cannot reach http://127.0.0.1:1/InRelease"
    assert "s3cret-word" not in str(raised.value)


@pytest.mark.parametrize(
    ("index", "url", "login"),
    [
        pytest.param("b", "https://one.example/b/simple/x/x.whl", ("bob", "2"), id="the index that is named"),
        pytest.param("b", "https://one.example/files/x.whl", ("bob", "2"), id="its files elsewhere on its server"),
        pytest.param(None, "https://one.example/a/simple/x/x.whl", ("ann", "1"), id="the nearest"),
        pytest.param("b", "https://other.example/b/x.whl", None, id="another server"),
        pytest.param("open", "https://one.example/open/simple/x.whl", ("ann", "1"), id="one without, on such a server"),
    ],
)
def test_login_of_one_of_several_indexes_on_a_server(
    index: str | None, url: str, login: tuple[str, str] | None
) -> None:
    sources = Sources(
        {
            "a": Source("https://one.example/a/simple", "ann", "1"),
            "b": Source("https://one.example/b/simple", "bob", "2"),
            "open": Source("https://one.example/open/simple"),
        },
        DefaultIndex(),
    )
    found = sources.login(url, index)
    assert (found in (("ann", "1"), ("bob", "2"))) if index == "open" else found == login


# ---------------------------------------------------------------- the command


app = typer.Typer()
app.command()(command)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, BringupError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def site_of_world(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world as the controller's own settings and a stack's indexes name it."""
    monkeypatch.setenv("UV_DEFAULT_INDEX", world.site.index("default"))
    (world.work / "nvidia.gpg").write_bytes(world.theirs.public)
    return world


def ordered(world: World) -> list[str]:
    """Return the arguments that bundle the demo stack from the world."""
    order = world.order("demo", *FIRST)
    text = order.stack_file.read_text()
    for name in ("pytorch", "sglang", "flashinfer"):
        text = text.replace(f"https://{name}.invalid/simple", world.site.index(name))
    order.stack_file.write_text(text)
    apt = ["--apt-url", f"{world.site.url}/apt", "--apt-key", str(world.work / "nvidia.gpg")]
    return [str(order.stack_file), *apt]


def test_command_makes_verifies_and_says_what_the_inventory_needs(
    site_of_world: World, keyring: dict[str, Signer], tmp_path: Path
) -> None:
    directory, words = tmp_path / "bundle", ordered(site_of_world)
    status, out, _ = run(*words, "-o", str(directory), "--key", "site@example.invalid", "--json")
    document = json.loads(out)
    assert status == 0
    assert (document["platforms"], document["releases"]) == ([PLATFORM], [RELEASE])
    assert document["inventory"] == {
        "bringup_stack": f"{directory}/stacks/demo.toml",
        "bringup_indexes": {
            "default": "http://SERVER/wheels/default/simple/",
            "pytorch": "http://SERVER/wheels/pytorch/simple/",
        },
        "bringup_apt_url": {RELEASE: "http://SERVER/apt/debian12/x86_64/"},
        "bringup_apt_key": f"{directory}/keys/site.gpg",
        "bringup_apt_key_fingerprint": keyring["site"].fingerprint,
    }
    # The stack in the bundle is the same stack: a host that has it already has nothing to do.
    assert load_stack(directory / "stacks/demo.toml").digest == document["stack"]["digest"]
    # The key that signed it is the one that goes on signing it.
    status, out, err = run(*words, "-o", str(directory))
    assert (status, "unchanged: fetched 0 files" in err.replace("\n", " ")) == (0, True)
    assert "bringup_apt_url = 'http://SERVER/apt/debian12/x86_64/'\n" in out
    assert run("--verify", "-o", str(directory))[0] == 0
    (directory / "SHA256SUMS.asc").unlink()
    status, out, _ = run("--verify", "-o", str(directory), "--json")
    assert (status, json.loads(out)["problems"]) == (
        1,
        [{"path": "SHA256SUMS.asc", "what": "cannot be read: No such file or directory"}],
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        pytest.param(["demo.toml"], "no directory is named", id="no directory"),
        pytest.param(["-o", "x"], "no stack is named", id="no stack"),
        pytest.param(["x.toml", "-o", "x", "--only", "all"], "--only all: wanted wheels or packages", id="no part"),
        pytest.param(["--verify", "-o", "/nonexistent"], "/nonexistent holds no bundle", id="nothing to verify"),
    ],
)
def test_command_lines_that_say_too_little(words: list[str], what: str) -> None:
    with pytest.raises(InputError) as raised:
        run(*words)
    assert raised.value.what == what


def test_manifest_of_another_schema_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_text('{"schema": 2}')
    with pytest.raises(InputError, match="is not the manifest of a bundle"):
        read_manifest(tmp_path)
