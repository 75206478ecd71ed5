"""The groups: one abstract class of parts per role in a model (mixer, norm, ffn …), and the interface of its modules.

Shapes: x (…, n, embed); q (…, n, heads, head); `…` is batch, or nothing for a flat batch.
"""

from __future__ import annotations

import dataclasses as dc
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.errors import SpecError
from dovetail.core.field import MAX_FACTOR, bounded
from dovetail.core.layout import TokenLayout
from dovetail.core.loss import LossSum
from dovetail.core.module import Module
from dovetail.core.part import KINDS, Mistake, Part
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight

if TYPE_CHECKING:
    import torch

    from dovetail.core.cross_layer import Values


# causal: no query sees a later key; ahead: a decoder in which early queries see some later keys (a prefix mask);
# both: bidirectional
Order = Literal["causal", "ahead", "both"]


class Mixer(Part):
    """Mixes tokens: attention, a state-space model, an RNN. Module: forward(x, ctx, view=None) -> like x."""

    group: ClassVar[str] = "mixer"
    recurrent: ClassVar[bool] = False  # whether earlier tokens reach later ones through a recurrent state alone
    # whether it reads its entries by `KV.attend` alone, with the scoring of its module, so that an engine may keep them to
    # itself (core/view.py)
    attends: ClassVar[bool] = False
    # the tap of the values: those that its pattern weighs; of a recurrent mixer, those that its tap `y` is linear in where the
    # other taps are given. Empty: there is none
    values: ClassVar[str] = ""

    def order(self) -> Order:
        """Whether an output depends on later tokens."""
        return "causal"

    def ahead(self) -> int | None:
        """The number of first tokens that see each other; behind them no query sees a later key. None: some do anywhere."""
        return 0 if self.order() == "causal" else None

    def reads_encoder(self) -> bool:
        """Whether it attends to the encoder output."""
        return False

    def starts_from_encoder(self) -> bool:
        """Whether its recurrent state starts from the encoder output: its module then has a `fill`, as cross attention has."""
        return False


class CrossMixer(Mixer):
    """Mixes the encoder output into the tokens, in the field `cross` of a block, which may name it by the mixer that does the
    same with the tokens themselves: `cross: attention`. Module: a CrossModule (core/softmax.py)."""

    own: ClassVar[str] = ""  # the kind of that mixer

    def order(self) -> Order:
        return "causal"

    def reads_encoder(self) -> bool:
        return True

    @classmethod
    def sugar(cls, data: Any) -> Any:
        data = super().sugar(data)
        kind = data.get("kind") if isinstance(data, Mapping) else None
        if kind not in KINDS or not issubclass(KINDS[kind], Mixer) or issubclass(KINDS[kind], CrossMixer):
            return data
        crosses = {known.own: name for name, known in KINDS.items() if issubclass(known, CrossMixer)}
        if kind not in crosses:
            raise SpecError("", f"{kind} does not read an encoder output", f"kinds: {', '.join(sorted(crosses.values()))}")
        return {**data, "kind": crosses[kind]}


class Ffn(Part):
    """A feed-forward network, applied to each token separately. Module: forward(x, ctx) -> like x."""

    group: ClassVar[str] = "ffn"
    norms_itself: ClassVar[bool] = False  # whether its norms are its own: a wire puts none around it


class Router(Part):
    """Routes each token to a few of the `experts`, an axis that its parent defines. Module: a RouterModule."""

    group: ClassVar[str] = "router"

    def choices(self) -> int:
        """The number of experts that each token is routed to."""
        raise NotImplementedError


