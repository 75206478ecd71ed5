"""Weights of four and eight bits in the layouts of other libraries: read as dense weights in the dtype of their scales.

    pack-quantized    weight_packed (out, inp · bits / 32) int32: codes + 2^(bits − 1), the lowest bits first; weight_shape;
                      weight_scale (out, groups), weight_zero_point (⌈out / 8⌉, groups)                    compressed-tensors
    float-quantized   weight (out, inp) of e4m3 or int8, weight_scale (out, groups), (out, 1) or (1,)      compressed-tensors
    gptq              qweight (inp / 8, out), qzeros (groups, out / 8) of zero point − 1 (v2: the zero point),
                      scales (groups, out), g_idx (inp,) the group of each input
    awq               qweight (inp, out / 8), qzeros (groups, out / 8), each eight in the order 0 2 4 6 1 3 5 7; scales

w = (code − zero) · scale in all of them. Activations are not quantized here. `PackedForm` is how the files of a directory hold
weights; `packed_form` reads it from quantization_config.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from dovetail.base.errors import FileError, SpecError

Read = Callable[[str], Tensor]
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where output i of eight lies among the eight nibbles
WORD = 32  # bits


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """(…, n) int32 -> (…, n · 32 / bits) codes from 0, the lowest bits first."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """The inverse; the last word is filled with zeros."""
    each = WORD // bits
    codes = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    words = (codes << torch.arange(0, WORD, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@dc.dataclass(frozen=True)
class PackedForm:
    """How files hold a weight: the names behind its stem, the one that marks it first, and the function that decodes them."""

    names: tuple[str, ...]
    optional: tuple[str, ...]
    decode: Callable[[Mapping[str, Tensor]], Tensor]
    joint: str = "."  # between the stem and a name
    plain: str = ".weight"  # behind the stem in the name of the dense weight
    shown: str = ".weight"  # behind the stem in the name that errors give

    def tensors(self, names: Collection[str], read: Read) -> tuple[list[str], Read]:
        """The names that a family knows, in the files' order, and a reader that gives dense weights."""
        mark = f"{self.joint}{self.names[0]}"
        stems = [name.removesuffix(mark) for name in names if name.endswith(mark)]
        parts: dict[str, dict[str, str]] = {}
        for stem in stems:
            full = {name: f"{stem}{self.joint}{name}" for name in (*self.names, *self.optional)}
            for name in self.names:
                if full[name] not in names:
                    raise FileError(f"{stem}{mark}: there is no {full[name]} for it")
            parts[f"{stem}{self.plain}"] = {name: one for name, one in full.items() if one in names}
        held = {one: plain for plain, found in parts.items() for one in found.values()}

        def reading(name: str) -> Tensor:
            if name not in parts:
                return read(name)
            try:
                return self.decode({own: read(full) for own, full in parts[name].items()})
            except FileError as error:
                raise FileError(f"{name.removesuffix(self.plain)}{self.shown}: {error}") from error

        return list(dict.fromkeys(held.get(name, name) for name in names)), reading


def packed_form(settings: Mapping[str, Any], where: str) -> PackedForm | None:
    """How the files of a quantization_config of these methods hold weights; None for another method."""
    read = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq}.get(str(settings.get("quant_method")))
    return None if read is None else read(settings, where)


# -- compressed-tensors ---------------------------------------------------------------------------------------------


def _compressed(settings: Mapping[str, Any], where: str) -> PackedForm:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise SpecError(f"{where}.config_groups", f"{groups!r:.200} is unsupported", "supported: one group of layers")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise SpecError(f"{where}.config_groups", "has no weights", "supported: weights of 4 or 8 bits")
    bits, kind, layout = weights.get("num_bits"), weights.get("type", "int"), settings.get("format")
    if layout == "pack-quantized" and kind == "int" and bits in (4, 8):
        return PackedForm(
            ("weight_packed", "weight_scale", "weight_shape"),
            ("weight_zero_point", "weight_g_idx"),
            lambda found: _from_packed(found, bits),
        )
    if layout in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8 and kind in ("int", "float"):
        return PackedForm(("weight_scale", "weight"), ("weight_zero_point", "input_scale"), _from_plain)
    what = f"{layout!r} of {bits} bits ({kind})"
    raise SpecError(f"{where}.format", f"{what} is unsupported", "supported: pack-quantized int of 4 or 8 bits, 8 bits plain")


