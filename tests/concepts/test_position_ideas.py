"""Positions: each concept tested by a number or an identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.t5.modeling_t5 import T5Attention

from dovetail.base.errors import StateError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.oracle import alone
from dovetail.spec.part import KINDS


def part(kind: str, **fields: Any) -> Any:
    return KINDS[kind](**fields)


def waves(positions: int, width: int = 64) -> Tensor:
    module = alone(part("sinusoidal"), embed=width)
    return module.embed(torch.zeros(1, positions, width, dtype=torch.float64), TokenLayout.whole(1, positions))[0]


# -- sinusoidal


def test_sinusoidal_numbers() -> None:
    expected = torch.tensor([[0, 1, 0, 1], [0.8415, 0.5403, 0.0100, 1.0000]], dtype=torch.float64)
    torch.testing.assert_close(waves(2, 4), expected, rtol=0, atol=6e-5)


def test_a_shift_of_sinusoids_is_a_rotation() -> None:
    """One orthogonal matrix takes every PE(p) to PE(p + 5)."""
    table = waves(200)
    frequency = 10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)
    rotation = torch.zeros(64, 64, dtype=torch.float64)
    for i, angle in enumerate(5 * frequency):
        block = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
        rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = block
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(64, dtype=torch.float64))
    torch.testing.assert_close(table[:-5] @ rotation, table[5:], rtol=0, atol=1e-9)


def test_sinusoids_agree_by_distance_alone() -> None:
    """⟨PE(p), PE(p + Δ)⟩ = Σ cos(ωᵢΔ)."""
    table = waves(120)
    frequency = 10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)
    for distance in (0, 1, 7, 60):
        products = (table[: 120 - distance] * table[distance:]).sum(-1)
        torch.testing.assert_close(products, torch.full_like(products, torch.cos(distance * frequency).sum().item()))


def test_learned_positions_refuse_what_is_past_their_table() -> None:
    model = build(
        from_yaml("{width: 24, vocab: 30, position: {kind: learned, length: 6}, layers: [{mixer: {heads: 2, position: none}}]}")
    )
    tokens = torch.zeros(1, 7, dtype=torch.long)
    model(tokens[:, :6], Ctx(layout=TokenLayout.whole(1, 6)))
    for layout in (TokenLayout.whole(1, 7), TokenLayout.padded([7], 7)):
        with pytest.raises(StateError, match="position 6 is past the last row of the table, 5"):
            model(tokens, Ctx(layout=layout))


# -- rotary


def score(q: Tensor, k: Tensor, at_q: int, at_k: int, **fields: Any) -> Tensor:
    """Of vectors (…, head) that stand at these positions."""
    module = alone(part("rope", **fields), head=q.shape[-1])
    turned = (
        module.rotate(q[None, None], TokenLayout.whole(1, 1, start=at_q)),
        module.on_write(k[None, None], TokenLayout.whole(1, 1, start=at_k)),
    )
    return (turned[0] * turned[1]).sum(-1)[0, 0]


@pytest.mark.parametrize("fields", [{}, {"pairs": "adjacent"}, {"fraction": 0.5}, {"base": 500.0}])
def test_a_rotary_score_depends_on_the_offset_alone(fields: dict[str, Any]) -> None:
    q, k = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(score(q, k, 2, 5, **fields), score(q, k, 100, 103, **fields))
    assert (score(q, k, 2, 5, **fields) - score(q, k, 2, 6, **fields)).abs().max() > 0.1


def test_the_mean_rotary_score_decays_with_distance() -> None:
    """For q and k alike, averaged over ranges of distance."""
    same = torch.ones(1, 64, dtype=torch.float64)
    means = [
        torch.stack([score(same, same, 0, d) for d in range(low, high, step)]).mean().item()
        for low, high, step in ((1, 8, 1), (8, 64, 7), (64, 512, 41), (512, 4096, 301))
    ]
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.35 * means[0]


def test_rotating_keys_on_read_equals_rotating_them_on_write() -> None:
    x = torch.randn(1, 9, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outs = []
    for when in ("write", "read"):
        spec = from_yaml(f"{{width: 24, layers: [{{mixer: {{heads: 3, position: {{kind: rope, when: {when}}}}}}}]}}")
        mixer: Any = build(spec, dtype=torch.float64).layers[0].mixer
        outs.append(mixer(x, Ctx(layout=TokenLayout.whole(1, 9))))
    torch.testing.assert_close(outs[0], outs[1])


def test_two_coordinates_rotate_by_row_and_column() -> None:
    """A score between patches depends on their distance in each direction, and not on their positions."""
    module = alone(part("rope", coords=2), head=16)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def layout(row: int, column: int) -> TokenLayout:
        order = torch.tensor([[0]])
        return TokenLayout(torch.tensor([[[row, column]]]), order, torch.zeros_like(order))

    def between(one: tuple[int, int], other: tuple[int, int]) -> float:
        return (module.rotate(q, layout(*one)) * module.on_write(k, layout(*other))).sum().item()

    assert between((1, 2), (4, 3)) == pytest.approx(between((11, 7), (14, 8)))
    assert between((1, 2), (4, 3)) != pytest.approx(between((1, 2), (3, 4)))


STRETCHED: dict[str, tuple[Any, dict[str, Any], int]] = {
    "linear": ({"kind": "linear_scaling", "factor": 3.0}, {"factor": 3.0}, 100),
    "dynamic, short": ({"kind": "dynamic_ntk", "factor": 2.5, "original": 40}, {"factor": 2.5}, 30),
    "dynamic, long": ({"kind": "dynamic_ntk", "factor": 2.5, "original": 40}, {"factor": 2.5}, 100),
    "yarn": ({"kind": "yarn", "factor": 6.0, "original": 64}, {"factor": 6.0, "original_max_position_embeddings": 64}, 100),
    "yarn, not rounded": (
        {"kind": "yarn", "factor": 6.0, "original": 512, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
        {"factor": 6.0, "original_max_position_embeddings": 512, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
        100,
    ),
    "yarn, own amplitude": (
        {"kind": "yarn", "factor": 6.0, "original": 64, "attention": 1.3},
        {"factor": 6.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
        100,
    ),
    "llama3": (
        {"kind": "llama3", "factor": 8.0, "original": 128, "low": 1.0, "high": 4.0},
        {"factor": 8.0, "original_max_position_embeddings": 128, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        100,
    ),
    "longrope, short": ({}, {}, 30),
    "longrope, long": ({}, {}, 100),
}
PAIRS = 24
LISTS = {"short": [1.0 + 0.05 * i for i in range(PAIRS)], "long": [2.0 + 0.2 * i for i in range(PAIRS)]}


@pytest.mark.parametrize("name", STRETCHED)
def test_scaled_frequencies_and_amplitude_equal_those_of_transformers(name: str) -> None:
    ours, theirs, length = STRETCHED[name]
    kind = name.partition(",")[0]
    if kind == "longrope":
        ours = {"kind": "longrope", "factor": 4.0, "original": 40, "short": tuple(LISTS["short"]), "long": tuple(LISTS["long"])}
        theirs = {
            "factor": 4.0,
            "original_max_position_embeddings": 40,
            "short_factor": LISTS["short"],
            "long_factor": LISTS["long"],
        }
    config = LlamaConfig(
        hidden_size=96,
        num_attention_heads=2,
        head_dim=2 * PAIRS,
        max_position_embeddings=40 if kind == "dynamic" else 4096,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **theirs},
    )
    wanted, amplitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    scaling = part(ours["kind"], **{k: v for k, v in ours.items() if k != "kind"})
    rope = part("rope", scaling=scaling)
    module = alone(rope, head=2 * PAIRS)
    got = module.frequency
    if scaling.varies:
        got = scaling.at_length(rope.plain(module.scope), rope.base, torch.tensor([length]))[0]
    assert (got - wanted).abs().max() <= 1e-7
    torch.testing.assert_close(got.float(), wanted, rtol=3e-7, atol=1e-12)
    assert scaling.amplitude() == pytest.approx(amplitude, abs=1e-12)


def test_ntk_aware_scaling_keeps_the_highest_frequency_and_divides_the_lowest_by_the_factor() -> None:
    plain = alone(part("rope"), head=48).frequency
    grown = alone(part("rope", scaling=part("ntk", factor=4.0)), head=48).frequency
    assert grown[0] == plain[0]
    assert grown[-1].item() == pytest.approx(plain[-1].item() / 4)
    assert ((plain / grown).diff() > 0).all()


# -- biases


def test_alibi_slopes_are_the_paper_s() -> None:
    eight = alone(part("alibi"), heads=8).slope
    torch.testing.assert_close(eight, 2.0 ** -torch.arange(1.0, 9.0, dtype=torch.float64))
    twelve = alone(part("alibi"), heads=12).slope
    torch.testing.assert_close(twelve[:8], eight)
    torch.testing.assert_close(twelve[8:], 2.0 ** -torch.tensor([0.5, 1.5, 2.5, 3.5], dtype=torch.float64))


def test_alibi_is_added_to_the_scaled_scores_at_any_length_and_on_both_sides() -> None:
    module = alone(part("alibi"), heads=8)
    score = module.score(TokenLayout.whole(1, 3, start=99_999), TokenLayout.whole(1, 2), *module.tables())
    assert score[0, 0, 0].tolist() == [-0.5 * 99_999, -0.5 * 99_998]
    later = module.score(TokenLayout.whole(1, 1), TokenLayout.whole(1, 4), *module.tables())
    assert later[0, 1, 0].tolist() == [0.0, -0.25, -0.5, -0.75]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (64, 500)])
def test_relative_buckets_are_the_reference_library_s(bidirectional: bool, buckets: int, max_distance: int) -> None:
    module = alone(
        part("t5_bias", buckets=buckets, max_distance=max_distance, bidirectional=bidirectional),
        {"table": [[0.0] * buckets]},
        heads=1,
    )
    distance = torch.arange(-600, 601)  # query − key
    wanted = T5Attention._relative_position_bucket(-distance, bidirectional, buckets, max_distance)
    assert module.bucket(distance).equal(wanted)


# -- none


def stack(mask: str, spread: float = 0.3) -> Any:
    layer = f"{{repeat: 2, mixer: {{heads: 3, position: none, mask: {mask}}}, ffn: {{hidden: 64}}}}"
    return build(from_yaml(f"{{width: 24, vocab: 9, layers: [{layer}], init: {{spread: {spread}}}}}"), dtype=torch.float64)


def test_a_causal_mask_alone_gives_order() -> None:
    """What comes first matters to a decoder without positions, and not to an encoder."""
    one, other = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 1, 3, 4]])
    for mask, tells in (("causal", True), ("full", False)):
        model = stack(mask)
        last = [model(tokens, Ctx(layout=TokenLayout.whole(1, 4)))[0, -1] for tokens in (one, other)]
        assert bool((last[0] - last[1]).abs().max() > 1e-3) is tells


@pytest.mark.parametrize(("mask", "learns"), [("causal", True), ("full", False)])
def test_a_decoder_without_positions_trains_to_count(mask: str, learns: bool) -> None:
    """Behind one first token, equal tokens differ by how many came before; where all see all, they are one."""
    model = stack(mask, spread=0.1).float()
    tokens, labels, ctx = torch.tensor([[1, 2, 2, 2, 2, 2]]), torch.arange(6)[None], Ctx(layout=TokenLayout.whole(1, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for _ in range(60):
        loss = model.loss(tokens, labels, ctx)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model(tokens, ctx).argmax(-1).equal(labels) is learns
