"""Recurrent cells: what is remembered goes through a matrix and a bend at every token, so one token must follow the other.

    h_t = f(x_t, U h_{t−1})          x_t is the token's share, already projected; U one matrix a head, for all gates at once

    plain   h = tanh(x + U h)                                                                      Elman 1990
    LSTM    c = σ(f) c₋₁ + σ(i) tanh(g)    h = σ(o) tanh(c)    i, f, g, o = x + U h                Hochreiter & Schmidhuber 1997
    GRU     h = (1 − z) n + z h₋₁          n = tanh(x_n + r (U_n h + b))    r, z = σ(x + U h)      Cho et al. 2014

No form by matmuls over many tokens exists: a bend lies between them. What stands before U h is found for all tokens at once.

Shapes: x (rows, n, heads, gates·head)   U (heads, gates·head, head)   h, c (rows, heads, head); inside a step heads come first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dovetail.core.module import at_least_fp32
from dovetail.core.rows import SequenceRows
from dovetail.ops.scan.selective import goes_on

Memory = tuple[Tensor, ...]  # h, and c where there is one
Step = Callable[[Tensor, Tensor, Memory], Memory]  # (x_t, U h, memory before) -> memory after


def unroll(step: Step, x: Tensor, u: Tensor, bias: Tensor | None, seq: SequenceRows, carry: Memory) -> tuple[Tensor, Memory]:
    """Every h (rows, n, heads, head), and the memory afterwards; padding leaves it as it was, a new document starts from 0.

    `bias` (heads, gates·head) is added to U h."""
    dtype, kept = x.dtype, at_least_fp32(x.dtype)
    tokens = x.to(kept).permute(1, 2, 0, 3).unbind(0)  # of each token (heads, rows, gates·head)
    matrix, added = u.to(kept).mT, None if bias is None else bias.to(kept)[:, None]
    memory = tuple(m.to(kept).transpose(0, 1) for m in carry)
    keep, real = _by_token(goes_on(seq.document, kept)), _by_token(seq.real)
    out: list[Tensor] = []
    for t, token in enumerate(tokens):
        if keep is not None:
            memory = tuple([m * keep[t] for m in memory])
        held = memory[0] @ matrix if added is None else torch.baddbmm(added, memory[0], matrix)
        new = step(token, held, memory)
        memory = new if real is None else tuple([torch.where(real[t], n, m) for n, m in zip(new, memory, strict=True)])
        out.append(memory[0])
    h = torch.stack(out).permute(2, 0, 1, 3)
    return h.to(dtype), tuple(m.transpose(0, 1) for m in memory)


def _by_token(x: Tensor | None) -> tuple[Tensor, ...] | None:
    """(rows, n) as one (rows, 1) a token."""
    return None if x is None else x[..., None].unbind(1)


def rnn_step(x: Tensor, held: Tensor, memory: Memory) -> Memory:
    """One token through a plain cell."""
    return (torch.tanh(x + held),)


def lstm_step(x: Tensor, held: Tensor, memory: Memory) -> Memory:
    """One token through an LSTM; gates in the order input, forget, cell, output."""
    i, f, g, o = (x + held).chunk(4, -1)
    c = f.sigmoid() * memory[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(x: Tensor, held: Tensor, memory: Memory) -> Memory:
    """One token through a GRU; gates in the order reset, update, new; `held` has the new gate's own bias in it."""
    sizes = [2 * memory[0].shape[-1], memory[0].shape[-1]]
    (x_gates, x_new), (held_gates, held_new) = x.split(sizes, -1), held.split(sizes, -1)  # one gradient, not one a slice
    r, z = (x_gates + held_gates).sigmoid().chunk(2, -1)
    n = torch.tanh(x_new + r * held_new)
    return (n + z * (memory[0] - n),)
