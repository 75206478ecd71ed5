"""Training: tokens/s of `dovetail train`'s step ÷ others' on a Llama of 60 M parameters, and the memory of the loss.

bare      the same model by hand (benchmarks/bare.py): forward, loss, backward, clipping, fused AdamW. Losses are compared first
trainer   transformers' Trainer, in a process of its own (benchmarks/peers/make trainer)
litgpt    the step of its pretraining, in a process of its own (benchmarks/peers/make litgpt)

Like for like: one dtype, compiled on both sides, fused AdamW; beside it what the peer does by default: Trainer is eager, litgpt
compiles and does not fuse AdamW on a CPU. Rows are full of tokens. The sides take turns of a few steps. The dtype is the one in
which this machine multiplies faster. Memory: live bytes of tensors in the loss and its gradients, ours in chunks of tokens,
against one matrix of logits, at a vocabulary of 128 k.

    python benchmarks/train.py [--rounds 7] [--only bare trainer litgpt memory] [--json]
"""

from __future__ import annotations

import dataclasses as dc
import json
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from bare import QUICK as QUICK_SHAPE, Bare, Shape, with_weights_of
from measure import Goal, Row, agree, arguments, middle, progress, report, taking_turns
from memory import Alive
from peer import PEERS_RUN, Process
from torch import Tensor

from dovetail.data.corpus import Batch
from dovetail.model.construction import build
from dovetail.model.model import ModelModule
from dovetail.nn.layout import TokenLayout
from dovetail.ops.vocab import chunked_cross_entropy
from dovetail.training.metrics import faster_precision
from dovetail.training.objective import next_token
from dovetail.training.plan import Plan, Precision
from dovetail.training.step import Trainer

GOAL, RATE = Goal(low=1.0), 1e-3
SIDES = ("bare", "trainer", "litgpt", "memory")


@dc.dataclass(frozen=True)
class Work:
    """What every side does in a turn."""

    shape: Shape
    batch: int = 2
    tokens: int = 256
    steps: int = 2  # per turn
    precision: Precision = "fp32"
    threads: int = 2

    def rows(self) -> Tensor:
        """The tokens (batch, tokens + 1)."""
        size = (self.batch, self.tokens + 1)
        return torch.randint(0, self.shape.vocab, size, generator=torch.Generator().manual_seed(0))


class Ours:
    """The trainer of `dovetail train`."""

    def __init__(self, work: Work, model: ModelModule, compiled: bool) -> None:
        plan = Plan(steps=10**6, schedule="constant", learning_rate=RATE, precision=work.precision, compile=compiled)
        self.trainer, self.count, self.at = Trainer(model.train(), next_token, plan), work.steps, 0
        rows = work.rows()
        self.batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), TokenLayout.whole(work.batch, work.tokens))

    def step(self) -> float:
        """Train one step; the loss before it."""
        self.at += 1
        return self.trainer.step(self.batch, self.at, RATE).loss

    def turn(self) -> None:
        for _ in range(self.count):
            self.step()


