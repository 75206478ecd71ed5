"""Seeded bugs of native sparse attention: blocks read too early, counted from the beginning of a row, or not cached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.ops import blocks
from dovetail.parts.mixer import nsa
from dovetail.parts.mixer.nsa import NSA, NSAModule
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.proof.laws.suite import OWN_NUMBER
from dovetail.spec.part import KINDS
from dovetail.state import frame, pool

_ended, _gathered, _summary, _pick = blocks.ended, blocks.gathered, NSAModule.summary, NSAModule.pick


def _later(layout: TokenLayout, by: int) -> TokenLayout:
    return TokenLayout.of(layout.order + by, layout.seg, layout.row)


def read_before_it_is_complete(
    self: NSAModule, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout, block_layout: TokenLayout
) -> Any:
    return _summary(self, q, k, v, _later(layout, self.block - 1), block_layout)


def tokens_of_this_call_only(layout: TokenLayout, key_layout: TokenLayout, size: int) -> blocks.Ended:
    return _ended(layout, layout, size)


def counted_from_the_row(layout: TokenLayout, key_layout: TokenLayout, size: int) -> blocks.Ended:
    if layout.row is not None:
        return _ended(layout, key_layout, size)
    order = torch.arange(layout.n).expand_as(layout.order)
    return _ended(
        TokenLayout.of(order, layout.seg), TokenLayout.of(order, layout.seg) if key_layout is layout else key_layout, size
    )


def later_tokens_gathered(
    q: Tensor, k: Tensor, v: Tensor, picked: Tensor, size: int, scale: float, layout: TokenLayout, key_layout: TokenLayout
) -> Tensor:
    return _gathered(q, k, v, picked, size, scale, _later(layout, 1), key_layout)


def never_cached(self: frame.BlockView, layout: TokenLayout, *new: Tensor) -> Any:
    return self.stored()


def fork_without_blocks(self: pool.Group, copies: Any) -> None:
    if copies[0] and self.per != "block":
        for store in self.tensors():
            store[torch.tensor(copies[1])] = store[torch.tensor(copies[0])]


def own_heads_only(self: NSAModule, logs: Tensor, ctx: Ctx) -> Tensor:
    return logs.logsumexp(-3)


def worst_first(self: NSAModule, worth: Tensor, layout: TokenLayout, block_layout: TokenLayout) -> Tensor:
    return _pick(self, -worth, layout, block_layout)


def window_of_one_more(self: NSA) -> Any:
    causal: Any = KINDS["causal"]
    window: Any = KINDS["window"]
    return causal() & window(size=self.window + 1)


def sparse(kv_heads: int = 2) -> Model:
    """Two layers of native sparse attention."""
    sizes = {"heads": 6, "kv_heads": kv_heads, "head": 12, "block": 3, "top": 1, "window": 5}
    return spec().set("layers.*.mixer", {"kind": "nsa", **sizes})


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    model = sparse()
    return [
        Mutant(
            "a block is read before it is complete",
            "causal",
            instead(NSAModule, "summary", read_before_it_is_complete),
            model,
        ),
        Mutant(
            "a block loses its tokens of earlier calls",
            "chunked",
            instead(nsa, "ended", tokens_of_this_call_only),
            model,
        ),
        Mutant(
            "blocks are counted from the beginning of the row",
            "padded",
            instead(nsa, "ended", counted_from_the_row),
            model,
        ),
        Mutant("a gathered query reads the next token", "fast", instead(blocks, "gathered", later_tokens_gathered), model),
        Mutant("a block is never cached", "chunked", instead(frame.BlockView, "append", never_cached), model),
        Mutant("a fork does not copy its blocks", "rollback", instead(pool.Group, "copy", fork_without_blocks), model),
        Mutant(
            "each rank selects blocks by its own heads",
            "sharded",
            instead(NSAModule, "over_group", own_heads_only),
            sparse(1),
        ),
        Mutant("the worst block is selected", OWN_NUMBER, instead(NSAModule, "pick", worst_first), model),
        Mutant("the window of NSA is one too wide", OWN_NUMBER, instead(NSA, "visibility", window_of_one_more), model),
    ]
