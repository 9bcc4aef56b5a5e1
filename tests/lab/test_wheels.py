"""The lab's wheel indexes: what is in them, and what really happens when the look-alikes are loaded."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from bringup.lab import debs_recipe, mirror, mirror_elf, wheels, wheels_pack

CHECK_IB = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
CHECK_JB = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"
SYM_NE = "_ZNK3c106SymInt6sym_neERKS0_"
MAYBE_INT = "_ZNK3c106SymInt22maybe_as_int_slow_pathEv"


@pytest.fixture(scope="session")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return every index, one folder each; kept between runs where the tests' cache can be written."""
    kept = Path(os.environ.get("BRINGUP_TEST_CACHE") or "/var/cache/bringup-tests")
    place = mirror.cache_dir(kept / "lab") if os.geteuid() == 0 else tmp_path_factory.mktemp("cache")
    with mirror.hold_cache(place) as held:
        return wheels.build(held, lambda _: None)


def unpacked(index: Path, into: Path, *names: str) -> Path:
    for name in names:
        (found,) = index.glob(f"{name}-{wheels_pack.BUILD_TAG}-*.whl")
        with zipfile.ZipFile(found) as archive:
            archive.extractall(into)
    return into


NVIDIA = (
    "nvidia_cublas-13.0.0.19",
    "nvidia_cuda_cupti-13.0.48",
    "nvidia_cuda_nvrtc-13.0.48",
    "nvidia_cuda_runtime-13.0.48",
    "nvidia_cufft-12.0.0.15",
    "nvidia_cufile-1.15.0.42",
    "nvidia_curand-10.4.0.35",
    "nvidia_cusolver-12.0.3.29",
    "nvidia_cusparse-12.6.2.49",
    "nvidia_cusparselt_cu13-0.8.0",
    "nvidia_nvjitlink-13.0.39",
)
OF_TORCH = {
    "2.8.0": ("nvidia_cudnn_cu13-9.13.0.50", "nvidia_nccl_cu13-2.27.7"),
    "2.9.1": ("nvidia_cudnn_cu13-9.13.0.50", "nvidia_nccl_cu13-2.27.7", "nvidia_nvshmem_cu13-3.3.24"),
    "2.10.0": ("nvidia_cudnn_cu13-9.15.1.9", "nvidia_nccl_cu13-2.28.9", "nvidia_nvshmem_cu13-3.4.5"),
}


@pytest.fixture(scope="session")
def environment(indexes: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a directory with one torch and what it needs, as installed; a driver's libcuda lies beside it."""

    @cache
    def make(torch: str) -> Path:
        root = tmp_path_factory.mktemp("site")
        unpacked(indexes / "pytorch-cu130", root, f"torch-{torch}+cu130", *NVIDIA, *OF_TORCH[torch])
        library = debs_recipe.Library(path="", soname="libcuda.so.1", exports="libcuda.so").shared_object
        mirror_elf.compile_all({root / "driver/libcuda.so.1": library})
        return root

    return make


def run(code: str, *path: Path, driver: Path | None = None) -> tuple[int, str]:
    """Run ``code`` in a fresh interpreter that sees only ``path``; return its status and what it printed."""
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(str(each) for each in path)}
    if driver:
        variables["LD_LIBRARY_PATH"] = str(driver)
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=variables, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def undefined(output: str) -> str:
    found = re.search(r"undefined symbol: (\S+)", output)
    return found[1] if found else output.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("index", "names"),
    [
        pytest.param(
            "pytorch-cu130",
            {
                *("torch-2.8.0+cu130", "torch-2.9.1+cu130", "torch-2.10.0+cu130"),
                *("torchaudio-2.9.1+cu130", "torchvision-0.24.1+cu130", "triton-3.5.1"),
            },
            id="PyTorch's",
        ),
        pytest.param(
            "sglang-cu130",
            {"sgl_kernel-0.3.17+cu130", "sgl_kernel-0.3.21+cu130", "sgl_kernel-0.3.22+cu130"},
            id="SGLang's",
        ),
        pytest.param(
            "flashinfer",
            {
                *("flashinfer_jit_cache-0.6.4+cu130", "flashinfer_jit_cache-0.6.4+cu129"),
                *("flashinfer_jit_cache-0.6.3+cu130", "flashinfer_jit_cache-0.6.10+cu130"),
            },
            id="flashinfer's",
        ),
        pytest.param(
            "default",
            {
                *("torch-2.9.1", "sgl_kernel-0.3.21", "torchaudio-2.9.1", "torchvision-0.24.1"),
                *("sglang-0.5.9", "torchao-0.9.0", "flashinfer_python-0.6.4", "flashinfer_cubin-0.6.4"),
            },
            id="the public one",
        ),
    ],
)
def test_index_holds(indexes: Path, index: str, names: set[str]) -> None:
    found = {path.name.split(f"-{wheels_pack.BUILD_TAG}-")[0] for path in (indexes / index).glob("*.whl")}
    assert names - found == set()


