"""What law 8 compares: one model whole, and the same over two ranks by tensor, by FSDP, or with its sequence split.

    with Pair() as pair:
        found = compare_sharded(pair, to_yaml(spec), seed=0, how="tp")        found.worst -> ("layers.0.mixer.q.weight", 3e-15)

Each rank makes both models from the same text and seed, in float64 with perturbed weights, and reads a ragged batch of packed
documents, some of which lie across the cut. The scalar that gradients are taken of is a fixed random projection of the output.
"""

from __future__ import annotations

import atexit
import dataclasses as dc
import functools
import warnings
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dovetail.construction import generator
from dovetail.core.ctx import Ctx
from dovetail.core.errors import SpecError
from dovetail.core.layout import TokenLayout
from dovetail.core.scope import Scope
from dovetail.dist.collective import joined, summed
from dovetail.dist.context import piece, split_views, whole_encoder_output
from dovetail.dist.mesh import make_mesh
from dovetail.dist.pair import Pair
from dovetail.dist.shard import fully_shard_model, tensor_parallel
from dovetail.io.spec import from_yaml, to_yaml
from dovetail.lawbook.case import RELATION, Case, NotApplicable, law, perturbed
from dovetail.model import Model, ModelModule

How = Literal["tp", "fsdp", "sequence"]
N = 14
# half of the sequence ends inside a document and between two; half of the rows hold half of the documents
DOCUMENTS = ((5, 4, 3), (7, 2), (12,), (1, 6, 3, 2))
SOURCES = ((3, 6, 2), (4, 8), (14,), (2, 5, 3, 3))  # as many documents per row: each attends to its own source
SMALL = 1e-4  # of the largest gradient: one that is smaller is held to this scale, being zero but for rounding


@dc.dataclass(frozen=True)
class Compared:
    """How far apart whole and sharded are, relative to scale; or why there is nothing to compare."""

    output: float = 0.0
    gradients: dict[str, float] = dc.field(default_factory=dict)
    reason: str = ""

    @property
    def worst(self) -> tuple[str, float]:
        """What differs most, and by how much."""
        return max([("output", self.output), *self.gradients.items()], key=lambda item: item[1])


@dc.dataclass(frozen=True)
class Batch:
    """Inputs and where they stand; a source where there is an encoder; the weights of the projection."""

    inputs: Tensor
    layout: TokenLayout
    source: Tensor | None
    source_layout: TokenLayout | None
    weight: Tensor  # of each output, zero at padding

    def rows(self, group: dist.ProcessGroup) -> Batch:
        """This rank's share of the rows."""
        source = None if self.source is None else piece(self.source, group, 0)
        source_layout = None if self.source_layout is None else _rows(self.source_layout, group)
        return Batch(
            piece(self.inputs, group, 0), _rows(self.layout, group), source, source_layout, piece(self.weight, group, 0)
        )

    def columns(self, group: dist.ProcessGroup) -> Batch:
        """This rank's piece of every row."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        source = None if self.source is None else piece(self.source, group)
        source_layout = None if self.source_layout is None else self.source_layout.cut(ranks, rank)
        return Batch(
            piece(self.inputs, group), self.layout.cut(ranks, rank), source, source_layout, piece(self.weight, group, 1)
        )


@functools.cache
def the_pair() -> Pair:
    """This process's pair of ranks, started by the first law that asks, ended with the process."""
    pair = Pair()
    atexit.register(pair.close)
    return pair


@law(
    8,
    "sharded",
    "tensor parallel, FSDP and a sequence split over two ranks equal one rank, outputs and gradients",
    slow=True,
    budget=3.0,
)
def sharded(case: Case) -> None:
    """Every way that this spec can be split."""
    reasons: list[str] = []
    for how in SPLITS:
        found = compare_sharded(the_pair(), to_yaml(case.spec), case.seed, how)
        if found.reason:
            reasons.append(f"{how}: {found.reason}")
            continue
        path, gap = found.worst
        case.true(gap <= RELATION, f"{how}: {path} differs by {gap:.3g} of its scale")
    if len(reasons) == len(SPLITS):
        raise NotApplicable("; ".join(reasons))


def compare_sharded(pair: Pair, spec_yaml: str, seed: int, how: str) -> Compared:
    """Whole against sharded, the larger difference of any rank."""
    found: list[Compared] = pair.run(compare, spec_yaml, seed, how)
    if any(one.reason for one in found):
        return found[0]
    gradients = {name: max(one.gradients[name] for one in found) for name in found[0].gradients}
    return Compared(max(one.output for one in found), gradients)


