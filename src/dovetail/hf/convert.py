"""Reversible conversions between our tensors and the tensors of a checkpoint, bit for bit.

    IDENTITY         the same tensor
    TRANSPOSE        (…, out, inp) <-> (…, inp, out): GPT-2's Conv1D
    CONCAT           several (outᵢ, …) <-> one (Σ outᵢ, …): packed q, k, v
    UNSTACK          one (experts, …) <-> one tensor per expert
    Interleave(6)    several (6·sizeᵢ, …) <-> one (6·Σ sizeᵢ, …) of six blocks, each with a piece of every tensor: k, v per head
    INTERLEAVE_ROWS  several (experts, out, …) <-> one (experts, several·out, …), row by row
    DEPTHWISE        (channels, taps) <-> (channels, 1, taps): torch's depthwise convolution
    PatchKernel(3)   (width, channels·patch·patch) <-> (width, channels, patch, patch): torch's convolution over patches
    CONCAT.then(TRANSPOSE)   to_hf applies CONCAT first, then TRANSPOSE

`from_hf(to_hf(x), shapes) == x` always. Tensors that do not fit are returned unchanged, or in another number than asked
for: the caller reports the wrong shape.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from math import isqrt, prod

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dc.dataclass(frozen=True)
class Conversion:
    """One conversion; this one is the identity."""

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Their tensors, from all of ours that they hold."""
        return list(tensors)

    def from_hf(self, hf_tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Our tensors, of these shapes."""
        return list(hf_tensors)

    def hf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The shapes of their tensors, from those of ours."""
        return [tuple(t.shape) for t in self.to_hf([torch.empty(shape, device="meta") for shape in shapes])]

    def then(self, after: Conversion) -> Conversion:
        """This conversion first, then `after`."""
        return Compose(self, after)


@dc.dataclass(frozen=True)
class Compose(Conversion):
    """One conversion, then another."""

    first: Conversion
    second: Conversion

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.second.to_hf(self.first.to_hf(tensors))

    def from_hf(self, hf_tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return self.first.from_hf(self.second.from_hf(hf_tensors, self.first.hf_shapes(shapes)), shapes)


@dc.dataclass(frozen=True)
class Transpose(Conversion):
    """Transposed matrices; vectors are unchanged."""

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.transpose(-1, -2).contiguous() if tensor.dim() > 1 else tensor for tensor in tensors]

    def from_hf(self, hf_tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return self.to_hf(hf_tensors)


@dc.dataclass(frozen=True)
class Concat(Conversion):
    """Several tensors concatenated along a dimension."""

    dim: int = 0

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(tensors), self.dim)]

    def from_hf(self, hf_tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        (packed,), sizes = hf_tensors, [shape[self.dim] for shape in shapes]
        if packed.dim() <= self.dim or packed.shape[self.dim] != sum(sizes):
            return [packed]
        return [piece.contiguous() for piece in packed.split(sizes, self.dim)]


@dc.dataclass(frozen=True)
class Interleave(Conversion):
    """Several tensors in `count` blocks along a dimension, each block with a piece of every tensor. Without a count the pieces
    have one row."""

    count: int | None = None
    dim: int = 0

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        count = self.count or tensors[0].shape[self.dim]
        pieces = [tensor.unflatten(self.dim, (count, -1)) for tensor in tensors]
        return [torch.cat(pieces, self.dim + 1).flatten(self.dim, self.dim + 1)]

    def from_hf(self, hf_tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        (packed,), sizes = hf_tensors, [shape[self.dim] for shape in shapes]
        if packed.dim() <= self.dim or packed.shape[self.dim] != sum(sizes):
            return [packed]
        count = self.count or sizes[0]
        pieces = packed.unflatten(self.dim, (count, -1)).split([size // count for size in sizes], self.dim + 1)
        return [piece.flatten(self.dim, self.dim + 1) for piece in pieces]


@dc.dataclass(frozen=True)
class Unstack(Conversion):
    """One stack of matrices as one tensor per matrix."""

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (stack,) = tensors
        return [one.contiguous() for one in stack]

    def from_hf(self, hf_tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        odd = [hf_tensor for hf_tensor in hf_tensors if hf_tensor.shape != hf_tensors[0].shape]
        return odd or [torch.stack(list(hf_tensors))]


@dc.dataclass(frozen=True)
class Unsqueeze(Conversion):
    """A dimension of size one in their tensor."""

    dim: int = 1

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.unsqueeze(self.dim) for tensor in tensors]

    def from_hf(self, hf_tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return [hf_tensor.squeeze(self.dim) for hf_tensor in hf_tensors]


@dc.dataclass(frozen=True)
class PatchKernel(Conversion):
    """(width, channels·patch·patch) <-> (width, channels, patch, patch), for images of this many channels."""

    channels: int = 3

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (one,) = tensors
        side = isqrt(one.shape[1] // self.channels)
        return [one.reshape(one.shape[0], self.channels, side, side)]

    def from_hf(self, hf_tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        (one,), (shape,) = hf_tensors, shapes
        return [one.reshape(shape)] if one.numel() == prod(shape) else [one]


IDENTITY, TRANSPOSE, CONCAT, UNSTACK = Conversion(), Transpose(), Concat(), Unstack()
INTERLEAVE_ROWS, DEPTHWISE = Interleave(dim=1), Unsqueeze()
