"""Families: decoders, encoders, encoder–decoders, vision, other heads; the properties that distinguish them."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.files.spec import changed, from_yaml, load_spec
from dovetail.model.construction import build
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.state.pool import Pool


def lively(spec: Any) -> ModelModule:
    """Weights far from the first ones, so that nothing hides behind near-uniform attention."""
    model = build(spec, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def influence(model: ModelModule, n: int, ctx: Ctx) -> Tensor:
    """(n, n) how strongly token j reaches output i."""
    embedded = torch.randn(1, n, model.part.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def through(x: Tensor) -> Tensor:
        for block in model.layers:
            x = block(x, ctx, {})
        return x.sum(-1)[0]

    jacobian = torch.autograd.functional.jacobian(through, embedded)
    assert isinstance(jacobian, Tensor)
    return jacobian[:, 0].norm(dim=-1)


def test_a_decoder_looks_back_and_an_encoder_both_ways() -> None:
    decoder, encoder = lively(load_spec("llama-tiny")), lively(load_spec("bert-tiny"))
    ctx = Ctx(layout=TokenLayout.whole(1, 6))
    ahead = torch.ones(6, 6).triu(1).bool()
    reach = influence(decoder, 6, ctx)
    assert (reach[ahead] == 0).all()
    assert (reach[~ahead] > 0).all()
    assert (influence(encoder, 6, ctx) > 0).all()
    assert [decoder.part.order(), encoder.part.order()] == ["causal", "both"]


def test_perplexity_is_e_to_the_loss_and_a_blind_model_has_that_of_the_vocabulary() -> None:
    model = build(from_yaml("{width: 24, vocab: 37, layers: [{mixer: {heads: 2}}], init: {spread: 1.0e-9}}"))
    tokens = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(0))
    loss = model.loss(tokens, tokens, Ctx(layout=TokenLayout.whole(2, 9))).item()
    assert loss == pytest.approx(log(37), abs=1e-5)
    assert exp(loss) == pytest.approx(37, rel=1e-4)


def test_the_next_token_loss_is_the_mean_of_minus_log_p() -> None:
    model = lively(from_yaml("{width: 24, vocab: 37, layers: [{mixer: {heads: 2}}]}"))
    tokens = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = tokens.roll(-1, 1).clone()
    labels[:, -1] = -100
    ctx = Ctx(layout=TokenLayout.whole(2, 9))
    p = torch.softmax(model(tokens, ctx), -1)
    chosen = [-p[i, j, labels[i, j]].log().item() for i in range(2) for j in range(8)]
    assert model.loss(tokens, labels, ctx).item() == pytest.approx(sum(chosen) / 16)


def test_an_encoder_fills_in_and_separates_sentences() -> None:
    spec = changed(load_spec("bert-tiny"), ["head={kind: masked_lm}"])
    model = lively(spec)
    tokens = torch.randint(0, 512, (2, 9), generator=torch.Generator().manual_seed(0))
    layout = TokenLayout.whole(2, 9)
    first = model(tokens, Ctx(layout=layout, types=torch.zeros_like(tokens)))
    second = model(tokens, Ctx(layout=layout, types=torch.ones_like(tokens)))
    assert first.shape == (2, 9, 512)
    assert (first - second).abs().max() > 1e-3
    assert first.equal(model(tokens, Ctx(layout=layout)))


@pytest.mark.parametrize("name", ["t5-tiny", "transformer-2017-tiny"])
def test_a_decoder_that_looks_at_a_source(name: str) -> None:
    """It depends on all of the source, not on its padding; and writing token by token equals reading at once."""
    model = lively(load_spec(name))
    draw = torch.Generator().manual_seed(3)
    source, target = (torch.randint(0, 512, (2, n), generator=draw) for n in (7, 6))
    source_layout = TokenLayout.padded([7, 5], 7)
    encoder_output, encoder_layout = model.encode(source, Ctx(layout=source_layout))
    whole = model(target, Ctx(layout=TokenLayout.whole(2, 6), encoder_output=encoder_output, encoder_layout=encoder_layout))

    changed_source = source.clone()
    changed_source[1, 5:] += 1  # padding
    changed_source[0, 3] = (changed_source[0, 3] + 1) % 512
    encoder_output, _ = model.encode(changed_source % 512, Ctx(layout=source_layout))
    other = model(target, Ctx(layout=TokenLayout.whole(2, 6), encoder_output=encoder_output, encoder_layout=encoder_layout))
    torch.testing.assert_close(other[1], whole[1])
    assert (other[0] - whole[0]).abs().amax(-1).min() > 1e-6

    pool = Pool(model.part, rows=2, capacity=6, source=7, dtype=torch.float64)
    encoder_output, encoder_layout = model.encode(source, Ctx(layout=source_layout))
    model.fill(
        Ctx(layout=source_layout, encoder_output=encoder_output, encoder_layout=encoder_layout), pool.admit([0, 1], [7, 5])
    )
    for i in range(6):
        step = pool.step([0, 1], [1, 1])
        logits = model(target[:, i : i + 1], Ctx(layout=step.layout, views=step.views))
        torch.testing.assert_close(logits[:, 0], whole[:, i], rtol=0, atol=1e-9)


def test_an_image_of_224_is_196_tokens_of_768_values_and_a_class() -> None:
    model = build(load_spec("vit-base"), device="meta")
    assert model.embed.project.weight.shape == (768, 3 * 16 * 16)  # type: ignore[union-attr]
    x, ctx = model.hidden(torch.empty(2, 3, 224, 224, device="meta"), Ctx(layout=TokenLayout.whole(2, 1, device="meta")))
    assert x.shape == (2, 197, 768)
    assert ctx.layout.n == 197


def test_a_vision_model_classifies_from_its_class_token() -> None:
    spec = changed(load_spec("vit-tiny"), ["head={kind: classifier, classes: 10}"])
    model = lively(spec)
    image = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ctx = Ctx(layout=TokenLayout.whole(2, 1))
    x, _ = model.hidden(image, ctx)
    logits = model(image, ctx)
    assert logits.shape == (2, 10)
    torch.testing.assert_close(logits, model.head.out(x[:, 0]))  # type: ignore[operator, union-attr]
    turned = model(image.flip(-1), ctx)
    assert (turned - logits).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        ("{kind: token_classifier, classes: 5}", (3, 6, 5)),
        ("next_sentence", (3, 2)),
        ("reward", (3, 1)),
        ("{kind: pooled_embedding, unit: true}", (3, 120)),
        ("{kind: pooled_embedding, pooling: first, dense: true}", (3, 120)),
    ],
)
def test_other_heads_give_an_output_per_row_or_token_with_any_padding(head: str, shape: tuple[int, ...]) -> None:
    model = lively(changed(load_spec("bert-tiny"), [f"head={head}"]))
    rows = [torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (6, 4, 2)]
    for left in (False, True):
        tokens = torch.zeros(3, 6, dtype=torch.long)
        for i, row in enumerate(rows):
            tokens[i, 6 - len(row) :] = row if left else 0
            tokens[i, : len(row)] = tokens[i, : len(row)] if left else row
        got = model(tokens, Ctx(layout=TokenLayout.padded([6, 4, 2], 6, left=left)))
        assert got.shape == shape
        for i, row in enumerate(rows):
            alone = model(row[None], Ctx(layout=TokenLayout.whole(1, len(row))))[0]
            mine = got[i] if len(shape) == 2 else got[i, 6 - len(row) :] if left else got[i, : len(row)]
            torch.testing.assert_close(mine, alone)
