"""Stacks and locks: what a person may write, and the words for everything else."""

# ruff: noqa: E501 (a row of a table stays one line)

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tomlkit

from bringup import paths
from bringup.errors import InputError
from bringup.stack import (
    Lock,
    Stack,
    is_lock,
    json_schema,
    load_stack,
    lock_path_of,
    parse_lock,
    parse_stack,
    stack_path,
)

SHA256 = "0" * 64


def stack_document() -> dict[str, Any]:
    """Return a small stack that parses; each test changes one thing of it."""
    return {
        "schema": 1,
        "name": "demo",
        "driver": {"branch": "580", "version": "580.95.05"},
        "cuda": {"toolkits": ["12.8", "13.0"], "default": "13.0"},
        "linker": {"libnvrtc.so.13": "13.0"},
        "python": {
            "interpreter": "3.11",
            "cuda": "13.0",
            "index": [{"name": "site", "url": "https://wheels.example/simple/"}],
            "step": [{"name": "torch", "requirements": ["torch==2.9.1+cu130"], "index": "site"}],
        },
    }


def lock_document() -> dict[str, Any]:
    """Return a small lock that parses."""
    wheel = {
        "distribution": "torch",
        "version": "2.9.1+cu130",
        "file": "torch-2.9.1+cu130-cp311-cp311-manylinux_2_28_x86_64.whl",
        "size_bytes": 1,
        "sha256": SHA256,
        "index": "site",
    }
    deb = {
        "name": "nvidia-driver-580-open",
        "version": "580.95.05-0ubuntu1",
        "architecture": "amd64",
        "sha256": SHA256,
        "size_bytes": 1,
        "origin": "NVIDIA",
    }
    return {
        "schema": 1,
        "stack": "demo",
        "wheels": {
            "resolved_against": "index",
            "platform": {"cp311-x86_64": {"step": [{"name": "torch", "files": [wheel]}]}},
        },
        "packages": {
            "debian12-x86_64": {
                "resolved_against": "index",
                "driver": [deb],
                "fabric": {"nvswitch": [dict(deb)]},
                "toolkit": {"13.0": [dict(deb)]},
            }
        },
    }


def put(document: dict[str, Any], path: str, value: object) -> None:
    """Set ``path`` (dots, and numbers for places in a list) of ``document``; None removes it."""
    *parents, last = path.split("/")
    at: Any = document
    for part in parents:
        at = at[int(part)] if part.isdigit() else at.setdefault(part, {})
    if value is None:
        del at[last]
    elif last.isdigit():
        at[int(last)] = value
    else:
        at[last] = value


PATCH = {
    "distribution": "sglang",
    "version": "0.5.9",
    "diff": "x.diff",
    "files": {"sglang/a.py": {"before": SHA256, "after": SHA256}},
}

