"""What a run of law 8 gives, and how far two runs are apart."""

from __future__ import annotations

import dataclasses as dc

from torch import Tensor

# of the largest gradient: one that is smaller is compared at this scale, since it is zero but for rounding, or comes from
# probabilities so near 0 and 1 that their differences cancel (changing the weights by 1e-16 moves it by 1e-9 of itself)
SMALL = 1e-3


@dc.dataclass(frozen=True)
class Result:
    """What a run gives, of the whole batch and the whole model."""

    output: Tensor  # zero at padding
    losses: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of every parameter, zero where none came
    added: dict[str, Tensor]  # to each buffer that the run changed


def gaps_of(got: Result, want: Result) -> dict[str, float]:
    """How far the outputs, losses, gradients and buffers are apart, relative to scale."""
    gaps = {"output": _gap(got.output, want.output)}
    least = SMALL * max(g.abs().max().item() for g in want.gradients.values())
    for kind, of_got, of_want, scale in (
        ("loss", got.losses, want.losses, 0.0),
        ("gradient of", got.gradients, want.gradients, least),
        ("change of", got.added, want.added, 0.0),
    ):
        for name in of_got.keys() | of_want.keys():
            both = name in of_got and name in of_want
            gaps[f"{kind} {name}"] = _gap(of_got[name], of_want[name], scale) if both else float("inf")
    return gaps


def _gap(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """The largest difference relative to scale; infinite where anything is not a number."""
    if got.shape != want.shape:
        return float("inf")
    gap = (got - want).abs().max().item() / max(want.abs().max().item(), least, 1e-30)
    return gap if gap == gap else float("inf")
