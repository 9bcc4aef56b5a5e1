"""The stack check: parsers on real outputs, and every section against an environment made for the test."""

from __future__ import annotations

import ast
import json
import os
import shutil
import struct
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bringup import paths

SCRIPT = paths.files() / "stack_check.py"
CHECK = paths.host_script("stack_check")
FIXTURES = Path(__file__).parents[1] / "fixtures" / "bench"
SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "reference" / "stack-check.schema.json").read_text(encoding="utf-8")
)


def sample(name: str) -> str:
    return (FIXTURES / "smi" / name).read_text(encoding="utf-8")


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Return status and document of a run; the document must follow its schema."""
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)
    document = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(document, SCHEMA)
    assert document["exit_status"] == done.returncode
    return done.returncode, document


def test_it_is_python_3_8_and_imports_the_standard_library_only() -> None:
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 8))
    top = {name.name.partition(".")[0] for n in tree.body if isinstance(n, ast.Import) for name in n.names}
    assert top <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", ["h200x2_stack_check.json"])
def test_a_captured_answer_follows_the_schema(name: str) -> None:
    document = json.loads((FIXTURES / name).read_text(encoding="utf-8"))
    jsonschema.validate(document, SCHEMA)
    assert [device["kernel"]["wrong_elements"] for device in document["gpus"]["devices"]] == [0, 0]


# ---------------------------------------------------------------- parsers


def test_smi_xml() -> None:
    gpus = CHECK.parse_smi_xml(sample("h200x2_smi_q.xml"))
    assert len(gpus) == 2
    first = gpus[0]
    wanted = {
        "index": 0,
        "name": "NVIDIA H200",
        "mig": "Disabled",
        "persistence": "Enabled",
        "recovery_action": "None",
        "ecc": "Enabled",
        "remapped_pending": "No",
        "remapped_failure": "No",
        "retired_pending": None,
        "pcie_generation": 5,
        "pcie_generation_max": 5,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "pcie_replays": 1,
        "fabric_state": "Completed",
        "fabric_status": "Success",
        "clock_event_reasons": ["gpu_idle"],
        "temperature_c": 33,
        "processes": [],
    }
    assert {key: first[key] for key in wanted} == wanted
    assert first["ecc_errors"]["volatile_dram_uncorrectable"] == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16x", 16), ("700.00 W", 700.0), ("0 KB/s", 0), ("N/A", None), ("", None), (None, None), ("-8 C", -8)],
)
def test_numbers_of_nvidia_smi(text: str | None, expected: float | None) -> None:
    assert CHECK.number(text) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h200x2_nvlink.txt", [(0, 18, [], [26.562]), (1, 18, [], [26.562])]),
        ("nvlink_s_inactive.txt", [(3, 4, [3, 5], [25.781])]),
    ],
)
def test_nvlink_status(name: str, expected: list[tuple[int, int, list[int], list[float]]]) -> None:
    text = sample(name)
    status = text[: text.index("P2P is supported")].rpartition("GPU 0")[0] if "P2P is supported" in text else text
    found = CHECK.parse_nvlink_status(status)
    assert [(g["index"], g["active_links"], g["inactive_links"], g["link_gb_per_s"]) for g in found] == expected


def test_nvlink_errors_are_summed_over_links() -> None:
    text = "GPU 0: X (UUID: u)\n\t Link 0: Replay Errors: 2\n\t Link 0: CRC Errors: 0\n\n\t Link 1: Replay Errors: 3\n"
    assert CHECK.parse_nvlink_errors(text) == {"0": {"replay_errors": 5, "crc_errors": 0}}


HEADER = "\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tCPU Affinity\tNUMA Affinity\n"


@pytest.mark.parametrize(
    ("text", "gpus", "row", "cells"),
    [
        (sample("h200x2_topo.txt"), 2, 0, ["X", "NV18"]),
        (sample("h200x2_topo_p2p.txt").partition("Legend")[0], 2, 1, ["OK", "X"]),
        (sample("topo_rtxpro6000x8_nic_ansi.txt"), 8, 7, ["SYS"] * 4 + ["NODE"] * 3 + ["X"]),
        (sample("topo_rtxpro6000x8_pix_pairs_ansi.txt"), 8, 2, ["NODE", "NODE", "X", "PIX"] + ["SYS"] * 4),
        (sample("topo_a100x8_nv12_partial.txt"), 8, 3, ["NV12"] * 3 + ["X"] + ["NV12"] * 4),
        (
            HEADER + sample("topo_b200x8_gpu2_no_nvlink_partial.txt"),
            6,
            2,
            ["NODE", "NODE", "X", "NODE", "SYS", "SYS"],
        ),
    ],
    ids=["H200", "p2p", "ANSI header and network cards", "ANSI header", "A100, cut", "B200, one without NVLink"],
)
def test_topology(text: str, gpus: int, row: int, cells: list[str]) -> None:
    names, rows = CHECK.parse_matrix(text)
    assert names == [f"GPU{n}" for n in range(gpus)]
    assert rows[row] == cells


def test_no_topology_is_an_error_and_not_an_empty_one() -> None:
    with pytest.raises(ValueError, match="no matrix"):
        CHECK.matrix_value("Failed to initialize NVML: Driver/library version mismatch\n")


def test_xids_and_gpus_that_fell_off_the_bus() -> None:
    found = CHECK.parse_xids(sample("dmesg_failures.txt"))
    assert [(event["xid"], event["pci_bus_id"]) for event in found] == [(79, "0000:a1:00"), (None, "0000:b3:00.0")]


ROOT_LINES = sample("python_import_errors.txt")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "ImportError: libnvrtc.so.12: cannot open shared object file: No such file or directory",
            "ImportError: libnvrtc.so.12: cannot open shared object file: No such file or directory",
        ),
        (
            ROOT_LINES.partition("### sgl-kernel block\n")[2].partition("###")[0],
            "ImportError: /usr/local/lib/python3.10/dist-packages/sgl_kernel/sm100/common_ops.abi3.so: undefined"
            " symbol: _ZNK3c106SymInt6sym_neERKS0_",
        ),
        ("nvrtc: error: failed to open libnvrtc-builtins.so.13.0.\n  Make sure that it is installed.", None),
        ("Error 802: system not yet initialized", "Error 802: system not yet initialized"),
        ("", "no message"),
        ("\x1b[31mplain\x07", "[31mplain"),
    ],
    ids=["loader", "sgl-kernel's page of advice", "builtins", "cuInit", "nothing", "control characters"],
)
def test_the_line_that_names_the_cause(text: str, expected: str | None) -> None:
    wanted = "nvrtc: error: failed to open libnvrtc-builtins.so.13.0." if expected is None else expected
    assert CHECK.root_line(text) == wanted


@pytest.mark.parametrize(
    ("soname", "expected"),
    [
        ("libnvrtc.so.13", "/cuda-13.0/libnvrtc.so.13.0.88"),
        ("libcuda.so.1", "/usr/lib/libcuda.so.580.95.05"),
        ("libnccl.so.2", "/env/libnccl.so.2"),
        ("libcudart.so.13", None),
        ("libcuda.so", "/usr/lib/libcuda.so.580.95.05"),
    ],
)
def test_which_mapped_file_stands_for_a_soname(soname: str, expected: str | None) -> None:
    mapped = [
        "/cuda-12.8/libnvrtc.so.12.8.93",
        "/cuda-13.0/libnvrtc.so.13.0.88",
        "/cuda-13.0/libnvrtc-builtins.so.13.0.88",
        "/env/libnccl.so.2",
        "/usr/lib/libcuda.so.580.95.05",
    ]
    assert CHECK.pick_library(soname, mapped) == expected


def test_which_file_the_loader_took() -> None:
    text = """
      12:\tfind library=libnvJitLink.so.12 [0]; searching
      12:\t search path=/opt/old/lib\t\t(LD_LIBRARY_PATH)
      12:\t  trying file=/opt/old/lib/libnvJitLink.so.12
      12:
      12:\tfind library=libmissing.so.1 [0]; searching
      12:\t  trying file=/opt/old/lib/libmissing.so.1
      12:\t  trying file=/usr/lib/libmissing.so.1
      12:\tfind library=libm.so.6 [0]; searching
      12:\t search cache=/etc/ld.so.cache
      12:\t  trying file=/lib/libm.so.6
    """
    chosen = CHECK.loader_choices(text)
    assert chosen["libnvJitLink.so.12"] == "/opt/old/lib/libnvJitLink.so.12"
    assert chosen["libm.so.6"] == "/lib/libm.so.6"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("export NCCL_P2P_DISABLE=1\n", [("NCCL_P2P_DISABLE", "1", 1)]),
        ("# NCCL_ALGO=Ring\n\nNCCL_ALGO=Tree # no\n", [("NCCL_ALGO", "Tree # no", 3)]),
        ("LD_LIBRARY_PATH='/opt/x'\n", [("LD_LIBRARY_PATH", "/opt/x", 1)]),
        ('DefaultEnvironment="A=1 2" B=3\n', [("A", "1 2", 1), ("B", "3", 1)]),
        ('if [ -n "$X" ]; then\n', []),
    ],
)
def test_assignments(text: str, expected: list[tuple[str, str, int]]) -> None:
    assert list(CHECK.assignments(text)) == expected


def test_settings_are_found_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("alias x=y\nexport NCCL_MAX_NCHANNELS=2\nexport EDITOR=vi\n")
    (tmp_path / ".nccl.conf").write_text("NCCL_NVLS_ENABLE=0\n")
    found = CHECK.look_settings({"NCCL_MAX_NCHANNELS": "2", "EDITOR": "vi", "HOME": str(tmp_path)}, str(tmp_path))
    own = [entry for entry in found["files"] if entry["file"].startswith(str(tmp_path))]
    assert [(entry["name"], entry["value"], entry["line"]) for entry in own] == [
        ("NCCL_MAX_NCHANNELS", "2", 2),
        ("NCCL_NVLS_ENABLE", "0", 1),
    ]
    assert found["login"] == {"NCCL_MAX_NCHANNELS": "2"}


@pytest.mark.parametrize(
    ("capabilities", "control", "expected"),
    [
        (
            [(0x0001, 0x150), (0x000D, 0)],
            0x0D,
            {
                "source_validation": True,
                "request_redirect": True,
                "completion_redirect": True,
                "upstream_forwarding": False,
            },
        ),
        (
            [(0x000D, 0)],
            0x11,
            {
                "source_validation": True,
                "request_redirect": False,
                "completion_redirect": False,
                "upstream_forwarding": True,
            },
        ),
        ([(0x0001, 0)], 0, None),
    ],
    ids=["second in the list, redirecting", "healthy", "no ACS"],
)
def test_acs(
    capabilities: list[tuple[int, int]], control: int, expected: dict[str, bool] | None, tmp_path: Path
) -> None:
    data = bytearray(4096)
    offset = 0x100
    for number, following in capabilities:
        struct.pack_into("<I", data, offset, number | 1 << 16 | following << 20)
        if number == 0x000D:
            struct.pack_into("<H", data, offset + 6, control)
        offset = following
    (tmp_path / "config").write_bytes(bytes(data))
    assert CHECK.acs_control(str(tmp_path)) == expected


def test_acs_that_only_root_can_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config").write_bytes(bytes(64))
    assert CHECK.guarded(CHECK.acs_control, str(tmp_path)) == {
        "error": "OSError: configuration space is readable by root only"
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [("00000000:00:06.0", "0000:00:06.0"), ("0000:A1:00.0", "0000:a1:00.0"), ("10000:01:00.0", "0000:01:00.0")],
)
def test_bus_ids(text: str, expected: str) -> None:
    assert CHECK.short_bus_id(text) == expected


# ---------------------------------------------------------------- an environment made for the test


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with modules that import well, fail, crash, hang, print, and load a library."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, with_pip=False, symlinks=True)
    packages = next(root.glob("lib/python3*/site-packages"))
    modules = {
        "good": "__version__ = '1.2+cu130'\nprint('noise of an import')",
        "broken": "raise ImportError('libnvrtc.so.13: cannot open shared object file: No such file or directory')",
        "crashing": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "hanging": "import time\ntime.sleep(60)",
        "loading": "import ctypes, os\nctypes.CDLL(os.path.join(os.path.dirname(__file__), 'libmine.so.1'))",
        "login_only": "import os\nif 'NCCL_P2P_DISABLE' in os.environ: raise RuntimeError('spoiled by the login')",
    }
    for name, text in modules.items():
        (packages / f"{name}.py").write_text(text + "\n", encoding="utf-8")
    (packages / "thing-2.0.dist-info").mkdir()
    (packages / "thing-2.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 2.0\n")
    compile_library(packages / "libmine.so.1", "int mine(void) { return 1; }", "libmine.so.1")
    return root


def compile_library(path: Path, source: str, soname: str, *more: str) -> None:
    """Compile a shared object."""
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), f"-Wl,-soname,{soname}", *more]
    subprocess.run(command, input=source, text=True, check=True)


def test_imports(environment: Path) -> None:
    modules = ["good", "broken", "crashing", "hanging", "loading", "absent"]
    arguments = ["--python", str(environment / "bin" / "python"), "--timeout", "3", "--no-login", "--jobs", "2"]
    for module in modules:
        arguments += ["--import", module]
    status, document = run(*arguments, "--soname", "libmine.so.1", "--sections", "imports")
    found = {module: document["imports"][module]["empty"] for module in modules}
    assert status == 0
    assert {module: (entry["ok"], entry["error"]) for module, entry in found.items()} == {
        "good": (True, None),
        "broken": (
            False,
            "ImportError: libnvrtc.so.13: cannot open shared object file: No such file or directory",
        ),
        "crashing": (False, "killed by SIGSEGV"),
        "hanging": (False, "did not end within 3 s"),
        "loading": (True, None),
        "absent": (False, "ModuleNotFoundError: No module named 'absent'"),
    }
    assert found["good"]["version"] == "1.2+cu130"
    assert found["loading"]["libraries"]["libmine.so.1"].endswith("site-packages/libmine.so.1")
    assert found["good"]["libraries"]["libmine.so.1"] is None


def test_versions_are_read_without_an_import(environment: Path) -> None:
    arguments = ["--python", str(environment / "bin" / "python"), "--no-login", "--sections", "versions"]
    _, document = run(*arguments, "--distribution", "thing", "--distribution", "absent")
    assert document["versions"]["distributions"] == {"thing": "2.0", "absent": None}
    assert document["versions"]["prefix"] == str(environment)


def test_an_interpreter_that_is_not_there_is_an_error() -> None:
    _, document = run(
        "--python", "/nonexistent/python", "--no-login", "--sections", "versions,imports", "--import", "x"
    )
    assert document["versions"] == {"error": "cannot run /nonexistent/python: No such file or directory"}
    assert document["imports"]["x"]["empty"]["ok"] is False


def test_an_empty_environment_is_empty_and_a_login_is_not() -> None:
    login = CHECK.login_environment(os.environ.get("USER") or "root")
    assert login["HOME"].startswith("/")
    assert "PATH" in login
    assert "PYTEST_CURRENT_TEST" not in login


def test_a_stand_in_directory_comes_first_and_is_said(environment: Path, tmp_path: Path) -> None:
    arguments = ["--python", str(environment / "bin" / "python"), "--no-login", "--sections", "imports"]
    _, document = run(*arguments, "--import", "good", "--library-directory", str(tmp_path))
    assert document["library_directory"] == str(tmp_path)
    assert document["imports"]["good"]["empty"]["ok"] is True


NVRTC = """
#include <stdlib.h>
#include <string.h>
#include <dlfcn.h>
static int is_broken;
int nvrtcVersion(int *a, int *b) { *a = 13; *b = 0; return 0; }
int nvrtcGetNumSupportedArchs(int *n) { *n = 2; return 0; }
int nvrtcGetSupportedArchs(int *v) { v[0] = 90; v[1] = 120; return 0; }
int nvrtcCreateProgram(void **p, const char *s, const char *n, int k, void *h, void *i) { *p = malloc(8); return 0; }
int nvrtcCompileProgram(void *p, int n, const char **o) {
    is_broken = dlopen("libnvrtc-builtins.so.13.0", RTLD_NOW) == NULL;
    return is_broken ? 7 : strstr(o[0], "sm_90") ? 0 : 6; }
