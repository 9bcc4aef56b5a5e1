"""The package mirror as apt sees it: signed, served, resolved; NVRTC's wheels are stand-ins here."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from bringup.errors import LabError
from bringup.lab import debs_recipe, mirror, wheels, wheels_pack
from bringup.lab.mirror import Mirror, Server

# What the base image brings; apt only needs to know that it is there.
INSTALLED = ("dkms", "python3", "libc6", "gcc", "make", "dpkg-dev")


def seed(cache: Path) -> None:
    """Lay stand-ins for the NVRTC wheels where fetched ones would lie."""
    for toolkit in debs_recipe.variants()["toolkit"]:
        folder = cache / "real" / toolkit["nvrtc_sha256"]
        folder.mkdir(parents=True)
        place = toolkit["nvrtc_directory"]
        with zipfile.ZipFile(folder / "nvrtc.whl", "w") as archive:
            for name in (
                f"lib/libnvrtc.so.{toolkit['major']}",
                f"lib/libnvrtc-builtins.so.{toolkit['release']}",
                "include/nvrtc.h",
            ):
                archive.writestr(f"{place}/{name}", "stand-in")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mirror, int]:
    """Return a mirror built for a free port of this machine, and that port."""
    root = tmp_path_factory.mktemp("mirror")
    seed(root / "cache")
    kept = Path(os.environ.get("BRINGUP_TEST_CACHE") or "/var/cache/bringup-tests")
    if os.geteuid() == 0:
        with mirror.hold_cache(mirror.cache_dir(kept / "lab")) as shared:
            done = wheels.build(shared, lambda _: None)
        (root / "cache" / done.name).symlink_to(done)
    port = free_port()
    return mirror.build(root / "state", url=f"http://127.0.0.1:{port}", cache=root / "cache"), port


def cache_of(found: Mirror) -> Path:
    return found.root.parent.parent / "cache"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def served(built: tuple[Mirror, int]) -> Iterator[tuple[Mirror, Server]]:
    found, port = built
    server = mirror.serve(found, "127.0.0.1", port)
    yield found, server
    server.stop()


class Apt:
    """An apt of its own: nothing of this machine's settings, sources or packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("etc/sources", "etc/preferences", "lists/partial", "cache/archives/partial", "dpkg"):
            (root / name).mkdir(parents=True)
        paragraphs = [
            f"Package: {name}\nStatus: install ok installed\nArchitecture: amd64\nVersion: 99\n"
            "Maintainer: nobody\nDescription: there\n"
            for name in INSTALLED
        ]
        (root / "dpkg/status").write_text("\n".join(paragraphs))
        (root / "apt.conf").write_text(
            f'Dir::Etc::parts "{root}/etc";\nDir::Etc::main "{root}/none";\n'
            f'Dir::Etc::sourcelist "{root}/none";\nDir::Etc::sourceparts "{root}/etc/sources";\n'
            f'Dir::Etc::preferences "{root}/none";\nDir::Etc::preferencesparts "{root}/etc/preferences";\n'
            f'Dir::State "{root}";\nDir::State::lists "{root}/lists";\nDir::State::status "{root}/dpkg/status";\n'
            f'Dir::Cache "{root}/cache";\nAPT::Architecture "amd64";\nAPT::Sandbox::User "root";\n'
            'Acquire::Languages "none";\nAPT::Update::Error-Mode "any";\nDebug::NoLocking "true";\n'
        )

    def add(self, name: str, url: str, key: Path) -> None:
        (self.root / f"etc/sources/{name}.sources").write_text(
            f"Types: deb\nURIs: {url}\nSuites: ./\nSigned-By: {key}\n"
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        environment = {"PATH": os.environ["PATH"], "APT_CONFIG": str(self.root / "apt.conf"), "LC_ALL": "C"}
        done = subprocess.run([*arguments], env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def candidate(self, name: str) -> str:
        found = re.search(r"Candidate: (\S+)", self.run("apt-cache", "policy", name)[1])
        return found[1] if found else "none"

    def would_install(self, *names: str) -> dict[str, str]:
        status, output = self.run("apt-get", "-s", "-o", "APT::Install-Recommends=false", "install", *names)
        assert status == 0, output
        return dict(re.findall(r"^Inst (\S+) \((\S+)", output, re.M))


@pytest.fixture
def apt(served: tuple[Mirror, Server], tmp_path: Path) -> Apt:
    found, _ = served
    made = Apt(tmp_path / "apt")
    made.add("nvidia", found.apt_url, found.key_file)
    made.add("distribution", found.distro_url, found.key_file)
    status, output = made.run("apt-get", "update")
    assert status == 0, output
    return made


def pin(apt: Apt, pinned: str) -> None:
    """Lay what the pinning package would."""
    workshop = debs_recipe.Workshop(debs_recipe.Context("debian12", "6.1", ""), lambda _: Path(), Path())
    for each in debs_recipe.render(debs_recipe.Context("debian12", "6.1", "")):
        if each.recipe.name == f"nvidia-driver-pinning-{pinned}":
            (text,) = workshop.deb(each).files.values()
            assert isinstance(text, bytes)
            (apt.root / "etc/preferences/pinning").write_bytes(text)


@pytest.mark.parametrize(
    ("pinned", "name", "version"),
    [
        pytest.param(None, "nvidia-open", "590.48.01-0lab1", id="unpinned: the newest branch"),
        pytest.param(None, "libnvidia-compute-580", "580.159.04-0lab1", id="unpinned: the branch's last"),
        pytest.param("580", "nvidia-open", "580.159.04-0lab1", id="branch"),
        pytest.param("580.95.05", "nvidia-open", "580.95.05-0lab1", id="release"),
        pytest.param("580.95.05", "libnvidia-compute-580", "580.95.05-0lab1", id="release: libraries"),
        pytest.param("580.95.05", "nvidia-fabricmanager", "580.95.05-1lab1", id="release: fabric manager"),
        pytest.param("580.95.05", "libnvsdm", "580.95.05-1lab1", id="release: libnvsdm"),
        pytest.param("580.95.05", "nvlsm", "2025.06.11-1lab1", id="nvlsm has a version of its own"),
        pytest.param(None, "cuda-toolkit-config-common", "13.0.96-1lab1", id="config-common floats"),
        pytest.param(None, "nvidia-kernel-dkms", "535.261.03-1lab1", id="the distribution's"),
    ],
)
def test_candidates(apt: Apt, pinned: str | None, name: str, version: str) -> None:
    if pinned:
        pin(apt, pinned)
    assert apt.candidate(name) == version


def test_pinned_family_comes_as_one_set(apt: Apt) -> None:
    pin(apt, "580.95.05")
    found = apt.would_install("nvidia-open")
    assert set(found.values()) == {"580.95.05-0lab1", "580.95.05-1lab1"}
    assert sorted(found) == [
        *("libnvidia-cfg1-580", "libnvidia-common-580", "libnvidia-compute-580", "libnvidia-decode-580"),
        *("libnvidia-encode-580", "libnvidia-extra-580", "libnvidia-fbc1-580", "libnvidia-gl-580"),
        *("nvidia-compute-utils-580", "nvidia-dkms-580-open", "nvidia-driver-580-open", "nvidia-firmware-580"),
        *("nvidia-kernel-common-580", "nvidia-kernel-source-580-open", "nvidia-modprobe", "nvidia-open"),
        *("nvidia-open-580", "nvidia-persistenced", "nvidia-utils-580", "xserver-xorg-video-nvidia-580"),
    ]


def test_flavours_exclude_each_other(apt: Apt) -> None:
    status, output = apt.run("apt-get", "-s", "install", "nvidia-driver-580", "nvidia-driver-580-open")
    assert status == 100
    assert "you have held broken packages" in output
    assert "\nInst " not in output


def test_a_virtual_name_takes_no_version(apt: Apt) -> None:
    status, output = apt.run("apt-get", "-s", "install", "nvidia-fabricmanager-580=580.95.05-1lab1")
    assert status == 100
    assert "nvidia-fabricmanager-580" in output


def test_two_toolkits_side_by_side(apt: Apt) -> None:
    found = apt.would_install("cuda-toolkit-12-8", "cuda-toolkit-13-0")
    assert found["cuda-nvrtc-12-8"] == "12.8.93-1lab1"
    assert found["cuda-nvrtc-13-0"] == "13.0.88-1lab1"
    assert found["cuda-toolkit-config-common"] == "13.0.96-1lab1"
    assert not [name for name in found if name.startswith(("nvidia-", "libnvidia-"))]


def test_nvrtc_alone_brings_no_loader_entry(apt: Apt) -> None:
    assert apt.would_install("cuda-nvrtc-13-0") == {"cuda-nvrtc-13-0": "13.0.88-1lab1"}


def test_origins_differ(apt: Apt) -> None:
    _, output = apt.run("apt-cache", "policy")
    assert "o=NVIDIA,l=NVIDIA CUDA" in output
    assert "o=Debian,l=Debian" in output


def test_headers_of_the_running_kernel(apt: Apt) -> None:
    assert f"linux-headers-{os.uname().release}" in apt.would_install("linux-headers-amd64")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(
            lambda text: text.replace("Label: NVIDIA CUDA", "Label: Somebody"), "BADSIG", id="changed after signing"
        ),
        pytest.param(lambda text: re.sub(r"-----BEGIN PGP SIG.*", "", text, flags=re.S), "", id="no signature"),
    ],
)
def test_a_bad_signature_fails_the_update(
    built: tuple[Mirror, int], tmp_path: Path, spoil: Callable[[str], str], message: str
) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(built[0].apt, copy)
    release = copy / "InRelease"
    release.write_text(spoil(release.read_text()))
    (copy / "Release.gpg").unlink()
    (copy / "Release").unlink()
    apt = Apt(tmp_path / "apt")
    apt.add("nvidia", f"file:{copy}/", built[0].key_file)
    status, output = apt.run("apt-get", "update")
    assert status == 100
    assert message in output


