"""Fast kernels for x Wᵀ with W in fewer bits, on a CPU; the first that takes a leaf is used.

    Integers     int8 with int8 activations: sums of integers by torch._int_mm, exact; float32 and bfloat16, any number of rows
    FewRows      int8 and int4 as they are stored, float32 and bfloat16, any number of rows (ops/few_rows.py): needs AMX
    TorchPacked  bfloat16, up to 16 rows: torch._weight_int8pack_mm reads the codes of int8 with a scale per channel as they are
                 stored, torch.ops.aten._weight_int4pack_mm_for_cpu those of int4, repacked once per leaf

torch's int4 kernel computes s · (code − 8) + b, so a zero point z is b = s · (8 − z). It reads s and b in bfloat16, of which b
is rounded: at most |8 − z| · s / 512 per weight. Sizes that torch's kernels do not take are padded with zeros, W once and x in
each call.
|fast − exact| ≤ 4 · |reference in the dtype of x − exact| + 4 ulp of the largest output + `rounding` · max |x| · Σ |w|: law 26.

Shapes: x (rows, inp) -> (rows, out).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.ops import few_rows
from dovetail.ops.formats.format import CODES, SCALE, ZERO, Format
from dovetail.ops.formats.kinds import Int4, Int8
from dovetail.ops.implementation import reference

TILE = 32  # outputs and inputs are a multiple, as torch's kernels want
CENTER = 8  # the int4 code that the kernel reads as 0

Operands = tuple[Tensor, ...]


class Kernel(ABC):
    """One way to multiply by codes."""

    rows: int | None = None  # at most

    def rounding(self, dtype: torch.dtype) -> float:
        """The largest error of an input, relative to the largest of its row."""
        return 0.0

    @abstractmethod
    def takes(self, format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether it multiplies x of this dtype by a matrix of this format and shape."""

    @abstractmethod
    def prepared(self, format: Format, tensors: Mapping[str, Tensor], inp: int) -> Operands:
        """What it reads, from the tensors of a leaf."""

    @abstractmethod
    def product(self, format: Format, operands: Operands, x: Tensor, out: int) -> Tensor:
        """x (rows, inp) -> (rows, out)."""


class Integers(Kernel):
    """Both activations and W are integers."""

    def takes(self, format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return isinstance(format, Int8) and format.dynamic and dtype in (torch.bfloat16, torch.float32)

    def prepared(self, format: Format, tensors: Mapping[str, Tensor], inp: int) -> Operands:
        return tensors[CODES], tensors[SCALE][:, 0].contiguous()

    def product(self, format: Format, operands: Operands, x: Tensor, out: int) -> Tensor:
        rounded, step = Int8.input_codes(x)
        codes, scale = operands
        return (torch.ops.aten._int_mm(rounded.to(torch.int8), codes.T).float() * step * scale.float()).to(x.dtype)


class FewRows(Kernel):
    """Codes as they are stored."""

    def rounding(self, dtype: torch.dtype) -> float:
        return 2.0**-15 if dtype == torch.bfloat16 else 2.0**-23

    def takes(self, format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        if not isinstance(format, Int8 | Int4) or format.rounds_inputs or dtype not in (torch.bfloat16, torch.float32):
            return False
        group, step = format.size(shape[-1]), 64 if isinstance(format, Int8) else 128
        known = format.group is None if isinstance(format, Int8) else group >= 8 and step % group == 0
        return (known or group % step == 0) and few_rows.ready()

    def prepared(self, format: Format, tensors: Mapping[str, Tensor], inp: int) -> Operands:
        return tuple(tensors[name].contiguous() for name in (CODES, SCALE, ZERO) if name in tensors)

    def product(self, format: Format, operands: Operands, x: Tensor, out: int) -> Tensor:
        codes, scale, *zero = operands
        return torch.ops.dovetail.few_rows_linear(x.contiguous(), codes, scale, zero[0] if zero else None, format.bits)


class TorchPacked(Kernel):
    """torch's kernels for few rows."""

    rows = 16

    def takes(self, format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        if dtype != torch.bfloat16 or format.rounds_inputs:
            return False
        return format.group in (32, 64, 128, 256) if isinstance(format, Int4) else isinstance(format, Int8) and not format.group

    def prepared(self, format: Format, tensors: Mapping[str, Tensor], inp: int) -> Operands:
        if isinstance(format, Int8):
            codes = tensors[CODES]
            right, below = (-size % TILE for size in reversed(codes.shape))
            return _padded(codes, right, below), F.pad(tensors[SCALE][:, 0], (0, below))
        codes = format.codes(tensors, inp).int()
        scale, more = tensors[SCALE].T.float(), -codes.shape[0] % TILE  # (groups, out)
        zero = tensors[ZERO].T.float() if ZERO in tensors else float(CENTER)
        pairs = torch.stack([scale, scale * (CENTER - zero)], -1)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(_padded(codes, 0, more), 1)
        return packed, F.pad(pairs, (0, 0, 0, more)).bfloat16().contiguous()

    def product(self, format: Format, operands: Operands, x: Tensor, out: int) -> Tensor:
        codes, scale = operands
        if isinstance(format, Int4):
            return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), codes, format.group, scale)[:, :out]
        padded = _padded(x, codes.shape[1] - x.shape[-1], 0).contiguous()
        return torch.ops.aten._weight_int8pack_mm(padded, codes, scale)[:, :out]


KERNELS: tuple[Kernel, ...] = (Integers(), FewRows(), TorchPacked())


def _padded(x: Tensor, right: int, below: int) -> Tensor:
    """x with columns and rows of zeros; itself if there are none."""
    return F.pad(x, (0, right, 0, below)) if right or below else x


def chosen(format: Format, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """The kernel of a leaf of this format and shape, for x of this dtype."""
    if device.type != "cpu" or len(shape) != 2:
        return None
    return next((kernel for kernel in KERNELS if kernel.takes(format, shape, dtype)), None)


def offered(format: Format, shape: tuple[int, ...], x: Tensor) -> Kernel | None:
    """The kernel that takes this x (…, inp) without a gradient."""
    if reference() or not x.numel() or (torch.is_grad_enabled() and x.requires_grad):
        return None
    kernel = chosen(format, shape, x.dtype, x.device)
    return None if kernel is None or (kernel.rows is not None and x.numel() > kernel.rows * shape[-1]) else kernel


@torch.inference_mode(False)  # a leaf keeps them
@torch.no_grad()
def prepared(kernel: Kernel, format: Format, tensors: Mapping[str, Tensor], inp: int) -> Operands:
    """The operands of a kernel, which a leaf keeps."""
    return kernel.prepared(format, tensors, inp)


def product(kernel: Kernel, format: Format, operands: Operands, x: Tensor, out: int) -> Tensor:
    """x Wᵀ for x (…, inp)."""
    return kernel.product(format, operands, x.flatten(0, -2), out).reshape(*x.shape[:-1], out)
