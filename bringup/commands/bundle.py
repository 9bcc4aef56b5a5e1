"""``bringup bundle``: everything that a stack needs, in one directory for hosts without a way out."""

from __future__ import annotations

import json as jsonlib
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from bringup.bundle import Checked, Order, Repositories, Written, check_bundle, open_signer, read_manifest, write_bundle
from bringup.bundle.layout import KEY, apt_directory, wheels_of
from bringup.commands import options
from bringup.errors import InputError
from bringup.lab.layout import Layout
from bringup.lab.record import LabRecord
from bringup.locking.repository import fingerprint_of
from bringup.package_index import Sources
from bringup.stack import Lock, Stack, load_stack, lock_path_of, stack_path


def bundle(
    stack: Annotated[
        str | None, typer.Argument(help="Stack by name or path. May be left out with --verify.", metavar="STACK")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Directory of the bundle. What it holds already is kept.",
            metavar="DIR",
            file_okay=False,
        ),
    ] = None,
    platform: Annotated[
        list[str] | None,
        typer.Option("--platform", help="Only wheels for this platform, such as cp311-x86_64. May be repeated."),
    ] = None,
    release: Annotated[
        list[str] | None,
        typer.Option("--release", help="Only packages for this release, such as debian12-x86_64. May be repeated."),
    ] = None,
    only: Annotated[str | None, typer.Option("--only", help="Only one part: wheels or packages.")] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            help="Key of your gpg keyring that signs the bundle, best by its fingerprint. Default: the one that "
            "signed what is there.",
        ),
    ] = None,
    lock: options.LockFile = None,
    apt_url: Annotated[
        str | None,
        typer.Option(
            "--apt-url",
            envvar="BRINGUP_APT_URL",
            help="Address above the releases' apt repositories; one with a password belongs into the variable. "
            "Default: NVIDIA's.",
        ),
    ] = None,
    apt_key: Annotated[
        Path | None,
        typer.Option("--apt-key", help="Public key that signs them. Default: NVIDIA's.", exists=True, dir_okay=False),
    ] = None,
    lab: Annotated[
        Path | None,
        typer.Option("--lab", help="Take everything from the lab in this state directory.", metavar="STATE_DIR"),
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove what no stack of the bundle names any more.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Write nothing: check every file, signature and lock of the bundle.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Fetch everything that a stack's lock names into a directory that any static web server can serve.

    Each file crosses the network once: what DIR holds with the locked hash stays, an interrupted file is gone on
    with. Exit status: 0 done, or whole; 1 --verify found something that is not; 2 it could not be done.
    """
    console = Console(stderr=True, highlight=False, markup=False)
    if output is None:
        raise InputError("no directory is named", hint="bringup bundle STACK -o DIR")
    if verify:
        _verify(output, stack, key, json=json)
        return
    if stack is None:
        raise InputError("no stack is named", hint="bringup bundle STACK -o DIR")
    if only not in (None, "wheels", "packages"):
        raise InputError(f"--only {only}: wanted wheels or packages")
    record = LabRecord.read(Layout(lab.absolute())) if lab is not None else None
    order = _order(stack, lock, record, platform, release, only)
    before = read_manifest(output)
    name = key or (before.key.fingerprint if before and before.key else None)
    if before and not json:
        console.print(f"looking at what {output} holds", soft_wrap=True)
    with ExitStack() as opened:
        watcher = opened.enter_context(_Bar(console, quiet=json and not console.is_terminal))
        written = write_bundle(
            output.absolute(),
            order,
            _sources(order.stack, record),
            _repositories(record, apt_url, apt_key),
            open_signer(name) if name else None,
            prune=prune,
            watcher=watcher,
        )
    if json:
        print(jsonlib.dumps(_document(output, order, written), indent=2))
    else:
        _show(console, output, order, written)


def _order(
    name: str,
    lock: Path | None,
    record: LabRecord | None,
    platforms: list[str] | None,
    releases: list[str] | None,
    only: str | None,
) -> Order:
    path = stack_path(name)
    lock_file = lock or lock_path_of(path, Path(record.locks_dir) if record else None)
    stack = load_stack(path, lock_path=lock_file)
    held = stack.lock or Lock(schema_=1, stack=stack.name)
    if (platforms and only == "packages") or (releases and only == "wheels"):
        raise InputError(f"--only {only} leaves out what --{'platform' if platforms else 'release'} asks for")
    return Order(
        stack,
        path,
        lock_file,
        platforms=()
        if only == "packages"
        else tuple(dict.fromkeys(platforms or (held.wheels.platforms if held.wheels else ()))),
        releases=() if only == "wheels" else tuple(dict.fromkeys(releases or held.packages)),
    )


def _sources(stack: Stack, record: LabRecord | None) -> Sources:
    if record is not None:
        return Sources.of_mirror(stack.python.indexes, record.mirror_url)
    return Sources.of(stack.python.indexes)


def _repositories(record: LabRecord | None, apt_url: str | None, apt_key: Path | None) -> Repositories:
    if record is not None and apt_url is None:
        key = Path(record.apt_key_file).read_bytes()
        return Repositories(f"{record.mirror_url}/apt", key, record.apt_key_fingerprint)
    data = apt_key.read_bytes() if apt_key else None
    return Repositories(apt_url, data, fingerprint_of(data, source=str(apt_key)) if data else None)


class _Bar:
    """Draw the bytes on a terminal, and say a line for each file elsewhere."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._bar = Progress(
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, files: int, size_bytes: int) -> None:
        """Show what has to be fetched."""
        self._task = self._bar.add_task("", total=size_bytes)
        if files and not self._quiet:
            self._console.print(f"to fetch: {files} files, {size_bytes / 1e9:.2f} GB", soft_wrap=True)

    def file(self, name: str) -> None:
        """Show which file is fetched now."""
        if self._task is not None:
            self._bar.update(self._task, description=name)
        if not self._quiet and not self._console.is_terminal:
            self._console.print(name, soft_wrap=True)

    def seen(self, size_bytes: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bar.advance(self._task, size_bytes)


def _document(directory: Path, order: Order, written: Written) -> dict[str, Any]:
    return {
        "schema": 1,
        "command": "bundle",
        "directory": str(directory.absolute()),
        "stack": {"name": order.stack.name, "digest": order.stack.digest},
        "platforms": list(order.platforms),
        "releases": list(order.releases),
        "key_fingerprint": written.manifest.key.fingerprint if written.manifest.key else None,
        "fetched": list(written.fetched),
        "sent_bytes": written.sent_bytes,
        "reused": written.reused,
        "size_bytes": written.size_bytes,
        "changed": list(written.changed),
        "removed": list(written.removed),
        "inventory": _inventory(directory, order, written),
    }


def _inventory(directory: Path, order: Order, written: Written) -> dict[str, Any]:
    """Return the data keys that point hosts at the bundle; SERVER stands for the address that serves it."""
    lock = order.lock
    indexes = sorted({file.index for each in order.platforms for file in wheels_of(lock, each).values()})
    found: dict[str, Any] = {
        "bringup_stack": str(directory.absolute() / written.manifest.stacks[order.stack.name].file),
        "bringup_indexes": {name: f"http://SERVER/wheels/{name}/simple/" for name in indexes},
    }
    if written.manifest.key is not None and order.releases:
        found |= {
            "bringup_apt_url": {name: f"http://SERVER/{apt_directory(name)}/" for name in order.releases},
            "bringup_apt_key": str(directory.absolute() / KEY),
            "bringup_apt_key_fingerprint": written.manifest.key.fingerprint,
        }
    return found


def _show(console: Console, directory: Path, order: Order, written: Written) -> None:
    said = "unchanged" if not (written.fetched or written.changed or written.removed) else "written"
    console.print(
        f"{directory}: {said}: fetched {len(written.fetched)} files ({written.sent_bytes / 1e6:.1f} MB), "
        f"reused {written.reused}, removed {len(written.removed)}; {written.size_bytes / 1e9:.2f} GB in all",
        soft_wrap=True,
    )
    runfiles = [each.file for each in order.stack.cuda.runfiles.values()]
    if runfiles:
        console.print(f"not in it, copy them to the site's bringup_runfiles: {', '.join(runfiles)}", soft_wrap=True)
    if not order.releases:
        console.print("no packages are in it: the driver and the toolkits come from elsewhere", soft_wrap=True)
    console.print("serve the directory over HTTP, and put this into the inventory's group data:", soft_wrap=True)
    for name, value in _inventory(directory, order, written).items():
        if name == "bringup_apt_url":
            for each, url in value.items():
                print(f"bringup_apt_url = {url!r}" + (f"  # hosts of {each}" if len(value) > 1 else ""))
        elif isinstance(value, dict):
            print(f"{name} = {{")
            for index, url in value.items():
                print(f"    {index!r}: {url!r},")
            print("}")
        else:
            print(f"{name} = {value!r}")


def _verify(directory: Path, stack: str | None, key: str | None, *, json: bool) -> None:
    name = load_stack(stack_path(stack)).name if stack else None
    checked = check_bundle(directory.absolute(), stack=name, fingerprint=key)
    if json:
        print(jsonlib.dumps(_checked(directory, checked), indent=2))
    else:
        for problem in checked.problems:
            print(f"{problem.path}: {problem.what}")
        signed = f"signed by {checked.key_fingerprint}" if checked.key_fingerprint else "not signed"
        said = f"{len(checked.problems)} problems" if checked.problems else "whole"
        Console(stderr=True, highlight=False, markup=False).print(
            f"{directory}: {said}: {checked.files} files, {checked.size_bytes / 1e9:.2f} GB, {signed}; "
            f"stacks {', '.join(checked.manifest.stacks)}",
            soft_wrap=True,
        )
    if checked.problems:
        raise typer.Exit(1)


def _checked(directory: Path, checked: Checked) -> dict[str, Any]:
    return {
        "schema": 1,
        "command": "bundle",
        "directory": str(directory.absolute()),
        "is_whole": not checked.problems,
        "files": checked.files,
        "size_bytes": checked.size_bytes,
        "key_fingerprint": checked.key_fingerprint,
        "stacks": {name: each.digest for name, each in checked.manifest.stacks.items()},
        "problems": [{"path": problem.path, "what": problem.what} for problem in checked.problems],
    }
