"""Masks made of masks, and the mask that allows everything.

full      every key of the document
all_of    every mask allows the key: `a & b`, in YAML a list
any_of    at least one mask allows it: `a | b`, in YAML {any: […]}
by_head   head h has mask h mod count                                         Child et al. 2019 (Sparse Transformer)
"""

from __future__ import annotations

import dataclasses as dc
from typing import Any, Literal

import torch
from torch import Tensor

from dovetail.nn.groups import Band, Fill, Mask, Order, Span
from dovetail.nn.layout import TokenLayout
from dovetail.spec.part import Problem, register
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope

MAX_MASKS = 256  # in one joined mask: each is computed for every tile of scores


@register("full")
class Full(Mask):
    """Full attention: every token of the document."""

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(q.order.shape[:-1], k.order.shape[:-1])
        return torch.ones(*shape, 1, q.n, k.n, dtype=torch.bool, device=q.order.device)

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        return Fill.FULL

    def flag(self) -> Literal["all", "causal"] | None:
        return "all"

    def band(self) -> Band | None:
        return Band(None, None)


class Joined(Mask):
    """The base of masks made of several masks."""

    masks: tuple[Mask, ...]

    def by_head(self) -> bool:
        return any([mask.by_head() for mask in self.masks])  # noqa: C419  torch.compile traces a list, not a generator

    def for_head(self, head: int) -> Mask:
        return dc.replace(self, masks=tuple(mask.for_head(head) for mask in self.masks)) if self.by_head() else self

    def kept(self) -> int:
        return max([mask.kept() for mask in self.masks])

    def relative(self) -> bool:
        return all(mask.relative() for mask in self.masks)

    def check(self, scope: Scope) -> list[Problem]:
        if not self.masks:
            return [Problem("masks", "is empty", "give at least one mask, or use `full`")]
        if len(self.masks) > MAX_MASKS:
            return [Problem("masks", f"{len(self.masks):,} masks", f"the limit is {MAX_MASKS}")]
        return [
            Problem(f"masks.{i}.{p.field}", p.problem, p.remedy) for i, mask in enumerate(self.masks) for p in mask.check(scope)
        ]


@register("all_of")
class AllOf(Joined):
    """The keys that all of the masks allow."""

    masks: tuple[Mask, ...] = ()

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        visible = self.masks[0].visible(q, k, heads)
        for mask in self.masks[1:]:
            visible = visible & mask.visible(q, k, heads)
        return visible

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        return min((mask.tile(q, k, head) for mask in self.masks), key=lambda fill: fill.value)

    def order(self) -> Order:
        orders = {mask.order() for mask in self.masks}
        return "causal" if "causal" in orders else "ahead" if "ahead" in orders else "both"

    def reach(self) -> int | None:
        reaches = [reach for reach in [mask.reach() for mask in self.masks] if reach is not None]
        return min(reaches) if reaches else None

    def ahead(self) -> int | None:
        bounds = [bound for bound in [mask.ahead() for mask in self.masks] if bound is not None]
        return min(bounds) if bounds else None

    def band(self) -> Band | None:
        bands = [band for band in [mask.band() for mask in self.masks] if band is not None]
        if len(bands) < len(self.masks):
            return None
        return Band(_least([band.behind for band in bands]), _least([band.ahead for band in bands]))

    def regroup(self) -> int:
        return max([mask.regroup() for mask in self.masks])

    def to_data(self) -> Any:
        return [mask.to_data() for mask in self.masks] if len(self.masks) > 1 else super().to_data()


class AllOfProof(Proof, of=AllOf):
    """Sampled values and causes."""

    causes = {"masks": FieldCause("window missing")}
    samples = {"masks": [[{"kind": "window", "size": 7}, {"kind": "block_local", "size": 5}], [{"kind": "strided", "step": 2}]]}


@register("any_of")
class AnyOf(Joined):
    """The keys that at least one of the masks allows."""

    masks: tuple[Mask, ...] = ()

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        visible = self.masks[0].visible(q, k, heads)
        for mask in self.masks[1:]:
            visible = visible | mask.visible(q, k, heads)
        return visible

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        return max((mask.tile(q, k, head) for mask in self.masks), key=lambda fill: fill.value)

    def order(self) -> Order:
        orders = {mask.order() for mask in self.masks}
        return "causal" if orders == {"causal"} else "both" if orders == {"both"} else "ahead"

    def ahead(self) -> int | None:
        return _greatest([mask.ahead() for mask in self.masks])

    def reach(self) -> int | None:
        return _greatest([mask.reach() for mask in self.masks])

    def to_data(self) -> Any:
        return {"any": [mask.to_data() for mask in self.masks]}


class AnyOfProof(Proof, of=AnyOf):
    """Sampled values."""

    samples = {
        "masks": [
            [{"kind": "window", "size": 3}, {"kind": "global_tokens", "tokens": 2}],
            [{"kind": "strided", "step": 3}, {"kind": "block_local", "size": 4}],
        ]
    }


@register("by_head")
class ByHead(Joined):
    """A mask per head: head h has mask h mod count (Sparse Transformer, Child et al. 2019)."""

    masks: tuple[Mask, ...] = ()

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        each = [mask.visible(q, k, heads) for mask in self.masks]
        shape = torch.broadcast_shapes(*(visible.shape for visible in each))
        choice = heads % len(each)
        out = each[0].expand(shape)
        for i, visible in enumerate(each):
            out = torch.where((choice == i)[:, None, None], visible, out)
        return out

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        return self.masks[head % len(self.masks)].tile(q, k, head)

    def order(self) -> Order:
        orders: set[Order] = {mask.order() for mask in self.masks}
        if len(orders) == 1:
            return self.masks[0].order()
        return "ahead" if "ahead" in orders else "both"

    def ahead(self) -> int | None:
        return _greatest([mask.ahead() for mask in self.masks])

    def reach(self) -> int | None:
        return _greatest([mask.reach() for mask in self.masks])

    def by_head(self) -> bool:
        return True

    def for_head(self, head: int) -> Mask:
        return self.masks[head % len(self.masks)].for_head(head)


class ByHeadProof(Proof, of=ByHead):
    """Sampled values."""

    samples = {
        "masks": [
            [{"kind": "window", "size": 4}, {"kind": "strided", "step": 3}],
            [{"kind": "block_local", "size": 3}, "full"],
        ]
    }


def _least(bounds: list[int | None]) -> int | None:
    """The least bound; None where there is none."""
    return min((bound for bound in bounds if bound is not None), default=None)


def _greatest(bounds: list[int | None]) -> int | None:
    """The greatest bound; None where one of them is missing."""
    known = [bound for bound in bounds if bound is not None]
    return max(known) if len(known) == len(bounds) else None
