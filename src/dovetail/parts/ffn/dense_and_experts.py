"""A dense feed-forward and experts side by side, each between norms of its own, and a norm of their sum.

    y = norm(norm(dense(norm x)) + norm(experts(x)))            added to x; no wire norms around it

Unlike the branches of an `expert_block`, what both compute is normed together. Experts norm their own input (`norm` of `moe`),
so that their router reads x.
Shapes: x, y (…, n, embed). Gemma 4 (2026).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.group import Ffn, Norm
from dovetail.core.module import Module
from dovetail.core.part import Part, Problem, child, register
from dovetail.core.scope import Scope

NORMS = ("dense_norm", "dense_post_norm", "experts_post_norm", "post_norm")


@register("dense_and_experts")
class DenseAndExperts(Ffn):
    """A dense feed-forward and experts side by side, normed apart and together (Gemma 4)."""

    TAPS = {"out": "pos channel"}
    norms_itself: ClassVar[bool] = True

    dense: Ffn = child("glu")
    experts: Ffn = child("moe")
    norm: Norm = child("rmsnorm")

    SAMPLES = {
        "dense": [{"kind": "glu", "hidden": 36}, {"kind": "mlp", "hidden": 44}],
        "experts": [
            {"kind": "moe", "experts": 4, "hidden": 20, "norm": "rmsnorm"},
            {"kind": "moe", "experts": 6, "hidden": 12, "router": {"kind": "softmax_router", "norm": "rmsnorm"}},
        ],
    }

    def children(self) -> dict[str, Part]:
        return {"dense": self.dense, "experts": self.experts, **dict.fromkeys(NORMS, self.norm)}

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return scope.bind(dim="embed")

    def check(self, scope: Scope) -> list[Problem]:
        reading = [name for name, part in (("dense", self.dense), ("experts", self.experts)) if part.reads(scope)]
        return [Problem(name, "reads values of the model, which only branches of a block receive") for name in reading]


class DenseAndExpertsModule(Module, of=DenseAndExperts):
    """x (…, n, embed) -> like x."""

    dense: Module
    experts: Module
    dense_norm: Module
    dense_post_norm: Module
    experts_post_norm: Module
    post_norm: Module

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        dense = self.dense_post_norm(self.dense(self.dense_norm(x, ctx), ctx), ctx)
        experts = self.experts_post_norm(self.experts(x, ctx), ctx)
        return ctx.tap(self, "out", self.post_norm(dense + experts, ctx))
