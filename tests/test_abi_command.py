"""``bringup abi`` and the lock's guard at their doors: what they say, write and exit with. No test needs a network."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import typer
from files.elf_writer import shared_object
from typer.testing import CliRunner
from wheel_writer import add_to_index, write_wheel

from bringup import paths, torch_index
from bringup.abi import TorchIndex, release_of
from bringup.commands import abi
from bringup.commands.lock import lock
from bringup.errors import BringupError, HostError, InputError

CHECK_OLD = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
CHECK_NEW = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"
LOGGER = "_ZN3c1013MessageLoggerC1EPKcii"
DEMANGLED = {
    CHECK_OLD: "c10::cuda::c10_cuda_check_implementation(int, char const*, char const*, int, bool)",
    LOGGER: "c10::MessageLogger::MessageLogger(char const*, int, int)",
}
ALWAYS = "_ZN3c1017RegisterOperators5checkEv"

COMMON = shared_object(needed=["libc10.so", "libc10_cuda.so"], undefined=[CHECK_OLD, LOGGER], exports=["PyInit_x"])
NEWER = shared_object(needed=["libc10_cuda.so"], undefined=[CHECK_NEW], exports=["PyInit_x"])
NEEDS_CUDA_12 = shared_object(needed=["libcudart.so.12", "libtorch.so"], undefined=["aoti_torch_get_data_ptr"])
NEEDS_CUDA_13 = shared_object(needed=["libcudart.so.13"], undefined=["cudaMalloc"])

SCHEMA = json.loads((paths.root() / "docs" / "reference" / "abi.schema.json").read_text())

locking = typer.Typer()
locking.command()(lock)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with an empty index in it, which is the controller's default one."""
    for name in [key for key in os.environ if key.startswith(("UV_", "PIP_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "simple").mkdir()
    monkeypatch.setenv("UV_DEFAULT_INDEX", (tmp_path / "simple").as_uri())
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("BRINGUP_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, app: typer.Typer = abi.app) -> tuple[int, str, str]:
    """Return (exit status, stdout, stderr); an error of ours stays the exception that the command line prints."""
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, BringupError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    if app is abi.app and "--json" in arguments:
        jsonschema.validate(json.loads(result.stdout), SCHEMA)
    return result.exit_code, result.stdout, result.stderr


def kernel(directory: Path, *, requires: tuple[str, ...] = (), data: bytes = COMMON, version: str = "0.3.21") -> str:
    return str(write_wheel(directory, "demo-kernel", version, {"demo_kernel/ops.abi3.so": data}, requires=requires))


# --- check ----------------------------------------------------------------------------------------------


def test_check_names_every_symbol_and_the_torch_that_fits(here):
    status, out, _ = run("check", kernel(here, requires=("torch==2.9.1",)), "--torch", "2.10.0", "--json")
    document = json.loads(out)
    (wheel,) = document["wheels"]
    assert (status, document["schema"], document["command"]) == (1, 1, "abi check")
    assert {key: wheel[key] for key in ("name", "version", "torch", "verdict", "fits_torch", "bytes_fetched")} == {
        "name": "demo-kernel",
        "version": "0.3.21",
        "torch": "2.10.0+cu128",
        "verdict": "broken-symbol",
        "fits_torch": ["2.9.1"],
        "bytes_fetched": 0,
    }
    broken = [f for f in wheel["findings"] if f["kind"] == "broken-symbol"]
    assert {(f["file"], f["symbol"], f["demangled"]) for f in broken} == {
        ("demo_kernel/ops.abi3.so", symbol, text) for symbol, text in DEMANGLED.items()
    }
    assert {tuple(f["provided_by"]) for f in broken} == {("torch 2.8.0", "torch 2.9.1")}
    assert isinstance(wheel["seconds"], float)


def test_check_reads_for_people(here):
    status, out, _ = run("check", kernel(here, requires=("torch==2.9.1",)), "--torch", "2.10.0")
    assert status == 1
    assert out.splitlines()[0] == "demo-kernel 0.3.21 with torch 2.10.0+cu128: broken-symbol"
    for symbol, text in DEMANGLED.items():
        assert f"  undefined symbol: {text}\n    symbol: {symbol}\n    in:     demo_kernel/ops.abi3.so\n" in out
    assert "  fits: torch 2.9.1\n" in out


@pytest.mark.parametrize(
    ("data", "requires", "options", "status", "verdicts"),
    [
        pytest.param(COMMON, ("torch==2.9.1",), ("--torch", "2.9.1"), 0, ["ok"], id="its own torch"),
        pytest.param(COMMON, ("torch==2.9.1",), ("--torch", "2.9"), 0, ["ok"], id="a minor version"),
        pytest.param(COMMON, ("torch==2.9.1",), ("--torch", "2.9.1+cu128"), 0, ["ok"], id="a full version"),
        pytest.param(COMMON, ("torch==2.9.1",), ("--torch", "2.8.0"), 1, ["layout-risk"], id="another minor: refused"),
        pytest.param(COMMON, (), ("--torch", "2.8.0"), 0, ["layout-risk"], id="perhaps built for this one: told"),
        pytest.param(COMMON, (), ("--torch", "2.11.0"), 1, ["broken-symbol"], id="names missing"),
        pytest.param(
            COMMON, ("torch==2.9.1",), (), 0,
            ["layout-risk", "ok", *["broken-symbol"] * 6], id="every known torch, one fits",
        ),
        pytest.param(
            shared_object(needed=["libc10.so"], undefined=["_ZN3c107nowhereEv"]), (), (), 1,
            ["broken-symbol"] * 8, id="every known torch, none fits",
        ),
        pytest.param(
            NEEDS_CUDA_12, (), (), 0, [*["ok-stable"] * 3, *["broken-library"] * 5], id="a CUDA 12 library",
        ),
        pytest.param(NEEDS_CUDA_13, (), ("--torch", "2.10.0"), 1, ["broken-library"], id="CUDA 13 beside CUDA 12"),
        pytest.param(NEEDS_CUDA_13, (), ("--torch", "2.15.0"), 0, ["ok"], id="CUDA 13 beside CUDA 13"),
    ],
)  # fmt: skip
def test_check_exit_status(here, data, requires, options, status, verdicts):
    found, out, _ = run("check", kernel(here, requires=requires, data=data), *options, "--json")
    assert [wheel["verdict"] for wheel in json.loads(out)["wheels"]] == verdicts
    assert found == status


def test_what_the_host_supplies_is_assumed_and_said(here):
    data = shared_object(needed=["libcuda.so.1", "libnuma.so.1", "libc10.so"], undefined=[LOGGER, "cuInit"])
    status, out, _ = run("check", kernel(here, data=data, requires=("torch==2.9.1",)), "--torch", "2.9.1", "--json")
    (wheel,) = json.loads(out)["wheels"]
    assert (status, wheel["verdict"]) == (0, "ok")
    assert {(f["kind"], f["library"]) for f in wheel["findings"]} == {
        ("assumed", "libcuda.so.1"),
        ("assumed", "libnuma.so.1"),
    }


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        pytest.param(
            ("absent==1", "--torch", "2.9.1"), InputError, "no index has a wheel of absent", id="no such wheel"
        ),
        pytest.param(("x.whl", "--torch", "2.9.1"), InputError, "no wheel x.whl", id="no such file"),
        pytest.param(("x.whl", "--torch", "1.13.0"), InputError, "does not have torch 1.13.0", id="unknown torch"),
        pytest.param(("x.whl", "--torch", "2.9.1+cu130"), InputError, r"torch 2.9.1\+cu130", id="unknown CUDA build"),
        pytest.param(("x.whl", "--torch", "2.9.1", "--env", "."), InputError, "exclude one another", id="two sides"),
        pytest.param(("x.whl", "--platform", "cp27-x86_64"), InputError, "not a platform", id="platform"),
        pytest.param(("demo-kernel", "--host", "gpu-01"), InputError, "wanted INVENTORY:HOST", id="no inventory"),
    ],
)
def test_check_cannot_be_done(arguments, error, says):
    with pytest.raises(error, match=says):
        run("check", *arguments)


def test_check_takes_a_requirement_of_the_default_index(here):
    for version, data in (("1.0", COMMON), ("2.0", NEWER)):
        add_to_index(here / "simple", "demo-kernel", version, {"demo_kernel/ops.abi3.so": data})
    found = {}
    for requirement in ("demo-kernel", "demo-kernel<2"):
        _, out, _ = run("check", requirement, "--torch", "2.10.0", "--json")
        found[requirement] = [(w["version"], w["verdict"]) for w in json.loads(out)["wheels"]]
    assert found == {"demo-kernel": [("2.0", "layout-risk")], "demo-kernel<2": [("1.0", "broken-symbol")]}


def test_a_damaged_wheel_is_an_error_and_no_verdict(here):
    path = Path(kernel(here))
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(BringupError, match="not a sound wheel"):
        run("check", str(path), "--torch", "2.9.1")


# --- matrix ---------------------------------------------------------------------------------------------


def test_matrix_counts_missing_names_and_names_wrong_requirements(here):
    for version, data, requires in (
        ("1.0", COMMON, ("torch==2.9.1",)),
        ("1.1", COMMON, ()),
        ("1.2", NEEDS_CUDA_12, ("torch>=2.10",)),
        ("1.3", shared_object(exports=["x"]), ()),
    ):
        add_to_index(here / "simple", "demo-kernel", version, {"demo_kernel/ops.abi3.so": data}, requires=requires)
    status, out, _ = run("matrix", "demo-kernel", "--torch", "2.8.0", "--torch", "2.9.1", "--torch", "2.11.0")
    cells = [
        re.split(r"\s{2,}", text.strip()) for text in out.splitlines() if text.startswith(("wheel", "demo-kernel 1."))
    ]
    assert status == 0
    assert cells[:5] == [
        ["wheel", "requires torch", "2.8.0", "2.9.1", "2.11.0"],
        ["demo-kernel 1.0", "==2.9.1", "okr", "ok", "2"],
        ["demo-kernel 1.1", "-", "okr", "okr", "2"],
        ["demo-kernel 1.2", ">=2.10", "ok", "ok", "okc"],
        ["demo-kernel 1.3", "-", "ok", "ok", "ok"],
    ]
    assert "demo-kernel 1.2 requires torch>=2.10, and breaks on 2.11.0: libcudart.so.12\n" in out


def test_matrix_takes_the_newest_versions_that_fit(here):
    for number in range(9):
        add_to_index(here / "simple", "demo-kernel", f"1.{number}", {"demo_kernel/ops.abi3.so": NEWER})
    _, out, _ = run("matrix", "demo-kernel<1.7", "--versions", "2", "--torch", "2.10.0", "--json")
    document = json.loads(out)
    assert [row["version"] for row in document["rows"]] == ["1.5", "1.6"]
    assert document["torch"] == ["2.10.0+cu128"]
    assert document["rows"][0]["torch"]["2.10.0+cu128"]["missing_symbols"] == []


def test_a_wheel_that_cannot_be_read_does_not_end_the_matrix(here):
    add_to_index(here / "simple", "demo-kernel", "1.0", {"demo_kernel/ops.abi3.so": NEWER})
    broken = add_to_index(here / "simple", "demo-kernel", "1.1", {"demo_kernel/ops.abi3.so": NEWER})
    broken.write_bytes(b"no wheel")
    status, out, _ = run("matrix", "demo-kernel", "--torch", "2.10.0", "--json")
    problems = {row["version"]: row["problem"] for row in json.loads(out)["rows"]}
    assert status == 2
    assert problems["1.0"] is None
    assert "not a sound wheel" in problems["1.1"]


# --- index ----------------------------------------------------------------------------------------------

TORCH_FILES = {
    "torch/lib/libc10.so": shared_object(soname="libc10.so", exports=[LOGGER]),
    "torch/lib/libc10_cuda.so": shared_object(
        soname="libc10_cuda.so", needed=["libc10.so", "libcudart.so.13"], exports=[CHECK_OLD]
    ),
    "torch/lib/libtorch_cpu.so": shared_object(soname="libtorch_cpu.so", needed=["libc10.so"], exports=["a", "b"]),
    "torch/lib/libtorch_python.so": shared_object(needed=["libtorch_cpu.so", "libc10_cuda.so"]),
    "torch/_C.cpython-312-x86_64-linux-gnu.so": shared_object(needed=["libtorch_python.so"], exports=["PyInit__C"]),
}


def torch_files(version: str, cuda: str) -> dict[str, bytes]:
    text = f"__version__ = '{version}'\ndebug = False\ncuda: Optional[str] = '{cuda}'\n"
    return {**TORCH_FILES, "torch/version.py": text.encode()}


@pytest.fixture
def nightly(here) -> None:
    """Put a torch of another CUDA build and its CUDA wheel on the default index."""
    add_to_index(
        here / "simple", "torch", "2.99.0.dev1+cu130", torch_files("2.99.0.dev1+cu130", "13.0"),
        requires=("nvidia-cuda-runtime==13.0.96", "demo-other", "nvidia-extra==1; extra == 'x'"),
        tag="cp312-cp312-manylinux_2_28_x86_64",
    )  # fmt: skip
    add_to_index(
        here / "simple", "nvidia-cuda-runtime", "13.0.96", {"nvidia/cu13/lib/libcudart.so.13": b"a library"},
        tag="py3-none-manylinux2014_x86_64",
    )  # fmt: skip


def test_index_adds_a_build_that_check_then_knows(here, nightly):
    status, out, _ = run("index", "torch==2.99.0.dev1+cu130", "--json")
    (build,) = json.loads(out)["builds"]
    assert status == 0
    assert (build["version"], build["cuda"], build["python"], build["names"]) == (
        "2.99.0.dev1+cu130",
        "13.0",
        "3.12",
        4,
    )
    assert build["brings"] == ["libcudart.so.13"]
    assert [wheel["file"] for wheel in build["cuda_wheels"]] == [
        "nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_x86_64.whl"
    ]
    status, out, _ = run("check", kernel(here), "--torch", "2.99.0.dev1+cu130", "--json")
    assert json.loads(out)["wheels"][0]["fits_torch"] == ["2.8.0", "2.9.1", "2.99.0.dev1"]
    assert "2.99.0.dev1+cu130" in run("index")[1]


def test_index_is_reproducible_and_goes_to_a_file(here, nightly):
    for name in ("one.json.xz", "two.json.xz"):
        run("index", "torch==2.99.0.dev1", "--output", name)
    assert Path("one.json.xz").read_bytes() == Path("two.json.xz").read_bytes()
    (build,) = torch_index.read_index(Path("one.json.xz"))
    assert build.exports["libtorch_cpu.so"] == {"a", "b"}
    assert build.needed["libc10_cuda.so"] == ("libc10.so", "libcudart.so.13")
    assert list(paths.state_dir().glob("**/*.xz")) == []


def test_index_takes_a_file(here, nightly):
    (path,) = (here / "simple" / "torch").glob("*.whl")
    assert run("index", str(path))[0] == 0
    assert TorchIndex(torch_index.known_builds()).find("2.99.0.dev1").cuda == "13.0"
    assert paths.state_dir().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("files", "says"),
    [
        pytest.param(torch_files("2.98.0", "13.0"), "torch/version.py says 2.98.0", id="another version inside"),
        pytest.param({"torch/version.py": b"__version__ = '3.0'"}, "no torch/lib/libtorch_cpu.so", id="no libraries"),
        pytest.param({}, "torch/version.py says None", id="no version file"),
        pytest.param(
            {**torch_files("3.0", "13.0"), "torch/lib/libbad.so": b"\x7fELF"}, "cannot read torch/lib/libbad.so",
            id="unreadable library",
        ),
    ],
)  # fmt: skip
def test_what_is_no_torch_is_not_indexed(here, files, says):
    path = write_wheel(here, "torch", "3.0", files)
    with pytest.raises(BringupError, match=says) as raised:
        run("index", str(path))
    assert says in str(raised.value)


def test_a_damaged_addition_is_named(here):
    directory = paths.state_dir() / "torch-index"
    directory.mkdir(parents=True)
    (directory / "torch-x.json.xz").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"torch-x\.json\.xz is no index of torch exports"):
        run("index")


