"""Tell what is secret in URLs, settings and environments, so that it travels apart and can be masked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urlsplit, urlunsplit

MINIMUM_CHARACTERS = 6
"""What is shorter is not masked on the strength of its name: it would tear unconcerned words apart."""

_NAME = re.compile(
    r"(password|passwd|passphrase|pass|pw|secret|token|jwt|api_?key|access_?key|private_?key|credentials?|login)$", re.I
)
_USERINFO = re.compile(r"://([^\s/@\"'<>?#:]*):([^\s/@\"'<>?#]+)@")
_REFERENCE = re.compile(r"(env|file):|/|~")


def split_login(url: str) -> tuple[str, tuple[str, str] | None]:
    """Return a URL without its credentials, and (user, password); None when it has none."""
    parts = urlsplit(url)
    login, at, server = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, _, password = login.partition(":")
    return urlunsplit(parts._replace(netloc=server)), (unquote(user), unquote(password))


def secrets_in(value: object, name: str = "") -> Iterator[str]:
    """Yield the secrets in settings or in an environment: what a name calls one, and passwords in URLs.

    Mappings and sequences are searched to their ends. References such as ``env:NAME`` and paths are no secrets.
    """
    match value:
        case Mapping():
            for key, item in value.items():
                yield from secrets_in(item, str(key))
        case list() | tuple():
            for item in value:
                yield from secrets_in(item, name)
        case str():
            for found in _USERINFO.finditer(value):
                yield found[2]
                yield unquote(found[2])
            if _NAME.search(name) and not _REFERENCE.match(value) and len(value) >= MINIMUM_CHARACTERS:
                yield value
                user, colon, password = value.partition(":")
                if colon and user and len(password) >= MINIMUM_CHARACTERS:
                    yield password
        case _:
            return


def hide(text: str, *places: object) -> str:
    """Return a text with every secret of these settings and environments replaced by ``***``."""
    found = {secret for place in places for secret in secrets_in(place)}
    # The longest first: one may be a part of another.
    for secret in sorted(found, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text
