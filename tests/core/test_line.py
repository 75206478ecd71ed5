"""Tokens as rows of sequences: where documents begin, where rows end, and flat batches spread and gathered again."""

import torch

from dovetail.core.at import At
from dovetail.core.line import line_of


def test_a_plain_batch_needs_no_look() -> None:
    line = line_of(At.whole(2, 5))
    assert line.begins
    assert line.real is None
    assert line.document is None
    assert line.ends is None
    assert not line_of(At.whole(2, 5, start=3)).begins


def test_documents_are_counted_where_order_restarts() -> None:
    line = line_of(At.packed([(2, 3), (4,)], 6))
    assert line.document is not None
    assert line.ends is not None
    assert line.document.tolist() == [[1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1]]
    assert line.ends.tolist() == [5, 4]


def test_left_padding_belongs_to_no_new_document() -> None:
    line = line_of(At.padded([2, 4], 4, left=True))
    assert line.document is not None
    assert line.document.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert line.ends is not None
    assert line.ends.tolist() == [4, 4]


def test_a_row_that_goes_on_stays_document_0() -> None:
    line = line_of(At.flat([3, 2], [4, 0]))
    assert line.document is not None
    assert line.document.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert line.ends is not None
    assert line.ends.tolist() == [3, 2]


def test_a_flat_batch_is_spread_and_gathered_again() -> None:
    at = At.flat([3, 1, 2])
    x = torch.arange(12.0).view(6, 2)
    line = line_of(at)
    rows = line.spread(x)
    assert rows.shape == (3, 3, 2)
    assert rows[1, 0].tolist() == [6.0, 7.0]
    assert rows[2, 1].tolist() == [10.0, 11.0]
    assert torch.equal(line.gather(rows), x)


def test_rows_of_a_flat_batch_may_alternate() -> None:
    order, row = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 0, 1, 0])
    at = At.of(order, torch.zeros(4, dtype=torch.long), row)
    line, x = line_of(at), torch.tensor([10.0, 0.0, 11.0, 1.0])
    assert line.spread(x).tolist() == [[0.0, 1.0], [10.0, 11.0]]
    assert line.gather(line.spread(x)).tolist() == x.tolist()


def test_padding_is_zeroed() -> None:
    line = line_of(At.padded([1, 2], 2))
    assert line.only_real(torch.ones(2, 2, 3))[0].tolist() == [[1.0] * 3, [0.0] * 3]
