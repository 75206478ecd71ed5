"""Block: a mixer, cross attention and an ffn, and the wire that adds what they compute to the residual stream.

    x ← x + scale ∘ multiplier · dropout(f(norm x))     f a mixer, then an ffn; x (…, n, embed), scale (branches, embed)

`pre_norm` is the wire of most models (Xiong et al. 2020); `parts/wire.py` has the other ways to join branches, and
`parts/block.py` blocks with other branches. `multiplier` is a fixed number; `scale` is learned, one number per channel
(LayerScale, Touvron et al. 2021). With `stream_scale` the residual stream that leaves the block is multiplied by one number,
which is saved and not trained (Gemma 4).
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from dovetail.nn.cross_layer import BlockIO, BlockWithValues, Values
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import CrossMixer, Ffn, Mixer, Norm, Steps, Wire
from dovetail.nn.module import Module, entry
from dovetail.spec.field import MAX_FACTOR, bounded
from dovetail.spec.part import Part, Problem, broken, child, register
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight

NO_VIEWS: Mapping[str, Any] = {}


class Branching(Module):
    """The interface of a block that a wire uses."""

    branches: tuple[str, ...]
    steps: Steps

    def branch(self, name: str, x: Tensor, ctx: Ctx, views: Mapping[str, Any], **values: Values) -> Tensor:
        """Apply one branch to x (…, n, embed); a mixer is given its view. `values` is what it reads of other layers, if any."""
        module = self._modules[name]
        assert module is not None
        return module(x, ctx, views[name], **values) if name in views else module(x, ctx, **values)

    def normed(self, name: str, x: Tensor, ctx: Ctx) -> Tensor:
        """Apply one of the norms that the wire declared; x where a branch has norms of its own."""
        norm = self._modules.get(name)
        return x if norm is None else norm(x, ctx)


@dc.dataclass(frozen=True, kw_only=True)
class Scaled(Wire):
    """A wire that can scale and drop out what its branches add."""

    multiplier: float = bounded(1.0, above=0, at_most=MAX_FACTOR)
    # LayerScale: the initial value of one learned number per channel
    layer_scale: float | None = bounded(None, at_least=0, at_most=MAX_FACTOR)
    dropout: float = bounded(0.0, at_least=0, below=1)
    stream_scale: bool = False  # one number of the layer multiplies the residual stream behind its last branch

    def axes(self, scope: Scope) -> Scope:
        return scope.add(one=1)

    def weights(self, scope: Scope) -> list[Weight]:
        declared: list[Weight] = []
        if self.layer_scale is not None:
            declared.append(Weight(name="scale", batch=("branches",), out=("embed",), init="const", role="gate"))
        if self.stream_scale:
            declared.append(Weight(name="stream", out=("one",), init="ones", role="updated", tp="replicate"))
        return declared

    def rescales(self) -> bool:
        return self.stream_scale

    def constant(self, name: str, scope: Scope) -> Tensor:
        assert self.layer_scale is not None
        return torch.full((scope.size("branches"), scope.size("embed")), self.layer_scale, dtype=torch.float64)


class ScaledProof(Proof, of=Scaled):
    """Sampled values and causes."""

    causes = {"multiplier": FieldCause("residual scale", (1.0,))}
    samples = {"multiplier": [1.0, 0.5], "layer_scale": [None, 0.7], "dropout": [0.0, 0.2], "stream_scale": [False, True]}


class WireModule(Module):
    """forward(x, ctx, block, views) -> x after every branch of the block; x is (…, n, embed), or (…, n, streams, embed)."""

    part: Scaled
    scale: Tensor
    stream: Tensor

    def rescaled(self, x: Tensor) -> Tensor:
        """The residual stream behind the last branch, times the number of this layer."""
        return x * self.stream.to(x.dtype)

    def open(self, x: Tensor) -> Tensor:
        """The residual stream (…, n, embed) as several, before the first block that has them."""
        raise NotImplementedError

    def close(self, x: Tensor, ctx: Ctx | None = None) -> Tensor:
        """Several residual streams (…, n, streams, embed) as one, after the last block that has them."""
        raise NotImplementedError

    def sum(self, block: Branching, step: tuple[str, ...], x: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
        """What the branches of a step, all of which read x, add to the residual stream together."""
        total = self.added(block.branch(step[0], x, ctx, views), block, step[0], ctx)
        for name in step[1:]:
            total = total + self.added(block.branch(name, x, ctx, views), block, name, ctx)
        return total

    def added(self, y: Tensor, block: Branching, branch: str, ctx: Ctx) -> Tensor:
        """Return y, scaled and dropped out: what the branch adds to the residual stream."""
        part = self.part
        if part.layer_scale is not None:
            y = y * self.scale[block.branches.index(branch)]
        if part.multiplier != 1.0:
            y = y * part.multiplier
        if ctx.draws is not None:
            y = ctx.draws.dropout(ctx, y, part.dropout, block, branch)
        return y if ctx.taps is None else ctx.tap(block, f"{branch}_add", y)


@register("pre_norm")
class PreNorm(Scaled):
    """x + f(norm x)."""

    first_norm: bool = True  # False: the first branch reads the stream itself (ModernBERT, where the embedding is normed)

    of_first_norm = frozenset({"first_norm"})

    def norms(self, steps: Steps) -> tuple[str, ...]:
        return tuple(f"{step[0]}_norm" for step in steps[0 if self.first_norm else 1 :])


class PreNormProof(ScaledProof, of=PreNorm):
    """Sampled values."""

    samples = {**ScaledProof.samples, "first_norm": [True, False]}


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


@register("block")
class Block(Part):
    """A mixer, cross attention, an ffn, or some of these, wired to the stream. A subclass may have other branches: fields that
    hold a mixer or an ffn, named in STEPS."""

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


class BlockProof(Proof, of=Block):
    """Causes and idle fields."""

    causes = {"norm": FieldCause("kind of norm"), "wire": FieldCause("wiring")}

    def idle(self, part: Block, scope: Scope) -> frozenset[str]:
        unused = frozenset() if part.norms() else frozenset(f"norm.{field.name}" for field in dc.fields(part.norm))
        same = not part.norm.weights(part.norm.axes(part.child_scope(scope, "norm")))
        no_first = all(map(part.norms_itself, next(iter(part.steps()), ())))
        counted = {*(part.wire.counts_norms if same else ()), *(part.wire.of_first_norm if no_first else ())}
        return unused | {f"wire.{name}" for name in counted}


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
        x = wire.close(x, ctx) if self.closes else x
        values = [] if passed is None else passed.wanted()
        return (x, *values) if values else x

    @entry()
    def fill(self, ctx: Ctx, views: Mapping[str, Any]) -> None:
        """Store what its mixers read of the encoder output."""
        for name, mixer in self.part.mixers().items():
            if mixer.reads_encoder() or mixer.starts_from_encoder():
                self.modules_named(name).fill(ctx, views[name])
