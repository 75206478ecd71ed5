"""dt.sample, and models that are built with a tokenizer of dt.learn_tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dovetail as dt

SPEC = "{width: 32, vocab: 20, layers: [{repeat: 2, mixer: {heads: 2, head: 16}, ffn: {hidden: 48}}]}"


@pytest.fixture(scope="module")
def model() -> dt.Transformer:
    return dt.build(SPEC, tokenizer=dt.learn_tokenizer("0123456789+=", 20, "characters"), dtype="float64")


def test_samples_of_a_prompt_differ_and_those_without_temperature_are_its_continuation(model: dt.Transformer) -> None:
    prompts = ["2+3=", "4+4+1="]
    sampled = dt.sample(model, prompts, choices=16, max_tokens=5)
    assert [len(some) for some in sampled] == [16, 16]
    assert len(set(sampled[0])) > 8
    assert dt.sample(model, prompts, choices=16, max_tokens=5) == sampled
    assert dt.sample(model, prompts, choices=16, max_tokens=5, seed=1) != sampled
    greedy = dt.sample(model, prompts, choices=2, max_tokens=5, temperature=0)
    assert greedy == [[model.generate(prompt, 5)] * 2 for prompt in prompts]


def test_samples_have_the_probs_of_the_model(model: dt.Transformer) -> None:
    (texts,) = dt.sample(model, ["7="], choices=1024, max_tokens=1, seed=3)
    assert model.tokenizer is not None
    probs = model(torch.tensor([model.tokenizer.prompt("7=")])).detach()[0, -1].softmax(-1)
    for sign in "0123456789":
        expected = float(probs[model.tokenizer.id_of(sign)])
        assert abs(texts.count(sign) / 1024 - expected) < 5 * (expected / 1024) ** 0.5


def test_the_end_token_ends_a_completion_and_is_left_out() -> None:
    model = dt.build(SPEC, tokenizer=dt.learn_tokenizer("0123456789+=", 20, "characters"))
    with torch.no_grad():  # the end token, id 0, has the largest logit after every token
        for weight in model.parameters():
            weight.zero_()
    assert dt.sample(model, ["1+"], max_tokens=5, temperature=0) == [[""]]


def test_a_saved_model_keeps_its_tokenizer_and_its_end(model: dt.Transformer, tmp_path: Path) -> None:
    dt.save(model, tmp_path / "model")
    again = dt.load(tmp_path / "model")
    assert again.vocabulary is not None
    assert again.vocabulary.stop == {0}
    assert dt.sample(again, ["9+9="], choices=4) == dt.sample(model, ["9+9="], choices=4)


def test_the_decoder_of_an_encoder_decoder_starts_from_the_end_token(tmp_path: Path) -> None:
    side = "width: 32, vocab: 20, layers: [{repeat: 1, mixer: {heads: 2, head: 16, mask: %s}, ffn: {hidden: 48}%s}]"
    spec = (
        f"{{encoder: {{{side % ('full', '')}, head: null}}, {side % ('causal', ', cross: {kind: cross_attention, heads: 2}')}}}"
    )
    built = dt.build(spec, tokenizer=dt.learn_tokenizer("0123456789+=", 20, "characters"), dtype="float64")
    text = dt.generate(built, "2+3=", beams=2, max_tokens=4).text
    assert built.vocabulary is not None
    assert built.vocabulary.start == (0,)
    dt.save(built, tmp_path / "model")
    assert dt.generate(tmp_path / "model", "2+3=", beams=2, max_tokens=4).text == text


def test_what_does_not_fit_is_refused(model: dt.Transformer) -> None:
    with pytest.raises(dt.SpecError, match=r"vocab: 20; the tokenizer of dt\.build has 28 tokens"):
        dt.build(SPEC, tokenizer=dt.learn_tokenizer("abcdefghijklmnopqrstuvwxyz", 28, "characters"))
    with pytest.raises(dt.DovetailError, match="not a list"):
        dt.sample(model, "2+3=")
    with pytest.raises(dt.DovetailError, match="choices: 0 is below 1"):
        dt.sample(model, ["2+3="], choices=0)
    with pytest.raises(dt.DovetailError, match="temperature: -1"):
        dt.sample(model, ["2+3="], temperature=-1)
    with pytest.raises(dt.DovetailError, match="tokenizer"):
        dt.sample(dt.build(SPEC), ["2+3="])


def test_the_model_of_a_run_reads_text_and_ends_it_as_that_of_its_directory(model: dt.Transformer, tmp_path: Path) -> None:
    dt.save(dt.build(SPEC, tokenizer=model.tokenizer), tmp_path / "base")
    rows = [{"prompt": f"{i % 10}=", "completion": str(i % 10)} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for out in (tmp_path / "run", None):
        run = dt.tune(tmp_path / "base", tmp_path / "rows.jsonl", steps=2, length=16, batch=2, quiet=True, out=out)
        assert run.model.vocabulary is not None
        assert run.model.vocabulary.stop == {0}
        assert dt.sample(run.model, ["3="], max_tokens=4) == dt.sample(run.directory or run.model, ["3="], max_tokens=4)
    (tmp_path / "text.txt").write_text("1+1=2 " * 400)
    trained = dt.train(SPEC, tmp_path / "text.txt", tokenizer="characters", steps=2, length=16, batch=2, quiet=True)
    assert len(dt.sample(trained.model, ["1+"], max_tokens=4)[0]) == 1


def test_an_added_string_is_one_token_and_text_goes_there_and_back(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "'
    tokenizer = dt.learn_tokenizer("0123456789+= ", 24, "characters", added=[call])
    assert tokenizer.size <= 24
    ids = tokenizer.prompt(f"1+{call}2")
    assert len(ids) == 4
    assert tokenizer.decode(ids) == f"1+{call}2"
    dt.save(dt.build(SPEC.replace("20", "24"), tokenizer=tokenizer), tmp_path / "model")
    again = dt.load(tmp_path / "model").tokenizer
    assert again is not None
    assert again.prompt(f"1+{call}2") == ids
    assert len(dt.learn_tokenizer("0123456789+= ", 24, "characters").prompt(call)) > 1
