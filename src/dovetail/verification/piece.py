"""Pieces of a known model that can be altered and run alone: one layer, what stands before the layers, what stands behind.

A piece is given what it was given in the whole model, on which both sides still agree; weights of other pieces stay on meta.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from dovetail.construction import on_meta, set_constants
from dovetail.core.ctx import Ctx, Listener
from dovetail.core.fold import declared
from dovetail.core.layout import TokenLayout
from dovetail.core.module import holder, tensor_at
from dovetail.core.part import Part
from dovetail.model import NO_VIEWS, Block, Model, ModelModule
from dovetail.port.explicit import differences
from dovetail.verification import alter
from dovetail.verification.alter import Alteration, Tensors
from dovetail.verification.prompt import Prompt
from dovetail.verification.record import ANSWER
from dovetail.verification.walk import EXACT, Walked
from dovetail.verification.words import word_of


class Heard(Exception):
    """The activation that was waited for."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Scene:
    """A known model in float64, what it was asked, and what the other side gave."""

    def __init__(
        self, model: ModelModule, prompt: Prompt, walked: Walked, *, known: int = 0, other: Model | None = None
    ) -> None:
        """`known`: which side the model is; `other`: the other side's spec, where it has one."""
        self.model, self.spec, self.prompt, self.other = model, model.part, prompt, other
        self.own, self.theirs = walked.exact[known], walked.exact[1 - known]

    def layout(self) -> TokenLayout:
        """Where the tokens stand; new each time, as what was computed once is remembered in it."""
        return TokenLayout.whole(self.prompt.batch, self.prompt.n)

    def shaped(self, rows: Tensor) -> Tensor:
        """(batch, n, …) again, from one row a token."""
        return rows.to(EXACT).reshape(self.prompt.batch, self.prompt.n, -1)


class Piece:
    """A part of the model that can be altered and run alone."""

    factor_name = "scale"

    def __init__(self, scene: Scene, part: Part) -> None:
        self.scene, self.part = scene, part

    def source(self) -> Tensor | None:
        """What the piece is given."""
        raise NotImplementedError

    def own(self) -> Tensor | None:
        """What it gave in the model."""
        raise NotImplementedError

    def target(self) -> Tensor | None:
        """What the other side gave."""
        raise NotImplementedError

    def made(self, alteration: Alteration) -> ModelModule | None:
        """The altered piece in a model of its own; None where it needs weights that are not there."""
        raise NotImplementedError

    def run(self, model: ModelModule) -> Tensor:
        """What the altered piece gives."""
        raise NotImplementedError

    def alterations(self) -> Iterator[Alteration]:
        """The candidates, most likely first."""
        raise NotImplementedError


