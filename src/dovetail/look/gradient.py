"""Gradients at an activation: integrated gradients, whose attributions sum to the difference of a metric, and gradient × input.

    a_i = (x_i − x'_i) ∫₀¹ ∂m/∂x_i (x' + α (x − x')) dα          Σ a_i = m(x) − m(x')          Sundararajan et al. 2017

x is the activation at an address, x' a baseline, m a scalar of the model's output. The integral is a Gauss–Legendre sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from dovetail.look.intervention import Replacement
from dovetail.look.tracer import Tracer, listened, trace
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx

Metric = Callable[[Tensor], Tensor]  # the model's output -> a scalar


def integrated_gradients(
    model: ModelModule,
    tokens: Tensor,
    address: str,
    metric: Metric,
    *,
    baseline: Tensor | float = 0.0,
    steps: int = 16,
    ctx: Ctx | None = None,
    patch: Mapping[str, Replacement] | None = None,
) -> Tensor:
    """Return the attribution of each value of the activation at an address, of its shape."""
    value = trace(model, tokens, address, ctx=ctx, patch=patch)[address]
    begin = torch.as_tensor(baseline, dtype=value.dtype, device=value.device).expand(value.shape)
    total = torch.zeros_like(value)
    for node, weight in zip(*np.polynomial.legendre.leggauss(steps), strict=True):
        point = (begin + (node + 1) / 2 * (value - begin)).detach().requires_grad_()
        tracer = Tracer(model.part, None, {**(patch or {}), address: point})
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(metric(listened(model, tokens, tracer, ctx)), point, allow_unused=True)
        total += 0 if grad is None else weight / 2 * grad
    return (value - begin) * total


def gradient_times_input(
    model: ModelModule,
    tokens: Tensor,
    address: str,
    metric: Metric,
    *,
    ctx: Ctx | None = None,
    patch: Mapping[str, Replacement] | None = None,
) -> Tensor:
    """Return the activation at an address times the gradient of the metric there: its attribution to first order."""
    value = trace(model, tokens, address, ctx=ctx, patch=patch)[address].requires_grad_()
    tracer = Tracer(model.part, None, {**(patch or {}), address: value})
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(metric(listened(model, tokens, tracer, ctx)), value, allow_unused=True)
    return torch.zeros_like(value) if grad is None else value.detach() * grad
