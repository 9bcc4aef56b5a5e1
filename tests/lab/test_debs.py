"""The lab's packages: what their recipes say, and what dpkg reads from the packed files."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

import pytest

from bringup.lab import debs, debs_recipe
from bringup.lab.debs import Deb

CONTEXT = debs_recipe.Context(release="debian12", kernel="6.1.0-40-amd64", url="http://10.0.0.1:8087", key=b"key")

# What a lab host has from its base image.
INSTALLED = {"python3", "libc6", "dkms", "gcc", "make", "dpkg-dev"}


def recipes() -> dict[tuple[str, str], debs_recipe.Recipe]:
    return {(each.recipe.name, each.recipe.version): each.recipe for each in debs_recipe.render(CONTEXT)}


def recipe(name: str, version: str) -> debs_recipe.Recipe:
    return recipes()[name, version]


@pytest.mark.parametrize(
    ("name", "version", "depends"),
    [
        pytest.param("cuda-nvrtc-13-0", "13.0.88-1lab1", (), id="nvrtc depends on nothing"),
        pytest.param(
            "cuda-cudart-13-0",
            "13.0.96-1lab1",
            (
                "cuda-toolkit-config-common | cuda-cudart-11-2",
                "cuda-toolkit-13-config-common | cuda-cudart-11-2",
                "cuda-toolkit-13-0-config-common",
            ),
            id="cudart floats",
        ),
        pytest.param(
            "libnvjitlink-12-8",
            "12.8.93-1lab1",
            ("cuda-toolkit-config-common", "cuda-toolkit-12-config-common", "cuda-toolkit-12-8-config-common"),
            id="nvjitlink without the alternative",
        ),
        pytest.param(
            "cuda-nvcc-13-0",
            "13.0.88-1lab1",
            ("build-essential", "cuda-cudart-dev-13-0", "libnvvm-13-0", "cuda-crt-13-0"),
            id="nvcc 13.0",
        ),
        pytest.param(
            "cuda-nvcc-12-8",
            "12.8.93-1lab1",
            ("build-essential", "cuda-cudart-dev-12-8", "cuda-nvvm-12-8", "cuda-crt-12-8"),
            id="nvcc 12.8",
        ),
        pytest.param(
            "libnvidia-gl-580",
            "580.95.05-0lab1",
            ("libnvidia-common-580", "libnvidia-compute-580 (= 580.95.05-0lab1)"),
            id="common has no version",
        ),
        pytest.param("nvidia-open", "580.95.05-0lab1", ("nvidia-open-580 (>= 580.95.05)",), id="nvidia-open floats"),
        pytest.param("nvidia-open", "590.48.01-0lab1", ("nvidia-driver-open (>= 590.48.01)",), id="no suffix from 590"),
    ],
)
def test_depends(name: str, version: str, depends: tuple[str, ...]) -> None:
    assert recipe(name, version).depends == depends


@pytest.mark.parametrize(
    ("name", "version", "path", "text"),
    [
        pytest.param(
            "cuda-toolkit-config-common",
            "13.0.96-1lab1",
            "/etc/ld.so.conf.d/000_cuda.conf",
            "/usr/local/cuda/targets/x86_64-linux/lib\n",
            id="000_cuda follows the moving link",
        ),
        pytest.param(
            "cuda-toolkit-13-config-common",
            "13.0.96-1lab1",
            "/etc/ld.so.conf.d/987_cuda-13.conf",
            "/usr/local/cuda-13/targets/x86_64-linux/lib\n",
            id="987 for 13",
        ),
        pytest.param(
            "cuda-toolkit-12-config-common",
            "12.8.90-1lab1",
            "/etc/ld.so.conf.d/988_cuda-12.conf",
            "/usr/local/cuda-12/targets/x86_64-linux/lib\n",
            id="988 for 12",
        ),
        pytest.param(
            "libcufile-13-0",
            "1.15.1.6-1lab1",
            "/etc/ld.so.conf.d/gds-13-0.conf",
            "/usr/local/cuda-13.0/targets/x86_64-linux/lib\n",
            id="gds alone is versioned",
        ),
        pytest.param(
            "cuda-keyring",
            "1.1-1lab1",
            "/etc/apt/sources.list.d/cuda-debian12-x86_64.list",
            "deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg]"
            " http://10.0.0.1:8087/apt/debian12/x86_64/ /\n",
            id="keyring names the mirror",
        ),
    ],
)
def test_configuration(name: str, version: str, path: str, text: str) -> None:
    assert recipe(name, version).text[path] == text


def test_every_dependency_is_in_the_mirror_or_the_base_image() -> None:
    present = INSTALLED.union(
        *({each.name, *(provided.split()[0] for provided in each.provides)} for each in recipes().values())
    )
    missing = {
        f"{each.name}: {dependency}"
        for each in recipes().values()
        for dependency in each.depends
        if not {alternative.split()[0] for alternative in dependency.split("|")} & present
    }
    assert missing == set()


def test_every_version_is_labelled() -> None:
    assert [each for each in recipes() if not re.search(r"lab1$", each[1])] == []


def test_families_of_one_branch_differ_in_flavour_only() -> None:
    names = {name for name, version in recipes() if version.startswith("580.95.05")}
    assert {"nvidia-driver-580", "nvidia-driver-580-open", "nvidia-dkms-580", "nvidia-dkms-580-open"} <= names
    assert "libnvidia-compute-580-open" not in names
    assert recipe("nvidia-dkms-580", "580.95.05-0lab1").conflicts == ("nvidia-dkms-kernel",)
    assert recipe("nvidia-dkms-580-open", "580.95.05-0lab1").provides == ("nvidia-dkms-kernel",)


def test_unsuffixed_packages_replace_the_suffixed() -> None:
    assert recipe("nvidia-utils", "590.48.01-0lab1").conflicts == ("nvidia-utils-580",)
    assert recipe("nvidia-dkms-open", "590.48.01-0lab1").replaces == ("nvidia-dkms-580-open",)


def test_fabric_names() -> None:
    found = recipe("nvidia-fabricmanager", "580.95.05-1lab1")
    assert found.provides == ("nvidia-fabricmanager-580", "nvidia-fabricmanager-api")
    names = {name for name, _ in recipes()}
    assert "libnvsdm" in names
    assert "nvlsm" in names
    assert "libnvsdm-580" not in names


def sample() -> Deb:
    return Deb(
        name="sample",
        version="1:2.0-1lab1",
        architecture="all",
        section="libs",
        description="a sample",
        relations={"Depends": ("libc6 (>= 2.27)", "python3"), "Conflicts": ("other",)},
        files={"/etc/sample.conf": b"a = 1\n", "/usr/bin/sample": b"#!/bin/sh\n"},
        links={"/usr/lib/libsample.so": "libsample.so.1"},
        executables=frozenset({"/usr/bin/sample"}),
        scripts={"postinst": "#!/bin/sh\nset -e\n"},
    )


def dpkg_deb(*arguments: str) -> str:
    return subprocess.run(["dpkg-deb", *arguments], capture_output=True, text=True, check=True).stdout


def test_dpkg_reads_control_and_scripts(tmp_path: Path) -> None:
    debs.pack(sample(), tmp_path)
    path = str(tmp_path / "sample_2.0-1lab1_all.deb")
    assert dpkg_deb("--field", path, "Package", "Version", "Depends", "Conflicts") == (
        "Package: sample\nVersion: 1:2.0-1lab1\nDepends: libc6 (>= 2.27), python3\nConflicts: other\n"
    )
    assert dpkg_deb("--info", path, "conffiles") == "/etc/sample.conf\n"
    assert dpkg_deb("--info", path, "postinst") == "#!/bin/sh\nset -e\n"


def test_dpkg_reads_files_modes_and_links(tmp_path: Path) -> None:
    debs.pack(sample(), tmp_path)
    listing = dpkg_deb("--contents", str(tmp_path / "sample_2.0-1lab1_all.deb"))
    found = {line.split(maxsplit=5)[5]: line.split()[0] for line in listing.splitlines()}
    assert found == {
        "./": "drwxr-xr-x",
        "./etc/": "drwxr-xr-x",
        "./etc/sample.conf": "-rw-r--r--",
        "./usr/": "drwxr-xr-x",
        "./usr/bin/": "drwxr-xr-x",
        "./usr/bin/sample": "-rwxr-xr-x",
        "./usr/lib/": "drwxr-xr-x",
        "./usr/lib/libsample.so -> libsample.so.1": "lrwxrwxrwx",
    }


@pytest.mark.parametrize("size_bytes", [pytest.param(10, id="small: gzip"), pytest.param(3 << 20, id="large: zstd")])
def test_packing_is_reproducible_and_readable(tmp_path: Path, size_bytes: int) -> None:
    content = tmp_path / "content"
    content.write_bytes(bytes(range(256)) * (size_bytes // 256 + 1))
    deb = Deb("big", "1-1lab1", "amd64", "libs", "big", files={"/usr/lib/big": content})
    sums = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        entry = debs.pack(deb, tmp_path / name)
        sums.append(hashlib.sha256((tmp_path / name / entry.file_name).read_bytes()).hexdigest())
    assert sums[0] == sums[1]
    dpkg_deb("--extract", str(tmp_path / "one/big_1-1lab1_amd64.deb"), str(tmp_path / "root"))
    assert (tmp_path / "root/usr/lib/big").read_bytes() == content.read_bytes()


def test_index_names_every_file_with_its_hash(tmp_path: Path) -> None:
    entry = debs.pack(sample(), tmp_path)
    debs.write_index(tmp_path, [entry], origin="NVIDIA", label="NVIDIA CUDA")
    packages = (tmp_path / "Packages").read_text()
    digest = hashlib.sha256((tmp_path / entry.file_name).read_bytes()).hexdigest()
    assert f"Filename: ./{entry.file_name}\n" in packages
    assert f"SHA256: {digest}\n" in packages
    release = (tmp_path / "Release").read_text()
    assert release.startswith("Origin: NVIDIA\nLabel: NVIDIA CUDA\n")
    assert hashlib.sha256(packages.encode()).hexdigest() in release


def test_module_source_carries_flavour_and_version() -> None:
    workshop = debs_recipe.Workshop(CONTEXT, lambda _: Path(), Path())
    texts = {}
    for each in debs_recipe.render(CONTEXT):
        if each.recipe.name.startswith("nvidia-kernel-source-580") and "580.95.05" in each.recipe.version:
            content = workshop.deb(each).files["/usr/src/nvidia-580.95.05/nvidia.c"]
            assert isinstance(content, bytes)
            texts[each.recipe.name] = content.decode()
    assert 'MODULE_LICENSE("Dual MIT/GPL");' in texts["nvidia-kernel-source-580-open"]
    assert 'MODULE_LICENSE("NVIDIA");' in texts["nvidia-kernel-source-580"]
    assert all('MODULE_VERSION("580.95.05");' in text for text in texts.values())


def test_alternatives_have_the_release_as_priority() -> None:
    workshop = debs_recipe.Workshop(CONTEXT, lambda _: Path(), Path())
    scripts = {
        each.recipe.name: workshop.deb(each).scripts["postinst"]
        for each in debs_recipe.render(CONTEXT)
        if re.fullmatch(r"cuda-toolkit-1\d-\d-config-common", each.recipe.name)
    }
    assert "--install /usr/local/cuda cuda /usr/local/cuda-13.0 130\n" in scripts["cuda-toolkit-13-0-config-common"]
    assert (
        "--install /usr/local/cuda-12 cuda-12 /usr/local/cuda-12.8 128\n" in scripts["cuda-toolkit-12-8-config-common"]
    )


@pytest.mark.parametrize(
    ("flavour", "license_text"),
    [pytest.param("open", "Dual MIT/GPL", id="open"), pytest.param("closed", "NVIDIA", id="closed")],
)
def test_headers_build_a_module_that_modinfo_reads(tmp_path: Path, flavour: str, license_text: str) -> None:
    workshop = debs_recipe.Workshop(CONTEXT, lambda _: Path(), Path())
    suffix = "-open" if flavour == "open" else ""
    wanted = {f"nvidia-kernel-source-580{suffix}", "linux-headers-6.1.0-40-amd64"}
    for each in debs_recipe.render(CONTEXT):
        if each.recipe.name in wanted and "580.159" not in each.recipe.version:
            for path, content in workshop.deb(each).files.items():
                place = tmp_path / path.lstrip("/")
                place.parent.mkdir(parents=True, exist_ok=True)
                assert isinstance(content, bytes)
                place.write_bytes(content)
    headers = tmp_path / "usr/src/linux-headers-6.1.0-40-amd64"
    makefile = headers / "Makefile"
    makefile.write_text(makefile.read_text().replace("/usr/src/linux-headers-6.1.0-40-amd64", str(headers)))
    source = tmp_path / "usr/src/nvidia-580.95.05"
    subprocess.run(["make", "-s", "-C", str(headers), f"M={source}", "modules"], check=True)
    built = sorted(path.name for path in source.glob("*.ko"))
    assert built == ["nvidia-drm.ko", "nvidia-modeset.ko", "nvidia-peermem.ko", "nvidia-uvm.ko", "nvidia.ko"]
    module = (source / "nvidia.ko").read_bytes()
    assert module[:4] == b"\x7fELF"
    assert b"\0version=580.95.05\0" in module
    assert f"\0license={license_text}\0".encode() in module
    assert b"vermagic=6.1.0-40-amd64 SMP preempt mod_unload " in module
