"""Four experiments that train small models from scratch; each returns plain data. `learn.py` runs, reports and plots them.

recall     selective copying and induction: content-based recall
lengths    trained on 64 tokens of text, evaluated on 256: length extrapolation of position encodings
reach      gradient norm against distance: recurrences and attention
wires      many layers and the full learning rate from the first step: pre-norm and post-norm
"""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from prose import python_text
from torch import Tensor

from dovetail.base.errors import Diverged
from dovetail.data.corpus import Batch, Corpus
from dovetail.data.tasks.task import read_synthetic_task
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.loss import LossSum
from dovetail.spec.part import KINDS
from dovetail.text.learn import learn
from dovetail.training.answers import Answers
from dovetail.training.loop import measure, train
from dovetail.training.objective import NextToken, Objective, next_token
from dovetail.training.plan import Plan

Tick = Callable[[], None]
VOCAB = 512  # of text
UNTIED = "head: {kind: lm, tied: false}"


@dc.dataclass(frozen=True)
class Size:
    """Seeds, steps and text of the experiments."""

    seeds: int = 5
    few: int = 3  # seeds where the effect is many times the spread
    characters: int = 1_200_000
    recall_steps: int = 2000
    length_steps: int = 1500
    reach_steps: int = 200
    wire_steps: int = 600
    depth: int = 12
    tried: int = 1024  # rows of an evaluation


QUICK = Size(seeds=2, few=2, characters=120_000, recall_steps=3, length_steps=3, reach_steps=2, wire_steps=6, depth=3, tried=16)


@cache
def corpus(characters: int, length: int) -> Corpus:
    """The help text of Python, as tokens."""
    text = python_text(most=characters)
    return Corpus.cut(learn(text, VOCAB).encode(text), length, fraction=0.1)


def learned(
    spec: Model,
    batches: Callable[[int], Batch],
    seed: int,
    steps: int,
    rate: float,
    objective: Objective = next_token,
    **plan: Any,
) -> ModelModule:
    """A model trained from scratch."""
    model = build(spec, seed=seed)
    train(
        model, batches, objective, Plan(steps=steps, learning_rate=rate, seed=seed, quiet=True, **{"warmup_steps": 40, **plan})
    )
    return model


# -- recall ----------------------------------------------------------------------------------------------------------------

TASKS = {"selective copying": read_synthetic_task("selective_copy"), "induction": read_synthetic_task("induction")}
MIXERS = {"attention": "{kind: attention, heads: 4}", "mamba": "mamba", "s4": "s4"}


def recall(size: Size, tick: Tick) -> dict[str, Any]:
    """The accuracy of each mixer on each task, for every seed; length 32, vocabulary 16."""
    shares: dict[str, dict[str, list[float]]] = {task: {mixer: [] for mixer in MIXERS} for task in TASKS}
    for name, task in TASKS.items():
        for mixer, text in MIXERS.items():
            spec = from_yaml(
                f"{{width: 32, vocab: 16, init: fan_in, layers: [{{repeat: 2, mixer: {text}, ffn: {{hidden: 64}}}}]}}"
            )
            for seed in range(size.seeds):
                batches = lambda step, seed=seed, task=task: task.batch(seed * 1_000_003 + step, 64, 32, 16)  # noqa: E731
                model = learned(spec, batches, seed, size.recall_steps, 6e-3, Answers(), weight_decay=0.01)
                held_out = task.batch(2**40 + seed, size.tried, 32, 16)
                shares[name][mixer].append(measure(model, [held_out], Answers())["accuracy"])
                tick()
    return {"steps": size.recall_steps, "shares": shares}


# -- lengths ---------------------------------------------------------------------------------------------------------------

