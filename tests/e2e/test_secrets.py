"""Canary secrets in every input, and a search for them in everything that runs print, write and start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pytest
import sqlalchemy

from bringup import paths
from bringup.history.database import Database
from bringup.lab.lab import Lab
from bringup.locking import lock_for_lab
from tests import postgresql_server
from tests.e2e import variant
from tests.e2e.canary import Canaries, Watch, watching
from tests.e2e.rig import BRINGUP
from tests.e2e.site import Site, keyring, serving, signing_key
from tests.lab.conftest import open_lab

pytestmark = pytest.mark.lab

RANGE = "10.92.9.0/24"
HOST = "gpu-01"
KEY = "keys/bringup-lab.gpg"

INVENTORY = """
from bringup.lab.record import inventory
hosts, lab = inventory()
known = {{name: lab[name] for name in ("ssh_known_hosts_file", "bringup_apt_key_fingerprint")}}
guarded = ([(name, {{**data, **{own!r}}}) for name, data in hosts], {{**known, **{common!r}}})
"""

DRAIN = """test -n "$HOOK_TOKEN" && echo "drained $BRINGUP_HOST" && test -z "$HOOK_FAILS" || \
    {{ echo "the scheduler refused the token $HOOK_TOKEN of $(cat {site_password})"; exit 1; }}"""

EXPECTED = {
    "plan": 1,
    "apply with a wrong password": 1,
    "apply with a hook that fails": 1,
    "rollout with a hook that fails": 1,
    "rollout that is ended": 0,
    "apply": 0,
    "apply again": 0,
    "drift": 0,
    "verify": 0,
    "plan of an inventory with a mistake": 2,
    "bundle": 0,
    "history": 0,
    "history of run 0": 0,
    "history of run 1": 0,
    "history of run 2": 0,
    "history of rollouts": 0,
    "status": 0,
    "history that cannot be reached": 2,
    "history with a URL that is none": 2,
    "plain pyinfra": 0,
}


@dataclass
class Guarded:
    """A lab host, the site with its passwords, and everything that was said while commands ran."""

    lab: Lab
    work: Path
    canaries: Canaries
    site: Site
    gnupg: Path
    environment: dict[str, str]
    said: dict[str, bytes] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)
    database: str = ""

    @property
    def inputs(self) -> Path:
        return self.work / "inputs"

    @property
    def out(self) -> Path:
        return self.work / "out"

    def run(self, label: str, *words: str, program: tuple[str, ...] = tuple(BRINGUP), **environment: str) -> bytes:
        """Run a command and keep what it said under a label; return its standard output."""
        started = time.monotonic()
        done = subprocess.run(
            [*program, *words],
            env={**self.environment, **environment},
            cwd=paths.root(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=600,
            check=False,
        )
        print(f"{label}: {time.monotonic() - started:.1f} s")
        self.said[f"{label}: stdout"] = done.stdout
        self.said[f"{label}: stderr"] = done.stderr
        self.statuses[label] = done.returncode
        return done.stdout

    def told(self) -> str:
        """Return the end of what was said, for the message of a failing test; secrets in it are test data."""
        return "\n".join(f"--- {label}\n{text.decode(errors='replace')[-2500:]}" for label, text in self.said.items())


def inventory(guarded: Guarded, name: str, **more: str) -> str:
    """Write an inventory whose data hold secrets, as people write them, and return its path."""
    planted, site = guarded.canaries.by_name, guarded.site
    server = site.url.removeprefix("http://")
    site_password = guarded.inputs / "site_password"
    flashinfer = f"http://inv:{planted['index in the inventory']}@{server}/wheels/flashinfer/simple"
    common = {
        "ssh_user": "operator",
        "ssh_key": str(guarded.inputs / "id"),
        "ssh_key_password": planted["passphrase of the ssh key"],
        "_sudo": True,
        "bringup_stack": str(guarded.inputs / "secrets.toml"),
        "bringup_lock": str(guarded.inputs / "secrets.lock.toml"),
        "bringup_reboot": "allowed",
        "bringup_apt_url": f"http://apt:{quote(planted['apt mirror'], safe='')}@{server}/apt/debian12/x86_64/",
        "bringup_apt_key": str(guarded.lab.layout.mirror / KEY),
        "bringup_indexes": {"flashinfer": flashinfer},
        "bringup_proxy": f"http://proxy:{planted['proxy']}@{server}",
        "bringup_drain": DRAIN.format(site_password=site_password),
        "bringup_undrain": "true",
        "site_password": planted["data of the group"],
        **more,
    }
    site_password.write_text(planted["data of the group"])
    path = guarded.inputs / f"{name}.py"
    path.write_text(INVENTORY.format(own={"bmc": {"password": planted["data of the host"]}}, common=common))
    return str(path)


def stack(guarded: Guarded) -> None:
    """Write a stack whose indexes want a password: one toolkit only, as the others would only take time."""
    text = {
        f'url = "{url}"': f'url = "{guarded.site.url}/wheels/{name}/simple"\ncredentials = "{reference}"'
        for name, url, reference in (
            ("pytorch-cu130", "https://download.pytorch.org/whl/cu130", "env:INDEX_LOGIN"),
            ("sglang-cu130", "https://docs.sglang.ai/whl/cu130", f"file:{guarded.inputs / 'login'}"),
            ("flashinfer", "https://flashinfer.ai/whl/cu130", "env:FLASHINFER_LOGIN"),
        )
    }
    text |= {'toolkits = ["12.8", "13.0"]': 'toolkits = ["13.0"]', '"libnvrtc.so.12" = "12.8"\n': ""}
    variant.write(guarded.lab, guarded.inputs, "secrets", text=text)


def unlock(guarded: Guarded) -> None:
    """Let the operator of the host in with a key that has a passphrase."""
    key = guarded.inputs / "id"
    phrase = guarded.canaries.by_name["passphrase of the ssh key"]
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", phrase, "-C", "test", "-f", str(key)], check=True)
    public = key.with_suffix(".pub").read_text().strip()
    done = guarded.lab.run(HOST, ["sh", "-c", f"echo '{public}' >> /home/operator/.ssh/authorized_keys"])
    assert done.returncode == 0, done.stderr


def scenario(guarded: Guarded) -> None:
    """Run everything that sees a secret, failures included."""
    planted = guarded.canaries.by_name
    hosts = inventory(guarded, "hosts")
    events = str(guarded.out / "events")
    wrong = {"INDEX_LOGIN": f"env-user:{planted['wrong password']}"}
    run = guarded.run
    run("plan", "plan", hosts, "-vv")
    run("apply with a wrong password", "apply", hosts, "--yes", "-vv", "--events", "-", **wrong)
    run("apply with a hook that fails", "apply", hosts, "--yes", "--events", f"{events}-hook", HOOK_FAILS="1")
    told = ["--json", "--events", f"{events}-rollout"]
    run("rollout with a hook that fails", "rollout", hosts, "--yes", "-vv", *told, HOOK_FAILS="1")
    run("rollout that is ended", "rollout", hosts, "--abort", "--json")
    run("apply", "apply", hosts, "--yes", "--json", "-vv", "--events", f"{events}-apply")
    run("apply again", "apply", hosts, "--yes")
    run("drift", "drift", hosts, "--json", "--deep", "-vv")
    run("verify", "verify", hosts, "--json", "--events", f"{events}-verify")
    mistaken = inventory(guarded, "mistaken", bringup_token=planted["unknown key"])
    run("plan of an inventory with a mistake", "plan", mistaken, "-vv")
    server = guarded.site.url.removeprefix("http://")
    mirror = f"http://apt:{quote(planted['apt mirror'], safe='')}@{server}/apt"
    words = ["--key", signing_key(guarded.gnupg, "site"), "--apt-key", str(guarded.lab.layout.mirror / KEY)]
    stack_file, directory = str(guarded.inputs / "secrets.toml"), str(guarded.out / "bundle")
    run("bundle", "bundle", stack_file, "-o", directory, *words, BRINGUP_APT_URL=mirror, GNUPGHOME=str(guarded.gnupg))
    runs = json.loads(run("history", "history", "--json"))["runs"]
    reports = [f"--{kind}={guarded.out / kind}" for kind in ("html", "junit", "prometheus")]
    refused = [kept["id"] for kept in runs if kept["exit_code"] == 1]
    for number, name in enumerate(refused):
        run(f"history of run {number}", "history", name, "-v", *[f"{report}-{number}" for report in reports])
    run("history of rollouts", "history", "--rollouts", "--json")
    run("status", "status")
    gone = f"postgresql://bringup:{planted['history']}@127.0.0.1:1/postgres"
    run("history that cannot be reached", "history", BRINGUP_HISTORY=gone)
    run("history with a URL that is none", "history", BRINGUP_HISTORY=gone.replace(":1/", ":port/"))
    plain = (str(Path(sys.executable).with_name("pyinfra")),)
    run("plain pyinfra", "-y", "-vvv", hosts, "deploy.py", program=plain)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Everything that sees a secret has run; what it left is there to be searched."""
    if os.geteuid() != 0:
        pytest.skip("lab hosts need root")
    work = tmp_path_factory.mktemp("secrets")
    for name in ("inputs", "out", "home", "tmp", "state"):
        (work / name).mkdir()
    canaries = Canaries()
    plant = canaries.plant
    lab = open_lab("offline", RANGE)
    with ExitStack() as ending:
        lab.down()
        ending.callback(lab.down)
        lab.up(1)
        record = lab.record()
        lock_for_lab(
            paths.stacks() / "lab.toml",
            lab.layout.state_dir,
            record.mirror_url,
            key_file=Path(record.apt_key_file),
            key_fingerprint=record.apt_key_fingerprint,
        )
        logins = {
            "/wheels/pytorch-cu130/": f"env-user:{plant('index by env:')}",
            "/wheels/sglang-cu130/": f"file-user:{plant('index by file:')}",
            "/wheels/flashinfer/": f"inv:{plant('index in the inventory')}",
            "/wheels/default/": f"own:{plant('default index of the controller')}",
            "/apt/": f"apt:{plant('apt mirror', awkward='/@:')}",
        }
        proxy = f"proxy:{plant('proxy')}"
        for name in ("passphrase of the ssh key", "data of the group", "data of the host", "unknown key", "history"):
            plant(name)
        for name in ("environment of the hook", "proxy of the controller", "wrong password"):
            plant(name)
        site = ending.enter_context(
            serving(lab.layout.mirror, str(lab.addresses.controller), logins=logins, proxy_login=proxy)
        )
        database = ending.enter_context(postgresql_server.server())
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))},
            "HOME": str(work / "home"),
            "TMPDIR": str(work / "tmp"),
            "BRINGUP_STATE": str(work / "state"),
            "BRINGUP_LAB_STATE": str(lab.layout.state_dir),
            "BRINGUP_HISTORY": database.replace("bringup@", f"bringup:{canaries.by_name['history']}@"),
            "INDEX_LOGIN": logins["/wheels/pytorch-cu130/"],
            "FLASHINFER_LOGIN": logins["/wheels/flashinfer/"],
            "UV_DEFAULT_INDEX": f"http://{logins['/wheels/default/']}@{site.url[7:]}/wheels/default/simple",
            "HOOK_TOKEN": canaries.by_name["environment of the hook"],
            "HTTPS_PROXY": f"http://me:{canaries.by_name['proxy of the controller']}@127.0.0.1:9",
        }
        gnupg = ending.enter_context(keyring())
        made = Guarded(lab, work, canaries, site, gnupg, environment, database=database)
        (made.inputs / "login").write_text(logins["/wheels/sglang-cu130/"])
        (made.inputs / "login").chmod(0o600)
        stack(made)
        unlock(made)
        with watching(canaries, lambda: lab.host(HOST).leader()) as made.watch:
            scenario(made)
        yield made


