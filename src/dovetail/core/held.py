"""What a model holds of its spec: every declared tensor, or, of a pipeline stage, those of its own layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from dovetail.core.fold import Declared, declared
from dovetail.core.linear import Linear
from dovetail.core.module import holder
from dovetail.core.part import Part


class Absent(nn.Module):
    """Stands where the module of a part would be that another rank has."""


def held(model: nn.Module, spec: Part) -> Iterator[Declared]:
    """Yield every declared weight and constant that the model holds, in module order."""
    absent = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, Absent))
    return (d for d in declared(spec) if not d.path.startswith(absent))


def stored(model: nn.Module, spec: Part) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of everything that a file holds of the model: the declared weights that are stored, each in the
    form of its leaf."""
    for d in held(model, spec):
        if not d.weight.stored:
            continue
        module, leaf = holder(model, d.path)
        if isinstance(module, Linear) and leaf == "weight":
            yield from ((d.path.removesuffix(leaf) + name, tensor) for name, tensor in module.stored().items())
        else:
            yield d.path, getattr(module, leaf)
