"""Linear attention with a scalar decay per head and token: the recurrence of linear attention, RetNet and Mamba-2.

    S_t = a_t S_{t−1} + k_t v_tᵀ          y_t = S_tᵀ q_t          a_t = e^{g_t}, g_t ≤ 0

In chunks, with c the cumulative sum of g inside a chunk:   y_i = Σ_{j≤i} e^{c_i − c_j} (q_i·k_j) v_j  +  e^{c_i} S₀ᵀ q_i
                                                            S₁ = e^{c_last} S₀ + Σ_j e^{c_last − c_j} k_j v_jᵀ
Exponents are differences of c and never above 0, so nothing overflows, however fast the decay. A new document needs no
reset: pairs of two documents are masked, and a carried state is read by its own document alone.

Heads may share queries and keys within a group, as in Mamba-2: q·k is computed once per group, and the values of its heads are
concatenated for the matmuls that write and read the state.

Shapes: q, k (rows, n, groups, key)   v, y (rows, n, heads, value)   g (rows, n, heads)   S (rows, heads, key, value).
Katharopoulos et al. 2020; Sun et al. 2023 (RetNet); Dao & Gu 2024 (state space duality).
"""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor

from dovetail.nn.rows import SequenceRows
from dovetail.ops.implementation import chunk
from dovetail.ops.scan.pieces import cut, edges, scanned, within_document

LEAST = 16  # tokens of a chunk, however small the state


def decay_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, seq: SequenceRows, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """y (rows, n, heads, value) and the state afterwards; padding neither adds to the state nor decays it."""
    return scanned(naive, chunked, q, k, v, g, seq=seq, carry=carry, dtype=q.dtype)


def naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, document: Tensor | None, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token."""
    shared = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(shared, 2) if shared > 1 else x for x in (q, k))
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        carry = within_document(carry, document, t)
        carry = g[:, t, :, None, None].exp() * carry + k[:, t, :, :, None] @ v[:, t, :, None, :]
        out.append((q[:, t, :, None, :] @ carry)[:, :, 0])
    return torch.stack(out, 1), carry


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, document: Tensor | None, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Matmuls over chunks; the carry goes from chunk to chunk."""
    n, size, value = q.shape[1], balanced(k.shape[-1], v.shape[-1], q.shape[1]), v.shape[-1]
    by_group = (q.shape[2], v.shape[2] // q.shape[2])
    # padded at the end with tokens that add nothing and decay nothing
    q, k = (cut(x, size).transpose(2, 3) for x in (q, k))  # (rows, chunks, groups, size, key)
    v = cut(v, size).unflatten(3, by_group).permute(0, 1, 3, 4, 2, 5)  # (rows, chunks, groups, shared, size, value)
    c = cut(g, size).unflatten(3, by_group).permute(0, 1, 3, 4, 2).cumsum(-1)  # (rows, chunks, groups, shared, size)
    visible = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    from_carry, to_carry, through = c.exp(), (c[..., -1:] - c).exp(), c[..., -1].exp()
    if document is not None:
        same, reads, keeps, passes = edges(document, size)
        visible = (visible & same)[:, :, None, None]
        from_carry, to_carry = from_carry * reads[:, :, None, None], to_carry * keeps[:, :, None, None]
        through = through * passes[..., None]
    decay = (c[..., :, None] - c[..., None, :]).masked_fill(~visible, -torch.inf).exp()
    inside = ((q @ k.transpose(-1, -2))[..., None, :, :] * decay) @ v
    added = k.transpose(-1, -2) @ beside(v * to_carry[..., None])  # (rows, chunks, groups, key, shared·value)
    through = through.repeat_interleave(value, -1)[..., None, :]
    carry = beside(carry.unflatten(1, by_group))
    carries: list[Tensor] = []
    # unbind, not an index per chunk: the gradient of an index is as large as all chunks
    for new, left in zip(added.unbind(1), through.unbind(1), strict=True):
        carries.append(carry)
        carry = torch.addcmul(new, left, carry)
    y = inside + from_carry[..., None] * apart(q @ torch.stack(carries, 1), value)
    return y.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :n], apart(carry, value).flatten(1, 2)


def balanced(key: int, value: int, n: int) -> int:
    """Tokens of a chunk. The work inside a chunk grows with it, that of carrying a state of key·value values shrinks; they are
    equal at √(key·value)."""
    return min(max(LEAST, isqrt(key * value)), chunk(), n)


def beside(x: Tensor) -> Tensor:
    """(…, shared, size, value) -> (…, size, shared·value): the heads of one group, concatenated."""
    return x.transpose(-3, -2).flatten(-2)


def apart(x: Tensor, value: int) -> Tensor:
    """(…, size, shared·value) -> (…, shared, size, value)."""
    return x.unflatten(-1, (-1, value)).transpose(-3, -2)


def decay_flops(n: int, heads: int, key: int, value: int) -> int:
    """FLOPs of the reference implementation over n tokens: an outer product into the state, and a query through it."""
    return 4 * n * heads * key * value
