"""Ctx: everything a forward pass carries besides the residual stream. Training, serving and inspection differ only here.

Three objects do what a part asks for: `taps` (a Listener, or None), `draws` (nn/draws.py; None outside training) and `ranks`
(nn/ranks.py). `ctx.tap(module, "q", x)` returns x when there is no listener. A listener receives the value and its address
(`layers.3.mixer.q`) and may return another in its place. What runs in every layer asks `ctx.taps is None` first, so that a
forward pass without a listener calls nothing.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dovetail.base.keywords import checks_keywords
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.nn.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from dovetail.nn.module import Module

Views = Sequence[Mapping[str, Any]]  # per layer: branch name -> view of its decode state
Listen = Callable[[str, Tensor], Tensor | None]  # (address, value) -> None, or a value to use instead


@checks_keywords
class Listener:
    """Address patterns (`*.mixer.pattern`) and the function to call at each; pairs where one pattern has several."""

    step = 0  # of generation: a decoder counts it

    def __init__(self, table: Mapping[str, Listen] | Sequence[tuple[str, Listen]]) -> None:
        self.table = tuple(table.items() if isinstance(table, Mapping) else table)

    def wants(self, address: str) -> bool:
        """Whether any pattern matches this address."""
        return any(fnmatchcase(address, pattern) for pattern, _ in self.table)

    def edits(self, address: str) -> bool:
        """Whether the value at this address may be replaced, so that the output must be computed with it."""
        return True

    def queries(self, address: str, layout: TokenLayout) -> Tensor | None:
        """Which queries (rows, n) of a pattern are asked for, where it is only read; None: all."""
        return None

    def hear(self, address: str, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """Call each function whose pattern matches, in order, and return the last value; `layout` is that of the tokens."""
        for pattern, listen in self.table:
            if fnmatchcase(address, pattern):
                replacement = listen(address, x)
                x = x if replacement is None else replacement
        return x


class Losses:
    """The dict in which a caller collects losses. FSDP copies every dict among the arguments of a layer; this it passes on, so
    that the losses of all layers arrive."""

    __slots__ = ("by_path",)

    def __init__(self, by_path: dict[str, Tensor] | None = None) -> None:
        self.by_path = {} if by_path is None else by_path


@checks_keywords
@dc.dataclass(slots=True)
class Ctx:
    """What a forward pass carries."""

    layout: TokenLayout
    views: Views | None = None
    encoder_output: Tensor | None = None  # (…, m, encoder): hidden states of the encoder, for cross attention
    encoder_layout: TokenLayout | None = None
    types: Tensor | None = None  # (…, n) token types, where the embedding has them
    patches: Tensor | None = None  # (p, channels, height, width): what token ids from the vocabulary's size on stand for
    labels: Tensor | None = None  # (…, n) what each token predicts, where a loss is computed
    losses: Losses | None = None  # extra losses, by the path that added them
    taps: Listener | None = None
    draws: Draws | None = None  # set in training
    ranks: Ranks = ALONE

    def for_mode(self, module: nn.Module) -> Ctx:
        """Return the ctx for a module's mode: in training mode it has draws, of a seed from torch's default generator (so
        torch.manual_seed reproduces it) where the caller gave none."""
        if self.draws is not None or not module.training:
            return self
        return dc.replace(self, draws=Draws(self.ranks.broadcast(torch.randint(2**62, ()))))

    def wants(self, module: Module, name: str) -> bool:
        """Whether anyone listens to this tap."""
        return self.taps is not None and self.taps.wants(f"{module.path}.{name}".lstrip("."))

    def tap(self, module: Module, name: str, x: Tensor) -> Tensor:
        """Pass x to the listeners at its address; return x when there are none."""
        if self.taps is None:
            return x
        return self.taps.hear(f"{module.path}.{name}".lstrip("."), x, self.layout)

    def add_loss(self, module: Module, name: str, loss: Tensor) -> None:
        """Add a loss of this part, where losses are collected; a recomputed one counts once."""
        if self.losses is not None:
            self.losses.by_path[f"{module.path}.{name}"] = loss

    def with_added(self, loss: Tensor) -> Tensor:
        """Return the loss plus those that parts added."""
        added = self.added()
        return loss if added is None else loss + added

    def added(self) -> Tensor | None:
        """Return the sum of the losses that parts added; None where there is none."""
        losses = [] if self.losses is None else list(self.losses.by_path.values())
        return torch.stack(losses).sum() if losses else None


def replaced(ctx: Ctx, module: Module, name: str, x: Tensor) -> Tensor | None:
    """What listeners put in the place of x, a value inside a fused kernel. None: they replace nothing and want no gradient,
    so that the output of the kernel stays as it is, bit for bit."""
    new = ctx.tap(module, name, x)
    edited = x.requires_grad and ctx.taps is not None and ctx.taps.edits(f"{module.path}.{name}".lstrip("."))
    return new if edited or new is not x else None
