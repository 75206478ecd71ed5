"""LossSum: a loss as the sum over labels and the number of labels.

    mean = Σ_batches Σ_labels loss / Σ_batches labels

Means of batches, of ranks or of chunks of a sequence with different numbers of labels cannot be averaged; sums and counts can
be added.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

IGNORED = -100  # the label of a token that predicts nothing


class LossSum(NamedTuple):
    """A loss summed over labels (), with its gradient, and the number of labels (). A tuple, in which FSDP finds tensors."""

    sum: Tensor
    num_labels: Tensor

    def mean(self) -> Tensor:
        """The mean over the labels; 0 where there are none."""
        return self.sum / self.num_labels.clamp_min(1)

    def plus(self, other: LossSum) -> LossSum:
        """The loss over the labels of both."""
        return LossSum(self.sum + other.sum, self.num_labels + other.num_labels)
