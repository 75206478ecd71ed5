"""Evaluation mode for the time of a call: generation, embeddings and measurements never have dropout.

    with evaluating(model):              model.training is False here, in every module
        logits = model(ids)
                                         each module is in the mode that it was in, also after an exception

A pass draws random numbers if the root is in training mode (`Ctx.for_mode`). If it is not, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The context in which a model is in evaluation mode."""
    if not model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # parents first: `train` sets the children, too
            if module.training != training:
                module.train(training)
