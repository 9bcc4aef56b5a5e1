"""What a process holds after `import torch`, as a torch release from the index of exports tells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bringup.abi.facts import Distribution, SharedFile, newest_glibc
from bringup.abi.names import is_bundled_copy
from bringup.abi.suppliers import supplier


@dataclass(frozen=True)
class Library:
    """One library in the scope of a load.

    ``exports`` and ``versions`` (the symbol versions it defines) are None when nobody looked: such a library
    is taken to hold whatever no other one does, except names of torch. ``file`` is given for a library that
    this load brings into the process, so that its own names must be found too.
    """

    name: str
    exports: frozenset[str] | None = None
    versions: frozenset[str] | None = None
    file: SharedFile | None = None


@dataclass(frozen=True)
class Load:
    """What loading a file leads to: the libraries searched for names, and what is not as it should be.

    ``missing`` pairs a library that is not found with the file that needs it. ``assumed`` are libraries that
    the host has to supply and nobody has looked for. ``loaded_before`` are files of the same distribution
    that no search path leads to, so the package must load them first.
    """

    scope: tuple[Library, ...]
    missing: tuple[tuple[str, str], ...] = ()
    assumed: tuple[str, ...] = ()
    loaded_before: tuple[str, ...] = ()


class TorchSide(Protocol):
    """What a process holds after `import torch`."""

    @property
    def version(self) -> str:
        """Return torch's version with its local label ("2.9.1+cu128")."""

    @property
    def cuda(self) -> str | None:
        """Return the CUDA version that torch was built for ("12.8"), None for a CPU build."""

    @property
    def python(self) -> str | None:
        """Return the interpreter's minor version ("3.12"), None when it is not settled."""

    @property
    def glibc(self) -> str | None:
        """Return the host's glibc ("2.36"), None when no host was looked at."""

    def load(self, file: SharedFile, distribution: Distribution) -> Load:
        """Return what loading a file of a distribution leads to."""


@dataclass(frozen=True)
class Host:
    """What is known of a host beside its environment.

    ``sonames`` are the libraries its loader finds without a search path, ``libraries`` its C and C++
    libraries with their exports and symbol versions.
    """

    sonames: frozenset[str]
    libraries: Mapping[str, Library] = field(default_factory=dict)

    @property
    def glibc(self) -> str | None:
        """Return the version of glibc, None when its library was not read."""
        libc = self.libraries.get("libc.so.6")
        return newest_glibc(libc.versions or ()) if libc else None


@dataclass(frozen=True, eq=False)
class TorchRelease:
    """A torch release as the index of exports holds it, with the CUDA libraries that its wheels bring.

    ``exports`` and ``needed`` are by the name of the library in torch/lib. ``brings`` are the sonames of
    CUDA libraries in the process after `import torch` (see `brought_libraries`). ``host`` is None when the
    host is not known: what it has to supply is then assumed and said so.
    """

    version: str
    cuda: str | None
    exports: Mapping[str, frozenset[str]]
    needed: Mapping[str, tuple[str, ...]]
    brings: frozenset[str]
    python: str | None = None
    host: Host | None = None

    @property
    def glibc(self) -> str | None:
        """Return the host's glibc, None when no host was looked at."""
        return self.host.glibc if self.host else None

    def load(self, file: SharedFile, distribution: Distribution) -> Load:
        """Return what loading a file of a distribution leads to, by the order of the loader."""
        siblings = siblings_of(distribution, file)
        scope: list[Library] = [library_of(file), Library("the Python interpreter")]
        missing: list[tuple[str, str]] = []
        assumed: list[str] = []
        before: list[str] = []
        seen = {file.name, file.soname}
        # Each entry: a library to find, the file that needs it, whether that one's search paths reach siblings.
        queue = [(name, file.name, bool(file.search_paths)) for name in file.needed]
        for name, needed_by, has_paths in queue:
            if name in seen:
                continue
            seen.add(name)
            if name in self.exports:
                scope.append(Library(name, self.exports[name], frozenset()))
                queue += [(other, name, True) for other in self.needed.get(name, ())]
            elif name in siblings:
                other = siblings[name]
                scope.append(library_of(other))
                queue += [(n, other.name, bool(other.search_paths)) for n in other.needed]
                if not has_paths:
                    before.append(other.path)
            elif name in self.brings:
                scope.append(Library(name))
            elif self.host is not None and name in self.host.sonames:
                scope.append(self.host.libraries.get(name, Library(name)))
            elif needed_by in self.exports:
                # What torch itself needs is torch's affair; its wheel brings or requires it.
                scope.append(Library(name))
            elif self._must_be_here(name) or self.host is not None:
                missing.append((name, needed_by))
            else:
                assumed.append(name)
                scope.append(Library(name))
        return Load(tuple(scope), tuple(missing), tuple(assumed), tuple(before))

    @staticmethod
    def _must_be_here(name: str) -> bool:
        """Return whether torch, its CUDA wheels or the distribution itself has to hold a library, not the host."""
        row = supplier(name)
        return bool(row and (row.is_cuda or row.pip == "torch")) or is_bundled_copy(name)


def brought_libraries(needed: Iterable[str], cuda: str | None) -> frozenset[str]:
    """Return the CUDA sonames in a process after `import torch`, from what torch's libraries need.

    torch/__init__.py loads NVRTC and nvJitLink by file name besides, and libcublas needs libcublasLt;
    neither shows in what torch's own libraries need.
    """
    found = {name for name in needed if (row := supplier(name)) is not None and row.is_cuda}
    major = (cuda or "").split(".")[0]
    if major:
        found |= {f"libnvrtc.so.{major}", f"libnvJitLink.so.{major}"}
        found |= {name.replace("libcublas.", "libcublasLt.") for name in found if name.startswith("libcublas.")}
    return frozenset(found)


def library_of(file: SharedFile) -> Library:
    """Return a file as a library that a load brings into the process."""
    return Library(file.soname or file.name, file.exports, frozenset(file.version_definitions), file)


def siblings_of(distribution: Distribution, file: SharedFile) -> dict[str, SharedFile]:
    """Return the other files of a distribution by file name, and by soname where no file has that name.

    By file name first: a bundled copy libcudart.e8e8b82a.so.12 keeps the soname libcudart.so.12, but a file
    that needs libcudart.so.12 does not find it. So the soname of a tagged copy counts for nothing.
    """
    others = [f for f in distribution.files if f is not file and f.problem is None]
    found = {f.name: f for f in others}
    for other in others:
        if other.soname and not is_bundled_copy(other.name):
            found.setdefault(other.soname, other)
    return found
