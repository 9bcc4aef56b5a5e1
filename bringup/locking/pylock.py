"""Write one platform of a lock as pylock.toml (PEP 751), for tools that know nothing of bringup."""

from __future__ import annotations

from collections.abc import Mapping

import tomlkit

from bringup.locking.compile import split
from bringup.stack import LockedPlatform


def pylock_text(platform: str, locked: LockedPlatform, addresses: Mapping[str, str]) -> str:
    """Return the pylock.toml of ``locked``; ``addresses`` holds today's address of every file, by file name.

    PEP 751 wants an address for each wheel, so unlike the lock this text is bound to the indexes it was made with.
    """
    minor, machine = split(platform)
    document = tomlkit.document()
    document.add("lock-version", tomlkit.item("1.0"))
    document.add("created-by", tomlkit.item("bringup"))
    document.add("requires-python", tomlkit.item(f"==3.{minor}.*"))
    document.add(
        "environments",
        tomlkit.item([f"sys_platform == 'linux' and platform_machine == '{machine}'"]),
    )
    packages = tomlkit.aot()
    files = [file for step in locked.steps for file in step.files]
    for file in sorted(files, key=lambda each: each.distribution):
        wheel = tomlkit.inline_table()
        wheel.add("name", file.file)
        wheel.add("url", addresses[file.file])
        wheel.add("size", file.size_bytes)
        hashes = tomlkit.inline_table()
        hashes.add("sha256", file.sha256)
        wheel.add("hashes", hashes)
        wheels = tomlkit.array()
        wheels.append(wheel)
        package = tomlkit.table()
        package.add("name", file.distribution)
        package.add("version", file.version)
        package.add("wheels", wheels.multiline(True))
        packages.append(package)
    document.add("packages", packages)
    return tomlkit.dumps(document)
