"""What ranks do in the tests of experts: the same model whole and shared out, with the losses its routers add."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dovetail.files.spec import from_yaml
from dovetail.model.construction import generator
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.draws import Draws
from dovetail.nn.groups import RouterModule
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.context import piece
from dovetail.parallel.mesh import make_mesh
from dovetail.parallel.shard import fully_shard_model, tensor_parallel
from dovetail.proof.laws.case import perturbed
from dovetail.training.step import rebalance


def experts_over_ranks(text: str, whole: tuple[str, ...], favored: int = 0) -> dict[str, Any]:
    """How far apart they are, relative to scale: loss, every gradient, the work counted; and what a rank holds of a weight.
    Every token chooses among the first `favored` experts, where they are given."""
    spec = from_yaml(text)
    model, other = perturbed(spec), perturbed(spec)
    for module in (*model.modules(), *other.modules()):
        if isinstance(module, RouterModule) and favored:
            module.balance[:favored] += 100.0  # type: ignore[index]
    tensor_parallel(model, spec, make_mesh(tensor=2)["tensor"], whole)
    want, want_losses, want_gradients, want_load = _step(other)
    got, got_losses, got_gradients, got_load = _step(model)
    held: Any = model.layers[0].ffn.bank.up.weight
    return {
        "loss": abs(got - want) / abs(want),
        "losses": max(abs(got_losses[name] - value) for name, value in want_losses.items()),
        "load": (got_load - want_load).abs().max().item(),
        "gradients": {name: _gap(got_gradients[name], g) for name, g in want_gradients.items()},
        "held": tuple(held.to_local().shape),
        "used": int((got_load.sum(0) > 0).sum()),
    }


def _step(model: Any) -> tuple[float, dict[str, float], dict[str, Tensor], Tensor]:
    tokens = torch.randint(0, 62, (3, 12), generator=generator(0, "tokens"))
    layout, losses = TokenLayout.packed([(5, 4), (12,), (3,)], 12), {}
    loss = model.loss(tokens, tokens.masked_fill(~layout.real, -100), Ctx(layout=layout, losses=Losses(losses), draws=Draws(1)))
    loss.backward()
    gradients = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    routers = [module for module in model.modules() if isinstance(module, RouterModule)]
    return loss.item(), {name: x.item() for name, x in losses.items()}, gradients, torch.stack([r.load for r in routers])  # type: ignore[misc]


def steps_over_rows(text: str, steps: int = 3) -> dict[str, float]:
    """Steps of training whole, and with the rows over FSDP ranks; how far each weight and each balancing bias is off."""
    spec, ends = from_yaml(text), []
    tokens, layout = torch.randint(0, 62, (4, 12), generator=generator(0, "tokens")), TokenLayout.whole(4, 12)
    for ranks in (1, 2):
        model, rows, at = perturbed(spec), tokens, layout
        if ranks > 1:
            mesh = make_mesh(data=ranks)["data"]
            fully_shard_model(model, mesh)
            rows, at = piece(tokens, mesh.get_group(), 0), layout.split_rows(ranks, mesh.get_local_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            optimizer.zero_grad()
            model.loss(rows, rows, Ctx(layout=at, draws=Draws(step))).backward()
            optimizer.step()
            rebalance(model)
        ends.append({name: _whole(x) for name, x in model.state_dict().items()})
    whole, split = ends
    assert list(whole) == list(split)
    return {name: (split[name] - x).abs().max().item() for name, x in whole.items()}


def _whole(g: Tensor) -> Tensor:
    return g.full_tensor() if isinstance(g, DTensor) else g


def _gap(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-12)).item()
