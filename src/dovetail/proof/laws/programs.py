"""Law 19, programs: random programs over the decode state, on every layout, against the full forward pass.

A program is a random sequence of steps (batched and flat, rows without a new token too), forks, rows restored from another,
marks, roll-backs (several in a row), frees with admissions, and steps that must be refused. The law keeps the tokens of every
row as a plain list. Each step's outputs must equal those of one pass over the whole list; a refused step must change
nothing; a roll-back must reach its last mark; and when all rows are freed, the pool must have all its room again.
"""

from __future__ import annotations

import dataclasses as dc
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dovetail.base.errors import StateError
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import BATCH, DTYPE, LENGTHS, Case, N, law
from dovetail.proof.laws.sequence import LAYOUTS, CaseDecoder, decodes
from dovetail.state import saved
from dovetail.state.pool import Layout, Pool
from dovetail.state.slots import Paged

ROWS, PAGE, PAGES, SLACK = 4, 4, 14, 3  # fewer pages than four full rows need, so that paged steps are refused by chance, too


@dc.dataclass
class ProgramRow:
    """The expected state of one row: the number of its encoder input, its tokens and its marks."""

    source: int = 0
    tokens: list[int] = dc.field(default_factory=list)
    marks: list[int] = dc.field(default_factory=list)


@dc.dataclass(frozen=True)
class ProgramOutput:
    """The outputs of one row in one step: those of the last `len(out)` of its `tokens`."""

    what: str
    source: int
    tokens: tuple[int, ...]
    out: Tensor


