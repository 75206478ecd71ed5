"""Masks: which keys a query may attend to, as a predicate and as bounds on whole tiles of scores."""

from __future__ import annotations

import enum
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.spec.part import KINDS, Part

# causal: no query sees a later key; ahead: a decoder in which early queries see some later keys (a prefix mask);
# both: bidirectional
Order = Literal["causal", "ahead", "both"]


class Fill(enum.Enum):
    """How much of one tile of scores a mask leaves: nothing, some, all."""

    EMPTY = 0
    PART = 1
    FULL = 2


class Span(NamedTuple):
    """Bounds on a run of tokens: the least and the greatest order, document and row, and those of order modulo `step`."""

    low: int
    high: int
    seg_low: int
    seg_high: int
    row_low: int = 0
    row_high: int = 0
    step: int = 1
    residue_low: int = 0
    residue_high: int = 0


class Band(NamedTuple):
    """Keys by their distance from the query: at most `behind` tokens before it and `ahead` after it; None: any number."""

    behind: int | None
    ahead: int | None


class Mask(Part):
    """Which keys a query may attend to: a predicate on (query, key), and bounds on whole tiles of scores.

    Masks join with `&` and `|`. In YAML a list means &, {any: [...]} means |.
    """

    group: ClassVar[str] = "mask"

    joins: ClassVar[Literal["all", "any"]] = "all"  # how a decoder joins it with causal

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        """(…, 1 or heads, n, m) true where query n may attend to key m; `heads` are the head numbers."""
        raise NotImplementedError

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        """How much of a tile is visible. PART is always correct; EMPTY and FULL save work."""
        return Fill.PART

    def order(self) -> Order:
        """Whether a query sees later keys."""
        return "both"

    def ahead(self) -> int | None:
        """The length of the prefix whose tokens may see later tokens of the prefix; 0: none sees a later one. None: no prefix
        bounds them."""
        return 0 if self.order() == "causal" else None

    def reach(self) -> int | None:
        """The window in tokens, the query included; the first `kept` tokens are visible beyond it. None: no window."""
        return None

    def kept(self) -> int:
        """The number of first tokens that stay visible outside the window."""
        return 0

    def by_head(self) -> bool:
        """Whether the mask differs by head."""
        return False

    def for_head(self, head: int) -> Mask:
        """The mask of one head, as a mask that is the same for every head."""
        return self

    def flag(self) -> Literal["all", "causal"] | None:
        """`all` or `causal` where the mask of a whole document is just that, so that a kernel's own flag can replace it."""
        return None

    def band(self) -> Band | None:
        """The mask as a band of distances, the same for every head, where it is exactly that; the flags of most attention
        kernels express nothing else."""
        return None

    def relative(self) -> bool:
        """Whether visibility depends on the distance from query to key alone: tiles at equal distances are then equal."""
        return self.band() is not None

    def regroup(self) -> int:
        """The modulus m such that tokens attend only to tokens whose order is equal modulo m (1: no such grouping)."""
        return 1

    def __and__(self, other: Mask) -> Mask:
        joined: Any = KINDS["all_of"]
        return joined(masks=(self, other))

    def __or__(self, other: Mask) -> Mask:
        joined: Any = KINDS["any_of"]
        return joined(masks=(self, other))

    @classmethod
    def from_short_form(cls, data: Any) -> Any:
        if isinstance(data, (list, tuple)):
            return cls.from_short_form(data[0]) if len(data) == 1 else {"kind": "all_of", "masks": list(data)}
        if isinstance(data, dict) and set(data) == {"any"}:
            return {"kind": "any_of", "masks": data["any"]}
        return super().from_short_form(data)