class ByHand:
    """A loop in plain PyTorch."""

    def __init__(self, work: Work, model: Bare, compiled: bool) -> None:
        self.model, self.count, self.bf16 = model.train(), work.steps, work.precision == "bf16"
        self.inputs, self.labels = (part.contiguous() for part in (work.rows()[:, :-1], work.rows()[:, 1:]))
        decayed = [weight for weight in model.parameters() if weight.dim() > 1]
        plain = [weight for weight in model.parameters() if weight.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
        if compiled:
            for block in model.layers:
                block.compile()

    def step(self) -> float:
        with torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext():
            logits = self.model(self.inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), self.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def turn(self) -> None:
        for _ in range(self.count):
            self.step()


class Peer(Process):
    """A peer in its own process and environment (benchmarks/peers/train_worker.py)."""

    def __init__(self, name: str, work: Work, compiled: bool, fused: bool) -> None:
        shape = {**dc.asdict(work.shape), "batch": work.batch, "tokens": work.tokens, "rate": RATE, "threads": work.threads}
        shape |= {"bf16": work.precision == "bf16", "compiled": compiled, "fused": fused}
        super().__init__(name, "train_worker.py", name, json.dumps(shape))
        self.count = work.steps

    def turn(self) -> None:
        self.ask(steps=self.count)


def compared(name: str, ours: Ours, turn: Callable[[], None], rounds: int, goal: Goal | None) -> Row:
    """Tokens/s of ours ÷ theirs: the ratio of times, since both train on the same number of tokens."""
    with progress(name, rounds + 1) as tick:
        value, spread = middle(taking_turns(ours.turn, turn, rounds, tick))
    return Row(name, value, goal, spread)


def bare_row(work: Work, rounds: int) -> Row:
    """Ours against the loop by hand, after their losses were found equal."""
    model = build(work.shape.spec(), seed=0)
    ours, theirs = Ours(work, model, True), ByHand(work, with_weights_of(model, work.shape), True)
    for i in range(3):
        a, b = torch.tensor(ours.step()), torch.tensor(theirs.step())
        agree(f"loss of step {i}", a, b, 1e-4 if work.precision == "fp32" else 2e-2)
    return compared(f"tokens/s ÷ bare loop, {work.precision}, compiled both", ours, theirs.turn, rounds, GOAL)


def peer_rows(name: str, work: Work, rounds: int) -> list[Row]:
    """Ours against a peer: like for like, and its defaults."""
    default = {"trainer": (False, True), "litgpt": (True, False)}[name]  # (compiled, fused)
    ours, rows = Ours(work, build(work.shape.spec(), seed=0), True), list[Row]()
    ours.step()
    for label, (compiled, fused) in {"compiled both": (True, True), "its defaults": default}.items():
        peer = Peer(name, work, compiled, fused)
        try:
            title = f"tokens/s ÷ {name} {peer.version}, {work.precision}, {label}"
            rows.append(compared(title, ours, peer.turn, rounds, GOAL if compiled and fused else None))
        finally:
            peer.close()
    return rows


def memory_row(vocab: int, tokens: int, width: int) -> Row:
    """Peak of live bytes in the loss and its gradients: chunks ÷ torch's cross_entropy of one matrix of logits."""
    x = torch.randn(1, tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    labels = torch.randint(0, vocab, (1, tokens))
    peaks: list[int] = []
    losses: list[Tensor] = []
    for full in (True, False):
        x.grad = weight.grad = None
        with Alive(x, weight, labels) as alive:
            if full:
                loss = F.cross_entropy((x @ weight.t()).flatten(0, 1), labels.flatten(), reduction="sum")
            else:
                loss = chunked_cross_entropy(lambda part: part @ weight.t(), x, labels).sum
            loss.backward()
        losses.append(loss.detach())
        peaks.append(alive.peak - weight.numel() * weight.element_size())  # both have the gradient of the weight
        del loss
    agree("loss", losses[1], losses[0], 1e-5)
    return Row(f"memory of the loss ÷ full logits, {vocab:,} tokens of vocabulary", peaks[1] / peaks[0], Goal(high=0.25))


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    precision = faster_precision(torch.device("cpu"))
    work = Work(Shape(), precision=precision, threads=args.threads)
    if args.quick:
        work = dc.replace(work, shape=QUICK_SHAPE, tokens=16, precision="fp32")
    rows: list[Row] = []
    for side in args.only:
        if side == "bare":
            rows.append(bare_row(work, args.rounds))
        elif side == "memory":
            rows.append(memory_row(1000, 2048, 8) if args.quick else memory_row(128_000, 8192, 64))
        else:
            rows += peer_rows(side, work, args.rounds)
        torch.compiler.reset()
    report(rows, args.json, peers=PEERS_RUN)


if __name__ == "__main__":
    main()
