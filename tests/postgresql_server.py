"""A real PostgreSQL server for tests: private directory, Unix socket only, gone whatever happens."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote


def programs() -> Path | None:
    """Return the directory of the newest PostgreSQL server that is installed, or None."""
    found = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "initdb").exists()]
    return max(found, key=lambda path: float(path.parent.name), default=None)


@contextmanager
def server() -> Iterator[str]:
    """Start a server and give its URL; the server refuses to run as root and so becomes its usual user."""
    bin_ = programs()
    assert bin_ is not None, "PostgreSQL is not installed"
    become: list[str] = []
    # pytest's own directories are closed to other users, so the server gets one elsewhere: in memory if it fits.
    memory = Path("/dev/shm")
    is_roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2**29
    base = Path(tempfile.mkdtemp(prefix="bringup-postgresql-", dir=memory if is_roomy else None))
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        os.chown(base, user.pw_uid, user.pw_gid)
        become = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--init-groups"]
    process = None
    try:
        data = base / "data"
        subprocess.run(
            ["setpriv", *become, "--", bin_ / "initdb", "-D", data, "-U", "bringup", "--auth=trust", "--no-sync"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=base,
        )
        settings = {"listen_addresses": "", "unix_socket_directories": str(base), "fsync": "off"}
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        # SIGQUIT ends a server at once; the kernel sends it when these tests die.
        with (base / "log").open("w") as log:
            process = subprocess.Popen(
                ["setpriv", *become, "--pdeathsig=QUIT", "--", bin_ / "postgres", "-D", data, *options],
                stdout=log,
                stderr=log,
                cwd=base,
            )
        _wait(bin_, base, process)
        yield f"postgresql://bringup@/postgres?host={quote(str(base), safe='')}"
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)  # a fast shutdown, which waits for no client
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(base, ignore_errors=True)


def _wait(bin_: Path, base: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while subprocess.run([bin_ / "pg_isready", "-q", "-h", base, "-U", "bringup", "-d", "postgres"]).returncode:
        assert process.poll() is None, (base / "log").read_text()
        assert time.monotonic() < deadline, "the server did not come up within 60 s"
        time.sleep(0.1)
