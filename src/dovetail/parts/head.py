"""Heads: from the residual stream (…, n, embed) to the model's output.

    lm                logits over the vocabulary per token, tied to the embedding or not
    masked_lm         the same behind a dense layer, activation and norm (BERT)
    classifier        logits over `classes` per document, from its pooled vector; optionally behind a dense layer
    token_classifier  logits over `classes` per token, likewise
    pooled_embedding  one vector per document: the first, last or mean token; optionally tanh(W·) (BERT), unit length
    reward            one number per document (reward model)

Per token: (…, n, embed) -> (…, n, answers). Pooled: one answer per document, of its real tokens alone:

    batch, one document per row at most    (batch, n, embed) -> (batch, answers); zeros for `mean` of an empty row
    packed, several documents in a row     (batch, n, embed) -> (documents, answers), those of the first row first
    flat                                   (n, embed)        -> (rows, answers)
"""

from __future__ import annotations

import dataclasses as dc
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Act, Head, HeadModule, Norm
from dovetail.nn.linear import Linear
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.nn.module import Module, at_least_fp32
from dovetail.ops.pooling import Pool, pool
from dovetail.ops.vocab import chunked_cross_entropy, cross_entropy_sum, sharded_cross_entropy
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, child, register
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight

VOCAB = ("vocab",)


def _vocabulary(tied: bool, bias: bool, inp: str = "embed") -> list[Weight]:
    same = "embed.table" if tied else None
    declared = [Weight(name="out.weight", out=("vocab",), inp=(inp,), same_as=same, readout=True)]
    return [*declared, Weight(name="bias", out=("vocab",), init="zeros", role="bias")] if bias else declared


def _dense(bias: bool, out: str = "embed") -> list[Weight]:
    """The dense layer of a head."""
    weight = Weight(name="dense.weight", out=(out,), inp=("embed",))
    return [weight, Weight(name="dense.bias", out=(out,), init="zeros", role="bias")] if bias else [weight]


def _summed(losses: Tensor) -> LossSum:
    """The sum of losses that all count, and their number."""
    return LossSum(losses.sum(), torch.full((), losses.numel(), device=losses.device))


class TokenLogitsModule(HeadModule):
    """A head with logits per token. Forward and loss take the same two steps, so that they cannot differ.

    Where ranks shard the axis of the logits, each has the logits of its shard: forward joins them, the loss does not."""

    answers: ClassVar[tuple[str, ...]]  # the axis of the logits

    def features(self, x: Tensor, ctx: Ctx) -> Tensor:
        """(…, n, embed) -> like x, over all tokens at once: dropout depends on the index of a token."""
        return x

    def logits(self, x: Tensor, ctx: Ctx) -> Tensor:
        """(…, embed) -> (…, answers), or this rank's shard of them; chunk by chunk in the loss."""
        raise NotImplementedError

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        logits = self.logits(self.features(x, ctx), ctx)
        logits = logits if ctx.ranks.axes is None else ctx.ranks.gather_from_region(logits, self.answers)
        return logits if ctx.taps is None else ctx.tap(self, "logits", logits)

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> LossSum:
        def sharded(logits: Tensor, labels: Tensor) -> Tensor:
            return sharded_cross_entropy(logits, labels, self, ctx, self.answers)

        summed = sharded if ctx.ranks.sharded(self.answers) else cross_entropy_sum
        return chunked_cross_entropy(lambda part: self.logits(part, ctx), self.features(x, ctx), labels, summed)


class VocabHead(Head):
    """A head with logits over the vocabulary per token."""

    TAPS = {"logits": "pos channel"}
    tp_axes = VOCAB

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randint(0, scope.size("vocab"), shape, generator=generator)


@register("lm")
class Lm(VocabHead):
    """Language modeling: logits over the vocabulary per token."""

    tied: bool = True
    bias: bool = False
    scale: float = bounded(1.0, above=0)  # multiplies the logits
    softcap: float | None = bounded(None, above=0, remedy="use null for none")

    def weights(self, scope: Scope) -> list[Weight]:
        return _vocabulary(self.tied, self.bias)

    def scaled_if_tied(self, scale: float) -> Head:
        return dc.replace(self, scale=scale) if self.tied else self

    def check(self, scope: Scope) -> list[Problem]:
        if not self.tied or "table" not in scope.sizes:
            return []
        what = f"the embedding's table has width {scope.size('table')}, the residual stream {scope.size('embed')}"
        return [Problem("tied", what, "set tied: false, or use masked_lm, whose dense layer has the table's width")]


