"""Adapters: memory of a LoRA step ÷ full, its time ÷ peft's, and 8 adapters in one batch ÷ one.

memory   live bytes at the peak of a training step: weights, gradients, AdamW's moments and activations, LoRA ÷ all weights,
         and QLoRA (NF4; embedding and head stay in float32) ÷ LoRA. At 55 M parameters with few tokens, where weights are most
         of it, and with many, where activations are; at 1 B with blocks computed again in the backward pass, as it is used
time     seconds of a step with LoRA on all linear layers ÷ those of peft on the same Llama, in a process of its own
         (benchmarks/peers/make tuning): loss, backward, clipping, fused AdamW, eager on both sides
many     a forward pass of 8 rows with 8 adapters ÷ with one (weights/adapters/multi_lora.py)

Both sides have a rank of 16, rows full of tokens and float32.

    python benchmarks/tune.py [--rounds 7] [--only memory time many] [--json]
"""

from __future__ import annotations

import dataclasses as dc
import json
import subprocess
from pathlib import Path
from typing import Any

import torch
from bare import QUICK as SMALLEST, Shape
from decode import LARGE
from measure import Goal, Row, arguments, middle, progress, report, taking_turns
from memory import Alive

from dovetail.api.quantize import quantize
from dovetail.data.corpus import Batch
from dovetail.model.construction import build
from dovetail.model.transformer import Transformer
from dovetail.nn.layout import TokenLayout
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan, Recompute
from dovetail.training.step import Trainer
from dovetail.weights.adapters.attach import attach
from dovetail.weights.adapters.lora import Lora
from dovetail.weights.adapters.multi_lora import Bank
from dovetail.weights.adapters.storage import adapter_tensors

PEERS, ENVIRONMENTS = Path(__file__).parent / "peers", Path(__file__).parents[1] / ".peers"
RATE, RANK, MANY, STEPS = 1e-3, 16, 8, 2
FEW = 32  # tokens
SIDES = ("memory", "time", "many")
QUICK_SHAPE = dc.replace(SMALLEST, width=192, hidden=320)  # whole groups of NF4


class Ours:
    """The trainer of `dovetail train`, on all weights or on an adapter, perhaps of a base in four bits."""

    def __init__(
        self, shape: Shape, rows: int, tokens: int, adapted: bool, quantized: bool = False, recompute: Recompute = "none"
    ) -> None:
        self.model: Transformer = build(shape.spec())
        if quantized:
            quantize(self.model, format="nf4", speed=False)
        if adapted:
            attach(self.model, Lora(rank=RANK))
        plan = Plan(steps=10**6, schedule="constant", learning_rate=RATE, recompute=recompute)
        self.trainer, self.at = Trainer(self.model.train(), next_token, plan), 0
        ids = torch.randint(0, shape.vocab, (rows, tokens + 1), generator=torch.Generator().manual_seed(0))
        self.batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), TokenLayout.whole(rows, tokens))

    def turn(self) -> None:
        """Train a few steps."""
        for _ in range(STEPS):
            self.at += 1
            self.trainer.step(self.batch, self.at, RATE)

    def peak(self) -> int:
        """The bytes of the weights, and the largest number of live bytes beside them."""
        weights = [*self.model.parameters(), *self.model.buffers()]
        with Alive(*weights) as alive:
            self.turn()
        return sum(weight.nbytes for weight in weights) + alive.peak


class Peft:
    """LoRA of peft in its own process and environment (benchmarks/peers/tune_worker.py)."""

    def __init__(self, shape: Shape, rows: int, tokens: int, threads: int) -> None:
        python = ENVIRONMENTS / "tuning/bin/python"
        if not python.is_file():
            raise SystemExit("peft: its environment is missing; run benchmarks/peers/make tuning")
        sizes = {**dc.asdict(shape), "rows": rows, "tokens": tokens, "rank": RANK, "rate": RATE, "threads": threads}
        command = [str(python), str(PEERS / "tune_worker.py"), json.dumps(sizes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.settings: dict[str, Any] = json.loads(self._answer())

    def turn(self) -> None:
        """Train a few steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{STEPS}\n")
        self.process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"peft ended with exit code {self.process.wait()}")
        return line

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def memory(shape: Shape, tokens: int, name: str, recompute: Recompute = "none") -> list[Row]:
    """LoRA ÷ full and QLoRA ÷ LoRA, one model after another."""
    full = Ours(shape, 1, tokens, False, recompute=recompute).peak()
    lora, qlora = (Ours(shape, 1, tokens, True, few, recompute).peak() for few in (False, True))
    return [
        Row(f"memory of a LoRA step ÷ full, {name}", lora / full, Goal(high=0.35)),
        Row(f"memory of a QLoRA step ÷ LoRA, {name}", qlora / lora, Goal(high=0.5)),
    ]


def many_adapters(shape: Shape, tokens: int, rounds: int) -> Row:
    """A batch of 8 rows, each with its own adapter, against one adapter for all."""
    one, several = build(shape.spec()), build(shape.spec())
    kind = attach(one, Lora(rank=RANK)).kind
    assert isinstance(kind, Lora)
    bank, names = Bank(several), [str(seed) for seed in range(MANY)]
    for name in names:
        made = build(shape.spec())
        attach(made, kind, seed=int(name))
        bank.load(name, kind, adapter_tensors(made))
    ids = torch.randint(0, shape.vocab, (MANY, tokens), generator=torch.Generator().manual_seed(0))

    def batch() -> None:
        with bank.rows(names):
            several(ids)

    with torch.no_grad(), progress("many adapters", rounds + 1) as tick:
        value, spread = middle(taking_turns(lambda: one(ids), batch, rounds, tick))
    return Row(f"{MANY} adapters in a batch ÷ one adapter, time", value, Goal(high=1.25), spread)


def main() -> None:
    """Take the figures and print them."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    shape, (rows, tokens) = (QUICK_SHAPE, (2, 16)) if given.quick else (Shape(), (2, 256))
    found, peers = list[Row](), dict[str, Any]()
    if "memory" in given.only:
        found += memory(shape, FEW, f"{FEW} tokens")
        found += memory(shape, rows * tokens, f"{rows * tokens} tokens")
        large = shape if given.quick else LARGE
        found += memory(large, rows * tokens, f"1 B, {rows * tokens} tokens, recomputed blocks", "blocks")
    if "time" in given.only:
        ours, peft = Ours(shape, rows, tokens, True), Peft(shape, rows, tokens, given.threads)
        with progress("peft", given.rounds + 1) as tick:
            value, spread = middle(taking_turns(peft.turn, ours.turn, given.rounds, tick))
        peft.close()
        peers["peft"] = peft.settings
        found.append(Row("LoRA step ÷ peft's, time", value, Goal(high=0.9), spread))
    if "many" in given.only:
        found.append(many_adapters(shape, tokens, given.rounds))
    report(found, given.json, peers=peers)


if __name__ == "__main__":
    main()
