"""What a part declares about its tensors: weights (learned or constant) and decode-time state. Plain data, no torch.

From these few facts follow the parameters, their count and matmul FLOPs, initialization, sharding, optimizer groups, LoRA
targets, cache allocation and the memory forecast. A weight's matrix is (batch…, out, inp); `out` and `inp` are products
of named axes, major first, so that a projection to `heads × head` can be cut by heads without knowing what a head is.
"""

from __future__ import annotations

import dataclasses as dc
from fractions import Fraction
from typing import Literal

from dovetail.core.scope import Scope

# const: follows from the spec, so it is never stored; kept: stored as weights are, but its part moves it, and no gradient
Role = Literal["linear", "embed", "norm", "bias", "gate", "conv", "const", "updated"]
Fill = Literal["normal", "ones", "zeros", "const"]


@dc.dataclass(frozen=True, kw_only=True)
class Weight:
    """One declared tensor of a part.

    `q.weight` makes a linear leaf `q` (an adapter can wrap it); a name without a dot is a bare parameter. `inp` are the
    axes a matmul reduces over: a weight with `inp` and role linear costs 2·size FLOPs a token.
    """

    name: str
    out: tuple[str, ...] = ()
    inp: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()  # independent matrices (experts)
    init: Fill = "normal"
    role: Role = "linear"
    over: tuple[str, ...] = ()  # axes that must be whole for a reduction
    # auto: cut along the major axis where that axis is cut; replicate: never cut;
    # once: added to a sum that is still partial on each rank, so it must count once, not once a rank;
    # reduce: cut along what it sums over, though what comes out is needed whole: the part calls ctx.total on it
    tp: Literal["auto", "replicate", "once", "reduce"] = "auto"
    same_as: str | None = None  # path of the weight this one is: stored and counted there
    packs: tuple[str, ...] = ()  # the weights it packs along its axis `slots`: queries, keys and values, in this order
    used: Fraction = Fraction(1)  # the share of `batch` that one token touches

    @property
    def learned(self) -> bool:
        """A parameter of its own: no buffer, and not another weight's alias."""
        return not self.buffer and self.same_as is None

    @property
    def buffer(self) -> bool:
        """Held beside the parameters: no gradient moves it, and no count has it."""
        return self.role in ("const", "updated")

    @property
    def stored(self) -> bool:
        """Whether a file of weights holds it."""
        return self.learned or self.role == "updated"

    @property
    def matmul(self) -> bool:
        """Whether a token is multiplied by this matrix."""
        return bool(self.inp) and self.role == "linear"

    def shape(self, scope: Scope) -> tuple[int, ...]:
        """(batch…, out, inp): each of out and inp flattened to one dimension."""
        batch = tuple(scope.size(axis) for axis in self.batch)
        out = (scope.size(*self.out),) if self.out else ()
        inp = (scope.size(*self.inp),) if self.inp else ()
        return batch + out + inp


@dc.dataclass(frozen=True, kw_only=True)
class State:
    """What a part remembers while decoding.

    per token: one entry a token seen (keys and values); per block: one entry for every `block` tokens of a sequence, written
    when the last of them arrives; per sequence: one entry in all, which every token changes (a recurrence); per source: one
    entry a token of the encoder's memory, written at admission and never again. `window` (with the first `keep` tokens)
    bounds what a token can still look back to.
    """

    name: str
    axes: tuple[str, ...]
    per: Literal["token", "block", "sequence", "source"] = "token"
    block: int = 1  # tokens an entry stands for
    copies: int = 1
    window: int | None = None
    keep: int = 0
    at_least_fp32: bool = False  # kept in float32 at least: a sum over all that was seen

    def entries(self, n: int) -> int:
        """How many entries n tokens leave behind."""
        if self.per == "sequence":
            return 1
        n //= self.block
        return n if self.window is None else min(n, self.window + self.keep)

    def values(self, scope: Scope, n: int) -> int:
        """How many numbers n tokens leave behind."""
        return self.copies * scope.size(*self.axes) * self.entries(n)
