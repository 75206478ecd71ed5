"""Decoding by compiled graphs: against Hugging Face, against the bandwidth of memory, and in a large pool.

A Llama of 55 M parameters with random weights, 2 threads, 64 new tokens after a prompt of 128. Hugging Face's model has the
same weights, a static cache and a compiled forward. Both decode greedily, and their tokens in float32 are compared before
anything is timed. Sides alternate round by round, or step by step. A model of this size may lie in a CPU's cache, so its share
of the bandwidth of memory can be above 1.

    python benchmarks/decode.py [--rounds 9] [--json]
"""

from __future__ import annotations

import dataclasses as dc
import time
from collections.abc import Callable

import bare
import torch
from bare import Greedy
from measure import Goal, Row, arguments, middle, progress, report, seconds, taking_steps, taking_turns
from torch import Tensor

from dovetail import Pool
from dovetail.construction import build
from dovetail.decoding import Decoder
from dovetail.model import ModelModule
from dovetail.port.hf import export_tensors, to_hf

NOISE = 0.15
READ = 1 << 28  # float32 values that are read to measure the bandwidth: 1 GiB, more than a cache holds


@dc.dataclass(frozen=True)
class Shape(bare.Shape):
    """The model of bare.py, and the sizes of the work."""

    new: int = 64
    held: int = 128
    capacity: int = 4096


QUICK = Shape(width=24, layers=2, heads=6, kv_heads=2, hidden=44, vocab=62, prompt=8, new=4, held=8, capacity=64)


def ours(model: ModelModule, prompt: Tensor, capacity: int) -> Greedy:
    """Our model, compiled."""
    pool = Pool(model.part, len(prompt), capacity, dtype=next(model.parameters()).dtype)
    return Greedy(Decoder(model, pool, compiled=True), prompt)


def hugging_face(model: ModelModule, shape: Shape, prompt: Tensor) -> Callable[[], Tensor]:
    """transformers' generate with a static cache and a compiled forward: the new tokens (rows, new)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(to_hf(model.part, length=shape.prompt + shape.new + 1).config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    theirs = AutoModelForCausalLM.from_config(config).to(next(model.parameters()).dtype).eval()
    tensors = export_tensors(model.part, model.state_dict())
    theirs.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()})
    theirs.forward = torch.compile(theirs.forward, fullgraph=True)
    theirs.generation_config.eos_token_id = None
    settings = {"max_new_tokens": shape.new + 1, "do_sample": False, "cache_implementation": "static", "pad_token_id": 0}

    @torch.no_grad()
    def generated() -> Tensor:
        return theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[:, shape.prompt + 1 :]

    return generated


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


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=9, help="paired rounds of each figure")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(0)
    shape = QUICK if flags.quick else Shape()
    rows: list[Row] = []
    model = build(shape.spec())
    capacity = shape.prompt + shape.new + 8
    prompt = torch.randint(0, shape.vocab, (1, shape.prompt))
    fp32 = ours(model, prompt, capacity)
    rows.append(Row("seconds to compile, float32", fp32.compile_seconds))

    theirs, mine = hugging_face(model, shape, prompt), with_prefill(fp32, shape)
    begin = time.monotonic()
    want = theirs()
    rows.append(Row("seconds to compile, Hugging Face", time.monotonic() - begin))
    if not torch.equal(mine(), want):
        raise SystemExit("float32: the two sides decode other tokens; nothing was timed")
    name = "tokens/s, float32, batch 1: ours ÷ Hugging Face (static cache, compiled)"
    with progress(name, flags.rounds + 1) as tick:
        value, spread = middle(taking_turns(mine, theirs, flags.rounds, tick))
    rows.append(Row(name, value, Goal(low=1.15), spread, NOISE))

    large = ours(model, prompt[:, : shape.held], shape.capacity)
    small = ours(model, prompt[:, : shape.held], shape.held + shape.new + 8)
    name = f"step time with {shape.held} tokens held: a pool of {shape.capacity} ÷ one of {shape.held}"
    with progress(name, flags.rounds + 1) as tick:
        value, spread = middle(taking_steps(small.step, large.step, shape.new, flags.rounds, tick))
    rows.append(Row(name, value, Goal(high=1.2), spread, NOISE))

    narrow = ours(build(shape.spec()).to(torch.bfloat16), prompt, capacity)
    rows.append(Row("seconds to compile, bfloat16", narrow.compile_seconds))
    name = "tokens/s, batch 1: bfloat16 ÷ float32, both compiled"
    with progress(name, flags.rounds + 1) as tick:
        value, spread = middle(taking_steps(narrow.step, fp32.step, shape.new, flags.rounds, tick))
    rows.append(Row(name, value, None, spread, NOISE))

    fastest = bandwidth(flags.rounds)
    for what, side in (("float32", fp32), ("bfloat16", narrow)):
        size = sum(p.nbytes for name, p in side.decoder.model.named_parameters() if not name.startswith("embed"))
        each = [seconds(lambda: side.step(i)) for i in range(shape.new)]  # noqa: B023  called at once
        value, spread = middle([size / one / fastest for one in each])
        rows.append(Row(f"share of read bandwidth, {what}, batch 1", value, None, spread))
    report(rows, flags.json)


if __name__ == "__main__":
    main()
