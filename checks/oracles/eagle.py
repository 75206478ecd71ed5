"""Oracles of EAGLE: its projection by hand, also on its own hidden state, and its loss over four tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx, Losses
from dovetail.proof.laws.oracle import REAL, Comparison, alone, numbers, oracle, part, row

ZEROS = [[0.0, 0.0], [0.0, 0.0]]
TOKENS = torch.tensor([[0, 1, 2, 1]])
# every row has a root mean square of 1, so that norms change nothing; a row times the head's gives logits
TABLE = [[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]]
HEAD = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]


def _eagle(**fields: Any) -> Any:
    return part("eagle", block=_nothing(), **fields)


def _nothing() -> Any:
    """A block whose weights are zero, which adds nothing."""
    return part("block", mixer=None, ffn=part("mlp", hidden=2, bias=False), norm=_norm())


def _norm() -> Any:
    return part("rmsnorm", eps=1e-30)


@oracle("eagle")
def depth() -> Iterator[Comparison]:
    """E = (3, 4), h = (1, 7): M [E; h] + b = (3 + 7 + 0.5, 4 + 2·1 − 1). The next input is E = (1, 0) and this: (1 + 5 + 0.5,
    0 + 2·10.5 − 1)."""
    weights = {
        "proj.weight": [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 2.0, 0.0]],
        "proj.bias": [0.5, -1.0],
        "block.ffn_norm.scale": [1.0, 1.0],
        "block.ffn.up.weight": ZEROS,
        "block.ffn.down.weight": ZEROS,
    }
    module = alone(_eagle(), weights, embed=2)
    first = module(numbers([[[1.0, 7.0]]]), numbers([[[3.0, 4.0]]]), Ctx(layout=row(1)), {})
    yield Comparison("on the model's hidden state", first, [[[10.5, 5.0]]])
    yield Comparison("on its own", module(first, numbers([[[1.0, 0.0]]]), Ctx(layout=row(1)), {}), [[[6.5, 20.0]]])


@oracle("eagle")
def losses() -> Iterator[Comparison]:
    """Tokens 0 1 2 1, whose hidden states are (1, 1), (−1, 1), (1, −1), (−1, 1); a M that reads the hidden state alone, and
    b = (0.5, 0): the first three predict (1.5, 1), (−0.5, 1), (1.5, −1).

    The first two predict a token. They differ from the next by (2.5, 0) and (−1.5, 2): (2 + 0)/2 and (1 + 1.5)/2, mean 1.125.
    The model's logits there are (−1, 1, 0) and (1, −1, 0), with the probs 0.66524096, 0.24472847 and 0.09003057 from the
    largest on. Those of (1.5, 1) are (1.5, 1, 2.5): 2.96436878 − 1.41210799. Those of (−0.5, 1) are (−0.5, 1, 0.5):
    1.60413061 − (−0.12022567). The mean is 1.63830853. With labels for the first and third token only, the third differs by
    (2.5, −2): (2 + 1.5)/2, and the mean of both is 1.375.
    """
    yield Comparison("both terms", _loss(probs=0.2), 0.5 * (1.125 + 0.2 * 1.63830853))
    labels = torch.tensor([[1, 2, -100, 0]])
    yield Comparison("two labels", _loss(labels, probs=0.0), 0.5 * 1.375)
    yield Comparison("without any label", _loss(torch.full_like(TOKENS, -100), probs=0.2), 0.0)


def _loss(labels: Tensor | None = None, **fields: Any) -> float:
    """The loss of a depth with weight 0.5, whose block adds nothing."""
    eagle = _eagle(weight=0.5, **fields)
    model = build(
        part("model", width=2, vocab=3, layers=(_nothing(),), norm=_norm(), head=part("lm", tied=False), mtp=(eagle,)),
        dtype=REAL,
    )
    given = {"embed.table": TABLE, "head.out.weight": HEAD, "mtp.0.proj.bias": [0.5, 0.0]}
    given["mtp.0.proj.weight"] = [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith(".scale"):
                weight.copy_(numbers(given[name]) if name in given else torch.zeros(()))
    losses: dict[str, Tensor] = {}
    model.hidden(TOKENS, Ctx(layout=row(4), labels=labels, losses=Losses(losses)))
    assert list(losses) == ["mtp.0.loss"], list(losses)
    return losses["mtp.0.loss"].item()
