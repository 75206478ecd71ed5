"""Law 25, drafted: `model.draft` with a decode state computes what multi-token prediction computes over a full forward pass.

    whole pass   hᵏ of every token at once, from the taps mtp.k.hidden
    drafting     the same hidden states in chunks and token by token, batched and flat, after a roll-back, on every layout

A depth that recurs (EAGLE) reads its own hidden states behind those of the model:

    ĥₘ₋₁₊ⱼ = depth(h₀ … hₘ₋₂ ĥₘ₋₁ … ĥₘ₋₂₊ⱼ, E(t₁ … tₘ₋₁₊ⱼ)), its last position      each from a pass of its own, uncached

and its hidden states from a cache, position by position, are these; so they are again after these positions were rolled back.

Further: packed documents have the hidden states of each document alone, and the added loss of a depth is 1/K times the sum of
its declared terms, means over tokens with a label, which are written out here again, with the labels shifted by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dovetail.model.construction import generator
from dovetail.nn.ctx import Ctx, Listener, Losses
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import BATCH, DTYPE, Case, N, NotApplicable, law
from dovetail.proof.laws.loss import IGNORED, cross_entropy
from dovetail.proof.laws.sequence import LAYOUTS
from dovetail.state.pool import Layout, Pool, Step

CHUNKINGS = {"in chunks": [(5,) * 3, (1,) * 3, (8,) * 3], "ragged": [(7, 3, 12), (1, 9, 1), (1, 0, 2), (4, 1, 1)]}
DOCUMENTS = ((9, 12), (1, 2, 11), (20,))
WRONG = 2  # tokens that are drafted and rolled back
KNOWN, RECURRED = (9, 2, 14), 3  # tokens of each row whose hidden states are known, and positions that a depth adds by itself


@law(25, "drafted", "drafting from a cache equals multi-token prediction over a full forward pass, which has the declared loss")
@torch.no_grad()
def drafted(case: Case) -> None:
    """Compare hidden states and logits of every depth; then packed documents and losses."""
    if not case.spec.mtp:
        raise NotApplicable("no multi-token prediction")
    want = _whole(case, case.inputs, TokenLayout.whole(BATCH, N))
    hidden = case.model.hidden(case.inputs, case.ctx())[0]
    for kind in LAYOUTS:
        for name, chunking in CHUNKINGS.items():
            for flat in (False, True):
                pool = Pool(case.spec, BATCH, N + WRONG, layout=kind, dtype=DTYPE, page=4, slack=3, drafts=True)
                for lengths in chunking:
                    how = f"{kind}, {name}{', flat' if flat else ''}"
                    _step(case, pool, hidden, want, lengths, flat, how)
    if any(depth.recurs for depth in case.spec.mtp):
        for kind in LAYOUTS:
            _recursion(case, hidden, kind)
    _packed(case)
    for documents in (((N,),) * BATCH, DOCUMENTS):
        _losses(case, documents)


def _whole(case: Case, tokens: Tensor, layout: TokenLayout, **more: Any) -> list[Tensor]:
    """The hidden states (…, n − k, embed) of every depth."""
    found: dict[str, Tensor] = {}
    names = [f"mtp.{i}.hidden" for i in range(len(case.spec.mtp))]
    ctx = case.ctx(layout=layout, taps=Listener(dict.fromkeys(names, found.__setitem__)), **more)
    case.model.hidden(tokens, ctx)
    return [found[name] for name in names]


def _step(case: Case, pool: Pool, hidden: Tensor, want: Sequence[Tensor], lengths: Sequence[int], flat: bool, how: str) -> None:
    """Draft wrong tokens, roll them back, and draft the next lengths[i] tokens of each row, at every depth."""
    begin = list(pool.lengths)
    spans = [(a, min(a + m, N - len(want))) for a, m in zip(begin, lengths, strict=True)]  # so many know all next tokens
    for row in range(BATCH):
        pool.mark(row)
    first = states = [hidden[row, : b - a + WRONG] for row, (a, b) in enumerate(spans)]
    wrong = pool.step(range(BATCH), [len(state) for state in states], flat)
    for k in range(1, len(want) + 1):
        _, states = _run(case, wrong, first, states, [case.inputs[row, -len(one) :] for row, one in enumerate(states)], k, flat)
    starts = [pool.rollback(row, length) for row, length in enumerate(begin)]
    spans = [(start, b) for start, (_, b) in zip(starts, spans, strict=True)]
    step = pool.step(range(BATCH), [b - a for a, b in spans], flat)
    first = states = [hidden[row, a:b] for row, (a, b) in enumerate(spans)]
    for k, whole in enumerate(want, 1):
        tokens = [case.inputs[row, a + k : b + k] for row, (a, b) in enumerate(spans)]
        logits, states = _run(case, step, first, states, tokens, k, flat)
        for row, (a, b) in enumerate(spans):
            case.same(states[row], whole[row, a:b], f"{how}: depth {k} of row {row}, from a cache and in a full forward pass")
            one = Ctx(layout=TokenLayout.whole(1, b - a))
            if a < b:
                full = case.model.logits_ahead(whole[row : row + 1, a:b], one, k)[0]
                case.same(logits[row], full, f"{how}: logits at depth {k} of row {row}")


def _run(
    case: Case, step: Step, hidden: list[Tensor], before: list[Tensor], tokens: list[Tensor], depth: int, flat: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Run one depth over the rows, joined as the layout says; return the logits and the hidden states of each row."""
    counts = [len(one) for one in hidden]
    ctx = Ctx(layout=step.layout, views=step.views)
    join = torch.cat if flat else partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    outputs = case.model.draft(join(hidden), join(tokens), ctx, depth, join(before))
    if flat:
        return list(outputs[0].split(counts)), list(outputs[1].split(counts))
    logits, states = ([x[row, :count] for row, count in enumerate(counts)] for x in outputs)
    return logits, states


