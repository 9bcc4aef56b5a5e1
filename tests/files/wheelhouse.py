"""Tiny wheels, a package index on the loopback interface, and build orders for them."""

from __future__ import annotations

import base64
import csv
import hashlib
import http.server
import io
import json
import os
import platform
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uv

from bringup import paths

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
SCRIPT = paths.files() / "host_env.py"


def wheel(name: str, version: str, files: Mapping[str, str], *, spoil: str | None = None) -> tuple[str, bytes]:
    """Return (file name, bytes) of a wheel; ``spoil`` names a file whose RECORD hash is wrong."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for path, text in contents.items():
        hashed = text.encode() if path != spoil else b"something else"
        digest = base64.urlsafe_b64encode(hashlib.sha256(hashed).digest()).rstrip(b"=").decode()
        writer.writerow([path, f"sha256={digest}", len(text)])
    writer.writerow([f"{info}/RECORD", "", ""])
    contents[f"{info}/RECORD"] = rows.getvalue()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, text in contents.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return f"{module}-{version}-py3-none-any.whl", packed.getvalue()


@dataclass
class Index:
    """An index on this machine; ``login`` None lets everybody in, ``down`` answers nothing but 503."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    login: tuple[str, str] | None = None
    is_down: bool = False
    asked: list[str] = field(default_factory=list)

    def add(self, name: str, version: str, files: Mapping[str, str] | None = None, **options: Any) -> dict[str, str]:
        """Offer a wheel and return its locked form."""
        content = files if files is not None else {f"{name.replace('-', '_')}.py": f"version = '{version}'\n"}
        file, data = wheel(name, version, content, **options)
        self.files[file] = data
        return {"name": name, "version": version, "sha256": hashlib.sha256(data).hexdigest()}

    def answer(self, path: str, authorization: str | None) -> tuple[int, bytes]:
        """Return (status, body) for a request."""
        self.asked.append(path)
        if self.is_down:
            return 503, b""
        if self.login is not None:
            wanted = "Basic " + base64.b64encode(":".join(self.login).encode()).decode()
            if authorization != wanted:
                return 401, b""
        part = path.strip("/").split("/")[-1]
        if part in self.files:
            return 200, self.files[part]
        links = [
            f'<a href="/files/{file}#sha256={hashlib.sha256(data).hexdigest()}">{file}</a>'
            for file, data in self.files.items()
            if file.split("-")[0].replace("_", "-") == part
        ]
        return (200, "\n".join(links).encode()) if links else (404, b"")


@contextmanager
def serving() -> Iterator[Index]:
    """Serve an index on the loopback interface."""
    index = Index("")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = index.answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if not self.path.endswith(".whl") else "application/zip")
            self.send_header("Content-Length", str(len(body)))
            if status == 401:
                self.send_header("WWW-Authenticate", "Basic")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Bench:
    """A pretended /opt/bringup in a temporary directory, and the script that builds there."""

    root: Path
    index: Index

    @property
    def home(self) -> Path:
        return self.root / "opt"

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    def order(self, steps: Mapping[str, list[dict[str, str]]], **more: Any) -> dict[str, Any]:
        """Return a build order whose steps hold locked files of the one index."""
        digest, generation = more.pop("digest", "abcdefabcdef"), more.pop("generation", 1)
        imported = more.pop("imports", {})
        return {
            "schema": 1,
            "home": str(self.home),
            "jit_cache": str(self.root / "jit"),
            "env": str(self.home / "envs" / f"{digest}-{generation}"),
            "digest": digest,
            "generation": generation,
            "platform": f"cp{MINOR.replace('.', '')}-{platform.machine()}",
            "python": MINOR,
            "uv": os.fspath(uv.find_uv_bin()),
            "proxy": None,
            "steps": [
                {
                    "name": name,
                    "imports": imported.get(name, []),
                    "calls": [{"index": "one", "url": self.index.url, "files": files}],
                }
                for name, files in steps.items()
            ],
            "patches": [],
            **more,
        }

    def run(self, order: Mapping[str, Any], command: str, *arguments: str, status: int = 0) -> str:
        """Run one command of the script, expect a status, and return what it printed."""
        self.run_dir.mkdir(mode=0o755, exist_ok=True)
        file = self.run_dir / "order.json"
        file.write_text(json.dumps(order))
        done = subprocess.run(
            [sys.executable, SCRIPT, command, file, *arguments],
            env={"PATH": os.environ["PATH"], "BRINGUP_RUN_DIR": str(self.run_dir)},
            capture_output=True,
            text=True,
            preexec_fn=lambda: os.umask(0o077),
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def build(self, order: Mapping[str, Any]) -> Path:
        """Build an order to the end and return the environment's path."""
        self.run(order, "create")
        for step in order["steps"]:
            self.run(order, "install", step["name"])
        if order["patches"]:
            self.run(order, "patch")
        self.run(order, "finish")
        return Path(order["env"])

    @property
    def log(self) -> dict[str, Any]:
        """Return the build log."""
        return dict(json.loads((self.run_dir / "build.json").read_text()))

    def last(self, action: str) -> dict[str, Any]:
        """Return the last entry of an action in the build log."""
        return next(entry for entry in reversed(self.log["actions"]) if entry["action"] == action)


def site(env: Path) -> Path:
    """Return an environment's site-packages directory."""
    return next(env.glob("lib/python3.*/site-packages"))
