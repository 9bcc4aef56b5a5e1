"""The environment step: nothing where it is as wanted, else exactly these commands, and a refusal by rule."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_case
import pytest
from host_case import drop, put
from scripted import Answer, Replies, Rig, answer, changed

from bringup import host_state
from bringup.errors import InputError
from tasks import candidate, environment

DIGEST = host_case.stack().env_digest("cp311-x86_64")


def fresh(told: Answer) -> None:
    """Turn the converged host into one without an environment."""
    told["environment"].update(current=None, is_current_whole=False, environments=[], inspected=[])


def entry(generation: int, *, digest: str | None = DIGEST, complete: bool = True, tainted: bool = False) -> Answer:
    return {
        "name": f"{digest}-{generation}",
        "is_complete": complete,
        "digest": digest if complete else None,
        "generation": generation if complete else None,
        "python": "3.11",
        "is_tainted": tainted,
    }


LOOK = {
    "machine": "x86_64",
    "uv_sha256": None,
    "uv_version": None,
    "interpreters": [{"path": "/usr/bin/python3.11", "version": "3.11.2"}],
}
CREATED = {"action": "create", "status": 0, "interpreter": LOOK["interpreters"][0], "output": "", "swept": []}


def installed(step: str, added: dict[str, str], **more: Any) -> Answer:
    return {
        "action": "install",
        "step": step,
        "calls": [{"index": "default", "status": 0, "output": ""}],
        "added": added,
        "removed": [],
        "changed": {},
        "foreign": [],
        "unlike": {},
        "healed": [],
        "tainted": [],
        "misrecorded": {},
        **more,
    }


TORCH = installed("torch", {"torch": "2.9.1+cu130"})
KERNEL = installed("kernel", {"sgl-kernel": "0.3.21+cu130"})


def log(*actions: Answer, generation: int = 1) -> Answer:
    added = {name: version for action in actions for name, version in action.get("added", {}).items()}
    return {
        "schema": 1,
        "env": f"/opt/bringup/envs/{DIGEST}-{generation}",
        "actions": list(actions),
        "snapshot": {name: {"version": version, "fingerprint": "0" * 32} for name, version in added.items()},
    }


def reports(*actions: Answer, generation: int = 1) -> Replies:
    """Return the log as the controller reads it: once after create, then twice after each step."""
    answers = []
    for number in range(1, len(actions) + 1):
        so_far = log(*actions[:number], generation=generation)
        answers += [so_far] if actions[number - 1]["action"] != "install" else [so_far, so_far]
    return Replies(*answers)


def scripts(reported: Replies, look: Answer | None = None, **more: object) -> dict[tuple[str, str], Replies]:
    return {
        ("host_env", "look"): Replies(look or LOOK),
        ("host_env", "report"): reported,
        ("abi_probe", ""): Replies({"schema": 1, "torch": None}),
        **{("host_env", name): Replies(reply) for name, reply in more.items()},
    }


def do(number: int, action: str, *arguments: str) -> str:
    words = ["do", f"environment-{number}-{action}", "--detach", "--", "python3", "host_env.py", action]
    return " ".join([*words, "/run/bringup/order-RUN.json", *arguments])


WHOLE = [
    "settle",
    do(1, "create"),
    do(2, "install", "torch"),
    do(3, "install", "kernel"),
    do(4, "finish"),
]


def test_in_sync_yields_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer())
    assert rig.run(environment.environment) == []
    assert rig.run(environment.launcher) == []


def test_the_launcher_is_written_where_it_is_not_the_shipped_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(put("files /opt/bringup/bin/run", None)))
    assert rig.run(environment.launcher) == ["write /opt/bringup/bin/run --mode 0755 ..."]


@pytest.mark.parametrize("operation", [environment.environment, environment.launcher])
def test_an_unknown_host_is_refused_and_nothing_else(tmp_path: Path, operation: Any) -> None:
    rig = Rig(tmp_path, {"error": "what"})
    assert rig.run(operation) == ["refuse BU-PRE-001"]


def test_a_missing_environment_is_built_step_by_step(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(fresh), scripts=scripts(reports(CREATED, TORCH, KERNEL)))
    assert rig.run(environment.environment) == WHOLE
    sent = sorted(path.rsplit("/", 1)[-1].split("-")[0] for path in rig.sent)
    assert sent == ["host_env", "order", "uv"]
    assert rig.findings == []


def test_a_uv_that_is_there_already_is_not_sent_again(tmp_path: Path) -> None:
    look = {**LOOK, "uv_sha256": environment.uv_binary()[2]}
    rig = Rig(tmp_path, answer(fresh), scripts=scripts(reports(CREATED, TORCH, KERNEL), look))
    assert rig.run(environment.environment) == WHOLE
    assert not any(path.endswith("/uv") for path in rig.sent)


def test_a_plan_stops_before_anything_is_sent(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(fresh), scripts=scripts(reports(CREATED)))
    assert rig.run(environment.environment, is_executing=False) == ["settle"]
    assert rig.sent == {}


@pytest.mark.parametrize(
    ("actions", "commands", "code"),
    [
        pytest.param([{**CREATED, "interpreter": None, "status": 1}], WHOLE[:2], "BU-ENV-101", id="no interpreter"),
        pytest.param(
            [CREATED, installed("torch", {}, calls=[{"index": "default", "status": 2, "output": "503 server error"}])],
            WHOLE[:3],
            "BU-ENV-105",
            id="index down",
        ),
        pytest.param(
            [CREATED, TORCH, {**KERNEL, "changed": {"torch": {"was": "2.9.1+cu130", "is": "2.9.1", "files": []}}}],
            WHOLE[:4],
            "BU-ENV-112",
            id="a later step changes torch",
        ),
        pytest.param(
            [CREATED, {**TORCH, "added": {"torch": "2.9.1+cu128"}}], WHOLE[:3], "BU-ENV-113", id="another torch"
        ),
    ],
)
def test_the_guard_refuses_and_nothing_after_it_runs(
    tmp_path: Path, actions: list[Answer], commands: list[str], code: str
) -> None:
    rig = Rig(tmp_path, answer(fresh), scripts=scripts(reports(*actions)))
    assert rig.run(environment.environment) == [*commands, f"refuse {code}"]
    assert rig.findings[-1] == (code, "error")


@pytest.mark.parametrize(
    ("status", "last"), [(0, [do(5, "finish")]), (1, ["refuse BU-ENV-131"])], ids=["imports", "does not import"]
)
def test_a_step_with_imports(tmp_path: Path, status: int, last: list[str]) -> None:
    stack = changed(host_case.STACK, put("python step 1 imports", ["sgl_kernel"]))
    module = {"status": status, "output": "ImportError: undefined symbol: x", "seconds": 1.0}
    imported = {"action": "imports", "step": "kernel", "modules": {"sgl_kernel": module}, "changed": {}}
    reported = reports(CREATED, TORCH, KERNEL, imported)
    rig = Rig(tmp_path, answer(fresh), scripts=scripts(reported), stack=stack)
    assert rig.run(environment.environment) == [*WHOLE[:4], do(4, "imports", "kernel"), *last]


def test_a_family_that_disagrees_is_refused(tmp_path: Path) -> None:
    stack = changed(host_case.STACK, put("python step 1 family", ["torch", "sgl-kernel"]))
    rig = Rig(tmp_path, answer(fresh), scripts=scripts(reports(CREATED, TORCH, KERNEL)), stack=stack)
    assert rig.run(environment.environment) == [*WHOLE[:4], "refuse BU-ENV-121"]


def test_a_damaged_environment_is_healed_and_replaced_by_the_next_generation(tmp_path: Path) -> None:
    damaged = answer(put("environment inspected 0 changed", ["torch"]))
    rig = Rig(tmp_path, damaged, scripts=scripts(reports(CREATED, TORCH, KERNEL, generation=2)))
    commands = rig.run(environment.environment)
    assert commands[:3] == ["settle", do(1, "heal", f"/opt/bringup/envs/{DIGEST}-1"), do(2, "create")]
    order = next(json.loads(data) for path, data in rig.sent.items() if "order" in path)
    assert (order["env"], order["generation"]) == (f"/opt/bringup/envs/{DIGEST}-2", 2)


@pytest.mark.parametrize(
    ("check", "commands"),
    [
        pytest.param({"differing": [], "has_interpreter": True}, [], id="whole: nothing to build"),
        pytest.param(
            {"differing": ["torch"], "has_interpreter": True},
            ["settle", do(1, "heal", f"/opt/bringup/envs/{DIGEST}-3")],
            id="damaged meanwhile",
        ),
        pytest.param(
            {"differing": [], "has_interpreter": False},
            ["settle", do(1, "heal", f"/opt/bringup/envs/{DIGEST}-3")],
            id="its interpreter is gone",
        ),
    ],
)
def test_a_finished_environment_that_does_not_serve_is_looked_at_first(
    tmp_path: Path, check: Answer, commands: list[str]
) -> None:
    def another_serves(told: Answer) -> None:
        told["environment"].update(
            current="/opt/bringup/envs/ffffffffffff-1", environments=[entry(1, digest="ffffffffffff"), entry(3)]
        )
        told["environment"]["inspected"][0].update(
            path="/opt/bringup/envs/ffffffffffff-1", resolved="/opt/bringup/envs/ffffffffffff-1"
        )

    reported = reports(CREATED, TORCH, KERNEL, generation=4)
    rig = Rig(tmp_path, answer(another_serves), scripts=scripts(reported, check=check))
    assert rig.run(environment.environment)[:2] == commands


def test_an_existing_environment_is_never_built(tmp_path: Path) -> None:
    stack = changed(host_case.STACK, put("python interpreter", "existing:/opt/venv"))
    rig = Rig(tmp_path, answer(), stack=stack)
    assert rig.run(environment.environment) == ["refuse BU-ENV-151"]


def test_a_distribution_in_two_steps_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    twice = host_case.LOCK["wheels"]["platform"]["cp311-x86_64"]["step"][1]["files"] + [
        host_case.wheel("torch", "2.9.1")
    ]
    lock = changed(host_case.LOCK, put("wheels platform cp311-x86_64 step 1 files", twice))
    rig = Rig(tmp_path, answer(fresh), lock=lock)
    assert rig.run(environment.environment) == ["refuse BU-ENV-117"]


@pytest.mark.parametrize(
    ("uv_version", "first"),
    [
        pytest.param(None, "refuse BU-ENV-108", id="none there"),
        pytest.param("uv 0.0.1", "refuse BU-ENV-108", id="another version"),
        pytest.param(f"uv {environment.uv_binary()[1]} (aarch64)", do(1, "create"), id="the very version"),
    ],
)
def test_a_host_of_another_machine_type_brings_its_own_uv(tmp_path: Path, uv_version: str | None, first: str) -> None:
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    told = answer(fresh, put("os machine", other))
    lock = changed(
        host_case.LOCK,
        put(f"wheels platform cp311-{other}", host_case.LOCK["wheels"]["platform"]["cp311-x86_64"]),
    )
    look = {**LOOK, "machine": other, "uv_version": uv_version}
    created = {**log(CREATED), "env": ""}
    rig = Rig(tmp_path, told, scripts=scripts(Replies(created), look), lock=lock)
    assert rig.run(environment.environment)[1] == first


# ---------------------------------------------------------------- candidates


@pytest.mark.parametrize(
    ("change", "name", "generation"),
    [
        pytest.param(lambda _: None, f"{DIGEST}-1", 2, id="it serves"),
        pytest.param(fresh, None, 1, id="none"),
        pytest.param(put("environment inspected 0 changed", ["torch"]), None, 2, id="the serving one is damaged"),
        pytest.param(put("environment environments 0 is_tainted", True), None, 2, id="the serving one is tainted"),
        pytest.param(
            lambda told: (
                told["environment"]["inspected"][0].update(changed=["torch"]),
                told["environment"]["environments"].append(entry(2)),
            ),
            f"{DIGEST}-2",
            3,
            id="a later generation is finished",
        ),
        pytest.param(
            lambda told: (
                told["environment"]["inspected"][0].update(changed=["torch"]),
                told["environment"]["environments"].append(entry(2, tainted=True)),
            ),
            None,
            3,
            id="the later one is tainted",
        ),
        pytest.param(
            lambda told: told["environment"]["environments"].append(entry(7, complete=False)),
            f"{DIGEST}-1",
            8,
            id="an unfinished one lies about",
        ),
        pytest.param(
            lambda told: told["environment"].update(
                current="/opt/bringup/envs/x-1", environments=[entry(1, digest="x"), entry(2), entry(4)]
            ),
            f"{DIGEST}-4",
            5,
            id="another digest serves",
        ),
    ],
)
def test_candidate(change: Callable[[Answer], object], name: str | None, generation: int) -> None:
    state, stack = host_case.observed(change), host_case.stack()
    found = candidate.candidate(stack, state)
    assert (found.name if found else None, candidate.next_generation(stack, state)) == (name, generation)


def test_an_unknown_environment_section_has_no_candidate() -> None:
    state = host_case.observed(put("environment", {"error": "permission denied"}))
    assert isinstance(state.environment, host_state.Unknown)
    assert candidate.candidate(host_case.stack(), state) is None


# ---------------------------------------------------------------- the order


INDEXED = changed(
    host_case.STACK,
    put("python index", [{"name": "mirror", "url": "https://mirror.test/simple", "credentials": "env:MIRROR_LOGIN"}]),
    put("python step 0 index", "mirror"),
)
INDEXED_LOCK = changed(host_case.LOCK, put("wheels platform cp311-x86_64 step 0 files 0 index", "mirror"))


@pytest.mark.parametrize(
    ("indexes", "url", "login"),
    [
        pytest.param({}, "https://mirror.test/simple", {"user": "me", "password": "s3cret"}, id="the stack's"),
        pytest.param(
            {"mirror": "http://site.test/simple"},
            "http://site.test/simple",
            {"user": "me", "password": "s3cret"},
            id="the site's, with the stack's credentials",
        ),
        pytest.param(
            {"mirror": "http://other:word@site.test/simple"},
            "http://site.test/simple",
            {"user": "other", "password": "word"},
            id="the site's own credentials",
        ),
    ],
)
def test_credentials_travel_apart_from_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexes: dict[str, str], url: str, login: dict[str, str]
) -> None:
    monkeypatch.setenv("MIRROR_LOGIN", "me:s3cret")
    reported = reports(CREATED, TORCH, KERNEL)
    rig = Rig(tmp_path, answer(fresh), scripts=scripts(reported), stack=INDEXED, lock=INDEXED_LOCK, indexes=indexes)
    commands = rig.run(environment.environment)
    order = next(data for path, data in rig.sent.items() if "order" in path)
    assert json.loads(order)["steps"][0]["calls"][0]["url"] == url
    assert json.loads(rig.sent["/run/bringup/credentials"])["mirror"] == login
    assert b"s3cret" not in order
    assert not any("s3cret" in command for command in commands)


def test_credentials_that_lead_nowhere_fail_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIRROR_LOGIN", raising=False)
    rig = Rig(tmp_path, answer(fresh), stack=INDEXED, lock=INDEXED_LOCK)
    assert [command.split()[0] for command in rig.run(environment.environment)] == ["refuse"]


def test_a_lock_of_other_steps_cannot_be_used() -> None:
    stack = host_case.stack(put("python step 1 name", "other"))
    with pytest.raises(InputError, match="other steps"):
        environment.step_pairs(stack, "cp311-x86_64")


def test_each_step_makes_one_call_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRROR_LOGIN", "me:s3cret")
    files = [
        {**host_case.wheel("torch", "2.9.1+cu130"), "index": "mirror"},
        host_case.wheel("filelock", "3.20.0"),
        {**host_case.wheel("triton", "3.5.1"), "index": "mirror"},
    ]
    lock = changed(INDEXED_LOCK, put("wheels platform cp311-x86_64 step 0 files", files))
    rig = Rig(tmp_path, answer(fresh), scripts=scripts(Replies({"env": "?"})), stack=INDEXED, lock=lock)
    rig.run(environment.environment)
    order = next(json.loads(data) for path, data in rig.sent.items() if "order" in path)
    calls = order["steps"][0]["calls"]
    assert [(call["index"], [file["name"] for file in call["files"]]) for call in calls] == [
        ("mirror", ["torch", "triton"]),
        ("default", ["filelock"]),
    ]


def test_the_unlocked_platform_builds_nothing(tmp_path: Path) -> None:
    lock = changed(host_case.LOCK, drop("wheels platform cp311-x86_64"))
    rig = Rig(tmp_path, answer(fresh), lock=lock)
    assert rig.run(environment.environment) == []
