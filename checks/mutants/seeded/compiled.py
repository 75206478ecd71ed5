"""Seeded bugs of decoding as it is run: lengths and capacities in graphs, and rows that feel their neighbors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dovetail.nn.fused import Tiled
from dovetail.nn.linear import Dense, Linear
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.state.frame import TokenView

_read, _multiply = TokenView._read, Tiled.multiply


def a_loop_over_the_tokens(self: TokenView, store: Tensor) -> Tensor:
    entries = _read(self, store)
    return torch.stack([entries[:, i] for i in range(entries.shape[1])], 1)


def the_whole_store_copied(self: TokenView, store: Tensor) -> Tensor:
    store.add_(store.clone(), alpha=0)  # every slot is read and written
    return _read(self, store)


def a_wait_for_the_length(self: TokenView, store: Tensor) -> Tensor:
    entries = _read(self, store)
    return entries if entries.abs().sum().item() >= 0 else entries * 2


def experts_without_tiles(self: Tiled, leaf: Linear, x: Tensor, rows: Any, ctx: Any) -> Tensor:
    return Dense.grouped(self, leaf, x, rows, ctx)


def one_scale_for_the_batch(self: Tiled, leaf: Linear, x: Tensor, ctx: Any) -> Tensor:
    step = x.abs().max() * 2.0**-22
    return _multiply(self, leaf, (x / step).round() * step, ctx)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    experts = spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20})
    return [
        Mutant("a graph holds the length", "compiled", instead(TokenView, "_read", a_loop_over_the_tokens)),
        Mutant("a step waits for a value", "compiled", instead(TokenView, "_read", a_wait_for_the_length)),
        Mutant("a step copies the whole store", "compiled", instead(TokenView, "_read", the_whole_store_copied)),
        Mutant(
            "the number of an expert's rows chooses the order of sums",
            "invariant",
            instead(Tiled, "grouped", experts_without_tiles),
            experts,
        ),
        Mutant(
            "inputs are quantized with one scale for the batch",
            "invariant",
            instead(Tiled, "multiply", one_scale_for_the_batch),
        ),
    ]
