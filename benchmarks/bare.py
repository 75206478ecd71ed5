"""Overhead: tokens/s of a Llama built from its spec ÷ the same model written by hand in plain PyTorch.

Both run in fp32 with the same kernels (scaled_dot_product_attention, rms_norm, linear, rotary tables once per step), eagerly
and compiled. Training is forward, loss, backward and fused AdamW; compiled, the loss is one graph. Decoding is greedy, one
token at a time after a prompt: ours with a pool, the other with preallocated caches and a slice per step; the two alternate
token by token. Compiled, both have their weights frozen into the graph, with the same settings (decoding.py).

    python benchmarks/bare.py [--rounds 21] [--eager] [--json]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses as dc
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from measure import Goal, Row, agree, arguments, middle, progress, report, taking_steps, taking_turns
from torch import Tensor, nn

from dovetail import Ctx, Model, Pool, TokenLayout, from_yaml
from dovetail.decoding.steps import OPTIONS, Decoder, frozen
from dovetail.model.construction import build
from dovetail.model.model import ModelModule
from dovetail.nn.draws import Draws

GOAL, TRAIN_GOAL = Goal(low=0.97), Goal(low=0.99)


@dc.dataclass(frozen=True)
class Shape:
    """The sizes of the model and of the work."""

    width: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    hidden: int = 1408
    vocab: int = 32_000
    train_batch: int = 1
    train_tokens: int = 256
    prompt: int = 128
    new: int = 32

    def spec(self) -> Model:
        """The model as a spec."""
        return from_yaml(f"""
            dovetail: 1
            width: {self.width}
            vocab: {self.vocab}
            layers:
            - repeat: {self.layers}
              mixer: {{heads: {self.heads}, kv_heads: {self.kv_heads}}}
              ffn: {{hidden: {self.hidden}}}
            head: {{kind: lm, tied: false}}
        """)


QUICK = Shape(width=24, layers=2, heads=6, kv_heads=2, hidden=44, vocab=62, train_tokens=16, prompt=8, new=4)

# -- the model by hand -----------------------------------------------------------------------------------------------

Cache = tuple[Tensor, Tensor]  # keys and values (batch, capacity, kv_heads, head)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class BareAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.q = nn.Linear(shape.width, shape.heads * self.head, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.o = nn.Linear(shape.heads * self.head, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, start: int) -> Tensor:
        batch, n, _ = x.shape
        q = rotate(self.q(x).view(batch, n, -1, self.head), cos, sin)
        k = rotate(self.k(x).view(batch, n, -1, self.head), cos, sin)
        v = self.v(x).view(batch, n, -1, self.head)
        if cache is not None:
            keys, values = cache
            keys[:, start : start + n] = k
            values[:, start : start + n] = v
            k, v = keys[:, : start + n], values[:, : start + n]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1, enable_gqa=True)
        return self.o(z.transpose(1, 2).reshape(batch, n, -1))


class BareFfn(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class BareBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.mixer_norm, self.mixer = nn.RMSNorm(shape.width, eps=1e-5), BareAttention(shape)
        self.ffn_norm, self.ffn = nn.RMSNorm(shape.width, eps=1e-5), BareFfn(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None, start: int) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), cos, sin, cache, start)
        return x + self.ffn(self.ffn_norm(x))


class Bare(nn.Module):
    """A Llama in plain PyTorch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(BareBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        pairs = shape.width // shape.heads // 2
        frequency = 10000.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        self.register_buffer("frequency", frequency.float(), persistent=False)

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None, start: int = 0) -> Tensor:
        angle = torch.arange(start, start + tokens.shape[1])[:, None, None] * self.frequency  # (n, 1, pairs)
        x = self.embed(tokens)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for i, block in enumerate(self.layers):
            x = block(x, cos, sin, None if caches is None else caches[i], start)
        return self.head(self.norm(x if caches is None else x[:, -1:]))  # decoding takes the last logits alone


