"""Import pyinfra without what nothing of it uses. To be imported before pyinfra; it only saves time.

Paramiko imports invoke, and with it a task runner and a YAML parser, for ``Match exec`` in ssh_config; pyinfra puts a
class of its own in its place. What is named here is loaded at its first use, should there ever be one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType
from typing import Any

from gevent import monkey

_read = metadata.entry_points


@cache
def _all_entry_points() -> Any:
    return _read()


def _entry_points(**wanted: Any) -> Any:
    """Answer as ``importlib.metadata.entry_points`` does, from one reading of the installed packages."""
    return _all_entry_points().select(**wanted)


# pyinfra_cli does the same, and would then look at every object, which is a use of what must wait. Gevent asks for
# entry points 25 times meanwhile, and the files of every package would be read 25 times.
metadata.entry_points = _entry_points
try:
    monkey.patch_all()
finally:
    metadata.entry_points = _read

LATER = frozenset({"invoke"})


class _Later(MetaPathFinder):
    """Find a module whose code runs when somebody asks for something in it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in LATER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


_finder = _Later()
sys.meta_path.insert(0, _finder)
try:
    from pyinfra.api import arguments, connectors
finally:
    sys.meta_path.remove(_finder)

# For every fact of every host pyinfra reads the same type hints anew, which is as much as opening its connection.
arguments.all_global_arguments = cache(arguments.all_global_arguments)

# The packages are still the same ones, and their files need not be read once more.
connectors.entry_points = _entry_points
