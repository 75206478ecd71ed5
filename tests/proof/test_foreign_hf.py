"""Laws on tiny classes of transformers, from a directory with weights and from one with a config only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.proof.foreign.laws import laws_on
from dovetail.proof.foreign.opening import opened
from dovetail.proof.laws.law import Outcome

transformers = pytest.importorskip("transformers")
CHEAP = ("causal", "chunked", "padded", "gradient", "every_weight")


def directory(place: Path, config: Any, weights: bool) -> str:
    if weights:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
    else:
        config.save_pretrained(place)
    return f"hf:{place}"


def llama() -> Any:
    return transformers.LlamaConfig(
        vocab_size=62, hidden_size=30, intermediate_size=44, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        head_dim=12, max_position_embeddings=64,
    )  # fmt: skip


def gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=62, n_embd=28, n_head=4, n_layer=2, n_positions=64, bos_token_id=1, eos_token_id=2
    )


def mamba() -> Any:
    return transformers.MambaConfig(vocab_size=62, hidden_size=28, num_hidden_layers=2, state_size=5)


def tried(text: str, *laws: str) -> dict[str, Outcome]:
    return {found.law: found for found in laws_on(opened(text), laws)}


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("config", [llama, gpt2])
def test_a_sound_class_passes(config: Any, weights: bool, tmp_path: Path) -> None:
    found = tried(directory(tmp_path, config(), weights), *CHEAP)
    assert {name: one.state for name, one in found.items()} == dict.fromkeys(CHEAP, "passed"), found
    assert found["padded"].detail == ""  # packed documents were tried too


def test_cache_and_mask_of_a_recurrent_model_are_detected_under_other_names(tmp_path: Path) -> None:
    case = opened(directory(tmp_path, mamba(), False))
    assert case.cache is not None
    assert (case.cache.argument, case.masks, case.positions, case.mask_covers) == ("cache_params", True, False, "new")
    found = {one.law: one for one in laws_on(case, ["causal", "chunked"])}
    assert found["causal"].state == "passed"
    assert found["chunked"].state == "failed"  # its forward takes one token with a cache: see docs/foreign.md
    assert found["chunked"].detail.startswith("in chunks: first differ at row 0, position 6")


def test_weights_of_a_checkpoint_stay_as_they_are(tmp_path: Path) -> None:
    text = directory(tmp_path, llama(), True)
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(opened(text).model.lm_head.weight, there.lm_head.weight.double())  # type: ignore[arg-type, attr-defined]


@pytest.mark.slow
def test_a_class_of_transformers_compiles(tmp_path: Path) -> None:
    assert tried(directory(tmp_path, llama(), False), "compiled")["compiled"].state == "passed"
