"""Muon: momentum, orthogonalized matrix by matrix.

    B ← μ·B + (1 − μ)·g        D = μ·B + (1 − μ)·g  (Nesterov)        O = NS₅(D) ≈ U·Vᵀ of D = U·S·Vᵀ
    W ← (1 − lr·λ)·W − lr·0.2·√max(out, inp)·O

    NS: X ← D/‖D‖; five times X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ        on (…, rows, columns), rows ≤ columns

Each singular value s of X becomes a·s + b·s³ + c·s⁵, which five times brings every s from 0.01 to 1 to between 0.68 and 1.14.
The factor 0.2·√max(out, inp) gives the update the root mean square of AdamW's, so that both take one learning rate and weight
decay. Every expert, and each of the queries, keys and values of a packed weight, is a matrix of its own (core/packed.py).
Jordan et al. 2024; Liu et al. 2025 (Moonlight).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from dovetail.core.fold import Declared
from dovetail.core.packed import matrices

A, B, C = 3.4445, -4.7750, 2.0315  # of the polynomial: steep at 0, so that small singular values grow fast
STEPS = 5
RMS = 0.2  # root mean square of AdamW's update, about
SMALLEST = 1e-7  # norm that a matrix is divided by


class Muon(torch.optim.Optimizer):
    """Muon over declared matrices. A group has `declared` beside `params`: the declaration of each. `dtype` is that of the
    orthogonalization, by default the weight's."""

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            for weight, d in zip(group["params"], group["declared"], strict=True):
                if weight.grad is not None:
                    self._update(weight, weight.grad, d, group)

    def _update(self, weight: Tensor, gradient: Tensor, d: Declared, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(state["momentum"], group["momentum"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        pairs = zip(*(matrices(tensor, d.weight, d.scope) for tensor in (weight, direction)), strict=True)
        for matrix, part in pairs:
            flat = part.flatten(len(d.weight.batch), -2)  # (batch…, out, inp)
            update = orthogonal(flat, group["dtype"]).to(weight.dtype).reshape(part.shape)
            matrix.add_(update, alpha=-group["lr"] * RMS * sqrt(max(flat.shape[-2:])))


def orthogonal(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """(…, out, inp) with every singular value brought near 1, in `dtype`."""
    x = matrix.to(dtype or matrix.dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(SMALLEST)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * (gram @ gram)) @ x
    return x.mT if tall else x
