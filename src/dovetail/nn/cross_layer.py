"""Values across layers: what branches of a block read of earlier layers and of the model, and what they publish.

    layers.2.mixer: k, v  ──►  layers.5.mixer           model: inputs (…, n), embedded (…, n, embed)  ──►  any branch

A part declares `reads(scope)` and `publishes()`. The values that a block reads are inputs of its forward, and those that later
blocks read are further outputs, so that cuts between stages, recomputation and compilers see them. Inside a block the branch
has them as `values`, an argument of its module's forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from dovetail.spec.weight import Read

if TYPE_CHECKING:
    from dovetail.nn.block import Branching
    from dovetail.nn.ctx import Ctx


class BlockIO(NamedTuple):
    """What a block takes and returns beside the residual stream: (branch, value) each."""

    reads: tuple[tuple[str, Read], ...] = ()
    wanted: tuple[tuple[str, str], ...] = ()  # names of published values that later blocks read


def block_ios(blocks: Sequence[Branching], stack: str) -> list[BlockIO | None]:
    """Per block of a stack what it reads and publishes; None for most."""
    reads = [[(name, read) for name in block.branches for read in _branch(block, name)] for block in blocks]
    read = {(one.source, one.name) for own in reads for _, one in own}
    result: list[BlockIO | None] = []
    for i, (block, own) in enumerate(zip(blocks, reads, strict=True)):
        wanted = [(branch, name) for branch in block.branches for source, name in read if source == f"{stack}.{i}.{branch}"]
        result.append(BlockIO(tuple(own), tuple(sorted(wanted))) if own or wanted else None)
    return result


def _branch(block: Branching, name: str) -> list[Read]:
    module: Any = block.modules_named(name)
    return module.part.reads(module.scope)


class Values:
    """The values that a branch reads, by name, and those that it publishes."""

    __slots__ = ("given", "published")

    def __init__(self) -> None:
        self.given: dict[str, Tensor] = {}
        self.published: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.given[name]

    def publish(self, **values: Tensor) -> None:
        """Offer values (…, n, *axes) to later blocks."""
        self.published.update(values)


class DiscardedValues(Values):
    """The values of a branch of which nobody reads any."""

    def publish(self, **values: Tensor) -> None:
        """Forget them."""


DISCARDED = DiscardedValues()


class BlockWithValues:
    """A block as its wire sees it in one call: with the values that its branches read and publish."""

    def __init__(self, block: Branching, io: BlockIO, given: Iterable[Tensor]) -> None:
        self.block, self.path, self.scope, self.normed = block, block.path, block.scope, block.normed
        self.branches, self.steps, self.io = block.branches, block.steps, io
        self.values = {branch: Values() for branch, _ in (*io.reads, *io.wanted)}
        for (branch, read), value in zip(io.reads, given, strict=True):
            self.values[branch].given[read.name] = value

    def branch(self, name: str, x: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
        """Apply one branch, with its values if it has any."""
        values = {"values": self.values[name]} if name in self.values else {}
        return self.block.branch(name, x, ctx, views, **values)

    def wanted(self) -> list[Tensor]:
        """The published values that later blocks read."""
        return [self.values[branch].published[name] for branch, name in self.io.wanted]
