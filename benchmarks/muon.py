"""Muon and µP, measured on Shakespeare's works (benchmarks/peers/make shakespeare).

Muon: a model of 10 M parameters is trained by AdamW for some tokens and by Muon for as many, with the same initial weights
and batches. The figure is the fraction of the tokens after which Muon reaches AdamW's last held-out loss, over three seeds,
with the interval of the seeds. The learning rate of each is the best of a grid on a shorter run.

µP: one spec at four widths is trained over a grid of learning rates, under the standard parametrization and under µP. The
figure is by how many steps of the grid (factors of 2) the best learning rate moves between the smallest and the largest width;
a parabola through the best point and its neighbors gives fractions of a step.

    python benchmarks/muon.py [--only muon|mup] [--json]
"""

from __future__ import annotations

import dataclasses as dc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from corpus import shakespeare
from measure import Goal, Row, Spread, arguments, report

from dovetail import Model, build, from_yaml
from dovetail.data.corpus import Corpus
from dovetail.text.learn import learn
from dovetail.training.loop import train
from dovetail.training.metrics import StepMetrics
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan
from dovetail.weights.surgery.resize import widened

STEPS_APART = math.log(2)  # of the grid of learning rates


@dc.dataclass(frozen=True)
class Sizes:
    """How much is trained."""

    width: int = 320
    layers: int = 7
    hidden: int = 896
    vocab: int = 2048
    batch: int = 8
    length: int = 128
    steps: int = 300
    search_steps: int = 60
    seeds: int = 3
    widths: tuple[int, ...] = (32, 64, 128, 256)
    mup_steps: int = 120
    exponents: tuple[int, ...] = (-12, -11, -10, -9, -8, -7, -6, -5)  # of 2: the learning rates of µP's grid

    def spec(self) -> Model:
        """A Llama of 10 M parameters."""
        return from_yaml(f"""
            dovetail: 1
            width: {self.width}
            vocab: {self.vocab}
            layers:
            - repeat: {self.layers}
              mixer: {{heads: {self.width // 32}, qk_norm: rmsnorm}}
              ffn: {{hidden: {self.hidden}}}
        """)

    def narrow(self, init: str) -> Model:
        """The spec that is widened."""
        width = self.widths[0]
        return from_yaml(f"""
            dovetail: 1
            width: {width}
            vocab: {self.vocab}
            layers:
            - repeat: 3
              mixer: {{heads: {width // 16}}}
              ffn: {{hidden: {3 * width}}}
            init: {init}
        """)


QUICK = Sizes(64, 1, 96, 300, 2, 16, 6, 3, 2, (32, 64), 3, (-9, -8, -7))


def note(text: str) -> None:
    """Print what is done, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def run(spec: Model, corpus: Corpus, sizes: Sizes, plan: Plan) -> list[StepMetrics]:
    """Train from the plan's seed, and return the metrics of all steps."""
    batches = partial(corpus.batch, plan.seed, batch=sizes.batch, length=sizes.length)
    validation = list(corpus.validation(sizes.batch, sizes.length, 4))
    return train(build(spec, seed=plan.seed), lambda step: batches(step), next_token, plan, validation)


def best_rate(loss: Callable[[float], float], first: float) -> float:
    """The learning rate, of factors of 2 around the first, with the lowest loss: a walk downhill."""
    known = {0: loss(first)}
    at = 0
    for _ in range(8):
        for side in (at - 1, at + 1):
            known.setdefault(side, loss(first * 2.0**side))
        best = min((at - 1, at, at + 1), key=lambda one: known[one])
        if best == at:
            break
        at = best
    return first * 2.0**at


