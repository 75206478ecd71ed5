"""Making a foreign model fit for laws: its module, its vocabulary, moved weights, and whether it computes in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail.construction import generator
from dovetail.core.errors import FileError

MOVES = (1.0, 0.3, 0.0)  # how far weights are moved; less where the answer is no number any more
Make = Callable[[], Any]


class Narrowest(TorchDispatchMode):
    """Hears whether an operator gives fewer digits than float64."""

    narrow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and look at what it gives."""
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 and x.dim() > 0:
                self.narrow = True
        return out


def module_of(made: Any) -> nn.Module:
    """The module of what a factory returned."""
    module = made[0] if isinstance(made, tuple) else made
    if not isinstance(module, nn.Module):
        raise FileError(f"the factory gave {type(module).__name__}, not an nn.Module")
    return module


def told_vocabulary(make: Make) -> int | None:
    """The size of the vocabulary, where the factory returns one."""
    made = make()
    return int(made[1]) if isinstance(made, tuple) else None


def first_line(error: Exception | None, most: int = 300) -> str:
    """An error's kind and its first line, of at most so many characters."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:most] if str(error).strip() else ''}"


@torch.no_grad()
def move_weights(model: nn.Module, far: float, seed: int) -> None:
    """Perturb every weight. Initial weights hide bugs: attention is nearly uniform, norms are one, biases zero."""
    for name, weight in model.named_parameters():
        if far and weight.requires_grad:  # a balance of experts that no gradient moves would leave some without a token
            noise = torch.randn(weight.shape, generator=generator(seed, f"moved {name}"), dtype=torch.float64)
            spread = 1.2 * weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.3
            weight.add_((noise * spread * far).to(weight.dtype))