def by_hand(case: Case, hidden: Tensor, tokens: Tensor) -> Tensor:
    """The hidden states of a depth that recurs, at positions m − 1 to len(tokens) − 2 of a row of tokens (n,): each from a full
    forward pass over the hidden states of the model at the first positions, (m, embed), and its own behind them."""
    states, known = hidden[None], len(hidden) + 1
    for n in range(known - 1, len(tokens)):
        new = case.model.hidden_ahead(states, tokens[None, 1 : n + 1], _one_row(case, n))
        states = torch.cat([states, new[:, -1:]], 1)
    return states[0, known - 1 :]


def _one_row(case: Case, n: int) -> Ctx:
    return case.ctx(layout=TokenLayout.whole(1, n))


def _recursion(case: Case, hidden: Tensor, kind: Layout) -> None:
    """Read the known positions of each row, then some of the depth's own, roll these back, and read them again."""
    pool = Pool(case.spec, BATCH, N + RECURRED, layout=kind, dtype=DTYPE, page=4, slack=RECURRED, drafts=True)
    first = [hidden[row, : known - 1] for row, known in enumerate(KNOWN)]
    tokens = [case.inputs[row, : known + RECURRED] for row, known in enumerate(KNOWN)]
    want = [by_hand(case, states, row) for states, row in zip(first, tokens, strict=True)]
    step = pool.step(range(BATCH), [known - 1 for known in KNOWN])
    _, states = _run(case, step, first, first, [case.inputs[row, 1:known] for row, known in enumerate(KNOWN)], 1, False)
    for attempt in ("from a cache", "after a roll-back"):
        for row in range(BATCH):
            pool.mark(row)
        last = [state[-1:] for state in states]
        for j in range(RECURRED + 1):
            for row, state in enumerate(last):
                case.same(state[0], want[row][j], f"{kind}, {attempt}: hidden state {j} behind row {row}, and by hand")
            if j < RECURRED:
                added = [row[known + j : known + j + 1] for row, known in zip(tokens, KNOWN, strict=True)]
                _, last = _run(case, pool.step(range(BATCH), [1] * BATCH), last, last, added, 1, False)
        for row, known in enumerate(KNOWN):
            case.true(pool.rollback(row, known - 1) == known - 1, f"{kind}: row {row} does not return to its mark")


