"""A memory of many numbers a channel, each fading at its own pace: the selective scan of Mamba.

    h_t = e^{Δ_t A} ∘ h_{t−1} + (Δ_t x_t) B_tᵀ          y_t = h_t C_t          A < 0: a memory fades, never grows

Every channel and every number of its memory fades differently, so pairs of tokens cannot be weighed by one matmul, as where a
whole head fades at one pace. The chunked form lets many runs of tokens go forward together instead:

    a piece of the text    run 0: t = 0 … 63    run 1: t = 64 … 127    …     all at their first token, all at their second, …
    first                  what each run would leave behind if nothing came before it; and from run to run, what really came
    then                   each run once more, from what really came before it, read at every token

Decays are powers e^{Δ A} ≤ 1 and only multiplied: nothing overflows. Work is linear in n. What is held at once is one piece; in
training a piece is computed again when its gradient is asked for.

Shapes: x, Δ, y (rows, n, channels)   A (channels, state)   B, C (rows, n, state)   h (rows, channels, state).   Gu & Dao 2023.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dovetail.core.module import at_least_fp32
from dovetail.core.rows import SequenceRows
from dovetail.ops.form import chunk, readable

SLAB = 65536  # numbers of memory that runs advance at once: enough to be worth a call, few enough to stay in cache
FEW = 4  # with fewer runs side by side it costs more to go over them twice than is saved


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, seq: SequenceRows, carry: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y (rows, n, channels) and the memory afterwards; padding neither adds to it nor lets it fade."""
    dtype, kept = x.dtype, at_least_fp32(x.dtype)
    dt, a, b, c = seq.only_real(dt.to(kept)), a.to(kept), b.to(kept), c.to(kept)
    added = dt * x.to(kept)
    if carry is None:
        carry = dt.new_zeros(x.shape[0], *a.shape)
    form = naive if readable() or x.shape[1] == 1 else chunked
    y, carry = form(added, dt, a, b, c, goes_on(seq.document, kept), carry.to(kept))
    return y.to(dtype), carry


def goes_on(document: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(rows, n) 1 where a token goes on with what came before, 0 where it begins a document; None: all go on."""
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
    piece = run * (min(run, fit) if fit >= FEW else 1)
    again = torch.is_grad_enabled() and piece < n
    # split, not slices: the gradient of a slice is as long as the whole text
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
    rest = -n % run  # padded behind with tokens that add nothing and fade nothing
    x, dt, b, c = (F.pad(t, (0, 0, 0, rest)).reshape(-1, run, t.shape[-1]) for t in (x, dt, b, c))  # (rows·runs, run, …)
    # of each token of a run (rows·runs, channels or 1, state or 1)
    xs, steps, cs = (t[..., None].unbind(1) for t in (x, dt, c))
    bs = b[..., None, :].unbind(1)
    fades = [(step * a).exp() for step in steps]
    through = (dt.sum(1)[..., None] * a).exp()
    if keep is not None:
        keep = F.pad(keep, (0, rest), value=1.0).reshape(-1, run, 1, 1)
        fades = [fade * kept for fade, kept in zip(fades, keep.unbind(1), strict=True)]
        through = through * keep.prod(1)
    memory, runs = carry, x.shape[0] // rows
    if runs > 1:
        left = xs[0] @ bs[0]
        for i in range(1, run):
            left = torch.baddbmm(fades[i] * left, xs[i], bs[i])
        left, through = (t.unflatten(0, (rows, runs)) for t in (left, through))
        came = [carry]
        # unbound at once: the gradient of an index into all runs would be as large as they are, for each of them
        for new, kept in zip(left.unbind(1)[:-1], through.unbind(1)[:-1], strict=True):
            came.append(torch.addcmul(new, kept, came[-1]))
        memory = torch.stack(came, 1).flatten(0, 1)
    out: list[Tensor] = []
    for i in range(run):
        memory = torch.baddbmm(fades[i] * memory, xs[i], bs[i])
        out.append((memory @ cs[i])[..., 0])
    y = torch.stack(out, 1).unflatten(0, (rows, runs)).flatten(1, 2)
    return y[:, :n], memory.unflatten(0, (rows, runs))[:, -1]


def selective_flops(n: int, channels: int, state: int) -> int:
    """What the readable form multiplies over n tokens: an outer product into the memory, and C through it."""
    return 4 * n * channels * state