STACK_ERRORS: list[tuple[str, str, object, str]] = [
    ("no schema", "schema", None, "s.toml: missing required value in 'schema'"),
    ("another schema", "schema", 2, "s.toml: 'schema': Input should be 1, found 2"),
    ("no name", "name", None, "s.toml: missing required value in 'name'"),
    ("upper-case name", "name", "Demo", "s.toml: 'name': wanted lower-case letters, digits, dots, dashes, found 'Demo'"),
    ("unknown section", "drivers", {}, "s.toml: unknown key 'drivers'"),
    ("unknown key", "driver/versoin", "1", "s.toml: unknown key 'driver.versoin'"),
    ("no driver", "driver", None, "s.toml: missing required value in 'driver'"),
    ("driver is text", "driver", "580", "s.toml: 'driver': Input should be a valid dictionary or instance of Driver, found '580'"),
    ("no branch", "driver/branch", None, "s.toml: missing required value in 'driver.branch'"),
    ("branch with a dot", "driver/branch", "580.95", "s.toml: 'driver.branch': wanted a driver branch such as 580, found '580.95'"),
    ("version is no version", "driver/version", "latest", "s.toml: 'driver.version': wanted a driver version such as 580.95.05, found 'latest'"),
    ("version is a number", "driver/version", 580, "s.toml: 'driver.version': Input should be a valid string, found 580"),
    ("version of another branch", "driver/version", "570.1.2", "s.toml: 'driver': wanted a version of branch 580, found 570.1.2"),
    ("minimum is no version", "driver/minimum", "580", "s.toml: 'driver.minimum': wanted a driver version such as 580.95.05, found '580'"),
    ("flavour", "driver/flavour", "free", "s.toml: 'driver.flavour': Input should be 'open' or 'closed', found 'free'"),
    ("driver policy", "driver/policy", "newest", "s.toml: 'driver.policy': Input should be 'exact' or 'at_least', found 'newest'"),
    ("kernel policy", "kernel/policy", "pin", "s.toml: 'kernel.policy': Input should be 'hold' or 'free', found 'pin'"),
    ("fabric policy", "fabric/policy", "yes", "s.toml: 'fabric.policy': Input should be 'auto', 'none' or 'external', found 'yes'"),
    ("no toolkit", "cuda/toolkits", [], "s.toml: 'cuda.toolkits': wanted at least 1, found 0"),
    ("toolkit with a patch number", "cuda/toolkits", ["13.0.2"], "s.toml: 'cuda.toolkits[0]': wanted a CUDA toolkit such as 13.0, found '13.0.2'"),
    ("default toolkit is none of them", "cuda/default", "13.1", "s.toml: 'cuda': default: wanted one of 12.8, 13.0, found 13.1"),
    ("runfile of no toolkit", "cuda/runfiles", {"12.9": {"file": "a.run", "size_bytes": 1, "sha256": SHA256}}, "s.toml: 'cuda': runfiles: 12.9 is not among toolkits"),
    ("empty runfile", "cuda/runfiles", {"12.8": {"file": "a.run", "size_bytes": 0, "sha256": SHA256}}, "s.toml: 'cuda.runfiles.12.8.size_bytes': Input should be greater than 0, found 0"),
    ("runfile hash", "cuda/runfiles", {"12.8": {"file": "a.run", "size_bytes": 1, "sha256": "abc"}}, "s.toml: 'cuda.runfiles.12.8.sha256': wanted 64 hexadecimal digits, found 'abc'"),
    ("linker names no toolkit of the stack", "linker/libnvrtc.so.11", "11.8", "s.toml: linker.libnvrtc.so.11: wanted one of cuda.toolkits (12.8, 13.0), found 11.8"),
    ("linker key is no SONAME", "linker", {"nvrtc": "13.0"}, "s.toml: 'linker.nvrtc': wanted a SONAME such as libnvrtc.so.13, found 'nvrtc'"),
    ("no python", "python", None, "s.toml: missing required value in 'python'"),
    ("interpreter", "python/interpreter", "3.10", "s.toml: 'python.interpreter': wanted 3.11, 3.12, 3.13 or existing:/path, found '3.10'"),
    ("existing at a relative path", "python/interpreter", "existing:venv", "s.toml: 'python.interpreter': wanted 3.11, 3.12, 3.13 or existing:/path, found 'existing:venv'"),
    ("interpreter of a release", "python/interpreters", {"debian13": "3.14"}, "s.toml: 'python.interpreters.debian13': wanted 3.11, 3.12 or 3.13, found '3.14'"),
    ("interpreter of no release", "python/interpreters", {"trixie": "3.13"}, "s.toml: 'python.interpreters.trixie': wanted a release such as debian13, found 'trixie'"),
    ("interpreter of a release beside an existing one", "python", {"interpreter": "existing:/v", "cuda": "13.0", "interpreters": {"debian13": "3.13"}}, "s.toml: 'python': interpreters: wanted none, the environment is an existing one"),
    ("no CUDA of the environment", "python/cuda", None, "s.toml: missing required value in 'python.cuda'"),
    ("no step", "python/step", [], "s.toml: 'python': step: wanted at least one step, or interpreter = 'existing:PATH'"),
    ("a step twice", "python/step", [{"name": "a", "requirements": ["a"]}] * 2, "s.toml: 'python': step: a stands twice"),
    ("an index twice", "python/index", [{"name": "a", "url": "https://a"}] * 2, "s.toml: 'python': index: a stands twice"),
    ("step on an unknown index", "python/step/0/index", "sites", "s.toml: 'python': step torch: wanted one of the indexes default, site, found sites"),
    ("source on an unknown index", "python/step/0/sources", {"numpy": "other"}, "s.toml: 'python': step torch: wanted one of the indexes default, site, found other"),
    ("step without requirements", "python/step/0/requirements", [], "s.toml: 'python.step[0].requirements': wanted at least 1, found 0"),
    ("requirement", "python/step/0/requirements", ["torch=2"], "s.toml: 'python.step[0].requirements[0]': wanted a requirement such as torch==2.9.1+cu130:"),
    ("index without a scheme", "python/index/0/url", "wheels.example", "s.toml: 'python.index[0].url': wanted an http or https URL, found 'wheels.example'"),
    ("credentials in a URL", "python/index/0/url", "https://me:pw@wheels.example", "s.toml: 'python.index[0].url': credentials in the URL: name them with credentials = 'env:NAME'"),
    ("credentials by value", "python/index/0/credentials", "me:pw", "s.toml: 'python.index[0].credentials': wanted env:NAME or file:PATH"),
    ("override without a reason", "python/override", [{"requirement": "a==1", "reason": "needed"}], "s.toml: 'python.override[0].reason': String should have at least 10 characters, found 'needed'"),
    ("override is no requirement", "python/override", [{"requirement": "a b", "reason": "it is needed"}], "s.toml: 'python.override[0].requirement': wanted a requirement such as torch==2.9.1+cu130:"),
    ("patch of no file", "python/patch", [PATCH | {"files": {}}], "s.toml: 'python.patch[0].files': wanted at least 1, found 0"),
    ("patch hash", "python/patch", [PATCH | {"files": {"a.py": {"before": "x", "after": SHA256}}}], "s.toml: 'python.patch[0].files.a.py.before': wanted 64 hexadecimal digits, found 'x'"),
    ("service variable", "service/environment", {"A-B": "1"}, "s.toml: 'service.environment.A-B': wanted a variable name, found 'A-B'"),
    ("no GPU", "verify/gpus", 0, "s.toml: 'verify.gpus': Input should be greater than or equal to 1, found 0"),
    ("profile", "verify/profile", "long", "s.toml: 'verify.profile': Input should be 'quick' or 'full', found 'long'"),
    ("one rank", "verify/cpu_ranks", 1, "s.toml: 'verify.cpu_ranks': Input should be greater than or equal to 2, found 1"),
    ("short limit", "verify/timeout_s", 1, "s.toml: 'verify.timeout_s': Input should be greater than or equal to 10, found 1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "message"), [case[1:] for case in STACK_ERRORS], ids=[case[0] for case in STACK_ERRORS]
)
def test_stack_error_names_file_key_wanted_and_found(path: str, value: object, message: str) -> None:
    document = stack_document()
    put(document, path, value)
    with pytest.raises(InputError) as raised:
        parse_stack(tomlkit.dumps(document), source="s.toml")
    # packaging's own explanation of a requirement follows; its words are not ours.
    found = raised.value.what
    assert found.startswith(message) if message.endswith(":") else found == message


def test_several_errors_come_at_once() -> None:
    document = stack_document()
    put(document, "driver/flavour", "free")
    put(document, "python/cuda", "13")
    with pytest.raises(InputError) as raised:
        parse_stack(tomlkit.dumps(document), source="s.toml")
    assert raised.value.what == (
        "s.toml: 'driver.flavour': Input should be 'open' or 'closed', found 'free'; "
        "'python.cuda': wanted a CUDA toolkit such as 13.0, found '13'"
    )


LOCK_ERRORS: list[tuple[str, str, object, str]] = [
    ("no schema", "schema", None, "l.toml: missing required value in 'schema'"),
    ("no stack", "stack", None, "l.toml: missing required value in 'stack'"),
    ("unknown part", "debs", {}, "l.toml: unknown key 'debs'"),
    ("resolved against", "wheels/resolved_against", "mirror", "l.toml: 'wheels.resolved_against': Input should be 'index' or 'lab', found 'mirror'"),
    ("a URL", "wheels/platform/cp311-x86_64/step/0/files/0/url", "https://x", "l.toml: unknown key 'wheels.platform.cp311-x86_64.step[0].files[0].url'"),
    ("no size", "wheels/platform/cp311-x86_64/step/0/files/0/size_bytes", None, "l.toml: missing required value in 'wheels.platform.cp311-x86_64.step[0].files[0].size_bytes'"),
    ("hash", "wheels/platform/cp311-x86_64/step/0/files/0/sha256", "sha256:1", "l.toml: 'wheels.platform.cp311-x86_64.step[0].files[0].sha256': wanted 64 hexadecimal digits, found 'sha256:1'"),
    ("version", "wheels/platform/cp311-x86_64/step/0/files/0/version", "new", "l.toml: 'wheels.platform.cp311-x86_64.step[0].files[0].version': wanted a version such as 2.9.1+cu130, found 'new'"),
    ("fabric kind", "packages/debian12-x86_64/fabric/nvlink9", [], "l.toml: 'packages.debian12-x86_64.fabric.nvlink9': Input should be 'nvswitch' or 'nvlink5', found 'nvlink9'"),
    ("package without origin", "packages/debian12-x86_64/driver/0/origin", None, "l.toml: missing required value in 'packages.debian12-x86_64.driver[0].origin'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "message"), [case[1:] for case in LOCK_ERRORS], ids=[case[0] for case in LOCK_ERRORS]
)
def test_lock_error_names_file_key_wanted_and_found(path: str, value: object, message: str) -> None:
    document = lock_document()
    put(document, path, value)
    with pytest.raises(InputError) as raised:
        parse_lock(tomlkit.dumps(document), source="l.toml")
    assert raised.value.what == message


@pytest.mark.parametrize(
    ("text", "what"),
    [
        pytest.param("name = ", "s.toml: not TOML", id="not TOML"),
        pytest.param("", "s.toml: missing required value in 'schema'", id="empty"),
    ],
)
def test_text_that_is_no_stack(text: str, what: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_stack(text, source="s.toml")
    assert raised.value.what.startswith(what)


def test_missing_file_is_named() -> None:
    with pytest.raises(InputError) as raised:
        load_stack(Path("/nowhere/demo.toml"))
    assert raised.value.what == "cannot read /nowhere/demo.toml"
    assert raised.value.hint == "name a stack or the path of its file"


def test_lock_of_another_stack_is_refused(tmp_path: Path) -> None:
    document = lock_document()
    document["stack"] = "other"
    (tmp_path / "demo.toml").write_text(tomlkit.dumps(stack_document()))
    (tmp_path / "demo.lock.toml").write_text(tomlkit.dumps(document))
    with pytest.raises(InputError) as raised:
        load_stack(tmp_path / "demo.toml")
    assert raised.value.what == f"{tmp_path}/demo.toml: the lock beside it was made for another stack"
    assert raised.value.why == "wanted stack = 'demo', found 'other'"
    assert raised.value.hint == "run `bringup lock demo`"


@pytest.mark.parametrize(
    ("stack_file", "directory", "lock_file"),
    [
        pytest.param("a/demo.toml", None, "a/demo.lock.toml", id="beside the stack"),
        pytest.param("a/demo.toml", "b/locks", "b/locks/demo.lock.toml", id="in a directory"),
        pytest.param("a/sglang-0.5.9-cu130.toml", None, "a/sglang-0.5.9-cu130.lock.toml", id="name with dots"),
        pytest.param("demo.toml", None, "demo.lock.toml", id="stack without a directory"),
    ],
)
def test_a_lock_has_one_place(stack_file: str, directory: str | None, lock_file: str) -> None:
    found = lock_path_of(Path(stack_file), Path(directory) if directory else None)
    assert found == Path(lock_file)
    assert (is_lock(found), is_lock(Path(stack_file))) == (True, False)


@pytest.mark.parametrize(
    ("lock_path", "has_lock"),
    [
        pytest.param(None, True, id="beside the stack"),
        pytest.param("locks", True, id="a directory of locks"),
        pytest.param("locks/demo.lock.toml", True, id="a file in it"),
        pytest.param("empty", False, id="a directory without it"),
        pytest.param("gone.toml", False, id="a file that is not there"),
    ],
)
def test_stack_reads_the_lock_that_is_named(tmp_path: Path, lock_path: str | None, has_lock: bool) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "demo.toml").write_text(tomlkit.dumps(stack_document()))
    for directory in (None, tmp_path / "locks"):
        lock_path_of(tmp_path / "demo.toml", directory).write_text(tomlkit.dumps(lock_document()))
    stack = load_stack(tmp_path / "demo.toml", lock_path=tmp_path / lock_path if lock_path else None)
    assert (stack.lock is not None) is has_lock


def test_a_stack_is_named_or_a_path() -> None:
    assert stack_path("lab") == paths.stacks() / "lab.toml"
    assert stack_path("over/there.toml") == Path("over/there.toml")
    with pytest.raises(InputError) as raised:
        stack_path("sglang-cu130.lock")
    assert raised.value.what == "no stack is called 'sglang-cu130.lock'"
    shipped = "lab, sglang-0.5.9-cu130, sglang-cu130"
    assert raised.value.hint == f"bringup ships {shipped}; or name the path of a .toml file"


def test_stack_reads_the_lock_beside_it(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text(tomlkit.dumps(stack_document()))
    assert load_stack(tmp_path / "demo.toml").lock is None
    (tmp_path / "demo.lock.toml").write_text(tomlkit.dumps(lock_document()))
    stack = load_stack(tmp_path / "demo.toml")
    assert stack.locked_distributions("cp311-x86_64") == {"torch": "2.9.1+cu130"}
    assert stack.locked_steps("cp312-x86_64") is None
    packages = stack.locked_packages("debian12-x86_64")
    assert packages is not None
    assert [package.name for package in packages.driver] == ["nvidia-driver-580-open"]
    assert stack.locked_packages("debian13-x86_64") is None


def _stack(**changes: object) -> Any:
    document, lock = stack_document(), lock_document()
    for path, value in changes.items():
        put(lock if path.startswith("wheels") else document, path.replace("__", "/"), value)
    return parse_stack(tomlkit.dumps(document), source="s.toml", lock=parse_lock(tomlkit.dumps(lock), source="l.toml"))


FILE = "wheels__platform__cp311-x86_64__step__0__files__0__"


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        pytest.param({}, True, id="nothing"),
        pytest.param({"description": "words"}, True, id="description"),
        pytest.param({"driver__version": "580.159.04"}, True, id="driver"),
        pytest.param({"service__environment": {"A": "1"}}, True, id="service variables"),
        pytest.param({FILE + "verdict": "ok"}, True, id="verdict"),
        pytest.param({FILE + "index": "default"}, True, id="where a file came from"),
        pytest.param({FILE + "sha256": "1" * 64}, False, id="hash of a file"),
        pytest.param({FILE + "file": "torch-2.9.1+cu130-1-cp311-cp311-linux_x86_64.whl"}, False, id="name of a file"),
        pytest.param({"python__patch": [PATCH]}, False, id="patch"),
    ],
)
def test_environment_digest_depends_on_files_and_patches_alone(changes: dict[str, object], is_same: bool) -> None:
    assert (_stack(**changes).env_digest("cp311-x86_64") == _stack().env_digest("cp311-x86_64")) is is_same


def test_environment_digest_of_what_is_not_locked_is_none() -> None:
    assert _stack().env_digest("cp312-x86_64") is None
    assert _stack(python__interpreter="existing:/opt/venv").env_digest("cp311-x86_64") is None


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        pytest.param({"description": "words"}, True, id="description"),
        pytest.param({"driver__version": "580.159.04"}, False, id="driver"),
        pytest.param({"python__interpreters": {}}, True, id="no interpreter of a release"),
        pytest.param({"python__interpreters": {"debian13": "3.13"}}, False, id="interpreter of a release"),
        pytest.param({FILE + "sha256": "1" * 64}, False, id="locked file"),
        pytest.param({"verify__gpus": 4}, False, id="verify"),
    ],
)
def test_stack_digest_covers_all_that_is_wanted(changes: dict[str, object], is_same: bool) -> None:
    assert (_stack(**changes).digest == _stack().digest) is is_same


