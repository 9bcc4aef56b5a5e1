"""Say where things lie in a bundle, and read what it says about itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bringup.errors import InputError
from bringup.locking.packages import releases
from bringup.stack import Lock, LockedFile, LockedPackage, parse_lock

MANIFEST = "bundle.json"
SUMS = "SHA256SUMS"
SUMS_SIGNATURE = "SHA256SUMS.asc"
KEY = "keys/site.gpg"
STAGING = ".unfinished"
"""What was fetched and is not in its place yet; an interrupted bundle goes on from here."""

_SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_UNSAFE = re.compile(r"(^|/)\.\.?(/|$)|^/|[\0\n\\]")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class BundledStack(_Model):
    """One stack of a bundle: its digest, the file it was written as, and for whom it holds everything."""

    digest: str
    file: str
    lock: str
    platforms: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()


class SiteKey(_Model):
    """The key that signed the bundle."""

    fingerprint: str
    file: str = KEY


class Manifest(_Model):
    """The content of ``bundle.json``. ``key`` None: nothing is signed, so there are no packages."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    key: SiteKey | None = None
    stacks: Mapping[str, BundledStack] = Field(default_factory=dict)

    def as_text(self) -> str:
        """Return the file's text."""
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n"


def read_manifest(directory: Path) -> Manifest | None:
    """Return what a bundle says about itself; None when there is no bundle.

    Raises InputError for a manifest of another schema, or one that cannot be read.
    """
    path = directory / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        why = str(error).split("\n", 1)[0]
        raise InputError(f"{path} is not the manifest of a bundle", why=why, hint="name another directory") from None


def read_sums(directory: Path) -> dict[str, str]:
    """Return SHA-256 by path as ``SHA256SUMS`` has them; nothing when it is not there.

    Raises InputError for a line that is none, and for a path that leads out of the bundle.
    """
    path = directory / SUMS
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}", why=str(error)) from None
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = _SUM.fullmatch(line)
        if entry is None or _UNSAFE.search(entry[2]):
            raise InputError(f"{path}:{number} is no line of sha256sum")
        found[entry[2]] = entry[1]
    return found


def sums_text(sums: Mapping[str, str]) -> str:
    """Return the text of ``SHA256SUMS``, as ``sha256sum -c`` reads it."""
    return "".join(f"{sha256}  {path}\n" for path, sha256 in sorted(sums.items()))


def safe(path: str, *, what: str) -> str:
    """Return a path below the bundle; raises InputError for one that leads out of it. ``what`` says whose it is."""
    if not path or _UNSAFE.search(path):
        raise InputError(f"{what}: wanted a path below its directory, found {path!r}")
    return path


def wheel_directory(file: LockedFile) -> str:
    """Return the directory of one distribution's page and wheels."""
    return f"wheels/{file.index}/simple/{canonicalize_name(file.distribution)}"


def wheel_path(file: LockedFile) -> str:
    """Return where one wheel lies."""
    return safe(f"{wheel_directory(file)}/{file.file}", what=f"the lock's file {file.file!r}")


def apt_directory(release: str) -> str:
    """Return the directory of a release's flat repository, such as ``apt/debian12/x86_64``; raises InputError."""
    known = releases().get(release)
    if known is None:
        raise InputError(f"not a release: {release!r}", hint=f"name one of {', '.join(releases())}")
    return f"apt/{known.path}"


def package_file(package: LockedPackage) -> str:
    """Return the file name that the archive gives a package; an epoch does not stand in it."""
    name = f"{package.name}_{package.version.split(':')[-1]}_{package.architecture}.deb"
    if "/" in name:
        raise InputError(f"the lock's package {name!r} is no package name")
    return name


def packages_of(lock: Lock, release: str) -> dict[str, LockedPackage]:
    """Return every package that a lock names for a release, by its path in the bundle."""
    locked = lock.packages.get(release)
    if locked is None:
        return {}
    groups = (locked.driver, *locked.fabric.values(), *locked.toolkits.values())
    directory = apt_directory(release)
    return {f"{directory}/{package_file(each)}": each for group in groups for each in group}


def wheels_of(lock: Lock, platform: str) -> dict[str, LockedFile]:
    """Return every wheel that a lock names for a platform, by its path in the bundle."""
    locked = lock.wheels.platforms.get(platform) if lock.wheels else None
    return {wheel_path(file): file for step in (locked.steps if locked else ()) for file in step.files}


def wanted_sums(lock: Lock, platforms: Iterable[str], releases_: Iterable[str]) -> dict[str, str]:
    """Return path and SHA-256 of everything that a lock names for some platforms and releases."""
    wheels = {path: file.sha256 for each in platforms for path, file in wheels_of(lock, each).items()}
    debs = {path: package.sha256 for each in releases_ for path, package in packages_of(lock, each).items()}
    return {**wheels, **debs}


def bundled_lock(directory: Path, bundled: BundledStack) -> Lock:
    """Return the lock of a stack in a bundle; raises InputError when it cannot be read."""
    path = directory / safe(bundled.lock, what=MANIFEST)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}", why=str(error), hint="the bundle is damaged; make it again") from None
    return parse_lock(text, source=str(path))
