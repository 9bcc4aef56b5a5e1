"""What is told of a command that failed, from the ends of real outputs."""

from __future__ import annotations

import pytest

from bringup.findings.change import last_words

PACKAGES = ["Errors were encountered while processing:", " nvidia-dkms-580-open", " nvidia-driver-580-open"]
APT = "E: Sub-process /usr/bin/dpkg returned an error code (1)"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        pytest.param([*PACKAGES, APT], f" nvidia-dkms-580-open /  nvidia-driver-580-open / {APT}", id="Debian 12"),
        pytest.param(
            [*PACKAGES, "needrestart is being skipped since dpkg has failed", APT],
            f" nvidia-dkms-580-open /  nvidia-driver-580-open / {APT}",
            id="Debian 13",
        ),
        pytest.param(["one", "", "two", "  "], "one / two", id="empty lines"),
        pytest.param([""], "the connection was lost or it said nothing", id="nothing"),
    ],
)
def test_a_command_that_failed_is_quoted_with_what_tells_something(lines: list[str], said: str) -> None:
    assert last_words(lines) == said
