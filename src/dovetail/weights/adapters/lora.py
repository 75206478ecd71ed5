"""LoRA and DoRA: a low-rank change of a matrix.

    lora   y = x Wᵀ + s · (x Aᵀ) Bᵀ                        A (rank, inp) uniform within ±1/√inp, B (out, rank) zero at first
    dora   y = x W'ᵀ,  W' = m ⊙ V/‖V‖,  V = W + s·B A      m (out,): the norm of each row of W at first; ‖V‖ has no gradient

    s = alpha/rank, or with scale: root alpha/√rank (rsLoRA: the size of an update does not shrink with the rank)

    dropout   (d ⊙ x) Aᵀ in place of x Aᵀ, in training alone; d = 0 with probability p, else 1/(1 − p)        (nn/draws.py)
              d is a function of (seed, path of the leaf, sample, position, channel), of experts also of the expert: leaves that
              share an adapter draw by their own path; a recomputed pass, ranks and micro-batches draw the same numbers

A bank of experts has an A and a B for each of them. The defaults are those of "LoRA without regret": all linear layers,
alpha 32; a learning rate about ten times that of full fine-tuning.
Hu et al. 2021 (LoRA); Kalajdzievski 2023 (rsLoRA); Liu et al. 2024 (DoRA); Schulman et al. 2025.

Merge several adapters into one change of a weight.

    linear   Δ = Σ wᵢ Δᵢ
    ties     of each Δᵢ the largest `density` of all values are kept; the sign of Σ wᵢ Δᵢ is elected for each value; Δ is the
             mean of those wᵢ Δᵢ that have it
    dare     each value of Δᵢ is kept with probability `density` and divided by it; then linear

Δᵢ is the change that adapter i makes of the stored matrix (or bias), whatever its kind: adapters of different kinds and ranks
can be merged. peft merges the factors of LoRA instead, which gives other numbers.
Yadav et al. 2023 (TIES); Yu et al. 2023 (DARE).
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import InputError, UsageError
from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import Linear, Offer, Rows
from dovetail.nn.module import at_least_fp32
from dovetail.nn.random import draw, streams, words
from dovetail.spec.field import MAX_FACTOR, bounded
from dovetail.spec.fold import Declared
from dovetail.spec.part import register
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight
from dovetail.weights.adapters.kind import AdapterKind, AdapterModule, tp_of

ENCODER = "encoder"  # the axis of the encoder output, whose tokens have a layout of their own
DROPPED: frozenset[Offer] = frozenset({"grouped"})  # what is exact with dropout in training
RANK = "adapter_rank"  # an axis of no part: Mamba has a `rank` of its own


class InputDropout(NamedTuple):
    """The dropout of what an adapter reads: the path of the leaf, the scope of the adapter, and the probability."""

    path: str
    scope: Scope
    p: float

    def drop(self, x: Tensor, axes: tuple[str, ...], ctx: Ctx) -> Tensor:
        """x (…, n, inp) with dropout; `axes` are the logical axes of its channels."""
        draws = ctx.draws
        if draws is None:
            return x
        if axes == (ENCODER,) and ctx.encoder_layout is not None:
            ctx = dc.replace(ctx, layout=ctx.encoder_layout)
        if x.shape[:-1] != ctx.layout.order.shape:
            shapes = f"{tuple(x.shape[:-1])} are not one per token {tuple(ctx.layout.order.shape)}"
            remedy = "leave it out of the targets, or set dropout to 0"
            raise InputError(f"{self.path}: its inputs {shapes}, by which dropout is drawn; {remedy}")
        return draws.dropout(ctx, x, self.p, self, "dropout", axes)

    def drop_rows(self, x: Tensor, axes: tuple[str, ...], rows: Rows, experts: tuple[str, ...], here: int, ctx: Ctx) -> Tensor:
        """x (rows, inp) of a bank with `here` of its experts on this rank, with dropout."""
        if ctx.draws is None:
            return x
        tokens = ctx.layout.order.numel()
        token = rows.choice // (len(rows.choice) // tokens)
        expert = rows.expert + ctx.ranks.first(self, experts, here)
        return ctx.draws.dropout_rows(ctx, x, self.p, self, "dropout", axes, token, expert)


@register("lora")
class Lora(AdapterKind):
    """Low-rank adaptation: W + s·B A."""

    rank: int = bounded(16, above=0, at_most=2**16)
    alpha: float = bounded(32.0, above=0, at_most=MAX_FACTOR)
    scale: Literal["rank", "root"] = "rank"  # s = alpha/rank, or alpha/√rank (rsLoRA)
    dropout: float = bounded(0.0, at_least=0, below=1)  # of what A reads, in training

    def adapter(self) -> type[AdapterModule]:
        return LoraModule

    def sizes(self) -> dict[str, int]:
        return {RANK: self.rank}

    def tensors(self, base: Declared) -> list[Weight]:
        w, tp = base.weight, tp_of(base)
        return [
            Weight(name="a", batch=w.batch, out=(RANK,), inp=w.inp, init="uniform", tp=tp, used=w.used),
            Weight(name="b", batch=w.batch, out=w.out, inp=(RANK,), init="zeros", tp=tp, used=w.used),
        ]

    @property
    def factor(self) -> float:
        """s."""
        return self.alpha / (self.rank if self.scale == "rank" else self.rank**0.5)


@register("dora")
class Dora(Lora):
    """Weight-decomposed low-rank adaptation: LoRA of the direction of each row, and a learned length."""

    def adapter(self) -> type[AdapterModule]:
        return DoraModule

    def tensors(self, base: Declared) -> list[Weight]:
        w = base.weight
        length = Weight(name="m", batch=w.batch, out=w.out, over=w.inp, init="ones", role="norm", tp=w.tp, used=w.used)
        return [*super().tensors(base), length]


class LoraModule(AdapterModule):
    """a (…, rank, inp), b (…, out, rank)."""

    kind: Lora
    a: Tensor
    b: Tensor

    def setup(self) -> None:
        self.factor, self.p, own = self.kind.factor, self.kind.dropout, self.declared[0]
        self.read_axes, self.experts = own.scope.names(own.weight.inp), own.weight.batch

    def exact_in(self, ctx: Ctx | None) -> frozenset[Offer]:
        """With a mask per token no one matrix computes what the leaf does."""
        return DROPPED if self.p and ctx is not None and ctx.draws is not None else self.exact

    def dropped(self, leaf: Linear, x: Tensor, ctx: Ctx | None, rows: Rows | None = None) -> Tensor:
        """d ⊙ x in training, else x."""
        if not self.p:
            return x
        if ctx is None:
            if self.training:
                raise InputError(
                    f"{leaf.path}: dropout is drawn by the seed of a pass, and this leaf is called without one; give it the "
                    "ctx, set dropout to 0, or call model.eval()"
                )
            return x
        dropout = InputDropout(leaf.path, self.declared[0].scope, self.p)
        if rows is None:
            return dropout.drop(x, self.read_axes, ctx)
        return dropout.drop_rows(x, self.read_axes, rows, self.experts, self.a.shape[0], ctx)

    def forward(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        y = leaf.storage.multiply(leaf, x, ctx)
        h = self.small(leaf, x, ctx)
        # one kernel multiplies and adds; the sum of two outputs would be a pass over memory of its own
        return torch.addmm(y.flatten(0, -2), h.flatten(0, -2), self.b.to(y.dtype).t()).view(y.shape)

    def small(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        """s · x Aᵀ (…, rank)."""
        return F.linear(self.dropped(leaf, x, ctx), self.a.to(x.dtype)) * self.factor

    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        return leaf.storage.grouped(leaf, x, rows, ctx) + self.change(leaf, x, rows, ctx)

    def change(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        """s · (x Aᵀ) Bᵀ of each row by the factors of its expert."""
        x = self.dropped(leaf, x, ctx, rows)
        return rows.multiply(rows.multiply(x, self.a.to(x.dtype)) * self.factor, self.b.to(x.dtype))

    def matrix(self, leaf: Linear, ctx: Ctx | None = None) -> Tensor:
        if "matrix" not in self.exact_in(ctx):
            raise InputError(f"{leaf.path}: has no one matrix in training with dropout; set dropout to 0")
        return self.undropped(leaf)

    def undropped(self, leaf: Linear) -> Tensor:
        """W + s·B A: the matrix outside training."""
        dense = leaf.dense()
        return dense + self.delta(leaf).to(dense.dtype)

    def delta(self, leaf: Linear) -> Tensor:
        return (self.b * self.factor) @ self.a


class DoraModule(LoraModule):
    """a (…, rank, inp), b (…, out, rank), m (…, out)."""

    m: Tensor

    def match(self, leaf: Linear) -> None:
        with torch.no_grad():
            self.m.copy_(self.lengths(leaf))

    def lengths(self, leaf: Linear) -> Tensor:
        """‖V‖ (…, out), without a gradient."""
        with torch.no_grad():
            v = self.undropped(leaf)
            return torch.linalg.vector_norm(v.to(at_least_fp32(v.dtype)), dim=-1).to(self.m.dtype)

    def ratio(self, leaf: Linear) -> Tensor:
        """m/‖V‖ (…, out)."""
        return self.m / self.lengths(leaf)

    def forward(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        y, ratio = leaf.storage.multiply(leaf, x, ctx), self.ratio(leaf).to(x.dtype)
        own = y if leaf.bias is None else y - leaf.bias.to(y.dtype)  # the length is of the matrix alone
        change = F.linear(self.small(leaf, x, ctx), self.b.to(x.dtype))
        return y + ((ratio - 1.0) * own + ratio * change)

    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        y = leaf.storage.grouped(leaf, x, rows, ctx)
        ratio = self.ratio(leaf).to(x.dtype).index_select(0, rows.expert)
        own = y if leaf.bias is None else y - leaf.bias.to(y.dtype).index_select(0, rows.expert)
        return y + ((ratio - 1.0) * own + ratio * self.change(leaf, x, rows, ctx))

    def matrix(self, leaf: Linear, ctx: Ctx | None = None) -> Tensor:
        v = super().matrix(leaf, ctx)
        return v * self.ratio(leaf).to(v.dtype)[..., None]


Method = Literal["linear", "ties", "dare"]


def combine(
    changes: Sequence[Tensor],
    weights: Sequence[float],
    method: Method = "linear",
    density: float = 0.5,
    seed: int = 0,
    path: str = "",
) -> Tensor:
    """Return the change that several changes of one tensor make together."""
    if method not in get_args(Method):
        raise UsageError(f"--method: {method!r} is none of {', '.join(get_args(Method))}")
    if not 0 < density <= 1:
        raise UsageError(f"--density: {density} is not in (0, 1]")
    if method == "ties":
        return _ties(torch.stack([w * _largest(change, density) for w, change in zip(weights, changes, strict=True)]))
    if method == "dare":
        changes = [_dropped(change, density, seed, f"{path} of {i}") for i, change in enumerate(changes)]
    total = torch.zeros_like(changes[0])
    for weight, change in zip(weights, changes, strict=True):
        total += weight * change
    return total


def _largest(change: Tensor, density: float) -> Tensor:
    """The values of greatest magnitude; the others 0."""
    count = max(1, int(density * change.numel()))
    bound = change.abs().flatten().kthvalue(change.numel() - count + 1).values
    return torch.where(change.abs() >= bound, change, 0.0)


def _ties(changes: Tensor) -> Tensor:
    """(adapters, …) -> (…): the mean of the values that have the elected sign."""
    agrees = (changes.sign() == changes.sum(0).sign()) & (changes != 0)
    return (changes * agrees).sum(0) / agrees.sum(0).clamp_min(1)


def _dropped(change: Tensor, density: float, seed: int, path: str) -> Tensor:
    """Each value kept with probability `density`, a function of (seed, path, index)."""
    stream = streams(torch.tensor(seed), [f"dare {path}"])[0]
    kept = words(draw(stream, torch.arange(change.numel())))[0] < int(density * 2**32)
    return torch.where(kept.view(change.shape), change / density, 0.0)
