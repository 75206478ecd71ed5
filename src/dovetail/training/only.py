"""Train some weights of a model alone: those whose paths match a pattern. All others take no gradient and stay as they are.

    prefix tuning    graft `prefix: 16` into the attention of a model, then train `layers.*.mixer.prefix_*`     Li & Liang 2021
    BitFit           train `*.bias`                                                                   Ben Zaken et al. 2021

The weights that stay need no gradient and no state of the optimizer. Checkpoints contain them; an adapter's do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from dovetail.core.errors import SpecError
from dovetail.core.fold import Declared, declared
from dovetail.core.suggest import nearest
from dovetail.model import Model, ModelModule


def weights_named(spec: Model, patterns: Sequence[str]) -> list[Declared] | None:
    """The weights that some pattern matches, in module order; None without a pattern. Raises SpecError for one that matches
    none."""
    if not patterns:
        return None
    weights = [d for d in declared(spec) if d.weight.learned]
    for pattern in patterns:
        if not any(fnmatchcase(d.path, pattern) for d in weights):
            names = sorted({d.path.split(".", 2)[2] if d.path.startswith("layers.") else d.path for d in weights})
            close = nearest(pattern.rpartition("*.")[2], names)
            shown = [f"layers.*.{name}" if any(d.path.endswith(f".{name}") for d in weights) else name for name in close]
            remedy = f"did you mean {' or '.join(shown)}?" if shown else f"weights are called {', '.join(names[:12])}"
            raise SpecError(pattern, "matches no weight of the model", remedy)
    return [d for d in weights if any(fnmatchcase(d.path, pattern) for pattern in patterns)]


def train_only(model: ModelModule, weights: Sequence[Declared]) -> None:
    """Let these weights alone take gradients. Of a pipeline, another stage may have some of them."""
    paths = {d.path for d in weights}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(path in paths)
    for path, parameter in model.named_parameters(remove_duplicate=False):  # one that is also known by another name
        if path in paths:
            parameter.requires_grad_(True)
