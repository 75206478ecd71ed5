"""The tensors that a spec declares, each with the parts whose fields decide how it is used.

A tensor belongs to a **branch**: the child of a block or a model that holds it (`layers.0.mixer`). The parts from the branch
down to the one that declares the tensor are its owners. A changed field of an owner reinterprets the tensor unless the owner
declares, by `proof.acts_on`, that the field acts on other weights: a position acts on queries and keys, not on values.
"""

from __future__ import annotations

from typing import NamedTuple

from dovetail.account import and_above
from dovetail.model.model import Model
from dovetail.nn.block import Block
from dovetail.spec.part import Part, join, weights_of
from dovetail.spec.scope import Scope
from dovetail.spec.weight import KV_HEADS, PACKED_AXIS, Weight
from dovetail.weights.surgery.change import places, sizes

RESIZABLE = frozenset({"vocab", "position", "types"})  # axes with independent entries: some may be removed, others added


class Owner(NamedTuple):
    """A part that holds a tensor: its path in the spec, its path in the module tree, the part."""

    place: str
    path: str
    part: Part


class Branch(NamedTuple):
    """The place of a module: the block or model that has its branch, the branch, whether a wire joins it to the residual
    stream, and the parts from the branch down to the module."""

    home: str
    place: str
    wired: bool
    owners: tuple[Owner, ...] = ()


class Content(NamedTuple):
    """The numbers of a tensor under the name it has when unpacked and untied: where they are stored, as which piece, over which
    axes."""

    stored: str
    piece: int | None
    axes: dict[str, int]
    heads: int | None
    resizable: frozenset[str]  # axes whose size may change
    weight: Weight


class Tensor(NamedTuple):
    """A declared tensor and its place."""

    path: str
    weight: Weight
    scope: Scope
    branch: Branch
    resizable: frozenset[str]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.weight.shape(self.scope)

    @property
    def owner(self) -> str:
        """The path at which its numbers are stored."""
        return self.weight.same_as or self.path

    def contents(self) -> list[tuple[str, Content]]:
        """(path, content): the tensor itself, or the pieces of a packed one."""
        axes, heads = sizes(self.weight, self.scope), self.scope.sizes.get("heads")
        names = self.weight.packs
        if not names:
            return [(self.path, Content(self.owner, None, axes, heads, self.resizable, self.weight))]
        above = self.path.removesuffix(self.weight.name)
        rest = {axis: size for axis, size in axes.items() if axis not in (KV_HEADS, PACKED_AXIS)}
        groups, slots = axes[KV_HEADS], axes[PACKED_AXIS]
        counts = [{"heads": groups * (slots - 2)}, {KV_HEADS: groups}, {KV_HEADS: groups}]
        return [
            (above + name, Content(self.owner, i, {**count, **rest}, heads, self.resizable, self.weight))
            for i, (name, count) in enumerate(zip(names, counts, strict=True))
        ]

    def reinterpreted_by(self, path: str) -> bool:
        """Whether a change of the field at this path of the spec reinterprets this tensor."""
        branch = self.branch
        if branch.wired and (_within(path, join(branch.home, "wire")) or _within(join(branch.home, "wire"), path)):
            return True
        if not (_within(path, branch.place) or _within(branch.place, path)):
            return False
        return all(self._acted_on(owner, path) for owner in branch.owners)

    def _acted_on(self, owner: Owner, path: str) -> bool:
        """Whether the owner declares that the changed field acts on this tensor; a change elsewhere is not the owner's."""
        if path == owner.place or not _within(path, owner.place):
            return True
        field = path.removeprefix(f"{owner.place}.").partition(".")[0]
        names = owner.part.proof.acts_on.get(field)
        inside = self.path.removeprefix(f"{owner.path}.")
        above = inside.removesuffix(self.weight.name)
        own = {(above + name).partition(".")[0] for name in self.weight.packs or (self.weight.name,)}
        return names is None or bool(own & {field, *names})


def tensors(spec: Model) -> dict[str, Tensor]:
    """Every learned tensor and every tie, by path."""
    by_path: dict[str, Tensor] = {}
    branches: dict[str, Branch] = {}  # by path in the module tree
    images: set[str] = set()  # models whose tokens are no text: the n-th position of a larger image is another place
    for path, part, scope, place in places(spec):
        if isinstance(part, Model) and not part.embed.causal():
            images.add(place)
        branch = branches[path] = _branch(path, part, place, branches)
        resizable = RESIZABLE - {"position"} if branch.home in images else RESIZABLE
        for weight in weights_of(part, scope):
            if weight.role != "const":
                by_path[join(path, weight.name)] = Tensor(join(path, weight.name), weight, scope, branch, resizable)
    return by_path


def _branch(path: str, part: Part, place: str, branches: dict[str, Branch]) -> Branch:
    """A block or a model begins new branches; a module below one of their children belongs to that child's branch."""
    if isinstance(part, (Block, Model)):
        return Branch(place, "", isinstance(part, Block))
    parent = next(branches[above] for above in and_above(path) if above in branches)
    return Branch(parent.home, parent.place or place, parent.wired, (*parent.owners, Owner(place, path, part)))


def _within(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}.")
