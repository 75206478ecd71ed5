"""`dovetail probe`: each probe is solved by an architecture that can and failed by one that cannot, whatever its weights."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail as dt
from dovetail.base.errors import DovetailError, SpecError, UsageError
from dovetail.data.tasks.task import read_synthetic_task
from dovetail.decoding.scoring import probable_tokens
from dovetail.experiments.long_context import (
    TASKS,
    ContextCell,
    ContextReport,
    accuracy_bound,
    hits,
    ordinary_tokens,
    state_bound,
)
from dovetail.files.spec import from_yaml
from dovetail.proof.laws.case import perturbed

VALUES, WINDOW, LAYERS = 7, 9, 2
REACH = LAYERS * (WINDOW - 1)  # tokens: the last one sees itself and these before it
RELAY = f"""
width: {VALUES + 2}
vocab: {3 * VALUES + 1}
layers:
  - repeat: {LAYERS}
    mixer: {{kind: attention, heads: 1, kv_heads: 1, head: {VALUES + 2}, position: none}}
    ffn: {{hidden: 4}}
head: {{kind: lm, tied: false}}
"""
CELLS = ((16, 0.0), (16, 1.0), (40, 0.0), (40, 0.5), (40, 1.0))


def relay(window: bool) -> dt.Transformer:
    """Weights by hand. Each layer copies the value of a token that has one, if one is visible: a token is 1 (constant), whether
    it has a value, and which."""
    spec = from_yaml(RELAY)
    if window:
        spec = spec.set("layers.*.mixer.mask", ["causal", {"kind": "window", "size": WINDOW}])
    model = dt.build(spec)
    weights = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    values = torch.arange(VALUES)
    weights["embed.table"][:, 0] = 1.0
    weights["embed.table"][1 + VALUES + values, 1] = 1.0
    weights["embed.table"][1 + VALUES + values, 2 + values] = 1.0
    weights["head.out.weight"][1 + VALUES + values, 2 + values] = 1.0
    for name, weight in weights.items():
        if name.endswith("scale"):
            weight.fill_(1.0)
        elif name.endswith("q.weight"):
            weight[0, 0] = 100.0  # the query is the constant, the key whether there is a value
        elif name.endswith("k.weight"):
            weight[0, 1] = 100.0
        elif name.endswith(("v.weight", "o.weight")):
            weight[1:, 1:] = torch.eye(VALUES + 1)
    model.load_state_dict(weights)
    return model


def distance(length: int, depth: float) -> int:
    """From the value of the needle to the question."""
    return length - 1 - (2 * round(depth * ((length - 1) // 2 - 1)) + 1)


def test_full_attention_finds_the_needle_and_a_window_does_within_its_reach() -> None:
    options: dict[str, Any] = {"task": "needle", "lengths": [16, 40], "depths": [0.0, 0.5, 1.0], "rows": 24}
    full, window = (dt.probe(relay(is_window), **options) for is_window in (False, True))
    assert {cell.accuracy for cell in full.report.cells} == {1.0}
    for cell in window.report.cells:
        assert cell.depth is not None
        assert cell.accuracy == float(distance(cell.length, cell.depth) <= REACH)
    assert {cell.accuracy for cell in window.report.cells} == {0.0, 1.0}
    assert (full.report.used("needle"), window.report.used("needle")) == (40, 16)
    assert (full.to_dict()["used_length"], window.to_dict()["used_length"]) == (40, 16)


@pytest.mark.parametrize("beyond", [0, 1])
def test_no_weights_see_a_needle_beyond_the_reach_of_their_windows(beyond: int) -> None:
    """The reach is L(w − 1) + 1 tokens with the last one itself: at its edge a value changes the logits, beyond it none."""
    spec = from_yaml(RELAY).set("layers.*.mixer.mask", ["causal", {"kind": "window", "size": WINDOW}])
    model, length = perturbed(spec), REACH + 8
    ids = torch.randint(1 + 2 * VALUES, spec.vocab, (1, length), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    ids[0, length - 1 - REACH - beyond], other[0, length - 1 - REACH - beyond] = 1 + VALUES, 2 + VALUES
    ends = [model(row, dt.Ctx(layout=dt.TokenLayout.whole(1, length)))[0, -1] for row in (ids, other)]
    assert torch.equal(*ends) == bool(beyond)


def test_an_accuracy_bound_is_never_below_the_best_code() -> None:
    """Every encoder of 2 answers of V choices into S states, with the best decoder of each, by enumeration."""
    for choices, states in ((2, 2), (2, 3), (3, 2)):
        tables = list(itertools.product(range(choices), repeat=2))
        best = 0.0
        for code in itertools.product(range(states), repeat=len(tables)):
            right = 0
            for state in range(states):
                held = [table for table, at in zip(tables, code, strict=True) if at == state]
                right += sum(max([sum(table[i] == v for table in held) for v in range(choices)]) for i in range(2))
            best = max(best, right / (2 * len(tables)))
        bound = accuracy_bound(math.log2(states) / 2, choices)
        assert best <= bound < 1
    assert accuracy_bound(3.0, 8) == accuracy_bound(99.0, 8) == 1.0
    assert accuracy_bound(0.0, 8) == pytest.approx(1 / 8, abs=1e-6)
    assert accuracy_bound(1.0, 4) < accuracy_bound(1.5, 4)


def test_a_small_state_is_bounded_and_a_kv_cache_is_not() -> None:
    attention = from_yaml("{width: 8, vocab: 33, layers: [{mixer: {heads: 2, kv_heads: 1, head: 4}, ffn: {hidden: 8}}]}")
    rnn = attention.set("layers.0.mixer", {"kind": "rnn", "inner": 1})
    task = read_synthetic_task("{kind: mqar, pairs: 16}")
    assert state_bound(rnn, task, 64, 33, 4) == accuracy_bound(32 / 16, 16) < 0.75  # one float32 for 16 answers of 4 bits
    assert state_bound(attention, task, 64, 33, 4) == 1.0
    assert state_bound(rnn, read_synthetic_task("needle"), 64, 33, 4) == 1.0
    assert "≤0.71" in str(dt.probe(dt.build(rnn), task=task, lengths=[48], rows=2))


@pytest.mark.parametrize("mixer", ["attention", "mamba2", "gated_deltanet", "rnn"])
@torch.no_grad()
def test_chunks_and_single_tokens_answer_as_one_pass_without_a_cache(mixer: str) -> None:
    fields: dict[str, Any] = {"mamba2": {"head": 8, "state_size": 8}}.get(mixer, {"heads": 2})
    spec = from_yaml("{width: 28, vocab: 62, layers: [{repeat: 2, ffn: {hidden: 44}}]}").swap(
        "mixer", {"kind": mixer, **fields}
    )
    model, ids = perturbed(spec), torch.randint(62, (3, 45), generator=torch.Generator().manual_seed(1))
    whole = model(ids, dt.Ctx(layout=dt.TokenLayout.whole(3, 45)))
    labels = whole.argmax(-1).index_fill(1, torch.arange(0, 45, 2), -100)  # what one pass answers, at every other position
    assert isinstance(model, dt.Transformer)
    for chunk in (1, 7, 45):
        assert torch.equal(probable_tokens(model, ids, 20, chunk), whole[:, 20:].argmax(-1))
        assert hits(model, ids, labels, chunk) == (66, 66)
        assert hits(model, ids, (labels + 1).where(labels >= 0, labels), chunk) == (0, 66)


def report(*accuracies: tuple[int, float]) -> ContextReport:
    return ContextReport(tuple(ContextCell("needle", n, None, a, 1.0) for n, a in accuracies), 0.85, 512)


def test_a_used_length_ends_at_the_first_that_fails() -> None:
    assert report((64, 1.0), (128, 0.9), (256, 0.85)).used("needle") == 256
    assert report((64, 1.0), (128, 0.5), (256, 0.9)).used("needle") == 64
    assert report((64, 0.5), (128, 1.0)).used() == 0


def test_the_whole_grid_as_data_and_text(tmp_path: Path) -> None:
    from dovetail.text.learn import learn

    text = "It was the best of times, it was the worst of times.\n" * 60
    (tmp_path / "notes.txt").write_text(text, encoding="utf-8")
    spec = from_yaml("{width: 16, vocab: 300, layers: [{mixer: {heads: 2}, ffn: {hidden: 16}}]}")
    model = dt.build(spec, tokenizer=learn(text, 280).with_special(["<|end|>"]))
    result = dt.probe(model, lengths=[96, 64], depths=[0, 1], rows=2, text=tmp_path / "notes.txt")
    assert {cell.task for cell in result.report.cells} == set(TASKS)
    assert len(result.report.cells) == 2 * (4 * 2 + 2)
    assert json.loads(json.dumps(result.to_dict())) == result.to_dict()
    bands = result.losses
    assert [(band.first, band.last) for band in bands] == [(2, 3), (4, 5), (6, 9), (10, 17), (18, 33), (34, 65), (66, 96)]
    for word in ("far_copy", "used length", "position", "no limit is declared"):
        assert word in str(result)
        assert word in result.to_html()
    tokenizer, tokens = model.tokenizer, ordinary_tokens(model, 0).tolist()
    assert tokenizer is not None
    assert tokenizer.id_of("<|end|>") not in tokens
    assert sorted(tokens) == [i for i in range(tokenizer.size) if i not in tokenizer.special_ids()] != tokens


def test_what_cannot_be_measured_is_refused() -> None:
    model = relay(window=False)
    cases: list[tuple[dict[str, Any], type[DovetailError], str]] = [
        ({"depths": [2.0]}, UsageError, "depths: 2 is not from 0 to 1"),
        ({"task": "{kind: needle, depth: 0.5}"}, UsageError, "leave out the depth"),
        ({"task": ["needle", "needle"]}, UsageError, "needle is given twice"),
        ({"task": "neddle"}, SpecError, "task: no part is called 'neddle'.*needle"),
        ({"task": "multi_key", "lengths": [8]}, SpecError, "length: 8; the task multi_key needs at least 17"),
        ({"task": "needle", "lengths": [16], "text": "none.txt"}, DovetailError, "no tokenizer"),
        ({"task": "aggregation"}, SpecError, "vocab: 22; the task aggregation needs at least 25"),
    ]
    for keywords, error, message in cases:
        with pytest.raises(error, match=message):
            dt.probe(model, **keywords)
    learned = from_yaml(RELAY).swap("position", {"kind": "learned", "length": 32})
    with pytest.raises(DovetailError, match="lengths: 64 tokens; the limit of the model is 32"):
        dt.probe(dt.build(learned), task="needle", lengths=[16, 64], rows=1)
    with pytest.raises(DovetailError, match="ids: have 33 tokens, more than the 32 rows of the table of positions"):
        probable_tokens(dt.build(learned), torch.zeros(1, 33, dtype=torch.long))
    assert dt.probe(dt.build(learned), task="needle", lengths=[32], rows=1).report.claimed == 32


def test_rows_are_the_same_at_every_depth() -> None:
    seen: list[Tensor] = []
    for depth in (0.0, 1.0):
        batch = read_synthetic_task({"kind": "multi_key", "depth": depth, "pairs": 3}).batch(5, 6, 32, 40)
        seen.append(batch.labels[:, -1])
    assert torch.equal(*seen)


UNTIED = "head: {kind: lm, tied: false}"
HYBRID = f"""
width: 32
vocab: 33
init: fan_in
layers:
  - {{mixer: {{kind: mamba2, head: 16, state_size: 16}}, ffn: {{hidden: 32}}}}
  - {{mixer: {{heads: 2, position: none}}, ffn: {{hidden: 32}}}}
{UNTIED}
"""
RNN = f"{{width: 32, vocab: 33, init: fan_in, layers: [{{mixer: {{kind: rnn, inner: 1}}, ffn: {{hidden: 32}}}}], {UNTIED}}}"
FULL = (
    f"{{width: 32, vocab: 49, init: fan_in, layers: [{{mixer: {{heads: 2, position: none}}, ffn: {{hidden: 32}}}}], {UNTIED}}}"
)


@pytest.mark.slow
def test_trained_models_recall_what_their_state_holds_and_find_what_their_windows_reach() -> None:
    """Sixteen pairs of four bits each: a KV cache holds them, one float32 does not. A needle up to 31 tokens back: full
    attention sees it, a window of 8 in one layer only the last 7."""
    options: dict[str, Any] = {"batch": 32, "learning_rate": 6e-3, "quiet": True}
    recall, accuracies = {"kind": "mqar", "pairs": 16}, list[float]()
    for spec in (HYBRID, RNN):
        run = dt.train(from_yaml(spec), task=recall, length=48, steps=400, **options)
        (cell,) = dt.probe(run.model, task=recall, lengths=[48], rows=64).report.cells
        accuracies.append(cell.accuracy)
        assert (cell.bound < 0.72) == (spec == RNN)
        assert cell.accuracy <= cell.bound
    assert accuracies[0] > 0.95
    assert accuracies[1] < 0.2
    masks = (None, ["causal", {"kind": "window", "size": 8}])
    full, window = (from_yaml(FULL) if mask is None else from_yaml(FULL).set("layers.*.mixer.mask", mask) for mask in masks)
    found, missed = (
        dt.probe(
            dt.train(spec, task="needle", length=32, steps=400, **options).model, task="needle", lengths=[32], rows=64
        ).report
        for spec in (full, window)
    )
    assert (found.used("needle"), missed.used("needle")) == (32, 0)
    deep = [cell.accuracy for cell in missed.cells if cell.depth is not None and distance(32, cell.depth) > 7]
    assert len(deep) == 4
    assert max(deep) < 0.3