class Layer(Piece):
    """One layer of the stack."""

    factor_name = "layer's scale"

    def __init__(self, scene: Scene, address: str) -> None:
        self.address, self.number = address, int(address.rpartition(".")[2])
        super().__init__(scene, scene.spec.layers[self.number])
        self.tensors = self._of(self.number)
        self.base: ModelModule | None = None
        self.memory = None
        if scene.prompt.source is not None:
            there = TokenLayout.whole(scene.prompt.batch, scene.prompt.source.shape[1])
            with torch.no_grad():
                self.memory = scene.model.encode(scene.prompt.source, Ctx(layout=there))

    def _of(self, number: int) -> dict[str, Tensor]:
        """The tensors of a layer by their path in it."""
        start = f"layers.{number}."
        return {
            d.path.removeprefix(start): tensor_at(self.scene.model, d.path).detach()
            for d in declared(self.scene.spec)
            if d.path.startswith(start) and d.weight.role != "const"
        }

    def source(self) -> Tensor | None:
        found = self.scene.own.taps.get(f"{self.address}.in")
        return None if found is None else self.scene.shaped(found)

    def own(self) -> Tensor | None:
        return self.scene.own.taps.get(self.address)

    def target(self) -> Tensor | None:
        return self.scene.theirs.taps.get(self.address)

    def made(self, alteration: Alteration) -> ModelModule | None:
        assert isinstance(alteration.part, Block)
        plain = alteration.part is self.part and alteration.edit is None
        spec = dc.replace(self.scene.spec, layers=(alteration.part,))
        model = self.base if plain and self.base is not None else on_meta(spec)
        given = {**self.tensors, **alteration.tensors}
        if not _filled(model, spec, {f"layers.0.{path}": tensor for path, tensor in given.items()}, "layers.0."):
            return None
        if plain:
            self.base = model  # other tensors can be laid into it
        if alteration.edit is not None:
            alteration.edit(model.layers[0])
        return model

    def run(self, model: ModelModule) -> Tensor:
        x = self.source()
        assert x is not None
        ctx = Ctx(layout=self.scene.layout())
        if self.memory is not None:
            ctx.encoder_output, ctx.encoder_layout = self.memory
        return model.layers[0](x, ctx, NO_VIEWS)

    def alterations(self) -> Iterator[Alteration]:
        part, tensors, depth = self.part, self.tensors, len(self.scene.spec.layers)
        others = {f"layers.{i}": self._of(i) for i in range(depth) if i != self.number}
        made = self.made(Alteration("", "", part))
        assert made is not None
        if self.scene.other is not None and len(self.scene.other.layers) > self.number:
            yield from _toward(part, self.scene.other.layers[self.number])
        first, last = self._likely(chain(alter.fields(part), alter.stretched(part), self._scales(made)))
        yield from first
        yield from alter.heads_in_order(part, tensors)
        yield from alter.exchanged(part, tensors)
        yield from alter.on_their_side(part, tensors)
        yield from alter.left_out(part, tensors)
        yield from alter.edits(part, made.layers[0])
        yield Alteration("layer skipped", f"{self.address} gives what it is given", part, edit=_skip)
        yield from alter.other_layers(part, tensors, others)
        yield from last

    def _scales(self, made: ModelModule) -> Iterator[Alteration]:
        mixer = made.layers[0].mixer
        sizes = mixer.scope.sizes
        if "head" in sizes:
            yield from alter.score_scales(self.part, sizes["head"], sizes["embed"])

    def _likely(self, found: Iterator[Alteration]) -> tuple[list[Alteration], list[Alteration]]:
        """Those with a name of their own before those called by their path."""
        every = list(found)
        named = [one for one in every if not one.says.startswith(f"{one.cause}:")]
        return named, [one for one in every if one.says.startswith(f"{one.cause}:")]


def _skip(block: nn.Module) -> None:
    block.forward = lambda x, *_: x  # type: ignore[method-assign]


def _toward(ours: Part, theirs: Part) -> Iterator[Alteration]:
    """Our part with one field as the other side's own config has it."""
    for where, mine, other in differences(ours, theirs):
        owner, _, field = where.rpartition(".")
        holding = ours
        for name in owner.split(".") if owner else ():
            holding = holding.parts().get(name, holding)
        cause = word_of(holding.kind, holding.group, field, where).cause
        says = f"{where}: {alter.say(other)} instead of {alter.say(mine)}, as its config says"
        yield Alteration(cause, says, ours.replace(where, other))


def _filled(model: ModelModule, spec: Model, tensors: Tensors, prefix: str) -> bool:
    """Give the model these tensors; False where one is missing or of another shape. Others may be left on meta."""
    wanted = {d.path: d for d in declared(spec) if d.weight.role != "const" and d.path.startswith(prefix)}
    for path, d in wanted.items():
        if path not in tensors or tuple(tensors[path].shape) != d.weight.shape(d.scope):
            return False
        module, leaf = holder(model, path)
        if d.weight.buffer:
            module.register_buffer(leaf, tensors[path])
        else:
            module.register_parameter(leaf, nn.Parameter(tensors[path], requires_grad=False))
    set_constants(model, spec, EXACT, "cpu")
    return True


