"""bringup's own wheel, installed beside what it says it needs and nothing else, at work from another directory."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
import uv
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bringup import paths
from tests.e2e.rig import Rig

INVENTORY = """
from bringup.lab.record import inventory
hosts, data = inventory()
lab = (hosts, {**data, "bringup_stack": "lab"})
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as the build front end makes it from this checkout."""
    directory = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(paths.root())],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and the distributions that it requires, those linked from our own."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python3.*/site-packages")
    for required in closure("bringup"):
        link(required, site, home / "bin")
    subprocess.run(
        [
            *(uv.find_uv_bin(), "pip", "install", "--offline", "--no-config", "--no-deps", "-q"),
            *("--python", str(home / "bin" / "python"), str(wheel)),
        ],
        check=True,
        timeout=60,
    )
    return home


def closure(name: str) -> Iterator[Distribution]:
    """Yield everything that a distribution requires on this machine, without extras of its own."""
    seen, waiting = {canonicalize_name(name)}, [Requirement(text) for text in distribution(name).requires or ()]
    while waiting:
        requirement = waiting.pop()
        key = canonicalize_name(requirement.name)
        if key in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        found = distribution(requirement.name)
        for text in found.requires or ():
            more = Requirement(text)
            if more.marker is None or any(
                more.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                more.marker = None
                waiting.append(more)
        yield found


def link(found: Distribution, site: Path, scripts: Path) -> None:
    """Link the files of a distribution into an environment, its programs too."""
    for file in found.files or ():
        top, target = file.parts[0], Path(str(found.locate_file(file))).resolve()
        if file.parts[:-1] == ("..", "..", "..", "bin"):
            place, source = scripts / file.name, target
        elif top == ".." or top == "__pycache__":
            continue
        else:
            place, source = site / top, Path(str(found.locate_file(top))).resolve()
        if not place.exists():
            place.symlink_to(source)


def run(installed: Path, directory: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment in another directory, with nothing of this checkout in its variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "BRINGUP"))}
    return subprocess.run(
        [str(installed / "bin" / words[0]), *words[1:]],
        cwd=directory,
        env={**environment, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_carries_what_reaches_a_host_and_no_lock_of_a_lab(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {
        "bringup/_root/deploy.py",
        "bringup/_root/files/host_probe.py",
        "bringup/_root/files/run",
        "bringup/_root/inventory/stacks/sglang-cu130.toml",
        "bringup/_root/inventory/stacks/sglang-cu130.lock.toml",
        "tasks/environment.py",
    } <= set(names)
    assert [name for name in names if name.startswith("tests/") or "__pycache__" in name] == []
    assert [name for name in names if name.endswith(("/lab.lock.toml", "/sglang-0.5.9-cu130.lock.toml"))] == []


def test_it_is_the_installed_one_that_runs(installed: Path, tmp_path: Path) -> None:
    code = "import bringup, tasks, bringup.paths as p; print(bringup.__file__, tasks.__file__, p.root(), sep='\\n')"
    done = run(installed, tmp_path, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    site = str(next(installed.glob("lib/python3.*/site-packages")))
    assert [line.startswith(site) for line in done.stdout.splitlines()] == [True, True, True]


@pytest.mark.parametrize("command", [[], ["lab"]], ids=["all commands", "lab"])
def test_the_command_line_starts(installed: Path, tmp_path: Path, command: list[str]) -> None:
    done = run(installed, tmp_path, "bringup", *command, "--help")
    assert done.returncode == 0, done.stderr


@pytest.mark.lab
def test_it_plans_from_another_directory(installed: Path, tmp_path: Path, verified: Rig) -> None:
    inventory = tmp_path / "here.py"
    inventory.write_text(INVENTORY)
    variables = {
        "BRINGUP_LAB_STATE": str(verified.lab.layout.state_dir),
        "BRINGUP_STATE": str(tmp_path / "state"),
    }
    done = run(installed, tmp_path, "bringup", "plan", "here.py", "--limit", "gpu-01", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu-01  ok" in done.stdout
