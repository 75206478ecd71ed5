"""Seeded bugs of positions from outside: coordinates in decode, the delta of a row, mrope, prefixes and images among text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.parts.embed import TokensAndPatchesModule
from dovetail.parts.mask.distance import Prefix
from dovetail.parts.position.rope import Rope
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.proof.laws.suite import OWN_NUMBER
from dovetail.spec.scope import Scope
from dovetail.state import pool
from dovetail.state.coordinates import Coordinates, Given

_of, _append, _make_frame, _constant = Coordinates.of, Coordinates.append, pool.make_frame, Rope.constant
_embed = TokensAndPatchesModule.forward


def order_after_the_prompt(
    self: Coordinates, rows: Sequence[int], new: Sequence[int], layout: TokenLayout, given: Given | None
) -> Tensor:
    if given is None:
        return layout.order[..., None].expand(*layout.order.shape, self.count)
    return _of(self, rows, new, layout, given)


def keys_by_order(*arguments: Any) -> Any:
    return _make_frame(*arguments[:6])


def no_delta(self: Coordinates, rows: Sequence[int], lengths: Sequence[int], given: Given) -> None:
    pass


def delta_of_the_first_row(self: Coordinates, rows: Sequence[int], lengths: Sequence[int], given: Given) -> None:
    _append(self, rows, lengths, given)
    for row in rows[1:]:
        self.deltas[row] = list(self.deltas[rows[0]])


def delta_stays(self: Coordinates, row: int, n: int) -> None:
    pass


def no_delta_after_a_fork(self: Coordinates, a: int, b: int) -> None:
    self.deltas[b] = []


def height_and_width_swapped(self: Rope, name: str, scope: Scope) -> Tensor:
    value = _constant(self, name, scope)
    return torch.tensor([0, 2, 1])[value] if name == "coordinate" else value


def nothing_ahead(self: Prefix) -> int:
    return 0


def patches_counted(self: TokensAndPatchesModule, inputs: Tensor, ctx: Ctx) -> tuple[Tensor, TokenLayout]:
    image = inputs >= self.vocab
    count = 1 if ctx.patches is None else len(ctx.patches)
    numbers = (image.flatten().cumsum(0) - 1).clamp_min(0).view_as(inputs) % count
    return _embed(self, torch.where(image, self.vocab + numbers, inputs), ctx)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    mrope: dict[str, Any] = {"kind": "rope", "coords": 3, "sections": [1, 2, 3]}
    vision, on_read = spec(position=mrope), spec(position={**mrope, "when": "read"})
    prefix = spec(mask={"any": ["causal", {"kind": "prefix", "length": 4}]})
    images = prefix.set("embed", {"kind": "tokens_and_patches", "patch": 3})
    table: list[tuple[str, str, Any, str, Any, Model]] = [
        ("coordinates are the order behind the prompt", "positions", Coordinates, "of", order_after_the_prompt, vision),
        ("cached keys are rotated by their order", "positions", pool, "make_frame", keys_by_order, on_read),
        ("the delta of a row is forgotten", "positions", Coordinates, "append", no_delta, vision),
        ("every row has the delta of the first", "positions", Coordinates, "append", delta_of_the_first_row, vision),
        ("a roll-back leaves the delta", "positions", Coordinates, "rewind", delta_stays, vision),
        ("a fork has no delta", "positions", Coordinates, "fork", no_delta_after_a_fork, vision),
        ("mrope swaps height and width", OWN_NUMBER, Rope, "constant", height_and_width_swapped, vision),
        ("a prefix may arrive in parts", "chunked", Prefix, "ahead", nothing_ahead, prefix),
        ("patches are counted over the batch", "padded", TokensAndPatchesModule, "forward", patches_counted, images),
    ]
    return [Mutant(name, law, instead(owner, attribute, new), model) for name, law, owner, attribute, new, model in table]
