"""The schedule over random programs with a tiny pool: what each plan counts, whom it admits and preempts."""

from __future__ import annotations

import random

import pytest

from dovetail.serving.request import Request
from dovetail.serving.schedule import Continuation, Plan, Schedule

PAGE = 2


class Pages:
    """A room of rows and pages, which no two rows share."""

    def __init__(self, rows: int, pages: int) -> None:
        self.free, self.pages, self.owned = list(range(rows)), pages, dict[int, int]()

    def admit(self, one: Continuation) -> bool:
        if not self.free:
            return False
        one.row = self.free.pop()
        self.owned[one.row] = 0
        return True

    def release(self, one: Continuation) -> None:
        assert one.row is not None
        del self.owned[one.row]
        self.free.append(one.row)
        one.row, one.computed, one.drafts = None, 0, []

    def needed(self, one: Continuation, n: int) -> int:
        assert one.row is not None
        return -(-(one.computed + n) // PAGE) - self.owned[one.row]

    def ensure(self, blocks: int) -> bool:
        return self.pages - sum(self.owned.values()) >= blocks

    def cut(self, one: Continuation, n: int) -> int:
        return n


def counts_of(plan: Plan) -> list[tuple[Continuation, int]]:
    return [*((one, 1 + len(one.drafts)) for one in plan.decode), *plan.prefill]


@pytest.mark.parametrize("seed", range(40))
def test_every_plan_counts_the_blocks_and_tokens_that_it_takes(seed: int) -> None:
    rng = random.Random(seed)
    pages, budget = rng.randint(8, 30), rng.choice([3, 9, 14, 20, 60])
    room, schedule, number = Pages(rng.randint(2, 5), pages), Schedule(budget), 0
    for _ in range(200):
        if rng.random() < 0.3 and len(schedule.waiting) < 4:
            number += 1
            prompt = tuple(range(rng.randint(1, max(1, PAGE * pages - 8))))
            request = Request(id=str(number), prompt=prompt, max_tokens=pages * PAGE - len(prompt))
            schedule.add(Continuation(request, 0, (number, 0), list(prompt), len(prompt)))
        for one in schedule.running:
            free = pages * PAGE - len(one.tokens)
            one.drafts = [0] * min(rng.choice([0, 1, 3, 5]), max(free - 1, 0)) if one.left == 1 else []
        oldest = schedule.running[:1]
        plan = schedule.plan(room)
        counts = counts_of(plan)
        assert plan.blocks == sum(room.needed(one, n) for one, n in counts)
        assert room.ensure(plan.blocks)
        assert sum(n for _, n in counts) <= max(budget, sum(1 + len(one.drafts) for one in plan.decode))
        assert oldest == [one for one in oldest if one in schedule.running]
        assert plan or not (schedule.running or schedule.waiting)
        for queue in (schedule.running, schedule.waiting):
            assert [one.arrival for one in queue] == sorted(one.arrival for one in queue)
        for one, n in counts:
            assert one.row is not None
            kept = rng.randint(0, len(one.drafts)) if one in plan.decode else 0
            if one.left == n - len(one.drafts):  # it was ready for its next token, behind the drafts that are right
                one.tokens += [0] * (kept + 1)
            if not one.drafts or rng.random() < 0.7:  # else a recurrent state is where it was before the step
                one.computed += n - (len(one.drafts) - kept)
            room.owned[one.row] = -(-one.computed // PAGE)
            one.drafts = []
            if len(one.tokens) >= pages * PAGE or rng.random() < 0.05:
                schedule.remove(one, room)
