"""Seeded bugs of a block and its declarations: costs, stored weights, YAML, taps, norms, the feed-forward."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.hf import hf
from dovetail.model.model import Model
from dovetail.nn.block import WireModule
from dovetail.parts.ffn.dense import GluModule
from dovetail.parts.mixer.attention import Attention, AttentionModule
from dovetail.parts.norm import RMSNormModule
from dovetail.proof.laws import ported
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.spec.part import Part
from dovetail.spec.weight import Weight

_added, _cost, _changed, _export = WireModule.added, Attention.cost, Part.changed, hf.export_tensors


def half_the_products(self: Attention, scope: Any, n: int) -> tuple[int, int]:
    whole, touched = _cost(self, scope, n)
    return whole // 2, touched // 2


def false_is_default(self: Part) -> dict[str, Any]:
    return {name: value for name, value in _changed(self).items() if value is not False}


def tables_never_saved(self: Weight) -> bool:
    return self.role != "const" and self.same_as is None and self.name != "table"


def residual_sum_tapped(self: WireModule, y: Tensor, block: Any, branch: str, ctx: Any) -> Tensor:
    out = _added(self, y, block, branch, dc.replace(ctx, taps=None))
    ctx.tap(block, f"{branch}_add", out + 1.0)
    return out


def pattern_never_tapped(self: AttentionModule, ctx: Any) -> None:
    return None


def breaks_the_graph(self: RMSNormModule, x: Tensor, ctx: Any) -> Tensor:
    scale = self.scale * 1.0 if bool(x.sum() > 1e30) else self.scale
    return F.rms_norm(x, (x.shape[-1],), scale, self.part.eps)


def rms_detached(self: RMSNormModule, x: Tensor, ctx: Any) -> Tensor:
    rsqrt = torch.rsqrt((x * x).mean(-1, keepdim=True) + self.part.eps).detach()
    return x * rsqrt * self.scale


def scale_detached(self: RMSNormModule, x: Tensor, ctx: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), self.scale.detach(), self.part.eps)


def gate_and_up_swapped(self: GluModule, x: Tensor, ctx: Any, view: Any = None) -> Tensor:
    return ctx.tap(self, "out", self.down(ctx.tap(self, "hidden", self.act(self.up(x, ctx)) * self.gate(x, ctx)), ctx))


def norms_swapped(spec: Model, tensors: Any, name: str | None = None) -> dict[str, Tensor]:
    crossed = {
        path.replace("mixer_norm", "?").replace("ffn_norm", "mixer_norm").replace("?", "ffn_norm"): t
        for path, t in tensors.items()
    }
    return _export(spec, crossed, name)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    llama = spec(width=30)  # transformers requires that the heads divide the width
    return [
        Mutant("half of the attention products are not counted", "declared", instead(Attention, "cost", half_the_products)),
        Mutant("a field that is false is not written", "round_trip", instead(Part, "changed", false_is_default)),
        Mutant(
            "a trained head is not saved, as if it were tied",
            "round_trip",
            instead(Weight, "learned", property(tables_never_saved)),
            report="transformers#45127",
        ),
        Mutant(
            "a tap called mixer_add shows another value",
            "tapped",
            instead(WireModule, "added", residual_sum_tapped),
            report="TransformerLens#1639",
        ),
        Mutant(
            "a fused kernel hides the pattern",
            "tapped",
            instead(AttentionModule, "edit", pattern_never_tapped),
            report="pytorch#119811",
        ),
        Mutant("a block branches on a tensor's value", "compiled", instead(RMSNormModule, "forward", breaks_the_graph)),
        Mutant("a norm's statistics are constant in backward", "gradient", instead(RMSNormModule, "forward", rms_detached)),
        Mutant("a norm's weight is never trained", "every_weight", instead(RMSNormModule, "forward", scale_detached)),
        Mutant("gate and up are exchanged", "ported", instead(GluModule, "forward", gate_and_up_swapped), llama),
        Mutant(
            "keys and shapes agree, two norms are exchanged",
            "ported",
            instead(ported, "export_tensors", norms_swapped),
            llama,
            report="open-instruct#1839",
        ),
    ]
