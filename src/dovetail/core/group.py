"""The groups: abstract classes of parts, and what a module of each answers in a forward pass.

Shapes: x (…, n, embed); q (…, n, heads, head); `…` is batch, or nothing for a flat batch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.layout import TokenLayout
from dovetail.core.module import Module
from dovetail.core.part import KINDS, Part
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight

if TYPE_CHECKING:
    import torch


# causal: no query sees a later key; ahead: meant for decoding, but an early query may (a prefix); both: bidirectional
Order = Literal["causal", "ahead", "both"]


class Mixer(Part):
    """Moves information between tokens. Module: forward(x, ctx, view=None) -> like x."""

    group: ClassVar[str] = "mixer"
    recurrent: ClassVar[bool] = False  # whether it knows earlier tokens by a memory that is handed on from token to token

    def order(self) -> Order:
        """Whether an output depends on later tokens."""
        return "causal"

    def reads_encoder(self) -> bool:
        """Whether it looks at an encoder's output."""
        return False


class Ffn(Part):
    """Works on each token alone. Module: forward(x, ctx) -> like x."""

    group: ClassVar[str] = "ffn"


class Router(Part):
    """Sends each token to a few of `experts`, an axis that its parent defines. Module: a RouterModule."""

    group: ClassVar[str] = "router"

    def choices(self) -> int:
        """How many experts a token is sent to."""
        raise NotImplementedError