def _from_packed(found: Mapping[str, Tensor], bits: int) -> Tensor:
    packed, scale, shape = found["weight_packed"], found["weight_scale"], found["weight_shape"]
    if packed.dtype != torch.int32 or packed.dim() != 2 or shape.numel() != 2 or scale.dim() != 2:
        raise FileError(f"weight_packed of {packed.dtype} {tuple(packed.shape)} is not a matrix of packed integers")
    out, inp = (int(n) for n in shape.flatten())
    if packed.shape != (out, -(-inp * bits // WORD)):
        raise FileError(f"weight_packed of {tuple(packed.shape)} does not hold {out} × {inp} integers of {bits} bits")
    codes, zero = unpack_words(packed, bits)[:, :inp], None
    if "weight_zero_point" in found:
        zero = unpack_words(found["weight_zero_point"].T.contiguous(), bits).T[:out]
    return _scaled(codes, scale, zero, 2 ** (bits - 1), found.get("weight_g_idx"))


def _from_plain(found: Mapping[str, Tensor]) -> Tensor:
    codes, scale = found["weight"], found["weight_scale"]
    if codes.dtype not in (torch.int8, torch.float8_e4m3fn) or codes.dim() != 2 or "weight_zero_point" in found:
        raise FileError(f"a weight of {codes.dtype} {tuple(codes.shape)} is not a symmetric matrix of 8 bits")
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale
    return _scaled(codes.to(scale.dtype), scale, None, 0, None)


def _scaled(codes: Tensor, scale: Tensor, zero: Tensor | None, middle: int, group: Tensor | None) -> Tensor:
    """(codes − zero) · scale in the dtype of the scale: codes (out, inp), scale and zero (out or 1, groups)."""
    out, inp = codes.shape
    groups = scale.shape[-1]
    if scale.dim() != 2 or scale.shape[0] not in (1, out) or inp % groups or (zero is not None and zero.shape != scale.shape):
        raise FileError(f"scales of {tuple(scale.shape)} do not fit a matrix of {out} × {inp}")
    if group is None:
        group = torch.arange(groups).repeat_interleave(inp // groups)
    if group.shape != (inp,) or int(group.min()) < 0 or int(group.max()) >= groups:
        raise FileError(f"g_idx of {tuple(group.shape)} names groups that are not there")
    group = group.long()
    offset = middle if zero is None else zero.to(scale.dtype).index_select(1, group)
    return (codes.to(scale.dtype) - offset) * scale.index_select(1, group)


# -- GPTQ and AWQ ---------------------------------------------------------------------------------------------------


def _check_four(settings: Mapping[str, Any], where: str, name: str) -> None:
    if settings.get(name) != 4:
        raise SpecError(f"{where}.{name}", f"{settings.get(name)!r} is unsupported", "supported: 4")


def _gptq(settings: Mapping[str, Any], where: str) -> PackedForm:
    _check_four(settings, where, "bits")
    added = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def decode(found: Mapping[str, Tensor]) -> Tensor:
        codes = unpack_words(_words(found["qweight"]).T.contiguous(), 4)
        zero = unpack_words(_words(found["qzeros"]), 4).T + added
        return _scaled(codes, found["scales"].T.contiguous(), zero[: len(codes)], 0, found.get("g_idx"))

    return PackedForm(("qweight", "qzeros", "scales"), ("g_idx",), decode)


def _awq(settings: Mapping[str, Any], where: str) -> PackedForm:
    _check_four(settings, where, "bits" if "bits" in settings else "w_bit")
    order = torch.tensor(AWQ_ORDER)

    def ordered(words: Tensor) -> Tensor:
        return unpack_words(_words(words), 4).unflatten(-1, (-1, 8))[..., order].flatten(-2).T

    def decode(found: Mapping[str, Tensor]) -> Tensor:
        return _scaled(ordered(found["qweight"]), found["scales"].T.contiguous(), ordered(found["qzeros"]), 0, None)

    return PackedForm(("qweight", "qzeros", "scales"), (), decode)


def _words(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.int32 or tensor.dim() != 2:
        raise FileError(f"{tensor.dtype} {tuple(tensor.shape)} is not a matrix of packed words")
    return tensor
