"""Pieces of a known model that can be changed and run alone: one layer, the embedding, or the last norm with the head.

A piece runs on the input that it had in the whole model, on which both sides still agree. Weights of other pieces stay on meta.
"""

from __future__ import annotations

import dataclasses as dc
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from dovetail.hf.resolved import differences
from dovetail.model.construction import on_meta
from dovetail.model.model import Model, ModelModule
from dovetail.nn.block import NO_VIEWS, Block
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.proof.compare import candidates
from dovetail.proof.compare.candidates import Candidate, with_tensors
from dovetail.proof.compare.comparison import EXACT, SideComparison
from dovetail.proof.compare.field_candidates import field_candidates, layer_candidates, show
from dovetail.proof.compare.prompt import Prompt
from dovetail.proof.compare.record import ANSWER
from dovetail.proof.compare.sides import encoded
from dovetail.spec.fold import Declared, declared
from dovetail.spec.part import Part
from dovetail.spec.part_proof import cause_of

OTHER_WEIGHTS = "other numbers in the weights"
MOST_ROWS = 0.5  # of a table: where fewer rows differ it is the same table with some values changed


class Embedded(Exception):
    """Stops a forward pass after the embedding, with the residual stream."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class CauseSearch:
    """The input of a search for a cause: a known model in float64, its prompt, and the recordings of both sides."""

    def __init__(
        self,
        model: ModelModule,
        prompt: Prompt,
        comparison: SideComparison,
        *,
        known: int = 0,
        other: Model | None = None,
        noise: float = 0.0,
    ) -> None:
        """`known`: the index of the model's side; `other`: the spec of the other side, where it has one; `noise`: the epsilon
        of the dtype in which the other side was recorded, where that is not float64."""
        self.model, self.spec, self.prompt, self.other, self.noise = model, model.part, prompt, other, noise
        self.own, self.theirs = comparison.exact[known], comparison.exact[1 - known]

    def input(self, address: str) -> Tensor | None:
        """The input of a piece. Of a recording that is rounded it is the other side's own, so that what was rounded before does
        not count against a candidate."""
        sides = (self.theirs, self.own) if self.noise else (self.own,)
        return next((side.taps[address] for side in sides if address in side.taps), None)

    def layout(self) -> TokenLayout:
        """A new layout of the prompt's tokens: values computed once per step are cached in it."""
        return TokenLayout.whole(self.prompt.batch, self.prompt.n)

    def unflatten(self, rows: Tensor) -> Tensor:
        """(batch · n, …) -> (batch, n, …) in float64."""
        return rows.to(EXACT).reshape(self.prompt.batch, self.prompt.n, -1)


class ModelPiece(ABC):
    """A part of the model that can be changed and run alone; `address` is that of its output."""

    factor_name = "scale"

    def __init__(self, search: CauseSearch, part: Part, address: str) -> None:
        self.search, self.part, self.address = search, part, address

    def own(self) -> Tensor | None:
        """The output of the piece in the known model."""
        return self.search.own.taps.get(self.address)

    def target(self) -> Tensor | None:
        """The output of the other side."""
        return self.search.theirs.taps.get(self.address)

    @abstractmethod
    def source(self) -> Tensor | None:
        """The input of the piece."""

    @abstractmethod
    def build(self, candidate: Candidate) -> ModelModule | None:
        """A model that holds the changed piece; None where it needs weights that do not exist."""

    @abstractmethod
    def run(self, model: ModelModule) -> Tensor:
        """The output of the changed piece."""

    @abstractmethod
    def candidates(self) -> Iterator[Candidate]:
        """The candidates, likeliest first."""


