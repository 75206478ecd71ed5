"""Opinions of small checkpoints: where training from one random start does not settle, it begins again from another."""

import pytest
import torch

from dovetail.base.errors import DovetailError
from dovetail.files.spec import from_yaml
from dovetail.hf import peaked

SPEC = from_yaml("""
    width: 12
    vocab: 20
    layers: [{mixer: {heads: 2}, ffn: {hidden: 16}}]
    head: {kind: lm, tied: false}
""")


@pytest.fixture
def starts(monkeypatch):
    """The weights that each start begins with; the first two do not settle."""
    seen, trained = [], peaked._trained

    def watched(model, seed):
        seen.append(model.embed.table.detach().clone())
        return trained(model, seed) if len(seen) > 2 else (False, peaked.Opinion(0.0, 1.0, 0))

    monkeypatch.setattr(peaked, "_trained", watched)
    return seen


def test_each_start_has_weights_of_its_own_and_the_seed_decides_them(starts):
    first, clear = peaked.with_peaked_logits(SPEC, 4)
    assert clear.margin > 2 * clear.rounding
    assert len(starts) == peaked.STARTS
    assert not torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[1], starts[2])
    begun = [table.clone() for table in starts]
    del starts[:]
    second, _ = peaked.with_peaked_logits(SPEC, 4)
    assert all(map(torch.equal, begun, starts))
    assert torch.equal(first.embed.table, second.embed.table)


def test_the_last_start_that_does_not_settle_is_an_error(monkeypatch):
    monkeypatch.setattr(peaked, "_trained", lambda *_: (False, peaked.Opinion(0.1, 0.3, 800)))
    with pytest.raises(DovetailError, match="no clear margin"):
        peaked.with_peaked_logits(SPEC, 4)