class LmProof(Proof, of=Lm):
    """Sampled values and causes."""

    causes = {
        "softcap": FieldCause("soft-cap"),
        "scale": FieldCause("logit scale", (1.0,)),
        "bias": FieldCause("bias missing"),
    }
    samples = {"tied": [True, False], "bias": [False, True], "scale": [1.0, 0.5], "softcap": [None, 3.0]}


class LmModule(TokenLogitsModule, of=Lm):
    """x (…, embed) -> logits (…, vocab)."""

    answers = VOCAB
    part: Lm
    out: Linear
    bias: Tensor

    def logits(self, x: Tensor, ctx: Ctx) -> Tensor:
        x = x if ctx.ranks.axes is None else ctx.ranks.copy_to_region(x, self.answers)
        out = self.out(x, ctx) + self.bias if self.part.bias else self.out(x, ctx)
        if self.part.scale != 1.0:
            out = out * self.part.scale
        if self.part.softcap is not None:
            out = self.part.softcap * torch.tanh(out / self.part.softcap)
        return out


@register("masked_lm")
class MaskedLm(VocabHead):
    """Masked language modeling (BERT): logits over the vocabulary per token, behind a dense layer."""

    act: Act = child("gelu")
    norm: Norm = child("layernorm")
    tied: bool = True
    bias: bool = True
    dense_bias: bool = True

    def weights(self, scope: Scope) -> list[Weight]:
        width = self.inner(scope)
        return [*_dense(self.dense_bias, width), *_vocabulary(self.tied, self.bias, width)]

    def inner(self, scope: Scope) -> str:
        """The axis behind the dense layer: that of the embedding's table."""
        return "table" if "table" in scope.sizes else "embed"

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return scope.bind(dim=self.inner(scope))


class MaskedLmProof(Proof, of=MaskedLm):
    """Sampled values and causes."""

    causes = {"bias": FieldCause("bias missing"), "act": FieldCause("activation")}
    samples = {"tied": [True, False], "bias": [True, False], "dense_bias": [True, False]}


class MaskedLmModule(TokenLogitsModule, of=MaskedLm):
    """x (…, embed) -> logits (…, vocab)."""

    answers = VOCAB
    part: MaskedLm
    dense: Linear
    norm: Module
    out: Linear
    bias: Tensor

    def setup(self) -> None:
        self.act = self.part.act.function

    def logits(self, x: Tensor, ctx: Ctx) -> Tensor:
        hidden = ctx.ranks.copy_to_region(self.norm(self.act(self.dense(x, ctx)), ctx), self.answers)
        return self.out(hidden, ctx) + self.bias if self.part.bias else self.out(hidden, ctx)


@dc.dataclass(frozen=True, kw_only=True)
class ByClass(Head):
    """Logits over `classes`, from x or from norm(act(W x + b))."""

    TAPS = {"logits": "pos channel"}

    classes: int = bounded(2, above=0)
    act: Act | None = None  # None: no dense layer (RoBERTa has tanh, DistilBERT relu)
    norm: Norm | None = None  # after the activation (ModernBERT)
    dense_bias: bool = True
    dropout: float = bounded(0.0, at_least=0, below=1)  # before the last matrix

    def axes(self, scope: Scope) -> Scope:
        return scope.add(classes=self.classes)

    def weights(self, scope: Scope) -> list[Weight]:
        out = Weight(name="out.weight", out=("classes",), inp=("embed",), readout=True)
        last = [out, Weight(name="out.bias", out=("classes",), init="zeros", role="bias")]
        return last if self.act is None else [*_dense(self.dense_bias), *last]

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return scope.bind(dim="embed")

    def check(self, scope: Scope) -> list[Problem]:
        if self.norm is not None and self.act is None:
            return [Problem("norm", "needs a dense layer before it", "give an `act`, or norm: null")]
        return []

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randint(0, self.classes, shape, generator=generator)


class ByClassProof(Proof, of=ByClass):
    """Sampled values and idle fields."""

    samples = {"classes": [3, 5], "dense_bias": [True, False], "dropout": [0.0, 0.2]}

    def idle(self, part: ByClass, scope: Scope) -> frozenset[str]:
        return frozenset({"dense_bias"}) if part.act is None else frozenset()


