"""Oracles of multi-token prediction: one depth by hand, and the losses of two depths over four tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx, Losses
from dovetail.proof.laws.oracle import REAL, Comparison, alone, eye, numbers, oracle, part, row

ZEROS = [[0.0, 0.0], [0.0, 0.0]]
TOKENS, LABELS = torch.tensor([[0, 1, 2, 1]]), torch.tensor([[1, 2, 1, 0]])
# every row has a root mean square of 1, so that norms change nothing; a row times the head's gives logits
TABLE = [[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]]
HEAD = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]


def _depth(**fields: Any) -> Any:
    ffn = part("mlp", hidden=2, bias=False)
    return part("mtp", block=part("block", mixer=None, ffn=ffn, norm=_norm()), norm=_norm(), **fields)


def _norm() -> Any:
    return part("rmsnorm", eps=1e-30)


@oracle("mtp")
def depth() -> Iterator[Comparison]:
    """E(t) = (3, 4) over √12.5, times (1, 2), is (0.84852814, 2.26274170); h = (1, 7) over 5, times (5, 10), is (1, 14).
    M [·; ·] = (0.84852814 + 14, 2.26274170 + 2·1), over 10.92359269, times (2, 1)."""
    weights = {
        "proj.weight": [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 2.0, 0.0]],
        "embed_norm.scale": [1.0, 2.0],
        "hidden_norm.scale": [5.0, 10.0],
        "block.ffn_norm.scale": [1.0, 1.0],
        "block.ffn.up.weight": ZEROS,
        "block.ffn.down.weight": ZEROS,
        "norm.scale": [2.0, 1.0],
    }
    module = alone(_depth(), weights, embed=2)
    hidden, embedded = numbers([[[1.0, 7.0]]]), numbers([[[3.0, 4.0]]])
    yield Comparison("one depth", module(hidden, embedded, Ctx(layout=row(1)), {}), [[[2.71861622, 0.39023257]]])


def _losses(proj: Any, labels: Tensor | None = None) -> dict[str, float]:
    """The losses of two depths whose blocks add nothing."""
    layer = part("block", mixer=None, ffn=part("mlp", hidden=2, bias=False), norm=_norm())
    depths = (_depth(weight=0.3), _depth(weight=0.5))
    model = build(
        part("model", width=2, vocab=3, layers=(layer,), norm=_norm(), head=part("lm", tied=False), mtp=depths), dtype=REAL
    )
    given = {"embed.table": TABLE, "head.out.weight": HEAD, "mtp.0.proj.weight": proj, "mtp.1.proj.weight": proj}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith(".scale"):
                weight.copy_(numbers(given[name]) if name in given else torch.zeros(()))
    losses: dict[str, Tensor] = {}
    model.hidden(TOKENS, Ctx(layout=row(4), labels=labels, losses=Losses(losses)))
    return {name: loss.item() for name, loss in losses.items()}


@oracle("mtp")
def losses() -> Iterator[Comparison]:
    """Tokens 0 1 2 1; the logits of their rows are (1, 1, 2), (−1, 1, 0), (1, −1, 0), (−1, 1, 0).

    A M that reads the next token alone: at depth 1 the second and third token predict 2 and 1, ln(e + 1/e + 1) = 1.40760596
    and one more, mean 1.90760596; at depth 2 the third predicts 1. With labels 1 2 1 0 the last token predicts 0, too. A M that
    reads the hidden state alone: at depth 1 the first and second token predict 2 and 1, ln(2e + e²) − 2 and 1.40760596 − 1.
    """
    reads_next, reads_hidden = ([[*a, *b] for a, b in zip(*halves, strict=True)] for halves in _halves())
    yield Comparison("next token", _values(_losses(reads_next)), [0.15 * 1.90760596, 0.25 * 2.40760596])
    labeled = _values(_losses(reads_next, LABELS))
    yield Comparison("next token, with labels", labeled, [0.15 * 2.07427263, 0.25 * 2.40760596])
    # at depth 2 the first token predicts 1: ln(2e + e²) − 1
    yield Comparison("hidden state", _values(_losses(reads_hidden)), [0.15 * 0.47952534, 0.25 * 1.55144472])
    unlabeled = _values(_losses(reads_next, torch.full_like(LABELS, -100)))
    yield Comparison("without any label", unlabeled, [0.0, 0.0])


def _halves() -> Iterator[tuple[Any, Any]]:
    yield eye(2), ZEROS
    yield ZEROS, eye(2)


def _values(losses: dict[str, float]) -> list[float]:
    assert list(losses) == ["mtp.0.loss", "mtp.1.loss"], list(losses)
    return list(losses.values())
