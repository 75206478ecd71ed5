"""Defects of models and adapters that random programs of calls found: each test failed before its fix."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail as dt
from dovetail.base.errors import SpecError
from dovetail.decoding.beam import beam_search
from dovetail.decoding.embedding import Embedder
from dovetail.decoding.generation import Vocabulary
from dovetail.decoding.steps import Decoder
from dovetail.ops.formats.kinds import Int8
from dovetail.proof.laws.adapted import perturb
from dovetail.proof.laws.mutant import spec
from dovetail.serving.engine import Engine
from dovetail.state.pool import Pool
from dovetail.training.rollout import roll_out
from dovetail.weights.adapters.attach import attach, detach, merge
from dovetail.weights.adapters.lora import Lora
from dovetail.weights.adapters.multi_lora import Bank
from dovetail.weights.adapters.storage import adapter_tensors
from dovetail.weights.quantization.qat import fake_quantize
from dovetail.weights.quantization.recipe import select

IDS = torch.arange(12).view(3, 4)
PROMPT = [3, 5, 7, 9]
DROPOUT = {"dropout": 0.5, "layers.*.mixer.dropout": 0.5}


def model(**fields: object) -> dt.Transformer:
    found = spec()
    for path, value in fields.items():
        found = found.set(path, value)
    return dt.build(found)


def tensors_of(root: nn.Module) -> Iterator[Tensor]:
    """Every tensor that a model refers to: parameters, buffers, and what modules keep beside them."""
    for module in root.modules():
        kept = [*module._parameters.values(), *module._buffers.values(), *module.__dict__.values()]
        for value in kept:
            yield from (one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, Tensor))


# -- A15


@pytest.mark.parametrize("format", [None, {"kind": "int8", "dynamic": True}, {"kind": "int4", "group": 4}])
def test_a15_no_tensor_of_a_model_is_one_of_inference_mode_after_it_was_used(format: dict[str, Any] | None) -> None:
    """Weights that `generate(compiled=True)` joined were inference tensors, which no backward pass takes. Nothing that outlives
    a call may be one: also not what a quantized leaf prepares when it is first used."""
    one = model()
    if format is not None:
        dt.quantize(one, format=format, speed=False)
    with torch.inference_mode():  # as in `generate`; the graphs are compiled at the first step, which is not run here
        Decoder(one, Pool(one.part, 1, 16, dtype=one.dtype, device=one.device), compiled=True)
    one.generate(PROMPT, 3)
    Embedder(one).vector(PROMPT)
    beam_search(one, PROMPT, 3, beams=2)
    assert not [tuple(tensor.shape) for tensor in tensors_of(one) if tensor.is_inference()]
    attach(one, "lora")
    one.loss(IDS).backward()
    assert all(weight.grad is not None for weight in one.parameters() if weight.requires_grad)
    one.trace(IDS, "layers.*.mixer.pattern", grad=True)["layers.0.mixer.pattern"].sum().backward()


def test_a15_joined_weights_take_gradients() -> None:
    one, other = model(), model()
    with torch.inference_mode():
        Decoder(one, Pool(one.part, 1, 16, dtype=one.dtype, device=one.device), compiled=True)
    for each in (one, other):
        each.loss(IDS).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one.parameters(), other.parameters(), strict=True))  # type: ignore[arg-type]


# -- A18


def adapter(seed: int) -> dict[str, Tensor]:
    """The tensors of an adapter of `model()`."""
    one = model()
    attach(one, Lora(rank=2))
    perturb(one, seed)
    return {path: tensor.detach().clone() for path, tensor in adapter_tensors(one).items()}


def adapted(one: dt.Transformer, bank: Bank, name: str) -> Tensor:
    with torch.no_grad(), bank.rows([name] * len(IDS)):
        return one(IDS)


def test_a18_a_bank_loses_no_adapter_of_another() -> None:
    one = model()
    first, second = Bank(one), Bank(one)
    first.load("x", Lora(rank=2), adapter(0))
    before = adapted(one, first, "x")
    with pytest.raises(SpecError, match=r"has an adapter already \(unload the adapters of the bank"):
        second.load("y", Lora(rank=2), adapter(1))
    assert not second.loaded, "what was refused is not loaded"
    for change in (detach, merge, lambda each: attach(each, "lora")):  # each would lose them, too
        with pytest.raises(dt.DovetailError):
            change(one)
        assert torch.equal(adapted(one, first, "x"), before)
    first.unload("x")
    second.load("y", Lora(rank=2), adapter(1))
    assert not torch.equal(adapted(one, second, "y"), before)


def test_a18_a_bank_loses_no_attached_adapter() -> None:
    one = model()
    bank = Bank(one)
    attach(one, Lora(rank=2))
    perturb(one, 0)
    with torch.no_grad():
        before, count = one(IDS), len(adapter_tensors(one))
    with pytest.raises(SpecError, match=r"has an adapter already \(merge it or detach it first\)"):
        bank.load("y", Lora(rank=2), adapter(1))
    assert len(adapter_tensors(one)) == count
    with torch.no_grad():
        assert torch.equal(one(IDS), before)


def test_a18_two_engines_on_a_model_lose_no_adapter() -> None:
    one = model().eval()
    first, second = Engine(one, rows=1, longest=16), Engine(one, rows=1, longest=16)
    first.load_adapter("x", Lora(rank=2), adapter(0))
    with pytest.raises(SpecError, match="has an adapter already"):
        second.load_adapter("y", Lora(rank=2), adapter(1))
    assert first.adapters.bank is not None
    assert list(first.adapters.bank.placed)


def test_a18_detach_leaves_quantization_aware_training_alone() -> None:
    one = model()
    fake_quantize(one, select(one.spec, Int8()))
    with pytest.raises(SpecError, match="end quantization-aware training first"):
        detach(one)


def test_adapters_of_quantized_leaves_have_the_dtype_of_the_model() -> None:
    """They had that of the leaf's scales: found by a program that quantized, loaded an adapter into a bank and compared."""
    one = model().double()
    dt.quantize(one, format="int8", speed=False)
    attach(one, "lora")
    assert {tensor.dtype for tensor in adapter_tensors(one).values()} == {torch.float64}


