"""A real Dask cluster for tests: a scheduler and two workers with certificates of their own, gone whatever happens."""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import dask
import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bringup.dask_executor import DaskExecutor


def certificates(directory: Path, name: str) -> dict[str, str]:
    """Make an authority and one certificate by it, and return the settings that use them on both sides."""
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = signed(f"{name} authority", authority_key, f"{name} authority", authority_key, is_authority=True)
    certificate = signed(f"{name} authority", authority_key, name, key, is_authority=False)
    files = {
        "ca-file": directory / f"{name}-ca.pem",
        "cert": directory / f"{name}.pem",
        "key": directory / f"{name}.key",
    }
    files["ca-file"].write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    files["cert"].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files["key"].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    settings = {"distributed.comm.tls.ca-file": str(files["ca-file"])}
    for role in ("scheduler", "worker", "client"):
        settings |= {f"distributed.comm.tls.{role}.{part}": str(files[part]) for part in ("cert", "key")}
    return settings


def signed(
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    name: str,
    key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )


@dataclass
class Cluster:
    """A scheduler and two workers, each a process of its own."""

    address: str
    settings: dict[str, str]
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Return the settings as the variables that Dask reads."""
        return {"DASK_" + key.upper().replace(".", "__").replace("-", "_"): at for key, at in self.settings.items()}

    def at_work(self) -> list[subprocess.Popen[bytes]]:
        """Return the workers that run a shard."""
        return [each for each in self.workers if each.poll() is None and psutil.Process(each.pid).children()]

    def executor(self) -> DaskExecutor:
        with dask.config.set(self.settings):
            return DaskExecutor(self.address)


@contextmanager
def started(directory: Path, more: Mapping[str, str]) -> Iterator[Cluster]:
    """Start a cluster, whose workers get ``more`` variables."""
    settings = certificates(directory, "site")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = Cluster(f"tls://127.0.0.1:{port}", settings)
    environment = {**os.environ, **made.environment, **more}
    with (directory / "cluster.log").open("wb") as log:

        def start(*words: str) -> subprocess.Popen[bytes]:
            argv = [sys.executable, "-m", "distributed.cli.dask_" + words[0], *words[1:], "--no-dashboard"]
            return subprocess.Popen(
                [*argv, "--protocol", "tls"], env=environment, stdout=log, stderr=log, cwd=directory
            )

        scheduler = start("scheduler", "--host", made.address)
        try:
            for _ in range(2):
                made.workers.append(start("worker", made.address, "--no-nanny", "--nthreads", "4"))
            yield made
        finally:
            for process in (*made.workers, scheduler):
                process.kill()
                process.wait()
