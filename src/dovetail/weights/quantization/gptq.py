"""GPTQ: round one input at a time, and let the inputs that are still to come make up for the error.

    argmin_Ŵ tr((W − Ŵ) H (W − Ŵ)ᵀ)          H (inp, inp) from calibration, damped: H + λ · mean(diag H) · I
    U = chol(H⁻¹)ᵀ, upper                    for each input j:  q = nearest(w_j)      w_{k>j} −= (w_j − q) / U_jj · U_jk

The grid is that of rounding to nearest: the same scales, other codes. With `order` inputs are taken by the diagonal of H, the
largest first. Blocks of inputs are updated together, as in the paper. Frantar et al. 2022.

Shapes: W (out, inp), experts one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.ops.formats.format import Format, Grid

BLOCK = 128  # inputs per block


def gptq(w: Tensor, hessian: Tensor, format: Format, damping: float = 0.01, order: bool = True) -> dict[str, Tensor]:
    """The tensors that stand for W (…, out, inp), for inputs with this H (…, inp, inp)."""
    w = w.float()
    grid = format.fit(format.grouped(w))
    if w.dim() == 2:
        return format.packed(_codes(w, hessian, format, format.grid(grid), damping, order), grid)
    scale, zero = format.grid(grid)
    codes = [
        _codes(one, h, format, Grid(scale[i], None if zero is None else zero[i]), damping, order)
        for i, (one, h) in enumerate(zip(w.unbind(0), hessian.unbind(0), strict=True))
    ]
    return format.packed(torch.stack(codes), grid)


def _codes(w: Tensor, hessian: Tensor, format: Format, grid: Grid, damping: float, order: bool) -> Tensor:
    """(out, inp) codes of one matrix."""
    inp = w.shape[-1]
    size = format.size(inp)
    diagonal = hessian.diagonal()
    permutation = diagonal.argsort(descending=True) if order else torch.arange(inp, device=w.device)
    w = w[:, permutation].clone()
    upper = _inverse_factor(hessian[permutation][:, permutation], damping)
    scale, zero = grid
    group = (permutation // size).tolist()
    scale = scale.expand(len(w), -1)
    codes: list[Tensor] = []
    for begin in range(0, inp, BLOCK):
        end = min(begin + BLOCK, inp)
        errors = torch.zeros(len(w), end - begin, device=w.device)
        for j in range(begin, end):
            g = group[j] if scale.shape[-1] > 1 else 0
            own = Grid(scale[:, g], None if zero is None else zero[:, g])
            code = format.nearest(w[:, j], own)
            error = (w[:, j] - format.value(code, own)) / upper[j, j]
            w[:, j + 1 : end].addr_(error, upper[j, j + 1 : end], alpha=-1)
            errors[:, j - begin] = error
            codes.append(code)
        w[:, end:] -= errors @ upper[begin:end, end:]
    found = torch.stack(codes, 1)
    out = torch.empty_like(found)
    out[:, permutation] = found
    return out


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """chol(H⁻¹)ᵀ of the damped H; an input that is always zero has a diagonal of one. The damping grows until H is positive."""
    h = hessian.double().clone()
    diagonal = h.diagonal()
    diagonal[diagonal == 0] = 1.0
    mean = diagonal.mean().clone()
    for _ in range(12):
        diagonal += damping * mean
        factor, info = torch.linalg.cholesky_ex(h)
        if int(info) == 0:
            inverse, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if int(info) == 0 and bool(inverse.isfinite().all()):
                return inverse.float()
        damping *= 10
    return torch.eye(len(h), device=h.device)  # as rounding to nearest
