"""What a rule says about an observed host. Every refusal is one of these."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "info"]

_CODE = re.compile(r"BU-(PRE|APT|DRV|CUD|LNK|FAB|ENV|VFY|SSH)-\d{3}")


@dataclass(frozen=True)
class Finding:
    """Name a cause, the evidence for it and the remedy.

    ``severity`` error stops the host, warning is shown and does not, info is only reported. ``evidence``
    holds JSON values; where a rule compared two things, under the keys ``wanted`` and ``found``.
    Raises ValueError for a code outside the scheme ``BU-AREA-nnn``.
    """

    code: str
    severity: Severity
    cause: str
    remedy: str
    evidence: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _CODE.fullmatch(self.code):
            raise ValueError(f"not a finding code: {self.code!r}")

    @property
    def is_refusal(self) -> bool:
        """Return whether this finding stops the host."""
        return self.severity == "error"

    def as_json(self) -> dict[str, object]:
        """Return the JSON object that reports and events carry."""
        return {
            "code": self.code,
            "severity": self.severity,
            "cause": self.cause,
            "evidence": dict(self.evidence),
            "remedy": self.remedy,
        }
