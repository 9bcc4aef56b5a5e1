"""Register the wanted toolkits' directories with the dynamic loader, by versioned path."""

from __future__ import annotations

from pyinfra.api import deploy

from bringup import wanted
from bringup.findings import change
from bringup.host_state import Unknown
from tasks.run import Commands, Context, converges, do, refuse, write


@converges("linker.*")
def entry(context: Context) -> Commands:
    """Write the loader entry and rebuild the loader's cache.

    The entry names versioned directories and sorts before NVIDIA's ``000_cuda.conf``: ldconfig keeps the first
    spelling of a directory, so the other order would cache the path through the moving /usr/local/cuda. It is
    refused when it would change the first hit of a SONAME that the serving environment uses.
    """
    disturbed = change.loader_change(context.stack, context.state)
    if disturbed is not None:
        yield refuse(context.host, disturbed)
        return
    assert not isinstance(context.state.os, Unknown)  # the difference could not have been seen otherwise
    text = wanted.linker_text(context.stack, context.state.os.machine)
    yield write(wanted.LINKER_FILE, text, undo=True)
    yield do("ldconfig", ["ldconfig"], limit_s=120)


@deploy("Linker")
def register() -> None:
    """Make the wanted SONAMEs resolve into the wanted toolkits."""
    entry(name="Register the toolkits with the loader")
