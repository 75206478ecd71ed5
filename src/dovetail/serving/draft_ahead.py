"""Drafts by the model's own depths of multi-token prediction (Model.mtp), which read the hidden states of the target.

    hᵏᵢ = depthₖ(hᵏ⁻¹ᵢ, E(tᵢ₊ₖ)) or depthₖ(h⁰ᵢ)       h⁰ of the target; a head predicts tᵢ₊ₖ₊₁ from hᵏᵢ   (model/multi_token.py)
    tokens t₀ … tₘ₋₁ known, h⁰ known up to m − 2:     hᵏₘ₋₂ gives draft k, and may read drafts 1 … k − 1;  K depths, K drafts

Depths without a decode state (Medusa heads) need the hidden state at m − 2 alone: `DraftLast`.

Depths with one (`DraftAhead`) see the whole context, as in training, and compute each position about once. A window over recent
hidden states would be computed anew for each draft, and see less. Depth k at positions from m − k on reads drafts, so that the
pool keeps the first m − K positions and rolls the others back; where a state returns only to its mark, the positions between
are replayed. Positions whose hidden states were not computed here (the prefix cache had them) are left out: the first known one
is the depths' first. That costs accepted drafts, never a token.

A depth that recurs (EAGLE) predicts hidden states, and drafts on from its own:

    ĥₘ₋₁₊ⱼ = depth(hₘ₋₂₊ⱼ, E(tₘ₋₁₊ⱼ))      h of the target up to m − 2, then ĥ; ĥₘ₋₁₊ⱼ gives draft j + 1, which is tₘ₊ⱼ

Each draft after the first is a position more in its pool, which is rolled back when the drafts are made.

DeepSeek-AI 2024 (DeepSeek-V3), sections 2.2 and 5.4.3; Cai et al. 2024 (Medusa); Li et al. 2024 (EAGLE)
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dovetail.base.errors import SpecError
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.serving.adapters import Adapters
from dovetail.serving.schedule import Continuation
from dovetail.serving.speculate import Drafter, sample_drafts
from dovetail.spec.fold import states
from dovetail.state.pool import Pool

LATER = 16  # positions that may wait for the next draft, which runs all rows in one batch


@dc.dataclass
class Row:
    """A row of the pool, and the hidden states that its depths have not read."""

    owner: Continuation
    number: int
    begin: int  # the position of its first entry in the pool
    start: int  # the position of its next entry
    hidden: Tensor  # (n, embed), from position `start` on
    drafts: tuple[int, list[int]] = (0, [])  # the last ones, and the number of tokens that they follow

    @property
    def end(self) -> int:
        """The position behind the last hidden state."""
        return self.start + len(self.hidden)

    def put(self, first: int, hidden: Tensor) -> None:
        """Add hidden states from position `first` on. Those there before were of rejected drafts, or are computed again."""
        before, new = self.hidden[: max(first - self.start, 0)], hidden[max(self.start - first, 0) :]
        self.hidden = torch.cat([before, new])

    def advance(self, start: int) -> None:
        """Drop the hidden states before a position, which the depths have read."""
        self.start, self.hidden = start, self.hidden[start - self.start :]


def own_drafter(model: ModelModule, *, rows: int, longest: int, drafts: int) -> Drafter:
    """The drafter of a model's own multi-token prediction, with the first `drafts` of its depths; `rows` and `longest` are
    those of the engine. Raises SpecError for a model without."""
    if not model.part.mtp:
        remedy = "use prompt look-up or a draft model, or train a spec with mtp"
        raise SpecError("mtp", "the model has no multi-token prediction to draft with", remedy)
    if any(scope.drafts for _, _, scope in states(model.part)):
        return DraftAhead(model, rows=rows, longest=longest, drafts=drafts)
    return DraftLast(model, drafts=drafts)


class Depths(Drafter):
    """The first `drafts` depths of the target's own multi-token prediction, each of which guesses one token more; or the one
    that recurs, which guesses them all."""

    def __init__(self, model: ModelModule, drafts: int) -> None:
        self.model, self.depths = model, min(len(model.part.mtp), drafts)
        self.recurs = any(depth.recurs for depth in model.part.mtp)
        self.drafts = drafts if self.recurs else self.depths  # at most
        self.adapters = Adapters(model)

    def attach(self, adapters: Adapters) -> None:
        self.adapters = adapters

    def _run(
        self,
        ones: Sequence[Continuation],
        starts: Sequence[int],
        states: Sequence[Tensor],
        ctx: Ctx,
        guesses: Sequence[list[int]] | None = None,
    ) -> Tensor:
        """Let every depth read the hidden states[i] (n, embed) at the tokens of ones[i] from number starts[i] on, behind which
        guesses[i] come. Add what each guesses from the last of them to the guesses, where there are lists for them. Return the
        last hidden state of each row, (rows, embed), at the last depth."""
        counts, hidden = [len(one) for one in states], pad_sequence(list(states), batch_first=True)
        index, last = torch.arange(len(ones), device=hidden.device), torch.tensor(counts, device=hidden.device) - 1
        before, drafted = hidden, guesses or [list[int]() for _ in ones]
        with self.adapters.rows([one.request.adapter for one in ones]):
            for depth in range(1, self.depths + 1):
                known = [[*one.tokens, *drafts][start:] for one, start, drafts in zip(ones, starts, drafted, strict=True)]
                tokens = [torch.tensor(one[depth : depth + n]) for one, n in zip(known, counts, strict=True)]
                ahead = pad_sequence(tokens, batch_first=True).to(hidden.device)
                before = self.model.hidden_ahead(hidden, ahead, ctx, depth, before)
                if guesses is not None:
                    logits = self.model.logits_ahead(before[index, last][:, None], ctx, depth)[:, 0]
                    for drafts, token in zip(guesses, sample_drafts(logits, ones, guesses), strict=True):
                        drafts.append(token)
        return before[index, last]

    def _recur(
        self,
        ones: Sequence[Continuation],
        counts: Sequence[int],
        last: Tensor,
        guesses: Sequence[list[int]],
        ctx_of: Callable[[list[int]], Ctx],
    ) -> None:
        """Guess up to counts[i] tokens from hidden states of the depth itself, of which `last` (rows, embed) are the first;
        ctx_of(indices) is for one token more of these rows."""
        states = list(last[:, None])
        for n in range(1, max(counts) if self.recurs else 1):
            active = [i for i, count in enumerate(counts) if n < count]
            rows, known = [ones[i] for i in active], [states[i] for i in active]
            starts = [len(one.tokens) - 2 + n for one in rows]
            new = self._run(rows, starts, known, ctx_of(active), [guesses[i] for i in active])
            for i, state in zip(active, new, strict=True):
                states[i] = state[None]


class DraftLast(Depths):
    """Depths without a decode state, which read the target's last hidden state alone."""

    def __init__(self, model: ModelModule, *, drafts: int) -> None:
        super().__init__(model, drafts)
        self.rows: dict[int, tuple[Continuation, int, Tensor]] = {}  # row -> whose hidden states, and from which token on

    @torch.inference_mode()
    def observe(self, one: Continuation, first: int, hidden: Tensor) -> None:
        begin = max(len(hidden) - 1 - self.drafts, 0)  # of drafts, so many at most, any number may be rejected
        self.rows[one.held_row] = (one, first + begin, hidden[begin:].clone())

    def fork(self, one: Continuation, other: Continuation) -> None:
        if one.held_row in self.rows and self.rows[one.held_row][0] is one:
            self.rows[other.held_row] = (other, *self.rows[one.held_row][1:])

    @torch.inference_mode()
    def draft(self, ones: Sequence[Continuation], counts: Sequence[int]) -> list[list[int]]:
        drafts: dict[Continuation, list[int]] = {one: [] for one in ones}
        states = {one: state for one in ones if (state := self._last(one)) is not None}
        if states:
            known, guesses = list(states), [drafts[one] for one in states]
            starts, wanted = [len(one.tokens) - 2 for one in known], dict(zip(ones, counts, strict=True))
            last = self._run(known, starts, list(states.values()), self._ctx([*range(len(known))]), guesses)
            self._recur(known, [wanted[one] for one in known], last, guesses, self._ctx)
        return [drafts[one][:count] for one, count in zip(ones, counts, strict=True)]

    def reset(self) -> None:
        self.rows.clear()

    def _ctx(self, rows: list[int]) -> Ctx:
        return Ctx(layout=TokenLayout.whole(len(rows), 1, device=self.model.device), ranks=self.model.ranks)

    def _last(self, one: Continuation) -> Tensor | None:
        """The hidden state (1, embed) at the last but one token, if it is there."""
        if one.row not in self.rows:
            return None
        owner, first, hidden = self.rows[one.row]
        place = len(one.tokens) - 2 - first
        return hidden[place : place + 1] if owner is one and 0 <= place < len(hidden) else None


