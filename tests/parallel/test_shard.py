"""One model over two ranks equals one rank: outputs and all gradients, for every thing sharding can get wrong."""

import pytest
from rank_jobs import (
    BUGS,
    by_head_tiles,
    compare_with_bug,
    compiled_block,
    compiled_loss,
    decode,
    error_of,
    look,
    low_precision,
    tensor_over_two_axes,
    train,
)
from shard_specs import ROWS_ONLY, WIRINGS

from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.parallel.pair import Pair
from dovetail.parallel.shard import units
from dovetail.proof.laws.sharded import compare_sharded

RELATION = 1e-9


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", WIRINGS | ROWS_ONLY)
@pytest.mark.parametrize("how", ["tp", "fsdp"])
def test_whole_equals_sharded(pair: Pair, name: str, how: str) -> None:
    found = compare_sharded(pair, (WIRINGS | ROWS_ONLY)[name], 0, [how])[how]
    assert not found.reason
    assert len(found.gaps) > 2 * 8
    assert found.worst[1] < RELATION, found.worst


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("bug", "wiring", "how"),
    [
        ("gradients are not summed where a region begins", "llama", "tp"),
        ("gradients are not summed where a region begins", "qk_norm", "tp"),
        ("gradients are not summed where a region begins", "one_kv_head", "tp"),
        ("gradients are not summed where a region begins", "encoder_decoder", "tp"),
        ("outputs are not summed where a region ends", "llama", "tp"),
        ("statistics of one rank alone", "qk_norm_whole", "tp"),
        ("a bias is added by every rank", "sink_gate_bias", "tp"),
        ("a bias is added by every rank", "glu_bias_parallel", "tp"),
        ("every rank takes the first piece", "alibi", "tp"),
        ("every rank takes the first piece", "by_head", "tp"),
        ("gathered keys have no gradient", "llama", "sequence"),
        ("keys stand in another order", "llama", "sequence"),
    ],
)
def test_planted_bugs_are_seen(pair: Pair, bug: str, wiring: str, how: str) -> None:
    for found in pair.run(compare_with_bug, bug, WIRINGS[wiring], how):
        assert found.worst[1] > 1e-3


def test_every_planted_bug_is_tried() -> None:
    marks = [mark for mark in test_planted_bugs_are_seen.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} | {"no bug"} == set(BUGS)


def test_no_bug_is_seen_where_none_is_planted(pair: Pair) -> None:
    assert all(found.worst[1] < RELATION for found in pair.run(compare_with_bug, "no bug", WIRINGS["llama"], "tp"))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama", [1, 1]), ("relative", [2]), ("encoder_decoder", [1, 1, 1, 1]), ("encoder_decoder_relative", [2, 2])],
)
def test_layers_that_share_a_weight_are_one_unit(name: str, sizes: list[int]) -> None:
    assert [len(unit) for unit in units(build(from_yaml(WIRINGS[name]), device="meta"))] == sizes


@pytest.mark.quick(1)
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", ["llama", "relative"])
def test_training_goes_the_same_way(pair: Pair, name: str, data: int, tensor: int) -> None:
    for gaps in pair.run(train, WIRINGS[name], data, tensor):
        assert max(gaps.values()) < 1e-8, max(gaps, key=gaps.__getitem__)


@pytest.mark.slow
def test_two_axes_on_four_ranks() -> None:
    with Pair(ranks=4) as four:
        for name in ("llama", "one_kv_head", "encoder"):
            for gaps in four.run(train, WIRINGS[name], 2, 2):
                assert max(gaps.values()) < 1e-8, (name, max(gaps, key=gaps.__getitem__))


@pytest.mark.slow
def test_fewer_key_heads_than_ranks() -> None:
    with Pair(ranks=4) as four:
        by_four = WIRINGS["llama"].replace("vocab: 62", "vocab: 64")
        spec = by_four.replace("heads: 6, kv_heads: 2", "heads: 8, kv_heads: 2")
        found = compare_sharded(four, spec, 0, ["tp"])["tp"]
        assert not found.reason
        assert found.worst[1] < RELATION, found.worst
        odd = compare_sharded(four, by_four, 0, ["tp"])["tp"]
        assert odd.reason.startswith("layers.0.mixer.q.weight: heads = 6 cannot be cut over 4")


@pytest.mark.parametrize("name", ["llama", "one_kv_head", "packed", "encoder_decoder"])
def test_decoding_remembers_own_heads_only(pair: Pair, name: str) -> None:
    assert max(pair.run(decode, WIRINGS[name])) < 1e-9


def test_tiles_are_skipped_by_head_number(pair: Pair) -> None:
    assert max(pair.run(by_head_tiles, WIRINGS["by_head"])) < 1e-9


def test_layers_compute_in_a_lower_precision(pair: Pair) -> None:
    for whole, low, dtypes in pair.run(low_precision, WIRINGS["llama"]):
        assert low != whole
        assert abs(low - whole) < 0.03 * whole
        assert dtypes == {"torch.float32"}


def test_inside_and_outside_of_a_run(pair: Pair) -> None:
    for rank, seen in enumerate(pair.run(look, WIRINGS["llama"])):
        assert seen["same names"]
        assert seen["all DTensors"]
        assert seen["tied"]
        assert seen["outside"] == "DTensor"
        assert seen["inside"] == ("Tensor", (36, 28))  # three of six heads of 12
        assert seen["head numbers"] == [3 * rank, 3 * rank + 1, 3 * rank + 2]
        assert 0.5 < seen["bytes"] / seen["bytes whole"] < 0.6  # all but the table and the norms


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["qk_norm", "qk_norm_whole", "sink_gate_bias", "one_kv_head"])
def test_a_block_compiles_as_one_graph(pair: Pair, name: str, backend: str) -> None:
    for gaps in pair.run(compiled_block, WIRINGS[name], backend, timeout=240):
        assert len(gaps) > 10
        assert max(gaps.values()) < 1e-12, max(gaps, key=gaps.__getitem__)


@pytest.mark.slow
def test_a_loss_compiles_as_one_graph(pair: Pair) -> None:
    assert max(pair.run(compiled_loss, WIRINGS["llama"], timeout=240)) < 1e-12


def test_tensor_parallel_takes_one_axis(pair: Pair) -> None:
    for name, text in pair.run(error_of, tensor_over_two_axes, WIRINGS["llama"]):
        assert name == "RankError"
        assert "one axis" in text
