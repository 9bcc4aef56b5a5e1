"""Judge the all-reduce: pure functions from the bench's documents and the limits to a verdict with its cause.

``parse`` reads a document, ``Table.from_toml`` the limits; ``judge`` says how the host stands and whether
another run is needed first: once more when it was slow, with P2P off in NCCL when it hung.
"""

from bringup.bench.cause import Cause
from bringup.bench.document import Document, parse
from bringup.bench.limits import Table
from bringup.bench.verdict import Figure, Judgement, Key, Runs, Verdict, busbw_gb_per_s, deviation, figures, judge

__all__ = [
    "Cause",
    "Document",
    "Figure",
    "Judgement",
    "Key",
    "Runs",
    "Table",
    "Verdict",
    "busbw_gb_per_s",
    "deviation",
    "figures",
    "judge",
    "parse",
]
