"""Next-sentence prediction: whether the second text of a document follows the first (BERT).

    logits = W tanh(W₁ x + b₁) + b          x: the first token of the document; class 0: it follows, class 1: it does not

The head of BertForNextSentencePrediction. It computes what a classifier of two classes does; it is a kind of its own, since a
file of that class has its weights elsewhere than one of BertForSequenceClassification.              Devlin et al. 2018
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Head, HeadModule
from dovetail.nn.linear import Linear
from dovetail.nn.loss import LossSum
from dovetail.ops.pooling import pool
from dovetail.ops.vocab import chunked_cross_entropy
from dovetail.spec.part import register
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight

ANSWERS = 2  # it follows, it does not


@register("next_sentence")
class NextSentence(Head):
    """Next-sentence prediction: two logits per document, whether its second text follows the first."""

    TAPS = {"logits": "channel"}

    def axes(self, scope: Scope) -> Scope:
        return scope.add(classes=ANSWERS)

    def weights(self, scope: Scope) -> list[Weight]:
        return [
            Weight(name="dense.weight", out=("embed",), inp=("embed",)),
            Weight(name="dense.bias", out=("embed",), init="zeros", role="bias"),
            Weight(name="out.weight", out=("classes",), inp=("embed",), readout=True),
            Weight(name="out.bias", out=("classes",), init="zeros", role="bias"),
        ]

    def pools(self) -> bool:
        return True

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randint(0, ANSWERS, shape, generator=generator)


class NextSentenceModule(HeadModule, of=NextSentence):
    """x (…, n, embed) -> logits (documents, 2)."""

    part: NextSentence
    dense: Linear
    out: Linear

    def features(self, x: Tensor, ctx: Ctx) -> Tensor:
        """(…, n, embed) -> (documents, embed): BERT's pooler."""
        return torch.tanh(self.dense(pool(x, ctx.layout, "first"), ctx))

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        return ctx.tap(self, "logits", self.out(self.features(x, ctx), ctx))

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> LossSum:
        return chunked_cross_entropy(lambda part: self.out(part, ctx), self.features(x, ctx), labels)
