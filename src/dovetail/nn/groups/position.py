"""Positions act on the embeddings (…, n, embed), on queries and keys (…, n, heads, head), or on the scores."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import Module
from dovetail.spec.part import Part
from dovetail.spec.scope import Scope


class Position(Part):
    """Encodes token positions, at one of three places; at the other two it does nothing.

    site "stream": added to the embeddings (the field `position` of the model). site "mixer": rotates q and k, or adds a bias
    to the scores (the field `position` of an attention).
    """

    group: ClassVar[str] = "position"
    site: ClassVar[Literal["stream", "mixer", "any"]] = "mixer"
    rotates: ClassVar[bool] = False  # whether it rotates each key by the key's own position
    slope: ClassVar[str | None] = None  # the constant s (heads,) where the bias of the scores is −s · |distance|

    def coordinates(self) -> int:
        """The number of coordinates that it encodes; with 1, of tokens that have several, their order."""
        return 1

    def widens(self, scope: Scope) -> bool:
        """Whether rotated queries and keys have more channels than a head; `PositionModule.placeless` then gives learned keys
        as many."""
        return False

    def rotates_on_read(self) -> bool:
        """Whether keys are stored without rotation and rotated when they are read."""
        return False


class PositionModule(Module, of=Position):
    """The identity at every place. The model and attention call all methods, whichever kind of position they have."""

    def embed(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Add positions to the embeddings (…, n, embed)."""
        return x

    def rotate(self, q: Tensor, layout: TokenLayout) -> Tensor:
        """Rotate queries (…, n, heads, head)."""
        return q

    def on_write(self, k: Tensor, layout: TokenLayout) -> Tensor:
        """Rotate keys before they enter the KV cache: (…, n, kv_heads, head)."""
        return k

    def on_read(self, k: Tensor, layout: TokenLayout) -> Tensor:
        """Rotate keys that are read from the KV cache: (…, m, kv_heads, head)."""
        return k

    def placeless(self, k: Tensor) -> Tensor:
        """Learned keys (p, kv_heads, head), which have no position, in the channels of rotated queries."""
        return k

    def tables(self) -> tuple[Tensor, ...]:
        """The tensors that `score` reads, which become its arguments so that gradients reach them."""
        return ()

    def score(self, q: TokenLayout, k: TokenLayout, *tables: Tensor) -> Tensor:
        """The bias (…, heads, n, m) added to the scaled scores, tile by tile."""
        raise NotImplementedError("only a position that declares the need `bias` has one")
