"""Health rules: each on one captured answer with one thing changed, and none on the answer as it is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bringup.errors import HostError
from bringup.findings import health

FIXTURES = Path(__file__).parents[1] / "fixtures" / "bench"
ANSWER = json.loads((FIXTURES / "h200x2_stack_check.json").read_text(encoding="utf-8"))["health"]
ZERO = "GPU-00000000-0000-0000-0000-000000000000"
ONE = "GPU-00000000-0000-0000-0000-000000000001"
Section = dict[str, Any]
Change = Callable[[Section], object]


def found(change: Change, nvlinks: int | None = 18) -> list[tuple[str, str, str]]:
    """Return (code, severity, cause) for the captured answer with one thing changed."""
    section = copy.deepcopy(ANSWER)
    change(section)
    return [(f.code, f.severity, f.cause) for f in health.findings(health.parse(section), nvlinks=nvlinks)]


def gpu(number: int, **fields: object) -> Change:
    """Return a change of one GPU."""
    return lambda section: section["gpus"][number].update(fields)


def test_a_healthy_host_has_no_finding() -> None:
    assert found(lambda section: None) == []


LIMITED = {
    run["label"]: run["document"]["health"]
    for run in map(json.loads, (FIXTURES / "h200x2_limits.jsonl").read_text(encoding="utf-8").splitlines())
    if "health" in run["document"]
}


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (
            "stack_check memlock_64k",
            [
                (
                    "BU-VFY-332",
                    "info",
                    "memory that may be locked is limited: a login 64 KiB; no RDMA device is here",
                )
            ],
        ),
        ("stack_check far_processors", []),
    ],
    ids=["ulimit -l 64", "pinned to 0-3 of the one node"],
)
def test_what_a_real_host_says_of_its_limits(label: str, expected: list[tuple[str, str, str]]) -> None:
    section = health.parse(LIMITED[label])
    assert [(f.code, f.severity, f.cause) for f in health.findings(section, nvlinks=18)] == expected


def test_a_real_host_with_little_locked_memory_and_an_rdma_device() -> None:
    section = copy.deepcopy(LIMITED["stack_check memlock_64k"])
    port = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}
    section["host"]["rdma"] = [port]
    assert [(f.code, f.severity, f.cause) for f in health.findings(health.parse(section), nvlinks=18)] == [
        (
            "BU-VFY-332",
            "warning",
            "memory that may be locked is limited: a login 64 KiB; NCCL cannot register larger buffers with mlx5_0",
        )
    ]


def fabric(state: str, status: str = "Success") -> Change:
    """Return a change of every GPU's fabric."""

    def change(section: Section) -> None:
        for entry in section["gpus"]:
            entry.update(fabric_state=state, fabric_status=status)

    return change


def holdup(units: dict[str, Any] | None) -> Change:
    """Return a fabric in progress after five minutes, with these services."""

    def change(section: Section) -> None:
        fabric("In Progress", "N/A")(section)
        section.update(units=units, fabric_waited_s=300.0)

    return change


def place(**fields: object) -> Change:
    """Return a change of the first GPU's place on the bus."""
    return lambda section: section["pci"][0].update(fields)


BRIDGE = "0000:00:01.1"
REDIRECTING = {
    "source_validation": True,
    "request_redirect": True,
    "completion_redirect": True,
    "upstream_forwarding": True,
}