SHORT, LONG = 64, 256
POSITIONS: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "learned": {"length": LONG},  # rows past the 64th are there, and never trained
    "none": {},
    "rope": {},
    "alibi": {},
}
AT_HOME, BEYOND = slice(SHORT * 3 // 4, SHORT), slice(LONG * 3 // 4, LONG)


def lengths(size: Size, tick: Tick) -> dict[str, Any]:
    """The loss at each of 256 positions for each position encoding and seed, after training on 64."""
    text = corpus(size.characters, LONG)
    # tokens as large as a sinusoid is, which would drown them otherwise
    layers = "[{repeat: 2, mixer: {heads: 4}, ffn: {hidden: 168}}]"
    plain = from_yaml(f"{{width: 64, vocab: {VOCAB}, embed: {{scale: 50.0}}, layers: {layers}}}")
    losses: dict[str, list[list[float]]] = {}
    for name, fields in POSITIONS.items():
        spec = plain.swap("position", KINDS[name](**fields))
        losses[name] = []
        for seed in range(size.seeds):
            batches = lambda step, seed=seed: text.batch(seed, step, 8, SHORT)  # noqa: E731
            model = learned(spec, batches, seed, size.length_steps, 4e-3)
            losses[name].append(by_place(model, list(text.validation(16, LONG, most=max(1, size.tried // 128)))))
            tick()
    return {"steps": size.length_steps, "trained_at": SHORT, "read_at": LONG, "losses": losses}


@torch.no_grad()
def by_place(model: ModelModule, batches: Sequence[Batch]) -> list[float]:
    """(n,) the mean loss at each position."""
    each = [
        F.cross_entropy(model(b.tokens, Ctx(layout=b.layout)).transpose(1, 2), b.labels, reduction="none") for b in batches
    ]  # (batch, n)
    return [round(loss, 5) for loss in torch.cat(each).mean(0).tolist()]


# -- reach -----------------------------------------------------------------------------------------------------------------

REACHING = {"rnn": "rnn", "lstm": "lstm", "attention": "{kind: attention, heads: 4}"}
SPAN = 96


def reach(size: Size, tick: Tick) -> dict[str, Any]:
    """The norm of ∂(loss of the last token)/∂(a token's embedding) against its distance, before and after training."""
    text = corpus(size.characters, SPAN)
    held = next(iter(text.validation(min(64, size.tried), SPAN)))
    norms: dict[str, dict[str, list[list[float]]]] = {}
    for name, mixer in REACHING.items():
        spec = from_yaml(
            f"{{width: 32, vocab: {VOCAB}, init: fan_in, layers: [{{mixer: {mixer}, ffn: {{hidden: 64}}}}], {UNTIED}}}"
        )
        norms[name] = {"fresh": [], "trained": []}
        for seed in range(size.few):
            batches = lambda step, seed=seed: text.batch(seed, step, 8, SPAN)  # noqa: E731
            norms[name]["fresh"].append(by_distance(build(spec, seed=seed), held))
            norms[name]["trained"].append(by_distance(learned(spec, batches, seed, size.reach_steps, 3e-3), held))
            tick()
    return {"steps": size.reach_steps, "length": SPAN, "norms": norms}


def by_distance(model: ModelModule, batch: Batch) -> list[float]:
    """(n,) the mean gradient norm at distance 0, 1, 2 …"""
    stream: list[Tensor] = []

    def listen(_: str, x: Tensor) -> Tensor:
        stream.append(x.detach().requires_grad_())
        return stream[0]

    logits = model(batch.tokens, Ctx(layout=batch.layout, taps=Listener({"embedded": listen})))
    loss = F.cross_entropy(logits[:, -1], batch.labels[:, -1], reduction="sum")
    (grad,) = torch.autograd.grad(loss, stream)
    return grad.double().norm(dim=-1).mean(0).flip(0).tolist()


# -- wires -----------------------------------------------------------------------------------------------------------------


def wires(size: Size, tick: Tick) -> dict[str, Any]:
    """The losses of deep models, pre-norm and post-norm, with and without warm-up, for every seed; null after divergence."""
    text = corpus(size.characters, SHORT)
    curves: dict[str, list[list[float | None]]] = {}
    for label, wire in (("pre", "pre_norm"), ("post", "post_norm")):
        layer = f"{{repeat: {size.depth}, norm: layernorm, wire: {wire}, mixer: {{heads: 4}}, ffn: {{kind: mlp, hidden: 128}}}}"
        spec = from_yaml(f"{{width: 32, vocab: {VOCAB}, norm: layernorm, init: fan_in, layers: [{layer}], {UNTIED}}}")
        for warmup in (0, size.wire_steps // 3):
            name = f"{label}, {f'{warmup} steps of' if warmup else 'no'} warm-up"
            curves[name] = [wired(spec, text, seed, size.wire_steps, warmup) for seed in range(size.few)]
            tick()
    return {"steps": size.wire_steps, "depth": size.depth, "alone": unigram(text), "curves": curves}


def wired(spec: Model, text: Corpus, seed: int, steps: int, warmup: int) -> list[float | None]:
    """The loss of each step, padded with None after divergence."""
    model, losses = build(spec, seed=seed), list[float]()

    class Recorded(NextToken):
        """Keeps the loss of each step."""

        def __call__(self, model: ModelModule, batch: Batch, seed: int, training: bool) -> LossSum:
            loss = super().__call__(model, batch, seed, training)
            losses.append(loss.mean().item())
            return loss

    plan = Plan(steps=steps, learning_rate=3e-3, warmup_steps=warmup, seed=seed, quiet=True, floor=1.0)
    try:
        train(model, lambda step: text.batch(seed, step, 8, SHORT // 2), Recorded(), plan)
    except Diverged:
        losses = [loss for loss in losses if math.isfinite(loss)]
    return [round(loss, 4) for loss in losses] + [None] * (steps - len(losses))


def unigram(text: Corpus) -> float:
    """The loss of a model of token frequencies only: the entropy of the unigram distribution."""
    counts = torch.bincount(text.train, minlength=VOCAB).double()
    probs = counts[counts > 0] / counts.sum()
    return -(probs * probs.log()).sum().item()
