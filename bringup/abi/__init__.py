"""Judge whether shared objects will load beside a torch: `dlopen(RTLD_NOW)` after `import torch`, on paper.

A *file* is one shared object with what it needs and offers. A *torch side* says what a process holds after
`import torch`: an installed environment that files/abi_probe.py has read, or a torch release from the index
of exports. A *verdict* is what `judge` says of a distribution on a torch side.

That every name resolves is necessary, not enough: C++ objects may change their layout between two minor
versions of torch while all names stay. So a file that uses torch's C++ interface counts as sound only on the
minor version that it was built for.
"""

from typing import TYPE_CHECKING, Any

from bringup.abi.facts import (
    Distribution,
    ElfFacts,
    Level,
    SharedFile,
    declared_torch,
    promised_glibc,
    worst,
)
from bringup.abi.names import belongs_to_torch, demangle, is_stable_interface
from bringup.abi.policies import POLICIES, Policy, Variants, policy_of
from bringup.abi.suppliers import SUPPLIERS, Supplier, supplier
from bringup.abi.torch_side import Host, Library, Load, TorchRelease, TorchSide, brought_libraries
from bringup.abi.verdict import AbiFinding, FileVerdict, Verdict, judge, judge_environment

if TYPE_CHECKING:
    from bringup.abi.installed import InstalledEnvironment, parse_environment
    from bringup.abi.releases import TorchIndex, release_of

__all__ = [
    "POLICIES",
    "SUPPLIERS",
    "AbiFinding",
    "Distribution",
    "ElfFacts",
    "FileVerdict",
    "Host",
    "InstalledEnvironment",
    "Level",
    "Library",
    "Load",
    "Policy",
    "SharedFile",
    "Supplier",
    "TorchIndex",
    "TorchRelease",
    "TorchSide",
    "Variants",
    "Verdict",
    "belongs_to_torch",
    "brought_libraries",
    "declared_torch",
    "demangle",
    "is_stable_interface",
    "judge",
    "judge_environment",
    "parse_environment",
    "policy_of",
    "promised_glibc",
    "release_of",
    "supplier",
    "worst",
]


def __getattr__(name: str) -> Any:
    """Load what not everybody needs when it is asked for: pydantic for probe answers, the index of exports."""
    if name in ("InstalledEnvironment", "parse_environment"):
        from bringup.abi import installed

        return getattr(installed, name)
    if name in ("TorchIndex", "release_of"):
        from bringup.abi import releases

        return getattr(releases, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
