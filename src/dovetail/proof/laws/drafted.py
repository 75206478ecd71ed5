"""Law 25, drafted: `model.draft` with a decode state computes what multi-token prediction computes over a full forward pass.

    whole pass   hᵏ of every token at once, from the taps mtp.k.hidden
    drafting     the same hidden states in chunks and token by token, batched and flat, after a roll-back, on every layout

Further: packed documents have the hidden states of each document alone, and the added loss of a depth is λ/K times the mean
cross-entropy of its head's logits, with the labels shifted here again, by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dovetail.construction import generator
from dovetail.core.ctx import Ctx, Listener, Losses
from dovetail.core.layout import TokenLayout
from dovetail.proof.laws.case import BATCH, DTYPE, Case, N, NotApplicable, law
from dovetail.proof.laws.loss import IGNORED, cross_entropy
from dovetail.proof.laws.sequence import LAYOUTS
from dovetail.state.pool import Pool, Step

CHUNKINGS = {"in chunks": [(5,) * 3, (1,) * 3, (8,) * 3], "ragged": [(7, 3, 12), (1, 9, 1), (1, 0, 2), (4, 1, 1)]}
DOCUMENTS = ((9, 12), (1, 2, 11), (20,))
WRONG = 2  # tokens that are drafted and rolled back


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
    wrong = pool.step(range(BATCH), [len(one) for one in states], flat)
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
        for k, hidden in enumerate(states, 1):
            logits = case.model.logits_ahead(hidden, Ctx(layout=TokenLayout.whole(BATCH, N - k)), k)
            last = k if given is not None else k + 1  # the token that is predicted, or the one before it, is in the document
            places = [(row, i) for row, end in enumerate(ends) for i in range(len(end)) if i + last < end[i]]
            targets = torch.stack([case.inputs[row, i + k + 1] if given is None else given[row, i + k] for row, i in places])
            mean = cross_entropy(torch.stack([logits[place] for place in places]), targets)
            share = case.spec.mtp[k - 1].weight / len(states)
            case.same(losses[f"mtp.{k - 1}.loss"], share * mean, f"the loss of depth {k} over documents {documents}, {name}")
