"""A linear time-invariant state space, as a recurrence and as a convolution: the core of S4.

    h_t = ā ∘ h_{t−1} + b̄ u_t          y_t = Re Σ c h_t          =          y = K * u,   K_d = Re Σ c b̄ ā^d

Three forms: naive, token by token; a convolution by FFT, for whole documents; and chunked, for packed documents, padding and
short sequences. In chunks of m tokens, with h₀ the state before a chunk:

    y_i = Σ_{d≤i} K_d u_{i−d} + Re Σ c ā^{i+1} h₀          h₁ = ā^m h₀ + Σ_i ā^{m−1−i} b̄ u_i

where pairs of two documents are left out, and a carried state is read by its own document alone. Padding does not advance the
state: the real tokens of a row are moved to its front first. An FFT spreads rounding errors over all tokens, later ones too
(about 1e-16 of scale in float64); a sequence no longer than a chunk is computed without an FFT.

Powers ā^k are e^{k log ā}, in float64, with |ā| ≤ 1: nothing overflows, and phases stay exact over long sequences.
Shapes: u, y (rows, n, channels) real   ā, b̄, c (channels, state) complex   h (rows, channels, state) complex.   Gu et al. 2022.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.module import at_least_fp32
from dovetail.nn.rows import SequenceRows
from dovetail.ops.implementation import chunk, reference
from dovetail.ops.scan.pieces import cut, edges, within_document

SHORT = 16  # tokens of a chunk: pairs inside it are computed one distance at a time, so a chunk should be short


def space_scan(
    u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, seq: SequenceRows, carry: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y (rows, n, channels) and the state afterwards; padding neither adds to the state nor decays it.

    `log_a` (channels, state) is log ā, in complex128 as b and c are; `carry` is the state before, None for zero."""
    dtype, wide = u.dtype, at_least_fp32(u.dtype)
    u = u.to(wide)
    if carry is None:
        nothing = u.new_zeros(u.shape[0], *log_a.shape)
        carry = torch.complex(nothing, nothing)
    if reference() or u.shape[1] == 1:
        y, carry = naive(u, log_a, b, c, seq.real, seq.document, carry)
    elif seq.document is None and u.shape[1] > chunk():
        y, carry = convolved(u, log_a, b, c, carry)
    elif seq.real is None or seq.document is None:
        y, carry = chunked(u, log_a, b, c, None, None, carry)
    else:
        front = seq.real.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        document = torch.where(seq.real, seq.document, seq.document.amax(1, keepdim=True)).gather(1, front)
        moved = u.gather(1, front[..., None].expand_as(u))
        y, carry = chunked(moved, log_a, b, c, document, seq.real.sum(1), carry)
        y = torch.empty_like(y).scatter(1, front[..., None].expand_as(y), y)
    return y.to(dtype), carry


