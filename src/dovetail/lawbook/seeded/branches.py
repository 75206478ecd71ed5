"""Seeded bugs of blocks whose branches run side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.wire import Branching, WireModule
from dovetail.io.spec import from_yaml
from dovetail.lawbook.seeded.bug import Mutant, instead
from dovetail.lawbook.suite import OWN_NUMBER

HYBRID = """
width: 28
vocab: 62
layers:
- repeat: 2
  kind: hybrid_block
  mixer: {heads: 6, kv_heads: 2, head: 12}
  ssm: {kind: attention, heads: 6, kv_heads: 2, head: 12, mask: [causal, {kind: window, size: 3}]}
  ffn: {hidden: 44}
"""

_branch = Branching.branch


def one_after_the_other(
    self: WireModule, block: Branching, step: tuple[str, ...], x: Tensor, ctx: Ctx, views: Mapping[str, Any]
) -> Tensor:
    total = self.added(block.branch(step[0], x, ctx, views), block, step[0], ctx)
    for name in step[1:]:
        total = total + self.added(block.branch(name, x + total, ctx, views), block, name, ctx)
    return total


def first_alone(
    self: WireModule, block: Branching, step: tuple[str, ...], x: Tensor, ctx: Ctx, views: Mapping[str, Any]
) -> Tensor:
    return self.added(block.branch(step[0], x, ctx, views), block, step[0], ctx)


def one_cache(self: Branching, name: str, x: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
    return _branch(self, name, x, ctx, dict.fromkeys(views, views.get("mixer")))


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    hybrid = from_yaml(HYBRID)
    return [
        Mutant(
            "the second mixer reads what the first has added",
            OWN_NUMBER,
            instead(WireModule, "sum", one_after_the_other),
            hybrid,
        ),
        Mutant("a branch beside another is forgotten", "every_weight", instead(WireModule, "sum", first_alone), hybrid),
        Mutant("two mixers of a block write to one cache", "chunked", instead(Branching, "branch", one_cache), hybrid),
    ]
