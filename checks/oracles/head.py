"""Oracles of heads, on a row of one padding token and two real ones: logits, pooling, soft-cap, tied tables and losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Parameter

from checks.oracles.first_rank import halved
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.ops.vocab import chunked_cross_entropy
from dovetail.proof.laws.oracle import Comparison, alone, numbers, oracle, part, row

ROW = [[[90.0, -70.0], [1.0, 2.0], [3.0, 6.0]]]  # padding, then two tokens
TABLE = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]


def _left() -> Ctx:
    return Ctx(layout=TokenLayout.padded([2], 3, left=True))


def _right() -> Ctx:
    return Ctx(layout=TokenLayout.padded([2], 3))


@oracle("lm")
def lm() -> Iterator[Comparison]:
    """(1, 2) against the rows (1, 0), (0, 1), (1, 1): 1, 2, 3. The loss of label 1 is ln(e + e² + e³) − 2 = 1.40760596."""
    x, ctx = numbers([[[1.0, 2.0]]]), Ctx(layout=TokenLayout.whole(1, 1))
    plain = alone(part("lm", tied=False), {"out.weight": TABLE}, vocab=3, embed=2)
    yield Comparison("logits", plain(x, ctx), [[[1.0, 2.0, 3.0]]])
    yield Comparison("loss of label 1", plain.loss(x, torch.tensor([[1]]), ctx).mean(), 1.40760596)
    two = numbers([[[1.0, 2.0], [9.0, -9.0]]])
    yield Comparison("label −100 is ignored", plain.loss(two, torch.tensor([[1, -100]]), ctx).mean(), 1.40760596)
    with_bias = {"out.weight": TABLE, "bias": [1.0, 0.0, -1.0]}
    biased = alone(part("lm", tied=False, bias=True, scale=0.5), with_bias, vocab=3, embed=2)
    yield Comparison("½ of logits with bias", biased(x, ctx), [[[1.0, 1.0, 1.0]]])
    capped = alone(part("lm", tied=False, softcap=3.0), {"out.weight": TABLE}, vocab=3, embed=2)  # 3·tanh(x/3)
    yield Comparison("soft-cap 3", capped(x, ctx), [[[0.96453821, 1.74834884, 2.28478247]]])
    layer = part("block", mixer=part("attention", heads=2), ffn=None)
    for tied, tables in ((True, 1), (False, 2)):
        model = build(part("model", width=4, vocab=3, layers=(layer,), head=part("lm", tied=tied)))
        one = tensor_at(model, "head.out.weight") is tensor_at(model, "embed.table")
        count = sum(name in ("head.out.weight", "embed.table") for name, _ in model.named_parameters())
        yield Comparison(f"tables, tied {tied}", [count, int(one)], [tables, int(tables == 1)], near=0)


@oracle("lm")
def lm_over_ranks() -> Iterator[Comparison]:
    """A vocabulary of 4 over two ranks. (1, 2) against (1, 0), (0, 1) of this rank gives 1, 2; the other has 3, 0. Of the other
    rank come the largest logit 3, e⁰ + e⁻³ = 1.04978707 and the logit of its label, 0 for label 1. The loss is
    ln(e + e² + e³ + 1) − 2 = 1.44018970; the gradient of x, this rank's part, is (p₀, p₁ − 1) = (0.08714432, −0.76311718)."""
    lm = alone(part("lm", tied=False), {"out.weight": [*TABLE, [0.0, 0.0]]}, vocab=4, embed=2)
    lm.out.weight = Parameter(numbers(TABLE[:2]))
    x = numbers([[[1.0, 2.0]]]).requires_grad_()
    yield Comparison("logits of both ranks", lm(x, halved([[[3.0, 0.0]]])).detach(), [[[1.0, 2.0, 3.0, 0.0]]])
    loss = lm.loss(x, torch.tensor([[1]]), halved(3.0, [[1.0497870683678638], [0.0]])).mean()
    loss.backward()
    assert x.grad is not None
    yield Comparison("loss of label 1, of this rank", loss.detach(), 1.44018970)
    yield Comparison("its gradient", x.grad, [[[0.08714432, -0.76311718]]])
    other = lm.loss(x, torch.tensor([[2]]), halved(3.0, [[1.0497870683678638], [3.0]])).mean()
    yield Comparison("loss of label 2, of the other rank", other.detach(), 0.44018970)
    x = numbers([[[1.0, 2.0], [1.0, 2.0]]])
    ignored = lm.loss(x, torch.tensor([[-100, 1]]), halved(3.0, [[1.0497870683678638], [0.0]])).mean()
    yield Comparison("label −100 is ignored over ranks", ignored.detach(), 1.44018970)