class RouterModule(Module):
    """A router."""

    def forward(self, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        """x (…, n, embed) -> the experts chosen (…, n, choices), and how much each counts (…, n, choices)."""
        raise NotImplementedError

    def rebalance(self, total: Callable[[Tensor], Tensor] | None = None) -> None:
        """After each step of training: whatever it does by itself so that every expert has work. `total` sums over the ranks
        that see different tokens."""


class Norm(Part):
    """Normalizes over the generic axis `dim`. Module: forward(x, ctx) -> like x."""

    group: ClassVar[str] = "norm"


class Act(Part):
    """A function of one number. No module: the ffn takes `function()` once and calls it."""

    group: ClassVar[str] = "act"

    def function(self) -> Callable[[Tensor], Tensor]:
        """The activation itself."""
        raise NotImplementedError


class Position(Part):
    """Tells tokens where they stand, at one of three sites; the other two stay neutral.

    site "stream": added once, to the embeddings (a field of the model); site "mixer": rotates q and k, or adds to the
    scores (a field of an attention).
    """

    group: ClassVar[str] = "position"
    site: ClassVar[Literal["stream", "mixer", "any"]] = "mixer"
    rotates: ClassVar[bool] = False  # whether it turns keys, each by its own position


class PositionModule(Module):
    """Every site, neutral: attention and the model call all of them and never ask which kind they hold."""

    def embed(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """On the stream: (…, n, embed)."""
        return x

    def rotate(self, q: Tensor, layout: TokenLayout) -> Tensor:
        """On queries: (…, n, heads, head)."""
        return q

    def on_write(self, k: Tensor, layout: TokenLayout) -> Tensor:
        """On keys before they are remembered: (…, n, kv_heads, head)."""
        return k

    def on_read(self, k: Tensor, layout: TokenLayout) -> Tensor:
        """On keys when they are looked at: (…, m, kv_heads, head)."""
        return k

    def tables(self) -> tuple[Tensor, ...]:
        """The tensors `score` is a function of; gradients reach them through these."""
        return ()

    def score(self, q: TokenLayout, k: TokenLayout, *tables: Tensor) -> Tensor:
        """Added to the scaled scores, tile by tile: (…, heads, n, m)."""
        raise NotImplementedError("a position that needs no bias is never asked for one")


class Feature(Part):
    """Makes queries and keys of linear attention positive, so that a product of two is a weight. Module: a FeatureModule."""

    group: ClassVar[str] = "feature"

    def count(self, head: int) -> int:
        """How many features a query or key of size `head` has."""
        return head


class FeatureModule(Module):
    """A feature map: (…, head) -> (…, features), none below 0. What multiplies all features of a query alike cancels."""

    def query(self, q: Tensor) -> Tensor:
        """Of queries."""
        return self.key(q)

    def key(self, k: Tensor) -> Tensor:
        """Of keys."""
        raise NotImplementedError


class Scaling(Part):
    """Stretches rotary frequencies. No module: pure numbers at build time."""

    group: ClassVar[str] = "scaling"

    varies: ClassVar[bool] = False  # whether frequencies depend on how long the sequence is now

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        """(pairs,) angular frequencies from the unstretched ones, base^(−i/pairs)."""
        raise NotImplementedError

    def at_length(self, plain: Tensor, base: float, length: Tensor) -> Tensor:
        """(…, pairs) frequencies for tokens of sequences that are `length` (…) long now; asked only where it varies."""
        raise NotImplementedError

    def limit(self) -> int | None:
        """The length in tokens that the frequencies are stretched from; None where the scaling names none."""
        return None

    def amplitude(self) -> float:
        """What cos and sin are multiplied by (YaRN's and LongRoPE's attention factor)."""
        return 1.0


class Fill(enum.Enum):
    """What a mask lets through of one tile of scores."""

    EMPTY = 0
    PART = 1
    FULL = 2


class Span(NamedTuple):
    """What is known of a run of tokens without looking at each: the extremes of order, document and row, and those of the
    residue that orders leave when divided by `step`."""

    low: int
    high: int
    seg_low: int
    seg_high: int
    row_low: int = 0
    row_high: int = 0
    step: int = 1
    residue_low: int = 0
    residue_high: int = 0


class Mask(Part):
    """Which keys a query may see: a predicate, and for tiles of scores an answer without looking inside.

    Join with `&` and `|`. In YAML a list means &, {any: [...]} means |.
    """

    group: ClassVar[str] = "mask"

    joins: ClassVar[Literal["all", "any"]] = "all"  # how a decoder joins it with causal

    def visible(self, q: TokenLayout, k: TokenLayout, heads: Tensor) -> Tensor:
        """(…, 1 or heads, n, m) true where query n may see key m; `heads` are the head numbers."""
        raise NotImplementedError

    def tile(self, q: Span, k: Span, head: int) -> Fill:
        """The same for a tile; PART is always a right answer, EMPTY and FULL save work."""
        return Fill.PART

    def order(self) -> Order:
        """Whether a query sees later keys."""
        return "both"

    def reach(self) -> int | None:
        """How many tokens back, itself included, a query can see (the first `kept` apart); None is all."""
        return None

    def kept(self) -> int:
        """How many first tokens stay visible for ever."""
        return 0

    def by_head(self) -> bool:
        """Whether heads see different things."""
        return False

    def for_head(self, head: int) -> Mask:
        """What one head sees by: a mask that is the same for every head."""
        return self

    def flag(self) -> Literal["all", "causal"] | None:
        """Whether over whole documents it is just `all` or `causal`, which kernels know by a flag of their own."""
        return None

    def relative(self) -> bool:
        """Whether the distance from query to key decides alone: tiles equally far apart are then equal."""
        return False

    def regroup(self) -> int:
        """Tokens whose orders are equal modulo this see only each other (1: no such grouping)."""
        return 1

    def __and__(self, other: Mask) -> Mask:
        joined: Any = KINDS["all_of"]
        return joined(masks=(self, other))

    def __or__(self, other: Mask) -> Mask:
        joined: Any = KINDS["any_of"]
        return joined(masks=(self, other))

    @classmethod
    def sugar(cls, data: Any) -> Any:
        if isinstance(data, (list, tuple)):
            return cls.sugar(data[0]) if len(data) == 1 else {"kind": "all_of", "masks": list(data)}
        if isinstance(data, dict) and set(data) == {"any"}:
            return {"kind": "any_of", "masks": data["any"]}
        return super().sugar(data)


class Embed(Part):
    """Inputs to the stream. Module: forward(inputs, ctx) -> (x (…, n, embed), at): it may change the length."""

    group: ClassVar[str] = "embed"
    coords: ClassVar[int] = 1  # coordinates a token stands at: 1 for text, 2 for an image

    def example(self, scope: Scope, batch: int, n: int, generator: torch.Generator) -> Tensor:
        """A random legal input of about n tokens."""
        raise NotImplementedError

    def causal(self) -> bool:
        """Whether token i of the input becomes token i of the stream, so that decoding one by one makes sense."""
        return True


class EmbedModule(Module):
    """An embedding."""

    def forward(self, inputs: Tensor, ctx: Ctx) -> tuple[Tensor, TokenLayout]:
        """The stream and where its tokens stand."""
        raise NotImplementedError


Criterion = Literal["cross_entropy", "cosine", "mse"]


class Head(Part):
    """The stream to what the model is for. Module: forward(x, ctx) -> logits; loss(x, labels, ctx) -> scalar."""

    group: ClassVar[str] = "head"
    criterion: ClassVar[Criterion] = "cross_entropy"  # how its loss compares outputs with labels

    def pools(self) -> bool:
        """Whether it gives one answer a row, rather than one a token."""
        return False

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Random legal labels for answers of this leading shape."""
        raise NotImplementedError


class HeadModule(Module):
    """A head."""

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        """(…, n, embed) -> (…, n, answers), or (…, answers) where it pools."""
        raise NotImplementedError

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> Tensor:
        """The mean loss over labels that are not −100."""
        raise NotImplementedError


class Wire(Part):
    """How branches (mixer, cross, ffn) join the stream: where the norms stand and what is added."""

    group: ClassVar[str] = "wire"

    sums: ClassVar[bool] = True  # the stream afterwards is the stream before plus what was added, and nothing else

    def norms(self, branches: tuple[str, ...]) -> tuple[str, ...]:
        """Names of the norm modules it wants, one to two a branch."""
        raise NotImplementedError


class Init(Part):
    """Initial weights: the spread of a normal draw, by role, fan-in and depth. No module."""

    group: ClassVar[str] = "init"

    def std(self, weight: Weight, scope: Scope) -> float:
        """Standard deviation for a weight whose init is `normal`."""
        raise NotImplementedError


GROUPS: tuple[type[Part], ...] = (Mixer, Position, Feature, Scaling, Mask, Norm, Wire, Ffn, Router, Act, Embed, Head, Init)
