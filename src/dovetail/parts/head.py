"""Heads: the stream to what a model is for.

    lm                logits over the vocabulary for every token, tied to the embedding or not
    masked_lm         the same behind a dense layer, activation and norm (BERT)
    classifier        one of `classes` for a row, from its pooled vector, also behind a layer of its own
    token_classifier  one of `classes` for every token, likewise
    pooled_embedding  a vector for a row: first, last or mean token; also through tanh(W·) (BERT), also to unit length
    reward            one number for a row: a reward

Pooling looks at real tokens only: first is the first real one, mean leaves padding out.
"""

from __future__ import annotations

import dataclasses as dc
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.group import Act, Head, HeadModule, Norm
from dovetail.core.layout import TokenLayout
from dovetail.core.module import Linear, Module
from dovetail.core.part import Problem, child, register
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight
from dovetail.ops.loss import chunked_cross_entropy

Pool = Literal["first", "last", "mean"]


def pool(x: Tensor, layout: TokenLayout, pooling: Pool) -> Tensor:
    """(…, n, embed) -> (…, embed) over the real tokens of each row."""
    real = layout.real
    if pooling == "mean":
        weight = real.to(x.dtype)[..., None]
        return (x * weight).sum(-2) / weight.sum(-2).clamp_min(1)
    place = torch.arange(layout.n, device=x.device)
    index = torch.where(real, place, layout.n).amin(-1) if pooling == "first" else torch.where(real, place, -1).amax(-1)
    index = index.clamp(0, layout.n - 1)
    return x.gather(-2, index[..., None, None].expand(*index.shape, 1, x.shape[-1])).squeeze(-2)


def _vocabulary(scope: Scope, tied: bool, bias: bool) -> list[Weight]:
    same = "embed.table" if tied else None
    declared = [Weight(name="table", out=("vocab",), inp=("embed",), same_as=same)]
    return [*declared, Weight(name="bias", out=("vocab",), init="zeros", role="bias")] if bias else declared


def _dense(bias: bool) -> list[Weight]:
    """A layer of the head's own."""
    weight = Weight(name="dense.weight", out=("embed",), inp=("embed",))
    return [weight, Weight(name="dense.bias", out=("embed",), init="zeros", role="bias")] if bias else [weight]


@register("lm")
class Lm(Head):
    """A score for every token of the vocabulary."""

    TAPS = ("logits",)

    tied: bool = True
    bias: bool = False
    scale: float = 1.0  # multiplies the logits
    softcap: float | None = None

    def module(self) -> type[Module]:
        return LmModule

    def weights(self, scope: Scope) -> list[Weight]:
        return _vocabulary(scope, self.tied, self.bias)

    def check(self, scope: Scope) -> list[Problem]:
        bad = self.softcap is not None and self.softcap <= 0
        return [Problem("softcap", f"{self.softcap} is not above 0", "use null for none")] if bad else []

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randint(0, scope.size("vocab"), shape, generator=generator)

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"tied": [True, False], "bias": [False, True], "scale": [1.0, 0.5], "softcap": [None, 3.0]}


class LmModule(HeadModule):
    """x (…, embed) -> logits (…, vocab)."""

    part: Lm
    table: Tensor
    bias: Tensor

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        return ctx.tap(self, "logits", self.logits(x))

    def logits(self, x: Tensor) -> Tensor:
        """(…, embed) -> (…, vocab)."""
        out = F.linear(x, self.table, self.bias if self.part.bias else None)
        if self.part.scale != 1.0:
            out = out * self.part.scale
        if self.part.softcap is not None:
            out = self.part.softcap * torch.tanh(out / self.part.softcap)
        return out

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> Tensor:
        return chunked_cross_entropy(self.logits, x, labels)


@register("masked_lm")
class MaskedLm(Head):
    """A score for every token of the vocabulary, behind a layer of its own."""

    TAPS = ("logits",)

    act: Act = child("gelu")
    norm: Norm = child("layernorm")
    tied: bool = True
    bias: bool = True
    dense_bias: bool = True

    def module(self) -> type[Module]:
        return MaskedLmModule

    def weights(self, scope: Scope) -> list[Weight]:
        return [*_dense(self.dense_bias), *_vocabulary(scope, self.tied, self.bias)]

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return scope.bind(dim="embed")

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randint(0, scope.size("vocab"), shape, generator=generator)

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"tied": [True, False], "bias": [True, False], "dense_bias": [True, False]}


class MaskedLmModule(HeadModule):
    """x (…, embed) -> logits (…, vocab)."""

    part: MaskedLm
    dense: Linear
    norm: Module
    table: Tensor
    bias: Tensor

    def setup(self) -> None:
        self.act = self.part.act.function()

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        return ctx.tap(self, "logits", self.logits(x, ctx))

    def logits(self, x: Tensor, ctx: Ctx) -> Tensor:
        """(…, embed) -> (…, vocab)."""
        hidden = self.norm(self.act(self.dense(x)), ctx)
        return F.linear(hidden, self.table, self.bias if self.part.bias else None)

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> Tensor:
        return chunked_cross_entropy(lambda part: self.logits(part, ctx), x, labels)


