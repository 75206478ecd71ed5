"""Write a quantized model in the layouts of GPTQ and AWQ, four bits per weight.

    gptq   qweight (inp / 8, out)    qzeros (groups, out / 8)    scales (groups, out)    g_idx (inp,) the group of each input
    awq    qweight (inp, out / 8)    qzeros (groups, out / 8), each eight in the order 0 2 4 6 1 3 5 7    scales (groups, out)

Codes and scales are those of the model, bit for bit; scales get the dtype of the model. Symmetric int4 has the zero point 8. A
GPTQ file holds zero − 1 in four bits, which cannot express a zero point of 0: with zero points the file is `gptq_v2`, which
holds the zero point itself. The layouts are for int4 alone, and pack eight outputs into a word. The readers are in
hf/packed.py.                                                                     Frantar et al. 2022; Lin et al. 2023
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.core.errors import SpecError
from dovetail.hf.compressed import Leaves, left_out, one_format
from dovetail.hf.packed import AWQ_ORDER, pack_words
from dovetail.hf.tensors import Move
from dovetail.model import Model
from dovetail.ops.formats.format import SCALE, Grid
from dovetail.ops.formats.kinds import Int4
from dovetail.weights.quantization.leaf import QuantizedLinear

EACH = 8  # codes per word
MIDDLE = 8  # the zero point of symmetric codes


def _int4(leaves: Leaves, layout: str) -> Int4:
    format, path = one_format(leaves)
    if not isinstance(format, Int4):
        raise SpecError(path, f"{format.kind} has no layout in {layout}", "quantize with --bits 4, or use another --layout")
    return format


def gptq_config(spec: Model, moves: Sequence[Move], leaves: Leaves) -> dict[str, Any]:
    """The field of config.json. Raises SpecError for another format, and where a matrix of the layers is left as it is."""
    format = _int4(leaves, "gptq")
    for path, _ in left_out(spec, moves, leaves, readouts=False):
        raise SpecError(path, "is not quantized, which the layout gptq cannot express", "quantize it, or use --layout awq")
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": format.group,
        "sym": not format.zero_point,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq_v2" if format.zero_point else "gptq",
    }


def awq_config(spec: Model, moves: Sequence[Move], leaves: Leaves) -> dict[str, Any]:
    """The field of config.json. Raises SpecError for another format."""
    format = _int4(leaves, "awq")
    ignored = [name.removesuffix(".weight") for _, name in left_out(spec, moves, leaves)]
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": format.group,
        "zero_point": True,  # a file has them always; those of a symmetric format are 8
        "version": "gemm",
        "modules_to_not_convert": list(dict.fromkeys([*ignored, "lm_head"])),
    }


def gptq_tensors(path: str, leaf: QuantizedLinear) -> dict[str, Tensor]:
    """The tensors of one leaf, by their names."""
    codes, zero, scale = _parts(path, leaf, "gptq")
    assert isinstance(leaf.format, Int4)
    stored = zero if leaf.format.zero_point else zero - 1
    return {
        "qweight": pack_words(codes, 4).T.contiguous(),
        "qzeros": pack_words(stored.T, 4),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(leaf.in_features) // leaf.format.group).int(),
    }


def awq_tensors(path: str, leaf: QuantizedLinear) -> dict[str, Tensor]:
    """The tensors of one leaf, by their names."""
    codes, zero, scale = _parts(path, leaf, "awq")
    order = torch.tensor(AWQ_ORDER).argsort()  # which of eight outputs each nibble holds

    def packed(values: Tensor) -> Tensor:
        return pack_words(values.T.unflatten(-1, (-1, EACH))[..., order].flatten(-2), 4)

    return {"qweight": packed(codes), "qzeros": packed(zero), "scales": scale.T.contiguous()}


def _parts(path: str, leaf: QuantizedLinear, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (out, inp), zero points and scales (out, groups) of a leaf."""
    for name, size in (("outputs", leaf.out_features), ("inputs", leaf.in_features)):
        if size % EACH:
            what = f"its {size} {name} are not a multiple of {EACH}, of which {layout} packs a word"
            raise SpecError(path, what, "leave it out of the quantization (--skip), or use --layout compressed-tensors")
    tensors: Mapping[str, Tensor] = leaf.stored()
    grid: Grid = leaf.format.grid(tensors)
    scale = tensors[SCALE].to(leaf.dtype)
    if not torch.equal(scale.float(), tensors[SCALE].float()):
        raise SpecError(path, f"has scales that {leaf.dtype} does not hold exactly", "export a bfloat16 or float32 model")
    zero = torch.full(scale.shape, MIDDLE, dtype=torch.int64) if grid.zero is None else grid.zero.to(torch.int64)
    return leaf.format.codes(tensors, leaf.in_features), zero, scale