def test_the_shipped_index_is_small_and_tells_its_sources():
    file = paths.data() / torch_index.SHIPPED
    assert file.stat().st_size < 1_000_000
    builds = torch_index.read_index(file)
    assert [b.version for b in builds] == [
        "2.8.0+cu128", "2.9.1+cu128", "2.10.0+cu128", "2.11.0+cu130",
        "2.12.1+cu130", "2.13.0+cu130", "2.14.1+cu130", "2.15.0+cu132",
    ]  # fmt: skip
    assert all(
        re.fullmatch(r"[0-9a-f]{64}", sha) for b in builds for sha in (b.sha256, *(w.sha256 for w in b.cuda_wheels))
    )
    assert all(b.file.startswith("torch-") and b.size_bytes > 500_000_000 for b in builds)
    assert torch_index.unpack(torch_index.pack(builds)) == builds


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        (CHECK_OLD, {"2.8.0", "2.9.1"}),
        (CHECK_NEW, {"2.10.0", "2.11.0", "2.12.1", "2.13.0"}),
        (LOGGER, {"2.8.0", "2.9.1"}),
        ("torch_new_stable_ivalue", {"2.13.0", "2.14.1", "2.15.0"}),
    ],
)
def test_which_release_has_a_name(name, versions):
    builds = torch_index.read_index(paths.data() / torch_index.SHIPPED)
    assert {b.public for b in builds if any(name in names for names in b.exports.values())} == versions


