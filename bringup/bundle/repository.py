"""Write the index of a flat apt repository out of the paragraphs of the one that its packages came from."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterable, Mapping
from email.utils import formatdate

from bringup.locking.debian import paragraphs

_SHA256 = re.compile(r"^SHA256:[ \t]*([0-9A-Fa-f]{64})[ \t]*$", re.MULTILINE)
_FILE_NAME = re.compile(r"^Filename:.*$", re.MULTILINE)
_BLOCK_END = re.compile(r"\n[ \t]*\n")


def blocks(text: str) -> dict[str, str]:
    """Return the paragraphs of a ``Packages`` index as they stand there, by the SHA-256 of their package."""
    found = {}
    for block in _BLOCK_END.split(text):
        if digest := _SHA256.search(block):
            found[digest[1].lower()] = block.strip("\n") + "\n"
    return found


def at(block: str, file_name: str) -> str:
    """Return a paragraph that names ``file_name`` beside the index as the place of its package."""
    return _FILE_NAME.sub(lambda _: f"Filename: ./{file_name}", block, count=1)


def file_name(block: str) -> str:
    """Return the file name that a paragraph of ours gives its package."""
    return next(paragraphs(block), {}).get("Filename", "").removeprefix("./")


def index(entries: Iterable[str], *, origin: str, architecture: str, date_s: float) -> tuple[dict[str, bytes], str]:
    """Return the index files by their name beside the packages, and the text of the Release file to sign.

    The index lies under its hash as well, and apt fetches it from there: whoever reads while the repository is
    replaced gets the index that the Release file it holds was signed for.
    """
    packages = "\n".join(sorted(entries)).encode()
    plain = {"Packages": packages, "Packages.gz": gzip.compress(packages, 9, mtime=0)}
    lines = [
        f"Origin: {origin}",
        "Label: bringup bundle",
        f"Architectures: {architecture} all",
        f"Date: {formatdate(date_s, usegmt=True)}",
        "Acquire-By-Hash: yes",
        "SHA256:",
        *(f" {_sha256(content)} {len(content)} {name}" for name, content in plain.items()),
    ]
    by_hash = {f"by-hash/SHA256/{_sha256(content)}": content for content in plain.values()}
    return {**by_hash, **plain}, "\n".join(lines) + "\n"


def lists(release_text: str, files: Mapping[str, bytes]) -> bool:
    """Return whether the text of a Release file lists exactly these index files."""
    fields = next(paragraphs(release_text), {})
    listed = {line.split()[0] for line in fields.get("SHA256", "").splitlines() if line.split()}
    return listed == {_sha256(content) for name, content in files.items() if name.startswith("by-hash/")}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
