"""Bugs of ported experts and recurrences: a matrix in another order, a word of a config that is read as another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from dovetail.core.fold import declared
from dovetail.lawbook.ported import in_family
from dovetail.lawbook.seeded.bug import Mutant, instead
from dovetail.lawbook.seeded.moe import groups_ignored, never_normalized
from dovetail.lawbook.seeded.port import crossed
from dovetail.model import Model
from dovetail.parts.ffn.router import TopKModule
from dovetail.parts.mixer.mla import MLAModule
from dovetail.port import tensors
from dovetail.port.convert import Concat, Interleave, Shape, Unsqueeze, Unstack
from dovetail.port.field import Config, Settings, Switch

_spread, _gathered, _channels, _taken = Unstack.to_hf, Unstack.from_hf, Unsqueeze.to_hf, Switch.from_hf
_given, _home, _forward, _setup = Switch.to_hf, Unsqueeze.from_hf, TopKModule.forward, MLAModule.setup


def not_in_turns() -> AbstractContextManager[Any]:
    """What lies in turns taken for one after the other."""

    def to_hf(self: Interleave, ours: Sequence[Tensor]) -> list[Tensor]:
        return Concat(self.dim).to_hf(ours)

    def from_hf(self: Interleave, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return Concat(self.dim).from_hf(theirs, shapes)

    return patch.multiple(Interleave, to_hf=to_hf, from_hf=from_hf)


def experts_backwards() -> AbstractContextManager[Any]:
    """The last expert first, and the router as it was."""

    def to_hf(self: Unstack, ours: Sequence[Tensor]) -> list[Tensor]:
        return _spread(self, ours)[::-1]

    def from_hf(self: Unstack, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return _gathered(self, theirs[::-1], shapes)

    return patch.multiple(Unstack, to_hf=to_hf, from_hf=from_hf)


def taps_backwards() -> AbstractContextManager[Any]:
    """A convolution in the place of a correlation."""

    def to_hf(self: Unsqueeze, ours: Sequence[Tensor]) -> list[Tensor]:
        return [one.flip(-1) for one in _channels(self, ours)]

    def from_hf(self: Unsqueeze, theirs: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        return [one.flip(-1) for one in _home(self, theirs, shapes)]

    return patch.multiple(Unsqueeze, to_hf=to_hf, from_hf=from_hf)


def switches_turned() -> AbstractContextManager[Any]:
    """Yes for no, both ways."""

    def to_hf(self: Switch, spec: Model) -> dict[str, Any]:
        return {name: not value for name, value in _given(self, spec).items()}

    def from_hf(self: Switch, config: Config) -> Settings:
        said = config.get(self.names[0])
        return _taken(self, config if said is None else {**config, self.names[0]: not said})

    return patch.multiple(Switch, to_hf=to_hf, from_hf=from_hf)


def not_sharpened(self: MLAModule) -> None:
    """1/√(nope + rope) whatever the spec says."""
    _setup(self)
    self.scale = self.qk_head**-0.5


def what_is_learned_alone(spec: Model) -> dict[str, tuple[int, ...]]:
    """A balancing bias does not travel."""
    return {d.path: d.weight.shape(d.scope) for d in declared(spec) if d.weight.learned}


def always_normalized(self: TopKModule, x: Tensor, ctx: Any) -> tuple[Tensor, Tensor]:
    chosen, weights = _forward(self, x, ctx)
    return chosen, weights / weights.sum(-1, keepdim=True)


def mutants() -> list[Mutant]:
    """The rows."""
    keys, order = "open-instruct#1839", "llama.cpp#3018"
    rows: list[tuple[str, Callable[[], AbstractContextManager[Any]], str, str]] = [
        (
            "an expert's gate is taken for what it gates",
            instead(tensors, "moves", crossed("bank.gate", "bank.up")),
            "mixtral",
            keys,
        ),
        ("experts are numbered from the last", experts_backwards, "mixtral", keys),
        ("a ported router never normalizes", instead(TopKModule, "forward", never_normalized), "mixtral", ""),
        ("a ported router always normalizes", instead(TopKModule, "forward", always_normalized), "qwen3_moe", ""),
        ("gate and up are halves, not turns", not_in_turns, "gpt_oss", keys),
        ("keys and values are halves, not head by head", not_in_turns, "deepseek_v3", order),
        ("a delta layer's q, k, v and z are not in groups", not_in_turns, "qwen3_next", order),
        ("rotary pairs of a latent key are halves", switches_turned, "deepseek_v3", order),
        ("scores of latents are not sharpened", instead(MLAModule, "setup", not_sharpened), "deepseek_v3", ""),
        ("groups of ported experts do not limit", instead(TopKModule, "choose", groups_ignored), "deepseek_v3", ""),
        ("a balancing bias does not travel", instead(tensors, "shapes_of", what_is_learned_alone), "deepseek_v3", ""),
        ("a state space's input is taken for its gate", instead(tensors, "moves", crossed(".x.", ".z.")), "mamba", keys),
        ("taps of a convolution are backwards", taps_backwards, "mamba2", keys),
        ("what is written is taken for what is read", instead(tensors, "moves", crossed(".b.", ".c.")), "jamba", keys),
    ]
    return [Mutant(name, "ported", plant, in_family(family), report) for name, plant, family, report in rows]
