"""Say where packages come from: the indexes of a stack, and what the controller's own pip and uv have as default.

uv does not read pip's files and we run it without its own (``--no-config``), so that one stack resolves the
same way wherever it is locked; the settings that say *where the packages are* are read here and passed on.
"""

from __future__ import annotations

import configparser
import os
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from bringup.errors import InputError

if TYPE_CHECKING:
    from bringup.stack import Index


@dataclass(frozen=True)
class Source:
    """One index address without its credentials; ``user`` and ``password`` None mean that it needs none."""

    url: str
    user: str | None = None
    password: str | None = None

    @classmethod
    def parse(cls, url: str) -> Source:
        """Return the source written as ``url``, its credentials taken out of it."""
        parts = urlsplit(url.strip().rstrip("/"))
        if "@" not in parts.netloc:
            return cls(urlunsplit(parts))
        login, _, host = parts.netloc.rpartition("@")
        user, _, password = login.partition(":")
        return cls(urlunsplit(parts._replace(netloc=host)), unquote(user), unquote(password) or None)


@dataclass(frozen=True)
class DefaultIndex:
    """Where the controller gets packages from when a stack names no index.

    ``url`` None means the installer's built-in index. ``extra`` are searched beside it, ``links`` are pages or
    directories of files. ``certificate`` None means the system's certificates. ``origin`` says who told us.
    """

    url: Source | None = None
    extra: tuple[Source, ...] = ()
    links: tuple[str, ...] = ()
    certificate: str | None = None
    origin: str = "built in"


def default_index(environ: Mapping[str, str] | None = None) -> DefaultIndex:
    """Return the controller's own default index: uv's variables and files first, then pip's.

    The first of the four places that names an index, an extra one or links decides alone; they are not
    mixed. The certificate may come from any of them. Raises InputError for a file that cannot be parsed.
    """
    environ = os.environ if environ is None else environ
    places = (
        _uv_variables(environ),
        _uv_files(environ),
        _pip_variables(environ, _pip_files(environ)),
    )
    certificate = next((place.certificate for place in places if place.certificate), None)
    chosen = next((place for place in places if place.url or place.extra or place.links), DefaultIndex())
    return DefaultIndex(chosen.url, chosen.extra, chosen.links, certificate, chosen.origin)