class LayerPiece(ModelPiece):
    """One layer."""

    factor_name = "layer's scale"

    def __init__(self, search: CauseSearch, address: str) -> None:
        self.number = int(address.rpartition(".")[2])
        super().__init__(search, search.spec.layers[self.number], address)
        self.weights = self._weights_of(self.number)
        self.tensors = self._tensors_of(self.number)
        self.unchanged: ModelModule | None = None
        self.encoder = None
        if search.prompt.source is not None:
            with torch.no_grad():
                self.encoder = encoded(search.model, search.prompt.source)

    def _weights_of(self, number: int) -> dict[str, Declared]:
        """The declared weights of a layer by their path in it."""
        start = f"layers.{number}."
        found = (d for d in declared(self.search.spec) if d.path.startswith(start) and d.weight.role != "const")
        return {d.path.removeprefix(start): d for d in found}

    def _tensors_of(self, number: int) -> dict[str, Tensor]:
        """The tensors of a layer by their path in it."""
        model = self.search.model
        return {path: tensor_at(model, d.path).detach() for path, d in self._weights_of(number).items()}

    def source(self) -> Tensor | None:
        x = self.search.input(f"{self.address}.in")
        if self.search.noise and self.number and f"{self.address}.in" not in self.search.theirs.taps:
            x = self.search.input(f"layers.{self.number - 1}")
        alone = (
            self.search.spec.layers[self.number].wire.streams() == 1
        )  # several residual streams are opened and closed by other layers
        return self.search.unflatten(x) if x is not None and alone else None

    def build(self, candidate: Candidate) -> ModelModule | None:
        assert isinstance(candidate.part, Block)
        reusable = candidate.part is self.part and candidate.edit is None
        spec = dc.replace(self.search.spec, layers=(candidate.part,))
        tensors = {f"layers.0.{path}": tensor for path, tensor in {**self.tensors, **candidate.tensors}.items()}
        into = self.unchanged if reusable else None
        model = with_tensors(spec, tensors, EXACT, runs=lambda path: path.startswith("layers.0."), into=into)
        if reusable and model is not None:
            self.unchanged = model  # the next candidate may put other tensors into it
        if model is not None and candidate.edit is not None:
            candidate.edit(model.layers[0])
        return model

    def run(self, model: ModelModule) -> Tensor:
        x = self.source()
        assert x is not None
        ctx = Ctx(layout=self.search.layout())
        if self.encoder is not None:
            ctx.encoder_output, ctx.encoder_layout = self.encoder
        return model.layers[0](x, ctx, NO_VIEWS)

    def candidates(self) -> Iterator[Candidate]:
        part, tensors, depth = self.part, self.tensors, len(self.search.spec.layers)
        others = {f"layers.{i}": self._tensors_of(i) for i in range(depth) if i != self.number}
        model = self.build(Candidate("", "", "", part))
        assert model is not None
        block = model.layers[0]
        if self.search.other is not None and len(self.search.other.layers) > self.number:
            yield from _toward(part, self.search.other.layers[self.number])
        named, unnamed = _by_name(layer_candidates(part, block))
        yield from named
        yield from candidates.head_orders(part, tensors, self.weights)
        yield from candidates.swapped(part, tensors, self.weights)
        yield from candidates.transposed(part, tensors)
        yield from candidates.unused(part, tensors, self.weights)
        yield from candidates.edits(part, block, field_candidates)
        yield Candidate("layer skipped", "", f"{self.address} returns its input", part, edit=_skip)
        yield from candidates.other_layers(part, tensors, others)
        yield from unnamed


