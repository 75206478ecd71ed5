"""Stragglers: ranks whose own work of a step takes longer than that of the others, which wait for them.

    own work      data, forward and backward pass, without the seconds inside collectives (parallel/collective.py)
    straggler     median over WINDOW steps ≥ FACTOR · the median rank's, the lower of two middle ones

The seconds of all ranks are sent with the loss, in its collective.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from dovetail.parallel.collective import waiting

WINDOW = 20  # steps after which ranks are compared
FACTOR = 1.5
MOST = 8  # stragglers that a line names


class Stragglers:
    """The seconds of own work of each rank, step by step. `hosts` are the names of the ranks' hosts."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self.begun: float | None = None
        self.steps = list[tuple[float, ...]]()
        self.slow = frozenset[int]()
        self.imbalance: float | None = None  # of the last step: the slowest rank's work ÷ the median rank's

    def begin(self) -> None:
        """Begin a step of this rank."""
        self.begun = time.perf_counter() - waiting.seconds

    def seconds(self) -> float:
        """The seconds of this rank's own work in the step so far."""
        return 0.0 if self.begun is None else time.perf_counter() - waiting.seconds - self.begun

    def add(self, seconds: Sequence[float]) -> None:
        """Add a step: the seconds of each rank."""
        middle = statistics.median_low(seconds)
        self.imbalance = max(seconds) / middle if middle > 0 else None
        self.steps.append(tuple(seconds))

    def changed(self, step: int) -> str | None:
        """After every WINDOW steps: which ranks are stragglers now, where these are others than before."""
        if len(self.steps) < WINDOW:
            return None
        medians = [statistics.median(rank) for rank in zip(*self.steps, strict=True)]
        self.steps.clear()
        middle = statistics.median_low(medians)
        slow = frozenset(rank for rank, median in enumerate(medians) if median >= FACTOR * middle > 0)
        if slow == self.slow:
            return None
        self.slow = slow
        when = f"steps {step - WINDOW + 1} to {step}"
        if not slow:
            return f"{when}: no rank is slow any more"
        named = [
            f"rank {rank} ({self.hosts[rank]}) is slow: {medians[rank]:.3f} s of its own work per step, "
            f"{medians[rank] / middle:.1f} times the median rank's"
            for rank in sorted(slow, key=lambda rank: -medians[rank])[:MOST]
        ]
        rest = [f"and {len(slow) - MOST} more ranks"] if len(slow) > MOST else []
        return f"{when}: {'; '.join([*named, *rest])}"
