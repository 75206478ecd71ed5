"""N-gram embeddings: memory that is looked up by the last tokens themselves, and gated by the residual stream.

    row_h,t = (m_h,0·t_t ⊕ m_h,1·t_{t−1} ⊕ …) mod rows          a hash of the last 2, 3, …, n token ids; ids count from 1
    e_t = [T_h[row_h,t] for every hash h]                       a missing token, before the document, has id 0
    y_t = σ(sgn(s)·√|s|) · W_v e_t                              s = rms(W_k e_t)·rms(x_t)/√embed

The decode state is the last n − 1 ids, whole numbers. Shapes: x, y (…, n, embed)   e (…, n, hashes·piece)   T (hashes, rows,
piece). Cheng et al. 2026 (Engram), without its convolution.
"""

from __future__ import annotations

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.cross_layer import DISCARDED, Values
from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import Linear
from dovetail.nn.module import Module, at_least_fp32
from dovetail.nn.recur import Recurrent
from dovetail.nn.rows import SequenceRows, sequence_rows
from dovetail.nn.view import WHOLE_STATE, StateView
from dovetail.ops.scan.conv import extended, last_inputs
from dovetail.spec.field import bounded
from dovetail.spec.part import register
from dovetail.spec.part_proof import Proof
from dovetail.spec.scope import Scope
from dovetail.spec.weight import Read, State, Weight

NEAR_ZERO = 1e-6  # |s| is at least this, where √ would have an unbounded gradient
MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64
WORD = 2**64


@register("ngram")
class Ngram(Recurrent):
    """Embeddings of the last n tokens, found by hashes of their ids (Engram)."""

    TAPS = {"memory": "pos channel", "gate": "pos channel", "out": "pos channel"}

    n: int = bounded(3, at_least=2, at_most=16)  # tokens of the longest n-gram
    hashes: int = bounded(2, above=0)  # per length of n-gram
    rows: int = bounded(1021, above=0)  # of each table
    piece: int = bounded(16, above=0)  # channels of one row
    seed: int = bounded(0, at_least=0)  # of the hashes

    def axes(self, scope: Scope) -> Scope:
        return scope.add(hashes=(self.n - 1) * self.hashes, rows=self.rows, piece=self.piece, taps=self.n, last=self.n - 1)

    def weights(self, scope: Scope) -> list[Weight]:
        memory = ("hashes", "piece")
        return [
            Weight(name="table", batch=("hashes",), out=("rows",), inp=("piece",), role="embed"),
            Weight(name="k.weight", out=("embed",), inp=memory),
            Weight(name="v.weight", out=("embed",), inp=memory),
            Weight(name="multiplier", out=("taps",), batch=("hashes",), role="const", dtype="int64"),
        ]

    def constant(self, name: str, scope: Scope) -> Tensor:
        """Odd multipliers (hashes, taps), 0 for tokens beyond the n-gram of a hash."""
        used = [length for length in range(2, self.n + 1) for _ in range(self.hashes)]
        many = [[_odd(self.seed, h * self.n + d) if d < length else 0 for d in range(self.n)] for h, length in enumerate(used)]
        return torch.tensor(many, dtype=torch.int64)

    def reads(self, scope: Scope) -> list[Read]:
        return [Read(scope.of_model(), "inputs")]

    def state(self, scope: Scope) -> list[State]:
        return [State(name="ids", axes=("last",), per="sequence", dtype="int64")] if scope.decodes else []


class NgramProof(Proof, of=Ngram):
    """Sampled values."""

    samples = {"n": [3, 2], "hashes": [2, 1], "rows": [13, 17], "piece": [5, 6], "seed": [0, 3]}


def _odd(seed: int, number: int) -> int:
    """An odd number below 2⁶², by splitmix64."""
    z = (seed * WORD // 2 + (number + 1) * MIX[0]) % WORD
    z = (z ^ (z >> 30)) * MIX[1] % WORD
    z = (z ^ (z >> 27)) * MIX[2] % WORD
    return ((z ^ (z >> 31)) >> 2) | 1


class NgramModule(Module, of=Ngram):
    """x (…, n, embed), ids (…, n) -> like x."""

    part: Ngram
    table: Tensor
    k: Linear
    v: Linear
    multiplier: Tensor

    def forward(self, x: Tensor, ctx: Ctx, view: StateView = WHOLE_STATE, values: Values = DISCARDED) -> Tensor:
        seq = sequence_rows(ctx.layout)
        x, carry = view.read(seq.spread(x))
        ids = seq.only_real(seq.spread(values["inputs"]) + 1)
        rows, last = self.found(ids, seq, None if seq.begins or carry is None else carry[0])
        memory = F.embedding(rows, self.table.flatten(0, 1)).flatten(-2)
        memory = ctx.tap(self, "memory", memory.to(x.dtype))
        y = ctx.tap(self, "gate", self.gate(x, memory, ctx)) * self.v(memory, ctx)
        return ctx.tap(self, "out", seq.gather(view.write(y, last)))

    def found(self, ids: Tensor, seq: SequenceRows, last: Tensor | None) -> tuple[Tensor, Tensor]:
        """The rows (rows, n, hashes) of all tables as one, and the last ids of each row; ids (rows, n) count from 1."""
        n, back = ids.shape[1], self.part.n - 1
        longer, document = extended(ids[..., None], back, seq, None if last is None else last[:, None])
        key = torch.zeros_like(longer[:, back:] * self.multiplier[:, 0])
        for d in range(self.part.n):
            before = longer[:, back - d : back - d + n]
            if document is not None and d:
                before = before * (document[:, back - d : back - d + n] == document[:, back:])[..., None]
            key = key ^ (before * self.multiplier[:, d])  # whole numbers wrap around
        offset = torch.arange(key.shape[-1], device=key.device) * self.part.rows
        return key.remainder(self.part.rows) + offset, last_inputs(longer, document, back, seq.ends)[..., 0]

    def gate(self, x: Tensor, memory: Tensor, ctx: Ctx) -> Tensor:
        """(rows, n, 1), how much a token takes of what was found."""
        dtype, width = at_least_fp32(x.dtype), x.shape[-1:]
        both = (F.rms_norm(one.to(dtype), width, eps=NEAR_ZERO) for one in (self.k(memory, ctx), x))
        s = torch.mul(*both).sum(-1, keepdim=True) / sqrt(width[0])
        return torch.sigmoid(s.sign() * s.abs().clamp_min(NEAR_ZERO).sqrt()).to(x.dtype)