@pytest.mark.parametrize(
    ("change", "code", "severity", "says"),
    [
        (
            lambda s: s.update(gpus={"error": "OSError: nvidia-smi ended with status 9"}),
            "BU-VFY-300",
            "error",
            "gpus could not be looked at: OSError: nvidia-smi ended with status 9",
        ),
        (
            lambda s: s.update(nvlink={"error": "no answer"}),
            "BU-VFY-300",
            "warning",
            "nvlink could not be looked at: no answer",
        ),
        (
            lambda s: s["pci_nvidia_devices"].append("0000:a1:00.0"),
            "BU-VFY-301",
            "error",
            "1 of 3 GPUs on the PCI bus do not answer: 0000:a1:00",
        ),
        (
            gpu(1, processes=[{"pid": 4711, "name": "python3"}]),
            "BU-VFY-303",
            "error",
            f"GPU 1 ({ONE}) is used by 4711 (python3)",
        ),
        (
            gpu(0, mig="Enabled"),
            "BU-VFY-304",
            "error",
            f"GPU 0 ({ZERO}) is split by MIG, so a collective over whole GPUs is not what serves",
        ),
        (
            gpu(0, persistence="Disabled"),
            "BU-VFY-305",
            "warning",
            f"GPU 0 ({ZERO}) leaves persistence mode off: every first use pays for initialisation",
        ),
        (
            gpu(1, clock_event_reasons=["gpu_idle", "hw_thermal_slowdown"]),
            "BU-VFY-306",
            "warning",
            f"GPU 1 ({ONE}) holds its clocks down: hw_thermal_slowdown",
        ),
        (
            gpu(1, remapped_failure="Yes"),
            "BU-VFY-311",
            "error",
            f"GPU 1 ({ONE}) could not remap a broken row of memory",
        ),
        (
            gpu(1, remapped_pending="Yes"),
            "BU-VFY-312",
            "error",
            f"GPU 1 ({ONE}) has a broken row of memory that is remapped at the next reset",
        ),
        (
            gpu(0, ecc_errors={"volatile_dram_uncorrectable": 1, "volatile_dram_correctable": 9}),
            "BU-VFY-313",
            "error",
            f"GPU 0 ({ZERO}) met memory errors since boot that ECC could not correct",
        ),
        (
            gpu(0, recovery_action="Reset"),
            "BU-VFY-314",
            "error",
            f"GPU 0 ({ZERO}) asks for recovery: Reset",
        ),
        (
            gpu(0, ecc_errors={"aggregate_dram_uncorrectable": 1}),
            "BU-VFY-315",
            "warning",
            f"GPU 0 ({ZERO}) met uncorrectable memory errors in its life",
        ),
        (
            lambda s: s["xids"]["events"].extend([{"xid": 79, "pci_bus_id": "0000:00:07", "line": ""}] * 2),
            "BU-VFY-316",
            "error",
            "Xid 79 on 0000:00:07 since boot (2 times): the GPU fell off the bus",
        ),
        (
            lambda s: s["xids"]["events"].append({"xid": None, "pci_bus_id": "0000:00:07.0", "line": ""}),
            "BU-VFY-316",
            "error",
            "the kernel log on 0000:00:07 since boot (1 times): the GPU fell off the bus",
        ),
        (
            lambda s: s["xids"]["events"].append({"xid": 31, "pci_bus_id": "0000:00:07", "line": ""}),
            "BU-VFY-316",
            "warning",
            "Xid 31 on 0000:00:07 since boot (1 times): a program accessed memory it does not own",
        ),
        (
            lambda s: s["xids"]["events"].append({"xid": 999, "pci_bus_id": "0000:00:07", "line": ""}),
            "BU-VFY-316",
            "warning",
            "Xid 999 on 0000:00:07 since boot (1 times): not in the table",
        ),
        (
            holdup(None),
            "BU-FAB-101",
            "error",
            f"the fabric is In Progress on GPU 0 ({ZERO}), GPU 1 ({ONE}) after 300 s: no service could be asked",
        ),
        (
            holdup({"nvidia-fabricmanager.service": {"active": "failed", "result": "exit-code"}}),
            "BU-FAB-101",
            "error",
            f"the fabric is In Progress on GPU 0 ({ZERO}), GPU 1 ({ONE}) after 300 s:"
            " nvidia-fabricmanager.service is failed (exit-code)",
        ),
        (
            holdup({"nvlsm.service": {"active": "active"}}),
            "BU-FAB-101",
            "error",
            f"the fabric is In Progress on GPU 0 ({ZERO}), GPU 1 ({ONE}) after 300 s: no fabric manager is installed",
        ),
        (
            lambda s: s["gpus"][1].update(fabric_status="Insufficient Resources"),
            "BU-FAB-102",
            "error",
            f"GPU 1 ({ONE}) did not join the fabric: Insufficient Resources",
        ),
        (
            lambda s: s["nvlink"][1].update(active_links=17, inactive_links=[5]),
            "BU-FAB-111",
            "error",
            "GPU 1 has 17 of 18 NVLinks, inactive: 5",
        ),
        (
            lambda s: s["nvlink"][0].update(link_gb_per_s=[13.281, 26.562]),
            "BU-FAB-112",
            "error",
            "NVLinks of GPU 0 run at 13.281 GB/s instead of 26.562",
        ),
        (
            lambda s: s["nvlink_errors"]["1"].update(recovery_errors=3),
            "BU-FAB-113",
            "warning",
            "NVLinks of GPU 1 counted errors: recovery_errors 3",
        ),
        (
            lambda s: s["topology"].update(
                gpus=["GPU0", "GPU1", "GPU2"],
                rows=[["X", "NV18", "NODE"], ["NV18", "X", "NODE"], ["NODE", "NODE", "X"]],
            ),
            "BU-FAB-121",
            "error",
            "GPU2 reaches no other GPU by NVLink, the others do",
        ),
        (
            lambda s: s["p2p_read"].update(rows=[["X", "CNS"], ["CNS", "X"]]),
            "BU-FAB-122",
            "error",
            "GPUs cannot reach each other directly (read): GPU0-GPU1 CNS",
        ),
        (
            lambda s: s["host"].update(shm_free_bytes=64 << 20, shm_nccl_files=7),
            None,
            None,
            None,
        ),
        (
            lambda s: s["host"].update(shm_free_bytes=32 << 20, shm_nccl_files=7),
            "BU-VFY-331",
            "error",
            "/dev/shm has 32 MiB free, NCCL needs 64 MiB; 7 files of NCCL lie there",
        ),
        (
            place(aer={"correctable": 4, "nonfatal": 0, "fatal": 2}),
            "BU-VFY-322",
            "warning",
            "PCIe counted fatal errors: 0000:00:06.0 2",
        ),
        (place(bridges=[{"pci_bus_id": BRIDGE, "acs": REDIRECTING}]), None, None, None),
        (fabric("Completed"), None, None, None),
    ],
    ids=[
        "nvidia-smi fails",
        "one part unknown",
        "7 of 8",
        "busy",
        "MIG",
        "persistence",
        "throttled",
        "remap failed",
        "remap pending",
        "uncorrectable since boot",
        "recovery",
        "uncorrectable ever",
        "Xid 79",
        "fell off without an Xid",
        "Xid of a program",
        "Xid nobody knows",
        "fabric, no systemd",
        "fabric manager failed",
        "fabric manager absent",
        "not joined",
        "lost link",
        "slow link",
        "link errors",
        "one without NVLink",
        "no P2P",
        "shm is enough",
        "shm too small",
        "AER",
        "ACS does not matter over NVLink",
        "fabric completed",
    ],
)
def test_one_change_gives_exactly_one_finding(
    change: Change, code: str | None, severity: str | None, says: str | None
) -> None:
    assert found(change) == ([] if code is None else [(code, severity, says)])


