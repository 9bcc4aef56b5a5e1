"""Bring the wheels of a lock into a mirror, for hosts that have no way out of their own."""

from __future__ import annotations

import hashlib
import html
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from packaging.utils import canonicalize_name

from bringup.errors import InputError
from bringup.locking import http
from bringup.locking.resolve import locate
from bringup.package_index import Sources
from bringup.stack import Lock, LockedFile

_ANCHOR = re.compile(r'<a href="([^"#]+)#sha256=([0-9a-f]{64})"', re.IGNORECASE)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Fetched:
    """What was done: files that came over the network, files already in the cache, and files already served."""

    downloaded: int
    cached: int
    present: int
    downloaded_bytes: int


def cache_dir() -> Path:
    """Return where fetched wheels are kept: ``$BRINGUP_WHEEL_CACHE``, else below the user's cache directory."""
    if named := os.environ.get("BRINGUP_WHEEL_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bringup" / "wheels"


def fetch_into_mirror(
    lock: Lock,
    mirror_dir: Path,
    *,
    platform: str,
    sources: Sources,
    cache: Path | None = None,
    say: Say = lambda _: None,
) -> Fetched:
    """Make ``mirror_dir`` serve every wheel that ``lock`` names for ``platform``, each below its own index.

    What the mirror serves already with the locked hash is left alone, so a second call fetches nothing. Each file
    is fetched whole and checked by size and hash, then linked from ``cache`` into the mirror. ``cache`` None means
    ``cache_dir()``. Raises InputError when the lock holds nothing for the platform or an index lost a file,
    BringupError when a file cannot be fetched.
    """
    wheels = lock.wheels.platforms.get(platform) if lock.wheels else None
    if wheels is None:
        raise InputError(
            f"the lock of {lock.stack} holds nothing for {platform}",
            hint=f"run `bringup lock {lock.stack} --platform {platform}`",
        )
    files = [file for step in wheels.steps for file in step.files]
    return fetch_files(files, mirror_dir, platform=platform, sources=sources, cache=cache, say=say)


def fetch_files(
    files: Sequence[LockedFile],
    mirror_dir: Path,
    *,
    platform: str,
    sources: Sources,
    addresses: dict[str, str] | None = None,
    cache: Path | None = None,
    say: Say = lambda _: None,
) -> Fetched:
    """Do the work of ``fetch_into_mirror`` for ``files``; ``addresses`` None means that uv is asked for them."""
    cache = cache or cache_dir()
    missing = [file for file in files if not _is_served(mirror_dir, file)]
    wanted = [file for file in missing if not _is_cached(cache, file)]
    downloaded_bytes = 0
    if wanted:
        found = addresses or locate(wanted, platform, sources)
        with http.client(sources.default.certificate, direct=sources.direct) as client:
            for file in wanted:
                say(f"{file.file} ({file.size_bytes / 1e6:.1f} MB)")
                target = cache / file.file
                url = found[file.file]
                login = sources.login(url, file.index)
                downloaded_bytes += http.download(
                    client, url, target, size=file.size_bytes, sha256=file.sha256, auth=login
                )
    for file in missing:
        _serve(mirror_dir, file, cache / file.file)
    return Fetched(
        downloaded=len(wanted),
        cached=len(missing) - len(wanted),
        present=len(files) - len(missing),
        downloaded_bytes=downloaded_bytes,
    )


def _directory(mirror_dir: Path, file: LockedFile) -> Path:
    return mirror_dir / "wheels" / file.index / "simple" / canonicalize_name(file.distribution)


def _is_served(mirror_dir: Path, file: LockedFile) -> bool:
    directory = _directory(mirror_dir, file)
    path = directory / file.file
    return path.is_file() and path.stat().st_size == file.size_bytes and listed(directory).get(file.file) == file.sha256


def _is_cached(cache: Path, file: LockedFile) -> bool:
    """Return whether the cache holds the file, hash and all; a foreign or torn one there is not trusted."""
    path = cache / file.file
    if not path.is_file() or path.stat().st_size != file.size_bytes:
        return False
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256


def _serve(mirror_dir: Path, file: LockedFile, source: Path) -> None:
    directory = _directory(mirror_dir, file)
    directory.mkdir(parents=True, exist_ok=True)
    beside = directory / f".{file.file}.new"
    beside.unlink(missing_ok=True)
    try:
        os.link(source, beside)
    except OSError:  # another file system
        shutil.copyfile(source, beside)
    beside.chmod(0o644)
    beside.replace(directory / file.file)
    _write_page(directory / "index.html", distribution_page({**listed(directory), file.file: file.sha256}))
    root = directory.parent
    names = [each.name for each in root.iterdir() if (each / "index.html").is_file()]
    _write_page(root / "index.html", index_page(names))


def listed(directory: Path) -> dict[str, str]:
    """Return SHA-256 by file name as the index page of one distribution has them."""
    page = directory / "index.html"
    if not page.is_file():
        return {}
    text = html.unescape(page.read_text(encoding="utf-8", errors="replace"))
    return {unquote(name).rsplit("/", 1)[-1]: sha256 for name, sha256 in _ANCHOR.findall(text)}


def distribution_page(files: Mapping[str, str]) -> str:
    """Return the index page of one distribution (PEP 503); ``files`` is SHA-256 by file name."""
    return _page(
        f'<a href="{html.escape(quote(name))}#sha256={sha256}">{html.escape(name)}</a>'
        for name, sha256 in sorted(files.items())
    )


def index_page(names: Iterable[str]) -> str:
    """Return the page of a whole index: one link for each distribution."""
    return _page(f'<a href="{name}/">{name}</a>' for name in sorted(names))


def _page(anchors: Iterable[str]) -> str:
    body = "\n".join(f"{anchor}<br>" for anchor in anchors)
    return f"<!DOCTYPE html>\n<html><body>\n{body}\n</body></html>\n"


def _write_page(page: Path, text: str) -> None:
    beside = page.with_name(f".{page.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(page)
