"""A training step: accumulation is exact, mixed precision, recomputed and compiled blocks give the same gradients, EMA."""

import pytest
import torch
from torch._dynamo.utils import counters

from dovetail.data.corpus import Batch
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED
from dovetail.training.loop import evaluate, train
from dovetail.training.objective import MaskedTokens, next_token
from dovetail.training.plan import Plan
from dovetail.training.recompute import Copies
from dovetail.training.step import Trainer

SPEC = """
width: 28
vocab: 62
dropout: 0.1
layers:
  - repeat: 2
    mixer: {kind: attention, heads: 6, kv_heads: 2, head: 12}
    ffn: {kind: glu, hidden: 44}
    wire: {kind: pre_norm, dropout: 0.2}
"""
ROUTED = SPEC.replace("{kind: glu, hidden: 44}", "{kind: moe, experts: 4, hidden: 18, router: {top_k: 2, balance_loss: 0.3}}")


def ragged(rows: int = 8, n: int = 11) -> Batch:
    """Rows of different lengths, some labels of which are ignored."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 62, (rows, n + 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.rand(rows, n, generator=generator) < 0.3, IGNORED)
    return Batch(tokens[:, :-1], labels, TokenLayout.padded([n, 3, 7, 1, n, 5, 2, 9][:rows], n))


def gradients(spec: str, dtype: torch.dtype = torch.float64, **plan: object) -> dict[str, torch.Tensor]:
    """The gradients of one step, before clipping."""
    model = build(from_yaml(spec), dtype=dtype, seed=1).train()
    trainer = Trainer(model, next_token, Plan(steps=1, clip=1e9, **plan))  # pyright: ignore[reportArgumentType]
    trainer.step(ragged(), 0, 0.0)
    return {path: weight.grad for path, weight in trainer.optimizer.weights.items() if weight.grad is not None}


def gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The relative distance of two sets of gradients."""
    assert a.keys() == b.keys()
    difference = torch.stack([(a[path] - b[path]).double().norm() for path in a]).norm()
    return (difference / torch.stack([b[path].double().norm() for path in b]).norm()).item()


@pytest.mark.parametrize("pieces", [2, 3, 8, 20])
def test_accumulation_is_exact_with_ragged_batches_and_ignored_labels(pieces: int) -> None:
    assert gap(gradients(SPEC, micro_batches=pieces), gradients(SPEC)) < 1e-12
    assert gap(gradients(SPEC, torch.float32, micro_batches=pieces), gradients(SPEC, torch.float32)) < 1e-6


def test_masked_tokens_are_the_same_in_pieces() -> None:
    spec = SPEC.replace("head: 12}", "head: 12, mask: full}") + "head: masked_lm\n"
    found = []
    for pieces in (1, 4):
        model = build(from_yaml(spec), dtype=torch.float64).train()
        trainer = Trainer(model, MaskedTokens(mask=3, vocab=62), Plan(steps=1, micro_batches=pieces))
        found.append(trainer.step(ragged(), 0, 0.0).loss)
    assert found[0] == pytest.approx(found[1], rel=1e-12)


@pytest.mark.parametrize("spec", [SPEC, ROUTED])
@pytest.mark.parametrize("kind", ["selective", "blocks"])
def test_recomputed_blocks_give_the_same_gradients(spec: str, kind: str) -> None:
    assert gap(gradients(spec, recompute=kind), gradients(spec)) < 1e-12


def test_bf16_keeps_weights_and_gradients_in_float32() -> None:
    exact, narrow = gradients(SPEC, torch.float32), gradients(SPEC, torch.float32, precision="bf16")
    assert all(gradient.dtype == torch.float32 for gradient in narrow.values())
    assert 1e-5 < gap(narrow, exact) < 0.03
    model = build(from_yaml(SPEC))
    table = model.get_parameter("embed.table")
    with Copies(model, torch.bfloat16):
        assert model(torch.arange(6)[None]).dtype == torch.bfloat16
        assert model.embed.table.dtype == torch.bfloat16
    assert model.get_parameter("embed.table") is table


def test_many_small_updates_add_up_in_bf16() -> None:
    """An update below the spacing of bfloat16 is lost in a bfloat16 weight, not in its float32 original."""
    model = build(from_yaml(SPEC)).train()
    trainer = Trainer(model, next_token, Plan(steps=9, precision="bf16", weight_decay=0.0))
    before = model.get_parameter("norm.scale").detach().clone()
    for step in range(9):
        trainer.step(ragged(), step, 1e-4)
    moved = (model.get_parameter("norm.scale") - before).abs().max().item()
    assert 1e-4 < moved < 9.1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_compiled_blocks_give_the_same_gradients() -> None:
    eager = gradients(SPEC, torch.float32)
    for kind in ("none", "selective", "blocks"):
        torch._dynamo.reset()
        counters.clear()
        assert gap(gradients(SPEC, torch.float32, compile=True, recompute=kind), eager) < 1e-5
        assert counters["stats"]["unique_graphs"], "blocks are compiled"
        assert not counters["graph_break"]
    both = gradients(SPEC, torch.float32, compile=True, precision="bf16", recompute="blocks")
    assert gap(both, eager) < 0.03


def test_the_moving_average_is_evaluated_and_training_goes_on_with_the_weights() -> None:
    model = build(from_yaml(SPEC), dtype=torch.float64).train()
    trainer = Trainer(model, next_token, Plan(steps=3, ema=0.9))
    path = "layers.0.ffn.up.weight"
    want = model.get_parameter(path).detach().clone()
    for step in range(3):
        trainer.step(ragged(), step, 1e-2)
        want = 0.9 * want + 0.1 * model.get_parameter(path).detach()
    now = model.get_parameter(path).detach().clone()
    assert (trainer.ema[path] - want).abs().max() < 1e-15
    with trainer.averaged():
        assert (model.get_parameter(path) - want).abs().max() < 1e-15
    assert torch.equal(model.get_parameter(path), now)
    assert (now - want).abs().max() > 1e-3


def test_muon_learns_faster_than_its_start() -> None:
    model, held = build(from_yaml(SPEC)), [ragged()]
    before = evaluate(model, held, next_token)
    train(model.train(), lambda step: ragged(), next_token, Plan(steps=30, optimizer="muon", learning_rate=2e-2, quiet=True))
    assert evaluate(model, held, next_token) < 0.7 * before
