"""Recurrent cells: the state passes through a matrix and a nonlinearity at every token, so tokens are processed in sequence.

    h_t = f(x_t, U h_{t−1})          x_t is already projected; U is one matrix per head, for all gates together

    RNN     h = tanh(x + U h)                                                                      Elman 1990
    LSTM    c = σ(f) c₋₁ + σ(i) tanh(g)    h = σ(o) tanh(c)    i, f, g, o = x + U h                Hochreiter & Schmidhuber 1997
    GRU     h = (1 − z) n + z h₋₁          n = tanh(x_n + r (U_n h + b))    r, z = σ(x + U h)      Cho et al. 2014

No chunked form exists, because of the nonlinearity between tokens.

Shapes: x (rows, n, heads, gates·head)   U (heads, gates·head, head)   h, c (rows, heads, head); inside a step heads come first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dovetail.nn.module import at_least_fp32
from dovetail.nn.rows import SequenceRows
from dovetail.ops.scan.selective import goes_on

State = tuple[Tensor, ...]  # h, and c for an LSTM
Step = Callable[[Tensor, Tensor, State], State]  # (x_t, U h, state before) -> state after


def unroll(
    step: Step, x: Tensor, u: Tensor, bias: Tensor | None, seq: SequenceRows, carry: State, start: State = ()
) -> tuple[Tensor, State]:
    """Every h (rows, n, heads, head), and the state afterwards; padding leaves it as it was, a new document starts from 0, or
    from `start` (rows, 1 or n, heads, head), that of each token.

    `bias` (heads, gates·head) is added to U h."""
    dtype, wide = x.dtype, at_least_fp32(x.dtype)
    tokens = x.to(wide).permute(1, 2, 0, 3).unbind(0)  # per token (heads, rows, gates·head)
    matrix, added = u.to(wide).mT, None if bias is None else bias.to(wide)[:, None]
    state = tuple(m.to(wide).transpose(0, 1) for m in carry)
    keep, real = _by_token(goes_on(seq.document, wide)), _by_token(seq.real)
    first = [m.to(wide).permute(1, 2, 0, 3).expand(len(tokens), -1, -1, -1).unbind(0) for m in start] if keep else []
    out: list[Tensor] = []
    for t, token in enumerate(tokens):
        if keep is not None:
            state = tuple([m * keep[t] for m in state])
        if keep is not None and first:
            state = tuple([m + (1 - keep[t]) * each[t] for m, each in zip(state, first, strict=True)])
        recurrent = state[0] @ matrix if added is None else torch.baddbmm(added, state[0], matrix)
        new = step(token, recurrent, state)
        state = new if real is None else tuple([torch.where(real[t], n, m) for n, m in zip(new, state, strict=True)])
        out.append(state[0])
    h = torch.stack(out).permute(2, 0, 1, 3)
    return h.to(dtype), tuple(m.transpose(0, 1) for m in state)


def _by_token(x: Tensor | None) -> tuple[Tensor, ...] | None:
    """(rows, n) as one (rows, 1) per token."""
    return None if x is None else x[..., None].unbind(1)


def rnn_step(x: Tensor, recurrent: Tensor, state: State) -> State:
    """One token through an Elman RNN."""
    return (torch.tanh(x + recurrent),)


def lstm_step(x: Tensor, recurrent: Tensor, state: State) -> State:
    """One token through an LSTM; gates in the order input, forget, cell, output."""
    i, f, g, o = (x + recurrent).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(x: Tensor, recurrent: Tensor, state: State) -> State:
    """One token through a GRU; gates in the order reset, update, new; `recurrent` includes the new gate's own bias."""
    sizes = [2 * state[0].shape[-1], state[0].shape[-1]]
    # split, not slices: one gradient, not one per slice
    (x_gates, x_new), (u_gates, u_new) = x.split(sizes, -1), recurrent.split(sizes, -1)
    r, z = (x_gates + u_gates).sigmoid().chunk(2, -1)
    n = torch.tanh(x_new + r * u_new)
    return (n + z * (state[0] - n),)
