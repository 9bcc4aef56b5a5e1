"""Install CUDA toolkits side by side without moving what is serving from one to the other."""

from __future__ import annotations

from pathlib import Path

from pyinfra.api import FunctionCommand, Host, deploy
from pyinfra.context import ctx_host

from bringup import wanted
from bringup.errors import HostError
from bringup.host_state import Unknown
from bringup.stack import Runfile
from tasks import apt
from tasks.channel import push
from tasks.run import Commands, Context, alternative, converges, quoted, remove, shell

_DRIVER_PATTERNS = ("nvidia-*", "libnvidia-*", "cuda-drivers*", "xserver-xorg-video-nvidia*", "libnvsdm*")


@converges("cuda.toolkit.*")
def toolkits(context: Context) -> Commands:
    """Freeze every alternative, then install each missing toolkit as its locked set, or from its runfile.

    A new toolkit of higher priority takes an alternative in automatic mode with it, and everything that
    follows /usr/local/cuda; frozen first, the links stay where they are until the cutover moves them.
    """
    yield from freeze(context)
    locked = wanted.packages(context.stack, context.state)
    for difference in context.differences:
        version = difference.path.removeprefix("cuda.toolkit.")
        runfile = context.stack.cuda.runfiles.get(version)
        if runfile is not None:
            yield from _runfile(context, version, runfile)
            continue
        assert locked is not None  # preflight refuses a host whose release the lock does not hold
        yield apt.install(
            f"toolkit-{version}",
            wanted.toolkit_packages(context.stack, locked, version),
            protect=_DRIVER_PATTERNS,
            allow_downgrade=True,
        )
        # The alternatives that the packages just registered start in automatic mode: freeze them as well,
        # except where nothing was there before.
    yield shell("freeze-alternatives", _FREEZE, limit_s=60)


# The link of a group that did not exist before has no serving user: it may stay where its package put it.
_FREEZE = """
for group in $(update-alternatives --get-selections | awk '$1 ~ /^cuda(-[0-9]+)?$/ && $2 == "auto" {print $1}')
do update-alternatives --quiet --set "$group" "$(readlink -f "/etc/alternatives/$group")"
done
"""


def _runfile(context: Context, version: str, runfile: Runfile) -> Commands:
    """Install one toolkit from NVIDIA's runfile: silent, toolkit only, into its versioned directory."""
    if context.settings.runfiles is None:
        raise HostError(
            f"toolkit {version} comes from a runfile, and the inventory does not say where runfiles are",
            hint="set bringup_runfiles to a directory on the controller",
        )
    source = Path(context.settings.runfiles) / runfile.file
    target = f"/run/bringup/{runfile.file}"
    yield FunctionCommand(_push_runfile, (str(source), target, runfile.size_bytes), {})
    # A log left by another user makes the installer crash; SUDO_USER and DISPLAY mislead it.
    yield shell(
        f"runfile-{version}",
        "rm -f /tmp/cuda-installer.log\n"
        f"echo {quoted(runfile.sha256)}'  '{quoted(target)} | sha256sum -c --quiet\n"
        f"env -u SUDO_USER -u DISPLAY sh {quoted(target)} --silent --toolkit --override --no-man-page "
        f"--toolkitpath={quoted(wanted.toolkit_directory(version))}\n",
        limit_s=3600,
        detach=True,
    )
    yield remove(target)


def _push_runfile(source: str, target: str, size_bytes: int) -> bool:
    path = Path(source)
    if not path.is_file() or path.stat().st_size != size_bytes:
        raise HostError(f"the runfile {source} is missing or not {size_bytes} bytes long")
    host: Host = ctx_host.get()
    push(host, target, path)
    return True


@converges("cuda.alternatives")
def alternatives(context: Context) -> Commands:
    """Keep alternatives where they are: by hand, not by whichever toolkit is newest."""
    yield from freeze(context)


def freeze(context: Context) -> Commands:
    """Yield the commands that set moving alternatives by hand to where they point now."""
    if isinstance(context.state.toolkits, Unknown):
        return
    for group, found in context.state.toolkits.alternatives.items():
        if group.startswith("cuda") and found.mode != "manual" and found.target is not None:
            yield alternative(group, found.target)


@deploy("CUDA")
def install() -> None:
    """Bring the wanted toolkits onto the host, side by side."""
    toolkits(name="Install the CUDA toolkits side by side")
    alternatives(name="Freeze the toolkit alternatives")
