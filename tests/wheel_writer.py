"""Write small wheels, and a simple index of them on this machine."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

LINUX = "cp310-abi3-manylinux2014_x86_64"


def write_wheel(
    directory: Path,
    name: str,
    version: str,
    files: Mapping[str, bytes],
    *,
    requires: Sequence[str] = (),
    tag: str = LINUX,
) -> Path:
    """Write one wheel with its RECORD; equal input gives equal bytes."""
    stem = f"{name.replace('-', '_')}-{version}"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
    lines += [f"Requires-Dist: {each}\n" for each in requires]
    contents = {
        **files,
        f"{stem}.dist-info/METADATA": "".join(lines).encode(),
        f"{stem}.dist-info/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
    }
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in contents.items())
    contents[f"{stem}.dist-info/RECORD"] = (record + f"{stem}.dist-info/RECORD,,\n").encode()
    path = directory / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in contents.items():
            archive.writestr(zipfile.ZipInfo(member), data, zipfile.ZIP_DEFLATED)
    return path


def add_to_index(index: Path, name: str, version: str, files: Mapping[str, bytes], **more: object) -> Path:
    """Write a wheel into ``index`` (the directory behind a file: address) and list it on its page."""
    directory = index / name
    directory.mkdir(parents=True, exist_ok=True)
    path = write_wheel(directory, name, version, files, **more)  # type: ignore[arg-type]
    anchors = (
        f'<a href="{each.name}#sha256={hashlib.sha256(each.read_bytes()).hexdigest()}">{each.name}</a>'
        for each in sorted(directory.glob("*.whl"))
    )
    (directory / "index.html").write_text("<html><body>\n" + "\n".join(anchors) + "\n</body></html>\n")
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
