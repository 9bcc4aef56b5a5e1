"""Read a torch, of an index, a file or an environment, for the index of exports."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from bringup import paths
from bringup.errors import BringupError, InputError
from bringup.locking.compile import Compiler, Project, best_wheel
from bringup.package_index import Sources
from bringup.torch_index import CudaWheel, IndexedTorch
from bringup.wheels import Archive, Offer, Source, WheelReader, machine_of, metadata_of, open_source, text_of

_IN_MEMORY_BYTES = 64 << 20

_LIBRARY = re.compile(r"torch/lib/([^/]+\.so(?:\.\d+)*)")
_SHARED = re.compile(r"\.so(\.\d+)*\Z")


def index_torch(
    reader: WheelReader, what: str, platform: str, *, say: Callable[[str], None] = lambda _: None
) -> IndexedTorch:
    """Read a torch wheel: a requirement such as ``torch==2.10.0``, or a path or address that ends in .whl.

    A wheel of an index is fetched once, whole, its hash tested, and nothing of it is kept: almost all of it are
    the two libraries whose names count, so ranges would save little. Raises InputError when there is no such
    wheel or its CUDA wheels cannot be resolved, BringupError when it cannot be had or is no torch.
    """
    if what.endswith(".whl"):
        with reader.opened(what, platform) as (source, file):
            return index_wheel(reader.http, source, file, sha256_of(source), reader.sources, say=say)
    offer = reader.indexes.find(what, platform)
    return index_offer(reader, offer, say=say)


def index_offer(
    reader: WheelReader,
    offer: Offer,
    *,
    cuda_wheels: Sequence[CudaWheel] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> IndexedTorch:
    """Read a torch wheel of an index, as `index_torch` does.

    ``cuda_wheels`` are the ones that will be beside it; None: those that its requirements lead to.
    """
    say(f"fetching {offer.file}" + (f", {offer.size_bytes / 1e6:.0f} MB" if offer.size_bytes else ""))
    with reader.open_offer(offer, whole=True) as source:
        sha256 = offer.sha256 or sha256_of(source)
        return index_wheel(reader.http, source, offer.file, sha256, reader.sources, cuda_wheels=cuda_wheels, say=say)


def sha256_of(source: Source) -> str:
    """Return the hash of all bytes of a source."""
    digest = hashlib.sha256()
    for start in range(0, source.size_bytes, 8 << 20):
        digest.update(source.read(start, min(8 << 20, source.size_bytes - start)))
    return digest.hexdigest()


def index_wheel(
    http: httpx.Client,
    source: Source,
    file: str,
    sha256: str,
    sources: Sources,
    *,
    cuda_wheels: Sequence[CudaWheel] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> IndexedTorch:
    """Read a torch wheel out of any source of bytes. Raises as `index_torch` does."""
    try:
        name, version, _, tags = parse_wheel_filename(file)
    except InvalidWheelFilename as error:
        raise InputError(f"not a wheel: {file}", why=str(error)) from None
    machine = machine_of(file)
    if name != "torch" or machine is None:
        raise InputError(f"{file} is no torch for Linux")
    archive = Archive(source)
    metadata = metadata_of(archive, name, version)
    text = text_of(archive, "torch/version.py") or ""
    full = assigned(text, "__version__")
    if full is None or Version(full).public != version.public:
        raise BringupError(f"{file} is not what it is called", why=f"torch/version.py says {full}")
    python = min((tag.interpreter.removeprefix("cp") for tag in tags), key=len)
    needed, exports = _libraries(archive, say)
    if cuda_wheels is None:
        requirements = [line for line in metadata.get("requires_dist", ()) if _is_cuda(line)]
        cuda_wheels = _cuda_wheels(http, requirements, f"cp{python}-{machine}", sources, full)
    say(f"torch {full}: {sum(map(len, exports.values()))} names in {len(exports)} libraries")
    return IndexedTorch(
        version=full,
        cuda=assigned(text, "cuda"),
        machine=machine,
        python=f"{python[0]}.{python[1:]}",
        file=file,
        sha256=sha256,
        size_bytes=source.size_bytes,
        cuda_wheels=tuple(cuda_wheels),
        needed=needed,
        exports=exports,
    )


def index_installed(site: Path) -> IndexedTorch:
    """Read the torch that is installed in a site-packages directory; raises InputError when there is none."""
    probe = paths.host_script("abi_probe")
    version_file = site / "torch" / "version.py"
    text = version_file.read_text(encoding="utf-8") if version_file.is_file() else ""
    version = assigned(text, "__version__")
    if version is None:
        raise InputError(f"no torch is installed in {site}")
    needed, exports, machine = {}, {}, ""
    for path in sorted((site / "torch" / "lib").iterdir()):
        if _SHARED.search(path.name) and path.is_file():
            try:
                elf = probe.read_file(str(path))
            except (probe.ElfError, OSError) as error:
                raise BringupError(f"cannot read {path}", why=str(error)) from None
            needed[path.name], exports[path.name], machine = elf.needed, frozenset(elf.exports), elf.machine
    wheels = [
        CudaWheel(str(folder.relative_to(site)), "", tuple(sorted(p.name for p in folder.iterdir() if p.is_file())))
        for folder in sorted(site.glob("nvidia/*/lib"))
    ]
    match = re.search(r"/python(3\.\d+)/", str(site))
    return IndexedTorch(
        version, assigned(text, "cuda"), machine, match[1] if match else "", str(site), "", 0,
        tuple(wheels), needed, exports,
    )  # fmt: skip


def _libraries(
    archive: Archive, say: Callable[[str], None]
) -> tuple[dict[str, tuple[str, ...]], dict[str, frozenset[str]]]:
    probe = paths.host_script("abi_probe")
    needed, exports = {}, {}
    for member in archive.members:
        match = _LIBRARY.fullmatch(member.path)
        if match is None:
            continue
        try:
            if member.size_bytes <= _IN_MEMORY_BYTES:
                elf = probe.read_bytes(archive.read(member, _IN_MEMORY_BYTES))
            else:
                say(f"reading {member.name}, {member.size_bytes / 1e6:.0f} MB")
                with archive.unpacked(member) as path:
                    elf = probe.read_file(str(path))
        except probe.ElfError as error:
            raise BringupError(f"{archive.source.name}: cannot read {member.path}", why=str(error)) from None
        needed[match[1]], exports[match[1]] = elf.needed, frozenset(elf.exports)
    if "libtorch_cpu.so" not in exports:
        raise BringupError(f"{archive.source.name} holds no torch/lib/libtorch_cpu.so")
    return needed, exports


def _cuda_wheels(
    http: httpx.Client, requirements: Sequence[str], platform: str, sources: Sources, version: str
) -> tuple[CudaWheel, ...]:
    """Return the CUDA wheels that a torch's requirements lead to, each with the libraries in it."""
    if not requirements:
        return ()
    with tempfile.TemporaryDirectory(prefix="bringup-index-") as directory:
        compiler = Compiler(platform, sources, Path(directory))
        answers = compiler.answers(Project(list(requirements)), what=f"the CUDA wheels of torch {version}")
    found = []
    for answer in sorted(answers, key=lambda a: a.name):
        wheel = best_wheel(answer.wheels, platform)
        if wheel is None:
            raise BringupError(f"no wheel of {answer.name} {answer.version} for {platform}")
        login = sources.login(wheel.url)
        with open_source(
            http, wheel.url, login=login, size_bytes=wheel.size_bytes or None, sha256=wheel.sha256
        ) as source:
            names = {m.name for m in Archive(source).members if _SHARED.search(m.name)}
        found.append(CudaWheel(wheel.file, wheel.sha256, tuple(sorted(names))))
    return tuple(found)


def is_shared(name: str) -> bool:
    """Return whether a file name is that of a shared object, with or without numbers behind."""
    return _SHARED.search(name) is not None


def _is_cuda(requirement: str) -> bool:
    """Return whether a line of Requires-Dist asks for NVIDIA's CUDA libraries, without an extra of torch."""
    try:
        parsed = Requirement(requirement)
    except InvalidRequirement:
        return False
    name = canonicalize_name(parsed.name)
    return (name.startswith("nvidia-") or name == "cuda-toolkit") and "extra" not in str(parsed.marker or "")


def assigned(text: str, name: str) -> str | None:
    """Return what torch/version.py assigns to a name, None when it is no string."""
    match = re.search(rf"(?m)^{name}\s*(?::[^=\n]*)?=\s*['\"]([^'\"]+)['\"]", text)
    return match[1] if match else None
