"""Build the package mirror of the lab, a signed apt repository and wheel indexes, and serve it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bringup import paths
from bringup.errors import InputError, LabError
from bringup.lab import debs, debs_recipe, mirror_elf, wheels

Progress = Callable[[str], None]

RELEASES = {"bookworm": "debian12", "trixie": "debian13", "noble": "ubuntu2404"}
"""Code name to the name that NVIDIA's repository gives a distribution release."""


def codename_of(release: str) -> str:
    """Return the code name of a release such as ``debian13``. Raises InputError for one the lab does not know."""
    for codename, name in RELEASES.items():
        if name == release:
            return codename
    raise InputError(f"the lab makes no hosts of {release!r}", hint=f"releases are {', '.join(RELEASES.values())}")


DEFAULT_URL = "http://10.87.0.1:8087"

_ORIGINS = {"nvidia": ("NVIDIA", "NVIDIA CUDA"), "distro": ("Debian", "Debian")}
_DIRECTORIES = {"nvidia": "x86_64", "distro": "distro"}
_START_TIMEOUT_S = 10
_STOP_TIMEOUT_S = 5
_DOWNLOAD_TIMEOUT_S = 900


@dataclass(frozen=True)
class Mirror:
    """A built mirror below ``root``, which is also what the server shows.

    ``key_file`` is the public key in binary form, as apt's ``Signed-By`` wants it; ``url`` is where hosts
    reach the mirror. ``apt`` and ``distro`` are directories of flat repositories.
    """

    root: Path
    url: str
    codename: str
    release: str
    key_file: Path
    key_fingerprint: str
    digest: str

    @property
    def apt(self) -> Path:
        """Return the directory of the repository in NVIDIA's shape."""
        return self.root / "apt" / self.release / _DIRECTORIES["nvidia"]

    @property
    def distro(self) -> Path:
        """Return the directory of what a lab host finds at its distribution: headers and same-named drivers."""
        return self.root / "apt" / self.release / _DIRECTORIES["distro"]

    @property
    def apt_url(self) -> str:
        """Return the URL of the repository in NVIDIA's shape; it ends in a slash, as flat repositories do."""
        return f"{self.url}/apt/{self.release}/{_DIRECTORIES['nvidia']}/"

    @property
    def distro_url(self) -> str:
        """Return the URL of the distribution's stand-in."""
        return f"{self.url}/apt/{self.release}/{_DIRECTORIES['distro']}/"

    def index_url(self, name: str) -> str:
        """Return the URL of one of the wheel indexes (``pytorch-cu130``, ``default``, …)."""
        return f"{self.url}/wheels/{name}/simple/"

    def distro_sources(self, key: str = "/usr/share/keyrings/bringup-lab.gpg") -> str:
        """Return the deb822 text of a host's own source; ``key`` is where the public key lies on the host."""
        return f"Types: deb\nURIs: {self.distro_url}\nSuites: ./\nSigned-By: {key}\n"


@dataclass(frozen=True)
class Server:
    """A running server: the process id of its master, and the URL it answers on."""

    pid: int
    url: str

    def stop(self) -> None:
        """End the server and wait until it is gone; it is no error when it already is."""
        stop(self.pid)


