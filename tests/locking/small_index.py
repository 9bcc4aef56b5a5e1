"""Small wheel indexes on the loopback, with the traps of the real ones, and the stacks that use them."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote

X86 = "manylinux_2_28_x86_64"


class Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass


@dataclass(frozen=True)
class Site:
    """A directory served over HTTP: ``MIRROR/wheels/<index>/simple/<distribution>/``, as a mirror has it."""

    root: Path
    url: str

    def add(
        self,
        index: str,
        name: str,
        version: str,
        *requires: str,
        tag: str = "py3-none-any",
        build: str = "",
        files: dict[str, str] | None = None,
    ) -> Path:
        """Write one wheel into an index and list it on its page; equal input gives equal bytes."""
        stem = f"{name.replace('-', '_')}-{version}"
        file = f"{stem}{'-' + build if build else ''}-{tag}.whl"
        directory = self.root / "wheels" / index / "simple" / name
        directory.mkdir(parents=True, exist_ok=True)
        contents = {
            f"{name.replace('-', '_')}/__init__.py": f"__version__ = {version!r}\n",
            **(files or {}),
            f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            + "".join(f"Requires-Dist: {each}\n" for each in requires),
            f"{stem}.dist-info/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
            f"{stem}.dist-info/RECORD": "",
        }
        with zipfile.ZipFile(directory / file, "w") as archive:
            for path, text in contents.items():
                archive.writestr(zipfile.ZipInfo(path), text)
        anchors = []
        for wheel in sorted(directory.glob("*.whl")):
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            anchors.append(f'<a href="{quote(wheel.name)}#sha256={digest}">{wheel.name}</a><br>')
        (directory / "index.html").write_text("<html><body>\n" + "\n".join(anchors) + "\n</body></html>\n")
        return directory / file

    def index(self, name: str) -> str:
        """Return the address of one index."""
        return f"{self.url}/wheels/{name}/simple"


STACK = """
schema = 1
name = "demo"

[driver]
branch = "580"
version = "580.95.05"

[cuda]
toolkits = ["12.8", "13.0"]
default = "13.0"

[python]
interpreter = "3.11"
cuda = "13.0"

[[python.index]]
name = "pytorch"
url = "https://pytorch.invalid/simple"

[[python.index]]
name = "sglang"
url = "https://sglang.invalid/simple"

[[python.index]]
name = "flashinfer"
url = "https://flashinfer.invalid/simple"

[[python.step]]
name = "torch"
requirements = ["torch==2.9.1+cu130"]
index = "pytorch"

[[python.step]]
name = "sgl-kernel"
requirements = ["sgl-kernel==0.3.21+cu130"]
index = "sglang"

[[python.step]]
name = "flashinfer"
requirements = ["flashinfer-python==0.6.4", "flashinfer-jit-cache==0.6.4+cu130"]
sources = { flashinfer-jit-cache = "flashinfer" }
family = ["flashinfer-python", "flashinfer-jit-cache"]

[[python.step]]
name = "sglang"
requirements = ["sglang==0.5.9"]

[[python.override]]
requirement = "flashinfer-python==0.6.4"
reason = "the release whose jit-cache exists"

[[python.override]]
requirement = "flashinfer-jit-cache==0.6.4+cu130"
reason = "the family has one version"
"""
