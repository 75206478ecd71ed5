"""A text cut in chunks, and what a document's end inside or between them lets through: said once for every recurrence.

    chunk 0        chunk 1        a carry stands for all that came before a chunk
    a a a b   │    b b c c        `b` of chunk 1 reads it, `c` does not; only `c` is left at the end, so the carry ends there

Shapes: x (rows, n, …)   document (rows, n), numbered from 0 in each row; a chunk is `size` tokens, the last one padded behind.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Edges(NamedTuple):
    """What the tokens of each chunk share with each other and with what came before."""

    same: Tensor  # (rows, chunks, size, size) whether two tokens are of one document
    reads: Tensor  # (rows, chunks, size) whether a token is still of the document that the chunk before ended with
    keeps: Tensor  # (rows, chunks, size) whether a token is of the document that its chunk ends with
    passes: Tensor  # (rows, chunks, 1) whether the carry survives the chunk


def cut(x: Tensor, size: int) -> Tensor:
    """(rows, n, …) -> (rows, chunks, size, …), with zeros behind the end."""
    rest = -x.shape[1] % size
    if rest:  # a pad by nothing would copy
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, rest))
    return x.unflatten(1, (-1, size))


def edges(document: Tensor, size: int) -> Edges:
    """What documents (rows, n) let through; what is padded belongs to the last one."""
    rest = -document.shape[1] % size
    document = torch.cat([document, document[:, -1:].expand(-1, rest)], 1).unflatten(1, (-1, size))
    before = torch.cat([torch.zeros_like(document[:, :1, -1]), document[:, :-1, -1]], 1)[..., None]
    last = document[..., -1:]
    return Edges(document[..., :, None] == document[..., None, :], document == before, document == last, last == before)