int nvrtcGetProgramLogSize(void *p, size_t *n) { *n = 90; return 0; }
int nvrtcGetProgramLog(void *p, char *t) {
    strcpy(t, is_broken ? "nvrtc: error: failed to open libnvrtc-builtins.so.13.0." : "x.cu(3): error: nonsense");
    return 0; }
int nvrtcGetCUBINSize(void *p, size_t *n) { *n = 4; return 0; }
int nvrtcGetCUBIN(void *p, char *t) { memcpy(t, "CUBI", 4); return 0; }
const char *nvrtcGetErrorString(int c) {
    return c == 7 ? "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE" : "NVRTC_ERROR_COMPILATION"; }
"""


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """Make a directory with a library that answers like NVRTC, and finds its builtins beside it."""
    compile_library(tmp_path / "libnvrtc.so.13", NVRTC, "libnvrtc.so.13", "-Wl,-rpath,$ORIGIN", "-w")
    compile_library(tmp_path / "libnvrtc-builtins.so.13.0", "int b;", "libnvrtc-builtins.so.13.0")
    return tmp_path


def nvrtc(toolkit: Path, *capabilities: str) -> dict[str, Any]:
    """Return what the check says of this toolkit's NVRTC under an empty environment."""
    arguments = ["--no-login", "--sections", "nvrtc", "--nvrtc", f"13.0={toolkit}/libnvrtc.so.13"]
    for capability in capabilities:
        arguments += ["--capability", capability]
    _, document = run(*arguments)
    found: dict[str, Any] = document["nvrtc"]["13.0"]["empty"]
    return found


