"""Embeddings: inputs -> x (…, n, embed) and the layout of its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import Module
from dovetail.spec.part import Part
from dovetail.spec.scope import Scope

if TYPE_CHECKING:
    import torch


class Embed(Part):
    """Embeds inputs. Module: forward(inputs, ctx) -> (x (…, n, embed), their TokenLayout); n may differ from the input's."""

    group: ClassVar[str] = "embed"
    coords: ClassVar[int] = 1  # coordinates per token: 1 for text, 2 for an image
    token_ids: ClassVar[bool] = False  # whether every input is the id of a token of the vocabulary

    def example(self, scope: Scope, batch: int, n: int, generator: torch.Generator) -> Tensor:
        """A random legal input of about n tokens."""
        raise NotImplementedError

    def example_patches(self, scope: Scope, generator: torch.Generator) -> Tensor | None:
        """Random legal `patches` of a Ctx for the inputs of `example`; None where the embedding reads none."""
        return None

    def causal(self) -> bool:
        """Whether input i becomes token i, so that tokens can be decoded one by one."""
        return True

    def tokens(self) -> int | None:
        """The number of tokens per input; None: inputs differ."""
        return None

    def table_width(self) -> int | None:
        """The width of the embeddings where it differs from that of the residual stream; None: it does not."""
        return None


class EmbedModule(Module):
    """The module of an embedding."""

    def widen(self, x: Tensor, ctx: Ctx | None = None) -> Tensor:
        """Project the embeddings (…, n, table), with positions and norm, to the residual stream (…, n, embed)."""
        return x

    def forward(self, inputs: Tensor, ctx: Ctx) -> tuple[Tensor, TokenLayout]:
        """The residual stream (…, n, embed), and the layout of its tokens."""
        raise NotImplementedError
