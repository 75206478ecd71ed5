"""`model.losses`: the loss of each token in pieces is that of one pass, with eviction that of the policy."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import dovetail as dt
from dovetail.base.errors import DovetailError
from dovetail.decoding.eviction import Eviction, evicting
from dovetail.decoding.generation import PIECE
from dovetail.proof.laws.case import perturbed
from dovetail.proof.laws.mutant import spec

N = PIECE + 40


def losses(model: dt.Transformer, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


@torch.no_grad()
def test_pieces_have_the_losses_of_one_pass() -> None:
    model, ids, calls = perturbed(spec()), torch.randint(62, (2, N), generator=torch.Generator().manual_seed(0)), []
    assert isinstance(model, dt.Transformer)
    got = model.losses(ids, watch=lambda done, of: calls.append((done, of)))
    torch.testing.assert_close(got, losses(model, ids), rtol=0, atol=1e-10)
    assert calls == [(PIECE, N - 1), (N - 1, N - 1)]
    held = evicting(model, Eviction("sinks", 20))
    got = model.losses(ids, evict="sinks", evict_to=20)
    torch.testing.assert_close(got, losses(held, ids), rtol=0, atol=1e-10)
    assert (got - losses(model, ids)).abs().max() > 0.1


def test_ids_that_have_no_losses_are_refused() -> None:
    model = dt.build(spec())
    with pytest.raises(DovetailError, match=r"ids: are torch.int64 of shape \(5,\); give integers \(rows, n\)"):
        model.losses(torch.arange(5))
    table = dt.build(spec().swap("position", {"kind": "learned", "length": 8}))
    with pytest.raises(DovetailError, match="ids: have 12 tokens, more than the table of positions has rows; shorten them"):
        table.losses(torch.arange(12)[None])
