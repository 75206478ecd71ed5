"""Seeded bugs of positions: rotary pairs, decode positions, ALiBi, learned tables, and rotary scaling."""

from __future__ import annotations

import dataclasses as dc

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.parts.position.absolute import LearnedModule, SinusoidalModule
from dovetail.parts.position.bias import AlibiModule
from dovetail.parts.position.rope import RopeModule
from dovetail.parts.position.scaling import DynamicNtk, Proportional, Yarn
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.proof.laws.suite import OWN_NUMBER

_turn, _angles, _score = RopeModule.turn, RopeModule.angles, AlibiModule.score
_yarn, _dynamic = Yarn.frequencies, DynamicNtk.at_length


def pairs_adjacent(self: RopeModule, x: Tensor, layout: TokenLayout) -> Tensor:
    cos, sin = self.angles(layout, x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def last_channels_rotated(self: RopeModule, x: Tensor, layout: TokenLayout) -> Tensor:
    return _turn(self, x.flip(-1), layout).flip(-1)


def positions_restart_per_call(self: RopeModule, layout: TokenLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    order = torch.arange(layout.n).expand_as(layout.order)
    return _angles(self, TokenLayout.of(order, layout.seg, layout.row), dtype)


def padding_counted(self: LearnedModule, x: Tensor, layout: TokenLayout) -> Tensor:
    order = torch.arange(layout.n).expand_as(layout.order) if layout.n > 1 and layout.row is None else layout.order
    return x + F.embedding(order + self.part.offset, self.table)


def offset_ignored(self: SinusoidalModule, x: Tensor, layout: TokenLayout) -> Tensor:
    angle = layout.order[..., None].to(self.frequency.dtype) * self.frequency
    return x + torch.stack([angle.sin(), angle.cos()], -2 if self.part.halves else -1).flatten(-2).to(x.dtype)


def zero_when_decoding(self: AlibiModule, q: TokenLayout, k: TokenLayout, *tables: Tensor) -> Tensor:
    return _score(self, q, k, *tables) * (q.n > 1)


def beta_ignored(self: Yarn, plain: Tensor, base: float) -> Tensor:
    return _yarn(dc.replace(self, beta_fast=32.0), plain, base)


def frequencies_of_the_turning_pairs(self: Proportional, plain: Tensor, base: float) -> Tensor:
    rotated = self.rotated_pairs(len(plain))
    return F.pad(base ** -(torch.arange(rotated, dtype=plain.dtype) / rotated), (0, len(plain) - rotated))


def factor_ignored(self: DynamicNtk, plain: Tensor, base: float, length: Tensor) -> Tensor:
    return _dynamic(dc.replace(self, factor=1.0), plain, base, length)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    yarn = {"kind": "rope", "scaling": {"kind": "yarn", "original": 200, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False}}
    dynamic = {"kind": "rope", "scaling": {"kind": "dynamic_ntk", "original": 8}}
    learned = spec(position="none").set("position", {"kind": "learned", "length": 64})
    return [
        Mutant(
            "rotary positions count from the start of the call",
            "chunked",
            instead(RopeModule, "angles", positions_restart_per_call),
            report="x-transformers#219",
        ),
        Mutant(
            "ALiBi is zero at every decode step",
            "chunked",
            instead(AlibiModule, "score", zero_when_decoding),
            spec(position="alibi"),
            "keras-hub#2977",
        ),
        Mutant(
            "left padding moves positions",
            "padded",
            instead(LearnedModule, "embed", padding_counted),
            learned,
            "transformers#22707",
        ),
        Mutant(
            "sinusoidal positions ignore their offset",
            "every_field",
            instead(SinusoidalModule, "embed", offset_ignored),
            spec(position="none").set("position", {"kind": "sinusoidal", "offset": 2}),
        ),
        Mutant(
            "rotary pairs are interleaved everywhere",
            "ported",
            instead(RopeModule, "turn", pairs_adjacent),
            spec(width=30),  # transformers requires that the heads divide the width
            report="llama.cpp#3018",
        ),
        Mutant(
            "partial rotation acts on the last channels",
            OWN_NUMBER,
            instead(RopeModule, "turn", last_channels_rotated),
            report="TransformerLens#385",
        ),
        Mutant(
            "a field of YaRN is silently ignored",
            "every_field",
            instead(Yarn, "frequencies", beta_ignored),
            spec(position=yarn),
            "Megatron-LM#6305",
        ),
        Mutant(
            "proportional RoPE counts its exponents over the pairs that turn",
            OWN_NUMBER,
            instead(Proportional, "frequencies", frequencies_of_the_turning_pairs),
            spec(position={"kind": "rope", "scaling": {"kind": "proportional", "fraction": 0.5}}),
        ),
        Mutant(
            "dynamic NTK ignores its factor",
            "every_field",
            instead(DynamicNtk, "at_length", factor_ignored),
            spec(position=dynamic),
            "transformers#27227",
        ),
    ]
