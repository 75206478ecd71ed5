"""Finiteness of tensors: NaN and infinity are refused before a save, after a training step and before a token is sampled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dovetail.base.errors import NonFiniteError
from dovetail.nn.declared_tensors import stored
from dovetail.nn.host import read_floats
from dovetail.spec.part import Part


def nonfinite(tensor: Tensor) -> str | None:
    """Return "nan", "inf" or "-inf" where the tensor holds such a value, else None. Allocates nothing of the tensor's size."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    if tensor.dtype.itemsize == 1:  # float8 has no reductions
        tensor = tensor.float()
    low, high = read_floats(*torch.aminmax(tensor.detach()))  # NaN propagates to both
    return next((str(bound) for bound in (high, low) if not abs(bound) < float("inf")), None)


def nonfinite_weight(model: nn.Module, spec: Part, read: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> str | None:
    """Return "PATH holds VALUE" for the first stored weight with a value that is not finite; None where all are finite. `read`
    is applied to each weight first, as for the shard of this rank."""
    for path, tensor in stored(model, spec):
        if value := nonfinite(read(tensor)):
            return f"{path} holds {value}"
    return None


def check_weights(model: nn.Module, spec: Part) -> None:
    """Raise NonFiniteError where a stored weight holds NaN or infinity.

    Looking at the logits is not enough: the CPU flash kernel of torch gives 0 for a row whose scores are all NaN.
    """
    if problem := nonfinite_weight(model, spec):
        raise NonFiniteError(f"{problem}; load finite weights")


def check_result(tensor: Tensor, name: str) -> None:
    """Raise NonFiniteError where a result computed from finite weights holds NaN or infinity."""
    if value := nonfinite(tensor):
        raise NonFiniteError(f"{name}: holds {value}; the activations overflow or a weight is not finite; use a wider dtype")
