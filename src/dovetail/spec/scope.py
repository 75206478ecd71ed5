"""Scope: the sizes of named axes at one node of the tree, the path of the part there, and its layer.

An axis is a name (`embed`, `heads`, `kv_heads`, `head`, `ffn`, `vocab`, …). A parent adds sizes for its children and *binds*
a child's generic axis to its own: a norm declares its weight over `dim`, which is `embed` in a block and `head` in QK-norm.
One generic name may stand for several axes (`dim` -> `heads`, `head`: a norm over the whole projection).
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterable, Mapping
from typing import Any


@dc.dataclass(frozen=True)
class Scope:
    """Axis sizes in scope at one node of the tree."""

    sizes: Mapping[str, int] = dc.field(default_factory=dict)
    alias: Mapping[str, tuple[str, ...]] = dc.field(default_factory=dict)
    path: str = ""  # of the part that has this scope
    stack: str = ""  # path of the list of layers around the part, "" outside
    layer: int = 0
    depth: int = 1
    decodes: bool = True  # whether parts here have a decode state; those of an encoder have none
    init: Any = None  # the `init` part of the model
    opens: bool = False  # whether this block is the first of a run of blocks with several residual streams
    closes: bool = False  # whether it is the last
    shares: int | None = None  # the layer whose weights this one uses; None: it has its own
    drafts: bool = False  # whether parts here run in training and drafting only (multi-token prediction)
    added: frozenset[str] = frozenset()  # the axes defined since `entered`, also those that redefine an axis above

    def entered(self, path: str) -> Scope:
        """The same scope for the part at `path`, which has not yet defined an axis."""
        return dc.replace(self, path=path, added=frozenset())

    def add(self, **sizes: int) -> Scope:
        """The same scope with more (or other) axis sizes."""
        return self._with({**self.sizes, **sizes}, self.alias, self.path, self.added | sizes.keys())

    def bind(self, **alias: str | tuple[str, ...]) -> Scope:
        """The same scope with a generic axis bound to one or several axes."""
        named = {k: (v,) if isinstance(v, str) else v for k, v in alias.items()}
        return self._with(self.sizes, {**self.alias, **named}, self.path, self.added)

    def at_path(self, path: str) -> Scope:
        """The same scope, with the path of another part."""
        return self._with(self.sizes, self.alias, path, self.added)

    def _with(self, sizes: Mapping[str, int], alias: Mapping[str, tuple[str, ...]], path: str, added: frozenset[str]) -> Scope:
        # written out: dataclasses.replace is slow, and a large spec is walked often
        where = (self.stack, self.layer, self.depth, self.decodes, self.init)
        return Scope(sizes, alias, path, *where, self.opens, self.closes, self.shares, self.drafts, added)

    def names(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The axes that generic axes are bound to."""
        return tuple(name for axis in axes for name in self.alias.get(axis, (axis,)))

    def size(self, *axes: str) -> int:
        """The product of the axes' sizes."""
        total = 1
        for name in self.names(axes):  # a compiler cannot trace math.prod of a generator
            total *= self.sizes[name]
        return total

    def of_model(self) -> str:
        """The path of the model whose layers are around this part."""
        return self.stack.rpartition(".")[0]

    def in_layer(self, layer: int) -> str:
        """The path of this part in another layer of its stack, where a weight shared by all layers is stored."""
        head = f"{self.stack}.{self.layer}."
        return f"{self.stack}.{layer}.{self.path.removeprefix(head)}"
