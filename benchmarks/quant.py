"""Quantization of a model trained here: perplexity, bytes and speed of each format and method.

A small Llama is trained on text that ships with Python. Perplexities are ratios to that of the dense float32 model on the same
held-out sequences, with `spread` half the width of the 95 % interval of the ratio (paired differences per sequence). QAT
trains the model further with rounded weights; the row `dense, trained on` has as many further steps without rounding.
Bytes are those of the quantized matrices ÷ the theory of the format. Speed is that of decoding one sequence in bfloat16. The KV
cache is filled 16 tokens at a time, and each piece attends to the entries as they are stored.

    python benchmarks/quant.py --json
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from measure import Goal, Row, Spread, arguments, middle, progress, report, taking_turns
from prose import python_text
from torch import Tensor

import dovetail as dt
from dovetail.data.corpus import Batch, Corpus, read_corpus
from dovetail.decoding.generation import generate_tokens
from dovetail.nn.loss import IGNORED
from dovetail.ops.formats.format import Format
from dovetail.ops.formats.kinds import FP8, NF4, Int4, Int8
from dovetail.state.quantized import CacheFormat
from dovetail.training.loop import train
from dovetail.training.plan import Plan
from dovetail.training.task import text_objective
from dovetail.weights.quantization.method import apply
from dovetail.weights.quantization.qat import fake_quantize, finish
from dovetail.weights.quantization.recipe import quantized_leaves, select

LENGTH, BATCH, PIECE = 128, 8, 16
CACHES: tuple[CacheFormat, ...] = ("int8", "fp8", "int4")


def trained(place: Path, tokens: float, quick: bool) -> None:
    """Train a model as a user does."""
    sizes = ["--set=width=64", "--set=layers.*.ffn.hidden=128"] if quick else []
    command = [sys.executable, "-m", "dovetail.cli", "train", "llama-tiny", *sizes, f"--tokens={tokens:.0f}", "--sample=0"]
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [*command, "--text", str(place / "text.txt"), "-o", str(place / "model"), "--json"],
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])


@torch.no_grad()
def losses(model: dt.Transformer, batches: Sequence[Batch]) -> Tensor:
    """The loss of each held-out sequence, in nats per token."""
    return torch.cat([_per_row(model(batch.tokens).float(), batch.labels) for batch in batches])


def _per_row(logits: Tensor, labels: Tensor) -> Tensor:
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return flat.view(labels.shape).mean(-1)


@torch.no_grad()
def cached_losses(model: dt.Transformer, batches: Sequence[Batch], cache: CacheFormat | None) -> Tensor:
    """The same with a KV cache, PIECE tokens at a time."""
    found = []
    for batch in batches:
        rows = len(batch.tokens)
        pool = dt.Pool(model.spec, rows, LENGTH, cache=cache)
        logits = []
        for piece in batch.tokens.split(PIECE, 1):
            step = pool.step(range(rows), [piece.shape[1]] * rows)
            logits.append(model(piece, dt.Ctx(layout=step.layout, views=step.views)))
        found.append(_per_row(torch.cat(logits, 1).float(), batch.labels))
    return torch.cat(found)


def compared(name: str, loss: Tensor, base: Tensor, goal: Goal | None = None) -> Row:
    """Perplexity ÷ that of the base, with half the width of its 95 % interval."""
    gaps = (loss - base).tolist()
    mean, error = statistics.fmean(gaps), 1.96 * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return Row(name, math.exp(mean), goal, Spread((math.exp(mean + error) - math.exp(mean - error)) / 2, len(gaps)))


def byte_ratio(model: dt.Transformer) -> float:
    """Bytes of all quantized matrices ÷ theory."""
    leaves = [leaf for _, leaf in quantized_leaves(model)]
    real = sum(tensor.nbytes for leaf in leaves for tensor in leaf.stored().values())
    theory = sum(math.prod(leaf.shape) * leaf.format.bits_per_weight(leaf.in_features) / 8 for leaf in leaves)
    return real / float(theory)


def decoder(model: dt.Transformer, tokens: int) -> Callable[[], object]:
    prompt = torch.arange(16) % model.spec.vocab
    return lambda: list(generate_tokens(model, prompt, tokens))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--train", type=float, default=1e6, help="tokens to train on")
    parser.add_argument("--steps", type=int, default=200, help="further steps, with rounded weights and without")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    budget, steps, rounds, new = (2e3, 4, 1, 4) if args.quick else (args.train, args.steps, 7, 48)
    group = 32 if args.quick else 64
    four = Int4(group=group)
    wanted: list[tuple[str, Format, str]] = [("int8 by rtn", Int8(), "rtn"), ("fp8 by rtn", FP8(), "rtn")]
    wanted += [("nf4 by rtn", NF4(group=group, double=True), "rtn")]
    wanted += [(f"int4 by {method}", four, method) for method in ("rtn", "gptq", "awq")]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, progress("quantization", 4 + len(wanted) + 2 * (rounds + 1)) as tick:
        place = Path(name)
        (place / "text.txt").write_text(python_text(most=100_000 if args.quick else 2_000_000), encoding="utf-8")
        trained(place, budget, args.quick)
        tick()
        dense = dt.load(place / "model")
        assert dense.tokenizer is not None
        corpus = Corpus.cut(dense.tokenizer.encode(read_corpus(place / "text.txt")), LENGTH)
        batches = list(corpus.validation(BATCH, LENGTH, 2 if args.quick else 32))
        calibration = [corpus.batch(1, step, BATCH, LENGTH).tokens for step in range(2 if args.quick else 16)]
        base = losses(dense, batches)
        rows.append(Row("perplexity of dense float32", math.exp(float(base.mean()))))
        found: dict[str, Tensor] = {}
        models: dict[str, dt.Transformer] = {}
        for title, format, method in wanted:
            model = dt.load(place / "model")
            apply(model, select(model.spec, format), method, calibration)
            found[title], models[title] = losses(model, batches), model
            rows.append(compared(f"perplexity of {title} ÷ dense", found[title], base))
            rows.append(Row(f"bytes of {title} ÷ theory", byte_ratio(model), Goal(0.99, 1.01)))
            tick()
        objective = text_objective(dense.spec, dense.tokenizer, LENGTH)
        plan = Plan(steps=steps, learning_rate=5e-4, quiet=True, evals=1)
        further: dict[str, Tensor] = {}
        for title, rounded in (("dense, trained on", False), ("int4 by qat", True)):
            model = dt.load(place / "model")
            if rounded:
                fake_quantize(model, select(model.spec, four))
            train(model, lambda step: corpus.batch(2, step, BATCH, LENGTH), objective, plan, batches[:1])
            model.eval()
            if rounded:
                finish(model)
            further[title] = losses(model, batches)
            rows.append(compared(f"perplexity of {title} ÷ dense", further[title], base))
            tick()
        best = Goal(high=1.0)
        rows.append(compared("int4: gptq ÷ rtn", found["int4 by gptq"], found["int4 by rtn"], best))
        rows.append(compared("int4: awq ÷ rtn", found["int4 by awq"], found["int4 by rtn"], best))
        rows.append(compared("int4: qat ÷ gptq", further["int4 by qat"], found["int4 by gptq"], best))
        rows.append(compared("int4: qat ÷ dense, trained on", further["int4 by qat"], further["dense, trained on"]))
        exact = cached_losses(dense, batches, None)
        for cache in CACHES:
            goal = None if cache == "int4" else Goal(high=1.005)
            rows.append(
                compared(f"perplexity with a KV cache in {cache} ÷ float32", cached_losses(dense, batches, cache), exact, goal)
            )
        tick()
        narrow = dt.load(place / "model", dtype="bfloat16")
        for title in ("int8 by rtn", "int4 by rtn"):
            small = models[title].to(torch.bfloat16)
            ratios = taking_turns(decoder(small, new), decoder(narrow, new), rounds, tick)
            value, spread = middle(ratios)
            rows.append(Row(f"tokens/s of {title} ÷ dense bfloat16", value, spread=spread))
    report(rows, args.json)


if __name__ == "__main__":
    main()
