"""Attention: each concept tested by a number or an identity."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.files.spec import from_yaml
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.groups import Mask
from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Edit, Scoring
from dovetail.ops.attend import attend, offering, using
from dovetail.proof.laws.oracle import alone, eye
from dovetail.spec.fold import state_values
from dovetail.spec.part import KINDS, from_data
from dovetail.spec.scope import Scope

WIDTH, HEADS, GROUPS, HEAD = 28, 6, 2, 12
SIZES = {"q": HEADS, "k": GROUPS, "v": GROUPS}


def part(kind: str, **fields: Any) -> Any:
    return KINDS[kind](**fields)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(groups: int = GROUPS) -> dict[str, Any]:
    made = {
        f"{name}.weight": randn(n * HEAD, WIDTH, seed=i) / 3
        for i, (name, n) in enumerate({**SIZES, "k": groups, "v": groups}.items())
    }
    return {name: w.tolist() for name, w in {**made, "o.weight": randn(WIDTH, HEADS * HEAD, seed=9) / 3}.items()}


def attention(given: dict[str, Any] | None = None, **fields: Any) -> Any:
    told = {"heads": HEADS, "kv_heads": GROUPS, "head": HEAD, "position": part("none"), **fields}
    return alone(part("attention", **told), given or weights(), embed=WIDTH)


def plain(mask: Any = None, scale: float = 1.0, heads: int = 1) -> Scoring:
    return Scoring(mask=mask or part("full"), scale=scale, heads=torch.arange(heads))


def pattern(module: Any, x: Tensor, layout: TokenLayout) -> Tensor:
    seen: list[Tensor] = []
    module(x, Ctx(layout=layout, taps=Listener({"*pattern": lambda _, value: seen.append(value)})))
    return seen[0]


# -- the definition


def test_probs_sum_to_one_and_the_output_is_a_mean_of_the_values() -> None:
    seen: list[Tensor] = []
    q, k, v = randn(1, 5, 1, 4), randn(1, 7, 1, 4, seed=1), randn(1, 7, 1, 4, seed=2)
    edit = Edit(lambda a, *_: seen.append(a) or a)
    z = attend(q, k, v, plain(scale=0.5), TokenLayout.whole(1, 5), TokenLayout.whole(1, 7), edit)
    assert (seen[0] > 0).all()
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(1, 1, 5, dtype=torch.float64))
    assert (z <= v.amax(1, keepdim=True) + 1e-12).all()
    assert (z >= v.amin(1, keepdim=True) - 1e-12).all()


def test_queries_and_keys_that_are_the_identity_are_not_near_uniform() -> None:
    """Q = K = I of size 3: 0.471, 0.264, 0.264, whatever some texts say."""
    seen: list[Tensor] = []
    one, layout = torch.eye(3, dtype=torch.float64)[None, :, None], TokenLayout.whole(1, 3)
    attend(one, one, one, plain(scale=3**-0.5), layout, layout, Edit(lambda a, *_: seen.append(a) or a))
    assert [round(a, 3) for a in seen[0][0, 0, 0].tolist()] == [0.471, 0.264, 0.264]


def test_large_scores_do_not_overflow() -> None:
    for backend in offering(frozenset()):
        with using(backend.name):
            q = torch.full((1, 2, 1, 4), 1e4)
            z = attend(q, q, torch.ones(1, 2, 1, 4), plain(), TokenLayout.whole(1, 2), TokenLayout.whole(1, 2))
        assert z.equal(torch.ones(1, 2, 1, 4)), backend.name


@pytest.mark.parametrize(("size", "spread"), [(4, 2.0), (16, 4.0), (64, 8.0), (256, 16.0)])
def test_scores_spread_as_the_root_of_the_head_size(size: int, spread: float) -> None:
    """q·k of unit normal vectors has variance d_k; the module's own scale brings it to 1."""
    scores = (randn(40_000, size) * randn(40_000, size, seed=1)).sum(-1)
    assert scores.std().item() == pytest.approx(spread, rel=0.03)
    module = attention({**weights(), **_of_size(size)}, head=size)
    assert (scores * module.scale).std().item() == pytest.approx(1.0, rel=0.03)


