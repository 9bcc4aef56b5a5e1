"""The launcher: one resolution of ``current``, the service variables, a cache per environment and user."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from bringup import paths

RUN = paths.files() / "run"
USER = pwd.getpwuid(os.getuid()).pw_name


class Home:
    """A pretended host with two environments; the first one serves."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.envs = [root / "opt/envs/aaaaaaaaaaaa-1", root / "opt/envs/bbbbbbbbbbbb-2"]
        for env in self.envs:
            (env / "bin").mkdir(parents=True)
            (env / "bin/python").symlink_to(sys.executable)
            tool = env / "bin/tool"
            tool.write_text('#!/bin/sh\necho "$0"\n')
            tool.chmod(0o755)
            (env / ".bringup-env.json").write_text("{}")
        self.switch(0)

    def switch(self, number: int) -> None:
        link = self.root / "opt/current"
        link.unlink(missing_ok=True)
        link.symlink_to(self.envs[number])

    def run(self, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        places = {
            "BRINGUP_HOME": str(self.root / "opt"),
            "BRINGUP_SERVICE_FILE": str(self.root / "service.env"),
            "BRINGUP_JIT_CACHE": str(self.root / "jit"),
            "PATH": os.environ["PATH"],
        }
        return subprocess.run(
            ["sh", RUN, *argv], env={**places, **variables}, capture_output=True, text=True, check=False, timeout=30
        )

    def variable(self, name: str, **variables: str) -> str:
        return self.run("sh", "-c", f'printf %s "${{{name}-unset}}"', **variables).stdout


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.mark.parametrize("command", ["tool", "{home}/current/bin/tool", "{env}/bin/tool"])
def test_runs_by_the_final_path(home: Home, command: str) -> None:
    done = home.run(command.format(home=home.root / "opt", env=home.envs[0]))
    assert done.stdout.strip() == str(home.envs[0] / "bin/tool")


def test_follows_current_for_the_next_process(home: Home) -> None:
    home.switch(1)
    assert home.run("tool").stdout.strip() == str(home.envs[1] / "bin/tool")


def test_a_running_process_stays_in_its_environment(home: Home) -> None:
    program = f"ln -sfn {home.envs[1]} {home.root}/opt/current && tool"
    assert home.run("sh", "-c", program).stdout.strip() == str(home.envs[0] / "bin/tool")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VIRTUAL_ENV", "{env}"),
        ("TRITON_CACHE_DIR", "{jit}/triton"),
        ("FLASHINFER_WORKSPACE_BASE", "{jit}/flashinfer"),
        ("TORCHINDUCTOR_CACHE_DIR", "{jit}/inductor"),
        ("CUDA_CACHE_PATH", "{jit}/cuda"),
        ("CUDA_HOME", "/usr/local/cuda-13.0"),
        ("QUOTED", 'a "b" $c `d` \\ e'),
        ("PYTHONPATH", "unset"),
        ("PYTHONHOME", "unset"),
    ],
)
def test_variables(home: Home, name: str, value: str) -> None:
    text = 'CUDA_HOME="/usr/local/cuda-13.0"\nQUOTED="a \\"b\\" \\$c \\`d\\` \\\\ e"\n'
    (home.root / "service.env").write_text(text)
    wanted = value.format(env=home.envs[0], jit=home.root / "jit/aaaaaaaaaaaa" / USER)
    assert home.variable(name, PYTHONPATH="/evil", PYTHONHOME="/evil", TRITON_CACHE_DIR="/other") == wanted


def test_the_stack_may_name_a_cache_of_its_own(home: Home) -> None:
    (home.root / "service.env").write_text('TRITON_CACHE_DIR="/data/triton"\n')
    assert home.variable("TRITON_CACHE_DIR") == "/data/triton"


def test_path_holds_the_environment_then_the_toolkit(home: Home) -> None:
    (home.root / "service.env").write_text('CUDA_HOME="/usr/local/cuda-13.0"\n')
    assert home.variable("PATH").split(":")[:2] == [str(home.envs[0] / "bin"), "/usr/local/cuda-13.0/bin"]


def test_the_cache_is_private(home: Home) -> None:
    assert home.run("true").returncode == 0
    assert (home.root / "jit/aaaaaaaaaaaa" / USER).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("planted", ["link", "file"])
def test_a_planted_cache_is_not_used(home: Home, planted: str) -> None:
    place = home.root / "jit/aaaaaaaaaaaa" / USER
    place.parent.mkdir(parents=True)
    place.symlink_to("/tmp") if planted == "link" else place.write_text("")
    done = home.run("sh", "-c", 'printf %s "$TRITON_CACHE_DIR"', TMPDIR=str(home.root))
    assert "not this user's own directory" in done.stderr
    assert done.stdout.startswith(f"{home.root}/tmp.")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_directory_of_another_user_is_not_used(home: Home) -> None:
    place = home.root / "jit/aaaaaaaaaaaa" / USER
    place.mkdir(parents=True)
    os.chown(place, 65534, 65534)
    assert "not this user's own directory" in home.run("true", TMPDIR=str(home.root)).stderr


@pytest.mark.parametrize(
    ("broken", "status"),
    [
        pytest.param("no current", 78, id="no current"),
        pytest.param("no marker", 78, id="environment not finished"),
        pytest.param("dangling", 78, id="current leads nowhere"),
    ],
)
def test_refuses_what_is_not_whole(home: Home, broken: str, status: int) -> None:
    if broken == "no current":
        (home.root / "opt/current").unlink()
    elif broken == "no marker":
        (home.envs[0] / ".bringup-env.json").unlink()
    else:
        (home.root / "opt/current").unlink()
        (home.root / "opt/current").symlink_to("/no/such/environment")
    done = home.run("true")
    assert (done.returncode, done.stdout) == (status, "")
    assert "does not lead to a whole environment" in done.stderr


def test_without_a_command_it_tells_its_usage(home: Home) -> None:
    done = home.run()
    assert (done.returncode, done.stderr.strip()) == (2, "bringup run: usage: run COMMAND [ARGUMENT...]")


def test_arguments_and_status_are_the_commands_own(home: Home) -> None:
    done = home.run("sh", "-c", 'printf "%s|" "$@"; exit 7', "sh", "a b", "$HOME", "*", "")
    assert (done.returncode, done.stdout) == (7, "a b|$HOME|*||")