class Around(Piece):
    """What is no layer: its spec is the whole model's, with one layer that is never run."""

    skip = frozenset({"layers", "encoder", "init", "width", "vocab", "dropout"})

    def __init__(self, scene: Scene) -> None:
        self.model_part = dc.replace(scene.spec, layers=scene.spec.layers[:1])
        super().__init__(scene, self.model_part)
        self.tensors = {
            d.path: tensor_at(scene.model, d.path).detach()
            for d in declared(scene.spec)
            if d.weight.role != "const" and not d.path.startswith(("layers.", "encoder."))
        }

    def made(self, alteration: Alteration) -> ModelModule | None:
        assert isinstance(alteration.part, Model)
        spec, model = alteration.part, on_meta(alteration.part)
        given = {**self.tensors, **alteration.tensors}
        for d in declared(spec):
            if d.weight.role == "const" or d.path.startswith(("layers.", "encoder.")) or not self.concerns(d.path):
                continue
            source = d.path if d.path in given else d.weight.same_as or d.path
            if source not in given or tuple(given[source].shape) != d.weight.shape(d.scope):
                return None
            module, leaf = holder(model, d.path)
            module.register_parameter(leaf, nn.Parameter(given[source], requires_grad=False))
        set_constants(model, spec, EXACT, "cpu")
        if alteration.edit is not None:
            alteration.edit(model)
        return model

    def concerns(self, path: str) -> bool:
        """Whether a tensor belongs to this piece."""
        raise NotImplementedError

    def changed(self) -> Iterator[Alteration]:
        """All alterations of fields and of the piece's own tensors."""
        mine = {path: tensor for path, tensor in self.tensors.items() if self.concerns(path)}
        part = self.model_part
        if self.scene.other is not None:
            told = dc.replace(self.scene.other, layers=part.layers, encoder=part.encoder, init=part.init)
            yield from _toward(part, told)
        yield from alter.fields(part, self.skip)
        yield from alter.left_out(part, mine)
        yield from alter.on_their_side(part, mine)
        model = on_meta(part)
        for one in alter.edits(part, model):
            if self.concerns(one.says.split(" ")[0]):
                yield one


class Front(Around):
    """Embedding and positions, up to the first layer."""

    factor_name = "embedding scale"

    def concerns(self, path: str) -> bool:
        return path.startswith(("embed", "position"))

    def source(self) -> Tensor | None:
        return self.scene.prompt.inputs

    def own(self) -> Tensor | None:
        return self.scene.own.taps.get("layers.0.in")

    def target(self) -> Tensor | None:
        return self.scene.theirs.taps.get("layers.0.in")

    def run(self, model: ModelModule) -> Tensor:
        def stop(address: str, x: Tensor) -> None:
            raise Heard(x)

        ctx = Ctx(layout=self.scene.layout(), types=self.scene.prompt.types, listen=Listener({"embedded": stop}))
        try:
            model(self.scene.prompt.inputs, ctx)
        except Heard as heard:
            return heard.x
        raise AssertionError("the embedding was never heard")

    def alterations(self) -> Iterator[Alteration]:
        yield from self.changed()
        table = self.tensors.get("position.table")
        if table is not None:
            for shift in (1, -1, 2, -2):
                read = {"position.table": table.roll(-shift, 0)}
                yield Alteration("position offset", f"position.table is read {shift:+d} rows off", self.part, read)


class Back(Around):
    """The last norm and the head."""

    factor_name = "logit scale"

    def __init__(self, scene: Scene, tables: Mapping[str, Tensor]) -> None:
        super().__init__(scene)
        self.tables, self.last = tables, f"layers.{len(scene.spec.layers) - 1}"

    def concerns(self, path: str) -> bool:
        return path.startswith(("norm", "head"))

    def source(self) -> Tensor | None:
        found = self.scene.own.taps.get(self.last)
        return None if found is None else self.scene.shaped(found)

    def own(self) -> Tensor | None:
        return self.scene.own.taps.get(ANSWER)

    def target(self) -> Tensor | None:
        return self.scene.theirs.taps.get(ANSWER)

    def run(self, model: ModelModule) -> Tensor:
        x, ctx = self.source(), Ctx(layout=self.scene.layout())
        assert x is not None
        x = x if model.part.norm is None else model.norm(x, ctx)
        return x if model.part.head is None else model.head(x, ctx)

    def alterations(self) -> Iterator[Alteration]:
        yield from self.changed()
        part, shape = self.part, (self.scene.spec.vocab, self.scene.spec.width)
        yield Alteration("tied head", "the head reads the embedding's table", part, {"head.table": self.tensors["embed.table"]})
        for name, tensor in self.tables.items():
            if tuple(tensor.shape) == shape:
                own = {"head.table": tensor.to(EXACT)}
                yield Alteration("untied head", f"the head reads a table of its own, {name}", part, own)