def _of_size(size: int) -> dict[str, Any]:
    made = {f"{name}.weight": torch.zeros(n * size, WIDTH).tolist() for name, n in SIZES.items()}
    return {**made, "o.weight": torch.zeros(WIDTH, HEADS * size).tolist()}


def _softmax_of(scores: Tensor) -> Tensor:
    """The weights attention gives to these scores: q = scores, k = I, scale 1."""
    seen: list[Tensor] = []
    n = scores.shape[0]
    k = torch.eye(n, dtype=torch.float64)[None, :, None]
    edit = Edit(lambda a, *_: seen.append(a) or a)
    attend(scores[None, None, None], k, k, plain(), TokenLayout.whole(1, 1), TokenLayout.whole(1, n), edit)
    return seen[0][0, 0, 0]


def test_the_softmax_jacobian_is_bounded_by_a_half() -> None:
    """J = diag(a) − aaᵀ, of spectral norm ≤ ½; a half is reached by two equal scores."""
    for seed in range(20):
        scores = randn(9, seed=seed) * (0.1 + seed)
        a = _softmax_of(scores)
        jacobian = torch.autograd.functional.jacobian(_softmax_of, scores)
        assert isinstance(jacobian, Tensor)
        torch.testing.assert_close(jacobian, torch.diag(a) - torch.outer(a, a))
        assert torch.linalg.matrix_norm(jacobian, 2) <= 0.5 + 1e-12
    two = torch.autograd.functional.jacobian(_softmax_of, torch.zeros(2, dtype=torch.float64))
    assert torch.linalg.matrix_norm(two, 2).item() == pytest.approx(0.5)


def test_a_gap_saturates_the_softmax() -> None:
    """1 − a* ≤ (n − 1)·e^(−gap), with equality where all others are equal."""
    for gap in (0.5, 2.0, 8.0):
        scores = randn(9, seed=3).abs().neg()
        scores[4] = scores.max() + gap
        assert 1 - _softmax_of(scores)[4] <= 8 * torch.exp(torch.tensor(-gap))
        assert 1 - _softmax_of(scores)[4] > 0


def test_backward_by_hand_is_what_every_backend_computes() -> None:
    """dV = AᵀG, dA = GVᵀ, dS = A∘(dA − rowsum(dA∘A)), dQ = dS·K·scale, dK = dSᵀQ·scale."""
    n, d, scale = 11, 6, 6**-0.5
    q, k, v, g = (randn(n, d, seed=i) for i in range(4))
    s = (q @ k.T * scale).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    a = torch.softmax(s, -1)
    da = g @ v.T
    ds = a * (da - (da * a).sum(-1, keepdim=True))
    wanted = (ds @ k * scale, ds.T @ q * scale, a.T @ g)
    for backend in offering(frozenset()):
        given = [x[None, :, None].clone().requires_grad_() for x in (q, k, v)]
        with using(backend.name):
            z = attend(*given, plain(part("causal"), scale), TokenLayout.whole(1, n), TokenLayout.whole(1, n))
        torch.testing.assert_close(z[0, :, 0], a @ v, rtol=0, atol=1e-12)
        z.backward(g[None, :, None])
        for tensor, grad in zip(given, wanted, strict=True):
            assert tensor.grad is not None
            torch.testing.assert_close(tensor.grad[0, :, 0], grad, rtol=0, atol=1e-12)


# -- heads


