"""Recurrent encoder–decoders can be written and follow the laws; encoder–decoders are trained on pairs."""

import json
import math
from pathlib import Path

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import FileError, SpecError, UsageError
from dovetail.data.rows import read_pairs
from dovetail.disk.yaml import parse_yaml
from dovetail.files.spec import from_yaml, to_yaml
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.proof.laws.case import Case, NotApplicable
from dovetail.proof.laws.suite import LAWS
from dovetail.training.pairs import bleu, counts
from dovetail.views.map import attention_of

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


@pytest.mark.quick(8)
@pytest.mark.quick(13)
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


def test_e1_a_reversed_mixer_reads_its_own_input_only() -> None:
    spec = from_yaml("width: 28\nvocab: 62\nlayers: [{mixer: {kind: reverse, mixer: ngram}}]")
    with pytest.raises(SpecError, match=r"layers.0.mixer.mixer: ngram reads values of the model .*usual direction"):
        build(spec, device="meta")


def test_e1_a_reversed_decoder_does_not_decode() -> None:
    backward = from_yaml("width: 28\nvocab: 62\nlayers: [{mixer: {kind: reverse, mixer: gru}}]")
    with pytest.raises(NotApplicable):
        LAWS["chunked"].check(Case(backward))


def test_e2_bleu_by_hand() -> None:
    # of 4 words 3 are in the reference, of 3 pairs 2, of 2 triples 1, of 1 quadruple 0
    sums = counts(["the cat sat down"], ["the cat sat up"])
    assert sums == {"lengths": (4, 4), "1": (3, 4), "2": (2, 3), "3": (1, 2), "4": (0, 1)}
    assert bleu(sums) == 0
    assert counts(["the the the"], ["the cat"])["1"] == (1, 3)  # clipped
    sums = counts(["a b c d e", "f"], ["a b c d e g", "f"])  # 5 of 5 + 1 of 1 words, all n-grams; 6 words for 7
    assert bleu(sums) == pytest.approx(math.exp(1 - 7 / 6))
    sums = counts(["a b c d x"], ["a b c d e"])  # 4/5 · 3/4 · 2/3 · 1/2 = 1/5
    assert bleu(sums) == pytest.approx(0.2**0.25)
    assert bleu(counts([""], ["a"])) == 0
    assert bleu(counts(["a b"], ["a b"])) == 1  # no order above 2


@pytest.mark.slow
def test_e2_pairs_train_an_encoder_decoder(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    words = [f"{a}{b}" for a in "abc" for b in "abc"] * 8
    pairs.write_text("".join(json.dumps({"source": word, "target": word[::-1]}) + "\n" for word in words))
    small = spec("both").set("vocab", 8).set("encoder.vocab", 8)
    options = {"steps": 120, "batch": 16, "length": 8, "tokenizer": "characters", "evals": 1, "quiet": True}
    run = dt.train(small, pairs=pairs, out=tmp_path / "run", learning_rate=0.01, **options)
    found = run.to_dict()
    assert found["held_out_exact_match"] == 1
    assert found["held_out_bleu"] == 1
    model = dt.load(tmp_path / "run")
    assert model.generate("ab", max_tokens=8) == "ba"
    run = dt.train(small, pairs=pairs, beams=2, out=tmp_path / "greedy", learning_rate=0.01, **(options | {"steps": 1}))
    assert parse_yaml((tmp_path / "greedy" / "run.yaml").read_text(), "run.yaml")["options"] == {"beams": 2}
    with pytest.raises(UsageError, match="beams: 65 is not from 1 to 64"):
        dt.train(small, pairs=pairs, beams=65, **options)
    (tmp_path / "text.txt").write_text("ab ba " * 200)
    with pytest.raises(UsageError, match="beams: next_token has no such setting"):
        dt.train("llama-tiny", tmp_path / "text.txt", beams=2, **options)


def test_e2_files_of_pairs(tmp_path: Path) -> None:
    table = tmp_path / "pairs.tsv"
    table.write_text("one\tun\r\ntwo\tdeux\n")
    assert read_pairs(table)[:2] == (["one", "two"], ["un", "deux"])
    table.write_text("one\tun\nthree\n")
    with pytest.raises(FileError, match=r"pairs.tsv:2: has 1 columns"):
        read_pairs(table)
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"source": "one"}\n')
    with pytest.raises(FileError, match=r'pairs.jsonl:1: its "target" is missing'):
        read_pairs(rows)


def test_e3_cross_attention_is_drawn(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"source": word, "target": word[::-1]}) + "\n" for word in ("abc", "cab", "bca") * 4))
    small = spec("both").set("vocab", 8).set("encoder.vocab", 8)
    options = {"steps": 2, "batch": 4, "length": 8, "tokenizer": "characters", "evals": 1, "quiet": True}
    dt.train(small, pairs=pairs, out=tmp_path / "run", **options)
    picture = tmp_path / "alignment.png"
    found = dt.map(tmp_path / "run", "abcab", target="cb", layer=0, out=picture)
    assert found.source is not None
    assert found.source[:5] == ("a", "b", "c", "a", "b")
    assert found.probs.shape == (1, len(found.labels), len(found.source))
    assert torch.allclose(found.probs.sum(-1), torch.ones(found.probs.shape[:2]))
    assert found.to_dict()["source"] == list(found.source)
    assert picture.stat().st_size > 1000
    generated = dt.map(tmp_path / "run", "abcab", layer=0)
    model = dt.load(tmp_path / "run")
    start = () if model.vocabulary is None else model.vocabulary.start
    assert len(generated.labels) == len(start) + len(model.generate(model.tokenizer.prompt("abcab"), 48))  # type: ignore[union-attr]


def test_e3_a_layer_without_attention_names_the_reason() -> None:
    tokens = torch.tensor([5, 17, 3])
    mixed = from_yaml("{dovetail: 1, width: 28, vocab: 62, layers: [{mixer: gru}, {mixer: {heads: 2}}]}")
    with pytest.raises(SpecError, match=r"layers.0.mixer: gru computes no attention pattern.*layers with a pattern: 1"):
        attention_of(build(mixed), tokens, 0)
    with pytest.raises(SpecError, match=r"layers.1.cross: the layer has no such branch.*no layer of this model has a map"):
        attention_of(build(spec("last state")), tokens, 1, source=tokens)
    with pytest.raises(SpecError, match=r"layers.0.mixer: gru computes no attention pattern.*all layers have such a mixer"):
        attention_of(build(spec("both")), tokens, 0)
