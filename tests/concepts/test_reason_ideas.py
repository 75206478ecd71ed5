"""Why a transformer is built as it is: what fails, or is lost, if one of its matrices is left out or shared."""

from __future__ import annotations

import pytest
import torch

import dovetail as dt

TOKENS = torch.randint(0, 19, (1, 7), generator=torch.Generator().manual_seed(0))
MIXER = "layers.0.mixer"


def attention(fields: str) -> dt.Transformer:
    """One layer of attention without positions, in double precision."""
    mixer = f"{{heads: 2, mask: full, position: none, {fields}}}"
    return dt.build(f"{{width: 8, vocab: 19, layers: [{{mixer: {mixer}, ffn: null}}], init: {{spread: 0.6}}}}", dtype="float64")


def test_heads_that_share_their_projections_are_one_head() -> None:
    model = attention("head: 4")
    apart = model.trace(TOKENS, f"{MIXER}.z")[f"{MIXER}.z"]
    assert (apart[..., 0, :] - apart[..., 1, :]).abs().max() > 0.01
    with torch.no_grad():
        for name in "qkv":
            weight = model.get_parameter(f"{MIXER}.{name}.weight")
            weight[4:] = weight[:4]
    z = model.trace(TOKENS, f"{MIXER}.z")[f"{MIXER}.z"]
    torch.testing.assert_close(z[..., 0, :], z[..., 1, :], rtol=0, atol=1e-14)


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_token_gives_differs_from_what_it_is_found_by_only_if_w_v_is_not_w_k(tied: bool) -> None:
    """Two tokens that differ only where W_K does not look have equal keys. Their values differ, unless W_V is W_K: then no
    query can tell which of them it reads."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w_k, w_v = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    unseen = torch.linalg.svd(w_k.T).Vh[-1]  # W_K maps it to 0
    other = x.clone()
    other[2] += 5 * unseen
    torch.testing.assert_close(other @ w_k, x @ w_k)
    q = torch.randn(3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    one, two = (dt.attention(q, tokens @ w_k, tokens @ (w_k if tied else w_v)) for tokens in (x, other))
    assert torch.allclose(one, two, atol=1e-12) == tied


def test_a_concatenated_position_is_an_added_one_with_a_matrix_of_its_own() -> None:
    """[x; p] W = x W₁ + p W₂. With W₁ = W₂ it is (x + p) W: concatenation costs width, and adds only a matrix, which a learned
    table of positions can contain."""
    draw = torch.Generator().manual_seed(0)
    x, w1, w2 = (torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((5, 8), (8, 6), (8, 6)))
    p = dt.positions(5, 8)
    torch.testing.assert_close(torch.cat([x, p], -1) @ torch.cat([w1, w1]), (x + p) @ w1)
    table = p @ w2 @ torch.linalg.pinv(w1)  # the added positions that do what the concatenated ones do
    torch.testing.assert_close(torch.cat([x, p], -1) @ torch.cat([w1, w2]), (x + table) @ w1)


@pytest.mark.parametrize("ffn", ["glu", "mlp", "moe"])
def test_a_feed_forward_mixes_no_tokens(ffn: str) -> None:
    spec = f"{{width: 8, vocab: 19, layers: [{{mixer: null, ffn: {{kind: {ffn}, hidden: 12}}}}]}}"
    model, other = dt.build(spec, dtype="float64"), TOKENS.clone()
    other[0, 3] = (other[0, 3] + 1) % 19
    changed = (model(other) - model(TOKENS)).abs().amax(-1)[0] > 1e-9
    assert changed.nonzero().flatten().tolist() == [3]


def test_products_can_be_bracketed_with_16_entries_or_4() -> None:
    q, k, v = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert ((q @ k.T).numel(), (k.T @ v).numel()) == (16, 4)
    torch.testing.assert_close((q @ k.T) @ v, q @ (k.T @ v))


def test_averaged_vectors_lose_order_and_a_fixed_window_loses_distance() -> None:
    """The mean of word vectors is that of the words in any order; a model of the last two tokens sees no third."""
    head = "head: {kind: pooled_embedding, pooling: mean}"
    for layer, lost in (("{mixer: null, ffn: {hidden: 12}}", True), ("{mixer: {heads: 2, mask: full}}", False)):
        model = dt.build(f"{{width: 8, vocab: 19, layers: [{layer}], {head}}}", dtype="float64")
        assert torch.allclose(model(TOKENS), model(TOKENS.flip(1)), atol=1e-12) == lost
    other = TOKENS.clone()
    other[0, 3] = (other[0, 3] + 1) % 19
    for mask, lost in (("[causal, {kind: window, size: 2}]", True), ("causal", False)):
        model = dt.build(f"{{width: 8, vocab: 19, layers: [{{mixer: {{heads: 2, mask: {mask}}}}}]}}", dtype="float64")
        assert torch.equal(model(other)[0, -1], model(TOKENS)[0, -1]) == lost
