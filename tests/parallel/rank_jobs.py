"""What tests let ranks do: functions that a rank can import, of plain data."""

import dataclasses as dc
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dovetail.base.errors import DovetailError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import generator
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.ranks import Ranks
from dovetail.ops.attend import using
from dovetail.parallel import collective, context, placement, shard
from dovetail.parallel.mesh import make_mesh
from dovetail.proof.laws.case import perturbed
from dovetail.proof.laws.sharded import Compared, How, LawBatch, _run, compare, gaps_of, make_batch
from dovetail.spec.scope import Scope
from dovetail.state.pool import Pool


def rank_and_sum(number: int) -> tuple[int, int]:
    x = torch.tensor(number + dist.get_rank())
    dist.all_reduce(x)
    return dist.get_rank(), int(x)


def fail_on(rank: int, how: str) -> str:
    """One rank raises, dies or hangs; the other waits for it."""
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("this rank has had enough")
        if how == "die":
            os._exit(7)
        time.sleep(60)
    dist.barrier()
    return "done"


def error_of(job: Callable[..., Any], *data: Any) -> tuple[str, str]:
    """The class and text of the error a job ends with, on every rank alike."""
    try:
        job(*data)
    except DovetailError as error:
        return type(error).__name__, str(error)
    return "", ""


# -- collectives


