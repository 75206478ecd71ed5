"""What one rank of two does with the front door: the same calls on a whole model and on a sharded one, without a Ctx."""

from __future__ import annotations

import warnings

import torch

from dovetail.files.spec import from_yaml
from dovetail.parallel.context import piece
from dovetail.parallel.mesh import make_mesh
from dovetail.parallel.shard import fully_shard_model, tensor_parallel
from dovetail.proof.laws.case import perturbed


def default_calls(spec_yaml: str) -> dict[str, float]:
    """Return how far sharded is from whole, per call."""
    spec = from_yaml(spec_yaml)
    whole, sharded = perturbed(spec, 4), perturbed(spec, 4)
    tensor_parallel(sharded, spec, make_mesh(tensor=2)["tensor"])
    ids = torch.randint(0, spec.vocab, (3, 7), generator=torch.Generator().manual_seed(2))
    gaps = {
        "logits": _gap(sharded(ids), whole(ids)),
        "padded": _gap(sharded(ids, lengths=[4, 7, 2]), whole(ids, lengths=[4, 7, 2])),
    }
    gaps["loss"] = _gap(sharded.loss(ids), whole.loss(ids))
    gaps["tokens"] = float(sharded.generate(ids[0], 6) != whole.generate(ids[0], 6))
    taps = ("embedded", "head.logits")
    gaps["trace"] = max(_gap(sharded.trace(ids, *taps)[tap], whole.trace(ids, *taps)[tap]) for tap in taps)
    torch.manual_seed(11)
    trained = whole.train().loss(ids)
    torch.manual_seed(11)
    gaps["training loss"] = _gap(sharded.train().loss(ids), trained)
    gaps["dropout is drawn"] = float(_gap(trained, whole.eval().loss(ids)) < 1e-6)
    return gaps


def rows_of_a_batch(spec_yaml: str) -> float:
    """Return how far the rows of this rank are from the same rows of the whole batch, in training, with dropout."""
    spec = from_yaml(spec_yaml)
    whole, sharded = perturbed(spec, 4).train(), perturbed(spec, 4).train()
    mesh = make_mesh(data=2)["data"]
    fully_shard_model(sharded, mesh)
    ids = torch.randint(0, spec.vocab, (4, 7), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(11)
    want = piece(whole(ids), mesh.get_group(), 0)
    torch.manual_seed(11 + mesh.get_local_rank())  # ranks agree on the seed of the first
    with warnings.catch_warnings():  # logits are a view; nothing here writes into them
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        return _gap(sharded(piece(ids, mesh.get_group(), 0)), want)


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()
