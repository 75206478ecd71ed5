"""Synthetic tasks for mixers: batches sampled from a seed, with labels only where a token is predicted.

    selective copying   a . . b . c . .   ? ? ?        predict the symbols among noise, in order            (Gu & Dao 2023)
                                          a b c
    induction           d a ! b c a d …   !            predict the token that followed the mark  (Olsson et al. 2022)
                                          b

Noise, question and mark are tokens of the vocabulary. The positions of the symbols are sampled per row, so a mixer whose
recurrence does not depend on its input cannot select them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dovetail.core.layout import TokenLayout
from dovetail.core.loss import IGNORED
from dovetail.data.corpus import Batch

Task = Callable[[int, int], Batch]  # (seed, rows) -> a batch
NOISE, ASK, MARK = 0, 1, 0


def selective_copying(seed: int, rows: int, length: int = 32, vocab: int = 16, symbols: int = 4) -> Batch:
    """`symbols` tokens at random positions of the first length − symbols; the rest of the row predicts them in order."""
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
    """The mark is at a random position and at the end, which predicts the token behind the first mark."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocab, (rows, length), generator=draw)
    place = torch.randint(0, length - 2, (rows, 1), generator=draw)
    tokens.scatter_(1, place, MARK)
    tokens[:, -1] = MARK
    labels = torch.full((rows, length), IGNORED)
    labels[:, -1:] = tokens.gather(1, place + 1)
    return Batch(tokens, labels, TokenLayout.whole(rows, length))


TASKS: dict[str, Task] = {"selective copying": selective_copying, "induction": induction}
