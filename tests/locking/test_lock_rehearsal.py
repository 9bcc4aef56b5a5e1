"""Locks for lab hosts: complete, made once, and never a wheels part that nobody can build again."""

from __future__ import annotations

from pathlib import Path

import pytest
from files.elf_writer import shared_object
from small_index import STACK, X86, Site
from test_lock_packages import DRIVER_580, RELEASE, TOOLKITS, Key, key, serve
from wheel_writer import add_to_index

from bringup import torch_index
from bringup.errors import InputError
from bringup.guard import WheelGuard
from bringup.locking.document import write_lock
from bringup.locking.rehearsal import LabLock, lock_for_lab
from bringup.locking.wheels import Judgement, lock_wheels
from bringup.package_index import DefaultIndex, Source
from bringup.stack import Lock, load_stack, parse_lock, parse_stack

__all__ = ["key"]


@pytest.fixture
def lab(indexes: Site, key: Key, tmp_path: Path) -> Site:
    """Make the site the mirror of a lab; what its stacks also need lies on the controller's default index."""
    (indexes.root / "wheels/default/simple/demo-jinja").rename(tmp_path / "demo-jinja")
    outside = indexes.root / "outside/wheels/default/simple"
    outside.mkdir(parents=True)
    (tmp_path / "demo-jinja").rename(outside / "demo-jinja")
    serve(indexes, key, [*DRIVER_580, *TOOLKITS])
    (tmp_path / "state").mkdir()
    (tmp_path / "state/mirror").symlink_to(indexes.root)
    (tmp_path / "demo.toml").write_text(STACK)
    return indexes


def run(site: Site, key: Key, tmp_path: Path, *, file: str = "demo.toml", **more: object) -> LabLock:
    (tmp_path / "demo.toml").rename(tmp_path / file)
    key_file = tmp_path / "key.asc"
    key_file.write_bytes(key.public)
    return lock_for_lab(
        tmp_path / file,
        tmp_path / "state",
        site.url,
        key_file=key_file,
        key_fingerprint=key.fingerprint,
        default=DefaultIndex(Source(f"{site.url}/outside/wheels/default/simple")),
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRINGUP_WHEEL_CACHE", str(tmp_path / "wheel-cache"))
    monkeypatch.setenv("BRINGUP_STATE", str(tmp_path / "controller"))


def read(path: Path) -> Lock:
    return parse_lock(path.read_text(), source=str(path))


def test_look_alikes_are_locked_against_the_lab_and_the_rest_is_fetched(lab: Site, key: Key, tmp_path: Path) -> None:
    made = run(lab, key, tmp_path)
    assert (made.path, made.changed) == (tmp_path / "state/locks/demo.lock.toml", True)
    lock = read(made.path)
    assert lock.wheels is not None
    assert lock.wheels.resolved_against == "lab"
    assert list(lock.wheels.platforms) == ["cp311-x86_64"]
    assert lock.packages[RELEASE.name].resolved_against == "lab"
    # Lab hosts reach nothing but the mirror, so what came from outside is served by it now.
    assert (lab.root / "wheels/default/simple/demo-jinja/demo_jinja-2.1-py3-none-any.whl").is_file()
    stack = load_stack(tmp_path / "demo.toml", lock_path=made.path)
    assert stack.locked_distributions("cp311-x86_64")["demo-jinja"] == "2.1"


def test_the_lock_is_where_a_stack_in_a_file_of_another_name_looks_for_it(lab: Site, key: Key, tmp_path: Path) -> None:
    made = run(lab, key, tmp_path, file="tried.toml")
    assert made.path == tmp_path / "state/locks/tried.lock.toml"
    assert load_stack(tmp_path / "tried.toml", lock_path=tmp_path / "state/locks").lock == read(made.path)


def test_nothing_is_done_while_nothing_changed(lab: Site, key: Key, tmp_path: Path) -> None:
    made = run(lab, key, tmp_path)
    before = made.path.read_bytes()
    # With the indexes gone, resolving again would fail: nothing is resolved.
    (lab.root / "apt").rename(lab.root / "apt-away")
    (lab.root / "apt").mkdir()
    (lab.root / "apt/debian12").symlink_to(lab.root / "apt-away/debian12")
    assert run(lab, key, tmp_path) == LabLock(made.path, changed=False)
    assert made.path.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda site, here: (here / "demo.toml").write_text(STACK + "\n[verify]\ngpus = 4\n"), id="stack"),
        pytest.param(lambda site, here: site.add("sglang", "demo-helper", "0.10"), id="a wheel of the mirror"),
    ],
)
def test_change_makes_the_lock_anew(lab: Site, key: Key, tmp_path: Path, change: object) -> None:
    made = run(lab, key, tmp_path)
    before = made.path.read_text()
    assert callable(change)
    change(lab, tmp_path)
    assert run(lab, key, tmp_path).changed is True
    assert made.path.read_text() != before


