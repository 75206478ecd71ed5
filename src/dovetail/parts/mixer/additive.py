"""Additive (Bahdanau) and multiplicative (Luong) attention: scores from an MLP or a bilinear form; the values are the tokens.

    additive_attention         s_ij = uᵀ tanh(W_q x_i + W_k y_j)          Bahdanau et al. 2014
    multiplicative_attention   s_ij = x_iᵀ W y_j · scale                   Luong et al. 2015 (general)
    out = Σ_heads (Σ_j softmax(s_i)_j y_j) W_o

The papers have one head, a decoder's state as x_i and an encoder's as y_j: `additive_cross_attention` and
`multiplicative_cross_attention`, whose y is the encoder output. In the other two y = x, the tokens of one residual stream.

Shapes: x (…, n, embed)   y (…, m, source)   q, k (…, n or m, heads, hidden)   s (…, heads, n, m)   z (…, n, heads, source).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mask
from dovetail.nn.linear import Linear
from dovetail.nn.module import at_least_fp32
from dovetail.nn.softmax import CrossModule, SoftmaxCross, SoftmaxMixer, SoftmaxMixerProof, ValuedModule
from dovetail.nn.view import KVView
from dovetail.ops.attend import WHOLE, attend
from dovetail.ops.implementation import chunk, reference
from dovetail.ops.mask import dense, pairs
from dovetail.spec.field import bounded
from dovetail.spec.part import Part, Problem, child, register
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State, Weight


class TokenValued(SoftmaxMixer):
    """A softmax mixer whose values are the tokens themselves."""

    TAPS = {
        "q": "pos head channel",
        "tokens": "key channel",
        "pattern": "head query key",
        "z": "pos head channel",
        "out": "pos channel",
    }

    source: ClassVar[str] = "embed"  # the axis of those tokens
    values: ClassVar[str] = "tokens"

    def axes(self, scope: Scope) -> Scope:
        return scope.add(heads=self.heads)

    def children(self) -> dict[str, Part]:
        return {}

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="o.weight", out=("embed",), inp=("heads", self.source)), self.head_number()]

    def state(self, scope: Scope) -> list[State]:
        return self.cached(scope, State(name="tokens", axes=(self.source,)))

    def check(self, scope: Scope) -> list[Problem]:
        return self.check_mask(scope)


class TokenValuedProof(SoftmaxMixerProof, of=TokenValued):
    """Sampled values and what fields act on."""

    acts_on = dict.fromkeys(("mask", "scale"), ("q", "k", "u"))
    samples = {"heads": [2, 4]}


class Additive(TokenValued):
    """Scores from an MLP with one hidden layer."""

    TAPS = {
        "q": "pos head channel",
        "k": "pos head channel",
        "keys": "key head channel",
        "tokens": "key channel",
        "pattern": "head query key",
        "z": "pos head channel",
        "out": "pos channel",
    }

    hidden: int | None

    def axes(self, scope: Scope) -> Scope:
        return super().axes(scope).add(hidden=scope.size("embed") if self.hidden is None else self.hidden)

    def weights(self, scope: Scope) -> list[Weight]:
        read = {"q": "embed", "k": self.source}
        projections = [Weight(name=f"{name}.weight", out=("heads", "hidden"), inp=(axis,)) for name, axis in read.items()]
        return [
            *projections,
            Weight(name="u", batch=("heads",), out=("hidden",), role="gate", init="normal"),
            *super().weights(scope),
        ]

    def state(self, scope: Scope) -> list[State]:
        return [*self.cached(scope, State(name="keys", axes=("heads", "hidden"))), *super().state(scope)]

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        each = 2 * self.heads * (scope.size("hidden") + scope.size(self.source))
        return each * n * n, each * pairs(self.visibility(), n)


class AdditiveProof(TokenValuedProof, of=Additive):
    """Sampled values."""

    samples = {**TokenValuedProof.samples, "hidden": [10, 7]}


@register("additive_attention")
class AdditiveAttention(Additive):
    """Bahdanau attention: scores from an MLP with one hidden layer."""

    heads: int = bounded(1, above=0, widens=True)
    mask: Mask = child("causal")
    hidden: int | None = bounded(None, above=0, widens=True)  # None: the width


@register("additive_cross_attention")
class AdditiveCrossAttention(SoftmaxCross, Additive):
    """Bahdanau attention of a decoder to its encoder's output: `cross: additive_attention`."""

    heads: int = bounded(1, above=0, widens=True)
    hidden: int | None = bounded(None, above=0, widens=True)  # None: the width of the decoder

    source = "encoder"
    own = "additive_attention"


