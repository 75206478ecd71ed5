"""EAGLE: what it adds to a model, what its loss does not change, what it refuses, and training it on a frozen model. Law 25
compares drafting on from its own hidden states with full forward passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.account import account, mtp_flops
from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml, to_yaml
from dovetail.hf.hf import to_hf
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.context import check_split
from dovetail.proof.laws.case import Case
from dovetail.proof.laws.drafted import drafted
from dovetail.spec.fold import parameters, state_values, taps
from dovetail.training.optim import train_only, weights_named

BLOCK = "{mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}"
LAYERS = {
    "attention": f"{BLOCK}, {BLOCK}",
    "hybrid": f"{{mixer: {{kind: mamba2, inner: 24, head: 6}}, ffn: null}}, {BLOCK}",
    "experts": "{repeat: 2, mixer: {heads: 6, head: 12}, ffn: {kind: moe, experts: 4, hidden: 20}}",
}
BLOCKS = {
    "attention": BLOCK,
    "recurrent": "{mixer: {kind: mamba2, inner: 24, head: 6}, ffn: null}",
    "window": "{mixer: {heads: 6, kv_heads: 2, head: 12, mask: [causal, {kind: window, size: 5}]}, ffn: null}",
    "no state": "{mixer: null, ffn: {hidden: 44}}",
    "several streams": "{wire: {kind: mhc, count: 2}, mixer: {heads: 6, head: 12}, ffn: {hidden: 44}}",
}
TOKENS = torch.randint(0, 62, (3, 11), generator=torch.Generator().manual_seed(0))


def eagle(block: str = BLOCK, layers: str = "attention", more: str = "") -> Model:
    ahead = f"{{kind: eagle, {more}block: {block}}}"
    return from_yaml(f"{{width: 28, vocab: 62, layers: [{LAYERS[layers]}], head: {{kind: lm, tied: false}}, mtp: [{ahead}]}}")


def plain() -> Model:
    return eagle().set("mtp", [])


def loss_of(model: Any, draws: Draws | None = None) -> torch.Tensor:
    losses: dict[str, torch.Tensor] = {}
    model.hidden(TOKENS, Ctx(layout=TokenLayout.whole(3, 11), losses=Losses(losses), draws=draws))
    return losses["mtp.0.loss"]


def test_the_logits_of_the_model_do_not_change() -> None:
    bare, model = build(plain()), build(eagle())
    assert torch.equal(bare(TOKENS), model(TOKENS))
    assert torch.equal(bare.loss(TOKENS), model.loss(TOKENS))  # in evaluation nothing is added


def test_it_is_in_every_account() -> None:
    spec = eagle()
    block = (parameters(plain()) - 2 * 62 * 28 - 28) // 2
    assert parameters(spec) - parameters(plain()) == block + 28 * 56 + 28
    assert state_values(spec, 10) - state_values(plain(), 10) == 10 * 2 * 2 * 12
    assert {"mtp.0.projected", "mtp.0.hidden", "mtp.0.block.mixer.q"} <= set(taps(spec))
    # the first 15 tokens: the projection, the block, and the head for both distributions
    per_token = 2 * (28 * 56 + 28 * 12 * (6 + 2 + 2 + 6) + 3 * 28 * 44 + 2 * 28 * 62)
    assert mtp_flops(spec, 16)[0] == 15 * per_token + 4 * 15 * 15 * 6 * 12
    assert account(spec, 16).flops_per_token["mtp"] == mtp_flops(spec, 16)[1] / 16
    assert mtp_flops(eagle(more="probs: 0, "), 16)[0] == mtp_flops(spec, 16)[0] - 15 * 2 * 2 * 28 * 62
    assert from_yaml(to_yaml(spec)) == spec


@pytest.mark.quick(1)
@pytest.mark.parametrize(("block", "layers"), [*((name, "attention") for name in BLOCKS), *(("attention", x) for x in LAYERS)])
def test_any_causal_block_drafts_on_from_its_own_hidden_states(block: str, layers: str) -> None:
    drafted(Case(eagle(BLOCKS[block], layers)))


def test_the_model_is_not_pulled_towards_the_drafts() -> None:
    """The hidden states and probs that the loss compares with are constants: a depth that reads nothing of the model gives the
    model no gradient."""
    model = build(eagle())
    with torch.no_grad():
        model.get_parameter("mtp.0.proj.weight").zero_()
    loss_of(model).backward()
    graded = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    # the head turns the predicted hidden states into probs, and is trained by them where it is not frozen
    assert graded - {"head.out.weight"} == {name for name in graded if name.startswith("mtp.0.")}
    assert "mtp.0.proj.bias" in graded


def test_chunks_of_tokens_have_the_loss_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(eagle(), dtype=torch.float64)
    whole = loss_of(model)
    (want,) = torch.autograd.grad(whole, model.get_parameter("mtp.0.proj.weight"))
    monkeypatch.setattr("dovetail.model.multi_token.CHUNK", 4)  # of 30 tokens
    pieces = loss_of(model)
    (got,) = torch.autograd.grad(pieces, model.get_parameter("mtp.0.proj.weight"))
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(got, want)


def test_noise_is_added_in_training_only() -> None:
    quiet, noisy = (build(eagle(more=f"noise: {noise}, ")) for noise in (0.0, 0.5))
    assert torch.equal(loss_of(quiet), loss_of(noisy))
    assert not torch.equal(loss_of(quiet, Draws(1)), loss_of(noisy, Draws(1)))
    assert torch.equal(loss_of(noisy, Draws(1)), loss_of(noisy, Draws(1)))


def test_only_the_block_takes_gradients_on_a_frozen_model() -> None:
    spec = eagle()
    model, chosen = build(spec).train(), weights_named(spec, ["mtp.*"])
    assert chosen is not None
    train_only(model, chosen)
    model.loss(TOKENS).backward()
    graded = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert graded == {name for name, _ in model.named_parameters() if name.startswith("mtp.")}
    assert all(weight.grad.abs().max() > 0 for weight in model.parameters() if weight.grad is not None)


def test_a_block_is_grafted_into_a_trained_model_and_trained_alone(tmp_path: Path) -> None:
    """By the two commands of the docs."""
    text, small = tmp_path / "tale.txt", {"batch": 8, "length": 32, "sample": 0, "quiet": True, "evals": 1}
    text.write_text("It was the best of times, it was the worst of times.\n" * 60, encoding="utf-8")
    block = "{mixer: {heads: 2, kv_heads: 1}, ffn: {hidden: 44}}"
    spec = f"{{width: 28, vocab: 270, layers: [{block}, {block}]}}"
    dt.train(spec, text, steps=60, learning_rate=0.01, out=tmp_path / "base", **small)
    ahead = [{"kind": "eagle", "block": {"mixer": {"heads": 2}, "ffn": {"hidden": 44}}}]
    dt.graft(tmp_path / "base", set={"mtp": ahead}, out=tmp_path / "grafted")
    given: dict[str, Any] = {"from_": tmp_path / "grafted", "only": "mtp.*", "learning_rate": 0.02, "steps": 60, **small}
    run = dt.train(None, text, out=tmp_path / "eagle", **given)
    assert run.tokenizer is not None
    base, ids = dt.load(tmp_path / "base"), run.tokenizer.encode(text.read_text()[:400])[None]
    after = dict(run.model.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in base.named_parameters()), "the model stays as it is"

    def agrees(model: Any) -> float:
        """How often the block's most probable token is the model's."""
        with torch.no_grad():
            hidden, ctx = model.eval().hidden(ids, Ctx(layout=TokenLayout.whole(1, ids.shape[1])))
            logits, _ = model.draft(hidden[:, :-1], ids[:, 1:], Ctx(layout=TokenLayout.whole(1, ids.shape[1] - 1)))
            return (logits.argmax(-1) == model.head(hidden, ctx)[:, 1:].argmax(-1)).float().mean().item()

    fresh, trained = dt.load(tmp_path / "grafted"), dt.load(tmp_path / "eagle")
    assert agrees(trained) > agrees(fresh) + 0.3


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"mtp": ["eagle", "eagle"]}, "mtp", "drafts any number of tokens, and is the only one"),
        ({"head": None}, "mtp", "logits over the vocabulary per token"),
        ({"layers.*.mixer.mask": "full"}, "mtp", "a causal model"),
        ({"mtp.0.block.mixer.mask": "full"}, "mtp.0.block.mixer", "attention sees later tokens"),
        ({"mtp.0.block.cross": "cross_attention"}, "mtp.0.block.cross", "reads no encoder output"),
        ({"mtp.0.probs": -1}, "mtp.0.probs", "-1"),
    ],
)
def test_refuses(change: dict[str, Any], path: str, says: str) -> None:
    ((field, value),) = change.items()
    with pytest.raises(SpecError, match=says) as error:
        build(eagle().set(field, value))
    assert error.value.path == path


def test_a_sequence_split_over_ranks_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="eagle predicts later tokens") as error:
        check_split(eagle())
    assert error.value.path == "mtp.0"


def test_no_family_of_hugging_face_has_a_place_for_it() -> None:
    with pytest.raises(SpecError, match="mtp"):
        to_hf(eagle())
