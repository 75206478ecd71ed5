"""Schedule: which tokens of which continuations run in the next step of the model.

    running, oldest first    every continuation that decodes gets one token
    then                     chunks of prompts share what is left of the token budget (chunked prefill)
    then                     waiting ones are admitted, oldest first, where a row is free and the blocks of the prompt fit

Where blocks run out, the youngest running continuation is preempted: its blocks are freed, and it waits for its turn by age.
Its tokens are computed again then. The oldest is never preempted, so that each request finishes.

This file is plain data: it asks a `Room` for rows and blocks. Yu et al. 2022 (Orca); Agrawal et al. 2024 (Sarathi-Serve).
"""

from __future__ import annotations

import dataclasses as dc
import time
from bisect import insort
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from dovetail.decoding.sampling import Sampling
from dovetail.serving.request import Request

if TYPE_CHECKING:
    from dovetail.text.grammar import Matcher


@dc.dataclass(eq=False)
class Continuation:
    """One of the n continuations of a request, in whatever state it is."""

    request: Request
    index: int
    arrival: tuple[int, int]  # (number of the request, index): the order in which continuations arrived
    tokens: list[int]  # of the decoder: the prompt and what was generated
    prompt: int  # how many of them are the prompt
    row: int | None = None  # its row in the pool, while it runs
    computed: int = 0  # tokens whose state the pool holds
    cached: int = 0  # tokens of the prompt that the prefix cache had at the first admission
    admitted: bool = False  # whether it ever ran
    keys: list[bytes] = dc.field(default_factory=list)  # of its whole blocks, computed as far as they were needed
    shared: int = 0  # blocks that were offered to the prefix cache
    drafts: list[int] = dc.field(default_factory=list)  # tokens that a drafter expects next, to compute with the last one
    arrived: float = dc.field(default_factory=time.perf_counter)
    begun: float = 0.0  # when it had a row for the first time
    matcher: Matcher | None = None  # the state of its text under a grammar: that of all its tokens, computed or not
    returned: int = 0  # tokens, those of the prompt included, when the last step ended

    @property
    def held_row(self) -> int:
        """Its row, of one that runs."""
        assert self.row is not None, "it has no row"
        return self.row

    @cached_property
    def sampling(self) -> Sampling:
        """The sampling of its request, with a seed of its own."""
        given = self.request.sampling
        return dc.replace(given, seed=given.seed + self.index)

    @property
    def left(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    def restart(self) -> None:
        """Forget its row, and the tokens that no step has returned: all others are computed again."""
        del self.tokens[max(self.returned, self.prompt) :]
        self.row, self.computed, self.shared, self.keys, self.drafts = None, 0, 0, [], []

    @property
    def generated(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt :]


class Room(Protocol):
    """Rows and blocks of a pool."""

    def admit(self, one: Continuation) -> bool:
        """Give it a row, with what the prefix cache knows of its tokens; False where no row is free."""
        ...

    def release(self, one: Continuation) -> None:
        """Take its row; its blocks are free, or stay in the prefix cache."""

    def needed(self, one: Continuation, n: int) -> int:
        """Free blocks that n more tokens of it take."""
        ...

    def ensure(self, blocks: int) -> bool:
        """Make so many blocks free, if cached prefixes can give way; returns whether they are."""
        ...

    def cut(self, one: Continuation, n: int) -> int:
        """How many of its next n tokens one step may compute, at least 1."""
        ...


@dc.dataclass
class Plan:
    """The tokens of one step: how many of each continuation."""

    decode: list[Continuation] = dc.field(default_factory=list)
    prefill: list[tuple[Continuation, int]] = dc.field(default_factory=list)
    blocks: int = 0  # that the step takes

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


class Schedule:
    """Continuations that wait and run."""

    def __init__(self, budget: int) -> None:
        """`budget`: tokens per step."""
        self.budget = budget
        self.waiting: list[Continuation] = []  # by arrival
        self.running: list[Continuation] = []  # by arrival
        self.preemptions = 0

    def add(self, one: Continuation) -> None:
        """Queue it by its arrival."""
        insort(self.waiting, one, key=lambda other: other.arrival)

    def restart(self, ones: Iterable[Continuation]) -> None:
        """Let these wait, and no other."""
        self.waiting, self.running = sorted(ones, key=lambda one: one.arrival), []

    def started(self, one: Continuation) -> None:
        """Count a continuation that has a row to the running ones."""
        if not one.admitted:
            one.admitted, one.begun = True, time.perf_counter()
        insort(self.running, one, key=lambda other: other.arrival)

    def remove(self, one: Continuation, room: Room) -> None:
        """Take it out, wherever it is."""
        if one in self.running:
            self.running.remove(one)
            room.release(one)
        elif one in self.waiting:
            self.waiting.remove(one)

    def plan(self, room: Room) -> Plan:
        """Choose the tokens of the next step; admits and preempts as needed."""
        plan = Plan()
        for one in list(self.running):  # oldest first
            if one.row is None or one.left > 1:
                continue
            if one.drafts and not room.ensure(plan.blocks + room.needed(one, 1 + len(one.drafts))):
                one.drafts = []  # no other continuation is preempted for them
            if self._fits(one, 1 + len(one.drafts), plan, room):
                plan.decode.append(one)
        budget = self.budget - sum(1 + len(one.drafts) for one in plan.decode)
        for one in list(self.running):
            if budget > 0 and one.row is not None and one.left > 1:
                budget -= self._prefill(one, budget, plan, room)
        while budget > 0 and self.waiting and self._may_start(self.waiting[0]):
            one = self.waiting[0]
            if not room.admit(one):
                break
            # the whole prompt and one token more, and a block for each that runs: else the next steps would preempt again
            if not room.ensure(plan.blocks + room.needed(one, one.left + 1) + len(self.running)):
                room.release(one)
                break
            del self.waiting[0]
            self.started(one)
            budget -= self._prefill(one, budget, plan, room)
        return plan

    def _may_start(self, one: Continuation) -> bool:
        """Whether it need not wait for the first continuation of its request, which computes the prompt for all."""
        if one.index == 0 or one.admitted:
            return True
        first = (one.arrival[0], 0)
        return not any(other.arrival == first and other.left > 1 for other in self.running)

    def _prefill(self, one: Continuation, budget: int, plan: Plan, room: Room) -> int:
        """Add a chunk of its tokens to the plan, if it fits; returns the number of them."""
        n = room.cut(one, min(one.left, budget))
        if not self._fits(one, n, plan, room):
            return 0
        if one.left == 1:
            plan.decode.append(one)
        else:
            plan.prefill.append((one, n))
        return n

    def _fits(self, one: Continuation, n: int, plan: Plan, room: Room) -> bool:
        """Whether blocks for n more tokens of it are there, after younger ones were preempted; they are then taken."""
        blocks = room.needed(one, n)
        while not room.ensure(plan.blocks + blocks):
            youngest = self.running[-1]
            assert len(self.running) > 1, "one continuation does not fit into the pool"  # refused when it was added
            if youngest is one or youngest in plan.decode or any(youngest is other for other, _ in plan.prefill):
                if one is not self.running[0]:  # it waits for older ones, which end
                    return False
                self._undo(youngest, plan, room)
            self.preempt(youngest, room)
        plan.blocks += blocks
        return True

    def _undo(self, one: Continuation, plan: Plan, room: Room) -> None:
        """Take the tokens of a continuation out of a plan."""
        counts = {other: 1 + len(other.drafts) for other in plan.decode} | dict(plan.prefill)
        plan.blocks -= room.needed(one, counts[one])
        plan.decode = [other for other in plan.decode if other is not one]
        plan.prefill = [(other, n) for other, n in plan.prefill if other is not one]

    def preempt(self, one: Continuation, room: Room) -> None:
        """Free its row and blocks, and let it wait for its turn."""
        self.running.remove(one)
        room.release(one)
        self.preemptions += 1
        self.add(one)
