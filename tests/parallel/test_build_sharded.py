"""Each rank allocates its own shard alone, and fills it with the values of the whole model, bit for bit."""

from typing import Any

import pytest
from construction_jobs import built
from shard_specs import WIRINGS

from dovetail.parallel.pair import Pair
from dovetail.parallel.placement import Cut, local_slices


def check(found: dict[str, Any]) -> None:
    assert found["different"] == found["untied"] == found["meta"] == []
    assert found["same names"]
    assert found["gap"] == 0.0


@pytest.mark.quick(12)
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", [name for name in WIRINGS if name != "patches"])
def test_a_shard_is_bit_equal_to_the_slice_of_the_whole(pair: Pair, name: str, data: int, tensor: int) -> None:
    for found in pair.run(built, WIRINGS[name], data, tensor):
        check(found)
        assert found["values"] < 0.75 * found["values whole"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_in_any_dtype(pair: Pair, dtype: str) -> None:
    for found in pair.run(built, WIRINGS["llama"], 1, 2, dtype):
        check(found)


@pytest.mark.slow
def test_tensor_parallel_and_fsdp_together() -> None:
    with Pair(ranks=4) as four:
        for name in ("llama", "relative", "one_kv_head", "encoder_decoder"):
            for found in four.run(built, WIRINGS[name], 2, 2):
                check(found)


def test_shards_cover_a_tensor_once() -> None:
    for rows, tensor, data in [(36, 2, 4), (12, 3, 5), (7, 1, 3), (2, 1, 4)]:
        cut = Cut(0, tensor) if tensor > 1 else None
        shards = [local_slices((rows, 5), cut, (t, tensor), (d, data)) for t in range(tensor) for d in range(data)]
        covered = [row for first, _ in shards for row in range(first.start, first.stop)]
        assert covered == list(range(rows))
        assert all(columns == slice(0, 5) for _, columns in shards)


def test_a_cut_of_another_dimension_leaves_the_rows_to_fsdp() -> None:
    assert local_slices((10, 6), Cut(1, 3), (2, 3), (1, 4)) == (slice(3, 6), slice(4, 6))
    assert local_slices((10, 6), Cut(0, 2), (3, 4)) == (slice(5, 10), slice(0, 6))  # two ranks hold the same rows
    assert local_slices((), None, (1, 2), (1, 2)) == ()