@pytest.mark.parametrize(
    ("path", "status"),
    [
        pytest.param("apt/debian12/x86_64/InRelease", 200, id="repository"),
        pytest.param("wheels/pytorch-cu130/simple/torch/", 200, id="index page"),
        pytest.param("wheels/default/simple/no-such-thing/", 404, id="unknown project"),
        pytest.param("keys/bringup-lab.gpg", 200, id="public key"),
        pytest.param("keys/secret.asc", 403, id="secret key"),
        pytest.param("nginx/nginx.conf", 403, id="the server's own files"),
    ],
)
def test_server_shows(served: tuple[Mirror, Server], path: str, status: int) -> None:
    assert httpx.get(f"{served[1].url}/{path}", trust_env=False).status_code == status


def test_server_answers_ranges(served: tuple[Mirror, Server]) -> None:
    name = "wheels/sglang-cu130/simple/sgl-kernel/sgl_kernel-0.3.21+cu130-0lab-cp310-abi3-manylinux2014_x86_64.whl"
    answer = httpx.get(f"{served[1].url}/{name}", headers={"Range": "bytes=0-3"}, trust_env=False)
    assert (answer.status_code, answer.content) == (206, b"PK\x03\x04")


def test_secret_key_is_closed(built: tuple[Mirror, int]) -> None:
    assert (built[0].root / "keys/secret.asc").stat().st_mode & 0o777 == 0o600