def test_heads_concatenated_and_projected_are_the_sum_of_each_projected() -> None:
    x, layout = randn(2, 9, WIDTH, seed=5), TokenLayout.whole(2, 9)
    module = attention()
    seen: list[Tensor] = []
    whole = module(x, Ctx(layout=layout, taps=Listener({"*z": lambda _, value: seen.append(value)})))
    blocks = module.o.weight.view(WIDTH, HEADS, HEAD)
    parts = [seen[0][..., head, :] @ blocks[:, head].T for head in range(HEADS)]
    torch.testing.assert_close(whole, torch.stack(parts).sum(0))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_grouped_heads_are_full_heads_with_repeated_keys(groups: int) -> None:
    x, layout = randn(2, 9, WIDTH, seed=5), TokenLayout.whole(2, 9)
    few = weights(groups)
    full = dict(few)
    for name in ("k.weight", "v.weight"):
        table = torch.tensor(few[name], dtype=torch.float64).view(groups, HEAD, WIDTH)
        full[name] = table.repeat_interleave(HEADS // groups, 0).flatten(0, 1).tolist()
    one, other = attention(few, kv_heads=groups), attention(full, kv_heads=None)
    torch.testing.assert_close(one(x, Ctx(layout=layout)), other(x, Ctx(layout=layout)))


def test_grouped_heads_shrink_the_cache_by_h_over_g() -> None:
    values = {
        g: state_values(from_yaml(f"layers: [{{repeat: 3, mixer: {{heads: 8, kv_heads: {g}}}}}]"), 100) for g in (8, 2, 1)
    }
    assert values[8] == 4 * values[2] == 8 * values[1]


def test_self_and_cross_attention_are_one_mechanism() -> None:
    """Cross attention to one's own stream is self-attention without a mask."""
    x, layout = randn(2, 9, WIDTH, seed=5), TokenLayout.whole(2, 9)
    cross = alone(part("cross_attention", heads=HEADS, kv_heads=GROUPS, head=HEAD), weights(), embed=WIDTH, encoder=WIDTH)
    itself = attention(mask=part("full"))(x, Ctx(layout=layout))
    assert cross(x, Ctx(layout=layout, encoder_output=x, encoder_layout=layout)).equal(itself)


def test_tied_queries_and_keys_score_symmetrically_and_separate_ones_do_not() -> None:
    x, layout = randn(1, 7, WIDTH, seed=5), TokenLayout.whole(1, 7)
    given = weights(HEADS)

    def asymmetry(module: Any) -> float:
        a = pattern(module, x, layout).log()
        scores = a - a.diagonal(dim1=-2, dim2=-1)[..., None]  # s_ij − s_ii: the row's normalizer gone
        raw = scores + (module.q(x) * module.k(x)).view(1, 7, HEADS, HEAD).sum(-1).movedim(-1, 1)[..., None] * module.scale
        return (raw - raw.transpose(-1, -2)).abs().max().item()

    separate = attention(given, kv_heads=None, mask=part("full"))
    tied = attention({**given, "k.weight": given["q.weight"]}, kv_heads=None, mask=part("full"))
    assert asymmetry(tied) < 1e-9
    assert asymmetry(separate) > 0.1


def test_without_positions_permuting_inputs_permutes_outputs() -> None:
    x, layout = randn(1, 9, WIDTH, seed=5), TokenLayout.whole(1, 9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    free = attention(mask=part("full"))
    torch.testing.assert_close(free(x[:, order], Ctx(layout=layout)), free(x, Ctx(layout=layout))[:, order])
    for bound in (attention(mask=part("causal")), attention(mask=part("full"), position=part("rope"))):
        moved = bound(x[:, order], Ctx(layout=layout)) - bound(x, Ctx(layout=layout))[:, order]
        assert moved.abs().max() > 0.1


def test_attention_is_a_kernel_smoother() -> None:
    """Nadaraya–Watson: Σ K(q, kᵢ)vᵢ / Σ K(q, kᵢ); with keys of one length the kernel is a Gaussian of |q − k|."""
    q, k, v = randn(1, 5, 1, 8), torch.nn.functional.normalize(randn(1, 13, 1, 8, seed=1), dim=-1), randn(1, 13, 1, 8, seed=2)
    scale = 8**-0.5
    z = attend(q, k, v, plain(scale=scale), TokenLayout.whole(1, 5), TokenLayout.whole(1, 13))
    kernel = torch.exp(-torch.cdist(q[0, :, 0], k[0, :, 0]).square() * scale / 2)
    torch.testing.assert_close(z[0, :, 0], kernel @ v[0, :, 0] / kernel.sum(-1, keepdim=True))


# -- masks

MASKS: dict[str, Any] = {
    "causal": "causal",
    "window": ["causal", {"kind": "window", "size": 4}],
    "sinks": ["causal", {"kind": "window", "size": 3, "keep": 2}],
    "global_tokens": {"any": [{"kind": "global_tokens", "tokens": 2}, {"kind": "window", "size": 3}]},
    "strided": ["causal", {"kind": "strided", "step": 3}],
    "dilated": ["causal", {"kind": "dilated", "size": 3, "step": 2}],
    "block_local": ["causal", {"kind": "block_local", "size": 4, "back": 1}],
    "random_blocks": {"any": [{"kind": "random_blocks", "size": 2}, {"kind": "window", "size": 2}]},
    "prefix": {"any": ["causal", {"kind": "prefix", "length": 4}]},
    "by head": {"kind": "by_head", "masks": ["causal", ["causal", {"kind": "window", "size": 2}], "full"]},
}


@pytest.mark.parametrize("name", MASKS)
def test_a_masked_weight_is_exactly_zero_and_a_row_is_the_unmasked_row_renormalized(name: str) -> None:
    mask = from_data(MASKS[name], Mask)
    x, layout = randn(1, 13, WIDTH, seed=5), TokenLayout.whole(1, 13)
    free, bound = (pattern(attention(mask=m), x, layout) for m in (part("full"), mask))
    seen = mask.visible(layout, layout, torch.arange(HEADS)).expand(1, HEADS, 13, 13)
    assert (bound[~seen] == 0).all()
    assert (bound[seen] > 0).all()
    renormalized = (free * seen) / (free * seen).sum(-1, keepdim=True)
    torch.testing.assert_close(bound, renormalized)


@pytest.mark.parametrize("name", [name for name, data in MASKS.items() if from_data(data, Mask).order() == "causal"])
def test_no_gradient_reaches_an_earlier_output_from_a_later_token(name: str) -> None:
    x, layout = randn(1, 13, WIDTH, seed=5).requires_grad_(), TokenLayout.whole(1, 13)
    module = attention(mask=from_data(MASKS[name], Mask), position=part("rope"))
    for backend in offering(module.needs):
        with using(backend.name):
            (grad,) = torch.autograd.grad(module(x, Ctx(layout=layout))[0, 6].sum(), x)
        assert (grad[0, 7:] == 0).all(), backend.name
        assert (grad[0, 6] != 0).any(), backend.name


def test_padding_and_other_documents_are_not_visible() -> None:
    x = randn(1, 9, WIDTH, seed=5)
    packed = pattern(attention(), x, TokenLayout.packed([[4, 3]], 9))
    assert (packed[0, :, 4:7, :4] == 0).all()
    assert (packed[0, :, :, 7:] == 0).all()
    assert (packed[0, :, 7:] == 0).all()
    alone_ = pattern(attention(), x[:, 4:7], TokenLayout.whole(1, 3))
    torch.testing.assert_close(packed[:, :, 4:7, 4:7], alone_)


def test_a_window_of_w_counts_the_token_itself() -> None:
    layout = TokenLayout.whole(1, 12)
    for size, keys in ((4, [6, 7, 8, 9]), (1, [9])):
        a = pattern(attention(mask=part("causal") & part("window", size=size)), randn(1, 12, WIDTH, seed=5), layout)
        for head in range(HEADS):
            assert a[0, head, 9].nonzero().flatten().tolist() == keys


def test_a_window_costs_25_times_less() -> None:
    """n = 100,000 and w = 4,096."""
    mixer = part("attention", mask=part("causal") & part("window", size=4096))
    full, through = mixer.cost(mixer.axes(Scope(sizes={"embed": 256})), 100_000)
    assert full / through == pytest.approx(25, rel=0.03)


def test_the_default_scale_is_one_over_root_d() -> None:
    assert attention().scale == pytest.approx(1 / sqrt(HEAD))
    module = alone(part("attention", heads=1, head=2, position=part("none")), {f"{n}.weight": eye(2) for n in "qkvo"}, embed=2)
    assert module.scale == pytest.approx(0.70710678)
