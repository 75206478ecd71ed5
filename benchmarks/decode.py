"""Decoding by compiled graphs: against Hugging Face and llama.cpp, against the bandwidth of memory, and in a large pool.

Llamas of 55 M and 1 B parameters with random weights, 2 threads, 64 new tokens after a prompt of 128. Hugging Face's model has
the same weights, a static cache and a compiled forward; llama.cpp runs beside, in an environment of its own. All decode
greedily, and in float32 their tokens are compared before anything is timed. Sides alternate round by round, or step by step.
The smaller model may lie in a CPU's cache, so that its share of the bandwidth of memory can be above 1.

    python benchmarks/decode.py [--rounds 9] [--small] [--json]
"""

from __future__ import annotations

import argparse
import dataclasses as dc
import sys
import time
from collections.abc import Callable, Iterator

import bare
import torch
from bare import Greedy
from measure import Goal, Row, arguments, middle, progress, report, seconds, taking_steps, taking_turns
from peer import PEERS_RUN, LlamaCpp, against_process, hugging_face, ready
from torch import Tensor

from dovetail import Pool
from dovetail.decoding.steps import Decoder
from dovetail.model.construction import build
from dovetail.model.model import ModelModule

READ = 1 << 28  # float32 values that are read to measure the bandwidth: 1 GiB, more than a cache holds


@dc.dataclass(frozen=True)
class Shape(bare.Shape):
    """The model of bare.py, and the sizes of the work."""

    new: int = 64
    held: int = 128
    capacity: int = 4096


QUICK = Shape(width=24, layers=2, heads=6, kv_heads=2, hidden=44, vocab=62, prompt=8, new=4, held=8, capacity=64)
LARGE = Shape(width=2048, layers=16, heads=32, kv_heads=8, hidden=5632, new=16)


def ours(model: ModelModule, prompt: Tensor, capacity: int) -> Greedy:
    """Our model, compiled."""
    pool = Pool(model.part, len(prompt), capacity, dtype=next(model.parameters()).dtype)
    return Greedy(Decoder(model, pool, compiled=True), prompt)


def with_prefill(side: Greedy, shape: Shape) -> Callable[[], Tensor]:
    """The same work as generate's: the prompt, then the tokens."""

    def generated() -> Tensor:
        for row in side.rows:
            side.decoder.pool.free(row)
        side.prefill()
        return torch.cat([side.step(i) for i in range(shape.new)], 1)

    return generated


def bandwidth(rounds: int) -> float:
    """Bytes per second of a matrix–vector product over 1 GiB."""
    matrix, vector = torch.ones(READ >> 14, 1 << 14), torch.ones(1 << 14)
    times = [seconds(lambda: torch.mv(matrix, vector)) for _ in range(rounds + 1)][1:]
    return READ * 4 / middle(times)[0]


def against_llama_cpp(side: Greedy, model: ModelModule, shape: Shape, flags: argparse.Namespace, what: str, goal: float) -> Row:
    """Tokens/s of ours ÷ llama.cpp's in bfloat16, the two alternating round by round."""
    name = f"tokens/s, bfloat16, {what}, batch {len(side.prompt)}: ours ÷ llama.cpp"
    peer = LlamaCpp(model, side.prompt, shape.new, "bf16", flags.threads)
    with progress(name, flags.rounds + 1) as tick:
        mine, theirs = (lambda: [side.step(i) for i in range(shape.new)]), (lambda: peer.decode(shape.new)[1])
        value, spread = middle(against_process(mine, theirs, flags.rounds, tick))
    peer.close()
    return Row(name, value, Goal(low=goal), spread)


def check_tokens(side: Greedy, model: ModelModule, shape: Shape, threads: int) -> None:
    """Stop unless llama.cpp decodes the same tokens in float32."""
    peer = LlamaCpp(model, side.prompt, shape.new, "f32", threads)
    theirs, _ = peer.decode(shape.new)
    peer.close()
    if not torch.equal(torch.cat([side.step(i) for i in range(shape.new)], 1), theirs):
        raise SystemExit("float32: llama.cpp decodes other tokens; nothing was timed")