def compare(spec_yaml: str, seed: int, how: How) -> Compared:
    """The job of one rank."""
    spec = from_yaml(spec_yaml)
    mesh = _mesh(how)
    model = perturbed(spec, seed)
    try:
        split = SPLITS[how](model, spec, mesh)
    except SpecError as cannot:
        return Compared(reason=str(cannot))
    whole = perturbed(spec, seed)
    batch = make_batch(spec, whole, seed)
    want, want_grads = _run(whole, batch, {})
    got, got_grads = split(batch)
    scales = {name: g.abs().max().item() for name, g in want_grads.items()}
    least = SMALL * max(scales.values())
    gaps = {name: _gap(got_grads[name], g, max(scales[name], least)) for name, g in want_grads.items()}
    return Compared(_gap(got, want, want.abs().max().item()), gaps)


def make_batch(spec: Model, model: ModelModule, seed: int) -> Batch:
    """A ragged batch of packed documents with padding; images as they are."""
    inputs = spec.embed.example(spec.axes(Scope()), len(DOCUMENTS), N, generator(seed, "inputs"))
    layout = TokenLayout.packed(DOCUMENTS, N)
    source, source_layout = None, None
    if spec.encoder is not None:
        source = spec.encoder.embed.example(spec.encoder.axes(Scope()), len(SOURCES), N, generator(seed, "source"))
        source_layout = TokenLayout.packed(SOURCES, N)
    bare = Batch(inputs, layout, source, source_layout, torch.ones(()))
    with torch.no_grad():
        out = _forward(model, bare, {})
    weight = torch.randn(out.shape, generator=generator(seed, "projection"), dtype=out.dtype)
    if spec.embed.causal() and out.shape[:2] == layout.order.shape and not (spec.head is not None and spec.head.pools()):
        weight = weight * layout.real[..., None]
    return dc.replace(bare, weight=weight)


# -- three ways to run the same batch -------------------------------------------------------------------------------


def _by_tensor(model: ModelModule, spec: Model, mesh: DeviceMesh) -> Any:
    tensor_parallel(model, spec, mesh)
    return lambda batch: _run(model, batch, {})


def _by_data(model: ModelModule, spec: Model, mesh: DeviceMesh) -> Any:
    fully_shard_model(model, mesh)
    group, ranks = mesh.get_group(), mesh.size()

    def run(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        with warnings.catch_warnings():  # logits are a view; nothing here writes into them
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            # FSDP gives means over ranks, and the projection of the batch is a sum
            out, gradients = _run(model, batch.rows(group), {}, float(ranks))
        return joined(out, 0, group), gradients

    return run


def _by_sequence(model: ModelModule, spec: Model, mesh: DeviceMesh) -> Any:
    group = mesh.get_group()
    views = {"views": split_views(spec, group)}
    encoder_views = None if spec.encoder is None else split_views(spec.encoder, group)

    def run(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        out, gradients = _run(model, batch.columns(group), views, 1.0, encoder_views, group)
        return joined(out, 1, group), {name: summed(g, group) for name, g in gradients.items()}

    return run


SPLITS = {"tp": _by_tensor, "fsdp": _by_data, "sequence": _by_sequence}


def _forward(
    model: ModelModule, batch: Batch, how: dict[str, Any], encoder_views: Any = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    if batch.source is None or batch.source_layout is None:
        return model(batch.inputs, Ctx(layout=batch.layout, **how))
    encoder_output, encoder_layout = model.encode(batch.source, Ctx(layout=batch.source_layout, views=encoder_views))
    if group is not None:
        encoder_output, encoder_layout = whole_encoder_output(encoder_output, encoder_layout, group)
    return model(batch.inputs, Ctx(layout=batch.layout, encoder_output=encoder_output, encoder_layout=encoder_layout, **how))


def _run(
    model: ModelModule,
    batch: Batch,
    how: dict[str, Any],
    factor: float = 1.0,
    encoder_views: Any = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, zero at padding, and the whole gradient of every parameter, zero where none came."""
    out = _forward(model, batch, how, encoder_views, group)
    (out * batch.weight).sum().mul(factor).backward()
    gradients: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        g = weight.grad
        if g is None:
            g = torch.zeros(weight.shape, dtype=weight.dtype)
        gradients[name] = g.full_tensor() if isinstance(g, DTensor) else g
    return (out * (batch.weight != 0)).detach(), gradients


@functools.cache
def _mesh(how: How) -> DeviceMesh:
    """All ranks along the axis that this way of splitting needs."""
    ranks = dist.get_world_size()
    if how == "tp":
        return make_mesh(tensor=ranks)["tensor"]
    return make_mesh(data=ranks)["data"] if how == "fsdp" else make_mesh(sequence=ranks)["sequence"]


def _rows(layout: TokenLayout, group: dist.ProcessGroup) -> TokenLayout:
    return TokenLayout(piece(layout.coords, group, 0), piece(layout.order, group, 0), piece(layout.seg, group, 0))


def _gap(got: Tensor, want: Tensor, scale: float) -> float:
    """The largest difference relative to scale; infinite where anything is not a number."""
    if got.shape != want.shape:
        return float("inf")
    gap = (got - want).abs().max().item() / max(scale, 1e-30)
    return gap if gap == gap else float("inf")