def gradients_of(name: str) -> tuple[list[float], list[float]]:
    """A collective on (rank + 1) · [1, 2], and the gradient of Σ (rank + 1) · [1, 2, …] · out with permuted strides."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    x = ((rank + 1) * torch.arange(1.0, 3.0)).view(1, 2).requires_grad_()
    out = collective.gather(x, -1, group) if name == "gather" else getattr(collective, name)(x, group)
    weight = (rank + 1) * torch.arange(1.0, out.numel() + 1).view(out.shape)
    wide = torch.stack([weight, weight], -1)[..., 0]  # strides of a larger tensor
    out.backward(wide)
    assert x.grad is not None
    return out.flatten().tolist(), x.grad.flatten().tolist()


# -- planted bugs


def _never_once(reader: Callable[..., Any]) -> Callable[..., Any]:
    return lambda d, *rest: reader(d._replace(weight=dc.replace(d.weight, tp="auto")), *rest)


def _backwards(whole: Callable[..., TokenLayout]) -> Callable[..., TokenLayout]:
    return lambda layout, group: whole(layout, group).pick(torch.arange(layout.n * 2 - 1, -1, -1))


BUGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no bug": nullcontext,
    "gradients are not summed where a region begins": lambda: patch.object(shard, "enter", lambda x, group: x),
    "outputs are not summed where a region ends": lambda: patch.object(shard, "leave", lambda x, group: x),
    "statistics of one rank alone": lambda: patch.object(shard, "total", lambda x, group: x),
    "a bias is added by every rank": lambda: patch.object(shard, "_reader", _never_once(shard._reader)),
    "every rank takes the first piece": lambda: patch.object(placement.Cut, "piece", lambda self, rank, ranks: 0),
    "gathered keys have no gradient": lambda: patch.object(context, "gather", collective.joined),
    "keys stand in another order": lambda: patch.object(context, "whole_layout", _backwards(context.whole_layout)),
}


def compare_with_bug(bug: str, spec_yaml: str, how: How) -> Compared:
    with BUGS[bug]():
        return compare(spec_yaml, 0, [how])[how]


# -- the tokens of a batch over ranks


def counts_over(data: int, sequence: int) -> tuple[list[float], list[float]]:
    """The counts before each row's chunk of this rank and of the whole batch, and what a count of all tokens gives."""
    mesh = make_mesh(data=data, sequence=sequence)
    rows, columns = mesh["data"].get_group(), mesh["sequence"].get_group()
    tokens = torch.randint(0, 5, (4, 6), generator=generator(0, "tokens"))
    mine = context.piece(context.piece(tokens, rows, 0), columns)
    before, total = context.TokenRanks(rows, columns).counts(mine.sum(1))
    first_row, first_column = 4 // data * dist.get_rank(rows), 6 // sequence * dist.get_rank(columns)
    flat = tokens.flatten()
    want = [int(flat[: 6 * (first_row + row) + first_column].sum()) for row in range(4 // data)]
    return [*before.tolist(), total.item()], [*want, int(tokens.sum())]


def by_data_and_sequence(spec_yaml: str, ring: bool = False) -> dict[str, float]:
    """FSDP over half of the ranks, with each row split over the other half, against one rank, in training."""
    spec, mesh = from_yaml(spec_yaml), make_mesh(data=2, sequence=2)
    rows, columns = mesh["data"].get_group(), mesh["sequence"].get_group()
    whole, model = perturbed(spec), perturbed(spec)
    shard.fully_shard_model(model, mesh["data"])
    tokens = make_batch(spec, whole, 0)
    mine: LawBatch = tokens.rows(rows).columns(columns)
    found = _run(model, spec, mine, 1, projected=2.0, losses_count=0.5, group=columns, ring=ring)
    out = collective.joined(collective.joined(found.output, 1, columns), 0, rows)
    gradients = {name: collective.summed(g, columns) for name, g in found.gradients.items()}
    return gaps_of(dc.replace(found, output=out, gradients=gradients), _run(whole, spec, tokens, 1))


def drawn_without_a_seed(spec_yaml: str, how: How) -> float:
    """Outputs in training mode, each rank with a generator of its own, against one rank with the first one's."""
    spec = from_yaml(spec_yaml)
    whole, model = perturbed(spec).train(), perturbed(spec).train()
    group = _cut(model, spec_yaml, 2 if how == "fsdp" else 1, 2 if how == "tp" else 1)
    inputs = spec.embed.example(spec.axes(Scope()), 4, 14, generator(0, "inputs"))
    layout = TokenLayout.whole(4, 14)
    with torch.no_grad():
        torch.manual_seed(5)
        want = whole(inputs, Ctx(layout=layout))
        torch.manual_seed(5 + dist.get_rank())
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        got = model(context.piece(inputs, group, 0), Ctx(layout=layout.split_rows(ranks, rank)))
    return (collective.joined(got, 0, group) - want).abs().max().item()


def split_types() -> list[int]:
    """The token types in the ctx of this rank's chunk."""
    group = dist.group.WORLD
    assert group is not None
    whole = Ctx(layout=TokenLayout.whole(1, 6), types=torch.tensor([[0, 1, 2, 3, 4, 5]]))
    ctx = context.split_ctx(whole, from_yaml("layers: [{repeat: 1}]"), group)
    assert ctx.types is not None
    assert ctx.types.shape == ctx.layout.order.shape
    return ctx.types[0].tolist()


# -- training, decoding, looking


def _cut(model: ModelModule, spec_yaml: str, data: int, tensor: int) -> dist.ProcessGroup:
    """Shard the model in place; the group over which rows are split."""
    mesh = make_mesh(data=data, tensor=tensor)
    if tensor > 1:
        shard.tensor_parallel(model, from_yaml(spec_yaml), mesh["tensor"])
    if data > 1:
        shard.fully_shard_model(model, mesh["data"])
    return mesh["data"].get_group()


def train(spec_yaml: str, data: int, tensor: int, rows: int = 160, steps: int = 3) -> dict[str, float]:
    """A few clipped AdamW steps whole and sharded, the loss in chunks; how far each weight is off."""
    spec, models = from_yaml(spec_yaml), []
    inputs = spec.embed.example(spec.axes(Scope()), rows, 14, generator(0, "inputs"))
    for sharded in (False, True):
        model = perturbed(spec)
        mine, labels = inputs, inputs.roll(-1, -1)
        if sharded:
            group = _cut(model, spec_yaml, data, tensor)
            mine, labels = context.piece(inputs, group, 0), context.piece(labels, group, 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            model.loss(mine, labels, Ctx(layout=TokenLayout.whole(*mine.shape))).backward()  # type: ignore[arg-type]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        models.append({name: _whole(p.detach()) for name, p in model.named_parameters()})
    whole, split = models
    assert list(whole) == list(split)
    return {name: (split[name] - weight).abs().max().item() for name, weight in whole.items()}


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def decode(spec_yaml: str, n: int = 11) -> float:
    """Prefill and single steps over tensor-parallel ranks, each remembering its own heads, against one whole pass."""
    spec = from_yaml(spec_yaml)
    whole, model = perturbed(spec), perturbed(spec)
    ranks = shard.tensor_parallel(model, spec, make_mesh(data=1, tensor=2)["tensor"])
    tokens = spec.embed.example(spec.axes(Scope()), 2, n, generator(0, "inputs"))
    pool = Pool(spec, rows=2, capacity=n, dtype=torch.float64, source=5, sharded=ranks.cuts)
    ctx = Ctx(layout=TokenLayout.whole(2, n))
    with torch.no_grad():
        if spec.encoder is not None:
            source, source_ctx = tokens[:, :5], Ctx(layout=TokenLayout.whole(2, 5))
            encoder_output, encoder_layout = whole.encode(source, source_ctx)
            ctx = Ctx(layout=ctx.layout, encoder_output=encoder_output, encoder_layout=encoder_layout)
            encoder_output, encoder_layout = model.encode(source, source_ctx)
            model.fill(
                Ctx(layout=ctx.layout, encoder_output=encoder_output, encoder_layout=encoder_layout), pool.admit([0, 1], [5, 5])
            )
        want, got, done = whole(tokens, ctx), [], 0
        for size in (6, *[1] * (n - 6)):
            step = pool.step([0, 1], [size, size])
            got.append(model(tokens[:, done : done + size], Ctx(layout=step.layout, views=step.views)))
            done += size
    return (torch.cat(got, 1) - want).abs().max().item()


def look(spec_yaml: str) -> dict[str, Any]:
    """What a sharded model looks like from outside and from inside a run."""
    spec = from_yaml(spec_yaml)
    whole, model = perturbed(spec), perturbed(spec)
    _cut(model, spec_yaml, 1, 2)
    inside: list[Any] = []
    attention = model.get_submodule("layers.0.mixer")
    attention.register_forward_hook(lambda m, args, out: inside.append(m.get_submodule("q").weight))
    model(torch.zeros(1, 4, dtype=torch.long), Ctx(layout=TokenLayout.whole(1, 4)))
    return {
        "same names": list(model.state_dict()) == list(whole.state_dict()),
        "all DTensors": all(isinstance(p, DTensor) for p in model.parameters()),
        "outside": type(attention.get_submodule("q").weight).__name__,
        "inside": (type(inside[0]).__name__, tuple(inside[0].shape)),
        "head numbers": attention.get_buffer("head_number").tolist(),
        "tied": model.get_parameter("head.out.weight") is model.get_parameter("embed.table"),
        "bytes": sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor)),
        "bytes whole": sum(p.nbytes for p in whole.parameters()),
    }


def by_head_tiles(spec_yaml: str, n: int = 200) -> float:
    """Heads with different masks over several tiles, where tiles are skipped by head number."""
    spec = from_yaml(spec_yaml)
    whole, model = perturbed(spec), perturbed(spec)
    _cut(model, spec_yaml, 1, 2)
    tokens = spec.embed.example(spec.axes(Scope()), 1, n, generator(0, "inputs"))
    with torch.no_grad():
        with using("reference"):
            want = whole(tokens, Ctx(layout=TokenLayout.whole(1, n)))
        with using("tiled"):
            return (model(tokens, Ctx(layout=TokenLayout.whole(1, n))) - want).abs().max().item()


def compiled_block(spec_yaml: str, backend: str = "eager") -> dict[str, float]:
    """A block over tensor-parallel ranks as one graph, forward and backward, against itself uncompiled."""
    torch._dynamo.reset()
    spec = from_yaml(spec_yaml)
    model = perturbed(spec)
    ranks = shard.tensor_parallel(model, spec, make_mesh(tensor=2)["tensor"])
    x = torch.randn(1, 8, spec.width, dtype=torch.float64, generator=generator(0, "x"))
    weight = torch.randn(1, 8, spec.width, dtype=torch.float64, generator=generator(0, "weight"))

    def run(block: Callable[..., Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with ranks.run():
            out = block(leaf, Ctx(layout=TokenLayout.whole(1, 8), ranks=Ranks(ranks)), {})
        (out * weight).sum().backward()
        grads = {f"gradient of {n}": _whole(p.grad) for n, p in model.layers[0].named_parameters() if p.grad is not None}
        assert leaf.grad is not None
        return {"output": out.detach(), "gradient of x": leaf.grad, **grads}

    want = run(model.layers[0])
    got = run(torch.compile(model.layers[0], fullgraph=True, backend=backend))
    assert want.keys() == got.keys()
    return {name: (got[name] - value).abs().max().item() / value.abs().max().item() for name, value in want.items()}


def compiled_loss(spec_yaml: str) -> float:
    """The loss of a model over tensor-parallel ranks as one graph, and its gradients, against itself uncompiled."""
    torch._dynamo.reset()
    spec = from_yaml(spec_yaml)
    model = perturbed(spec)
    _cut(model, spec_yaml, 1, 2)
    tokens = spec.embed.example(spec.axes(Scope()), 2, 9, generator(0, "inputs"))
    found: list[dict[str, Tensor]] = []
    for loss in (model.loss, torch.compile(model.loss, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        value = loss(tokens)  # type: ignore[call-arg]
        value.backward()
        found.append({"loss": value.detach()} | {n: _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    want, got = found
    assert want.keys() == got.keys()
    return max((got[name] - value).abs().max().item() for name, value in want.items())


def low_precision(spec_yaml: str) -> tuple[float, float, set[str]]:
    """The loss of float32 weights, whole, and over FSDP ranks computing in bfloat16; and the dtypes of the gradients."""
    spec = from_yaml(spec_yaml)
    tokens = spec.embed.example(spec.axes(Scope()), 4, 14, generator(0, "inputs"))
    with torch.no_grad():
        whole = perturbed(spec, dtype=torch.float32).loss(tokens, tokens, Ctx(layout=TokenLayout.whole(*tokens.shape)))  # type: ignore[arg-type]
    model = perturbed(spec, dtype=torch.float32)
    shard.fully_shard_model(model, make_mesh(data=2)["data"], torch.bfloat16)
    loss = model.loss(tokens, tokens, Ctx(layout=TokenLayout.whole(*tokens.shape)))  # type: ignore[arg-type]
    loss.backward()
    return whole.item(), loss.item(), {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}


def mesh_of(data: int, sequence: int, tensor: int) -> tuple[str, ...]:
    return make_mesh(data=data, sequence=sequence, tensor=tensor).mesh_dim_names or ()


def tensor_over_two_axes(spec_yaml: str) -> None:
    mesh = make_mesh(tensor=2)
    shard.tensor_parallel(perturbed(from_yaml(spec_yaml)), from_yaml(spec_yaml), mesh["data", "tensor"])


def uneven_pieces() -> None:
    group = dist.group.WORLD
    assert group is not None
    context.GatherView(group).append(TokenLayout.whole(1, 3 + dist.get_rank()), torch.zeros(1, 3 + dist.get_rank(), 2, 4))


def odd_row() -> None:
    group = dist.group.WORLD
    assert group is not None
    context.piece(torch.zeros(2, 7), group)


def flat_piece() -> tuple[list[int], list[int], list[int]]:
    """A flat batch of two sequences, split in the middle: rows, orders and entries come together in order."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    layout = TokenLayout.flat([5, 3]).pick(slice(4 * rank, 4 * rank + 4))
    new = torch.arange(4.0 * rank, 4.0 * rank + 4)[:, None, None]
    (entries,), key_layout = context.GatherView(group).append(layout, new).entries()
    assert key_layout.row is not None
    return key_layout.row.tolist(), key_layout.order.tolist(), entries.flatten().long().tolist()
