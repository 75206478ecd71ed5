"""What law 8 compares: one model whole, and the same over two ranks by tensor, by FSDP, with its sequence split, where keys are
all-gathered or go round a ring, or by layers, in a pipeline (proof/laws/sharded_batch.py); by tensor and by FSDP also with an
adapter on each linear leaf.

    with Pair() as pair:
        found = compare_sharded(pair, to_yaml(spec), seed=0, hows=["tp"])
        found["tp"].worst -> ("training: gradient of layers.0.mixer.q.weight", 3e-15)

Each rank makes both models from the same text and seed, in float64 with perturbed weights, and reads a ragged batch of packed
documents, some of which lie across the cut. The models run in evaluation and in training mode, where dropout and router noise
are drawn and experts drop tokens beyond their capacity. Compared are the output, every loss that a part adds, every gradient,
and what the run adds to a buffer (the load of experts). Gradients are those of a fixed random projection of the output plus the
added losses; in evaluation those of `model.loss`, too, on ranks with different numbers of labels. The initial weights that each
rank computes alone are compared bit for bit with the shards of the whole model.
"""

from __future__ import annotations

import atexit
import dataclasses as dc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml, to_yaml
from dovetail.model.construction import generator
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.draws import Draws
from dovetail.nn.groups import Embed, Head, Mixer
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.parallel.collective import joined, summed
from dovetail.parallel.context import check_split, split_ctx, whole_encoder_output
from dovetail.parallel.mesh import make_mesh
from dovetail.parallel.pair import Pair
from dovetail.parallel.shard import fully_shard_model, tensor_parallel
from dovetail.proof.laws.adapted import perturb
from dovetail.proof.laws.case import RELATION, Case, NotApplicable, law, perturbed
from dovetail.proof.laws.sharded_batch import LawBatch, RunResult, gaps_of, initial_gaps, pipeline_gaps, random_labels
from dovetail.spec.part import walk_spec
from dovetail.weights.adapters.attach import adaptable, attach

How = Literal["tp", "fsdp", "sequence", "ring", "pipeline", "adapters"]
MODES = {"evaluation": None, "training": 1}  # the seed of each
# in turns, by the seed; with a larger alpha softmax saturates, and the last bit of a weight moves gradients of q by 5e-9
ADAPTERS = ({"kind": "lora", "rank": 3, "alpha": 0.6, "dropout": 0.3}, {"kind": "ia3"})
N = 14
# half of the sequence ends inside a document and between two; half of the rows hold half of the documents
DOCUMENTS = ((5, 4, 3), (7, 2), (12,), (1, 6, 3, 2))
SOURCES = ((3, 6, 2), (4, 8), (14,), (2, 5, 3, 3))  # as many documents per row: each attends to its own source


@dc.dataclass(frozen=True)
class Compared:
    """How far apart whole and sharded are, relative to scale, for each thing compared; or why there is nothing to compare."""

    gaps: dict[str, float] = dc.field(default_factory=dict)
    reason: str = ""

    @property
    def worst(self) -> tuple[str, float]:
        """What differs most, and by how much."""
        return max(self.gaps.items(), key=lambda item: item[1], default=("", 0.0))


@functools.cache
def the_pair() -> Pair:
    """This process's pair of ranks, started by the first law that asks, ended with the process."""
    pair = Pair()
    atexit.register(pair.close)
    return pair


@law(
    8,
    "sharded",
    "tensor parallel, FSDP, a sequence split over two ranks, by all-gather and by ring attention, and a pipeline of two"
    " stages equal one rank, in evaluation and in training, also with adapters: initial weights, outputs, losses and gradients",
    covers="kinds",
    budget=3.0,
)
def sharded(case: Case) -> None:
    """Every way that this spec can be split."""
    reasons: list[str] = []
    for how, found in compare_sharded(the_pair(), to_yaml(case.spec), case.seed).items():
        if found.reason:
            reasons.append(f"{how}: {found.reason}")
            continue
        name, gap = found.worst
        case.true(gap <= RELATION, f"{how}, {name} differs by {gap:.3g} of its scale")
    if len(reasons) == len(WAYS):
        raise NotApplicable("; ".join(reasons))


def compare_sharded(pair: Pair, spec_yaml: str, seed: int, hows: Sequence[str] = ()) -> dict[str, Compared]:
    """Whole against sharded in each of these ways, or in all: the larger difference of any rank."""
    return worse(pair.run(compare, spec_yaml, seed, tuple(hows or WAYS)))


def worse(ranks: Sequence[dict[str, Compared]]) -> dict[str, Compared]:
    """The larger difference of any rank."""
    first = ranks[0]
    gaps = {how: {name: max(rank[how].gaps[name] for rank in ranks) for name in first[how].gaps} for how in first}
    return {how: Compared(gaps[how], first[how].reason) for how in first}


