"""FlexAttention: what it is asked for, without compilation, is the reference; and a GPU is where it is chosen."""

from __future__ import annotations

import dataclasses as dc
from unittest.mock import patch

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from dovetail import parts
from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Scoring
from dovetail.ops import attend_flex, attend_ref
from dovetail.ops.attend import choose, offering
from dovetail.ops.implementation import ProblemSize
from dovetail.ops.mask import dense

ROWS, N, HEADS, KV_HEADS, HEAD = 2, 160, 6, 2, 32
WINDOW = parts.Causal() & parts.Window(size=40)
PLAIN = Scoring(mask=parts.Causal(), scale=0.3, heads=torch.arange(HEADS))


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


@torch.no_grad()
def largest_difference(scoring: Scoring, at: TokenLayout) -> float:
    """Between what it is asked for, by torch's form without compilation, and the reference."""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(ROWS, HEADS, N, HEAD), torch.randn(2, ROWS, KV_HEADS, N, HEAD)
    visible = dense(scoring.mask, at, at, scoring.heads)
    with patch.object(attend_flex, "_kernel", lambda: flex_attention):
        got = attend_flex.run(q, k, v, scoring, at, at, visible)
    return (got - attend_ref.run(q, k, v, scoring, at, at, visible)).abs().max().item()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_what_it_is_asked_for_is_the_reference(case: str, layout: str) -> None:
    assert largest_difference(CASES[case], LAYOUTS[layout]) < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_sink_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "sigmoid", torch.ones_like)
    assert largest_difference(CASES["sink"], LAYOUTS["whole"]) > 1e-2


@pytest.mark.parametrize(
    ("needs", "plain", "name"),
    [
        ((), True, "torch"),
        ((), False, "flex"),  # a dense mask would be read by torch's kernel, of which this one skips blocks
        (("softcap",), True, "flex"),
        (("sink",), False, "flex"),
        (("bias", "bias_grad"), False, "torch"),
        (("edit",), True, "reference"),
    ],
)
def test_on_cuda_it_is_chosen_by_what_is_needed_and_no_loop_over_tiles(needs: tuple[str, ...], plain: bool, name: str) -> None:
    shape = ProblemSize(ROWS, 2048, 2048, HEADS, HEAD, plain, 2048 * 2048)
    assert choose(frozenset(needs), shape, "cuda").name == name
    assert "tiled" not in {backend.name for backend in offering(frozenset(needs), "cuda")}
    assert choose(frozenset(needs), shape, "cpu").name != "flex"
