"""Seeded bugs of quantization: codes, scales and zero points of the wrong place, and paths that forget them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dovetail.files.spec import from_yaml
from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import Linear, Rows
from dovetail.ops.formats import format as base, kernels, kinds
from dovetail.ops.formats.format import Format, Grid
from dovetail.ops.formats.kinds import FP8, NF4, Int4, Int8
from dovetail.proof.laws import quantized as law
from dovetail.proof.laws.mutant import BASE, Mutant, instead, spec
from dovetail.spec.part import Part
from dovetail.weights.quantization.leaf import Product, QuantizedStorage, store_quantized

_prepared, _product, _nf4_fit = kernels.prepared, kernels.product, NF4.fit
_unpack, _decode, _dense = kinds.unpack_nibbles, Format.decode, QuantizedStorage.dense


def nibbles_swapped(packed: Tensor, n: int) -> Tensor:
    """The high half of a byte first."""
    return torch.stack([packed >> 4, packed & 15], -1).flatten(-2)[..., :n]


def scale_of_the_next_group(grid: Grid) -> Grid:
    """Each group takes the scale of the one beside it."""
    return Grid(grid.scale.roll(1, -1)[..., None], None if grid.zero is None else grid.zero[..., None])


def zero_point_forgotten(self: Int4, codes: Tensor, grid: Grid) -> Tensor:
    """Codes are centered at 8 whatever the zero point."""
    return (codes.float() - 8.0) * grid.scale.float()


def groups_transposed(self: Format, w: Tensor) -> Tensor:
    """A group takes every k-th input, as in a layout on its side."""
    return w.unflatten(-1, (self.size(w.shape[-1]), -1)).transpose(-1, -2)


def sign_lost(self: Int8, codes: Tensor, grid: Grid) -> Tensor:
    """Codes are read as unsigned."""
    return codes.float().abs() * grid.scale.float()


def boundary_off_by_one(self: Format, tensors: dict[str, Tensor], inp: int) -> Tensor:
    """The first input of each group has the scale of the group before."""
    codes, grid = self.codes(tensors, inp), self.grid(tensors)
    wide = grid.scale.float().repeat_interleave(self.size(inp), -1).roll(1, -1)
    zero = None if grid.zero is None else grid.zero.repeat_interleave(self.size(inp), -1)
    return self.value(codes, Grid(wide, zero))


def one_scale_for_all_channels(self: QuantizedStorage, leaf: Linear) -> Tensor:
    """The absorbed path multiplies by codes and the mean scale."""
    grid = self.format.grid(self.stored(leaf))
    even = Grid(
        grid.scale.float().mean().expand(grid.scale.shape)[..., None], None if grid.zero is None else grid.zero[..., None]
    )
    codes = self.format.grouped(self.format.codes(self.stored(leaf), leaf.in_features))
    return self.format.value(codes, even).flatten(-2).to(self.dtype)


def first_expert_for_all(self: QuantizedStorage, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
    """Every expert multiplies by the matrix of expert 0."""
    dense = self.dense(leaf).to(x.dtype)
    return rows.multiply(x, dense[:1].expand_as(dense))


def one_scale_for_all_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations have one scale per call, so that a token depends on its neighbors."""
    scale = x.abs().amax() / 127
    return (x / scale).round().clamp(-127, 127), scale