def build(
    state_dir: Path,
    *,
    codename: str = "bookworm",
    url: str = DEFAULT_URL,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Mirror:
    """Build the mirror below ``state_dir`` and return it; a built one is only checked.

    Packages and wheels are made once per description, compiler and kernel in ``cache`` (None means the one
    beside ``state_dir``) and linked from there, so several labs share the work. Raises LabError when the real
    NVRTC wheels cannot be had, when a tool is missing, or for a distribution release that the lab does not know.
    """
    say = progress or (lambda _: None)
    if codename not in RELEASES:
        raise LabError(f"no mirror for {codename}", hint=f"wanted one of {', '.join(RELEASES)}")
    release = RELEASES[codename]
    root = state_dir / "mirror"
    root.mkdir(parents=True, exist_ok=True)
    key = _key(root / "keys")
    context = debs_recipe.Context(release, platform.release(), url.rstrip("/"), key.public)
    digest = _digest(context)
    mirror = Mirror(
        root=root,
        url=context.url,
        codename=codename,
        release=release,
        key_file=root / "keys" / "bringup-lab.gpg",
        key_fingerprint=key.fingerprint,
        digest=digest,
    )
    record = root / f"{release}.json"
    wanted = {"digest": digest, "url": context.url, "key": key.fingerprint}
    if _read(record) == wanted:
        return mirror
    with hold_cache(cache or cache_dir(state_dir)) as held:
        _build_debs(held, mirror, context, key, say)
        _lay_wheels(wheels.build(held, say), root / "wheels")
    record.write_text(json.dumps(wanted) + "\n")
    return mirror


def serve(mirror: Mirror, address: str, port: int = 8087) -> Server:
    """Serve ``mirror`` on ``address`` with nginx and return the running server.

    The server is its own session and outlives the caller; whoever starts it records the process id and calls
    ``stop``. Configuration, log and pid file lie in the mirror's directory. Raises LabError when nginx is
    missing or does not answer within 10 s (the address is taken, or not there).
    """
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        raise LabError("no nginx", why="the package mirror is served by it", hint="apt-get install nginx-light")
    home = mirror.root / "nginx"
    home.mkdir(exist_ok=True)
    (home / "nginx.pid").unlink(missing_ok=True)
    (home / "nginx.conf").write_text(_NGINX.format(root=mirror.root, home=home, address=address, port=port))
    command = [nginx, "-c", str(home / "nginx.conf"), "-p", str(home), "-e", str(home / "error.log")]
    log = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    pid = os.posix_spawn(
        nginx,
        command,
        os.environ,
        setsid=True,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(home / "start.log"), log, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )
    # nginx writes its pid file when it has bound: a connection alone might reach whoever holds the address.
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and not _has_ended(pid):
        if (home / "nginx.pid").exists():
            return Server(pid, f"http://{address}:{port}")
        time.sleep(0.02)
    stop(pid)
    why = _tail(home / "start.log") or _tail(home / "error.log") or "no answer"
    raise LabError(f"package mirror does not answer on {address}:{port}", why=why)


def stop(pid: int) -> None:
    """End the server with process id ``pid`` and wait until it is gone.

    Nothing is sent when the process is not an nginx (the id was given to another in the meantime).
    """
    if not _is_nginx(pid):
        return
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sent)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            if _has_ended(pid) or not _is_nginx(pid):
                return
            time.sleep(0.02)


