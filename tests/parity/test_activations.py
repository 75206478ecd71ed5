"""The hidden states and attention patterns of every family that holds a language model: those that transformers computes."""

from __future__ import annotations

import pytest
import torch
from draws import FIRST, Draw
from draws_more import MORE
from hf_pair import Pair, apart

from dovetail.look.tracer import trace
from dovetail.spec.fold import taps

FAMILIES = {**FIRST, **MORE}
AFTER = {"mamba", "mamba2"}  # their hidden state i is the residual stream after layer i, not before it
UNMASKED = {"falcon"}  # asked for attentions, transformers 5.22 applies no causal mask, and its logits change
CASES = [
    pytest.param(family, marks=[] if family in ("llama", "gpt2", "mixtral") else [pytest.mark.slow]) for family in FAMILIES
]


@pytest.mark.parametrize("family", CASES)
def test_activations_are_theirs(family: str) -> None:
    """`layers.i.in` is their i-th hidden state, `normed` their last, and `layers.i.mixer.pattern` their eager attention."""
    pair = Pair(family, FAMILIES[family](Draw(f"{family} 0")), 0)
    tokens, depth = torch.tensor(pair.prompts([9, 9])), len(pair.spec.layers)
    pair.theirs.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = pair.theirs(input_ids=tokens, output_hidden_states=True)
        asked = pair.theirs(input_ids=tokens, output_attentions=True)
    patterns = ["*.mixer.pattern"] * any(address.endswith(".pattern") for address in taps(pair.spec))
    last = f"layers.{depth - 1}.after_{pair.spec.layers[-1].steps()[-1][0]}"
    ours = trace(pair.ours, tokens, "layers.*.in", last, "normed", *patterns)
    points = [f"layers.{i}.in" for i in range(depth)]
    points = [*points[1:], last] if family in AFTER else points
    for address, want in zip([*points, "normed"], theirs.hidden_states, strict=True):
        assert apart(ours[address], want) <= 1e-5, address
    unmasked = apart(asked.logits, theirs.logits) > 1e-5
    assert unmasked == (family in UNMASKED)
    with_pattern = [address for address in ours if address.endswith("mixer.pattern")]
    attentions = [x for x in getattr(asked, "attentions", None) or () if x is not None]
    if attentions and not unmasked:
        for address, want in zip(with_pattern, attentions, strict=True):
            assert apart(ours[address], want[..., : ours[address].shape[-1]]) <= 1e-5, address
