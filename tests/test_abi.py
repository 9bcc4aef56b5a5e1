"""The judge: every rule that a wrong verdict once taught, levels, variants, layout, and an installed environment."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bringup.abi import (
    Distribution,
    Host,
    Level,
    Library,
    SharedFile,
    TorchRelease,
    belongs_to_torch,
    brought_libraries,
    declared_torch,
    demangle,
    judge,
    judge_environment,
    parse_environment,
    policy_of,
    promised_glibc,
    supplier,
    worst,
)
from bringup.errors import HostError, InputError
from bringup.paths import host_script

CHECK_OLD = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
CHECK_NEW = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"
LOGGER = "_ZN3c1013MessageLoggerC1EPKcii"
ALWAYS = "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
STABLE = "aoti_torch_get_data_ptr"
STABLE_NEW = "torch_new_stable_ivalue"
STD_STRING = "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE10_M_disposeEv"


def release(version: str, cuda: str, *c10: str, python: str | None = None, host: Host | None = None) -> TorchRelease:
    major = cuda.split(".")[0]
    needed = {
        "libtorch.so": ("libtorch_cpu.so", "libtorch_cuda.so"),
        "libtorch_cpu.so": ("libc10.so", "libc.so.6"),
        "libtorch_cuda.so": ("libc10_cuda.so", f"libcublas.so.{major}", "libnccl.so.2"),
        "libtorch_python.so": ("libtorch.so", f"libcudart.so.{major}"),
        "libc10.so": ("libstdc++.so.6",),
        "libc10_cuda.so": ("libc10.so", f"libcudart.so.{major}"),
    }
    exports = {name: frozenset[str]() for name in needed}
    exports["libc10.so"] = frozenset(c10)
    exports["libtorch_cpu.so"] = frozenset({STABLE, STD_STRING} if version < "2.10" else {STABLE})
    flat = [name for names in needed.values() for name in names]
    return TorchRelease(version, cuda, exports, needed, brought_libraries(flat, cuda), python, host)


V28 = release("2.8.0+cu128", "12.8", ALWAYS, CHECK_OLD, LOGGER, "_ZNK3c106SymInt6sym_neERKS0_")
V29 = release("2.9.1+cu128", "12.8", ALWAYS, CHECK_OLD, LOGGER, "_ZNK3c106SymInt16sym_ne_slow_pathERKS0_")
V210 = release("2.10.0+cu128", "12.8", ALWAYS, CHECK_NEW)
V211 = release("2.11.0+cu130", "13.0", ALWAYS, CHECK_NEW, STABLE_NEW)
CATALOGUE = (V28, V29, V210, V211)
TORCH_LIBRARIES = ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so")


def extension(path: str, *undefined: str, needed: tuple[str, ...] = TORCH_LIBRARIES, **facts) -> SharedFile:
    return SharedFile(path=path, needed=needed, undefined=frozenset(undefined), **facts)


def wheel(*files: SharedFile, name: str = "some-kernels", version: str = "1.0", **facts) -> Distribution:
    return Distribution(name, version, files, **facts)


def kinds(verdict) -> list[tuple[str, str, str | None]]:
    return sorted((f.kind, Path(f.file).name, f.symbol or f.library) for f in verdict.findings)


def levels(verdict) -> dict[str, tuple[str, str | None]]:
    return {f.path: (f.level.value, f.effect.value if f.effect else None) for f in verdict.files}


# --- the mission's story --------------------------------------------------------------------------------

SGL_KERNEL = wheel(
    *(
        extension(
            f"sgl_kernel/{variant}/common_ops.abi3.so",
            ALWAYS,
            CHECK_OLD,
            LOGGER,
            "_ZNK3c106SymInt16sym_ne_slow_pathERKS0_",
        )
        for variant in ("sm90", "sm100")
    ),
    extension("sgl_kernel/spatial_ops.abi3.so", ALWAYS),
    name="sgl-kernel",
    version="0.3.21",
)


@pytest.mark.parametrize(
    ("torch", "level", "missing"),
    [
        pytest.param(V28, "broken-symbol", {"_ZNK3c106SymInt16sym_ne_slow_pathERKS0_"}, id="2.8"),
        pytest.param(V29, "ok", set(), id="2.9"),
        pytest.param(V210, "broken-symbol", {CHECK_OLD, LOGGER, "_ZNK3c106SymInt16sym_ne_slow_pathERKS0_"}, id="2.10"),
    ],
)
def test_a_kernel_wheel_over_torch_versions(torch, level, missing):
    verdict = judge(SGL_KERNEL, torch, catalogue=CATALOGUE)
    assert verdict.level == level
    assert verdict.missing_symbols == missing
    assert verdict.fits_torch == ("2.9.1",)
    assert verdict.built_for == ("2.9",)
    assert verdict.allowed_but_broken == ("2.8.0", "2.10.0", "2.11.0")


@pytest.mark.parametrize(
    ("torch", "summary"),
    [
        pytest.param(V29, "it fits torch 2.9.1", id="sound"),
        pytest.param(
            V28,
            "undefined symbol: c10::SymInt::sym_ne_slow_path(c10::SymInt const&) const "
            "(_ZNK3c106SymInt16sym_ne_slow_pathERKS0_); it fits torch 2.9.1",
            id="broken",
        ),
    ],
)
def test_a_summary_says_each_reason_and_what_fits(torch, summary):
    assert judge(SGL_KERNEL, torch, catalogue=CATALOGUE).summary == summary


def test_a_finding_says_who_needs_what_who_has_it_and_what_to_do():
    verdict = judge(SGL_KERNEL, V210, catalogue=CATALOGUE, capability="12.0")
    finding = next(f for f in verdict.findings if f.symbol == CHECK_OLD)
    assert finding.as_json() == {
        "kind": "broken-symbol",
        "file": "sgl_kernel/sm100/common_ops.abi3.so",
        "symbol": CHECK_OLD,
        "demangled": "c10::cuda::c10_cuda_check_implementation(int, char const*, char const*, int, bool)",
        "library": None,
        "needed_by": "common_ops.abi3.so",
        "provided_by": ["torch 2.8.0", "torch 2.9.1"],
        "reason": "undefined symbol: c10::cuda::c10_cuda_check_implementation"
        "(int, char const*, char const*, int, bool)",
        "remedy": "use torch 2.9.1 with sgl-kernel 0.3.21, or a build of sgl-kernel for torch 2.10.0+cu128",
    }


# --- the rules, in the order in which they were learned ---------------------------------------------------


def test_rule_1_an_unversioned_name_of_the_runtime_is_not_torchs():
    # Old libtorch_cpu happens to export a copy of this one; the host's libstdc++ has it all the same.
    distribution = wheel(extension("a.so", STABLE, STD_STRING, "dlsym"))
    assert judge(distribution, V211, catalogue=CATALOGUE).level is Level.OK_STABLE


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (STD_STRING, False),
        ("_ZTVN10__cxxabiv120__si_class_type_infoE", False),
        ("_ZTISt13runtime_error", False),
        ("_Znwm", False),
        ("_ZNKSt5ctypeIcE8do_widenEc", False),
        ("dlsym", False),
        ("PyObject_Call", False),
        (CHECK_OLD, True),
        ("_ZTIN2at10TensorBaseE", True),
        ("_ZNSt6vectorIN2at6TensorESaIS1_EED1Ev", True),
        ("_Z16THPVariable_WrapRKN2at10TensorBaseE", True),
        ("THPVariableClass", True),
        (STABLE, True),
        ("torch_call_dispatcher", True),
        ("torchaudio_something", False),
        ("pthreadpool_create", True),
    ],
)
def test_rule_1_names(name, expected):
    known = {STD_STRING, "_ZNKSt5ctypeIcE8do_widenEc", "pthreadpool_create", "PyObject_Call"}
    assert belongs_to_torch(name, known) is expected


def test_rule_2_a_name_counts_only_in_the_scope_of_the_file():
    known = extension("a.so", CHECK_OLD, needed=("libc.so.6",))
    assert judge(wheel(known), V29, catalogue=CATALOGUE).missing_symbols == {CHECK_OLD}
    # libc10 is in scope although the file itself does not need it: libtorch_cuda does.
    through = extension("a.so", CHECK_OLD, needed=("libtorch_cuda.so",))
    assert judge(wheel(through), V29, catalogue=CATALOGUE).missing_symbols == frozenset()


def test_rule_2_a_cuda_name_comes_through_a_library_that_torch_needs():
    file = extension("deep_gemm_cpp.so", "cublasLtMatmul", needed=("libtorch_cuda.so",))
    assert judge(wheel(file), V29, catalogue=CATALOGUE).level is Level.OK


@pytest.mark.parametrize(
    ("needed", "level"),
    [
        pytest.param("libcudart.e8e8b82a.so.13", "ok", id="by the name of the copy"),
        pytest.param("libcudart.so.13", "broken-library", id="by the soname that the copy kept"),
    ],
)
def test_rule_3_a_bundled_copy_is_found_by_its_file_name(needed, level):
    copy = SharedFile("v.libs/libcudart.e8e8b82a.so.13", soname="libcudart.so.13")
    user = extension("v/_C.so", needed=(needed,), search_paths=("$ORIGIN/../v.libs",))
    assert judge(wheel(user, copy), V29, catalogue=CATALOGUE).level == level


def test_rule_3_a_bundled_copy_that_is_not_there_is_missing():
    verdict = judge(wheel(extension("v/_C.so", needed=("libpng16-0481ee11.so.16",))), V29)
    assert kinds(verdict) == [("broken-library", "_C.so", "libpng16-0481ee11.so.16")]
    assert verdict.findings[0].remedy == "reinstall the distribution: this library belongs to it"


def test_rule_4_weak_names_and_python_names_do_not_count():
    probe = host_script("abi_probe")
    elf = probe.read_file(str(Path(__file__).parent / "fixtures/abi/libone.so.1.0"))
    file = SharedFile.from_elf("one.so", elf)
    assert file.undefined == {"needed_of_nobody"}
    python = extension("a.so", "PyModule_Create2", "_PyObject_New")
    assert judge(wheel(python), V29, catalogue=CATALOGUE).level is Level.OK


@pytest.mark.parametrize(
    ("names", "torch", "capability", "effects"),
    [
        pytest.param(
            ("pkg/sm90/ops.so", "pkg/sm100/ops.so"),
            V210,
            "9.0",
            ("broken-symbol", None),
            id="capability picks the broken one",
        ),
        pytest.param(
            ("pkg/sm90/ops.so", "pkg/sm100/ops.so"), V210, "10.0", (None, "ok"), id="capability picks the sound one"
        ),
        pytest.param(("pkg/sm90/ops.so", "pkg/sm100/ops.so"), V210, None, (None, "ok"), id="one usable is enough"),
        pytest.param(("a_cu12.so", "a_cu13.so"), V210, None, ("broken-symbol", None), id="CUDA picks the broken one"),
        pytest.param(("a_cu12.so", "a_cu13.so"), V211, None, (None, "ok"), id="CUDA picks the sound one"),
        pytest.param(("a_cuda128.so", "a_cuda130.so"), V211, None, (None, "ok"), id="CUDA minor picks"),
        pytest.param(("a.so", "b.so"), V210, None, ("broken-symbol", "ok"), id="no variants, all count"),
    ],
)
def test_rule_5_variants(names, torch, capability, effects):
    distribution = wheel(extension(names[0], CHECK_OLD), extension(names[1], ALWAYS))
    verdict = judge(
        distribution, torch, catalogue=CATALOGUE, capability=capability, built_for="2." + torch.version.split(".")[1]
    )
    assert tuple(f.effect.value if f.effect else None for f in verdict.files) == effects


@pytest.mark.parametrize(
    ("capability", "unused"),
    [("9.0", "sm100"), ("8.9", "sm90"), ("10.0", "sm90"), ("12.0", "sm90")],
)
def test_rule_5_sgl_kernel_takes_sm90_for_capability_9_0_alone(capability, unused):
    verdict = judge(SGL_KERNEL, V210, catalogue=CATALOGUE, capability=capability)
    assert [f.path for f in verdict.files if f.effect is None] == [f"sgl_kernel/{unused}/common_ops.abi3.so"]


def test_rule_5_torchcodec_needs_one_whole_set():
    files = [
        extension(f"torchcodec/libtorchcodec_{part}{ffmpeg}.so", ALWAYS if (part, ffmpeg) != ("core", 5) else CHECK_OLD)
        for ffmpeg in (4, 5)
        for part in ("core", "custom_ops")
    ]
    verdict = judge(wheel(*files, name="torchcodec", version="0.10.0"), V210, catalogue=CATALOGUE)
    assert verdict.level is Level.OK
    assert [f.path for f in verdict.files if f.effect is None] == [
        "torchcodec/libtorchcodec_core5.so",
        "torchcodec/libtorchcodec_custom_ops5.so",
    ]


HOST_236 = Host(
    frozenset({"libc.so.6", "libstdc++.so.6", "libnuma.so.1"}),
    {
        "libc.so.6": Library("libc.so.6", None, frozenset({"GLIBC_2.2.5", "GLIBC_2.27", "GLIBC_2.36"})),
        "libstdc++.so.6": Library("libstdc++.so.6", None, frozenset({"GLIBCXX_3.4", "CXXABI_1.3"})),
    },
)


@pytest.mark.parametrize(
    ("needs", "missing"),
    [
        pytest.param({"libc.so.6": ("GLIBC_2.2.5", "GLIBC_2.27")}, [], id="glibc new enough"),
        pytest.param({"libc.so.6": ("GLIBC_2.38",)}, ["GLIBC_2.38"], id="glibc too old"),
        pytest.param({"libstdc++.so.6": ("GLIBCXX_3.4.32",)}, ["GLIBCXX_3.4.32"], id="libstdc++ too old"),
    ],
)
def test_rule_6_versions_of_the_host(needs, missing):
    file = extension("a.so", STABLE, needed=(*TORCH_LIBRARIES, "libc.so.6", "libstdc++.so.6"), version_needs=needs)
    verdict = judge(wheel(file), dataclasses.replace(V29, host=HOST_236), catalogue=CATALOGUE)
    assert [f.symbol for f in verdict.findings if f.kind == "broken-glibc"] == missing
    assert verdict.level is (Level.BROKEN_GLIBC if missing else Level.OK_STABLE)


def test_rule_6_a_tag_that_promises_too_much_is_said_without_a_host():
    file = extension("a.so", STABLE, version_needs={"libc.so.6": ("GLIBC_2.27",)})
    verdict = judge(wheel(file, promised_glibc="2.17"), V29, catalogue=CATALOGUE)
    assert verdict.level is Level.OK_STABLE
    assert "needs glibc 2.27, although the wheel's tag promises to run on 2.17" in [f.reason for f in verdict.findings]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["manylinux2014_x86_64"], "2.17"),
        (["manylinux_2_17_x86_64", "manylinux2014_x86_64"], "2.17"),
        (["manylinux1_x86_64"], "2.5"),
        (["manylinux_2_28_x86_64"], "2.28"),
        (["linux_x86_64"], None),
    ],
)
def test_rule_6_promises_of_tags(tags, expected):
    assert promised_glibc(tags) == expected


@pytest.mark.parametrize(("python", "said"), [("3.12", True), ("3.10", False), (None, False)])
def test_rule_7_a_file_tagged_for_another_python_is_named_but_not_broken(python, said):
    file = extension("_mscclpp.cpython-310-x86_64-linux-gnu.so", STABLE)
    verdict = judge(wheel(file), dataclasses.replace(V29, python=python), catalogue=CATALOGUE)
    assert verdict.level is Level.OK_STABLE
    assert ("other-python" in [f.kind for f in verdict.findings]) is said


@pytest.mark.parametrize(
    ("requires", "torch", "built_for", "level", "minors"),
    [
        pytest.param("==2.8.0", V28, None, "ok", ("2.8",), id="pinned, on its torch"),
        pytest.param("==2.8.0", V29, None, "layout-risk", ("2.8",), id="pinned, on another minor"),
        pytest.param("~=2.8.0", V29, None, "layout-risk", ("2.8",), id="compatible release"),
        pytest.param("==2.8.*", V28, None, "ok", ("2.8",), id="pinned to a minor"),
        pytest.param(">=2.9", V29, None, "layout-risk", ("2.9", "2.10", "2.11"), id="a range leaves a choice"),
        pytest.param(">=2.11", V211, None, "ok", ("2.11",), id="a range and the names leave one"),
        pytest.param(None, V29, None, "layout-risk", ("2.8", "2.9", "2.10", "2.11"), id="nothing declared"),
        pytest.param(None, V29, "2.9", "ok", ("2.9",), id="told by the caller"),
        pytest.param(None, V29, "2.10", "layout-risk", ("2.10",), id="told to be another"),
    ],
)
def test_rule_8_layout_on_a_minor_that_it_was_not_built_for(requires, torch, built_for, level, minors):
    distribution = wheel(extension("_C.so", ALWAYS), requires_torch=requires)
    verdict = judge(distribution, torch, catalogue=CATALOGUE, built_for=built_for)
    assert (verdict.level, verdict.built_for) == (level, minors)


def test_rule_8_nothing_known_is_a_risk():
    verdict = judge(wheel(extension("_C.so", ALWAYS)), V29)
    assert verdict.level is Level.LAYOUT_RISK
    assert "nothing tells which torch it was built for" in verdict.findings[0].reason


def test_rule_8_another_file_of_the_wheel_tells_what_it_was_built_for():
    # One file has all its names on 2.9 and would die there; its neighbour misses one, so the wheel is 2.8's.
    distribution = wheel(extension("_C.so", ALWAYS), extension("_C_90a.so", "_ZNK3c106SymInt6sym_neERKS0_"))
    verdict = judge(distribution, V29, catalogue=CATALOGUE)
    assert levels(verdict) == {
        "_C.so": ("layout-risk", "layout-risk"),
        "_C_90a.so": ("broken-symbol", "broken-symbol"),
    }


def test_rule_9_what_a_file_exports_itself_tells_nothing():
    inline = frozenset({CHECK_NEW, "_ZN2at6Tensor3newEv"})
    distribution = wheel(extension("_C.so", ALWAYS, LOGGER, exports=inline))
    assert judge(distribution, V29, catalogue=CATALOGUE).built_for == ("2.8", "2.9")


# --- levels ---------------------------------------------------------------------------------------------


def test_levels_are_ranked_from_the_worst():
    order = "broken-symbol broken-library broken-glibc layout-risk optional ok-stable ok"
    assert [level.value for level in sorted(Level, key=lambda level: level.rank)] == order.split()
    assert worst([Level.OK, Level.OPTIONAL, Level.OK_STABLE]) is Level.OPTIONAL
    assert worst([]) is Level.OK
    assert [level.value for level in Level if level.is_broken] == order.split()[:3]


@pytest.mark.parametrize(
    ("file", "torch", "level"),
    [
        pytest.param(extension("a.so", STABLE), V28, "ok-stable", id="stable interface"),
        pytest.param(extension("a.so", STABLE_NEW), V28, "broken-symbol", id="stable interface before its floor"),
        pytest.param(extension("a.so", STABLE_NEW), V211, "ok-stable", id="stable interface from its floor on"),
        pytest.param(extension("a.so", "cudaMalloc", needed=("libcudart.so.12",)), V29, "ok", id="no torch name"),
        pytest.param(extension("a.so", needed=("libcudart.so.13",)), V29, "broken-library", id="another CUDA"),
        pytest.param(
            extension("a.so", needed=("libcusolver.so.11",)), V29, "broken-library", id="CUDA library that is lazy"
        ),
        pytest.param(extension("a.so", needed=("libnvrtc.so.12",)), V29, "ok", id="NVRTC, which torch loads by name"),
        pytest.param(extension("a.so", needed=("libcublasLt.so.12",)), V29, "ok", id="cublasLt behind cublas"),
        pytest.param(
            extension("a.so", needed=("libtorch_xpu.so",)), V29, "broken-library", id="library of another torch"
        ),
        pytest.param(SharedFile.unreadable("a.so", "truncated"), V29, "broken-library", id="unreadable"),
    ],
)
def test_levels(file, torch, level):
    assert judge(wheel(file), torch, catalogue=CATALOGUE).level == level


def test_a_missing_library_of_torch_stands_for_all_its_names():
    file = extension("a.so", CHECK_OLD, LOGGER, needed=("libtorch_xpu.so",))
    assert kinds(judge(wheel(file), V210, catalogue=CATALOGUE)) == [("broken-library", "a.so", "libtorch_xpu.so")]


def test_an_unreadable_file_is_never_sound():
    verdict = judge(
        wheel(extension("a.so", STABLE), SharedFile.unreadable("b.so", "empty file")), V29, catalogue=CATALOGUE
    )
    assert verdict.level is Level.BROKEN_LIBRARY
    assert verdict.findings[0].reason == "the file cannot be read as a shared object: empty file"


def test_what_the_host_has_to_supply_is_assumed_without_a_host():
    file = extension("a.so", "cuInit", "numa_alloc", STABLE, needed=("libcuda.so.1", "libnuma.so.1", *TORCH_LIBRARIES))
    verdict = judge(wheel(file), V29, catalogue=CATALOGUE)
    assert verdict.level is Level.OK_STABLE
    assert [(f.kind, f.library, f.provided_by) for f in verdict.findings] == [
        ("assumed", "libcuda.so.1", ("apt libcuda1 (the NVIDIA driver)",)),
        ("assumed", "libnuma.so.1", ("apt libnuma1",)),
    ]


def test_what_several_files_assume_is_said_once():
    files = [extension(f"{name}.so", STABLE, needed=("libnuma.so.1", *TORCH_LIBRARIES)) for name in "abc"]
    verdict = judge(wheel(*files), V29, catalogue=CATALOGUE)
    assert kinds(verdict) == [("assumed", "a.so", "libnuma.so.1")]
    assert [len(file.findings) for file in verdict.files] == [1, 1, 1]


def test_what_the_host_has_to_supply_is_judged_with_a_host():
    file = extension("a.so", "cuInit", needed=("libcuda.so.1", "libnuma.so.1"))
    verdict = judge(wheel(file), dataclasses.replace(V29, host=HOST_236), catalogue=CATALOGUE)
    assert kinds(verdict) == [("broken-library", "a.so", "libcuda.so.1")]
    assert verdict.findings[0].remedy == "install libcuda1 (the NVIDIA driver) on the host"


def test_a_library_guessed_from_a_prefix_is_assumed_unless_it_is_known():
    guessed = extension("a.so", needed=("libmystery.so", "libcudart.so.13"), is_exact=False)
    verdict = judge(wheel(guessed), dataclasses.replace(V29, host=HOST_236), catalogue=CATALOGUE)
    assert kinds(verdict) == [("assumed", "a.so", "libmystery.so"), ("broken-library", "a.so", "libcudart.so.13")]


@pytest.mark.parametrize(
    ("name", "path", "level"),
    [
        pytest.param("torchao", "torchao/_C.abi3.so", "optional", id="torchao survives without its files"),
        pytest.param("torchvision", "torchvision/image.so", "optional", id="torchvision survives without image"),
        pytest.param("torchvision", "torchvision/_C.so", "broken-symbol", id="torchvision does not without _C"),
        pytest.param("xformers", "xformers/flash_attn_3/_C.so", "optional", id="xformers without FlashAttention 3"),
        pytest.param("sgl-kernel", "sgl_kernel/flash_ops.abi3.so", "optional", id="sgl_kernel without flash_ops"),
        pytest.param("sglang_kernel", "sgl_kernel/flash_ops.abi3.so", "optional", id="by the other spelling"),
        pytest.param("unheard-of", "unheard/_C.so", "broken-symbol", id="unknown package"),
    ],
)
def test_files_that_a_package_survives_without(name, path, level):
    verdict = judge(wheel(extension(path, CHECK_OLD), name=name), V210, catalogue=CATALOGUE)
    assert verdict.level == level
    assert verdict.files[0].level is Level.BROKEN_SYMBOL


def test_a_stack_may_accept_a_distribution_without_its_files():
    verdict = judge(wheel(extension("a.so", CHECK_OLD), is_optional=True), V210, catalogue=CATALOGUE)
    assert verdict.level is Level.OPTIONAL


def test_a_layout_risk_is_never_optional():
    # Loading it may kill the process, which no package survives.
    verdict = judge(
        wheel(extension("torchao/_C.so", ALWAYS), name="torchao", requires_torch="==2.8.0"), V29, catalogue=CATALOGUE
    )
    assert verdict.level is Level.LAYOUT_RISK


def test_a_bundled_library_counts_with_the_file_that_needs_it():
    bundled = SharedFile("v.libs/libz.0ad7936e.so.1", needed=("libgone-0ad7936e.so.1",))
    user = extension("v/_C.so", needed=("libz.0ad7936e.so.1",), search_paths=("$ORIGIN/../v.libs",))
    assert levels(judge(wheel(bundled), V29)) == {bundled.path: ("broken-library", None)}
    assert judge(wheel(user, bundled), V29).files[0].effect is Level.BROKEN_LIBRARY


def test_a_name_that_a_sibling_misses_breaks_the_file_that_brings_it_in():
    sibling = extension("p/libown.so", CHECK_OLD, soname="libown.so")
    top = extension("p/_C.so", needed=("libown.so",), search_paths=("$ORIGIN",))
    finding = next(f for f in judge(wheel(top, sibling), V210, catalogue=CATALOGUE).findings if f.file == "p/_C.so")
    assert (finding.symbol, finding.needed_by) == (CHECK_OLD, "libown.so")


def test_a_sibling_on_no_search_path_has_to_be_loaded_first():
    sibling = extension("p/lib/libown.so", STABLE, soname="libown.so")
    top = extension("p/_C.so", needed=("libown.so",))
    verdict = judge(wheel(top, sibling), V29, catalogue=CATALOGUE)
    assert verdict.level is Level.OK_STABLE
    assert ("assumed", "_C.so", "p/lib/libown.so") in kinds(verdict)


@pytest.mark.parametrize(
    ("glibc", "level"),
    [("GLIBC_2.40", "ok-stable"), ("GLIBC_2.41", "broken-glibc"), ("GLIBC_2.42", "broken-glibc")],
)
def test_an_executable_stack_is_refused_by_a_new_glibc(glibc, level):
    host = Host(
        frozenset({"libc.so.6", "libstdc++.so.6"}), {"libc.so.6": Library("libc.so.6", None, frozenset({glibc}))}
    )
    file = extension("a.so", STABLE, has_executable_stack=True)
    assert judge(wheel(file), dataclasses.replace(V29, host=host), catalogue=CATALOGUE).level == level


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        pytest.param(">=2.10", ("2.10.0",), id="allows too much"),
        pytest.param("==2.11.0", (), id="right"),
        pytest.param("", ("2.8.0", "2.9.1", "2.10.0"), id="bare"),
        pytest.param(None, ("2.8.0", "2.9.1", "2.10.0"), id="none"),
    ],
)
def test_a_wrong_requirement_is_named(requires, expected):
    distribution = wheel(extension("a.so", STABLE_NEW), requires_torch=requires)
    assert judge(distribution, V211, catalogue=CATALOGUE).allowed_but_broken == expected


def test_a_release_of_another_cuda_does_not_fit():
    distribution = wheel(extension("a.so", STABLE, needed=("libtorch.so", "libcudart.so.12")), requires_torch=">=2.10")
    verdict = judge(distribution, V211, catalogue=CATALOGUE)
    assert verdict.level is Level.BROKEN_LIBRARY
    assert verdict.fits_torch == ("2.8.0", "2.9.1", "2.10.0")
    finding = next(f for f in verdict.findings if f.library == "libcudart.so.12")
    assert finding.provided_by == ("torch 2.8.0", "torch 2.9.1", "torch 2.10.0", "pip nvidia-cuda-runtime-cu12")


def test_a_known_release_without_requirement_is_looked_up():
    distribution = wheel(extension("a.so", ALWAYS), name="torchcodec", version="0.8.1")
    assert judge(distribution, V29, catalogue=CATALOGUE).level is Level.OK
    assert judge(distribution, V28, catalogue=CATALOGUE).level is Level.LAYOUT_RISK


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["torch==2.9.1"], "==2.9.1"),
        (["numpy", "torch"], ""),
        (["torch (==2.8.0)"], "==2.8.0"),
        (["torchvision==1", "torch-memory-saver"], None),
        (['torch>=2.14; extra == "all"', "torch>=2.9"], ">=2.9"),
        (["not a requirement ???"], None),
    ],
)
def test_declared_torch(lines, expected):
    assert declared_torch(lines) == expected


SOME_NAMES = [ALWAYS, CHECK_OLD, CHECK_NEW, LOGGER, STABLE_NEW, STD_STRING, "dlsym", "PyObject_Call", "cudaMalloc"]


@settings(deadline=2000)
@given(
    undefined=st.sets(st.sampled_from(SOME_NAMES)),
    exports=st.sets(st.sampled_from(SOME_NAMES)),
    more=st.sets(st.sampled_from(SOME_NAMES)),
)
def test_what_is_missing_is_what_nobody_in_scope_exports(undefined, exports, more):
    distribution = wheel(extension("a.so", *undefined), requires_torch="==2.9.1")

    def missing(names: set[str]) -> frozenset[str]:
        verdict = judge(distribution, release("2.9.1+cu128", "12.8", *names), catalogue=CATALOGUE)
        assert verdict.level.is_broken == bool(verdict.missing_symbols)
        return verdict.missing_symbols

    assert missing(exports) == {name for name in undefined - exports if belongs_to_torch(name)}
    assert missing(exports | more) <= missing(exports)


# --- names and tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (LOGGER, "c10::MessageLogger::MessageLogger(char const*, int, int)"),
        ("_ZNK3c106SymInt22maybe_as_int_slow_pathEv", "c10::SymInt::maybe_as_int_slow_path() const"),
        (
            "_ZNK2at10TensorBase14const_data_ptrIiLi0EEEPKT_v",
            "int const* at::TensorBase::const_data_ptr<int, 0>() const",
        ),
        (
            "_ZN3c104impl3cow23materialize_cow_storageERNS_11StorageImplE",
            "c10::impl::cow::materialize_cow_storage(c10::StorageImpl&)",
        ),
        ("_ZN3c104cuda19CUDAErrorLogCaptureC1Ev", "c10::cuda::CUDAErrorLogCapture::CUDAErrorLogCapture()"),
        ("_ZN5torch7LibraryD1Ev", "torch::Library::~Library()"),
        ("cudaMalloc", None),
        ("_Z", None),
        ("_ZN", None),
        ("_ZGVdN4v_Sleef_asin_u10", None),
        ("_Z" + "N" * 3000, None),
        ("_Z" + "P" * 1500 + "i", None),
    ],
)
def test_demangle(name, expected):
    assert demangle(name) == expected


@pytest.mark.parametrize(
    ("library", "pip", "apt"),
    [
        ("libcudart.so.12", "nvidia-cuda-runtime-cu12", None),
        ("libcudart.so.13", "nvidia-cuda-runtime", None),
        ("libcublasLt.so.12", "nvidia-cublas-cu12", None),
        ("libcufft.so.12", "nvidia-cufft", None),
        ("libnuma.so.1", None, "libnuma1"),
        ("libavutil.so.59", None, "ffmpeg"),
    ],
)
def test_suppliers(library, pip, apt):
    row = supplier(library)
    assert row is not None
    assert (row.pip, row.apt) == (pip, apt)


def test_an_unknown_library_has_no_supplier():
    assert supplier("libnobody.so.1") is None


def test_an_unknown_package_has_an_empty_policy():
    assert policy_of("Some_Thing").optional == ()


def test_uses_torch():
    assert wheel(extension("a.so", needed=("libtorch.so",))).uses_torch
    assert wheel(extension("a.so", STABLE, needed=())).uses_torch
    assert not wheel(extension("a.so", "cudaMalloc", needed=("libcudart.so.12",))).uses_torch


# --- an installed environment ---------------------------------------------------------------------------


def answer(**changes) -> dict:
    """Return what the probe says of a small environment: torch 2.9 with an extension."""
    site = "/opt/env/lib/python3.12/site-packages"
    names = [ALWAYS, CHECK_OLD, "cuInit", "PyModule_Create2", LOGGER]

    def entry(path: str, **facts) -> dict:
        blank = {"path": path, "size_bytes": 1, "soname": None, "needed": [], "version_definitions": [], "exports": []}
        return blank | facts

    document = {
        "schema": 1,
        "environment": "/opt/env",
        "sites": [site],
        "machine": "x86_64",
        "python": "3.12",
        "interpreter": 0,
        "distributions": {
            "torch": {"version": "2.9.1", "requires_torch": None},
            "ext": {"version": "1.0", "requires_torch": "torch==2.9.1"},
        },
        "torch": {"version": "2.9.1+cu128", "cuda": "12.8"},
        "process": {"loads": [0, 1, 2], "global": [0], "answers": {"libc10.so": 1, "libc.so.6": 2}, "missing": []},
        "runtime": [2],
        "loader_cache": {"libnuma.so.1": "/usr/lib/libnuma.so.1"},
        "files": [
            entry("/opt/env/bin/python3.12", exports=[3]),
            entry(
                f"{site}/torch/lib/libc10.so", soname="libc10.so", exports=[0, 1], distribution="torch", scope=[1, 2]
            ),
            entry("/lib/libc.so.6", soname="libc.so.6", version_definitions=["GLIBC_2.2.5", "GLIBC_2.36"]),
            entry(
                f"{site}/ext/_C.so",
                needed=["libc10.so", "libcuda.so.1"],
                distribution="ext",
                scope=[3, 1, 2],
                missing=[["libcuda.so.1", 3]],
                undefined=[0, 1, 2, 3],
            ),
        ],
        "unreadable": {},
        "names": names,
        "seconds": 0.1,
    }
    return document | changes


def without_missing(document: dict) -> dict:
    document["files"][3]["missing"] = []
    document["files"][3]["undefined"] = [0, 1, 3]
    return document


def test_environment_is_judged():
    environment = parse_environment(answer())
    verdicts = {v.name: v for v in judge_environment(environment, catalogue=CATALOGUE)}
    assert verdicts["torch"].level is Level.OK
    assert kinds(verdicts["ext"]) == [("broken-library", "_C.so", "libcuda.so.1")]
    assert (environment.version, environment.cuda, environment.python, environment.glibc) == (
        "2.9.1+cu128",
        "12.8",
        "3.12",
        "2.36",
    )


def test_a_sound_environment_is_ok():
    environment = parse_environment(without_missing(answer()))
    assert {v.name: v.level.value for v in judge_environment(environment)} == {"torch": "ok", "ext": "ok"}


def test_a_name_that_nobody_has_is_broken_even_when_it_is_not_torchs():
    # Every library in scope was read, so nothing is left to hold the name.
    document = answer()
    document["files"][3]["missing"] = []
    verdicts = {v.name: v for v in judge_environment(parse_environment(document))}
    assert verdicts["ext"].missing_symbols == {"cuInit"}


def test_a_python_name_is_looked_for_in_the_interpreter():
    document = without_missing(answer())
    document["files"][0]["exports"] = []
    verdicts = {v.name: v for v in judge_environment(parse_environment(document))}
    assert verdicts["ext"].missing_symbols == {"PyModule_Create2"}


def test_the_stack_may_call_a_distribution_optional():
    verdicts = {v.name: v for v in judge_environment(parse_environment(answer()), optional=["Ext"])}
    assert verdicts["ext"].level is Level.OPTIONAL


def test_a_torch_that_misses_a_library_is_broken():
    document = answer()
    document["process"]["missing"] = [["libcudart.so.12", 1]]
    verdicts = {v.name: v for v in judge_environment(parse_environment(document), catalogue=CATALOGUE)}
    assert verdicts["torch"].level is Level.BROKEN_LIBRARY
    assert verdicts["torch"].findings[0].needed_by == "libc10.so"


def test_a_torch_with_a_damaged_library_is_broken():
    path = "/opt/env/lib/python3.12/site-packages/torch/lib/libtorch_python.so"
    document = answer(unreadable={path: {"problem": "truncated", "distribution": "torch"}})
    verdicts = {v.name: v for v in judge_environment(parse_environment(document))}
    assert verdicts["torch"].level is Level.BROKEN_LIBRARY
    assert verdicts["torch"].findings[0].file == "torch/lib/libtorch_python.so"


def test_what_the_process_holds_already_is_not_judged_again():
    # libc10 is loaded; that it misses a name now, after a partial upgrade say, breaks torch and not the extension.
    document = without_missing(answer())
    document["files"][1]["undefined"] = [4]
    verdicts = {v.name: v for v in judge_environment(parse_environment(document))}
    assert verdicts["ext"].level is Level.OK


def test_without_an_interpreter_its_names_are_not_missed():
    document = without_missing(answer(interpreter=None))
    document["process"]["global"] = []
    verdicts = {v.name: v for v in judge_environment(parse_environment(document))}
    assert verdicts["ext"].level is Level.OK


def test_what_an_installed_library_misses_breaks_the_wheel_that_needs_it():
    document = answer()
    document["files"][3]["soname"] = "libext.so"
    site = document["sites"][0]
    file = extension("new/_C.so", needed=("_C.so",), search_paths=("$ORIGIN/../ext",))
    assert f"{site}/ext/_C.so" == document["files"][3]["path"]
    renamed = dataclasses.replace(file, path="new/_new.so")
    verdict = judge(wheel(renamed), parse_environment(document))
    assert kinds(verdict)[0] == ("broken-library", "_new.so", "libcuda.so.1")


def test_an_unreadable_file_of_an_environment_is_never_sound():
    path = "/opt/env/lib/python3.12/site-packages/ext/_D.so"
    document = without_missing(answer(unreadable={path: {"problem": "truncated", "distribution": "ext"}}))
    verdicts = {v.name: v for v in judge_environment(parse_environment(document))}
    assert levels(verdicts["ext"])["ext/_D.so"] == ("broken-library", "broken-library")


@pytest.mark.parametrize(
    ("undefined", "needed", "level"),
    [
        pytest.param({ALWAYS}, ("libc10.so",), "ok", id="has all"),
        pytest.param({LOGGER}, ("libc10.so",), "broken-symbol", id="asked for, and nobody has it"),
        pytest.param({ALWAYS}, ("libc10.so", "libnuma.so.1"), "ok", id="library of the loader cache"),
        pytest.param({ALWAYS}, ("libc10.so", "libgone.so.1"), "broken-library", id="library of nobody"),
    ],
)
def test_a_wheel_that_is_not_installed_is_judged_on_an_environment(undefined, needed, level):
    distribution = wheel(extension("new/_C.so", *undefined, needed=needed), requires_torch="==2.9.1")
    assert judge(distribution, parse_environment(answer())).level == level


def test_an_environment_that_was_not_asked_for_a_name_gives_no_verdict():
    distribution = wheel(extension("new/_C.so", CHECK_NEW, needed=("libc10.so",)))
    with pytest.raises(InputError, match="--wanted"):
        judge(distribution, parse_environment(answer()))


def test_a_search_path_leads_into_the_environment():
    document = answer()
    site = document["sites"][0]
    document["files"].append(
        document["files"][2] | {"path": f"{site}/nvidia/cufft/lib/libcufft.so.11", "soname": "libcufft.so.11"}
    )
    file = extension("new/_C.so", needed=("libcufft.so.11",), search_paths=("$ORIGIN/../nvidia/cufft/lib",))
    assert judge(wheel(file), parse_environment(document)).level is Level.OK
    elsewhere = extension("new/_C.so", needed=("libcufft.so.11",))
    assert judge(wheel(elsewhere), parse_environment(document)).level is Level.BROKEN_LIBRARY


@pytest.mark.parametrize(
    ("document", "message"),
    [
        pytest.param({"schema": 1, "error": "no such directory"}, "no such directory", id="the probe could not look"),
        pytest.param([], "no usable answer", id="not an object"),
        pytest.param({}, "no usable answer", id="empty"),
        pytest.param(answer(schema=2), "schema", id="another schema"),
        pytest.param(answer(names=["a"]), "name number", id="name numbers out of range"),
        pytest.param(answer(runtime=[99]), "file number", id="file numbers out of range"),
        pytest.param(answer(files="x"), "files", id="wrong type"),
    ],
)
def test_answers_that_are_no_answers(document, message):
    with pytest.raises(HostError, match=message):
        parse_environment(document)


def test_an_environment_whose_loader_cache_could_not_be_read_is_still_judged():
    environment = parse_environment(without_missing(answer(loader_cache={"error": "no such file"})))
    assert environment.host.sonames == {"libc.so.6"}


def test_the_probes_own_answer_is_accepted(tmp_path):
    probe = host_script("abi_probe")
    site = tmp_path / "lib/python3.12/site-packages"
    (site / "ext").mkdir(parents=True)
    (site / "ext/two.so").write_bytes((Path(__file__).parent / "fixtures/abi/stripped.so").read_bytes())
    (site / "ext-1.dist-info").mkdir()
    (site / "ext-1.dist-info/RECORD").write_text("ext/two.so,,\n")
    environment = parse_environment(json.loads(json.dumps(probe.answer(str(tmp_path)))))
    (distribution,) = environment.distributions
    assert (distribution.name, distribution.files[0].needed) == ("ext", ("libone.so.1", "libc.so.6"))
    assert judge(distribution, environment).missing_libraries == {"libone.so.1"}
    assert environment.python == "3.12"
