"""Shrink a spec: the same parts with small sizes, all different, in the first layers that show every kind of layer.

    heads 32, kv_heads 8, head 128, width 4096    ->    heads 6, kv_heads 2, head 12, width 72

Relations between sizes that hold in the spec hold in the small one: as many KV heads as heads, heads that fill the width, an
inner width that is a multiple of the width, equal sizes of encoder and decoder. Several small sizes are tried until the family
can express the result.
"""

from __future__ import annotations

import dataclasses as dc
import itertools
from collections.abc import Iterator
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.hf import to_hf
from dovetail.hf.resolved import explicit
from dovetail.model.model import Model
from dovetail.nn.block import Block
from dovetail.spec.check import check
from dovetail.spec.part import Part

# every number of heads divides the width: some families of transformers ask for it, though a head has its own size
HEADS, HEAD, WIDTH, VOCAB = (6, 4, 8), (12, 16, 8), 96, 61
# multiples of 8, since torch's grouped matmul of experts takes rows of 16 bytes alone; the last are multiples of the width
HIDDEN = ((40, 24, 56, 32), (40, 24, 48, 80), (4, 2, 3, 1))
# the largest value of a field by its name, whatever part has it; equal fields stay equal
LARGEST = {
    "state_size": 5,
    "conv_size": 4,
    "rank": 7,
    "kv_rank": 20,
    "q_rank": 14,
    "nope": 9,
    "rope": 12,
    "value": 7,
    "key_size": 5,
    "value_size": 9,
    "experts": 8,
    "top_k": 2,
    "groups": 4,
    "top_groups": 2,
    "length": 128,
    "size": 7,
    "classes": 5,
    "buckets": 32,
    "max_distance": 40,
    "original": 32,
    "image": 12,
    "patch": 4,
    "types": 3,
    "piece": 6,
}
MAX_LAYERS = 12


@dc.dataclass
class Sizes:
    """One choice of small sizes."""

    heads: int
    head: int
    hidden: tuple[int, ...]
    old_width: int
    full: bool  # whether heads · head is the width, as in the spec
    tokens: int | None = None  # of an image
    hidden_sizes: dict[int, int] = dc.field(default_factory=dict)  # size of the spec -> small size

    @property
    def width(self) -> int:
        """The small width."""
        return self.heads * self.head if self.full else WIDTH

    def hidden_size(self, old: int) -> int:
        """A small hidden size, the same for equal sizes of the spec."""
        if old % 2 == 0 and old // 2 in self.hidden_sizes:  # twice as wide stays so
            return 2 * self.hidden_sizes[old // 2]
        if old not in self.hidden_sizes:
            size = self.hidden[len(self.hidden_sizes) % len(self.hidden)]
            self.hidden_sizes[old] = size * (self.width if max(self.hidden) < 8 else 1)
        return self.hidden_sizes[old]


def shrink(spec: Model, family: str | None = None) -> Model:
    """The spec with small sizes that the family can express, by default the first that can express the spec. Raises SpecError
    where no family can, or no small sizes fit."""
    old, family = explicit(spec), family or to_hf(spec).dialect
    refused: SpecError | None = None
    for sizes in _candidates(old):
        try:
            small = _with_sizes(dc.replace(old, layers=representative(old.layers)), sizes)
            if small.encoder is not None:
                small = dc.replace(small, encoder=dc.replace(small.encoder, layers=representative(small.encoder.layers)))
            check(small)
            to_hf(small, family)
            return small
        except SpecError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def representative(layers: tuple[Block, ...]) -> tuple[Block, ...]:
    """The first layers, as many as hold one of each kind of layer, and at least two."""
    firsts = [i for i, layer in enumerate(layers) if layer not in layers[:i]]
    return layers[: min(max(firsts[-1] + 1, 2), MAX_LAYERS)]


def _candidates(spec: Model) -> Iterator[Sizes]:
    mixers = [mixer for block in spec.layers for mixer in block.mixers().values()]
    shapes = [(_field(mixer, "heads"), _field(mixer, "head")) for mixer in mixers]
    full = all(heads * head == spec.width for heads, head in shapes if heads and head)
    tokens: int | None = _with_sizes(spec.embed, Sizes(1, 1, (), spec.width, full)).tokens()
    for hidden, heads, head in itertools.product(HIDDEN, HEADS, HEAD):
        yield Sizes(heads, head, hidden, spec.width, full, tokens)


def _field(part: Part, name: str) -> Any:
    return getattr(part, name) if name in part.__dataclass_fields__ else None


def _with_sizes(value: Any, sizes: Sizes) -> Any:
    """The tree with small sizes."""
    if isinstance(value, tuple):
        if value and isinstance(value[0], float):  # one factor per rotary pair
            return value[: sizes.head // 2]
        if value and isinstance(value[0], int):  # rotary pairs per coordinate
            return _divided(sizes.head // 2, value)
        return tuple(_with_sizes(item, sizes) for item in value)
    if not isinstance(value, Part):
        return value
    fields = {f.name: _with_sizes(getattr(value, f.name), sizes) for f in dc.fields(value)}
    return dc.replace(value, **{name: _small(value, name, new, sizes) for name, new in fields.items()})


def _divided(total: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """A number divided in about these proportions, none of them 0."""
    first = [max(1, total * share // sum(shares)) for share in shares[:-1]]
    return (*first, total - sum(first))


def _small(part: Part, name: str, value: Any, sizes: Sizes) -> Any:
    """The small value of one field of a part."""
    if isinstance(value, float) and value == sizes.old_width**-0.5:  # T5's logits
        return sizes.width**-0.5
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    heads = _field(part, "heads")
    if name == "width":
        return sizes.width if value == sizes.old_width else 48
    if name == "vocab":
        embed = _field(part, "embed")
        return min(value, VOCAB) if embed is None or embed.causal() else value  # a model of images has none
    if name == "hidden":
        return sizes.hidden_size(value)
    if name == "inner" and value % sizes.old_width == 0:
        return value // sizes.old_width * sizes.width
    if name == "heads":
        return min(value, sizes.heads)
    if name in ("kv_heads", "key_heads"):
        return min(heads, sizes.heads) if value == heads else 1 if value == 1 else 2
    if name == "head":
        return sizes.width // min(heads, sizes.heads) if heads and value * heads == sizes.old_width else sizes.head
    if name == "length" and sizes.tokens:
        return sizes.tokens
    return min(value, LARGEST.get(name, value))
