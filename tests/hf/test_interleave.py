"""Tensors in turns: literal numbers, there and back, and shapes that do not fit."""

from __future__ import annotations

import torch

from dovetail.hf.convert import INTERLEAVE_ROWS, TRANSPOSE, Interleave

K, V = torch.tensor([[1], [2], [3], [4]]), torch.tensor([[10], [20]])


def test_head_by_head() -> None:
    """Two heads: two rows of k and one of v each."""
    (whole,) = Interleave(2).to_hf([K, V])
    assert whole.flatten().tolist() == [1, 2, 10, 3, 4, 20]
    back = Interleave(2).from_hf([whole], [(4, 1), (2, 1)])
    assert back[0].equal(K)
    assert back[1].equal(V)
    assert Interleave(2).hf_shapes([(4, 1), (2, 1)]) == [(6, 1)]


def test_row_by_row_on_its_side() -> None:
    """One expert of three units over two channels: gate and up alternate, and the matrix lies on its side."""
    gate, up = torch.tensor([[[1, 2], [3, 4], [5, 6]]]), torch.tensor([[[-1, -2], [-3, -4], [-5, -6]]])
    both = INTERLEAVE_ROWS.then(TRANSPOSE)
    (whole,) = both.to_hf([gate, up])
    assert whole.tolist() == [[[1, -1, 3, -3, 5, -5], [2, -2, 4, -4, 6, -6]]]
    back = both.from_hf([whole], [(1, 3, 2), (1, 3, 2)])
    assert back[0].equal(gate)
    assert back[1].equal(up)


def test_what_does_not_fit_is_given_back() -> None:
    odd = torch.ones(5, 1)
    assert Interleave(2).from_hf([odd], [(4, 1), (2, 1)]) == [odd]
