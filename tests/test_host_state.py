"""Answers of the probe as untrusted input: what is taken, what is refused, and with which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bringup import host_state, paths
from bringup.errors import HostError
from bringup.host_state import HostState, Unknown
from bringup.stack import load_stack

CAPTURED = Path(__file__).parent / "fixtures/probe/h200x2_answer.json"
SCHEMA = Path(__file__).parents[1] / "docs/reference/probe.schema.json"

Answer = dict[str, Any]


@pytest.fixture
def answer() -> Answer:
    return dict(json.loads(CAPTURED.read_text()))


def test_a_real_answer(answer: Answer) -> None:
    state = host_state.parse(json.dumps(answer))
    assert isinstance(state.gpus, host_state.Gpus)
    assert isinstance(state.os, host_state.Os)
    assert isinstance(state.driver, host_state.Driver)
    assert state.gpus.listed is not None
    assert [gpu.name for gpu in state.gpus.listed] == ["NVIDIA H200", "NVIDIA H200"]
    assert state.os.release == "ubuntu2404-x86_64"
    assert state.driver.loaded is not None
    assert (state.driver.loaded.version, state.driver.loaded.flavour) == ("580.159.04", "open")
    assert state.unknown_sections() == {"services": "systemd is not running"}
    assert state.simulated == ()
    assert (state.current_environment, state.pin_found, state.assigned_stack) == (None, None, None)


def test_the_document_is_the_last_line(answer: Answer) -> None:
    text = "Welcome to gpu-01\n{}\n" + json.dumps(answer) + "\n\n"
    assert host_state.parse(text).simulated == ()


def test_bytes_and_text_mean_the_same(answer: Answer) -> None:
    text = json.dumps(answer)
    assert host_state.parse(text.encode()) == host_state.parse(text)


def spoil(path: str, value: object) -> Callable[[Answer], None]:
    """Return a change that sets one value, its keys divided by slashes."""

    def change(answer: Answer) -> None:
        *parents, last = path.split("/")
        at: Any = answer
        for key in parents:
            at = at[int(key)] if isinstance(at, list) else at[key]
        at[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param(spoil("schema", 2), "schema: wanted 1, found 2", id="another schema"),
        pytest.param(
            spoil("os/cpus", "8"), "os.cpus: wanted input should be a valid integer, found '8'", id="text for a number"
        ),
        pytest.param(
            spoil("dpkg/packages/libnccl2", {"version": 5, "status": "ii"}),
            "dpkg.packages.libnccl2.version: wanted input should be a valid string, found 5",
            id="number for text",
        ),
        pytest.param(
            spoil("gpus/listed/1/uuid", None),
            "gpus.listed[1].uuid: wanted input should be a valid string, found None",
            id="null in a list",
        ),
        pytest.param(
            spoil("fabric/extra", 1), "fabric.extra: wanted extra inputs are not permitted, found 1", id="unknown key"
        ),
        pytest.param(
            spoil("kernel", []),
            "kernel: wanted input should be an object, found []",
            id="list for an object",
        ),
        pytest.param(
            spoil("driver/loaded/flavour", "mixed"),
            "driver.loaded.flavour: wanted input should be 'open' or 'closed', found 'mixed'",
            id="unknown word",
        ),
        pytest.param(
            spoil("simulated", {"error": "no permission"}),
            "simulated: wanted input should be a valid array, found {'error': 'no permission'}",
            id="what is simulated must be known",
        ),
        pytest.param(
            spoil("os/error", "x"), "os.error: wanted extra inputs are not permitted, found 'x'", id="value and error"
        ),
        pytest.param(
            spoil("seconds", {"os": "fast"}),
            "seconds.os: wanted input should be a valid number, unable to parse string as a number, found 'fast'",
            id="seconds",
        ),
    ],
)
def test_a_wrong_shape_names_its_key_path(answer: Answer, change: Callable[[Answer], None], why: str) -> None:
    change(answer)
    with pytest.raises(HostError) as raised:
        host_state.parse(json.dumps(answer), host="gpu-01")
    assert (raised.value.host, raised.value.what, raised.value.why) == (
        "gpu-01",
        "host probe's answer has the wrong shape",
        why,
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        pytest.param("", "host probe did not answer", id="nothing"),
        pytest.param(" \n\n", "host probe did not answer", id="empty lines"),
        pytest.param("sh: python3: not found", "host probe's answer is no JSON document", id="a message"),
        pytest.param('{"schema": 1', "host probe's answer is no JSON document", id="cut short"),
        pytest.param('{"schema": NaN}', "host probe's answer is no JSON document", id="not a number"),
        pytest.param("[1]", "host probe's answer is no JSON object", id="a list"),
        pytest.param("[" * 100_000, "host probe's answer is no JSON document", id="a nest"),
        pytest.param("x" * (host_state.SIZE_LIMIT_BYTES + 1), "host probe answered too much", id="too large"),
    ],
)
def test_what_is_no_answer(text: str, what: str) -> None:
    with pytest.raises(HostError) as raised:
        host_state.parse(text, host="gpu-01")
    assert raised.value.what == what


def test_a_message_of_the_host_is_shown_without_its_control_characters() -> None:
    with pytest.raises(HostError) as raised:
        host_state.parse("\x1b[2Jboom\x07")
    assert raised.value.why is not None
    assert raised.value.why.endswith("its last line begins with 'boom'")


@pytest.mark.parametrize("section", sorted(set(host_state.SECTIONS) - {"simulated"}))
def test_an_error_or_a_missing_section_is_unknown(answer: Answer, section: str) -> None:
    answer[section] = {"error": "no\x1b[31m permission"}
    assert getattr(host_state.parse(json.dumps(answer)), section) == Unknown(error="no permission")
    del answer[section]
    missing = Unknown(error=f"the probe's answer has no section {section}")
    assert getattr(host_state.parse(json.dumps(answer)), section) == missing


@pytest.mark.parametrize(
    ("section", "value", "error"),
    [
        ("pin", {"digest": "d"}, "pin.reason: wanted field required, found {'digest': 'd'}"),
        ("assigned", {"name": "lab", "digest": 5}, "assigned.digest: wanted input should be a valid string, found 5"),
        ("verification", {"schema": 2}, "verification.schema: wanted input should be 1, found 2"),
    ],
    ids=["pin", "assigned", "verification"],
)
def test_a_spoiled_record_is_unknown_and_no_fault_of_the_probe(
    answer: Answer, section: str, value: object, error: str
) -> None:
    answer[section] = value
    assert getattr(host_state.parse(json.dumps(answer)), section) == Unknown(error=error)


def test_records(answer: Answer) -> None:
    answer["pin"] = {"digest": "abc", "reason": "slow", "since": "2026-11-30T10:00:00Z", "by": "a newer bringup"}
    answer["assigned"] = {"name": "lab", "digest": "abc"}
    state = host_state.parse(json.dumps(answer))
    assert state.pin_found == host_state.Pin(digest="abc", reason="slow", since="2026-11-30T10:00:00Z")
    assert state.assigned_stack == host_state.Assigned(name="lab", digest="abc")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("\x1b[4mGPU0\x1b[0m", "GPU0"),
        ("a\x00b\x7fc\x9bd", "abcd"),
        ("line\n\ttab\r", "line\n\ttab"),
        ("safe\u202egnp.exe", "safegnp.exe"),
        ("\x1b]0;title\x07", "0;title"),
        ("ünïcode ✓", "ünïcode ✓"),
    ],
    ids=["colour", "control", "tab and newline stay", "direction", "window title", "letters stay"],
)
def test_control_characters_are_taken_out(text: str, wanted: str) -> None:
    assert host_state.clean(text) == wanted


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@given(section=st.sampled_from(sorted(host_state.SECTIONS)), value=JSON)
def test_whatever_a_host_says_is_a_state_or_a_host_error(section: str, value: object) -> None:
    answer = json.loads(CAPTURED.read_text())
    answer[section] = value
    try:
        state = host_state.parse(json.dumps(answer))
    except HostError:
        return
    assert isinstance(state, HostState)


def the_long_way(answer: Answer) -> HostState | str:
    """Return what parse says of an answer that has a text to clean, in a place that nobody reads."""
    try:
        return host_state.parse(json.dumps({**answer, "note": "\x07"}))
    except HostError as error:
        return str(error)


@pytest.mark.parametrize("name", ["h200x2_answer.json", "lab_answer.json", "debian13_answer.json"])
def test_an_answer_with_nothing_to_clean_is_read_in_one_pass(name: str) -> None:
    line = (CAPTURED.parent / name).read_text().replace("\n", " ")
    state = host_state._as_expected(line)
    assert state is not None
    assert state == the_long_way(json.loads(line))


@pytest.mark.parametrize(
    "text",
    ["\x1b[2J", "a\x08", "\x7f", "\u202e", "\u2028", "\x9b", "\r"],
    ids=["escape", "backspace", "delete", "direction", "line separator", "C1", "return"],
)
def test_a_text_that_cannot_be_printed_is_never_read_in_one_pass(answer: Answer, text: str) -> None:
    answer["simulated"] = [text]
    assert host_state._as_expected(json.dumps(answer)) is None
    assert host_state._as_expected(json.dumps(answer, ensure_ascii=False)) is None


@given(section=st.sampled_from(sorted(host_state.SECTIONS)), value=JSON | st.just({"error": None}))
def test_one_pass_and_the_long_way_say_the_same(section: str, value: object) -> None:
    answer = json.loads(CAPTURED.read_text())
    answer[section] = value
    try:
        said: HostState | str = host_state.parse(json.dumps(answer))
    except HostError as error:
        said = str(error)
    assert said == the_long_way(answer)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_document_are_a_host_error(data: bytes) -> None:
    with pytest.raises(HostError):
        host_state.parse(data)


@pytest.mark.parametrize(
    ("has_nouveau", "written", "initramfs", "wanted"),
    [
        (False, None, None, True),
        (True, None, 100.0, False),
        (True, 200.0, 100.0, False),
        (True, 200.0, 300.0, True),
        (True, 200.0, None, True),
    ],
    ids=["no nouveau", "no blacklist", "initramfs is older", "initramfs is newer", "no initramfs"],
)
def test_whether_nouveau_stays_off(
    answer: Answer, has_nouveau: bool, written: float | None, initramfs: float | None, wanted: bool
) -> None:
    kernel = {"release": "6.1", "has_headers": True, "nvidia": None}
    kernel |= {"has_nouveau": has_nouveau, "initramfs_mtime_s": initramfs}
    answer["kernel"] |= {"installed": [kernel], "nouveau_conf_mtime_s": written}
    state = host_state.parse(json.dumps(answer))
    assert isinstance(state.kernel, host_state.Kernel)
    installed = state.kernel.find("6.1")
    assert installed is not None
    assert state.kernel.is_nouveau_off(installed) is wanted


def test_the_probe_is_asked_for_names_and_for_no_wanted_version() -> None:
    stack = load_stack(paths.stacks() / "sglang-0.5.9-cu130.toml")
    asked = host_state.probe_parameters(stack, deep=True)
    assert asked == {
        "sonames": ["libnvrtc.so.12", "libnvrtc.so.13"],
        "packages": [],
        "units": [],
        "environments": [],
        "deep": True,
    }


def test_the_committed_schema_is_the_one_of_the_models() -> None:
    assert json.loads(SCHEMA.read_text()) == host_state.json_schema()


@pytest.mark.parametrize("name", ["h200x2_answer.json", "lab_answer.json", "debian13_answer.json"])
def test_a_captured_answer_fits_the_committed_schema(name: str) -> None:
    jsonschema.validate(json.loads((CAPTURED.parent / name).read_text()), json.loads(SCHEMA.read_text()))


def test_the_answer_of_a_converged_rehearsal_host() -> None:
    state = host_state.parse((CAPTURED.parent / "lab_answer.json").read_text().replace("\n", " "))
    assert state.unknown_sections() == {}
    assert state.simulated == ("gpu", "driver", "wheels")
    assert state.current_environment is not None
    assert (state.current_environment.name, state.current_environment.generation) == ("9ad48a6d3cf5-1", 1)
    assert isinstance(state.verification, host_state.Verification)
    assert state.verification.environment == "9ad48a6d3cf5-1"
    assert [backend.state for backend in state.verification.backends] == ["not_run"]


def test_the_answer_of_a_converged_rehearsal_host_of_debian_13() -> None:
    state = host_state.parse((CAPTURED.parent / "debian13_answer.json").read_text().replace("\n", " "))
    assert state.unknown_sections() == {}
    assert isinstance(state.os, host_state.Os)
    assert (state.os.release, state.os.codename, state.os.libc) == ("debian13-x86_64", "trixie", "glibc 2.41")
    assert isinstance(state.kernel, host_state.Kernel)
    assert (state.kernel.compiler, state.kernel.default_compiler) == ("gcc 14", "gcc 14")
    assert isinstance(state.python, host_state.Python)
    assert list(state.python.interpreters) == ["3.13"]
    assert isinstance(state.driver, host_state.Driver)
    assert [(entry.version, entry.is_built) for entry in state.driver.dkms] == [("580.95.05", True)]
    assert state.current_environment is not None
    assert state.current_environment.python == "3.13"
