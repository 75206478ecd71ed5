"""Beam search gives the tokens of transformers' `generate(num_beams=…)`, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draws import FIRST, Draw
from draws_more import MORE
from hf_pair import Pair
from transformers import T5Config, T5ForConditionalGeneration

from dovetail.base.errors import SpecError
from dovetail.decoding.beam import beam_search
from dovetail.hf.hf import from_hf, import_tensors
from dovetail.model.construction import build
from dovetail.nn.module import tensor_at

FAMILIES = {**FIRST, **MORE}
QUICK = ("llama", "gpt2", "jamba")
FLOAT32 = ("xglm",)  # computes in no other dtype: its least number of float64 overflows in a float32 tensor
NEW = 14
HOW: list[dict[str, Any]] = [
    {"beams": 3},
    {"beams": 4, "length_penalty": 2.0, "early_stopping": "never"},
    {"beams": 2, "length_penalty": -0.5, "early_stopping": True},
]


def theirs(model: Any, prompt: list[int], stop: list[int], beams: int, **how: Any) -> list[list[int]]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        num_beams=beams,
        num_return_sequences=beams,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=stop[0],
        **how,
    )
    begin = 1 if model.config.is_encoder_decoder else len(prompt)
    return [cut(row.tolist()[begin:], stop) for row in out]


def cut(tokens: list[int], stop: list[int]) -> list[int]:
    """Tokens up to the first that ends."""
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in QUICK else [pytest.mark.slow]) for family in FAMILIES]
)
def test_beams_are_theirs(family: str) -> None:
    pair = Pair(family, FAMILIES[family](Draw(f"{family} 0")), 0)
    if pair.decodes_one_row():
        pytest.skip("their decoding takes one row only")
    model, ours = pair.theirs, pair.ours
    if family not in FLOAT32:
        model, ours = model.double(), ours.double()
    stop = [3, 11, 17, 29, 31]  # so that beams end at different lengths
    for how, prompt in zip(HOW, pair.prompts([9, 5, 12]), strict=True):
        found = beam_search(ours, prompt, NEW, stop=stop, **how)
        assert [list(beam.tokens) for beam in found] == theirs(model, prompt, stop, **how), how
        assert [beam.score for beam in found] == sorted((beam.score for beam in found), reverse=True)


def test_beams_of_an_encoder_decoder_are_theirs() -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=61, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval().double()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.25 * torch.randn_like(tensor))
    spec = from_hf({**config.to_dict(), "architectures": ["T5ForConditionalGeneration"]})
    ours = build(spec).double()
    with torch.no_grad():
        for path, tensor in import_tensors(spec, dict(model.state_dict()), "t5").items():
            tensor_at(ours, path).copy_(tensor)
    stop = [3, 11, 17]
    for how in HOW:
        found = beam_search(ours, list(range(5, 14)), NEW, stop=stop, start=[0], **how)
        assert [list(beam.tokens) for beam in found] == theirs(model, list(range(5, 14)), stop, **how)


def test_beams_are_bounded() -> None:
    pair = Pair("llama", FAMILIES["llama"](Draw("llama 0")), 0)
    with pytest.raises(SpecError, match="beams"):
        beam_search(pair.ours, [1, 2], 3, beams=10**6)