class AdditiveAttentionModule(ValuedModule, of=AdditiveAttention):
    """x (…, n, embed) -> like x."""

    part: Additive
    q: Linear
    k: Linear
    u: Tensor

    def setup(self) -> None:
        super().setup()
        self.size = self.scope.size("hidden")

    def entries(self, tokens: Tensor, ctx: Ctx) -> tuple[Tensor, ...]:
        """The keys of the tokens, and the tokens."""
        return ctx.tap(self, "k", self.k(tokens, ctx).unflatten(-1, (-1, self.size))), tokens

    def forward(self, x: Tensor, ctx: Ctx, view: KVView = WHOLE) -> Tensor:
        layout = ctx.layout
        q = ctx.tap(self, "q", self.q(x, ctx).unflatten(-1, (-1, self.size)))
        (k, tokens), key_layout = self.kv(x, ctx, view).entries()
        k, tokens = ctx.tap(self, "keys", k), ctx.tap(self, "tokens", tokens)
        q, k = q.transpose(-3, -2).unsqueeze(-2), k.transpose(-3, -2).unsqueeze(-3)  # (…, heads, n, 1, hidden), (…, 1, m, …)
        visible, empty = dense(self.mask, layout, key_layout, self.head_number)
        edit = self.edit(ctx)
        # the hidden layer of all pairs is (…, heads, n, m, hidden): a chunk of queries at a time, unless a listener wants all
        size = layout.n if reference() or edit is not None else chunk()
        z: list[Tensor] = []
        for begin in range(0, layout.n, size):
            queries = slice(begin, begin + size)
            scores = self.scores(q[..., queries, :, :], k).masked_fill(~visible[..., queries, :], -torch.inf)
            blind = empty[..., queries, :]
            probs = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
            probs = probs if edit is None else edit(probs, layout, key_layout)
            z.append(probs.to(tokens.dtype) @ tokens.unsqueeze(-3))
        return self.project_out(torch.cat(z, -2).transpose(-3, -2), ctx)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(…, heads, n, m)."""
        score_dtype = at_least_fp32(q.dtype)
        hidden = torch.tanh(q.to(score_dtype) + k.to(score_dtype))
        return (hidden.flatten(-3, -2) @ self.u.unsqueeze(-1).to(score_dtype)).view(hidden.shape[:-1])


class AdditiveCrossModule(CrossModule, AdditiveAttentionModule, of=AdditiveCrossAttention):
    """x (…, n, embed), encoder output (…, m, encoder) -> like x."""


class Multiplicative(TokenValued):
    """Scores from a bilinear form of the two tokens; the cache holds the tokens themselves."""

    scale: float

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="q.weight", out=("heads", self.source), inp=("embed",)), *super().weights(scope)]

    def cost(self, scope: Scope, n: int) -> tuple[int, int]:
        each = 4 * self.heads * scope.size(self.source)
        return each * n * n, each * pairs(self.visibility(), n)


class MultiplicativeProof(TokenValuedProof, of=Multiplicative):
    """Sampled values."""

    samples = {**TokenValuedProof.samples, "scale": [0.3, 0.15]}


@register("multiplicative_attention")
class MultiplicativeAttention(Multiplicative):
    """Luong attention: scores from a bilinear form of the two tokens; the cache holds the tokens themselves."""

    heads: int = bounded(1, above=0, widens=True)
    mask: Mask = child("causal")
    scale: float = bounded(1.0, above=0)


@register("multiplicative_cross_attention")
class MultiplicativeCrossAttention(SoftmaxCross, Multiplicative):
    """Luong attention of a decoder to its encoder's output: `cross: multiplicative_attention`."""

    heads: int = bounded(1, above=0, widens=True)
    scale: float = bounded(1.0, above=0)

    source = "encoder"
    own = "multiplicative_attention"


class MultiplicativeAttentionModule(ValuedModule, of=MultiplicativeAttention):
    """x (…, n, embed) -> like x."""

    part: Multiplicative
    q: Linear

    def setup(self) -> None:
        super().setup()
        self.scale, self.size = self.part.scale, self.scope.size(self.part.source)

    def forward(self, x: Tensor, ctx: Ctx, view: KVView = WHOLE) -> Tensor:
        q = ctx.tap(self, "q", self.q(x, ctx).unflatten(-1, (-1, self.size)))  # x_iᵀ W of each head
        (tokens,), key_layout = self.kv(x, ctx, view).entries()
        tokens = ctx.tap(self, "tokens", tokens).unsqueeze(-2)  # one KV head, whose keys are its values
        return self.project_out(attend(q, tokens, tokens, self.scoring(ctx), ctx.layout, key_layout, self.edit(ctx)), ctx)


class MultiplicativeCrossModule(CrossModule, MultiplicativeAttentionModule, of=MultiplicativeCrossAttention):
    """x (…, n, embed), encoder output (…, m, encoder) -> like x."""
