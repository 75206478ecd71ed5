"""The formats: integers of 8 and 4 bits, NormalFloat of 4 bits, and floats of 8 bits.

    int8   code −127 … 127        w = s · code              a scale per output channel
           with `dynamic`, activations too: x ≈ a · code, a = max |x| / 127 of each token when it is read (W8A8)
    int4   code 0 … 15            w = s · (code − 8), or with zero points s · (code − z)            a scale per group
    nf4    code 0 … 15            w = s · quantile[code]    of a normal distribution, in [−1, 1]; a scale per group of 64
    fp8    a float e4m3 itself    w = s · code              a scale per output channel, or one per matrix

With `double` the scales of nf4 are stored in 8 bits, 256 of them with one float32 minimum and step. Scales are bfloat16
elsewhere. Dettmers et al. 2023 (NF4, double quantization); Micikevicius et al. 2022 (e4m3).
"""

from __future__ import annotations

import dataclasses as dc
import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.ops.formats.format import (
    CODES,
    SCALE,
    ZERO,
    Format,
    Grid,
    checked,
    pack_nibbles,
    register_format,
    stored_scale,
    unpack_nibbles,
)

SCALE_BITS, ZERO_BITS = 16, 8
FP8_MAX = 448.0  # the largest e4m3

NF4_LEVELS = (  # Dettmers et al. 2023, appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def _empty(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@register_format("int8")
class Int8(Format):
    """Integers of 8 bits, symmetric, with a scale per output channel, or per group of inputs."""

    group: int | None = None  # inputs that share a scale; None: all of an output channel
    dynamic: bool = False  # activations in 8 bits, too, with a scale per token

    def __post_init__(self) -> None:
        checked("group", self.group, self.group is None or (type(self.group) is int and self.group > 0), "a number above 0")
        checked("dynamic", self.dynamic, type(self.dynamic) is bool, "true or false")
        if self.dynamic and self.group is not None:
            raise SpecError("dynamic", "a product of integers has one scale per output channel", "leave `group` out")

    @property
    def rounds_inputs(self) -> bool:
        return self.dynamic

    def inputs(self, x: Tensor) -> Tensor:
        if not self.dynamic:
            return x
        codes, scale = self.input_codes(x)
        return (codes * scale).to(x.dtype)

    @staticmethod
    def input_codes(x: Tensor) -> tuple[Tensor, Tensor]:
        """x (…, inp) -> codes −127 … 127, and the scale of each token (…, 1), both in float32 or wider."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        largest = wide.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, largest, 1.0) / 127
        return (wide / scale).round().clamp(-127, 127), scale

    def size(self, inp: int) -> int:
        return self.group or inp

    def check(self, shape: Sequence[int]) -> str:
        return _divides(self.size(shape[-1]), shape[-1])

    def tensors(self, shape: Sequence[int]) -> dict[str, Tensor]:
        groups = shape[-1] // self.size(shape[-1])
        return {CODES: _empty(torch.int8, *shape), SCALE: _empty(torch.bfloat16, *shape[:-1], groups)}

    def bits_per_weight(self, inp: int) -> Fraction:
        return 8 + Fraction(SCALE_BITS, self.size(inp))

    def levels(self, zero: Tensor | None) -> Tensor:
        return torch.arange(-127, 128).double()

    def fit(self, grouped: Tensor) -> dict[str, Tensor]:
        return {SCALE: stored_scale(grouped.abs().amax(-1) / 127)}

    def nearest(self, w: Tensor, grid: Grid) -> Tensor:
        return (w / grid.scale.to(w.dtype)).round().clamp(-127, 127).to(torch.int8)

    def value(self, codes: Tensor, grid: Grid) -> Tensor:
        return codes.float() * grid.scale.float()


@dc.dataclass(frozen=True, kw_only=True)
class FourBits(Format):
    """Codes of 4 bits, two per byte, with a scale per group of inputs."""

    bits: ClassVar[int] = 4

    group: int = 64

    def __post_init__(self) -> None:
        checked("group", self.group, type(self.group) is int and self.group > 0, "a number above 0")

    def size(self, inp: int) -> int:
        return self.group

    def check(self, shape: Sequence[int]) -> str:
        return _divides(self.group, shape[-1])

    def pack(self, codes: Tensor) -> Tensor:
        return pack_nibbles(codes)

    def unpack(self, packed: Tensor, inp: int) -> Tensor:
        return unpack_nibbles(packed, inp)


@register_format("int4")
class Int4(FourBits):
    """Integers of 4 bits in groups of inputs, symmetric or with a zero point per group."""

    zero_point: bool = False

    def tensors(self, shape: Sequence[int]) -> dict[str, Tensor]:
        *rows, inp = shape
        groups = inp // self.group
        made = {CODES: _empty(torch.uint8, *rows, -(-inp // 2)), SCALE: _empty(torch.bfloat16, *rows, groups)}
        return {**made, ZERO: _empty(torch.uint8, *rows, groups)} if self.zero_point else made

    def bits_per_weight(self, inp: int) -> Fraction:
        return 4 + Fraction(SCALE_BITS + ZERO_BITS * self.zero_point, self.group)

    def levels(self, zero: Tensor | None) -> Tensor:
        return torch.arange(16).double() - (8.0 if zero is None else zero[..., None].double())

    def fit(self, grouped: Tensor) -> dict[str, Tensor]:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        if not self.zero_point:
            return {SCALE: stored_scale(torch.maximum(high / 7, -low / 8))}
        scale = stored_scale((high - low) / 15, up=True)
        zero = (-low / scale.to(low.dtype)).round().clamp(0, 15)
        return {SCALE: scale, ZERO: zero.to(torch.uint8)}

    def grid(self, tensors: Mapping[str, Tensor]) -> Grid:
        return Grid(tensors[SCALE], tensors[ZERO] if self.zero_point else None)

    def nearest(self, w: Tensor, grid: Grid) -> Tensor:
        return ((w / grid.scale.to(w.dtype)).round() + _zero(grid, w.dtype)).clamp(0, 15).to(torch.uint8)

    def value(self, codes: Tensor, grid: Grid) -> Tensor:
        return (codes.float() - _zero(grid, torch.float32)) * grid.scale.float()


def _zero(grid: Grid, dtype: torch.dtype) -> Tensor | float:
    return 8.0 if grid.zero is None else grid.zero.to(dtype)


@register_format("nf4")
class NF4(FourBits):
    """NormalFloat of 4 bits: levels at the quantiles of a normal distribution, with a scale per group of inputs."""

    MINIMUM: ClassVar[str] = "weight_scale_min"
    STEP: ClassVar[str] = "weight_scale_step"
    TOGETHER: ClassVar[int] = 256  # scales that share a minimum and a step

    double: bool = False  # the scales in 8 bits

    def tensors(self, shape: Sequence[int]) -> dict[str, Tensor]:
        *rows, inp = shape
        codes, scales = _empty(torch.uint8, *rows, -(-inp // 2)), (*rows, inp // self.group)
        if not self.double:
            return {CODES: codes, SCALE: _empty(torch.bfloat16, *scales)}
        blocks = -(-prod(scales) // self.TOGETHER)
        second = {name: _empty(torch.float32, blocks) for name in (self.MINIMUM, self.STEP)}
        return {CODES: codes, SCALE: _empty(torch.uint8, *scales), **second}

    def bits_per_weight(self, inp: int) -> Fraction:
        return 4 + Fraction(8 + Fraction(64, self.TOGETHER) if self.double else SCALE_BITS, self.group)

    def levels(self, zero: Tensor | None) -> Tensor:
        return torch.tensor(NF4_LEVELS, dtype=torch.float64)

    def fit(self, grouped: Tensor) -> dict[str, Tensor]:
        largest = grouped.abs().amax(-1)
        if not self.double:
            return {SCALE: stored_scale(largest)}
        flat = largest.float().flatten()
        blocks = F.pad(flat, (0, -len(flat) % self.TOGETHER), value=float(flat[-1:].sum())).view(-1, self.TOGETHER)
        low = blocks.amin(-1)
        step = ((blocks.amax(-1) - low) / 255 * (1 + 1e-6)).clamp(min=torch.finfo(torch.float32).tiny)
        codes = ((blocks - low[:, None]) / step[:, None]).ceil().clamp(0, 255)  # up: no value lies outside of the levels
        codes = codes.to(torch.uint8).flatten()[: len(flat)].view(largest.shape)
        return {SCALE: codes, self.MINIMUM: low, self.STEP: step}

    def grid(self, tensors: Mapping[str, Tensor]) -> Grid:
        scale = tensors[SCALE]
        if not self.double:
            return Grid(scale)
        flat = F.pad(scale.flatten().float(), (0, -scale.numel() % self.TOGETHER)).view(-1, self.TOGETHER)
        flat = tensors[self.MINIMUM][:, None] + flat * tensors[self.STEP][:, None]
        return Grid(flat.flatten()[: scale.numel()].view(scale.shape))

    def nearest(self, w: Tensor, grid: Grid) -> Tensor:
        scale = torch.where(grid.scale > 0, grid.scale, 1.0).to(w.dtype)
        return torch.bucketize((w / scale).contiguous(), _middles(w.dtype, w.device)).to(torch.uint8)

    def value(self, codes: Tensor, grid: Grid) -> Tensor:
        return _quantiles(grid.scale.device)[codes.int()] * grid.scale.float()


@functools.cache
def _quantiles(device: torch.device) -> Tensor:
    return torch.tensor(NF4_LEVELS, device=device)


@functools.cache
def _middles(dtype: torch.dtype, device: torch.device) -> Tensor:
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float64, device=device)
    return ((levels[1:] + levels[:-1]) / 2).to(dtype)


@register_format("fp8")
class FP8(Format):
    """Floats of 8 bits: 4 of exponent, 3 of fraction."""

    per: Literal["channel", "tensor"] = "channel"  # what has a scale

    def __post_init__(self) -> None:
        checked("per", self.per, self.per in ("channel", "tensor"), "channel or tensor")

    def tensors(self, shape: Sequence[int]) -> dict[str, Tensor]:
        *batch, out, _ = shape
        scale = (*batch, out if self.per == "channel" else 1, 1)
        return {CODES: _empty(torch.float8_e4m3fn, *shape), SCALE: _empty(torch.bfloat16, *scale)}

    def bits_per_weight(self, inp: int) -> Fraction:
        return Fraction(8) + (Fraction(SCALE_BITS, inp) if self.per == "channel" else 0)

    def levels(self, zero: Tensor | None) -> Tensor:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        return every[every.isfinite()].unique()

    def fit(self, grouped: Tensor) -> dict[str, Tensor]:
        largest = grouped.abs().amax(-1)
        largest = largest if self.per == "channel" else largest.amax(-2, keepdim=True)
        return {SCALE: stored_scale(largest / FP8_MAX)}

    def nearest(self, w: Tensor, grid: Grid) -> Tensor:
        return (w / grid.scale.to(w.dtype)).clamp(-FP8_MAX, FP8_MAX).float().to(torch.float8_e4m3fn)

    def value(self, codes: Tensor, grid: Grid) -> Tensor:
        return codes.float() * grid.scale.float()


def _divides(group: int, inp: int) -> str:
    return f"{inp} inputs are not a multiple of the group of {group}" if inp % group else ""
