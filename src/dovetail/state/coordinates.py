"""Coordinates of the tokens of a pool: those that the caller gives, and for the tokens behind them order + delta.

    coordinates (…, n, c)    given, or order + delta on every coordinate      delta = 1 + the largest coordinate so far − length

Order says which token comes before which; a coordinate is what a position encodes. An image of 4 × 6 patches at (0, 0, 0) to
(0, 3, 5) has 24 orders and 6 values of its largest coordinate, so text behind it continues 18 below its order: delta is −18.
Without given coordinates delta is 0, and a coordinate is the order.                    Wang et al. 2024 (Qwen2-VL's rope delta)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.base.errors import StateError
from dovetail.nn.layout import TokenLayout

Given = Sequence[Tensor | None]  # per row: the coordinates (n, c) of its new tokens, or None: order + delta


class Coordinates:
    """The delta of every row, at every length that it has had."""

    def __init__(self, rows: int, count: int) -> None:
        """`count`: coordinates per token."""
        self.count = count
        self.deltas: list[list[tuple[int, int]]] = [[] for _ in range(rows)]  # per row: (length, delta from this length on)

    def delta(self, row: int) -> int:
        """What is added to the order of the next token of a row."""
        return self.deltas[row][-1][1] if self.deltas[row] else 0

    def check(self, new: Sequence[int], given: Given) -> None:
        """Raise StateError unless `given` holds integer coordinates (new[i], count), or None, for each row."""
        if len(given) != len(new):
            raise StateError(f"positions of {len(given)} rows for a step of {len(new)}; give each row a tensor or None")
        for i, (own, n) in enumerate(zip(given, new, strict=True)):
            if own is not None and (own.shape != (n, self.count) or own.is_floating_point()):
                raise StateError(
                    f"positions of row {i} of the step are {own.dtype} {tuple(own.shape)};"
                    f" give integers ({n}, {self.count}): tokens, coordinates"
                )

    def of(self, rows: Sequence[int], new: Sequence[int], layout: TokenLayout, given: Given | None) -> Tensor:
        """The coordinates (…, n, count) of the tokens of a step."""
        order = layout.order
        delta = torch.tensor([self.delta(row) for row in rows], dtype=torch.long, device=order.device)
        following = order + (delta[:, None] if layout.row is None else delta[layout.row])
        coords = torch.where(layout.real, following, 0)[..., None].expand(*order.shape, self.count)
        if given is None:
            return coords
        coords, begin = coords.clone(), 0
        for i, (own, n) in enumerate(zip(given, new, strict=True)):
            if own is not None:
                piece = coords[i, :n] if layout.row is None else coords[begin : begin + n]
                piece.copy_(own)
            begin += n
        return coords

    def append(self, rows: Sequence[int], lengths: Sequence[int], given: Given) -> None:
        """Record the deltas behind the tokens of a step. Reads the values: on a GPU this waits for them."""
        for row, length, own in zip(rows, lengths, given, strict=True):
            if own is None or not len(own):
                continue
            largest = max(length + self.delta(row) - 1, -1)
            for i, value in enumerate(own.amax(-1).tolist(), 1):
                largest = max(largest, value)
                if largest + 1 - (length + i) != self.delta(row):
                    self.deltas[row].append((length + i, largest + 1 - (length + i)))

    def rewind(self, row: int, n: int) -> None:
        """Forget the tokens of a row after the first n."""
        self.deltas[row] = [(length, delta) for length, delta in self.deltas[row] if length <= n]

    def fork(self, a: int, b: int) -> None:
        """Let row b continue from where row a is."""
        self.deltas[b] = list(self.deltas[a])
