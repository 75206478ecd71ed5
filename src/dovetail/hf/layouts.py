"""The layouts in which weights of fewer bits are exported: a field of config.json, and the tensors of each matrix.

compressed-tensors, which transformers and vLLM load:

    int4, int8    pack-quantized     weight_packed, weight_scale, weight_shape, with zero points weight_zero_point
    int8, dynamic int-quantized      weight, weight_scale; activations in int8, a scale per token
    fp8           float-quantized    weight, weight_scale

Codes and scales are those of the model, bit for bit; scales get the dtype of the model, in which a reader decodes. Our nibbles
and theirs have one order. A matrix that the family holds in another form (transposed, fused with others) cannot be written so,
and neither can NF4: SpecError names it.

GPTQ and AWQ, four bits per weight:

    gptq   qweight (inp / 8, out)    qzeros (groups, out / 8)    scales (groups, out)    g_idx (inp,) the group of each input
    awq    qweight (inp, out / 8)    qzeros (groups, out / 8), each eight in the order 0 2 4 6 1 3 5 7    scales (groups, out)

Symmetric int4 has the zero point 8. A
GPTQ file holds zero − 1 in four bits, which cannot express a zero point of 0: with zero points the file is `gptq_v2`, which
holds the zero point itself. The layouts are for int4 alone, and pack eight outputs into a word. The readers are in
hf/packed.py.                                                                     Frantar et al. 2022; Lin et al. 2023
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.base.errors import SpecError, UsageError, names_or_nearest
from dovetail.files.model_dir import LazyTensors
from dovetail.hf.convert import IDENTITY
from dovetail.hf.packed import AWQ_ORDER, pack_words
from dovetail.hf.tensors import Move
from dovetail.model.model import Model
from dovetail.ops.formats.format import CODES, SCALE, Format, Grid
from dovetail.ops.formats.kinds import FP8, Int4, Int8
from dovetail.spec.fold import declared
from dovetail.weights.quantization.leaf import QuantizedLeaf

DYNAMIC_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
Write = Callable[[str, QuantizedLeaf], dict[str, Tensor]]
Leaves = Mapping[str, QuantizedLeaf]


def quantization_config(spec: Model, moves: Sequence[Move], leaves: Leaves) -> dict[str, Any]:
    """The field of config.json; SpecError for formats that one config cannot express."""
    format, path = one_format(leaves)
    layout, weights = _settings(format, path)
    ignored = [name.removesuffix(".weight") for _, name in left_out(spec, moves, leaves)]
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"dynamic": False, **weights},
                "input_activations": DYNAMIC_INT8 if format.rounds_inputs else None,
                "output_activations": None,
                "format": layout,
            }
        },
        "ignore": list(dict.fromkeys([*ignored, "lm_head"])),
    }


def one_format(leaves: Leaves) -> tuple[Format, str]:
    """The format of all leaves, and the path of the first; SpecError where there are several."""
    formats = {leaf.format: path for path, leaf in leaves.items()}
    if len(formats) > 1:
        raise SpecError(list(formats.values())[1], "has another format than other leaves", "quantize with one format to export")
    return next(iter(formats)), next(iter(leaves))


def left_out(spec: Model, moves: Sequence[Move], leaves: Leaves, readouts: bool = True) -> Iterator[tuple[str, str]]:
    """(path, name of theirs) of every matrix that is not quantized; without readouts, of those that might be."""
    by_path = {move.paths[0]: move.hf_names[0] for move in moves if len(move.paths) == 1}
    for d in declared(spec):
        path = d.path.removesuffix(".weight")
        if d.weight.matmul and path not in leaves and d.path in by_path and (readouts or not d.weight.readout):
            yield path, by_path[d.path]


def _settings(format: Format, path: str) -> tuple[str, dict[str, Any]]:
    """Their name of the layout, and their settings of the weights."""
    if isinstance(format, Int4):
        group = {"strategy": "group", "group_size": format.group}
        return "pack-quantized", {"num_bits": 4, "type": "int", "symmetric": not format.zero_point, **group}
    if isinstance(format, Int8):
        group = {"strategy": "channel"} if format.group is None else {"strategy": "group", "group_size": format.group}
        layout = "int-quantized" if format.dynamic else "pack-quantized"
        return layout, {"num_bits": 8, "type": "int", "symmetric": True, **group}
    if isinstance(format, FP8):
        return "float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": format.per}
    raise SpecError(
        path, f"{format.kind} has no layout in compressed-tensors", "use int4, int8 or fp8, or export dense weights"
    )


def packed_pieces(moves: Sequence[Move], pieces: Sequence[LazyTensors], leaves: Leaves, write: Write) -> list[LazyTensors]:
    """The pieces of an export, with the tensors that `write` makes in place of the dense W of each quantized leaf."""
    made = []
    for move, piece in zip(moves, pieces, strict=True):
        own = [
            path.removesuffix(".weight")
            for path in move.paths
            if path.removesuffix(".weight") in leaves and path.endswith(".weight")
        ]
        if not own:
            made.append(piece)
            continue
        if len(move.paths) != 1 or len(move.hf_names) != 1 or move.convert != IDENTITY or len(leaves[own[0]].shape) != 2:
            what = f"is held by {move.hf_names[0]} in another form, which has no packed layout here"
            raise SpecError(own[0], what, "export dense weights, or leave it out of the quantization (--skip)")
        made.append(_piece(move.hf_names[0].removesuffix("weight"), own[0], leaves[own[0]], write))
    return made


def _piece(stem: str, path: str, leaf: QuantizedLeaf, write: Write) -> LazyTensors:
    def make() -> dict[str, Tensor]:
        return {stem + name: tensor for name, tensor in write(path, leaf).items()}

    return LazyTensors({name: tensor.to("meta") for name, tensor in make().items()}, make)


def compressed_tensors(path: str, leaf: QuantizedLeaf) -> dict[str, Tensor]:
    """The tensors of one leaf, by their names."""
    tensors, format, inp = leaf.stored(), leaf.format, leaf.shape[-1]
    scale = tensors[SCALE].to(leaf.dtype)
    if isinstance(format, FP8):
        return {"weight": tensors[CODES], "weight_scale": scale if format.per == "channel" else scale.reshape(1)}
    if format.rounds_inputs:
        return {"weight": tensors[CODES], "weight_scale": scale}
    codes, grid = format.codes(tensors, inp), format.grid(tensors)
    unsigned = codes.to(torch.int16) + (0 if format.bits == 4 else 128)
    made = {"weight_packed": pack_words(unsigned, format.bits), "weight_scale": scale, "weight_shape": torch.tensor(leaf.shape)}
    if grid.zero is not None:
        made["weight_zero_point"] = pack_words(grid.zero.T, 4).T.contiguous()
    return made


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


def gptq_tensors(path: str, leaf: QuantizedLeaf) -> dict[str, Tensor]:
    """The tensors of one leaf, by their names."""
    codes, zero, scale = _parts(path, leaf, "gptq")
    assert isinstance(leaf.format, Int4)
    stored = zero if leaf.format.zero_point else zero - 1
    return {
        "qweight": pack_words(codes, 4).T.contiguous(),
        "qzeros": pack_words(stored.T, 4),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(leaf.shape[-1]) // leaf.format.group).int(),
    }


def awq_tensors(path: str, leaf: QuantizedLeaf) -> dict[str, Tensor]:
    """The tensors of one leaf, by their names."""
    codes, zero, scale = _parts(path, leaf, "awq")
    order = torch.tensor(AWQ_ORDER).argsort()  # which of eight outputs each nibble holds

    def packed(values: Tensor) -> Tensor:
        return pack_words(values.T.unflatten(-1, (-1, EACH))[..., order].flatten(-2), 4)

    return {"qweight": packed(codes), "qzeros": packed(zero), "scales": scale.T.contiguous()}


def _parts(path: str, leaf: QuantizedLeaf, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (out, inp), zero points and scales (out, groups) of a leaf."""
    for name, size in (("outputs", leaf.shape[-2]), ("inputs", leaf.shape[-1])):
        if size % EACH:
            what = f"its {size} {name} are not a multiple of {EACH}, of which {layout} packs a word"
            raise SpecError(path, what, "leave it out of the quantization (--skip), or use --layout compressed-tensors")
    tensors: Mapping[str, Tensor] = leaf.stored()
    grid: Grid = leaf.format.grid(tensors)
    scale = tensors[SCALE].to(leaf.dtype)
    if not torch.equal(scale.float(), tensors[SCALE].float()):
        raise SpecError(path, f"has scales that {leaf.dtype} does not hold exactly", "export a bfloat16 or float32 model")
    zero = torch.full(scale.shape, MIDDLE, dtype=torch.int64) if grid.zero is None else grid.zero.to(torch.int64)
    return leaf.format.codes(tensors, leaf.shape[-1]), zero, scale


class QuantizedLayout(NamedTuple):
    """How a library holds weights of fewer bits; both functions raise SpecError with the path of what it cannot hold."""

    config: Callable[[Model, Sequence[Move], Leaves], dict[str, Any]]  # the quantization_config
    tensors: Callable[[str, QuantizedLeaf], dict[str, Tensor]]  # of the leaf at a path, by their names behind its stem


DEFAULT = "compressed-tensors"
LAYOUTS: dict[str, QuantizedLayout] = {
    DEFAULT: QuantizedLayout(quantization_config, compressed_tensors),
    "gptq": QuantizedLayout(gptq_config, gptq_tensors),
    "awq": QuantizedLayout(awq_config, awq_tensors),
}


def layout_named(name: str) -> QuantizedLayout:
    """The layout of a name; UsageError for an unknown one."""
    if name not in LAYOUTS:
        raise UsageError(f"--layout {name}: no such layout; {names_or_nearest(name, LAYOUTS, 'layouts')}")
    return LAYOUTS[name]
