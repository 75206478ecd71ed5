"""Seeded bugs of low precision: an interior that should be at least float32 stays in bfloat16."""

from __future__ import annotations

import dataclasses as dc
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dovetail.model.model import Model
from dovetail.ops import attend_ref, attend_tiled
from dovetail.parts.ffn import router
from dovetail.parts.mixer import mamba, mamba2
from dovetail.parts.position import rope
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.spec.scope import Scope
from dovetail.spec.weight import State

_state, _scores = mamba2.Mamba2.state, attend_tiled.Work.scores


def left_narrow(dtype: torch.dtype) -> torch.dtype:
    return dtype


def state_in_model_dtype(self: mamba2.Mamba2, scope: Scope) -> list[State]:
    return [dc.replace(state, at_least_fp32=False) for state in _state(self, scope)]


def rounded_scores(self: attend_tiled.Work, query: Tensor, key: Tensor, *more: Any) -> tuple[Tensor, Tensor | None]:
    if query.dtype != torch.float32:
        return _scores(self, query, key, *more)
    scores, capped = _scores(self, query.bfloat16(), key.bfloat16(), *more)
    return scores.float(), capped


def recurrent(kind: str, **fields: object) -> Model:
    """A small model whose first mixer is recurrent."""
    return spec().set("layers.0.mixer", {"kind": kind, **fields})


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    sharp = spec(scale=3.0)  # large scores are rounded by more
    two = recurrent("mamba2", inner=36, head=6, state_size=5)
    experts = spec().set("layers.*.ffn", {"kind": "moe", "experts": 4, "hidden": 20})
    interiors: list[tuple[str, ModuleType, Model]] = [
        ("a router is in bfloat16", router, experts),
        ("the reference softmax is in bfloat16", attend_ref, sharp),
        ("the step width of Mamba-2 is in bfloat16", mamba2, two),
        ("the step width of Mamba is in bfloat16", mamba, recurrent("mamba", inner=36, state_size=5)),
    ]
    return [
        Mutant("rotary angles are in bfloat16", "narrow", instead(rope, "angle_dtype", left_narrow), spec()),
        *[Mutant(name, "narrow", instead(module, "at_least_fp32", left_narrow), model) for name, module, model in interiors],
        Mutant("the tiled kernel rounds its scores", "narrow", instead(attend_tiled.Work, "scores", rounded_scores), sharp),
        Mutant("the state of Mamba-2 is in bfloat16", "narrow", instead(mamba2.Mamba2, "state", state_in_model_dtype), two),
    ]
