"""Which wheels an index has: its simple page as JSON or HTML, a directory of wheels, and the best match."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import httpx
import uv
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from bringup.errors import BringupError, InputError
from bringup.locking.compile import Wheel, best_wheel, split
from bringup.package_index import Source, Sources

MAX_PAGE_BYTES = 64 << 20
"""The largest page of an index that is read."""

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True)
class Offer:
    """One wheel that an index offers. ``sha256`` and ``size_bytes`` None: the index does not tell."""

    name: str
    version: Version
    file: str
    url: str
    sha256: str | None = None
    size_bytes: int | None = None
    requires_python: str | None = None
    is_yanked: bool = False
    login: tuple[str, str] | None = None


class Indexes:
    """The configured indexes, asked for one distribution at a time; a page is fetched once."""

    def __init__(self, http: httpx.Client, sources: Sources) -> None:
        self._http = http
        self._sources = sources
        self._offers: dict[str, tuple[Offer, ...]] = {}

    def offers(self, name: str) -> tuple[Offer, ...]:
        """Return every wheel of a distribution on any index, in no order.

        Raises InputError when no index has it, BringupError when one cannot be read: a missing answer could
        hide the newest version.
        """
        name = canonicalize_name(name)
        if name not in self._offers:
            found: dict[str, Offer] = {}
            for offer in self._all(name):
                found.setdefault(offer.file, offer)
            self._offers[name] = tuple(found.values())
        if not self._offers[name]:
            raise InputError(
                f"no index has a wheel of {name}",
                why=f"looked at {', '.join(self._places())}",
                hint="check the name, or name the stack whose indexes have it with --stack",
            )
        return self._offers[name]

    def versions(self, name: str, platform: str, specifier: str = "") -> dict[Version, Offer]:
        """Return the best wheel of every version that fits a platform, oldest first.

        ``specifier`` narrows the versions down. Withdrawn files and pre-releases count only when it names
        them. Raises InputError and BringupError as `offers` does.
        """
        try:
            wanted = SpecifierSet(specifier)
        except InvalidSpecifier as error:
            raise InputError(f"{name}: not a version specifier: {specifier!r}", why=str(error)) from None
        is_exact = any(part.operator in ("==", "===") and "*" not in part.version for part in wanted)
        python = f"3.{split(platform)[0]}.99"
        by_version: dict[Version, list[Offer]] = {}
        for offer in self.offers(name):
            if offer.is_yanked and not is_exact:
                continue
            if offer.requires_python and not _admits(offer.requires_python, python):
                continue
            if wanted.contains(offer.version, prereleases=True):
                by_version.setdefault(offer.version, []).append(offer)
        final = {version for version in by_version if not version.is_prerelease}
        found = {}
        for version in sorted(by_version if is_exact or wanted.prereleases or not final else final):
            offers = {offer.file: offer for offer in by_version[version]}
            known = [Wheel(o.file, o.url, o.sha256 or "", o.size_bytes or 0) for o in offers.values()]
            best = best_wheel(known, platform)
            if best is not None:
                found[version] = offers[best.file]
        return found

    def find(self, requirement: str, platform: str) -> Offer:
        """Return the newest wheel that a requirement such as ``sgl-kernel==0.3.21`` admits on a platform.

        Raises InputError when there is none.
        """
        try:
            parsed = Requirement(requirement)
        except InvalidRequirement as error:
            raise InputError(f"neither a wheel nor a requirement: {requirement!r}", why=str(error)) from None
        found = self.versions(parsed.name, platform, str(parsed.specifier))
        if not found:
            have = sorted({offer.version for offer in self.offers(parsed.name)})
            raise InputError(
                f"no wheel of {requirement} for {platform}",
                why=f"the index has {len(have)} versions up to {have[-1]}, of other numbers or for other platforms",
                hint="name a version that has one, or another platform with --platform",
            )
        return found[max(found)]

    def _places(self) -> list[str]:
        default = self._sources.default
        extra = [source.url for source in (*self._sources.before_default, *default.extra)]
        return [*(f"index {name}" for name in self._sources.named), "the default index", *extra, *default.links]

    def _all(self, name: str) -> Iterator[Offer]:
        default = self._sources.default
        first = Source.parse(built_in_index()) if default.url is None else default.url
        for source in (*self._sources.named.values(), *self._sources.before_default, first, *default.extra):
            yield from self._on_index(source, name)
        for link in default.links:
            yield from self._on_page(link, name)

    def _on_index(self, source: Source, name: str) -> Iterator[Offer]:
        login = None if source.user is None else (source.user, source.password or "")
        url = f"{source.url.rstrip('/')}/{name}/"
        if url.startswith("file:"):
            yield from _offers_of_page(_local_page(url), "text/html", url, name, None)
            return
        response = self._get(url, login)
        if response is not None:
            kind = response.headers.get("content-type", "")
            yield from _offers_of_page(response.content, kind, str(response.url), name, login)

    def _on_page(self, link: str, name: str) -> Iterator[Offer]:
        path = Path(unquote(urlsplit(link).path)) if link.startswith("file:") else Path(link)
        if not link.startswith(("http:", "https:")):
            for file in sorted(path.glob("*.whl")) if path.is_dir() else ():
                yield from _offer(name, file.name, file.resolve().as_uri(), size_bytes=file.stat().st_size)
            return
        response = self._get(link, None)
        if response is not None:
            yield from _offers_of_page(response.content, "text/html", str(response.url), name, None)

    def _get(self, url: str, login: tuple[str, str] | None) -> httpx.Response | None:
        """Return a page of an index, None when it has none of that name; raises BringupError."""
        problem = ""
        for _ in range(3):
            try:
                response = self._http.get(url, headers={"Accept": _ACCEPT}, auth=login)
            except httpx.HTTPError as error:
                problem = str(error) or type(error).__name__
                continue
            if response.status_code == httpx.codes.NOT_FOUND:
                return None
            if response.status_code == httpx.codes.OK:
                if len(response.content) > MAX_PAGE_BYTES:
                    raise BringupError(f"{url} is larger than any page of an index")
                return response
            problem = f"the server answered {response.status_code}"
            if response.status_code < 500 and response.status_code != 429:
                break
        hint = "the index needs credentials, or others" if problem.endswith(("401", "403")) else None
        raise BringupError(f"cannot read {url}", why=problem, hint=hint)


@cache
def built_in_index() -> str:
    """Return the address of the installer's built-in index, which uv tells when it writes a requirements file.

    Raises BringupError when it does not.
    """
    with tempfile.TemporaryDirectory(prefix="bringup-index-") as directory:
        nothing = Path(directory) / "requirements.in"
        nothing.touch()
        command = [
            *(uv.find_uv_bin(), "pip", "compile", str(nothing), "--emit-index-url", "--offline", "--quiet"),
            # Looking for an interpreter would take most of the time.
            *("--no-config", "--no-header", "--no-python-downloads", "--python", sys.executable),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=directory, env=_uv_environment(), check=False
        )
    match = re.search(r"(?m)^--index-url (\S+)$", done.stdout)
    if match is None:
        raise BringupError("uv does not tell its built-in index", why=done.stderr.strip()[-200:] or None)
    return match[1]


def _uv_environment() -> dict[str, str]:
    # Variables of uv would answer for the built-in index.
    return {key: value for key, value in os.environ.items() if not key.startswith("UV_") or key == "UV_CACHE_DIR"}


def _local_page(url: str) -> bytes:
    path = Path(unquote(urlsplit(url).path))
    page = path / "index.html"
    return page.read_bytes() if page.is_file() else b""


def _offers_of_page(data: bytes, kind: str, url: str, name: str, login: tuple[str, str] | None) -> Iterator[Offer]:
    if "json" in kind:
        try:
            entries = json.loads(data)["files"]
            for entry in entries:
                yield from _offer(
                    name,
                    str(entry["filename"]),
                    urljoin(url, str(entry["url"])),
                    sha256=_sha256(entry.get("hashes", {}).get("sha256")),
                    size_bytes=_count(entry.get("size")),
                    requires_python=entry.get("requires-python"),
                    is_yanked=bool(entry.get("yanked")),
                    login=_same_server(login, url, str(entry["url"])),
                )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BringupError(f"{url} is no page of an index", why=f"{type(error).__name__}: {error}") from None
        return
    page = _Anchors()
    page.feed(data.decode("utf-8", "replace"))
    base = urljoin(url, page.base) if page.base else url
    for attributes in page.found:
        address, fragment = urldefrag(urljoin(base, attributes.get("href") or ""))
        match = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
        yield from _offer(
            name,
            unquote(urlsplit(address).path.rsplit("/", 1)[-1]),
            address,
            sha256=match[1] if match else None,
            requires_python=attributes.get("data-requires-python"),
            is_yanked="data-yanked" in attributes,
            login=_same_server(login, url, address),
        )


def _sha256(value: object) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _same_server(login: tuple[str, str] | None, url: str, file_url: str) -> tuple[str, str] | None:
    """Return the login only for a file on the server that it is for."""
    return login if urlsplit(urljoin(url, file_url))[:2] == urlsplit(url)[:2] else None


def _offer(name: str, file: str, url: str, **known: object) -> Iterator[Offer]:
    try:
        found, version, _, _ = parse_wheel_filename(file)
    except InvalidWheelFilename:
        return
    if found == name:
        yield Offer(name, version, file, url, **known)  # type: ignore[arg-type]


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.base: str | None = None

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs))
        elif tag == "base" and self.base is None:
            self.base = dict(attrs).get("href")


def _admits(specifier: str, version: str) -> bool:
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidSpecifier:
        # An old release with a malformed bound: installers let it pass too.
        return True


def newest(versions: Iterable[Version], count: int) -> list[Version]:
    """Return the newest final versions, oldest of them first; pre-releases only when there is nothing else."""
    ordered = sorted(versions)
    final = [version for version in ordered if not version.is_prerelease]
    return (final or ordered)[-count:]
