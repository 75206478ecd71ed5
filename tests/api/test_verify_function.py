"""dt.verify and dt.laws: built models, modules and directories; the verdict as text, data and page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dovetail as dt
from dovetail.base.errors import FileError, SpecError, UsageError
from dovetail.files.spec import from_yaml

TEXT = "{width: 28, vocab: 62, layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]}"
SPEC = from_yaml(TEXT)


class Wrapped(nn.Module):
    """Somebody's module: takes ids and returns logits."""

    def __init__(self, model: dt.Transformer, factor: float = 1.0) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids) * self.factor


def test_a_built_model_equals_its_directory(tmp_path: Path) -> None:
    model = dt.build(SPEC, seed=1)
    dt.save(model, tmp_path / "model")
    steps: list[str] = []
    result = dt.verify(model, tmp_path / "model", progress=steps.append)
    assert (result.status, result.failed) == ("equal", False)
    assert steps
    assert "equal: the same function" in str(result)
    assert result.to_dict()["verdict"] == "equal"
    assert next(model.parameters()).dtype == torch.float32, "the model itself is not converted"


def test_two_functions_are_found_with_their_cause() -> None:
    a, b = dt.build(SPEC, seed=1), dt.build(SPEC.set("layers.1.mixer.position.base", 500.0), seed=1)
    result = dt.verify(a, b, decode=False, longest=0, prompt=["3 14 15 9 26 5 35 8"])
    assert (result.status, result.failed) == ("structural", True)
    assert result.to_dict()["cause"]["name"] == "rope base"
    assert "← first" in repr(result)
    html = result.to_html()
    assert html.count('class="first"') == 1
    headline = re.search("<h1>(.*)</h1>", html)
    assert headline is not None
    assert "cause: " in headline[1]
    assert "prefers-color-scheme:dark" in html
    assert "rope base" in result._repr_html_()
    json.dumps(result.to_dict())


@pytest.mark.slow
def test_a_module_of_another_library_is_a_side() -> None:
    model = dt.build(SPEC, seed=1)
    assert not dt.verify(model, lambda: Wrapped(dt.build(SPEC, seed=1))).failed
    result = dt.verify(model, lambda: Wrapped(dt.build(SPEC, seed=1), 1.01), why=False)
    assert result.failed
    assert "cause: not searched" in str(result)
    with pytest.raises(FileError, match=r"Wrapped: a module is also compared in float64.*; give a function"):
        dt.verify(model, Wrapped(model))


def test_what_cannot_be_compared_is_refused() -> None:
    model = dt.build(SPEC)
    with pytest.raises(FileError, match="the second side only"):
        dt.verify("http://localhost:1/v1", model)
    with pytest.raises(FileError, match="takes THEIRS=OURS"):
        dt.verify(model, model, map=["oops"])
    with pytest.raises(UsageError, match="rows: 0 is not from 1 to 256"):
        dt.verify(model, model, rows=0)
    with pytest.raises(SpecError, match="no side has a tokenizer"):
        dt.verify(model, model, prompt="a text")
    with pytest.raises(SpecError, match="'int3' is not a dtype"):
        dt.verify(model, model, dtype="int3")


def test_laws_on_one_spec_in_every_form() -> None:
    seen: list[tuple[int, int, str]] = []
    result = dt.laws(TEXT, only=["causal", "round_trip"], progress=lambda *step: seen.append(step))
    assert not result.failed
    assert [row["law"] for row in result.to_dict()["laws"]] == ["round_trip", "causal"]
    assert seen == [(0, 2, "round_trip"), (1, 2, "causal")]
    assert "no gradient from a later token" in str(result)
    swapped = dt.laws(dt.build(SPEC), swap={"position": "alibi"}, only=["ported"]).to_dict()
    assert swapped["spec"] == "model --swap position=alibi"
    assert swapped["laws"][0]["state"] == "not applicable"
    with pytest.raises(SpecError, match="change a spec, and none is given"):
        dt.laws(swap={"position": "alibi"})
