"""Seeded bugs of ported MoE and recurrent families: tensors in another layout, config fields read wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from checks.mutants.seeded.moe import groups_ignored, never_normalized
from checks.mutants.seeded.port import exchanged
from dovetail.hf import tensors
from dovetail.hf.convert import Concat, Interleave, Shape, Unsqueeze, Unstack
from dovetail.hf.field import Config, Settings, Switch
from dovetail.model.model import Model
from dovetail.parts.ffn.router import TopKModule
from dovetail.parts.mixer.mla import MLAModule
from dovetail.proof.laws.mutant import Mutant, instead
from dovetail.proof.laws.ported import in_family
from dovetail.spec.fold import declared

_spread, _gathered, _channels, _taken = Unstack.to_hf, Unstack.from_hf, Unsqueeze.to_hf, Switch.from_hf
_given, _home, _forward, _setup = Switch.to_hf, Unsqueeze.from_hf, TopKModule.forward, MLAModule.setup


def concatenated() -> AbstractContextManager[Any]:
    """Interleaved tensors are read as concatenated ones."""

    def to_hf(self: Interleave, ours: Sequence[Tensor]) -> list[Tensor]:
        return Concat(self.dim).to_hf(ours)

    def from_hf(self: Interleave, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return Concat(self.dim).from_hf(theirs, shapes)

    return patch.multiple(Interleave, to_hf=to_hf, from_hf=from_hf)


def experts_reversed() -> AbstractContextManager[Any]:
    """Experts in reverse order, the router unchanged."""

    def to_hf(self: Unstack, ours: Sequence[Tensor]) -> list[Tensor]:
        return _spread(self, ours)[::-1]

    def from_hf(self: Unstack, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return _gathered(self, theirs[::-1], shapes)

    return patch.multiple(Unstack, to_hf=to_hf, from_hf=from_hf)


def kernel_reversed() -> AbstractContextManager[Any]:
    """The kernel of a convolution reversed in time."""

    def to_hf(self: Unsqueeze, ours: Sequence[Tensor]) -> list[Tensor]:
        return [one.flip(-1) for one in _channels(self, ours)]

    def from_hf(self: Unsqueeze, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return [one.flip(-1) for one in _home(self, theirs, shapes)]

    return patch.multiple(Unsqueeze, to_hf=to_hf, from_hf=from_hf)


def switches_inverted() -> AbstractContextManager[Any]:
    """A boolean config field is inverted in both directions."""

    def to_hf(self: Switch, spec: Model) -> dict[str, Any]:
        return {name: not value for name, value in _given(self, spec).items()}

    def from_hf(self: Switch, config: Config) -> Settings:
        value = config.get(self.names[0])
        return _taken(self, config if value is None else {**config, self.names[0]: not value})

    return patch.multiple(Switch, to_hf=to_hf, from_hf=from_hf)


def yarn_scale_ignored(self: MLAModule) -> None:
    """A scale of 1/√(nope + rope), whatever the spec has."""
    _setup(self)
    self.scale = self.qk_head**-0.5


def learned_weights_only(spec: Model) -> dict[str, tuple[int, ...]]:
    """A balancing bias is not ported."""
    return {d.path: d.weight.shape(d.scope) for d in declared(spec) if d.weight.learned}


def always_normalized(self: TopKModule, x: Tensor, ctx: Any) -> tuple[Tensor, Tensor]:
    chosen, weights = _forward(self, x, ctx)
    return chosen, weights / weights.sum(-1, keepdim=True)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    keys, order = "open-instruct#1839", "llama.cpp#3018"
    rows: list[tuple[str, Callable[[], AbstractContextManager[Any]], str, str]] = [
        (
            "gate and up of an expert are exchanged",
            instead(tensors, "moves", exchanged("bank.gate.weight", "bank.up.weight")),
            "mixtral",
            keys,
        ),
        ("experts are in reverse order", experts_reversed, "mixtral", keys),
        ("a ported router never normalizes", instead(TopKModule, "forward", never_normalized), "mixtral", ""),
        ("a ported router always normalizes", instead(TopKModule, "forward", always_normalized), "qwen3_moe", ""),
        ("gate and up are concatenated, not interleaved", concatenated, "gpt_oss", keys),
        ("keys and values are concatenated, not by head", concatenated, "deepseek_v3", order),
        ("q, k, v and z of gated DeltaNet are not in groups", concatenated, "qwen3_next", order),
        ("rotary pairs of MLA are halves, not adjacent", switches_inverted, "deepseek_v3", order),
        ("the scale of MLA ignores YaRN", instead(MLAModule, "setup", yarn_scale_ignored), "deepseek_v3", ""),
        ("groups of ported experts do not limit the choice", instead(TopKModule, "choose", groups_ignored), "deepseek_v3", ""),
        ("a balancing bias is not ported", instead(tensors, "shapes_of", learned_weights_only), "deepseek_v3", ""),
        ("input and gate of Mamba are exchanged", instead(tensors, "moves", exchanged(".x.", ".z.")), "mamba", keys),
        ("the kernel of a convolution is reversed", kernel_reversed, "mamba2", keys),
        ("B and C of Mamba are exchanged", instead(tensors, "moves", exchanged(".b.", ".c.")), "jamba", keys),
    ]
    return [Mutant(name, "ported", seed, in_family(family), report) for name, seed, family, report in rows]
