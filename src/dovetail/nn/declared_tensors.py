"""What a model holds of its spec: every declared tensor, or, of a pipeline stage, those of its own layers; and what it holds
beyond: the tensors that adapters on its linear leaves declare.

Optimizers, checkpoints, sharding and the check for undeclared parameters fold over these. Where some leaf has an adapter, the
weights of the spec are a frozen base. A parameter that takes no gradient is fixed.

A model that computes with more than its spec declares is refused before it is trained or saved. Training, saving and tensor
parallel read the declared weights alone, and those that adapters declare. A module of another library in place of a linear leaf
would neither be trained, written nor split, so they raise instead. A model directory holds the weights of the spec alone, so
that `check_plain` refuses adapters, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from dovetail.base.errors import SpecError
from dovetail.nn.linear import Dense, Linear, Storage
from dovetail.nn.module import holder
from dovetail.spec.fold import Declared, declared
from dovetail.spec.part import Part


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
            yield from ((d.path.removesuffix(leaf) + name, tensor) for name, tensor in module.storage.stored(module).items())
        else:
            yield d.path, getattr(module, leaf)


REMEDY = "merge it into the declared weight, or remove it"


def check_declared(model: nn.Module, spec: Part, storages: tuple[type[Storage], ...] = (Dense,)) -> None:
    """Raise SpecError where a linear leaf is wrapped or replaced, or where the model has a parameter of its own. `storages` are
    those that the caller reads."""
    known: set[int] = set()
    for d in held(model, spec):
        if not d.weight.stored and d.weight.same_as is None:
            continue
        module, leaf = holder(model, d.path)
        if "." in d.weight.name and (wrong := _unread(module, storages)):
            raise SpecError(d.path.rpartition(".")[0], f"{wrong}, where the spec declares a plain linear leaf", REMEDY)
        known.update(id(tensor) for tensor in (module._parameters.get(leaf), module._buffers.get(leaf)) if tensor is not None)
    for path, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise SpecError(path, f"is a parameter of shape {tuple(parameter.shape)} that the spec does not declare", REMEDY)


def _unread(module: nn.Module, storages: tuple[type[Storage], ...]) -> str:
    """What a module in the place of a linear leaf is, if the storages do not read it."""
    if type(module) is not Linear:
        return f"is a {type(module).__name__}"
    return "" if type(module.storage) in storages else f"is stored as {type(module.storage).__name__}"


def check_plain(model: nn.Module, spec: Part, storages: tuple[type[Storage], ...] = (Dense,)) -> None:
    """Raise SpecError where a leaf has an adapter, or the model has a parameter that the spec does not declare."""
    for path, _ in adapted_leaves(model):
        raise SpecError(
            path, "has an adapter, which a model directory does not hold", "merge it first, or save it with save_adapter"
        )
    check_declared(model, spec, storages)
