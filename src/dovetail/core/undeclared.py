"""Undeclared parameters: a model that computes with more than its spec declares is refused before it is trained or saved.

Training, saving and tensor parallel read the declared weights alone, and those that adapters declare
(core/declared_tensors.py). A module of another library in place of a linear leaf would neither be trained, written nor split,
so they raise instead. A model directory holds the weights of the spec alone, so that `check_plain` refuses adapters, too.
"""

from __future__ import annotations

from torch import nn

from dovetail.core.declared_tensors import adapted_leaves, held
from dovetail.core.errors import SpecError
from dovetail.core.linear import Linear
from dovetail.core.module import holder
from dovetail.core.part import Part

REMEDY = "merge it into the declared weight, or remove it"


def check_declared(model: nn.Module, spec: Part, leaves: tuple[type[Linear], ...] = (Linear,)) -> None:
    """Raise SpecError where a linear leaf is wrapped or replaced, or where the model has a parameter of its own. `leaves` are
    the classes of leaf that the caller reads."""
    known: set[int] = set()
    for d in held(model, spec):
        if not d.weight.stored and d.weight.same_as is None:
            continue
        module, leaf = holder(model, d.path)
        if "." in d.weight.name and type(module) not in leaves:
            path = d.path.rpartition(".")[0]
            raise SpecError(path, f"is a {type(module).__name__}, where the spec declares a plain linear leaf", REMEDY)
        known.update(id(tensor) for tensor in (module._parameters.get(leaf), module._buffers.get(leaf)) if tensor is not None)
    for path, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise SpecError(path, f"is a parameter of shape {tuple(parameter.shape)} that the spec does not declare", REMEDY)


def check_plain(model: nn.Module, spec: Part, leaves: tuple[type[Linear], ...] = (Linear,)) -> None:
    """Raise SpecError where a leaf has an adapter, or the model has a parameter that the spec does not declare."""
    for path, _ in adapted_leaves(model):
        raise SpecError(
            path, "has an adapter, which a model directory does not hold", "merge it first, or save it with save_adapter"
        )
    check_declared(model, spec, leaves)
