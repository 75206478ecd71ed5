"""A sequence split over ranks: nothing but another view. Each rank holds a piece of every row, and attention's view gives it
the keys and values of all pieces, in order, with where they stand.

    rank r:  x_r (…, n/ranks, embed) -> q_r, k_r, v_r        view.extend(at_r, k_r, v_r) -> K, V (…, n, kv_heads, head), at

    ctx = Ctx(layout=layout.cut(ranks, rank), views=split_views(spec, group))
    logits_r = model(piece(tokens, group), ctx)

A recurrence's view hands its memory on from rank to rank instead: in order, so right rather than fast.

Masks look at order and document alone, so a piece needs to know nothing of its place in the row. Cross attention looks at a
memory that is whole on every rank: encode each piece of the source with `split_views(spec.encoder, group)`, then call
`whole_memory`; or encode the whole source on every rank. Each rank finds a share of every weight's gradient: sum them. A loss
that is a mean over labels must be weighted by each rank's share of the labels.        Li et al. 2021 (sequence parallel)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dovetail.core.layout import TokenLayout
from dovetail.core.ctx import Views
from dovetail.core.errors import SpecError, StateError
from dovetail.core.group import Embed, Head, Mixer, Scaling
from dovetail.core.part import Part, walk, walk_spec
from dovetail.dist.collective import gather, hand_on, joined, receive


class GatherView:
    """Attention's view of a row whose pieces lie on several ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def extend(self, layout: TokenLayout, *new: Tensor) -> tuple[tuple[Tensor, ...], TokenLayout]:
        """Entries of this piece (…, n, *axes); those of all pieces (…, n·ranks, *axes), and where they stand."""
        key_layout = layout.once(("whole row", self.group), lambda: whole_layout(layout, self.group))
        return tuple(gather(values, layout.order.dim() - 1, self.group) for values in new), key_layout

    def extend_blocks(self, layout: TokenLayout, *new: Tensor) -> tuple[tuple[Tensor, ...], TokenLayout]:
        """The same for blocks that end in this piece, as many on every rank (document −1 where there is none)."""
        return self.extend(layout, *new)


class CarryView:
    """A recurrence's view of a row whose pieces lie on several ranks: what the piece before remembers, and on to the next."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def read(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """x as it is, and what the rows remember before this piece; None before the first."""
        return (x, None) if dist.get_rank(self.group) == 0 else receive(x, self.group)

    def write(self, y: Tensor, *new: Tensor) -> Tensor:
        """y as it is; what the rows remember goes to the next piece."""
        last = dist.get_rank(self.group) == dist.get_world_size(self.group) - 1
        return y if last else hand_on(y, new, self.group)


def split_views(spec: Part, group: dist.ProcessGroup) -> Views:
    """A view for every mixer of a model that looks at its own row; one mapping a layer, for Ctx(views=…)."""
    inner = tuple(f"{path}." for path, part in walk_spec(spec) if path and part.group == spec.group)
    for path, part in walk_spec(spec):
        if not path.startswith(inner):  # an encoder may still run whole
            refuse(path, part)
    views: list[dict[str, Any]] = []
    gathers, carries = GatherView(group), CarryView(group)
    for path, part, _ in walk(spec):
        stack, _, rest = path.partition(".")
        if stack != "layers":
            continue  # an encoder's layers are split by views of their own
        index, _, branch = rest.partition(".")
        views += [{} for _ in range(int(index) + 1 - len(views))]
        if isinstance(part, Mixer) and not part.reads_encoder():
            views[int(index)][branch] = carries if part.recurrent else gathers
    return views


def refuse(path: str, part: Part) -> None:
    """An error for a part that must see a whole row at once."""
    if isinstance(part, Head) and part.pools():
        problem, remedy = "gives one answer a row, whose tokens lie on several ranks", "split rows over ranks instead: data"
    elif isinstance(part, Embed) and not part.causal():
        problem, remedy = "makes another number of tokens than it is given", "split rows over ranks instead: data"
    elif isinstance(part, Scaling) and part.varies:
        problem, remedy = "turns by the length of the whole row, which no rank sees", "use a scaling with fixed angles"
    else:
        return
    raise SpecError(path, f"a sequence cannot be split: {part.kind} {problem}", remedy)


def piece(x: Tensor, group: dist.ProcessGroup, dim: int = -1) -> Tensor:
    """This rank's piece of a whole row; the rows must be cut evenly (pad them with document −1)."""
    ranks = dist.get_world_size(group)
    if x.shape[dim] % ranks:
        raise StateError(f"{x.shape[dim]} tokens cannot be cut evenly over {ranks} ranks (pad the rows)")
    return x.chunk(ranks, dim)[dist.get_rank(group)]


def whole_layout(layout: TokenLayout, group: dist.ProcessGroup) -> TokenLayout:
    """Where the tokens of all pieces stand."""
    lengths = joined(torch.tensor([layout.n], device=layout.order.device), 0, group).tolist()
    if len(set(lengths)) > 1:
        raise StateError(f"the pieces of a row are {lengths} tokens long on the ranks, and must be equal (pad the rows)")
    row = None if layout.row is None else joined(layout.row, 0, group)
    return TokenLayout(joined(layout.coords, -2, group), joined(layout.order, -1, group), joined(layout.seg, -1, group), row)


def whole_encoder_output(memory: Tensor, layout: TokenLayout, group: dist.ProcessGroup) -> tuple[Tensor, TokenLayout]:
    """An encoder's output (…, m/ranks, memory) of each piece of the source as the whole memory (…, m, memory)."""
    return gather(memory, -2, group), whole_layout(layout, group)
