"""What counts as a secret in inventories and environments, and that it is hidden."""

from __future__ import annotations

import pytest

from bringup.report.masking import Masker
from bringup.secret import hide, secrets_in, split_login


@pytest.mark.parametrize(
    ("value", "found"),
    [
        pytest.param({"site_password": "hunter-two"}, {"hunter-two"}, id="by its name"),
        pytest.param({"HOOK_TOKEN": "abc-def-123"}, {"abc-def-123"}, id="a variable"),
        pytest.param({"bmc": {"password": "hunter-two"}}, {"hunter-two"}, id="deep in the data"),
        pytest.param({"ssh_key_password": "hunter-two"}, {"hunter-two"}, id="a passphrase"),
        pytest.param({"tokens": ["abc-def-123"], "token": ["abc-def-456"]}, {"abc-def-456"}, id="in a list"),
        pytest.param({"INDEX_LOGIN": "robot:hunter-two"}, {"robot:hunter-two", "hunter-two"}, id="with its user"),
        pytest.param({"url": "http://me:p%40ss@host/x"}, {"p%40ss", "p@ss"}, id="in a URL, quoted and not"),
        pytest.param(
            {"x": "http://a:one1@h and postgresql://b:two2@/d?host=x"}, {"one1", "two2"}, id="in URLs within a text"
        ),
        pytest.param({"ssh_key": "/root/.ssh/id", "ssh_user": "root"}, set(), id="a path, a user"),
        pytest.param({"credentials": "env:NAME"}, set(), id="a reference"),
        pytest.param({"token": "/run/secrets/token"}, set(), id="the path of a secret"),
        pytest.param({"password": "x"}, set(), id="too short to be told from a word"),
        pytest.param({"url": "http://host/x", "n": 3, "on": True}, set(), id="nothing secret"),
    ],
)
def test_secrets_in(value: object, found: set[str]) -> None:
    assert set(secrets_in(value)) == found


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        pytest.param("http://h/x/", ("http://h/x/", None), id="without"),
        pytest.param("http://me:pw@h:81/x/", ("http://h:81/x/", ("me", "pw")), id="with"),
        pytest.param("http://me:p%2F%40w@h/", ("http://h/", ("me", "p/@w")), id="quoted"),
        pytest.param("http://token@h/", ("http://h/", ("token", "")), id="user alone"),
    ],
)
def test_split_login(url: str, parts: tuple[str, tuple[str, str] | None]) -> None:
    assert split_login(url) == parts


def test_hide_replaces_the_longest_first() -> None:
    places = ({"LOGIN": "robot:hunter-two"}, {"password": "hunter-two"})
    assert hide("robot:hunter-two, then hunter-two", *places) == "***, then ***"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        pytest.param("bringup_token: Extra inputs", "bringup_token: Extra inputs", id="about a key"),
        pytest.param("it is hunter-two", "it is ***", id="a known secret"),
        pytest.param("at http://me:pw@host/", "at http://***@host/", id="a login in a URL"),
        pytest.param("Authorization: Basic bWU6cHc=", "Authorization: Basic ***", id="a header"),
    ],
)
def test_messages_keep_what_they_say_about_secrets(message: str, shown: str) -> None:
    assert Masker(["hunter-two"]).message(message) == shown
