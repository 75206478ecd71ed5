"""Merge several adapters into one change of a weight.

    linear   Δ = Σ wᵢ Δᵢ
    ties     of each Δᵢ the largest `density` of all values are kept; the sign of Σ wᵢ Δᵢ is elected for each value; Δ is the
             mean of those wᵢ Δᵢ that have it
    dare     each value of Δᵢ is kept with probability `density` and divided by it; then linear

Δᵢ is the change that adapter i makes of the stored matrix (or bias), whatever its kind: adapters of different kinds and ranks
can be merged. peft merges the factors of LoRA instead, which gives other numbers.
Yadav et al. 2023 (TIES); Yu et al. 2023 (DARE).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from dovetail.core.errors import UsageError
from dovetail.core.random import draw, streams, words

Method = Literal["linear", "ties", "dare"]


def combine(
    changes: Sequence[Tensor],
    weights: Sequence[float],
    method: Method = "linear",
    density: float = 0.5,
    seed: int = 0,
    path: str = "",
) -> Tensor:
    """Return the change that several changes of one tensor make together."""
    if method not in get_args(Method):
        raise UsageError(f"--method: {method!r} is none of {', '.join(get_args(Method))}")
    if not 0 < density <= 1:
        raise UsageError(f"--density: {density} is not in (0, 1]")
    if method == "ties":
        return _ties(torch.stack([w * _largest(change, density) for w, change in zip(weights, changes, strict=True)]))
    if method == "dare":
        changes = [_dropped(change, density, seed, f"{path} of {i}") for i, change in enumerate(changes)]
    total = torch.zeros_like(changes[0])
    for weight, change in zip(weights, changes, strict=True):
        total += weight * change
    return total


def _largest(change: Tensor, density: float) -> Tensor:
    """The values of greatest magnitude; the others 0."""
    count = max(1, int(density * change.numel()))
    bound = change.abs().flatten().kthvalue(change.numel() - count + 1).values
    return torch.where(change.abs() >= bound, change, 0.0)


def _ties(changes: Tensor) -> Tensor:
    """(adapters, …) -> (…): the mean of the values that have the elected sign."""
    agrees = (changes.sign() == changes.sum(0).sign()) & (changes != 0)
    return (changes * agrees).sum(0) / agrees.sum(0).clamp_min(1)


def _dropped(change: Tensor, density: float, seed: int, path: str) -> Tensor:
    """Each value kept with probability `density`, a function of (seed, path, index)."""
    stream = streams(torch.tensor(seed), [f"dare {path}"])[0]
    kept = words(draw(stream, torch.arange(change.numel())))[0] < int(density * 2**32)
    return torch.where(kept.view(change.shape), change / density, 0.0)
