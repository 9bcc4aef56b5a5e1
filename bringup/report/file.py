"""Write a report so that whoever reads it never sees a part of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bringup.errors import InputError


def write(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace a file by new text, whole. Raises InputError where it cannot be written.

    The default mode lets another user's process read it, as node_exporter must.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise InputError(f"cannot write {path}", why=error.strerror) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
        Path(name).replace(path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise InputError(f"cannot write {path}", why=error.strerror) from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
