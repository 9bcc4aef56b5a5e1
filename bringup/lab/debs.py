"""Write Debian packages, and the signed flat repository that holds them, without dpkg."""

from __future__ import annotations

import gzip
import hashlib
import io
import posixpath
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path

from bringup.errors import LabError

EPOCH_S = 1_764_460_800
"""Time stamp of every packed file and of the Release file: 2025-11-30, so that equal input packs equally."""

Content = bytes | Path

_RELATIONS = ("Pre-Depends", "Depends", "Recommends", "Suggests", "Provides", "Conflicts", "Breaks", "Replaces")


@dataclass(frozen=True)
class Deb:
    """One package: its control fields, what it lays down and what it runs.

    ``files`` and ``links`` are keyed by absolute path; a link's value is its target. Files below ``/etc`` are
    conf files. ``executables`` names those files that get mode 0755. ``scripts`` holds maintainer scripts by
    name (``postinst``), ``relations`` the dependency fields by their control name.
    """

    name: str
    version: str
    architecture: str
    section: str
    description: str
    relations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    files: Mapping[str, Content] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    executables: frozenset[str] = frozenset()
    scripts: Mapping[str, str] = field(default_factory=dict)
    directories: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        """Return the file name that the archive gives the package; an epoch does not stand in it."""
        return f"{self.name}_{self.version.split(':')[-1]}_{self.architecture}.deb"

    @property
    def conffiles(self) -> tuple[str, ...]:
        """Return the paths that dpkg treats as configuration."""
        return tuple(sorted(path for path in self.files if path.startswith("/etc/")))


@dataclass(frozen=True)
class Packed:
    """A written package: its control paragraph as the index shows it."""

    file_name: str
    paragraph: str


def pack(deb: Deb, directory: Path) -> Packed:
    """Write ``deb`` into ``directory`` and return its index entry.

    The data member is zstd where this machine has the program (a library of 100 MB takes 0.3 s instead of 4),
    gzip otherwise. Raises LabError when the compressor fails.
    """
    data, installed_bytes = _data_tar(deb)
    control = _control(deb, installed_kib=-(-installed_bytes // 1024))
    suffix, squeezed = _squeeze(data)
    target = directory / deb.file_name
    with target.open("wb") as out:
        out.write(b"!<arch>\n")
        for name, content in (
            ("debian-binary", b"2.0\n"),
            ("control.tar.gz", gzip.compress(_control_tar(deb, control), 6, mtime=0)),
            (f"data.tar.{suffix}", squeezed),
        ):
            out.write(f"{name:<16}{EPOCH_S:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode())
            out.write(content + b"\n" * (len(content) % 2))
    packed = target.read_bytes()
    digests = [
        f"Filename: ./{deb.file_name}",
        f"Size: {len(packed)}",
        f"SHA256: {hashlib.sha256(packed).hexdigest()}",
        f"MD5sum: {hashlib.md5(packed, usedforsecurity=False).hexdigest()}",
    ]
    return Packed(deb.file_name, control + "\n".join(digests) + "\n")


def write_index(directory: Path, packed: Iterable[Packed], *, origin: str, label: str) -> None:
    """Write Packages, Packages.gz and Release of a flat repository in NVIDIA's shape; signs nothing."""
    packages = "\n".join(entry.paragraph for entry in sorted(packed, key=lambda each: each.file_name))
    files = {
        "Packages": packages.encode(),
        "Packages.gz": gzip.compress(packages.encode(), 6, mtime=0),
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)
    lines = [
        f"Origin: {origin}",
        f"Label: {label}",
        "Architectures: amd64 all",
        f"Date: {formatdate(EPOCH_S, usegmt=True)}",
        "Acquire-By-Hash: no",
    ]
    for title, algorithm in (("MD5Sum", "md5"), ("SHA256", "sha256")):
        lines.append(f"{title}:")
        lines += [
            f" {hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()} {len(content):>9} {name}"
            for name, content in files.items()
        ]
    (directory / "Release").write_text("\n".join(lines) + "\n")


def _control(deb: Deb, installed_kib: int) -> str:
    lines = [
        f"Package: {deb.name}",
        f"Version: {deb.version}",
        f"Architecture: {deb.architecture}",
        "Maintainer: bringup lab <lab@bringup.invalid>",
        f"Installed-Size: {installed_kib}",
        f"Section: {deb.section}",
        "Priority: optional",
    ]
    for relation in _RELATIONS:
        if values := deb.relations.get(relation):
            lines.append(f"{relation}: {', '.join(values)}")
    lines.append(f"Description: {deb.description} (bringup lab look-alike)")
    return "\n".join(lines) + "\n"


def _control_tar(deb: Deb, control: str) -> bytes:
    members = {"control": (control, 0o644)}
    if deb.conffiles:
        members["conffiles"] = ("".join(f"{path}\n" for path in deb.conffiles), 0o644)
    members |= {name: (text, 0o755) for name, text in deb.scripts.items()}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(_entry("./", tarfile.DIRTYPE, 0o755))
        for name, (text, mode) in sorted(members.items()):
            _add(tar, f"./{name}", text.encode(), mode)
    return buffer.getvalue()


def _data_tar(deb: Deb) -> tuple[bytes, int]:
    buffer = io.BytesIO()
    total = 0
    seen: set[str] = set()

    def parents(tar: tarfile.TarFile, path: str) -> None:
        parent = posixpath.dirname(path)
        if parent in seen:
            return
        if parent != "/":
            parents(tar, parent)
        seen.add(parent)
        tar.addfile(_entry("." + parent.rstrip("/") + "/", tarfile.DIRTYPE, 0o755))

    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted({*deb.files, *deb.links, *(f"{each.rstrip('/')}/." for each in deb.directories)}):
            parents(tar, path)
            if path in deb.links:
                link = _entry("." + path, tarfile.SYMTYPE, 0o777)
                link.linkname = deb.links[path]
                tar.addfile(link)
            elif path in deb.files:
                content = deb.files[path]
                total += _add(tar, "." + path, content, 0o755 if path in deb.executables else 0o644)
    return buffer.getvalue(), total


def _add(tar: tarfile.TarFile, name: str, content: Content, mode: int) -> int:
    entry = _entry(name, tarfile.REGTYPE, mode)
    if isinstance(content, Path):
        entry.size = content.stat().st_size
        with content.open("rb") as stream:
            tar.addfile(entry, stream)
    else:
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return entry.size


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.mode = mode
    entry.mtime = EPOCH_S
    entry.uname = entry.gname = "root"
    return entry


def _squeeze(data: bytes) -> tuple[str, bytes]:
    # Small members are not worth a child process; dpkg reads either.
    if len(data) < 1 << 20 or not (zstd := shutil.which("zstd")):
        return "gz", gzip.compress(data, 1, mtime=0)
    done = subprocess.run([zstd, "-1", "-c", "-q"], input=data, capture_output=True, check=False)
    if done.returncode:
        raise LabError("zstd could not pack a package", why=done.stderr.decode(errors="replace").strip())
    return "zst", done.stdout
