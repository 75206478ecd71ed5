"""Site: a tap in one call of the model. It finds the slice of a tensor that a target means, by position and not by index:
a token at position 13 is index 13 of a full forward pass and index 0 of the decode step that computes it."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator

import torch
from torch import Tensor

from dovetail.base.errors import InputError, SpecError
from dovetail.look.address import TOKENS, Pick, Target
from dovetail.nn.layout import TokenLayout

NOTHING = "the run has no such token or step, so nothing was read or replaced; name one that it has"


@dc.dataclass(slots=True)
class Site:
    """Where a value comes from."""

    target: Target
    layout: TokenLayout
    step: int  # of generation; 0 is the prompt
    ends: Tensor  # (rows,) tokens of each prompt
    chosen: Tensor | None = None  # (…, n, k) the experts of each token, where the tap has one value per choice
    rows: Tensor | None = None  # the numbers of the rows of this call that the tensor has; None: all

    def within(self, x: Tensor) -> Site:
        """The same place of the rows that the target names, of all rows x: `rows` says which. One patch per row of a large
        batch then costs as much as one patch of all."""
        picks = dict(self.target.picks)
        pick = picks.pop("row", None)
        if pick is None:
            return self
        rows, count = self._rows(x, pick).nonzero()[:, 0], x.shape[0]
        target, layout, ends, chosen = self.target._replace(picks=picks), self.layout, self.ends, self.chosen
        if layout.order.dim() == 2 and len(layout.order) == count:
            there = rows.to(layout.order.device)
            layout = TokenLayout(None, layout.order[there], layout.seg[there])
        if len(ends) == count:
            ends = ends[rows.to(ends.device)]
        if chosen is not None:
            chosen = chosen.reshape(count, -1, chosen.shape[-1])[rows]
        return Site(target, layout, self.step, ends, chosen, rows)

    def _rows(self, x: Tensor, pick: Pick) -> Tensor:
        """(rows,) which rows of x a pick means."""
        if self.layout.order.dim() != 2:
            raise InputError(f"{self.target.key}: a slice of rows needs a batch (rows, n), not a flat one; name tokens by pos")
        return among(self.target.key, "row", torch.arange(len(x), device=x.device), pick, len(x))

    def dim(self, x: Tensor, axis: str) -> int:
        """The dimension of x that an axis is."""
        return x.dim() - len(self.target.axes) + self.target.axes.index(axis)

    def at_step(self) -> bool:
        """Whether the target means this step of generation."""
        pick = self.target.picks.get("step")
        if pick is None:
            return True
        if isinstance(pick, slice):
            return (pick.start or 0) <= self.step and (pick.stop is None or self.step < pick.stop)
        return self.step in (pick if isinstance(pick, tuple) else (pick,))

    def positions(self, x: Tensor, axis: str) -> Tensor:
        """(rows, size) the positions of the entries along an axis of tokens, or (rows, 1) of a state: −1 for padding."""
        order = self.layout.order
        if order.dim() != 2:
            raise InputError(f"{self.target.key}: a slice of tokens needs a batch (rows, n), not a flat one")
        order = torch.where(self.layout.real, order, -1)
        if axis not in self.target.axes:  # a state: after the last token
            return order.amax(-1, keepdim=True)
        size = x.shape[self.dim(x, axis)]
        if axis == "pos" and size < order.shape[-1]:  # a step computes the logits of its last tokens only
            return order[:, order.shape[-1] - size :]
        if axis == "key" or size != order.shape[-1]:  # all tokens so far
            return torch.arange(size, device=order.device)[None].expand(len(order), -1)
        return order

    def _masks(self, x: Tensor) -> Iterator[tuple[int, Tensor, bool]]:
        """(dimension, (rows or 1, size) whether an entry is meant, whether it differs by row) of each axis."""
        for axis, pick in self.target.picks.items():
            if axis == "step" or pick is None:
                continue
            if axis == "row":
                yield 0, self._rows(x, pick)[None], False
            elif axis in TOKENS:
                positions = self.positions(x, axis)
                ends = self.ends.to(positions.device)[:, None]
                yield (self.dim(x, axis) if axis in self.target.axes else -1), _meant(positions, pick, ends), True
            elif axis == "expert" and axis not in self.target.axes:
                continue
            else:
                size = x.shape[self.dim(x, axis)]
                yield (
                    self.dim(x, axis),
                    among(self.target.key, axis, torch.arange(size, device=x.device), pick, size)[None],
                    False,
                )

    def queries(self) -> Tensor:
        """(rows, n) which tokens of this call are queries that the target means."""
        order, pick = torch.where(self.layout.real, self.layout.order, -1), self.target.picks["query"]
        return _meant(order, pick, self.ends.to(order.device)[:, None])

    def mask(self, x: Tensor) -> Tensor | None:
        """Which values of x the target means, broadcastable to x; None for all."""
        mask: Tensor | None = None
        for dim, meant, by_row in self._masks(x):
            shape = [1] * x.dim()
            if by_row:
                shape[0] = meant.shape[0]
            if dim >= 0:
                shape[dim] = meant.shape[-1]
            each = meant.reshape(shape)
            mask = each if mask is None else mask & each
        expert = self.target.picks.get("expert")
        if expert is not None and "expert" not in self.target.axes:
            mask = self._of_expert(x, expert) if mask is None else mask & self._of_expert(x, expert)
        return mask

    def _of_expert(self, x: Tensor, pick: Pick) -> Tensor:
        """Which choices name the expert."""
        assert self.chosen is not None, "the tracer listens to the choices"
        chosen = self.chosen.reshape(*x.shape[: self.dim(x, "choice")], -1)
        meant = among(self.target.key, "expert", chosen, pick, self.target.experts)
        return meant.reshape(*meant.shape, *[1] * (x.dim() - meant.dim()))

    def several(self) -> list[tuple[str, int]]:
        """Each number of those that a pick lists along an axis of tokens or steps: a run may have some of them only."""
        listed = ((axis, pick) for axis, pick in self.target.picks.items() if axis in (*TOKENS, "step"))
        return [(axis, number) for axis, pick in listed if isinstance(pick, tuple) for number in pick]

    def has(self, x: Tensor, axis: str, number: int) -> bool:
        """Whether this call has a token, or is the step, of that number."""
        if axis == "step":
            return self.step == number
        positions = self.positions(x, axis)
        return bool(_meant(positions, number, self.ends.to(positions.device)[:, None]).any())

    def missing(self, x: Tensor) -> str:
        """The slice that a run of one call has no value for; empty where it has all. Of experts some are chosen by no token."""
        where = {axis: pick for axis, pick in self.target.picks.items() if axis != "expert" or axis in self.target.axes}
        mask = dc.replace(self, target=self.target._replace(picks=where)).mask(x)
        if not self.at_step() or not (mask is None or bool(mask.any())):
            return self.target.key
        return next((f"{self.target.key}: {axis}={n}" for axis, n in self.several() if not self.has(x, axis, n)), "")

    def take(self, x: Tensor) -> Tensor | None:
        """The slice of x; None if this call computes none of it. A single index drops its axis, but for tokens and rows, which
        the trace joins over calls."""
        if "row" in self.target.picks:  # first: each row has its own tokens
            of_rows = self.within(x)
            return of_rows.take(x[of_rows.rows])
        expert = self.target.picks.get("expert")
        if expert is not None and "expert" not in self.target.axes:
            x = torch.where(self._of_expert(x, expert), x, 0)
        dropped: list[int] = []
        for dim, meant, by_row in self._masks(x):
            if by_row and dim < 0:
                if not bool(meant.any()):
                    return None
                continue
            counts = meant.sum(-1)
            if not bool(counts.any()):
                return None
            if not by_row:
                x = x.index_select(dim, meant[0].nonzero()[:, 0])
            elif bool((counts == counts[0]).all()):
                index = meant.nonzero()[:, 1].reshape(len(meant), -1)
                shape = [1] * x.dim()
                shape[0], shape[dim] = index.shape
                x = x.take_along_dim(index.reshape(shape), dim)
            else:
                raise InputError(
                    f"{self.target.key}: rows have {counts.tolist()} such tokens (trace them one by one, or name row=)"
                )
            axis = self.target.axes[dim - x.dim()] if dim else "row"
            if axis not in ("row", *TOKENS) and isinstance(self.target.picks.get(axis), int):
                dropped.append(dim)
        for dim in sorted(dropped, reverse=True):
            x = x.squeeze(dim)
        return x


def tokens_meant(target: Target, n: int) -> Tensor:
    """(n,) which tokens of a row of n a target means; all, where its only axis of tokens is that of keys."""
    meant = torch.ones(n, dtype=torch.bool)
    for axis in ("pos", "query"):
        if axis in target.axes and (pick := target.picks.get(axis)) is not None:
            meant &= _meant(torch.arange(n), pick, torch.tensor(n))
    return meant


def among(key: str, axis: str, index: Tensor, pick: Pick, size: int) -> Tensor:
    """Whether each index is meant; SpecError for one past the end: it would silently mean nothing."""
    numbers = () if isinstance(pick, slice) else pick if isinstance(pick, tuple) else (pick,)
    for number in numbers:
        if number is not None and not -size <= number < size:
            raise SpecError(key, f"there is no {axis} {number}", f"{axis}s are 0 to {size - 1}")
    if isinstance(pick, slice) and not range(size)[pick]:
        raise SpecError(key, f"there is no {axis} in this range", f"{axis}s are 0 to {size - 1}")
    return _meant(index, pick, torch.tensor(size, device=index.device))


def _meant(index: Tensor, pick: Pick, size: Tensor) -> Tensor:
    """Whether each index is meant, where negative numbers count back from `size`; index −1 is padding."""
    if isinstance(pick, slice):
        begin, end = (
            None if bound is None else torch.where(torch.tensor(bound) < 0, size + bound, bound)
            for bound in (pick.start, pick.stop)
        )
        meant = index >= (0 if begin is None else begin)
        return meant if end is None else meant & (index < end)
    meant = torch.zeros_like(index, dtype=torch.bool)
    for number in pick if isinstance(pick, tuple) else (pick,):
        assert number is not None
        meant = meant | (index == (size + number if number < 0 else number))
    return meant & (index >= 0)
