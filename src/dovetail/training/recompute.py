"""What a training step keeps: activations, and weights in another dtype.

Which activations of a block are kept for the backward pass; the others are computed again.

    none         all are kept
    selective    products are kept: matmuls and attention. Norms, gates, activations, rotations are computed again: they are
                 most of the memory and little of the work (after Korthikanti et al. 2022)
    blocks       the input of a block is kept (Chen et al. 2016): one more forward pass

Gradients are the same.

Mixed precision without a second model: inside the context, modules have copies of their weights in another dtype.

    copies = Copies(model, torch.bfloat16)
    with copies:                                       W₁₆ ← bf16(W₃₂); tied weights stay one
        objective(model, batch, …).backward()
                                                       on leaving: W₃₂.grad += W₁₆.grad

Matmuls run in bfloat16 and accumulate in float32; weights, gradients and the optimizer's state stay in float32, so that many
small updates and many micro-batches add up. Constants and buffers keep their dtype.              Micikevicius et al. 2018
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dovetail.training.plan import Recompute

ATEN = torch.ops.aten
PRODUCTS = frozenset(
    {
        *(ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.baddbmm.default, ATEN.convolution.default),
        ATEN._grouped_mm.default,
        ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        ATEN._scaled_dot_product_flash_attention.default,
        ATEN._scaled_dot_product_efficient_attention.default,
        ATEN._scaled_dot_product_cudnn_attention.default,
    }
)


def _keep_products(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS: Mapping[Recompute, Mapping[str, Any]] = {
    "selective": {"context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_products)},
    "blocks": {},
}


def recomputed(block: nn.Module, kind: Recompute) -> None:
    """Let a block keep what the kind says."""
    if kind not in CONTEXTS:
        return
    options, inner = CONTEXTS[kind], type(block).forward.__get__(block)

    def forward(*args: Any, **kwargs: Any) -> Any:  # a function of ours: the compiler skips one of torch's at the top
        return checkpoint(inner, *args, use_reentrant=False, **options, **kwargs)

    block.forward = forward


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
