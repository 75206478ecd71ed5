"""Multi-token prediction over a whole pass, and its loss.

    hᵏᵢ = depthₖ(hᵏ⁻¹ᵢ, E(tᵢ₊ₖ)) or depthₖ(h⁰ᵢ)    h⁰ the hidden states of the model; hᵏᵢ predicts tᵢ₊ₖ₊₁;  h (…, n − k, embed)
    loss = 1/K Σₖ λₖ · mean over i of −log p(tᵢ₊ₖ₊₁ | hᵏᵢ)

A depth declares what it reads (`Mtp.inputs`). Depth k has the first n − k tokens of each row: the others know no token k places
on. Where documents are packed, a token whose k-th next one belongs to another document is padding there. The head is the
model's, or the depth's own. A token keeps its order, so the KV cache of a depth is indexed as that of a layer.
DeepSeek-AI 2024 (DeepSeek-V3), section 2.2; Gloeckle et al. 2024; Cai et al. 2024 (Medusa)
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence

from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.group import AheadInput, HeadModule, Mtp, MtpModule
from dovetail.core.loss import IGNORED


def reads_tokens(depths: Sequence[Mtp]) -> bool:
    """Whether some depth reads the embeddings of tokens."""
    return any("embedded" in depth.inputs for depth in depths)


def look_ahead(
    depths: Sequence[MtpModule], head: HeadModule, hidden: Tensor, embedded: Tensor | None, tokens: Tensor, ctx: Ctx
) -> None:
    """Run every depth and add its loss, where losses are collected.

    hidden, embedded (…, n, embed) are the hidden states of the model and the embeddings of its tokens (…, n), which may be None
    where no depth reads them. ctx.labels are what the tokens predict, −100 where nothing; without them it is the next token.
    """
    layout, before = ctx.layout, hidden
    labels = layout.next_of(tokens, IGNORED) if ctx.labels is None else ctx.labels
    for k, depth in enumerate(depths, 1):
        if k >= layout.n:  # no token has a k-th next one
            if ctx.losses is not None:
                ctx.add_loss(depth, "loss", hidden.new_zeros(()))
            continue
        ahead = dc.replace(ctx, layout=layout.ahead(k))
        of_model, of_depth = (x[..., : layout.n - k, :] for x in (hidden, before))
        known: dict[AheadInput, Tensor] = {"hidden": of_model, "before": of_depth}
        if embedded is not None:
            known["embedded"] = embedded[..., k:, :]
        before = depth(*(known[name] for name in depth.part.inputs), ahead, {})
        if ctx.taps is not None and depth.part.own_head() is not None:
            depth.head(before, ahead)  # the loss has the logits in chunks, and taps none
        if ctx.losses is not None:
            targets = labels[..., k:].masked_fill(~ahead.layout.real, IGNORED)
            mean = ctx.ranks.batch_mean(depth.predictor(head).loss(before, targets, dc.replace(ahead, taps=None)))
            ctx.add_loss(depth, "loss", depth.part.weight / len(depths) * mean)
