"""Keep secrets out of everything that is written down.

Two nets: values that the controller knows to be secret, in every form they are likely to appear in, and text
that looks like a credential whoever it belongs to. The second catches what the first was never told.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from functools import cache
from urllib.parse import quote, quote_plus

from pydantic import JsonValue

MASK = "***"

_REMEMBERED_CHARACTERS = 500
_REMEMBERED_TEXTS = 2000

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.S)
_USERINFO = re.compile(r"(?<=://)[^/\s@\"'<>?#]+@")
_AUTHORIZATION = re.compile(
    r"((?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:basic|bearer|token|digest)\s+)[^\s\"',]+", re.I
)
_ASSIGNMENT = re.compile(
    r"((?:password|passwd|(?:\b|_|-)(?:secret|token|api[_-]?key|access[_-]?key|credentials?))[\"']?\s*[=:]\s*)"
    r"(\"[^\"]*\"|'[^']*'|[^\s\"',;&|]+)",
    re.I,
)


class Masker:
    """Replace secrets in text and in JSON values by ``***``.

    ``secrets`` are values known to be secret; each is also found URL-quoted, in base64, and in the base64 of
    a ``user:secret`` pair. Empty ones are ignored.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        forms = {form for secret in secrets if secret for form in _forms(secret)}
        # The longest first, or a secret that is a part of another would leave the rest of it readable.
        ordered = sorted(forms, key=lambda form: (-len(form), form))
        self._known = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._masked: dict[str, str] = {}

    def text(self, text: str) -> str:
        """Return the text without secrets."""
        # Hosts of one fleet say the same: keys, names, causes. What is long is rarely said twice.
        if len(text) > _REMEMBERED_CHARACTERS:
            return _ASSIGNMENT.sub(rf"\1{MASK}", self.message(text))
        known = self._masked.get(text)
        if known is None:
            if len(self._masked) >= _REMEMBERED_TEXTS:
                self._masked.clear()
            known = self._masked[text] = _ASSIGNMENT.sub(rf"\1{MASK}", self.message(text))
        return known

    def message(self, text: str) -> str:
        """Return a message for people without known secrets, keys and logins.

        What follows words such as ``token:`` stays: a message may well say what is wrong with one.
        """
        if self._known is not None:
            text = self._known.sub(MASK, text)
        text = _PRIVATE_KEY.sub(MASK, text)
        text = _USERINFO.sub(f"{MASK}@", text)
        return _AUTHORIZATION.sub(rf"\1{MASK}", text)

    def value(self, value: JsonValue) -> JsonValue:
        """Return the JSON value with every string in it, keys included, without secrets.

        The value of a key that names a secret, such as ``password``, is masked whatever it is.
        """
        match value:
            case str():
                return self.text(value)
            case list():
                return [self.value(item) for item in value]
            case dict():
                return {
                    self.text(key): MASK if item is not None and _names_secret(key) else self.value(item)
                    for key, item in value.items()
                }
            case _:
                return value


@cache
def _names_secret(key: str) -> bool:
    match = _ASSIGNMENT.search(f"{key}=x")
    return match is not None and match.end() == len(key) + 2


def _forms(secret: str) -> Iterable[str]:
    yield secret
    yield quote(secret, safe="")
    yield quote_plus(secret)
    user, colon, _ = secret.partition(":")
    pairs = [secret, f"__token__:{secret}", f":{secret}"] + ([secret] if colon and user else [])
    for pair in pairs:
        encoded = base64.b64encode(pair.encode()).decode()
        # A short base64 would match by accident what has nothing to do with the secret.
        if len(encoded) >= 8:
            yield encoded
            yield encoded.rstrip("=")