def experts_read_exact_inputs(self: QuantizedStorage, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
    """Activations of experts are not rounded."""
    return rows.multiply(x, self.dense(leaf).to(x.dtype))


def bias_dropped(self: QuantizedStorage, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
    """The quantized leaf has no bias."""
    return self.product(leaf, x)


def gradient_of_half(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
    """The gradient is scaled once more."""
    return g @ ctx.storage.dense(ctx.leaf).to(g.dtype) * 0.5, None, None


def scale_rounded_down(scale: Tensor, up: bool = False) -> Tensor:
    """A scale of 3 bits of fraction, towards zero: the largest values of a group are cut off."""
    mantissa, exponent = torch.frexp(torch.where(scale > 0, scale, 1.0))
    return torch.ldexp((mantissa * 8).floor() / 8, exponent).to(torch.bfloat16)


def truncated(self: Int4, w: Tensor, grid: Grid) -> Tensor:
    """Codes are cut off instead of rounded."""
    zero = 8.0 if grid.zero is None else grid.zero.to(w.dtype)
    return ((w / grid.scale.to(w.dtype)).floor() + zero).clamp(0, 15).to(torch.uint8)


def uniform_levels(self: NF4, codes: Tensor, grid: Grid) -> Tensor:
    """Levels at equal distances, as of integers."""
    return (codes.float() / 7.5 - 1) * grid.scale.float()


def scales_not_decoded(self: NF4, tensors: dict[str, Tensor]) -> Grid:
    """The codes of double-quantized scales are taken for the scales."""
    return Grid(tensors[base.SCALE])


def zeros_among_scales(self: NF4, grouped: Tensor) -> dict[str, Tensor]:
    """The last block of scales is filled up with zeros, and its steps reach down to them."""
    if not self.double:
        return _nf4_fit(self, grouped)
    flat = grouped.flatten(0, -2)  # (scales, size)
    tensors = _nf4_fit(self, torch.cat([flat, torch.zeros_like(flat[:1]).expand(-len(flat) % self.TOGETHER, -1)]))
    return {**tensors, base.SCALE: tensors[base.SCALE][: len(flat)].view(grouped.shape[:-1])}


def no_minimum(self: NF4, tensors: dict[str, Tensor]) -> Grid:
    """The minimum of a block of scales is forgotten."""
    if not self.double:
        return Grid(tensors[base.SCALE])
    return Grid(tensors[base.SCALE].float() * tensors[self.STEP][0])


def exponent_off_by_one(self: FP8, codes: Tensor, grid: Grid) -> Tensor:
    """The exponents of e4m3 have the bias of e5m2's neighbor: every value is doubled."""
    return 2 * codes.float() * grid.scale.float()


def tied_leaves_left(model: nn.Module, spec: Part, path: str, format: Format, tensors: dict[str, Tensor] | None) -> None:
    """A layer that uses the weights of another keeps the dense ones."""
    leaf = model.get_submodule(path)
    assert isinstance(leaf, Linear)
    store_quantized(leaf, format, tensors)


def mixture() -> Model:
    """A mixture of experts."""
    return spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20})


def latent() -> Model:
    """MLA, which multiplies by the matrices of k_up and v_up in another order."""
    mla = {"kind": "mla", "heads": 6, "kv_rank": 10, "nope": 9, "rope": 12, "value": 7}
    return spec().set("layers.*.mixer", mla)


def with_biases() -> Model:
    """Linear leaves with biases."""
    return spec(bias=True)


def repeated() -> Model:
    """Two layers with one set of weights."""
    return from_yaml(BASE).set("layers.1.shares", 0)


def scales_of_the_next_group(kernel: kernels.Kernel, format: Format, tensors: dict[str, Tensor], inp: int) -> kernels.Operands:
    """A kernel reads each group's scales one group, or one output, late."""
    codes, scale, *zero = _prepared(kernel, format, tensors, inp)
    return codes, scale.roll(1, 0), *zero


def zero_point_off_by_one(kernel: kernels.Kernel, format: Format, tensors: dict[str, Tensor], inp: int) -> kernels.Operands:
    """A kernel centers the codes one lower."""
    codes, scale, *zero = _prepared(kernel, format, tensors, inp)
    if scale.dim() == 3:
        scale = torch.stack([scale[..., 0], scale[..., 1] + scale[..., 0]], -1)
    return codes, scale, *(z.clamp(min=1) - 1 for z in zero)


@contextmanager
def old_copy_stays() -> Iterator[None]:
    """Codes are loaded, and the packed copy of a processor without AMX is of those before."""
    without = tuple(kernel for kernel in kernels.KERNELS if not isinstance(kernel, kernels.FewRows))
    with patch.object(kernels, "KERNELS", without), patch.object(QuantizedStorage, "renew", lambda self, leaf: None):
        yield


def group_twice_as_long(kernel: kernels.Kernel, format: Format, operands: kernels.Operands, x: Tensor, out: int) -> Tensor:
    """The kernel gets another group than the codes have."""
    if isinstance(format, Int4) and isinstance(kernel, kernels.TorchPacked):
        return _product(kernel, Int4(group=2 * format.group), (operands[0], operands[1][::2].contiguous()), x, out)
    return _product(kernel, format, operands, x, out)


def neighbors_swapped(kernel: kernels.Kernel, format: Format, operands: kernels.Operands, x: Tensor, out: int) -> Tensor:
    """The kernel takes even inputs for odd ones."""
    if not isinstance(kernel, kernels.FewRows):
        return _product(kernel, format, operands, x, out)
    return _product(kernel, format, operands, x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), out)


