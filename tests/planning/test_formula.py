"""The closed form of parameters and FSDP traffic is what the trace counts."""

from __future__ import annotations

import pytest

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.parallel.layout import Layout
from dovetail.planning.cost import Collective, RankGroup
from dovetail.planning.formula import Formula, fsdp_bytes
from dovetail.planning.trace import Setting, trace_step

LLAMA = """
width: 28
vocab: 62
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
"""
UNTIED = """
width: 32
vocab: 62
layers:
- mixer: {kind: mamba2, inner: 64, head: 8, groups: 2, state_size: 8}
  ffn: {hidden: 48}
- mixer: {heads: 4, kv_heads: 2, head: 8}
  ffn: {kind: mlp, hidden: 48}
head: {kind: lm, tied: false}
"""
SETTING = Setting(rows=1, length=16, micro_batches=3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", [Layout(shards=3), Layout(shards=5, tensor=2), Layout(shards=16, tensor=2)])
@pytest.mark.parametrize("text", [LLAMA, UNTIED])
def test_the_closed_form_is_the_trace(text: str, layout: Layout) -> None:
    spec = from_yaml(text)
    weights, traced = Formula(spec, 16).weights(layout), trace_step(spec, layout, SETTING)
    assert weights.stored == traced.parameters
    group = RankGroup(layout.shards, layout.tensor)
    counted = [traced.cost.traffic[Collective(kind, group)].bytes for kind in ("all-gather", "reduce-scatter")]
    assert list(fsdp_bytes(weights, layout, SETTING)) == counted


def test_a_weight_that_cannot_be_cut_names_its_path() -> None:
    with pytest.raises(SpecError, match=r"embed\.table: vocab = 62 cannot"):
        Formula(from_yaml(LLAMA), 16).weights(Layout(tensor=5))
