"""Lookup and cross-entropy over a large vocabulary.

A vocabulary that is sharded across tensor-parallel ranks: rank r holds v/ranks rows of the embedding table and of the head.

    lookup         x = Σ_r [id is of rank r] · table_r[id − first_r]                        all terms but one are zero
    cross-entropy  m = max_r max_v l_v       s = Σ_r Σ_v e^(l_v − m)       t = Σ_r [label is of rank r] · l_label
                   loss = m + log s − t      gradient of a logit: e^(l_v − m) / s − [v is the label]

No rank holds the logits of all tokens and all of the vocabulary: ranks exchange three numbers per token.

Shapes: ids (…, n); table (v/ranks, embed); logits (tokens, v/ranks); labels (tokens,) with −100 where there is no label.
Shoeybi et al. 2019 (Megatron-LM).

Cross-entropy without all logits in memory:

    loss = sum over labels ≠ −100 of  log Σ_v e^(logit_v) − logit_label,  and the number of these labels
    ∂loss/∂logit_v = softmax(logits)_v − [v = label]

Tokens are processed in chunks; the logits of a chunk are freed after use and recomputed in backward. Eagerly the gradient is
written over the log-probs, which nobody else holds: torch's own backward allocates two more tensors of the size of the logits,
which takes longer than the arithmetic. Compiled, torch's own is one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dovetail.base.errors import InputError
from dovetail.nn.ctx import Ctx
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.nn.module import Module


def lookup(ids: Tensor, table: Tensor, module: Module, ctx: Ctx, axes: Sequence[str]) -> Tensor:
    """Return the rows of the table (…, n, embed); `axes` are those of its rows, and `module` has their sizes."""
    row, own = _own(ids, len(table), module, ctx, axes)
    x = F.embedding(row, table)
    return ctx.ranks.reduce_from_region(torch.where(own[..., None], x, torch.zeros_like(x)), axes)


def sharded_cross_entropy(logits: Tensor, labels: Tensor, module: Module, ctx: Ctx, axes: Sequence[str]) -> Tensor:
    """Return the cross-entropy summed over the labels, from the logits of this rank's shard of the axes."""
    _check(labels, module, axes)
    top = ctx.ranks.max(logits.detach().amax(-1), axes)
    row, own = _own(labels, logits.shape[-1], module, ctx, axes)
    at_label = logits.gather(-1, row[:, None]).squeeze(-1)
    partial = torch.stack([(logits - top[:, None]).exp().sum(-1), torch.where(own, at_label, torch.zeros_like(at_label))])
    exponentials, target = ctx.ranks.reduce_from_region(partial, axes)
    losses = exponentials.log() + top - target
    return torch.where(labels != IGNORED, losses, torch.zeros_like(losses)).sum()


def _own(ids: Tensor, rows: int, module: Module, ctx: Ctx, axes: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the row of each id in this rank's shard, 0 where another rank has it, and whether this rank has it."""
    row = ids - ctx.ranks.first(module, axes, rows)
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


CHUNK = 1024  # tokens whose logits are in memory at one time


Summed = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> the sum of the loss over labels that are not −100


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of logits (tokens, answers) summed over labels (tokens,) that are not −100."""
    eager = logits.requires_grad and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    if eager:
        loss = _CrossEntropySum.apply(logits, labels)
        assert isinstance(loss, Tensor)
        return loss
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


class _CrossEntropySum(torch.autograd.Function):
    """The same, whose first backward pass reuses the memory of the log-probs."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        ctx.save_for_backward(logits, labels, log_probs)
        ctx.overwritten = False
        return F.nll_loss(log_probs, labels, ignore_index=IGNORED, reduction="sum")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, labels, log_probs = ctx.saved_tensors
        wanted = labels != IGNORED
        picked, scale = labels.clamp_min(0)[:, None], (grads[0] * wanted)[:, None]
        if ctx.overwritten or torch.is_grad_enabled():  # once more (retain_graph), or to be differentiated (create_graph)
            return (logits.softmax(-1) - torch.zeros_like(logits).scatter(1, picked, 1.0)) * scale, None
        ctx.overwritten = True
        probs = log_probs.data.exp_()  # .data: else torch refuses to read the other saved tensors once more
        return probs.scatter_add_(1, picked, probs.new_full(picked.shape, -1.0)).mul_(scale), None


def label_log_probs(logits: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor) -> Tensor:
    """(tokens,) log softmax(logits(x))[label] of x (tokens, embed) and labels (tokens,), in at least float32."""

    def of_chunk(part: Tensor, wanted: Tensor) -> Tensor:
        scores = logits(part)
        scores = scores.float() if scores.dtype.itemsize < 4 else scores
        return -F.cross_entropy(scores, wanted, reduction="none")

    if x.shape[0] <= CHUNK:
        return of_chunk(x, labels)
    pairs = zip(x.split(CHUNK), labels.split(CHUNK), strict=True)
    return torch.cat([checkpoint(of_chunk, part, wanted, use_reentrant=False) for part, wanted in pairs])  # type: ignore[misc]


def chunked_cross_entropy(
    logits: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor,
    summed: Summed = cross_entropy_sum,
    chunk: int = CHUNK,
) -> LossSum:
    """The cross-entropy of logits(x) against labels; x (…, n, embed), labels (…, n) with −100 where there is no label."""
    x, labels = x.flatten(0, -2), labels.flatten()
    count = (labels != IGNORED).sum()

    def of_chunk(part: Tensor, wanted: Tensor) -> Tensor:
        return summed(logits(part).float() if part.dtype.itemsize < 4 else logits(part), wanted)

    if x.shape[0] <= chunk:
        return LossSum(of_chunk(x, labels), count)
    total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
    for part, wanted in zip(x.split(chunk), labels.split(chunk), strict=True):
        summed_chunk = checkpoint(of_chunk, part, wanted, use_reentrant=False)
        assert isinstance(summed_chunk, Tensor)
        total = total + summed_chunk
    return LossSum(total, count)
