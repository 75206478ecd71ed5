"""Learned absolute positions: one row of a table per position, added to the residual stream; at most `length` tokens.

x ← x + table[position + offset]            table (length + offset, embed)            Gehring et al. 2017, GPT-2, OPT (offset 2)
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.errors import StateError
from dovetail.core.field import bounded
from dovetail.core.group import Position, PositionModule
from dovetail.core.layout import TokenLayout
from dovetail.core.part import Mistake, Problem, register
from dovetail.core.scope import Scope
from dovetail.core.weight import Weight


@register("learned")
class Learned(Position):
    """Learned absolute positions: one row of a table per position."""

    MISTAKES = {"offset": Mistake("position offset", (0, 1, 2))}

    site: ClassVar[Literal["stream", "mixer", "any"]] = "stream"
    length: int = bounded(1024, above=0)
    offset: int = bounded(0, at_least=0)

    SAMPLES = {"length": [64, 70], "offset": [0, 2]}

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
