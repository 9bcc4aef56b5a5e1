"""Remember runs, hosts and rollouts in a database: SQLite for one person, PostgreSQL for a team."""

from bringup.history.database import Database
from bringup.history.rollouts import (
    LEASE_S,
    Lease,
    RolloutLog,
    list_rollouts,
    list_waves,
    open_rollout,
    rollout_subject,
    start_rollout,
    take_lease,
)
from bringup.history.store import History, Recorder, recorder

__all__ = [
    "LEASE_S",
    "Database",
    "History",
    "Lease",
    "Recorder",
    "RolloutLog",
    "list_rollouts",
    "list_waves",
    "open_rollout",
    "recorder",
    "rollout_subject",
    "start_rollout",
    "take_lease",
]