SHIPPED = sorted(path for path in paths.stacks().glob("*.toml") if not path.name.endswith(".lock.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_stack_parses_and_its_parts_agree(path: Path) -> None:
    stack = load_stack(path)
    assert stack.name == path.stem
    assert set(stack.linker.values()) <= set(stack.cuda.toolkits)
    for patch in stack.python.patches:
        assert (path.parent / patch.diff).is_file()


def test_only_the_stack_of_real_wheels_has_a_committed_lock() -> None:
    locks = {path.name for path in paths.stacks().glob("*.lock.toml")}
    assert locks == {"sglang-cu130.lock.toml"}
    lock = load_stack(paths.stacks() / "sglang-cu130.toml").lock
    assert lock is not None
    assert lock.wheels is not None
    assert lock.wheels.resolved_against == "index"
    assert lock.packages == {}
    assert sorted(lock.wheels.platforms) == [
        "cp311-aarch64", "cp311-x86_64", "cp312-aarch64", "cp312-x86_64", "cp313-aarch64", "cp313-x86_64"
    ]  # fmt: skip


def test_a_committed_lock_names_no_index_address() -> None:
    text = (paths.stacks() / "sglang-cu130.lock.toml").read_text()
    assert "://" not in text


REFERENCE = paths.root() / "docs" / "reference"


@pytest.mark.parametrize(("name", "model"), [("stack", Stack), ("lock", Lock)])
def test_committed_schema_is_that_of_the_models(name: str, model: type[Stack] | type[Lock]) -> None:
    """Fails after a change of the models: write ``json_schema(model)`` to the file, sorted, indented by one."""
    committed = (REFERENCE / f"{name}.schema.json").read_text()
    assert committed == json.dumps(json_schema(model), indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_stack_and_lock_fit_the_schemas(path: Path) -> None:
    for file, name in ((path, "stack"), (path.with_name(f"{path.stem}.lock.toml"), "lock")):
        if file.is_file():
            document = json.loads(json.dumps(tomllib.loads(file.read_text()), default=str))
            jsonschema.validate(document, json.loads((REFERENCE / f"{name}.schema.json").read_text()))


@pytest.mark.parametrize(
    ("path", "value"),
    [("driver/branch", "580.95"), ("python/index/0/url", 1), ("verify/gpus", 0), ("drivers", {}), ("schema", 2)],
)
def test_schema_refuses_what_the_models_refuse(path: str, value: object) -> None:
    schema = json.loads((REFERENCE / "stack.schema.json").read_text())
    document = stack_document()
    jsonschema.validate(document, schema)
    put(document, path, value)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


def test_patch_of_the_shipped_stack_has_the_hashes_of_the_look_alike() -> None:
    (patch,) = load_stack(paths.stacks() / "sglang-0.5.9-cu130.toml").python.patches
    tool = paths.host_script("host_env")
    hunks = tool.parse_diff((paths.stacks() / patch.diff).read_text())
    assert set(hunks) == set(patch.files) == {"flashinfer/jit/env.py"}
    before = (paths.data() / "lab/wheels/templates/flashinfer_env.py.j2").read_bytes()
    after = tool.patched(before, hunks["flashinfer/jit/env.py"], "flashinfer/jit/env.py")
    expected = patch.files["flashinfer/jit/env.py"]
    assert (hashlib.sha256(before).hexdigest(), hashlib.sha256(after).hexdigest()) == (expected.before, expected.after)
    assert b"startswith" in before
    assert b"startswith" not in after
