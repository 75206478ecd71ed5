"""TokenLayout: whole, padded, packed and flat batches; tensors cached per step; shapes that do not fit."""

from __future__ import annotations

import pytest
import torch

from dovetail.base.errors import InputError
from dovetail.nn.layout import TokenLayout


def test_whole_rows_begin_at_start() -> None:
    layout = TokenLayout.whole(2, 3, start=4)
    assert layout.order.tolist() == [[4, 5, 6], [4, 5, 6]]
    assert (layout.start, layout.n) == (4, 3)
    assert layout.real.all()
    assert layout.coords.shape == (2, 3, 1)


def test_padding_has_no_position_and_each_row_counts_from_its_first_token() -> None:
    right, left = TokenLayout.padded([2, 3], 4), TokenLayout.padded([2, 3], 4, left=True)
    assert right.real.tolist() == [[True, True, False, False], [True, True, True, False]]
    assert left.real.tolist() == [[False, False, True, True], [False, True, True, True]]
    assert right.order[0, :2].tolist() == left.order[0, 2:].tolist() == [0, 1]
    assert right.start is None


def test_packed_documents_begin_at_0_again() -> None:
    layout = TokenLayout.packed([[2, 3], [4]], 6)
    assert layout.order[0].tolist() == [0, 1, 0, 1, 2, 0]
    assert layout.seg.tolist() == [[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, -1, -1]]


def test_a_flat_batch_mixes_prefill_and_decoding() -> None:
    layout = TokenLayout.flat([3, 1], [0, 7])
    assert layout.order.tolist() == [0, 1, 2, 7]
    assert layout.row is not None
    assert layout.row.tolist() == [0, 0, 0, 1]


def test_pieces() -> None:
    layout = TokenLayout.packed([[2, 3], [5]], 6)
    second = layout.cut(2, 1)
    assert second.order.tolist() == layout.order[:, 3:].tolist()
    assert second.seg.tolist() == layout.seg[:, 3:].tolist()
    flat = TokenLayout.flat([2, 2]).pick(torch.tensor([0, 3]))
    assert flat.row is not None
    assert (flat.order.tolist(), flat.row.tolist()) == ([0, 1], [0, 1])


def test_once_is_computed_once_per_key() -> None:
    layout, made = TokenLayout.whole(1, 2), []
    for key in ("a", "a", "b"):
        layout.once(key, lambda: made.append(1))
    assert len(made) == 2


def test_tensors_that_depend_on_the_queries_are_cached_per_layout_of_queries() -> None:
    keys, one, other = TokenLayout.whole(1, 4), TokenLayout.whole(1, 2, start=2), TokenLayout.whole(1, 1, start=3)
    asked = [keys.once_for(queries, "mask", lambda n=queries.n: n) for queries in (one, one, other, keys)]
    assert asked == [2, 2, 1, 4]


def test_a_flat_batch_counts_rows_without_a_token() -> None:
    layout = TokenLayout.flat([2, 0, 1, 0])
    assert layout.rows == layout.pick(slice(0, 2)).rows == 4
    assert TokenLayout.of(layout.order, layout.seg, layout.row).rows == 3  # all that the tokens themselves say


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (TokenLayout.whole(2, 5, start=3), "TokenLayout(2 × 5, orders 3 to 7)"),
        (TokenLayout.padded([2, 4], 4), "TokenLayout(2 × 4, orders 0 to 3, 2 of padding)"),
        (TokenLayout.flat([3, 0, 1], [0, 2, 7]), "TokenLayout(flat, 4 tokens in 3 rows, orders 0 to 7)"),
        (TokenLayout.whole(1, 3, device="meta"), "TokenLayout(1 × 3, orders 0 to 2)"),
        (TokenLayout(torch.zeros(1, 2, 2), torch.zeros(1, 2), None), "TokenLayout(1 × 2, orders 0.0 to 0.0, 2 coordinates)"),
    ],
)
def test_the_repr_of_a_layout_is_one_line(layout: TokenLayout, text: str) -> None:
    assert repr(layout) == text


@pytest.mark.parametrize("layout", [TokenLayout.whole(1, 4), TokenLayout.whole(2, 1), TokenLayout.flat([4, 4])])
def test_a_layout_of_another_shape_is_refused(layout: TokenLayout) -> None:
    with pytest.raises(InputError, match=r"inputs: the layout describes tokens of shape .*, but there are \(2, 4\)"):
        layout.expect(torch.zeros(2, 4, 8), "inputs")
    TokenLayout.whole(2, 4).expect(torch.zeros(2, 4, 8), "inputs")


def test_groups_of_rows_keep_their_samples() -> None:
    packed = TokenLayout.packed([(2, 1), (3,), (1, 1), (2,)], 3)
    first, second = (packed.split_rows(2, i) for i in range(2))
    assert first.sample.tolist() == [[0, 0, 1], [2, 2, 2]]
    assert second.sample.tolist() == [[3, 4, 3], [5, 5, 5]]  # padding takes the sample of the first document
    assert second.seg.tolist() == [[0, 1, -1], [0, 0, -1]]
    whole = TokenLayout.whole(4, 3, start=5).split_rows(2, 1)
    assert (whole.start, whole.order.shape) == (5, (2, 3))
    assert whole.sample.tolist() == [[2, 2, 2], [3, 3, 3]]


@pytest.mark.parametrize("layout", [TokenLayout.whole(3, 2), TokenLayout.flat([2, 2])], ids=["uneven", "flat"])
def test_rows_that_make_no_equal_groups_are_refused(layout: TokenLayout) -> None:
    with pytest.raises(InputError, match="to split into 2 equal groups"):
        layout.split_rows(2, 0)


def test_coordinates_from_outside_leave_the_order_alone() -> None:
    coords = torch.tensor([[[0, 0, 0], [0, 0, 1], [0, 1, 0], [2, 2, 2]]])
    layout = TokenLayout.whole(1, 4).at(coords)
    assert layout.order.tolist() == [[0, 1, 2, 3]]
    assert layout.coords_for(3).equal(coords)
    assert layout.position is layout.order  # a position of one coordinate, of tokens that have three
    assert TokenLayout.whole(1, 2).at(torch.tensor([[[7], [3]]])).position.tolist() == [[7, 3]]
    assert TokenLayout.whole(1, 2).coords_for(2).tolist() == [[[0, 0], [1, 1]]]
    with pytest.raises(InputError, match=r"3 coordinates, and a position that encodes 2 \(give each token 2"):
        layout.coords_for(2)
    with pytest.raises(InputError, match=r"float32 \(1, 4, 1\); give integers \(1, 4, 'c'\)"):
        layout.at(torch.zeros(1, 4, 1))
    with pytest.raises(InputError, match="one vector per token"):
        layout.at(coords[:, :3])


def test_rows_are_alike_only_with_equal_coordinates() -> None:
    layout, coords = TokenLayout.whole(2, 3), torch.arange(6).view(2, 3, 1)
    assert layout.alike
    assert layout.at(coords[:1].expand(2, -1, -1)).alike
    assert not layout.at(coords).alike
    assert not TokenLayout.padded([2, 3], 3).alike
    assert not TokenLayout.flat([3]).alike