def test_a_taken_address_is_refused(served: tuple[Mirror, Server], tmp_path: Path) -> None:
    found, server = served
    other = tmp_path / "mirror"
    other.mkdir()
    port = int(server.url.rpartition(":")[2])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LabError, match="package mirror does not answer on") as caught:
            mirror.serve(
                Mirror(other, found.url, "bookworm", "debian12", found.key_file, "", ""),
                "127.0.0.1",
                taken.getsockname()[1],
            )
    assert "Address already in use" in str(caught.value.why)
    assert httpx.get(f"http://127.0.0.1:{port}/apt/debian12/x86_64/InRelease", trust_env=False).status_code == 200


def test_stopping_ends_the_server_and_may_be_repeated(built: tuple[Mirror, int], tmp_path: Path) -> None:
    port = free_port()
    root = tmp_path / "mirror"
    root.mkdir()
    (root / "hello").write_text("there")
    found = built[0]
    server = mirror.serve(Mirror(root, found.url, "bookworm", "debian12", found.key_file, "", ""), "127.0.0.1", port)
    assert httpx.get(f"{server.url}/hello", trust_env=False).text == "there"
    server.stop()
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/hello", trust_env=False)


def test_stop_leaves_other_processes_alone() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        mirror.stop(sleeper.pid)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_built_mirror_is_only_checked(built: tuple[Mirror, int]) -> None:
    found, _ = built
    before = (found.apt / "InRelease").stat().st_mtime_ns
    assert mirror.build(found.root.parent, url=found.url, cache=cache_of(found), progress=pytest.fail) == found
    assert (found.apt / "InRelease").stat().st_mtime_ns == before


