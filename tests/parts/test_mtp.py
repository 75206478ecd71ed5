"""Multi-token prediction: what it adds to a model, and what it refuses. Law 25 compares drafting with a whole pass."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dovetail.account import account, mtp_flops
from dovetail.base.errors import InputError, SpecError
from dovetail.files.spec import from_yaml, to_yaml
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.context import check_split
from dovetail.proof.laws.case import Case
from dovetail.proof.laws.cover import quick_specs
from dovetail.proof.laws.drafted import drafted
from dovetail.proof.laws.sample import Draw, attempt, draw_model
from dovetail.spec.fold import declared, parameters, state_values, taps
from dovetail.state.pool import Pool

LAYER = "mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}"
PLAIN = f"{{width: 28, vocab: 62, layers: [{{repeat: 2, {LAYER}}}], head: {{kind: lm, tied: false}}"
TOKENS = torch.randint(0, 62, (3, 11), generator=torch.Generator().manual_seed(0))


def with_depths(count: int = 2, block: str = LAYER) -> Model:
    return from_yaml(f"{PLAIN}, mtp: [{', '.join([f'{{block: {{{block}}}}}'] * count)}]}}")


def test_the_logits_of_the_model_do_not_change() -> None:
    plain, more = build(from_yaml(f"{PLAIN}}}")), build(with_depths())
    assert torch.equal(plain(TOKENS), more(TOKENS))
    assert torch.equal(plain.loss(TOKENS), more.loss(TOKENS))  # in evaluation nothing is added
    plain.train()
    more.train()
    assert torch.equal(plain(TOKENS), more(TOKENS))


def test_the_loss_of_training_is_the_mean_over_depths_times_the_weight() -> None:
    spec = with_depths(2)
    model = build(spec)
    losses: dict[str, torch.Tensor] = {}
    main = model.loss(TOKENS)
    both = model.loss(TOKENS, ctx=Ctx(layout=TokenLayout.whole(3, 11), losses=Losses(losses)))
    assert losses.keys() == {"mtp.0.loss", "mtp.1.loss"}
    torch.testing.assert_close(both, main + losses["mtp.0.loss"] + losses["mtp.1.loss"])
    heavy = build(spec.set("mtp.*.weight", 0.6))
    more: dict[str, torch.Tensor] = {}
    heavy.loss(TOKENS, ctx=Ctx(layout=TokenLayout.whole(3, 11), losses=Losses(more)))
    torch.testing.assert_close(more["mtp.1.loss"], 2 * losses["mtp.1.loss"])
    one: dict[str, torch.Tensor] = {}
    build(with_depths(1)).loss(TOKENS, ctx=Ctx(layout=TokenLayout.whole(3, 11), losses=Losses(one)))
    torch.testing.assert_close(one["mtp.0.loss"], 2 * losses["mtp.0.loss"])  # of two depths each counts half
    model.train()
    torch.testing.assert_close(model.loss(TOKENS), both)


@pytest.mark.parametrize("n", [1, 2])
def test_a_row_too_short_for_a_depth_adds_nothing(n: int) -> None:
    losses: dict[str, torch.Tensor] = {}
    build(with_depths()).loss(TOKENS[:, :n], ctx=Ctx(layout=TokenLayout.whole(3, n), losses=Losses(losses)))
    assert [bool(loss.isfinite()) for loss in losses.values()] == [True, True]
    assert losses["mtp.1.loss"] == 0


def test_it_is_in_every_account() -> None:
    plain, spec = from_yaml(f"{PLAIN}}}"), with_depths(1)
    block = (parameters(plain) - 2 * 62 * 28 - 28) // 2
    assert parameters(spec) - parameters(plain) == block + 28 * 56 + 3 * 28
    assert state_values(spec, 10) - state_values(plain, 10) == 10 * 2 * 2 * 12
    assert {"mtp.0.projected", "mtp.0.hidden", "mtp.0.block.mixer.q"} <= set(taps(spec))
    decays = {d.path: d.weight.decays for d in declared(spec) if d.weight.learned}
    assert decays["mtp.0.proj.weight"]
    assert not any(decays[f"mtp.0.{name}.scale"] for name in ("embed_norm", "hidden_norm", "norm"))
    costs, figures = account(spec, 16), account(plain, 16)
    assert costs.flops_per_token["matmul"] == figures.flops_per_token["matmul"] == costs.costs[""].matmul
    assert "mtp" not in figures.flops_per_token
    # the first 15 tokens: the projection, the block, the head
    per_token = 2 * (28 * 56 + 28 * 12 * (6 + 2 + 2 + 6) + 3 * 28 * 44 + 28 * 62)
    assert mtp_flops(spec, 16)[0] == 15 * per_token + 4 * 15 * 15 * 6 * 12
    assert costs.flops_per_token["mtp"] == mtp_flops(spec, 16)[1] / 16


def test_a_pool_of_the_layers_has_no_state_of_the_depths() -> None:
    spec = with_depths()
    layers, depths = Pool(spec, 1, 8), Pool(spec, 1, 8, drafts=True)
    assert (layers.layers, depths.layers) == (2, 2)
    assert layers.bytes() + depths.bytes() == state_values(spec, 8) * 4


def test_a_swap_of_positions_reaches_the_depths() -> None:
    spec = with_depths().swap("position", "alibi")
    assert {part.to_data()["block"]["mixer"]["position"] for part in spec.mtp} == {"alibi"}
    assert from_yaml(to_yaml(spec)) == spec


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "block",
    [
        "kind: hybrid_block, mixer: {heads: 6, head: 12}, ssm: {kind: mamba2, inner: 24, head: 6}, ffn: {hidden: 44}",
        "mixer: {heads: 6, kv_heads: 2, head: 12, mask: [causal, {kind: window, size: 5}]}, ffn: null",
        "mixer: {kind: mla, heads: 2, kv_rank: 10, q_rank: null, nope: 6, rope: 4, value: 6}, ffn: {hidden: 44}",
        "mixer: {kind: mamba2, inner: 24, head: 6}, ffn: null",
        "mixer: {kind: gated_deltanet, heads: 4, key_size: 6, value_size: 6}, ffn: {kind: moe, experts: 4, hidden: 20}",
        "wire: {kind: mhc, count: 2}, mixer: {heads: 6, head: 12}, ffn: {hidden: 44}",
    ],
    ids=["two mixers", "window", "mla", "mamba2", "deltanet, experts", "several streams"],
)
def test_any_causal_block_drafts(block: str) -> None:
    drafted(Case(with_depths(2, block)))


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"head": {"kind": "classifier", "classes": 3}}, "mtp", "logits over the vocabulary per token"),
        ({"head": None}, "mtp", "logits over the vocabulary per token"),
        ({"layers.*.mixer.mask": "full"}, "mtp", "a causal model"),
        ({"mtp.1.block.mixer.mask": "full"}, "mtp.1.block.mixer", "attention sees later tokens"),
        ({"mtp.0.block.cross": "cross_attention"}, "mtp.0.block.cross", "reads no encoder output"),
        ({"mtp.1.block.shares": 0}, "mtp.1.block.shares", "weights of its own"),
    ],
)
def test_refuses(change: dict[str, Any], path: str, says: str) -> None:
    spec = with_depths()
    for field, value in change.items():
        spec = spec.set(field, value)
    with pytest.raises(SpecError, match=says) as error:
        build(spec)
    assert error.value.path == path


def test_drafting_refuses_a_depth_that_is_not_there() -> None:
    model = build(with_depths(1))
    hidden, ctx = model.hidden(TOKENS, Ctx(layout=TokenLayout.whole(3, 11)))
    for depth in (0, 2):
        with pytest.raises(InputError, match=f"depth: {depth} of 1"):
            model.draft(hidden, TOKENS, ctx, depth)
    with pytest.raises(InputError, match="tokens"):
        model.draft(hidden, TOKENS[:, :-1], ctx)


def test_a_sequence_split_over_ranks_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="mtp predicts later tokens") as error:
        check_split(with_depths())
    assert error.value.path == "mtp.0"


@pytest.mark.slow
def test_decoders_are_sampled_with_it() -> None:
    drawn = [draw_model(Draw(random.Random(seed), "decoder", {}))["mtp"] for seed in range(30)]
    assert {len(depths) for depths in drawn} == {0, 1, 2}
    assert any(spec.mtp for spec in quick_specs())
    samples = [attempt(random.Random(seed), {"model/mtp": "mtp"}) for seed in range(30)]
    assert sum(spec is not None for spec in samples) >= 9
    assert all(spec.mtp for spec in samples if spec is not None)
