"""The selective scan of Mamba: a state of several values per channel, each with its own data-dependent decay.

    h_t = e^{Δ_t A} ∘ h_{t−1} + (Δ_t x_t) B_tᵀ          y_t = h_t C_t          A < 0: the state decays, and never grows

Every channel and state dimension decays differently, so pairs of tokens have no common weight and no matmul over pairs exists
(as there is for one decay per head). The chunked form advances many runs of tokens side by side instead:

    a piece of the sequence   run 0: t = 0 … 63    run 1: t = 64 … 127    …     all at their first token, all at their second, …
    first pass                the state each run leaves from a zero state; then, from run to run, the true state before each run
    second pass               each run again from its true state, with an output per token

Decays are powers e^{Δ A} ≤ 1 and only multiplied: nothing overflows. Work is linear in n. Only one piece is in memory at
a time; in training a piece is recomputed in backward.

Shapes: x, Δ, y (rows, n, channels)   A (channels, state)   B, C (rows, n, state)   h (rows, channels, state).   Gu & Dao 2023.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dovetail.nn.module import at_least_fp32
from dovetail.nn.rows import SequenceRows
from dovetail.ops.implementation import chunk, reference

SLAB = 65536  # values of state that are advanced at once: enough to amortize a call, few enough to stay in cache
LEAST_RUNS = 4  # with fewer runs side by side, the second pass costs more than it saves


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, seq: SequenceRows, carry: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y (rows, n, channels) and the state afterwards; padding neither adds to the state nor decays it."""
    dtype, wide = x.dtype, at_least_fp32(x.dtype)
    dt, a, b, c = seq.only_real(dt.to(wide)), a.to(wide), b.to(wide), c.to(wide)
    added = dt * x.to(wide)
    if carry is None:
        carry = dt.new_zeros(x.shape[0], *a.shape)
    form = naive if reference() or x.shape[1] == 1 else chunked
    y, carry = form(added, dt, a, b, c, goes_on(seq.document, wide), carry.to(wide))
    return y.to(dtype), carry


def goes_on(document: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(rows, n) 1 where a token continues a document, 0 where it begins one; None: all continue."""
    if document is None:
        return None
    return (document == F.pad(document, (1, 0))[:, :-1]).to(dtype)


def naive(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, keep: Tensor | None, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token; `x` is Δ x already."""
    out: list[Tensor] = []
    for t in range(x.shape[1]):
        if keep is not None:
            carry = carry * keep[:, t, None, None]
        carry = (dt[:, t, :, None] * a).exp() * carry + x[:, t, :, None] @ b[:, t, None, :]
        out.append((carry @ c[:, t, :, None])[..., 0])
    return torch.stack(out, 1), carry


def chunked(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, keep: Tensor | None, carry: Tensor
) -> tuple[Tensor, Tensor]:
    """Piece by piece, each as many runs side by side as make a slab."""
    n = x.shape[1]
    run = min(chunk(), n)
    fit = SLAB // carry.numel()
    piece = run * (min(run, fit) if fit >= LEAST_RUNS else 1)
    again = torch.is_grad_enabled() and piece < n
    # split, not slices: the gradient of a slice is as long as the whole sequence
    pieces = zip(*(t.split(piece, 1) for t in (x, dt, b, c)), strict=True)
    keeps = [None] * -(-n // piece) if keep is None else keep.split(piece, 1)
    out: list[Tensor] = []
    for (x_, dt_, b_, c_), keep_ in zip(pieces, keeps, strict=True):
        given = (x_, dt_, a, b_, c_, keep_, carry, run)
        y, carry = checkpoint(in_runs, *given, use_reentrant=False, preserve_rng_state=False) if again else in_runs(*given)
        out.append(y)
    return torch.cat(out, 1), carry


def in_runs(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, keep: Tensor | None, carry: Tensor, run: int
) -> tuple[Tensor, Tensor]:
    """One piece, its runs of `run` tokens side by side."""
    n, rows = x.shape[1], x.shape[0]
    rest = -n % run  # padded at the end with tokens that add nothing and decay nothing
    x, dt, b, c = (F.pad(t, (0, 0, 0, rest)).reshape(-1, run, t.shape[-1]) for t in (x, dt, b, c))  # (rows·runs, run, …)
    # per token of a run (rows·runs, channels or 1, state or 1)
    xs, steps, cs = (t[..., None].unbind(1) for t in (x, dt, c))
    bs = b[..., None, :].unbind(1)
    decays = [(step * a).exp() for step in steps]
    through = (dt.sum(1)[..., None] * a).exp()
    if keep is not None:
        keep = F.pad(keep, (0, rest), value=1.0).reshape(-1, run, 1, 1)
        decays = [decay * same for decay, same in zip(decays, keep.unbind(1), strict=True)]
        through = through * keep.prod(1)
    h, runs = carry, x.shape[0] // rows
    if runs > 1:
        left = xs[0] @ bs[0]
        for i in range(1, run):
            left = torch.baddbmm(decays[i] * left, xs[i], bs[i])
        left, through = (t.unflatten(0, (rows, runs)) for t in (left, through))
        came = [carry]
        # unbind, not an index per run: the gradient of an index is as large as all runs
        for new, decay in zip(left.unbind(1)[:-1], through.unbind(1)[:-1], strict=True):
            came.append(torch.addcmul(new, decay, came[-1]))
        h = torch.stack(came, 1).flatten(0, 1)
    out: list[Tensor] = []
    for i in range(run):
        h = torch.baddbmm(decays[i] * h, xs[i], bs[i])
        out.append((h @ cs[i])[..., 0])
    y = torch.stack(out, 1).unflatten(0, (rows, runs)).flatten(1, 2)
    return y[:, :n], h.unflatten(0, (rows, runs))[:, -1]


def selective_flops(n: int, channels: int, state: int) -> int:
    """FLOPs of the reference implementation over n tokens: an outer product into the state, and C through it."""
    return 4 * n * channels * state
