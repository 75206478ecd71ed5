"""Cross-entropy over a large vocabulary without all logits in memory.

    loss = mean over labels ≠ −100 of  log Σ_v e^(logit_v) − logit_label

Tokens are processed in chunks; the logits of a chunk are freed after use and recomputed in backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100
CHUNK = 1024  # tokens whose logits are in memory at one time


def _summed(logits: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits(x).float() if x.dtype.itemsize < 4 else logits(x), labels, ignore_index=IGNORED, reduction="sum"
    )


def chunked_cross_entropy(logits: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor, chunk: int = CHUNK) -> Tensor:
    """The mean cross-entropy of logits(x) against labels; x (…, n, embed), labels (…, n) with −100 where there is no label."""
    x, labels = x.flatten(0, -2), labels.flatten()
    count = (labels != IGNORED).sum().clamp_min(1)
    if x.shape[0] <= chunk:
        return _summed(logits, x, labels) / count
    total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
    for part, wanted in zip(x.split(chunk), labels.split(chunk), strict=True):
        summed = checkpoint(_summed, logits, part, wanted, use_reentrant=False)
        assert isinstance(summed, Tensor)
        total = total + summed
    return total / count
