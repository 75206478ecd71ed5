"""Merge adapters into the weights of a model: what each changes in a weight is combined, and added to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dovetail.model.transformer import Transformer
from dovetail.nn.declared_tensors import adapted_leaves
from dovetail.nn.linear import Linear
from dovetail.weights.adapters.attach import detach

Changes = dict[str, list[tuple[float, Tensor]]]  # by path: (factor, change) of each adapter


@torch.no_grad()
def merge_adapters(
    model: Transformer, attach: Sequence[Callable[[], object]], factors: Sequence[float], combined: Callable[..., Tensor]
) -> int:
    """Merge adapters, which the functions attach to the model one at a time, each by its factor; return the number of leaves
    that they changed. `combined` returns the change that several changes make together, of (changes, factors, path=…)."""
    changes: Changes = {}
    biases: Changes = {}
    leaves: dict[str, Linear] = {}
    for factor, attach_one in zip(factors, attach, strict=True):
        attach_one()
        _collect(model, factor, changes, biases, leaves)
        detach(model)
    for path, leaf in leaves.items():
        weight = leaf.dense() + combined(*_apart(changes[path]), path=path)
        own = biases.get(path)
        bias = leaf.bias if own is None else leaf.bias + combined(*_apart(own), path=f"{path}.bias")
        leaf.set_matrix(weight, bias)
    return len(leaves)


def _collect(model: Transformer, factor: float, changes: Changes, biases: Changes, leaves: dict[str, Linear]) -> None:
    """Take the change that each adapter of a model makes, once for each weight."""
    known: set[int] = set()
    for path, leaf in adapted_leaves(model):
        adapter = leaf.adapter
        if adapter is None or id(adapter) in known:
            continue
        known.add(id(adapter))
        leaves[path] = leaf
        changes.setdefault(path, []).append((factor, adapter.matrix(leaf) - leaf.dense()))
        bias = adapter.merged_bias(leaf)
        if bias is not None and bias is not leaf.bias:
            biases.setdefault(path, []).append((factor, bias - leaf.bias))


def _apart(pairs: list[tuple[float, Tensor]]) -> tuple[list[Tensor], list[float]]:
    return [change for _, change in pairs], [factor for factor, _ in pairs]
