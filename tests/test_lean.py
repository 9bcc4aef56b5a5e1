"""Importing pyinfra leanly leaves it as it is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ASKED = {
    "connectors": "sorted(connectors.get_all_connectors())",
    "global arguments": "[[name, str(kind)] for name, kind in arguments.all_global_arguments()]",
    "entry points": "sorted(str(point) for point in metadata.entry_points(group='console_scripts'))",
    "patched for gevent": "[monkey.is_module_patched(name) for name in ('socket', 'threading', 'subprocess', 'ssl')]",
    "at its first use, invoke": "invoke.Context.__name__",
}


def answer(first: str, asked: str) -> object:
    code = (
        f"{first}; import json, invoke; from importlib import metadata; from gevent import monkey; import pyinfra_cli; "
        f"from pyinfra.api import arguments, connectors; print(json.dumps({asked}))"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return json.loads(said)


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_it_answers_as_it_does_without(asked: str) -> None:
    plain = answer("pass", asked)
    assert plain
    assert answer("from bringup import lean", asked) == plain
