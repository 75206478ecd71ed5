"""What ranks do in the tests of a sharded vocabulary: the loss and its gradients, and how large a tensor it needs."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail.base.errors import DovetailError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import generator
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.mesh import make_mesh
from dovetail.parallel.shard import tensor_parallel
from dovetail.proof.laws.case import perturbed


class Widest(TorchDispatchMode):
    """The largest last dimension of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        plain = [x for x in tree_leaves(out) if isinstance(x, Tensor) and not isinstance(x, DTensor)]  # what a rank holds
        self.width = max([self.width, *(x.shape[-1] for x in plain if x.dim() and x.is_floating_point())])
        return out


def _step(model: ModelModule, vocab: int, batch: int, n: int) -> tuple[dict[str, Tensor], int]:
    """The loss and the gradients of a step, and the widest tensor of it."""
    tokens = torch.randint(0, vocab, (batch, n), generator=generator(0, "tokens"))
    labels = torch.randint(0, vocab, (batch, n), generator=generator(1, "labels"))
    labels[:, ::3] = -100
    with Widest() as widest:
        loss = model.loss(tokens, labels, Ctx(layout=TokenLayout.whole(batch, n)))
        loss.backward()
    found = {"loss": loss.detach()}
    for name, p in model.named_parameters():
        assert p.grad is not None
        found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found, widest.width


def loss_over_ranks(spec_yaml: str, batch: int, n: int, whole: tuple[str, ...] = ()) -> tuple[dict[str, float], int, int]:
    """How far the loss and each gradient are from those of the whole model; the widest tensors, sharded and whole."""
    spec = from_yaml(spec_yaml)
    model, reference = perturbed(spec), perturbed(spec)
    tensor_parallel(model, spec, make_mesh(tensor=2)["tensor"], whole)
    want, width = _step(reference, spec.vocab, batch, n)
    got, sharded_width = _step(model, spec.vocab, batch, n)
    assert want.keys() == got.keys()
    gaps = {name: (got[name] - x).abs().max().item() / x.abs().max().item() for name, x in want.items()}
    return gaps, sharded_width, width


def error_of_labels(spec_yaml: str, label: int) -> str:
    spec = from_yaml(spec_yaml)
    model = perturbed(spec)
    tensor_parallel(model, spec, make_mesh(tensor=2)["tensor"])
    tokens = torch.zeros(1, 4, dtype=torch.long)
    try:
        model.loss(tokens, torch.full_like(tokens, label), Ctx(layout=TokenLayout.whole(1, 4)))
    except DovetailError as error:
        return str(error)
    return ""


def large_logits(spec_yaml: str) -> float:
    """The loss where the logits of one rank are far above the other's, in float32: e^l overflows without their maximum."""
    spec = from_yaml(spec_yaml)
    tokens = torch.randint(0, spec.vocab, (2, 5), generator=generator(0, "tokens"))
    losses: list[Tensor] = []
    for sharded in (False, True):
        model = perturbed(spec, dtype=torch.float32)
        with torch.no_grad():
            model.get_parameter("head.bias")[spec.vocab // 2 :] += 300.0
        if sharded:
            tensor_parallel(model, spec, make_mesh(tensor=2)["tensor"])
        losses.append(model.loss(tokens, tokens, Ctx(layout=TokenLayout.whole(2, 5))).detach())
    return ((losses[1] - losses[0]) / losses[0]).abs().item()