def test_everything_that_was_planted_was_used(guarded: Guarded) -> None:
    assert guarded.statuses == EXPECTED, guarded.told()
    sent = {path for path, _ in guarded.site.sent}
    for start in guarded.site.logins:
        assert [path for path in sent if path.startswith(start)], f"nothing was fetched from {start}"
    assert [path for path in guarded.site.proxied if path.endswith(".whl")], "no wheel went through the proxy"
    assert guarded.watch.rounds > 100
    assert ("credentials", "0o600") in guarded.watch.kept, "nobody saw the credentials file"


def test_the_hook_of_the_rollout_failed_with_secrets_in_its_words(guarded: Guarded) -> None:
    halt = json.loads(guarded.said["rollout with a hook that fails: stdout"])["halt"]
    assert halt == f"{HOST}: drain failed: the drain command ended with 1: the scheduler refused the token *** of ***"


def test_no_output_gives_a_secret_away(guarded: Guarded) -> None:
    assert {label: names for label, text in guarded.said.items() if (names := guarded.canaries.in_text(text))} == {}


def test_no_command_line_gives_a_secret_away(guarded: Guarded) -> None:
    assert guarded.watch.processes == set()


def test_secrets_lie_on_the_host_only_while_they_are_used_and_for_root_only(guarded: Guarded) -> None:
    names = {name for name, _ in guarded.watch.kept}
    assert names <= {"credentials", "credentials-apt", ".bringup-*"}
    assert {mode for _, mode in guarded.watch.kept} == {"0o600"}
    left = guarded.lab.run(HOST, ["sh", "-c", "ls -A /run/bringup"]).stdout.split()
    assert [name for name in left if name.startswith(("credentials", ".bringup-"))] == []