@oracle("lm")
def loss_in_chunks() -> Iterator[Comparison]:
    """Logits 1, 2, 3 three times, labels 1, 2 and none: losses 1.40760596 and 0.40760596, mean 0.90760596, in one chunk or
    in several. The gradient of the first: (softmax − (0, 1, 0))/2 = (0.04501529, −0.37763576, 0.33262048) through the table."""
    table, labels = numbers(TABLE), torch.tensor([[1, 2, -100]])
    for chunk in (1, 2, 3, 1024):
        x = numbers([[[1.0, 2.0]] * 3]).requires_grad_()
        loss = chunked_cross_entropy(lambda part: part @ table.T, x, labels, chunk=chunk).mean()
        loss.backward()
        assert x.grad is not None
        yield Comparison(f"chunks of {chunk}", loss, 0.90760596)
        yield Comparison(f"gradients, chunks of {chunk}", x.grad[0, ::2], [[0.37763576, -0.04501529], [0.0, 0.0]])
        nothing = chunked_cross_entropy(lambda part: part @ table.T, x, labels.new_full((1, 3), -100), chunk=chunk).mean()
        yield Comparison(f"no label at all, chunks of {chunk}", nothing, 0.0, near=0)
        # bfloat16 losses are summed in float32
        half = chunked_cross_entropy(lambda part: part @ table.T.bfloat16(), x.detach().bfloat16(), labels, chunk=chunk).mean()
        yield Comparison(f"half precision, chunks of {chunk}", str(half.dtype), "torch.float32")
        yield Comparison(f"its loss, chunks of {chunk}", half, 0.90760596)


@oracle("masked_lm")
def masked_lm() -> Iterator[Comparison]:
    """Dense gives (3, 1), gelu (2.99595031, 0.84134475), layernorm ±0.99999569, by (1, 2), plus (0.5, 0); then the table."""
    x, ctx = numbers([[[1.0, 2.0]]]), Ctx(layout=TokenLayout.whole(1, 1))
    weights: dict[str, Any] = {"dense.weight": [[1.0, 1.0], [0.0, 1.0]], "dense.bias": [0.0, -1.0], "out.weight": TABLE}
    weights |= {"norm.scale": [1.0, 2.0], "norm.shift": [0.5, 0.0]}
    bare = alone(part("masked_lm", tied=False, bias=False), weights, vocab=3, embed=2)
    yield Comparison("without bias", bare(x, ctx), [[[1.49999569, -1.99999138, -0.49999569]]])
    full = alone(part("masked_lm", tied=False), {**weights, "bias": [0.1, 0.2, 0.3]}, vocab=3, embed=2)
    yield Comparison("with bias", full(x, ctx), [[[1.59999569, -1.79999138, -0.19999569]]])
    # (3, 2) without its bias: gelu (2.99595031, 1.95449974), normed ±0.99998156
    plain = {name: value for name, value in weights.items() if name != "dense.bias"}
    unbiased = alone(part("masked_lm", tied=False, bias=False, dense_bias=False), plain, vocab=3, embed=2)
    yield Comparison("dense without bias", unbiased(x, ctx), [[[1.49998156, -1.99996312, -0.49998156]]])
    # a table of width 2 behind a residual stream of width 3: the dense layer gives (3, 1) as above
    wider = {**weights, "dense.weight": [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]], "bias": [0.1, 0.2, 0.3]}
    narrow = alone(part("masked_lm", tied=False), wider, vocab=3, embed=3, table=2)
    yield Comparison("a narrow table", narrow(numbers([[[1.0, 2.0, 9.0]]]), ctx), [[[1.59999569, -1.79999138, -0.19999569]]])
    # ln(e^1.59999569 + e^−1.79999138 + e^−0.19999569) − 1.59999569
    yield Comparison("loss of label 0", full.loss(x, torch.tensor([[0]]), ctx).mean(), 0.18121596)


