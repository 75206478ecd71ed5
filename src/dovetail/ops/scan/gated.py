"""A matrix memory in which every key channel fades by itself: the recurrence of gated linear attention and of RWKV.

    S_t = diag(a_t) S_{t−1} + k_t v_tᵀ          y_t = S_tᵀ q_t                              a_t = e^{g_t}, g_t ≤ 0
    with a bonus u for the token itself:        y_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ q_t

In chunks, y_i = Σ_{j≤i} s_ij v_j + S₀ᵀ (q_i ∘ a_1⋯a_i) with s_ij = Σ_d q_id k_jd a_{j+1,d}⋯a_{i,d}. A product of many a's may
be too small for any number, and a quotient of two such is nothing: so nothing is divided. Scores come from halves of a block:

    ┌ left    ·   ┐     across = (q_right ∘ what faded since the middle) (k_left ∘ what fades until the middle)ᵀ
    └ across right┘     then q_right also fades through the left half, and k_left through the right one

From blocks of one token this doubles up to a chunk, where q has faded since its begin and k until its end, as the carry needs.
Every factor is at most 1 and every product exact to rounding, however fast the memory fades.

Shapes: q, k, g (rows, n, heads, key)   v, y (rows, n, heads, value)   u (heads, key)   S (rows, heads, key, value).
Yang et al. 2024 (gated linear attention); Peng et al. 2024 (RWKV-6).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.module import at_least_fp32
from dovetail.core.rows import SequenceRows
from dovetail.ops.form import chunk, readable
from dovetail.ops.scan.fade import faded, unless_tiny
from dovetail.ops.scan.pieces import cut, edges


def gated_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, seq: SequenceRows, carry: Tensor | None, bonus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y (rows, n, heads, value) and the memory afterwards; padding neither adds to it nor lets it fade."""
    dtype, kept = q.dtype, at_least_fp32(q.dtype)
    q, k, v, g = q.to(kept), seq.only_real(k.to(kept)), v.to(kept), seq.only_real(g.to(kept))
    if carry is None:
        carry = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1])
    form = naive if readable() or q.shape[1] == 1 else chunked
    y, carry = form(q, k, v, g, bonus if bonus is None else bonus.to(kept), seq.document, carry.to(kept))
    return y.to(dtype), carry


def naive(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, bonus: Tensor | None, document: Tensor | None, carry: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token."""
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        if document is not None:
            before = document[:, t - 1] if t else torch.zeros_like(document[:, 0])
            carry = carry * (document[:, t] == before)[:, None, None, None]
        old = carry
        carry = g[:, t, :, :, None].exp() * carry + k[:, t, :, :, None] @ v[:, t, :, None, :]
        y = (q[:, t, :, None, :] @ (carry if bonus is None else old))[:, :, 0]
        out.append(y if bonus is None else y + (q[:, t] * bonus * k[:, t]).sum(-1, keepdim=True) * v[:, t])
    return torch.stack(out, 1), carry


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, bonus: Tensor | None, document: Tensor | None, carry: Tensor
) -> tuple[Tensor, Tensor]:
    """Matmuls over chunks, whose length is a power of two; the carry goes from chunk to chunk."""
    n = q.shape[1]
    size = 1 << (min(chunk(), n) - 1).bit_length()
    # (rows, chunks, heads, size, …), padded behind with tokens that add nothing and fade nothing
    q, k, v, g = (cut(x, size).transpose(2, 3).contiguous() for x in (q, k, v, g))
    own = (q * k if bonus is None else q * bonus[:, None, :] * k).sum(-1)
    scores, q, k, through = _doubled(q, k, faded(g), own, late=bonus is not None)
    if document is not None:
        same, reads, keeps, passes = edges(document, size)
        scores = torch.where(same[:, :, None], scores, 0.0)
        q, k, through = q * reads[:, :, None, :, None], k * keeps[:, :, None, :, None], through * passes[..., None, None]
    added = k.transpose(-1, -2) @ v
    carries: list[Tensor] = []
    for kept, new in zip(through.unbind(1), added.unbind(1), strict=True):
        carries.append(carry)
        carry = torch.addcmul(new, kept, carry)
    y = scores @ v + q @ torch.stack(carries, 1)
    return y.transpose(2, 3).flatten(1, 2)[:, :n], carry


def _doubled(q: Tensor, k: Tensor, a: Tensor, own: Tensor, late: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of all pairs in a chunk (…, size, size); q faded since its begin, k until its end (…, size, key); what a whole
    chunk lets through (…, key, 1). `late`: a query reads before its own token fades the memory."""
    size = q.shape[-2]
    scores = own[..., None, None]
    # (…, blocks, tokens of one block, key); both are our own, so that they may be changed in place
    q, k, a = (q.clone() if late else q * a)[..., None, :], k.clone()[..., None, :], a[..., None, :]
    for level in range(size.bit_length() - 1):
        left, right = scores[..., 0::2, :, :], scores[..., 1::2, :, :]
        a_left, a_right = a[..., 0::2, :, :], a[..., 1::2, :, :]
        across = q[..., 1::2, :, :] @ k[..., 0::2, :, :].transpose(-1, -2)
        scores = torch.cat([F.pad(left, (0, 1 << level)), torch.cat([across, right], -1)], -2)
        q, k, a = _joined(q, 1, a_left), _joined(k, 0, a_right), unless_tiny(a_left * a_right)
    return scores[..., 0, :, :], q[..., 0, :, :], k[..., 0, :, :], a[..., 0, 0, :, None]


def _joined(x: Tensor, which: int, left: Tensor) -> Tensor:
    """Every two blocks as one, (…, blocks, m, key) -> (…, blocks/2, 2m, key), of which one half keeps only what is left."""
    if not torch.is_grad_enabled():  # nothing of the old is needed again, and memory is what this costs most
        x[..., which::2, :, :].mul_(left)
        return x.unflatten(-3, (-1, 2)).flatten(-3, -2)
    first, second = x[..., 0::2, :, :], x[..., 1::2, :, :]
    return torch.cat([first, second * left] if which else [first * left, second], -2)


def gated_flops(n: int, heads: int, key: int, value: int) -> int:
    """What the readable form multiplies over n tokens: an outer product into the memory, and a query through it."""
    return 4 * n * heads * key * value
