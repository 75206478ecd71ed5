"""Streaming (StreamingLLM): does a window with `keep` hold memory and perplexity constant over a long stream?

    python benchmarks/stream.py [--json] [--figure stream.png] [--text plays.txt]

A small language model trains with full attention on windows of 64 tokens, each after one fixed first token, until some head
has an attention sink there. Then 100,000 tokens go through a KV cache of 64: `keep` and window, positions in the cache. The
last 10,000 tokens repeat the first 10,000, so that both ends have the same difficulty. The baselines have the same weights:
without `keep`, with `keep` but positions in the sequence, and full attention over each window of 64.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measure import Goal, Row, agree, arguments, progress, report
from memory import Alive
from prose import python_text
from torch import Tensor

from dovetail.data.corpus import Batch, read_corpus
from dovetail.files.spec import from_yaml
from dovetail.look.tracer import trace
from dovetail.model.construction import build
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.state.pool import Pool
from dovetail.text.learn import learn
from dovetail.text.tokenizer import END
from dovetail.training.loop import train
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan
from dovetail.views.figure import BLUE, GREY, INK, ORANGE, new_figure, quiet, write_figure

SPEC = """
width: 64
vocab: 512
layers: [{repeat: 4, mixer: {heads: 8, head: 16, bias: true}, ffn: {hidden: 168}}]
"""
LENGTH = 64  # tokens of a window in training, the first one included; and of the cache
KEEP = 4
SINK = 0.3  # attention of a head on the first token, at least, to call it a sink
ROUNDS = 4  # of training, until a head has a sink
BIN = 2500  # tokens per point of the figure


class Size(NamedTuple):
    """The sizes of a run."""

    characters: int
    steps: int  # per round of training
    stream: int  # tokens
    ends: int  # tokens at either end that are compared
    chunk: int  # tokens per call


FULL = Size(characters=2_000_000, steps=3000, stream=100_000, ends=10_000, chunk=32)
QUICK = Size(characters=120_000, steps=4, stream=2_000, ends=500, chunk=32)


class Tokens(NamedTuple):
    """The tokens of training and of the stream."""

    first: int  # the fixed first token
    learned: Tensor
    stream: Tensor  # begins with the first token


def tokens_of(text: str, size: Size) -> Tokens:
    """Split the text: its end, which is not trained on, becomes the stream, followed by the beginning of the stream."""
    tokenizer = learn(text, from_yaml(SPEC).vocab)
    ids, first = tokenizer.encode(text), tokenizer.id_of(END)
    once = size.stream - size.ends
    if len(ids) < 2 * once:
        raise SystemExit(f"{len(ids)} tokens of text are too few: {2 * once} are needed")
    held_out = ids[-once:]
    return Tokens(first, ids[:-once], torch.cat([torch.tensor([first]), held_out, held_out[: size.ends]]))


def windows(tokens: Tokens, step: int, rows: int = 8) -> Batch:
    """A batch of random windows, each after the first token."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(tokens.learned) - LENGTH, (rows, 1), generator=generator)
    ids = tokens.learned[starts + torch.arange(LENGTH)]
    return Batch(torch.cat([torch.full((rows, 1), tokens.first), ids[:, :-1]], 1), ids, TokenLayout.whole(rows, LENGTH))


