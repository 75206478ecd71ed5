"""Every layout of ranks trains as one rank does: the same losses, gradient norms and weights, with dropout, in float64."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from layout_jobs import SPECS, Trained, train_steps

from dovetail.base.errors import SpecError, UsageError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import on_meta
from dovetail.parallel.layout import Axes, Layout
from dovetail.parallel.mesh import RankError
from dovetail.parallel.pair import Pair
from dovetail.parallel.stage import crossing, cut_layers
from dovetail.training.ranks import ranks_of_run

STEPS = 3
AXES: dict[str, Axes] = {
    "ddp": {"shards": 1},
    "fsdp": {},
    "sequence": {"sequence": 2},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}
FOUR: dict[str, Axes] = {
    "hsdp": {"shards": 2},
    "ddp and tensor": {"shards": 1, "tensor": 2},
    "fsdp and sequence": {"sequence": 2},
    "fsdp and tensor": {"tensor": 2},
    "fsdp and pipeline": {"pipeline": 2},
    "sequence and tensor": {"sequence": 2, "tensor": 2},
    "sequence and pipeline": {"sequence": 2, "pipeline": 2},
    "tensor and pipeline": {"tensor": 2, "pipeline": 2},
    "pipeline of four": {"pipeline": 4},
}


@functools.cache
def alone(name: str, micro_batches: int) -> Trained:
    """The same steps on one rank."""
    return train_steps(SPECS[name], {}, STEPS, micro_batches=micro_batches)


def compare(ranks: Pair, name: str, axes: Axes) -> None:
    micro_batches = axes.get("pipeline", 1)
    found = ranks.run(train_steps, SPECS[name], axes, STEPS, "float64", "adamw", micro_batches)
    whole = alone(name, micro_batches)
    for one in found:
        assert one.losses == pytest.approx(whole.losses, abs=1e-11)
        assert one.norms == pytest.approx(whole.norms, abs=1e-10)
        assert one.held_out == pytest.approx(whole.held_out, abs=1e-11)
        assert one.tokens == whole.tokens == 96
        assert max((weight - whole.weights[path]).abs().max().item() for path, weight in one.weights.items()) < 1e-10
    assert set(whole.weights) == {path for one in found for path in one.weights}


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", AXES)
def test_two_ranks_train_a_llama_as_one(pair: Pair, layout: str) -> None:
    compare(pair, "llama", AXES[layout])


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["hybrid", "experts", "shared"])
def test_state_router_losses_and_values_cross_chunks_and_stages(pair: Pair, name: str) -> None:
    compare(pair, name, {"sequence": 2})
    compare(pair, name, {"pipeline": 2})


@pytest.mark.slow
@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks_train_as_one(layout: str) -> None:
    with Pair(4) as four:
        for name in SPECS:
            compare(four, name, FOUR[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_muon_on_two_ranks(pair: Pair, layout: str) -> None:
    whole = train_steps(SPECS["llama"], {}, 2, optimizer="muon")
    for one in pair.run(train_steps, SPECS["llama"], AXES[layout], 2, "float64", "muon"):
        assert one.losses == pytest.approx(whole.losses, abs=1e-6)
        # it orthogonalizes in float32, which turns a difference of 1e-16 in a gradient into one of 1e-7
        assert max((weight - whole.weights[path]).abs().max().item() for path, weight in one.weights.items()) < 1e-4


def test_layers_are_cut_where_the_largest_stage_is_smallest() -> None:
    spec = from_yaml(SPECS["llama"])
    assert cut_layers(spec, 2) == [range(2), range(2, 4)]
    assert cut_layers(spec, 4) == [range(i, i + 1) for i in range(4)]
    wide = spec.set("layers.0.ffn.hidden", 4000)
    assert cut_layers(wide, 2) == [range(1), range(1, 4)]
    assert cut_layers(spec, 3)[-1] == cut_layers(spec.set("vocab", 4000), 2)[-1] == range(3, 4)  # the head counts


def test_a_cut_sends_what_later_layers_read() -> None:
    model = on_meta(from_yaml(SPECS["shared"]))
    shared = [("layers.0.mixer", "k"), ("layers.0.mixer", "v")]
    assert [crossing(model, layer) for layer in range(4)] == [[], shared, shared, shared]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head.tied": True}, r"head\.out\.weight: is the same weight as embed\.table, which is on another stage of 2"),
        ({"mtp": [{}]}, "mtp: the stages of a pipeline do not compute multi-token prediction"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_path(change: dict[str, Any], message: str) -> None:
    spec = from_yaml(SPECS["llama"])
    for path, value in change.items():
        spec = spec.set(path, value)
    with pytest.raises(SpecError, match=message):
        cut_layers(spec, 2)
    with pytest.raises(SpecError, match="layers: 4 layers cannot be cut into 5 stages"):
        cut_layers(spec, 5)


@pytest.mark.slow
def test_a_pipeline_needs_micro_batches(pair: Pair) -> None:
    with pytest.raises(RankError, match="--micro-batches: 1 leave a stage without work; a pipeline of 2 stages needs as many"):
        pair.run(train_steps, SPECS["llama"], {"pipeline": 2}, 1)
    with pytest.raises(RankError, match=r"--micro-batches: of a pipeline must have equally many rows, and have \[2, 1, 1\]"):
        pair.run(train_steps, SPECS["llama"], {"pipeline": 2}, 1, "float64", "adamw", 3)


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


@pytest.mark.slow
def test_a_spec_that_needs_whole_rows_is_refused_with_its_path(pair: Pair) -> None:
    spec = SPECS["llama"].replace("layers:", "mtp: [{}]\nlayers:")
    with pytest.raises(RankError, match=r"mtp\.0: a sequence cannot be split"):
        pair.run(train_steps, spec, {"sequence": 2}, 1)
