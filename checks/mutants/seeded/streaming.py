"""Seeded bugs of streaming positions: distances to the first tokens, positions in the cache, precision of angles."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.parts.position.streaming import StreamingModule
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.proof.laws.suite import OWN_NUMBER
from dovetail.state.slots import Ring

_in_sequence, _on_read = StreamingModule.in_sequence, StreamingModule.on_read


def distances_grow(self: StreamingModule, layout: TokenLayout) -> TokenLayout:
    return _in_sequence(self, layout)


def capped_too_low(self: StreamingModule, layout: TokenLayout) -> TokenLayout:
    return TokenLayout.of(layout.order.clamp_max(self.last - 1).double(), layout.seg, layout.row)


def counted_from_the_call(self: StreamingModule, layout: TokenLayout) -> TokenLayout:
    place = (layout.order - layout.order.amin(-1, keepdim=True)).clamp_max(self.last)
    return TokenLayout.of(place.double(), layout.seg, layout.row)


def position_of_the_last(self: StreamingModule, layout: TokenLayout) -> TokenLayout:
    last = layout.order.amax(-1, keepdim=True).clamp_max(self.last)
    return TokenLayout.of(last.expand_as(layout.order).double(), layout.seg, layout.row)


def first_key_scored_twice(self: StreamingModule, k: Tensor, layout: TokenLayout) -> Tensor:
    k = self.of.on_read(k, self.in_sequence(layout))
    kept = (layout.order < self.kept)[..., None, None]
    return torch.cat([k, k.masked_fill(~kept, 0.0)], -1)


def first_by_place_in_the_row(self: StreamingModule, k: Tensor, layout: TokenLayout) -> Tensor:
    place = torch.arange(layout.n).expand_as(layout.order)
    return _on_read(self, k, TokenLayout.of(torch.where(layout.order < self.kept, place, layout.order), layout.seg, layout.row))


def learned_keys_in_the_window(self: StreamingModule, k: Tensor) -> Tensor:
    return torch.cat([k, torch.zeros_like(k)], -1)


def learned_keys_not_widened(self: StreamingModule, k: Tensor) -> Tensor:
    return k


def angles_in_single_precision(self: StreamingModule, layout: TokenLayout) -> TokenLayout:
    return layout


def bias_grows(self: StreamingModule, q: TokenLayout, k: TokenLayout, *tables: Tensor) -> Tensor:
    return self.of.score(q, k, *tables)


def first_tokens_dropped(self: Ring, length: int) -> range:
    return range(max(0, length - self.turn), length)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    mask = ["causal", {"kind": "window", "size": 5, "keep": 2}]
    model, alibi = spec(mask=mask, position="streaming"), spec(mask=mask, position={"kind": "streaming", "of": "alibi"})
    prefix = spec(mask=mask, position="streaming", prefix=3)
    in_cache = [
        ("distances to the first tokens grow without bound", OWN_NUMBER, distances_grow),
        ("positions in the cache are capped one too low", OWN_NUMBER, capped_too_low),
        ("positions in the cache count from the start of the call", "chunked", counted_from_the_call),
        ("every query of a chunk has the position of the last", "chunked", position_of_the_last),
    ]
    return [
        *[Mutant(name, law, instead(StreamingModule, "in_cache", bug), model) for name, law, bug in in_cache],
        Mutant(
            "a first key is scored twice",
            OWN_NUMBER,
            instead(StreamingModule, "on_read", first_key_scored_twice),
            model,
        ),
        Mutant(
            "first tokens are recognized by their place in the row",
            "padded",
            instead(StreamingModule, "on_read", first_by_place_in_the_row),
            model,
        ),
        Mutant(
            "learned keys are scored as those of the window",
            OWN_NUMBER,
            instead(StreamingModule, "placeless", learned_keys_in_the_window),
            prefix,
        ),
        Mutant(
            "learned keys are not as wide as rotated queries",
            "tapped",
            instead(StreamingModule, "placeless", learned_keys_not_widened),
            prefix,
        ),
        Mutant(
            "angles are computed in float32",
            OWN_NUMBER,
            instead(StreamingModule, "in_sequence", angles_in_single_precision),
            model,
        ),
        Mutant(
            "the ALiBi bias of the first tokens grows without bound",
            OWN_NUMBER,
            instead(StreamingModule, "score", bias_grows),
            alibi,
        ),
        Mutant("a ring drops the first tokens of a stream", "chunked", instead(Ring, "positions", first_tokens_dropped), model),
    ]
