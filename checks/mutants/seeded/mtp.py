"""Seeded bugs of multi-token prediction: what a depth reads, what it predicts, and its cache."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dovetail.files.spec import from_yaml
from dovetail.model import model as model_file, multi_token
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.groups import HeadModule, MtpModule
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED
from dovetail.parts.mtp import MtpDepthModule
from dovetail.proof.laws.mutant import BASE, Mutant, instead

_look, _forward = multi_token.look_ahead, MtpDepthModule.forward

DEPTHS = "mtp: [{block: {mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}}]"
TWO = DEPTHS.replace("}}}]", "}}}, {weight: 0.1, block: {mixer: {heads: 6, head: 12}, ffn: null}}]")


def halves_swapped(self: MtpDepthModule, before: Tensor, embedded: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
    halves = torch.cat([self.hidden_norm(before, ctx), self.embed_norm(embedded, ctx)], -1)
    return self.norm(self.block(self.proj(halves, ctx), ctx, views), ctx)


def embedding_not_normed(self: MtpDepthModule, before: Tensor, embedded: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
    halves = torch.cat([embedded, self.hidden_norm(before, ctx)], -1)
    return self.norm(self.block(self.proj(halves, ctx), ctx, views), ctx)


def last_norm_left_out(self: MtpDepthModule, before: Tensor, embedded: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
    halves = torch.cat([self.embed_norm(embedded, ctx), self.hidden_norm(before, ctx)], -1)
    return self.block(self.proj(halves, ctx), ctx, views)


def cache_left_out(self: MtpDepthModule, before: Tensor, embedded: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
    return _forward(self, before, embedded, ctx, {})


def token_of_the_hidden_state(
    depths: Sequence[MtpModule], head: HeadModule, hidden: Tensor, embedded: Tensor | None, tokens: Tensor, ctx: Ctx
) -> None:
    """Depth k reads the embedding of token i + k − 1."""
    assert embedded is not None
    _look(depths, head, hidden, torch.cat([embedded[..., :1, :], embedded[..., :-1, :]], -2), tokens, ctx)


def last_target_off_by_one(
    depths: Sequence[MtpModule], head: HeadModule, hidden: Tensor, embedded: Tensor | None, tokens: Tensor, ctx: Ctx
) -> None:
    """The last depth predicts the token that it reads."""
    losses: dict[str, Tensor] = {}
    labels = ctx.layout.next_of(tokens, IGNORED) if ctx.labels is None else ctx.labels
    early = torch.cat([labels[..., :1], labels[..., :-1]], -1)
    _look(depths, head, hidden, embedded, tokens, ctx)
    _look(depths, head, hidden, embedded, tokens, dc.replace(ctx, labels=early, losses=Losses(losses), taps=None))
    ctx.add_loss(depths[-1], "loss", losses[f"{depths[-1].path}.loss"])


def documents_run_on(self: TokenLayout, k: int) -> TokenLayout:
    """A token whose next one is in another document is no padding."""
    return self.pick(slice(0, max(self.n - k, 0)))


def looking(function: Any) -> Any:
    """Seed another `look_ahead` in the model."""
    return lambda: patch.object(model_file, "look_ahead", function)


def forward(function: Any) -> Any:
    """Seed another forward of a depth."""
    return instead(MtpDepthModule, "forward", function)


def layout(function: Any) -> Any:
    """Seed another layout of the tokens of a depth."""
    return instead(TokenLayout, "ahead", function)


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    one, two = (from_yaml(f"{BASE}{depths}\n") for depths in (DEPTHS, TWO))
    rows = [
        ("multi-token prediction swaps the halves of its input", "own_number", forward(halves_swapped), one),
        ("multi-token prediction leaves out the norm of the embedding", "own_number", forward(embedding_not_normed), one),
        ("multi-token prediction leaves out the last norm", "own_number", forward(last_norm_left_out), one),
        ("multi-token prediction reads token i instead of i + 1", "own_number", looking(token_of_the_hidden_state), one),
        ("the last depth predicts the token that it reads", "own_number", looking(last_target_off_by_one), two),
        ("in training a depth reads the token before the one of drafting", "drafted", looking(token_of_the_hidden_state), two),
        ("the loss of the last depth is off by one", "drafted", looking(last_target_off_by_one), two),
        ("drafting does not write to its cache", "drafted", forward(cache_left_out), two),
        ("multi-token prediction runs on into the next document", "drafted", layout(documents_run_on), two),
    ]
    return [Mutant(*row) for row in rows]