# (1, 2) -> (3, 2), or (3, 1) with the bias
DENSE: dict[str, Any] = {"dense.weight": [[1.0, 1.0], [0.0, 1.0]]}
BIAS, NORM = {"dense.bias": [0.0, -1.0]}, {"norm.scale": [1.0, 2.0], "norm.shift": [0.5, 0.0]}
OUT: dict[str, Any] = {"out.weight": [[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]], "out.bias": [0.0, 0.5, 1.0]}


@oracle("classifier")
def classifier() -> Iterator[Comparison]:
    """The first, last and mean real token are (1, 2), (3, 6) and (2, 4), wherever the padding lies."""
    expected = {"first": [[1.0, 2.5, 0.0]], "last": [[3.0, 6.5, -2.0]], "mean": [[2.0, 4.5, -1.0]]}
    for pooling, logits in expected.items():
        module = alone(part("classifier", classes=3, pooling=pooling), OUT, embed=2)
        yield Comparison(f"{pooling}, padding on the left", module(numbers(ROW), _left()), logits)
        turned = numbers([[ROW[0][1], ROW[0][2], ROW[0][0]]])
        yield Comparison(f"{pooling}, padding on the right", module(turned, _right()), logits)
    module = alone(part("classifier", classes=3), OUT, embed=2)
    loss = module.loss(numbers(ROW), torch.tensor([0]), _left()).mean()  # ln(e + e^2.5 + 1) − 1
    yield Comparison("loss of class 0", loss, 1.76636790)
    # tanh 3 = 0.99505475, tanh 1 = 0.76159416; relu(3, 2) normed is ±0.99998, by (1, 2), plus (0.5, 0)
    behind = alone(part("classifier", classes=3, act=part("tanh")), {**DENSE, **BIAS, **OUT}, embed=2)
    yield Comparison("behind tanh(W x + b)", behind(numbers(ROW), _left()), [[0.99505475, 1.26159416, 1.23346060]])
    normed = part("classifier", classes=3, act=part("relu"), norm=part("layernorm"), dense_bias=False)
    logits = alone(normed, {**DENSE, **NORM, **OUT}, embed=2)(numbers(ROW), _left())
    yield Comparison("behind norm(relu(W x))", logits, [[1.49998000, -1.49996000, 4.49994000]])
    for name in ("classifier", "token_classifier"):
        dropping = alone(part(name, classes=3, dropout=0.5), OUT, embed=2)
        kept = dropping.hidden(numbers([[[1.0] * 2] * 32]), Ctx(layout=row(32), draws=Draws(3)))
        yield Comparison(f"{name}: dropout ½ leaves 0 or 2", sorted(set(kept.flatten().tolist())), [0.0, 2.0])
        whole = dropping.hidden(numbers([[2.0, 4.0]]), Ctx(layout=TokenLayout.whole(1, 1)))
        yield Comparison(f"{name}: dropout only in training", whole, [[2.0, 4.0]])


@oracle("token_classifier")
def token_classifier() -> Iterator[Comparison]:
    """Every token by itself."""
    module = alone(part("token_classifier", classes=3), OUT, embed=2)
    yield Comparison("two tokens", module(numbers(ROW)[:, 1:], _left()), [[[1.0, 2.5, 0.0], [3.0, 6.5, -2.0]]])
    loss = module.loss(numbers(ROW), torch.tensor([[-100, 0, -100]]), _left()).mean()
    yield Comparison("loss of class 0 for token 1", loss, 1.76636790)
    behind = alone(part("token_classifier", classes=3, act=part("tanh")), {**DENSE, **BIAS, **OUT}, embed=2)
    yield Comparison("behind tanh(W x + b)", behind(numbers(ROW)[:, 1:2], _left()), [[[0.99505475, 1.26159416, 1.23346060]]])
    # ln(e^0.99505475 + e^1.26159416 + e^1.23346060) − 0.99505475
    loss = behind.loss(numbers(ROW), torch.tensor([[-100, 0, -100]]), _left()).mean()
    yield Comparison("its loss", loss, 1.27387097)


