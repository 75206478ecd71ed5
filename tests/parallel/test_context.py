"""A sequence over two ranks equals one rank, and refuses what cannot be split."""

import pytest
from rank_jobs import error_of, flat_piece, odd_row, split_types, uneven_pieces
from shard_specs import ROWS_ONLY, WIRINGS, decoder

from dovetail.parallel.pair import Pair
from dovetail.proof.laws.sharded import compare_sharded


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", WIRINGS)
def test_whole_equals_split(pair: Pair, name: str) -> None:
    for how, found in compare_sharded(pair, WIRINGS[name], 0, ["sequence", "ring"]).items():
        assert not found.reason
        assert found.worst[1] < 1e-9, (how, found.worst)


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (ROWS_ONLY["classifier"], "head: "),
        (ROWS_ONLY["vision"], "embed: "),
        (
            decoder(
                "kind: attention, heads: 6, kv_heads: 2, head: 12,"
                " position: {kind: rope, when: read, scaling: {kind: dynamic_ntk, factor: 2.0, original: 8}}"
            ),
            "layers.0.mixer.position.scaling: ",
        ),
    ],
)
def test_what_needs_a_whole_row_is_refused(pair: Pair, spec: str, path: str) -> None:
    found = compare_sharded(pair, spec, 0, ["sequence"])["sequence"]
    assert found.reason.startswith(f"{path}a sequence cannot be split")


def test_a_flat_batch_keeps_its_rows(pair: Pair) -> None:
    for rows, orders, entries in pair.run(flat_piece):
        assert rows == [0, 0, 0, 0, 0, 1, 1, 1]
        assert orders == [0, 1, 2, 3, 4, 0, 1, 2]
        assert entries == list(range(8))


def test_token_types_are_split_with_their_tokens(pair: Pair) -> None:
    assert pair.run(split_types) == [[0, 1, 2], [3, 4, 5]]


def test_pieces_must_be_equal(pair: Pair) -> None:
    for name, text in pair.run(error_of, uneven_pieces):
        assert name == "StateError"
        assert "[3, 4]" in text
    for name, text in pair.run(error_of, odd_row):
        assert name == "StateError"
        assert "7 tokens" in text