class ByClassModule(TokenLogitsModule, of=ByClass):
    """x (…, embed) -> logits (…, classes)."""

    answers = ("classes",)
    part: ByClass
    dense: Linear
    norm: Module
    out: Linear

    def setup(self) -> None:
        self.act = None if self.part.act is None else self.part.act.function

    def features(self, x: Tensor, ctx: Ctx) -> Tensor:
        return self.hidden(x, ctx)

    def hidden(self, x: Tensor, ctx: Ctx) -> Tensor:
        """(…, embed) -> like x: the dense layer, its norm and dropout."""
        if self.act is not None:
            x = self.act(self.dense(x, ctx))
        if self.part.norm is not None:
            x = self.norm(x, ctx)
        return x if ctx.draws is None else ctx.draws.dropout(ctx, x, self.part.dropout, self)

    def logits(self, x: Tensor, ctx: Ctx) -> Tensor:
        return self.out(x, ctx)


@register("classifier")
class Classifier(ByClass):
    """Sequence classification: logits over `classes` per document."""

    TAPS = {"logits": "channel"}

    pooling: Pool = "first"

    def pools(self) -> bool:
        return True

    def ranks(self) -> bool:
        return self.classes == 1


class ClassifierProof(ByClassProof, of=Classifier):
    """Sampled values."""

    samples = {**ByClassProof.samples, "pooling": ["first", "last", "mean"]}


class ClassifierModule(ByClassModule, of=Classifier):
    """x (…, n, embed) -> logits (documents, classes)."""

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.part, Classifier)
        self.pooling: Pool = self.part.pooling

    def features(self, x: Tensor, ctx: Ctx) -> Tensor:
        return self.hidden(pool(x, ctx.layout, self.pooling), ctx)

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> LossSum:
        logits = self.forward(x, ctx)
        summed = cross_entropy_sum(logits.to(at_least_fp32(logits.dtype)), labels)
        return LossSum(summed, (labels != IGNORED).sum())


@register("token_classifier")
class TokenClassifier(ByClass):
    """Token classification: logits over `classes` per token."""


@register("pooled_embedding")
class PooledEmbedding(Head):
    """One vector per document (sentence embedding)."""

    TAPS = {"vector": "channel"}
    criterion = "cosine"
    embeds = True

    pooling: Pool = "mean"
    dense: bool = False  # through tanh(W · + b), BERT's pooler
    unit: bool = False  # scaled to length 1

    def weights(self, scope: Scope) -> list[Weight]:
        if not self.dense:
            return []
        weight = Weight(name="out.weight", out=("embed",), inp=("embed",))
        return [weight, Weight(name="out.bias", out=("embed",), init="zeros", role="bias")]

    def pools(self) -> bool:
        return True

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*shape, scope.size("embed"), generator=generator, dtype=torch.float64)


class PooledEmbeddingProof(Proof, of=PooledEmbedding):
    """Sampled values."""

    samples = {"pooling": ["mean", "first", "last"], "dense": [False, True], "unit": [False, True]}


class PooledEmbeddingModule(HeadModule, of=PooledEmbedding):
    """x (…, n, embed) -> vector (documents, embed)."""

    part: PooledEmbedding
    out: Linear

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        vector = pool(x, ctx.layout, self.part.pooling)
        if self.part.dense:
            vector = torch.tanh(self.out(vector, ctx))
        if self.part.unit:
            vector = F.normalize(vector.to(at_least_fp32(vector.dtype)), dim=-1).to(vector.dtype)
        return ctx.tap(self, "vector", vector)

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> LossSum:
        """1 − cosine similarity to the label vectors."""
        return _summed(1 - F.cosine_similarity(self.forward(x, ctx), labels.to(x.dtype), dim=-1))


@register("reward")
class Reward(Head):
    """One number per document: a reward model."""

    TAPS = {"value": "channel"}
    criterion = "mse"

    pooling: Pool = "last"

    def axes(self, scope: Scope) -> Scope:
        return scope.add(one=1)

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="out.weight", out=("one",), inp=("embed",), readout=True)]

    def pools(self) -> bool:
        return True

    def ranks(self) -> bool:
        return True

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(*shape, 1, generator=generator, dtype=torch.float64)


class RewardProof(Proof, of=Reward):
    """Sampled values."""

    samples = {"pooling": ["last", "first", "mean"]}


class RewardModule(HeadModule, of=Reward):
    """x (…, n, embed) -> value (documents, 1)."""

    part: Reward
    out: Linear

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        return ctx.tap(self, "value", self.out(pool(x, ctx.layout, self.part.pooling), ctx))

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> LossSum:
        return _summed((self.forward(x, ctx) - labels.to(x.dtype)).square())
