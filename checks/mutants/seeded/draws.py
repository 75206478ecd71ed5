"""Seeded bugs of random numbers: dropout masks that repeat or follow the layout, and wrong initial weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.model import construction
from dovetail.nn import draws as drawing
from dovetail.nn.ctx import Ctx
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import Module
from dovetail.nn.random import draw, streams
from dovetail.parts import init
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.spec.fold import Declared
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight

_std, _ranges, _writes_stream, _drop = construction._std, construction._ranges, init.writes_stream, drawing._drop
_noise = Draws.noise


def one_stream_for_all_layers(self: Draws, module: Module, name: str) -> Tensor:
    return streams(self.seed, [name])[0]


def one_stream_for_all_seeds(self: Draws, module: Module, name: str) -> Tensor:
    return streams(torch.tensor(0), [f"{module.path}.{name}"])[0]


def samples_are_rows(self: TokenLayout) -> Tensor:
    row = torch.arange(self.order.shape[0])[:, None] if self.row is None else self.row
    return row.expand(self.order.shape)


def samples_draw_alike(self: TokenLayout) -> Tensor:
    return torch.zeros_like(self.order)


def positions_in_the_row(self: Draws, ctx: Ctx, x: Tensor, module: Module, name: str, axes: Sequence[str]) -> Tensor:
    position = torch.arange(x.shape[-2]).expand(x.shape[:-1])
    pairs = torch.arange((x.shape[-1] + 1) // 2)
    return draw(self._stream(module, name), ctx.layout.sample[..., None], position[..., None], pairs)


def drop_rate_of_what_stays(x: Tensor, both: Tensor, p: float, first: int) -> Tensor:
    return _drop(x, both, 1.0 - p, first)


def noise_by_variance(self: Draws, ctx: Ctx, x: Tensor, std: float, *rest: Any, **named: Any) -> Tensor:
    return _noise(self, ctx, x, std**2, *rest, **named)


def layers_start_equal(weights: Sequence[Declared], seed: int) -> Tensor:
    return streams(torch.tensor(seed), [re.sub(r"\d+", "0", d.path) for d in weights])


def wide_spread(d: Declared) -> float:
    return 1.5 * _std(d)


def experts_without_depth(weight: Weight, scope: Scope) -> bool:
    return _writes_stream(weight, scope) and not weight.batch


def slices_counted_from_zero(shape: Sequence[int], slices: Sequence[slice]) -> list[range]:
    return [range(len(r)) for r in _ranges(shape, slices)]


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    experts = spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20})
    return [
        Mutant("every layer drops the same values", "draws", instead(Draws, "_stream", one_stream_for_all_layers)),
        Mutant("every step drops the same values", "draws", instead(Draws, "_stream", one_stream_for_all_seeds)),
        Mutant("packed documents drop by their row", "draws", instead(TokenLayout, "sample", property(samples_are_rows))),
        Mutant("every sample drops the same values", "draws", instead(TokenLayout, "sample", property(samples_draw_alike))),
        Mutant("dropout counts positions in the row", "draws", instead(Draws, "_bits", positions_in_the_row)),
        Mutant("dropout keeps with probability p", "draws", instead(drawing, "_drop", drop_rate_of_what_stays)),
        Mutant("router noise has its standard deviation squared", "draws", instead(Draws, "noise", noise_by_variance)),
        Mutant("initial weights of two layers are equal", "draws", instead(construction, "_streams", layers_start_equal)),
        Mutant("initial weights are 1.5 times too large", "draws", instead(construction, "_std", wide_spread)),
        Mutant("experts start without 1/√(2·depth)", "draws", instead(init, "writes_stream", experts_without_depth), experts),
        Mutant("a slice of initial weights counts from 0", "draws", instead(construction, "_ranges", slices_counted_from_zero)),
    ]