def test_compiled_caches_are_on_their_own_index_only(indexes: Path) -> None:
    assert list((indexes / "default").glob("flashinfer_jit_cache*")) == []
    assert not (indexes / "default/simple/flashinfer-jit-cache").exists()


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[dict[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links.append({name: value or "" for name, value in attrs})


@pytest.mark.parametrize(
    ("index", "distribution"),
    [("pytorch-cu130", "torch"), ("flashinfer", "flashinfer-jit-cache"), ("default", "sglang")],
)
def test_pages_give_hash_and_metadata(indexes: Path, index: str, distribution: str) -> None:
    page = indexes / index / "simple" / distribution
    parser = _Links()
    parser.feed((page / "index.html").read_text())
    assert parser.links
    for link in parser.links:
        name, sha256 = unquote(link["href"]).split("#sha256=")
        assert "+" not in link["href"]
        assert hashlib.sha256((page / name).read_bytes()).hexdigest() == sha256
        core = (page / f"{name}.metadata").read_bytes()
        assert link["data-core-metadata"] == f"sha256={hashlib.sha256(core).hexdigest()}"
        assert wheels_pack.metadata(page / name).encode() == core


def test_sglang_pins(indexes: Path) -> None:
    (wheel,) = (indexes / "default").glob("sglang-*.whl")
    lines = set(wheels_pack.metadata(wheel).splitlines())
    assert {
        "Requires-Dist: torch==2.9.1",
        "Requires-Dist: flashinfer_python==0.6.3",
        "Requires-Dist: torchao==0.9.0",
        "Requires-Dist: cuda-python==12.9",
        "Requires-Dist: sgl-kernel==0.3.21",
    } <= lines


def test_kernels_require_nothing(indexes: Path) -> None:
    for wheel in (indexes / "sglang-cu130").glob("sgl_kernel-*.whl"):
        assert "Requires-Dist" not in wheels_pack.metadata(wheel)


@pytest.mark.parametrize("version", ["2.8.0", "2.9.1", "2.10.0"])
def test_torch_imports(environment: Callable[[str], Path], version: str) -> None:
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    assert run(code, environment(version)) == (0, f"{version}+cu130 13.0 False\n")


@pytest.mark.parametrize(
    ("torch", "kernel", "missing"),
    [
        pytest.param("2.8.0", "0.3.17", None, id="2.8 with its own"),
        pytest.param("2.9.1", "0.3.17", SYM_NE, id="2.9 with 2.8's"),
        pytest.param("2.10.0", "0.3.17", CHECK_IB, id="2.10 with 2.8's"),
        pytest.param("2.8.0", "0.3.21", MAYBE_INT, id="2.8 with 2.9's"),
        pytest.param("2.9.1", "0.3.21", None, id="2.9 with its own"),
        pytest.param("2.10.0", "0.3.21", CHECK_IB, id="2.10 with 2.9's"),
        pytest.param("2.8.0", "0.3.22", CHECK_JB, id="2.8 with 2.10's"),
        pytest.param("2.9.1", "0.3.22", CHECK_JB, id="2.9 with 2.10's"),
        pytest.param("2.10.0", "0.3.22", None, id="2.10 with its own"),
    ],
)
def test_kernel_loads_with_its_torch_only(
    indexes: Path,
    environment: Callable[[str], Path],
    tmp_path: Path,
    torch: str,
    kernel: str,
    missing: str | None,
) -> None:
    site = environment(torch)
    unpacked(indexes / "sglang-cu130", tmp_path, f"sgl_kernel-{kernel}+cu130")
    code = "import sgl_kernel; print('loaded', sgl_kernel.__version__)"
    status, output = run(code, site, tmp_path, driver=site / "driver")
    if missing is None:
        assert (status, output) == (0, f"loaded {kernel}\n")
    else:
        assert "[sgl_kernel] CRITICAL: Could not load any common_ops library!" in output
        assert undefined(output) == missing


@pytest.mark.parametrize(
    ("torch", "part", "ok"),
    [
        pytest.param("2.10.0", "spatial_ops", True, id="spatial asks for nothing that changed"),
        pytest.param("2.10.0", "flash_ops", False, id="flash checks CUDA calls"),
        pytest.param("2.9.1", "flashmla_ops", True, id="its own torch"),
    ],
)
def test_parts_differ(
    indexes: Path, environment: Callable[[str], Path], tmp_path: Path, torch: str, part: str, ok: bool
) -> None:
    site = environment(torch)
    unpacked(indexes / "sglang-cu130", tmp_path, "sgl_kernel-0.3.21+cu130")
    code = f"import torch, ctypes; ctypes.CDLL({str(tmp_path / 'sgl_kernel' / f'{part}.abi3.so')!r})"
    status, output = run(code, site, driver=site / "driver")
    assert (status == 0) is ok, output


def test_lazy_loading_hides_the_broken_symbol(
    indexes: Path, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    # As with the real wheels: calls are bound through the PLT, so only RTLD_NOW finds out.
    site = environment("2.10.0")
    unpacked(indexes / "sglang-cu130", tmp_path, "sgl_kernel-0.3.21+cu130")
    library = str(tmp_path / "sgl_kernel/sm100/common_ops.abi3.so")
    code = f"import torch, ctypes; ctypes.CDLL('libc.so.6').dlopen({library.encode()!r}, 1) or exit(3)"
    assert run(code, site, driver=site / "driver")[0] == 0


def test_without_a_driver_the_driver_is_named(
    indexes: Path, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    unpacked(indexes / "sglang-cu130", tmp_path, "sgl_kernel-0.3.21+cu130")
    output = run("import sgl_kernel", environment("2.9.1"), tmp_path)[1]
    assert "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory" in output


@pytest.mark.parametrize(
    ("torch", "distribution", "module", "missing"),
    [
        pytest.param("2.9.1", "torchaudio-2.9.1+cu130", "torchaudio", None, id="audio fits"),
        pytest.param("2.10.0", "torchaudio-2.9.1+cu130", "torchaudio", CHECK_IB, id="audio does not"),
        pytest.param("2.9.1", "torchvision-0.24.1+cu130", "torchvision", None, id="vision fits"),
        pytest.param("2.10.0", "torchvision-0.24.1+cu130", "torchvision", CHECK_IB, id="vision does not"),
        pytest.param("2.8.0", "torchvision-0.23.0+cu130", "torchvision", None, id="vision of 2.8"),
        pytest.param("2.10.0", "torchvision-0.25.0+cu130", "torchvision", None, id="vision of 2.10"),
    ],
)
def test_media_extensions(
    indexes: Path,
    environment: Callable[[str], Path],
    tmp_path: Path,
    torch: str,
    distribution: str,
    module: str,
    missing: str | None,
) -> None:
    unpacked(indexes / "pytorch-cu130", tmp_path, distribution)
    status, output = run(f"import {module}; print({module}.__version__)", environment(torch), tmp_path)
    assert (status, output.strip()) == (0, distribution.split("-")[1]) if missing is None else True
    assert missing is None or undefined(output) == missing


def test_torchao_goes_on_without_its_extension(
    indexes: Path, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    unpacked(indexes / "default", tmp_path, "torchao-0.9.0")
    assert run("import torchao; print(torchao.__version__)", environment("2.9.1"), tmp_path) == (0, "0.9.0\n")


def test_public_torch_is_another_cuda_build(indexes: Path) -> None:
    (wheel,) = (indexes / "default").glob("torch-2.9.1-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        version = archive.read("torch/version.py").decode()
    assert '__version__ = "2.9.1+cu128"\n' in version
    assert "nvidia-cuda-runtime-cu12==12.8.90" in wheels_pack.metadata(wheel)


@pytest.mark.parametrize(
    ("python", "cubin", "jit_cache", "bypass", "message"),
    [
        pytest.param("0.6.4", "0.6.4", "0.6.4+cu130", "", None, id="agree"),
        pytest.param("0.6.4", None, None, "", None, id="alone"),
        pytest.param("0.6.4", "0.6.4", "0.6.4+cu129", "", None, id="label compared with nothing"),
        pytest.param("0.6.1", "0.6.1", "0.6.10+cu130", "", None, id="prefix taken for the same"),
        pytest.param(
            "0.6.4",
            "0.6.3",
            None,
            "",
            "RuntimeError: flashinfer-cubin version (0.6.3) does not match flashinfer version (0.6.4)."
            " Please install the same version of both packages."
            " Set FLASHINFER_DISABLE_VERSION_CHECK=1 to bypass this check.",
            id="cubin differs",
        ),
        pytest.param("0.6.4", "0.6.3", None, "1", None, id="bypassed"),
        pytest.param(
            "0.6.4",
            "0.6.4",
            "0.6.3+cu130",
            "",
            "RuntimeError: flashinfer-jit-cache version (0.6.3+cu130) does not match flashinfer version (0.6.4)."
            " Please install the same version of both packages."
            " Set FLASHINFER_DISABLE_VERSION_CHECK=1 to bypass this check.",
            id="cache differs",
        ),
    ],
)
def test_flashinfer_checks_its_siblings(
    indexes: Path,
    environment: Callable[[str], Path],
    tmp_path: Path,
    python: str,
    cubin: str | None,
    jit_cache: str | None,
    bypass: str,
    message: str | None,
) -> None:
    wanted = [f"flashinfer_python-{python}"]
    wanted += [f"flashinfer_cubin-{cubin}"] if cubin else []
    wanted += [f"flashinfer_jit_cache-{jit_cache}"] if jit_cache else []
    unpacked(indexes / "flashinfer", tmp_path, *wanted)
    setting = f"import os; os.environ['FLASHINFER_DISABLE_VERSION_CHECK'] = {bypass!r}; "
    status, output = run(setting + "import flashinfer", environment("2.9.1"), tmp_path)
    assert output.strip().splitlines()[-1:] == ([message] if message else [])
    assert (status == 0) is (message is None)


def test_packing_is_reproducible(tmp_path: Path) -> None:
    sums = set()
    for name in ("one", "two"):
        path = wheels_pack.pack(
            tmp_path / name, name="some-thing", version="1.0+cu130", tag="py3-none-any", files={"some/a.py": b"x = 1\n"}
        )
        assert path.name == "some_thing-1.0+cu130-0lab-py3-none-any.whl"
        sums.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(sums) == 1


def test_built_again_the_bytes_are_the_same(indexes: Path, tmp_path: Path) -> None:
    library = next(each for each in wheels.render() if each.name == "torch").objects[0]
    mirror_elf.compile_all({tmp_path / "one.so": library.shared_object, tmp_path / "two.so": library.shared_object})
    assert (tmp_path / "one.so").read_bytes() == (tmp_path / "two.so").read_bytes()


def test_a_fetched_wheel_is_shown_beside_the_look_alikes(tmp_path: Path) -> None:
    index = tmp_path / "default"
    index.mkdir()
    look_alike = wheels_pack.pack(index, name="einops", version="0.8.1", tag="py3-none-any", files={})
    fetched = look_alike.rename(tmp_path / "einops-0.8.2-py3-none-any.whl")
    wheels_pack.pack(index, name="einops", version="0.8.1", tag="py3-none-any", files={})
    wheels.add(index, [fetched])
    page = (index / "simple/einops/index.html").read_text()
    assert re.findall(r">(einops\S+)</a>", page) == [
        "einops-0.8.1-0lab-py3-none-any.whl",
        "einops-0.8.2-py3-none-any.whl",
    ]
    assert [wheels.is_look_alike(path) for path in sorted(index.glob("*.whl"))] == [True, False]
    assert set(json.loads((index / "hashes.json").read_text())) == {path.name for path in index.glob("*.whl")}


def test_symbols_are_those_of_the_real_wheels() -> None:
    only = {
        abi: {symbol.name for symbol in mirror_elf.symbols() if symbol.abis == {abi}} for abi in ("2.8", "2.9", "2.10")
    }
    assert only["2.8"] == {SYM_NE}
    assert CHECK_JB in only["2.10"]
    assert CHECK_IB in mirror_elf.asked_by("kernel29.common")
    assert CHECK_IB in mirror_elf.exported_by("libc10_cuda.so", "2.8")
    assert CHECK_IB not in mirror_elf.exported_by("libc10_cuda.so", "2.10")