def last_rows_of_the_first_tile(
    kernel: kernels.Kernel, format: Format, operands: kernels.Operands, x: Tensor, out: int
) -> Tensor:
    """Rows beyond the first tile of columns are those of the first."""
    y = _product(kernel, format, operands, x, out)
    return torch.cat([y[:8], y[: len(y) - 8]]) if isinstance(kernel, kernels.FewRows) else y


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    name = "quantized"
    return [
        Mutant("the two codes of a byte are swapped", name, instead(kinds, "unpack_nibbles", nibbles_swapped)),
        Mutant("a group has the scale of its neighbor", name, instead(base, "_column", scale_of_the_next_group)),
        Mutant("zero points are forgotten", name, instead(Int4, "value", zero_point_forgotten)),
        Mutant("groups are read on their side", name, instead(Format, "grouped", groups_transposed)),
        Mutant("the sign of a code is lost", name, instead(Int8, "value", sign_lost)),
        Mutant("groups begin one input late", name, instead(Format, "decode", boundary_off_by_one)),
        Mutant(
            "the absorbed path has one scale for all",
            name,
            instead(QuantizedStorage, "dense", one_scale_for_all_channels),
            latent(),
        ),
        Mutant(
            "all experts have the matrix of the first",
            name,
            instead(QuantizedStorage, "grouped", first_expert_for_all),
            mixture(),
        ),
        Mutant(
            "activations have one scale for all tokens",
            name,
            instead(Int8, "input_codes", staticmethod(one_scale_for_all_tokens)),
        ),
        Mutant(
            "activations of experts are not rounded",
            name,
            instead(QuantizedStorage, "grouped", experts_read_exact_inputs),
            mixture().set("layers.*.mixer.packed", True),  # so that a bank of experts has this format
        ),
        Mutant("a quantized leaf has no bias", name, instead(QuantizedStorage, "multiply", bias_dropped), with_biases()),
        Mutant("a quantized leaf halves gradients", name, instead(Product, "backward", staticmethod(gradient_of_half))),
        Mutant("scales are rounded down", name, instead(kinds, "stored_scale", scale_rounded_down)),
        Mutant("codes are cut off instead of rounded", name, instead(Int4, "nearest", truncated)),
        Mutant("NF4 has levels at equal distances", name, instead(NF4, "value", uniform_levels)),
        Mutant("double-quantized scales are not decoded", name, instead(NF4, "grid", scales_not_decoded)),
        Mutant("a block of scales is filled up with zeros", name, instead(NF4, "fit", zeros_among_scales)),
        Mutant("double-quantized scales have no minimum", name, instead(NF4, "grid", no_minimum)),
        Mutant("FP8 has an exponent off by one", name, instead(FP8, "value", exponent_off_by_one)),
        Mutant("a packed copy has scales of the next group", name, instead(kernels, "prepared", scales_of_the_next_group)),
        Mutant("a packed copy has a zero point off by one", name, instead(kernels, "prepared", zero_point_off_by_one)),
        Mutant("a packed copy survives other codes", name, old_copy_stays),
        Mutant("a kernel reads groups twice as long", name, instead(kernels, "product", group_twice_as_long)),
        Mutant("a kernel swaps the inputs of a byte", name, instead(kernels, "product", neighbors_swapped)),
        Mutant("a kernel repeats the rows of a tile", name, instead(kernels, "product", last_rows_of_the_first_tile)),
        Mutant("a layer tied to a quantized one stays dense", name, instead(law, "put_leaf", tied_leaves_left), repeated()),
    ]