class DraftAhead(Depths):
    """Depths with a decode state of their own, which is in a pool."""

    def __init__(self, model: ModelModule, *, rows: int, longest: int, drafts: int) -> None:
        """`rows` and `longest` are those of the engine."""
        super().__init__(model, drafts)
        cuts = model.ranks.cuts
        self.pool = Pool(
            model.part, rows, longest, dtype=model.dtype, device=model.device, layout="paged", drafts=True, sharded=cuts
        )
        self.rows: dict[int, Row] = {}

    @torch.inference_mode()
    def observe(self, one: Continuation, first: int, hidden: Tensor) -> None:
        row = self._row(one)
        if row is None or first > row.end:
            self.pool.free(one.held_row)
            row = self.rows[one.held_row] = Row(one, one.held_row, first, first, hidden)
        else:
            row.put(first, hidden)
        certain = min(self._certain(row), len(one.tokens) - 2, row.end)  # the last but one gives the first draft
        if certain - row.start > LATER:  # of a prompt
            self._step([row], [certain])
            row.advance(certain)

    def fork(self, one: Continuation, other: Continuation) -> None:
        if (row := self._row(one)) is not None:
            self.pool.fork(row.number, other.held_row)
            self.rows[other.held_row] = dc.replace(row, owner=other, number=other.held_row)

    @torch.inference_mode()
    def draft(self, ones: Sequence[Continuation], counts: Sequence[int]) -> list[list[int]]:
        rows = [self._row(one) for one in ones]
        # a continuation that got no place in the last step still has its drafts
        known = {
            row.number: (row, count)
            for row, count in zip(rows, counts, strict=True)
            if row is not None and row.drafts[0] < len(row.owner.tokens) and self._reached(row)
        }
        if known:
            self._draft(*zip(*known.values(), strict=True))
        drafts = {row.owner: row.drafts[1] for row in rows if row is not None and row.drafts[0] == len(row.owner.tokens)}
        return [drafts.get(one, [])[:count] for one, count in zip(ones, counts, strict=True)]

    def reset(self) -> None:
        self.pool.reset()
        self.rows.clear()

    def _draft(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        guesses = [list[int]() for _ in rows]
        self._mark(rows)
        last = self._step(rows, [len(row.owner.tokens) - 1 for row in rows], guesses)
        if self.recurs:
            self._mark(rows)
        self._recur([row.owner for row in rows], counts, last, guesses, lambda some: self._ctx([rows[i] for i in some]))
        for row, guess in zip(rows, guesses, strict=True):
            row.drafts = (len(row.owner.tokens), guess)
            reached = self.pool.rollback(row.number, max(self._certain(row), row.start) - row.begin)
            row.advance(row.begin + reached)
        if replayed := [row for row in rows if row.start < self._certain(row)]:  # a recurrent state is back at its mark
            self._step(replayed, [self._certain(row) for row in replayed])
            for row in replayed:
                row.advance(self._certain(row))

    def _row(self, one: Continuation) -> Row | None:
        """The row of a continuation, if its hidden states are there."""
        row = None if one.row is None else self.rows.get(one.row)
        return None if row is None or row.owner is not one else row

    def _reached(self, row: Row) -> bool:
        """Whether the hidden states that the depths have not read go up to the last but one token."""
        return row.start < len(row.owner.tokens) - 1 <= row.end

    def _certain(self, row: Row) -> int:
        """The first position at which some depth reads a token that is not sampled yet."""
        return len(row.owner.tokens) - self.depths

    def _mark(self, rows: Sequence[Row]) -> None:
        """Let a recurrent state return to where it is."""
        for row in rows:
            self.pool.marks[row.number] = []
            self.pool.mark(row.number)

    def _ctx(self, rows: Sequence[Row], counts: Sequence[int] | None = None) -> Ctx:
        """For counts[i] new positions of rows[i], by default one."""
        step = self.pool.step([row.number for row in rows], [1] * len(rows) if counts is None else counts)
        return Ctx(layout=step.layout, views=step.views, ranks=self.model.ranks)

    def _step(self, rows: Sequence[Row], ends: Sequence[int], guesses: Sequence[list[int]] | None = None) -> Tensor:
        """Let every depth read the positions of rows[i] from its start to ends[i]; see `_run`."""
        counts = [end - row.start for row, end in zip(rows, ends, strict=True)]
        states = [row.hidden[:n] for row, n in zip(rows, counts, strict=True)]
        return self._run([row.owner for row in rows], [row.start for row in rows], states, self._ctx(rows, counts), guesses)
