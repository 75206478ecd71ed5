"""A matrix memory that fades by one number a head and token: the recurrence of linear attention, RetNet and Mamba-2.

    S_t = a_t S_{t−1} + k_t v_tᵀ          y_t = S_tᵀ q_t          a_t = e^{g_t}, g_t ≤ 0

In chunks, with c the running sum of g inside a chunk:      y_i = Σ_{j≤i} e^{c_i − c_j} (q_i·k_j) v_j  +  e^{c_i} S₀ᵀ q_i
                                                            S₁ = e^{c_last} S₀ + Σ_j e^{c_last − c_j} k_j v_jᵀ
Only differences of c are raised to powers, never above 0: nothing overflows, however fast the memory fades. A document needs no
reset: pairs of two documents are masked, and a carry is read by its own document alone.

Shapes: q, k (rows, n, heads, key)   v, y (rows, n, heads, value)   g (rows, n, heads)   S (rows, heads, key, value).
Katharopoulos et al. 2020; Sun et al. 2023; Dao & Gu 2024 (state space duality).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.core.line import Line
from dovetail.core.module import wide
from dovetail.ops.form import chunk, readable
from dovetail.ops.scan.pieces import cut, edges


def decay_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, line: Line, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """y (rows, n, heads, value) and the memory afterwards; padding neither adds to it nor lets it fade."""
    dtype, kept = q.dtype, wide(q.dtype)
    q, k, v, g = q.to(kept), line.only_real(k.to(kept)), v.to(kept), line.only_real(g.to(kept))
    if carry is None:
        carry = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1])
    form = naive if readable() or q.shape[1] == 1 else chunked
    y, carry = form(q, k, v, g, line.document, carry.to(kept))
    return y.to(dtype), carry


def naive(q: Tensor, k: Tensor, v: Tensor, g: Tensor, document: Tensor | None, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token."""
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        if document is not None:
            before = document[:, t - 1] if t else torch.zeros_like(document[:, 0])
            carry = carry * (document[:, t] == before)[:, None, None, None]
        carry = g[:, t, :, None, None].exp() * carry + k[:, t, :, :, None] @ v[:, t, :, None, :]
        out.append((q[:, t, :, None, :] @ carry)[:, :, 0])
    return torch.stack(out, 1), carry


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, document: Tensor | None, carry: Tensor) -> tuple[Tensor, Tensor]:
    """Matmuls over chunks; the carry goes from chunk to chunk."""
    n, size = q.shape[1], min(chunk(), q.shape[1])
    # (rows, chunks, heads, size, …), padded behind with tokens that add nothing and fade nothing
    q, k, v, g = (cut(x, size).transpose(2, 3) for x in (q, k, v, g))
    c = g.cumsum(-1)
    seen = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    reads = keeps = passes = None  # whether a token reads the carry, is still of the document at the end, the carry survives
    if document is not None:
        same, reads, keeps, passes = edges(document, size)
        seen, reads, keeps, passes = (seen & same)[:, :, None], reads[:, :, None], keeps[:, :, None], passes[..., None, None]
    fade = (c[..., :, None] - c[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    inside = ((q @ k.transpose(-1, -2)) * fade) @ v
    from_carry, to_carry, through = c.exp(), (c[..., -1:] - c).exp(), c[..., -1:, None].exp()
    if reads is not None and keeps is not None and passes is not None:
        from_carry, to_carry, through = from_carry * reads, to_carry * keeps, through * passes
    added = (k * to_carry[..., None]).transpose(-1, -2) @ v
    carries: list[Tensor] = []
    for i in range(q.shape[1]):
        carries.append(carry)
        carry = through[:, i] * carry + added[:, i]
    y = inside + (q * from_carry[..., None]) @ torch.stack(carries, 1)
    return y.transpose(2, 3).flatten(1, 2)[:, :n], carry


def decay_flops(n: int, heads: int, key: int, value: int) -> int:
    """What the readable form multiplies over n tokens: an outer product into the memory, and a query through it."""
    return 4 * n * heads * key * value
