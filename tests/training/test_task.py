"""Which objective a spec has on its data, what is measured on held-out data, and samples as training goes."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import FileError, SpecError, UsageError
from dovetail.data.corpus import Batch
from dovetail.files.spec import from_yaml, load_spec
from dovetail.model.construction import build
from dovetail.nn.layout import TokenLayout
from dovetail.training.loop import measure, train
from dovetail.training.objective import MaskedTokens, classify, next_token, seq2seq
from dovetail.training.plan import Plan
from dovetail.training.task import OBJECTIVES, objective_kind

CAUSAL = "{width: 28, vocab: 20, layers: [{mixer: {heads: 2}, ffn: {hidden: 44}}]}"
BOTH = "{width: 28, vocab: 20, head: masked_lm, layers: [{repeat: 2, mixer: {heads: 2, mask: full}, ffn: {hidden: 44}}]}"
SMALL: dict[str, Any] = {
    "batch": 16,
    "length": 20,
    "tokenizer": "characters",
    "quiet": True,
    "learning_rate": 1e-2,
    "sample": 6,
}


@pytest.fixture
def alphabet(tmp_path: Path) -> Path:
    (tmp_path / "alphabet.txt").write_text("abcdefghijkl" * 300)
    return tmp_path / "alphabet.txt"


# -- the choice


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("llama-tiny", "next_token"),
        ("mamba-tiny", "next_token"),
        ("deepseek-tiny", "next_token"),
        ("t5-tiny", "span_corruption"),
        ("transformer-2017-tiny", "span_corruption"),
    ],
)
def test_the_objective_follows_from_the_spec(spec: str, name: str) -> None:
    assert objective_kind(load_spec(spec), "text").name == name
    assert objective_kind(load_spec(spec), "text", name) is OBJECTIVES[name]


def test_a_bidirectional_spec_learns_from_masked_tokens() -> None:
    assert objective_kind(load_spec("bert-tiny").set("head", "masked_lm"), "text").name == "masked_tokens"


@pytest.mark.parametrize(
    ("spec", "name", "message"),
    [
        (BOTH, "next_token", "layers: the next token is visible to a bidirectional model"),
        (CAUSAL, "masked_tokens", "layers: a causal model does not see the tokens after a mask"),
        (CAUSAL, "span_corruption", "encoder: there is none to read the corrupted text"),
        (CAUSAL, "denoising", "encoder: there is none to read the corrupted text"),
        ("t5-tiny", "next_token", "encoder: the next token of a text needs no source"),
        ("t5-tiny", "masked_tokens", "encoder: masked tokens are predicted in place"),
        ("vit-tiny", None, "embed: patches does not read tokens"),
        ("bert-tiny", None, "head: training on text needs logits"),
    ],
)
def test_an_objective_that_does_not_fit_says_why(spec: str, name: str | None, message: str) -> None:
    given = from_yaml(spec) if spec.startswith("{") else load_spec(spec)
    with pytest.raises(SpecError, match=message):
        objective_kind(given, "text", name)


def test_an_unknown_objective_lists_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"unknown objective 'span_coruption'; did you mean span_corruption\?"):
        objective_kind(from_yaml(CAUSAL), "text", "span_coruption")
    with pytest.raises(
        UsageError, match="objectives: next_token, masked_tokens, span_corruption, denoising, answers, classification"
    ):
        objective_kind(from_yaml(CAUSAL), "text", "xyz")


# -- what is measured


def test_masked_tokens_are_learned_from_text(alphabet: Path) -> None:
    """Unigram statistics know one letter of twelve."""
    run = dt.train(BOTH, alphabet, steps=100, **SMALL)
    found = run.to_dict()
    assert found["held_out_accuracy"] > 0.75
    assert run.history[9].val_metrics is not None
    assert run.history[9].val_metrics["accuracy"] < 0.4
    assert "held_out_bits_per_byte" not in found
    assert "sample" not in found


def test_perplexity_is_e_to_the_held_out_loss(alphabet: Path) -> None:
    run = dt.train(CAUSAL, alphabet, steps=3, **SMALL)
    assert run.held_out_loss is not None
    assert run.to_dict()["held_out_perplexity"] == pytest.approx(math.exp(run.held_out_loss))
    assert run.held_out_bits_per_byte is not None
    assert f"perplexity {math.exp(run.held_out_loss):.4g}" in str(run)


def test_accuracy_counts_labels_that_are_most_probable() -> None:
    """Against the logits of the whole batch; padding and tokens that are not predicted do not count."""
    model = build(from_yaml(BOTH))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0)
    tokens = torch.randint(0, 18, (5, 150), generator=torch.Generator().manual_seed(0))  # more than one chunk of logits
    batches = [
        Batch(tokens, tokens, layout) for layout in (TokenLayout.whole(5, 150), TokenLayout.padded([150, 9, 70, 3, 1], 150))
    ]
    objective = MaskedTokens(mask=19, vocab=18, fraction=0.5)
    hits = labels = 0
    for i, batch in enumerate(batches):
        inputs, wanted = objective.corrupt(batch.tokens, batch.layout, i)
        answers = model(inputs, lengths=batch.layout.real.sum(-1)).argmax(-1)
        hits += int((answers == wanted).sum())
        labels += int((wanted >= 0).sum())
    found = measure(model, batches, objective)
    assert 0 < hits < labels
    assert found["accuracy"] == pytest.approx(hits / labels)
    assert set(found) == {"loss", "accuracy"}
    assert classify.metrics({"loss": 1.0, "accuracy": 0.5}) == {"accuracy": 0.5}
    assert seq2seq.metrics({"loss": 0.0, "accuracy": 0.5}) == {"perplexity": 1.0, "accuracy": 0.5}


# -- multi-token prediction


def test_multi_token_prediction_is_trained() -> None:
    """Depth 1 predicts the token after the next; its loss counts in training, and held-out loss is that of the next token."""
    block = "{mixer: {heads: 2}, ffn: {hidden: 44}}"
    spec = from_yaml(f"{{width: 28, vocab: 20, layers: [{block}], mtp: [{{weight: 0.5, block: {block}}}]}}")
    model, rows = build(spec), (torch.arange(16)[:, None] * 5 + torch.arange(13)) % 12
    batch = Batch(rows[:, :-1], rows[:, 1:], TokenLayout.whole(16, 12))

    def drafted() -> float:
        """How often the depth is right about the token two places on."""
        with torch.no_grad():
            hidden, ctx = model.hidden(batch.tokens, dt.Ctx(layout=batch.layout))
            logits, _ = model.draft(hidden, batch.labels, ctx)
        return (logits[:, :-1].argmax(-1) == batch.labels[:, 1:]).float().mean().item()

    assert drafted() < 0.4
    whole, alone = (next_token(model, batch, 0, training).mean().item() for training in (True, False))
    assert whole == pytest.approx(1.5 * alone, rel=0.1)  # both depths know nothing yet
    history = train(model, lambda step: batch, next_token, Plan(steps=60, learning_rate=1e-2, quiet=True), [batch])
    assert drafted() > 0.9
    assert history[-1].val_loss is not None
    assert history[-1].val_loss < 0.2


# -- samples


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def test_samples_as_training_goes_are_not_repeated_by_a_resumed_run(alphabet: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    options = SMALL | {"steps": 40, "out": tmp_path / "run", "sample_every": 2, "prompt": "abc", "temperature": 0.0}
    options |= {"checkpoint_minutes": 1e-9, "keep": 99}
    whole = dt.train(CAUSAL, alphabet, note=notes.append, **options)
    samples = lines(tmp_path / "run")
    assert [sample["step"] for sample in samples] == [8, 16, 24, 32, 40]  # every second of ten evals
    assert samples[-1] == {"step": 40, "tokens": 40 * 320, "prompt": "abc", "text": whole.sample}
    assert whole.sample == "defghi"
    assert samples[0]["text"] != "defghi"
    assert "step 40: abcdefghi" in notes
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()

    for step in range(21, 41):  # as after kill -9 behind step 20
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    (tmp_path / "run" / "model.safetensors").unlink()
    with (tmp_path / "run" / "samples.jsonl").open("a") as file:
        file.write('{"step": 41, "te')  # a line that was not written to its end
    dt.train(CAUSAL, alphabet, **options)
    assert lines(tmp_path / "run") == samples
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights  # sampling changes nothing

    (tmp_path / "run" / "samples.jsonl").write_text("nonsense\n")
    with pytest.raises(FileError, match=r"samples\.jsonl: holds a line that is no sample: 'nonsense"):
        dt.train(CAUSAL, alphabet, **options)


def test_sampling_does_not_change_the_run(alphabet: Path) -> None:
    options = SMALL | {"steps": 10, "precision": "bf16", "ema": 0.5}
    runs = [dt.train(CAUSAL, alphabet, sample_every=every, **options) for every in (0, 1)]
    assert [step.loss for step in runs[0].history] == [step.loss for step in runs[1].history]


def test_only_a_model_that_continues_a_prompt_is_sampled(alphabet: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sample_every: a model that learns by masked_tokens does not continue a prompt"):
        dt.train(BOTH, alphabet, steps=1, out=tmp_path / "run", **SMALL, sample_every=1)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="sample_every: -1 is below 0"):
        dt.train(BOTH, alphabet, steps=1, **SMALL, sample_every=-1)
