"""Quantization-aware training: the same outputs as the quantized model, and gradients that pass through."""

from typing import Literal

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import SpecError, UsageError
from dovetail.data.corpus import Batch
from dovetail.nn.declared_tensors import check_declared
from dovetail.nn.layout import TokenLayout
from dovetail.ops.formats.kinds import FP8, Int4
from dovetail.training.loop import train
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan
from dovetail.training.step import Trainer
from dovetail.weights.quantization.qat import fake_quantize, finish
from dovetail.weights.quantization.recipe import leaf_at, quantize, select

SPEC = "width: 32\nvocab: 62\nlayers: [{repeat: 2, mixer: {heads: 4, kv_heads: 2, head: 8}, ffn: {hidden: 48}}]\n"
MOE = SPEC.replace("{hidden: 48}", "{kind: moe, experts: 4, hidden: 16}")


def tokens() -> torch.Tensor:
    return torch.randint(0, 62, (3, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("text", [SPEC, MOE])
def test_outputs_are_those_of_the_quantized_model(text: str) -> None:
    fake, real = dt.build(text), dt.build(text)
    recipe = select(fake.spec, Int4(group=16))
    fake_quantize(fake, recipe)
    quantize(real, real.spec, recipe)
    check_declared(fake, fake.spec)  # it trains and saves as a plain model
    with torch.no_grad():
        during = fake(tokens())
        assert torch.allclose(during, real(tokens()), atol=1e-5)
        assert finish(fake) == recipe
        assert torch.allclose(fake(tokens()), during, atol=1e-5)


def test_the_gradient_of_a_weight_is_that_of_the_rounded_weight() -> None:
    fake, dense = dt.build(SPEC), dt.build(SPEC)
    recipe = select(fake.spec, FP8())
    fake_quantize(fake, recipe)
    with torch.no_grad():
        for path, format in recipe.items():
            leaf = leaf_at(dense, path)
            leaf.weight.copy_(format.decode(format.encode(leaf.weight), leaf.in_features))
    grads = []
    for model in (fake, dense):
        model.loss(tokens()).backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    for name, gradient in grads[0].items():
        assert gradient is not None
        assert torch.allclose(gradient, grads[1][name], atol=1e-6), name


def test_training_lowers_the_loss_of_the_quantized_model() -> None:
    model = dt.build(SPEC)
    recipe = select(model.spec, Int4(group=16))
    fake_quantize(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with torch.no_grad():
        before = float(model.loss(tokens()))
    for _ in range(12):
        optimizer.zero_grad()
        model.loss(tokens()).backward()
        optimizer.step()
    finish(model)
    with torch.no_grad():
        assert float(model.loss(tokens())) < 0.8 * before


def test_a_leaf_with_an_adapter_is_refused() -> None:
    model = dt.build(SPEC)
    recipe = select(model.spec, FP8())
    fake_quantize(model, recipe)
    with pytest.raises(SpecError, match=r"layers.0.mixer.q: has an adapter \(FakeQuantizer\)"):
        fake_quantize(model, recipe)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_training_loop_trains_every_matrix_behind_its_rounding(optimizer: Literal["adamw", "muon"]) -> None:
    model = dt.build(SPEC)
    recipe = select(model.spec, Int4(group=16))
    before = {path: leaf_at(model, path).weight.detach().clone() for path in recipe}
    fake_quantize(model, recipe)
    ids = tokens()
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), TokenLayout.whole(len(ids), ids.shape[1] - 1))
    plan = Plan(steps=12, learning_rate=1e-2, optimizer=optimizer, quiet=True, evals=2)
    history = train(model, lambda step: batch, next_token, plan, [batch])
    assert history[-1].loss < 0.9 * history[0].loss
    for path, weight in before.items():
        assert not torch.equal(leaf_at(model, path).weight, weight), path


def test_a_model_without_a_weight_to_train_is_refused() -> None:
    model = dt.build(SPEC).requires_grad_(False)
    with pytest.raises(UsageError, match="no weight is trained"):
        Trainer(model, next_token, Plan(steps=1))
