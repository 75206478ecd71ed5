"""Ctx: all that a forward carries beside the stream. Training, serving and looking differ only here.

Taps: `ctx.tap(module, "q", x)` is a plain return when nobody listens. A listener sees the value at its address
(`layers.3.mixer.q`) and may answer with another in its place.
"""

from __future__ import annotations

import dataclasses as dc
import zlib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import pi
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dovetail.core.layout import TokenLayout

if TYPE_CHECKING:
    from dovetail.core.module import Module

Views = Sequence[Mapping[str, Any]]  # one mapping a layer: branch name -> view of its memory


class Ranks(Protocol):
    """Which logical axes are cut over ranks, and how to sum over them."""

    def sharded(self, axes: Sequence[str]) -> bool:
        """Whether any of the axes is cut."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, with its gradient."""
        ...


class Listener:
    """Address patterns (`*.mixer.pattern`) to functions (address, value) -> None or a value to go on with."""

    def __init__(self, table: Mapping[str, Callable[[str, Tensor], Tensor | None]]) -> None:
        self.table = table

    def wants(self, address: str) -> bool:
        """Whether anyone listens at this address."""
        return any(fnmatchcase(address, pattern) for pattern in self.table)

    def hear(self, address: str, x: Tensor) -> Tensor:
        """Show x to each listener in turn; the last answer goes on."""
        for pattern, listen in self.table.items():
            if fnmatchcase(address, pattern):
                answer = listen(address, x)
                x = x if answer is None else answer
        return x


@dc.dataclass(slots=True)
class Ctx:
    """What a forward carries."""

    layout: TokenLayout
    views: Views | None = None
    encoder_output: Tensor | None = None  # (…, m, encoder): hidden states of the encoder, for cross attention
    encoder_layout: TokenLayout | None = None
    types: Tensor | None = None  # (…, n) token types, where the embedding has them
    listen: Listener | None = None
    losses: dict[str, Tensor] | None = None  # extra losses, by the path that added them
    seed: int | None = None  # set in training: dropout and noise draw from (seed, path)
    ranks: Ranks | None = None

    @property
    def training(self) -> bool:
        """Whether dropout is drawn."""
        return self.seed is not None

    def wants(self, module: Module, name: str) -> bool:
        """Whether anyone listens to this tap."""
        return self.listen is not None and self.listen.wants(f"{module.path}.{name}".lstrip("."))

    def tap(self, module: Module, name: str, x: Tensor) -> Tensor:
        """Show x at its address; a plain return when nobody listens."""
        if self.listen is None:
            return x
        return self.listen.hear(f"{module.path}.{name}".lstrip("."), x)

    def sharded(self, axes: Sequence[str]) -> bool:
        """Whether a logical axis is cut over ranks."""
        return self.ranks is not None and self.ranks.sharded(axes)

    def all_reduce(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """x summed over the ranks that share these axes; x itself where they are whole."""
        if self.ranks is None or not self.ranks.sharded(axes):
            return x
        return self.ranks.all_reduce(x)

    def dropout(self, x: Tensor, p: float, module: Module, name: str = "") -> Tensor:
        """x with a share p of its values dropped and the rest scaled up; in training only."""
        if self.seed is None or p == 0.0:
            return x
        return drop(x, p, self.seed, f"{module.path}.{name}")

    def noise(self, x: Tensor, spread: float, module: Module, name: str = "") -> Tensor:
        """x with a normal draw of this spread added to each of its values; in training only."""
        if self.seed is None or spread == 0.0:
            return x
        # Box and Muller 1958: a length and an angle, each from a draw of its own
        length, angle = ((drawn(x, self.seed, f"{module.path}.{name}.{which}") + 0.5) / 2**32 for which in ("length", "angle"))
        return x + (spread * torch.sqrt(-2.0 * length.log()) * torch.cos(2.0 * pi * angle)).to(x.dtype)

    def add_loss(self, module: Module, name: str, loss: Tensor) -> None:
        """Let this part's own loss be counted, where losses are asked for; told twice (recomputed), it counts once."""
        if self.losses is not None:
            self.losses[f"{module.path}.{name}"] = loss

    def with_added(self, loss: Tensor) -> Tensor:
        """A loss and whatever the parts added."""
        return loss if not self.losses else loss + torch.stack(list(self.losses.values())).sum()


def drop(x: Tensor, p: float, seed: int, path: str) -> Tensor:
    """x with a share p of its values dropped."""
    keep = drawn(x, seed, path) >= int(p * 2**32)
    return x * keep.to(x.dtype) / (1.0 - p)


def drawn(like: Tensor, seed: int, path: str) -> Tensor:
    """A whole number from 0 to 2³² − 1 for each value of `like`: a pure function of (seed, path, index), so the same when
    recomputed, on any rank, compiled."""
    index = torch.arange(like.numel(), device=like.device, dtype=torch.int64)
    mixed = (index + seed * 0x9E3779B1 + _number(path)) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)).view(like.shape)


@torch.compiler.assume_constant_result
def _number(path: str) -> int:
    """A number of the path's own, which a compiler takes as it is."""
    return zlib.crc32(path.encode())