def test_committed_wheels_part_is_kept_as_it_is(lab: Site, key: Key, tmp_path: Path) -> None:
    wanted = parse_stack(STACK, source="demo.toml").model_copy(update={"lock": None})
    from bringup.package_index import Sources

    sources = Sources.of_mirror(
        wanted.python.indexes, lab.url, DefaultIndex(Source(f"{lab.url}/outside/wheels/default/simple"))
    )
    part = lock_wheels(wanted, ["cp311-x86_64", "cp312-x86_64"], sources)
    committed = Lock(schema_=1, stack="demo", wheels=part.locked("index"))
    write_lock(tmp_path / "demo.lock.toml", committed)
    lock = read(run(lab, key, tmp_path).path)
    assert lock.wheels == committed.wheels
    assert lock.packages[RELEASE.name].resolved_against == "lab"


def test_set_that_does_not_fit_is_not_written(lab: Site, key: Key, tmp_path: Path) -> None:
    def judge(stack: object, resolved: object) -> Judgement:
        file = "sgl_kernel-0.3.21+cu130-cp310-abi3-manylinux_2_28_x86_64.whl"
        return Judgement(verdicts={file: "broken-symbol"}, broken=frozenset({file}))

    made = run(lab, key, tmp_path, judge=lambda sources: judge)
    assert [finding.code for finding in made.findings] == ["BU-ENV-306"]
    assert not made.path.exists()


def elf_files(name: str, needed: list[str], undefined: list[str], exports: list[str]) -> dict[str, bytes]:
    return {name: shared_object(needed=needed, undefined=undefined, exports=exports)}


@pytest.mark.parametrize(
    ("undefined", "codes", "verdict"),
    [
        pytest.param("_ZN3c104thisEv", [], "ok", id="what the look-alike torch has"),
        pytest.param("_ZN3c105otherEv", ["BU-ENV-306"], None, id="what it has not"),
    ],
)
def test_look_alikes_are_judged_as_every_wheel(
    lab: Site, key: Key, tmp_path: Path, undefined: str, codes: list[str], verdict: str | None
) -> None:
    version = b"__version__ = '2.9.1+cu130'\ncuda: Optional[str] = '13.0'\n"
    libraries = {
        "torch/version.py": version,
        **elf_files("torch/lib/libc10.so", [], [], ["_ZN3c104thisEv"]),
        **elf_files("torch/lib/libtorch_cpu.so", ["libc10.so"], [], ["_ZN2at4thisEv"]),
        **elf_files("torch/lib/libtorch_python.so", ["libtorch_cpu.so"], [], ["THPVariable"]),
        **elf_files("torch/lib/libtorch_global_deps.so", [], [], ["nothing"]),
    }
    simple = lab.root / "wheels"
    add_to_index(
        simple / "pytorch/simple", "torch", "2.9.1+cu130", libraries,
        requires=("demo-runtime==13.0.96", "demo-jinja>=2"), tag=f"cp311-cp311-{X86}",
    )  # fmt: skip
    add_to_index(
        simple / "sglang/simple", "sgl-kernel", "0.3.21+cu130",
        elf_files("sgl_kernel/ops.abi3.so", ["libc10.so"], [undefined], ["PyInit_ops"]),
        requires=("demo-helper",), tag=f"cp310-abi3-{X86}",
    )  # fmt: skip
    made = run(lab, key, tmp_path, judge=lambda sources: WheelGuard(sources, keeps_torch=False))
    assert [finding.code for finding in made.findings] == codes
    if verdict is not None:
        wheels = read(made.path).wheels
        assert wheels is not None
        verdicts = {file.distribution: file.verdict for file in wheels.platforms["cp311-x86_64"].steps[1].files}
        assert verdicts == {"demo-helper": None, "sgl-kernel": verdict}
    # A look-alike must not tell what a real torch has.
    assert torch_index.added_files() == []


def test_state_directory_without_a_mirror(tmp_path: Path, key: Key) -> None:
    (tmp_path / "demo.toml").write_text(STACK)
    with pytest.raises(InputError) as raised:
        lock_for_lab(
            tmp_path / "demo.toml", tmp_path / "state", "http://127.0.0.1:9",
            key_file=tmp_path / "key.asc", key_fingerprint=key.fingerprint,
        )  # fmt: skip
    assert raised.value.what == f"no package mirror in {tmp_path}/state/mirror"
    assert raised.value.hint == "run `bringup lab up`"