def attention_on_first(model: ModelModule, tokens: Tokens) -> Tensor:
    """(layers, heads) the mean attention on the first token, over queries past a quarter of the window."""
    rows = tokens.stream[1 : 1 + 16 * (LENGTH - 1)].view(16, LENGTH - 1)
    patterns = trace(model, torch.cat([torch.full((16, 1), tokens.first), rows], 1), "*.mixer.pattern")
    return torch.stack([pattern[:, :, LENGTH // 4 :, 0].mean((0, 2)) for pattern in patterns.values()])


def trained(tokens: Tokens, size: Size) -> tuple[ModelModule, Tensor]:
    """Train in rounds until a head has a sink; return the model and the attention of each head on the first token."""
    model = build(from_yaml(SPEC))
    share = torch.zeros(0)
    for i in range(ROUNDS):
        plan = Plan(steps=size.steps, learning_rate=6e-3, warmup_steps=40)
        train(model, lambda step, i=i: windows(tokens, i * size.steps + step), next_token, plan)
        share = attention_on_first(model, tokens)
        log(f"round {i + 1}: the largest attention of a head on the first token is {share.max():.2f}")
        if share.max() >= SINK:
            break
    return model, share


def windowed(model: ModelModule, keep: int, position: str) -> ModelModule:
    """The same weights with a window that fills the same cache."""
    mask = ["causal", {"kind": "window", "size": LENGTH - keep, "keep": keep}]
    spec: Model = model.part.set("layers.*.mixer.mask", mask).set("layers.*.mixer.position", position)
    changed = build(spec)
    changed.load_state_dict(model.state_dict())
    return changed


class Streamed(NamedTuple):
    """The losses and memory of a stream."""

    losses: Tensor  # (tokens,) nats
    cache: float  # bytes of the cache at the end ÷ at the beginning
    alive: float  # peak bytes of a step at the end ÷ when the cache is full for the first time

    def perplexity(self, part: slice) -> float:
        """The perplexity of some of the tokens."""
        return math.exp(self.losses[part].mean().item())


@torch.no_grad()
def streamed(model: ModelModule, stream: Tensor, chunk: int, tick: Callable[[], None] = lambda: None) -> Streamed:
    """Compute the loss of every token, with one cache for all calls."""
    pool = Pool(model.part, rows=1, capacity=LENGTH, layout="ring", slack=chunk)
    before, losses = pool.bytes(), torch.empty(len(stream) - 1)
    starts = range(0, len(losses), chunk)
    full = 2 * -(-LENGTH // chunk) + 1  # calls after which the cache, slack and all, is full
    peaks: list[int] = []
    for i, start in enumerate(starts):
        some = stream[start : start + chunk + 1]

        def call(some: Tensor = some, start: int = start) -> None:
            step = pool.step([0], [len(some) - 1])
            logits = model(some[None, :-1], Ctx(layout=step.layout, views=step.views))[0]
            losses[start : start + len(some) - 1] = F.cross_entropy(logits, some[1:], reduction="none")

        if i in (full, len(starts) - 2):
            with Alive(losses, *pool_tensors(pool), *model.parameters(), *model.buffers()) as alive:
                call()
            peaks.append(alive.peak)
        else:
            call()
        tick()
    return Streamed(losses, pool.bytes() / before, peaks[-1] / peaks[0])


def pool_tensors(pool: Pool) -> list[Tensor]:
    """Every store of the cache."""
    return [tensor for group in pool.groups.values() for tensor in group.tensors()]


@torch.no_grad()
def recomputed(model: ModelModule, tokens: Tokens, ends: int) -> float:
    """Perplexity of the first tokens of the stream with full attention over every window of 64, of which the second half
    counts: a bound on what a cache of this length can reach."""
    half = LENGTH // 2
    text = tokens.stream[1 : ends + 1]
    rows = text.unfold(0, LENGTH, half)
    inputs = torch.cat([torch.full((len(rows), 1), tokens.first), rows[:, :-1]], 1)
    losses = [
        F.cross_entropy(
            model(some, Ctx(layout=TokenLayout.whole(len(some), LENGTH)))[:, half:].flatten(0, 1), want[:, half:].flatten()
        )
        * len(some)
        for some, want in zip(inputs.split(64), rows.split(64), strict=True)
    ]
    return math.exp(sum(losses).item() / len(rows))  # type: ignore[union-attr]


def rows_of(model: ModelModule, share: Tensor, ways: dict[str, Streamed], whole: float, size: Size) -> list[Row]:
    """The figures."""
    first, last = slice(0, size.ends), slice(-size.ends, None)
    kept, dropped, drifting = ways.values()
    end = kept.perplexity(last)
    thousand = f"{size.ends / 1000:g}k"
    return [
        Row("largest share of a head's attention on the first token", share.max().item(), Goal(low=SINK)),
        Row(f"heads of {share.numel()} with at least {SINK} on it", float((share >= SINK).sum())),
        Row(f"window + keep: perplexity of the first {thousand}", kept.perplexity(first)),
        Row(f"window + keep: perplexity, last {thousand} ÷ first", end / kept.perplexity(first), Goal(0.95, 1.05)),
        Row("window + keep ÷ full attention on each window anew", kept.perplexity(first) / whole),
        Row(f"without keep ÷ with keep: perplexity, last {thousand}", dropped.perplexity(last) / end, Goal(low=1.5)),
        Row(f"positions of the text ÷ of the cache: perplexity, last {thousand}", drifting.perplexity(last) / end),
        Row("bytes of the cache, end ÷ beginning", kept.cache, Goal(1.0, 1.0)),
        Row("most bytes alive in a step, end ÷ once the cache is full", kept.alive, Goal(high=1.0)),
    ]


def draw(ways: dict[str, Streamed], path: str, size: Size) -> None:
    """Plot the perplexity along the stream."""
    figure = new_figure(7.6, 4.6)
    axes = figure.add_subplot()
    size_of_bin = min(BIN, size.ends)
    for (name, way), color in zip(ways.items(), (BLUE, ORANGE, GREY), strict=True):
        bins = [part.mean().exp().item() for part in way.losses.split(size_of_bin)]
        middles = [(i + 0.5) * size_of_bin / 1000 for i in range(len(bins))]
        axes.plot(middles, bins, color=color, label=name, linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, size.stream / 1000)
    axes.set_xlabel("thousand tokens of the stream", color=INK)
    axes.set_ylabel("perplexity", color=INK)
    axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.6)
    axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(-0.01, 1.0))
    quiet(axes)
    title = f"A cache of {LENGTH} tokens on a stream of {size.stream:,}; the last tenth of the text is its first"
    figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
    write_figure(figure, path)


def log(text: str) -> None:
    print(text, file=sys.stderr)


def parse() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--text", help="a UTF-8 text to train on and to stream; by default the documentation of Python")
    parser.add_argument("--figure", help="write a figure of the perplexity along the stream")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    size = QUICK if args.quick else FULL
    log("reading the text and training a tokenizer on it")
    tokens = tokens_of(read_corpus(args.text) if args.text else python_text(most=size.characters), size)
    log(f"{len(tokens.learned):,} tokens to learn from, {len(tokens.stream) - 1:,} to stream")
    model, share = trained(tokens, size)
    cached = windowed(model, KEEP, "streaming")
    some = tokens.stream[: 5 * LENGTH]
    agree("chunks and single tokens", streamed(cached, some, size.chunk).losses, streamed(cached, some, 1).losses, 1e-4)
    variants = {
        f"keep {KEEP} and a window of {LENGTH - KEEP}, positions counted in the cache": cached,
        f"a window of {LENGTH}, nothing kept": windowed(model, 0, "streaming"),
        f"keep {KEEP} and a window of {LENGTH - KEEP}, positions counted in the text": windowed(model, KEEP, "rope"),
    }
    with progress("streaming", len(variants) * -(-size.stream // size.chunk)) as tick:
        ways = {name: streamed(way, tokens.stream, size.chunk, tick) for name, way in variants.items()}
    if args.figure:
        draw(ways, args.figure, size)
    report(rows_of(model, share, ways, recomputed(model, tokens, size.ends), size), args.json)


if __name__ == "__main__":
    main()
