"""Mixed precision without a second model: inside the context, modules have copies of their weights in another dtype.

    copies = Copies(model, torch.bfloat16)
    with copies:                                       W₁₆ ← bf16(W₃₂); tied weights stay one
        objective(model, batch, …).backward()
                                                       on leaving: W₃₂.grad += W₁₆.grad

Matmuls run in bfloat16 and accumulate in float32; weights, gradients and the optimizer's state stay in float32, so that many
small updates and many micro-batches add up. Constants and buffers keep their dtype.              Micikevicius et al. 2018
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Copies:
    """Copies of a model's weights in a dtype, which take their place inside the context. They are allocated once: a compiled
    block is given the same tensors at every step."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.slots: list[tuple[dict[str, Any], str, Tensor]] = [
            (module._parameters, name, weight)
            for module in model.modules()
            for name, weight in module._parameters.items()
            if weight is not None and weight.dtype != dtype
        ]
        weights = {id(weight): weight for _, _, weight in self.slots}
        self.copies = {key: nn.Parameter(torch.empty_like(weight, dtype=dtype)) for key, weight in weights.items()}
        self.pairs = [(weights[key], copy) for key, copy in self.copies.items()]

    @torch.no_grad()
    def __enter__(self) -> None:
        for weight, copy in self.pairs:
            copy.copy_(weight)
        for held, name, weight in self.slots:
            held[name] = self.copies[id(weight)]

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for held, name, weight in self.slots:
            held[name] = weight
        for weight, copy in self.pairs:
            if copy.grad is not None:
                weight.grad = copy.grad.to(weight.dtype) if weight.grad is None else weight.grad.add_(copy.grad)
                copy.grad = None
