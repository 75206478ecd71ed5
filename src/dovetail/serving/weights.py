"""Weights: notices that the weights of a served model have changed, since KV caches and prefixes belong to the old ones.

    weights = Weights(model)
    weights.written()      some weight was written to in place (an optimizer's step, load_state_dict): asked in every step
    weights.changed()      or a weight or module was replaced: asked when a request is added

Writes through `.data` and to inference tensors leave no trace in torch; `Engine.reset` is for these.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Weights:
    """The weights of a model as they were when `read` was called last."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.read()

    def read(self) -> None:
        """Remember the present weights."""
        modules = list(self.model.modules())
        held: list[dict[str, Any]] = [slots for one in modules for slots in (one._modules, one._parameters)]
        self.slots = [(slots, len(slots), [(name, value) for name, value in slots.items()]) for slots in held if slots]
        self.tensors: list[Tensor] = [weight for weight in self.model.parameters() if not weight.is_inference()]
        self.versions = [weight._version for weight in self.tensors]

    def written(self) -> bool:
        """Whether a weight was written to since; 30 ns per weight."""
        return [weight._version for weight in self.tensors] != self.versions

    def changed(self) -> bool:
        """Whether a weight was written to or replaced since."""
        return self.written() or any(
            len(slots) != count or any(slots.get(name) is not value for name, value in values)
            for slots, count, values in self.slots
        )
