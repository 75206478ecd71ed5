"""A model without some heads computes what the model computes with the outputs of these heads replaced by 0."""

from __future__ import annotations

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import SpecError
from dovetail.model.transformer import Transformer

IDS = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))


def model(mixer: str) -> Transformer:
    built = dt.build(f"{{width: 24, vocab: 61, layers: [{{repeat: 3, mixer: {{{mixer}}}, ffn: {{hidden: 20}}}}]}}").double()
    with torch.no_grad():
        for weight in built.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype))
    return built


@pytest.mark.parametrize(
    ("mixer", "heads"),
    [
        ("heads: 4", {0: [1, 3], 2: [0]}),
        ("heads: 6, kv_heads: 3, head: 6", {1: [2, 3]}),  # both queries of the second KV head
        ("heads: 4, bias: true, packed: true, qk_norm: rmsnorm", {0: [0], 1: [1, 2, 3]}),
        ("heads: 4, kv_heads: 2, packed: true, sink: true", {2: [0, 1]}),
    ],
)
def test_the_logits_are_those_of_the_ablation(mixer: str, heads: dict[int, list[int]]) -> None:
    whole = model(mixer)
    pruned = dt.prune_heads(whole, heads)
    patch = {f"layers.{layer}.mixer.z[head={head}]": 0.0 for layer, removed in heads.items() for head in removed}
    ablated = whole.trace(IDS, "head.logits", patch=patch)["head.logits"]
    torch.testing.assert_close(pruned(IDS), ablated, atol=1e-9, rtol=1e-9)
    assert not torch.allclose(pruned(IDS), whole(IDS), atol=1e-3)
    assert sum(w.numel() for w in pruned.parameters()) < sum(w.numel() for w in whole.parameters())
    assert dt.build(pruned.spec).spec == pruned.spec


def test_the_weights_are_copies() -> None:
    whole = model("heads: 4")
    pruned = dt.prune_heads(whole, {0: [1]})
    before = whole(IDS)
    with torch.no_grad():
        for weight in pruned.parameters():
            weight.zero_()
    assert torch.equal(whole(IDS), before)


@pytest.mark.parametrize(
    ("mixer", "heads", "message"),
    [
        ("heads: 4, kv_heads: 2", {0: [0]}, "layers.0.mixer: head 0 shares"),
        ("heads: 4", {1: [4]}, "layers.1.mixer: has no head 4 .heads are 0 to 3."),
        ("heads: 4", {3: [0]}, "there is no layer 3"),
        ("heads: 4", {0: [0, 1, 2, 3]}, "no head is left"),
        ("heads: 4, position: alibi", {0: [1]}, "computed from the number of heads"),
        ("heads: 4, mask: {kind: by_head, masks: [causal, [causal, {kind: window, size: 3}]]}", {0: [1]}, "differs by head"),
        ("kind: mamba2, head: 8", {0: [0]}, "has no heads of attention"),
    ],
)
def test_what_cannot_be_removed_is_refused(mixer: str, heads: dict[int, list[int]], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        dt.prune_heads(model(mixer), heads)
