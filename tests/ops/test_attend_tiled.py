"""Tiled attention equals the reference, forward and backward, for any mask and layout, in memory linear in n."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail import parts as _registered  # noqa: F401
from dovetail.nn.groups import Fill, Mask
from dovetail.nn.layout import TokenLayout
from dovetail.nn.random import draw
from dovetail.nn.view import Edit, Scoring
from dovetail.ops import attend_tiled
from dovetail.ops.attend import attend, using
from dovetail.ops.mask import _fill, plan, spans
from dovetail.spec.part import from_data

HEADS, KV, HEAD, VALUE = 6, 2, 12, 10
MASKS: dict[str, Any] = {
    "full": "full",
    "causal": "causal",
    "window": {"kind": "window", "size": 5, "keep": 2},
    "causal window": ["causal", {"kind": "window", "size": 9}],
    "prefix": {"any": ["causal", {"kind": "prefix", "length": 7}]},
    "global_tokens": {"any": [{"kind": "window", "size": 4}, {"kind": "global_tokens", "tokens": 3}]},
    "block_local": {"kind": "block_local", "size": 6, "back": 1},
    "strided": {"kind": "strided", "step": 3},
    "causal strided": ["causal", {"kind": "strided", "step": 5}],
    "dilated": {"kind": "dilated", "size": 3, "step": 4},
    "random_blocks": {"kind": "random_blocks", "size": 4, "count": 2},
    "by head": {"kind": "by_head", "masks": ["causal", {"kind": "strided", "step": 3}, {"kind": "window", "size": 3}]},
}
LAYOUTS = {
    "whole": TokenLayout.whole(3, 37),
    "packed": TokenLayout.packed([[10, 20, 3], [37], [5, 6]], 37),
    "padded left": TokenLayout.padded([30, 37, 5], 37, left=True),
    "padded right": TokenLayout.padded([30, 36, 5], 37),
    "flat": TokenLayout.flat([20, 1, 9]),
}


def mask_of(data: Any) -> Mask:
    return from_data(data, Mask)  # type: ignore[type-abstract]


def distance_bias(q_layout: TokenLayout, k_layout: TokenLayout, table: Tensor) -> Tensor:
    """A learned number for each head and distance −4 … 4: (…, heads, n, m)."""
    return table[:, (q_layout.order[..., :, None] - k_layout.order[..., None, :]).clamp(-4, 4) + 4].movedim(0, -3)


def dropped(probs: Tensor, q_layout: TokenLayout, k_layout: TokenLayout) -> Tensor:
    """Every prob by a number in [0, 2) of its sample, query, key and head."""
    sample, query = (x[..., None, :, None] for x in (q_layout.sample, q_layout.order))
    head = torch.arange(probs.shape[-3])[:, None, None]
    bits = draw(torch.tensor(3), sample, query, k_layout.order[..., None, None, :], head)
    return probs * (bits & 0xFFFF) / 2.0**15


def some(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def compared(
    mask: Any,
    q_layout: TokenLayout,
    k_layout: TokenLayout,
    *,
    softcap: bool = False,
    bias: bool = False,
    sink: bool = False,
    dropout: bool = False,
) -> float:
    """The largest difference between the two kernels over the output and every gradient."""
    torch.manual_seed(0)
    lead, behind = q_layout.order.shape, k_layout.order.shape
    inputs = [some(*lead, HEADS, HEAD), some(*behind, KV, HEAD), some(*behind, KV, VALUE)]
    table, sinks = some(HEADS, 9), some(HEADS)
    scoring = Scoring(
        mask=mask_of(mask),
        scale=0.4,
        heads=torch.arange(HEADS),
        softcap=1.5 if softcap else None,
        bias=distance_bias if bias else None,
        tables=(table,) if bias else (),
        sink=sinks if sink else None,
    )
    inputs += [table] * bias + [sinks] * sink
    upstream = torch.randn(*lead, HEADS, VALUE, dtype=torch.float64)
    found: list[list[Tensor]] = []
    for name in ("tiled", "reference"):
        with using(name):
            z = attend(*inputs[:3], scoring, q_layout, k_layout, Edit(dropped, scales=True) if dropout else None)  # type: ignore[misc]
        found.append([z, *torch.autograd.grad(z, inputs, upstream)])
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 and pieces of 24 keys: 37 tokens are five tiles, the last one short, and a row of them two pieces."""
    monkeypatch.setattr(attend_tiled, "TILE", 8)
    monkeypatch.setattr(attend_tiled, "PIECE", 24)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_tiled_is_reference(mask: str, layout: str) -> None:
    layout = LAYOUTS[layout]
    assert compared(MASKS[mask], layout, layout) < 1e-9


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", ["causal window", "causal strided", "by head"])
def test_every_feature_at_once(mask: str, layout: str) -> None:
    layout = LAYOUTS[layout]
    assert compared(MASKS[mask], layout, layout, softcap=True, bias=True, sink=True) < 1e-9
    assert compared(MASKS[mask], layout, layout, softcap=True, bias=True, sink=True, dropout=True) < 1e-9


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("feature", ["softcap", "bias", "sink"])
def test_each_feature_alone(feature: str) -> None:
    layout = LAYOUTS["packed"]
    assert compared(MASKS["causal"], layout, layout, **{feature: True}) < 1e-9


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", MASKS)
def test_a_chunk_of_queries_over_cached_keys(mask: str) -> None:
    assert compared(MASKS[mask], TokenLayout.whole(2, 11, start=18), TokenLayout.whole(2, 29)) < 1e-9
    assert compared(MASKS[mask], TokenLayout.flat([3, 9, 1], [4, 0, 20]), TokenLayout.flat([7, 9, 21])) < 1e-9


