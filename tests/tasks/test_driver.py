"""What the driver's module needs to be built, as tables."""

from __future__ import annotations

import pytest

from tasks.driver import missing_for_the_build
from tests.host_case import Change, observed, put

HEADERS = "linux-headers-6.1.0-21-amd64"


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        pytest.param([], (), id="nothing"),
        pytest.param([put("kernel installed 0 has_headers", False)], (HEADERS,), id="headers"),
        pytest.param([put("kernel default_compiler", None)], ("gcc",), id="the compiler that dkms only recommends"),
        pytest.param(
            [put("kernel installed 0 has_headers", False), put("kernel default_compiler", None)],
            (HEADERS, "gcc"),
            id="headers and compiler",
        ),
        pytest.param(
            [put("kernel next_release", "6.1.0-22-amd64")],
            ("linux-headers-6.1.0-22-amd64",),
            id="headers of the kernel that boots next",
        ),
        pytest.param([put("kernel", {"error": "no /proc"})], (), id="nobody could look"),
    ],
)
def test_what_dkms_needs_is_installed_before_the_driver(changes: list[Change], missing: tuple[str, ...]) -> None:
    assert missing_for_the_build(observed(*changes)) == missing
