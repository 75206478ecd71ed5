"""Every layout of ranks trains as one rank does: the same losses, gradient norms and weights, with dropout, in float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from layout_jobs import SPECS, Trained, train_steps

from dovetail.core.errors import UsageError
from dovetail.dist.layout import Axes, Layout
from dovetail.dist.mesh import RankError
from dovetail.dist.pair import Pair
from dovetail.training.ranks import ranks_of_run

STEPS = 3
AXES = {"ddp": {"shards": 1}, "fsdp": {}, "sequence": {"sequence": 2}, "tensor": {"tensor": 2}}
FOUR = {
    "hsdp": {"shards": 2},
    "ddp and tensor": {"shards": 1, "tensor": 2},
    "fsdp and sequence": {"sequence": 2},
    "fsdp and tensor": {"tensor": 2},
    "sequence and tensor": {"sequence": 2, "tensor": 2},
}


def compare(found: list[Trained], name: str, optimizer: str) -> None:
    alone = train_steps(SPECS[name], {}, STEPS, optimizer=optimizer)
    for one in found:
        assert one.losses == pytest.approx(alone.losses, abs=1e-11)
        assert one.norms == pytest.approx(alone.norms, abs=1e-10)
        assert one.tokens == alone.tokens == 96
        worst = max((weight - alone.weights[path]).abs().max().item() for path, weight in one.weights.items())
        # Muon orthogonalizes in float32, which turns differences of 1e-16 in a gradient into 1e-7
        assert worst < (1e-10 if optimizer == "adamw" else 1e-4)
    assert set(alone.weights) == {path for one in found for path in one.weights}


@pytest.mark.parametrize("layout", AXES)
@pytest.mark.parametrize("name", ["llama", "shared"])
def test_two_ranks_train_as_one(pair: Pair, name: str, layout: str) -> None:
    compare(pair.run(train_steps, SPECS[name], AXES[layout], STEPS), name, "adamw")


@pytest.mark.parametrize("name", ["hybrid", "experts"])
def test_state_and_router_losses_cross_chunks(pair: Pair, name: str) -> None:
    compare(pair.run(train_steps, SPECS[name], {"sequence": 2}, STEPS), name, "adamw")


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks_train_as_one(layout: str) -> None:
    with Pair(4) as four:
        for name, spec in SPECS.items():
            compare(four.run(train_steps, spec, FOUR[layout], STEPS), name, "adamw")


def test_a_batch_is_shared_out_over_replicas_and_shards_alone() -> None:
    layout = Layout.of(48, shards=2, sequence=2, tensor=3, pipeline=2)
    assert layout == Layout(pipeline=2, replicas=2, shards=2, sequence=2, tensor=3)
    assert layout.ranks == 48
    assert [layout.share(rank) for rank in (0, 5, 6, 12, 23, 24)] == [0, 0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tensor": 2}, "--tensor: 2 does not divide one process; start a multiple of 2 with torchrun"),
        ({"sequence": 3}, "--sequence: 3 does not divide one process"),
        ({"shards": 4}, "--shards: 4 does not divide one process"),
    ],
)
def test_an_axis_must_divide_the_processes(axes: Axes, message: str) -> None:
    with pytest.raises(UsageError, match=message), ranks_of_run(**axes):
        pass


def test_what_is_left_for_an_axis_is_said() -> None:
    with pytest.raises(UsageError, match="--shards: 4 does not divide 4 processes, of which 2 share the work of one"):
        Layout.of(4, shards=4, tensor=2)


def test_a_spec_that_needs_whole_rows_is_refused_with_its_path(pair: Pair) -> None:
    spec = SPECS["llama"].replace("layers:", "mtp: [{}]\nlayers:")
    with pytest.raises(RankError, match=r"mtp\.0: a sequence cannot be split"):
        pair.run(train_steps, spec, {"sequence": 2}, 1)
