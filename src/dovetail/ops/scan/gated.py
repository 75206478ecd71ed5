"""Linear attention with a decay per key channel and token: the recurrence of GLA and RWKV-6.

    S_t = diag(a_t) S_{t−1} + k_t v_tᵀ          y_t = S_tᵀ q_t                              a_t = e^{g_t}, g_t ≤ 0
    with a bonus u for the current token:       y_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ q_t

In chunks, y_i = Σ_{j≤i} s_ij v_j + S₀ᵀ (q_i ∘ a_1⋯a_i) with s_ij = Σ_d q_id k_jd a_{j+1,d}⋯a_{i,d}. A product of many a's may
underflow, and a quotient of two such products is then undefined, so nothing is divided. Scores come from halves of a block:

    ┌ left    ·   ┐     across = (q_right ∘ decay since the middle) (k_left ∘ decay until the middle)ᵀ
    └ across right┘     then q_right also decays through the left half, and k_left through the right half

This doubles from blocks of one token up to a chunk, where q has decayed since the chunk's first token and k until its last, as
the carried state needs. Every factor is at most 1 and every product exact to rounding, however fast the decay.

Shapes: q, k, g (rows, n, heads, key)   v, y (rows, n, heads, value)   u (heads, key)   S (rows, heads, key, value).
Yang et al. 2024 (GLA); Peng et al. 2024 (RWKV-6).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.rows import SequenceRows
from dovetail.ops.implementation import chunk
from dovetail.ops.scan.pieces import cut, edges, exp_or_zero, scanned, within_document, zero_if_tiny


def gated_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, seq: SequenceRows, carry: Tensor | None, bonus: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y (rows, n, heads, value) and the state afterwards; padding neither adds to the state nor decays it."""
    return scanned(naive, chunked, q, k, v, g, bonus, seq=seq, carry=carry, dtype=v.dtype)


def naive(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, bonus: Tensor | None, document: Tensor | None, carry: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token."""
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        carry = within_document(carry, document, t)
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
    # (rows, chunks, heads, size, …), padded at the end with tokens that add nothing and decay nothing
    q, k, v, g = (cut(x, size).transpose(2, 3).contiguous() for x in (q, k, v, g))
    own = (q * k if bonus is None else q * bonus[:, None, :] * k).sum(-1)
    scores, q, k, through = _doubled(q, k, exp_or_zero(g), own, late=bonus is not None)
    if document is not None:
        same, reads, keeps, passes = edges(document, size)
        scores = torch.where(same[:, :, None], scores, 0.0)
        q, k, through = q * reads[:, :, None, :, None], k * keeps[:, :, None, :, None], through * passes[..., None, None]
    added = k.transpose(-1, -2) @ v
    carries: list[Tensor] = []
    for decay, new in zip(through.unbind(1), added.unbind(1), strict=True):
        carries.append(carry)
        carry = torch.addcmul(new, decay, carry)
    y = scores @ v + q @ torch.stack(carries, 1)
    return y.transpose(2, 3).flatten(1, 2)[:, :n], carry


def _doubled(q: Tensor, k: Tensor, a: Tensor, own: Tensor, late: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores of all pairs in a chunk (…, size, size); q decayed since the first token, k until the last (…, size, key); the
    decay of a whole chunk (…, key, 1). `late`: a query reads the state before its own token's decay."""
    size = q.shape[-2]
    scores = own[..., None, None]
    # (…, blocks, tokens of one block, key); copies, so that they may be changed in place
    q, k, a = (q.clone() if late else q * a)[..., None, :], k.clone()[..., None, :], a[..., None, :]
    for level in range(size.bit_length() - 1):
        left, right = scores[..., 0::2, :, :], scores[..., 1::2, :, :]
        a_left, a_right = a[..., 0::2, :, :], a[..., 1::2, :, :]
        across = q[..., 1::2, :, :] @ k[..., 0::2, :, :].transpose(-1, -2)
        scores = torch.cat([F.pad(left, (0, 1 << level)), torch.cat([across, right], -1)], -2)
        q, k, a = _joined(q, 1, a_left), _joined(k, 0, a_right), zero_if_tiny(a_left * a_right)
    return scores[..., 0, :, :], q[..., 0, :, :], k[..., 0, :, :], a[..., 0, 0, :, None]


def _joined(x: Tensor, which: int, left: Tensor) -> Tensor:
    """Every two blocks as one, (…, blocks, m, key) -> (…, blocks/2, 2m, key), with one half multiplied by `left`."""
    if not torch.is_grad_enabled():  # in place: the old values are not needed again, and memory is the cost here
        x[..., which::2, :, :].mul_(left)
        return x.unflatten(-3, (-1, 2)).flatten(-3, -2)
    first, second = x[..., 0::2, :, :], x[..., 1::2, :, :]
    return torch.cat([first, second * left] if which else [first * left, second], -2)


def gated_flops(n: int, heads: int, key: int, value: int) -> int:
    """FLOPs of the reference implementation over n tokens: an outer product into the state, and a query through it."""
    return 4 * n * heads * key * value
