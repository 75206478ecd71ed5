"""Trace: the activations of a run by address, and a table of them.

    seen = Trace("layers.*.in[pos=-1]", "head.logits")
    model.generate(ids, 8, trace=seen)                 # filled by the run
    seen["layers.3.in"]                                # (batch, 1, embed)

The axis of tokens joins the steps of a generation; a pattern has a row per query and, where later steps have more keys, zeros.
"""

from __future__ import annotations

from difflib import get_close_matches

import torch
from torch import Tensor

ROWS = 40  # of the table


class Trace(dict[str, Tensor]):
    """Activations by address: a dict with the patterns that it records."""

    def __init__(self, *patterns: str) -> None:
        super().__init__()
        self.patterns = patterns

    def __missing__(self, name: str) -> Tensor:
        """The slice that was recorded of an address, where there is one."""
        slices = [key for key in self if key.partition("[")[0] == name]
        if len(slices) == 1:
            return self[slices[0]]
        near = slices or get_close_matches(name, list(self), 3, 0.3)
        raise KeyError(f"{name!r} was not recorded; recorded: {', '.join(near) or 'nothing'}")

    def __repr__(self) -> str:
        """A table: address, shape, mean, standard deviation, largest absolute value."""
        if not self:
            return f"Trace({', '.join(map(repr, self.patterns))}): nothing recorded"
        lines: list[tuple[str, ...]] = [("address", "shape", "dtype", "mean", "std", "largest")]
        for address, x in list(self.items())[:ROWS]:
            values = x.detach().to(torch.float32)
            numbers = (values.mean(), values.std(correction=0), values.abs().amax()) if x.numel() else ()
            shape = " × ".join(map(str, x.shape))
            lines.append((address, shape, str(x.dtype).removeprefix("torch."), *(f"{float(n):.3g}" for n in numbers)))
        widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(6)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines]
        more = len(self) - ROWS
        return "\n".join([*table, f"… and {more} more"] if more > 0 else table)


def joined(pieces: list[Tensor], axes: tuple[str, ...]) -> Tensor:
    """The pieces of several calls as one tensor, joined along the axis of tokens; without one, the last."""
    if len(pieces) == 1:
        return pieces[0]
    back = {axis: len(axes) - i for i, axis in enumerate(axes)}
    if "query" in back and "key" in back:
        longest = max(x.shape[-back["key"]] for x in pieces)
        pieces = [_padded(x, x.dim() - back["key"], longest) for x in pieces]
    axis = next((axis for axis in ("pos", "query") if axis in back), None)
    if axis is None:
        return pieces[-1]
    return torch.cat(pieces, -back[axis])


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    if x.shape[dim] == size:
        return x
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)