def test_no_file_of_the_host_gives_a_secret_away(guarded: Guarded) -> None:
    leader = guarded.lab.host(HOST).leader()
    inside = Path(f"/proc/{leader}/root")
    places = [guarded.lab.layout.host(HOST), *(inside / name for name in ("run", "tmp", "dev/shm"))]
    assert guarded.canaries.in_files(places, guarded.work / "patterns") == set()


def test_no_journal_gives_a_secret_away(guarded: Guarded) -> None:
    journal = guarded.lab.inside(HOST, ["journalctl", "--output=export", "--no-pager", "--all"]).stdout
    assert "sudo" in journal
    assert guarded.canaries.in_text(journal) == set()


def test_no_file_of_the_controller_gives_a_secret_away(guarded: Guarded) -> None:
    assert len(list(guarded.out.iterdir())) > 5
    places = [guarded.work / name for name in ("out", "home", "tmp", "state")]
    # The controller's own shared directories as well: whoever ignores TMPDIR and HOME would write there.
    shared = [Path(name) for name in ("/tmp", "/var/tmp", "/run", "/dev/shm", "/root/.cache/bringup", "/root/.local")]
    started = guarded.inputs / "login"
    found = guarded.canaries.in_files([*places, guarded.lab.layout.state_dir], guarded.work / "patterns")
    found |= guarded.canaries.in_files(shared, guarded.work / "patterns", newer_than=started)
    assert {line for line in found if not line.startswith(str(guarded.inputs))} == set()


def test_no_row_of_the_history_gives_a_secret_away(guarded: Guarded) -> None:
    database = Database(guarded.database)
    try:
        with database.reading() as session:
            tables = sqlalchemy.inspect(session.get_bind()).get_table_names()
            rows = [repr(row) for name in tables for row in session.execute(sqlalchemy.text(f'SELECT * FROM "{name}"'))]
    finally:
        database.close()
    assert len(rows) > 20
    assert guarded.canaries.in_text("\n".join(rows)) == set()