def test_nvrtc_compiles_and_says_which_files_it_took(toolkit: Path) -> None:
    found = nvrtc(toolkit, "9.0", "10.3", "12.0")
    assert (found["version"], found["supported_capabilities"]) == ("13.0", ["9.0", "12.0"])
    assert [(c["capability"], c["is_supported"], c["ok"], c["error"]) for c in found["compiles"]] == [
        ("9.0", True, True, None),
        ("10.3", False, False, "toolkit 13.0 cannot target 10.3"),
        ("12.0", True, False, "x.cu(3): error: nonsense (NVRTC_ERROR_COMPILATION)"),
    ]
    assert found["loaded_from"] == f"{toolkit}/libnvrtc.so.13"
    assert found["builtins_from"] == f"{toolkit}/libnvrtc-builtins.so.13.0"


def test_nvrtc_without_its_builtins(toolkit: Path) -> None:
    (toolkit / "libnvrtc-builtins.so.13.0").unlink()
    found = nvrtc(toolkit, "9.0")
    assert found["builtins_from"] is None
    assert found["compiles"][0]["error"] == (
        "nvrtc: error: failed to open libnvrtc-builtins.so.13.0. (NVRTC_ERROR_BUILTIN_OPERATION_FAILURE)"
    )


def test_nvrtc_that_the_linker_does_not_find() -> None:
    arguments = ["--no-login", "--sections", "nvrtc", "--capability", "9.0"]
    _, document = run(*arguments, "--nvrtc", "99.0=libnvrtc.so.99")
    found = document["nvrtc"]["99.0"]["empty"]
    assert found["error"] == "libnvrtc.so.99: cannot open shared object file: No such file or directory"
    assert found["compiles"] == []


