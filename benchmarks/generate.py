"""Generation: tokens/s of `generate_batch` by compiled graphs ÷ others' on a Llama of 55 M parameters, prompt included.

huggingface   transformers' generate with a static cache and a compiled forward
litgpt        its generate with a compiled step, in a process of its own (benchmarks/peers/make litgpt)
bare          the same model by hand (benchmarks/bare.py): caches allocated once, the step compiled with the same settings
llama.cpp     in a process of its own (benchmarks/peers/make llama.cpp); its tokens/s as measured, without a goal

Float32 and bfloat16, 1 and 8 rows, random weights, a prompt of 64 tokens and 64 new ones per row, greedy, 2 threads. All sides
have the same weights. In float32 a side that gives other tokens is not timed: two logits of random weights may differ by less
than rounding. Ours and theirs alternate round by round, with the bare loop token by token. The seconds of the first call, which
compiles, are rows of their own.

    python benchmarks/generate.py [--rounds 5] [--only huggingface litgpt bare llama.cpp] [--dtypes f32] [--batches 1] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses as dc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from importlib.metadata import version

import bare
import torch
from bare import BareGreedy, with_weights_of
from measure import Goal, Row, arguments, middle, progress, report, taking_steps, taking_turns
from peer import PEERS_RUN, Litgpt, Llama, LlamaCpp, against_process, hugging_face, require
from torch import Tensor

from dovetail import Pool
from dovetail.decoding.generation import generate_batch
from dovetail.decoding.steps import Decoder
from dovetail.model.construction import build
from dovetail.model.model import ModelModule

DTYPES, BATCHES = {"f32": torch.float32, "bf16": torch.bfloat16}, (1, 8)
DISTINCT = 3  # tokens, at least: models that repeat one token agree whatever they compute
QUICK = dc.replace(bare.QUICK, prompt=8, new=6)
SHAPE = bare.Shape(prompt=64, new=64)


class OtherTokens(Exception):
    """A side has other tokens; its time would be that of another function."""


class Ours:
    """`generate_batch`, compiled."""

    def __init__(self, model: ModelModule, prompt: Tensor, new: int) -> None:
        pool = Pool(model.part, len(prompt), prompt.shape[1] + new, dtype=model.dtype)
        self.decoder, self.prompt, self.new = Decoder(model, pool, compiled=True), prompt, new

    def step(self, i: int) -> list[int | None]:
        """The i-th token of each row; 0 begins again with the prompt."""
        if i == 0:
            self.tokens = generate_batch(self.decoder, self.prompt, self.new)
        return next(self.tokens)

    def __call__(self) -> Tensor:
        """All tokens (rows, new)."""
        return torch.tensor([self.step(i) for i in range(self.new)]).t()


class ByHand(BareGreedy):
    """The loop by hand; its first token is that of the prompt."""

    def step(self, i: int) -> Tensor:
        return super().step(i - 1) if i else self.prefill()


@dc.dataclass
class Case:
    """One dtype and number of rows."""

    shape: bare.Shape
    dtype: str
    model: ModelModule
    prompt: Tensor
    threads: int
    rounds: int

    def __post_init__(self) -> None:
        self.name = f"{self.dtype}, batch {len(self.prompt)}"
        begin = time.monotonic()
        self.ours = Ours(self.model, self.prompt, self.shape.new)
        self.tokens = self.ours()
        self.rows = [Row(f"seconds of the first call, {self.name}: ours", time.monotonic() - begin)]

    def check(self, side: str, tokens: Tensor, goal: bool = True) -> None:
        """Count the tokens that a side has in common with ours in float32; raise OtherTokens unless all are."""
        if DTYPES[self.dtype] != torch.float32:
            return
        differ = (self.tokens != tokens).any(0).nonzero()
        same, new = int(differ[0]) if len(differ) else self.shape.new, self.shape.new
        self.rows.append(Row(f"of {new} tokens, {self.name}: those before the first that {side} has not", same,
                             Goal(low=new) if goal else None))  # fmt: skip
        if same < new:
            raise OtherTokens
        if len(self.tokens.unique()) < DISTINCT:
            raise SystemExit(f"{self.name}: fewer than {DISTINCT} tokens differ, so that equal ones show nothing")

    def row(self, side: str, goal: float | None, ratios: Callable[[Callable[[], None]], list[float]]) -> Row:
        """Tokens/s of ours ÷ theirs: the ratio of times, since both generate the same number of tokens."""
        name = f"tokens/s, {self.name}: ours ÷ {side}"
        with progress(name, self.rounds + 1) as tick:
            value, spread = middle(ratios(tick))
        return Row(name, value, None if goal is None else Goal(low=goal), spread)


def huggingface(case: Case) -> Iterator[Row]:
    theirs, begin = hugging_face(case.model, case.prompt, case.shape.new), time.monotonic()
    case.check("Hugging Face", theirs())
    yield Row(f"seconds of the first call, {case.name}: Hugging Face", time.monotonic() - begin)
    name = f"Hugging Face {version('transformers')} (static cache, compiled)"
    yield case.row(name, 1.3, lambda tick: taking_turns(case.ours, theirs, case.rounds, tick))


def by_hand(case: Case) -> Iterator[Row]:
    shape, capacity = case.shape, case.shape.prompt + case.shape.new
    theirs = ByHand(with_weights_of(case.model, shape), shape, case.prompt, capacity, compiled=True)
    case.check("the loop by hand", torch.cat([theirs.step(i) for i in range(shape.new)], 1))
    work = case.ours.step, theirs.step, shape.new, case.rounds
    yield case.row("bare loop (compiled)", 0.97, lambda tick: taking_steps(*work, tick))


def litgpt(case: Case) -> Iterator[Row]:
    yield of_process(case, Litgpt, "litgpt {} (compiled)", 1.1)


def llama_cpp(case: Case) -> Iterator[Row]:
    yield of_process(case, LlamaCpp, "llama.cpp (llama-cpp-python {})", None)


def of_process(case: Case, kind: type[Litgpt] | type[LlamaCpp], title: str, goal: float | None) -> Row:
    """Ours against a peer in a process of its own."""
    new = case.shape.new
    peer: Llama = kind(case.model, case.prompt, new, case.dtype, case.threads)
    with closing(peer):
        case.check(peer.name, peer.generate(new)[0], goal is not None)
        work = case.ours, lambda: peer.generate(new)[1], case.rounds
        return case.row(title.format(peer.version), goal, lambda tick: against_process(*work, tick))


SIDES = {"huggingface": huggingface, "litgpt": litgpt, "bare": by_hand, "llama.cpp": llama_cpp}
PROCESSES = ("litgpt", "llama.cpp")


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds of each figure")
    parser.add_argument("--only", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=BATCHES)
    flags: argparse.Namespace = parser.parse_args()
    for name in set(PROCESSES) & set(flags.only):  # before minutes of compilation
        require(name)
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1" and not flags.quick:
        raise SystemExit("TORCHDYNAMO_DISABLE is set, so that no side would be compiled; unset it")
    torch.set_num_threads(flags.threads)
    shape, rows = QUICK if flags.quick else SHAPE, list[Row]()
    prompts = torch.randint(0, shape.vocab, (max(BATCHES), shape.prompt), generator=torch.Generator().manual_seed(0))
    for dtype, batch in ((dtype, batch) for dtype in flags.dtypes for batch in flags.batches):
        model = build(shape.spec(), seed=0).to(DTYPES[dtype]).eval()
        case = Case(shape, dtype, model, prompts[:batch], flags.threads, flags.rounds)
        for side in flags.only:
            with suppress(OtherTokens):
                case.rows.extend(SIDES[side](case))
        rows += case.rows
        torch.compiler.reset()  # torch keeps few graphs of one function
    report(rows, flags.json, peers=PEERS_RUN)


if __name__ == "__main__":
    main()
