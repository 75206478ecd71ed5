"""Seeded bugs of values and caches that layers share."""

from __future__ import annotations

import dataclasses as dc

import torch.nn.functional as F
from torch import Tensor

from dovetail.files.spec import from_yaml
from dovetail.nn.cross_layer import DISCARDED, Values
from dovetail.nn.ctx import Ctx
from dovetail.nn.rows import SequenceRows
from dovetail.nn.view import KV
from dovetail.parts.earlier import SharedKVModule, ValueResidualModule
from dovetail.parts.mixer.ngram import Ngram, NgramModule
from dovetail.parts.ple import PleModule
from dovetail.proof.laws.mutant import Mutant, instead
from dovetail.proof.laws.suite import OWN_NUMBER
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State
from dovetail.state.frame import SharedView

SHARED = """
width: 28
vocab: 62
layers:
- mixer: {heads: 6, kv_heads: 2, head: 12, mask: [causal, {kind: window, size: 4}]}
  ffn: {hidden: 44}
- mixer: {heads: 6, kv_heads: 2, head: 12, earlier: {kind: value_residual, layer: 0}}
  ffn: {hidden: 36}
- mixer: {heads: 4, kv_heads: 2, head: 12, earlier: {kind: shared_kv, layer: 0}, mask: [causal, {kind: window, size: 4}]}
  ffn: {hidden: 44}
"""


NGRAMS = """
width: 28
vocab: 62
layers: [{repeat: 2, mixer: {kind: ngram, rows: 13, piece: 5}, ffn: {hidden: 44}}]
"""

_found, _constant = NgramModule.found, Ngram.constant


def counted_twice(self: State, scope: Scope, n: int) -> int:
    return self.copies * scope.size(*self.axes) * self.entries(n)


def what_is_left(self: SharedView) -> KV:
    return self.owner.stored()


def turned(self: SharedKVModule, k: Tensor, v: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    return values["k"].flip(-1), values["v"]


def swapped(self: ValueResidualModule, k: Tensor, v: Tensor, values: Values) -> tuple[Tensor, Tensor]:
    return k, self.mix[1] * v + self.mix[0] * values["v"]


def forgetful(self: NgramModule, ids: Tensor, seq: SequenceRows, last: Tensor | None) -> tuple[Tensor, Tensor]:
    return _found(self, ids, seq, None)


def across_documents(self: NgramModule, ids: Tensor, seq: SequenceRows, last: Tensor | None) -> tuple[Tensor, Tensor]:
    return _found(self, ids, dc.replace(seq, document=None, ends=None), last)


def without_order(self: Ngram, name: str, scope: Scope) -> Tensor:
    drawn = _constant(self, name, scope)
    return drawn[:, :1] * (drawn != 0)


def without_scale(self: PleModule, x: Tensor, ctx: Ctx, values: Values = DISCARDED) -> Tensor:
    found = F.embedding(values["inputs"], self.table)
    own = self.found_norm(self.project(values["embedded"], ctx) * self.width**-0.5, ctx)
    return self.out_norm(self.o(self.act(self.gate(x, ctx)) * (own + found) * 2**-0.5, ctx), ctx)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    spec = from_yaml(SHARED)
    ngrams = from_yaml(NGRAMS)
    tables = ngrams.set("layers", [{"kind": "ple_block", "mixer": {"heads": 7}, "ple": {"kind": "ple", "piece": 5}}])
    return [
        Mutant("a cache that two layers read is counted twice", "declared", instead(State, "values", counted_twice), spec),
        Mutant(
            "a layer that reads another's ring misses what a long chunk has overwritten",
            "chunked",
            instead(SharedView, "stored", what_is_left),
            spec,
        ),
        Mutant("shared keys are changed in a whole pass alone", "chunked", instead(SharedKVModule, "forward", turned), spec),
        Mutant(
            "the factors of a value residual are swapped",
            OWN_NUMBER,
            instead(ValueResidualModule, "forward", swapped),
            spec,
        ),
        Mutant("decoding forgets the last token ids", "chunked", instead(NgramModule, "found", forgetful), ngrams),
        Mutant("per-layer embeddings are not scaled", OWN_NUMBER, instead(PleModule, "forward", without_scale), tables),
        Mutant("n-grams reach into the document before", "padded", instead(NgramModule, "found", across_documents), ngrams),
        Mutant(
            "a hash ignores the order of tokens",
            OWN_NUMBER,
            instead(Ngram, "constant", without_order),
            ngrams,
        ),
    ]
