"""The proof: what it runs, what it makes of the documents, when it leaves a host alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import host_case
import pytest
from host_case import both, put
from scripted import Answer, Rig, answer, changed

from bringup import wanted
from bringup.findings import proof
from tasks import verify

STACK = host_case.stack()
DIGEST = STACK.env_digest("cp311-x86_64")
CHECK = {
    "schema": 1,
    "exit_status": 0,
    "message": None,
    "versions": {"distributions": {"torch": "2.9.1+cu130", "sgl-kernel": "0.3.21+cu130"}},
    "imports": {},
    "nvrtc": {},
}
STEPS = ["settle", "stack_check", "allreduce_bench", f"write {verify.RECORD} --mode 0644 --undo ..."]


def bench(**more: object) -> Answer:
    row = {
        "backend": "gloo",
        "payload_bytes": 4194304,
        "is_graph": False,
        "is_in_place": False,
        "operations_per_sample": 1,
        "warmup_samples": 1,
        "samples": 5,
        "wall_us": 900.0,
        "median_us": 800.0,
        "min_us": 700.0,
        "p90_us": 900.0,
        "p99_us": 900.0,
        "max_us": 900.0,
        "algbw_gb_per_s": 5.2,
        "busbw_gb_per_s": 9.1,
        "rank_median_us": [800.0] * 8,
    }
    return {
        "schema": 1,
        "program": "allreduce_bench",
        "exit_status": 0,
        "outcome": "measured",
        "message": None,
        "system": {"device": "cpu", "ranks": 8, "hosts": ["gpu-01"]},
        "backends": {"gloo": {"state": "measured", "reason": None}},
        "rows": [row],
        **more,
    }


def files(check: Answer = CHECK, benched: Answer | None = None) -> dict[str, str]:
    return {
        verify.output_path("stack_check"): json.dumps(check),
        verify.output_path("allreduce_bench"): json.dumps(benched or bench()),
    }


def steps(rig: Rig, **how: Any) -> list[str]:
    """Return the commands, those that run a script by its name alone."""
    return [
        command.split()[1].removeprefix("verify-") if command.startswith("do verify-") else command
        for command in rig.run(verify.proof_of_host, **how)
    ]


USER = {"pid": 7, "command": "python", "user_id": 0, "unit": None, "devices": [], "is_computing": True}
unproved = put("verification", None)
simulated = put("simulated", ["gpu", "driver", "wheels"])


def test_a_proved_host_yields_nothing(tmp_path: Path) -> None:
    assert steps(Rig(tmp_path, answer())) == []


def test_an_unknown_host_is_refused_and_nothing_else(tmp_path: Path) -> None:
    assert steps(Rig(tmp_path, {"error": "what"})) == ["refuse BU-PRE-001"]


def test_a_missing_record_is_made(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(both(unproved, put("simulated", ["gpu"]))), files=files())
    assert steps(rig) == STEPS
    assert [(m["backend"], m["state"], m.get("busbw_gb_per_s")) for m in rig.measured] == [
        ("gloo", "measured", 9.1),
        ("nccl", "not_run", None),
    ]


def test_force_measures_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(put("simulated", ["gpu"])), files=files(), force=True)
    assert steps(rig) == STEPS


@pytest.mark.parametrize(
    ("change", "expected", "findings"),
    [
        pytest.param(lambda _: None, STEPS, [], id="idle: renewed"),
        pytest.param(
            put("processes gpu", [USER]),
            [],
            [("BU-VFY-004", "info")],
            id="in use: left as it is, said so",
        ),
    ],
)
def test_a_record_of_another_boot(
    tmp_path: Path, change: Any, expected: list[str], findings: list[tuple[str, str]]
) -> None:
    stale = both(put("verification boot_id", "boot-0"), put("simulated", ["gpu"]), change)
    rig = Rig(tmp_path, answer(stale), files=files())
    assert (steps(rig), rig.findings) == (expected, findings)


def test_an_explicit_verify_of_a_busy_host_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(put("processes gpu", [USER])), force=True, only=("verify",))
    assert steps(rig) == ["settle", "refuse BU-DRV-101"]


def test_a_look_alike_torch_never_runs_a_collective(tmp_path: Path) -> None:
    lock = changed(host_case.LOCK, put("wheels resolved_against", "lab"))
    rig = Rig(tmp_path, answer(both(unproved, simulated)), files=files(), lock=lock)
    assert steps(rig) == [STEPS[0], STEPS[1], STEPS[3]]
    assert [(m["backend"], m["state"]) for m in rig.measured] == [("nccl", "not_run")]


def test_a_required_backend_that_was_not_run_is_refused(tmp_path: Path) -> None:
    lock = changed(host_case.LOCK, put("wheels resolved_against", "lab"))
    stack = changed(host_case.STACK, put("verify require", ["nccl"]))
    rig = Rig(tmp_path, answer(both(unproved, simulated)), files=files(), lock=lock, stack=stack)
    assert steps(rig)[-1] == "refuse BU-VFY-153"


@pytest.mark.parametrize(
    ("check", "benched", "code"),
    [
        pytest.param({**CHECK, "exit_status": 1, "message": "broke"}, None, "BU-VFY-111", id="check crashed"),
        pytest.param(
            {**CHECK, "versions": {"distributions": {"torch": "2.9.1+cu128"}}}, None, "BU-VFY-113", id="other torch"
        ),
        pytest.param(
            {**CHECK, "imports": {"torch": {"empty": {"ok": False, "error": "ImportError: x"}}}},
            None,
            "BU-VFY-121",
            id="import fails",
        ),
        pytest.param(
            CHECK,
            bench(exit_status=2, outcome="usage", message="no torch", backends={}, rows=[]),
            "BU-VFY-151",
            id="nothing measured",
        ),
    ],
)
def test_what_is_bad_is_refused_and_not_recorded(
    tmp_path: Path, check: Answer, benched: Answer | None, code: str
) -> None:
    rig = Rig(tmp_path, answer(both(unproved, put("simulated", ["gpu"]))), files=files(check, benched))
    commands = steps(rig)
    assert commands[-1] == f"refuse {code}"
    assert not any(verify.RECORD in command for command in commands)


def test_a_script_that_left_no_document_fails_the_host(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(unproved), files={verify.output_path("stack_check"): ""})
    assert [command.split()[0] for command in steps(rig)] == ["settle", "stack_check", "refuse"]


def test_without_an_environment_there_is_nothing_to_prove(tmp_path: Path) -> None:
    def bare(told: Answer) -> None:
        told["environment"].update(current=None, is_current_whole=False, environments=[], inspected=[])

    assert steps(Rig(tmp_path, answer(bare, unproved))) == ["refuse BU-VFY-003"]


def test_a_plan_runs_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(unproved), files=files())
    assert steps(rig, is_executing=False) == ["settle"]
    assert rig.sent == {}


def pending(told: Answer) -> None:
    """Let a finished second generation wait for its proof while the damaged first one serves."""
    section = told["environment"]
    section["inspected"][0]["changed"] = ["torch"]
    section["environments"].append({**section["environments"][0], "name": f"{DIGEST}-2", "generation": 2})


def test_the_candidate_is_proved_by_its_final_path_under_the_drain(tmp_path: Path) -> None:
    log = tmp_path / "hooks"
    rig = Rig(
        tmp_path,
        answer(both(pending, put("simulated", ["gpu"]))),
        files=files(),
        drain=f"echo drain >> {log}",
        undrain=f"echo undrain >> {log}",
    )
    commands = rig.run(verify.proof_of_host)
    assert f"--python /opt/bringup/envs/{DIGEST}-2/bin/python" in commands[1]
    assert f" /opt/bringup/envs/{DIGEST}-2/bin/python allreduce_bench.py " in commands[2]
    # The cutover that follows puts the host back.
    assert log.read_text() == "drain\n"


def test_a_failed_proof_puts_the_host_back(tmp_path: Path) -> None:
    log = tmp_path / "hooks"
    rig = Rig(
        tmp_path,
        answer(both(pending, put("simulated", ["gpu"]))),
        files=files({**CHECK, "exit_status": 1}),
        drain=f"echo drain >> {log}",
        undrain=f"echo undrain >> {log}",
    )
    rig.run(verify.proof_of_host)
    assert log.read_text() == "drain\nundrain\n"


def test_an_explicit_verify_looks_at_what_serves(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(both(pending, put("simulated", ["gpu"]))), files=files(), force=True, only=("verify",))
    assert f"--python /opt/bringup/envs/{DIGEST}-1/bin/python" in rig.run(verify.proof_of_host)[1]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(put("simulated", ["gpu"]), ["--device", "cpu", "--ranks", "8"], id="simulated"),
        pytest.param(put("gpus listed", []), ["--device", "cpu", "--ranks", "8"], id="no GPU"),
        pytest.param(lambda _: None, ["--device", "cuda", "--ranks", "auto"], id="real"),
    ],
)
def test_how_the_collective_runs(tmp_path: Path, change: Any, expected: list[str]) -> None:
    state = host_case.observed(change)
    context = verify.Context(None, STACK, state, verify.facts.Settings(stack="case"), ())  # type: ignore[arg-type]
    assert verify.bench_arguments(context)[-4:] == expected


def test_the_record_says_for_what_it_holds(tmp_path: Path) -> None:
    context = verify.Context(None, STACK, host_case.observed(), verify.facts.Settings(stack="case"), ())  # type: ignore[arg-type]
    made = verify.record(context, verify.Target(f"{DIGEST}-1", "/x"), [])
    del made["measured_at_s"]
    assert made == {
        "schema": 1,
        "environment": f"{DIGEST}-1",
        "limits_digest": host_case.converged()["verification"]["limits_digest"],
        "driver_version": "580.95.05",
        "gpu_uuids": ["GPU-0", "GPU-1"],
        "mig_modes": ["Disabled", "Disabled"],
        "boot_id": "boot-1",
        "simulated": [],
        "backends": [],
    }


@pytest.mark.parametrize(
    ("against", "expected"),
    [("index", ("gpu", "driver")), ("lab", ("gpu", "driver", "wheels"))],
    ids=["real wheels are real on a lab host too", "look-alikes"],
)
def test_what_is_simulated(against: str, expected: tuple[str, ...]) -> None:
    stack = host_case.stack(lock=put("wheels resolved_against", against))
    assert wanted.simulated(stack, host_case.observed(simulated)) == expected


# ---------------------------------------------------------------- the rules


def compiled(**more: object) -> Answer:
    entry = {"capability": "12.0", "is_supported": True, "ok": True, "error": None, **more}
    return {"error": None, "compiles": [entry], "supported_capabilities": ["9.0"]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({}, [], id="good"),
        pytest.param(
            {"nvrtc": {"13.0": {"empty": {"error": "libnvrtc.so.13: cannot open shared object file"}}}},
            [("BU-VFY-131", "error")],
            id="NVRTC is not found",
        ),
        pytest.param(
            {"nvrtc": {"13.0": {"empty": compiled(ok=False, error="builtin operation failure")}}},
            [("BU-VFY-131", "error")],
            id="its builtins are missing",
        ),
        pytest.param(
            {"nvrtc": {"12.8": {"empty": compiled(is_supported=False, ok=False)}}},
            [("BU-VFY-132", "info")],
            id="an older toolkit cannot target this GPU",
        ),
        pytest.param(
            {"nvrtc": {"13.0": {"empty": compiled(is_supported=False, ok=False)}}},
            [("BU-VFY-132", "error")],
            id="the environment's own toolkit cannot",
        ),
        pytest.param(
            {"nvrtc": {"13.0": {"empty": compiled(), "login": {"error": "shadowed"}}}},
            [("BU-VFY-133", "warning")],
            id="a login shell shadows it",
        ),
        pytest.param(
            {"imports": {"torch": {"empty": {"ok": True, "torch": {"cuda": "12.8"}}}}},
            [("BU-VFY-114", "error")],
            id="torch for another toolkit",
        ),
        pytest.param(
            {"imports": {"torch": {"empty": {"ok": True, "error": "AttributeError: no attribute 'version'"}}}},
            [("BU-VFY-114", "error")],
            id="nobody knows what torch is for",
        ),
        pytest.param(
            {
                "imports": {
                    "torch": {
                        "empty": {"ok": True, "torch": {"cuda": "13.0"}},
                        "login": {"ok": False, "error": "x"},
                    }
                }
            },
            [("BU-VFY-122", "warning")],
            id="a login shell breaks an import",
        ),
        pytest.param({"versions": {"error": "no answer"}}, [("BU-VFY-112", "error")], id="no interpreter"),
        pytest.param({"exit_status": 5, "message": "GPU 3"}, [("BU-VFY-141", "error")], id="a GPU computes wrongly"),
    ],
)
def test_stack_check(change: Answer, expected: list[tuple[str, str]]) -> None:
    locked = {"torch": "2.9.1+cu130"}
    found = proof.stack_check(STACK, locked, {**CHECK, **change})
    assert [(finding.code, finding.severity) for finding in found] == expected


@pytest.mark.parametrize(
    ("change", "wish", "expected"),
    [
        pytest.param(lambda _: None, {}, [], id="as wanted"),
        pytest.param(put("gpus listed", None), {}, ["BU-VFY-101"], id="the driver does not answer"),
        pytest.param(put("gpus listed", None), {"gpus": None}, [], id="none are wanted"),
        pytest.param(lambda _: None, {"gpus": 8}, ["BU-VFY-102"], id="some are missing"),
        pytest.param(lambda _: None, {"gpu_model": "NVIDIA H200"}, ["BU-VFY-103"], id="another model"),
    ],
)
def test_gpus(change: Any, wish: Answer, expected: list[str]) -> None:
    stack = host_case.stack(lambda described: described["verify"].update(wish))
    assert [finding.code for finding in proof.gpus(stack, host_case.observed(change))] == expected