@pytest.mark.parametrize(
    ("version", "brought", "not_brought"),
    [
        ("2.8.0", {"libcudart.so.12", "libnvrtc.so.12", "libcublasLt.so.12"}, {"libcudart.so.13", "libcusolver.so.11"}),
        ("2.10.0", {"libcudart.so.12", "libnvshmem_host.so.3"}, {"libcudart.so.13"}),
        ("2.11.0", {"libcudart.so.13", "libnvrtc.so.13", "libcufile.so.0"}, {"libcudart.so.12", "libcuda.so.1"}),
        ("2.15.0", {"libcudart.so.13", "libcudnn.so.9", "libcupti.so.13"}, {"libcudart.so.12"}),
    ],
)
def test_which_cuda_libraries_a_release_brings(version, brought, not_brought):
    build = TorchIndex(torch_index.known_builds()).get(version)
    assert build is not None
    assert brought <= release_of(build).brings
    assert not not_brought & release_of(build).brings


# --- beside an environment ------------------------------------------------------------------------------


@pytest.fixture
def environment(here) -> Path:
    """Return an environment with a torch in it, as files: an interpreter, site-packages, libraries."""
    prefix = here / "env"
    site = prefix / "lib" / "python3.12" / "site-packages"
    for path, data in torch_files("2.9.1+cu130", "13.0").items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
    libraries = site / "nvidia" / "cu13" / "lib"
    libraries.mkdir(parents=True)
    (libraries / "libcudart.so.13").write_bytes(shared_object(soname="libcudart.so.13", exports=["cudaMalloc"]))
    for name in ("torch/lib/libc10_cuda.so", "torch/lib/libtorch_python.so"):
        needed = ["libc10.so", "libcudart.so.13"] if "cuda" in name else ["libtorch_cpu.so", "libc10_cuda.so"]
        data = shared_object(
            soname=Path(name).name,
            needed=needed,
            exports=[CHECK_OLD] if "cuda" in name else [],
            rpath="$ORIGIN:$ORIGIN/../../nvidia/cu13/lib",
        )
        (site / name).write_bytes(data)
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python3").symlink_to(os.path.realpath(sys.executable))
    return prefix