def _has_ended(pid: int) -> bool:
    """Return whether our child has ended, taking its status; False for a process that is not our child."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def _is_nginx(pid: int) -> bool:
    try:
        return b"nginx" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _build_debs(cache: Path, mirror: Mirror, context: debs_recipe.Context, key: _Key, say: Progress) -> None:
    store = cache / "debs"
    store.mkdir(exist_ok=True)
    rendered = list(debs_recipe.render(context))
    packed: dict[str, list[debs.Packed]] = {name: [] for name in _ORIGINS}
    targets = {name: mirror.apt.parent / f"{folder}.new" for name, folder in _DIRECTORIES.items()}
    for target in targets.values():
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
    keys = {id(each): _package_key(each, context) for each in rendered}
    missing = [each for each in rendered if not (store / f"{keys[id(each)]}.json").exists()]
    if missing:
        say(f"packing {len(missing)} packages")
        _pack(missing, keys, store, context, cache, say)
    for each in rendered:
        name = keys[id(each)]
        entry = json.loads((store / f"{name}.json").read_text())
        packed[each.repository].append(debs.Packed(entry["file"], entry["paragraph"]))
        _link(store / f"{name}.deb", targets[each.repository] / entry["file"])
    for repository, (origin, label) in _ORIGINS.items():
        debs.write_index(targets[repository], packed[repository], origin=origin, label=label)
        key.sign(targets[repository] / "Release")
        _swap(targets[repository], mirror.apt.parent / _DIRECTORIES[repository])
    say(f"apt repository of {len(rendered)} packages")


def _pack(
    missing: list[debs_recipe.Rendered],
    keys: Mapping[int, str],
    store: Path,
    context: debs_recipe.Context,
    cache: Path,
    say: Progress,
) -> None:
    def nvrtc(variables: Mapping[str, Any]) -> Path:
        return fetch(cache, variables["nvrtc_wheel"], variables["nvrtc_sha256"], say)

    with tempfile.TemporaryDirectory(prefix="work-", dir=cache) as name:
        work = Path(name)
        workshop = debs_recipe.Workshop(context, nvrtc, work)
        workshop.compile(missing)
        for each in missing:
            entry = debs.pack(workshop.deb(each), work)
            name_in_store = keys[id(each)]
            (work / entry.file_name).replace(store / f"{name_in_store}.deb")
            # The record comes last: without it the package counts as not made.
            (store / f"{name_in_store}.json").write_text(
                json.dumps({"file": entry.file_name, "paragraph": entry.paragraph})
            )


def fetch(cache: Path, requirement: str, sha256: str, say: Progress = lambda _: None) -> Path:
    """Return the wheel of ``requirement`` (``name==version``), fetched once through this machine's own pip.

    Raises LabError when it cannot be had or its hash is another.
    """
    folder = cache / "real" / sha256
    if not list(folder.glob("*.whl")):
        say(f"fetching {requirement}")
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as name:
            wanted = Path(name) / "requirements.txt"
            wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n")
            options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
            target = ["--platform", "manylinux2014_x86_64", "--dest", str(Path(name) / "got")]
            done = subprocess.run(
                [sys.executable, "-m", "pip", "download", *options, *target, "-r", str(wanted)],
                capture_output=True,
                text=True,
                check=False,
                timeout=_DOWNLOAD_TIMEOUT_S,
            )
            if done.returncode:
                raise LabError(f"cannot fetch {requirement}", why=done.stderr.strip()[-1000:])
            folder.parent.mkdir(exist_ok=True)
            (Path(name) / "got").replace(folder)
    return next(folder.glob("*.whl"))


@dataclass(frozen=True)
class _Key:
    """The lab's signing key: made once per state directory, never a daemon left behind."""

    public: bytes
    fingerprint: str
    secret_file: Path

    def sign(self, release: Path) -> None:
        """Write InRelease and Release.gpg beside ``release``."""
        with _gnupg() as gpg:
            gpg("--import", str(self.secret_file))
            for how, name in (("--clearsign", "InRelease"), ("--detach-sign", "Release.gpg")):
                target = release.with_name(name)
                gpg("--yes", "--armor", "--local-user", self.fingerprint, "-o", str(target), how, str(release))


def _key(directory: Path) -> _Key:
    """Return the key kept in ``directory``, making it first where there is none."""
    secret = directory / "secret.asc"
    public = directory / "bringup-lab.gpg"
    record = directory / "fingerprint"
    if not record.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with _gnupg() as gpg:
            gpg("--quick-gen-key", "bringup lab <lab@bringup.invalid>", "ed25519", "sign", "never")
            listing = gpg("--with-colons", "--list-keys").decode()
            fingerprint = next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:"))
            secret.touch(mode=0o600)
            secret.write_bytes(gpg("--armor", "--export-secret-keys", fingerprint))
            public.write_bytes(gpg("--export", fingerprint))
        record.write_text(fingerprint + "\n")
    return _Key(public.read_bytes(), record.read_text().strip(), secret)


@contextlib.contextmanager
def _gnupg() -> Iterator[Callable[..., bytes]]:
    """Run gpg in a home of its own, short enough for its socket, and end the agent it starts."""
    gpg = shutil.which("gpg")
    if gpg is None:
        raise LabError("no gpg", why="the lab's apt repository is signed with it", hint="apt-get install gnupg")
    with tempfile.TemporaryDirectory(prefix="bringup-gpg-", dir="/tmp") as home:

        def run(*arguments: str) -> bytes:
            command = [gpg, "--homedir", home, "--batch", "--quiet", "--passphrase", "", "--pinentry-mode"]
            done = subprocess.run([*command, "loopback", *arguments], capture_output=True, check=False)
            if done.returncode:
                raise LabError("gpg failed", why=done.stderr.decode(errors="replace").strip())
            return done.stdout

        try:
            yield run
        finally:
            subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], capture_output=True, check=False)


