"""AWQ: inputs with large activations get finer steps, by a scale per input channel that the model undoes exactly.

    y = (x / s) (W · s)ᵀ        s_j = |x_j|^α, of geometric mean 1;   α ∈ {0, 1/n, …} with the least  tr((W − Ŵ) H (W − Ŵ)ᵀ)

where Ŵ = decode(encode(W · s)) / s, and |x_j| is the root of H_jj. Leaves that read one tensor share one s. Dividing x by s is
folded into what gives x, and only where that is exact:

    a norm whose output x is              its scale (and shift) divided by s: seen as the same tensor in the calibration
    a linear leaf beside it               its output channels divided by s: `up` of a gated feed-forward for `down`, `v` for `o`

A fold is not inferred from names: the layer runs before and after it, and the fold is undone unless the outputs are equal. A
leaf without a fold is rounded to nearest (α = 0). Lin et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from dovetail.nn.linear import Linear, is_plain
from dovetail.nn.module import holder, tensor_at
from dovetail.ops.formats.format import Format
from dovetail.spec.fold import Declared

CHOICES = 20  # of α
EXACT = 1e-3  # the largest change of a layer's output that a fold may make, relative to it: rounding, and nothing else


def search(weights: Sequence[Tensor], hessian: Tensor, formats: Sequence[Format]) -> Tensor:
    """The scale per input (inp,) that serves matrices which read one input best."""
    size = hessian.diagonal().clamp(min=0).sqrt().float()
    size = size.clamp(min=float(size.max()) * 1e-4 or 1.0)
    best, least = torch.ones_like(size), torch.inf
    for choice in range(CHOICES):
        scale = size ** (choice / CHOICES)
        scale = scale / scale.log().mean().exp()
        error = sum(loss(w, _rounded(w.float() * scale, f) / scale, hessian) for w, f in zip(weights, formats, strict=True))
        if error < least:
            best, least = scale, error
    return best


def loss(w: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """tr((W − Ŵ) H (W − Ŵ)ᵀ): the squared error of the outputs, per token."""
    gap = w.float() - rounded
    return float(((gap @ hessian) * gap).sum())


def _rounded(w: Tensor, format: Format) -> Tensor:
    return format.decode(format.encode(w), w.shape[-1])


# -- folds ----------------------------------------------------------------------------------------------------------

Fold = list[tuple[Tensor, Tensor]]  # (weight, its value after the fold)


def norm_fold(model: nn.Module, source: str, weights: Sequence[Declared], scale: Tensor) -> Fold:
    """Divide the output of a norm by `scale`: its factor, which is 1 + weight where the weight begins with zeros, and shift."""
    fold: Fold = []
    for d in weights:
        owner, _, _ = d.path.rpartition(".")
        if owner != source or not d.weight.learned:
            continue
        value = tensor_at(model, d.path)
        if value.shape != scale.shape:
            return []
        offset = 1.0 if d.weight.role == "norm" and d.weight.init == "zeros" else 0.0
        fold.append((value, ((value.float() + offset) / scale - offset).to(value.dtype)))
    return fold


def leaf_folds(model: nn.Module, path: str, scale: Tensor) -> Iterator[Fold]:
    """The ways to divide the output channels of a plain leaf beside the leaf at `path` by `scale`, one leaf at a time."""
    owner, name = holder(model, path)
    for other, leaf in owner.named_children():
        if other == name or not is_plain(leaf) or leaf.weight.shape[:-1] != scale.shape:
            continue
        fold = [(leaf.weight, (leaf.weight.float() / scale[:, None]).to(leaf.weight.dtype))]
        if leaf.bias is not None:
            fold.append((leaf.bias, (leaf.bias.float() / scale).to(leaf.bias.dtype)))
        yield fold


def fold_exactly(fold: Fold, leaves: Sequence[Linear], scale: Tensor, outputs: Callable[[], Tensor]) -> bool:
    """Multiply the inputs' side of the leaves by `scale` and apply the fold, in place; undone unless `outputs()` stays."""
    if not fold:
        return False
    changes = [*fold, *((leaf.weight, (leaf.weight.float() * scale).to(leaf.weight.dtype)) for leaf in leaves)]
    before, old = outputs(), [tensor.detach().clone() for tensor, _ in changes]
    for tensor, new in changes:
        tensor.data.copy_(new)
    after = outputs()
    if float((after - before).abs().max()) <= EXACT * float(before.abs().max()):
        return True
    for (tensor, _), value in zip(changes, old, strict=True):
        tensor.data.copy_(value)
    return False
