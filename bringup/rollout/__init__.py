"""Decide how a change moves over a fleet: waves, limits, gates, and what to do next.

Everything here is pure: no clock, no host, no database. Times come in with the transitions.
"""

from bringup.rollout.decision import Decision, Do, decide
from bringup.rollout.gate import (
    Bandwidth,
    BandwidthKey,
    Check,
    Deviation,
    GateEvidence,
    GateVerdict,
    judge_gate,
)
from bringup.rollout.state import HostState, Phase, Rollout, Status, advance, replay
from bringup.rollout.transition import (
    AbortAsked,
    Halted,
    Observed,
    Pass,
    PauseAsked,
    Resumed,
    Started,
    Step,
    StepBegun,
    StepEnded,
    Transition,
    WaveOpened,
    from_json,
    to_json,
)
from bringup.rollout.wave import Limit, Limits, RolloutHost, Wave, plan_waves

__all__ = [
    "AbortAsked",
    "Bandwidth",
    "BandwidthKey",
    "Check",
    "Decision",
    "Deviation",
    "Do",
    "GateEvidence",
    "GateVerdict",
    "Halted",
    "HostState",
    "Limit",
    "Limits",
    "Observed",
    "Pass",
    "PauseAsked",
    "Phase",
    "Resumed",
    "Rollout",
    "RolloutHost",
    "Started",
    "Status",
    "Step",
    "StepBegun",
    "StepEnded",
    "Transition",
    "Wave",
    "WaveOpened",
    "advance",
    "decide",
    "from_json",
    "judge_gate",
    "plan_waves",
    "replay",
    "to_json",
]
