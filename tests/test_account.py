"""The account of a spec: FLOPs of masks at any length, folded layers, the longest length."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dovetail.account import account, longest_length, runs, tree
from dovetail.files.spec import changed, from_yaml, load_spec, zoo
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.groups import Mask
from dovetail.nn.layout import TokenLayout
from dovetail.ops.mask import pairs
from dovetail.spec.fold import parameters
from dovetail.spec.part import from_data

MASKS: dict[str, Any] = {
    "causal": "causal",
    "window": ["causal", {"kind": "window", "size": 100}],
    "keep": ["causal", {"kind": "window", "size": 100, "keep": 4}],
    "block_local": ["causal", {"kind": "block_local", "size": 48, "back": 1}],
    "dilated": ["causal", {"kind": "dilated", "size": 20, "step": 3}],
    "strided": ["causal", {"kind": "strided", "step": 37}],
    "by head": {
        "kind": "by_head",
        "masks": [["causal", {"kind": "window", "size": 64}], ["causal", {"kind": "strided", "step": 16}]],
    },
    "full": "full",
}


def mask(name: str) -> Mask:
    return from_data(MASKS[name], Mask)


@pytest.mark.parametrize("name", MASKS)
def test_few_pairs_are_counted_one_by_one(name: str) -> None:
    n = 311
    layout, heads = TokenLayout.whole(1, n), torch.arange(8)
    dense = mask(name).visible(layout, layout, heads).expand(1, 8, n, n)
    assert pairs(mask(name), n) == round(int(dense.sum()) / 8)


@pytest.mark.parametrize(
    ("name", "per_token"),
    [  # what a token far from both ends sees
        ("window", lambda n: 100),
        ("keep", lambda n: 104),
        ("block_local", lambda n: 48 + 24.5),
        ("dilated", lambda n: 20),
        ("strided", lambda n: n / 2 / 37),
        ("by head", lambda n: (64 + n / 2 / 16) / 2),
        ("causal", lambda n: (n + 1) / 2),
        ("full", lambda n: n),
    ],
)
def test_pairs_of_long_sequences_are_near_the_closed_form(name: str, per_token: Any) -> None:
    n = 65_536
    assert pairs(mask(name), n) / n == pytest.approx(per_token(n), rel=2e-2)


def test_counts_that_grow_linearly_are_exact_at_any_length() -> None:
    for n in (40_000, 131_072, 1_000_001):
        assert pairs(mask("causal"), n) == n * (n + 1) // 2
    n, w = 65_536, 4096
    at_least_fp32 = from_data(["causal", {"kind": "window", "size": w}], Mask)
    assert pairs(at_least_fp32, n) == w * (w + 1) // 2 + (n - w) * w


@pytest.mark.parametrize("name", zoo())
def test_the_tree_counts_what_the_fold_counts(name: str) -> None:
    spec = load_spec(name)
    assert tree(spec).parameters == parameters(spec)


def test_layers_fold_by_their_period() -> None:
    layers = [node for node in tree(load_spec("gemma-2-tiny")).children if node.path.startswith("layers")]
    assert [([node.path for node in period], times) for period, times in runs(layers)] == [(["layers.0", "layers.1"], 2)]
    first, rest = runs([node for node in tree(load_spec("t5-tiny")).children[2].children if "layers" in node.path])
    assert ([node.path for node in first[0]], first[1]) == (["encoder.layers.0"], 1), "it alone holds the table"
    assert ([node.path for node in rest[0]], rest[1]) == (["encoder.layers.1"], 2)
    mixed = changed(load_spec("llama-tiny"), ["layers.3.mixer.kv_heads=1"])
    layers = [node for node in tree(mixed).children if node.path.startswith("layers")]
    assert [(period[0].path, times) for period, times in runs(layers)] == [("layers.0", 3), ("layers.3", 1), ("layers.4", 2)]


def test_the_longest_length_of_a_model() -> None:
    assert longest_length(load_spec("llama-tiny")) is None
    assert longest_length(load_spec("gpt2-tiny")) == 512
    image = (
        "width: 28\nembed: {kind: patches, image: 18, patch: 6}\nlayers: [{mixer: {heads: 7, mask: full}}]\n"
        "head: pooled_embedding"
    )
    assert longest_length(from_yaml(image)) == 10, "nine squares and the class token, asked of the embedding itself"


def test_state_bytes_are_what_keys_and_values_take() -> None:
    spec = from_yaml("width: 28\nvocab: 62\nlayers: [{repeat: 3, mixer: {heads: 6, kv_heads: 2, head: 12}}]")
    model = build(spec, dtype=torch.bfloat16)
    sizes: list[int] = []
    for block in model.layers:
        block.mixer.k.register_forward_hook(lambda _m, _i, out: sizes.append(out.numel() * out.element_size()))
        block.mixer.v.register_forward_hook(lambda _m, _i, out: sizes.append(out.numel() * out.element_size()))
    model(torch.zeros(1, 13, dtype=torch.long), Ctx(layout=TokenLayout.whole(1, 13)))
    assert account(spec, 13, "bf16").state_bytes(13) == sum(sizes)


def test_405b_takes_no_time() -> None:
    begin = time.perf_counter()
    data = account(load_spec("llama-3-405b"), 131_072).to_dict()
    assert time.perf_counter() - begin < 10
    assert data["state_bytes"] == 2 * 126 * 8 * 128 * 131_072 * 2