@pytest.mark.parametrize("n", [64, 150])
@pytest.mark.parametrize("mask", ["causal", "causal window", "dilated"])
def test_natural_tiles(mask: str, n: int) -> None:
    layout = TokenLayout.whole(2, n)
    assert compared(MASKS[mask], layout, layout) < 1e-9


@pytest.mark.usefixtures("small_tiles")
def test_a_token_without_a_visible_key_gives_zero_and_gets_no_gradient() -> None:
    layout = TokenLayout.padded([5, 37], 37, left=True)
    q, k, v = some(2, 37, HEADS, HEAD), some(2, 37, KV, HEAD), some(2, 37, KV, HEAD)
    scoring = Scoring(mask=mask_of("causal"), scale=0.3, heads=torch.arange(HEADS), sink=some(HEADS))
    with using("tiled"):
        z = attend(q, k, v, scoring, layout, layout)
    z.sum().backward()
    assert (z[0, :32] == 0).all()
    assert (z[0, 32:] != 0).all()
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert (tensor.grad[0, :32] == 0).all()


@pytest.mark.parametrize("mask", ["causal", "causal strided", "by head", "block_local"])
def test_no_tensor_of_a_step_outlives_it(mask: str) -> None:
    layout, tensors = TokenLayout.whole(1, 150), [some(1, 150, heads, HEAD) for heads in (HEADS, KV, KV)]
    scoring = Scoring(mask=mask_of(MASKS[mask]), scale=0.3, heads=torch.arange(HEADS))
    order = weakref.ref(layout.order)
    gc.collect()
    gc.disable()  # what a cycle holds would stay until the collector runs, which may be many steps
    try:
        with using("tiled"):
            attend(*tensors, scoring, layout, layout).sum().backward()
        del layout
        assert order() is None
    finally:
        gc.enable()


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_tiled, "TILE", 2)
    monkeypatch.setattr(attend_tiled, "PIECE", 4)
    torch.manual_seed(0)
    layout = TokenLayout.whole(1, 7)

    def work(q: Tensor, k: Tensor, v: Tensor, table: Tensor, sink: Tensor) -> Tensor:
        scoring = Scoring(mask_of(MASKS["window"]), 0.5, torch.arange(2), 1.5, distance_bias, (table,), sink)
        with using("tiled"):
            return attend(q, k, v, scoring, layout, layout)

    assert torch.autograd.gradcheck(work, (some(1, 7, 2, 3), some(1, 7, 1, 3), some(1, 7, 1, 3), some(2, 9), some(2)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_near(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layout = TokenLayout.whole(1, 150)
    q, k, v = some(1, 150, HEADS, HEAD), some(1, 150, KV, HEAD), some(1, 150, KV, HEAD)
    scoring = Scoring(mask=mask_of("causal"), scale=0.3, heads=torch.arange(HEADS))
    with using("reference"):
        want = attend(q, k, v, scoring, layout, layout)
    with using("tiled"):
        got = attend(q.to(dtype), k.to(dtype), v.to(dtype), scoring, layout, layout)
    assert got.dtype == dtype
    assert (got - want).abs().max() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_tiles_equal_those_tested_one_by_one(mask: str, layout: str) -> None:
    layout, made = LAYOUTS[layout], mask_of(MASKS[mask])
    heads = range(HEADS if made.by_head() else 1)
    runs = spans(layout, 2, made.regroup())
    touched = plan(made, layout, layout, HEADS, 2, 2)
    for query, found in zip(runs, touched, strict=True):
        fills = [_fill(made, query, key, heads)[0] for key in runs]
        again = [Fill.EMPTY] * len(runs)
        for run in found:
            for tile in range(run.begin // 2, -(-run.end // 2)):
                again[tile] = Fill.FULL if run.full else Fill.PART
        assert again == fills


@pytest.mark.parametrize("mask", ["causal", "causal window"])
def test_workspace_does_not_grow(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from memory import Alive

    monkeypatch.setattr(attend_tiled, "TILE", 16)
    monkeypatch.setattr(attend_tiled, "PIECE", 32)
    scoring = Scoring(mask=mask_of(MASKS[mask]), scale=0.3, heads=torch.arange(2))

    def workspace(n: int) -> int:
        layout = TokenLayout.whole(1, n)
        q, k, v, g = some(1, n, 2, 4), some(1, n, 1, 4), some(1, n, 1, 4), torch.randn(1, n, 2, 4, dtype=torch.float64)
        with using("tiled"), Alive(q, k, v, g, layout.order) as alive:
            grads = torch.autograd.grad(attend(q, k, v, scoring, layout, layout), (q, k, v), g)
        lse = 2 * n * 8
        return alive.peak - q.nbytes - lse - sum(grad.nbytes for grad in grads)

    small, large = workspace(128), workspace(512)
    assert 0 < large <= 1.2 * small
