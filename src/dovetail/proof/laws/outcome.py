"""Outcome: what one law found on one spec. Plain data."""

from __future__ import annotations

import dataclasses as dc


@dc.dataclass
class Outcome:
    """One law on one spec."""

    law: str
    state: str  # passed, failed, excepted, excepted but passed, not applicable
    detail: str = ""
    seconds: float = 0.0
    exceptions: list[tuple[str, str]] = dc.field(default_factory=list)  # (kind, reason) of the declared exceptions