def with_weights_of(model: ModelModule, shape: Shape) -> Bare:
    """The plain model, with copies of our parameters: compiled decoding makes q, k and v views of one storage, which torch
    misreads where another model freezes them."""
    bare = Bare(shape)
    ours = dict(model.named_parameters())
    names = {"embed.weight": "embed.table", "head.weight": "head.out.weight"}
    for name, _ in list(bare.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        source = names.get(name) or (name if name in ours else f"{owner}.scale")
        bare.get_submodule(owner).register_parameter(leaf, nn.Parameter(ours.pop(source).detach().clone()))
    assert not ours, f"weights that were not used: {sorted(ours)}"
    return bare


# -- the work --------------------------------------------------------------------------------------------------------


def training(
    shape: Shape, model: ModelModule, bare: Bare, compiled: bool = False
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """One training step per side, on the same tokens; each returns its loss."""
    tokens = torch.randint(0, shape.vocab, (shape.train_batch, shape.train_tokens + 1))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    our_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    bare_optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3, fused=True)

    def our_loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return model.loss(inputs, labels, Ctx(layout=TokenLayout.whole(*inputs.shape), draws=Draws(0)))

    def bare_loss(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(bare(inputs).flatten(0, 1), labels.flatten())

    if compiled:
        our_loss, bare_loss = (torch.compile(loss, fullgraph=True) for loss in (our_loss, bare_loss))

    def ours() -> Tensor:
        loss = our_loss(inputs, labels)
        loss.backward()
        our_optimizer.step()
        our_optimizer.zero_grad()
        return loss.detach()

    def theirs() -> Tensor:
        loss = bare_loss(inputs, labels)
        loss.backward()
        bare_optimizer.step()
        bare_optimizer.zero_grad()
        return loss.detach()

    return ours, theirs


class Greedy:
    """Greedy decoding behind a prompt (rows, n): `step(i)` decodes the i-th token of each row, and begins again at 0."""

    @torch.no_grad()
    def __init__(self, decoder: Decoder, prompt: Tensor) -> None:
        self.decoder, self.prompt, self.rows = decoder, prompt, range(len(prompt))
        self.prefill()
        self.compile_seconds = decoder.warm_up(self.rows)

    @torch.no_grad()
    def prefill(self) -> None:
        """Feed the prompt to rows that are empty."""
        self.first = self.last = self.decoder.step(self.prompt, self.rows).max(-1, keepdim=True).indices

    @torch.no_grad()
    def step(self, i: int) -> Tensor:
        """The i-th token of each row (rows, 1)."""
        if i == 0:
            self.last = self.first
            for row in self.rows:
                self.decoder.pool.rollback(row, self.prompt.shape[1])
        self.last = self.decoder.step(self.last, self.rows).max(-1, keepdim=True).indices
        return self.last


class BareGreedy:
    """The same by the plain model: caches that are allocated once, and a slice of them per step."""

    @torch.no_grad()
    def __init__(self, bare: Bare, shape: Shape, prompt: Tensor, capacity: int, compiled: bool = False) -> None:
        size, dtype = (len(prompt), capacity, shape.kv_heads, shape.width // shape.heads), bare.head.weight.dtype
        self.caches = [(torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)) for _ in range(shape.layers)]
        self.bare, self.prompt, self.compiled = bare, prompt, compiled
        self.graph = torch.compile(bare, fullgraph=True, options=OPTIONS) if compiled else bare
        self.prefill()

    @torch.no_grad()
    def prefill(self) -> Tensor:
        """Feed the prompt; the first token of each row (rows, 1)."""
        self.first = self.last = self.bare(self.prompt, self.caches).max(-1).indices
        return self.first

    @torch.no_grad()
    def step(self, i: int) -> Tensor:
        """The i-th token of each row behind the first (rows, 1)."""
        tokens, start = self.last if i else self.first, self.prompt.shape[1] + i
        with frozen() if self.compiled else nullcontext():
            self.last = self.graph(tokens, self.caches, start).max(-1).indices
        return self.last


def decoding(
    shape: Shape, spec: Model, model: ModelModule, bare: Bare, batch: int, compiled: bool = False
) -> tuple[Callable[[int], Tensor], Callable[[int], Tensor]]:
    """Greedy decoding per side, after a prefilled prompt; each returns its i-th token (batch, 1), and starts again at 0."""
    prompt, capacity = torch.randint(0, shape.vocab, (batch, shape.prompt)), shape.prompt + shape.new + 4
    ours = Greedy(Decoder(model, Pool(spec, rows=batch, capacity=capacity), compiled=compiled), prompt)
    theirs = BareGreedy(bare, shape, prompt, capacity, compiled)
    agree("prompt", ours.first.double(), theirs.first.double(), 0.0)
    return ours.step, theirs.step


def row_of(name: str, ratios: Sequence[float], goal: Goal = GOAL) -> Row:
    """Tokens/s of ours ÷ theirs: the ratio of times, since both process the same tokens."""
    value, spread = middle(ratios)
    return Row(name, value, goal, spread)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=21, help="paired rounds of each figure")
    parser.add_argument("--eager", action="store_true", help="leave out the compiled sides, which take minutes to make")
    flags: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(flags.threads)
    torch.manual_seed(0)
    shape = QUICK if flags.quick else Shape()
    spec = shape.spec()
    model = build(spec)
    bare = with_weights_of(model, shape)
    rows: list[Row] = []

    tokens = torch.randint(0, shape.vocab, (2, shape.prompt))
    with torch.inference_mode():
        agree("logits", model(tokens, Ctx(layout=TokenLayout.whole(*tokens.shape))), bare(tokens), 1e-4)
    forms = (False,) if flags.eager else (False, True)
    for compiled, batch in ((compiled, batch) for compiled in forms for batch in (1, 8)):
        ours, theirs = decoding(shape, spec, model, bare, batch, compiled)
        for i in range(shape.new):
            agree(f"token {i} at batch {batch}", ours(i).double(), theirs(i).double(), 0.0)
        name = f"decode tokens/s, {'compiled' if compiled else 'eager'}, batch {batch}: ours ÷ bare"
        with progress(name, flags.rounds + 1) as tick:
            rows.append(row_of(name, taking_steps(ours, theirs, shape.new, flags.rounds, tick)))
        torch.compiler.reset()

    for compiled in forms:
        ours, theirs = training(shape, copy.deepcopy(model), copy.deepcopy(bare), compiled)
        for step in range(2):
            agree(f"loss of step {step}", ours(), theirs(), 1e-4)
        name = f"train tokens/s, {'compiled' if compiled else 'eager'}: ours ÷ bare"
        with progress(name, flags.rounds + 1) as tick:
            rows.append(row_of(name, taking_turns(ours, theirs, flags.rounds, tick), TRAIN_GOAL))
    report(rows, flags.json)


if __name__ == "__main__":
    main()
