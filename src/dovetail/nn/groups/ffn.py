"""Feed-forward networks: x (…, n, embed) -> like x, each token separately."""

from __future__ import annotations

from typing import ClassVar

from dovetail.spec.part import Part


class Ffn(Part):
    """A feed-forward network, applied to each token separately. Module: forward(x, ctx) -> like x."""

    group: ClassVar[str] = "ffn"
    norms_itself: ClassVar[bool] = False  # whether its norms are its own: a wire puts none around it
