"""Weight, State and Read: the declarations of a part's tensors: learned, constant, decode state, values of other parts. Plain
data, no torch.

Parameters, parameter counts, matmul FLOPs, initialization, sharding, optimizer groups, LoRA targets and the allocation of
caches are all computed from these declarations. A weight has the shape (batch…, out, inp); `out` and `inp` are products of
named axes, major first, so that a projection to `heads × head` can be sharded by heads.

Packed weights: queries, keys and values in one matrix, group by group.

    (kv_heads · slots · head, inp)          slots of a group: its queries, then its key, then its value
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, NamedTuple

from dovetail.spec.scope import Scope

if TYPE_CHECKING:
    from torch import Tensor

# const: computed from the spec and never saved; updated: saved like a weight, but changed by its part instead of a gradient
Role = Literal["linear", "embed", "norm", "bias", "gate", "conv", "const", "updated"]
Fill = Literal["normal", "uniform", "ones", "zeros", "const"]  # uniform: within ±1/√inputs
KV_HEADS = "kv_heads"
PACKED_AXIS = "slots"  # of a packed weight, within a group of heads: its queries, then its key, then its value


@dc.dataclass(frozen=True, kw_only=True)
class Weight:
    """One declared tensor of a part.

    `q.weight` becomes a linear leaf `q` (an adapter can wrap it); a name without a dot becomes a bare parameter. `inp` are
    the axes that a matmul reduces over: a weight with `inp` and role linear costs 2·size FLOPs per token.
    """

    name: str
    out: tuple[str, ...] = ()
    inp: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()  # independent matrices (experts)
    init: Fill = "normal"
    role: Role = "linear"
    over: tuple[str, ...] = ()  # axes that a reduction needs whole on each rank
    # auto: sharded along the major axis where that axis is sharded; replicate: never sharded;
    # once: added to a partial sum, so that only one rank may add it;
    # reduce: sharded along the axes it reduces over, although the output is needed whole: the part calls ctx.ranks.all_reduce;
    # inside: as auto, and where it is not sharded its outputs are multiplied by a weight that is: its gradient is a partial sum
    tp: Literal["auto", "replicate", "once", "reduce", "inside"] = "auto"
    same_as: str | None = None  # path of the weight that this one is tied to: saved and counted there
    packs: tuple[str, ...] = ()  # the weights packed along the axis `slots`: queries, keys and values, in this order
    readout: bool = False  # its outputs do not become more where the model is made wider: logits, scores of experts
    used: Fraction = Fraction(1)  # the fraction of `batch` that one token uses
    dtype: Literal["model", "int64"] = "model"  # model: that of the model's weights; constants and buffers at least float32

    @property
    def learned(self) -> bool:
        """Whether this is a parameter: not a buffer, and not tied to another weight."""
        return not self.buffer and self.same_as is None

    @property
    def buffer(self) -> bool:
        """Whether this is a buffer: no gradient, and not in the parameter count."""
        return self.role in ("const", "updated")

    @property
    def stored(self) -> bool:
        """Whether a saved file contains it."""
        return self.learned or (self.role == "updated" and self.same_as is None)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices and tables, not to norms, biases and gates."""
        return self.role not in ("norm", "bias", "gate")

    @property
    def matmul(self) -> bool:
        """Whether each token is multiplied by this matrix."""
        return bool(self.inp) and self.role == "linear"

    def shape(self, scope: Scope) -> tuple[int, ...]:
        """(batch…, out, inp): each of out and inp flattened to one dimension."""
        batch = tuple(scope.size(axis) for axis in self.batch)
        out = (scope.size(*self.out),) if self.out else ()
        inp = (scope.size(*self.inp),) if self.inp else ()
        return batch + out + inp


@dc.dataclass(frozen=True, kw_only=True)
class State:
    """One declared tensor of the decode state.

    per token: one entry per token (the keys of a KV cache); per block: one entry per `block` tokens of a sequence, written
    with the last of them; per sequence: one entry, which every token updates (a recurrent state); per source: one entry per
    token of the encoder output, written once at admission. With `window`, only the last `window` and the first `keep`
    tokens are stored. The first `ahead` tokens of a sequence see each other, so that they arrive in one step.
    """

    name: str
    axes: tuple[str, ...]
    per: Literal["token", "block", "sequence", "source"] = "token"
    block: int = 1  # tokens per entry
    copies: int = 1
    window: int | None = None
    keep: int = 0
    ahead: int = 0
    at_least_fp32: bool = False  # stored in float32 or wider: a sum over all tokens
    dtype: Literal["model", "int64"] = "model"  # int64: token ids
    same_as: str | None = None  # path of an earlier mixer that stores these entries: they are stored and counted there

    def shape(self, scope: Scope, cuts: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of one entry on one rank; `cuts` are the axes that are sharded, and into how many shards. Ranks share an
        axis of fewer entries."""
        first, *rest = (scope.size(axis) for axis in self.axes)
        return max(1, first // cuts.get(scope.names(self.axes)[0], 1)), *rest

    def entries(self, n: int) -> int:
        """The number of entries after n tokens."""
        if self.per == "sequence":
            return 1
        n //= self.block
        return n if self.window is None else min(n, self.window + self.keep)

    def values(self, scope: Scope, n: int) -> int:
        """The number of values after n tokens; 0 where another mixer stores them."""
        if self.same_as is not None:
            return 0
        return self.copies * scope.size(*self.axes) * self.entries(n)


class Read(NamedTuple):
    """A value of another part that a branch of a block reads; see nn/cross_layer.py."""

    source: str  # path of the part that publishes it: an earlier mixer, or the model
    name: str
    axes: tuple[str, ...] = ()  # behind (…, n)


def piece(packed: Tensor, dim: int, which: int) -> Tensor:
    """A view of the queries (0), the keys (1) or the values (2); `dim` is the dimension of the slots."""
    queries = packed.shape[dim] - 2
    return packed.narrow(dim, 0, queries) if which == 0 else packed.narrow(dim, queries + which - 1, 1)


def matrices(tensor: Tensor, weight: Weight, scope: Scope) -> list[Tensor]:
    """Views of the matrices in a tensor of a weight's shape: itself (batch…, out, inp); of a packed one its queries, keys and
    values, each (groups, slots, head, inp), where all but the last dimension are `out`."""
    if not weight.packs:
        return [tensor]
    shaped = tensor.unflatten(0, [scope.size(axis) for axis in weight.out])
    return [piece(shaped, weight.out.index(PACKED_AXIS), which) for which in range(len(weight.packs))]
