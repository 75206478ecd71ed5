"""Model, Block and the wire of most models: a stream of tokens that branches read from and add to.

      inputs ── embed ── (+ position) ── [norm] ── block ── block ── … ── norm ── head ── logits

                                                                     └── depths of multi-token prediction, in training

      x ← x + f(norm x)          f a mixer, then an ffn; x (…, n, embed); `parts/wire.py` has the other ways to join them

An encoder–decoder holds its encoder as a child model, whose output cross attention reads.
Vaswani et al. 2017; Xiong et al. 2020 (the norm before the branch).
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dovetail.core.cross_layer import BlockIO, BlockWithValues, block_ios
from dovetail.core.ctx import Ctx, Losses
from dovetail.core.errors import InputError, SpecError
from dovetail.core.field import bounded, options
from dovetail.core.fold import taps
from dovetail.core.group import (
    GROUPS,
    AheadInput,
    CrossMixer,
    Embed,
    EmbedModule,
    Ffn,
    Head,
    HeadModule,
    Init,
    Mixer,
    Mtp,
    Norm,
    Order,
    Position,
    PositionModule,
    Steps,
    Wire,
)
from dovetail.core.keywords import checks_keywords
from dovetail.core.layers import expand, fold
from dovetail.core.layout import TokenLayout
from dovetail.core.loss import IGNORED, LossSum
from dovetail.core.module import Module
from dovetail.core.multi_token import look_ahead, reads_tokens
from dovetail.core.part import KINDS, Mistake, Part, Place, Problem, broken, child, register, walk_spec
from dovetail.core.ranks import ALONE, Ranks
from dovetail.core.scope import Scope
from dovetail.core.swap import Lost, fit, no_group, replaced, swap_group, with_position
from dovetail.core.wire import Branching, Scaled, WireModule
from dovetail.disk.yaml import dump_yaml
from dovetail.ops.vocab import label_log_probs

# -- wire -----------------------------------------------------------------------------------------------------------


@register("pre_norm")
class PreNorm(Scaled):
    """x + f(norm x)."""

    first_norm: bool = True  # False: the first branch reads the stream itself (ModernBERT, where the embedding is normed)

    SAMPLES = {**Scaled.SAMPLES, "first_norm": [True, False]}
    of_first_norm = frozenset({"first_norm"})

    def norms(self, steps: Steps) -> tuple[str, ...]:
        return tuple(f"{step[0]}_norm" for step in steps[0 if self.first_norm else 1 :])


class PreNormModule(WireModule, of=PreNorm):
    """x (…, n, embed) -> like x."""

    def setup(self) -> None:
        assert isinstance(self.part, PreNorm)
        self.first_norm = self.part.first_norm

    def forward(self, x: Tensor, ctx: Ctx, block: Branching, views: Mapping[str, Any]) -> Tensor:
        for i, step in enumerate(block.steps):
            normed = block.normed(f"{step[0]}_norm", x, ctx) if i > 0 or self.first_norm else x
            x = x + self.sum(block, step, normed, ctx, views)
            if ctx.taps is not None:
                x = ctx.tap(block, f"after_{step[0]}", x)
        return x


# -- block ----------------------------------------------------------------------------------------------------------


@register("block")
class Block(Part):
    """A mixer, cross attention, an ffn, or some of these, wired to the stream. A subclass may have other branches: fields that
    hold a mixer or an ffn, named in STEPS."""

    MISTAKES = {"norm": Mistake("kind of norm"), "wire": Mistake("wiring")}
    STEPS: ClassVar[Steps] = (("mixer",), ("cross",), ("ffn",))

    group: ClassVar[str] = "block"

    wire: Wire = child("pre_norm")
    norm: Norm = child("rmsnorm")
    mixer: Mixer | None = child("attention")
    cross: CrossMixer | None = None
    ffn: Ffn | None = child("glu")
    shares: int | None = bounded(None, at_least=0)  # an earlier layer whose weights it uses; its decode state is its own

    def steps(self) -> Steps:
        """Names of the branches that are there, in order."""
        there = (tuple(name for name in step if getattr(self, name) is not None) for step in self.STEPS)
        return tuple(step for step in there if step)

    def branches(self) -> tuple[str, ...]:
        """The same in one row."""
        return tuple(name for step in self.steps() for name in step)

    def multipliers(self) -> dict[str, tuple[float, float]]:
        """Fixed factors of what a branch reads and of what it returns, by the name of the branch; by default there are none."""
        return {}

    def mixers(self) -> dict[str, Mixer]:
        """The branches that mix tokens, by name."""
        return {name: part for name in self.branches() if isinstance(part := getattr(self, name), Mixer)}

    def self_mixers(self) -> dict[str, Mixer]:
        """Those that mix the tokens of the residual stream."""
        return {name: mixer for name, mixer in self.mixers().items() if not mixer.reads_encoder()}

    def reach(self) -> int | None:
        """The window in tokens, the query included; None: no window."""
        windows = [
            [state.window for state in m.state(Scope()) if state.window is not None] for m in self.self_mixers().values()
        ]
        return max((one for own in windows for one in own), default=1) if all(windows) else None

    def norms(self) -> tuple[str, ...]:
        """Names of the norms that the wire puts around branches; those that have their own are left out."""
        left_out = {f"{name}_{which}" for name in self.branches() if self.norms_itself(name) for which in ("norm", "post_norm")}
        return tuple(name for name in self.wire.norms(self.steps()) if name not in left_out)

    def norms_itself(self, branch: str) -> bool:
        """Whether a branch needs no norm of the wire."""
        part = getattr(self, branch)
        return isinstance(part, Ffn) and part.norms_itself

    def children(self) -> dict[str, Part]:
        norms = dict.fromkeys(self.norms(), self.norm)
        return {"wire": self.wire, **norms, **{name: getattr(self, name) for name in self.branches()}}

    def child_scope(self, scope: Scope, child: str) -> Scope:
        return scope.bind(dim="embed").add(branches=len(self.branches()), steps=len(self.steps()))

    def taps(self, scope: Scope) -> Mapping[str, str]:
        stream = "pos channel" if self.wire.streams() == 1 else "pos stream channel"
        entering = "pos channel" if scope.opens else stream
        adds = dict.fromkeys((f"{name}_add" for name in self.branches()), "pos channel")
        return {"in": entering, **adds, **dict.fromkeys((f"after_{step[0]}" for step in self.steps()), stream)}

    def idle(self, scope: Scope) -> frozenset[str]:
        unused = frozenset() if self.norms() else frozenset(f"norm.{field.name}" for field in dc.fields(self.norm))
        same = not self.norm.weights(self.norm.axes(self.child_scope(scope, "norm")))
        no_first = all(map(self.norms_itself, next(iter(self.steps()), ())))
        counted = {*(self.wire.counts_norms if same else ()), *(self.wire.of_first_norm if no_first else ())}
        return unused | {f"wire.{name}" for name in counted}

    def check(self, scope: Scope) -> list[Problem]:
        if not self.branches():
            return [Problem("", "has no branch", "give it a mixer or an ffn")]
        later = self.shares is not None and self.shares >= scope.layer
        what = f"layer {scope.layer} cannot use the weights of layer {self.shares}"
        misplaced = [(name, mixer) for name, mixer in self.mixers().items() if mixer.reads_encoder() and name != "cross"]
        return [
            *broken((later, "shares", what, "give the number of an earlier layer, from 0")),
            *(Problem(name, f"{mixer.kind} reads an encoder output", "it belongs in `cross`") for name, mixer in misplaced),
        ]


class BlockModule(Branching, of=Block):
    """x (…, n, embed) -> like x; between blocks of several residual streams it is (…, n, streams, embed)."""

    part: Block
    wire: WireModule
    io: BlockIO | None = None  # what it takes and returns beside the residual stream; the model sets it

    def setup(self) -> None:
        self.branches, self.steps = self.part.branches(), self.part.steps()
        self.opens, self.closes, self.rescales = self.scope.opens, self.scope.closes, self.part.wire.rescales()

    def forward(self, x: Tensor, ctx: Ctx, views: Mapping[str, Any], *given: Tensor) -> Any:
        """x, or (x, *values) where later blocks read values of this one; `given` are those that it reads."""
        x = x if ctx.taps is None else ctx.tap(self, "in", x)
        passed = None if self.io is None else BlockWithValues(self, self.io, given)
        wire = self.wire
        x = wire(wire.open(x) if self.opens else x, ctx, passed or self, views)
        x = wire.rescaled(x) if self.rescales else x
        x = wire.close(x) if self.closes else x
        values = [] if passed is None else passed.wanted()
        return (x, *values) if values else x

    def fill(self, ctx: Ctx, views: Mapping[str, Any]) -> None:
        """Store what its mixers read of the encoder output."""
        for name, mixer in self.part.mixers().items():
            if mixer.reads_encoder() or mixer.starts_from_encoder():
                self.modules_named(name).fill(ctx, views[name])


# -- model ----------------------------------------------------------------------------------------------------------

NO_VIEWS: Mapping[str, Any] = {}
Carried = dict[tuple[str, str], Tensor]  # values that later layers read, by (path of the source, name)
CHUNK = 64  # tokens per row whose logits are in memory at one time, where answers are compared with labels


@register("model")
class Model(Part):
    """A whole model: embedding, layers, norm, head; perhaps an encoder."""

    MISTAKES = {
        "position": Mistake("position missing"),
        "embed_norm": Mistake("norm missing"),
        "norm": Mistake("norm missing"),
    }

    group: ClassVar[str] = "model"
    TAPS = {"embedded": "pos channel", "normed": "pos channel"}

    width: int = bounded(256, above=0, widens=True)
    vocab: int = bounded(4096, above=0)
    embed: Embed = child("tokens")
    position: Position = child("none")
    embed_norm: Norm | None = None
    dropout: float = bounded(0.0, at_least=0, below=1)
    encoder: Model | None = None
    layers: tuple[Block, ...] = ()
    norm: Norm | None = child("rmsnorm")
    head: Head | None = child("lm")
    mtp: tuple[Mtp, ...] = ()  # one per depth of multi-token prediction
    init: Init = child("normal")

    SAMPLES = {"dropout": [0.0, 0.2]}

    def axes(self, scope: Scope) -> Scope:
        sizes = {"embed": self.width, "vocab": self.vocab, "coords": self.embed.coords}
        if self.encoder is not None:
            sizes["encoder"] = self.encoder.width
        if (width := self.embed.table_width()) is not None:
            sizes["table"] = width
        return dc.replace(scope.add(**sizes), init=self.init)

    def child_scope(self, scope: Scope, child: str) -> Scope:
        name, _, index = child.partition(".")
        if name == "encoder":
            return Scope(decodes=False)
        below = scope.bind(dim="embed")
        if name in ("position", "embed_norm"):  # before the embeddings are projected to the residual stream
            return below.add(embed=self.embed.table_width() or self.width)
        if name == "mtp":
            return dc.replace(below, stack=f"{scope.path}.mtp".lstrip("."), layer=int(index), depth=len(self.mtp), drafts=True)
        if name != "layers":
            return below
        stack, i, depth = f"{scope.path}.layers".lstrip("."), int(index), len(self.layers)
        own, *near = (self.layers[j].wire.streams() if 0 <= j < depth else 1 for j in (i, i - 1, i + 1))
        opens, closes = (own > 1 and own != other for other in near)
        where = {"stack": stack, "layer": i, "depth": depth, "shares": self.layers[i].shares}
        return dc.replace(below, **where, opens=opens, closes=closes)

    def publishes(self) -> dict[str, tuple[str, ...]]:
        ids: dict[str, tuple[str, ...]] = {"inputs": ()} if self.embed.token_ids else {}
        return {**ids, "embedded": ("embed",)}

    def order(self) -> Order:
        """Whether outputs depend on later inputs: causal only if the embedding and every mixer is."""
        orders = {mixer.order() for block in self.layers for mixer in block.self_mixers().values()}
        if not self.embed.causal() or "both" in orders:
            return "both"
        return "ahead" if "ahead" in orders else "causal"

    def ahead(self) -> int | None:
        """The number of first tokens that see each other; behind them the model is causal. None: it is not."""
        bounds = [0, *(mixer.ahead() for block in self.layers for mixer in block.self_mixers().values())]
        known = [bound for bound in bounds if bound is not None]
        return max(known) if self.embed.causal() and len(known) == len(bounds) else None

    def taps(self, scope: Scope) -> Mapping[str, str]:
        return {name: axes for name, axes in self.TAPS.items() if name != "normed" or self.norm is not None}

    def check(self, scope: Scope) -> list[Problem]:
        if not self.layers:
            return [Problem("layers", "there are none", "layers: [{repeat: 6}] gives six modern ones")]
        mixers = [mixer for block in self.layers for mixer in block.mixers().values()]
        unread = not any(m.reads_encoder() or m.starts_from_encoder() for m in mixers)
        inside = f"{self.position.kind} acts inside attention, not on the stream"
        cross = "give the layers a `cross: cross_attention`, or a recurrent mixer `from_encoder: true`"
        ahead = "multi-token prediction needs a causal model of token ids with logits over the vocabulary per token"
        predicts = self.mtp and self.head is not None and self.head.predicts_tokens(scope)
        undrafted = bool(self.mtp) and not (self.order() == "causal" and self.embed.token_ids and predicts)
        crowded = len(self.mtp) > 1 and any(depth.recurs for depth in self.mtp)
        alone = "a depth that reads its own hidden states drafts any number of tokens, and is the only one"
        shared = [
            Problem(f"layers.{i}.shares", f"layer {j} has no weights of its own", f"give the layer that it shares: {owner}")
            for i, block in enumerate(self.layers)
            if (j := block.shares) is not None and j < i and (owner := self.layers[j].shares) is not None
        ]
        encoder_head = self.encoder is not None and self.encoder.head is not None
        return [
            *broken(
                (self.position.site == "mixer", "position", inside, "put it at layers.*.mixer.position, or use swap"),
                (encoder_head, "encoder.head", "an encoder that feeds a decoder has no head", "head: null"),
            ),
            *shared,
            *broken(
                (self.encoder is not None and unread, "encoder", "no layer reads it", cross),
                (undrafted, "mtp", ahead, "use causal mixers, embed: tokens and an lm head, or mtp: []"),
                (crowded, "mtp", alone, "use one, as in mtp: [eagle]"),
            ),
        ]

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        positions = [part for _, part in walk_spec(self) if isinstance(part, Position)]
        unordered = self.order() == "both" and all(p.site == "any" for p in positions)
        reaches = [block.reach() for block in self.layers]
        field = 1 + sum(r - 1 for r in reaches if r is not None)
        short = None not in reaches and field < (length or 0)
        return broken(
            (unordered, "position", "a bidirectional model without positions cannot tell word order", ""),
            (short, "layers", f"windows reach {field} tokens back in all, fewer than the {length} asked for", ""),
        )

    # -- changing a spec

    def swap(self, where: str, new: Any) -> Self:
        """The spec with another part. `new` is a part, the name of a kind, or a mapping with a kind and fields.

        `where` is a path (`layers.*.mixer`), or a group (`norm`, `position`, `ffn` …) for every place that holds one. A
        position fills its own site and clears the other; cross attention never has one. With a name or a mapping, fields
        that both kinds have keep their value: `swap("mixer", "mla")` keeps the number of heads.
        """
        return self._swap(where, new, [])

    def swap_losses(self, where: str, new: Any) -> list[Lost]:
        """The fields that `swap(where, new)` drops, because the new kind does not have them."""
        lost: list[Lost] = []
        self._swap(where, new, lost)
        return lost

    def _swap(self, where: str, new: Any, lost: list[Lost]) -> Self:
        if where == Position.group:
            return self._swap_position(new, lost)
        group = next((group for group in GROUPS if group.group == where), None)
        if group is not None and (not isinstance(new, Part) or isinstance(new, group)):
            return swap_group(self, new, group, lost)
        if "." not in where and where not in {field.name for field in dc.fields(self)}:
            raise SpecError(where, *no_group(self, where, new))

        def at(place: Place) -> Any:
            groups = [option for option in options(place.hint) if isinstance(option, type) and issubclass(option, Part)]
            if new is None or not groups:
                return new
            return replaced(new, place.old, groups[0], place.path, lost)

        return self.rewrite(where, at)

    def _swap_position(self, new: Any, lost: list[Lost], path: str = "") -> Self:
        cleared = KINDS["none"]()
        site = fit(new, None, Position).site
        inside = cleared if site == "stream" else new
        stream = replaced(new, self.position, Position, "position", lost) if site == "stream" else cleared
        blocks = tuple(
            dc.replace(b, **{n: with_position(m, inside, f"{path}layers.{i}.{n}", lost) for n, m in b.self_mixers().items()})
            for i, b in enumerate(self.layers)
        )
        encoder = None if self.encoder is None else self.encoder._swap_position(new, lost, f"{path}encoder.")
        spec = dc.replace(self, position=stream, layers=blocks, encoder=encoder)
        if not self.mtp:
            return spec
        return spec.rewrite("mtp.*.*.mixer", lambda at: at.old and with_position(at.old, inside, f"{path}{at.path}", lost))

    # -- short forms

    @classmethod
    def sugar(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise SpecError("", f"a model is a mapping, not {data!r}")
        version = data.get("dovetail", 1)
        if version != 1:
            raise SpecError("dovetail", f"format {version!r} is not known", "this release reads format 1")
        fields = {"kind": "model", **{k: v for k, v in data.items() if k != "dovetail"}}
        if "layers" in fields:
            fields["layers"] = expand(fields["layers"])
        return fields

    def __repr__(self) -> str:
        """The spec as YAML."""
        return dump_yaml(self.to_data()).rstrip()

    def to_data(self) -> Any:
        data = {"dovetail": 1, **self.changed()}
        if self.layers:
            data["layers"] = fold(self.layers)
        if self.encoder is not None:
            data["encoder"] = {k: v for k, v in data["encoder"].items() if k != "dovetail"}
        return data


@checks_keywords
class ModelModule(Module, of=Model):
    """inputs -> logits."""

    part: Model
    ranks: Ranks = ALONE  # those of a model that is sharded by tensor: a default Ctx takes them
    frozen_by_attach: frozenset[str] = frozenset()  # the weights that `detach` unfreezes (weights/adapters/attach.py)
    embed: EmbedModule
    position: PositionModule
    embed_norm: Module
    encoder: ModelModule
    layers: Any
    norm: Module
    head: HeadModule
    mtp: Any

    def setup(self) -> None:
        for block, io in zip(self.layers, block_ios(self.layers, f"{self.path}.layers".lstrip(".")), strict=True):
            block.io = io
        self.taps_ahead = [address for address in taps(self.part) if address.startswith("mtp.")] if self.part.mtp else []
        self.embedded_axes = ("embed",) if self.part.embed.table_width() is None else ("table",)
        self.positioned = self.part.position.site == "stream"

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    def forward(self, inputs: Tensor, ctx: Ctx) -> Tensor:
        """Logits (…, n, vocab), or what the head computes; hidden states where there is no head."""
        x, ctx = self.hidden(inputs, ctx)
        return x if self.part.head is None else self.head(x, ctx)

    def loss(self, inputs: Tensor, targets: Tensor, ctx: Ctx) -> Tensor:
        """The mean of the head's loss over all labels of the batch, those of other ranks too; in training plus the losses that
        parts add (router losses, multi-token prediction), which are collected in ctx.losses."""
        loss, ctx = self._head_loss(inputs, targets, ctx)
        return ctx.with_added(ctx.ranks.batch_mean(loss))

    def loss_sum(self, inputs: Tensor, targets: Tensor, ctx: Ctx) -> LossSum:
        """The same loss as sum and number of labels, those of this rank: add several batches, then take the mean. Losses that
        parts add are weighted by the number of labels."""
        loss, ctx = self._head_loss(inputs, targets, ctx)
        added = ctx.with_added(loss.sum.new_zeros(()))
        return LossSum(loss.sum + added * loss.num_labels, loss.num_labels)

    def _head_loss(self, inputs: Tensor, targets: Tensor, ctx: Ctx) -> tuple[LossSum, Ctx]:
        ctx = dc.replace(ctx, labels=targets)
        if ctx.losses is None and (ctx.draws is not None or self.training):
            ctx.losses = Losses()
        x, ctx = self.hidden(inputs, ctx)
        return self.head.loss(x, targets, ctx), ctx

    def loss_and_hits(self, inputs: Tensor, targets: Tensor, ctx: Ctx) -> tuple[LossSum, Tensor]:
        """The head's loss alone, and how many labels () are the most probable answer; for heads with logits."""
        x, ctx = self.hidden(inputs, dc.replace(ctx, labels=targets))
        return self.head.loss(x, targets, ctx), self.hits(x, targets, ctx)

    def loss_and_answers(self, inputs: Tensor, targets: Tensor, ctx: Ctx) -> tuple[LossSum, Tensor]:
        """The head's loss alone, and the most probable answers, of the shape of the labels; for heads with logits."""
        x, ctx = self.hidden(inputs, dc.replace(ctx, labels=targets))
        return self.head.loss(x, targets, ctx), self.answers(x, ctx)

    def hits(self, x: Tensor, targets: Tensor, ctx: Ctx) -> Tensor:
        """How many labels () are the most probable answer, from what the head reads."""
        return (self.answers(x, ctx) == targets).sum()

    def answers(self, x: Tensor, ctx: Ctx) -> Tensor:
        """The most probable answer per token or document, from what the head reads."""
        assert self.part.head is not None, "a model without a head has no answers"
        pieces = [x] if self.part.head.pools() else x.split(CHUNK, -2)
        return torch.cat([self.head(piece, ctx).argmax(-1) for piece in pieces], -1)

    def log_probs(self, inputs: Tensor, labels: Tensor, ctx: Ctx, temperature: float = 1.0) -> Tensor:
        """(batch, n) log p(label | inputs) at each token, of logits / temperature, and 0 where the label is −100. Logits are
        computed for the labels alone, some of them at a time."""
        if ctx.losses is None and (ctx.draws is not None or self.training):
            ctx.losses = Losses()
        x, ctx = self.hidden(inputs, dc.replace(ctx, labels=labels))
        wanted = labels != IGNORED
        found = label_log_probs(lambda part: self.head(part, ctx) / temperature, x[wanted], labels[wanted])
        return found.new_zeros(labels.shape).masked_scatter(wanted, found)

    def next_logits(self, inputs: Tensor, ctx: Ctx) -> Tensor:
        """The logits of the last token alone, (…, 1, vocab)."""
        x, ctx = self.hidden(inputs, ctx)
        return self.head(x[..., -1:, :], ctx)

    def hidden(self, inputs: Tensor, ctx: Ctx) -> tuple[Tensor, Ctx]:
        """Hidden states after the last layer and norm (…, n, embed), and the ctx with their token layout."""
        x, embedded, ctx = self.begin(inputs, ctx)
        x = self.end(self.run_layers(x, ctx, self.carried(inputs, x), range(len(self.layers))), ctx)
        if self.part.mtp and self._looks_ahead(ctx):
            ahead = self.embed.widen(embedded) if reads_tokens(self.part.mtp) else None
            look_ahead(self.mtp, self.head, x, ahead, inputs, ctx)
        return x, ctx

    def begin(self, inputs: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor, Ctx]:
        """The residual stream before the first layer, the embeddings alone, and the ctx with their token layout."""
        ctx = ctx.for_mode(self) if self.training else ctx
        embedded, layout = self.embed(inputs, ctx)
        layout.expect(embedded, "inputs")
        if ctx.encoder_output is not None and ctx.encoder_layout is not None:
            ctx.encoder_layout.expect(ctx.encoder_output, "encoder output")
        if layout is not ctx.layout:
            ctx = dc.replace(ctx, layout=layout)
        x = self.position.embed(embedded, layout) if self.positioned else embedded
        if self.part.embed_norm is not None:
            x = self.embed_norm(x, ctx)
        if ctx.draws is not None:
            x = ctx.draws.dropout(ctx, x, self.part.dropout, self, "embedded", self.embedded_axes)
        x = self.embed.widen(x)
        return x if ctx.taps is None else ctx.tap(self, "embedded", x), embedded, ctx

    def carried(self, inputs: Tensor, x: Tensor) -> Carried:
        """The values of the model that layers may read, by source and name."""
        return {(self.path, "inputs"): inputs, (self.path, "embedded"): x}

    def run_layers(self, x: Tensor, ctx: Ctx, carried: Carried, which: range) -> Tensor:
        """Run these layers; values that they publish are added to `carried`."""
        layers = self.layers
        for i in which:
            block, views = layers[i], NO_VIEWS if ctx.views is None else ctx.views[i]
            x = block(x, ctx, views) if block.io is None else self.across(block, x, ctx, views, carried)
        return x

    def end(self, x: Tensor, ctx: Ctx) -> Tensor:
        """Normalize what the last layer returns."""
        x = x if self.part.norm is None else self.norm(x, ctx)
        return x if self.part.norm is None or ctx.taps is None else ctx.tap(self, "normed", x)

    def _looks_ahead(self, ctx: Ctx) -> bool:
        """Whether multi-token prediction runs: where its loss is collected, or someone listens to one of its taps."""
        asked = ctx.losses is not None or (ctx.taps is not None and any(map(ctx.taps.wants, self.taps_ahead)))
        return asked and ctx.views is None

    def draft(
        self, hidden: Tensor, tokens: Tensor, ctx: Ctx, depth: int = 1, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits (…, n, vocab) of the token after `tokens`, by one depth of multi-token prediction, and its hidden states. The
        arguments are those of `hidden_ahead`."""
        x = self.hidden_ahead(hidden, tokens, ctx, depth, before)
        return self.logits_ahead(x, ctx, depth), x

    def logits_ahead(self, x: Tensor, ctx: Ctx, depth: int) -> Tensor:
        """Logits (…, n, vocab) from the hidden states of one depth."""
        return self.mtp[depth - 1].predictor(self.head)(x, ctx)

    def hidden_ahead(self, hidden: Tensor, tokens: Tensor, ctx: Ctx, depth: int = 1, before: Tensor | None = None) -> Tensor:
        """Hidden states (…, n, embed) of one depth of multi-token prediction, from which its head predicts the token after
        `tokens`.

        hidden (…, n, embed) are those of `hidden()`, and `before` those of the depth before; tokens (…, n) are the known or
        drafted tokens `depth` places after them. ctx has the layout of the hidden states and, to continue, the views of a
        Pool(spec, rows, capacity, drafts=True).
        """
        if not 1 <= depth <= len(self.part.mtp):
            raise InputError(f"depth: {depth} of {len(self.part.mtp)} depths of multi-token prediction; they count from 1")
        ctx.layout.expect(hidden, "hidden")
        inputs = self.part.mtp[depth - 1].inputs
        known: dict[AheadInput, Tensor] = {"hidden": hidden}
        if "before" in inputs:
            if before is None and depth > 1:
                raise InputError(f"before: depth {depth} reads the hidden states of depth {depth - 1}; give them")
            known["before"] = hidden if before is None else before
        if "embedded" in inputs:
            embedded, _ = self.embed(tokens, ctx)
            ctx.layout.expect(embedded, "tokens")
            known["embedded"] = self.embed.widen(embedded)
        views = NO_VIEWS if ctx.views is None else ctx.views[depth - 1]
        return self.mtp[depth - 1](*(known[name] for name in inputs), ctx, views)

    def across(self, block: BlockModule, x: Tensor, ctx: Ctx, views: Any, carried: Carried) -> Tensor:
        """A block that reads values of earlier ones, or publishes some, which are added to `carried`."""
        assert block.io is not None
        out = block(x, ctx, views, *(carried[read.source, read.name] for _, read in block.io.reads))
        if not block.io.wanted:
            return out
        x, *values = out
        carried |= {(f"{block.path}.{branch}", name): v for (branch, name), v in zip(block.io.wanted, values, strict=True)}
        return x

    def encode(self, source: Tensor, ctx: Ctx) -> tuple[Tensor, TokenLayout]:
        """The encoder output (…, m, encoder) of a source, and its token layout; `ctx` is that of the source."""
        x, ctx = self.encoder.hidden(source, ctx)
        return x, ctx.layout

    def fill(self, ctx: Ctx, views: Any) -> None:
        """At admission: store what mixers read of the encoder output: keys and values of cross attention, initial states."""
        for block, view in zip(self.layers, views, strict=True):
            block.fill(ctx, view)
