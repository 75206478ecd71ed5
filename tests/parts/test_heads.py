"""Heads: pooling is per document in every layout, and a loss reads the logits that a forward returns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dovetail.base.errors import InputError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout

LENGTHS = [3, 1, 5]
POOLED = [
    "{kind: classifier, classes: 3, pooling: first}",
    "{kind: classifier, classes: 3, act: tanh, pooling: mean}",
    "{kind: reward, pooling: last}",
    "{kind: pooled_embedding, pooling: mean, unit: true}",
    "{kind: pooled_embedding, pooling: first, dense: true}",
]


def model_of(head: str) -> ModelModule:
    spec = from_yaml(f"width: 28\nvocab: 62\nlayers: [{{repeat: 2, mixer: {{heads: 2}}, ffn: {{hidden: 36}}}}]\nhead: {head}")
    return build(spec, dtype=torch.float64)


@pytest.mark.parametrize("head", POOLED)
@torch.no_grad()
def test_a_pooled_output_is_that_of_the_document_alone(head: str) -> None:
    model, texts = model_of(head), [torch.arange(n) + 7 * n for n in LENGTHS]
    alone = torch.cat([model(text[None], Ctx(layout=TokenLayout.whole(1, len(text)))) for text in texts])
    flat = torch.cat(texts)
    short = torch.cat([flat, torch.tensor([1, 1])])[None]
    answers = {
        "flat": model(flat, Ctx(layout=TokenLayout.flat(LENGTHS))),
        "packed": model(flat[None], Ctx(layout=TokenLayout.packed([LENGTHS], len(flat)))),
        "packed and padded": model(short, Ctx(layout=TokenLayout.packed([LENGTHS], len(flat) + 2))),
        "two rows": model(
            F.pad(torch.stack([F.pad(flat[:4], (0, 1), value=1), flat[4:]]), (0, 2), value=1),
            Ctx(layout=TokenLayout.packed([LENGTHS[:2], LENGTHS[2:]], 7)),
        ),
    }
    for layout, answer in answers.items():
        torch.testing.assert_close(answer, alone, msg=lambda text, layout=layout: f"{layout}: {text}")


@torch.no_grad()
def test_a_row_without_a_token_has_an_output() -> None:
    model = model_of("{kind: pooled_embedding}")
    flat = model(torch.arange(4), Ctx(layout=TokenLayout.flat([3, 0, 1])))
    assert flat.shape == (3, 28)
    assert not flat[1].any()


@pytest.mark.parametrize(
    "head",
    ["{kind: lm, scale: 0.3, softcap: 2.0, bias: true}", "masked_lm", "{kind: token_classifier, classes: 62, act: relu}"],
)
def test_the_loss_is_the_cross_entropy_of_the_logits(head: str) -> None:
    model, tokens = model_of(head), torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        model.head.get_parameter(
            "dense.weight" if head == "masked_lm" else next(iter(dict(model.head.named_parameters())))
        ).mul_(30)
    ctx = Ctx(layout=TokenLayout.whole(2, 20))
    labels = tokens.roll(-1, 1).masked_fill(tokens % 7 == 0, -100)
    want = F.cross_entropy(model(tokens, ctx).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(model.loss(tokens, labels, ctx), want)


@pytest.mark.parametrize(("ids", "bad"), [([3, 62, 5], 62), ([3, -1, 5], -1)])
def test_an_id_outside_the_vocabulary_is_named(ids: list[int], bad: int) -> None:
    with pytest.raises(InputError, match=rf"embed: token id {bad} is outside the vocabulary of 62; ids are 0 to 61"):
        model_of("lm")(torch.tensor([ids]), Ctx(layout=TokenLayout.whole(1, 3)))


@torch.no_grad()
def test_a_layout_serves_models_of_two_dtypes() -> None:
    tokens, layout = torch.arange(12)[None], TokenLayout.whole(1, 12)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        model = model_of("lm").to(dtype)
        logits = model(tokens, Ctx(layout=layout))
        assert logits.dtype == dtype
        assert torch.equal(logits, model(tokens, Ctx(layout=TokenLayout.whole(1, 12))))
