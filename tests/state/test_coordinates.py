"""Coordinates of a pool: those given, those of the text behind them, after roll-backs and forks; steps that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dovetail.base.errors import InputError, SpecError, StateError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.proof.laws.programs import snapshot
from dovetail.state.pool import Layout, Pool

SPEC = from_yaml("""
width: 28
vocab: 62
layers:
- {repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12, position: {kind: rope, coords: 3, when: read}}, ffn: {hidden: 44}}
""")
IMAGE = torch.tensor([[1, 1 + y, 1 + x] for y in range(2) for x in range(3)])  # 2 × 3 patches behind one token of text
PROMPT = torch.cat([torch.zeros(1, 3, dtype=torch.long), IMAGE])  # 7 tokens, coordinates up to 3: text goes on at 4


def pool_of(layout: Layout = "contiguous", rows: int = 2, coords: int = 3) -> Pool:
    return Pool(SPEC, rows, 24, layout=layout, dtype=torch.float64, page=4, slack=3, coords=coords)


def text(pool: Pool, rows: list[int], n: int = 1) -> Tensor:
    return pool.step(rows, [n] * len(rows)).layout.coords


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_text_continues_behind_the_largest_coordinate(layout: Layout) -> None:
    pool = pool_of(layout)
    step = pool.step([0, 1], [7, 2], positions=[PROMPT, None])
    assert step.layout.order[0].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert step.layout.coords[0].equal(PROMPT)
    assert step.layout.coords[1, :2].tolist() == [[0, 0, 0], [1, 1, 1]]
    again = pool.step([0, 1], [2, 1])
    assert again.layout.order.tolist() == [[7, 8], [2, 0]]
    assert again.layout.coords[:, :, 0].tolist() == [[4, 5], [2, 0]]  # a delta of −3 in one row alone
    keys = again.views[0]["mixer"].frame.key_layout
    assert keys.order[0].tolist() == list(range(9))
    assert keys.coords[0].tolist() == [*PROMPT.tolist(), [4, 4, 4], [5, 5, 5]]


def test_flat_steps_have_the_same_coordinates() -> None:
    pool = pool_of()
    pool.step([1, 0], [2, 7], flat=True, positions=[None, PROMPT])
    layout = pool.step([0, 1], [1, 2], flat=True).layout
    assert layout.coords[:, 1].tolist() == [4, 2, 3]


def test_a_roll_back_into_the_image_and_a_fork_know_their_delta() -> None:
    pool = pool_of()
    pool.step([0], [7], positions=[PROMPT])
    text(pool, [0], 3)
    pool.fork(0, 1)
    assert pool.rollback(0, 4) == 4  # after (1, 1, 3): the largest coordinate is 3
    assert text(pool, [0]).tolist() == [[[4, 4, 4]]]
    assert text(pool, [1]).tolist() == [[[7, 7, 7]]]
    pool.rollback(0, 2)
    assert text(pool, [0]).tolist() == [[[2, 2, 2]]]
    pool.free(1)
    assert text(pool, [1]).tolist() == [[[0, 0, 0]]]


@pytest.mark.parametrize("ends", range(14))
def test_rolled_back_to_any_length_text_continues_as_if_no_more_had_come(ends: int) -> None:
    given = torch.cat([PROMPT, torch.full((1, 3), 4), IMAGE + 4])  # text, an image, text, an image
    whole, fewer = pool_of(rows=1), pool_of(rows=1)
    whole.step([0], [14], positions=[given])
    assert whole.rollback(0, ends) == ends
    if ends:
        fewer.step([0], [ends], positions=[given[:ends]])
    assert text(whole, [0], 2).equal(text(fewer, [0], 2))


def test_a_second_image_moves_the_delta_again() -> None:
    pool = pool_of()
    pool.step([0], [7], positions=[PROMPT])
    text(pool, [0])  # at 4
    pool.step([0], [6], positions=[IMAGE + 4])  # coordinates up to 7
    assert text(pool, [0]).tolist() == [[[8, 8, 8]]]
    assert pool.rollback(0, 8) == 8
    assert text(pool, [0]).tolist() == [[[5, 5, 5]]]


def test_wrong_positions_are_refused_and_change_nothing() -> None:
    pool = pool_of()
    before = snapshot(pool), [list(row) for row in pool.coordinates.deltas]  # type: ignore[union-attr]
    for positions in ([PROMPT], [PROMPT, PROMPT, None], [PROMPT[:6], None], [PROMPT[:, :2], None], [PROMPT.float(), None]):
        with pytest.raises(StateError, match="positions of"):
            pool.step([0, 1], [7, 2], positions=positions)
    with pytest.raises(StateError, match="do not fit"):
        pool.step([0, 1], [7, 30], positions=[PROMPT, None])
    assert (snapshot(pool), [list(row) for row in pool.coordinates.deltas]) == before  # type: ignore[union-attr]
    with pytest.raises(StateError, match="make it with `coords`"):
        pool_of(coords=0).step([0], [7], positions=[PROMPT])


def test_a_pool_counts_its_coordinates() -> None:
    assert pool_of().bytes() - pool_of(coords=0).bytes() == 2 * 24 * 3 * 8  # rows, tokens, coordinates, int64


def test_generation_and_the_front_door_take_positions() -> None:
    model = build(SPEC, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # initial weights are nearly uniform: positions would change no token
    ids = torch.arange(7) * 5 % 62
    tokens = model.generate(ids, 8, positions=PROMPT)
    assert isinstance(tokens, list)
    assert tokens != model.generate(ids, 8)
    whole = torch.cat([ids, torch.tensor(tokens)])
    at = torch.cat([PROMPT, (4 + torch.arange(8))[:, None].expand(8, 3)])
    with torch.no_grad():
        assert model(whole[None], positions=at[None])[0, 6:-1].argmax(-1).tolist() == tokens
    with pytest.raises(SpecError, match=r"have the shape \(6, 3\)"):
        model.generate(ids, 8, positions=IMAGE)
    with pytest.raises(InputError, match="give integers"):
        model(ids[None], positions=PROMPT)
