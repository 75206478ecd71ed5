"""Prepare a foreign model for laws: construct its module, perturb its weights, find out whether it computes in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail.construction import generator
from dovetail.core.errors import FileError

SPREADS = (1.0, 0.3, 0.0)  # factors of the perturbation of weights; a smaller one where outputs are not finite
Make = Callable[[], Any]


class Narrowest(TorchDispatchMode):
    """Records whether an operator returns a tensor narrower than float64."""

    narrow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and check the dtypes of its outputs."""
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 and x.dim() > 0:
                self.narrow = True
        return out


def module_of(result: Any) -> nn.Module:
    """The module in the result of a factory."""
    module = result[0] if isinstance(result, tuple) else result
    if not isinstance(module, nn.Module):
        raise FileError(f"the factory returned {type(module).__name__}, not an nn.Module")
    return module


def given_vocabulary(make: Make) -> int | None:
    """The size of the vocabulary, where the factory returns one."""
    result = make()
    return int(result[1]) if isinstance(result, tuple) else None


@torch.no_grad()
def perturb(model: nn.Module, factor: float, seed: int) -> None:
    """Perturb every weight. Initial weights hide bugs: attention is nearly uniform, norms are one, biases zero."""
    for name, weight in model.named_parameters():
        if factor and weight.requires_grad:  # not the balancing bias of a router: some experts would get no token
            noise = torch.randn(weight.shape, generator=generator(seed, f"moved {name}"), dtype=torch.float64)
            spread = 1.2 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.3
            weight.add_((noise * spread * factor).to(weight.dtype))
