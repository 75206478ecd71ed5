"""Pools: exactly the declared memory, refused steps that change nothing, roll-back, forks, encoder sources."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.base.errors import StateError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mixer
from dovetail.nn.layout import TokenLayout
from dovetail.spec.fold import state_values
from dovetail.spec.part import KINDS
from dovetail.state.pool import Layout, Pool

FULL = from_yaml("width: 28\nvocab: 62\nlayers: [{repeat: 3, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]\n")
MIXED = FULL.set("layers.1.mixer.mask", ["causal", {"kind": "window", "size": 5, "keep": 1}])
SEQ2SEQ = from_yaml("""
width: 28
vocab: 62
encoder: {width: 24, vocab: 62, head: null, layers: [{mixer: {heads: 2, mask: full}}]}
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, cross: {kind: cross_attention, heads: 4, kv_heads: 2, head: 10}}]
""")
LAYOUTS: tuple[Layout, ...] = ("contiguous", "paged", "ring")
TOKENS = torch.arange(40) * 7 % 62


def pool_of(spec: Any = MIXED, layout: Layout = "contiguous", rows: int = 3, capacity: int = 24, **how: Any) -> Pool:
    return Pool(spec, rows, capacity, layout=layout, dtype=torch.float64, **{"page": 4, "slack": 3, **how})


@pytest.fixture(scope="module")
def model() -> ModelModule:
    return build(MIXED, dtype=torch.float64)


def feed(model: ModelModule, pool: Pool, row: int, tokens: Tensor) -> Tensor:
    """New tokens for one row; the logits of the last."""
    step = pool.step([row], [len(tokens)])
    with torch.no_grad():
        return model(tokens[None], Ctx(layout=step.layout, views=step.views))[0, -1]


def alone(model: ModelModule, tokens: Tensor) -> Tensor:
    return feed(model, pool_of(capacity=40), 0, tokens)


# -- room


def test_bytes_are_what_is_declared() -> None:
    each = 2 * 2 * 12 * 8  # key and value, 2 heads of 12, float64
    assert pool_of(FULL).bytes() == 3 * 24 * 3 * each == 3 * state_values(FULL, 24) * 8
    assert pool_of(FULL, "paged").bytes() == pool_of(FULL).bytes()
    assert pool_of(FULL, "paged", pages=5).bytes() == 5 * 4 * 3 * each
    assert pool_of(MIXED, "ring").bytes() == 3 * (24 * 2 + 1 + 5 + 3) * each  # two whole layers, one ring
    assert pool_of(MIXED, "ring", capacity=1000).bytes() == 3 * (1000 * 2 + 9) * each
    assert pool_of(FULL, sharded={"kv_heads": 2}).bytes() * 2 == pool_of(FULL).bytes()


def test_a_source_has_slots_of_its_own() -> None:
    with_source, without = pool_of(SEQ2SEQ, source=7).bytes(), pool_of(SEQ2SEQ, source=0).bytes()
    assert with_source - without == 3 * 7 * 2 * (2 * 2 * 10) * 8  # rows, tokens, layers, (key and value, heads, head), bytes


def test_a_bidirectional_model_has_no_decode_state() -> None:
    assert pool_of(FULL.set("layers.*.mixer.mask", "full")).bytes() == 0


# -- refusals


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_pool_refuses_and_stays_as_it_was(model: ModelModule, layout: Layout) -> None:
    pool = pool_of(layout=layout)
    feed(model, pool, 0, TOKENS[:22])
    full = r"row 0 (holds 22 of 24 entries; 3 more do not fit|would hold 25 tokens; the limit is 24)"
    with pytest.raises(StateError, match=full):
        pool.step([1, 0], [1, 3])
    assert pool.lengths == [22, 0, 0]
    torch.testing.assert_close(feed(model, pool, 0, TOKENS[22:24]), alone(model, TOKENS[:24]))


def test_a_pool_without_pages_continues_after_a_row_is_freed(model: ModelModule) -> None:
    pool = pool_of(layout="paged", pages=6)
    feed(model, pool, 0, TOKENS[:16])
    feed(model, pool, 1, TOKENS[:8])
    with pytest.raises(StateError, match="row 2: the step needs 1 or more pages, and 0 of 6 are free"):
        pool.step([2], [1])
    pool.free(1)
    assert pool.lengths == [16, 0, 0]
    torch.testing.assert_close(feed(model, pool, 2, TOKENS[5:12]), alone(model, TOKENS[5:12]))


def test_a_fork_that_was_refused_a_page_is_unchanged(model: ModelModule) -> None:
    pool = pool_of(layout="paged", pages=3)
    feed(model, pool, 0, TOKENS[:6])
    pool.fork(0, 1)
    with pytest.raises(StateError, match="row 1: the step needs 2 or more pages, and 1 of 3 are free"):
        pool.step([1], [4])  # a page to write to, and one more: only one is left
    torch.testing.assert_close(feed(model, pool, 1, TOKENS[6:8]), alone(model, TOKENS[:8]))


def books(pool: Pool) -> list[Any]:
    """Everything a pool knows beside its stores."""
    slots = [{name: repr(value) for name, value in vars(group.slots).items()} for group in pool.groups.values()]
    return [pool.lengths[:], pool.written[:], pool.source_lengths[:], [len(marks) for marks in pool.marks], slots]


def test_a_refused_step_keeps_no_page_of_any_row(model: ModelModule) -> None:
    pool = pool_of(layout="paged", pages=5)
    feed(model, pool, 0, TOKENS[:8])
    feed(model, pool, 1, TOKENS[:8])
    before = books(pool)
    with pytest.raises(StateError, match="row 1: the step needs 2 or more pages, and 1 of 5 are free"):
        pool.step([0, 1], [1, 1])
    assert books(pool) == before
    torch.testing.assert_close(feed(model, pool, 1, TOKENS[8:10]), alone(model, TOKENS[:10]))


def test_forks_of_a_row_that_was_refused_a_step_share_no_page_they_write_to(model: ModelModule) -> None:
    pool = pool_of(layout="paged", pages=5)
    feed(model, pool, 0, TOKENS[:8])
    feed(model, pool, 2, TOKENS[:4])
    with pytest.raises(StateError, match="row 2"):
        pool.step([0, 2], [1, 8])
    pool.fork(0, 1)
    feed(model, pool, 0, TOKENS[20:22])
    feed(model, pool, 1, TOKENS[30:32])
    for row, begin in ((0, 20), (1, 30)):
        seen = torch.cat([TOKENS[:8], TOKENS[begin : begin + 2], TOKENS[:1]])
        torch.testing.assert_close(feed(model, pool, row, TOKENS[:1]), alone(model, seen))


def test_no_group_changes_where_another_refuses() -> None:
    """The blocks of sparse attention lie in a store of their own, which can be full while there are pages."""
    spec = from_yaml("width: 28\nvocab: 62\nlayers: [{repeat: 2, mixer: nsa}]\n")
    pool = pool_of(spec, "paged", capacity=70)
    (blocks,) = [group for group in pool.groups.values() if group.per == "block"]
    assert blocks.slots.total == 3 * (70 // blocks.block)
    blocks.slots = type(blocks.slots)(3, 1)  # room for one block
    before = books(pool)
    with pytest.raises(StateError, match="row 1 holds 0 of 1 entries"):
        pool.step([0, 1], [1, 2 * blocks.block])
    assert books(pool) == before


def test_an_admission_is_refused_for_all_rows_or_none() -> None:
    pool = pool_of(SEQ2SEQ, source=7)
    with pytest.raises(StateError, match="row 1 holds 0 of 7 entries; 8 more do not fit"):
        pool.admit([0, 1], [3, 8])
    assert pool.source_lengths == [0, 0, 0]


@pytest.mark.parametrize(
    ("rows", "new", "says"),
    [
        ([], [], "give each row a count of tokens"),
        ([0], [1, 1], "give each row a count of tokens"),
        ([0, 1], [1, -1], "give each row a count of tokens, 0 or more"),
        ([0, 1], [0, 0], "the step has no new token"),
        ([0, 1, 0], [1, 1, 1], "a row is listed twice"),
    ],
)
def test_steps_that_make_no_sense(rows: list[int], new: list[int], says: str) -> None:
    pool = pool_of()
    before = books(pool)
    with pytest.raises(StateError, match=says):
        pool.step(rows, new)
    assert books(pool) == before


@pytest.mark.parametrize("row", [-1, 3, 99])
def test_a_row_that_is_not_there(row: int) -> None:
    with pytest.raises(StateError, match=f"row {row} is not in the pool; its rows are 0 to 2"):
        pool_of().step([0, row], [1, 1])


@pytest.mark.parametrize("n", [-1, 6])
def test_no_row_rolls_back_to_more_tokens_than_it_had(n: int) -> None:
    pool = pool_of()
    pool.step([0], [5])
    with pytest.raises(StateError, match=f"row 0 holds 5 tokens; it cannot return to length {n}"):
        pool.rollback(0, n)


@pytest.mark.parametrize(("door", "rows"), [("rollback", (3, 0)), ("free", (3,)), ("fork", (0, 3)), ("fork", (0, -1))])
def test_every_method_checks_its_row(door: str, rows: tuple[int, ...]) -> None:
    with pytest.raises(StateError, match="is not in the pool; its rows are 0 to 2"):
        getattr(pool_of(), door)(*rows)


# -- going back


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_without_a_window_every_roll_back_is_exact(model: ModelModule, layout: Layout) -> None:
    pool = pool_of(layout=layout)
    feed(model, pool, 0, TOKENS[:20])
    assert pool.rollback(0, 6) == 6
    assert pool.lengths[0] == 6
    torch.testing.assert_close(feed(model, pool, 0, TOKENS[30:34]), alone(model, torch.cat([TOKENS[:6], TOKENS[30:34]])))


@pytest.mark.parametrize(("to", "reached"), [(17, 17), (16, 12), (12, 12), (11, 0), (0, 0)])
def test_a_ring_rolls_back_within_its_slack_then_to_a_mark_then_to_the_start(model: ModelModule, to: int, reached: int) -> None:
    pool = pool_of(layout="ring")
    feed(model, pool, 0, TOKENS[:12])
    pool.mark(0)
    feed(model, pool, 0, TOKENS[12:20])
    assert pool.rollback(0, to) == pool.lengths[0] == reached
    tokens = torch.cat([TOKENS[:reached], TOKENS[30:33]])
    torch.testing.assert_close(feed(model, pool, 0, TOKENS[30:33]), alone(model, tokens))


def test_a_ring_that_was_rolled_back_does_not_read_overwritten_tokens(model: ModelModule) -> None:
    """Roll back from 20 to 17, and then to 16: token 12, which 16 needs, lies in the slot that token 20 − 1 took."""
    pool = pool_of(layout="ring")
    feed(model, pool, 0, TOKENS[:12])
    pool.mark(0)
    feed(model, pool, 0, TOKENS[12:20])
    assert [pool.rollback(0, n) for n in (18, 17, 16)] == [18, 17, 12]
    torch.testing.assert_close(feed(model, pool, 0, TOKENS[30:33]), alone(model, torch.cat([TOKENS[:12], TOKENS[30:33]])))


def test_a_mark_stores_which_tokens_of_its_ring_were_overwritten(model: ModelModule) -> None:
    pool = pool_of(layout="ring")
    feed(model, pool, 0, TOKENS[:20])
    pool.rollback(0, 18)
    pool.mark(0)  # of 18 tokens, in a ring into which 20 were written
    feed(model, pool, 0, TOKENS[20:26])
    assert pool.rollback(0, 18) == 18
    assert pool.rollback(0, 16) == 0


def test_a_fork_copies_how_far_its_ring_was_written(model: ModelModule) -> None:
    pool = pool_of(layout="ring")
    feed(model, pool, 0, TOKENS[:20])
    pool.rollback(0, 18)
    pool.fork(0, 1)
    assert pool.rollback(1, 16) == 0


def test_a_fork_has_the_marks_of_its_row(model: ModelModule) -> None:
    pool = pool_of(layout="ring")
    feed(model, pool, 0, TOKENS[:12])
    pool.mark(0)
    feed(model, pool, 0, TOKENS[12:20])
    pool.fork(0, 1)
    assert pool.rollback(1, 14) == 12
    torch.testing.assert_close(feed(model, pool, 1, TOKENS[30:33]), alone(model, torch.cat([TOKENS[:12], TOKENS[30:33]])))
    pool.free(1)
    assert pool.marks[1] == []


def test_a_mark_beyond_the_reached_length_is_dropped(model: ModelModule) -> None:
    pool = pool_of(layout="ring")
    for begin in (0, 10, 15):
        feed(model, pool, 0, TOKENS[begin : begin + 5 + 5 * (begin == 0)])
        pool.mark(0)
    assert [mark.length for mark in pool.marks[0]] == [10, 15, 20]
    assert pool.rollback(0, 16) == 15
    assert [mark.length for mark in pool.marks[0]] == [10, 15]


def test_marks_cost_nothing_where_going_back_is_exact() -> None:
    pool = pool_of()
    pool.step([0], [5])
    pool.mark(0)
    assert pool.marks[0] == []


# -- two ways, and the end


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_rows_of_a_fork_continue_independently(model: ModelModule, layout: Layout) -> None:
    pool = pool_of(layout=layout)
    feed(model, pool, 0, TOKENS[:14])
    feed(model, pool, 2, TOKENS[3:9])  # the entries of the second row are freed
    pool.fork(0, 2)
    assert pool.lengths == [14, 0, 14]
    for row, begin in ((2, 20), (0, 30), (2, 23), (0, 33)):
        feed(model, pool, row, TOKENS[begin : begin + 3])
    for row, begin in ((0, 30), (2, 20)):
        seen = torch.cat([TOKENS[:14], TOKENS[begin : begin + 6], TOKENS[:1]])
        torch.testing.assert_close(feed(model, pool, row, TOKENS[:1]), alone(model, seen))


def test_a_fork_onto_itself_changes_nothing(model: ModelModule) -> None:
    pool = pool_of(layout="paged")
    feed(model, pool, 0, TOKENS[:6])
    pool.fork(0, 0)
    torch.testing.assert_close(feed(model, pool, 0, TOKENS[6:7]), alone(model, TOKENS[:7]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_freed_row_starts_again(model: ModelModule, layout: Layout) -> None:
    pool = pool_of(layout=layout)
    feed(model, pool, 0, TOKENS[:20])
    pool.free(0)
    assert pool.lengths[0] == 0
    torch.testing.assert_close(feed(model, pool, 0, TOKENS[9:13]), alone(model, TOKENS[9:13]))


# -- frames


def test_even_steps_read_by_slices_and_ragged_ones_by_slots() -> None:
    pool = pool_of(FULL)
    view = pool.step([0, 1, 2], [4, 4, 4]).views[0]["mixer"]
    assert view.frame.write is None  # nothing need be named
    assert view.frame.slice_rows == (3, 24, 4)
    ragged = pool.step([0, 1], [2, 1])
    assert ragged.layout.order.tolist() == [[4, 5], [4, 0]]
    assert ragged.layout.real.tolist() == [[True, True], [True, False]]
    frame = ragged.views[0]["mixer"].frame
    assert frame.read is not None
    assert frame.write.tolist() == [4, 5, 28, 72]  # padding goes to the bin, one past the 72 slots
    assert frame.key_layout.seg.tolist() == [[0] * 6, [0] * 5 + [-1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_key_layout_that_names_its_first_order_has_all_after_it(layout: Layout) -> None:
    """Kernels take tiles at equal distances for equal then, which the keys of a ring that has wrapped are not."""
    pool, named = pool_of(layout=layout, rows=2), 0
    for new in ((5, 5), (1, 1), (2, 2), (1, 1), (3, 3), (1, 2), (1, 1), (4, 3)):
        step = pool.step([0, 1], list(new))
        for view in (views["mixer"] for views in step.views):
            keys = view.frame.key_layout
            if keys.start is not None:
                named += 1
                assert torch.equal(keys.order, torch.arange(keys.start, keys.start + keys.n).expand_as(keys.order)), new
    assert named > 3


def test_layers_of_one_window_share_a_frame() -> None:
    views = pool_of(MIXED, "ring").step([0], [3]).views
    frames = [view["mixer"].frame for view in views]
    assert frames[0] is frames[2]
    assert frames[0] is not frames[1]


def test_a_flat_step_mixes_prefill_and_decoding() -> None:
    pool = pool_of(FULL)
    pool.step([1], [5])
    step = pool.step([0, 1], [3, 1], flat=True)
    assert step.layout.order.tolist() == [0, 1, 2, 5]
    frame = step.views[0]["mixer"].frame
    assert frame.key_layout.order.tolist() == [0, 1, 2, *range(6)]
    assert frame.key_layout.row.tolist() == [0] * 3 + [1] * 6


def test_a_source_is_put_once_and_forked() -> None:
    model, pool = build(SEQ2SEQ, dtype=torch.float64), pool_of(SEQ2SEQ, source=7)
    source = TOKENS[None, :7]
    with torch.no_grad():
        encoder_output, layout = model.encode(source, Ctx(layout=TokenLayout.whole(1, 7)))
        model.fill(Ctx(layout=layout, encoder_output=encoder_output, encoder_layout=layout), pool.admit([0], [7]))
        want = model(
            TOKENS[None, :4], Ctx(layout=TokenLayout.whole(1, 4), encoder_output=encoder_output, encoder_layout=layout)
        )[0, -1]
    pool.fork(0, 2)
    for row in (0, 2):
        torch.testing.assert_close(feed(model, pool, row, TOKENS[:4]), want)
    assert pool.source_lengths == [7, 0, 7]
    pool.free(2)
    assert pool.source_lengths == [7, 0, 0]


@pytest.mark.parametrize("mixer", sorted(kind for kind, cls in KINDS.items() if issubclass(cls, Mixer) and cls.recurrent))
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_row_without_a_token_in_a_flat_step_keeps_its_recurrent_state(mixer: str, empty: int) -> None:
    spec = from_yaml(f"width: 32\nvocab: 62\nlayers: [{{repeat: 2, mixer: {mixer}}}]\n")
    model, pool = build(spec, dtype=torch.float64), pool_of(spec)
    prompts = [TOKENS[begin : begin + 5] for begin in (0, 10, 20)]
    for row, prompt in enumerate(prompts):
        feed(model, pool, row, prompt)
    new = [0 if row == empty else 2 for row in range(3)]
    step = pool.step([0, 1, 2], new, flat=True)
    with torch.no_grad():
        model(TOKENS[30:34], Ctx(layout=step.layout, views=step.views))
        want = model(torch.cat([prompts[empty], TOKENS[:1]])[None], Ctx(layout=TokenLayout.whole(1, 6)))[0, -1]
    torch.testing.assert_close(feed(model, pool, empty, TOKENS[:1]), want)


def test_a_flat_step_may_have_fewer_tokens_than_rows() -> None:
    """Angles that depend on the length are computed per row, though most rows have no token here."""
    spec = FULL.set("layers.*.mixer.position", {"kind": "rope", "scaling": {"kind": "dynamic_ntk", "original": 4}})
    model, pool = build(spec, dtype=torch.float64), pool_of(spec)
    step = pool.step([0, 1, 2], [0, 0, 1], flat=True)
    with torch.no_grad():
        got = model(TOKENS[:1], Ctx(layout=step.layout, views=step.views))
        want = model(TOKENS[None, :1], Ctx(layout=TokenLayout.whole(1, 1)))[0]
    torch.testing.assert_close(got, want)


# -- tokens that see each other


def test_the_tokens_of_a_prefix_arrive_in_one_step() -> None:
    pool = pool_of(FULL.set("layers.2.mixer.mask", {"any": ["causal", {"kind": "prefix", "length": 6}]}))
    assert pool.ahead == 6
    pool.step([0, 1], [4, 7])
    with pytest.raises(StateError, match=r"row 0 holds 4 tokens, and the first 6 of a row see each other \(roll it back to 0"):
        pool.step([0], [3])
    pool.step([0, 1], [0, 3])
    assert pool.rollback(1, 6) == 6
    assert pool.rollback(1, 5) == 0  # inside the prefix: only the empty row can be continued
    assert pool.rollback(0, 4) == 4  # nothing is forgotten
    assert pool.rollback(0, 3) == 0
    pool.step([0, 1], [6, 9])
    pool.step([0, 1], [1, 1])
