"""The torch builds of the index of exports as torch sides for the guard."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bringup.abi.torch_side import TorchRelease, brought_libraries
from bringup.errors import InputError
from bringup.torch_index import IndexedTorch, order_of

# These two load the rest; see torch/__init__.py and torch/lib of 2.8 to 2.15.
_LOADED_FIRST = ("libtorch_global_deps.so", "libtorch_python.so")


def release_of(build: IndexedTorch) -> TorchRelease:
    """Return a build as a torch side, which brings the CUDA libraries that its CUDA wheels hold."""
    loaded: set[str] = set()
    pending = list(_LOADED_FIRST)
    while pending:
        name = pending.pop()
        if name not in loaded:
            loaded.add(name)
            pending += build.needed.get(name, ())
    held = {name for wheel in build.cuda_wheels for name in wheel.libraries}
    brings = brought_libraries(loaded, build.cuda) & held
    return TorchRelease(build.version, build.cuda, build.exports, build.needed, brings)


class TorchIndex:
    """The known torch builds of one machine, oldest first."""

    def __init__(self, builds: Iterable[IndexedTorch], machine: str = "x86_64") -> None:
        self.machine = machine
        self.builds = tuple(sorted((b for b in builds if b.machine == machine), key=lambda b: order_of(b.version)))
        self._releases = {build.version: release_of(build) for build in self.builds}

    @property
    def catalogue(self) -> tuple[TorchRelease, ...]:
        """Return every known build, by which the guard tells what fits; of each version one, for CUDA if there is."""
        chosen: dict[str, IndexedTorch] = {}
        for build in sorted(self.builds, key=lambda build: build.cuda is None):
            chosen.setdefault(build.public, build)
        return tuple(self._releases[build.version] for build in self.builds if chosen[build.public] is build)

    def catalogue_with(self, release: TorchRelease) -> tuple[TorchRelease, ...]:
        """Return every known build, ``release`` standing for its version."""
        public = release.version.split("+")[0]
        others = [known for known in self.catalogue if known.version.split("+")[0] != public]
        return tuple(sorted([*others, release], key=lambda known: order_of(known.version)))

    def find(self, wanted: str) -> TorchRelease:
        """Return a build by its version: ``2.9.1+cu130`` that very one, ``2.9.1`` any, ``2.9`` the newest of it.

        Raises InputError when the index has none.
        """
        build = self.get(wanted)
        if build is None:
            have = ", ".join(b.version for b in self.builds)
            raise InputError(
                f"the index of exports does not have torch {wanted} for {self.machine}",
                why=f"it has {have or 'none'}",
                hint=f"add it with `bringup abi index torch=={wanted}`",
            )
        return self._releases[build.version]

    def get(self, wanted: str) -> IndexedTorch | None:
        """Return a build as `find` does, None when the index has none."""
        wanted = wanted.removeprefix("torch==").strip()
        for build in self.builds:
            if wanted == build.version:
                return build
        if "+" in wanted:
            return None
        for build in self.builds:
            if wanted == build.public:
                return build
        if re.fullmatch(r"\d+\.\d+", wanted):
            fitting = [b for b in self.builds if b.public.startswith(wanted + ".")]
            return fitting[-1] if fitting else None
        return None
