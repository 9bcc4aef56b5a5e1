"""The cutover and the way back: the exact commands, and what keeps them from happening."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import host_case
import pytest
from host_case import both, put
from scripted import Answer, Replies, Rig, answer, changed

from bringup import wanted
from tasks import drain, switch
from tasks.cutovers import CUTOVERS, CutoverSet, destination

STACK = host_case.stack()
DIGEST = STACK.env_digest("cp311-x86_64")
NEW = f"/opt/bringup/envs/{DIGEST}-2"
OLD = f"/opt/bringup/envs/{DIGEST}-1"
COLLECT = "do collect --detach -- python3 host_env.py collect /opt/bringup --keep"


def finished(told: Answer) -> None:
    """Let a second generation be complete and proved while the damaged first one serves."""
    section = told["environment"]
    section["inspected"][0]["changed"] = ["torch"]
    section["environments"].append({**section["environments"][0], "name": f"{DIGEST}-2", "generation": 2})
    told["verification"]["environment"] = f"{DIGEST}-2"


def kept(**more: object) -> Answer:
    """Return a completed cutover that left what the converged host has."""
    return {
        "stack": "case",
        "digest": "0123456789ab",
        "environment": OLD,
        "cuda": "/usr/local/cuda-13.0",
        "service": wanted.service_text(STACK),
        "linker": wanted.linker_text(STACK, "x86_64"),
        "restart": [],
        "at": "2026-11-30T00:00:00+00:00",
        **more,
    }


def history(*sets: Answer) -> dict[str, str]:
    return {CUTOVERS: json.dumps(list(sets))}


def test_in_sync_yields_nothing(tmp_path: Path) -> None:
    assert Rig(tmp_path, answer()).run(switch.cutover) == []


def test_an_unknown_host_is_refused_and_nothing_else(tmp_path: Path) -> None:
    assert Rig(tmp_path, {"error": "what"}).run(switch.cutover) == ["refuse BU-PRE-001"]


def test_current_moves_last_then_the_set_is_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(finished), files=history(kept()))
    assert rig.run(switch.cutover) == [
        "settle",
        "cutover",
        f"write {wanted.SERVICE_FILE} --mode 0644 --undo ...",
        f"link /opt/bringup/current {NEW} --undo",
        f"write {CUTOVERS} --mode 0600 --undo ...",
        f"write {switch.ASSIGNED} --mode 0644 ...",
        "commit",
        f"{COLLECT} 1 --protect {DIGEST}-1",
    ]


def test_a_first_cutover_keeps_two_old_environments(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(finished, put("environment current", None)))
    assert rig.run(switch.cutover)[-1] == f"{COLLECT} 2"


def test_a_cutover_on_a_host_whose_list_is_gone_keeps_what_served_before(tmp_path: Path) -> None:
    found = {wanted.SERVICE_FILE: "A=1\n", wanted.LINKER_FILE: "# ours\n"}
    rig = Rig(tmp_path, answer(finished), files=found)
    assert rig.run(switch.cutover)[-1] == f"{COLLECT} 1 --protect {DIGEST}-1"
    before, new = json.loads(rig.written[CUTOVERS])
    assert {key: before[key] for key in ("stack", "digest", "environment", "cuda", "service", "linker")} == {
        "stack": None,
        "digest": None,
        "environment": OLD,
        "cuda": "/usr/local/cuda-13.0",
        "service": "A=1\n",
        "linker": "# ours\n",
    }
    assert (new["stack"], new["environment"]) == ("case", NEW)
    # So the very next rollback has somewhere to go, and pins what it leaves.
    again = Rig(
        tmp_path,
        answer(finished, put("environment current", NEW)),
        files={CUTOVERS: json.dumps([before, new])},
    )
    assert f"link /opt/bringup/current {OLD} --undo" in again.run(switch.rollback)
    assert json.loads(again.written[switch.PIN])["digest"] == new["digest"]


@pytest.mark.parametrize(
    ("change", "commands"),
    [
        pytest.param(
            put("toolkits links /usr/local/cuda resolved", "/usr/local/cuda-12.8"),
            ["alternative cuda /usr/local/cuda-13.0 --undo", "do ldconfig -- ldconfig"],
            id="by alternative",
        ),
        pytest.param(
            both(
                put("toolkits links /usr/local/cuda resolved", "/usr/local/cuda-12.8"),
                put("toolkits alternatives", {}),
            ),
            ["link /usr/local/cuda /usr/local/cuda-13.0 --undo", "do ldconfig -- ldconfig"],
            id="a plain link",
        ),
        pytest.param(
            both(
                put("toolkits links /usr/local/cuda resolved", "/usr/local/cuda-12.8"),
                put("toolkits alternatives cuda choices", {"/usr/local/cuda-12.8": 128}),
            ),
            [
                "do register-alternative -- sh -euc "
                "update-alternatives --install /usr/local/cuda cuda /usr/local/cuda-13.0 0",
                "alternative cuda /usr/local/cuda-13.0 --undo",
                "do ldconfig -- ldconfig",
            ],
            id="an alternative that does not know the toolkit",
        ),
    ],
)
def test_the_toolkit_link(tmp_path: Path, change: Any, commands: list[str]) -> None:
    assert Rig(tmp_path, answer(change)).run(switch.cutover)[2:-6] == commands


def test_units_are_named_before_the_first_change_and_restarted_after_the_last(tmp_path: Path) -> None:
    stack = changed(host_case.STACK, put("service restart", ["a.service", "b.service"]))
    commands = Rig(tmp_path, answer(finished), stack=stack).run(switch.cutover)
    assert commands[1] == "cutover --restart a.service --restart b.service"
    restarts = next(number for number, text in enumerate(commands) if text.startswith("do restart"))
    assert commands[restarts].endswith("restart a.service b.service")
    assert commands[restarts - 1].startswith("link /opt/bringup/current")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(put("verification", None), "BU-VFY-005", id="nobody proved it"),
        pytest.param(put("verification environment", f"{DIGEST}-1"), "BU-VFY-005", id="another one was proved"),
        pytest.param(put("verification boot_id", "boot-0"), "BU-VFY-005", id="proved in another boot"),
        pytest.param(put("environment environments 1 is_complete", False), "BU-ENV-161", id="it is not finished"),
    ],
)
def test_current_does_not_move_to_what_was_not_proved(tmp_path: Path, change: Any, code: str) -> None:
    rig = Rig(tmp_path, answer(finished, change))
    assert rig.run(switch.cutover) == ["settle", f"refuse {code}"]


USER = {"pid": 7, "command": "python", "user_id": 0, "unit": None, "devices": ["/dev/nvidia0"], "is_computing": True}


def test_gpus_in_use_block_the_cutover_and_the_host_is_put_back(tmp_path: Path) -> None:
    log = tmp_path / "hooks"
    rig = Rig(
        tmp_path,
        answer(finished, put("processes gpu", [USER])),
        drain=f'echo "drain $BRINGUP_HOST" >> {log}',
        undrain=f'echo "undrain $BRINGUP_HOST" >> {log}',
    )
    assert rig.run(switch.cutover) == ["settle", "refuse BU-DRV-101"]
    assert log.read_text() == "drain @fake/gpu-01\nundrain @fake/gpu-01\n"


def test_a_unit_that_is_restarted_anyway_blocks_nothing(tmp_path: Path) -> None:
    stack = changed(host_case.STACK, put("service restart", ["serve.service"]))
    users = put("processes gpu", [{**USER, "unit": "serve.service"}])
    commands = Rig(tmp_path, answer(finished, users), stack=stack).run(switch.cutover)
    assert "commit" in commands


def test_a_drain_that_fails_stops_everything(tmp_path: Path) -> None:
    log = tmp_path / "hooks"
    rig = Rig(tmp_path, answer(finished), drain="echo no; exit 3", undrain=f"touch {log}")
    assert rig.run(switch.cutover) == ["settle", "refuse BU-VFY-001"]
    assert not log.exists()


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("echo waiting for job 7; sleep 61", "it did not end within 0.3 s; waiting for job 7"),
        ("sleep 61 & echo begun", "it did not end within 0.3 s; begun"),
        ("sleep 61", "it did not end within 0.3 s; it said nothing"),
    ],
    ids=["hangs", "leaves something behind that holds its output", "silent"],
)
def test_a_drain_that_does_not_end_is_ended_and_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, cause: str
) -> None:
    monkeypatch.setattr(drain, "HOOK_LIMIT_S", 0.3)
    rig = Rig(tmp_path, answer(finished), drain=command)
    found = drain.drain(rig.host)
    assert found is not None
    assert (found.code, found.cause) == ("BU-VFY-001", f"the drain command failed: {cause}")


def test_a_plan_drains_nothing(tmp_path: Path) -> None:
    log = tmp_path / "hooks"
    rig = Rig(tmp_path, answer(finished), drain=f"touch {log}")
    assert rig.run(switch.cutover, is_executing=False) == ["settle"]
    assert not log.exists()


def test_processes_on_older_environments_are_named(tmp_path: Path) -> None:
    old = {
        "pid": 9,
        "command": "python",
        "user_id": 0,
        "unit": None,
        "environment": f"{DIGEST}-1",
        "witnesses": ["maps"],
    }
    after = both(put("environment current", NEW), put("processes environment", [old]))
    rig = Rig(tmp_path, answer(finished), answer(finished), answer(finished, after))
    rig.run(switch.cutover)
    assert rig.findings == [("BU-ENV-004", "warning")]


# ---------------------------------------------------------------- rollback


OTHER = kept(digest="ba9876543210", environment="/opt/bringup/envs/cccccccccccc-1", service="other", linker=None)


def two(told: Answer) -> None:
    """Let the other environment lie beside the serving one."""
    entry = told["environment"]["environments"][0]
    told["environment"]["environments"].append({**entry, "name": "cccccccccccc-1", "digest": "cccccccccccc"})


def test_rollback_restores_the_set_before_and_pins_what_is_left(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(two), files=history(OTHER, kept()), rollback_reason="slow")
    assert rig.run(switch.rollback) == [
        "settle",
        f"write {switch.PIN} --mode 0644 --undo ...",
        f"remove {switch.RECORD} --undo",
        f"remove {wanted.LINKER_FILE} --undo",
        "do ldconfig -- ldconfig",
        "cutover",
        f"write {wanted.SERVICE_FILE} --mode 0644 --undo ...",
        "link /opt/bringup/current /opt/bringup/envs/cccccccccccc-1 --undo",
        f"write {CUTOVERS} --mode 0600 --undo ...",
        "commit",
    ]


GONE = "cccccccccccc-1 is gone"
NO_LIST = f"this host keeps no list of its cutovers ({CUTOVERS})"
APPLY = "apply the stack that you want instead: no other whole and untainted environment is here"
NAME = "name an environment that is here: bringup rollback INVENTORY --to cccccccccccc"


@pytest.mark.parametrize(
    ("sets", "change", "to", "why", "remedy"),
    [
        pytest.param([], two, None, NO_LIST, NAME, id="no list"),
        pytest.param(
            [],
            lambda _: None,
            None,
            NO_LIST,
            APPLY,
            id="nothing at all",
        ),
        pytest.param(
            [kept()], two, None, "no cutover on this host left anything else than what serves", NAME, id="only this one"
        ),
        pytest.param(
            [kept(), kept(at="later")],
            two,
            None,
            "no cutover on this host left anything else than what serves",
            NAME,
            id="the one before is the same",
        ),
        pytest.param([OTHER, kept()], lambda _: None, None, GONE, APPLY, id="its environment is gone"),
        pytest.param(
            [OTHER, kept()],
            both(two, put("environment environments 1 is_tainted", True)),
            None,
            "cccccccccccc-1 is tainted",
            APPLY,
            id="its environment is tainted",
        ),
        pytest.param(
            [OTHER, kept()],
            both(two, put("pin", {"digest": "ba9876543210", "reason": "r", "since": "s"})),
            None,
            "cccccccccccc-1 is of the stack that is pinned",
            NAME,
            id="its stack is pinned",
        ),
        pytest.param(
            [kept(environment="/opt/bringup/envs/eeeeeeeeeeee-1"), OTHER, kept()],
            lambda _: None,
            None,
            f"{GONE}; eeeeeeeeeeee-1 is gone",
            APPLY,
            id="two are gone, the latest first",
        ),
        pytest.param(
            [OTHER, kept()],
            two,
            "dddddddddddd",
            "dddddddddddd names no cutover and no environment of this host",
            NAME,
            id="no such digest",
        ),
        pytest.param([OTHER, kept()], lambda _: 0, "ba9876543210", GONE, APPLY, id="its stack, gone"),
        pytest.param([], two, DIGEST, f"{DIGEST} is what serves", NAME, id="what serves, by environment"),
        pytest.param(
            [OTHER, kept()], two, "0123456789ab", "0123456789ab is what serves", NAME, id="it serves, by stack"
        ),
        pytest.param(
            [],
            both(two, put("environment environments 1 is_complete", False)),
            "cccccccccccc",
            "cccccccccccc-1 is unfinished",
            APPLY,
            id="an unfinished environment",
        ),
        pytest.param(
            [],
            finished,
            None,
            NO_LIST,
            f"name an environment that is here: bringup rollback INVENTORY --to {DIGEST}-2",
            id="another generation of what serves is named in full",
        ),
    ],
)
def test_rollback_without_a_target_says_why_and_what_could_be_named(
    tmp_path: Path, sets: list[Answer], change: Any, to: str | None, why: str, remedy: str
) -> None:
    rig = Rig(tmp_path, answer(change), files=history(*sets) if sets else {}, rollback_to=to)
    assert rig.run(switch.rollback) == ["settle", "refuse BU-ENV-162"]
    assert rig.said == [(f"there is nothing to return to: {why}", remedy)]


@pytest.mark.parametrize("to", ["cccccccccccc", "cccccccccccc-1"], ids=["digest", "name"])
@pytest.mark.parametrize("sets", [[], [kept()]], ids=["the list is gone", "one cutover since it was gone"])
def test_rollback_to_an_environment_that_no_list_names(tmp_path: Path, sets: list[Answer], to: str) -> None:
    files = {wanted.SERVICE_FILE: "A=1\n", wanted.LINKER_FILE: "# ours\n", **(history(*sets) if sets else {})}
    rig = Rig(tmp_path, answer(two), files=files, rollback_to=to)
    assert rig.run(switch.rollback) == [
        "settle",
        f"write {switch.PIN} --mode 0644 --undo ...",
        f"remove {switch.RECORD} --undo",
        f"write {wanted.LINKER_FILE} --mode 0644 --undo ...",
        "do ldconfig -- ldconfig",
        "cutover",
        f"write {wanted.SERVICE_FILE} --mode 0644 --undo ...",
        "link /opt/bringup/current /opt/bringup/envs/cccccccccccc-1 --undo",
        f"write {CUTOVERS} --mode 0600 --undo ...",
        "commit",
    ]
    assert rig.findings == [("BU-ENV-163", "warning")]
    assert rig.written[wanted.SERVICE_FILE] == "A=1\n"
    assert rig.written[wanted.LINKER_FILE] == "# ours\n"
    # What serves is of the inventory's stack, or the list says of which.
    assert json.loads(rig.written[switch.PIN])["digest"] == (sets[-1]["digest"] if sets else STACK.digest)
    left, now = json.loads(rig.written[CUTOVERS])
    assert (left["environment"], now["environment"]) == (OLD, "/opt/bringup/envs/cccccccccccc-1")
    # Or a second rollback would go straight back to what is pinned.
    assert left["digest"] == json.loads(rig.written[switch.PIN])["digest"]


def test_rollback_to_the_inventorys_own_stack_takes_what_it_asks_for(tmp_path: Path) -> None:
    serving = both(two, put("environment current", "/opt/bringup/envs/cccccccccccc-1"))
    rig = Rig(tmp_path, answer(serving), files={wanted.SERVICE_FILE: "A=1\n"}, rollback_to=STACK.digest)
    commands = rig.run(switch.rollback)
    assert f"link /opt/bringup/current {OLD} --undo" in commands
    assert rig.written[wanted.SERVICE_FILE] == wanted.service_text(STACK)
    # Nobody knows which stack the other environment is of.
    assert rig.findings == [("BU-ENV-163", "warning"), ("BU-ENV-164", "warning")]
    assert switch.PIN not in rig.written


@pytest.mark.parametrize("to", ["ba9876543210", "cccccccccccc"], ids=["stack digest", "environment digest"])
def test_rollback_to_a_digest(to: str) -> None:
    third = kept(environment="/opt/bringup/envs/eeeeeeeeeeee-1", digest="eeeeeeeeeeee")
    sets = [CutoverSet.model_validate(one) for one in (OTHER, third, kept())]
    goal = destination(sets, host_case.observed(two), to)
    assert goal is not None
    assert goal.digest == "ba9876543210"


def test_a_pinned_stack_can_be_gone_back_to_by_name(tmp_path: Path) -> None:
    pinned = both(two, put("pin", {"digest": "ba9876543210", "reason": "r", "since": "s"}))
    rig = Rig(tmp_path, answer(pinned), files=history(OTHER, kept()), rollback_to="ba9876543210")
    assert "commit" in rig.run(switch.rollback)


def test_unpin_removes_the_pin_and_nothing_else(tmp_path: Path) -> None:
    pinned = answer(put("pin", {"digest": "x", "reason": "r", "since": "s"}))
    assert Rig(tmp_path, pinned, unpin=True).run(switch.rollback) == [f"remove {switch.PIN}"]


def test_unpin_without_a_pin_yields_nothing(tmp_path: Path) -> None:
    assert Rig(tmp_path, answer(), unpin=True).run(switch.rollback) == []


def test_a_spoiled_list_of_cutovers_fails_the_host(tmp_path: Path) -> None:
    rig = Rig(tmp_path, answer(two), files={CUTOVERS: "[{]"})
    assert [command.split()[0] for command in rig.run(switch.rollback)] == ["settle", "refuse"]


def test_replies_come_in_order() -> None:
    replies = Replies({"a": 1}, {"a": 2})
    assert [replies.get("stdout") for _ in range(3)] == ['{"a": 1}', '{"a": 2}', '{"a": 2}']