@pytest.mark.parametrize(
    ("data", "status", "verdict"),
    [
        pytest.param(COMMON, 0, "ok", id="fits"),
        pytest.param(NEWER, 1, "broken-symbol", id="name missing"),
        pytest.param(NEEDS_CUDA_12, 1, "broken-library", id="library missing"),
    ],
)
def test_check_beside_an_environment(here, environment, data, status, verdict):
    wheel = kernel(here, data=data, requires=("torch==2.9.1",))
    found, out, _ = run("check", wheel, "--env", str(environment), "--json")
    (report,) = json.loads(out)["wheels"]
    assert (found, report["verdict"], report["torch"]) == (status, verdict, "2.9.1+cu130")


def test_an_environment_chooses_the_wheel_of_its_python(here, environment):
    for tag, data in (("cp312-cp312", COMMON), ("cp311-cp311", NEWER)):
        add_to_index(
            here / "simple", "demo-kernel", "1.0", {"demo_kernel/ops.so": data}, tag=f"{tag}-manylinux2014_x86_64"
        )
    (environment / "lib" / "python3.12").rename(environment / "lib" / "python3.11")
    _, out, _ = run("check", "demo-kernel", "--env", str(environment), "--json")
    (report,) = json.loads(out)["wheels"]
    assert (report["file"], report["verdict"]) == (
        "demo_kernel-1.0-cp311-cp311-manylinux2014_x86_64.whl",
        "broken-symbol",
    )


