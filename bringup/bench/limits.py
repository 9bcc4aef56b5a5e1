"""Hold what a machine must reach: the rows of ``data/allreduce.toml``, and which of them apply."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bringup.bench.document import Document
from bringup.errors import InputError

Metric = Literal["busbw_gb_per_s", "median_us", "p99_per_median"]
Multicast = Literal["on", "off"]

SMALL_PAYLOAD_BYTES = 1 << 20
"""Payloads up to here are judged by their steadiness."""


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    models: tuple[str, ...]
    source: str = Field(min_length=10)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")

    def is_for_model(self, model: str) -> bool:
        """Return whether the row speaks of this model, by the name the driver gives it."""
        return model in self.models or "*" in self.models


class _RangeRow(_Row):
    gpus: tuple[int, int]

    def is_for(self, model: str, gpus: int) -> bool:
        """Return whether the row speaks of this many GPUs of this model."""
        return self.is_for_model(model) and self.gpus[0] <= gpus <= self.gpus[1]


class Machine(_RangeRow):
    """What connects the GPUs of a host. ``multicast_from_gpus`` 0: never."""

    link: str
    links: int
    gb_per_s_per_link: float
    multicast_from_gpus: int

    @property
    def is_nvlink(self) -> bool:
        """Return whether GPUs are connected by NVLink rather than PCIe."""
        return self.link.startswith("NVLink")


class Limit(_RangeRow):
    """What one backend must reach at one payload. ``warn`` or ``fail`` None: nothing is that bad."""

    link: str
    multicast: Literal["on", "off", "any"]
    p2p: bool | None = None
    algorithm: str
    backends: tuple[str, ...]
    metric: Metric
    payload_bytes: int
    expected: tuple[float, float]
    warn: float | None = None
    fail: float | None = None
    note: str

    def verdict(self, value: float) -> Literal["pass", "warn", "fail"]:
        """Return how a figure stands; bandwidth must not be below, times must not be above."""
        for limit, verdict in ((self.fail, "fail"), (self.warn, "warn")):
            if limit is not None and (value < limit if self.metric == "busbw_gb_per_s" else value > limit):
                return verdict  # type: ignore[return-value]
        return "pass"

    def wanted(self) -> str:
        """Return the limit as a person reads it."""
        value = self.fail if self.fail is not None else self.warn
        if self.metric == "busbw_gb_per_s":
            return f">= {value:g} GB/s busbw"
        return f"<= {value:g} us" if self.metric == "median_us" else f"p99 <= {value:g} times the median"


class ChannelCount(_RangeRow):
    """How many channels NCCL opens on a healthy machine, and the bus bandwidth at 1 GiB they share."""

    link: str
    count: int
    busbw_gb_per_s: float

    @property
    def gb_per_s_per_channel(self) -> float:
        """Return each channel's part when none is missing."""
        return self.busbw_gb_per_s / self.count


class Reference(_Row):
    """A published or measured figure."""

    gpus: int
    algorithm: str
    backend: str
    payload_bytes: int
    busbw_gb_per_s: float | None = None
    median_us: float | None = None


class Table(BaseModel):
    """The whole table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_: Literal[1] = Field(alias="schema")
    machine: tuple[Machine, ...]
    limit: tuple[Limit, ...]
    channels: tuple[ChannelCount, ...]
    reference: tuple[Reference, ...]

    @classmethod
    def from_toml(cls, text: str, source: str = "allreduce.toml") -> Table:
        """Return the table in a TOML text; raises InputError naming file and key path."""
        try:
            return cls.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{source} is not TOML", why=str(error)) from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise InputError(f"{source} cannot be used", why=f"{place}: {first['msg']}") from error

    def machine_of(self, document: Document) -> Machine | None:
        """Return what is known of the link of this machine, or None for a model nobody has described."""
        model = document.model
        if model is None:
            return None
        return next((row for row in self.machine if row.is_for(model, document.system.ranks)), None)

    def nvlinks(self, model: str | None, gpus: int) -> int | None:
        """Return how many NVLinks each GPU of a model has; 0 for a PCIe board, None for an unknown model."""
        found = next((row for row in self.machine if model is not None and row.is_for(model, gpus)), None)
        return found.links if found else None

    def channels_of(self, document: Document) -> ChannelCount | None:
        """Return how many channels this machine should have, or None."""
        model = document.model
        if model is None:
            return None
        return next((row for row in self.channels if row.is_for(model, document.system.ranks)), None)

    def references_of(self, document: Document) -> tuple[Reference, ...]:
        """Return the published figures for this model and count."""
        model = document.model or ""
        return tuple(r for r in self.reference if r.is_for_model(model) and r.gpus == document.system.ranks)

    def limits_of(self, document: Document, *, is_multicast_allowed: bool = True) -> Iterator[Limit]:
        """Yield the limits that apply to this machine; across hosts and on CPU there are none."""
        machine, model = self.machine_of(document), document.model
        multicast = expected_multicast(document, machine, is_multicast_allowed)
        has_p2p = should_have_p2p(document, machine)
        if model is None or document.system.device != "cuda" or document.system.is_across:
            return
        link = machine.link if machine else None
        for row in self.limit:
            if (
                row.is_for(model, document.system.ranks)
                and row.link in ("*", link)
                and row.multicast in ("any", multicast)
                and row.p2p in (None, has_p2p)
            ):
                yield row


def should_have_p2p(document: Document, machine: Machine | None) -> bool:
    """Return whether GPUs should reach each other directly: over NVLink always, over PCIe where CUDA says they can."""
    gpus = document.system.gpus
    if machine is not None and machine.is_nvlink:
        return True
    return bool(gpus) and all(gpu.peer_access is not None and len(gpu.peer_access) >= len(gpus) - 1 for gpu in gpus)


def expected_multicast(document: Document, machine: Machine | None, is_allowed: bool) -> Multicast:
    """Return whether NCCL should reduce inside the switch here: the hardware can, and there are GPUs enough."""
    if machine is None or not is_allowed or not machine.multicast_from_gpus:
        return "off"
    is_capable = all(gpu.is_multicast_capable for gpu in document.system.gpus)
    return "on" if is_capable and document.system.ranks >= machine.multicast_from_gpus else "off"
