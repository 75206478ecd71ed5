"""The tensors of a model's adapters, by path: what is saved of them, and put back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dovetail.core.declared_tensors import adapted_leaves
from dovetail.core.errors import FileError
from dovetail.core.fold import Declared
from dovetail.core.module import tensor_at


def adapter_declared(model: nn.Module) -> dict[str, Declared]:
    """The declared tensors of all adapters by path, each once."""
    return {d.path: d for _, leaf in adapted_leaves(model) if leaf.adapter is not None for d in leaf.adapter.declared}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of all adapters by path."""
    return {path: tensor_at(model, path).detach() for path in adapter_declared(model)}


def check_tensors(shapes: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor]) -> None:
    """Raise FileError for a tensor that is missing, unknown or of another shape than the model says."""
    for path in [*shapes, *tensors]:
        if path not in tensors:
            raise FileError(f"{path}: is missing; the adapter was saved with other targets")
        if path not in shapes:
            raise FileError(f"{path}: the model has no such adapter; it was saved with other targets")
        if tuple(shapes[path]) != tuple(tensors[path].shape):
            raise FileError(f"{path}: has shape {list(tensors[path].shape)}; the model says {list(shapes[path])}")


@torch.no_grad()
def set_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the adapters of a model. Raises FileError for one that is missing, unknown or of another shape."""
    own = adapter_tensors(model)
    check_tensors({path: tensor.shape for path, tensor in own.items()}, tensors)
    for path, tensor in own.items():
        tensor.copy_(tensors[path])