# -- A19


def test_a19_inference_in_training_mode_is_that_of_evaluation_mode() -> None:
    """`generate` in training mode had dropout: three calls gave three greedy answers."""
    one = model(**DROPOUT)
    expected = one.generate(PROMPT, 8)
    wanted = [Embedder(one).vector(PROMPT), beam_search(one, PROMPT, 4, beams=2), roll_out(one, [PROMPT], 2, 4, 1.0, (), 0)]
    one.train()
    one.layers[0].eval()  # each module keeps its own mode
    modes = [module.training for module in one.modules()]
    for _ in range(3):
        assert one.generate(PROMPT, 8) == expected
    assert torch.equal(Embedder(one).vector(PROMPT), wanted[0])
    assert [beam_search(one, PROMPT, 4, beams=2), roll_out(one, [PROMPT], 2, 4, 1.0, (), 0)] == wanted[1:]
    for token, known in zip(one.generate(PROMPT, 8, stream=True), expected, strict=True):
        assert token == known
        assert one.training, "between two tokens the caller has its mode"
    with pytest.raises(dt.DovetailError):
        one.generate([], 8)
    assert [module.training for module in one.modules()] == modes


def test_a19_an_encoder_reads_its_source_in_evaluation_mode() -> None:
    one = dt.build(dt.load_spec("t5-tiny").set("encoder.dropout", 0.5).set("dropout", 0.5))
    one.vocabulary = Vocabulary(start=(1,))
    expected = one.generate(PROMPT, 6)
    assert one.train().generate(PROMPT, 6) == expected


# -- A22


@pytest.mark.parametrize("change", [detach, merge], ids=["detach", "merge"])
def test_a22_weights_that_the_caller_froze_stay_frozen(change: object) -> None:
    one = model()
    one.embed.requires_grad_(False)
    one.layers[1].requires_grad_(False)
    before = {path: weight.requires_grad for path, weight in one.named_parameters()}
    attach(one, "lora")
    assert {path for path, weight in one.named_parameters() if weight.requires_grad} == set(adapter_tensors(one))
    merged = change(one)  # type: ignore[call-arg]
    assert {path: weight.requires_grad for path, weight in one.named_parameters()} == before
    if merged is not None:
        merged.undo()
        assert {path for path, weight in one.named_parameters() if weight.requires_grad} == set(adapter_tensors(one))
        detach(one)
        assert {path: weight.requires_grad for path, weight in one.named_parameters()} == before
    copied = copy.deepcopy(one)
    detach(copied)  # nothing is attached: nothing changes
    assert {path: weight.requires_grad for path, weight in copied.named_parameters()} == before


@pytest.mark.parametrize("preset", ["llama-tiny", "mamba2-hybrid-tiny", "deepseek-tiny", "transformer-2017-tiny"])
def test_a22_a_model_in_another_dtype_does_not_depend_on_how_it_came_to_it(preset: str, tmp_path: Path) -> None:
    """`build(…).double()` had the rotary angles of float32: saved and loaded it differed by 3.7e-10."""
    cast = dt.build(preset).double()
    dt.save(cast, tmp_path / "x")
    ways = [dt.load(tmp_path / "x"), dt.build(preset).bfloat16().float().double(), copy.deepcopy(cast).float().double()]
    for other in ways:
        for (path, a), (_, b) in zip(cast.named_buffers(), other.named_buffers(), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), path
    ids = {"source": IDS} if cast.spec.encoder is not None else {}
    assert torch.equal(cast(IDS, **ids), ways[0](IDS, **ids))
