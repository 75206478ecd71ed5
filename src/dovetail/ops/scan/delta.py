"""The gated delta rule: a token writes to the state the difference between its value and what its key recalls.

    S̃_t = a_t S_{t−1}          S_t = S̃_t + k_t (β_t (v_t − S̃_tᵀ k_t))ᵀ          y_t = S_tᵀ q_t          a_t = e^{g_t}, g_t ≤ 0

In chunks, with f_ij = a_{j+1}⋯a_i, the corrections w_i = β_i (v_i − S̃_iᵀ k_i) of one chunk solve a triangular system:

    w_i + Σ_{j<i} β_i f_ij (k_i·k_j) w_j = β_i v_i − β_i f_i0 S₀ᵀ k_i
    y_i = Σ_{j≤i} f_ij (q_i·k_j) w_j + f_i0 S₀ᵀ q_i          S₁ = f_last,0 S₀ + Σ_j f_last,j k_j w_jᵀ

f is e to a sum over the tokens between, never a difference of two long sums: nothing overflows and nothing cancels.

Shapes: q, k (rows, n, heads, key)   v, y (rows, n, heads, value)   g, β (rows, n, heads)   S (rows, heads, key, value).
Schlag et al. 2021 (delta rule); Yang et al. 2024 (chunked); Yang et al. 2025 (gated).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.nn.rows import SequenceRows
from dovetail.ops.implementation import chunk
from dovetail.ops.scan.pieces import cut, edges, exp_or_zero, scanned, within_document


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, seq: SequenceRows, carry: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y (rows, n, heads, value) and the state afterwards; padding neither corrects the state nor decays it."""
    return scanned(naive, chunked, q, k, v, g, beta, seq=seq, carry=carry, dtype=q.dtype)


def naive(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, document: Tensor | None, carry: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token."""
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        carry = within_document(carry, document, t)
        carry = g[:, t, :, None, None].exp() * carry
        recalled = k[:, t, :, None, :] @ carry
        carry = carry + k[:, t, :, :, None] @ (beta[:, t, :, None, None] * (v[:, t, :, None, :] - recalled))
        out.append((q[:, t, :, None, :] @ carry)[:, :, 0])
    return torch.stack(out, 1), carry


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, document: Tensor | None, carry: Tensor
) -> tuple[Tensor, Tensor]:
    """Matmuls and one triangular system per chunk; the carry goes from chunk to chunk."""
    n, size = q.shape[1], min(chunk(), q.shape[1])
    # (rows, chunks, heads, size, …), padded at the end with tokens that write nothing and decay nothing
    q, k, v, g, beta = (cut(x, size).transpose(2, 3) for x in (q, k, v, g, beta))
    decay = exp_or_zero(g[..., :, None].expand(*g.shape, size).tril(-1).cumsum(-2)).tril()  # f_ij
    from_carry, to_carry = exp_or_zero(g.cumsum(-1)), decay[..., -1, :]
    through = from_carry[..., -1:, None]
    if document is not None:
        same, reads, keeps, passes = edges(document, size)
        decay, to_carry = torch.where(same[:, :, None], decay, 0.0), torch.where(keeps[:, :, None], to_carry, 0.0)
        from_carry, through = from_carry * reads[:, :, None], through * passes[..., None, None]
    pairs = (k * beta[..., None]) @ k.transpose(-1, -2) * decay
    written = torch.cat([v * beta[..., None], k * (beta * from_carry)[..., None]], -1)
    # unitriangular: the diagonal is 1
    solved = torch.linalg.solve_triangular(pairs, written, upper=False, unitriangular=True)
    fresh, recalled = solved.split([v.shape[-1], k.shape[-1]], -1)
    kept_keys = (k * to_carry[..., None]).transpose(-1, -2)
    carries: list[Tensor] = []
    corrections: list[Tensor] = []
    # unbind, not an index per chunk: the gradient of an index is as large as all chunks
    each = (part.unbind(1) for part in (fresh, recalled, kept_keys, through))
    for new, known, keys, left in zip(*each, strict=True):
        carries.append(carry)
        corrections.append(new - known @ carry)
        carry = left * carry + keys @ corrections[-1]
    y = (q @ k.transpose(-1, -2) * decay) @ torch.stack(corrections, 1) + (q * from_carry[..., None]) @ torch.stack(carries, 1)
    return y.transpose(2, 3).flatten(1, 2)[:, :n], carry


def delta_flops(n: int, heads: int, key: int, value: int) -> int:
    """FLOPs of the reference implementation over n tokens: a key and a query through the state, an outer product into it."""
    return 6 * n * heads * key * value
