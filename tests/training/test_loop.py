import dataclasses as dc
import math

import pytest
import torch

from dovetail.base.errors import Diverged
from dovetail.data.corpus import Batch, Corpus
from dovetail.decoding.generation import generate_tokens
from dovetail.model.construction import build
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.spec.fold import declared
from dovetail.text.learn import learn
from dovetail.training.loop import evaluate, train
from dovetail.training.objective import NextToken, next_token
from dovetail.training.optim import Optimizer
from dovetail.training.plan import Plan
from dovetail.views.progress import TrainingProgress

RHYME = "How much wood would a woodchuck chuck, if a woodchuck could chuck wood?\n"


def draws(seed: int = 0):
    """Batches in which every token is the last one plus three, so that the next can be known."""

    def batch(step: int) -> Batch:
        first = torch.randint(0, 62, (5, 1), generator=torch.Generator().manual_seed(seed * 1000 + step))
        rows = (first + 3 * torch.arange(10)) % 62
        return Batch(rows[:, :-1], rows[:, 1:], TokenLayout.whole(5, 9))

    return batch


def bits(model):
    return {name: weight.detach().clone().view(torch.int32) for name, weight in model.named_parameters()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_tiny_model_learns_a_rhyme_and_generates_it(tiny):
    tokenizer = learn(RHYME, 270)
    spec = tiny.replace("vocab", 270)
    corpus = Corpus.cut(tokenizer.encode(RHYME * 30), 24)
    model = build(spec)
    plan = Plan(steps=120, learning_rate=1e-2, warmup_steps=10, quiet=True)
    history = train(model, lambda step: corpus.batch(0, step, 8, 24), next_token, plan, list(corpus.validation(8, 24)))
    assert history[0].loss > 0.9 * math.log(270)  # it knows nothing
    assert history[-1].val_loss is not None
    assert history[-1].val_loss < 0.3
    start = "How much wood would"
    said = tokenizer.decode(list(generate_tokens(model, tokenizer.encode(start), len(tokenizer.encode(RHYME)))))
    assert (start + said).startswith(RHYME)


def test_two_runs_of_a_seed_are_equal_bit_for_bit(tiny):
    spec = tiny.replace("layers.*.wire.dropout", 0.2)
    runs = []
    for seed in (3, 3, 4):
        model = build(spec, seed=1)
        history = train(model, draws(), next_token, Plan(steps=6, seed=seed, quiet=True))
        runs.append(([metrics.loss for metrics in history], bits(model)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]  # another seed drops other values
    assert not same(runs[0][1], runs[2][1])


def test_a_run_ends_by_steps_or_by_minutes(tiny):
    assert [metrics.step for metrics in train(build(tiny), draws(), next_token, Plan(steps=4, minutes=5, quiet=True))] == [
        1,
        2,
        3,
        4,
    ]
    history = train(build(tiny), draws(), next_token, Plan(steps=10**9, minutes=0.01, quiet=True))
    assert 0.3 <= history[-1].seconds < 5.0
    assert 1 < len(history) < 10**4


def test_a_loss_that_is_not_finite_changes_no_weight(tiny):
    model = build(tiny)
    with torch.no_grad():
        tensor_at(model, "layers.1.ffn.down.weight")[3, 5] = torch.inf
    before = bits(model)
    with pytest.raises(Diverged, match="step 1: the loss is nan"):
        train(model, draws(), next_token, Plan(steps=3, quiet=True))
    assert same(before, bits(model))


def test_a_gradient_that_is_not_finite_changes_no_weight(tiny):
    class Cliff(NextToken):
        def __call__(self, model, batch, seed, training):
            loss = next_token(model, batch, seed, training)
            return loss._replace(sum=loss.sum + (tensor_at(model, "norm.scale").sum() * 0).sqrt())  # 0, with an infinite slope

    model = build(tiny)
    before = bits(model)
    with pytest.raises(Diverged, match="gradient norm nan"):
        train(model, draws(), Cliff(), Plan(steps=3, quiet=True))
    assert same(before, bits(model))


def test_weights_that_overflow_are_not_returned(tiny):
    with pytest.raises(Diverged, match=r"step 1: the update overflowed; embed\.table holds (nan|inf)"):
        train(build(tiny), draws(), next_token, Plan(steps=1, learning_rate=1e300, quiet=True))


def test_a_held_out_loss_that_is_not_finite_is_divergence(tiny):
    class Overflows(NextToken):
        def __call__(self, model, batch, seed, training):
            loss = next_token(model, batch, seed, training)
            return loss._replace(sum=loss.sum * (1.0 if training else torch.inf))

    with pytest.raises(Diverged, match="step 2: the held-out loss is inf; lower"):
        train(build(tiny), draws(), Overflows(), Plan(steps=4, evals=2, quiet=True), [draws(9)(0)])


def test_the_size_of_a_step_follows_the_learning_rate(tiny):
    """AdamW's first step moves every weight that has a gradient by the rate itself."""
    model = build(tiny)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    history = train(model, draws(), next_token, Plan(steps=1, learning_rate=1e-2, warmup_steps=5, weight_decay=0.0, quiet=True))
    moved = max((weight - before[name]).abs().max().item() for name, weight in model.named_parameters())
    assert history[0].lr == pytest.approx(2e-3)
    assert moved == pytest.approx(2e-3, rel=1e-3)


def test_every_step_has_its_own_mask_and_evaluation_drops_nothing(tiny):
    model, seeds = build(tiny.replace("dropout", 0.3)), []

    class Noted(NextToken):
        def __call__(self, model, batch, seed, training):
            seeds.append(seed)
            return next_token(model, batch, seed, training)

    train(model, draws(), Noted(), Plan(steps=5, seed=2, quiet=True))
    assert len(set(seeds)) == 5
    held = [draws(9)(0)]
    assert evaluate(model, held, next_token, seed=1) == evaluate(model, held, next_token, seed=2)


def test_held_out_batches_are_averaged_by_label(tiny):
    model, tokens = build(tiny), torch.arange(18).reshape(2, 9) % 7
    long, short = (Batch(tokens, tokens.roll(-1, 1), TokenLayout.padded(lengths, 9)) for lengths in ([9, 9], [2, 1]))
    losses = [next_token(model, batch, 0, False) for batch in (long, short)]
    assert [int(loss.num_labels) for loss in losses] == [18, 3]
    by_label = sum(loss.sum.item() for loss in losses) / 21
    assert evaluate(model, [long, short], next_token) == pytest.approx(by_label, rel=1e-6)
    assert by_label != pytest.approx(sum(loss.mean().item() for loss in losses) / 2, rel=1e-5)


def test_held_out_batches_keep_no_masks_alive(tiny):
    layout = TokenLayout.padded([9, 4], 9)
    batch = Batch(torch.ones(2, 9).long(), torch.ones(2, 9).long(), layout)
    evaluate(build(tiny), [batch], next_token)
    assert not layout.memo


def test_every_learned_weight_is_in_one_group_and_norms_do_not_decay(tiny):
    spec = tiny.replace("layers.*.mixer.bias", True)
    model = build(spec)
    decays = {
        id(w): group["weight_decay"]
        for group in Optimizer(model, weight_decay=0.3).parts[0].param_groups
        for w in group["params"]
    }
    learned = [d for d in declared(spec) if d.weight.learned]
    assert len(decays) == len(learned) == len(list(model.parameters()))
    for d in learned:
        still = d.path.endswith((".bias", "norm.scale"))
        assert decays[id(tensor_at(model, d.path))] == (0.0 if still else 0.3), d.path


def test_the_gradient_is_clipped(tiny):
    for clip, expected in ((0.01, 0.01), (1e6, None)):
        model = build(tiny)
        train(model, draws(), next_token, Plan(steps=1, clip=clip, quiet=True))
        length = torch.stack([w.grad.norm() for w in model.parameters() if w.grad is not None]).norm().item()
        assert length == pytest.approx(expected, rel=1e-3) if expected else length > 0.1


def test_evals_are_spread_over_a_run(tiny):
    held = [draws(seed=9)(step) for step in range(2)]
    model = build(tiny)
    history = train(model, draws(), next_token, Plan(steps=12, evals=4, quiet=True), held)
    assert [metrics.step for metrics in history if metrics.val_loss is not None] == [3, 6, 9, 12]
    assert evaluate(model, held, next_token) == history[-1].val_loss


def test_a_point_is_plain_data(tiny):
    history = train(build(tiny), draws(), next_token, Plan(steps=2, quiet=True))
    assert all(type(value) in (int, float, type(None)) for metrics in history for value in dc.asdict(metrics).values())
    assert [metrics.tokens for metrics in history] == [45, 90]


def test_progress_goes_to_stderr(tiny, capsys):
    with TrainingProgress() as show:
        train(build(tiny), draws(), next_token, Plan(steps=4, evals=2), [draws(7)(0)], show=show)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "step      2  loss" in shown.err
    assert "tokens/s" in shown.err
