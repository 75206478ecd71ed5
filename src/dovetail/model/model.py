"""Model: a whole model as a spec, and its forward pass over a residual stream that blocks read from and add to.

      inputs ── embed ── (+ position) ── [norm] ── block ── block ── … ── norm ── head ── logits

                                                                     └── depths of multi-token prediction, in training

      x (…, n, embed) is the residual stream between blocks; `nn/block.py` has what a block adds to it

An encoder–decoder holds its encoder as a child model, whose output cross attention reads.
Vaswani et al. 2017.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.base.keywords import checks_keywords
from dovetail.disk.yaml import dump_yaml
from dovetail.model.multi_token import MultiTokenModule, look_ahead, reads_tokens
from dovetail.model.swap import LostField, swap_part
from dovetail.nn.block import NO_VIEWS, Block, BlockModule
from dovetail.nn.cross_layer import block_ios
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.groups import Embed, EmbedModule, Head, HeadModule, Init, Mtp, Norm, Order, Position, PositionModule
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.nn.module import Module, entry
from dovetail.nn.ranks import ALONE, Ranks
from dovetail.ops.vocab import label_log_probs
from dovetail.spec.field import bounded
from dovetail.spec.fold import taps
from dovetail.spec.layers import expand, fold
from dovetail.spec.part import Part, Problem, broken, child, register, walk_spec
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope

Carried = dict[tuple[str, str], Tensor]  # values that later layers read, by (path of the source, name)
CHUNK = 64  # tokens per row whose logits are in memory at one time, where answers are compared with labels


@register("model")
class Model(Part):
    """A whole model: embedding, layers, norm, head; perhaps an encoder."""

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
        return swap_part(self, where, new, [])

    def swap_losses(self, where: str, new: Any) -> list[LostField]:
        """The fields that `swap(where, new)` drops, because the new kind does not have them."""
        lost: list[LostField] = []
        swap_part(self, where, new, lost)
        return lost

    # -- short forms

    @classmethod
    def from_short_form(cls, data: Any) -> Any:
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


class ModelProof(Proof, of=Model):
    """Sampled values and causes."""

    causes = {
        "position": FieldCause("position missing"),
        "embed_norm": FieldCause("norm missing"),
        "norm": FieldCause("norm missing"),
    }
    samples = {"dropout": [0.0, 0.2]}


@checks_keywords
class ModelModule(MultiTokenModule, of=Model):
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

    @entry()
    def loss(self, inputs: Tensor, targets: Tensor, ctx: Ctx) -> Tensor:
        """The mean of the head's loss over all labels of the batch, those of other ranks too; in training plus the losses that
        parts add (router losses, multi-token prediction), which are collected in ctx.losses."""
        loss, ctx = self._head_loss(inputs, targets, ctx)
        return ctx.with_added(ctx.ranks.batch_mean(loss))

    @entry()
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

    @entry()
    def loss_and_hits(self, inputs: Tensor, targets: Tensor, ctx: Ctx) -> tuple[LossSum, Tensor]:
        """The head's loss alone, and how many labels () are the most probable answer; for heads with logits."""
        x, ctx = self.hidden(inputs, dc.replace(ctx, labels=targets))
        return self.head.loss(x, targets, ctx), self.hits(x, targets, ctx)

    @entry()
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

    @entry()
    def log_probs(self, inputs: Tensor, labels: Tensor, ctx: Ctx, temperature: float = 1.0) -> Tensor:
        """(batch, n) log p(label | inputs) at each token, of logits / temperature, and 0 where the label is −100. Logits are
        computed for the labels alone, some of them at a time."""
        if ctx.losses is None and (ctx.draws is not None or self.training):
            ctx.losses = Losses()
        x, ctx = self.hidden(inputs, dc.replace(ctx, labels=labels))
        wanted = labels != IGNORED
        found = label_log_probs(lambda part: self.head(part, ctx) / temperature, x[wanted], labels[wanted])
        return found.new_zeros(labels.shape).masked_scatter(wanted, found)

    @entry()
    def next_logits(self, inputs: Tensor, ctx: Ctx) -> Tensor:
        """The logits of the last token alone, (…, 1, vocab)."""
        x, ctx = self.hidden(inputs, ctx)
        return self.head(x[..., -1:, :], ctx)

    @entry(nested=True)
    def hidden(self, inputs: Tensor, ctx: Ctx) -> tuple[Tensor, Ctx]:
        """Hidden states after the last layer and norm (…, n, embed), and the ctx with their token layout."""
        x, embedded, ctx = self.begin(inputs, ctx)
        x = self.end(self.run_layers(x, ctx, self.carried(inputs, x), range(len(self.layers))), ctx)
        if self.part.mtp and self._looks_ahead(ctx):
            ahead = self.embed.widen(embedded, ctx) if reads_tokens(self.part.mtp) else None
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
        x = self.embed.widen(x, ctx)
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

    def across(self, block: BlockModule, x: Tensor, ctx: Ctx, views: Any, carried: Carried) -> Tensor:
        """A block that reads values of earlier ones, or publishes some, which are added to `carried`."""
        assert block.io is not None
        out = block(x, ctx, views, *(carried[read.source, read.name] for _, read in block.io.reads))
        if not block.io.wanted:
            return out
        x, *values = out
        carried |= {(f"{block.path}.{branch}", name): v for (branch, name), v in zip(block.io.wanted, values, strict=True)}
        return x

    @entry()
    def encode(self, source: Tensor, ctx: Ctx) -> tuple[Tensor, TokenLayout]:
        """The encoder output (…, m, encoder) of a source, and its token layout; `ctx` is that of the source."""
        x, ctx = self.encoder.hidden(source, ctx)
        return x, ctx.layout

    @entry()
    def fill(self, ctx: Ctx, views: Any) -> None:
        """At admission: store what mixers read of the encoder output: keys and values of cross attention, initial states."""
        for block, view in zip(self.layers, views, strict=True):
            block.fill(ctx, view)
