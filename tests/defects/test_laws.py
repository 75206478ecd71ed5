"""Defects of the laws themselves, and those that only other seeds of the laws showed."""

from __future__ import annotations

import pytest

from dovetail.io.spec import from_yaml
from dovetail.lawbook.case import Case
from dovetail.lawbook.cover import Factor, PairCover, all_factors, holds, meeting
from dovetail.lawbook.quantized import Int8, decoded_model, quantized_model
from dovetail.lawbook.sample import BLOCK
from dovetail.lawbook.suite import try_spec
from dovetail.quantization.recipe import tied_to

SHARED = """
width: 28
vocab: 62
layers:
- {repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}
- {mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}, shares: 0}
"""
STREAMING = """
width: 28
vocab: 62
layers:
- repeat: 2
  ffn: {hidden: 44}
  mixer:
    heads: 6
    kv_heads: 2
    head: 12
    prefix: 3
    position: streaming
    mask: [causal, {kind: window, size: 5, keep: 2}]
"""


def outcomes(spec: str, *laws: str) -> dict[str, str]:
    """law -> its state and detail."""
    return {row.law: f"{row.state} {row.detail}".strip() for row in try_spec(spec, laws)}


def test_a11_a_layer_that_shares_weights_rounds_its_inputs_in_the_dense_model_too():
    case = Case(from_yaml(SHARED))
    model = quantized_model(case, {"layers.0.ffn.up": Int8(dynamic=True)})
    assert tied_to(case.spec, "layers.0.ffn.up") == ["layers.2.ffn.up"]
    dense = Case(case.spec, model=decoded_model(case, model))
    case.same(Case(case.spec, model=model).run(), dense.run(), "quantized and dense")


def test_a12_streaming_positions_go_with_a_prefix():
    laws = ("tapped", "chunked", "fast", "declared", "gradient")
    assert outcomes(STREAMING, *laws) == dict.fromkeys(laws, "passed")


def test_a12_declarations_meet_every_field_of_the_part_above():
    position = f"{BLOCK}/mixer=attention/position=streaming"
    widens, prefix = holds(position, "widens"), Factor(f"{BLOCK}/mixer=attention/prefix", "3", False)
    norm = Factor(f"{BLOCK}/mixer=attention/v_norm", "rmsnorm", True)
    pairs = set(meeting(all_factors()))
    for other in (prefix, norm):
        assert (min(widens, other), max(widens, other)) in pairs


def test_a12_a_spec_with_the_declaration_and_the_field_is_found():
    position = f"{BLOCK}/mixer=attention/position=streaming"
    widens, prefix = holds(position, "widens"), Factor(f"{BLOCK}/mixer=attention/prefix", "3", False)
    cover = PairCover(0)
    cover.keep(from_yaml(STREAMING.replace("prefix: 3", "prefix: 0")))
    assert widens in cover.met
    assert prefix not in cover.met
    spec = cover.best(cover.pins(widens, prefix), {widens, prefix}, tries=40)
    assert spec is not None


@pytest.mark.parametrize("fields", ["heads: 2, kv_heads: 2", "heads: 2", "heads: 1, kv_heads: 1", "heads: 2, head: 14"])
def test_a22_null_may_mean_the_number_that_a_field_has(fields: str):
    spec = f"{{width: 28, vocab: 62, layers: [{{mixer: {{{fields}}}, ffn: {{hidden: 44}}}}]}}"
    assert outcomes(spec, "every_field") == {"every_field": "passed"}


def test_a22_a_field_that_changes_nothing_is_found(monkeypatch: pytest.MonkeyPatch):
    from dovetail.parts.mixer.attention import Attention

    monkeypatch.setattr(Attention, "groups", lambda self: self.heads)
    spec = "{width: 28, vocab: 62, layers: [{mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]}"
    assert outcomes(spec, "every_field") == {"every_field": "failed layers.0.mixer.kv_heads: changing it changes nothing"}
