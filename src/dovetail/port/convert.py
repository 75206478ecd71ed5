"""Reversible conversions of tensors: how one or several of ours lie in one of theirs, bit for bit.

    KEEP       the same tensor
    TRANSPOSE  (out, inp) <-> (inp, out): GPT-2's Conv1D
    STACK      several (outᵢ, …) one under the other <-> one (Σ outᵢ, …): packed q, k, v
    STACK.then(TRANSPOSE)   first one, then the other

`there` goes to theirs, `back` comes home; `back(there(x)) == x` always.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Convert(Protocol):
    """One way of laying out tensors."""

    def there(self, ours: Sequence[Tensor]) -> Tensor:
        """Theirs, from all of ours that lie in it."""
        ...

    def back(self, theirs: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Ours, of these shapes."""
        ...


@dc.dataclass(frozen=True)
class Keep:
    """One tensor, as it is."""

    def there(self, ours: Sequence[Tensor]) -> Tensor:
        (one,) = ours
        return one

    def back(self, theirs: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return [theirs]


@dc.dataclass(frozen=True)
class Transpose:
    """One matrix on its side."""

    def there(self, ours: Sequence[Tensor]) -> Tensor:
        (one,) = ours
        return one.transpose(-1, -2).contiguous() if one.dim() > 1 else one

    def back(self, theirs: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return [theirs.transpose(-1, -2).contiguous() if theirs.dim() > 1 else theirs]


@dc.dataclass(frozen=True)
class Stack:
    """Several tensors one under the other; perhaps laid out in yet another way then."""

    after: Convert = dc.field(default_factory=Keep)

    def then(self, after: Convert) -> Stack:
        """The same, and then `after`."""
        return Stack(after)

    def there(self, ours: Sequence[Tensor]) -> Tensor:
        return self.after.there([torch.cat(list(ours))])

    def back(self, theirs: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        (stacked,) = self.after.back(theirs, [whole])
        if stacked.shape != whole:
            return [stacked]  # the caller says whose shape is wrong
        return [piece.contiguous() for piece in stacked.split([shape[0] for shape in shapes])]


KEEP, TRANSPOSE, STACK = Keep(), Transpose(), Stack()
