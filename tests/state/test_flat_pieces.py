"""The pieces of a flat step over a paged KV cache: rows that decode together, chunks of prompts alone."""

from __future__ import annotations

import torch

from dovetail.state.pages import MOST_DECODE_QUERIES, TOKENS, flat_pieces

TABLE = torch.arange(12).view(4, 3)


def test_rows_that_decode_are_one_piece_and_a_chunk_is_another() -> None:
    pieces = flat_pieces(TABLE, [5, 9, 4, 2], [1, 1, 20, 0])
    assert [(piece.at, piece.shape) for piece in pieces] == [(slice(0, 2), (2, 1)), (slice(2, 22), (1, 20))]
    assert [piece.table.tolist() for piece in pieces] == [TABLE[:2].tolist(), TABLE[2:3].tolist()]
    decode, chunk = pieces
    assert decode.layout.order.tolist() == [[5], [9]]
    assert decode.key_layout.real.sum(-1).tolist() == [6, 10]
    assert (chunk.layout.start, chunk.key_layout.n) == (4, 24)


def test_rows_with_as_many_drafts_are_one_piece() -> None:
    pieces = flat_pieces(TABLE, [5, 9, 4, 7], [1, 3, 3, MOST_DECODE_QUERIES + 1])
    assert [piece.shape for piece in pieces] == [(1, 1), (2, 3), (1, MOST_DECODE_QUERIES + 1)]
    assert pieces[1].layout.order.tolist() == [[9, 10, 11], [4, 5, 6]]


def test_no_piece_copies_more_keys_than_fit() -> None:
    pieces = flat_pieces(TABLE, [TOKENS // 2 - 1, TOKENS // 2 - 1, 3, 3], [1, 1, 1, 1])
    assert [piece.shape for piece in pieces] == [(2, 1), (2, 1)]
