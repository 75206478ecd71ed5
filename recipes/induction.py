"""Induction heads: how two layers of attention learn, all at once, to continue a sequence that repeats.

    … A B … A → B        layer 0: each token reads the one before it, so B knows that it came after A      (previous-token head)
                         layer 1: the second A looks for the token that came after A, and copies it        (induction head)

Each row is a random sequence without repeats that repeats with a random period, so that no fixed distance leads to the answer:
the model has to find the earlier occurrence. One layer cannot. The heads are found by two scores, the mean attention from a
token to the one before it and to the one after its earlier occurrence (Olsson et al. 2022); they are confirmed by ablation, by
patching, and by a one-layer model trained in the same way. Every result has a goal that can fail.

    python recipes/induction.py [--seeds 3] [--quick] [--out induction]       minutes on two cores; seconds with --quick
    python recipes/induction.py --quick --fault shuffled                      trained without repeats: the goals fail
"""

from __future__ import annotations

import dataclasses as dc
import sys

import torch
from torch import Tensor

import dovetail as dt


@dc.dataclass(frozen=True)
class Setup:
    """The sizes of the experiment."""

    vocab: int = 24
    width: int = 32
    heads: int = 4
    shortest: int = 4  # period
    longest: int = 10
    length: int = 24
    steps: int = 600  # at most: training ends soon after the model has learned it
    batch: int = 64
    lr: float = 0.01


QUICK = Setup(heads=2, steps=300)
HEADS = "layers.*.mixer.z[head]"


@dc.dataclass(frozen=True)
class Rows:
    """Token ids (rows, n); the next token where it can be known, else −100; the period of each row, and a token that it has
    not (rows, 1)."""

    ids: Tensor
    targets: Tensor
    periods: Tensor
    unused: Tensor


def rows(setup: Setup, count: int, draw: torch.Generator, shuffled: bool = False) -> Rows:
    """Random sequences that repeat; `shuffled`: the fault, in which the later half is other random tokens."""
    periods = torch.randint(setup.shortest, setup.longest + 1, (count, 1), generator=draw)
    sequence = torch.rand(count, setup.vocab, generator=draw).argsort(-1)
    place = torch.arange(setup.length)
    ids = sequence.gather(1, place % periods)
    if shuffled:
        other = torch.randint(setup.vocab, ids.shape, generator=draw)
        ids = torch.where(place < periods, ids, other)
    targets = torch.where(place >= periods, ids.roll(-1, 1), -100)
    targets[:, -1] = -100
    return Rows(ids, targets, periods, sequence.gather(1, periods))


def accuracy(logits: Tensor, data: Rows) -> float:
    """The fraction of knowable next tokens that the logits predict."""
    known = data.targets != -100
    return float((logits.argmax(-1) == data.targets)[known].float().mean())


