"""dt.import_, dt.export, dt.list_families and dt.map: the functions behind the verbs of these names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import FileError, SpecError
from dovetail.files.model_dir import save
from dovetail.files.spec import from_yaml
from dovetail.text.learn import learn

SPEC = from_yaml("{width: 24, vocab: 290, layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]}")
TEXT = "It was the best of times, it was the worst of times.\n" * 40


@pytest.fixture
def home(tmp_path: Path) -> Path:
    save(dt.build(SPEC), SPEC, tmp_path / "model", {"tokenizer.json": learn(TEXT, 290).to_json()})
    return tmp_path


def test_out_and_in_again_is_bit_for_bit(home: Path) -> None:
    read: list[tuple[int, int]] = []
    out = dt.export(home / "model", home / "hf", watch=lambda done, total: read.append((done, total)))
    assert (out.model_type, out.architecture, out.tensors) == ("llama", "LlamaForCausalLM", 20)
    assert read[-1][0] == read[-1][1] > 0
    assert f"written to {home / 'hf'} as llama" in str(out)
    assert len(str(out).splitlines()) == 1
    back = dt.import_(home / "hf", home / "again")
    assert back.to_dict() == {"directory": str(home / "again"), "parameters": back.parameters, "layers": 2, "dropped": []}
    weights = [(home / name / "model.safetensors").read_bytes() for name in ("model", "again")]
    assert weights[0] == weights[1]
    with pytest.raises(FileError, match="exists already"):
        dt.export(home / "model", home / "hf")
    with pytest.raises(SpecError, match="cannot be written as gpt2"):
        dt.export(home / "model", home / "gpt2", family="gpt2")


def test_families_are_a_sequence() -> None:
    families = dt.list_families()
    assert "llama" in [family.model_type for family in families]
    assert families.to_dict()["families"][0]["model_type"] == families[0].model_type
    assert f"{len(families)} families" in str(families)


def test_a_map_holds_the_probs_and_draws_them(home: Path) -> None:
    result = dt.map(home / "model", "the worst of times", layer=-1)
    assert result.layer == 1
    assert result.out is None
    n = len(result.labels)
    assert result.probs.shape == (6, n, n)
    torch.testing.assert_close(result.probs.sum(-1), torch.ones(6, n))
    data = json.loads(json.dumps(result.to_dict()))
    assert data["tokens"] == list(result.labels)
    assert len(data["probs"]) == 6
    pytest.importorskip("matplotlib")
    drawn = dt.map(home / "model", "the worst of times", out=home / "map.png", heads=[2])
    assert (home / "map.png").stat().st_size > 1000
    assert str(drawn).endswith(f"tokens: {home / 'map.png'}")