@dc.dataclass(frozen=True, kw_only=True)
class ByClass(Head):
    """A score for each class, from the stream itself or from norm(act(W x + b))."""

    TAPS = ("logits",)

    classes: int = 2
    act: Act | None = None  # None: no layer of its own (RoBERTa has tanh, DistilBERT relu)
    norm: Norm | None = None  # behind the activation (ModernBERT)
    dense_bias: bool = True
    dropout: float = 0.0  # of what the last matrix reads

    def axes(self, scope: Scope) -> Scope:
        return scope.add(classes=self.classes)

    def weights(self, scope: Scope) -> list[Weight]:
        out = Weight(name="out.weight", out=("classes",), inp=("embed",))
        scores = [out, Weight(name="out.bias", out=("classes",), init="zeros", role="bias")]
        return scores if self.act is None else [*_dense(self.dense_bias), *scores]

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return scope.bind(dim="embed")

    def check(self, scope: Scope) -> list[Problem]:
        if self.classes < 1:
            return [Problem("classes", f"{self.classes} is not above 0")]
        if self.norm is not None and self.act is None:
            return [Problem("norm", "there is no layer for it to stand behind", "give an `act`, or norm: null")]
        return [] if 0 <= self.dropout < 1 else [Problem("dropout", f"{self.dropout} is not in [0, 1)")]

    def idle(self, scope: Scope) -> frozenset[str]:
        return frozenset({"dense_bias"}) if self.act is None else frozenset()

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randint(0, self.classes, shape, generator=generator)

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"classes": [3, 5], "dense_bias": [True, False], "dropout": [0.0, 0.2]}


class ByClassModule(HeadModule):
    """x (…, embed) -> logits (…, classes)."""

    part: ByClass
    dense: Linear
    norm: Module
    out: Linear

    def setup(self) -> None:
        self.act = None if self.part.act is None else self.part.act.function()

    def behind(self, x: Tensor, ctx: Ctx) -> Tensor:
        """What the last matrix reads, like x."""
        if self.act is not None:
            x = self.act(self.dense(x))
        if self.part.norm is not None:
            x = self.norm(x, ctx)
        return ctx.dropout(x, self.part.dropout, self)


@register("classifier")
class Classifier(ByClass):
    """One class for a row."""

    pooling: Pool = "first"

    def module(self) -> type[Module]:
        return ClassifierModule

    def pools(self) -> bool:
        return True

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {**super().samples(), "pooling": ["first", "last", "mean"]}


class ClassifierModule(ByClassModule):
    """x (…, n, embed) -> logits (…, classes)."""

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.part, Classifier)
        self.pooling: Pool = self.part.pooling

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        return ctx.tap(self, "logits", self.out(self.behind(pool(x, ctx.layout, self.pooling), ctx)))

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> Tensor:
        return F.cross_entropy(self.forward(x, ctx), labels)


@register("token_classifier")
class TokenClassifier(ByClass):
    """One class for every token."""

    def module(self) -> type[Module]:
        return TokenClassifierModule


class TokenClassifierModule(ByClassModule):
    """x (…, embed) -> logits (…, classes)."""

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        return ctx.tap(self, "logits", self.out(self.behind(x, ctx)))

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> Tensor:
        return chunked_cross_entropy(self.out, self.behind(x, ctx), labels)


@register("pooled_embedding")
class PooledEmbedding(Head):
    """A vector for a row."""

    TAPS = ("vector",)

    pooling: Pool = "mean"
    dense: bool = False  # through tanh(W · + b), BERT's pooler
    unit: bool = False  # scaled to length 1

    def module(self) -> type[Module]:
        return PooledEmbeddingModule

    def weights(self, scope: Scope) -> list[Weight]:
        if not self.dense:
            return []
        weight = Weight(name="out.weight", out=("embed",), inp=("embed",))
        return [weight, Weight(name="out.bias", out=("embed",), init="zeros", role="bias")]

    def pools(self) -> bool:
        return True

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*shape, scope.size("embed"), generator=generator, dtype=torch.float64)

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"pooling": ["mean", "first", "last"], "dense": [False, True], "unit": [False, True]}


class PooledEmbeddingModule(HeadModule):
    """x (…, n, embed) -> vector (…, embed)."""

    part: PooledEmbedding
    out: Linear

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        vector = pool(x, ctx.layout, self.part.pooling)
        if self.part.dense:
            vector = torch.tanh(self.out(vector))
        return ctx.tap(self, "vector", F.normalize(vector, dim=-1) if self.part.unit else vector)

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> Tensor:
        """How far the vector points away from the wanted one."""
        return (1 - F.cosine_similarity(self.forward(x, ctx), labels.to(x.dtype), dim=-1)).mean()


@register("reward")
class Reward(Head):
    """One number for a row: a reward."""

    TAPS = ("value",)

    pooling: Pool = "last"

    def module(self) -> type[Module]:
        return RewardModule

    def axes(self, scope: Scope) -> Scope:
        return scope.add(one=1)

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="out.weight", out=("one",), inp=("embed",))]

    def pools(self) -> bool:
        return True

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*shape, 1, generator=generator, dtype=torch.float64)

    @classmethod
    def samples(cls) -> dict[str, list[Any]]:
        return {"pooling": ["last", "first", "mean"]}


class RewardModule(HeadModule):
    """x (…, n, embed) -> value (…, 1)."""

    part: Reward
    out: Linear

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        return ctx.tap(self, "value", self.out(pool(x, ctx.layout, self.part.pooling)))

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> Tensor:
        return F.mse_loss(self.forward(x, ctx), labels.to(x.dtype))
