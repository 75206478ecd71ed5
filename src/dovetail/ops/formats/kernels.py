"""Fast kernels of torch for x Wᵀ with W in fewer bits: bfloat16 on a CPU, for few rows, as in decoding.

    int8, a scale per channel     torch._weight_int8pack_mm                     codes (out, inp) as they are stored
    int8 with int8 activations    torch._int_mm                                 sums of integers, exact; any number of rows
    int4, in groups               torch.ops.aten._weight_int4pack_mm_for_cpu    codes repacked once per leaf

The int4 kernel computes s · (code − 8) + b, so a zero point z is b = s · (8 − z). It reads s and b in bfloat16, of which b is
rounded: at most |8 − z| · s / 512 per weight. Sizes that the kernels do not take are padded with zeros, W once and x per call.
Many rows are faster by decoding W and a dense product. In float32 the kernels are slower than the dense product.
|fast − exact| ≤ 4 · |reference in bfloat16 − exact| + 4 ulp of the largest output (law 26).

Shapes: x (rows, inp) -> (rows, out).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.ops.formats.format import CODES, SCALE, ZERO, Format
from dovetail.ops.formats.kinds import Int4, Int8
from dovetail.ops.implementation import reference

ROWS = 16  # at most
TILE = 32  # outputs and inputs are a multiple, as the kernels want
INT4_GROUPS = (32, 64, 128, 256)
CENTER = 8  # the int4 code that the kernel reads as 0

Operands = tuple[Tensor, Tensor]


def offers(format: Format, shape: tuple[int, ...], x: Tensor) -> bool:
    """Whether a kernel takes a leaf of this format and shape, and this x (…, inp) without a gradient."""
    if reference() or not takes(format, shape, x.dtype, x.device) or not x.numel():
        return False
    if torch.is_grad_enabled() and x.requires_grad:
        return False
    return _dynamic(format) or x.numel() <= ROWS * shape[-1]


def takes(format: Format, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a kernel for a leaf of this format and shape, whatever the number of rows."""
    if device.type != "cpu" or len(shape) != 2:
        return False
    if _dynamic(format):
        return dtype in (torch.bfloat16, torch.float32)
    known = format.group in INT4_GROUPS if isinstance(format, Int4) else isinstance(format, Int8) and format.group is None
    return known and dtype == torch.bfloat16


def _dynamic(format: Format) -> TypeGuard[Int8]:
    """Whether activations are rounded, too."""
    return isinstance(format, Int8) and format.dynamic


@torch.inference_mode(False)  # a leaf keeps them
@torch.no_grad()
def prepared(format: Format, tensors: Mapping[str, Tensor], inp: int) -> Operands:
    """The operands of the kernel, from the tensors of a leaf."""
    if isinstance(format, Int8):
        codes, scale = tensors[CODES], tensors[SCALE][:, 0].contiguous()
        if _dynamic(format):
            return codes, scale
        right, below = (-size % TILE for size in reversed(codes.shape))
        return _padded(codes, right, below), F.pad(scale, (0, below))
    codes = format.codes(tensors, inp).int()
    scale, more = tensors[SCALE].T.float(), -codes.shape[0] % TILE  # (groups, out)
    zero = tensors[ZERO].T.float() if ZERO in tensors else float(CENTER)
    pairs = torch.stack([scale, scale * (CENTER - zero)], -1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(_padded(codes, 0, more), 1)
    return packed, F.pad(pairs, (0, 0, 0, more)).bfloat16().contiguous()


def _padded(x: Tensor, right: int, below: int) -> Tensor:
    """x with columns and rows of zeros; itself if there are none."""
    return F.pad(x, (0, right, 0, below)) if right or below else x


def product(format: Format, operands: Operands, x: Tensor, out: int) -> Tensor:
    """x Wᵀ for x (…, inp)."""
    flat, (codes, scale) = x.flatten(0, -2), operands
    if _dynamic(format):
        rounded, step = format.input_codes(flat)
        y = (torch.ops.aten._int_mm(rounded.to(torch.int8), codes.T).float() * step * scale.float()).to(x.dtype)
    elif isinstance(format, Int4):
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat.contiguous(), codes, format.group, scale)[:, :out]
    else:
        wide = _padded(flat, codes.shape[1] - x.shape[-1], 0).contiguous()
        y = torch.ops.aten._weight_int8pack_mm(wide, codes, scale)[:, :out]
    return y.reshape(*x.shape[:-1], out)
