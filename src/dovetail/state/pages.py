"""Attention over a paged KV cache, without a copy of the whole cache in every layer.

    k of some rows (r, m, kv_heads, head) = pages[table[rows]]          a few rows at a time: a copy stays in a CPU's cache

The pages of the rows are the same in every layer of a step, so the pieces are computed once, with their token layouts. In a
flat batch the rows that decode are pieces of many rows, and each chunk of a prompt is one of its own: a query is never compared
with the keys of another row, and nothing is padded but the keys of rows that decode.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dovetail.nn.layout import Known, TokenLayout
from dovetail.nn.view import Edit, Entries, Scoring
from dovetail.ops.attend import StoredEntries

TOKENS = 16384  # keys that are copied at once
MOST_DECODE_QUERIES = 8  # queries of a row that decodes, at most: its last token and drafts


@dc.dataclass(slots=True)
class PageRows:
    """Some rows of a step."""

    at: slice  # where their queries are: rows of a batch, or tokens of a flat batch
    shape: tuple[int, int]  # rows, and queries of each
    table: Tensor  # (r, pages) the pages of these rows; as wide as the pool's, so that in compiled graphs only the keys grow
    layout: TokenLayout  # of the queries
    key_layout: TokenLayout


def pieces(table: Tensor, layout: TokenLayout, key_layout: TokenLayout) -> list[PageRows]:
    """The rows of a step, whose keys lie in the first pages of a table (rows, pages), in pieces."""
    size = max(1, TOKENS // max(key_layout.n, 1))
    cuts = [slice(begin, min(begin + size, len(table))) for begin in range(0, len(table), size)]
    return [
        PageRows(cut, (cut.stop - cut.start, layout.n), table[cut], layout.some_rows(cut), key_layout.some_rows(cut))
        for cut in cuts
    ]


def flat_pieces(table: Tensor, lengths: Sequence[int], new: Sequence[int]) -> list[PageRows]:
    """The rows of a flat step in which row i, of lengths[i] tokens, gets new[i] more. Rows of equally few new
    tokens that follow each other are one piece."""
    found, begin, row = list[PageRows](), 0, 0
    while row < len(new):
        n, last = new[row], row + 1
        longest = lengths[row] + n
        while n <= MOST_DECODE_QUERIES and last < len(new) and new[last] == n:  # as many rows as fit with the longest of them
            longest = max(longest, lengths[last] + n)
            if (last + 1 - row) * longest > TOKENS:
                break
            last += 1
        if n:
            counts = [lengths[i] + n for i in range(row, last)]
            place = slice(begin, begin + n * (last - row))
            found.append(PageRows(place, (last - row, n), table[row:last], *_layouts(counts, n, table.device)))
        begin, row = begin + n * (last - row), last
    return found


def _layouts(counts: Sequence[int], n: int, device: torch.device) -> tuple[TokenLayout, TokenLayout]:
    """The layouts of the last n of counts[i] tokens of each row, and of all of them."""
    if len(set(counts)) == 1:
        return TokenLayout.whole(len(counts), n, device, start=counts[0] - n), TokenLayout.whole(len(counts), counts[0], device)
    order = torch.tensor(counts, dtype=torch.long, device=device)[:, None] + torch.arange(-n, 0, device=device)
    known = Known((1,) * len(counts), max(counts))
    return TokenLayout.of(order, torch.zeros_like(order), known=known), TokenLayout.padded(counts, max(counts), device=device)


class Scratch:
    """Memory on the CPU that pages are copied into, the same in every layer and step. The system hands out fresh memory page by
    page, which took four times as long as the copy itself."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int, torch.dtype, bool], Tensor] = {}

    def copy(self, number: int, pages: Tensor, index: Tensor) -> Tensor:
        """pages[index] of the store of this number, valid until the next copy of it."""
        key = (number, pages.shape[1], pages.dtype, torch.is_inference_mode_enabled())  # torch does not let these modes share
        room = self.held.get(key)
        if room is None or len(room) < len(index):
            self.held[key] = room = pages.new_empty(len(index) + len(index) // 4, pages.shape[1])
        return torch.index_select(pages, 0, index, out=room[: len(index)])


class PagedEntries:
    """The entries of a paged KV cache in the frame of one step."""

    def __init__(
        self, stores: Sequence[Tensor], page: int, steps: list[PageRows], scratch: Scratch, gather: Callable[[], StoredEntries]
    ) -> None:
        """`gather` copies all entries, for mixers that read them in another way."""
        self.stores, self.page, self.steps, self.scratch, self.gather = stores, page, steps, scratch, gather

    def entries(self) -> Entries:
        """All entries (…, m, *axes), and their layout."""
        return self.gather().entries()

    def attend(self, layout: TokenLayout, q: Tensor, scoring: Scoring, edit: Edit | None = None) -> Tensor:
        """Attention of q (rows, n, heads, head), some rows at a time; in one piece where probs are edited."""
        if edit is not None:
            return self.gather().attend(layout, q, scoring, edit)
        out: list[Tensor] = []
        for piece in self.steps:
            stored = StoredEntries(
                piece.key_layout, tuple([self._read(i, store, piece) for i, store in enumerate(self.stores)])
            )
            if layout.row is None:
                out.append(stored.attend(piece.layout, q[piece.at], scoring))
            else:
                out.append(stored.attend(piece.layout, q[piece.at].unflatten(0, piece.shape), scoring).flatten(0, 1))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _read(self, number: int, store: Tensor, piece: PageRows) -> Tensor:
        # one page beyond keys that fill theirs: a compiled graph would hold whether the slice of them is contiguous
        used = piece.key_layout.once("pages", lambda: piece.table[:, : piece.key_layout.n // self.page + 1].flatten())
        every = store[:-1].view(-1, self.page * store[0].numel())  # rows of a matrix copy fastest
        # a gradient would need the keys after the next layer has overwritten them
        again = store.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        pages = self.scratch.copy(number, every, used) if again else every.index_select(0, used)
        return pages.view(piece.shape[0], -1, *store.shape[1:])[:, : piece.key_layout.n]