@contextlib.contextmanager
def hold_cache(cache: Path) -> Iterator[Path]:
    """Hold a cache that labs side by side share; one builds, the others wait and find it built."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cache


def cache_dir(state_dir: Path) -> Path:
    """Return the directory beside ``state_dir`` that holds what several labs can share."""
    if named := os.environ.get("BRINGUP_LAB_CACHE"):
        return Path(named)
    return state_dir.parent / "bringup-lab-cache"


def _digest(context: debs_recipe.Context) -> str:
    digest = hashlib.sha256()
    own = [Path(__file__), *(paths.data() / "lab").rglob("*"), *(paths.files() / "lab").glob("*")]
    own += [Path(module.__file__ or "") for module in (debs, debs_recipe, mirror_elf, wheels)]
    for path in sorted(each for each in own if each.is_file()):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    digest.update(f"{context.release} {context.kernel} {mirror_elf.compiler()}".encode())
    return digest.hexdigest()[:20]


def _package_key(rendered: debs_recipe.Rendered, context: debs_recipe.Context) -> str:
    """Return what one package depends on: its recipe, the templates it uses, the code that packs it."""
    recipe = rendered.recipe
    # The URL stands in the recipe of the one package that names it; the others are the same in every lab.
    variables = sorted(item for item in rendered.variables.items() if item[0] != "url")
    digest = hashlib.sha256(repr((recipe, variables)).encode())
    names = [*recipe.templates.values(), *recipe.scripts.values()]
    used = [debs_recipe.directory() / f"{name}.j2" for name in names]
    used += [paths.files() / "lab" / name for name in recipe.host_files.values()]
    used += [Path(module.__file__ or "") for module in (debs, debs_recipe)]
    if recipe.libraries:
        used.append(Path(mirror_elf.__file__))
        digest.update(repr([each.shared_object for each in recipe.libraries]).encode())
        digest.update(mirror_elf.compiler().encode())
    if recipe.key_files:
        digest.update(context.key)
    for path in used:
        digest.update(path.read_bytes())
    return f"{recipe.name}-{digest.hexdigest()[:20]}"


def _lay_wheels(built: Path, target: Path) -> None:
    """Put the built indexes in place, and what was fetched for a lock before beside the look-alikes again."""
    fresh = target.with_name(target.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    for path in built.rglob("*"):
        if path.is_file():
            place = fresh / path.relative_to(built)
            place.parent.mkdir(parents=True, exist_ok=True)
            _link(path, place)
    for index in wheels.INDEXES:
        fetched = [path for path in target.glob(f"{index}/*.whl") if not wheels.is_look_alike(path)]
        if fetched:
            wheels.add(fresh / index, fetched)
    _swap(fresh, target)


def _swap(fresh: Path, target: Path) -> None:
    """Put ``fresh`` in the place of ``target``; a host that reads meanwhile sees one or the other."""
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _tail(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()[-500:]
    except OSError:
        return ""


_NGINX = """\
# Written by bringup for its lab; the state directory may be closed to other users, so workers stay root.
user root;
daemon off;
worker_processes 1;
pid {home}/nginx.pid;
error_log {home}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log {home}/access.log;
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    types {{ text/html html; application/zip whl; application/vnd.debian.binary-package deb; }}
    default_type application/octet-stream;
    sendfile on;
    etag off;
    # The mirror changes under the same addresses; a client that kept a page would lock what is gone.
    add_header Cache-Control no-cache;
    server {{
        listen {address}:{port};
        root {root};
        index index.html;
        absolute_redirect off;
        location = /keys/bringup-lab.gpg {{ }}
        location /keys/ {{ deny all; }}
        location /nginx/ {{ deny all; }}
    }}
}}
"""