def test_caches_of_compiled_kernels(tmp_path: Path) -> None:
    (tmp_path / "cache" / "a").mkdir(parents=True)
    (tmp_path / "cache" / "a" / "x.so").write_bytes(b"12345")
    (tmp_path / "cache" / "build.ninja").write_bytes(b"123")
    (tmp_path / "cache").chmod(0o750)
    arguments = ["--no-login", "--sections", "jit", "--jit-cache", f"flashinfer={tmp_path}/cache"]
    _, document = run(*arguments, "--jit-cache", f"other={tmp_path}/absent")
    found = document["jit"]["flashinfer"]
    assert (found["exists"], found["mode"], found["files"], found["libraries"], found["bytes"]) == (
        True,
        "0750",
        2,
        1,
        8,
    )
    assert document["jit"]["other"] == {"path": f"{tmp_path}/absent", "exists": False}


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has GPUs")
def test_a_host_without_a_driver_is_looked_at_all_the_same() -> None:
    status, document = run("--no-login", "--sections", "gpus,health")
    assert status == 0
    assert document["gpus"] == {"error": "libcuda.so.1: cannot open shared object file: No such file or directory"}
    assert "error" in document["health"]["gpus"]
    assert document["health"]["host"]["shm_bytes"] > 0


def test_a_wrong_kernel_result_is_status_5() -> None:
    check = CHECK.Check(CHECK.parser().parse_args([]))
    device = {"index": 3, "uuid": "GPU-3", "kernel": {"wrong_elements": 2}}
    check.document["gpus"] = {"devices": [device]}
    assert check.status() == (5, "GPU 3 (GPU-3) computed 2 wrong elements of a trivial kernel")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nvrtc", "13.0"], "NAME=VALUE is wanted"),
        (["--capability", "sm_90"], "a compute capability looks like 9.0"),
        (["--sections", "imports,magic"], "unknown section magic"),
        (["--jobs", "0"], "--jobs and --timeout must be above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_leave_a_document(arguments: list[str], says: str, tmp_path: Path) -> None:
    status, document = run(*arguments, "--output", str(tmp_path / "s.json"))
    assert (status, says in document["message"]) == (2, True)
    assert json.loads((tmp_path / "s.json").read_text(encoding="utf-8")) == document


def test_the_document_is_written_atomically(tmp_path: Path) -> None:
    output = tmp_path / "stack.json"
    _, document = run("--no-login", "--sections", "jit", "--output", str(output))
    assert json.loads(output.read_text(encoding="utf-8")) == document
    assert (output.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (0o644, [output])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8388608", 8388608), ("infinity", None), ("unlimited", None), ("18446744073709551615", None), ("0", 0)],
)
def test_limits_as_systemctl_and_the_kernel_print_them(text: str, expected: int | None) -> None:
    assert CHECK.limit_bytes(text) == expected


def test_rdma_ports(tmp_path: Path) -> None:
    for device, port, state, layer in (("mlx5_0", 1, "4: ACTIVE", "InfiniBand"), ("mlx5_1", 1, "1: DOWN", "Ethernet")):
        directory = tmp_path / device / "ports" / str(port)
        directory.mkdir(parents=True)
        for name, text in (("state", state), ("link_layer", layer), ("rate", "400 Gb/sec (4X NDR)")):
            (directory / name).write_text(text + "\n")
    assert [(p["device"], p["port"], p["state"], p["link_layer"]) for p in CHECK.look_rdma(str(tmp_path))] == [
        ("mlx5_0", 1, "ACTIVE", "InfiniBand"),
        ("mlx5_1", 1, "DOWN", "Ethernet"),
    ]


def test_no_rdma_device(tmp_path: Path) -> None:
    assert CHECK.look_rdma(str(tmp_path / "none")) == []


def test_allowed_processors() -> None:
    assert CHECK.allowed_cpus("Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t0-3,8\n") == "0-3,8"
    assert CHECK.allowed_cpus("Name:\tx\n") is None
