"""Prompts: what both sides read. Random tokens unless a text is given: every row as long as the others, nothing padded."""

from __future__ import annotations

import dataclasses as dc

import torch
from torch import Tensor

from dovetail.account import longest_length
from dovetail.construction import generator
from dovetail.core.errors import SpecError
from dovetail.core.part import walk
from dovetail.core.scope import Scope
from dovetail.model import Model
from dovetail.parts.mixer.attention import Attention
from dovetail.port.table import look

ROWS, LENGTH, LONGEST = 2, 37, 512  # a length that is no other size, and how far a window may stretch it
BEYOND = 5  # tokens past a window's edge


@dc.dataclass(frozen=True)
class Prompt:
    """inputs (batch, n) token ids, or images; source (batch, m) for an encoder–decoder; types (batch, n) of tokens."""

    inputs: Tensor
    n: int  # tokens a row
    source: Tensor | None = None
    types: Tensor | None = None

    @property
    def batch(self) -> int:
        """Rows."""
        return self.inputs.shape[0]


def windows(spec: Model) -> list[int]:
    """The sizes of the windows that attention looks through."""
    reach = [part.mask.reach() for _, part, _ in walk(spec) if isinstance(part, Attention)]
    return sorted({size for size in reach if size is not None})


def drawn(spec: Model, *, rows: int = ROWS, length: int | None = None, seed: int = 0, avoid: int | None = None) -> Prompt:
    """Random inputs for a spec, long enough to pass the edge of its windows as far as that is short; `avoid` is a token that a
    side takes for padding."""
    edges = [size + BEYOND for size in windows(spec) if size + BEYOND <= LONGEST]
    longest, offset = longest_length(spec), look(spec, "position.offset")
    longest = longest - offset if longest is not None and isinstance(offset, int) else longest  # rows before the first one
    n = length or min(max([LENGTH, *edges]), longest or LONGEST)
    scope = spec.axes(Scope())
    inputs = spec.embed.example(scope, rows, n, generator(seed, "prompt"))
    source = None
    if spec.encoder is not None:
        source = spec.encoder.embed.example(spec.encoder.axes(Scope()), rows, n + 2, generator(seed, "source"))
    n = n if inputs.dim() == 2 else longest or n
    return Prompt(_without(inputs, avoid), n, None if source is None else _without(source, avoid))


def of_ids(rows: list[list[int]], vocab: int | None) -> Prompt:
    """Token ids as they were given; all rows must be of one length."""
    if not rows or not rows[0] or len({len(row) for row in rows}) != 1:
        raise SpecError("prompt", "all prompts must have the same number of tokens, and at least one")
    worst = max(max(row) for row in rows)
    if vocab is not None and worst >= vocab:
        raise SpecError("prompt", f"token {worst} is beyond the vocabulary of {vocab}")
    return Prompt(torch.tensor(rows), len(rows[0]))


def _without(inputs: Tensor, avoid: int | None) -> Tensor:
    if avoid is None or inputs.is_floating_point():
        return inputs
    return torch.where(inputs == avoid, torch.full_like(inputs, avoid + 1 if avoid == 0 else avoid - 1), inputs)
