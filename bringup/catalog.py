"""What is known about drivers, toolkits, GPUs and NVIDIA's repositories: the tables of ``data/``, typed."""

from __future__ import annotations

import tomllib
from functools import cache
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bringup import paths

FabricKind = Literal["none", "nvswitch", "nvlink5"]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    source: str = Field(min_length=10)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")


R = TypeVar("R", bound=_Row)


class Repository(_Row):
    """NVIDIA's package repository for one distribution release, such as ``debian12-x86_64``."""

    release: str
    url: str
    key_file: str
    key_fingerprint: str = Field(pattern=r"^[0-9A-F]{40}$")

    @field_validator("url")
    @classmethod
    def _ends_in_a_slash(cls, value: str) -> str:
        return value.rstrip("/") + "/"


class ToolkitRow(_Row):
    """Which driver a CUDA toolkit needs, and the compute capabilities its NVRTC compiles for.

    ``capabilities`` is complete from 9.0 on only.
    """

    version: str
    driver_minimum: str
    compatible_minimum: str
    capabilities: tuple[str, ...]

    def can_target(self, capability: str) -> bool | None:
        """Return whether NVRTC compiles for a compute capability; None when the table does not reach there."""
        if _numbers(capability) < (9, 0):
            return None
        return capability in self.capabilities


class BranchRow(_Row):
    """A driver branch. ``suffixed``: its package names carry the branch. ``minimum``: its first release."""

    name: str
    fabric_package: str
    suffixed: bool
    minimum: str


class ChipRow(_Row):
    """A range of PCI device ids of one architecture, and which kernel modules drive it."""

    first: str
    last: str
    architecture: str
    closed_modules: bool
    open_modules: bool


class GpuRow(_Row):
    """A board by PCI device id: its name as the driver gives it, its link and what must run for that."""

    device_id: str
    name: str
    compute_capability: str
    link: str
    fabric: FabricKind


class LimitRow(_Row):
    """A number that preflight measures a host against; its unit is in its name."""

    name: str
    value: float


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@cache
def _rows(file: str, key: str, model: type[R]) -> tuple[R, ...]:
    document = tomllib.loads((paths.data() / file).read_text(encoding="utf-8"))
    return tuple(model.model_validate(row) for row in document[key])


def repositories() -> tuple[Repository, ...]:
    """Return every repository of the table."""
    return _rows("repositories.toml", "repository", Repository)


def toolkits() -> tuple[ToolkitRow, ...]:
    """Return every toolkit of the table."""
    return _rows("drivers.toml", "toolkit", ToolkitRow)


def branches() -> tuple[BranchRow, ...]:
    """Return every driver branch of the table."""
    return _rows("drivers.toml", "branch", BranchRow)


def chips() -> tuple[ChipRow, ...]:
    """Return every range of PCI device ids of the table."""
    return _rows("gpus.toml", "chip", ChipRow)


def gpus() -> tuple[GpuRow, ...]:
    """Return every board of the table."""
    return _rows("gpus.toml", "gpu", GpuRow)


def limits() -> tuple[LimitRow, ...]:
    """Return every limit of preflight."""
    return _rows("preflight.toml", "limit", LimitRow)


def limit(name: str) -> float:
    """Return a limit by name; raises KeyError for one that the table does not have."""
    for row in limits():
        if row.name == name:
            return row.value
    raise KeyError(name)


def repository(release: str) -> Repository | None:
    """Return NVIDIA's repository for a release such as ``debian12-x86_64``; None when none is known."""
    return next((row for row in repositories() if row.release == release), None)


def toolkit(version: str) -> ToolkitRow | None:
    """Return what is known of a toolkit such as 13.0, or None."""
    return next((row for row in toolkits() if row.version == version), None)


def branch(name: str) -> BranchRow | None:
    """Return what is known of a driver branch such as 580, or None."""
    return next((row for row in branches() if row.name == name), None)


@cache
def chip(device_id: str) -> ChipRow | None:
    """Return the range that a PCI device id lies in, or None for a GPU newer than the table."""
    value = int(device_id, 16)
    return next((row for row in chips() if int(row.first, 16) <= value <= int(row.last, 16)), None)


@cache
def gpu(device_id: str) -> GpuRow | None:
    """Return the board with this PCI device id, or None."""
    return next((row for row in gpus() if row.device_id == device_id), None)
