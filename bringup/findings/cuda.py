"""What toolkits already on a host, and the GPUs they are for, say against the wanted ones."""

from __future__ import annotations

from collections.abc import Iterator

from bringup import catalog, wanted
from bringup.finding import Finding
from bringup.host_state import HostState, Unknown
from bringup.stack import Stack


def distribution_toolkit(state: HostState) -> Iterator[Finding]:
    """Warn of the distribution's own toolkit: its libraries lie where the loader always looks."""
    if isinstance(state.toolkits, Unknown) or isinstance(state.dpkg, Unknown):
        return
    package = state.dpkg.installed("nvidia-cuda-toolkit")
    if package is None and not state.toolkits.system:
        return
    found = f"nvidia-cuda-toolkit {package.version}" if package else ", ".join(state.toolkits.system)
    yield Finding(
        code="BU-CUD-001",
        severity="warning",
        cause=f"the distribution's own CUDA toolkit is installed ({found}); plain nvcc and libnvrtc.so are its",
        remedy="remove nvidia-cuda-toolkit unless something needs it",
        evidence={"found": found},
    )


def unpackaged_toolkit(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Refuse to lay packages over a toolkit directory that no package owns."""
    locked = wanted.packages(stack, state)
    if isinstance(state.toolkits, Unknown) or isinstance(state.dpkg, Unknown) or locked is None:
        return
    for version in stack.cuda.toolkits:
        installed = state.toolkits.installed.get(version)
        if installed is None or version in stack.cuda.runfiles or not installed.has_nvcc:
            continue
        suffix = "-" + version.replace(".", "-")
        if not any(p.is_installed and name.endswith(suffix) for name, p in state.dpkg.packages.items()):
            yield Finding(
                code="BU-CUD-002",
                severity="error",
                cause=f"{installed.path} holds a toolkit that no package owns; packages would be laid over it",
                remedy=f"move it away, or name its runfile in the stack (cuda.runfiles.{version!r})",
                evidence={"wanted": f"packages of {version}", "found": installed.release},
            )


def targets(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Tell which toolkit cannot compile for the host's GPUs; refuse when none can."""
    if isinstance(state.gpus, Unknown):
        return
    capabilities = {board.compute_capability for f in state.gpus.pci if (board := catalog.gpu(f.device_id)) is not None}
    for capability in sorted(capabilities):
        answers = {}
        for version in stack.cuda.toolkits:
            row = catalog.toolkit(version)
            answers[version] = row.can_target(capability) if row else None
        unable = [version for version, answer in answers.items() if answer is False]
        if unable:
            yield Finding(
                code="BU-CUD-003",
                severity="error" if len(unable) == len(answers) else "info",
                cause=f"toolkit {', '.join(unable)} cannot target compute capability {capability}",
                remedy="use a newer toolkit for kernels that are compiled on the host",
                evidence={"capability": capability, "toolkits": answers},
            )


def misdirected_link(state: HostState) -> Iterator[Finding]:
    """Warn of a /usr/local/cuda that leads nowhere, or that update-alternatives does not own."""
    if isinstance(state.toolkits, Unknown):
        return
    link = state.toolkits.links.get(wanted.CUDA_LINK)
    if link is not None and not link.exists:
        yield Finding(
            code="BU-CUD-004",
            severity="warning",
            cause=f"{wanted.CUDA_LINK} leads to {link.resolved}, which does not exist",
            remedy="apply points it at the default toolkit in the cutover",
            evidence={"found": link.target},
        )
    group = state.toolkits.alternatives.get("cuda")
    if group is not None and link is not None and link.target != "/etc/alternatives/cuda":
        yield Finding(
            code="BU-CUD-005",
            severity="warning",
            cause=f"{wanted.CUDA_LINK} was made by hand ({link.target}); update-alternatives no longer moves it",
            remedy="apply sets the alternative and the link in the cutover",
            evidence={"wanted": "/etc/alternatives/cuda", "found": link.target},
        )


def findings(stack: Stack, state: HostState) -> Iterator[Finding]:
    """Return what the rules on toolkits say about a host."""
    yield from distribution_toolkit(state)
    yield from unpackaged_toolkit(stack, state)
    yield from targets(stack, state)
    yield from misdirected_link(state)