def _by_name(every: Iterator[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Candidates with a name of their own, and those that are called by their path."""
    found = list(every)
    return [one for one in found if one.cause != one.place], [one for one in found if one.cause == one.place]


def _skip(block: nn.Module) -> None:
    block.forward = lambda x, *_: x  # type: ignore[method-assign]


def _toward(ours: Part, theirs: Part) -> Iterator[Candidate]:
    """Our part with one field as the config of the other side has it."""
    for where, mine, other in differences(ours, theirs):
        owner, _, field = where.rpartition(".")
        part = ours
        for name in owner.split(".") if owner else ():
            part = part.parts().get(name, part)
        cause = cause_of(part, field, where).cause
        description = f"{where}: {show(other)} instead of {show(mine)}, as its config says"
        yield Candidate(cause, where, description, ours.replace(where, other))


class OuterPiece(ModelPiece):
    """The embedding or the head: its spec is the whole model's, with one layer that never runs."""

    skip = frozenset({"layers", "encoder", "init", "width", "vocab", "dropout"})
    fields: frozenset[str]  # of the model, whose parts this piece runs
    output: str  # its address

    def __init__(self, search: CauseSearch) -> None:
        self.model_part = dc.replace(search.spec, layers=search.spec.layers[:1])
        super().__init__(search, self.model_part, self.output)
        outer = [d for d in declared(search.spec) if d.weight.role != "const" and not d.scope.stack]
        self.tensors = {d.path: tensor_at(search.model, d.path).detach() for d in outer}
        self.weights = {d.path: d for d in outer if self.runs(d.path)}

    def runs(self, path: str) -> bool:
        """Whether a tensor or a module belongs to this piece."""
        return path.partition(".")[0] in self.fields

    def build(self, candidate: Candidate) -> ModelModule | None:
        assert isinstance(candidate.part, Model)
        tensors = {**self.tensors, **candidate.tensors}
        tied = {d.path: tensors[d.weight.same_as] for d in declared(candidate.part) if d.weight.same_as in tensors}
        model = with_tensors(candidate.part, {**tied, **tensors}, EXACT, runs=self.runs)
        if model is not None and candidate.edit is not None:
            candidate.edit(model)
        return model

    def candidates(self) -> Iterator[Candidate]:
        """Candidates from fields, from the tensors of the piece and from its modules."""
        tensors = {path: self.tensors[path] for path in self.weights}
        part, other = self.model_part, self.search.other
        if other is not None:
            yield from _toward(part, dc.replace(other, layers=part.layers, encoder=part.encoder, init=part.init))
        yield from field_candidates(part, self.skip)
        yield from candidates.unused(part, tensors, self.weights)
        yield from candidates.transposed(part, tensors)
        yield from (edit for edit in candidates.edits(part, on_meta(part), field_candidates) if self.runs(edit.place))


class EmbeddingPiece(OuterPiece):
    """The embedding and positions, up to the first layer."""

    factor_name = "embedding scale"
    fields = frozenset({"embed", "embed_norm", "position"})
    output = "layers.0.in"

    def source(self) -> Tensor | None:
        return self.search.prompt.inputs

    def run(self, model: ModelModule) -> Tensor:
        def stop(address: str, x: Tensor) -> None:
            raise Embedded(x)

        ctx = Ctx(layout=self.search.layout(), types=self.search.prompt.types, taps=Listener({"embedded": stop}))
        try:
            model(self.search.prompt.inputs, ctx)
        except Embedded as stopped:
            return stopped.x
        raise AssertionError("the model has no tap `embedded`")

    def candidates(self) -> Iterator[Candidate]:
        yield from super().candidates()
        tables = [path for path, d in self.weights.items() if "position" in d.weight.out]
        for path in tables:
            for shift in (1, -1, 2, -2):
                rolled = {path: self.tensors[path].roll(-shift, 0)}
                yield Candidate("position offset", path, f"{path} is read {shift:+d} rows off", self.part, rolled)


class HeadPiece(OuterPiece):
    """The last norm and the head."""

    factor_name = "logit scale"
    fields = frozenset({"norm", "head"})
    output = ANSWER

    def __init__(self, search: CauseSearch, tables: Mapping[str, Tensor]) -> None:
        """`tables`: the tensors of the other side by its own names."""
        super().__init__(search)
        self.tables, self.last = tables, f"layers.{len(search.spec.layers) - 1}"

    def source(self) -> Tensor | None:
        x = self.search.input(self.last)
        return None if x is None else self.search.unflatten(x)

    def run(self, model: ModelModule) -> Tensor:
        x, ctx = self.source(), Ctx(layout=self.search.layout())
        assert x is not None
        x = x if model.part.norm is None else model.norm(x, ctx)
        return x if model.part.head is None else model.head(x, ctx)

    def candidates(self) -> Iterator[Candidate]:
        yield from super().candidates()
        tables = (d for d in declared(self.search.spec) if d.weight.role == "embed" and "vocab" in d.weight.out)
        embedding = next((self.tensors.get(d.path) for d in tables), None)
        for path, d in self.weights.items():
            if "vocab" not in d.weight.out or not d.weight.inp:
                continue
            if d.weight.same_as is None and embedding is not None and embedding.shape == self.tensors[path].shape:
                yield Candidate("tied head", path, "the head reads the embedding's table", self.part, {path: embedding})
            yield from self._other_tables(path, tied=d.weight.same_as is not None)

    def _other_tables(self, path: str, *, tied: bool) -> Iterator[Candidate]:
        """The head with a table of the other side: a table of its own, or ours with some rows changed."""
        own = self.tensors[path]
        for name, tensor in self.tables.items():
            if tensor.shape != own.shape:
                continue
            table = tensor.to(EXACT)
            changed = int((table != own).any(-1).sum())
            if changed <= MOST_ROWS * len(own):
                description = f"{changed} of {len(own)} rows of {name} changed"
                yield Candidate(OTHER_WEIGHTS, path, description, self.part, {path: table})
            elif tied:
                yield Candidate("untied head", path, f"the head reads a table of its own, {name}", self.part, {path: table})
