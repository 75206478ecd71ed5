"""Small tasks that show what a mixer can do: batches drawn from (seed, step), with labels only where something is asked.

    selective copying   a . . b . c . .   ? ? ?        the symbols among noise, in order, when asked for     (Gu & Dao 2023)
                                          a b c
    induction           d a ! b c a d …   !            what stood behind the mark, when it comes again (Olsson et al. 2022)
                                          b

Noise, question and mark are tokens of the vocabulary like any other. Where each symbol lies is drawn anew for each row: a mixer
that treats all tokens alike, by distance only, cannot tell what to hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dovetail.core.layout import TokenLayout
from dovetail.datasets.corpus import Batch
from dovetail.ops.loss import IGNORED

Task = Callable[[int, int], Batch]  # (seed, rows) -> a batch
NOISE, ASK, MARK = 0, 1, 0


def selective_copying(seed: int, rows: int, length: int = 32, vocab: int = 16, symbols: int = 4) -> Batch:
    """`symbols` of them lie at random places of the first length − symbols; the rest of the row asks for them in order."""
    draw = torch.Generator().manual_seed(seed)
    room = length - symbols
    values = torch.randint(2, vocab, (rows, symbols), generator=draw)
    places = torch.rand(rows, room, generator=draw).topk(symbols).indices.sort().values
    tokens = torch.full((rows, length), ASK)
    tokens[:, :room] = torch.full((rows, room), NOISE).scatter(1, places, values)
    labels = torch.full((rows, length), IGNORED)
    labels[:, room:] = values
    return Batch(tokens, labels, TokenLayout.whole(rows, length))


def induction(seed: int, rows: int, length: int = 32, vocab: int = 16) -> Batch:
    """The mark stands once at a random place and once at the end, which asks for what stood behind the first."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocab, (rows, length), generator=draw)
    place = torch.randint(0, length - 2, (rows, 1), generator=draw)
    tokens.scatter_(1, place, MARK)
    tokens[:, -1] = MARK
    labels = torch.full((rows, length), IGNORED)
    labels[:, -1:] = tokens.gather(1, place + 1)
    return Batch(tokens, labels, TokenLayout.whole(rows, length))


TASKS: dict[str, Task] = {"selective copying": selective_copying, "induction": induction}
