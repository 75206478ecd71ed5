"""Views: what a mixer sees of earlier tokens. A pool, a rank or another engine gives each mixer one; a whole pass has its own.

    kv = view.append(layout, k, v)              store the entries of these tokens: keys and values, latents … (…, n, *axes)
    kv = view.stored()                          what is stored already, without appending: an encoder output, shared keys
    z = kv.attend(layout, q, scoring)           attention of q (…, n, heads, head) over all entries
    (k, v), key_layout = kv.entries()           all entries, for mixers that read them in another way
    x, state = view.read(x); y = view.write(y, *state)     the recurrent state before and after the tokens of a call

`Scoring` depends on the module alone, not on the call, so that an engine can be constructed for it. An engine that keeps its
entries to itself has no `entries`, and may refuse a scoring that rotates keys on read.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from typing import Literal, Protocol

from torch import Tensor

from dovetail.nn.groups import Mask
from dovetail.nn.layout import TokenLayout

OnRead = Callable[[Tensor, TokenLayout], Tensor]  # (keys (…, m, kv_heads, head), their layout) -> keys
Flag = Literal["all", "causal"]
Entries = tuple[tuple[Tensor, ...], TokenLayout]  # (…, m, *axes) each, and the layout of their tokens


@dc.dataclass(slots=True)
class Edit:
    """A change of the probs after the softmax: a listener's, or dropout."""

    run: Callable[[Tensor, TokenLayout, TokenLayout], Tensor]  # (probs (…, heads, n, m), layouts of queries and keys) -> probs
    scales: bool = (
        False  # each prob by a factor of its query, key and head alone: some keys may be processed without the others
    )
    # where probs are only read: which queries (rows, n) are asked for, or None for all. Any kernel then computes the output,
    # and the reference implementation the probs of these queries beside it
    reads: Callable[[TokenLayout], Tensor | None] | None = None

    def __call__(self, probs: Tensor, q_layout: TokenLayout, k_layout: TokenLayout) -> Tensor:
        """Return the probs to use."""
        return self.run(probs, q_layout, k_layout)

    @property
    def need(self) -> str:
        """The feature that a kernel must offer for it."""
        return "dropout" if self.scales else "edit"


@dc.dataclass(slots=True)  # not frozen, which takes four times as long: a layer with a sink or a bias makes one per step
class Scoring:
    """How products of queries and keys become probs: softmax(cap(q kᵀ · scale) + bias, where the mask allows)."""

    mask: Mask
    scale: float
    heads: Tensor  # (heads,) the numbers of the heads on this rank, for masks and biases that differ by head
    softcap: float | None = None
    bias: Callable[..., Tensor] | None = None  # (q layout, k layout, *tables) -> (…, heads, n, m)
    tables: tuple[Tensor, ...] = ()
    slopes: Tensor | None = None  # (heads,) where the bias is −slope · |distance|, for kernels that know no other
    sink: Tensor | None = None  # (heads,) a learned logit: one more column of the softmax, without a value
    prefix: tuple[Tensor, Tensor] | None = None  # (p, kv_heads, head) learned keys and values that every query sees
    on_read: OnRead | None = None  # rotates keys that were stored without rotation
    needs: frozenset[str] = frozenset()  # the features that a kernel must offer for it
    # what can replace the mask over a whole document in a kernel: nothing is added to the scores, or stands before them
    flag: Flag | None = dc.field(init=False)

    def __post_init__(self) -> None:
        self.flag = self.mask.flag() if self.bias is None and self.prefix is None else None


class KV(Protocol):
    """The entries that the queries of a call attend to."""

    def attend(self, layout: TokenLayout, q: Tensor, scoring: Scoring, edit: Edit | None = None) -> Tensor:
        """Attend with q (…, n, heads, head), tokens of `layout`, to all keys and values; `edit` changes the probs."""
        ...

    def entries(self) -> Entries:
        """All entries and their layout; an engine that keeps them to itself raises StateError."""
        ...


class KVView(Protocol):
    """The view of a mixer that attends."""

    def append(self, layout: TokenLayout, *entries: Tensor) -> KV:
        """Store the entries (…, n, *axes) of the tokens of `layout`; return all entries."""
        ...

    def stored(self) -> KV:
        """Return the entries stored so far."""
        ...

    def append_blocks(self, layout: TokenLayout, *entries: Tensor) -> KV:
        """Store the entries of blocks that are complete now, whose layout counts blocks; return those of all blocks."""
        ...


class StateView(Protocol):
    """The view of a recurrent mixer."""

    def read(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return x and the state (rows, *axes) before the tokens of this call; None: zeros."""
        ...

    def write(self, y: Tensor, *new: Tensor) -> Tensor:
        """Store the state (rows, *axes) after them; return y."""
        ...


class WholeState:
    """The state view of a whole pass: no state comes before, and none is read after."""

    def read(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return x and no state."""
        return x, None

    def write(self, y: Tensor, *new: Tensor) -> Tensor:
        """Return y."""
        return y


WHOLE_STATE = WholeState()
