"""Weights of few bits, as some files hold them: read as bfloat16, one tensor at a time.

    fp8     weight (out, inp) of e4m3, weight_scale_inv one float32 a block of 128 × 128        w = q · scale       DeepSeek-V3
    mxfp4   blocks (…, groups, 16) of two 4-bit numbers a byte, the low half first,
            scales (…, groups) of 8-bit exponents, one for 32 numbers                      w = e2m1 · 2^(scale − 127)   gpt-oss

e2m1 is a sign, two bits of exponent and one of fraction: ±0, ½, 1, 1½, 2, 3, 4, 6. Both are read as bfloat16: every number of
mxfp4 is one exactly, so there and back gives the same numbers; fp8 times a float32 is rounded once, so what is written again is
the plain bfloat16 form. Activations are not quantized here.

    plain, form = opened(config)                the config without its quantization_config, and how the files hold weights
    names, read = form.tensors(names, read)     the names the family knows, and a reader that gives plain weights

OCP Microscaling Formats 1.0, 2023; DeepSeek-AI 2024, section 3.3.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.base.errors import FileError, SpecError
from dovetail.hf.convert import Conversion, Shape
from dovetail.hf.packed import PackedForm, packed_form

FIELD = "quantization_config"

HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 without its sign, which is the fourth bit
GROUP = 32  # numbers that share an exponent
BIAS = 127
NO_NUMBER = 255  # the exponent that stands for none


@dc.dataclass(frozen=True)
class Fp8(Conversion):
    """(out, inp) of 8 bits and a scale for each block of them <- (out, inp)."""

    rows: int = 128
    columns: int = 128

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        raise FileError("weights are not written as fp8 (write them plain)")

    def from_hf(self, hf_tensors: Sequence[Tensor], shapes: Sequence[Shape] = ()) -> list[Tensor]:
        numbers, scales = hf_tensors
        out, inp = numbers.shape if numbers.dim() == 2 else (0, 0)
        if numbers.dtype != torch.float8_e4m3fn or scales.shape != (-(-out // self.rows), -(-inp // self.columns)):
            what = f"{numbers.dtype} {tuple(numbers.shape)} with scales {tuple(scales.shape)}"
            raise FileError(f"{what} is not a matrix of e4m3 in blocks of {self.rows} × {self.columns}")
        wide = scales.float().repeat_interleave(self.columns, 1)[:, :inp]
        made = torch.empty(out, inp, dtype=torch.bfloat16)
        for i in range(scales.shape[0]):  # a row of blocks at a time: the float32 in between stays small
            piece = slice(i * self.rows, (i + 1) * self.rows)
            made[piece] = (numbers[piece].float() * wide[i]).to(torch.bfloat16)
        return [made]


@dc.dataclass(frozen=True)
class Mxfp4(Conversion):
    """(…, groups, 16) bytes and (…, groups) exponents <-> (…, 32·groups, out), on its side as the experts of gpt-oss are."""

    def to_hf(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        (one,) = tensors
        grouped = one.transpose(-1, -2).contiguous().float().unflatten(-1, (-1, GROUP))
        largest = grouped.abs().amax(-1)
        exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 3, 0)  # the largest lies from 4 on, up to 6
        scaled = torch.ldexp(grouped, -exponent[..., None])
        halves = torch.tensor(HALVES)
        bits = torch.bucketize(scaled.abs(), halves).clamp(max=len(HALVES) - 1)
        if not halves[bits].equal(scaled.abs()):
            raise FileError("weights that are no numbers of mxfp4 cannot be written as such (write them plain)")
        bits = (bits | (torch.signbit(scaled) << 3)).to(torch.uint8)
        return [bits[..., 0::2] | (bits[..., 1::2] << 4), (exponent + BIAS).to(torch.uint8)]

    def from_hf(self, hf_tensors: Sequence[Tensor], shapes: Sequence[Shape] = ()) -> list[Tensor]:
        blocks, scales = hf_tensors
        fit = blocks.dim() > 2 and blocks.shape[-1] == GROUP // 2 and scales.shape == blocks.shape[:-1]
        if not fit or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            what = f"{blocks.dtype} {tuple(blocks.shape)} with scales {scales.dtype} {tuple(scales.shape)}"
            raise FileError(f"{what} is not mxfp4: that has blocks of {GROUP // 2} bytes with one exponent each")
        if (scales == NO_NUMBER).any():
            raise FileError(f"an exponent of {NO_NUMBER} stands for no number")
        table = torch.tensor((*HALVES, *(-half for half in HALVES)), dtype=torch.bfloat16)
        made = torch.empty(*blocks.shape[:-2], GROUP * blocks.shape[-2], dtype=torch.bfloat16)
        for one, bytes_, exponents in zip(made, blocks, scales, strict=True):  # an expert at a time
            pairs = torch.stack([table[(bytes_ & 15).int()], table[(bytes_ >> 4).int()]], -1)
            one.copy_(torch.ldexp(pairs.flatten(-2), exponents[..., None].int() - BIAS).flatten(-2))
        return [made.transpose(-1, -2)]


def split_quantization(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], PackedForm | None]:
    """A config without its quantization_config, and how its files hold weights; None where they are plain."""
    settings = config.get(FIELD)
    plain = {name: value for name, value in config.items() if name != FIELD}
    if settings is None:
        return plain, None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if isinstance(settings, Mapping) and (form := packed_form(settings, f"config.{FIELD}")) is not None:
        return plain, form
    if not isinstance(settings, Mapping) or method not in ("fp8", "mxfp4"):
        supported = "supported: fp8, mxfp4, compressed-tensors, gptq, awq"
        raise SpecError(f"config.{FIELD}.quant_method", f"{method!r} is unsupported", supported)
    if method == "mxfp4":
        return plain, _converted_by(Mxfp4(), "scales", "blocks", joint="_", plain="", shown="_blocks")
    block, fmt = settings.get("weight_block_size", [128, 128]), settings.get("fmt", "e4m3")
    integer = isinstance(block, (list, tuple)) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not integer or fmt != "e4m3":
        raise SpecError(
            f"config.{FIELD}", f"{fmt!r} in blocks of {block!r} is unsupported", "supported: e4m3 in blocks of two sizes"
        )
    return plain, _converted_by(Fp8(*block), "weight_scale_inv", "weight")


def _converted_by(convert: Conversion, scales: str, numbers: str, **names: str) -> PackedForm:
    """The form of files that hold a weight as numbers and scales, read by a conversion."""
    return PackedForm((scales, numbers), (), lambda found: convert.from_hf([found[numbers], found[scales]], ())[0], **names)
