"""Bugs of streams that go on past a window: kept tokens that drift away, ranks that follow the call, angles that drown."""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.core.layout import TokenLayout
from dovetail.lawbook.seeded.bug import Mutant, instead, spec
from dovetail.lawbook.suite import OWN_NUMBER
from dovetail.parts.position.streaming import StreamingModule
from dovetail.state.slots import Ring

_in_text, _on_read = StreamingModule.in_text, StreamingModule.on_read


def kept_tokens_drift_away(self: StreamingModule, layout: TokenLayout) -> TokenLayout:
    return _in_text(self, layout)


def one_rank_too_few(self: StreamingModule, layout: TokenLayout) -> TokenLayout:
    return TokenLayout.of(layout.order.clamp_max(self.last - 1).double(), layout.seg, layout.row)


def ranks_count_from_the_call(self: StreamingModule, layout: TokenLayout) -> TokenLayout:
    rank = (layout.order - layout.order.amin(-1, keepdim=True)).clamp_max(self.last)
    return TokenLayout.of(rank.double(), layout.seg, layout.row)


def all_stand_where_the_last_stands(self: StreamingModule, layout: TokenLayout) -> TokenLayout:
    last = layout.order.amax(-1, keepdim=True).clamp_max(self.last)
    return TokenLayout.of(last.expand_as(layout.order).double(), layout.seg, layout.row)


def a_kept_key_answers_twice(self: StreamingModule, k: Tensor, layout: TokenLayout) -> Tensor:
    k = self.of.on_read(k, self.in_text(layout))
    kept = (layout.order < self.kept)[..., None, None]
    return torch.cat([k, k.masked_fill(~kept, 0.0)], -1)


def kept_by_place_in_the_row(self: StreamingModule, k: Tensor, layout: TokenLayout) -> Tensor:
    place = torch.arange(layout.n).expand_as(layout.order)
    return _on_read(self, k, TokenLayout.of(torch.where(layout.order < self.kept, place, layout.order), layout.seg, layout.row))


def angles_in_single_precision(self: StreamingModule, layout: TokenLayout) -> TokenLayout:
    return layout


def bias_grows_for_ever(self: StreamingModule, q: TokenLayout, k: TokenLayout, *tables: Tensor) -> Tensor:
    return self.of.score(q, k, *tables)


def nothing_is_kept(self: Ring, held: int) -> range:
    return range(max(0, held - self.turn), held)


def mutants() -> list[Mutant]:
    """The rows."""
    mask = ["causal", {"kind": "window", "size": 5, "keep": 2}]
    model, sloped = spec(mask=mask, position="streaming"), spec(mask=mask, position={"kind": "streaming", "of": "alibi"})
    in_cache = [
        ("kept tokens drift away as the text goes on", OWN_NUMBER, kept_tokens_drift_away),
        ("a cache counts one rank too few", OWN_NUMBER, one_rank_too_few),
        ("ranks in the cache count from the start of the call", "chunked", ranks_count_from_the_call),
        ("every query of a chunk stands where its last does", "chunked", all_stand_where_the_last_stands),
    ]
    return [
        *[Mutant(name, law, instead(StreamingModule, "in_cache", bug), model) for name, law, bug in in_cache],
        Mutant(
            "a kept key answers as near and as kept",
            OWN_NUMBER,
            instead(StreamingModule, "on_read", a_kept_key_answers_twice),
            model,
        ),
        Mutant(
            "padding is taken for what is kept", "padded", instead(StreamingModule, "on_read", kept_by_place_in_the_row), model
        ),
        Mutant(
            "angles of a long stream drown in float32",
            OWN_NUMBER,
            instead(StreamingModule, "in_text", angles_in_single_precision),
            model,
        ),
        Mutant(
            "ALiBi pushes kept tokens away for ever", OWN_NUMBER, instead(StreamingModule, "score", bias_grows_for_ever), sloped
        ),
        Mutant("a stream lets go of what it should keep", "chunked", instead(Ring, "positions", nothing_is_kept), model),
    ]