def compare(spec_yaml: str, seed: int, hows: Sequence[How]) -> dict[str, Compared]:
    """The job of one rank."""
    spec = from_yaml(spec_yaml)
    whole = perturbed(spec, seed)
    batch = make_batch(spec, whole, seed)
    wants = {mode: _run(whole, spec, batch, draws) for mode, draws in MODES.items()}
    return {how: _compare(WAYS[how], spec, seed, batch, wants) for how in hows}


def _compare(way: Way, spec: Model, seed: int, batch: LawBatch, wants: dict[str, RunResult]) -> Compared:
    try:
        return Compared(way(spec, seed, batch, wants))
    except SpecError as cannot:
        return Compared(reason=str(cannot))


def _split(how: How, spec: Model, seed: int, batch: LawBatch, wants: dict[str, RunResult]) -> dict[str, float]:
    run = SPLITS[how](perturbed(spec, seed), spec, _mesh(how))
    gaps = {} if AXIS[how] == "sequence" else initial_gaps(spec, seed, _box(how))
    modes = ["training"] if how == "ring" else list(MODES)  # the rest of the model is compared by `sequence`
    for mode in modes:
        got = run(batch, MODES[mode])
        gaps |= {f"{mode}: {name}": gap for name, gap in gaps_of(got, wants[mode]).items()}
    return gaps


def _staged(spec: Model, seed: int, batch: LawBatch, wants: dict[str, RunResult]) -> dict[str, float]:
    return pipeline_gaps(spec, seed, batch, _mesh("pipeline").get_group())


def _with_adapters(spec: Model, seed: int, batch: LawBatch, wants: dict[str, RunResult]) -> dict[str, float]:
    """In training, by each split that the model itself can have."""
    kind = ADAPTERS[seed % len(ADAPTERS)]
    want = _run(adapted_model(spec, seed, kind), spec, batch, MODES["training"])
    gaps: dict[str, float] = {}
    reasons: list[SpecError] = []
    for how in ("tp", "fsdp"):
        try:
            run = SPLITS[how](adapted_model(spec, seed, kind), spec, _mesh(how))
        except SpecError as cannot:
            reasons.append(cannot)
        else:
            gaps |= {f"{how}: {name}": gap for name, gap in gaps_of(run(batch, MODES["training"]), want).items()}
    if not gaps:
        raise reasons[0]
    return gaps


def adapted_model(spec: Model, seed: int, kind: Mapping[str, object]) -> ModelModule:
    """A model with perturbed weights, and a perturbed adapter of this kind on each of its leaves."""
    model = perturbed(spec, seed)
    # dropout is drawn by token: patches and pooled tokens are none
    targets = [
        path for path, d in adaptable(spec) if not (isinstance(d.part, Embed) or (isinstance(d.part, Head) and d.part.pools()))
    ]
    attach(model, {**kind, "targets": targets}, seed=seed)
    perturb(model, seed)
    return model


def make_batch(spec: Model, model: ModelModule, seed: int) -> LawBatch:
    """A ragged batch of packed documents with padding; images as they are."""
    case = Case(spec, seed, model, rows=len(DOCUMENTS), n=N)
    layout, source_layout = _layout(spec, DOCUMENTS), None if spec.encoder is None else _layout(spec.encoder, SOURCES)
    with torch.no_grad():
        out = case.run(layout=layout, source_layout=source_layout)
    weight = torch.randn(out.shape, generator=generator(seed, "projection"), dtype=out.dtype)
    if spec.embed.causal() and out.shape[:2] == layout.order.shape and not (spec.head is not None and spec.head.pools()):
        weight = weight * layout.real[..., None]
    labels = random_labels(spec, out, layout, seed)
    return LawBatch(case.inputs, layout, case.source, source_layout, weight, case.patches, case.source_patches, labels)


def _layout(stack: Model, documents: Sequence[Sequence[int]]) -> TokenLayout:
    return TokenLayout.packed(documents, N) if stack.embed.causal() else TokenLayout.whole(len(documents), N)


# -- four ways to run the same batch --------------------------------------------------------------------------------

Run = Callable[[LawBatch, int | None], RunResult]  # a batch, and the seed in training


def _by_tensor(model: ModelModule, spec: Model, mesh: DeviceMesh) -> Run:
    tensor_parallel(model, spec, mesh)
    return lambda batch, draws: _run(model, spec, batch, draws)


def _by_data(model: ModelModule, spec: Model, mesh: DeviceMesh) -> Run:
    fully_shard_model(model, mesh)
    group, ranks = mesh.get_group(), mesh.size()

    def run(batch: LawBatch, draws: int | None) -> RunResult:
        # FSDP averages over ranks: the projection of the batch is a sum, while each rank adds the losses of the whole batch
        result = _run(model, spec, batch.rows(group), draws, projected=float(ranks))
        return dc.replace(result, output=joined(result.output, 0, group))

    return run


