"""Fetch what a bundle lacks, then put everything in its place, what tells of it last.

Whoever reads the directory while it is written sees the bundle as it was or as it is: wheels and packages are only
added, pages and indexes are replaced by rename, and apt reads an index by the hash that the signed file names.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urljoin

import httpx

from bringup.bundle import layout, repository
from bringup.bundle.layout import BundledStack, Manifest, SiteKey
from bringup.bundle.signing import Signer, is_signed
from bringup.errors import InputError
from bringup.locking import http
from bringup.locking.debian import paragraphs
from bringup.locking.fetch import distribution_page, index_page
from bringup.locking.packages import Release, releases
from bringup.locking.repository import read_listing, verified
from bringup.locking.resolve import locate
from bringup.package_index import Sources
from bringup.stack import Lock, LockedFile, LockedPackage, Stack, lock_path_of


@dataclass(frozen=True)
class Order:
    """What to bundle: a locked stack with the files it was read from, for some platforms and releases."""

    stack: Stack
    stack_file: Path
    lock_file: Path
    platforms: tuple[str, ...]
    releases: tuple[str, ...]

    @property
    def lock(self) -> Lock:
        """Return the lock; raises InputError when the stack has none, or lacks what is asked for."""
        lock = self.stack.lock
        if lock is None:
            raise InputError(f"{self.stack.source} has no lock", hint=f"run `bringup lock {self.stack.name}` first")
        for option, asked, have in (
            ("--platform", self.platforms, lock.wheels.platforms if lock.wheels else {}),
            ("--release", self.releases, lock.packages),
        ):
            if missing := [name for name in asked if name not in have]:
                raise InputError(
                    f"the lock of {lock.stack} holds nothing for {', '.join(missing)}",
                    why=f"it holds {', '.join(have) or 'none'}",
                    hint=f"run `bringup lock {lock.stack} {option} {missing[0]}`",
                )
        return lock


@dataclass(frozen=True)
class Repositories:
    """Where .deb packages come from. ``url`` None: NVIDIA's; else the address above ``debian12/x86_64/``.

    ``key`` None means the key file beside the repository, ``fingerprint`` None that of NVIDIA's key.
    """

    url: str | None = None
    key: bytes | None = None
    fingerprint: str | None = None


class Watcher(Protocol):
    """Is told how fetching goes."""

    def begin(self, files: int, size_bytes: int) -> None:
        """Take in what has to be fetched."""

    def file(self, name: str) -> None:
        """Take in which file is fetched now."""

    def seen(self, size_bytes: int) -> None:
        """Take in how many bytes more are there; fewer when a file is begun anew."""


class Silent:
    """Watch, and say nothing."""

    def begin(self, files: int, size_bytes: int) -> None:
        del files, size_bytes

    def file(self, name: str) -> None:
        del name

    def seen(self, size_bytes: int) -> None:
        del size_bytes


@dataclass(frozen=True)
class Written:
    """What was done. ``sent_bytes`` came over the network, whole files and rests of interrupted ones."""

    manifest: Manifest
    fetched: tuple[str, ...]
    sent_bytes: int
    reused: int
    size_bytes: int
    changed: tuple[str, ...]
    removed: tuple[str, ...]


def write_bundle(
    directory: Path,
    order: Order,
    sources: Sources,
    repositories: Repositories,
    signer: Signer | None,
    *,
    prune: bool = False,
    watcher: Watcher | None = None,
) -> Written:
    """Make ``directory`` hold everything that a stack's lock names, beside the stacks that it holds already.

    What is there with the locked hash is not fetched again; a second call changes nothing. ``signer`` None will do
    for a bundle without packages only. ``prune`` removes what no bundled stack names any more. Raises InputError
    when the lock, an index or a repository lacks something, BringupError when it cannot be fetched or signed.
    """
    with _alone(directory):
        return _Writer(directory, order, sources, repositories, signer, prune, watcher or Silent()).run()


@dataclass
class _Writer:
    directory: Path
    order: Order
    sources: Sources
    repositories: Repositories
    signer: Signer | None
    prune: bool
    watcher: Watcher
    blocks: dict[str, str] = field(default_factory=dict)
    """Paragraphs of the packages' index by SHA-256."""
    fetched: list[str] = field(default_factory=list)
    sent_bytes: int = 0

    def run(self) -> Written:
        lock = self.order.lock
        self.before = layout.read_manifest(self.directory) or Manifest()
        self.old_sums = layout.read_sums(self.directory)
        self.wheels = {
            path: (platform, file)
            for platform in self.order.platforms
            for path, file in layout.wheels_of(lock, platform).items()
        }
        self.packages = {release: layout.packages_of(lock, release) for release in self.order.releases}
        self._check_key()
        needed = layout.wanted_sums(lock, self.order.platforms, self.order.releases)
        named = self._named_by_others()
        for path, sha256 in needed.items():
            if named.get(path, sha256) != sha256:
                raise InputError(
                    f"{path}: another stack of this bundle names another file of that name",
                    why=f"wanted sha256 {sha256}, the other stack wants {named[path]}",
                    hint="bundle this stack into a directory of its own",
                )
        self._fetch(needed)
        kept = {path: sha256 for path, sha256 in self._old_files() if not self.prune or path in named}
        return self._publish({**kept, **needed}, needed)

    # ------------------------------------------------------------ what is there

    def _check_key(self) -> None:
        if self.signer is None and (self.before.key is not None or any(self.packages.values())):
            raise InputError(
                "an apt repository must be signed, and no key is named",
                why=f"the bundle is signed by {self.before.key.fingerprint}" if self.before.key else None,
                hint="name a key of your gpg keyring with --key, or bundle the wheels alone with --only wheels",
            )

    def _named_by_others(self) -> dict[str, str]:
        named: dict[str, str] = {}
        for name, bundled in self.before.stacks.items():
            if name != self.order.stack.name:
                lock = layout.bundled_lock(self.directory, bundled)
                named |= layout.wanted_sums(lock, bundled.platforms, bundled.releases)
        return named

    def _old_files(self) -> Iterator[tuple[str, str]]:
        for path, sha256 in self.old_sums.items():
            if path.endswith((".whl", ".deb")) and (self.directory / path).is_file():
                yield path, sha256

    def _is_whole(self, path: Path, size_bytes: int, sha256: str) -> bool:
        if not path.is_file() or path.stat().st_size != size_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256

    def _is_missing(self, path: str, size_bytes: int, sha256: str) -> bool:
        places = (self.directory / path, self._staged(sha256))
        return not any(self._is_whole(place, size_bytes, sha256) for place in places)

    def _staged(self, sha256: str) -> Path:
        return self.directory / layout.STAGING / sha256

    # ------------------------------------------------------------ fetching

    def _fetch(self, needed: Mapping[str, str]) -> None:
        wheels = {
            path: entry
            for path, entry in self.wheels.items()
            if self._is_missing(path, entry[1].size_bytes, entry[1].sha256)
        }
        debs = {
            release: {
                path: package
                for path, package in packages.items()
                if self._is_missing(path, package.size_bytes, package.sha256)
            }
            for release, packages in self.packages.items()
        }
        sizes = [file.size_bytes for _, file in wheels.values()]
        sizes += [package.size_bytes for missing in debs.values() for package in missing.values()]
        self.watcher.begin(len(sizes), sum(sizes))
        with http.client(self.sources.default.certificate, direct=self.sources.direct) as client:
            self._fetch_wheels(client, wheels)
            for release, packages in self.packages.items():
                self._fetch_packages(client, releases()[release], packages, debs[release])
        self.reused = len(needed) - len(self.fetched)

    def _fetch_wheels(self, client: httpx.Client, wheels: Mapping[str, tuple[str, LockedFile]]) -> None:
        for platform in dict.fromkeys(platform for platform, _ in wheels.values()):
            mine = {path: file for path, (its, file) in wheels.items() if its == platform}
            addresses = locate(list(mine.values()), platform, self.sources)
            for path, file in mine.items():
                url = addresses[file.file]
                self._download(client, url, path, file, auth=self.sources.login(url, file.index))

    def _fetch_packages(
        self,
        client: httpx.Client,
        release: Release,
        packages: Mapping[str, LockedPackage],
        missing: Mapping[str, LockedPackage],
    ) -> None:
        self.blocks |= self._own_blocks(release)
        if all(package.sha256 in self.blocks for package in packages.values()) and not missing:
            return
        known, base = release.repository, self._base(release)
        listing = read_listing(
            client,
            base,
            key=self.repositories.key or _published_key(client, f"{base}{known.key_file}"),
            fingerprint=self.repositories.fingerprint or known.key_fingerprint,
        )
        theirs = repository.blocks(listing.text)
        for path, package in packages.items():
            block = theirs.get(package.sha256) or self.blocks.get(package.sha256)
            if block is None or (path in missing and package.sha256 not in theirs):
                raise InputError(
                    f"{http.shown(base)} does not have {package.name} {package.version} as it was locked",
                    why=f"wanted sha256 {package.sha256}",
                    hint="renew the lock with `bringup lock`, or name a mirror that kept the file with --apt-url",
                )
            self.blocks[package.sha256] = repository.at(block, layout.package_file(package))
            if path in missing:
                name = next(paragraphs(theirs[package.sha256]), {}).get("Filename", "").removeprefix("./")
                self._download(client, urljoin(base, name), path, package)

    def _base(self, release: Release) -> str:
        base = f"{self.repositories.url.rstrip('/')}/{release.path}" if self.repositories.url else None
        return (base or release.repository.url).rstrip("/") + "/"

    def _own_blocks(self, release: Release) -> dict[str, str]:
        """Return the paragraphs of the bundle's own index, if that is the one it signed."""
        path = f"{layout.apt_directory(release.name)}/Packages"
        content = _content(self.directory / path)
        if content is None or hashlib.sha256(content).hexdigest() != self.old_sums.get(path):
            return {}
        return repository.blocks(content.decode("utf-8", "replace"))

    def _download(
        self,
        client: httpx.Client,
        url: str,
        path: str,
        wanted: LockedFile | LockedPackage,
        *,
        auth: http.Login = None,
    ) -> None:
        self.watcher.file(path.rpartition("/")[2])
        self.sent_bytes += http.download(
            client,
            url,
            self._staged(wanted.sha256),
            size=wanted.size_bytes,
            sha256=wanted.sha256,
            auth=auth,
            seen=self.watcher.seen,
        )
        self.fetched.append(path)

    # ------------------------------------------------------------ publishing

    def _publish(self, files: Mapping[str, str], needed: Mapping[str, str]) -> Written:
        manifest = self._manifest()
        texts = {
            **self._repositories(files),
            **self._pages(files),
            **self._stack_files(),
            layout.MANIFEST: manifest.as_text().encode(),
        }
        if self.signer is not None:
            texts[layout.KEY] = self.signer.public
        stacks = {path: sha256 for path, sha256 in self.old_sums.items() if path.startswith("stacks/")}
        stacks = {path: sha256 for path, sha256 in stacks.items() if (self.directory / path).is_file()}
        sums = {**files, **stacks, **{path: hashlib.sha256(text).hexdigest() for path, text in texts.items()}}
        texts[layout.SUMS] = layout.sums_text(sums).encode()
        if self.signer is not None:
            texts[layout.SUMS_SIGNATURE] = self._signature(texts[layout.SUMS].decode())
        self._place(needed)
        changed = [path for path, text in sorted(texts.items(), key=_turn) if self._replace(path, text)]
        removed = self._remove({*sums, *texts})
        shutil.rmtree(self.directory / layout.STAGING, ignore_errors=True)
        return Written(
            manifest=manifest,
            fetched=tuple(self.fetched),
            sent_bytes=self.sent_bytes,
            reused=self.reused,
            size_bytes=sum((self.directory / path).stat().st_size for path in files),
            changed=tuple(changed),
            removed=tuple(removed),
        )

    def _manifest(self) -> Manifest:
        name = self.order.stack.name
        bundled = BundledStack(
            digest=self.order.stack.digest,
            file=f"stacks/{name}.toml",
            lock=lock_path_of(Path(f"stacks/{name}.toml")).as_posix(),
            platforms=self.order.platforms,
            releases=self.order.releases,
        )
        key = SiteKey(fingerprint=self.signer.fingerprint) if self.signer else None
        return Manifest(key=key, stacks=dict(sorted({**self.before.stacks, name: bundled}.items())))

    def _stack_files(self) -> dict[str, bytes]:
        name, source = self.order.stack.name, self.order.stack_file.parent
        found = {
            f"stacks/{name}.toml": self.order.stack_file.read_bytes(),
            lock_path_of(Path(f"stacks/{name}.toml")).as_posix(): self.order.lock_file.read_bytes(),
        }
        for patch in self.order.stack.python.patches:
            diff = layout.safe(patch.diff, what=f"{self.order.stack.source}: python.patch.diff")
            found[f"stacks/{diff}"] = (source / diff).read_bytes()
        return found

    def _pages(self, files: Mapping[str, str]) -> dict[str, bytes]:
        listed: dict[str, dict[str, str]] = {}
        for path, sha256 in files.items():
            if path.endswith(".whl"):
                directory, _, name = path.rpartition("/")
                listed.setdefault(directory, {})[name] = sha256
        indexes: dict[str, list[str]] = {}
        for directory in listed:
            index, _, distribution = directory.rpartition("/")
            indexes.setdefault(index, []).append(distribution)
        pages = {f"{directory}/index.html": distribution_page(names) for directory, names in listed.items()}
        pages |= {f"{index}/index.html": index_page(names) for index, names in indexes.items()}
        return {path: page.encode() for path, page in pages.items()}

    def _repositories(self, files: Mapping[str, str]) -> dict[str, bytes]:
        """Return the signed index of every release that has packages, those of other stacks included."""
        found: dict[str, bytes] = {}
        if self.signer is None:
            return found
        for name, release in releases().items():
            directory = layout.apt_directory(name)
            mine = {path: sha256 for path, sha256 in files.items() if path.rpartition("/")[0] == directory}
            if not mine:
                continue
            blocks = {**self._own_blocks(release), **self.blocks}
            if lost := sorted(path for path, sha256 in mine.items() if sha256 not in blocks):
                raise InputError(
                    f"{directory}/Packages does not tell of {lost[0]}",
                    hint="the bundle was changed by hand: make it again in an empty directory",
                )
            entries = [blocks[sha256] for sha256 in mine.values()]
            index, text = repository.index(
                entries,
                origin=self._origin(name),
                architecture=release.architecture,
                date_s=time.time(),
            )
            found |= {f"{directory}/{path}": content for path, content in index.items()}
            found[f"{directory}/InRelease"] = self._in_release(f"{directory}/InRelease", index, text)
        return found

    def _origin(self, release: str) -> str:
        packages = self.packages.get(release) or {}
        for bundled in self.before.stacks.values():
            packages = packages or layout.packages_of(layout.bundled_lock(self.directory, bundled), release)
        return next((package.origin for package in packages.values()), "NVIDIA")

    def _in_release(self, path: str, index: Mapping[str, bytes], text: str) -> bytes:
        """Return the signed file: the one that is there when it says the same, so that nothing changes for nothing."""
        assert self.signer is not None
        old = _content(self.directory / path)
        if old is not None:
            try:
                said = verified(old, key=self.signer.public, fingerprint=self.signer.fingerprint, source=path)
            except InputError:
                said = ""
            if repository.lists(said, index):
                return old
        return self.signer.clearsigned(text)

    def _signature(self, sums: str) -> bytes:
        assert self.signer is not None
        old = _content(self.directory / layout.SUMS_SIGNATURE)
        if old and is_signed(sums, old, key=self.signer.public, fingerprint=self.signer.fingerprint):
            return old
        return self.signer.detached(sums)

    def _place(self, needed: Mapping[str, str]) -> None:
        for path, sha256 in needed.items():
            staged = self._staged(sha256)
            target = self.directory / path
            if staged.is_file():
                _make_directory(target.parent)
                # Two places may want one file: the same wheel under two indexes.
                if list(needed.values()).count(sha256) > 1:
                    _copy(staged, target)
                    continue
                staged.chmod(0o644)
                _sync(staged)
                staged.replace(target)
        for directory in {(self.directory / path).parent for path in needed}:
            _sync(directory)

    def _replace(self, path: str, text: bytes) -> bool:
        target = self.directory / path
        if _content(target) == text:
            return False
        _make_directory(target.parent)
        beside = target.with_name(f".{target.name}.new")
        beside.write_bytes(text)
        beside.chmod(0o644)
        _sync(beside)
        beside.replace(target)
        _sync(target.parent)
        return True

    def _remove(self, kept: set[str]) -> list[str]:
        """Remove what is listed no more; of a repository's indexes, those that a reader may still hold stay."""
        removed = []
        for path in self.old_sums:
            target = self.directory / path
            if path in kept or "/by-hash/" in path or not target.is_file():
                continue
            target.unlink()
            removed.append(path)
        for parent in {(self.directory / path).parent for path in removed}:
            if not any(parent.iterdir()):
                parent.rmdir()
        previous = {path for path in self.old_sums if "/by-hash/" in path}
        for found in self.directory.glob("apt/*/*/by-hash/SHA256/*"):
            path = found.relative_to(self.directory).as_posix()
            if path not in kept and path not in previous:
                found.unlink()
        return removed


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the directory, made where it is not there; raises InputError when another process writes to it."""
    try:
        _make_directory(directory)
        there = {path.name for path in directory.iterdir()} - {"lost+found"}
        if there and not there & {layout.MANIFEST, layout.STAGING}:
            raise InputError(f"{directory} holds something else than a bundle", hint="name an empty or a new directory")
        (directory / layout.STAGING).mkdir(exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(f"cannot write a bundle to {directory}", why=error.strerror) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another `bringup bundle` is writing to {directory}") from None
        yield
    finally:
        os.close(descriptor)


def _published_key(client: httpx.Client, address: str) -> bytes:
    key = http.read(client, address)
    if key is None:
        raise InputError(f"no key at {http.shown(address)}", hint="name the repository's public key with --apt-key")
    return key


def _turn(entry: tuple[str, bytes]) -> tuple[int, str]:
    """Return when a file is written: what others tell of comes before what tells of it."""
    path = entry[0]
    order: Sequence[Iterable[str]] = (
        ("/Packages", "/Packages.gz"),
        ("/index.html",),
        ("/InRelease",),
        (layout.MANIFEST,),
        (layout.SUMS,),
        (layout.SUMS_SIGNATURE,),
    )
    return next((number for number, ends in enumerate(order, 1) if path.endswith(tuple(ends))), 0), path


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _make_directory(path: Path) -> None:
    """Create a directory and its parents, readable by the web server whatever the umask is."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        path.chmod(0o755)


def _copy(source: Path, target: Path) -> None:
    beside = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, beside)
    beside.chmod(0o644)
    _sync(beside)
    beside.replace(target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
