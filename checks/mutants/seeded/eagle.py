"""Seeded bugs of EAGLE: what its block reads, what its loss compares, and its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dovetail import account
from dovetail.files.spec import from_yaml
from dovetail.model import multi_token
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import AheadTerm, HeadModule, Mtp, MtpModule
from dovetail.nn.loss import LossSum
from dovetail.parts.mtp import EagleModule
from dovetail.proof.laws.mutant import BASE, Mutant, instead

_forward, _term = EagleModule.forward, multi_token._term

EAGLE = "mtp: [{kind: eagle, block: {mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}}]"


def halves_swapped(self: EagleModule, before: Tensor, embedded: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
    return _forward(self, embedded, before, ctx, views)


def cache_left_out(self: EagleModule, before: Tensor, embedded: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
    return _forward(self, before, embedded, ctx, {})


def block_left_out(self: EagleModule, before: Tensor, embedded: Tensor, ctx: Ctx, views: Mapping[str, Any]) -> Tensor:
    """The decode state is written, and what the block adds is dropped where tokens are drafted."""
    out = _forward(self, before, embedded, ctx, views)
    return self.proj(torch.cat([embedded, before], -1)) if views and before.shape[-2] == 1 else out


def hidden_state_of_the_same_token(
    term: AheadTerm, depth: MtpModule, head: HeadModule, x: Tensor, later: Tensor, targets: Tensor, ctx: Ctx
) -> LossSum:
    """It learns the hidden state that it reads."""
    return _term(term, depth, head, x, torch.cat([later[..., :1, :], later[..., :-1, :]], -2), targets, ctx)


def labels_instead_of_probs(
    term: AheadTerm, depth: MtpModule, head: HeadModule, x: Tensor, later: Tensor, targets: Tensor, ctx: Ctx
) -> LossSum:
    return _term("labels" if term == "probs" else term, depth, head, x, later, targets, ctx)


def once(depth: Mtp) -> int:
    return 1


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    same_token = instead(multi_token, "_term", hidden_state_of_the_same_token)
    rows = [
        ("EAGLE swaps the halves of its input", "own_number", instead(EagleModule, "forward", halves_swapped)),
        (
            "EAGLE learns the hidden state that it reads",
            "own_number",
            instead(multi_token, "_term", hidden_state_of_the_same_token),
        ),
        ("in training EAGLE predicts the hidden state that it reads", "drafted", same_token),
        ("EAGLE learns labels instead of probs", "drafted", instead(multi_token, "_term", labels_instead_of_probs)),
        ("EAGLE does not write to its cache", "drafted", instead(EagleModule, "forward", cache_left_out)),
        ("EAGLE leaves out its block where it drafts", "drafted", instead(EagleModule, "forward", block_left_out)),
        ("the head is counted once in the loss of EAGLE", "declared", instead(account, "head_reads", once)),
    ]
    eagle = from_yaml(f"{BASE}{EAGLE}\n")
    return [Mutant(name, law, seed, eagle) for name, law, seed in rows]
