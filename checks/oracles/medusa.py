"""Oracles of Medusa heads: one head of two residual layers by hand, and the losses of two heads over four tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx, Losses
from dovetail.proof.laws.oracle import REAL, Comparison, alone, numbers, oracle, part, row

TOKENS = torch.tensor([[0, 1, 2, 1]])
# every row has a root mean square of 1, so that norms change nothing; a row times the head's gives logits
TABLE = [[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]]
HEAD = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
OWN_HEAD = [[0.0, 0.0], [2.0, 0.0], [0.0, 0.0]]


@oracle("medusa")
def head() -> Iterator[Comparison]:
    """h = (1, 2): W h + b = (1.5, 4), SiLU of which is (1.22636171, 3.92805516): h becomes (2.22636171, 5.92805516). Then
    W h + b = (5.92805516, −1.22636171), SiLU of which is (5.91230680, −0.27816195)."""
    weights = {
        "residual_0.weight": [[1.0, 0.0], [2.0, 1.0]],
        "residual_0.bias": [0.5, 0.0],
        "residual_1.weight": [[0.0, 1.0], [-1.0, 0.0]],
        "residual_1.bias": [0.0, 1.0],
    }
    module = alone(part("medusa", blocks=2), weights, embed=2)
    yield Comparison("two layers", module(numbers([[[1.0, 2.0]]]), Ctx(layout=row(1)), {}), [[[8.13866852, 5.64989321]]])


@oracle("medusa")
def losses() -> Iterator[Comparison]:
    """Tokens 0 1 2 1, whose hidden states are (1, 1), (−1, 1), (1, −1), (−1, 1).

    The first head has W = 0 and b = (0, 1.27846454), SiLU of which is (0, 1): the logits of the first two tokens are (1, 2, 3)
    and (−1, 2, 1). They predict 2 and 1: ln(1 + 1/e + 1/e²) and ln(1 + 1/e + 1/e³), mean 0.37830909. The second head has W = 0
    and b = 0: the logits of the first token are (1, 1, 2), or (0, 2, 0) by a head of its own. It predicts 1: ln(2e + e²) − 1,
    or ln(2 + e²) − 2.
    """
    yield Comparison("the model's head", _losses(own=False), [0.15 * 0.37830909, 0.25 * 1.55144471])
    yield Comparison("a head of its own", _losses(own=True), [0.15 * 0.37830909, 0.25 * 0.23954477])


def _losses(own: bool) -> list[float]:
    norm = part("rmsnorm", eps=1e-30)
    layer = part("block", mixer=None, ffn=part("mlp", hidden=2, bias=False), norm=norm)
    heads = (part("medusa", weight=0.3), part("medusa", weight=0.5, head=part("lm", tied=False) if own else None))
    model = build(
        part("model", width=2, vocab=3, layers=(layer,), norm=norm, head=part("lm", tied=False), mtp=heads), dtype=REAL
    )
    given: dict[str, Any] = {"embed.table": TABLE, "head.out.weight": HEAD, "mtp.1.head.out.weight": OWN_HEAD}
    given["mtp.0.residual_0.bias"] = [0.0, 1.2784645427610737]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith(".scale"):
                weight.copy_(numbers(given[name]) if name in given else torch.zeros(()))
    found: dict[str, Tensor] = {}
    model.hidden(TOKENS, Ctx(layout=row(4), losses=Losses(found)))
    assert list(found) == ["mtp.0.loss", "mtp.1.loss"], list(found)
    return [loss.item() for loss in found.values()]
