"""The one diff: a line for each thing that is not as wanted, none where it is, and unknowns apart from both."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from host_case import (
    SITE,
    Answer,
    Change,
    both,
    converged,
    drop,
    gpu,
    library,
    observed,
    package,
    pci,
    put,
    stack,
    unit,
)

from bringup import drift, host_state, wanted
from bringup.drift import Difference

DIGEST = stack().env_digest("cp311-x86_64")
STACK_DIGEST = stack().digest


def lines(*changes: Change, **kwargs: object) -> list[tuple[str, str | None, str | None]]:
    """Return the differences of the changed host, and insist that nothing is unknown."""
    state = observed(*changes)
    assert drift.unknowns(stack(), state, SITE) == ()
    return [(d.path, d.wanted, d.found) for d in drift.diff(stack(), state, SITE)]


def test_a_converged_host_has_no_line() -> None:
    assert lines() == []


CUDA = "/usr/local/cuda"
LIB13 = "/usr/local/cuda-13.0/targets/x86_64-linux/lib"
ENVIRONMENT = "environment inspected 0"

ONE_LINE: list[tuple[str, Change, tuple[str, str | None, str | None]]] = [
    (
        "rolled back",
        put("pin", {"digest": STACK_DIGEST, "reason": "slow", "since": "2026-11-30T10:00:00Z"}),
        ("pin", None, f"{STACK_DIGEST}, since 2026-11-30T10:00:00Z: slow"),
    ),
    (
        "no key",
        put(f"apt keys {wanted.KEY_FILE}", {"error": "absent"}),
        ("apt.key", SITE.key_fingerprint, None),
    ),
    (
        "another key",
        put(f"apt keys {wanted.KEY_FILE}", {"fingerprints": ["A" * 40]}),
        ("apt.key", SITE.key_fingerprint, "A" * 40),
    ),
    (
        "a key that is none",
        put(f"apt keys {wanted.KEY_FILE}", {"error": "not a keyring: x"}),
        ("apt.key", SITE.key_fingerprint, "not a keyring: x"),
    ),
    ("no source", put(f"files {wanted.SOURCE_FILE}", None), ("apt.source", SITE.repository_url, None)),
    (
        "edited source",
        put(f"files {wanted.SOURCE_FILE} sha256", "0" * 64),
        ("apt.source", SITE.repository_url, f"{wanted.SOURCE_FILE} has other content"),
    ),
    (
        "no preferences",
        put(f"files {wanted.PREFERENCES_FILE}", None),
        ("apt.preferences", "the locked packages pinned", None),
    ),
    (
        "blacklist gone",
        put("apt blacklist", []),
        ("driver.unattended_upgrades", "3 packages blacklisted", None),
    ),
    (
        "blacklist of the metapackage only",
        put("apt blacklist", ["^nvidia-", "("]),
        ("driver.unattended_upgrades", "3 packages blacklisted", "not blacklisted: libnvidia-compute-580"),
    ),
    ("nouveau file gone", put(f"files {wanted.NOUVEAU_FILE}", None), ("driver.nouveau", "nouveau off", None)),
    (
        "nouveau loaded",
        put("driver modules", ["nouveau", "nvidia"]),
        ("driver.nouveau", "nouveau off", "nouveau is loaded"),
    ),
    (
        "one library upgraded",
        put("dpkg packages libnvidia-compute-580 version", "580.126.09-0ubuntu1"),
        (
            "driver.packages",
            "libnvidia-compute-580 580.95.05-0ubuntu1",
            "libnvidia-compute-580 580.126.09-0ubuntu1",
        ),
    ),
    (
        "one library upgraded, and its hold lifted by that",
        put("dpkg packages libnvidia-compute-580", {"version": "580.126.09-0ubuntu1", "status": "ii"}),
        (
            "driver.packages",
            "libnvidia-compute-580 580.95.05-0ubuntu1",
            "libnvidia-compute-580 580.126.09-0ubuntu1",
        ),
    ),
    (
        "one library upgraded, nvidia-smi fails",
        both(
            put("dpkg packages libnvidia-compute-580 version", "580.126.09-0ubuntu1"),
            put("gpus listed", None),
            put("driver smi_status", 18),
        ),
        (
            "driver.packages",
            "libnvidia-compute-580 580.95.05-0ubuntu1",
            "libnvidia-compute-580 580.126.09-0ubuntu1",
        ),
    ),
    (
        "half-configured module",
        put("dpkg packages nvidia-dkms-580-open status", "hF"),
        ("driver.packages", "nvidia-dkms-580-open 580.95.05-0ubuntu1", "nvidia-dkms-580-open not installed"),
    ),
    (
        "one hold lifted",
        put("dpkg packages libnvidia-compute-580 status", "ii"),
        ("driver.hold", "3 packages held", "not held: libnvidia-compute-580"),
    ),
    (
        "another driver loaded",
        put("driver loaded version", "570.124.06"),
        ("driver.loaded", "580.95.05 open", "570.124.06 open"),
    ),
    (
        "the other flavour loaded",
        put("driver loaded flavour", "closed"),
        ("driver.loaded", "580.95.05 open", "580.95.05 closed"),
    ),
    ("no driver loaded", put("driver loaded", None), ("driver.loaded", "580.95.05 open", None)),
    (
        "persistence stopped",
        put(f"services {wanted.PERSISTENCE_UNIT} active", "inactive"),
        ("driver.persistence", "nvidia-persistenced.service enabled and active", "enabled and inactive"),
    ),
    (
        "persistence disabled",
        put(f"services {wanted.PERSISTENCE_UNIT} enabled", "disabled"),
        ("driver.persistence", "nvidia-persistenced.service enabled and active", "disabled and active"),
    ),
    (
        "an alternative in automatic mode",
        put("toolkits alternatives cuda-13 mode", "auto"),
        ("cuda.alternatives", "cuda, cuda-13 manual", "cuda-13 is auto"),
    ),
    (
        "a toolkit package of another version",
        put("dpkg packages cuda-nvrtc-13-0 version", "13.0.90-1"),
        ("cuda.toolkit.13.0", "cuda-nvrtc-13-0 13.0.88-1", "cuda-nvrtc-13-0 13.0.90-1"),
    ),
    (
        "a package both toolkits share",
        put("dpkg packages cuda-toolkit-config-common version", "13.2.1-1"),
        (
            "cuda.toolkit.12.8",
            "cuda-toolkit-config-common 13.0.96-1",
            "cuda-toolkit-config-common 13.2.1-1",
        ),
    ),
    (
        "the loader entry removed",
        both(
            put(f"files {wanted.LINKER_FILE}", None),
            put("loader hits libnvrtc.so.13", [library("/usr/local/cuda/targets/x86_64-linux/lib/libnvrtc.so.13")]),
            drop("loader hits libnvrtc.so.12"),
        ),
        ("linker.conf", f"{LIB13}, /usr/local/cuda-12.8/targets/x86_64-linux/lib", None),
    ),
    (
        "a hit through the link that moves",
        put("loader hits libnvrtc.so.13", [library(f"{CUDA}/targets/x86_64-linux/lib/libnvrtc.so.13", LIB13)]),
        (
            "linker.libnvrtc.so.13",
            "/usr/local/cuda-13.0",
            f"{CUDA}/targets/x86_64-linux/lib/libnvrtc.so.13",
        ),
    ),
    (
        "a toolkit whose name begins alike",
        put("loader hits libnvrtc.so.13", [library("/usr/local/cuda-13.01/lib/libnvrtc.so.13")]),
        ("linker.libnvrtc.so.13", "/usr/local/cuda-13.0", "/usr/local/cuda-13.01/lib/libnvrtc.so.13"),
    ),
    (
        "a library that is not found",
        drop("loader hits libnvrtc.so.12"),
        ("linker.libnvrtc.so.12", "/usr/local/cuda-12.8", None),
    ),
    (
        "another torch",
        both(put(f"{ENVIRONMENT} distributions torch", "2.9.1"), put(f"{ENVIRONMENT} changed", ["torch"])),
        ("environment.distribution.torch", "2.9.1+cu130", "2.9.1"),
    ),
    (
        "a distribution removed",
        drop(f"{ENVIRONMENT} distributions sgl-kernel"),
        ("environment.distribution.sgl-kernel", "0.3.21+cu130", None),
    ),
    (
        "a distribution more",
        put(f"{ENVIRONMENT} distributions ipython", "9.1"),
        ("environment.distribution.ipython", None, "9.1"),
    ),
    (
        "a file appended to",
        put(f"{ENVIRONMENT} changed", ["torch"]),
        ("environment.files.torch", "as installed", "changed"),
    ),
    (
        "a file unlike its hash",
        put(f"{ENVIRONMENT} unlike_record", {"torch": ["torch/lib/a.so"]}),
        ("environment.files.torch", "as installed", "changed: torch/lib/a.so"),
    ),
    (
        "a stray file",
        put(f"{ENVIRONMENT} strays", ["sitecustomize.py"]),
        ("environment.strays", None, "sitecustomize.py"),
    ),
    (
        "no launcher",
        put(f"files {wanted.LAUNCHER_FILE}", None),
        ("environment.launcher", "the launcher of this bringup, executable", None),
    ),
    (
        "a launcher nobody may run",
        put(f"files {wanted.LAUNCHER_FILE} mode", 0o600),
        ("environment.launcher", "the launcher of this bringup, executable", "mode 0600"),
    ),
    ("no record", put("verification", None), ("verification", "verified", None)),
    (
        "a record of another environment",
        put("verification environment", "abc-1"),
        ("verification", "verified", "verified for environment abc-1"),
    ),
    (
        "a record of another generation",
        put("verification environment", f"{DIGEST}-2"),
        ("verification", "verified", f"verified for environment {DIGEST}-2"),
    ),
    (
        "a record under other limits",
        put("verification limits_digest", "0123456789ab"),
        ("verification", "verified", "verified for other limits (0123456789ab)"),
    ),
    (
        "a record of another driver",
        put("verification driver_version", "570.1"),
        ("verification", "verified", "verified for driver 570.1"),
    ),
    (
        "a board exchanged",
        put("gpus listed 1 uuid", "GPU-9"),
        ("verification", "verified", "verified for other GPUs (2 of them)"),
    ),
    (
        "MIG turned on",
        put("gpus listed 1 mig_mode", "Enabled"),
        ("verification", "verified", "verified for another MIG mode"),
    ),
    (
        "/usr/local/cuda flipped",
        put(f"toolkits links {CUDA} resolved", "/usr/local/cuda-12.8"),
        ("cuda.default", "/usr/local/cuda-13.0", "/usr/local/cuda-12.8"),
    ),
    ("/usr/local/cuda gone", drop(f"toolkits links {CUDA}"), ("cuda.default", "/usr/local/cuda-13.0", None)),
    (
        "service variables edited",
        put(f"files {wanted.SERVICE_FILE} sha256", "0" * 64),
        ("service.file", "CUDA_HOME, SGLANG_X", f"{wanted.SERVICE_FILE} has other content"),
    ),
    (
        "another environment serves",
        both(
            put("environment current", f"{wanted.ENVS}/other-1"),
            put("environment environments 0", {**converged()["environment"]["environments"][0], "name": "other-1"}),
            put("environment environments 0 digest", "other"),
        ),
        ("environment.current", DIGEST, "other-1"),
    ),
    (
        "current leads to an unfinished one",
        put("environment environments 0 is_complete", False),
        ("environment.current", DIGEST, f"{DIGEST}-1, not whole"),
    ),
    (
        "current is gone",
        both(put("environment current", None), put("environment inspected", [])),
        ("environment.current", DIGEST, None),
    ),
    (
        "current is tainted",
        put("environment environments 0 is_tainted", True),
        ("environment.current", DIGEST, f"{DIGEST}-1, tainted"),
    ),
    (
        "its interpreter is gone",
        put(f"{ENVIRONMENT} has_interpreter", False),
        ("environment.current", DIGEST, f"{DIGEST}-1, its interpreter is gone"),
    ),
]


@pytest.mark.parametrize(("change", "line"), [case[1:] for case in ONE_LINE], ids=[case[0] for case in ONE_LINE])
def test_one_thing_that_differs_is_one_line(change: Change, line: tuple[str, str | None, str | None]) -> None:
    assert lines(change) == [line]


# ---------------------------------------------------------------- stacks and hosts of other kinds


def held(answer: Answer) -> None:
    answer["kernel"] = {"policy": "hold"}


def nvswitch(answer: Answer) -> None:
    """Make the host an H200 board with everything its fabric needs."""
    answer["gpus"]["pci"] = [pci("0000:01:00.0", "2335"), pci("0000:11:00.0", "2335")]
    answer["gpus"]["switches"] = [pci("0000:c1:00.0", "22a3", "0680")]
    answer["dpkg"]["packages"]["nvidia-fabricmanager"] = {"version": "580.95.05-1", "status": "hi"}
    answer["apt"]["blacklist"].append("nvidia-fabricmanager")
    answer["services"][wanted.FABRIC_UNIT] = unit()


def nvlink5(answer: Answer) -> None:
    """Make the host a B200 board with everything its fabric needs."""
    nvswitch(answer)
    answer["gpus"]["pci"] = [pci("0000:01:00.0", "2901"), pci("0000:11:00.0", "2901")]
    answer["gpus"]["switches"] = []
    answer["fabric"] |= {"switch_management": ["mlx5_0"], "is_ib_umad_loaded": True}
    answer["dpkg"]["packages"]["nvlsm"] = {"version": "2025.06.11-1", "status": "hi"}
    answer["apt"]["blacklist"].append("nvlsm")
    text = wanted.fabric_modules_text()
    answer["files"][wanted.FABRIC_MODULES_FILE] = {
        "sha256": wanted.sha256(text),
        "size_bytes": len(text),
        "mode": 0o644,
        "user_id": 0,
    }


def guest(answer: Answer) -> None:
    """Make the host a guest that got two GPUs of an H200 board and no switch."""
    answer["gpus"]["pci"] = [pci("0000:01:00.0", "2335"), pci("0000:11:00.0", "2335")]
    for listed in answer["gpus"]["listed"]:
        listed["fabric_state"] = "Completed"


def at_least(answer: Answer) -> None:
    answer["driver"]["policy"] = "at_least"


def newer_driver(answer: Answer) -> None:
    """Make the host one whose whole driver is newer than the locked one."""
    answer["driver"]["loaded"]["version"] = "580.159.04"
    answer["driver"]["libcuda"][0]["version"] = "580.159.04"
    answer["verification"]["driver_version"] = "580.159.04"
    for name in ("libnvidia-compute-580", "nvidia-dkms-580-open"):
        answer["dpkg"]["packages"][name]["version"] = "580.159.04-0ubuntu1"


def existing(answer: Answer) -> None:
    answer["python"]["interpreter"] = "existing:/srv/env"


def served_outside(answer: Answer) -> None:
    """Make the host one with an environment of its own."""
    answer["environment"]["current"] = None
    answer["environment"]["environments"] = []
    answer["environment"]["inspected"][0] |= {"path": "/srv/env", "resolved": "/srv/env"}
    answer["verification"]["environment"] = "/srv/env"
    answer["files"][wanted.SERVICE_FILE] = None
    answer["files"][wanted.LAUNCHER_FILE] = None


def runfile(answer: Answer) -> None:
    answer["cuda"]["runfiles"] = {"12.8": {"file": "cuda_12.8.run", "size_bytes": 5, "sha256": "c" * 64}}


def container(answer: Answer) -> None:
    """Make the host one whose driver a container runtime put there: newer, of no package, and no systemd."""
    served_outside(answer)
    newer_driver(answer)
    answer["driver"]["libcuda"][0]["is_packaged"] = False
    answer["dpkg"]["packages"] = {}
    answer["apt"]["blacklist"] = []
    answer["services"] = {"error": "systemd is not running"}
    for name in (wanted.SOURCE_FILE, wanted.PREFERENCES_FILE, wanted.NOUVEAU_FILE):
        answer["files"][name] = None
    answer["apt"]["keys"][wanted.KEY_FILE] = {"error": "absent"}


OTHERS: list[tuple[str, Change | None, Change, list[tuple[str, str | None, str | None]]]] = [
    ("kernel held: none installed", held, put("pin", None), []),
    (
        "kernel held: one is not",
        held,
        both(
            put("dpkg packages linux-image-6.1.0-21-amd64", {"version": "6.1.90-1", "status": "hi"}),
            put("dpkg packages linux-headers-amd64", {"version": "6.1.90-1", "status": "ii"}),
        ),
        [("kernel.hold", "2 kernel packages held", "not held: linux-headers-amd64")],
    ),
    (
        "kernel free: nothing is asked of it",
        None,
        put("dpkg packages linux-headers-amd64", {"version": "6.1.90-1", "status": "ii"}),
        [],
    ),
    ("H200: as wanted", None, nvswitch, []),
    (
        "H200: no fabric manager",
        None,
        both(nvswitch, drop("dpkg packages nvidia-fabricmanager")),
        [("fabric.packages", "nvswitch: 1 packages", None)],
    ),
    (
        "H200: fabric manager of another point release",
        None,
        both(nvswitch, put("dpkg packages nvidia-fabricmanager version", "580.82.07-1")),
        [
            (
                "fabric.packages",
                "nvidia-fabricmanager 580.95.05-1",
                "nvidia-fabricmanager 580.82.07-1",
            )
        ],
    ),
    (
        "H200: fabric manager stopped",
        None,
        both(nvswitch, put(f"services {wanted.FABRIC_UNIT} active", "failed")),
        [("fabric.service", "nvidia-fabricmanager.service enabled and active", "enabled and failed")],
    ),
    (
        "H200: fabric manager not held",
        None,
        both(nvswitch, put("dpkg packages nvidia-fabricmanager status", "ii")),
        [("driver.hold", "4 packages held", "not held: nvidia-fabricmanager")],
    ),
    (
        "H200: nobody is to manage it",
        lambda s: s.update(fabric={"policy": "external"}),
        both(nvswitch, drop("dpkg packages nvidia-fabricmanager")),
        [],
    ),
    ("H200: a guest without switches", None, guest, []),
    ("B200: as wanted", None, nvlink5, []),
    (
        "B200: ib_umad not loaded",
        None,
        both(nvlink5, put("fabric is_ib_umad_loaded", False)),
        [("fabric.ib_umad", "ib_umad loaded, at every boot", "ib_umad is not loaded")],
    ),
    (
        "B200: ib_umad comes with the boot that is ahead",
        None,
        both(nvlink5, put("fabric is_ib_umad_loaded", False), put("driver loaded", None)),
        [("driver.loaded", "580.95.05 open", None)],
    ),
    (
        "B200: ib_umad not at boot",
        None,
        both(nvlink5, put(f"files {wanted.FABRIC_MODULES_FILE}", None)),
        [("fabric.ib_umad", "ib_umad loaded, at every boot", None)],
    ),
    (
        "B200: subnet manager missing",
        None,
        both(nvlink5, drop("dpkg packages nvlsm")),
        [("fabric.packages", "nvlsm 2025.06.11-1", "nvlsm not installed")],
    ),
    ("at least: a newer driver is kept", at_least, newer_driver, []),
    (
        "at least: one package moved",
        at_least,
        both(newer_driver, put("dpkg packages libnvidia-compute-580 version", "580.170.01-0ubuntu1")),
        [("driver.packages", "all of 580.159.04", "libnvidia-compute-580 580.170.01-0ubuntu1")],
    ),
    (
        "at least: newer on disk than loaded",
        at_least,
        both(newer_driver, put("driver loaded version", "580.95.05"), put("gpus listed", None)),
        [
            (
                "driver.packages",
                "libnvidia-compute-580 580.95.05-0ubuntu1, nvidia-dkms-580-open 580.95.05-0ubuntu1",
                "libnvidia-compute-580 580.159.04-0ubuntu1, nvidia-dkms-580-open 580.159.04-0ubuntu1",
            ),
            ("driver.loaded", "580.159.04 open, which lies on disk", "580.95.05 open"),
        ],
    ),
    (
        "exact: a newer driver is a difference",
        None,
        newer_driver,
        [
            (
                "driver.packages",
                "libnvidia-compute-580 580.95.05-0ubuntu1, nvidia-dkms-580-open 580.95.05-0ubuntu1",
                "libnvidia-compute-580 580.159.04-0ubuntu1, nvidia-dkms-580-open 580.159.04-0ubuntu1",
            ),
            ("driver.loaded", "580.95.05 open", "580.159.04 open"),
        ],
    ),
    ("existing environment: as wanted", existing, served_outside, []),
    (
        "existing environment: not there",
        existing,
        both(served_outside, put("environment inspected", [])),
        [("environment.existing", "a Python environment at /srv/env", None)],
    ),
    (
        "existing environment: another torch",
        existing,
        both(served_outside, put(f"{ENVIRONMENT} distributions torch", "2.9.1")),
        [("environment.distribution.torch", "==2.9.1+cu130", "2.9.1")],
    ),
    ("runfile: there", runfile, drop("dpkg packages cuda-nvrtc-12-8"), []),
    (
        "runfile: not there",
        runfile,
        drop("toolkits installed 12.8"),
        [("cuda.toolkit.12.8", "12.8 from cuda_12.8.run", None)],
    ),
]


@pytest.mark.parametrize(
    ("described", "change", "wanted_lines"), [case[1:] for case in OTHERS], ids=[case[0] for case in OTHERS]
)
def test_other_stacks_and_hosts(
    described: Change | None, change: Change, wanted_lines: list[tuple[str, str | None, str | None]]
) -> None:
    wish = stack(described)
    state = observed(change)
    if state.verification is not None and not isinstance(state.verification, host_state.Unknown):
        assert state.verification.limits_digest == wanted.limits_digest(wish)
    assert drift.unknowns(wish, state, SITE) == ()
    assert [(d.path, d.wanted, d.found) for d in drift.diff(wish, state, SITE)] == wanted_lines


def test_a_container_with_everything_in_place_is_as_wanted_without_a_lock() -> None:
    wish = stack(both(at_least, existing), is_locked=False)
    state = observed(container)
    assert drift.unknowns(wish, state, SITE) == ()
    assert drift.diff(wish, state, SITE) == ()


# ---------------------------------------------------------------- a bare host, and order


def bare(answer: Answer) -> None:
    """Make the host one on which nothing was done yet."""
    answer["dpkg"]["packages"] = {}
    answer["apt"] |= {"sources": [], "keys": {wanted.KEY_FILE: {"error": "absent"}}, "blacklist": []}
    answer["driver"] |= {"loaded": None, "modules": [], "libcuda": [], "nvidia_smi": None, "smi_status": None}
    answer["gpus"]["listed"] = None
    answer["toolkits"] |= {"installed": {}, "links": {}, "alternatives": {}}
    answer["loader"] |= {"directories": [], "hits": {}}
    answer["environment"] |= {"current": None, "environments": [], "inspected": []}
    answer["verification"] = None
    answer["services"] = {wanted.PERSISTENCE_UNIT: unit("inactive", "", "not-found")}
    answer["files"] = dict.fromkeys(answer["files"])


def test_a_bare_host_names_everything_in_the_order_of_the_deploy() -> None:
    state = observed(bare)
    found = drift.diff(stack(), state, SITE)
    assert [(d.path, d.task) for d in found] == [
        ("apt.key", "driver"),
        ("apt.source", "driver"),
        ("apt.preferences", "driver"),
        ("driver.unattended_upgrades", "driver"),
        ("driver.nouveau", "driver"),
        ("driver.packages", "driver"),
        ("driver.hold", "driver"),
        ("driver.loaded", "driver"),
        ("driver.persistence", "driver"),
        ("cuda.alternatives", "cuda"),
        ("cuda.toolkit.12.8", "cuda"),
        ("cuda.toolkit.13.0", "cuda"),
        ("linker.conf", "linker"),
        ("environment.launcher", "environment"),
        ("verification", "verify"),
        ("cuda.default", "switch"),
        ("service.file", "switch"),
        ("environment.current", "switch"),
    ]
    assert all(d.found is None for d in found)
    assert drift.unknowns(stack(), state, SITE) == ()


def test_every_path_has_a_case_here_and_every_case_a_path() -> None:
    seen = {case[2][0] for case in ONE_LINE} | {line[0] for case in OTHERS for line in case[3]}
    unseen = [path.pattern for path in drift.PATHS if not any(fnmatchcase(p, path.pattern) for p in seen)]
    unknown = [p for p in seen if not any(fnmatchcase(p, path.pattern) for path in drift.PATHS)]
    assert (unseen, unknown) == ([], [])


def test_a_difference_knows_its_area_and_its_task() -> None:
    difference = Difference("environment.distribution.torch", "2.9.1+cu130", "2.9.1")
    assert (difference.area, difference.task) == ("environment", "environment")
    assert Difference("environment.current", "a", None).task == "switch"


# ---------------------------------------------------------------- unknown is neither as wanted nor a difference


@pytest.mark.parametrize("section", sorted(set(host_state.SECTIONS) - {"simulated"}))
@pytest.mark.parametrize("change", [None, bare], ids=["converged", "bare"])
def test_an_unknown_section_never_adds_a_line(section: str, change: Change | None) -> None:
    changes = [] if change is None else [change]
    known = {d.path for d in drift.diff(stack(), observed(*changes), SITE)}
    blind = {d.path for d in drift.diff(stack(), observed(*changes, put(section, {"error": "no"})), SITE)}
    # A finer look at the loader is masked by the coarser line while that can be seen.
    assert blind - known <= {"linker.libnvrtc.so.12", "linker.libnvrtc.so.13"}


@pytest.mark.parametrize(
    ("section", "reasons"),
    [
        ("pin", ["pin: no"]),
        (
            "dpkg",
            [
                "driver.unattended_upgrades: no",
                "driver.packages: no",
                "driver.hold: no",
                "cuda.toolkit.*: no",
            ],
        ),
        ("services", []),
        ("loader", ["linker.lib*: no"]),
        ("verification", ["verification: no"]),
        ("space", []),
        ("locks", []),
    ],
)
def test_a_section_that_a_rule_needs_is_named(section: str, reasons: list[str]) -> None:
    state = observed(put(section, {"error": "no"}))
    assert list(drift.unknowns(stack(), state, SITE)) == reasons


def test_services_matter_where_the_driver_does_not_say_that_it_persists() -> None:
    state = observed(put("services", {"error": "systemd is not running"}), put("gpus listed 0 is_persistent", False))
    assert drift.unknowns(stack(), state, SITE) == ("driver.persistence: systemd is not running",)


@pytest.mark.parametrize(
    ("lock", "reasons"),
    [
        pytest.param(
            lambda lock: lock["packages"].clear(),
            ("driver.packages: the lock holds no driver packages for debian12-x86_64: run bringup lock",),
            id="no packages for this release",
        ),
        pytest.param(
            lambda lock: lock["wheels"]["platform"].clear(),
            (
                "environment.distribution.*: the lock holds no wheels for cp311-x86_64: run bringup lock",
                "verification: the lock holds no wheels for cp311-x86_64: run bringup lock",
                "environment.current: the lock holds no wheels for cp311-x86_64: run bringup lock",
            ),
            id="no wheels for this platform",
        ),
    ],
)
def test_what_the_lock_does_not_say_is_unknown(lock: Change, reasons: tuple[str, ...]) -> None:
    assert drift.unknowns(stack(lock=lock), observed(), SITE) == reasons


def test_a_lock_without_the_fabric_is_unknown_where_it_is_needed() -> None:
    wish = stack(lock=lambda lock: lock["packages"]["debian12-x86_64"]["fabric"].clear())
    assert drift.unknowns(wish, observed(), SITE) == ()
    assert drift.unknowns(wish, observed(nvswitch), SITE) == (
        "fabric.packages: the lock holds no nvswitch packages for debian12-x86_64: run bringup lock",
    )


def test_a_release_without_a_repository_is_unknown() -> None:
    def devuan(answer: Answer) -> None:
        answer["os"] |= {"id": "devuan", "version_id": "5"}

    def lock(locked: Answer) -> None:
        locked["packages"]["devuan5-x86_64"] = locked["packages"]["debian12-x86_64"]

    reasons = drift.unknowns(stack(lock=lock), observed(devuan))
    assert reasons[0] == "apt.key: no repository is known for devuan5-x86_64: name one with bringup_apt_url"


# ---------------------------------------------------------------- verification, GPUs in use


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (put("pin", None), "verified"),
        (put("kernel boot_id", "boot-2"), "stale"),
        (put("kernel", {"error": "no"}), "stale"),
        (put("verification", None), "none"),
        (put("verification", {"error": "no"}), "none"),
        (put("verification driver_version", "570.1"), "none"),
    ],
    ids=["this boot", "another boot", "boot not known", "no record", "record not known", "of another driver"],
)
def test_the_state_of_the_verification(change: Change, state: str) -> None:
    observed_state = observed(change)
    assert drift.verification_state(stack(), observed_state, SITE) == state
    shown = drift.verification(stack(), observed_state, SITE)
    assert shown["state"] == state
    assert [backend["backend"] for backend in shown["backends"]] == ([] if state == "none" else ["nccl"])


def test_a_record_of_before_this_boot_is_no_difference() -> None:
    assert lines(put("kernel boot_id", "boot-2")) == []


def process(unit_name: str | None, is_computing: bool) -> Answer:
    return {
        "pid": 7,
        "command": "python3",
        "user_id": 1000,
        "unit": unit_name,
        "devices": ["/dev/nvidia0"],
        "is_computing": is_computing,
    }


@pytest.mark.parametrize(
    ("found", "count"),
    [
        ([], 0),
        ([process("nvidia-persistenced.service", False)], 0),
        ([process("nvidia-dcgm.service", True)], 1),
        ([process("inference.service", False)], 1),
        ([process(None, False), process("nvidia-fabricmanager.service", False)], 1),
    ],
    ids=["nobody", "a daemon", "a daemon that computes", "a service", "a user beside a daemon"],
)
def test_gpus_in_use(found: list[Answer], count: int) -> None:
    users = drift.gpus_in_use(observed(put("processes gpu", found)))
    assert not isinstance(users, host_state.Unknown)
    assert len(users) == count


def test_gpus_nobody_could_look_at_count_as_in_use() -> None:
    assert drift.gpus_in_use(observed(put("processes", {"error": "no"})))


# ---------------------------------------------------------------- the files that are compared and written


def test_the_text_of_the_files() -> None:
    wish = stack()
    locked = wish.locked_packages("debian12-x86_64")
    assert locked is not None
    head = "Written by bringup; a change here is undone by the next apply.\n"
    assert wanted.source_text("http://m/apt") == (
        f"# {head}Types: deb\nURIs: http://m/apt/\nSuites: /\nSigned-By: /etc/apt/keyrings/bringup-nvidia.gpg\n"
    )
    assert wanted.blacklist_text(["libnvidia-compute-580", "nvidia-driver-pinning-580.95.05"]) == (
        f"// {head}Unattended-Upgrade::Package-Blacklist {{\n"
        '  "^libnvidia-compute-580$";\n  "^nvidia-driver-pinning-580[.]95[.]05$";\n};\n'
    )
    assert wanted.linker_text(wish, "x86_64") == (f"# {head}{LIB13}\n/usr/local/cuda-12.8/targets/x86_64-linux/lib\n")
    assert wanted.linker_text(wish, "aarch64").splitlines()[1] == "/usr/local/cuda-13.0/targets/sbsa-linux/lib"
    assert wanted.service_text(wish) == (f'# {head}CUDA_HOME="/usr/local/cuda-13.0"\nSGLANG_X="a \\"b\\" \\$c"\n')
    assert wanted.nouveau_text() == f"# {head}blacklist nouveau\noptions nouveau modeset=0\n"
    assert "Package: libnvidia-compute-580 nvidia-dkms-580-open\nPin: version 580.95.05-0ubuntu1\n" in (
        wanted.preferences_text(locked)
    )


@pytest.mark.parametrize(
    ("version", "upstream"),
    [
        ("580.95.05-0ubuntu1", "580.95.05"),
        ("1:580.95.05-1", "580.95.05"),
        ("2.28.3-1+cuda13.0", "2.28.3"),
        ("13.0", "13.0"),
    ],
)
def test_the_upstream_part_of_a_version(version: str, upstream: str) -> None:
    assert wanted.upstream(version) == upstream


def test_driver_versions_compare_as_numbers() -> None:
    assert wanted.version_key("580.95.05") < wanted.version_key("580.159.04") < wanted.version_key("590.1")


def test_the_fabric_is_unknown_where_the_gpus_are() -> None:
    assert wanted.fabric_kind(stack(), observed(put("gpus", {"error": "no"}))) is None
    assert gpu(0, "x")["fabric_state"] is None
    assert package("x", "1")["name"] == "x"
