"""``bringup verify --across``: which hosts can be measured together, and which file the worker runs for them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from bringup.commands import verify
from bringup.errors import InputError


def host(name: str, stack: str = "lab", digest: str = "d1", *, is_local: bool = False) -> dict[str, Any]:
    return {"name": name, "stack": {"name": stack, "digest": digest}, "ssh": {"is_local": is_local}}


def test_hosts_keep_their_order_since_they_meet_at_the_first() -> None:
    assert verify.together([host("b"), host("a")]) == ["b", "a"]


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ([host("a")], "--across measures between hosts, and only a is chosen"),
        ([host("a"), host("b", "other", "d2")], "a: lab (d1); b: other (d2)"),
        ([host("a"), host("b", digest="d2")], "a: lab (d1); b: lab (d2)"),
        ([host("a"), host("@local", is_local=True)], "--across cannot take @local"),
    ],
    ids=["one host", "two stacks", "one name, two contents", "this machine"],
)
def test_hosts_that_cannot_be_measured_together(hosts: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(InputError) as caught:
        verify.together(hosts)
    assert says in str(caught.value)


def test_the_file_that_each_command_runs() -> None:
    # In a process of its own: the worker patches the standard library.
    asked = '("verify", False), ("verify", True), ("rollback", False)'
    code = f"from bringup import worker as w; print(*(w.entry_file(c, is_across=a).name for c, a in ({asked})))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["deploy.py", "verify_across.py", "rollback.py"]