def test_an_environment_without_torch(here):
    (here / "bare" / "lib" / "python3.12" / "site-packages").mkdir(parents=True)
    with pytest.raises(InputError, match="no torch is installed in"):
        run("check", kernel(here), "--env", "bare")


def test_index_reads_an_installed_torch(here, environment):
    _, out, _ = run("index", "--env", str(environment), "--json")
    (build,) = json.loads(out)["builds"]
    assert (build["version"], build["cuda"], build["sha256"], build["names"]) == ("2.9.1+cu130", "13.0", "", 4)
    assert run("check", kernel(here), "--torch", "2.9.1+cu130")[0] == 0


@pytest.mark.parametrize(
    ("python", "machine", "chosen"),
    [
        ("3.12", "x86_64", "demo_kernel-1.0-cp312-cp312-manylinux2014_x86_64.whl"),
        ("3.11", "x86_64", "demo_kernel-1.0-cp311-cp311-manylinux2014_x86_64.whl"),
        ("3.12", "aarch64", "demo_kernel-1.0-cp312-cp312-manylinux2014_aarch64.whl"),
        ("3.11", "aarch64", "demo_kernel-1.0-cp311-cp311-manylinux2014_aarch64.whl"),
    ],
)
def test_python_and_machine_are_those_of_the_environment(here, environment, monkeypatch, python, machine, chosen):
    for each in ("x86_64", "aarch64"):
        for minor in ("311", "312"):
            tag = f"cp{minor}-cp{minor}-manylinux2014_{each}"
            data = {"demo_kernel/ops.so": on_machine(COMMON, each)}
            add_to_index(here / "simple", "demo-kernel", "1.0", data, tag=tag, requires=("torch==2.9.1",))
    turn_into(environment, python, machine, monkeypatch)
    status, out, _ = run("check", "demo-kernel", "--env", str(environment), "--json")
    (report,) = json.loads(out)["wheels"]
    assert (status, report["verdict"], report["file"]) == (0, "ok", chosen)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param((), "manylinux2014_x86_64.whl is for x86_64, env is on aarch64", id="a file"),
        pytest.param(("--platform", "cp312-x86_64"), r"name a wheel for aarch64, or leave --platform out", id="asked"),
    ],
)
def test_a_wheel_for_another_machine_is_not_judged(here, environment, monkeypatch, arguments, says):
    turn_into(environment, "3.12", "aarch64", monkeypatch)
    with pytest.raises(InputError) as raised:
        run("check", kernel(here), "--env", "env", *arguments)
    assert re.search(says, str(raised.value))


