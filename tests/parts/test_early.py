"""Additive and multiplicative attention and Linformer: their formulas, their caches, and lengths that they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.base.errors import SpecError, StateError
from dovetail.files.spec import from_yaml
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.layout import TokenLayout
from dovetail.ops import implementation
from dovetail.proof.laws.case import perturbed
from dovetail.spec.check import advice, check
from dovetail.spec.fold import attention_flops, state_values

MIXERS: dict[str, dict[str, Any]] = {
    "additive_attention": {"heads": 2, "hidden": 10},
    "multiplicative_attention": {"heads": 4, "scale": 0.3},
    "linformer": {"heads": 6, "head": 12, "rank": 3, "length": 45},
}
N = 13


def spec(kind: str, **more: Any) -> Any:
    made = from_yaml("{width: 28, vocab: 62, layers: [{repeat: 1, ffn: {hidden: 44}}]}")
    return made.set("layers.*.mixer", {"kind": kind, **MIXERS[kind], **more})


def mixer(kind: str) -> Any:
    return perturbed(spec(kind)).layers[0].mixer


def some() -> Tensor:
    return torch.randn(2, N, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_additive_is_its_formula() -> None:
    module, x = mixer("additive_attention"), some()
    q, k = (w.weight.view(2, 10, 28) for w in (module.q, module.k))
    found = torch.zeros(2, N, 2, 28, dtype=torch.float64)
    for row in range(2):
        for i in range(N):
            for h in range(2):
                scores = torch.stack([module.u[h] @ torch.tanh(q[h] @ x[row, i] + k[h] @ x[row, j]) for j in range(i + 1)])
                found[row, i, h] = scores.softmax(0) @ x[row, : i + 1]
    want = found.flatten(-2) @ module.o.weight.T
    for size in (1, 2, 5, 64):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(implementation, "CHUNK", size)
            assert (module(x, Ctx(layout=TokenLayout.whole(2, N))) - want).abs().max() < 1e-12


@torch.no_grad()
def test_multiplicative_is_its_formula() -> None:
    module, x = mixer("multiplicative_attention"), some()
    form_of = module.q.weight.view(4, 28, 28).transpose(1, 2)  # W of each head: x_iᵀ W x_j
    scores = 0.3 * torch.einsum("bia,hac,bjc->bhij", x, form_of, x)
    shut = torch.ones(N, N, dtype=torch.bool).triu(1)
    z = scores.masked_fill(shut, -torch.inf).softmax(-1) @ x[:, None]
    want = z.transpose(1, 2).flatten(-2) @ module.o.weight.T
    assert (module(x, Ctx(layout=TokenLayout.whole(2, N))) - want).abs().max() < 1e-12


@torch.no_grad()
def test_linformer_with_identity_projections_is_attention() -> None:
    low = perturbed(spec("linformer", rank=N, length=N)).layers[0].mixer
    low.k_map.copy_(torch.eye(N))
    low.v_map.copy_(torch.eye(N))
    plain = from_yaml("{width: 28, vocab: 62, layers: [{mixer: {heads: 6, head: 12, mask: full, position: none}}], head: null}")
    full = perturbed(plain).layers[0].mixer
    for name in ("q", "k", "v", "o"):
        getattr(full, name).weight.copy_(getattr(low, name).weight)
    x, layout = some(), TokenLayout.whole(2, N)
    assert (low(x, Ctx(layout=layout)) - full(x, Ctx(layout=layout))).abs().max() < 1e-12


def test_the_decode_state_per_token() -> None:
    assert state_values(spec("additive_attention"), 7) == 7 * (2 * 10 + 28)
    assert state_values(spec("multiplicative_attention"), 7) == 7 * 28, "itself, however many heads"
    assert state_values(spec("linformer"), 7) == 0


def test_low_rank_costs_n_and_not_n_squared() -> None:
    low = spec("linformer")
    assert attention_flops(low, 4000)[0] == 10 * attention_flops(low, 400)[0]


def test_a_listener_gets_the_whole_pattern_once() -> None:
    for kind in ("additive_attention", "multiplicative_attention"):
        seen: list[Tensor] = []
        model = perturbed(spec(kind))
        listen = Listener({"*.pattern": lambda _, x, seen=seen: seen.append(x)})
        model(torch.randint(62, (2, 80)), Ctx(layout=TokenLayout.whole(2, 80), taps=listen))
        assert len(seen) == 1
        assert torch.allclose(seen[0].sum(-1), torch.ones(()).double())


@pytest.mark.parametrize("layout", [TokenLayout.whole(1, 46), TokenLayout.packed([(46,)], 46)])
def test_a_sequence_longer_than_its_tables_is_refused(layout: TokenLayout) -> None:
    model = perturbed(spec("linformer"))
    with pytest.raises(StateError, match="position 45 is past the last row of the tables, 44"):
        model(torch.zeros(1, 46, dtype=torch.long), Ctx(layout=layout))


@pytest.mark.parametrize(
    ("kind", "more", "path"),
    [
        ("additive_attention", {"hidden": 0}, "layers.0.mixer.hidden"),
        ("multiplicative_attention", {"heads": 0}, "layers.0.mixer.heads"),
        ("additive_attention", {"mask": {"kind": "window", "size": 0}}, "layers.0.mixer.mask.size"),
        ("linformer", {"rank": 0}, "layers.0.mixer.rank"),
        ("linformer", {"head": None, "heads": 5}, "layers.0.mixer.heads"),
    ],
)
def test_illegal_specs_raise_with_their_path(kind: str, more: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError, match=f"^{path}"):
        check(spec(kind, **more))


def test_a_rank_that_saves_nothing_is_advised_against() -> None:
    assert [path for path, _ in advice(spec("linformer"), 3) if path.endswith("rank")]
    assert [path for path, _ in advice(spec("linformer"), 46) if path.endswith("length")]
    assert not [path for path, _ in advice(spec("linformer"), 40) if path.startswith("layers.0.mixer")]
