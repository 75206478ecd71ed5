"""Medusa heads: what they add to a model, what they refuse, and training them on a frozen model. Law 25 compares drafting with
a whole pass."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail as dt
from dovetail.account import account, mtp_flops
from dovetail.base.errors import InputError, SpecError
from dovetail.files.spec import from_yaml, to_yaml
from dovetail.hf.hf import to_hf
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.layout import TokenLayout
from dovetail.parallel.context import check_split
from dovetail.proof.laws.case import Case
from dovetail.proof.laws.cover import quick_specs
from dovetail.proof.laws.drafted import drafted
from dovetail.proof.laws.sample import attempt
from dovetail.spec.fold import parameters, state_values, taps, targets
from dovetail.training.optim import train_only, weights_named

ATTENTION = "mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}"
LAYERS = {
    "attention": f"{{repeat: 2, {ATTENTION}}}",
    "hybrid": f"{{mixer: {{kind: mamba2, inner: 24, head: 6}}, ffn: null}}, {{{ATTENTION}}}",
    "experts": "{mixer: {heads: 6, head: 12}, ffn: {kind: moe, experts: 4, hidden: 20}}",
}
OWN = "{kind: medusa, head: {kind: lm, tied: false}}"
TOKENS = torch.randint(0, 62, (3, 11), generator=torch.Generator().manual_seed(0))


def with_heads(heads: str = "medusa, medusa", layers: str = "attention") -> Model:
    return from_yaml(f"{{width: 28, vocab: 62, layers: [{LAYERS[layers]}], head: {{kind: lm, tied: false}}, mtp: [{heads}]}}")


def ctx_of(losses: dict[str, torch.Tensor] | None = None) -> Ctx:
    return Ctx(layout=TokenLayout.whole(3, 11), losses=None if losses is None else Losses(losses))


def test_a_fresh_head_predicts_what_the_model_predicts() -> None:
    model = build(with_heads())
    hidden, ctx = model.hidden(TOKENS, ctx_of())
    for depth in (1, 2):
        logits, before = model.draft(hidden, TOKENS, ctx, depth)
        assert torch.equal(before, hidden)
        assert torch.equal(logits, model(TOKENS))
    plain = build(with_heads(""))
    assert torch.equal(plain(TOKENS), model(TOKENS))
    assert torch.equal(plain.loss(TOKENS), model.loss(TOKENS))  # in evaluation nothing is added


def test_head_k_is_trained_to_predict_the_token_k_places_after_the_next() -> None:
    """Its loss is λ/K times the cross-entropy of a fresh head, which is that of the model, with labels further on."""
    model, found = build(with_heads("{kind: medusa, weight: 0.5}, medusa")), dict[str, torch.Tensor]()
    whole, logits = model.loss(TOKENS, ctx=ctx_of(found)), model(TOKENS).flatten(0, 1)
    for k, share in ((1, 0.25), (2, 0.15)):
        labels = torch.full_like(TOKENS, -100)
        labels[:, : -k - 1] = TOKENS[:, k + 1 :]
        torch.testing.assert_close(
            found[f"mtp.{k - 1}.loss"], share * torch.nn.functional.cross_entropy(logits, labels.flatten())
        )
    torch.testing.assert_close(whole, model.loss(TOKENS) + sum(found.values()))


def test_it_is_in_every_account() -> None:
    plain, shared, own = with_heads(""), with_heads("medusa"), with_heads(f"{{kind: medusa, blocks: 2}}, {OWN}")
    assert parameters(shared) - parameters(plain) == 28 * 28 + 28
    assert parameters(own) - parameters(plain) == 3 * (28 * 28 + 28) + 28 * 62
    assert state_values(own, 10) == state_values(plain, 10), "it has no decode state"
    assert {"mtp.0.hidden", "mtp.1.head.logits"} <= set(taps(own))
    assert {"mtp.0.residual_1.weight", "mtp.1.head.out.weight"} <= set(targets(own))
    assert mtp_flops(shared, 16) == (15 * 2 * (28 * 28 + 28 * 62),) * 2
    assert mtp_flops(own, 16)[0] == 15 * 2 * (2 * 28 * 28 + 28 * 62) + 14 * 2 * (28 * 28 + 28 * 62)
    assert account(own, 16).flops_per_token["mtp"] == mtp_flops(own, 16)[0] / 16
    assert from_yaml(to_yaml(own)) == own


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("heads", [f"{{kind: medusa, blocks: 2}}, {OWN}", f"medusa, {{block: {{{ATTENTION}}}}}, medusa"])
def test_any_causal_model_drafts(layers: str, heads: str) -> None:
    """The second has a depth with a block and a KV cache between two heads without: each reads what it declares."""
    drafted(Case(with_heads(heads, layers)))


def test_only_the_heads_take_gradients_on_a_frozen_model() -> None:
    spec = with_heads(f"medusa, {OWN}")
    model = build(spec).train()
    chosen = weights_named(spec, ["mtp.*"])
    assert chosen is not None
    train_only(model, chosen)
    model.loss(TOKENS).backward()
    graded = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert graded == {name for name, _ in model.named_parameters() if name.startswith("mtp.")}
    assert all(weight.grad.abs().max() > 0 for weight in model.parameters() if weight.grad is not None)


def test_heads_are_grafted_into_a_trained_model_and_trained_alone(tmp_path: Path) -> None:
    """Medusa-1, by the two commands of the docs."""
    text, small = tmp_path / "tale.txt", {"batch": 8, "length": 32, "sample": 0, "quiet": True, "evals": 1}
    text.write_text("It was the best of times, it was the worst of times.\n" * 60, encoding="utf-8")
    block = "{mixer: {heads: 2, kv_heads: 1}, ffn: {hidden: 44}}"
    dt.train(
        f"{{width: 28, vocab: 270, layers: [{block}, {block}]}}",
        text,
        steps=60,
        learning_rate=0.01,
        out=tmp_path / "base",
        **small,
    )
    dt.graft(tmp_path / "base", set={"mtp": ["medusa", "medusa"]}, out=tmp_path / "grafted")
    given: dict[str, Any] = {"from_": tmp_path / "grafted", "only": "mtp.*", "learning_rate": 0.02, "steps": 60, **small}
    run = dt.train(None, text, out=tmp_path / "medusa", **given)
    assert run.tokenizer is not None
    base, ids = dt.load(tmp_path / "base"), run.tokenizer.encode(text.read_text()[:400])[None]
    after = dict(run.model.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in base.named_parameters()), "the model stays as it is"

    def right(model: Any, depth: int) -> float:
        """How often a head is right about its token."""
        with torch.no_grad():
            hidden, ctx = model.eval().hidden(ids, Ctx(layout=TokenLayout.whole(1, ids.shape[1])))
            logits, _ = model.draft(hidden, ids, ctx, depth)
        return (logits[0, : -depth - 1].argmax(-1) == ids[0, depth + 1 :]).float().mean().item()

    fresh, trained = dt.load(tmp_path / "grafted"), dt.load(tmp_path / "medusa")
    for depth in (1, 2):
        assert right(trained, depth) > right(fresh, depth) + 0.3


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        ({"mtp.0.head": {"kind": "classifier", "classes": 3}}, "mtp.0.head", "no logits over the vocabulary per token"),
        ({"mtp.1.head": "lm"}, "mtp.1.head", "is tied to the embedding"),
        ({"mtp.1.blocks": 0}, "mtp.1.blocks", "0"),
        ({"head": None}, "mtp", "logits over the vocabulary per token"),
        ({"layers.*.mixer.mask": "full"}, "mtp", "a causal model"),
    ],
)
def test_refuses(change: dict[str, Any], path: str, says: str) -> None:
    ((field, value),) = change.items()
    with pytest.raises(SpecError, match=says) as error:
        build(with_heads().set(field, value))
    assert error.value.path == path


def test_what_a_depth_reads_must_be_given() -> None:
    model = build(with_heads(f"medusa, {{block: {{{ATTENTION}}}}}"))
    hidden, ctx = model.hidden(TOKENS, ctx_of())
    model.draft(hidden, TOKENS[:, :0], ctx, 1)  # no tokens are read
    with pytest.raises(InputError, match="before: depth 2 reads the hidden states of depth 1"):
        model.draft(hidden, TOKENS, ctx, 2)


def test_a_sequence_split_over_ranks_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="medusa predicts later tokens") as error:
        check_split(with_heads())
    assert error.value.path == "mtp.0"


def test_no_family_of_hugging_face_has_a_place_for_it() -> None:
    with pytest.raises(SpecError, match="mtp"):
        to_hf(with_heads())


@pytest.mark.slow
def test_decoders_are_sampled_with_it() -> None:
    assert any(depth.kind == "medusa" for spec in quick_specs() for depth in spec.mtp)
    samples = [attempt(random.Random(seed), {"model/mtp": "medusa"}) for seed in range(10)]
    assert sum(spec is not None for spec in samples) >= 3
    assert {depth.kind for spec in samples if spec is not None for depth in spec.mtp} == {"medusa"}