def muon_rows(corpus: Corpus, sizes: Sizes) -> list[Row]:
    """Tokens of Muon ÷ tokens of AdamW to the same held-out loss."""
    spec = sizes.spec()

    def last(optimizer: str, rate: float) -> float:
        plan = Plan(steps=sizes.search_steps, optimizer=optimizer, learning_rate=rate, schedule="wsd", quiet=True, evals=1)  # pyright: ignore[reportArgumentType]
        try:
            found = run(spec, corpus, sizes, plan)[-1].val_loss or math.inf
        except Exception as error:  # a rate at which training diverges
            note(f"{optimizer} at {rate:g}: {error}")
            return math.inf
        note(f"{optimizer} at {rate:g}: {found:.4f}")
        return found

    rates = {name: best_rate(partial(last, name), 4e-3) for name in ("adamw", "muon")}
    ratios: list[float] = []
    for seed in range(1, sizes.seeds + 1):
        plans = {
            name: Plan(steps=sizes.steps, optimizer=name, learning_rate=rate, schedule="wsd", seed=seed, quiet=True, evals=40)  # pyright: ignore[reportArgumentType]
            for name, rate in rates.items()
        }
        histories = {name: run(spec, corpus, sizes, plan) for name, plan in plans.items()}
        target = histories["adamw"][-1].val_loss or math.nan
        ratios.append(crossing(histories["muon"], target) / histories["adamw"][-1].tokens)
        note(f"seed {seed}: AdamW {target:.4f}, Muon {histories['muon'][-1].val_loss:.4f}, ratio {ratios[-1]:.3f}")
    spread = Spread(max(ratios) - min(ratios), len(ratios))
    rows = [Row("Muon ÷ AdamW: tokens to AdamW's last held-out loss", statistics.mean(ratios), None, spread)]
    return rows + [Row(f"learning rate of {name}, best of a grid", rate) for name, rate in rates.items()]


def crossing(history: Sequence[StepMetrics], target: float) -> float:
    """The tokens after which the held-out loss is at most the target, between evals by a line; infinity where it never is."""
    evals = [(metrics.tokens, metrics.val_loss) for metrics in history if metrics.val_loss is not None]
    for (tokens, loss), (later, lower) in itertools.pairwise(evals):
        if lower <= target:
            return tokens + (later - tokens) * (loss - target) / (loss - lower) if loss > target else tokens
    return math.inf


def mup_rows(corpus: Corpus, sizes: Sizes) -> list[Row]:
    """By how many steps of the grid the best learning rate moves from the smallest to the largest width."""
    moves: dict[str, float] = {}
    for name, init in {"µP": f"{{kind: mup, base_width: {sizes.widths[0]}}}", "standard": "normal"}.items():
        best: list[float] = []
        for width in sizes.widths:
            losses: dict[int, float] = {}
            for exponent in sizes.exponents:
                plan = Plan(steps=sizes.mup_steps, learning_rate=2.0**exponent, schedule="cosine", quiet=True, evals=1)
                try:
                    losses[exponent] = run(widened(sizes.narrow(init), width), corpus, sizes, plan)[-1].val_loss or math.inf
                except Exception as error:  # a rate at which training diverges
                    note(f"{name}, width {width}, 2^{exponent}: {error}")
                    losses[exponent] = math.inf
            best.append(lowest(losses))
            note(f"{name}, width {width}: best 2^{best[-1]:.2f}  " + "  ".join(f"{e}:{x:.3f}" for e, x in losses.items()))
        moves[name] = max(best) - min(best)
    return [
        Row("µP: the best learning rate over four widths moves by (factors of 2)", moves["µP"], Goal(high=1.0)),
        Row("standard parametrization: likewise", moves["standard"], Goal(low=1.0)),
    ]


def lowest(losses: dict[int, float]) -> float:
    """The place of the minimum of a parabola through the lowest point and its neighbors."""
    at = min(losses, key=lambda one: losses[one])
    left, right = losses.get(at - 1, math.inf), losses.get(at + 1, math.inf)
    if not math.isfinite(left + right):
        return float(at)
    bend = left - 2 * losses[at] + right
    return at + (0.5 * (left - right) / bend if bend > 0 else 0.0)


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=("muon", "mup"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = QUICK if args.quick else Sizes()
    text = shakespeare()[: 40_000 if args.quick else None]
    tokenizer = learn(text, sizes.vocab, "byte_pair")
    corpus = Corpus.cut(tokenizer.encode(text), sizes.length)
    parts = {"muon": muon_rows, "mup": mup_rows}
    rows = [row for name, part in parts.items() if args.only in (None, name) for row in part(corpus, sizes)]
    report(rows, args.json)


if __name__ == "__main__":
    main()
