"""Seeded bugs of linear attention, GLA, gated DeltaNet and RWKV-6: normalizers, decays and chunk boundaries."""

from __future__ import annotations

import dataclasses as dc
from typing import Any

import torch
from torch import Tensor

from dovetail.model.model import Model
from dovetail.nn.rows import SequenceRows
from dovetail.ops.scan import delta, gated
from dovetail.parts import feature
from dovetail.parts.mixer import gated_deltanet, gla, linear_attention, rwkv6
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.proof.laws.suite import OWN_NUMBER
from dovetail.spec.scope import Scope

_decay_scan, _gated_scan, _conv = linear_attention.decay_scan, gla.gated_scan, rwkv6.causal_conv
_doubled, _gated_chunked, _delta_chunked = gated._doubled, gated.chunked, delta.chunked


def not_normalized(q: Tensor, k: Tensor, v: Tensor, g: Tensor, seq: SequenceRows, carry: Any) -> tuple[Tensor, Tensor]:
    y, state = _decay_scan(q, k, v, g, seq, carry)
    return torch.cat([y[..., :-1], torch.ones_like(y[..., -1:])], -1), state


def half_of_the_normalizer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, seq: SequenceRows, carry: Any) -> tuple[Tensor, Tensor]:
    y, state = _decay_scan(q, k, v, g, seq, carry)
    return y, torch.cat([state[..., :-1], 0.5 * state[..., -1:]], -1)


def scaled_by_the_call(self: feature.RandomFeaturesModule, k: Tensor) -> Tensor:
    exponent = self.exponent(k)
    return (exponent - exponent.amax((1, 2, 3), keepdim=True)).exp() * self.amplitude


def unseeded_directions(self: feature.RandomFeatures, name: str, scope: Scope) -> Tensor:
    return torch.randn(scope.size("features"), scope.size("head"), dtype=torch.float64)


def keys_do_not_decay(q: Tensor, k: Tensor, a: Tensor, own: Tensor, late: bool) -> tuple[Tensor, ...]:
    scores, q, _, through = _doubled(q, k, a, own, late)
    return scores, q, k, through


def documents_continue(q: Tensor, k: Tensor, v: Tensor, g: Tensor, bonus: Any, document: Any, carry: Tensor) -> Any:
    return _gated_chunked(q, k, v, g, bonus, None, carry)


def decay_detached(q: Tensor, k: Tensor, v: Tensor, g: Tensor, seq: SequenceRows, carry: Any, bonus: Any = None) -> Any:
    return _gated_scan(q, k, v, g.detach(), seq, carry, bonus)


def bonus_lost(q: Tensor, k: Tensor, v: Tensor, g: Tensor, seq: SequenceRows, carry: Any, bonus: Any = None) -> Any:
    return _gated_scan(q, k, v, g, seq, carry)


def recall_not_counted(n: int, heads: int, key: int, value: int) -> int:
    return 4 * n * heads * key * value


def beta_ignored(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, document: Any, carry: Tensor) -> Any:
    return _delta_chunked(q, k, v, g, torch.ones_like(beta), document, carry)


def keys_not_normalized(x: Tensor) -> Tensor:
    return x


def token_of_the_previous_document(
    x: Tensor, weight: Tensor, bias: Any, seq: SequenceRows, conv_state: Any
) -> tuple[Tensor, Tensor]:
    return _conv(x, weight, bias, dc.replace(seq, document=None, ends=None), conv_state)


def with_mixer(**mixer: Any) -> Model:
    """A small Llama with this mixer in its first layer."""
    return spec().set("layers.0.mixer", mixer)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    plain = with_mixer(kind="linear_attention", heads=4, feature={"kind": "relu_features", "floor": 0.2})
    random = with_mixer(kind="linear_attention", heads=4, feature={"kind": "random_features", "features": 11})
    gated_model = with_mixer(kind="gla", heads=2, key_size=5, value_size=6, rank=3)
    delta_model = with_mixer(kind="gated_deltanet", heads=4, key_heads=2, key_size=5, value_size=6)
    rwkv_model = with_mixer(kind="rwkv6", heads=4, mix_rank=3, decay_rank=6)
    return [
        Mutant(
            "linear attention does not normalize",
            OWN_NUMBER,
            instead(linear_attention, "decay_scan", not_normalized),
            plain,
        ),
        Mutant(
            "half of the normalizer is lost between calls",
            "chunked",
            instead(linear_attention, "decay_scan", half_of_the_normalizer),
            plain,
        ),
        Mutant(
            "random features are scaled by the largest of the call",
            "chunked",
            instead(feature.RandomFeaturesModule, "key", scaled_by_the_call),
            random,
        ),
        Mutant(
            "random directions differ at every construction",
            "round_trip",
            instead(feature.RandomFeatures, "constant", unseeded_directions),
            random,
        ),
        Mutant(
            "keys do not decay until the end of the chunk", "fast", instead(gated, "_doubled", keys_do_not_decay), gated_model
        ),
        Mutant(
            "a gated state continues into the next document", "fast", instead(gated, "chunked", documents_continue), rwkv_model
        ),
        Mutant("the decay is constant in backward", "gradient", instead(gla, "gated_scan", decay_detached), gated_model),
        Mutant(
            "the FLOPs of recalling a key are not counted",
            "declared",
            instead(gated_deltanet, "delta_flops", recall_not_counted),
            delta_model,
        ),
        Mutant("the chunked delta rule ignores β", "fast", instead(delta, "chunked", beta_ignored), delta_model),
        Mutant(
            "keys of the delta rule are not normalized",
            OWN_NUMBER,
            instead(gated_deltanet, "_unit", keys_not_normalized),
            delta_model,
        ),
        Mutant("RWKV's bonus is lost", OWN_NUMBER, instead(rwkv6, "gated_scan", bonus_lost), rwkv_model),
        Mutant(
            "token shift reads the previous document",
            "padded",
            instead(rwkv6, "causal_conv", token_of_the_previous_document),
            rwkv_model,
        ),
    ]
