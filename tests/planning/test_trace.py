"""A step that is traced on a fake process group is the step that real ranks run: the same parameters, collectives, FLOPs and
bytes, and the same tensors alive."""

from __future__ import annotations

import contextlib
import dataclasses as dc

import pytest
from trace_jobs import step

from dovetail.base.errors import UsageError
from dovetail.files.spec import from_yaml, load_spec
from dovetail.parallel.layout import Layout
from dovetail.parallel.pair import Pair
from dovetail.planning.cost import Collective, RankGroup
from dovetail.planning.stages import period_of, trace
from dovetail.planning.trace import Setting, fake_ranks, trace_step, traced_rank
from dovetail.planning.watch import Watch, gloo_staging
from dovetail.spec.fold import parameters

LLAMA = """
width: 28
vocab: 62
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
"""
HYBRID = """
width: 32
vocab: 62
layers:
- mixer: {kind: mamba2, inner: 64, head: 8, groups: 2, state_size: 8}
  ffn: {hidden: 48}
- mixer: {heads: 4, kv_heads: 2, head: 8, mask: [causal, {kind: window, size: 5}]}
  ffn: {hidden: 48}
head: {kind: lm, tied: false}
"""
SPECS = {"llama": LLAMA, "hybrid": HYBRID}
SETTING = Setting(rows=2, length=16, micro_batches=2)


LAYOUTS = [Layout(shards=2), Layout(tensor=2), Layout(sequence=2), Layout(replicas=2), Layout(pipeline=2)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_a_traced_step_is_the_step_of_real_ranks(pair: Pair, name: str, layout: Layout) -> None:
    if layout.sequence > 1 and name == "hybrid":
        pytest.skip("a recurrent mixer sends shapes, which fake tensors do not have")
    if layout.pipeline > 1 and name == "llama":
        pytest.skip("the embedding and the head are one weight, and on different stages")
    traced = trace_step(from_yaml(SPECS[name]), layout, SETTING, gloo_staging)
    pair.run(step, SPECS[name], layout, SETTING)  # the first step derives shapes
    real = pair.run(step, SPECS[name], layout, SETTING)[traced_rank(layout)]
    assert traced.parameters == real.parameters
    assert traced.cost.traffic == real.cost.traffic
    assert traced.cost.products == real.cost.products
    assert traced.memory[:3] == real.memory[:3]
    # which buffers of a collective are alive at once depends on when it ends
    assert traced.memory.peak == pytest.approx(real.memory.peak, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_layers_and_micro_batches_repeat_exactly(recompute: str) -> None:
    spec = from_yaml(LLAMA)
    deep = dc.replace(spec, layers=(*spec.layers[:1],) * 7)
    setting = dc.replace(SETTING, recompute=recompute)
    layout = Layout(shards=4, tensor=2)
    whole, few = trace_step(deep, layout, setting), trace(deep, layout, setting)
    assert (few.parameters, few.cost, few.memory) == (whole.parameters, whole.cost, whole.memory)


TILED = {
    "window": "mask: [causal, {kind: window, size: 70}]",
    "softcap": "softcap: 5.0",
    "strided": "mask: [causal, {kind: strided, step: 8}]",
}


@pytest.mark.parametrize("mixer", TILED.values(), ids=TILED)
def test_tiles_of_a_kind_cost_as_much_as_one_of_them(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs and memory equal those of a trace of every tile."""
    spec = from_yaml(f"{{width: 28, vocab: 62, layers: [{{mixer: {{heads: 6, kv_heads: 2, head: 12, {mixer}}}}}]}}")
    setting = dc.replace(SETTING, length=1300)
    few = trace_step(spec, Layout(), setting)
    monkeypatch.setattr(Watch, "one_of_each", lambda _: contextlib.nullcontext())
    whole = trace_step(spec, Layout(), setting)
    assert (few.cost, few.memory, few.peaks) == (whole.cost, whole.memory, whole.peaks)


def test_a_window_is_traced_as_quickly_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dovetail plan mistral-tiny` ran every tile of 8,192 tokens, for minutes."""
    runs = list[int]()
    count = Watch._count
    monkeypatch.setattr(Watch, "_count", lambda *args: (runs.append(1), count(*args))[1])
    numbers: list[int] = []
    for length in (1024, 4096):
        runs.clear()
        trace_step(load_spec("mistral-tiny"), Layout(), dc.replace(SETTING, length=length))
        numbers.append(len(runs))
    assert numbers[1] < 1.2 * numbers[0] < 5000


@pytest.mark.slow
def test_a_pattern_of_layers_and_a_remainder_repeat_exactly() -> None:
    a, b = from_yaml(HYBRID).layers
    deep = dc.replace(from_yaml(HYBRID), layers=(a, b) * 6 + (a,))
    assert period_of(deep.layers) == 2
    layout, setting = Layout(shards=4), dc.replace(SETTING, micro_batches=1)
    whole, few = trace_step(deep, layout, setting), trace(deep, layout, setting)
    assert (few.parameters, few.cost, few.memory) == (whole.parameters, whole.cost, whole.memory)


def test_one_rank_stores_everything_and_sends_nothing() -> None:
    spec = from_yaml(LLAMA)
    traced = trace_step(spec, Layout(), dc.replace(SETTING, precision="fp32"))
    assert traced.parameters == parameters(spec)
    assert traced.memory.gradients == 4 * parameters(spec)
    assert traced.cost.communicated == 0


def test_fsdp_gathers_and_reduces_every_weight_once_per_pass() -> None:
    """Known numbers: bf16 weights are gathered for the forward pass and, but for those outside layers, for the backward pass;
    gradients are reduced in float32."""
    spec = from_yaml(LLAMA)
    traced = trace_step(spec, Layout(shards=4), dc.replace(SETTING, micro_batches=1))
    group = RankGroup(4, 1)
    gathered, reduced = (traced.cost.traffic[Collective(kind, group)].bytes for kind in ("all-gather", "reduce-scatter"))
    root = 62 * 28 + 28  # the tied table and the last norm, whose rows FSDP pads to a multiple of 4
    layers = parameters(spec) - root
    padded = 64 * 28 + 28
    assert gathered == 2 * (2 * layers + padded)
    assert reduced == 4 * (layers + padded)


def test_more_ranks_make_smaller_shards() -> None:
    spec = from_yaml(LLAMA.replace("28", "64"))
    few, many = (trace_step(spec, Layout(shards=n), SETTING) for n in (2, 8))
    assert few.parameters // 4 <= many.parameters < few.parameters // 3  # FSDP rounds up to whole rows
    assert many.memory.optimizer < few.memory.optimizer / 3


def test_a_second_process_group_is_refused() -> None:
    with fake_ranks(4), pytest.raises(UsageError, match="process group"), fake_ranks(2):
        pass
