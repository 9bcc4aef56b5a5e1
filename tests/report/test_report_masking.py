"""Masking: no secret in any form, and nothing else torn apart."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bringup.report.masking import Masker

SECRET = "p@ss/w0rd+x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"token {SECRET} end", "token *** end"),
        ("https://ops:p%40ss%2Fw0rd%2Bx@h/simple", "https://***@h/simple"),
        ("p%40ss%2Fw0rd%2Bx", "***"),
        (base64.b64encode(SECRET.encode()).decode(), "***"),
        (base64.b64encode(f"__token__:{SECRET}".encode()).decode(), "***"),
        (f"{SECRET}{SECRET}", "******"),
    ],
    ids=["plain", "in-a-url", "quoted", "base64", "basic-token", "twice"],
)
def test_a_known_secret_is_found_in_every_form(text: str, expected: str) -> None:
    assert Masker([SECRET]).text(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GET https://user:pa55@host/x failed", "GET https://***@host/x failed"),
        ("https://t0ken@host/x", "https://***@host/x"),
        ("git+ssh://git@host/x", "git+ssh://***@host/x"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ('"Authorization": "Basic dXNlcg=="', '"Authorization": "Basic ***"'),
        ("PGPASSWORD=hunter2 psql", "PGPASSWORD=*** psql"),
        ("UV_INDEX_X_PASSWORD='a b' uv", "UV_INDEX_X_PASSWORD=*** uv"),
        ("api-key: abc", "api-key: ***"),
        ("?token=abc&x=1", "?token=***&x=1"),
        (
            "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\nrest",
            "***\nrest",
        ),
        ("-----BEGIN RSA PRIVATE KEY-----\ncut off", "***"),
    ],
    ids=[
        "userinfo",
        "user-only",
        "scheme",
        "bearer",
        "basic",
        "environment",
        "quoted-value",
        "colon",
        "query",
        "private-key",
        "private-key-cut",
    ],
)
def test_what_looks_like_a_credential_is_masked_although_nobody_named_it(text: str, expected: str) -> None:
    assert Masker().text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "https://host/simple/torch/",
        "operator@10.87.0.11 did not answer",
        "linker.libnvrtc.so.13: wanted /usr/local/cuda-13.0",
        "torch==2.9.1+cu130 sha256:0123456789abcdef",
        "tokens × hidden × 2 bytes, 512 tokens = fast",
        "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----",
        "",
    ],
    ids=["url", "user-at-host", "path", "version", "tokens", "certificate", "empty"],
)
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert Masker(["", SECRET]).text(text) == text


def test_values_are_masked_wherever_they_stand() -> None:
    value = {
        "a": [SECRET, 1, None, True, {SECRET: "x"}],
        "password": "unknown",
        "index_token": "unknown",
        "token_count": "12",
        "api_key": None,
        "b": 2.5,
    }
    assert Masker([SECRET]).value(value) == {
        "a": ["***", 1, None, True, {"***": "x"}],
        "password": "***",
        "index_token": "***",
        "token_count": "12",
        "api_key": None,
        "b": 2.5,
    }


def test_of_two_secrets_the_longer_goes_first() -> None:
    assert Masker(["abcd", "abcdefgh"]).text("abcdefgh abcd") == "*** ***"


@given(st.text(min_size=1), st.text(), st.text())
def test_no_known_secret_ever_remains(secret: str, before: str, after: str) -> None:
    masked = Masker([secret]).text(before + secret + after)
    assert secret not in masked or "*" in secret  # the mask itself is made of stars


def test_what_is_said_again_is_masked_again_and_memory_is_bounded() -> None:
    masker = Masker([SECRET])
    assert [masker.text(f"token {SECRET}") for _ in range(3)] == ["token ***"] * 3
    for at in range(5000):
        assert masker.text(f"{at} {SECRET}") == f"{at} ***"
    long = f"{SECRET} " * 1000
    assert masker.text(long) == "*** " * 1000
    assert len(masker._masked) <= 2000
    assert long not in masker._masked
