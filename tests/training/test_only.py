"""dt.train(only=…): some weights are trained, all others stay bit for bit. Prefix tuning is this on grafted keys and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import SpecError, UsageError
from dovetail.nn.declared_tensors import held
from dovetail.training.optim import Optimizer, train_only, weights_named

SPEC = "{width: 28, vocab: 270, layers: [{repeat: 2, mixer: {heads: 2, kv_heads: 1}, ffn: {hidden: 44}}]}"
SMALL: dict[str, Any] = {"batch": 4, "length": 16, "sample": 0, "quiet": True, "evals": 1}
PREFIX = "layers.*.mixer.prefix_*"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a trained model, `first`, the same with a prefix, `grafted`, and a text."""
    place = tmp_path_factory.mktemp("only")
    (place / "tale.txt").write_text("It was the best of times, it was the worst of times.\n" * 40, encoding="utf-8")
    dt.train(SPEC, place / "tale.txt", steps=3, out=place / "first", **SMALL)
    dt.graft(place / "first", set={"layers.*.mixer.prefix": 3}, out=place / "grafted")
    return place


def changed(before: torch.nn.Module, after: torch.nn.Module) -> set[str]:
    """The names of the parameters that differ in a bit."""
    own = dict(after.named_parameters())
    return {name for name, tensor in before.named_parameters() if not torch.equal(tensor, own[name])}


def test_a_prefix_is_grafted_and_trained_alone(home: Path) -> None:
    notes: list[str] = []
    given = {"from_": home / "grafted", "only": PREFIX, "learning_rate": 0.05, "steps": 20, **SMALL}
    run = dt.train(None, home / "tale.txt", out=home / "tuned", note=notes.append, **given)
    prefix = {f"layers.{i}.mixer.prefix_{name}" for i in range(2) for name in "kv"}
    assert any("trains 4 weights, 168 parameters" in note for note in notes)
    assert changed(dt.load(home / "grafted"), run.model) == prefix
    assert changed(dt.load(home / "tuned"), run.model) == set(), "the directory is a whole model"
    assert run.tokenizer is not None
    ids = run.tokenizer.encode("It was the best of times, it was the worst of times.\n")[None]
    before, after = (one.eval()(ids[:, :-1]).flatten(0, 1) for one in (dt.load(home / "grafted"), run.model))
    losses = [torch.nn.functional.cross_entropy(logits, ids[0, 1:]) for logits in (before, after)]
    assert losses[1] < losses[0] - 0.01, "what is trained helps"


def test_a_run_of_some_weights_resumes(home: Path) -> None:
    given = {"from_": home / "grafted", "only": [PREFIX, "norm.scale"], **SMALL}
    whole = dt.train(None, home / "tale.txt", steps=4, out=home / "whole", **given)
    saved = sorted((home / "whole" / "checkpoints").iterdir())
    tensors = json.loads((saved[-1] / "manifest.json").read_text())["tensors"]
    assert any(name.endswith("layers.0.ffn.up.weight") for name in tensors), "a checkpoint has every weight"
    (home / "whole" / "model.safetensors").unlink()
    again = dt.train(None, home / "tale.txt", steps=4, out=home / "whole", **given)
    assert changed(whole.model, again.model) == set()


def test_the_optimizer_has_the_chosen_weights_alone() -> None:
    spec = dt.from_yaml(SPEC)
    model = dt.build(spec)
    chosen = weights_named(spec, ["*.ffn.*", "head.out.weight" if not spec.head.tied else "norm.scale"])  # type: ignore[union-attr]
    assert chosen is not None
    train_only(model, chosen)
    assert set(Optimizer(model).weights) == {d.path for d in chosen}
    assert {d.path for d in held(model, spec) if d.checkpointed} == {d.path for d in held(model, spec) if d.weight.stored}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"only": "layers.*.mixer.prefx_*"}, r"prefx.*matches no weight.*layers\.\*\.mixer\.prefix"),
        ({"only": PREFIX, "adapter": "lora"}, "only: with adapter"),
    ],
)
def test_what_cannot_be_trained_is_refused(home: Path, given: dict[str, Any], problem: str) -> None:
    with pytest.raises((SpecError, UsageError), match=problem):
        dt.train(None, home / "tale.txt", from_=home / "grafted", steps=1, **given, **SMALL)
