"""Absolute positions, added to the residual stream, or none at all.

Learned absolute positions: one row of a table per position, added to the residual stream; at most `length` tokens.

x ← x + table[position + offset]            table (length + offset, embed)            Gehring et al. 2017, GPT-2, OPT (offset 2)

Sinusoidal absolute positions, added to the residual stream; no weights, any length.

    PE(p, 2i) = sin(p · base^(−2i/d))      PE(p, 2i+1) = cos(p · base^(−2i/d))            Vaswani et al. 2017

`halves`: all sines before all cosines. `endpoint`: the exponent is −i/(d/2 − 1), so that the last frequency is 1/base (as in
tensor2tensor, fairseq, XGLM). `offset` is added to p.

No position at all (NoPE): a causal mask alone lets a decoder recover order (Haviv et al. 2022; Kazemnejad et al. 2023).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import StateError
from dovetail.nn.groups import Position, PositionModule
from dovetail.nn.layout import TokenLayout
from dovetail.spec.field import bounded
from dovetail.spec.part import Problem, broken, register
from dovetail.spec.part_proof import FieldCause, Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Weight


@register("learned")
class Learned(Position):
    """Learned absolute positions: one row of a table per position."""

    site: ClassVar[Literal["stream", "mixer", "any"]] = "stream"
    length: int = bounded(1024, above=0)
    offset: int = bounded(0, at_least=0)

    def axes(self, scope: Scope) -> Scope:
        return scope.add(position=self.length + self.offset)

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="table", out=("position",), inp=("embed",), role="embed")]

    def advise(self, scope: Scope, length: int | None) -> list[Problem]:
        if length is None or length <= self.length:
            return []
        return [
            Problem(
                "length",
                f"{self.length} learned positions are fewer than {length} tokens",
                "raise it, or use rope",
            )
        ]


class LearnedProof(Proof, of=Learned):
    """Sampled values and causes."""

    causes = {"offset": FieldCause("position offset", (0, 1, 2))}
    samples = {"length": [64, 70], "offset": [0, 2]}


class LearnedModule(PositionModule, of=Learned):
    """x (…, n, embed) -> like x."""

    part: Learned
    table: Tensor

    def embed(self, x: Tensor, layout: TokenLayout) -> Tensor:
        layout.once(f"fits {self.part.length}", lambda: self.check_length(layout))
        return x + F.embedding(layout.position + self.part.offset, self.table)

    def check_length(self, layout: TokenLayout) -> bool:
        """Raise where a token's position is past the table, as far as that is known without waiting for a device."""
        longest, positions = layout.end, layout.position
        if positions is not layout.order:  # the caller gave them
            known = positions.device.type == "cpu" and not torch.compiler.is_compiling()
            longest = int(positions.max()) + 1 if known else None
        if longest is not None and longest > self.part.length:
            raise StateError(
                f"{self.path}: position {longest - 1} is past the last row of the table, {self.part.length - 1};"
                " shorten the sequence, or give `learned` a larger length"
            )
        return True


@register("sinusoidal")
class Sinusoidal(Position):
    """Sinusoidal absolute positions: sine and cosine of geometric wavelengths."""

    site: ClassVar[Literal["stream", "mixer", "any"]] = "stream"
    base: float = bounded(10000.0, above=0)
    halves: bool = False  # sines, then cosines, rather than in turn
    endpoint: bool = False  # the last frequency is 1/base
    offset: int = bounded(0, at_least=0)  # the first position

    def axes(self, scope: Scope) -> Scope:
        return scope.add(wave=scope.size("embed") // 2)

    def weights(self, scope: Scope) -> list[Weight]:
        return [Weight(name="frequency", out=("wave",), role="const")]

    def constant(self, name: str, scope: Scope) -> Tensor:
        pairs = scope.size("wave")
        steps = pairs - 1 if self.endpoint else pairs
        return self.base ** -(torch.arange(pairs, dtype=torch.float64) / steps)

    def check(self, scope: Scope) -> list[Problem]:
        width, remedy = scope.size("embed"), "set endpoint to false, or use a larger width"
        return broken(
            (width % 2, "", f"needs an even width, not {width}", "make the width even"),
            (self.endpoint and width < 4, "endpoint", f"needs a width of 4 or more, not {width}", remedy),
        )[:1]


class SinusoidalProof(Proof, of=Sinusoidal):
    """Sampled values."""

    samples = {"base": [10000.0, 100.0], "halves": [False, True], "endpoint": [False, True], "offset": [0, 2]}


class SinusoidalModule(PositionModule, of=Sinusoidal):
    """x (…, n, embed) -> like x."""

    part: Sinusoidal
    frequency: Tensor

    def embed(self, x: Tensor, layout: TokenLayout) -> Tensor:
        angle = (layout.position + self.part.offset)[..., None].to(self.frequency.dtype) * self.frequency
        waves = torch.stack([angle.sin(), angle.cos()], -2 if self.part.halves else -1)
        return x + waves.flatten(-2).to(x.dtype)


@register("none")
class NoPosition(Position):
    """No positions (NoPE)."""

    site: ClassVar[Literal["stream", "mixer", "any"]] = "any"
