"""The residual stream as logits: the final norm and the head, applied to it at any depth."""

from __future__ import annotations

import dataclasses as dc

from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.model.model import ModelModule
from dovetail.nn.block import BlockModule
from dovetail.nn.ctx import Ctx


def unembed(model: ModelModule, residual: Tensor, ctx: Ctx) -> Tensor:
    """Return the logits (…, n, vocab) of a residual stream (…, n, embed), as if no layer came after it (the logit lens)."""
    if model.part.head is None:
        raise SpecError("head", "the model has none, so its residual stream gives no logits")
    ctx = dc.replace(ctx, taps=None)
    return model.head(model.end(residual, ctx), ctx)


def final_residual(block: BlockModule, after: Tensor) -> Tensor:
    """What a layer returns, from the residual stream after its last branch: several streams closed to one, or rescaled."""
    x = block.wire.rescaled(after) if block.rescales else after
    return block.wire.close(x) if block.closes else x
