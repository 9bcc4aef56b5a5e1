"""Mount what a lab host is made of, and take down everything that was mounted below a directory."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from bringup.errors import LabError
from bringup.lab.command import run


def overlay(lower: Path, upper: Path, work: Path, target: Path) -> None:
    """Mount an overlay at ``target``; all new files land in one file system, so hard links work."""
    for directory in (upper, work, target):
        directory.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    run(
        ["mount", "-t", "overlay", "-o", options, "bringup-lab", str(target)],
        what=f"cannot mount the root of {target.parent.name}",
        hint="the state directory must lie on a file system that can carry an overlay (ext4, xfs)",
    )


def image(file: Path, target: Path, *, size_bytes: int) -> None:
    """Mount a file system in ``file`` at ``target``; a file that is not there is made, sparse."""
    if not file.exists():
        fresh = file.with_suffix(".new")
        with open(fresh, "wb") as stream:
            stream.truncate(size_bytes)
        run(["mkfs.ext4", "-q", "-F", str(fresh)], what=f"cannot make a file system in {fresh}")
        fresh.replace(file)
    target.mkdir(parents=True, exist_ok=True)
    run(["mount", "-o", "loop", str(file), str(target)], what=f"cannot mount {file}")


def below(directory: Path) -> list[Path]:
    """Return the mount points at and below ``directory``, the innermost first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # The kernel writes blanks in names as octal.
        point = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), line.split()[4]))
        if point == directory or directory in point.parents:
            found.append(point)
    return sorted(found, key=lambda point: len(point.parts), reverse=True)


def release(directory: Path, *, timeout_s: float = 5) -> None:
    """Unmount everything at and below ``directory``; raises LabError when something stays busy."""
    deadline = time.monotonic() + timeout_s
    while points := below(directory):
        last = [subprocess.run(["umount", str(point)], capture_output=True, text=True) for point in points]
        if time.monotonic() > deadline and (busy := below(directory)):
            raise LabError(f"cannot unmount {busy[0]}", why=last[-1].stderr.strip(), hint=f"see `fuser -vm {busy[0]}`")
        if below(directory):
            time.sleep(0.05)
