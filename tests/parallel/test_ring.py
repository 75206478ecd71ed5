"""Ring attention: literal numbers, more than two chunks, and what a rank holds and attends to."""

from collections.abc import Iterator
from math import log

import pytest
import torch
from rank_jobs import by_data_and_sequence
from ring_jobs import attended, attended_chunks, chunks_alive, compare_twelve, one_view, recomputed, weighted_by_integers
from shard_specs import ATTENTION, WIRINGS, decoder

from dovetail.parallel.pair import Pair
from dovetail.proof.laws.sharded import worse

DROPPING = {
    "dropout": decoder(f"{ATTENTION}, dropout: 0.3, sink: true, softcap: 2.0"),
    "dropout_by_head": decoder(
        "kind: attention, heads: 4, head: 12, dropout: 0.3,"
        " mask: [causal, {kind: by_head, masks: [{kind: window, size: 2}, full, full, {kind: window, size: 5}]}]"
    ),
    "dropout_strided": decoder(f"{ATTENTION}, dropout: 0.3, mask: [causal, {{kind: strided, step: 4}}]"),
}
GATHERED = {
    "mla": decoder("kind: mla, heads: 4, kv_rank: 10, nope: 8, rope: 4, value: 6"),
    "nsa": decoder("kind: nsa, heads: 6, kv_heads: 2, head: 12, block: 4, top: 1, window: 5"),
    "hybrid": decoder() + "  - mixer: {kind: mamba2, head: 7, state_size: 5}\n    ffn: {kind: glu, hidden: 44}\n",
}
SPECS = {name: spec for name, spec in {**WIRINGS, **DROPPING, **GATHERED}.items() if "encoder_decoder" not in name}


@pytest.fixture(scope="module")
def four() -> Iterator[Pair]:
    with Pair(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Pair]:
    with Pair(3) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", *DROPPING, *GATHERED])
def test_four_chunks_equal_the_whole(four: Pair, name: str) -> None:
    found = worse(four.run(compare_twelve, SPECS[name]))["ring"]
    assert not found.reason
    assert found.worst[1] < 1e-11, found.worst


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_three_chunks_equal_the_whole(three: Pair, name: str) -> None:
    found = worse(three.run(compare_twelve, SPECS[name]))["ring"]
    assert not found.reason
    assert found.worst[1] < 1e-11, found.worst


@pytest.mark.slow
def test_numbers(pair: Pair, four: Pair) -> None:
    """Key j weighs j: the third output is (10 + 2·20 + 3·30) / 6. Of the last, ds = w (v − 30) with w = 0.1 … 0.4."""
    for ranks in (pair, four):
        found = ranks.run(weighted_by_integers)
        out, dq, dk, dv = ([x for rank in found for x in rank[name]] for name in ("out", "dq", "dk", "dv"))
        assert out == pytest.approx([10, 50 / 3, 140 / 6, 30], rel=1e-12)
        assert dv == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=1e-12)
        assert dk == pytest.approx([-2, -2, 0, 4], abs=1e-12)
        assert dq == pytest.approx([0, 0, 0, 6 * log(2)], abs=1e-12)


@pytest.mark.parametrize("how", ["ring", "gather"])
def test_one_view_serves_batches_of_any_documents_in_turn(pair: Pair, how: str) -> None:
    assert max(error for seed in range(4) for error in pair.run(one_view, how, seed)) < 1e-12


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("edit", [False, True])
def test_flat_batches_and_listeners(four: Pair, flat: bool, edit: bool) -> None:
    assert max(error for error, _ in four.run(attended, torch.float64, flat, edit)) < 1e-12


def test_bfloat16_is_rounded_once(four: Pair) -> None:
    """Outputs and gradients of chunks are summed in float32: the error is that of the same kernel over all keys at once."""
    errors = four.run(attended, torch.bfloat16, False, False)
    assert max(ring for ring, _ in errors) <= 1.01 * errors[0][1]


def test_rows_over_some_ranks_and_chunks_over_others(four: Pair) -> None:
    for gaps in four.run(by_data_and_sequence, SPECS["dropout"], True):
        assert max(gaps.values()) < 1e-9, gaps


def test_a_recomputed_ring_is_the_same(four: Pair) -> None:
    assert four.run(recomputed) == [0.0] * 4


def test_hidden_chunks_are_not_attended_to(four: Pair) -> None:
    assert four.run(attended_chunks, "causal") == [1, 2, 3, 4]
    assert four.run(attended_chunks, "full") == [4, 4, 4, 4]


def test_a_rank_holds_three_chunks_of_four(four: Pair) -> None:
    """Its own, the one that it attends to and the one that arrives; all-gather holds all of them beside its own."""
    for forward, backward in four.run(chunks_alive, "ring"):
        assert forward == 3.0
        assert backward == 3.0
    for forward, _ in four.run(chunks_alive, "gather"):
        assert forward >= 5.0