def pcie(section: Section) -> None:
    """Make the host one whose GPUs have no NVLink."""
    section["topology"]["rows"] = [["X", "PIX"], ["PIX", "X"]]
    section["nvlink"] = []
    section["nvlink_errors"] = {}
    for entry in section["gpus"]:
        entry.update(fabric_state=None, fabric_status=None)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: None, []),
        (place(bridges=[{"pci_bus_id": BRIDGE, "acs": REDIRECTING}]), ["BU-FAB-131"]),
        (
            place(
                bridges=[
                    {
                        "pci_bus_id": BRIDGE,
                        "acs": {**REDIRECTING, "request_redirect": False, "completion_redirect": False},
                    }
                ]
            ),
            [],
        ),
        (place(bridges=[{"pci_bus_id": BRIDGE, "acs": {"error": "root only"}}]), []),
        (lambda s: s["host"].update(iommu_units=["dmar0"]), ["BU-FAB-132"]),
        (lambda s: s["host"].update(iommu_units=["dmar0"], kernel_command_line="ro iommu=pt quiet"), []),
        (lambda s: s["p2p_write"].update(rows=[["X", "TNS"], ["TNS", "X"]]), ["BU-FAB-122"]),
    ],
    ids=[
        "healthy",
        "ACS redirects",
        "source validation alone",
        "ACS unknown",
        "IOMMU",
        "IOMMU passes through",
        "no P2P",
    ],
)
@pytest.mark.parametrize("nvlinks", [0, None], ids=["known model", "unknown model"])
def test_hosts_without_nvlink(change: Change, expected: list[str], nvlinks: int | None) -> None:
    def both(section: Section) -> None:
        pcie(section)
        change(section)

    assert [code for code, _, _ in found(both, nvlinks=nvlinks)] == expected


