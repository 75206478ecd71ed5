"""Small checkpoints: transformers loads them, computes what we compute, and its top-1 tokens survive bfloat16."""

from __future__ import annotations

import dataclasses as dc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_pair import apart

import dovetail as dt
from dovetail.base.errors import FileError, SpecError
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import form_of
from dovetail.hf.peaked import RandomInputs

QUICK = ("qwen3", "bert", "t5", "mamba")
# the others take longer: experts and state spaces amplify rounding
SLOW = tuple(name for name in DIALECTS if name not in QUICK)
CASES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


def reference(place: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = json.loads((place / "config.json").read_text())
    auto = getattr(transformers, form_of(config, DIALECTS[config["model_type"]]).auto)
    made, told = auto.from_pretrained(place, dtype=dtype, output_loading_info=True)
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    made.config.use_cache = False  # theirs has no cache for a model without attention layers
    return made.eval()


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_the_reference_loads_it_and_agrees(family: str, tmp_path: Path) -> None:
    made = dt.tiny(family, tmp_path / "small", seed=3)
    assert made.model_type == family
    theirs = reference(tmp_path / "small")
    if made.opinion is None:
        return
    inputs = RandomInputs.random(made.spec, 5, 0, 2, 16)
    if (pad := theirs.config.pad_token_id) is not None:  # some families count positions by it
        inputs = dc.replace(inputs, tokens=torch.where(inputs.tokens == pad, pad + 1, inputs.tokens))
    asked = {"input_ids": inputs.tokens}
    if inputs.source is not None:
        asked = {"input_ids": inputs.source, "decoder_input_ids": inputs.tokens}
    with torch.no_grad():
        ours, wanted = inputs.run(dt.load(tmp_path / "small")), theirs(**asked).logits
        rounded = reference(tmp_path / "small", torch.bfloat16)(**asked).logits
    assert apart(ours, wanted) <= 1e-4
    assert torch.equal(ours.argmax(-1), wanted.argmax(-1))
    assert torch.equal(rounded.argmax(-1), wanted.argmax(-1))
    assert made.opinion.margin > 2 * made.opinion.rounding


@pytest.mark.slow
def test_from_a_config_a_directory_a_preset_and_a_spec(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("mistral", sliding_window=4096).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    first = dt.tiny(tmp_path / "config.json", tmp_path / "a")
    assert first.model_type == "mistral"
    assert first.spec == dt.tiny(config, tmp_path / "b").spec
    again = dt.tiny(tmp_path / "a", tmp_path / "c")  # of a small one: the same sizes
    assert again.spec == first.spec
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "c/model.safetensors").read_bytes()
    other = dt.tiny(tmp_path / "a", tmp_path / "d", seed=1)
    assert (tmp_path / "a/model.safetensors").read_bytes() != (tmp_path / "d/model.safetensors").read_bytes()
    assert dt.tiny("llama-tiny", tmp_path / "e").model_type == "llama"
    assert dt.tiny(dt.load_spec("gpt2-tiny"), tmp_path / "f", family="gpt2").to_dict()["model_type"] == "gpt2"
    assert str(other).startswith(f"{tmp_path / 'd'}: MistralForCausalLM, 2 layers, ")


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="exists and is not a model directory"):
        dt.tiny("llama", tmp_path / "file")
    with pytest.raises(SpecError, match=r"config\.model_type: 'nonesuch' is not a known family"):
        dt.tiny({"model_type": "nonesuch"}, tmp_path / "out")
    with pytest.raises(SpecError, match=r"embed_norm: layernorm cannot be written as"):
        dt.tiny("rwkv6-tiny", tmp_path / "out")
    assert not (tmp_path / "out").exists()
