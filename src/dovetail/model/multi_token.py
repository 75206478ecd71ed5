"""Multi-token prediction: over a whole pass, with its loss, and one depth at a time, for drafts.

    hᵏᵢ = depthₖ(hᵏ⁻¹ᵢ, E(tᵢ₊ₖ)) or depthₖ(h⁰ᵢ)    h⁰ the hidden states of the model; hᵏᵢ predicts tᵢ₊ₖ₊₁;  h (…, n − k, embed)
    loss = 1/K Σₖ Σ_terms factor · mean over i of the term        the mean is over tokens with a label
        labels   −log p(tᵢ₊ₖ₊₁ | hᵏᵢ)
        probs    −Σ_v p(v | h⁰ᵢ₊ₖ) log p(v | hᵏᵢ)                  the model's probs are constants
        hidden   mean over channels of smooth L1(hᵏᵢ − h⁰ᵢ₊ₖ)      d²/2 where |d| < 1, else |d| − 1/2; h⁰ is a constant

A depth declares what it reads (`Mtp.inputs`) and the terms of its loss (`Mtp.loss_terms`). Depth k has the first n − k tokens
of each row: the others know no token k places on. Where documents are packed, a token whose k-th next one belongs to another
document is padding there. The head is the model's, or the depth's own. A token keeps its order, so the KV cache of a depth is
indexed as that of a layer.

DeepSeek-AI 2024 (DeepSeek-V3), section 2.2; Gloeckle et al. 2024; Cai et al. 2024 (Medusa); Li et al. 2024 (EAGLE)
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dovetail.base.errors import InputError
from dovetail.base.keywords import checks_keywords
from dovetail.nn.block import NO_VIEWS
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import AheadInput, AheadTerm, EmbedModule, HeadModule, Mtp, MtpModule
from dovetail.nn.loss import IGNORED, LossSum
from dovetail.nn.module import Module, at_least_fp32, entry

CHUNK = 1024  # tokens whose probs are in memory at one time


def reads_tokens(depths: Sequence[Mtp]) -> bool:
    """Whether some depth reads the embeddings of tokens."""
    return any("embedded" in depth.inputs for depth in depths)


def head_reads(depth: Mtp) -> int:
    """How many times the model's head reads each token in the loss of a depth."""
    terms = depth.loss_terms()
    return len(terms.keys() & {"labels", "probs"}) * (depth.own_head() is None) + ("probs" in terms)


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
            later, silent = hidden[..., k:, :].detach(), dc.replace(ahead, taps=None)
            means = [
                factor * ctx.ranks.batch_mean(_term(term, depth, head, before, later, targets, silent))
                for term, factor in depth.part.loss_terms().items()
            ]
            ctx.add_loss(depth, "loss", torch.stack(means).sum() / len(depths))


def _term(term: AheadTerm, depth: MtpModule, head: HeadModule, x: Tensor, later: Tensor, targets: Tensor, ctx: Ctx) -> LossSum:
    """One term of the loss of a depth with hidden states x; later (…, n − k, embed) are those of the model k tokens on."""
    own = depth.predictor(head)
    if term == "labels":
        return own.loss(x, targets, ctx)
    counted = targets != IGNORED
    wide, ctx = at_least_fp32(x.dtype), dc.replace(ctx, draws=None)  # an adapter of the head drops nothing, as in `loss`

    def distance(x: Tensor, later: Tensor) -> Tensor:
        return F.smooth_l1_loss(x.to(wide), later.to(wide), reduction="none").mean(-1)

    def cross_entropy(x: Tensor, later: Tensor) -> Tensor:
        with torch.no_grad():
            probs = head(later, ctx).to(wide).softmax(-1)
        return -(probs * own(x, ctx).to(wide).log_softmax(-1)).sum(-1)

    per_token = distance if term == "hidden" else cross_entropy
    chunks = zip(*(tensor.flatten(0, -2).split(CHUNK) for tensor in (x, later)), strict=True)
    losses = torch.cat([checkpoint(per_token, *chunk, use_reentrant=False) for chunk in chunks])  # type: ignore[misc]
    return LossSum(torch.where(counted.flatten(), losses, 0.0).sum(), counted.sum())


@checks_keywords
class MultiTokenModule(Module):
    """What a model computes with its depths of multi-token prediction, one by one: drafts."""

    embed: EmbedModule
    head: HeadModule
    mtp: Any

    @entry()
    def draft(
        self, hidden: Tensor, tokens: Tensor, ctx: Ctx, depth: int = 1, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits (…, n, vocab) of the token after `tokens`, by one depth of multi-token prediction, and its hidden states. The
        arguments are those of `hidden_ahead`."""
        x = self.hidden_ahead(hidden, tokens, ctx, depth, before)
        return self.logits_ahead(x, ctx, depth), x

    def logits_ahead(self, x: Tensor, ctx: Ctx, depth: int) -> Tensor:
        """Logits (…, n, vocab) from the hidden states of one depth."""
        return self.mtp[depth - 1].predictor(self.head)(x, ctx)

    def hidden_ahead(self, hidden: Tensor, tokens: Tensor, ctx: Ctx, depth: int = 1, before: Tensor | None = None) -> Tensor:
        """Hidden states (…, n, embed) of one depth of multi-token prediction, from which its head predicts the token after
        `tokens`.

        hidden (…, n, embed) are those of `hidden()`, and `before` those of the depth before; tokens (…, n) are the known or
        drafted tokens `depth` places after them. ctx has the layout of the hidden states and, to continue, the views of a
        Pool(spec, rows, capacity, drafts=True).
        """
        if not 1 <= depth <= len(self.part.mtp):
            raise InputError(f"depth: {depth} of {len(self.part.mtp)} depths of multi-token prediction; they count from 1")
        ctx.layout.expect(hidden, "hidden")
        inputs = self.part.mtp[depth - 1].inputs
        known: dict[AheadInput, Tensor] = {"hidden": hidden}
        if "before" in inputs:
            if before is None and depth > 1:
                raise InputError(f"before: depth {depth} reads the hidden states of depth {depth - 1}; give them")
            known["before"] = hidden if before is None else before
        if "embedded" in inputs:
            embedded, _ = self.embed(tokens, ctx)
            ctx.layout.expect(embedded, "tokens")
            known["embedded"] = self.embed.widen(embedded, ctx)
        views = NO_VIEWS if ctx.views is None else ctx.views[depth - 1]
        return self.mtp[depth - 1](*(known[name] for name in inputs), ctx, views)
