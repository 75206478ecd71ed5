"""The list of laws on servers, and how one of them runs."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable

from dovetail.proof.served.case import Served

Check = Callable[[Served], str | None]


@dc.dataclass(frozen=True)
class ServedLaw:
    """A named equality; its check returns a note on what it could not test."""

    name: str
    number: int
    says: str
    check: Check


SERVED: dict[str, ServedLaw] = {}


def law(number: int, name: str, says: str) -> Callable[[Check], Check]:
    """Register a law for servers."""

    def decorate(check: Check) -> Check:
        SERVED[name] = ServedLaw(name, number, says, check)
        return check

    return decorate
