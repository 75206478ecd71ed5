"""trace: the activations of one forward pass, by address.

    trace(model, tokens, "*.mixer.pattern")  ->  {"layers.0.mixer.pattern": (batch, heads, n, n), …}

An address is a module's path and a tap's name; `dovetail.core.fold.taps(spec)` lists them all. Listening adds a need, so the
ordinary rule picks a kernel that can show what is asked for; nothing else about the forward changes.
"""

from __future__ import annotations

import dataclasses as dc
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx, Listener
from dovetail.core.errors import SpecError
from dovetail.core.fold import taps
from dovetail.core.layout import TokenLayout
from dovetail.model import ModelModule


@torch.no_grad()
def trace(model: ModelModule, tokens: Tensor, *patterns: str, ctx: Ctx | None = None) -> dict[str, Tensor]:
    """Every activation whose address matches one of the patterns, in the order they are computed.

    tokens (batch, n), or what the embedding takes. `ctx` says where they stand (and what memory they look at) where that is
    not simply a batch of whole sequences.
    """
    known = taps(model.part)
    for pattern in patterns:
        if not any(fnmatchcase(address, pattern) for address in known):
            names = sorted({address.rpartition(".")[2] for address in known})
            raise SpecError(pattern, "no tap of this model matches", f"addresses end in {', '.join(names)}; try '*.{names[0]}'")
    heard: dict[str, Tensor] = {}

    def listen(address: str, x: Tensor) -> None:
        heard[address] = x.detach().clone()

    ctx = ctx or Ctx(layout=TokenLayout.whole(tokens.shape[0], tokens.shape[1], tokens.device))
    with torch.compiler.set_stance("force_eager"):  # a listener would make a compiled model compile anew
        model(tokens, dc.replace(ctx, listen=Listener(dict.fromkeys(patterns, listen))))
    return heard