def against_hugging_face(side: Greedy, model: ModelModule, shape: Shape, rounds: int, what: str, goal: float) -> list[Row]:
    """Tokens/s of ours ÷ that of transformers' generate, and the seconds its compilation takes. In float32 tokens are equal."""
    theirs, mine = hugging_face(model, side.prompt, shape.new + 1), with_prefill(side, shape)
    begin = time.monotonic()
    want = theirs()[:, 1:]
    compiling = Row(f"seconds to compile, {what}, Hugging Face", time.monotonic() - begin)
    if next(model.parameters()).dtype == torch.float32 and not torch.equal(mine(), want):
        raise SystemExit("float32: the two sides decode other tokens; nothing was timed")
    name = f"tokens/s, {what}, batch 1: ours ÷ Hugging Face (static cache, compiled)"
    with progress(name, rounds + 1) as tick:
        value, spread = middle(taking_turns(mine, theirs, rounds, tick))
    return [compiling, Row(name, value, Goal(low=goal), spread)]


def share_of_bandwidth(side: Greedy, shape: Shape, fastest: float, what: str) -> Row:
    """The bytes of all weights that a step reads, by its time, ÷ the bandwidth of memory."""
    size = sum(p.nbytes for name, p in side.decoder.model.named_parameters() if not name.startswith("embed"))
    each = [seconds(lambda: side.step(i)) for i in range(shape.new)]  # noqa: B023  called at once
    value, spread = middle([size / one / fastest for one in each])
    return Row(f"share of read bandwidth, {what}, batch 1", value, None, spread)


def of_55m(shape: Shape, flags: argparse.Namespace, peer: bool) -> Iterator[Row]:
    """The rows of the small model."""
    model, capacity = build(shape.spec()), shape.prompt + shape.new + 8
    prompts = torch.randint(0, shape.vocab, (8, shape.prompt))
    fp32 = ours(model, prompts[:1], capacity)
    yield Row("seconds to compile, float32", fp32.compile_seconds)
    if peer:
        check_tokens(fp32, model, shape, flags.threads)
    yield from against_hugging_face(fp32, model, shape, flags.rounds, "float32", 1.15)

    large = ours(model, prompts[:1, : shape.held], shape.capacity)
    small = ours(model, prompts[:1, : shape.held], shape.held + shape.new + 8)
    name = f"step time with {shape.held} tokens held: a pool of {shape.capacity} ÷ one of {shape.held}"
    with progress(name, flags.rounds + 1) as tick:
        value, spread = middle(taking_steps(small.step, large.step, shape.new, flags.rounds, tick))
    yield Row(name, value, Goal(high=1.2), spread)

    narrow_model = build(shape.spec()).to(torch.bfloat16)
    narrow = ours(narrow_model, prompts[:1], capacity)
    yield Row("seconds to compile, bfloat16", narrow.compile_seconds)
    name = "tokens/s, batch 1: bfloat16 ÷ float32, both compiled"
    with progress(name, flags.rounds + 1) as tick:
        value, spread = middle(taking_steps(narrow.step, fp32.step, shape.new, flags.rounds, tick))
    yield Row(name, value, None, spread)
    fastest = bandwidth(flags.rounds)
    yield share_of_bandwidth(fp32, shape, fastest, "float32")
    yield share_of_bandwidth(narrow, shape, fastest, "bfloat16")
    if peer:
        yield against_llama_cpp(narrow, narrow_model, shape, flags, "55 M", 1.2)
        yield against_llama_cpp(ours(narrow_model, prompts, capacity), narrow_model, shape, flags, "55 M", 2.0)


def of_1b(flags: argparse.Namespace, peer: bool) -> Iterator[Row]:
    """The rows of a model that no cache holds."""
    shape = QUICK if flags.quick else LARGE
    model = build(shape.spec(), dtype=torch.bfloat16)
    side = ours(model, torch.randint(0, shape.vocab, (1, shape.prompt)), shape.prompt + shape.new + 8)
    yield Row("seconds to compile, 1 B, bfloat16", side.compile_seconds)
    yield share_of_bandwidth(side, shape, bandwidth(flags.rounds), "1 B, bfloat16")
    if peer:
        yield against_llama_cpp(side, model, shape, flags, "1 B", 1.0)
    yield from against_hugging_face(side, model, shape, min(flags.rounds, 5), "1 B, bfloat16", 1.0)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=9, help="paired rounds of each figure")
    parser.add_argument("--small", action="store_true", help="leave out the model of 1 B parameters")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(0)
    peer = ready("llama.cpp")
    if not peer:
        print("llama.cpp is left out; to compare with it: benchmarks/peers/make llama.cpp", file=sys.stderr)
    rows = list(of_55m(QUICK if flags.quick else Shape(), flags, peer))
    if not flags.small:
        torch.compiler.reset()
        rows += of_1b(flags, peer)
    report(rows, flags.json, peers=PEERS_RUN)


if __name__ == "__main__":
    main()
