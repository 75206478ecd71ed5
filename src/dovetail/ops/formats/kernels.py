"""Fast kernels of torch for x Wᵀ with W in fewer bits: bfloat16 on a CPU, for few rows, as in decoding.

    int8, a scale per channel     torch._weight_int8pack_mm                     codes (out, inp) as they are stored
    int8 with int8 activations    torch._int_mm                                 sums of integers, exact; any number of rows
    int4, symmetric, in groups    torch.ops.aten._weight_int4pack_mm_for_cpu    codes repacked once per leaf

Many rows are faster by decoding W and a dense product. |fast − exact| ≤ 4 · |reference in bfloat16 − exact| + 4 ulp of the
largest output (tests/weights/test_kernels.py).

Shapes: x (rows, inp) -> (rows, out).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import Tensor

from dovetail.ops.formats.format import CODES, SCALE, Format
from dovetail.ops.formats.kinds import Int4, Int8
from dovetail.ops.implementation import reference

ROWS = 16  # at most
TILE = 32  # outputs and inputs are a multiple, as the kernels want
INT4_GROUPS = (32, 64, 128, 256)


def offers(format: Format, shape: tuple[int, ...], x: Tensor) -> bool:
    """Whether a kernel takes a leaf of this format and shape, and this x (…, inp) without a gradient."""
    if reference() or x.device.type != "cpu" or len(shape) != 2 or torch.compiler.is_compiling() or not x.numel():
        return False
    if torch.is_grad_enabled() and x.requires_grad:
        return False
    if _dynamic(format):
        return x.dtype in (torch.bfloat16, torch.float32)
    if x.dtype != torch.bfloat16 or x.numel() > ROWS * shape[-1]:
        return False
    return not any(size % TILE for size in shape) and _known(format)


def _dynamic(format: Format) -> TypeGuard[Int8]:
    """Whether activations are rounded, too."""
    return isinstance(format, Int8) and format.dynamic


def _known(format: Format) -> bool:
    if isinstance(format, Int4):
        return not format.zero_point and format.group in INT4_GROUPS
    return isinstance(format, Int8) and format.group is None


@torch.inference_mode(False)  # a leaf keeps them
def prepared(format: Format, tensors: Mapping[str, Tensor], inp: int) -> tuple[Tensor, Tensor]:
    """The operands of the kernel, from the tensors of a leaf."""
    if isinstance(format, Int8):
        return tensors[CODES], tensors[SCALE][:, 0].contiguous()
    codes = format.codes(tensors, inp).int()
    scale = tensors[SCALE].T.contiguous()  # (groups, out)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), torch.stack([scale, torch.zeros_like(scale)], -1)


def product(format: Format, operands: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """x Wᵀ for x (…, inp)."""
    flat = x.flatten(0, -2)
    if _dynamic(format):
        codes, scale = format.input_codes(flat)
        y = torch.ops.aten._int_mm(codes.to(torch.int8), operands[0].T).float() * scale * operands[1].float()
        return y.to(x.dtype).view(*x.shape[:-1], -1)
    if isinstance(format, Int4):
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, operands[0], format.group, operands[1])
    else:
        y = torch.ops.aten._weight_int8pack_mm(flat, *operands)
    return y.view(*x.shape[:-1], -1)