def credentials(reference: str | None, environ: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """Return (user, password) behind ``env:NAME`` or ``file:PATH``; None when there is no reference.

    The value reads ``user:password``; a bare token becomes the password of user ``__token__``. Raises
    InputError naming the reference, never its value.
    """
    if reference is None:
        return None
    environ = os.environ if environ is None else environ
    kind, _, where = reference.partition(":")
    if kind == "env":
        value = environ.get(where)
    else:
        try:
            value = Path(where).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            value = None
    if not value:
        raise InputError(
            f"no credentials behind {reference}",
            why="the variable is not set" if kind == "env" else "the file cannot be read or is empty",
            hint="it must hold user:password",
        )
    user, colon, password = value.partition(":")
    return (user, password) if colon else ("__token__", user)


@dataclass(frozen=True)
class Sources:
    """Where the indexes of a stack are: by name, and the controller's own default one.

    ``named`` maps an index name to its address. ``before_default`` are searched before the default index
    (a lab mirror's own "default", for instance) and count as it. ``direct`` is a host that no proxy knows.
    """

    named: Mapping[str, Source]
    default: DefaultIndex = field(default_factory=DefaultIndex)
    before_default: tuple[Source, ...] = ()
    direct: str | None = None

    @classmethod
    def of(cls, indexes: Iterable[Index], default: DefaultIndex | None = None) -> Sources:
        """Return the sources a stack names by URL, beside the controller's own default index."""
        named = {}
        for index in indexes:
            login = credentials(index.credentials)
            named[index.name] = Source(index.url, *(login or (None, None)))
        return cls(named, default_index() if default is None else default)

    @classmethod
    def of_mirror(cls, indexes: Iterable[Index], mirror_url: str, default: DefaultIndex | None = None) -> Sources:
        """Return the same names on a mirror, whose own "default" comes before the controller's."""
        base = mirror_url.rstrip("/")
        return cls(
            {index.name: Source(f"{base}/wheels/{index.name}/simple") for index in indexes},
            default_index() if default is None else default,
            (Source(f"{base}/wheels/default/simple"),),
            direct=urlsplit(base).hostname,
        )

    def login(self, url: str, index: str | None = None) -> tuple[str, str] | None:
        """Return (user, password) for an address on the same server as one of the indexes; None without any.

        Several indexes on one server may each have their own: that of ``index`` comes first, then the one whose
        address has most in common with ``url``.
        """
        first = self.named.get(index) if index else None
        known = (*self.named.values(), *self.before_default, *self.default.extra)
        own = [self.default.url] if self.default.url else []
        found = [
            # URLs are compared as text: the longest common beginning is the nearest index.
            (source is first, len(os.path.commonprefix((source.url, url))), source.user, source.password or "")  # noqa: RUF071
            for source in (*known, *own)
            if source.user is not None and urlsplit(source.url)[:2] == urlsplit(url)[:2]
        ]
        return max(found)[2:] if found else None


def _sources(urls: Iterable[str]) -> tuple[Source, ...]:
    return tuple(Source.parse(url) for url in urls)


def _uv_variables(environ: Mapping[str, str]) -> DefaultIndex:
    url = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL")
    # An entry of UV_INDEX may read NAME=URL.
    named = [entry.split("=", 1)[-1] for entry in environ.get("UV_INDEX", "").split()]
    extra = named or environ.get("UV_EXTRA_INDEX_URL", "").split()
    return DefaultIndex(
        Source.parse(url.split("=", 1)[-1] if "=" in url.split("/")[0] else url) if url else None,
        _sources(extra),
        tuple(environ.get("UV_FIND_LINKS", "").replace(",", " ").split()),
        environ.get("SSL_CERT_FILE"),
        "uv's environment variables",
    )


def _uv_files(environ: Mapping[str, str]) -> DefaultIndex:
    for path in _uv_paths(environ):
        if not path.is_file():
            continue
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError(f"cannot read {path}", why=str(error)) from None
        found = _uv_table({**table, **table.get("pip", {})}, str(path))
        if found.url or found.extra or found.links:
            return found
    return DefaultIndex()


def _uv_table(table: Mapping[str, Any], origin: str) -> DefaultIndex:
    indexes = [entry for entry in table.get("index", ()) if isinstance(entry, dict) and "url" in entry]
    default = next((entry["url"] for entry in indexes if entry.get("default")), table.get("index-url"))
    # An explicit index serves only what names it, so it is no source for everything else.
    extra = [entry["url"] for entry in indexes if not entry.get("default") and not entry.get("explicit")]
    return DefaultIndex(
        Source.parse(default) if default else None,
        _sources([*extra, *table.get("extra-index-url", ())]),
        tuple(table.get("find-links", ())),
        None,
        origin,
    )


def _uv_paths(environ: Mapping[str, str]) -> Iterator[Path]:
    if named := environ.get("UV_CONFIG_FILE"):
        yield Path(named)
        return
    yield _config_home(environ) / "uv" / "uv.toml"
    yield Path("/etc/uv/uv.toml")


def _pip_variables(environ: Mapping[str, str], files: DefaultIndex) -> DefaultIndex:
    """Return pip's settings: a variable replaces the same key of the files, as pip itself has it."""
    url = environ.get("PIP_INDEX_URL")
    extra = environ.get("PIP_EXTRA_INDEX_URL")
    links = environ.get("PIP_FIND_LINKS")
    return DefaultIndex(
        Source.parse(url) if url else files.url,
        _sources(extra.split()) if extra is not None else files.extra,
        tuple(links.split()) if links is not None else files.links,
        environ.get("PIP_CERT") or files.certificate,
        files.origin if files.origin != "built in" else "pip's environment variables",
    )


def _pip_files(environ: Mapping[str, str]) -> DefaultIndex:
    merged: dict[str, str] = {}
    read: list[str] = []
    for path in _pip_paths(environ):
        # Percent signs in URLs are literal, so nothing is interpolated.
        parser = configparser.RawConfigParser()
        try:
            if not parser.read(path, encoding="utf-8"):
                continue
        except (configparser.Error, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path}", why=str(error).replace("\n", " ")) from None
        read.append(str(path))
        for section in ("global", "install"):
            if parser.has_section(section):
                merged.update(parser.items(section))
    return DefaultIndex(
        Source.parse(merged["index-url"]) if merged.get("index-url") else None,
        _sources(shlex.split(merged.get("extra-index-url", ""))),
        tuple(shlex.split(merged.get("find-links", ""))),
        merged.get("cert"),
        ", ".join(read) or "built in",
    )


def _pip_paths(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield pip's files, the weakest first: global, user, environment, then the named one."""
    named = environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return
    for directory in reversed(environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")):
        yield Path(directory) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    yield Path(environ.get("HOME", "/")) / ".pip" / "pip.conf"
    yield _config_home(environ) / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if named:
        yield Path(named)


def _config_home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
