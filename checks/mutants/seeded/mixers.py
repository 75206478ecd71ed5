"""Seeded bugs of short_conv, rg_lru and differential_attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import multiply_fused
from dovetail.nn.recur import Carry
from dovetail.nn.rows import SequenceRows
from dovetail.ops.attend import StoredEntries
from dovetail.ops.scan.conv import causal_conv
from dovetail.parts.mixer import differential, rg_lru, short_conv
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.proof.laws.suite import OWN_NUMBER

_gated = rg_lru.RgLruModule.gated


def inputs_kept_before_their_gate(
    self: short_conv.ShortConvModule, x: Tensor, seq: SequenceRows, ctx: Ctx, carry: Carry | None
) -> tuple[Tensor, Carry]:
    b, c, u = multiply_fused(x, ctx, self.fused_weight, self.b, self.c, self.u)
    bias, last = self.conv_bias if self.part.bias else None, None if carry is None else carry[0]
    mixed, _ = causal_conv(b * u, self.conv, bias, seq, last)
    return self.o(c * mixed), (causal_conv(u, self.conv, bias, seq, last)[1],)


def first_token_of_the_call(
    self: rg_lru.RgLruModule, x: Tensor, order: Tensor, seq: SequenceRows, ctx: Ctx
) -> tuple[Tensor, Tensor]:
    return _gated(self, x, torch.arange(order.shape[-1]).expand_as(order), seq, ctx)


def keys_of_the_first_half(kv: Any, i: int) -> StoredEntries:
    (k, v), layout = kv.entries()
    return StoredEntries(layout, (k[..., 0, :], v.flatten(-2)))


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    short = spec().set("layers.0.mixer", {"kind": "short_conv"})
    griffin, difference = (
        spec().set("layers.0.mixer", {"kind": kind, "heads": 2}) for kind in ("rg_lru", "differential_attention")
    )
    return [
        Mutant(
            "a short convolution stores its inputs before their gate",
            "chunked",
            instead(short_conv.ShortConvModule, "recur", inputs_kept_before_their_gate),
            short,
        ),
        Mutant(
            "RG-LRU adds the first token of every call unscaled",
            "chunked",
            instead(rg_lru.RgLruModule, "gated", first_token_of_the_call),
            griffin,
        ),
        Mutant(
            "both softmaxes of differential attention read the first keys",
            OWN_NUMBER,
            instead(differential, "half", keys_of_the_first_half),
            difference,
        ),
    ]
