"""Embedding and head over a sharded vocabulary: the loss and its gradients are those of one rank, without all logits."""

import pytest
from rank_jobs import error_of
from shard_specs import WIRINGS, decoder
from vocab_jobs import error_of_labels, large_logits, loss_over_ranks

from dovetail.parallel.pair import Pair

WIDE = "vocab: 302"  # wider than every other axis
UNTIED = decoder(model="head: {kind: lm, tied: false, bias: true, scale: 0.5, softcap: 3.0}")
TABLE = decoder(model="embed: {kind: tokens, width: 10, types: 2, scale_by_width: true}\nhead: masked_lm")
SPECS = {"tied": decoder(), "untied": UNTIED, "masked_lm": WIRINGS["encoder"], "table": TABLE}


@pytest.mark.quick(4)
@pytest.mark.parametrize(("batch", "n"), [(2, 7), (3, 700)])  # in one chunk, and in three
@pytest.mark.parametrize("name", SPECS)
def test_the_loss_is_that_of_one_rank(pair: Pair, name: str, batch: int, n: int) -> None:
    for gaps, sharded_width, width in pair.run(loss_over_ranks, SPECS[name].replace("vocab: 62", WIDE), batch, n):
        assert max(gaps.values()) < 1e-9, max(gaps.items(), key=lambda item: item[1])
        assert any("embed.table" in path for path in gaps)
        if n < 151:  # else scores are wider
            assert (sharded_width, width) == (151, 302)


def test_an_uneven_vocabulary_is_refused_by_name(pair: Pair) -> None:
    odd = decoder().replace("vocab: 62", "vocab: 61")
    for name, text in pair.run(error_of, loss_over_ranks, odd, 2, 7):
        assert name == "SpecError"
        assert text.startswith("embed.table: vocab = 61 cannot be cut over 2 tensor-parallel ranks")
        assert "whole={'vocab'}" in text


def test_an_uneven_vocabulary_may_stay_whole(pair: Pair) -> None:
    for gaps, _, _ in pair.run(loss_over_ranks, decoder().replace("vocab: 62", "vocab: 61"), 2, 7, ("vocab",)):
        assert max(gaps.values()) < 1e-9


def test_a_label_that_no_rank_has_is_refused(pair: Pair) -> None:
    for label in (62, -1):
        for text in pair.run(error_of_labels, decoder(), label):
            assert text == f"head: label {label} is outside the vocab of 62; labels are 0 to 61"


def test_large_logits_of_one_rank_do_not_overflow(pair: Pair) -> None:
    assert max(pair.run(large_logits, decoder(model="head: {kind: lm, tied: false, bias: true}"))) < 1e-5
