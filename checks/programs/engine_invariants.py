"""Invariants of the engine's bookkeeping: of the schedule after each plan, of rows and pages after each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from checks.programs.frame import wrong
from dovetail.serving.engine import Engine
from dovetail.serving.schedule import Continuation, Plan


def check_plan(engine: Engine, plan: Plan, before: Sequence[Continuation]) -> None:
    """Raise Wrong unless a plan and the queues are right; `before` are the continuations that ran before it."""
    schedule, runner = engine.schedule, engine.runner
    queues = {"waiting": schedule.waiting, "running": schedule.running}
    for name, queue in queues.items():
        arrivals = [one.arrival for one in queue]
        if arrivals != sorted(arrivals) or len(set(arrivals)) < len(arrivals):
            wrong(f"{name}: {arrivals} are not in the order of arrival")
    everyone = {id(one) for ones in engine.requests.values() for one in ones}
    queued = [id(one) for queue in queues.values() for one in queue]
    if len(queued) != len(everyone) or set(queued) != everyone:
        wrong(f"{len(queued)} continuations are queued, and {len(everyone)} have not ended")
    if before and before[0] not in schedule.running:
        wrong("the oldest continuation was preempted")
    if any(one.row is not None or one.computed or one.drafts for one in schedule.waiting):
        wrong("a continuation that waits has a row, computed tokens or drafts")
    planned = [*plan.decode, *(one for one, _ in plan.prefill)]
    if len({id(one) for one in planned}) < len(planned) or any(one not in schedule.running for one in planned):
        wrong("a plan has a continuation twice, or one that does not run")
    if schedule.running and not plan:
        wrong("continuations run, and the plan is empty")
    if any(one.left != 1 for one in plan.decode) or any(not 1 <= n <= one.left for one, n in plan.prefill):
        wrong("a plan has more tokens of a continuation than are left, or one that decodes with more than one")
    tokens = sum(1 + len(one.drafts) for one in plan.decode) + sum(n for _, n in plan.prefill)
    if tokens > max(engine.schedule.budget, sum(1 + len(one.drafts) for one in plan.decode)) and not (
        runner.whole or runner.pool.ahead
    ):
        wrong(f"a plan of {tokens} tokens; the budget is {engine.schedule.budget}")
    counts = [*((one, 1 + len(one.drafts)) for one in plan.decode), *plan.prefill]
    needed = sum(runner.needed(one, n) for one, n in counts)
    # where rows share a page, one that was preempted may have left another without a need to copy it
    if plan.blocks < needed or (plan.blocks > needed and all(one.request.n == 1 for one in before)):
        wrong(f"a plan counts {plan.blocks} blocks, and its tokens take {needed}")
    if runner.slots is not None and plan.blocks > len(runner.slots.free):
        wrong(f"a plan takes {plan.blocks} blocks, and {len(runner.slots.free)} are free")
    check_rows(engine)


def check_rows(engine: Engine) -> None:
    """Raise Wrong unless every row and every page has exactly the users that are counted."""
    runner, pool, slots = engine.runner, engine.runner.pool, engine.runner.slots
    taken = [one.row for one in engine.schedule.running]
    if sorted([*runner.free_rows, *(row for row in taken if row is not None)]) != list(range(runner.rows)):
        wrong(f"rows: {runner.free_rows} are free, {taken} run, of {runner.rows}")
    for one in engine.schedule.running:
        if one.row is not None and pool.lengths[one.row] != one.computed:
            wrong(f"row {one.row} holds {pool.lengths[one.row]} tokens, and {one.computed} are counted as computed")
    if any(pool.lengths[row] for row in runner.free_rows):
        wrong("a free row holds tokens")
    if slots is None:
        return
    cached = [] if runner.prefix is None else [node.page for node in runner.prefix.nodes.values()]
    kept = Counter(page for page in cached if page is not None)
    if any(count > 1 for count in kept.values()) or set(kept) != slots.kept:
        wrong("the prefix cache has a page twice, or pages are counted as cached that are not")
    owned = Counter(page for pages in slots.owned for page in pages)
    for page in range(slots.pages):
        if slots.uses[page] != owned[page] + kept[page]:
            wrong(f"page {page}: {slots.uses[page]} users are counted, {owned[page]} rows and {kept[page]} blocks have it")
    if sorted(slots.free) != [page for page in range(slots.pages) if not slots.uses[page]]:
        wrong("free pages are not those without a user")
    if slots.idle != sum(slots.uses[page] == 1 for page in slots.kept):
        wrong(f"{slots.idle} pages are counted as idle")
    for one in engine.schedule.running:
        if one.row is None:
            continue
        pages, whole = slots.owned[one.row], one.computed // slots.page
        if len(pages) != -(-one.computed // slots.page):
            wrong(f"row {one.row} has {len(pages)} pages for {one.computed} tokens")
        if slots.table[one.row, : len(pages)].tolist() != pages:
            wrong(f"row {one.row}: the table of pages is not the list of its pages")
        if slots.kept & set(pages[whole:]):
            wrong(f"row {one.row} may write to a page of the prefix cache")
