"""Outcome: the result of one law on one spec, foreign model or server. Plain data."""

from __future__ import annotations

import dataclasses as dc


@dc.dataclass
class Outcome:
    """One law on one model."""

    law: str
    state: str  # passed, failed, excepted, excepted but passed, not applicable
    detail: str = ""
    seconds: float = 0.0
    exceptions: list[tuple[str, str]] = dc.field(default_factory=list)  # (kind, reason) of the declared exceptions
