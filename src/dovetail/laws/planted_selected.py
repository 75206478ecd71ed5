"""Bugs of selection by content: blocks read before they are whole, counted from a row's beginning, never remembered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dovetail.core.at import At
from dovetail.core.ctx import Ctx
from dovetail.core.part import KINDS
from dovetail.laws.mutant import Mutant, instead, spec
from dovetail.laws.suite import OWN_NUMBER
from dovetail.model import Model
from dovetail.ops import blocks
from dovetail.parts.mixer import native_sparse
from dovetail.parts.mixer.native_sparse import NativeSparse, NativeSparseModule
from dovetail.state import frame, pool

_ended, _gathered, _summary, _pick = blocks.ended, blocks.gathered, NativeSparseModule.summary, NativeSparseModule.pick


def _later(at: At, by: int) -> At:
    return At.of(at.order + by, at.seg, at.row)


def read_before_it_is_whole(self: NativeSparseModule, q: Tensor, k: Tensor, v: Tensor, at: At, block_at: At) -> Any:
    return _summary(self, q, k, v, _later(at, self.block - 1), block_at)


def pieces_of_this_call_alone(at: At, key_at: At, size: int) -> blocks.Ended:
    return _ended(at, at, size)


def counted_from_the_row(at: At, key_at: At, size: int) -> blocks.Ended:
    if at.row is not None:
        return _ended(at, key_at, size)
    order = torch.arange(at.n).expand_as(at.order)
    found = _ended(At.of(order, at.seg), At.of(order, at.seg) if key_at is at else key_at, size)
    return found


def later_tokens_gathered(
    q: Tensor, k: Tensor, v: Tensor, picked: Tensor, size: int, scale: float, at: At, key_at: At
) -> Tensor:
    return _gathered(q, k, v, picked, size, scale, _later(at, 1), key_at)


def never_remembered(self: frame.BlockView, at: At, *new: Tensor) -> Any:
    return tuple(self.inner._read(store) for store in self.inner.stores), self.inner.frame.key_at


def twin_without_blocks(self: pool.Group, copies: Any) -> None:
    if copies[0] and self.per != "block":
        for store in self.tensors():
            store[torch.tensor(copies[1])] = store[torch.tensor(copies[0])]


def each_rank_picks_alone(self: NativeSparseModule, logs: Tensor, ctx: Ctx) -> Tensor:
    return logs.logsumexp(-3)


def worst_first(self: NativeSparseModule, worth: Tensor, at: At, block_at: At) -> Tensor:
    return _pick(self, -worth, at, block_at)


def window_of_one_more(self: NativeSparse) -> Any:
    causal: Any = KINDS["causal"]
    window: Any = KINDS["window"]
    return causal() & window(size=self.window + 1)


def sparse(kv_heads: int = 2) -> Model:
    """Two layers of native sparse attention."""
    sizes = {"heads": 6, "kv_heads": kv_heads, "head": 12, "block": 3, "top": 1, "window": 5}
    return spec().set("layers.*.mixer", {"kind": "native_sparse", **sizes})


def mutants() -> list[Mutant]:
    """The rows."""
    model = sparse()
    return [
        Mutant(
            "a block is read before it is whole",
            "causal",
            instead(NativeSparseModule, "summary", read_before_it_is_whole),
            model,
        ),
        Mutant(
            "a block forgets its tokens of earlier calls",
            "chunked",
            instead(native_sparse, "ended", pieces_of_this_call_alone),
            model,
        ),
        Mutant(
            "blocks are counted from the row's beginning",
            "padded",
            instead(native_sparse, "ended", counted_from_the_row),
            model,
        ),
        Mutant("a gathered query reads the next token", "fast", instead(blocks, "gathered", later_tokens_gathered), model),
        Mutant("a block is never remembered", "chunked", instead(frame.BlockView, "extend", never_remembered), model),
        Mutant("a fork leaves its blocks behind", "rollback", instead(pool.Group, "copy", twin_without_blocks), model),
        Mutant(
            "each rank picks blocks by its own heads",
            "sharded",
            instead(NativeSparseModule, "over_group", each_rank_picks_alone),
            sparse(1),
        ),
        Mutant("the worst block is picked", OWN_NUMBER, instead(NativeSparseModule, "pick", worst_first), model),
        Mutant(
            "the window beside the blocks is one too wide", OWN_NUMBER, instead(NativeSparse, "near", window_of_one_more), model
        ),
    ]
