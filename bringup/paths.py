"""Find what travels with bringup, in a checkout and in an installed wheel alike."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).resolve().parent


@cache
def root() -> Path:
    """Return the directory that holds ``deploy.py``, ``files/`` and ``inventory/stacks/``."""
    checkout = _PACKAGE.parent
    return checkout if (checkout / "deploy.py").is_file() else _PACKAGE / "_root"


def deploy_file() -> Path:
    """Return the path of ``deploy.py``."""
    return root() / "deploy.py"


def files() -> Path:
    """Return the directory of everything that reaches a host."""
    return root() / "files"


def stacks() -> Path:
    """Return the directory of the stacks that bringup ships."""
    return root() / "inventory" / "stacks"


def data() -> Path:
    """Return the directory of the data tables."""
    return _PACKAGE / "data"


def state_dir() -> Path:
    """Return the user's state directory for bringup (``$BRINGUP_STATE`` or the XDG one); not created here."""
    if named := os.environ.get("BRINGUP_STATE"):
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "bringup"


def history_url() -> str:
    """Return the URL of the history: ``$BRINGUP_HISTORY``, else SQLite in the user's state directory."""
    return os.environ.get("BRINGUP_HISTORY") or f"sqlite:///{state_dir() / 'history.db'}"


@cache
def host_script(name: str) -> ModuleType:
    """Load ``files/NAME.py`` as a module, so that the controller runs the very code that reaches a host."""
    path = files() / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"bringup_host_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
