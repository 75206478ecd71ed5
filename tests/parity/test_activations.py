"""The hidden states and attention patterns of every family that holds a language model: those that transformers computes."""

from __future__ import annotations

import pytest
import torch
from draws import FIRST, Draw
from draws_more import MORE
from hf_pair import Pair, apart

from dovetail.core.fold import taps
from dovetail.look.tracer import trace

FAMILIES = {**FIRST, **MORE}
# what their `hidden_states` hold is no residual stream
ELSEWHERE: dict[str, str] = {}
CASES = [
    pytest.param(family, marks=[] if family in ("llama", "gpt2", "mixtral") else [pytest.mark.slow]) for family in FAMILIES
]


@pytest.mark.parametrize("family", CASES)
def test_activations_are_theirs(family: str) -> None:
    """`layers.i.in` is their i-th hidden state, `normed` their last, and `layers.i.mixer.pattern` their eager attention."""
    pair = Pair(family, FAMILIES[family](Draw(f"{family} 0")), 0)
    tokens = torch.tensor(pair.prompts([9, 9]))
    pair.theirs.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = pair.theirs(input_ids=tokens, output_hidden_states=True, output_attentions=True)
    ours = trace(
        pair.ours, tokens, "layers.*.in", "normed", *["*.mixer.pattern"] * any(".pattern" in a for a in taps(pair.spec))
    )
    depth = len(pair.spec.layers)
    if family not in ELSEWHERE:
        assert len(theirs.hidden_states) == depth + 1
        for i, want in enumerate(theirs.hidden_states):
            got = ours["normed"] if i == depth else ours[f"layers.{i}.in"]
            assert apart(got, want) <= 1e-5, f"hidden state {i}"
    with_pattern = [a for a in ours if a.endswith("mixer.pattern")]
    attentions = [a for a in theirs.attentions or () if a is not None]
    if attentions:
        assert len(attentions) == len(with_pattern)
    for address, want in zip(with_pattern, attentions, strict=False):
        assert apart(ours[address], want[..., : ours[address].shape[-1]]) <= 1e-5, address
