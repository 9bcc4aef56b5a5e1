# ruff: noqa: E501 (a row of a table stays one line)
"""Choosing .deb sets out of one repository, and reading a signed one."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_index import STACK, Site

from bringup.errors import BringupError, InputError
from bringup.locking import http
from bringup.locking.debian import parse_packages
from bringup.locking.packages import lock_packages, releases, resolve_packages
from bringup.locking.repository import Repository, fingerprint_of, read_repository, verified
from bringup.stack import LockedPackage, Stack, parse_stack

RELEASE = releases()["debian12-x86_64"]


def stack(**driver: str) -> Stack:
    wanted = parse_stack(STACK, source="demo.toml")
    return wanted.model_copy(update={"driver": wanted.driver.model_copy(update=driver)})


def paragraph(text: str) -> str:
    """Return the paragraph of ``name version [field: value; …]``."""
    head, _, rest = text.partition(" [")
    name, version = head.split()
    fields = "".join(f"{field.strip()}\n" for field in rest.rstrip("]").split(";") if field.strip())
    return (
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\n{fields}"
        f"Filename: ./{name}_{version}_amd64.deb\nSize: 1\nSHA256: {'0' * 64}\n"
    )


def repository(*lines: str) -> Repository:
    text = "\n".join(paragraph(line) for line in lines)
    return Repository("https://apt.example", "NVIDIA", parse_packages(text, "amd64", source="Packages"), "")


# Ubuntu's names up to branch 580, as NVIDIA's repository has them, with two versions side by side.
DRIVER_580 = [
    f"{name} {version}-0ubuntu1 [{fields.format(version=f'{version}-0ubuntu1', upstream=version)}]"
    for version in ("580.95.05", "580.159.04")
    for name, fields in (
        ("nvidia-driver-580-open", "Depends: nvidia-dkms-580-open (= {version}), libnvidia-compute-580 (= {version}), libc6 (>= 2.27)"),
        ("nvidia-driver-580", "Depends: nvidia-dkms-580 (= {version}), libnvidia-compute-580 (= {version})"),
        ("nvidia-dkms-580-open", "Depends: dkms, nvidia-kernel-common-580 (>= {upstream}); Provides: nvidia-dkms-kernel; Conflicts: nvidia-dkms-kernel"),
        ("nvidia-dkms-580", "Depends: dkms, nvidia-kernel-common-580 (>= {upstream}); Provides: nvidia-dkms-kernel; Conflicts: nvidia-dkms-kernel"),
        ("nvidia-kernel-common-580", "Depends: nvidia-modprobe (>= {upstream})"),
        ("nvidia-modprobe", ""),
        ("libnvidia-compute-580", ""),
        ("nvidia-persistenced", ""),
        ("nvidia-fabricmanager", "Provides: nvidia-fabricmanager-580"),
        ("libnvsdm", ""),
        (f"nvidia-driver-pinning-{version}", ""),
    )
] + ["nvidia-driver-pinning-580 580-1", "nvlsm 2025.06.11-1", "nvlsm 2025.10.1-1"]  # fmt: skip

DRIVER_590 = [
    "nvidia-driver-open 590.48.01-1 [Depends: nvidia-dkms-open (= 590.48.01-1), libnvidia-compute (= 590.48.01-1)]",
    "nvidia-dkms-open 590.48.01-1",
    "libnvidia-compute 590.48.01-1",
    "nvidia-persistenced 590.48.01-1",
    "nvidia-driver-pinning-590 590-1",
]

DEBIAN_580 = [
    "nvidia-kernel-open-dkms 580.95.05-1 [Depends: dkms, nvidia-kernel-support (= 580.95.05-1)]",
    "nvidia-kernel-dkms 580.95.05-1 [Depends: dkms]",
    "nvidia-kernel-support 580.95.05-1",
    "nvidia-driver-cuda 580.95.05-1 [Depends: libcuda1 (= 580.95.05-1), nvidia-kernel-dkms (= 580.95.05-1) | nvidia-kernel-open-dkms (= 580.95.05-1)]",
    "libcuda1 580.95.05-1",
    "nvidia-driver-pinning-580.95.05 580.95.05-1",
]

TOOLKITS = [
    line
    for dash, major, config, meta in (
        ("12-8", "12", "12.8.90", "12.8.1"),
        ("13-0", "13", "13.0.96", "13.0.2"),
        ("13-3", "13", "13.3.29", "13.3.0"),
    )
    for line in (
        f"cuda-toolkit-{dash} {meta}-1 [Depends: cuda-cudart-{dash} (>= {config})]",
        f"cuda-cudart-{dash} {config}-1 [Depends: cuda-toolkit-config-common | cuda-cudart-11-2, "
        f"cuda-toolkit-{major}-config-common | cuda-cudart-11-2, cuda-toolkit-{dash}-config-common]",
        f"cuda-toolkit-config-common {config}-1",
        f"cuda-toolkit-{major}-config-common {config}-1",
        f"cuda-toolkit-{dash}-config-common {config}-1",
    )
]


def shown(packages: tuple[LockedPackage, ...]) -> list[str]:
    return [f"{package.name}={package.version}" for package in packages]


@pytest.mark.parametrize(
    ("lines", "driver", "wanted"),
    [
        pytest.param(
            DRIVER_580, {},
            [
                "nvidia-driver-pinning-580.95.05=580.95.05-0ubuntu1",
                "libnvidia-compute-580=580.95.05-0ubuntu1",
                "nvidia-dkms-580-open=580.95.05-0ubuntu1",
                "nvidia-driver-580-open=580.95.05-0ubuntu1",
                "nvidia-kernel-common-580=580.95.05-0ubuntu1",
                "nvidia-modprobe=580.95.05-0ubuntu1",
                "nvidia-persistenced=580.95.05-0ubuntu1",
            ],
            id="open, branch in the names: every member has the driver's version though a newer one would do",
        ),
        pytest.param(
            DRIVER_580, {"flavour": "closed", "version": "580.159.04"},
            [
                "nvidia-driver-pinning-580.159.04=580.159.04-0ubuntu1",
                "libnvidia-compute-580=580.159.04-0ubuntu1",
                "nvidia-dkms-580=580.159.04-0ubuntu1",
                "nvidia-driver-580=580.159.04-0ubuntu1",
                "nvidia-kernel-common-580=580.159.04-0ubuntu1",
                "nvidia-modprobe=580.159.04-0ubuntu1",
                "nvidia-persistenced=580.159.04-0ubuntu1",
            ],
            id="closed, the newer version",
        ),
        pytest.param(
            [*DRIVER_580, *DRIVER_590], {"branch": "590", "version": "590.48.01"},
            [
                "nvidia-driver-pinning-590=590-1",
                "libnvidia-compute=590.48.01-1",
                "nvidia-dkms-open=590.48.01-1",
                "nvidia-driver-open=590.48.01-1",
                "nvidia-persistenced=590.48.01-1",
            ],
            id="from 590 the names have no branch; pinning by branch where the version has none",
        ),
        pytest.param(
            DEBIAN_580, {},
            [
                "nvidia-driver-pinning-580.95.05=580.95.05-1",
                "libcuda1=580.95.05-1",
                "nvidia-driver-cuda=580.95.05-1",
                "nvidia-kernel-open-dkms=580.95.05-1",
                "nvidia-kernel-support=580.95.05-1",
            ],
            id="Debian's names, compute only; the closed alternative that comes first is not taken",
        ),
    ],
)  # fmt: skip
def test_driver_family(lines: list[str], driver: dict[str, str], wanted: list[str]) -> None:
    found = resolve_packages(stack(**driver), RELEASE, repository(*lines, *TOOLKITS), against="index")
    assert shown(found.driver) == wanted
    assert {package.origin for package in found.driver} == {"NVIDIA"}
    assert found.resolved_against == "index"


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        pytest.param(
            DRIVER_580,
            {
                "nvswitch": ["nvidia-fabricmanager=580.95.05-0ubuntu1"],
                "nvlink5": [
                    "libnvsdm=580.95.05-0ubuntu1",
                    "nvidia-fabricmanager=580.95.05-0ubuntu1",
                    "nvlsm=2025.10.1-1",
                ],
            },
            id="the driver's version where they share one",
        ),
        pytest.param(DEBIAN_580, {}, id="a release without fabric packages"),
    ],
)
def test_fabric_packages(lines: list[str], wanted: dict[str, list[str]]) -> None:
    found = resolve_packages(stack(), RELEASE, repository(*lines, *TOOLKITS), against="index")
    assert {kind: shown(packages) for kind, packages in found.fabric.items()} == wanted


def test_toolkits_share_config_packages_no_newer_than_the_stack() -> None:
    found = resolve_packages(stack(), RELEASE, repository(*DRIVER_580, *TOOLKITS), against="lab")
    assert {toolkit: shown(packages) for toolkit, packages in found.toolkits.items()} == {
        "12.8": [
            "cuda-cudart-12-8=12.8.90-1",
            "cuda-toolkit-12-8=12.8.1-1",
            "cuda-toolkit-12-8-config-common=12.8.90-1",
            "cuda-toolkit-12-config-common=12.8.90-1",
            "cuda-toolkit-config-common=13.0.96-1",
        ],
        "13.0": [
            "cuda-cudart-13-0=13.0.96-1",
            "cuda-toolkit-13-0=13.0.2-1",
            "cuda-toolkit-13-0-config-common=13.0.96-1",
            "cuda-toolkit-13-config-common=13.0.96-1",
            "cuda-toolkit-config-common=13.0.96-1",
        ],
    }
    assert found.resolved_against == "lab"


def test_toolkit_from_a_runfile_has_no_packages() -> None:
    text = STACK.replace('default = "13.0"', 'default = "13.0"\n[cuda.runfiles."12.8"]\nfile = "a.run"\nsize_bytes = 1\n'
                         f'sha256 = "{"0" * 64}"')  # fmt: skip
    found = resolve_packages(
        parse_stack(text, source="demo.toml"), RELEASE, repository(*DRIVER_580, *TOOLKITS), against="index"
    )
    assert list(found.toolkits) == ["13.0"]


def excluding(line: str, package: str, other: str) -> str:
    """Return ``line`` with ``Breaks: other`` if it is the line of ``package``."""
    return line.replace(f"{package} [", f"{package} [Breaks: {other};") if line.startswith(package) else line


@pytest.mark.parametrize(
    ("lines", "what", "why"),
    [
        pytest.param(
            [line for line in DRIVER_580 if "580.159.04" not in line.split(" [")[0]][1:] + TOOLKITS,
            "https://apt.example has no packages for driver 580.95.05",
            "wanted one of nvidia-kernel-open-dkms, nvidia-driver-cuda, nvidia-driver-580-open, nvidia-driver-open, found none of them",
            id="no driver",
        ),
        pytest.param(
            [line for line in DRIVER_580 if "580.95.05" not in line.split(" [")[0]] + TOOLKITS,
            "https://apt.example has no packages for driver 580.95.05",
            "wanted one of nvidia-kernel-open-dkms, nvidia-driver-cuda, nvidia-driver-580-open, nvidia-driver-open, found versions 580.159.04",
            id="another version",
        ),
        pytest.param(
            [line for line in DRIVER_580 if "pinning" not in line] + TOOLKITS,
            "https://apt.example has no packages for the pinning package",
            "wanted one of nvidia-driver-pinning-580.95.05, nvidia-driver-pinning-580, found none of them",
            id="no pinning package",
        ),
        pytest.param(
            [*DRIVER_580, *[line for line in TOOLKITS if not line.startswith("cuda-toolkit-12-8 ")]],
            "https://apt.example has no packages for toolkit 12.8",
            "wanted one of cuda-toolkit-12-8, found none of them",
            id="no toolkit",
        ),
        pytest.param(
            [*DRIVER_580, *[line.replace("(>= 13.0.96)", "(>= 13.0.97)") for line in TOOLKITS]],
            "https://apt.example: cuda-toolkit-13-0 13.0.2-1 cannot be installed",
            "wanted cuda-cudart-13-0 (>= 13.0.97), found cuda-cudart-13-0 13.0.96-1",
            id="a dependency that its own repository cannot meet",
        ),
        pytest.param(
            [excluding(line, "libnvidia-compute-580 580.95.05-0ubuntu1", "nvidia-persistenced") for line in DRIVER_580] + TOOLKITS,
            "https://apt.example: nvidia-driver-580-open 580.95.05-0ubuntu1 cannot be installed",
            "wanted libnvidia-compute-580 (= 580.95.05-0ubuntu1), found libnvidia-compute-580 580.95.05-0ubuntu1, which does not go with nvidia-persistenced 580.95.05-0ubuntu1",
            id="a dependency that excludes what is already needed",
        ),
        pytest.param(
            [excluding(line, "nvidia-persistenced 580.95.05-0ubuntu1", "nvidia-driver-580-open") for line in DRIVER_580] + TOOLKITS,
            "https://apt.example: nvidia-driver-580-open 580.95.05-0ubuntu1 does not go with nvidia-persistenced 580.95.05-0ubuntu1",
            "one of them excludes the other, and both are needed by what the stack asks for",
            id="two roots that exclude each other",
        ),
    ],
)  # fmt: skip
def test_set_that_cannot_be_had(lines: list[str], what: str, why: str) -> None:
    with pytest.raises(InputError) as raised:
        resolve_packages(stack(), RELEASE, repository(*lines), against="index")
    assert (raised.value.what, raised.value.why) == (what, why)


@dataclass(frozen=True)
class Key:
    """A signing key made for the tests."""

    home: Path
    fingerprint: str
    public: bytes

    def sign(self, text: str) -> bytes:
        return _gpg(self.home, "--clearsign", text=text)


def _gpg(home: Path, *arguments: str, text: str = "") -> bytes:
    command = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback"]
    return subprocess.run([*command, *arguments], input=text.encode(), capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Key]:
    # The agent's socket has a short path limit, so the home lies directly below the test's base directory.
    home = tmp_path_factory.mktemp("g")
    home.chmod(0o700)
    _gpg(home, "--quick-gen-key", "test <test@example.invalid>", "ed25519", "sign", "never")
    public = _gpg(home, "--armor", "--export")
    yield Key(home, fingerprint_of(public, source="key"), public)
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], capture_output=True, check=False)


def serve(site: Site, key: Key, lines: list[str], *, compressed: bool = True) -> str:
    """Lay a signed flat repository into the site and return the address above it."""
    directory = site.root / "apt" / RELEASE.path
    directory.mkdir(parents=True)
    packages = "\n".join(paragraph(line) for line in lines).encode()
    files = {"Packages": packages, **({"Packages.gz": gzip.compress(packages)} if compressed else {})}
    release = "Origin: NVIDIA\nLabel: NVIDIA CUDA\nSHA256:\n"
    for name, content in files.items():
        (directory / name).write_bytes(content)
        release += f" {hashlib.sha256(content).hexdigest()} {len(content)} {name}\n"
    (directory / "InRelease").write_bytes(key.sign(release))
    (directory / "3bf863cc.pub").write_bytes(key.public)
    return f"{site.url}/apt"


@pytest.mark.parametrize("compressed", [True, False], ids=["Packages.gz", "Packages"])
def test_signed_repository_becomes_a_packages_part(site: Site, key: Key, compressed: bool) -> None:
    url = serve(site, key, [*DRIVER_580, *TOOLKITS], compressed=compressed)
    found = lock_packages(stack(), ["debian12-x86_64"], url=url, against="index", fingerprint=key.fingerprint)
    assert len(found["debian12-x86_64"].driver) == 7


def test_repository_of_another_key_is_refused(site: Site, key: Key) -> None:
    url = serve(site, key, DRIVER_580)
    with pytest.raises(InputError) as raised:
        lock_packages(stack(), ["debian12-x86_64"], url=url, against="index")
    assert raised.value.what == f"{url}/debian12/x86_64/InRelease: the signature does not hold"
    assert raised.value.why == f"wanted key EB693B3035CD5710E231E123A4B469963BF863CC, found {key.fingerprint}"


def test_index_that_was_changed_after_signing_is_refused(site: Site, key: Key) -> None:
    url = serve(site, key, DRIVER_580, compressed=False)
    packages = site.root / "apt" / RELEASE.path / "Packages"
    packages.write_bytes(packages.read_bytes().replace(b"nvidia-modprobe", b"nvidia-modprobX"))
    with pytest.raises(InputError) as raised:
        lock_packages(stack(), ["debian12-x86_64"], url=url, against="index", fingerprint=key.fingerprint)
    assert raised.value.what == f"{url}/debian12/x86_64/Packages is not what its Release file signed"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda signed: signed.replace(b"Origin: NVIDIA", b"Origin: Nvidia"), id="changed"),
        pytest.param(lambda signed: b"Origin: NVIDIA\n", id="not signed"),
        pytest.param(lambda signed: b"", id="empty"),
    ],
)
def test_signature_that_does_not_hold(key: Key, change: object) -> None:
    assert callable(change)
    with pytest.raises(InputError) as raised:
        verified(change(key.sign("Origin: NVIDIA\n")), key=key.public, fingerprint=key.fingerprint, source="InRelease")
    assert raised.value.what == "InRelease: the signature does not hold"
    assert str(raised.value.why).startswith(f"wanted key {key.fingerprint}, found ")


def test_only_what_was_signed_is_read(key: Key) -> None:
    signed = b"Origin: other\n\n" + key.sign("Origin: NVIDIA\n") + b"\nSuite: other\n"
    try:
        text = verified(signed, key=key.public, fingerprint=key.fingerprint, source="InRelease")
    except InputError:
        return  # a gpg that refuses text around the signed part is as good
    assert text == "Origin: NVIDIA\n"


def test_address_without_a_repository(site: Site, key: Key) -> None:
    with http.client() as client, pytest.raises(BringupError) as raised:
        read_repository(client, f"{site.url}/nothing", architecture="amd64", key=key.public, fingerprint="")
    assert raised.value.what == f"no apt repository at {site.url}/nothing"


def test_unknown_release_lists_the_known_ones(site: Site) -> None:
    with pytest.raises(InputError) as raised:
        lock_packages(stack(), ["fedora42-x86_64"], url=site.url, against="index")
    assert raised.value.what == "not a release: 'fedora42-x86_64'"
    assert raised.value.hint == f"name one of {', '.join(releases())}"


@pytest.mark.parametrize(
    ("name", "path", "architecture"),
    [
        ("debian12-x86_64", "debian12/x86_64", "amd64"),
        ("ubuntu2404-aarch64", "ubuntu2404/sbsa", "arm64"),
    ],
)
def test_release_knows_where_its_repository_lies(name: str, path: str, architecture: str) -> None:
    assert (releases()[name].path, releases()[name].architecture) == (path, architecture)


def test_file_that_is_no_key() -> None:
    with pytest.raises(InputError) as raised:
        fingerprint_of(b"nothing", source="key.asc")
    assert raised.value.what == "key.asc holds no public key"
