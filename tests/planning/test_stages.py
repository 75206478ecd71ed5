"""Pipeline stages: micro-batches beyond those that fill the pipeline cost the same, and idle time is that of the schedule."""

from __future__ import annotations

import pytest

from dovetail.files.spec import from_yaml
from dovetail.parallel.layout import Layout
from dovetail.planning.stages import bubble, trace_stages
from dovetail.planning.trace import Setting, trace_step

SPEC = """
width: 28
vocab: 62
head: {kind: lm, tied: false}
layers: [{repeat: 4, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
"""


@pytest.mark.slow
def test_a_step_of_many_micro_batches_is_traced_as_two_of_few() -> None:
    spec, layout, setting = from_yaml(SPEC), Layout(pipeline=2, shards=2), Setting(1, 16, 7)
    whole, few = trace_step(spec, layout, setting), trace_stages(spec, layout, setting)
    assert few.parameters == whole.parameters
    assert few.cost.traffic == whole.cost.traffic
    assert few.cost.products == whole.cost.products
    assert few.memory == whole.memory


def test_idle_time_of_1f1b() -> None:
    assert bubble(Layout(pipeline=16), 16) == pytest.approx(15 / 16)
    assert bubble(Layout(tensor=8), 4) == 0
