"""A directory with a config.json of our own type: the same model, the same bytes; refused where vLLM cannot serve it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import FileError, SpecError
from dovetail.hf.own_config import DEFAULT_LENGTH

SPEC = """
width: 96
vocab: 101
layers:
- {mixer: {heads: 4, kv_heads: 2, head: 32, position: alibi, mask: [causal, {kind: window, size: 16}]}, ffn: {hidden: 72}}
- {mixer: {heads: 3, kv_heads: 1, head: 64, sink: true, softcap: 3.0}, ffn: {kind: mlp, hidden: 80}, wire: sandwich_norm}
head: {tied: true}
"""


@pytest.fixture
def exported(tmp_path: Path) -> tuple[dt.Transformer, Path]:
    model = dt.build(dt.from_yaml(SPEC), seed=3)
    dt.save(model, tmp_path / "own")
    result = dt.export(tmp_path / "own", tmp_path / "exported", family="dovetail")
    assert (result.model_type, result.architecture) == ("dovetail", "DovetailForCausalLM")
    return model, tmp_path / "exported"


def test_the_model_is_the_same(exported: tuple[dt.Transformer, Path], tmp_path: Path) -> None:
    model, place = exported
    again = dt.load(place)
    assert again.spec == model.spec
    ids = torch.randint(101, (2, 20))
    assert torch.equal(again(ids), model(ids))
    config = json.loads((place / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [config[name] for name in sizes] == [101, 96, 2, 4, 2, 32]
    assert config["max_position_embeddings"] == DEFAULT_LENGTH
    assert dt.export(place, tmp_path / "twice", family="dovetail").tensors == len(list(model.parameters()))
    assert (tmp_path / "twice" / "model.safetensors").read_bytes() == (place / "model.safetensors").read_bytes()


def test_a_spec_of_a_family_can_be_exported_again_as_that_family(tmp_path: Path) -> None:
    spec = dt.from_yaml("{width: 64, vocab: 50, layers: [{mixer: {heads: 2, head: 32}, ffn: {hidden: 72}}]}")
    dt.save(dt.build(spec), tmp_path / "own")
    dt.export(tmp_path / "own", tmp_path / "dovetail", family="dovetail")
    assert dt.export(tmp_path / "dovetail", tmp_path / "llama").model_type == "llama"


def test_a_learned_table_limits_the_length(tmp_path: Path) -> None:
    spec = dt.from_yaml(SPEC).set("position", {"kind": "learned", "length": 77})
    dt.save(dt.build(spec), tmp_path / "own")
    dt.export(tmp_path / "own", tmp_path / "exported", family="dovetail")
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["max_position_embeddings"] == 77


def test_a_spec_that_vllm_cannot_serve_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    dt.save(dt.build(dt.from_yaml(SPEC).set("layers.1.mixer.head", 40)), tmp_path / "own")
    with pytest.raises(SpecError, match=r"layers\.1\.mixer: vllm cannot serve it: heads of 40"):
        dt.export(tmp_path / "own", tmp_path / "exported", family="dovetail")
    assert not (tmp_path / "exported").exists()


def test_a_spec_that_differs_from_the_config_is_an_error(exported: tuple[dt.Transformer, Path]) -> None:
    _, place = exported
    (place / "dovetail.yaml").write_text(SPEC.replace("softcap: 3.0", "softcap: 2.0"))
    with pytest.raises(FileError, match=r"softcap is 2\.0 in dovetail\.yaml and 3\.0 in config\.json"):
        dt.load(place)


def test_a_config_without_a_spec_is_an_error(exported: tuple[dt.Transformer, Path]) -> None:
    _, place = exported
    (place / "config.json").write_text('{"model_type": "dovetail"}')
    with pytest.raises(FileError, match="has no mapping `spec`"):
        dt.load(place)