class RouterModule(Module):
    """The module of a router."""

    def forward(self, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        """x (…, n, embed) -> indices of the chosen experts (…, n, choices), and their weights (…, n, choices)."""
        raise NotImplementedError

    def rebalance(self) -> None:
        """Update the load-balancing state after an optimizer step; by default there is none."""


class Norm(Part):
    """Normalizes over the generic axis `dim`. Module: forward(x, ctx) -> like x."""

    group: ClassVar[str] = "norm"
    # what x is divided by, one number per group of channels; what the norm returns
    TAPS = {"scale": "pos group", "out": "pos channel"}

    def taps(self, scope: Scope) -> Mapping[str, str]:
        per_head = scope.names(("dim",)) in (("head",), ("value",))
        return {name: axes.replace("pos", "pos head") for name, axes in self.TAPS.items()} if per_head else self.TAPS

    def reduces(self, scope: Scope) -> tuple[str, ...]:
        return scope.names(("dim",))


class Act(Part):
    """An elementwise activation function. No module: the ffn applies `function`."""

    group: ClassVar[str] = "act"

    @staticmethod
    def function(x: Tensor, /) -> Tensor:
        """The elementwise function of x."""
        raise NotImplementedError


class Earlier(Part):
    """What attention takes from an earlier layer: its keys and values, say. Module: an EarlierModule."""

    group: ClassVar[str] = "earlier"
    names: ClassVar[tuple[str, ...]] = ()  # of the values that it reads: k, v
    projects: ClassVar[bool] = True  # whether attention still computes keys and values of its own

    layer: int


class EarlierModule(Module):
    """The module of what is taken from an earlier layer."""

    def forward(self, k: Tensor, v: Tensor, values: Values) -> tuple[Tensor, Tensor]:
        """k and v (…, n, kv_heads, head) of this layer, and values of the earlier one -> the k and v to use."""
        raise NotImplementedError


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


class Feature(Part):
    """A feature map of linear attention: φ(q)·φ(k) ≥ 0 stands in for exp(q·k). Module: a FeatureModule."""

    group: ClassVar[str] = "feature"

    def count(self, head: int) -> int:
        """The number of features of a query or key of size `head`."""
        return head


class FeatureModule(Module):
    """A feature map: (…, head) -> (…, features), all at least 0. A common factor of a query's features cancels."""

    def query(self, q: Tensor) -> Tensor:
        """The features of queries."""
        return self.key(q)

    def key(self, k: Tensor) -> Tensor:
        """The features of keys."""
        raise NotImplementedError


class Scaling(Part):
    """Scales rotary frequencies for longer contexts. No module: the frequencies are constants of RoPE."""

    group: ClassVar[str] = "scaling"

    varies: ClassVar[bool] = False  # whether frequencies depend on the current length of the sequence
    mistaken: ClassVar[Mistake] = Mistake("rope scaling")  # any field of any scaling
    MISTAKES = {"*": mistaken}

    def frequencies(self, plain: Tensor, base: float) -> Tensor:
        """(pairs,) scaled angular frequencies, from the plain ones, base^(−i/pairs)."""
        raise NotImplementedError

    def at_length(self, plain: Tensor, base: float, length: Tensor) -> Tensor:
        """(…, pairs) frequencies for sequences whose current lengths are `length` (…); called only where `varies`."""
        raise NotImplementedError

    def limit(self) -> int | None:
        """The context length in tokens before scaling; None where the scaling has no such field."""
        return None

    def amplitude(self) -> float:
        """The factor of cos and sin (the attention factor of YaRN and LongRoPE)."""
        return 1.0


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
    def sugar(cls, data: Any) -> Any:
        if isinstance(data, (list, tuple)):
            return cls.sugar(data[0]) if len(data) == 1 else {"kind": "all_of", "masks": list(data)}
        if isinstance(data, dict) and set(data) == {"any"}:
            return {"kind": "any_of", "masks": data["any"]}
        return super().sugar(data)


class Embed(Part):
    """Embeds inputs. Module: forward(inputs, ctx) -> (x (…, n, embed), their TokenLayout); n may differ from the input's."""

    group: ClassVar[str] = "embed"
    coords: ClassVar[int] = 1  # coordinates per token: 1 for text, 2 for an image
    token_ids: ClassVar[bool] = False  # whether every input is the id of a token of the vocabulary

    def example(self, scope: Scope, batch: int, n: int, generator: torch.Generator) -> Tensor:
        """A random legal input of about n tokens."""
        raise NotImplementedError

    def example_patches(self, scope: Scope, generator: torch.Generator) -> Tensor | None:
        """Random legal `patches` of a Ctx for the inputs of `example`; None where the embedding reads none."""
        return None

    def causal(self) -> bool:
        """Whether input i becomes token i, so that tokens can be decoded one by one."""
        return True

    def tokens(self) -> int | None:
        """The number of tokens per input; None: inputs differ."""
        return None

    def table_width(self) -> int | None:
        """The width of the embeddings where it differs from that of the residual stream; None: it does not."""
        return None


class EmbedModule(Module):
    """The module of an embedding."""

    def widen(self, x: Tensor) -> Tensor:
        """Project the embeddings (…, n, table), with positions and norm, to the residual stream (…, n, embed)."""
        return x

    def forward(self, inputs: Tensor, ctx: Ctx) -> tuple[Tensor, TokenLayout]:
        """The residual stream (…, n, embed), and the layout of its tokens."""
        raise NotImplementedError


Criterion = Literal["cross_entropy", "cosine", "mse"]


class Head(Part):
    """The output head: logits, scores or an embedding. Module: forward(x, ctx) -> outputs; loss(x, labels, ctx) -> LossSum."""

    group: ClassVar[str] = "head"
    criterion: ClassVar[Criterion] = "cross_entropy"  # how its loss compares outputs with labels
    embeds: ClassVar[bool] = False  # whether its output is an embedding of each document

    def pools(self) -> bool:
        """Whether it pools: one output per document instead of one per token."""
        return False

    def predicts_tokens(self, scope: Scope) -> bool:
        """Whether its outputs are logits over the vocabulary per token."""
        return not self.pools() and any("vocab" in weight.out for weight in self.weights(scope))

    def ranks(self) -> bool:
        """Whether its output is one number per document, by which documents are ranked."""
        return False

    def labels(self, scope: Scope, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Random legal labels for outputs of this leading shape."""
        raise NotImplementedError

    def scaled_if_tied(self, scale: float) -> Head:
        """The head with this multiplier of its logits, where it is tied to the embedding; itself where it has no such field."""
        return self


class HeadModule(Module):
    """The module of a head."""

    def forward(self, x: Tensor, ctx: Ctx) -> Tensor:
        """(…, n, embed) -> (…, n, outputs), or (documents, outputs) where it pools."""
        raise NotImplementedError

    def loss(self, x: Tensor, labels: Tensor, ctx: Ctx) -> LossSum:
        """The loss summed over labels that are not −100, and their number, of the tokens of this rank."""
        raise NotImplementedError


AheadInput = Literal["hidden", "before", "embedded"]
AheadTerm = Literal["labels", "hidden", "probs"]


@dc.dataclass(frozen=True, kw_only=True)
class Mtp(Part):
    """One depth of multi-token prediction: hidden states, from which a head predicts one token further than the depth before.
    Depth k is at position i where its head predicts token i + k + 1. Module: an MtpModule."""

    group: ClassVar[str] = "mtp"
    TAPS = {"hidden": "pos channel"}  # what it returns
    # what it reads at position i, in the order of its forward: `hidden` is the hidden state of the model, `before` that of the
    # depth before (at depth 1 of the model), `embedded` the embedding of token i + k
    inputs: ClassVar[tuple[AheadInput, ...]] = ("before", "embedded")
    # whether its hidden state at position i predicts that of the model at i + 1: it reads its own where the model's is not
    # known yet, so that one depth, the only one of its model, drafts any number of tokens
    recurs: ClassVar[bool] = False

    weight: float = bounded(0.3, at_least=0, at_most=MAX_FACTOR)  # λ, the factor of its loss

    def loss_terms(self) -> Mapping[AheadTerm, float]:
        """The terms of its loss and their factors: `labels` is the cross-entropy of the labels, `probs` that of the model's
        probs at token i + k, `hidden` the smooth L1 distance to the model's hidden state there."""
        return {"labels": self.weight}

    def own_head(self) -> Head | None:
        """The head that predicts from its hidden states, a child called `head`; None: the head of the model."""
        return None

    def excepts(self, scope: Scope) -> dict[str, str]:
        reason = "an output: the loss computes the logits in chunks, and passes them to no listener"
        return {} if self.own_head() is None else {"looking.head.*": reason}

    @classmethod
    def sugar(cls, data: Any) -> Any:
        return {"kind": "mtp", **data} if isinstance(data, Mapping) else super().sugar(data)


class MtpModule(Module):
    """The module of a depth of multi-token prediction."""

    head: HeadModule  # where it has one of its own

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """(*inputs, ctx, views) -> hidden states; the inputs, each (…, n, embed), are those that the part declares."""
        raise NotImplementedError

    def predictor(self, head: HeadModule) -> HeadModule:
        """The head of this depth: its own, or `head`, that of the model."""
        return head if self.part.own_head() is None else self.head


Steps = tuple[tuple[str, ...], ...]  # the names of a block's branches, in order; those of one step read the same input


class Wire(Part):
    """How branches (mixer, cross, ffn) join the residual stream: where the norms are and what is added."""

    group: ClassVar[str] = "wire"

    sums: ClassVar[bool] = True  # whether the output is the input plus the branches, with nothing applied to the sum
    # fields that only say how many norms there are: without effect where a norm has no weights, and several are one
    counts_norms: ClassVar[frozenset[str]] = frozenset()
    of_first_norm: ClassVar[frozenset[str]] = frozenset()  # those that say whether the first branch has a norm

    def norms(self, steps: Steps) -> tuple[str, ...]:
        """Names of the norm modules of a block."""
        raise NotImplementedError

    def rescales(self) -> bool:
        """Whether it multiplies the residual stream behind the last branch."""
        return False

    def streams(self) -> int:
        """The number of residual streams. Blocks with several that follow each other share them: the first opens them, the
        last closes them."""
        return 1


class Init(Part):
    """Initialization: the standard deviation of normal weights, by role, fan-in and depth. No module."""

    group: ClassVar[str] = "init"

    def std(self, weight: Weight, scope: Scope) -> float:
        """Standard deviation for a weight whose init is `normal`."""
        raise NotImplementedError

    def lr_scale(self, weight: Weight, scope: Scope) -> float:
        """What the learning rate of a weight under AdamW is multiplied by."""
        return 1.0

    def tied_scale(self, width: int) -> float | None:
        """What the logits of a head that is tied to the embedding should be multiplied by; None: as the head says."""
        return None


GROUPS: tuple[type[Part], ...] = (
    *(Mixer, Position, Earlier, Feature, Scaling, Mask, Norm, Wire),
    *(Ffn, Router, Act, Embed, Head, Mtp, Init),
)
