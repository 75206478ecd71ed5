"""The sparse presets: skipped blocks cost nothing, and the touched tiles grow as the mask predicts."""

from __future__ import annotations

import dataclasses as dc
from math import isqrt, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.files.spec import load_spec
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mask
from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Scoring
from dovetail.ops import attend_tiled
from dovetail.ops.attend import attend, using
from dovetail.ops.mask import allowed, plan
from dovetail.ops.tiles import Tiling
from dovetail.parts.mask.distance import Causal
from dovetail.proof.laws.case import perturbed
from dovetail.spec.fold import attention_flops, state_values
from dovetail.spec.part import from_data

N, TILE = 512, 16
PRESETS = ("longformer-tiny", "bigbird-tiny", "sparse-transformer-tiny", "block-sparse-tiny")


def mask_of(name: str) -> Any:
    return load_spec(name).layers[0].mixer.mask  # type: ignore[attr-defined]


def each_head(mask: Mask) -> list[Mask]:
    return [mask.for_head(head) for head in range(2)] if mask.by_head() else [mask]


def scoring(mask: Mask, heads: int = 2) -> Scoring:
    return Scoring(mask=mask, scale=0.3, heads=torch.arange(heads))


@pytest.mark.parametrize("name", PRESETS)
def test_only_tiles_with_something_to_see_are_touched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_tiled, "TILE", TILE)
    layout = TokenLayout.whole(1, N)
    for mask in each_head(mask_of(name)):
        seen = allowed(mask, layout, layout, torch.arange(1))[0, 0]
        index = torch.arange(N)
        if mask.regroup() > 1:  # tokens of one residue lie side by side
            index = (index % mask.regroup()).argsort(stable=True)
        tiles = seen[index][:, index].view(N // TILE, TILE, N // TILE, TILE).any(3).any(1)
        assert Tiling(mask, layout, layout, 1, TILE, 1024).touched() == int(tiles.sum()) * TILE * TILE
        assert int(tiles.sum()) < 0.5 * (N // TILE) ** 2


@pytest.mark.parametrize("name", PRESETS)
def test_keys_in_skipped_tiles_are_never_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_tiled, "TILE", TILE)
    torch.manual_seed(0)
    n = N // 2
    layout, q = TokenLayout.whole(1, n), torch.randn(1, n, 2, 12, dtype=torch.float64)
    k, v = (torch.randn(1, n, 2, 12, dtype=torch.float64) for _ in range(2))
    for mask in each_head(mask_of(name)):
        if mask.regroup() > 1:
            continue
        for i, runs in enumerate(plan(mask, layout, layout, 1, TILE, TILE)):
            own = layout.pick(slice(i * TILE, (i + 1) * TILE))
            queries = q[:, i * TILE : (i + 1) * TILE]
            touched = torch.zeros(n, dtype=torch.bool)
            for run in runs:
                touched[run.begin : run.end] = True
            poisoned = [torch.where(touched[:, None, None], x, nan) for x in (k, v)]
            with using("tiled"):
                got = attend(queries, *poisoned, scoring(mask), own, TokenLayout.whole(1, n))
            with using("reference"):
                want = attend(queries, k, v, scoring(mask), own, TokenLayout.whole(1, n))
            assert (got - want).abs().max() < 1e-12


def strided(length: int) -> Mask:
    """Both heads of a Sparse Transformer with its stride at the root of the length."""
    step = isqrt(length)
    heads = {"kind": "by_head", "masks": [{"kind": "window", "size": step}, {"kind": "strided", "step": step}]}
    return from_data(["causal", heads], Mask)  # type: ignore[type-abstract]


def test_a_strided_transformer_touches_n_root_n() -> None:
    def touched(length: int) -> float:
        layout = TokenLayout.whole(1, length)
        return attend_tiled.touched(scoring(strided(length)), layout, layout) / length**1.5

    assert 0.5 < touched(16384) <= touched(4096) < 2  # of all pairs on and below the diagonal it is 0.5·√n


@pytest.mark.parametrize("name", ["longformer-tiny", "bigbird-tiny", "block-sparse-tiny"])
def test_touched_tiles_grow_linearly(name: str) -> None:
    def touched(length: int) -> float:
        layout = TokenLayout.whole(1, length)
        return attend_tiled.touched(scoring(mask_of(name)), layout, layout) / length

    assert touched(8192) / touched(2048) < 1.5  # all pairs: 4
    assert touched(8192) < 0.15 * 8192


def test_two_hops_reach_everything_in_a_strided_transformer() -> None:
    """A window and then a stride lead from any token to any earlier one."""
    layout = TokenLayout.whole(1, 100)
    near, far = (allowed(mask, layout, layout, torch.arange(1))[0, 0].double() for mask in each_head(strided(100)))
    assert torch.equal((near @ far) > 0, torch.ones(100, 100).tril() > 0)


@pytest.mark.parametrize("name", [*PRESETS, "local-full-tiny"])
def test_by_tiles_is_by_definition(name: str) -> None:
    spec = load_spec(name)
    model = perturbed(dc.replace(spec, layers=spec.layers[:2]))
    tokens = torch.randint(spec.vocab, (1, 200), generator=torch.Generator().manual_seed(0))

    def run(backend: str) -> Tensor:
        with using(backend):
            return model(tokens, Ctx(layout=TokenLayout.whole(1, 200)))

    assert (run("tiled") - run("reference")).abs().max() < 1e-9


def test_the_cache_of_a_hybrid_is_that_of_its_full_layers() -> None:
    spec, n = load_spec("local-full-tiny"), 4096
    full = spec.swap("mask", Causal())
    # KV cache: windows of 32 in four of six layers
    assert state_values(spec, n) == 2 * 2 * 24 * (4 * 32 + 2 * n)
    assert state_values(full, n) == 2 * 2 * 24 * 6 * n
    # pairs that the masks leave: the two full layers, and 32 keys per token in the others
    let_through, whole = attention_flops(spec, n)[1], attention_flops(full, n)[1]
    assert let_through / whole == pytest.approx(1 / 3 + 2 / 3 * 32 * n / (n * (n + 1) / 2), rel=0.01)
