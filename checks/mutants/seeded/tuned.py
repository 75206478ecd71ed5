"""Seeded bugs of tuning: the wrong tokens are learned, pairs are exchanged, or rows are weighed wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.model.model import ModelModule
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.proof.laws.mutant import Mutant, instead
from dovetail.text.conversation import Encoded
from dovetail.training import preference, tuning
from dovetail.training.preference import PairLosses

_labels, _sides, _packed, _log_probs = tuning.labels_of, preference.sides, tuning.packed_batch, ModelModule.log_probs


def mask_shifted(one: Encoded) -> Tensor:
    return _labels(Encoded(one.ids, np.roll(one.answer, 1)))


def end_of_turn_masked(one: Encoded) -> Tensor:
    labels = _labels(one)
    labels[-2] = IGNORED
    return labels


def prompt_learned(one: Encoded) -> Tensor:
    return _labels(Encoded(one.ids, np.ones_like(one.answer)))


def exchanged(batch: Any) -> Any:
    first, second = _sides(batch)
    return second, first


def padding_counted(rows: Any, length: int) -> Any:
    tokens, labels, layout = _packed(rows, length)
    return tokens, torch.where(layout.real, labels, 0), layout


def mean_over_pairs(self: PairLosses) -> LossSum:
    return LossSum(self.losses.mean(), torch.tensor(1))


def temperature_squared(self: Any, inputs: Tensor, labels: Tensor, ctx: Any, temperature: float = 1.0) -> Tensor:
    return _log_probs(self, inputs, labels, ctx, 2 * temperature)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    return [
        Mutant("the mask of answers is shifted by one", "tuned", instead(tuning, "labels_of", mask_shifted)),
        Mutant("the end-of-turn token is masked", "tuned", instead(tuning, "labels_of", end_of_turn_masked)),
        Mutant("the prompt is learned, too", "tuned", instead(tuning, "labels_of", prompt_learned)),
        Mutant("chosen and rejected answers are exchanged", "tuned", instead(preference, "sides", exchanged)),
        Mutant("padding counts as labels", "tuned", instead(preference, "packed_batch", padding_counted)),
        Mutant("pairs are averaged, not added", "tuned", instead(PairLosses, "summed", mean_over_pairs)),
        Mutant("log-probs are of other logits", "tuned", instead(ModelModule, "log_probs", temperature_squared)),
    ]