def test_an_environment_of_a_python_without_wheels(here, environment, monkeypatch):
    turn_into(environment, "3.9", "x86_64", monkeypatch)
    with pytest.raises(InputError, match=r"no wheel can be chosen for env[\s\S]*it has Python 3.9 on x86_64"):
        run("check", "demo-kernel", "--env", "env")
    # A file is what it is.
    assert run("check", kernel(here, requires=("torch==2.9.1",)), "--env", "env")[0] == 0


def on_machine(data: bytes, machine: str) -> bytes:
    return data[:18] + {"x86_64": b"\x3e\x00", "aarch64": b"\xb7\x00"}[machine] + data[20:]


def turn_into(environment: Path, python: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make of an environment one of another Python on another machine."""
    for path in environment.rglob("*.so*"):
        path.write_bytes(on_machine(path.read_bytes(), machine))
    library = environment / "lib"
    if python != "3.12":
        (library / "python3.12").rename(library / f"python{python}")
    here = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((*here[:4], machine)))


def inventory(here: Path, interpreter: str) -> str:
    """Write an inventory whose one host is this machine, with a stack over an existing environment."""
    (here / "stack.toml").write_text(
        f"""
schema = 1
name = "demo"
[driver]
branch = "580"
version = "580.95.05"
[cuda]
toolkits = ["13.0"]
default = "13.0"
[python]
interpreter = "existing:{interpreter}"
cuda = "13.0"
"""
    )
    (here / "hosts.py").write_text(f'mine = [("@local", {{"bringup_stack": "{here / "stack.toml"}"}})]\n')
    return f"{here / 'hosts.py'}:@local"


def test_check_beside_the_environment_of_a_host(here, environment):
    where = inventory(here, str(environment))
    found, out, _ = run("check", kernel(here, requires=("torch==2.9.1",)), "--host", where, "--json")
    (report,) = json.loads(out)["wheels"]
    assert (found, report["verdict"], report["torch"]) == (0, "ok", "2.9.1+cu130")


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ("hosts.py:absent", InputError, "matches no host"),
        ("absent.py:@local", InputError, "there is no inventory"),
        ("@local", InputError, "wanted INVENTORY:HOST"),
        ("hosts.py:@local", HostError, "could not be read"),
    ],
)
def test_a_host_that_cannot_be_read(here, where, error, says):
    inventory(here, str(here / "nothing"))
    with pytest.raises(error, match=says):
        run("check", kernel(here), "--host", where)


# --- the lock -------------------------------------------------------------------------------------------

STACK = """
schema = 1
name = "demo"

[driver]
branch = "580"
version = "580.95.05"

[cuda]
toolkits = ["12.8"]
default = "12.8"

[python]
interpreter = "3.12"
cuda = "12.8"

[[python.step]]
name = "torch"
requirements = ["torch==TORCH"]

[[python.step]]
name = "kernel"
requirements = ["demo-kernel==0.3.21"]
"""


@pytest.fixture
def stack(here) -> Path:
    """Write torch 2.9.1 and 2.10.0 of the index of exports as wheels, a kernel for the first, and a stack."""
    for version in ("2.9.1", "2.10.0"):
        add_to_index(
            here / "simple", "torch", version, torch_files(f"{version}+cu128", "12.8"),
            tag="cp312-cp312-manylinux_2_28_x86_64",
        )  # fmt: skip
    add_to_index(here / "simple", "demo-kernel", "0.3.21", {"demo_kernel/ops.abi3.so": COMMON})
    return here / "demo.toml"


def lock_it(stack: Path, torch: str, *, more: str = "") -> tuple[int, dict, str]:
    stack.write_text(STACK.replace("TORCH", torch) + more)
    status, out, err = run(str(stack), "--platform", "cp312-x86_64", "--json", app=locking)
    return status, json.loads(out), err


def test_the_lock_refuses_what_would_not_load(stack):
    """The story that the guard is for, with the index of exports alone: no wheel of torch is read."""
    status, document, _ = lock_it(stack, "2.10.0")
    (finding,) = document["findings"]["cp312-x86_64"]
    assert (status, finding["code"], finding["severity"]) == (1, "BU-ENV-306", "error")
    for text in (*DEMANGLED.values(), *DEMANGLED, "demo_kernel-0.3.21", "it fits torch 2.8.0, 2.9.1"):
        assert text in finding["cause"]
    assert not stack.with_name("demo.lock.toml").exists()


def test_a_proposal_names_the_torch_that_fits(stack):
    stack.write_text(STACK.replace("TORCH", "2.10.0"))
    options = (str(stack), "--propose", "--platform", "cp312-x86_64")
    status, out, _ = run(*options, "--json", app=locking)
    document = json.loads(out)
    assert (status, document["proposal"]["changes"]) == (0, {"torch": {"from": "2.10.0", "to": "2.9.1"}})
    assert list(document["tried"]) == ["2.10.0"]
    assert DEMANGLED[LOGGER] in document["tried"]["2.10.0"]
    status, out, err = run(*options, app=locking)
    assert (status, out.split()) == (0, ["torch", "2.10.0", "->", "2.9.1"])
    assert "torch 2.10.0 is given up: demo_kernel-0.3.21" in err


def test_no_proposal_names_every_torch_that_was_tried(stack):
    none = shared_object(needed=["libc10_cuda.so"], undefined=["_ZN3c104noneEv"], exports=["PyInit_x"])
    add_to_index(stack.parent / "simple", "demo-kernel", "0.3.21", {"demo_kernel/ops.abi3.so": none})
    stack.write_text(STACK.replace("TORCH", "2.10.0"))
    status, out, err = run(str(stack), "--propose", "--platform", "cp312-x86_64", app=locking)
    assert (status, out) == (1, "")
    assert "no set was found that fits; tried torch 2.10.0, 2.9.1" in err


def test_the_lock_holds_the_verdict(stack):
    add = STACK.replace('"demo-kernel==0.3.21"', '"demo-kernel==0.3.22"')
    add_to_index(
        stack.parent / "simple",
        "demo-kernel",
        "0.3.22",
        {"demo_kernel/ops.abi3.so": COMMON},
        requires=("torch==2.9.1",),
    )
    stack.write_text(add.replace("TORCH", "2.9.1"))
    status, _, err = run(str(stack), "--platform", "cp312-x86_64", app=locking)
    text = stack.with_name("demo.lock.toml").read_text()
    assert (status, re.findall(r'verdict = "([^"]*)"', text)) == (0, ["ok"])
    assert "reading it once" not in err


def test_an_optional_step_may_break(stack):
    stack.write_text(STACK.replace("TORCH", "2.10.0") + "optional = true\n")
    status, _, _ = run(str(stack), "--platform", "cp312-x86_64", app=locking)
    text = stack.with_name("demo.lock.toml").read_text()
    assert (status, re.findall(r'verdict = "([^"]*)"', text)) == (0, ["optional"])


MORE = """
[[python.step]]
name = "more"
requirements = [MORE]
"""


@pytest.mark.parametrize(
    ("files", "code", "says"),
    [
        pytest.param(
            {"demo-twin": {"demo_kernel/__init__.py": b"x = 1"}, "demo-other": {"demo_kernel/__init__.py": b"x = 2"}},
            "BU-ENV-304", "both the import package demo_kernel", id="one import package twice",
        ),
        pytest.param(
            {"twin-cu12": {"shared/lib.bin": b"12"}, "twin-cu13": {"shared/lib.bin": b"13"}},
            "BU-ENV-305", "write the same 1 files, among them shared/lib.bin", id="twins that write one file",
        ),
    ],
)  # fmt: skip
def test_the_lock_refuses_wheels_that_overwrite_one_another(stack, files, code, says):
    for name, contents in files.items():
        add_to_index(stack.parent / "simple", name, "1.0", contents)
    wanted = ", ".join(f'"{name}==1.0"' for name in files)
    _, document, _ = lock_it(stack, "2.9.1", more=MORE.replace("MORE", wanted))
    found = {finding["code"]: finding["cause"] for finding in document["findings"]["cp312-x86_64"]}
    assert says in found[code]


def test_the_lock_refuses_a_torch_of_another_cuda_build(stack):
    add_to_index(
        stack.parent / "simple", "torch", "2.11.0", torch_files("2.11.0+cu130", "13.0"),
        tag="cp312-cp312-manylinux_2_28_x86_64",
    )  # fmt: skip
    _, document, _ = lock_it(stack, "2.11.0")
    found = {finding["code"]: finding["cause"] for finding in document["findings"]["cp312-x86_64"]}
    assert found["BU-ENV-303"].startswith("torch is built for CUDA 13.0, the stack says 12.8")


def test_a_torch_that_the_index_does_not_know_is_read_once(stack):
    add_to_index(
        stack.parent / "simple", "torch", "2.9.2", torch_files("2.9.2+cu128", "12.8"),
        tag="cp312-cp312-manylinux_2_28_x86_64",
    )  # fmt: skip
    said = [lock_it(stack, "2.9.2")[2].count("reading it once") for _ in range(2)]
    assert said == [1, 0]
    assert [path.name for path in torch_index.added_files()] == ["torch-2.9.2+cu128-x86_64.json.xz"]


def test_a_wheel_that_cannot_be_read_is_not_locked(stack):
    (path,) = (stack.parent / "simple" / "demo-kernel").glob("*.whl")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"demo_kernel/ops.abi3.so", b"../../ernel/ops.abi3.so"))
    page = path.with_name("index.html")
    page.write_text(re.sub(r"#sha256=\w+", "", page.read_text()))
    stack.write_text(STACK.replace("TORCH", "2.9.1"))
    with pytest.raises(BringupError, match=r"not a sound wheel|has no wheel"):
        run(str(stack), "--platform", "cp312-x86_64", app=locking)
    assert not stack.with_name("demo.lock.toml").exists()


# --- the whole program ----------------------------------------------------------------------------------


def test_exit_status_2_is_for_what_could_not_be_done(here):
    done = subprocess.run(
        [sys.executable, "-m", "bringup.cli", "abi", "check", "x.whl", "--torch", "0.1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: the index of exports does not have torch 0.1 for x86_64\n")
    assert "hint: add it with `bringup abi index torch==0.1`" in done.stderr


def test_a_check_loads_no_more_than_it_needs():
    """A second is all that it may take, and models of stacks and hosts take a third of one to load."""
    heavy = ("pydantic", "pyinfra", "bringup.stack", "bringup.host_state", "bringup.worker", "rich.markdown")
    code = f"""
import sys
from bringup import torch_index, wheels
from bringup.commands import abi
from bringup.package_index import Sources, default_index
print([name for name in {heavy!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("package", ["bringup.abi", "bringup.locking"])
def test_what_is_loaded_on_demand_is_there(package):
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_of_each_torch_the_build_for_cuda_tells_what_fits(here):
    shipped = TorchIndex(torch_index.known_builds()).get("2.13.0")
    assert shipped is not None
    torch_index.add(dataclasses.replace(shipped, version="2.13.0+cpu", cuda=None))
    index = TorchIndex(torch_index.known_builds())
    assert [build.version for build in index.builds if build.public == "2.13.0"] == ["2.13.0+cpu", shipped.version]
    assert [each.version for each in index.catalogue if each.version.startswith("2.13.0")] == [shipped.version]
    assert index.find("2.13.0+cpu").cuda is None
