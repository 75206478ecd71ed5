"""FlexAttention's forward on a CPU, compiled, held to the reference; a GPU is where it is chosen."""

from __future__ import annotations

import dataclasses as dc

import pytest
import torch

from dovetail.core.layout import TokenLayout
from dovetail.core.part import KINDS
from dovetail.core.view import Scoring
from dovetail.ops import attend_flex, attend_ref
from dovetail.ops.mask import dense

ROWS, N, HEADS, KV_HEADS, HEAD = 2, 160, 6, 2, 32
WINDOW = KINDS["causal"]() & KINDS["window"](size=40)
PLAIN = Scoring(mask=KINDS["causal"](), scale=0.3, heads=torch.arange(HEADS))


def distance(q: TokenLayout, k: TokenLayout, slopes: torch.Tensor) -> torch.Tensor:
    return -slopes[:, None, None] * (q.order[..., :, None] - k.order[..., None, :]).abs()[..., None, :, :]


CASES = {
    "causal": PLAIN,
    "window": dc.replace(PLAIN, mask=WINDOW),
    "soft-cap": dc.replace(PLAIN, softcap=2.0),
    "sink": dc.replace(PLAIN, sink=torch.linspace(-1, 2, HEADS)),
    "bias": dc.replace(PLAIN, bias=distance, tables=(torch.linspace(0.01, 0.2, HEADS),)),
    "all": dc.replace(
        PLAIN,
        mask=WINDOW,
        softcap=2.0,
        sink=torch.linspace(-1, 2, HEADS),
        bias=distance,
        tables=(torch.linspace(0.01, 0.2, HEADS),),
    ),
}
LAYOUTS = {
    "whole": TokenLayout.whole(ROWS, N),
    "packed": TokenLayout.packed([[90, 40], [150]], N),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_its_forward_is_that_of_the_reference(case, layout):
    torch.manual_seed(0)
    scoring, at = CASES[case], LAYOUTS[layout]
    q = torch.randn(ROWS, HEADS, N, HEAD)
    k, v = torch.randn(2, ROWS, KV_HEADS, N, HEAD)
    visible = dense(scoring.mask, at, at, scoring.heads)
    with torch.no_grad():
        got = attend_flex.run(q, k, v, scoring, at, at, visible)
        want = attend_ref.run(q, k, v, scoring, at, at, visible)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
