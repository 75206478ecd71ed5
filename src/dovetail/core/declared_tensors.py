"""What a model holds of its spec: every declared tensor, or, of a pipeline stage, those of its own layers; and what it holds
beyond: the tensors that adapters on its linear leaves declare.

Optimizers, checkpoints, sharding and the check for undeclared parameters fold over these. Where some leaf has an adapter, the
weights of the spec are a frozen base. A parameter that takes no gradient is fixed.
"""

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
    """Yield every declared weight and constant that the model holds, in module order; behind a leaf's weight, those of its
    adapter."""
    absent = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, Absent))
    adapted = dict(adapted_leaves(model))
    frozen = frozen_base(model)
    fixed = {path for path, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad}
    for d in declared(spec):
        if d.path.startswith(absent):
            continue
        yield d._replace(frozen=frozen, fixed=d.path in fixed)
        leaf = adapted.get(d.path.removesuffix(".weight")) if d.path.endswith(".weight") else None
        if leaf is not None and leaf.adapter is not None and d.weight.same_as is None:
            yield from leaf.adapter.declared


def frozen_base(model: nn.Module) -> bool:
    """Whether adapters are trained, and the weights that parts declare are not."""
    return any(leaf.adapter is not None and leaf.adapter.freezes for _, leaf in adapted_leaves(model))


def adapted_leaves(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Yield (path, leaf) for every linear leaf with an adapter. Leaves with one weight share its adapter: each is yielded."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Linear) and module.adapter is not None:
            yield path, module


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
