"""Cross-entropy over a large vocabulary without all logits in memory.

    loss = sum over labels ≠ −100 of  log Σ_v e^(logit_v) − logit_label,  and the number of these labels
    ∂loss/∂logit_v = softmax(logits)_v − [v = label]

Tokens are processed in chunks; the logits of a chunk are freed after use and recomputed in backward. Eagerly the gradient is
written over the log-probs, which nobody else holds: torch's own backward allocates two more tensors of the size of the logits,
which takes longer than the arithmetic. Compiled, torch's own is one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dovetail.core.loss import IGNORED, LossSum

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


def label_log_probs(logits: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor, chunk: int = CHUNK) -> Tensor:
    """(tokens,) log softmax(logits(x))[label] of x (tokens, embed) and labels (tokens,), in at least float32."""

    def of_chunk(part: Tensor, wanted: Tensor) -> Tensor:
        scores = logits(part)
        scores = scores.float() if scores.dtype.itemsize < 4 else scores
        return -F.cross_entropy(scores, wanted, reduction="none")

    if x.shape[0] <= chunk:
        return of_chunk(x, labels)
    pairs = zip(x.split(chunk), labels.split(chunk), strict=True)
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
