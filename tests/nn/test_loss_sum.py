"""Batches with different numbers of labels are averaged by label: accumulated gradients are those of one batch."""

import pytest
import torch

from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import LossSum

SPEC = from_yaml("{width: 28, vocab: 62, layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]}")
TOKENS = torch.arange(4 * 9).reshape(4, 9)
LABELS = TOKENS.roll(-1, 1).masked_fill(TOKENS >= 20, -100)  # 18 labels in the first two rows, 2 in the others


def ctx(rows: int) -> Ctx:
    return Ctx(layout=TokenLayout.whole(rows, 9))


def gradients(model: ModelModule) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_accumulated_gradients_are_those_of_one_batch() -> None:
    model = build(SPEC, dtype=torch.float64)
    whole = model.loss(TOKENS, LABELS, ctx(4))
    whole.backward()
    want = gradients(model)
    model.zero_grad()
    halves = [model.loss_sum(TOKENS[i : i + 2], LABELS[i : i + 2], ctx(2)) for i in (0, 2)]
    assert [int(half.num_labels) for half in halves] == [18, 2]
    total = sum(half.num_labels for half in halves)
    for half in halves:
        (half.sum / total).backward()
    torch.testing.assert_close(halves[0].plus(halves[1]).mean(), whole)
    torch.testing.assert_close(gradients(model), want)
    assert abs(sum(half.mean() for half in halves) / 2 - whole) > 1e-4, "a mean of means is another number"


@pytest.mark.parametrize("head", ["lm", "masked_lm", "{kind: classifier, classes: 3}", "pooled_embedding", "reward"])
def test_every_head_counts_its_labels(head: str) -> None:
    model = build(from_yaml(f"{{width: 28, vocab: 62, layers: [{{mixer: {{heads: 2}}}}], head: {head}}}"), dtype=torch.float64)
    answers = model(TOKENS, ctx(4))
    labels = model.part.head.labels(model.scope, tuple(answers.shape[:-1]), torch.Generator().manual_seed(0))
    loss = model.loss_sum(TOKENS, labels, ctx(4))
    assert int(loss.num_labels) == (36 if answers.dim() == 3 else 4)
    torch.testing.assert_close(loss.sum / loss.num_labels, model.loss(TOKENS, labels, ctx(4)))


def test_losses_of_routers_are_weighted_by_the_labels() -> None:
    router = "{kind: softmax_router, top_k: 2, balance_loss: 0.5}"
    ffn = f"{{kind: moe, experts: 4, hidden: 20, router: {router}}}"
    model = build(from_yaml(f"{{width: 28, vocab: 62, layers: [{{mixer: {{heads: 2}}, ffn: {ffn}}}]}}"), dtype=torch.float64)
    training = Ctx(layout=TokenLayout.whole(4, 9), draws=Draws(3))
    torch.testing.assert_close(model.loss_sum(TOKENS, LABELS, training).mean(), model.loss(TOKENS, LABELS, training))
    assert model.loss(TOKENS, LABELS, training) > model.loss(TOKENS, LABELS, ctx(4)) + 0.1


def test_no_label_at_all_is_a_loss_of_zero() -> None:
    assert LossSum(torch.zeros(()), torch.tensor(0)).mean() == 0