def train(
    setup: Setup, layers: int, seed: int, test: Rows, steps: int, shuffled: bool
) -> tuple[dt.Transformer, list[tuple[int, float]]]:
    """A trained model of attention layers only, and its (step, accuracy on the test rows)."""
    spec = dt.from_yaml(
        f"{{width: {setup.width}, vocab: {setup.vocab}, init: {{kind: normal, spread: 0.15}}, head: {{kind: lm, tied: false}},"
        f" layers: [{{repeat: {layers}, mixer: {{heads: {setup.heads}}}, ffn: null}}]}}"
    )
    model, draw, curve = dt.build(spec, seed=seed), torch.Generator().manual_seed(seed), list[tuple[int, float]]()
    optimizer = torch.optim.AdamW(model.parameters(), setup.lr, betas=(0.9, 0.99), weight_decay=0.01)
    for step in range(steps + 1):
        if step % 10 == 0:
            with torch.no_grad():
                curve.append((step, accuracy(model(test.ids), test)))
            told = f"  {layers} layers, seed {seed}, step {step}: accuracy {curve[-1][1]:.3f}"
            print(told, end="\n" if step % 100 == 0 else "\r", file=sys.stderr, flush=True)
            if min(value for _, value in curve[-5:]) >= 0.99:
                break
        batch = rows(setup, setup.batch, draw, shuffled)
        model.loss(batch.ids, batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, curve


def scores(model: dt.Transformer, data: Rows) -> tuple[Tensor, Tensor]:
    """(layers, heads) the previous-token score and the induction score of each head."""
    run = dt.look.trace(model, data.ids, "layers.*.mixer.pattern")
    pattern = torch.stack(list(run.values()))  # (layers, rows, heads, queries, keys)
    query = torch.arange(data.ids.shape[1])
    after = (query - data.periods + 1).clamp_min(0)  # (rows, queries): the token after the earlier occurrence
    to_after = pattern.gather(-1, after[None, :, None, :, None].expand(*pattern.shape[:-1], 1)).squeeze(-1)
    known = query >= data.periods
    previous = pattern.diagonal(-1, -2, -1).mean((1, -1))
    return previous, (to_after * known[:, None]).sum((1, -1)) / known.sum()


def log_prob(data: Rows):
    """A metric of sweeps: per row, the mean log-probability of the knowable next tokens."""

    def metric(logits: Tensor) -> Tensor:
        targets = data.targets.repeat(len(logits) // len(data.targets), 1)  # a sweep has one copy of the rows per intervention
        known = targets != -100
        picked = logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        return (picked * known).sum(-1) / known.sum(-1)

    return metric


def last_only(data: Rows) -> Rows:
    """The same rows with the last token as the only query: its answer followed its occurrence one period earlier."""
    targets = torch.full_like(data.targets, -100)
    answer = data.ids.gather(1, data.ids.shape[1] - data.periods)
    targets[:, -1:] = answer
    return dc.replace(data, targets=targets)


def without(model: dt.Transformer, data: Rows, layer: int, heads: list[int]) -> float:
    """The accuracy with these heads of a layer ablated together."""
    patch = {f"layers.{layer}.mixer.z[head={head}]": 0.0 for head in heads}
    return accuracy(dt.look.trace(model, data.ids, "head.logits", patch=patch)["head.logits"], data)


Figures = dict[str, tuple[float, float | None, float | None]]  # name -> value, lowest and highest that hold


def experiment(setup: Setup, seed: int, fault: str | None) -> tuple[Figures, dict]:
    """Train both models of a seed and look inside; the figures with their goals, and what the picture shows."""
    test, shuffled = rows(setup, 128, torch.Generator().manual_seed(10**6 + seed)), fault == "shuffled"
    model, curve = train(setup, 2, seed, test, setup.steps, shuffled)
    _, flat = train(setup, 1, seed, test, curve[-1][0], shuffled)  # as many steps
    change = next((step for step, value in curve if value >= 0.5), -1)
    previous, induction = scores(model, test)
    heads = range(setup.heads)
    best = int(induction[1].argmax())
    finders = [head for head in heads if induction[1, head] >= 0.25] or [best]
    lookers = [head for head in heads if previous[0, head] >= 0.25] or [int(previous[0].argmax())]
    others = [head for head in heads if head not in finders]

    query = last_only(test)
    earlier = (test.ids == test.ids[:, -1:]) & (torch.arange(setup.length) < setup.length - 1)
    corrupt = torch.where(earlier, test.unused, test.ids)  # the last token has not occurred before
    _, effects = dt.look.sweep(model, test.ids, corrupt, HEADS, log_prob(query)).table()  # (layers, heads)
    _, drops = dt.look.ablate(model, test.ids, HEADS, log_prob(test)).table()
    figures: Figures = {
        "accuracy, two layers": (curve[-1][1], 0.95, None),
        "accuracy, one layer": (flat[-1][1], None, 0.6),
        "step of the phase change (accuracy 0.5)": (change, 1, setup.steps),
        "largest previous-token score, layer 0": (float(previous[0].max()), 0.4, None),
        "largest induction score, layer 1": (float(induction[1].max()), 0.4, None),
        "largest induction score, layer 0": (float(induction[0].max()), None, 0.25),
        f"accuracy without the induction heads (layer 1: {listed(finders)})": (without(model, test, 1, finders), None, 0.5),
        f"accuracy without the others (layer 1: {listed(others)})": (without(model, test, 1, others), 0.6, None),
        f"accuracy without the previous-token heads (layer 0: {listed(lookers)})": (
            without(model, test, 0, lookers),
            None,
            0.5,
        ),
        "patching: largest effect of an induction head": (float(effects[1, finders].max()), 0.3, None),
        "patching: largest effect of a previous-token head": (float(effects[0, lookers].max()), 0.3, None),
        "largest change of log p by one ablated head": (float(-drops.min()), None, None),
    }
    address = f"layers.1.mixer.pattern[head={best}]"
    pattern = dt.look.trace(model, test.ids[:1], address)[address][0]
    shown = {"seed": seed, "curve": curve, "one layer": flat, "previous": previous, "induction": induction}
    return figures, {**shown, "pattern": pattern, "head": best}


def listed(heads: list[int]) -> str:
    """The numbers of heads."""
    return "head " + ", ".join(map(str, heads)) if heads else "none"


def draw(figure, runs: list[dict]) -> None:
    """Draw the runs: accuracy by step, both scores of each head, and the pattern of the best induction head of the first."""
    curves, heads, pattern = figure.subplots(1, 3)
    for run in runs:
        for name, color in (("curve", "#2f5fb3"), ("one layer", "#8a90a0")):
            label = {"curve": "two layers", "one layer": "one layer"}[name] if run is runs[0] else None
            curves.plot(*zip(*run[name], strict=True), color=color, label=label, lw=1.2)
        for layer, (marker, color) in enumerate((("o", "#d9822b"), ("s", "#2f5fb3"))):
            label = f"heads of layer {layer}" if run is runs[0] else None
            heads.scatter(run["previous"][layer], run["induction"][layer], color=color, marker=marker, label=label)
    curves.set(xlabel="step", ylabel="accuracy", title="the next token of a repeated sequence")
    heads.set(xlabel="previous-token score", ylabel="induction score", title="two kinds of heads", xlim=(0, 1), ylim=(0, 1))
    pattern.imshow(runs[0]["pattern"], cmap="Blues", vmin=0, vmax=1)
    pattern.set(xlabel="key", ylabel="query", title=f"pattern of head 1.{runs[0]['head']}, seed {runs[0]['seed']}")
    for axes in (curves, heads):
        axes.legend(frameon=False)


RECIPE = dt.Recipe(experiment, draw, full=Setup(), quick=QUICK, faults={"shuffled": "accuracy, two layers"})

if __name__ == "__main__":
    sys.exit(RECIPE.main())