def naive(
    u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, real: Tensor | None, document: Tensor | None, carry: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token."""
    a, b = log_a.exp().to(carry.dtype), b.to(carry.dtype)
    reading = pairs(c.conj().to(carry.dtype))[..., None]
    out: list[Tensor] = []
    for t in range(u.shape[1]):
        carry = within_document(carry, document, t)
        new = a * carry + b * u[:, t, :, None]
        carry = new if real is None else torch.where(real[:, t, None, None], new, carry)
        out.append((pairs(carry)[..., None, :] @ reading)[..., 0, 0])
    return torch.stack(out, 1), carry


def convolved(u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """By FFT, over whole rows; powers up to n are products of those of whole chunks and those within one."""
    n, size = u.shape[1], chunk()
    chunks = -(-n // size)
    far, near = powers(log_a * size, chunks), powers(log_a, size)  # (chunks or size, channels, state)
    kernel = read((c * b * far).to(carry.dtype)[None], near.to(carry.dtype))[0].flatten(0, 1)[:n]
    y = torch.fft.irfft(torch.fft.rfft(u, 2 * n, 1) * torch.fft.rfft(kernel, 2 * n, 0), 2 * n, 1)[:, :n]
    came = carry[:, None] * far.to(carry.dtype)
    y = y + read(came, (c * near * log_a.exp()).to(carry.dtype)).flatten(1, 2)[:, :n]
    ahead = F.pad(u, (0, 0, chunks * size - n, 0)).unflatten(1, (chunks, size))  # padding in front adds nothing
    added = write(ahead, (b * near).flip(0).to(carry.dtype))
    return y, (log_a * n).exp().to(carry.dtype) * carry + (far.flip(0).to(carry.dtype) * added).sum(1)


def chunked(
    u: Tensor, log_a: Tensor, b: Tensor, c: Tensor, document: Tensor | None, count: Tensor | None, carry: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunk by chunk; of each row the first `count` tokens are real."""
    n, size = u.shape[1], min(SHORT, chunk(), u.shape[1])
    u = cut(u, size)
    if count is None:
        count = u.new_full((u.shape[0],), n, dtype=torch.long)
    begins = size * torch.arange(u.shape[1], device=u.device)
    real = (count[:, None] - begins).clamp(0, size)  # (rows, chunks) number of real tokens per chunk
    reads = keeps = passes = same = None
    if document is not None:
        same, reads, keeps, passes = edges(document, size)
        reads, keeps, passes = reads[..., None], keeps[..., None], passes[..., None]
    table = powers(log_a, size + 1).to(carry.dtype)
    near = table[:-1]
    kernel = read((c * b).to(carry.dtype)[None, None], near)[0, 0]  # (size, channels)
    y = u * kernel[0]
    for d in range(1, size):
        term = u[:, :, : size - d] * kernel[d]
        if same is not None:
            term = term * same.diagonal(-d, -2, -1)[..., None]
        y = y + F.pad(term, (0, 0, d, 0))
    # the real tokens of a chunk are moved to its end before they write to the state
    place = torch.arange(size, device=u.device) + real[..., None] - size
    written = u if keeps is None else u * keeps
    written = written.gather(2, place.clamp(min=0)[..., None].expand_as(u)) * (place >= 0)[..., None]
    added = write(written, (b.to(carry.dtype) * near).flip(0))
    through = table[real] if passes is None else table[real] * passes
    came: list[Tensor] = []
    # unbind, not an index per chunk: the gradient of an index is as large as all chunks
    for new, left in zip(added.unbind(1), through.unbind(1), strict=True):
        came.append(carry)
        carry = torch.addcmul(new, left, carry)
    before_chunks = read(torch.stack(came, 1), c.to(carry.dtype) * table[1:])
    y = y + (before_chunks if reads is None else before_chunks * reads)
    return y.flatten(1, 2)[:, :n], carry


def powers(log_a: Tensor, count: int) -> Tensor:
    """(count, channels, state): 1, ā, ā², …"""
    return (torch.arange(count, device=log_a.device, dtype=torch.float64)[:, None, None] * log_a).exp()


def pairs(x: Tensor) -> Tensor:
    """(…, state) complex as (…, 2·state) real."""
    return torch.view_as_real(x.resolve_conj()).flatten(-2)


def read(state: Tensor, weight: Tensor) -> Tensor:
    """Re Σ state · weight: (rows, chunks, channels, state), (size, channels, state) to (rows, chunks, size, channels)."""
    rows, chunks = state.shape[:2]
    product = pairs(state).flatten(0, 1).transpose(0, 1) @ pairs(weight.conj()).permute(1, 2, 0)
    return product.permute(1, 2, 0).unflatten(0, (rows, chunks))


def write(u: Tensor, weight: Tensor) -> Tensor:
    """Σ_i weight_i u_i: (rows, chunks, size, channels), (size, channels, state) to (rows, chunks, channels, state) complex."""
    rows, chunks = u.shape[:2]
    product = u.flatten(0, 1).permute(2, 0, 1) @ pairs(weight).transpose(0, 1)  # (channels, rows·chunks, 2·state)
    return torch.view_as_complex(product.transpose(0, 1).unflatten(-1, (-1, 2)).contiguous()).unflatten(0, (rows, chunks))


def space_flops(n: int, channels: int, state: int) -> int:
    """FLOPs of the reference implementation over n tokens: c through the state, in real numbers."""
    return 4 * n * channels * state
