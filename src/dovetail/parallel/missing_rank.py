"""Which rank did not arrive at a collective that failed, from what all ranks answered (parallel/heartbeat.py).

    waiting   in a collective: not the cause
    failed    its collective also failed: not the cause
    ended     by an error of its own, before the collective
    silent    stopped, dead, unreachable, or in native code
    running   somewhere else: in its data, on a disk, in an endless loop

Silent and ended ranks are the cause where there are any: meanwhile another rank may be on its way. Without any cause the ranks
wait in different collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dovetail.parallel.heartbeat import Member

MOST = 8  # ranks that a message names
STATES = {
    "silent": "does not respond: it is stopped, dead, unreachable or in native code",
    "running": "runs outside every collective",
    "waiting": "waits in",
    "failed": "also failed",
    "ended": "ended with",
}


def missing(answers: Sequence[dict[str, Any]]) -> list[int]:
    """The ranks that did not arrive; none where every rank waits."""
    lost = [rank for rank, one in enumerate(answers) if one["state"] in ("silent", "ended")]
    return lost or [rank for rank, one in enumerate(answers) if one["state"] == "running"]


def named(rank: int, members: Sequence[Member]) -> str:
    """A rank with its host and process."""
    return f"rank {rank} ({members[rank].host}, process {members[rank].pid})"


def described(answer: dict[str, Any]) -> str:
    """Where a rank is, and for how long."""
    step = "before the first step" if answer["step"] is None else f"step {answer['step']}"
    where = f"{step}, phase {answer['phase']}, for {answer['seconds']:.0f} s"
    if answer["state"] == "silent":
        where = f"last seen at {step}, phase {answer['phase']}"
    return f"{where}: {STATES[answer['state']]}{' ' if answer['cause'] else ''}{answer['cause']}"


def problem(answers: Sequence[dict[str, Any]], members: Sequence[Member]) -> str:
    """Which ranks did not arrive, in one line."""
    lost = missing(answers)
    if not lost:
        waits = sorted({one["cause"] for one in answers if one["state"] == "waiting"})
        if not waits:
            return "a collective failed on every rank, so a link between them may be broken"
        return f"no rank is missing, but they wait in different collectives ({'; '.join(waits[:MOST])})"
    return _listed(f"{named(rank, members)} did not arrive, {described(answers[rank])}" for rank in lost)


def stacks_of(answers: Sequence[dict[str, Any]], members: Sequence[Member]) -> str:
    """The stacks of the ranks that did not arrive, where they sent them."""
    lost = [rank for rank in missing(answers) if answers[rank]["stacks"]][:MOST]
    return "".join(f"The stacks of {named(rank, members)}:\n{answers[rank]['stacks']}" for rank in lost)


def _listed(lines: Iterable[str]) -> str:
    found = list(lines)
    rest = len(found) - MOST
    return "; ".join([*found[:MOST], *([f"and {rest} more ranks"] if rest > 0 else [])])
