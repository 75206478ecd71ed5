"""trace: the activations of one forward pass, by address.

    trace(model, tokens, "*.mixer.pattern")  ->  {"layers.0.mixer.pattern": (batch, heads, n, n), …}

An address is the path of a module and the name of a tap; `dovetail.core.fold.taps(spec)` lists them. A listener adds a need,
so a kernel is chosen that computes the activation; nothing else about the forward pass changes.
"""

from __future__ import annotations

import dataclasses as dc

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx, Listener
from dovetail.core.fold import check_addresses
from dovetail.core.layout import TokenLayout
from dovetail.model import ModelModule


@torch.no_grad()
def trace(model: ModelModule, tokens: Tensor, *patterns: str, ctx: Ctx | None = None) -> dict[str, Tensor]:
    """Return the activations whose addresses match one of the patterns, in the order in which they are computed.

    tokens (batch, n), or another input of the embedding. `ctx` holds the token layout (and the encoder output) of an input that
    is not a batch of whole sequences.
    """
    check_addresses(model.part, patterns)
    activations: dict[str, Tensor] = {}

    def listen(address: str, x: Tensor) -> None:
        activations[address] = x.detach().clone()

    ctx = ctx or Ctx(layout=TokenLayout.whole(tokens.shape[0], tokens.shape[1], tokens.device))
    with torch.compiler.set_stance("force_eager"):  # a listener would recompile a compiled model
        model(tokens, dc.replace(ctx, listen=Listener(dict.fromkeys(patterns, listen))))
    return activations
