"""Recurrent encoder–decoders, with and without attention, can be written, and follow the laws."""

import pytest
import torch

from dovetail.construction import build
from dovetail.core.errors import SpecError
from dovetail.io.spec import from_yaml, to_yaml
from dovetail.lawbook.case import Case, NotApplicable
from dovetail.lawbook.suite import LAWS
from dovetail.model import Model

ENCODER = """
width: 28
vocab: 62
encoder:
  width: 24
  vocab: 62
  layers: [{kind: hybrid_block, mixer: gru, ssm: {kind: reverse, mixer: gru}, ffn: null}, {mixer: gru, ffn: null}]
  head: null
"""
WAYS = {
    "additive": "{mixer: gru, cross: additive_attention, ffn: null}",
    "multiplicative": "{mixer: lstm, cross: {kind: multiplicative_attention, heads: 2}, ffn: null}",
    "last state": "{mixer: {kind: lstm, from_encoder: true}, ffn: null}",
    "both": "{mixer: {kind: gru, from_encoder: true, heads: 2}, cross: additive_attention, ffn: null}",
}


def spec(way: str) -> Model:
    return from_yaml(f"{ENCODER}layers: [{WAYS[way]}, {WAYS[way]}]")


def test_e1_cross_is_named_by_the_mixer_that_it_is_a_form_of() -> None:
    kinds = {way: block.cross and block.cross.kind for way in WAYS for block in spec(way).layers}
    assert kinds == {
        "additive": "additive_cross_attention",
        "multiplicative": "multiplicative_cross_attention",
        "last state": None,
        "both": "additive_cross_attention",
    }
    assert all(from_yaml(to_yaml(spec(way))) == spec(way) for way in WAYS)
    model = spec("additive").set("layers.*.cross", "attention").swap("layers.0.cross", "multiplicative_attention")
    assert [block.cross.kind for block in model.layers if block.cross] == ["multiplicative_cross_attention", "cross_attention"]
    with pytest.raises(SpecError, match=r"layers.0.cross: mamba does not read an encoder output .*additive_cross_attention"):
        spec("additive").set("layers.0.cross", "mamba")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("law", ["declared", "chunked", "padded", "rollback", "programs", "every_weight"])
def test_e1_recurrent_encoder_decoders_follow_the_laws(way: str, law: str) -> None:
    LAWS[law].check(Case(spec(way)))


def test_e1_an_encoder_that_hands_over_its_last_state_is_read() -> None:
    model = build(spec("last state")).double()
    ids, source = torch.tensor([[5, 7, 11]]), torch.tensor([[3, 1, 4, 1, 5]])
    plain = model(ids, source=source)
    assert not torch.allclose(plain, model(ids, source=source.flip(1)))
    padded = torch.cat([source, torch.full((1, 2), 9)], 1)
    mask = torch.tensor([[1] * 5 + [0] * 2])
    torch.testing.assert_close(model(ids, source=padded, source_mask=mask), plain)


def test_e1_what_cannot_be_read_is_refused() -> None:
    silent = spec("last state").set("layers.*.mixer.from_encoder", False)
    with pytest.raises(SpecError, match=r"encoder: no layer reads it .*from_encoder: true"):
        build(silent, device="meta")
    alone = from_yaml("width: 28\nvocab: 62\nlayers: [{mixer: {kind: gru, from_encoder: true}}]")
    with pytest.raises(SpecError, match=r"layers.0.mixer.from_encoder: there is no encoder"):
        build(alone, device="meta")
    with pytest.raises(SpecError, match=r"ssm.mixer: attention is a mixer, not a recurrent mixer"):
        spec("additive").set("encoder.layers.0.ssm.mixer", "attention")


def test_e1_a_reversed_decoder_does_not_decode() -> None:
    backward = from_yaml("width: 28\nvocab: 62\nlayers: [{mixer: {kind: reverse, mixer: gru}}]")
    with pytest.raises(NotApplicable):
        LAWS["chunked"].check(Case(backward))
