"""Distillation: a small student learns from the probabilities of a teacher, not only from the tokens.

    alone       loss = −log p_student(next token)                               one token says which continuation came
    distilled   loss = T² · KL(p_teacher^(1/T) ‖ p_student^(1/T))               all probabilities say which could have come

The language is made: the next token follows a table of probabilities indexed by the last two tokens, so that the entropy of
the language is known and the loss of a model splits into the entropy and what the model does not know (its excess). The
student sees few sequences, many times over: tokens alone it learns by heart; the probabilities of the teacher, which has
seen more of the language, tell it more per sequence (Hinton et al. 2015). Both students have the same sequences, size, steps
and initial weights.

    python recipes/distill.py [--seeds 3] [--quick] [--out distill]
    python recipes/distill.py --quick --fault shuffled           probabilities of another position: the student learns less
"""

from __future__ import annotations

import dataclasses as dc
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

import dovetail as dt


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    vocab: int = 12
    length: int = 32
    teacher: int = 64  # width, with two layers
    student: int = 24  # width, with one layer
    teacher_steps: int = 500  # each on new sequences
    student_steps: int = 400
    sequences: int = 128  # of the student
    batch: int = 32
    lr: float = 0.01
    temperature: float = 2.0


QUICK = Setup(vocab=8, length=24, teacher=48, teacher_steps=200, student_steps=150, sequences=64)
Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold


@dc.dataclass(frozen=True)
class Language:
    """probs (vocab, vocab, vocab): of the next token, after the last two."""

    probs: Tensor

    def rows(self, count: int, length: int, draw: torch.Generator) -> Tensor:
        """Sequences (count, length)."""
        vocab = len(self.probs)
        ids = torch.randint(vocab, (count, length), generator=draw)
        for i in range(2, length):
            ids[:, i] = torch.multinomial(self.probs[ids[:, i - 2], ids[:, i - 1]], 1, generator=draw)[:, 0]
        return ids

    def excess(self, logits: Tensor, ids: Tensor) -> float:
        """KL(language ‖ model) in nats per token, from the second token on: the loss minus the entropy."""
        truth = self.probs[ids[:, :-1], ids[:, 1:]]
        return float(kl_div(logits[:, 1:].log_softmax(-1), truth, reduction="sum") / truth[..., 0].numel())


def language(setup: Setup, seed: int) -> Language:
    """A random table: after most pairs a few tokens are probable."""
    torch.manual_seed(seed)
    alpha = torch.full((setup.vocab,), 0.3)
    return Language(torch.distributions.Dirichlet(alpha).sample((setup.vocab, setup.vocab)).clamp_min(1e-6))


def model(setup: Setup, width: int, layers: int, seed: int) -> dt.Transformer:
    """A causal transformer."""
    text = f"{{width: {width}, vocab: {setup.vocab}, layers: [{{repeat: {layers}, mixer: {{heads: 4}}}}]}}"
    return dt.build(dt.from_yaml(text), seed=seed)


def train(setup: Setup, net: dt.Transformer, steps: int, batches, loss, evaluate, name: str) -> list[tuple[int, float]]:
    """Train on `batches(step)`; (step, excess on held-out sequences)."""
    optimizer = torch.optim.AdamW(net.parameters(), setup.lr, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setup.lr, total_steps=steps + 1, pct_start=0.1)
    curve: list[tuple[int, float]] = []
    for step in range(steps + 1):
        if step % (steps // 10) == 0:
            with torch.no_grad():
                curve.append((step, evaluate(net)))
            end = "\n" if step == steps else "\r"
            print(f"  {name}: step {step}, excess {curve[-1][1]:.3f} nats", end=end, file=sys.stderr, flush=True)
        loss(net, batches(step)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return curve


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, Any]:
    """Train the teacher and both students of a seed; the figures with their goals, and the curves."""
    made, draw = language(setup, seed), torch.Generator().manual_seed(seed)
    test = made.rows(200, setup.length, draw)
    few = made.rows(setup.sequences, setup.length, draw)

    def evaluate(net: dt.Transformer) -> float:
        return made.excess(net(test), test)

    def tokens(net: dt.Transformer, ids: Tensor) -> Tensor:
        return net.loss(ids)

    def probabilities(net: dt.Transformer, ids: Tensor) -> Tensor:
        t = setup.temperature
        with torch.no_grad():
            target = (teacher(ids) / t).softmax(-1)
        if fault == "shuffled":
            target = target[:, torch.randperm(target.shape[1], generator=draw)]
        return t**2 * cross_entropy((net(ids) / t).flatten(0, 1), target.flatten(0, 1))

    def sample(step: int) -> Tensor:
        return few[torch.randint(len(few), (setup.batch,), generator=draw)]

    teacher = model(setup, setup.teacher, 2, seed)
    new = lambda step: made.rows(setup.batch, setup.length, draw)  # noqa: E731
    curves = {"teacher": train(setup, teacher, setup.teacher_steps, new, tokens, evaluate, "teacher")}
    sizes = {"teacher": teacher}
    for name, loss in (("alone", tokens), ("distilled", probabilities)):
        sizes[name] = model(setup, setup.student, 1, seed)
        curves[name] = train(setup, sizes[name], setup.student_steps, sample, loss, evaluate, f"student, {name}")
    best = min(value for _, value in curves["alone"])  # with early stopping on the very test: the strongest rival
    end = {name: curve[-1][1] for name, curve in curves.items()}
    count = {name: sum(w.numel() for w in net.parameters()) for name, net in sizes.items()}
    figures: Figures = {
        "entropy of the language, nats per token": (entropy(made, test), None, None),
        "excess of the teacher": (end["teacher"], None, 0.2),
        "parameters, student ÷ teacher": (count["alone"] / count["teacher"], None, 0.25),
        "excess of the student alone, lowest": (best, None, None),
        "excess of the student alone, last step": (end["alone"], None, None),
        "excess of the distilled student": (end["distilled"], None, None),
        "excess, distilled ÷ lowest alone": (end["distilled"] / best, None, 0.6),
    }
    return figures, curves


def entropy(made: Language, ids: Tensor) -> float:
    """Nats per token of the language, after the pairs of these sequences."""
    probs = made.probs[ids[:, :-1], ids[:, 1:]]
    return float(torch.special.entr(probs).sum(-1).mean())


def draw(figure: Any, runs: list[Any]) -> None:
    """The excess of the teacher and of both students by step, of every seed."""
    axes = figure.subplots()
    for name, color in (("teacher", "#8a90a0"), ("alone", "#d9822b"), ("distilled", "#2f5fb3")):
        for run in runs:
            label = (name if name == "teacher" else f"student, {name}") if run is runs[0] else None
            axes.plot(*zip(*run[name], strict=True), color=color, label=label, lw=1.3)
    axes.set(xlabel="step", ylabel="loss above the entropy, nats per token", yscale="log", title="held-out sequences")
    axes.legend(frameon=False)


RECIPE = dt.Recipe(
    experiment, draw, full=Setup(), quick=QUICK, faults={"shuffled": "excess, distilled ÷ lowest alone"}, size=(6, 4)
)

if __name__ == "__main__":
    sys.exit(RECIPE.main())
