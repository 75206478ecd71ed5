"""Reversible conversions of tensors: how some of ours lie in some of theirs, bit for bit.

    KEEP        the same tensor
    TRANSPOSE   (…, out, inp) <-> (…, inp, out): GPT-2's Conv1D
    STACK       several (outᵢ, …) one under the other <-> one (Σ outᵢ, …): packed q, k, v
    SPREAD      one (experts, …) <-> a tensor for each expert
    Woven(6)    several (6·sizeᵢ, …) <-> one (6·Σ sizeᵢ, …), six times a piece of each: k and v head by head
    TURNS       several (experts, out, …) <-> one (experts, several·out, …), a row of each in turns
    CHANNELS    (channels, taps) <-> (channels, 1, taps): torch's depthwise convolution
    Patches(3)  (width, channels·patch·patch) <-> (width, channels, patch, patch): torch's convolution over patches
    STACK.then(TRANSPOSE)   on our way there first the one, then the other

`there` goes to theirs, `back` comes home; `back(there(x)) == x` always. Tensors that do not fit are given back as they are, or
in another number than asked for: the caller says whose shape is wrong.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from math import isqrt

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dc.dataclass(frozen=True)
class Convert:
    """One way of laying out tensors; this one leaves them as they are."""

    def there(self, ours: Sequence[Tensor]) -> list[Tensor]:
        """Theirs, from all of ours that lie in them."""
        return list(ours)

    def back(self, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Ours, of these shapes."""
        return list(theirs)

    def between(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The shapes of theirs, from those of ours."""
        return [tuple(t.shape) for t in self.there([torch.empty(shape, device="meta") for shape in shapes])]

    def then(self, after: Convert) -> Convert:
        """This one first, then `after`."""
        return Then(self, after)


@dc.dataclass(frozen=True)
class Then(Convert):
    """One conversion, then another."""

    first: Convert
    second: Convert

    def there(self, ours: Sequence[Tensor]) -> list[Tensor]:
        return self.second.there(self.first.there(ours))

    def back(self, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return self.first.back(self.second.back(theirs, self.first.between(shapes)), shapes)


@dc.dataclass(frozen=True)
class Transpose(Convert):
    """Matrices on their side; vectors as they are."""

    def there(self, ours: Sequence[Tensor]) -> list[Tensor]:
        return [one.transpose(-1, -2).contiguous() if one.dim() > 1 else one for one in ours]

    def back(self, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return self.there(theirs)


@dc.dataclass(frozen=True)
class Stack(Convert):
    """Several tensors as one, joined along a dimension."""

    dim: int = 0

    def there(self, ours: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(ours), self.dim)]

    def back(self, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        (whole,), sizes = theirs, [shape[self.dim] for shape in shapes]
        if whole.dim() <= self.dim or whole.shape[self.dim] != sum(sizes):
            return [whole]
        return [piece.contiguous() for piece in whole.split(sizes, self.dim)]


@dc.dataclass(frozen=True)
class Woven(Convert):
    """Several tensors in turns along a dimension: `count` times a piece of each; without a count as often as they are long."""

    count: int | None = None
    dim: int = 0

    def there(self, ours: Sequence[Tensor]) -> list[Tensor]:
        count = self.count or ours[0].shape[self.dim]
        pieces = [one.unflatten(self.dim, (count, -1)) for one in ours]
        return [torch.cat(pieces, self.dim + 1).flatten(self.dim, self.dim + 1)]

    def back(self, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        (whole,), sizes = theirs, [shape[self.dim] for shape in shapes]
        if whole.dim() <= self.dim or whole.shape[self.dim] != sum(sizes):
            return [whole]
        count = self.count or sizes[0]
        pieces = whole.unflatten(self.dim, (count, -1)).split([size // count for size in sizes], self.dim + 1)
        return [piece.flatten(self.dim, self.dim + 1) for piece in pieces]


@dc.dataclass(frozen=True)
class Spread(Convert):
    """One stack of matrices as one tensor for each."""

    def there(self, ours: Sequence[Tensor]) -> list[Tensor]:
        (stack,) = ours
        return [one.contiguous() for one in stack]

    def back(self, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        odd = [one for one in theirs if one.shape != theirs[0].shape]
        return odd or [torch.stack(list(theirs))]


@dc.dataclass(frozen=True)
class Unsqueezed(Convert):
    """A dimension of one at this place of theirs."""

    dim: int = 1

    def there(self, ours: Sequence[Tensor]) -> list[Tensor]:
        return [one.unsqueeze(self.dim) for one in ours]

    def back(self, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return [one.squeeze(self.dim) for one in theirs]


@dc.dataclass(frozen=True)
class Patches(Convert):
    """(width, channels·patch·patch) <-> (width, channels, patch, patch), for images of so many channels."""

    channels: int = 3

    def there(self, ours: Sequence[Tensor]) -> list[Tensor]:
        (one,) = ours
        side = isqrt(one.shape[1] // self.channels)
        return [one.reshape(one.shape[0], self.channels, side, side)]

    def back(self, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        (one,), (shape,) = theirs, shapes
        return [one.reshape(shape)] if one.numel() == _size(shape) else [one]


def _size(shape: Shape) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


KEEP, TRANSPOSE, STACK, SPREAD, TURNS, CHANNELS = Convert(), Transpose(), Stack(), Spread(), Woven(dim=1), Unsqueezed()
