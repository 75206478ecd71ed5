"""A vocabulary that is sharded across tensor-parallel ranks: rank r holds v/ranks rows of the embedding table and of the head.

    lookup         x = Σ_r [id is of rank r] · table_r[id − first_r]                        all terms but one are zero
    cross-entropy  m = max_r max_v l_v       s = Σ_r Σ_v e^(l_v − m)       t = Σ_r [label is of rank r] · l_label
                   loss = m + log s − t      gradient of a logit: e^(l_v − m) / s − [v is the label]

No rank holds the logits of all tokens and all of the vocabulary: ranks exchange three numbers per token.

Shapes: ids (…, n); table (v/ranks, embed); logits (tokens, v/ranks); labels (tokens,) with −100 where there is no label.
Shoeybi et al. 2019 (Megatron-LM).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.errors import InputError
from dovetail.core.loss import IGNORED
from dovetail.core.module import Module


def lookup(ids: Tensor, table: Tensor, module: Module, ctx: Ctx, axes: Sequence[str]) -> Tensor:
    """Return the rows of the table (…, n, embed); `axes` are those of its rows, and `module` has their sizes."""
    row, own = _own(ids, len(table), module, ctx, axes)
    x = F.embedding(row, table)
    return ctx.leave(torch.where(own[..., None], x, torch.zeros_like(x)), axes)


def sharded_cross_entropy(logits: Tensor, labels: Tensor, module: Module, ctx: Ctx, axes: Sequence[str]) -> Tensor:
    """Return the cross-entropy summed over the labels, from the logits of this rank's shard of the axes."""
    _check(labels, module, axes)
    top = ctx.max(logits.detach().amax(-1), axes)
    row, own = _own(labels, logits.shape[-1], module, ctx, axes)
    at_label = logits.gather(-1, row[:, None]).squeeze(-1)
    partial = torch.stack([(logits - top[:, None]).exp().sum(-1), torch.where(own, at_label, torch.zeros_like(at_label))])
    exponentials, target = ctx.leave(partial, axes)
    losses = exponentials.log() + top - target
    return torch.where(labels != IGNORED, losses, torch.zeros_like(losses)).sum()


def _own(ids: Tensor, rows: int, module: Module, ctx: Ctx, axes: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the row of each id in this rank's shard, 0 where another rank has it, and whether this rank has it."""
    row = ids - ctx.first(module, axes, rows)
    own = (row >= 0) & (row < rows)
    return torch.where(own, row, torch.zeros_like(row)), own


def _check(labels: Tensor, module: Module, axes: Sequence[str]) -> None:
    """Raise InputError for a label that no rank has. On CPU and outside compiled graphs alone, as for token ids."""
    if torch.compiler.is_compiling() or labels.device.type != "cpu" or not labels.numel():
        return
    size = module.scope.size(*axes)
    low, high = (int(bound) for bound in torch.aminmax(labels.masked_fill(labels == IGNORED, 0)))
    if low < 0 or high >= size:
        bad = low if low < 0 else high
        raise InputError(f"{module.path}: label {bad} is outside the {' × '.join(axes)} of {size}; labels are 0 to {size - 1}")