class Program(CaseDecoder):
    """A random program on one layout."""

    def __init__(
        self, case: Case, layout: Layout, encoded: dict[int, tuple[Tensor, TokenLayout]], attended: int | None = None
    ) -> None:
        """`encoded`: encoder outputs by the number of their input, shared by the programs of a case; `attended`: as of the
        pool."""
        self.case, self.layout, self.encoded, self.listen = case, layout, encoded, None
        self.rng = random.Random(f"{case.seed} {layout} {case.spec.key}")
        how: dict[str, Any] = {"layout": layout, "dtype": DTYPE, "source": N, "page": PAGE, "pages": PAGES, "slack": SLACK}
        self.pool = Pool(case.spec, ROWS, N, **how, attended=attended)
        self.rows = [ProgramRow() for _ in range(ROWS)]
        self.outputs: list[ProgramOutput] = []
        self.vocabulary = case.inputs.unique().tolist()
        self.ahead = self.pool.ahead  # a row begins with as many tokens
        groups = list(self.pool.groups.values())
        self.exact = not any(group.slots.overwrites for group in groups)  # every roll-back reaches exactly the length asked for
        self.bounded = any(group.per in ("token", "block") and not group.slots.overwrites for group in groups)

    def run(self) -> list[ProgramOutput]:
        """Two steps, then the actions in random order (only some of them where `case.share` is above 1)."""
        for row in range(ROWS):
            self.admit_row(row)
        self.step(list(range(ROWS)), [self.rng.randint(4, 7) for _ in range(ROWS)])
        self.step(list(range(3)), [self.rng.randint(4, 6) for _ in range(3)])
        actions: list[Callable[[], None]] = [self.leave_rows_out, self.rewind, self.rewind_a_fork, self.rewind_to_a_mark]
        actions += [self.mark_again, self.fork, self.restore, self.refuse, self.end_row]
        self.rng.shuffle(actions)
        for action in actions[: len(actions) // self.case.share + self.case.share - 1]:
            action()
        self.release()
        return self.outputs

    # -- actions

    def leave_rows_out(self) -> None:
        """A flat and a batched step of some rows, of which some have no new token; then a step of one of those."""
        for flat in (True, False):
            rows = self.rng.sample(range(ROWS), self.rng.randint(2, ROWS))
            new = [self.rng.choice([0, 1, 1, 2, 5]) for _ in rows]
            new[0], new[-1] = 1, 0
            self.step(rows, new, flat=flat)
            self.step([rows[-1]], [1])

    def rewind(self) -> None:
        """Three short roll-backs in a row, and a step."""
        row = self.long_row()
        for _ in range(3):
            self.rollback(row, len(self.rows[row].tokens) - self.rng.randint(2, SLACK))
        self.step([row], [2])

    def rewind_a_fork(self) -> None:
        """A short roll-back, a fork, and a short roll-back of the new row."""
        row = self.long_row()
        self.rollback(row, len(self.rows[row].tokens) - SLACK)
        copy = self.rng.choice([other for other in range(ROWS) if other != row])
        self.copy_row(row, copy)
        self.rollback(copy, len(self.rows[copy].tokens) - self.rng.randint(2, SLACK))
        self.step([row, copy], [1, 2])

    def rewind_to_a_mark(self) -> None:
        """A short roll-back, a mark, more tokens than a ring can roll back; a roll-back to the mark, and one beyond it."""
        row = self.long_row()
        self.rollback(row, len(self.rows[row].tokens) - SLACK)
        point = self.mark(row)
        self.step([row], [SLACK + 2])
        self.rollback(row, point)
        self.rollback(row, len(self.rows[row].tokens) - self.rng.randint(2, SLACK))
        self.step([row], [2])

    def mark_again(self) -> None:
        """Two marks; a roll-back to before the second; other tokens beyond it; a roll-back to the place of the second."""
        row = self.long_row(room=SLACK + 2)
        self.rollback(row, len(self.rows[row].tokens) - SLACK)
        first = self.mark(row)
        self.step([row], [2])
        second = self.mark(row)
        self.step([row], [2])
        self.rollback(row, self.rng.randint(first, second - 1))
        self.step([row], [second + 2 - len(self.rows[row].tokens)])
        self.rollback(row, second)
        self.step([row], [2])

    def fork(self) -> None:
        """A marked row continues and forks, both rows continue with different tokens and are marked at different lengths; one
        rolls back to where only the other has a mark, the other to the mark before the fork."""
        a = self.long_row(room=SLACK + 5)
        b = self.rng.choice([row for row in range(ROWS) if row != a])
        point = self.mark(a)
        self.step([a], [SLACK + 2])
        self.copy_row(a, b)
        self.step([b, a], [2, 1])
        self.mark(a)
        there = self.mark(b)
        self.step([a, b], [2, 1])
        self.rollback(a, there)
        self.rollback(b, point + self.rng.randint(0, 1))
        self.step([a, b], [1, 2])

    def restore(self) -> None:
        """A row restored from another continues beside it with other tokens; a third is rolled back at once, by more than the
        slack of a ring."""
        a = self.long_row(room=SLACK)
        b, c = self.rng.sample([row for row in range(ROWS) if row != a], 2)
        for row, back in ((b, 0), (c, SLACK + 2)):
            self.free(row, self.rows[a].source)
            self.rows[row].tokens = tokens = self.rows[a].tokens[:]
            saved.restore(self.pool, row, len(tokens), saved.pages_of(self.pool, a), saved.snapshot(self.pool, a))
            self.rollback(row, len(tokens) - back)
            self.step([a, row], [1, 2])

    def refuse(self) -> None:
        """Steps that are refused: a row that is too long behind a forked one, rows too long together, one row twice."""
        a, b, c = self.rng.sample(range(ROWS), 3)
        self.step([a], [1 if len(self.rows[a].tokens) % PAGE else 2])
        self.copy_row(a, b)
        if self.bounded:
            self.step([a, c], [PAGE, N + PAGE], fits=False)
        if any(isinstance(group.slots, Paged) for group in self.pool.groups.values()):
            self.step(list(range(ROWS)), [self.room(row) for row in range(ROWS)], fits=None)
        self.step([a, c, a], [1, 1, 1], fits=False)
        self.step([b, a], [1, PAGE])

    def end_row(self) -> None:
        """A row ends, and another sequence begins in it."""
        row = self.rng.randrange(ROWS)
        self.free(row)
        self.step([row], [self.rng.randint(1, 7)])

    # -- the operations of actions

    def room(self, row: int) -> int:
        """The number of tokens that still fit in the row."""
        return N - len(self.rows[row].tokens)

    def admit_row(self, row: int, source: int | None = None) -> None:
        """Begin a sequence, with an encoder input of its own, or this one, where the model has an encoder."""
        source = self.rng.randrange(BATCH) if source is None else source
        self.rows[row] = ProgramRow(source)
        if self.case.spec.encoder is None:
            return
        if source not in self.encoded:
            assert self.case.source is not None
            tokens = self.case.source[source : source + 1, : LENGTHS[source]]
            ctx = Ctx(layout=TokenLayout.whole(1, LENGTHS[source]), patches=self.case.source_patches)
            self.encoded[source] = self.case.model.encode(tokens, ctx)
        output, layout = self.encoded[source]
        ctx = Ctx(layout=layout, encoder_output=output, encoder_layout=layout)
        self.case.model.fill(ctx, self.pool.admit([row], [LENGTHS[source]]))

    def free(self, row: int, source: int | None = None) -> None:
        """End the sequence of a row and begin another."""
        self.pool.free(row)
        self.admit_row(row, source)

    def long_row(self, room: int = 0) -> int:
        """A row of 12 tokens or more, so that small windows have wrapped, with room for more."""
        row = self.rng.randrange(ROWS)
        if self.room(row) < room:
            self.free(row)
        self.step([row], [max(12 - len(self.rows[row].tokens), 0)])
        return row

    def copy_row(self, a: int, b: int) -> None:
        """Fork row a to row b."""
        self.pool.fork(a, b)
        self.rows[b] = dc.replace(self.rows[a], tokens=self.rows[a].tokens[:], marks=self.rows[a].marks[:])

    def mark(self, row: int) -> int:
        """Mark a row; returns its length."""
        self.pool.mark(row)
        self.rows[row].marks.append(len(self.rows[row].tokens))
        return self.rows[row].marks[-1]

    def rollback(self, row: int, n: int) -> None:
        """Roll a row back to n tokens, where it has more, and its list to the length that was reached."""
        state, n = self.rows[row], max(n, 0)
        if n > len(state.tokens):
            return
        marks = [m for m in state.marks if self.ahead <= m <= n]
        reached, mark = self.pool.rollback(row, n), max(marks, default=0)
        least = (n if n >= self.ahead or n == len(state.tokens) else 0) if self.exact else mark
        message = f"{self.layout}: rolled row {row} back from {len(state.tokens)} to {n} tokens and reached {reached}"
        self.case.true(least <= reached <= n, f"{message}; the last mark is at {mark}")
        state.tokens, state.marks = state.tokens[:reached], [m for m in state.marks if m <= reached]

    def step(self, rows: list[int], new: list[int], fits: bool | None = True, flat: bool | None = None) -> None:
        """One step with random tokens, batched or flat. A refusal must change nothing; if the step must fit, rows are then
        freed until it does. `fits` None: it may be refused."""
        if fits:
            begun = [bool(self.rows[row].tokens) for row in rows]
            new = [n if old or not n else max(n, self.ahead) for old, n in zip(begun, new, strict=True)]
            new = [max(min(n, self.room(row)), 0) for row, n in zip(rows, new, strict=True)]
        if not sum(new):
            return
        flat = self.rng.random() < 0.5 if flat is None else flat
        pieces = [[self.rng.choice(self.vocabulary) for _ in range(n)] for n in new]
        before = snapshot(self.pool)
        try:
            outs = self.feed(rows, [torch.tensor(piece, dtype=torch.long) for piece in pieces], flat)
        except StateError as refusal:
            self.case.true(snapshot(self.pool) == before, f"{self.layout}: a refused step ({refusal}) changed the pool")
            if fits:
                taken = sorted((row for row in range(ROWS) if self.rows[row].tokens), key=lambda row: row in rows)
                self.case.true(bool(taken), f"{self.layout}: an empty pool refused {new} tokens for rows {rows}: {refusal}")
                self.free(taken[0])
                self.step(rows, new, fits, flat)
            return
        self.case.true(fits is not False, f"{self.layout}: a step of {new} tokens for rows {rows} was not refused")
        for row, piece, out in zip(rows, pieces, outs, strict=True):
            state = self.rows[row]
            state.tokens += piece
            what = f"{self.layout}: row {row} of a {'flat' if flat else 'batched'} step of rows {rows}, tokens {new}"
            self.outputs.append(ProgramOutput(what, state.source, tuple(state.tokens), out))

    def release(self) -> None:
        """Free every row, and check that the pool then takes as many tokens as a new one."""
        for row in range(ROWS):
            self.pool.free(row)
        try:
            for row in range(PAGES * PAGE // N):
                self.pool.step([row], [N])
        except StateError as refusal:
            self.case.true(False, f"{self.layout}: after all rows were freed, the pool has no room: {refusal}")


def snapshot(pool: Pool) -> list[Any]:
    """Everything in a pool that a refused step must not change, as plain data."""
    counts = [pool.lengths[:], pool.written[:], pool.source_lengths[:], [[m.length for m in marks] for marks in pool.marks]]
    slots = [{name: _plain(value) for name, value in vars(group.slots).items()} for group in pool.groups.values()]
    return [counts, slots, [store.sum().item() for group in pool.groups.values() for store in group.tensors()]]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else repr(value)


@law(
    19,
    "programs",
    "random programs of steps, forks, marks, roll-backs, frees and refused steps equal the full forward pass, on every layout",
    excepted_with=("chunked", "rollback"),
)
@torch.no_grad()
def programs(case: Case) -> None:
    """Run a program on every layout; compare every step with one pass over all sequences that the programs built."""
    decodes(case)
    encoded: dict[int, tuple[Tensor, TokenLayout]] = {}
    outputs = [output for layout in LAYOUTS for output in Program(case, layout, encoded).run()]

    def whole(batch: Tensor, sources: list[int]) -> Tensor:
        how: dict[str, Any] = {"layout": TokenLayout.whole(len(batch), N)}
        if case.source is not None:
            how |= {"source": case.source[sources], "source_layout": TokenLayout.padded([LENGTHS[s] for s in sources], N)}
        return case.stream(batch, case.ctx(**how))

    compare(case, outputs, whole, "cached and whole")


def compare(case: Case, outputs: list[ProgramOutput], whole: Callable[[Tensor, list[int]], Tensor], what: str) -> None:
    """Compare the outputs of programs with `whole(tokens (rows, N), number of the encoder input of each)`."""
    # of sequences with a common prefix only the longest is run: in a causal model later tokens change no earlier output
    wanted = sorted({(output.source, output.tokens) for output in outputs})
    longest = [
        (source, tokens)
        for i, (source, tokens) in enumerate(wanted)
        if i + 1 == len(wanted) or wanted[i + 1][0] != source or wanted[i + 1][1][: len(tokens)] != tokens
    ]
    filler = case.inputs.flatten().tolist()[:N]
    batch = torch.tensor([[*tokens, *filler[len(tokens) :]] for _, tokens in longest])
    expected = whole(batch, [source for source, _ in longest])
    index = {(source, tokens[:n]): i for i, (source, tokens) in enumerate(longest) for n in range(len(tokens) + 1)}
    for output in outputs:
        n = len(output.tokens)
        want = expected[index[output.source, output.tokens], n - len(output.out) : n]
        case.same(output.out, want, f"{output.what}: {what}")