@oracle("next_sentence")
def next_sentence() -> Iterator[Comparison]:
    """The first real token is (1, 2): tanh(3, 1) = (0.99505475, 0.76159416), through (1, 0), (1, −1) plus (0.25, 0.5)."""
    weights: dict[str, Any] = {**DENSE, **BIAS, "out.weight": [[1.0, 0.0], [1.0, -1.0]], "out.bias": [0.25, 0.5]}
    module = alone(part("next_sentence"), weights, embed=2)
    yield Comparison("padding on the left", module(numbers(ROW), _left()), [[1.24505475, 0.73346060]])
    turned = numbers([[ROW[0][1], ROW[0][2], ROW[0][0]]])
    yield Comparison("padding on the right", module(turned, _right()), [[1.24505475, 0.73346060]])
    # ln(e^1.24505475 + e^0.73346060) − 1.24505475
    yield Comparison("loss of class 0", module.loss(numbers(ROW), torch.tensor([0]), _left()).mean(), 0.46971550)
    yield Comparison("no label", module.loss(numbers(ROW), torch.tensor([-100]), _left()).mean(), 0.0, near=0)


@oracle("pooled_embedding")
def pooled_embedding() -> Iterator[Comparison]:
    """(1, 2), (3, 6), (2, 4); to unit length (1, 2)/√5; through tanh(W·): tanh 4 = 0.99932930, tanh −1.5 = −0.90514825."""
    expected = {"first": [[1.0, 2.0]], "last": [[3.0, 6.0]], "mean": [[2.0, 4.0]]}
    for pooling, vector in expected.items():
        yield Comparison(pooling, alone(part("pooled_embedding", pooling=pooling), embed=2)(numbers(ROW), _left()), vector)
    # a row without a real token still gives an output: the vector at some index, or zeros as the mean of no tokens
    empty = Ctx(layout=TokenLayout.padded([0], 3))
    for pooling, vector in (("first", [[3.0, 6.0]]), ("last", [[90.0, -70.0]]), ("mean", [[0.0, 0.0]])):
        yield Comparison(
            f"{pooling} of no tokens", alone(part("pooled_embedding", pooling=pooling), embed=2)(numbers(ROW), empty), vector
        )
    unit = alone(part("pooled_embedding", unit=True), embed=2)(numbers(ROW), _left())
    yield Comparison("unit", unit, [[0.44721360, 0.89442719]])
    weights = {"out.weight": [[2.0, 0.0], [0.0, -0.5]], "out.bias": [0.0, 0.5]}
    dense = alone(part("pooled_embedding", dense=True), weights, embed=2)
    yield Comparison("dense", dense(numbers(ROW), _left()), [[0.99932930, -0.90514825]])
    # 1 − cos of the angle between (2, 4) and (1, 0)
    loss = alone(part("pooled_embedding"), embed=2).loss(numbers(ROW), numbers([[1.0, 0.0]]), _left()).mean()
    yield Comparison("loss against (1, 0)", loss, 0.55278640)


@oracle("reward")
def reward() -> Iterator[Comparison]:
    """2·x₁ − ½·x₂ of (3, 6), (1, 2) and their mean (2, 4): 3, 1 and 2; (5 − 3)² = 4, (5 − 1)² = 16, (5 − 2)² = 9."""
    for pooling, value, loss in (("last", 3.0, 4.0), ("first", 1.0, 16.0), ("mean", 2.0, 9.0)):
        module = alone(part("reward", pooling=pooling), {"out.weight": [[2.0, -0.5]]}, embed=2)
        yield Comparison(pooling, module(numbers(ROW), _left()), [[value]])
        yield Comparison(f"{pooling}, loss against 5", module.loss(numbers(ROW), numbers([[5.0]]), _left()).mean(), loss)
