"""Packed leaves: the products of plain ones, for every number of rows, with adapters too; what is no float32 matrix stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dovetail as dt
from dovetail.api.engine import EngineOptions, load_engine
from dovetail.base.errors import SpecError
from dovetail.nn.linear import Linear
from dovetail.proof.laws.case import perturbed
from dovetail.serving.packed import Packed, pack
from dovetail.serving.request import Request
from dovetail.weights.adapters.attach import attach

LLAMA = "{width: 48, vocab: 90, layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12, bias: true}, ffn: {hidden: 80}}]}"
MIXED = """
width: 48
vocab: 90
layers:
- {mixer: {kind: mla, heads: 4, kv_rank: 12, nope: 8, rope: 8, value: 12}, ffn: {kind: moe, experts: 4, hidden: 40}}
- {mixer: {kind: mamba2, state_size: 8, head: 12, inner: 96}, ffn: {hidden: 80}}
"""


def is_packed(module: torch.nn.Module) -> bool:
    return isinstance(module, Linear) and isinstance(module.storage, Packed)


@pytest.mark.parametrize("text", [LLAMA, MIXED])
def test_a_packed_model_has_the_same_logits(text: str) -> None:
    spec = dt.from_yaml(text)
    plain, packed = (perturbed(spec, 0, torch.float32) for _ in range(2))
    assert pack(packed) == sum(type(leaf) is Linear and leaf.weight.dim() == 2 for leaf in plain.modules())
    for rows, n in ((1, 1), (3, 7), (16, 5)):
        tokens = torch.randint(0, 90, (rows, n), generator=torch.Generator().manual_seed(rows))
        with torch.inference_mode():
            want, got = plain(tokens), packed(tokens)
        assert (got - want).abs().max() < 2e-5 * want.abs().max()
    for (path, leaf), other in zip(plain.named_modules(), packed.modules(), strict=True):
        if is_packed(other):
            assert isinstance(leaf, Linear)
            assert torch.equal(other.dense(), leaf.weight), path


def test_a_row_has_the_same_bits_beside_others() -> None:
    leaf = Linear((80, 48))
    leaf.weight = torch.nn.Parameter(torch.randn(80, 48, generator=torch.Generator().manual_seed(0)))
    holder = torch.nn.ModuleDict({"one": leaf})
    pack(holder)
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        together = holder["one"](x)
        for rows in (1, 2, 5, 16):
            assert torch.equal(holder["one"](x[:rows]), together[:rows])


def test_adapters_fit_packed_leaves() -> None:
    models = [perturbed(dt.from_yaml(LLAMA), 0, torch.float32) for _ in range(2)]
    pack(models[1])
    for model in models:
        attach(model, {"kind": "lora", "rank": 3})
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if ".adapter." in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 4)
    tokens = torch.arange(12)[None]
    with torch.inference_mode():
        want, got = (model(tokens) for model in models)
    assert (got - want).abs().max() < 2e-5 * want.abs().max()
    with pytest.raises(SpecError, match="packed for inference"):
        models[1].layers[0].mixer.q.set_matrix(torch.zeros(72, 48), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    model = dt.build(LLAMA, dtype=dtype)
    assert pack(model) == 0
    assert not any(is_packed(one) for one in model.modules())


def test_an_engine_of_a_directory_is_packed_and_has_the_tokens_of_generate(tmp_path: Path) -> None:
    model = perturbed(dt.from_yaml(LLAMA), 3, torch.float32)
    dt.save(model, tmp_path / "model")
    engine = load_engine(tmp_path / "model", EngineOptions(rows=3, longest=64))
    assert sum(is_packed(one) for one in engine.model.modules()) == 15  # seven per layer, and the tied head
    prompts = [[5, 9, 20], [7], [3, 3, 8, 1, 60]]
    for i, prompt in enumerate(prompts):
        engine.add(Request(id=str(i), prompt=tuple(prompt), max_tokens=12))
    found: dict[str, list[int]] = {}
    while engine.busy:
        for output in engine.step():
            found.setdefault(output.id, []).extend(output.tokens)
    for i, prompt in enumerate(prompts):
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(12):
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert found[str(i)] == ids[len(prompt) :]
