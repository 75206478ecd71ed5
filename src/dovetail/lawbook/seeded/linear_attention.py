"""Bugs of linear attention, gated memories and the delta rule: weights that do not sum to 1, chunks that do not meet."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from dovetail.core.rows import SequenceRows
from dovetail.core.scope import Scope
from dovetail.lawbook.seeded.bug import Mutant, instead, spec
from dovetail.lawbook.suite import OWN_NUMBER
from dovetail.model import Model
from dovetail.ops.scan import delta, gated
from dovetail.parts import feature
from dovetail.parts.mixer import gated_deltanet, gla, linear_attention, rwkv6

_decay_scan, _gated_scan, _conv = linear_attention.decay_scan, gla.gated_scan, rwkv6.causal_conv
_doubled, _gated_chunked, _delta_chunked = gated._doubled, gated.chunked, delta.chunked


def weights_sum_to_anything(q: Tensor, k: Tensor, v: Tensor, g: Tensor, seq: SequenceRows, carry: Any) -> tuple[Tensor, Tensor]:
    y, memory = _decay_scan(q, k, v, g, seq, carry)
    return torch.cat([y[..., :-1], torch.ones_like(y[..., -1:])], -1), memory


def sum_not_handed_on(q: Tensor, k: Tensor, v: Tensor, g: Tensor, seq: SequenceRows, carry: Any) -> tuple[Tensor, Tensor]:
    y, memory = _decay_scan(q, k, v, g, seq, carry)
    return y, torch.cat([memory[..., :-1], 0.5 * memory[..., -1:]], -1)


def by_the_largest_of_the_call(self: feature.RandomFeaturesModule, k: Tensor) -> Tensor:
    exponent = self.exponent(k)
    return (exponent - exponent.amax((1, 2, 3), keepdim=True)).exp() * self.share


def drawn_by_chance(self: feature.RandomFeatures, name: str, scope: Scope) -> Tensor:
    return torch.randn(scope.size("features"), scope.size("head"), dtype=torch.float64)


def keys_do_not_fade_to_the_end(q: Tensor, k: Tensor, a: Tensor, own: Tensor, late: bool) -> tuple[Tensor, ...]:
    scores, q, _, through = _doubled(q, k, a, own, late)
    return scores, q, k, through


def documents_in_one_memory(q: Tensor, k: Tensor, v: Tensor, g: Tensor, bonus: Any, document: Any, carry: Tensor) -> Any:
    return _gated_chunked(q, k, v, g, bonus, None, carry)


def fading_held_fixed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, seq: SequenceRows, carry: Any, bonus: Any = None) -> Any:
    return _gated_scan(q, k, v, g.detach(), seq, carry, bonus)


def bonus_lost(q: Tensor, k: Tensor, v: Tensor, g: Tensor, seq: SequenceRows, carry: Any, bonus: Any = None) -> Any:
    return _gated_scan(q, k, v, g, seq, carry)


def recalling_is_free(n: int, heads: int, key: int, value: int) -> int:
    return 4 * n * heads * key * value


def believed_wholly(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, document: Any, carry: Tensor) -> Any:
    return _delta_chunked(q, k, v, g, torch.ones_like(beta), document, carry)


def of_any_length(x: Tensor) -> Tensor:
    return x


def last_token_of_the_neighbor(x: Tensor, weight: Tensor, bias: Any, seq: SequenceRows, tail: Any) -> tuple[Tensor, Tensor]:
    return _conv(x, weight, bias, dc.replace(seq, document=None, ends=None), tail)


def with_mixer(**mixer: Any) -> Model:
    """A small Llama whose first layer mixes otherwise."""
    return spec().set("layers.0.mixer", mixer)


def mutants() -> list[Mutant]:
    """The rows."""
    plain = with_mixer(kind="linear_attention", heads=4, feature={"kind": "relu_features", "floor": 0.2})
    random = with_mixer(kind="linear_attention", heads=4, feature={"kind": "random_features", "features": 11})
    fading = with_mixer(kind="gla", heads=2, key_size=5, value_size=6, rank=3)
    corrected = with_mixer(kind="gated_deltanet", heads=4, key_heads=2, key_size=5, value_size=6)
    mixed = with_mixer(kind="rwkv6", heads=4, mix_rank=3, decay_rank=6)
    return [
        Mutant(
            "weights of linear attention do not sum to 1",
            OWN_NUMBER,
            instead(linear_attention, "decay_scan", weights_sum_to_anything),
            plain,
        ),
        Mutant(
            "half of the sum of weights is forgotten",
            "chunked",
            instead(linear_attention, "decay_scan", sum_not_handed_on),
            plain,
        ),
        Mutant(
            "random features are scaled by the largest of the call",
            "chunked",
            instead(feature.RandomFeaturesModule, "key", by_the_largest_of_the_call),
            random,
        ),
        Mutant(
            "random directions are drawn anew in every process",
            "round_trip",
            instead(feature.RandomFeatures, "constant", drawn_by_chance),
            random,
        ),
        Mutant(
            "keys do not fade until the chunk's end", "fast", instead(gated, "_doubled", keys_do_not_fade_to_the_end), fading
        ),
        Mutant(
            "a gated memory goes on into the next document", "fast", instead(gated, "chunked", documents_in_one_memory), mixed
        ),
        Mutant("what fades is a constant in backward", "gradient", instead(gla, "gated_scan", fading_held_fixed), fading),
        Mutant(
            "what a key recalls is not counted",
            "declared",
            instead(gated_deltanet, "delta_flops", recalling_is_free),
            corrected,
        ),
        Mutant("a chunk believes every token wholly", "fast", instead(delta, "chunked", believed_wholly), corrected),
        Mutant(
            "keys of the delta rule are of any length",
            OWN_NUMBER,
            instead(gated_deltanet, "_unit", of_any_length),
            corrected,
        ),
        Mutant("RWKV's bonus is lost", OWN_NUMBER, instead(rwkv6, "gated_scan", bonus_lost), mixed),
        Mutant("the token before is a neighbor's", "padded", instead(rwkv6, "causal_conv", last_token_of_the_neighbor), mixed),
    ]