INFINITE = {"login": None, "systemd": None, "units": {}}
PORT = {"device": "mlx5_0", "port": 1, "state": "ACTIVE", "link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}
EIGHT_MIB = 8 << 20


@pytest.mark.parametrize(
    ("memlock", "rdma", "expected"),
    [
        (INFINITE, [PORT], []),
        (INFINITE, [], []),
        (None, None, []),
        (
            {**INFINITE, "systemd": EIGHT_MIB},
            [PORT],
            [
                (
                    "BU-VFY-332",
                    "warning",
                    "memory that may be locked is limited: services (systemd's default) 8192 KiB;"
                    " NCCL cannot register larger buffers with mlx5_0",
                )
            ],
        ),
        (
            {**INFINITE, "login": 64 << 10},
            [PORT, {**PORT, "port": 2, "state": "DOWN"}, {**PORT, "device": "mlx5_1"}],
            [
                (
                    "BU-VFY-332",
                    "warning",
                    "memory that may be locked is limited: a login 64 KiB;"
                    " NCCL cannot register larger buffers with mlx5_0, mlx5_1",
                )
            ],
        ),
        ({"login": None, "systemd": EIGHT_MIB, "units": {"sglang.service": None}}, [PORT], []),
        (
            {"login": None, "systemd": None, "units": {"sglang.service": EIGHT_MIB}},
            [PORT],
            [
                (
                    "BU-VFY-332",
                    "warning",
                    "memory that may be locked is limited: sglang.service 8192 KiB;"
                    " NCCL cannot register larger buffers with mlx5_0",
                )
            ],
        ),
        (
            {"login": EIGHT_MIB, "systemd": EIGHT_MIB, "units": {}},
            [],
            [
                (
                    "BU-VFY-332",
                    "info",
                    "memory that may be locked is limited: a login 8192 KiB, services (systemd's default) 8192 KiB;"
                    " no RDMA device is here",
                )
            ],
        ),
        ({**INFINITE, "systemd": {"error": "there is no systemd"}}, [PORT], []),
        (
            {"error": "OSError: no"},
            [PORT],
            [("BU-VFY-300", "warning", "host.memlock could not be looked at: OSError: no")],
        ),
    ],
    ids=[
        "unlimited",
        "unlimited without RDMA",
        "an older script",
        "services",
        "logins",
        "the unit's own limit counts",
        "the unit's own limit is low",
        "noted without RDMA",
        "no systemd",
        "unknown is said",
    ],
)
def test_locked_memory(memlock: Section | None, rdma: list[Section] | None, expected: list[object]) -> None:
    assert found(lambda section: section["host"].update(memlock=memlock, rdma=rdma)) == expected


@pytest.mark.parametrize(
    ("nodes", "allowed", "places", "expected"),
    [
        (2, "0-63", [(0, "0-31"), (1, "32-63")], []),
        (2, "0-31", [(0, "0-31"), (0, "0-31")], []),
        (
            2,
            "0-31",
            [(0, "0-31"), (1, "32-63")],
            [
                (
                    "BU-VFY-333",
                    "warning",
                    "processes may run on processors 0-31 only, none of them next to 0000:00:07.0 (node 1: 32-63)",
                )
            ],
        ),
        (
            2,
            "0-63",
            [(0, "0-31"), (-1, None)],
            [
                (
                    "BU-VFY-334",
                    "info",
                    "the platform does not say which of 2 NUMA nodes 0000:00:07.0 is next to",
                )
            ],
        ),
        (1, "0", [(-1, "1-3"), (-1, None)], []),
        (2, None, [(0, "0-31"), (1, "32-63")], []),
    ],
    ids=["all", "both on one node", "one is far", "the platform is silent", "one node", "an older script"],
)
def test_numa(nodes: int, allowed: str | None, places: list[tuple[int, str | None]], expected: list[object]) -> None:
    def change(section: Section) -> None:
        section["host"].update(numa_nodes=nodes, allowed_cpus=allowed)
        for entry, (node, local) in zip(section["pci"], places, strict=True):
            entry.update(numa_node=node, local_cpus=local)

    assert found(change) == expected


def test_without_a_known_model_the_gpus_are_compared_with_each_other() -> None:
    def change(section: Section) -> None:
        section["nvlink"][1].update(active_links=17, inactive_links=[5])

    assert [code for code, _, _ in found(change, nvlinks=None)] == ["BU-FAB-111"]


@pytest.mark.parametrize(
    ("settings", "causes"),
    [
        ({"login": {}, "files": []}, []),
        ({"login": {"EDITOR": "vi", "CUDA_HOME": "/usr/local/cuda"}, "files": []}, []),
        (
            {
                "login": {"NCCL_P2P_DISABLE": "1"},
                "files": [
                    {"name": "NCCL_P2P_DISABLE", "value": "1", "file": "/etc/nccl.conf", "line": 3},
                    {"name": "NCCL_P2P_DISABLE", "value": "1", "file": "/etc/environment", "line": 1},
                    {"name": "NCCL_DEBUG", "value": "WARN", "file": "/etc/environment", "line": 2},
                ],
            },
            ["NCCL_P2P_DISABLE is set: /etc/nccl.conf:3 (NCCL_P2P_DISABLE=1), /etc/environment:1 (NCCL_P2P_DISABLE=1)"],
        ),
        (
            {"login": {"LD_LIBRARY_PATH": "/opt/old"}, "files": []},
            ["LD_LIBRARY_PATH is set: the login environment (LD_LIBRARY_PATH=/opt/old), no file found that sets it"],
        ),
    ],
    ids=["nothing", "harmless", "where it is set", "login only"],
)
def test_settings(settings: Section, causes: list[str]) -> None:
    judged = health.findings(health.parse(ANSWER), settings=health.Settings.model_validate(settings), nvlinks=18)
    assert [(f.code, f.severity, f.cause) for f in judged] == [("BU-VFY-341", "warning", c) for c in causes]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NCCL_IB_HCA", [("BU-VFY-341", "warning")]),
        ("NCCL_CROSS_NIC", [("BU-VFY-342", "info")]),
        ("NCCL_DEBUG", []),
        ("NCCL_VERSION", []),
        ("GLOO_SOCKET_IFNAME", []),
    ],
)
def test_which_variables_matter(name: str, expected: list[object]) -> None:
    setting = {"name": name, "value": "1", "file": "/etc/nccl.conf", "line": 1}
    settings = health.Settings.model_validate({"files": [setting]})
    judged = health.findings(health.parse(ANSWER), settings=settings, nvlinks=18)
    assert [(f.code, f.severity) for f in judged] == expected


def test_errors_come_first() -> None:
    def change(section: Section) -> None:
        section["gpus"][0].update(persistence="Disabled", mig="Enabled")

    assert [severity for _, severity, _ in found(change)] == ["error", "warning"]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda s: s["gpus"][1].update(index="first"), "gpus"),
        (lambda s: s.pop("host"), "host"),
        (lambda s: s["xids"].update(events=[{"xid": "x"}]), "xids"),
    ],
)
def test_an_answer_that_cannot_be_read_names_the_place(change: Change, place: str) -> None:
    section = copy.deepcopy(ANSWER)
    change(section)
    with pytest.raises(HostError) as caught:
        health.parse(section)
    assert caught.value.why is not None
    assert caught.value.why.startswith(place)
