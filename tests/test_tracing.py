import pytest
import torch

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.look.tracer import trace
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.spec.fold import taps

SPEC = from_yaml("""
dovetail: 1
width: 28
vocab: 62
layers:
- mixer: {heads: 6, kv_heads: 2, head: 12}
  ffn: {hidden: 44}
- mixer: {heads: 4, head: 14, mask: [causal, {kind: window, size: 3}]}
  ffn: {hidden: 36}
""")
TOKENS = torch.tensor([[5, 17, 3, 60, 8], [1, 1, 2, 40, 33]])


def test_patterns_are_found_by_address_and_are_probs_that_respect_the_mask():
    found = trace(build(SPEC), TOKENS, "*.mixer.pattern")
    assert list(found) == ["layers.0.mixer.pattern", "layers.1.mixer.pattern"]
    assert found["layers.0.mixer.pattern"].shape == (2, 6, 5, 5)
    assert found["layers.1.mixer.pattern"].shape == (2, 4, 5, 5)
    for pattern in found.values():
        torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:-1]))
    assert (found["layers.0.mixer.pattern"].triu(1) == 0).all()
    assert (found["layers.1.mixer.pattern"].tril(-3) == 0).all()
    assert (found["layers.1.mixer.pattern"].tril(-2) != 0).any()


@torch.no_grad()
def test_listening_changes_nothing_and_every_tap_fires():
    model = build(SPEC)
    plain = model(TOKENS, Ctx(layout=TokenLayout.whole(2, 5)))
    traced = trace(model, TOKENS, "*")
    assert sorted(traced) == sorted(taps(SPEC))
    torch.testing.assert_close(traced["head.logits"], plain)


def test_several_patterns_and_a_ctx_of_ones_own():
    layout = TokenLayout.padded([5, 2], 5)
    found = trace(build(SPEC), TOKENS, "layers.0.mixer.q", "normed", ctx=Ctx(layout=layout))
    assert list(found) == ["layers.0.mixer.q", "normed"]
    alone = trace(build(SPEC), TOKENS[1:, :2], "normed")
    torch.testing.assert_close(found["normed"][1:, :2], alone["normed"])


def test_traced_tensors_are_copies():
    """The residual stream after the embedding is the input of the first layer: one tensor at two addresses."""
    traced = trace(build(SPEC), TOKENS, "embedded", "layers.0.in")
    assert torch.equal(traced["embedded"], traced["layers.0.in"])
    traced["embedded"].zero_()
    assert traced["layers.0.in"].abs().sum() > 0


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(SpecError, match=r"\*\.mixer\.patern: no tap of this model matches .*pattern"):
        trace(build(SPEC), TOKENS, "*.mixer.pattern", "*.mixer.patern")