def test_another_url_packs_one_package_again_and_keeps_what_was_fetched(
    built: tuple[Mirror, int], tmp_path: Path
) -> None:
    said: list[str] = []
    cache = cache_of(built[0])
    state = tmp_path / "state"
    first = mirror.build(state, url="http://10.9.9.1:8087", cache=cache, progress=said.append)
    made = wheels_pack.pack(tmp_path, name="fetched", version="1.0", tag="py3-none-any", files={})
    wheels.add(first.root / "wheels/default", [made.rename(tmp_path / "fetched-1.0-py3-none-any.whl")])
    said.clear()
    second = mirror.build(state, url="http://10.9.9.2:8087", cache=cache, progress=said.append)
    assert said[0] == "packing 1 packages"
    assert second.key_fingerprint == first.key_fingerprint
    assert (second.root / "wheels/default/simple/fetched/fetched-1.0-py3-none-any.whl").exists()
    assert "fetched-1.0" in (second.root / "wheels/default/simple/fetched/index.html").read_text()


def test_unknown_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no mirror for sid"):
        mirror.build(tmp_path, codename="sid")


@pytest.mark.lab
def test_real_nvrtc_compiles(tmp_path: Path) -> None:
    """The packages carry the real libraries: unpacked anywhere, they compile for Blackwell without a GPU."""
    kept = Path(os.environ.get("BRINGUP_TEST_CACHE") or "/var/cache/bringup-tests")
    # A state directory apart from that of the tests' lab, on the same cache.
    found = mirror.build(kept / "mirror-only")
    code = (
        "import ctypes, sys\n"
        "lib = ctypes.CDLL(sys.argv[1]); program = ctypes.c_void_p(); size = ctypes.c_size_t()\n"
        "source = b'extern \"C\" __global__ void k(float *x) { x[0] = 1; }'\n"
        "assert lib.nvrtcCreateProgram(ctypes.byref(program), source, b'k.cu', 0, None, None) == 0\n"
        "options = (ctypes.c_char_p * 1)(b'--gpu-architecture=sm_120')\n"
        "assert lib.nvrtcCompileProgram(program, 1, options) == 0\n"
        "assert lib.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0\n"
        "print(size.value > 1000)\n"
    )
    for dash, name in (("12-8", "libnvrtc.so.12"), ("13-0", "libnvrtc.so.13")):
        (deb,) = found.apt.glob(f"cuda-nvrtc-{dash}_*.deb")
        root = tmp_path / dash
        subprocess.run(["dpkg-deb", "-x", str(deb), str(root)], check=True)
        (library,) = root.glob(f"usr/local/cuda-*/targets/x86_64-linux/lib/{name}")
        environment = {"LD_LIBRARY_PATH": str(library.parent), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            ["python3", "-c", code, str(library)], env=environment, capture_output=True, text=True, check=False
        )
        assert (done.stdout, done.stderr) == ("True\n", "")