def _packed(case: Case) -> None:
    """Compare documents packed in rows with each alone."""
    got = _whole(case, case.inputs, TokenLayout.packed(DOCUMENTS, N))
    for row, lengths in enumerate(DOCUMENTS):
        begin = 0
        for length in lengths:
            tokens = case.inputs[row : row + 1, begin : begin + length]
            if length > len(got):
                for k, want in enumerate(_whole(case, tokens, TokenLayout.whole(1, length)), 1):
                    packed = got[k - 1][row, begin : begin + length - k]
                    case.same(packed, want[0], f"depth {k}: a document of {length} tokens packed and alone")
            begin += length


def _losses(case: Case, documents: Sequence[Sequence[int]]) -> None:
    """Compare the added losses with the cross-entropy of the logits, of documents packed in rows."""
    labels = torch.randint(0, case.spec.vocab, (BATCH, N), generator=generator(case.seed, "labels"))
    labels[:, ::4] = IGNORED
    layout = TokenLayout.packed(documents, N)
    ends = [[end for end, m in zip(accumulate(lengths), lengths, strict=True) for _ in range(m)] for lengths in documents]
    for name, given in (("labels", labels), ("tokens", None)):
        losses: dict[str, Tensor] = {}
        states = _whole(case, case.inputs, layout, losses=Losses(losses), labels=given)
        of_model = case.model.hidden(case.inputs, case.ctx(layout=layout))[0]
        model_logits = case.model.head(of_model, case.ctx(layout=layout))
        for k, hidden in enumerate(states, 1):
            logits = case.model.logits_ahead(hidden, Ctx(layout=TokenLayout.whole(BATCH, N - k)), k)
            last = k if given is not None else k + 1  # the token that is predicted, or the one before it, is in the document
            places = [(row, i) for row, end in enumerate(ends) for i in range(len(end)) if i + last < end[i]]
            targets = torch.stack([case.inputs[row, i + k + 1] if given is None else given[row, i + k] for row, i in places])
            counted = [place for place, target in zip(places, targets, strict=True) if target != IGNORED]
            got, own = (torch.stack([x[place] for place in counted]) for x in (hidden, logits))
            later, probs = (torch.stack([x[row, i + k] for row, i in counted]) for x in (of_model, model_logits))
            means = {
                "labels": cross_entropy(own, targets[targets != IGNORED]),
                "hidden": smooth_l1(got - later).mean(),
                "probs": soft_cross_entropy(own, probs),
            }
            terms = case.spec.mtp[k - 1].loss_terms()
            want = torch.stack([factor * means[name] for name, factor in terms.items()]).sum() / len(states)
            case.same(losses[f"mtp.{k - 1}.loss"], want, f"the loss of depth {k} over documents {documents}, {name}")


def smooth_l1(difference: Tensor) -> Tensor:
    """d²/2 where |d| < 1, else |d| − 1/2."""
    size = difference.abs()
    return torch.where(size < 1, size * size / 2, size - 0.5)


def soft_cross_entropy(logits: Tensor, of_model: Tensor) -> Tensor:
    """The mean over tokens of log Σ_v e^(l_v) − Σ_v p_v l_v, where p are the probs of the model."""
    exponentials = (of_model - of_model.amax(-1, keepdim=True)).exp()
    probs, top = exponentials / exponentials.sum(-1, keepdim=True), logits.amax(-1, keepdim=True)
    return ((logits - top).exp().sum(-1).log() + top[:, 0] - (probs * logits).sum(-1)).mean()
