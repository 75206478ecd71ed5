"""The logits of a side at every sampled token of the rollouts.

    row i of a rollout's logits predicts its token i + 1; the log-prob of the token at position j is in row j − 1

Rollouts run in batches, padded on the right: a causal model sees no padding. Rows × vocabulary are bounded, so that a file of
any length is explained by some of its rollouts, taken evenly.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dovetail.base.errors import FileError, NonFiniteError, SpecError
from dovetail.decoding.generation import check_generates
from dovetail.proof.compare.float64 import float32_islands_widened
from dovetail.proof.compare.prompt import Prompt
from dovetail.proof.compare.sides import Side
from dovetail.proof.rollouts.file import Rollout
from dovetail.spec.fold import position_limit

BATCH_TOKENS = 4096  # per forward pass, where one row is not longer
MOST_VALUES = 2**26  # logits that are in memory at once per side
BEFORE = 2  # rows before that of the first sampled token, for the alignments


@dc.dataclass(frozen=True)
class Alignment:
    """Which row of logits and which token the log-prob at a position belongs to, as offsets from the right ones."""

    row: int = 0
    token: int = 0


RIGHT = Alignment()
SHIFTED = {
    Alignment(1, 1): "the log-prob of the next token",
    Alignment(-1, -1): "the log-prob of the token before",
    Alignment(1, 0): "the token's log-prob in the logits after it",
    Alignment(-1, 0): "the token's log-prob in the logits one position early",
}


class Sampled:
    """Every sampled token of some rollouts: its rollout, position and sampler's log-prob, each (n,)."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = list(rollouts)
        places = [(i, j) for i, one in enumerate(rollouts) for j, sampled in enumerate(one.sampled) if sampled]
        self.rollout = torch.tensor([i for i, _ in places])
        self.position = torch.tensor([j for _, j in places])
        self.logprobs = torch.tensor([rollouts[i].logprobs[j] for i, j in places], dtype=torch.float64)
        lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])
        self.starts = torch.tensor([max(rollout.first - 1 - BEFORE, 0) for rollout in rollouts])  # first stored row of each
        rows = lengths - self.starts
        self.bases = rows.cumsum(0) - rows
        self.rows = int(rows.sum())
        self.ids = torch.tensor([token for rollout in rollouts for token in rollout.tokens])
        self.first_id = lengths.cumsum(0) - lengths
        self.sampled = torch.tensor([sampled for rollout in rollouts for sampled in rollout.sampled])
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.position)

    def pairs(self, alignment: Alignment = RIGHT) -> tuple[Tensor, Tensor, Tensor]:
        """(valid, rows, tokens): which sampled tokens have a log-prob in this alignment, and for those the row of the stored
        logits and the token id."""
        row, place = self.position - 1 + alignment.row, self.position + alignment.token
        start, length = self.starts[self.rollout], self.lengths[self.rollout]
        valid = (row >= start) & (row < length) & (place >= 0) & (place < length)
        at = self.first_id[self.rollout] + place.clamp(min=0).minimum(length - 1)
        if alignment.token:
            valid = valid & self.sampled[at]
        return valid, (self.bases[self.rollout] + row - start)[valid], self.ids[at][valid]

    def target_logprobs(self, logits: Tensor) -> Tensor:
        """(n,) the log-prob of each sampled token in stored logits (rows, vocab), in float64."""
        _, rows, tokens = self.pairs()
        return _chosen(logits[rows], tokens)


def _chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    chunk = max(1, 2**22 // logits.shape[1])
    parts = zip(logits.split(chunk), tokens.split(chunk), strict=True)
    return torch.cat([rows.double().log_softmax(1).gather(1, ids[:, None])[:, 0] for rows, ids in parts])


def check_rollouts(side: Side, rollouts: Sequence[Rollout], path: str) -> None:
    """Raise where the model cannot have generated a rollout: it does not predict tokens, a token is beyond its vocabulary, a
    rollout is longer than its table of positions."""
    spec = side.spec
    if spec is None:
        return
    if spec.encoder is not None:
        raise SpecError("encoder", f"{side.label} is an encoder–decoder; only rollouts of decoders are explained")
    check_generates(spec)
    longest = position_limit(spec)
    for rollout in rollouts:
        if (largest := max(rollout.tokens)) >= spec.vocab:
            raise FileError(f"{path}:{rollout.line}: token {largest} is beyond the vocabulary of {spec.vocab} of {side.label}")
        if longest is not None and len(rollout.tokens) > longest:
            raise FileError(f"{path}:{rollout.line}: has {len(rollout.tokens)} tokens; {side.label} takes at most {longest}")


def some_rollouts(rollouts: Sequence[Rollout], vocab: int) -> list[Rollout]:
    """As many rollouts as have at most MOST_VALUES logits together, evenly taken; at least one."""
    rows = sum(len(rollout.tokens) - max(rollout.first - 1 - BEFORE, 0) for rollout in rollouts)
    count = max(1, min(len(rollouts), MOST_VALUES * len(rollouts) // max(1, rows * vocab)))
    return [rollouts[i * len(rollouts) // count] for i in range(count)]


@torch.no_grad()
def logit_rows(side: Side, rollouts: Sequence[Rollout], dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yield (index, logits (n, vocab)) of every rollout, run by a side in a dtype."""
    module = side.module(dtype).eval()
    for batch in _batches(rollouts):
        n = max(len(rollouts[i].tokens) for i in batch)
        ids = torch.tensor([rollouts[i].tokens + [0] * (n - len(rollouts[i].tokens)) for i in batch])
        with float32_islands_widened(dtype):
            logits = side.forward(module, Prompt(ids, n))
        for k, i in enumerate(batch):
            own = logits[k, : len(rollouts[i].tokens)]
            if not bool(own.isfinite().all()):
                raise NonFiniteError(f"{side.label}: the logits of line {rollouts[i].line} hold NaN or infinity in {dtype}")
            yield i, own


def _batches(rollouts: Sequence[Rollout]) -> Iterator[list[int]]:
    """Indices of rollouts of similar length, as many as fit into a forward pass."""
    batch: list[int] = []
    for i in sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].tokens)):
        if batch and (len(batch) + 1) * len(rollouts[batch[0]].tokens) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def stored_logits(side: Side, sampled: Sampled, dtype: torch.dtype) -> Tensor:
    """(rows, vocab) the logits of every stored row, in at least float32."""
    parts: dict[int, Tensor] = {}
    for i, logits in logit_rows(side, sampled.rollouts, dtype):
        parts[i] = logits[int(sampled.starts[i]) :].to(torch.float32).clone()
    return torch.cat([parts[i] for i in range(len(sampled.rollouts))])


def side_logprobs(side: Side, sampled: Sampled, dtype: torch.dtype) -> Tensor:
    """(n,) the log-prob of every sampled token, in float64, without storing the logits."""
    result = torch.empty(len(sampled), dtype=torch.float64)
    for i, logits in logit_rows(side, sampled.rollouts, dtype):
        here = sampled.rollout == i
        position = sampled.position[here]
        tokens = torch.tensor(sampled.rollouts[i].tokens)[position]
        result[here] = _chosen(logits[position - 1], tokens)
    return result
