"""Replay a program as a failing run prints it: raises what it raised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from checks.programs.frame import Step
from checks.programs.kinds import kind_of


def replay(kind: str, setup: Mapping[str, Any], steps: Sequence[Step]) -> None:
    """Run the steps on a new object."""
    session = kind_of(kind).start(setup)
    for call, arguments in steps:
        session.do(call, **arguments)
    session.end()
