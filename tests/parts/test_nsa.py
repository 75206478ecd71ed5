"""Native sparse attention: the selected blocks, the FLOPs, the cache; with every block selected it is plain attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.base.errors import SpecError, StateError
from dovetail.files.spec import from_yaml
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.layout import TokenLayout
from dovetail.ops.attend import using
from dovetail.parts.mixer import nsa
from dovetail.proof.laws.case import perturbed
from dovetail.spec.check import advice, check
from dovetail.spec.fold import state_values
from dovetail.state.pool import Pool

SIZES = {"heads": 6, "kv_heads": 2, "head": 12, "block": 4, "top": 2, "window": 5}


def spec(**mixer: Any) -> Any:
    text = "{width: 28, vocab: 62, layers: [{repeat: 2, mixer: {kind: nsa}, ffn: {hidden: 44}}]}"
    return from_yaml(text).set("layers.*.mixer", {"kind": "nsa", **SIZES, **mixer})


def heard(model: Any, tokens: Tensor, pattern: str) -> Tensor:
    seen: list[Tensor] = []
    model(tokens, Ctx(layout=TokenLayout.whole(*tokens.shape), taps=Listener({pattern: lambda _, x: seen.append(x)})))
    return seen[0]


def test_with_every_block_selected_it_is_attention() -> None:
    """Of the three ways the selected one, all blocks in it, is causal attention with the same q, k and v."""
    sparse = spec(top=20)
    model, tokens = perturbed(sparse), torch.randint(62, (2, 30))
    mixer = model.layers[0].mixer
    with torch.no_grad():
        way = torch.tensor([-200.0, 200.0, -200.0], dtype=torch.float64).repeat(6)  # σ of it: 0, 1, 0
        mixer.gate.forward = lambda x, ctx: way.expand(*x.shape[:-1], -1)
        plain = from_yaml("{width: 28, vocab: 62, layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}}]}")
        other = perturbed(plain).layers[0].mixer
        for name in ("q", "k", "v", "o"):
            getattr(other, name).weight.copy_(getattr(mixer, name).weight)
        x, layout = torch.randn(2, 30, 28, dtype=torch.float64), TokenLayout.whole(2, 30)
        assert (mixer(x, Ctx(layout=layout)) - other(x, Ctx(layout=layout))).abs().max() < 1e-12
    assert heard(model, tokens, "layers.0.mixer.gate").shape == (2, 30, 6, 3)


def test_a_query_reads_its_own_block_the_first_and_the_best() -> None:
    model, tokens = perturbed(spec()), torch.randint(62, (1, 30), generator=torch.Generator().manual_seed(3))
    picked = heard(model, tokens, "layers.0.mixer.picked")[0]  # (kv_heads, n, 4)
    own = torch.arange(30) // 4
    assert torch.equal(picked[..., 0], own.expand(2, 30))
    assert torch.equal(picked[..., 1], torch.where(own > 0, 0, -1).expand(2, 30))
    for group in picked.tolist():
        for row in group:
            read = [block for block in row if block >= 0]
            assert len(set(read)) == len(read), "no block is read twice"
            assert all(block <= row[0] for block in read)
            assert len(read) == min(row[0] + 1, 4)
    assert not torch.equal(picked[0], picked[1]), "groups choose each for itself"


def test_a_step_maps_only_the_block_that_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = spec()
    model, tokens, pool = perturbed(sparse), torch.randint(62, (2, 30)), Pool(sparse, 2, 30, dtype=torch.float64)
    want = model(tokens, Ctx(layout=TokenLayout.whole(2, 30)))
    counts: list[int] = []
    mapped = nsa.NSAModule.mapped

    def counted(self: Any, name: str, x: Tensor, index: Tensor) -> Tensor:
        counts.append(index.shape[-2])
        return mapped(self, name, x, index)

    monkeypatch.setattr(nsa.NSAModule, "mapped", counted)
    step = pool.step([0, 1], [21, 21])
    model(tokens[:, :21], Ctx(layout=step.layout, views=step.views))
    counts.clear()
    for t in range(21, 30):
        step = pool.step([0, 1], [1, 1])
        got = model(tokens[:, t : t + 1], Ctx(layout=step.layout, views=step.views))
        assert (got[:, 0] - want[:, t]).abs().max() < 1e-9
    # keys and values of two layers; tokens 23 and 27 end a block
    assert counts == [int((t + 1) % 4 == 0) for t in range(21, 30) for _ in range(4)]


def test_blocks_are_cached_once_they_are_complete() -> None:
    sparse = spec()
    assert state_values(sparse, 30) == 2 * 2 * 2 * 12 * (30 + 30 // 4)
    pool = Pool(sparse, 3, 30, dtype=torch.float32)
    assert pool.bytes() == 3 * 4 * state_values(sparse, 30)


def test_a_roll_back_into_a_block_and_other_tokens() -> None:
    sparse = spec()
    model, tokens = perturbed(sparse), torch.randint(62, (1, 20))
    pool = Pool(sparse, 1, 20, dtype=torch.float64)
    other = tokens.flip(1)
    step = pool.step([0], [11])
    model(
        torch.cat([tokens[:, :6], other[:, 6:11]], 1), Ctx(layout=step.layout, views=step.views)
    )  # ends block 1 with other tokens
    assert pool.rollback(0, 6) == 6
    step = pool.step([0], [14])
    got = model(tokens[:, 6:], Ctx(layout=step.layout, views=step.views))
    want = model(tokens, Ctx(layout=TokenLayout.whole(1, 20)))[:, 6:]
    assert (got - want).abs().max() < 1e-9
    with pytest.raises(StateError, match="do not fit"):
        pool.step([0], [1])


def test_the_gathered_form_costs_only_the_picked_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the dense form a long sequence still runs; the reference implementation uses the dense form."""
    model, tokens = perturbed(spec()), torch.randint(62, (1, 90))
    with using("reference"):
        want = model(tokens, Ctx(layout=TokenLayout.whole(1, 90)))
    monkeypatch.setattr("dovetail.ops.blocks.dense", None)
    assert (model(tokens, Ctx(layout=TokenLayout.whole(1, 90))) - want).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("mixer", "path"),
    [
        ({"kv_heads": 4}, "layers.0.mixer.kv_heads"),
        ({"head": None, "heads": 5, "kv_heads": 1}, "layers.0.mixer.heads"),
        ({"block": 0}, "layers.0.mixer.block"),
        ({"top": 0}, "layers.0.mixer.top"),
        ({"window": 0}, "layers.0.mixer.window"),
        ({"position": "alibi"}, "layers.0.mixer.position"),
        ({"position": "sinusoidal"}, "layers.0.mixer.position"),
    ],
)
def test_illegal_specs_raise_with_their_path(mixer: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError, match=f"^{path}"):
        check(spec(**mixer))


def test_an_image_has_no_blocks_of_tokens() -> None:
    with pytest.raises(SpecError, match="not of patches"):
        check(
            spec().set("embed", {"kind": "patches", "image": 12, "patch": 6}).set("head", {"kind": "classifier", "classes": 5})
        )


def test_selecting_every_block_gets_advice() -> None:
    assert [path for path, _ in advice(spec(), 16) if path.endswith("top")]
    assert not [path for path, _ in advice(spec(), 17) if path.endswith("top")]
