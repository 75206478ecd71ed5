"""Prompts: the inputs that both sides read. Random tokens unless ids are given; all rows have one length, without padding."""

from __future__ import annotations

import dataclasses as dc

import torch
from torch import Tensor

from dovetail.account import longest_length
from dovetail.construction import generator
from dovetail.core.errors import SpecError
from dovetail.core.group import Mask
from dovetail.core.part import walk_spec
from dovetail.core.scope import Scope
from dovetail.hf.field import value_at
from dovetail.model import Model

ROWS, LENGTH, LONGEST = 2, 37, 512  # 37 is no other size of a model; windows extend it up to 512
BEYOND = 5  # tokens past the edge of a window


@dc.dataclass(frozen=True)
class Prompt:
    """inputs (batch, n) token ids, or images; source (batch, m) for an encoder–decoder; types (batch, n) of tokens."""

    inputs: Tensor
    n: int  # tokens per row
    source: Tensor | None = None
    types: Tensor | None = None

    @property
    def batch(self) -> int:
        """The number of rows."""
        return self.inputs.shape[0]

    def ids(self) -> list[list[int]]:
        """The token ids of each row."""
        return self.inputs.tolist()


def windows(spec: Model) -> list[int]:
    """The sizes of attention windows, in tokens."""
    reach = [part.reach() for _, part in walk_spec(spec) if isinstance(part, Mask)]
    return sorted({size for size in reach if size is not None})


def table_length(spec: Model) -> int | None:
    """The most tokens that a model takes; None where there is no end."""
    longest, offset = longest_length(spec), value_at(spec, "position.offset")
    return longest - offset if longest is not None and isinstance(offset, int) else longest  # unused rows of the table


def random_prompt(
    spec: Model, *, rows: int = ROWS, length: int | None = None, seed: int = 0, avoid: int | None = None
) -> Prompt:
    """Random inputs for a spec, long enough to pass the edges of its shorter windows; `avoid` is the padding token of a
    side."""
    edges = [size + BEYOND for size in windows(spec) if size + BEYOND <= LONGEST]
    longest = table_length(spec)
    n = length or min(max([LENGTH, *edges]), longest or LONGEST)
    inputs = spec.embed.example(spec.axes(Scope()), rows, n, generator(seed, "prompt"))
    source = None
    if spec.encoder is not None:
        source = spec.encoder.embed.example(spec.encoder.axes(Scope()), rows, n + 2, generator(seed, "source"))
    n = n if inputs.dim() == 2 else longest or n
    return Prompt(_without(inputs, avoid), n, None if source is None else _without(source, avoid))


def prompt_of_ids(rows: list[list[int]], vocab: int | None) -> Prompt:
    """A prompt of given token ids; all rows must have one length."""
    if not rows or not rows[0] or len({len(row) for row in rows}) != 1:
        raise SpecError("prompt", "all prompts must have the same number of tokens, and at least one")
    largest = max(max(row) for row in rows)
    if vocab is not None and largest >= vocab:
        raise SpecError("prompt", f"token {largest} is beyond the vocabulary of {vocab}")
    return Prompt(torch.tensor(rows), len(rows[0]))


def _without(inputs: Tensor, avoid: int | None) -> Tensor:
    if avoid is None or inputs.is_floating_point():
        return inputs
    return torch.where(inputs == avoid, torch.full_like(inputs, avoid + 1 if avoid == 0 else avoid - 1), inputs)
