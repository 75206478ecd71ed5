"""What a model holds of its spec: every declared tensor, or, of a pipeline stage, those of its own layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from dovetail.core.fold import Declared, declared
from dovetail.core.part import Part


class Absent(nn.Module):
    """Stands where the module of a part would be that another rank has."""


def held(model: nn.Module, spec: Part) -> Iterator[Declared]:
    """Yield every declared weight and constant that the model holds, in module order."""
    absent = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, Absent))
    return (d for d in declared(spec) if not d.path.startswith(absent))
