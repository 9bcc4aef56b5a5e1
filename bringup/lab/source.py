"""Find the distribution mirror that this machine's own apt uses, from apt itself."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from bringup.errors import LabError
from bringup.lab.command import run

_HINT = "run `apt-get update` first; the base image is made from the mirror that this machine's apt uses"


@dataclass(frozen=True)
class Source:
    """One release of the distribution on one mirror. ``proxy`` None means apt uses none.

    ``is_own`` says that it is this machine's release, whose index its apt has already.
    """

    uri: str
    codename: str
    components: tuple[str, ...]
    architecture: str
    keyring: Path | None
    proxy: str | None
    is_own: bool = True

    def of(self, codename: str) -> Source:
        """Return another release on the same mirror: one mirror carries all that its distribution supports."""
        return replace(self, codename=codename, is_own=self.is_own and codename == self.codename)

    def apt_source(self) -> str:
        """Return the line of sources.list that names this release, trusted by the same key."""
        signed = f"signed-by={self.keyring} " if self.keyring else ""
        return f"deb [{signed}arch={self.architecture}] {self.uri} {self.codename} {' '.join(self.components)}\n"


def find(wanted: str | None = None) -> Source:
    """Return where this machine's apt gets a release from, by codename; None means its own.

    Raises LabError when apt has no index of its own release: the mirror is known from there.
    """
    targets = run(["apt-get", "indextargets"], what="cannot ask apt for its sources", hint=_HINT)
    settings = run(["apt-config", "dump", "--format", "%f\t%v%n"], what="cannot ask apt for its settings")
    own = choose(targets, settings, codename=codename(), distribution=distribution())
    return own.of(wanted or own.codename)


def distribution() -> str:
    """Return the name of this machine's distribution, as ``debian``."""
    return platform.freedesktop_os_release()["ID"]


def codename() -> str:
    """Return the codename of this machine's release, which is the lab hosts' too where no other is asked for."""
    name = platform.freedesktop_os_release().get("VERSION_CODENAME")
    if not name:
        raise LabError("this machine's release has no codename", hint="the lab runs on Debian and Ubuntu")
    return name


def choose(targets: str, settings: str, *, codename: str, distribution: str) -> Source:
    """Choose the release's own pocket among ``apt-get indextargets``; updates and third parties do not count.

    Ubuntu gives every pocket the release's codename and Debian names a suite ``oldstable``, so both are looked
    at: the codename must fit and the suite must not be a pocket (``…-updates``).
    """
    ours = [
        target
        for target in _paragraphs(targets)
        if target.get("Created-By") == "Packages"
        and target.get("Codename") == codename
        and "-" not in target.get("Suite", "")
        and target.get("Origin", "").casefold() == distribution
    ]
    if not ours:
        raise LabError(f"apt knows no index of {distribution} {codename}", hint=_HINT)
    uri = ours[0]["Repo-URI"]
    same = [target for target in ours if target["Repo-URI"] == uri]
    options = dict(line.split("\t", 1) for line in settings.splitlines() if "\t" in line)
    keyring = same[0].get("Signed-By", "")
    return Source(
        uri=_direct(uri),
        codename=codename,
        components=tuple(sorted({target["Component"] for target in same if target.get("Component")})),
        architecture=same[0]["Architecture"],
        keyring=Path(keyring) if keyring.startswith("/") else None,
        proxy=options.get("Acquire::http::Proxy") or None,
    )


def _direct(uri: str) -> str:
    """Return a URI that debootstrap can read; cloud images name a file that lists the mirrors."""
    if not uri.startswith("mirror+file:"):
        return uri
    listed = Path("/" + uri.removeprefix("mirror+file:").strip("/"))
    for line in listed.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            return line.split()[0]
    raise LabError(f"apt's mirror list names no mirror: {listed}")


def _paragraphs(text: str) -> Iterable[dict[str, str]]:
    for block in text.split("\n\n"):
        if block.strip():
            yield {
                key: value.strip()
                for key, found, value in (line.partition(":") for line in block.splitlines())
                if found
            }
