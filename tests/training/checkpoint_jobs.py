"""What ranks do in the tests of checkpoints."""

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.parallel.construction import build_sharded, local
from dovetail.parallel.mesh import make_mesh
from dovetail.training.checkpoint import Checkpoints
from dovetail.training.optim import Optimizer

SPEC = """
width: 28
vocab: 62
layers:
  - repeat: 2
    mixer: {kind: attention, heads: 6, kv_heads: 2, head: 12}
    ffn: {kind: moe, experts: 4, hidden: 18, router: {kind: sigmoid_router, top_k: 2, balance_bias: true}}
"""


def state(data: int, tensor: int, seed: int, steps: int) -> dict[str, torch.Tensor]:
    """The tensors of a run of some steps on made-up gradients, sharded over a mesh."""
    spec, sharded = from_yaml(SPEC), data * tensor > 1
    model = build_sharded(spec, make_mesh(data=data, tensor=tensor), seed=seed) if sharded else build(spec, seed=seed)
    optimizer = Optimizer(model)
    optimizer.set_lr(0.01)
    for step in range(steps):
        for weight in optimizer.weights.values():
            weight.grad = (weight.detach() * (step + 1)).cos()
        optimizer.step()
    found = {f"weights.{name}": value for name, value in model.state_dict().items()}
    return found | {f"optimizer.{name}": value for name, value in optimizer.state().items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def save(place: str, data: int, tensor: int, later: bool = False) -> dict[str, list[float]]:
    """Save a run of three steps; return every tensor, whole."""
    tensors = state(data, tensor, 3, 3)
    checkpoints = Checkpoints(place)
    numbers = {"step": 3, "seed": 3}
    if later:
        checkpoints.save_later(3, tensors, numbers)
        for value in tensors.values():  # training goes on
            local(value.detach()).zero_()
        checkpoints.wait()
        tensors = state(data, tensor, 3, 3)
    else:
        checkpoints.save(3, tensors, numbers)
    return {name: whole(value).flatten().tolist() for name, value in tensors.items()}


def load(place: str, data: int, tensor: int) -> dict[str, list[float]]:
    """Load the latest checkpoint into another model; return every tensor, whole."""
    tensors = state(data, tensor, 4, 0)
    checkpoints = Checkpoints(place)
    path = checkpoints.latest()
    assert path == Path(place) / "step-00000003"
    assert checkpoints.load(path, tensors) == {"step": 3, "seed": 3}
    return {name: whole(value).flatten().tolist() for name, value in tensors.items()}
