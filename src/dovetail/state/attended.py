"""A KV cache of a fixed number of entries, from which the least attended is evicted (H2O).

    score_j ← score_j + Σ over heads of the prob from token t to entry j        for every entry j that token t sees
    token t takes the place of argmin score_j, over the entries that are not among the newest half of the cache

Each layer decides for itself, one token after the other, also in a prompt: what is kept follows from the tokens alone, however
they are cut into steps. Positions are those in the cache, from the oldest entry to the newest, so that no distance is larger
than the budget; keys are therefore stored without rotation.

Shapes: k, v (rows, budget, kv_heads, head)   order, score (rows, budget).                Zhang et al. 2023 (H2O), algorithm 1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dovetail.base.errors import StateError
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import at_least_fp32
from dovetail.nn.view import KV, Edit, Entries, Scoring
from dovetail.ops.attend import StoredEntries
from dovetail.state.slots import Copies, Slots

LATER = torch.iinfo(torch.long).max  # the order of an empty slot: after every token


class Kept(Slots):
    """A row is `budget` slots. Until they are full, token i is in slot i; then each layer has tokens of its own there."""

    overwrites = True

    def __init__(self, rows: int, budget: int) -> None:
        self.budget = self.stride = budget
        self.total = rows * budget

    def slot(self, row: Tensor, position: Tensor) -> Tensor:
        raise StateError("which slot a token has differs by layer (read it from the stores)")

    def positions(self, length: int) -> Sequence[int]:
        return range(min(length, self.budget))

    def can_rewind(self, length: int, written: int, n: int) -> bool:
        return n == length  # scores cannot be taken back

    def fork(self, a: int, b: int, length: int) -> Copies:
        begin, to = a * self.budget, b * self.budget
        return list(range(begin, begin + self.budget)), list(range(to, to + self.budget))


def bookkeeping(slots: int, dtype: torch.dtype, device: torch.device | str | None) -> list[Tensor]:
    """The stores beside keys and values: the order of the token in each slot, and its score."""
    return [
        torch.zeros(slots, dtype=torch.long, device=device),
        torch.zeros(slots, dtype=at_least_fp32(dtype), device=device),
    ]


class AttendedView:
    """The KV cache of one layer in this step: row rows[i], of lengths[i] tokens, gets new[i] more."""

    def __init__(
        self, stores: Sequence[Tensor], budget: int, rows: Sequence[int], lengths: Sequence[int], new: Sequence[int]
    ) -> None:
        self.stores, self.budget, self.rows, self.lengths, self.new = stores, budget, rows, lengths, new
        self.recent = budget // 2

    def append(self, layout: TokenLayout, *new: Tensor) -> KV:
        """The entries that queries of this step see; they are stored when the queries attend."""
        return AttendedEntries(self, *new)

    def stored(self) -> KV:
        """Refuse."""
        raise StateError("a KV cache that evicts the least attended entry is read only by the layer that writes it")

    append_blocks = append


class AttendedEntries:
    """The entries of one layer: those in its cache, and new ones k, v (…, n, kv_heads, head)."""

    def __init__(self, view: AttendedView, k: Tensor, v: Tensor) -> None:
        self.view, self.k, self.v = view, k, v

    def entries(self) -> Entries:
        """Refuse."""
        raise StateError(
            "each query of a KV cache that evicts the least attended entry sees other entries (listen to `pattern`)"
        )

    def attend(self, layout: TokenLayout, q: Tensor, scoring: Scoring, edit: Edit | None = None) -> Tensor:
        """Attention of q (…, n, heads, head), token by token: evict, store, attend, and add the probs to the scores."""
        view = self.view
        flat = layout.row is not None
        q, k, v = (pad_sequence(list(x.split(list(view.new))), batch_first=True) if flat else x for x in (q, self.k, self.v))
        row = torch.tensor(view.rows, device=q.device)
        slots = row[:, None] * view.budget + torch.arange(view.budget, device=q.device)
        keys, values, order, score = cache = [store[slots] for store in view.stores]
        out = v.new_zeros(*q.shape[:-1], v.shape[-1])
        for j in range(max(view.new)):
            every = min(view.new) > j
            active = slice(None) if every else torch.tensor([i for i, n in enumerate(view.new) if n > j], device=q.device)
            t = torch.tensor([length + j for length, n in zip(view.lengths, view.new, strict=True) if n > j], device=q.device)
            slot, rows = self._slot(t, order[active], score[active]), torch.arange(len(view.new), device=q.device)[active]
            keys[rows, slot], values[rows, slot] = k[active, j], v[active, j]
            order[rows, slot], score[rows, slot] = t, 0.0
            q_layout, k_layout = self._layouts(t, order[active])
            seen: list[Tensor] = []
            stored = StoredEntries(k_layout, (keys[active], values[active]))
            z = stored.attend(q_layout, q[active, j : j + 1], scoring, _heard(seen, edit))
            score[active] += seen[0].sum((-3, -2)).to(score.dtype)
            out[active, j] = z[:, 0]
        for store, kept in zip(view.stores, cache, strict=True):
            store[slots] = kept
        return torch.cat([out[i, :n] for i, n in enumerate(view.new)]) if flat else out

    def _slot(self, t: Tensor, order: Tensor, score: Tensor) -> Tensor:
        """(rows,) the slot for token t of each row: the next free one, or that of the entry that is evicted."""
        old = order <= (t - self.view.recent)[:, None]
        least = score.masked_fill(~old, torch.inf).amin(-1, keepdim=True)
        evicted = order.masked_fill(~old | (score > least), LATER).argmin(-1)  # of equal ones the oldest
        return torch.where(t < self.view.budget, t, evicted)

    def _layouts(self, t: Tensor, order: Tensor) -> tuple[TokenLayout, TokenLayout]:
        """The layouts of queries t (rows, 1) and of the entries (rows, budget), whose newest is t: neighbors in the cache are
        one position apart. Counted back from t, since queries are rotated by their position in the sequence."""
        count = (t + 1).clamp_max(self.view.budget)[:, None]
        real = torch.arange(self.view.budget, device=t.device) < count
        rank = order.masked_fill(~real, LATER).argsort(-1).argsort(-1)
        place = torch.where(real, t[:, None] + 1 - count + rank, 0)
        query = TokenLayout.of(t[:, None], torch.zeros_like(t)[:, None])
        return query, TokenLayout.of(place, torch.where(real, 0, -1))


def _heard(seen: list[Tensor], edit: Edit | None) -> Edit:
    """An edit that also appends the probs to `seen`."""

    def run(probs: Tensor, q_layout: TokenLayout, k_layout: TokenLayout) -> Tensor:
        probs = probs if edit is None else edit(probs, q_layout, k_layout)
        seen.append(probs)
        return probs

    return Edit(run)
