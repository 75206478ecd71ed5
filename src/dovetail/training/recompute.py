"""Which activations of a block are kept for the backward pass; the others are computed again.

    none         all are kept
    selective    products are kept: matmuls and attention. Norms, gates, activations, rotations are computed again: they are
                 most of the memory and little of the work (after Korthikanti et al. 2022)
    blocks       the input of a block is kept (Chen et al. 2016): one more forward pass

Gradients are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
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