def _by_sequence(model: ModelModule, spec: Model, mesh: DeviceMesh, ring: bool = False) -> Run:
    group, ranks = mesh.get_group(), mesh.size()
    for stack in (spec, spec.encoder):
        if stack is not None:
            check_split(stack)  # raises before anything runs

    def run(batch: LawBatch, draws: int | None) -> RunResult:
        result = _run(model, spec, batch.columns(group), draws, losses_count=1.0 / ranks, group=group, ring=ring)
        gradients = {name: summed(g, group) for name, g in result.gradients.items()}
        return dc.replace(result, output=joined(result.output, 1, group), gradients=gradients)

    return run


def _by_ring(model: ModelModule, spec: Model, mesh: DeviceMesh) -> Run:
    if all(part.recurrent or part.reads_encoder() for _, part in walk_spec(spec) if isinstance(part, Mixer)):
        raise SpecError("layers", "no mixer attends to keys of its own tokens", "split the sequence without a ring")
    return _by_sequence(model, spec, mesh, ring=True)


SPLITS: dict[How, Callable[[ModelModule, Model, DeviceMesh], Run]] = {
    "tp": _by_tensor,
    "fsdp": _by_data,
    "sequence": _by_sequence,
    "ring": _by_ring,
}


Way = Callable[[Model, int, LawBatch, dict[str, RunResult]], dict[str, float]]
WAYS: dict[How, Way] = {
    **{how: functools.partial(_split, how) for how in SPLITS},
    "pipeline": _staged,
    "adapters": _with_adapters,
}


def _ctx(
    model: ModelModule, spec: Model, batch: LawBatch, ctx: Ctx, group: dist.ProcessGroup | None = None, ring: bool = False
) -> Ctx:
    """The ctx with the encoder output of the batch; with a group, for this rank's piece of every row."""
    source, source_layout = batch.source, batch.source_layout
    ctx = dc.replace(ctx, patches=batch.patches)
    if spec.encoder is not None and source is not None and source_layout is not None:
        source_ctx = dc.replace(ctx, layout=source_layout, patches=batch.source_patches)
        encoded = model.encode(source, source_ctx if group is None else split_ctx(source_ctx, spec.encoder, group, ring))
        encoder_output, encoder_layout = encoded if group is None else whole_encoder_output(*encoded, group)
        ctx = dc.replace(ctx, encoder_output=encoder_output, encoder_layout=encoder_layout)
    return ctx if group is None else split_ctx(ctx, spec, group, ring)


def _run(
    model: ModelModule,
    spec: Model,
    batch: LawBatch,
    seed: int | None,
    projected: float = 1.0,
    losses_count: float = 1.0,
    group: dist.ProcessGroup | None = None,
    ring: bool = False,
) -> RunResult:
    """Run forward and backward; the factors say how much the projection and the added losses count on this rank."""
    model.zero_grad()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses: dict[str, Tensor] = {}
    draws = None if seed is None else Draws(seed)
    ctx = _ctx(model, spec, batch, Ctx(layout=batch.layout, draws=draws, losses=Losses(losses)), group, ring)
    out = model(batch.inputs, ctx)
    added = torch.stack(list(losses.values())).sum() if losses else 0.0
    (projected * (out * batch.weight).sum() + losses_count * added).backward()
    gradients = _gradients(model)
    changed = {name: buffer - before[name] for name, buffer in model.named_buffers() if not buffer.equal(before[name])}
    output = (out * (batch.weight != 0)).detach()
    if batch.labels is not None and draws is None:
        model.zero_grad()
        ctx = _ctx(model, spec, batch, Ctx(layout=batch.layout, losses=Losses()), group, ring)
        losses["of the model"] = model.loss(batch.inputs, batch.labels, ctx)
        (losses_count * losses["of the model"]).backward()
        gradients |= {f"{name} from the loss": g for name, g in _gradients(model).items()}
    return RunResult(output, {name: loss.detach() for name, loss in losses.items()}, gradients, changed)


def _gradients(model: ModelModule) -> dict[str, Tensor]:
    """The whole gradient of every parameter, zero where none came."""
    gradients: dict[str, Tensor] = {}
    for name, _ in model.named_parameters():
        weight = tensor_at(model, name)  # as an attribute: outside of a run it must be the parameter
        g = torch.zeros(weight.shape, dtype=weight.dtype) if weight.grad is None else weight.grad
        gradients[name] = (g.full_tensor() if isinstance(g, DTensor) else g).clone()
    return gradients


AXIS: dict[str, Literal["tensor", "data", "sequence", "pipeline"]] = {
    "tp": "tensor",
    "fsdp": "data",
    "sequence": "sequence",
    "ring": "sequence",
    "pipeline": "pipeline",
}


@functools.cache
def _box(how: str) -> DeviceMesh:
    """The mesh with all ranks along the axis that this way of splitting needs."""
    tensor, data, sequence, pipeline = (
        dist.get_world_size() if axis == AXIS[how] else 1 for axis in ("tensor", "data", "sequence", "pipeline")
    )
    return make_mesh(pipeline=pipeline, data=data, sequence=sequence, tensor=tensor)


def _mesh(how: str) -> DeviceMesh:
    return _box(how)[AXIS[how]]
