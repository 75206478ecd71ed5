"""Tokens as rows of sequences: where documents begin, where rows end, and flat batches spread and gathered again."""

import torch

from dovetail.nn.layout import TokenLayout
from dovetail.nn.rows import sequence_rows


def test_a_plain_batch_needs_no_look() -> None:
    seq = sequence_rows(TokenLayout.whole(2, 5))
    assert seq.begins
    assert seq.real is None
    assert seq.document is None
    assert seq.ends is None
    assert not sequence_rows(TokenLayout.whole(2, 5, start=3)).begins


def test_documents_are_counted_where_order_restarts() -> None:
    seq = sequence_rows(TokenLayout.packed([(2, 3), (4,)], 6))
    assert seq.document is not None
    assert seq.ends is not None
    assert seq.document.tolist() == [[1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1]]
    assert seq.ends.tolist() == [5, 4]


def test_left_padding_belongs_to_no_new_document() -> None:
    seq = sequence_rows(TokenLayout.padded([2, 4], 4, left=True))
    assert seq.document is not None
    assert seq.document.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert seq.ends is not None
    assert seq.ends.tolist() == [4, 4]


def test_a_row_that_continues_stays_document_0() -> None:
    seq = sequence_rows(TokenLayout.flat([3, 2], [4, 0]))
    assert seq.document is not None
    assert seq.document.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert seq.ends is not None
    assert seq.ends.tolist() == [3, 2]


def test_a_flat_batch_is_spread_and_gathered_again() -> None:
    layout = TokenLayout.flat([3, 1, 2])
    x = torch.arange(12.0).view(6, 2)
    seq = sequence_rows(layout)
    rows = seq.spread(x)
    assert rows.shape == (3, 3, 2)
    assert rows[1, 0].tolist() == [6.0, 7.0]
    assert rows[2, 1].tolist() == [10.0, 11.0]
    assert torch.equal(seq.gather(rows), x)


def test_rows_without_a_token_are_rows() -> None:
    seq, x = sequence_rows(TokenLayout.flat([2, 0, 1, 0])), torch.tensor([1.0, 2.0, 3.0])
    assert seq.spread(x).shape == (4, 2)
    assert seq.ends is not None
    assert seq.ends.tolist() == [2, 0, 1, 0]
    assert torch.equal(seq.gather(seq.spread(x)), x)


def test_rows_of_a_flat_batch_may_alternate() -> None:
    order, row = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 0, 1, 0])
    layout = TokenLayout.of(order, torch.zeros(4, dtype=torch.long), row)
    seq, x = sequence_rows(layout), torch.tensor([10.0, 0.0, 11.0, 1.0])
    assert seq.spread(x).tolist() == [[0.0, 1.0], [10.0, 11.0]]
    assert seq.gather(seq.spread(x)).tolist() == x.tolist()


def test_padding_is_zeroed() -> None:
    seq = sequence_rows(TokenLayout.padded([1, 2], 2))
    assert seq.only_real(torch.ones(2, 2, 3))[0].tolist() == [[1.0] * 3, [0.0] * 3]
