"""Name everything that can happen to a rollout, in the form that the history keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from bringup.rollout.wave import Limits, RolloutHost, Wave

Pass = Literal["driver", "environment"]
Step = Literal["prepare", "drain", "inspect", "cutover", "gate", "rollback", "undrain"]


@dataclass(frozen=True)
class Started:
    """The rollout was planned. ``passes`` has driver first where the stack changes it.

    ``soak_s`` is how long a host must stay good after its cutover before the gate may pass.
    """

    time_s: float
    id: str
    stack: str
    digest: str
    hosts: tuple[RolloutHost, ...]
    waves: tuple[Wave, ...]
    limits: Limits
    passes: tuple[Pass, ...] = ("environment",)
    soak_s: float = 0.0
    kind: Literal["started"] = "started"


@dataclass(frozen=True)
class Observed:
    """Every host was looked at before a wave; these did not answer."""

    time_s: float
    unreachable: tuple[str, ...] = ()
    kind: Literal["observed"] = "observed"


@dataclass(frozen=True)
class WaveOpened:
    """These hosts may now be drained."""

    time_s: float
    hosts: Wave
    kind: Literal["wave_opened"] = "wave_opened"


@dataclass(frozen=True)
class StepBegun:
    """A step is about to begin on a host. Recorded before the host is touched.

    A step may be begun again after a crash, so each must come to the same end when it is done twice. A
    ``rollback`` in particular leaves a host alone that no longer serves the digest of the rollout.
    """

    time_s: float
    host: str
    step: Step
    kind: Literal["step_begun"] = "step_begun"


@dataclass(frozen=True)
class StepEnded:
    """A step ended on a host.

    ``is_ok`` for ``inspect`` means that the host already serves the wanted digest. ``is_unreachable``: the
    host did not answer, which is never ok. ``is_as_wanted``: the host was prepared and nothing is left to cut over.
    """

    time_s: float
    host: str
    step: Step
    is_ok: bool
    why: str | None = None
    is_unreachable: bool = False
    is_as_wanted: bool = False
    kind: Literal["step_ended"] = "step_ended"


@dataclass(frozen=True)
class Halted:
    """The next wave may not begin."""

    time_s: float
    why: str
    kind: Literal["halted"] = "halted"


@dataclass(frozen=True)
class PauseAsked:
    """Someone asked that no further wave begins. The open one is finished."""

    time_s: float
    who: str
    kind: Literal["pause_asked"] = "pause_asked"


@dataclass(frozen=True)
class AbortAsked:
    """Someone asked for the end: hosts not yet cut over are put back, the others are finished."""

    time_s: float
    who: str
    kind: Literal["abort_asked"] = "abort_asked"


@dataclass(frozen=True)
class Resumed:
    """A controller goes on: after its predecessor died, after a pause, or after a halt.

    Another ``digest`` than before means that the stack was changed: every host then starts again, the canary
    first. Where a wave is open it is undone first, and another ``Resumed`` is needed after that.
    ``is_unpinned``: no host has a pin on this digest any more. ``without``: hosts that are left out from now
    on, and from every denominator.
    """

    time_s: float
    who: str
    digest: str
    is_unpinned: bool = False
    without: tuple[str, ...] = ()
    kind: Literal["resumed"] = "resumed"


Transition = Annotated[
    Started | Observed | WaveOpened | StepBegun | StepEnded | Halted | PauseAsked | AbortAsked | Resumed,
    Field(discriminator="kind"),
]

_ADAPTER: TypeAdapter[Transition] = TypeAdapter(Transition, config=ConfigDict(defer_build=True))


def to_json(transition: Transition) -> dict[str, object]:
    """Return the JSON object that the history keeps for a transition."""
    document: dict[str, object] = _ADAPTER.dump_python(transition, mode="json")
    return document


def from_json(document: object) -> Transition:
    """Return the transition that ``to_json`` wrote. Raises pydantic.ValidationError for anything else."""
    return _ADAPTER.validate_python(document)
