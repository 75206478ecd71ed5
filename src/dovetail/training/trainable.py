"""Train some weights of a model alone: those whose paths match a pattern. All others take no gradient and stay as they are.

    prefix tuning    graft `prefix: 16` into the attention of a model, then train `layers.*.mixer.prefix_*`     Li & Liang 2021
    BitFit           train `*.bias`                                                                   Ben Zaken et al. 2021

The weights that stay need no gradient and no state of the optimizer. Checkpoints contain them; an adapter's do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from dovetail.core.fold import Declared, check_patterns, declared
from dovetail.model import Model, ModelModule


def weights_named(spec: Model, patterns: Sequence[str]) -> list[Declared] | None:
    """The weights that some pattern matches, in module order; None without a pattern. Raises SpecError for one that matches
    none."""
    if not patterns:
        return None
    weights = [d for d in declared(spec) if d.weight.learned]
    check_patterns(patterns, [d.path for d in weights], "matches no weight of the model")
    return [d for d in weights if any(fnmatchcase(d.path, pattern) for pattern in patterns)]


def train_only(model: ModelModule, weights: Sequence[Declared]) -> None:
    """Let these weights alone take gradients. Of a pipeline, another stage may have some of them."""
    paths = {d.path for d in weights}
    model.requires_grad_(False)
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if path in paths:
            parameter.requires_grad_(True)
