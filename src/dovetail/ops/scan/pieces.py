"""Sequences cut into chunks, and which tokens of a chunk may exchange information where documents end inside or between chunks.

    chunk 0        chunk 1        the carried state summarizes everything before a chunk
    a a a b   │    b b c c        `b` of chunk 1 reads it, `c` does not; chunk 1 ends with `c`, so it goes no further

Shapes: x (rows, n, …)   document (rows, n), numbered from 0 in each row; a chunk is `size` tokens, the last one padded.

Decay factors without subnormal numbers: a factor too small to change any sum is exactly 0.

CPUs are tens of times slower on subnormal numbers, and the factors of a fast decay are full of them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.module import at_least_fp32
from dovetail.nn.rows import SequenceRows
from dovetail.ops.implementation import reference

Form = Callable[..., tuple[Tensor, Tensor]]  # (q, k, v, g, *more, document, carry) -> y, the carry afterwards


class Edges(NamedTuple):
    """Which tokens of each chunk are of one document with each other, with the carried state and with the chunk's end."""

    same: Tensor  # (rows, chunks, size, size) whether two tokens are of one document
    reads: Tensor  # (rows, chunks, size) whether a token is of the document that the previous chunk ended with
    keeps: Tensor  # (rows, chunks, size) whether a token is of the document that its chunk ends with
    passes: Tensor  # (rows, chunks, 1) whether the carried state passes through the chunk


def scanned(
    naive: Form,
    chunked: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *more: Tensor | None,
    seq: SequenceRows,
    carry: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y (rows, n, heads, value) in a dtype and the state afterwards, of a recurrence over S (rows, heads, key, value), computed
    in float32 or wider; padding neither adds to the state nor decays it."""
    wide = at_least_fp32(dtype)
    q, k, v, g = q.to(wide), seq.only_real(k.to(wide)), v.to(wide), seq.only_real(g.to(wide))
    if carry is None:
        carry = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    form = naive if reference() or q.shape[1] == 1 else chunked
    y, carry = form(q, k, v, g, *(None if x is None else x.to(wide) for x in more), seq.document, carry.to(wide))
    return y.to(dtype), carry


def within_document(carry: Tensor, document: Tensor | None, t: int) -> Tensor:
    """The state (rows, …) that token t continues: zero where it begins a document."""
    if document is None:
        return carry
    before = document[:, t - 1] if t else torch.zeros_like(document[:, 0])
    return carry * (document[:, t] == before).view(-1, *(1,) * (carry.dim() - 1))


def cut(x: Tensor, size: int) -> Tensor:
    """(rows, n, …) -> (rows, chunks, size, …), with zeros at the end."""
    rest = -x.shape[1] % size
    if rest:  # a pad by nothing would copy
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, rest))
    return x.unflatten(1, (-1, size))


def edges(document: Tensor, size: int) -> Edges:
    """The edges of documents (rows, n); padding belongs to the last document."""
    rest = -document.shape[1] % size
    document = torch.cat([document, document[:, -1:].expand(-1, rest)], 1).unflatten(1, (-1, size))
    before = torch.cat([torch.zeros_like(document[:, :1, -1]), document[:, :-1, -1]], 1)[..., None]
    last = document[..., -1:]
    return Edges(document[..., :, None] == document[..., None, :], document == before, document == last, last == before)


LEAST = 40.0  # e^{−40} is far below the rounding error of float64


def exp_or_zero(log: Tensor) -> Tensor:
    """e^log for log ≤ 0, and 0 below e^{−40}."""
    return zero_if_tiny(log.clamp(min=-LEAST - 1.0).exp())


def zero_if_tiny(factor: Tensor) -> Tensor:
    """The factor, 0 where it is below e^{−40}."""
    return F.threshold(factor, exp(-LEAST), 0.0)
